"""The history of a torture: everything that was sent and seen, in the order of events. Pure.

A history is a file of JSON Lines, one record on each. One process writes all of it, so the order of
records is the order in which things happened; nothing depends on a clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

__all__ = [
    "Acknowledged",
    "Answered",
    "Began",
    "Closed",
    "Disturbed",
    "Entry",
    "HistoryUnreadable",
    "How",
    "Intervened",
    "Noted",
    "OnOverlap",
    "Opened",
    "Piece",
    "Protocol",
    "Read",
    "Record",
    "Refused",
    "Seen",
    "Sent",
    "Shown",
    "Unknown",
    "as_line",
    "marker_of",
    "markers_in",
    "parse_history",
]

Protocol: TypeAlias = Literal["own", "ai-sdk", "ag-ui"]
OnOverlap: TypeAlias = Literal["queue", "interrupt", "steer", "rollback", "reject"]

_MARKER = re.compile(r"\[m:(\d+-\d+-\d+)\]")


def marker_of(room: int, user: int, number: int) -> str:
    """Return the marker of a message, as it stands in its text."""
    return f"[m:{room}-{user}-{number}]"


def markers_in(text: str) -> list[str]:
    """Return the markers in a text, in their order; a marker that is cut off does not count."""
    return [f"[m:{found}]" for found in _MARKER.findall(text)]


class HistoryUnreadable(Exception):
    """A line of a file is not a record of a history."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Entry(_Part):
    """The parts of a logged event that the checker uses."""

    seq: int
    id: str
    kind: str
    turn: str | None = None
    message: str | None = None
    """The id of the chat message that it is about."""
    text: str | None = None
    retracted: tuple[str, ...] = ()
    """The ids of the events that it takes out of the view."""
    outcome: str | None = None
    is_partial: bool = False
    """True for an answer that was cut off while it was written."""
    is_again: bool = False
    """True for a message that waits again, since the turn that it had joined was rolled back."""
    replaced_by: str | None = None


class Began(_Part):
    """The run begins; the record has its options."""

    record: Literal["began"] = "began"
    seed: int
    options: dict[str, str | int | float | None] = {}


class _Said(_Part):
    room: int
    """The number of the conversation."""
    message: str
    """The message's id: the key under which it may be sent again."""


class Sent(_Said):
    """An attempt to send a message begins."""

    record: Literal["sent"] = "sent"
    user: int
    protocol: Protocol = "own"
    marker: str
    text: str
    on_overlap: OnOverlap | None = None
    """None: the server's default, which is to answer one message after the other."""
    replaces: str | None = None
    attempt: int = 1
    is_last: bool = False
    """True for the message after all others, whose answer shows what the model has seen."""


class Acknowledged(_Said):
    """The server has said that it has the message."""

    record: Literal["acknowledged"] = "acknowledged"
    attempt: int
    seq: int | None = None
    """Its place in the log, if the protocol tells it."""
    told_room: str | None = None
    """The conversation that the acknowledgement names, if that is not the message's."""


class Refused(_Said):
    """The server has said that it does not have the message: this attempt changed nothing."""

    record: Literal["refused"] = "refused"
    attempt: int
    status: int
    problem: str = ""


class Unknown(_Said):
    """The outcome is unknown: no answer, or one that says so. The attempt may have worked."""

    record: Literal["unknown"] = "unknown"
    attempt: int
    why: str


class Answered(_Said):
    """A client was told how the turn of its message ended, and the answer."""

    record: Literal["answered"] = "answered"
    outcome: str
    text: str
    is_whole: bool = False
    """True if the text is one whole answer of the log, and not that of several steps."""


class Intervened(_Part):
    """A client asks the server to end a turn, or to take it back."""

    record: Literal["intervened"] = "intervened"
    room: int
    how: Literal["interrupt", "undo"]


How: TypeAlias = Literal[
    "killed", "stopped", "frozen", "started",
    "stood still", "cut off", "answers lost", "apart",
    "deaf", "database away", "read-only", "rolled",
    "silent one way", "silent both ways", "database restarted",
]  # fmt: skip
"""The disturbances: the first four concern a server, the others one of several or their
database."""


class Disturbed(_Part):
    """The server is killed, told to stop, suspended for a while, or back; or as `How` says."""

    record: Literal["disturbed"] = "disturbed"
    how: How


class Opened(_Part):
    """A reading of a log begins, after a seq: a stream, or a page."""

    record: Literal["opened"] = "opened"
    stream: int
    room: int
    after: int = 0
    live: bool = True


class Seen(_Part):
    """A reading shows an event."""

    record: Literal["seen"] = "seen"
    stream: int
    entry: Entry


class Piece(_Part):
    """A stream shows a piece of an answer that is being written."""

    record: Literal["piece"] = "piece"
    stream: int
    turn: str
    answer: int
    epoch: int
    attempt: int
    offset: int
    text: str


class Noted(_Part):
    """A stream says if it shows the answers in pieces from now on."""

    record: Literal["noted"] = "noted"
    stream: int
    pieces: bool


class Closed(_Part):
    """A reading ends: `cut` by the client, `broken` by something else, or `ended` by the server."""

    record: Literal["closed"] = "closed"
    stream: int
    how: Literal["cut", "broken", "ended"]
    why: str | None = None
    """The reason that the server gave. A page that has more after it is a `page`."""
    has_begun: bool = True
    """False if the connection ended before the head of the response."""


class Read(_Part):
    """The log of a conversation at the end, from its beginning, as it was read in pages."""

    record: Literal["read"] = "read"
    room: int
    entries: tuple[Entry, ...]


class Shown(_Part):
    """The transcript at the end: what people said and were told."""

    record: Literal["shown"] = "shown"
    room: int
    entries: tuple[Entry, ...]


Record: TypeAlias = (
    Began
    | Sent
    | Acknowledged
    | Refused
    | Unknown
    | Answered
    | Intervened
    | Disturbed
    | Opened
    | Seen
    | Piece
    | Noted
    | Closed
    | Read
    | Shown
)

_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="record")])


def as_line(record: Record) -> str:
    """Return a record as one line of JSON."""
    return record.model_dump_json(exclude_none=True)


def parse_history(lines: Iterable[str]) -> Iterator[Record]:
    """Yield the records of a file. Raises `HistoryUnreadable` with the number of the line."""
    for number, line in enumerate(lines, 1):
        try:
            yield _RECORD.validate_json(line)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)[0]
            raise HistoryUnreadable(f"line {number} is not a record: {found['msg']}") from error
