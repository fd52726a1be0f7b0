"""The view: the events that the model sees, as a fold of the log.

`ViewFold` belongs to the owner of a conversation, who alone advances it. It promises:

1. an append is O(1), and so is a snapshot; a condensation or a retraction costs O(view);
2. a snapshot, a `View`, never changes, whatever the owner folds afterwards;
3. for a log that admission let through, the fold is the rebuild: `View.from_events` of any prefix
   of the log gives this view. Enforcement finds nothing to do there, and never runs here.

A `View` can be read from any thread. Both are memory only; what survives is the log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar, overload

from ._properties import LogFacts, runs
from ._ties import ManipulationIndices, Ties, find_torn
from .events import (
    CondensationEvent,
    CondensationSummaryEvent,
    Event,
    LLMConvertibleEvent,
    RetractionEvent,
    is_seen_by_model,
)

__all__ = ["Derivation", "ManipulationIndices", "View", "ViewCheck", "ViewFold", "verify_view"]


T_co = TypeVar("T_co", covariant=True)


class Derivation(Protocol[T_co]):
    """Something that is kept for the events of a view, each of them taken in once."""

    length: int
    """How many events it has taken in; moves only when one has been taken in whole."""

    def fold(self, event: LLMConvertibleEvent) -> None: ...

    def result(self) -> T_co:
        """What follows from the events so far; later ones do not change it."""


class _Line:
    """What all snapshots between two condensations share.

    Invariant: `events` only grows, and only by the fold that made the line. A snapshot covers as
    many events as there were when it was taken, so it never sees what came later.
    """

    __slots__ = ("derived", "events", "lock")

    def __init__(self, events: list[LLMConvertibleEvent]) -> None:
        self.events = events
        self.derived: dict[Hashable, Derivation[Any]] = {}
        """What readers have derived from `events` so far, by key. Any: each key has its type."""
        self.lock = threading.Lock()
        """Held by whoever extends `derived`; any thread may be the first to ask."""


class View(Sequence[LLMConvertibleEvent]):
    """The events that the model sees, at one moment; immutable."""

    __slots__ = ("_indices", "_length", "_line", "unhandled_condensation_request")

    def __init__(self, line: _Line, indices: ManipulationIndices, *, request: bool) -> None:
        self._line = line
        self._length = len(line.events)
        self._indices = indices
        self.unhandled_condensation_request = request
        """A condensation was asked for and has not come yet."""

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> View:
        """The view of a whole log from anywhere: folded, then enforced."""
        fold, _ = ViewFold.from_events(events)
        return fold.snapshot()

    @property
    def manipulation_indices(self) -> ManipulationIndices:
        """Where history may be cut, or a summary put, without breaking any property."""
        return self._indices

    @property
    def has_open_calls(self) -> bool:
        """A call waits for its result, so nothing can be sent to a model."""
        return self._length not in self._indices

    def find_next(self, index: int) -> int | None:
        """The smallest manipulation index that is not below `index`, if there is one."""
        return self._indices.find_next(index)

    def derive(self, key: Hashable, make: Callable[[], Derivation[T_co]]) -> T_co:
        """What a derivation makes of this view, at the cost of the events that are new to it.

        It is kept under `key` for the next views; a view older than the newest that asked has it
        made afresh.
        """
        line = self._line
        with line.lock:
            kept: Derivation[T_co] | None = line.derived.get(key)
            if kept is None:
                kept = line.derived[key] = make()
            if kept.length <= self._length:
                for event in line.events[kept.length : self._length]:
                    kept.fold(event)
                return kept.result()
        fresh = make()
        for event in self:
            fresh.fold(event)
        return fresh.result()

    def is_continuation_of(self, earlier: View) -> bool:
        """Whether nothing has left the view since `earlier`; a quick look that may miss some."""
        return self._line is earlier._line and earlier._length <= self._length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[LLMConvertibleEvent]:
        return islice(self._line.events, self._length)

    @overload
    def __getitem__(self, at: int) -> LLMConvertibleEvent: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[LLMConvertibleEvent]: ...
    def __getitem__(self, at: int | slice) -> LLMConvertibleEvent | Sequence[LLMConvertibleEvent]:
        if isinstance(at, slice):
            return tuple(self._line.events[n] for n in range(*at.indices(self._length)))
        if not -self._length <= at < self._length:
            raise IndexError(at)
        return self._line.events[at % self._length]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, View):
            return NotImplemented
        return (
            self.unhandled_condensation_request == other.unhandled_condensation_request
            and self._indices == other._indices
            and len(self) == len(other)
            and all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __repr__(self) -> str:
        ids = ", ".join(f"{event.kind} {event.id}" for event in self)
        return f"View([{ids}])"


_CHANGING_KINDS = ("condensation", "condensation_request", "retraction")


class ViewFold:
    """The fold itself. One owner, one task."""

    __slots__ = ("_is_suspect", "_line", "_request", "ties", "watches")

    def __init__(
        self, events: Iterable[LLMConvertibleEvent] = (), *, unhandled_request: bool = False
    ) -> None:
        self._request = unhandled_request
        self.watches = False
        """Look also at what leaves the view, which an owner's admission has done already."""
        self._is_suspect = False
        self.ties = Ties()
        self._begin_line(list(events))

    @classmethod
    def from_events(
        cls, events: Iterable[Event]
    ) -> tuple[ViewFold, tuple[LLMConvertibleEvent, ...]]:
        """Fold a whole log from anywhere and enforce; gives what enforcement removed, too.

        An event whose id came before is that event once more, and is passed over.
        """
        log = _once_each(events)
        fold, facts = cls(), LogFacts()
        fold.watches = True
        for event in log:
            fold.fold(event)
        if fold.is_suspect:
            for event in log:
                facts.fold(event)
        return fold, fold.enforce(facts)

    def snapshot(self) -> View:
        """The view as it stands."""
        return View(self._line, self.ties.indices(), request=self._request)

    @property
    def events(self) -> Sequence[LLMConvertibleEvent]:
        """The events of the view as it stands, for a look and not to keep."""
        return self._line.events

    @property
    def last_event(self) -> LLMConvertibleEvent | None:
        return self._line.events[-1] if self._line.events else None

    def copy(self) -> ViewFold:
        """Another fold that goes on from here; O(view)."""
        return ViewFold(self._line.events, unhandled_request=self._request)

    @property
    def is_suspect(self) -> bool:
        """While it watched, something came that admission would not have let through.

        If nothing did, no property is broken, and the log need not be looked at again.
        """
        return self._is_suspect or self.ties.is_suspect

    def fold(self, event: Event) -> tuple[LLMConvertibleEvent, ...]:
        """Advance by one event of the log; gives the events that it takes out of the view."""
        if is_seen_by_model(event):
            self._line.events.append(event)
            self.ties.fold(event)
        elif event.kind in _CHANGING_KINDS:
            if isinstance(event, CondensationEvent):
                return self._condense(event)
            if isinstance(event, RetractionEvent):
                return self._retract(event)
            self._request = True
        return ()

    def enforce(self, facts: LogFacts) -> tuple[LLMConvertibleEvent, ...]:
        """Remove what breaks a property, given the facts of the whole log; gives what went."""
        runs.total += 1
        if self.watches and not self.is_suspect:
            self.watches = False
            return ()
        self.watches = False
        return self._remove(facts.find_violations(self._line.events))

    def _watch(self, event_ids: Sequence[str], summary_offset: int | None) -> None:
        if self.watches and not self.is_suspect and (event_ids or summary_offset is not None):
            ids = frozenset(event_ids)
            torn = find_torn(self._line.events, self.ties.open_calls, ids, summary_offset)
            self._is_suspect = torn is not None

    def _retract(self, event: RetractionEvent) -> tuple[LLMConvertibleEvent, ...]:
        self._watch(event.retracted_event_ids, None)
        return self._remove(event.retracted_event_ids)

    def _condense(self, event: CondensationEvent) -> tuple[LLMConvertibleEvent, ...]:
        self._request = False
        offset = None if event.summary is None else event.summary_offset
        self._watch(event.forgotten_event_ids, offset)
        left = self._remove(event.forgotten_event_ids)
        if event.summary is not None and event.summary_offset is not None:
            summary = CondensationSummaryEvent(
                id=f"{event.id}-summary",
                timestamp=event.timestamp,
                turn_id=event.turn_id,
                content=event.summary,
            )
            events = self._line.events.copy()
            events.insert(event.summary_offset, summary)
            self._begin_line(events)
        return left

    def _remove(self, event_ids: Sequence[str]) -> tuple[LLMConvertibleEvent, ...]:
        ids = frozenset(event_ids)
        left = tuple(event for event in self._line.events if event.id in ids) if ids else ()
        if left:
            self._begin_line([event for event in self._line.events if event.id not in ids])
        return left

    def _begin_line(self, events: list[LLMConvertibleEvent]) -> None:
        # What was suspect stays so, though it may have left the view.
        self._is_suspect = self.is_suspect
        self._line = _Line(events)
        self.ties = Ties()
        for event in events:
            self.ties.fold(event)


