"""The usual agent loop: ask the model, run the calls it makes, ask again, until it answers.

    agent = ToolAgent(model, [look_up, refund], confirm=["refund"])

It promises:

1. The loop is a function of its turn's log, so it can resume at any step: after a pause, a
   confirmation or a restart. A call that was open then runs if it had not started or if its tool
   is idempotent; any other is answered as one that may have happened.
2. Everything that repeats has a limit: model calls, attempts at one, condensations, empty
   responses and circles. Passing a limit ends the turn with a detail that names it.
3. A model that fails is asked again after a growing delay, within `attempts_max` and
   `retry_s_max`. Each attempt starts its text over. An error that a retry cannot fix fails the
   turn.
4. A call that needs confirmation never runs without it, and neither do the calls beside it.

It does not promise that a tool runs only once: see `Tools`. The agent runs in the task of its turn,
keeps nothing between turns, and may serve many conversations. An interrupt cancels it wherever it
waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

from turnkeeper.runtime import Backoff, Refused

from ..core.stuck import SeenEvent, StuckDetector
from ..core.view import View
from ..errors import ContextTooLong, InvalidInput
from ..events import ActionEvent, AgentMessageEvent, UserMessageEvent
from ..log_lines import Foreseen, log_failure, log_unavailable
from ..models.base import (
    ContextOverflow,
    MalformedHistory,
    Model,
    ModelRequest,
    ModelResponse,
    ModelUnavailable,
)
from ..tool_calls import RISKS, Risk, ToolCall, ToolResult
from ..values.text import check_bool, check_number, refuse_class
from ..values.type_names import a_type
from .tools import AnyTool, Tools, call_function, describe_failure
from .turn_context import TurnContext

__all__ = [
    "BudgetSpent",
    "ConfirmRisky",
    "ConfirmationPolicy",
    "EmptyResponse",
    "TokensSpent",
    "TooManyIterations",
    "ToolAgent",
]

ConfirmationPolicy: TypeAlias = (
    Literal["never", "always"] | Collection[str] | Callable[[ToolCall], bool | Awaitable[bool]]
)
"""The calls that the user must confirm: none, all, those of some tools, those a function picks."""


@dataclass(frozen=True, slots=True)
class ConfirmRisky:
    """Asks the user about calls of this risk and above, and about those of unknown risk.

    Raises `InvalidInput` if `least` is no risk, or `unknown` no bool.
    """

    least: Risk = "high"
    unknown: bool = True
    """Ask about the calls of tools that declare no risk, too."""

    def __post_init__(self) -> None:
        if self.least not in RISKS:
            raise InvalidInput(f"least is {self.least!r}; it takes {', '.join(RISKS)}")
        check_bool("unknown", self.unknown)

    def __call__(self, call: ToolCall) -> bool:
        if call.risk is None:
            return self.unknown
        return RISKS.index(call.risk) >= RISKS.index(self.least)


class TooManyIterations(Foreseen, Refused):
    """The turn has used all its model calls; what they did is in the log."""

    def __init__(self, conversation_id: str, turn_id: str, max_iterations: int) -> None:
        super().__init__(
            f"no answer after {max_iterations} model calls in turn {turn_id} of conversation "
            f"{conversation_id}; what they did is in the log; send another chat message to go on, "
            "or allow more with max_iterations"
        )
        self.conversation_id = conversation_id
        self.turn_id = turn_id
        self.max_iterations = max_iterations


class BudgetSpent(Foreseen, Refused):
    """The conversation's model calls have cost as much as they may; the log has their results."""

    def __init__(self, conversation_id: str, total_cost: float, budget: float) -> None:
        super().__init__(
            f"the model calls of conversation {conversation_id} have cost {total_cost:g}, of a "
            f"budget of {budget:g}; no further call was made; send another chat message once the "
            "budget is larger"
        )
        self.conversation_id = conversation_id
        self.total_cost = total_cost
        self.budget = budget


