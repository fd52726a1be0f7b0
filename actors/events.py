"""The events of a conversation: immutable facts, one pydantic model per kind.

A log is a sequence of events. They are frozen all the way down, carry a time-ordered id and a UTC
timestamp, and survive a round trip through JSON exactly. An event of a kind from a newer version
is kept as an `UnknownEvent` and passed on unchanged, never dropped. Shapes that an older version
wrote are brought up to date as they are read (`values/upcasters.py`).

Ids: an event draws its own id and timestamp only if a caller makes it by hand. The events that the
conversation actor decides carry the ids and the time of the command that led to them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    Self,
    TypeAlias,
    TypeGuard,
    TypeVar,
    get_args,
)

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import from_json

from turnkeeper.runtime import Ports

from .errors import InvalidInput
from .tool_calls import Risk
from .values.api_names import api_call_id, api_tool_name
from .values.frozen import FrozenObject, frozen
from .values.text import check_text
from .values.type_names import a_name, a_type
from .values.upcasters import UPCASTERS, Upcasters

E = TypeVar("E", bound="Event")

_ports = Ports()
_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/yaml")


def _now() -> datetime:
    return datetime.fromtimestamp(_ports.now(), UTC)


def _in_utc(timestamp: datetime) -> datetime:
    try:
        return timestamp.astimezone(UTC)
    except OverflowError as error:  # pydantic would not make a validation error of it
        raise ValueError("before the year 1 or after the year 9999, in UTC") from error


def _lengths(by_id: FrozenObject) -> FrozenObject:
    for length in by_id.values():
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise ValueError("a length is a number of characters, 0 or more")
    return by_id


_Count: TypeAlias = Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)]
"""A number that every JSON reader gives back: some refuse integers of thousands of digits."""


def _label_values(by_name: FrozenObject) -> FrozenObject:
    for value in by_name.values():
        if not isinstance(value, str | None):
            raise ValueError("a label is a text, or None to remove it")  # noqa: TRY004 - pydantic
    return by_name


LLMMessage: TypeAlias = FrozenObject
"""One message for a model, in the shape that its provider's API takes."""


class Value(BaseModel):
    """A part of an event. Frozen; unknown fields are refused."""

    model_config = ConfigDict(
        frozen=True,
        # Built when a class is first used: most programs never use half of them.
        defer_build=True,
        extra="forbid",
        # Only values that JSON gives back exactly. Any bound makes pydantic look into each string,
        # and refuse a lone surrogate here instead of at the commit.
        allow_inf_nan=False,
        str_min_length=0,
        # An error may describe the fault, but not show the value: that can be chat text.
        hide_input_in_errors=True,
        # An event checks the parts that it is given, too: `model_construct` and `model_copy` check
        # nothing, and one part that cannot be read back makes the log unreadable.
        revalidate_instances="always",
    )


class _Given(Value):
    """A part of a chat message, which callers make. Raises `InvalidInput` if a field is wrong."""

    if not TYPE_CHECKING:  # to a type checker, its parameters are its fields

        def __init__(self, **given: object) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise InvalidInput(self._fault(given, error)) from None

        # Marked as pydantic's own, so that the check of a whole event or request does not call it,
        # and reports the place of a fault itself.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def _fault(cls, given: Mapping[str, object], error: ValidationError) -> str:
        """Say what is wrong with the first wrong field, without showing its value."""
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = str(first["loc"][0])
        takes = f"{cls.__name__} takes {', '.join(cls.model_fields)}"
        match first["type"]:
            case "missing":
                return f"{name} is missing; {takes}"
            case "extra_forbidden":
                return f"{name} is unknown; {takes}"
            case "string_type":
                return f"{name} is {a_type(given[name])}; it takes a str"
            case _:
                return f"{name} is invalid: {first['msg']}"


class ImageContent(_Given):
    """An image that came with a chat message, by URL (a `data:` URL holds the image itself)."""

    url: str


class FileContent(_Given):
    """A file that came with a chat message: its bytes, or the address where it is."""

    name: str
    media_type: str
    """Such as `application/pdf`."""
    data: str | None = None
    """Its bytes in base64; `with_bytes` makes a file of bytes."""
    url: str | None = None

    @classmethod
    def with_bytes(cls, name: str, media_type: str, content: bytes) -> Self:
        """Make a file that holds these bytes. Raises `InvalidInput`."""
        check_text("name", name)
        check_text("media_type", media_type)
        if not isinstance(content, bytes | bytearray | memoryview):
            raise InvalidInput(f"content is {a_type(content)}; it takes bytes")
        return cls(name=name, media_type=media_type, data=base64.b64encode(content).decode())

    @property
    def content(self) -> bytes | None:
        """Its bytes; None if it has an address instead."""
        return None if self.data is None else base64.b64decode(self.data)

    @property
    def size(self) -> int:
        """The number of its bytes; 0 if it has an address instead."""
        data = self.data or ""
        return len(data) * 3 // 4 - data[-2:].count("=")

    @property
    def text(self) -> str | None:
        """Its content as text; None if it is not text in UTF-8."""
        if self.data is None or not self.media_type.startswith(_TEXT_TYPES):
            return None
        try:
            return base64.b64decode(self.data).decode()
        except ValueError:
            return None


class ThinkingBlock(Value):
    """A model's thinking before its answer, as the provider wants it back."""

    thinking: str
    signature: str | None = None
    redacted_data: str | None = None
    """The thinking in encrypted form, if the provider gave it so; `thinking` is empty then."""
    item_id: str | None = None
    """The id of this part of a response, if the provider wants that back too."""
    made_by: str | None = None
    """The API and the model that can read it, such as `openai_responses:o4-mini`; None means
    Anthropic's."""


class TokenUsage(Value):
    """The tokens, the cost and the time of one model call."""

    input_tokens: _Count = 0
    output_tokens: _Count = 0
    cached_tokens: _Count = 0
    cost: float = 0.0
    latency_s: float = 0.0
    reasoning_tokens: _Count = 0
    """The output tokens that the model used to think, if the provider counts them apart."""
    cache_written_tokens: _Count = 0
    """The input tokens that were written to a cache."""
    model: str | None = None


class Task(Value):
    """One line of the agent's task list."""

    description: str
    done: bool = False


class _Unchecked(set[str]):
    """The fields that were set on an event without pydantic's checks; copies keep this class."""


class Event(Value):
    """The base of all events, with the fields that every event has."""

    kind: str
    id: str = Field(default_factory=_ports.ids.new, min_length=1)
    timestamp: Annotated[AwareDatetime, AfterValidator(_in_utc)] = Field(default_factory=_now)
    turn_id: str | None = None

    # These three skip pydantic's checks, so they mark their events for `is_validated`.

    @classmethod
    def model_construct(
        cls,
        _fields_set: set[str] | None = None,
        **values: Any,  # noqa: ANN401 - pydantic's own signature, as in the next two
    ) -> Self:
        return _unchecked(super().model_construct(_fields_set, **values))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        return _unchecked(copied) if update else copied

    def copy(self, **options: Any) -> Self:  # noqa: ANN401 - pydantic's
        return _unchecked(super().copy(**options))

    @classmethod
    def model_validate_json(
        cls,
        json_data: str | bytes | bytearray,
        **options: Any,  # noqa: ANN401 - pydantic's own options, passed through
    ) -> Self:
        """Return the event that this JSON holds; on a base class, as its concrete type."""
        if cls not in _BASES:
            return super().model_validate_json(json_data, **options)
        event = decode_event(bytes(json_data) if isinstance(json_data, bytearray) else json_data)
        if not isinstance(event, cls):
            raise ValueError(  # noqa: TRY004 - the JSON is at fault, as where pydantic refuses it
                f"{a_name(event.kind)} event is not {a_name(cls.__name__)}"
            )
        return event


class LoggedEvent(NamedTuple):
    """An event with its place in the log."""

    seq: int
    event: Event


class TextDelta(NamedTuple):
    """A piece of an answer that is being written: live only, never stored, not an event.

    The pieces of one attempt follow each other without a gap, from offset 0. A piece of a higher
    `(epoch, attempt)` voids the earlier pieces of the same answer. The event that carries the
    answer replaces its pieces, and the turn's end voids all that no event has replaced.
    """

    epoch: int
    """The epoch of the owner that took it."""
    turn_id: str
    answer: int
    """How many agent messages and responses with calls of the turn the log has before this one."""
    attempt: int
    """How often the owner has seen this answer begin; 1 for the first attempt."""
    offset: int
    """The code points of the attempt before this piece; 0 for the first piece."""
    text: str

    @property
    def end(self) -> int:
        """The code points of the attempt up to the end of this piece."""
        return self.offset + len(self.text)

    def is_of_same_attempt(self, piece: TextDelta) -> bool:
        """Return True if this and `piece` are of one attempt at an answer, from any process."""
        return self[:4] == piece[:4]

    def from_offset(self, offset: int) -> TextDelta:
        """Return the part of this piece that begins at an offset between its own and its end."""
        return self._replace(offset=offset, text=self.text[offset - self.offset :])


class LLMConvertibleEvent(Event):
    """An event that the model sees."""

    def to_llm_message(self) -> LLMMessage:
        """Return this event alone as a message of the OpenAI chat API.

        A model response with several calls is several events; `to_llm_messages` joins them.
        """
        raise NotImplementedError


# --- seen by the model -------------------------------------------------------------------------


class SystemPromptEvent(LLMConvertibleEvent):
    kind: Literal["system_prompt"] = "system_prompt"
    content: str
    goes_first: bool = False
    """True: it replaces the system prompt that the view begins with, or goes before all events if
    the view has none. False: it stands where it came."""

    def to_llm_message(self) -> LLMMessage:
        return frozen(role="system", content=self.content)


class UserMessageEvent(LLMConvertibleEvent):
    """A chat message by a user. `queued_event_id` names the event that kept it while it waited."""

    kind: Literal["user_message"] = "user_message"
    content: str
    images: tuple[ImageContent, ...] = ()
    message_id: str | None = None
    queued_event_id: str | None = None
    is_reminder: bool = False
    """True if it is not by the user: the agent's loop tells its model something during a turn."""
    replaces: str | None = None
    """The id of the chat message that this one replaces."""
    author: str | None = None
    """The user who sent it, as the application names its users."""
    metadata: FrozenObject = FrozenObject()
    """The application's own data about it. The model does not see it."""
    files: tuple[FileContent, ...] = ()

    def to_llm_message(self) -> LLMMessage:
        if not (self.images or self.files):
            return frozen(role="user", content=self.content)
        text = (frozen(type="text", text=self.content),) if self.content else ()
        images = (frozen(type="image_url", image_url=frozen(url=at.url)) for at in self.images)
        files = (frozen(type="text", text=f"(file {file.name})") for file in self.files)
        return frozen(role="user", content=(*text, *images, *files))


class AgentMessageEvent(LLMConvertibleEvent):
    """A chat message by the agent; `interrupted` when it was cut off while being written."""

    kind: Literal["agent_message"] = "agent_message"
    content: str
    thinking: tuple[ThinkingBlock, ...] = ()
    llm_response_id: str | None = None
    interrupted: bool = False

    def to_llm_message(self) -> LLMMessage:
        return frozen(role="assistant", content=self.content)


