"""An `Agent` of pydantic-ai behind a conversation. Needs `turnkeeper[pydantic-ai]`.

    support = Agent("openai:gpt-5.2", tools=[look_up, refund])
    agent = PydanticAgent(support, confirm=["refund"])
    async with Conversations(agent, journal=SQLiteJournal("chats.db")) as conversations:

The agent keeps its loop, its tools, its output types and its capabilities; the conversation keeps
the history. `PydanticAgent` promises:

1. The history of a run is the view of its conversation, so it was all committed before. Messages
that pydantic-ai adds during a run (about an answer that it refuses, or content that a tool returns
beside its result) are logged before the model sees them.
2. Each request to the model is a step of the turn, with its usage. The calls of a response are in
the log before one of them runs, and each result as soon as its call ends. A call that has a result
in the log is not made again.
3. A call of a tool with `requires_approval=True`, or of a tool that `confirm` names, never runs
   without the user's yes, and neither do the other calls of its response.
4. A turn can resume at any step: after a pause, a confirmation or a restart. A call without a
result then runs if it had not started or if `idempotent` names its tool. Any other gets the result
that it may have happened.

It does not promise that a tool runs only once. It does not keep a run's state in memory across
resumptions: counts of retries and `usage_limits` begin anew. A call that a tool defers while it
runs (`ApprovalRequired`, `CallDeferred`) gets the result that it was not run.

Like pydantic-ai, this runs on asyncio only. A run is in the task of its turn and keeps nothing
between turns; one `PydanticAgent` may serve many conversations. An interrupt cancels a run wherever
it waits. The log survives a crash, and the next run begins from the log.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Generic, TypeVar

import anyio
from pydantic_core import to_json

from turnkeeper.runtime import Ports, Refused

from ..agents.tool_agent import TooManyIterations
from ..agents.turn_context import TurnContext
from ..core.view import View
from ..errors import InvalidInput
from ..events import (
    RESULT_CLASSES,
    ActionEvent,
    LoggedEvent,
    ObservationEvent,
    ObservationLikeEvent,
    TokenUsage,
    UserRejectEvent,
)
from ..models.base import ModelRequest as StepRequest
from ..models.base import ModelResponse as StepResponse
from ..tool_calls import ToolResult
from ..values.text import check_bool, check_number

try:
    from pydantic_ai import (
        AgentRunResult,
        ApprovalRequired,
        CallDeferred,
        DeferredToolRequests,
        DeferredToolResults,
        ModelRetry,
        RunContext,
        ToolDefinition,
        ToolDenied,
        UsageLimits,
    )
    from pydantic_ai.agent import AbstractAgent
    from pydantic_ai.capabilities import (
        AbstractCapability,
        CapabilityOrdering,
        ReinjectSystemPrompt,
    )
    from pydantic_ai.exceptions import (
        SkipModelRequest,
        ToolFailed,
        ToolFailedError,
        ToolRetryError,
    )
    from pydantic_ai.messages import (
        ModelMessage,
        ModelRequest,
        ModelRequestPart,
        ModelResponse,
        PartDeltaEvent,
        PartStartEvent,
        RetryFeedbackPart,
        SystemPromptPart,
        TextPart,
        TextPartDelta,
        ToolCallPart,
        ToolReturnPart,
        UserPromptPart,
    )
    from pydantic_ai.models import (
        CompletedStreamedResponse,
        Model,
        ModelRequestContext,
        ModelRequestParameters,
        StreamedResponse,
    )
    from pydantic_ai.models.wrapper import WrapperModel
    from pydantic_ai.settings import ModelSettings

    from ._pydantic_ai_messages import (
        content_of,
        described,
        kept_whole,
        newest_calls,
        specs_of,
        text_of,
        to_model_messages,
        told_by,
        tool_call,
    )
except ImportError as error:
    raise ImportError(
        "agents of pydantic-ai need the package pydantic-ai-slim, 2.68 or later, which is not "
        "installed; install turnkeeper[pydantic-ai]"
    ) from error

__all__ = ["ExternalCalls", "PydanticAgent", "as_text"]

DepsT = TypeVar("DepsT")
OutputT = TypeVar("OutputT")

_OUTPUT_MODES_IN_TEXT = ("native", "prompted")
"""The output modes in which a model's text is JSON, so its pieces are not shown to readers."""


