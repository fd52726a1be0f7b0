"""The journal in one SQLite file: durable, fenced, and written by one process at a time.

It owns the file while it is entered: a lock on a sidecar file (`chats.db-owner`) keeps a second
writing process out, and is freed by the kernel when this one dies, however it dies. One thread
writes everything that all conversations have waiting in one commit (WAL, `synchronous=FULL`);
another one reads. The event loop never waits for the disk.

Beside what the port promises: a reader (`read_only=True`) needs no ownership, changes and creates
nothing, and may be in another process; a second writer is told `OwnedElsewhere` after a bounded
wait, unless it takes over, and then the first one's next write is refused. Every record carries a
checksum that covers the one before it.

It does not promise to survive a disk that lies about fsync, and it does not share a file between
machines. A crash leaves the file as of some commit; opening it again needs no repair.
"""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Self, TypeVar

import anyio

from turnkeeper.runtime import Ports

from ._append_rules import Append
from ._job_thread import JobThread, Worker
from ._log_watch import LogWatch
from ._owner_lock import OwnerLock
from ._sqlite_forks import delete, fork
from ._sqlite_reader import Read, SQLiteReader
from ._sqlite_schema import Synchronous, open_for_writing, refusal
from ._sqlite_writer import Change, SQLiteWriter, Upkeep
from .errors import JournalRefused, JournalUnavailable, OwnedElsewhere
from .journal import Claim, ConversationInfo, Deletion, Record, Rejection, Snapshot, StoredRecord

T = TypeVar("T")

_DAY_S = 86_400.0
_LOCK_PAUSE_S = 0.05


def _no_failpoint(_: str) -> None:
    return


