"""A turn as chunks of the AI SDK's UI message stream, version 1. Pure.

One assistant message of the SDK is one turn, with the turn's id: so a stream that begins anew
replaces the message instead of adding another. Each answer of the model is a step of the message.
If the model begins an answer anew, or the final text differs from its pieces, the step is taken
back (`reset-step`).

`UiMessage` folds the chunks as the SDK's client does: the transcript in this shape equals the
screen of a client that has read the stream to its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..core.snapshots import SLICE_EVENTS, Slices
from ..core.transcript import Transcript
from ..events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    Event,
    LoggedEvent,
    MessageQueuedEvent,
    ObservationEvent,
    TextDelta,
    TurnEndedEvent,
    UserMessageEvent,
    UserRejectEvent,
)
from ..values.text import storable

__all__ = ["NAMELESS", "TurnChunks", "UiMessage", "is_client_id", "next_version", "ui_messages"]

CLIENT_ID_LENGTH_MAX = 200
NAMELESS = "file"
"""The name that is given to a file without one."""

Chunk = dict[str, object]


class TurnChunks:
    """Converts the events and pieces of one turn, in order, into chunks."""

    def __init__(self, turn_id: str) -> None:
        self.turn_id = turn_id
        self.has_ended = False
        self._has_begun = False
        self._messages = 0
        self._steps = 0
        self._is_in_step = False
        self._response_id: str | None = None
        """The model response whose calls came last; None if an answer came after them."""
        self._shown: str | None = None
        """The text of the step that is open and not in the log; None if there is none."""
        self._attempt = (0, 0)
        self._requested: Sequence[str] = ()

    def take(self, item: LoggedEvent | TextDelta) -> Iterator[Chunk]:
        """Yield the chunks for the next event or piece; none if it belongs to another turn."""
        if isinstance(item, TextDelta):
            if item.turn_id == self.turn_id:
                yield from self._take_piece(item)
        elif item.event.turn_id == self.turn_id and not isinstance(item.event, MessageQueuedEvent):
            if not self._has_begun:
                self._has_begun = True
                yield {"type": "start", "messageId": self.turn_id}
            yield from self._take_event(item.event)

    def hold(self) -> Iterator[Chunk]:
        """Yield the chunks with which a stream ends while calls wait for an answer."""
        yield {"type": "finish-step"}
        yield {"type": "finish", "finishReason": "tool-calls"}

    def _take_event(self, event: Event) -> Iterator[Chunk]:
        match event:
            case UserMessageEvent(is_reminder=False):
                self._messages += 1
                if self._messages > 1:
                    if self._shown is not None:
                        # The agent writes this answer anew: take back the text now, as the message
                        # would go with it later.
                        yield {"type": "reset-step"}
                        self._shown = None
                    yield {
                        "type": "steering-message",
                        "id": client_id_of(event.message_id or event.id),
                        "parts": user_parts(event),
                    }
            case AgentMessageEvent(content=content):
                yield from self._say(content)
                self._response_id = None
            case ActionEvent():
                yield from self._call(event)
            case ObservationEvent(is_error=False):
                yield {
                    "type": "tool-output-available",
                    "toolCallId": event.tool_call_id,
                    "output": event.content,
                    "providerExecuted": True,
                }
            case ObservationEvent() | AgentErrorEvent():
                yield {
                    "type": "tool-output-error",
                    "toolCallId": event.tool_call_id,
                    "errorText": event.content,
                    "providerExecuted": True,
                }
            case UserRejectEvent(tool_call_id=call_id):
                yield {"type": "tool-output-denied", "toolCallId": call_id}
            case ConfirmationRequestedEvent(tool_call_ids=call_ids):
                self._requested = call_ids
                for call_id in call_ids:
                    yield {
                        "type": "tool-approval-request",
                        "approvalId": call_id,
                        "toolCallId": call_id,
                    }
            case ConfirmationGivenEvent():
                yield from self._answers(event)
            case TurnEndedEvent():
                yield from self._end(event)
            case _:
                pass

    def _take_piece(self, piece: TextDelta) -> Iterator[Chunk]:
        attempt = (piece.epoch, piece.attempt)
        if self._shown is None:
            yield from self._begin_step()
            yield self._begin_text()
        elif attempt > self._attempt:
            yield {"type": "reset-step"}
            yield self._begin_text()
        elif attempt < self._attempt:
            return
        self._attempt = attempt
        assert self._shown is not None
        # The part of a piece that the reader has seen already is left out.
        new = piece.text[len(self._shown) - piece.offset :]
        if piece.offset <= len(self._shown) and new:
            yield self._add(new)

    def _begin_step(self) -> Iterator[Chunk]:
        if self._is_in_step:
            yield {"type": "finish-step"}
        self._steps += 1
        self._is_in_step = True
        self._attempt = (0, 0)
        yield {"type": "start-step"}

    def _begin_text(self) -> Chunk:
        self._shown = ""
        return {"type": "text-start", "id": self._text_id}

    @property
    def _text_id(self) -> str:
        return f"text-{self._steps}"

    def _add(self, text: str) -> Chunk:
        self._shown = (self._shown or "") + text
        return {"type": "text-delta", "id": self._text_id, "delta": storable(text)}

    def _say(self, content: str) -> Iterator[Chunk]:
        """Show the whole text of an answer; earlier pieces may have shown its beginning."""
        if self._shown is None:
            yield from self._begin_step()
        elif not content or not content.startswith(self._shown):
            yield {"type": "reset-step"}
            self._shown = None
        if content:
            if self._shown is None:
                yield self._begin_text()
            if rest := content[len(self._shown or "") :]:
                yield self._add(rest)
            yield {"type": "text-end", "id": self._text_id}
        self._shown = None

    def _call(self, action: ActionEvent) -> Iterator[Chunk]:
        if action.llm_response_id != self._response_id:
            yield from self._say(action.text)
            self._response_id = action.llm_response_id
        call: Chunk = {
            "toolCallId": action.tool_call_id,
            "toolName": action.tool_name,
            "dynamic": True,
            "providerExecuted": True,
        }
        if action.malformed_arguments is None:
            yield {"type": "tool-input-available", **call, "input": dict(action.arguments)}
        else:
            error = {"input": action.malformed_arguments, "errorText": "not a JSON object"}
            yield {"type": "tool-input-error", **call, **error}

    def _answers(self, given: ConfirmationGivenEvent) -> Iterator[Chunk]:
        for call_id in self._requested:
            yield {
                "type": "tool-approval-response",
                "approvalId": call_id,
                "approved": given.confirmed and call_id not in given.rejected,
                "providerExecuted": True,
            }

    def _end(self, ended: TurnEndedEvent) -> Iterator[Chunk]:
        self.has_ended = True
        if self._shown is not None:
            # The model wrote this text, but never finished the answer: the log does not have it.
            yield {"type": "reset-step"}
        if self._is_in_step:
            yield {"type": "finish-step"}
        match ended.outcome:
            case "completed":
                yield {"type": "finish", "finishReason": "stop"}
            case "interrupted":
                yield {"type": "finish", "finishReason": "interrupted"}
            case "rolled_back":
                yield {"type": "data-retracted", "data": {"turnId": self.turn_id}}
                yield {"type": "abort", "reason": "rolled back"}
            case "failed":
                yield {"type": "error", "errorText": "the turn failed"}


def is_client_id(message_id: str) -> bool:
    """True if a client may send a message with this id: ids of versions have our own tilde."""
    return 0 < len(message_id) <= CLIENT_ID_LENGTH_MAX and "~" not in message_id


def next_version(message_id: str) -> str:
    """Return the id under which the next version of a message is stored."""
    client_id, _, n = message_id.partition("~")
    return f"{client_id}~{int(n or 0) + 1}"


def client_id_of(message_id: str) -> str:
    """Return the id by which a client knows a message, for any version of it."""
    client_id, tilde, n = message_id.rpartition("~")
    return client_id if tilde and n.isdecimal() else message_id


def user_parts(event: UserMessageEvent | MessageQueuedEvent) -> list[dict[str, object]]:
    """Return the parts of a user's message: its files, then its text, as the client sends them."""
    parts: list[dict[str, object]] = [
        {"type": "file", "mediaType": _media_type(image.url), "url": image.url}
        for image in event.images
    ]
    for file in event.files:
        url = file.url if file.data is None else f"data:{file.media_type};base64,{file.data}"
        part = {"type": "file", "mediaType": file.media_type, "filename": file.name, "url": url}
        if file.name == NAMELESS:
            del part["filename"]
        parts.append(dict(part))
    return [*parts, {"type": "text", "text": event.content}] if event.content else parts


