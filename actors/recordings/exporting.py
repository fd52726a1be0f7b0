"""Exports conversations for other programs: chat messages, answers, calls and results. Pure.

These are left out: events that were retracted or rolled back, calls without a result yet,
reminders, and events that are not part of the chat, such as turns and condensations. To keep
everything, use `turnkeeper export` without `--to`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from turnkeeper.runtime import InvariantViolation

from ..core.transcript import Transcript
from ..events import (
    RESULT_CLASSES,
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    Event,
    LoggedEvent,
    ObservationEvent,
    SystemPromptEvent,
    UserMessageEvent,
    UserRejectEvent,
)
from ..values.type_names import a_name

__all__ = ["openai_line", "openhands_files"]

_OPENHANDS_ID = re.compile(r"[0-9a-fA-F\-]{8,}")


def openai_line(conversation_id: str, log: Sequence[LoggedEvent]) -> str:
    """Return a conversation as a line of JSON, with its messages in the OpenAI chat format."""
    system, said = _said(log)
    call_ids = _call_ids(said)
    messages: list[Mapping[str, object]] = []
    if system is not None:
        messages.append({"role": "system", "content": system.content})
    calls: list[object] = []
    response = ""
    for event in said:
        if isinstance(event, ActionEvent):
            if response != event.llm_response_id:
                calls = []
                content = event.text or None
                messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            calls.append(_openai_call(event, call_ids[event.tool_call_id]))
            response = event.llm_response_id
            continue
        response = ""
        if isinstance(event, RESULT_CLASSES):
            call_id = call_ids[event.tool_call_id]
            messages.append({"role": "tool", "tool_call_id": call_id, "content": event.content})
        elif isinstance(event, UserMessageEvent | AgentMessageEvent):
            messages.append(event.to_llm_message())
    return _json({"id": conversation_id, "messages": messages}) + "\n"


def openhands_files(conversation_id: str, log: Sequence[LoggedEvent]) -> Mapping[str, str]:
    """Return the event files of a conversation, by their places in the folder of all.

    The folder is named by a digest of the conversation's id, in the form of OpenHands' own names.
    """
    system, said = _said(log)
    call_ids = _call_ids(said)
    actions = {event.tool_call_id: event for event in said if isinstance(event, ActionEvent)}
    events: list[Event] = [*said] if system is None else [system, *said]
    folder = _hex(conversation_id)
    files: dict[str, str] = {}
    parent: str | None = None
    for number, event in enumerate(events):
        event_id = _openhands_id(event.id)
        fields: dict[str, object] = {
            "id": event_id,
            "timestamp": event.timestamp.replace(tzinfo=None).isoformat(),
            "parent_id": parent,
            **_openhands_fields(event, call_ids, actions),
        }
        files[f"{folder}/events/event-{number:05d}-{event_id}.json"] = _json(fields)
        parent = event_id
    return files


def _said(log: Sequence[LoggedEvent]) -> tuple[SystemPromptEvent | None, Sequence[Event]]:
    """Return the newest system prompt and the events of the chat, without open calls."""
    transcript = Transcript.of(log)
    prompts = [event for _, event in transcript.kept if isinstance(event, SystemPromptEvent)]
    said = [event for _, event in transcript.said]
    answered = {event.tool_call_id for event in said if isinstance(event, RESULT_CLASSES)}
    return prompts[-1] if prompts else None, [
        event
        for event in said
        if not isinstance(event, ActionEvent) or event.tool_call_id in answered
    ]


def _call_ids(said: Sequence[Event]) -> Mapping[str, str]:
    """Return the provider's id of each call, by its id in the log."""
    return {
        event.tool_call_id: event.provider_call_id or event.tool_call_id
        for event in said
        if isinstance(event, ActionEvent)
    }


def _openai_call(event: ActionEvent, call_id: str) -> Mapping[str, object]:
    function = {"name": event.tool_name, "arguments": _json(event.arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _openhands_fields(
    event: Event, call_ids: Mapping[str, str], actions: Mapping[str, ActionEvent]
) -> Mapping[str, object]:
    """Return the fields that depend on the event's kind."""
    match event:
        case SystemPromptEvent():
            prompt = _openhands_text(event.content)
            return {
                "kind": "SystemPromptEvent",
                "source": "agent",
                "system_prompt": prompt,
                "tools": [],
            }
        case UserMessageEvent():
            urls = [image.url for image in event.images]
            images = [{"type": "image", "image_urls": urls}] if urls else []
            content = [_openhands_text(event.content), *images]
            return _openhands_message("user", content)
        case AgentMessageEvent():
            return _openhands_message("assistant", [_openhands_text(event.content)])
        case ActionEvent():
            call_id = call_ids[event.tool_call_id]
            call = {
                "id": call_id,
                "name": event.tool_name,
                "arguments": _json(event.arguments),
                "origin": "completion",
            }
            return {
                "kind": "ActionEvent",
                "source": "agent",
                "thought": [_openhands_text(event.text)] if event.text else [],
                "action": None,
                "tool_name": event.tool_name,
                "tool_call_id": call_id,
                "tool_call": call,
                "llm_response_id": _openhands_id(event.llm_response_id),
            }
        case ObservationEvent() | AgentErrorEvent() | UserRejectEvent():
            action = actions[event.tool_call_id]
            return {
                "tool_name": action.tool_name,
                "tool_call_id": call_ids[event.tool_call_id],
                **_openhands_result(event, action),
            }
        case _:
            raise InvariantViolation(
                f"event {event.id} is {a_name(event.kind)}, which an export for OpenHands leaves "
                "out; nothing was exported"
            )


def _openhands_result(
    event: ObservationEvent | AgentErrorEvent | UserRejectEvent, action: ActionEvent
) -> Mapping[str, object]:
    match event:
        case AgentErrorEvent():
            return {"kind": "AgentErrorEvent", "source": "agent", "error": event.content}
        case UserRejectEvent():
            return {
                "kind": "UserRejectObservation",
                "source": "environment",
                "rejection_reason": event.content,
                "action_id": _openhands_id(action.id),
            }
        case ObservationEvent():
            # The only kind of result there that is of any tool.
            observation = {
                "kind": "MCPToolObservation",
                "tool_name": action.tool_name,
                "content": [_openhands_text(event.content)],
                "is_error": event.is_error,
            }
            return {
                "kind": "ObservationEvent",
                "source": "environment",
                "observation": observation,
                "action_id": _openhands_id(action.id),
            }


def _openhands_message(role: str, content: Sequence[object]) -> Mapping[str, object]:
    source = "user" if role == "user" else "agent"
    message = {"role": role, "content": content}
    return {"kind": "MessageEvent", "source": source, "llm_message": message}


def _openhands_text(text: str) -> Mapping[str, object]:
    return {"type": "text", "text": text}


def _openhands_id(event_id: str) -> str:
    """Return the id if OpenHands can use it for an event, else a digest of it."""
    return event_id if _OPENHANDS_ID.fullmatch(event_id) else _hex(event_id)


def _hex(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
