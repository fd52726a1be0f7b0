"""One fault at a time, everywhere: not drawn, but all of them."""

from __future__ import annotations

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

SEED = 2
FREEZE_S = 40.0
"""Longer than a lease."""
STEPS_MAX = 30_000


def world(strike: JournalStrike | None = None) -> ConversationWorld:
    """A small world with two nodes, tools and extras, and no fault but the one that strikes."""
    return ConversationWorld(Options.plain(), strike=strike)


def plain_run() -> tuple[Run, int]:
    """The run without a fault, and how many journal calls it has."""
    plain = world()
    with silent_logs():
        run = simulate(plain, seed=SEED, steps_max=STEPS_MAX)
    run.check()
    return run, plain.journal_calls


def test_the_run_that_is_swept_has_something_to_break() -> None:
    run, calls = plain_run()

    assert {"turn completed", "turn interrupted", "tool started"} <= run.marks.keys()
    assert calls > 20
    assert all(steps > 50 for steps in run.node_steps.values())


@pytest.mark.parametrize("kind", ["crash", "freeze", "cancel"])
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_node_may_be_struck_at_every_step(
    kind: Literal["crash", "freeze", "cancel"], node: str
) -> None:
    run, _ = plain_run()
    with silent_logs():
        for step in range(1, run.node_steps[node] + 1):
            strike = Strike(kind, node, step, FREEZE_S)
            simulate(world(), seed=SEED, strike=strike, steps_max=STEPS_MAX).check()


@pytest.mark.parametrize("fault", get_args(Fault))
def test_every_journal_call_may_fail_in_each_way(fault: Fault) -> None:
    _, calls = plain_run()
    with silent_logs():
        for call in range(1, calls + 1):
            strike = JournalStrike(fault, call)
            simulate(world(strike), seed=SEED, steps_max=STEPS_MAX).check()
