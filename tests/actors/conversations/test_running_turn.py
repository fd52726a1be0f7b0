"""A turn that runs: its history is left alone, and its end has its cause and its answer."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, WatchedJournal, log_of, verified
from turnkeeper.actors import (
    ConversationConfig,
    Conversations,
    MemoryJournal,
    ModelResponse,
    ScriptedModel,
    ToolAgent,
    TurnContext,
    agent,
)
from turnkeeper.actors.errors import InvalidInput, NotWhileTurnRuns, TurnNotCompleted
from turnkeeper.actors.events import ActionEvent, ObservationEvent
from turnkeeper.actors.journal import Record

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("blank", ["", "  \n"])
async def test_a_blank_system_prompt_is_refused(blank: str) -> None:
    with pytest.raises(InvalidInput, match="blank"):
        Conversations(HeldAgent(), journal=MemoryJournal(), system_prompt=blank)
    config = ConversationConfig(system_prompt=blank)
    async with verified(
        HeldAgent(), journal=MemoryJournal(), configure=lambda _: config
    ) as conversations:
        with pytest.raises(InvalidInput, match="blank"):
            await conversations["c"].send("hello")


async def test_the_running_turn_is_not_retracted_and_an_ended_one_is() -> None:
    held = HeldAgent()
    held.hold("now")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        before = await chat.send("before")
        await before.end()
        turn = await chat.send("now")
        (message,) = [event for event in await chat.view() if event.turn_id == turn.turn_id]

        with pytest.raises(NotWhileTurnRuns, match="nothing was written"):
            await chat.retract_turn(turn.turn_id)
        with pytest.raises(NotWhileTurnRuns):
            await chat.retract([message.id])
        await chat.retract_turn(before.turn_id)
        held.release("now")
        assert await turn.reply() == "a(now)"
        await chat.retract_turn(turn.turn_id)
        assert list(await chat.view()) == []


async def test_a_call_by_hand_does_not_keep_the_answer_of_a_running_turn_out() -> None:
    held = HeldAgent()
    held.hold("now")
    call = ActionEvent(tool_call_id="k", tool_name="t", llm_response_id="r")
    result = ObservationEvent(tool_call_id="k", content="r")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("now")
        with pytest.raises(NotWhileTurnRuns):
            await chat.append(call)
        with pytest.raises(NotWhileTurnRuns):
            await chat.append_all([call])
        await chat.append_all([call, result])
        held.release("now")
        assert await turn.reply() == "a(now)"
        assert await log_of(chat) == ["u:now", "call", "result", "a:a(now)"]


class Batches(WatchedJournal):
    """Keeps the kinds of each commit."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[list[str]] = []

    async def before_append(self, records: Sequence[Record]) -> None:
        self.kinds.append([record.kind for record in records])


async def test_the_last_answer_of_a_tool_agent_and_the_end_of_its_turn_are_one_commit() -> None:
    journal = Batches()
    model = ScriptedModel([ModelResponse("one"), ModelResponse("two")])
    async with verified(ToolAgent(model), journal=journal) as conversations:
        chat = conversations["c"]
        first, second = await chat.send("1"), await chat.send("2")
        assert await first.reply() == "one"
        assert await second.reply() == "two"
    ends = [kinds for kinds in journal.kinds if "turn_ended" in kinds]
    assert len(ends) == 2
    assert all(kinds[0] == "agent_message" for kinds in ends), ends


async def test_what_was_said_before_an_interrupt_is_in_the_error_of_its_caller() -> None:
    said, never = anyio.Event(), anyio.Event()

    @agent
    async def slow(turn: TurnContext) -> None:
        await turn.say("so far")
        said.set()
        await never.wait()

    async with verified(slow, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("go")
        await said.wait()
        await turn.cancel()
        with pytest.raises(TurnNotCompleted) as caught:
            await turn.reply()
    assert (caught.value.outcome, caught.value.reply) == ("interrupted", "so far")


class Bare(BaseException):
    """Neither an `Exception` nor a cancellation."""


@pytest.mark.parametrize("in_a_group", [False, True])
async def test_the_cause_of_a_turn_that_failed_is_in_its_detail_whatever_its_base(
    *, in_a_group: bool
) -> None:
    @agent
    async def bad(turn: TurnContext) -> None:
        if turn.message.content == "bad":
            raise BaseExceptionGroup("all", [Bare("why")]) if in_a_group else Bare("why")
        await turn.say("fine")

    async with verified(bad, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        end = await (await chat.send("bad")).end()
        assert end.outcome == "failed"
        assert end.detail.startswith("BaseExceptionGroup: all" if in_a_group else "Bare: why")
        assert await (await chat.send("good")).reply() == "fine"
