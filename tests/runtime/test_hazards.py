"""The ten hazards that bring other actor libraries down, each made to happen here."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.runtime import (
    Actor,
    ActorFailed,
    AskCycle,
    Backoff,
    Directive,
    Failure,
    MailboxSettings,
    Message,
    NotDelivered,
    Ref,
    Runtime,
    Stuck,
    Supervision,
    Terminated,
    Unavailable,
)
from turnkeeper.runtime._runtime import cells_of
from turnkeeper.runtime.testing import Probe, VirtualClock, settle

from .actors import Add, Counter, Fail, Get, Run, block

pytestmark = pytest.mark.anyio

AT_ONCE = Supervision(backoff=Backoff(first_s=0.0))


class Stopping(Counter):
    """Notes that it was stopped, after a wait."""

    async def on_stop(self) -> None:
        await settle()
        self.log.append("stopped")


class TestStrayNativeCancellation:
    """Hazard 1: `task.cancel()` by a library ends all siblings, and the group says nothing."""

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    async def test_it_fails_the_actor_whose_task_it_hit_and_no_other(self) -> None:
        async def cancel_myself(_: Actor) -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await anyio.sleep_forever()

        async with Runtime(supervision=AT_ONCE) as runtime:
            victim = runtime.spawn(Counter, name="victim")
            sibling = runtime.spawn(Counter, name="sibling")
            gate = await block(sibling)  # in the middle of a handler, on another worker

            with pytest.raises(ActorFailed) as failed:
                await victim.ask(Run(cancel_myself))

            assert isinstance(failed.value.__cause__, asyncio.CancelledError)
            gate.set()
            assert await sibling.ask(Get()) == 0
            assert await victim.ask(Get()) == 0, "it was restarted"

            async def look(_: Actor) -> int:
                await anyio.lowlevel.checkpoint()
                task = asyncio.current_task()
                assert task is not None
                return task.cancelling()

            for ref in (victim, sibling):
                assert await ref.ask(Run(look)) == 0, "and its worker has forgotten it"

    @pytest.mark.parametrize("resident", [False, True])
    async def test_an_escaped_cancelled_error_is_a_failure_like_any_other(
        self, resident: bool
    ) -> None:
        async def wait_for_cancelled_future(_: Actor) -> None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

        async with Runtime(supervision=AT_ONCE) as runtime:
            ref = runtime.spawn(Counter, name="victim", resident=resident)
            with pytest.raises(ActorFailed):
                await ref.ask(Run(wait_for_cancelled_future))
            assert await ref.ask(Get()) == 0

    async def test_it_may_hit_a_worker_at_rest_without_anyone_noticing(self) -> None:
        async with Runtime() as runtime:
            ref = runtime.spawn(Counter, name="counter")
            assert await ref.ask(Get()) == 0
            workers = [each for each in asyncio.all_tasks() if "Worker.main" in each.get_name()]
            assert len(workers) == 1

            workers[0].cancel()
            await settle()

            assert await ref.ask(Get()) == 0

    async def test_it_may_hit_a_worker_that_was_just_given_work(self) -> None:
        async with Runtime() as runtime:
            ref = runtime.spawn(Counter, name="counter")
            assert await ref.ask(Get()) == 0
            workers = [each for each in asyncio.all_tasks() if "Worker.main" in each.get_name()]

            await ref.tell(Add())
            workers[0].cancel()

            assert await ref.ask(Get()) == 1


async def test_clean_up_of_a_cancelled_actor_may_await() -> None:
    """Hazard 2: an `await` in the `finally` of a cancelled task raises at once."""
    cleaned: list[str] = []

    class Cleaner(Counter):
        async def on_stop(self) -> None:
            await anyio.lowlevel.checkpoint()
            cleaned.append("awaited")

    clock = VirtualClock()
    async with Runtime(ports=clock.ports(), stop_s=1.0) as runtime:
        ref = runtime.spawn(Cleaner, name="cleaner")
        await block(ref)  # and it is never let go: it has to be cancelled

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.stop)
            await clock.advance(1.5)

    assert cleaned == ["awaited"]


async def test_clean_up_is_bounded() -> None:
    """Hazard 2, the other half: a hook that never ends does not keep its actor."""

    class Sleeper(Counter):
        async def on_stop(self) -> None:
            await anyio.sleep_forever()

    clock = VirtualClock()
    async with Runtime(ports=clock.ports(), cleanup_s=2.0) as runtime:
        ref = runtime.spawn(Sleeper, name="sleeper")
        await ref.ask(Get())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.stop)
            await clock.advance(1.9)
            assert [cell.name for cell in cells_of(runtime._root)] == ["sleeper"]
            await clock.advance(0.2)
            assert list(cells_of(runtime._root)) == []
        with pytest.raises(NotDelivered):
            await ref.ask(Get())


async def test_answering_an_asker_that_was_cancelled_does_not_harm_the_actor() -> None:
    """Hazard 3: it hangs AutoGen core for good."""
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await ref.tell(Add())
        gate, begun = anyio.Event(), anyio.Event()

        async def slow(_: Actor) -> str:
            begun.set()
            await gate.wait()
            return "too late"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.ask, Run(slow))
            await begun.wait()
            tasks.cancel_scope.cancel()

        gate.set()

        assert await ref.ask(Get()) == 1, "it goes on, and was not restarted"


class Spinner(Actor):
    """Swallows its cancellation until it is let go."""

    def __init__(self) -> None:
        self.is_free = False
        self.swallowed = 0

    async def receive(self, message: object) -> object:
        if message == "quiet":
            return None
        if message == "raise":
            await self.spin_and_raise()
        while not self.is_free:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                self.swallowed += 1
                if self.swallowed > 1_000:
                    raise
                await self.rest()
        return "free at last"

    async def spin_and_raise(self) -> None:
        with anyio.CancelScope(shield=True):
            while not self.is_free:
                self.swallowed += 1
                await anyio.lowlevel.checkpoint()
        raise ValueError("nobody is waiting for this any more")

    async def rest(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()


async def test_a_handler_that_swallows_its_cancellation_is_detached_and_said_so() -> None:
    """Hazard 4."""
    clock = VirtualClock()
    actor = Spinner()
    async with Runtime(ports=clock.ports(), stop_s=1.0, kill_s=1.0) as runtime:
        ref = runtime.spawn(lambda: actor, name="spinner")
        notices: Probe[object] = Probe()
        watcher = runtime.spawn(lambda: notices, name="watcher")
        ref.watch(watcher)
        await ref.tell("spin")
        await settle()
        await ref.tell("never handled")

        with runtime.events.subscribe(Stuck) as stuck:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ref.stop)
                await clock_advance_past(clock, actor)
            assert (await anext(stuck)).actor == "spinner"

        assert isinstance((await notices.wait_for(1))[0], Terminated)
        assert runtime.dead_letters.count == 1
        with pytest.raises(NotDelivered):
            await ref.ask(Get())
        assert actor.swallowed > 0
        actor.is_free = True


async def test_what_a_detached_handler_raises_in_the_end_is_reported_and_harms_nobody() -> None:
    """Hazard 4, the aftermath."""
    clock = VirtualClock()
    actor = Spinner()
    async with Runtime(ports=clock.ports(), stop_s=1.0, kill_s=1.0) as runtime:
        ref = runtime.spawn(lambda: actor, name="spinner")
        other = runtime.spawn(Counter, name="other")
        await ref.tell("raise")
        await anyio.lowlevel.checkpoint()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.stop)
            await clock_advance_past(clock, actor)
        with runtime.events.subscribe(Failure) as failures:
            actor.is_free = True
            assert "given up" in (await anext(failures)).decision
        assert await other.ask(Get()) == 0


async def clock_advance_past(clock: VirtualClock, actor: Spinner) -> None:
    # The actor never comes to rest once it is cancelled, so there is no quiescence to wait for.
    for _ in range(6):
        clock.jump(0.5)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()


async def test_two_actors_that_ask_each_other_get_the_cycle_and_no_deadlock() -> None:
    """Hazard 5."""
    async with Runtime(supervision=AT_ONCE) as runtime:
        left = runtime.spawn(Counter, name="left")
        right = runtime.spawn(Counter, name="right")

        async def ask_left(_: Actor) -> object:
            return await left.ask(Get())

        async def ask_right(_: Actor) -> object:
            return await right.ask(Run(ask_left))

        with pytest.raises(AskCycle) as caught:
            await left.ask(Run(ask_right))

        assert caught.value.cycle == ("right", "left", "right")
        assert await left.ask(Get()) == 0


async def test_an_actor_that_asks_itself_gets_the_cycle() -> None:
    """Hazard 5, and the commonest case of it."""
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="selfish")

        async def ask_itself(_: Actor) -> object:
            return await ref.ask(Get())

        with pytest.raises(AskCycle) as caught:
            await ref.ask(Run(ask_itself))

        assert caught.value.cycle == ("selfish", "selfish")


@pytest.mark.parametrize("first", ["answered", "failed", "cancelled"])
async def test_an_ask_that_is_over_is_no_part_of_a_cycle(first: str) -> None:
    """Hazard 5: who waited once does not wait for ever."""
    async with Runtime(supervision=AT_ONCE) as runtime:
        left = runtime.spawn(Counter, name="left")
        right = runtime.spawn(Counter, name="right")

        async def ask_right(_: Actor) -> None:
            with anyio.CancelScope() as scope:
                if first == "cancelled":
                    scope.cancel()
                if first == "failed":
                    with pytest.raises(ActorFailed):
                        await right.ask(Fail(ValueError()))
                else:
                    await right.ask(Get())

        async def ask_left(_: Actor) -> int:
            return await left.ask(Get())

        await left.ask(Run(ask_right))
        assert await right.ask(Run(ask_left)) == 0


async def test_an_effect_may_ask_its_own_actor() -> None:
    """Hazard 5: no actor waits for an effect, so this is no cycle."""
    got: list[int] = []
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")

        async def start(actor: Actor) -> None:
            async def ask_back() -> None:
                got.append(await ref.ask(Get()))

            actor.context.start_effect(ask_back, name="asks back")

        await ref.ask(Run(start))
        await settle()
    assert got == [0]


async def test_a_full_mailbox_blocks_neither_control_nor_replies_nor_the_actor_itself() -> None:
    """Hazard 6."""
    log: list[object] = []
    clock = VirtualClock()
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="full", mailbox=MailboxSettings(capacity=1))
        mortal = runtime.spawn(Counter, name="mortal")
        mortal.watch(ref)
        go_on, begun = anyio.Event(), anyio.Event()

        async def busy(actor: Actor) -> None:
            actor.context.timers.once(1.0, "timer")
            begun.set()
            await go_on.wait()
            await actor.context.ref.tell("to itself")
            assert await mortal.ask(Get()) == 0, "a reply"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.ask, Run(busy))
            await begun.wait()
            await ref.tell("fills it")
            tasks.start_soon(ref.tell, "waits for room")
            await settle()
            await ref.tell("control", control=True)
            await clock.advance(2.0)
            go_on.set()
        await mortal.stop()
        await ref.ask(Get())

    assert log[:1] == ["control"]
    assert {"control", "fills it", "timer", "to itself", "waits for room"} <= {
        each for each in log if isinstance(each, str)
    }
    assert any(isinstance(each, Terminated) for each in log)


async def test_mail_that_races_with_passivation_is_handled() -> None:
    """Hazard 7. The stress test is in test_region.py."""
    started: list[str] = []
    stopping, go_on = anyio.Event(), anyio.Event()

    class Slow(Counter):
        async def on_start(self) -> None:
            started.append("start")

        async def on_stop(self) -> None:
            if len(started) == 1:
                stopping.set()
                await go_on.wait()

    async with Runtime() as runtime:
        region = runtime.region("slow", lambda _: Slow())
        await region["a"].ask(Get())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(region.passivate, "a")
            await stopping.wait()
            await region["a"].tell(Add(7))
            go_on.set()
        assert await region["a"].ask(Get()) == 7
    assert started == ["start", "start"]


async def test_a_supervisor_looks_inside_exception_groups() -> None:
    """Hazard 8."""
    rules = Supervision(rules=((KeyError, Directive.STOP),), backoff=Backoff(first_s=0.0))

    async def fail_in_group(_: Actor) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(raise_key_error)

    async with Runtime(supervision=rules) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        with pytest.raises(ActorFailed):
            await ref.ask(Run(fail_in_group))
        with pytest.raises(NotDelivered):
            await ref.ask(Get())


async def raise_key_error() -> None:
    raise KeyError("inside")


async def test_a_group_that_carries_a_cancellation_goes_on_after_the_rest_is_reported() -> None:
    """Hazard 8, the other half: it still cancels, and the error beside it is not lost."""
    clock = VirtualClock()
    async with Runtime(ports=clock.ports(), stop_s=1.0) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        begun = anyio.Event()

        async def fail_when_cancelled(_: Actor) -> None:
            begun.set()
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class() as error:
                raise BaseExceptionGroup("both", [error, KeyError("beside it")]) from None

        with runtime.events.subscribe(Failure) as failures:
            async with anyio.create_task_group() as tasks:
                await ref.tell(Run(fail_when_cancelled))
                await begun.wait()
                tasks.start_soon(ref.stop)
                await clock.advance(1.5)
            failure = await anext(failures)
        assert isinstance(failure.error, BaseExceptionGroup)
        assert isinstance(failure.error.exceptions[0], KeyError)
        with pytest.raises(NotDelivered):
            await ref.ask(Get())


variable: ContextVar[str] = ContextVar("variable", default="as spawned")


async def test_what_a_handler_binds_does_not_leak_into_the_next_actor() -> None:
    """Hazard 9."""

    class Binder(Actor):
        async def receive(self, message: object) -> object:
            if message is not None:
                await anyio.lowlevel.checkpoint()
                variable.set(str(message))
                await anyio.lowlevel.checkpoint()
            return variable.get()

    class Ask(Message[Any]):
        pass

    async with Runtime() as runtime:
        first = runtime.spawn(Binder, name="first")
        second = runtime.spawn(Binder, name="second")
        await first.tell("bound by first")
        await settle()
        await second.tell(None)
        await settle()
        assert len(runtime._system.pool.workers) <= 2, "they share a worker, or it shows nothing"

        async def look(ref: Ref) -> object:
            return await ref.ask(Ask())

        class Reader(Actor):
            def receive(self, _: object) -> object:
                return variable.get()

        assert await runtime.spawn(Reader, name="reader").ask(Ask()) == "as spawned"
    assert variable.get() == "as spawned"


@pytest.mark.parametrize("opened", ["scope", "group"])
@pytest.mark.parametrize("where", ["handler", "effect", "handler that raises"])
async def test_a_scope_that_an_actor_leaves_open_cancels_no_other_actor(
    where: str, opened: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As code leaves it that breaks out of an async generator within a timeout."""
    scopes: list[anyio.CancelScope] = []
    opened_in: list[int] = []
    occupied: list[int] = []
    gate = anyio.Event()

    async def occupy(_: Actor) -> None:
        occupied.append(anyio.get_current_task().id)
        await gate.wait()

    async def leave_open(_: Actor) -> None:
        await anyio.lowlevel.checkpoint()
        opened_in.append(anyio.get_current_task().id)
        if opened == "group":
            tasks = anyio.create_task_group()
            await tasks.__aenter__()
            tasks.start_soon(anyio.sleep_forever)
            scopes.append(tasks.cancel_scope)
        else:
            scopes.append(anyio.CancelScope())
            scopes[0].__enter__()
        await anyio.lowlevel.checkpoint()
        if where == "handler that raises":
            raise ValueError

    async def start(actor: Actor) -> None:
        actor.context.start_effect(lambda: leave_open(actor), name="effect")

    async with Runtime(supervision=AT_ONCE) as runtime:
        log: list[object] = []
        first = runtime.spawn(lambda: Stopping(log), name="first")
        await first.tell(Run(start if where == "effect" else leave_open))
        await settle()
        # The one that shares the worker's task is in danger; which worker comes next is chance.
        others = [runtime.spawn(Counter, name=f"other{n}") for n in range(5)]
        for other in others:
            await other.tell(Run(occupy))
            await settle()
        assert opened_in[0] in occupied, "they share a worker, or it shows nothing"

        scopes[0].cancel()
        await settle()
        gate.set()

        assert [await other.ask(Get()) for other in others] == [0] * 5
        assert await first.ask(Get()) == 0
        assert log == (["stopped"] if where == "handler that raises" else [])
    said = [text for text in caplog.messages if "cancel scope left open" in text]
    by = "effect" if where == "effect" else "first"
    assert [by in text for text in said] == [True]


