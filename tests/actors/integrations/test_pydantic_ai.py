"""Agents of pydantic-ai behind a conversation: what the log has of them, and what they have of it.

pydantic-ai runs on asyncio alone, and so do these tests, except the one that says so.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    ApprovalRequired,
    BinaryContent,
    DeferredToolRequests,
    ModelRetry,
    RunContext,
    ToolReturn,
)
from pydantic_ai.capabilities import ProcessEventStream
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    RetryFeedbackPart,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import (
    AgentInfo,
    DeltaThinkingPart,
    DeltaToolCall,
    FunctionModel,
)
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.toolsets import ExternalToolset

from tests.actors.agents.test_tool_agent import events_of, serving, until
from tests.actors.agents.test_tool_agent_crashes import (
    Death,
    Found,
    Unfinished,
    World,
    check,
    send_and_die,
)
from tests.actors.conversations.worlds import brief, log_of
from tests.drawn import drawn
from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    MemoryStore,
    RollingCondenser,
    SQLiteJournal,
    TurnContext,
)
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    FileContent,
    ImageContent,
    ObservationEvent,
    StepFinishedEvent,
    TextDelta,
    UserMessageEvent,
    UserRejectEvent,
)
from turnkeeper.actors.integrations.pydantic_ai import PydanticAgent

asyncio_only = pytest.mark.parametrize(
    "anyio_backend", [pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio")]
)
pytestmark = pytest.mark.anyio

Script = Callable[[list[ModelMessage], AgentInfo], ModelResponse | Awaitable[ModelResponse]]


class Scripted:
    """A model that gives these responses, one after another, and notes what it is asked."""

    def __init__(self, *responses: str | ModelResponse | Exception) -> None:
        self.responses = list(responses)
        self.asked: list[list[ModelMessage]] = []

    @property
    def model(self) -> FunctionModel:
        return FunctionModel(self._respond, stream_function=self._stream, model_name="scripted")

    def _next(self, messages: list[ModelMessage]) -> ModelResponse:
        self.asked.append(list(messages))
        response = self.responses.pop(0)
        if isinstance(response, Exception):
            raise response
        return ModelResponse([TextPart(response)]) if isinstance(response, str) else response

    async def _respond(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        return self._next(messages)

    async def _stream(self, messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        for n, part in enumerate(self._next(messages).parts):
            match part:
                case TextPart(content=text):
                    for piece in text.split("|"):
                        yield piece
                case ToolCallPart():
                    yield {
                        n: DeltaToolCall(
                            part.tool_name, part.args_as_json_str(), tool_call_id=part.tool_call_id
                        )
                    }
                case ThinkingPart():
                    yield {n: DeltaThinkingPart(content=part.content, signature=part.signature)}
                case _:
                    raise AssertionError(part)


def calling(*calls: tuple[str, dict[str, object]], text: str = "") -> ModelResponse:
    """A response that makes these calls, with ids that count from zero."""
    parts = [ToolCallPart(name, args, f"call_{n}") for n, (name, args) in enumerate(calls)]
    return ModelResponse([*([TextPart(text)] if text else []), *parts])


def seen(messages: Sequence[ModelMessage]) -> list[tuple[str, str]]:
    """What a request shows its model, one line for each part."""
    lines = []
    for message in messages:
        for part in message.parts:
            match part:
                case ToolReturnPart():
                    lines.append((f"result {part.outcome}", part.model_response_str()))
                case ToolCallPart():
                    lines.append((f"call {part.tool_name}", part.args_as_json_str()))
                case RetryFeedbackPart():
                    lines.append(("feedback", str(part.content)))
                case SystemPromptPart() | UserPromptPart() | TextPart() | ThinkingPart():
                    lines.append((part.part_kind, str(part.content)))
                case _:
                    raise AssertionError(part)
    return lines


async def look_up(order: int) -> dict[str, int]:
    """Look up an order."""
    return {"order": order}


@asyncio_only
async def test_two_turns_have_one_history_and_each_request_is_a_step(tmp_path: Path) -> None:
    script = Scripted(
        calling(("look_up", {"order": 7}), text="Let me see."),
        "It is |com|ing.",
        "To|morrow.",
    )
    agent = PydanticAgent(
        Agent(script.model, tools=[look_up], instructions="Be kind.", system_prompt="A shop.")
    )
    async with serving(agent, SQLiteJournal(tmp_path / "chats.db")) as chat:
        assert await (await chat.send("Where is 7?")).reply() == "It is coming."
        assert await (await chat.send("When?")).reply() == "Tomorrow."
        events = await events_of(chat)
        steps = await chat.steps()

    first = [("system-prompt", "A shop."), ("user-prompt", "Where is 7?")]
    step = [*first, ("text", "Let me see."), ("call look_up", '{"order":7}')]
    second = [*step, ("result success", '{"order":7}')]
    third = [*second, ("text", "It is coming."), ("user-prompt", "When?")]
    assert [seen(messages) for messages in script.asked] == [first, second, third]
    assert all(messages[-1].instructions == "Be kind." for messages in script.asked)  # type: ignore[union-attr]

    assert [line for line in map(brief, events) if line != "step_finished"] == [
        "started",         "u:Where is 7?", "call", "result", "a:It is coming.", "completed",
        "started", "u:When?", "a:Tomorrow.", "completed",
    ]  # fmt: skip
    assert [step.outcome for step in steps] == ["finished"] * 3
    assert {step.request.model for step in steps if step.request} == {"scripted"}
    assert len({step.request.tools_digest for step in steps if step.request}) == 1
    used = [event.usage for event in events if isinstance(event, StepFinishedEvent)]
    assert all(usage.input_tokens > 0 and usage.output_tokens > 0 for usage in used)
    assert len(used) == 3


async def test_an_agent_that_nobody_has_wrapped_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"PydanticAgent\(agent\)"):
        Conversations(Agent("test"), journal=MemoryJournal())  # type: ignore[arg-type]  # the slip


@asyncio_only
async def test_the_pieces_of_each_response_come_in_order(tmp_path: Path) -> None:
    script = Scripted(calling(("look_up", {"order": 7}), text="Let |me |see."), "It is |com|ing.")
    agent = PydanticAgent(Agent(script.model, tools=[look_up]))
    async with serving(agent, SQLiteJournal(tmp_path / "chats.db")) as chat:
        turn = await chat.send("Where is 7?")
        pieces = [one async for one in turn if isinstance(one, TextDelta)]

    texts: dict[int, str] = {}
    for piece in pieces:
        assert piece.offset == len(texts.get(piece.answer, ""))
        texts[piece.answer] = texts.get(piece.answer, "") + piece.text
    assert list(texts.values()) == ["Let me see.", "It is coming."]
    assert len(pieces) > 2


@asyncio_only
async def test_an_agent_that_does_not_stream_or_that_streams_by_itself_says_the_same() -> None:
    handled: list[str] = []

    async def handle(ctx: RunContext[None], events: Any) -> None:  # noqa: ANN401 - pydantic-ai's
        handled.extend([event.event_kind async for event in events])

    script = Scripted("one", "two")
    plain = PydanticAgent(Agent(script.model), streams=False)
    async with serving(plain) as chat:
        assert await (await chat.send("go")).reply() == "one"
    own = PydanticAgent(Agent(script.model, capabilities=[ProcessEventStream(handle)]))
    async with serving(own) as chat:
        assert await (await chat.send("go")).reply() == "two"
    assert "part_start" in handled


# --- crashes -------------------------------------------------------------------------------------


class PeerWorld(World):
    """The world of the crash tests, with an agent of pydantic-ai in it."""

    def effects_of(self, action: ActionEvent) -> int:
        assert action.provider_call_id is not None
        return self.effects[action.provider_call_id]

    def agent(self) -> PydanticAgent[None, str]:
        async def charge(ctx: RunContext[None], amount: int) -> str:
            await self._happen(ctx)
            return f"charged {amount}"

        async def look(ctx: RunContext[None]) -> str:
            await self._happen(ctx)
            return "seen"

        async def respond(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
            await self.death.step()
            for part in next_parts(messages):
                yield part

        agent = Agent(FunctionModel(stream_function=respond), tools=[charge, look])
        confirm = ["charge", "look"] if self.asks else []
        return PydanticAgent(agent, confirm=confirm, idempotent=["look"])

    async def _happen(self, ctx: RunContext[None]) -> None:
        await self.death.step()
        assert ctx.tool_call_id is not None
        self.effects[ctx.tool_call_id] += 1
        await self.death.step()


def next_parts(messages: Sequence[ModelMessage]) -> list[Any]:
    """What the model says; it goes by nothing but the history that it is shown."""
    results, newest = 0, ""
    for line, text in seen(messages):
        results += line.startswith("result")
        if line == "user-prompt":
            results, newest = 0, text
    match results:
        case 0 if newest == "go":
            charge = DeltaToolCall("charge", '{"amount":5}', tool_call_id="c0")
            return ["Let me see.", {1: charge}, {2: DeltaToolCall("look", "{}", tool_call_id="c1")}]
        case 2:
            return [{0: DeltaToolCall("look", "{}", tool_call_id="c2")}]
        case _:
            return [f"a({newest})"]


DONE = ["u:go", "call", "call", "result", "result", "call", "result", "a:a(go)"]


async def sweep(unfinished: Unfinished, share: int, *, asks: bool = False) -> Found:
    """Kill at some of the steps that the turn takes if nothing comes between."""
    whole = PeerWorld(Death(), asks=asks)
    assert not await send_and_die(MemoryJournal(), whole, unfinished)
    assert whole.death.steps > 20
    found: Found = []
    for at in drawn(range(1, whole.death.steps), share):
        store, world = MemoryStore(), PeerWorld(Death(at), asks=asks)
        assert await send_and_die(MemoryJournal(store), world, unfinished)
        found.append(await check(MemoryJournal(store), world, unfinished))
    return found


@pytest.mark.sweep
@asyncio_only
async def test_a_turn_that_is_killed_at_any_step_is_resumed_to_its_end() -> None:
    for ended, log in await sweep("resume", 8):
        assert (ended.outcome, ended.reply) == ("completed", "a(go)")
        assert [one.replace("no result", "result") for one in log[:8]] == DONE


@pytest.mark.sweep
@asyncio_only
async def test_a_turn_that_is_killed_is_ended_where_it_stood() -> None:
    for ended, log in await sweep("end", 4):
        mine = [one.replace("no result", "result") for one in log[: log.index("u:on")]]
        assert mine == DONE[: len(mine)]
        assert mine == DONE or ended.outcome == "interrupted"


@pytest.mark.sweep
@asyncio_only
async def test_a_turn_that_asks_its_user_is_killed_at_any_step() -> None:
    for ended, log in await sweep("resume", 5, asks=True):
        assert (ended.outcome, ended.reply) == ("completed", "a(go)")
        assert [one.replace("no result", "result") for one in log] == DONE


@asyncio_only
async def test_so_it_is_with_a_journal_on_disk(tmp_path: Path) -> None:
    for at in (8, 14):  # at the first, a call has had its effect and no result
        path, world = tmp_path / f"{at}.db", PeerWorld(Death(at))
        assert await send_and_die(SQLiteJournal(path), world, "resume")
        ended, _ = await check(SQLiteJournal(path), world, "resume")
        assert ended.reply == "a(go)"


# --- confirmations -------------------------------------------------------------------------------


class Shop:
    """Tools that note what was done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def agent(self, script: Scripted, **settings: Any) -> PydanticAgent[None, str]:  # noqa: ANN401
        agent: Agent[None, str] = Agent(script.model, deps_type=type(None))

        @agent.tool(requires_approval=True)
        async def refund(ctx: RunContext[None], order: int) -> str:
            assert ctx.tool_call_approved
            self.done.append(f"refund {order}")
            return "refunded"

        @agent.tool_plain
        async def look(order: int) -> str:
            self.done.append(f"look {order}")
            return "seen"

        return PydanticAgent(agent, **settings)


