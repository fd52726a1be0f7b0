"""Results that came before their calls, parked in memory for a while.

A parked result is not in the log and not acknowledged. If its owner stops, it is lost, and its
sender was never told that it was kept. The owner parks the results that admission calls
unmatched, takes those that are ready after each command that brought calls, and takes those that
are overdue when its timer fires. Parking is bounded in number and in time.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..events import ObservationLikeEvent
from .admission import Violation

__all__ = ["Parked", "Parking"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parked(Generic[T]):
    """One result that waits for its call."""

    event: ObservationLikeEvent
    violation: Violation
    """The refusal, if its call does not come."""
    ticket: T
    """The command to answer."""
    until: float
    """When it is overdue, by `loop_time` of the owner's ports."""


class Parking(Generic[T]):
    """The results that are parked, oldest first. Used by one task.

    `results_max`: how many may be parked. `wait_s`: the seconds after which a result is overdue.
    """

    def __init__(self, *, results_max: int = 64, wait_s: float = 30.0) -> None:
        self._results_max = results_max
        self._wait_s = wait_s
        self._parked: dict[str, Parked[T]] = {}

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def next_deadline(self) -> float | None:
        """The time at which the oldest is overdue."""
        return next((parked.until for parked in self._parked.values()), None)

    def park(self, violation: Violation, ticket: T, *, now: float) -> Violation | None:
        """Park the event that was refused. Return the refusal if it cannot be parked."""
        event = violation.event
        if violation.name != "unmatched_tool_result" or not isinstance(event, ObservationLikeEvent):
            return violation
        if event.tool_call_id in self._parked:
            reason = f"a result for call {event.tool_call_id} is parked already"
            return Violation("duplicate_tool_result", event, reason)
        if len(self._parked) >= self._results_max:
            return violation
        until = now + self._wait_s
        self._parked[event.tool_call_id] = Parked(event, violation, ticket, until)
        return None

    def is_waiting(self, open_calls: Container[str]) -> bool:
        """True if the call of a parked result has not come."""
        return any(call_id not in open_calls for call_id in self._parked)

    def take_ready(self, open_calls: Container[str]) -> tuple[Parked[T], ...]:
        """Take the results whose calls have come, oldest first."""
        return self._take([call_id for call_id in self._parked if call_id in open_calls])

    def take_overdue(self, now: float) -> tuple[Parked[T], ...]:
        """Take the results that are overdue."""
        return self._take([c for c, parked in self._parked.items() if parked.until <= now])

    def take_all(self) -> tuple[Parked[T], ...]:
        """Take all results, because the owner stops."""
        return self._take(list(self._parked))

    def _take(self, call_ids: list[str]) -> tuple[Parked[T], ...]:
        return tuple(self._parked.pop(call_id) for call_id in call_ids)
