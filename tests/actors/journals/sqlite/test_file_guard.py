"""One file, one log: links, files that vanish, logs that are another file's, readers in the way."""

# ruff: noqa: ASYNC220, ASYNC221, ASYNC240 - files and programs are small; the loop has nothing else

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.actors.errors import JournalRefused, JournalUnavailable, OwnedElsewhere
from turnkeeper.actors.journal import Claim
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.sqlite import owner_lock, schema
from turnkeeper.actors.journals.sqlite.file_guard import FileGuard
from turnkeeper.actors.journals.sqlite.journal import SQLiteJournal
from turnkeeper.actors.journals.sqlite.repair import repair
from turnkeeper.actors.journals.sqlite.verify import verify
from turnkeeper.runtime import Ports

pytestmark = pytest.mark.costly


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "chats.db"


class Clock:
    """A monotonic clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def append(journal: SQLiteJournal, name: str, claim: Claim, at: int, *ids: str) -> list[int]:
    return list(
        await journal.append(
            name,
            [make_record(event_id) for event_id in ids],
            epoch=claim.epoch,
            expected_seq=at,
            is_unfinished=False,
        )
    )


async def write(path: Path, *ids: str, kill_to: Path | None = None) -> None:
    """Append these to conversation c; `kill_to` gets the files as a killed process leaves them."""
    async with SQLiteJournal(path, owner_wait_s=0) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, claim.head + 1, *ids)
        if kill_to is not None:
            for end in ("", "-wal"):
                shutil.copyfile(f"{path}{end}", f"{kill_to}{end}")


async def ids(path: Path) -> list[str]:
    async with SQLiteJournal(path, read_only=True) as journal:
        return await read_all(journal, "c")


# --- links ----------------------------------------------------------------------------------------


async def test_a_journal_reached_by_a_link_is_the_journal_that_the_link_names(
    path: Path, tmp_path: Path
) -> None:
    link = tmp_path / "chats.db"
    link.symlink_to(path)

    await write(link, "e1")  # through a link that dangles
    assert path.is_file()
    assert link.is_symlink()
    async with SQLiteJournal(path) as owner:
        claim = await owner.claim("c")
        await append(owner, "c", claim, 2, "e2")
        assert await ids(link) == ["e1", "e2"]
        assert verify(link).records == 2
        with pytest.raises(OwnedElsewhere):
            async with SQLiteJournal(link, owner_wait_s=0):
                raise AssertionError("entered")
        with pytest.raises(OwnedElsewhere):
            repair(link)
    assert {file.name for file in tmp_path.iterdir()} == {"chats.db", "data"}


async def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(JournalRefused, match="nothing was done"):
        SQLiteJournal(tmp_path / "a")


async def test_a_file_with_two_names_is_not_written(path: Path, tmp_path: Path) -> None:
    await write(path, "e1")
    os.link(path, tmp_path / "other.db")
    with pytest.raises(JournalRefused, match="second name"):
        await write(tmp_path / "other.db", "e2")
    (tmp_path / "other.db").unlink()
    await write(path, "e2")


@pytest.mark.parametrize("end", ["-owner", "-new", "-wal"])
async def test_no_side_file_is_written_through_a_link(path: Path, tmp_path: Path, end: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    Path(f"{path}{end}").symlink_to(victim)
    with pytest.raises(JournalRefused):
        await write(path, "e1")
    assert victim.read_text() == "precious"


async def test_the_files_are_for_their_owner_alone(path: Path) -> None:
    async with SQLiteJournal(path) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1")
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


# --- a disk that is full --------------------------------------------------------------------------


async def test_a_new_file_on_a_full_disk_is_unavailable(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    for module in (owner_lock, schema):
        with monkeypatch.context() as patch:
            patch.setattr(f"{module.__name__}.os.open", full)
            with pytest.raises(JournalUnavailable, match="make room"):
                await write(path, "e1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)  # the lock holds without a name in it
        await write(path, "e1")
    assert await ids(path) == ["e1"]


@pytest.mark.parametrize("takeover", [False, True])
async def test_a_file_of_another_program_in_the_place_of_the_lock_stays_as_it_is(
    path: Path, takeover: bool
) -> None:
    async with SQLiteJournal(path) as journal:
        await journal.claim("c")
    lock = Path(f"{path}-owner")
    lock.write_text("my notes")

    with pytest.raises(JournalRefused, match=r"chats\.db-owner is another program's file"):
        async with SQLiteJournal(path, takeover=takeover):
            raise AssertionError("entered")
    assert lock.read_text() == "my notes"


async def test_a_pipe_in_the_place_of_the_lock_is_refused(path: Path) -> None:
    os.mkfifo(f"{path}-owner")
    with pytest.raises(JournalRefused, match="cannot be opened for writing"):
        async with SQLiteJournal(path):
            raise AssertionError("entered")


@pytest.mark.parametrize("left", ["", '{"own', "\0" * 32])
async def test_a_lock_that_was_not_written_whole_is_no_other_program_s(
    path: Path, left: str
) -> None:
    """Of its text a full disk leaves the beginning, and a power failure perhaps zeros."""
    async with SQLiteJournal(path) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, "e1")
    Path(f"{path}-owner").write_text(left)

    async with SQLiteJournal(path) as journal:
        await append(journal, "c", await journal.claim("c"), 2, "e2")
    assert await ids(path) == ["e1", "e2"]


# --- under its owner ------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["", "-wal", "-shm"])
@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_file_that_vanishes_under_its_owner_closes_it_for_writing(
    path: Path, lost: str, is_replaced: bool
) -> None:
    clock = Clock()
    async with SQLiteJournal(path, ports=Ports(monotonic=clock)) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, "e1")
        file = Path(f"{path}{lost}")
        content = file.read_bytes()
        file.rename(f"{file}.old")
        if is_replaced:
            file.write_bytes(content)
        clock.now += 1

        for _ in range(2):
            with pytest.raises(JournalUnavailable, match="deleted or replaced"):
                await append(journal, "c", claim, 2, "e2")
        assert not journal.is_lease_valid()

    # Its log was left as it was, so the next start does not begin anew without a word.
    assert Path(f"{path}-wal").exists() == (is_replaced or lost != "-wal")
    if not lost and not is_replaced:
        with pytest.raises(JournalRefused, match="write-ahead log of one"):
            await write(path, "e3")


COPYING = """
import sqlite3, sys