@asyncio_only
async def test_a_call_that_requires_an_approval_waits_for_the_user() -> None:
    shop = Shop()
    script = Scripted(calling(("look", {"order": 1}), ("refund", {"order": 1})), "Done.")
    async with serving(shop.agent(script)) as chat:
        turn = await chat.send("go")
        await until(chat, "confirmation_requested")
        assert shop.done == []

        await chat.confirm()

        assert await turn.reply() == "Done."
    assert sorted(shop.done) == ["look 1", "refund 1"]
    assert [text for kind, text in seen(script.asked[1]) if kind == "result success"] == [
        "seen",
        "refunded",
    ]


@asyncio_only
async def test_a_call_that_the_user_rejects_never_runs_and_the_others_may() -> None:
    shop = Shop()
    script = Scripted(calling(("look", {"order": 1}), ("refund", {"order": 1})), "Done.")
    async with serving(shop.agent(script)) as chat:
        turn = await chat.send("go")
        await until(chat, "confirmation_requested")
        look, refund = [e for e in await events_of(chat) if isinstance(e, ActionEvent)]

        await chat.answer({look.tool_call_id: True, refund.tool_call_id: "not this one"})

        assert await turn.reply() == "Done."
        (rejected,) = [e for e in await events_of(chat) if isinstance(e, UserRejectEvent)]
    assert shop.done == ["look 1"]
    assert "not this one" in rejected.content
    assert ("result success", "seen") in seen(script.asked[1])
    assert any("not this one" in text for _, text in seen(script.asked[1]))


