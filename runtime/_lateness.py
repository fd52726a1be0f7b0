"""How late an event loop runs what is due, as a histogram.

A long computation, a blocking call and the garbage collector each hold up the loop, and so delay
all of its tasks alike. A task that wakes at short intervals measures each of these pauses, at most
one interval too short.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NoReturn

from .ports import Ports

__all__ = ["LATE_BOUNDS_S", "Lateness"]

LATE_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""The upper bounds of the classes, in seconds; beyond the last is a class of its own."""


class Lateness:
    """Counts how late a loop was, by class. Not for several threads at once."""

    __slots__ = ("counts", "longest_s")

    counts: list[int]
    longest_s: float

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all that was counted."""
        self.counts = [0] * (len(LATE_BOUNDS_S) + 1)
        self.longest_s = 0.0

    def record(self, seconds: float) -> None:
        """Count one look at the loop, which was late by `seconds`."""
        self.counts[bisect_left(LATE_BOUNDS_S, seconds)] += 1
        self.longest_s = max(self.longest_s, seconds)

    def add(self, counts: Sequence[int], longest_s: float) -> None:
        """Add the counts of another `Lateness`."""
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.longest_s = max(self.longest_s, longest_s)

    def quantile_s(self, share: float) -> float:
        """Return a time, in seconds, which this share of the looks did not exceed.

        It is the upper bound of a class, or the longest of all if that is less.
        """
        wanted, seen = share * sum(self.counts), 0
        for count, bound_s in zip(self.counts, LATE_BOUNDS_S, strict=False):
            seen += count
            if seen >= wanted:
                return min(bound_s, self.longest_s)
        return self.longest_s

    async def watch(self, every_s: float = 0.01, ports: Ports = Ports()) -> NoReturn:
        """Look at the running loop at these intervals, until cancelled."""
        while True:
            due = ports.loop_time() + every_s
            await ports.sleep(every_s)
            self.record(max(0.0, ports.loop_time() - due))
