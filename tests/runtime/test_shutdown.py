"""Leaving a runtime: intake closed, drained within a grace, stopped in order, the rest said."""

import os
import signal
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.runtime import (
    Actor,
    ActorEnded,
    ActorFailed,
    Directive,
    NotDelivered,
    Runtime,
    Stuck,
    Supervision,
)
from turnkeeper.runtime.lowlevel import OneShot
from turnkeeper.runtime.testing import (
    Backend,
    Node,
    Probe,
    Simulation,
    Strike,
    Tape,
    VirtualClock,
    no_leaks,
    settle,
    simulate,
)

from .actors import Add, Counter, Fail, Get, Run, block

pytestmark = pytest.mark.anyio


async def test_messages_between_actors_still_arrive_while_it_drains() -> None:
    probe: Probe[object] = Probe()

    class Forwarder(Actor):
        async def receive(self, message: object) -> None:
            await anyio.lowlevel.checkpoint()
            await target.tell(message)

    async with Runtime() as runtime:
        target = runtime.spawn(lambda: probe, name="target")
        ref = runtime.spawn(Forwarder, name="forwarder")
        for number in range(50):
            await ref.tell(number)
    assert probe.received == list(range(50))
    assert runtime.dead_letters.count == 0


async def test_intake_from_outside_is_closed_while_it_drains() -> None:
    heard: list[NotDelivered] = []
    gate = anyio.Event()

    async def knock(ref: object) -> None:
        with pytest.raises(NotDelivered) as caught:
            await ref.ask(Get())  # type: ignore[attr-defined]
        heard.append(caught.value)
        gate.set()

    async with anyio.create_task_group() as tasks, Runtime() as runtime:
        busy = runtime.spawn(Counter, name="busy")
        idle = runtime.spawn(Counter, name="idle")
        await idle.ask(Get())

        async def wait(_: Actor) -> None:
            await gate.wait()

        async def knock_later() -> None:
            await settle()
            await knock(idle)

        await busy.tell(Run(wait))
        tasks.start_soon(knock_later)
    assert "shutting down" in heard[0].reason


async def test_what_is_not_done_within_the_grace_is_named() -> None:
    clock = VirtualClock()

    async with (
        anyio.create_task_group() as tasks,
        Runtime(ports=clock.ports(), drain_s=5.0, stop_s=5.0) as runtime,
    ):
        ref = runtime.spawn(Counter, name="busy")
        await block(ref)  # for ever
        for _ in range(3):
            await ref.tell(Add())

        async def effect() -> None:
            await anyio.sleep_forever()

        async def start(actor: Actor) -> None:
            actor.context.start_effect(effect, name="unending")

        other = runtime.spawn(Counter, name="other")
        await other.ask(Run(start))
        tasks.start_soon(pass_time, clock)

    left = {each.actor: each for each in runtime.left_undone}
    assert left["busy"].messages == 3
    assert left["busy"].was_handling
    assert left["other"].effects == ("unending",)
    assert runtime.dead_letters.count == 3


async def test_an_order_to_stop_is_no_message_that_is_left_undone() -> None:
    clock = VirtualClock()

    async with (
        anyio.create_task_group() as tasks,
        Runtime(ports=clock.ports(), drain_s=1.0, stop_s=10.0) as runtime,
    ):
        ref = runtime.spawn(Counter, name="busy")
        await block(ref)  # for ever
        tasks.start_soon(ref.stop)
        await settle()
        tasks.start_soon(pass_time, clock)

    assert [(each.messages, each.was_handling) for each in runtime.left_undone] == [(0, True)]


async def pass_time(clock: VirtualClock) -> None:
    for _ in range(30):
        await clock.advance(1.0)


async def test_an_ask_that_is_still_on_the_way_ends_with_the_runtime() -> None:
    clock = VirtualClock()
    heard: list[BaseException] = []

    async with (
        anyio.create_task_group() as tasks,
        Runtime(ports=clock.ports(), drain_s=1.0, stop_s=1.0) as runtime,
    ):
        ref = runtime.spawn(Counter, name="busy")
        await block(ref)

        async def ask() -> None:
            with pytest.raises(NotDelivered) as caught:
                await ref.ask(Get())
            heard.append(caught.value)

        tasks.start_soon(ask)
        await settle()
        tasks.start_soon(pass_time, clock)
    assert len(heard) == 1


async def test_a_cancelled_block_still_drains_and_stops_its_actors() -> None:
    log: list[object] = []

    class Last(Counter):
        async def on_stop(self) -> None:
            await anyio.lowlevel.checkpoint()
            self.log.append("stopped")

    with anyio.CancelScope() as scope:
        async with Runtime() as runtime:
            ref = runtime.spawn(lambda: Last(log), name="counter")
            await ref.tell("told")
            scope.cancel()
            await anyio.sleep_forever()
    assert log == ["told", "stopped"]


