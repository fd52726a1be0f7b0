"""The order of messages that steer."""

from __future__ import annotations

from collections import defaultdict

import anyio
import pytest

from tests.actors.conversations.worlds import log_of, verified
from turnkeeper.actors import (
    MemoryJournal,
    TurnContext,
    agent,
)

pytestmark = pytest.mark.anyio


async def test_a_message_that_steers_does_not_overtake_one_that_steered_the_turn_before() -> None:
    """Found by `turnkeeper stress`: messages of one sender were answered the wrong way round."""
    reached: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)
    may_go: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)

    @agent
    async def steered(turn: TurnContext) -> None:
        text = turn.message.content
        reached[text].set()
        await may_go[text].wait()
        if text == "B":
            await turn.begin_step()

    async with verified(steered, journal=MemoryJournal(), on_overlap="steer") as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await reached["A"].wait()
        await chat.send("B")
        await chat.send("C")
        may_go["A"].set()
        await reached["B"].wait()  # A ended without a further step, and B has its own turn

        last = await chat.send("D")
        for text in "BCD":
            may_go[text].set()
        await last.end()

        assert [event for event in await log_of(chat) if event.startswith("u:")] == [
            "u:A",
            "u:B",
            "u:C",
            "u:D",
        ]