async def test_the_tasks_of_a_group_that_an_actor_leaves_open_end_with_its_handler() -> None:
    log: list[str] = []

    async def run_until_cancelled() -> None:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            log.append("cancelled")

    async def leave_open(_: Actor) -> None:
        await tasks.__aenter__()
        tasks.start_soon(run_until_cancelled)
        await begun.wait()

    begun, tasks = anyio.Event(), anyio.create_task_group()
    async with Runtime() as runtime:
        counter = runtime.spawn(Counter, name="counter")
        await counter.tell(Run(leave_open))
        await settle()
        assert log == ["cancelled"]
        assert await counter.ask(Get()) == 0


async def test_what_was_never_started_is_handed_back_inside_the_error() -> None:
    """Hazard 10."""
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        gate = await block(ref)
        handed_back: list[object] = []

        async def ask() -> None:
            with pytest.raises(NotDelivered) as caught:
                await ref.ask(Get())
            assert isinstance(caught.value, Unavailable)
            handed_back.append(caught.value.message)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await settle()
            tasks.start_soon(ref.stop)
            await settle()
            gate.set()

        elsewhere = runtime.spawn(Counter, name="elsewhere")
        (message,) = handed_back
        assert isinstance(message, Get)
        assert await elsewhere.ask(message) == 0