class ActionEvent(LLMConvertibleEvent):
    """One tool call. The calls of one model response share `llm_response_id`."""

    kind: Literal["action"] = "action"
    tool_call_id: str
    provider_call_id: str | None = None
    tool_name: str
    arguments: FrozenObject = FrozenObject()
    malformed_arguments: str | None = None
    """The model's text, if it was not a JSON object; `arguments` is empty then."""
    llm_response_id: str
    thinking: tuple[ThinkingBlock, ...] = ()
    text: str = ""
    """The text that came with the calls; only in the first action of a response."""
    risk: Risk | None = None
    """The risk that the tool declares; None if it declares none."""

    def to_llm_message(self) -> LLMMessage:
        return openai_response((self,))


class ObservationEvent(LLMConvertibleEvent):
    """The result of a tool call."""

    kind: Literal["observation"] = "observation"
    tool_call_id: str
    content: str
    is_error: bool = False

    def to_llm_message(self) -> LLMMessage:
        return _tool_message(self.tool_call_id, self.content)


class AgentErrorEvent(LLMConvertibleEvent):
    """The answer to a call without a result: not run, interrupted, cut off with the process."""

    kind: Literal["agent_error"] = "agent_error"
    tool_call_id: str
    content: str
    may_have_happened: bool = False

    def to_llm_message(self) -> LLMMessage:
        return _tool_message(self.tool_call_id, self.content)


class UserRejectEvent(LLMConvertibleEvent):
    """The answer to a tool call that the user rejected."""

    kind: Literal["user_reject"] = "user_reject"
    tool_call_id: str
    content: str

    def to_llm_message(self) -> LLMMessage:
        return _tool_message(self.tool_call_id, self.content)


class CondensationSummaryEvent(LLMConvertibleEvent):
    """The summary of forgotten events, in the view only: the view makes it of a condensation."""

    kind: Literal["condensation_summary"] = "condensation_summary"
    content: str

    def to_llm_message(self) -> LLMMessage:
        return frozen(role="user", content=self.content)


# --- condensation ------------------------------------------------------------------------------


class CondensationRequestEvent(Event):
    kind: Literal["condensation_request"] = "condensation_request"


class CondensationEvent(Event):
    """Forgets part of the view, and may put a summary in its place; may shorten results, too."""

    kind: Literal["condensation"] = "condensation"
    forgotten_event_ids: tuple[str, ...]
    summary: str | None = None
    summary_offset: _Count | None = Field(default=None, ge=0)
    shortened: Annotated[FrozenObject, AfterValidator(_lengths)] = FrozenObject()
    """The characters that the view keeps of a result, by event id; the log keeps the whole."""


# --- turns -------------------------------------------------------------------------------------


class MessageQueuedEvent(Event):
    """A chat message that waits for its turn; the later `UserMessageEvent` names this event."""

    kind: Literal["message_queued"] = "message_queued"
    message_id: str
    content: str
    images: tuple[ImageContent, ...] = ()
    steers: str | None = None
    """The turn that it joins at the next step, unless that turn ends first."""
    queued_again: bool = False
    """True if it had joined a turn that was rolled back, and waits once more."""
    replaces: str | None = None
    """The id of the chat message that this one replaces."""
    place: _Count | None = None
    """The seq at which the replaced message first came, if this one takes its place in the queue.
    """
    author: str | None = None
    metadata: FrozenObject = FrozenObject()
    files: tuple[FileContent, ...] = ()


class MessageWithdrawnEvent(Event):
    """A queued chat message whose turn was cancelled before it began."""

    kind: Literal["message_withdrawn"] = "message_withdrawn"
    message_id: str
    replaced_by: str | None = None
    """The id of the chat message that takes its place, if one does."""


class TurnStartedEvent(Event):
    kind: Literal["turn_started"] = "turn_started"


