"""The outline of a log: the kind of each event, the turns, what ran when, what left the view. Pure.

It holds what a person needs to find a place in a log of any length, and no content but the first
words of chat messages. The outline folds the log, one event at a time. It notes a damaged record in
its place and goes on after it.

The log does not say when a model call or a tool call began, so the outline infers it. A model call
began `latency_s` before its end, or without that, when its turn could first ask the model. A tool
call began when it was written; one that the user is asked about, when it was confirmed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..core.turn_rules import message_that_cut
from ..events import (
    ActionEvent,
    AgentErrorEvent,
    CondensationEvent,
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    Event,
    LoggedEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    ObservationEvent,
    PausedEvent,
    ResumedEvent,
    RetractionEvent,
    StepFinishedEvent,
    StepUnfinishedEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    UserRejectEvent,
)

__all__ = ["Bar", "Outline", "OutlinedMessage", "OutlinedTurn"]

SHOWN_LENGTH = 120
"""How many characters of a chat message are shown."""
DAMAGED = "damaged"
"""The kind that is given to a record that cannot be read."""
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

BarKind = Literal["model", "tool", "confirmation", "pause"]


@dataclass(slots=True)
class Bar:
    """Something that took time in a turn. `to_ms` is None while it goes on."""

    kind: BarKind
    seq: int
    """The event that began it; for a model call, the event that ended it."""
    from_ms: float
    to_ms: float | None = None
    end_seq: int | None = None
    name: str = ""
    """The model, or the tool."""
    outcome: str = ""
    view_seq: int | None = None
    call_id: str = ""


@dataclass(slots=True)
class OutlinedMessage:
    """A chat message of a turn: when it came, and when it became part of the turn."""

    message_id: str
    seq: int
    at_ms: float
    text: str
    joined_seq: int | None = None
    joined_ms: float | None = None
    steers: str | None = None
    author: str | None = None


@dataclass(slots=True)
class OutlinedTurn:
    """A turn from its first event to its end."""

    turn_id: str
    seq: int
    from_ms: float
    end_seq: int | None = None
    to_ms: float | None = None
    outcome: str = ""
    detail: str | None = None
    cut_by: str | None = None
    """The chat message that ended it: one that interrupted it, rolled it back or edited it."""
    last_seq: int = 0
    messages: list[OutlinedMessage] = field(default_factory=list)
    steps: int = 0
    calls: int = 0
    bars: list[Bar] = field(default_factory=list)
    ready_ms: float = 0.0
    """The earliest time at which its next model call may have begun."""


class Outline:
    """A fold of the log."""

    def __init__(self) -> None:
        self.head = 0
        self.newest = (0, "")
        """Seq and id of the last event that could be read; a different log has a different event
        there."""
        self.kinds: list[str] = []
        """The kinds that the log has, in the order of their first event."""
        self.turns: dict[str, OutlinedTurn] = {}
        self.waiting: dict[str, OutlinedMessage] = {}
        """Messages whose turn has not begun, by id."""
        self.left: list[tuple[int, int, int, str]] = []
        """Events that left the view: from seq, to seq, at seq, and how."""
        self.damaged: list[tuple[int, str]] = []
        self._letters = bytearray()
        self._kind_numbers: dict[str, int] = {}
        self._seqs: dict[str, int] = {}
        self._open_calls: dict[str, Bar] = {}
        self._awaiting: tuple[str, ...] = ()

    def letters(self, after: int) -> str:
        """Return the kinds of the events after a seq, a letter for each."""
        return self._letters[after:].decode()

    def changed_turns(self, after: int) -> Sequence[OutlinedTurn]:
        """Return the turns that have events after a seq, oldest first."""
        return [turn for turn in self.turns.values() if turn.last_seq > after]

    def fold_damage(self, seq: int, found: str) -> None:
        """Note a record that cannot be read."""
        assert seq == self.head + 1, (seq, self.head)
        self.damaged.append((seq, found))
        self._note(DAMAGED)

    def fold(self, logged: LoggedEvent) -> None:
        """Take in the next event of the log."""
        seq, event = logged
        assert seq == self.head + 1, (seq, self.head)
        self._note(event.kind)
        self.newest = (seq, event.id)
        self._seqs[event.id] = seq
        turn = self.turns.get(event.turn_id or "")
        if turn is not None:
            turn.last_seq = seq
        at_ms = event.timestamp.timestamp() * 1_000
        match event:
            case CondensationEvent(forgotten_event_ids=ids):
                self._note_left(ids, seq, "condensed")
            case RetractionEvent(retracted_event_ids=ids):
                self._note_left(ids, seq, "retracted")
            case UserMessageEvent() | MessageQueuedEvent() | MessageWithdrawnEvent():
                self._fold_message(event, seq, at_ms)
            case TurnStartedEvent(turn_id=str(turn_id)):
                self.turns[turn_id] = OutlinedTurn(
                    turn_id, seq, at_ms, last_seq=seq, ready_ms=at_ms
                )
            case _ if turn is not None:
                self._fold_in_turn(turn, event, seq, at_ms)
            case _:
                pass

    def _note(self, kind: str) -> None:
        self.head += 1
        number = self._kind_numbers.setdefault(kind, len(self._kind_numbers))
        if number == len(self.kinds):
            self.kinds.append(kind)
        # A log may hold kinds from newer versions; once the letters run out, kinds share the last
        # one.
        self._letters += _LETTERS[min(number, len(_LETTERS) - 1)].encode()

    def _note_left(self, event_ids: Iterable[str], at: int, how: str) -> None:
        seqs = sorted(self._seqs[known] for known in event_ids if known in self._seqs)
        begin = end = 0
        for seq in seqs:
            if begin and seq == end + 1:
                end = seq
                continue
            if begin:
                self.left.append((begin, end, at, how))
            begin = end = seq
        if begin:
            self.left.append((begin, end, at, how))

    def _fold_message(
        self,
        event: UserMessageEvent | MessageQueuedEvent | MessageWithdrawnEvent,
        seq: int,
        at_ms: float,
    ) -> None:
        if isinstance(event, MessageWithdrawnEvent):
            self.waiting.pop(event.message_id, None)
            return
        if event.message_id is None:
            return
        waited = self.waiting.pop(event.message_id, None)
        message = waited or OutlinedMessage(
            event.message_id, seq, at_ms, event.content[:SHOWN_LENGTH], author=event.author
        )
        if isinstance(event, MessageQueuedEvent):
            message.steers = event.steers
            self.waiting[event.message_id] = message
            return
        message.joined_seq, message.joined_ms = seq, at_ms
        turn = self.turns.get(event.turn_id or "")
        if turn is not None:
            turn.messages.append(message)

    def _fold_in_turn(self, turn: OutlinedTurn, event: Event, seq: int, at_ms: float) -> None:
        match event:
            case TurnEndedEvent():
                turn.end_seq, turn.to_ms = seq, at_ms
                turn.outcome, turn.detail = event.outcome, event.detail
                turn.cut_by = message_that_cut(event)
                self._end_all(turn, seq, at_ms)
            case StepFinishedEvent() | StepUnfinishedEvent():
                self._fold_step(turn, event, seq, at_ms)
            case ActionEvent():
                turn.calls += 1
                bar = Bar("tool", seq, at_ms, name=event.tool_name, call_id=event.tool_call_id)
                turn.bars.append(bar)
                self._open_calls[event.tool_call_id] = bar
            case ObservationEvent() | AgentErrorEvent() | UserRejectEvent():
                self._fold_result(turn, event, seq, at_ms)
            case ConfirmationRequestedEvent():
                name = ", ".join(
                    waiting.name
                    for call in event.tool_call_ids
                    if (waiting := self._open_calls.get(call)) is not None
                )
                self._awaiting = event.tool_call_ids
                # They do not run yet.
                turn.bars = [bar for bar in turn.bars if bar.call_id not in self._awaiting]
                turn.bars.append(Bar("confirmation", seq, at_ms, name=name))
            case ConfirmationGivenEvent():
                self._end_wait(turn, "confirmation", seq, at_ms, _answer_of(event))
                for call in self._awaiting:
                    if (waited := self._open_calls.get(call)) is not None:
                        waited.from_ms = at_ms
                        turn.bars.append(waited)
                self._awaiting = ()
                turn.ready_ms = at_ms
            case PausedEvent():
                turn.bars.append(Bar("pause", seq, at_ms))
            case ResumedEvent():
                self._end_wait(turn, "pause", seq, at_ms, "resumed")
                turn.ready_ms = at_ms
            case _:
                pass

    def _fold_step(
        self,
        turn: OutlinedTurn,
        event: StepFinishedEvent | StepUnfinishedEvent,
        seq: int,
        at_ms: float,
    ) -> None:
        request = event.request
        model = event.usage.model or (None if request is None else request.model)
        latency_ms = event.usage.latency_s * 1_000
        from_ms = at_ms - latency_ms if latency_ms else turn.ready_ms
        outcome = event.outcome if isinstance(event, StepUnfinishedEvent) else "finished"
        view_seq = None if request is None else request.view_seq
        turn.steps += 1
        turn.bars.append(
            Bar(
                "model",
                seq,
                max(turn.from_ms, from_ms),
                at_ms,
                end_seq=seq,
                name=model or "",
                outcome=outcome,
                view_seq=view_seq,
            )
        )
        turn.ready_ms = at_ms

    def _fold_result(
        self,
        turn: OutlinedTurn,
        event: ObservationEvent | AgentErrorEvent | UserRejectEvent,
        seq: int,
        at_ms: float,
    ) -> None:
        call = self._open_calls.pop(event.tool_call_id, None)
        if call is None:
            return
        call.to_ms, call.end_seq = at_ms, seq
        match event:
            case UserRejectEvent():
                call.outcome = "rejected"
            case AgentErrorEvent():
                call.outcome = "cut off" if event.may_have_happened else "not run"
            case ObservationEvent():
                call.outcome = "error" if event.is_error else "done"
        turn.ready_ms = at_ms

    def _end_wait(
        self, turn: OutlinedTurn, kind: BarKind, seq: int, at_ms: float, outcome: str
    ) -> None:
        for bar in reversed(turn.bars):
            if bar.kind == kind:
                if bar.to_ms is None:
                    bar.to_ms, bar.end_seq, bar.outcome = at_ms, seq, outcome
                return

    @staticmethod
    def _end_all(turn: OutlinedTurn, seq: int, at_ms: float) -> None:
        for bar in turn.bars:
            if bar.to_ms is None and bar.kind != "tool":
                bar.to_ms, bar.end_seq, bar.outcome = at_ms, seq, "turn ended"


def _answer_of(event: ConfirmationGivenEvent) -> str:
    if not event.confirmed:
        return "rejected"
    return "some rejected" if event.rejected else "confirmed"
