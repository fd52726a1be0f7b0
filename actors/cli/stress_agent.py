"""The agent that `turnkeeper stress --nodes` serves: it names all messages that its model saw.

So the checker sees from outside if one is missing, as with examples/torture_me.py. The agent is
resumable: if its process dies, its turn goes on in another process.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import anyio

from ..agents.tool_agent import ToolAgent
from ..events import UserMessageEvent
from ..models.base import ModelRequest, ModelResponse
from ..tool_calls import ToolCall

__all__ = ["echo"]

MARKER = re.compile(r"\[m:[\d-]+\]")
PACE_S = 0.004


async def look() -> str:
    """Look something up."""
    await anyio.sleep(PACE_S)
    return "seen"


class Echo:
    """A model that answers from its view only, word by word."""

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        """Return the markers of all messages in the view."""
        newest = request.view[-1]
        calls = []
        if isinstance(newest, UserMessageEvent) and "look" in newest.content:
            text, calls = "Let me see.", [ToolCall("look")]
        else:
            said = [event.content for event in request.view if isinstance(event, UserMessageEvent)]
            text = " ".join(["I saw", *MARKER.findall(" ".join(said))])
        for word in re.findall(r"\s*\S+", text):
            await anyio.sleep(PACE_S)
            await write(word)
        return ModelResponse(text, calls=calls)


echo = ToolAgent(Echo(), [look])
