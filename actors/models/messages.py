"""Converts a view to messages for a model, in the shapes of the providers' APIs.

`to_llm_messages` reassembles the model's responses: the calls of one response become one assistant
message, with the text and the thinking that came with them, and their results follow directly. It
promises:

1. The shape's API accepts the messages of any view without open calls, even if the log is
malformed: results that are elsewhere are moved behind their calls.
2. Each event of a view is read once. The next view of the same conversation costs only its new
   events, until a condensation.
3. Messages are immutable, and those of an earlier view never change.

Thinking goes back to the API and the model that can read it: signed thinking to Anthropic, and to
OpenAI's APIs the reasoning that came before calls, beside them. All other thinking is left out.

A single part can make a provider refuse the whole request: an empty text, an image that is not one,
too many calls in one message. Such parts come from users, tools, models and old logs. They are
replaced or split here, never in the log.
"""

from __future__ import annotations

import base64
import json
import re
from binascii import Error as Base64Error
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, overload
from urllib.parse import unquote_to_bytes

from turnkeeper.runtime import Refused

from ..core.snapshots import SLICE_EVENTS, Slices
from ..core.view import Derivation, View
from ..events import (
    RESULT_CLASSES,
    RESULT_KINDS,
    ActionEvent,
    AgentMessageEvent,
    CondensationSummaryEvent,
    FileContent,
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
from ..values.api_names import api_call_id, api_tool_name
from ..values.frozen import FrozenJson, FrozenObject, frozen
from ..values.text import check_bool

__all__ = ["LLMMessages", "LLMShape", "OpenCalls", "making_llm_messages", "to_llm_messages"]

LLMShape: TypeAlias = Literal["openai", "openai_responses", "anthropic"]
"""The OpenAI chat API, the OpenAI responses API, or the Anthropic messages API."""


class OpenCalls(Refused):
    """The view has open calls; every provider would refuse its messages."""

    def __init__(self, tool_call_ids: Sequence[str]) -> None:
        super().__init__(
            f"no messages made of a view: calls {', '.join(tool_call_ids)} have no result yet; "
            "ask again when each call has its result"
        )
        self.tool_call_ids = tuple(tool_call_ids)


class LLMMessages(Sequence[LLMMessage]):
    """The messages of one view; immutable. Only making a list of them copies them."""

    __slots__ = ("_count", "_settled", "_tail", "system")

    def __init__(
        self, settled: list[LLMMessage], tail: tuple[LLMMessage, ...] = (), system: str = ""
    ) -> None:
        # `settled` only grows; these messages end where it ends now.
        self._settled = settled
        self._count = len(settled)
        self._tail = tail
        self.system = system
        """The system prompt, if the API takes it separately from the messages (as Anthropic's
        does)."""

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


def to_llm_messages(
    view: View,
    shape: LLMShape = "openai",
    *,
    model: str = "",
    is_plain: bool = False,
    show_author: bool = False,
) -> LLMMessages:
    """Return the messages for a model, in the shape of its provider's API.

    `model` is the model that is asked; reasoning of other models is left out. With `is_plain`,
    images are only mentioned and thinking is left out: a provider that cannot read them refuses the
    whole request. With `show_author`, the text of a chat message begins with the name of its
    author, if it has one, and a colon. Raises `OpenCalls` if a call has no result, and
    `InvalidInput` if `is_plain` or `show_author` is not a bool. The messages are immutable `dict`s,
    which the official packages take as they are.
    """
    check_bool("is_plain", is_plain)
    check_bool("show_author", show_author)
    own = None if is_plain else thought_by(shape, model)
    return view.derive(
        ("messages", shape, own, is_plain, show_author),
        partial(_DERIVATIONS[shape], own=own, is_plain=is_plain, show_author=show_author),
    )


def making_llm_messages(
    view: View,
    shape: LLMShape,
    *,
    model: str = "",
    is_plain: bool = False,
    show_author: bool = False,
) -> Slices[LLMMessages]:
    """Return what `to_llm_messages` returns, made in slices; later views do not begin with it."""
    own = None if is_plain else thought_by(shape, model)
    made = _DERIVATIONS[shape](own=own, is_plain=is_plain, show_author=show_author)
    for count, event in enumerate(view, 1):
        made.fold(event)
        if count % SLICE_EVENTS == 0:
            yield
    return made.result()


def thought_by(shape: LLMShape, model: str) -> str:
    """Return the mark of thinking that only this model, behind this API, can read."""
    return f"{shape}:{model}"


class _Calls(NamedTuple):
    """The calls of one response with all their results."""

    actions: Sequence[ActionEvent]
    results: Sequence[ObservationLikeEvent]


_RESPONSE_KINDS: Final = RESULT_KINDS | {"action"}


class _Responses:
    """Reassembles responses: yields single events, and calls with all their results.

    In a log that passed admission, results follow their calls directly. In other logs, events that
    come while a response waits for results are held back until it has them. Each event is held and
    released once, so the work is linear for any log.
    """

    def __init__(self) -> None:
        self._actions: list[ActionEvent] = []
        self._results: list[ObservationLikeEvent] = []
        self._missing: dict[str, None] = {}
        self._held: deque[LLMConvertibleEvent] = deque()
        self._early: dict[str, ObservationLikeEvent] = {}

    @property
    def missing(self) -> Sequence[str]:
        """The calls that still have no result."""
        return tuple(self._missing)

    def fold(self, event: LLMConvertibleEvent) -> Iterable[LLMConvertibleEvent | _Calls]:
        """Process the next event; return the events and responses that are now complete."""
        if not self._missing and event.kind not in _RESPONSE_KINDS:
            return (event,)  # nothing is held while no call waits for its result
        return self._fold(event)

    def _fold(self, event: LLMConvertibleEvent) -> Iterator[LLMConvertibleEvent | _Calls]:
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


class _Convert(Protocol):
    def __call__(
        self, whole: LLMConvertibleEvent | _Calls, own: str | None, *, is_plain: bool
    ) -> Iterator[LLMMessage]: ...


class _FlatMessages(Derivation[LLMMessages]):
    """The messages of an API that takes those of each event by themselves."""

    def __init__(
        self, convert: _Convert, *, own: str | None, is_plain: bool, show_author: bool
    ) -> None:
        self.length = 0
        self._convert = convert
        self._own = own
        self._is_plain = is_plain
        self._show_author = show_author
        self._responses = _Responses()
        self._messages: list[LLMMessage] = []

    def fold(self, event: LLMConvertibleEvent) -> None:
        for whole in self._responses.fold(_signed(event) if self._show_author else event):
            self._messages.extend(self._convert(whole, self._own, is_plain=self._is_plain))
        self.length += 1

    def result(self) -> LLMMessages:
        if self._responses.missing:
            raise OpenCalls(self._responses.missing)
        return LLMMessages(self._messages)


def _chat_messages(
    whole: LLMConvertibleEvent | _Calls, own: str | None, *, is_plain: bool
) -> Iterator[LLMMessage]:
    """Yield the messages of the OpenAI chat API."""
    match whole:
        case _Calls(actions, results):
            for n in range(0, len(actions), _CALLS_MAX):
                some = actions[n : n + _CALLS_MAX]
                response = openai_response(some)
                if reasoning := "".join(block.thinking for block in _own_thinking(some, own)):
                    response = FrozenObject({**response, "reasoning_content": reasoning})
                yield response
                ids = {action.tool_call_id for action in some}
                for result in results:
                    if result.tool_call_id in ids:
                        call_id = api_call_id(result.tool_call_id)
                        content = _chat_text(result.content)
                        yield frozen(role="tool", tool_call_id=call_id, content=content)
        # The commonest first: a pydantic class that does not match takes long to say so.
        case AgentMessageEvent(content=content) if content.strip():
            yield frozen(role="assistant", content=_chat_text(content))
        case UserMessageEvent(content=content, images=images, files=files) if images or files:
            text = _split(content, _CHAT_LENGTH_MAX) if content.strip() else ()
            parts = [frozen(type="text", text=piece) for piece in text]
            for image in images:
                url = None if is_plain else _image_url(image)
                if url is None:
                    parts.append(frozen(type="text", text=_NO_IMAGE))
                else:
                    parts.append(frozen(type="image_url", image_url=frozen(url=url)))
            for file in files:
                parts += _chat_file(file, is_plain=is_plain)
            yield frozen(role="user", content=tuple(parts))
        case UserMessageEvent(content=content) | CondensationSummaryEvent(content=content):
            yield frozen(role="user", content=_chat_text(_said(content)))
        case SystemPromptEvent(content=content) if content.strip():
            yield frozen(role="system", content=_chat_text(content))
        case _:
            pass


def _signed(event: LLMConvertibleEvent) -> LLMConvertibleEvent:
    """Return a chat message with its author before its text; any other event unchanged."""
    if not isinstance(event, UserMessageEvent) or event.author is None:
        return event
    signed = f"{event.author}: {event.content}" if event.content.strip() else f"{event.author}:"
    return event.model_copy(update={"content": signed})


def _own_thinking(actions: Sequence[ActionEvent], own: str | None) -> Iterator[ThinkingBlock]:
    """Yield the thinking before these calls, if the model that is asked can read it."""
    for action in actions:
        for block in action.thinking:
            if own is not None and block.made_by == own:
                yield block


def _chat_text(text: str) -> FrozenJson:
    """Return this text as the content of a message; split it into parts if it is too long."""
    if len(text) <= _CHAT_LENGTH_MAX:
        return text
    return tuple(frozen(type="text", text=piece) for piece in _split(text, _CHAT_LENGTH_MAX))


def _split(text: str, length_max: int) -> Sequence[str]:
    return [text[n : n + length_max] for n in range(0, len(text), length_max)] or [text]


def _said(text: str) -> str:
    return text if text.strip() else _NOTHING_SAID


def _items(
    whole: LLMConvertibleEvent | _Calls, own: str | None, *, is_plain: bool
) -> Iterator[LLMMessage]:
    """Yield the input items of the OpenAI responses API; none refers to items stored there."""
    match whole:
        case _Calls(actions, results):
            for block in _own_thinking(actions, own):
                shown = (frozen(type="summary_text", text=block.thinking),)
                yield frozen(
                    type="reasoning",
                    id=block.item_id or "",
                    summary=shown if block.thinking else (),
                    encrypted_content=block.redacted_data,
                )
            text = "\n".join(action.text for action in actions if action.text)
            if text.strip():
                yield frozen(role="assistant", content=text)
            yield from map(_function_call, actions)
            for result in results:
                call_id = api_call_id(result.tool_call_id)
                yield frozen(
                    type="function_call_output", call_id=call_id, output=_item_text(result.content)
                )
        case UserMessageEvent(content=content, images=images, files=files) if images or files:
            pieces = _split(content, _ITEM_LENGTH_MAX) if content.strip() else ()
            parts = [frozen(type="input_text", text=piece) for piece in pieces]
            for image in images:
                url = None if is_plain else _image_url(image)
                if url is None:
                    parts.append(frozen(type="input_text", text=_NO_IMAGE))
                else:
                    parts.append(frozen(type="input_image", image_url=url, detail="auto"))
            for file in files:
                parts += _file_items(file, is_plain=is_plain)
            yield frozen(role="user", content=tuple(parts))
        case UserMessageEvent(content=content) | CondensationSummaryEvent(content=content):
            yield frozen(role="user", content=_item_text(_said(content)))
        case SystemPromptEvent(content=content) if content.strip():
            yield frozen(role="system", content=_item_text(content))
        case AgentMessageEvent(content=content) if content.strip():
            for piece in _split(content, _ITEM_LENGTH_MAX):
                yield frozen(role="assistant", content=piece)
        case _:
            pass


def _item_text(text: str) -> FrozenJson:
    """Return this text as the content of an item; split it into parts if it is too long."""
    pieces = _split(text, _ITEM_LENGTH_MAX)
    if len(pieces) == 1:
        return text
    return tuple(frozen(type="input_text", text=piece) for piece in pieces)


def _function_call(action: ActionEvent) -> FrozenObject:
    return frozen(
        type="function_call",
        call_id=api_call_id(action.tool_call_id),
        name=api_tool_name(action.tool_name),
        arguments=json.dumps(action.arguments, ensure_ascii=False),
    )


class _AnthropicMessages(Derivation[LLMMessages]):
    """The messages of the Anthropic messages API: user and assistant take turns, user first."""

    def __init__(
        self,
        *,
        own: str | None,  # noqa: ARG002 - as the others
        is_plain: bool,
        show_author: bool,
    ) -> None:
        self.length = 0
        self._is_plain = is_plain
        self._show_author = show_author
        self._responses = _Responses()
        self._messages: list[LLMMessage] = []
        # The last message stays open until the other side speaks: the next event may join it.
        self._role: Literal["user", "assistant"] = "user"
        self._blocks: list[FrozenObject] = []
        self._system: list[str] = []

    def fold(self, event: LLMConvertibleEvent) -> None:
        for whole in self._responses.fold(_signed(event) if self._show_author else event):
            match whole:
                case _Calls(actions, results):
                    thinking = self._thinking(*(action.thinking for action in actions))
                    text = "\n".join(action.text for action in actions if action.text)
                    self._say("assistant", _answer(text), thinking)
                    self._say("assistant", [_tool_use(action) for action in actions])
                    self._say("user", [_tool_result(result) for result in results])
                case SystemPromptEvent(content=content) if content.strip():
                    self._system.append(content)
                case UserMessageEvent(content=content, images=images, files=files):
                    shown = [self._image(image) for image in images]
                    shown += [_file_block(file, is_plain=self._is_plain) for file in files]
                    self._say("user", [*_answer(content), *shown] or [_text(_NOTHING_SAID)])
                case CondensationSummaryEvent(content=content):
                    self._say("user", [_text(_said(content))])
                case AgentMessageEvent(content=content, thinking=blocks) if content.strip():
                    self._say("assistant", _answer(content), self._thinking(blocks))
                case _:
                    pass
        self.length += 1

    def result(self) -> LLMMessages:
        if self._responses.missing:
            raise OpenCalls(self._responses.missing)
        tail = [self._last_message()] if self._blocks else []
        if self._blocks and self._role == "assistant":
            # Newer models refuse a history that ends with an assistant message.
            tail.append(frozen(role="user", content=(_text(_GO_ON),)))
        return LLMMessages(self._messages, tuple(tail), "\n\n".join(self._system))

    def _image(self, image: ImageContent) -> FrozenObject:
        return _text(_NO_IMAGE) if self._is_plain else _image_block(image)

    def _thinking(self, *responses: Sequence[ThinkingBlock]) -> Sequence[FrozenObject]:
        return () if self._is_plain else _thinking_blocks(chain.from_iterable(responses))

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
            # With thinking switched on, an assistant message must begin with it.
            self._blocks[:0] = thinking
        else:
            self._blocks.extend(thinking)
        self._blocks.extend(blocks)

    def _last_message(self) -> LLMMessage:
        return frozen(role=self._role, content=tuple(self._blocks))


_DERIVATIONS: Mapping[LLMShape, Callable[..., Derivation[LLMMessages]]] = {
    "openai": partial(_FlatMessages, _chat_messages),
    "openai_responses": partial(_FlatMessages, _items),
    "anthropic": _AnthropicMessages,
}
_CALLS_MAX = 128
"""The calls that one message of the chat API may have."""
_CHAT_LENGTH_MAX = 1_048_576
_ITEM_LENGTH_MAX = 10_485_760
"""The characters that one text of the chat API may have, and of the responses API."""
_IMAGE_BYTES_MAX = 5_242_880
"""The size of an image's base64 that the strictest of the three APIs takes; the others take
more."""
_PDF = "application/pdf"
_PDF_LENGTH_MAX = 30 << 20
"""The characters of a PDF's base64: Anthropic takes requests of 32 MB, the others take more."""
_THINKING_TYPES = ("thinking", "redacted_thinking")
_IMAGE_STARTS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
_WEB_URL = re.compile(r"https?://\S+", re.IGNORECASE)
_DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?P<options>(?:;[^;,]*)*),(?P<data>.*)", re.DOTALL)
# The APIs refuse messages without text, and a conversation that the assistant begins or ends.
_NOTHING_SAID = "(an empty message)"
_NO_OUTPUT = "(no output)"
_GO_ON = "(go on)"
_NOTHING_BEFORE = "(the conversation begins here)"
_NO_IMAGE = "(an image that cannot be shown)"


