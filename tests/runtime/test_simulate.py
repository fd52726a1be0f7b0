"""The simulator: one step at a time, decided by a seed or a tape, under virtual time."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
import trio
import trio.testing
from outcome import Value

from turnkeeper.runtime import Runtime
from turnkeeper.runtime.lowlevel import OneShot
from turnkeeper.runtime.testing import (
    Backend,
    Node,
    NodeCrashed,
    NotAnswered,
    Policy,
    Probe,
    Run,
    Simulation,
    SimulatorUnsupported,
    Strike,
    Tape,
    VirtualClock,
    shrink,
    simulate,
)
from turnkeeper.runtime.testing import _on_trio as scheduler
from turnkeeper.runtime.testing import _simulate as turns

World = Callable[[Simulation], Awaitable[None]]
POLICIES: list[Policy] = ["random", "pct", "batch"]


async def _steps(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


async def _forever(node: Node) -> None:
    await anyio.sleep_forever()


def _orders(order: list[str]) -> World:
    """Two tasks of four steps each; the order in which they took them."""

    async def world(simulation: Simulation) -> None:
        async def walk(name: str) -> None:
            for n in range(4):
                await anyio.lowlevel.checkpoint()
                order.append(f"{name}{n}")
                simulation.note(f"{name}{n}")

        async with anyio.create_task_group() as group:
            group.start_soon(walk, "a")
            group.start_soon(walk, "b")

    return world


def _run_orders(seed: int, policy: Policy, tape: Tape | None = None) -> tuple[Run, str]:
    order: list[str] = []
    run = simulate(_orders(order), seed=seed, policy=policy, tape=tape)
    return run, " ".join(order)


# --- the schedule --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_run_and_others_give_others(policy: Policy) -> None:
    runs = {seed: _run_orders(seed, policy) for seed in range(40)}

    for seed, (run, order) in runs.items():
        again, same_order = _run_orders(seed, policy)
        assert (again.trace, same_order) == (run.trace, order)
    assert len({order for _, order in runs.values()}) > 2
    assert len({run.trace for run, _ in runs.values()}) > 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tape_plays_the_run_that_it_is_of(policy: Policy) -> None:
    for seed in range(20):
        run, order = _run_orders(seed, policy)
        played, same_order = _run_orders(0, "random", Tape.from_json(run.tape.to_json()))

        assert same_order == order
        assert played.trace == run.trace


def test_a_tape_of_zeros_serves_the_one_that_waits_longest() -> None:
    _, order = _run_orders(0, "random", Tape(played={}))

    assert order == "a0 b0 a1 b1 a2 b2 a3 b3"


def test_one_task_may_get_far_ahead_of_another() -> None:
    """A scheduler that runs each task once in a round could never give one of them three steps."""
    for policy in ("random", "pct"):
        orders = [_run_orders(seed, policy)[1] for seed in range(60)]
        assert any("a0 a1 a2 a3 b0" in order for order in orders), policy


def test_the_seed_chooses_the_policy_where_none_is_given() -> None:
    assert {simulate(_orders([]), seed=seed).policy for seed in range(20)} == set(POLICIES)


# --- time ----------------------------------------------------------------------------------------


def test_an_hour_takes_no_time_and_everybody_sees_the_same_hour() -> None:
    seen: list[float] = []

    async def world(simulation: Simulation) -> None:
        async def serve(node: Node) -> None:
            began = node.ports.monotonic(), node.ports.now()
            await node.ports.sleep(3_600.0)
            seen.extend([node.ports.monotonic() - began[0], node.ports.now() - began[1]])

        await simulation.start("n", serve).wait_until_ended()
        seen.append(simulation.now())

    run = simulate(world)

    run.check()
    assert seen == pytest.approx([3_600.0] * 3)
    assert run.seconds == pytest.approx(3_600.0)


def test_a_clock_that_drifts_drifts_for_its_node_alone() -> None:
    seen: list[float] = []

    async def world(simulation: Simulation) -> None:
        async def serve(node: Node) -> None:
            await node.ports.sleep(110.0)
            seen.extend([node.ports.monotonic(), simulation.now()])

        await simulation.start("n", serve, clock_rate=1.1).wait_until_ended()

    simulate(world).check()
    assert seen == pytest.approx([110.0, 100.0])


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan"), True, "1", None])
def test_a_clock_that_stands_still_or_jumps_is_refused(rate: Any) -> None:  # noqa: ANN401 - wrong
    async def world(simulation: Simulation) -> None:
        with pytest.raises(ValueError, match=r"clock_rate is .*a finite number above 0"):
            simulation.start("n", _forever, clock_rate=rate)
        assert not simulation.nodes

    simulate(world).check()


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_everything_that_is_due_before_a_sleeper_comes_before_it(backend: Backend) -> None:
    seen: list[tuple[str, float]] = []

    async def world(simulation: Simulation) -> None:
        def note(name: str) -> None:
            seen.append((name, simulation.now()))

        async def sleep(name: str, seconds: float) -> None:
            await simulation.sleep(seconds)
            note(name)

        async def wait_until_idle() -> None:
            await anyio.wait_all_tasks_blocked()
            note("idle")

        async with anyio.create_task_group() as group:
            for n in range(3):
                group.start_soon(sleep, "sleeper", 1.0 + n)
            with anyio.move_on_after(1.5):
                await anyio.sleep_forever()
            note("deadline")
            if backend == "trio":  # anyio polls for it on asyncio, in virtual time
                group.start_soon(wait_until_idle)
            with simulation.move_on_after(1.0) as scope:
                await sleep("late", 5.0)
            assert scope.cancelled_caught
            note("given up")

    simulate(world, backend=backend).check()
    idle = [("idle", 1.5)] if backend == "trio" else []
    assert seen == [
        ("sleeper", 1.0),
        ("deadline", 1.5),
        *idle,
        ("sleeper", 2.0),
        ("given up", 2.5),
        ("sleeper", 3.0),
    ]


def test_a_call_from_another_thread_comes_before_the_time_jumps() -> None:
    seen: list[float] = []

    async def world(simulation: Simulation) -> None:
        token = trio.lowlevel.current_trio_token()
        for is_idempotent in (False, True):
            await simulation.sleep(1.0)
            token.run_sync_soon(lambda: seen.append(simulation.now()), idempotent=is_idempotent)
            await simulation.sleep(1.0)

    simulate(world).check()
    assert seen == [1.0, 3.0]


def test_a_wait_of_trios_own_returns_what_the_task_was_woken_with() -> None:
    got: list[object] = []

    async def wait() -> None:
        got.append(await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED))

    async def world(simulation: Simulation) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait)
            await simulation.sleep(1.0)
            first, second, third = sorted(nursery.child_tasks, key=lambda task: task._counter)
            trio.lowlevel.reschedule(first)
            trio.lowlevel.reschedule(second, Value("a value"))
            trio.lowlevel.reschedule(third)
            with pytest.raises(AssertionError, match="woken once"):
                trio.lowlevel.reschedule(third)

    simulate(world).check()
    assert sorted(got, key=str) == [None, None, "a value"]


def test_the_loop_of_another_thread_keeps_its_tasks_and_takes_none() -> None:
    has_passed, is_over = threading.Event(), threading.Event()

    async def pass_on() -> None:
        while not is_over.is_set():
            await trio.lowlevel.checkpoint()
            has_passed.set()

    async def world(simulation: Simulation) -> None:
        for _ in range(3):
            has_passed.clear()
            simulation.require(has_passed.wait(timeout=60), "passed", "the other loop has stopped")
            await anyio.lowlevel.checkpoint()

    other = threading.Thread(target=trio.run, args=(pass_on,), daemon=True)
    other.start()
    try:
        simulate(world, backend="trio").check()
    finally:
        is_over.set()
        other.join(timeout=60)
    assert not other.is_alive()


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_what_is_to_be_called_at_the_end_is_called_when_all_is_over(backend: Backend) -> None:
    order: list[str] = []

    async def world(simulation: Simulation) -> None:
        simulation.at_end.append(lambda: order.append("the end"))

        async def wait() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                order.append("a task that was left")

        simulation.start_soon(wait)
        await simulation.sleep(1.0)

    simulate(world, backend=backend).check()
    assert order == ["a task that was left", "the end"]


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_simulations_in_several_threads_are_those_of_one(backend: Backend) -> None:
    async def world(simulation: Simulation) -> None:
        async with anyio.create_task_group() as tasks:
            for count in range(1, 6):
                tasks.start_soon(_steps, count)

    def trace(seed: int) -> object:
        return simulate(world, seed=seed, backend=backend).trace

    alone = [trace(seed) for seed in range(40)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(trace, range(40))) == alone


def test_a_simulation_that_gets_no_turn_beside_another_thread_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child that was forked while another thread simulated would wait for ever."""
    monkeypatch.setattr(turns, "_TURN_S_MAX", 0.0)
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with turns._turn:
            is_held.set()
            may_go.wait(timeout=60)

    async def world(simulation: Simulation) -> None:
        await anyio.lowlevel.checkpoint()

    other = threading.Thread(target=hold, daemon=True)
    other.start()
    assert is_held.wait(timeout=60)
    with pytest.raises(SimulatorUnsupported, match="another thread has simulated for 0 s"):
        simulate(world)
    may_go.set()
    other.join(timeout=60)
    simulate(world).check()


