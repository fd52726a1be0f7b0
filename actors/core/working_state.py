"""The working state of a conversation's owner, and the decisions that are folded into it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any, Final, Literal, NamedTuple, ParamSpec, TypeVar, cast

from turnkeeper.runtime import format_id

from ..events import Event, LoggedEvent, StepRequest, TextDelta, share_fields
from ..journal import Record
from ..values.tables import NO_TABLE
from ..values.text import storable
from .commands import OnOverlap
from .limits import ANSWER_LENGTH_MAX
from .state import Folded
from .turn_table import KnownMessage

LARGE_BYTES = 64 << 10
"""Events with more bytes of JSON than this are large: memory holds fewer of them."""

_STEP_ENDS = ("step_finished", "turn_ended")

__all__ = [
    "LARGE_BYTES",
    "Asked",
    "ConversationSettings",
    "Decision",
    "Draft",
    "PartialAnswer",
    "PromptPolicy",
    "Stamp",
    "StartTurn",
    "StopTurn",
    "TurnEffect",
    "Unfinished",
    "WhileDraining",
    "WorkingState",
]

P = ParamSpec("P")
E = TypeVar("E", bound=Event)

Unfinished = Literal["end", "resume"]
"""Decides about a turn whose owner stopped: it ends as interrupted, or its agent runs again."""


WhileDraining = Literal["queue", "refuse"]
"""The fate of a chat message that comes while the process is drained."""


PromptPolicy = Literal["current", "pinned"]
"""The system prompt of a conversation that has begun: the application's present one, or its first.
"""


@dataclass(slots=True)
class Stamp:
    """The time and the ids of one command, and what the journal knows of its ids."""

    now: float
    """The wall clock, in seconds since 1970, UTC."""
    next_id: int
    """The first id of a block that no other command uses; 0 for a command that makes no event."""
    known_message: KnownMessage | None = None
    """The chat message of the command's message id, if the log has it."""
    known_target: KnownMessage | None = None
    """The chat message that the command's message replaces, if the log has it."""
    known_events: Mapping[str, LoggedEvent] = field(default_factory=lambda: NO_TABLE)
    """The events that the command names by their ids, those that the log has."""
    known_answers: Mapping[str, bool] = field(default_factory=lambda: NO_TABLE)
    """The answers that the log has under the command's event id."""

    @property
    def at(self) -> datetime:
        return datetime.fromtimestamp(self.now, UTC)

    def new_id(self) -> str:
        assert self.next_id, "a command that makes no event draws an id"
        taken, self.next_id = self.next_id, self.next_id + 1
        return format_id(taken)


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """The application's choices for a conversation."""

    on_overlap: OnOverlap = "queue"
    queued_messages_max: int = 256
    system_prompt: str | None = None
    prompt_policy: PromptPolicy = "current"
    unfinished: Unfinished = "end"
    is_resumable: bool = False
    """True if the agent can be run again on a turn that has begun."""
    answer_length_max: int = ANSWER_LENGTH_MAX
    """The most characters of one answer."""


@dataclass(frozen=True, slots=True)
class StartTurn:
    """Run the agent for this turn; again, if the turn has begun."""

    turn_id: str
    unstarted: tuple[str, ...] = ()
    """The open calls that are known not to have been started."""


@dataclass(frozen=True, slots=True)
class StopTurn:
    """Cancel the agent of this turn; do not wait for it."""

    turn_id: str
    is_drained: bool = False
    """True if the turn was ended because its process is drained."""


TurnEffect = StartTurn | StopTurn


class Asked(NamedTuple):
    """The request to a model whose step has not ended, and when it was made."""

    request: StepRequest
    at: float
    """The wall clock."""


@dataclass(slots=True)
class Decision:
    """The events, the reply and the effects that follow from one command. Nothing changes it."""

    events: tuple[Event, ...] = ()
    reply: object = None
    written: Sequence[bytes | None] = ()
    """The JSON of the events that the command brought, by their places; others are encoded.

    None stands for an event that is encoded, and so do places that are left out at the end.
    """
    effects: tuple[TurnEffect, ...] = ()
    is_answer_over: bool = False
    """True if the running turn's answer is in the log: its pieces are dropped."""
    piece: TextDelta | None = None
    """The next piece of the running turn's answer; it comes before the events."""
    half: str = ""
    """The high surrogate at the end of the piece, held back until its other half comes."""
    asked: Asked | None = None
    """The running turn's model is asked now."""
    is_suspended: bool = False
    """True if the running turn's agent ends its run here, to be run again when the turn goes on."""


