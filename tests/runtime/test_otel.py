"""OpenTelemetry, with its own in-memory exporters."""

from dataclasses import dataclass
from typing import Literal

import anyio
import anyio.lowlevel
import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from turnkeeper.runtime import Actor, ActorFailed, Backoff, Ref, Runtime, Supervision
from turnkeeper.runtime.otel import instrument, observe
from turnkeeper.runtime.testing import VirtualClock, settle

from .actors import Add, Counter, Fail, Get, Run, SyncCounter
from .test_runtime import Ask, Batching

pytestmark = pytest.mark.anyio

AT_ONCE = Supervision(backoff=Backoff(first_s=0.0))


class World:
    """A provider for one test, and what it exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider(metric_readers=[self.reader])

    def instrument(self, runtime: Runtime) -> None:
        instrument(runtime, tracer_provider=self.tracers, meter_provider=self.meters)

    def spans(self) -> dict[str, object]:
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def metrics(self) -> dict[str, object]:
        found = self.reader.get_metrics_data()
        assert found is not None
        return {
            metric.name: metric.data.data_points[0]
            for resource in found.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def world() -> World:
    return World()


@dataclass
class Equal(Counter):
    """Equal to all of its class, and so not hashable."""

    def __post_init__(self) -> None:
        super().__init__()


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


async def test_actors_need_not_be_hashable_nor_their_errors_readable(world: World) -> None:
    async with Runtime(supervision=AT_ONCE) as runtime:
        world.instrument(runtime)
        ref = runtime.spawn(Equal, name="equal")
        assert await ref.ask(Get()) == 0
        with pytest.raises(ActorFailed):
            await ref.ask(Fail(Unreadable()))

        async def spawn(actor: Actor) -> object:
            child: Ref = actor.context.spawn(Equal, name="child")
            return await child.ask(Get())

        assert await ref.ask(Run(spawn)) == 0
    names = [span.name for span in world.exporter.get_finished_spans()]
    assert names == ["Equal Get", "Equal Fail", "Equal Get", "Equal Run"]


class BrokenProcessor(SpanProcessor):
    """A span processor that raises at each span's start or end."""

    def __init__(self, at: Literal["start", "end"]) -> None:
        self._at = at

    def on_start(self, *_: object, **__: object) -> None:
        if self._at == "start":
            raise ZeroDivisionError

    def on_end(self, span: ReadableSpan) -> None:
        if self._at == "end":
            raise ZeroDivisionError


@pytest.mark.parametrize("at", ["start", "end"])
async def test_an_error_of_a_span_processor_ends_no_actor(
    world: World, at: Literal["start", "end"], caplog: pytest.LogCaptureFixture
) -> None:
    """OpenTelemetry raises it at the begin or the end of the span, between a message and its reply.

    The actor failed: its message was lost, or had taken effect.
    """
    world.tracers.add_span_processor(BrokenProcessor(at))
    async with Runtime() as runtime:
        world.instrument(runtime)
        counter = runtime.spawn(Counter, name="counter")
        await counter.tell(Add(2))
        assert await counter.ask(Get()) == 2
        assert not trace.get_current_span().get_span_context().is_valid
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("kind", [Counter, SyncCounter])
async def test_an_asks_span_is_a_child_of_its_askers_through_actors(
    world: World, kind: type[Actor]
) -> None:
    async with Runtime() as runtime:
        world.instrument(runtime)
        inner: Ref = runtime.spawn(kind, name="inner")
        outer = runtime.spawn(Counter, name="outer")

        async def ask_inner(_: Actor) -> object:
            await anyio.lowlevel.checkpoint()
            return await inner.ask(Get())

        with world.tracers.get_tracer("test").start_as_current_span("request"):
            await outer.ask(Run(ask_inner))

    spans = world.spans()
    request, run, get = spans["request"], spans["Counter Run"], spans[f"{kind.__name__} Get"]
    assert run.parent.span_id == request.context.span_id  # type: ignore[attr-defined]
    assert get.parent.span_id == run.context.span_id  # type: ignore[attr-defined]
    assert get.attributes["turnkeeper.actor"] == "inner"  # type: ignore[attr-defined]


