"""The place of one reader in a log, and where its next event comes from.

Owns the cursor of an `EventReader`, the seq of the event that it has yielded last. The next event
comes from a page of the journal, or from the events that were offered when they were committed. The
offered ones are a hint: one that is not exactly the next is dropped, and the journal is read.

Each page is read from the record at the cursor on. If that record is not the one that was yielded,
the conversation was deleted, and another was begun under its id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum

from ..core.commands import Expected
from ..core.listing import time_us
from ..core.records import decode_record
from ..errors import ConversationDeleted, ConversationNotFound, NotThisLog
from ..events import LoggedEvent
from ..journal import Journal, StoredRecord, may_have_more

__all__ = [
    "BEHIND",
    "CURRENT",
    "DELETED",
    "ENDING",
    "READER_TRANSITIONS",
    "LogCursor",
    "ReaderState",
    "Signal",
]


class ReaderState(Enum):
    """The source from which a reader takes its next event."""

    BEHIND = "read the journal"
    CURRENT = "take the events on offer, or wait"
    ENDING = "take the events on offer, then stop"
    CUT_OFF = "raise ConversationsClosed: it was behind when the Conversations closed"
    DELETED = "raise ConversationDeleted"

    __hash__ = object.__hash__  # that of an Enum is a call of Python's, at each look into a table


class Signal(Enum):
    """The causes of a change of a reader's state."""

    LOOK = "the journal may have events that were not offered"
    READ = "a page is about to be read, or memory had all events"
    CLOSE = "the Conversations have closed"
    DELETE = "the conversation was deleted"

    __hash__ = object.__hash__


# Named here for speed: each item of each reader needs them, and `ReaderState.X` is a slow lookup.
BEHIND, CURRENT, ENDING, CUT_OFF, DELETED = ReaderState
READER_TRANSITIONS: Mapping[ReaderState, Mapping[Signal, ReaderState]] = {
    BEHIND: {
        Signal.LOOK: BEHIND,
        Signal.READ: CURRENT,
        Signal.CLOSE: CUT_OFF,
        Signal.DELETE: DELETED,
    },
    CURRENT: {
        Signal.LOOK: BEHIND,
        Signal.READ: CURRENT,
        Signal.CLOSE: ENDING,
        Signal.DELETE: DELETED,
    },
    ENDING: {Signal.LOOK: CUT_OFF, Signal.CLOSE: ENDING, Signal.DELETE: DELETED},
    CUT_OFF: {Signal.LOOK: CUT_OFF, Signal.CLOSE: CUT_OFF, Signal.DELETE: DELETED},
    DELETED: dict.fromkeys(Signal, DELETED),
}
"""The next state, for each signal that can come in a state. A reader begins `BEHIND`. `READ` comes
before the page is awaited, so that a signal from then on is not lost."""


class LogCursor:
    """The cursor of one reader, the events that it may yield next, and its state."""

    __slots__ = (
        "_conversation_id",
        "_end_seen",
        "_expected",
        "_is_live",
        "_journal",
        "_known_seq",
        "_page_bytes",
        "_page_size",
        "event_id",
        "offered",
        "page",
        "seq",
        "state",
    )

    def __init__(
        self,
        journal: Journal,
        conversation_id: str,
        *,
        after: int,
        is_live: bool,
        known_seq: int,
        page_size: int,
        page_bytes: int,
        expected: Expected | None = None,
    ) -> None:
        self._journal = journal
        self._conversation_id = conversation_id
        self._is_live = is_live
        self._known_seq = known_seq
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._expected = expected
        """The event that the log must have at the cursor; None once it was found there."""
        self.seq = after
        """The cursor: the seq of the event that was yielded last."""
        self.event_id: str | None = None
        """The id of the event at the cursor; None before the log has been seen to reach it."""
        self._end_seen = 0
        """The end of the log, if it was seen to end before the cursor."""
        self.state = BEHIND
        self.page: deque[StoredRecord] = deque()
        """The events that were read from the journal, and not yielded yet."""
        self.offered: deque[LoggedEvent] = deque()
        """The events that were offered, and not yielded yet."""

    def note(self, signal: Signal) -> None:
        """Enter the state that follows this signal."""
        self.state = READER_TRANSITIONS[self.state][signal]

    def pass_over(self, offered: LoggedEvent) -> None:
        """Drop an offered event that is not the next; if it is a later one, look at the journal."""
        if offered.seq > self.seq:
            self.note(Signal.LOOK)

    @property
    def end(self) -> int:
        """The seq after which the log has to grow, for a reader that has yielded all of it."""
        return self._end_seen if self.event_id is None else self.seq

    async def read_page(self) -> None:
        """Read the next page. Raises `ConversationDeleted` if the log is not the one it was.

        Raises `NotThisLog` if the log is not the expected one.
        """
        # Before the read, so that a signal which comes during it is not lost.
        self.note(Signal.READ)
        at_cursor = 1 if self.seq else 0
        try:
            page = deque(
                await self._journal.read(
                    self._conversation_id,
                    after=self.seq - at_cursor,
                    limit=self._page_size,
                    bytes_max=self._page_bytes,
                )
            )
        except ConversationNotFound:
            if not self._is_live and not self._known_seq:
                raise
            page = deque()
        except BaseException:
            self.note(Signal.LOOK)
            raise
        if self._expected is not None:
            if not page or not self._is_expected(self._expected, page[0]):
                self.note(Signal.LOOK)  # so that the next read checks again
                raise NotThisLog(self._conversation_id, self.seq)
            self._expected = None
        if may_have_more(page, self._page_size, self._page_bytes):
            self.note(Signal.LOOK)
        if at_cursor and page:
            found_id = page.popleft().event_id
            if self.event_id not in {None, found_id}:
                raise ConversationDeleted(self._conversation_id)
            self.event_id = found_id
        elif self.event_id is not None:
            raise ConversationDeleted(self._conversation_id)
        if not page and self.seq < self._known_seq:
            raise ConversationDeleted(self._conversation_id)
        self.page = page
        if at_cursor and self.event_id is None and self._is_live:
            await self._find_end()

    def _is_expected(self, expected: Expected, found: StoredRecord) -> bool:
        """Return True if the record at the cursor is the event that is expected there."""
        if found.seq != self.seq or expected.event_id not in {None, found.event_id}:
            return False
        if expected.at_us is None:
            return True  # not decoded: a damaged record behind the reader keeps it from nothing
        return time_us(decode_record(self._conversation_id, found).event) == expected.at_us

    async def _find_end(self) -> None:
        """Find the end of a log that ends before the cursor, so that its growth can be awaited."""
        try:
            self._end_seen = (await self._journal.info(self._conversation_id)).head
        except ConversationNotFound:
            self._end_seen = 0
        if self._end_seen >= self.seq:
            self.note(Signal.LOOK)
