"""The simulator on asyncio: its own orders, in virtual time, with native cancellation."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio
import pytest

from turnkeeper.runtime import Actor, Message, Ref, Runtime, TurnkeeperError
from turnkeeper.runtime._pool import Worker
from turnkeeper.runtime.lowlevel import Bell, make_bell
from turnkeeper.runtime.testing import (
    Node,
    Policy,
    Probe,
    Run,
    Simulation,
    Strike,
    Tape,
    shrink,
    simulate,
)

from .planting import planted

World = Callable[[Simulation], Awaitable[None]]
POLICIES: list[Policy] = ["random", "pct", "batch"]


def _orders(order: list[str], steps: int = 4) -> World:
    """Run two tasks of a few steps each, and write down the order in which they took them."""

    async def world(simulation: Simulation) -> None:
        async def walk(name: str) -> None:
            for n in range(steps):
                await asyncio.sleep(0)
                order.append(f"{name}{n}")
                simulation.note(f"{name}{n}")

        async with anyio.create_task_group() as group:
            group.start_soon(walk, "a")
            group.start_soon(walk, "b")

    return world


def _run_orders(seed: int, policy: Policy, tape: Tape | None = None) -> tuple[Run, str]:
    order: list[str] = []
    run = simulate(_orders(order), seed=seed, policy=policy, tape=tape, backend="asyncio")
    run.check()
    return run, " ".join(order)


# --- repeating -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_and_its_tape_give_the_same_run_and_others_give_others(
    policy: Policy,
) -> None:
    runs = {seed: _run_orders(seed, policy) for seed in range(30)}

    for seed, (run, order) in runs.items():
        again, same_order = _run_orders(seed, policy)
        assert (again.trace, same_order) == (run.trace, order)
        played, same_order = _run_orders(0, "random", Tape.from_json(run.tape.to_json()))
        assert (played.trace, same_order) == (run.trace, order)
    assert len({order for _, order in runs.values()}) > 2


async def cancels_many(simulation: Simulation) -> None:
    """Cancel many scopes at once, the order of which anyio and asyncio leave to sets."""

    async def serve(node: Node) -> None:
        async with Runtime(ports=node.ports) as runtime:
            probes = [runtime.spawn(Probe[str], name=f"p{n}") for n in range(4)]

            async def hang(n: int) -> None:
                try:
                    with anyio.CancelScope():
                        await anyio.sleep(1_000.0)
                finally:
                    simulation.note(f"{n} ends")

            async with anyio.create_task_group() as group, asyncio.TaskGroup() as native:
                for n in range(12):
                    group.start_soon(hang, n)
                    native.create_task(probes[n % 4].tell("hello"))
                await node.ports.sleep(0.1)
                group.cancel_scope.cancel()

    await simulation.start("n", serve).wait_until_ended()


def test_runs_are_the_same_in_every_process() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from turnkeeper.runtime.testing import simulate\n"
        "from tests.runtime.test_simulate_asyncio import cancels_many\n"
        "print([simulate(cancels_many, seed=seed, backend='asyncio').trace for seed in range(8)])"
    )
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", code, root]
    found = {
        subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)
    }

    here = [simulate(cancels_many, seed=seed, backend="asyncio").trace for seed in range(8)]
    assert found == {f"{here}\n"}
    assert len(set(here)) == 8


def test_a_tape_of_zeros_is_the_order_of_asyncio_itself() -> None:
    simulated: list[str] = []
    real: list[str] = []

    async def world(order: list[str]) -> None:
        loop = asyncio.get_running_loop()
        gate = loop.create_future()

        async def walk(name: str) -> None:
            for n in range(3):
                await asyncio.sleep(0)
                order.append(f"{name}{n}")
                loop.call_soon(order.append, f"callback of {name}{n}")
            await gate
            order.append(f"{name} through the gate")

        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(walk(name))
            await asyncio.sleep(0.01)
            gate.set_result(None)

    asyncio.run(world(real))
    simulate(lambda _: world(simulated), tape=Tape(played={}), backend="asyncio").check()

    assert simulated == real


# --- time ----------------------------------------------------------------------------------------


def test_an_hour_takes_no_time_and_timers_run_in_their_order() -> None:
    seen: list[tuple[str, float]] = []

    async def world(simulation: Simulation) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(20.0, lambda: seen.append(("late", simulation.now())))
        loop.call_later(10.0, lambda: seen.append(("early", simulation.now())))
        loop.call_later(5.0, seen.append, ("never", 0.0)).cancel()
        with anyio.move_on_after(3_600.0):
            await anyio.sleep_forever()
        seen.append(("end", loop.time()))

    for seed in range(10):
        seen.clear()
        simulate(world, seed=seed, backend="asyncio").check()
        assert seen == [("early", 10.0), ("late", 20.0), ("end", 3_600.0)]


def test_time_goes_on_while_a_cancelled_task_cleans_up_under_a_shield() -> None:
    """Anyio tries to deliver the cancellation for as long as the task is there."""
    seen: list[float] = []

    async def world(simulation: Simulation) -> None:
        async def clean_up() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(60.0)
                seen.append(simulation.now())

        async with anyio.create_task_group() as group:
            group.start_soon(clean_up)
            await anyio.sleep(1.0)
            group.cancel_scope.cancel()

    run = simulate(world, backend="asyncio")

    run.check()
    assert seen == [61.0]
    assert run.steps < 50


def test_a_deadlock_a_livelock_and_an_error_are_found() -> None:
    async def deadlock(_: Simulation) -> None:
        await asyncio.get_running_loop().create_future()

    async def livelock(_: Simulation) -> None:
        for _step in range(100_000):
            await asyncio.sleep(0)

    async def error(_: Simulation) -> None:
        raise LookupError("lost")

    found = {
        world.__name__: simulate(world, backend="asyncio", steps_max=500).broken
        for world in (deadlock, livelock, error)
    }

    assert {name: broken and broken.invariant for name, broken in found.items()} == {
        "deadlock": "deadlock",
        "livelock": "budget",
        "error": "world",
    }


# --- nodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["crash", "freeze", "cancel"])
def test_a_strike_hits_a_runtime_at_every_step_and_the_next_incarnation_serves(
    kind: Literal["crash", "freeze", "cancel"],
) -> None:
    async def world(simulation: Simulation) -> None:
        async def serve(node: Node) -> None:
            async with Runtime(ports=node.ports) as runtime:
                probe = runtime.spawn(Probe[str], name="probe")
                for _ in range(3):
                    await probe.tell("again")
                    await node.ports.sleep(0.1)

        await simulation.start("n", serve).wait_until_ended()
        last = simulation.start("n", serve)
        await last.wait_until_ended()
        simulation.require(last.error is None, "served", repr(last.error))

    plain = simulate(world, backend="asyncio")
    plain.check()
    for step in range(1, plain.node_steps["n"] + 1):
        struck = simulate(world, strike=Strike(kind, "n", step), backend="asyncio")
        struck.check()
        said = {"crash": "crashed", "freeze": "frozen", "cancel": "cancelled"}[kind]
        assert any(said in note for note in struck.notes)


# --- native cancellation -------------------------------------------------------------------------


def test_a_task_can_be_cancelled_natively_before_each_of_its_steps() -> None:
    ends: list[str] = []

    async def world(simulation: Simulation) -> None:
        async def serve(_: Node) -> None:
            try:
                for _step in range(5):
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                ends.append(f"cancelled at {simulation.steps}")
                raise

        await simulation.start("n", serve).wait_until_ended()

    plain = simulate(world, backend="asyncio")
    plain.check()
    for step in range(1, plain.node_steps["n"] + 1):
        simulate(world, strike=Strike("cancel_task", "n", step), backend="asyncio").check()

    assert len(set(ends)) == 5


def test_the_tape_cancels_tasks_natively_if_asked_and_plays_it_again() -> None:
    async def world(simulation: Simulation) -> None:
        async def serve(_: Node) -> None:
            try:
                await asyncio.sleep(1.0)
            except asyncio.CancelledError:
                simulation.mark("cancelled")
                raise

        await simulation.start("n", serve).wait_until_ended()

    runs = [
        simulate(world, seed=seed, backend="asyncio", native_cancels=True) for seed in range(30)
    ]

    struck = next(run for run in runs if run.marks["cancelled"])
    played = simulate(
        world,
        tape=Tape.from_json(struck.tape.to_json()),
        backend="asyncio",
        native_cancels=True,
    )
    assert played.trace == struck.trace
    assert any(not run.marks["cancelled"] for run in runs)
    assert not any(simulate(world, seed=seed, backend="asyncio").marks for seed in range(30))


def test_trio_has_no_native_cancellation() -> None:
    with pytest.raises(ValueError, match="use asyncio"):
        simulate(_orders([]), native_cancels=True)
    with pytest.raises(ValueError, match="use asyncio"):
        simulate(_orders([]), strike=Strike("cancel_task", "n", 1))


# --- a fault that only asyncio shows -------------------------------------------------------------


@dataclass(frozen=True)
class Work(Message[int]):
    number: int


class Innocent(Actor[Work]):
    """Takes a while to answer. Nothing cancels it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    async def receive(self, message: Work) -> int:
        for _ in range(2):
            await _pause(self._simulation, "innocent")
        return message.number


