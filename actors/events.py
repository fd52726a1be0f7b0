"""The events of a conversation: immutable facts, one pydantic model per kind.

A log is a sequence of these. They are frozen all the way down, carry a time-ordered id and a UTC
timestamp, and survive a round trip through JSON exactly. A kind from a newer version is kept as
an `UnknownEvent` and passed on as it came, never dropped.

Ids: an event draws its own id and timestamp only where a caller makes it by hand. What the
conversation actor decides carries the id and the time of the command that led to it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from turnkeeper.runtime import Ports

from ._frozen import FrozenJson, FrozenObject

_ports = Ports()


def _now() -> datetime:
    return datetime.fromtimestamp(_ports.now(), UTC)


class Value(BaseModel):
    """A part of an event: frozen, and no stranger to unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ImageContent(Value):
    """An image that came with a chat message, by URL (a `data:` URL holds the image itself)."""

    url: str


class ThinkingBlock(Value):
    """What a model thought before it answered, as the provider wants it back."""

    thinking: str
    signature: str | None = None


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

    id: str = Field(default_factory=_ports.ids.new, min_length=1)
    timestamp: AwareDatetime = Field(default_factory=_now)
    turn_id: str | None = None


class LLMConvertibleEvent(Event):
    """An event that the model sees."""


# --- seen by the model -------------------------------------------------------------------------


class SystemPromptEvent(LLMConvertibleEvent):
    kind: Literal["system_prompt"] = "system_prompt"
    content: str


class UserMessageEvent(LLMConvertibleEvent):
    """A chat message by a user. `queued_event_id` names the event that kept it while it waited."""

    kind: Literal["user_message"] = "user_message"
    content: str
    images: tuple[ImageContent, ...] = ()
    message_id: str | None = None
    queued_event_id: str | None = None


class AgentMessageEvent(LLMConvertibleEvent):
    """A chat message by the agent; `interrupted` when it was cut off while being written."""

    kind: Literal["agent_message"] = "agent_message"
    content: str
    thinking: tuple[ThinkingBlock, ...] = ()
    llm_response_id: str | None = None
    interrupted: bool = False


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


class ObservationEvent(LLMConvertibleEvent):
    """The result of a tool call."""

    kind: Literal["observation"] = "observation"
    tool_call_id: str
    content: str
    is_error: bool = False


class AgentErrorEvent(LLMConvertibleEvent):
    """A call that got no result of its own: not run, interrupted, or ended with the process."""

    kind: Literal["agent_error"] = "agent_error"
    tool_call_id: str
    content: str
    may_have_happened: bool = False


class UserRejectEvent(LLMConvertibleEvent):
    """A call that the user would not have."""

    kind: Literal["user_reject"] = "user_reject"
    tool_call_id: str
    content: str


class CondensationSummaryEvent(LLMConvertibleEvent):
    """Stands in the view for what a condensation forgot; made by the view, never in a log."""

    kind: Literal["condensation_summary"] = "condensation_summary"
    content: str


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


class MessageWithdrawnEvent(Event):
    """A queued chat message whose turn was cancelled before it began."""

    kind: Literal["message_withdrawn"] = "message_withdrawn"
    message_id: str


class TurnStartedEvent(Event):
    kind: Literal["turn_started"] = "turn_started"


class StepFinishedEvent(Event):
    """One model call with the tool calls it made is done."""

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
    """An event of a kind that this version does not know, kept as it came."""

    kind: str
    fields: FrozenJson


AnyEvent = Annotated[
    SystemPromptEvent | UserMessageEvent | AgentMessageEvent | ActionEvent | ObservationEvent
    | AgentErrorEvent | UserRejectEvent | CondensationRequestEvent | CondensationEvent
    | MessageQueuedEvent | MessageWithdrawnEvent | TurnStartedEvent | StepFinishedEvent
    | TurnEndedEvent | ConfirmationRequestedEvent | ConfirmationGivenEvent | PausedEvent
    | ResumedEvent | StatusChangedEvent | TaskListUpdatedEvent | ConversationErrorEvent
    | RetractionEvent | ForkedFromEvent,
    Field(discriminator="kind"),
]
