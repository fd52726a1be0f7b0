"""Agents that outlive their turn, swallow its end, or starve the loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.actors.conversations.worlds import verified
from turnkeeper.actors import (
    Agent,
    Conversation,
    Conversations,
    MemoryJournal,
    ModelRequest,
    ModelResponse,
    ToolAgent,
    ToolCall,
    Tools,
    TurnContext,
    agent,
    tool,
)
from turnkeeper.actors.errors import (
    LeaseExpired,
    TurnSuspended,
)
from turnkeeper.actors.events import (
    ActionEvent,
)
from turnkeeper.runtime import (
    Failure,
    TurnkeeperError,
)
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


async def test_an_agent_cannot_use_its_turn_after_its_end() -> None:
    kept: list[TurnContext] = []

    @agent
    async def keeping(turn: TurnContext) -> None:
        kept.append(turn)

    async with verified(keeping, journal=MemoryJournal()) as conversations:
        await (await conversations["c"].send("A")).end()
        await (await conversations["c"].send("B")).end()

        with pytest.raises(TurnkeeperError):
            _ = kept[0].view
        with pytest.raises(TurnkeeperError):
            await kept[0].say("late")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    "stray",
    [
        asyncio.CancelledError(),
        BaseExceptionGroup("gathered", [ValueError("?"), asyncio.CancelledError()]),
        BaseExceptionGroup("gathered", [asyncio.CancelledError(), asyncio.CancelledError()]),
    ],
    ids=["alone", "beside an error", "several"],
)
async def test_a_stray_cancellation_is_a_failure_of_its_tool_or_turn(
    stray: BaseException, anyio_backend: str
) -> None:
    @agent
    async def cancelling(turn: TurnContext) -> None:
        async def run(action: ActionEvent) -> str:
            if action.tool_name == "cancelled":
                raise stray
            return "seen"

        calls = [ToolCall("cancelled"), ToolCall("looks")]
        results = [logged.event for logged in await turn.call_tools(calls, run)]
        await turn.say(" ".join(getattr(result, "content", "") for result in results))
        if turn.message.content == "agent":
            raise stray

    async with verified(cancelling, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        said = f"{type(stray).__name__}: {stray}"
        assert await (await chat.send("tool")).reply() == f"{said} seen"
        for _ in range(7):  # more often than an actor may fail
            end = await (await chat.send("agent")).end()
            assert (end.outcome, end.detail) == ("failed", said)


class Panic(BaseException):
    """As an extension module raises it: no `Exception`, and not the end of the program."""


async def test_an_error_of_any_base_is_the_result_of_its_call_and_the_other_calls_go_on() -> None:
    @agent
    async def calling(turn: TurnContext) -> None:
        async def run(action: ActionEvent) -> str:
            if action.tool_name == "panics":
                raise Panic("no memory")
            if action.tool_name == "group":
                raise BaseExceptionGroup("all", [Panic("no memory"), GeneratorExit()])
            await settle()
            if action.tool_name == "exits":
                raise GeneratorExit("a generator")
            return "seen"

        calls = [ToolCall(name) for name in ("panics", "group", "exits", "looks")]
        results = [logged.event for logged in await turn.call_tools(calls, run)]
        await turn.say(", ".join(getattr(result, "content", "") for result in results))

    async with verified(calling, journal=MemoryJournal()) as opened:
        turn = await opened["c"].send("?")
        assert (await turn.reply()).split(", ") == [
            "Panic: no memory",
            "BaseExceptionGroup: all (2 sub-exceptions)",
            "GeneratorExit: a generator",
            "seen",
        ]


@pytest.mark.parametrize("error", [Panic("no memory"), GeneratorExit("a generator")], ids=repr)
async def test_an_error_of_any_base_fails_its_agents_turn_and_no_other(
    error: BaseException,
) -> None:
    @agent
    async def failing(turn: TurnContext) -> None:
        await settle()
        if turn.message.content == "fail":
            raise error
        await turn.say("fine")

    async with verified(failing, journal=MemoryJournal()) as opened:
        for _ in range(7):  # more often than an actor may fail
            end = await (await opened["c"].send("fail")).end()
            assert end.outcome == "failed"
            assert type(error).__name__ in end.detail
        assert await (await opened["c"].send("?")).reply() == "fine"


async def test_a_lease_lost_by_another_owner_fails_a_turn_or_a_call_and_not_its_owner() -> None:
    @agent
    async def asking_another(turn: TurnContext) -> None:
        async def run(_: ActionEvent) -> str:
            raise LeaseExpired("another", 3)

        if turn.message.content == "agent":
            raise LeaseExpired("another", 3)
        [result] = await turn.call_tools([ToolCall("ask_another")], run)
        await turn.say(getattr(result.event, "content", ""))

    async with verified(asking_another, journal=MemoryJournal()) as opened:
        end = await (await opened["c"].send("agent")).end()
        assert end.outcome == "failed"
        assert end.detail.startswith("LeaseExpired: the owner of conversation another has ended")
        reply = await (await opened["c"].send("tool")).reply()
        assert reply.startswith("LeaseExpired: the owner of conversation another has ended")


def cancel_the_running_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_call_that_cancels_its_own_task_or_that_of_another_ends_no_third(
    anyio_backend: str,
) -> None:
    tasks: dict[str, asyncio.Task[Any]] = {}
    all_run, may_end = anyio.Event(), anyio.Event()

    @agent
    async def calling(turn: TurnContext) -> None:
        async def run(action: ActionEvent) -> str:
            task = asyncio.current_task()
            assert task is not None
            tasks[action.tool_name] = task
            if action.tool_name == "cancels itself":
                all_run.set()
            await all_run.wait()
            if action.tool_name == "cancels itself":
                task.cancel()
            elif action.tool_name == "cancels another":
                tasks["is cancelled"].cancel()
            else:
                await may_end.wait()
            return "done"

        names = ("is cancelled", "goes on", "cancels another", "cancels itself")
        results = await turn.call_tools([ToolCall(name) for name in names], run)
        await turn.say(", ".join(getattr(one.event, "content", "") for one in results))

    async with verified(calling, journal=MemoryJournal()) as opened:
        turn = await opened["c"].send("?")
        await settle()
        may_end.set()
        assert await turn.reply() == "CancelledError: , done, done, done"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
# asyncio's: the coroutine of a task that is cancelled before its first step is never awaited.
@pytest.mark.filterwarnings("ignore:.*_run_call:pytest.PytestUnraisableExceptionWarning")
async def test_a_call_that_was_cancelled_before_it_began_has_a_result(anyio_backend: str) -> None:
    @agent
    async def calling(turn: TurnContext) -> None:
        async def run(action: ActionEvent) -> str:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                if "_run_call" in task.get_name():
                    task.cancel()
            return "done"

        results = await turn.call_tools([ToolCall("first"), ToolCall("second")], run)
        await turn.say(", ".join(getattr(one.event, "content", "") for one in results))

    async with verified(calling, journal=MemoryJournal()) as opened:
        first, second = (await (await opened["c"].send("?")).reply()).split(", ")
        assert first == "done"
        assert second.startswith("no result: its task was cancelled by another")
    gc.collect()  # here, where its warning is expected


async def test_the_end_of_a_turn_is_no_failure_of_the_tasks_that_still_wrote() -> None:
    """On trio, the task group raises what they got in one group with its cancellation."""

    @agent
    async def writing(turn: TurnContext) -> None:
        async def write_late() -> None:
            with anyio.CancelScope(shield=True):
                await opened["c"].interrupt()
            await turn.say("late")

        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            group.start_soon(write_late)

    async with verified(writing, journal=MemoryJournal()) as opened:
        with opened.runtime.events.subscribe(Failure) as failures:
            assert (await (await opened["c"].send("?")).end()).outcome == "interrupted"
            await settle()
        assert [failure async for failure in failures] == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_agent_that_cancels_its_own_task_and_returns_has_completed_its_turn(
    anyio_backend: str,
) -> None:
    @agent
    async def cancelling(turn: TurnContext) -> None:
        await turn.say("done")
        cancel_the_running_task()

    async with verified(cancelling, journal=MemoryJournal()) as opened:
        with opened.runtime.events.subscribe(Failure) as failures:
            for _ in range(7):  # more often than an actor may fail
                assert await (await opened["c"].send("?")).reply() == "done"
            await settle()
        assert [failure async for failure in failures] == []


class LeftOpen:
    """Leaves scopes open, as code does that breaks out of an async generator within a timeout."""

    def __init__(self) -> None:
        self._scopes: list[anyio.CancelScope] = []

    async def answer(self) -> str:
        """Answer."""
        await anyio.lowlevel.checkpoint()
        self._scopes.append(anyio.CancelScope())
        self._scopes[-1].__enter__()
        return "an answer"

    async def respond(self, *_: object) -> ModelResponse:
        return ModelResponse(await self.answer())

    async def run(self, _: ActionEvent) -> str:
        return await self.answer()

    async def run_out(self) -> None:
        for scope in self._scopes:
            scope.cancel()
        await settle()


@pytest.mark.parametrize("where", ["agent", "model", "runner", "tool", "tool with a timeout"])
async def test_a_timeout_that_code_leaves_open_ends_neither_its_turn_nor_another(
    where: str,
) -> None:
    left_open = LeftOpen()
    plain, timed = Tools(left_open.answer), Tools(tool(timeout_s=1_000)(left_open.answer))

    @agent
    async def answering(turn: TurnContext) -> None:
        if where == "agent":
            await turn.say(await left_open.answer())
            return
        if where == "model":
            request = ModelRequest(await turn.begin_step(), ())
            await turn.ask(left_open, request)
        else:
            runners = {"tool": plain.runner(turn), "tool with a timeout": timed.runner(turn)}
            run = runners.get(where, left_open.run)
            [result] = await turn.call_tools([ToolCall("answer")], run)
            assert getattr(result.event, "content", "") == "an answer"
        await left_open.run_out()
        await turn.say("an answer")

    async with conversations(answering) as opened:
        for name in ("a", "b", "a"):
            assert await (await opened[name].send("?")).reply() == "an answer"
            await left_open.run_out()


@asynccontextmanager
async def conversations(agent: Agent) -> AsyncIterator[Conversations]:
    async with Conversations(agent, journal=MemoryJournal(), verify="always") as opened:
        yield opened


async def test_a_turn_whose_agent_uses_another_turn_fails_and_does_not_hang() -> None:
    class Shared:
        """Keeps what is of one turn in itself, and serves several."""

        turn: TurnContext

        async def run(self, turn: TurnContext) -> None:
            self.turn = turn
            if turn.conversation_id == "first":
                await other_has_ended.wait()
            await self.turn.say("hello")

    other_has_ended = anyio.Event()
    async with conversations(Shared()) as opened:
        first = await opened["first"].send("?")
        await settle()
        await (await opened["second"].send("?")).reply()
        other_has_ended.set()
        with anyio.fail_after(60):
            end = await first.end()
    assert end.outcome == "failed"
    assert end.detail.startswith("StaleTurn")


async def kinds(conversation: Conversation) -> list[str]:
    return [logged.event.kind async for logged in conversation.events(live=False)]


class Swallowing:
    """Asks for a confirmation, takes the end of its run for a mishap, and goes on regardless."""

    is_resumable = True

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.heard: list[str] = []
        self.runs = 0

    async def run(self, turn: TurnContext) -> None:
        self.runs += 1

        async def delete(action: ActionEvent) -> str:
            self.ran.append(f"run {self.runs}")
            return action.tool_name

        if not turn.open_calls:
            with suppress(TurnSuspended):
                await turn.propose_calls([ToolCall("delete")], needs_confirmation=True)
            for go_on in (
                lambda: turn.run_calls(tuple(turn.open_calls.values()), delete),
                lambda: turn.say("done already"),
                lambda: turn.writer()("done"),
                turn.begin_step,
            ):
                try:
                    await go_on()
                except TurnSuspended as error:
                    self.heard.append(type(error).__name__)
            return
        await turn.run_calls(tuple(turn.open_calls.values()), delete)
        await turn.say("done")


async def test_an_agent_that_swallows_the_end_of_its_run_runs_nothing_unconfirmed() -> None:
    agent = Swallowing()
    async with conversations(agent) as opened:
        conversation = opened["it"]
        turn = await conversation.send("?")
        await settle()
        assert agent.ran == []
        assert agent.heard == ["TurnSuspended"] * 4
        await conversation.confirm()
        assert await turn.reply() == "done"
        assert agent.ran == ["run 2"]
        assert await kinds(conversation) == [
            "turn_started",
            "user_message",
            "action",
            "confirmation_requested",
            "confirmation_given",
            "observation",
            "agent_message",
            "turn_ended",
        ]


async def test_a_run_that_goes_on_after_it_was_held_does_not_end_the_turn_of_the_next_one() -> None:
    is_resumed, may_answer = anyio.Event(), anyio.Event()

    class Late:
        is_resumable = True
        runs = 0

        async def run(self, turn: TurnContext) -> None:
            self.runs += 1
            if self.runs > 1:
                is_resumed.set()
                await may_answer.wait()
                await turn.say("from the second run")
                return
            await held.wait()
            with suppress(TurnSuspended):
                await turn.begin_step()
            await is_resumed.wait()
            raise ValueError("too late to fail this turn")

    held = anyio.Event()
    async with conversations(Late()) as opened:
        conversation = opened["it"]
        turn = await conversation.send("?")
        await conversation.pause()
        held.set()
        await settle()
        await conversation.resume()
        await settle()
        may_answer.set()
        assert await turn.reply() == "from the second run"


async def test_a_stream_that_never_waits_does_not_starve_other_tasks() -> None:
    began = anyio.Event()

    @agent
    async def endless(turn: TurnContext) -> None:
        write = turn.writer()
        began.set()
        for _ in range(10_000):
            await write("x")
        await turn.say("nobody could interrupt this")

    async with conversations(endless) as opened:
        turn = await opened["it"].send("?")
        await began.wait()
        await turn.cancel()
        assert set((await turn.end()).reply) <= {"x"}


async def test_a_generator_that_is_streamed_and_left_half_way_is_closed() -> None:
    began, closed = anyio.Event(), anyio.Event()

    async def pieces() -> AsyncIterator[str]:
        try:
            while True:
                began.set()
                yield "x"
        finally:
            closed.set()

    @agent
    async def streaming(turn: TurnContext) -> None:
        await turn.stream(pieces())

    async with conversations(streaming) as opened:
        turn = await opened["it"].send("?")
        await began.wait()
        await turn.cancel()
        with anyio.fail_after(60):
            await closed.wait()


async def test_a_model_that_returns_something_else_is_told_as_such() -> None:
    class Plain:
        async def respond(self, _: object, __: object) -> Any:  # noqa: ANN401 - a fault of its user
            return "Hello."

    async with Conversations(ToolAgent(Plain(), []), journal=MemoryJournal()) as conversations:
        end = await (await conversations["c"].send("A")).end()

    assert end.detail == "TypeError: the model returned a str, and not a ModelResponse"
