"""The events of a conversation: immutable facts, one pydantic model per kind.

A log is a sequence of these. They are frozen all the way down, carry a time-ordered id and a UTC
timestamp, and survive a round trip through JSON exactly. A kind from a newer version is kept as
an `UnknownEvent` and passed on as it came, never dropped. Shapes that an older version wrote are
brought up to date as they are read (`_upcasters.py`).

Ids: an event draws its own id and timestamp only where a caller makes it by hand. What the
conversation actor decides carries the id and the time of the command that led to it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias, TypeGuard, get_args

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    model_serializer,
    model_validator,
)
from pydantic_core import from_json

from turnkeeper.runtime import Ports

from ._frozen import FrozenObject, frozen
from ._upcasters import UPCASTERS, Upcasters
from ._wire import wire_call_id, wire_tool_name

_ports = Ports()


def _now() -> datetime:
    return datetime.fromtimestamp(_ports.now(), UTC)


def _in_utc(timestamp: datetime) -> datetime:
    return timestamp.astimezone(UTC)


LLMMessage: TypeAlias = FrozenObject
"""One message for a model, in the shape that its provider's API takes."""


class Value(BaseModel):
    """A part of an event: frozen, and no stranger to unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        # Only what JSON gives back exactly. Any bound makes pydantic look into each string, and
        # refuse a lone surrogate here instead of at the commit.
        allow_inf_nan=False,
        str_min_length=0,
        # What is wrong with a value may be told; the value itself can be chat text.
        hide_input_in_errors=True,
    )


class ImageContent(Value):
    """An image that came with a chat message, by URL (a `data:` URL holds the image itself)."""

    url: str


class ThinkingBlock(Value):
    """What a model thought before it answered, as the provider wants it back."""

    thinking: str
    signature: str | None = None
    redacted_data: str | None = None
    """Set where the provider gave its thinking encrypted; `thinking` is empty then."""


class TokenUsage(Value):
    """What one model call took."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost: float = 0.0
    latency_s: float = 0.0


class Task(Value):
    """One line of the agent's task list."""

    description: str
    done: bool = False


class Event(Value):
    """What every event has."""

    kind: str
    id: str = Field(default_factory=_ports.ids.new, min_length=1)
    timestamp: Annotated[AwareDatetime, AfterValidator(_in_utc)] = Field(default_factory=_now)
    turn_id: str | None = None

    @classmethod
    def model_validate_json(
        cls,
        json_data: str | bytes | bytearray,
        **options: Any,  # noqa: ANN401 - pydantic's own options, passed through
    ) -> Self:
        """The event that this JSON holds; asked of a base class, of its concrete type."""
        if cls not in _BASES:
            return super().model_validate_json(json_data, **options)
        event = decode_event(bytes(json_data) if isinstance(json_data, bytearray) else json_data)
        if not isinstance(event, cls):
            raise ValueError(  # noqa: TRY004 - the JSON is at fault, as where pydantic refuses it
                f"a {event.kind} event is not a {cls.__name__}"
            )
        return event


class LoggedEvent(NamedTuple):
    """An event with its place in the log."""

    seq: int
    event: Event


class TextDelta(NamedTuple):
    """A piece of an answer while it is being written: live only, never stored, and not an event."""

    turn_id: str
    text: str
    starts_anew: bool
    """It is the first of the answer; what came before of one that is not in the log is void."""


class LLMConvertibleEvent(Event):
    """An event that the model sees."""

    def to_llm_message(self) -> LLMMessage:
        """This event alone as a message of the OpenAI chat API.

        A model response with several calls is several events; `to_llm_messages` joins them.
        """
        raise NotImplementedError


# --- seen by the model -------------------------------------------------------------------------


class SystemPromptEvent(LLMConvertibleEvent):
    kind: Literal["system_prompt"] = "system_prompt"
    content: str

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
    """Not by the user: the agent's own loop tells its model something in the middle of a turn."""

    def to_llm_message(self) -> LLMMessage:
        if not self.images:
            return frozen(role="user", content=self.content)
        text = (frozen(type="text", text=self.content),) if self.content else ()
        images = (frozen(type="image_url", image_url=frozen(url=at.url)) for at in self.images)
        return frozen(role="user", content=(*text, *images))


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
    """What the model wrote where it was not a JSON object; `arguments` is empty then."""
    llm_response_id: str
    thinking: tuple[ThinkingBlock, ...] = ()
    text: str = ""
    """What the model said with its calls; only in the first action of a response."""

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
    """A call that got no result of its own: not run, interrupted, or ended with the process."""

    kind: Literal["agent_error"] = "agent_error"
    tool_call_id: str
    content: str
    may_have_happened: bool = False

    def to_llm_message(self) -> LLMMessage:
        return _tool_message(self.tool_call_id, self.content)


class UserRejectEvent(LLMConvertibleEvent):
    """A call that the user would not have."""

    kind: Literal["user_reject"] = "user_reject"
    tool_call_id: str
    content: str

    def to_llm_message(self) -> LLMMessage:
        return _tool_message(self.tool_call_id, self.content)


class CondensationSummaryEvent(LLMConvertibleEvent):
    """Stands in the view for what a condensation forgot; made by the view, never in a log."""

    kind: Literal["condensation_summary"] = "condensation_summary"
    content: str

    def to_llm_message(self) -> LLMMessage:
        return frozen(role="user", content=self.content)


# --- condensation ------------------------------------------------------------------------------


class CondensationRequestEvent(Event):
    kind: Literal["condensation_request"] = "condensation_request"


