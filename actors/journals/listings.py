"""Listings computed from logs, for logs that no owner has written, and for rows that are stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.records import decode_record
from ..core.state import Folded
from ..errors import ConversationDeleted, ConversationNotFound, CorruptLog, Fenced
from ..journal import Journal, Listing, ListQuery, LogPages, Record, StoredRecord

__all__ = ["ListingOfLog", "reindex"]

_PAGE = 500


class ListingOfLog:
    """The listing of a log, while it is read from the beginning.

    Once a record holds no event, `listing` stays None, and lists show the log as stale.
    """

    def __init__(self, conversation_id: str) -> None:
        self._conversation_id = conversation_id
        self._state: Folded | None = Folded()
        self._state.watch()  # another program may have written the log

    def add(self, records: Sequence[Record | StoredRecord]) -> None:
        """Fold the next records."""
        for record in records:
            if self._state is None:
                return
            stored = StoredRecord(
                self._state.seq + 1, 0, record.event_id, record.kind, record.payload
            )
            try:
                self._state.fold(decode_record(self._conversation_id, stored).event)
            except CorruptLog:
                self._state = None

    @property
    def listing(self) -> Listing | None:
        """The listing as of the records so far."""
        return None if self._state is None or not self._state.seq else self._state.listing


async def reindex(
    journal: Journal, *, on_progress: Callable[[int], None] = lambda _done: None
) -> tuple[int, Sequence[str]]:
    """Compute stale listings anew.

    For a database, this runs beside the processes that use it; a file it needs to itself. It calls
    `on_progress` with the number of conversations that were checked. Returns the number of listings
    that were written, and the conversations whose logs cannot be read or hold more than events.
    Conversations that are deleted meanwhile are passed over. If it is cancelled, the listings that
    it has written stay; another call computes the rest.
    """
    written = looked_at = 0
    unreadable: list[str] = []
    query = ListQuery(_PAGE)
    while True:
        page = await journal.page(query)
        for row in page.rows:
            looked_at += 1
            on_progress(looked_at)
            if not row.is_stale:
                continue
            name = row.conversation_id
            log = ListingOfLog(name)
            epoch = 0
            try:
                info = await journal.info(name)
                async for records in LogPages(journal, name, upto=info.head, epoch=info.epoch):
                    log.add(records)
                    epoch = records[-1].epoch
            except (ConversationNotFound, ConversationDeleted):
                continue  # deleted meanwhile, and perhaps begun anew
            except CorruptLog:
                unreadable.append(name)
                continue
            if (listing := log.listing) is None:
                unreadable.append(name)
                continue
            try:
                await journal.write_listing(name, listing, epoch=epoch)
            except (ConversationNotFound, Fenced):
                continue  # deleted meanwhile, and perhaps begun anew
            written += 1
        if page.next is None:
            return written, unreadable
        query = query._replace(after=page.next)
