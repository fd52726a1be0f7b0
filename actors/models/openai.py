"""OpenAI's models, and those of the many servers with the same chat API; needs the extra `openai`.

`OpenAIChatModel` speaks Chat Completions, `OpenAIResponsesModel` the Responses API. Both are a
`Model` (see `models`), stream, and make one attempt for each request: the client's own retries are
switched off.

Without a client they make one at the first request, on the event loop of that request; this client
finds its key and its address in the environment (`OPENAI_API_KEY`, `OPENAI_BASE_URL`). Leaving
`async with model`, or `aclose()`, closes it; a client that the caller gave stays open.

The Responses API is used without its memory (`store=False`): the log is the only memory. The log
keeps the reasoning before a model's calls, encrypted as it comes, and sends it back with the calls;
the same holds for the `reasoning_content` of chat servers that return one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from turnkeeper.runtime import Ports

from ..values.text import check_number

try:
    from openai import APIConnectionError, APIStatusError, AsyncOpenAI
except ImportError as missing:
    raise ImportError(
        "OpenAI's models need the package openai, which is not installed; "
        "install turnkeeper[openai]"
    ) from missing

from ..events import ThinkingBlock
from ..tool_calls import ToolCall
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
from .base import (
    ModelRequest,
    ModelResponse,
    Prices,
    ToolSpec,
)
from .messages import LLMMessages, thought_by

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam
    from openai.types.responses import ResponseInputItemParam

__all__ = ["OpenAIChatModel", "OpenAIResponsesModel"]


class _OpenAIModel(ProviderModel[AsyncOpenAI]):
    """Base of the two adapters."""

    provider = "openai"
    _tools_max = 128

    def __init__(
        self,
        model: str,
        *,
        client: AsyncOpenAI | None = None,
        timeout_s: float | None = None,
        prices: Prices | None = None,
        settings: Mapping[str, object] = FrozenObject(),
        ports: Ports = Ports(),
    ) -> None:
        """`settings` are further fields of the request, such as `temperature`.

        `timeout_s` is how long the provider may be silent, even in the middle of a stream, and how
        long it may send nothing but pings; without it the client's own timeout applies, and pings
        may go on.
        """
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

    def _make_client(self) -> AsyncOpenAI:
        return _once(AsyncOpenAI(), self._timeout_s)

    def _explained(self, error: Exception) -> ModelFailure:
        match error:
            case APIStatusError():
                return self._refused(error.status_code, error.body, error.response.headers)
            case APIConnectionError():
                return self._unreached(error)
            case _:
                return self._unmade(error)


def _once(client: AsyncOpenAI, timeout_s: float | None) -> AsyncOpenAI:
    """Return this client without its retries; it shares the connections."""
    if timeout_s is None:
        return client.with_options(max_retries=0)
    return client.with_options(max_retries=0, timeout=timeout_s)


# --- Chat Completions ----------------------------------------------------------------------------


class OpenAIChatModel(_OpenAIModel):
    """A model behind the Chat Completions API, of OpenAI or of a server that speaks it."""

    _shape = "openai"

    def _open(
        self, client: AsyncOpenAI, messages: LLMMessages, tools: Sequence[ToolSpec]
    ) -> AbstractAsyncContextManager[ByteResponse]:
        return client.chat.completions.with_streaming_response.create(
            model=self.model,
            messages=cast("list[ChatCompletionMessageParam]", list(messages)),
            stream=True,
            stream_options={"include_usage": True},
            extra_body=self._and_settings(tools=[_chat_tool(tool) for tool in tools]),
        )

    def _reading(self, request: ModelRequest) -> Reading:
        return _ChatReading(self.model, tool_names(request.tools))


def _chat_tool(tool: ToolSpec) -> JsonObject:
    return {
        "type": "function",
        "function": {
            "name": api_tool_name(tool.name),
            "description": tool.description,
            "parameters": tool.parameters,
        },
    }


@dataclass(slots=True)
class _WrittenCall:
    """A call that arrives in pieces."""

    provider_call_id: str
    name: str = ""
    arguments: str = ""


class _ChatReading(Reading):
    """Reads chunks: deltas of one choice, its finish reason, and last the usage."""

    def __init__(self, model: str, names: Mapping[str, str]) -> None:
        super().__init__()
        self._model = model
        self._names = names
        self._id: str | None = None
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_WrittenCall] = []
        self._call_at: dict[int, _WrittenCall] = {}
        self._finish_reason = ""

    def take(self, event: JsonObject) -> str:
        error = value_at(event, "error")
        if error is not None:
            raise explained(self._model, error)
        self._id = self._id or text_at(event, "id") or None
        if value_at(event, "usage") is not None:
            self._count(event)
        # There are further choices only if the settings ask for several.
        for choice in objects_at(event, "choices")[:1]:
            text = self._take_delta(choice)
            self._finish_reason = text_at(choice, "finish_reason") or self._finish_reason
            self.is_whole = bool(self._finish_reason)
            return text
        return ""

    def _count(self, event: JsonObject) -> None:
        self.counts = Counts(
            input=int_at(event, "usage", "prompt_tokens"),
            output=int_at(event, "usage", "completion_tokens"),
            cached=int_at(event, "usage", "prompt_tokens_details", "cached_tokens"),
            reasoning=int_at(event, "usage", "completion_tokens_details", "reasoning_tokens"),
        )

    def _take_delta(self, choice: JsonObject) -> str:
        self._refusal.append(text_at(choice, "delta", "refusal"))
        self._reasoning.append(text_at(choice, "delta", "reasoning_content"))
        for piece in objects_at(choice, "delta", "tool_calls"):
            call = self._call(int_at(piece, "index"), text_at(piece, "id"))
            call.name += text_at(piece, "function", "name")
            call.arguments += text_at(piece, "function", "arguments")
        text = text_at(choice, "delta", "content")
        self._text.append(text)
        return text

    def _call(self, index: int, provider_call_id: str) -> _WrittenCall:
        """Return the call that a piece belongs to.

        Some servers give all calls the index 0, but different ids.
        """
        call = self._call_at.get(index)
        if call is None or provider_call_id not in ("", call.provider_call_id):
            call = self._call_at[index] = _WrittenCall(provider_call_id)
            self._calls.append(call)
        return call

    def response(self) -> ModelResponse:
        text, refusal = "".join(self._text), "".join(self._refusal)
        check_ending(
            self._model,
            text=text,
            refusal=refusal,
            is_filtered=self._finish_reason == "content_filter",
            is_cut=self._finish_reason == "length",
            has_calls=bool(self._calls),
        )
        calls = [
            tool_call(self._names, call.name, call.arguments, call.provider_call_id)
            for call in self._calls
        ]
        reasoning = storable("".join(self._reasoning))
        made_by = thought_by("openai", self._model)
        thinking = (ThinkingBlock(thinking=reasoning, made_by=made_by),) if reasoning else ()
        return ModelResponse(text, calls, thinking=thinking, provider_response_id=self._id)


# --- Responses -----------------------------------------------------------------------------------


class OpenAIResponsesModel(_OpenAIModel):
    """A model behind OpenAI's Responses API, with `store=False`."""

    _shape = "openai_responses"

    def _open(
        self, client: AsyncOpenAI, messages: LLMMessages, tools: Sequence[ToolSpec]
    ) -> AbstractAsyncContextManager[ByteResponse]:
        return client.responses.with_streaming_response.create(
            model=self.model,
            input=cast("list[ResponseInputItemParam]", list(messages)),
            stream=True,
            store=False,
            extra_body=self._and_settings(tools=[_responses_tool(tool) for tool in tools]),
        )

    def _reading(self, request: ModelRequest) -> Reading:
        return _ResponsesReading(self.model, tool_names(request.tools))


