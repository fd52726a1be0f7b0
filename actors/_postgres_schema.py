"""The tables in PostgreSQL: what is in them, how they are made and brought up to date.

Owns one schema of the database (`turnkeeper`, unless told otherwise), which the library makes and
migrates under an advisory lock. A conversation's row says where its log ends and who owns it; a
node's row says until when that process is alive, by the database's own clock.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from .errors import JournalRefused, JournalUnavailable

# Version n is reached from n - 1 by the statements at [n - 1]. Nothing here is ever edited.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE node (                 -- a process that owns, or listens
        id bigint PRIMARY KEY,
        address text NOT NULL,
        lease_until timestamptz NOT NULL,
        is_listening boolean NOT NULL
    );

    CREATE TABLE conversation (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        name text NOT NULL UNIQUE,
        incarnation bigint NOT NULL,    -- how often the name was deleted
        log bigint NOT NULL UNIQUE,     -- log_number(name, incarnation)
        owner bigint,                   -- a node; one that is not there counts as gone
        epoch bigint NOT NULL,
        head bigint NOT NULL,
        tip bigint NOT NULL,            -- the mark of the record at head
        forked_at bigint NOT NULL,      -- up to here it is its parent's log; 0 if it is no fork
        is_unfinished boolean NOT NULL,
        updated_us bigint NOT NULL
    ) WITH (fillfactor = 70);           -- updated with each append, in place
    CREATE INDEX unfinished ON conversation (name) WHERE is_unfinished;

    CREATE TABLE event (
        log bigint NOT NULL,
        seq bigint NOT NULL,
        epoch bigint NOT NULL,
        event_id text NOT NULL,
        kind text NOT NULL,
        message_id text,
        mark bigint NOT NULL,           -- checksum over the record and the mark before it
        payload bytea NOT NULL,
        PRIMARY KEY (log, seq)
    );
    -- The id first: ids are time-ordered, so this one grows at its end.
    CREATE UNIQUE INDEX event_id ON event (event_id, log);
    CREATE UNIQUE INDEX message_id ON event (message_id, log) WHERE message_id IS NOT NULL;

    CREATE TABLE fork (
        log bigint PRIMARY KEY,
        parent bigint NOT NULL,         -- the log that has the record at seq
        seq bigint NOT NULL
    );
    CREATE INDEX fork_of ON fork (parent);

    CREATE TABLE snapshot (
        log bigint PRIMARY KEY,
        seq bigint NOT NULL,
        version text NOT NULL,
        tip bigint NOT NULL,            -- the mark of the record at seq
        payload bytea NOT NULL,
        seal bigint NOT NULL
    );

    CREATE TABLE rejection (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        log bigint NOT NULL,
        at double precision NOT NULL,
        violation text NOT NULL,
        reason text NOT NULL,
        payload bytea NOT NULL
    );
    CREATE INDEX rejection_of ON rejection (log);
    CREATE INDEX rejection_at ON rejection (at);
    """,
)

SCHEMA_VERSION = len(MIGRATIONS)

_LOCK_WAIT_S = 5


def connect(conninfo: str, schema: str, *, tcp_timeout_s: float) -> psycopg.Connection[Any]:
    """A connection whose statements are transactions of their own, and wait for nothing long.

    A process that stops must hold nothing: so no statement waits long for a lock, no transaction
    idles, and a connection to a server that has gone is given up.
    """
    options = (
        f"-c search_path={_quoted(schema)} -c lock_timeout={_LOCK_WAIT_S}s "
        f"-c idle_in_transaction_session_timeout={_LOCK_WAIT_S}s"
    )
    return psycopg.connect(
        conninfo,
        autocommit=True,
        connect_timeout=max(2, int(tcp_timeout_s)),
        tcp_user_timeout=int(tcp_timeout_s * 1000),
        options=options,
        prepare_threshold=1,
    )


@contextmanager
def refusal(schema: str) -> Iterator[None]:
    """While a journal is opened: the database's errors as ours."""
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise JournalUnavailable(
            f"the database cannot be reached: {error}; nothing was changed; try again"
        ) from error
    except psycopg.Error as error:
        raise JournalRefused(
            f"schema {schema} cannot be used: {error}; nothing was changed"
        ) from error


def _quoted(schema: str) -> str:
    # As an option's value: an identifier, with spaces and backslashes escaped once more.
    identifier = sql.Identifier(schema).as_string()
    return identifier.replace("\\", "\\\\").replace(" ", "\\ ")


def schema_number(schema: str) -> int:
    """The key of the advisory lock under which a schema's rare changes are made one by one."""
    return zlib.crc32(f"turnkeeper\0{schema}".encode())


def bring_up_to_date(connection: psycopg.Connection[Any], schema: str) -> None:
    """Make or migrate the tables. Raises `JournalRefused` where they are newer than this code."""
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (schema_number(schema),))
        connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
        connection.execute("CREATE TABLE IF NOT EXISTS journal (version integer NOT NULL)")
        version = _version(connection, schema)
        if version == SCHEMA_VERSION:
            return
        for script in MIGRATIONS[version:]:
            connection.execute(script.encode())
        connection.execute("DELETE FROM journal")
        connection.execute("INSERT INTO journal VALUES (%s)", (SCHEMA_VERSION,))


def check_version(connection: psycopg.Connection[Any], schema: str) -> None:
    """For those who only read. Raises `JournalRefused` where they cannot."""
    try:
        version = _version(connection, schema)
    except psycopg.errors.UndefinedTable:
        version = 0
    if not version:
        raise JournalRefused(f"no journal in schema {schema}; nothing was created")
    if version < SCHEMA_VERSION:
        raise JournalRefused(
            f"schema {schema} has version {version}, and this code reads {SCHEMA_VERSION}; nothing "
            "was changed; open it once for writing to bring it up to date"
        )


def _version(connection: psycopg.Connection[Any], schema: str) -> int:
    row = connection.execute("SELECT max(version) FROM journal").fetchone()
    version = int(row[0] or 0) if row else 0
    if version > SCHEMA_VERSION:
        raise JournalRefused(
            f"schema {schema} has version {version}, and this code knows 1 to {SCHEMA_VERSION}; "
            "nothing was changed; use a newer turnkeeper"
        )
    return version
