"""Conversations under OpenTelemetry, with its own in-memory exporters, on both backends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Literal

import anyio
import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.actors.conversations.worlds import HeldAgent
from tests.runtime.test_otel import BrokenProcessor
from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    ModelResponse,
    ScriptedModel,
    TokenUsage,
    ToolAgent,
    ToolCall,
    TurnContext,
    agent,
    tool,
)
from turnkeeper.actors.errors import InvalidInput, TurnInProgress
from turnkeeper.actors.integrations.otel import SEMANTIC_CONVENTIONS, instrument
from turnkeeper.actors.models.base import ModelUnavailable
from turnkeeper.runtime import Unavailable

pytestmark = pytest.mark.anyio

SECRET = "the word nobody may see"


class World:
    """Providers of one test, and what they exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider(metric_readers=[self.reader])
        self.tracer = self.tracers.get_tracer("application")

    def instrument(self, conversations: Conversations) -> Conversations:
        instrument(conversations, tracer_provider=self.tracers, meter_provider=self.meters)
        return conversations

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span

    def points(self) -> Iterator[tuple[str, dict[str, object], float]]:
        """Each metric with its attributes, and its value or how often it was recorded."""
        found = self.reader.get_metrics_data()
        assert found is not None
        for resource in found.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        count = point.value if isinstance(point, NumberDataPoint) else point.count
                        yield metric.name, dict(point.attributes or {}), count

    def value(self, name: str, **attributes: object) -> float:
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        return sum(
            count
            for found, has, count in self.points()
            if found == name and wanted.items() <= has.items()
        )


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.meters.shutdown()


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def attribute(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {})[name]


class Orders:
    """A model with a name and a provider, that calls a tool once."""

    model = "orders-1"
    provider = "example"

    def __init__(self) -> None:
        self.scripted = ScriptedModel(
            [
                ModelResponse(
                    f"{SECRET} 2",
                    [ToolCall("look_up", {"order": SECRET})],
                    TokenUsage(input_tokens=12, output_tokens=5, model="orders-1-0613"),
                    provider_response_id="resp_1",
                ),
                ModelResponse(f"{SECRET} 3", usage=TokenUsage(input_tokens=30, output_tokens=7)),
            ]
        )
        self.respond = self.scripted.respond


async def test_a_request_a_turn_its_steps_its_tools_and_what_they_start_are_one_trace(
    world: World,
) -> None:
    inner = world.tracer

    @tool
    def look_up(order: str) -> str:
        """Look up an order."""
        with inner.start_as_current_span("SELECT"):
            return f"{order} {SECRET}"

    async with world.instrument(
        Conversations(ToolAgent(Orders(), [look_up]), journal=MemoryJournal())
    ) as conversations:
        with world.tracer.start_as_current_span("POST /chat", kind=SpanKind.SERVER):
            turn = await conversations["alice"].send(SECRET, message_id="m1")
        await turn.reply()

    request, send, run = (
        world.span(name) for name in ("POST /chat", "send", "invoke_agent ToolAgent")
    )
    calling, answering = world.spans("chat orders-1")
    looking, select = world.span("execute_tool look_up"), world.span("SELECT")
    assert parent_of(send) == id_of(request)
    assert parent_of(run) == id_of(send)
    assert parent_of(calling) == parent_of(answering) == parent_of(looking) == id_of(run)
    assert parent_of(select) == id_of(looking)
    assert {parent_of(commit) for commit in world.spans("commit")} == {id_of(run)}
    assert {
        span.context.trace_id for span in world.exporter.get_finished_spans() if span.context
    } == {request.context.trace_id if request.context else 0}
    assert dict(run.attributes or {}) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "ToolAgent",
        "gen_ai.conversation.id": "alice",
        "turnkeeper.turn.id": turn.turn_id,
        "turnkeeper.turn.outcome": "completed",
    }
    assert dict(calling.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "example",
        "gen_ai.request.model": "orders-1",
        "gen_ai.response.model": "orders-1-0613",
        "gen_ai.response.id": "resp_1",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.conversation.id": "alice",
        "turnkeeper.view.seq": 2,
    }
    assert calling.kind == SpanKind.CLIENT
    assert attribute(looking, "gen_ai.operation.name") == "execute_tool"
    assert attribute(looking, "gen_ai.tool.name") == "look_up"
    assert attribute(send, "turnkeeper.message.id") == "m1"
    scope = run.instrumentation_scope
    assert scope is not None
    assert scope.schema_url == f"https://opentelemetry.io/schemas/{SEMANTIC_CONVENTIONS}"