@asyncio_only
async def test_a_named_tool_is_confirmed_and_the_turn_waits_over_a_restart(tmp_path: Path) -> None:
    shop = Shop()
    script = Scripted(calling(("look", {"order": 1})), "Done.")
    journal = tmp_path / "chats.db"
    async with serving(shop.agent(script, confirm=["look"]), SQLiteJournal(journal)) as chat:
        await chat.send("go", message_id="m")
        await until(chat, "confirmation_requested")

    agent = shop.agent(script, confirm=["look"])
    async with serving(agent, SQLiteJournal(journal), unfinished="resume") as chat:
        turn = await chat.send("go", message_id="m")
        assert shop.done == []
        await chat.reject("no")
        assert await turn.reply() == "Done."
    assert shop.done == []
    assert seen(script.asked[1])[-1][0] == "result denied"


@asyncio_only
async def test_an_approval_that_a_tool_asks_for_as_it_runs_is_refused() -> None:
    async def refund(order: int) -> str:
        raise ApprovalRequired

    script = Scripted(calling(("refund", {"order": 1})), "It needs an approval.")
    async with serving(PydanticAgent(Agent(script.model, tools=[refund]))) as chat:
        assert await (await chat.send("go")).reply() == "It needs an approval."
        (result,) = [e for e in await events_of(chat) if isinstance(e, ObservationEvent)]
    assert result.is_error
    assert "ApprovalRequired" in result.content


