"""The tape: every decision of one run, by label, in the order in which they were drawn.

Zero is always the boring choice: the task that waits longest, no fault, no delay. So a tape of
zeros is the plain run, and a failing tape is made smaller by writing zeros over it. Decisions of
one label do not move those of another, so a tape still means something after a small change.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence

__all__ = ["Tape"]


class Tape:
    """Draws decisions from a seed, or plays those of an earlier run; keeps them either way."""

    def __init__(
        self, seed: int | str = 0, *, played: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        self.seed = seed
        self.streams: dict[str, list[int]] = {}
        """What has been decided, by label."""
        self.is_played = played is not None
        self._played = {} if played is None else played
        self.random = random.Random(f"turnkeeper {seed}")

    def draw(self, label: str, options: int, choose: Callable[[], int] | None = None) -> int:
        """A number from 0 to `options - 1`; one option is no decision.

        `choose` says what a run from a seed decides; without it all are equally likely.
        """
        if options <= 1:
            return 0
        stream = self.streams.get(label)
        if stream is None:
            stream = self.streams[label] = []
        if self.is_played:
            played = self._played.get(label, ())
            at = len(stream)
            # Behind its end a tape is boring; what a changed program no longer offers is capped.
            value = min(played[at], options - 1) if at < len(played) else 0
        elif choose is None:
            value = int(self.random.random() * options)
        else:
            value = choose()
        stream.append(value)
        return value

    def chance(self, label: str, probability: float) -> bool:
        """Whether something out of the ordinary happens."""
        return bool(self.draw(label, 2, lambda: int(self.random.random() < probability)))

    @property
    def decisions(self) -> int:
        """How many there were, and not boring ones alone."""
        return sum(len(stream) for stream in self.streams.values())

    @property
    def interesting(self) -> int:
        """How many decisions were not the boring choice."""
        return sum(1 for stream in self.streams.values() for value in stream if value)

    def to_json(self) -> str:
        """The tape as one line of JSON, without what is boring behind the last of each label."""
        kept = {label: _trimmed(stream) for label, stream in self.streams.items()}
        return json.dumps({label: stream for label, stream in kept.items() if stream})

    @staticmethod
    def from_json(text: str) -> Tape:
        """A tape to be played; `ValueError` where the text is none."""
        found = json.loads(text)
        is_tape = isinstance(found, dict) and all(
            isinstance(stream, list) and all(type(value) is int and value >= 0 for value in stream)
            for stream in found.values()
        )
        if not is_tape:
            raise ValueError("a tape is a JSON object of lists of natural numbers")
        return Tape(played=found)

    def replayed(self) -> Tape:
        """A fresh tape that plays what this one has kept, or is to play."""
        return Tape(self.seed, played=self.streams or self._played)


def _trimmed(stream: Sequence[int]) -> Sequence[int]:
    end = len(stream)
    while end and not stream[end - 1]:
        end -= 1
    return stream[:end]
