"""The protocol between the command line and its worker: one JSON object on a line.

`Start` is the first line that the worker reads; the end of its input tells it to stop. Exchanges
are named by conversation and number, so a line means the same after a restart.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ..core.commands import OnOverlap
from ..recordings.transcripts import RecordedConversation

__all__ = [
    "Accepted",
    "Ended",
    "Failed",
    "GetViews",
    "Held",
    "Logged",
    "Order",
    "Part",
    "Ready",
    "Refused",
    "Release",
    "Report",
    "Send",
    "Start",
    "StartStress",
    "Unserved",
    "Views",
    "Vitals",
    "orders",
    "reports",
]


class Line(BaseModel):
    """One line, in either direction."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Part(Line):
    """One conversation, as its agent plays it."""

    conversation: str
    recorded: RecordedConversation
    held: dict[int, int]
    """For some exchanges: the step at which the agent waits until it is released."""


# --- to the worker -------------------------------------------------------------------------------


class Start(Line):
    kind: Literal["start"] = "start"
    db: str
    is_own_journal: bool
    """True if the journal has no other conversations, so all unfinished turns are this replay's."""
    started_at: datetime
    pace_s: float
    view_events_max: int
    parts: tuple[Part, ...]


class StartStress(Line):
    """The start of a worker whose agent makes up its answers; see `_script`."""

    kind: Literal["start_stress"] = "start_stress"
    db: str
    is_own_journal: bool
    seed: int
    pace_s: float
    view_events_max: int


class Send(Line):
    """Send the user's message of an exchange. A repeated order sends the same message."""

    kind: Literal["send"] = "send"
    conversation: str
    exchange: int
    on_overlap: OnOverlap


class Release(Line):
    """Let the agent that is held in this exchange go on."""

    kind: Literal["release"] = "release"
    conversation: str
    exchange: int


class GetViews(Line):
    """Report the views of these conversations; all turns have ended."""

    kind: Literal["get_views"] = "get_views"
    conversations: tuple[str, ...]


Order = Start | StartStress | Send | Release | GetViews

orders: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])


# --- from the worker -----------------------------------------------------------------------------


class Ready(Line):
    """The journal is open, and the turns that a crash interrupted are recovered."""

    kind: Literal["ready"] = "ready"


class Accepted(Line):
    """A chat message is durable."""

    kind: Literal["accepted"] = "accepted"
    conversation: str
    exchange: int
    seq: int
    is_duplicate: bool


class Refused(Line):
    """A chat message was refused, and nothing was written."""

    kind: Literal["refused"] = "refused"
    conversation: str
    exchange: int
    why: str


class Unserved(Line):
    """An order about a chat message cannot be carried out now; repeat it."""

    kind: Literal["unserved"] = "unserved"
    conversation: str
    exchange: int
    error: str
    why: str


class Logged(Line):
    """The agent was told that this event is durable."""

    kind: Literal["logged"] = "logged"
    conversation: str
    event_id: str
    seq: int | None


class Held(Line):
    """The agent waits in this exchange; everything it has done so far is durable."""

    kind: Literal["held"] = "held"
    conversation: str
    exchange: int


class Ended(Line):
    """The turn of an exchange has ended."""

    kind: Literal["ended"] = "ended"
    conversation: str
    exchange: int
    outcome: str


class Views(Line):
    """The ids of each conversation's view, as its owner has it."""

    kind: Literal["views"] = "views"
    event_ids: dict[str, tuple[str, ...]]


class Vitals(Line):
    """The state of the worker, reported at regular intervals."""

    kind: Literal["vitals"] = "vitals"
    waiting: int
    """Chat messages in all mailboxes."""
    waiting_max: int
    """In the fullest one."""
    memory_max: int
    """Bytes of memory that this process has needed so far."""
    late: tuple[int, ...]
    """A histogram of how late the event loop was, measured since the last report."""
    late_s_max: float
    """The longest delay of the event loop since the last report."""


class Failed(Line):
    """The worker cannot go on."""

    kind: Literal["failed"] = "failed"
    error: str
    why: str


Report = Ready | Accepted | Refused | Unserved | Logged | Held | Ended | Views | Vitals | Failed

reports: TypeAdapter[Report] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])
