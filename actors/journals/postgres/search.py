"""The index of words in PostgreSQL: filled in slices by one process at a time, read by pages.

Once a process has asked for search, each append of a chat message notes its log in a queue, which
costs a row without an index. One process at a time takes logs from the queue: a slice is a
transaction that holds an advisory lock, so no message is indexed twice, and if a process is killed,
the next one does its slice. A slice locks the rows of its conversations only against deletion, so
appends go on meanwhile.

The words are lexemes of a `tsvector` under a GIN index. Python splits texts into words, so that
every journal has the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import psycopg

from turnkeeper.runtime import InvariantViolation, Ports, TurnkeeperError
from turnkeeper.runtime.lowlevel import Logger

from ...errors import JournalUnavailable, SearchIsOff
from ...journal import FoundMessage, SearchPage, SearchQuery
from ...values.words import WORD_RULES
from ..shared import searching
from ..shared.job_thread import Job
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
    left_ids,
    message_number,
    owner_word,
    scope_words,
    stored_words,
)
from .connections import BoundedConnection, Link
from .schema import schema_number

__all__ = [
    "ALL_QUEUED",
    "QUEUED",
    "Indexing",
    "PostgresIndexer",
    "erase_words",
    "logs_of_none",
    "move_owner",
    "read_search_page",
    "read_words",
    "start_search",
]

_log = Logger("turnkeeper.actors.journals")

_QUEUED_MAX = 256
_LOGS_MAX = 32
_SWEPT_MAX = 500
_EVENTS_MAX = 512
_MESSAGES_MAX = 64
_BYTES_MAX = 512 << 10
"""A slice takes at most this many messages, of about this many bytes, in each log: some
milliseconds."""
_OWNERS_MAX = 200
_ERASED_MAX = 1_000
_POLL_S = 0.5
_RETRY_S = 5.0

_SEARCHED = ", ".join(f"'{kind}'" for kind in SEARCHED_KINDS)

# A part of the statement of an append; `moved` has the conversations that it has moved. The second
# one is for a statement that has moved only conversations with new messages.
QUEUED = f"""
    , queued AS (
        INSERT INTO search_queue (log, at_us, is_moved)
        SELECT s.log, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, false
        FROM (
            SELECT unnest(%(logs)b::bigint[]) AS log, unnest(%(kinds)s::text[]) AS kind
        ) AS s
        WHERE s.kind IN ({_SEARCHED}) AND s.log IN (SELECT log FROM moved)
            AND EXISTS (SELECT FROM search)
        GROUP BY s.log
    )
"""  # noqa: S608 - our own text
ALL_QUEUED = """
    , queued AS (
        INSERT INTO search_queue (log, at_us, is_moved)
        SELECT log, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, false
        FROM moved WHERE EXISTS (SELECT FROM search)
    )
