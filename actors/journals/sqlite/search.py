"""The index of words in the SQLite file: filled in slices, read a page at a time.

The writer's thread fills it between its commits, after a cursor: the id of the last event that was
read. A slice is one transaction, of bounded size and with few statements, since each statement
releases the interpreter lock and may have to wait for a busy event loop to get it back.

The words are in an FTS5 table over the column `search_message.words`. Python splits texts into
words, so that every journal has the same words; the tokenizer `ascii` leaves them unchanged. The
index can be rebuilt: a file that has lost it is indexed again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...errors import JournalRefused
from ...journal import FoundMessage, SearchPage, SearchQuery, StoredRecord
from ...values.words import WORD_RULES
from ..shared import searching
from ..shared.payload_parts import join
from ..shared.record_chain import first_mark, next_mark
from ..shared.searching import (
    CHANGES_USER,
    LEFT,
    NUMBER_SPAN,
    SEARCHED_KINDS,
    Candidate,
    IndexedMessage,
    LogWords,
    Said,
    fill_search_page,
    find_said,
    found_message,
    has_owner,
    has_rest,
    left_ids,
    message_number,
    owner_word,
    scope_words,
    stored_words,
)

__all__ = [
    "FileWords",
    "erase_words",
    "has_search",
    "index_slice",
    "is_clean",
    "join_slice",
    "merge_slice",
    "read_search_page",
    "start_search",
]

_EVENTS_MAX = 512
_MESSAGES_MAX = 64
_BYTES_MAX = 512 << 10
"""A slice reads this many events at most, and indexes messages of about this many bytes, which
takes some milliseconds."""
_OWNERS_MAX = 32
_ERASED_MAX = 64
_MERGED_PAGES = 64
_MERGED_MESSAGES_MAX = 50_000
"""Merging the pages of this many messages takes about half a second."""
_SECURE_DELETE_MIN = (3, 42)

_CREATE = """
    CREATE VIRTUAL TABLE search_word USING fts5 (
        words, content = 'search_message', content_rowid = 'id', tokenize = 'ascii',
        detail = 'column', columnsize = 0
    )
"""


def has_search(connection: sqlite3.Connection) -> bool:
    """Return True if the file has an index of words by these rules."""
    row = connection.execute("SELECT rules FROM search").fetchone()
    return row is not None and row[0] == WORD_RULES


def start_search(connection: sqlite3.Connection) -> None:
    """Make an empty index, unless the file has one. Raise `JournalRefused` without FTS5."""
    if has_search(connection):
        _erase_at_once(connection)
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute("DROP TABLE IF EXISTS search_word")
        for table in ("search", "search_message", "search_again"):
            connection.execute(f"DELETE FROM {table}")  # noqa: S608 - our own names
        connection.execute(_CREATE)
        # Two segments are enough for `join_slice`.
        connection.execute("INSERT INTO search_word (search_word, rank) VALUES ('usermerge', 2)")
        connection.execute("INSERT INTO search VALUES (0, 0, ?, 1)", (WORD_RULES,))
        _erase_at_once(connection)
        connection.execute("COMMIT")
    except BaseException as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError) and "no such module" in str(error):
            raise JournalRefused(
                "search needs FTS5, which this SQLite was built without; nothing was changed; use "
                "another build of Python, or open the journal without search=True"
            ) from error
        raise


def _erase_at_once(connection: sqlite3.Connection) -> None:
    """Have FTS5 overwrite deleted words, if it can; `merge_slice` is for versions that cannot."""
    if sqlite3.sqlite_version_info >= _SECURE_DELETE_MIN:
        connection.execute(
            "INSERT INTO search_word (search_word, rank) VALUES ('secure-delete', 1)"
        )


def is_clean(connection: sqlite3.Connection) -> bool:
    """Return True if no word of a deleted message is left in the pages of the index."""
    row = connection.execute("SELECT is_clean FROM search").fetchone()
    return row is None or bool(row[0])


# --- a slice --------------------------------------------------------------------------------------


class _Facts(NamedTuple):
    """A row of `event` that the index looks at, without its payload."""

    id: int
    log: int
    seq: int
    kind: str
    size: int
    parts: str | None
    name: str
    owner: str


_KINDS = ", ".join(f"'{kind}'" for kind in SEARCHED_KINDS)
_NEXT = f"""
    SELECT json_group_array(json_array(id, log, seq, kind, size, parts, name, owner)),
        (SELECT max(id) FROM (SELECT id FROM event WHERE id > :cursor ORDER BY id LIMIT :limit))
    FROM (
        SELECT e.id, e.log, e.seq, e.kind, length(e.payload) AS size, e.parts, c.name,
            ifnull(l.owner, '') AS owner
        FROM (SELECT * FROM event WHERE id > :cursor ORDER BY id LIMIT :limit) e
        JOIN conversation c ON c.log = e.log
        LEFT JOIN listing l ON l.conversation = c.id
        WHERE e.kind IN ({_KINDS}) ORDER BY e.id
    )
