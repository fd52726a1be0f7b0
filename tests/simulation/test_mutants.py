"""Does the search find what is there? Each planted fault, within so many seeds."""

from __future__ import annotations

import pytest

from turnkeeper.actors.simulation import ConversationWorld, silent_logs
from turnkeeper.runtime.testing import simulate

from ..drawn import drawn
from .mutants import MUTANTS, PROMISES, Mutant, planted

STEPS_MAX = 60_000


def test_every_fault_can_still_be_planted() -> None:
    lost = []
    for mutant in (*MUTANTS, *PROMISES):
        try:
            with planted(mutant):
                pass
        except (AssertionError, AttributeError) as error:
            lost.append(f"{mutant.name}: {error}")
    assert not lost, "the code has moved on; adapt these in mutants.py:\n" + "\n".join(lost)


@pytest.mark.sweep
@pytest.mark.parametrize("mutant", drawn(MUTANTS, 10), ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_found(mutant: Mutant) -> None:
    with planted(mutant), silent_logs():
        for seed in range(mutant.seeds_max):
            if not simulate(ConversationWorld(mutant.options), seed=seed, steps_max=STEPS_MAX).ok:
                return
    pytest.fail(f"not found in {mutant.seeds_max} seeds: {mutant.name}")
