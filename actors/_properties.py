"""The four properties of a view, and what has to leave a view that breaks them.

`LogFacts` is folded over the whole log and remembers what its events belong to: the actions of
each model response, each tool loop, the calls that are pending. `find_violations` then says which
events of a view break a property. In the order of the rules:

1. *observation uniqueness*: at most one result for each call, the first wins; and at most one
   action for each call id, the last before that result (or the first, where none is before it);
2. *batch atomicity*: the actions of one model response are all in the view, or none;
3. *tool-call matching*: an action has its result in the view, and a result its action; a call
   that is pending needs none yet;
4. *tool-loop atomicity*: the members of one tool loop are all in the view, or none.

The second to fourth rule only ever ask for more to go, and what has gone never comes back, so the
end of applying them in any order until nothing changes is the same; here a removal directly tells
its consequences, each once. That makes it linear in the log.

What a condensation or a retraction has taken is settled: later events are never tied to it. A
response or an open loop ends there, so that what has left the view, and the memory of it, can
never pull out what came later.

It runs where a log may be from elsewhere: at a cold load, a fork, and error recovery. It never
raises. `runs` counts how often a view was enforced, which tests hold against those three.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .events import (
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
    """How often a view was enforced in this process."""

    total = 0


runs = Runs()


class LogFacts:
    """The fold over a whole log. Its memory is O(log); it is dropped after the check."""

    def __init__(self) -> None:
        # Batches and tool loops are groups: their members are all in the view, or none.
        self._groups: list[list[str]] = []
        self._batches: dict[str, list[str]] = {}
        """The group of each model response that an action may still join."""
        self._response_of: dict[str, str] = {}
        """The model response of each action in `_batches`, by event id."""
        self._loop: list[str] | None = None
        """The group of the tool loop that is open."""
        self._in_loop: set[str] = set()
        self._response: str | None = None
        """The model response since whose begin only its own actions and results have come."""
        self._calls: dict[str, str | None] = {}
        """Its calls: the event id of the action by call id; None once there is a result."""

    def fold(self, event: Event) -> None:
        """Advance by one event of the log."""
        if not is_seen_by_model(event):
            if isinstance(event, CondensationEvent):
                self._settle(event.forgotten_event_ids)
            elif isinstance(event, RetractionEvent):
                self._settle(event.retracted_event_ids)
        elif event.kind in RESULT_KINDS:
            assert isinstance(event, RESULT_CLASSES), event.kind
            if event.tool_call_id in self._calls:
                self._calls[event.tool_call_id] = None
            else:
                self._end_response()
            self._join_loop(event)
        elif isinstance(event, ActionEvent):
            self._fold_action(event)
        else:
            self._end_response()
            self._end_loop()

    def find_violations(self, view: Sequence[LLMConvertibleEvent]) -> tuple[str, ...]:
        """The ids of the events that have to leave this view of the log, in its order."""
        pending = frozenset(event_id for event_id in self._calls.values() if event_id is not None)
        pairs, gone = _find_pairs(view, pending)
        gone = _close(frozenset(event.id for event in view), [*self._groups, *pairs], gone)
        return tuple(event.id for event in view if event.id in gone)

    def _fold_action(self, action: ActionEvent) -> None:
        response_id = action.llm_response_id
        batch = self._batches.get(response_id)
        if batch is None:
            self._end_response()
            self._response = response_id
            batch = self._batches[response_id] = []
            self._groups.append(batch)
        elif response_id != self._response:
            self._end_response()
        batch.append(action.id)
        self._response_of[action.id] = response_id
        if self._response is not None:
            self._calls.setdefault(action.tool_call_id, action.id)
        if action.thinking:
            self._loop = []
            self._in_loop = set()
            self._groups.append(self._loop)
        self._join_loop(action)

    def _join_loop(self, event: LLMConvertibleEvent) -> None:
        if self._loop is not None:
            self._loop.append(event.id)
            self._in_loop.add(event.id)

    def _end_loop(self) -> None:
        self._loop = None
        self._in_loop = set()

    def _end_response(self) -> None:
        self._response = None
        self._calls = {}

    def _settle(self, event_ids: Sequence[str]) -> None:
        for event_id in event_ids:
            response_id = self._response_of.get(event_id)
            if response_id is not None:
                for member in self._batches.pop(response_id):
                    self._response_of.pop(member, None)
            if event_id in self._in_loop:
                self._end_loop()


def _find_pairs(
    view: Sequence[LLMConvertibleEvent], pending: frozenset[str]
) -> tuple[list[Sequence[str]], set[str]]:
    """Each call with its result, as groups; and what has neither a part in one nor a reason."""
    results: dict[str, tuple[int, str]] = {}
    actions: dict[str, str] = {}
    for at, event in enumerate(view):
        if isinstance(event, RESULT_CLASSES):
            results.setdefault(event.tool_call_id, (at, event.id))
    for at, event in enumerate(view):
        if isinstance(event, ActionEvent):
            call_id = event.tool_call_id
            comes_before = call_id in results and at < results[call_id][0]
            if call_id not in actions or comes_before:
                actions[call_id] = event.id
    pairs: list[Sequence[str]] = []
    kept = set[str]()
    for call_id, action_id in actions.items():
        if call_id in results:
            pair = (action_id, results[call_id][1])
            pairs.append(pair)
            kept.update(pair)
        elif action_id in pending:
            kept.add(action_id)
    return pairs, {
        event.id
        for event in view
        if isinstance(event, (ActionEvent, *RESULT_CLASSES)) and event.id not in kept
    }


def _close(present: frozenset[str], groups: Sequence[Sequence[str]], gone: set[str]) -> set[str]:
    """What has to go, so that of no group only a part is left."""
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