"""  # noqa: S608 - our own text
_PAYLOADS = """
    SELECT json_group_array(json_array(e.id, length(e.payload))),
        CAST(group_concat(e.payload, '') AS BLOB)
    FROM json_each(?) j CROSS JOIN event e ON e.id = j.value
"""
_INSERT = """
    INSERT INTO search_message
    SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, 0, value ->> 4, value ->> 5
    FROM json_each(?)
"""
_INSERT_WORDS = """
    INSERT INTO search_word (rowid, words)
    SELECT m.id, m.words FROM json_each(?) j CROSS JOIN search_message m ON m.id = j.value
"""
_DELETE_WORDS = """
    INSERT INTO search_word (search_word, rowid, words)
    SELECT 'delete', m.id, m.words
    FROM json_each(?) j CROSS JOIN search_message m ON m.id = j.value
"""
# For a log whose owner changed without an event, because its caller writes no listings.
_NOTE_OWNERS = """
    INSERT OR IGNORE INTO search_again SELECT j.value ->> 0 FROM json_each(?) j
    WHERE (SELECT owner FROM search_message WHERE log = j.value ->> 0 ORDER BY seq DESC LIMIT 1)
        <> j.value ->> 1
"""
_MARK_LEFT = """
    UPDATE search_message SET left_view = max(left_view, :how)
    WHERE log = :log AND seq IN (
        SELECT e.seq FROM json_each(:ids) j CROSS JOIN event e
        ON e.event_id = j.value AND e.log = :log
    )
