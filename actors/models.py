"""Models: what an agent asks, what it is answered, and what can go wrong.

A model is anything with `respond`. `ScriptedModel` answers offline; `OpenAIChatModel`,
`OpenAIResponsesModel` and `AnthropicModel` ask the providers, each in a module of its own.

What every model promises:

1. one `respond` is one attempt: nothing in it asks the provider twice. Whoever asks decides about
   another attempt, and sees each failure;
2. it raises the errors below and cancellation, nothing else of its own (what `write` raises
   passes, and `OpenCalls` says that the view was not ready to be asked about);
3. a call is given whole or not at all: what a model had not finished writing, because its stream
   was cut off or its tokens ran out, is no call;
4. what was given to `write` is the beginning of the response's text, in order.

It does not promise that a failed attempt cost nothing: a provider may count tokens of a stream
that was cut off. A model keeps nothing of one request for the next, and may be asked by many
conversations at once; it runs in the task that asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from turnkeeper.runtime import Refused, Unavailable

from ._frozen import FrozenObject
from .agents import ToolCall
from .events import ThinkingBlock, TokenUsage
from .view import View

__all__ = [
    "ContextOverflow",
    "MalformedHistory",
    "Model",
    "ModelError",
    "ModelRefusal",
    "ModelRequest",
    "ModelResponse",
    "ModelUnavailable",
    "Prices",
    "ToolSpec",
]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a model is told of it; `parameters` is the JSON schema of its arguments object."""

    name: str
    description: str
    parameters: FrozenObject


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What a model is asked to go on from. The view must have no open call."""

    view: View
    tools: Sequence[ToolSpec] = ()


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """What a model answered: a text, or calls, with what it said and thought beside them."""

    text: str = ""
    calls: Sequence[ToolCall] = ()
    usage: TokenUsage = field(default_factory=TokenUsage)
    thinking: tuple[ThinkingBlock, ...] = ()
    provider_response_id: str | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    """What a model costs, for a million tokens, in whatever currency the costs are kept in.

    `input` is for tokens that were neither read from a cache nor written to one; where a cache has
    no price of its own, its tokens cost the same.
    """

    input: float
    output: float
    cached: float | None = None
    cache_written: float | None = None


class Model(Protocol):
    """Answers requests, one attempt each."""

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        """The model's answer; `write` is given the pieces of its text as they come."""


class ModelUnavailable(Unavailable):
    """No whole answer this time: a timeout, no connection, a limit, a failing server, a cut."""

    def __init__(self, model: str, found: str, *, retry_after_s: float | None = None) -> None:
        wait = "" if retry_after_s is None else f" in {retry_after_s:g} s"
        super().__init__(f"no answer from {model}: {found}; nothing happened; ask again{wait}")
        self.model = model
        self.found = found
        self.retry_after_s = retry_after_s
        """How long the provider asks to be left alone, where it said so."""


class ContextOverflow(Refused):
    """The view is longer than the model can read."""

    def __init__(self, model: str, found: str) -> None:
        super().__init__(
            f"request to {model} refused for its length: {found}; nothing happened; "
            "condense the view, then ask again"
        )
        self.model = model
        self.found = found


class MalformedHistory(Refused):
    """The provider will not read these messages: their order, their roles, their calls."""

    def __init__(self, model: str, found: str) -> None:
        super().__init__(
            f"history refused by {model}: {found}; nothing happened; repair the view, then ask "
            "again"
        )
        self.model = model
        self.found = found


class ModelRefusal(Refused):
    """The model would not answer, or a filter kept its answer back.

    `text` is what it said instead, where it said anything; it is chat text, so no message has it.
    """

    def __init__(self, model: str, found: str, *, text: str = "") -> None:
        super().__init__(
            f"no answer from {model}: {found}; nothing happened; the same request will be refused "
            "again"
        )
        self.model = model
        self.found = found
        self.text = text


class ModelError(Refused):
    """The request cannot succeed as it is: a key, a model's name, a parameter, a tool's schema."""

    def __init__(self, model: str, found: str) -> None:
        super().__init__(
            f"request to {model} failed: {found}; nothing happened; change the model's settings"
        )
        self.model = model
        self.found = found
