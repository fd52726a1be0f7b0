"""Keeps the writer's file in its place, and its stamp in step with its log.

Owned by the writer, which calls `check` before a group of jobs, at most once a second, between
transactions, and looks once more on leaving. A file that was deleted or replaced under its owner
would swallow all further commits without an error, since SQLite goes on writing the file that it
has open. So what is acknowledged into such a file is at most what was written within a second.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from ...errors import JournalRefused
from .wal import log_salt

CHECK_INTERVAL_S = 1.0


class FileGuard:
    """One for each opening of a file for writing; all of it runs in the writer's thread."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """Stamp the file; `connection` has written to it, so that it has a log."""
        self._path = path
        self._connection = connection
        self._salt: int | None = None
        self._is_erasing = False
        self._files = self._look()
        self._stamp()

    def check(self) -> None:
        """Raise `JournalRefused` if the file is not in its place; else catch up on upkeep."""
        self.refuse_if_moved()
        if self._is_erasing:
            self.erase()
        if log_salt(self._path) != self._salt:
            self._stamp()

    def refuse_if_moved(self) -> None:
        """Raise `JournalRefused` if the file or its log is not in its place any more."""
        if self._look() != self._files:
            raise JournalRefused(
                f"{self._path}, or its write-ahead log, was deleted or replaced while it was open; "
                "commits of the last second may be lost with it; put the files back, or restore "
                "a backup"
            )

    def erase(self) -> bool:
        """Fold the log into the file and cut it to nothing; False if a reader is in the way.

        It waits for no reader, since all appends would wait with it; `check` tries again.
        """
        (wait_ms,) = self._connection.execute("PRAGMA busy_timeout").fetchone()
        self._connection.execute("PRAGMA busy_timeout = 0")
        try:
            (is_busy, *_) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._connection.execute(f"PRAGMA busy_timeout = {wait_ms}")
        self._is_erasing = bool(is_busy)
        return not is_busy

    def _stamp(self) -> None:
        """Mark the file as one that needs its log, and its log as the one that it needs.

        The mark gets into the file by a checkpoint, and the log that follows begins by clearing it.
        Then the stamp moves on to that log, so that a copy of the one before is outdated once this
        is folded in. If a reader is in the way of the checkpoint, the file keeps its older stamp.
        """
        salt = log_salt(self._path)
        try:
            self._connection.execute(
                "UPDATE log_stamp SET is_log_needed = 1, salt = ?", (salt or 0,)
            )
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        finally:
            self._clear_mark()
        self._salt = log_salt(self._path)
        if self._salt != salt:
            self._connection.execute("UPDATE log_stamp SET salt = ?", (self._salt or 0,))

    def _clear_mark(self) -> None:
        """Clear the mark, by a second try after an error: closing would fold it into the file."""
        statement = "UPDATE log_stamp SET is_log_needed = 0"
        try:
            self._connection.execute(statement)
        except Exception:
            with contextlib.suppress(sqlite3.Error, MemoryError):
                self._connection.execute(statement)
            raise

    def _look(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(_identity(Path(f"{self._path}{end}")) for end in ("", "-wal"))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino
