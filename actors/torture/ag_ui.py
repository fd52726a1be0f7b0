"""AG-UI 1.0: a run answers a message; after a cut, it goes on from a cursor.

A client that is cut off goes on after the newest event that had an id, or sends its message again
under the same run. The status 200 acknowledges the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import quote

from .chat_streams import read_stream
from .exchanges import NO_CUT, Broken, Cut, CutOff, Reply, ServerSent
from .rooms import Message, Room, text_of

__all__ = ["Run"]

DEFAULT_PATH = "/v1/ag-ui"
_OUTCOMES = {"success": "completed", "cancelled": "interrupted"}


class Run:
    """The run of one message, over one or more streams."""

    def __init__(self, message: Message) -> None:
        self._message = message
        self._run_id = f"run-{message.key}"
        self._screen = _Screen()

    @property
    def has_cursor(self) -> bool:
        """True if it can go on where it was cut off."""
        return self._screen.cursor is not None

    async def send(self, *, cut: Cut = NO_CUT) -> None:
        """Try to send the message once, and read its answer from the beginning."""
        message, room = self._message, self._message.room
        self._screen = _Screen()
        body = {
            "threadId": room.name,
            "runId": self._run_id,
            "messages": [{"id": message.key, "role": "user", "content": message.text}],
            "tools": [],
            "context": [],
            "state": {},
            "forwardedProps": {}
            if message.on_overlap is None
            else {"on_overlap": message.on_overlap},
        }
        message.begin()
        try:
            async with room.site.exchange(
                "POST", _api(room), headers=self._headers(), body=body, cut=cut
            ) as reply:
                if reply.status == HTTPStatus.OK:
                    message.acknowledge(None)
                    await self._read(reply)
                    return
                told = await reply.json()
        except (CutOff, Broken) as error:
            message.lose(str(error) or "cut off")
            return
        message.fail(reply, told)

    async def go_on(self, *, cut: Cut = NO_CUT) -> None:
        """Go on after the newest event that came."""
        room = self._message.room
        path = f"{_api(room)}/{quote(room.name, safe='')}/connect"
        headers = {**self._headers(), "Last-Event-ID": self._screen.cursor or ""}
        try:
            async with room.site.exchange("GET", path, headers=headers, cut=cut) as reply:
                if reply.status == HTTPStatus.OK:
                    await self._read(reply)
                elif reply.is_refusal or reply.status == HTTPStatus.NO_CONTENT:
                    self._screen.cursor = None
        except (CutOff, Broken):
            pass

    def _headers(self) -> dict[str, str]:
        return {**self._message.room.headers, "Accept": "text/event-stream"}

    async def _read(self, reply: Reply) -> None:
        screen = self._screen
        screen.end = None
        if not await read_stream(self._message.room, reply, screen):
            return
        if screen.outcome is not None and screen.run_id == self._run_id:
            self._message.answer(screen.outcome, screen.answer, is_whole=False)
            self._message.is_settled = True
        else:
            # The stream belonged to another run, or the server could not go on.
            screen.cursor = None


def _api(room: Room) -> str:
    return room.site.path or DEFAULT_PATH


class _Screen:
    """The messages that a client shows on its screen."""

    def __init__(self) -> None:
        self.cursor: str | None = None
        self.run_id: str | None = None
        self.end: str | None = None
        self.outcome: str | None = None
        self._messages: dict[str, tuple[str, str]] = {}
        """The role and the text of each, by id, in their order."""

    @property
    def answer(self) -> str:
        """The newest text of the agent."""
        said = [text for role, text in self._messages.values() if role == "assistant" and text]
        return said[-1] if said else ""

    def take(self, sent: ServerSent) -> None:
        """Take in the next event."""
        event = sent.json
        message_id = text_of(event.get("messageId"))
        match event.get("type"):
            case "RUN_STARTED":
                self.run_id = text_of(event.get("runId"))
            case "MESSAGES_SNAPSHOT":
                self._replace(event.get("messages"))
            case "TEXT_MESSAGE_START":
                # A message that is shown already goes on.
                role = text_of(event.get("role")) or "assistant"
                self._messages.setdefault(message_id, (role, ""))
            case "TEXT_MESSAGE_CONTENT":
                role, text = self._messages.get(message_id, ("assistant", ""))
                self._messages[message_id] = role, text + text_of(event.get("delta"))
            case "RUN_FINISHED":
                self.end = "RUN_FINISHED"
                outcome = event.get("outcome")
                told = text_of(outcome.get("type")) if isinstance(outcome, Mapping) else "success"
                self.outcome = _OUTCOMES.get(told, told)
            case "RUN_ERROR":
                self.end = "RUN_ERROR"
            case _:
                pass
        if sent.id:
            self.cursor = sent.id

    def _replace(self, messages: object) -> None:
        self._messages = {}
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                role, content = text_of(message.get("role")), text_of(message.get("content"))
                self._messages[text_of(message.get("id"))] = role, content
