"""Repairing a damaged file keeps every good prefix, and throws nothing away."""

# ruff: noqa: ASYNC240 - the files of a test are small, and its loop has nothing else to do

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
import time
from contextlib import closing
from itertools import count
from pathlib import Path

import anyio
import pytest

from turnkeeper.actors.errors import (
    ConversationExists,
    ConversationNotFound,
    CorruptLog,
    JournalRefused,
    JournalUnavailable,
    OwnedElsewhere,
)
from turnkeeper.actors.journal import READ_BYTES, Listing, Snapshot, StoredRecord
from turnkeeper.actors.journals.contract import make_record
from turnkeeper.actors.journals.sqlite import file_work
from turnkeeper.actors.journals.sqlite.file_work import FileWork
from turnkeeper.actors.journals.sqlite.journal import SQLiteJournal
from turnkeeper.actors.journals.sqlite.reader import reading
from turnkeeper.actors.journals.sqlite.repair import repair
from turnkeeper.actors.journals.sqlite.schema import SCHEMA_VERSION
from turnkeeper.actors.journals.sqlite.verify import verify

from .test_damage import DAMAGES, change, fill, flipped, put


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "chats.db"
    anyio.run(fill, path)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats.db"


Logs = dict[str, list[StoredRecord]]


def logs(path: Path) -> Logs:
    with reading(path, busy_wait_s=0) as reader:
        return {
            info.conversation_id: list(reader.read(info.conversation_id, 0, 100, READ_BYTES))
            for info in reader.do(lambda reader: reader.list())
        }


@pytest.fixture
def original(path: Path, whole: bytes) -> Logs:
    path.write_bytes(whole)
    return logs(path)


def test_a_whole_file_is_left_as_it_is(path: Path, whole: bytes, original: Logs) -> None:
    assert repair(path) is None
    assert path.read_bytes() == whole
    assert {file.name for file in path.parent.iterdir()} == {"chats.db", "chats.db-owner"}


