"""The state of a conversation: the product of all folds of its log.

It promises: the same events give equal states, in every process; an event costs O(1) to fold, a
condensation or a retraction O(view); nothing here is stored that its log would not give again.

The owner of a conversation drives it by `fold` alone, with events that admission let through, and
then it holds no events but those of the view. Used alone it keeps a log of its own, in memory
(`ConversationState()`) or in a SQLite journal (`persistence_dir=`): `append_event` checks, keeps
and folds, and with a journal it returns when the event is durable. One task or thread, without
locks; the view that it hands out never changes and may go anywhere.

A journal's state survives a crash up to its last append that returned. Until the first append it
is only read; that append takes the next epoch, as any owner does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, Protocol, Self, overload

from turnkeeper.runtime import InvariantViolation, Ports

from ._properties import LogFacts
from ._records import record_of
from ._snapshots import Folds, decode_snapshot, encode_snapshot
from .admission import (
    Admission,
    AdmissionRefused,
    Appended,
    Duplicate,
    Outcome,
    Rejected,
    Violation,
)
from .errors import ConversationNotFound, EventIdConflict, JournalRefused, MessageIdConflict
from .events import (
    EVENT_CLASSES,
    ActionEvent,
    CondensationEvent,
    Event,
    LLMConvertibleEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    Task,
    TaskListUpdatedEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    is_seen_by_model,
)
from .journal import Snapshot
from .metrics import Metrics
from .status import AgentExecutionStatus, StatusFold
from .turns import TurnTable
from .view import View, ViewFold

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["ColdLoad", "ConversationState"]


class _KeptLog(Protocol):
    """The log of a state that stands alone."""

    @property
    def is_owner(self) -> bool:
        """Whether an append may follow; if not, `own` first."""

    def holds(self, seq: int) -> bool:
        """Whether the log has been kept up to this seq."""

    def own(self) -> int:
        """Open it for appends; gives the seq that it ends at."""

    def append(self, event: Event, *, expected_seq: int, is_unfinished: bool) -> None: ...
    def find(self, event_id: str) -> int | None: ...
    def read(self, after: int, upto: int | None = None) -> Iterator[Event]: ...
    def read_snapshot(self) -> Snapshot | None: ...
    def write_snapshot(self, snapshot: Snapshot) -> None: ...
    def close(self) -> None: ...


class ConversationState:
    """All that is known of a conversation. `append_event` is for states that stand alone."""

    def __init__(
        self,
        *,
        persistence_dir: str | PathLike[str] | None = None,
        conversation_id: str = "in-memory",
        admission: Literal["enforce", "observe"] = "enforce",
        ports: Ports | None = None,
    ) -> None:
        """An empty state; with `persistence_dir`, that of the conversation there, if there is one.

        `admission="observe"` lets everything in and keeps what it would have refused in
        `violations`: for looking at logs from elsewhere.
        """
        self.conversation_id = conversation_id
        self.seq = 0
        """The position of the last event that was folded; 0 before the first."""
        self.turns = TurnTable()
        self.is_turn_condensed = False
        """A condensation has forgotten a part of the turn that runs, or ran last."""
        self.metrics = Metrics()
        self.task_list: tuple[Task, ...] = ()
        self.iteration = 0
        """The steps finished in the turn that runs, or ran last."""
        self.event_id_max = ""
        """No event of the log has an id above this one; ids are time-ordered, so new ones have."""
        self.unknown_kinds: frozenset[str] = frozenset()
        """The kinds of events that this version did not know and passed over."""
        self.violations: tuple[Violation, ...] = ()
        """What admission would have refused, where it only observes."""
        self._mode = admission
        self._ports = ports
        self._status = StatusFold()
        self._view = ViewFold()
        self.admission = Admission(self._view)
        # What enforcement took out of a log from elsewhere, as long as the log does not say so.
        self._broken: tuple[str, ...] = ()
        self._is_past = False
        self._log: _KeptLog = _MemoryLog(conversation_id)
        if persistence_dir is not None:
            # The one way from the pure core to a disk; nobody else pays for it.
            from ._state_files import StateFiles  # noqa: PLC0415

            self._log = StateFiles(persistence_dir, conversation_id, ports or Ports())
            with suppress(ConversationNotFound):
                self._load()

    @classmethod
    def load(
        cls,
        *,
        persistence_dir: str | PathLike[str],
        conversation_id: str,
        ports: Ports | None = None,
    ) -> Self:
        """The state of a conversation that is there, else `ConversationNotFound`. Only reads."""
        state = cls(persistence_dir=persistence_dir, conversation_id=conversation_id, ports=ports)
        if not state.seq:
            state.close()
            raise ConversationNotFound(conversation_id)
        return state

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> tuple[ConversationState, tuple[str, ...]]:
        """The state of a whole log from anywhere, enforced, and the ids that left its view for it.

        Where there are such ids, the owner appends a condensation without summary that forgets
        them, before anything else: so the view is a fold of the log again.
        """
        load = ColdLoad()
        for event in events:
            load.fold(event)
        return load.finish()

    @classmethod
    def from_snapshot(
        cls, snapshot: Snapshot, *, conversation_id: str = "in-memory"
    ) -> ConversationState | None:
        """The state that a snapshot was taken of; None where it does not fit this version."""
        state = cls(conversation_id=conversation_id)
        return state if state._restore(snapshot) else None

    def to_snapshot(self) -> Snapshot:
        """The state as a journal keeps it, to go on from without reading the log again."""
        return encode_snapshot(self._folds())

    def save(self) -> None:
        """Write a snapshot beside the log, which has every event already."""
        self._log.write_snapshot(self.to_snapshot())

    def close(self) -> None:
        """Let go of the journal, if there is one. Nothing is lost without it."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- reading ---------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The events that the model sees; a snapshot, O(1)."""
        return self._view.snapshot()

    @property
    def agent_execution_status(self) -> AgentExecutionStatus:
        return self._status.status

    @property
    def pending_actions(self) -> tuple[ActionEvent, ...]:
        """The tool calls that have no result yet."""
        return tuple(self.admission.open_calls.values())

    @property
    def events(self) -> Sequence[Event]:
        """The log, where this state keeps it; read as it is asked for."""
        return _Events(self._checked_log(), self.seq)

    @property
    def conversation_history(self) -> tuple[LLMConvertibleEvent, ...]:
        """All events of the log that a model saw, whatever has been forgotten since."""
        return tuple(filter(is_seen_by_model, self.events))

    def at(self, seq: int) -> ConversationState:
        """The state as it was when the log ended at `seq`, to be read and not to append to."""
        if not 0 <= seq <= self.seq:
            raise ValueError(f"seq {seq} is not in 0..{self.seq}")
        log = self._checked_log()
        state = ConversationState(conversation_id=self.conversation_id, admission=self._mode)
        state._log, state._is_past = log, True
        snapshot = log.read_snapshot() if seq else None
        if snapshot is not None and snapshot.seq <= seq:
            state._restore(snapshot)
        for event in log.read(state.seq, seq):
            state.fold(event)
        return state

    def running_turn_events(self) -> tuple[str, ...] | None:
        """The events of the running turn that the model sees; None where a part is forgotten.

        They are what a rollback retracts, once the turn has no call open.
        """
        running = self.turns.running
        if running is None or self.is_turn_condensed:
            return None
        return tuple(event.id for event in self._view.events if event.turn_id == running.turn_id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConversationState):
            return NotImplemented
        return self._folds() == other._folds()

    __hash__ = None  # type: ignore[assignment]  # it changes

    # --- advancing -------------------------------------------------------------------------------

    def fold(self, event: Event) -> None:
        """Advance all folds by one event that is in the log."""
        self.seq += 1
        self.event_id_max = max(self.event_id_max, event.id)
        left = self._view.fold(event)
        if left:
            self.admission.fold(left)
            self._note_forgotten(event, left)
        self.turns.fold(event, self.seq)
        self._status = self._status.fold(event)
        match event.kind:
            case "step_finished":
                self.metrics = self.metrics.fold(event)
                self.iteration += 1
            case "turn_started":
                self.iteration = 0
                self.is_turn_condensed = False
            case "task_list_updated":
                assert isinstance(event, TaskListUpdatedEvent), event.kind
                self.task_list = event.tasks
            case kind if kind not in EVENT_CLASSES:
                self.unknown_kinds |= {kind}
            case _:
                pass

    def watch(self) -> None:
        """Notice while folding what admission would not have let through; until `enforce`."""
        self._view.watches = True

    def enforce(self, facts: LogFacts) -> tuple[str, ...]:
        """Take out of the view what breaks a property, given the facts of the whole log."""
        left = self._view.enforce(facts)
        self.admission.fold(left)
        return tuple(event.id for event in left)

    @overload
    def append_event(
        self, event: Event, *, raises: Literal[True] = True
    ) -> Appended | Duplicate: ...
    @overload
    def append_event(self, event: Event, *, raises: bool) -> Outcome: ...
    def append_event(self, event: Event, *, raises: bool = True) -> Outcome:
        """Put one event into the log, if admission lets it.

        Raises `AdmissionRefused`, or gives it as `Rejected` where not `raises`; and
        `EventIdConflict` where the id is in the log with other content.
        """
        log = self._checked_log()
        if self._is_past:
            raise JournalRefused(
                f"append refused on conversation {self.conversation_id}: this is its state at seq "
                f"{self.seq} in the past; nothing was written; append to its present state"
            )
        if not log.is_owner:
            self._own()
        known = log.find(event.id) if event.id <= self.event_id_max else None
        if known is not None:
            if self.events[known - 1] != event:
                raise EventIdConflict(self.conversation_id, {event.id: known})
            return Duplicate(known)
        violation = self.admission.check((event,))
        if violation is not None:
            if self._mode == "observe":
                self.violations = (*self.violations, violation)
            elif raises:
                raise AdmissionRefused(self.conversation_id, violation)
            else:
                return Rejected(violation)
        self._append(event)
        return Appended(self.seq)

    def _own(self) -> None:
        """Open the log as its owner, and take in what others have written since it was read."""
        for event in self._log.read(self.seq, self._log.own()):
            self.fold(event)
        if self._broken:
            ports = self._ports or Ports()
            forgotten = CondensationEvent(
                id=ports.ids.new(),
                timestamp=datetime.fromtimestamp(ports.now(), UTC),
                forgotten_event_ids=self._broken,
            )
            self._append(forgotten)
            self._broken = ()

    def _append(self, event: Event) -> None:
        self._log.append(
            event,
            expected_seq=self.seq + 1,
            is_unfinished=_is_unfinished_after(self.turns, event),
        )
        self.fold(event)

    def _checked_log(self) -> _KeptLog:
        if not self._log.holds(self.seq):
            raise InvariantViolation(
                f"the state of conversation {self.conversation_id} at seq {self.seq} was folded "
                "without keeping its log; read the events from the journal"
            )
        return self._log

    def _note_forgotten(self, event: Event, left: Iterable[LLMConvertibleEvent]) -> None:
        running = self.turns.running
        if isinstance(event, CondensationEvent) and running is not None:
            self.is_turn_condensed |= any(gone.turn_id == running.turn_id for gone in left)

    def _load(self) -> None:
        snapshot = self._log.read_snapshot()
        if snapshot is not None and self._restore(snapshot):
            for event in self._log.read(self.seq):
                self.fold(event)
            return
        facts = LogFacts()
        self.watch()
        for event in self._log.read(0):
            self.fold(event)
            facts.fold(event)
        self._broken = self.enforce(facts)

    def _restore(self, snapshot: Snapshot) -> bool:
        folds = decode_snapshot(snapshot)
        if folds is None:
            return False
        self.seq = folds.seq
        self.turns = folds.turns
        self.is_turn_condensed = folds.is_turn_condensed
        self.metrics = folds.metrics
        self.task_list = folds.task_list
        self.iteration = folds.iteration
        self.event_id_max = folds.event_id_max
        self.unknown_kinds = frozenset(folds.unknown_kinds)
        self._status = folds.status
        events = filter(is_seen_by_model, folds.view)
        self._view = ViewFold(events, unhandled_request=folds.unhandled_request)
        self.admission = Admission(
            self._view, calls_left=folds.calls_left, responses_left=folds.responses_left
        )
        return True

    def _folds(self) -> Folds:
        view = self.view
        return Folds.model_construct(
            seq=self.seq,
            view=tuple(view),
            unhandled_request=view.unhandled_condensation_request,
            calls_left=self.admission.calls_left,
            responses_left=self.admission.responses_left,
            status=self._status,
            turns=self.turns,
            is_turn_condensed=self.is_turn_condensed,
            metrics=self.metrics,
            task_list=self.task_list,
            iteration=self.iteration,
            event_id_max=self.event_id_max,
            unknown_kinds=tuple(sorted(self.unknown_kinds)),
        )


