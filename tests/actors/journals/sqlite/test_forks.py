"""Forks copy nothing, and what is deleted is gone from the file."""

# ruff: noqa: ASYNC240 - the files of a test are small, and its loop has nothing else to do

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import pytest

from turnkeeper.actors.errors import EventIdConflict, JournalRefused
from turnkeeper.actors.journal import Claim, Deletion, Record, Rejection, Snapshot
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.sqlite.file_guard import FileGuard
from turnkeeper.actors.journals.sqlite.journal import SQLiteJournal
from turnkeeper.actors.journals.sqlite.verify import verify
from turnkeeper.actors.journals.sqlite.writer import SQLiteWriter

SECRET = b"the-secret-word"
IMAGE = b'{"url": "data:' + SECRET * 4_000 + b'"}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats.db"


async def write(journal: SQLiteJournal, name: str, *records: Record) -> int:
    claim = await journal.claim(name)
    await journal.append(
        name, records, epoch=claim.epoch, expected_seq=claim.head + 1, is_unfinished=False
    )
    return claim.epoch


def rows(table: str) -> Callable[[SQLiteWriter], int]:
    def count(writer: SQLiteWriter) -> int:
        (found,) = writer.connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        return int(found)

    return count


def holds(path: Path, word: bytes) -> list[str]:
    """The files beside each other that have this word in them."""
    return [file.name for file in path.parent.iterdir() if word in file.read_bytes()]


async def test_a_fork_copies_no_record_however_long_its_prefix(path: Path) -> None:
    async with SQLiteJournal(path) as journal:
        await write(journal, "p", *(make_record(f"p{seq}") for seq in range(1, 3_001)))
        statements: list[str] = []
        await journal._change(lambda w: w.connection.set_trace_callback(statements.append))

        await journal.fork("p", "f", at=2_990, records=[make_record("f")], is_unfinished=False)

        assert len(statements) < 40
        assert await journal._change(rows("event")) == 3_001
        assert len(await read_all(journal, "f")) == 2_991


async def test_the_text_of_a_deleted_conversation_is_gone_from_the_file(path: Path) -> None:
    """Records, rejections, snapshots, large parts; the write-ahead log too."""
    async with SQLiteJournal(path) as journal:
        await write(journal, "bob", make_record("b1"))
        for number in range(20):
            epoch = await write(journal, "alice", Record(f"a{number}", "note", SECRET * 50))
        epoch = await write(journal, "alice", Record("image", "note", IMAGE))
        await journal.reject("alice", [Rejection(4e9, "v", SECRET.decode(), SECRET)], epoch=epoch)
        for _ in range(3):
            await journal.write_snapshot("alice", Snapshot(2, "v1", SECRET * 100), epoch=epoch)
        assert holds(path, SECRET)

        deletion = await journal.delete("alice", epoch=epoch)

        assert deletion.is_erased
        assert holds(path, SECRET) == []
        assert await read_all(journal, "bob") == ["b1"]
    assert holds(path, SECRET) == []
    assert verify(path).problems == ()


async def test_a_part_stays_while_a_record_that_is_left_has_it(path: Path) -> None:
    async with SQLiteJournal(path) as journal:
        first = await write(journal, "a", Record("a1", "note", IMAGE))
        second = await write(journal, "b", Record("b1", "note", IMAGE), make_record("b2"))
        assert await journal._change(rows("part")) == 1
        await journal.fork("b", "f", at=1, records=[make_record("f2")], is_unfinished=False)

        await journal.delete("a", epoch=first)
        await journal.delete("b", epoch=second)
        assert (await journal.read("f"))[0].payload == IMAGE

        await journal.delete("f", epoch=(await journal.claim("f")).epoch)
        for table in ("part", "part_use", "event", "fork"):
            assert await journal._change(rows(table)) == 0
    assert holds(path, SECRET) == []


