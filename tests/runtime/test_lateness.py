"""How late a loop runs what is due, counted by class."""

from __future__ import annotations

import anyio
import pytest

from turnkeeper.runtime.lowlevel import LATE_BOUNDS_S, Lateness
from turnkeeper.runtime.testing import VirtualClock


def test_a_quantile_is_the_bound_of_a_class_or_the_longest_if_that_is_less() -> None:
    lateness = Lateness()
    assert lateness.quantile_s(0.99) == 0.0

    for seconds in (0.0, 0.001, 0.002, 0.3):
        lateness.record(seconds)

    shares = (0.5, 0.75, 0.99, 1.0)
    assert [lateness.quantile_s(share) for share in shares] == [0.001, 0.0025, 0.3, 0.3]


def test_what_is_later_than_the_last_bound_is_a_class_of_its_own() -> None:
    lateness = Lateness()

    lateness.record(LATE_BOUNDS_S[-1])
    lateness.record(60.0)

    assert lateness.counts[-2:] == [1, 1]
    assert lateness.quantile_s(1.0) == 60.0


@pytest.mark.anyio
async def test_a_pause_of_the_loop_is_counted_by_its_length_less_one_interval_at_most() -> None:
    clock, lateness = VirtualClock(), Lateness()
    async with anyio.create_task_group() as group:
        group.start_soon(lateness.watch, 0.01, clock.ports())
        await clock.advance(0.025)
        clock._now += 0.4  # nothing runs meanwhile

        await clock.advance(0.0)

        group.cancel_scope.cancel()
    assert lateness.longest_s == pytest.approx(0.395)
    assert (lateness.counts[0], sum(lateness.counts)) == (2, 3)