class StepRequest(Value):
    """The request that a step sent to its model; `conversation.at(view_seq)` has the view sent."""

    view_seq: _Count = Field(ge=0)
    """The seq of the log at which the view was taken."""
    model: str | None = None
    tools_digest: str | None = None
    """A digest of the tools that the model might call, by their names, descriptions and schemas."""
    parameters_digest: str | None = None
    """A digest of the model's other settings, such as the temperature."""
    is_plain: bool = False
    """True if images and thinking were left out."""
    show_author: bool = False
    """True if chat messages began with the names of their authors."""


class StepFinishedEvent(Event):
    """One model call is done and its answer is in the log; the tool calls of it may still run."""

    kind: Literal["step_finished"] = "step_finished"
    usage: TokenUsage = TokenUsage()
    request: StepRequest | None = None
    """None if the agent does not say which view its model saw."""
    response_id: str | None = None
    """The id that the provider gave the response."""


class StepUnfinishedEvent(Event):
    """A model call whose answer is not in the log: it was interrupted, or failed."""

    kind: Literal["step_unfinished"] = "step_unfinished"
    outcome: Literal["interrupted", "failed"]
    usage: TokenUsage = TokenUsage()
    """Its time alone: the provider has not reported the tokens."""
    request: StepRequest


class TurnEndedEvent(Event):
    kind: Literal["turn_ended"] = "turn_ended"
    outcome: Literal["completed", "interrupted", "failed", "rolled_back"]
    detail: str | None = None


class ConfirmationRequestedEvent(Event):
    kind: Literal["confirmation_requested"] = "confirmation_requested"
    tool_call_ids: tuple[str, ...]


class ConfirmationGivenEvent(Event):
    """The calls that waited are answered: those that are not rejected may run."""

    kind: Literal["confirmation_given"] = "confirmation_given"
    confirmed: bool
    """False: all of them are rejected."""
    rejected: tuple[str, ...] = ()
    """The calls that are rejected, if others are confirmed."""


class PausedEvent(Event):
    kind: Literal["paused"] = "paused"


class ResumedEvent(Event):
    kind: Literal["resumed"] = "resumed"


# --- the rest ----------------------------------------------------------------------------------


class StatusChangedEvent(Event):
    kind: Literal["status_changed"] = "status_changed"
    status: str


class TaskListUpdatedEvent(Event):
    kind: Literal["task_list_updated"] = "task_list_updated"
    tasks: tuple[Task, ...]


class ConversationErrorEvent(Event):
    kind: Literal["conversation_error"] = "conversation_error"
    error: str
    detail: str = ""


class RetractionEvent(Event):
    """Takes events out of the view; the log keeps them."""

    kind: Literal["retraction"] = "retraction"
    retracted_event_ids: tuple[str, ...]


class ForkedFromEvent(Event):
    kind: Literal["forked_from"] = "forked_from"
    conversation_id: str
    seq: _Count


class ConversationChangedEvent(Event):
    """The title, the labels or the user was changed. The model does not see it.

    A field that is None stays as it was; an empty text clears it. A label of None is removed, and
    labels that are not named stay.
    """

    kind: Literal["conversation_changed"] = "conversation_changed"
    title: str | None = None
    labels: Annotated[FrozenObject, AfterValidator(_label_values)] = FrozenObject()
    owner: str | None = None
    """The user to whom the conversation belongs, as the application names its users."""


class UnknownEvent(Event):
    """An event of a kind that this version does not know, kept and passed on unchanged."""

    fields: FrozenObject
    """The whole event, `kind` and `id` included; it is written again as it is here."""

    @model_validator(mode="after")
    def _is_what_came(self) -> Self:
        if (self.fields.get("kind"), self.fields.get("id")) != (self.kind, self.id):
            raise ValueError("the fields of an unknown event carry its own kind and id")
        return self

    @model_serializer
    def _as_it_came(self) -> dict[str, object]:
        return dict(self.fields)


ObservationLikeEvent: TypeAlias = ObservationEvent | AgentErrorEvent | UserRejectEvent
"""An answer to a tool call."""

