"""Reading a log into its folds, to activate a conversation or to look back.

A snapshot and the tail after it give the same state as the whole log, which is read if no snapshot
fits. Other programs may write logs, too. So if an event comes that admission would have refused,
the whole log is read once more, and enforced. Such logs are rare, so only that second reading
gathers the facts that enforcement needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio

from ..core.limits import Limits
from ..core.records import events_of_kinds, events_of_records
from ..core.snapshots import SLICE_EVENTS, Slices, decode_but_view
from ..core.state import ColdLoad, Folded
from ..core.turn_table import TURN_KINDS, TurnTable
from ..errors import CorruptLog
from ..events import Event
from ..journal import Journal, LogPages, StoredRecord

__all__ = ["fold_log", "in_slices", "load_state", "load_turns"]

T = TypeVar("T")


async def load_state(
    journal: Journal, conversation_id: str, seq: int, *, limits: Limits = Limits()
) -> tuple[Folded, tuple[str, ...]]:
    """Return the folds at `seq`, and the ids that enforcement had to take from the view.

    Raises `CorruptLog` if the log cannot be read as far as that; never returns a shorter history.
    """
    snapshot = await journal.read_snapshot(conversation_id) if seq else None
    state: Folded | None = None
    if snapshot is not None and snapshot.seq <= seq:
        state = await in_slices(Folded.restoring(snapshot, limits=limits))
    if state is None:
        state = Folded(limits=limits)
    state.watch()
    await fold_log(journal, conversation_id, state.seq, seq, state.fold)
    if state.end_watch():
        return state, ()
    load = ColdLoad(limits=limits)
    await fold_log(journal, conversation_id, 0, seq, load.fold)
    return load.finish()


async def load_turns(
    journal: Journal, conversation_id: str, seq: int, *, limits: Limits = Limits()
) -> TurnTable:
    """Return the turn table at `seq`, as `load_state` does; decode only the events of turns.

    Raises `CorruptLog` if a record up to `seq` is missing, or is no event and is of a turn's kind.
    """
    snapshot = await journal.read_snapshot(conversation_id) if seq else None
    turns, after = TurnTable(), 0
    if snapshot is not None and snapshot.seq <= seq:
        folds = await in_slices(decode_but_view(snapshot))
        if folds is not None:
            turns, after = folds.turns, folds.seq

    def fold_slice(records: Sequence[StoredRecord], first_seq: int) -> None:
        found = events_of_kinds(TURN_KINDS, conversation_id, records, first_seq=first_seq)
        for at, event in found:
            turns.fold(event, at, known_max=limits.known_messages_max)

    await _fold_slices(journal, conversation_id, after, seq, fold_slice)
    return turns


async def in_slices(slices: Slices[T]) -> T:
    """Do sliced work, let other tasks run after each slice, and return its result."""
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
    """Fold the events above `after` up to `seq`. Raise `CorruptLog` if one is missing.

    Other tasks run after each slice. A page is not read while the one before it is folded: the
    reading thread would wait for the interpreter lock until the folding is done.
    """

    def fold_slice(records: Sequence[StoredRecord], first_seq: int) -> None:
        # Decoded first and folded then: one event at a time takes a tenth longer, since the two
        # drive each other out of the processor's caches.
        for event in events_of_records(conversation_id, records, first_seq=first_seq):
            fold(event)

    await _fold_slices(journal, conversation_id, after, seq, fold_slice)


async def _fold_slices(
    journal: Journal,
    conversation_id: str,
    after: int,
    seq: int,
    fold_slice: Callable[[Sequence[StoredRecord], int], None],
) -> None:
    """Call `fold_slice` with the records above `after` up to `seq`; see `fold_log`.

    It takes a few successive records and the seq of the first, and checks that none is missing.
    """
    async for page in LogPages(journal, conversation_id, after=after, upto=seq):
        for at in range(0, len(page), SLICE_EVENTS):
            if at:
                await anyio.lowlevel.checkpoint()
            fold_slice(page[at : at + SLICE_EVENTS], after + at + 1)
        after = page[-1].seq
        del page  # not held while the next one is read: it may have megabytes
    if after < seq:
        raise CorruptLog(conversation_id, after + 1, "the record is missing")
