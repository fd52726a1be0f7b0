"""The messages of a conversation actor: commands, which may lead to events, and queries.

All are frozen values, typed by their reply: `await ref.ask(Send(...))` returns a `Sent`. The
methods of a `Conversation` do just that; the commands are public for code that builds on the actor.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, TypeVar, get_args

from turnkeeper.runtime import Message

from ..errors import InvalidInput
from ..events import (
    Event,
    FileContent,
    ImageContent,
    LoggedEvent,
    StepRequest,
    UserMessageEvent,
)
from ..journal import ConversationInfo, Deletion
from ..values.frozen import FrozenObject
from ..values.text import (
    ID_LENGTH_MAX,
    check_bool,
    check_id,
    check_length,
    check_new_id,
    check_short,
    check_shown,
    check_text,
    check_whole,
)
from ..values.type_names import a_type
from .admission import Appended, Duplicate
from .condensation import Need, Proposal
from .details import TITLE_LENGTH_MAX
from .records import write_event
from .view import View

__all__ = [
    "Answer",
    "Append",
    "AppendAll",
    "BeginStep",
    "Behalf",
    "CancelTurn",
    "Change",
    "Command",
    "Delete",
    "DropOverdue",
    "EndTurn",
    "Expected",
    "FromOutside",
    "GetView",
    "Interrupt",
    "Leave",
    "NoteRequest",
    "OnOverlap",
    "Pause",
    "Propose",
    "ProposeFailed",
    "ProposeLate",
    "Query",
    "Recover",
    "RepairView",
    "Resume",
    "Retract",
    "Send",
    "Sent",
    "Stream",
    "TurnAppend",
    "Undo",
    "check_author",
    "check_file",
    "check_overlap",
]

URL_LENGTH_MAX = 8_192
_MEDIA_TYPE = re.compile(r"[\w!#$&^.+-]{1,127}/[\w!#$&^.+-]{1,127}", re.ASCII)

OnOverlap = Literal["queue", "interrupt", "steer", "rollback", "reject"]
"""How a chat message that comes while a turn runs is handled."""
_OVERLAPS: Final[tuple[str, ...]] = get_args(OnOverlap)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Behalf:
    """The principal for whom a command is sent, as the process that was asked authenticated them.

    The commands of an application's own code have none. A process that a command is forwarded to
    authorizes the principal again.
    """

    principal: str
    scopes: tuple[str, ...] = ()
    name: str | None = None
    """The conversation as the principal names it; None if they act for all principals."""

    def __post_init__(self) -> None:
        check_id("principal", self.principal)
        for scope in self.scopes:
            check_id("a scope", scope)
        if self.name is not None:
            check_text("the name of a conversation", self.name)


@dataclass(frozen=True, slots=True)
class Expected:
    """The conversation that a command is meant for; compared when the command is decided."""

    owner: str | None = None
    """The user whose conversation it must be; if the command begins it, this user gets it."""
    exists: bool = False
    """True if the command must not begin a conversation."""
    seq: int | None = None
    """The log must have an event at this seq."""
    event_id: str | None = None
    """The id that this event must have."""
    at_us: int | None = None
    """The time that it must have, in microseconds since 1970: a log that was begun anew may have
    the same id at the same seq, if ids are given."""
    behalf: Behalf | None = None
    """The principal for whom the command is sent."""

    @property
    def begins_nothing(self) -> bool:
        """True if the command is refused unless the conversation exists."""
        return self.exists or self.seq is not None

    def __post_init__(self) -> None:
        if self.owner is not None:
            check_id("owner", self.owner)
            check_short("owner", self.owner, ID_LENGTH_MAX)
        check_bool("exists", self.exists)
        if self.seq is not None:
            check_whole("seq", self.seq)
            if self.seq < 1:
                raise InvalidInput(f"the expected seq is {self.seq}; seqs begin at 1")
        if self.event_id is not None:
            check_id("event_id", self.event_id)
            if self.seq is None:
                raise InvalidInput("event_id is given without seq; give the seq of this event, too")
        if self.at_us is not None:
            check_whole("at_us", self.at_us)
            if self.event_id is None:
                raise InvalidInput("at_us is given without event_id; give the event's id, too")


@dataclass(frozen=True, slots=True)
class FromOutside(Message[R]):
    """The base of the messages that callers send; commands of owners and agents expect nothing."""

    expected: Expected | None = field(default=None, kw_only=True, repr=False)


def check_overlap(on_overlap: str) -> None:
    """Raise `InvalidInput` if this is not an `OnOverlap`."""
    if on_overlap not in _OVERLAPS:
        known = ", ".join(_OVERLAPS)
        raise InvalidInput(f"on_overlap is {on_overlap!r}; it takes one of {known}")


def check_author(author: object) -> None:
    """Raise `InvalidInput` unless this is None or has 1 to 256 characters, none a control."""
    if author is not None:
        check_id("author", author)
        check_short("author", author, ID_LENGTH_MAX)


def check_file(file: object) -> None:
    """Raise `InvalidInput` unless this is a file with a name, a type, and bytes or an address."""
    if not isinstance(file, FileContent):
        raise InvalidInput(
            f"files holds {a_type(file)}; it takes a list of FileContent, such as "
            "[FileContent.with_bytes(name, media_type, content)]"
        )
    _check_part(file)
    check_new_id("the name of a file", file.name)
    check_text("the media type of a file", file.media_type)
    if not _MEDIA_TYPE.fullmatch(file.media_type):
        raise _wrong_file("the media type of a file must be a type and a subtype, as text/plain")
    if (file.data is None) == (file.url is None):
        raise _wrong_file("a file must have either data or a url, and not both")
    if file.url is not None:
        check_short("the url of a file", file.url, URL_LENGTH_MAX)
        if not file.url.strip() or file.url.lower().startswith("data:"):
            raise _wrong_file("the url of a file must be an address; give its bytes as data")
        return
    try:
        raw = base64.b64decode(file.data or "", validate=True)
        is_plain = base64.b64encode(raw).decode() == file.data
    except ValueError:
        is_plain = False
    if not is_plain:
        raise _wrong_file("the data of a file must be base64; make it with FileContent.with_bytes")


def _check_part(part: ImageContent | FileContent) -> None:
    """Raise `InvalidInput` if its constructor would refuse it: it may have been made unchecked."""
    kind = ImageContent if isinstance(part, ImageContent) else FileContent
    kind(**vars(part))


def _wrong_file(rule: str) -> InvalidInput:
    return InvalidInput(rule, argument="a file", rule=rule)


_CHAT_KINDS = ("user_message", "message_queued")


def _write_event(event: Event) -> bytes:
    """Return the event as JSON. Raise `InvalidInput` if it is not one that callers may append."""
    if not isinstance(event, Event):
        raise InvalidInput(f"an event is an Event, and {type(event).__name__} is not")
    check_new_id("event id", event.id)
    if event.kind in _CHAT_KINDS:
        if (message_id := getattr(event, "message_id", None)) is not None:
            check_new_id("message_id", message_id)
        check_author(getattr(event, "author", None))
        for file in getattr(event, "files", ()):
            check_file(file)
    return write_event(event)


@dataclass(frozen=True, slots=True)
class Sent:
    """The place of a chat message in the log; the message is durable when this is returned."""

    message_id: str
    seq: int
    """The seq of the first event that carries the message id."""
    turn_id: str
    is_duplicate: bool = False
    """True if the log had this chat message already: then nothing was written."""
    overlapped: OnOverlap | None = None
    """Its effect on the turn that ran; "interrupt" if it was too late to roll that turn back."""
    waits_for: Literal["resume", "confirmation"] | None = None
    """The user's decision that has to come before it gets its turn."""
    event_id: str | None = field(default=None, compare=False, repr=False)
    """The id of the event at `seq`, by which the log is known.

    None in the owner's own answer to a duplicate, and if an older process answered.
    """


