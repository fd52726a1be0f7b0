"""Who follows which conversation: live events for readers, with the journal behind them.

Owned by `Conversations`, so that subscriptions outlive the passivation and the restart of the
actor they follow, and keep nothing active. The actor publishes what it has committed; that never
waits and never fails, whatever the readers do. A reader that is dropped is forgotten.

A reader keeps a cursor, the seq it has given out. What is published goes into its bounded buffer
as a hint; what is not exactly the next seq is thrown away and read from the journal instead. So
there is no gap and no repeat at the seam of replay and live, and a slow reader falls back to the
journal without slowing anybody.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from turnkeeper.runtime import OneShot

from ._records import logged_event
from .errors import ConversationNotFound
from .events import LoggedEvent
from .journal import Journal, StoredRecord

__all__ = ["EventReader", "Subscriptions"]

BUFFERED_EVENTS_MAX = 256
PAGE = 256


class Subscriptions:
    """All live readers of all conversations in this process. Used from one event loop only."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        # Weak, so that a reader ends by being dropped; dicts, so that they are served in order.
        self._readers: dict[str, dict[int, weakref.ref[EventReader]]] = {}

    def publish(self, conversation_id: str, events: Sequence[LoggedEvent]) -> None:
        """Offer committed events, in order, to whoever follows this conversation."""
        for reader in self._live(conversation_id):
            reader.offer(events)

    def owner_ended(self, conversation_id: str) -> None:
        """Tell those who wait for this conversation's owner that it has stopped or failed."""
        for reader in self._live(conversation_id):
            reader.owner_ended()

    def read(
        self,
        conversation_id: str,
        *,
        after: int,
        live: bool,
        on_owner_ended: Callable[[], Awaitable[object]] | None = None,
    ) -> EventReader:
        """A reader from `after` on; see there."""
        reader = EventReader(self._journal, conversation_id, after, live, on_owner_ended)
        if live:
            # Registered before it reads the journal: whatever is committed meanwhile is in one of
            # the two, and the cursor keeps it from being given out twice.
            readers = self._readers.setdefault(conversation_id, {})
            key = id(reader)
            readers[key] = weakref.ref(reader, lambda _: self._forget(conversation_id, key))
        return reader

    def _forget(self, conversation_id: str, key: int) -> None:
        readers = self._readers[conversation_id]
        del readers[key]
        if not readers:
            del self._readers[conversation_id]

    def _live(self, conversation_id: str) -> list[EventReader]:
        if conversation_id not in self._readers:
            return []
        found = [reader() for reader in list(self._readers[conversation_id].values())]
        return [reader for reader in found if reader is not None]


class EventReader(AsyncIterator[LoggedEvent]):
    """The events of one conversation above a seq, in order, without a gap or a repeat.

    Live, it never ends, and waits for a conversation that does not exist yet; otherwise it ends
    where the log ends, and raises `ConversationNotFound`. Iterated by one task. Cancelling its
    wait loses nothing: it goes on where it was.
    """

    def __init__(
        self,
        journal: Journal,
        conversation_id: str,
        after: int,
        live: bool,  # noqa: FBT001 - passed on from a keyword
        on_owner_ended: Callable[[], Awaitable[object]] | None,
    ) -> None:
        self._journal = journal
        self._conversation_id = conversation_id
        self._cursor = after
        self._is_live = live
        self._on_owner_ended = on_owner_ended
        self._page: deque[StoredRecord] = deque()
        self._offered: deque[LoggedEvent] = deque()
        self._is_behind = True
        self._has_owner_ended = False
        self._waiting: OneShot[None] | None = None

    def offer(self, events: Sequence[LoggedEvent]) -> None:
        """Events that have just been committed, in order."""
        self._offered.extend(events)
        if len(self._offered) > BUFFERED_EVENTS_MAX:
            self._offered.clear()
            self._is_behind = True
        self._wake()

    def owner_ended(self) -> None:
        """An owner of the conversation has stopped or failed in this process."""
        self._has_owner_ended = True
        self._wake()

    async def __anext__(self) -> LoggedEvent:
        while True:
            if self._page:
                record = self._page.popleft()
                self._cursor = record.seq
                return logged_event(self._conversation_id, record)
            if self._is_behind:
                await self._read_page()
            elif self._offered:
                logged = self._offered.popleft()
                if logged.seq == self._cursor + 1:
                    self._cursor = logged.seq
                    return logged
                # A repeat is passed over; behind a gap, the journal has what is missing.
                self._is_behind = logged.seq > self._cursor
            elif not self._is_live:
                raise StopAsyncIteration
            elif self._has_owner_ended and self._on_owner_ended is not None:
                self._has_owner_ended = False
                await self._on_owner_ended()
            else:
                # No await since nothing was found, so no offer is missed.
                self._waiting = OneShot()
                await self._waiting.wait()

    async def _read_page(self) -> None:
        # Cleared before the journal is asked: what overflows from here on sets it again.
        self._is_behind = False
        try:
            page = await self._journal.read(self._conversation_id, after=self._cursor, limit=PAGE)
        except ConversationNotFound:
            if not self._is_live:
                raise
            return  # not yet: what begins it will be offered
        except BaseException:
            self._is_behind = True
            raise
        self._page.extend(page)
        self._is_behind = self._is_behind or len(page) == PAGE

    def _wake(self) -> None:
        if self._waiting is not None:
            self._waiting.set(None)
            self._waiting = None
