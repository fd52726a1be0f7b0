"""The actor runtime: actors, mailboxes, supervision, regions. It knows no conversations.

Primitives for authors of journals and adapters are in `turnkeeper.runtime.lowlevel`; a simulator
and a virtual clock for tests are in `turnkeeper.runtime.testing`.
"""

if __name__ != "turnkeeper.runtime":
    raise ImportError(
        f"import turnkeeper.runtime, not {__name__}: a second copy would share nothing"
    )

from ._actor import Actor, ActorContext
from ._dead_letters import DeadLetters
from ._effects import Effect
from ._event_stream import EventStream, Subscription
from ._log import add_actor, bind_log
from ._mailbox import MailboxSettings, Overflow
from ._messages import Delivery, Message
from ._portal import Portal
from ._ref import Ref, Terminated
from ._region import Region
from ._reports import (
    DeadLetter,
    Failure,
    LoopBlocked,
    RegionOverflow,
    Restart,
    Stopped,
    Stuck,
)
from ._runtime import LeftUndone, Runtime
from ._supervision import Backoff, Directive, Strategy, Supervision
from ._supervisor import Supervisor
from ._timers import Timer, Timers
from ._tree import ActorState, HandlingTimes, Tree
from .errors import (
    ActorEnded,
    ActorFailed,
    AskCycle,
    InvariantViolation,
    MailboxFull,
    NotAnsweredInTime,
    NotDelivered,
    NotStartedInTime,
    OutcomeUnknown,
    OwnershipLost,
    Refused,
    TooManyRestarts,
    TooManyThreads,
    TurnkeeperError,
    Unavailable,
)
from .ports import Blocking, DaemonThreads, Ids, Ports, format_id

__all__ = [
    "Actor",
    "ActorContext",
    "ActorEnded",
    "ActorFailed",
    "ActorState",
    "AskCycle",
    "Backoff",
    "Blocking",
    "DaemonThreads",
    "DeadLetter",
    "DeadLetters",
    "Delivery",
    "Directive",
    "Effect",
    "EventStream",
    "Failure",
    "HandlingTimes",
    "Ids",
    "InvariantViolation",
    "LeftUndone",
    "LoopBlocked",
    "MailboxFull",
    "MailboxSettings",
    "Message",
    "NotAnsweredInTime",
    "NotDelivered",
    "NotStartedInTime",
    "OutcomeUnknown",
    "Overflow",
    "OwnershipLost",
    "Portal",
    "Ports",
    "Ref",
    "Refused",
    "Region",
    "RegionOverflow",
    "Restart",
    "Runtime",
    "Stopped",
    "Strategy",
    "Stuck",
    "Subscription",
    "Supervision",
    "Supervisor",
    "Terminated",
    "Timer",
    "Timers",
    "TooManyRestarts",
    "TooManyThreads",
    "Tree",
    "TurnkeeperError",
    "Unavailable",
    "add_actor",
    "bind_log",
    "format_id",
]
