"""Detection of an agent that goes round in circles, from the newest events that its model saw.

Events are compared by their content, not by their ids. Being stuck is a status and an event, never
an exception; the code that runs the agent decides what to do about it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ..events import (
    RESULT_CLASSES,
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationSummaryEvent,
    LLMConvertibleEvent,
    ObservationEvent,
    UserMessageEvent,
)
from ..values.text import check_number

__all__ = [
    "SEEN_MAX",
    "Circle",
    "CircleName",
    "RecentlySeen",
    "SeenEvent",
    "StuckDetector",
    "seen_after",
    "stored_seen",
]

SEEN_MAX = 20


@dataclass(frozen=True, slots=True)
class SeenEvent:
    """The content of an event that the model saw, as far as circles depend on it."""

    kind: Literal["action", "result", "agent message", "summary", "other"]
    call_id: str = ""
    digest: str = ""
    """Equal for equal contents, in every process."""
    has_failed: bool = False
    turn_id: str = ""
    """The turn that it answers, if it is a whole answer of an agent."""


RecentlySeen: TypeAlias = tuple[SeenEvent | LLMConvertibleEvent, ...]
"""The newest events that the model saw since the last user message: a bounded fold of the log.

Oldest first; a value, replaced at each event. A condensation takes nothing from it, so a circle is
found although a part of it is forgotten.
"""


def seen_after(newest: RecentlySeen, event: LLMConvertibleEvent) -> RecentlySeen:
    """Return the newest events with this one added, which the model sees."""
    # By kind first: pydantic makes `isinstance` slow.
    if event.kind == "user_message":
        assert isinstance(event, UserMessageEvent), event.kind
        if not event.is_reminder:
            return ()
    # Not by `(*…, event)`, which copies once more: a log has thousands of these.
    return newest[1 - SEEN_MAX :] + (event,)  # noqa: RUF005


def stored_seen(newest: RecentlySeen) -> tuple[SeenEvent, ...]:
    """Return them as a snapshot keeps them."""
    return tuple(_seen(event) for event in newest)


CircleName: TypeAlias = Literal[
    "same_action_same_result", "failing_action", "agent_monologue", "alternating_actions"
]


@dataclass(frozen=True, slots=True)
class Circle:
    """A circle that an agent is in."""

    name: CircleName
    is_stuck: bool
    """False if it is not stuck yet: then the agent is to be told, once."""
    detail: str


@dataclass(frozen=True, slots=True)
class StuckDetector:
    """The detector, with its thresholds. Ask it once after each step."""

    window: int = 20
    """The number of newest events since the last user message that are compared."""
    same_results_max: int = 4
    """The same action with the same result this many times is stuck."""
    failures_max: int = 3
    """After this many failures of the same action the agent is told; one more is stuck."""
    messages_max: int = 3
    """This many agent messages in a row are stuck."""
    alternations: int = 6
    """This many calls in a row that alternate between two, with equal results, are stuck."""

    def __post_init__(self) -> None:
        allowed = f"a whole number from 1 to {SEEN_MAX}"
        check_number("window", self.window, allowed, least=1, most=SEEN_MAX, is_whole=True)
        for name in ("same_results_max", "failures_max", "messages_max", "alternations"):
            number = getattr(self, name)
            check_number(name, number, "a whole number from 1 on", least=1, is_whole=True)

    def find_circle(
        self,
        newest: Sequence[SeenEvent | LLMConvertibleEvent],
        digested: dict[str, SeenEvent] | None = None,
    ) -> Circle | None:
        """Return the circle that the newest of these events are in, if any.

        `digested`: a table of the events that earlier calls have digested, by their ids. Once there
        are enough events for a circle, those that it lacks are added, and those that are not among
        the newest are dropped.
        """
        looked_at = self._since_user_message(newest)
        # The smallest circles: some messages, or the same call some times, with a result.
        least = 1 + min(self.same_results_max, self.failures_max, self.alternations)
        if len(looked_at) < min(self.messages_max, least):
            return None
        events = _digest_each(looked_at, {} if digested is None else digested)
        steps = _answered_steps(events)
        return (
            self._same_results(steps)
            or self._failures(steps)
            or self._monologue(events)
            or self._alternation(steps)
        )

    def _since_user_message(
        self, events: Sequence[SeenEvent | LLMConvertibleEvent]
    ) -> Sequence[SeenEvent | LLMConvertibleEvent]:
        newest = events[max(0, len(events) - self.window) :]
        for at in reversed(range(len(newest))):
            event = newest[at]
            if isinstance(event, UserMessageEvent) and not event.is_reminder:
                return newest[at + 1 :]
        return newest

    def _same_results(self, steps: Sequence[_Step]) -> Circle | None:
        newest = steps[-self.same_results_max :]
        if len(newest) < self.same_results_max or len({(s.did, s.got) for s in newest}) > 1:
            return None
        detail = f"the same call with the same result, {len(newest)} times"
        return Circle("same_action_same_result", is_stuck=True, detail=detail)

    def _failures(self, steps: Sequence[_Step]) -> Circle | None:
        failures = 0
        for step in reversed(steps):
            if not step.has_failed or step.did != steps[-1].did:
                break
            failures += 1
        if failures < self.failures_max:
            return None
        detail = f"the same call has failed {failures} times"
        return Circle("failing_action", is_stuck=failures > self.failures_max, detail=detail)

    def _monologue(self, events: Sequence[SeenEvent]) -> Circle | None:
        messages = 0
        for event in reversed(events):
            if event.kind == "agent message":
                messages += 1
            elif event.kind != "summary":
                break
        if messages < self.messages_max:
            return None
        detail = f"{messages} agent messages in a row"
        return Circle("agent_monologue", is_stuck=True, detail=detail)

    def _alternation(self, steps: Sequence[_Step]) -> Circle | None:
        newest = steps[-self.alternations :]
        if len(newest) < self.alternations:
            return None
        even = {(step.did, step.got) for step in newest[::2]}
        odd = {(step.did, step.got) for step in newest[1::2]}
        if len(even) > 1 or len(odd) > 1 or even == odd:
            return None
        detail = f"{len(newest)} calls that alternate between two"
        return Circle("alternating_actions", is_stuck=True, detail=detail)


@dataclass(frozen=True, slots=True)
class _Step:
    """A call with its result, without the fields that differ from one time to the next."""

    did: str
    got: str
    has_failed: bool


def _answered_steps(events: Sequence[SeenEvent]) -> Sequence[_Step]:
    results = {event.call_id: event for event in events if event.kind == "result"}
    return [
        _Step(event.digest, result.digest, result.has_failed)
        for event in events
        if event.kind == "action" and (result := results.get(event.call_id)) is not None
    ]


def _digest_each(
    events: Sequence[SeenEvent | LLMConvertibleEvent], digested: dict[str, SeenEvent]
) -> Sequence[SeenEvent]:
    """Return these events as the detector compares them; keep just these in the table."""
    earlier = digested.copy()
    digested.clear()
    seen: list[SeenEvent] = []
    for event in events:
        if isinstance(event, SeenEvent):
            seen.append(event)  # a snapshot has it like this
        else:
            digested[event.id] = earlier.get(event.id) or _seen(event)
            seen.append(digested[event.id])
    return seen


def _seen(event: SeenEvent | LLMConvertibleEvent) -> SeenEvent:
    if isinstance(event, SeenEvent):
        return event
    if isinstance(event, ActionEvent):
        content = [event.tool_name, event.arguments, event.malformed_arguments]
        return SeenEvent("action", event.tool_call_id, _digest(content))
    if isinstance(event, RESULT_CLASSES):
        has_failed = isinstance(event, AgentErrorEvent) or (
            isinstance(event, ObservationEvent) and event.is_error
        )
        digest = _digest([event.kind, event.content, has_failed])
        return SeenEvent("result", event.tool_call_id, digest, has_failed)
    if isinstance(event, AgentMessageEvent):
        answered = None if event.interrupted else event.turn_id
        return SeenEvent("agent message", turn_id=answered or "")
    return SeenEvent("summary" if isinstance(event, CondensationSummaryEvent) else "other")


_encode: Final = json.JSONEncoder(sort_keys=True).encode
"""Kept: `json.dumps` makes an encoder for each call."""


def _digest(content: object) -> str:
    return hashlib.blake2b(_encode(content).encode(), digest_size=16).hexdigest()
