"""A transcript as the messages of AG-UI, with the ids that its streams use. Pure.

An answer is one assistant message, with its text and its calls. Its id is made of the turn's id and
the answer's number in the turn, counted as its pieces are: so it is known before the answer is in
the log. A result has the id of its event, and a user's chat message has its message id.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeAlias

from ag_ui.core import (
    AssistantMessage,
    AudioPart,
    ContentPart,
    DataSource,
    DocumentPart,
    FunctionCall,
    ImagePart,
    TextPart,
    ToolCall,
    ToolMessage,
    UrlSource,
    UserMessage,
    VideoPart,
)

from ..core.snapshots import SLICE_EVENTS, Slices
from ..core.transcript import Transcript
from ..events import (
    RESULT_CLASSES,
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    Event,
    FileContent,
    MessageQueuedEvent,
    ObservationEvent,
    UserMessageEvent,
    UserRejectEvent,
)
from ..values.text import storable
from .ai_sdk import NAMELESS

__all__ = ["AnswerCount", "ShownMessage", "ag_ui_messages", "answer_id", "arguments_of"]

ShownMessage: TypeAlias = UserMessage | AssistantMessage | ToolMessage


class AnswerCount:
    """Numbers the answers of one turn: its agent messages, and its responses with calls."""

    def __init__(self) -> None:
        self.count = 0
        self._response: str | None = None

    def begins(self, event: AgentMessageEvent | ActionEvent) -> bool:
        """True if the next event begins another answer."""
        return not isinstance(event, ActionEvent) or event.llm_response_id != self._response

    def number(self, event: AgentMessageEvent | ActionEvent) -> int:
        """Return the number of the answer that the next event belongs to."""
        self.count += self.begins(event)
        self._response = event.llm_response_id if isinstance(event, ActionEvent) else None
        return self.count - 1


def answer_id(turn_id: str, number: int) -> str:
    """Return the id of an answer's message."""
    return f"{turn_id}-{number}"


def ag_ui_messages(
    transcript: Transcript, *, until: int | None = None, waiting: Sequence[Event] = ()
) -> Slices[list[ShownMessage]]:
    """Return the messages of a transcript up to a seq, and then the messages that wait."""
    messages: list[ShownMessage] = []
    counts: dict[str, AnswerCount] = {}
    for count, logged in enumerate(transcript.log, 1):
        if until is not None and logged.seq > until:
            break
        if count % SLICE_EVENTS == 0:
            yield
        event = logged.event
        answer = ""
        if isinstance(event, AgentMessageEvent | ActionEvent):
            # Retracted answers count too, so that ids do not change.
            turn_id = event.turn_id or event.id
            number = counts.setdefault(turn_id, AnswerCount()).number(event)
            answer = answer_id(turn_id, number)
        if not transcript.is_retracted(event.id):
            _add(messages, event, answer)
    return [*messages, *(_user_message(event) for event in waiting if _is_said_by_user(event))]


def _add(messages: list[ShownMessage], event: Event, answer: str) -> None:
    match event:
        case UserMessageEvent():
            messages.append(_user_message(event))
        case AgentMessageEvent(content=content):
            messages.append(AssistantMessage(id=answer, content=storable(content)))
        case ActionEvent():
            _assistant_message(messages, event, answer).append(_call(event))
        case ObservationEvent() | AgentErrorEvent() | UserRejectEvent():
            messages.append(_result(event))
        case _:
            assert not isinstance(event, RESULT_CLASSES), event.kind


def _assistant_message(
    messages: list[ShownMessage], action: ActionEvent, answer: str
) -> list[ToolCall]:
    """Return the calls of an answer's message; add the message if this is its first call."""
    # The calls of one response follow each other, with nothing between them but results.
    for message in reversed(messages):
        if isinstance(message, AssistantMessage):
            if message.id == answer and message.tool_calls is not None:
                return message.tool_calls
            break
    made = AssistantMessage(id=answer, content=storable(action.text) or None)
    made.tool_calls = []
    messages.append(made)
    return made.tool_calls


def _is_said_by_user(event: Event) -> bool:
    return isinstance(event, UserMessageEvent | MessageQueuedEvent)


def _user_message(event: Event) -> UserMessage:
    assert isinstance(event, UserMessageEvent | MessageQueuedEvent), event.kind
    message_id = event.message_id or event.id
    parts: list[ContentPart] = [ImagePart(source=_source(image.url)) for image in event.images]
    parts += [_file_part(file) for file in event.files]
    if not parts:
        return UserMessage(id=message_id, content=event.content)
    if event.content:
        parts.append(TextPart(text=event.content))
    return UserMessage(id=message_id, content=parts)


def _source(url: str) -> DataSource | UrlSource:
    """Return an address, or the bytes if a `data:` address holds them in base64."""
    head, comma, data = url.partition(",")
    if comma and head.startswith("data:") and head.endswith(";base64"):
        return DataSource(value=data, mime_type=head[5:-7])
    return UrlSource(value=url)


def _file_part(file: FileContent) -> ImagePart | AudioPart | VideoPart | DocumentPart:
    source: DataSource | UrlSource
    if file.data is not None:
        source = DataSource(value=file.data, mime_type=file.media_type)
    else:
        source = UrlSource(value=file.url or "", mime_type=file.media_type)
    metadata = None if file.name == NAMELESS else {"name": file.name}
    match file.media_type.partition("/")[0]:
        case "image":
            return ImagePart(source=source, metadata=metadata)
        case "audio":
            return AudioPart(source=source, metadata=metadata)
        case "video":
            return VideoPart(source=source, metadata=metadata)
        case _:
            return DocumentPart(source=source, metadata=metadata)


def arguments_of(action: ActionEvent) -> str:
    """Return a call's arguments as the model wrote them, or as JSON."""
    if action.malformed_arguments is not None:
        return storable(action.malformed_arguments)
    return json.dumps(action.arguments, ensure_ascii=False)


def _call(action: ActionEvent) -> ToolCall:
    function = FunctionCall(name=action.tool_name, arguments=arguments_of(action))
    return ToolCall(id=action.tool_call_id, function=function)


def _result(event: ObservationEvent | AgentErrorEvent | UserRejectEvent) -> ToolMessage:
    return ToolMessage(
        id=event.id, tool_call_id=event.tool_call_id, content=storable(event.content)
    )
