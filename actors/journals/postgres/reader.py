"""Reads from PostgreSQL, which need no ownership.

The reader owns the reading connection and runs in a separate thread. A transaction costs two more
round trips to the server, so only reads whose statements must see the database as of one moment
have one. If the connection broke, the next read makes a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import psycopg

from turnkeeper.runtime import InvariantViolation, TurnkeeperError

from ...errors import ConversationNotFound, CorruptLog, JournalUnavailable
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
from ..shared.searching import LogWords
from .connections import BoundedConnection, Link
from .listings import read_page
from .log import Tail, find_ids, find_mark, read_records, read_tail
from .schema import UNENCODABLE, unencodable
from .search import logs_of_none, read_search_page, read_words

T = TypeVar("T")

_INFO = "SELECT name, head, epoch, is_unfinished, updated_us{} FROM conversation c"

_LIST_PAGE = 10_000
_LIST = f"{_INFO.format(', id')} WHERE id > %s ORDER BY id LIMIT %s"
# Goes from each log to the next one in the index; the records are not read.
_NEXT_LOGS = """
    WITH RECURSIVE next (log) AS (
        (SELECT log FROM event WHERE log > %s ORDER BY log LIMIT 1)
        UNION ALL
        SELECT (SELECT e.log FROM event e WHERE e.log > n.log ORDER BY e.log LIMIT 1)
        FROM next n WHERE n.log IS NOT NULL
    )
    SELECT log, EXISTS (SELECT FROM conversation c WHERE c.log = n.log)
    FROM next n WHERE log IS NOT NULL LIMIT %s
"""
_NAMES = "SELECT id, name, incarnation FROM conversation WHERE id > %s ORDER BY id LIMIT %s"

_SNAPSHOT = """
    SELECT c.log, s.seq, s.version, s.tip, s.payload, s.seal
    FROM conversation c LEFT JOIN snapshot s USING (log) WHERE c.name = %s AND c.head > 0
"""

_ABANDONED = f"""
    {_INFO.format("")}
    WHERE is_unfinished AND head > 0 AND NOT EXISTS (
        SELECT FROM node
        WHERE node.id = c.owner AND node.id <> %s AND node.lease_until > clock_timestamp()
    )
"""


class Read(Job[T]):
    """A job for the reader's thread."""

    __slots__ = ("apply",)

    def __init__(self, apply: Callable[[PostgresReader], T], items: int = 1) -> None:
        super().__init__(items)
        self.apply = apply