async def test_an_error_in_the_block_passes_through_after_the_actors_have_stopped() -> None:
    log: list[object] = []

    async def run() -> None:
        async with Runtime() as runtime:
            ref = runtime.spawn(lambda: Counter(log), name="counter")
            await ref.tell("told")
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await run()
    assert log == ["told"]


async def test_no_task_is_left_when_a_runtime_has_been_left(anyio_backend_name: str) -> None:
    if anyio_backend_name == "trio":
        from trio.lowlevel import current_root_task

        def count() -> int:
            waiting, tasks = [current_root_task()], 0
            while waiting:
                task = waiting.pop()
                assert task is not None
                tasks += 1
                for nursery in task.child_nurseries:
                    waiting.extend(nursery.child_tasks)
            return tasks
    else:
        import asyncio

        def count() -> int:
            return len(asyncio.all_tasks())

    before = count()
    async with Runtime() as runtime:
        gates = [await block(runtime.spawn(Counter, name=str(number))) for number in range(10)]
        assert count() >= before + 10
        for gate in gates:
            gate.set()
    await settle()
    assert count() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_block_as_if_it_had_ended_there(number: signal.Signals) -> None:
    log: list[object] = []
    async with Runtime(handle_signals=True) as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")
        await ref.tell("told")
        os.kill(os.getpid(), number)
        await anyio.sleep_forever()
    assert runtime.stopped_by == number
    assert log == ["told"]


async def test_a_second_signal_cuts_the_draining_short() -> None:
    clock = VirtualClock()
    async with (
        anyio.create_task_group() as tasks,
        Runtime(ports=clock.ports(), handle_signals=True, stop_s=1.0) as runtime,
    ):
        ref = runtime.spawn(Counter, name="counter")
        await block(ref)

        async def signal_again() -> None:
            while runtime._draining is None:
                await anyio.lowlevel.checkpoint()
            os.kill(os.getpid(), signal.SIGTERM)
            while not runtime._draining.cancel_called:
                await anyio.lowlevel.checkpoint()
            await clock.advance(2.0)

        tasks.start_soon(signal_again)
        os.kill(os.getpid(), signal.SIGTERM)
        await anyio.sleep_forever()
    assert clock.monotonic() < 1_005.0, "the grace of 5 s was not waited for"
    assert runtime.left_undone[0].actor == "counter"


async def test_a_leaked_actor_fails_its_test() -> None:
    async with Runtime() as runtime:
        runtime.spawn(Counter, name="from before")
        with no_leaks(runtime):
            await runtime.spawn(Counter, name="tidy").stop()

        def leak() -> None:
            with no_leaks(runtime):
                runtime.spawn(Counter, name="leaked")

        with pytest.raises(AssertionError, match="leaked"):
            leak()


async def test_a_runtime_is_entered_once() -> None:
    runtime = Runtime()
    async with runtime:
        pass
    with pytest.raises(RuntimeError, match="once"):
        async with runtime:
            pass


async def test_a_runtime_that_is_never_left_says_so() -> None:
    runtime = Runtime()
    await runtime.__aenter__()
    with pytest.warns(ResourceWarning, match="never left"):
        runtime.__del__()
    await runtime.__aexit__(None, None, None)


async def test_busy_actors_share_one_patience_and_still_stop_in_reverse() -> None:
    clock = VirtualClock()
    log: list[tuple[str, float]] = []

    class Busy(Counter):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        async def on_stop(self) -> None:
            log.append((self.name, clock.monotonic() - left_at))

    class Parent(Busy):
        async def on_start(self) -> None:
            await block(self.context.spawn(lambda: Busy("child"), name="child"))

    left_at = 0.0
    async with (
        anyio.create_task_group() as tasks,
        Runtime(ports=clock.ports(), drain_s=1.0, stop_s=5.0) as runtime,
    ):
        for name in ("0", "1", "2", "3"):
            await block(runtime.spawn(partial(Busy, name), name=name))
        runtime.spawn(lambda: Parent("parent"), name="parent")
        await settle()
        left_at = clock.monotonic()
        tasks.start_soon(clock.advance, 60.0)
    assert [name for name, _ in log] == ["child", "parent", "3", "2", "1", "0"]
    assert all(after <= 6.5 for _, after in log), "drain_s, stop_s, and no more for each of them"


async def test_a_second_signal_leaves_busy_actors_no_patience() -> None:
    clock = VirtualClock()

    async def signal_twice() -> None:
        await settle()
        signal.raise_signal(signal.SIGTERM)
        await settle()
        signal.raise_signal(signal.SIGTERM)
        await settle()
        await clock.advance(0.1)

    async with anyio.create_task_group() as tasks:
        ports = clock.ports()
        async with Runtime(ports=ports, handle_signals=True, drain_s=60.0, stop_s=60.0) as runtime:
            for number in range(3):
                await block(runtime.spawn(Counter, name=str(number)))
            tasks.start_soon(signal_twice)
            await anyio.sleep_forever()
    assert runtime.stopped_by is signal.SIGTERM


