"""The events of a view and their index: calls, results, responses, and where it may be cut.

Some events stay together: a call and its result, the calls of one model response, the members of
one tool loop. The *manipulation indices* are the positions between such groups: there, history may
be cut, or a summary inserted, and no group is torn.

The index is a function of the sequence of events. An append costs O(1). It is defined for every
sequence, malformed ones included: of two actions or two results with one call id, the first counts.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Final, overload

from ..events import RESULT_CLASSES, RESULT_KINDS, ActionEvent, LLMConvertibleEvent
from ..values.tables import NO_TABLE

__all__ = ["IndexedEvents", "ManipulationIndices", "find_torn"]

_EVERY: Final = range(sys.maxsize)
"""The settled indices of a view in which nothing belongs together: all its positions."""


class ManipulationIndices(Sequence[int]):
    """The manipulation indices of one view, ascending; immutable."""

    __slots__ = ("_count", "_end", "_settled")

    def __init__(self, settled: Sequence[int], count: int, end: int | None) -> None:
        # The owner may append to `settled` as the view grows; the first `count` never change.
        self._settled = settled
        self._count = count
        self._end = end

    def find_next(self, index: int) -> int | None:
        """Return the smallest manipulation index that is not below `index`, if there is one."""
        at = bisect_left(self._settled, index, 0, self._count)
        if at < self._count:
            return self._settled[at]
        return self._end if self._end is not None and self._end >= index else None

    def find_last(self, index: int) -> int | None:
        """Return the largest manipulation index that is not above `index`, if there is one."""
        if self._end is not None and self._end <= index:
            return self._end
        at = bisect_right(self._settled, index, 0, self._count)
        return self._settled[at - 1] if at else None

    def __len__(self) -> int:
        return self._count + (self._end is not None)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            return tuple(self)[at]
        if at < 0:
            at += len(self)
        if 0 <= at < self._count:
            return self._settled[at]
        if at == self._count and self._end is not None:
            return self._end
        raise IndexError(at)

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and self.find_next(index) == index

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __repr__(self) -> str:
        return f"ManipulationIndices({list(self)})"


class IndexedEvents(list[LLMConvertibleEvent]):
    """The events of a view, in their order, and the fold over them. Only `fold` appends.

    It is one object, because the garbage collector looks at all objects of each conversation.
    """

    __slots__ = (
        "_running",
        "calls",
        "is_loop_open",
        "is_suspect",
        "open_calls",
        "responses",
        "results",
        "settled",
    )

    def __init__(self) -> None:
        super().__init__()
        # The tables are made at the first call or result: many views have none.
        self.calls: dict[str, int] = NO_TABLE
        """The position of each call, by its call id."""
        self.results: dict[str, int] = NO_TABLE
        """The position of each call's result, by the call id."""
        self.open_calls: dict[str, ActionEvent] = NO_TABLE
        """The calls that have no result yet, in order."""
        self.responses: dict[str, int] = NO_TABLE
        """The position of the last action of each model response."""
        self.is_loop_open = False
        """True if an action or a result that came next would continue a tool loop."""
        self.is_suspect = False
        """True once an event came that admission would have refused at its place."""
        self._running: str | None = None
        self.settled: list[int] | range = _EVERY
        """The manipulation indices below its length; `_EVERY` as long as none is left out.

        Invariant: a list that a snapshot has seen only grows; if an index has to go again, the list
        is replaced. Many a view has no calls, and needs no list.
        """

    def fold(self, event: LLMConvertibleEvent) -> None:
        """Advance by the event that comes next in the view."""
        here = len(self)
        was_index = not self.open_calls
        tied_to = here
        kind = event.kind
        if kind in RESULT_KINDS:
            assert isinstance(event, RESULT_CLASSES), kind
            if self.calls is NO_TABLE:
                self._make_tables()
            tied_to = self._fold_result(event.tool_call_id, here)
            self._running = None
        elif kind == "action":
            assert isinstance(event, ActionEvent), kind
            if self.calls is NO_TABLE:
                self._make_tables()
            tied_to = self._fold_action(event, here)
        else:
            if not was_index:
                self.is_suspect = True
            self.is_loop_open = False
            self._running = None
        # A cut at any index in (tied_to, here] would tear this event from the one at `tied_to`.
        if tied_to != here or not was_index:
            self._leave_out(tied_to, here)
        elif isinstance(self.settled, list):
            self.settled.append(here)
        self.append(event)

    def _leave_out(self, tied_to: int, here: int) -> None:
        """Make no index of the positions above `tied_to`, up to `here`."""
        if isinstance(self.settled, range):
            self.settled = list(self.settled[:here])
        if self.settled and self.settled[-1] > tied_to:
            # Only in a malformed view: in any other, no index was settled inside a group.
            self.settled = self.settled[: bisect_right(self.settled, tied_to)]

    def _make_tables(self) -> None:
        self.calls, self.results, self.open_calls, self.responses = {}, {}, {}, {}

    def _fold_action(self, action: ActionEvent, here: int) -> int:
        call_id, response_id = action.tool_call_id, action.llm_response_id
        tied_to = self.responses.get(response_id, here)
        self.responses[response_id] = here
        if response_id != self._running:
            if self.open_calls or tied_to != here:
                self.is_suspect = True
            self._running = response_id
        if call_id in self.calls:
            self.is_suspect = True
        else:
            self.calls[call_id] = here
            if call_id in self.results:
                self.is_suspect = True
                tied_to = min(tied_to, self.results[call_id])
            else:
                self.open_calls[call_id] = action
        if action.thinking:
            self.is_loop_open = True
        elif self.is_loop_open:
            tied_to = min(tied_to, here - 1)
        return tied_to

    def _fold_result(self, call_id: str, here: int) -> int:
        tied_to = here
        if call_id in self.results:
            self.is_suspect = True
        else:
            self.results[call_id] = here
            tied_to = self.calls.get(call_id, here)
            if self.open_calls.pop(call_id, None) is None:
                self.is_suspect = True
        if self.is_loop_open:
            tied_to = min(tied_to, here - 1)
        return tied_to


def find_torn(
    events: Iterable[LLMConvertibleEvent],
    open_calls: Iterable[str],
    ids: frozenset[str],
    summary_offset: int | None,
) -> str | None:
    """Say which group is torn if these events leave the view and a summary comes in; else None.

    Each group has to be in one place: taken, before the summary, or after it. A group that can
    still grow may not be before the summary. An open call may not be taken either; an open tool
    loop may be taken as a whole, and ends with that.
    """
    place_of: dict[tuple[str, str], str] = {}
    loops = 0
    loop: tuple[str, str] | None = None
    kept = 0
    for event in events:
        if event.id in ids:
            place = "taken"
        else:
            place = "after" if summary_offset is None or kept >= summary_offset else "before"
            kept += 1
        if event.kind == "action":
            assert isinstance(event, ActionEvent), event.kind
            parts = [("call", event.tool_call_id), ("response", event.llm_response_id)]
            if event.thinking:
                loops += 1
                loop = ("tool loop", str(loops))
        elif event.kind in RESULT_KINDS:
            assert isinstance(event, RESULT_CLASSES), event.kind
            parts = [("call", event.tool_call_id)]
        else:
            loop = None
            continue
        if loop is not None:
            parts.append(loop)
        for part in parts:
            if place_of.setdefault(part, place) != place:
                return f"{part[0]} {part[1]} would be torn"
    for call_id in open_calls:
        if place_of["call", call_id] != "after":
            return f"call {call_id} is open"
    if loop is not None and place_of[loop] == "before":
        return "a tool loop is open, and would go on after the summary"
    return None