def _text(text: str) -> FrozenObject:
    return frozen(type="text", text=text)


def _answer(text: str) -> Sequence[FrozenObject]:
    return [_text(text)] if text.strip() else []


class _Image(NamedTuple):
    """An image that came with its message."""

    media_type: str
    data: str
    """Base64."""


def _read_image(url: str) -> _Image | None:
    """Return the image in a `data:` URL; None if there is none that every provider reads."""
    parts = _DATA_URL.fullmatch(url)
    if parts is None:
        return None
    data = unquote_to_bytes(parts["data"])
    if ";base64" in parts["options"]:
        try:
            data = base64.b64decode(data, validate=True)
        except Base64Error:
            return None
    # The first bytes decide: a provider refuses an image that does not have its declared type.
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        media_type: str | None = "image/webp"
    else:
        media_type = next((one for start, one in _IMAGE_STARTS if data.startswith(start)), None)
    encoded = base64.b64encode(data).decode()
    if media_type is None or len(encoded) > _IMAGE_BYTES_MAX:
        return None
    return _Image(media_type, encoded)


def _image_url(image: ImageContent) -> str | None:
    """Return the URL of an image as OpenAI's APIs take it; None if they would refuse it."""
    if not image.url.startswith("data:"):
        return image.url if _WEB_URL.fullmatch(image.url) else None
    read = _read_image(image.url)
    return None if read is None else f"data:{read.media_type};base64,{read.data}"


