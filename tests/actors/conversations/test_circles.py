"""Ordinary endings leave nothing behind that only the garbage collector frees.

A full collection stops the event loop. And a reader ends by being dropped: if an error's traceback
keeps it, its owner offers it every event until the collector comes.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from turnkeeper.actors import (
    Conversations,
    ModelRequest,
    ModelResponse,
    ScriptedModel,
    SQLiteJournal,
    ToolAgent,
    ToolCall,
    TurnContext,
    agent,
    tool,
)
from turnkeeper.actors.errors import ConversationNotFound
from turnkeeper.actors.events import ActionEvent, LoggedEvent, UserMessageEvent

TIMES = 20


@tool(timeout_s=1e-6)
async def late() -> str:
    """Do not answer in time."""
    await anyio.sleep_forever()
    return "never"


@tool(timeout_s=60)
async def failing() -> str:
    """Fail."""
    raise ValueError("not today")


@tool
def failing_in_a_thread() -> str:
    """Fail in a thread."""
    raise ValueError("not today")


@tool
async def hanging() -> str:
    """Hang until cancelled."""
    await anyio.sleep_forever()
    return "never"


def call_what_is_named(request: ModelRequest) -> ModelResponse:
    newest = request.view[-1]
    if isinstance(newest, UserMessageEvent):
        return ModelResponse(calls=[ToolCall(newest.content, {})])
    return ModelResponse("done")


@agent
async def hung(_: TurnContext) -> None:
    await anyio.sleep_forever()


async def circles_of(act: Callable[[], Awaitable[object]]) -> float:
    """Return how many objects each `act` leaves to the garbage collector."""
    await act()  # imports, and what is made at first use
    await anyio.wait_all_tasks_blocked()
    gc.collect()
    gc.disable()
    try:
        for _ in range(TIMES):
            await act()
        await anyio.wait_all_tasks_blocked()
        return gc.collect() / TIMES
    finally:
        gc.enable()


@pytest.mark.anyio
async def test_a_wait_for_a_turn_that_is_given_up_drops_its_reader_at_once(tmp_path: Path) -> None:
    journal = SQLiteJournal(tmp_path / "chats.db")
    async with Conversations(hung, journal=journal) as conversations:
        turn = await conversations["c"].send("hello")

        async def give_up() -> None:
            with anyio.move_on_after(0):
                await turn.end()

        assert await circles_of(give_up) < 1
        gc.disable()
        try:
            for _ in range(TIMES):
                await give_up()
            left = conversations["other"].events()  # dropped ones are forgotten as another begins
            assert conversations.readers <= 2  # this one, and perhaps that of the last wait
            del left
        finally:
            gc.enable()


@pytest.mark.anyio
async def test_a_look_at_a_missing_conversation_leaves_no_circle(tmp_path: Path) -> None:
    journal = SQLiteJournal(tmp_path / "chats.db")
    async with Conversations(hung, journal=journal) as conversations:

        async def look() -> None:
            with suppress(ConversationNotFound):
                await conversations["missing"].view()

        assert await circles_of(look) < 1


@pytest.mark.anyio
async def test_a_fork_leaves_no_circle(tmp_path: Path) -> None:
    journal = SQLiteJournal(tmp_path / "chats.db")
    async with Conversations(hung, journal=journal) as conversations:
        await conversations["c"].append(UserMessageEvent(content="hello"))
        names = map(str, range(1 + TIMES))

        assert await circles_of(lambda: conversations["c"].fork(next(names))) < 1


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["late", "failing", "failing_in_a_thread"])
async def test_a_tool_that_fails_leaves_no_circle(
    tmp_path: Path, anyio_backend_name: str, name: str
) -> None:
    journal = SQLiteJournal(tmp_path / "chats.db")
    caller = ToolAgent(ScriptedModel(call_what_is_named), [late, failing, failing_in_a_thread])
    async with Conversations(caller, journal=journal) as conversations:

        async def call() -> None:
            turn = await conversations["c"].send(name)
            assert await turn.reply() == "done"

        # A group of anyio's, on asyncio, leaves the error of each task that it cancels: 47 objects.
        is_from_anyio = anyio_backend_name == "asyncio" and name == "failing"
        assert await circles_of(call) < (50 if is_from_anyio else 1)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])  # on asyncio, anyio leaves some, as above
async def test_a_turn_that_is_cancelled_in_a_tool_leaves_no_circle(tmp_path: Path) -> None:
    journal = SQLiteJournal(tmp_path / "chats.db")
    caller = ToolAgent(ScriptedModel(call_what_is_named), [hanging])
    async with Conversations(caller, journal=journal) as conversations:

        async def cancel() -> None:
            turn = await conversations["c"].send("hanging")
            async for item in turn:
                if isinstance(item, LoggedEvent) and isinstance(item.event, ActionEvent):
                    break
            await anyio.wait_all_tasks_blocked()
            await turn.cancel()

        assert await circles_of(cancel) < 1
