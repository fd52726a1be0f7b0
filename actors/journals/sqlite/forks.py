"""Forks and deletion: logs share prefixes, and a deletion keeps the records that a fork needs.

Owns the rule: a record stays as long as a conversation has it, as its own or as the prefix of a
fork. A fork names the log that has its last shared record. So a log is needed exactly up to the
highest seq at which a fork of it begins, and not at all once its conversation and its forks are
gone. All of this runs in the writer's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import (
    ConversationExists,
    ConversationNotFound,
    CorruptLog,
    Fenced,
    RecordNotFound,
)
from ...journal import Claim, Record
from .log import CHAIN, empty_tail, find_events, find_record, fork_seal
from .writer import SQLiteWriter

_DROP = f"{CHAIN} DELETE FROM event WHERE id IN (SELECT id FROM chain)"  # noqa: S608 - our own text
_RECORD_AT = f"{CHAIN} SELECT id FROM chain WHERE seq = :first"  # noqa: S608 - our own text
_DROP_PARTS = """
    DELETE FROM part WHERE digest IN (SELECT digest FROM part_use WHERE log = :log AND seq > :kept)
    AND NOT EXISTS (SELECT 1 FROM part_use u WHERE u.digest = part.digest
                    AND NOT (u.log = :log AND u.seq > :kept))
"""
_FORKS_OF = """
    WITH RECURSIVE descendant (log) AS (
        SELECT log FROM fork WHERE parent = ?
        UNION SELECT f.log FROM fork f JOIN descendant d ON f.parent = d.log
    )
    SELECT name FROM conversation JOIN descendant USING (log) ORDER BY name
"""


def fork(
    writer: SQLiteWriter,
    name: str,
    fork_name: str,
    at: int,
    records: Sequence[Record],
    *,
    is_unfinished: bool,
) -> Claim:
    """Begin a conversation with the records of another up to `at`."""
    parent = writer.load(name)
    if parent is None or not parent.head:
        raise ConversationNotFound(name)
    record = find_record(writer.connection, parent, at)
    if record is None:
        raise RecordNotFound(name, at, parent.head)
    found = writer.load(fork_name)
    if found is not None and found.head:
        known = find_events(writer.connection, found, [record.event_id for record in records])
        if found.forked_at == at and len(known) == len(records):
            return Claim(found.epoch, found.head)  # sent again
        raise ConversationExists(fork_name, found.head)
    child = found or empty_tail(fork_name, 0, 0, writer.now_us)
    shared = parent.log_of(at)
    child.last, child.tip = record
    child.head = child.forked_at = at
    child.prefix = (
        (shared, at),
        *((log, upto) for log, upto in parent.prefix if log != shared and upto < at),
    )
    # Above its parent's too, so that epochs never fall within a log.
    child.epoch = max(child.epoch, parent.epoch) + 1
    writer.store(child)
    writer.connection.execute(
        "INSERT INTO fork VALUES (?, ?, ?, ?)",
        (child.log, shared, at, fork_seal(child.log, shared, at)),
    )
    writer.begin_fork(child, records, is_unfinished=is_unfinished)
    return Claim(child.epoch, child.head)


def delete(writer: SQLiteWriter, name: str, epoch: int) -> tuple[int, Sequence[str]]:
    """Delete a conversation; return the number of records that stay, and the forks they serve."""
    tail = writer.load(name)
    if tail is None or not tail.head:
        raise ConversationNotFound(name)
    if tail.epoch != epoch:
        raise Fenced(
            name,
            epoch=epoch,
            expected_seq=tail.head + 1,
            found_epoch=tail.epoch,
            head=tail.head,
        )
    forks = [row[0] for row in writer.connection.execute(_FORKS_OF, (tail.log,))]
    kept = _needed(writer, tail.log)
    for table in ("snapshot", "rejection"):
        writer.connection.execute(f"DELETE FROM {table} WHERE log = ?", (tail.log,))  # noqa: S608 - our names
    # The name keeps its row, with a higher epoch and another log.
    rest = empty_tail(name, tail.incarnation + 1, tail.epoch + 1, writer.now_us)
    rest.number = tail.number
    writer.store(rest)
    _let_go(writer, name, tail.log, tail.last, tail.head)
    return kept, forks


def _let_go(writer: SQLiteWriter, name: str, log: int, last: int, head: int) -> None:
    """Delete the records of a log that no fork needs; `last` is its newest record, at `head`."""
    while True:
        row = writer.connection.execute(
            "SELECT parent, seq FROM fork WHERE log = ?", (log,)
        ).fetchone()
        parent, base = row or (0, 0)
        kept = _needed(writer, log)
        # The end of the prefix has to be found before the records that lead there are deleted.
        below = _record_at(writer, last, base) if base else 0
        first = max(kept, base) + 1
        if first <= head:
            changes = writer.connection.total_changes
            writer.connection.execute(_DROP, {"entry": last, "first": first})
            if writer.connection.total_changes - changes != head - first + 1:
                raise CorruptLog(name, first, "records are missing")
            places = {"log": log, "kept": first - 1}
            writer.connection.execute(_DROP_PARTS, places)
            writer.connection.execute(
                "DELETE FROM part_use WHERE log = :log AND seq > :kept", places
            )
        if kept or not base:
            return
        writer.connection.execute("DELETE FROM fork WHERE log = ?", (log,))
        if writer.connection.execute(
            "SELECT 1 FROM conversation WHERE log = ?", (parent,)
        ).fetchone():
            return
        # The parent was deleted before, and was kept for this fork among others.
        log, last, head = parent, below, base


def _needed(writer: SQLiteWriter, log: int) -> int:
    """Return the seq up to which forks need a log."""
    (seq,) = writer.connection.execute(
        "SELECT ifnull(max(seq), 0) FROM fork WHERE parent = ?", (log,)
    ).fetchone()
    return int(seq)


def _record_at(writer: SQLiteWriter, last: int, seq: int) -> int:
    row = writer.connection.execute(_RECORD_AT, {"entry": last, "first": seq}).fetchone()
    return int(row[0]) if row else 0
