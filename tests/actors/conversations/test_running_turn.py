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
    ToolCall,
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


async def test_a_result_by_hand_for_a_call_that_runs_stays_and_leaves_the_other_calls_alone() -> (
    None
):
    """The call's own result was refused, which cancelled the other call and failed the turn."""
    is_running, may_end = anyio.Event(), {"one": anyio.Event(), "two": anyio.Event()}
    results: list[str] = []

    async def run(action: ActionEvent) -> str:
        is_running.set()
        await may_end[action.tool_name].wait()
        return f"own {action.tool_name}"

    @agent
    async def calls_two(turn: TurnContext) -> None:
        logged = await turn.call_tools([ToolCall("one"), ToolCall("two")], run)
        results.extend(f"{seq} {getattr(event, 'content', '')}" for seq, event in logged)
        await turn.say("done")

    async with verified(calls_two, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("go")
        await is_running.wait()
        one, _ = [event for event in await chat.view() if isinstance(event, ActionEvent)]

        await chat.append(ObservationEvent(tool_call_id=one.tool_call_id, content="by hand"))
        may_end["one"].set()
        while not (rejections := await chat.rejections()):
            await anyio.lowlevel.checkpoint()
        may_end["two"].set()

        assert await turn.reply() == "done"
        assert results == ["5 by hand", "6 own two"]
        assert await log_of(chat) == ["u:go", "call", "call", "result", "result", "a:done"]
        assert [each.violation for each in rejections] == ["duplicate_tool_result"]


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
