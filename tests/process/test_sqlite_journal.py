"""Owners of a journal file that are killed, stopped, taken over and woken up again."""

# ruff: noqa: ASYNC220 - the loop of a test has nothing else to do

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from turnkeeper.actors import SQLiteJournal
from turnkeeper.actors.errors import JournalRefused, OwnedElsewhere
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.sqlite.verify import verify

pytestmark = pytest.mark.costly

OWNER = Path(__file__).parent / "journal_owner.py"
BOUNDARIES = ("begin", "written", "commit", "committed")


@contextmanager
def owner(
    path: Path, where: str, nth: int, how: str, backend: str = "asyncio"
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(OWNER), str(path), backend, where, str(nth), how],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run_until_killed(path: Path, where: str, nth: int, backend: str) -> dict[str, list[str]]:
    """The ids that were acknowledged, by conversation."""
    kept: dict[str, list[str]] = {}
    with owner(path, where, nth, "kill", backend) as process:
        assert process.stdout is not None
        for line in process.stdout:
            word, name, *rest = line.split()
            if word == "kept":
                kept.setdefault(name, []).append(rest[1])
    assert process.returncode == -signal.SIGKILL
    return kept


async def logs(path: Path) -> dict[str, list[str]]:
    async with SQLiteJournal(path, read_only=True) as journal:
        return {
            info.conversation_id: await read_all(journal, info.conversation_id)
            for info in await journal.list()
        }


@pytest.mark.parametrize("where", BOUNDARIES)
def test_what_was_acknowledged_survives_a_kill_at_each_boundary_of_a_commit(
    tmp_path: Path, where: str
) -> None:
    """Killed again and again on one file, and opened again without waiting."""
    path = tmp_path / "chats.db"
    acknowledged: dict[str, list[str]] = {}
    for nth, backend in ((5, "asyncio"), (12, "trio"), (4, "asyncio")):
        for name, ids in run_until_killed(path, where, nth, backend).items():
            acknowledged.setdefault(name, []).extend(ids)

        found = anyio.run(logs, path)
        assert verify(path).problems == ()
        for name, ids in acknowledged.items():
            assert [event_id for event_id in found[name] if event_id in ids] == ids
            # What was written and not acknowledged is whole, once, and at most one per kill.
            assert len(found[name]) == len(set(found[name])) <= len(ids) + 3
    assert sum(map(len, acknowledged.values())) > 0


async def wait_until_stopped(process: subprocess.Popen[str]) -> None:
    """Linux and macOS tell a parent, without a sleep."""
    _, status = await anyio.to_thread.run_sync(os.waitpid, process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


async def test_a_stopped_owner_is_taken_over_and_writes_nothing_when_it_wakes(
    tmp_path: Path,
) -> None:
    path = tmp_path / "chats.db"
    with owner(path, "begin", 6, "stop") as process:
        await wait_until_stopped(process)

        with pytest.raises(OwnedElsewhere, match=f"process {process.pid} "):
            async with SQLiteJournal(path, owner_wait_s=0.1):
                raise AssertionError("entered")

        async with SQLiteJournal(path, takeover=True) as journal:
            before = await logs(path)
            claims = {name: await journal.claim(name) for name in ("a", "b")}
            process.send_signal(signal.SIGCONT)
            assert process.stdout is not None
            lines = (await anyio.to_thread.run_sync(process.stdout.read)).splitlines()
            for name, claim in claims.items():
                await journal.append(
                    name,
                    [make_record("new")],
                    epoch=claim.epoch,
                    expected_seq=claim.head + 1,
                    is_unfinished=False,
                )

        # It ended by itself, each of its conversations told; also the one nobody has claimed.
        assert sorted(line for line in lines if line.startswith("lost")) == [
            "lost a",
            "lost b",
            "lost c",
        ]
        after = await logs(path)
        assert after == {
            name: [*ids, "new"] if name in claims else ids for name, ids in before.items()
        }


async def test_an_owner_stopped_inside_a_transaction_is_told_of_and_nothing_hangs(
    tmp_path: Path,
) -> None:
    """It holds SQLite's own lock, which nothing but its end gives back."""
    path = tmp_path / "chats.db"
    with owner(path, "written", 6, "stop") as process:
        await wait_until_stopped(process)

        with pytest.raises(JournalRefused, match="in the middle of writing"):
            async with SQLiteJournal(path, takeover=True, busy_wait_s=0.1):
                raise AssertionError("entered")
        found = await logs(path)  # reading needs no lock

        process.kill()
        process.wait()
        async with SQLiteJournal(path, owner_wait_s=0):
            assert await logs(path) == found


async def test_a_child_that_outlives_its_parent_does_not_keep_the_file(tmp_path: Path) -> None:
    """A forked child shares its parent's locks, unless it lets go of them."""
    path = tmp_path / "chats.db"
    program = f"""
import os, anyio
from turnkeeper.actors import SQLiteJournal

async def main():
    async with SQLiteJournal({str(path)!r}):
        if os.fork() == 0:
            os.read(0, 1)
            os._exit(0)
        print("forked", flush=True)
        os.kill(os.getpid(), 9)

anyio.run(main)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "forked\n"
        await anyio.to_thread.run_sync(process.wait)

        # The child lets go as it begins to run, which may be after its parent's end.
        async with SQLiteJournal(path, owner_wait_s=10) as journal:
            await journal.claim("c")
