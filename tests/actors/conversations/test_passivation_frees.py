"""What an active conversation held goes with its passivation, without the garbage collector.

A runtime with `freeze_objects` never collects a circle of objects that it has frozen, so an owner
that leaves one behind would grow the process with each passivation.
"""

from __future__ import annotations

import gc
from collections import Counter

import anyio
import pytest

from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    ModelRequest,
    ModelResponse,
    ScriptedModel,
    ToolAgent,
    ToolCall,
)
from turnkeeper.actors.events import UserMessageEvent

pytestmark = pytest.mark.anyio

CHURNED = 25


async def look(at: str) -> str:
    """Look at an order."""
    return f"seen {at}"


def looks_once(request: ModelRequest) -> ModelResponse:
    if isinstance(request.view[-1], UserMessageEvent):
        return ModelResponse(calls=[ToolCall("look", {"at": "order 7"})])
    return ModelResponse("it is on its way")


def held() -> Counter[str]:
    """Count the objects of the runtime, of the owners and of what they fold."""
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        package = str(type(each).__module__)  # odd classes have another thing there
        if package.startswith(("turnkeeper.runtime", "turnkeeper.actors.core")) or (
            package.startswith("turnkeeper.actors.owner") or type(each).__name__ == "Context"
        ):
            found[type(each).__name__] += 1
    del found["Alarm"]  # those that were cancelled stay on the heap until they are half of it
    return found


@pytest.mark.parametrize("does", ["append", "a turn with a tool", "an interrupted turn"])
async def test_a_passivated_conversation_leaves_no_circle_behind(does: str) -> None:
    model = ScriptedModel(looks_once)
    agent = ToolAgent(model, [look])
    async with Conversations(agent, journal=MemoryJournal()) as conversations:

        async def churn(name: str) -> None:
            conversation = conversations[name]
            if does == "append":
                await conversation.append(UserMessageEvent(content="hello"))
            else:
                turn = await conversation.send("where is it?")
                if does == "an interrupted turn":
                    await turn.cancel()
                await turn.end()
            assert conversations._region is not None
            while not await conversations._region.passivate(name):
                await anyio.lowlevel.checkpoint()

        for number in range(5):
            await churn(f"warm{number}")
        gc.collect()
        gc.disable()
        try:
            before = held()
            for number in range(CHURNED):
                await churn(f"c{number}")
            model.requests.clear()  # with the views in them
            grown = held() - before
        finally:
            gc.enable()

    assert all(count < CHURNED / 2 for count in grown.values()), grown
