"""Finds the records of a log in the file, and checks each one that it reads.

This module owns the layout that `schema` declares: a conversation's row says where its log ends,
each record names the previous one, and every 64th record is in an index (an anchor). A fork's first
record names a record of its parent's log, so the chain leads through the parent too. Only ids and
anchors have to be looked up separately under the logs that hold the prefix.

Nothing here writes. All functions must be called within one transaction.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias
from zlib import crc32

from ...errors import CorruptLog
from ...journal import READ_BYTES, READ_PAGE, StoredRecord, fitting
from ..shared.payload_parts import join
from ..shared.record_chain import (
    INCARNATIONS_LOOKED_FOR,
    first_mark,
    log_number,
    logs_of,
    next_mark,
    seal,
)
from .schema import ANCHOR_STEP, is_damage


class EventRow(NamedTuple):
    """A row of `event`, in the order of its columns."""

    id: int
    previous: int
    log: int
    seq: int
    epoch: int
    event_id: str
    kind: str
    message_id: str | None
    mark: int
    payload: bytes
    parts: str | None


@dataclass(slots=True)
class Tail:
    """A conversation's row: the end of its log, and the epoch that may append to it."""

    number: int
    name: str
    incarnation: int
    log: int
    epoch: int
    head: int
    last: int
    tip: int
    forked_at: int
    is_unfinished: bool
    updated_us: int
    prefix: tuple[tuple[int, int], ...] | None = None
    """None until `prefix_of` has read it."""

    def seal(self) -> int:
        return end_seal(
            self.begun_seal(),
            self.head,
            self.last,
            self.tip,
            self.forked_at,
            int(self.is_unfinished),
            self.updated_us,
        )

    def begun_seal(self) -> int:
        """Return the checksum of the facts that an append leaves as they are."""
        return crc32(f"{self.name}\0{self.incarnation} {self.log} {self.epoch} ".encode())

    def columns(self) -> tuple[object, ...]:
        """Return the columns of the row, but for its number."""
        return (
            self.name,
            self.incarnation,
            self.log,
            self.epoch,
            self.head,
            self.last,
            self.tip,
            self.forked_at,
            self.is_unfinished,
            self.updated_us,
            self.seal(),
        )


def end_seal(  # noqa: PLR0917 - called once an append, as `next_mark`
    begun: int, head: int, last: int, tip: int, forked_at: int, is_unfinished: int, updated_us: int
) -> int:
    """Return the seal of a conversation's row, given the checksum with which it begins."""
    facts = f"{head} {last} {tip} {forked_at} {is_unfinished} {updated_us}"
    return crc32(facts.encode(), begun)


# Any: the fields of a `Tail`, in their order, and the checksum with which its seal begins.
PackedTail: TypeAlias = tuple[Any, ...]

_fields_of: Callable[[Tail], PackedTail] = attrgetter(*(each.name for each in fields(Tail)))

EPOCH, HEAD, FORKED_AT = (
    [each.name for each in fields(Tail)].index(name) for name in ("epoch", "head", "forked_at")
)
"""The places of these fields in a packed tail."""


def pack_tail(tail: Tail) -> PackedTail:
    return (*_fields_of(tail), tail.begun_seal())


def unpack_tail(packed: PackedTail) -> Tail:
    return Tail(*packed[:-1])


def empty_tail(name: str, incarnation: int, epoch: int, updated_us: int) -> Tail:
    """Return a conversation without records, whose row has no number yet."""
    log = log_number(name, incarnation)
    return Tail(
        0,
        name,
        incarnation,
        log,
        epoch,
        0,
        0,
        first_mark(log),
        0,
        is_unfinished=False,
        updated_us=updated_us,
    )


def read_tail(connection: sqlite3.Connection, name: str) -> Tail | None:
    """Return a conversation's row, checked against its seal and the last record of its log."""
    row = connection.execute("SELECT * FROM conversation WHERE name = ?", (name,)).fetchone()
    if row is None:
        _refuse_if_hidden(connection, name)
        return None
    tail = tail_of_row(row)
    if tail.name != name:
        raise CorruptLog(name, 0, "its own row is damaged")
    if tail.head:
        last = connection.execute(
            "SELECT seq, mark FROM event WHERE id = ?", (tail.last,)
        ).fetchone()
        if last != (tail.head, tail.tip):
            raise CorruptLog(name, tail.head, "its last record is missing or damaged")
    return tail


