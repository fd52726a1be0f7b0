"""What takes longer than the continuous build allows: `make soak`."""

from __future__ import annotations

import os
import tracemalloc

import pytest

from turnkeeper.actors.simulation import run_campaign

SOAK_S = float(os.environ.get("SOAK_MINUTES", "30")) * 60.0
MEMORY_SEEDS = 200
KEPT_BYTES_MAX = 256 * 1024


@pytest.mark.slow
def test_seeds_for_as_long_as_there_is_time() -> None:
    campaign = run_campaign(int.from_bytes(os.urandom(4), "big"), seconds=SOAK_S)

    assert campaign.ok, "\n".join(map(str, campaign.failures)) or campaign.missing_marks


@pytest.mark.slow
def test_a_campaign_keeps_nothing_of_the_worlds_that_it_has_run() -> None:
    run_campaign(0, seeds=50)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        run_campaign(0, seeds=MEMORY_SEEDS)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert after - before < KEPT_BYTES_MAX