def _image_block(image: ImageContent) -> FrozenObject:
    if _WEB_URL.fullmatch(image.url):
        return frozen(type="image", source=frozen(type="url", url=image.url))
    read = _read_image(image.url)
    if read is None:
        return _text(_NO_IMAGE)
    source = frozen(type="base64", media_type=read.media_type, data=read.data)
    return frozen(type="image", source=source)


def _chat_file(file: FileContent, *, is_plain: bool) -> Iterator[FrozenObject]:
    """Yield a file as parts of a message of the chat API, which takes PDFs only as bytes."""
    url = None if is_plain else _file_image_url(file)
    if url is not None:
        yield frozen(type="image_url", image_url=frozen(url=url))
    elif not is_plain and (pdf := _pdf(file)) is not None:
        data = f"data:{_PDF};base64,{pdf}"
        yield frozen(type="file", file=frozen(filename=file.name, file_data=data))
    else:
        for piece in _split(_file_text(file), _CHAT_LENGTH_MAX):
            yield frozen(type="text", text=piece)


def _file_items(file: FileContent, *, is_plain: bool) -> Iterator[FrozenObject]:
    """Yield a file as parts of a message of the responses API."""
    url = None if is_plain else _file_image_url(file)
    if url is not None:
        yield frozen(type="input_image", image_url=url, detail="auto")
    elif not is_plain and (pdf := _pdf(file)) is not None:
        data = f"data:{_PDF};base64,{pdf}"
        yield frozen(type="input_file", filename=file.name, file_data=data)
    elif not is_plain and (url := _pdf_url(file)) is not None:
        yield frozen(type="input_file", file_url=url)
    else:
        for piece in _split(_file_text(file), _ITEM_LENGTH_MAX):
            yield frozen(type="input_text", text=piece)