def _refuse_if_hidden(connection: sqlite3.Connection, name: str) -> None:
    """Raise `CorruptLog` if the file has records of a name for which no row was found.

    A repair gives such records another name, and then this one is free again.
    """
    logs = logs_of(name)
    if connection.execute(_FIND_LOGS, logs).fetchone():
        raise CorruptLog(name, 0, "an index hides its own row")
    has_records = connection.execute(_FIND_FIRST, (*logs, *logs)).fetchone()
    if has_records and _find_recovered(connection, name) is None:
        raise CorruptLog(name, 1, "it has records, but its own row is missing")


def recovered_name(log: int) -> str:
    """Return the name that a repair gives to a log whose own name is lost."""
    return f"recovered-{log}"


def logs_without_conversation(logs: Iterable[int], tails: Collection[Tail]) -> set[int]:
    """Return the logs that no conversation explains, given all conversations of the file.

    Each conversation explains its own log, and those that were deleted under its name: forks may
    need their records. One that a repair has named explains the log that lost its name.
    """
    unexplained = set(logs).difference(tail.log for tail in tails)
    if unexplained:
        names = {tail.name for tail in tails}
        unexplained = {log for log in unexplained if recovered_name(log) not in names}
    if unexplained:
        unexplained.difference_update(
            log_number(tail.name, each) for tail in tails for each in range(tail.incarnation)
        )
    return unexplained


def _find_recovered(connection: sqlite3.Connection, name: str) -> tuple[int, Tail] | None:
    """Return the newest incarnation of a name that a repair has renamed, and its tail, or None."""
    if connection.execute(_FIND_ANY_RECOVERED).fetchone() is None:
        return None  # as in most files, for each conversation that is begun
    names = [recovered_name(log) for log in logs_of(name)]
    rows = connection.execute(_FIND_NAMES, names).fetchall()
    found = [(names.index(row[1]), row) for row in rows]
    if not found:
        return None
    incarnation, row = max(found)
    return incarnation, tail_of_row(row)


def find_renamed(connection: sqlite3.Connection, name: str, updated_us: int) -> Tail | None:
    """Return the tail with which a conversation goes on whose log a repair has renamed, or None.

    It is not stored yet. It begins as a fork of the old log, as the conversation does that has the
    new name. If that one was deleted, it is empty.
    """
    found = _find_recovered(connection, name)
    if found is None:
        return None
    incarnation, renamed = found
    tail = empty_tail(name, incarnation + 1, renamed.epoch, updated_us)
    if renamed.incarnation == 0 and renamed.forked_at:
        record = find_record(connection, renamed, renamed.forked_at)
        if record is None:
            raise CorruptLog(name, renamed.forked_at, "the record is missing")
        tail.last, tail.tip = record
        tail.head = tail.forked_at = renamed.forked_at
        tail.prefix = prefix_of(connection, renamed)
        tail.is_unfinished = True
    return tail


_EACH = ", ".join("?" * INCARNATIONS_LOOKED_FOR)
_FIND_LOGS = f"SELECT 1 FROM conversation WHERE log IN ({_EACH})"  # noqa: S608 - our own text
_FIND_NAMES = f"SELECT * FROM conversation WHERE name IN ({_EACH})"  # noqa: S608 - as above
_FIND_ANY_RECOVERED = "SELECT 1 FROM conversation WHERE name > 'recovered-' AND name < 'recovered.'"
# The first record of a log, or the row that says where a fork begins.
_FIND_FIRST = f"""
    SELECT 1 FROM event WHERE log IN ({_EACH}) AND seq = 1 AND seq & 63 = 1
    UNION ALL SELECT 1 FROM fork WHERE log IN ({_EACH})
"""  # noqa: S608 - as above


