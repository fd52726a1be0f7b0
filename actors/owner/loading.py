"""Reading a log into its folds, to activate a conversation or to look back.

A snapshot and the tail after it give the same as the whole log. The whole log is read, and
enforced, if there is no snapshot that fits, or if the tail has an event that admission would have
refused: a log may be written by others, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio

from ..core.limits import Limits
from ..core.records import decode_record
from ..core.snapshots import Slices
from ..core.state import ColdLoad, Folded
from ..errors import CorruptLog
from ..events import Event
from ..journal import Journal, LogPages

__all__ = ["fold_log", "in_slices", "load_state"]

T = TypeVar("T")


async def load_state(
    journal: Journal, conversation_id: str, seq: int, *, limits: Limits = Limits()
) -> tuple[Folded, tuple[str, ...]]:
    """Return the folds at `seq`, and the ids that enforcement had to take from the view.

    Raises `CorruptLog` if the log cannot be read as far as that; never returns a shorter history.
    """
    snapshot = await journal.read_snapshot(conversation_id) if seq else None
    if snapshot is not None and snapshot.seq <= seq:
        state = await in_slices(Folded.restoring(snapshot, limits=limits))
        if state is not None:
            state.watch()
            await fold_log(journal, conversation_id, snapshot.seq, seq, state.fold)
            if state.end_watch():
                return state, ()
    load = ColdLoad(limits=limits)
    await fold_log(journal, conversation_id, 0, seq, load.fold)
    return load.finish()


async def in_slices(slices: Slices[T]) -> T:
    """Do the work, and let other tasks run after each slice; return its result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result
        await anyio.lowlevel.checkpoint()


async def fold_log(
    journal: Journal, conversation_id: str, after: int, seq: int, fold: Callable[[Event], None]
) -> None:
    """Fold the events above `after` up to `seq`. Raise `CorruptLog` if one is missing."""
    async for records in LogPages(journal, conversation_id, after=after, upto=seq):
        for record in records:
            if record.seq != after + 1:
                raise CorruptLog(conversation_id, after + 1, "the record is missing")
            fold(decode_record(conversation_id, record).event)
            after = record.seq
    if after < seq:
        raise CorruptLog(conversation_id, after + 1, "the record is missing")
