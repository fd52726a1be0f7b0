"""The search itself: fresh seeds, all invariants, every interesting place reached."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from turnkeeper.actors.simulation import (
    INVARIANTS,
    MARKS,
    Campaign,
    ConversationWorld,
    TapeFile,
    replay,
    run_campaign,
    silent_logs,
)
from turnkeeper.runtime.testing import simulate

from ..drawn import first_seed, is_whole
from .corpus import CORPUS, Kept
from .mutants import planted

FRESH_SEEDS_MIN = 300
"""So many reach every interesting place."""
FRESH_S = 60.0
"""So much longer in a whole sweep."""
MARKED_SEEDS_MAX = 1_000
"""Every interesting place is reached within so many fresh seeds; most within a third of them."""


@pytest.mark.sweep
def test_fresh_seeds_break_no_invariant_and_reach_every_interesting_place() -> None:
    first = first_seed()
    campaign = run_campaign(first, seeds=FRESH_SEEDS_MIN)

    assert not campaign.failures, "\n".join(map(str, campaign.failures))
    assert campaign.seeds == FRESH_SEEDS_MIN
    assert campaign.checked >= FRESH_SEEDS_MIN // 25
    missing, seeds = set(campaign.missing_marks), FRESH_SEEDS_MIN
    while missing and seeds < MARKED_SEEDS_MAX:
        further = run_campaign(first + seeds, seeds=100)
        assert not further.failures, "\n".join(map(str, further.failures))
        missing &= set(further.missing_marks)
        seeds += 100
    assert not missing, f"not reached within {seeds} seeds"

    if is_whole():
        more = run_campaign(first + FRESH_SEEDS_MIN, seconds=FRESH_S)

        assert not more.failures, "\n".join(map(str, more.failures))


@pytest.mark.parametrize("kept", CORPUS, ids=lambda kept: kept.name)
def test_what_was_found_once_is_not_found_again(kept: Kept) -> None:
    tape = TapeFile.from_json(kept.path.read_text())

    replay(tape).check()

    with planted(kept.mutant):
        again = replay(tape)
    found = None if again.broken is None else again.broken.invariant
    assert found == kept.invariant, (
        f"with {kept.fault!r} planted, its tape must break {kept.invariant}, and breaks {found}: "
        "it proves nothing any more; record it anew with python -m tests.simulation.corpus"
    )


def test_every_tape_of_the_corpus_is_played() -> None:
    folder = CORPUS[0].path.parent

    assert {kept.path for kept in CORPUS} == set(folder.iterdir())


def test_the_same_seed_gives_the_same_run_in_another_process_with_other_hashes() -> None:
    code = (
        "from turnkeeper.actors.simulation import run_campaign\n"
        "campaign = run_campaign(7_000, seeds=8)\n"
        "print(campaign.steps, campaign.trace)"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(traces) == 1
    here = run_campaign(7_000, seeds=8)
    assert traces == {f"{here.steps} {here.trace}\n"}


def test_a_run_and_its_tape_leave_the_same_trace() -> None:
    with silent_logs():
        for seed in range(8_000, 8_010):
            run = simulate(ConversationWorld(), seed=seed)
            again = simulate(ConversationWorld(), tape=TapeFile.of(run).tape)

            assert again.trace == run.trace
            assert again.marks == run.marks


def test_a_long_campaign_that_misses_an_interesting_place_is_not_ok() -> None:
    campaign = Campaign(0, seeds=10_000)
    campaign.marks.update(MARKS)
    assert campaign.ok

    del campaign.marks["takeover"]

    assert campaign.missing_marks == ["takeover"]
    assert not campaign.ok


def test_each_invariant_has_a_sentence_of_its_own() -> None:
    assert len(set(INVARIANTS.values())) == len(INVARIANTS)