@asyncio_only
async def test_a_call_that_is_to_run_elsewhere_fails_the_turn_and_has_an_answer() -> None:
    elsewhere = ExternalToolset([ToolDefinition(name="ship", parameters_json_schema={})])
    script = Scripted(calling(("ship", {})), "Hello.")
    agent = Agent(script.model, toolsets=[elsewhere], output_type=[str, DeferredToolRequests])
    async with serving(PydanticAgent(agent)) as chat:
        ended = await (await chat.send("go")).end()
        assert (ended.outcome, ended.detail.split(":")[0]) == ("failed", "ExternalCalls")
        assert await (await chat.send("on")).reply() == "Hello."
        assert await log_of(chat) == ["u:go", "call", "no result", "u:on", "a:Hello."]


# --- interrupts, pauses, and messages that come meanwhile ---------------------------------------


@asyncio_only
async def test_an_interrupt_in_the_middle_of_a_call_leaves_the_log_whole() -> None:
    reached, ended = anyio.Event(), anyio.Event()

    async def wait(order: int) -> str:
        reached.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()
        return "never"

    script = Scripted(calling(("wait", {"order": 1}), ("look_up", {"order": 2})), "Hello.")
    async with serving(PydanticAgent(Agent(script.model, tools=[wait, look_up]))) as chat:
        turn = await chat.send("go")
        await reached.wait()
        await until(chat, "observation")

        other = await chat.send("stop", on_overlap="interrupt")

        assert (await turn.end()).outcome == "interrupted"
        assert await other.reply() == "Hello."
        with anyio.fail_after(60):
            await ended.wait()
        assert await log_of(chat) == [
            "u:go", "call", "call", "result", "no result", "u:stop", "a:Hello.",
        ]  # fmt: skip
    assert [kind for kind, _ in seen(script.asked[1])] == [
        "user-prompt", "call wait", "call look_up",
        "result interrupted", "result success", "user-prompt",
    ]  # fmt: skip


