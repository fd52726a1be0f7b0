"""Condensers: they are given a view and propose what to forget; the owner decides.

A condenser runs as an effect beside the owner, so the log grows while it works. What it proposes
is held against the view as it is when it returns (`check_proposal`), and applied or refused.

A need is *soft* where the view is only longer than it should be: a turn goes on without. It is
*hard* where a condensation was asked for, or the view is too large for the model: the turn waits.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from ._text import storable
from .errors import InvalidInput
from .events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationSummaryEvent,
    LLMConvertibleEvent,
    ObservationEvent,
    SystemPromptEvent,
    UserMessageEvent,
    UserRejectEvent,
)
from .view import View

__all__ = [
    "CondensationPlan",
    "Condenser",
    "Need",
    "NoCondenser",
    "PipelineCondenser",
    "Proposal",
    "RollingCondenser",
    "Summarize",
    "SummarizingCondenser",
    "check_proposal",
    "estimate_tokens",
]

Need: TypeAlias = Literal["soft", "hard"]

Summarize: TypeAlias = Callable[[str], Awaitable[str]]
"""Asks a model for a summary of the history that it is given as text."""

CountTokens: TypeAlias = Callable[[LLMConvertibleEvent], int]

RESET_TRIES_MAX = 5
RESET_TEXT_FACTOR = 0.8
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a condenser would forget, and the text it would put in its place."""

    forgotten_event_ids: tuple[str, ...]
    summary: str | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(event_id, str) for event_id in self.forgotten_event_ids):
            raise InvalidInput("a proposal forgets events by their ids, which are str")
        if self.summary is not None:
            # What a model wrote: mended, not refused.
            object.__setattr__(self, "summary", storable(self.summary))


@dataclass(frozen=True, slots=True)
class CondensationPlan:
    """A proposal that holds, with the place of its summary."""

    forgotten_event_ids: tuple[str, ...]
    summary: str | None
    summary_offset: int | None


class Condenser(Protocol):
    """Keeps a view from growing without end."""

    def need(self, view: View) -> Need | None:
        """Whether this view should be condensed. Pure and cheap: asked after every commit."""

    async def propose(self, view: View, need: Need) -> Proposal | None:
        """What to forget; None: nothing can be. Runs beside the owner and may await a model."""


def check_proposal(proposal: Proposal, shown: View, now: View) -> CondensationPlan | str:
    """The plan that the owner may carry out now, or the reason why the proposal does not hold.

    What it would forget must be one run without gaps in the view, with a manipulation index at
    both ends, and nothing that the condenser was shown may have left the view since.
    """
    forgotten = frozenset(proposal.forgotten_event_ids)
    if not forgotten:
        return "it forgets nothing"
    if not now.is_continuation_of(shown):
        left = {event.id for event in shown}.difference(event.id for event in now)
        if left:
            return f"{len(left)} events that it was shown have left the view"
    places = [at for at, event in enumerate(now) if event.id in forgotten]
    if len(places) != len(forgotten):
        return f"{len(forgotten) - len(places)} events that it forgets are not in the view"
    start, end = places[0], places[-1] + 1
    if end - start != len(places):
        return "what it forgets has gaps"
    for cut in (start, end):
        if cut not in now.manipulation_indices:
            return f"a cut at {cut} would tear what belongs together"
    ids = tuple(event.id for event in now[start:end])
    return CondensationPlan(ids, proposal.summary, None if proposal.summary is None else start)


@dataclass(frozen=True, slots=True)
class NoCondenser:
    """Keeps all."""

    def need(self, view: View) -> Need | None:  # noqa: ARG002 - the protocol's
        return None

    async def propose(self, view: View, need: Need) -> Proposal | None:  # noqa: ARG002 - the protocol's
        return None


def estimate_tokens(event: LLMConvertibleEvent) -> int:
    """A guess that needs no tokenizer: four characters a token."""
    return len(_text(event)) // _CHARACTERS_PER_TOKEN + 1


class _TokenTotals:
    """The tokens of the first n events of a view, for every n: a derivation."""

    def __init__(self, count_tokens: CountTokens) -> None:
        self._count_tokens = count_tokens
        self._totals = [0]
        self.length = 0

    def fold(self, event: LLMConvertibleEvent) -> None:
        self._totals.append(self._totals[-1] + self._count_tokens(event))
        self.length += 1

    def result(self) -> Sequence[int]:
        # Only ever appended to, and read up to the length of the view that asked.
        return self._totals