def tail_of_row(row: Sequence[Any]) -> Tail:
    """Return a row of `conversation` as a tail, checked against its own seal."""
    *facts, found = row
    tail = Tail(*facts)
    tail.is_unfinished = bool(tail.is_unfinished)
    if tail.seal() != found or tail.log != log_number(tail.name, tail.incarnation):
        raise CorruptLog(tail.name, 0, "its own row is damaged")
    return tail


def fork_seal(log: int, parent: int, seq: int) -> int:
    return seal(log, parent, seq)


# The rows that lead from a fork to its first ancestor, nearest first, as one value: see
# `_READ_EVENTS`. The seqs have to fall strictly, so this ends even if the rows are damaged.
_READ_PREFIX = """
    WITH RECURSIVE prefix (log, parent, seq, seal, is_below) AS (
        SELECT log, parent, seq, seal, 1 FROM fork WHERE log = ?
        UNION ALL
        SELECT f.log, f.parent, f.seq, f.seal, f.seq < p.seq
        FROM prefix p JOIN fork f ON f.log = p.parent WHERE p.is_below
    )
    SELECT json_group_array(json_array(log, parent, seq, seal, is_below)) FROM prefix
"""


def prefix_of(connection: sqlite3.Connection, tail: Tail) -> tuple[tuple[int, int], ...]:
    """Return the logs that hold a fork's prefix, nearest first, each with its last shared seq.

    They are read when a caller first needs them: a fork may have hundreds of ancestors, and most
    reads are of its own records.
    """
    if tail.prefix is None:
        tail.prefix = _read_prefix(connection, tail) if tail.forked_at else ()
    return tail.prefix


def log_of(connection: sqlite3.Connection, tail: Tail, seq: int) -> int:
    """Return the log that the record at `seq` is stored under."""
    found = tail.log
    if seq <= tail.forked_at:
        for log, upto in prefix_of(connection, tail):
            if seq > upto:
                break
            found = log
    return found


def _read_prefix(connection: sqlite3.Connection, tail: Tail) -> tuple[tuple[int, int], ...]:
    damage = CorruptLog(tail.name, tail.forked_at, "the row that names its parent is damaged")
    try:
        (rows,) = connection.execute(_READ_PREFIX, (tail.log,)).fetchone()
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        raise damage from error
    prefix = []
    for log, parent, seq, found, is_below in json.loads(rows):
        if found != fork_seal(log, parent, seq) or not is_below:
            raise damage
        prefix.append((parent, seq))
    if not prefix:
        raise CorruptLog(tail.name, tail.forked_at, "the row that names its parent is missing")
    if prefix[0][1] != tail.forked_at:
        raise damage
    return tuple(prefix)


# --- records --------------------------------------------------------------------------------------

_FIND_ANCHOR = "SELECT id FROM event WHERE log = ? AND seq = ? AND seq & 63 = 1"

# Follows `previous` backwards from a known record. The seq falls by one in each step, so this ends
# even if the rows are damaged.
CHAIN = """
    WITH RECURSIVE chain (id, previous, seq) AS (
        SELECT id, previous, seq FROM event WHERE id = :entry
        UNION ALL
        SELECT e.id, e.previous, e.seq FROM chain c JOIN event e ON e.id = c.previous
        WHERE c.seq > :first AND e.seq = c.seq - 1
    )
"""
_FIND_ONE = (
    f"{CHAIN} SELECT e.id, e.mark FROM chain c JOIN event e ON e.id = c.id WHERE c.seq = :first"  # noqa: S608 - our own text
)

# SQLite aggregates each column into one value, newest first, in the order of the chain. Fetching
# row by row would release the interpreter lock and wait for a busy event loop each time.
_READ_EVENTS = f"""
    {CHAIN}
    SELECT json_group_array(e.epoch), json_group_array(e.event_id), json_group_array(e.kind),
           json_group_array(e.message_id), json_group_array(e.mark), json_group_array(e.parts),
           json_group_array(length(e.payload)), CAST(group_concat(e.payload, '') AS BLOB)
    FROM chain c JOIN event e ON e.id = c.id WHERE c.seq <= :upto
"""  # noqa: S608 - our own text
# What each record takes in memory, without its parts: less than the whole payload has.
_READ_SIZES = f"""
    {CHAIN}
    SELECT json_group_array(length(e.payload) + coalesce(length(e.parts), 0))
    FROM chain c JOIN event e ON e.id = c.id WHERE c.seq <= :upto
"""  # noqa: S608 - our own text