_KnownEvent: TypeAlias = (
    SystemPromptEvent
    | UserMessageEvent
    | AgentMessageEvent
    | ActionEvent
    | ObservationEvent
    | AgentErrorEvent
    | UserRejectEvent
    | CondensationSummaryEvent
    | CondensationRequestEvent
    | CondensationEvent
    | MessageQueuedEvent
    | MessageWithdrawnEvent
    | TurnStartedEvent
    | StepFinishedEvent
    | StepUnfinishedEvent
    | TurnEndedEvent
    | ConfirmationRequestedEvent
    | ConfirmationGivenEvent
    | PausedEvent
    | ResumedEvent
    | StatusChangedEvent
    | TaskListUpdatedEvent
    | ConversationErrorEvent
    | RetractionEvent
    | ForkedFromEvent
    | ConversationChangedEvent
)
AnyEvent = Annotated[_KnownEvent, Field(discriminator="kind")]
"""Every kind that this version knows, as a union that pydantic discriminates."""

_KNOWN_EVENTS: TypeAdapter[list[_KnownEvent]] = TypeAdapter(
    list[AnyEvent], config=ConfigDict(defer_build=True)
)

RESULT_CLASSES = (ObservationEvent, AgentErrorEvent, UserRejectEvent)
"""`ObservationLikeEvent`, for `isinstance`."""

_BASES = (Event, LLMConvertibleEvent)
_ALWAYS_WRITTEN = frozenset(("id", "timestamp"))
EVENT_CLASSES: dict[str, type[Event]] = {
    event_class.model_fields["kind"].default: event_class for event_class in get_args(_KnownEvent)
}
_FIELDS = {known: set(known.model_fields) for known in EVENT_CLASSES.values()}
"""The fields of each kind. Events that are read share this set, so nothing may change it: a set of
its own would take half a kilobyte of each event of a view."""

# `isinstance` against a pydantic class costs 0.2 µs where it fails, a look at the kind 0.05; the
# folds look at every event of every log.
RESULT_KINDS = frozenset(event_class.model_fields["kind"].default for event_class in RESULT_CLASSES)
SEEN_KINDS = frozenset(
    kind
    for kind, event_class in EVENT_CLASSES.items()
    if issubclass(event_class, LLMConvertibleEvent)
)


CHANGE_KIND: Final = "conversation_changed"


def is_seen_by_model(event: Event) -> TypeGuard[LLMConvertibleEvent]:
    """Return `isinstance(event, LLMConvertibleEvent)`, but quickly."""
    return event.kind in SEEN_KINDS


FLAT_TYPES = frozenset((str, bool, datetime))
"""The types of values that hold no others, and have no bounds as numbers have."""


def is_validated(event: Event) -> bool:
    """True if pydantic has checked each value of the event, and its class is that of its kind.

    If all its values are of `FLAT_TYPES`, too, it is read back as it is: models and JSON inside an
    event may have come past pydantic's checks.
    """
    return type(event.__pydantic_fields_set__) is set and (
        EVENT_CLASSES.get(event.kind) is type(event)
    )


_set_fields: Final = vars(BaseModel)["__pydantic_fields_set__"].__set__
"""Sets that field of a frozen event, in half the time that `object.__setattr__` takes."""


def _unchecked(event: E) -> E:
    fields = _Unchecked(event.__pydantic_fields_set__)
    _set_fields(event, fields)
    return event


_SHARED_FIELDS: Final[dict[frozenset[str], set[str]]] = {}
_SHARED_FIELDS_MAX: Final = 1_024


def share_fields(event: Event) -> None:
    """Have the event share the set of its fields with other events that have the same fields.

    Conversations keep thousands of events, and callers make them with the same few fields.
    """
    fields = event.__pydantic_fields_set__
    if type(fields) is set:  # not one that came past pydantic's checks
        key = frozenset(fields)
        shared = _SHARED_FIELDS.get(key)
        if shared is not None:
            _set_fields(event, shared)
        elif len(_SHARED_FIELDS) < _SHARED_FIELDS_MAX:
            _SHARED_FIELDS[key] = fields


