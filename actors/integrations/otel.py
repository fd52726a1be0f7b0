"""OpenTelemetry for conversations: spans and metrics. Needs `turnkeeper[otel]`.

    instrument(conversations)

Call it once; call it before entering the conversations to see their recovery too. It promises:

1. There is one span for each `send`, until the chat message is durable. In that span, or linked to
   it, there is one for each run of the agent on the turn; in a run's span, one for each attempt of
   a model call, each tool call and each commit. Spans that agents and tools begin are inside these.
2. No span and no metric holds message content, arguments, results, or the text of an error: only
   ids, names, numbers and kinds.
3. The names are those of the OpenTelemetry semantic conventions, version 1.41.0, as far as these
   have one, and begin with `turnkeeper.` otherwise.
4. An error of a sampler or a span processor costs spans, and never a message or a turn.

It makes no spans for HTTP requests: use the application's own instrumentation for these. The span
of `send` is a child of its caller's span. A message that was sent in another process, or before
this one began, has no span here, and its turn begins a new trace.

The watcher runs in the event loop and never waits; the exporter's threads read the gauges. Spans
that were not exported are lost with the process; the log has the facts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from turnkeeper.runtime import Runtime

from ..agents.watcher import NoteCall, NoteFailure, NoteResponse, NoteSent
from ..conversations.conversations import Conversations
from ..core.commands import Sent
from ..core.turn_table import RunningTurn
from ..errors import InvalidInput
from ..events import (
    ActionEvent,
    LoggedEvent,
    MessageQueuedEvent,
    StepRequest,
    TurnEndedEvent,
    UserMessageEvent,
)
from ..models.base import Model, ModelResponse

try:
    from opentelemetry import context as otel_context
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider

    from turnkeeper.runtime.otel import begin_span, end_span, observe
except ImportError as error:
    raise ImportError(
        "spans and metrics need the packages of OpenTelemetry, which are not installed; install "
        "turnkeeper[otel]"
    ) from error

__all__ = ["SEMANTIC_CONVENTIONS", "instrument"]

SEMANTIC_CONVENTIONS: Final = "1.41.0"
"""The version of the conventions whose names are used: the last one with `gen_ai`, which then moved
to a repository of its own that has no release yet."""

_SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/{SEMANTIC_CONVENTIONS}"
_NAME: Final = "turnkeeper.actors"
_SENDINGS_MAX: Final = 10_000
_SECONDS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24,
                   20.48, 40.96, 81.92)  # fmt: skip
_TOKENS: Final = tuple(4**power for power in range(14))

_Attributes = dict[str, str | bool | int | float]


def instrument(
    conversations: Conversations,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> None:
    """Report conversations and their runtime to OpenTelemetry; by default, to global providers.

    Call it once for each `Conversations`, before entering it. Raises `InvalidInput`
    if it is given anything else, such as an agent.
    """
    if not isinstance(conversations, Conversations):
        raise InvalidInput(f"instrument takes Conversations, and not {conversations!r}")
    tracer = trace.get_tracer(_NAME, tracer_provider=tracer_provider, schema_url=_SCHEMA_URL)
    meter = metrics.get_meter(_NAME, meter_provider=meter_provider, schema_url=_SCHEMA_URL)
    watcher = _OtelWatcher(tracer, meter, meter_provider)

    def active(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(conversations.active)

    def readers(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(conversations.readers)

    def queued(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(sum(list(watcher.queued.values())))

    meter.create_observable_gauge(
        "turnkeeper.conversations.active",
        [active],
        description="Conversations with an owner in this process.",
    )
    meter.create_observable_gauge(
        "turnkeeper.readers", [readers], description="Live readers of events."
    )
    meter.create_observable_gauge(
        "turnkeeper.queue.messages", [queued], description="Chat messages that wait for their turn."
    )
    conversations.watch(watcher)


@dataclass(slots=True)
class _Sending:
    """A chat message, from `send` until a turn answers it."""

    context: otel_context.Context
    """The sender's context, with the span of `send`."""
    overlapped: str | None = None
    queued_at: float | None = None

    @property
    def span_context(self) -> trace.SpanContext:
        return trace.get_current_span(self.context).get_span_context()


@dataclass(slots=True)
class _Run:
    """A run of an agent on a turn, with its span."""

    turn_id: str
    span: Span
    known: set[str]
    """The chat messages whose spans this one is a child of or linked to."""
    outcome: str = "unfinished"
    error: str | None = None


