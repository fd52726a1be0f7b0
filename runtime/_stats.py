"""How long handlers take, per actor class: the last thousand turns.

A turn of several messages is recorded as so many messages of its mean, since a histogram entry
for each of them would cost as much as handling them; a slow message always has a turn of its own.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["Stats"]

_TURNS_MAX: Final = 1024


class Stats:
    """Keeps durations; tells quantiles."""

    __slots__ = ("count", "recent")

    def __init__(self) -> None:
        self.count = 0
        """How many messages were handled, since the beginning."""
        self.recent: deque[tuple[float, int]] = deque(maxlen=_TURNS_MAX)

    def record(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.recent.append((seconds, count))

    def quantile(self, share: float) -> float:
        """The duration that this share of the recent messages did not exceed, in seconds."""
        wanted = share * sum(count for _, count in self.recent)
        seen = 0
        for seconds, count in sorted(self.recent):
            seen += count
            if seen >= wanted:
                return seconds
        return 0.0
