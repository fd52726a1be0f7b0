"""One commit for everything that all conversations have waiting.

Owns the writing connection; runs in one thread. There are three ways to do a group of jobs, and
each is left for the next when anything is not as it should be:

1. *In one statement*, which is its own commit: appends alone, the way of nearly all groups.
2. *Together*, in one transaction: where there is more than appends, in the order of the jobs.
3. *One by one*, each under a savepoint of one transaction, so that a bad one is refused alone and
   with the exact reason.

Invariants. Epoch and head of a conversation, and the file's generation, are checked in the
statement that moves them, so no other process can have come between. The tails kept in memory are
what the file says as of the last commit, or are dropped. A job has an outcome only once its
transaction has: nothing is settled for good before the commit has returned.

After an I/O error, or any error in COMMIT, nothing is written any more: what a failed fsync has
left on the disk cannot be known, so it is not tried again.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import TypeVar, cast

from turnkeeper.runtime import InvariantViolation, Ports, TurnkeeperError

from ._append_rules import Append, check_append, check_ids, check_snapshot_epoch
from ._job_thread import Job
from ._payload_parts import PART_BYTES_MIN, split
from ._record_chain import log_number, next_mark, seal
from ._sqlite_log import Tail, empty_tail, find_events, find_messages, find_record, read_tail
from ._sqlite_schema import error_code, is_damage
from .errors import (
    CorruptLog,
    EventIdConflict,
    JournalOutcomeUnknown,
    JournalUnavailable,
    OwnedElsewhere,
)
from .journal import Claim, Record, Rejection, Snapshot

T = TypeVar("T")

_MANY_JOBS = 32
_LOG_PAGES_SHORT = 256
_LOG_PAGES_LONG = 2_000

# Rows of appends go in by a view with a trigger of this connection's own, so that one statement
# does it all: it moves each tail on from where it was, checks epoch, head and generation as it
# does, and writes the event. Outside a transaction that statement is one, and the interpreter
# lock is let go of once for all of it; each statement more would wait for a busy event loop.
_WIDTH = 12
_INCOMING = """
    CREATE TEMP VIEW incoming AS SELECT
        0 AS id, 0 AS seq, 0 AS epoch, 0 AS event_id, 0 AS kind, 0 AS message_id, 0 AS mark,
        0 AS payload, 0 AS parts, 0 AS conversation, 0 AS is_unfinished, 0 AS seal,
        0 AS updated_us;
    CREATE TEMP TRIGGER write_incoming INSTEAD OF INSERT ON incoming WHEN NEW.id IS NOT NULL
    BEGIN
        INSERT INTO event
            SELECT NEW.id, c.last, c.log, NEW.seq, NEW.epoch, NEW.event_id, NEW.kind,
                NEW.message_id, NEW.mark, NEW.payload, NEW.parts
            FROM conversation c
            WHERE c.id = NEW.conversation AND c.epoch = NEW.epoch AND c.head = NEW.seq - 1
                AND (SELECT generation FROM journal) = {generation};
        SELECT RAISE(ABORT, 'its tail is not where it was') WHERE changes() = 0;
        UPDATE conversation SET
            head = NEW.seq, last = NEW.id, tip = NEW.mark, is_unfinished = NEW.is_unfinished,
            updated_us = NEW.updated_us, seal = NEW.seal
        WHERE id = NEW.conversation;
    END;
