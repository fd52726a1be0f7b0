"""The owner of a file that is taken over by force finds out by itself, also when it is idle."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, brief
from turnkeeper.actors.conversations.conversations import Conversations
from turnkeeper.actors.errors import JournalRefused, JournalUnavailable, OwnedElsewhere
from turnkeeper.actors.journals.sqlite import owner_lock
from turnkeeper.actors.journals.sqlite.journal import SQLiteJournal
from turnkeeper.actors.journals.sqlite.owner_lock import OwnerLock
from turnkeeper.actors.journals.sqlite.schema import open_for_writing
from turnkeeper.runtime import Ports, Unavailable

pytestmark = pytest.mark.anyio


async def test_an_idle_owner_that_was_taken_over_is_told_and_its_lease_has_ended(
    tmp_path: Path,
) -> None:
    path = tmp_path / "chats.db"
    told = anyio.Event()
    async with SQLiteJournal(path, poll_s=0.001) as first:
        first.watch_lease(told.set)
        await first.claim("c")
        assert first.is_lease_valid()
        async with SQLiteJournal(path, takeover=True, address="the rival") as second:
            await told.wait()
            assert not first.is_lease_valid()
            assert second.is_lease_valid()
            with pytest.raises(OwnedElsewhere, match="the rival"):
                await first.claim("c")


async def test_readers_beside_an_owner_that_was_taken_over_hear_of_the_successor(
    tmp_path: Path,
) -> None:
    path = tmp_path / "chats.db"
    heard = anyio.Event()
    async with Conversations(
        HeldAgent(), journal=SQLiteJournal(path, poll_s=0.001), idle_s=None
    ) as conversations:
        await (await conversations["c"].send("A")).end()

        async def read() -> None:
            async for logged in conversations["c"].events():
                if brief(logged.event) == "u:B":
                    heard.set()

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            async with Conversations(
                HeldAgent(), journal=SQLiteJournal(path, takeover=True)
            ) as successors:
                await (await successors["c"].send("B")).end()
                await heard.wait()
                with pytest.raises(OwnedElsewhere):
                    await conversations["c"].view()
            group.cancel_scope.cancel()


async def test_a_sidecar_that_was_removed_takes_nothing_away(tmp_path: Path) -> None:
    async with SQLiteJournal(tmp_path / "chats.db", poll_s=3600) as journal:
        journal._lock._sidecar.unlink()
        journal._lock.check()
        assert journal.is_lease_valid()


def files_of(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def by_newer_version(file: sqlite3.Connection) -> None:
    file.execute("PRAGMA user_version = 99")


def by_other_program(file: sqlite3.Connection) -> None:
    file.execute("CREATE TRIGGER other AFTER INSERT ON event BEGIN SELECT 1; END")


def by_lost_write(file: sqlite3.Connection) -> None:
    file.execute("UPDATE conversation SET head = 1, last = 0")
    file.execute(
        "INSERT INTO event SELECT 1, 0, log, 1, 1, 'e1', 'k', NULL, 0, '', NULL FROM conversation"
    )


def by_writer(file: sqlite3.Connection) -> None:
    file.execute("BEGIN IMMEDIATE")


@pytest.mark.parametrize("spoil", [by_newer_version, by_other_program, by_lost_write, by_writer])
async def test_a_takeover_that_fails_takes_nothing_from_the_owner(
    tmp_path: Path, spoil: Callable[[sqlite3.Connection], None]
) -> None:
    """It replaced the lock first: "nothing was changed", and the owner lost the file."""
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path, poll_s=3600) as first:
        await first.claim("c")
        with closing(sqlite3.connect(path, isolation_level=None)) as file:
            spoil(file)
            with pytest.raises(JournalRefused, match="nothing was changed"):
                async with SQLiteJournal(path, takeover=True, busy_wait_s=0):
                    raise AssertionError("entered")
        first._lock.check()
        await first.claim("d")
        assert first.is_lease_valid()
        beside = {"chats.db", "chats.db-owner", "chats.db-wal", "chats.db-shm"}
        assert files_of(tmp_path) == beside


async def test_a_takeover_that_cannot_write_takes_nothing_from_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, where the first write fails."""
    path = tmp_path / "chats.db"

    def open_full(*args: object, **options: object) -> sqlite3.Connection:
        connection = open_for_writing(*args, **options)  # type: ignore[arg-type]
        connection.execute("PRAGMA query_only = ON")
        return connection

    async with SQLiteJournal(path, poll_s=3600) as first:
        await first.claim("c")
        monkeypatch.setattr("turnkeeper.actors.journals.sqlite.journal.open_for_writing", open_full)
        with pytest.raises(JournalRefused, match="nothing was changed"):
            async with SQLiteJournal(path, takeover=True):
                raise AssertionError("entered")
        first._lock.check()
        await first.claim("d")


def start_no_reader(name: str, target: Callable[[], None]) -> None:
    """Start a thread as `Ports` does, but none for a reader, which comes last."""
    if name.startswith("reader"):
        raise Unavailable("no thread; nothing was done; try again")
    Ports().start_thread(name, target)


async def test_a_takeover_that_fails_after_the_owner_lost_the_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path, poll_s=3600, address="host-1") as first:
        await first.claim("c")
        with pytest.raises(JournalUnavailable) as caught:
            async with SQLiteJournal(
                path, takeover=True, ports=Ports(start_thread=start_no_reader)
            ):
                raise AssertionError("entered")
        assert str(caught.value) == (
            "no thread; no conversation was changed, but the file was taken over from host-1, "
            "which can write no more; try again"
        )
        with pytest.raises(OwnedElsewhere):
            await first.claim("c")


