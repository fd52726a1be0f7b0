"""Agents: what runs in a turn, and what it is given.

An agent is anything with `async run(turn)`; `@agent` makes one of a plain `async def`. It runs as
a supervised child task of its conversation's actor and can only talk back through the mailbox.
What it says and does is durable when the call returns. When its turn has been interrupted its
task is cancelled, and anything it still sends is refused as `StaleTurn`: it cannot land in the
next turn.

An agent with `is_resumable = True` is a function of its turn's view: it may be run again on a turn
that has begun, after a pause, a confirmation or a restart, and goes on from what the log has.
Another is run once; a pause holds it where it calls `begin_step`, or at its end.
"""

from __future__ import annotations

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel

from turnkeeper.runtime import Effect, Message, Ports, Ref, clear_stray_cancellation

from ._frozen import FrozenObject
from ._text import error_text, storable
from .commands import BeginStep, Command, EndTurn, Query, RepairView, Stream, TurnAppend
from .errors import InvalidInput, LeaseExpired, TurnSuspended
from .events import (
    RESULT_CLASSES,
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationRequestEvent,
    ConfirmationRequestedEvent,
    Event,
    LoggedEvent,
    ObservationEvent,
    StepFinishedEvent,
    ThinkingBlock,
    TokenUsage,
    UserMessageEvent,
)
from .turns import RunningTurn
from .view import View

__all__ = [
    "Agent",
    "FunctionAgent",
    "OwnerSide",
    "ToolCall",
    "ToolResult",
    "ToolRunner",
    "TurnContext",
    "agent",
]


T = TypeVar("T")

MALFORMED_LENGTH_MAX = 2_000


class Agent(Protocol):
    """Answers chat messages, one turn at a time for each conversation.

    It may have the class attribute `is_resumable = True`; see the head of this module.
    """

    async def run(self, turn: TurnContext) -> None:
        """Answer `turn.message`. Returning ends the turn; raising fails it."""


@dataclass(frozen=True, slots=True)
class FunctionAgent:
    """An agent made of a plain function."""

    function: Callable[[TurnContext], Awaitable[None]]

    async def run(self, turn: TurnContext) -> None:
        await self.function(turn)


def agent(function: Callable[[TurnContext], Awaitable[None]]) -> FunctionAgent:
    """Make an agent of an `async def` that takes the turn."""
    if not inspect.iscoroutinefunction(function):
        raise InvalidInput(f"an agent is an `async def`, and {function!r} is not")
    return FunctionAgent(function)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asked for, before it is in the log. Its arguments are a JSON object."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    provider_call_id: str | None = None
    malformed_arguments: str | None = None
    """What the model wrote where it was not a JSON object; `arguments` is empty then."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What answers a call."""

    content: str
    is_error: bool = False
    may_have_happened: bool = False
    """It is not known whether the call had its effect, and it is not run again to find out."""

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise InvalidInput(
                f"a result's content is a str, and {type(self.content).__name__} is not"
            )


ToolRunner = Callable[[ActionEvent], Awaitable[str | ToolResult]]
"""Runs one call and returns its result. Raising makes the result an error."""


@dataclass(frozen=True, slots=True)
class OwnerSide:
    """What a turn is given by its conversation's actor."""

    ref: Ref[Command | Query]
    ports: Ports
    is_resumable: bool
    running: Callable[[], RunningTurn]
    """The turn as committed; `StaleTurn` once it has ended."""
    view: Callable[[], View]
    steps: Callable[[], int]
    is_step_held: Callable[[], bool]
    """A pause, a confirmation or a chat message that steers is before the next step."""
    condensing: Callable[[], Effect | None]
    """The condenser at work, if it is."""
    is_condensing_hard: Callable[[], bool]
    """The turn has to wait for it."""
    find_broken: Callable[[], Awaitable[tuple[str, ...]]]
    check_lease: Callable[[], None]
    """Raises where the owner may have been taken over."""


