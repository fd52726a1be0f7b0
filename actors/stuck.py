"""Telling when an agent goes round in circles: a pure look at the newest events of a view.

Events are compared by what they say, not by their ids. Being stuck is a status and an event, never
an exception; whoever runs the agent decides what follows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .events import (
    RESULT_CLASSES,
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationSummaryEvent,
    LLMConvertibleEvent,
    ObservationEvent,
    ObservationLikeEvent,
    UserMessageEvent,
)

__all__ = ["Circle", "CircleName", "StuckDetector"]

CircleName: TypeAlias = Literal[
    "same_action_same_result", "failing_action", "agent_monologue", "alternating_actions"
]


@dataclass(frozen=True, slots=True)
class Circle:
    """How the agent goes round."""

    name: CircleName
    is_stuck: bool
    """False: not yet; the agent is to be told, once."""
    detail: str


@dataclass(frozen=True, slots=True)
class StuckDetector:
    """The thresholds, and the look. Ask once after each step."""

    window: int = 20
    """How many of the newest events since the last user message are looked at."""
    same_results_max: int = 4
    """So many times the same action with the same result is stuck."""
    failures_max: int = 3
    """So many failures of the same action are told to the agent; one more is stuck."""
    messages_max: int = 3
    """So many agent messages in a row are stuck."""
    alternations: int = 6
    """So many actions, and results, that alternate between two are stuck."""

    def find_circle(self, view: Sequence[LLMConvertibleEvent]) -> Circle | None:
        """The circle that the newest events of a view are in."""
        events = self._newest(view)
        steps = _answered_steps(events)
        return (
            self._same_results(steps)
            or self._failures(steps)
            or self._monologue(events)
            or self._alternation(steps)
        )

    def _newest(self, view: Sequence[LLMConvertibleEvent]) -> Sequence[LLMConvertibleEvent]:
        newest = view[max(0, len(view) - self.window) :]
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

    def _monologue(self, events: Sequence[LLMConvertibleEvent]) -> Circle | None:
        messages = 0
        for event in reversed(events):
            if isinstance(event, AgentMessageEvent):
                messages += 1
            elif not isinstance(event, CondensationSummaryEvent):
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
    """A call with its result, without what tells one time from another."""

    did: Hashable
    got: Hashable
    has_failed: bool


def _answered_steps(events: Sequence[LLMConvertibleEvent]) -> Sequence[_Step]:
    results: dict[str, ObservationLikeEvent] = {
        event.tool_call_id: event for event in events if isinstance(event, RESULT_CLASSES)
    }
    return [
        _step(event, results[event.tool_call_id])
        for event in events
        if isinstance(event, ActionEvent) and event.tool_call_id in results
    ]


def _step(action: ActionEvent, result: ObservationLikeEvent) -> _Step:
    has_failed = isinstance(result, AgentErrorEvent) or (
        isinstance(result, ObservationEvent) and result.is_error
    )
    return _Step(
        did=(action.tool_name, action.arguments, action.malformed_arguments),
        got=(result.kind, result.content, has_failed),
        has_failed=has_failed,
    )
