"""A gateway that is killed and started again on command. Usage: ag_ui_server.py FOLDER.

Prints its port. Each line of standard input kills the process that serves, and starts another, as a
fork of this one: it has everything imported, and nothing opened. One that ends by itself says so.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

import anyio
import uvicorn

from turnkeeper.actors import (
    Conversations,
    ModelResponse,
    ScriptedModel,
    SQLiteJournal,
    ToolAgent,
    ToolCall,
    gateway,
    tool,
)
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.models.base import ModelRequest

WORDS = ("well", "seen", "naïve", "日本", "🙂", "\n", "a-rather-long-word", "“so”")


@tool(idempotent=True)
async def look(at: int) -> str:
    """Look at something."""
    return f"seen {at}"


def scripted(request: ModelRequest) -> ModelResponse:
    """Return the next response of a turn: the same in every process, by the view alone."""
    last = max(n for n, at in enumerate(request.view) if isinstance(at, UserMessageEvent))
    event = request.view[last]
    assert isinstance(event, UserMessageEvent), event
    script = random.Random(event.content)
    steps = script.randrange(4)
    done = len({at.llm_response_id for at in request.view[last:] if at.kind == "action"})  # type: ignore[attr-defined]  # all of that kind have one
    for _ in range(done):
        script.random()
    step = random.Random(f"{event.content} {done}")
    text = " ".join(step.choices(WORDS, k=step.randrange(2, 25)))
    if done == steps:
        return ModelResponse(text)
    calls = [ToolCall("look", {"at": step.randrange(100)}) for _ in range(step.randrange(1, 4))]
    return ModelResponse(text if step.randrange(3) else "", calls=calls)


class SlowModel(ScriptedModel):
    """Takes its time between two words, so that there is a middle to be killed in."""

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        async def slowly(piece: str) -> None:
            await anyio.sleep(0.003)
            await write(piece)

        return await super().respond(request, slowly)


async def serve(folder: Path, listener: socket.socket) -> None:
    agent = ToolAgent(SlowModel(scripted), [look])
    journal = SQLiteJournal(folder / "chats.db")
    async with Conversations(agent, journal=journal, unfinished="resume") as conversations:
        config = uvicorn.Config(gateway.app(conversations), lifespan="off", log_config=None)
        await uvicorn.Server(config).serve([listener])


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(folder: Path) -> NoReturn:
    listener = socket.create_server(("127.0.0.1", 0))
    say(str(listener.getsockname()[1]))
    while True:
        process = os.fork()
        if not process:
            try:
                anyio.run(serve, folder, listener)
            finally:
                say("ended")
            sys.exit(1)
        order = sys.stdin.readline()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        if not order:
            sys.exit()
        say("killed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