async def test_no_span_and_no_metric_has_a_word_of_what_was_said_or_of_an_error(
    world: World,
) -> None:
    @tool
    def look_up(order: str) -> str:
        """Look up an order."""
        raise ValueError(f"no {order}, {SECRET}")

    async def failing(_: TurnContext) -> str:
        raise KeyError(SECRET)

    for each in (ToolAgent(Orders(), [look_up]), agent(failing)):
        async with world.instrument(Conversations(each, journal=MemoryJournal())) as conversations:
            await (await conversations["alice"].send(SECRET)).end()

    exported = [span.to_json() for span in world.exporter.get_finished_spans()]
    assert any("execute_tool look_up" in text for text in exported)
    data = world.reader.get_metrics_data()
    assert data is not None
    assert SECRET not in json.dumps(exported) + data.to_json()
    looking, failed = world.span("execute_tool look_up"), world.span("invoke_agent failing")
    assert attribute(looking, "error.type") == "tool_error"
    assert looking.status.status_code == failed.status.status_code == StatusCode.ERROR
    assert attribute(failed, "error.type") == "KeyError"
    assert attribute(failed, "turnkeeper.turn.outcome") == "failed"


async def test_a_failed_attempt_of_a_model_is_a_span_of_its_own(world: World) -> None:
    model = ScriptedModel([ModelUnavailable("it", "busy"), "Here."])
    async with world.instrument(
        Conversations(ToolAgent(model), journal=MemoryJournal())
    ) as conversations:
        await (await conversations["alice"].send("hello")).reply()
    failed, answered = world.spans("chat")
    assert attribute(failed, "error.type") == "ModelUnavailable"
    assert failed.status.status_code == StatusCode.ERROR
    assert not failed.events
    assert answered.status.status_code == StatusCode.UNSET


@pytest.mark.parametrize(
    ("policy", "outcomes"),
    [
        ("queue", ["completed", "completed"]),
        ("interrupt", ["interrupted", "completed"]),
        ("rollback", ["rolled_back", "completed"]),
        ("steer", ["completed", "completed"]),  # too late: this agent begins no further step
        ("reject", ["completed"]),
    ],
)
async def test_runs_tell_their_outcome_and_the_policy_that_brought_them(
    world: World, policy: str, outcomes: list[str]
) -> None:
    held = HeldAgent()
    held.hold("tool one")
    async with world.instrument(Conversations(held, journal=MemoryJournal())) as conversations:
        alice = conversations["alice"]
        first = await alice.send("tool one")
        await held.reached["tool one"].wait()
        try:
            second = await alice.send("two", on_overlap=policy)  # type: ignore[arg-type]
        except TurnInProgress:
            assert policy == "reject"
            second = first
        waiting = world.value("turnkeeper.queue.messages")
        held.release("tool one")
        await first.end()
        await second.end()
        assert world.value("turnkeeper.queue.messages") == 0
    runs = sorted(world.spans("invoke_agent HeldAgent"), key=lambda span: span.start_time or 0)
    assert [attribute(run, "turnkeeper.turn.outcome") for run in runs] == outcomes
    if policy == "reject":
        (refused,) = [
            span for span in world.spans("send") if span.status.status_code == StatusCode.ERROR
        ]
        assert attribute(refused, "error.type") == "TurnInProgress"
        return
    overlapping = world.spans("send")[1]
    assert attribute(overlapping, "turnkeeper.on_overlap") == policy
    assert waiting == (policy in {"queue", "steer"})
    assert world.value("turnkeeper.queue.wait") == waiting
    assert parent_of(runs[1]) == id_of(overlapping)
    assert attribute(runs[1], "turnkeeper.on_overlap") == policy
    assert world.value("turnkeeper.turn.duration", turnkeeper__on_overlap=policy) == 1


async def test_a_message_that_joins_a_turn_is_linked_to_it(world: World) -> None:
    begun, go_on = anyio.Event(), anyio.Event()

    @agent
    async def patient(turn: TurnContext) -> str:
        begun.set()
        await go_on.wait()
        await turn.begin_step()
        return turn.message.content

    async with world.instrument(Conversations(patient, journal=MemoryJournal())) as conversations:
        alice = conversations["alice"]
        first = await alice.send("one")
        await begun.wait()
        await alice.send("two", on_overlap="steer")
        go_on.set()
        assert await first.reply() == "two"
    (run,) = world.spans("invoke_agent patient")
    one, two = world.spans("send")
    assert parent_of(run) == id_of(one)
    assert [link.context.span_id for link in run.links] == [id_of(two)]