class Starter(Actor[Work]):
    """Starts an effect, and cancels it at the moment at which it ends by itself."""

    async def receive(self, message: Work) -> int:
        async def work() -> None:
            await self.context.ports.sleep(0.01)

        effect = self.context.start_effect(work, name="work")
        await self.context.ports.sleep(0.01)
        effect.cancel()
        return message.number


async def _pause(simulation: Simulation, label: str) -> None:
    """Wait for nothing, or as long as all others do: so that much is due at once."""
    await anyio.sleep(0.01 * simulation.draw(label, 2))


@dataclass(frozen=True)
class Errands:
    """Cancels effects that are about to end, beside actors that have nothing to do with them."""

    may_fail: bool = False
    """True if asks may end with an error, as they may under native cancellation."""

    async def __call__(self, simulation: Simulation) -> None:
        async def serve(node: Node) -> None:
            async with Runtime(ports=node.ports) as runtime:
                starters = [runtime.spawn(Starter, name=f"starter{n}") for n in range(2)]
                innocents = [
                    runtime.spawn(lambda: Innocent(simulation), name=f"innocent{n}")
                    for n in range(2)
                ]
                async with anyio.create_task_group() as group:
                    for ref in (*starters, *innocents):
                        group.start_soon(self._ask, simulation, ref)

        node = simulation.start("n", serve)
        with anyio.move_on_after(500.0) as patience:
            await node.wait_until_ended()
        simulation.require(not patience.cancelled_caught, "ends", "the node did not end")
        if not self.may_fail:
            simulation.require(node.error is None, "served", repr(node.error))

    async def _ask(self, simulation: Simulation, ref: Ref[Work]) -> None:
        for number in range(4):
            await _pause(simulation, "asker")
            try:
                await ref.ask(Work(number), timeout=30.0)
            except TurnkeeperError as error:
                simulation.require(self.may_fail, "innocent", f"{ref.name} failed: {error!r}")


