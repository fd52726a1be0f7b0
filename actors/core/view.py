"""The view: the events that the model sees, as a fold of the log.

`ViewFold` belongs to the owner of a conversation; nothing else advances it. It promises:

1. an append is O(1), and so is a snapshot; a condensation or a retraction costs O(view);
2. a snapshot, a `View`, never changes, whatever the owner folds afterwards;
3. for a log that admission let through, the fold equals the rebuild: `View.from_events` of any
   prefix of the log gives this view. Enforcement removes nothing from such a log, and never runs
   here.

Any thread may read a `View`. Both are in memory only; only the log survives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Protocol, TypeVar, overload

from ..events import (
    RESULT_CLASSES,
    ActionEvent,
    CondensationEvent,
    CondensationSummaryEvent,
    Event,
    LLMConvertibleEvent,
    ObservationLikeEvent,
    RetractionEvent,
    SystemPromptEvent,
    UserMessageEvent,
    is_seen_by_model,
)
from ..values.frozen import FrozenJson
from .properties import LogFacts, runs
from .view_index import IndexedEvents, ManipulationIndices, find_torn

__all__ = [
    "CHANGING_KINDS",
    "SHORTENED_MARKER",
    "SUMMARY_SUFFIX",
    "Derivation",
    "ManipulationIndices",
    "View",
    "ViewCheck",
    "ViewFold",
    "shorten",
]


T_co = TypeVar("T_co", covariant=True)

SHORTENED_MARKER = "\n[the rest of this result was left out]"
"""Stands at the end of a result that a condensation has shortened."""
SUMMARY_SUFFIX = "-summary"
"""Follows the condensation's id in the id of its summary."""


class Derivation(Protocol[T_co]):
    """A value derived from the events of a view, one event at a time."""

    length: int
    """The number of events folded in; it rises only when an event has been folded in whole."""

    def fold(self, event: LLMConvertibleEvent) -> None: ...

    def result(self) -> T_co:
        """Return the value for the events so far; later events do not change it."""


class _SharedEvents(IndexedEvents):
    """The events that all snapshots between two condensations share.

    Invariant: it only grows, and only the fold that made it appends to it. A snapshot covers as
    many events as there were when it was taken, so it never sees later ones.
    """

    __slots__ = ("_derived",)

    def __init__(self) -> None:
        super().__init__()
        self._derived: _Derived | None = None

    @property
    def derived(self) -> _Derived:
        """Return the derivations of these events.

        The first thread that asks makes the table: most views are of conversations at rest, and
        nothing is derived from them.
        """
        return self._derived or self._make_derived()

    def _make_derived(self) -> _Derived:
        with _first_lock:
            if self._derived is None:
                self._derived = _Derived()
            return self._derived


class _Derived:
    """The derivations of the views that share their events, by key. Hold `lock` to use `kept`."""

    __slots__ = ("kept", "lock")

    def __init__(self) -> None:
        self.kept: dict[Hashable, Derivation[Any]] = {}  # Any: each key has its own type
        self.lock = threading.Lock()


_first_lock: Final = threading.Lock()
"""Held while the table of the derivations of a view is made."""


