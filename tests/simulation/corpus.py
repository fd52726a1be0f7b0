"""The tapes of runs that failed once, and the planted faults that bring those failures back.

Each tape belongs to a fault that was mended. With the fault planted again the tape must break the
invariant that it broke then; otherwise it proves nothing any more, for the program has moved on.
Then record it anew:

    .venv/bin/python -m tests.simulation.corpus
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import NamedTuple

from turnkeeper.actors.simulation import ConversationWorld, TapeFile, silent_logs
from turnkeeper.runtime.testing import shrink, simulate

from .mutants import MUTANTS, Mutant, planted

__all__ = ["CORPUS", "Kept"]

STEPS_MAX = 20_000
SEEDS_MAX = 3_000


class Kept(NamedTuple):
    """One tape."""

    name: str
    fault: str
    """The name of the planted fault."""
    invariant: str
    """The invariant that it broke."""

    @property
    def path(self) -> Path:
        return Path(__file__).parent / "corpus" / f"{self.name}.tape.json"

    @property
    def mutant(self) -> Mutant:
        (mutant,) = (each for each in MUTANTS if each.name == self.fault)
        return mutant


CORPUS = [
    Kept("lease-renewed", "a lease that was renewed brings back what was lost under it", "O2"),
    Kept("tool-without-lease", "a tool starts under a lease that has run out", "O2"),
]


def record(kept: Kept) -> None:
    """Seek the failure from the first seed on, and write its tape."""
    with planted(kept.mutant), silent_logs():
        for seed in range(SEEDS_MAX):
            run = simulate(ConversationWorld(), seed=seed, steps_max=STEPS_MAX, is_told=False)
            if run.broken is not None and run.broken.invariant == kept.invariant:
                smallest = shrink(ConversationWorld(), run, steps_max=STEPS_MAX)
                kept.path.write_text(TapeFile.of(smallest).to_json() + "\n")
                return
    raise SystemExit(f"not found in {SEEDS_MAX} seeds: {kept.fault}")


if __name__ == "__main__":
    gc.freeze()
    for each in CORPUS:
        record(each)