"""


def start_search(connection: psycopg.Connection[Any], schema: str) -> None:
    """Make an empty index, unless there already is one with these rules."""
    with connection.transaction():
        # Before the look, which holds a lock that the TRUNCATE of another process would wait for.
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (schema_number(schema),))
        row = connection.execute("SELECT rules FROM search").fetchone()
        if row is not None and row[0] == WORD_RULES:
            return
        # Wait for appends that began before there was a queue, since they do not note their logs.
        connection.execute("LOCK TABLE conversation IN SHARE MODE")
        connection.execute("TRUNCATE search, search_queue, search_log, search_message")
        connection.execute("INSERT INTO search VALUES (0, %s)", (WORD_RULES,))


# --- the job --------------------------------------------------------------------------------------


class Indexing(Job[bool]):
    """A job that indexes a slice; its outcome is True if there is more to index."""

    __slots__ = ()


class PostgresIndexer:
    """A `Worker` that fills the index while it has no jobs; a job indexes one more slice."""

    def __init__(
        self,
        connect: Callable[[], BoundedConnection],
        *,
        schema: str,
        ports: Ports,
        failpoint: Callable[[str], None],
    ) -> None:
        self._link = Link(connect, connect(), ports.monotonic)
        self._ports = ports
        self._key = schema_number(f"{schema}\0search")
        self._failpoint = failpoint

    def close(self) -> None:
        self._link.connection.close()

    def work(self, jobs: Sequence[Job[object]]) -> None:
        for job in jobs:
            try:
                cast("Indexing", job).settle(self._slice(waits=True))
            except TurnkeeperError as error:
                job.refuse(error)
            except (psycopg.Error, OSError) as error:
                outcome = JournalUnavailable(f"indexing failed: {error}; try again")
                outcome.__cause__ = error
                job.refuse(outcome)
            except Exception as error:  # noqa: BLE001 - handed to the caller
                bug = InvariantViolation(f"the journal cannot index: {error!r}")
                bug.__cause__ = error
                job.refuse(bug)

    def rest(self) -> float | None:
        """Index a slice; the pause until the next one is as long as the slice took."""
        began = self._ports.monotonic()
        try:
            is_more = self._slice(waits=False)
        except Exception as error:  # noqa: BLE001 - it is tried again
            _log.error("search index not updated", error=type(error).__name__)
            return _RETRY_S
        return self._ports.monotonic() - began if is_more else _POLL_S

    def _slice(self, *, waits: bool) -> bool:
        self._link.begin_job()
        connection = self._link.connection
        self._failpoint("index begin")
        try:
            with connection.transaction():
                if not self._lock(connection, waits=waits):
                    return False
                is_more = _index_slice(connection)
                self._failpoint("index commit")
        except OSError:
            connection.close()  # raised by a failpoint instead of the connection
            raise
        if connection.closed:
            # psycopg does not raise when it leaves a transaction whose connection is gone.
            raise psycopg.OperationalError("the connection was closed before the commit")
        self._failpoint("index committed")
        return is_more

    def _lock(self, connection: BoundedConnection, *, waits: bool) -> bool:
        """Take the indexing lock; return False if another process has it, unless `waits`."""
        if waits:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (self._key,))
            return True
        row = connection.execute("SELECT pg_try_advisory_xact_lock(%s)", (self._key,)).fetchone()
        return bool(row and row[0])


_NEXT_LOGS = """
    SELECT log, array_agg(id), bool_or(is_moved) FROM (
        SELECT id, log, is_moved FROM search_queue ORDER BY id LIMIT %s
    ) AS next GROUP BY log ORDER BY min(id) LIMIT %s
