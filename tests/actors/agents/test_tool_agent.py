"""The loop of model and tools: what it writes, what ends it, and how it is taken up again."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any, Literal, cast

import anyio
import anyio.lowlevel
import pytest

from tests.actors.conversations.worlds import brief, log_of, verified
from turnkeeper.actors import (
    Agent,
    ConfirmationPolicy,
    Conversation,
    Event,
    Journal,
    LoggedEvent,
    MemoryJournal,
    Model,
    ModelRequest,
    ModelResponse,
    RollingCondenser,
    ScriptedModel,
    TokenUsage,
    ToolAgent,
    ToolCall,
)
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import (
    InvalidInput,
    JsonNumberTooLong,
    JsonTooDeep,
    TurnNotCompleted,
)
from turnkeeper.actors.events import (
    ActionEvent,
    ImageContent,
    ObservationEvent,
    ThinkingBlock,
    UserRejectEvent,
)
from turnkeeper.actors.models.base import (
    ContextOverflow,
    MalformedHistory,
    ModelError,
    ModelRefusal,
    ModelUnavailable,
)
from turnkeeper.actors.models.messages import to_llm_messages
from turnkeeper.actors.models.scripted import Reply
from turnkeeper.actors.values.frozen import FrozenObject
from turnkeeper.runtime import Backoff, DaemonThreads, Ports
from turnkeeper.runtime.testing import VirtualClock, settle

pytestmark = pytest.mark.anyio


def look(at: str = "here") -> str:
    """Look somewhere."""
    return f"seen {at}"


def calling(*names: str, **arguments: object) -> ModelResponse:
    """A response that calls these tools."""
    return ModelResponse(calls=[ToolCall(name, arguments) for name in names])


def scripted(*replies: Reply | Callable[[ModelRequest], Any]) -> ScriptedModel:
    """A model that insists on a history that it could be given."""
    script = ScriptedModel(replies)
    respond = script.respond

    async def strict(
        request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        for shape in ("openai", "anthropic"):
            to_llm_messages(request.view, shape)
        return await respond(request, write)

    script.respond = strict  # type: ignore[method-assign]  # the one place that sees every request
    return script


@asynccontextmanager
async def serving(
    agent: Agent,
    journal: Journal | None = None,
    **settings: Any,  # noqa: ANN401
) -> AsyncIterator[Conversation]:
    """The one conversation that most of these tests are about."""
    journal = journal if journal is not None else MemoryJournal()
    async with verified(agent, journal=journal, **settings) as conversations:
        yield conversations["c"]


async def events_of(chat: Conversation) -> list[Event]:
    return [logged.event async for logged in chat.events(live=False)]


async def until(chat: Conversation, kind: str, count: int = 1) -> None:
    """Wait until the log has so many events of a kind."""
    async for logged in chat.events():
        count -= logged.event.kind == kind
        if not count:
            return


async def status_of(chat: Conversation) -> str:
    return (await chat.at(None)).agent_execution_status


# --- the loop ------------------------------------------------------------------------------------


async def test_it_asks_the_model_runs_what_it_calls_and_asks_again_until_it_answers() -> None:
    thinking = (ThinkingBlock(thinking="so", signature="s"),)
    usage = TokenUsage(input_tokens=10, output_tokens=2, cost=0.5)
    calls = [ToolCall("look", {"at": "a"}), ToolCall("look", {"at": "b"})]
    model = scripted(
        ModelResponse("Let me look.", calls, usage, thinking),
        replace(calling("look"), usage=usage),
        ModelResponse("Nothing.", usage=usage),
    )
    async with serving(ToolAgent(model, [look])) as chat:
        assert await (await chat.send("go")).reply() == "Nothing."

        log = ["u:go", "call", "call", "result", "result", "call", "result", "a:Nothing."]
        assert await log_of(chat) == log
        events = await events_of(chat)
        first = next(event for event in events if isinstance(event, ActionEvent))
        assert (first.text, first.thinking) == ("Let me look.", thinking)
        state = await chat.at(None)
        assert state.agent_execution_status == "FINISHED"
        assert (state.metrics.llm_call_count, state.metrics.total_cost) == (3, 1.5)
        assert [spec.name for spec in model.requests[0].tools] == ["look"]
        assert [brief(event) for event in model.requests[1].view] == log[:5]


async def test_a_bad_call_is_answered_in_place_and_the_next_request_is_well_formed() -> None:
    bad = ToolCall("look", {"near": "a"})
    worse = ToolCall("look", malformed_arguments='{"at": ')
    good = ToolCall("look", {"at": "a"})
    model = scripted(ModelResponse(calls=[bad, good, worse, ToolCall("fly")]), "Sorry.")
    async with serving(ToolAgent(model, [look])) as chat:
        assert await (await chat.send("go")).reply() == "Sorry."

        _, response, *results = to_llm_messages(model.requests[1].view)
        contents = {result["tool_call_id"]: str(result["content"]) for result in results}
        calls = cast("Sequence[dict[str, Any]]", response["tool_calls"])
        assert [contents[call["id"]][:18] for call in calls] == [
            "the arguments do n",
            "seen a",
            "the arguments are ",
            "there is no tool f",
        ]


async def test_arguments_have_a_depth_and_digits_that_the_application_sets() -> None:
    def note(value: list[Any]) -> str:
        """Note it."""
        return f"noted {value}"

    values: Sequence[object] = ([[12]], [[[]]], [123], [-123], [99])
    model = scripted(
        ModelResponse(calls=[ToolCall("note", {"value": value}) for value in values]), "Done."
    )
    limits = Limits(arguments_depth_max=3, arguments_digits_max=2)
    async with serving(ToolAgent(model, [note]), limits=limits) as chat:
        assert await (await chat.send("go")).reply() == "Done."

        calls = [event for event in await events_of(chat) if isinstance(event, ActionEvent)]
        results = {
            e.tool_call_id: e for e in await events_of(chat) if isinstance(e, ObservationEvent)
        }
        assert [results[call.tool_call_id].is_error for call in calls] == [0, 1, 1, 1, 0]
        assert [call.malformed_arguments for call in calls] == [
            None, "{'value': [[[]]]}", "{'value': [123]}", "{'value': [-123]}", None
        ]  # fmt: skip
        # Appended by hand, nothing mends them.
        odd: list[tuple[dict[str, Any], type[InvalidInput]]] = [
            ({"a": [[[]]]}, JsonTooDeep),
            ({"a": 123}, JsonNumberTooLong),
        ]
        for arguments, error in odd:
            call = calls[0].model_copy(
                update={"id": "new", "tool_call_id": "x", "arguments": FrozenObject(arguments)}
            )
            with pytest.raises(error):
                await chat.append(call)
            with pytest.raises(error):
                await chat.append_all([call])
        assert calls == [e for e in await events_of(chat) if isinstance(e, ActionEvent)]


async def test_after_so_many_model_calls_the_turn_fails_and_the_next_one_goes_on() -> None:
    model = scripted(*[calling("look")] * 3, "Fine.")
    async with serving(ToolAgent(model, [look], max_iterations=3)) as chat:
        turn = await chat.send("go")
        ended = await turn.end()

        assert ended.outcome == "failed"
        where = f"in turn {turn.turn_id} of conversation {chat.conversation_id};"
        said = f"TooManyIterations: no answer after 3 model calls {where}"
        assert ended.detail.startswith(said)
        assert await status_of(chat) == "ERROR"
        assert await log_of(chat) == ["u:go", *["call", "result"] * 3]
        assert await (await chat.send("again")).reply() == "Fine."


@pytest.mark.parametrize("text", ["", " \n"])
async def test_a_model_that_says_nothing_is_told_so_once(text: str) -> None:
    model = scripted(text, calling("look"), text, "Fine.")
    async with serving(ToolAgent(model, [look])) as chat:
        assert await (await chat.send("go")).reply() == "Fine."
        reminder = "u:Your last response was empty. Answer, or call a tool."
        assert await log_of(chat) == ["u:go", reminder, "call", "result", reminder, "a:Fine."]


async def test_a_model_that_goes_on_saying_nothing_fails_the_turn() -> None:
    model = scripted("", "", "not reached")
    async with serving(ToolAgent(model)) as chat:
        turn = await chat.send("go")
        ended = await turn.end()
        assert ended.outcome == "failed"
        assert ended.detail.startswith("EmptyResponse: the model returned neither text nor calls")
        assert f"in turn {turn.turn_id} of conversation {chat.conversation_id};" in ended.detail
        assert len(model.requests) == 2


# --- a model that fails --------------------------------------------------------------------------


def unavailable(retry_after_s: float | None = None) -> ModelUnavailable:
    return ModelUnavailable("m", "503", retry_after_s=retry_after_s)


class Half:
    """Writes half an answer and breaks off."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        await write(self._text)
        raise unavailable()


