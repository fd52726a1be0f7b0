"""Checks the whole file: pages and indexes, seals, chains, and orphaned rows.

A read detects damage in the rows that it returns. A verification finds the rest: rows that a
damaged index hides, rows that no read has reached yet, and rows that belong to no conversation. It
reads in one transaction, beside a writer, and changes nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from ...errors import CorruptLog, JournalRefused
from ...journal import Listing, Snapshot, StoredRecord
from ..shared.record_chain import seal
from .erasure import erasures, is_whole
from .file_work import ANSWER_WAIT_S, FileWork
from .listings import has_moved, read_listing
from .log import Tail, fork_seal, log_of, logs_without_conversation, read_tail, records_of
from .misreads import refuse_unreadable
from .reader import SQLiteReader, reading
from .schema import real_path, refuse_replaced
from .search import FileWords


@dataclass(frozen=True, slots=True)
class Problem:
    """A place in the file that is damaged."""

    conversation_id: str | None
    """None if it is unknown, or the problem concerns the file as a whole."""
    seq: int
    found: str


@dataclass(frozen=True, slots=True)
class Verification:
    """The extent of a verification, and the problems it found."""

    conversations: int
    records: int
    problems: tuple[Problem, ...]
    stale: tuple[str, ...] = ()
    """The conversations whose rows in lists are stale, which does not count as damage."""


class LogCheck(Protocol):
    """Compares a snapshot or a listing with the records up to it, which it is given one by one."""

    def add(self, record: StoredRecord) -> None:
        """Take the next record."""

    def end(self) -> str | None:
        """Return the problem, or None, once all records were given."""


CheckListing = Callable[[str, Listing], LogCheck]
"""Makes the check of a conversation's listing."""
CheckSnapshot = Callable[[str, Snapshot], LogCheck]
"""Makes the check of a conversation's snapshot."""
CheckRecord = Callable[[str, StoredRecord], str | None]
"""Given an undamaged record, returns the problem with its meaning, or None."""


def verify(
    path: str | PathLike[str],
    *,
    check_snapshot: CheckSnapshot | None = None,
    check_record: CheckRecord | None = None,
    check_listing: CheckListing | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _of: None,
    busy_wait_s: float = 10.0,
    answer_wait_s: float = ANSWER_WAIT_S,
) -> Verification:
    """Check a whole journal file, beside the processes that use it; blocks its caller.

    `check_snapshot`, `check_record`, `check_listing`: further checks of each snapshot, record and
    row of a list, such as `check_folds`, `check_event` and `check_listing` of `files`.
    `busy_wait_s`: how long to wait for another program's lock. Calls `on_progress`, in a separate
    thread, with the numbers of conversations: those done, and all.
    Raises `JournalRefused` if the file cannot be opened at all, or was replaced under a process
    that has it open, and `JournalUnavailable` if the disk does not answer for `answer_wait_s`.
    """

    def work(under_way: FileWork[Verification]) -> Verification:
        return verify_in(
            under_way,
            real_path(path),
            check_snapshot=check_snapshot,
            check_record=check_record,
            check_listing=check_listing,
            on_progress=on_progress,
            busy_wait_s=busy_wait_s,
        )

    return FileWork[Verification](f"verifying {path}", answer_wait_s).run(work)


def verify_in(
    under_way: FileWork[Any],
    path: Path,
    *,
    check_snapshot: CheckSnapshot | None = None,
    check_record: CheckRecord | None = None,
    check_listing: CheckListing | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _of: None,
    busy_wait_s: float = 10.0,
) -> Verification:
    """Check a whole file, as a part of work that is under way."""

    def note_progress(done: int, of: int) -> None:
        under_way.note()
        on_progress(done, of)

    under_way.allow_for(path)
    with reading(path, busy_wait_s=busy_wait_s, on_open=under_way.watch) as reader:
        verification = reader.do(
            lambda reader: _Verifier(
                reader, check_snapshot, check_record, check_listing, note_progress
            ).run(),
        )
    under_way.note()
    if verification.problems:
        first = CorruptLog("?", 0, verification.problems[0].found)
        refuse_unreadable(path, first)
        refuse_replaced(path, first)
    return verification