"""


def _index_slice(connection: psycopg.Connection[Any]) -> bool:
    """Index some of the logs in the queue; return True if it has more."""
    is_sweeping = _sweep(connection)
    logs = connection.execute(_NEXT_LOGS, (_QUEUED_MAX, _LOGS_MAX)).fetchall()
    done: list[int] = []
    taken = 0
    for log, queued, is_moved in logs:
        found, is_done = _index_log(connection, log, is_moved=is_moved)
        if is_done:
            done += queued
        taken += found
        if taken >= _MESSAGES_MAX:
            break
    connection.execute("DELETE FROM search_queue WHERE id = ANY(%s)", (done,))
    row = connection.execute("SELECT EXISTS (SELECT FROM search_queue)").fetchone()
    return is_sweeping or bool(row and row[0])


def _sweep(connection: psycopg.Connection[Any]) -> bool:
    """Queue some logs that are older than the index; return True if there may be more."""
    row = connection.execute("SELECT swept FROM search").fetchone()
    if row is None or row[0] is None:
        return False
    found = connection.execute("SELECT count(*) FROM search_queue").fetchone()
    if found and found[0] >= _SWEPT_MAX:
        return True
    ids = connection.execute(
        """
        WITH next AS (
            SELECT id, log FROM conversation WHERE id > %s AND head > 0 ORDER BY id LIMIT %s
        ), queued AS (
            INSERT INTO search_queue (log, at_us, is_moved) SELECT log, 0, false FROM next
        )
        SELECT max(id) FROM next
        """,
        (row[0], _SWEPT_MAX),
    ).fetchone()
    connection.execute("UPDATE search SET swept = %s", (ids[0] if ids else None,))
    return bool(ids and ids[0] is not None)


class _Facts(NamedTuple):
    """A log that is indexed."""

    log: int
    name: str
    owner: str


def _index_log(
    connection: psycopg.Connection[Any], log: int, *, is_moved: bool
) -> tuple[int, bool]:
    """Index the next messages of a log; return how many, and True if these were the last.

    Messages of deleted conversations are skipped: their words must not be found, even if a fork
    needs the records.
    """
    # The lock blocks only a deletion; appends need not wait for it.
    row = connection.execute(
        "SELECT id, name, head, forked_at FROM conversation WHERE log = %s FOR KEY SHARE", (log,)
    ).fetchone()
    if row is None:
        return 0, True
    number, name, head, after = row
    row = connection.execute(
        "SELECT owner FROM listing WHERE conversation = %s", (number,)
    ).fetchone()
    facts = _Facts(log, name, row[0] if row else "")
    row = connection.execute(
        "SELECT seq, is_moved FROM search_log WHERE log = %s", (log,)
    ).fetchone()
    if row is not None:
        after, is_moved = row[0], is_moved or row[1]
    is_moved = is_moved or _has_other_owner(connection, facts)
    upto, found, changes = _index_records(connection, facts, after, head)
    if is_moved or changes:
        is_moved = _exchange_owner(connection, facts)
    connection.execute(
        "INSERT INTO search_log VALUES (%s, %s, %s) ON CONFLICT (log) DO UPDATE SET "
        "seq = excluded.seq, is_moved = excluded.is_moved",
        (log, upto, is_moved),
    )
    return found, upto == head and not is_moved


def _index_records(
    connection: psycopg.Connection[Any], facts: _Facts, after: int, head: int
) -> tuple[int, int, bool]:
    """Index records; return the last seq, how many messages, and True if one names an owner."""
    rows = connection.execute(
        "SELECT seq, kind, octet_length(payload) FROM event WHERE log = %s AND seq > %s "
        "AND seq <= %s ORDER BY seq LIMIT %s",
        (facts.log, after, head, _EVENTS_MAX),
    ).fetchall()
    upto, size = after, 0
    seqs: list[int] = []
    for seq, kind, bytes_ in rows:
        if kind in SEARCHED_KINDS:
            size += bytes_
            if seqs and (len(seqs) == _MESSAGES_MAX or size > _BYTES_MAX):
                break
            seqs.append(seq)
        upto = seq
    else:
        if len(rows) < _EVENTS_MAX:
            upto = head  # if the log has lost its end, `verify` reports it, and indexing goes on
    messages: list[tuple[int, Said]] = []
    left: list[tuple[str, Sequence[str]]] = []
    changes = False
    for seq, kind, payload in connection.execute(
        "SELECT seq, kind, payload FROM event WHERE log = %s AND seq = ANY(%s) ORDER BY seq",
        (facts.log, seqs),
        binary=True,
    ).fetchall():
        if kind in LEFT:
            left.append((kind, left_ids(kind, payload)))
        elif kind == CHANGES_USER:
            changes = changes or has_owner(payload)
        elif (said := find_said(kind, payload)) is not None:
            messages.append((seq, said))
    _insert(connection, facts, messages)
    for kind, ids in left:
        connection.execute(
            "UPDATE search_message SET left_view = greatest(left_view, %(how)s) "
            "WHERE log = %(log)s AND seq IN "
            "(SELECT seq FROM event WHERE log = %(log)s AND event_id = ANY(%(ids)s))",
            {"how": LEFT[kind], "log": facts.log, "ids": [one for one in ids if "\0" not in one]},
        )
    return upto, len(messages), changes


def _insert(
    connection: psycopg.Connection[Any], facts: _Facts, messages: Sequence[tuple[int, Said]]
) -> None:
    if not messages:
        return
    wanted = [message_number(said.at_us, seq) for seq, said in messages]
    connection.execute(
        """
        INSERT INTO search_message
        SELECT m.id, %s, m.seq, 0, %s, array_to_tsvector(string_to_array(m.words, ' '))
        FROM unnest(%s::bigint[], %s::bigint[], %s::text[]) AS m(id, seq, words)
        """,
        (
            facts.log,
            facts.owner,
            _free_numbers(connection, wanted),
            [seq for seq, _ in messages],
            [" ".join(stored_words(facts.owner, facts.name, said.text)) for _, said in messages],
        ),
    )


def _free_numbers(connection: psycopg.Connection[Any], wanted: Sequence[int]) -> list[int]:
    """Return for each of these numbers one that no other message has: itself or a higher one."""
    rows = connection.execute(
        "SELECT id FROM search_message WHERE id = ANY(%s::bigint[])", (list(wanted),)
    )
    taken = {row[0] for row in rows}
    numbers: list[int] = []
    for one in wanted:
        number = one
        if number in taken:
            row = connection.execute(
                "SELECT max(id) FROM search_message WHERE id BETWEEN %s AND %s",
                (one, one + NUMBER_SPAN),
            ).fetchone()
            number = max((row[0] if row else None) or one, one) + 1
            while number in taken:
                number += 1
        taken.add(number)
        numbers.append(number)
    return numbers


def _has_other_owner(connection: psycopg.Connection[Any], facts: _Facts) -> bool:
    """Return True if the newest message has the word of another owner than the listing's.

    The owner of a listing changes without an event if a caller that writes no listings changed it.
    """
    row = connection.execute(
        "SELECT owner FROM search_message WHERE log = %s ORDER BY seq DESC LIMIT 1", (facts.log,)
    ).fetchone()
    return row is not None and row[0] != facts.owner


def _exchange_owner(connection: psycopg.Connection[Any], facts: _Facts) -> bool:
    """Replace the owner's word of some messages of a log; return True if there may be more."""
    rows = connection.execute(
        "SELECT id, owner FROM search_message WHERE log = %s AND owner <> %s LIMIT %s",
        (facts.log, facts.owner, _OWNERS_MAX),
    ).fetchall()
    for owner in sorted({row[1] for row in rows}):
        connection.execute(
            "UPDATE search_message SET owner = %s, "
            "words = ts_delete(words, %s::text) || array_to_tsvector(ARRAY[%s::text]) "
            "WHERE id = ANY(%s)",
            (
                facts.owner,
                owner_word(owner),
                owner_word(facts.owner),
                [row[0] for row in rows if row[1] == owner],
            ),
        )
    return len(rows) == _OWNERS_MAX