class InTurn:
    """One model after the other."""

    def __init__(self, *models: Model) -> None:
        self._models = list(models)

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        return await self._models.pop(0).respond(request, write)


async def test_a_failing_model_is_asked_again_and_each_attempt_begins_its_text_anew() -> None:
    clock = VirtualClock()
    model = InTurn(Half("It i"), Half("It is o"), scripted("It is here."))
    async with serving(ToolAgent(model), ports=clock.ports()) as chat:
        turn = await chat.send("go")
        shown: list[str] = []
        async with anyio.create_task_group() as group:

            async def follow() -> None:
                async for item in turn:
                    if isinstance(item, LoggedEvent):
                        continue
                    if not item.offset:
                        shown.append("")
                    shown[-1] += item.text

            group.start_soon(follow)
            await clock.advance(60)

        assert shown == ["It i", "It is o", "It is here."]
        assert await turn.reply() == "It is here."
        assert await log_of(chat) == ["u:go", "a:It is here."]


async def waits_of(replies: Sequence[Reply], **settings: Any) -> tuple[list[float], str]:  # noqa: ANN401
    """How long a turn waited between its attempts, and how it ended."""
    clock, asked_at, left = VirtualClock(), list[float](), list(replies)

    def reply(_: ModelRequest) -> Reply:
        asked_at.append(clock.monotonic())
        return left.pop(0)

    ports = replace(clock.ports(), random=Random(7))
    async with serving(ToolAgent(ScriptedModel(reply), **settings), ports=ports) as chat:
        turn = await chat.send("go")
        await clock.advance(200)
        ended = await turn.end()
    return [after - before for before, after in pairwise(asked_at)], ended.detail