class _OtelWatcher:
    """A `Watcher` that makes spans and records metrics."""

    def __init__(
        self, tracer: trace.Tracer, meter: metrics.Meter, meter_provider: MeterProvider | None
    ) -> None:
        self.queued: dict[str, int] = {}
        """How many chat messages wait, by conversation; only conversations with waiting
        messages."""
        self._tracer = tracer
        self._meter_provider = meter_provider
        self._now: Callable[[], float] = lambda: 0.0
        self._sendings: OrderedDict[tuple[str, str], _Sending] = OrderedDict()
        self._runs: dict[str, _Run] = {}
        self._operations = meter.create_histogram(
            "gen_ai.client.operation.duration",
            unit="s",
            description="How long model calls and tools take.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Tokens of model calls.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )
        self._turns = meter.create_histogram(
            "turnkeeper.turn.duration",
            unit="s",
            description="How long runs of agents take, by outcome and policy.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._waits = meter.create_histogram(
            "turnkeeper.queue.wait",
            unit="s",
            description="How long chat messages wait for their turn.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._commits = meter.create_histogram(
            "turnkeeper.commit.duration",
            unit="s",
            description="How long writes to the journal take.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._commit_sizes = meter.create_histogram(
            "turnkeeper.commit.events", unit="{event}", description="Events of one write."
        )

    def opened(self, runtime: Runtime) -> None:
        self._now = runtime.ports.loop_time
        observe(runtime, meter_provider=self._meter_provider)

    def owned(self, conversation_id: str, queued: int) -> None:
        if queued:
            self.queued[conversation_id] = queued
        else:
            self.queued.pop(conversation_id, None)

    def released(self, conversation_id: str) -> None:
        self.queued.pop(conversation_id, None)

    # --- chat messages, and the turns that answer them -------------------------------------------

    @contextmanager
    def sending(self, conversation_id: str, message_id: str) -> Iterator[NoteSent]:
        attributes: _Attributes = {
            "gen_ai.conversation.id": conversation_id,
            "turnkeeper.message.id": message_id,
        }
        with self._span("send", SpanKind.PRODUCER, attributes) as span:
            own = _Sending(trace.set_span_in_context(span))
            key = (conversation_id, message_id)
            sending = self._sendings.setdefault(key, own)
            is_first = sending is own
            if len(self._sendings) > _SENDINGS_MAX:
                self._sendings.popitem(last=False)

            def note(sent: Sent) -> None:
                span.set_attribute("turnkeeper.turn.id", sent.turn_id)
                span.set_attribute("turnkeeper.message.is_duplicate", sent.is_duplicate)
                if sent.overlapped is not None:
                    span.set_attribute("turnkeeper.on_overlap", sent.overlapped)
                    sending.overlapped = sent.overlapped
                if sent.is_duplicate and is_first:
                    self._sendings.pop(key, None)  # its turn may have ended long ago

            try:
                yield note
            except BaseException:
                if is_first:
                    self._sendings.pop(key, None)
                raise

    def committed(self, conversation_id: str, events: Sequence[LoggedEvent]) -> None:
        run = self._runs.get(conversation_id)
        for _, event in events:
            match event:
                case MessageQueuedEvent(message_id=message_id):
                    sending = self._sendings.get((conversation_id, message_id))
                    if sending is not None and sending.queued_at is None:
                        sending.queued_at = event.timestamp.timestamp()
                case UserMessageEvent(message_id=str(message_id)):
                    sending = self._sendings.get((conversation_id, message_id))
                    if sending is None:
                        continue
                    if sending.queued_at is not None:
                        self._waits.record(event.timestamp.timestamp() - sending.queued_at)
                        sending.queued_at = None
                    if run is not None and event.turn_id == run.turn_id:
                        self._link(run, message_id, sending)  # the message joins the running turn
                case TurnEndedEvent() if run is not None and event.turn_id == run.turn_id:
                    run.outcome = event.outcome
                case _:
                    pass

    def _link(self, run: _Run, message_id: str, sending: _Sending) -> None:
        if message_id not in run.known:
            run.known.add(message_id)
            run.span.add_link(sending.span_context)

    @contextmanager
    def running(
        self, conversation_id: str, turn: RunningTurn, agent: object
    ) -> Iterator[NoteFailure]:
        sendings = {
            message.message_id: self._sendings[conversation_id, message.message_id]
            for message in turn.messages
            if message.message_id is not None
            and (conversation_id, message.message_id) in self._sendings
        }
        parent = next(iter(sendings.values()), None)
        name = _name_of(agent)
        attributes: _Attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": name,
            "gen_ai.conversation.id": conversation_id,
            "turnkeeper.turn.id": turn.turn_id,
        }
        links = [Link(sending.span_context) for sending in [*sendings.values()][1:]]
        context = otel_context.Context() if parent is None else parent.context
        began = self._now()
        with self._span(
            f"invoke_agent {name}", SpanKind.INTERNAL, attributes, parent=context, links=links
        ) as span:
            run = self._runs[conversation_id] = _Run(turn.turn_id, span, set(sendings))

            def note(error: BaseException) -> None:
                run.error = type(error).__name__

            try:
                yield note
            finally:
                if self._runs.get(conversation_id) is run:
                    del self._runs[conversation_id]
                on_overlap = None if parent is None else parent.overlapped
                self._end_run(conversation_id, run, on_overlap, self._now() - began)

    def _end_run(
        self, conversation_id: str, run: _Run, on_overlap: str | None, seconds: float
    ) -> None:
        attributes: _Attributes = {"turnkeeper.turn.outcome": run.outcome}
        if on_overlap is not None:
            attributes["turnkeeper.on_overlap"] = on_overlap
        run.span.set_attributes(attributes)
        if run.outcome == "failed":
            _fail(run.span, run.error or "failed")
            attributes["error.type"] = run.error or "failed"
        self._turns.record(seconds, attributes)
        if run.outcome != "unfinished":
            for message_id in run.known:
                self._sendings.pop((conversation_id, message_id), None)

    # --- commits, model calls, tools -------------------------------------------------------------

    @contextmanager
    def committing(self, conversation_id: str, events: int) -> Iterator[None]:
        run = self._runs.get(conversation_id)
        began = self._now()
        attributes: _Attributes = {}
        try:
            if run is None:
                yield  # no turn runs: the span of `send` shows the time
            else:
                parent = trace.set_span_in_context(run.span)
                found: _Attributes = {
                    "gen_ai.conversation.id": conversation_id,
                    "turnkeeper.commit.events": events,
                }
                with self._span("commit", SpanKind.CLIENT, found, parent=parent):
                    yield
        except Exception as error:
            attributes["error.type"] = type(error).__name__
            raise
        finally:
            self._commits.record(self._now() - began, attributes)
            self._commit_sizes.record(events)

    @contextmanager
    def asking(
        self, conversation_id: str, model: Model, request: StepRequest
    ) -> Iterator[NoteResponse]:
        provider = getattr(model, "provider", None)
        facts: _Attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": provider if isinstance(provider, str) else type(model).__name__,
        }
        if request.model is not None:
            facts["gen_ai.request.model"] = request.model
        attributes = {
            **facts,
            "gen_ai.conversation.id": conversation_id,
            "turnkeeper.view.seq": request.view_seq,
        }
        name = " ".join(("chat", *filter(None, [request.model])))
        with self._timed(facts), self._span(name, SpanKind.CLIENT, attributes) as span:

            def note(response: ModelResponse) -> None:
                self._note_response(span, facts, response)

            yield note

    def _note_response(self, span: Span, facts: _Attributes, response: ModelResponse) -> None:
        usage = response.usage
        if usage.model is not None:
            span.set_attribute("gen_ai.response.model", usage.model)
            facts["gen_ai.response.model"] = usage.model
        if response.provider_response_id is not None:
            span.set_attribute("gen_ai.response.id", response.provider_response_id)
        counts = {
            "gen_ai.usage.input_tokens": usage.input_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.cache_creation.input_tokens": usage.cache_written_tokens,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        }
        if usage.input_tokens or usage.output_tokens:
            span.set_attributes({name: count for name, count in counts.items() if count})
            self._tokens.record(usage.input_tokens, {**facts, "gen_ai.token.type": "input"})
            self._tokens.record(usage.output_tokens, {**facts, "gen_ai.token.type": "output"})

    @contextmanager
    def calling(self, conversation_id: str, action: ActionEvent) -> Iterator[NoteCall]:
        facts: _Attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": action.tool_name,
        }
        attributes = {
            **facts,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": action.tool_call_id,
            "gen_ai.conversation.id": conversation_id,
        }
        name = f"execute_tool {action.tool_name}"
        with self._timed(facts), self._span(name, SpanKind.INTERNAL, attributes) as span:

            def note(kind: str) -> None:
                facts["error.type"] = kind
                _fail(span, kind)

            yield note

    @contextmanager
    def _timed(self, facts: Mapping[str, str | bool | int | float]) -> Iterator[None]:
        began = self._now()
        error_type: _Attributes = {}
        try:
            yield
        except Exception as error:
            error_type["error.type"] = type(error).__name__
            raise
        finally:
            self._operations.record(self._now() - began, {**facts, **error_type})

    @contextmanager
    def _span(
        self,
        name: str,
        kind: SpanKind,
        attributes: _Attributes,
        *,
        parent: otel_context.Context | None = None,
        links: Sequence[Link] = (),
    ) -> Iterator[Span]:
        """Make a span the current one, without the text of an error, which may be chat text."""
        span = begin_span(
            self._tracer, name, parent=parent, kind=kind, attributes=attributes, links=links
        )
        token = otel_context.attach(trace.set_span_in_context(span, parent))
        try:
            yield span
        except BaseException as error:
            _note_error(span, error)
            raise
        finally:
            end_span(span)
            otel_context.detach(token)


def _name_of(agent: object) -> str:
    """Return the agent's own name, or else the name of its function or class."""
    name = getattr(agent, "name", None)
    if not isinstance(name, str):
        name = getattr(getattr(agent, "function", None), "__name__", None)
    return name if isinstance(name, str) else type(agent).__name__


def _note_error(span: Span, error: BaseException) -> None:
    """Mark the span as failed, or as cancelled, which does not count as a failure."""
    if isinstance(error, Exception):
        _fail(span, type(error).__name__)
    else:
        span.set_attribute("turnkeeper.is_cancelled", value=True)


def _fail(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))
