"""The SQLite file: what is in it, how it is made, opened and brought up to date.

Owns the file format. A file is a journal exactly when it carries this application id; its
`user_version` is the version of the schema. A new file is built beside its place and renamed into
it, so what stands there is a whole journal or nothing, and an empty file is never taken for one.

Opening never changes a file that is not a journal, or that a newer version has written.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from ._sqlite_wal import has_lost_commits
from .errors import JournalRefused

Synchronous = Literal["FULL", "EXTRA", "NORMAL"]

APPLICATION_ID = 0x7475726E  # "turn"

# Version n is reached from n - 1 by the statements at [n - 1]. Nothing here is ever edited.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE journal (              -- one row
        generation INTEGER NOT NULL,    -- counts the processes that opened the file for writing
        owner TEXT NOT NULL             -- the newest of them
    );
    INSERT INTO journal VALUES (0, 'nobody');

    CREATE TABLE conversation (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        incarnation INTEGER NOT NULL,   -- how often the name was deleted
        log INTEGER NOT NULL UNIQUE,    -- log_number(name, incarnation)
        epoch INTEGER NOT NULL,
        head INTEGER NOT NULL,
        last INTEGER NOT NULL,          -- the id of the event at head, or 0
        tip INTEGER NOT NULL,           -- its mark
        forked_at INTEGER NOT NULL,     -- up to here it is its parent's log; 0 if it is no fork
        is_unfinished INTEGER NOT NULL,
        updated_us INTEGER NOT NULL,    -- microseconds since the epoch, UTC
        seal INTEGER NOT NULL           -- checksum over all of the above but id
    );

    -- In the order of the commits, so that it grows at its end. The records of one log are
    -- chained by `previous`, and found in the middle by every 64th: an index over all of them
    -- would be written all over the place in every commit.
    CREATE TABLE event (
        id INTEGER PRIMARY KEY,
        previous INTEGER NOT NULL,
        log INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        epoch INTEGER NOT NULL,
        event_id TEXT NOT NULL,
        kind TEXT NOT NULL,
        message_id TEXT,
        mark INTEGER NOT NULL,          -- checksum over the record and the mark before it
        payload BLOB NOT NULL,
        parts TEXT                      -- where its large parts belong, and their digests
    );
    CREATE INDEX anchor ON event (log, seq) WHERE seq & 63 = 1;
    -- The id first: ids are time-ordered, so this one grows at its end too.
    CREATE UNIQUE INDEX event_id ON event (event_id, log);
    CREATE UNIQUE INDEX message_id ON event (message_id, log) WHERE message_id IS NOT NULL;

    CREATE TABLE fork (
        log INTEGER PRIMARY KEY,
        parent INTEGER NOT NULL,        -- the log that has the record at seq
        seq INTEGER NOT NULL,
        seal INTEGER NOT NULL
    );
    CREATE INDEX fork_of ON fork (parent);

    CREATE TABLE part (
        digest BLOB PRIMARY KEY,
        data BLOB NOT NULL
    );
    CREATE TABLE part_use (
        log INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        digest BLOB NOT NULL,
        PRIMARY KEY (log, seq, digest)
    ) WITHOUT ROWID;
    CREATE INDEX part_used ON part_use (digest);

    CREATE TABLE snapshot (
        log INTEGER PRIMARY KEY,
        seq INTEGER NOT NULL,
        version TEXT NOT NULL,
        tip INTEGER NOT NULL,           -- the mark of the record at seq
        payload BLOB NOT NULL,
        seal INTEGER NOT NULL
    );

    CREATE TABLE rejection (
        id INTEGER PRIMARY KEY,
        log INTEGER NOT NULL,
        at REAL NOT NULL,
        violation TEXT NOT NULL,
        reason TEXT NOT NULL,
        payload BLOB NOT NULL,
        seal INTEGER NOT NULL
    );
    CREATE INDEX rejection_of ON rejection (log);
    CREATE INDEX rejection_at ON rejection (at);
    """,
)

SCHEMA_VERSION = len(MIGRATIONS)


# Every how many records `anchor` has one; only a migration may change it.
ANCHOR_STEP = 64

# UPDATE … FROM, RETURNING, and the JSON functions built in.
_SQLITE_VERSION_MIN = (3, 38)