async def test_the_wait_grows_from_attempt_to_attempt_and_the_attempts_are_bounded() -> None:
    backoff = Backoff(first_s=1.0, factor=2.0, max_s=4.0, jitter=0.25)

    waits, detail = await waits_of([unavailable()] * 9, attempts_max=6, backoff=backoff)

    assert len(waits) == 5
    for wait_s, plain in zip(waits, [1, 2, 4, 4, 4], strict=True):
        assert 0.75 * plain <= wait_s <= 1.25 * plain
    assert len(set(waits)) == 5
    assert detail.startswith("ModelUnavailable: no answer from m: 503")


async def test_a_provider_that_asks_to_be_left_alone_is_and_not_by_all_at_the_same_moment() -> None:
    backoff = Backoff(first_s=1.0, jitter=0.5)
    waits, detail = await waits_of([unavailable(20.0), "Fine."], backoff=backoff)
    assert 20.5 <= waits[0] <= 21.5
    assert detail == ""


@pytest.mark.parametrize("delay_s", [math.nan, -1.0])
async def test_a_delay_that_cannot_be_waited_for_is_none(delay_s: float) -> None:
    plain = Backoff(first_s=10.0, jitter=0.0)
    assert await waits_of([unavailable(delay_s), "Fine."], backoff=plain) == ([10.0], "")


async def test_no_attempt_begins_past_the_budget_of_seconds_and_none_is_waited_for() -> None:
    plain = Backoff(first_s=10.0, factor=1.0, max_s=10.0, jitter=0.0)
    waits, _ = await waits_of([unavailable()] * 9, attempts_max=9, retry_s_max=35.0, backoff=plain)
    assert waits == [10.0, 10.0, 10.0]

    waits, detail = await waits_of([unavailable(36.0), "not reached"], retry_s_max=35.0)
    assert waits == []
    assert detail.startswith("ModelUnavailable")