"""
# A statement's rows; those that are left over are empty, and passed over. So few texts stay
# prepared, and few rows are empty.
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@cache
def _insert(size: int) -> str:
    # Parameter 1 is the time, which all rows share; the others follow in their order.
    row = f"({'?, ' * _WIDTH}?1)"
    rows = ", ".join([row] * size).replace("?", "?2", 1)
    return f"INSERT INTO incoming VALUES {rows}"  # noqa: S608 - our own text


class Change(Job[T]):
    """Anything else that is written: done in the transaction, and again if that is rolled back."""

    __slots__ = ("apply",)

    def __init__(self, apply: Callable[[SQLiteWriter], T], size: int = 0) -> None:
        super().__init__(1, size)
        self.apply = apply


class Upkeep(Job[T]):
    """Done between transactions, alone."""

    __slots__ = ("apply",)

    def __init__(self, apply: Callable[[sqlite3.Connection], T]) -> None:
        super().__init__()
        self.apply = apply


class SQLiteWriter:
    """A `Worker`: does groups of `Append`, `Change` and `Upkeep` jobs on one connection."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        path: str,
        owner: str,
        ports: Ports,
        failpoint: Callable[[str], None],
        tails_max: int,
        rejection_age_s_max: float,
        on_closed: Callable[[Exception], None],
    ) -> None:
        self.connection = connection
        self._execute = connection.execute
        self._path = path
        self._ports = ports
        self._failpoint = failpoint
        self._tails_max = tails_max
        self._rejection_age_s_max = rejection_age_s_max
        self._on_closed = on_closed
        self._closed_by: Exception | None = None
        # The least recently loaded goes first. `_touched` are those that the transaction changed.
        self._tails: OrderedDict[str, Tail] = OrderedDict()
        self._touched: set[str] = set()
        # Rows of appends that are decided and not yet given to SQLite.
        self._rows: list[object] = []
        self._parts: list[tuple[int, int, bytes, bytes]] = []
        self._log_pages = 0
        self.now_us = 0
        self._generation = self._take_generation(owner)
        connection.executescript(_INCOMING.format(generation=self._generation))
        # No other process adds rows as long as the generation is ours.
        (self._last_id,) = self._execute("SELECT ifnull(max(id), 0) FROM event").fetchone()

    def close(self) -> None:
        self.connection.close()

    def work(self, jobs: Sequence[Job[object]]) -> None:
        if self._closed_by is None:
            self._set_checkpoint(len(jobs))
            if self._in_one_statement(jobs):
                return
        for is_upkeep, some in groupby(jobs, lambda job: isinstance(job, Upkeep)):
            group = list(some)
            if self._closed_by is not None:
                for job in group:
                    job.refuse(self._closed_error())
            elif is_upkeep:
                for job in group:
                    self._keep_up(cast("Upkeep[object]", job))
            elif not self._transact(group, self._together):
                self._transact(group, self._one_by_one)

    def _set_checkpoint(self, jobs: int) -> None:
        """How long the write-ahead log gets before it is folded into the file and begun anew.

        A commit that makes its file longer takes half as long again as one that writes over what
        is there, so that for few appends at a time a short log is faster; for many, a long one
        saves writing the same pages to the file again and again.
        """
        pages = _LOG_PAGES_SHORT if jobs < _MANY_JOBS else _LOG_PAGES_LONG
        if pages != self._log_pages:
            self._execute(f"PRAGMA wal_autocheckpoint = {pages}")
            self._log_pages = pages

    def _keep_up(self, job: Upkeep[object]) -> None:
        try:
            if not self._is_ours():
                job.refuse(self._lost())
            else:
                job.settle(job.apply(self.connection))
        except (sqlite3.Error, OSError) as error:
            self._abandon([job], error, is_known=True)

    # --- the transaction --------------------------------------------------------------------------

    def _begin_group(self) -> None:
        self._touched.clear()
        self._drop_gathered()
        self.now_us = int(self._ports.now() * 1_000_000)

    def _in_one_statement(self, jobs: Sequence[Job[object]]) -> bool:
        """Whether the group has its outcomes; the way of most groups, being appends alone."""
        self._begin_group()
        try:
            for job in jobs:
                if not isinstance(job, Append) or not self._gather(job):
                    return self._forget()
            if self._parts or len(self._rows) > _WIDTH * _SIZES[-1]:
                return self._forget()
            self._failpoint("begin")
        except Exception as error:  # noqa: BLE001 - of any kind; looked at again one by one
            if not _is_about_all(error):
                return self._forget()  # found again, and answered, one by one
            self._abandon(jobs, error, is_known=True)
            return True
        try:
            self._write()
            self._failpoint("committed")
        except sqlite3.IntegrityError:
            return self._forget()
        except (sqlite3.Error, OSError) as error:
            if not _is_about_all(error):
                return self._forget()
            # The statement is its own commit, so how far it came cannot be told.
            self._abandon(jobs, error, is_known=False)
        self._trim_tails()
        return True

    def _transact(
        self, jobs: Sequence[Job[object]], apply: Callable[[Sequence[Job[object]]], bool]
    ) -> bool:
        """Whether the group has its outcomes; if not, it was rolled back, to be done one by one."""
        self._begin_group()
        try:
            self._failpoint("begin")
            self._execute("BEGIN IMMEDIATE")
            if not apply(jobs):
                self._roll_back()
                return False
            self._failpoint("written")
        except (sqlite3.Error, OSError) as error:
            self._abandon(jobs, error, is_known=True)
            return True
        try:
            self._failpoint("commit")
            self._execute("COMMIT")
            self._failpoint("committed")
        except (sqlite3.Error, OSError) as error:
            self._abandon(jobs, error, is_known=False)
        self._trim_tails()
        return True

    def _trim_tails(self) -> None:
        while len(self._tails) > self._tails_max:
            self._tails.popitem(last=False)

    def _forget(self) -> bool:
        """What was gathered and not written; always False."""
        self._drop_gathered()
        for name in self._touched:
            self._tails.pop(name, None)
        return False

    def _roll_back(self) -> None:
        self._forget()
        if self.connection.in_transaction:
            self._execute("ROLLBACK")

    def _abandon(self, jobs: Sequence[Job[object]], error: Exception, *, is_known: bool) -> None:
        """No job of this group went through, or nobody knows whether it did."""
        try:
            self._roll_back()
        except sqlite3.Error as worse:
            worse.__context__ = error
            error = worse
        code = error_code(error)
        is_full = code == sqlite3.SQLITE_FULL
        if is_full or code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            is_known = True  # found before the frame that would have made it a commit
        else:
            self._closed_by = error
            self._on_closed(error)
        advice = "make room on the disk" if is_full else "try again"
        for job in jobs:
            outcome: Exception
            if not is_known:
                outcome = JournalOutcomeUnknown(
                    f"commit to {self._path} failed: {error}; it may have happened; "
                    "send again under the same ids"
                )
            elif self._closed_by is not None:
                outcome = self._closed_error()
            else:
                outcome = JournalUnavailable(
                    f"write to {self._path} failed: {error}; nothing was written; {advice}"
                )
            outcome.__cause__ = error
            job.refuse(outcome)

    def _closed_error(self) -> JournalUnavailable:
        outcome = JournalUnavailable(
            f"{self._path} is closed for writing in this process after an error: "
            f"{self._closed_by}; nothing was written; see to the disk, then start again"
        )
        outcome.__cause__ = self._closed_by
        return outcome

    def _together(self, jobs: Sequence[Job[object]]) -> bool:
        """Do all jobs; False as soon as anything is not as it would be on a good day."""
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
            if _is_about_all(error):
                raise
            return False  # found again, and answered, one by one
        return True

    def _one_by_one(self, jobs: Sequence[Job[object]]) -> bool:
        is_ours = self._is_ours()
        if not is_ours:
            self._tails.clear()  # another process has gone on from them
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
                if _is_about_all(error):
                    raise
                self._undo()
                job.refuse(self._answer(job, error))
            self._execute("RELEASE job")
        return True

    def _answer(self, job: Job[object], error: Exception) -> Exception:
        """What a job is told that failed alone."""
        if isinstance(error, TurnkeeperError):
            return error
        outcome: Exception
        if isinstance(error, sqlite3.Error) and is_damage(error):
            name = job.conversation_id if isinstance(job, Append) else self._path
            outcome = CorruptLog(name, 0, str(error))
        else:
            outcome = InvariantViolation(f"the journal was given what it cannot write: {error!r}")
        outcome.__cause__ = error
        return outcome

    def _undo(self) -> None:
        """Back to the savepoint. What earlier jobs changed is read again, from their own rows."""
        self._forget()
        self._execute("ROLLBACK TO job")

    def _drop_gathered(self) -> None:
        self._rows.clear()
        self._parts.clear()

    # --- appends ----------------------------------------------------------------------------------

    def _gather(self, job: Append) -> bool:
        """Decide one append of many; False where anything is not as it is on a good day."""
        tail = self.load(job.conversation_id)
        if tail is None or job.epoch != tail.epoch or job.expected_seq != tail.head + 1:
            return False
        if tail.prefix and any(self._known(tail, job.records)):
            return False  # the file's own indexes do not reach into the prefix
        job.settle(self._add(tail, job.records, is_unfinished=job.is_unfinished))
        return True

    def _append_alone(self, job: Append, *, is_ours: bool) -> Sequence[int]:
        """One append, with the exact reason where it is refused."""
        tail = self.load(job.conversation_id)
        events, messages = self._known(tail, job.records) if tail else ({}, {})
        if all(record.event_id in events for record in job.records):
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
        assert tail is not None, "an epoch that nobody has claimed was not fenced"
        return self._add_alone(tail, job.records, is_unfinished=job.is_unfinished)

    def begin_fork(self, tail: Tail, records: Sequence[Record], *, is_unfinished: bool) -> None:
        """Write the first records of a fork that was just stored."""
        events, messages = self._known(tail, records)
        if events:
            raise EventIdConflict(tail.name, events)
        check_ids(tail.name, records, tail.head + 1, messages)
        self._add_alone(tail, records, is_unfinished=is_unfinished)

    def _add_alone(
        self, tail: Tail, records: Sequence[Record], *, is_unfinished: bool
    ) -> Sequence[int]:
        seqs = self._add(tail, records, is_unfinished=is_unfinished)
        try:
            self._write()
        except sqlite3.IntegrityError as error:
            raise CorruptLog(tail.name, seqs[0], f"an index is damaged ({error})") from error
        return seqs

    def _known(
        self, tail: Tail, records: Sequence[Record]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """The event ids and the message ids of these records that the log has."""
        events = [record.event_id for record in records]
        messages = [record.message_id for record in records if record.message_id is not None]
        return (
            find_events(self.connection, tail, events),
            find_messages(self.connection, tail, messages),
        )

    def _add(self, tail: Tail, records: Sequence[Record], *, is_unfinished: bool) -> Sequence[int]:
        """Decide one append: its rows are gathered, its tail moved on."""
        self._touched.add(tail.name)
        first = seq = tail.head + 1
        number, epoch, mark = tail.number, tail.epoch, tail.tip
        tail.is_unfinished = is_unfinished
        tail.updated_us = self.now_us
        for seq, record in enumerate(records, first):
            event_id, kind, message_id = record.event_id, record.kind, record.message_id
            payload = record.payload
            mark = next_mark(mark, seq, epoch, event_id, kind, message_id, payload)
            places = None
            if len(payload) > PART_BYTES_MIN:
                payload, places, parts = split(payload)
                self._parts += ((tail.log, seq, digest, part) for digest, part in parts)
            self._last_id = tail.last = last = self._last_id + 1
            tail.head, tail.tip = seq, mark
            self._rows += (
                last,
                seq,
                epoch,
                event_id,
                kind,
                message_id,
                mark,
                payload,
                places,
                number,
                is_unfinished,
                tail.seal(),
            )
        return range(first, seq + 1)

    def _write(self) -> None:
        """Give SQLite what was gathered."""
        rows = self._rows
        step = _WIDTH * _SIZES[-1]
        for at in range(0, len(rows), step):
            some = rows[at : at + step]
            size = _SIZES[bisect_left(_SIZES, len(some) // _WIDTH)]
            empty = [None] * (size * _WIDTH - len(some))
            self._execute(_insert(size), (self.now_us, *some, *empty))
        for log, seq, digest, part in self._parts:
            self._execute("INSERT OR IGNORE INTO part VALUES (?, ?)", (digest, part))
            self._execute("INSERT OR IGNORE INTO part_use VALUES (?, ?, ?)", (log, seq, digest))
        self._drop_gathered()

    # --- what changes use -------------------------------------------------------------------------

    def load(self, name: str) -> Tail | None:
        """The tail of a conversation, checked when it is read; None if it is not there."""
        tail = self._tails.get(name)
        if tail is None:
            tail = read_tail(self.connection, name)
            if tail is not None:
                self._tails[name] = tail
        return tail

    def store(self, tail: Tail) -> None:
        """Write a conversation's row as it is here; for everything but appends."""
        self._touched.add(tail.name)
        facts = (
            tail.incarnation,
            tail.log,
            tail.epoch,
            tail.head,
            tail.last,
            tail.tip,
            tail.forked_at,
            tail.is_unfinished,
            tail.updated_us,
            tail.seal(),
        )
        if tail.number:
            self._execute(
                "UPDATE conversation SET incarnation = ?, log = ?, epoch = ?, head = ?, last = ?, "
                "tip = ?, forked_at = ?, is_unfinished = ?, updated_us = ?, seal = ? WHERE id = ?",
                (*facts, tail.number),
            )
        else:
            (tail.number,) = self._execute(
                "INSERT INTO conversation VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                "RETURNING id",
                (tail.name, *facts),
            ).fetchone()
        self._tails[tail.name] = tail

    def claim(self, name: str) -> Claim:
        """The next epoch of a conversation, which is made if it is not there."""
        tail = self.load(name) or empty_tail(name, 0, 0, self.now_us)
        tail.epoch += 1
        self.store(tail)
        return Claim(tail.epoch, tail.head)

    def reject(self, name: str, rejections: Sequence[Rejection]) -> None:
        oldest = self.now_us / 1_000_000 - self._rejection_age_s_max
        self._execute("DELETE FROM rejection WHERE at < ?", (oldest,))
        tail = self.load(name)
        log = tail.log if tail else log_number(name, 0)
        for rejection in rejections:
            facts = (log, rejection.at, rejection.violation, rejection.reason)
            self._execute(
                "INSERT INTO rejection (log, at, violation, reason, payload, seal) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (*facts, rejection.payload, seal(*facts, content=rejection.payload)),
            )

    def write_snapshot(self, name: str, snapshot: Snapshot, epoch: int) -> None:
        """Kept with the mark of the record at its seq, so that it fits this log and no other."""
        tail = self.load(name)
        record = tail and find_record(self.connection, tail, snapshot.seq)
        if not tail or not record:
            raise InvariantViolation(
                f"snapshot of conversation {name} at seq {snapshot.seq}, where it has no record"
            )
        number, mark = record
        (found_epoch,) = self._execute("SELECT epoch FROM event WHERE id = ?", (number,)).fetchone()
        check_snapshot_epoch(
            name, snapshot.seq, epoch=epoch, found_epoch=found_epoch, head=tail.head
        )
        facts = (tail.log, snapshot.seq, snapshot.version, mark)
        self._execute(
            "INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, ?, ?, ?)",
            (*facts, snapshot.payload, seal(*facts, content=snapshot.payload)),
        )

    # --- the file's generation --------------------------------------------------------------------

    def _take_generation(self, owner: str) -> int:
        """From here on, no process that opened the file before can commit to it."""
        (generation,) = self._execute(
            "UPDATE journal SET generation = generation + 1, owner = ? RETURNING generation",
            (owner,),
        ).fetchone()
        return int(generation)

    def _is_ours(self) -> bool:
        (generation,) = self._execute("SELECT generation FROM journal").fetchone()
        return bool(generation == self._generation)

    def _lost(self) -> OwnedElsewhere:
        (owner,) = self._execute("SELECT owner FROM journal").fetchone()
        outcome = OwnedElsewhere(f"journal {self._path}", owner)
        self._on_closed(outcome)
        return outcome


def _is_about_all(error: Exception) -> bool:
    """Whether an error is about the file and the disk, and not about one job alone."""
    of_all = (sqlite3.OperationalError, sqlite3.InternalError, OSError)
    return isinstance(error, of_all) and not is_damage(error)
