"""How long handlers take, per actor class: the last thousand slices.

A slice of several messages is recorded as that many messages of its mean duration, because an
entry for each message would cost as much as handling it. A slow message always has its own slice.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["Stats"]

_SLICES_MAX: Final = 1024


class Stats:
    """Durations of recent handler calls, and their quantiles."""

    __slots__ = ("count", "recent")

    def __init__(self) -> None:
        self.count = 0
        """How many messages were handled since the runtime began."""
        self.recent: deque[tuple[float, int]] = deque(maxlen=_SLICES_MAX)
        """The seconds of each recent slice, and how many messages it had."""

    def record(self, seconds: float, count: int) -> None:
        """Note a slice: its seconds, and how many messages it had."""
        self.count += count
        self.recent.append((seconds, count))

    def quantile(self, share: float) -> float:
        """Return the duration, in seconds, that this share of recent messages did not exceed."""
        wanted = share * sum(count for _, count in self.recent)
        seen = 0
        for seconds, count in sorted((seconds / count, count) for seconds, count in self.recent):
            seen += count
            if seen >= wanted:
                return seconds
        return 0.0
