"""The journal in one SQLite file: durable, fenced, and written by one process at a time.

The journal owns the file while it is entered: a lock on a sidecar file (`chats.db-owner`) keeps a
second writing process out. The kernel frees the lock when this process dies, however it dies. One
thread writes the waiting appends of all conversations in one commit (WAL, `synchronous=FULL`);
another thread reads. The event loop never waits for the disk.

It promises more than the port. A reader (`read_only=True`) needs no ownership, changes and creates
nothing, and may run in another process. A second writer gets `OwnedElsewhere` after a bounded wait,
unless it takes over; then the first one's next write is refused. Every record carries a checksum
that covers the record before it.

It does not promise to survive a disk that lies about fsync, and it does not share a file between
machines. A crash leaves the file as of some commit; opening it again needs no repair.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Self, TypeVar, get_args

import anyio

from turnkeeper.runtime import Ports, Unavailable
from turnkeeper.runtime.lowlevel import ClockHold, OneShot, thread_caller, to_its_end

from ...errors import (
    CorruptLog,
    InvalidInput,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
    OwnedElsewhere,
    SearchIsOff,
)
from ...journal import (
    Claim,
    ConversationInfo,
    Deletion,
    Listing,
    Record,
    SearchPage,
    SearchQuery,
)
from ...values.text import check_bool
from ..shared.database_journal import DatabaseJournal, process_name, sorted_by_id
from ..shared.job_thread import READS_AT_ONCE, Job, JobThread, Worker
from ..shared.limits import check_asked, check_new_name, check_records, check_settings
from ..shared.log_watch import LogWatch
from .erasure import erasures
from .forks import delete, fork
from .misreads import unless_misread
from .owner_lock import OwnerLock
from .reader import ListSlice, Read, SQLiteReader
from .schema import (
    DISK_BYTES_S_MIN,
    SCHEMA_VERSION,
    Synchronous,
    closing_on_error,
    is_log_stamped,
    log_bytes,
    log_holder,
    open_for_writing,
    real_path,
    refusals,
    refuse_stranger,
)
from .writer import Change, SQLiteWriter, Upkeep

T = TypeVar("T")

_NOTHING = re.compile("nothing was (changed|done|created)|no conversation was changed")
"""Matches what an error says of a file that stays as it was."""

_DAY_S = 86_400.0
_LOCK_PAUSE_S = 0.05

_LOOK_S_MAX = 1.0
"""The longest time until a process notices that another one has taken its file over."""


def _ignore() -> None:
    return


def _no_failpoint(_: str) -> None:
    return


def _erase(writer: SQLiteWriter) -> bool:
    from .search import is_clean  # noqa: PLC0415 - a program that begins needs it not yet

    is_erased = writer.guard.erase() and is_clean(writer.connection)
    if is_erased:
        writer.is_erasing = bool(erasures(writer.connection))
    return is_erased


def _vacuum(path: Path, busy_wait_s: float, writer: SQLiteWriter) -> int:
    while writer.merge_slice(is_forced=True):
        pass
    is_emptied = writer.guard.erase()
    before = path.stat().st_size
    # In a connection of its own, since the writer's would make the copy of the file in memory.
    with contextlib.closing(
        open_for_writing(path, synchronous="FULL", busy_wait_s=busy_wait_s)
    ) as connection:
        if is_emptied:
            # A connection that begins a log draws its salts at random, unless it has emptied one
            # itself: then they follow that one's, and the file's stamp fits the new log, too.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        connection.execute("VACUUM")
    writer.guard.erase()
    return before - path.stat().st_size


class SQLiteJournal(DatabaseJournal):
    """The journal in one SQLite file, which one process at a time may write.

    Give it to `Conversations`, which enters it; or enter it yourself, to read logs or to use
    `turnkeeper.actors.journals.transfer`:

        async with SQLiteJournal("chats.db", read_only=True) as journal: ...
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        read_only: bool = False,
        takeover: bool = False,
        search: bool = False,
        synchronous: Synchronous = "FULL",
        address: str | None = None,
        owner_wait_s: float = 5.0,
        busy_wait_s: float = 10.0,
        answer_wait_s: float = 60.0,
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
        """Set up a journal; it opens nothing until it is entered.

        `path`: the file; it is made if it does not exist. `read_only`: read beside the process that
        owns the file, and change nothing. `takeover`: own the file at once, even if another process
        owns it; the next write of that process is refused. `synchronous`: SQLite's setting; with
        "NORMAL" a power cut may lose the last commits. `owner_wait_s`: how long entering waits for
        another owner to leave. `busy_wait_s`: how long a statement waits for another connection to
        the file. `poll_s`: how often readers check if another process has written.
        `stop_wait_s`: how long leaving waits for calls under way. `queued_events_max`,
        `queued_bytes_max`: the bounds of the writing thread's queue; further appends wait outside.
        `group_events_max`, `group_bytes_max`: the bounds of one commit.
        `active_conversations_max`: for how many conversations the writer keeps the end of the log
        in memory. `rejection_age_s_max`: how long refused messages are kept.

        `search` keeps an index of the words of chat messages. If the file has none yet, the writer
        builds it bit by bit, while the journal is used.
        `address`: the name of this process in the error that a second writer gets.
        If a disk does not answer for `answer_wait_s`, plus a second for each 4 MiB of a long
        write-ahead log, it counts as hung: all calls that wait for it get an error, and the journal
        accepts no more.
        `failpoint` is called in the writing thread with the name of each boundary of a commit:
        "begin" and "committed", with "written" and "commit" in between if the group holds more
        than appends. Tests stop, delay or fail at these points.
        `ports`: the clocks and threads that it uses. Raises `InvalidInput`.
        """
        check_settings(locals())
        if synchronous not in get_args(Synchronous):
            known = ", ".join(get_args(Synchronous))
            raise InvalidInput(f"synchronous is {synchronous!r}; it takes one of {known}")
        self._path = real_path(path)
        self._is_read_only = read_only
        self._is_takeover = takeover
        self._is_searching = search
        self._synchronous: Synchronous = synchronous
        self._address = address
        self._owner_wait_s = owner_wait_s
        self._busy_wait_s = busy_wait_s
        self._answer_wait_s = answer_wait_s
        self._watch = LogWatch(self._heads, poll_s=poll_s)
        self._active_conversations_max = active_conversations_max
        self._rejection_age_s_max = rejection_age_s_max
        self._ports = ports or Ports()
        self._failpoint = failpoint
        self._lock = OwnerLock(self._path, address or "")
        # Set once, by the writing thread.
        self._closed_by: Exception | None = None
        self._on_lease_loss: Callable[[], None] = _ignore
        self._look_s = min(poll_s, _LOOK_S_MAX)
        self._is_left = threading.Event()
        self._is_entered = False
        self._is_migrated = False
        thread = partial(
            JobThread,
            ports=self._ports,
            queued_items_max=queued_events_max,
            queued_bytes_max=queued_bytes_max,
            stop_wait_s=stop_wait_s,
            answer_wait_s=answer_wait_s,
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
            group_items_max=READS_AT_ONCE,
            group_bytes_max=group_bytes_max,
        )
        self._writer = self._make_writer()
        self._reader = self._make_reader()

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise JournalRefused(f"{self._path} is entered already; nothing was done")
        self._is_entered = True
        self._is_migrated = False
        try:
            self._call_in_loop = thread_caller()
            if not self._is_read_only:
                await self._own()
            await self._reader.start()
        except BaseException as error:
            is_hung = self._writer.is_hung
            await to_its_end(self._leave)
            if isinstance(error, JournalRefused | Unavailable):
                self._refuse_as_changed(error, is_hung=is_hung)
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await to_its_end(self._leave)

    async def _own(self) -> None:
        # One for each entering: a thread that comes back late has no say over the next one's.
        self._lock = OwnerLock(self._path, self._address or process_name())
        await self._on_disk(partial(refuse_stranger, self._path))
        await self._acquire()
        self._closed_by = None
        self._is_left = threading.Event()
        await self._writer.start()
        self._ports.start_thread(
            f"watch of the owner of {self._path}",
            partial(self._watch_lock, self._lock, self._is_left),
        )

    def _refuse_as_changed(self, error: JournalRefused | Unavailable, *, is_hung: bool) -> None:
        """Raise the error as one that says so, if it comes after the file was changed."""
        changes = []
        if self._is_migrated:
            changes.append(
                f"was migrated to schema version {SCHEMA_VERSION}, which older versions of "
                "turnkeeper refuse"
            )
        if self._lock.taken_from is not None:
            changes.append(f"was taken over from {self._lock.taken_from}, which can write no more")
        elif is_hung and self._lock.is_prepared:
            changes.append("may have been taken over from its owner, which could write no more")
        if changes:
            kind = JournalRefused if isinstance(error, JournalRefused) else JournalUnavailable
            said = f"no conversation was changed, but the file {' and '.join(changes)}"
            text, replaced = _NOTHING.subn(said, str(error))
            raise kind(text if replaced else f"{text}; {said}") from error

    def _note_migrated(self) -> None:
        self._is_migrated = True
        self._lock.note_shut_out()

    def _watch_lock(self, lock: OwnerLock, is_left: threading.Event) -> None:
        """Watch if another process takes the file over; runs in a separate thread."""
        while not is_left.wait(self._look_s):
            try:
                lock.check()
            except OwnedElsewhere as error:
                self._close_for_writing(is_left, error)
                return

    async def _acquire(self) -> None:
        if self._is_takeover:
            await self._on_disk(self._lock.prepare_takeover)
            return
        tries = 1 + int(self._owner_wait_s / _LOCK_PAUSE_S)
        while True:
            tries -= 1
            try:
                await self._on_disk(self._lock.try_acquire)
            except OwnedElsewhere:
                if not tries:
                    raise
                await anyio.sleep(_LOCK_PAUSE_S)
            else:
                return

    async def _on_disk(self, act: Callable[[], None]) -> None:
        """Run `act` in a thread, since the disk may hang. A lock that it takes late is released."""
        ended: OneShot[None] = OneShot()
        is_late = threading.Event()
        lock = self._lock

        def run() -> None:
            try:
                act()
                if is_late.is_set():
                    lock.release()
            except Exception as error:  # noqa: BLE001 - handed to the caller
                self._call_in_loop(partial(ended.fail, error))
            else:
                self._call_in_loop(partial(ended.set, None))

        async def wait_in_time() -> None:
            with anyio.move_on_after(self._answer_wait_s):
                await ended.wait_until_done()

        hold = ClockHold()
        try:
            self._ports.start_thread(f"lock of {self._path}", run)
            hold.take()
            await to_its_end(wait_in_time)
        finally:
            hold.release()
            if not ended.is_done:
                is_late.set()
        if not ended.is_done:
            raise JournalUnavailable(
                f"{self._path} cannot be locked: the disk has not answered within "
                f"{self._answer_wait_s:g} s; nothing was changed; check the disk, and try again"
            )
        ended.result()

    async def _leave(self) -> None:
        self._is_left.set()
        # The last connection to leave folds the write-ahead log into the file, if it may write.
        # After an error nothing is folded in: the next opening checks the log.
        threads = [self._reader, self._writer]
        if self._closed_by is not None:
            threads.reverse()
        for thread in threads:
            await thread.stop()
        # A thread that hangs may wake up and write, so no other process may open the file before
        # this one has ended.
        if not self._is_read_only and not self._writer.is_hung:
            try:
                await self._on_disk(self._lock.release)
            except JournalUnavailable:
                pass  # it is free when this process ends
            except Unavailable:
                self._lock.release()  # there was no thread for it
        self._writer = self._make_writer()
        self._reader = self._make_reader()
        self._on_lease_loss = _ignore
        self._is_entered = False

    # --- the port ---------------------------------------------------------------------------------

    def is_lease_valid(self, *, since: float | None = None) -> bool:  # noqa: ARG002 - nothing is renewed
        """Return True while this process may write the file; this lease needs no renewal."""
        return (
            self._is_entered
            and not self._is_read_only
            and self._closed_by is None
            and not self._writer.is_hung
        )

    def watch_lease(self, on_loss: Callable[[], None]) -> None:
        self._on_lease_loss = on_loss

    async def claim(
        self,
        conversation_id: str,
        *,
        takeover: bool = False,
        any_name: bool = False,
    ) -> Claim:
        """Take the next epoch; a process that has entered owns all conversations of the file."""
        check_bool("takeover", takeover)  # and no more: entering has decided that
        await check_new_name(self, conversation_id, any_name=any_name)
        return await self._change(lambda writer: writer.claim(conversation_id))

    async def list(self) -> Sequence[ConversationInfo]:
        # Each slice is a separate read, so that none exceeds the bound on an answer, however large
        # the file is.
        found: list[ConversationInfo] = []
        rows, part = 0, ListSlice([], 0, -1, is_last=False)
        while not part.is_last:
            part = await self._read(partial(SQLiteReader.list_slice, after=part.last))
            found += part.infos
            rows += part.rows
        await self._read(partial(SQLiteReader.check_index, rows=rows, last=part.last))
        return await sorted_by_id(found)

    async def find_abandoned(self) -> Sequence[ConversationInfo]:
        # The file has one owner, which is this process if any is alive. Read in slices, as in
        # `list`.
        found: list[ConversationInfo] = []
        after: int | None = -1
        while after is not None:
            infos, after = await self._read(partial(SQLiteReader.unfinished, after=after))
            found += infos
        return await sorted_by_id(found)

    async def release(self, conversation_id: str, *, epoch: int) -> None:  # noqa: ARG002 - the port's
        """Do nothing: leaving the journal releases the whole file."""
        check_asked(conversation_id)

    async def fork(
        self,
        conversation_id: str,
        fork_id: str,
        *,
        at: int,
        records: Sequence[Record],
        is_unfinished: bool,
        at_event_id: str | None = None,
        listing: Listing | None = None,
    ) -> Claim:
        if not records:
            raise ValueError("a fork without records of its own")
        check_asked(conversation_id)
        check_records(records)
        await check_new_name(self, fork_id)
        return await self._change(
            lambda writer: fork(
                writer,
                conversation_id,
                fork_id,
                at,
                records,
                is_unfinished=is_unfinished,
                at_event_id=at_event_id,
                listing=listing,
            )
        )

    async def delete(self, conversation_id: str, *, epoch: int) -> Deletion:
        """Delete a conversation; overwrite the records that no fork needs, and empty the log.

        The conversation is gone after the first of several transactions. If the call is cancelled
        or the process ends after that, this writer or the next one removes the remaining records,
        as soon as it has nothing else to do.
        """
        check_asked(conversation_id)
        kept, forks, logs = await self._change(
            lambda writer: delete(writer, conversation_id, epoch)
        )
        try:
            while await self._change(lambda writer: writer.erase_slice_of(logs)):
                pass
            while await self._change(SQLiteWriter.merge_slice):
                pass
            is_erased = await self._writer.do(Upkeep(_erase))
        except (JournalUnavailable, JournalOutcomeUnknown, OwnedElsewhere, CorruptLog):
            is_erased = False
        return Deletion(kept, forks, is_erased)

    async def search(self, query: SearchQuery) -> SearchPage:
        self._refuse_if_search_is_off()
        # It may take seconds, and all reads of a group have one bound: so no other follows it.
        return await self._reader.do(Read(lambda reader: reader.search(query), READS_AT_ONCE))

    async def index(self) -> None:
        self._refuse_if_search_is_off()
        while await self._change(SQLiteWriter.index_slice):
            pass

    async def wait_for_more(self, conversation_id: str, *, after: int) -> None:
        check_asked(conversation_id)
        # Another process may be the writer, and SQLite sends no notifications: this polls.
        await self._watch.wait(conversation_id, after)

    async def vacuum(self) -> int:
        """Return the space of deleted records to the disk; return the number of bytes freed.

        It rewrites the whole file, so it needs as much free space again, and appends wait
        meanwhile. The bound on their wait is longer by a second for each 4 MiB of the file.
        """
        self._refuse_if_read_only()
        size = await self._read(lambda reader: reader.size())
        return await self._writer.do(
            Upkeep(partial(_vacuum, self._path, self._busy_wait_s), more_s=size / DISK_BYTES_S_MIN)
        )

    # --- the threads ------------------------------------------------------------------------------

    def _submit(self, job: Job[T]) -> Awaitable[T]:
        self._refuse_if_read_only()
        return self._writer.submit(job)

    async def _change(self, apply: Callable[[SQLiteWriter], T], size: int = 0) -> T:
        return await self._submit(Change(apply, size))

    async def _read(self, apply: Callable[[SQLiteReader], T]) -> T:
        return await self._reader.do(Read(apply))

    def _refuse_if_search_is_off(self) -> None:
        if not self._is_searching:
            raise SearchIsOff(str(self._path))

    def _refuse_if_read_only(self) -> None:
        if self._is_read_only:
            raise JournalRefused(f"{self._path} is open read-only; nothing was written")

    def _open_writer(self) -> Worker:
        return unless_misread(self._path, self._make_sqlite_writer)

    def _make_sqlite_writer(self) -> SQLiteWriter:
        left = log_bytes(self._path)  # of an owner that did not close it, or beside a reader
        self._allow_for_log(self._writer, left)
        is_stamped = is_log_stamped(self._path)
        if self._lock.is_prepared and not self._path.exists():
            # Only who has the lock may make it: two would make it at once, in the same place.
            raise JournalUnavailable(
                f"{self._path} cannot be taken over: its owner has not made it yet, or it was "
                "deleted; nothing was changed; try again, or stop its owner"
            )
        connection = open_for_writing(
            self._path,
            synchronous=self._synchronous,
            busy_wait_s=self._busy_wait_s,
            on_migrated=self._note_migrated,
        )
        # If the file cannot be stamped, its log must stay. So another connection, which cannot fold
        # the log into the file, stays open while this one closes.
        with (
            refusals(self._path),
            closing_on_error(connection),
            log_holder(self._path, self._busy_wait_s),
            closing_on_error(connection),
        ):
            return SQLiteWriter(
                connection,
                path=self._path,
                lock=self._lock,
                ports=self._ports,
                failpoint=self._failpoint,
                tails_max=self._active_conversations_max,
                rejection_age_s_max=self._rejection_age_s_max,
                is_searching=self._is_searching,
                is_log_left=left > 0,
                is_log_stamped=is_stamped,
                on_closed=partial(self._close_for_writing, self._is_left),
                on_log_bytes=partial(self._allow_for_log, self._writer),
            )

    @staticmethod
    def _allow_for_log(thread: JobThread, size: int) -> None:
        """Give the thread as long as the disk may take for a log of this size."""
        thread.more_s = size / DISK_BYTES_S_MIN

    def _open_reader(self) -> Worker:
        self._allow_for_log(self._reader, log_bytes(self._path))
        make = partial(
            SQLiteReader,
            self._path,
            busy_wait_s=self._busy_wait_s,
            is_owner=not self._is_read_only,
        )
        return unless_misread(self._path, make)

    def _close_for_writing(self, is_left: threading.Event, error: Exception) -> None:
        if not is_left.is_set():  # else it is late, and the journal may have been entered again
            self._closed_by = error
            self._call_in_loop(self._tell_lease_loss)

    def _tell_lease_loss(self) -> None:
        self._on_lease_loss()
