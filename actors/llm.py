"""The messages that a view makes for a model, as the providers' APIs take them.

`to_llm_messages` puts the model's responses together again: the calls of one response become one
assistant message, with the text and the thinking that came with them, and their results follow it
directly. It promises:

1. what it gives is accepted by the API of its shape, for any view with no call open, also that of
   a malformed log after enforcement: results that stand elsewhere are put behind their calls;
2. each event of a view is looked at once: the next view of the same conversation costs what is
   new in it, until a condensation;
3. messages are immutable, and those of an earlier view never change.

Thinking goes to the provider that signed it, in its own shape, and is left out where it has no
signature; in the OpenAI shapes there is no place for it.
"""

from __future__ import annotations

import base64
import json
import re
from binascii import Error as Base64Error
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Literal, NamedTuple, TypeAlias, overload
from urllib.parse import unquote_to_bytes

from turnkeeper.runtime import Refused

from ._frozen import FrozenJson, FrozenObject, frozen
from ._wire import wire_call_id, wire_tool_name
from .events import (
    RESULT_CLASSES,
    ActionEvent,
    AgentMessageEvent,
    CondensationSummaryEvent,
    ImageContent,
    LLMConvertibleEvent,
    LLMMessage,
    ObservationEvent,
    ObservationLikeEvent,
    SystemPromptEvent,
    ThinkingBlock,
    UserMessageEvent,
    openai_response,
)
from .view import Derivation, View

__all__ = ["LLMMessages", "LLMShape", "OpenCalls", "to_llm_messages"]

LLMShape: TypeAlias = Literal["openai", "openai_responses", "anthropic"]
"""The OpenAI chat API, the OpenAI responses API, or the Anthropic messages API."""


class OpenCalls(Refused):
    """A view with open calls has no messages: every provider would refuse them."""

    def __init__(self, tool_call_ids: Sequence[str]) -> None:
        super().__init__(
            f"no messages made of a view: calls {', '.join(tool_call_ids)} have no result yet; "
            "take them when each call has its result"
        )
        self.tool_call_ids = tuple(tool_call_ids)


class LLMMessages(Sequence[LLMMessage]):
    """The messages of one view; immutable. A list of them costs a copy, reading them does not."""

    __slots__ = ("_count", "_settled", "_tail", "system")

    def __init__(
        self, settled: list[LLMMessage], tail: tuple[LLMMessage, ...] = (), system: str = ""
    ) -> None:
        # `settled` is only ever appended to, and these messages end where it ends now.
        self._settled = settled
        self._count = len(settled)
        self._tail = tail
        self.system = system
        """The system prompt, where the API takes it beside the messages (Anthropic's does)."""

    def __len__(self) -> int:
        return self._count + len(self._tail)

    def __iter__(self) -> Iterator[LLMMessage]:
        return chain(islice(self._settled, self._count), self._tail)

    @overload
    def __getitem__(self, at: int) -> LLMMessage: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[LLMMessage]: ...
    def __getitem__(self, at: int | slice) -> LLMMessage | Sequence[LLMMessage]:
        if isinstance(at, slice):
            return tuple(self[n] for n in range(*at.indices(len(self))))
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        at %= len(self)
        return self._settled[at] if at < self._count else self._tail[at - self._count]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LLMMessages):
            return NotImplemented
        return self.system == other.system and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __repr__(self) -> str:
        return f"LLMMessages({list(self)}, system={self.system!r})"


def to_llm_messages(view: View, shape: LLMShape = "openai") -> LLMMessages:
    """The messages for a model, in the shape of its provider's API; `OpenCalls` where one is open.

    They are `dict`s that cannot be changed; the official packages take them as they are.
    """
    if shape == "anthropic":
        return view.derive("messages.anthropic", _AnthropicMessages)
    if shape == "openai_responses":
        return view.derive("messages.openai_responses", _ResponsesItems)
    return view.derive("messages.openai", _OpenAIMessages)


class _Calls(NamedTuple):
    """The calls of one response with all their results."""

    actions: Sequence[ActionEvent]
    results: Sequence[ObservationLikeEvent]


