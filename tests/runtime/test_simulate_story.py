"""The story of a failing run: the messages, handlers and steps that led to the failure."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
import pytest

from turnkeeper.runtime import Actor, Delivery, Message, Ref, Runtime
from turnkeeper.runtime.testing import (
    Backend,
    Node,
    Run,
    Simulation,
    Strike,
    Tape,
    shrink,
    simulate,
)
from turnkeeper.runtime.testing._simulate import run_once
from turnkeeper.runtime.testing._story import ToldTape

World = Callable[[Simulation], Awaitable[None]]
BACKENDS: list[Backend] = ["trio", "asyncio"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@dataclass(frozen=True)
class Add(Message[int]):
    amount: int


@dataclass(frozen=True)
class Read(Message[int]):
    pass


@dataclass(frozen=True)
class Write(Message[None]):
    value: int


class Store(Actor[Read | Write]):
    def __init__(self) -> None:
        self._value = 0

    def receive(self, message: Read | Write) -> int | None:
        if isinstance(message, Read):
            return self._value
        self._value = message.value
        return None


class Adder(Actor[Add]):
    """Reads, waits, and writes: an update may be lost. It has slots, as owners have."""

    __slots__ = ("_simulation", "_store")

    def __init__(self, store: Ref[Read | Write], simulation: Simulation) -> None:
        self._store = store
        self._simulation = simulation

    async def receive(self, message: Add) -> int:
        value = await self._store.ask(Read())
        if self._simulation.chance("the adder dawdles", 0.3):
            await self.context.ports.sleep(0.5)
        await self._store.ask(Write(value + message.amount))
        return value + message.amount


def on_a_node(serve: Callable[[Simulation, Runtime], Awaitable[None]]) -> World:
    """Return a world with one node, whose errors are findings."""

    async def world(simulation: Simulation) -> None:
        async def main(node: Node) -> None:
            async with Runtime(ports=node.ports) as runtime:
                await serve(simulation, runtime)

        node = simulation.start("n", main)
        await node.wait_until_ended()
        simulation.require(node.error is None, "served", repr(node.error))

    return world


async def _add_twice(simulation: Simulation, runtime: Runtime) -> None:
    store = runtime.spawn(Store, name="store")
    first, second = (
        runtime.spawn(partial(Adder, store, simulation), name=name) for name in ("ann", "bob")
    )
    await first.ask(Add(1))
    async with anyio.create_task_group() as group:
        group.start_soon(first.ask, Add(1))
        await simulation.delay("the second waits", 1.0, 0.1)
        group.start_soon(second.ask, Add(1))
    value = await store.ask(Read())
    simulation.require(value == 3, "sum", f"{value} of 3")


lost_update = on_a_node(_add_twice)


def _failing(world: World, backend: Backend, seeds: int = 300) -> Run:
    for seed in range(seeds):
        run = simulate(world, seed=seed, backend=backend)
        if not run.ok:
            return run
    raise AssertionError(f"none of {seeds} seeds fails")


def _texts(run: Run) -> list[str]:
    """Return the lines of a story without steps, times and wrapping."""
    text = "\n".join(run.story.splitlines()[1:])
    joined: list[str] = []
    for line in text.splitlines():
        if line.startswith(" " * 10):
            joined[-1] += f" {line.strip()}"
        elif not line.startswith("--"):
            joined.append(" ".join(line.replace("*", " ").split()[1:]))
    return joined


def _in_order(wanted: list[str], lines: list[str]) -> None:
    remaining = iter(lines)
    for each in wanted:
        assert any(each in line for line in remaining), f"{each!r} is missing in\n" + "\n".join(
            lines
        )


# --- what it tells -------------------------------------------------------------------------------


@each_backend
def test_the_story_tells_which_messages_were_handled_in_which_order(backend: Backend) -> None:
    smallest = shrink(lost_update, _failing(lost_update, backend))

    _in_order(
        [
            "store is spawned",
            "ann is spawned",
            "n.1 asks ann: Add(amount=1)",
            "ann begins Add(amount=1), asked by n.1",
            "ann asks store: Read()",
            "store begins Read(), asked by ann",
            "store answers Read() with 0",
            "ann gets 0 from store",
            "ann answers Add(amount=1) with 1",
            "ann gets 1 from store",
            "ann waits: await self.context.ports.sleep(0.5) [test_simulate_story.py:",
            "bob begins Add(amount=1), asked by ask",
            "bob gets 1 from store",
            "store begins Write(value=2), asked by bob",
            "store begins Write(value=2), asked by ann",
            "n.1 BROKEN: sum: 2 of 3",
        ],
        _texts(smallest),
    )


@each_backend
def test_only_the_decisions_that_mattered_are_marked(backend: Backend) -> None:
    smallest = shrink(lost_update, _failing(lost_update, backend))

    marked = [line for line in smallest.story.splitlines()[1:] if line[6:7] == "*"]
    decided = [line for line in marked if "the tape decides" in line or "goes first" in line]
    assert 0 < len(decided) == smallest.tape.interesting
    assert any("the adder dawdles: yes" in line for line in decided)


@each_backend
def test_a_story_is_at_most_79_columns_wide(backend: Backend) -> None:
    story = _failing(lost_update, backend).story

    assert story
    assert max(len(line) for line in story.splitlines()) <= 79


@each_backend
def test_a_fault_of_the_plainest_order_is_called_so(backend: Backend) -> None:
    async def world(simulation: Simulation) -> None:
        simulation.broken("always", "it never held")

    run = simulate(world, tape=Tape(played={}), backend=backend)

    assert "the tape decided nothing" in run.story
    assert "BROKEN: always: it never held" in run.story


@each_backend
def test_at_a_deadlock_the_story_says_where_each_task_and_handler_waits(backend: Backend) -> None:
    class Waiter(Actor[Read]):
        async def receive(self, message: Read) -> None:
            gate = anyio.Event()
            await gate.wait()

    async def serve(_: Simulation, runtime: Runtime) -> None:
        waiter = runtime.spawn(Waiter, name="waiter")

        async def client() -> None:
            await waiter.ask(Read())

        async with anyio.create_task_group() as group:
            group.start_soon(client)

    run = simulate(on_a_node(serve), backend=backend)

    assert run.broken is not None
    assert run.broken.invariant == "deadlock"
    _, _, waits = run.story.partition("where each task and handler waits:\n")
    told = " ".join(waits.split())
    assert "world: await node.wait_until_ended()" in told
    assert "n.1: async with anyio.create_task_group() as group:" in told
    assert "client: await waiter.ask(Read())" in told
    assert "waiter: await gate.wait()" in told


@each_backend
def test_timers_effects_failures_restarts_and_dead_letters_are_told(backend: Backend) -> None:
    class Busy(Actor[str]):
        async def on_start(self) -> None:
            self.context.timers.once(4.0, "wake up")

        async def receive(self, message: str) -> None:
            if message == "wake up":
                self.context.start_effect(self._work, name="work")
            elif message == "done":
                raise ValueError("too much")

        async def _work(self) -> None:
            await self.context.ports.sleep(0.1)
            await self.context.ref.tell("done")
            await anyio.sleep_forever()

    async def serve(simulation: Simulation, runtime: Runtime) -> None:
        busy = runtime.spawn(Busy, name="busy")
        await runtime.ports.sleep(5.0)
        await busy.stop()
        await busy.tell("too late")
        simulation.broken("end", "of the story")

    _in_order(
        [
            "busy is spawned",
            "busy a timer fires: 'wake up'",
            "busy begins 'wake up', from a timer",
            "busy starts the effect work",
            "busy:work the effect begins",
            "busy:work waits: await self.context.ports.sleep(0.1)",
            "busy:work tells busy: 'done'",
            "busy begins 'done', told by busy:work",
            "busy raises ValueError: too much at 'done'",
            "busy fails: ValueError: too much:",
            "busy:work is cancelled",
            "busy is made anew",
            "busy has started again: restart 1",
            "busy has stopped",
            "busy never gets 'too late': it has stopped",
        ],
        _texts(simulate(on_a_node(serve), backend=backend)),
    )


@each_backend
def test_a_batch_is_told_message_by_message(backend: Backend) -> None:
    class Batch(Actor[Read]):
        batch_max = 3

        async def receive_batch(self, deliveries: Sequence[Delivery[Read]]) -> None:
            for number, delivery in enumerate(deliveries):
                delivery.reply(number)

    async def serve(simulation: Simulation, runtime: Runtime) -> None:
        batch = runtime.spawn(Batch, name="batch")
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(batch.ask, Read())
        simulation.broken("end", "of the story")

    _in_order(
        [
            "batch begins Read(), asked by ask",
            "batch begins Read(), asked by ask#2",
            "batch answers Read() with 0",
            "batch answers Read() with 1",
            "batch has handled 2 messages",
        ],
        _texts(simulate(on_a_node(serve), tape=Tape(played={}), backend=backend)),
    )


@each_backend
def test_a_strike_is_told_as_the_act_of_the_simulator(backend: Backend) -> None:
    async def world(simulation: Simulation) -> None:
        async def serve(_: Node) -> None:
            await anyio.sleep(1.0)

        await simulation.start("n", serve).wait_until_ended()
        simulation.broken("end", "of the story")

    run = simulate(world, strike=Strike("freeze", "n", 2), backend=backend)

    _in_order(["simulator n.1 frozen for 60.000 s", "n.1 ends"], _texts(run))


def test_a_long_story_shows_its_end_and_what_the_tape_decided() -> None:
    async def world(simulation: Simulation) -> None:
        for number in range(500):
            if number == 100:
                simulation.draw("the hundredth", 2)
            simulation.note(f"line {number}")
            await anyio.lowlevel.checkpoint()
        simulation.broken("end", "of the story")

    run = simulate(world, tape=Tape(played={"the hundredth": [1]}))

    texts = _texts(run)
    assert any("the hundredth: yes" in text for text in texts)
    assert any("line 99" in text for text in texts)
    assert any("line 499" in text for text in texts)
    assert not any("line 200" in text for text in texts)
    assert "lines in the plainest order" in run.story
    assert len(run.story.splitlines()) < 200


# --- what telling leaves alone -------------------------------------------------------------------


@each_backend
def test_a_run_that_is_told_takes_the_same_steps(backend: Backend) -> None:
    from turnkeeper.runtime.testing._simulate import Settings

    for seed in range(20):
        plain = simulate(lost_update, seed=seed, backend=backend, is_told=False)
        settings = Settings(seed, backend, None, False, 10_000, 40)
        told = run_once(
            lost_update, settings, plain.policy, ToldTape(seed, played=plain.tape.streams)
        )
        assert (told.trace, told.steps) == (plain.trace, plain.steps)
        assert told.story
        assert not plain.story


def test_the_runtime_is_unwrapped_after_a_story() -> None:
    before = Ref.ask, Ref.tell, Actor.receive

    assert _failing(lost_update, "trio").story

    assert (Ref.ask, Ref.tell, Actor.receive) == before


def test_a_world_that_does_not_repeat_is_told_so() -> None:
    runs = itertools.count()

    async def world(simulation: Simulation) -> None:
        simulation.note(f"run {next(runs)}")
        simulation.broken("always", "it never held")

    run = simulate(world)

    assert "played once more it took another course" in run.story
    assert max(len(line) for line in run.story.splitlines()) <= 79