def test_threads_and_blocking_calls_are_tasks_in_virtual_time() -> None:
    found: list[object] = []

    async def world(simulation: Simulation) -> None:
        async def serve(node: Node) -> None:
            done = anyio.Event()
            node.ports.start_thread("t", done.set)
            found.append(await node.ports.blocking(lambda: 42))
            await done.wait()
            found.append(node.ports.ids.new())

        await simulation.start("n", serve).wait_until_ended()

    for seed in range(10):
        simulate(world, seed=seed).check()
    assert found[::2] == [42] * 10
    assert len(set(found[1::2])) == 10


def test_a_deadline_that_is_moved_into_the_past_holds_while_tasks_never_rest() -> None:
    async def world(simulation: Simulation) -> None:
        async def spin() -> None:
            while True:
                await anyio.lowlevel.checkpoint()

        await anyio.sleep(1.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(spin)
            with anyio.CancelScope() as scope:
                await anyio.lowlevel.checkpoint()
                scope.deadline = anyio.current_time() - 0.5
                await spin()
            tasks.cancel_scope.cancel()

    run = simulate(world, policy="random", steps_max=2_000)
    assert run.ok, run
    assert run.seconds == 1.0


# --- nodes ---------------------------------------------------------------------------------------


def test_a_crashed_node_takes_no_further_step_not_even_to_clean_up() -> None:
    done: list[str] = []

    async def world(simulation: Simulation) -> None:
        async def serve(node: Node) -> None:
            try:
                await anyio.sleep(10.0)
                done.append("went on")
            finally:
                done.append("cleaned up" if simulation.is_over else "cleaned up too early")

        node = simulation.start("n", serve)
        await anyio.sleep(1.0)
        node.crash()
        with pytest.raises(NodeCrashed):
            await node.call(anyio.sleep_forever)
        await anyio.sleep(100.0)
        with pytest.raises(NodeCrashed):
            node.check_alive()

    simulate(world).check()
    assert done == ["cleaned up"]


def test_a_call_ends_at_once_when_its_node_crashes_and_the_next_incarnation_serves() -> None:
    answers: list[str] = []

    async def world(simulation: Simulation) -> None:
        async def serve(node: Node) -> None:
            await anyio.sleep_forever()

        async def hang() -> str:
            await anyio.sleep(1_000.0)
            return "late"

        async def answer() -> str:
            return "here"

        node = simulation.start("n", serve)
        await anyio.sleep(1.0)
        simulation.start_soon(_after(5.0, node.crash))
        with pytest.raises(NodeCrashed):
            await node.call(hang)
        assert simulation.now() == pytest.approx(6.0)
        simulation.start("n", serve)
        await anyio.sleep(1.0)
        newest = simulation.nodes["n"]
        assert newest.incarnation == 2
        answers.append(await newest.call(answer))

    simulate(world).check()
    assert answers == ["here"]


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_call_that_is_not_answered_in_time_is_cancelled_in_its_node(backend: Backend) -> None:
    done: list[object] = []

    async def world(simulation: Simulation) -> None:
        async def work(seconds: float) -> str:
            try:
                await anyio.sleep(seconds)
            except BaseException:
                done.append(("cancelled", simulation.now()))
                raise
            return "done"

        node = simulation.start("n", _forever)
        await anyio.sleep(1.0)
        done.append(await node.call(partial(work, 2.0), 3.0))
        with pytest.raises(NotAnswered):
            await node.call(partial(work, 10.0), 3.0)
        done.append(simulation.now())
        await anyio.sleep(10.0)  # the limit of the first call passes, too
        done.append(await node.call(partial(work, 1.0)))

    simulate(world, backend=backend).check()
    assert done == ["done", 6.0, ("cancelled", 6.0), "done"]


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_call_leaves_nothing_in_the_context_of_the_next_one(backend: Backend) -> None:
    """A node's task takes the next call when it is done, unless a call has changed its context."""
    tasks: list[int] = []
    found: list[str] = []
    user: ContextVar[str] = ContextVar("user", default="nobody")

    async def world(simulation: Simulation) -> None:
        async def look(name: str | None = None) -> None:
            await anyio.sleep(1.0)
            tasks.append(anyio.get_current_task().id)
            found.append(user.get())
            if name is not None:
                user.set(name)

        node = simulation.start("n", _forever)
        await anyio.sleep(1.0)
        for name in (None, None, "left behind", None):
            await node.call(partial(look, name))
        user.set("the caller")
        await node.call(look)

    simulate(world, backend=backend).check()
    assert found == ["nobody"] * 4 + ["the caller"]
    assert tasks[0] == tasks[1] == tasks[2]
    assert len(set(tasks)) == 3


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_each_call_in_a_task_that_takes_several_has_a_priority_of_its_own(backend: Backend) -> None:
    """Otherwise, under the policy `pct`, a task would win against another in each call, or none."""
    runs: list[list[str]] = []

    async def world(simulation: Simulation) -> None:
        simulation.scheduler._changes = set()  # they, too, would let another task win
        tasks: set[int] = set()
        order: list[str] = []
        gate: OneShot[None] = OneShot()

        async def arrive() -> None:
            tasks.add(anyio.get_current_task().id)
            order.append("call")

        async def rival() -> None:
            nonlocal gate
            while True:
                await gate.wait()
                gate = OneShot()
                order.append("rival")

        node = simulation.start("n", _forever)
        simulation.start_soon(rival)
        await anyio.sleep(1.0)
        for _ in range(6):
            gate.set(None)
            await node.call(arrive)
            await anyio.sleep(1.0)
        assert len(tasks) == 1, "one task takes all calls"
        runs.append(order[::2])

    for seed in range(10):
        simulate(world, seed=seed, policy="pct", backend=backend).check()
    assert any(len(set(first)) == 2 for first in runs)


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_the_call_after_one_that_ended_just_when_it_was_given_up_is_made(backend: Backend) -> None:
    answers: list[str] = []

    async def world(simulation: Simulation) -> None:
        async def work(seconds: float) -> str:
            await anyio.sleep(seconds)
            return "done"

        node = simulation.start("n", _forever)
        await anyio.sleep(1.0)
        with contextlib.suppress(NotAnswered):
            await node.call(partial(work, 3.0), 3.0)
        answers.append(await node.call(partial(work, 1.0)))

    for seed in range(20):
        simulate(world, seed=seed, backend=backend).check()
    assert answers == ["done"] * 20


def _after(seconds: float, do: Callable[[], None]) -> Callable[[], Coroutine[Any, Any, None]]:
    async def later() -> None:
        await anyio.sleep(seconds)
        do()

    return later


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_crashed_node_may_sleep_while_it_is_cleaned_up(backend: Backend) -> None:
    seen: list[str] = []

    async def world(simulation: Simulation) -> None:
        async def main(node: Node) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await node.sleep(2.0)
                    seen.append(node.name)

        for name in ("n1", "n2"):
            simulation.start(name, main)
        await simulation.sleep(1.0)
        for node in simulation.nodes.values():
            node.crash()

    simulate(world, backend=backend).check()
    assert sorted(seen) == ["n1", "n2"]


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_sleep_that_was_cancelled_in_a_frozen_node_is_woken_once(backend: Backend) -> None:
    """Its task has not left the wait yet when the sleep would have been over."""
    seen: list[tuple[bool, float]] = []

    async def world(simulation: Simulation) -> None:
        async def main(node: Node) -> None:
            with simulation.move_on_after(1.0) as scope:
                await node.sleep(2.0)
            seen.append((scope.cancelled_caught, simulation.now()))
            await node.sleep(1.0)
            seen.append((False, simulation.now()))

        node = simulation.start("n", main)
        await simulation.sleep(0.5)
        node.freeze(5.0)
        await node.wait_until_ended()

    simulate(world, backend=backend).check()
    assert seen == [(True, 5.5), (False, 6.5)]


def test_time_goes_on_for_others_while_a_node_is_frozen() -> None:
    ticks: dict[str, list[float]] = {"n1": [], "n2": []}

    async def world(simulation: Simulation) -> None:
        async def serve(node: Node) -> None:
            for _ in range(4):
                await anyio.sleep(1.0)
                ticks[node.name].append(simulation.now())

        simulation.start("n1", serve)
        simulation.start("n2", serve)
        await anyio.sleep(1.5)
        simulation.nodes["n1"].freeze(10.0)
        await anyio.sleep(30.0)

    simulate(world).check()
    assert ticks["n2"] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert ticks["n1"] == pytest.approx([1.0, 11.5, 12.5, 13.5])


def test_a_task_of_a_crashed_node_that_waits_for_a_call_is_ended_and_not_cancelled() -> None:
    waiting: list[OneShot[Any]] = []

    async def world(simulation: Simulation) -> None:
        node = simulation.start("n1", _forever)
        await simulation.sleep(1.0)
        await node.call(anyio.lowlevel.checkpoint)
        await simulation.sleep(1.0)
        waiting.extend(worker.next for worker in node._idle)
        node.crash()

    simulate(world).check()

    assert [each.is_done for each in waiting] == [True]


def test_a_cancelled_node_cleans_up() -> None:
    done: list[str] = []

    async def world(simulation: Simulation) -> None:
        async def serve(node: Node) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                done.append("cleaned up")

        node = simulation.start("n", serve)
        await anyio.sleep(1.0)
        node.cancel()
        await node.wait_until_ended()
        assert node.has_ended

    simulate(world).check()
    assert done == ["cleaned up"]


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_node_that_is_cancelled_before_its_first_step_ends_at_its_first_wait(
    backend: Backend,
) -> None:
    done: list[str] = []

    async def world(simulation: Simulation) -> None:
        async def serve(_: Node) -> None:
            done.append("begun")
            await anyio.sleep(1.0)
            done.append("went on")

        node = simulation.start("n", serve)
        node.cancel()
        await node.wait_until_ended()
        assert node.error is None

    simulate(world, backend=backend).check()
    assert done == ["begun"]


@pytest.mark.parametrize("kind", ["crash", "freeze", "cancel"])
def test_a_strike_hits_before_every_step_that_it_may_be_given(
    kind: Literal["crash", "freeze", "cancel"],
) -> None:
    async def world(simulation: Simulation) -> None:
        async def serve(node: Node) -> None:
            await _steps(5)

        await simulation.start("n", serve).wait_until_ended()
        simulation.note("over")

    plain = simulate(world)
    plain.check()
    notes = set()
    for step in range(1, plain.node_steps["n"] + 1):
        strike = Strike(kind, "n", step)
        struck = simulate(world, strike=strike)
        struck.check()
        said = {"crash": "crashed", "freeze": "frozen", "cancel": "cancelled"}[kind]
        (note,) = [note for note in struck.notes if said in note]
        notes.add(note)
    assert len(notes) == plain.node_steps["n"]


def test_a_runtime_with_actors_survives_being_crashed_and_is_cleaned_up_in_the_end() -> None:
    async def world(simulation: Simulation) -> None:
        async def serve(node: Node) -> None:
            async with Runtime(ports=node.ports) as runtime:
                probe = runtime.spawn(Probe[str], name="probe")
                while True:
                    await probe.tell("again")
                    await node.ports.sleep(0.1)

        for _ in range(3):
            node = simulation.start("n", serve)
            await anyio.sleep(1.05)
            node.crash()
        simulation.start("n", serve)
        await anyio.sleep(1.0)

    for seed in range(10):
        simulate(world, seed=seed).check()


# --- what is found -------------------------------------------------------------------------------


def test_the_first_broken_invariant_ends_the_run_and_says_where() -> None:
    reached: list[int] = []

    async def world(simulation: Simulation) -> None:
        count = 0

        def check() -> None:
            simulation.require(count < 3, "few", f"{count} are too many")
            simulation.require(count < 3, "few, too", "not the first that is broken")

        simulation.checks.append(check)
        for count in range(10):
            reached.append(count)
            await anyio.sleep(1.0)
        simulation.broken("late", "never reached")

    run = simulate(world)

    assert run.broken is not None
    assert run.broken.invariant == "few"
    assert run.broken.at_s == pytest.approx(4.0)  # before the step after the one that broke it
    assert max(reached) == 3, "the run went on"
    assert "3 are too many" in str(run)
    with pytest.raises(AssertionError, match="few"):
        run.check()


def test_an_error_of_the_world_is_a_finding() -> None:
    async def world(_: Simulation) -> None:
        raise LookupError("lost")

    run = simulate(world)

    assert run.broken is not None
    assert run.broken.invariant == "world"
    assert "LookupError: lost" in run.broken.detail


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
@pytest.mark.parametrize("place", ["world", "task", "node"])
def test_an_error_that_is_no_exception_is_a_finding_too(place: str, backend: Backend) -> None:
    """As that of `pytest.raises`, if nothing is raised in it."""

    async def expects(node: Node | None = None) -> None:
        with pytest.raises(LookupError):
            await anyio.sleep(1)

    async def world(simulation: Simulation) -> None:
        simulation.start("crashed", _forever).crash()
        if place == "world":
            await expects()
        elif place == "task":
            simulation.start_soon(expects)
        else:
            simulation.start("a", expects)
        await anyio.sleep(5)

    run = simulate(world, backend=backend)

    assert run.broken is not None
    assert run.broken.invariant == "world"
    assert "DID NOT RAISE" in run.broken.detail


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
@pytest.mark.parametrize("place", ["world", "node"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_the_run_as_itself(
    error: type[BaseException], place: str, backend: Backend
) -> None:
    """A group with it inside would end one test only, and would be a traceback of a command."""

    async def interrupted(node: Node) -> None:
        await anyio.sleep(1)
        raise error

    async def world(simulation: Simulation) -> None:
        simulation.start("crashed", _forever).crash()
        node = simulation.start("a", interrupted if place == "node" else _forever)
        if place == "world":
            await interrupted(node)
        await anyio.sleep(5)

    with pytest.raises(error):
        simulate(world, backend=backend)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of trio's nurseries
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_an_error_of_a_check_is_a_finding(backend: Backend) -> None:
    async def world(simulation: Simulation) -> None:
        def check() -> None:
            assert simulation.now() < 1, "it is late"

        simulation.checks.append(check)
        await anyio.sleep(2)
        await anyio.sleep(2)

    run = simulate(world, backend=backend)
    gc.collect()

    assert run.broken is not None
    assert run.broken.invariant == "harness"
    assert "it is late" in run.broken.detail


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of trio's nurseries
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_world_that_does_not_end_when_cancelled_is_given_up(backend: Backend) -> None:
    async def world(simulation: Simulation) -> None:
        with contextlib.suppress(GeneratorExit):
            while True:
                with contextlib.suppress(anyio.get_cancelled_exc_class()):
                    await anyio.sleep_forever()

    run = simulate(world, backend=backend, steps_max=200, is_told=False)
    gc.collect()

    assert run.broken is not None
    assert run.broken.invariant == "deadlock"


def test_a_deadlock_is_found_and_not_waited_for() -> None:
    async def world(_: Simulation) -> None:
        await anyio.Event().wait()

    run = simulate(world)

    assert run.broken is not None
    assert run.broken.invariant == "deadlock"


def test_a_livelock_ends_at_the_budget() -> None:
    async def world(_: Simulation) -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    run = simulate(world, steps_max=500)

    assert run.broken is not None
    assert run.broken.invariant == "budget"


def test_a_task_that_outlives_its_node_is_an_orphan() -> None:
    async def world(simulation: Simulation) -> None:
        async with anyio.create_task_group() as elsewhere:

            async def serve(node: Node) -> None:
                elsewhere.start_soon(anyio.sleep, 100.0)

            await simulation.start("n", serve).wait_until_ended()
            simulation.scheduler.end()
            elsewhere.cancel_scope.cancel()

    run = simulate(world)

    assert run.broken is not None
    assert run.broken.invariant == "orphan"


def _racy(simulation: Simulation) -> Awaitable[None]:
    """Two clients that read, wait, and write: one update may be lost."""

    async def world() -> None:
        value = 0

        async def add() -> None:
            nonlocal value
            await simulation.delay("thinks")
            seen = value
            await _steps(2)
            value = seen + 1

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(add)
            for _ in range(3):
                group.start_soon(simulation.delay, "noise")
        simulation.require(value == 3, "count", f"{value} of 3")

    return world()


def test_a_failing_tape_is_shrunk_to_the_decisions_that_matter() -> None:
    def is_failing(seed: int) -> bool:
        return not simulate(_racy, seed=seed).ok

    seed = next(seed for seed in range(100) if is_failing(seed))
    run = simulate(_racy, seed=seed)

    smallest = shrink(_racy, run)

    assert smallest.broken is not None
    assert smallest.broken.invariant == "count"
    assert smallest.tape.interesting < run.tape.interesting
    played = simulate(_racy, tape=Tape.from_json(smallest.tape.to_json()))
    assert played.trace == smallest.trace
    with pytest.raises(ValueError, match="held"):
        shrink(_racy, simulate(_orders([])))


@pytest.mark.parametrize("switch", ["native_cancels", "is_told"])
def test_a_switch_that_is_neither_true_nor_false_is_refused(switch: str) -> None:
    no: Any = {switch: "no"}
    with pytest.raises(TypeError, match=f"{switch} is 'no'; it takes a bool"):
        simulate(_orders([]), backend="asyncio", **no)


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', '{"a": [-1]}', '{"a": [true]}', "nothing"])
def test_what_is_no_tape_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        Tape.from_json(text)


def test_marks_are_counted() -> None:
    async def world(simulation: Simulation) -> None:
        simulation.mark("here")
        simulation.mark("here")

    assert simulate(world).marks == {"here": 2}


# --- trio ----------------------------------------------------------------------------------------


def test_trio_still_has_what_the_simulator_uses() -> None:
    """When this fails, trio has changed: the error says what is gone."""
    scheduler.find_trio_parts()


def test_a_task_that_the_simulator_wakes_is_as_trio_would_leave_it() -> None:
    """When this fails, trio's `reschedule` has changed, and that of `_lean` has to follow."""
    module: Any = scheduler.find_trio_parts().module
    kind = module.Runner

    async def wait() -> None:
        await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)

    def wake(task: trio.lowlevel.Task, runners: Any) -> dict[str, Any]:  # noqa: ANN401 - trio's
        """Return what has changed about the task."""
        task.custom_sleep_data = "a lock"
        names = [name for each in type(task).__mro__ for name in getattr(each, "__slots__", ())]
        before = {name: getattr(task, name) for name in names if hasattr(task, name)}
        runners.reschedule(module.GLOBAL_RUN_CONTEXT.runner, task)
        after = {name: getattr(task, name) for name in before}
        changed = {name: after[name] for name in before if after[name] is not before[name]}
        changed["_next_send"] = None  # ours may differ; what it returns is tested above
        changed["_next_send_fn"] = changed["_next_send_fn"].__name__
        return changed

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            one, other = nursery.child_tasks
            assert wake(one, scheduler._lean(kind, module._NO_SEND)) == wake(other, kind)

    trio.run(main)


def test_a_trio_that_has_changed_is_refused_with_a_clear_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("trio._core._run._r")

    with pytest.raises(SimulatorUnsupported, match=r"trio \S+ lacks trio._core._run._r, which"):
        simulate(_orders([]))


def test_trio_is_as_it_was_after_a_run() -> None:
    parts = scheduler.find_trio_parts()
    before = parts.module._r, parts.module._ALLOW_DETERMINISTIC_SCHEDULING

    simulate(_orders([]))

    assert (parts.module._r, parts.module._ALLOW_DETERMINISTIC_SCHEDULING) == before


def test_a_task_that_yields_a_message_unknown_to_trio_is_told_so() -> None:
    @types.coroutine
    def wrong() -> Generator[str, None, None]:
        yield "a message of another library"

    async def world(simulation: Simulation) -> None:
        await simulation.sleep(1.0)
        with pytest.raises(TypeError, match="unrecognized yield message"):
            await wrong()
        await simulation.sleep(1.0)
        simulation.mark("went on")

    run = simulate(world)

    run.check()
    assert run.marks["went on"]


def test_a_step_counts_its_checkpoints_as_in_trio() -> None:
    async def world(simulation: Simulation) -> None:
        await simulation.sleep(1.0)
        with trio.testing.assert_checkpoints():
            await trio.lowlevel.checkpoint()
        with trio.testing.assert_checkpoints():
            await simulation.sleep(1.0)

    simulate(world).check()


def test_an_instrument_of_trio_is_refused_with_a_clear_sentence() -> None:
    """Trio said that it must be called from async context."""

    async def world(simulation: Simulation) -> None:
        with pytest.raises(SimulatorUnsupported, match="instruments do not work in a simulation"):
            trio.lowlevel.add_instrument(trio.abc.Instrument())

    simulate(world).check()


def test_without_trio_the_rest_can_be_used_and_simulate_says_what_it_needs() -> None:
    code = (
        "import sys; sys.modules['trio'] = None\n"
        "from turnkeeper.runtime.testing import VirtualClock, simulate\n"
        "try: simulate(lambda simulation: None)\n"
        "except RuntimeError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.home()
    )
    assert VirtualClock is not None
    assert done.stdout == (
        "simulate runs on trio, which is not installed: pip install 'turnkeeper[simulation]'\n"
    )