async def test_the_failures_of_one_step_are_not_counted_in_the_next() -> None:
    model = scripted(unavailable(), calling("look"), unavailable(), "Fine.")
    clock = VirtualClock()
    async with serving(ToolAgent(model, [look], attempts_max=2), ports=clock.ports()) as chat:
        turn = await chat.send("go")
        for failed in (1, 3):  # of the requests; between them a thread runs the tool
            while len(model.requests) < failed:
                await anyio.lowlevel.checkpoint()
            await clock.advance(5)
        assert await turn.reply() == "Fine."


@pytest.mark.parametrize(
    "error",
    [
        ModelRefusal("m", "content filter"),
        ModelError("m", "no such model"),
        RuntimeError("a bug of an adapter"),
    ],
)
async def test_what_another_attempt_cannot_mend_fails_the_turn_at_once(error: Exception) -> None:
    model = scripted(error, "Fine.")
    async with serving(ToolAgent(model)) as chat:
        ended = await (await chat.send("go")).end()
        assert ended.outcome == "failed"
        assert ended.detail == f"{type(error).__name__}: {error}"
        assert await (await chat.send("again")).reply() == "Fine."


# --- a history that a model will not take --------------------------------------------------------


def overflow() -> ContextOverflow:
    return ContextOverflow("m", "too long")


def malformed() -> MalformedHistory:
    return MalformedHistory("m", "no such call")


async def test_a_view_that_is_too_long_is_condensed_and_the_step_tried_again() -> None:
    model = scripted(*["Fine."] * 6, overflow(), "Better.")
    agent = ToolAgent(model)
    async with serving(agent, condenser=RollingCondenser(max_size=240, keep_first=1)) as chat:
        for n in range(6):
            await (await chat.send(str(n))).reply()
        assert await (await chat.send("6")).reply() == "Better."

        shown = [len(request.view) for request in model.requests[-2:]]
        assert shown[1] < shown[0]
        kinds = [event.kind for event in await events_of(chat)]
        assert kinds.count("condensation") == 1


async def test_a_view_that_is_too_long_and_cannot_be_condensed_fails_the_turn() -> None:
    model = scripted(overflow(), "not reached")
    async with serving(ToolAgent(model)) as chat:
        ended = await (await chat.send("go")).end()
        assert ended.outcome == "failed"
        assert ended.detail.startswith("ContextTooLong: ")


async def test_a_model_that_finds_every_view_too_long_fails_the_turn() -> None:
    model = scripted(*["Fine."] * 20, *[overflow()] * 9)
    agent = ToolAgent(model, condensations_max=2)
    async with serving(agent, condenser=RollingCondenser(max_size=240, keep_first=1)) as chat:
        for n in range(20):
            await (await chat.send(str(n))).reply()
        ended = await (await chat.send("go")).end()
        assert ended.outcome == "failed"
        assert ended.detail.startswith("ContextTooLong: ")
        assert len(model.requests) == 20 + 3


async def test_a_refused_history_is_repaired_and_the_step_tried_again_once() -> None:
    model = scripted(malformed(), "Fine.")
    async with serving(ToolAgent(model)) as chat:
        assert await (await chat.send("go")).reply() == "Fine."
        kinds = [event.kind for event in await events_of(chat)]
        assert kinds.count("conversation_error") == 1

    model = scripted(malformed(), calling("look"), malformed(), "not reached")
    async with serving(ToolAgent(model, [look])) as chat:
        ended = await (await chat.send("go")).end()
        assert ended.outcome == "failed"
        assert ended.detail.startswith("MalformedHistory: history refused by m")
        assert len(model.requests) == 3