class TokensSpent(Foreseen, Refused):
    """The conversation's model calls have used all the tokens they may; the log has the results."""

    def __init__(self, conversation_id: str, tokens: int, token_budget: int) -> None:
        super().__init__(
            f"the model calls of conversation {conversation_id} have used {tokens} tokens, of a "
            f"budget of {token_budget}; no further call was made; send another chat message once "
            "the budget is larger"
        )
        self.conversation_id = conversation_id
        self.tokens = tokens
        self.token_budget = token_budget


class EmptyResponse(Refused):
    """The model returned neither text nor calls, twice in a row."""

    def __init__(self, conversation_id: str, turn_id: str) -> None:
        super().__init__(
            "the model returned neither text nor calls, and again after it was told so, in turn "
            f"{turn_id} of conversation {conversation_id}; nothing was said; send another chat "
            "message"
        )
        self.conversation_id = conversation_id
        self.turn_id = turn_id


class ToolAgent:
    """An agent that answers with a model and tools."""

    is_resumable: ClassVar[bool] = True

    def __init__(
        self,
        model: Model,
        tools: Tools | Sequence[AnyTool] = (),
        *,
        confirm: ConfirmationPolicy = "never",
        max_iterations: int = 50,
        attempts_max: int = 6,
        retry_s_max: float = 120.0,
        backoff: Backoff = Backoff(first_s=0.5, max_s=30.0, jitter=0.5),
        condensations_max: int = 3,
        budget: float | None = None,
        token_budget: int | None = None,
        stuck: StuckDetector = StuckDetector(),
        show_author: bool = False,
    ) -> None:
        """Functions given as `tools` are short for `Tools(*functions)`. Raises `InvalidInput`.

        `confirm`: which calls wait for the user's confirmation. `stuck`: when an agent that repeats
        itself is stopped.
        `max_iterations`: model calls in one turn. `attempts_max`: attempts at one model call.
        `retry_s_max`: seconds after the first attempt, past which no other begins. `backoff`: the
        wait before each further attempt; the delay that the provider asks for is added to it.
        `condensations_max`: how often one step may condense the view because the model finds it
        too long. `budget`: the cost of all model calls of a conversation at which no further one is
        made; costs are counted if the model has prices. `token_budget`: the same for the tokens
        that the model has read and written. `show_author`: the model sees who sent each chat
        message, as its first words.
        """
        for name, limit in (
            ("max_iterations", max_iterations),
            ("attempts_max", attempts_max),
        ):
            check_number(name, limit, "1 or more", least=1)
        check_number("condensations_max", condensations_max, "0 or more", least=0)
        check_number("retry_s_max", retry_s_max, "seconds from 0 on", least=0)
        if budget is not None:
            check_number("budget", budget, "more than 0", above=0)
        if token_budget is not None:
            check_number("token_budget", token_budget, "1 or more", least=1)
        check_bool("show_author", show_author)
        refuse_class("model", model)
        if not callable(getattr(model, "respond", None)):
            raise InvalidInput(
                f"model is {model!r}, {a_type(model)}; it takes a model, such as "
                f'OpenAIChatModel("name") or AnthropicModel("name")'
            )
        if isinstance(tools, str) or not isinstance(tools, Tools | Iterable):
            raise InvalidInput(f"tools is {tools!r}; it takes a list of tools, or Tools")
        self.model = model
        self.tools = tools if isinstance(tools, Tools) else Tools(*tools)
        self.max_iterations = max_iterations
        self.attempts_max = attempts_max
        self.retry_s_max = retry_s_max
        self.backoff = backoff
        self.condensations_max = condensations_max
        self.budget = budget
        self.token_budget = token_budget
        self.stuck = stuck
        self.show_author = show_author
        self.confirm = _checked(confirm, self.tools)

    async def run(self, turn: TurnContext) -> None:
        """Answer the turn, or resume it where its log ends."""
        await _Run(self, turn).finish_turn()

    async def needs_confirmation(self, call: ToolCall, turn: TurnContext) -> bool:
        """True if the user must confirm this call. A call that cannot run is never asked about."""
        if self.confirm == "never":
            return False
        if self.tools.find_fault(call.name, call.arguments, call.malformed_arguments) is not None:
            return False
        if self.confirm == "always":
            return True
        if not callable(self.confirm):
            return call.name in self.confirm
        try:
            # Fail-closed: anything but a plain False asks the user.
            return await call_function(turn.ports, self.confirm, call) is not False
        except BaseException as error:  # noqa: BLE001 - describe_failure raises what is not its own
            describe_failure(error)
            log_failure(
                "confirm failed",
                error,
                conversation=turn.conversation_id,
                turn=turn.turn_id,
                tool=call.name,
            )
            return True