"""


def index_slice(connection: sqlite3.Connection, now_us: int) -> bool:
    """Index the next events; return True if there are more.

    Events of deleted conversations are skipped: their words must not be found, even if a fork needs
    the events.
    """
    row = connection.execute("SELECT cursor FROM search").fetchone()
    if row is None:
        return False
    cursor = row[0]
    is_again = _exchange_owners(connection)
    found, last = connection.execute(_NEXT, {"cursor": cursor, "limit": _EVENTS_MAX}).fetchone()
    if last is None:
        if not is_again:
            connection.execute("UPDATE search SET complete_us = ?", (now_us,))
        return is_again
    facts, upto = _first_of([_Facts(*row) for row in json.loads(found)], last)
    _index(connection, facts)
    (newest,) = connection.execute("SELECT max(id) FROM event").fetchone()
    is_more = upto < newest or is_again or _is_any_again(connection)
    connection.execute("UPDATE search SET cursor = ?", (upto,))
    if not is_more:
        connection.execute("UPDATE search SET complete_us = ?", (now_us,))
    return is_more


def _first_of(facts: Sequence[_Facts], last: int) -> tuple[Sequence[_Facts], int]:
    """Return the events that one slice takes, and the id at which the slice ends."""
    size = 0
    for at, one in enumerate(facts):
        size += one.size + (one.parts is not None) * _BYTES_MAX // 2  # parts may be large
        if at and (at == _MESSAGES_MAX or size > _BYTES_MAX):
            return facts[:at], one.id - 1
    return facts, last


def _index(connection: sqlite3.Connection, facts: Sequence[_Facts]) -> None:
    connection.execute(_NOTE_OWNERS, (json.dumps([(one.log, one.owner) for one in facts]),))
    payloads = _read_payloads(connection, facts)
    messages: list[tuple[_Facts, Said]] = []
    left: list[tuple[_Facts, Sequence[str]]] = []
    for one, payload in zip(facts, payloads, strict=True):
        if one.kind in LEFT:
            left.append((one, left_ids(one.kind, payload)))
        elif one.kind == CHANGES_USER:
            if has_owner(payload):
                connection.execute("INSERT OR IGNORE INTO search_again VALUES (?)", (one.log,))
        elif (said := find_said(one.kind, payload)) is not None:
            messages.append((one, said))
    _insert(connection, messages)
    for one, ids in left:
        values = {"how": LEFT[one.kind], "log": one.log, "ids": json.dumps(ids)}
        connection.execute(_MARK_LEFT, values)


def _read_payloads(connection: sqlite3.Connection, facts: Sequence[_Facts]) -> list[bytes]:
    """Return the payloads of these events; an empty one for an event that cannot be read."""
    if not facts:
        return []
    sizes, content = connection.execute(
        _PAYLOADS, (json.dumps([one.id for one in facts]),)
    ).fetchone()
    at = 0
    by_id: dict[int, bytes] = {}
    for number, size in json.loads(sizes):
        by_id[number] = (content or b"")[at : at + size]
        at += size
    return [_whole(connection, by_id[one.id], one.parts) or b"" for one in facts]


def _whole(connection: sqlite3.Connection, payload: bytes, parts: str | None) -> bytes | None:
    """Return a payload with its large parts; None if they cannot be read."""
    if parts is None:
        return payload

    def fetch(digest: bytes) -> bytes:
        row = connection.execute("SELECT data FROM part WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            raise ValueError("missing part")
        data: bytes = row[0]
        return data

    try:
        return join(payload, parts, fetch)
    except (ValueError, TypeError):
        return None  # reads of the log report the damage


def _insert(connection: sqlite3.Connection, messages: Sequence[tuple[_Facts, Said]]) -> None:
    if not messages:
        return
    wanted = [message_number(said.at_us, one.seq) for one, said in messages]
    numbers = _free_numbers(connection, wanted)
    rows = [
        (number, one.log, one.seq, one.id, one.owner, _words(one, said))
        for number, (one, said) in zip(numbers, messages, strict=True)
    ]
    rows.sort()  # sorted, since FTS5 flushes its buffer when a lower id follows
    connection.execute(_INSERT, (json.dumps(rows),))
    connection.execute(_INSERT_WORDS, (json.dumps([row[0] for row in rows]),))


def _words(one: _Facts, said: Said) -> str:
    return " ".join(stored_words(one.owner, one.name, said.text))


def _free_numbers(connection: sqlite3.Connection, wanted: Sequence[int]) -> list[int]:
    """Return for each of these numbers one that no other message has: itself or a higher one."""
    (found,) = connection.execute(
        "SELECT json_group_array(m.id) FROM json_each(?) j CROSS JOIN search_message m "
        "ON m.id = j.value",
        (json.dumps(wanted),),
    ).fetchone()
    taken = set(json.loads(found))
    numbers: list[int] = []
    for one in wanted:
        number = one
        if number in taken:
            (highest,) = connection.execute(
                "SELECT max(id) FROM search_message WHERE id BETWEEN ? AND ?",
                (one, one + NUMBER_SPAN),
            ).fetchone()
            number = max(highest or one, one) + 1
            while number in taken:
                number += 1
        taken.add(number)
        numbers.append(number)
    return numbers


# --- owners ---------------------------------------------------------------------------------------


def _is_any_again(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM search_again LIMIT 1").fetchone() is not None


def _exchange_owners(connection: sqlite3.Connection) -> bool:
    """Replace the owner's word of some messages of one log; return True if there are more."""
    row = connection.execute("SELECT log FROM search_again LIMIT 1").fetchone()
    if row is None:
        return False
    (log,) = row
    owner = connection.execute(
        "SELECT l.owner FROM conversation c JOIN listing l ON l.conversation = c.id "
        "WHERE c.log = ?",
        (log,),
    ).fetchone()
    found = 0
    if owner is not None:
        ids, found = connection.execute(
            "SELECT json_group_array(id), count(*) FROM "
            "(SELECT id FROM search_message WHERE log = ? AND owner <> ? LIMIT ?)",
            (log, *owner, _OWNERS_MAX),
        ).fetchone()
        _delete_words(connection, ids)
        connection.execute(
            "UPDATE search_message SET owner = :owner, "
            "words = :word || substr(words, length(:word) + 1) "
            "WHERE id IN (SELECT value FROM json_each(:ids))",
            {"owner": owner[0], "word": owner_word(owner[0]), "ids": ids},
        )
        connection.execute(_INSERT_WORDS, (ids,))
    if found < _OWNERS_MAX:
        connection.execute("DELETE FROM search_again WHERE log = ?", (log,))
    return _is_any_again(connection)


