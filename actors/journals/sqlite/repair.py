"""Repairs a damaged file: keeps the whole records, sets the others aside, and discards nothing.

A repair builds a new file beside the old one from every record that can still be read, whatever
state the indexes are in. A log is good as far as its chain of checksums reaches from its first
record. Rows that do not fit a chain go into a separate file (`…aside.jsonl`), one JSON object a
line. Then the old file, with its write-ahead log, becomes the backup (`….damaged-1`), and the new
one takes its place. If the repair is killed in between, run it again to finish it.

A log that was cut off is marked unfinished, and every epoch is raised, so that the next owner
looks at the end of the log.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import IO, Any

from turnkeeper.runtime import InvariantViolation

from ...errors import CorruptLog, JournalRefused, JournalUnavailable
from ..shared.list_pages import bare_listing
from ..shared.payload_parts import join
from ..shared.record_chain import first_mark, log_number, logs_of, next_mark, seal
from .erasure import erasure_seal
from .file_work import ANSWER_WAIT_S, FileWork
from .listings import store_listing
from .log import (
    EventRow,
    Tail,
    empty_tail,
    fork_seal,
    logs_without_conversation,
    recovered_name,
    tail_of_row,
)
from .owner_lock import OwnerLock
from .schema import (
    APPLICATION_ID,
    NO_LINKS,
    PRIVATE,
    SCHEMA_VERSION,
    is_damage,
    is_log_of,
    make_file,
    real_path,
    refusal,
    refuse_bad_log,
    refuse_stranger,
    repaired_draft,
    sync_folder,
)
from .verify import verify_in

_PAGE = 500
# No row of `event` takes less than this in the file, so there are no more ids to try.
_EVENT_BYTES_MIN = 40
_DROP_EMPTY_FORKS = """
    DELETE FROM fork
    WHERE log NOT IN (SELECT log FROM conversation) AND log NOT IN (SELECT log FROM event)
"""
_UNREADABLE = (sqlite3.Error, ValueError, TypeError)


@dataclass(frozen=True, slots=True)
class Loss:
    """A log that was cut short."""

    conversation_id: str
    head: int
    """Its last seq now."""
    set_aside: int
    """The number of later records that could be read and were set aside."""


@dataclass(frozen=True, slots=True)
class Repair:
    """The outcome of a repair."""

    backup: Path
    """The file as it was, with its write-ahead log beside it."""
    aside: Path
    """The file with the rows that fit no chain, one JSON object on each line."""
    set_aside: int
    conversations: int
    records: int
    losses: tuple[Loss, ...]


def repair(
    path: str | PathLike[str],
    *,
    on_progress: Callable[[int, int], None] = lambda _done, _of: None,
    answer_wait_s: float = ANSWER_WAIT_S,
) -> Repair | None:
    """Repair a journal file that no process has open; return None if nothing is damaged.

    Calls `on_progress` in a separate thread. Raises `OwnedElsewhere` while a process has the file
    open for writing, `JournalRefused` if nothing in it can be read, and `JournalUnavailable` if the
    disk does not answer for `answer_wait_s`: then run it again.
    """

    def work(under_way: FileWork[Repair | None]) -> Repair | None:
        return _repair(under_way, real_path(path), on_progress)

    return FileWork[Repair | None](f"the repair of {path}", answer_wait_s).run(work)


def _repair(
    under_way: FileWork[Repair | None], path: Path, on_progress: Callable[[int, int], None]
) -> Repair | None:
    if not path.exists() and not repaired_draft(path).exists():
        raise JournalRefused(f"no journal at {path}: no such file; nothing was created")
    under_way.allow_for(path)
    refuse_stranger(path)
    lock = OwnerLock(path, "turnkeeper repair")
    lock.try_acquire()
    try:
        if not path.exists() and repaired_draft(path).exists():
            repaired_draft(path).rename(path)
            sync_folder(path.parent)
        with contextlib.suppress(JournalRefused):
            refuse_bad_log(path)
            if not verify_in(under_way, path).problems:
                return None
        work = _Repair(under_way, path, on_progress)
        try:
            return work.run()
        except (JournalRefused, JournalUnavailable):
            work.clear_away()
            raise
    finally:
        lock.release()


@dataclass(slots=True)
class _End:
    """The end of the undamaged part of a log; its last record may be in the parent's log."""

    head: int
    last: int
    tip: int
    last_log: int