class ExternalCalls(Refused):
    """The model called tools that run outside the agent, which a conversation cannot wait for."""

    def __init__(self, tool_names: Sequence[str]) -> None:
        super().__init__(
            f"calls of {', '.join(tool_names)} are to be run outside of the agent, and a "
            "conversation takes no results from there; nothing was run; give the agent tools that "
            "it runs itself"
        )
        self.tool_names = tuple(tool_names)


class _ViewChanged(Exception):
    """The view has events that this run of the agent did not add; the next run begins with them."""


def as_text(output: object) -> str:
    """Return an output as a chat message: a text unchanged, anything else as JSON."""
    return output if isinstance(output, str) else to_json(output, inf_nan_mode="strings").decode()


class PydanticAgent(Generic[DepsT, OutputT]):
    """Runs a pydantic-ai agent as the agent of conversations."""

    is_resumable: ClassVar[bool] = True

    def __init__(
        self,
        agent: AbstractAgent[DepsT, OutputT],
        *,
        deps: Callable[[TurnContext], DepsT | Awaitable[DepsT]] | None = None,
        confirm: Collection[str] = (),
        idempotent: Collection[str] = (),
        max_iterations: int = 50,
        usage_limits: UsageLimits | None = None,
        streams: bool = True,
        say: Callable[[OutputT], str] = as_text,
    ) -> None:
        """Raises `InvalidInput`.

        `deps`: makes the agent's dependencies, once for each run of a turn; async or not.
        `confirm`: tools whose calls the user must confirm, besides those that require an approval.
        `idempotent`: tools whose calls may run again after a crash. `max_iterations`: requests to
        the model in one turn, over all its runs. `streams`: ask the model to stream, so that those
        who follow the turn see its text as it comes. `say`: makes the chat message of an output.
        """
        check_number("max_iterations", max_iterations, "1 or more", least=1)
        check_bool("streams", streams)
        for name, given in (("confirm", confirm), ("idempotent", idempotent)):
            if isinstance(given, str):
                raise InvalidInput(f"{name} is {given!r}; it takes a collection of tool names")
        self.agent = agent
        self.deps = deps
        self.confirm = frozenset(confirm)
        self.idempotent = frozenset(idempotent)
        self.max_iterations = max_iterations
        self.usage_limits = usage_limits
        self.streams = streams
        self.say = say

    async def run(self, turn: TurnContext) -> None:
        """Answer the turn, or resume it where its log ends."""
        # The public way to tell the backends apart without importing either of them.
        if not anyio.get_cancelled_exc_class().__module__.startswith("asyncio"):
            raise InvalidInput("pydantic-ai runs on asyncio alone; serve this agent there")
        if turn.has_answered:
            return
        deps: Any = None  # the type that the agent takes without `deps`
        if self.deps is not None:
            made = self.deps(turn)
            deps = await made if inspect.isawaitable(made) else made
        await _Run(self, turn).finish_turn(deps)


