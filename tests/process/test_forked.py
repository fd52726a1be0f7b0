"""Processes that are forked while, or before, a journal is open.

A fork copies memory, and neither threads nor the locks on files. A child that uses what its parent
has open gets an error that says so; it neither hangs nor harms its parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .. import postgres

pytestmark = [
    pytest.mark.costly,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
]

# `in_child` prints the result of a call in a forked child, or its error; a child that hangs is
# killed by its alarm.
PREAMBLE = """
import os, signal, sys
import anyio

def in_child(name, call):
    process = os.fork()
    if process == 0:
        signal.alarm(30)
        try:
            print(name, call(), flush=True)
        except BaseException as error:
            print(name, type(error).__name__, error, flush=True)
        os._exit(0)
    return process

def ended(process):
    _, status = os.waitpid(process, 0)
    if status:
        print("child ended with status", status, flush=True)
"""


def run(program: str, *arguments: str) -> list[str]:
    """Run a program; return the lines that it, and its children, have printed."""
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TURNKEEPER_TEST_POSTGRES": ""},
    )
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


WORKERS = """
from turnkeeper.actors import PostgresJournal

journal = PostgresJournal(sys.argv[1], schema=sys.argv[2])  # before the fork, as a preloaded module

async def work(told, until):
    async with journal:
        try:
            print(os.getpid(), "claimed", (await journal.claim("c")).epoch, flush=True)
        except Exception as error:
            print(os.getpid(), type(error).__name__, error, flush=True)
        os.write(told, b"x")
        await anyio.to_thread.run_sync(os.read, until, 1)

ready, tell = os.pipe()
wait, end = os.pipe()
workers = []
for _ in range(2):
    workers.append(in_child("worker", lambda: anyio.run(work, tell, wait)))
    os.read(ready, 1)
os.write(end, b"xx")
for worker in workers:
    ended(worker)
"""


def test_workers_that_are_forked_after_their_journal_was_made_are_different_nodes() -> None:
    """As servers do that load the application before they fork: gunicorn's `preload_app`."""
    with postgres.schema() as schema:
        lines = run(WORKERS, postgres.conninfo(), schema)

    first, second = lines[:2]
    owner, *claimed = first.split()
    assert claimed == ["claimed", "1"]
    assert "OwnedElsewhere" in second
    assert f"process {owner} on" in second, "the error names the process that has entered it"


FILE_WORKERS = """
from turnkeeper.actors import SQLiteJournal

journal = SQLiteJournal(sys.argv[1], owner_wait_s=0)

async def enter(told, until):
    async with journal:
        print(os.getpid(), "entered", flush=True)
        os.write(told, b"x")
        await anyio.to_thread.run_sync(os.read, until, 1)

ready, tell = os.pipe()
wait, end = os.pipe()
owner = in_child("owner", lambda: anyio.run(enter, tell, wait))
os.read(ready, 1)
ended(in_child("rival", lambda: anyio.run(enter, tell, wait)))
os.write(end, b"x")
ended(owner)
"""


def test_the_error_of_a_second_worker_names_the_process_that_has_entered_the_file(
    tmp_path: Path,
) -> None:
    entered, rival, *_ = run(FILE_WORKERS, str(tmp_path / "chats.db"))

    owner, _ = entered.split()
    assert rival.startswith("rival OwnedElsewhere")
    assert f"process {owner} on" in rival
