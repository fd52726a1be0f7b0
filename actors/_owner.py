"""What the owner knows while it decides: its working state, and what a decision is.

Pure values. `Owner.apply` folds a decision into the working state; when the commit fails, all of
it is thrown away with the actor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from turnkeeper.runtime import format_id

from .commands import OnOverlap
from .events import Event, LoggedEvent
from .state import ConversationState
from .turns import KnownMessage

__all__ = [
    "Decision",
    "Owner",
    "Policy",
    "Stamp",
    "StartTurn",
    "StopTurn",
    "TurnEffect",
    "Unfinished",
]

RECENT_EVENTS_MAX = 256

Unfinished = Literal["end", "resume"]
"""What becomes of a turn whose owner stopped: it ends as interrupted, or its agent goes on."""


@dataclass(slots=True)
class Stamp:
    """What comes with a command: its time, its ids, and what the log knows beyond our memory."""

    now: float
    """Wall clock, in seconds since the epoch, UTC."""
    next_id: int
    """The first of a block of ids that is this command's alone."""
    known_message: KnownMessage | None = None
    known_event: LoggedEvent | None = None

    @property
    def at(self) -> datetime:
        return datetime.fromtimestamp(self.now, UTC)

    def new_id(self) -> str:
        taken, self.next_id = self.next_id, self.next_id + 1
        return format_id(taken)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the application chose for a conversation."""

    on_overlap: OnOverlap = "queue"
    queued_messages_max: int = 256
    system_prompt: str | None = None
    unfinished: Unfinished = "end"
    is_resumable: bool = False
    """The agent can be run again on a turn that has begun."""


@dataclass(frozen=True, slots=True)
class StartTurn:
    """Run the agent for this turn; again, where it has begun."""

    turn_id: str
    unstarted: tuple[str, ...] = ()
    """Open calls that are known not to have been started."""


@dataclass(frozen=True, slots=True)
class StopTurn:
    """Cancel the agent of this turn, and do not wait for it."""

    turn_id: str


TurnEffect = StartTurn | StopTurn


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from one command."""

    events: tuple[Event, ...] = ()
    reply: object = None
    effects: tuple[TurnEffect, ...] = ()
    is_answer_over: bool = False
    """The running turn's answer is in the log, or begins anew: what was streamed of it goes."""
    streamed: str = ""
    """The next piece of the running turn's answer."""
    is_suspended: bool = False
    """The running turn's agent ends its run here, to be run again when the turn goes on."""


@dataclass(slots=True)
class Owner:
    """The working state of the newest owner. Only `decide` and the owner's loop see it.

    Invariant: `state` is the fold of the log and of what this batch has decided; when the commit
    fails, it is thrown away with the actor.
    """

    conversation_id: str
    epoch: int
    policy: Policy
    state: ConversationState = field(default_factory=ConversationState)
    streamed: list[str] = field(default_factory=list)
    """What the running turn's model has said and not finished; in memory only."""
    agent_of: str | None = None
    """The turn whose agent this owner has running."""
    recent: dict[str, LoggedEvent] = field(default_factory=dict)
    """The newest `RECENT_EVENTS_MAX` events by id; older ones are looked up in the journal."""

    def apply(self, decision: Decision) -> None:
        """Fold what was decided."""
        for event in decision.events:
            self.state.fold(event)
            self.remember(event, self.state.seq)
        if decision.is_answer_over:
            self.streamed.clear()
        if decision.streamed:
            self.streamed.append(decision.streamed)
        if decision.is_suspended:
            self.agent_of = None
        for effect in decision.effects:
            self.agent_of = effect.turn_id if isinstance(effect, StartTurn) else None

    def remember(self, event: Event, seq: int) -> None:
        """Keep an event among the recent ones."""
        self.recent[event.id] = LoggedEvent(seq, event)
        if len(self.recent) > RECENT_EVENTS_MAX:
            del self.recent[next(iter(self.recent))]
