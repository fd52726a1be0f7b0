"""What a conversation actor can be sent: commands, which may lead to events, and queries.

All are frozen values, typed by their reply: `await ref.ask(Send(...))` gives a `Sent`. The handle
that `Conversations` gives out does just that; these are public for those who build on the actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from turnkeeper.runtime import Message

from ._text import check_id, check_text, error_text
from .admission import Appended, Duplicate
from .condensers import Proposal
from .errors import InvalidInput
from .events import Event, ImageContent, LoggedEvent, decode_event
from .journal import Deletion
from .view import View

__all__ = [
    "Append",
    "AppendAll",
    "BeginStep",
    "CancelTurn",
    "Command",
    "Confirm",
    "Delete",
    "DropOverdue",
    "EndTurn",
    "GetView",
    "OnOverlap",
    "Pause",
    "Propose",
    "ProposeFailed",
    "Query",
    "Recover",
    "RepairView",
    "Resume",
    "Retract",
    "Send",
    "Sent",
    "Stream",
    "TurnAppend",
    "check_overlap",
]

OnOverlap = Literal["queue", "interrupt", "steer", "rollback", "reject"]
"""What happens to a chat message that comes while a turn runs."""


def check_overlap(on_overlap: str) -> None:
    """Raise `InvalidInput` where this is none of the ways to overlap."""
    if on_overlap not in get_args(OnOverlap):
        known = ", ".join(get_args(OnOverlap))
        raise InvalidInput(f"on_overlap is {on_overlap!r}; it takes one of {known}")


def _check_event(event: Event) -> None:
    """Raise `InvalidInput` where this could not be read again as it is written.

    pydantic checks nothing in `model_construct` and `model_copy`, and a subclass holds more than
    its kind: one such record, and the log could not be opened any more.
    """
    if not isinstance(event, Event):
        raise InvalidInput(f"an event is an Event, and {type(event).__name__} is not")
    try:
        written = event.__pydantic_serializer__.to_json(event, warnings="error")
        read = type(decode_event(written))
    except ValueError as error:
        said = f"a {type(event).__name__} holds what it cannot: {error_text(error)}"
        raise InvalidInput(f"{said}; make it as pydantic checks it") from error
    if read is not type(event):
        raise InvalidInput(f"a {type(event).__name__} would be read as {read.__name__}")


@dataclass(frozen=True, slots=True)
class Sent:
    """Where a chat message went: durable when this is seen."""

    message_id: str
    seq: int
    """Of the first event that carries the message id."""
    turn_id: str
    is_duplicate: bool = False
    """The log had this chat message already; nothing was written."""
    overlapped: OnOverlap | None = None
    """What it did to the turn that ran; "interrupt" where it was too late to roll that back."""
    waits_for: Literal["resume", "confirmation"] | None = None
    """What somebody has to say before it gets its turn."""


@dataclass(frozen=True, slots=True)
class Send(Message[Sent]):
    """Put a chat message into the conversation; its turn starts now, or as `on_overlap` says."""

    message_id: str
    content: str
    images: tuple[ImageContent, ...] = ()
    on_overlap: OnOverlap | None = None
    """None: as the conversation's own setting says."""

    def __post_init__(self) -> None:
        check_id("message_id", self.message_id)
        check_text("content", self.content)
        for image in self.images:
            if not isinstance(image, ImageContent):
                raise InvalidInput(f"an image takes ImageContent, not {type(image).__name__}")
        if self.on_overlap is not None:
            check_overlap(self.on_overlap)


@dataclass(frozen=True, slots=True)
class Append(Message[Appended | Duplicate]):
    """Put one event into the log, if admission lets it; no turn starts."""

    event: Event
    park: bool = False
    """Keep a result whose call has not come for a while, and answer when it has."""

    def __post_init__(self) -> None:
        _check_event(self.event)


@dataclass(frozen=True, slots=True)
class AppendAll(Message[Appended | Duplicate]):
    """As `Append`, but several events in one commit, retractions too: all of them, or none.

    The reply says where the last one is; where there are none, where the log ends.
    """

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        for event in self.events:
            _check_event(event)
        if len({event.id for event in self.events}) < len(self.events):
            raise InvalidInput("two of the events have the same id; each takes one of its own")


