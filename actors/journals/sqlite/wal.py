"""Refuses a write-ahead log that SQLite would misread: damaged, foreign, outdated or missing.

Owns two checks that run before SQLite may recover the log, since recovering folds it into the file.

*Lost commits.* After a crash, SQLite reads its log up to the first frame with a wrong checksum, and
takes the rest for a write that never finished. That is right for the last transaction only: each
transaction is synced before the next one's frames are written, so a bad frame with a finished
transaction after it is damage. SQLite would then drop acknowledged commits without an error. To
find out how far SQLite reads, this module lets it read a copy of the log beside an empty scratch
database, in a hundredth of the time that Python would need.

*Another file's log.* SQLite folds in any log that lies beside a file, even the log of another
journal, or of an older or newer backup. The file therefore holds a stamp (`LogStamp`): the first
salt of its log, which SQLite raises by one whenever it restarts the log, and a mark that the file
without its log is incomplete. The mark is only in the file itself; the log begins by clearing it.
So a copy that SQLite makes of file and log together (`.backup`, `VACUUM INTO`) has no mark.

Commits that are missing at the end of a log look the same as commits that never happened. The
format is at https://www.sqlite.org/fileformat2.html#walformat. This module opens only the log
itself: opening and closing the database file or the `-shm` file here would release the locks that
SQLite holds on them in this process.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...errors import JournalUnavailable

_MAGIC = 0x377F0682
_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_NO_SIZE = bytes(4)
_INDEX_MARK = 12
"""The place of the byte in the log's index that is set once it has been written."""
_COPIED_BYTES = 1 << 20
_LOOKS = 3
_RESTARTS_MAX = 1 << 16  # between two stamps, which are about a second apart


@dataclass(frozen=True, slots=True)
class LogStamp:
    """The facts that a file holds about its log, as of the last time that it was stamped."""

    is_log_needed: bool
    salt: int
    """The first salt of the log then; 0 if the file was never stamped."""


def log_salt(database: Path) -> int | None:
    """Return the first salt of the log beside a file; None if it has no log, or an empty one."""
    try:
        with _open(database) as file:
            header = _header(file)
    except FileNotFoundError:
        return None
    return None if len(header) < _HEADER_BYTES else int.from_bytes(header[16:20])


def fits(database: Path, stamp: LogStamp, opening_pages: Container[int]) -> bool:
    """Return True if the log beside a file is its own, as far as that can be determined.

    `opening_pages` are the pages that opening the file writes before it is stamped: a process that
    was killed in between leaves a log of only these, which fits no stamp and does no harm.
    """
    if log_salt(database) is None:
        return not stamp.is_log_needed
    if is_stamped(database, stamp):
        return True
    return not stamp.is_log_needed and all(page in opening_pages for page in _pages(database))


def is_stamped(database: Path, stamp: LogStamp) -> bool:
    """Return True if a file has a log that fits its stamp, whatever the log's pages are."""
    salt = log_salt(database)
    if salt is None:
        return False
    return not stamp.salt or (salt - stamp.salt) % (1 << 32) < _RESTARTS_MAX


def has_lost_commits(database: Path) -> bool:
    """Return True if finished transactions follow a bad frame. A writer may go on meanwhile.

    Raises `JournalUnavailable` if that cannot be found out.
    """
    try:
        # Unbuffered, so that a second look reads the file again.
        file = _open(database)
    except FileNotFoundError:
        return False
    with file:
        # A writer may have written a frame, or restarted the log, while the log was copied.
        return len(_header(file)) == _HEADER_BYTES and all(
            _copy_has_lost_commits(database, file) for _ in range(_LOOKS)
        )


def _open(database: Path) -> io.FileIO:
    return Path(f"{database}-wal").open("rb", buffering=0)


def _header(file: io.FileIO) -> bytes:
    file.seek(0)
    return file.read(_HEADER_BYTES)