beside = sqlite3.connect(sys.argv[1], isolation_level=None)
for statement in ("SELECT count(*) FROM event", "PRAGMA wal_checkpoint"):
    beside.execute(statement).fetchone()
    print("done", flush=True)
    sys.stdin.readline()
"""


async def test_a_program_that_makes_a_new_index_of_the_log_cannot_damage_the_file(
    path: Path,
) -> None:
    """As a replicator, if a clean-up job has deleted the index: it does not see later commits.

    The writer went on, and began its log anew; then the program copied parts of later commits to
    the places that the index names.
    """
    clock = Clock()
    async with SQLiteJournal(path, ports=Ports(monotonic=clock)) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, "e1")
        Path(f"{path}-shm").unlink()
        with subprocess.Popen(
            [sys.executable, "-c", COPYING, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as copying:
            assert copying.stdout is not None
            assert copying.stdout.readline() == "done\n"
            for seq in range(2, 300):
                clock.now += 1
                with suppress(JournalUnavailable):
                    await append(journal, "c", claim, seq, f"e{seq}")
            copying.communicate("\n")
    assert not verify(path).problems
    assert await ids(path) == ["e1"]


async def test_a_file_that_vanishes_in_the_last_second_is_told_on_leaving(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with SQLiteJournal(path) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1")
    assert "journal lost" not in caplog.text
    async with SQLiteJournal(path, ports=Ports(monotonic=Clock())) as journal:
        path.unlink()
        await append(journal, "c", await journal.claim("c"), 2, "e2")
    assert "journal lost" in caplog.text


EMPTYING = """
import sqlite3, sys

