"""The commands about a journal, as processes: beside a writer, and on damaged files."""

from __future__ import annotations

import ctypes
import json
import os
import pty
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from turnkeeper.actors import (
    Conversations,
    SQLiteJournal,
    TurnContext,
    agent,
)
from turnkeeper.actors.journals.sqlite.schema import SCHEMA_VERSION

from .. import postgres
from .command import COMMAND, WarmCommand
from .test_sqlite_journal import OWNER

pytestmark = pytest.mark.in_parts(5)

TURNS = 60
CHATS = [
    [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": "answer"}]
    for n in range(3)
]


_warm: list[WarmCommand] = []


@pytest.fixture(scope="module", autouse=True)
def _warm_command() -> Iterator[None]:
    with WarmCommand() as warm:
        _warm.append(warm)
        yield
        _warm.clear()


def command(
    *arguments: str | Path,
    check: int | None = 0,
    env: Mapping[str, str] | None = None,
    file_bytes_max: int | None = None,
    preexec: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; nothing ever comes out as a traceback."""
    texts = list(map(str, arguments))
    if preexec is None:
        result = _warm[0].run(*texts, env=env, file_bytes_max=file_bytes_max)
    else:
        result = subprocess.run(
            [*COMMAND, *texts],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            preexec_fn=preexec,
        )
    assert "Traceback" not in result.stderr
    assert check is None or result.returncode == check, (result.stdout, result.stderr)
    return result


def told(*arguments: str | Path, check: int = 2, **more: Any) -> str:  # noqa: ANN401 - passed on
    """What it says in its one line, and nothing else, when it cannot do what it was told."""
    result = command(*arguments, check=check, **more)
    (line,) = result.stderr.splitlines()
    assert line.startswith("turnkeeper: ")
    return line


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal as a process leaves it: two conversations, one with a snapshot."""
    path = tmp_path_factory.mktemp("whole") / "chats.db"

    @agent
    async def answer(turn: TurnContext) -> None:
        await turn.say(f"You said: {turn.message.content}")

    async def fill() -> None:
        async with Conversations(answer, journal=SQLiteJournal(path)) as conversations:
            for n in range(TURNS):
                await (await conversations["alice"].send(f"word {n}")).end()
            await (await conversations["bob"].send("hello")).end()

    anyio.run(fill)
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(whole, tmp_path / "chats.db"))


def logs(path: Path) -> dict[str, list[bytes]]:
    async def read() -> dict[str, list[bytes]]:
        async with SQLiteJournal(path, read_only=True) as journal:
            return {
                info.conversation_id: [
                    record.payload for record in await journal.read(info.conversation_id, limit=999)
                ]
                for info in await journal.list()
            }

    return anyio.run(read)


# --- what they do ---------------------------------------------------------------------------------


def test_what_is_exported_is_imported_as_it_was(path: Path, tmp_path: Path) -> None:
    lines, other = tmp_path / "all.jsonl", tmp_path / "other.db"
    assert "2 conversations, 244 events, written to " in command("export", path, "-o", lines).stdout
    assert command("export", path).stdout == lines.read_text()
    assert len(command("export", path, "bob").stdout.splitlines()) == 1 + 1 + 4

    assert "2 conversations imported, 244 new events" in command("import", other, lines).stdout
    again = json.loads(command("import", other, lines, "--json").stdout)
    nothing: dict[str, object] = {"problems": [], "left_out": [], "unreadable": []}
    assert again == {"conversations": 2, "events": 0, **nothing}
    assert logs(other) == logs(path)
    assert command("export", other).stdout == lines.read_text()


def test_chats_in_the_openai_format_are_imported_and_what_is_wrong_is_told(
    path: Path, tmp_path: Path
) -> None:
    chats = tmp_path / "chats.json"
    chats.write_text(json.dumps([*CHATS, [{"role": "nobody"}]]))
    result = command("import", path, chats, tmp_path / "none.json", check=2)
    assert "3 conversations imported, 6 new events" in result.stdout
    assert "none.json: cannot be read: No such file" in result.stderr
    assert "chats.json" in result.stderr
    assert set(logs(path)) == {"alice", "bob", "chats-1", "chats-2", "chats-3"}
    result = command("import", path, chats, check=2)
    assert "0 conversations imported" in result.stdout
    assert "conversation chats-1 exists already" in result.stderr


def test_an_import_of_nothing_creates_no_journal(tmp_path: Path) -> None:
    unusable = {"empty.json": "", "no.json": "garbage", "none.json": "[]"}
    for name, content in unusable.items():
        (tmp_path / name).write_text(content)
    for name in (*unusable, "missing.json"):
        result = command("import", tmp_path / "new.db", tmp_path / name, check=2)
        assert f"{name}: " in result.stderr
        assert "0 conversations imported" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(unusable)


def test_an_import_of_an_export_without_a_sound_beginning_creates_no_journal(
    whole: Path, tmp_path: Path
) -> None:
    header, bob, first, second, *_ = command("export", whole, "bob").stdout.splitlines(True)
    twice = bob.replace('"head":4', '"head":2')
    bad = {
        "nothing.jsonl": [header, "{}\n"],
        "third.jsonl": [header, bob, first, second, "{}\n"],
        "twice.jsonl": [header, twice, first, first.replace('"seq":1', '"seq":2')],
    }
    for name, lines in bad.items():
        (tmp_path / name).write_text("".join(lines))
        result = command("import", tmp_path / "new.db", tmp_path / name, check=2)
        assert f"{name}: " in result.stderr
        assert "0 conversations imported" in result.stdout
    (tmp_path / "empty.jsonl").write_text(header)
    result = command("import", tmp_path / "new.db", tmp_path / "empty.jsonl")
    assert "0 conversations imported" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {*bad, "empty.jsonl"}


def test_an_import_stops_at_the_line_that_is_wrong(path: Path, tmp_path: Path) -> None:
    lines = command("export", path).stdout.splitlines(keepends=True)
    broken, other = tmp_path / "broken.jsonl", tmp_path / "other.db"
    broken.write_text("".join([*lines[:100], "{}\n", *lines[101:]]))
    result = command("import", other, broken, check=2)
    assert "import stopped at line 101" in result.stderr
    command("import", other, "-", check=2)


def test_an_import_that_stops_counts_what_it_has_imported(path: Path, tmp_path: Path) -> None:
    """It said of all: "0 conversations imported, 0 new events"."""
    lines = command("export", path, "alice", "bob").stdout.splitlines(keepends=True)
    events = sum(line.startswith('{"seq":') for line in lines)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("".join([*lines[:-1], "{}\n"]))

    result = command("import", tmp_path / "other.db", broken, check=2)

    last = json.loads(next(line for line in reversed(lines) if '"conversation"' in line))
    written = events - last["head"]  # the last conversation is one batch, which is not whole
    assert f"1 conversation imported, {written} new events" in result.stdout
    assert len(logs(tmp_path / "other.db")) == 1


def test_a_journal_that_cannot_be_made_leaves_no_part_of_it(whole: Path, tmp_path: Path) -> None:
    """It said that nothing was created, and left a `new.db-new`."""
    exported = tmp_path / "all.jsonl"
    command("export", whole, "-o", exported)

    told("import", tmp_path / "new.db", exported, file_bytes_max=10_000)

    assert {file.name for file in tmp_path.iterdir()} == {"all.jsonl", "new.db-owner"}


def test_an_import_that_the_disk_ends_counts_what_it_has_imported(
    path: Path, tmp_path: Path
) -> None:
    big, chats = tmp_path / "big.json", tmp_path / "chats.json"
    chats.write_text(json.dumps(CHATS))
    answer = {"role": "assistant", "content": "x" * 3_000_000}
    big.write_text(json.dumps([[{"role": "user", "content": "hello"}, answer]]))

    result = command("import", path, chats, big, check=2, file_bytes_max=2_000_000)

    assert f"{len(CHATS)} conversations imported" in result.stdout
    assert "failed: " in result.stderr


def test_an_event_that_cannot_be_read_is_imported_as_it_is_and_named(
    path: Path, tmp_path: Path
) -> None:
    damaged, other = tmp_path / "damaged.jsonl", tmp_path / "other.db"
    lines = command("export", path, "alice").stdout
    whole = next(line for line in lines.splitlines() if '"seq":7,' in line)
    damaged.write_text(lines.replace(whole, whole.replace('"timestamp":', '"timestamq":')))
    kind = json.loads(whole)["kind"]

    result = command("import", other, damaged, check=1)

    assert "1 conversation imported, 240 new events" in result.stdout
    shown = " ".join(result.stderr.split())
    assert f"imported, and cannot be read: {damaged}: alice, seq 7" in shown
    assert f"the record is no {kind} event" in shown
    assert command("export", other).stdout == damaged.read_text(), "as it came"
    assert f"the record is no {kind} event" in command("verify", other, check=1).stdout


def test_a_whole_journal_is_verified_as_such_and_not_touched(path: Path) -> None:
    before = path.read_bytes()
    assert command("verify", path).stdout.splitlines() == [
        "2 conversations, 244 events",
        "everything is as it was written",
    ]
    assert json.loads(command("verify", path, "--json").stdout)["problems"] == []
    for yes in ((), ("--yes",)):  # there is nothing to ask for
        assert command("repair", path, *yes).stdout.startswith("nothing to repair")
        done = json.loads(command("repair", path, "--json", *yes).stdout)
        assert done == {"repaired": False}
    assert path.read_bytes() == before


def test_a_whole_journal_is_not_repaired_through_a_link_to_it(path: Path, tmp_path: Path) -> None:
    """Its write-ahead log was looked for beside the link, so the command asked to replace it."""
    killed = tmp_path / "killed"
    killed.mkdir()

    async def write() -> None:
        async with SQLiteJournal(path) as journal:
            await journal.claim("c")
            for end in ("", "-wal"):
                shutil.copy(f"{path}{end}", killed)

    anyio.run(write)
    assert (killed / "chats.db-wal").stat().st_size
    link = tmp_path / "link.db"
    link.symlink_to(killed / "chats.db")

    assert command("repair", link).stdout.startswith("nothing to repair")


@pytest.mark.parametrize("options", [(), ("--yes",)])
def test_a_folder_is_no_file_to_repair(options: Sequence[str], tmp_path: Path) -> None:
    """The disk was said to be at fault."""
    assert "it is not a regular file; nothing was changed" in told("repair", tmp_path, *options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [(), ("--yes",)])
def test_another_file_is_no_journal_to_repair(options: Sequence[str], tmp_path: Path) -> None:
    """It was to be replaced, once this was confirmed; with --yes it got a `…-owner` beside it."""
    other = tmp_path / "notes.txt"
    other.write_text("not a journal")

    assert "is not a turnkeeper journal; nothing was changed" in told("repair", other, *options)
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize("options", [(), ("--yes",)])
def test_an_empty_file_or_a_database_of_another_program_is_no_journal_to_repair(
    options: Sequence[str], tmp_path: Path
) -> None:
    """As for other files above: an empty one was to be replaced, and both got a `…-owner`."""
    empty, other = tmp_path / "empty.db", tmp_path / "other.db"
    empty.touch()
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE note (text)")

    assert "is an empty file; nothing was changed" in told("repair", empty, *options)
    assert "is not a turnkeeper journal; nothing was changed" in told("repair", other, *options)
    assert sorted(tmp_path.iterdir()) == [empty, other]


def test_a_repair_says_how_lists_are_brought_up_to_date(path: Path) -> None:
    """Only `verify` told of it."""
    flip_a_bit(path)

    *_, last = command("repair", path, "--yes").stdout.splitlines()

    advised = f"update them with: turnkeeper reindex {path}"
    assert last == f"lists show an old state; {advised}"
    assert "lists show an old state of 2 conversations; " in command("verify", path).stdout
    assert command("reindex", path).stdout == "2 conversations brought up to date\n"
    assert advised not in command("verify", path).stdout


def test_conversations_are_deleted_by_name_and_by_age_after_being_asked(path: Path) -> None:
    assert "1 conversation with 4 events will be deleted for good; nothing was done" in told(
        "delete", path, "bob"
    )
    assert "no conversation carol" in told("delete", path, "bob", "carol", "--yes")
    assert "nothing to delete" in told("delete", path)
    assert set(logs(path)) == {"alice", "bob"}

    assert command("delete", path, "bob", "-y").stdout == "1 conversation deleted\n"
    assert set(logs(path)) == {"alice"}
    assert command("delete", path, "--older-than", "1", "-y").stdout == "0 conversations deleted\n"
    done = json.loads(command("delete", path, "--older-than", "0", "-y", "--json").stdout)
    assert done["deleted"] == [{"conversation": "alice", "kept": 0, "forks": [], "is_erased": True}]
    assert b"word 7" not in path.read_bytes()
    assert json.loads(command("vacuum", path, "--json").stdout)["bytes"] > 0
    assert command("verify", path).stdout.startswith("0 conversations, 0 events\n")


def test_damaged_conversations_are_deleted_by_their_age_like_others(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE event SET payload = '{}'")

    assert command("delete", path, "--older-than", "0", "-y").stdout == "2 conversations deleted\n"


async def write_to(path: Path) -> None:
    """Leave a log beside the file, for which it has a stamp, if another program has it open.

    A file without one, which another program reads in one transaction, is not opened.
    """
    async with SQLiteJournal(path) as journal:
        await journal.claim("carol")


def test_a_deletion_beside_a_reader_says_what_may_be_left(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("SELECT count(*) FROM event").fetchone()
        anyio.run(write_to, path)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM event").fetchone()
        done = command("delete", path, "bob", "-y").stdout
    assert "in the file, its search index or its write-ahead log; run `turnkeeper vacuum`" in done


# The signal comes as the second conversation is deleted (after that, if its number is negative), or
# as the first one is written.
_INTERRUPTED = """
import signal, sys
from turnkeeper.actors.cli import _journal_jobs, main

signal.signal(signal.SIGINT, signal.default_int_handler)
given = int(sys.argv.pop())
number, is_late = abs(given), given < 0
delete_unchanged, calls = _journal_jobs.delete_unchanged, []

async def delete(journal, info):
    calls.append(info)
    if len(calls) == 2 and not is_late:
        signal.raise_signal(number)
    deletion = await delete_unchanged(journal, info)
    if len(calls) == 2 and is_late:
        signal.raise_signal(number)
    return deletion

async def write(*_):
    signal.raise_signal(number)
    await _journal_jobs.anyio.sleep_forever()

_journal_jobs.delete_unchanged, _journal_jobs.import_recorded = delete, write
main()
"""


def interrupted(number: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command until this signal has ended it."""
    return subprocess.run(
        [sys.executable, "-P", "-c", _INTERRUPTED, *map(str, arguments), str(number)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("number", "status", "name"),
    [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, -signal.SIGTERM, "SIGTERM")],
)
def test_a_deletion_that_a_signal_ends_says_what_is_deleted(
    path: Path, number: int, status: int, name: str
) -> None:
    done = interrupted(number, "delete", path, "bob", "alice", "-y")

    assert done.returncode == status
    assert done.stdout == "1 conversation deleted\n"
    assert done.stderr == (
        "not deleted, or perhaps not:\n"
        "  alice: it may be deleted; `turnkeeper show` lists what is left\n"
        f"turnkeeper: stopped by {name}\n"
    )
    assert set(logs(path)) == {"alice"}


def test_a_deletion_that_ctrl_c_ends_tells_programs_what_is_deleted(path: Path) -> None:
    done = interrupted(signal.SIGINT, "delete", path, "bob", "alice", "-y", "--json")

    (one,) = json.loads(done.stdout)["deleted"]
    assert one["conversation"] == "bob"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_deletion_that_a_signal_ends_after_the_last_one_says_that_all_are_deleted(
    path: Path, number: int
) -> None:
    done = interrupted(-number, "delete", path, "bob", "alice", "-y", "--json")

    names = [one["conversation"] for one in json.loads(done.stdout)["deleted"]]
    assert names == ["bob", "alice"]
    assert done.stderr == f"turnkeeper: stopped by {'Ctrl-C' if number == 2 else 'SIGTERM'}\n"
    assert not logs(path)


def test_an_import_that_ctrl_c_ends_says_how_to_go_on(path: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.json"
    chats.write_text(json.dumps(CHATS))

    done = interrupted(signal.SIGINT, "import", path, chats)

    assert done.returncode == 130
    assert "stopped by Ctrl-C; what had been imported stays; run it again" in done.stderr


@pytest.mark.parametrize(("answer", "left"), [(b"y\n", {"alice"}), (b"n\n", {"alice", "bob"})])
def test_on_a_terminal_it_asks_before_it_destroys(
    path: Path, answer: bytes, left: set[str]
) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "delete", path, "bob"], stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        asked = b""
        while b"Go on?" not in asked:
            asked += os.read(ours, 1024)
        os.write(ours, answer)
        process.wait()
    os.close(ours)
    assert set(logs(path)) == left
    assert process.returncode == (0 if answer == b"y\n" else 2)


def test_on_a_terminal_a_long_one_shows_how_far_it_is(path: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "verify", path],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while some := os.read(ours, 4096):
                shown += some
        except OSError:  # what Linux says when the other end is closed
            pass
        assert process.stdout is not None
        assert process.stdout.read().endswith(b"everything is as it was written\n")
    os.close(ours)
    assert b" conversations " in shown


def test_what_is_printed_fits_a_terminal_of_80_columns(path: Path) -> None:
    command("repair", path, "--yes")
    for arguments in (("show", path), ("show", path, "bob"), ("verify", path), ("vacuum", path)):
        for line in command(*arguments).stdout.splitlines():
            assert len(line) <= 80
    for name in ("show", "export", "import", "verify", "reindex", "repair", "vacuum", "delete"):
        lines = command(name, "--help", env={"COLUMNS": "80"}).stdout.splitlines()
        assert max(map(len, lines)) <= 80


def test_output_that_cannot_be_written_is_told_and_a_file_is_whole_or_not_there(
    path: Path, tmp_path: Path
) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        result = subprocess.run(
            [*COMMAND, "export", path], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert result.stderr == (
        "turnkeeper: output: No space left on device; the rest was not written\n"
    )
    assert result.returncode == 2
    there = tmp_path / "there.jsonl"
    there.write_text("dear diary")
    assert "will be replaced; nothing was done" in told("export", path, "-o", there)
    assert "a database is named by its URL" in told("import", "dbname=chats", there)
    said = told("show", "mysql://ann:secret@db/chats")
    assert "a URL takes the form postgresql://" in said
    assert "secret" not in said
    said = told("export", path, "-yo", there, file_bytes_max=10_000)
    assert said == f"turnkeeper: {there}: File too large"
    assert there.read_text() == "dear diary"
    assert {file.name for file in tmp_path.iterdir()} == {"chats.db", "there.jsonl"}
    assert "is the journal itself" in told("export", path, "-yo", path)
    nowhere = tmp_path / "no" / "there"
    for arguments in (("export", path, "-o"), ("show", path, "alice", "--html")):
        said = told(*arguments, nowhere)
        assert f"{nowhere} cannot be written: there is no folder {nowhere.parent}" in said


def test_a_repair_on_a_full_disk_changes_nothing_and_leaves_nothing(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE event SET payload = '{}'")
    before = {file: file.read_bytes() for file in path.parent.iterdir()}

    said = told("repair", path, "-y", file_bytes_max=10_000)

    assert "cannot be repaired now: disk I/O error; nothing was changed; check the disk" in said
    after = {file: file.read_bytes() for file in path.parent.iterdir()}
    assert after.pop(Path(f"{path}-owner"))
    assert after == before


def test_errors_are_told_if_standard_input_or_output_is_closed(path: Path) -> None:
    """A service manager may start a process without them, and Python then has None for each."""
    said = told("delete", path, "alice", preexec=partial(os.close, 0))
    assert "nothing was done; pass --yes to do it" in said
    said = told("export", path, "-o", "/dev/full", preexec=partial(os.close, 1))
    assert "No space left on device" in said
    assert set(logs(path)) == {"alice", "bob"}


# --- beside a process that uses the file ----------------------------------------------------------


@pytest.fixture
def writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that writes to this file all the time."""
    with subprocess.Popen(
        [sys.executable, str(OWNER), str(path), "asyncio", "never", "1", "kill"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        # At least one of its records is in the file when a test begins.
        assert any(line.startswith("kept ") for line in process.stdout)
        yield process
        process.kill()
        process.stdout.read()


def test_beside_a_writer_reading_goes_on_and_writing_is_refused_in_a_line(
    path: Path, tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    exported = tmp_path / "all.jsonl"
    command("export", path, "-o", exported)
    command("show", path)
    report = json.loads(command("verify", path, "--json", check=1).stdout)
    # The writer's records are no events, and all else is as it was written.
    assert {one["found"] for one in report["problems"]} == {
        "the record is no note event (ValidationError)"
    }
    refused: tuple[tuple[str | Path, ...], ...] = (
        ("import", path, exported),
        ("vacuum", path),
        ("delete", path, "alice", "-y"),
        ("repair", path, "-y"),
    )
    for arguments in refused:
        said = told(*arguments)
        assert f"is owned by process {writer.pid} " in said
        assert said.endswith("if it hangs, kill it: all that it has acknowledged stays")
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert command("delete", path, "alice", "-y").stdout == "1 conversation deleted\n"
    # What the writer wrote is imported too, and named: no program could read it.
    imported = command("import", tmp_path / "other.db", exported, check=1)
    assert "the record is no note event" in imported.stderr


# --- damage ---------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 3 // 4)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = -1
    while (at := content.find(b"word 7", at + 1)) >= 0:  # in the log, and in the snapshot
        content[at] ^= 1
    path.write_bytes(content)


def drop_a_record(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM event WHERE seq = 100")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def make_newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def make_a_diary(path: Path) -> None:
    path.write_text("dear diary\n" * 500)


DAMAGES: dict[str, tuple[Callable[[Path], None], int, str, bool]] = {
    # What is done; the status and the words of an export; whether it can be mended.
    "truncated": (truncate, 2, "is damaged", True),
    "flipped bit": (flip_a_bit, 1, "conversation alice cannot be read at seq 30", True),
    "missing seq": (drop_a_record, 1, "conversation alice cannot be read at seq", True),
    "newer schema": (make_newer, 2, f"version {SCHEMA_VERSION + 1}", False),
    "no journal": (make_a_diary, 2, "it is not a turnkeeper journal; nothing was changed", False),
    "no file": (Path.unlink, 2, "no such file; nothing was created", False),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_in_a_line_and_mended_where_that_is_possible(
    path: Path, damage: str
) -> None:
    do, status, words, is_mendable = DAMAGES[damage]
    do(path)
    before = path.read_bytes() if path.exists() else None
    assert words in told("export", path, check=status)
    assert words in told("show", path, "alice", check=status) if status == 2 else True
    if status == 1:
        # As far as it can be read it is shown; the others are not touched by it.
        shown = command("show", path, "alice", check=1)
        assert "word 1" in shown.stdout
        assert words in shown.stderr
        assert len(command("export", path, "bob").stdout.splitlines()) == 6
        found = json.loads(command("verify", path, "--json", check=1).stdout)
        assert any(one["conversation"] == "alice" for one in found["problems"])
        # An older copy of the same file beside a newer log looks like damage.
        assert command("verify", path, check=1).stdout.splitlines()[-2:] == [
            "if it, or the -wal beside it, was replaced, put both back as they were;",
            f"else repair it with: turnkeeper repair {path}",
        ]
    assert (path.read_bytes() if path.exists() else None) == before

    if not is_mendable:
        assert words in told("repair", path, "--yes")
        assert (path.read_bytes() if path.exists() else None) == before
        if before is None:
            assert list(path.parent.iterdir()) == []
        return
    if before is not None:
        assert "nothing was done; pass --yes" in told("repair", path)
        assert path.read_bytes() == before
    mended = json.loads(command("repair", path, "--yes", "--json").stdout)
    assert mended["repaired"]
    assert Path(mended["backup"]).read_bytes() == before
    assert "everything is as it was written" in command("verify", path).stdout
    if damage != "truncated":
        assert [cut["conversation"] for cut in mended["cut"]] == ["alice"]
        assert len(logs(path)["bob"]) == 4
        assert len(logs(path)["alice"]) == mended["cut"][0]["ends_at"] > 20


def test_a_full_disk_is_told_and_what_was_there_stays(path: Path, tmp_path: Path) -> None:
    """A limit on the size of files is as near to one as a test comes without a disk of its own."""
    exported = tmp_path / "all.jsonl"
    command("export", path, "-o", exported)
    before = logs(path)
    big = tmp_path / "big.json"
    big.write_text(json.dumps([[{"role": "user", "content": "x" * 3_000_000}]]))
    size = path.stat().st_size + 1_000_000
    assert "failed: " in told("import", path, big, file_bytes_max=size)
    assert logs(path) == before
    command("verify", path)


def test_a_file_that_may_only_be_read_is_read_and_refused_for_writing(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = Path(shutil.copy(whole, folder))
    path.chmod(0o444)
    folder.chmod(0o555)
    try:
        assert "alice" in command("show", path, preexec=obey_permissions).stdout
        command("verify", path, preexec=obey_permissions)
        for arguments in (("vacuum", path), ("delete", path, "bob", "-y")):
            assert "ermission" in told(*arguments, preexec=obey_permissions)
    finally:
        folder.chmod(0o755)


def obey_permissions() -> None:
    """As everybody but root has to."""
    if os.geteuid() == 0:
        drop_from_bounding_set, dac_override = 24, 1
        assert ctypes.CDLL(None).prctl(drop_from_bounding_set, dac_override, 0, 0, 0) == 0


@pytest.mark.slow  # it waits for the lock as long as it should
def test_a_file_that_another_program_holds_locked_is_told(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert "another program is in the middle of writing it" in told("vacuum", path)
        assert "alice" in command("show", path).stdout


# --- arguments from outside -----------------------------------------------------------------------


@pytest.mark.parametrize("place", ["a folder", "a pipe", "a link to itself"])
def test_what_can_be_no_journal_is_told_by_every_command(
    place: str, path: Path, tmp_path: Path
) -> None:
    """None of them waits for a writer of a pipe, and none changes anything."""
    odd = tmp_path / "odd"
    match place:
        case "a folder":
            odd.mkdir()
        case "a pipe":
            os.mkfifo(odd)
        case _:
            odd.symlink_to(odd)
    exported = tmp_path / "all.jsonl"
    command("export", path, "-o", exported)
    before = sorted(tmp_path.iterdir())
    for arguments in (
        ("show", odd),
        ("export", odd),
        ("verify", odd),
        ("repair", odd, "-y"),
        ("vacuum", odd),
        ("delete", odd, "bob", "-y"),
        ("import", odd, exported),
    ):
        told(*arguments)
    assert sorted(tmp_path.iterdir()) == before
    assert "cannot be read" in command("import", path, odd, check=2).stderr
    assert set(logs(path)) == {"alice", "bob"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "conversation id has 0 characters; it takes 1 to 256; nothing was written"),
        ("x" * 100_000, "conversation id has 100000 characters; it takes 1 to 256"),
        ("\udcff", "there is no conversation \\udcff in "),
    ],
)
def test_a_name_that_no_conversation_has_is_told(path: Path, text: str, found: str) -> None:
    """An empty one was told as a gap between two words, and one too long was printed whole."""
    for arguments in (
        ("show", path, "--", text),
        ("show", path, "--rejected", "--", text),
        ("export", path, "--", text),
        ("delete", path, "-y", "--", text),
    ):
        assert found in told(*arguments)
    assert set(logs(path)) == {"alice", "bob"}


@pytest.mark.parametrize(("days", "status"), [("inf", 2), ("nan", 2), ("1e308", 0)])
def test_an_odd_age_deletes_nothing_that_is_younger(path: Path, days: str, status: int) -> None:
    command("delete", path, "--older-than", days, "-y", check=status)
    assert set(logs(path)) == {"alice", "bob"}


@pytest.mark.parametrize("line", ["[" * 100_000, "1" * 100_000, "\udcff\n{}"])
def test_a_file_that_is_deep_or_no_text_is_told(path: Path, tmp_path: Path, line: str) -> None:
    file = tmp_path / "odd.json"
    for text in (line, '{"turnkeeper_export":1}\n' + line):
        file.write_bytes(text.encode(errors="surrogateescape"))
        assert "odd.json" in command("import", path, file, check=2).stderr
    assert set(logs(path)) == {"alice", "bob"}


# --- a database -----------------------------------------------------------------------------------


def test_a_schema_is_refused_for_a_file(path: Path, tmp_path: Path) -> None:
    """It was ignored, as if the file had such a thing."""
    for name, *more in (
        ("show",),
        ("show", "alice"),
        ("export",),
        ("verify",),
        ("reindex",),
        ("delete", "alice"),
        ("import", tmp_path / "chats.jsonl"),
        ("inspect",),
    ):
        said = told(name, path, *more, "--schema", "other")
        assert "is a file, and only a database has schemas; leave out --schema" in said
    said = told("show", "'postgresql://ann:secret@db/chats'", "--schema", "other")
    assert "'postgresql://ann@db/chats' is a file" in said
    assert "leave out --schema" in told("serve", "m:agent", "--db", path, "--schema", "other")
    assert "alice" in command("show", path, "--schema", "turnkeeper").stdout


def test_a_database_of_sqlite_is_imported_only_with_the_name_of_its_program(
    path: Path, tmp_path: Path
) -> None:
    """Its bytes were called "not UTF-8 text"."""
    for source, why in (((), ""), (("--from", "openai"), ", and --from openai reads JSON")):
        said = command("import", tmp_path / "new.db", path, *source, check=2).stderr
        assert f"is a SQLite database{why}; name the program that wrote it with --from" in said
        assert "`turnkeeper export`" in said
    assert not (tmp_path / "new.db").exists()


@pytest.mark.parametrize("is_there", [True, False])
def test_arguments_of_an_import_in_the_wrong_order_are_told(
    path: Path, tmp_path: Path, is_there: bool
) -> None:
    """The journal was called a file that another program wrote, or one that is not there."""
    exported = tmp_path / "all.jsonl"
    command("export", path, "-o", exported)
    said = told("import", exported, path if is_there else tmp_path / "new.db")
    assert f"{exported} is no journal: the first argument is the journal to import into" in said
    assert not (tmp_path / "new.db").exists()


def test_a_database_is_read_written_verified_and_deleted_from(path: Path, tmp_path: Path) -> None:
    exported = tmp_path / "all.jsonl"
    command("export", path, "-o", exported)
    with postgres.schema() as schema:
        url = postgres.conninfo()
        there = (url, "--schema", schema)
        assert "no journal in schema" in told("show", *there)
        assert "2 conversations imported" in command("import", url, exported, *there[1:]).stdout
        assert "alice" in command("show", *there).stdout
        assert "word 7" in command("show", url, "alice", *there[1:]).stdout
        assert command("export", *there).stdout == exported.read_text()
        assert "everything is as it was written" in command("verify", *there).stdout
        assert command("delete", url, "bob", "-y", *there[1:]).stdout == "1 conversation deleted\n"
        assert "no conversation bob" in told("show", url, "bob", *there[1:])
        for name in ("vacuum", "repair"):
            assert "is for files" in told(name, url)
    assert "lower-case name" in told("show", url, "--schema", "Not A Name")
    assert "cannot be reached" in told("show", "postgresql://127.0.0.1:1/none?connect_timeout=2")


@pytest.mark.parametrize("options", [(), ("--to", "openai")])
def test_a_folder_is_no_file_to_export_to(
    options: Sequence[str], path: Path, tmp_path: Path
) -> None:
    """Chats for `/`, which has no name that a draft could have, were a traceback."""
    for folder in ("/", tmp_path):
        assert "is a folder; name a file" in told("export", path, *options, "-o", folder)
