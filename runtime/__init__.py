"""The actor runtime: actors, mailboxes, supervision, regions. It knows nothing of conversations."""

if __name__ != "turnkeeper.runtime":
    raise ImportError(
        f"import turnkeeper.runtime, not {__name__}: a second copy would share nothing"
    )

from ._actor import Actor, ActorContext
from ._backend import OneShot, clear_stray_cancellation, thread_caller
from ._dead_letters import DeadLetters
from ._effects import Effect
from ._event_stream import EventStream, Subscription
from ._log import add_actor, bind_log
from ._mailbox import Mailbox, Overflow
from ._messages import Delivery, Message
from ._portal import Portal
from ._ref import Ref
from ._region import Region
from ._reports import (
    DeadLetter,
    Failure,
    RegionOverflow,
    Restart,
    Stopped,
    Stuck,
    Terminated,
)
from ._runtime import LeftUndone, Runtime
from ._supervision import Backoff, Directive, Strategy, Supervision
from ._supervisor import Supervisor
from ._timers import Timer, Timers
from ._tree import ActorState, HandlingTimes, Tree
from .errors import (
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
    "Mailbox",
    "MailboxFull",
    "Message",
    "NotAnsweredInTime",
    "NotDelivered",
    "NotStartedInTime",
    "OneShot",
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
    "clear_stray_cancellation",
    "format_id",
    "thread_caller",
]