# --- in the writer's transactions -----------------------------------------------------------------


def move_owner(connection: psycopg.Connection[Any], log: int) -> None:
    """Note that the owner in a conversation's listing may have changed."""
    connection.execute(
        "INSERT INTO search_queue (log, at_us, is_moved) "
        "SELECT %s, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, true FROM search",
        (log,),
    )


def erase_words(connection: psycopg.Connection[Any], log: int) -> int:
    """Take some messages of a deleted log out of the index; return how many."""
    connection.execute("DELETE FROM search_log WHERE log = %s", (log,))
    return connection.execute(
        "DELETE FROM search_message WHERE id IN "
        "(SELECT id FROM search_message WHERE log = %s LIMIT %s)",
        (log, _ERASED_MAX),
    ).rowcount


# --- pages ----------------------------------------------------------------------------------------

_NEAR_MAX = 512
"""How many of an owner's newest messages a search compares one by one before it uses the index of
words. The index is slower for common words: it returns every message with the words, unsorted."""
_AFTER_ALL = (1 << 63) - 1

# One statement, which is its own snapshot: a transaction would cost two more round trips. `far`
# runs only if `near` has too few. `id + 0` keeps the planner from the index over ids, which would
# return most of the table. The index of words may be stale, so the message's conversation decides
# if it is shown; of the messages that are, only as many records are read as a page has, and none
# once they have `bytes`: PostgreSQL knows the size of a large record without reading it.
_PAGE = """
    WITH near AS MATERIALIZED (
        SELECT id, log, seq, left_view
        FROM (SELECT * FROM search_message {newest} LIMIT {near_max}) m
        WHERE words @@ %(words)s::tsquery ORDER BY id DESC LIMIT %(at_once)s
    ), last AS MATERIALIZED (
        SELECT id FROM search_message {newest} OFFSET {near_max} - 1 LIMIT 1
    ), far AS MATERIALIZED (
        SELECT id, log, seq, left_view FROM search_message
        WHERE words @@ %(words)s::tsquery AND id + 0 < (SELECT id FROM last)
            AND (SELECT count(*) FROM near) < %(at_once)s AND EXISTS (SELECT FROM last)
        ORDER BY id DESC LIMIT %(at_once)s
    ), found AS MATERIALIZED (
        SELECT h.*, c.name, coalesce({is_shown}, false) AS is_shown
        FROM (SELECT * FROM near UNION ALL SELECT * FROM far) h
        LEFT JOIN conversation c ON c.log = h.log {listing}
        ORDER BY h.id DESC LIMIT %(at_once)s
    )
    SELECT s.rules, s.swept, (SELECT min(at_us) FROM search_queue),
        f.id, f.name, f.is_shown, f.seq, f.left_view,
        e.log, e.seq, e.epoch, e.event_id, e.kind, e.message_id, e.mark,
        coalesce(
            (SELECT p.mark FROM event p WHERE p.log = e.log AND p.seq = e.seq - 1),
            (SELECT p.mark FROM fork k JOIN event p ON p.log = k.parent AND p.seq = k.seq
                WHERE k.log = e.log AND k.seq = e.seq - 1)
        ),
        CASE WHEN coalesce(sum(octet_length(e.payload)) OVER above, 0) < %(bytes)s
            THEN e.payload END,
        coalesce(sum(octet_length(e.payload)) OVER above, 0) >= %(bytes)s
    FROM search s
    LEFT JOIN found f ON true
    LEFT JOIN event e ON e.log = f.log AND e.seq = f.seq AND f.is_shown AND f.id > coalesce(
        (SELECT id FROM found WHERE is_shown ORDER BY id DESC OFFSET %(limit)s LIMIT 1), -1
    )
    WINDOW above AS (ORDER BY f.id DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
    ORDER BY f.id DESC
"""


