"""The SQLite file: its schema, and how it is created, opened and migrated.

Owns the file format. A file is a journal exactly if it carries this application id; its
`user_version` is the version of the schema. A new file is built under another name and renamed into
place, so the path holds a whole journal or nothing, and an empty file never counts as one.

Opening never changes a file that is not a journal, or that a newer version has written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sqlite3
import stat
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Literal

from ...errors import InvalidInput, JournalRefused, JournalUnavailable
from ...values.type_names import a_type
from .forked import KnownConnection, note, refuse_inherited
from .wal import LogStamp, fits, has_lost_commits, is_stamped, log_salt

Synchronous = Literal["FULL", "EXTRA", "NORMAL"]

# New files are readable by their owner only, and are never created through an existing link.
PRIVATE = 0o600
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)

DISK_BYTES_S_MIN = 4 << 20
"""A disk that reads or writes less than this in a second counts as hung."""

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
    """
    CREATE TABLE log_stamp (            -- one row; `wal` says how it is used
        is_log_needed INTEGER NOT NULL, -- 1 in the file, 0 in its log
        salt INTEGER NOT NULL           -- the first salt of the log, as of the stamp
    );
    INSERT INTO log_stamp VALUES (0, 0);
    """,
    """
    CREATE TABLE erasure (              -- deleted logs whose records are not removed yet
        log INTEGER PRIMARY KEY,
        last INTEGER NOT NULL,          -- the id of the newest record that is left
        head INTEGER NOT NULL,          -- and its seq
        seal INTEGER NOT NULL
    );
    """,
    """
    -- What lists show of a conversation without its log: a cache, computed by its owner.
    CREATE TABLE listing (
        conversation INTEGER PRIMARY KEY,
        name TEXT NOT NULL,             -- the conversation's
        seq INTEGER NOT NULL,           -- the log up to here; 0 if no owner has computed it
        owner TEXT NOT NULL,            -- the user whose conversation it is
        status TEXT NOT NULL,
        created_us INTEGER NOT NULL,
        active_us INTEGER NOT NULL,
        labels TEXT NOT NULL,           -- a JSON object
        payload TEXT NOT NULL,          -- the rest of the row
        seal INTEGER NOT NULL
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
        conversation INTEGER NOT NULL,
        label TEXT NOT NULL,
        value TEXT NOT NULL,
        owner TEXT NOT NULL,            -- as in its listing, and so on
        name TEXT NOT NULL,
        created_us INTEGER NOT NULL,
        active_us INTEGER NOT NULL,
        PRIMARY KEY (conversation, label)
    ) WITHOUT ROWID;
    CREATE INDEX label_id ON label (owner, label, value, name);
    CREATE INDEX label_created ON label (owner, label, value, created_us, conversation);
    CREATE INDEX label_active ON label (owner, label, value, active_us, conversation);
    """,
    """
    -- Empty until a process asks for search. The words are in `search_word`, an FTS5 table that is
    -- made then.
    CREATE TABLE search (               -- one row
        cursor INTEGER NOT NULL,        -- the id of the last event that was looked at
        complete_us INTEGER NOT NULL,   -- what was written before this time is in the index
        rules INTEGER NOT NULL,         -- the number of the rules that say what a word is
        is_clean INTEGER NOT NULL       -- 0: words of deleted messages are left in its pages
    );
    CREATE TABLE search_message (
        id INTEGER PRIMARY KEY,         -- sorts by time
        log INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        event INTEGER NOT NULL,         -- the id of its event
        left_view INTEGER NOT NULL,     -- 1: condensed, 2: retracted
        owner TEXT NOT NULL,            -- whose word is the first of its words
        words TEXT NOT NULL
    );
    CREATE UNIQUE INDEX search_message_at ON search_message (log, seq);
    CREATE TABLE search_again (         -- logs whose messages may have the word of another owner
        log INTEGER PRIMARY KEY
    );
    """,
    """
    -- The rows of `listing` that have changed last, a bounded number: a turn writes here, and the
    -- indexes stay as they are until the row is folded into `listing`. As long as it is here, the
    -- columns that a turn changes count as they are here: seq, status, active_us, payload, seal.
    -- The others are the same in both.
    CREATE TABLE listing_recent (
        conversation INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        seq INTEGER NOT NULL,
        owner TEXT NOT NULL,
        status TEXT NOT NULL,
        created_us INTEGER NOT NULL,
        active_us INTEGER NOT NULL,
        labels TEXT NOT NULL,
        payload TEXT NOT NULL,
        seal INTEGER NOT NULL
    );
    """,
)

SCHEMA_VERSION = len(MIGRATIONS)

# The oldest version that can be read without a migration.
READABLE_VERSION_MIN = 1
_STAMPED_VERSION_MIN = 2


# SQLite makes them for `search_word`, each as its version has it; a trigger on one is a stranger's.
_WORD_TABLES = frozenset(
    f"search_word{part}" for part in ("", "_config", "_content", "_data", "_docsize", "_idx")
)
# The first version that may have an index of words.
SEARCH_VERSION = 5
# The first version with listings; an older file that is only read shows none. And the first one
# that keeps those that have changed last apart.
LISTING_VERSION = 4
_RECENT_VERSION = 6
_NO_LISTINGS = """
    CREATE TEMP VIEW listing AS
        SELECT id AS conversation, name, 0 AS seq, '' AS owner, '' AS status,
            updated_us AS created_us, updated_us AS active_us, '{}' AS labels, '' AS payload,
            0 AS seal
        FROM conversation WHERE head > 0;
    CREATE TEMP VIEW label AS
        SELECT 0 AS conversation, '' AS label, '' AS value, '' AS owner, '' AS name,
            0 AS created_us, 0 AS active_us
        WHERE false;
