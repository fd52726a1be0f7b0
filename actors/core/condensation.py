"""Condensers: each is given a view and proposes events to forget; the owner decides.

A condenser runs as an effect beside the owner, so the log grows while it works. The owner checks
its proposal against the view at the time when it returns (`check_proposal`), and applies it or
refuses it.

A need is *soft* if the view is only longer than it should be: a turn does not wait for it. It is
*hard* if a condensation was requested, or the view is too large for the model: the turn waits.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from ..errors import InvalidInput
from ..events import (
    RESULT_CLASSES,
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
from ..values.text import check_number, storable
from .view import SHORTENED_MARKER, View

__all__ = [
    "CondensationPlan",
    "Condenser",
    "Need",
    "PipelineCondenser",
    "Proposal",
    "RollingCondenser",
    "Summarize",
    "SummarizingCondenser",
    "check_proposal",
    "estimate_tokens",
    "find_runs",
    "make_room",
]

Need: TypeAlias = Literal["soft", "hard"]

Summarize: TypeAlias = Callable[[str], Awaitable[str]]
"""Takes a history as text and returns a summary of it, usually by a model."""

CountTokens: TypeAlias = Callable[[LLMConvertibleEvent], int]

SHORTENED_LENGTH = 200
"""At least this many characters of a shortened result are kept."""
RESUMMARY_SHARE = 0.9
"""The summary of a summary is shorter if it has less than this share of its characters."""
RESET_TRIES_MAX = 5
RESET_TEXT_FACTOR = 0.8
_CHARACTERS_PER_TOKEN = 4
_BEFORE_SUMMARY = "summary of what came before: "


@dataclass(frozen=True, slots=True)
class Proposal:
    """The events that a condenser wants to forget, and the text to put in their place."""

    forgotten_event_ids: tuple[str, ...]
    summary: str | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(event_id, str) for event_id in self.forgotten_event_ids):
            raise InvalidInput("a proposal forgets events by their ids, which are str")
        if self.summary is not None:
            # A model wrote it, so it is mended and not refused.
            object.__setattr__(self, "summary", storable(self.summary))


@dataclass(frozen=True, slots=True)
class CondensationPlan:
    """A condensation that may be applied, such as a proposal with the place of its summary."""

    forgotten_event_ids: tuple[str, ...] = ()
    summary: str | None = None
    summary_offset: int | None = None
    shortened: Mapping[str, int] = field(default_factory=dict)
    """The characters to keep of results, by event id."""

    shrinks: bool = True
    """True if the view gets fewer events, or shorter ones."""


class Condenser(Protocol):
    """Keeps a view from growing without end; one of your own has both methods.

    The owner refuses a proposal that does not hold (`check_proposal`), and asks again when the view
    has changed. If a method raises, the log gets a `ConversationErrorEvent`.
    """

    def need(self, view: View) -> Need | None:
        """Return the need to condense this view, if any. Pure and cheap: runs after each commit."""

    async def propose(self, view: View, need: Need) -> Proposal | None:
        """Propose events to forget; None: there are none. May await a model, beside the owner.

        It is cancelled after `Conversations(condense_s=…)` seconds, and when the owner ends.
        """


def check_proposal(proposal: Proposal, shown: View, now: View) -> CondensationPlan | str:
    """Return the plan that the owner may apply now, or the reason why it may not.

    The reasons are fixed texts, a few in number, so that each can be said once.

    The forgotten events must be one run without gaps in the view, with a manipulation index at
    both ends; none of them may be protected by now; and no event that the condenser was shown may
    have left the view since. A summary may take the place of a lone summary only if it is more than
    a tenth shorter, or answers a request: otherwise the condenser, whose need is the same as
    before, would be asked without end, or once for each character.
    """
    forgotten = frozenset(proposal.forgotten_event_ids)
    if not forgotten:
        return "it forgets nothing"
    if not now.is_continuation_of(shown) and not {e.id for e in shown} <= {e.id for e in now}:
        return "events that it was shown have left the view"
    places = [at for at, event in enumerate(now) if event.id in forgotten]
    if len(places) != len(forgotten):
        return "it forgets events that are not in the view"
    if forgotten & now.protected:
        return "it forgets events that are protected"
    start, end = places[0], places[-1] + 1
    if end - start != len(places):
        return "the events that it forgets have gaps between them"
    for cut, at in ((start, "before the first"), (end, "after the last")):
        if cut not in now.manipulation_indices:
            return f"a cut {at} event that it forgets would separate events that belong together"
    ids, summary = tuple(event.id for event in now[start:end]), proposal.summary
    if summary is None:
        return CondensationPlan(ids)
    first = now[start]
    if len(ids) == 1 and isinstance(first, CondensationSummaryEvent):
        shrinks = len(summary) < RESUMMARY_SHARE * len(first.content)
        if not (shrinks or now.unhandled_condensation_request):
            return "its summary is not a tenth shorter than the summary that it replaces"
    else:
        shrinks = len(ids) > 1 or len(_BEFORE_SUMMARY) + len(summary) < len(_text(first))
    return CondensationPlan(ids, summary, start, shrinks=shrinks)


def find_runs(view: View, start: int, end: int) -> Sequence[Sequence[LLMConvertibleEvent]]:
    """Return the runs of events from `start` to `end` that may be forgotten, the oldest first.

    Protected events split them; each begins and ends at a manipulation index.
    """
    indices, protected = view.manipulation_indices, view.protected
    runs: list[Sequence[LLMConvertibleEvent]] = []
    first = start
    for at in (*(n for n in range(start, end) if view[n].id in protected), end):
        run_start, run_end = indices.find_next(first), indices.find_last(at)
        if run_start is not None and run_end is not None and run_start < run_end:
            runs.append(view[run_start:run_end])
        first = at + 1
    return runs


def make_room(view: View) -> CondensationPlan | None:
    """Return a condensation that makes the view shorter without a condenser; None if none can.

    It forgets the longest run that may be forgotten. If there is none, it shortens results until
    half of the view's text is left: the oldest first, those of the newest response last.
    """
    runs = find_runs(view, 0, len(view))
    if runs:
        longest = max(runs, key=len)
        return CondensationPlan(tuple(event.id for event in longest))
    shortened = _shorten_results(view)
    return CondensationPlan(shortened=shortened) if shortened else None


def _shorten_results(view: View) -> Mapping[str, int]:
    newest_response = next(
        (event.llm_response_id for event in reversed(view) if isinstance(event, ActionEvent)), None
    )
    newest_calls = {
        event.tool_call_id
        for event in view
        if isinstance(event, ActionEvent) and event.llm_response_id == newest_response
    }
    results = [event for event in view if isinstance(event, RESULT_CLASSES)]
    results.sort(key=lambda result: result.tool_call_id in newest_calls)  # stable: oldest first
    to_free = sum(len(_text(event)) for event in view) // 2
    shortened: dict[str, int] = {}
    for result in results:
        length = len(result.content) - len(SHORTENED_MARKER)
        if to_free > 0 and length > SHORTENED_LENGTH:
            shortened[result.id] = max(SHORTENED_LENGTH, length - to_free)
            to_free -= length - shortened[result.id]
    return shortened


def estimate_tokens(event: LLMConvertibleEvent) -> int:
    """Estimate without a tokenizer: four characters a token."""
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

    The need is hard, and turns wait, if a condensation was requested, or if the view has more than
    `max_tokens` tokens (None: no limit). It is soft if the view has more than `max_size` events.
    The first `keep_first` events stay, and as many of the newest as fill about half the limit. If
    the need is soft, nothing is forgotten unless it is at least the share `minimum_progress` of the
    events. `count_tokens` returns the tokens of one event. Raises `InvalidInput`.
    """

    max_size: int = 240
    keep_first: int = 2
    max_tokens: int | None = None
    minimum_progress: float = 0.1
    count_tokens: CountTokens = estimate_tokens

    def __post_init__(self) -> None:
        least = "a whole number from {} on".format
        check_number("max_size", self.max_size, least(4), least=4, is_whole=True)
        check_number("keep_first", self.keep_first, least(0), least=0, is_whole=True)
        if self.max_tokens is not None:
            check_number("max_tokens", self.max_tokens, "1 or more, or None", least=1)
        share = "a share, from 0 to 1"
        check_number("minimum_progress", self.minimum_progress, share, least=0, most=1)
        if not self.keep_first < self.max_size // 2 - 1:
            raise InvalidInput(
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
        """Return the events to forget, to meet the limits; none if there is no cut, or no need.

        If protected events split the middle, return its oldest run that brings the view under the
        limits; if no run does, the longest.
        """
        start = view.find_next(self.keep_first)
        end = view.find_next(len(view) - self._tail_length(view))
        if start is None or end is None:
            return ()
        runs = find_runs(view, start, end)
        for run in runs:
            if self._is_enough(run, view):
                return run
        return max(runs, key=len, default=())

    def _is_enough(self, run: Sequence[LLMConvertibleEvent], view: View) -> bool:
        """True if the view without this run is under every limit: half its length, if requested."""
        left = len(view) - len(run)
        if view.unhandled_condensation_request and left > len(view) // 2:
            return False
        if len(view) > self.max_size and left > self.max_size:
            return False
        if self.max_tokens is None:
            return True
        total = self._totals(view)[len(view)]
        return total - sum(map(self.count_tokens, run)) <= self.max_tokens

    def is_progress(self, forgotten: Sequence[LLMConvertibleEvent], view: View) -> bool:
        """True if the events `forgotten` are at least the share `minimum_progress` of the view."""
        return len(forgotten) >= max(1, self.minimum_progress * len(view))

    def _tail_length(self, view: View) -> int:
        """Return how many of the newest events to keep: the smallest number of any limit."""
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
    """Forgets as a `RollingCondenser` does, and puts a model's summary in the events' place.

    If the need is hard and no cut makes progress, it resets: it summarises the longest run of the
    whole view that may be forgotten, with each event's text cut shorter after each try that fails.
    """

    summarize: Summarize
    rolling: RollingCondenser = RollingCondenser()

    def __post_init__(self) -> None:
        if not callable(self.summarize):
            raise InvalidInput(
                f"summarize is {self.summarize!r}; it takes an async function; "
                "`summarizing_condenser(model, window_tokens=200_000)` has a model summarize"
            )

    def need(self, view: View) -> Need | None:
        return self.rolling.need(view)

    async def propose(self, view: View, need: Need) -> Proposal | None:
        forgotten = self.rolling.find_middle(view)
        if forgotten and self.rolling.is_progress(forgotten, view):
            summary = await self._summarize(forgotten, 1.0)
            return Proposal(tuple(event.id for event in forgotten), summary)
        return await self._reset(view) if need == "hard" else None

    async def _reset(self, view: View) -> Proposal | None:
        forgotten = max(find_runs(view, 0, len(view)), key=len, default=())
        if not forgotten:
            return None
        ids = tuple(event.id for event in forgotten)
        factor = 1.0
        for _ in range(RESET_TRIES_MAX - 1):
            with suppress(Exception):  # most often too long for the model; the last try raises
                return Proposal(ids, await self._summarize(forgotten, factor))
            factor *= RESET_TEXT_FACTOR
        return Proposal(ids, await self._summarize(forgotten, factor))

    async def _summarize(self, events: Sequence[LLMConvertibleEvent], factor: float) -> str:
        texts = (_text(event) for event in events)
        history = "\n".join(text[: max(1, int(len(text) * factor))] for text in texts)
        summary = await self.summarize(history)
        if not summary.strip():
            raise ValueError("the summary is empty")
        return summary


class PipelineCondenser:
    """Asks those of its condensers that have a need, in order; the first proposal counts."""

    def __init__(self, *condensers: Condenser) -> None:
        self.condensers = condensers

    def need(self, view: View) -> Need | None:
        needs = {condenser.need(view) for condenser in self.condensers}
        return "hard" if "hard" in needs else "soft" if "soft" in needs else None

    async def propose(self, view: View, need: Need) -> Proposal | None:  # noqa: ARG002 - the protocol's
        for condenser in self.condensers:
            # A need may be soft for one and hard for another: each gets its own, if it has one.
            own_need = condenser.need(view)
            if own_need is not None:
                proposal = await condenser.propose(view, own_need)
                if proposal is not None:
                    return proposal
        return None


def _text(event: LLMConvertibleEvent) -> str:
    """Return an event as a line of a summariser's history."""
    match event:
        case SystemPromptEvent(content=content):
            return f"system: {content}"
        case UserMessageEvent(content=content, images=images):
            files = "".join(f" [file {file.name}] {file.text or ''}" for file in event.files)
            return f"user: {content}" + " [image]" * len(images) + files
        case AgentMessageEvent(content=content):
            return f"assistant: {content}"
        case ActionEvent(tool_name=tool_name, arguments=arguments, text=text):
            said = f"assistant: {text}\n" if text else ""
            return f"{said}assistant called {tool_name}({json.dumps(arguments)})"
        case ObservationEvent() | AgentErrorEvent() | UserRejectEvent():
            return f"result: {event.content}"
        case CondensationSummaryEvent(content=content):
            return f"{_BEFORE_SUMMARY}{content}"
        case _:
            return f"{event.kind}"
