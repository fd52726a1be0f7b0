"""Snapshots of the folds: a cache, thrown away whenever it does not fit.

A snapshot holds what `ConversationState` is made of, and no more than the view and what is
bounded. It fits if it is of this version of the folds and of the upcasters, and if it passed over
no event of a kind that this version knows. Anything else is read as "there is none".
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from ._upcasters import UPCASTERS
from .events import EVENT_CLASSES, AnyEvent, Task
from .journal import Snapshot
from .metrics import Metrics
from .status import StatusFold
from .turns import TurnTable

__all__ = ["SNAPSHOT_VERSION", "Folds", "decode_snapshot", "encode_snapshot"]

FOLDS_VERSION = 2
"""Goes up with every change to what a fold makes of a log; a test over stored logs insists."""

SNAPSHOT_VERSION = f"{FOLDS_VERSION};{UPCASTERS.fingerprint}"


class Folds(BaseModel):
    """All folds of one log, as values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seq: int
    view: tuple[AnyEvent, ...]
    unhandled_request: bool
    calls_left: tuple[str, ...]
    responses_left: tuple[str, ...]
    status: StatusFold
    turns: TurnTable
    is_turn_condensed: bool
    metrics: Metrics
    task_list: tuple[Task, ...]
    iteration: int
    event_id_max: str
    unknown_kinds: tuple[str, ...]


def encode_snapshot(folds: Folds) -> Snapshot:
    """The folds as a journal keeps them."""
    return Snapshot(folds.seq, SNAPSHOT_VERSION, folds.model_dump_json().encode())


def decode_snapshot(snapshot: Snapshot) -> Folds | None:
    """The folds of a snapshot, or None where it does not fit."""
    if snapshot.version != SNAPSHOT_VERSION:
        return None
    try:
        folds = Folds.model_validate_json(snapshot.payload)
    except ValidationError:
        return None  # of another shape, under a version that should have changed: not trusted
    known = EVENT_CLASSES.keys() | UPCASTERS.kinds
    if folds.seq != snapshot.seq or known.intersection(folds.unknown_kinds):
        return None
    return folds
