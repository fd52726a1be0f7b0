"""Converts values of pydantic-ai to log events, and log events to messages of pydantic-ai.

This module owns both directions of one mapping: `to_model_messages` reads what `tool_call`,
`kept_whole` and `content_of` write. A response with only texts and calls is rebuilt from the events
that show it. Any other response (thinking, tools of the provider, signatures) is kept whole, as
JSON, in a block of its first event that is marked with `MADE_BY`; files that a model made are left
out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import ValidationError
from pydantic_ai import ModelRetry, ToolReturn
from pydantic_ai.exceptions import ToolFailed, ToolFailedError, ToolRetryError
from pydantic_ai.messages import (
    BinaryContent,
    CachePoint,
    DocumentUrl,
    FilePart,
    ImageUrl,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    ModelResponsePart,
    RetryFeedbackPart,
    SystemPromptPart,
    TextContent,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_core import to_json

from ..core.view import View
from ..errors import InvalidInput
from ..events import (
    RESULT_CLASSES,
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationSummaryEvent,
    ObservationEvent,
    ObservationLikeEvent,
    SystemPromptEvent,
    ThinkingBlock,
    UserMessageEvent,
    UserRejectEvent,
)
from ..models.base import ToolSpec
from ..tool_calls import ToolCall
from ..values.frozen import FrozenObject

MADE_BY = "pydantic_ai"
"""Marks the block of an event that holds a response of pydantic-ai, as JSON."""


def tool_call(part: ToolCallPart) -> ToolCall:
    try:
        arguments = part.args_as_dict(raise_if_invalid=True)
    except (ValueError, AssertionError):
        return ToolCall(
            part.tool_name,
            provider_call_id=part.tool_call_id,
            malformed_arguments=str(part.args),
        )
    return ToolCall(part.tool_name, arguments, provider_call_id=part.tool_call_id)


def specs_of(parameters: ModelRequestParameters) -> Sequence[ToolSpec]:
    """Describe the tools of a request, for their digest in the log."""
    specs = []
    for tool in (*parameters.function_tools, *parameters.output_tools):
        try:
            schema = FrozenObject(tool.parameters_json_schema)
            specs.append(ToolSpec(tool.name, tool.description or "", schema))
        except (InvalidInput, ValueError):
            continue
    return specs


def content_of(tool_name: str, value: object) -> str:
    """Return a tool's value as the text that the model is shown; files are only mentioned."""
    if isinstance(value, ToolReturn):
        value = value.return_value
    part = ToolReturnPart(tool_name, value)
    return "\n".join([part.model_response_str(), *map(described, part.files)]).strip("\n")


def described(content: UserContent) -> str:
    """Return a text unchanged, and for a file a text that mentions it."""
    match content:
        case str():
            return content
        case TextContent():
            return content.content
        case CachePoint():
            return ""
        case _:
            return f"[a file that is not kept: {content.media_type}]"


def text_of(part: ToolReturnPart | RetryFeedbackPart) -> str:
    """Return the text that a part of a request gives the model, without the API's own tags."""
    if isinstance(part, ToolReturnPart):
        return part.model_response_str(wrap_if_error=False)
    content = part.content
    return content if isinstance(content, str) else to_json(content, fallback=str).decode()


def told_by(error: ToolRetryError | ToolFailedError | ModelRetry | ToolFailed) -> str:
    """Return the text that the model gets for a tool's error."""
    match error:
        case ToolRetryError():
            return text_of(error.tool_retry)
        case ToolFailedError():
            return text_of(error.tool_failed)
        case ModelRetry() | ToolFailed():
            return error.message


def kept_whole(response: ModelResponse, outputs: Collection[str]) -> tuple[ThinkingBlock, ...]:
    """Return a block with the whole response if it has more than texts and calls; else None."""
    parts = [
        part
        for part in response.parts
        if not isinstance(part, FilePart)
        and not (isinstance(part, ToolCallPart) and part.tool_name in outputs)
    ]
    if all(_is_plain(part) for part in parts):
        return ()
    thought = (part.content for part in parts if isinstance(part, ThinkingPart) and part.content)
    whole = ModelMessagesTypeAdapter.dump_json([replace(response, parts=parts)])
    return (
        ThinkingBlock(thinking="\n".join(thought), redacted_data=whole.decode(), made_by=MADE_BY),
    )


def _is_plain(part: ModelResponsePart) -> bool:
    """True if the log's ordinary events hold everything in this part."""
    return isinstance(part, TextPart | ToolCallPart) and not (part.id or part.provider_details)


