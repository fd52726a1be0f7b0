"""Reads from the SQLite file, and checks all that it reads.

The reader owns the reading connection, runs in its own thread, and needs no ownership of the file.
Each read is one transaction, so it sees the file as of one commit.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from turnkeeper.runtime import InvariantViolation, TurnkeeperError

from ...errors import (
    ConversationNotFound,
    CorruptLog,
    JournalRefused,
    JournalUnavailable,
    SearchIsOff,
)
from ...journal import (
    ConversationInfo,
    ListPage,
    ListQuery,
    Rejection,
    SearchPage,
    SearchQuery,
    Snapshot,
    StoredRecord,
)
from ..shared.job_thread import Job
from ..shared.record_chain import log_number, seal
from .listings import read_page
from .log import (
    Tail,
    find_events,
    find_messages,
    find_record,
    read_records,
    read_tail,
    tail_of_row,
)
from .misreads import refuse_unreadable, unless_misread
from .owner_lock import OwnerLock
from .schema import (
    LISTING_VERSION,
    SEARCH_VERSION,
    is_damage,
    open_for_reading,
    real_path,
    refuse_bad_log,
    refuse_replaced,
)

T = TypeVar("T")

_READS_MAX = 100  # that writers come in between of

_LIST_PAGE = 1000
_TAIL = """json_array(id, name, incarnation, log, epoch, head, last, tip, forked_at, is_unfinished,
                     updated_us, seal)"""
_NEXT = "FROM (SELECT * FROM conversation WHERE id > ? ORDER BY id LIMIT ?)"
_LIST = f"SELECT json_group_array({_TAIL}) {_NEXT}"

_SLICE = 10_000  # a few milliseconds: other reads wait no longer
_UNFINISHED = f"""
    SELECT count(*), max(id), json_group_array({_TAIL}) FILTER (WHERE is_unfinished) {_NEXT}
"""
_COUNT = """
    SELECT count(*) FROM conversation INDEXED BY sqlite_autoindex_conversation_1 WHERE id <= ?
"""


class ListSlice(NamedTuple):
    """A slice of the conversations, in the order of their rows' numbers."""

    infos: Sequence[ConversationInfo]
    """The conversations in it that have records."""
    rows: int
    last: int
    """The number of the last row."""
    is_last: bool


class Read(Job[T]):
    """A job for the reader's thread."""

    __slots__ = ("apply",)

    def __init__(self, apply: Callable[[SQLiteReader], T], items: int = 1) -> None:
        super().__init__(items)
        self.apply = apply


