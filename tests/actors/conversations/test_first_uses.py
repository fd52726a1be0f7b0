"""The first uses of things by a process that serves already: the loop must not stop for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import threading

import anyio

from turnkeeper.actors import Conversations, SQLiteJournal, TurnContext, agent
from turnkeeper.actors.core.snapshots import STORED_FOLDS
from turnkeeper.actors.events import EVENT_CLASSES


class Finder:
    # The journal's threads may import: the loop goes on meanwhile.
    def find_spec(self, name: str, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            print(name)


@agent
async def answers(turn: TurnContext) -> None:
    if turn.message.content == "fail":
        raise ValueError("on purpose")
    write = turn.writer()
    await write("an answer")


async def main(path: str) -> None:
    async with Conversations(answers, journal=SQLiteJournal(path)) as conversations:
        for model in EVENT_CLASSES.values():
            if not model.__pydantic_complete__:
                print(f"{model.__name__} is not built")
        if not STORED_FOLDS.pydantic_complete:
            print("the reader of snapshots is not built")
        sys.meta_path.insert(0, Finder())
        first = conversations["first"]
        await (await first.send("hello")).reply()
        await (await first.send("fail")).end()
        await first.change(title="a title")
        await first.fork("second")
        assert (await conversations.list()).rows
        assert [event async for event in first.events(live=False)]
        await first.view()
        assert str(conversations.runtime.tree())
        await conversations.delete("second")
        sys.meta_path.pop(0)


anyio.run(main, sys.argv[1], backend=sys.argv[2])
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_open_conversations_import_nothing_and_build_no_model(tmp_path: Path, backend: str) -> None:
    """structlog, and rich with it, stopped the loop for 70 ms at the log line of a first failure.

    The models of a first snapshot stopped it for 9 ms.
    """
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "chats.db"), backend]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)

    assert "ValueError: on purpose" in ran.stderr
    assert ran.stdout == ""