async def test_a_tells_span_is_linked_to_its_sender_and_has_a_trace_of_its_own(
    world: World,
) -> None:
    async with Runtime() as runtime:
        world.instrument(runtime)
        ref = runtime.spawn(Counter, name="counter")
        with world.tracers.get_tracer("test").start_as_current_span("request"):
            await ref.tell(Add())
    spans = world.spans()
    request, add = spans["request"], spans["Counter Add"]
    assert add.parent is None  # type: ignore[attr-defined]
    assert add.links[0].context.span_id == request.context.span_id  # type: ignore[attr-defined]
    assert add.context.trace_id != request.context.trace_id  # type: ignore[attr-defined]


async def test_a_failure_is_on_its_span_and_no_span_leaks_into_the_next_message(
    world: World,
) -> None:
    seen: list[bool] = []

    async def look(_: Actor) -> None:
        seen.append(trace.get_current_span().get_span_context().is_valid)

    async with Runtime(supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await ref.ask(Get())
        world.instrument(runtime)
        with pytest.raises(ActorFailed):
            await ref.ask(Fail(KeyError("why")))
        runtime._system.tracing = None
        await ref.ask(Run(look))
    span = world.spans()["Counter Fail"]
    assert span.status.description == "KeyError"  # type: ignore[attr-defined]
    assert span.events[0].name == "exception"  # type: ignore[attr-defined]
    assert seen == [False]


async def test_a_batch_is_one_span(world: World) -> None:
    async with Runtime() as runtime:
        world.instrument(runtime)
        ref = runtime.spawn(Batching, name="batching")
        await ref.ask(Ask("answer"))
    assert list(world.spans()) == ["Batching Ask"]


async def test_metrics_tell_durations_failures_and_what_waits(world: World) -> None:
    async with Runtime(supervision=AT_ONCE) as runtime:
        world.instrument(runtime)
        ref = runtime.spawn(Counter, name="counter")
        await ref.ask(Get())
        await ref.tell(Fail(ValueError()))
        await settle()
        metrics = world.metrics()
        assert metrics["turnkeeper.handler.duration"].count == 2  # type: ignore[attr-defined]
        assert metrics["turnkeeper.handler.failures"].value == 1  # type: ignore[attr-defined]
        assert metrics["turnkeeper.actors"].value == 1  # type: ignore[attr-defined]
        assert metrics["turnkeeper.messages.waiting"].value == 0  # type: ignore[attr-defined]
        assert metrics["turnkeeper.dead_letters"].value == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_open", [False, True])
async def test_how_late_the_loop_is_is_looked_at_ten_times_a_second(
    world: World, is_open: bool
) -> None:
    clock = VirtualClock()
    runtime = Runtime(ports=clock.ports())
    if not is_open:
        world.instrument(runtime)
    async with runtime:
        if is_open:
            world.instrument(runtime)
        await clock.advance(0.25)
        in_time = world.metrics()["turnkeeper.loop.lateness"]
        clock._now += 3.5  # the loop stood still, and was due after 0.05 seconds
        await clock.advance(0.0)
        late = world.metrics()["turnkeeper.loop.lateness"]
    assert (in_time.count, in_time.sum) == (2, 0.0)  # type: ignore[attr-defined]
    assert (late.count, round(late.sum, 6)) == (3, 3.45)  # type: ignore[attr-defined]


async def test_a_runtime_is_observed_once(world: World) -> None:
    async with Runtime() as runtime:
        observe(runtime, meter_provider=world.meters)
        world.instrument(runtime)
        runtime.spawn(Counter, name="counter")
        assert world.metrics()["turnkeeper.actors"].value == 1  # type: ignore[attr-defined]


def test_the_core_does_not_import_opentelemetry() -> None:
    import subprocess
    import sys

    code = "import sys, turnkeeper.runtime; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