_record = partial(tuple.__new__, StoredRecord)
"""Makes a `StoredRecord` of a tuple of its fields, in a third of the time that its call takes."""


def find_entry(connection: sqlite3.Connection, tail: Tail, seq: int) -> int:
    """Return the id of a record at or shortly after `seq`, from which the chain leads to it."""
    anchor = seq + (1 - seq) % ANCHOR_STEP
    if anchor >= tail.head:
        return tail.last
    row = connection.execute(_FIND_ANCHOR, (log_of(connection, tail, anchor), anchor)).fetchone()
    if row is None:
        raise CorruptLog(tail.name, anchor, "the record is missing")
    return int(row[0])


def find_record(connection: sqlite3.Connection, tail: Tail, seq: int) -> tuple[int, int] | None:
    """Return the id and the mark of the record at `seq`, or None if the log has none."""
    if not 1 <= seq <= tail.head:
        return None
    found: tuple[int, int] | None = connection.execute(
        _FIND_ONE, {"entry": find_entry(connection, tail, seq), "first": seq}
    ).fetchone()
    return found


def read_records(
    connection: sqlite3.Connection,
    tail: Tail,
    after: int,
    upto: int,
    bytes_max: int = READ_BYTES,
) -> list[StoredRecord]:
    """Return the page of records above `after` up to and including `upto`, each checked.

    It ends sooner if its payloads are large (see `READ_BYTES`), and has one record at least.
    Each mark is checked against the previous mark. The mark at `after` itself is trusted: a caller
    that reads from the beginning has checked it with the previous page.
    """
    # It reads numbers in a third of the time of `json`.
    from pydantic_core import from_json  # noqa: PLC0415 - a program that begins needs it not yet

    first = max(after, 1)
    try:
        fetched = _fetch_page(connection, tail, first, upto, bytes_max)
        if fetched is None:
            upto = _end_of_page(connection, tail, after, upto, bytes_max)
            fetched = _fetch(connection, tail, _READ_EVENTS, first, upto)
        *columns, payloads = fetched
        columns = [from_json(column, cache_strings="none") for column in columns]
    except (ValueError, sqlite3.DatabaseError) as error:
        if not (isinstance(error, ValueError) or is_damage(error)):
            raise
        raise CorruptLog(tail.name, after + 1, f"it cannot be read ({error})") from error
    payloads = payloads or b""
    end = len(payloads)
    _check_chain(tail, first, upto, len(columns[0]))
    rows = zip(*map(reversed, columns), strict=True)
    if after:
        *_, mark, _, size = next(rows)
        end -= size
    else:
        mark = first_mark(log_of(connection, tail, 1))
    seq, begin, joined = after, end, 0
    records: list[StoredRecord] = []
    for epoch, event_id, kind, message_id, found_mark, parts, size in rows:
        # Without parts, the page was fetched so that it ends where it must.
        if joined and len(records) > 1 and begin - end + joined >= bytes_max:
            return records
        seq += 1
        payload = payloads[end - size : end]
        end -= size
        if parts is not None:
            payload = _join(connection, tail, seq, payload, parts)
            joined += len(payload) - size
        mark = next_mark(mark, seq, epoch, event_id, kind, message_id, payload)
        if found_mark != mark:
            raise CorruptLog(tail.name, seq, "the record is missing, or fails its checksum")
        records.append(_record((seq, epoch, event_id, kind, payload, message_id)))
    if upto == tail.head and mark != tail.tip:
        raise CorruptLog(tail.name, upto, "the last record fails its checksum")
    return records


def records_of(
    connection: sqlite3.Connection, tail: Tail, after: int, upto: int
) -> Iterator[StoredRecord]:
    """Yield the records above `after` up to and including `upto`, which are read by pages."""
    while after < upto:
        page = read_records(connection, tail, after, min(after + READ_PAGE, upto))
        yield from page
        after += len(page)


