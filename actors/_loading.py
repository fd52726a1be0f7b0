"""Reading a log into a state: what activation does, and whoever looks back."""

from __future__ import annotations

from ._records import logged_event
from .errors import CorruptLog
from .journal import Journal
from .state import ColdLoad, ConversationState

__all__ = ["load_state"]

READ_PAGE = 512


async def load_state(
    journal: Journal, conversation_id: str, seq: int
) -> tuple[ConversationState, tuple[str, ...]]:
    """The state at `seq`, and the ids that enforcement had to take from its view.

    Raises `CorruptLog` where the log cannot be read as far as that: never a shorter history.
    """
    load = ColdLoad()
    at = 0
    while at < seq:
        limit = min(READ_PAGE, seq - at)
        records = await journal.read(conversation_id, after=at, limit=limit)
        if not records:
            raise CorruptLog(conversation_id, at + 1, "the record is missing")
        for record in records:
            if record.seq != at + 1:
                raise CorruptLog(conversation_id, at + 1, "the record is missing")
            load.fold(logged_event(conversation_id, record).event)
            at = record.seq
    return load.finish()
