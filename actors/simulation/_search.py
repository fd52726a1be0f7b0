"""The search decides which run comes next, given the places that earlier runs have reached.

A fresh seed draws everything anew, and mostly reaches the same places as others. So after the first
few runs, every third run branches off: it keeps the decisions of an earlier run that reached a new
place, up to a point, and draws the rest anew. A *place* is a pair of consecutive moments of a run,
each of them a small tuple: the write or the fault, and the state of the conversation.

The first few runs use small worlds: most bugs are found there, in a fraction of the time that a run
between nodes takes. They use the next seeds that draw such a world; the skipped seeds come later.

The first seed determines everything: the same search makes the same runs in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from turnkeeper.runtime.testing import Policy, Run, Tape

__all__ = ["Plan", "Search"]

_FRESH_FIRST = 60
"""This many runs come first without branches: fresh seeds find easy bugs sooner."""
_BRANCH_EVERY = 3
_LOOKED_AHEAD = 48
"""The seeds whose runs come first are chosen among this many."""
_KEPT_MAX = 128
_LABELS_MAX = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """One run to make: from a seed, or from a branch of an earlier run."""

    seed: int
    policy: Policy | None = None
    tape: Tape | None = None


@dataclass(slots=True)
class _Kept:
    """A run that reached new places."""

    run: Run
    news: int


@dataclass
class Search:
    """Plans runs, and learns from them."""

    first_seed: int
    policy: Policy | None = None
    aims: bool = True
    """If False, every run uses a fresh seed."""
    opening: Callable[[Sequence[int]], Sequence[int]] = lambda _: ()
    """Chooses, of some seeds, those whose runs come first."""
    seeds: int | None = None
    """How many seeds there will be, if that is known; no run uses a later seed."""
    places: set[Hashable] = field(default_factory=set)
    """All places that a run has reached."""
    _kept: list[_Kept] = field(default_factory=list)
    _planned: int = 0

    def __post_init__(self) -> None:
        self._random = Tape(f"search {self.first_seed}").random
        self._seeds = self._in_turn()

    def next_plan(self) -> Plan:
        """Return the next run to make."""
        seed = next(self._seeds)
        self._planned += 1
        is_early = self._planned <= _FRESH_FIRST
        if is_early or self._planned % _BRANCH_EVERY or not self._kept or not self.aims:
            return Plan(seed, self.policy)
        # The newest are tried most: nothing has branched off them yet.
        at = len(self._kept) - 1 - int(len(self._kept) * self._random.random() ** 2)
        run = self._kept[max(at, 0)].run
        tape = Tape(f"branch {seed}", branches_from=self._cut(run.tape.streams))
        return Plan(seed, run.policy, tape)

    def _in_turn(self) -> Iterator[int]:
        """Yield the seeds: those of the opening, and then all others in their order."""
        ahead = _LOOKED_AHEAD if self.seeds is None else min(self.seeds, _LOOKED_AHEAD)
        near = range(self.first_seed, self.first_seed + ahead)
        first = self.opening(near)
        yield from first
        yield from (seed for seed in near if seed not in first)
        yield from count(near.stop)

    def learn(self, run: Run, places: set[Hashable]) -> None:
        """Learn the places that a run has reached."""
        news = len(places - self.places)
        if not news:
            return
        self.places |= places
        if run.ok:
            self._kept.append(_Kept(run, news))
            if len(self._kept) > _KEPT_MAX:
                del self._kept[min(range(_KEPT_MAX // 2), key=lambda n: self._kept[n].news)]

    def _cut(self, streams: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
        """Return what a branch keeps of these decisions."""
        draw = self._random
        kept = dict(streams)
        match draw.randrange(4):
            case 0:  # another order of steps, from somewhere on
                self._cut_stream(kept, "task")
            case 1:  # another end of everything
                share = 0.2 + 0.8 * draw.random()
                kept = {label: stream[: int(len(stream) * share)] for label, stream in kept.items()}
            case _:  # other decisions of a few kinds
                labels = [label for label in kept if label != "task"]
                for label in draw.sample(labels, min(len(labels), 1 + draw.randrange(_LABELS_MAX))):
                    self._cut_stream(kept, label)
        return kept

    def _cut_stream(self, kept: dict[str, Sequence[int]], label: str) -> None:
        stream = kept.get(label, ())
        kept[label] = stream[: self._random.randrange(len(stream) + 1)]
