"""Agents: what runs in a turn, and what it is given.

An agent is anything with `async run(turn)`; `@agent` makes one of a plain `async def`. It runs as
a supervised child task of its conversation's actor and can only talk back through the mailbox.
What it says and does is durable when the call returns. When its turn has been interrupted its
task is cancelled, and anything it still sends is refused as `StaleTurn`: it cannot land in the
next turn.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

import anyio

from turnkeeper.runtime import Ports, Ref, clear_stray_cancellation

from ._frozen import FrozenObject
from ._text import error_text, storable
from .commands import Command, Query, Stream, TurnAppend
from .errors import InvalidInput
from .events import (
    ActionEvent,
    AgentMessageEvent,
    Event,
    LoggedEvent,
    ObservationEvent,
    StepFinishedEvent,
    TokenUsage,
    UserMessageEvent,
)
from .turns import RunningTurn
from .view import View

__all__ = ["Agent", "FunctionAgent", "ToolCall", "ToolRunner", "Tools", "TurnContext", "agent"]


class Agent(Protocol):
    """Answers chat messages, one turn at a time for each conversation."""

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


ToolRunner = Callable[[ActionEvent], Awaitable[str]]
"""Runs one call and returns its result as text. Raising makes the result an error."""


class Tools:
    """A `ToolRunner` over named async functions, which are called with the call's arguments."""

    def __init__(self, *functions: Callable[..., Awaitable[object]]) -> None:
        self._functions = {function.__name__: function for function in functions}

    async def __call__(self, action: ActionEvent) -> str:
        function = self._functions.get(action.tool_name)
        if function is None:
            known = ", ".join(self._functions) or "none"
            raise LookupError(f"there is no tool {action.tool_name}; there are: {known}")
        return str(await function(**action.arguments))


class TurnContext:
    """One turn, as its agent sees it. Made by the conversation actor, used by one agent task."""

    def __init__(
        self,
        *,
        conversation_id: str,
        epoch: int,
        running: Callable[[], RunningTurn],
        view: Callable[[], View],
        owner: Ref[Command | Query],
        ports: Ports,
    ) -> None:
        self.conversation_id = conversation_id
        self.turn_id = running().turn_id
        self._epoch = epoch
        self._running = running
        self._view = view
        self._owner = owner
        self._ports = ports

    @property
    def messages(self) -> tuple[UserMessageEvent, ...]:
        """The chat messages that this turn answers."""
        return self._running().messages

    @property
    def message(self) -> UserMessageEvent:
        """The newest chat message that this turn answers."""
        return self.messages[-1]

    @property
    def view(self) -> View:
        """The committed view of this moment. It never changes in the agent's hands."""
        self._running()  # raises where the turn has ended: what is there now is not its view
        return self._view()

    async def say(self, text: str) -> LoggedEvent:
        """Say something to the user; durable when this returns."""
        message = AgentMessageEvent(
            id=self._ports.ids.new(),
            timestamp=self._now(),
            turn_id=self.turn_id,
            content=storable(text),
        )
        return (await self._append(message))[0]

    async def stream(self, chunks: AsyncIterable[str]) -> LoggedEvent:
        """Say something piece by piece; one chat message, durable when this returns.

        If the turn is interrupted half-way, the pieces that had come are kept as a chat message
        that is marked as interrupted.
        """
        pieces: list[str] = []
        async for piece in chunks:
            await self._owner.tell(Stream(self.turn_id, self._epoch, piece, is_first=not pieces))
            pieces.append(piece)
        return await self.say("".join(pieces))

    async def call_tools(
        self, calls: Sequence[ToolCall], run: ToolRunner, *, text: str = ""
    ) -> Sequence[LoggedEvent]:
        """Run the calls of one model response side by side; returns their results in call order.

        The actions are durable before the first call starts, all in one commit, and each result
        is durable as soon as its call ends. A call that raises is answered with its error. `text`
        is what the model said with its calls.
        """
        if not calls:
            return ()
        response_id = self._ports.ids.new()
        actions = [
            ActionEvent(
                id=self._ports.ids.new(),
                timestamp=self._now(),
                turn_id=self.turn_id,
                tool_call_id=self._ports.ids.new(),
                provider_call_id=call.provider_call_id,
                tool_name=call.name,
                arguments=FrozenObject(call.arguments),
                llm_response_id=response_id,
                text=storable(text) if n == 0 else "",
            )
            for n, call in enumerate(calls)
        ]
        await self._append(*actions)
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

    async def finish_step(self, usage: TokenUsage) -> LoggedEvent:
        """Write down what one model call took; durable when this returns."""
        finished = StepFinishedEvent(
            id=self._ports.ids.new(), timestamp=self._now(), turn_id=self.turn_id, usage=usage
        )
        return (await self._append(finished))[0]

    async def _run_call(
        self, action: ActionEvent, run: ToolRunner, results: dict[str, LoggedEvent]
    ) -> None:
        try:
            content, is_error = storable(await run(action)), False
        except BaseException as error:
            # Whatever a tool raises is its result, a cancellation that nobody asked for too: in
            # the group it would end the other calls without a word.
            if not isinstance(error, Exception) and not clear_stray_cancellation(error):
                raise
            content, is_error = f"{type(error).__name__}: {error_text(error)}", True
        observation = ObservationEvent(
            id=self._ports.ids.new(),
            timestamp=self._now(),
            turn_id=self.turn_id,
            tool_call_id=action.tool_call_id,
            content=content,
            is_error=is_error,
        )
        results[action.id] = (await self._append(observation))[0]

    async def _append(self, *events: Event) -> Sequence[LoggedEvent]:
        return await self._owner.ask(TurnAppend(self.turn_id, self._epoch, events))

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._ports.now(), UTC)
