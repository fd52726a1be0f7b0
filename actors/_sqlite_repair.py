"""A damaged file, made good: what is whole is kept, the rest is put aside, nothing is thrown away.

A new file is built beside the old one from every record that can still be read, whatever became
of the indexes: a log is as good as its chain of checksums, from its first record on. What does
not fit a chain goes into a file of its own (`…aside.jsonl`), one JSON object a line. Then the old
file, with its write-ahead log, becomes the backup (`….damaged-1`), and the new one takes its
place. Killed in between, the repair is finished by running it again.

A log that was cut off is marked unfinished, and every epoch is raised, so that whoever opens it
next looks at where it ends.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import IO, Any

from turnkeeper.runtime import InvariantViolation

from ._owner_lock import OwnerLock
from ._payload_parts import join
from ._record_chain import first_mark, log_number, next_mark, seal
from ._sqlite_log import Tail, empty_tail, fork_seal, tail_of_row
from ._sqlite_schema import (
    APPLICATION_ID,
    SCHEMA_VERSION,
    is_damage,
    make_file,
    refusal,
    refuse_lost_commits,
    repaired_draft,
    sync_folder,
)
from ._sqlite_verify import verify
from .errors import CorruptLog, JournalRefused

_PAGE = 500
# No row of `event` takes less than this in the file, so there are no more ids to try.
_EVENT_BYTES_MIN = 40
_INCARNATIONS_LOOKED_FOR = 8
_UNREADABLE = (sqlite3.Error, ValueError, TypeError)


@dataclass(frozen=True, slots=True)
class Loss:
    """A log that does not go on as far as it did."""

    conversation_id: str
    head: int
    """Where it ends now."""
    set_aside: int
    """How many records behind that could be read, and are in the file aside."""


@dataclass(frozen=True, slots=True)
class Repair:
    """What was kept, and where the rest is."""

    backup: Path
    """The file as it was, with its write-ahead log beside it."""
    aside: Path
    """The rows that belong to nothing that is whole, one JSON object a line."""
    set_aside: int
    conversations: int
    records: int
    losses: tuple[Loss, ...]


def repair(
    path: str | PathLike[str],
    *,
    on_progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> Repair | None:
    """Repair a journal file that nobody has open; None where there is nothing to repair.

    Raises `OwnedElsewhere` while a process has it open for writing, and `JournalRefused` when
    nothing of it can be read.
    """
    path = Path(path)
    if not path.exists() and not repaired_draft(path).exists():
        raise JournalRefused(f"no journal at {path}: no such file; nothing was created")
    lock = OwnerLock(path, "turnkeeper repair")
    lock.try_acquire()
    try:
        if not path.exists() and repaired_draft(path).exists():
            repaired_draft(path).rename(path)
            sync_folder(path.parent)
        with contextlib.suppress(JournalRefused):
            refuse_lost_commits(path)
            if not verify(path).problems:
                return None
        work = _Repair(path, on_progress)
        try:
            return work.run()
        except JournalRefused:
            work.clear_away()
            raise
    finally:
        lock.release()


@dataclass(slots=True)
class _End:
    """Where the good part of a log ends: its last record may be in the log it was forked from."""

    head: int
    last: int
    tip: int
    last_log: int


class _Repair:
    def __init__(self, path: Path, on_progress: Callable[[int, int], None]) -> None:
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

    def run(self) -> Repair:
        # Built under another name, and given the one that counts when it is whole.
        building = self._building
        make_file(building)
        with (
            contextlib.closing(_connect(self._path, "ro")) as self._old,
            contextlib.closing(_connect(building, "rw")) as self._new,
            self._aside_path.open("w", encoding="utf-8") as self._aside,
        ):
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
        report = verify(building)
        if report.problems:
            raise InvariantViolation(f"the repaired file has problems: {report.problems}")
        self._swap(building)
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

    def clear_away(self) -> None:
        """What was begun and is of no use."""
        for end in ("", "-wal", "-shm"):
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

    # --- reading what can be read -----------------------------------------------------------------

    def _rows(self, table: str, key: str) -> Iterator[Sequence[Any]]:
        """Every row that a scan from the front, or else one from the back, comes to."""
        seen: set[object] = set()
        for order, beyond, start in (("", ">", -(1 << 63)), (" DESC", "<", (1 << 63) - 1)):
            at = start
            while True:
                try:
                    rows = self._old.execute(
                        f"SELECT {key}, * FROM {table} WHERE {key} {beyond} ? "  # noqa: S608 - our names
                        f"ORDER BY {key}{order} LIMIT {_PAGE}",
                        (at,),
                    ).fetchall()
                except _UNREADABLE as error:
                    if not is_damage(error):
                        raise
                    break
                if not rows:
                    if not order:
                        return
                    break
                for found, *row in rows:
                    if found not in seen:
                        seen.add(found)
                        yield row
                last = rows[-1][0]
                # On a damaged page a key is anything; a scan that does not get on has ended.
                if not isinstance(last, int) or (last <= at if beyond == ">" else last >= at):
                    break
                at = last

    def _events(self) -> Iterator[Sequence[Any]]:
        """Every event that can be read: page by page, and one by one where a page cannot."""
        last = self._path.stat().st_size // _EVENT_BYTES_MIN
        with contextlib.suppress(*_UNREADABLE):
            last = self._old.execute("SELECT max(id) FROM event").fetchone()[0] or 0
        for first in range(1, last + 1, _PAGE):
            self._on_progress(first, last)
            try:
                rows = self._old.execute(
                    "SELECT * FROM event WHERE id BETWEEN ? AND ? ORDER BY id",
                    (first, first + _PAGE - 1),
                ).fetchall()
            except _UNREADABLE as error:
                if not is_damage(error):
                    raise
                rows = []
            yield from rows
            missing = set(range(first, min(first + _PAGE, last + 1))) - {row[0] for row in rows}
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

    # --- keeping what is whole --------------------------------------------------------------------

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
        logs = self._new.execute("SELECT DISTINCT log FROM event").fetchall()
        for (log,) in logs:
            self._end_of(log)
        self._new.execute("DELETE FROM part WHERE digest NOT IN (SELECT digest FROM part_use)")

    def _end_of(self, log: int) -> _End:
        """Where the good part of a log ends; what lies behind is set aside."""
        if log in self._ends:
            return self._ends[log]
        # A log cannot be its own parent, whatever a damaged row says.
        self._ends[log] = _End(0, 0, first_mark(log), log)
        ids = self._new.execute(
            "SELECT id FROM event WHERE log = ? ORDER BY seq", (log,)
        ).fetchall()
        end = self._ends[log] = self._base(log, ids[0][0] if ids else 0)
        for at, (number,) in enumerate(ids):
            row = self._event(number)
            mark = self._mark_of(end, row)
            if mark is None:
                self._lost[log] = len(ids) - at
                for (bad,) in ids[at:]:
                    self._set_row_aside("event", self._event(bad))
                    self._new.execute("DELETE FROM event WHERE id = ?", (bad,))
                break
            self._new.execute("UPDATE event SET previous = ? WHERE id = ?", (end.last, row[0]))
            for _, digest in json.loads(row[10] or "[]"):
                self._new.execute(
                    "INSERT OR IGNORE INTO part_use VALUES (?, ?, ?)",
                    (log, row[3], bytes.fromhex(digest)),
                )
            end.head, end.last, end.tip, end.last_log = row[3], row[0], mark, log
        return end

    def _event(self, number: int) -> Sequence[Any]:
        row: Sequence[Any] = self._new.execute(
            "SELECT * FROM event WHERE id = ?", (number,)
        ).fetchone()
        return row

    def _base(self, log: int, first: int) -> _End:
        """Where a log begins: at nothing, or at a record of the log that it was forked from."""
        place = self._forks.get(log)
        if place is None and first:
            # What the fork's own row would say, its first record knows too.
            place = self._new.execute(
                "SELECT p.log, p.seq FROM event e JOIN event p ON p.id = e.previous "
                "WHERE e.id = ? AND p.seq = e.seq - 1 AND p.log <> e.log",
                (first,),
            ).fetchone()
        if place is None:
            return _End(0, 0, first_mark(log), log)
        parent, seq = place
        # Where the parent ends before that, so does the fork.
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

    def _mark_of(self, end: _End, row: Sequence[Any]) -> int | None:
        """The mark of a record behind `end`; None where it is not the next one, as written."""
        _, _, _, seq, epoch, event_id, kind, message_id, mark, payload, parts = row
        try:
            if parts is not None:
                payload = join(payload, parts, self._part)
            is_next = seq == end.head + 1 and mark == next_mark(
                end.tip, seq, epoch, event_id, kind, message_id, payload
            )
        except (ValueError, TypeError):
            return None
        return mark if is_next else None

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
            tails[log] = self._find_name(log)
        kept = [self._write_conversation(log, tail) for log, tail in tails.items()]
        self._copy_snapshots({tail.log: tail for tail in kept})
        self._copy_rejections()
        generation = 1
        with contextlib.suppress(*_UNREADABLE):
            (found,) = self._old.execute("SELECT generation + 1 FROM journal").fetchone()
            generation = int(found)
        self._new.execute("UPDATE journal SET generation = ?", (generation,))
        return kept

    def _named(self, name: object, log: object) -> Tail | None:
        """A row whose name and log vouch for each other, whatever else is wrong with it."""
        if isinstance(name, str):
            for incarnation in range(_INCARNATIONS_LOOKED_FOR):
                if log_number(name, incarnation) == log:
                    return self._bare_tail(name, incarnation)
        return None

    def _unnamed(self, tails: dict[int, Tail]) -> list[int]:
        """Logs that are more than what forks need of a deleted conversation."""
        needed = dict(self._new.execute("SELECT parent, max(seq) FROM fork GROUP BY parent"))
        return [
            log
            for log, end in self._ends.items()
            if log not in tails and end.last_log == log and end.head > needed.get(log, 0)
        ]

    def _find_name(self, log: int) -> Tail:
        """A name from an index, if one still has it; or else one made up."""
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
            if (tail := self._named(name, log)) is not None:
                return tail
        # A log's number is a function of its name, so this one begins as a fork of all of it.
        end = self._ends[log]
        name = f"recovered-{log}"
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
            (
                tail.name,
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
            ),
        )
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
                    self._new.execute("INSERT INTO rejection VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                    continue
            self._set_row_aside("rejection", row)


def _refuse_stranger(connection: sqlite3.Connection, path: Path) -> None:
    try:
        (application_id,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    except _UNREADABLE as error:
        raise refusal(path, error) from error
    if application_id != APPLICATION_ID:
        raise JournalRefused(f"{path}: it is no turnkeeper journal; nothing was changed")
    if version > SCHEMA_VERSION:
        raise JournalRefused(
            f"{path} has schema version {version}, and this code repairs 1 to {SCHEMA_VERSION}; "
            "nothing was changed; use a newer turnkeeper"
        )


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None
    )