def _empty_write_ahead_log(connection: sqlite3.Connection) -> bool:
    """Fold the log into the file and cut it to nothing; False when a reader is in the way."""
    (is_busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not is_busy


def _vacuum(path: Path, connection: sqlite3.Connection) -> int:
    _empty_write_ahead_log(connection)
    before = path.stat().st_size
    connection.execute("VACUUM")
    _empty_write_ahead_log(connection)
    return before - path.stat().st_size


class SQLiteJournal:
    """`async with SQLiteJournal("chats.db") as journal`, in any loop of asyncio or trio."""

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        read_only: bool = False,
        takeover: bool = False,
        synchronous: Synchronous = "FULL",
        address: str | None = None,
        owner_wait_s: float = 5.0,
        busy_wait_s: float = 10.0,
        stop_wait_s: float = 30.0,
        poll_s: float = 0.2,
        queued_events_max: int = 8_192,
        queued_bytes_max: int = 64 << 20,
        group_events_max: int = 512,  # more would leave the loop idle while it is written
        group_bytes_max: int = 8 << 20,
        active_conversations_max: int = 16_384,
        rejection_age_s_max: float = 30 * _DAY_S,
        ports: Ports | None = None,
        failpoint: Callable[[str], None] = _no_failpoint,
    ) -> None:
        """Nothing is opened before it is entered.

        `address` says who owns the file, to those that it is refused to. `failpoint` is called in
        the writing thread with the name of each boundary of a commit as it is passed: "begin" and
        "committed", and "written" and "commit" in between where a group is more than appends.
        Tests stop, delay or fail there.
        """
        self._path = Path(path)
        self._is_read_only = read_only
        self._is_takeover = takeover
        self._synchronous: Synchronous = synchronous
        self._owner = address or f"process {os.getpid()} on {socket.gethostname()}"
        self._owner_wait_s = owner_wait_s
        self._busy_wait_s = busy_wait_s
        self._watch = LogWatch(self._heads, poll_s=poll_s)
        self._active_conversations_max = active_conversations_max
        self._rejection_age_s_max = rejection_age_s_max
        self._ports = ports or Ports()
        self._failpoint = failpoint
        self._lock = OwnerLock(self._path, self._owner)
        # Set once, by the writing thread.
        self._closed_by: Exception | None = None
        self._is_entered = False
        thread = partial(
            JobThread,
            ports=self._ports,
            queued_items_max=queued_events_max,
            queued_bytes_max=queued_bytes_max,
            stop_wait_s=stop_wait_s,
        )
        self._make_writer = partial(
            thread,
            f"writer of {self._path}",
            self._open_writer,
            group_items_max=group_events_max,
            group_bytes_max=group_bytes_max,
        )
        self._make_reader = partial(
            thread,
            f"reader of {self._path}",
            self._open_reader,
            group_items_max=8,  # a group of reads is answered together; more would only wait
            group_bytes_max=group_bytes_max,
        )
        self._writer = self._make_writer()
        self._reader = self._make_reader()

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise JournalRefused(f"{self._path} is entered already; nothing was done")
        self._is_entered = True
        try:
            if not self._is_read_only:
                await self._own()
            await self._reader.start()
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._leave()

    async def _own(self) -> None:
        await self._acquire()
        self._closed_by = None
        await self._writer.start()

    async def _acquire(self) -> None:
        if self._is_takeover:
            self._lock.take_over()
            return
        tries = 1 + int(self._owner_wait_s / _LOCK_PAUSE_S)
        while True:
            tries -= 1
            try:
                self._lock.try_acquire()
            except OwnedElsewhere:
                if not tries:
                    raise
                await anyio.sleep(_LOCK_PAUSE_S)
            else:
                return

    async def _leave(self) -> None:
        # The reader first: the last connection to leave folds the write-ahead log into the file.
        await self._reader.stop()
        await self._writer.stop()
        self._lock.release()
        self._writer = self._make_writer()
        self._reader = self._make_reader()
        self._is_entered = False

    # --- the port ---------------------------------------------------------------------------------

    def is_lease_valid(self, *, since: float | None = None) -> bool:  # noqa: ARG002 - nothing is renewed
        """True while this process may write the file; nothing has to be renewed here."""
        return self._is_entered and not self._is_read_only and self._closed_by is None

    async def claim(self, conversation_id: str, *, takeover: bool = False) -> Claim:  # noqa: ARG002 - entering has decided that
        """Take the next epoch; whoever has entered owns all conversations of the file."""
        return await self._change(lambda writer: writer.claim(conversation_id))

    def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
    ) -> Awaitable[Sequence[int]]:
        if not records:
            raise ValueError("an append of zero records")
        self._refuse_if_read_only()
        return self._writer.submit(
            Append(
                conversation_id,
                records,
                epoch=epoch,
                expected_seq=expected_seq,
                is_unfinished=is_unfinished,
            )
        )

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512
    ) -> Sequence[StoredRecord]:
        return await self._read(lambda reader: reader.read(conversation_id, after, limit))

    async def info(self, conversation_id: str) -> ConversationInfo:
        return await self._read(lambda reader: reader.info(conversation_id))

    async def list(self, *, only_unfinished: bool = False) -> Sequence[ConversationInfo]:
        return await self._read(lambda reader: reader.list(only_unfinished=only_unfinished))

    async def find_events(
        self, conversation_id: str, event_ids: Sequence[str]
    ) -> Mapping[str, int]:
        return await self._read(lambda reader: reader.find_events(conversation_id, event_ids))

    async def find_messages(
        self, conversation_id: str, message_ids: Sequence[str]
    ) -> Mapping[str, int]:
        return await self._read(lambda reader: reader.find_messages(conversation_id, message_ids))

    async def reject(self, conversation_id: str, rejections: Sequence[Rejection]) -> None:
        await self._change(
            lambda writer: writer.reject(conversation_id, rejections),
            sum(len(rejection.payload) for rejection in rejections),
        )

    async def rejections(self, conversation_id: str) -> Sequence[Rejection]:
        return await self._read(lambda reader: reader.rejections(conversation_id))

    async def write_snapshot(self, conversation_id: str, snapshot: Snapshot, *, epoch: int) -> None:
        await self._change(
            lambda writer: writer.write_snapshot(conversation_id, snapshot, epoch),
            len(snapshot.payload),
        )

    async def read_snapshot(self, conversation_id: str) -> Snapshot | None:
        return await self._read(lambda reader: reader.read_snapshot(conversation_id))

    async def fork(
        self,
        conversation_id: str,
        fork_id: str,
        *,
        at: int,
        records: Sequence[Record],
        is_unfinished: bool,
    ) -> Claim:
        if not records:
            raise ValueError("a fork without records of its own")
        return await self._change(
            lambda writer: fork(
                writer, conversation_id, fork_id, at, records, is_unfinished=is_unfinished
            )
        )

    async def delete(self, conversation_id: str, *, epoch: int) -> Deletion:
        """Delete a conversation; what no fork needs is overwritten in the file, and its log too."""
        kept, forks = await self._change(lambda writer: delete(writer, conversation_id, epoch))
        try:
            is_erased = await self._writer.do(Upkeep(_empty_write_ahead_log))
        except (JournalUnavailable, OwnedElsewhere):
            is_erased = False
        return Deletion(kept, forks, is_erased)

    async def wait_for_more(self, conversation_id: str, *, after: int) -> None:
        # Another process may be the one that writes, and nothing tells of it: this polls.
        await self._watch.wait(conversation_id, after)

    async def _heads(self, names: Sequence[str]) -> Mapping[str, int]:
        return await self._read(lambda reader: reader.heads(names))

    async def vacuum(self) -> int:
        """Give the room of what was deleted back to the disk; returns how many bytes that was.

        Writes the file anew, so it takes as much room again while it runs, and nothing is
        written meanwhile.
        """
        self._refuse_if_read_only()
        return await self._writer.do(Upkeep(partial(_vacuum, self._path)))

    # --- the threads ------------------------------------------------------------------------------

    async def _change(self, apply: Callable[[SQLiteWriter], T], size: int = 0) -> T:
        self._refuse_if_read_only()
        return await self._writer.do(Change(apply, size))

    async def _read(self, apply: Callable[[SQLiteReader], T]) -> T:
        return await self._reader.do(Read(apply))

    def _refuse_if_read_only(self) -> None:
        if self._is_read_only:
            raise JournalRefused(f"{self._path} is open read-only; nothing was written")

    def _open_writer(self) -> Worker:
        connection = open_for_writing(
            self._path, synchronous=self._synchronous, busy_wait_s=self._busy_wait_s
        )
        try:
            return SQLiteWriter(
                connection,
                path=str(self._path),
                owner=self._owner,
                ports=self._ports,
                failpoint=self._failpoint,
                tails_max=self._active_conversations_max,
                rejection_age_s_max=self._rejection_age_s_max,
                on_closed=self._close_for_writing,
            )
        except sqlite3.Error as error:
            connection.close()
            raise refusal(self._path, error) from error

    def _open_reader(self) -> Worker:
        return SQLiteReader(
            self._path, busy_wait_s=self._busy_wait_s, is_owner=not self._is_read_only
        )

    def _close_for_writing(self, error: Exception) -> None:
        self._closed_by = error
