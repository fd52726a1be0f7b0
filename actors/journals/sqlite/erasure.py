"""Removes the records of deleted conversations, a slice at a time, so that no deletion is long.

A deletion gives the name another log, in one short transaction that also lists the old log in the
table `erasure`. From then on no reader finds the old log. Each slice is a separate transaction,
which removes the newest remaining records and notes how far it got. If the process ends in between,
the next owner of the file removes the rest.

This module owns the rule that a record stays as long as a fork needs it: a log is needed exactly up
to the highest seq at which a fork of it begins. Deletions and slices run in the writer's
transactions.
"""

from __future__ import annotations

import sqlite3

from ...errors import CorruptLog
from ..shared.record_chain import seal
from .log import CHAIN

__all__ = ["begin_erasure", "erase_slice", "erasure_seal", "erasures", "is_whole", "needed"]

_RECORDS_MAX = 1_000
_BYTES_MAX = 8 << 20

_NEWEST = f"""
    {CHAIN}
    SELECT c.seq, c.previous, length(e.payload) + ifnull(
        (SELECT sum(length(p.data)) FROM part_use u JOIN part p USING (digest)
         WHERE u.log = :log AND u.seq = c.seq), 0)
    FROM chain c JOIN event e ON e.id = c.id
"""  # noqa: S608 - our own text
_DROP = f"{CHAIN} DELETE FROM event WHERE id IN (SELECT id FROM chain)"  # noqa: S608 - our own text
_DROP_PARTS = """
    DELETE FROM part
    WHERE digest IN (SELECT digest FROM part_use WHERE log = :log AND seq >= :first)
    AND NOT EXISTS (SELECT 1 FROM part_use u WHERE u.digest = part.digest
                    AND NOT (u.log = :log AND u.seq >= :first))
"""
_DROP_REJECTIONS = """
    DELETE FROM rejection WHERE id IN (SELECT id FROM rejection WHERE log = ? LIMIT ?)
"""


def begin_erasure(connection: sqlite3.Connection, log: int, last: int, head: int) -> None:
    """List a log whose records are to be removed; `last` is the id of its newest one, at `head`."""
    connection.execute(
        "INSERT OR REPLACE INTO erasure VALUES (?, ?, ?, ?)",
        (log, last, head, erasure_seal(log, last, head)),
    )


def erasure_seal(log: int, last: int, head: int) -> int:
    """Return the checksum of a row of the table `erasure`."""
    return seal(log, last, head)


def erasures(connection: sqlite3.Connection) -> list[int]:
    """Return the logs whose records are not removed yet."""
    if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'erasure'").fetchone():
        return []  # a file of an earlier version
    return [row[0] for row in connection.execute("SELECT log FROM erasure")]


def is_whole(connection: sqlite3.Connection, log: int) -> bool:
    """Return True if the row of a listed log passes its checksum."""
    last, head, found = connection.execute(
        "SELECT last, head, seal FROM erasure WHERE log = ?", (log,)
    ).fetchone()
    return bool(erasure_seal(log, last, head) == found)


def needed(connection: sqlite3.Connection, log: int) -> int:
    """Return the seq up to which forks need a log."""
    (seq,) = connection.execute(
        "SELECT ifnull(max(seq), 0) FROM fork WHERE parent = ?", (log,)
    ).fetchone()
    return int(seq)


def erase_slice(connection: sqlite3.Connection, log: int) -> int | None:
    """Remove some records of a listed log; return the log to go on with, or None at the end.

    The log to go on with is the same log, or its parent, if that was kept only for this fork.
    Raises `CorruptLog` if the records are not linked to each other.
    """
    row = connection.execute(
        "SELECT last, head, seal FROM erasure WHERE log = ?", (log,)
    ).fetchone()
    if row is None:
        return None  # it is done
    last, head, found = row
    if erasure_seal(log, last, head) != found:
        raise CorruptLog("?", head, "the row of a deleted log is damaged")
    if connection.execute(_DROP_REJECTIONS, (log, _RECORDS_MAX)).rowcount == _RECORDS_MAX:
        return log
    from .search import erase_words  # noqa: PLC0415 - a program that begins needs it not yet

    if erase_words(connection, log):
        return log
    parent, base = connection.execute(
        "SELECT parent, seq FROM fork WHERE log = ?", (log,)
    ).fetchone() or (0, 0)
    kept = needed(connection, log)
    first = max(kept, base) + 1
    if first <= head:
        last, head = _drop_newest(connection, log, last, head, first)
    if first <= head:
        begin_erasure(connection, log, last, head)
        return log
    connection.execute("DELETE FROM erasure WHERE log = ?", (log,))
    if kept or not base:
        return None
    connection.execute("DELETE FROM fork WHERE log = ?", (log,))
    if connection.execute("SELECT 1 FROM conversation WHERE log = ?", (parent,)).fetchone():
        return None
    # The parent was deleted before, and was kept for this fork among others. If it is listed
    # already, then from further up, or for a fork that began further down: in that case all
    # records up to here are still there, as this fork needed them until now.
    row = connection.execute("SELECT head FROM erasure WHERE log = ?", (parent,)).fetchone()
    if row is None or row[0] < base:
        begin_erasure(connection, parent, last, base)
    return int(parent)


def _drop_newest(
    connection: sqlite3.Connection, log: int, last: int, head: int, first: int
) -> tuple[int, int]:
    """Remove the newest records, none below `first`; return id and seq of the newest one left."""
    lowest = max(first, head - _RECORDS_MAX + 1)
    seq, before, size = head + 1, last, 0
    for seq, before, bytes_ in connection.execute(  # noqa: B007 - the lowest that is removed
        _NEWEST, {"log": log, "entry": last, "first": lowest}
    ):
        size += bytes_
        if size >= _BYTES_MAX:
            lowest = seq
            break
    changes = connection.total_changes
    if seq == lowest:
        connection.execute(_DROP, {"entry": last, "first": lowest})
    if connection.total_changes - changes != head - lowest + 1:
        raise CorruptLog("?", lowest, "records of a deleted conversation are missing")
    connection.execute(_DROP_PARTS, {"log": log, "first": lowest})
    connection.execute("DELETE FROM part_use WHERE log = ? AND seq >= ?", (log, lowest))
    return before, lowest - 1