def read_search_page(
    connection: psycopg.Connection[Any], query: SearchQuery, schema: str
) -> SearchPage:
    """Return a page of the messages that the index has. Raises `SearchIsOff` if there is none.

    Usually this takes one statement; each further one continues after the last, as a next page
    does.
    """
    statement = page_statement(query).encode()
    label, value = query.label or (None, None)
    values = {
        "words": _tsquery(query),
        "owner": query.owner,
        "prefix": query.prefix,
        "status": query.status,
        "label": label,
        "value": value,
        "limit": query.limit,
    }
    complete_to_us: list[int | None] = []
    left = searching.SHOWN_BYTES_MAX

    def find(after: int | None, at_once: int) -> Sequence[Candidate]:
        nonlocal left
        place = {
            "after": _AFTER_ALL if after is None else after,
            "at_once": at_once,
            "bytes": left,
        }
        rows = connection.execute(statement, {**values, **place}, binary=True).fetchall()
        if not rows or rows[0][0] != WORD_RULES:
            raise SearchIsOff(f"schema {schema}")
        _, swept, oldest_us, *_ = rows[0]
        complete_to_us.append(0 if swept is not None else oldest_us)
        left -= sum(len(payload or b"") for *_, payload, _ in rows)
        return [
            Candidate(number, name or "", is_shown, place)
            for _, _, _, number, name, is_shown, *place in rows
            if number is not None
        ]

    def show(wanted: Sequence[Candidate]) -> Iterator[tuple[FoundMessage, int]]:
        for one in wanted:
            *_, payload, is_unread = one.place
            if is_unread:
                return
            yield _found(query, one), len(payload or b"")

    page = fill_search_page(query, find, show, None)
    return page._replace(complete_to_us=complete_to_us[0])


