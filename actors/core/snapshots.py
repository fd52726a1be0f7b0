"""Snapshots of the folds: a cache, thrown away whenever it does not fit.

A snapshot holds the folds of a log: the view, and besides it only values of bounded size. It fits
if it has this version of the folds and of the upcasters, and if its writer passed over no event of
a kind that this version knows. A snapshot that does not fit is treated as absent.

A long view takes a while, and the event loop would stand still for it. So snapshots are written
and read in slices: generators that yield wherever other tasks may run. Each slice of the view has a
line of its own in the JSON, which pydantic reads in one call. At the first snapshot of a process,
pydantic builds what it needs, in slices too: each fold has an adapter of its own, since one for all
of them would take too long.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from typing import Any, TypeAlias, TypeVar, get_type_hints

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from ..events import EVENT_CLASSES, Event, Task, build_models, decode_known, encode_event
from ..journal import Snapshot
from ..values.upcasters import UPCASTERS
from .details import Details
from .listing import ListedFold
from .metrics import Metrics
from .status import StatusFold
from .stuck import SeenEvent
from .turn_table import TurnTable

__all__ = [
    "SLICE_EVENTS",
    "SNAPSHOT_VERSION",
    "Slices",
    "StoredFolds",
    "decode_snapshot",
    "encode_snapshot",
    "run_whole",
]

T = TypeVar("T")

Slices: TypeAlias = Generator[None, None, T]
"""Work that yields after each slice of it, and returns its result at its end."""

SLICE_EVENTS = 64
"""The events of a slice: reading as many takes less than a millisecond."""

FOLDS_VERSION = 18
"""Rises with every change to the result of a fold; a test over stored logs insists on it."""

SNAPSHOT_VERSION = f"{FOLDS_VERSION};{UPCASTERS.fingerprint}"


@dataclass(frozen=True, slots=True)
class StoredFolds:
    """All folds of one log, as values."""

    seq: int
    view: tuple[Any, ...]  # Any: events, which are written and read apart, in slices
    unhandled_request: bool
    calls_left: tuple[str, ...]
    responses_left: tuple[str, ...]
    status: StatusFold
    turns: TurnTable
    condensed_turns: tuple[str, ...]
    is_turn_too_long: bool
    recently_seen: tuple[SeenEvent, ...]
    metrics: Metrics
    task_list: tuple[Task, ...]
    details: Details
    listed: ListedFold
    iteration: int
    answers: int
    answered_response: str | None
    event_id_max: str
    unknown_kinds: tuple[str, ...]


def run_whole(slices: Slices[T]) -> T:
    """Do the work without a pause, and return its result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result


_BEFORE_VIEW, _AFTER_VIEW = b',"view":[', b"\n]}"
"""The view goes last; a line end comes before each of its slices and before the closing bracket."""


# Any: type hints, and adapters each of which has a type of its own.


@cache
def _types() -> dict[str, Any]:
    """Return the type of each field but the view."""
    types = get_type_hints(StoredFolds)
    del types["view"]
    return types


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    """Return the adapter of a field."""
    return TypeAdapter(_types()[name])


def _build() -> Slices[None]:
    """Build what pydantic needs to write and read snapshots; a slice takes about a millisecond."""
    yield from build_models()
    if _adapter.cache_info().currsize < len(_types()):
        for name in _types():
            _adapter(name)
            yield


def encode_snapshot(folds: StoredFolds) -> Slices[Snapshot]:
    """Return the folds as a journal keeps them; nothing may change them meanwhile."""
    yield from _build()
    parts = [
        b'"%b":%b' % (name.encode(), _adapter(name).dump_json(getattr(folds, name)))
        for name in _types()
    ]
    return (yield from _with_view(folds.seq, b"{%b}" % b",".join(parts), folds.view))


def _with_view(seq: int, rest: bytes, view: Sequence[Event]) -> Slices[Snapshot]:
    payload = BytesIO()
    payload.write(rest.removesuffix(b"}") + _BEFORE_VIEW)
    for at in range(0, len(view), SLICE_EVENTS):
        lines = map(encode_event, view[at : at + SLICE_EVENTS])
        payload.write((b",\n" if at else b"\n") + b",".join(lines))
        yield
    payload.write(_AFTER_VIEW)
    return Snapshot(seq, SNAPSHOT_VERSION, payload.getvalue())


def decode_snapshot(snapshot: Snapshot) -> Slices[StoredFolds | None]:
    """Return the folds of a snapshot, or None if it does not fit."""
    if snapshot.version != SNAPSHOT_VERSION:
        return None
    payload = snapshot.payload
    begin = payload[: max(0, payload.find(b"\n"))]
    try:
        if not (begin.endswith(_BEFORE_VIEW) and payload.endswith(_AFTER_VIEW)):
            raise ValueError("the view is not in lines")
        yield from _build()
        folds = _read_folds(begin + _AFTER_VIEW)
        yield
        view = yield from _read_view(payload, len(begin))
    except ValueError:
        return None  # another shape under the same version, which should have risen: not trusted
    folds = replace(folds, view=view)
    known = EVENT_CLASSES.keys() | UPCASTERS.kinds
    if folds.seq != snapshot.seq or known.intersection(folds.unknown_kinds):
        return None
    return folds


def _read_folds(payload: bytes) -> StoredFolds:
    """Return the folds that this JSON holds, with an empty view."""
    parts = from_json(payload)
    if not isinstance(parts, dict) or parts.pop("view", None) != []:
        raise ValueError("the folds are no object with a view")
    if parts.keys() != _types().keys():
        raise ValueError("the folds are not those of this version")
    # As JSON again: pydantic takes less of what is Python already.
    read = {name: _adapter(name).validate_json(to_json(part)) for name, part in parts.items()}
    return StoredFolds(**read, view=())


def _read_view(payload: bytes, at: int) -> Slices[tuple[Event, ...]]:
    """Return the events of the view, which begins at this line end."""
    view: list[Event] = []
    last = len(payload) - len(_AFTER_VIEW)
    while at < last:
        if view:
            yield
        end = payload.index(b"\n", at + 1)
        view += decode_known(b"[%b]" % payload[at + 1 : end].removesuffix(b","))
        at = end
    return tuple(view)
