"""Checks that the writer's file is still in its place, and keeps its stamp in step with its log.

The writer owns the guard. It calls `check` between transactions, before a group of jobs and at most
once a second, and checks once more on leaving. If a file is deleted or replaced while it is open,
SQLite goes on writing the open file without an error, and all further commits would be lost. With
the guard, at most the commits of one second are acknowledged into such a file.

The log's index (`-shm`) counts as one of the files. If it is deleted, other programs make another
one, which the writer does not know: they see nothing of what it writes from then on, and a program
that copies the log into the file by such an index writes the wrong pages.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from ...errors import JournalRefused, JournalUnavailable
from .schema import has_no_file_left, log_holder
from .wal import log_salt

CHECK_INTERVAL_S = 1.0


class FileGuard:
    """One for each opening of a file for writing; all of it runs in the writer's thread."""

    def __init__(self, path: Path, connection: sqlite3.Connection, *, is_log_stamped: bool) -> None:
        """Stamp the file; `connection` has written to it, so that it has a log.

        Raises `JournalRefused` if a reader keeps the stamp out of the file, unless its log was
        stamped before. After a crash, a log without a stamp is taken for another file's, and with
        it all commits that would be made now.
        """
        self._path = path
        self._connection = connection
        self._salt: int | None = None
        self._is_erasing = False
        self._files = self._look()
        self._stamp(is_needed=not is_log_stamped)

    def check(self) -> None:
        """Raise `JournalRefused` if the file is not in its place; otherwise do pending upkeep."""
        self.refuse_if_moved()
        if self._is_erasing:
            self.erase()
        try:
            if log_salt(self._path) != self._salt:
                self._stamp()
        except OSError as error:
            # This says nothing about the log; the next check looks at it.
            if not has_no_file_left(error):
                raise

    def refuse_if_moved(self) -> None:
        """Raise `JournalRefused` if the file, its log or the log's index is not in its place."""
        found = self._look()
        if found[:2] != self._files[:2]:
            raise JournalRefused(
                f"{self._path}, or its write-ahead log, was deleted or replaced while it was open; "
                "commits of the last second may be lost with it; put the files back, or restore "
                "a backup"
            )
        if found != self._files:
            raise JournalRefused(
                f"{self._path}-shm, the index of the write-ahead log, was deleted or replaced "
                "while it was open; commits of the last second may be lost with it; end all "
                "programs that have the file open, and start again"
            )

    def close(self) -> None:
        """Close the connection. If the log's index was lost, the log is left as it is.

        Another program may have emptied the log, or begun it anew, by an index of its own. To copy
        the log into the file by this index would then damage the file.
        """
        with contextlib.ExitStack() as held:
            # If the lock cannot be had, the connection is closed all the same.
            with contextlib.suppress(OSError, JournalRefused, JournalUnavailable):
                *files, index = self._look()
                if files == list(self._files[:2]) and index != self._files[2]:
                    held.enter_context(log_holder(self._path, 0, is_damaged=True))
            self._connection.close()

    def erase(self) -> bool:
        """Fold the log into the file and truncate it; return False if a reader is in the way.

        It does not wait for readers, since all appends would wait too; `check` tries again. Raises
        `JournalRefused` if the file is not in its place: it also runs while no jobs come, and so
        without a check before it.
        """
        self.refuse_if_moved()
        (wait_ms,) = self._connection.execute("PRAGMA busy_timeout").fetchone()
        self._connection.execute("PRAGMA busy_timeout = 0")
        try:
            (is_busy, *_) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._connection.execute(f"PRAGMA busy_timeout = {wait_ms}")
        self._is_erasing = bool(is_busy)
        return not is_busy

    def _stamp(self, *, is_needed: bool = False) -> None:
        """Mark the file as incomplete without its log, and stamp it with the log that it needs.

        A checkpoint writes the mark into the file, and the next log begins by clearing it. Then the
        stamp moves on to that next log, so that a copy of the previous log is outdated once the
        next one is folded in. If a reader blocks the checkpoint, the file keeps its older stamp.
        With `is_needed`, the checkpoint waits for readers, and the file is refused if they stay.
        """
        salt = log_salt(self._path)
        try:
            self._connection.execute(
                "UPDATE log_stamp SET is_log_needed = 1, salt = ?", (salt or 0,)
            )
            how = "FULL" if is_needed else "PASSIVE"
            (is_busy, *_) = self._connection.execute(f"PRAGMA wal_checkpoint({how})").fetchone()
        finally:
            self._clear_mark()
        if is_needed and is_busy:
            raise JournalRefused(
                f"{self._path} cannot be opened: another program has been reading it since before "
                "it was opened, in one transaction, so that after a crash its new write-ahead log "
                "could not be told from another file's; no conversation was changed; end that "
                "transaction, and try again"
            )
        self._salt = log_salt(self._path)
        if self._salt != salt:
            self._connection.execute("UPDATE log_stamp SET salt = ?", (self._salt or 0,))

    def _clear_mark(self) -> None:
        """Clear the mark, after an error by a second try: closing would fold it into the file."""
        statement = "UPDATE log_stamp SET is_log_needed = 0"
        try:
            self._connection.execute(statement)
        except Exception:
            with contextlib.suppress(sqlite3.Error, MemoryError):
                self._connection.execute(statement)
            raise

    def _look(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(_identity(Path(f"{self._path}{end}")) for end in ("", "-wal", "-shm"))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino
