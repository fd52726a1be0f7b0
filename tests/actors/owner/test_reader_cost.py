"""The cost of one more reader, in Python opcodes and calls: counts repeat, times do not.

An event is encoded, committed and looked up once, however many read it. What is left for each
reader is its wake-up and a few steps, and the same holds for a piece of an answer.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from tests.actors.owner.test_append_cost import ALLOWED, Cost, Counter
from turnkeeper.actors import Conversation, Conversations, MemoryJournal, TurnContext, agent
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.runtime.testing import settle

READERS, ITEMS = 40, 5

RECORDED: dict[tuple[str, str, str], Cost] = {
    ("3.11", "asyncio", "event"): Cost(273, 13.5),
    ("3.11", "asyncio", "piece"): Cost(314, 14.5),
    ("3.11", "trio", "event"): Cost(465, 20.0),
    ("3.11", "trio", "piece"): Cost(506, 21.0),
}


@pytest.mark.anyio
@pytest.mark.parametrize("item", ["event", "piece"])
async def test_one_more_reader_takes_no_more_opcodes_and_calls_than_were_recorded(
    anyio_backend: tuple[str, dict[str, Any]], item: str
) -> None:
    python = ".".join(platform.python_version_tuple()[:2])
    recorded = RECORDED.get((python, anyio_backend[0], item))
    if recorded is None or platform.python_implementation() != "CPython":
        pytest.skip(f"no cost was recorded for Python {python} on {anyio_backend[0]}")
    if sys.gettrace() is not None:
        pytest.skip("a debugger or the measuring of coverage traces already")

    alone, read = await counted(item, 0), await counted(item, READERS)

    each = READERS * ITEMS
    cost = Cost((read.opcodes - alone.opcodes) / each, (read.calls - alone.calls) / each)
    assert cost.opcodes <= recorded.opcodes * ALLOWED, f"{cost} are counted, {recorded} recorded"
    assert cost.calls <= recorded.calls * ALLOWED, f"{cost} are counted, {recorded} recorded"


async def counted(item: str, readers: int) -> Counter:
    """Count the cost of some events, or pieces, that so many read."""
    counter, begin, written = Counter(), anyio.Event(), anyio.Event()

    @agent
    async def writes(turn: TurnContext) -> None:
        await begin.wait()
        write = turn.writer()
        with counter.counting():
            for number in range(ITEMS):
                await write(f"word {number} ")
                await settle_all()
        written.set()

    async def append(conversation: Conversation) -> None:
        with counter.counting():
            for number in range(ITEMS):
                await conversation.append(UserMessageEvent(content=f"message {number}"))
                await settle_all()

    async with Conversations(writes, journal=MemoryJournal()) as opened:
        conversation = opened["c"]
        if item == "piece":
            await conversation.send("write")
        else:
            await conversation.append(UserMessageEvent(content="the first"))
        head = (await conversation.at()).seq
        got = 0

        async def read() -> None:
            nonlocal got
            read_on = conversation.follow if item == "piece" else conversation.events
            items: AsyncIterator[object] = read_on(after=head)
            async for _ in items:
                got += 1

        async with anyio.create_task_group() as group:
            for _ in range(readers):
                group.start_soon(read)
            await settle()
            if item == "piece":
                begin.set()
                await written.wait()
            else:
                await append(conversation)
            assert got >= readers * ITEMS, "each reader has read each item on its own"
            group.cancel_scope.cancel()
    return counter


async def settle_all() -> None:
    """Let every reader that was woken take its item and wait again."""
    for _ in range(3):
        await anyio.lowlevel.checkpoint()