print(*sqlite3.connect(sys.argv[1]).execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())
"""


@pytest.mark.parametrize("is_emptied", [False, True])
async def test_leaving_folds_no_log_whose_index_was_lost_in_the_last_second(
    path: Path, caplog: pytest.LogCaptureFixture, *, is_emptied: bool
) -> None:
    """If a program has emptied the log, its index names places where nothing is.

    The writer copied zeros over pages of all conversations.
    """
    seen = [f"e{seq}" for seq in range(1, 7)]
    async with SQLiteJournal(path, ports=Ports(monotonic=Clock())) as journal:
        claim = await journal.claim("c")
        for seq in range(1, 6):
            await append(journal, "c", claim, seq, f"e{seq}")
        Path(f"{path}-shm").unlink()
        if is_emptied:
            command = [sys.executable, "-c", EMPTYING, str(path)]
            assert subprocess.check_output(command, text=True) == "0 0 0\n"
        await append(journal, "c", claim, 6, "e6")
    assert "start again" in caplog.text

    if is_emptied:
        with pytest.raises(JournalRefused, match="not its own"):
            verify(path)
        repair(path)
    assert not verify(path).problems
    assert await ids(path) == (seen[:5] if is_emptied else seen)


def test_erasing_folds_no_log_whose_index_was_lost(path: Path) -> None:
    """It goes on at rest, in which no job has the files looked at."""
    with closing(schema.open_for_writing(path, synchronous="FULL", busy_wait_s=0)) as connection:
        guard = FileGuard(path, connection, is_log_stamped=False)
        assert guard.erase()
        Path(f"{path}-shm").unlink()
        with pytest.raises(JournalRefused, match="start again"):
            guard.erase()


@pytest.mark.parametrize("how", ["renamed over it", "written into it"])
async def test_a_file_that_is_replaced_under_its_owner_is_not_told_to_be_repaired(
    path: Path, tmp_path: Path, how: str
) -> None:
    """Its pages are read together with the log of the file before it."""
    other = tmp_path / "other.db"
    await write(other, *(f"o{n}" for n in range(20)))
    await write(path, *(f"e{n}" for n in range(300)))
    async with SQLiteJournal(path) as journal:
        await append(journal, "c", await journal.claim("c"), 301, "e300")
        if how == "renamed over it":
            other.rename(path)
        else:
            shutil.copyfile(other, path)

        with pytest.raises(JournalRefused, match="replaced while a process had it open") as told:
            await ids(path)
        assert "repair" not in str(told.value)
        with pytest.raises(JournalRefused, match="replaced while a process had it open"):
            verify(path)


# --- whose log ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "killed"])
async def test_an_older_file_beside_a_newer_log_is_refused(
    path: Path, tmp_path: Path, how: str
) -> None:
    await write(path, "e1")
    await write(path, "e2", kill_to=tmp_path / "old.db")
    backup = path if how == "closed" else tmp_path / "old.db"
    content = backup.read_bytes()
    await write(path, *(f"e{n}" for n in range(3, 300)))
    restored = tmp_path / "restored.db"
    await write(path, "e300", kill_to=restored)
    restored.write_bytes(content)

    with pytest.raises(JournalRefused, match="not its own"):
        await ids(restored)
    with pytest.raises(JournalRefused, match="not its own"):
        await write(restored, "new")
    with pytest.raises(JournalRefused, match="not its own"):
        verify(restored)
    assert restored.read_bytes() == content

    assert repair(restored) is not None
    assert await ids(restored) == (["e1"] if how == "killed" else ["e1", "e2"])


async def test_the_log_of_another_journal_is_refused(path: Path, tmp_path: Path) -> None:
    await write(path, "e1")
    await write(tmp_path / "other.db", "x1", kill_to=tmp_path / "killed.db")
    shutil.copyfile(tmp_path / "killed.db-wal", f"{path}-wal")
    with pytest.raises(JournalRefused, match="not its own"):
        await write(path, "e2")
    Path(f"{path}-wal").unlink()
    assert await ids(path) == ["e1"]


async def test_an_older_log_of_the_same_journal_is_refused(path: Path, tmp_path: Path) -> None:
    await write(path, "e1", kill_to=tmp_path / "killed.db")
    await write(path, "e2")
    shutil.copyfile(tmp_path / "killed.db-wal", f"{path}-wal")
    with pytest.raises(JournalRefused, match="not its own"):
        await write(path, "e3")


async def test_the_log_that_a_file_has_recovered_from_is_refused_later(
    path: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed.db"
    await write(path, "e1", kill_to=killed)
    log = Path(f"{killed}-wal").read_bytes()
    await write(killed, "e2")
    Path(f"{killed}-wal").write_bytes(log)
    with pytest.raises(JournalRefused, match="not its own"):
        await ids(killed)
    with pytest.raises(JournalRefused, match="not its own"):
        await write(killed, "e3")


async def test_a_file_whose_log_is_missing_after_a_kill_is_refused(
    path: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone.db"
    await write(path, "e0")
    await write(path, "e1", kill_to=alone)
    Path(f"{alone}-wal").unlink()
    for attempt in (ids(alone), write(alone, "e2")):
        with pytest.raises(JournalRefused, match="write-ahead log is missing"):
            await attempt
    assert repair(alone) is not None
    await write(alone, "e2")
    assert await ids(alone) == ["e0", "e2"]


async def test_a_log_that_stays_marked_after_many_restarts_is_its_files_own(
    path: Path, tmp_path: Path
) -> None:
    clock = Clock()
    killed, alone = tmp_path / "killed.db", tmp_path / "alone.db"
    async with SQLiteJournal(path, ports=Ports(monotonic=clock)) as journal:
        claim = await journal.claim("c")
        for n in range(1, 40):
            clock.now += 0.3
            record = make_record(f"e{n}", b"x" * 400_000)
            await journal.append(
                "c", [record], epoch=claim.epoch, expected_seq=n, is_unfinished=False
            )
            for end in ("", "-wal"):
                shutil.copyfile(f"{path}{end}", f"{killed}{end}")
            assert len(await ids(killed)) == n
        clock.now += 1
        await append(journal, "c", claim, 40, "e40")
        shutil.copyfile(path, alone)
    with pytest.raises(JournalRefused, match="is missing"):
        await ids(alone)


async def test_a_process_killed_while_it_opens_a_file_leaves_it_usable(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each statement of the opening: the log is made before the file knows of it."""
    await write(path, "e1")
    copies: list[Path] = []

    def keep(_: str) -> None:
        copy = tmp_path / f"{len(copies)}.db"
        for end in ("", "-wal"):
            if Path(f"{path}{end}").exists():
                shutil.copyfile(f"{path}{end}", f"{copy}{end}")
        copies.append(copy)

    connect = schema._connect

    def traced(*args: object, **options: object) -> sqlite3.Connection:
        connection = connect(*args, **options)  # type: ignore[arg-type]  # as it was called
        connection.set_trace_callback(keep)
        return connection

    monkeypatch.setattr(schema, "_connect", traced)
    await write(path, "e2")
    monkeypatch.undo()

    assert len(copies) > 20
    for copy in copies:
        assert await ids(copy) in (["e1"], ["e1", "e2"])
        await write(copy, "e3")


