"""Finding the records of a log in PostgreSQL, and checking them.

As in the SQLite file, a conversation's row says where its log ends, a fork's prefix stays in the
logs that it was forked from, and each record is checked against the previous one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from ...errors import CorruptLog
from ...journal import READ_BYTES, Record, StoredRecord
from ..shared.record_chain import first_mark, log_number, logs_of, next_mark

TAIL = """
    c.id, c.name, c.incarnation, c.log, c.owner, c.epoch, c.head, c.tip, c.forked_at,
    c.is_unfinished, c.updated_us
"""
"""The columns of a `Tail`. They are named, since a newer version may have added others."""


@dataclass(slots=True)
class Tail:
    """A conversation's row: the end of its log, and its owner."""

    number: int
    name: str
    incarnation: int
    log: int
    owner: int | None
    epoch: int
    head: int
    tip: int
    forked_at: int
    is_unfinished: bool
    updated_us: int
    prefix: tuple[tuple[int, int], ...] = ()
    """The logs that hold a fork's prefix, nearest first, each with the prefix's last seq in it."""
    listed: tuple[str, int, str] | None = None
    """The owner, time of creation and labels of its row in `listing`, if this process wrote it."""

    def parts(self, after: int, upto: int) -> list[tuple[int, int, int]]:
        """Return the logs that hold the records after `after` up to `upto`: log, after, up to."""
        parts = []
        bases = (*(seq for _, seq in self.prefix), 0)
        for (log, last), base in zip(((self.log, self.head), *self.prefix), bases, strict=True):
            above, below = max(after, base), min(upto, last)
            if above < below:
                parts.append((log, above, below))
        return parts

    def log_of(self, seq: int) -> int:
        """Return the log that holds the record at `seq`."""
        return self.parts(seq - 1, seq)[0][0]


def empty_tail(name: str, incarnation: int) -> Tail:
    log = log_number(name, incarnation)
    return Tail(0, name, incarnation, log, None, 0, 0, first_mark(log), 0, False, 0)


def read_tail(connection: psycopg.Connection[Any], name: str, *, and_lock: str = "") -> Tail | None:
    """Read a conversation's row; `and_lock` is the statement's locking clause.

    Raises `CorruptLog` if the row is lost, and the records are still there.
    """
    if "\0" in name:
        return None  # PostgreSQL has no such text
    statement = f"SELECT {TAIL} FROM conversation c WHERE name = %s {and_lock}"  # noqa: S608 - our own text
    row = connection.execute(statement.encode(), (name,)).fetchone()
    if row is None:
        refuse_if_lost(connection, name)
        return None
    return with_prefix(connection, tail_of_row(row))


# The ORDER BY has PostgreSQL look for one record of each log in the index, whatever it knows of the
# table; else it may read the whole table, to find none.
RECORDS_OF = """FROM unnest({}) AS of(log) CROSS JOIN LATERAL (
    SELECT FROM event e WHERE e.log = of.log ORDER BY e.seq LIMIT 1
) AS first"""
"""The clause of a statement that has a row for each of these logs that has records."""
_FIND_LOST = f"""
    SELECT 1 {RECORDS_OF.format("%s::bigint[]")} WHERE NOT EXISTS (
        SELECT FROM conversation WHERE name = %s AND (head > 0 OR incarnation > 0)
    )
""".encode()  # noqa: S608 - our own text


def refuse_if_lost(connection: psycopg.Connection[Any], name: str) -> None:
    """Raise `CorruptLog` if there are records of a conversation that had no row.

    If another process has begun it since, they are its own, and nothing is raised.
    """
    if connection.execute(_FIND_LOST, (logs_of(name), name)).fetchone() is not None:
        raise CorruptLog(name, 1, "it has records, but its own row is missing")


def tail_of_row(row: Sequence[Any]) -> Tail:
    return Tail(*row)


def with_prefix(connection: psycopg.Connection[Any], tail: Tail) -> Tail:
    if tail.forked_at:
        tail.prefix = tuple(
            connection.execute(
                """
                WITH RECURSIVE prefix AS (
                    SELECT parent, seq FROM fork WHERE log = %s
                    UNION ALL
                    SELECT f.parent, f.seq FROM fork f JOIN prefix p ON f.log = p.parent
                )
                SELECT parent, seq FROM prefix ORDER BY seq DESC
                """,
                (tail.log,),
            ).fetchall()
        )
        if not tail.prefix or tail.prefix[0][1] != tail.forked_at:
            raise CorruptLog(tail.name, tail.forked_at, "the log it was forked from is missing")
    return tail