async def test_a_takeover_of_a_file_that_has_no_owner_takes_it_from_no_one(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with pytest.raises(Unavailable, match="nothing was done"):
        async with SQLiteJournal(path, takeover=True, ports=Ports(start_thread=start_no_reader)):
            raise AssertionError("entered")
    async with SQLiteJournal(path, takeover=True) as journal:
        await journal.claim("c")


@pytest.mark.parametrize("said", ["it hangs; nothing was done", "the disk has no answer"])
async def test_a_takeover_that_hangs_is_said_to_have_happened_perhaps(
    tmp_path: Path, said: str
) -> None:
    path = tmp_path / "chats.db"
    holder = OwnerLock(path, "holder")
    holder.try_acquire()
    journal = SQLiteJournal(path, takeover=True)
    journal._lock.prepare_takeover()

    with pytest.raises(JournalUnavailable, match="but the file may have been taken over"):
        journal._refuse_as_changed(JournalUnavailable(said), is_hung=True)

    journal._lock.release()
    holder.check()
    holder.release()
    assert files_of(tmp_path) == {"chats.db-owner"}


async def test_of_two_takeovers_at_once_one_has_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first raised the generation, and replaced the lock of the second: neither could write."""
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path, poll_s=3600), AsyncExitStack() as stack:
        second = SQLiteJournal(path, takeover=True, address="the second")
        shut_out = OwnerLock.note_shut_out

        def then_second(lock: OwnerLock) -> None:
            shut_out(lock)
            if lock.owner == "the first":
                portal.start_task_soon(stack.enter_async_context, second).result()

        async with anyio.from_thread.BlockingPortal() as portal:
            monkeypatch.setattr(OwnerLock, "note_shut_out", then_second)
            with pytest.raises(OwnedElsewhere, match="the second"):
                async with SQLiteJournal(path, takeover=True, address="the first"):
                    raise AssertionError("entered")
        second._lock.check()
        await second.claim("c")


def test_two_takers_with_the_same_process_number_do_not_share_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two containers on one volume, both may be process 1, and count their drafts from 0."""
    path = tmp_path / "chats.db"
    takers = [OwnerLock(path, f"taker {number}") for number in range(2)]
    holder = OwnerLock(path, "holder")
    holder.try_acquire()
    for taker in takers:
        monkeypatch.setattr(owner_lock, "_drafts", itertools.count())
        taker.prepare_takeover()
        taker.draft()

    takers[1].release()  # its transaction failed
    takers[0].take_over()

    takers[0].check()
    with pytest.raises(OwnedElsewhere, match="taker 0"):
        OwnerLock(path, "late").try_acquire()
    takers[0].release()
    holder.release()
    assert [each.name for each in tmp_path.iterdir()] == ["chats.db-owner"]


async def test_an_opening_that_a_takeover_overtakes_takes_nothing_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one had the lock and the other the generation: neither could go on."""
    path = tmp_path / "chats.db"
    async with anyio.from_thread.BlockingPortal() as portal, AsyncExitStack() as stack:
        taker = SQLiteJournal(path, takeover=True, address="the taker")
        opened: list[sqlite3.Connection] = []

        def open_then_taker(*args: object, **options: object) -> sqlite3.Connection:
            connection = open_for_writing(*args, **options)  # type: ignore[arg-type]
            opened.append(connection)
            if len(opened) == 1:
                portal.start_task_soon(stack.enter_async_context, taker).result()
            return connection

        monkeypatch.setattr(
            "turnkeeper.actors.journals.sqlite.journal.open_for_writing", open_then_taker
        )
        with pytest.raises(OwnedElsewhere, match="the taker"):
            async with SQLiteJournal(path):
                raise AssertionError("entered")
        taker._lock.check()
        await taker.claim("c")


async def test_a_takeover_of_a_log_that_its_owner_empties_meanwhile_stamps_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a reader it did not: after a crash, the next opening took the log for another's."""
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path, poll_s=3600) as first:
        await first.claim("c")
        with closing(
            sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        ) as reader:

            def open_then_empty(*args: object, **options: object) -> sqlite3.Connection:
                connection = open_for_writing(*args, **options)  # type: ignore[arg-type]
                assert reader.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
                reader.execute("BEGIN")
                reader.execute("SELECT * FROM conversation").fetchall()
                return connection

            monkeypatch.setattr(
                "turnkeeper.actors.journals.sqlite.journal.open_for_writing", open_then_empty
            )
            with pytest.raises(JournalRefused, match="has been reading it since before"):
                async with SQLiteJournal(path, takeover=True, busy_wait_s=0):
                    raise AssertionError("entered")


async def test_a_file_that_its_owner_is_making_is_not_made_by_a_takeover_too(
    tmp_path: Path,
) -> None:
    """Both wrote to one `chats.db-new`, and what they left was refused from then on."""
    path = tmp_path / "chats.db"
    holder = OwnerLock(path, "holder")
    holder.try_acquire()
    with pytest.raises(JournalUnavailable, match="its owner has not made it yet"):
        async with SQLiteJournal(path, takeover=True):
            raise AssertionError("entered")
    holder.check()
    assert files_of(tmp_path) == {"chats.db-owner"}
    holder.release()
    async with SQLiteJournal(path, takeover=True) as journal:
        await journal.claim("c")
