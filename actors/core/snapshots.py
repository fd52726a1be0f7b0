"""Snapshots of the folds: a cache, thrown away whenever it does not fit.

A snapshot holds the folds of a log: the view, and beside it only what is bounded. It fits if it is
of this version of the folds and of the upcasters, and if it passed over no event of a kind that
this version knows. A snapshot that does not fit is treated as absent.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from ..events import EVENT_CLASSES, AnyEvent, Task
from ..journal import Snapshot
from ..values.upcasters import UPCASTERS
from .details import Details
from .listing import ListedFold
from .metrics import Metrics
from .status import StatusFold
from .stuck import SeenEvent
from .turn_table import TurnTable

__all__ = ["SNAPSHOT_VERSION", "StoredFolds", "decode_snapshot", "encode_snapshot"]

FOLDS_VERSION = 15
"""Rises with every change to the result of a fold; a test over stored logs insists on it."""

SNAPSHOT_VERSION = f"{FOLDS_VERSION};{UPCASTERS.fingerprint}"


class StoredFolds(BaseModel):
    """All folds of one log, as values."""

    # Built at the first snapshot: it holds every kind of event, and takes half as long as
    # `import pydantic` does.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    seq: int
    view: tuple[AnyEvent, ...]
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


def encode_snapshot(folds: StoredFolds) -> Snapshot:
    """Return the folds as a journal keeps them."""
    return Snapshot(folds.seq, SNAPSHOT_VERSION, folds.model_dump_json().encode())


def decode_snapshot(snapshot: Snapshot) -> StoredFolds | None:
    """Return the folds of a snapshot, or None if it does not fit."""
    if snapshot.version != SNAPSHOT_VERSION:
        return None
    try:
        folds = StoredFolds.model_validate_json(snapshot.payload)
    except ValidationError:
        return None  # another shape under the same version, which should have risen: not trusted
    known = EVENT_CLASSES.keys() | UPCASTERS.kinds
    if folds.seq != snapshot.seq or known.intersection(folds.unknown_kinds):
        return None
    return folds
