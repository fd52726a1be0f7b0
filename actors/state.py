"""The state of a conversation: the product of all folds of its log.

It promises: the same events give equal states, in every process; an event costs O(1) to fold, a
condensation or a retraction O(view); nothing here is stored that its log would not give again.

The owner of a conversation drives it by `fold` alone, with events that admission let through, and
then it holds no events but those of the view. Used alone (`ConversationState()`) it keeps a log of
its own: `append_event` checks, keeps and folds. One task or thread, without locks; the view that
it hands out never changes and may go anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, overload

from turnkeeper.runtime import InvariantViolation

from ._properties import LogFacts
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
from .errors import EventIdConflict
from .events import (
    ActionEvent,
    Event,
    LLMConvertibleEvent,
    StepFinishedEvent,
    Task,
    TaskListUpdatedEvent,
    TurnStartedEvent,
    UnknownEvent,
    is_seen_by_model,
)
from .journal import Snapshot
from .metrics import Metrics
from .status import AgentExecutionStatus, StatusFold
from .turns import TurnTable
from .view import View, ViewFold

__all__ = ["ConversationState"]


class ConversationState:
    """All that is known of a conversation. `append_event` is for states that stand alone."""

    def __init__(
        self,
        *,
        conversation_id: str = "in-memory",
        admission: Literal["enforce", "observe"] = "enforce",
    ) -> None:
        self.conversation_id = conversation_id
        self.seq = 0
        """The position of the last event that was folded; 0 before the first."""
        self.turns = TurnTable()
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
        self._status = StatusFold()
        self._view = ViewFold()
        self.admission = Admission(self._view)
        self._log: list[Event] = []
        self._seqs: dict[str, int] = {}

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
        folds = decode_snapshot(snapshot)
        if folds is None:
            return None
        state = cls(conversation_id=conversation_id)
        state.seq = folds.seq
        state.turns = folds.turns
        state.metrics = folds.metrics
        state.task_list = folds.task_list
        state.iteration = folds.iteration
        state.unknown_kinds = frozenset(folds.unknown_kinds)
        state._status = folds.status
        state._view = ViewFold(
            filter(is_seen_by_model, folds.view), unhandled_request=folds.unhandled_request
        )
        state.admission = Admission(
            state._view, calls_left=folds.calls_left, responses_left=folds.responses_left
        )
        return state

    def to_snapshot(self) -> Snapshot:
        """The state as a journal keeps it, to go on from without reading the log again."""
        return encode_snapshot(self._folds())

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
        """The log, where this state keeps it."""
        if len(self._log) != self.seq:
            raise InvariantViolation(
                f"the state of conversation {self.conversation_id} at seq {self.seq} was folded "
                "without keeping its log; read the events from the journal"
            )
        return tuple(self._log)

    @property
    def conversation_history(self) -> tuple[LLMConvertibleEvent, ...]:
        """All events of the log that a model saw, whatever has been forgotten since."""
        return tuple(event for event in self.events if isinstance(event, LLMConvertibleEvent))

    def at(self, seq: int) -> ConversationState:
        """The state as it was when the log ended at `seq`."""
        if not 0 <= seq <= self.seq:
            raise ValueError(f"seq {seq} is not in 0..{self.seq}")
        state = ConversationState(conversation_id=self.conversation_id, admission=self._mode)
        for event in self.events[:seq]:
            state._keep(event)
        return state

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
        self.turns.fold(event, self.seq)
        self._status = self._status.fold(event)
        if is_seen_by_model(event):
            return
        if isinstance(event, StepFinishedEvent):
            self.metrics = self.metrics.fold(event)
            self.iteration += 1
        elif isinstance(event, TurnStartedEvent):
            self.iteration = 0
        elif isinstance(event, TaskListUpdatedEvent):
            self.task_list = event.tasks
        elif isinstance(event, UnknownEvent):
            self.unknown_kinds |= {event.kind}

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
        known = self._seqs.get(event.id)
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
        self._keep(event)
        return Appended(self.seq)

    def enforce(self, facts: LogFacts) -> tuple[str, ...]:
        """Take out of the view what breaks a property, given the facts of the whole log."""
        left = self._view.enforce(facts)
        self.admission.fold(left)
        return tuple(event.id for event in left)

    def _keep(self, event: Event) -> None:
        self._log.append(event)
        self.fold(event)
        self._seqs[event.id] = self.seq

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
            metrics=self.metrics,
            task_list=self.task_list,
            iteration=self.iteration,
            unknown_kinds=tuple(sorted(self.unknown_kinds)),
        )


class ColdLoad:
    """A whole log, folded record by record, then enforced once. One of the three entry points."""

    def __init__(self) -> None:
        self._state = ConversationState()
        self._facts = LogFacts()

    def fold(self, event: Event) -> None:
        """Take in the next event of the log."""
        self._state.fold(event)
        self._facts.fold(event)

    def finish(self) -> tuple[ConversationState, tuple[str, ...]]:
        """The state, enforced, and the ids that had to leave its view for that."""
        return self._state, self._state.enforce(self._facts)
