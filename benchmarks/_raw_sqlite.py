"""SQLite by hand, with every setting of a journal's file, and nothing around it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOG_PAGES_FEW, LOG_PAGES_MANY = 256, 2_000
"""The lengths of the write-ahead log for a few writers at a time and for many, as a journal's."""
MANY_WRITERS = 32

# The least that refuses an id which is known: no index over (log, seq), as our file has none.
SCHEMA = """
CREATE TABLE event (
    id INTEGER PRIMARY KEY, log INTEGER NOT NULL, seq INTEGER NOT NULL, epoch INTEGER NOT NULL,
    event_id TEXT NOT NULL, kind TEXT NOT NULL, message_id TEXT, mark INTEGER NOT NULL,
    payload BLOB NOT NULL
);
CREATE UNIQUE INDEX event_id ON event (event_id, log);
"""
_COLUMNS = "log, seq, epoch, event_id, kind, message_id, mark, payload"


def connect(path: Path, writers: int) -> sqlite3.Connection:
    """Open a file with a journal's settings, for this many writers at a time."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA page_size = 8192")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")
    connection.execute("PRAGMA checkpoint_fullfsync = ON")
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("PRAGMA cache_size = -16000")
    pages = LOG_PAGES_FEW if writers < MANY_WRITERS else LOG_PAGES_MANY
    connection.execute(f"PRAGMA wal_autocheckpoint = {pages}")
    return connection


def insert_statement(rows: int) -> str:
    """Return the statement that inserts this many rows at once; it is its own transaction."""
    row = "(?, ?, ?, ?, ?, ?, ?, ?)"
    return f"INSERT INTO event ({_COLUMNS}) VALUES {', '.join([row] * rows)}"  # noqa: S608 - ours


def flat(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the values of all rows, one after the other."""
    return [value for row in rows for value in row]
