"""Anthropic's models, behind the Messages API; needs the extra `anthropic`.

`AnthropicModel` is a `Model` (see `models`). It streams, and makes one attempt for each request:
the client's own retries are switched off.

Without a client it makes one at the first request, on the event loop of that request; this client
finds its key and its address in the environment (`ANTHROPIC_API_KEY`, `ANTHROPIC_BASE_URL`).
Leaving `async with model`, or `aclose()`, closes it; a client that the caller gave stays open.

The model's thinking comes with a signature, is kept in the log, and is sent back to the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from turnkeeper.runtime import Ports

from ..values.text import check_number

try:
    from anthropic import APIConnectionError, APIStatusError, AsyncAnthropic
except ImportError as missing:
    raise ImportError(
        "Anthropic's models need the package anthropic, which is not installed; "
        "install turnkeeper[anthropic]"
    ) from missing

from ..events import ThinkingBlock
from ..values.api_names import api_tool_name
from ..values.frozen import FrozenObject
from ..values.text import storable
from ._parsing import (
    Counts,
    JsonObject,
    ModelFailure,
    check_ending,
    explained,
    int_at,
    objects_at,
    text_at,
    tool_call,
    tool_names,
    value_at,
)
from ._streaming import ByteResponse, ProviderModel, Reading
from .base import ContextOverflow, ModelRefusal, ModelRequest, ModelResponse, Prices, ToolSpec
from .messages import LLMMessages

if TYPE_CHECKING:
    from anthropic.types import MessageParam

__all__ = ["AnthropicModel"]


class AnthropicModel(ProviderModel[AsyncAnthropic]):
    """A model behind the Messages API."""

    provider = "anthropic"
    _shape = "anthropic"

    def __init__(
        self,
        model: str,
        *,
        max_tokens: int = 8_192,
        client: AsyncAnthropic | None = None,
        timeout_s: float | None = None,
        prices: Prices | None = None,
        settings: Mapping[str, object] = FrozenObject(),
        ports: Ports = Ports(),
    ) -> None:
        """`max_tokens` bounds one response; the API requires it.

        `prices` are those of its tokens, for the cost of each call. `settings` are further fields
        of the request, such as `temperature` or `thinking`.
        `timeout_s` is how long the provider may be silent, even in the middle of a stream, and how
        long it may send nothing but pings; without it the client's own timeout applies, and pings
        may go on.
        """
        check_number("max_tokens", max_tokens, "a whole number from 1 on", least=1, is_whole=True)
        if timeout_s is not None:
            check_number("timeout_s", timeout_s, "seconds above 0, or None", above=0)
        super().__init__(
            model,
            client=None if client is None else _once(client, timeout_s),
            timeout_s=timeout_s,
            prices=prices,
            settings=settings,
            ports=ports,
        )
        self._max_tokens = max_tokens

    @property
    def parameters(self) -> Mapping[str, object]:
        return {**super().parameters, "max_tokens": self._max_tokens}

    def _make_client(self) -> AsyncAnthropic:
        return _once(AsyncAnthropic(), self._timeout_s)

    def _open(
        self, client: AsyncAnthropic, messages: LLMMessages, tools: Sequence[ToolSpec]
    ) -> AbstractAsyncContextManager[ByteResponse]:
        told = [_tool(tool) for tool in tools]
        # The API refuses a history with calls if no tool is declared.
        past = [] if told else _tools_of(messages)
        return client.messages.with_streaming_response.create(
            model=self.model,
            max_tokens=self._max_tokens,
            messages=cast("list[MessageParam]", list(messages)),
            stream=True,
            extra_body=self._and_settings(
                system=messages.system,
                tools=told or past,
                tool_choice={"type": "none"} if past else None,
            ),
        )

    def _reading(self, request: ModelRequest) -> Reading:
        return _MessageReading(self.model, tool_names(request.tools))

    def _explained(self, error: Exception) -> ModelFailure:
        match error:
            case APIStatusError():
                return self._refused(error.status_code, error.body, error.response.headers)
            case APIConnectionError():
                return self._unreached(error)
            case _:
                return self._unmade(error)


def _once(client: AsyncAnthropic, timeout_s: float | None) -> AsyncAnthropic:
    """Return this client without its retries; it shares the connections."""
    if timeout_s is None:
        return client.with_options(max_retries=0)
    return client.with_options(max_retries=0, timeout=timeout_s)


def _tool(tool: ToolSpec) -> JsonObject:
    return {
        "name": api_tool_name(tool.name),
        "description": tool.description,
        "input_schema": tool.parameters,
    }


def _tools_of(messages: LLMMessages) -> Sequence[JsonObject]:
    """Return a declaration of each tool that a history calls, in the order of their first calls."""
    names = {
        text_at(block, "name"): None
        for message in messages
        for block in objects_at(message, "content")
        if text_at(block, "type") == "tool_use"
    }
    return [{"name": name, "input_schema": {"type": "object"}} for name in names]


@dataclass(slots=True)
class _Block:
    """A content block that arrives in pieces."""

    kind: str
    text: str = ""
    """The block's text, thinking, encrypted thinking, or the JSON of its input."""
    signature: str = ""
    call_id: str = ""
    name: str = ""


