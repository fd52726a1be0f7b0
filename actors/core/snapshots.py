"""Snapshots of the folds: a cache, thrown away whenever it does not fit.

A snapshot holds the folds of a log: the view, and besides it only values of bounded size. It fits
if it has this version of the folds and of the upcasters, and if its writer passed over no event of
a kind that this version knows. A snapshot that does not fit is treated as absent.

A long view takes a while, and the event loop would stand still for it. So snapshots are written
and read in slices: generators that yield wherever other tasks may run. Each slice of the view has a
line of its own in the JSON, which pydantic reads in one call.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

from pydantic import ConfigDict, TypeAdapter

from ..events import EVENT_CLASSES, Event, Task, build_kinds, decode_known, encode_event
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
    "STORED_FOLDS",
    "Slices",
    "StoredFolds",
    "build_models",
    "decode_but_view",
    "decode_snapshot",
    "encode_snapshot",
    "run_whole",
]

T = TypeVar("T")

Slices: TypeAlias = Generator[None, None, T]
"""Work that yields after each slice of it, and returns its result at its end."""

SLICE_EVENTS = 64
"""The events of a slice: reading as many takes less than a millisecond."""

FOLDS_VERSION = 19
"""Rises with every change to the result of a fold; a test over stored logs insists on it."""

SNAPSHOT_VERSION = f"{FOLDS_VERSION};{UPCASTERS.fingerprint}"


@dataclass(slots=True)
class StoredFolds:
    """All folds of one log, as values."""

    # A dataclass, since a model takes four times as long to make of values that need no check.
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", defer_build=True)

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


STORED_FOLDS: Final = TypeAdapter(StoredFolds)
"""Built by `build_models`, or at the first snapshot."""


def build_models() -> None:
    """Build the models of all kinds of events and of a snapshot; later calls do nothing.

    Conversations do so as they are entered. At the first snapshot, or at the first event of a kind,
    the event loop would stand still for it while others wait.
    """
    build_kinds()
    STORED_FOLDS.rebuild()


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


def encode_snapshot(folds: StoredFolds) -> Slices[Snapshot]:
    """Return the folds as a journal keeps them.

    All but the view is encoded by the call itself; the view of `folds` does not change.
    """
    rest = STORED_FOLDS.dump_json(folds, exclude={"view"})
    return _with_view(folds.seq, rest, folds.view)


def _with_view(seq: int, rest: bytes, view: Sequence[Event]) -> Slices[Snapshot]:
    payload = BytesIO()
    payload.write(memoryview(rest)[:-1])
    payload.write(_BEFORE_VIEW)
    for at in range(0, len(view), SLICE_EVENTS):
        lines = map(encode_event, view[at : at + SLICE_EVENTS])
        payload.write((b",\n" if at else b"\n") + b",".join(lines))
        yield
    payload.write(_AFTER_VIEW)
    return Snapshot(seq, SNAPSHOT_VERSION, payload.getvalue())


def decode_snapshot(snapshot: Snapshot) -> Slices[StoredFolds | None]:
    """Return the folds of a snapshot, or None if it does not fit."""
    folds = yield from decode_but_view(snapshot)
    if folds is None:
        return None
    try:
        folds.view = yield from _read_view(snapshot.payload)
    except ValueError:
        return None  # as in `decode_but_view`
    return folds


def decode_but_view(snapshot: Snapshot) -> Slices[StoredFolds | None]:
    """As `decode_snapshot`, with an empty view."""
    if snapshot.version != SNAPSHOT_VERSION:
        return None
    begin = snapshot.payload[: _end_of_rest(snapshot.payload)]
    try:
        if not (begin.endswith(_BEFORE_VIEW) and snapshot.payload.endswith(_AFTER_VIEW)):
            raise ValueError("the view is not in lines")
        folds = STORED_FOLDS.validate_json(begin + _AFTER_VIEW)
    except ValueError:
        return None  # another shape under the same version, which should have risen: not trusted
    yield
    if folds.seq != snapshot.seq or any(map(_is_known, folds.unknown_kinds)):
        return None
    return folds


def _end_of_rest(payload: bytes) -> int:
    """Return the place of the first line end, which comes before the view."""
    return max(0, payload.find(b"\n"))


def _is_known(kind: str) -> bool:
    return kind in EVENT_CLASSES or kind in UPCASTERS.kinds


def _read_view(payload: bytes) -> Slices[tuple[Event, ...]]:
    """Return the events of the view."""
    view: list[Event] = []
    at, last = _end_of_rest(payload), len(payload) - len(_AFTER_VIEW)
    while at < last:
        if view:
            yield
        end = payload.index(b"\n", at + 1)
        view += decode_known(b"[%b]" % payload[at + 1 : end].removesuffix(b","))
        at = end
    return tuple(view)
