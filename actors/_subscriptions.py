"""Who follows which conversation: live events for readers, with the journal behind them.

Owned by `Conversations`, so that subscriptions outlive the passivation and the restart of the
actor they follow, and keep nothing active. The actor publishes what it has committed; that never
waits and never fails, whatever the readers do. A reader that is dropped is forgotten.

A reader keeps a cursor, the seq it has given out. What is published goes into its bounded buffer
as a hint; what is not exactly the next seq is thrown away and read from the journal instead. So
there is no gap and no repeat at the seam of replay and live, and a slow reader falls back to the
journal without slowing anybody. While no owner is active in this process, another may have it: a
reader waits for the journal then, and for an owner here as well.

Each page is read from the record at the cursor on. Where that is not the one that was given out,
the conversation was deleted, and what is there now is another of its name.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple

import anyio

from turnkeeper.runtime import OneShot

from ._records import logged_event
from .errors import (
    ConversationDeleted,
    ConversationNotFound,
    ConversationsClosed,
    OwnedElsewhere,
)
from .events import LoggedEvent, TextDelta
from .journal import Journal, StoredRecord

__all__ = ["EventReader", "Subscriptions"]

BUFFERED_EVENTS_MAX = 256
PAGE = 256
OWNER_ASKED_EVERY_S = 5.0
"""How long what another process owns is followed before it is asked for again."""


class Subscriptions:
    """All live readers of all conversations in this process. Used from one event loop only."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        # Weak, so that a reader ends by being dropped; dicts, so that they are served in order.
        self._readers: dict[str, dict[int, weakref.ref[EventReader]]] = {}
        self._owned: set[str] = set()
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

    def is_owned(self, conversation_id: str) -> bool:
        """Whether an owner is active here, so that all that is written is published."""
        return conversation_id in self._owned

    def owner_began(self, conversation_id: str) -> None:
        """Send readers to the journal for what an owner before could not publish."""
        self._owned.add(conversation_id)
        for reader in self._live(conversation_id):
            reader.look()

    def owner_ended(self, conversation_id: str, *, is_wanted: bool) -> None:
        """The owner here has stopped or failed; `is_wanted`: somebody may wait for what it did."""
        self._owned.discard(conversation_id)
        if not self._is_closing:
            for reader in self._live(conversation_id):
                reader.owner_ended(is_wanted=is_wanted)

    def deleted(self, conversation_id: str) -> None:
        """End the readers of a conversation that is no more."""
        for reader in self._live(conversation_id):
            reader.deleted()

    @property
    def is_closing(self) -> bool:
        """The `Conversations` are being left, or were: there is no other owner to come here."""
        return self._is_closing

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
        known_seq: int = 0,
        on_owner_ended: Callable[[], Awaitable[object]] | None = None,
        deltas: bool = False,
    ) -> EventReader:
        """A reader from `after` on; see there."""
        reader = EventReader(
            self,
            self._journal,
            conversation_id,
            after=after,
            live=live,
            known_seq=known_seq,
            on_owner_ended=on_owner_ended,
            deltas=deltas,
        )
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
    log ends, and raises `ConversationNotFound`. When the conversation is deleted it raises
    `ConversationDeleted`, at once where that is done in this process; also where the log is shorter
    than `known_seq`, which it has had. With `on_owner_ended`, that is awaited before it first
    waits, and again after an owner has ended in this process; what it raises ends the reading,
    but for `OwnedElsewhere`: then the other owner is followed, and after a while it is awaited
    again. Iterated by one task. Cancelling its wait loses nothing: it goes on where it was.
    """

    def __init__(
        self,
        subscriptions: Subscriptions,
        journal: Journal,
        conversation_id: str,
        *,
        after: int,
        live: bool,
        known_seq: int,
        on_owner_ended: Callable[[], Awaitable[object]] | None,
        deltas: bool,
    ) -> None:
        self._subscriptions = subscriptions
        self._journal = journal
        self._conversation_id = conversation_id
        self._cursor = after
        self._cursor_id: str | None = None
        """Of the event at the cursor; None before the log has been seen to go that far."""
        self._log_end = 0
        """Where the log ended that was seen to end before the cursor."""
        self._is_live = live
        self._known_seq = known_seq
        self._on_owner_ended = on_owner_ended
        self._takes_deltas = deltas
        self._page: deque[StoredRecord] = deque()
        self._offered: deque[LoggedEvent | _DeltaAt] = deque()
        self._has_answer_so_far = False
        """All pieces of the answer that is being written were given out; else no more of it is."""
        self._is_behind = True
        # Whether there is an owner now is not known here.
        self._has_owner_ended = True
        self._is_closed = False
        self._is_deleted = False
        self._waiting: OneShot[None] | None = None
        self._following: anyio.CancelScope | None = None

    def offer(self, events: Sequence[LoggedEvent]) -> None:
        """Events that have just been committed, in order."""
        self._offered.extend(events)
        self._bound_offered()

    def offer_delta(self, delta: TextDelta, head: int) -> None:
        """A piece of what is being said, while the log goes as far as `head`."""
        if self._takes_deltas:
            self._offered.append(_DeltaAt(delta, head))
            self._bound_offered()

    def _bound_offered(self) -> None:
        if len(self._offered) > BUFFERED_EVENTS_MAX:
            self._offered.clear()
            self._is_behind, self._has_answer_so_far = True, False
        self._wake()

    def look(self) -> None:
        """Somebody may have written what was not offered."""
        self._is_behind = True
        self._wake()

    def owner_ended(self, *, is_wanted: bool) -> None:
        """An owner of the conversation has stopped or failed in this process."""
        self._has_owner_ended = self._has_owner_ended or is_wanted
        self._wake()

    def deleted(self) -> None:
        """The conversation is no more."""
        self._is_deleted = True
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
            if self._is_deleted:
                raise ConversationDeleted(self._conversation_id)
            if (delta := self._take_due_delta()) is not None:
                return delta
            if self._page:
                # Decoded first: a record that cannot be read is not passed over.
                logged = logged_event(self._conversation_id, self._page[0])
                self._page.popleft()
                return self._given(logged)
            if self._is_behind:
                if self._is_closed:
                    raise ConversationsClosed(self._conversation_id)
                await self._read_page()
            elif self._offered:
                offered = self._offered.popleft()
                if isinstance(offered, _DeltaAt):
                    # Its place has yet to be read up to; it is lost.
                    self._is_behind, self._has_answer_so_far = True, False
                elif offered.seq == self._cursor + 1:
                    return self._given(offered)
                else:
                    # A repeat is passed over; behind a gap, the journal has what is missing.
                    self._is_behind = offered.seq > self._cursor
            elif self._is_closed or not self._is_live:
                raise StopAsyncIteration
            elif self._has_owner_ended and self._on_owner_ended is not None:
                await self._find_owner(self._on_owner_ended)
            else:
                await self._wait()

    def _take_due_delta(self) -> TextDelta | None:
        """The next piece, where its place is here: behind what has been given out."""
        while self._offered:
            offered = self._offered[0]
            if isinstance(offered, _DeltaAt):
                if offered.head > self._cursor:
                    return None
                self._offered.popleft()
                is_next = offered.delta.starts_anew or self._has_answer_so_far
                self._has_answer_so_far = is_next and offered.head == self._cursor
                if self._has_answer_so_far:
                    return offered.delta
            elif offered.seq > self._cursor:
                return None
            else:
                self._offered.popleft()
        return None

    def _given(self, logged: LoggedEvent) -> LoggedEvent:
        self._cursor, self._cursor_id = logged.seq, logged.event.id
        return logged

    async def _find_owner(self, on_owner_ended: Callable[[], Awaitable[object]]) -> None:
        # It may have written what it did not publish here, and so may the one elsewhere.
        self._is_behind = True
        try:
            await on_owner_ended()
        except OwnedElsewhere:
            with anyio.move_on_after(OWNER_ASKED_EVERY_S):
                await self._follow()
        else:
            self._has_owner_ended = False

    async def _wait(self) -> None:
        # No await since nothing was found, so no offer is missed.
        if self._subscriptions.is_owned(self._conversation_id):
            self._waiting = OneShot()
            await self._waiting.wait()
        else:
            await self._follow()

    async def _follow(self) -> None:
        """Wait for what another process writes, or for an owner here."""
        end = self._log_end if self._cursor_id is None else self._cursor
        self._following = anyio.CancelScope()
        try:
            with self._following:
                await self._journal.wait_for_more(self._conversation_id, after=end)
                self._is_behind = True
        finally:
            self._following = None

    async def _read_page(self) -> None:
        # Cleared before the journal is asked: what overflows from here on sets it again.
        self._is_behind = False
        at_cursor = 1 if self._cursor else 0
        try:
            page = deque(
                await self._journal.read(
                    self._conversation_id, after=self._cursor - at_cursor, limit=PAGE
                )
            )
        except ConversationNotFound:
            if not self._is_live and not self._known_seq:
                raise
            page = deque()
        except BaseException:
            self._is_behind = True
            raise
        self._is_behind = self._is_behind or len(page) == PAGE
        if at_cursor and page:
            found_id = page.popleft().event_id
            if self._cursor_id not in {None, found_id}:
                raise ConversationDeleted(self._conversation_id)
            self._cursor_id = found_id
        elif self._cursor_id is not None:
            raise ConversationDeleted(self._conversation_id)
        if not page and self._cursor < self._known_seq:
            raise ConversationDeleted(self._conversation_id)
        self._page = page
        if at_cursor and self._cursor_id is None and self._is_live:
            await self._find_end()

    async def _find_end(self) -> None:
        """The log ends before the cursor: where, so that its growing can be waited for."""
        try:
            self._log_end = (await self._journal.info(self._conversation_id)).head
        except ConversationNotFound:
            self._log_end = 0
        self._is_behind = self._is_behind or self._log_end >= self._cursor

    def _wake(self) -> None:
        if self._waiting is not None:
            self._waiting.set(None)
            self._waiting = None
        if self._following is not None:
            self._following.cancel()