def _is_unfinished_after(turns: TurnTable, event: Event) -> bool:
    """Whether a turn runs, or a chat message waits, once this event is in the log."""
    match event:
        case TurnStartedEvent() | MessageQueuedEvent():
            return True
        case TurnEndedEvent():
            return bool(turns.queued)
        case MessageWithdrawnEvent() | UserMessageEvent():
            return turns.running is not None or bool(turns.queued.keys() - {event.message_id})
        case _:
            return turns.is_unfinished


class _MemoryLog:
    """A log that lives and dies with its state."""

    is_owner = True

    def __init__(self, conversation_id: str) -> None:
        self._conversation_id = conversation_id
        self._events: list[Event] = []
        self._seqs: dict[str, int] = {}
        self._message_seqs: dict[str, int] = {}

    def holds(self, seq: int) -> bool:
        return seq <= len(self._events)

    def own(self) -> int:
        return len(self._events)

    def append(self, event: Event, *, expected_seq: int, is_unfinished: bool) -> None:  # noqa: ARG002 - the protocol's
        message_id = record_of(event).message_id
        if message_id in self._message_seqs:
            seq = self._message_seqs[message_id]
            raise MessageIdConflict(self._conversation_id, message_id, seq)
        self._events.append(event)
        self._seqs[event.id] = expected_seq
        if message_id is not None:
            self._message_seqs[message_id] = expected_seq

    def find(self, event_id: str) -> int | None:
        return self._seqs.get(event_id)

    def read(self, after: int, upto: int | None = None) -> Iterator[Event]:
        return iter(self._events[after:upto])

    def read_snapshot(self) -> Snapshot | None:
        return None

    def write_snapshot(self, snapshot: Snapshot) -> None:  # noqa: ARG002 - the protocol's
        raise JournalRefused(
            f"the state of conversation {self._conversation_id} is in memory only; nothing was "
            "saved; give it a persistence_dir"
        )

    def close(self) -> None:
        """There is nothing to let go of."""