async def test_a_history_refused_twice_is_sent_once_more_without_images_and_thinking() -> None:
    """An image may have gone from its address, and then every later request would be refused."""
    model = scripted(malformed(), malformed(), "Fine.", "And fine.")
    image = ImageContent(url="https://example.org/gone.png")
    async with serving(ToolAgent(model)) as chat:
        assert await (await chat.send("see", images=[image])).reply() == "Fine."
        assert [request.is_plain for request in model.requests] == [False, False, True]
        assert await (await chat.send("and?")).reply() == "And fine."
        assert not model.requests[-1].is_plain

    model = scripted(malformed(), malformed(), malformed(), "not reached")
    async with serving(ToolAgent(model)) as chat:
        ended = await (await chat.send("see", images=[image])).end()
        assert ended.detail.startswith("MalformedHistory: history refused by m")
        assert len(model.requests) == 3


# --- circles -------------------------------------------------------------------------------------

NUDGE = "u:You are going round in circles: the same call has failed 3 times. Try another way."


async def test_an_agent_that_fails_thrice_is_told_so_and_stopped_at_the_fourth_time() -> None:
    tries = 0

    async def fly() -> str:
        nonlocal tries
        tries += 1
        raise RuntimeError(f"no wings, try {tries}")

    model = scripted(*[calling("fly")] * 4, "not reached")
    async with serving(ToolAgent(model, [fly])) as chat:
        ended = await (await chat.send("go")).end()

        assert (ended.outcome, ended.detail) == (
            "failed",
            "Stuck: the same call has failed 4 times",
        )
        assert await status_of(chat) == "STUCK"
        log = ["u:go", *["call", "result"] * 3, NUDGE, "call", "result"]
        assert await log_of(chat) == log


async def test_an_agent_that_heeds_what_it_is_told_goes_on_and_is_told_once() -> None:
    clock = VirtualClock()
    fly, walk = calling("fly"), calling("look")
    model = scripted(*[fly] * 3, unavailable(), walk, "Fine.")
    async with serving(ToolAgent(model, [look]), ports=clock.ports()) as chat:
        turn = await chat.send("go")
        while (await chat.view())[-1].kind != "user_message" or len(model.requests) < 4:
            await anyio.lowlevel.checkpoint()
        await clock.advance(5)
        assert await turn.reply() == "Fine."
        assert (await log_of(chat)).count(NUDGE) == 1


async def test_the_same_call_with_the_same_result_is_stopped_at_the_fourth_time() -> None:
    model = scripted(*[calling("look")] * 9)
    async with serving(ToolAgent(model, [look])) as chat:
        ended = await (await chat.send("go")).end()
        assert "the same call with the same result, 4 times" in ended.detail
        assert len(model.requests) == 4
        assert await status_of(chat) == "STUCK"
        with pytest.raises(TurnNotCompleted):
            await (await chat.send("again")).reply()


# --- confirmation --------------------------------------------------------------------------------


@dataclass
class Till:
    """Two tools that say when they ran."""

    ran: list[str] = field(default_factory=list)

    def refund(self, order: int) -> str:
        self.ran.append(f"refund {order}")
        return "refunded"

    def read(self) -> str:
        self.ran.append("read")
        return "12"


def both() -> ModelResponse:
    return ModelResponse(calls=[ToolCall("read"), ToolCall("refund", {"order": 7})])


def large(call: ToolCall) -> bool:
    return call.name == "refund" and call.arguments["order"] == 7


async def large_async(call: ToolCall) -> bool:
    await anyio.lowlevel.checkpoint()
    return large(call)


def broken(call: ToolCall) -> bool:
    raise RuntimeError("no database")


def forgetful(call: ToolCall) -> Any:  # noqa: ANN401 - it is not what it should be
    return None


ASKING: list[ConfirmationPolicy] = ["always", ["refund"], large, large_async, broken, forgetful]
SILENT: list[ConfirmationPolicy] = ["never", [], lambda call: call.name == "other"]