def to_model_messages(view: View) -> list[ModelMessage]:
    """Return the history for a run of the agent.

    If calls are open, the history ends with their response. The run then answers all its calls,
    using the results that are in the log already.
    """
    messages: list[ModelMessage] = []
    calls: dict[str, ToolCallPart] = {}
    newest: tuple[str, list[ModelResponsePart]] = "", []
    end = 0
    for event in view:
        match event:
            case SystemPromptEvent():
                messages.append(ModelRequest([SystemPromptPart(event.content)]))
            case UserMessageEvent():
                messages.append(ModelRequest([UserPromptPart(_prompt(event))]))
            case CondensationSummaryEvent():
                messages.append(ModelRequest([UserPromptPart(event.content)]))
            case AgentMessageEvent() if event.content or event.thinking:
                messages.append(_answer(event))
            case ActionEvent():
                call = _call_part(event)
                calls[event.tool_call_id] = call
                if newest[0] != event.llm_response_id:
                    response = _whole(event.thinking) or ModelResponse(
                        [TextPart(event.text)] if event.text else []
                    )
                    newest = event.llm_response_id, list(response.parts)
                    messages.append(replace(response, parts=newest[1]))
                    end = len(messages)
                if all(
                    not isinstance(part, ToolCallPart) or part.tool_call_id != call.tool_call_id
                    for part in newest[1]
                ):
                    newest[1].append(call)
            case ObservationEvent() | AgentErrorEvent() | UserRejectEvent():
                if event.tool_call_id in calls:
                    messages.append(ModelRequest([_return(event, calls[event.tool_call_id])]))
            case _:
                pass
    return messages[:end] if view.has_open_calls else messages


def newest_calls(view: View) -> dict[str, ActionEvent]:
    """Return the calls of the newest response in a view, by their ids from the model."""
    found: list[ActionEvent] = []
    for event in reversed(view):
        if isinstance(event, ActionEvent):
            if found and event.llm_response_id != found[-1].llm_response_id:
                break
            found.append(event)
        elif not isinstance(event, RESULT_CLASSES):
            break
    return {_call_part(action).tool_call_id: action for action in reversed(found)}


def _call_part(action: ActionEvent) -> ToolCallPart:
    arguments = action.malformed_arguments or json.dumps(action.arguments)
    return ToolCallPart(action.tool_name, arguments, action.provider_call_id or action.tool_call_id)


def _return(event: ObservationLikeEvent, call: ToolCallPart) -> ToolReturnPart:
    outcome: Literal["success", "failed", "denied", "interrupted"]
    match event:
        case UserRejectEvent():
            outcome = "denied"
        case AgentErrorEvent():
            outcome = "interrupted"
        case ObservationEvent():
            outcome = "failed" if event.is_error else "success"
    return ToolReturnPart(call.tool_name, event.content, call.tool_call_id, outcome=outcome)


def _answer(event: AgentMessageEvent) -> ModelResponse:
    """Return an answer as a response with the text of the chat message, whatever the output was."""
    whole = _whole(event.thinking)
    if whole is None:
        return ModelResponse([TextPart(event.content)])
    if whole.text == event.content:
        return whole
    others = [part for part in whole.parts if not isinstance(part, TextPart)]
    return replace(whole, parts=[*others, TextPart(event.content)])


def _whole(thinking: Sequence[ThinkingBlock]) -> ModelResponse | None:
    """Return the response that the log keeps whole; None if it keeps none."""
    for block in thinking:
        if block.made_by == MADE_BY and block.redacted_data is not None:
            try:
                (response,) = ModelMessagesTypeAdapter.validate_json(block.redacted_data)
            except (ValidationError, ValueError):
                return None  # written by another version; the events have its texts and calls
            return response if isinstance(response, ModelResponse) else None
    return None


def _prompt(event: UserMessageEvent) -> str | list[UserContent]:
    if not (event.images or event.files):
        return event.content
    contents: list[UserContent] = [event.content] if event.content else []
    for image in event.images:
        is_data = image.url.startswith("data:")
        contents.append(BinaryContent.from_data_uri(image.url) if is_data else ImageUrl(image.url))
    for file in event.files:
        if file.content is not None:
            contents.append(BinaryContent(file.content, media_type=file.media_type))
        elif file.url is not None:
            contents.append(DocumentUrl(file.url, media_type=file.media_type))
    return contents