# --- deletion -------------------------------------------------------------------------------------


def erase_words(connection: sqlite3.Connection, log: int) -> bool:
    """Take some messages of a deleted log out of the index; return True if there may be more."""
    ids, found = connection.execute(
        "SELECT json_group_array(id), count(*) FROM "
        "(SELECT id FROM search_message WHERE log = ? LIMIT ?)",
        (log, _ERASED_MAX),
    ).fetchone()
    if not found:
        connection.execute("DELETE FROM search_again WHERE log = ?", (log,))
        return False
    _erase_at_once(connection)
    _delete_words(connection, ids)
    connection.execute(
        "DELETE FROM search_message WHERE id IN (SELECT value FROM json_each(?))", (ids,)
    )
    return bool(found == _ERASED_MAX)


def _delete_words(connection: sqlite3.Connection, ids: str) -> None:
    connection.execute(_DELETE_WORDS, (ids,))
    if sqlite3.sqlite_version_info < _SECURE_DELETE_MIN:
        connection.execute("UPDATE search SET is_clean = 0")


def merge_slice(connection: sqlite3.Connection, *, is_forced: bool = False) -> bool:
    """Merge some pages of FTS5's index; return True if there are more to merge.

    Before SQLite 3.42, FTS5 only marks deleted words: they leave the file when all segments have
    been merged into one. The time for that grows with the index, so a large index is not merged
    unless `is_forced`.
    """
    if is_clean(connection) or not (is_forced or _is_small(connection)):
        return False
    before = connection.total_changes
    # A negative number merges all segments into one, or continues a merge that has begun.
    connection.execute(
        "INSERT INTO search_word (search_word, rank) VALUES ('merge', ?)", (-_MERGED_PAGES,)
    )
    is_more = connection.total_changes - before > 1
    if not is_more:
        connection.execute("UPDATE search SET is_clean = 1")
    return is_more


def join_slice(connection: sqlite3.Connection) -> bool:
    """Join some segments of about the same length; return True if there are more.

    Each slice of the index makes a segment, and a search reads all segments.
    """
    before = connection.total_changes
    connection.execute(
        "INSERT INTO search_word (search_word, rank) VALUES ('merge', ?)", (_MERGED_PAGES,)
    )
    return connection.total_changes - before > 1


def _is_small(connection: sqlite3.Connection) -> bool:
    return not connection.execute(
        "SELECT 1 FROM search_message LIMIT 1 OFFSET ?", (_MERGED_MESSAGES_MAX,)
    ).fetchone()


# --- verification ---------------------------------------------------------------------------------


class FileWords:
    """Compares the file's index of a log with the log's own records, given one by one."""

    def __init__(self, connection: sqlite3.Connection, log: int, name: str) -> None:
        self._connection = connection
        (self._cursor,) = connection.execute("SELECT cursor FROM search").fetchone()
        self._rows = {
            row[0]: row[1:]
            for row in connection.execute(
                "SELECT seq, id, event, left_view, owner, words FROM search_message WHERE log = ?",
                (log,),
            )
        }
        indexed = {
            seq: IndexedMessage(left, owner, words.split())
            for seq, (_, _, left, owner, words) in self._rows.items()
        }
        self._log = LogWords(name, indexed)
        self.end = self._log.end

    def add(self, number: int, record: StoredRecord) -> str | None:
        """Compare a record of the log, whose row has this id; return the problem, or None."""
        if number > self._cursor:
            return None
        problem = self._log.add(record)
        if problem is not None or record.seq not in self._log.messages:
            return problem
        message, event, _, _, words = self._rows[record.seq]
        if event != number:
            return "the index of words differs from it"
        wanted = " AND ".join(f'"{word}"' for word in words.split())
        if not self._connection.execute(
            "SELECT 1 FROM search_word WHERE search_word MATCH ? AND rowid = ?", (wanted, message)
        ).fetchone():
            return "the index of words does not find it"
        return None