def encode_event(event: Event) -> bytes:
    """Return the event as JSON, in UTF-8."""
    return event.__pydantic_serializer__.to_json(event)


def decode_event(
    payload: bytes | str, *, kind: str | None = None, upcasters: Upcasters = UPCASTERS
) -> Event:
    """Return the event that `encode_event` wrote, in this or another version.

    `upcasters` lift events of older versions. Raises `ValueError` if the payload is no event. A
    caller that knows the kind, as a journal does, saves the time to look for it in the payload.
    """
    known = EVENT_CLASSES.get(kind or "")
    event: Event
    if known is None or kind in upcasters.kinds:
        event = _decode_object(payload, upcasters)
    else:
        validate_json, fields = _reader_of(known)
        event = validate_json(payload)
        if len(event.__pydantic_fields_set__) == len(fields):  # it has all, and no other is allowed
            _set_fields(event, fields)
            return event
    if not _ALWAYS_WRITTEN.issubset(event.__pydantic_fields_set__):  # drawn here, and not read
        raise ValueError("an event without an id or a timestamp")
    return event


@cache
def _reader_of(known: type[Event]) -> tuple[Callable[[bytes | str], Event], set[str]]:
    """Return the function that reads the JSON of this kind, and the kind's fields.

    Kept, since pydantic finds the function by half a dozen look-ups.
    """
    return known.__pydantic_validator__.validate_json, _FIELDS[known]


def decode_known(payload: bytes) -> Sequence[Event]:
    """Return the events of `payload`, a JSON array of known kinds in the shape of this version.

    It takes three quarters of the time that `decode_event` takes for each of them. Raises
    `ValueError`.
    """
    events = _KNOWN_EVENTS.validate_json(payload)
    for event in events:
        if not _ALWAYS_WRITTEN.issubset(event.__pydantic_fields_set__):
            raise ValueError("an event without an id or a timestamp")
    return events


@cache
def build_kinds() -> None:
    """Build the models of all kinds that are not built yet: each is built at its first use."""
    for known in EVENT_CLASSES.values():
        known.model_rebuild()
    _KNOWN_EVENTS.rebuild()


def _decode_object(payload: bytes | str, upcasters: Upcasters) -> Event:
    record = from_json(payload)
    if not isinstance(record, dict):
        raise ValueError(  # noqa: TRY004 - the JSON is at fault, as where pydantic refuses it
            f"an event is a JSON object, not {a_type(record)}"
        )
    record = upcasters.apply(record)
    known = EVENT_CLASSES.get(str(record.get("kind")))
    if known is not None:
        event: Event = known.__pydantic_validator__.validate_python(record)
        return event
    header = {key: record[key] for key in ("kind", "id", "timestamp", "turn_id") if key in record}
    return UnknownEvent.model_validate({**header, "fields": record})


def openai_response(actions: Sequence[ActionEvent]) -> LLMMessage:
    """Return `actions`, the calls of one model response, as a message of the OpenAI chat API."""
    calls = tuple(
        frozen(
            id=api_call_id(action.tool_call_id),
            type="function",
            function=frozen(
                name=api_tool_name(action.tool_name),
                # Not `malformed_arguments`: some servers parse this. The result reports the fault.
                arguments=json.dumps(action.arguments, ensure_ascii=False),
            ),
        )
        for action in actions
    )
    text = "\n".join(action.text for action in actions if action.text)
    if not text:
        return frozen(role="assistant", tool_calls=calls)
    return frozen(role="assistant", content=text, tool_calls=calls)


def _tool_message(tool_call_id: str, content: str) -> LLMMessage:
    return frozen(role="tool", tool_call_id=api_call_id(tool_call_id), content=content)