@pytest.mark.parametrize("confirm", ASKING)
async def test_a_call_that_needs_a_confirmation_waits_for_it_with_those_beside_it(
    confirm: ConfirmationPolicy,
) -> None:
    till, model = Till(), scripted(both(), "Done.")
    async with serving(ToolAgent(model, [till.read, till.refund], confirm=confirm)) as chat:
        turn = await chat.send("go")
        await until(chat, "confirmation_requested")

        assert await status_of(chat) == "WAITING_FOR_CONFIRMATION"
        assert till.ran == []
        await chat.confirm()
        assert await turn.reply() == "Done."

        assert sorted(till.ran) == ["read", "refund 7"]
        assert await log_of(chat) == ["u:go", "call", "call", "result", "result", "a:Done."]


@pytest.mark.parametrize("confirm", SILENT)
async def test_a_call_that_needs_no_confirmation_runs_at_once(confirm: ConfirmationPolicy) -> None:
    till, model = Till(), scripted(both(), "Done.")
    async with serving(ToolAgent(model, [till.read, till.refund], confirm=confirm)) as chat:
        assert await (await chat.send("go")).reply() == "Done."
        assert sorted(till.ran) == ["read", "refund 7"]


async def test_rejected_calls_are_answered_as_such_and_the_model_goes_on() -> None:
    till, model = Till(), scripted(both(), "As you wish.")
    async with serving(ToolAgent(model, [till.read, till.refund], confirm="always")) as chat:
        turn = await chat.send("go")
        await until(chat, "confirmation_requested")
        await chat.reject("not that one")

        assert await turn.reply() == "As you wish."
        assert till.ran == []
        rejected = [event for event in await events_of(chat) if isinstance(event, UserRejectEvent)]
        assert ["not that one" in event.content for event in rejected] == [True, True]


async def test_nobody_is_asked_about_calls_that_cannot_run() -> None:
    calls = [ToolCall("fly"), ToolCall("look", {"near": 1})]
    model = scripted(ModelResponse(calls=calls), "Sorry.")
    async with serving(ToolAgent(model, [look], confirm="always")) as chat:
        assert await (await chat.send("go")).reply() == "Sorry."


@pytest.mark.parametrize("confirm", ["sometimes", ["reefund"], ["look", "fly"]])
def test_a_confirmation_that_would_never_be_asked_for_is_refused(confirm: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidInput, match="confirm"):
        ToolAgent(scripted(), [look], confirm=confirm)


@pytest.mark.parametrize("limit", ["max_iterations", "attempts_max"])
def test_a_limit_that_lets_nothing_through_is_refused(limit: str) -> None:
    settings: dict[str, Any] = {limit: 0}
    with pytest.raises(InvalidInput, match=f"{limit} is 0"):
        ToolAgent(scripted(), **settings)


@pytest.mark.parametrize("unfinished", ["end", "resume"])
@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_a_confirmation_is_waited_for_over_a_restart(
    unfinished: Literal["end", "resume"], is_confirmed: bool
) -> None:
    journal, till = MemoryJournal(), Till()
    make = partial(ToolAgent, tools=[till.read, till.refund], confirm="always")
    with anyio.CancelScope() as process:
        async with serving(make(scripted(both())), journal, unfinished=unfinished) as chat:
            await chat.send("go", message_id="m")
            await until(chat, "confirmation_requested")
            process.cancel()

    model = scripted("Done.")
    async with serving(make(model), journal, unfinished=unfinished) as chat:
        await settle()
        assert await status_of(chat) == "WAITING_FOR_CONFIRMATION"
        assert (till.ran, model.requests) == ([], [])
        turn = await chat.send("go", message_id="m")
        if is_confirmed:
            await chat.confirm()
        else:
            await chat.reject()

        assert await turn.reply() == "Done."
        assert sorted(till.ran) == (["read", "refund 7"] if is_confirmed else [])


# --- pauses --------------------------------------------------------------------------------------


class Gate:
    """A place where a model or a tool waits until it is told to go on."""

    def __init__(self) -> None:
        self.reached = anyio.Event()
        self._go_on = anyio.Event()

    def open(self) -> None:
        self._go_on.set()

    async def wait(self) -> None:
        self.reached.set()
        await self._go_on.wait()

    def replying(self, reply: Reply) -> Callable[[ModelRequest], Awaitable[Reply]]:
        async def respond(_: ModelRequest) -> Reply:
            await self.wait()
            return reply

        return respond


