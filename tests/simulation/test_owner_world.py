"""The owner world itself: it raises no false alarm."""

from __future__ import annotations

from turnkeeper.actors.simulation._owner import OwnerWorld, _Effect
from turnkeeper.runtime.testing import Simulation, simulate


def test_an_agent_that_was_cancelled_and_goes_on_here_begins_no_step() -> None:
    """Seed 1035 of an earlier commit broke T12: its agent had lost its owner in the step before."""
    found: list[bool] = []

    async def begin_steps(simulation: Simulation) -> None:
        world = OwnerWorld(simulation)
        process = world._process
        await process.journal.__aenter__()
        await process.handle()
        world.oracles.waits_for = lambda _: "resume"  # type: ignore[method-assign]
        cancelled, running = (_Effect(process, process.handle, "turn t1") for _ in range(2))
        cancelled.cancel()
        for effect in (cancelled, running):
            world._check_step_begins(process, effect)
            found.append(simulation.first_broken is not None)

    simulate(begin_steps, is_told=False)

    assert found == [False, True]