# Any: a row, whose columns the statement decides.
def _fetch(
    connection: sqlite3.Connection, tail: Tail, statement: str, first: int, upto: int
) -> tuple[Any, ...]:
    entry = find_entry(connection, tail, upto)
    found: tuple[Any, ...] = connection.execute(
        statement, {"entry": entry, "first": first, "upto": upto}
    ).fetchone()
    return found


_LENGTH_MAX: Final = (1 << 31) - 1
"""The largest limit of a length that SQLite takes; its own is smaller."""


def _fetch_page(
    connection: sqlite3.Connection, tail: Tail, first: int, upto: int, bytes_max: int
) -> tuple[Any, ...] | None:
    """Return the columns of these records, or None if they are too large for one page.

    SQLite itself stops then. To add up the sizes before would cost every page a second walk along
    the chain.
    """
    length = min(max(0, bytes_max - 1), _LENGTH_MAX)
    before = connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, length)
    try:
        return _fetch(connection, tail, _READ_EVENTS, first, upto)
    except sqlite3.DataError:
        return None
    finally:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, before)


def _end_of_page(
    connection: sqlite3.Connection, tail: Tail, after: int, upto: int, bytes_max: int
) -> int:
    """Return the seq that the page above `after` ends at, as far as its records have no parts."""
    first = max(after, 1)
    (found,) = _fetch(connection, tail, _READ_SIZES, first, upto)
    sizes: list[int] = json.loads(found)
    _check_chain(tail, first, upto, len(sizes))
    sizes.reverse()
    return after + fitting(sizes[1:] if after else sizes, bytes_max)


def _check_chain(tail: Tail, first: int, upto: int, count: int) -> None:
    """Raise `CorruptLog` unless the chain led down to the lowest seq that was wanted."""
    lowest = upto + 1 - count
    if lowest != first:
        # It stops at the first broken link.
        raise CorruptLog(tail.name, lowest - 1, "the record is missing")


def _join(
    connection: sqlite3.Connection, tail: Tail, seq: int, payload: bytes, parts: str
) -> bytes:
    def fetch(digest: bytes) -> bytes:
        row = connection.execute("SELECT data FROM part WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            raise CorruptLog(tail.name, seq, "a large part of it is missing")
        data: bytes = row[0]
        return data

    try:
        return join(payload, parts, fetch)
    except (ValueError, TypeError) as error:
        raise CorruptLog(tail.name, seq, "its large parts are damaged") from error


# --- ids ------------------------------------------------------------------------------------------


def find_events(
    connection: sqlite3.Connection, tail: Tail, event_ids: Iterable[str]
) -> dict[str, int]:
    """Return the seqs of those event ids that the log has."""
    return _find(connection, "event_id", tail, event_ids)


def find_messages(
    connection: sqlite3.Connection, tail: Tail, message_ids: Iterable[str]
) -> dict[str, int]:
    """Return the seqs of those message ids that the log has."""
    return _find(connection, "message_id", tail, message_ids)


# An id that is in fewer logs than this is found by one statement over all logs.
_LOGS_AT_ONCE = 16


def _find(
    connection: sqlite3.Connection, column: str, tail: Tail, ids: Iterable[str]
) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in ids:
        if tail.forked_at:
            # Hardly any id is in a second log, and a fork may have hundreds of ancestors.
            places = connection.execute(
                f"SELECT log, seq FROM event WHERE {column} = ? LIMIT {_LOGS_AT_ONCE}",  # noqa: S608 - our names
                (one,),
            ).fetchall()
            if len(places) < _LOGS_AT_ONCE:
                ends = {tail.log: tail.head}
                if places:
                    ends.update(prefix_of(connection, tail))
                found.update((one, seq) for log, seq in places if seq <= ends.get(log, 0))
                continue
        for log, upto in ((tail.log, tail.head), *prefix_of(connection, tail)):
            row = connection.execute(
                f"SELECT seq FROM event WHERE {column} = ? AND log = ?",  # noqa: S608 - our names
                (one, log),
            ).fetchone()
            if row is not None and row[0] <= upto:
                found[one] = row[0]
    return found
