"""Journals of many conversations, written in bulk; a test compares them with the library's own.

Each conversation has one chat message and its row for lists. The rows are the same as if the
library made one append to each conversation, one after the other, at one moment of its clock.
Indexes are made after the rows, which takes a fraction of the time.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg

from turnkeeper.actors import PostgresJournal, SQLiteJournal
from turnkeeper.actors.journal import Listing, Record
from turnkeeper.actors.journals.shared.list_pages import listing_seal
from turnkeeper.actors.journals.shared.record_chain import first_mark, log_number, next_mark
from turnkeeper.actors.journals.sqlite.log import Tail

OWNERS = 10
NOW_US = 1_700_000_000_000_000
_SHOWN = json.dumps({"by": "agent", "said": "x" * 200, "title": "An order that did not come"})
_SAID = (
    b'{"kind":"user_message","id":"event %07d","timestamp":"2023-11-14T22:13:20Z",'
    b'"content":"' + b"Where is my order? " * 10 + b'","message_id":"message %07d"}'
)
_FILLED = ("conversation", "event", "listing")
_AT_ONCE = 100_000

Row = Sequence[Any]


def name_of(number: int) -> str:
    return f"user {number % OWNERS}:{number:07}"


def record_of(number: int) -> Record:
    said = _SAID % (number, number)
    return Record(f"event {number:07}", "user_message", said, f"message {number:07}")


def listing_of(number: int) -> Listing:
    active_us = number * 7_919 % 1_000_003
    return Listing(1, f"user {number % OWNERS}", "finished", number, active_us, {}, _SHOWN)


async def fill_file(path: Path, many: int) -> None:
    """Make a file with this many conversations."""
    async with SQLiteJournal(path):
        pass
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA cache_size = -500000")
        made_again = connection.execute(
            "SELECT name, sql FROM sqlite_master "
            "WHERE type = 'index' AND sql IS NOT NULL AND tbl_name IN ('event', 'listing')"
        ).fetchall()
        for name, _ in made_again:
            connection.execute(f"DROP INDEX {name}")
        for table, row_of in zip(_FILLED, (_file_conversation, _file_event, _listing), strict=True):
            marks = ", ".join("?" * len(row_of(1)))
            for first in range(1, many + 1, _AT_ONCE):
                connection.execute("BEGIN")
                connection.executemany(
                    f"INSERT INTO {table} VALUES ({marks})",  # noqa: S608 - our own text
                    map(row_of, range(first, min(first + _AT_ONCE, many + 1))),
                )
                connection.execute("COMMIT")
        for _, statement in made_again:
            connection.execute(statement)


async def fill_schema(conninfo: str, schema: str, many: int) -> None:
    """Make a PostgreSQL schema with this many conversations."""
    async with PostgresJournal(conninfo, schema=schema):
        pass
    with connect(conninfo, schema) as connection, connection.cursor() as cursor:
        made_again = cursor.execute(
            "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = %s "
            "AND tablename IN ('event', 'listing') "
            "AND indexname NOT IN (SELECT conname FROM pg_constraint)",
            (schema,),
        ).fetchall()
        for name, _ in made_again:
            cursor.execute(f"DROP INDEX {name}".encode())
        for table, row_of in zip(_FILLED, (_conversation, _event, _listing), strict=True):
            with cursor.copy(f"COPY {table} FROM STDIN".encode()) as copy:
                for number in range(1, many + 1):
                    copy.write_row(row_of(number))
        cursor.execute("SELECT setval(pg_get_serial_sequence('conversation', 'id'), %s)", (many,))
        for _, statement in made_again:
            cursor.execute(statement.encode())
        cursor.execute("ANALYZE")


def connect(conninfo: str, schema: str) -> psycopg.Connection[Any]:
    return psycopg.connect(conninfo, autocommit=True, options=f"-c search_path={schema}")


def _file_conversation(number: int) -> Row:
    name = name_of(number)
    log, mark = _log(number)
    tail = Tail(0, name, 0, log, 1, 1, number, mark, 0, is_unfinished=False, updated_us=NOW_US)
    return number, name, 0, log, 1, 1, number, mark, 0, 0, NOW_US, tail.seal()


def _file_event(number: int) -> Row:
    log, mark = _log(number)
    record = record_of(number)
    facts = (record.event_id, record.kind, record.message_id)
    return number, 0, log, 1, 1, *facts, mark, record.payload, None


def _conversation(number: int) -> Row:
    log, mark = _log(number)
    return number, name_of(number), 0, log, None, 1, 1, mark, 0, False, NOW_US


def _event(number: int) -> Row:
    log, mark = _log(number)
    record = record_of(number)
    return log, 1, 1, record.event_id, record.kind, record.message_id, mark, record.payload


def _log(number: int) -> tuple[int, int]:
    """Return the number of a conversation's log, and the mark of its record."""
    log = log_number(name_of(number), 0)
    record = record_of(number)
    facts = (record.event_id, record.kind, record.message_id, record.payload)
    return log, next_mark(first_mark(log), 1, 1, *facts)


def _listing(number: int) -> Row:
    name, listing = name_of(number), listing_of(number)
    seal = listing_seal(name, listing, "{}")
    facts = (listing.seq, listing.owner, listing.status, listing.created_us, listing.active_us)
    return number, name, *facts, "{}", listing.payload, seal