class _MessageReading(Reading):
    """Reads events: the message's start, blocks with their deltas, the stop reason, the stop."""

    def __init__(self, model: str, names: Mapping[str, str]) -> None:
        super().__init__()
        self._model = model
        self._names = names
        self._id: str | None = None
        self._blocks: dict[int, _Block] = {}
        self._stop_reason = ""
        self._tokens: dict[str, int] = {}

    def take(self, event: JsonObject) -> str:
        match text_at(event, "type"):
            case "message_start":
                self._id = text_at(event, "message", "id") or None
                self._count(value_at(event, "message", "usage"))
            case "content_block_start":
                block = _begun(value_at(event, "content_block"))
                self._blocks[int_at(event, "index")] = block
                return block.text if block.kind == "text" else ""
            case "content_block_delta":
                return self._take_delta(event)
            case "message_delta":
                self._stop_reason = text_at(event, "delta", "stop_reason")
                self._count(value_at(event, "usage"))
            case "message_stop":
                self.is_whole = self.is_finished = True
            case "error":
                raise explained(self._model, value_at(event, "error"))
            case _:
                pass
        return ""

    def _take_delta(self, event: JsonObject) -> str:
        block = self._blocks.setdefault(int_at(event, "index"), _Block("text"))
        delta = value_at(event, "delta")
        match text_at(delta, "type"):
            case "text_delta":
                text = text_at(delta, "text")
                block.text += text
                return text
            case "input_json_delta":
                block.text += text_at(delta, "partial_json")
            case "thinking_delta":
                block.text += text_at(delta, "thinking")
            case "signature_delta":
                block.signature += text_at(delta, "signature")
            case _:
                pass
        return ""

    def _count(self, usage: object) -> None:
        """Note token counts; a later count replaces an earlier one, unless it is missing."""
        for name in (
            "input_tokens",
            "output_tokens",
            "cache_read_input_tokens",
            "cache_creation_input_tokens",
        ):
            if value_at(usage, name) is not None:
                self._tokens[name] = int_at(usage, name)
        cached = self._tokens.get("cache_read_input_tokens", 0)
        written = self._tokens.get("cache_creation_input_tokens", 0)
        self.counts = Counts(
            # This API counts the three separately.
            input=self._tokens.get("input_tokens", 0) + cached + written,
            output=self._tokens.get("output_tokens", 0),
            cached=cached,
            cache_written=written,
        )

    def response(self) -> ModelResponse:
        blocks = [self._blocks[index] for index in sorted(self._blocks)]
        text = "".join(block.text for block in blocks if block.kind == "text")
        calls = [block for block in blocks if block.kind == "tool_use"]
        if self._stop_reason == "refusal":
            raise ModelRefusal(self._model, "it refused", text=storable(text))
        if self._stop_reason == "model_context_window_exceeded":
            raise ContextOverflow(self._model, "its answer would not fit into its context window")
        check_ending(
            self._model,
            text=text,
            is_cut=self._stop_reason == "max_tokens",
            has_calls=bool(calls),
        )
        return ModelResponse(
            text,
            [tool_call(self._names, call.name, call.text, call.call_id) for call in calls],
            thinking=tuple(map(_thinking, filter(_is_thinking, blocks))),
            provider_response_id=self._id,
        )


def _begun(block: object) -> _Block:
    kind = text_at(block, "type")
    match kind:
        case "tool_use":
            # The input comes in deltas; servers that imitate the API may send it whole, here.
            given = value_at(block, "input")
            text = json.dumps(given) if given else ""
            return _Block(kind, text, call_id=text_at(block, "id"), name=text_at(block, "name"))
        case "thinking":
            return _Block(kind, text_at(block, "thinking"), text_at(block, "signature"))
        case "redacted_thinking":
            return _Block(kind, text_at(block, "data"))
        case _:
            return _Block(kind, text_at(block, "text"))


def _is_thinking(block: _Block) -> bool:
    return block.kind in ("thinking", "redacted_thinking")


def _thinking(block: _Block) -> ThinkingBlock:
    if block.kind == "redacted_thinking":
        return ThinkingBlock(thinking="", redacted_data=storable(block.text))
    return ThinkingBlock(thinking=storable(block.text), signature=storable(block.signature) or None)