@dataclass(frozen=True, slots=True)
class Retract(Message[Appended]):
    """Take events, or all that is left of a turn, out of the view; the log keeps them."""

    event_ids: tuple[str, ...] = ()
    turn_id: str | None = None


@dataclass(frozen=True, slots=True)
class CancelTurn(Message[bool]):
    """Interrupt a running turn, or withdraw a queued chat message. False: it had ended already."""

    message_id: str
    turn_id: str


@dataclass(frozen=True, slots=True)
class TurnAppend(Message[Sequence[LoggedEvent]]):
    """What a running turn's agent says or does: all of it, or nothing, in one commit."""

    turn_id: str
    epoch: int
    events: tuple[Event, ...]
    suspends: bool = False
    """The turn waits for a confirmation after this, and its agent ends its run."""


@dataclass(frozen=True, slots=True)
class Stream(Message[None]):
    """A piece of the answer that a running turn's model is writing; kept in memory only."""

    turn_id: str
    epoch: int
    text: str
    is_first: bool = False
    """It begins the answer anew; what an earlier stream had brought does not count."""

    def __post_init__(self) -> None:
        # No more: a piece may end in half a character.
        if not isinstance(self.text, str):
            raise InvalidInput(f"a piece of an answer takes a str, not {type(self.text).__name__}")


@dataclass(frozen=True, slots=True)
class BeginStep(Message[bool]):
    """A running turn's agent is between two steps. False: not now; it is run again later."""

    turn_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class EndTurn(Message[bool]):
    """A running turn's agent has returned, or failed with `error`. Not true: not now."""

    turn_id: str
    epoch: int
    error: str | None = None
    detail: str = ""
    is_stuck: bool = False


@dataclass(frozen=True, slots=True)
class Pause(Message[bool]):
    """Begin no further step until `Resume`. False: it was paused already."""


@dataclass(frozen=True, slots=True)
class Resume(Message[bool]):
    """Go on where it was paused. False: it was not."""


@dataclass(frozen=True, slots=True)
class Confirm(Message[bool]):
    """Answer for the calls that wait for a confirmation: all of them run, or none does."""

    confirmed: bool
    reason: str = ""
    tool_call_ids: frozenset[str] | None = None
    """The calls that are meant; None: whichever wait."""

    def __post_init__(self) -> None:
        check_text("reason", self.reason)


@dataclass(frozen=True, slots=True)
class Propose(Message[bool]):
    """A condenser's proposal, with the view it was shown; None: it has nothing to propose."""

    epoch: int
    proposal: Proposal | None
    shown: View


@dataclass(frozen=True, slots=True)
class ProposeFailed(Message[None]):
    """A condenser raised."""

    epoch: int
    error: str
    detail: str


@dataclass(frozen=True, slots=True)
class RepairView(Message[bool]):
    """A model refused the view as malformed; `broken` is what enforcement takes from it."""

    turn_id: str
    epoch: int
    broken: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class Recover(Message[None]):
    """End what the owner before this one left unfinished; the first command of every owner."""

    enforced_away: tuple[str, ...] = ()
    """Events that enforcement took from the view of a log from elsewhere."""


@dataclass(frozen=True, slots=True)
class Delete(Message[Deletion | None]):
    """Delete the conversation; what is sent after this begins another of its name.

    None: it does not end at `head`, where that is given; nothing was deleted.
    """

    head: int | None = None


@dataclass(frozen=True, slots=True)
class DropOverdue(Message[None]):
    """The oldest parked result has waited long enough; the owner's timer says so."""


@dataclass(frozen=True, slots=True)
class GetView(Message[View]):
    """The view as committed."""


Command = (
    Send
    | Append
    | AppendAll
    | Retract
    | CancelTurn
    | TurnAppend
    | Stream
    | BeginStep
    | EndTurn
    | Pause
    | Resume
    | Confirm
    | Propose
    | ProposeFailed
    | RepairView
    | Recover
    | Delete
    | DropOverdue
)
Query = GetView