"""
_NO_RECENT = """
    CREATE TEMP VIEW listing_recent AS
        SELECT conversation, name, seq, owner, status, created_us, active_us, labels, payload, seal
        FROM listing WHERE false;
"""

# The index `anchor` has one record in this many; only a migration may change it.
ANCHOR_STEP = 64

# Whatever is before it: with a mistyped scheme, or in the quotes of an environment file, its
# password would get into the name of a file.
_URL = re.compile("[^/]*://")

# UPDATE … FROM, RETURNING, and the JSON functions built in.
_SQLITE_VERSION_MIN = (3, 38)

_OPEN_FILES_MAX = 6  # of one opening, at the same time


def real_path(path: str | PathLike[str]) -> Path:
    """Return the absolute path of a file, with all symbolic links followed; it need not exist.

    SQLite names the log after the file that it opens, so two names of one file would give it two
    logs. Everything that opens a file resolves its name first. Raises `JournalRefused` for circular
    links, and for a folder, a pipe or a device, where SQLite would fail or wait forever. Raises
    `InvalidInput` if this is not a path, or if it is empty, a URL, or ":memory:", which SQLite
    itself would not take as the name of a file.
    """
    name: str | bytes | None
    try:
        name = os.fspath(path)
    except TypeError:
        name = None
    if not isinstance(name, str):
        raise InvalidInput(f"path is {a_type(path)}; it takes the path of a file, as text or Path")
    if name == ":memory:":
        raise InvalidInput("path is ':memory:'; it takes the path of a file; use MemoryJournal()")
    if not name:
        raise InvalidInput("path is empty; it takes the path of a file")
    if _URL.match(name):
        # It may hold a password, so it is not quoted.
        raise InvalidInput(
            "path is a URL; it takes the path of a file, with ./ before it if the file has such a "
            "name; PostgresJournal takes the URL of a database, which begins with postgresql://"
        )
    is_other = False
    try:
        resolved = Path(name).resolve()
        # Python 3.13 reports circular links here, older versions in the line above.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            is_other = not stat.S_ISREG(resolved.stat().st_mode)
    except (OSError, RuntimeError, ValueError) as error:
        raise JournalRefused(f"no journal can be at {path}: {error}; nothing was done") from error
    if is_other:
        raise JournalRefused(
            f"{path} cannot be opened: it is not a regular file; nothing was changed"
        )
    return resolved


def refuse_stranger(path: Path) -> None:
    """Raise `JournalRefused` if the file is no journal, before a lock is put beside it.

    It reads the file alone and, if a program has its log in use, both together. Any other doubt is
    for the checks of the opening, which hold the lock.
    """
    with refusals(path):
        has_log = log_bytes(path) > 0
        if not path.exists() or (has_log and not Path(f"{path}-shm").exists()):
            return
        try:
            with contextlib.closing(_connect(path, "ro", 0, is_immutable=True)) as connection:
                (application_id,) = connection.execute("PRAGMA application_id").fetchone()
            if application_id == APPLICATION_ID:
                return
            # A page in the log comes before that of the file, which may be damaged.
            with contextlib.closing(
                _connect(path, "ro", 0, is_immutable=not has_log)
            ) as connection:
                _check_kind(connection, path)
        except sqlite3.Error as error:
            if error_code(error) == sqlite3.SQLITE_NOTADB and not has_log:
                raise


def _ignore() -> None:
    return


def open_for_writing(
    path: Path,
    *,
    synchronous: Synchronous,
    busy_wait_s: float,
    on_migrated: Callable[[], None] = _ignore,
) -> sqlite3.Connection:
    """Return a connection to the journal at `path`, creating the file if it does not exist.

    The caller must hold the owner lock, or be about to take it over; `on_migrated` is called as
    soon as a migration has shut its holder out. Raises `JournalRefused` if the file is not a
    journal, is newer than this code, or cannot be written.
    """
    with refusals(path):
        _refuse_links(path)
        if not path.exists():
            _create(path)
        # Checked before opening: closing the file would copy a bad log into it and delete the log.
        refuse_bad_log(path)
        connection = _connect(path, "rw", busy_wait_s)
        # If the file is refused, as a backup is to which a log of later commits was left, that log
        # must not be folded into it.
        holder = log_holder(path, busy_wait_s) if log_bytes(path) else contextlib.nullcontext()
        with closing_on_error(connection), holder, closing_on_error(connection):
            version = _check(connection, path)
            _set_up(connection, path, synchronous)
            _refuse_stale_rows(connection, path)
            if version < SCHEMA_VERSION:
                try:
                    _migrate(connection, version)
                except sqlite3.Error:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    # During a takeover, another process may have migrated it meanwhile.
                    if _check(connection, path) < SCHEMA_VERSION:
                        raise
                else:
                    on_migrated()
        return connection


def open_for_reading(path: Path, *, busy_wait_s: float, is_immutable: bool) -> sqlite3.Connection:
    """Return a connection that changes and creates nothing.

    `is_immutable` says that no process has the file open for writing. SQLite then takes no lock
    and creates no `-wal` and `-shm` files, so that the folder may be read-only.
    """
    with refusals(path):
        if not path.exists():
            raise JournalRefused(f"no journal at {path}: no such file; nothing was created")
        connection = _connect(path, "ro", busy_wait_s, is_immutable=is_immutable)
        with closing_on_error(connection):
            version = _check(connection, path)
            if version < READABLE_VERSION_MIN:
                raise JournalRefused(
                    f"{path} has schema version {version}, and this code reads "
                    f"{READABLE_VERSION_MIN} to {SCHEMA_VERSION}; nothing was changed; open it "
                    "once for writing to bring it up to date"
                )
            if version < LISTING_VERSION:
                connection.executescript(_NO_LISTINGS)
            if version < _RECENT_VERSION:
                connection.executescript(_NO_RECENT)
        return connection


def log_bytes(path: Path) -> int:
    """Return the size of the write-ahead log beside a file; 0 if none can be seen."""
    with contextlib.suppress(OSError):
        return Path(f"{path}-wal").stat().st_size
    return 0


@contextlib.contextmanager
def log_holder(path: Path, busy_wait_s: float, *, is_damaged: bool = False) -> Iterator[None]:
    """Keep the log beside a file, even if the connection that writes the file is closed.

    Only the last connection folds the log into the file. This one reads once, for its lock; if the
    log `is_damaged`, the read may fail, and leaves it the lock all the same.
    """
    with contextlib.closing(_connect(path, "ro", busy_wait_s)) as connection:
        try:
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        except sqlite3.Error:
            if not is_damaged:
                raise
        yield


@contextlib.contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Convert errors of opening a file to errors that its caller can act on."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError, MemoryError, OSError) as error:
        raise refusal(path, error) from error


@contextlib.contextmanager
def closing_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    """Close a connection if setting it up fails."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def refuse_bad_log(path: Path) -> None:
    """Raise `JournalRefused` if SQLite would misread the log beside a file.

    Call this only while no process has the file open for writing: a writer moves the stamp.
    """
    with refusals(path):
        # Twice: a process that closed the file in between has folded its log into it.
        is_own = is_log_of(path) or is_log_of(path)
    if not is_own:
        found = (
            "its write-ahead log is missing, and with it the newest commits"
            if log_salt(path) is None
            else f"the write-ahead log beside it, {path}-wal, is not its own"
        )
        raise JournalRefused(
            f"{path} is not whole: {found}; nothing was changed; put both files back as they "
            "were, or run `turnkeeper repair` to go on with the file alone"
        )
    if has_lost_commits(path):
        raise JournalRefused(
            f"{path} is damaged: its write-ahead log cannot be read to the end, and commits "
            "follow the damage; nothing was changed; restore a backup, or run `turnkeeper "
            "repair`"
        )


