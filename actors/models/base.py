"""Models: requests, responses, and the errors that can replace a response.

A model is anything with `respond`. `ScriptedModel` answers offline; `OpenAIChatModel`,
`OpenAIResponsesModel` and `AnthropicModel` ask the providers, each in a module of its own.

Every model promises:

1. One `respond` is one attempt: it asks the provider once. The caller sees each failure and
   decides about another attempt.
2. It raises only the errors below, cancellation, errors of `write`, and `OpenCalls`, which
   says that a call in the view has no result yet.
3. A call comes whole or not at all. A call that the model had not finished writing, because its
   stream was cut off or its tokens ran out, is left out.
4. The pieces given to `write` are the beginning of the response's text, in order.

It does not promise that a failed attempt cost nothing: a provider may charge for a stream that was
cut off. A model keeps no state between requests, and may serve many conversations at once; it runs
in the caller's task.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from sys import float_info
from typing import Final, Protocol

from turnkeeper.runtime import Refused, Unavailable

from ..core.view import View
from ..errors import InvalidInput
from ..events import StepRequest, ThinkingBlock, TokenUsage
from ..tool_calls import ToolCall
from ..values.api_names import api_tool_name
from ..values.frozen import FrozenObject
from ..values.text import check_bool, check_number, storable
from ..values.type_names import a_type
from .schemas import api_schema

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
    "request_of",
]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool's description for a model; `parameters` is the JSON schema of its arguments object."""

    name: str
    description: str
    parameters: FrozenObject
    digest: str = field(init=False, repr=False, compare=False)
    """Equal for equal tools, in every process."""

    def __post_init__(self) -> None:
        """Convert the schema to a form that all providers accept, or raise `InvalidInput`.

        One tool that a provider refuses makes it refuse every request.
        """
        try:
            parameters = api_schema(self.parameters)
        except ValueError as error:
            raise InvalidInput(f"tool {self.name}: its schema cannot be used: {error}") from error
        object.__setattr__(self, "parameters", parameters)
        object.__setattr__(self, "description", storable(self.description))
        digest = _digest([self.name, self.description, self.parameters])
        object.__setattr__(self, "digest", digest)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request to continue from a view, with the tools it may call. The view has no open call.

    Raises `InvalidInput` if two tools have one name, or a switch is not a bool.
    """

    view: View
    tools: Sequence[ToolSpec] = ()
    is_plain: bool = False
    """Leave out images and thinking, which this model or its provider may be unable to read."""
    show_author: bool = False
    """Begin each chat message with the name of its author, if it has one."""

    def __post_init__(self) -> None:
        check_bool("is_plain", self.is_plain)
        check_bool("show_author", self.show_author)
        names: set[str] = set()
        for tool in self.tools:
            name = api_tool_name(tool.name)
            if name in names:
                raise InvalidInput(f"two tools are called {name}; give each its own name")
            names.add(name)


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """A model's answer: a text, or calls with the text and the thinking that came with them."""

    text: str = ""
    calls: Sequence[ToolCall] = ()
    usage: TokenUsage = field(default_factory=TokenUsage)
    thinking: tuple[ThinkingBlock, ...] = ()
    provider_response_id: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidInput(f"a response's text is a str, and {a_type(self.text)} is not")
        if not isinstance(self.calls, Sequence):
            raise InvalidInput(f"a response's calls are a list, and {a_type(self.calls)} is not")
        for call in self.calls:
            if not isinstance(call, ToolCall):
                raise InvalidInput(f"a response's calls hold {a_type(call)}; they hold ToolCalls")


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a million tokens, in the currency that the application keeps its costs in.

    `input` is for tokens that were neither read from a cache nor written to one. Cached tokens
    without a price of their own cost the same as other input.
    """

    input: float
    output: float
    cached: float | None = None
    cache_written: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached", "cache_written"):
            price = getattr(self, name)
            if price is not None or name in ("input", "output"):
                check_number(name, price, "0 or more", least=0, most=float_info.max)


class Model(Protocol):
    """Answers requests, with one attempt for each.

    Optional attributes: `model`, its name, and `parameters`, a mapping of all settings of its
    requests. The log has the name and a digest of the parameters. Traces also have its `provider`,
    such as "openai", if it has that attribute.
    """

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        """Ask the model once for `request`, and return its answer.

        Pass the pieces of its text to `write` as they come. Raises as the head of this module says.
        """


def request_of(model: Model, request: ModelRequest) -> StepRequest:
    """Return the request in the form that the log keeps."""
    name = getattr(model, "model", None)
    parameters = getattr(model, "parameters", None)
    return StepRequest(
        view_seq=request.view.seq,
        model=name if isinstance(name, str) else None,
        tools_digest=_digest_of_tools(tuple([tool.digest for tool in request.tools])),
        parameters_digest=None if parameters is None else _digest(parameters),
        is_plain=request.is_plain,
        show_author=request.show_author,
    )


@lru_cache(maxsize=64)
def _digest_of_tools(digests: tuple[str, ...]) -> str:
    """Return the digest of these tools; kept, since an agent asks with the same ones each time."""
    return _digest(digests)


def _digest(value: object) -> str:
    """Return a digest of a value's JSON. Parts that JSON cannot hold count by their `repr`."""
    return hashlib.blake2b(_encode(value).encode(), digest_size=16).hexdigest()


_encode: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=repr).encode
"""Kept: `json.dumps` with these settings makes an encoder for each call."""


class ModelUnavailable(Unavailable):
    """The model gave no whole answer: a timeout, no connection, a rate limit, a server failure."""

    def __init__(self, model: str, found: str, *, retry_after_s: float | None = None) -> None:
        if retry_after_s is not None and not retry_after_s >= 0:
            retry_after_s = None  # negative, or no number
        wait = "" if retry_after_s is None else f" in {retry_after_s:g} s"
        super().__init__(f"no answer from {model}: {found}; nothing happened; ask again{wait}")
        self.model = model
        self.found = found
        self.retry_after_s = retry_after_s
        """The delay that the provider asks for, if it names one."""


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
    """The provider refuses these messages: their order, their roles, their calls."""

    def __init__(self, model: str, found: str) -> None:
        super().__init__(
            f"history refused by {model}: {found}; nothing happened; repair the view, then ask "
            "again"
        )
        self.model = model
        self.found = found


class ModelRefusal(Refused):
    """The model declined to answer, or a filter held its answer back.

    `text` is the text that it gave instead, if any. The error's message leaves it out, as chat
    text.
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
    """A wrong setting makes the request fail: a key, a model name, a parameter, a tool's schema."""

    def __init__(self, model: str, found: str) -> None:
        super().__init__(
            f"request to {model} failed: {found}; nothing happened; change the model's settings"
        )
        self.model = model
        self.found = found
