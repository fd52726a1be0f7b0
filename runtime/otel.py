"""OpenTelemetry for actors: spans and metrics. Needs the extra `otel`.

1. It owns no actor. The runtime calls it when a message is sent, and when a handler begins and
   ends.
2. It promises one span per handler: for an ask, a child of the asker's span; for a tell, a span in
   a trace of its own, linked to the sender's. If the handler fails, the span carries the error.
   Messages that a handler sends continue from its span. It also promises metrics: how long
   handlers take, how many failed, how many messages wait, how many dead letters there are, how
   late the event loop is.
3. It does not promise a span per message of a batch: a batch is one span, linked as its last
   message.
4. It runs between handlers, in the loop. The exporter's own thread reads the gauges, and may see
   counts that are a moment old.
5. Only the spans and metrics that the exporter has sent survive a crash.

An error of a sampler or of a span processor costs the span and a line in the log. OpenTelemetry
lets it out at the place that begins or ends the span, where it would end an actor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import WeakSet

try:
    from opentelemetry import context as otel_context
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
except ImportError as missing:
    raise ImportError(
        "spans and metrics need the packages of OpenTelemetry, which are not installed; install "
        "turnkeeper[otel]"
    ) from missing

from ._actor import Actor
from ._hooks import Hooks
from ._lateness import LATE_BOUNDS_S
from ._logger import logger
from ._runtime import Runtime, cells_of

__all__ = ["begin_span", "end_span", "instrument", "observe"]

_NAME: Final = "turnkeeper.runtime"
_LOOKED_AT_EVERY_S: Final = 0.1

_observed: Final[WeakSet[Runtime]] = WeakSet()


def instrument(
    runtime: Runtime,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> None:
    """Report a runtime to OpenTelemetry from now on. Default: the global providers."""
    tracing = _OtelTracing(
        trace.get_tracer(_NAME, tracer_provider=tracer_provider),
        metrics.get_meter(_NAME, meter_provider=meter_provider),
        runtime.ports.monotonic,
    )
    runtime._system.tracing = tracing  # noqa: SLF001 - same package
    observe(runtime, meter_provider=meter_provider)


def observe(runtime: Runtime, *, meter_provider: MeterProvider | None = None) -> None:
    """Report the metrics of a runtime that cost its handlers nothing; a second call does nothing.

    They are the waiting messages, the actors, the dead letters, and how late the event loop runs a
    function that is due ten times a second.
    """
    if runtime in _observed:
        return
    _observed.add(runtime)
    system = runtime._system  # noqa: SLF001 - same package
    root = runtime._root  # noqa: SLF001 - same package
    meter = metrics.get_meter(_NAME, meter_provider=meter_provider)
    lateness = meter.create_histogram(
        "turnkeeper.loop.lateness",
        unit="s",
        description="How late the event loop runs what is due.",
        explicit_bucket_boundaries_advisory=LATE_BOUNDS_S,
    )

    def look(due: float) -> None:
        lateness.record(max(0.0, system.now() - due))
        look_later()

    def look_later() -> None:
        due = system.now() + _LOOKED_AT_EVERY_S
        system.clock.call_later(_LOOKED_AT_EVERY_S, partial(look, due))

    if system.is_open:
        look_later()
    else:
        system.when_open.append(look_later)

    def waiting(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(sum(cell.depth for cell in cells_of(root)))

    def active(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(sum(1 for _ in cells_of(root)))

    def dead_letters(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(runtime.dead_letters.count)

    meter.create_observable_gauge("turnkeeper.messages.waiting", [waiting])
    meter.create_observable_gauge("turnkeeper.actors", [active])
    meter.create_observable_counter("turnkeeper.dead_letters", [dead_letters])


# Any: attributes are of several types of OpenTelemetry's own.
def begin_span(
    tracer: trace.Tracer,
    name: str,
    *,
    parent: otel_context.Context | None,
    kind: SpanKind,
    attributes: Mapping[str, Any],
    links: Sequence[Link] = (),
) -> Span:
    """Begin a span; if that fails, return one that is not recorded, in its parent's place."""
    try:
        return tracer.start_span(
            name, context=parent, kind=kind, attributes=attributes, links=links
        )
    except Exception as error:  # noqa: BLE001 - any: a processor is the application's
        logger.warning("span not recorded", span=name, error=type(error).__name__)
        return trace.NonRecordingSpan(trace.get_current_span(parent).get_span_context())


def end_span(span: Span) -> None:
    """End a span. An error of a processor is logged, since what the span tells of has happened."""
    try:
        span.end()
    except Exception as error:  # noqa: BLE001 - as above
        logger.warning("span not processed", error=type(error).__name__)


class _OpenSpan(NamedTuple):
    actor_id: int
    span: Span
    token: Token[otel_context.Context]
    began: float
    kind: str


# In the actor's own context, as an actor need not be hashable. It handles one message at a time, so
# it has one span at most. An actor that it spawns meanwhile begins with a copy, which is not its.
_open_span: ContextVar[_OpenSpan | None] = ContextVar("turnkeeper_open_span", default=None)


class _OtelTracing:
    """The running handlers, with their spans."""

    def __init__(
        self, tracer: trace.Tracer, meter: metrics.Meter, now: Callable[[], float]
    ) -> None:
        self._tracer = tracer
        self._now = now
        self._duration = meter.create_histogram("turnkeeper.handler.duration", unit="s")
        self._failures = meter.create_counter("turnkeeper.handler.failures")

    def sent(self) -> object:
        return trace.get_current_span().get_span_context()

    def enter(self, actor: Hooks, message: object, trace_: object, *, is_ask: bool) -> None:
        assert isinstance(actor, Actor), "the runtime runs actors only"
        sender = trace_ if isinstance(trace_, trace.SpanContext) else trace.INVALID_SPAN_CONTEXT
        parent = otel_context.Context()
        links: list[Link] = []
        if sender.is_valid and is_ask:
            parent = trace.set_span_in_context(trace.NonRecordingSpan(sender), parent)
        elif sender.is_valid:
            links.append(Link(sender))
        kind = type(actor).__name__
        span = begin_span(
            self._tracer,
            f"{kind} {type(message).__name__}",
            parent=parent,
            kind=SpanKind.SERVER if is_ask else SpanKind.CONSUMER,
            links=links,
            attributes={"turnkeeper.actor": actor.context.name},
        )
        token = otel_context.attach(trace.set_span_in_context(span))
        _open_span.set(_OpenSpan(id(actor), span, token, self._now(), kind))

    def leave(self, actor: Hooks, error: BaseException | None) -> None:
        found = _open_span.get()
        if found is None or found.actor_id != id(actor):
            return
        _open_span.set(None)
        _, span, token, began, kind = found
        attributes = {"turnkeeper.actor.class": kind}
        if error is not None:
            # An error whose text cannot be made has its type in the status.
            with suppress(Exception):
                span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            self._failures.add(1, attributes)
        self._duration.record(self._now() - began, attributes)
        end_span(span)
        otel_context.detach(token)
