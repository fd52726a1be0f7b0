"""Reading a log into a state: what activation does, and whoever looks back.

A snapshot with the tail after it gives what the whole log gives; one that does not fit is passed
over. Enforcement runs only where the whole log is read: what follows a snapshot was admitted.
"""

from __future__ import annotations

from collections.abc import Callable

from ._records import logged_event
from .errors import CorruptLog
from .events import Event
from .journal import Journal
from .state import ColdLoad, ConversationState

__all__ = ["fold_log", "load_state"]

READ_PAGE = 512


async def load_state(
    journal: Journal, conversation_id: str, seq: int
) -> tuple[ConversationState, tuple[str, ...]]:
    """The state at `seq`, and the ids that enforcement had to take from its view.

    Raises `CorruptLog` where the log cannot be read as far as that: never a shorter history.
    """
    snapshot = await journal.read_snapshot(conversation_id) if seq else None
    if snapshot is not None and snapshot.seq <= seq:
        state = ConversationState.from_snapshot(snapshot, conversation_id=conversation_id)
        if state is not None:
            await fold_log(journal, conversation_id, snapshot.seq, seq, state.fold)
            return state, ()
    load = ColdLoad()
    await fold_log(journal, conversation_id, 0, seq, load.fold)
    return load.finish()


async def fold_log(
    journal: Journal, conversation_id: str, after: int, seq: int, fold: Callable[[Event], None]
) -> None:
    """Fold the events above `after` up to `seq`; `CorruptLog` where one is missing."""
    while after < seq:
        limit = min(READ_PAGE, seq - after)
        records = await journal.read(conversation_id, after=after, limit=limit)
        if not records:
            raise CorruptLog(conversation_id, after + 1, "the record is missing")
        for record in records:
            if record.seq != after + 1:
                raise CorruptLog(conversation_id, after + 1, "the record is missing")
            fold(logged_event(conversation_id, record).event)
            after = record.seq
