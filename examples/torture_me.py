r"""An agent that says what its model saw, to be tortured over the wire.

What it teaches: the one thing that `turnkeeper torture` needs of an agent. Each message that it
sends ends with a marker, as `[m:1-2-3]`; the answer names the markers of all messages that the
model saw, in their order. So the client sees from outside if one is missing.

    turnkeeper torture http://127.0.0.1:8765 --kills 5 \
        --server 'turnkeeper serve examples/torture_me.py:echo --port 8765 --db torture.db'

    python examples/torture_me.py      asks it once, without a server
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import anyio

from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    ModelRequest,
    ModelResponse,
    ToolAgent,
    ToolCall,
)
from turnkeeper.actors.events import UserMessageEvent

MARKER = re.compile(r"\[m:[\d-]+\]")
PACE_S = 0.004


async def look() -> str:
    """Look something up."""
    await anyio.sleep(PACE_S)
    return "seen"


class Echo:
    """A model that answers by its view alone, word by word."""

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        newest = request.view[-1]
        calls = []
        if isinstance(newest, UserMessageEvent) and "look" in newest.content:
            text, calls = "Let me see.", [ToolCall("look")]
        else:
            said = [event.content for event in request.view if isinstance(event, UserMessageEvent)]
            text = " ".join(["I saw 👀", *MARKER.findall(" ".join(said))])
        for word in re.findall(r"\s*\S+", text):
            await anyio.sleep(PACE_S)
            await write(word)
        return ModelResponse(text, calls=calls)


echo = ToolAgent(Echo(), [look])


async def main() -> None:
    async with Conversations(echo, journal=MemoryJournal()) as conversations:
        for number in (1, 2):
            turn = await conversations["alice"].send(f"please look [m:1-1-{number}]")
            print(await turn.reply())


if __name__ == "__main__":
    anyio.run(main)