class _Repair:
    def __init__(
        self,
        under_way: FileWork[Repair | None],
        path: Path,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._under_way = under_way
        self._path = path
        self._on_progress = on_progress
        number = 1
        while Path(f"{path}.damaged-{number}").exists():
            number += 1
        self._backup = Path(f"{path}.damaged-{number}")
        self._aside_path = Path(f"{path}.damaged-{number}.aside.jsonl")
        self._draft = repaired_draft(path)
        self._building = Path(f"{self._draft}-draft")
        self._old: sqlite3.Connection
        self._new: sqlite3.Connection
        self._aside: IO[str]
        self._set_aside = 0
        self._forks: dict[int, tuple[int, int]] = {}
        self._ends: dict[int, _End] = {}
        self._lost: dict[int, int] = {}
        self._erased: set[int] = set()

    def run(self) -> Repair:
        # Built under a working name, and renamed once it is whole.
        with _refusals(self._path):
            tails = self._build()
            report = verify_in(self._under_way, self._building)
        if report.problems:
            raise InvariantViolation(f"the repaired file has problems: {report.problems}")
        # A statement that was interrupted looks like rows that cannot be read.
        self._under_way.note()
        self._swap(self._building)
        losses = tuple(
            Loss(tail.name, tail.head, self._lost[tail.log])
            for tail in sorted(tails, key=lambda tail: tail.name)
            if tail.log in self._lost
        )
        return Repair(
            self._backup,
            self._aside_path,
            self._set_aside,
            report.conversations,
            report.records,
            losses,
        )

    def _build(self) -> Sequence[Tail]:
        """Write what can be read into the new file; return the ends of its logs."""
        make_file(self._building)
        with (
            contextlib.closing(self._connect_old()) as self._old,
            contextlib.closing(_connect(self._building, "rw")) as self._new,
            open(self._aside_path, "w", encoding="utf-8", opener=_private) as self._aside,
        ):
            self._under_way.watch(self._old)
            self._under_way.watch(self._new)
            # Without this, SQLite reads nothing of a file that is shorter than it was.
            self._old.execute("PRAGMA writable_schema = ON")
            _refuse_stranger(self._old, self._path)
            # A damaged text is still worth setting aside.
            self._old.text_factory = partial(str, encoding="utf-8", errors="replace")
            self._new.execute("BEGIN")
            self._copy_parts()
            self._copy_events()
            tails = self._copy_conversations()
            self._new.execute("DROP INDEX repair")
            self._new.execute("COMMIT")
            (records,) = self._new.execute("SELECT count(*) FROM event").fetchone()
            if not records and not self._set_aside:
                raise JournalRefused(
                    f"{self._path} cannot be repaired: nothing of it can be read; nothing was "
                    "changed; restore it from a backup"
                )
            self._aside.flush()
            os.fsync(self._aside.fileno())
        return tails

    def _connect_old(self) -> sqlite3.Connection:
        # SQLite would mix in a log that belongs to another file: then the file is read alone.
        end = "" if is_log_of(self._path) else "&immutable=1"
        return _connect(self._path, f"ro{end}")

    def clear_away(self) -> None:
        """Remove the files of a repair that was given up."""
        for end in ("", "-journal", "-wal", "-shm"):
            Path(f"{self._building}{end}").unlink(missing_ok=True)
        self._aside_path.unlink(missing_ok=True)

    def _swap(self, building: Path) -> None:
        with building.open("rb+") as file:
            os.fsync(file.fileno())
        building.rename(self._draft)
        sync_folder(self._path.parent)
        self._path.rename(self._backup)
        for end in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self._path}{end}").rename(f"{self._backup}{end}")
        self._draft.rename(self._path)
        sync_folder(self._path.parent)

    # --- reading all readable rows ----------------------------------------------------------------

    def _rows(self, table: str, key: str) -> Iterator[Sequence[Any]]:
        """Yield every row that a scan from the front can reach, and then one from the back."""
        seen: set[object] = set()
        for order, beyond, start in (("", ">", -(1 << 63)), (" DESC", "<", (1 << 63) - 1)):
            at = start
            while True:
                last: object = None
                try:
                    # One row in memory at a time: each may have many MiB.
                    for last, *row in self._old.execute(
                        f"SELECT {key}, * FROM {table} WHERE {key} {beyond} ? "  # noqa: S608 - our names
                        f"ORDER BY {key}{order} LIMIT {_PAGE}",
                        (at,),
                    ):
                        if last not in seen:
                            seen.add(last)
                            yield row
                except _UNREADABLE as error:
                    if not is_damage(error):
                        raise
                    break
                if last is None:
                    if not order:
                        return
                    break
                # A damaged page may give any key; a scan that makes no progress has ended.
                if not isinstance(last, int) or (last <= at if beyond == ">" else last >= at):
                    break
                at = last

    def _events(self) -> Iterator[Sequence[Any]]:
        """Yield every readable event: page by page, and one by one if a page cannot be read."""
        last = self._path.stat().st_size // _EVENT_BYTES_MIN
        with contextlib.suppress(*_UNREADABLE):
            last = self._old.execute("SELECT max(id) FROM event").fetchone()[0] or 0
        for first in range(1, last + 1, _PAGE):
            self._under_way.note()
            self._on_progress(first, last)
            missing = set(range(first, min(first + _PAGE, last + 1)))
            try:
                # One row in memory at a time, as above.
                for row in self._old.execute(
                    "SELECT * FROM event WHERE id BETWEEN ? AND ? ORDER BY id",
                    (first, first + _PAGE - 1),
                ):
                    missing.discard(row[0])
                    yield row
            except _UNREADABLE as error:
                if not is_damage(error):
                    raise
            for number in sorted(missing):
                with contextlib.suppress(*_UNREADABLE):
                    row = self._old.execute(
                        "SELECT * FROM event WHERE id = ?", (number,)
                    ).fetchone()
                    if row is not None:
                        yield row
        self._on_progress(last, last)

    def _set_row_aside(self, table: str, row: Sequence[Any]) -> None:
        self._set_aside += 1
        values = [
            {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
            for value in row
        ]
        self._aside.write(json.dumps({"table": table, "row": values}) + "\n")

    # --- keeping whole records --------------------------------------------------------------------

    def _copy_parts(self) -> None:
        for digest, data in self._rows("part", "rowid"):
            if isinstance(data, bytes) and blake2b(data, digest_size=16).digest() == digest:
                self._new.execute("INSERT OR IGNORE INTO part VALUES (?, ?)", (digest, data))
            else:
                self._set_row_aside("part", (digest, data))

    def _copy_events(self) -> None:
        for row in self._events():
            try:
                self._new.execute(
                    f"INSERT INTO event VALUES ({', '.join('?' * len(row))})",  # noqa: S608
                    row,
                )
            except sqlite3.Error:  # an id or a place twice, or a value of the wrong type
                self._set_row_aside("event", row)
        self._new.execute("CREATE INDEX repair ON event (log, seq)")
        for log, parent, seq, found in self._rows("fork", "log"):
            if found == fork_seal(log, parent, seq):
                self._forks[log] = (parent, seq)
        self._drop_erased()
        logs = self._new.execute("SELECT DISTINCT log FROM event").fetchall()
        for (log,) in logs:
            self._end_of(log)
        self._new.execute("DELETE FROM part WHERE digest NOT IN (SELECT digest FROM part_use)")

    def _drop_erased(self) -> None:
        """Remove the records of deleted conversations that an erasure had not come to yet."""
        for log, last, head, found in self._rows("erasure", "log"):
            if found == erasure_seal(log, last, head):
                self._erased.add(log)
        self._erased |= self._find_deleted()
        if not self._erased:
            return
        living = {row[3] for row in self._rows("conversation", "id")}
        left = list(self._erased)
        while left:
            log = left.pop()
            kept = max((seq for parent, seq in self._forks.values() if parent == log), default=0)
            self._new.execute("DELETE FROM event WHERE log = ? AND seq > ?", (log, kept))
            if not kept and log in self._forks:
                parent, _ = self._forks.pop(log)
                if parent not in living:  # it was deleted before, and was kept for this one
                    left.append(parent)

    def _find_deleted(self) -> set[int]:
        """Return the logs with records whose names have later logs: they were deleted.

        Their rows in `erasure` may be lost. Returns none unless every fork's own rows are whole,
        since a fork may need the records.
        """
        written = self._new.execute("SELECT log, min(seq) FROM event GROUP BY log").fetchall()
        if any(first > 1 and log not in self._forks for log, first in written):
            return set()
        found: set[int] = set()
        for row in self._rows("conversation", "id"):
            try:
                tail = tail_of_row(row)
            except (CorruptLog, ValueError, TypeError):
                return set()
            if tail.forked_at and tail.log not in self._forks:
                return set()
            found.update(log_number(tail.name, each) for each in range(tail.incarnation))
        return found.intersection(log for log, _ in written)

    def _end_of(self, log: int) -> _End:
        """Return the end of the good part of a log, after setting the records behind it aside."""
        if log in self._ends:
            return self._ends[log]
        # A log is never its own parent, even if a damaged row says so.
        self._ends[log] = _End(0, 0, first_mark(log), log)
        ids = self._new.execute(
            "SELECT id FROM event WHERE log = ? ORDER BY seq", (log,)
        ).fetchall()
        end = self._ends[log] = self._base(log, ids[0][0] if ids else 0)
        lengths = self._branch_lengths(log)
        kept: set[int] = set()
        while True:
            # If a write to the disk was lost and the log went on from an older end, several
            # records follow this one. The longest branch stays whole; of equal ones, the newest.
            candidates = [
                (lengths[row.id], row.id, row, mark)
                for row in self._event_rows("log = ? AND seq = ?", log, end.head + 1)
                if (mark := self._mark_of(end, row)) is not None
            ]
            if not candidates:
                break
            _, _, row, mark = max(candidates, key=lambda candidate: candidate[:2])
            kept.add(row.id)
            self._new.execute("UPDATE event SET previous = ? WHERE id = ?", (end.last, row.id))
            for _, digest in json.loads(row.parts or "[]"):
                self._new.execute(
                    "INSERT OR IGNORE INTO part_use VALUES (?, ?, ?)",
                    (log, row.seq, bytes.fromhex(digest)),
                )
            end.head, end.last, end.tip, end.last_log = row.seq, row.id, mark, log
        self._under_way.note()
        for (number,) in ids:
            if number not in kept:
                self._lost[log] = self._lost.get(log, 0) + 1
                for row in self._event_rows("id = ?", number):
                    self._set_row_aside("event", row)
                self._new.execute("DELETE FROM event WHERE id = ?", (number,))
        return end

    def _branch_lengths(self, log: int) -> dict[int, int]:
        """Return for each record the length of the longest chain, by `previous`, that it begins."""
        lengths: dict[int, int] = {}
        behind: dict[int, int] = {}
        for number, previous in self._new.execute(
            "SELECT id, previous FROM event WHERE log = ? ORDER BY seq DESC, id DESC", (log,)
        ):
            lengths[number] = length = 1 + behind.get(number, 0)
            behind[previous] = max(behind.get(previous, 0), length)
        return lengths

    def _event_rows(self, condition: str, *values: object) -> list[EventRow]:
        rows = self._new.execute(f"SELECT * FROM event WHERE {condition}", values)  # noqa: S608 - our own text
        return [EventRow(*row) for row in rows]

    def _base(self, log: int, first: int) -> _End:
        """Return the end of a log's prefix: empty, or a record of the parent's log."""
        place = self._forks.get(log)
        if place is None and first:
            # The fork's own row is lost, but its first record names its parent too.
            place = self._new.execute(
                "SELECT p.log, p.seq FROM event e JOIN event p ON p.id = e.previous "
                "WHERE e.id = ? AND p.seq = e.seq - 1 AND p.log <> e.log",
                (first,),
            ).fetchone()
        if place is None:
            return _End(0, 0, first_mark(log), log)
        parent, seq = place
        # If the parent was cut before that seq, so is the fork.
        end = self._end_of(parent)
        found = self._new.execute(
            "SELECT id, mark FROM event WHERE log = ? AND seq = ?", (parent, seq)
        ).fetchone()
        if found is not None:
            end = _End(seq, found[0], found[1], parent)
        if end.head:
            self._new.execute(
                "INSERT INTO fork VALUES (?, ?, ?, ?)",
                (log, end.last_log, end.head, fork_seal(log, end.last_log, end.head)),
            )
        return _End(end.head, end.last, end.tip, end.last_log)

    def _mark_of(self, end: _End, row: EventRow) -> int | None:
        """Return the mark of the record after `end`, or None if this row is not that record."""
        try:
            payload = row.payload
            if row.parts is not None:
                payload = join(payload, row.parts, self._part)
            is_next = row.seq == end.head + 1 and row.mark == next_mark(
                end.tip, row.seq, row.epoch, row.event_id, row.kind, row.message_id, payload
            )
        except (ValueError, TypeError, AttributeError):
            return None
        return row.mark if is_next else None

    def _part(self, digest: bytes) -> bytes:
        row = self._new.execute("SELECT data FROM part WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            raise ValueError("missing part")
        data: bytes = row[0]
        return data

    # --- conversations ----------------------------------------------------------------------------

    def _copy_conversations(self) -> list[Tail]:
        tails: dict[int, Tail] = {}
        for row in self._rows("conversation", "id"):
            tail: Tail | None
            try:
                tail = tail_of_row(row)
            except (CorruptLog, ValueError, TypeError):
                tail = self._named(row[1], row[3])
            if tail is None:
                self._set_row_aside("conversation", row)
            else:
                tails[tail.log] = tail
        for log in tails:
            self._end_of(log)  # a fork may have no record of its own
        for log in self._unnamed(tails):
            tails[log] = self._find_name(log, {tail.name for tail in tails.values()})
        kept = [self._write_conversation(log, tail) for log, tail in tails.items()]
        # Of a fork whose own records and whose row are lost, nothing is left.
        self._new.execute(_DROP_EMPTY_FORKS)
        self._copy_snapshots({tail.log: tail for tail in kept})
        self._copy_rejections()
        generation = 1
        with contextlib.suppress(*_UNREADABLE):
            (found,) = self._old.execute("SELECT generation + 1 FROM journal").fetchone()
            generation = int(found)
        self._new.execute("UPDATE journal SET generation = ?", (generation,))
        return kept

    def _named(self, name: object, log: object) -> Tail | None:
        """Return a tail for a damaged row whose name and log still match each other, or None."""
        if isinstance(name, str):
            for incarnation, each in enumerate(logs_of(name)):
                if each == log:
                    return self._bare_tail(name, incarnation)
        return None

    def _unnamed(self, tails: dict[int, Tail]) -> list[int]:
        """Return the logs without a row: any that hold more than forks need of a deleted one.

        Those that hold no more may have lost their row too, if no conversation explains them.
        """
        lost = logs_without_conversation(self._ends, list(tails.values()))
        needed = dict(self._new.execute("SELECT parent, max(seq) FROM fork GROUP BY parent"))
        return [
            log
            for log, end in self._ends.items()
            if log not in tails
            and end.last_log == log
            and (log in lost or end.head > needed.get(log, 0))
        ]

    def _find_name(self, log: int, taken: Collection[str]) -> Tail:
        """Return a tail with the log's name from an index, or with a made-up name.

        It is made up, too, if the name is taken: then the row of that name is an old one.
        """
        try:
            names = [
                row[0]
                for row in self._old.execute(
                    "SELECT name FROM conversation INDEXED BY sqlite_autoindex_conversation_1"
                )
            ]
        except _UNREADABLE:
            names = []
        for name in names:
            if name not in taken and (tail := self._named(name, log)) is not None:
                return tail
        # A log's number is a function of its name, so the new name begins as a fork of the log.
        end = self._ends[log]
        name = recovered_name(log)
        new_log = log_number(name, 0)
        self._new.execute(
            "INSERT INTO fork VALUES (?, ?, ?, ?)",
            (new_log, log, end.head, fork_seal(new_log, log, end.head)),
        )
        self._ends[new_log] = _End(end.head, end.last, end.tip, log)
        self._lost.setdefault(new_log, 0)
        return self._bare_tail(name, 0)

    def _bare_tail(self, name: str, incarnation: int) -> Tail:
        updated_us = int(self._path.stat().st_mtime * 1_000_000)
        tail = empty_tail(name, incarnation, 0, updated_us)
        tail.is_unfinished = True
        return tail

    def _write_conversation(self, log: int, tail: Tail) -> Tail:
        end = self._end_of(tail.log)
        if end.head < tail.head:
            self._lost.setdefault(tail.log, 0)
        (epoch,) = self._new.execute(
            "SELECT ifnull(max(epoch), 0) FROM event WHERE log IN (?, ?)", (log, tail.log)
        ).fetchone()
        tail.is_unfinished = tail.is_unfinished or tail.log in self._lost
        tail.epoch = max(tail.epoch, epoch) + 1
        tail.head, tail.last, tail.tip = end.head, end.last, end.tip
        row = self._new.execute("SELECT seq FROM fork WHERE log = ?", (tail.log,)).fetchone()
        tail.forked_at = row[0] if row else 0
        self._new.execute(
            "INSERT INTO conversation VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            tail.columns(),
        )
        if tail.head:
            # The log may have been cut, and the old row is a cache.
            (number,) = self._new.execute("SELECT last_insert_rowid()").fetchone()
            store_listing(self._new, number, tail.name, bare_listing(tail.updated_us))
        return tail

    def _copy_snapshots(self, tails: dict[int, Tail]) -> None:
        for row in self._rows("snapshot", "log"):
            log, seq, version, tip, payload, found = row
            with contextlib.suppress(TypeError, ValueError):
                if (
                    log in tails
                    and seq <= tails[log].head
                    and seal(log, seq, version, tip, content=payload) == found
                    and self._new.execute(
                        "SELECT 1 FROM event WHERE log = ? AND seq = ? AND mark = ?",
                        (log, seq, tip),
                    ).fetchone()
                ):
                    self._new.execute("INSERT INTO snapshot VALUES (?, ?, ?, ?, ?, ?)", row)

    def _copy_rejections(self) -> None:
        for row in self._rows("rejection", "id"):
            _, *facts, payload, found = row
            with contextlib.suppress(TypeError, ValueError):
                if seal(*facts, content=payload) == found:
                    if facts[0] in self._erased:
                        continue
                    self._new.execute("INSERT INTO rejection VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                    continue
            self._set_row_aside("rejection", row)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | NO_LINKS, PRIVATE)


@contextlib.contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Convert errors of the disk, while nothing has changed, to those that a caller can act on."""
    try:
        yield
    except (sqlite3.Error, MemoryError, OSError) as error:
        if is_damage(error):
            raise
        raise refusal(path, error, "repaired") from error


def _refuse_stranger(connection: sqlite3.Connection, path: Path) -> None:
    try:
        (application_id,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    except _UNREADABLE as error:
        raise refusal(path, error) from error
    if application_id != APPLICATION_ID:
        raise JournalRefused(f"{path}: it is not a turnkeeper journal; nothing was changed")
    if version > SCHEMA_VERSION:
        raise JournalRefused(
            f"{path} has schema version {version}, and this code repairs 1 to {SCHEMA_VERSION}; "
            "nothing was changed; use a newer turnkeeper"
        )


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?mode={mode}", uri=True, isolation_level=None)
