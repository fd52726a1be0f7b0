"""Admission: the check that events may follow the log as it stands.

It answers one question: given the calls that are open, which events may come next, and which may
leave the view? It admits only logs whose fold equals their rebuild: no admitted event can break a
property of the view, now or later.

It promises:

1. `check` changes nothing and is a function of the log and the events. It takes several events as
   one command: each sees those before it;
2. it is fail-closed: if the check itself raises, the events are refused, and the violation says
   that the check raised;
3. its state is a fold of the log, so it is the same after any reopening.

It remembers each call of the view, and the newest calls and responses that have left it, up to a
bound. A result for a call that it has forgotten is refused as unmatched. It does no harm if the id
of a forgotten call is used again: no later event belongs to a group that has left the view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from turnkeeper.runtime import Refused

from ..events import (
    EVENT_CLASSES,
    RESULT_CLASSES,
    RESULT_KINDS,
    ActionEvent,
    CondensationEvent,
    CondensationSummaryEvent,
    Event,
    LLMConvertibleEvent,
    RetractionEvent,
)
from ..values.tables import NO_TABLE
from .properties import LogFacts
from .view import SHORTENED_MARKER, ViewFold
from .view_index import find_torn

__all__ = [
    "Admission",
    "AdmissionRefused",
    "AppendResult",
    "Appended",
    "Duplicate",
    "Rejected",
    "Violation",
    "ViolationName",
    "appended",
]

ViolationName: TypeAlias = Literal[
    "interleaved_message",
    "interleaved_response",
    "unmatched_tool_result",
    "duplicate_tool_call",
    "duplicate_tool_result",
    "summary_in_log",
    "illegal_condensation",
    "illegal_retraction",
    "check_failed",
]


@dataclass(frozen=True, slots=True)
class Violation:
    """The reason why admission refused an event."""

    name: ViolationName
    event: Event
    reason: str

    @property
    def event_id(self) -> str:
        return self.event.id


@dataclass(frozen=True, slots=True)
class Appended:
    """The event is in the log, at this seq."""

    seq: int


# A value, so conversations share those of the seqs that were asked for last: with one of its own,
# each append that waits for its commit would hold one more object for the garbage collector.
appended = lru_cache(maxsize=1_024)(Appended)


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The log had this event already, at this seq; nothing was written."""

    seq: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Admission refused the event; nothing was written."""

    violation: Violation


AppendResult: TypeAlias = Appended | Duplicate | Rejected


class AdmissionRefused(Refused):
    """Admission refused an event; nothing of its command was written."""

    def __init__(self, conversation_id: str, violation: Violation) -> None:
        super().__init__(
            f"append refused on conversation {conversation_id}: event {violation.event_id} is "
            f"{violation.name}: {violation.reason}; nothing was written; "
            "append events that may follow the log as it is now"
        )
        self.conversation_id = conversation_id
        self.violation = violation


class Admission(ViewFold):
    """The fold of a view that admission guards, and of what has left it. Only the owner folds."""

    __slots__ = ("_calls_left", "_finished_max", "_responses_left")

    def __init__(
        self,
        *,
        finished_max: int,
        calls_left: Iterable[str] = (),
        responses_left: Iterable[str] = (),
        unhandled_request: bool = False,
    ) -> None:
        """Remember `finished_max` calls and responses that have left the view."""
        super().__init__(unhandled_request=unhandled_request)
        self._finished_max = finished_max
        # Made at the first call that leaves: from many views none ever does.
        self._calls_left: dict[str, None] = dict.fromkeys(calls_left) or NO_TABLE
        self._responses_left: dict[str, None] = dict.fromkeys(responses_left) or NO_TABLE

    @property
    def calls_left(self) -> tuple[str, ...]:
        """The newest calls that have left the view, newest last."""
        return tuple(self._calls_left)

    @property
    def responses_left(self) -> tuple[str, ...]:
        """The newest responses that have left the view, newest last."""
        return tuple(self._responses_left)

    @property
    def open_calls(self) -> Mapping[str, ActionEvent]:
        """The calls that have no result yet, by call id, in order."""
        return self.events.open_calls

    def fold(self, event: Event) -> tuple[LLMConvertibleEvent, ...]:
        left = super().fold(event)
        self._note_left(left)
        return left

    def enforce(self, facts: LogFacts) -> tuple[LLMConvertibleEvent, ...]:
        left = super().enforce(facts)
        self._note_left(left)
        return left

    def _note_left(self, left: Iterable[LLMConvertibleEvent]) -> None:
        """Remember the calls and responses among the events that have left the view."""
        for event in left:
            if isinstance(event, ActionEvent):
                self._calls_left = self._remember(self._calls_left, event.tool_call_id)
                self._responses_left = self._remember(self._responses_left, event.llm_response_id)

    def _remember(self, newest: dict[str, None], left: str) -> dict[str, None]:
        """Return the ids with this one behind the others; the oldest goes if there are too many."""
        if newest is NO_TABLE:
            newest = {}
        newest.pop(left, None)
        newest[left] = None
        if len(newest) > self._finished_max:
            del newest[next(iter(newest))]
        return newest

    def check(self, events: Sequence[Event]) -> Violation | None:
        """Return the violation if these events may not follow, in this order and as one command."""
        if not self.events.open_calls:
            for event in events:
                if event.kind not in _FREE_KINDS:
                    break
            else:
                return None
        trial = _Trial(self, self._calls_left, self._responses_left)
        for event in events:
            try:
                found = trial.judge(event)
            except Exception as error:  # noqa: BLE001 - fail-closed: an unchecked event is refused
                reason = f"the check itself raised {type(error).__name__}"
                return Violation("check_failed", event, reason)
            if found is not None:
                return Violation(found[0], event, found[1])
        return None


# The kinds that may follow any log without an open call. Those that this version does not know are
# judged like the others.
_FREE_KINDS = (
    EVENT_CLASSES.keys()
    - RESULT_KINDS
    - {"action", "condensation", "condensation_summary", "retraction"}
)

_Found: TypeAlias = tuple[ViolationName, str]


class _Trial:
    """Admission while one command is judged: the fold, and the events judged so far."""

    def __init__(
        self, view: ViewFold, calls_left: Mapping[str, None], responses_left: Mapping[str, None]
    ) -> None:
        self._view = view
        self._calls_left = calls_left
        self._responses_left = responses_left
        self._judged: list[Event] = []
        self._open = {
            call_id: action.llm_response_id for call_id, action in view.events.open_calls.items()
        }
        self._calls: set[str] = set()
        self._responses: set[str] = set()
        # The response that may still get calls: only its own actions have come since it began.
        self._response: str | None = None
        last = view.last_event
        if isinstance(last, ActionEvent) and last.tool_call_id in self._open:
            self._response = last.llm_response_id

    def judge(self, event: Event) -> _Found | None:
        """Return the violation of this event, if any; the next event is judged as its successor."""
        found: _Found | None = None
        if isinstance(event, ActionEvent):
            found = self._judge_action(event)
        elif isinstance(event, RESULT_CLASSES):
            found = self._judge_result(event.tool_call_id)
        elif isinstance(event, CondensationSummaryEvent):
            found = ("summary_in_log", "a summary is made by the view, from a condensation")
        elif isinstance(event, LLMConvertibleEvent):
            if self._open:
                found = ("interleaved_message", f"open calls: {', '.join(self._open)}")
            self._response = None
        elif isinstance(event, CondensationEvent):
            found = _judge_condensation(event, self._view_now())
        elif isinstance(event, RetractionEvent):
            found = _judge_retraction(event, self._view_now())
        self._judged.append(event)
        return found

    def _judge_action(self, action: ActionEvent) -> _Found | None:
        call_id, response_id = action.tool_call_id, action.llm_response_id
        if (
            call_id in self._calls
            or call_id in self._view.events.calls
            or call_id in self._calls_left
        ):
            return "duplicate_tool_call", f"call {call_id} is in the log"
        others = [open_id for open_id, response in self._open.items() if response != response_id]
        if others:
            return "interleaved_response", f"calls of another response are open: {others}"
        if response_id != self._response and (
            response_id in self._responses
            or response_id in self._view.events.responses
            or response_id in self._responses_left
        ):
            return "interleaved_response", f"response {response_id} is complete"
        self._response = response_id
        self._responses.add(response_id)
        self._calls.add(call_id)
        self._open[call_id] = response_id
        return None

    def _judge_result(self, call_id: str) -> _Found | None:
        self._response = None
        if self._open.pop(call_id, None) is not None:
            return None
        events = self._view.events
        if call_id in self._calls or call_id in events.results or call_id in self._calls_left:
            return "duplicate_tool_result", f"call {call_id} has a result already"
        return "unmatched_tool_result", f"there is no call {call_id}"

    def _view_now(self) -> ViewFold:
        if not self._judged:
            return self._view
        view = self._view.copy()
        for event in self._judged:
            view.fold(event)
        return view


def _judge_condensation(event: CondensationEvent, view: ViewFold) -> _Found | None:
    offset = None if event.summary is None else event.summary_offset
    fault = _find_torn(view, event.forgotten_event_ids, offset)
    if fault is None and event.shortened:
        fault = _find_not_shortened(event, view)
    return None if fault is None else ("illegal_condensation", fault)


def _find_not_shortened(event: CondensationEvent, view: ViewFold) -> str | None:
    """Name an event that the condensation would shorten and cannot; None if there is none."""
    kept = {
        result.id: len(result.content) - len(SHORTENED_MARKER)
        for result in view.events
        if isinstance(result, RESULT_CLASSES) and result.id not in event.forgotten_event_ids
    }
    for event_id, length in event.shortened.items():
        if event_id not in kept:
            return f"event {event_id} is not a result that stays in the view"
        if not isinstance(length, int) or length >= kept[event_id]:
            return f"event {event_id} would not become shorter"
    return None


def _judge_retraction(event: RetractionEvent, view: ViewFold) -> _Found | None:
    ids = frozenset(event.retracted_event_ids)
    gone = ids.difference(kept.id for kept in view.events)
    if gone:
        return "illegal_retraction", f"not in the view: {', '.join(sorted(gone))}"
    if view.events.open_calls:
        return "illegal_retraction", "a call is open"
    if any(isinstance(kept, CondensationSummaryEvent) and kept.id in ids for kept in view.events):
        return "illegal_retraction", "a summary is not an event of the log"
    torn = _find_torn(view, event.retracted_event_ids, None)
    return None if torn is None else ("illegal_retraction", torn)


def _find_torn(view: ViewFold, ids: Sequence[str], summary_offset: int | None) -> str | None:
    return find_torn(view.events, view.events.open_calls, frozenset(ids), summary_offset)