class _Responses:
    """Puts responses together: gives single events, and calls with all their results.

    In a log that admission let through, results follow their calls and nothing comes between. In
    others, whatever comes while a response waits for results is held back until it has them.
    Each event is held and released once, so the work is linear for any log.
    """

    def __init__(self) -> None:
        self._actions: list[ActionEvent] = []
        self._results: list[ObservationLikeEvent] = []
        self._missing: dict[str, None] = {}
        self._held: deque[LLMConvertibleEvent] = deque()
        self._early: dict[str, ObservationLikeEvent] = {}

    @property
    def missing(self) -> Sequence[str]:
        """The calls whose results are waited for."""
        return tuple(self._missing)

    def fold(self, event: LLMConvertibleEvent) -> Iterator[LLMConvertibleEvent | _Calls]:
        """Take in the next event; gives what is whole now."""
        if isinstance(event, RESULT_CLASSES):
            if event.tool_call_id not in self._missing:
                self._early[event.tool_call_id] = event
                return
            del self._missing[event.tool_call_id]
            self._results.append(event)
            if self._missing:
                return
            yield self._finished()
        else:
            self._held.append(event)
        while self._held and self._takes(self._held[0]):
            yield from self._take(self._held.popleft())

    def _takes(self, event: LLMConvertibleEvent) -> bool:
        if not self._missing:
            return True
        response_id = self._actions[-1].llm_response_id
        return isinstance(event, ActionEvent) and event.llm_response_id == response_id

    def _take(self, event: LLMConvertibleEvent) -> Iterator[LLMConvertibleEvent | _Calls]:
        if not isinstance(event, ActionEvent):
            yield event
            return
        self._actions.append(event)
        result = self._early.pop(event.tool_call_id, None)
        if result is None:
            self._missing[event.tool_call_id] = None
        else:
            self._results.append(result)
            if not self._missing:
                yield self._finished()

    def _finished(self) -> _Calls:
        calls = _Calls(self._actions, self._results)
        self._actions, self._results = [], []
        return calls


class _OpenAIMessages(Derivation[LLMMessages]):
    """The messages of the OpenAI chat API."""

    def __init__(self) -> None:
        self.length = 0
        self._responses = _Responses()
        self._messages: list[LLMMessage] = []

    def fold(self, event: LLMConvertibleEvent) -> None:
        for whole in self._responses.fold(event):
            if isinstance(whole, _Calls):
                self._messages.append(openai_response(whole.actions))
                self._messages.extend(result.to_llm_message() for result in whole.results)
            elif not _is_silent(whole):
                self._messages.append(whole.to_llm_message())
        self.length += 1

    def result(self) -> LLMMessages:
        if self._responses.missing:
            raise OpenCalls(self._responses.missing)
        return LLMMessages(self._messages)


def _is_silent(event: LLMConvertibleEvent) -> bool:
    """An answer without a word, such as one that was interrupted at once; no API takes it."""
    return isinstance(event, AgentMessageEvent) and not event.content.strip()


class _ResponsesItems(Derivation[LLMMessages]):
    """The input items of the OpenAI responses API, none of which refers to what is stored there."""

    def __init__(self) -> None:
        self.length = 0
        self._responses = _Responses()
        self._items: list[LLMMessage] = []

    def fold(self, event: LLMConvertibleEvent) -> None:
        for whole in self._responses.fold(event):
            self._items.extend(_items(whole))
        self.length += 1

    def result(self) -> LLMMessages:
        if self._responses.missing:
            raise OpenCalls(self._responses.missing)
        return LLMMessages(self._items)


def _items(whole: LLMConvertibleEvent | _Calls) -> Iterator[FrozenObject]:
    match whole:
        case _Calls(actions, results):
            text = "\n".join(action.text for action in actions if action.text)
            if text.strip():
                yield frozen(role="assistant", content=text)
            yield from map(_function_call, actions)
            for result in results:
                call_id = wire_call_id(result.tool_call_id)
                yield frozen(type="function_call_output", call_id=call_id, output=result.content)
        case UserMessageEvent(content=content, images=images) if images:
            parts = [frozen(type="input_text", text=content)] if content else []
            shown = (frozen(type="input_image", image_url=at.url, detail="auto") for at in images)
            yield frozen(role="user", content=(*parts, *shown))
        case UserMessageEvent(content=content) | CondensationSummaryEvent(content=content):
            yield frozen(role="user", content=content or _NOTHING_SAID)
        case SystemPromptEvent(content=content):
            yield frozen(role="system", content=content)
        case AgentMessageEvent(content=content) if not _is_silent(whole):
            yield frozen(role="assistant", content=content)
        case _:
            pass


def _function_call(action: ActionEvent) -> FrozenObject:
    return frozen(
        type="function_call",
        call_id=wire_call_id(action.tool_call_id),
        name=wire_tool_name(action.tool_name),
        arguments=json.dumps(action.arguments, ensure_ascii=False),
    )


