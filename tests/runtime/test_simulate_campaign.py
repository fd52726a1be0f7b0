"""Campaigns over many seeds, and the tapes that they keep."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from pathlib import Path

import anyio
import pytest

from turnkeeper.runtime import Ports
from turnkeeper.runtime.testing import Run, Simulation, Tape, TapeFile, run_campaign, simulate
from turnkeeper.runtime.testing._campaign import _serve, _Settings


async def racy(simulation: Simulation) -> None:
    """Lose an update in some orders."""
    value = 0

    async def add() -> None:
        nonlocal value
        seen = value
        await simulation.delay("thinks", 0.5)
        value = seen + 1

    async def wait() -> None:
        await simulation.delay("waits", 0.95, 10.0)
        simulation.mark("waited")
        await add()

    async with anyio.create_task_group() as group:
        group.start_soon(add)
        group.start_soon(wait)
    simulation.require(value == 2, "sum", f"{value} of 2")


async def fine(simulation: Simulation) -> None:
    await simulation.delay("waits")
    simulation.mark("here")


def _first_failing() -> int:
    return next(seed for seed in itertools.count(0) if not simulate(racy, seed=seed).ok)


@pytest.mark.alone
@pytest.mark.parametrize("processes", [1, 3])
def test_a_campaign_stops_at_the_lowest_seed_that_fails_and_makes_it_smaller(
    processes: int, tmp_path: Path
) -> None:
    first = _first_failing()
    path = tmp_path / "new folder" / "tape.json"

    campaign = run_campaign(racy, seeds=400, processes=processes, tape=path)

    assert not campaign.ok
    assert campaign.processes == processes
    assert campaign.failure is not None
    assert campaign.failure.seed == first
    assert campaign.failure.broken is not None
    assert campaign.failure.tape.interesting < simulate(racy, seed=first).tape.interesting
    assert first < campaign.runs < 400
    assert campaign.tape == path
    with pytest.raises(AssertionError, match="1 of 2"):
        campaign.check()
    assert "the story" in str(campaign)
    played = TapeFile.read(path).play(racy)
    assert played.trace == campaign.failure.trace


@pytest.mark.parametrize("processes", [1, 2])
def test_a_campaign_runs_as_many_seeds_as_it_is_told(processes: int, tmp_path: Path) -> None:
    campaign = run_campaign(
        fine, seeds=50, first_seed=7, processes=processes, tape=tmp_path / "none.json"
    )

    campaign.check()
    assert campaign.runs == 50
    assert campaign.marks == {"here": 50}
    assert campaign.tape is None
    assert not (tmp_path / "none.json").exists()


def test_a_campaign_runs_for_as_many_seconds_as_it_is_told() -> None:
    clock = itertools.count(100.0, 1.0)

    campaign = run_campaign(fine, seconds=10.0, ports=Ports(monotonic=lambda: next(clock)))

    campaign.check()
    assert 0 < campaign.runs < 100
    assert campaign.seconds >= 10.0


def test_a_campaign_without_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget"):
        run_campaign(fine)


@pytest.mark.parametrize("seeds", [0, -1, "200"])
def test_a_number_of_seeds_that_would_run_nothing_is_refused(seeds: int) -> None:
    with pytest.raises(ValueError, match=r"seeds is .*; it takes a whole number from 1 on"):
        run_campaign(fine, seeds=seeds)


def test_a_mark_that_no_run_reaches_fails_the_campaign() -> None:
    campaign = run_campaign(fine, seeds=5, must_reach={"here", "there"})

    assert campaign.unreached == ["there"]
    with pytest.raises(AssertionError, match="never reached: there"):
        campaign.check()


def test_a_world_that_does_not_repeat_fails_the_campaign() -> None:
    runs = itertools.count()

    async def world(simulation: Simulation) -> None:
        simulation.note(f"run {next(runs)}")

    campaign = run_campaign(world, seeds=1)

    assert campaign.failure is not None
    assert campaign.failure.broken is not None
    assert campaign.failure.broken.invariant == "trace"


def test_a_campaign_beside_other_threads_forks_no_process() -> None:
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    try:
        campaign = run_campaign(fine, seeds=5, processes=2)
    finally:
        is_over.set()
        thread.join()

    campaign.check()
    assert campaign.processes == 1


@pytest.mark.alone
def test_a_process_that_dies_ends_the_campaign_with_an_error() -> None:
    here = os.getpid()

    async def world(_: Simulation) -> None:
        if os.getpid() != here:
            os._exit(3)

    with pytest.raises(RuntimeError, match="died"):
        run_campaign(world, seeds=20, processes=2)


@pytest.mark.alone
def test_a_process_whose_parent_was_killed_ends_without_a_traceback() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    settings = _Settings("asyncio", native_cancels=False, steps_max=100)
    process = context.Process(target=_serve, args=(there, [], fine, settings))
    here.send(range(1))
    here.close()
    process.start()
    process.join()
    assert process.exitcode == 0


def test_an_error_of_a_task_of_the_world_is_a_finding() -> None:
    async def world(simulation: Simulation) -> None:
        async def fail() -> None:
            raise LookupError("lost")

        simulation.start_soon(fail)
        await anyio.sleep(1.0)

    run = simulate(world)

    assert run.broken is not None
    assert "LookupError: lost" in run.broken.detail


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"seed": 1, "backend": "curio", "policy": "pct", "tape": {}}', "nothing"]
)
def test_a_file_without_a_tape_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tape.json"
    path.write_text(text)

    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        TapeFile.read(path)


def test_a_tape_file_keeps_what_it_takes_to_play_it(tmp_path: Path) -> None:
    run: Run = simulate(racy, seed=3, backend="asyncio", policy="pct", native_cancels=True)
    path = tmp_path / "tape.json"

    TapeFile.of(run).write(path)
    read = TapeFile.read(path)

    assert (read.seed, read.backend, read.policy, read.native_cancels) == (
        3,
        "asyncio",
        "pct",
        True,
    )
    assert isinstance(read.tape, Tape)
    assert read.play(racy).trace == run.trace
