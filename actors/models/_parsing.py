"""The pure part that the adapters share: reading JSON, events, calls, token counts and errors.

Providers, and the servers that imitate them, may send any field in any shape, or omit it. A field
that is missing or has the wrong type reads as None, "" or 0.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeAlias

from ..events import TokenUsage
from ..tool_calls import ToolCall
from ..values.api_names import api_tool_name
from ..values.frozen import FrozenObject
from ..values.text import storable
from ..values.type_names import a_type
from .base import (
    ContextOverflow,
    MalformedHistory,
    ModelError,
    ModelRefusal,
    ModelUnavailable,
    Prices,
    ToolSpec,
)

__all__ = [
    "Counts",
    "JsonObject",
    "ModelFailure",
    "SentEvents",
    "check_ending",
    "explained",
    "int_at",
    "objects_at",
    "retry_after_s",
    "text_at",
    "tool_call",
    "tool_names",
    "value_at",
]

JsonObject: TypeAlias = Mapping[str, object]

ModelFailure: TypeAlias = (
    ModelUnavailable | ContextOverflow | MalformedHistory | ModelRefusal | ModelError
)

_TOKENS_PRICED = 1_000_000
_FOUND_LENGTH_MAX = 500


# --- reading JSON from elsewhere -----------------------------------------------------------------


def value_at(value: object, *path: str) -> object:
    """Return the value at this path; None if the path ends early."""
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def text_at(value: object, *path: str) -> str:
    found = value_at(value, *path)
    return found if isinstance(found, str) else ""


def int_at(value: object, *path: str) -> int:
    found = value_at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def objects_at(value: object, *path: str) -> Sequence[JsonObject]:
    """Return the objects of the array at this path."""
    found = value_at(value, *path)
    if not isinstance(found, list | tuple):
        return ()
    return [each for each in found if isinstance(each, Mapping)]


class SentEvents:
    """Reads the bytes of a stream of server-sent events; yields the data of each event.

    Lines end with LF or CRLF, as all providers send them. An event counts only once the empty line
    after it has come. A byte order mark before the first line is passed over, as the standard says.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._mark = codecs.BOM_UTF8
        self._data: list[bytes] = []

    @property
    def is_within_event(self) -> bool:
        """True if a part of an event has come, or of a line."""
        return bool(self._rest or self._data)

    def feed(self, chunk: bytes) -> Iterator[str]:
        # By hand: the HTTP client uses `str.splitlines`, which also splits at characters that JSON
        # text may hold unescaped, such as U+2028.
        first, *others = chunk.split(b"\n")
        self._rest += first  # in place: a long line may come in thousands of chunks
        for other in others:
            line = bytes(self._rest).removeprefix(self._mark).removesuffix(b"\r")
            self._mark = b""
            self._rest = bytearray(other)
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data).decode("utf-8", "replace")
                self._data = []


# --- calls and tokens ----------------------------------------------------------------------------


def tool_names(tools: Sequence[ToolSpec]) -> Mapping[str, str]:
    """Map the names sent to the provider to the tools' own names."""
    return {api_tool_name(tool.name): tool.name for tool in tools}


def tool_call(
    names: Mapping[str, str], wire_name: str, arguments: str, provider_call_id: str
) -> ToolCall:
    """Return the call that a model wrote; arguments that are not a JSON object stay as text."""
    name = names.get(wire_name, storable(wire_name))
    call_id = storable(provider_call_id) or None
    try:
        read = _object(arguments) if arguments.strip() else FrozenObject()
    except (ValueError, RecursionError):
        return ToolCall(name, {}, call_id, storable(arguments))
    return ToolCall(name, read, call_id)


def _object(text: str) -> FrozenObject:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(  # noqa: TRY004 - the text is at fault, as if it were not JSON
            f"{a_type(value)}, not an object"
        )
    return FrozenObject(value)


@dataclass(frozen=True, slots=True)
class Counts:
    """The tokens of one response. `input` includes tokens read from the cache and written to it."""

    input: int = 0
    output: int = 0
    cached: int = 0
    cache_written: int = 0
    reasoning: int = 0

    def usage(self, model: str, prices: Prices | None, latency_s: float) -> TokenUsage:
        return TokenUsage(
            input_tokens=self.input,
            output_tokens=self.output,
            cached_tokens=self.cached,
            cost=0.0 if prices is None else self._cost(prices),
            latency_s=latency_s,
            reasoning_tokens=self.reasoning,
            cache_written_tokens=self.cache_written,
            model=storable(model),
        )

    def _cost(self, prices: Prices) -> float:
        cached = prices.input if prices.cached is None else prices.cached
        written = prices.input if prices.cache_written is None else prices.cache_written
        return (
            (self.input - self.cached - self.cache_written) * prices.input
            + self.cached * cached
            + self.cache_written * written
            + self.output * prices.output
        ) / _TOKENS_PRICED


# --- failures ------------------------------------------------------------------------------------

_BAD_REQUEST = (400, 422)
_TOO_LARGE = 413
_KEY_REFUSED = (401, 403)
_TRANSIENT = (408, 409, 429)
_SERVER_FAILED = 500

