"""The four properties of a view, and the events that have to leave a view that breaks them.

`LogFacts` is folded over the whole log and remembers the groups of its events: the actions of each
model response, each tool loop, the calls that are pending. `find_violations` then names the events
of a view that break a property. In the order of the rules:

1. *observation uniqueness*: at most one result for each call, the first wins; and at most one
   action for each call id, the last before that result (or the first, where none is before it);
2. *batch atomicity*: the actions of one model response are all in the view, or none;
3. *tool-call matching*: an action has its result in the view, and a result its action; a call
   that is pending needs none yet;
4. *tool-loop atomicity*: the members of one tool loop are all in the view, or none. A result is a
   member only if its call was open when it came: one that is removed as a second result, or for
   want of a call, takes no loop with it.

The second to fourth rule only ever remove more events, and a removed event never comes back. So
the rules may be applied in any order until nothing changes, and the result is the same. Here each
removal triggers its consequences directly, each once, which is linear in the log.

Events that a condensation or a retraction has taken are settled: no later event belongs to their
groups. A response or an open loop ends there, so that neither the events that have left the view
nor the memory of them can ever pull out a later event.

Enforcement runs if a log may be from elsewhere: at a cold load, a fork, and error recovery. It
never raises. `runs` counts how often a view was enforced; tests compare that with those three.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from ..events import (
    RESULT_CLASSES,
    RESULT_KINDS,
    ActionEvent,
    CondensationEvent,
    Event,
    LLMConvertibleEvent,
    RetractionEvent,
    is_seen_by_model,
)

__all__ = ["LogFacts", "Runs", "runs"]


class Runs:
    """Counts how often a view was enforced in this process."""

    total = 0


runs = Runs()


# A fact about one event. Of a result: its id and its call's id. Of an action: these, its response's
# id, and whether it has thinking. Of a condensation or a retraction: the ids that it takes. Of a
# message: None. Plain tuples, because every event of every log makes one.
_Fact: TypeAlias = "tuple[str, str] | tuple[str, str, str, bool] | frozenset[str] | None"


class LogFacts:
    """The fold over a whole log. Its memory is O(log); it is dropped after the check."""

    def __init__(self) -> None:
        self._facts: list[_Fact] = []

    def fold(self, event: Event) -> None:
        """Advance by one event of the log."""
        if is_seen_by_model(event):
            if event.kind in RESULT_KINDS:
                assert isinstance(event, RESULT_CLASSES), event.kind
                self._facts.append((event.id, event.tool_call_id))
            elif isinstance(event, ActionEvent):
                has_thinking = bool(event.thinking)
                self._facts.append(
                    (event.id, event.tool_call_id, event.llm_response_id, has_thinking)
                )
            else:
                self._facts.append(None)
        elif event.kind == "condensation":
            assert isinstance(event, CondensationEvent), event.kind
            self._facts.append(frozenset(event.forgotten_event_ids))
        elif event.kind == "retraction":
            assert isinstance(event, RetractionEvent), event.kind
            self._facts.append(frozenset(event.retracted_event_ids))

    def find_violations(self, view: Sequence[LLMConvertibleEvent]) -> tuple[str, ...]:
        """Return the ids of the events that have to leave this view of the log, in its order."""
        groups = _Groups()
        for fact in self._facts:
            match fact:
                case None:
                    groups.end_response()
                    groups.end_loop()
                case (event_id, call_id):
                    groups.add_result(event_id, call_id)
                case (event_id, call_id, response_id, bool(has_thinking)):
                    groups.add_action(event_id, call_id, response_id, has_thinking=has_thinking)
                case frozenset():
                    groups.settle(fact)
        pairs, gone = _find_pairs(view, groups.pending())
        gone = _close(frozenset(event.id for event in view), [*groups.all, *pairs], gone)
        return tuple(event.id for event in view if event.id in gone)


class _Groups:
    """The batches and the tool loops of a log: the members of each are all in the view, or none."""

    def __init__(self) -> None:
        self.all: list[list[str]] = []
        self._batches: dict[str, list[str]] = {}
        """The actions of each model response that another action may still join."""
        self._response_of: dict[str, str] = {}
        """The model response of each action in `_batches`, by event id."""
        self._loop: list[str] | None = None
        """The members of the open tool loop."""
        self._in_loop: set[str] = set()
        self._in_view: dict[str, tuple[str, Counter[str]]] = {}
        """Of each action and result in the view: its call id, and the count that it is in."""
        self._called: Counter[str] = Counter()
        """How many actions of each call id the view has."""
        self._answered: Counter[str] = Counter()
        """How many results of each call id the view has."""
        self._response: str | None = None
        """The newest model response, if only its own actions and results have come since."""
        self._calls: dict[str, str | None] = {}
        """The calls of `_response`: the action's event id by call id; None once it has a result."""

    def pending(self) -> frozenset[str]:
        """Return the actions whose results may still come."""
        return frozenset(event_id for event_id in self._calls.values() if event_id is not None)

    def add_action(
        self, event_id: str, call_id: str, response_id: str, *, has_thinking: bool
    ) -> None:
        batch = self._batches.get(response_id)
        if batch is None:
            self.end_response()
            self._response = response_id
            batch = self._batches[response_id] = []
            self.all.append(batch)
        elif response_id != self._response:
            self.end_response()
        batch.append(event_id)
        self._response_of[event_id] = response_id
        if self._response is not None:
            self._calls.setdefault(call_id, event_id)
        if has_thinking:
            self._loop = []
            self._in_loop = set()
            self.all.append(self._loop)
        self._count(event_id, call_id, self._called)
        self._join_loop(event_id)

    def add_result(self, event_id: str, call_id: str) -> None:
        if call_id in self._calls:
            self._calls[call_id] = None
        else:
            self.end_response()
        if self._called[call_id] and not self._answered[call_id]:
            self._join_loop(event_id)
        self._count(event_id, call_id, self._answered)

    def settle(self, event_ids: Iterable[str]) -> None:
        """End the groups of events that have left the view; later events join none of them."""
        for event_id in event_ids:
            if event_id in self._in_view:
                call_id, counts = self._in_view.pop(event_id)
                counts[call_id] -= 1
            response_id = self._response_of.get(event_id)
            if response_id is not None:
                for member in self._batches.pop(response_id):
                    self._response_of.pop(member, None)
            if event_id in self._in_loop:
                self.end_loop()

    def end_loop(self) -> None:
        self._loop = None
        self._in_loop = set()

    def end_response(self) -> None:
        self._response = None
        self._calls = {}

    def _count(self, event_id: str, call_id: str, counts: Counter[str]) -> None:
        self._in_view[event_id] = call_id, counts
        counts[call_id] += 1

    def _join_loop(self, event_id: str) -> None:
        if self._loop is not None:
            self._loop.append(event_id)
            self._in_loop.add(event_id)