class _Run(AbstractCapability[DepsT], Generic[DepsT, OutputT]):
    """One run of a turn: the capability through which pydantic-ai does its work in the log."""

    def __init__(self, settings: PydanticAgent[DepsT, OutputT], turn: TurnContext) -> None:
        self._settings = settings
        self._turn = turn
        self._actions: dict[str, ActionEvent] = {}
        """The calls of the newest response, by the ids that the model gave them."""
        self._left_open = frozenset(
            call_id for call_id in turn.open_calls if not turn.is_unstarted(call_id)
        )
        """Open calls that may have started in an earlier run."""
        self._begun = turn.view
        """The view that the current run of the agent began with."""
        self._own: set[str] = set()
        """The events that this run has added to it."""
        self._is_logged = True
        """True if the newest request in the agent's history was built from the log."""
        self._unsaid: StepResponse | None = None
        """The newest response, if it has no calls and is not in the log yet."""

    def get_ordering(self) -> CapabilityOrdering:
        """Wrap all other capabilities, so that their changes are logged too."""
        return CapabilityOrdering(position="outermost")

    async def finish_turn(self, deps: DepsT) -> None:
        settings, turn = self._settings, self._turn
        while True:
            self._begun, self._own = turn.view, set()
            history = to_model_messages(self._begun)
            self._actions = newest_calls(self._begun)
            self._is_logged = isinstance(history[-1], ModelRequest)
            self._unsaid = None
            try:
                result = await settings.agent.run(
                    message_history=history,
                    deps=deps,
                    conversation_id=turn.conversation_id,
                    usage_limits=settings.usage_limits,
                    capabilities=[self, ReinjectSystemPrompt()],
                )
            except _ViewChanged:
                continue
            await self._say(result)
            return

    async def _say(self, result: AgentRunResult[OutputT]) -> None:
        """Log the output of a run, which ends the turn."""
        turn, output, unsaid = self._turn, result.output, self._unsaid
        if isinstance(output, DeferredToolRequests):
            raise ExternalCalls([call.tool_name for call in (*output.calls, *output.approvals)])
        newest = result.all_messages()[-1]
        if isinstance(newest, ModelRequest):
            await self._answer_calls(newest.parts)
        if output is None:
            if unsaid is not None:
                await turn.finish_step(unsaid.usage)
            return
        await turn.say(
            self._settings.say(output),
            thinking=() if unsaid is None else unsaid.thinking,
            usage=None if unsaid is None else unsaid.usage,
            ends_turn=True,
        )

    # --- requests to the model -------------------------------------------------------------------

    async def wrap_model_request(
        self,
        ctx: RunContext[DepsT],
        *,
        request_context: ModelRequestContext,
        handler: Callable[[ModelRequestContext], Awaitable[ModelResponse]],
    ) -> ModelResponse:
        turn = self._turn
        if not self._is_logged:
            await self._log_request(ctx.messages[-1])
        self._is_logged = False
        view = await self._begin_step()
        parameters = request_context.model_request_parameters
        asked = _Asked(request_context, handler, turn.ports)
        step = await turn.ask(asked, StepRequest(view, specs_of(parameters)))
        response = asked.response
        outputs = {tool.name for tool in parameters.output_tools}
        calls = [part for part in response.tool_calls if part.tool_name not in outputs]
        if calls:
            await self._propose(calls, step, parameters)
        else:
            self._unsaid = step
        return response

    def get_wrapper_model(self, model: Model) -> Model | None:
        return _StreamingModel(model, self._turn) if self._settings.streams else None

    async def _begin_step(self) -> View:
        """Begin a step; raise `_ViewChanged` if something has joined or left the view."""
        settings, turn = self._settings, self._turn
        view = await turn.begin_step()
        if turn.steps >= settings.max_iterations:
            raise TooManyIterations(turn.conversation_id, turn.turn_id, settings.max_iterations)
        if not view.is_continuation_of(self._begun) or any(
            event.id not in self._own for event in view[len(self._begun) :]
        ):
            raise _ViewChanged
        return view

    async def _propose(
        self, calls: Sequence[ToolCallPart], step: StepResponse, parameters: ModelRequestParameters
    ) -> None:
        """Log the calls of a response; the run ends here if the user must confirm one of them."""
        asks = self._settings.confirm | {
            tool.name for tool in parameters.function_tools if tool.kind == "unapproved"
        }
        actions = await self._turn.propose_calls(
            [tool_call(part) for part in calls],
            text=step.text,
            thinking=step.thinking,
            usage=step.usage,
            needs_confirmation=any(part.tool_name in asks for part in calls),
        )
        self._own.update(action.id for action in actions)
        self._actions = {
            part.tool_call_id: action for part, action in zip(calls, actions, strict=True)
        }

    async def _log_request(self, request: ModelMessage) -> None:
        """Log messages that the agent itself adds to its history, before the model sees them."""
        if not isinstance(request, ModelRequest):
            return
        await self._answer_calls(request.parts)
        notes = list(self._notes(request.parts))
        if self._unsaid is not None:
            refused, self._unsaid = self._unsaid, None
            await self._turn.finish_step(refused.usage)
            arguments = (json.dumps(dict(call.arguments)) for call in refused.calls)
            said = refused.text or "\n".join(arguments)
            notes.append(f"The response that was refused:\n{said}")
        if notes:
            self._keep(await self._turn.remind("\n\n".join(notes)))

    def _notes(self, parts: Sequence[ModelRequestPart]) -> Iterator[str]:
        """Yield the texts of a request, except the results of calls in the log."""
        for part in parts:
            match part:
                case RetryFeedbackPart():
                    yield text_of(part)
                case ToolReturnPart() if part.tool_call_id not in self._actions:
                    yield text_of(part)
                case UserPromptPart(content=str(text)) | SystemPromptPart(content=text):
                    yield text
                case UserPromptPart(content=content):
                    yield from map(described, content)
                case _:
                    pass

    def _keep(self, *logged: LoggedEvent) -> None:
        self._own.update(one.event.id for one in logged)

    # --- calls -----------------------------------------------------------------------------------

    async def wrap_tool_execute(
        self,
        ctx: RunContext[DepsT],  # noqa: ARG002 - the hook's signature
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,  # noqa: ARG002 - as above
        args: dict[str, Any],
        handler: Callable[[dict[str, Any]], Awaitable[Any]],
    ) -> Any:  # noqa: ANN401 - a tool's value, as the agent has it
        action = self._actions.get(call.tool_call_id)
        if action is None:
            return await handler(args)  # of a tool that runs tools of its own
        result = self._result_of(action)
        if result is not None:
            if isinstance(result, ObservationEvent) and result.is_error:
                raise ToolFailed(result.content)
            return result.content
        value: object = None
        failure: Exception | None = None

        async def run(action: ActionEvent) -> ToolResult:
            nonlocal value, failure
            if (
                action.tool_call_id in self._left_open
                and action.tool_name not in self._settings.idempotent
            ):
                value = "no result: the process stopped while the call ran; it may have happened"
                return ToolResult(value, is_error=True, may_have_happened=True)
            try:
                value = await handler(args)
                return ToolResult(content_of(call.tool_name, value))
            except (ApprovalRequired, CallDeferred) as deferred:
                said = (
                    f"not run: the tool raised {type(deferred).__name__}, and a call that has "
                    "begun cannot wait here"
                )
                failure = ToolFailed(said)
                return ToolResult(said, is_error=True)
            except (ToolRetryError, ToolFailedError, ModelRetry, ToolFailed) as told:
                failure = told
                return ToolResult(told_by(told), is_error=True)
            except Exception as error:
                failure = error
                raise

        self._keep(*await self._turn.run_calls([action], run))
        if failure is not None:
            raise failure
        return value

    async def handle_deferred_tool_calls(
        self,
        ctx: RunContext[DepsT],  # noqa: ARG002 - the hook's signature
        *,
        requests: DeferredToolRequests,
    ) -> DeferredToolResults | None:
        """Answer the calls that the user was asked about; the log has them already."""
        results = DeferredToolResults()
        for call in requests.approvals:
            action = self._actions.get(call.tool_call_id)
            if action is None:
                continue
            result = self._result_of(action)
            call_id = action.tool_call_id
            if isinstance(result, UserRejectEvent):
                results.approvals[call.tool_call_id] = ToolDenied(result.content)
            elif self._turn.is_unstarted(call_id) or call_id in self._left_open:
                results.approvals[call.tool_call_id] = True
            else:
                said = "not run: it needs an approval, and the user was not asked for it"
                results.approvals[call.tool_call_id] = ToolDenied(said)
        return results

    async def _answer_calls(self, parts: Sequence[ModelRequestPart]) -> None:
        """Log results that the agent itself made: for a call that does not fit, or was skipped."""
        answers = {part.tool_call_id: part for part in parts if isinstance(part, ToolReturnPart)}
        unanswered = {
            action.tool_call_id: answers[call_id]
            for call_id, action in self._actions.items()
            if call_id in answers and action.tool_call_id in self._turn.open_calls
        }

        async def answer(action: ActionEvent) -> ToolResult:
            part = unanswered[action.tool_call_id]
            is_error = part.outcome in ("failed", "retried")
            return ToolResult(text_of(part), is_error=is_error)

        actions = [a for a in self._actions.values() if a.tool_call_id in unanswered]
        self._keep(*await self._turn.run_calls(actions, answer))

    def _result_of(self, action: ActionEvent) -> ObservationLikeEvent | None:
        """Return the result of a call of the newest response; None if the log does not have it."""
        for event in reversed(self._turn.view):
            if isinstance(event, RESULT_CLASSES) and event.tool_call_id == action.tool_call_id:
                return event
            if event.id == action.id:
                return None
        return None


