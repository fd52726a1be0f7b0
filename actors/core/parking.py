"""Results that came before their calls, parked in memory for a while.

A parked result is not in the log and not acknowledged. If its owner stops, it is lost, and its
sender was never told that it was kept. The owner parks the results that admission calls
unmatched. After each command that brought calls, it takes the results that are ready. Once it has
decided an event that has the id or the call of a parked result, it takes that result. When its
timer fires, it takes the overdue results. Parking is bounded in number and in time.

All senders of one result get one answer: none is told that it was refused while it may still get
into the log for another sender. That includes the senders of several events, of which one is
parked.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from turnkeeper.runtime import Refused

from ..events import Event, ObservationLikeEvent
from .admission import AdmissionRefused, Violation

__all__ = ["Parked", "Parking"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parked(Generic[T]):
    """One sender of a result that waits for its call."""

    event: ObservationLikeEvent
    refusal: Refused
    """The answer, if the call does not come."""
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

    @property
    def tickets(self) -> Sequence[T]:
        """The commands that wait, oldest first."""
        return [one.ticket for one in self._parked]

    def park(self, refusal: AdmissionRefused, ticket: T, *, now: float) -> AdmissionRefused | None:
        """Park the event that was refused. Return the refusal if it cannot be parked."""
        event = refusal.violation.event
        if refusal.violation.name != "unmatched_tool_result" or not isinstance(
            event, ObservationLikeEvent
        ):
            return refusal
        calls = {one.event.tool_call_id for one in self._parked}
        if event.tool_call_id in calls:
            reason = f"a result for call {event.tool_call_id} is parked already"
            found = Violation("duplicate_tool_result", event, reason)
            return AdmissionRefused(refusal.conversation_id, found)
        if len(calls) >= self._results_max:
            return refusal
        self._parked.append(Parked(event, refusal, ticket, now + self._wait_s))
        return None

    def find(self, events: Sequence[Event]) -> Parked[T] | None:
        """Return the oldest one that is among these events, if any is parked."""
        ids = {event.id for event in events}
        among = (one for one in self._parked if one.event.id in ids and one.event in events)
        return next(among, None)

    def join(self, parked: Parked[T], refusal: Refused, ticket: T) -> bool:
        """Let one more sender wait with a parked result, and no longer; False if too many do."""
        same = [one for one in self._parked if one.event == parked.event]
        if len(same) >= self._results_max:
            return False
        self._parked.append(Parked(parked.event, refusal, ticket, parked.until))
        return True

    def is_waiting(self, open_calls: Container[str]) -> bool:
        """True if the call of a parked result has not come."""
        return any(parked.event.tool_call_id not in open_calls for parked in self._parked)

    def take_ready(self, open_calls: Container[str]) -> tuple[Parked[T], ...]:
        """Take the results whose calls have come, oldest first."""
        return self._take(lambda parked: parked.event.tool_call_id in open_calls)

    def take_forestalled(self, events: Sequence[Event]) -> tuple[Parked[T], ...]:
        """Take the results whose id or call these events have taken, oldest first."""
        ids = {event.id for event in events}
        calls = {one.tool_call_id for one in events if isinstance(one, ObservationLikeEvent)}
        return self._take(lambda one: one.event.id in ids or one.event.tool_call_id in calls)

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
