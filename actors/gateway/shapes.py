"""A transcript or a view as messages, in the shape that a provider or a client takes. Pure."""

from __future__ import annotations

from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias

from ..core.state import Folded
from ..core.transcript import Transcript
from ..core.view import View
from ..journal import READ_BYTES
from ..models.messages import LLMShape, to_llm_messages
from .ag_ui_messages import ag_ui_messages
from .ai_sdk import ui_messages
from .wire import Rename, event_json, sized_json

__all__ = ["Asked", "Shape", "shaped_transcript", "shaped_view"]

Shape: TypeAlias = Literal[
    "events", "openai-chat", "openai-responses", "anthropic", "ai-sdk", "ag-ui"
]

_LLM_SHAPES: dict[Shape, LLMShape] = {
    "openai-chat": "openai",
    "openai-responses": "openai_responses",
    "anthropic": "anthropic",
}


class Asked(NamedTuple):
    """The parts of a model request that shape its messages, besides the view."""

    model: str = ""
    is_plain: bool = False
    show_author: bool = False


def shaped_view(state: Folded, shape: Shape, rename: Rename, asked: Asked) -> dict[str, object]:
    """Return a state's view in this shape. Raises `OpenCalls` while a call has no result."""
    if shape in _LLM_SHAPES:
        return {"seq": state.seq, **_llm_messages(state.view, shape, asked)}
    # A client's shape is for people; for a view it would add nothing to the events.
    return {"seq": state.seq, "messages": [event_json(event, rename) for event in state.view]}


def shaped_transcript(
    transcript: Transcript, shape: Shape, rename: Rename, *, before: int | None, limit: int
) -> dict[str, object]:
    """Return a transcript in this shape; a provider's raises `OpenCalls` if a result is missing."""
    if shape in _LLM_SHAPES:
        return _llm_messages(View.from_events(logged.event for logged in transcript.said), shape)
    if shape == "ai-sdk":
        return {"messages": ui_messages(transcript)}
    if shape == "ag-ui":
        waiting = [logged.event for logged in transcript.waiting]
        messages = ag_ui_messages(transcript, waiting=waiting)
        return {"messages": [each.model_dump(mode="json", by_alias=True) for each in messages]}
    # By seq, as `before` is one: events may have come since a message that still waits.
    everything = sorted([*transcript.said, *transcript.waiting], key=attrgetter("seq"))
    page = [logged for logged in everything if before is None or logged.seq < before]
    rows: list[dict[str, object]] = []
    held = 0
    for logged in reversed(page):
        if len(rows) == limit or held >= READ_BYTES:
            break
        value, size = sized_json(logged, rename)
        rows.append(value)
        held += size
    return {"messages": rows[::-1], "has_more": len(page) > len(rows)}


def _llm_messages(view: View, shape: Shape, asked: Asked = Asked()) -> dict[str, object]:
    messages = to_llm_messages(view, _LLM_SHAPES[shape], **asked._asdict())
    return {"system": messages.system, "messages": list(messages)}