def page_statement(query: SearchQuery) -> str:
    """Return the statement that finds some messages below a number, with their records."""
    newest, listing, is_shown = "WHERE id < %(after)s", "", ["c.id IS NOT NULL"]
    if query.owner is not None:
        newest += " AND owner = %(owner)s"
        listing = "LEFT JOIN listing l ON l.conversation = c.id"
        is_shown.append("l.owner = %(owner)s")
    if query.prefix:
        is_shown.append("starts_with(c.name, %(prefix)s)")
    if query.status is not None:
        is_shown.append(
            "EXISTS (SELECT FROM listing s LEFT JOIN listing_recent r "
            "ON r.conversation = s.conversation AND r.seq >= s.seq "
            "WHERE s.conversation = c.id AND coalesce(r.status, s.status) = %(status)s)"
        )
    if query.label is not None:
        is_shown.append(
            "EXISTS (SELECT FROM label k WHERE k.conversation = c.id AND k.label = %(label)s "
            "AND k.value = %(value)s)"
        )
    return _PAGE.format(
        newest=f"{newest} ORDER BY id DESC",
        near_max=_NEAR_MAX,
        listing=listing,
        is_shown=" AND ".join(is_shown),
    )


def _tsquery(query: SearchQuery) -> str:
    # Words contain no quotation marks, and nothing else that a tsquery would treat as syntax.
    words = [f"'{word}'" for word in (*query.words, *scope_words(query))]
    if query.begins:
        words.append(f"'{query.begins}':*")
    return " & ".join(words)


def _found(query: SearchQuery, one: Candidate) -> FoundMessage:
    seq, left, *record, _ = one.place
    return found_message(
        query,
        one.conversation_id,
        seq,
        record[3] or "",
        _said(record),
        number=one.number,
        left=left,
    )


def _said(record: Sequence[Any]) -> Said | None:
    """Return the chat message in a record, or None if it is missing or fails its checksum."""
    log, seq, epoch, event_id, kind, message_id, mark, before, payload = record
    before = first_mark(log) if seq == 1 else before
    if before is None:
        return None
    is_whole = next_mark(before, seq, epoch, event_id, kind, message_id, payload) == mark
    return find_said(kind, payload) if is_whole else None


# --- verification ---------------------------------------------------------------------------------

# A log that is not in the queue is indexed to its end.
_INDEXED = """
    SELECT c.log, c.forked_at, coalesce(i.seq, c.forked_at), c.head,
        s.swept IS NULL AND NOT EXISTS (SELECT FROM search_queue q WHERE q.log = c.log)
    FROM search s JOIN conversation c ON c.name = %s LEFT JOIN search_log i ON i.log = c.log
    WHERE s.rules = %s
"""
_LOGS_OF_NONE = """
    SELECT DISTINCT m.log FROM search_message m
    WHERE NOT EXISTS (SELECT FROM conversation c WHERE c.log = m.log)
        AND NOT EXISTS (SELECT FROM erasure e WHERE e.log = m.log)
"""


def read_words(connection: psycopg.Connection[Any], name: str) -> LogWords | None:
    """Return the index's entries for a conversation, in one snapshot; None if there is no index."""
    row = connection.execute(_INDEXED, (name, WORD_RULES)).fetchone()
    if row is None:
        return None
    log, after, upto, head, is_done = row
    indexed = {
        seq: IndexedMessage(left, owner, words)
        for seq, left, owner, words in connection.execute(
            "SELECT seq, left_view, owner, tsvector_to_array(words) FROM search_message "
            "WHERE log = %s",
            (log,),
        )
    }
    return LogWords(name, indexed, after=after, upto=head if is_done else upto)


def logs_of_none(connection: psycopg.Connection[Any]) -> Sequence[int]:
    """Return the logs with words in the index that belong to no conversation."""
    return [row[0] for row in connection.execute(_LOGS_OF_NONE)]