class _Run:
    """One run of the agent on a turn. Its counters cover this run; the rest is in the log."""

    def __init__(self, agent: ToolAgent, turn: TurnContext) -> None:
        self._agent = agent
        self._turn = turn
        self._run_call = agent.tools.runner(turn)
        self._has_repaired = False
        self._is_plain = False
        """Images and thinking are left out, because the provider refuses this history with them."""
        self._was_empty = False
        self._digested: dict[str, SeenEvent] = {}
        """The events that were looked at for circles, by their ids."""

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
                await turn.say(
                    response.text,
                    thinking=response.thinking,
                    usage=response.usage,
                    ends_turn=True,
                )
                return
            else:
                await self._tell_of_empty_response(response)

    async def _answer_open_calls(self) -> None:
        """Answer every call that an earlier run left open."""
        turn, tools = self._turn, self._agent.tools

        async def answer(action: ActionEvent) -> ToolResult:
            if turn.is_unstarted(action.tool_call_id) or tools.is_idempotent(action.tool_name):
                return await self._run_call(action)
            said = "no result: the process stopped while the call ran; it may have happened"
            return ToolResult(said, is_error=True, may_have_happened=True)

        await turn.run_calls(tuple(turn.open_calls.values()), answer)

    async def _next_response(self) -> ModelResponse | None:
        """Ask the model, with retries; None if the turn has ended as stuck."""
        agent, turn = self._agent, self._turn
        failures = condensations = 0
        began = turn.ports.loop_time()
        while True:
            # Before each attempt: a pause or a chat message may have come during the last one.
            view = await self._begin_step()
            if view is None:
                return None
            try:
                request = ModelRequest(
                    view,
                    agent.tools.specs,
                    is_plain=self._is_plain,
                    show_author=agent.show_author,
                )
                return await turn.ask(agent.model, request)
            except ModelUnavailable as error:
                failures += 1
                await self._wait_for_model(error, failures, began)
            except ContextOverflow as error:
                condensations += 1
                if condensations > agent.condensations_max or not await turn.condense():
                    raise ContextTooLong(turn.conversation_id, turn.turn_id) from error
            except MalformedHistory as error:
                if not self._has_repaired:
                    self._has_repaired = True
                    await turn.repair_history(str(error))
                elif not self._is_plain and _has_what_only_some_read(view):
                    # The cause may be an image that is gone from its address, or thinking that
                    # another model signed. Then every later request that has it would fail, too.
                    self._is_plain = True
                    log_failure(
                        "history sent without images and thinking",
                        error,
                        conversation=turn.conversation_id,
                        turn=turn.turn_id,
                    )
                else:
                    raise

    async def _begin_step(self) -> View | None:
        """Return the view for the next model call; None if the agent is going round in circles."""
        agent, turn = self._agent, self._turn
        view = await turn.begin_step()
        if turn.steps >= agent.max_iterations:
            raise TooManyIterations(turn.conversation_id, turn.turn_id, agent.max_iterations)
        if agent.budget is not None or agent.token_budget is not None:
            self._check_budgets()
        circle = agent.stuck.find_circle(turn.recently_seen, self._digested)
        if circle is None:
            return view
        if circle.is_stuck:
            await turn.end_as_stuck(circle.detail)
            return None
        newest = view[-1]
        if isinstance(newest, UserMessageEvent) and newest.is_reminder:
            return view  # the model was told already, before a failed attempt or a restart
        await turn.remind(f"You are going round in circles: {circle.detail}. Try another way.")
        return turn.view

    def _check_budgets(self) -> None:
        """Raise `BudgetSpent` or `TokensSpent` if no further model call may be made."""
        agent, turn = self._agent, self._turn
        metrics = turn.metrics
        spent, tokens = metrics.total_cost, metrics.input_tokens + metrics.output_tokens
        if agent.budget is not None and spent >= agent.budget:
            raise BudgetSpent(turn.conversation_id, spent, agent.budget)
        if agent.token_budget is not None and tokens >= agent.token_budget:
            raise TokensSpent(turn.conversation_id, tokens, agent.token_budget)

    async def _wait_for_model(self, error: ModelUnavailable, failures: int, began: float) -> None:
        """Wait before another attempt; raise the error if there may be none."""
        agent, ports = self._agent, self._turn.ports
        # The sum, not the larger: clients that were told the same delay must not return together.
        wait_s = agent.backoff.delay_s(failures - 1, ports.random) + (error.retry_after_s or 0.0)
        ends = ports.loop_time() + wait_s - began
        if failures >= agent.attempts_max or ends > agent.retry_s_max:
            raise error
        log_unavailable(
            "model call failed",
            error,
            conversation=self._turn.conversation_id,
            turn=self._turn.turn_id,
            failures=failures,
            wait_s=wait_s,
        )
        await ports.sleep(wait_s)

    async def _call_tools(self, response: ModelResponse) -> None:
        turn = self._turn
        agent = self._agent
        needs_confirmation = False
        calls = [self._with_risk(call) for call in response.calls]
        for call in calls:
            needs_confirmation |= await agent.needs_confirmation(call, turn)
        actions = await turn.propose_calls(
            calls,
            text=response.text,
            thinking=response.thinking,
            usage=response.usage,
            needs_confirmation=needs_confirmation,
        )
        await turn.run_calls(actions, self._run_call)

    def _with_risk(self, call: ToolCall) -> ToolCall:
        """Return the call with the risk that its tool declares."""
        risk = self._agent.tools.find_risk(call)
        return call if call.risk == risk else replace(call, risk=risk)

    async def _tell_of_empty_response(self, response: ModelResponse) -> None:
        turn = self._turn
        await turn.finish_step(response.usage)
        if self._was_empty:
            raise EmptyResponse(turn.conversation_id, turn.turn_id)
        self._was_empty = True
        await turn.remind("Your last response was empty. Answer, or call a tool.")


def _has_what_only_some_read(view: View) -> bool:
    """True if a part of the view can be left out because some models cannot read it."""
    return any(
        bool(event.images or event.files)
        if isinstance(event, UserMessageEvent)
        else isinstance(event, ActionEvent | AgentMessageEvent) and bool(event.thinking)
        for event in view
    )


def _checked(confirm: ConfirmationPolicy, tools: Tools) -> ConfirmationPolicy:
    """Return the policy; refuse names of no tool, since calls to a misspelt one would just run."""
    if callable(confirm) or confirm in ("never", "always"):
        return confirm
    if isinstance(confirm, str) or not isinstance(confirm, Collection):
        raise InvalidInput(
            f'confirm is {confirm!r}; it takes "never", "always", a list of tool names, or a '
            "function"
        )
    unknown = [name for name in confirm if name not in tools.names]
    if unknown:
        known = ", ".join(tools.names) or "none"
        raise InvalidInput(f"confirm names {', '.join(unknown)}; the tools are: {known}")
    return frozenset(confirm)