async def test_a_turn_that_waits_for_a_confirmation_has_a_run_before_it_and_one_after(
    world: World,
) -> None:
    @tool
    def look_up(order: str) -> str:
        """Look up an order."""
        return order

    async with world.instrument(
        Conversations(ToolAgent(Orders(), [look_up], confirm="always"), journal=MemoryJournal())
    ) as conversations:
        alice = conversations["alice"]
        turn = await alice.send("hello")
        async for item in turn:
            if getattr(getattr(item, "event", None), "kind", "") == "confirmation_requested":
                await alice.confirm()
    before, after = world.spans("invoke_agent ToolAgent")
    assert attribute(before, "turnkeeper.turn.outcome") == "unfinished"
    assert attribute(after, "turnkeeper.turn.outcome") == "completed"
    assert parent_of(before) == parent_of(after) == id_of(world.span("send"))


async def test_a_turn_goes_on_in_its_senders_trace_with_its_baggage_and_no_other(
    world: World,
) -> None:
    seen: list[object] = []

    @agent
    async def look(_: TurnContext) -> None:
        seen.append(baggage.get_baggage("tenant"))

    async with world.instrument(Conversations(look, journal=MemoryJournal())) as conversations:
        alice = conversations["alice"]
        token = context.attach(baggage.set_baggage("tenant", "acme"))
        await (await alice.send("one")).end()
        context.detach(token)
        await (await alice.send("two")).end()
        # A retry that finds the turn done begins nothing, and is not kept.
        await (await alice.send("three", message_id="m3")).end()
        await alice.send("three", message_id="m3")
    assert seen == ["acme", None, None]
    assert not trace.get_current_span().get_span_context().is_valid
    first, second, third, again = world.spans("send")
    assert attribute(again, "turnkeeper.message.is_duplicate") is True
    assert [parent_of(run) for run in world.spans("invoke_agent look")] == [
        id_of(first),
        id_of(second),
        id_of(third),
    ]


async def test_metrics_tell_tokens_durations_commits_and_readers(
    world: World,
) -> None:
    async with world.instrument(
        Conversations(ToolAgent(Orders(), []), journal=MemoryJournal())
    ) as conversations:
        await (await conversations["alice"].send("hello")).reply()
        following = conversations["alice"].events(after=0)
        await anext(following)
        assert world.value("turnkeeper.readers") == 1
        assert world.value("turnkeeper.conversations.active") == 1
        assert world.value("turnkeeper.actors") > 0
    chats = {"gen_ai__operation__name": "chat", "gen_ai__provider__name": "example"}
    assert world.value("gen_ai.client.token.usage", gen_ai__token__type="input", **chats) == 2
    assert world.value("gen_ai.client.operation.duration", **chats) == 2
    assert world.value("gen_ai.client.operation.duration", gen_ai__tool__name="look_up") == 1
    assert world.value("turnkeeper.turn.duration", turnkeeper__turn__outcome="completed") == 1
    assert world.value("turnkeeper.commit.duration") == world.value("turnkeeper.commit.events") > 3


async def test_a_commit_that_fails_is_counted_with_its_kind(world: World) -> None:
    class Broken(MemoryJournal):
        is_broken = False

        async def append(self, *args: object, **kwargs: object) -> Sequence[int]:
            if self.is_broken:
                raise Unavailable(SECRET)
            return await super().append(*args, **kwargs)  # type: ignore[arg-type]

    journal = Broken()
    async with world.instrument(Conversations(HeldAgent(), journal=journal)) as conversations:
        await (await conversations["alice"].send("hello")).end()
        journal.is_broken = True
        with pytest.raises(Unavailable):
            await conversations["alice"].send("again")
        journal.is_broken = False
    assert world.value("turnkeeper.commit.duration", error__type="Unavailable") >= 1
    assert attribute(world.spans("send")[1], "error.type") == "Unavailable"


@pytest.mark.parametrize("at", ["start", "end"])
async def test_an_error_of_a_span_processor_costs_no_message_and_no_turn(
    world: World, at: Literal["start", "end"]
) -> None:
    """It ended the owner in the middle of a commit, and so each turn as interrupted."""
    world.tracers.add_span_processor(BrokenProcessor(at))

    @tool
    def look_up(order: str) -> str:
        return order

    answers = ToolAgent(Orders(), [look_up])
    async with world.instrument(Conversations(answers, journal=MemoryJournal())) as conversations:
        turn = await conversations["alice"].send("hello")
        assert await turn.reply() == f"{SECRET} 3"
    assert bool(world.spans("send")) == (at == "end")
    assert world.value("turnkeeper.commit.duration") >= 1


def test_what_is_not_conversations_is_refused() -> None:
    with pytest.raises(InvalidInput, match="instrument takes Conversations, and not"):
        instrument(HeldAgent())  # type: ignore[arg-type]