def refuse_replaced(path: Path, cause: Exception) -> None:
    """Raise `JournalRefused` if the log beside a damaged file is not its own.

    For a file that a process has open for writing: repairing the file would not help, since the
    commits are in the file and the log that this process opened.
    """
    with refusals(path):
        is_replaced = not is_log_of(path) and not is_log_of(path)
    if is_replaced:
        raise JournalRefused(
            f"{path} is not whole: it, or the write-ahead log beside it, was replaced while a "
            "process had it open for writing; nothing was changed; end that process, then put both "
            "files back as they were, or restore a backup"
        ) from cause


def is_log_of(path: Path) -> bool:
    """Return True if the log beside a file, or its absence, fits the file's stamp."""
    stamp, opening_pages = _read_stamp(path)
    return fits(path, stamp, opening_pages)


def is_log_stamped(path: Path) -> bool:
    """Return True if the log beside a file fits its stamp, and will, whatever is written to it."""
    with refusals(path):
        return is_stamped(path, _read_stamp(path)[0])


def _read_stamp(path: Path) -> tuple[LogStamp, Container[int]]:
    """Return a file's stamp, and the pages that opening it writes."""
    opening_pages: set[int] = set()
    stamp = LogStamp(is_log_needed=False, salt=0)
    if not path.exists():
        return stamp, opening_pages
    try:
        # The file alone, as if it had no log.
        with contextlib.closing(_connect(path, "ro", 0, is_immutable=True)) as connection:
            is_log_needed, salt = connection.execute(
                "SELECT is_log_needed, salt FROM log_stamp"
            ).fetchone()
            opening_pages.update(
                row[0]
                for row in connection.execute(
                    "SELECT rootpage FROM sqlite_schema WHERE name IN ('journal', 'log_stamp')"
                )
            )
            stamp = LogStamp(bool(is_log_needed), int(salt))
    except (sqlite3.Error, JournalRefused, TypeError, ValueError) as error:
        # A file of an older version has no stamp; damage is examined by the checks that follow.
        cannot_be_read = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM)
        if error_code(error) in cannot_be_read:
            raise
    return stamp, opening_pages


