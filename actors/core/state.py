"""The product of all folds of one conversation's log.

It promises: the same events give equal products, in every process; an event costs O(1) to fold, a
condensation or a retraction O(view); it holds nothing that the log would not give again, and no
events but those of the view.

Pure and synchronous. The owner of a conversation folds only events that admission let through. A
log of any other origin is read by `ColdLoad`, which enforces the properties of the view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from ..events import (
    CHANGE_KIND,
    EVENT_CLASSES,
    SEEN_KINDS,
    ActionEvent,
    AgentMessageEvent,
    CondensationEvent,
    CondensationSummaryEvent,
    Event,
    LLMConvertibleEvent,
    RetractionEvent,
    StepFinishedEvent,
    SystemPromptEvent,
    Task,
    TaskListUpdatedEvent,
    TokenUsage,
    is_seen_by_model,
)
from ..journal import Listing, Snapshot
from ..values.tables import end_alike
from .admission import Admission
from .details import Details
from .limits import Limits
from .listing import ACTIVE_KINDS, ListedFold, make_listing
from .metrics import Metrics
from .properties import LogFacts
from .snapshots import (
    SLICE_EVENTS,
    Slices,
    StoredFolds,
    decode_snapshot,
    encode_snapshot,
    run_whole,
)
from .status import MOVING_KINDS, AgentExecutionStatus, StatusFold
from .stuck import SEEN_MAX, RecentlySeen, seen_after, stored_seen
from .turn_table import TURN_KINDS, TurnTable
from .view import CHANGING_KINDS, View

__all__ = ["ColdLoad", "Folded"]

# Values that most conversations share: each object of an active one costs the garbage collector.
_NO_IDS: Final[frozenset[str]] = frozenset()
_NO_METRICS: Final = Metrics()
_NO_DETAILS: Final = Details()
_NEW_STATUS: Final = StatusFold()
_COMPARED_APART: Final[Mapping[str, Any]] = {
    "turns": None,
    "calls_left": (),
    "responses_left": (),
    "view": (),
}
"""Replaces the view, and the folds that limits bound."""
_USAGES_MAX: Final = 16


class Folded(ListedFold):
    """A conversation's view, status, turns, metrics and task list at one seq of its log.

    It also is the facts that lists show: as an object of their own, they would be one more for the
    garbage collector to look at.
    """

    __slots__ = (
        "_answered_response",
        "_metrics",
        "_new_usages",
        "_status",
        "admission",
        "answers",
        "condensed_turns",
        "details",
        "event_id_max",
        "is_turn_too_long",
        "iteration",
        "limits",
        "recently_seen",
        "restored_seq",
        "seq",
        "task_list",
        "turns",
        "unknown_kinds",
    )

    def __init__(self, *, limits: Limits = Limits()) -> None:
        super().__init__()
        self.seq = 0
        """The seq of the last event that was folded; 0 before the first."""
        self.restored_seq = 0
        """The seq of the snapshot that it was read from; 0 if from none."""
        self.turns = TurnTable()
        self.condensed_turns = _NO_IDS
        """The turns that run or have events in the view, and of which a part is forgotten."""
        self.is_turn_too_long = False
        """True while the running turn has requested a condensation that has not come yet."""
        self.recently_seen: RecentlySeen = ()
        self._metrics = _NO_METRICS
        self._new_usages: tuple[TokenUsage, ...] = ()
        """The newest model calls, which are not added to `_metrics` yet."""
        self.task_list: tuple[Task, ...] = ()
        self.details = _NO_DETAILS
        """The title, the labels, and the user whose conversation it is."""
        self.iteration = 0
        """How many steps were finished in the turn that runs, or ran last."""
        self.answers = 0
        """How many messages and responses with calls the turn that runs, or ran last, has."""
        self._answered_response: str | None = None
        """The response of that turn whose calls came last; its further calls are not counted."""
        self.event_id_max = ""
        """The highest id in the log. Ids are time-ordered, so a new event's id is above it."""
        self.unknown_kinds = _NO_IDS
        """The kinds of events that this version did not know and passed over."""
        self.limits = limits
        self._status = _NEW_STATUS
        self.admission = Admission(finished_max=limits.finished_calls_max)
        """The fold of the view, which knows the events that may come next."""

    @classmethod
    def from_events(
        cls, events: Iterable[Event], *, limits: Limits = Limits()
    ) -> tuple[Folded, tuple[str, ...]]:
        """Fold and enforce a whole log of any origin; return also the ids that left its view.

        If there are such ids, the owner appends a condensation without summary that forgets them,
        before anything else, so that the view is a fold of the log again.
        """
        load = ColdLoad(limits=limits)
        for event in events:
            load.fold(event)
        return load.finish()

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> Folded | None:
        """Return the folds that a snapshot holds; None if it does not fit this version."""
        return run_whole(cls.restoring(snapshot))

    @classmethod
    def restoring(cls, snapshot: Snapshot, *, limits: Limits = Limits()) -> Slices[Folded | None]:
        """As `from_snapshot`, in slices."""
        folds = yield from decode_snapshot(snapshot)
        if folds is None:
            return None
        folded = cls(limits=limits)
        yield from folded._restore(folds)
        return folded

    def to_snapshot(self) -> Snapshot:
        """Return the folds as a journal keeps them, so that a load need not read the whole log."""
        return run_whole(self.writing_snapshot())

    def writing_snapshot(self) -> Slices[Snapshot]:
        """As `to_snapshot`, in slices; of the folds as they are now, whatever comes after."""
        return encode_snapshot(self._stored())

    # --- reading ---------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The events that the model sees; a snapshot, O(1)."""
        running = self.turns.running
        return self.admission.snapshot(None if running is None else running.turn_id, seq=self.seq)

    @property
    def agent_execution_status(self) -> AgentExecutionStatus:
        """The state that the agent is in."""
        return self._status.status

    @property
    def spent(self) -> tuple[Metrics, Sequence[TokenUsage]]:
        """The totals of the model calls so far, and those few calls that are not in them yet."""
        return self._metrics, self._new_usages

    @property
    def metrics(self) -> Metrics:
        """The tokens, the cost and the time of the model calls so far."""
        if self._new_usages:
            self._metrics = self._metrics.plus(self._new_usages)
            self._new_usages = ()
        return self._metrics

    @property
    def listing(self) -> Listing:
        """The facts of this conversation that lists show."""
        return make_listing(
            self.seq,
            details=self.details,
            listed=self,
            status=self.agent_execution_status,
            turns=self.turns,
            open_calls=self.admission.open_calls,
        )

    @property
    def pending_actions(self) -> tuple[ActionEvent, ...]:
        """The tool calls that have no result yet."""
        return tuple(self.admission.open_calls.values())

    def running_turn_events(self) -> tuple[str, ...] | None:
        """Return the running turn's events in the view; None if a part of it is forgotten.

        A rollback retracts them, once the turn has no call open. A system prompt that was appended
        with the turn's id stays.
        """
        running = self.turns.running
        if running is None or running.turn_id in self.condensed_turns:
            return None
        return tuple(
            event.id
            for event in self.admission.events
            if event.turn_id == running.turn_id and not isinstance(event, SystemPromptEvent)
        )

    def is_condensed_from(self, index: int) -> bool:
        """True if a condensation has forgotten events of the view from this index on."""
        return any(
            isinstance(event, CondensationSummaryEvent) or event.turn_id in self.condensed_turns
            for event in self.admission.events[index:]
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Folded):
            return NotImplemented
        return self._stored() == other._stored()

    def agrees_with(self, other: Folded) -> bool:
        """True if both may be of one log, whatever the limits under which each was folded.

        The limits bound the ids that memory holds. Owners with other limits may have written a
        snapshot, and so the folds of its log can differ from it in those alone.
        """
        return run_whole(self.comparing_with(other))

    def comparing_with(self, other: Folded) -> Slices[bool]:
        """Return what `agrees_with` returns, found in slices."""
        mine, its = self._stored(), other._stored()
        for at in range(0, len(mine.view), SLICE_EVENTS):
            if mine.view[at : at + SLICE_EVENTS] != its.view[at : at + SLICE_EVENTS]:
                return False
            yield
        return (
            len(mine.view) == len(its.view)
            and mine.turns.agrees_with(its.turns)
            and end_alike(mine.calls_left, its.calls_left)
            and end_alike(mine.responses_left, its.responses_left)
            and replace(mine, **_COMPARED_APART) == replace(its, **_COMPARED_APART)
        )

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at seq {self.seq}, {self.agent_execution_status}>"

    # --- advancing -------------------------------------------------------------------------------

    def fold(self, event: Event) -> None:
        """Advance all folds by one event that is in the log."""
        self.seq += 1
        event_id = event.id
        if event_id > self.event_id_max:  # noqa: PLR1730 - `max` takes three times as long
            self.event_id_max = event_id
        if self.seq == 1:
            self.begin_listed(event)
        for step in _STEPS_OF_KIND.get(event.kind, _PASSED_OVER):
            step(self, event)

    # The steps of `fold`; `STEPS` says which kinds each of them is called with.

    def _show(self, event: LLMConvertibleEvent) -> None:
        self.admission.append(event)
        self.recently_seen = seen_after(self.recently_seen, event)

    def _change_view(self, event: Event) -> None:
        left = self.admission.fold(event)
        if left:
            self._note_left(event, left)

    def _note_prompt(self, event: SystemPromptEvent) -> None:
        self.recently_seen = seen_after(self.recently_seen, event)

    def _fold_turns(self, event: Event) -> None:
        self.turns.fold(event, self.seq, known_max=self.limits.known_messages_max)

    def _fold_status(self, event: Event) -> None:
        self._status = self._status.fold(event)

    def _retract_listed(self, event: RetractionEvent) -> None:
        self.retract_listed(event, self.admission.events)

    def _fold_details(self, event: Event) -> None:
        self.details = self.details.fold(event)

    def _count_call(self, event: StepFinishedEvent) -> None:
        # Added up when they are asked for: new metrics for each call take longer.
        self._new_usages = (*self._new_usages, event.usage)
        if len(self._new_usages) >= _USAGES_MAX:
            self._metrics = self.metrics
        self.iteration += 1

    def _begin_turn(self, _: Event) -> None:
        self.iteration = 0
        self.is_turn_too_long = False
        self.answers, self._answered_response = 0, None

    def _count_answer(self, event: ActionEvent | AgentMessageEvent) -> None:
        running = self.turns.running
        if running is None or event.turn_id != running.turn_id:
            return
        response = event.llm_response_id if event.kind == "action" else None
        if response is None or response != self._answered_response:
            self.answers += 1
        self._answered_response = response

    def _note_request(self, event: Event) -> None:
        running = self.turns.running
        if running is not None and event.turn_id == running.turn_id:
            self.is_turn_too_long = True

    def _end_request(self, _: Event) -> None:
        self.is_turn_too_long = False

    def _keep_tasks(self, event: TaskListUpdatedEvent) -> None:
        self.task_list = event.tasks

    # A fold is called only with the kinds that it looks at: most of a log are of few kinds. A step
    # sees what those above it have done. (Any: the kind says which class of event it is.)
    STEPS: ClassVar[Sequence[tuple[Callable[[Folded, Any], None], Collection[str]]]] = (
        (_show, SEEN_KINDS - {"system_prompt"}),
        (_change_view, {"system_prompt", *CHANGING_KINDS}),
        (_note_prompt, {"system_prompt"}),
        (_fold_turns, TURN_KINDS),
        (_fold_status, MOVING_KINDS),
        (ListedFold.fold_listed, ACTIVE_KINDS),
        (_retract_listed, {"retraction"}),
        (_fold_details, {CHANGE_KIND}),
        (_count_call, {"step_finished"}),
        (_begin_turn, {"turn_started"}),
        (_count_answer, {"agent_message", "action"}),
        (_note_request, {"condensation_request"}),
        (_end_request, {"condensation", "turn_ended"}),
        (_keep_tasks, {"task_list_updated"}),
    )

    def watch(self) -> None:
        """From here on, note if an event comes that admission would have refused."""
        self.admission.watches = True

    def end_watch(self) -> bool:
        """Stop watching. True if admission would have let through all that came meanwhile."""
        self.admission.watches = False
        return not self.admission.is_suspect

    def enforce(self, facts: LogFacts) -> tuple[str, ...]:
        """Take the events that break a property out of the view, given the facts of the log."""
        left = self.admission.enforce(facts)
        return tuple(event.id for event in left)

    def _note_left(self, event: Event, left: Iterable[LLMConvertibleEvent]) -> None:
        condensed = set(self.condensed_turns)
        if isinstance(event, CondensationEvent):
            condensed.update(gone.turn_id for gone in left if gone.turn_id is not None)
        if condensed:
            running = self.turns.running
            kept = {shown.turn_id for shown in self.admission.events}
            kept.add(None if running is None else running.turn_id)
            self.condensed_turns = frozenset(condensed & kept)

    def _restore(self, folds: StoredFolds) -> Slices[None]:
        self.seq = folds.seq
        self.restored_seq = folds.seq
        self.turns = folds.turns
        self.condensed_turns = frozenset(folds.condensed_turns)
        self.is_turn_too_long = folds.is_turn_too_long
        self.recently_seen = folds.recently_seen[-SEEN_MAX:]
        self._metrics, self._new_usages = folds.metrics, ()
        self.task_list = folds.task_list
        self.details = folds.details
        self.restore_listed(folds.listed)
        self.iteration = folds.iteration
        self.answers = folds.answers
        self._answered_response = folds.answered_response
        self.event_id_max = folds.event_id_max
        self.unknown_kinds = frozenset(folds.unknown_kinds)
        self._status = folds.status
        self.admission = Admission(
            finished_max=self.limits.finished_calls_max,
            calls_left=folds.calls_left,
            responses_left=folds.responses_left,
            unhandled_request=folds.unhandled_request,
        )
        for at in range(0, len(folds.view), SLICE_EVENTS):
            if at:
                yield
            self.admission.restore(filter(is_seen_by_model, folds.view[at : at + SLICE_EVENTS]))

    def _stored(self) -> StoredFolds:
        view = self.view
        return StoredFolds(
            seq=self.seq,
            view=tuple(view),
            unhandled_request=view.unhandled_condensation_request,
            calls_left=self.admission.calls_left,
            responses_left=self.admission.responses_left,
            status=self._status,
            turns=self.turns,
            condensed_turns=tuple(sorted(self.condensed_turns)),
            is_turn_too_long=self.is_turn_too_long,
            recently_seen=stored_seen(self.recently_seen),
            metrics=self.metrics,
            task_list=self.task_list,
            details=self.details,
            listed=self.copy_listed(),
            iteration=self.iteration,
            answers=self.answers,
            answered_response=self._answered_response,
            event_id_max=self.event_id_max,
            unknown_kinds=tuple(sorted(self.unknown_kinds)),
        )


_STEPS_OF_KIND: Final = {
    kind: tuple(step for step, kinds in Folded.STEPS if kind in kinds) for kind in EVENT_CLASSES
}


def _pass_over(folded: Folded, event: Event) -> None:
    folded.unknown_kinds |= {event.kind}


_PASSED_OVER: Final = (_pass_over,)


class ColdLoad:
    """A whole log, folded record by record, then enforced once. One of the three entry points."""

    def __init__(self, *, limits: Limits = Limits()) -> None:
        self._folded = Folded(limits=limits)
        self._folded.watch()
        self._facts = LogFacts()

    def fold(self, event: Event) -> None:
        """Fold the next event of the log."""
        self._folded.fold(event)
        self._facts.fold(event)

    def finish(self) -> tuple[Folded, tuple[str, ...]]:
        """Enforce; return the folds, and the ids that had to leave the view."""
        return self._folded, self._folded.enforce(self._facts)