_COLUMNS = "seq, epoch, event_id, kind, message_id, mark, payload"
# The payloads behind the end of the page are NULL (see `fitting`): the server need not read them,
# and the client, which receives all rows at once, need not hold them. Each row has the mark before
# the page, too: to ask for it apart would take another round trip.
_PAGE = """
    SELECT seq, epoch, event_id, kind, message_id, mark, CASE
        WHEN row_number() OVER before <= 2 OR sum(octet_length(payload)) OVER before < %s
        THEN payload END, (SELECT mark FROM event WHERE log = %s AND seq = %s)
"""
_BEFORE = "WINDOW before AS (ORDER BY seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
_READ_EVENTS = f"""
    {_PAGE} FROM event WHERE log = %s AND seq > %s AND seq <= %s {_BEFORE} ORDER BY seq
""".encode()
# One round trip, however many logs hold the records. OFFSET 0 has PostgreSQL look each of them up
# in the index, whatever it knows of the table.
_READ_PARTS = f"""
    {_PAGE} FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[]) AS p(log, above, below)
    CROSS JOIN LATERAL (
        SELECT {_COLUMNS} FROM event
        WHERE log = p.log AND seq > p.above AND seq <= p.below OFFSET 0
    ) e {_BEFORE} ORDER BY seq
""".encode()  # noqa: S608 - our own text


def read_records(
    connection: psycopg.Connection[Any],
    tail: Tail,
    after: int,
    upto: int,
    bytes_max: int = READ_BYTES,
) -> list[StoredRecord]:
    """Read the page of records above `after` up to `upto` inclusive (see `READ_BYTES`).

    Each is checked against its predecessor. The mark at `after` itself is trusted: a caller that
    reads from the beginning has checked it with the previous page. Raises `CorruptLog` at the first
    record that is missing or differs from the one written.
    """
    mark = None if after else first_mark(tail.log_of(1))
    known = (tail.log_of(after), after) if after else (None, None)
    records: list[StoredRecord] = []
    seq = after
    parts = tail.parts(after, upto)
    values: Sequence[object]
    statement, values = _READ_EVENTS, parts[0]
    if len(parts) > 1:
        statement, values = _READ_PARTS, [list(column) for column in zip(*parts, strict=True)]
    rows = connection.execute(statement, (bytes_max, *known, *values), binary=True)
    for found_seq, epoch, event_id, kind, message_id, found, payload, before in rows:
        if payload is None:
            return records
        if mark is None:
            if before is None:
                raise CorruptLog(tail.name, after, "the record is missing")
            mark = before
        seq += 1
        mark = next_mark(mark, seq, epoch, event_id, kind, message_id, payload)
        if found_seq != seq or found != mark:
            raise CorruptLog(tail.name, seq, "the record is missing or was changed")
        records.append(StoredRecord(seq, epoch, event_id, kind, payload, message_id))
    if seq != upto:
        raise CorruptLog(tail.name, seq + 1, "the record is missing")
    if upto == tail.head and mark != tail.tip:
        raise CorruptLog(tail.name, upto, "the last record was changed")
    return records


def find_mark(connection: psycopg.Connection[Any], tail: Tail, seq: int) -> int | None:
    """Return the mark of the record at `seq`; None if the log has no such record."""
    if not 1 <= seq <= tail.head:
        return None
    row = connection.execute(
        "SELECT mark FROM event WHERE log = %s AND seq = %s", (tail.log_of(seq), seq)
    ).fetchone()
    return None if row is None else int(row[0])


def find_ids(
    connection: psycopg.Connection[Any], column: str, tail: Tail, ids: Iterable[str]
) -> dict[str, int]:
    """Return the seqs of those event ids or message ids (`column`) that the log has."""
    wanted = [one for one in ids if "\0" not in one]  # PostgreSQL has no such text
    if not wanted:
        return {}
    logs = ((tail.log, tail.head), *tail.prefix)
    statement = f"""
        SELECT e.{column}, e.seq FROM event e
        JOIN unnest(%s::bigint[], %s::bigint[]) AS l(log, upto) USING (log)
        WHERE e.{column} = ANY(%s) AND e.seq <= l.upto
    """  # noqa: S608 - our own names
    rows = connection.execute(
        statement.encode(),
        ([log for log, _ in logs], [upto for _, upto in logs], wanted),
    ).fetchall()
    return dict(rows)


def has_records(
    connection: psycopg.Connection[Any],
    tail: Tail,
    records: Sequence[Record],
    known_events: Mapping[str, int],
) -> bool:
    """Return True if the log has all these records; `known_events` are their ids that it has."""
    if any(record.event_id not in known_events for record in records):
        return False
    places = [(tail.log_of(seq), seq) for seq in known_events.values()]
    rows = connection.execute(
        "SELECT e.event_id, e.kind, e.payload, e.message_id FROM event e "
        "JOIN unnest(%s::bigint[], %s::bigint[]) AS p(log, seq) USING (log, seq)",
        ([log for log, _ in places], [seq for _, seq in places]),
        binary=True,
    ).fetchall()
    found = {row[0]: row for row in rows}
    return all(found.get(record.event_id) == record for record in records)
