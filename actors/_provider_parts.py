"""What the adapters to the providers' APIs share and that neither waits nor looks at the world.

Providers and the many servers that imitate them send what they like, so nothing here trusts a
field to be there: what is missing reads as None, as "" or as 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeAlias

from ._frozen import FrozenObject
from ._text import storable
from ._wire import wire_tool_name
from .agents import ToolCall
from .events import TokenUsage
from .models import (
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
    """What is at this path; None where the path ends early."""
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
    """The objects of the array at this path."""
    found = value_at(value, *path)
    if not isinstance(found, list | tuple):
        return ()
    return [each for each in found if isinstance(each, Mapping)]


class SentEvents:
    """Takes the bytes of a stream of server-sent events, and gives the data of each event.

    Lines end with LF or CRLF, as all providers send them. An event that the stream does not end
    with an empty line is none.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[str]:
        # By hand: `str.splitlines`, which the HTTP client would use, also parts a line at the
        # separators that JSON text may hold as they are, such as U+2028.
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for ended in lines:
            line = ended.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data).decode("utf-8", "replace")
                self._data = []


# --- calls and tokens ----------------------------------------------------------------------------


def tool_names(tools: Sequence[ToolSpec]) -> Mapping[str, str]:
    """The tools' own names, by the names that the provider is told."""
    return {wire_tool_name(tool.name): tool.name for tool in tools}


def tool_call(
    names: Mapping[str, str], wire_name: str, arguments: str, provider_call_id: str
) -> ToolCall:
    """The call that a model wrote; what is no JSON object is kept as it was written."""
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
        raise ValueError(  # noqa: TRY004 - the text is at fault, as where it is not JSON
            f"a {type(value).__name__}, not an object"
        )
    return FrozenObject(value)


@dataclass(frozen=True, slots=True)
class Counts:
    """The tokens of one response. `input` holds the cached and the cache-written ones too."""

    input: int = 0
    output: int = 0
    cached: int = 0
    cache_written: int = 0

    def usage(self, prices: Prices | None, latency_s: float) -> TokenUsage:
        return TokenUsage(
            input_tokens=self.input,
            output_tokens=self.output,
            cached_tokens=self.cached,
            cost=0.0 if prices is None else self._cost(prices),
            latency_s=latency_s,
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
# The last is what a request of its own is told that is larger than a whole minute's tokens: to
# wait and to ask the same again would never do.
_OVERFLOW_TEXT = re.compile(
    r"maximum context length|context limit|context window|prompt is too long"
    r"|^request too large for",
    re.IGNORECASE,
)
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
# An image that cannot be read stands in the history too, and goes from it with a condensation.
_HISTORY_CODE = re.compile(r"\w*image\w*")
_HISTORY_PARAM = re.compile(r"(messages|input)\b")
_HISTORY_TEXT = re.compile(
    r"^messages\b|`tool_use`|`tool_result`|\btool_calls?\b|\btool_call_ids?\b"
    r"|function call|conversation must|messages with role|role 'tool'",
    re.IGNORECASE,
)


def explained(
    model: str,
    error: object,
    *,
    status: int | None = None,
    retry_after_s: float | None = None,
) -> ModelFailure:
    """What a provider's error object means for whoever asked.

    `status` is that of the HTTP response; None where the error came in the middle of a stream, or
    in place of its end.
    """
    codes = [text_at(error, key) for key in ("code", "type") if text_at(error, key)]
    message = text_at(error, "message")
    found = _found(status, codes, message)
    # Whether it is about the request at all; a failing server may say anything.
    is_about_it = status is None or status in (*_BAD_REQUEST, _TOO_LARGE, 429)
    if status == _TOO_LARGE or (
        is_about_it and (_any(codes, _OVERFLOW_CODES) or _OVERFLOW_TEXT.search(message))
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
        # A quota that is used up comes as a rate limit, but no waiting helps.
        is_transient = is_transient and "insufficient_quota" not in codes
    if is_transient:
        return ModelUnavailable(model, found, retry_after_s=retry_after_s)
    return ModelError(model, found)


def _found(status: int | None, codes: Sequence[str], message: str) -> str:
    # A refused key stands in the message, partly; nobody wants it in a log.
    said = "the key was refused" if status in _KEY_REFUSED else " ".join(message.split())
    what = " ".join(str(part) for part in (status, *codes[:1]) if part is not None)
    text = ": ".join(part for part in (what, said) if part)
    return storable(text)[:_FOUND_LENGTH_MAX] or "an error without a word"


def _any(codes: Sequence[str], known: Sequence[str]) -> bool:
    return any(code in known for code in codes)


def check_ending(
    model: str,
    *,
    text: str,
    refusal: str = "",
    is_filtered: bool = False,
    is_cut: bool = False,
    has_calls: bool = False,
) -> None:
    """Raise where a response that came to its end is no answer.

    One that was cut for its length is an answer as far as it goes, unless it was cut in a call.
    """
    if refusal:
        raise ModelRefusal(model, "it refused", text=storable(refusal))
    if is_filtered:
        raise ModelRefusal(model, "a filter held its answer back", text=storable(text))
    if is_cut and has_calls:
        raise ModelError(model, "its tokens ran out while it wrote a call; allow it more")
    if is_cut and not text:
        raise ModelError(model, "its tokens ran out before it said a word; allow it more")


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """How long a provider asks to be left alone: in seconds, milliseconds, or until a date."""
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