late_kills = Errands()


def test_a_kill_that_comes_late_is_found_within_a_thousand_seeds() -> None:
    """A worker went on in a cancelled scope: the next job it took was cancelled."""
    mend = "if self.is_killed:\n                    return"
    with planted(Worker, "_serve", mend, "pass"):
        failing = next(
            run
            for seed in range(1_000)
            if not (run := simulate(late_kills, seed=seed, backend="asyncio")).ok
        )
        smallest = shrink(late_kills, failing)
        again = simulate(late_kills, tape=smallest.tape, backend="asyncio")

    assert failing.broken is not None
    assert failing.broken.invariant == "innocent"
    assert smallest.tape.interesting < failing.tape.interesting
    assert again.trace == smallest.trace


def test_a_runtime_and_its_asks_end_whichever_task_is_cancelled_at_whichever_step() -> None:
    world = Errands(may_fail=True)
    plain = simulate(world, tape=Tape(played={}), backend="asyncio")
    plain.check()

    for step in range(1, plain.node_steps["n"] + 1):
        strike = Strike("cancel_task", "n", step)
        simulate(world, tape=plain.tape, strike=strike, backend="asyncio").check()
    for seed in range(100):
        simulate(world, seed=seed, backend="asyncio", native_cancels=True).check()


def test_no_kill_reaches_a_job_that_it_is_not_meant_for() -> None:
    for seed in range(120):
        simulate(late_kills, seed=seed, backend="asyncio").check()


def test_a_task_that_fails_outside_of_its_function_is_a_finding() -> None:
    """A scope that is left open fails the task when anyio closes its own."""

    async def world(simulation: Simulation) -> None:
        async def serve(_: Node) -> None:
            anyio.CancelScope().__enter__()

        await simulation.start("n", serve).wait_until_ended()

    run = simulate(world, backend="asyncio")

    assert run.broken is not None
    assert run.broken.invariant == "world"
    assert "cancel scope" in run.broken.detail


async def _wait_at(bell: Bell) -> None:
    await bell.wait()


def test_a_node_that_crashes_as_it_rings_a_bell_holds_up_no_bell_of_another_node() -> None:
    """In an asyncio loop of its own, all bells that are rung in one pass share a callback."""

    async def world(simulation: Simulation) -> None:
        async def ring_at(node: Node, seconds: float) -> None:
            bell = make_bell()
            async with anyio.create_task_group() as group:
                group.start_soon(_wait_at, bell)
                await simulation.sleep(seconds)
                bell.ring()
                if node.name == "crashes":
                    await node.die()
            simulation.mark(node.name)

        simulation.start("crashes", lambda node: ring_at(node, 1.0))
        await simulation.start("later", lambda node: ring_at(node, 2.0)).wait_until_ended()

    run = simulate(world, backend="asyncio")

    run.check()
    assert set(run.marks) == {"later"}


def test_a_task_that_ends_as_a_bell_wakes_it_is_no_orphan() -> None:
    async def world(simulation: Simulation) -> None:
        async def serve(_: Node) -> None:
            bell = make_bell()
            async with anyio.create_task_group() as group:
                group.start_soon(_wait_at, bell)
                await simulation.sleep(1.0)
                bell.ring()
            simulation.mark("woken")

        await simulation.start("n", serve).wait_until_ended()

    run = simulate(world, backend="asyncio")

    run.check()
    assert run.marks["woken"]