class TurnContext:
    """One turn, as its agent sees it. Made by the conversation actor, used by one run of an agent.

    What it writes is durable when the call returns. Once the turn has ended, every call here
    raises `StaleTurn`. Cancelling a call leaves what it asked for either in the log or not.
    """

    def __init__(
        self, conversation_id: str, epoch: int, side: OwnerSide, unstarted: Collection[str]
    ) -> None:
        self.conversation_id = conversation_id
        self.turn_id = side.running().turn_id
        self.ports = side.ports
        self._epoch = epoch
        self._side = side
        self._unstarted = frozenset(unstarted)
        self._is_held = False

    @property
    def is_held(self) -> bool:
        """Whether this run has been ended by `TurnSuspended`; every call here raises it again."""
        return self._is_held

    @property
    def messages(self) -> tuple[UserMessageEvent, ...]:
        """The chat messages that this turn answers."""
        return self._side.running().messages

    @property
    def message(self) -> UserMessageEvent:
        """The newest chat message that this turn answers."""
        return self.messages[-1]

    @property
    def view(self) -> View:
        """The committed view of this moment. It never changes in the agent's hands."""
        self._side.running()  # raises where the turn has ended: what is there now is not its view
        return self._side.view()

    @property
    def steps(self) -> int:
        """The steps that this turn has finished, in all runs of its agent."""
        self._side.running()
        return self._side.steps()

    # --- taking a turn up, and going on in it ----------------------------------------------------

    @property
    def open_calls(self) -> Mapping[str, ActionEvent]:
        """The calls that have no result, by call id; there are some where a turn is taken up."""
        view = self.view
        if not view.has_open_calls:
            return {}
        answered = {event.tool_call_id for event in view if isinstance(event, RESULT_CLASSES)}
        return {
            event.tool_call_id: event
            for event in view
            if isinstance(event, ActionEvent) and event.tool_call_id not in answered
        }

    def is_unstarted(self, tool_call_id: str) -> bool:
        """Whether this open call is known not to have begun: it has just been confirmed."""
        return tool_call_id in self._unstarted

    @property
    def has_answered(self) -> bool:
        """Whether the turn's answer is the newest there is: a pause came before its end."""
        view = self.view
        newest = view[-1] if view else None
        return (
            isinstance(newest, AgentMessageEvent)
            and newest.turn_id == self.turn_id
            and not newest.interrupted
        )

    async def begin_step(self) -> View:
        """The place between two steps; gives the view for the next model call.

        A pause takes effect here, chat messages that steer join here, and a condensation that
        cannot be done without is waited for. In a turn that is held, the run of a resumable agent
        ends with `TurnSuspended`; another's waits.
        """
        side = self._side
        while True:
            self._check_going_on()
            if side.is_step_held() and not await side.ref.ask(BeginStep(self.turn_id, self._epoch)):
                raise self._held()
            condensing = side.condensing()
            if condensing is None or not side.is_condensing_hard():
                return self.view
            await condensing.ended()

    async def condense(self) -> bool:
        """Have the view condensed, since a model will not take it as it is, and wait for it.

        Whether it was; not so where there is no condenser, or it could do nothing.
        """
        request = CondensationRequestEvent(
            id=self.ports.ids.new(), timestamp=self._now(), turn_id=self.turn_id
        )
        await self._append(request)
        return await self._is_condensed()

    async def repair_history(self, detail: str) -> bool:
        """Mend a history that a model refused as malformed, and wait for it.

        The view is rebuilt from the log, what breaks it is forgotten, the refusal is written down,
        and a condensation is asked for. Whether any of it changed what the model sees.
        """
        broken = await self._side.find_broken()
        repair = RepairView(self.turn_id, self._epoch, broken, storable(detail))
        has_forgotten = await self._ask(repair)
        return await self._is_condensed() or has_forgotten

    async def _is_condensed(self) -> bool:
        while (condensing := self._side.condensing()) is not None:
            await condensing.ended()
        return not self.view.unhandled_condensation_request

    async def end_as_stuck(self, detail: str) -> None:
        """End the turn: its agent goes round in circles. Return after it."""
        end = EndTurn(self.turn_id, self._epoch, "Stuck", storable(detail), is_stuck=True)
        if not await self._ask(end):
            raise self._held()

    # --- saying ----------------------------------------------------------------------------------

    async def say(
        self,
        text: str,
        *,
        thinking: tuple[ThinkingBlock, ...] = (),
        llm_response_id: str | None = None,
        usage: TokenUsage | None = None,
    ) -> LoggedEvent:
        """Say something to the user. With `usage`, a step is finished in the same commit."""
        message = AgentMessageEvent(
            id=self.ports.ids.new(),
            timestamp=self._now(),
            turn_id=self.turn_id,
            content=storable(text),
            thinking=thinking,
            llm_response_id=llm_response_id,
        )
        if usage is None:
            return (await self._append(message))[0]
        return (await self._append(message, self._step_finished(usage)))[0]

    def writer(self) -> Callable[[str], Awaitable[None]]:
        """Begin an answer, or begin it anew: what takes its pieces as they come.

        Whoever follows the turn sees them live. They are not durable: `say` or `propose_calls` is
        what brings the answer into the log; an interrupt before that keeps the pieces, marked.
        """
        is_first = True

        async def write(piece: str) -> None:
            nonlocal is_first
            self._check_going_on()
            stream = Stream(self.turn_id, self._epoch, piece, is_first=is_first)
            is_first = False
            await self._side.ref.tell(stream)
            # What brings the pieces may never wait: then nobody else would run, and no interrupt
            # get through.
            await anyio.lowlevel.checkpoint()

        return write

    async def stream(self, chunks: AsyncIterable[str]) -> LoggedEvent:
        """Say something piece by piece; one chat message, durable when this returns.

        If the turn is interrupted half-way, the pieces that had come are kept as a chat message
        that is marked as interrupted. A generator that is not taken to its end is closed.
        """
        pieces: list[str] = []
        write = self.writer()
        closing = aclosing(chunks) if isinstance(chunks, AsyncGenerator) else nullcontext()
        async with closing:
            async for piece in chunks:
                await write(piece)
                pieces.append(piece)
        return await self.say("".join(pieces))

    async def remind(self, text: str) -> LoggedEvent:
        """Tell the model something in the middle of the turn, not as the user."""
        reminder = UserMessageEvent(
            id=self.ports.ids.new(),
            timestamp=self._now(),
            turn_id=self.turn_id,
            content=storable(text),
            is_reminder=True,
        )
        return (await self._append(reminder))[0]

    async def finish_step(self, usage: TokenUsage) -> LoggedEvent:
        """Write down what one model call took."""
        return (await self._append(self._step_finished(usage)))[0]

    def _step_finished(self, usage: TokenUsage) -> StepFinishedEvent:
        return StepFinishedEvent(
            id=self.ports.ids.new(), timestamp=self._now(), turn_id=self.turn_id, usage=usage
        )

    # --- doing -----------------------------------------------------------------------------------

    async def call_tools(
        self, calls: Sequence[ToolCall], run: ToolRunner, *, text: str = ""
    ) -> Sequence[LoggedEvent]:
        """Run the calls of one model response side by side; returns their results in call order.

        `propose_calls`, then `run_calls`.
        """
        return await self.run_calls(await self.propose_calls(calls, text=text), run)

    async def propose_calls(
        self,
        calls: Sequence[ToolCall],
        *,
        text: str = "",
        thinking: tuple[ThinkingBlock, ...] = (),
        usage: TokenUsage | None = None,
        needs_confirmation: bool = False,
    ) -> Sequence[ActionEvent]:
        """Write down the calls of one model response, all in one commit, before any is run.

        `text` is what the model said with its calls. With `usage`, a step is finished in the same
        commit. With `needs_confirmation` the turn waits for it, and this ends the agent's run with
        `TurnSuspended`; only for resumable agents.
        """
        if not calls:
            return ()
        if needs_confirmation and not self._side.is_resumable:
            raise InvalidInput(
                "only an agent with `is_resumable = True` can wait for a confirmation: it is run "
                "again once that is given"
            )
        response_id = self.ports.ids.new()
        actions = [
            ActionEvent(
                id=self.ports.ids.new(),
                timestamp=self._now(),
                turn_id=self.turn_id,
                tool_call_id=self.ports.ids.new(),
                provider_call_id=call.provider_call_id and storable(call.provider_call_id),
                tool_name=storable(call.name),
                arguments=arguments,
                malformed_arguments=malformed and storable(malformed),
                llm_response_id=response_id,
                thinking=thinking if n == 0 else (),
                text=storable(text) if n == 0 else "",
            )
            for n, call in enumerate(calls)
            for arguments, malformed in (_arguments(call),)
        ]
        events: Sequence[Event] = actions
        if usage is not None:
            # Not after the calls: what they cost is known now, and a crash in a call keeps it.
            events = (*actions, self._step_finished(usage))
        if not needs_confirmation:
            await self._append(*events)
            return actions
        requested = ConfirmationRequestedEvent(
            id=self.ports.ids.new(),
            timestamp=self._now(),
            turn_id=self.turn_id,
            tool_call_ids=tuple(action.tool_call_id for action in actions),
        )
        await self._append(*events, requested, suspends=True)
        raise self._held()

    async def run_calls(
        self, actions: Sequence[ActionEvent], run: ToolRunner
    ) -> Sequence[LoggedEvent]:
        """Run calls that are in the log, side by side; returns their results in call order.

        Each result is durable as soon as its call ends. A call that raises is answered with its
        error.
        """
        results: dict[str, LoggedEvent] = {}
        try:
            async with anyio.create_task_group() as group:
                for action in actions:
                    group.start_soon(self._run_call, action, run, results)
        except ExceptionGroup as failed:
            # A tool's own failure is its result; what is left is the owner's refusal, which is
            # the same for every call of the turn.
            raise failed.exceptions[0] from None
        return [results[action.id] for action in actions]

    def check_lease(self) -> None:
        """Raise `LeaseExpired` where another process may own this conversation by now.

        `run_calls` looks right before it runs a call. What waits for something between that and its
        first effect outside looks again: an effect cannot be taken back, or fenced.
        """
        self._side.check_lease()

    async def _run_call(
        self, action: ActionEvent, run: ToolRunner, results: dict[str, LoggedEvent]
    ) -> None:
        # An agent that swallowed what ended its run runs nothing more.
        self._check_going_on()
        # Between the commit of the call and here, this process may have stood still for long.
        self.check_lease()
        try:
            returned = await run(action)
            result = ToolResult(returned) if isinstance(returned, str) else returned
            if not isinstance(result, ToolResult):
                raise TypeError(f"the call ran, and gave a {type(result).__name__}, no text")
        except LeaseExpired:
            raise  # nothing was started, and what becomes of the call is the next owner's to say
        except BaseException as error:
            # Whatever a tool raises is its result, a cancellation that nobody asked for too: in
            # the group it would end the other calls without a word.
            if not isinstance(error, Exception) and not clear_stray_cancellation(error):
                raise
            result = ToolResult(f"{type(error).__name__}: {error_text(error)}", is_error=True)
        observation: ObservationEvent | AgentErrorEvent
        if result.may_have_happened:
            observation = AgentErrorEvent(
                id=self.ports.ids.new(),
                timestamp=self._now(),
                turn_id=self.turn_id,
                tool_call_id=action.tool_call_id,
                content=storable(result.content),
                may_have_happened=True,
            )
        else:
            observation = ObservationEvent(
                id=self.ports.ids.new(),
                timestamp=self._now(),
                turn_id=self.turn_id,
                tool_call_id=action.tool_call_id,
                content=storable(result.content),
                is_error=result.is_error,
            )
        results[action.id] = (await self._append(observation))[0]

    async def _append(self, *events: Event, suspends: bool = False) -> Sequence[LoggedEvent]:
        return await self._ask(TurnAppend(self.turn_id, self._epoch, events, suspends=suspends))

    async def _ask(self, command: Message[T]) -> T:
        self._check_going_on()
        return await self._side.ref.ask(command)

    def _held(self) -> TurnSuspended:
        """The turn is held, and with that this run is over: what goes on is another."""
        self._is_held = True
        return TurnSuspended(self.conversation_id, self.turn_id)

    def _check_going_on(self) -> None:
        """Raise what ended this run, where the turn has ended or is held."""
        if self._is_held:
            raise self._held()
        self._side.running()

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.ports.now(), UTC)


def _arguments(call: ToolCall) -> tuple[FrozenObject, str | None]:
    """The arguments as the log keeps them; those that JSON cannot hold exactly are malformed."""
    try:
        return FrozenObject(call.arguments), call.malformed_arguments
    except ValueError:
        try:
            written = repr(dict(call.arguments))
        except RecursionError:
            written = "arguments that are nested too deeply"
        return FrozenObject(), storable(written)[:MALFORMED_LENGTH_MAX]
