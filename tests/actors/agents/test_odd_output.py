"""Odd output of models, tools and agents: half characters, no text, errors without a text."""

from __future__ import annotations

import gc
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import ReferenceType

import anyio
import anyio.lowlevel
import pytest

from tests.actors.conversations.worlds import log_of, verified
from turnkeeper.actors import (
    Agent,
    Conversations,
    MemoryJournal,
    TokenUsage,
    ToolCall,
    TurnContext,
    agent,
)
from turnkeeper.actors.core import records
from turnkeeper.actors.errors import (
    InvalidInput,
    TurnNotCompleted,
)
from turnkeeper.actors.events import (
    ActionEvent,
    ObservationEvent,
    StepRequest,
    ThinkingBlock,
)
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


async def test_half_an_emoji_in_a_stream_does_not_keep_the_turn_from_being_interrupted() -> None:
    begun = anyio.Event()

    @agent
    async def halves(turn: TurnContext) -> None:
        if turn.message.content == "B":
            return

        async def pieces() -> AsyncIterator[str]:
            yield "so far \ud83d"
            begun.set()
            await anyio.sleep_forever()

        await turn.stream(pieces())

    async with verified(halves, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await begun.wait()

        await (await chat.send("B", on_overlap="interrupt")).end()

        assert await log_of(chat) == ["u:A", "cut:so far \ufffd", "u:B"]


async def test_halves_of_an_emoji_in_two_pieces_are_joined() -> None:
    @agent
    async def halves(turn: TurnContext) -> None:
        async def pieces() -> AsyncIterator[str]:
            yield "\ud83d"
            yield "\ude00"

        await turn.stream(pieces())

    async with verified(halves, journal=MemoryJournal()) as conversations:
        assert await (await conversations["c"].send("A")).reply() == "\U0001f600"


async def test_a_stream_that_is_begun_again_does_not_keep_what_the_first_had_brought() -> None:
    begun = anyio.Event()

    @agent
    async def retrying(turn: TurnContext) -> None:
        async def broken() -> AsyncIterator[str]:
            yield "Hello wo"
            raise ConnectionError

        async def again() -> AsyncIterator[str]:
            yield "Hello world"
            begun.set()
            await anyio.sleep_forever()

        with pytest.raises(ConnectionError):
            await turn.stream(broken())
        await turn.stream(again())

    async with verified(retrying, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("A")
        await begun.wait()
        await turn.cancel()

        assert (await turn.end()).reply == "Hello world"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_a_model_call_that_was_given_up_does_not_write_into_the_next_answer() -> None:
    written, heard = anyio.Event(), list[str]()

    @agent
    async def asking(turn: TurnContext) -> None:
        given_up, write = turn.writer(), turn.writer()
        await write("good ")
        try:
            await given_up("late")
        except InvalidInput as error:
            heard.append(str(error))
        written.set()
        await anyio.sleep_forever()

    async with conversations(asking) as opened:
        turn = await opened["it"].send("?")
        await written.wait()
        await turn.cancel()
        assert (await turn.end()).reply == "good "
    assert heard == ["a newer writer has begun the answer anew; use that one"]


async def test_a_turn_that_has_streamed_is_freed_without_the_garbage_collector() -> None:
    turns: list[ReferenceType[TurnContext]] = []

    @agent
    async def streaming(turn: TurnContext) -> None:
        turns.append(ReferenceType(turn))
        await turn.writer()("hello")
        await turn.say("hello")

    async with conversations(streaming) as opened:
        gc.disable()
        try:
            await (await opened["it"].send("?")).reply()
            await settle()
            assert [turn() for turn in turns] == [None]
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("f\udcff"), "FileNotFoundError: f\ufffd"),
        (Unprintable(), "Unprintable: its text cannot be read (RuntimeError)"),
    ],
)
async def test_an_error_without_a_decent_text_is_a_result_or_an_outcome_all_the_same(
    error: Exception, said: str
) -> None:
    @agent
    async def failing(turn: TurnContext) -> None:
        async def fails(action: ActionEvent) -> str:
            if action.tool_name == "fails":
                raise error
            return "seen \udcff"

        calls = [ToolCall("fails"), ToolCall("looks")]
        results = [logged.event for logged in await turn.call_tools(calls, fails)]
        assert [e.content for e in results if isinstance(e, ObservationEvent)] == [
            said,
            "seen \ufffd",
        ]
        raise error

    async with verified(failing, journal=MemoryJournal()) as conversations:
        end = await (await conversations["c"].send("A")).end()

        assert (end.outcome, end.detail) == ("failed", said)


@asynccontextmanager
async def conversations(agent: Agent) -> AsyncIterator[Conversations]:
    async with Conversations(agent, journal=MemoryJournal(), verify="always") as opened:
        yield opened