def error_code(error: BaseException) -> int:
    """Return SQLite's primary result code, or 0 if the error has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_damage(error: BaseException) -> bool:
    """Return True if an error means that the file's content differs from what was written.

    Values of the wrong type and text that is not valid UTF-8 are found by Python, not by SQLite.
    """
    code = error_code(error)
    return (
        isinstance(error, ValueError | TypeError)
        or (isinstance(error, sqlite3.OperationalError) and not code)
        # All our SQL is fixed, so a statement that SQLite cannot run means a damaged schema.
        or code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
    )


def _refuse_links(path: Path) -> None:
    """Raise if the file has a second name, or if one of its side files is a link."""
    with contextlib.suppress(FileNotFoundError):
        facts = path.stat()
        if stat.S_ISREG(facts.st_mode) and facts.st_nlink > 1:
            raise JournalRefused(
                f"{path} has a second name (a hard link); nothing was changed; a journal that is "
                "written under two names is lost: copy the file in place of linking it"
            )
    for end in ("-wal", "-shm", "-new", "-owner"):
        if Path(f"{path}{end}").is_symlink():
            raise JournalRefused(
                f"{path}{end} is a symbolic link; nothing was changed; remove it, or put the file "
                "that it names in its place"
            )


_NEWEST_LOOKED_AT = 1024
_STALE = f"""
    SELECT c.name FROM
        (SELECT log, max(id) AS newest FROM
            (SELECT log, id FROM event ORDER BY id DESC LIMIT {_NEWEST_LOOKED_AT}) GROUP BY log) e
        JOIN conversation c USING (log) WHERE c.last < e.newest AND c.head