def _find_pairs(
    view: Sequence[LLMConvertibleEvent], pending: frozenset[str]
) -> tuple[list[Sequence[str]], set[str]]:
    """Return each call with its result, as groups, and the calls and results without a partner.

    A pending call needs no result yet.
    """
    results: dict[str, tuple[int, str]] = {}
    actions: dict[str, str] = {}
    partners: list[str] = []
    calls: list[tuple[int, ActionEvent]] = []
    for at, event in enumerate(view):
        if event.kind in RESULT_KINDS:
            assert isinstance(event, RESULT_CLASSES), event.kind
            results.setdefault(event.tool_call_id, (at, event.id))
            partners.append(event.id)
        elif event.kind == "action":
            assert isinstance(event, ActionEvent), event.kind
            calls.append((at, event))
            partners.append(event.id)
    for at, action in calls:
        call_id = action.tool_call_id
        comes_before = call_id in results and at < results[call_id][0]
        if call_id not in actions or comes_before:
            actions[call_id] = action.id
    pairs: list[Sequence[str]] = []
    kept = set[str]()
    for call_id, action_id in actions.items():
        if call_id in results:
            pair = (action_id, results[call_id][1])
            pairs.append(pair)
            kept.update(pair)
        elif action_id in pending:
            kept.add(action_id)
    return pairs, set(partners) - kept


def _close(present: frozenset[str], groups: Sequence[Sequence[str]], gone: set[str]) -> set[str]:
    """Return all ids that have to go, so that each group is left whole or not at all."""
    groups_of: dict[str, list[int]] = defaultdict(list)
    broken: list[int] = []
    for n, group in enumerate(groups):
        if len(group) > 1:
            for event_id in group:
                groups_of[event_id].append(n)
            if any(event_id in gone or event_id not in present for event_id in group):
                broken.append(n)
    is_broken = set(broken)
    while broken:
        for event_id in groups[broken.pop()]:
            if event_id not in gone:
                gone.add(event_id)
                for n in groups_of[event_id]:
                    if n not in is_broken:
                        is_broken.add(n)
                        broken.append(n)
    return gone