def _responses_tool(tool: ToolSpec) -> JsonObject:
    return {
        "type": "function",
        "name": api_tool_name(tool.name),
        "description": tool.description,
        "parameters": tool.parameters,
        # The API's default is strict, which takes only schemas made for it.
        "strict": False,
    }


class _ResponsesReading(Reading):
    """Reads events: deltas of text, items as they are done, and last the whole response."""

    def __init__(self, model: str, names: Mapping[str, str]) -> None:
        super().__init__()
        self._model = model
        self._names = names
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._calls: list[ToolCall] = []
        self._thinking: list[ThinkingBlock] = []
        self._has_begun_calls = False
        self._last: JsonObject = {}

    def take(self, event: JsonObject) -> str:
        match text_at(event, "type"):
            case "response.output_text.delta":
                text = text_at(event, "delta")
                self._text.append(text)
                return text
            case "response.refusal.delta":
                self._refusal.append(text_at(event, "delta"))
            case "response.output_item.added":
                is_call = text_at(event, "item", "type") == "function_call"
                self._has_begun_calls = self._has_begun_calls or is_call
            case "response.output_item.done":
                self._take_item(value_at(event, "item"))
            case "response.completed" | "response.incomplete":
                self._finish(event)
            case "response.failed":
                raise explained(self._model, value_at(event, "response", "error"))
            case "error":
                raise explained(self._model, value_at(event, "error") or {**event, "type": ""})
            case _:
                pass
        return ""

    def _take_item(self, item: object) -> None:
        if text_at(item, "type") == "function_call":
            name, arguments = text_at(item, "name"), text_at(item, "arguments")
            call = tool_call(self._names, name, arguments, text_at(item, "call_id"))
            self._calls.append(call)
        # Without its encrypted content an item is useless, as the API stores nothing for us.
        elif text_at(item, "type") == "reasoning" and text_at(item, "encrypted_content"):
            summary = [text_at(part, "text") for part in objects_at(item, "summary")]
            self._thinking.append(
                ThinkingBlock(
                    thinking=storable("\n\n".join(summary)),
                    redacted_data=storable(text_at(item, "encrypted_content")),
                    item_id=storable(text_at(item, "id")),
                    made_by=thought_by("openai_responses", self._model),
                )
            )

    def _finish(self, event: JsonObject) -> None:
        self._last = event
        self.is_whole = self.is_finished = True
        self.counts = Counts(
            input=int_at(event, "response", "usage", "input_tokens"),
            output=int_at(event, "response", "usage", "output_tokens"),
            cached=int_at(event, "response", "usage", "input_tokens_details", "cached_tokens"),
            reasoning=int_at(
                event, "response", "usage", "output_tokens_details", "reasoning_tokens"
            ),
        )

    def response(self) -> ModelResponse:
        text, refusal = "".join(self._text), "".join(self._refusal)
        reason = text_at(self._last, "response", "incomplete_details", "reason")
        check_ending(
            self._model,
            text=text,
            refusal=refusal,
            is_filtered=reason == "content_filter",
            is_cut=reason == "max_output_tokens",
            has_calls=self._has_begun_calls,
        )
        return ModelResponse(
            text,
            self._calls,
            thinking=tuple(self._thinking),
            provider_response_id=text_at(self._last, "response", "id") or None,
        )