@asyncio_only
async def test_an_interrupt_in_the_middle_of_an_answer_keeps_its_pieces() -> None:
    async def stream(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        if seen(messages)[-1][1] == "go":
            yield "It "
            yield "is"
            await anyio.sleep_forever()
        yield "Hello."

    async with serving(PydanticAgent(Agent(FunctionModel(stream_function=stream)))) as chat:
        turn = await chat.send("go")
        said = ""
        async for piece in turn:
            said += piece.text if isinstance(piece, TextDelta) else ""
            if said == "It is":
                break

        other = await chat.send("stop", on_overlap="interrupt")

        assert await other.reply() == "Hello."
        partial, _ = [e for e in await events_of(chat) if isinstance(e, AgentMessageEvent)]
    assert (partial.content, partial.interrupted) == ("It is", True)


@asyncio_only
async def test_a_message_that_steers_joins_at_the_next_step() -> None:
    reached, go_on = anyio.Event(), anyio.Event()

    async def wait(order: int) -> str:
        reached.set()
        await go_on.wait()
        return "waited"

    script = Scripted(calling(("wait", {"order": 1})), "Both.")
    async with serving(PydanticAgent(Agent(script.model, tools=[wait]))) as chat:
        turn = await chat.send("go")
        await reached.wait()
        await chat.send("and this", on_overlap="steer")
        go_on.set()
        assert await turn.reply() == "Both."
    assert len(script.asked) == 2
    assert seen(script.asked[1])[-2:] == [("result success", "waited"), ("user-prompt", "and this")]


@asyncio_only
async def test_a_turn_that_is_paused_resumes_at_its_step() -> None:
    reached, go_on = anyio.Event(), anyio.Event()

    async def wait(order: int) -> str:
        reached.set()
        await go_on.wait()
        return "waited"

    script = Scripted(calling(("wait", {"order": 1})), "Done.")
    async with serving(PydanticAgent(Agent(script.model, tools=[wait]))) as chat:
        turn = await chat.send("go")
        await reached.wait()
        await chat.pause()
        go_on.set()
        await until(chat, "observation")
        assert len(script.asked) == 1

        await chat.resume()

        assert await turn.reply() == "Done."
        steps = await chat.steps()
    assert len(script.asked) == len(steps) == 2
    assert seen(script.asked[1])[-1] == ("result success", "waited")


@asyncio_only
async def test_a_run_goes_on_with_the_view_that_a_condensation_left() -> None:
    script = Scripted(*[calling(("look_up", {"order": n})) for n in range(4)], "Done.")
    agent = PydanticAgent(Agent(script.model, tools=[look_up]))
    async with serving(agent, condenser=RollingCondenser(max_size=6, keep_first=1)) as chat:
        assert await (await chat.send("go")).reply() == "Done."
        assert any(event.kind == "condensation" for event in await events_of(chat))
    assert len(script.asked) == 5
    assert len(seen(script.asked[-1])) < 9


# --- outputs -------------------------------------------------------------------------------------


class Order(BaseModel):
    number: int
    city: str


@asyncio_only
async def test_a_structured_output_is_said_as_json_and_read_as_that() -> None:
    script = Scripted(calling(("final_result", {"number": 7, "city": "Kyiv"})), "Yes.")
    agent = PydanticAgent(Agent(script.model, output_type=[Order, str]))
    async with serving(agent) as chat:
        assert await (await chat.send("go")).reply() == '{"number":7,"city":"Kyiv"}'
        assert await (await chat.send("Sure?")).reply() == "Yes."
        assert await log_of(chat) == [
            "u:go", 'a:{"number":7,"city":"Kyiv"}', "u:Sure?", "a:Yes.",
        ]  # fmt: skip
    assert seen(script.asked[1]) == [
        ("user-prompt", "go"),
        ("text", '{"number":7,"city":"Kyiv"}'),
        ("user-prompt", "Sure?"),
    ]


@asyncio_only
async def test_an_output_may_be_said_in_words() -> None:
    script = Scripted(calling(("final_result", {"number": 7, "city": "Kyiv"})))
    agent = PydanticAgent(
        Agent(script.model, output_type=Order), say=lambda order: f"To {order.city}."
    )
    async with serving(agent) as chat:
        assert await (await chat.send("go")).reply() == "To Kyiv."


@asyncio_only
async def test_an_output_that_is_refused_is_a_reminder_and_never_said() -> None:
    script = Scripted("the secret", "fine", "Yes.")
    agent = Agent(script.model)

    @agent.output_validator
    def check_output(output: str) -> str:
        if "secret" in output:
            raise ModelRetry("Do not tell.")
        return output

    async with serving(PydanticAgent(agent)) as chat:
        assert await (await chat.send("go")).reply() == "fine"
        assert await (await chat.send("Sure?")).reply() == "Yes."
        events = await events_of(chat)
        steps = await chat.steps()
    said = [event.content for event in events if isinstance(event, AgentMessageEvent)]
    assert said == ["fine", "Yes."]
    (reminder,) = [e for e in events if isinstance(e, UserMessageEvent) and e.is_reminder]
    assert "Do not tell." in reminder.content
    assert "the secret" in reminder.content
    assert len(steps) == 3
    answer, feedback = seen(script.asked[1])[1:]
    assert answer == ("text", "the secret")
    assert "Do not tell." in feedback[1]
    assert [kind for kind, _ in seen(script.asked[2])] == [
        "user-prompt", "user-prompt", "text", "user-prompt",
    ]  # fmt: skip


@asyncio_only
async def test_a_structured_output_that_does_not_fit_is_asked_for_again() -> None:
    script = Scripted(
        calling(("final_result", {"number": "x"})),
        calling(("final_result", {"number": 7, "city": "Kyiv"})),
    )
    async with serving(PydanticAgent(Agent(script.model, output_type=Order))) as chat:
        assert await (await chat.send("go")).reply() == '{"number":7,"city":"Kyiv"}'
        (reminder,) = [
            e for e in await events_of(chat) if isinstance(e, UserMessageEvent) and e.is_reminder
        ]
    assert '{"number": "x"}' in reminder.content


@asyncio_only
async def test_a_call_beside_the_output_that_was_left_out_has_a_result_that_says_so() -> None:
    shop = Shop()
    both = calling(("look_up", {"order": 1}), ("final_result", {"number": 7, "city": "Kyiv"}))
    script = Scripted(both, "Yes.")
    agent = Agent(script.model, tools=[look_up], output_type=[Order, str], end_strategy="early")
    async with serving(PydanticAgent(agent)) as chat:
        assert await (await chat.send("go")).reply() == '{"number":7,"city":"Kyiv"}'
        assert await (await chat.send("Sure?")).reply() == "Yes."
        (result,) = [e for e in await events_of(chat) if isinstance(e, ObservationEvent)]
    assert "not executed" in result.content
    assert shop.done == []


# --- tools that fail, models that fail -----------------------------------------------------------


@asyncio_only
async def test_retries_are_results_that_the_model_reads() -> None:
    async def pick(color: str) -> str:
        if color == "red":
            raise ModelRetry("Not red.")
        return "picked"

    script = Scripted(
        calling(("pick", {"color": "red"})),
        calling(("pick", {"size": 3})),
        calling(("drop", {})),
        calling(("pick", {"color": "blue"})),
        "Done.",
    )
    agent = Agent(script.model, tools=[pick], retries=5)
    async with serving(PydanticAgent(agent)) as chat:
        assert await (await chat.send("go")).reply() == "Done."
        results = [e for e in await events_of(chat) if isinstance(e, ObservationEvent)]
    assert [result.is_error for result in results] == [True, True, True, False]
    assert "Not red." in results[0].content
    assert "color" in results[1].content
    assert "drop" in results[2].content


@asyncio_only
async def test_a_tool_that_raises_fails_the_turn_and_its_call_has_the_error() -> None:
    async def burn() -> str:
        raise OSError("on fire")

    script = Scripted(calling(("burn", {})), "Sorry.")
    async with serving(PydanticAgent(Agent(script.model, tools=[burn]))) as chat:
        ended = await (await chat.send("go")).end()
        assert (ended.outcome, ended.detail) == ("failed", "OSError: on fire")
        assert await (await chat.send("Well?")).reply() == "Sorry."
    assert seen(script.asked[1])[2] == ("result failed", '{"error":"OSError: on fire"}')


@asyncio_only
async def test_an_error_of_the_model_fails_the_turn_and_the_next_goes_on() -> None:
    script = Scripted(ModelHTTPError(503, "scripted"), "Hello.")
    async with serving(PydanticAgent(Agent(script.model))) as chat:
        ended = await (await chat.send("go")).end()
        assert ended.outcome == "failed"
        assert ended.detail.startswith("ModelHTTPError")
        assert await (await chat.send("on")).reply() == "Hello."
        assert [step.outcome for step in await chat.steps()] == ["failed", "finished"]


@asyncio_only
async def test_a_turn_has_a_limit_of_requests() -> None:
    script = Scripted(*[calling(("look_up", {"order": n})) for n in range(5)])
    agent = PydanticAgent(Agent(script.model, tools=[look_up]), max_iterations=3)
    async with serving(agent) as chat:
        ended = await (await chat.send("go")).end()
    assert ended.detail.startswith("TooManyIterations")
    assert len(script.asked) == 3


# --- what comes back -----------------------------------------------------------------------------


@asyncio_only
async def test_thinking_comes_back_with_its_signature() -> None:
    thought = ThinkingPart("Hm.", signature="s1", provider_name="function")
    script = Scripted(
        ModelResponse([thought, *calling(("look_up", {"order": 1})).parts]),
        ModelResponse([thought, TextPart("Done.")]),
        "Yes.",
    )
    async with serving(PydanticAgent(Agent(script.model, tools=[look_up]))) as chat:
        assert await (await chat.send("go")).reply() == "Done."
        assert await (await chat.send("Sure?")).reply() == "Yes."
        (answer, _) = [e for e in await events_of(chat) if isinstance(e, AgentMessageEvent)]
    assert [block.thinking for block in answer.thinking] == ["Hm."]
    came = [p for m in script.asked[2] for p in m.parts if isinstance(p, ThinkingPart)]
    assert [(part.content, part.signature) for part in came] == [("Hm.", "s1")] * 2
    assert [kind for kind, _ in seen(script.asked[2])] == [
        "user-prompt", "thinking", "call look_up", "result success",
        "thinking", "text", "user-prompt",
    ]  # fmt: skip


@asyncio_only
async def test_images_and_files_are_shown_and_what_a_tool_adds_is_a_reminder() -> None:
    async def snap() -> ToolReturn[str]:
        picture = BinaryContent(b"png", media_type="image/png")
        return ToolReturn(return_value="taken", content=["Here:", picture])

    script = Scripted(calling(("snap", {})), "Nice.", "Yes.")
    async with serving(PydanticAgent(Agent(script.model, tools=[snap]))) as chat:
        turn = await chat.send(
            "What is this?",
            images=[ImageContent(url="https://example.org/a.png")],
            files=[FileContent.with_bytes("a.pdf", "application/pdf", b"pdf")],
        )
        assert await turn.reply() == "Nice."
        assert await (await chat.send("Sure?")).reply() == "Yes."
    (prompt,) = script.asked[0][0].parts
    assert isinstance(prompt, UserPromptPart)
    text, image, file = list(prompt.content)
    assert (text, image.url) == ("What is this?", "https://example.org/a.png")  # type: ignore[union-attr]
    assert (file.data, file.media_type) == (b"pdf", "application/pdf")  # type: ignore[union-attr]
    assert seen(script.asked[2])[3] == (
        "user-prompt",
        "Here:\n\n[a file that is not kept: image/png]",
    )


@dataclass
class Deps:
    user: str


@asyncio_only
async def test_dependencies_are_made_for_each_turn() -> None:
    async def whose(ctx: RunContext[Deps]) -> str:
        return ctx.deps.user

    async def deps(turn: TurnContext) -> Deps:
        return Deps(turn.message.content)

    script = Scripted(calling(("whose", {})), "Done.")
    agent = Agent(script.model, deps_type=Deps, tools=[whose])
    async with serving(PydanticAgent(agent, deps=deps)) as chat:
        assert await (await chat.send("alice")).reply() == "Done."
    assert seen(script.asked[1])[-1] == ("result success", "alice")


@asyncio_only
async def test_the_prompt_of_the_conversation_is_the_systems() -> None:
    script = Scripted("Hello.")
    agent = PydanticAgent(Agent(script.model, system_prompt="theirs"))
    async with serving(agent, system_prompt="ours") as chat:
        assert await (await chat.send("go")).reply() == "Hello."
    assert seen(script.asked[0]) == [("system-prompt", "ours"), ("user-prompt", "go")]


@asyncio_only
async def test_what_cannot_be_meant_is_refused() -> None:
    agent = Agent(Scripted().model)
    with pytest.raises(InvalidInput):
        PydanticAgent(agent, max_iterations=0)
    with pytest.raises(InvalidInput):
        PydanticAgent(agent, max_iterations=math.nan)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        PydanticAgent(agent, streams="no")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        PydanticAgent(agent, confirm="refund")


@pytest.mark.parametrize("anyio_backend", [("trio", {})], ids=["trio"])
async def test_on_trio_a_turn_fails_with_a_sentence_that_says_why() -> None:
    async with serving(PydanticAgent(Agent(Scripted("never").model))) as chat:
        ended = await (await chat.send("go")).end()
    assert ended.outcome == "failed"
    assert "asyncio alone" in ended.detail