@pytest.mark.parametrize("order", [("low", "high"), ("high", "low")])
async def test_what_was_kept_for_forks_is_gone_with_the_last_though_they_go_together(
    path: Path, order: tuple[str, str]
) -> None:
    """The one that begins at the lower seq may be the first to say up to where its parent goes."""
    async with SQLiteJournal(path) as journal:
        records = [Record(f"a{seq}", "note", SECRET) for seq in range(1, 21)]
        epoch = await write(journal, "a", *records)
        for name, at in (("low", 4), ("high", 10)):
            await journal.fork("a", name, at=at, records=[make_record(name)], is_unfinished=False)
        assert (await journal.delete("a", epoch=epoch)).kept == 10
        epochs = {name: (await journal.claim(name)).epoch for name in order}
        deletions: list[Deletion] = []

        async def delete(name: str) -> None:
            deletions.append(await journal.delete(name, epoch=epochs[name]))

        async with anyio.create_task_group() as group:
            for name in order:
                group.start_soon(delete, name)

        assert all(deletion.is_erased for deletion in deletions)
        assert holds(path, SECRET) == []
        for table in ("event", "fork", "erasure"):
            assert await journal._change(rows(table)) == 0
    assert verify(path).problems == ()


async def test_a_reader_in_the_way_is_said_and_not_waited_for_for_ever(path: Path) -> None:
    """What is deleted is out of reach at once; the write-ahead log still has its text."""
    async with SQLiteJournal(path, busy_wait_s=0) as journal:
        epoch = await write(journal, "alice", Record("a1", "note", SECRET * 50))
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            connection.execute("SELECT * FROM event").fetchall()

            deletion = await journal.delete("alice", epoch=epoch)

            assert not deletion.is_erased
        await write(journal, "bob", make_record("b1"))
        epoch = await write(journal, "bob", make_record("b2"))
        assert (await journal.delete("bob", epoch=epoch)).is_erased
        assert holds(path, SECRET) == []


async def test_vacuum_gives_room_back(path: Path) -> None:
    async with SQLiteJournal(path) as journal:
        epoch = await write(
            journal, "a", *(Record(f"a{seq}", "note", b"x" * 1_000) for seq in range(2_000))
        )
        await write(journal, "b", make_record("b1"))
        await journal.delete("a", epoch=epoch)
        before = path.stat().st_size

        freed = await journal.vacuum()

        assert freed > 1_500_000
        assert path.stat().st_size == before - freed
        await write(journal, "b", make_record("b2"))
        assert await read_all(journal, "b") == ["b1", "b2"]
    assert verify(path).problems == ()


def copy_of(path: Path, folder: str) -> Path:
    """Copy the file and its log, as a process that is killed now would leave them."""
    copy = path.parent / folder / path.name
    copy.parent.mkdir()
    for end in ("", "-wal"):
        shutil.copy(f"{path}{end}", f"{copy}{end}")
    return copy


