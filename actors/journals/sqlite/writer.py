"""Writes the waiting jobs of all conversations in one commit.

The writer owns the writing connection and runs in one thread. There are three ways to run a group
of jobs. If one way meets anything unexpected, the writer falls back to the next:

1. *In one statement*, which is its own commit: for groups of appends only, as nearly all groups
are.
2. *Together*, in one transaction and in the order of the jobs: for groups with other jobs too.
3. *One by one*, each under a savepoint of one transaction, so that a bad job is refused alone and
   with the exact reason.

Invariants. Epoch and head of a conversation, and the file's generation, are checked in the
statement that changes them, so no other process can interfere. The tails kept in memory equal the
file as of the last commit, or are dropped. A job has an outcome only once its transaction has one:
no outcome is final before the commit has returned.

An error that is known to belong to one job refuses that job alone. Any other error (the disk, the
memory, a bug) fails its whole group: the transaction is rolled back and all tails are dropped.
Unless the disk was full or the file was locked, the writer then writes nothing more: the state that
a failed fsync leaves on the disk is unknown, so fsync is not tried again.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import chain, groupby
from pathlib import Path
from typing import TypeVar, cast

from turnkeeper.runtime import InvariantViolation, Ports, TurnkeeperError
from turnkeeper.runtime.lowlevel import Logger

from ...errors import (
    ConversationNotFound,
    CorruptLog,
    EventIdConflict,
    Fenced,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
    OwnedElsewhere,
)
from ...journal import Claim, Listing, Record, Rejection, Snapshot
from ..shared.append_rules import (
    REJECTIONS_DROPPED_MAX,
    Append,
    check_append,
    check_epoch,
    check_ids,
    check_place,
    check_snapshot_epoch,
    telling_seq,
)
from ..shared.job_thread import Job
from ..shared.list_pages import bare_listing, listing_columns
from ..shared.payload_parts import PART_BYTES_MIN, split
from ..shared.record_chain import next_mark, seal
from .erasure import erase_slice, erasures
from .file_guard import CHECK_INTERVAL_S, FileGuard
from .listings import (
    CHANGE_LISTING,
    LISTING_COLUMNS,
    LISTING_WIDTH,
    LISTINGS_FOLDED,
    NO_LISTING,
    RECENT_LISTINGS_MAX,
    WRITE_LISTING,
    fold_listings,
    read_listing,
    recent_listings,
    store_listing,
)
from .log import (
    EPOCH,
    FORKED_AT,
    HEAD,
    PackedTail,
    Tail,
    empty_tail,
    end_seal,
    find_events,
    find_messages,
    find_record,
    find_renamed,
    fork_seal,
    pack_tail,
    prefix_of,
    read_records,
    read_tail,
    unpack_tail,
)
from .misreads import is_corrupt, refuse_unreadable
from .owner_lock import OwnerLock
from .schema import error_code, has_no_file_left, is_damage, log_bytes
from .schema import is_log_stamped as fits_stamp

T = TypeVar("T")

_log = Logger("turnkeeper.actors.journals")

# Until the thread rests, this many times more recent listings are allowed: a fold is a separate
# commit, and took a quarter of the thread's time with a thousand conversations.
_BUSY_FACTOR = 4
_MANY_JOBS = 32
_LOG_PAGES_SHORT = 256
_LOG_PAGES_LONG = 2_000

# Without a job, before listings are folded, deletions are finished and new records are indexed.
# With many conversations the queue is empty for a moment after each group, which is no rest.
_REST_PAUSE_S = 0.25
_INDEX_LAG_S_MAX = 1.0
_RETRY_S = 10.0  # after an error, or beside a reader that is in the way

# Appends go in through a temporary view with a trigger, so that one statement does all of it: the
# last row of an append checks epoch, head and generation and moves the tail, and each row writes an
# event. Outside a transaction the statement is its own transaction, and it releases the interpreter
# lock only once; each further statement would wait for a busy event loop. Groups with listings go
# through a wider view: SQLite copies each column of each row several times.
_INCOMING_COLUMNS = """
    0 AS id, 0 AS previous, 0 AS log, 0 AS seq, 0 AS epoch, 0 AS event_id, 0 AS kind,
    0 AS message_id, 0 AS mark, 0 AS payload, 0 AS parts,
    0 AS conversation, 0 AS head, 0 AS is_unfinished, 0 AS updated_us, 0 AS seal