async def test_a_copy_that_sqlite_makes_of_a_running_file_needs_no_log(
    path: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    async with SQLiteJournal(path) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, "e1", "e2")
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
    await write(copy, "e3")
    assert await ids(copy) == ["e1", "e2", "e3"]


async def test_a_log_of_later_commits_is_not_folded_into_a_backup_that_it_damages(
    path: Path, tmp_path: Path
) -> None:
    """The file was refused, with "nothing was changed", and the backup was lost."""
    restored = tmp_path / "restored.db"
    async with SQLiteJournal(path, owner_wait_s=0) as journal:
        claim = await journal.claim("c")

        async def more(upto: int) -> None:
            head = (await journal.info("c")).head if upto > 50 else 0
            for seq in range(head + 1, upto + 1):
                record = make_record(f"e{seq}", b"%04000d" % seq)
                await journal.append(
                    "c", [record], epoch=claim.epoch, expected_seq=seq, is_unfinished=False
                )

        await more(50)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            with closing(sqlite3.connect(restored)) as target:
                other.backup(target)
            await more(100)
            other.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
        await more(120)
        shutil.copyfile(f"{path}-wal", f"{restored}-wal")
    content = restored.read_bytes()

    with pytest.raises(JournalRefused, match="damaged"):
        await write(restored, "new")

    assert restored.read_bytes() == content
    Path(f"{restored}-wal").unlink()
    assert len(await ids(restored)) == 50


# --- readers in the way ---------------------------------------------------------------------------


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Read the file as another program does, in one transaction."""
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM event").fetchone()
        yield


async def test_no_commit_goes_to_a_log_that_a_crash_would_make_a_foreign_one(
    path: Path, tmp_path: Path
) -> None:
    """The stamp stays out of the file while it is read. All commits were refused after a crash."""
    await write(path, "e1")
    with reading(path):
        for _ in range(2):
            with pytest.raises(JournalRefused, match="another program has been reading it"):
                async with SQLiteJournal(path, owner_wait_s=0, busy_wait_s=0):
                    raise AssertionError("entered")
        for end in ("", "-wal"):
            shutil.copyfile(f"{path}{end}", f"{tmp_path / 'refused.db'}{end}")
    for file in (path, tmp_path / "refused.db"):
        await write(file, "e2", kill_to=tmp_path / "killed.db")
        assert await ids(tmp_path / "killed.db") == await ids(file) == ["e1", "e2"]


async def test_an_owner_opens_beside_a_reader_a_log_that_is_known_to_be_the_files(
    path: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        async with SQLiteJournal(path, owner_wait_s=0) as journal:
            claim = await journal.claim("c")
            await append(journal, "c", claim, 1, "e1")
            stack.enter_context(reading(path))
        async with SQLiteJournal(path, owner_wait_s=0, busy_wait_s=0) as journal:
            claim = await journal.claim("c")
            await append(journal, "c", claim, 2, "e2")
            for end in ("", "-wal"):
                shutil.copyfile(f"{path}{end}", f"{tmp_path / 'killed.db'}{end}")
    await write(tmp_path / "killed.db", "e3")
    assert await ids(tmp_path / "killed.db") == ["e1", "e2", "e3"]


async def test_a_deletion_beside_a_long_reader_keeps_nobody_waiting(path: Path) -> None:
    """With SQLite's own patience it would wait for the reader, and all appends with it."""
    clock = Clock()
    async with SQLiteJournal(path, busy_wait_s=10_000, ports=Ports(monotonic=clock)) as journal:
        claims = {name: await journal.claim(name) for name in ("a", "b", "c")}
        for name, claim in claims.items():
            await append(journal, name, claim, 1, f"secret of {name}")
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM event").fetchone()
            with anyio.fail_after(60):
                for name in ("a", "b"):
                    deletion = await journal.delete(name, epoch=claims[name].epoch)
                    assert not deletion.is_erased
        assert b"secret of a" in Path(f"{path}-wal").read_bytes()

        # The reader has left: it is made up for by itself.
        clock.now += 1
        await append(journal, "c", claims["c"], 2, "e2")

        assert b"secret of a" not in path.read_bytes() + Path(f"{path}-wal").read_bytes()


