"""The tables in PostgreSQL, and their migrations.

This module owns one schema of the database (`turnkeeper` by default), which the library makes and
migrates under an advisory lock. A conversation's row says where its log ends and which node owns
it. A node's row says until when that process counts as alive, by the database's clock.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from ...errors import InvalidInput, JournalRefused, JournalUnavailable

# The statements at [n - 1] lead from version n - 1 to n. A published entry is never edited.
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
    """
    CREATE TABLE erasure (              -- deleted logs whose records are not removed yet
        log bigint PRIMARY KEY
    );
    """,
    """
    -- What lists show of a conversation without its log: a cache, computed by its owner.
    CREATE TABLE listing (
        conversation bigint PRIMARY KEY,
        name text COLLATE "C" NOT NULL, -- the conversation's
        seq bigint NOT NULL,            -- the log up to here; 0 if no owner has computed it
        owner text NOT NULL,            -- the user whose conversation it is
        status text NOT NULL,
        created_us bigint NOT NULL,
        active_us bigint NOT NULL,
        labels text NOT NULL,           -- a JSON object
        payload text NOT NULL,          -- the rest of the row
        seal bigint NOT NULL
    );
    INSERT INTO listing SELECT id, name, 0, '', '', updated_us, updated_us, '{}', '', 0
        FROM conversation WHERE head > 0;
    -- Behind the rows: an index is made at once in a fraction of the time.
    CREATE INDEX listing_id ON listing (name);
    CREATE INDEX listing_created ON listing (created_us, conversation);
    CREATE INDEX listing_active ON listing (active_us, conversation);
    CREATE INDEX owner_id ON listing (owner, name);
    CREATE INDEX owner_created ON listing (owner, created_us, conversation);
    CREATE INDEX owner_active ON listing (owner, active_us, conversation);
    -- Most conversations are at rest, so these stay small, and a turn costs little in them.
    CREATE INDEX status_id ON listing (owner, status, name)
        WHERE status NOT IN ('idle', 'finished');
    CREATE INDEX status_created ON listing (owner, status, created_us, conversation)
        WHERE status NOT IN ('idle', 'finished');
    CREATE INDEX status_active ON listing (owner, status, active_us, conversation)
        WHERE status NOT IN ('idle', 'finished');

    CREATE TABLE label (
        conversation bigint NOT NULL,
        label text NOT NULL,
        value text NOT NULL,
        owner text NOT NULL,            -- as in its listing, and so on
        name text COLLATE "C" NOT NULL,
        created_us bigint NOT NULL,
        active_us bigint NOT NULL,
        PRIMARY KEY (conversation, label)
    );
    CREATE INDEX label_id ON label (owner, label, value, name);
    CREATE INDEX label_created ON label (owner, label, value, created_us, conversation);
    CREATE INDEX label_active ON label (owner, label, value, active_us, conversation);
    """,
    """
    -- Empty until a process asks for search.
    CREATE TABLE search (               -- one row
        swept bigint,                   -- conversations up to this id were queued; null: all
        rules integer NOT NULL          -- the number of the rules that say what a word is
    );
    CREATE TABLE search_queue (         -- logs that have messages that are not in the index
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        log bigint NOT NULL,
        at_us bigint NOT NULL,          -- when they were written, by the database's clock
        is_moved boolean NOT NULL       -- the owner in its listing may have changed
    );
    CREATE TABLE search_log (
        log bigint PRIMARY KEY,
        seq bigint NOT NULL,            -- the log up to here is in the index
        is_moved boolean NOT NULL
    );
    CREATE TABLE search_message (
        id bigint PRIMARY KEY,          -- sorts by time
        log bigint NOT NULL,
        seq bigint NOT NULL,
        left_view smallint NOT NULL,    -- 1: condensed, 2: retracted
        owner text NOT NULL,            -- whose word is among its words
        words tsvector NOT NULL
    );
    CREATE UNIQUE INDEX search_message_at ON search_message (log, seq);
    CREATE INDEX search_message_words ON search_message USING gin (words);
    """,
    """
    CREATE INDEX search_message_owner ON search_message (owner, id);
    -- A search would read the whole list of what is pending; the indexer can wait in its place.
    ALTER INDEX search_message_words SET (fastupdate = off);
    SELECT gin_clean_pending_list('search_message_words');
    """,
    """
    -- Rows of `listing` as turns have left them since. Turns change columns that the indexes of
    -- `listing` have; this table has none of these, so its rows are updated in place.
    CREATE TABLE listing_recent (
        conversation bigint PRIMARY KEY,
        name text COLLATE "C" NOT NULL, -- as in `listing`, and so on
        seq bigint NOT NULL,            -- at least that in `listing`; else this row is void
        owner text NOT NULL,
        status text NOT NULL,
        created_us bigint NOT NULL,
        active_us bigint NOT NULL,
        labels text NOT NULL,
        payload text NOT NULL,
        seal bigint NOT NULL
    ) WITH (fillfactor = 50);
    -- A process of before, which does not know of this table, may delete a conversation.
    CREATE RULE unlisted AS ON DELETE TO listing
        DO ALSO DELETE FROM listing_recent WHERE conversation = OLD.conversation;
    """,
    """
    -- An entry of an index has 2,704 bytes at most. The id, the owner and a label together may have
    -- more, and what has no entry cannot be written. So the label is there by a hash.
    DROP INDEX label_id, label_created, label_active;
    CREATE INDEX label_id
        ON label (owner, hashtextextended(label || E'\\n' || value, 0), name);
    CREATE INDEX label_created
        ON label (owner, hashtextextended(label || E'\\n' || value, 0), created_us, conversation);
    CREATE INDEX label_active
        ON label (owner, hashtextextended(label || E'\\n' || value, 0), active_us, conversation);
    """,
    """
    -- These have no key, and a database that publishes all tables for logical replication changes
    -- no row that nothing identifies.
    ALTER TABLE journal REPLICA IDENTITY FULL;
    ALTER TABLE search REPLICA IDENTITY FULL;
    """,
)

SCHEMA_VERSION = len(MIGRATIONS)

_ENCODINGS = ("UTF8", "SQL_ASCII")  # the latter keeps any bytes as they are
# PostgreSQL has no text with a NUL or with half of a surrogate pair.
UNENCODABLE = (psycopg.DataError, UnicodeError)


# libpq gives no code for the errors of a connection, only the server's words.
_WRONG_ADDRESS = re.compile(
    r"FATAL: +(?:(?:database|role) .* does not exist$|password authentication failed)",
    re.MULTILINE,
)


@contextmanager
def refusal(schema: str) -> Iterator[None]:
    """Convert the database's errors to the journal's own while a journal is opened."""
    try:
        yield
    except (
        psycopg.OperationalError,
        psycopg.InterfaceError,
        psycopg.errors.ReadOnlySqlTransaction,  # a failover is under way
        OSError,
    ) as error:
        # One for each host. Of a host with several addresses, libpq tells what each one said.
        failures = str(error).split("connection failed: ")[1:]
        if failures and all(map(_WRONG_ADDRESS.search, failures)):
            raise JournalRefused(
                f"the database refuses this address: {error}; nothing was changed; check the "
                "names and the password in it"
            ) from error
        raise JournalUnavailable(
            f"the database cannot be reached: {error}; nothing was changed; try again"
        ) from error
    except psycopg.ProgrammingError as error:
        if error.sqlstate is not None:  # the server's words
            raise _unusable(schema, error) from error
        # libpq's words quote a part of the address, and so perhaps of the password.
        raise JournalRefused(
            "conninfo is no address that libpq can read; nothing was changed; check the names of "
            "its settings, and in a URL write the signs %, @, /, : and spaces of a name or "
            "password as %25, %40, %2F, %3A and %20"
        ) from None
    except psycopg.Error as error:
        raise _unusable(schema, error) from error


def _unusable(schema: str, error: psycopg.Error) -> JournalRefused:
    return JournalRefused(f"schema {schema} cannot be used: {error}; nothing was changed")


def unencodable(error: Exception) -> InvalidInput:
    """Return the error that the caller gets for one of the errors in `UNENCODABLE`."""
    outcome = InvalidInput(
        f"PostgreSQL cannot store an id or a name in this call: {error}; nothing was written; "
        "use ids without NUL and without lone surrogates"
    )
    outcome.__cause__ = error
    return outcome


def schema_number(schema: str) -> int:
    """Return the key of the advisory lock that serializes a schema's rare changes."""
    return zlib.crc32(f"turnkeeper\0{schema}".encode())