class _Verifier:
    """One verification, in one transaction."""

    def __init__(
        self,
        reader: SQLiteReader,
        check_snapshot: CheckSnapshot | None,
        check_record: CheckRecord | None,
        check_listing: CheckListing | None,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._reader = reader
        self._connection = reader.connection
        self._check_snapshot = check_snapshot
        self._check_record = check_record
        self._check_listing = check_listing
        self._stale: list[str] = []
        self._on_progress = on_progress
        self._problems: list[Problem] = []
        self._conversations = 0
        self._records = 0
        # How many records each log should hold of its own.
        self._expected: dict[int, int] = {}
        self._tails: list[Tail] = []

    def run(self) -> Verification:
        self._try(self._check_pages)
        self._try(self._check_conversations)
        self._try(self._check_belonging)
        self._try(self._check_rejections)
        self._try(self._check_parts)
        return Verification(
            self._conversations, self._records, tuple(self._problems), tuple(self._stale)
        )

    def _found(self, found: str, name: str | None = None, seq: int = 0) -> None:
        self._problems.append(Problem(name, seq, found))

    def _try(self, check: Callable[[], None], name: str | None = None) -> None:
        """Run a check; if it cannot finish, report that as a problem and continue."""
        try:
            check()
        except CorruptLog as error:
            self._found(error.found, error.conversation_id, error.seq)
        except JournalRefused as error:
            self._found(str(error), name)
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._found(str(error), name)

    def _check_pages(self) -> None:
        for (found,) in self._connection.execute("PRAGMA integrity_check"):
            if found != "ok":
                self._found(found)

    def _check_conversations(self) -> None:
        names = [row[0] for row in self._connection.execute("SELECT name FROM conversation")]
        for done, name in enumerate(names):
            self._on_progress(done, len(names))
            self._try(partial(self._check_conversation, name), name)
        self._on_progress(len(names), len(names))

    def _check_conversation(self, name: str) -> None:
        tail = read_tail(self._connection, name)
        if tail is None:
            self._found("an index names it, but its row is missing", name)
            return
        self._expected[tail.log] = tail.head - tail.forked_at
        self._tails.append(tail)
        if not tail.head:
            return
        self._conversations += 1
        has_search = self._reader.has_search
        words = FileWords(self._connection, tail.log, name) if has_search else None
        for record in records_of(self._connection, tail, 0, tail.head):
            self._records += 1
            row = self._connection.execute(
                "SELECT seq, id FROM event WHERE event_id = ? AND log = ?",
                (record.event_id, log_of(self._connection, tail, record.seq)),
            ).fetchone()
            if row is None or row[0] != record.seq:
                self._found("its id leads elsewhere", name, record.seq)
            elif words is not None and record.seq > tail.forked_at:
                problem = words.add(row[1], record)
                if problem is not None:
                    self._found(problem, name, record.seq)
            if self._check_record is not None:
                found = self._check_record(name, record)
                if found is not None:
                    self._found(found, name, record.seq)
        if words is not None and (at := words.end()) is not None:
            self._found(at[1], name, at[0])
        self._check_snapshot_of(tail)
        self._check_listing_of(tail)

    def _compare(self, tail: Tail, check: LogCheck, upto: int) -> None:
        for record in records_of(self._connection, tail, 0, upto):
            check.add(record)
        if (found := check.end()) is not None:
            self._found(found, tail.name, upto)

    def _check_snapshot_of(self, tail: Tail) -> None:
        row = self._connection.execute(
            "SELECT seq FROM snapshot WHERE log = ?", (tail.log,)
        ).fetchone()
        if row is None:
            return
        snapshot = self._reader.read_snapshot(tail.name)
        if snapshot is None:
            self._found("its snapshot is damaged, and is ignored", tail.name, row[0])
        elif self._check_snapshot is not None:
            self._compare(tail, self._check_snapshot(tail.name, snapshot), snapshot.seq)

    def _check_listing_of(self, tail: Tail) -> None:
        if not self._reader.has_listings:
            return
        found = read_listing(self._connection, tail.number)
        if found is None:
            self._found("lists do not show it", tail.name)
            return
        listing, is_whole = found
        if not is_whole:
            self._found("its row in lists is damaged", tail.name)
            return
        if not listing.seq:
            self._stale.append(tail.name)
            return
        if has_moved(self._connection, listing, tail.head, tail.last):
            self._stale.append(tail.name)
        if self._check_listing is not None:
            self._compare(tail, self._check_listing(tail.name, listing), listing.seq)

    def _check_belonging(self) -> None:
        """Check that every record belongs to a conversation, or to a fork of a deleted one."""
        for log, parent, seq, found in self._connection.execute("SELECT * FROM fork"):
            if found != fork_seal(log, parent, seq):
                self._found(f"the row that names the parent of log {log} is damaged")
        forks = {
            log: (parent, seq)
            for log, parent, seq in self._connection.execute("SELECT log, parent, seq FROM fork")
        }
        kept: dict[int, int] = {}
        for parent, seq in forks.values():
            base = forks.get(parent, (0, 0))[1]
            kept[parent] = max(kept.get(parent, 0), seq - base)
        erasing = set(erasures(self._connection))
        for log in sorted(erasing):
            if not is_whole(self._connection, log):
                self._found(f"log {log} was deleted, and the row for its removal is damaged")
        counted = dict(self._connection.execute("SELECT log, count(*) FROM event GROUP BY log"))
        lost = logs_without_conversation({*counted, *forks}.difference(erasing), self._tails)
        for log in sorted(lost):
            self._found(f"log {log} belongs to no conversation: the row with its name is missing")
        for log, count in counted.items():
            if log in lost:
                continue
            # A log whose conversation was deleted has only the records that forks need.
            expected = self._expected.get(log, kept.get(log, 0))
            if count != expected and not (log in erasing and count > expected):
                self._found(f"log {log} has {count} records instead of {expected}")

        if self._reader.has_search:
            logs = self._connection.execute("SELECT DISTINCT log FROM search_message").fetchall()
            for (log,) in logs:
                if log not in self._expected and log not in erasing:
                    self._found(f"log {log} has words in the index, but no conversation")
        for (log,) in self._connection.execute("SELECT log FROM snapshot").fetchall():
            if log not in self._expected:
                self._found(f"log {log} has a snapshot, but belongs to no conversation")

    def _check_rejections(self) -> None:
        for log, at, violation, reason, payload, found in self._connection.execute(
            "SELECT log, at, violation, reason, payload, seal FROM rejection"
        ):
            if found != seal(log, at, violation, reason, content=payload):
                self._found(f"a rejected event of log {log} fails its checksum")

    def _check_parts(self) -> None:
        for digest, data in self._connection.execute("SELECT digest, data FROM part"):
            if blake2b(data, digest_size=16).digest() != digest:
                self._found("a large part fails its checksum")
        (unused,) = self._connection.execute(
            "SELECT count(*) FROM part WHERE digest NOT IN (SELECT digest FROM part_use)"
        ).fetchone()
        if unused:
            self._found(f"{unused} large parts belong to no record")