@pytest.mark.parametrize("piece", [None, 5, b"x"])
async def test_a_piece_that_is_no_text_is_refused_and_the_turn_can_be_ended(
    piece: Any,  # noqa: ANN401 - of a wrong type
) -> None:
    refused = anyio.Event()

    @agent
    async def streaming(turn: TurnContext) -> None:
        write = turn.writer()
        await write("said")
        with pytest.raises(InvalidInput):
            await write(piece)
        refused.set()
        await anyio.sleep_forever()

    async with conversations(streaming) as opened:
        turn = await opened["it"].send("?")
        await refused.wait()
        assert await turn.cancel()
        assert (await turn.end()).reply == "said"


@pytest.mark.parametrize("returned", [None, 5, ["a result"]])
async def test_a_runner_that_returns_no_result_answers_its_call_with_an_error(
    returned: Any,  # noqa: ANN401 - of a wrong type
) -> None:
    results: list[Any] = []  # logged events; which, is what is tested

    @agent
    async def calling(turn: TurnContext) -> None:
        async def run(action: ActionEvent) -> Any:  # noqa: ANN401 - of a wrong type
            return "fine" if action.tool_name == "good" else returned

        results.extend(await turn.call_tools([ToolCall("bad"), ToolCall("good")], run))
        await turn.say("done")

    async with conversations(calling) as opened:
        assert await (await opened["it"].send("?")).reply() == "done"
    bad, good = (logged.event for logged in results)
    assert bad.is_error
    assert type(returned).__name__ in bad.content
    assert good.content == "fine"


async def test_what_a_model_calls_is_written_down_however_odd_it_is() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"deeper": deep}
    odd = [
        ToolCall("half \ud83d", {}, provider_call_id="half \ud83d"),
        ToolCall("deep", deep),
        ToolCall("long", {"number": 10**5000}),
        ToolCall("unread", malformed_arguments="half \ud83d"),
    ]

    @agent
    async def calling(turn: TurnContext) -> None:
        async def run(action: ActionEvent) -> str:
            return action.malformed_arguments or action.tool_name

        await turn.call_tools(odd, run)
        await turn.say("done")

    async with conversations(calling) as opened:
        assert await (await opened["it"].send("?")).reply() == "done"


@pytest.mark.parametrize(
    "parts",
    [
        {"usage": TokenUsage(cost=1.0).model_copy(update={"cost": math.nan})},
        {"usage": TokenUsage(cost=1.0).model_copy(update={"input_tokens": "many"})},
        {"usage": TokenUsage.model_construct(input_tokens=10**5000)},
        {"thinking": (ThinkingBlock.model_construct(thinking=5),)},
    ],
    ids=["nan", "a text", "digits", "thinking"],
)
async def test_a_part_that_could_not_be_read_again_is_refused_before_it_is_written(
    parts: Any,  # noqa: ANN401 - of `say`
) -> None:
    @agent
    async def answering(turn: TurnContext) -> None:
        with pytest.raises(ValueError, match=r"usage|thinking"):
            await turn.say("lost", **parts)
        await turn.say("kept")

    journal = MemoryJournal()
    async with verified(answering, journal=journal) as conversations:
        assert await (await conversations["c"].send("A")).reply() == "kept"
    async with verified(answering, journal=journal) as conversations:
        assert await log_of(conversations["c"]) == ["u:A", "a:kept"]


def test_a_number_that_json_would_not_give_back_is_refused() -> None:
    with pytest.raises(ValueError, match="less than"):
        TokenUsage(input_tokens=10**5000)
    with pytest.raises(ValueError, match="less than"):
        StepRequest(view_seq=10**5000)


@pytest.mark.parametrize(
    ("length", "found"), [(10_000, "bytes of JSON"), (10_001, "10,001 characters")]
)
async def test_an_event_that_is_too_long_fails_its_turn_and_not_its_owner(
    monkeypatch: pytest.MonkeyPatch, length: int, found: str
) -> None:
    """The journal would refuse a very long one, and so end the owner.

    If one text is too long by itself, the JSON is not written: that would stop the event loop.
    """
    monkeypatch.setattr(records, "EVENT_LENGTH_MAX", 10_000)

    @agent
    async def long_winded(turn: TurnContext) -> None:
        await turn.say("x" * (length if turn.message.content == "A" else 10))

    async with verified(long_winded, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        with pytest.raises(TurnNotCompleted, match=f"{found}; it takes at most 10,000;"):
            await (await chat.send("A")).reply()

        assert (await (await chat.send("B")).end()).outcome == "completed"


async def test_a_result_that_is_too_long_becomes_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "EVENT_LENGTH_MAX", 10_000)

    async def read(_: ActionEvent) -> str:
        return "x" * 10_000

    @agent
    async def reads(turn: TurnContext) -> None:
        await turn.call_tools([ToolCall("read", {})], read)
        await turn.say("done")

    async with verified(reads, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        assert (await (await chat.send("A")).end()).outcome == "completed"
        results = [event for event in await chat.view() if isinstance(event, ObservationEvent)]

    assert [result.is_error for result in results] == [True]
    assert results[0].content.startswith("the call ran, and its result cannot be kept: an Obs")