class CondensationEvent(Event):
    """Forgets part of the view, and may put a summary in its place."""

    kind: Literal["condensation"] = "condensation"
    forgotten_event_ids: tuple[str, ...]
    summary: str | None = None
    summary_offset: int | None = Field(default=None, ge=0)


# --- turns -------------------------------------------------------------------------------------


class MessageQueuedEvent(Event):
    """A chat message that waits for its turn; the `UserMessageEvent` that follows names it."""

    kind: Literal["message_queued"] = "message_queued"
    message_id: str
    content: str
    images: tuple[ImageContent, ...] = ()
    steers: str | None = None
    """The turn that it joins at the next step, unless that ends first."""
    queued_again: bool = False
    """It had joined a turn that was rolled back, and waits once more."""


class MessageWithdrawnEvent(Event):
    """A queued chat message whose turn was cancelled before it began."""

    kind: Literal["message_withdrawn"] = "message_withdrawn"
    message_id: str


class TurnStartedEvent(Event):
    kind: Literal["turn_started"] = "turn_started"


class StepFinishedEvent(Event):
    """One model call is done, and what it answered is in the log; calls it made may still run."""

    kind: Literal["step_finished"] = "step_finished"
    usage: TokenUsage = TokenUsage()


class TurnEndedEvent(Event):
    kind: Literal["turn_ended"] = "turn_ended"
    outcome: Literal["completed", "interrupted", "failed", "rolled_back"]
    detail: str | None = None


class ConfirmationRequestedEvent(Event):
    kind: Literal["confirmation_requested"] = "confirmation_requested"
    tool_call_ids: tuple[str, ...]


class ConfirmationGivenEvent(Event):
    kind: Literal["confirmation_given"] = "confirmation_given"
    confirmed: bool


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
    seq: int


class UnknownEvent(Event):
    """An event of a kind that this version does not know, kept and passed on as it came."""

    fields: FrozenObject
    """The whole event, `kind` and `id` included; this is what is written again."""

    @model_validator(mode="after")
    def _is_what_came(self) -> Self:
        if (self.fields.get("kind"), self.fields.get("id")) != (self.kind, self.id):
            raise ValueError("the fields of an unknown event carry its own kind and id")
        return self

    @model_serializer
    def _as_it_came(self) -> dict[str, object]:
        return dict(self.fields)


ObservationLikeEvent: TypeAlias = ObservationEvent | AgentErrorEvent | UserRejectEvent
"""What answers a tool call."""

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
)
AnyEvent = Annotated[_KnownEvent, Field(discriminator="kind")]
"""Every kind that this version knows, as pydantic tells them apart."""

RESULT_CLASSES = (ObservationEvent, AgentErrorEvent, UserRejectEvent)
"""`ObservationLikeEvent`, for `isinstance`."""

_BASES = (Event, LLMConvertibleEvent)
_ALWAYS_WRITTEN = frozenset(("id", "timestamp"))
EVENT_CLASSES: dict[str, type[Event]] = {
    event_class.model_fields["kind"].default: event_class for event_class in get_args(_KnownEvent)
}

# `isinstance` against a pydantic class costs 0.2 µs where it fails, a look at the kind 0.05; the
# folds look at every event of every log.
RESULT_KINDS = frozenset(event_class.model_fields["kind"].default for event_class in RESULT_CLASSES)
_SEEN_KINDS = frozenset(
    kind
    for kind, event_class in EVENT_CLASSES.items()
    if issubclass(event_class, LLMConvertibleEvent)
)


def is_seen_by_model(event: Event) -> TypeGuard[LLMConvertibleEvent]:
    """`isinstance(event, LLMConvertibleEvent)`, quickly."""
    return event.kind in _SEEN_KINDS


def encode_event(event: Event) -> bytes:
    """The event as JSON, UTF-8."""
    return event.__pydantic_serializer__.to_json(event)


def decode_event(
    payload: bytes | str, *, kind: str | None = None, upcasters: Upcasters = UPCASTERS
) -> Event:
    """The event that `encode_event` wrote, in this or another version; `ValueError` if none did.

    A caller that knows the kind, as a journal does, saves a look into the payload.
    """
    known = EVENT_CLASSES.get(kind) if kind is not None and kind not in upcasters.kinds else None
    if known is not None:
        return _as_written(known.__pydantic_validator__.validate_json(payload))
    record = from_json(payload)
    if not isinstance(record, dict):
        raise ValueError(  # noqa: TRY004 - the JSON is at fault, as where pydantic refuses it
            f"an event is a JSON object, not a {type(record).__name__}"
        )
    record = upcasters.apply(record)
    known = EVENT_CLASSES.get(str(record.get("kind")))
    if known is not None:
        return _as_written(known.__pydantic_validator__.validate_python(record))
    header = {key: record[key] for key in ("kind", "id", "timestamp", "turn_id") if key in record}
    return _as_written(UnknownEvent.model_validate({**header, "fields": record}))


def _as_written(event: Event) -> Event:
    """The event; `ValueError` where it drew its id or its time here, so had none when written."""
    if not _ALWAYS_WRITTEN.issubset(event.__pydantic_fields_set__):
        raise ValueError("an event without an id or a timestamp")
    return event


def openai_response(actions: Sequence[ActionEvent]) -> LLMMessage:
    """One model response with calls, as the OpenAI chat API has it."""
    calls = tuple(
        frozen(
            id=wire_call_id(action.tool_call_id),
            type="function",
            function=frozen(
                name=wire_tool_name(action.tool_name),
                # Not `malformed_arguments`: some servers parse this. The call's result has said it.
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
    return frozen(role="tool", tool_call_id=wire_call_id(tool_call_id), content=content)
