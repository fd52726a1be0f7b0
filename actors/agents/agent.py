"""Agents: anything with `async run(turn)`; `@agent` makes one of a plain `async def`.

An agent with `is_resumable = True` is a function of its turn's view: after a pause, a confirmation
or a restart it may run again on a turn that has begun, and continues from the log. Any other agent
runs once; a pause holds it when it calls `begin_step`, or at its end.

This module loads no event: a program that only declares its agents starts quickly.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias
from weakref import WeakKeyDictionary

from ..errors import InvalidInput
from ..values.type_names import a_type

if TYPE_CHECKING:
    from .turn_context import TurnContext

__all__ = ["Agent", "FunctionAgent", "agent", "is_agent"]


class Agent(Protocol):
    """Answers chat messages, one turn at a time for each conversation.

    It may have the class attribute `is_resumable = True`; see the head of this module.
    """

    async def run(self, turn: TurnContext) -> None:
        """Answer `turn.message`. Returning ends the turn; raising fails it."""


def is_agent(value: object) -> bool:
    """Return whether this object has a `run` that can be called with a turn alone.

    A `Tool`, a class and a module such as anyio have a `run`, too, but not such a one.
    """
    run = getattr(value, "run", None)
    if not callable(run) or isinstance(value, type | ModuleType):
        return False
    function = getattr(run, "__func__", None)
    if not isinstance(function, FunctionType):
        return _can_take(run, 1)
    if function not in _methods:
        _methods[function] = _can_take(function, 2)  # the object and the turn
    return _methods[function]


_methods: Final[WeakKeyDictionary[FunctionType, bool]] = WeakKeyDictionary()
"""True for each examined method that takes a turn and nothing else. To examine one takes long."""


def _can_take(function: Callable[..., object], count: int) -> bool:
    """Return whether the function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        pass  # it is written in C, and has no signature
    return True


AgentFunction: TypeAlias = Callable[["TurnContext"], Awaitable[str | None] | AsyncIterator[str]]
"""An `async def` that takes the turn, and may return the answer or yield it piece by piece."""


@dataclass(frozen=True, slots=True)
class FunctionAgent:
    """An agent made of a plain function."""

    function: AgentFunction

    async def run(self, turn: TurnContext) -> None:
        """Run the function; say the text that it returns or yields."""
        answer = self.function(turn)
        if isinstance(answer, AsyncIterator):
            await turn.stream(_pieces(answer))
            return
        said = await answer
        if isinstance(said, str):
            await turn.say(said)
        elif said is not None:
            raise TypeError(
                f"the agent returned {a_type(said)}; it returns its answer as a str, or "
                "says it with `turn.say` and returns None"
            )


async def _pieces(answer: AsyncIterator[str]) -> AsyncGenerator[str]:
    async with aclosing(answer) if isinstance(answer, AsyncGenerator) else nullcontext():
        async for piece in answer:
            if not isinstance(piece, str):
                raise TypeError(f"the agent yielded {a_type(piece)}; it yields str")
            yield piece


def agent(function: AgentFunction) -> FunctionAgent:
    """Make an agent of an `async def` that takes the turn.

    It answers with `turn.say` and `turn.stream`, or by returning or yielding its text. Raises
    `InvalidInput` if `function` is anything else.
    """
    if not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
        raise InvalidInput(f"@agent takes an `async def`, and {function!r} is not one")
    parameters = inspect.signature(function)
    try:
        parameters.bind(None)
    except TypeError:
        raise InvalidInput(
            f"@agent takes an `async def` that can be called with the turn alone, and {function!r} "
            f"takes {parameters}"
        ) from None
    return FunctionAgent(function)