def _media_type(url: str) -> str:
    if url.startswith("data:"):
        return url[5:].partition(",")[0].partition(";")[0] or "text/plain"
    return "image/*"


class UiMessage:
    """One assistant message, built from chunks as the SDK's client builds it."""

    def __init__(self) -> None:
        self.id = ""
        self.parts: list[dict[str, object]] = []

    def fold(self, chunk: Chunk) -> None:
        """Take in the next chunk."""
        match chunk:
            case {"type": "start", "messageId": str(message_id)}:
                self.id = message_id
            case {"type": "start-step"}:
                self.parts.append({"type": "step-start"})
            case {"type": "reset-step"}:
                while self.parts and self.parts[-1]["type"] != "step-start":
                    self.parts.pop()
            case {"type": "text-start"}:
                self.parts.append({"type": "text", "text": "", "state": "streaming"})
            case {"type": "text-delta", "delta": str(delta)}:
                part = self._find("text")
                part["text"] = f"{part['text']}{delta}"
            case {"type": "text-end"}:
                self._find("text")["state"] = "done"
            case {"type": "steering-message"} | {"type": "data-retracted"}:
                self.parts.append(dict(chunk))
            case {"toolCallId": _} | {"approvalId": _}:
                self._fold_call(chunk)
            case _:
                pass

    def _fold_call(self, chunk: Chunk) -> None:
        match chunk["type"]:
            case "tool-input-available" | "tool-input-error":
                is_error = chunk["type"] == "tool-input-error"
                kept = ("toolName", "toolCallId", "input", "providerExecuted", "errorText")
                self.parts.append(
                    {
                        "type": "dynamic-tool",
                        "state": "output-error" if is_error else "input-available",
                        **{name: chunk[name] for name in kept if name in chunk},
                    }
                )
            case "tool-approval-request":
                part = self._call(chunk["toolCallId"])
                part["state"] = "approval-requested"
                part["approval"] = {"id": chunk["approvalId"]}
            case "tool-approval-response":
                part = self._call(chunk["approvalId"])
                part["state"] = "approval-responded"
                part["approval"] = {"id": chunk["approvalId"], "approved": chunk["approved"]}
            case "tool-output-denied":
                self._call(chunk["toolCallId"])["state"] = "output-denied"
            case "tool-output-available":
                part = self._call(chunk["toolCallId"])
                part |= {"state": "output-available", "output": chunk["output"]}
                part.pop("errorText", None)
            case "tool-output-error":
                part = self._call(chunk["toolCallId"])
                part |= {"state": "output-error", "errorText": chunk["errorText"]}
            case _:
                pass

    def _find(self, kind: str) -> dict[str, object]:
        return next(part for part in reversed(self.parts) if part["type"] == kind)

    def _call(self, call_id: object) -> dict[str, object]:
        return next(part for part in self.parts if part.get("toolCallId") == call_id)


