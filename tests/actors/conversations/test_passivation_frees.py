"""What an active conversation held goes with its passivation, without the garbage collector.

A runtime with `freeze_objects` never collects a circle of objects that it has frozen, so an owner
that leaves one behind would grow the process with each passivation.
"""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import anyio
import pytest

from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    ModelRequest,
    ModelResponse,
    RollingCondenser,
    ScriptedModel,
    SQLiteJournal,
    ToolAgent,
    ToolCall,
)
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.runtime import Runtime

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


@pytest.mark.parametrize(
    "does",
    ["append", "a turn with a tool", "an interrupted turn", "a condensed turn", "a failed turn"],
)
async def test_a_passivated_conversation_leaves_no_circle_behind(does: str) -> None:
    model = ScriptedModel([] if does == "a failed turn" else looks_once)
    agent = ToolAgent(model, [look])
    # Of the four events of a turn it forgets some, if there were some before.
    condenser = RollingCondenser(max_size=4, keep_first=0) if does == "a condensed turn" else None
    journal = MemoryJournal()
    async with Conversations(agent, journal=journal, condenser=condenser) as conversations:

        async def churn(name: str) -> None:
            conversation = conversations[name]
            if does in {"append", "a condensed turn"}:
                await conversation.append(UserMessageEvent(content="hello"))
            if does != "append":
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


@pytest.mark.slow
async def test_thousands_of_passivations_under_freeze_objects_grow_the_process_by_nothing(
    tmp_path: Path,
) -> None:
    """More of them: `python benchmarks/_pauses_process.py 1000 1 frozen 100000 inf`."""
    kept, churned = 100, 5_000
    journal = SQLiteJournal(tmp_path / "churned.db", active_conversations_max=kept)
    async with (
        Runtime(freeze_objects=True) as runtime,
        Conversations(
            ToolAgent(ScriptedModel([]), []), journal=journal, runtime=runtime
        ) as conversations,
    ):
        region = conversations._region
        assert region is not None

        async def churn(first: int, last: int) -> int:
            for number in range(first, last):
                name = f"c{number}"
                await conversations[name].append(UserMessageEvent(content="hello"))
                while not await region.passivate(name):
                    await anyio.lowlevel.checkpoint()
            gc.collect()
            return len(gc.get_objects()) + gc.get_freeze_count()

        before = await churn(0, 5 * kept)  # the journal's table of ends is full by then
        grown = await churn(5 * kept, 5 * kept + churned) - before

    # Cancelled alarms come and go by hundreds; one object that stays of each would be 5,000.
    assert grown < churned / 10, grown