@dataclass(frozen=True, slots=True)
class RollingCondenser:
    """Keeps the first events and the newest, and forgets the middle.

    There is a need where a condensation was asked for (hard), the view has more than `max_tokens`
    (hard), or more than `max_size` events (soft). About half the limit is kept. A cut that would
    forget less than `minimum_progress` of the view is not worth a condensation; where the need is
    hard, it is taken all the same.
    """

    max_size: int = 240
    keep_first: int = 2
    max_tokens: int | None = None
    minimum_progress: float = 0.1
    count_tokens: CountTokens = estimate_tokens

    def __post_init__(self) -> None:
        if self.keep_first < 0:
            raise ValueError(f"keep_first must not be negative, and is {self.keep_first}")
        if self.keep_first >= self.max_size // 2 - 1:
            raise ValueError(
                f"keep_first must be less than max_size // 2 - 1, which is "
                f"{self.max_size // 2 - 1}, and is {self.keep_first}"
            )

    def need(self, view: View) -> Need | None:
        if view.unhandled_condensation_request or self._is_over_tokens(view):
            return "hard"
        return "soft" if len(view) > self.max_size else None

    async def propose(self, view: View, need: Need) -> Proposal | None:
        forgotten = self.find_middle(view)
        if not forgotten or (need == "soft" and not self.is_progress(forgotten, view)):
            return None
        return Proposal(tuple(event.id for event in forgotten))

    def find_middle(self, view: View) -> Sequence[LLMConvertibleEvent]:
        """What the limits ask to forget; empty where there is no legal cut, or no need."""
        start = view.find_next(self.keep_first)
        end = view.find_next(len(view) - self._tail_length(view))
        return () if start is None or end is None else view[start:end]

    def is_progress(self, forgotten: Sequence[LLMConvertibleEvent], view: View) -> bool:
        """Whether forgetting this is worth a condensation."""
        return len(forgotten) >= max(1, self.minimum_progress * len(view))

    def _tail_length(self, view: View) -> int:
        """How many of the newest events to keep; the smallest of what each reason asks for."""
        lengths = [len(view)]
        if view.unhandled_condensation_request:
            lengths.append(len(view) // 2 - self.keep_first - 1)
        if len(view) > self.max_size:
            lengths.append(self.max_size // 2 - self.keep_first - 1)
        if self.max_tokens is not None and self._is_over_tokens(view):
            totals = self._totals(view)
            head = min(self.keep_first, len(view))
            room = self.max_tokens // 2 - totals[head]
            fits = bisect_left(totals, totals[len(view)] - room, head, len(view))
            lengths.append(len(view) - fits)
        return min(lengths)

    def _is_over_tokens(self, view: View) -> bool:
        return self.max_tokens is not None and self._totals(view)[len(view)] > self.max_tokens

    def _totals(self, view: View) -> Sequence[int]:
        count_tokens = self.count_tokens
        return view.derive(("tokens", count_tokens), lambda: _TokenTotals(count_tokens))


@dataclass(frozen=True, slots=True)
class SummarizingCondenser:
    """Forgets what a `RollingCondenser` would, and puts a model's summary in its place.

    Where the need is hard and no cut makes progress, it resets: the whole view but its system
    prompt is summarised, with each event's text cut shorter after each try that fails.
    """

    summarize: Summarize
    rolling: RollingCondenser = RollingCondenser()

    def need(self, view: View) -> Need | None:
        return self.rolling.need(view)

    async def propose(self, view: View, need: Need) -> Proposal | None:
        forgotten = self.rolling.find_middle(view)
        if forgotten and self.rolling.is_progress(forgotten, view):
            summary = await self._summarize(forgotten, 1.0)
            return Proposal(tuple(event.id for event in forgotten), summary)
        return await self._reset(view) if need == "hard" else None

    async def _reset(self, view: View) -> Proposal | None:
        prompts = 0
        while prompts < len(view) and isinstance(view[prompts], SystemPromptEvent):
            prompts += 1
        start = view.find_next(prompts)
        if start is None:
            return None
        forgotten = view[start : view.manipulation_indices[-1]]
        if not forgotten:
            return None
        factor = 1.0
        for tries_left in reversed(range(RESET_TRIES_MAX)):
            try:
                summary = await self._summarize(forgotten, factor)
            except Exception:
                if not tries_left:
                    raise
                factor *= RESET_TEXT_FACTOR
            else:
                return Proposal(tuple(event.id for event in forgotten), summary)
        return None

    async def _summarize(self, events: Sequence[LLMConvertibleEvent], factor: float) -> str:
        texts = (_text(event) for event in events)
        history = "\n".join(text[: max(1, int(len(text) * factor))] for text in texts)
        summary = await self.summarize(history)
        if not summary.strip():
            raise ValueError("the summary is empty")
        return summary


class PipelineCondenser:
    """Several condensers; the first one that has a need and a proposal is followed."""

    def __init__(self, *condensers: Condenser) -> None:
        self.condensers = condensers

    def need(self, view: View) -> Need | None:
        needs = {condenser.need(view) for condenser in self.condensers}
        return "hard" if "hard" in needs else "soft" if "soft" in needs else None

    async def propose(self, view: View, need: Need) -> Proposal | None:  # noqa: ARG002 - the protocol's
        for condenser in self.condensers:
            # Soft for the one and hard for the other: each is told its own, where it has one.
            own_need = condenser.need(view)
            if own_need is not None:
                proposal = await condenser.propose(view, own_need)
                if proposal is not None:
                    return proposal
        return None


def _text(event: LLMConvertibleEvent) -> str:
    """An event as a line of a summariser's history."""
    match event:
        case SystemPromptEvent(content=content):
            return f"system: {content}"
        case UserMessageEvent(content=content, images=images):
            return f"user: {content}" + " [image]" * len(images)
        case AgentMessageEvent(content=content):
            return f"assistant: {content}"
        case ActionEvent(tool_name=tool_name, arguments=arguments, text=text):
            said = f"assistant: {text}\n" if text else ""
            return f"{said}assistant called {tool_name}({json.dumps(arguments)})"
        case ObservationEvent() | AgentErrorEvent() | UserRejectEvent():
            return f"result: {event.content}"
        case CondensationSummaryEvent(content=content):
            return f"summary of what came before: {content}"
        case _:
            return f"{event.kind}"