MIGRATION_S = 200.0
"""The bound on a migration: it makes a row and indexes for each conversation."""


def bring_up_to_date(
    connection: psycopg.Connection[Any], schema: str, *, allow: Callable[[float], None]
) -> None:
    """Make or migrate the tables. Raises `JournalRefused` if they are newer than this code.

    Also refused is a database whose encoding lacks characters: the title or the last message of a
    conversation may have these, and then no event could be written to it any more. If there is
    something to do, it calls `allow` to let the connection wait longer.
    """
    encoding = connection.info.parameter_status("server_encoding")
    if encoding not in _ENCODINGS:
        raise JournalRefused(
            f"schema {schema} is in a database with the encoding {encoding}, which lacks most "
            "characters; nothing was changed; use a database with the encoding UTF8, and move a "
            "journal there with `turnkeeper export` and `import`"
        )
    is_migrating = False
    try:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (schema_number(schema),))
            # IF NOT EXISTS asks for the right to create even if there is nothing to create, and an
            # administrator who made the schema or the tables may have kept that right.
            name = sql.Identifier(schema)
            has_schema, has_tables = _exist(connection, name.as_string(), "journal")
            if not has_schema:
                connection.execute(sql.SQL("CREATE SCHEMA {}").format(name))
            if not has_tables:
                connection.execute("CREATE TABLE journal (version integer NOT NULL)")
            version = _version(connection, schema)
            if version == SCHEMA_VERSION:
                return
            allow(MIGRATION_S)
            connection.execute(f"SET LOCAL statement_timeout = '{MIGRATION_S:.0f}s'".encode())
            for script in MIGRATIONS[version:]:
                connection.execute(script.encode())
            connection.execute("DELETE FROM journal")
            connection.execute("INSERT INTO journal VALUES (%s)", (SCHEMA_VERSION,))
            is_migrating = True
    except psycopg.OperationalError as error:
        if not is_migrating:
            raise
        # The answer to the commit is missing.
        raise JournalUnavailable(
            f"the database cannot be reached: {error}; no conversation was changed, but schema "
            f"{schema} may be migrated to version {SCHEMA_VERSION} now, which older versions of "
            "turnkeeper refuse; try again"
        ) from error


def _exist(connection: psycopg.Connection[Any], schema: str, table: str) -> tuple[bool, bool]:
    found = connection.execute(
        "SELECT to_regnamespace(%s) IS NOT NULL, to_regclass(%s) IS NOT NULL", (schema, table)
    ).fetchone()
    return found or (False, False)


def check_version(connection: psycopg.Connection[Any], schema: str) -> None:
    """Raise `JournalRefused` unless this code can read the tables; change nothing."""
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