@dataclass(slots=True, eq=False)
class PartialAnswer:
    """The running turn's answer as far as its agent has written it; in memory only."""

    newest: TextDelta | None = None
    """The newest piece; None if the answer has not begun."""
    half: str = ""
    """The high surrogate after it; `mend` replaces it if its other half does not come."""
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the newest attempt, as it can be stored."""
        return "".join(self._texts) + storable(self.half)

    @property
    def length(self) -> int:
        """The code points of the pieces of the newest attempt."""
        return 0 if self.newest is None else self.newest.end

    def take(self, piece: TextDelta, half: str) -> None:
        """Add the next piece. One with the offset 0 begins an attempt."""
        if not piece.offset:
            self._texts.clear()
        self.newest, self.half = piece, half
        self._texts.append(piece.text)

    def mend(self) -> TextDelta | None:
        """Return the piece that stands for a half character at the end; None if there is none."""
        if self.newest is None or not self.half:
            return None
        return self.newest._replace(offset=self.length, text=storable(self.half))


_NO_ANSWER: Final = PartialAnswer()
"""Shared by all conversations without a piece of an answer. `apply` replaces it, and never adds."""


@dataclass(slots=True)
class WorkingState:
    """The owner's state while it decides. Only `decide` and the owner's loop see it.

    Invariant: `state` is the fold of the log and of the events that this batch has decided. If the
    commit fails, it is thrown away with the actor.
    """

    conversation_id: str
    epoch: int
    settings: ConversationSettings
    state: Folded = field(default_factory=Folded)
    partial_answer: PartialAnswer = _NO_ANSWER
    asked: Asked | None = None
    """The request to the running turn's model, until the step ends; in memory only."""
    agent_of: str | None = None
    """The turn whose agent this owner is running."""
    draining: WhileDraining | None = None
    """Set while the process is drained: no turn starts any more."""
    recent: dict[str, Event] = field(default_factory=dict)
    """The newest events by id, in the order of the log; older ones are looked up in the journal.

    Without their seqs: they are consecutive, and the last one is at `state.seq`. So a conversation
    has one object less for each of them.
    """
    large: dict[str, int] = field(default_factory=dict)
    """The bytes of those of the newest events that have more than `LARGE_BYTES`, by id."""
    large_bytes: int = 0

    @property
    def hands_turns_over(self) -> bool:
        """True if a turn that a process leaves unfinished goes on in the next one."""
        return self.settings.unfinished == "resume" and self.settings.is_resumable

    def recent_backwards(self) -> Iterator[LoggedEvent]:
        """Yield the newest events, the last one first."""
        return map(LoggedEvent, count(self.state.seq, -1), reversed(self.recent.values()))

    def find_recent(self, event_id: str) -> LoggedEvent | None:
        """Return the event of this id, if it is among the newest."""
        if event_id not in self.recent:
            return None
        return next(logged for logged in self.recent_backwards() if logged.event.id == event_id)

    def find_event(self, event_id: str, stamp: Stamp) -> LoggedEvent | None:
        """Return the event of this id, which a command names, if the log has it."""
        if event_id in self.recent:
            return self.find_recent(event_id)
        return stamp.known_events.get(event_id)

    def apply(self, decision: Decision) -> None:
        """Fold a decision into the state."""
        if decision.asked is not None:
            self.asked = decision.asked
        state = self.state
        recent = self.recent
        for event in decision.events:
            share_fields(event)
            state.fold(event)
            recent[event.id] = event
            if len(recent) > state.limits.recent_events_max:
                self._let_go_oldest()
            if event.kind in _STEP_ENDS:
                self.asked = None
        if decision.is_answer_over:
            self.partial_answer = _NO_ANSWER
        elif decision.piece is not None:
            if self.partial_answer is _NO_ANSWER:
                self.partial_answer = PartialAnswer()
            self.partial_answer.take(decision.piece, decision.half)
        if decision.is_suspended:
            self.agent_of = None
        for effect in decision.effects:
            self.agent_of = effect.turn_id if isinstance(effect, StartTurn) else None

    def note_sizes(self, committed: Sequence[Record]) -> int:
        """Let go of the oldest events while the large ones have more than `recent_bytes_max`.

        `committed`: the events that were just committed. Return the bytes of the large ones.
        """
        size = 0
        for record in committed:
            if len(record.payload) > LARGE_BYTES and record.event_id in self.recent:
                self.large[record.event_id] = len(record.payload)
                size += len(record.payload)
        if size:
            self.large_bytes += size
            while self.large_bytes > self.state.limits.recent_bytes_max:
                self._let_go_oldest()
        return size

    def _let_go_oldest(self) -> None:
        oldest = next(iter(self.recent))
        del self.recent[oldest]
        if self.large:
            self.large_bytes -= self.large.pop(oldest, 0)


class Draft:
    """The events of one decision, in order, while it is being made.

    Each event that it makes gets the command's time and the next of its ids, so the ids of a
    decision ascend in the order of the log.
    """

    def __init__(self, working: WorkingState, stamp: Stamp) -> None:
        self.working = working
        self.stamp = stamp
        self._events: list[Event] = []
        self._written: list[bytes | None] = []

    @property
    def events(self) -> Sequence[Event]:
        """The events so far."""
        return self._events

    @property
    def seq(self) -> int:
        """The seq of the newest event, once the decision is committed."""
        return self.working.state.seq + len(self._events)

    def add(self, make: Callable[P, E], *args: P.args, **fields: P.kwargs) -> E:
        """Make an event of this class with these fields, add it and return it."""
        # Any: the fields are checked against `make`; the time is added to them, and an id if none
        # is given.
        drawn: dict[str, Any] = {**fields, "timestamp": self.stamp.at}
        if "id" not in drawn:
            drawn["id"] = self.stamp.new_id()
        event = cast("Callable[..., E]", make)(*args, **drawn)
        self._events.append(event)
        self._written.append(None)
        return event

    def extend(self, events: Sequence[Event], written: Sequence[bytes] = ()) -> None:
        """Add events that were made elsewhere; `written` is their JSON, if it is at hand."""
        self._events.extend(events)
        self._written.extend(written or [None] * len(events))

    def decision(
        self,
        reply: object = None,
        *,
        effects: Iterable[TurnEffect] = (),
        is_answer_over: bool = False,
        is_suspended: bool = False,
    ) -> Decision:
        """Return the decision with these events."""
        has, needs = len(self._written), len(self._events)
        assert has == needs, f"{has} places for the JSON of {needs} events"
        return Decision(
            events=tuple(self._events),
            reply=reply,
            effects=tuple(effects),
            is_answer_over=is_answer_over,
            piece=self.working.partial_answer.mend() if is_answer_over else None,
            is_suspended=is_suspended,
            written=tuple(self._written),
        )