@dataclass(frozen=True, slots=True)
class Send(FromOutside[Sent]):
    """Put a chat message into the conversation; its turn starts now, or as `on_overlap` says."""

    message_id: str
    content: str
    images: tuple[ImageContent, ...] = ()
    on_overlap: OnOverlap | None = None
    """None: as the conversation's own setting says."""
    replaces: str | None = None
    """The chat message that it replaces, with its turn and all later turns."""
    author: str | None = None
    metadata: FrozenObject = field(default_factory=FrozenObject)
    files: tuple[FileContent, ...] = ()
    event_id: str | None = None
    """The id of the event that carries it into the log; only one message is taken under it."""

    def __post_init__(self) -> None:
        check_new_id("message_id", self.message_id)
        if self.event_id is not None:
            check_new_id("event_id", self.event_id)
        if self.replaces is not None:
            check_id("replaces", self.replaces)
        check_author(self.author)
        check_text("content", self.content)
        length = len(self.content)
        for image in self.images:
            if not isinstance(image, ImageContent):
                raise InvalidInput(
                    f"images holds {a_type(image)}; it takes a list of ImageContent, such as "
                    "[ImageContent(url=url)]"
                )
            _check_part(image)
            length += len(image.url)
        for file in self.files:
            check_file(file)
            length += len(file.data or "")
        check_length("a chat message with its images and files", length)
        if self.on_overlap is not None:
            check_overlap(self.on_overlap)


