"""The AI SDK's UI message stream, version 1: a message is answered by a stream.

A client that is cut off sends its message again under its id, or resumes the stream of the running
turn. The status 200 acknowledges the message.
"""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import quote

from .chat_streams import read_stream
from .exchanges import NO_CUT, Broken, Cut, CutOff, Reply, ServerSent
from .rooms import Message, Room, text_of

__all__ = ["resume", "send"]

DEFAULT_PATH = "/v1/ai-sdk/chat"
_OUTCOMES = {"stop": "completed", "interrupted": "interrupted"}


def _api(room: Room) -> str:
    return room.site.path or DEFAULT_PATH


async def send(message: Message, *, cut: Cut = NO_CUT) -> None:
    """Try to send a message once, and read its answer."""
    room = message.room
    parts = [{"type": "text", "text": message.text}]
    body: dict[str, object] = {
        "id": room.name,
        "trigger": "submit-message",
        "messages": [{"id": message.key, "role": "user", "parts": parts}],
    }
    if message.on_overlap is not None:
        body["on_overlap"] = message.on_overlap
    message.begin()
    try:
        async with room.site.exchange(
            "POST", _api(room), headers=room.headers, body=body, cut=cut
        ) as reply:
            if reply.status == HTTPStatus.OK:
                message.acknowledge(None)
                await _read(message, reply, is_its_own=True)
                return
            told = await reply.json()
    except (CutOff, Broken) as error:
        message.lose(str(error) or "cut off")
        return
    message.fail(reply, told)


async def resume(message: Message, *, cut: Cut = NO_CUT) -> None:
    """Resume the stream of the running turn; note its answer if it answers this message."""
    room = message.room
    path = f"{_api(room)}/{quote(room.name, safe='')}/stream"
    try:
        async with room.site.exchange("GET", path, headers=room.headers, cut=cut) as reply:
            if reply.status == HTTPStatus.OK:
                await _read(message, reply, is_its_own=False)
    except (CutOff, Broken):
        pass


async def _read(message: Message, reply: Reply, *, is_its_own: bool) -> None:
    """Read a stream; note its answer if it answers this message."""
    answer = _Answer()
    if not await read_stream(message.room, reply, answer):
        return
    if is_its_own and answer.turn_id is not None:
        message.turn_id = answer.turn_id
    if answer.outcome is not None and (is_its_own or answer.turn_id == message.turn_id):
        message.answer(answer.outcome, answer.text, is_whole=False)
        message.is_settled = True


class _Answer:
    """The answer that is assembled from the chunks of a stream."""

    def __init__(self) -> None:
        self.turn_id: str | None = None
        self.end: str | None = None
        """The last chunk's type, if that ends a stream."""
        self.outcome: str | None = None
        """The turn's, if the stream says it: a server that could not go on is asked again."""
        self._parts: list[tuple[str, str]] = []
        """The text of each part with its id; a step begins with an empty id."""

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self._parts if text)

    def take(self, sent: ServerSent) -> None:
        """Take in the next chunk."""
        chunk = sent.json
        match chunk.get("type"):
            case "start":
                self.turn_id = text_of(chunk.get("messageId")) or None
            case "start-step":
                self._parts.append(("", ""))
            case "reset-step":
                while self._parts and self._parts[-1][0]:
                    self._parts.pop()
            case "text-start":
                self._parts.append((text_of(chunk.get("id")) or "text", ""))
            case "text-delta":
                self._add(text_of(chunk.get("id")), text_of(chunk.get("delta")))
            case "finish":
                self.end = "finish"
                reason = text_of(chunk.get("finishReason")) or "stop"
                self.outcome = _OUTCOMES.get(reason, reason)
            case "abort":
                self.end, self.outcome = "abort", "rolled_back"
            case "error":
                self.end = "error"
            case _:
                pass

    def _add(self, part_id: str, delta: str) -> None:
        for at in range(len(self._parts) - 1, -1, -1):
            if self._parts[at][0] == part_id:
                self._parts[at] = part_id, self._parts[at][1] + delta
                return
        self._parts.append((part_id or "text", delta))