def _file_block(file: FileContent, *, is_plain: bool) -> FrozenObject:
    """Return a file as a block of the Anthropic API."""
    if is_plain:
        return _text(_file_text(file))
    if _file_image_url(file) is not None:
        return _image_block(_file_image(file))
    if (pdf := _pdf(file)) is not None:
        source = frozen(type="base64", media_type=_PDF, data=pdf)
    elif (url := _pdf_url(file)) is not None:
        source = frozen(type="url", url=url)
    elif (text := file.text) is not None and text.strip():
        source = frozen(type="text", media_type="text/plain", data=text)
    else:
        return _text(_file_text(file))
    return frozen(type="document", source=source, title=file.name)


def _file_image(file: FileContent) -> ImageContent:
    return ImageContent(url=file.url or f"data:{file.media_type};base64,{file.data}")


def _file_image_url(file: FileContent) -> str | None:
    """Return the URL of a file that is an image, as `_image_url` does; None for other files."""
    return _image_url(_file_image(file)) if file.media_type.startswith("image/") else None


def _pdf(file: FileContent) -> str | None:
    """Return a PDF in base64; None if the file is not a PDF, or the APIs would refuse it."""
    data = file.data or ""
    if file.media_type != _PDF or len(data) > _PDF_LENGTH_MAX:
        return None
    try:
        start = base64.b64decode(data[:8], validate=True)
    except Base64Error:
        return None
    return data if start.startswith(b"%PDF-") else None