"""
_WIDTH = 16
_LISTED_WIDTH = _WIDTH + LISTING_WIDTH
_NO_MOVE = (0,) * 5
"""The last columns of a row that does not move its tail."""
_WRITE_INCOMING = """
    CREATE TEMP TRIGGER write_{view} INSTEAD OF INSERT ON {view} WHEN NEW.id > 0
    BEGIN
        UPDATE conversation SET
            head = NEW.seq, last = NEW.id, tip = NEW.mark, is_unfinished = NEW.is_unfinished,
            updated_us = NEW.updated_us, seal = NEW.seal
        WHERE id = NEW.conversation AND log = NEW.log AND epoch = NEW.epoch AND head = NEW.head
            AND (SELECT generation FROM journal) = {generation};
        SELECT RAISE(ABORT, 'its tail is not where it was')
            WHERE changes() = 0 AND NEW.conversation > 0;
        INSERT INTO event VALUES (
            NEW.id, NEW.previous, NEW.log, NEW.seq, NEW.epoch, NEW.event_id, NEW.kind,
            nullif(NEW.message_id, 0), NEW.mark, NEW.payload, nullif(NEW.parts, 0)
        );
        {listing}
    END;
"""
_INCOMING = f"""
    CREATE TEMP VIEW incoming AS SELECT {_INCOMING_COLUMNS};
    {_WRITE_INCOMING.replace("{view}", "incoming").replace("{listing}", "")}
    {CHANGE_LISTING}
    CREATE TEMP VIEW incoming_listed AS SELECT {_INCOMING_COLUMNS}, {LISTING_COLUMNS};
    {_WRITE_INCOMING.replace("{view}", "incoming_listed").replace("{listing}", WRITE_LISTING)}
"""
# Messages are indexed with the owner that the listing had at that time.
_MOVE_OWNER = "INSERT OR IGNORE INTO search_again SELECT ? FROM search"
# Statements exist only for these numbers of rows, so that few of them stay prepared. The triggers
# skip the unused rows, which are few.
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@cache
def _insert(size: int, width: int) -> str:
    # Not numbered, though the time is the same in all rows: Python 3.12.0 to 3.12.3 take `?1` for
    # a name, and warn at each statement.
    view = "incoming" if width == _WIDTH else "incoming_listed"
    rows = ", ".join([f"({', '.join('?' * width)})"] * size)
    return f"INSERT INTO {view} VALUES {rows}"  # noqa: S608 - our own text


class Change(Job[T]):
    """Any other write. It runs in the group's transaction, and again if that is rolled back."""

    __slots__ = ("apply",)

    def __init__(self, apply: Callable[[SQLiteWriter], T], size: int = 0) -> None:
        super().__init__(1, size)
        self.apply = apply


class Upkeep(Job[T]):
    """Work on the connection between transactions; done once for equal jobs of one group."""

    __slots__ = ("apply", "more_s")

    def __init__(self, apply: Callable[[SQLiteWriter], T], *, more_s: float = 0.0) -> None:
        super().__init__()
        self.apply = apply
        self.more_s = more_s