async def test_a_pause_during_a_model_call_holds_and_keeps_the_answer() -> None:
    gate = Gate()
    model = scripted(gate.replying("Fine."), "not reached")
    async with serving(ToolAgent(model)) as chat:
        turn = await chat.send("go")
        await gate.reached.wait()
        await chat.pause()
        gate.open()
        await until(chat, "agent_message")
        await settle()

        assert await status_of(chat) == "PAUSED"
        assert await log_of(chat) == ["u:go", "a:Fine."]
        await chat.resume()
        assert await turn.reply() == "Fine."
        assert await log_of(chat) == ["u:go", "a:Fine."]
        assert await status_of(chat) == "FINISHED"
        assert len(model.requests) == 1


@pytest.mark.parametrize("where", ["model", "tool"])
async def test_a_pause_takes_effect_before_the_next_step_and_resuming_goes_on(where: str) -> None:
    gate = Gate()

    async def wait() -> str:
        if where == "tool":
            await gate.wait()
        return "waited"

    first = calling("wait")
    model = scripted(gate.replying(first) if where == "model" else first, "Fine.")
    async with serving(ToolAgent(model, [wait])) as chat:
        turn = await chat.send("go")
        await gate.reached.wait()
        await chat.pause()
        gate.open()
        await until(chat, "observation")
        await settle()

        assert await status_of(chat) == "PAUSED"
        assert len(model.requests) == 1
        await chat.resume()
        assert await turn.reply() == "Fine."
        assert await log_of(chat) == ["u:go", "call", "result", "a:Fine."]


@pytest.mark.parametrize("unfinished", ["end", "resume"])
async def test_a_pause_outlives_a_restart(unfinished: Literal["end", "resume"]) -> None:
    journal, gate = MemoryJournal(), Gate()
    with anyio.CancelScope() as process:
        model = scripted(gate.replying(calling("look")))
        async with serving(ToolAgent(model, [look]), journal, unfinished=unfinished) as chat:
            await chat.send("go", message_id="m")
            await gate.reached.wait()
            await chat.pause()
            gate.open()
            await until(chat, "observation")
            await settle()
            process.cancel()

    model = scripted("Fine.")
    async with serving(ToolAgent(model, [look]), journal, unfinished=unfinished) as chat:
        await settle()
        assert await status_of(chat) == "PAUSED"
        assert model.requests == []
        turn = await chat.send("go", message_id="m")
        await chat.resume()
        assert await turn.reply() == "Fine."
        assert await log_of(chat) == ["u:go", "call", "result", "a:Fine."]


async def test_a_pause_takes_effect_while_a_failing_model_is_left_alone() -> None:
    clock = VirtualClock()
    model = scripted(unavailable(), "Fine.")
    async with serving(ToolAgent(model), ports=clock.ports()) as chat:
        turn = await chat.send("go")
        while not model.requests:
            await anyio.lowlevel.checkpoint()
        await chat.pause()
        await clock.advance(60)
        assert len(model.requests) == 1
        await chat.resume()
        assert await turn.reply() == "Fine."


# --- messages in the middle of a turn ------------------------------------------------------------


async def test_a_message_is_accepted_while_a_tool_runs_and_stands_after_its_result() -> None:
    gate = Gate()

    async def wait() -> str:
        # As a tool that talks to its own conversation: the same event loop, in the middle of it.
        await chats[0].send("meanwhile", on_overlap="steer")
        await chats[0].send("later")
        await gate.wait()
        return "waited"

    model = scripted(calling("wait"), "Both.", "Later.")
    chats: list[Conversation] = []
    async with serving(ToolAgent(model, [wait])) as chat:
        chats.append(chat)
        turn = await chat.send("go")
        await gate.reached.wait()
        gate.open()

        assert await turn.reply() == "Both."
        await (await chat.send("last")).end()
        assert (await log_of(chat))[:7] == [
            "u:go",
            "call",
            "result",
            "u:meanwhile",
            "a:Both.",
            "u:later",
            "a:Later.",
        ]


