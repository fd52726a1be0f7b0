"""The synchronous door to conversations in a SQLite journal, for states that are used alone.

It owns one event loop in a daemon thread for each journal file that states of this process use,
and lends it to whoever calls: a call returns when the journal has done it. The file is read only
until the first append, which opens it as its one writing process. States of one process share the
file; of two states of one conversation, the one that appended last has shut the other out.

Nothing is kept here that the journal does not have, and leaving the program waits for nothing: an
append that has returned is durable.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from turnkeeper.runtime import OwnershipLost, Ports, Refused, thread_caller

from ._records import logged_event, record_of
from ._sqlite_journal import SQLiteJournal
from .errors import ConversationNotFound
from .events import Event
from .journal import Snapshot, StoredRecord

__all__ = ["StateFiles"]

T = TypeVar("T")

_FILE_NAME = "conversations.db"
_READ_PAGE = 512

# The files in use in this process. Invariant: a file is here from its first user to its last, and
# only who holds the lock adds or takes one.
_in_use: dict[Path, _SharedJournal] = {}
_in_use_lock = threading.Lock()


class _SharedJournal:
    """One journal file, with the event loop that it lives in."""

    def __init__(self, path: Path, ports: Ports) -> None:
        self.users = 0
        self._path = path
        self._ports = ports
        self._journal: SQLiteJournal | None = None
        self._is_writing = False
        self._ready, self.ended = threading.Event(), threading.Event()
        ports.start_thread(f"states of {path}", self._run)
        self._ready.wait()

    def call(self, ask: Callable[[SQLiteJournal], Awaitable[T]], *, writes: bool = False) -> T:
        """What the journal answers; it is opened, or opened for writing, where it has to be."""
        return self._portal.call(self._ask, ask, writes)

    def end(self) -> None:
        """Close the file, soon; `ended` is set when it is done. Any thread may call."""
        self._call_in_loop(self._stop.set)

    def _run(self) -> None:
        try:
            anyio.run(self._serve)
        finally:
            self._ready.set()
            self.ended.set()

    async def _serve(self) -> None:
        self._opening = anyio.Lock()
        self._stop = anyio.Event()
        self._call_in_loop = thread_caller()
        async with AsyncExitStack() as self._entered, BlockingPortal() as self._portal:
            self._ready.set()
            await self._stop.wait()

    async def _ask(self, ask: Callable[[SQLiteJournal], Awaitable[T]], writes: bool) -> T:  # noqa: FBT001 - the portal passes arguments by position
        async with self._opening:
            journal = await self._opened(writes=writes)
        return await ask(journal)

    async def _opened(self, *, writes: bool) -> SQLiteJournal:
        if self._journal is not None and (self._is_writing or not writes):
            return self._journal
        if writes:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        journal = SQLiteJournal(self._path, read_only=not writes, ports=self._ports)
        # The one that was open for reading stays so until the end: others may be reading by it.
        await self._entered.enter_async_context(journal)
        self._journal, self._is_writing = journal, writes
        return journal


def _use(path: Path, ports: Ports) -> _SharedJournal:
    with _in_use_lock:
        shared = _in_use.get(path)
        if shared is None:
            shared = _in_use[path] = _SharedJournal(path, ports)
        shared.users += 1
        return shared


def _let_go(path: Path, shared: _SharedJournal) -> None:
    with _in_use_lock:
        shared.users -= 1
        if not shared.users:
            del _in_use[path]
            shared.end()


class StateFiles:
    """One conversation of a journal file."""

    def __init__(
        self, persistence_dir: str | PathLike[str], conversation_id: str, ports: Ports
    ) -> None:
        self._conversation_id = conversation_id
        self._path = Path(persistence_dir).resolve() / _FILE_NAME
        self._epoch: int | None = None
        self._newest_epoch = 0
        """The newest that this state knows of, whoever owns it now."""
        self._lost: OwnershipLost | None = None
        self._shared = _use(self._path, ports)
        self._let_go = weakref.finalize(self, _let_go, self._path, self._shared)
        self._let_go.atexit = False

    @property
    def is_owner(self) -> bool:
        return self._epoch is not None

    def own(self) -> int:
        """Take the next epoch; gives the seq that the log ends at, for good."""
        if self._lost is not None:
            raise self._lost
        claim = self._shared.call(lambda journal: journal.claim(self._conversation_id), writes=True)
        self._epoch = self._newest_epoch = claim.epoch
        return claim.head

    def holds(self, seq: int) -> bool:  # noqa: ARG002 - a journal holds all
        return True

    def append(self, event: Event, *, expected_seq: int, is_unfinished: bool) -> None:
        """Write an event at the end; it is durable when this returns.

        Where it may have been written or not, the ownership is given up, so that the next append
        looks at the log first.
        """
        epoch, self._epoch = self._epoch, None
        assert epoch is not None, "append without an epoch"
        try:
            seqs = self._shared.call(
                lambda journal: journal.append(
                    self._conversation_id,
                    [record_of(event)],
                    epoch=epoch,
                    expected_seq=expected_seq,
                    is_unfinished=is_unfinished,
                )
            )
        except OwnershipLost as lost:
            # A newer owner is at work: taking the conversation back would only begin a quarrel.
            self._lost = lost
            raise
        except Refused:
            self._epoch = epoch
            raise
        assert list(seqs) == [expected_seq], (seqs, expected_seq)
        self._epoch = epoch

    def find(self, event_id: str) -> int | None:
        """The seq of the event of this id, if the log has it."""
        try:
            found = self._shared.call(
                lambda journal: journal.find_events(self._conversation_id, [event_id])
            )
        except ConversationNotFound:
            return None  # nothing was appended yet
        return found.get(event_id)

    def read(self, after: int, upto: int | None = None) -> Iterator[Event]:
        """The events behind a seq, page by page, to a seq or to the end of the log."""
        if not self._path.exists():
            raise ConversationNotFound(self._conversation_id)
        while upto is None or after < upto:
            limit = _READ_PAGE if upto is None else min(_READ_PAGE, upto - after)
            page = self._shared.call(partial(self._read_page, after=after, limit=limit))
            if not page:
                return
            for record in page:
                self._newest_epoch = max(self._newest_epoch, record.epoch)
                yield logged_event(self._conversation_id, record).event
            after = page[-1].seq

    async def _read_page(
        self, journal: SQLiteJournal, *, after: int, limit: int
    ) -> Sequence[StoredRecord]:
        return await journal.read(self._conversation_id, after=after, limit=limit)

    def read_snapshot(self) -> Snapshot | None:
        """The snapshot that was written last."""
        if not self._path.exists():
            raise ConversationNotFound(self._conversation_id)
        info = self._shared.call(lambda journal: journal.info(self._conversation_id))
        self._newest_epoch = max(self._newest_epoch, info.epoch)
        return self._shared.call(lambda journal: journal.read_snapshot(self._conversation_id))

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; it may be lost, and it is only written."""
        self._shared.call(
            lambda journal: journal.write_snapshot(
                self._conversation_id, snapshot, epoch=self._newest_epoch
            ),
            writes=True,
        )

    def close(self) -> None:
        """Let go of the file; where no other state uses it, wait until it is closed."""
        if self._let_go.alive:
            self._let_go()
            if not self._shared.users:
                self._shared.ended.wait()