@dataclass(frozen=True, slots=True, init=False)
class Append(FromOutside[Appended | Duplicate]):
    """Put one event into the log, if admission lets it; no turn starts."""

    event: Event
    park: bool = False
    """Keep a result whose call has not come yet, for a while, and answer when the call comes."""
    written: bytes = field(init=False, repr=False, compare=False)
    """The event as JSON, written when the event was checked; the log gets exactly this."""

    # Written out, because a dataclass that is frozen takes three times as long to set a field.
    def __init__(
        self,
        event: Event,
        park: bool = False,  # noqa: FBT001, FBT002 - as the fields are
        *,
        expected: Expected | None = None,
    ) -> None:
        _set_written(self, _write_event(event))
        _set_event(self, event)
        _set_park(self, park)
        _set_expected(self, expected)


_set_expected: Final = vars(FromOutside)["expected"].__set__
_set_event, _set_park, _set_written = (
    vars(Append)[name].__set__ for name in ("event", "park", "written")
)


@dataclass(frozen=True, slots=True)
class AppendAll(FromOutside[Appended | Duplicate]):
    """As `Append`, for several events in one commit, retractions too: all of them, or none.

    The reply has the seq of the last one; without events, the seq at which the log ends.
    """

    events: tuple[Event, ...]
    written: tuple[bytes, ...] = field(init=False, repr=False, compare=False)
    """The events as JSON; see `Append`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "written", tuple(map(_write_event, self.events)))
        if len({event.id for event in self.events}) < len(self.events):
            raise InvalidInput("two of the events have the same id; give each its own")


@dataclass(frozen=True, slots=True)
class Retract(FromOutside[Appended]):
    """Take events, or all events of a turn, out of the view; the log keeps them."""

    event_ids: tuple[str, ...] = ()
    turn_id: str | None = None

    def __post_init__(self) -> None:
        for event_id in self.event_ids:
            check_text("an event id", event_id)
        if self.turn_id is not None:
            check_text("turn_id", self.turn_id)


@dataclass(frozen=True, slots=True)
class Change(FromOutside[Appended | Duplicate]):
    """Change the title, labels or user of a conversation; only once under one `change_id`."""

    title: str | None = None
    labels: FrozenObject = field(default_factory=FrozenObject)
    """Labels to set, or with None to remove; the others stay."""
    owner: str | None = None
    change_id: str | None = None
    """The id of the event in the log."""

    def __post_init__(self) -> None:
        if self.title is None and self.owner is None and not self.labels:
            raise InvalidInput("the change is empty; give a title, labels or an owner")
        if self.title is not None:
            check_short("title", self.title, TITLE_LENGTH_MAX)
        if self.owner is not None:
            check_short("owner", self.owner, ID_LENGTH_MAX)
        for name, value in self.labels.items():
            check_shown("the name of a label", name)
            if not name:
                raise InvalidInput(
                    "the name of a label is empty; it takes 1 character or more",
                    argument="labels",
                    rule="the name of a label must have 1 character or more",
                )
            if value is not None:
                check_shown("a label", value)
        if self.change_id is not None:
            check_new_id("change_id", self.change_id)


@dataclass(frozen=True, slots=True)
class CancelTurn(FromOutside[bool]):
    """Interrupt a running turn, or withdraw a queued message.

    The reply is False if the turn had ended already.
    """

    message_id: str
    turn_id: str


@dataclass(frozen=True, slots=True)
class Interrupt(FromOutside[bool]):
    """Interrupt the turn that runs. The reply is False if none runs, or not the named one."""

    turn_id: str | None = None

    def __post_init__(self) -> None:
        if self.turn_id is not None:
            check_text("turn_id", self.turn_id)


@dataclass(frozen=True, slots=True)
class Undo(FromOutside[tuple[UserMessageEvent, ...]]):
    """Retract the newest turn that has chat messages in the view; the reply: those messages.

    It is refused if that is another turn than the one that is named.
    """

    turn_id: str | None = None

    def __post_init__(self) -> None:
        if self.turn_id is not None:
            check_text("turn_id", self.turn_id)


@dataclass(frozen=True, slots=True)
class TurnAppend(Message[Sequence[LoggedEvent]]):
    """Append the events of a running turn's agent, in one commit: all of them, or none."""

    turn_id: str
    epoch: int
    events: tuple[Event, ...]
    suspends: bool = False
    """After this the turn waits for a confirmation, and its agent ends its run."""
    ends: bool = False
    """With this the turn is completed, in the same commit, unless a pause holds it."""
    written: Sequence[bytes] = ()
    """The JSON of the events, in order; if it is empty, the owner encodes them."""