# --- pages ----------------------------------------------------------------------------------------

_STATE = """
    SELECT rules, cursor, complete_us, (SELECT ifnull(max(id), 0) FROM event),
        EXISTS (SELECT 1 FROM search_again) FROM search
"""
# The payload of an `event`, unless those before it have enough bytes for a page. SQLite knows the
# size of a payload without reading it. Parts of payloads are read one by one.
_BOUNDED = """
    SELECT *, CASE WHEN ifnull(sum(size) OVER (
        ORDER BY {order} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ), 0) < {bytes} THEN (SELECT payload FROM event e WHERE e.id = event) END AS payload
    FROM ({rows}) ORDER BY {order}
"""
_RECORDS = """
    SELECT json_group_array(json_array(
            event, log, seq, epoch, event_id, kind, message_id, mark, length(payload), parts,
            before)),
        CAST(group_concat(payload, '') AS BLOB)
    FROM ({bounded})
"""
_PAYLOAD = "SELECT payload FROM event WHERE id = ?"
_RECORDS_ROWS = """
    SELECT j.key, e.id AS event, length(e.payload) AS size, e.parts, p.mark AS before, e.log, e.seq,
        e.epoch, e.event_id, e.kind, e.message_id, e.mark
    FROM json_each(?) j CROSS JOIN event e ON e.id = j.value
    LEFT JOIN event p ON p.id = e.previous
"""


# The same columns for a candidate, after its own columns.
_RECORD = """
    , length(e.payload) AS size, e.parts, p.mark AS before, e.log, e.seq AS event_seq, e.epoch,
    e.event_id, e.kind, e.message_id, e.mark
"""
_RECORD_SHOWN = """
    , length(payload), parts, before, log, event_seq, epoch, event_id, kind, message_id, mark
"""
_RECORD_FROM = "LEFT JOIN event e ON e.id = m.event LEFT JOIN event p ON p.id = e.previous"
_CONTENT = "CAST(group_concat(payload, '') AS BLOB)"
_NO_RECORD = (None,) * 10
_SIZE_AT = 3  # replaced, for each candidate, by the size of its payload and then the payload


def read_search_page(connection: sqlite3.Connection, query: SearchQuery) -> SearchPage | None:
    """Return a page of the messages that the index has; None if the file has no index."""
    row = connection.execute(_STATE).fetchone()
    if row is None or row[0] != WORD_RULES:
        return None
    _, cursor, complete_us, newest, is_again = row
    complete_to_us = None if cursor >= newest and not is_again else int(complete_us)

    # Few candidates are found, and all but one are shown, so their records are read with them.
    with_records = not has_rest(query)

    def find(after: int | None, limit: int) -> Sequence[Candidate]:
        statement, values = search_statement(query, after, limit, with_records=with_records)
        rows, content = connection.execute(statement, values).fetchone()
        found: list[Candidate] = []
        at = 0
        for number, name, is_shown, *place in json.loads(rows):
            if with_records and (size := place[_SIZE_AT]) is not None:
                place[_SIZE_AT] = content[at : at + size]
                at += size
            found.append(Candidate(number, name, bool(is_shown), place))
        return found

    def show(wanted: Sequence[Candidate]) -> Iterator[tuple[FoundMessage, int]]:
        places: Sequence[Sequence[Any]] = [one.place for one in wanted]
        if not with_records:
            places = _with_records(connection, places)
        for one, place in zip(wanted, places, strict=True):
            yield _shown(connection, query, one, place)

    return fill_search_page(query, find, show, complete_to_us)


