"""Results that came before their calls, parked in memory for a while.

Nothing parked is in the log, and nothing of it is acknowledged: it is lost with its owner, and
whoever sent it has then not been told that it was kept. The owner drives it: it parks what
admission calls unmatched, takes what is ready after each commit that brought calls, and takes what
is overdue when the timer says so. Bounded in number and in time.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Generic, TypeVar

from .admission import Violation
from .events import ObservationLikeEvent

__all__ = ["Parked", "Parking"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parked(Generic[T]):
    """One result that waits for its call."""

    event: ObservationLikeEvent
    violation: Violation
    """What it is refused as, when its call does not come."""
    ticket: T
    """Whom to answer."""
    until: float
    """When it is overdue, on the owner's monotonic clock."""


class Parking(Generic[T]):
    """The results that are parked, oldest first. One owner, one task."""

    def __init__(self, *, results_max: int = 64, wait_s: float = 30.0) -> None:
        self._results_max = results_max
        self._wait_s = wait_s
        self._parked: dict[str, Parked[T]] = {}

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def next_deadline(self) -> float | None:
        """When the oldest is overdue."""
        return next((parked.until for parked in self._parked.values()), None)

    def park(self, violation: Violation, ticket: T, *, now: float) -> Violation | None:
        """Park the event that was refused; gives the refusal that stands where it cannot be."""
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

    def take_ready(self, open_calls: Container[str]) -> tuple[Parked[T], ...]:
        """Those whose calls have come, oldest first; they are parked no more."""
        return self._take([call_id for call_id in self._parked if call_id in open_calls])

    def take_overdue(self, now: float) -> tuple[Parked[T], ...]:
        """Those that have waited long enough."""
        return self._take([c for c, parked in self._parked.items() if parked.until <= now])

    def take_all(self) -> tuple[Parked[T], ...]:
        """All, because the owner stops."""
        return self._take(list(self._parked))

    def _take(self, call_ids: list[str]) -> tuple[Parked[T], ...]:
        return tuple(self._parked.pop(call_id) for call_id in call_ids)