# What is left of each log, where it is less than before.
LEFT: dict[str, dict[str, int]] = {
    "payload": {"alice": 2},
    "kind": {"alice": 1, "fork": 1},
    "epoch": {"alice": 1, "fork": 1},
    "message id": {"alice": 0, "fork": 0},
    "mark": {"alice": 0, "fork": 0},
    "missing record": {"alice": 1, "fork": 1},
    "missing last record": {"alice": 2},
    "missing shared record": {"alice": 0, "fork": 0},
    "part": {"bob": 1},
    "missing part": {"bob": 1},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_good_prefixes_are_kept_and_the_rest_is_set_aside(
    path: Path, original: Logs, damage: str
) -> None:
    change(path, DAMAGES[damage][0])
    damaged = path.read_bytes()

    done = repair(path)

    assert done is not None
    assert done.backup.read_bytes() == damaged
    assert verify(path).problems == ()
    left = {
        name: records[: LEFT.get(damage, {}).get(name, len(records))]
        for name, records in original.items()
    }
    found = logs(path)
    if damage in {"missing row", "missing row of a fork", "renamed"}:  # it gets another name
        (name,) = found.keys() - left.keys()
        found["fork" if "fork" in damage else "bob"] = found.pop(name)
    assert found == {name: records for name, records in left.items() if records}
    lost = {loss.conversation_id for loss in done.losses}
    assert {name for name in lost if not name.startswith("recovered")} == set(LEFT.get(damage, {}))
    aside = [json.loads(line) for line in done.aside.read_text().splitlines()]
    assert len(aside) == done.set_aside
    # Each record that the damaged file still had is in the one or in the other.
    missing = 1 if "missing" in damage and "record" in damage else 0
    kept = verify(path).records - len(left["fork"][:2])
    assert kept + sum(row["table"] == "event" for row in aside) == 7 - missing


def test_what_was_cut_off_is_unfinished_and_fenced(path: Path, original: Logs) -> None:
    del original
    change(path, DAMAGES["payload"][0])
    with reading(path, busy_wait_s=0) as reader:
        before = reader.info("bob")
    repair(path)
    with reading(path, busy_wait_s=0) as reader:
        assert reader.info("alice").is_unfinished
        assert reader.info("bob").epoch > before.epoch
        assert not reader.info("bob").is_unfinished


async def test_a_repaired_file_goes_on(path: Path, original: Logs) -> None:
    del original
    change(path, DAMAGES["missing record"][0])
    assert repair(path) is not None
    async with SQLiteJournal(path) as journal:
        for name in ("alice", "fork", "bob"):
            claim = await journal.claim(name)
            await journal.append(
                name,
                [make_record("next")],
                epoch=claim.epoch,
                expected_seq=claim.head + 1,
                is_unfinished=False,
            )
            await journal.delete(name, epoch=claim.epoch)
    assert verify(path).problems == ()


def test_a_log_without_a_name_gets_one(path: Path, original: Logs) -> None:
    """The row and the name's index both gone: the name cannot be known, the log can."""
    change(path, "DELETE FROM conversation WHERE name = 'bob'")

    done = repair(path)

    assert done is not None
    found = logs(path)
    (name,) = found.keys() - original.keys()
    assert name.startswith("recovered-")
    assert found[name] == original["bob"]
    # Repaired once more, after other damage, it is still there.
    change(path, "UPDATE rejection SET reason = 'none'")
    assert repair(path) is not None
    assert logs(path)[name] == original["bob"]


async def test_a_living_log_that_lost_its_row_is_told_from_one_that_was_deleted(
    path: Path, original: Logs
) -> None:
    """A fork needs all of its records, as it may of a deleted one, so nothing was found or done."""
    head = len(original["bob"])
    async with SQLiteJournal(path) as journal:
        await journal.fork("bob", "kept", at=head, records=[make_record("k")], is_unfinished=False)
    change(path, "DELETE FROM conversation WHERE name = 'bob'")
    async with SQLiteJournal(path) as journal:
        with pytest.raises(CorruptLog, match="its own row is missing"):
            await journal.claim("bob")
    found = {problem.found.partition(" ")[2].partition(" ")[2] for problem in verify(path).problems}
    assert found == {"belongs to no conversation: the row with its name is missing"}

    done = repair(path)

    assert done is not None
    assert {loss.conversation_id for loss in done.losses} == logs(path).keys() - {*original, "kept"}
    assert verify(path).problems == ()
    async with SQLiteJournal(path) as journal:
        assert (await journal.claim("bob")).head == head
        assert list(await journal.read("bob")) == original["bob"]
        assert len(await journal.read("kept")) == head + 1


async def test_a_fork_that_lost_its_row_and_its_records_begins_anew(
    path: Path, original: Logs
) -> None:
    change(path, "DELETE FROM event WHERE event_id = 'f3'")
    change(path, "DELETE FROM conversation WHERE name = 'fork'")
    async with SQLiteJournal(path) as journal:
        with pytest.raises(CorruptLog, match="its own row is missing"):
            await journal.claim("fork")
    assert verify(path).problems

    assert repair(path) is not None

    assert logs(path).keys() == original.keys() - {"fork"}
    async with SQLiteJournal(path) as journal:
        assert (await journal.claim("fork")).head == 0


@pytest.mark.parametrize("name", ["bob", "fork"])
async def test_a_conversation_whose_log_got_another_name_goes_on_under_its_own(
    path: Path, original: Logs, name: str
) -> None:
    change(path, f"DELETE FROM conversation WHERE name = '{name}'")
    assert repair(path) is not None
    (renamed,) = logs(path).keys() - original.keys()
    head = len(original[name])

    async with SQLiteJournal(path, search=True) as journal:
        with pytest.raises(ConversationNotFound):
            await journal.read(name)
        with pytest.raises(ConversationExists):
            await journal.fork("alice", name, at=1, records=[make_record("f")], is_unfinished=False)
        for each in (name, renamed):
            claim = await journal.claim(each)
            assert claim.head == head
            assert claim.epoch > max(record.epoch for record in original[name])
            records = [make_record(f"next of {each}")]
            await journal.append(
                each, records, epoch=claim.epoch, expected_seq=head + 1, is_unfinished=False
            )
            assert list(await journal.read(each))[:head] == original[name]
        await journal.index()
    assert verify(path).problems == ()
    # Each of them is as good as the other, damaged again or deleted.
    change(path, "UPDATE rejection SET reason = 'none'")
    assert repair(path) is not None
    async with SQLiteJournal(path) as journal:
        for each in (renamed, name):
            assert len(await journal.read(each)) == head + 1
            await journal.delete(each, epoch=(await journal.claim(each)).epoch)
    assert verify(path).problems == ()


async def test_a_conversation_that_was_deleted_before_goes_on_under_its_own_name(
    path: Path, original: Logs
) -> None:
    """It was not found, and began anew; after its next deletion it wrote into the old log."""

    async def append(journal: SQLiteJournal, name: str, event_id: str) -> list[str]:
        claim = await journal.claim(name)
        records = [make_record(event_id)]
        seq = claim.head + 1
        await journal.append(
            name, records, epoch=claim.epoch, expected_seq=seq, is_unfinished=False
        )
        return [record.event_id for record in await journal.read(name)]

    async with SQLiteJournal(path) as journal:
        await journal.fork("bob", "kept", at=1, records=[make_record("k")], is_unfinished=False)
        await journal.delete("bob", epoch=(await journal.claim("bob")).epoch)
        await append(journal, "bob", "second")
    change(path, "DELETE FROM conversation WHERE name = 'bob'")
    async with SQLiteJournal(path) as journal:
        with pytest.raises(CorruptLog, match="its own row is missing"):
            await journal.claim("bob")
    assert repair(path) is not None
    # What the fork needs of the deleted one may be all of a living one, so it gets a name too.
    named = {
        log[0].event_id: name for name, log in logs(path).items() if name not in {*original, "kept"}
    }
    assert named.keys() == {"b1", "second"}
    renamed = named["second"]

    async with SQLiteJournal(path) as journal:
        assert await append(journal, "bob", "third") == ["second", "third"]
    change(path, "DELETE FROM conversation WHERE name = 'bob'")  # and once more
    assert repair(path) is not None
    async with SQLiteJournal(path) as journal:
        assert await append(journal, "bob", "again") == ["second", "third", "again"]
        await journal.delete("bob", epoch=(await journal.claim("bob")).epoch)
        assert await append(journal, "bob", "fourth") == ["fourth"]
        assert [record.event_id for record in await journal.read(renamed)] == ["second"]
        assert len(await journal.read("kept")) == 2
    assert verify(path).problems == ()


async def test_a_name_is_free_once_the_log_that_lost_it_is_deleted(
    path: Path, original: Logs
) -> None:
    """A fork may still need its records."""
    change(path, "DELETE FROM conversation WHERE name = 'bob'")
    assert repair(path) is not None
    (renamed,) = logs(path).keys() - original.keys()

    async with SQLiteJournal(path) as journal:
        await journal.fork(renamed, "kept", at=1, records=[make_record("k")], is_unfinished=False)
        await journal.delete(renamed, epoch=(await journal.claim(renamed)).epoch)
        claim = await journal.claim("bob")
        assert claim.head == 0
        await journal.append(
            "bob", [make_record("new")], epoch=claim.epoch, expected_seq=1, is_unfinished=False
        )
        assert [record.event_id for record in await journal.read("bob")] == ["new"]
        assert len(await journal.read("kept")) == 2
    assert verify(path).problems == ()


@pytest.mark.parametrize(
    ("damage", "begins", "left"),
    [
        ("DELETE FROM conversation WHERE name = 'bob'", "recovered-", 2),
        ("DELETE FROM event WHERE event_id = 'f3'", "fork", 2),
        ("DELETE FROM event WHERE event_id = 'a2'", "fork", 1),
    ],
    ids=["named anew", "own records lost", "cut within its prefix"],
)
async def test_a_fork_without_records_of_its_own_has_a_listing_and_a_snapshot(
    path: Path, original: Logs, damage: str, begins: str, left: int
) -> None:
    """A log that gets a new name begins as a fork; another fork may keep only shared records."""
    del original
    change(path, damage)
    assert repair(path) is not None

    async with SQLiteJournal(path) as journal:
        infos = await journal.list()
        (info,) = [each for each in infos if each.conversation_id.startswith(begins)]
        name = info.conversation_id
        assert info.head == left
        await journal.write_listing(name, Listing(left, "bob"), epoch=info.epoch)
        await journal.write_snapshot(name, Snapshot(left, "v", b"folds"), epoch=info.epoch)

        assert await journal.read_snapshot(name) == Snapshot(left, "v", b"folds")


def test_a_flipped_bit_is_repaired_or_refused_and_no_record_is_altered(
    path: Path, whole: bytes, original: Logs
) -> None:
    used = [offset for offset, byte in enumerate(whole) if byte not in b"\0A"]
    repaired = 0
    for copy in flipped(whole, used[7::307]):
        for file in path.parent.iterdir():
            file.unlink()
        path.write_bytes(copy)
        try:
            done = repair(path)
        except JournalRefused:
            assert path.read_bytes() == copy
            continue
        if done is not None:
            repaired += 1
            assert done.backup.read_bytes() == copy
            assert verify(path).problems == ()
            for records in logs(path).values():
                assert any(records == log[: len(records)] for log in original.values())
    assert repaired


def test_a_damaged_write_ahead_log_is_kept_and_what_is_before_the_damage_goes_on(
    path: Path, tmp_path: Path
) -> None:
    anyio.run(fill, tmp_path / "source.db", tmp_path / "copy.db")
    wal = bytearray((tmp_path / "copy.db-wal").read_bytes())
    wal[100] ^= 1  # in its first frame, with a whole transaction behind it
    put(path, (tmp_path / "copy.db").read_bytes(), bytes(wal))

    done = repair(path)

    assert done is not None
    assert Path(f"{done.backup}-wal").read_bytes() == wal
    assert not Path(f"{path}-wal").exists()
    assert verify(path).problems == ()
    assert "alice" in logs(path)


async def test_a_file_in_use_is_not_repaired(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)
    async with SQLiteJournal(path):
        with pytest.raises(OwnedElsewhere):
            repair(path)


def test_what_cannot_be_read_at_all_is_refused_and_left(path: Path) -> None:
    path.write_bytes(b"hello, " * 1000)
    with pytest.raises(JournalRefused):
        repair(path)
    assert [file.name for file in path.parent.iterdir()] == ["chats.db"]


async def test_an_interrupted_repair_is_told_and_finished(path: Path, original: Logs) -> None:
    """Killed between moving the old file away and moving the new one in."""
    path.rename(f"{path}-repaired")

    with pytest.raises(JournalRefused, match="repair was interrupted"):
        async with SQLiteJournal(path, owner_wait_s=0):
            raise AssertionError("entered")
    assert repair(path) is None

    assert logs(path) == original


def test_a_file_that_was_cut_off_anywhere_is_mended_or_refused_and_never_made_empty(
    path: Path, whole: bytes, original: Logs
) -> None:
    """Each page's end, and places within pages; what is mended has the beginnings of the logs."""
    mended = 0
    for length in sorted({*range(0, len(whole), 8192), *range(100, len(whole), 30_000)}):
        for file in path.parent.iterdir():
            file.unlink()
        path.write_bytes(whole[:length])
        try:
            done = repair(path)
        except JournalRefused:
            assert path.read_bytes() == whole[:length]
            continue
        assert done is not None
        assert done.records + done.set_aside > 0
        assert done.backup.read_bytes() == whole[:length]
        assert verify(path).problems == ()
        for name, records in logs(path).items():
            assert records == original[name][: len(records)]
        mended += 1
    assert mended > 10


def test_a_newer_file_is_not_mended_into_an_older_one(path: Path, original: Logs) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = path.read_bytes()
    with pytest.raises(JournalRefused, match=f"version {SCHEMA_VERSION + 1}"):
        repair(path)
    assert path.read_bytes() == before


# --- a disk that does not answer ------------------------------------------------------------------


class Hang:
    """Progress that comes no further until it may."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def __call__(self, _done: int, _of: int) -> None:
        assert self.may_go_on.wait(60)

    def end(self, name: str) -> None:
        """Let the work go on, and wait until its thread has ended."""
        self.may_go_on.set()
        for thread in threading.enumerate():
            if name in thread.name:
                thread.join(60)
                assert not thread.is_alive()


@pytest.mark.usefixtures("original")
def test_a_verification_without_an_answer_is_given_up(path: Path) -> None:
    hang = Hang()
    with pytest.raises(JournalUnavailable, match="has not answered within"):
        verify(path, on_progress=hang, answer_wait_s=0.05)
    hang.end("verifying")
    assert verify(path).problems == ()


@pytest.mark.usefixtures("original")
def test_a_repair_without_an_answer_is_given_up_changes_nothing_and_is_run_again(
    path: Path,
) -> None:
    """Rows that it could not read because it was given up are not lost with it."""
    change(path, "UPDATE event SET payload = x'00' WHERE id = 3")
    before = path.read_bytes()
    hang = Hang()
    with pytest.raises(JournalUnavailable, match="has not answered within"):
        repair(path, on_progress=hang, answer_wait_s=0.05)
    hang.end("repair")
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*repaired*"))
    assert not list(path.parent.glob("*damaged*"))
    done = repair(path)
    assert done is not None
    assert done.records


def test_work_on_a_file_goes_on_after_the_process_or_the_machine_was_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-Z and `fg`, or a lid that was shut, is no disk that hangs."""
    monkeypatch.setattr(file_work, "_LOOK_S", 0.001)
    wakes_up_at = count(step=1_000_000.0)
    monkeypatch.setattr(time, "clock_gettime", lambda _clock: next(wakes_up_at))
    may_end = threading.Event()

    class Looks(threading.Event):
        left = 3

        def wait(self, timeout: float | None = None) -> bool:
            self.left -= 1
            if not self.left:
                may_end.set()
            return super().wait(timeout)

    under_way = FileWork[bool]("the repair", 60.0)
    under_way._has_ended = Looks()
    assert under_way.run(lambda _work: may_end.wait(60))


@pytest.mark.usefixtures("original", "_interrupted_by_ctrl_c")
def test_a_caller_that_is_interrupted_leaves_nothing_running(path: Path) -> None:
    calls = 0

    def interrupt(_done: int, _of: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            os.kill(os.getpid(), signal.SIGINT)

    change(path, "UPDATE event SET payload = x'00' WHERE id = 3")
    with pytest.raises(KeyboardInterrupt):
        repair(path, on_progress=interrupt)
    calls_before = calls
    for one in threading.enumerate():
        if "repair of" in one.name:
            one.join()  # its work is over; the thread itself ends a moment later
    assert calls == calls_before
    assert repair(path) is not None or verify(path).problems == ()