def _pdf_url(file: FileContent) -> str | None:
    is_pdf = file.media_type == _PDF and file.url is not None and _WEB_URL.fullmatch(file.url)
    return file.url if is_pdf else None


def _file_text(file: FileContent) -> str:
    """Return a file as a text: its own text, or one that names the file."""
    told = f"file {file.name} ({file.media_type})"
    if (text := file.text) is not None:
        return f"{told}:\n{text}"
    return f"({told} at {file.url})" if file.url is not None else f"({told}, which cannot be shown)"


def _thinking_blocks(blocks: Iterable[ThinkingBlock]) -> Sequence[FrozenObject]:
    shown: list[FrozenObject] = []
    for block in blocks:
        if block.made_by is not None:
            continue
        if block.redacted_data is not None:
            shown.append(frozen(type="redacted_thinking", data=block.redacted_data))
        elif block.signature is not None:
            thinking, signature = block.thinking, block.signature
            shown.append(frozen(type="thinking", thinking=thinking, signature=signature))
    return shown


def _tool_use(action: ActionEvent) -> FrozenObject:
    return frozen(
        type="tool_use",
        id=api_call_id(action.tool_call_id),
        name=api_tool_name(action.tool_name),
        input=action.arguments,
    )


def _tool_result(result: ObservationLikeEvent) -> FrozenObject:
    parts: dict[str, FrozenJson] = {
        "type": "tool_result",
        "tool_use_id": api_call_id(result.tool_call_id),
    }
    is_error = not isinstance(result, ObservationEvent) or result.is_error
    if result.content.strip():
        parts["content"] = result.content
    elif is_error:
        parts["content"] = _NO_OUTPUT
    if is_error:
        parts["is_error"] = True
    return frozen(**parts)