def open_for_writing(
    path: Path, *, synchronous: Synchronous, busy_wait_s: float
) -> sqlite3.Connection:
    """A connection to the journal at `path`, which is made if nothing is there.

    The caller must hold the owner lock. Raises `JournalRefused` when what is there is not a
    journal, is newer than this code, or cannot be written.
    """
    if not path.exists():
        _create(path)
    # Looked at before it is opened: closing it would fold a damaged log into the file and throw
    # it away.
    refuse_lost_commits(path)
    connection = _connect(path, "rw", busy_wait_s)
    try:
        version = _check(connection, path)
        _set_up(connection, path, synchronous)
        _migrate(connection, version)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        connection.close()
        raise refusal(path, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path, *, busy_wait_s: float, is_immutable: bool) -> sqlite3.Connection:
    """A connection that changes and creates nothing.

    `is_immutable` says that nobody has the file open for writing; SQLite then takes no lock and
    leaves no `-wal` and `-shm` file behind, also in a folder that cannot be written.
    """
    if not path.exists():
        raise JournalRefused(f"no journal at {path}: no such file; nothing was created")
    connection = _connect(path, "ro", busy_wait_s, is_immutable=is_immutable)
    try:
        version = _check(connection, path)
        if version < SCHEMA_VERSION:
            raise JournalRefused(
                f"{path} has schema version {version}, and this code reads {SCHEMA_VERSION}; "
                "nothing was changed; open it once for writing to bring it up to date"
            )
    except (sqlite3.Error, UnicodeDecodeError) as error:
        connection.close()
        raise refusal(path, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def refuse_lost_commits(path: Path) -> None:
    """Raise `JournalRefused` where SQLite would silently drop good commits."""
    if has_lost_commits(path):
        raise JournalRefused(
            f"{path} is damaged: its write-ahead log cannot be read to the end, and commits lie "
            "behind; nothing was changed; restore it from a backup, or run `turnkeeper repair`"
        )


def error_code(error: BaseException) -> int:
    """SQLite's primary result code, or 0 where the error has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_damage(error: BaseException) -> bool:
    """Whether an error says that what is in the file is not what was written.

    Values of the wrong type, and text that is no text, are found by Python and not by SQLite.
    """
    code = error_code(error)
    return (
        isinstance(error, ValueError | TypeError)
        or (isinstance(error, sqlite3.OperationalError) and not code)
        # All our SQL is fixed, so what SQLite does not understand is the file.
        or code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
    )


def _connect(
    path: Path, mode: Literal["rw", "ro"], busy_wait_s: float, *, is_immutable: bool = False
) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < _SQLITE_VERSION_MIN:
        raise JournalRefused(
            f"this Python has SQLite {sqlite3.sqlite_version}; the journal needs 3.38 or later"
        )
    uri = f"{path.absolute().as_uri()}?mode={mode}{'&immutable=1' if is_immutable else ''}"
    try:
        return sqlite3.connect(uri, uri=True, timeout=busy_wait_s, isolation_level=None)
    except sqlite3.Error as error:
        raise refusal(path, error) from error


def _check(connection: sqlite3.Connection, path: Path) -> int:
    """The schema version of what is at `path`, if this code can use it."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    if application_id != APPLICATION_ID:
        what = "an empty file" if not path.stat().st_size else "no turnkeeper journal"
        raise JournalRefused(
            f"{path} is {what}; nothing was changed; give another path, restore the journal, or "
            "move the file away"
        )
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not 1 <= version <= SCHEMA_VERSION:
        raise JournalRefused(
            f"{path} has schema version {version}, and this code knows 1 to {SCHEMA_VERSION}; "
            "nothing was changed; use a newer turnkeeper"
        )
    if _read_schema(connection) != _schema_of(version):
        raise JournalRefused(
            f"{path} is damaged: its schema is not that of version {version}; nothing was changed; "
            "restore it from a backup, or run `turnkeeper repair`"
        )
    return int(version)


def _read_schema(connection: sqlite3.Connection) -> Sequence[object]:
    return connection.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_schema "
        "WHERE name NOT LIKE 'sqlite_stat%' ORDER BY name"
    ).fetchall()


@cache
def _schema_of(version: int) -> Sequence[object]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript("".join(MIGRATIONS[:version]))
        return _read_schema(connection)


def _set_up(connection: sqlite3.Connection, path: Path, synchronous: Synchronous) -> None:
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("PRAGMA fullfsync = ON")  # macOS: or fsync does not reach the disk
    connection.execute("PRAGMA checkpoint_fullfsync = ON")
    connection.execute("PRAGMA secure_delete = ON")  # what is deleted is gone from the file
    connection.execute("PRAGMA cache_size = -16000")
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    (level,) = connection.execute("PRAGMA synchronous").fetchone()
    if mode != "wal" or level != {"NORMAL": 1, "FULL": 2, "EXTRA": 3}[synchronous]:
        raise JournalRefused(
            f"{path} cannot be used durably: SQLite gives journal mode {mode}, synchronous "
            f"{level}; nothing was changed; put the journal on a local disk"
        )


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    """One transaction: a process that dies half-way leaves the old version."""
    if version == SCHEMA_VERSION:
        return
    # executescript commits first and then obeys the script's own BEGIN.
    script = "".join(MIGRATIONS[version:])
    connection.executescript(
        f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )


def _create(path: Path) -> None:
    wal = Path(f"{path}-wal")
    if wal.exists() and wal.stat().st_size:
        raise JournalRefused(
            f"no file at {path}, but the log of one at {wal}; nothing was created; restore the "
            "file to its place, or move its log away"
        )
    if repaired_draft(path).exists():
        raise JournalRefused(
            f"no file at {path}, but one that is ready to take its place: a repair was "
            "interrupted; nothing was created; run `turnkeeper repair` again"
        )
    draft = Path(f"{path}-new")
    try:
        make_file(draft)
        draft.rename(path)
        sync_folder(path.parent)
    except (OSError, sqlite3.Error) as error:
        raise JournalRefused(f"no journal can be made at {path}: {error}") from error


def make_file(path: Path) -> None:
    """An empty journal at `path`, in place of whatever is there."""
    for leftover in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        leftover.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA page_size = 8192")  # records of a kilobyte fill it better
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("PRAGMA journal_mode = WAL")
        _migrate(connection, 0)


def repaired_draft(path: Path) -> Path:
    """Where a repair keeps what takes the place of `path`; there only while it is swapped in."""
    return Path(f"{path}-repaired")


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refusal(path: Path, error: Exception) -> JournalRefused:
    match error_code(error):
        case sqlite3.SQLITE_NOTADB:
            found = "it is no turnkeeper journal"
            advice = "give another path, or move the file away"
        case _ if is_damage(error):
            found = f"it is damaged ({error})"
            advice = "restore it from a backup, or run `turnkeeper repair`"
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            found = str(error)
            advice = "check the permissions of the file and its folder, or open it read-only"
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            found = f"another program is in the middle of writing it ({error})"
            advice = "end that program, and try again"
        case _:
            found = str(error)
            advice = "see to it, and try again"
    return JournalRefused(f"{path} cannot be opened: {found}; nothing was changed; {advice}")
