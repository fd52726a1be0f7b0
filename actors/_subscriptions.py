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
from typing import NamedTuple

from turnkeeper.runtime import OneShot

from ._records import logged_event
from .errors import ConversationNotFound, ConversationsClosed
from .events import LoggedEvent, TextDelta
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
        self._is_closing = False
        self._is_closed = False

    def publish(self, conversation_id: str, events: Sequence[LoggedEvent]) -> None:
        """Offer committed events, in order, to whoever follows this conversation."""
        for reader in self._live(conversation_id):
            reader.offer(events)

    def publish_delta(self, conversation_id: str, delta: TextDelta, head: int) -> None:
        """Offer a piece of what is being said, while the log goes as far as `head`."""
        for reader in self._live(conversation_id):
            reader.offer_delta(delta, head)

    def owner_began(self, conversation_id: str, head: int) -> None:
        """Send readers to the journal for what an owner before could not publish."""
        for reader in self._live(conversation_id):
            reader.look_for(head)

    def owner_ended(self, conversation_id: str) -> None:
        """Tell those who wait for this conversation's owner that it has stopped or failed."""
        if not self._is_closing:
            for reader in self._live(conversation_id):
                reader.owner_ended()

    def begin_closing(self) -> None:
        """Owners end from now on because they are told to: nobody shall call them back."""
        self._is_closing = True

    def close(self) -> None:
        """End every reader, and all that begin from now on."""
        self._is_closed = True
        for conversation_id in list(self._readers):
            for reader in self._live(conversation_id):
                reader.close()

    def read(
        self,
        conversation_id: str,
        *,
        after: int,
        live: bool,
        on_owner_ended: Callable[[], Awaitable[object]] | None = None,
        deltas: bool = False,
    ) -> EventReader:
        """A reader from `after` on; see there."""
        reader = EventReader(self._journal, conversation_id, after, live, on_owner_ended)
        reader.takes_deltas = deltas
        if self._is_closed:
            reader.close()
        elif live:
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


class _DeltaAt(NamedTuple):
    """A piece of an answer, and how far the log went when it was said."""

    delta: TextDelta
    head: int


class EventReader(AsyncIterator[LoggedEvent]):
    """The events of one conversation above a seq, in order, without a gap or a repeat.

    Live, it ends only when its `Conversations` are left (by `ConversationsClosed` where it has not
    caught up), and waits for a conversation that does not exist yet; otherwise it ends where the
    log ends, and raises `ConversationNotFound`. With
    `on_owner_ended`, that is awaited before it first waits, and again after an owner has ended in
    this process; what it raises ends the reading. Iterated by one task. Cancelling its
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
        self._offered: deque[LoggedEvent | _DeltaAt] = deque()
        self.takes_deltas = False
        """Whether `next_item` gives pieces of what is being said too, where it keeps up."""
        self._is_behind = True
        # Whether there is an owner now is not known here.
        self._has_owner_ended = True
        self._is_closed = False
        self._waiting: OneShot[None] | None = None

    def offer(self, events: Sequence[LoggedEvent]) -> None:
        """Events that have just been committed, in order."""
        self._offered.extend(events)
        self._bound_offered()

    def offer_delta(self, delta: TextDelta, head: int) -> None:
        """A piece of what is being said, while the log goes as far as `head`."""
        if self.takes_deltas:
            self._offered.append(_DeltaAt(delta, head))
            self._bound_offered()

    def _bound_offered(self) -> None:
        if len(self._offered) > BUFFERED_EVENTS_MAX:
            self._offered.clear()
            self._is_behind = True
        self._wake()

    def look_for(self, head: int) -> None:
        """The log goes as far as `head`."""
        if self._cursor < head:
            self._is_behind = True
            self._wake()

    def owner_ended(self) -> None:
        """An owner of the conversation has stopped or failed in this process."""
        self._has_owner_ended = True
        self._wake()

    def close(self) -> None:
        """Nothing will be offered, or can be read, any more."""
        self._is_closed = True
        self._wake()

    async def __anext__(self) -> LoggedEvent:
        while True:
            item = await self.next_item()
            if isinstance(item, LoggedEvent):
                return item

    async def next_item(self) -> LoggedEvent | TextDelta:
        """As iterating, with the pieces between events; `StopAsyncIteration` at the end."""
        while True:
            if self._page:
                # Decoded first: a record that cannot be read is not passed over.
                logged = logged_event(self._conversation_id, self._page[0])
                self._page.popleft()
                self._cursor = logged.seq
                return logged
            if self._is_behind:
                if self._is_closed:
                    raise ConversationsClosed(self._conversation_id)
                await self._read_page()
            elif self._offered:
                offered = self._offered.popleft()
                if isinstance(offered, _DeltaAt):
                    if offered.head == self._cursor:
                        return offered.delta
                    # Its place has gone by, or has yet to be read up to; then it is lost.
                    self._is_behind = offered.head > self._cursor
                elif offered.seq == self._cursor + 1:
                    self._cursor = offered.seq
                    return offered
                else:
                    # A repeat is passed over; behind a gap, the journal has what is missing.
                    self._is_behind = offered.seq > self._cursor
            elif self._is_closed or not self._is_live:
                raise StopAsyncIteration
            elif self._has_owner_ended and self._on_owner_ended is not None:
                await self._on_owner_ended()
                self._has_owner_ended = False
                # It may have written what it did not publish here.
                self._is_behind = True
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
