"""How long handlers take, per actor class: a histogram with buckets an eighth of an octave wide.

A turn of several messages is recorded as so many messages of its mean, since reading the clock for
each of them would cost as much as handling them; a slow message always has a turn of its own.
"""

from __future__ import annotations

from math import frexp
from typing import Final

__all__ = ["Stats"]

_SUB_BUCKETS: Final = 8
_EXPONENT_MIN: Final = -30  # a nanosecond
_EXPONENT_MAX: Final = 14  # hours
_BUCKETS: Final = (_EXPONENT_MAX - _EXPONENT_MIN) * _SUB_BUCKETS


class Stats:
    """Counts durations; tells quantiles, to within an eighth."""

    __slots__ = ("_buckets", "count")

    def __init__(self) -> None:
        self.count = 0
        self._buckets = [0] * _BUCKETS

    def record(self, seconds: float, count: int = 1) -> None:
        mantissa, exponent = frexp(seconds)
        # The mantissa is from 0.5 up to 1, so twice it counts the eighths from 8 to 15.
        index = (exponent - _EXPONENT_MIN) * _SUB_BUCKETS + int(mantissa * 16) - _SUB_BUCKETS
        self._buckets[min(max(index, 0), _BUCKETS - 1)] += count
        self.count += count

    def quantile(self, share: float) -> float:
        """The duration that this share of the messages did not exceed, in seconds."""
        wanted = share * self.count
        seen = 0
        for index, count in enumerate(self._buckets):
            seen += count
            if count and seen >= wanted:
                exponent, sub = divmod(index, _SUB_BUCKETS)
                return float((sub + _SUB_BUCKETS + 1) / 16 * 2.0 ** (exponent + _EXPONENT_MIN))
        return 0.0