class _Asked:
    """Presents a request of the agent as a `Model`, for `turn.ask`; keeps the whole response."""

    response: ModelResponse

    def __init__(
        self,
        context: ModelRequestContext,
        handler: Callable[[ModelRequestContext], Awaitable[ModelResponse]],
        ports: Ports,
    ) -> None:
        self.model = context.model.model_name
        self.provider = context.model.system
        self.parameters: Mapping[str, object] = dict(context.model_settings or {})
        self._context = context
        self._handler = handler
        self._ports = ports

    async def respond(
        self,
        request: StepRequest,  # noqa: ARG002 - the agent has made its own of the same view
        write: Callable[[str], Awaitable[None]],  # noqa: ARG002 - each attempt has a writer
    ) -> StepResponse:
        began = self._ports.loop_time()
        try:
            self.response = await self._handler(self._context)
        except SkipModelRequest as skipped:
            self.response = skipped.response
        response = self.response
        usage = response.usage
        outputs = {tool.name for tool in self._context.model_request_parameters.output_tools}
        return StepResponse(
            text=response.text or "",
            calls=[tool_call(part) for part in response.tool_calls],
            usage=TokenUsage(
                input_tokens=usage.input_tokens,
                output_tokens=usage.output_tokens,
                cached_tokens=usage.cache_read_tokens,
                cache_written_tokens=usage.cache_write_tokens,
                reasoning_tokens=usage.output_reasoning_tokens,
                cost=float(usage.cost or 0),
                latency_s=self._ports.loop_time() - began,
                model=response.model_name,
            ),
            thinking=kept_whole(response, outputs),
            provider_response_id=response.provider_response_id,
        )


class _StreamingModel(WrapperModel):
    """Asks its model to stream, and gives the text to readers that follow the turn."""

    def __init__(self, wrapped: Model, turn: TurnContext) -> None:
        super().__init__(wrapped)
        self._turn = turn

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        shows_text = model_request_parameters.output_mode not in _OUTPUT_MODES_IN_TEXT
        write = self._turn.writer()
        async with self.wrapped.request_stream(
            messages, model_settings, model_request_parameters
        ) as stream:
            async for event in stream:
                match event:
                    case PartStartEvent(part=TextPart(content=piece)) if piece and shows_text:
                        await write(piece)
                    case PartDeltaEvent(delta=TextPartDelta(content_delta=piece)) if shows_text:
                        await write(piece)
                    case _:
                        pass
        return stream.get()

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,  # noqa: ARG002 - given to no model here
    ) -> AsyncGenerator[StreamedResponse]:
        """Answer an agent that streams itself: it gets the events once the response is complete."""
        response = await self.request(messages, model_settings, model_request_parameters)
        yield CompletedStreamedResponse(
            response, model_request_parameters=model_request_parameters, replay_events=True
        )
