"""The simulated disk: the tasks in which its writes happen."""

from __future__ import annotations

from functools import partial

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.actors.simulation._disk import Disk
from turnkeeper.runtime.lowlevel import OneShot
from turnkeeper.runtime.testing import Backend, Simulation, simulate


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_each_write_in_a_task_that_makes_several_has_a_priority_of_its_own(
    backend: Backend,
) -> None:
    """Otherwise, under the policy `pct`, a task of the disk would overtake another always or never.

    Two writes begin at once, again and again, in the same two tasks.
    """
    runs: list[list[int]] = []

    async def world(simulation: Simulation) -> None:
        simulation.scheduler._changes = set()  # they, too, would let another task win
        disk = Disk(simulation)
        tasks: set[int] = set()
        order: list[int] = []

        async def write(landed: OneShot[None]) -> None:
            task = anyio.get_current_task().id
            tasks.add(task)
            order.append(task)
            landed.set(None)

        for _ in range(6):
            both: list[OneShot[None]] = [OneShot(), OneShot()]
            for landed in both:
                disk.start_soon(partial(write, landed))
            for landed in both:
                await landed.wait()
            await anyio.sleep(1.0)
        assert len(tasks) == 2, "two tasks make all writes"
        runs.append(order[::2])

    for seed in range(10):
        simulate(world, seed=seed, policy="pct", backend=backend).check()
    assert any(len(set(first)) == 2 for first in runs)


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_the_tasks_of_a_disk_end_with_it_and_are_not_cancelled(backend: Backend) -> None:
    async def world(simulation: Simulation) -> None:
        disk = Disk(simulation)
        before = len(simulation.scheduler.tasks())
        for _ in range(2):
            disk.start_soon(anyio.lowlevel.checkpoint)
        await anyio.sleep(1.0)
        assert len(simulation.scheduler.tasks()) == before + 2, "they wait for more"

        disk.end()
        await anyio.sleep(1.0)

        assert len(simulation.scheduler.tasks()) == before

    simulate(world, backend=backend).check()
