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
        timeout=600,
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


SAME_FILE = """
from turnkeeper.actors import SQLiteJournal

async def enter(read_only):
    async with SQLiteJournal(sys.argv[1], read_only=read_only, takeover=not read_only):
        return "entered"

def enter_in_child(name, read_only=False, after=None):
    def enter_it():
        after is None or os.read(after, 1)
        return anyio.run(enter, read_only)

    return in_child(name, enter_it)

def fork_all(wait):
    ended(enter_in_child("writer"))
    ended(enter_in_child("reader", read_only=True))
    return enter_in_child("late", after=wait)

async def main():
    wait, left = os.pipe()
    async with SQLiteJournal(sys.argv[1]):
        late = await anyio.to_thread.run_sync(fork_all, wait)
    os.write(left, b"x")
    ended(late)

anyio.run(main)
ended(enter_in_child("after"))
"""


def test_a_file_that_was_open_at_the_fork_is_refused_in_the_child(tmp_path: Path) -> None:
    """SQLite there believes to have its parent's locks, and would take none.

    Once the parent has closed the file, a program that reads it would delete the write-ahead log to
    which the child writes.
    """
    lines = dict(line.split(" ", 1) for line in run(SAME_FILE, str(tmp_path / "chats.db")))

    for name in ("writer", "reader", "late"):
        assert lines[name].startswith("JournalRefused"), lines
        assert "was open when this process was forked" in lines[name]
    assert lines["after"] == "entered", "it was closed before this fork"


CLOSING = """
import sqlite3
from pathlib import Path
from turnkeeper.actors.journals.sqlite.schema import make_file, open_for_reading

path = Path(sys.argv[1])

def open_it():
    open_for_reading(path, busy_wait_s=0, is_immutable=False).close()
    return "opened"

async def close_elsewhere(connection):
    try:
        await anyio.to_thread.run_sync(connection.close)
    except sqlite3.ProgrammingError:
        print("still open", flush=True)

make_file(path)
connection = open_for_reading(path, busy_wait_s=0, is_immutable=False)
anyio.run(close_elsewhere, connection)
ended(in_child("child", open_it))
connection.close()
ended(in_child("later", open_it))
"""


def test_a_file_counts_as_open_until_its_connection_is_closed(tmp_path: Path) -> None:
    """Closing takes a while, in which another thread may fork; here it fails."""
    told, child, later = run(CLOSING, str(tmp_path / "chats.db"))

    assert told == "still open"
    assert child.startswith("child JournalRefused"), child
    assert later == "later opened"


STATES = """
from turnkeeper.actors import ConversationState
from turnkeeper.actors.events import UserMessageEvent

def make(name, folder=sys.argv[1]):
    return ConversationState(persistence_dir=folder, conversation_id=name)

def append(state, text):
    return state.append_event(UserMessageEvent(content=text)).seq

def close_and_make_another():
    state.close()
    with make("c", sys.argv[2]) as other:
        return append(other, "in another file")

state = make("c")
append(state, "before")
ended(in_child("append", lambda: append(state, "in the child")))
ended(in_child("read", lambda: list(state.events)))
ended(in_child("same", lambda: append(make("d"), "in the same file")))
ended(in_child("other", close_and_make_another))
print("parent", append(state, "after"))
state.close()
ended(in_child("closed", lambda: append(make("c"), "in the child")))
"""


def test_a_state_of_the_parent_process_is_refused_in_the_child_and_does_not_hang(
    tmp_path: Path,
) -> None:
    folders = (str(tmp_path / "states"), str(tmp_path / "other"))
    lines = dict(line.split(" ", 1) for line in run(STATES, *folders))

    for name in ("append", "read"):
        assert lines[name].startswith("JournalRefused"), lines
        assert "open the state after the fork" in lines[name]
    assert "was open when this process was forked" in lines["same"]
    assert (lines["other"], lines["parent"], lines["closed"]) == ("1", "2", "3")


PORTAL = """
from dataclasses import dataclass
from turnkeeper.runtime import Actor, Message, Runtime

@dataclass(frozen=True)
class Count(Message[int]):
    pass

class Counter(Actor[Count]):
    seen = 0

    async def receive(self, message):
        self.seen += 1
        return self.seen

async def main():
    async with Runtime() as runtime:
        counter = runtime.spawn(Counter, name="counter")
        portal = runtime.portal()

        def ask():
            ended(in_child("child", lambda: portal.ask(counter, Count())))
            print("parent", portal.ask(counter, Count()), flush=True)

        await anyio.to_thread.run_sync(ask)

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_call_through_the_portal_is_refused_in_the_child_and_does_not_hang(backend: str) -> None:
    child, parent = run(PORTAL, backend)

    assert child.startswith("child Unavailable"), child
    assert "from which this one was forked" in child
    assert parent == "parent 1"
