"""What each model call was asked, as the log tells it afterwards."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

from tests.actors.conversations.turn_worlds import until
from tests.actors.conversations.worlds import verified
from tests.actors.models.asking import asking
from tests.actors.models.servers import WAIT_MAX_S, Answer, Call, Status
from turnkeeper.actors import (
    Conversation,
    Conversations,
    FrozenObject,
    ImageContent,
    MemoryJournal,
    ModelRequest,
    ModelResponse,
    Need,
    Proposal,
    ScriptedModel,
    SQLiteJournal,
    TokenUsage,
    ToolAgent,
    ToolSpec,
    TurnContext,
    View,
    agent,
)
from turnkeeper.actors.core.condensation import find_runs
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.steps import Step
from turnkeeper.actors.events import (
    StepFinishedEvent,
    StepRequest,
    decode_event,
)
from turnkeeper.actors.models.base import ModelError, request_of
from turnkeeper.actors.models.messages import LLMShape, to_llm_messages
from turnkeeper.runtime import Backoff

pytestmark = pytest.mark.anyio

AT_ONCE = Backoff(first_s=0.001, max_s=0.001)
SHAPES: Mapping[str, LLMShape] = {
    "chat": "openai",
    "responses": "openai_responses",
    "anthropic": "anthropic",
}


async def look(at: str) -> str:
    """Look somewhere."""
    return f"seen {at}"


def canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def sent(api: str, body: Mapping[str, Any]) -> str:
    """The messages of a request as they came over the wire."""
    if api == "responses":
        return canonical(["", body["input"]])
    return canonical([body.get("system", ""), body["messages"]])


async def told(api: str, chat: Conversation, step: Step) -> str:
    """The messages that the log says were sent."""
    assert step.request is not None
    view = (await chat.at(step.view_seq)).view
    messages = to_llm_messages(
        view,
        SHAPES[api],
        model=step.request.model or "",
        is_plain=step.request.is_plain,
        show_author=step.request.show_author,
    )
    return canonical([messages.system, list(messages)])


class OnDemand:
    """Forgets the oldest run that may be forgotten, when it is told to."""

    is_wanted = False

    def need(self, view: View) -> Need | None:
        return "soft" if self.is_wanted and find_runs(view, 0, len(view)) else None

    async def propose(self, view: View, need: Need) -> Proposal | None:
        self.is_wanted = False
        run = find_runs(view, 0, len(view))[0]
        return Proposal(tuple(event.id for event in run), "what was said before")


@pytest.mark.parametrize("api", SHAPES)
async def test_at_the_seq_of_its_view_is_exactly_what_the_model_was_sent(
    api: str, tmp_path: Path
) -> None:
    """Also of a step during which history was condensed, and of one that was tried again."""
    condenser = OnDemand()
    asked, condensed = threading.Event(), threading.Event()

    def wait(n: int) -> None:
        asked.set()
        assert condensed.wait(WAIT_MAX_S)

    journal = partial(SQLiteJournal, tmp_path / "chats.db")
    limits = Limits(snapshot_events=2)
    async with asking(api) as one:
        tool_agent = ToolAgent(one.model, [look], backoff=AT_ONCE)
        one.server.replies.extend(
            (
                Answer(["first"]),
                Answer(["let me look"], [Call("look", ['{"at": "here"}'])]),
                Status(500),
                Answer(["second"], before_text=wait, cached_tokens=7, reasoning_tokens=3),
                Answer(["third"]),
            )
        )
        async with verified(
            tool_agent,
            journal=journal(),
            condenser=condenser,
            system_prompt="be kind",
            limits=limits,
        ) as conversations:
            chat = conversations["c"]
            await (await chat.send("A")).reply()
            turn = await chat.send("B")
            assert await anyio.to_thread.run_sync(asked.wait, WAIT_MAX_S)
            condenser.is_wanted = True
            await chat.view()
            await until(chat, "condensation")
            condensed.set()
            await turn.reply()
            await (await chat.send("C")).reply()
            steps = await chat.steps()
        bodies = one.server.bodies

        async with Conversations(tool_agent, journal=journal(), limits=limits) as conversations:
            chat = conversations["c"]
            assert await chat.steps() == steps
            heard = [await told(api, chat, step) for step in steps]

    assert [step.outcome for step in steps] == ["finished"] * 4
    assert heard == [sent(api, bodies[n]) for n in (0, 1, 3, 4)]
    assert sent(api, bodies[2]) == sent(api, bodies[3])
    assert "what was said before" in heard[3]
    assert "what was said before" not in heard[2]
    assert [step.model for step in steps] == ["m"] * 4
    assert all(step.response_id for step in steps)
    assert steps[2].usage.cached_tokens == 7
    assert len({step.request.tools_digest for step in steps if step.request}) == 1


async def test_a_view_that_was_sent_without_images_and_thinking_says_so() -> None:
    async with asking("chat") as one:
        tool_agent = ToolAgent(one.model, [look], backoff=AT_ONCE)
        async with verified(tool_agent, journal=MemoryJournal()) as conversations:
            chat = conversations["c"]
            refusal = Status(400, {"type": "invalid_request_error", "message": "no `tool_result`"})
            one.server.replies.extend((refusal, refusal, Answer(["ok"])))
            image = "https://example.org/a.png"
            turn = await chat.send("A", images=[ImageContent(url=image)])
            await turn.reply()

            (step,) = await chat.steps()
            assert step.request is not None
            assert step.request.is_plain
            assert await told("chat", chat, step) == sent("chat", one.server.bodies[-1])


class Held:
    """A model that stops while it is asked, until the test lets it go on."""

    model = "held"
    parameters: ClassVar[Mapping[str, object]] = {"temperature": 1}

    def __init__(self, error: Exception | None = None) -> None:
        self.requests: list[ModelRequest] = []
        self.is_asked = anyio.Event()
        self.error = error

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        self.requests.append(request)
        await write("half")
        self.is_asked.set()
        if self.error is not None:
            raise self.error
        await anyio.sleep_forever()
        raise AssertionError


async def _only_step(chat: Conversation, model: Held) -> Step:
    (step,) = await chat.steps()
    (request,) = model.requests
    assert step.request == request_of(model, request)
    assert step.view_seq is not None
    assert list((await chat.at(step.view_seq)).view) == list(request.view)
    assert step.model == "held"
    assert step.usage.latency_s >= 0
    return step


@pytest.mark.parametrize("way", ["cancel", "interrupt", "rollback"])
async def test_a_step_that_is_interrupted_names_what_the_model_was_asked(way: str) -> None:
    model = Held()
    answers = ScriptedModel(lambda _: "ok")

    @agent
    async def asks(turn: TurnContext) -> None:
        request = ModelRequest(turn.view)
        if turn.message.content == "A":
            await turn.ask(model, request)
        await turn.say((await answers.respond(request, turn.writer())).text)

    async with verified(asks, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        await model.is_asked.wait()
        if way == "cancel":
            await turn.cancel()
        else:
            await (await chat.send("B", on_overlap=way)).reply()  # type: ignore[arg-type]
        await turn.end()

        step = await _only_step(chat, model)
        assert (step.outcome, step.turn_id) == ("interrupted", turn.turn_id)
        assert way != "rollback" or all(
            event.turn_id != turn.turn_id for event in await chat.view()
        )


async def test_a_step_that_fails_names_what_the_model_was_asked() -> None:
    model = Held(ModelError("held", "no such model"))
    async with verified(ToolAgent(model, [look]), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        assert (await turn.end()).outcome == "failed"

        step = await _only_step(chat, model)
        assert step.outcome == "failed"
        assert step.request is not None
        without_tools = request_of(model, ModelRequest(View.from_events([])))
        assert step.request.tools_digest != without_tools.tools_digest


async def test_an_agent_that_does_not_ask_through_its_turn_is_exempt_and_says_so() -> None:
    @agent
    async def alone(turn: TurnContext) -> None:
        await turn.say("ok", usage=TokenUsage(input_tokens=1, model="own"))

    async with verified(alone, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).reply()
        (step,) = await chat.steps()
        assert (step.view_seq, step.request, step.model) == (None, None, "own")


async def test_an_agent_that_asks_by_itself_may_name_the_view() -> None:
    @agent
    async def by_itself(turn: TurnContext) -> None:
        view = turn.view
        await turn.note_request(StepRequest(view_seq=view.seq, model="own"))
        await turn.remind("the view is longer by now")
        await turn.finish_step(TokenUsage())
        await turn.finish_step(TokenUsage())

    async with verified(by_itself, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        steps = await chat.steps()
        assert [step.view_seq for step in steps] == [2, None]
        assert len((await chat.at(2)).view) == 1


def test_digests_are_equal_for_equal_tools_and_settings_and_for_no_others() -> None:
    def made(description: str, **schema: str) -> ToolSpec:
        return ToolSpec(
            "look", description, FrozenObject({"type": "object", "properties": {"at": schema}})
        )

    def digests(*tools: ToolSpec, **settings: object) -> tuple[str | None, str | None]:
        model = Held()
        model.parameters = settings  # type: ignore[misc]
        found = request_of(model, ModelRequest(View.from_events([]), tools))
        return found.tools_digest, found.parameters_digest

    first = digests(made("Look.", type="string"), temperature=1, top_p=0.5)
    assert digests(made("Look.", type="string"), top_p=0.5, temperature=1) == first
    for others in (
        digests(made("Look!", type="string"), temperature=1),
        digests(made("Look.", type="integer"), temperature=2),
        digests(),
    ):
        assert others[0] != first[0]
        assert others[1] != first[1]


def test_a_step_that_an_older_version_wrote_can_be_read() -> None:
    event = decode_event(
        b'{"kind":"step_finished","id":"e1","timestamp":"2025-01-01T00:00:01Z","turn_id":"t",'
        b'"usage":{"input_tokens":3}}'
    )
    assert isinstance(event, StepFinishedEvent)
    assert event.request is None