# --- a write that the disk lost -------------------------------------------------------------------


async def test_a_lost_write_is_told_when_the_file_is_opened(path: Path) -> None:
    await write(path, "e1")
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'conversation'"
        ).fetchone()
    old = path.read_bytes()
    await write(path, "e2", "e3")
    new = bytearray(path.read_bytes())
    place = slice((page - 1) * 8192, page * 8192)
    new[place] = old[place]
    path.write_bytes(new)

    with pytest.raises(JournalRefused, match="write to the disk was lost"):
        await write(path, "e4")
    assert verify(path).problems
    assert repair(path) is not None
    assert await ids(path) == ["e1", "e2", "e3"]


async def test_a_log_that_went_on_from_an_older_end_keeps_its_longest_branch(path: Path) -> None:
    await write(path, "e1")
    with closing(sqlite3.connect(path)) as connection:
        row = connection.execute("SELECT * FROM conversation").fetchone()
    await write(path, "e2", "e3", "e4")
    with closing(sqlite3.connect(path)) as connection, connection:
        # The row as it was; and SQLite, which goes by it, writes over e2 and e3.
        connection.execute("DELETE FROM conversation")
        connection.execute(f"INSERT INTO conversation VALUES ({', '.join('?' * len(row))})", row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "_refuse_stale_rows", lambda *_: None)
        await write(path, "f2", "f3")
    assert verify(path).problems

    done = repair(path)

    assert done is not None
    assert await ids(path) == ["e1", "e2", "e3", "e4"]
    assert done.set_aside == 2
    assert [loss.set_aside for loss in done.losses] == [2]
    aside = done.aside.read_text()
    assert "f2" in aside
    assert "f3" in aside


# --- no file left to open -------------------------------------------------------------------------

FILES_MAX = 256


@contextmanager
def no_file_left() -> Iterator[None]:
    """Let this process open no more files, as if clients had taken all that it may have."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_MAX, limits[1]))
        with suppress(OSError):
            while True:
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


async def test_a_process_that_can_open_no_file_goes_on_writing(path: Path) -> None:
    """The check of each second opens the log, and closed the journal for good."""
    clock = Clock()
    async with SQLiteJournal(path, ports=Ports(monotonic=clock)) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, "e1")
        with no_file_left():
            clock.now += 2.0
            await append(journal, "c", claim, 2, "e2")
        clock.now += 2.0
        await append(journal, "c", claim, 3, "e3")

    assert await ids(path) == ["e1", "e2", "e3"]


async def test_a_large_group_needs_no_temporary_file(path: Path) -> None:
    """Users' words were written to one, and without one the journal was closed for good."""
    records = [make_record(f"e{n}", b"%09999d" % n) for n in range(1, 401)]
    async with SQLiteJournal(path) as journal:
        claim = await journal.claim("c")
        with no_file_left():
            await journal.append(
                "c", records, epoch=claim.epoch, expected_seq=1, is_unfinished=False
            )

    assert len(await ids(path)) == len(records)


async def test_a_job_that_can_load_no_module_is_refused_and_the_journal_stays_open(
    path: Path,
) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with SQLiteJournal(path) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, "e1")
        with pytest.raises(JournalUnavailable, match="Too many open files; nothing was written"):
            await journal._change(fail)
        assert await append(journal, "c", claim, 2, "e2") == [2]