"""  # noqa: S608 - our own text


def _refuse_stale_rows(connection: sqlite3.Connection, path: Path) -> None:
    """Raise if one of the newest records is after the end of its log in the conversation's row.

    If the disk lost the write of a page, an older row is left. It is undamaged but names an earlier
    end, and appending there would conflict with the records after it.
    """
    row = connection.execute(_STALE).fetchone()
    if row is not None:
        raise JournalRefused(
            f"{path} is damaged: conversation {row[0]} has records behind the end that its row "
            "names, so a write to the disk was lost; nothing was changed; restore it from a "
            "backup, or run `turnkeeper repair`"
        )


def _connect(
    path: Path, mode: Literal["rw", "ro"], busy_wait_s: float, *, is_immutable: bool = False
) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < _SQLITE_VERSION_MIN:
        raise JournalRefused(
            f"this Python has SQLite {sqlite3.sqlite_version}; the journal needs 3.38 or later"
        )
    if not is_immutable:
        refuse_inherited(path)
    uri = f"{path.absolute().as_uri()}?mode={mode}{'&immutable=1' if is_immutable else ''}"
    try:
        connection = sqlite3.connect(
            uri, uri=True, timeout=busy_wait_s, isolation_level=None, factory=KnownConnection
        )
    except sqlite3.Error as error:
        raise refusal(path, error) from error
    if not is_immutable:
        note(connection, path)
    return connection


def _check_kind(connection: sqlite3.Connection, path: Path) -> None:
    """Raise `JournalRefused` if the file is no journal."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    if application_id != APPLICATION_ID:
        found = "an empty file" if not path.stat().st_size else "not a turnkeeper journal"
        raise JournalRefused(
            f"{path} is {found}; nothing was changed; give another path, restore the journal, or "
            "move the file away"
        )


def _check(connection: sqlite3.Connection, path: Path) -> int:
    """Return the file's schema version; raise `JournalRefused` if this code cannot use it."""
    _check_kind(connection, path)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not 1 <= version <= SCHEMA_VERSION:
        raise JournalRefused(
            f"{path} has schema version {version}, and this code knows 1 to {SCHEMA_VERSION}; "
            "nothing was changed; use a newer turnkeeper"
        )
    ours = _schema_of(version)
    # Programs beside the journal, such as those that replicate the file, keep tables of their own.
    tables = {table for _, _, table, _ in ours} | _WORD_TABLES
    # A trigger names its table as its author wrote it, in any case.
    if [row for row in _read_schema(connection) if row[2].lower() in tables] != ours:
        raise JournalRefused(
            f"{path} is damaged: its schema is not that of version {version}; nothing was changed; "
            "restore it from a backup, or run `turnkeeper repair`"
        )
    return int(version)


def _read_schema(connection: sqlite3.Connection) -> Sequence[tuple[str, str, str, str | None]]:
    return connection.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_schema "
        "WHERE name NOT LIKE 'sqlite_stat%' "
        "AND (type = 'trigger' OR tbl_name NOT LIKE 'search_word%') ORDER BY name"
    ).fetchall()


