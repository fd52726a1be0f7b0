"""The loop that people expect: ask the model, run the calls it makes, ask again, until it answers.

    agent = ToolAgent(model, [look_up, refund], confirm=["refund"])

It promises:

1. it is a function of its turn's log, so it can be taken up again at any step: after a pause, a
   confirmation, a restart. A call that was open then runs if it has not been started or its tool
   is idempotent; any other is answered as one that may have happened;
2. nothing goes on without end: model calls, attempts at one, condensations, empty responses and
   circles each have a limit, and what passes it ends the turn with a detail that says so;
3. a failing model is asked again after a growing delay, as long as `attempts_max` and `retry_s_max`
   let it; the text of each attempt begins anew. What another attempt cannot mend fails the turn;
4. a call that needs a confirmation is never run without, with whatever came beside it.

It does not promise that a tool runs once: see `Tools`. It runs in the task of its turn, holds
nothing between turns, and may serve many conversations; an interrupt cancels it wherever it waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import ClassVar, Literal, TypeAlias

import structlog

from turnkeeper.runtime import Backoff, Refused

from .agents import ToolCall, ToolResult, TurnContext
from .errors import InvalidInput
from .events import ActionEvent, UserMessageEvent
from .models import (
    ContextOverflow,
    MalformedHistory,
    Model,
    ModelRequest,
    ModelResponse,
    ModelUnavailable,
)
from .stuck import StuckDetector
from .tools import ToolFunction, Tools, call_function, describe_failure
from .view import View

__all__ = ["ConfirmationPolicy", "EmptyResponse", "TooManyIterations", "ToolAgent"]

ConfirmationPolicy: TypeAlias = (
    Literal["never", "always"] | Collection[str] | Callable[[ToolCall], bool | Awaitable[bool]]
)
"""Which calls the user is asked about: none, all, those of some tools, those a function picks."""

_log = structlog.get_logger(__name__)


class TooManyIterations(Refused):
    """The turn has taken as many model calls as it may; what they did is in the log."""

    def __init__(self, max_iterations: int) -> None:
        super().__init__(
            f"no answer after {max_iterations} model calls in this turn; what they did is in the "
            "log; send another chat message to go on, or allow more with max_iterations"
        )
        self.max_iterations = max_iterations


class EmptyResponse(Refused):
    """The model gave neither text nor calls, though it was told so."""

    def __init__(self) -> None:
        super().__init__(
            "the model gave neither text nor calls, and the same again when it was told so; "
            "nothing was said; send another chat message"
        )


class ToolAgent:
    """An agent that answers with a model and tools."""

    is_resumable: ClassVar[bool] = True

    def __init__(
        self,
        model: Model,
        tools: Tools | Sequence[ToolFunction] = (),
        *,
        confirm: ConfirmationPolicy = "never",
        max_iterations: int = 50,
        attempts_max: int = 6,
        retry_s_max: float = 120.0,
        backoff: Backoff = Backoff(first_s=0.5, max_s=30.0, jitter=0.5),
        condensations_max: int = 3,
        stuck: StuckDetector = StuckDetector(),
    ) -> None:
        """Functions for `tools` are short for `Tools(*functions)`. Raises `InvalidInput`.

        `max_iterations`: model calls in one turn. `attempts_max`, `retry_s_max`: how often a model
        call that fails is tried, and the seconds after which no other try begins. `backoff`: the
        wait before each, to which what the provider asks for is added. `condensations_max`: how
        often one step may condense the view because the model finds it too long.
        """
        for name, limit in (
            ("max_iterations", max_iterations),
            ("attempts_max", attempts_max),
        ):
            if limit < 1:
                raise InvalidInput(f"{name} is {limit}; it takes 1 or more")
        self.model = model
        self.tools = tools if isinstance(tools, Tools) else Tools(*tools)
        self.max_iterations = max_iterations
        self.attempts_max = attempts_max
        self.retry_s_max = retry_s_max
        self.backoff = backoff
        self.condensations_max = condensations_max
        self.stuck = stuck
        self.confirm = _checked(confirm, self.tools)

    async def run(self, turn: TurnContext) -> None:
        """Answer the turn, or take it up again where it stands."""
        await _Run(self, turn).finish_turn()

    async def needs_confirmation(self, call: ToolCall, turn: TurnContext) -> bool:
        """Whether the user is to be asked before this call runs. One that cannot run needs none."""
        if self.confirm == "never":
            return False
        if self.tools.find_fault(call.name, call.arguments, call.malformed_arguments) is not None:
            return False
        if self.confirm == "always":
            return True
        if not callable(self.confirm):
            return call.name in self.confirm
        try:
            # Fail-closed: whatever is not a plain no is asked about.
            return await call_function(turn.ports, self.confirm, call) is not False
        except BaseException as error:  # noqa: BLE001 - what is not its own is raised again
            describe_failure(error)
            _log.warning(
                "confirm failed",
                conversation=turn.conversation_id,
                turn=turn.turn_id,
                error=type(error).__name__,
                exc_info=error,
            )
            return True


class _Run:
    """One run of the agent on a turn. What it counts is of this run, unless it is in the log."""

    def __init__(self, agent: ToolAgent, turn: TurnContext) -> None:
        self._agent = agent
        self._turn = turn
        self._run_call = agent.tools.runner(turn)
        self._has_repaired = False
        self._was_empty = False

    async def finish_turn(self) -> None:
        turn = self._turn
        await self._answer_open_calls()
        if turn.has_answered:
            return
        while (response := await self._next_response()) is not None:
            if response.calls:
                self._was_empty = False
                await self._call_tools(response)
            elif response.text.strip():
                await turn.say(response.text, thinking=response.thinking, usage=response.usage)
                return
            else:
                await self._tell_of_empty_response(response)

    async def _answer_open_calls(self) -> None:
        """Give every call that an earlier run left open its result."""
        turn, tools = self._turn, self._agent.tools

        async def answer(action: ActionEvent) -> ToolResult:
            if turn.is_unstarted(action.tool_call_id) or tools.is_idempotent(action.tool_name):
                return await self._run_call(action)
            said = "no result: the process stopped while the call ran; it may have happened"
            return ToolResult(said, is_error=True, may_have_happened=True)

        await turn.run_calls(tuple(turn.open_calls.values()), answer)

    async def _next_response(self) -> ModelResponse | None:
        """What the model answers, in as many attempts as it may take; None: the turn is stuck."""
        agent, turn = self._agent, self._turn
        failures = condensations = 0
        began = turn.ports.monotonic()
        while True:
            # Before each attempt, for a pause or a chat message may have come during the last.
            view = await self._begin_step()
            if view is None:
                return None
            try:
                request = ModelRequest(view, agent.tools.specs)
                return await agent.model.respond(request, turn.writer())
            except ModelUnavailable as error:
                failures += 1
                await self._wait_for_model(error, failures, began)
            except ContextOverflow:
                condensations += 1
                if condensations > agent.condensations_max or not await turn.condense():
                    raise
            except MalformedHistory as error:
                if self._has_repaired:
                    raise
                self._has_repaired = True
                await turn.repair_history(str(error))

    async def _begin_step(self) -> View | None:
        """The view for the next model call; None where the agent goes round in circles."""
        agent, turn = self._agent, self._turn
        view = await turn.begin_step()
        if turn.steps >= agent.max_iterations:
            raise TooManyIterations(agent.max_iterations)
        circle = agent.stuck.find_circle(view)
        if circle is None:
            return view
        if circle.is_stuck:
            await turn.end_as_stuck(circle.detail)
            return None
        newest = view[-1]
        if isinstance(newest, UserMessageEvent) and newest.is_reminder:
            return view  # it has been told, before an attempt that failed or a restart
        await turn.remind(f"You are going round in circles: {circle.detail}. Try another way.")
        return turn.view

    async def _wait_for_model(self, error: ModelUnavailable, failures: int, began: float) -> None:
        """Wait before another attempt; raises the error where there is to be none."""
        agent, ports = self._agent, self._turn.ports
        # Added, not the larger of the two: those whom a provider told the same differ by it.
        wait_s = agent.backoff.delay_s(failures - 1, ports.random) + (error.retry_after_s or 0.0)
        ends = ports.monotonic() + wait_s - began
        if failures >= agent.attempts_max or ends > agent.retry_s_max:
            raise error
        _log.warning(
            "model call failed",
            conversation=self._turn.conversation_id,
            turn=self._turn.turn_id,
            failures=failures,
            wait_s=wait_s,
            error=str(error),
        )
        await ports.sleep(wait_s)

    async def _call_tools(self, response: ModelResponse) -> None:
        turn = self._turn
        needs_confirmation = False
        for call in response.calls:
            needs_confirmation |= await self._agent.needs_confirmation(call, turn)
        actions = await turn.propose_calls(
            response.calls,
            text=response.text,
            thinking=response.thinking,
            usage=response.usage,
            needs_confirmation=needs_confirmation,
        )
        await turn.run_calls(actions, self._run_call)

    async def _tell_of_empty_response(self, response: ModelResponse) -> None:
        turn = self._turn
        await turn.finish_step(response.usage)
        if self._was_empty:
            raise EmptyResponse
        self._was_empty = True
        await turn.remind("Your last response was empty. Answer, or call a tool.")


def _checked(confirm: ConfirmationPolicy, tools: Tools) -> ConfirmationPolicy:
    """The same, with names that are those of tools: a misspelt one would never be asked about."""
    if isinstance(confirm, str):
        if confirm not in ("never", "always"):
            raise InvalidInput(f'confirm is {confirm!r}; it takes "never", "always" or tool names')
        return confirm
    if callable(confirm):
        return confirm
    unknown = [name for name in confirm if name not in tools.names]
    if unknown:
        known = ", ".join(tools.names) or "none"
        raise InvalidInput(f"confirm names {', '.join(unknown)}; the tools are: {known}")
    return frozenset(confirm)
