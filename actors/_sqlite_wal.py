"""Whether the write-ahead log has lost commits that it once had.

After a crash SQLite reads its log up to the first frame whose checksum is wrong, and takes the
rest for a write that never finished. That is right for the last transaction, and hides damage
anywhere before it: each transaction is synced before the next one's frames are written. So where
frames of this log lie behind the end of a finished transaction that SQLite does not reach,
acknowledged commits would be lost without a word.

What a log has lost off its end cannot be told from commits that never were. The format is at
https://www.sqlite.org/fileformat2.html#walformat. Only this file is read: to open and close one of
the other two here would take away the locks that SQLite holds on it in this process.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path

_MAGIC = 0x377F0682
_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_NO_SIZE = bytes(4)


def has_lost_commits(database: Path) -> bool:
    """Whether finished transactions lie behind a bad frame. A writer may go on meanwhile."""
    try:
        # Unbuffered: what is looked at again is read again.
        with Path(f"{database}-wal").open("rb", buffering=0) as file:
            while True:
                header = _header(file)
                if not _Log(file, header).has_lost_commits():
                    return False
                if _header(file) == header:
                    return True
                # A writer has begun its next round through the file while this one was looked at.
    except FileNotFoundError:
        return False


def _header(file: io.FileIO) -> bytes:
    file.seek(0)
    return file.read(_HEADER_BYTES)


class _Log:
    def __init__(self, file: io.FileIO, header: bytes) -> None:
        self._file = file
        self._header = header

    def has_lost_commits(self) -> bool:
        header = self._header
        if len(header) < _HEADER_BYTES:
            return False
        magic, _, page_bytes = struct.unpack(">III", header[:12])
        self._order = ">" if magic & 1 else "<"
        self._frame_bytes = _FRAME_HEADER_BYTES + page_bytes
        self._salts = header[16:24]
        self._sums = self._sum(header[:24], (0, 0))
        if magic & ~1 != _MAGIC or header[24:] != struct.pack(">II", *self._sums):
            return bool(self._read(0, 1))
        frame = 0
        while self._is_good(frame):
            frame += 1
        # A frame that a writer was in the middle of is good when it is looked at again.
        return self._is_commit_behind(frame) and not self._is_good(frame)

    def _is_good(self, frame: int) -> bool:
        """Whether SQLite would read on behind this frame; if so, it counts as read."""
        facts = self._read(frame, self._frame_bytes)
        if len(facts) < self._frame_bytes or facts[8:16] != self._salts:
            return False
        sums = self._sum(facts[:8] + facts[_FRAME_HEADER_BYTES:], self._sums)
        if facts[16:24] != struct.pack(">II", *sums):
            return False
        self._sums = sums
        return True

    def _is_commit_behind(self, frame: int) -> bool:
        is_behind_commit = False
        while len(facts := self._read(frame, _FRAME_HEADER_BYTES)) == _FRAME_HEADER_BYTES:
            if facts[8:16] == self._salts:  # others are of an earlier round through the file
                if is_behind_commit:
                    return True
                # The last frame of a transaction says how large the database is after it.
                is_behind_commit = facts[4:8] != _NO_SIZE
            frame += 1
        return False

    def _read(self, frame: int, size: int) -> bytes:
        self._file.seek(_HEADER_BYTES + frame * self._frame_bytes)
        return self._file.read(size)

    def _sum(self, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
        words = struct.unpack(f"{self._order}{len(data) // 4}I", data)
        one, two = sums
        for first, second in zip(words[::2], words[1::2], strict=True):
            one = (one + first + two) & 0xFFFFFFFF
            two = (two + second + one) & 0xFFFFFFFF
        return one, two