class TestLateKill:
    """A kill that comes in the very step in which its target ends must hit nothing else."""

    @staticmethod
    async def end_and_cancel_an_effect_as(
        wake: Callable[[Runtime, anyio.Event], Coroutine[Any, Any, None]],
    ) -> None:
        """Let an effect end and cancel it in the same step, a hundred times; `wake` sees that."""

        class Target(Actor):
            def receive(self, message: object) -> None:
                self.gate = anyio.Event()
                self.effect = self.context.start_effect(self.gate.wait, name="effect")

        actor = Target()
        async with Runtime() as runtime:
            target = runtime.spawn(lambda: actor, name="target")
            for _ in range(100):
                await target.ask(Get())
                await settle()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(wake, runtime, actor.gate)
                    await settle()
                    actor.gate.set()
                    actor.effect.cancel()

    async def test_it_does_not_reach_the_next_actors_handler(self) -> None:
        async def pause(_: Actor) -> object:
            for _step in range(3):
                await anyio.lowlevel.checkpoint()
            return "handled"

        answers: list[object] = []

        async def ask_when_it_ends(runtime: Runtime, gate: anyio.Event) -> None:
            neighbour = runtime.spawn(Counter, name="neighbour")
            await gate.wait()
            answers.append(await neighbour.ask(Run(pause)))
            await neighbour.stop()

        await self.end_and_cancel_an_effect_as(ask_when_it_ends)
        assert answers == ["handled"] * 100

    async def test_it_does_not_end_another_actors_effect(self) -> None:
        ended: list[str] = []

        async def work() -> None:
            for _step in range(3):
                await anyio.lowlevel.checkpoint()
            ended.append("by itself")

        class Neighbour(Actor):
            def receive(self, _: object) -> object:
                self.context.start_effect(work, name="work")
                return None

        async def start_when_it_ends(runtime: Runtime, gate: anyio.Event) -> None:
            neighbour = runtime.spawn(Neighbour, name="neighbour")
            await gate.wait()
            await neighbour.ask(Get())
            await settle()
            await neighbour.stop()

        await self.end_and_cancel_an_effect_as(start_when_it_ends)
        assert ended == ["by itself"] * 100
