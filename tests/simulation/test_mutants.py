"""Does the search find what is there? Each planted fault, by the simulator or by its test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from turnkeeper.actors.simulation import INVARIANTS, ConversationWorld, silent_logs
from turnkeeper.actors.simulation._histories import HistoryWorld
from turnkeeper.actors.simulation._owner import OwnerWorld
from turnkeeper.actors.simulation._readers import ReaderWorld
from turnkeeper.runtime.testing import Simulation, simulate

from ..drawn import drawn
from . import planting
from .mutants import MUTANTS, PROMISES, Mutant, planted

ROOT = Path(__file__).parents[2]
STEPS_MAX = 60_000
SEEDS_MAX = 1_500
"""Within how many seeds the simulator has to find a fault; most take less than a tenth of them."""
SMALL_SEEDS_MAX = 300
OF_THE_SIMULATOR = {"world", "deadlock", "budget", "orphan", "trace"}

ALL = [*MUTANTS, *PROMISES]
SIMULATED = [mutant for mutant in ALL if not mutant.test]
TESTED = [mutant for mutant in ALL if mutant.test]


def test_every_fault_can_still_be_planted() -> None:
    lost = []
    for mutant in ALL:
        try:
            with planted(mutant):
                pass
        except (AssertionError, AttributeError) as error:
            lost.append(f"{mutant.name}: {error}")
    assert not lost, "the code has moved on; adapt these in mutants.py:\n" + "\n".join(lost)


@pytest.mark.sweep
@pytest.mark.parametrize("mutant", drawn(SIMULATED, 4), ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_found(mutant: Mutant) -> None:
    with planted(mutant), silent_logs():
        for seed in range(SEEDS_MAX):
            world = ConversationWorld(mutant.options)
            if not simulate(world, seed=seed, steps_max=STEPS_MAX, is_told=False).ok:
                return
    pytest.fail(f"not found in {SEEDS_MAX} seeds: {mutant.name}")


@pytest.mark.parametrize(
    ("name", "world", "invariant"),
    [
        ("two turns that wait for each other are not refused", HistoryWorld, "M3"),
        ("a call stays pending though another response has followed", HistoryWorld, "V7"),
        (
            "a log whose turn ended counts as finished though a message waits",
            OwnerWorld,
            "P4",
        ),
        ("a reader waits here for what is written elsewhere", ReaderWorld, "P1"),
        ("an owner begins without sending its readers to the journal", ReaderWorld, "P1"),
    ],
)
def test_a_small_world_finds_it(
    name: str,
    world: Callable[[Simulation], HistoryWorld | OwnerWorld | ReaderWorld],
    invariant: str,
) -> None:
    (mutant,) = (each for each in ALL if each.name == name)
    with planted(mutant), silent_logs():
        for seed in range(SMALL_SEEDS_MAX):
            run = simulate(lambda simulation: world(simulation).play(), seed=seed, is_told=False)
            if run.broken is not None:
                assert run.broken.invariant == invariant
                return
    pytest.fail(f"not found in {SMALL_SEEDS_MAX} seeds: {name}")


@pytest.mark.sweep
@pytest.mark.parametrize("mutant", drawn(TESTED, 1), ids=lambda mutant: mutant.name)
def test_what_the_simulator_cannot_see_a_test_finds(mutant: Mutant) -> None:
    options = ["-p", planting.__name__, "-p", "no:cacheprovider", "--backend", "asyncio"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, mutant.test],
        cwd=ROOT,
        # make keeps the root off sys.path, where the plugin is.
        env={**os.environ, planting.NAME: mutant.name, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "FAILED" in done.stdout, done.stdout


def test_the_page_has_every_planted_fault_with_what_finds_it() -> None:
    text = (ROOT / "docs/simulation.md").read_text()
    table = text.partition("| planted fault | breaks |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]

    assert [row[0] for row in rows] == [mutant.name for mutant in ALL], "make seek writes it"
    for mutant, (_, breaks, cpu_s, test) in zip(ALL, rows, strict=True):
        found = re.findall(r"`(\w+)`", breaks)
        assert set(found) <= INVARIANTS.keys() | OF_THE_SIMULATOR, mutant.name
        assert bool(found) == bool(cpu_s), mutant.name
        file, _, name = mutant.test.partition("::")
        assert test == (f"[{name}](../{file})" if name else ""), mutant.name
        assert found or test, f"nothing finds {mutant.name!r}"


def test_the_page_has_every_invariant() -> None:
    text = (ROOT / "docs/simulation.md").read_text()

    assert dict(re.findall(r"^\| ([A-Z]\d+) \| (.*) \|$", text, re.MULTILINE)) == INVARIANTS
