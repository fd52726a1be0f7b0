"""Agents that are plain functions: they say their answer, return it, or yield it in pieces."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import anyio
import pytest

from tests.actors.conversations.worlds import log_of, verified
from turnkeeper.actors import Conversations, MemoryJournal, TurnContext, agent, tool
from turnkeeper.actors.errors import InvalidInput

pytestmark = pytest.mark.anyio


@agent
async def returns(turn: TurnContext) -> str:
    return f"You said: {turn.message.content}"


@agent
async def yields(turn: TurnContext) -> AsyncGenerator[str]:
    yield "You said: "
    yield turn.message.content


@agent
async def says(turn: TurnContext) -> None:
    await turn.say(f"You said: {turn.message.content}")


@pytest.mark.parametrize("made", [returns, yields, says])
async def test_an_agent_says_returns_or_yields_its_answer(made: Any) -> None:  # noqa: ANN401 - an agent
    async with verified(made, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("hello")
        assert await turn.reply() == "You said: hello"
        assert await log_of(conversations["c"]) == ["u:hello", "a:You said: hello"]


async def test_an_interrupt_keeps_what_was_yielded_and_closes_the_agent() -> None:
    yielded, closed = anyio.Event(), anyio.Event()

    @agent
    async def slow(turn: TurnContext) -> AsyncGenerator[str]:
        try:
            yield f"half of {turn.message.content}"
            yielded.set()
            await anyio.sleep_forever()
        finally:
            closed.set()

    async with verified(slow, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("it")
        await yielded.wait()
        await turn.cancel()
        assert (await turn.end()).outcome == "interrupted"
        await closed.wait()
        assert await log_of(conversations["c"]) == ["u:it", "cut:half of it"]


@agent
async def returns_a_number(turn: TurnContext) -> str:
    return 7  # type: ignore[return-value]  # that is the case


@agent
async def yields_a_number(turn: TurnContext) -> AsyncGenerator[str]:
    yield 7  # type: ignore[misc]  # that is the case


class Plain:
    def run(self, turn: TurnContext) -> str:
        return "hi"


class Yields:
    async def run(self, turn: TurnContext) -> AsyncGenerator[str]:
        yield "hi"


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (Plain(), "TypeError: the agent's `run` returned a str; write it as an `async def`"),
        (Yields(), "TypeError: the agent's `run` returned an async_generator; write it as an"),
        (returns_a_number, "TypeError: the agent returned an int; it returns its answer as a str"),
        (yields_a_number, "TypeError: the agent yielded an int; it yields str"),
    ],
)
async def test_an_answer_that_is_no_text_fails_the_turn_and_says_why(made: Any, found: str) -> None:  # noqa: ANN401 - an agent
    async with verified(made, journal=MemoryJournal()) as conversations:
        ended = await (await conversations["c"].send("hello")).end()
        assert ended.outcome == "failed"
        assert ended.detail.startswith(found)


def test_a_function_that_cannot_be_called_with_a_turn_alone_is_no_agent() -> None:
    """It failed at its first turn."""

    async def none() -> str:
        return "hi"

    async def two(turn: TurnContext, other: object) -> AsyncGenerator[str]:
        yield f"{turn} {other}"

    for function in (none, two):
        with pytest.raises(InvalidInput, match=r"called with the turn alone, and .* takes \("):
            agent(function)  # type: ignore[arg-type]  # that is the case
    agent(partial(two, other=1))


def test_a_function_that_is_not_async_is_no_agent() -> None:
    with pytest.raises(InvalidInput, match="@agent takes an `async def`"):
        agent(lambda turn: turn)  # type: ignore[arg-type, return-value]  # that is the case


def test_a_tool_is_no_agent_though_it_has_a_run_method() -> None:
    """Its `run` takes more than the turn: it was accepted, and each turn failed."""

    @tool
    async def look_up(order: int) -> str:
        return str(order)

    with pytest.raises(InvalidInput, match=r"needs a method `async run\(turn\)`, and .* has none"):
        Conversations(look_up, journal=MemoryJournal())  # type: ignore[arg-type]  # that is the case


def test_an_agent_that_was_looked_at_goes_with_its_conversations() -> None:
    """The look at its method is kept, and kept all that the method refers to."""
    gone: list[str] = []

    def use() -> None:
        class Client:
            """What an agent of one tenant refers to."""

        client = Client()
        weakref.finalize(client, gone.append, "client")

        class OfTenant:
            async def run(self, turn: TurnContext) -> None:
                await turn.say(repr(client))

        Conversations(OfTenant(), journal=MemoryJournal())

    use()
    gc.collect()
    assert gone == ["client"]
