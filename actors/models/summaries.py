"""A condenser that asks a model for its summaries.

    condenser = summarizing_condenser(model, window_tokens=200_000)

A model's API does not say how much the model can read, so you give its window in tokens. The view
is condensed when it fills an estimated three quarters of the window, which leaves room for tools
and an answer. The model that summarises may be smaller than the agent's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.condensation import RollingCondenser, SummarizingCondenser
from ..core.view import View
from ..errors import InvalidInput
from ..events import SystemPromptEvent, UserMessageEvent
from ..values.text import check_number
from .base import Model, ModelRequest

__all__ = ["SUMMARY_PROMPT", "ModelSummary", "summarizing_condenser"]

SUMMARY_PROMPT = (
    "You condense the history of a conversation between a user and an assistant that uses tools. "
    "Keep what the assistant needs to go on: what the user wants, what was decided, what was done "
    "with which result, names, numbers and identifiers, and what is still open. Leave out what no "
    "longer matters. Write in the language of the conversation, and nothing but the summary."
)
WINDOW_SHARE = 0.75
WINDOW_TOKENS_MIN = 1_000


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """Asks a model to summarise a history. Makes one attempt; the model's errors pass through."""

    model: Model
    prompt: str = SUMMARY_PROMPT

    async def __call__(self, history: str) -> str:
        view = View.from_events(
            [SystemPromptEvent(content=self.prompt), UserMessageEvent(content=history)]
        )
        response = await self.model.respond(ModelRequest(view), _drop)
        return response.text


async def _drop(piece: str) -> None:
    """Ignore a piece of a summary: only the whole summary counts."""


def summarizing_condenser(
    model: Model,
    *,
    window_tokens: int,
    prompt: str = SUMMARY_PROMPT,
    keep_first: int = 2,
) -> SummarizingCondenser:
    """Return a condenser that asks a model for summaries, with limits from the agent's window.

    `window_tokens`: how many tokens the agent's model can read. `prompt`: says what a summary
    keeps. `keep_first`: how many of the first events are never forgotten. Raises `InvalidInput`.
    """
    allowed = f"a whole number from {WINDOW_TOKENS_MIN} on"
    check_number("window_tokens", window_tokens, allowed, least=WINDOW_TOKENS_MIN, is_whole=True)
    if not prompt.strip():
        raise InvalidInput("the prompt is blank; it must say what a summary keeps")
    limits = RollingCondenser(max_tokens=int(window_tokens * WINDOW_SHARE), keep_first=keep_first)
    return SummarizingCondenser(ModelSummary(model, prompt), limits)