async def test_an_actor_in_backoff_that_spawns_on_its_start_recovers_while_draining() -> None:
    class Parent(Counter):
        starts = 0

        async def on_start(self) -> None:
            Parent.starts += 1
            self.child = self.context.spawn(Counter, name="child")

        async def receive(self, message: object) -> object:
            if isinstance(message, Get):
                return await self.child.ask(message)
            return await super().receive(message)

    clock = VirtualClock()
    counts: list[object] = []
    async with anyio.create_task_group() as tasks, Runtime(ports=clock.ports()) as runtime:
        parent = runtime.spawn(Parent, name="parent")

        async def ask() -> None:
            count = await parent.ask(Get())
            counts.append(count)

        with pytest.raises(ActorFailed):
            await parent.ask(Fail(ValueError("once")))
        tasks.start_soon(ask)
        await settle()
        tasks.start_soon(clock.advance, 1.0)
    assert counts == [0]
    assert Parent.starts == 2


async def test_nothing_is_spawned_from_outside_while_the_runtime_is_left() -> None:
    refused: list[ActorEnded] = []

    class Spawning(Counter):
        async def on_stop(self) -> None:
            try:
                runtime.spawn(Counter, name="late")
            except ActorEnded as error:
                refused.append(error)

    async with Runtime() as runtime:
        runtime.spawn(Spawning, name="spawning")
    assert len(refused) == 1


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_an_actor_that_was_stuck_for_a_while_leaves_no_task_of_the_runtime_behind(
    backend: Backend,
) -> None:
    async def world(simulation: Simulation) -> None:
        async def swallow(_: Actor) -> None:
            with anyio.CancelScope(shield=True):
                await simulation.sleep(10.0)

        async def serve(node: Node) -> None:
            async with Runtime(ports=node.ports, stop_s=1.0, kill_s=1.0) as runtime:
                ref = runtime.spawn(Counter, name="slow")
                await ref.tell(Run(swallow))
                await simulation.sleep(1.0)
                with runtime.events.subscribe(Stuck) as stuck:
                    await ref.stop()
                    assert (await anext(stuck)).actor == "slow"
                simulation.mark("stuck")
                await simulation.sleep(20.0)  # it has ended by now

        await simulation.start("node", serve).wait_until_ended()

    for seed in range(60):
        run = simulate(world, seed=seed, backend=backend, policy="pct")
        run.check()
        assert run.marks["stuck"]


async def test_a_worker_that_waits_for_a_job_is_not_cancelled_when_the_runtime_is_left() -> None:
    """It just ends: a cancellation takes several times as long."""
    async with Runtime() as runtime:
        counter = runtime.spawn(Counter, name="counter")
        await counter.ask(Get())
        await settle()
        (parked,) = runtime._system.pool.parked

    assert not parked.is_killed
    assert not runtime._system.pool.workers


async def test_a_failure_that_cannot_be_shown_does_not_take_the_place_of_a_cancellation() -> None:
    class Detached:
        def __repr__(self) -> str:
            raise ValueError("its session is gone")

    with anyio.CancelScope() as scope:
        async with Runtime(supervision=Supervision(otherwise=Directive.ESCALATE)) as runtime:
            ref = runtime.spawn(Counter, name="counter")
            await ref.tell(Fail(KeyError(Detached())))
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert isinstance(runtime._failure, KeyError)


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_handler_that_is_cancelled_after_a_pause_has_ended_before_on_stop(
    backend: Backend,
) -> None:
    """The whole process may stand still between its cancellation and the step that delivers it."""

    class Waits(Actor):
        def __init__(self, simulation: Simulation) -> None:
            self.simulation = simulation
            self.is_handling = False

        async def receive(self, message: object) -> None:
            del message
            self.is_handling = True
            try:
                await self.context.wait_for(OneShot[None]())
            finally:
                self.is_handling = False

        async def on_stop(self) -> None:
            self.simulation.require(not self.is_handling, "one at a time", "it stops while it runs")

    async def world(simulation: Simulation) -> None:
        async def serve(node: Node) -> None:
            async with Runtime(ports=node.ports, stop_s=1.0) as runtime:
                ref = runtime.spawn(lambda: Waits(simulation), name="waits")
                await ref.tell("wait")
                await simulation.sleep(0.1)
                await ref.stop()

        await simulation.start("node", serve).wait_until_ended()

    steps = simulate(world, backend=backend, tape=Tape(played={})).node_steps["node"]
    for step in range(1, steps + 1):
        strike = Strike("freeze", "node", step, seconds=0.1)
        for seed in range(30):
            run = simulate(world, seed=seed, backend=backend, policy="random", strike=strike)
            run.check()