class PostgresReader:
    """A `Worker` that does `Read` jobs."""

    def __init__(
        self,
        connect: Callable[[], BoundedConnection],
        monotonic: Callable[[], float],
        node: int,
        schema: str,
    ) -> None:
        def connect_for_reading() -> BoundedConnection:
            connection = connect()
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            return connection

        self._link = Link(connect_for_reading, connect_for_reading(), monotonic)
        # Set in any thread, cleared in this one.
        self._is_server_demoted = False
        self._node = node
        self._schema = schema

    @property
    def _connection(self) -> BoundedConnection:
        return self._link.connection

    def leave_server(self) -> None:
        """Connect again before the next read: the server was found to be a standby.

        Reads from a standby would still succeed, but lack the new primary's commits. Thread-safe.
        """
        self._is_server_demoted = True

    def close(self) -> None:
        self._connection.close()

    def rest(self) -> float | None:
        return None

    def work(self, jobs: Sequence[Job[object]]) -> None:
        for job in jobs:
            assert isinstance(job, Read)
            if self._is_server_demoted:
                self._is_server_demoted = False
                self._connection.close()
            try:
                self._link.begin_job()
                job.settle(job.apply(self))
                if self._connection.closed:
                    # psycopg does not raise when it leaves a transaction whose connection is gone.
                    raise psycopg.OperationalError("the connection was closed")
            except TurnkeeperError as error:
                job.refuse(error)
            except UNENCODABLE as error:
                job.refuse(unencodable(error))
            except psycopg.Error as error:
                outcome = JournalUnavailable(f"reading the database failed: {error}; try again")
                outcome.__cause__ = error
                job.refuse(outcome)
            except Exception as error:  # noqa: BLE001 - handed to the caller
                bug = InvariantViolation(f"the journal cannot read for this call: {error!r}")
                bug.__cause__ = error
                job.refuse(bug)

    def _checked(self, read: Callable[[], T]) -> T:
        """Return what `read` returns; if it finds damage, what it returns within a transaction.

        Between two of its statements, another process may have deleted the log.
        """
        try:
            return read()
        except CorruptLog:
            with self._connection.transaction():
                return read()

    def read(self, name: str, after: int, limit: int, bytes_max: int) -> Sequence[StoredRecord]:
        def read() -> Sequence[StoredRecord]:
            tail = self._tail(name)
            upto = min(after + limit, tail.head)
            if upto <= after:
                return []
            return read_records(self._connection, tail, after, upto, bytes_max)

        return self._checked(read)

    def heads(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the seq at which each of these logs ends; a missing log is left out."""
        rows = self._connection.execute(
            "SELECT name, head FROM conversation WHERE name = ANY(%s)",
            ([name for name in names if "\0" not in name],),
        )
        return dict(rows.fetchall())

    def info(self, name: str) -> ConversationInfo:
        tail = self._checked(lambda: self._tail(name))
        return ConversationInfo(
            tail.name, tail.head, tail.epoch, tail.is_unfinished, tail.updated_us / 1_000_000
        )

    def list_slice(self, after: int) -> tuple[Sequence[ConversationInfo], int | None]:
        """Return the conversations of the next rows, and the last row's id; None at the end."""
        rows = self._connection.execute(_LIST.encode(), (after, _LIST_PAGE)).fetchall()
        infos = _infos(row[:-1] for row in rows if row[1])
        return infos, rows[-1][-1] if len(rows) == _LIST_PAGE else None

    def page(self, query: ListQuery) -> ListPage:
        return read_page(self._connection, query, self._node)

    def search(self, query: SearchQuery) -> SearchPage:
        return read_search_page(self._connection, query, self._schema)

    def words_of(self, name: str) -> LogWords | None:
        with self._connection.transaction():
            return read_words(self._connection, name)

    def logs_of_none(self) -> Sequence[int]:
        with self._connection.transaction():
            return logs_of_none(self._connection)

    def unowned_slice(self, after: int) -> tuple[Sequence[int], int | None]:
        """Return those of the next logs with records that are no conversation's, and the last one.

        None at the end, as in `list_slice`.
        """
        rows = self._connection.execute(_NEXT_LOGS, (after, _LIST_PAGE)).fetchall()
        unowned = [log for log, is_owned in rows if not is_owned]
        return unowned, rows[-1][0] if len(rows) == _LIST_PAGE else None

    def deleted_slice(self, after: int) -> tuple[Sequence[int], int | None]:
        """Return the deleted logs of the next rows, and the last row's id; None at the end."""
        rows = self._connection.execute(_NAMES, (after, _LIST_PAGE)).fetchall()
        logs = [log_number(name, each) for _, name, count in rows for each in range(count)]
        return logs, rows[-1][0] if len(rows) == _LIST_PAGE else None

    def find_abandoned(self, node: int) -> Sequence[ConversationInfo]:
        """Return the unfinished conversations that no living process but `node` owns."""
        return _infos(self._connection.execute(_ABANDONED, (node,)))

    def find_events(self, name: str, event_ids: Sequence[str]) -> Mapping[str, int]:
        with self._connection.transaction():
            return find_ids(self._connection, "event_id", self._tail(name), event_ids)

    def find_messages(self, name: str, message_ids: Sequence[str]) -> Mapping[str, int]:
        with self._connection.transaction():
            return find_ids(self._connection, "message_id", self._tail(name), message_ids)

    def rejections(self, name: str) -> Sequence[Rejection]:
        with self._connection.transaction():
            tail = read_tail(self._connection, name)
            rows = self._connection.execute(
                "SELECT at, violation, reason, payload FROM rejection WHERE log = %s "
                "ORDER BY at, id",
                (tail.log if tail else log_number(name, 0),),
            )
            return [Rejection(*row) for row in rows]

    def read_snapshot(self, name: str) -> Snapshot | None:
        """Return the snapshot if it is whole and its log still has the record at its seq."""
        row = None
        if "\0" not in name:  # PostgreSQL has no such text
            row = self._connection.execute(_SNAPSHOT, (name,), binary=True).fetchone()
        if row is None:
            self._checked(lambda: self._tail(name))  # it is not there, or its row is lost
            return None
        log, seq, version, tip, payload, found = row
        if seq is None or seal(log, seq, version, tip, content=payload) != found:
            return None
        tail = self._checked(lambda: self._tail(name))
        if find_mark(self._connection, tail, seq) != tip:
            return None
        return Snapshot(seq, version, payload)

    def _tail(self, name: str) -> Tail:
        tail = read_tail(self._connection, name)
        if tail is None or not tail.head:
            raise ConversationNotFound(name)
        return tail


def _infos(rows: Iterable[Sequence[Any]]) -> Sequence[ConversationInfo]:
    infos = [
        ConversationInfo(name, head, epoch, is_unfinished, updated_us / 1_000_000)
        for name, head, epoch, is_unfinished, updated_us in rows
    ]
    return sorted(infos, key=lambda info: info.conversation_id)
