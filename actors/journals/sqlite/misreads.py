"""Distinguishes a page that the disk cannot read from a damaged page, which SQLite does not.

SQLite reports the EIO of a read as SQLITE_CORRUPT. The caller would then be told to repair a file
that may be whole on the disk. So when SQLite reports damage, this module reads the files directly,
and if that works, it makes the attempt once more.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...errors import JournalUnavailable

T = TypeVar("T")

_BLOCK_BYTES = 1 << 20
_BYTES_MAX = 4 << 30  # of a larger file, only this much is tried

# Closing any descriptor of a file releases the locks that SQLite holds on that file in this
# process. So the descriptor that was used stays open, and is used again.
_descriptors: dict[tuple[int, int], int] = {}


def unless_misread(path: Path, attempt: Callable[[], T]) -> T:
    """Return the attempt's result; if SQLite reports damage, make it once more.

    Raises `JournalUnavailable` if it is the disk that cannot read the file.
    """
    try:
        return attempt()
    except Exception as error:
        if not is_corrupt(error):
            raise
        refuse_unreadable(path, error)
    return attempt()


def is_corrupt(error: BaseException | None) -> bool:
    """Return True if this error, or the one that caused it, is SQLite's report of damage."""
    while error is not None:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CORRUPT:
            return True
        error = error.__cause__
    return False


def refuse_unreadable(path: Path, cause: Exception) -> None:
    """Raise `JournalUnavailable` if the disk cannot read the file or its log."""
    try:
        facts = path.stat()
        key = facts.st_dev, facts.st_ino
        if key not in _descriptors:
            _descriptors[key] = os.open(path, os.O_RDONLY)
        _read_all(_descriptors[key])
        log = os.open(f"{path}-wal", os.O_RDONLY)
        try:
            _read_all(log)
        finally:
            os.close(log)
    except FileNotFoundError:
        return
    except OSError as error:
        error.__cause__ = cause
        raise JournalUnavailable(
            f"{path} cannot be read now: {error}; nothing was changed; check the disk, then start "
            "the process again"
        ) from error


def _read_all(descriptor: int) -> None:
    at = 0
    while at < _BYTES_MAX and (block := os.pread(descriptor, _BLOCK_BYTES, at)):
        at += len(block)