@dataclass(frozen=True, slots=True)
class Stream(Message[None]):
    """One piece of the answer that a running turn's model is writing; kept in memory only."""

    may_be_lost: ClassVar[bool] = True

    turn_id: str
    epoch: int
    text: str
    is_first: bool = False
    """True if it begins the answer anew: the pieces of an earlier stream are void."""

    def __post_init__(self) -> None:
        # Checks no more than the type: a piece may end in half a character.
        if not isinstance(self.text, str):
            raise InvalidInput(f"a piece of an answer takes a str, not {type(self.text).__name__}")


@dataclass(frozen=True, slots=True)
class NoteRequest(Message[None]):
    """Note what a running turn's model is asked; kept in memory until the step ends."""

    turn_id: str
    epoch: int
    request: StepRequest


@dataclass(frozen=True, slots=True)
class BeginStep(Message[bool]):
    """Begin the next step of a running turn.

    The reply is False if the turn is held; its agent ends its run, and is run again later.
    """

    turn_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class EndTurn(Message[bool]):
    """End a running turn: its agent has returned, or failed with `error`.

    The reply is False if a pause or a confirmation holds the turn; its agent is run again later.
    """

    turn_id: str
    epoch: int
    error: str | None = None
    detail: str = ""
    is_stuck: bool = False


@dataclass(frozen=True, slots=True)
class Pause(FromOutside[bool]):
    """Begin no further step until `Resume`. The reply is False if it was paused already."""


@dataclass(frozen=True, slots=True)
class Resume(FromOutside[bool]):
    """Go on after a pause. The reply is False if it was not paused."""


@dataclass(frozen=True, slots=True)
class Answer(FromOutside[bool]):
    """Answer the calls that wait for a confirmation.

    An answer is True (run the call), False, or the reason to reject it. One answer in place of a
    mapping is the answer to every call that waits. The reply is False if the calls had these
    answers already.
    """

    answers: Mapping[str, bool | str] | bool | str
    event_id: str | None = None
    """The id of the event that carries the answers into the log."""

    def __post_init__(self) -> None:
        if self.event_id is not None:
            check_new_id("event_id", self.event_id)
        by_call = self.answers if isinstance(self.answers, Mapping) else {"": self.answers}
        for tool_call_id, answer in by_call.items():
            check_text("a tool_call_id", tool_call_id)
            if not isinstance(answer, bool):
                check_text("the answer to a call, if not True or False,", answer)
        if isinstance(self.answers, Mapping):
            object.__setattr__(self, "answers", FrozenObject(self.answers))


@dataclass(frozen=True, slots=True)
class Propose(Message[bool]):
    """Apply a condenser's proposal for the view it was shown; None: it has nothing to propose.

    If the need is hard and the proposal cannot be applied, the owner makes room itself. The reply
    is True if this made the view shorter, or answered a condensation request.
    """

    epoch: int
    proposal: Proposal | None
    shown: View
    need: Need = "soft"


@dataclass(frozen=True, slots=True)
class ProposeFailed(Message[None]):
    """Record that a condenser raised."""

    epoch: int
    error: str
    detail: str


@dataclass(frozen=True, slots=True)
class ProposeLate(Message[None]):
    """Go on without a proposal that the condenser has not made in time; sent by the owner's timer.

    `asked`: what the condenser was asked for.
    """

    asked: Propose


@dataclass(frozen=True, slots=True)
class RepairView(Message[bool]):
    """Repair the view that a model refused as malformed.

    `broken`: the events that enforcement removes from it.
    """

    turn_id: str
    epoch: int
    broken: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class Recover(Message[None]):
    """End the turn that the previous owner left, or start the one that waits.

    The first command of every owner, and one that it gives itself when a message can go on.
    """

    enforced_away: tuple[str, ...] = ()
    """The events that enforcement took from the view of a log from elsewhere."""


@dataclass(frozen=True, slots=True)
class Leave(Message[None]):
    """End the running turn because its process leaves, if there is one to end."""


@dataclass(frozen=True, slots=True)
class Delete(FromOutside[Deletion | None]):
    """Delete the conversation; a message sent after this begins another one under its id.

    The reply is None if `listed` is given and the log has changed since: nothing was deleted.
    """

    listed: ConversationInfo | None = None


@dataclass(frozen=True, slots=True)
class DropOverdue(Message[None]):
    """Refuse the parked results that are overdue; sent by the owner's timer."""


@dataclass(frozen=True, slots=True)
class GetView(FromOutside[View]):
    """Return the committed view."""


Command = (
    Send
    | Append
    | AppendAll
    | Retract
    | Change
    | Undo
    | CancelTurn
    | Interrupt
    | TurnAppend
    | Stream
    | NoteRequest
    | BeginStep
    | EndTurn
    | Pause
    | Resume
    | Answer
    | Propose
    | ProposeFailed
    | ProposeLate
    | RepairView
    | Recover
    | Leave
    | Delete
    | DropOverdue
)
Query = GetView