async def test_a_file_whose_owner_was_killed_in_or_after_a_vacuum_is_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vacuum begins a log. It began it with random salts, which no stamp could foresee."""
    copies: list[Path] = []
    calls: list[FileGuard] = []
    erase = FileGuard.erase
    connect = partial(sqlite3.connect, path, isolation_level=None, check_same_thread=False)

    async with SQLiteJournal(path) as journal:
        await write(journal, "a", make_record("a1"))
        with closing(connect()) as reader:

            def erase_beside_reader(guard: FileGuard) -> bool:
                calls.append(guard)
                if len(calls) == 2:  # the vacuum is in the log, and the reader keeps it there
                    reader.execute("BEGIN")
                    reader.execute("SELECT * FROM event").fetchall()
                    copies.append(copy_of(path, "killed-in-it"))
                return erase(guard)

            monkeypatch.setattr(FileGuard, "erase", erase_beside_reader)
            await journal.vacuum()
            await write(journal, "a", make_record("a2"))
            copies.append(copy_of(path, "killed-later"))

    logs = []
    for copy in copies:
        async with SQLiteJournal(copy) as journal:
            logs.append(await read_all(journal, "a"))
    assert logs == [["a1"], ["a1", "a2"]]


async def test_a_vacuum_that_is_refused_does_not_close_the_journal(path: Path) -> None:
    """A backup may give the file a second name for a while."""
    second = Path(f"{path}-second")
    async with SQLiteJournal(path) as journal:
        await write(journal, "a", make_record("a1"))
        second.hardlink_to(path)
        with pytest.raises(JournalRefused, match="second name"):
            await journal.vacuum()
        second.unlink()

        await write(journal, "a", make_record("a2"))
        assert await journal.vacuum() == 0


async def begin_and_fork(journal: SQLiteJournal, name: str, depth: int) -> Claim:
    """Begin a conversation; fork it, and its fork, and so on; own the last, which is `name`."""
    await write(journal, f"{name}0", make_record("begun"))
    for at in range(1, depth + 1):
        fork = name if at == depth else f"{name}{at}"
        records = [make_record(f"forked {at}")]
        await journal.fork(f"{name}{at - 1}", fork, at=at, records=records, is_unfinished=False)
    return await journal.claim(name)


async def test_an_append_costs_the_same_at_any_depth_of_forks(path: Path) -> None:
    counts = []
    statements: list[str] = []
    async with SQLiteJournal(path) as journal:
        await journal._change(lambda w: w.connection.set_trace_callback(statements.append))
        for depth in (2, 20):
            claim = await begin_and_fork(journal, f"chain of {depth} ", depth)
            for seq in (claim.head + 1, claim.head + 2):
                statements.clear()
                await journal.append(
                    f"chain of {depth} ",
                    [make_record(f"e{seq}", message_id=f"m{seq}")],
                    epoch=claim.epoch,
                    expected_seq=seq,
                    is_unfinished=False,
                )
            counts.append(len(statements))

    assert counts[0] == counts[1]


async def test_an_activation_reads_no_more_statements_at_any_depth_of_forks(path: Path) -> None:
    counts = []
    statements: list[str] = []
    async with SQLiteJournal(path) as journal:
        await journal._read(lambda reader: reader.connection.set_trace_callback(statements.append))
        for depth in (2, 20):
            name = f"chain of {depth} "
            claim = await begin_and_fork(journal, name, depth)
            snapshot = Snapshot(claim.head, "v1", b"folds")
            await journal.write_snapshot(name, snapshot, epoch=claim.epoch)
            statements.clear()
            await journal.info(name)
            assert await journal.read_snapshot(name) == snapshot
            await journal.read(name, after=claim.head - 1, limit=100)
            assert not [statement for statement in statements if "FROM fork" in statement]
            own = len(statements)
            await journal.read(name, after=0, limit=100)
            counts.append((own, len(statements)))

    assert counts[0] == counts[1]


@pytest.mark.parametrize("others", [0, 40])
async def test_a_known_id_is_found_at_any_depth_however_many_logs_have_it(
    path: Path, others: int
) -> None:
    """Callers may number their events, so that every conversation has the same ids."""
    async with SQLiteJournal(path) as journal:
        for number in range(others):
            await write(journal, f"other {number}", make_record("begun"), make_record("late"))
        claim = await begin_and_fork(journal, "fork", 5)
        await write(journal, "fork0", make_record("late"))  # behind the place that was forked

        for known, seq in (("begun", 1), ("forked 1", 2)):
            with pytest.raises(EventIdConflict) as caught:
                await journal.append(
                    "fork",
                    [make_record("new"), make_record(known)],
                    epoch=claim.epoch,
                    expected_seq=claim.head + 1,
                    is_unfinished=False,
                )
            assert caught.value.seqs == {known: seq}
        await write(journal, "fork", make_record("late"))
        assert dict(await journal.find_events("fork", ["late", "begun"])) == {"late": 7, "begun": 1}