def search_statement(
    query: SearchQuery, after: int | None, limit: int, *, with_records: bool
) -> tuple[str, Sequence[object]]:
    """Return the statement that finds `limit` candidates below a number, with their records."""
    # Words contain no quotation marks, and nothing else that FTS5 would treat as syntax.
    words = [f'"{word}"' for word in (*query.words, *scope_words(query))]
    if query.begins:
        words.append(f'"{query.begins}" *')
    is_shown, conditions = "1", ["w.search_word MATCH ?"]
    shown_values: list[object] = []
    values: list[object] = []
    values.append(" AND ".join(words))
    if after is not None:
        conditions.append("w.rowid < ?")
        values.append(after)
    if query.owner is not None:
        # A listing may have a newer owner than its messages in the index.
        conditions.append("l.owner = ?")
        values.append(query.owner)
    if query.label is not None:
        is_shown += " AND EXISTS (SELECT 1 FROM label k WHERE k.conversation = c.id"
        is_shown += " AND k.label = ? AND k.value = ?)"
        shown_values += query.label
    if query.status is not None:
        is_shown += " AND EXISTS (SELECT 1 FROM listing s LEFT JOIN listing_recent r"
        is_shown += " ON r.conversation = s.conversation WHERE s.conversation = c.id"
        is_shown += " AND ifnull(r.status, s.status) = ?)"
        shown_values.append(query.status)
    owners = "JOIN listing l ON l.conversation = c.id" if query.owner is not None else ""
    shown, columns, content, events = "", "", "NULL", ""
    if with_records:
        shown, columns, content, events = _RECORD_SHOWN, _RECORD, _CONTENT, _RECORD_FROM
    rows = f"""
        SELECT m.id, c.name, {is_shown} AS is_shown, m.seq, m.left_view, m.event {columns}
        FROM search_word w CROSS JOIN search_message m ON m.id = w.rowid
        JOIN conversation c ON c.log = m.log {owners} {events}
        WHERE {" AND ".join(conditions)} ORDER BY w.rowid DESC LIMIT ?
    """  # noqa: S608 - our own text
    if with_records:
        rows = _bounded(rows, order="id DESC")
    statement = f"""
        SELECT json_group_array(json_array(id, name, is_shown, seq, left_view, event {shown})),
            {content}
        FROM ({rows})
    """  # noqa: S608 - our own text
    return statement, (*shown_values, *values, limit)


def _bounded(rows: str, *, order: str) -> str:
    return _BOUNDED.format(rows=rows, order=order, bytes=searching.SHOWN_BYTES_MAX)


def _with_records(
    connection: sqlite3.Connection, places: Sequence[Sequence[Any]]
) -> Sequence[Sequence[Any]]:
    """Return the columns of these candidates, each followed by those of its record."""
    statement = _RECORDS.format(bounded=_bounded(_RECORDS_ROWS, order="key"))
    found, content = connection.execute(
        statement, (json.dumps([event for _, _, event in places]),)
    ).fetchone()
    at = 0
    records: dict[int, Sequence[Any]] = {}
    for number, *facts, size, parts, before in json.loads(found):
        payload = None if size is None else content[at : at + size]
        at += size or 0
        records[number] = (payload, parts, before, *facts)
    return [(*place, *records.get(place[2], _NO_RECORD)) for place in places]


def _shown(
    connection: sqlite3.Connection, query: SearchQuery, one: Candidate, place: Sequence[Any]
) -> tuple[FoundMessage, int]:
    """Return a candidate as a search result, and the size of its record."""
    seq, left, event, payload, parts, before, *facts = place
    said, event_id, whole = None, facts[3], None
    if event_id is not None:
        if payload is None:  # those before it have enough bytes, but the page goes on
            (payload,) = connection.execute(_PAYLOAD, (event,)).fetchone()
        whole = _whole(connection, payload, parts)
        said = _said(whole, before, *facts)
    name = one.conversation_id
    row = found_message(query, name, seq, event_id or "", said, number=one.number, left=left)
    return row, len(whole or b"")


def _said(payload: bytes | None, before: int | None, *facts: Any) -> Said | None:  # noqa: ANN401 - of SQLite
    """Return the chat message in a record, or None if the record fails its checksum."""
    log, seq, epoch, event_id, kind, message_id, mark = facts
    before = first_mark(log) if seq == 1 else before
    if payload is None or before is None:
        return None
    is_whole = next_mark(before, seq, epoch, event_id, kind, message_id, payload) == mark
    return find_said(kind, payload) if is_whole else None
