"""Whether the write-ahead log has lost commits that it once had.

After a crash SQLite reads its log up to the first frame whose checksum is wrong, and takes the
rest for a write that never finished. That is right for the last transaction, and hides damage
anywhere before it: each transaction is synced before the next one's frames are written. So where
frames of this log lie behind the end of a finished transaction that SQLite did not reach,
acknowledged commits would be lost without a word.

What a log has lost off its end cannot be told from commits that never were. Frame headers are all
that is read; the format is at https://www.sqlite.org/walformat.html.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

_MAGIC = 0x377F0682
_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_NO_SIZE = bytes(4)


def has_lost_commits(database: Path) -> bool:
    """Whether finished transactions lie behind the frames that SQLite has found good.

    The caller has read from the database, so that SQLite has been through its log. A writer may
    go on meanwhile.
    """
    wal = Path(f"{database}-wal")
    index = Path(f"{database}-shm")
    try:
        while True:
            frames = _frames_found(index)
            is_lost = _has_commits_behind(wal, frames)
            if not is_lost or frames == _frames_found(index):
                return is_lost
    except FileNotFoundError:
        return False


def _frames_found(index: Path) -> int:
    """What SQLite shares between its connections: how many frames are good."""
    facts = index.read_bytes()[16:20]
    return int.from_bytes(facts, sys.byteorder)


def _has_commits_behind(wal: Path, frames: int) -> bool:
    with wal.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        if len(header) < _HEADER_BYTES:
            return False
        if not _is_header_good(header):
            return bool(file.read(1))
        page_bytes = int.from_bytes(header[8:12])
        is_behind_commit = False
        while True:
            file.seek(_HEADER_BYTES + frames * (_FRAME_HEADER_BYTES + page_bytes))
            facts = file.read(_FRAME_HEADER_BYTES)
            if len(facts) < _FRAME_HEADER_BYTES:
                return False
            if facts[8:16] == header[16:24]:  # others are of an earlier round through the file
                if is_behind_commit:
                    return True
                # The last frame of a transaction says how large the database is after it.
                is_behind_commit = facts[4:8] != _NO_SIZE
            frames += 1


def _is_header_good(header: bytes) -> bool:
    magic = int.from_bytes(header[:4])
    words = struct.unpack(">6I" if magic & 1 else "<6I", header[:24])
    one = two = 0
    for first, second in zip(words[::2], words[1::2], strict=True):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return magic & ~1 == _MAGIC and struct.unpack(">2I", header[24:]) == (one, two)
