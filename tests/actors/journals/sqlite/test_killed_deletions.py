"""A process that is killed while it deletes leaves nothing that the next one does not remove.

The file and its log are copied after each commit of a deletion, as a kill would leave them there.
The next owner has nothing else to do: no commit of its own is due in which it could go on.
"""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from turnkeeper.actors import SQLiteJournal
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.journal import Rejection
from turnkeeper.actors.journals.contract import read_all
from turnkeeper.actors.journals.sqlite import erasure
from turnkeeper.actors.journals.sqlite.owner_lock import OwnerLock
from turnkeeper.actors.journals.sqlite.schema import log_bytes, open_for_writing
from turnkeeper.actors.journals.sqlite.verify import verify
from turnkeeper.actors.journals.sqlite.writer import SQLiteWriter
from turnkeeper.runtime import Ports

pytestmark = [pytest.mark.anyio, pytest.mark.costly]

SECRET = "thesecretword"
RECORDS = 12


class Copies:
    """Copies a journal's file and log after each commit, once it is told to begin."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._folder = folder
        self.is_copying = False
        self.made: list[Path] = []

    def passed(self, boundary: str) -> None:
        if not self.is_copying or boundary != "committed":
            return
        place = self._folder / f"killed-{len(self.made)}"
        place.mkdir()
        for end in ("", "-wal"):
            shutil.copyfile(f"{self._path}{end}", place / f"chats.db{end}")
        self.made.append(place / "chats.db")


@dataclass
class Clock:
    now: float = 100.0

    def read(self) -> float:
        return self.now


async def write(journal: SQLiteJournal, name: str, text: str) -> int:
    claim = await journal.claim(name)
    records = [encode_record(UserMessageEvent(content=f"{text} {n}")) for n in range(RECORDS)]
    await journal.append(
        name, records, epoch=claim.epoch, expected_seq=1 + claim.head, is_unfinished=False
    )
    return claim.epoch


def next_owner(path: Path, *, is_searching: bool = False, clock: Clock) -> SQLiteWriter:
    left = log_bytes(path)
    return SQLiteWriter(
        open_for_writing(path, synchronous="NORMAL", busy_wait_s=0),
        path=path,
        lock=OwnerLock(path, "the next owner"),
        ports=Ports(monotonic=clock.read),
        failpoint=lambda _boundary: None,
        tails_max=100,
        rejection_age_s_max=1e9,
        is_searching=is_searching,
        is_log_left=left > 0,
        is_log_stamped=False,
        on_closed=lambda error: pytest.fail(f"closed for writing: {error}"),
        on_log_bytes=lambda _bytes: None,
    )


def rest(owner: SQLiteWriter, clock: Clock) -> float | None:
    """Let an owner rest until it waits for seconds, or has nothing more to do."""
    for _ in range(1_000):
        pause_s = owner.rest()
        if pause_s is None or pause_s > 1:
            return pause_s
        clock.now += pause_s
    pytest.fail("it goes on for ever")


def has_secret(path: Path) -> bool:
    return any(SECRET.encode() in Path(f"{path}{end}").read_bytes() for end in ("", "-wal"))


async def delete(folder: Path) -> list[Path]:
    """Delete a conversation; return the copies of the file that were made meanwhile."""
    path = folder / "chats.db"
    copies = Copies(path, folder)
    async with SQLiteJournal(path, search=True, failpoint=copies.passed) as journal:
        await write(journal, "other", "kept")
        epoch = await write(journal, "doomed", SECRET)
        refused = [Rejection(4e9, "v", "r", SECRET.encode())]
        await journal.reject("doomed", refused, epoch=epoch)
        await journal.index()

        copies.is_copying = True
        await journal.delete("doomed", epoch=epoch)
        copies.is_copying = False
    return copies.made


@pytest.mark.parametrize("is_searching", [False, True], ids=["", "searching"])
async def test_an_owner_with_nothing_to_do_finishes_the_deletion_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_searching: bool
) -> None:
    monkeypatch.setattr(erasure, "_RECORDS_MAX", 5)
    copies = await delete(tmp_path)

    assert len(copies) > RECORDS / 5 + 1
    for copy in copies:
        owner = next_owner(copy, is_searching=is_searching, clock=(clock := Clock()))
        assert rest(owner, clock) is None
        assert not has_secret(copy)  # looked for before it closes: closing removes the log
        owner.close()
        assert verify(copy).problems == ()
        async with SQLiteJournal(copy) as journal:
            assert [info.conversation_id for info in await journal.list()] == ["other"]
            assert len(await read_all(journal, "other")) == RECORDS


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"], ids=["reader", "writer"])
async def test_an_owner_finishes_a_deletion_once_the_process_in_its_way_has_left(
    tmp_path: Path, begin: str
) -> None:
    copy = (await delete(tmp_path))[-1]
    owner = next_owner(copy, clock=(clock := Clock()))
    other = sqlite3.connect(copy, isolation_level=None)
    other.execute(begin)
    other.execute("SELECT generation FROM journal").fetchone()

    pause_s = rest(owner, clock)

    assert pause_s is not None
    assert has_secret(copy)

    other.close()
    clock.now += pause_s

    assert rest(owner, clock) is None
    assert not has_secret(copy)
    owner.close()
