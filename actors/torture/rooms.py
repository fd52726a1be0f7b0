"""Conversations as their users see them, and the history to which all users write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TextIO

import anyio

from .exchanges import Reply, Site
from .history import (
    Acknowledged,
    Answered,
    Closed,
    Disturbed,
    OnOverlap,
    Protocol,
    Record,
    Refused,
    Sent,
    Unknown,
    as_line,
    marker_of,
)

__all__ = ["History", "Message", "Room", "clean", "problem_in", "text_of"]


_TOO_MANY = (HTTPStatus.TOO_MANY_REQUESTS,)


def clean(text: str) -> str:
    """Return a text that can be written as UTF-8: half a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def text_of(value: object) -> str:
    """Return a value of a JSON document if it is a text, else an empty one."""
    return clean(value) if isinstance(value, str) else ""


def problem_in(told: Mapping[str, object]) -> str:
    """Return the name of the problem in a response."""
    return text_of(told.get("type") or told.get("error")).rpartition("/")[2].rpartition(":")[2]


class History:
    """Keeps all records in order, and writes them to a file if one is given."""

    def __init__(self, file: TextIO | None = None, *, changed: Callable[[], None]) -> None:
        self.records: list[Record] = []
        self.counts: Counter[str] = Counter()
        """How many records of each kind, ends of readings and disturbances there are."""
        self._file = file
        self._changed = changed
        self.disturbance = ""
        """The newest disturbance of the server."""
        self._streams = 0

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.counts[record.record] += 1
        match record:
            case Disturbed():
                self.counts[record.how] += 1
                self.disturbance = record.how
            case Closed():
                self.counts[record.how] += 1
            case _:
                pass
        if self._file is not None:
            self._file.write(as_line(record) + "\n")
        self._changed()

    def next_stream(self) -> int:
        """Return a number for a new reading."""
        self._streams += 1
        return self._streams


@dataclass(slots=True)
class Message:
    """A message that a user sends, with as many attempts as it needs."""

    room: Room
    user: int
    number: int
    key: str
    text: str
    on_overlap: OnOverlap | None = None
    replaces: str | None = None
    is_last: bool = False
    attempts: int = 0
    is_acknowledged: bool = False
    is_settled: bool = False
    """True once no further attempt is needed: it is acknowledged, or refused for good."""
    turn_id: str | None = None

    @property
    def marker(self) -> str:
        return marker_of(self.room.number, self.user, self.number)

    def begin(self) -> None:
        """Note that an attempt begins."""
        self.attempts += 1
        self.room.history.add(
            Sent(
                room=self.room.number,
                message=self.key,
                user=self.user,
                protocol=self.room.protocol,
                marker=self.marker,
                text=self.text,
                on_overlap=self.on_overlap,
                replaces=self.replaces,
                attempt=self.attempts,
                is_last=self.is_last,
            )
        )

    def acknowledge(self, seq: int | None, told_room: str | None = None) -> None:
        if not self.is_acknowledged:
            self.room.acknowledged.append(self)
        self.is_acknowledged = True
        self.room.history.add(
            Acknowledged(
                room=self.room.number,
                message=self.key,
                attempt=self.attempts,
                seq=seq,
                told_room=told_room,
            )
        )

    def refuse(self, status: int, problem: str) -> None:
        self.room.history.add(
            Refused(
                room=self.room.number,
                message=self.key,
                attempt=self.attempts,
                status=status,
                problem=clean(problem),
            )
        )

    def fail(
        self, reply: Reply, body: Mapping[str, object], *, again: Container[int] = _TOO_MANY
    ) -> None:
        """Note a response that acknowledges nothing: a refusal, or else an unknown outcome.

        `again`: the statuses of refusals after which the message is sent again.
        """
        problem = problem_in(body)
        if reply.is_refusal or reply.status in again:
            self.refuse(reply.status, problem)
            self.is_settled |= reply.status not in again
        else:
            self.lose(f"{reply.status} {problem}")

    def lose(self, why: str) -> None:
        """Note that the outcome of this attempt is unknown."""
        self.room.history.add(
            Unknown(room=self.room.number, message=self.key, attempt=self.attempts, why=clean(why))
        )

    def answer(self, outcome: str, text: str, *, is_whole: bool) -> None:
        self.room.history.add(
            Answered(
                room=self.room.number,
                message=self.key,
                outcome=clean(outcome),
                text=clean(text),
                is_whole=is_whole,
            )
        )


@dataclass(slots=True)
class Room:
    """One conversation."""

    number: int
    name: str
    protocol: Protocol
    site: Site
    history: History
    token: str | None = None
    has_log: bool = True
    """True if the server has turnkeeper's own API, so that the log can be read."""
    messages: list[Message] = field(default_factory=list)
    acknowledged: list[Message] = field(default_factory=list)
    left: anyio.Event = field(default_factory=anyio.Event)
    """Set once its users are in another one."""

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def write(
        self,
        user: int,
        text: str,
        *,
        on_overlap: OnOverlap | None = None,
        replaces: str | None = None,
        is_last: bool = False,
    ) -> Message:
        """Make the next message of a user, with its marker at the end of the text."""
        number = len(self.messages) + 1
        marker = marker_of(self.number, user, number)
        message = Message(
            self,
            user,
            number,
            f"{self.name}-{user}-{number}",
            f"{text} {marker}",
            on_overlap,
            replaces,
            is_last,
        )
        self.messages.append(message)
        return message