@cache
def _schema_of(version: int) -> Sequence[tuple[str, str, str, str | None]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript("".join(MIGRATIONS[:version]))
        return _read_schema(connection)


def _set_up(connection: sqlite3.Connection, path: Path, synchronous: Synchronous) -> None:
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("PRAGMA fullfsync = ON")  # macOS: or fsync does not reach the disk
    connection.execute("PRAGMA checkpoint_fullfsync = ON")
    connection.execute("PRAGMA secure_delete = ON")  # deleted rows are overwritten in the file
    connection.execute("PRAGMA cache_size = -16000")
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    (level,) = connection.execute("PRAGMA synchronous").fetchone()
    if mode != "wal" or level != {"NORMAL": 1, "FULL": 2, "EXTRA": 3}[synchronous]:
        raise JournalRefused(
            f"{path} cannot be used durably: SQLite gives journal mode {mode}, synchronous "
            f"{level}; nothing was changed; put the journal on a local disk"
        )


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    """Migrate in one transaction: a process that dies halfway leaves the old version.

    It also shuts out an owner that this process takes the file from: that one's code may be older,
    and must not write to the new version.
    """
    if version >= _STAMPED_VERSION_MIN:
        # The log of a migration is new, and a process that dies halfway leaves it unstamped:
        # the file must take it for its own.
        connection.execute("UPDATE log_stamp SET is_log_needed = 0, salt = 0")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    # executescript commits first and then obeys the script's own BEGIN.
    script = "".join((*MIGRATIONS[version:], "UPDATE journal SET generation = generation + 1;"))
    connection.executescript(
        f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )


def _create(path: Path) -> None:
    wal = Path(f"{path}-wal")
    if wal.exists() and wal.stat().st_size:
        raise JournalRefused(
            f"no file at {path}, but the write-ahead log of one at {wal}; nothing was created; "
            "restore the file, or move its log away"
        )
    if repaired_draft(path).exists():
        raise JournalRefused(
            f"no file at {path}, but a repaired one beside it: a repair was interrupted; nothing "
            "was created; run `turnkeeper repair` again"
        )
    draft = Path(f"{path}-new")
    try:
        try:
            make_file(draft)
            draft.rename(path)
        except BaseException:
            _remove(draft)
            raise
        sync_folder(path.parent)
    except (OSError, sqlite3.Error) as error:
        if is_full(error):
            raise JournalUnavailable(
                f"no journal can be made at {path}: {error}; nothing was created; make room on the "
                "disk"
            ) from error
        if isinstance(error, sqlite3.Error) or has_no_file_left(error):
            raise  # the caller converts it
        raise JournalRefused(
            f"no journal can be made at {path}: {error}; nothing was created; check the folder and "
            "its permissions"
        ) from error


def make_file(path: Path) -> None:
    """Create an empty journal at `path`, replacing any file there."""
    _remove(path)
    # SQLite gives the log the same permissions as the file.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINKS, PRIVATE))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA page_size = 8192")  # records of a kilobyte fill it better
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("PRAGMA journal_mode = WAL")
        _migrate(connection, 0)


def _remove(path: Path) -> None:
    for file in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        file.unlink(missing_ok=True)


def repaired_draft(path: Path) -> Path:
    """Return the name of the repaired file, which exists only while it replaces `path`."""
    return Path(f"{path}-repaired")


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable, if the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: BaseException) -> bool:
    """Return True if an error means that the disk, or the user's share of it, is full."""
    if isinstance(error, OSError):
        return error.errno in {errno.ENOSPC, errno.EDQUOT}
    return error_code(error) == sqlite3.SQLITE_FULL


def has_no_file_left(error: BaseException) -> bool:
    """Return True if an error means that this process, or the system, can open no more files.

    SQLite says only that it cannot open a file, and not why. So this tries to open as many others
    as a journal takes: by now those of the failed attempt may be closed.
    """
    if isinstance(error, OSError):
        return error.errno in {errno.EMFILE, errno.ENFILE}
    if error_code(error) != sqlite3.SQLITE_CANTOPEN:
        return False
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(_OPEN_FILES_MAX):
                opened.enter_context(open(os.devnull, "rb", buffering=0))  # noqa: PTH123 - no path
        except OSError as lacking:
            return has_no_file_left(lacking)
    return False


def refusal(
    path: Path, error: Exception, attempt: str = "opened"
) -> JournalRefused | JournalUnavailable:
    """Return the error to raise for a file that cannot be opened, with the advice that fits."""
    if is_full(error):
        return JournalUnavailable(
            f"{path} cannot be {attempt}: {error}; nothing was changed; make room on the disk"
        )
    if has_no_file_left(error):
        return JournalUnavailable(
            f"{path} cannot be {attempt} now: too many files are open ({error}); nothing was "
            "changed; close some, or raise the limit (ulimit -n), and try again"
        )
    code = error_code(error)
    if isinstance(error, MemoryError) or code in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM}:
        found = str(error) or type(error).__name__
        return JournalUnavailable(
            f"{path} cannot be {attempt} now: {found}; nothing was changed; check the disk and the "
            "memory, and try again"
        )
    match code:
        case sqlite3.SQLITE_NOTADB:
            found = "it is not a turnkeeper journal"
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
            advice = "check it, and try again"
    return JournalRefused(f"{path} cannot be {attempt}: {found}; nothing was changed; {advice}")
