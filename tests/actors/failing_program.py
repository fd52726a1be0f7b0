"""A program in which everything of the application fails once, with `WORD` in all that is said.

Run by `test_log_lines.py` as a process of its own, because it configures no logging.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio

from turnkeeper.actors import (
    Agent,
    ConfirmationPolicy,
    Conversations,
    MemoryJournal,
    ModelRequest,
    ModelResponse,
    ScriptedModel,
    ToolAgent,
    ToolCall,
    ToolContext,
    ToolResult,
    Tools,
    TurnContext,
    agent,
)
from turnkeeper.actors.models.base import ModelUnavailable
from turnkeeper.runtime import Backoff

WORD = "swordfish"


@agent
async def failing(turn: TurnContext) -> None:
    await turn.say(f"I say {WORD}")
    said = turn.message.content  # in a traceback that shows local variables
    raise ValueError(f"of the agent, {len(said)}")


def bad(query: str) -> str:
    """Fail."""
    found = f"found {query}"
    raise RuntimeError(f"of the tool, {len(found)}")


def good(query: str) -> str:
    """Answer."""
    return f"found {query}"


def mixed_up(query: str) -> ToolResult:
    """Give the result in the place of `is_error`."""
    found: Any = f"found {query}"
    return ToolResult("done", found)


def hook(context: ToolContext, *_: object) -> None:
    arguments = context.arguments
    raise LookupError(f"of the hook, {len(arguments)}")


def confirm(call: ToolCall) -> bool:
    arguments = call.arguments
    raise LookupError(f"of the confirmation, {len(arguments)}")


class BusyModel:
    """Is unavailable once, and then calls a tool and answers."""

    def __init__(self, tool: str) -> None:
        call = ToolCall(tool, {"query": f"about {WORD}"})
        self.is_busy = True
        self.scripted = ScriptedModel([ModelResponse(calls=[call]), f"done: {WORD}"])

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        if self.is_busy:
            self.is_busy = False
            raise ModelUnavailable("busy", "of the model")
        return await self.scripted.respond(request, write)


def asking(
    tool: str,
    tools: Tools | Sequence[Callable[..., object]],
    confirm: ConfirmationPolicy = "never",
) -> Agent:
    at_once = Backoff(first_s=0.001, jitter=0.0)
    return ToolAgent(BusyModel(tool), tools, backoff=at_once, confirm=confirm)


async def ask(one: Agent, *, is_to_be_held: bool = False) -> None:
    async with Conversations(
        one, journal=MemoryJournal(), system_prompt=f"You keep {WORD}"
    ) as conversations:
        chat = conversations["c"]
        turn = await chat.send(f"the word is {WORD}")
        if not is_to_be_held:
            await turn.end()
            return
        async for logged in chat.events():
            if logged.event.kind == "confirmation_requested":
                return


async def main() -> None:
    await ask(failing)
    await ask(asking("bad", [bad]))
    await ask(asking("mixed_up", [mixed_up]))
    await ask(asking("good", Tools(good, before_call=hook)))
    await ask(asking("good", Tools(good, after_call=hook)))
    await ask(asking("good", [good], confirm=confirm), is_to_be_held=True)


if __name__ == "__main__":
    anyio.run(main)
