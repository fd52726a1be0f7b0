"""The script of a recorded chat, for a model that gives the same answers again."""

from __future__ import annotations

from collections.abc import Sequence

from ..models.base import ModelResponse
from ..tool_calls import ToolCall
from .transcripts import RecordedConversation

__all__ = ["recorded_replies"]


def recorded_replies(recorded: RecordedConversation) -> Sequence[ModelResponse]:
    """Return the answers of the model in a recording, from the first exchange to the last."""
    return [
        ModelResponse(
            step.text,
            [ToolCall(c.tool_name, c.arguments, c.provider_call_id) for c in step.calls],
        )
        for exchange in recorded.exchanges
        for step in exchange.steps
    ]