def ui_messages(transcript: Transcript) -> Slices[list[dict[str, object]]]:
    """Return a transcript as the messages that a client of the SDK begins with."""
    messages: list[dict[str, object]] = []
    turn: TurnChunks | None = None
    answer = UiMessage()
    for count, logged in enumerate(transcript.log, 1):
        if count % SLICE_EVENTS == 0:
            yield
        event = logged.event
        if event.turn_id is None or transcript.is_retracted(event.id):
            continue
        if isinstance(event, UserMessageEvent) and (turn is None or turn.turn_id != event.turn_id):
            turn, answer = TurnChunks(event.turn_id), UiMessage()
            messages.append(_user_message(event))
        if turn is None or turn.turn_id != event.turn_id:
            continue
        for chunk in turn.take(logged):
            answer.fold(chunk)
        if answer.parts and messages[-1]["id"] != answer.id:
            messages.append({"id": answer.id, "role": "assistant", "parts": answer.parts})
    waiting = [logged.event for logged in transcript.waiting]
    messages += [_user_message(event) for event in waiting if isinstance(event, MessageQueuedEvent)]
    return messages


def _user_message(event: UserMessageEvent | MessageQueuedEvent) -> dict[str, object]:
    return {
        "id": client_id_of(event.message_id or event.id),
        "role": "user",
        "parts": user_parts(event),
    }
