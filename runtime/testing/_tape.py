"""The tape: every decision of one run, by label, in the order in which they were drawn.

Zero is always the boring choice: the task that has waited longest, no fault, no delay. So a tape
of zeros is the plain run, and writing zeros over a failing tape makes it smaller. Decisions of one
label do not move those of another, so a tape still fits after a small change of the program.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

__all__ = ["Tape"]

T = TypeVar("T")


class Tape:
    """Draws decisions from a seed, or plays those of an earlier run; keeps them either way."""

    def __init__(
        self,
        seed: int | str = 0,
        *,
        played: Mapping[str, Sequence[int]] | None = None,
        branches_from: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`branches_from`: decide as another run did, as far as that goes, and then draw."""
        self.seed = seed
        self.streams: dict[str, list[int]] = {}
        """The decisions so far, by label."""
        self.is_played = played is not None
        self._played = {} if played is None else played
        self._shared = {} if branches_from is None else branches_from
        self._is_fresh = not self.is_played and not self._shared
        """True if no decision comes from another run."""
        self.random = random.Random(f"turnkeeper {seed}")
        self._number = self.random.random

    def draw(self, label: str, options: int, chosen: int | None = None) -> int:
        """Return a number from 0 to `options - 1`; a single option is no decision.

        In a run from a seed, `chosen` is the decision; without it all are equally likely.
        """
        if options <= 1:
            return 0
        if self._is_fresh:
            value = int(self._number() * options) if chosen is None else chosen
            try:
                self.streams[label].append(value)
            except KeyError:
                self.streams[label] = [value]
            return value
        stream = self.streams.setdefault(label, [])
        shared = self._played if self.is_played else self._shared
        earlier, at = shared.get(label, ()), len(stream)
        if at < len(earlier):
            # An option that a changed program lacks is capped.
            value = min(earlier[at], options - 1)
        elif self.is_played:
            value = 0  # past its end a tape is boring
        else:
            value = int(self._number() * options) if chosen is None else chosen
        stream.append(value)
        return value

    def choosing(
        self, label: str, prefer: Callable[[Sequence[T]], int] | None = None
    ) -> Callable[[Sequence[T]], int]:
        """Return a function that draws the place of one of two or more, as `draw` does.

        For decisions of one label that are drawn again and again. In a run from a seed, `prefer`
        returns the decision; without it all are equally likely.
        """
        if not self._is_fresh:
            if prefer is None:
                return lambda options: self.draw(label, len(options))
            return lambda options: self.draw(label, len(options), prefer(options))
        number, noted = self._number, self.streams.setdefault(label, []).append

        def choose(options: Sequence[T]) -> int:
            place = int(number() * len(options)) if prefer is None else prefer(options)
            noted(place)
            return place

        return choose

    def chance(self, label: str, probability: float) -> bool:
        """Return True with this probability; False is the boring choice."""
        if not self._is_fresh:
            chosen = 0 if self.is_played else int(self._number() < probability)
            return self.draw(label, 2, chosen) == 1
        # As `draw` does: chances are most decisions.
        value = 1 if self._number() < probability else 0
        try:
            self.streams[label].append(value)
        except KeyError:
            self.streams[label] = [value]
        return value == 1

    @property
    def decisions(self) -> int:
        """The number of decisions, boring ones included."""
        return sum(len(stream) for stream in self._decided.values())

    @property
    def interesting(self) -> int:
        """The number of decisions that were not the boring choice."""
        return sum(1 for stream in self._decided.values() for value in stream if value)

    def to_json(self) -> str:
        """Return the tape as one line of JSON, without the zeros at the end of each label."""
        kept = {label: _trimmed(stream) for label, stream in self._decided.items()}
        return json.dumps({label: stream for label, stream in kept.items() if stream})

    @staticmethod
    def from_json(text: str) -> Tape:
        """Return a tape to be played; raise `ValueError` if the text is not one."""
        found = json.loads(text)
        is_tape = isinstance(found, dict) and all(
            isinstance(stream, list) and all(type(value) is int and value >= 0 for value in stream)
            for stream in found.values()
        )
        if not is_tape:
            raise ValueError("a tape is a JSON object of lists of natural numbers")
        return Tape(played=found)

    def to_replay(self) -> Tape:
        """Return a fresh tape that plays the decisions of this one, or will branch as this one."""
        if self._shared and not self.streams:
            return Tape(self.seed, branches_from=self._shared)
        return Tape(self.seed, played=self._decided)

    @property
    def _decided(self) -> Mapping[str, Sequence[int]]:
        """The decisions so far; of a tape that was not played yet, those that it is to play."""
        return self.streams or self._played


def _trimmed(stream: Sequence[int]) -> Sequence[int]:
    end = len(stream)
    while end and not stream[end - 1]:
        end -= 1
    return stream[:end]
