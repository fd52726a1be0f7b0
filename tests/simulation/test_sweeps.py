"""One fault at a time, everywhere; in the usual run, at places that the commit draws."""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

import pytest

from turnkeeper.actors.simulation import (
    ConversationWorld,
    Fault,
    JournalStrike,
    Options,
    silent_logs,
)
from turnkeeper.runtime.testing import Run, Strike, simulate

from ..drawn import drawn

FREEZE_S = 40.0
"""Longer than a lease."""
STEPS_MAX = 30_000
STEPS_DRAWN = 20
CALLS_DRAWN = 12


def world(
    strike: JournalStrike | None = None, *, struck_s: float | None = None
) -> ConversationWorld:
    """A small world with two nodes, tools and extras, and no fault but the one that strikes."""
    return ConversationWorld(Options.plain(), strike=strike, struck_s=struck_s)


@cache
def plain_run() -> tuple[Run, int]:
    """A run without a fault that has something to break, and how many journal calls it has."""
    with silent_logs():
        for seed in range(200):
            plain = world()
            run = simulate(plain, seed=seed, steps_max=STEPS_MAX)
            run.check()
            wanted = {"turn completed", "turn interrupted", "tool started", "confirmation_given"}
            is_rich = wanted <= run.marks.keys() and min(run.node_steps.values()) > 80
            if is_rich and run.steps < 700:
                return run, plain.journal_calls
    pytest.fail("no seed gives a run that is worth a sweep")


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["crash", "freeze", "cancel"])
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_node_may_be_struck_at_every_step(
    kind: Literal["crash", "freeze", "cancel"], node: str
) -> None:
    run, _ = plain_run()
    with silent_logs():
        for step in drawn(range(1, run.node_steps[node] + 1), STEPS_DRAWN):
            strike = Strike(kind, node, step, FREEZE_S)
            simulate(
                world(struck_s=FREEZE_S), seed=run.seed, strike=strike, steps_max=STEPS_MAX
            ).check()


@pytest.mark.sweep
@pytest.mark.parametrize("fault", get_args(Fault))
def test_every_journal_call_may_fail_in_each_way(fault: Fault) -> None:
    run, calls = plain_run()
    with silent_logs():
        for call in drawn(range(1, calls + 1), CALLS_DRAWN):
            strike = JournalStrike(fault, call)
            simulate(world(strike), seed=run.seed, steps_max=STEPS_MAX).check()
