"""A transcript or a view as messages, in the shape that a provider or a client takes. Pure.

A long one takes a while, so its messages are made in slices; those that are iterators are made when
they are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import merge
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias

from ..core.snapshots import SLICE_EVENTS, Slices
from ..core.state import Folded
from ..core.transcript import Transcript
from ..core.view import View, ViewFold
from ..events import LoggedEvent
from ..journal import READ_BYTES
from ..models.messages import LLMShape, making_llm_messages
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


def shaped_view(
    state: Folded, shape: Shape, rename: Rename, asked: Asked
) -> Slices[dict[str, object]]:
    """Return a state's view in this shape. Raises `OpenCalls` while a call has no result."""
    seq, view = state.seq, state.view
    if shape in _LLM_SHAPES:
        return {"seq": seq, **(yield from _llm_messages(view, shape, asked))}
    # A client's shape is for people; for a view it would add nothing to the events.
    return {"seq": seq, "messages": (event_json(event, rename) for event in view)}


def shaped_transcript(
    transcript: Transcript, shape: Shape, rename: Rename, *, before: int | None, limit: int
) -> Slices[dict[str, object]]:
    """Return a transcript in this shape; a provider's raises `OpenCalls` if a result is missing."""
    if shape == "ai-sdk":
        return {"messages": iter((yield from ui_messages(transcript)))}
    if shape == "ag-ui":
        waiting = [logged.event for logged in transcript.waiting]
        messages = yield from ag_ui_messages(transcript, waiting=waiting)
        return {"messages": (each.model_dump(mode="json", by_alias=True) for each in messages)}
    said = yield from transcript.finding_said()
    if shape in _LLM_SHAPES:
        view = yield from _view_of(said)
        return (yield from _llm_messages(view, shape))
    # By seq, as `before` is one: events may have come since a message that still waits.
    by_seq = attrgetter("seq")
    waits = sorted(transcript.waiting, key=by_seq, reverse=True)
    rows: list[dict[str, object]] = []
    held, has_more = 0, False
    for logged in merge(reversed(said), waits, key=by_seq, reverse=True):
        if before is not None and logged.seq >= before:
            continue
        if len(rows) == limit or held >= READ_BYTES:
            has_more = True
            break
        value, size = sized_json(logged, rename)
        rows.append(value)
        held += size
        if len(rows) % SLICE_EVENTS == 0:
            yield
    return {"messages": reversed(rows), "has_more": has_more}


def _view_of(said: Sequence[LoggedEvent]) -> Slices[View]:
    """Return the view of these events, as `View.from_events` does."""
    fold = ViewFold()
    fold.watches = True
    for count, logged in enumerate(said, 1):
        fold.fold(logged.event)
        if count % SLICE_EVENTS == 0:
            yield
    if fold.is_suspect:  # rare, as admission lets no such event through
        return View.from_events(logged.event for logged in said)
    return fold.snapshot()


def _llm_messages(view: View, shape: Shape, asked: Asked = Asked()) -> Slices[dict[str, object]]:
    messages = yield from making_llm_messages(view, _LLM_SHAPES[shape], **asked._asdict())
    return {"system": messages.system, "messages": iter(messages)}