class SQLiteReader:
    """A `Worker` that does `Read` jobs."""

    def __init__(
        self,
        path: Path,
        *,
        busy_wait_s: float,
        is_owner: bool,
        on_open: Callable[[sqlite3.Connection], None] = lambda _: None,
    ) -> None:
        """`on_open` is called with each connection that it makes."""
        self._path = path
        self._on_open = on_open
        self._busy_wait_s = busy_wait_s
        self._is_owner = is_owner
        self.connection: sqlite3.Connection
        self._state: tuple[int, ...] = ()
        self._may_have_search = False
        self._open()

    def close(self) -> None:
        self.connection.close()

    def rest(self) -> float | None:
        return None

    def work(self, jobs: Sequence[Job[object]]) -> None:
        for job in jobs:
            assert isinstance(job, Read)
            try:
                job.settle(self.do(job.apply))
            except TurnkeeperError as error:
                job.refuse(error)
            except Exception as error:  # noqa: BLE001 - handed to the caller
                outcome = InvariantViolation(f"a read of {self._path} is impossible: {error!r}")
                outcome.__cause__ = error
                job.refuse(outcome)

    def do(self, apply: Callable[[SQLiteReader], T]) -> T:
        """Run one read in one transaction.

        Damage is reported only if a second connection finds it too: after a failed allocation or
        read, the first one may have a wrong page in its cache, or give a wrong answer.
        """
        try:
            return self._do(apply)
        except (JournalRefused, CorruptLog) as error:
            if not self._path.exists():
                raise JournalUnavailable(
                    f"{self._path} cannot be read now: it was deleted or moved while it was open; "
                    "nothing was changed; put it back, or restore a backup"
                ) from error
            refuse_unreadable(self._path, error)
            try:
                self._open_again()
            except JournalRefused:
                raise error from None
        try:
            return self._do(apply)
        except (JournalRefused, CorruptLog) as error:
            if not self._is_owner:
                refuse_replaced(self._path, error)
            raise

    def _open_again(self) -> None:
        """Replace the connection."""
        # Opened first: if that fails, the next read compares with the state of the old one.
        before = self.connection
        self._open()
        before.close()

    def _do(self, apply: Callable[[SQLiteReader], T]) -> T:
        try:
            if self._is_owner:
                return self._in_transaction(apply)
            return self._beside_a_writer(apply)
        except (sqlite3.Error, ValueError, TypeError, MemoryError, OSError) as error:
            if is_damage(error):
                raise JournalRefused(
                    f"{self._path} is damaged ({error}); nothing was changed; restore it from a "
                    "backup, or run `turnkeeper repair`"
                ) from error
            found = str(error) or type(error).__name__
            raise JournalUnavailable(
                f"{self._path} cannot be read now: {found}; nothing was changed; try again"
            ) from error

    def _in_transaction(self, apply: Callable[[SQLiteReader], T]) -> T:
        self.connection.execute("BEGIN")
        try:
            # Inside: it sees the version that `apply` reads. A newer process may have migrated the
            # file, after it had taken it over or beside a reader.
            while self._is_migrated():
                self._open_again()
                self.connection.execute("BEGIN")
            return apply(self)
        finally:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    # --- without ownership ------------------------------------------------------------------------
    #
    # SQLite can read a file that has no writer without creating files beside it, but only if it
    # is opened as immutable. A writer may start at any time. So the reader looks at the file's
    # state before and after each read, and repeats the read if the state changed in between.

    def _beside_a_writer(self, apply: Callable[[SQLiteReader], T]) -> T:
        for _ in range(_READS_MAX):
            if self._look() != self._state:
                self._open_again()
            state = self._state
            try:
                result = self._in_transaction(apply)
            except (sqlite3.Error, TurnkeeperError):
                if not self._is_immutable(state) or self._look() == state:
                    raise
            else:
                if not self._is_immutable(state) or self._look() == state:
                    return result
        raise JournalUnavailable(
            f"{self._path} cannot be read now: it is opened and closed again and again; nothing "
            "was changed; try again"
        )

    def _open(self) -> None:
        state = () if self._is_owner else self._look()
        if not self._is_owner and not OwnerLock(self._path, "a reader").is_held():
            # The owner checked the log when it opened the file. If one of the two is replaced under
            # the owner, reads find damage, and `do` says so.
            refuse_bad_log(self._path)
        self.connection = open_for_reading(
            self._path, busy_wait_s=self._busy_wait_s, is_immutable=self._is_immutable(state)
        )
        self._opened_version = self._version
        self._on_open(self.connection)
        self._state = state

    def _is_migrated(self) -> bool:
        """Return True if the file has a newer schema now than when the connection was made.

        It may be newer than this code knows: then opening the file again refuses it.
        """
        return self._version != self._opened_version

    def _look(self) -> tuple[int, ...]:
        """Return a state that changes when a writer opens, closes or writes the file.

        Beside a live writer, only the file's identity counts: SQLite's own locks do the rest.
        """
        wal = Path(f"{self._path}-wal")
        if wal.exists():
            return (self._path.stat().st_ino,) if self._path.exists() else ()
        try:
            facts = self._path.stat()
        except FileNotFoundError:
            return ()
        return (facts.st_ino, facts.st_size, facts.st_mtime_ns)

    @staticmethod
    def _is_immutable(state: tuple[int, ...]) -> bool:
        return len(state) > 1

    # --- reads ------------------------------------------------------------------------------------

    def read(self, name: str, after: int, limit: int, bytes_max: int) -> Sequence[StoredRecord]:
        tail = self._tail(name)
        upto = min(after + limit, tail.head)
        return read_records(self.connection, tail, after, upto, bytes_max) if upto > after else []

    def heads(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the heads of these logs. It is called at every poll, so it checks nothing else."""
        heads = {}
        for name in names:
            row = self.connection.execute(
                "SELECT head FROM conversation WHERE name = ?", (name,)
            ).fetchone()
            if row is not None:
                heads[name] = row[0]
        return heads

    def info(self, name: str) -> ConversationInfo:
        return _info(self._tail(name))

    def size(self) -> int:
        """Return the bytes of the file, without its log."""
        (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
        (page_bytes,) = self.connection.execute("PRAGMA page_size").fetchone()
        return int(pages * page_bytes)

    def list(self) -> Sequence[ConversationInfo]:
        """Return all conversations, in one read."""
        found: list[ConversationInfo] = []
        rows, part = 0, ListSlice([], 0, -1, is_last=False)
        while not part.is_last:
            part = self.list_slice(part.last)
            found += part.infos
            rows += part.rows
        self.check_index(rows, part.last)
        return sorted(found, key=lambda info: info.conversation_id)

    def list_slice(self, after: int) -> ListSlice:
        """Return the conversations of the next rows after this number."""
        (rows,) = self.connection.execute(_LIST, (after, _LIST_PAGE)).fetchone()
        tails = list(map(tail_of_row, _parsed(rows)))
        infos = [_info(tail) for tail in tails if tail.head]
        last = tails[-1].number if tails else after
        return ListSlice(infos, len(tails), last, len(tails) < _LIST_PAGE)

    def check_index(self, rows: int, last: int) -> None:
        """Raise `JournalRefused` unless the index over names has `rows` rows up to number `last`.

        If the counts differ, the table or its index hides conversations. Rows are never removed,
        and new rows get higher numbers, so writes do not disturb the check.
        """
        (count,) = self.connection.execute(_COUNT, (last,)).fetchone()
        if rows != count:
            raise JournalRefused(
                f"{self._path} is damaged: it has {rows} conversations, and {count} in an "
                "index; nothing was changed; restore it from a backup, or run `turnkeeper repair`"
            )

    def unfinished(self, after: int) -> tuple[Sequence[ConversationInfo], int | None]:
        """Return the unfinished conversations among the next rows, and the last row's number.

        The number is None at the end. Rows of finished conversations are skipped without a check,
        because this runs again and again, even for a file with a million of them.
        """
        count, last, rows = self.connection.execute(_UNFINISHED, (after, _SLICE)).fetchone()
        infos = [_info(tail) for tail in map(tail_of_row, _parsed(rows)) if tail.head]
        return infos, last if count == _SLICE else None

    @property
    def has_listings(self) -> bool:
        """False if the file has a schema version without listings."""
        return self._version >= LISTING_VERSION

    @property
    def has_search(self) -> bool:
        """True if the file has an index of words."""
        from .search import has_search  # noqa: PLC0415 - a program that begins needs it not yet

        return self._version >= SEARCH_VERSION and has_search(self.connection)

    @property
    def _version(self) -> int:
        (version,) = self.connection.execute("PRAGMA user_version").fetchone()
        return int(version)

    def page(self, query: ListQuery) -> ListPage:
        return read_page(self.connection, query, owned=self._owned)

    def search(self, query: SearchQuery) -> SearchPage:
        from .search import read_search_page  # noqa: PLC0415 - as above

        page = None
        if self._may_have_search or self._version >= SEARCH_VERSION:
            self._may_have_search = True
            page = read_search_page(self.connection, query)
        if page is None:
            raise SearchIsOff(str(self._path))
        return page

    def _owned(self) -> tuple[Literal["here", "elsewhere", "none"], str]:
        """Return the process that owns the file, as far as a reader can know."""
        if self._is_owner:
            return "here", ""
        if not OwnerLock(self._path, "a reader").is_held():
            return "none", ""
        (address,) = self.connection.execute("SELECT owner FROM journal").fetchone()
        return "elsewhere", address

    def find_events(self, name: str, event_ids: Sequence[str]) -> Mapping[str, int]:
        return find_events(self.connection, self._tail(name), event_ids)

    def find_messages(self, name: str, message_ids: Sequence[str]) -> Mapping[str, int]:
        return find_messages(self.connection, self._tail(name), message_ids)

    def rejections(self, name: str) -> Sequence[Rejection]:
        tail = read_tail(self.connection, name)
        log = tail.log if tail else log_number(name, 0)
        rejections = []
        for at, violation, reason, payload, found in self.connection.execute(
            "SELECT at, violation, reason, payload, seal FROM rejection WHERE log = ? "
            "ORDER BY at, id",
            (log,),
        ):
            if seal(log, at, violation, reason, content=payload) != found:
                raise CorruptLog(name, 0, "a rejected event fails its checksum")
            rejections.append(Rejection(at, violation, reason, payload))
        (count,) = self.connection.execute(
            "SELECT count(*) FROM rejection NOT INDEXED WHERE log = ?", (log,)
        ).fetchone()
        if count != len(rejections):
            raise CorruptLog(name, 0, "an index hides rejected events")
        return rejections

    def read_snapshot(self, name: str) -> Snapshot | None:
        """Return the snapshot, if it is whole and its log still has its last record."""
        tail = self._tail(name)
        try:
            row = self.connection.execute(
                "SELECT seq, version, tip, payload, seal FROM snapshot WHERE log = ?", (tail.log,)
            ).fetchone()
            if row is None:
                return None
            seq, version, tip, payload, found = row
            is_whole = seal(tail.log, seq, version, tip, content=payload) == found
        except (sqlite3.Error, ValueError, TypeError) as error:
            if not is_damage(error):
                raise
            return None
        if not is_whole:
            return None
        record = find_record(self.connection, tail, seq)
        return Snapshot(seq, version, payload) if record and record[1] == tip else None

    def _tail(self, name: str) -> Tail:
        tail = read_tail(self.connection, name)
        if tail is None or not tail.head:
            raise ConversationNotFound(name)
        return tail


@contextmanager
def reading(
    path: Path,
    *,
    busy_wait_s: float,
    on_open: Callable[[sqlite3.Connection], None] = lambda _: None,
) -> Iterator[SQLiteReader]:
    """Open a reader without ownership, for use in the calling thread."""
    path = real_path(path)
    make = partial(SQLiteReader, path, busy_wait_s=busy_wait_s, is_owner=False, on_open=on_open)
    reader = unless_misread(path, make)
    try:
        yield reader
    finally:
        reader.close()


def _parsed(rows: str) -> Sequence[Sequence[Any]]:
    try:
        page: Sequence[Sequence[Any]] = json.loads(rows)
    except ValueError as error:
        raise CorruptLog("?", 0, "a conversation's own row is damaged") from error
    return page


def _info(tail: Tail) -> ConversationInfo:
    return ConversationInfo(
        tail.name, tail.head, tail.epoch, tail.is_unfinished, tail.updated_us / 1_000_000
    )