def _is_good(header: bytes) -> bool:
    magic = int.from_bytes(header[:4])
    order: Literal["big", "little"] = "big" if magic & 1 else "little"
    one = two = 0
    for at in range(0, 24, 8):
        one = (one + int.from_bytes(header[at : at + 4], order) + two) & 0xFFFFFFFF
        two = (two + int.from_bytes(header[at + 4 : at + 8], order) + one) & 0xFFFFFFFF
    return magic & ~1 == _MAGIC and header[24:] == struct.pack(">II", one, two)


def _page_bytes(header: bytes) -> int:
    return int.from_bytes(header[8:12])


def _pages(database: Path) -> Iterator[int]:
    """Yield the page numbers of the frames that belong to the log's current round."""
    with _open(database) as file:
        header = _header(file)
        for frame in _frame_headers(file, header, 0):
            if frame[8:16] != header[16:24]:
                return
            yield int.from_bytes(frame[:4])


def _frame_headers(file: io.FileIO, header: bytes, first: int) -> Iterator[bytes]:
    frame_bytes = _FRAME_HEADER_BYTES + _page_bytes(header)
    place = _HEADER_BYTES + first * frame_bytes
    while True:
        file.seek(place)
        frame = file.read(_FRAME_HEADER_BYTES)
        if len(frame) < _FRAME_HEADER_BYTES:
            return
        yield frame
        place += frame_bytes


def _has_commits_behind(file: io.FileIO, header: bytes, frames_read: int) -> bool:
    if not _is_good(header):
        file.seek(_HEADER_BYTES)
        return bool(file.read(1))  # SQLite takes this for no log at all
    is_behind_commit = False
    for frame in _frame_headers(file, header, frames_read):
        if frame[8:16] == header[16:24]:  # other frames are left from before the last restart
            if is_behind_commit:
                return True
            # The last frame of a transaction holds the database's size after it.
            is_behind_commit = frame[4:8] != _NO_SIZE
    return False


def _copy_has_lost_commits(database: Path, log: io.FileIO) -> bool:
    """Copy the log, and return True if finished transactions follow what SQLite reads of the copy.

    The log itself may have new ones by then. Raises `JournalUnavailable` if SQLite fails for
    another reason, such as a full disk or a failed allocation: to return True would look like
    damage.
    """
    try:
        with tempfile.TemporaryDirectory(
            prefix="turnkeeper-", ignore_cleanup_errors=True
        ) as folder:
            scratch = Path(folder) / "scratch.db"
            frames = _frames_recovered(scratch, log)
            with _open(scratch) as copy:
                return _has_commits_behind(copy, _header(copy), frames)
    except (OSError, sqlite3.Error) as error:
        raise JournalUnavailable(
            f"the write-ahead log of {database} cannot be checked: {error}; nothing was changed; "
            "see that there is memory, room for a copy of the log among the temporary files, and "
            "not too many files open (ulimit -n)"
        ) from error


def _frames_recovered(scratch: Path, log: io.FileIO) -> int:
    """Have SQLite recover a copy of the log, beside an empty database of this path."""
    with contextlib.closing(sqlite3.connect(scratch, isolation_level=None)) as connection:
        # SQLite ignores an invalid page size, and takes a log with one for no log.
        connection.execute(f"PRAGMA page_size = {_page_bytes(_header(log))}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE scratch (x)")
    log.seek(0)
    with Path(f"{scratch}-wal").open("wb") as copy:  # SQLite follows no link here
        shutil.copyfileobj(log, copy, _COPIED_BYTES)
    # Read-only, so that closing it neither folds the log in nor deletes it.
    uri = f"{scratch.as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
        failure: sqlite3.Error | None = None
        try:
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        except sqlite3.Error as error:
            failure = (
                error  # the recovered pages alone may make no sense, which does not matter here
            )
        index = Path(f"{scratch}-shm")
        content = index.read_bytes() if failure is None or index.exists() else b""
    if failure is not None and not _is_recovered(content):
        raise failure
    # The index's header: version, unused, change counter, flags and page size, frame count.
    _, _, _, _, frames = struct.unpack("=IIIII", content[:20])
    return int(frames)


def _is_recovered(index: bytes) -> bool:
    """Return True if SQLite has written this index of a log: a recovery that failed has not."""
    return len(index) > _INDEX_MARK and index[_INDEX_MARK] == 1