class View(Sequence[LLMConvertibleEvent]):
    """The events that the model sees, at one moment; immutable."""

    __slots__ = (
        "_end",
        "_length",
        "_protected",
        "_settled",
        "_settled_count",
        "_shared",
        "_turn_id",
        "seq",
        "unhandled_condensation_request",
    )

    def __init__(
        self, shared: _SharedEvents, *, request: bool, turn_id: str | None, seq: int
    ) -> None:
        self.seq = seq
        """The seq of the log that it is the view of; 0 if it was made of events alone."""
        self._turn_id = turn_id
        self._protected: frozenset[str] | None = None
        self._shared = shared
        self._length = len(shared)
        # The arguments of its `ManipulationIndices`.
        self._settled = settled = shared.settled
        self._settled_count = self._length if isinstance(settled, range) else len(settled)
        # The manipulation index behind its events; none while a call is open.
        self._end = None if shared.open_calls else self._length
        self.unhandled_condensation_request = request
        """True while a requested condensation has not come yet."""

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> View:
        """Return the view of a whole log of any origin: folded, then enforced."""
        fold, _ = ViewFold.from_events(events)
        return fold.snapshot()

    @property
    def manipulation_indices(self) -> ManipulationIndices:
        """The positions where history may be cut, or a summary inserted, and no property breaks."""
        return ManipulationIndices(self._settled, self._settled_count, self._end)

    @property
    def has_open_calls(self) -> bool:
        """True while a call waits for its result; nothing can be sent to a model until then."""
        return self._length not in self.manipulation_indices

    @property
    def protected(self) -> frozenset[str]:
        """The ids of the events that no condensation may forget.

        They are the system prompts, the chat messages of the turn that runs (or is paused, or waits
        for a confirmation), and all events from the first action of its newest response on.
        """
        # Derived from what never changes: two threads that ask at once find the same.
        if self._protected is None:
            self._protected = _find_protected(self, self._turn_id)
        return self._protected

    def find_next(self, index: int) -> int | None:
        """Return the smallest manipulation index that is not below `index`, if there is one."""
        return self.manipulation_indices.find_next(index)

    def derive(self, key: Hashable, make: Callable[[], Derivation[T_co]]) -> T_co:
        """Return a derivation's value for this view, at the cost of the events that are new to it.

        `make` makes the derivation, which is kept under `key` for later views. If a newer view has
        asked for it already, it is made afresh for this one.
        """
        shared = self._shared
        derived = shared.derived
        with derived.lock:
            kept: Derivation[T_co] | None = derived.kept.get(key)
            if kept is None:
                kept = derived.kept[key] = make()
            if kept.length <= self._length:
                for event in shared[kept.length : self._length]:
                    kept.fold(event)
                return kept.result()
        fresh = make()
        for event in self:
            fresh.fold(event)
        return fresh.result()

    def is_continuation_of(self, earlier: View) -> bool:
        """True if nothing has left the view since `earlier`. Cheap; may be False even then."""
        return self._shared is earlier._shared and earlier._length <= self._length

    def is_unchanged_since(self, earlier: View) -> bool:
        """True only if this view has the events, turn and request of `earlier`; cheap.

        The turn counts since it protects events: a proposal that was refused while it ran may be
        applied once it has ended.
        """
        return (
            self.is_continuation_of(earlier)
            and self._length == earlier._length
            and self._turn_id == earlier._turn_id
            and self.unhandled_condensation_request == earlier.unhandled_condensation_request
        )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[LLMConvertibleEvent]:
        return islice(self._shared, self._length)

    @overload
    def __getitem__(self, at: int) -> LLMConvertibleEvent: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[LLMConvertibleEvent]: ...
    def __getitem__(self, at: int | slice) -> LLMConvertibleEvent | Sequence[LLMConvertibleEvent]:
        if isinstance(at, slice):
            return tuple(self._shared[n] for n in range(*at.indices(self._length)))
        if not -self._length <= at < self._length:
            raise IndexError(at)
        return self._shared[at % self._length]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, View):
            return NotImplemented
        return (
            self.unhandled_condensation_request == other.unhandled_condensation_request
            and self.manipulation_indices == other.manipulation_indices
            and len(self) == len(other)
            and all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __repr__(self) -> str:
        ids = ", ".join(f"{event.kind} {event.id}" for event in self)
        return f"View([{ids}])"


def _find_protected(view: View, turn_id: str | None) -> frozenset[str]:
    protected = {event.id for event in view if isinstance(event, SystemPromptEvent)}
    if turn_id is None:
        return frozenset(protected)
    response, start = None, len(view)
    for at, event in enumerate(view):
        if event.turn_id != turn_id:
            continue
        if isinstance(event, UserMessageEvent) and not event.is_reminder:
            protected.add(event.id)
        elif isinstance(event, ActionEvent) and event.llm_response_id != response:
            response, start = event.llm_response_id, at
    protected.update(event.id for event in view[start:])
    return frozenset(protected)


def shorten(event: ObservationLikeEvent, length: int) -> ObservationLikeEvent:
    """Return this result with the first `length` characters of its content, and a marker."""
    return event.model_copy(update={"content": event.content[:length] + SHORTENED_MARKER})


CHANGING_KINDS = ("condensation", "condensation_request", "retraction")


class ViewFold:
    """The fold. It has one owner and is used by one task."""

    __slots__ = ("_is_suspect", "_request", "events", "watches")

    def __init__(
        self, events: Iterable[LLMConvertibleEvent] = (), *, unhandled_request: bool = False
    ) -> None:
        self._request = unhandled_request
        self.watches = False
        """Check also the events that leave the view; an owner's admission has done so already."""
        self._is_suspect = False
        self.events = _SharedEvents()
        """The events of the view as it stands; read them at once, the list goes on growing."""
        self.restore(events)

    @classmethod
    def from_events(
        cls, events: Iterable[Event]
    ) -> tuple[ViewFold, tuple[LLMConvertibleEvent, ...]]:
        """Fold and enforce a whole log of any origin; return the fold and the removed events.

        An event whose id came before is passed over as a repetition of that event.
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

    def restore(self, events: Iterable[LLMConvertibleEvent]) -> None:
        """Append events to the view unchecked: they come from another fold's view."""
        for event in events:
            self.append(event)

    def snapshot(self, running_turn_id: str | None = None, *, seq: int = 0) -> View:
        """Return the view as it is now, labelled with the running turn and the seq of the log."""
        return View(self.events, request=self._request, turn_id=running_turn_id, seq=seq)

    @property
    def last_event(self) -> LLMConvertibleEvent | None:
        return self.events[-1] if self.events else None

    def copy(self) -> ViewFold:
        """Return an independent fold that goes on from here; O(view)."""
        return ViewFold(self.events, unhandled_request=self._request)

    @property
    def is_suspect(self) -> bool:
        """True once an event came, while it watched, that admission would have refused.

        If none came, no property is broken, and the log need not be read again.
        """
        return self._is_suspect or self.events.is_suspect

    def append(self, event: LLMConvertibleEvent) -> None:
        """Advance by an event of the log that goes to the end of the view."""
        self.events.fold(event)

    def fold(self, event: Event) -> tuple[LLMConvertibleEvent, ...]:
        """Advance by one event of the log; return the events that it takes out of the view."""
        if is_seen_by_model(event):
            if event.kind == "system_prompt":
                assert isinstance(event, SystemPromptEvent), event.kind
                if event.goes_first:
                    return self._put_first(event)
            self.append(event)
        elif event.kind in CHANGING_KINDS:
            if isinstance(event, CondensationEvent):
                return self._condense(event)
            if isinstance(event, RetractionEvent):
                return self._retract(event)
            self._request = True
        return ()

    def enforce(self, facts: LogFacts) -> tuple[LLMConvertibleEvent, ...]:
        """Remove and return the events that break a property, given the facts of the log."""
        runs.total += 1
        if self.watches and not self.is_suspect:
            self.watches = False
            return ()
        self.watches = False
        return self._remove(facts.find_violations(self.events))

    def _watch(self, event_ids: Sequence[str], summary_offset: int | None) -> None:
        if self.watches and not self.is_suspect and (event_ids or summary_offset is not None):
            ids = frozenset(event_ids)
            torn = find_torn(self.events, self.events.open_calls, ids, summary_offset)
            self._is_suspect = torn is not None

    def _retract(self, event: RetractionEvent) -> tuple[LLMConvertibleEvent, ...]:
        self._watch(event.retracted_event_ids, None)
        return self._remove(event.retracted_event_ids)

    def _condense(self, event: CondensationEvent) -> tuple[LLMConvertibleEvent, ...]:
        self._request = False
        offset = None if event.summary is None else event.summary_offset
        self._watch(event.forgotten_event_ids, offset)
        left = self._remove(event.forgotten_event_ids)
        if event.shortened:
            self._replace_events([_shortened(kept, event.shortened) for kept in self.events])
        if event.summary is not None and event.summary_offset is not None:
            summary = CondensationSummaryEvent(
                id=f"{event.id}{SUMMARY_SUFFIX}",
                timestamp=event.timestamp,
                turn_id=event.turn_id,
                content=event.summary,
            )
            events = self.events.copy()
            events.insert(event.summary_offset, summary)
            self._replace_events(events)
        return left

    def _put_first(self, prompt: SystemPromptEvent) -> tuple[LLMConvertibleEvent, ...]:
        events = self.events
        if self.watches and events.open_calls:
            self._is_suspect = True  # admission lets nothing but a result follow an open call
        left = tuple(event for event in events[:1] if isinstance(event, SystemPromptEvent))
        self._replace_events([prompt, *events[len(left) :]])
        return left

    def _remove(self, event_ids: Sequence[str]) -> tuple[LLMConvertibleEvent, ...]:
        ids = frozenset(event_ids)
        left = tuple(event for event in self.events if event.id in ids) if ids else ()
        if left:
            self._replace_events([event for event in self.events if event.id not in ids])
        return left

    def _replace_events(self, events: Iterable[LLMConvertibleEvent]) -> None:
        # A log that was suspect stays so, even if the event at fault has left the view.
        self._is_suspect = self.is_suspect
        self.events = _SharedEvents()
        self.restore(events)


def _shortened(
    event: LLMConvertibleEvent, lengths: Mapping[str, FrozenJson]
) -> LLMConvertibleEvent:
    length = lengths.get(event.id)
    if isinstance(length, int) and isinstance(event, RESULT_CLASSES):
        return shorten(event, length)
    return event


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
    """Compares a view with the rebuild of its log, on the side; it changes nothing.

    Unlike a load it never assumes that the log is sound: all four properties are checked.
    """

    def __init__(self) -> None:
        self._rebuilt = ViewFold()
        self._facts = LogFacts()

    def fold(self, event: Event) -> None:
        """Take in the next event of the log."""
        self._rebuilt.fold(event)
        self._facts.fold(event)

    def find_divergence(self, view: View) -> str | None:
        """Return the first difference between this view and the rebuild; None if they are equal."""
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