class _Events(Sequence[Event]):
    """The first events of a log, read as they are asked for."""

    def __init__(self, log: _KeptLog, length: int) -> None:
        self._log = log
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Event]:
        return self._log.read(0, self._length)

    @overload
    def __getitem__(self, at: int) -> Event: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Event]: ...
    def __getitem__(self, at: int | slice) -> Event | Sequence[Event]:
        if isinstance(at, slice):
            wanted = range(*at.indices(self._length))
            if not wanted:
                return ()
            low, high = min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1])
            events = tuple(self._log.read(low, high + 1))
            return tuple(events[n - low] for n in wanted)
        if not -self._length <= at < self._length:
            raise IndexError(at)
        at %= self._length
        return next(self._log.read(at, at + 1))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list has none


class ColdLoad:
    """A whole log, folded record by record, then enforced once. One of the three entry points."""

    def __init__(self) -> None:
        self._state = ConversationState()
        self._state.watch()
        self._facts = LogFacts()

    def fold(self, event: Event) -> None:
        """Take in the next event of the log."""
        self._state.fold(event)
        self._facts.fold(event)

    def finish(self) -> tuple[ConversationState, tuple[str, ...]]:
        """The state, enforced, and the ids that had to leave its view for that."""
        return self._state, self._state.enforce(self._facts)