_OVERFLOW_CODES = ("context_length_exceeded", "request_too_large", "model_context_window_exceeded")
# The last pattern is for one request that needs more tokens than a minute allows: it can never
# succeed, however long one waits.
_OVERFLOW_TEXT = re.compile(
    r"maximum context length|context limit|context window|prompt is too long"
    r"|^request too large for",
    re.IGNORECASE,
)
# A history with too many messages or characters is too long. One part that is too long is not that.
_TOO_MANY_CODES = ("array_above_max_length", "string_above_max_length")
_TOO_MANY_TEXT = re.compile(r"^invalid '(messages|input)\b.*too long", re.IGNORECASE)
_REFUSAL_CODE = re.compile(r"content_filter|invalid_prompt|\w*policy(_violation)?")
_REFUSAL_TEXT = re.compile(r"content filtering policy", re.IGNORECASE)
_PERMANENT_CODES = (
    "authentication_error",
    "billing_error",
    "data_residency_mismatch",
    "insufficient_quota",
    "invalid_request_error",
    "not_found_error",
    "permission_error",
)
# An unreadable image is part of the history too, and a condensation removes it.
_HISTORY_CODE = re.compile(r"\w*image\w*|invalid_encrypted_content")
_HISTORY_PARAM = re.compile(r"(messages|input)\b")
_HISTORY_TEXT = re.compile(
    r"^messages\b|`tool_use`|`tool_result`|\btool_calls?\b|\btool_call_ids?\b"
    r"|function call|conversation must|messages with role|role 'tool'"
    r"|`thinking`|encrypted content for item|reasoning_content|of type 'reasoning'",
    re.IGNORECASE,
)


def explained(
    model: str,
    error: object,
    *,
    status: int | None = None,
    retry_after_s: float | None = None,
) -> ModelFailure:
    """Return the failure that a provider's error object stands for.

    `status` is that of the HTTP response; None if the error came within a stream.
    """
    codes = [text_at(error, key) for key in ("code", "type") if text_at(error, key)]
    message = text_at(error, "message")
    found = _found(status, codes, message)
    # Only then is the error about the request; a server that fails may send any text.
    is_about_it = status is None or status in (*_BAD_REQUEST, _TOO_LARGE, 429)
    if status == _TOO_LARGE or (
        is_about_it
        and (
            _any(codes, _OVERFLOW_CODES)
            or _OVERFLOW_TEXT.search(message)
            or _TOO_MANY_TEXT.search(message)
            or (_any(codes, _TOO_MANY_CODES) and _HISTORY_PARAM.match(text_at(error, "param")))
        )
    ):
        return ContextOverflow(model, found)
    if is_about_it and (any(map(_REFUSAL_CODE.fullmatch, codes)) or _REFUSAL_TEXT.search(message)):
        return ModelRefusal(model, found)
    if (status is None or status in _BAD_REQUEST) and (
        any(map(_HISTORY_CODE.fullmatch, codes))
        or _HISTORY_PARAM.match(text_at(error, "param"))
        or _HISTORY_TEXT.search(message)
    ):
        return MalformedHistory(model, found)
    if status is None:
        is_transient = not _any(codes, _PERMANENT_CODES)
    else:
        is_transient = status in _TRANSIENT or status >= _SERVER_FAILED
        # An exhausted quota comes as a rate limit, but waiting does not help.
        is_transient = is_transient and "insufficient_quota" not in codes
    if is_transient:
        return ModelUnavailable(model, found, retry_after_s=retry_after_s)
    return ModelError(model, found)


def _found(status: int | None, codes: Sequence[str], message: str) -> str:
    # The message quotes part of the refused key, which must not reach a log.
    said = "the key was refused" if status in _KEY_REFUSED else " ".join(message.split())
    what = " ".join(str(part) for part in (status, *codes[:1]) if part is not None)
    text = ": ".join(part for part in (what, said) if part)
    return storable(text)[:_FOUND_LENGTH_MAX] or "an error without a message"


def _any(codes: Sequence[str], known: Sequence[str]) -> bool:
    return any(code in known for code in codes)


def check_ending(
    model: str,
    *,
    text: str,
    refusal: str = "",
    is_filtered: bool = False,
    is_cut: bool,
    has_calls: bool,
) -> None:
    """Raise if a complete response is not an answer.

    A text that was cut for its length still is an answer; a call that was cut is not.
    """
    if refusal:
        raise ModelRefusal(model, "it refused", text=storable(refusal))
    if is_filtered:
        raise ModelRefusal(model, "a filter held its answer back", text=storable(text))
    if is_cut and has_calls:
        raise ModelError(model, "it ran out of tokens while it wrote a call; allow it more")
    if is_cut and not text:
        raise ModelError(model, "it ran out of tokens before it wrote any text; allow it more")


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Return the delay that a provider asks for: in seconds, in milliseconds, or as a date."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    try:
        until = parsedate_to_datetime(headers.get("retry-after", "")).timestamp()
    except (ValueError, OverflowError):
        return None
    return max(0.0, until - now)