class _AnthropicMessages(Derivation[LLMMessages]):
    """The messages of the Anthropic messages API: user and assistant take turns, user first."""

    def __init__(self) -> None:
        self.length = 0
        self._responses = _Responses()
        self._messages: list[LLMMessage] = []
        # The last message is open until the other side speaks: what comes next may join it.
        self._role: Literal["user", "assistant"] = "user"
        self._blocks: list[FrozenObject] = []
        self._system: list[str] = []

    def fold(self, event: LLMConvertibleEvent) -> None:
        for whole in self._responses.fold(event):
            match whole:
                case _Calls(actions, results):
                    thinking = [block for action in actions for block in action.thinking]
                    text = "\n".join(action.text for action in actions if action.text)
                    self._say("assistant", _answer(text), _thinking(thinking))
                    self._say("assistant", [_tool_use(action) for action in actions])
                    self._say("user", [_tool_result(result) for result in results])
                case SystemPromptEvent(content=content):
                    self._system.append(content)
                case UserMessageEvent(content=content, images=images):
                    self._say("user", _question(content, images))
                case CondensationSummaryEvent(content=content):
                    self._say("user", _question(content, ()))
                case AgentMessageEvent(content=content, thinking=blocks):
                    if content.strip():
                        self._say("assistant", _answer(content), _thinking(blocks))
                case _:
                    pass
        self.length += 1

    def result(self) -> LLMMessages:
        if self._responses.missing:
            raise OpenCalls(self._responses.missing)
        tail = (self._last_message(),) if self._blocks else ()
        return LLMMessages(self._messages, tail, "\n\n".join(self._system))

    def _say(
        self,
        role: Literal["user", "assistant"],
        blocks: Sequence[FrozenObject],
        thinking: Sequence[FrozenObject] = (),
    ) -> None:
        if role != self._role:
            if not self._messages and not self._blocks:
                self._blocks.append(_text(_NOTHING_BEFORE))
            self._messages.append(self._last_message())
            self._role, self._blocks = role, []
        if thinking and self._blocks and self._blocks[0]["type"] not in _THINKING_TYPES:
            # With thinking switched on, an assistant message has to begin with it.
            self._blocks[:0] = thinking
        else:
            self._blocks.extend(thinking)
        self._blocks.extend(blocks)

    def _last_message(self) -> LLMMessage:
        return frozen(role=self._role, content=tuple(self._blocks))


_THINKING_TYPES = ("thinking", "redacted_thinking")
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?P<options>(?:;[^;,]*)*),(?P<data>.*)", re.DOTALL)
# The API refuses messages without a word, and a conversation that the assistant begins.
_NOTHING_SAID = "(an empty message)"
_NOTHING_BEFORE = "(the conversation begins here)"
_NO_IMAGE = "(an image that cannot be shown)"


def _text(text: str) -> FrozenObject:
    return frozen(type="text", text=text)


def _answer(text: str) -> Sequence[FrozenObject]:
    return [_text(text)] if text.strip() else []


def _question(text: str, images: Sequence[ImageContent]) -> Sequence[FrozenObject]:
    blocks = [*_answer(text), *map(_image, images)]
    return blocks or [_text(_NOTHING_SAID)]


def _image(image: ImageContent) -> FrozenObject:
    if not image.url.startswith("data:"):
        return frozen(type="image", source=frozen(type="url", url=image.url))
    parts = _DATA_URL.fullmatch(image.url)
    if parts is None or parts["type"] not in _IMAGE_TYPES:
        return _text(_NO_IMAGE)
    data = unquote_to_bytes(parts["data"])
    if ";base64" in parts["options"]:
        try:
            data = base64.b64decode(data, validate=True)
        except Base64Error:
            return _text(_NO_IMAGE)
    encoded = base64.b64encode(data).decode()
    source = frozen(type="base64", media_type=parts["type"], data=encoded)
    return frozen(type="image", source=source)


def _thinking(blocks: Sequence[ThinkingBlock]) -> Sequence[FrozenObject]:
    shown: list[FrozenObject] = []
    for block in blocks:
        if block.redacted_data is not None:
            shown.append(frozen(type="redacted_thinking", data=block.redacted_data))
        elif block.signature is not None:
            thinking, signature = block.thinking, block.signature
            shown.append(frozen(type="thinking", thinking=thinking, signature=signature))
    return shown


def _tool_use(action: ActionEvent) -> FrozenObject:
    return frozen(
        type="tool_use",
        id=wire_call_id(action.tool_call_id),
        name=wire_tool_name(action.tool_name),
        input=action.arguments,
    )


def _tool_result(result: ObservationLikeEvent) -> FrozenObject:
    parts: dict[str, FrozenJson] = {
        "type": "tool_result",
        "tool_use_id": wire_call_id(result.tool_call_id),
    }
    if result.content.strip():
        parts["content"] = result.content
    if not isinstance(result, ObservationEvent) or result.is_error:
        parts["is_error"] = True
    return frozen(**parts)