def _once_each(events: Iterable[Event]) -> Sequence[Event]:
    log = list(events)
    last_id = ""
    for event in log:
        if event.id <= last_id:
            break
        last_id = event.id
    else:
        return log  # ids are time-ordered, so this is how nearly every log is
    by_id: dict[str, Event] = {}
    for event in log:
        by_id.setdefault(event.id, event)
    return list(by_id.values())


class ViewCheck:
    """Holds a view against the rebuild of its log, on the side; it changes nothing.

    Unlike a load it takes nobody's word that the log is sound: all four properties are checked.
    """

    def __init__(self) -> None:
        self._rebuilt = ViewFold()
        self._facts = LogFacts()

    def fold(self, event: Event) -> None:
        """Take in the next event of the log."""
        self._rebuilt.fold(event)
        self._facts.fold(event)

    def find_divergence(self, view: View) -> str | None:
        """What tells this view from the rebuild; None if nothing does."""
        broken = self._facts.find_violations(self._rebuilt.events)
        if broken:
            return f"enforcement would remove {', '.join(broken)}"
        rebuilt = self._rebuilt.snapshot()
        if rebuilt == view:
            return None
        for at, (mine, theirs) in enumerate(zip(view, rebuilt, strict=False)):
            if mine != theirs:
                return f"at {at} the view has event {mine.id}, the rebuild {theirs.id}"
        return (
            f"the view has {len(view)} events and {len(view.manipulation_indices)} manipulation "
            f"indices, the rebuild {len(rebuilt)} and {len(rebuilt.manipulation_indices)}; its "
            f"condensation request is {view.unhandled_condensation_request}, the rebuild's "
            f"{rebuilt.unhandled_condensation_request}"
        )


def verify_view(events: Iterable[Event], view: View) -> str | None:
    """What tells a view from the rebuild of its log; None if nothing does."""
    check = ViewCheck()
    for event in events:
        check.fold(event)
    return check.find_divergence(view)