class SQLiteWriter:
    """A `Worker` that runs groups of `Append`, `Change` and `Upkeep` jobs on one connection."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        path: Path,
        lock: OwnerLock,
        ports: Ports,
        failpoint: Callable[[str], None],
        tails_max: int,
        rejection_age_s_max: float,
        is_searching: bool,
        is_log_left: bool,
        is_log_stamped: bool,
        on_closed: Callable[[Exception], None],
        on_log_bytes: Callable[[int], None],
    ) -> None:
        self.connection = connection
        self._execute = connection.execute
        self._path = path
        self._ports = ports
        self._failpoint = failpoint
        self._tails_max = tails_max
        self._rejection_age_s_max = rejection_age_s_max
        self._on_closed = on_closed
        self._on_log_bytes = on_log_bytes
        self._closed_by: Exception | None = None
        # The tails as of the last commit; the least recently used one is dropped first. There is
        # one for each active conversation. They are packed into tuples, because the garbage
        # collector passes over tuples of numbers and texts.
        self._tails: OrderedDict[str, PackedTail] = OrderedDict()
        # The tails that the current group has loaded, and may have changed.
        self._loaded: dict[str, PackedTail] = {}
        # The rows of appends that are decided but not yet passed to SQLite, one after the other.
        # All have the same width: as soon as one of them has a listing, the others have none in it.
        self._values: list[object] = []
        self._width = _WIDTH
        self._parts: list[tuple[int, int, bytes, bytes]] = []
        self._log_pages = 0
        self.is_erasing = is_log_left or bool(erasures(connection))
        """True if deleted records, or words, may be left in the file or in its log."""
        # Deleted logs whose records are not linked to each other; a repair removes them.
        self._damaged: set[int] = set()
        # The conversations with a recent row, and perhaps some without.
        self._recent: set[int] = set()
        self.now_us = 0
        # Before the first temporary view is made. Else SQLite gathers the rows of a large group in
        # a temporary file: users' words, on a disk that may be full or read-only, in a process that
        # may have no file left to open.
        connection.execute("PRAGMA temp_store = MEMORY")
        # No other process adds rows as long as the generation is ours. The newest rows may have
        # been deleted since the index looked at them.
        self._last_id = self._own(lock)
        if lock.taken_from is not None:
            # Until the generation rose, the holder may have emptied the log. Then the next one has
            # begun with random salts.
            is_log_stamped = is_log_stamped and fits_stamp(path)
        self.guard = FileGuard(path, connection, is_log_stamped=is_log_stamped)
        self._checked_at = self._erases_at = ports.monotonic()
        connection.executescript(_INCOMING.replace("{generation}", str(self._generation)))
        self._is_searching = is_searching
        # True at first, too: while a process starts, the index waits.
        self._has_worked = True
        self._behind_since: float | None = None
        if is_searching:
            from .search import start_search  # noqa: PLC0415 - few search, and it takes a while

            start_search(connection)

    def close(self) -> None:
        if self._closed_by is None:
            try:
                self.guard.refuse_if_moved()
            except (JournalRefused, OSError) as error:
                _log.error("journal lost", journal=str(self._path), found=_text(error))
        self.guard.close()

    def rest(self) -> float | None:
        """Fold recent listings, finish deletions, then fill the index of words, a slice at a time.

        The pause between two slices of the index is as long as one slice takes.
        """
        if self._closed_by is not None:
            return None
        are_many_recent = len(self._recent) > RECENT_LISTINGS_MAX
        if not (are_many_recent or self.is_erasing or self._is_searching):
            return None
        has_worked, self._has_worked = self._has_worked, False
        if has_worked and not self._is_index_late():
            return _REST_PAUSE_S
        if are_many_recent and not has_worked:
            self._fold_more()
            return 0.0
        if self.is_erasing and self._ports.monotonic() >= self._erases_at:
            self._finish_erasing()
            return 0.0
        pause_s = self._index_more() if self._is_searching else None
        if pause_s is None and are_many_recent:
            return _REST_PAUSE_S
        return _RETRY_S if pause_s is None and self.is_erasing else pause_s

    def _is_index_late(self) -> bool:
        since = self._behind_since
        return since is not None and self._ports.monotonic() - since >= _INDEX_LAG_S_MAX

    def _index_more(self) -> float | None:
        """Index a slice; return the seconds until the next one, or None if nothing is left."""
        began = self._ports.monotonic()
        job: Job[object] = Change(SQLiteWriter.tend_index)
        self._change_alone(job)
        if job.refusal is not None:
            _log.error(
                "search index not updated",
                journal=str(self._path),
                error=type(job.refusal).__name__,
            )
            return _RETRY_S
        if job.settled:
            return self._ports.monotonic() - began
        self._behind_since = None
        return None

    def _fold_more(self) -> None:
        job: Job[set[int]] = Change(SQLiteWriter.fold_listings)
        self._change_alone(cast("Job[object]", job))
        if job.refusal is not None:
            _log.error(
                "listings not folded", journal=str(self._path), error=type(job.refusal).__name__
            )
        # After an error, it is tried again when as many more have come.
        self._recent = job.settled if job.refusal is None and job.settled is not None else set()

    def work(self, jobs: Sequence[Job[object]]) -> None:
        self._has_worked = True
        if self._is_searching and self._behind_since is None:
            self._behind_since = self._ports.monotonic()
        if self._closed_by is None:
            try:
                self._set_checkpoint(len(jobs))
                is_open = self._check_file()
                if is_open and len(self._recent) > _BUSY_FACTOR * RECENT_LISTINGS_MAX:
                    self._fold_more()  # there is no time to rest
                    is_open = self._closed_by is None
            except Exception as error:  # noqa: BLE001 - of any kind; nothing was written
                self._abandon(jobs, error, is_known=True)
                return
            if is_open and self._in_one_statement(jobs):
                return
        for is_upkeep, some in groupby(jobs, lambda job: isinstance(job, Upkeep)):
            group = list(some)
            if self._closed_by is not None:
                for job in group:
                    job.refuse(self._closed_error())
            elif is_upkeep:
                self._keep_up(cast("list[Upkeep[object]]", group))
            elif not self._transact(group, self._together):
                self._transact(group, self._one_by_one)

    def _set_checkpoint(self, jobs: int) -> None:
        """Set the length at which SQLite copies the write-ahead log into the file and restarts it.

        A commit that extends the log takes 1.5 times as long as one that overwrites it, so with few
        appends at a time a short log is faster. With many, a long log avoids writing the same pages
        to the file again and again.
        """
        pages = _LOG_PAGES_SHORT if jobs < _MANY_JOBS else _LOG_PAGES_LONG
        if pages != self._log_pages:
            self._execute(f"PRAGMA wal_autocheckpoint = {pages}")
            self._log_pages = pages

    def _check_file(self) -> bool:
        """Have the file checked if that was not done for a while; return False if it was lost."""
        now = self._ports.monotonic()
        if now - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = now
            if self._is_ours():  # otherwise another process keeps the stamp
                self.guard.check()
                self._on_log_bytes(log_bytes(self._path))
                self._erase_more()
                if self._is_searching and self._is_index_late():
                    self._index_more()
        return self._closed_by is None

    def _erase_more(self) -> bool:
        """Remove another slice of the records of a deletion that was not completed.

        Return True if there may be more.
        """
        for log in erasures(self.connection):
            if log not in self._damaged:
                job: Job[object] = Change(partial(SQLiteWriter.erase_slice, log=log))
                self._change_alone(job)
                if isinstance(job.refusal, CorruptLog):
                    self._damaged.add(log)
                elif job.refusal is None and job.settled is None:
                    self.guard.erase()
                return job.refusal is None or log in self._damaged
        return False

    def _finish_erasing(self) -> None:
        """Remove another slice of what deletions have left; at the end, empty the log.

        The owner that began a deletion may have been killed between any two of its steps.
        """
        try:
            if not self._is_ours():
                self.is_erasing = False
            elif not self._erase_more():
                job: Job[bool] = Change(SQLiteWriter.merge_slice)
                self._change_alone(cast("Job[object]", job))
                if job.refusal is not None or not job.settled:
                    # A reader may be in the way, another process may hold the lock, or the disk
                    # may be full.
                    self.is_erasing = (
                        isinstance(job.refusal, JournalUnavailable)
                        or not self._damaged.issuperset(erasures(self.connection))
                        or not self.guard.erase()
                    )
                    if self.is_erasing:
                        self._erases_at = self._ports.monotonic() + _RETRY_S
        except Exception as error:  # noqa: BLE001 - of any kind; no caller waits for it
            self._erases_at = self._ports.monotonic() + _RETRY_S
            self._abandon((), error, is_known=True)

    def _change_alone(self, job: Job[object]) -> None:
        if not self._transact([job], self._together):
            self._transact([job], self._one_by_one)

    def _keep_up(self, jobs: Sequence[Upkeep[object]]) -> None:
        done: dict[object, object] = {}
        for at, job in enumerate(jobs):
            try:
                if not self._is_ours():
                    job.refuse(self._lost())
                    continue
                if job.apply not in done:
                    done[job.apply] = job.apply(self)
                job.settle(done[job.apply])
            except TurnkeeperError as error:
                job.refuse(error)  # it concerns this job alone, and has changed nothing
            except Exception as error:  # noqa: BLE001 - of any kind
                self._abandon(jobs[at:], error, is_known=True)
                return

    # --- the transaction --------------------------------------------------------------------------

    def _begin_group(self) -> None:
        self._loaded.clear()
        self._drop_gathered()
        self.now_us = int(self._ports.now() * 1_000_000)

    def _in_one_statement(self, jobs: Sequence[Job[object]]) -> bool:
        """Write a group of appends; return False if it has to be done another way."""
        self._begin_group()
        try:
            for job in jobs:
                if not isinstance(job, Append) or not self._gather(job):
                    return self._forget()
            if self._parts or len(self._values) > _SIZES[-1] * self._width:
                return self._forget()
            self._failpoint("begin")
        except Exception as error:  # noqa: BLE001 - of any kind
            if _is_of_one_job(error):
                return self._forget()  # found again, and answered, one by one
            self._abandon(jobs, error, is_known=True)
            return True
        try:
            self._write()
            self._failpoint("committed")
        except Exception as error:  # noqa: BLE001 - of any kind
            if _is_of_one_job(error):
                return self._forget()
            # The statement is its own commit, so its outcome is unknown.
            self._abandon(jobs, error, is_known=False)
        self._keep_tails()
        return True

    def _transact(
        self, jobs: Sequence[Job[object]], apply: Callable[[Sequence[Job[object]]], bool]
    ) -> bool:
        """Run a group in one transaction; return False if it was rolled back without outcomes."""
        self._begin_group()
        try:
            self._failpoint("begin")
            self._execute("BEGIN IMMEDIATE")
            if not apply(jobs):
                self._roll_back()
                return False
            self._failpoint("written")
        except Exception as error:  # noqa: BLE001 - of any kind
            self._abandon(jobs, error, is_known=True)
            return True
        try:
            self._failpoint("commit")
            self._execute("COMMIT")
            self._failpoint("committed")
        except Exception as error:  # noqa: BLE001 - of any kind
            self._abandon(jobs, error, is_known=False)
        self._keep_tails()
        return True

    def _keep_tails(self) -> None:
        """Keep the tails of a group that was committed. After a rollback, none is loaded."""
        for name, packed in self._loaded.items():
            self._tails[name] = packed
            self._tails.move_to_end(name)
        self._loaded.clear()
        while len(self._tails) > self._tails_max:
            self._tails.popitem(last=False)

    def _forget(self) -> bool:
        """Drop the gathered rows and the tails of their conversations; return False."""
        self._drop_gathered()
        for name in self._loaded:
            self._tails.pop(name, None)
        self._loaded.clear()
        return False

    def _roll_back(self) -> None:
        self._forget()
        if self.connection.in_transaction:
            self._execute("ROLLBACK")

    def _abandon(self, jobs: Sequence[Job[object]], error: Exception, *, is_known: bool) -> None:
        """Refuse all jobs of a group that failed, or whose outcome is unknown."""
        self._tails.clear()
        try:
            self._roll_back()
        except Exception as worse:  # noqa: BLE001 - of any kind
            worse.__context__ = error
            error = worse
            self.connection.close()  # closing rolls back; nothing is written any more
        code = error_code(error)
        is_full = code == sqlite3.SQLITE_FULL
        if is_full or code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            is_known = True  # found before the frame that would have made it a commit
        elif not (is_known and has_no_file_left(error)):
            self._closed_by = error
            self._on_closed(error)
        advice = "make room on the disk" if is_full else "try again"
        for job in jobs:
            outcome: Exception
            if not is_known:
                outcome = JournalOutcomeUnknown(
                    f"commit to {self._path} failed: {_text(error)}; it may have happened; "
                    "send again under the same ids"
                )
            elif self._closed_by is not None:
                outcome = self._closed_error()
            else:
                outcome = JournalUnavailable(
                    f"write to {self._path} failed: {_text(error)}; nothing was written; {advice}"
                )
            outcome.__cause__ = error
            job.refuse(outcome)

    def _closed_error(self) -> JournalUnavailable:
        outcome = JournalUnavailable(
            f"{self._path} is closed for writing in this process after an error: "
            f"{_text(self._closed_by)}; nothing was written; check the disk, its quota and the "
            "memory, then start the process again"
        )
        outcome.__cause__ = self._closed_by
        return outcome

    def _together(self, jobs: Sequence[Job[object]]) -> bool:
        """Run all jobs; return False at the first one that has to run alone."""
        if not self._is_ours():
            return False
        try:
            for job in jobs:
                if isinstance(job, Append):
                    if not self._gather(job):
                        return False
                else:
                    self._write()
                    job.settle(cast("Change[object]", job).apply(self))
            self._write()
        except Exception as error:
            if not _is_of_one_job(error):
                raise
            return False  # found again, and answered, one by one
        return True

    def _one_by_one(self, jobs: Sequence[Job[object]]) -> bool:
        is_ours = self._is_ours()
        if not is_ours:
            self._tails.clear()  # another process has appended since
        for job in jobs:
            self._execute("SAVEPOINT job")
            try:
                if isinstance(job, Append):
                    job.settle(self._append_alone(job, is_ours=is_ours))
                elif is_ours:
                    job.settle(cast("Change[object]", job).apply(self))
                else:
                    job.refuse(self._lost())
            except Exception as error:
                if not _is_of_one_job(error):
                    raise
                job.refuse(self._answer(job, error))
                self._undo()
            self._execute("RELEASE job")
        return True

    def _answer(self, job: Job[object], error: Exception) -> Exception:
        """Return the outcome of a job that failed alone."""
        if is_corrupt(error):
            refuse_unreadable(self._path, error)  # which fails the whole group
        if isinstance(error, TurnkeeperError):
            return error
        outcome: Exception
        if isinstance(error, sqlite3.Error) and is_damage(error):
            name = job.conversation_id if isinstance(job, Append) else str(self._path)
            outcome = CorruptLog(name, 0, str(error))
        else:
            outcome = InvariantViolation(f"the journal cannot write this: {error!r}")
        outcome.__cause__ = error
        return outcome

    def _undo(self) -> None:
        """Roll back to the savepoint; tails that earlier jobs changed are read again."""
        self._forget()
        self._execute("ROLLBACK TO job")

    def _drop_gathered(self) -> None:
        self._values.clear()
        self._width = _WIDTH
        self._parts.clear()

    # --- appends ----------------------------------------------------------------------------------

    def _gather(self, job: Append) -> bool:
        """Decide one append of many; return False if it has to run alone."""
        tail = self._find(job.conversation_id)
        if tail is None or job.epoch != tail[EPOCH] or job.expected_seq != tail[HEAD] + 1:
            return False
        if tail[FORKED_AT] and any(self._known(unpack_tail(tail), job.records)):
            return False  # the unique indexes do not cover the prefix
        job.settle(self._add(tail, job))
        return True

    def _append_alone(self, job: Append, *, is_ours: bool) -> Sequence[int]:
        """Run one append; raise the exact reason if it is refused."""
        tail = self.load(job.conversation_id)
        events, messages = self._known(tail, job.records) if tail else ({}, {})
        if tail and all(self._has(tail, record, events) for record in job.records):
            return [events[record.event_id] for record in job.records]
        if not is_ours:
            raise self._lost()
        check_append(
            job.conversation_id,
            job.records,
            epoch=job.epoch,
            expected_seq=job.expected_seq,
            found_epoch=tail.epoch if tail else 0,
            head=tail.head if tail else 0,
            known_events=events,
            known_messages=messages,
        )
        assert tail is not None, "an epoch that was never claimed was not fenced"
        return self._add_alone(tail, job)

    def begin_fork(self, tail: Tail, own: Append) -> None:
        """Write the first records of a fork that was just stored."""
        events, messages = self._known(tail, own.records)
        if events:
            raise EventIdConflict(tail.name, events)
        check_ids(tail.name, own.records, tail.head + 1, messages)
        self._add_alone(tail, own)

    def _add_alone(self, tail: Tail, job: Append) -> Sequence[int]:
        seqs = self._add(pack_tail(tail), job)
        try:
            self._write()
        except sqlite3.IntegrityError as error:
            raise CorruptLog(tail.name, seqs[0], f"an index is damaged ({error})") from error
        return seqs

    def _has(self, tail: Tail, record: Record, events: Mapping[str, int]) -> bool:
        """Return True if the log has this record; False for another one under its event id."""
        seq = events.get(record.event_id)
        if seq is None:
            return False
        (found,) = read_records(self.connection, tail, seq - 1, seq)
        return found[2:] == record

    def _known(
        self, tail: Tail, records: Sequence[Record]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return the event ids and the message ids of these records that the log has."""
        events = [record.event_id for record in records]
        messages = [record.message_id for record in records if record.message_id is not None]
        return (
            find_events(self.connection, tail, events),
            find_messages(self.connection, tail, messages),
        )

    def _add(self, tail: PackedTail, job: Append) -> Sequence[int]:
        """Decide one append: gather its rows and advance its tail."""
        records, is_unfinished, listing = job.records, job.is_unfinished, job.listing
        number, name, _, log, epoch, before, last, mark, forked_at, _, at_us, prefix, begun = tail
        if listing is None and before == forked_at:
            listing = bare_listing(self.now_us)
        if listing is not None and self._width == _WIDTH:
            self._widen()
        no_listing = NO_LISTING[: self._width - _WIDTH]
        seq = before
        upto = before + len(records)
        values = self._values
        for event_id, kind, payload, message_id in records:
            seq += 1
            mark = next_mark(mark, seq, epoch, event_id, kind, message_id, payload)
            kept: bytes = payload
            places: str | int = 0
            if len(payload) > PART_BYTES_MIN:
                kept, places, parts = split(payload)
                self._parts += ((log, seq, digest, part) for digest, part in parts)
            previous = last
            self._last_id = last = self._last_id + 1
            message = 0 if message_id is None else message_id
            # Python's sqlite3 looks for an adapter of bytes, but not of a bytearray.
            blob = bytearray(kept)
            values += (last, previous, log, seq, epoch, event_id, kind, message, mark, blob, places)
            if seq != upto:
                values += _NO_MOVE
                values += no_listing
        unfinished = int(is_unfinished)
        # Lower than before if the clock was set back.
        if at_us < self.now_us:  # noqa: PLR1730 - `max` takes three times as long
            at_us = self.now_us
        found = end_seal(begun, seq, last, mark, forked_at, unfinished, at_us)
        values += (number, before, unfinished, at_us, found)
        # What follows `epoch` in a packed tail.
        end = (seq, last, mark, forked_at, is_unfinished, at_us, prefix, begun)
        self._loaded[name] = tail[:HEAD] + end
        if listing is None:
            values += no_listing
        else:
            self._recent.add(number)
            values += listing_columns(name, listing)
        return range(before + 1, upto + 1)

    def _widen(self) -> None:
        """Give the gathered rows the columns of a listing."""
        rows = zip(*[iter(self._values)] * _WIDTH, strict=True)
        self._values = list(chain.from_iterable((*row, *NO_LISTING) for row in rows))
        self._width = _LISTED_WIDTH

    def _write(self) -> None:
        """Pass the gathered rows to SQLite."""
        width = self._width
        for at in range(0, len(self._values), _SIZES[-1] * width):
            values = self._values[at : at + _SIZES[-1] * width]
            size = _SIZES[bisect_left(_SIZES, len(values) // width)]
            values += [0] * (size * width - len(values))
            self._execute(_insert(size, width), values)
        for log, seq, digest, part in self._parts:
            self._execute("INSERT OR IGNORE INTO part VALUES (?, ?)", (digest, part))
            self._execute("INSERT OR IGNORE INTO part_use VALUES (?, ?, ?)", (log, seq, digest))
        self._drop_gathered()

    # --- for changes ------------------------------------------------------------------------------

    def load(self, name: str) -> Tail | None:
        """Return a conversation's tail; None if there is none. A change of it has to be stored.

        A tail that is not in memory is read from the file and checked.
        """
        packed = self._find(name)
        return None if packed is None else unpack_tail(packed)

    def _find(self, name: str) -> PackedTail | None:
        packed = self._loaded.get(name)
        if packed is not None:
            return packed
        # A commit makes it the newest in the table, and a rollback drops it from there.
        packed = self._tails.get(name)
        if packed is None:
            tail = read_tail(self.connection, name)
            if tail is None:
                return None
            prefix_of(self.connection, tail)  # checked before anything is appended to its log
            packed = pack_tail(tail)
        self._loaded[name] = packed
        return packed

    def store(self, tail: Tail) -> None:
        """Write a conversation's row; appends write theirs by the trigger instead."""
        if tail.number:
            self._execute(
                "UPDATE conversation SET incarnation = ?, log = ?, epoch = ?, head = ?, last = ?, "
                "tip = ?, forked_at = ?, is_unfinished = ?, updated_us = ?, seal = ? WHERE id = ?",
                (*tail.columns()[1:], tail.number),  # its name stays
            )
        else:
            (tail.number,) = self._execute(
                "INSERT INTO conversation VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                "RETURNING id",
                tail.columns(),
            ).fetchone()
        self._loaded[tail.name] = pack_tail(tail)

    def claim(self, name: str) -> Claim:
        """Take the next epoch of a conversation, creating it if it does not exist."""
        tail = self.load(name) or self._go_on(name) or empty_tail(name, 0, 0, self.now_us)
        tail.epoch += 1
        self.store(tail)
        return Claim(tail.epoch, tail.head)

    def _go_on(self, name: str) -> Tail | None:
        """Store the tail of a conversation whose log a repair has renamed; None if none has."""
        tail = find_renamed(self.connection, name, self.now_us)
        if tail is not None and tail.prefix:
            self.store(tail)
            store_listing(self.connection, tail.number, name, bare_listing(self.now_us))
            log, seq = tail.prefix[0]
            facts = (tail.log, log, seq, fork_seal(tail.log, log, seq))
            self._execute("INSERT INTO fork VALUES (?, ?, ?, ?)", facts)
        return tail

    def reject(self, name: str, rejections: Sequence[Rejection], epoch: int) -> None:
        tail = self.load(name)
        if tail is None:
            raise Fenced(name, epoch=epoch, expected_seq=1, found_epoch=0, head=0)
        check_epoch(name, epoch=epoch, found_epoch=tail.epoch, head=tail.head)
        oldest = self.now_us / 1_000_000 - self._rejection_age_s_max
        self._execute(
            "DELETE FROM rejection WHERE id IN "
            "(SELECT id FROM rejection WHERE at < ? ORDER BY at LIMIT ?)",
            (oldest, REJECTIONS_DROPPED_MAX + len(rejections)),
        )
        for rejection in rejections:
            facts = (tail.log, rejection.at, rejection.violation, rejection.reason)
            self._execute(
                "INSERT INTO rejection (log, at, violation, reason, payload, seal) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (*facts, rejection.payload, seal(*facts, content=rejection.payload)),
            )

    def write_snapshot(self, name: str, snapshot: Snapshot, epoch: int) -> None:
        """Store a snapshot with the mark of the record at its seq, so that it fits no other log."""
        tail = self.load(name)
        if tail is None or not tail.head:
            raise ConversationNotFound(name)
        check_place(
            "snapshot", name, snapshot.seq, epoch=epoch, found_epoch=tail.epoch, head=tail.head
        )
        record = find_record(self.connection, tail, snapshot.seq)
        if record is None:
            raise CorruptLog(name, snapshot.seq, "the record is missing")
        self._check_log(tail, snapshot.seq, epoch)
        facts = (tail.log, snapshot.seq, snapshot.version, record[1])
        self._execute(
            "INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, ?, ?, ?)",
            (*facts, snapshot.payload, seal(*facts, content=snapshot.payload)),
        )

    def fold_listings(self) -> set[int]:
        """Fold some recent listings, if they are many; return the conversations that have one."""
        recent = recent_listings(self.connection)
        if len(recent) <= RECENT_LISTINGS_MAX:
            return recent
        fold_listings(self.connection, LISTINGS_FOLDED)
        return recent_listings(self.connection)

    def erase_slice(self, log: int) -> int | None:
        """Remove some records of a deleted log; see `erasure`."""
        return erase_slice(self.connection, log)

    def erase_slice_of(self, logs: Sequence[int]) -> bool:
        """Remove some records of the first of these logs that has any to remove.

        Return False if none has: the writer may have removed some of them by itself.
        """
        listed = set(erasures(self.connection))
        log = next((one for one in logs if one in listed), None)
        if log is not None:
            erase_slice(self.connection, log)
        return log is not None

    def index_slice(self) -> bool:
        """Index some new records, or remove some deleted words; return True if there is more."""
        from .search import index_slice, merge_slice  # noqa: PLC0415 - as above

        return index_slice(self.connection, self.now_us) or merge_slice(self.connection)

    def tend_index(self) -> bool:
        """Do the same as `index_slice`; also make searches faster while there is time for it."""
        from .search import join_slice  # noqa: PLC0415 - as above

        return self.index_slice() or join_slice(self.connection)

    def merge_slice(self, *, is_forced: bool = False) -> bool:
        """Clear some words of deleted messages out of the index; return True if there are more."""
        from .search import merge_slice  # noqa: PLC0415 - as above

        return merge_slice(self.connection, is_forced=is_forced)

    def write_listing(self, name: str, listing: Listing, epoch: int) -> None:
        """Write a listing, unless the one in the file is newer."""
        tail = self.load(name)
        if tail is None or not tail.head:
            raise ConversationNotFound(name)
        check_place(
            "listing", name, listing.seq, epoch=epoch, found_epoch=tail.epoch, head=tail.head
        )
        self._check_log(tail, listing.seq, epoch)
        found = read_listing(self.connection, tail.number)
        if found is None or found[0].seq <= listing.seq:
            store_listing(self.connection, tail.number, name, listing)
            self._execute(_MOVE_OWNER, (tail.log,))

    def _check_log(self, tail: Tail, seq: int, epoch: int) -> None:
        """Raise `Fenced` if what was folded up to `seq` was folded from an earlier log."""
        place = telling_seq(seq, forked_at=tail.forked_at, head=tail.head)
        record = find_record(self.connection, tail, place)
        if record is None:
            raise CorruptLog(tail.name, place, "the record is missing")
        (found_epoch,) = self._execute(
            "SELECT epoch FROM event WHERE id = ?", (record[0],)
        ).fetchone()
        check_snapshot_epoch(tail.name, seq, epoch=epoch, found_epoch=found_epoch, head=tail.head)

    # --- the file's generation --------------------------------------------------------------------

    def _own(self, lock: OwnerLock) -> int:
        """Shut out every process that opened the file earlier; return the id of the last event.

        If anything up to the commit fails, a process that is alive keeps its file.
        """
        lock.draft()
        self._execute("BEGIN IMMEDIATE")
        try:
            if not lock.is_prepared:
                # Another process may have taken over since, and the one with the lock goes on.
                lock.check()
            (generation,) = self._execute(
                "UPDATE journal SET generation = generation + 1, owner = ? RETURNING generation",
                (lock.owner,),
            ).fetchone()
            (last_id,) = self._execute(
                "SELECT ifnull(max(id), 0) FROM "
                "(SELECT max(id) AS id FROM event UNION ALL SELECT cursor FROM search)"
            ).fetchone()
            self._recent = recent_listings(self.connection)
            self._execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self._execute("ROLLBACK")
            raise
        self._generation = int(generation)
        lock.note_shut_out()
        if lock.is_prepared:
            # Of two processes that take over at once, the one with the generation gets the lock.
            self._execute("BEGIN IMMEDIATE")
            try:
                if not self._is_ours():
                    raise self._elsewhere()
                lock.take_over()
            finally:
                self._execute("ROLLBACK")
        return int(last_id)

    def _is_ours(self) -> bool:
        (generation,) = self._execute("SELECT generation FROM journal").fetchone()
        return bool(generation == self._generation)

    def _lost(self) -> OwnedElsewhere:
        outcome = self._elsewhere()
        self._on_closed(outcome)
        return outcome

    def _elsewhere(self) -> OwnedElsewhere:
        (owner,) = self._execute("SELECT owner FROM journal").fetchone()
        return OwnedElsewhere(f"journal {self._path}", owner, is_file=True)


# Values that SQLite cannot store, ids that an index already has, and refusals: all concern one
# job's data. Python raises UnicodeError and OverflowError when it passes a value to SQLite.
_OF_ONE_JOB = (
    TurnkeeperError,
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    OverflowError,
)


def _is_of_one_job(error: Exception) -> bool:
    """Return True if an error is known to concern only one job, not the file, disk or memory."""
    return isinstance(error, _OF_ONE_JOB) or is_damage(error)


def _text(error: Exception | None) -> str:
    """Return the text of an error, or its type if it has none, as a MemoryError."""
    return str(error) or type(error).__name__
