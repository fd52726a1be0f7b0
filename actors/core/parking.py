"""Results that came before their calls, parked in memory for a while.

A parked result is not in the log and not acknowledged. If its owner stops, it is lost, and its
sender was never told that it was kept. The owner parks the results that admission calls
unmatched, takes those that are ready after each command that brought calls, and takes those that
are overdue when its timer fires. Parking is bounded in number and in time.

All senders of one result get one answer: none is told that it was refused while it may still get
into the log for another.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..events import Event, ObservationLikeEvent
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

    `results_max`: how many may be parked, and how many senders may wait for one of them. `wait_s`:
    the seconds after which a result is overdue.
    """

    def __init__(self, *, results_max: int = 64, wait_s: float = 30.0) -> None:
        self._results_max = results_max
        self._wait_s = wait_s
        self._parked: list[Parked[T]] = []

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def next_deadline(self) -> float | None:
        """The time at which the oldest is overdue."""
        return self._parked[0].until if self._parked else None

    def park(self, violation: Violation, ticket: T, *, now: float) -> Violation | None:
        """Park the event that was refused. Return the refusal if it cannot be parked.

        An event that is sent again while it is parked waits with the first one, and no longer.
        """
        event = violation.event
        if violation.name != "unmatched_tool_result" or not isinstance(event, ObservationLikeEvent):
            return violation
        same = [one for one in self._parked if one.event.tool_call_id == event.tool_call_id]
        if same and same[0].event != event:
            reason = f"a result for call {event.tool_call_id} is parked already"
            return Violation("duplicate_tool_result", event, reason)
        calls = {one.event.tool_call_id for one in self._parked}
        if len(same or calls) >= self._results_max:
            return violation
        until = same[0].until if same else now + self._wait_s
        self._parked.append(Parked(event, violation, ticket, until))
        return None

    def has(self, event: Event) -> bool:
        """True if this event is parked."""
        return any(parked.event == event for parked in self._parked)

    def is_waiting(self, open_calls: Container[str]) -> bool:
        """True if the call of a parked result has not come."""
        return any(parked.event.tool_call_id not in open_calls for parked in self._parked)

    def take_ready(self, open_calls: Container[str]) -> tuple[Parked[T], ...]:
        """Take the results whose calls have come, oldest first."""
        return self._take(lambda parked: parked.event.tool_call_id in open_calls)

    def take_overdue(self, now: float) -> tuple[Parked[T], ...]:
        """Take the results that are overdue."""
        return self._take(lambda parked: parked.until <= now)

    def take_all(self) -> tuple[Parked[T], ...]:
        """Take all results, because the owner stops."""
        return self._take(lambda _: True)

    def _take(self, is_due: Callable[[Parked[T]], bool]) -> tuple[Parked[T], ...]:
        taken = tuple(filter(is_due, self._parked))
        self._parked = [parked for parked in self._parked if not is_due(parked)]
        return taken