async def test_an_interrupt_between_two_tools_answers_both_and_refuses_what_comes_late() -> None:
    release, threads, gate = threading.Event(), DaemonThreads(), Gate()
    started = threading.Event()

    def stubborn() -> str:
        started.set()
        release.wait()
        return "late"

    async def willing() -> str:
        await gate.wait()
        return "never"

    model = scripted(
        ModelResponse("One moment.", [ToolCall("stubborn"), ToolCall("willing"), ToolCall("look")]),
        "Stopped.",
    )
    agent = ToolAgent(model, [stubborn, willing, look])
    async with serving(agent, ports=Ports(blocking=threads)) as chat:
        first = await chat.send("go")
        await until(chat, "observation")
        await gate.reached.wait()
        while not started.is_set():
            await anyio.lowlevel.checkpoint()

        second = await chat.send("stop", on_overlap="interrupt")
        assert await second.reply() == "Stopped."
        assert (await first.end()).outcome == "interrupted"
        log = await log_of(chat)
        assert log == ["u:go", *["call"] * 3, "result", *["no result"] * 2, "u:stop", "a:Stopped."]
        assert threads.abandoned == 1
        release.set()
        while threads.abandoned:
            await anyio.lowlevel.checkpoint()
        await settle()
        assert await log_of(chat) == log


# --- the budget -----------------------------------------------------------------------------------


async def test_no_model_call_is_made_once_the_budget_is_spent() -> None:
    usage = TokenUsage(cost=0.5)
    model = scripted(ModelResponse("one", usage=usage), ModelResponse("two", usage=usage), "three")
    async with serving(ToolAgent(model, budget=1.0)) as chat:
        assert await (await chat.send("1")).reply() == "one"
        assert await (await chat.send("2")).reply() == "two"
        ended = await (await chat.send("3")).end()
        assert ended.outcome == "failed"
        assert ended.detail.startswith("BudgetSpent: ")
        assert len(model.requests) == 2
    with pytest.raises(InvalidInput, match="budget"):
        ToolAgent(model, budget=0.0)


async def test_no_model_call_is_made_once_the_tokens_are_spent() -> None:
    """What the model reads and what it writes, in all turns; the next turn ends so, too."""
    usage = TokenUsage(input_tokens=30, output_tokens=20, reasoning_tokens=15, cached_tokens=25)
    model = scripted(ModelResponse("one", usage=usage), ModelResponse("two", usage=usage), "three")
    async with serving(ToolAgent(model, token_budget=51)) as chat:
        assert await (await chat.send("1")).reply() == "one"
        assert await (await chat.send("2")).reply() == "two"
        for text in ("3", "4"):
            ended = await (await chat.send(text)).end()
            assert ended.outcome == "failed"
            assert ended.detail.startswith("TokensSpent: ")
            assert "100 tokens, of a budget of 51" in ended.detail
        assert len(model.requests) == 2
    with pytest.raises(InvalidInput, match="token_budget"):
        ToolAgent(model, token_budget=0)


LIMITS = ("max_iterations", "attempts_max", "retry_s_max", "budget", "token_budget")


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("limit", [math.nan, -1])
def test_a_limit_that_limits_nothing_is_refused(name: str, limit: float) -> None:
    wrong: Any = {name: limit}
    with pytest.raises(InvalidInput, match=f"^{name} is {limit}; it takes "):
        ToolAgent(scripted("hello"), **wrong)


@pytest.mark.parametrize("limit", [{"budget": 0.5}, {"token_budget": 1}, {"max_iterations": 1}])
async def test_a_turn_that_ends_by_a_limit_of_its_agent_is_told_in_one_line(
    limit: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    usage = TokenUsage(cost=0.5, input_tokens=30)
    model = scripted(ModelResponse("", calls=[ToolCall("look")], usage=usage))
    async with serving(ToolAgent(model, [look], **limit)) as chat:
        with pytest.raises(TurnNotCompleted, match="are in the log; the reason was ") as caught:
            await (await chat.send("go")).reply()

    (warned,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert "turn failed" in warned.getMessage()
    assert "Traceback" not in caplog.text
    assert str(caught.value).count("send another") == 1
