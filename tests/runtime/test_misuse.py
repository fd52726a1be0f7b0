"""Uses that are easy to get wrong: loops of tells, other threads, odd awaitables, NaN."""

import asyncio
import enum
import math
import sys
import types
from collections.abc import Callable, Generator
from contextlib import closing
from contextvars import Context
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio
import trio.testing

from turnkeeper.runtime import (
    Actor,
    ActorFailed,
    AskCycle,
    Backoff,
    Directive,
    MailboxSettings,
    Message,
    OwnershipLost,
    Ref,
    Runtime,
    Supervision,
    TurnkeeperError,
)
from turnkeeper.runtime.testing import Probe, VirtualClock, settle

from .actors import Add, Counter, Fail, Get, Run, SyncCounter, block

pytestmark = pytest.mark.anyio

HANG_S = 60.0
"""After so long, a call that is not refused counts as one that waits."""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 has no eager tasks")
def test_a_loop_whose_tasks_begin_at_once_runs_actors_all_the_same() -> None:
    """No runtime could be entered in such a loop."""

    async def main() -> None:
        if sys.version_info >= (3, 12):
            asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        async with Runtime() as runtime:
            ref = runtime.spawn(Counter, name="counter")
            await ref.tell(Add())
            assert await ref.ask(Get()) == 1

    asyncio.run(main())


class TestALoopThatNeverWaits:
    @pytest.mark.parametrize("kind", ["idle", "busy", "dropping", "stopped"])
    async def test_of_tells_can_be_cancelled_and_lets_others_run(self, kind: str) -> None:
        settings = MailboxSettings(10_000)
        if kind == "dropping":
            settings = MailboxSettings(4, "drop_oldest")
        told = 0
        async with Runtime(drain_s=0.0, stop_s=0.0) as runtime:
            ref = runtime.spawn(Counter, name="counter", mailbox=settings)
            if kind == "busy":
                await block(ref)
            if kind == "stopped":
                await ref.stop()

            async def flood() -> None:
                nonlocal told
                while told < 5_000:
                    await ref.tell(Add())
                    told += 1

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(flood)
                for _ in range(5):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
        assert told < 1_000

    async def test_of_inline_asks_can_be_cancelled(self) -> None:
        asked = 0
        async with Runtime() as runtime:
            ref = runtime.spawn(SyncCounter, name="counter")

            async def ask_on() -> None:
                nonlocal asked
                while asked < 5_000:
                    await ref.ask(Get())
                    asked += 1

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask_on)
                await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
        assert asked < 1_000

    async def test_a_tell_that_raises_its_cancellation_has_sent_nothing(self) -> None:
        probe: Probe[int] = Probe()
        sent: list[int] = []
        async with Runtime() as runtime:
            ref = runtime.spawn(lambda: probe, name="probe")
            with anyio.CancelScope() as scope:
                scope.cancel()
                for number in range(100):
                    await ref.tell(number)
                    sent.append(number)
            await settle()
        assert len(sent) < 100
        assert probe.received == sent


async def misuse(runtime: Runtime, ref: Ref[Any], use: str) -> None:
    match use:
        case "ask":
            await ref.ask(Get())
        case "tell":
            await ref.tell(Add())
        case "control":
            await ref.tell(Add(), control=True)
        case "now":
            ref.tell_nowait(Add())
        case "stop":
            await ref.stop()
        case "watch":
            async with Runtime() as other:
                ref.watch(other.spawn(Counter, name="watcher"))
        case "notify":
            async with Runtime() as other:
                watched = other.spawn(Counter, name="watched")
                watched.watch(ref)
                watched.unwatch(ref)
        case "leave":
            await runtime.aclose()
        case _:
            runtime.spawn(Counter, name="other")


class TestAnotherLoop:
    @pytest.mark.parametrize("is_busy", [False, True])
    @pytest.mark.parametrize(
        "use", ["ask", "tell", "control", "now", "stop", "watch", "notify", "spawn"]
    )
    async def test_is_told_to_use_the_portal_and_changes_nothing(
        self, use: str, is_busy: bool
    ) -> None:
        async with Runtime() as runtime:
            ref = runtime.spawn(Counter, name="counter")
            blocked = await block(ref) if is_busy else None

            def run() -> None:
                Context().run(asyncio.run, misuse(runtime, ref, use))  # sniffio knows this loop

            with pytest.raises(RuntimeError, match=r"nothing happened; .* runtime\.portal\(\)"):
                await runtime.ports.blocking(run)
            assert ref._cell.depth == 0
            if blocked is not None:
                blocked.set()
            assert await ref.ask(Get()) == 0
            assert [state.name for state in runtime.tree().walk()] == ["counter"]

    @pytest.mark.parametrize("use", ["ask", "tell", "control", "now", "stop", "spawn", "leave"])
    def test_of_the_same_thread_is_refused_too(self, use: str) -> None:
        """As with a fixture of pytest that has another loop than the test; trio has no such."""

        async def check() -> None:
            assert await ref.ask(Get()) == 0
            assert [state.name for state in runtime.tree().walk()] == ["counter"]
            await runtime.aclose()

        async def start() -> tuple[Runtime, Ref[Any]]:
            runtime = await Runtime().start()
            return runtime, runtime.spawn(Counter, name="counter")

        with asyncio.Runner() as home, closing(asyncio.new_event_loop()) as other:
            runtime, ref = home.run(start())

            with pytest.raises(RuntimeError, match="outside of its event loop; nothing happened"):
                ref.tell_nowait(Add())  # in no loop
            task = other.create_task(misuse(runtime, ref, use))
            # Not as a deadline for the task: leaving is shielded against those.
            other.run_until_complete(asyncio.wait({task}, timeout=HANG_S))

            assert task.done(), "it waits"
            assert "or outside of its event loop; nothing happened" in str(task.exception())
            home.run(check())

    async def test_is_refused_as_the_watcher_of_a_key(self) -> None:
        async with Runtime() as runtime:
            region = runtime.region("keyed", lambda _: Counter())

            async def watch() -> None:
                async with Runtime() as other:
                    region["key"].watch(other.spawn(Counter, name="watcher"))

            with pytest.raises(RuntimeError, match="nothing happened"):
                await runtime.ports.blocking(lambda: Context().run(asyncio.run, watch()))
            assert region._watchers == {}

    def test_of_the_same_thread_may_tell_a_busy_actor_which_handles_it_in_its_own(self) -> None:
        async def start() -> tuple[Runtime, Ref[Any], anyio.Event]:
            runtime = await Runtime().start()
            ref = runtime.spawn(Counter, name="counter")
            return runtime, ref, await block(ref)

        async def go_on() -> None:
            blocked.set()
            assert await ref.ask(Get()) == 1
            await runtime.aclose()

        with asyncio.Runner() as home, closing(asyncio.new_event_loop()) as other:
            runtime, ref, blocked = home.run(start())
            other.run_until_complete(ref.tell(Add()))
            home.run(go_on())


USES: dict[str, Callable[[Runtime], object]] = {
    "spawn": lambda runtime: runtime.spawn(Counter, name="counter"),
    "supervisor": lambda runtime: runtime.spawn_supervisor("pair", Supervision()),
    "region": lambda runtime: runtime.region("keyed", lambda _: Counter()),
    "portal": lambda runtime: runtime.portal(),
}


@pytest.mark.parametrize("use", USES)
async def test_a_runtime_is_not_used_before_it_is_entered(use: str) -> None:
    with pytest.raises(RuntimeError, match="has not been entered"):
        USES[use](Runtime())


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
async def test_a_spawn_that_is_interrupted_leaves_its_name_free(
    interrupt: type[BaseException],
) -> None:
    """In a notebook, the program goes on."""

    def interrupted() -> Counter:
        raise interrupt

    async with Runtime() as runtime:
        with pytest.raises(interrupt):
            runtime.spawn(interrupted, name="counter")
        assert await runtime.spawn(Counter, name="counter").ask(Get()) == 0


async def test_an_actor_in_place_of_its_class_is_refused_and_leaves_its_name_free() -> None:
    made: Any = Counter()
    async with Runtime() as runtime:
        with pytest.raises(TypeError, match=r"given as a Counter; give .* the class, or `lambda"):
            runtime.spawn(made, name="counter")
        with pytest.raises(TypeError, match="given as a Counter"):
            runtime.region("keyed", made)
        ref = runtime.spawn(Counter, name="counter")
        runtime.region("keyed", lambda _: Counter())
        assert await ref.ask(Get()) == 0


@pytest.mark.parametrize("timeout", [math.nan, "5", 10**400], ids=["nan", "text", "too large"])
async def test_a_deadline_that_is_no_number_is_refused_before_anything_is_sent(
    timeout: Any,  # noqa: ANN401 - that is the case
) -> None:
    received: list[object] = []

    class InPlace(Actor):
        def receive(self, message: object) -> None:
            received.append(message)

    async with Runtime() as runtime:
        with pytest.raises((ValueError, TypeError, OverflowError)):
            await runtime.spawn(InPlace, name="in place").ask(Get(), timeout=timeout)
    assert received == []


@pytest.mark.parametrize("delay_s", [1j, "5", 10**400], ids=["complex", "text", "too large"])
async def test_a_delay_that_is_no_number_fails_its_actor_alone(
    delay_s: Any,  # noqa: ANN401 - that is the case
) -> None:
    async def arm(actor: Actor) -> None:
        actor.context.timers.once(delay_s, Add())

    async with Runtime() as runtime:
        with pytest.raises(ActorFailed, match=r"TypeError|OverflowError"):
            await runtime.spawn(Counter, name="armed").ask(Run(arm))
        assert await runtime.spawn(Counter, name="counter").ask(Get()) == 0


WRONG: dict[str, Callable[[Any], object]] = {
    "idle_s": lambda runtime: runtime.region("keyed", Counter, idle_s=math.nan),
    "refuse_s": lambda runtime: runtime.region("keyed", Counter, refuse_s=-1.0),
    "active_max": lambda runtime: runtime.region("keyed", Counter, active_max="5"),
    "drain_s": lambda _: Runtime(drain_s=math.nan),
    "stop_s": lambda _: Runtime(stop_s=-1.0),
    "cleanup_s": lambda _: Runtime(cleanup_s=math.nan),
    "kill_s": lambda _: Runtime(kill_s=math.nan),
    "first_s": lambda _: Backoff(first_s=math.nan),
    "max_s": lambda _: Backoff(max_s=-1.0),
    "factor": lambda _: Backoff(factor=math.nan),
    "jitter": lambda _: Backoff(jitter=math.nan),
    "reset_s": lambda _: Backoff(reset_s=math.nan),
    "window_s": lambda _: Supervision(window_s=math.nan),
    "restarts_max": lambda _: Supervision(restarts_max=-1),
    "strategy": lambda _: Supervision(strategy="one-for-one"),  # type: ignore[arg-type]
    "overflow": lambda _: MailboxSettings(overflow="drop-oldest"),  # type: ignore[arg-type]
    "backoff": lambda _: Supervision(backoff=1.0),  # type: ignore[arg-type]
    "supervision": lambda runtime: runtime.spawn(Counter, name="a", supervision=Directive.STOP),
    "mailbox": lambda runtime: runtime.spawn(Counter, name="a", mailbox=5),
    "mailbox of a region": lambda runtime: runtime.region("keyed", Counter, mailbox=5),
    "name": lambda runtime: runtime.spawn(Counter, name=5),
    "a key": lambda runtime: runtime.region("keyed", Counter)[5],
}


@pytest.mark.parametrize("setting", WRONG)
async def test_a_wrong_setting_is_refused_at_once(setting: str) -> None:
    async with Runtime() as runtime:
        with pytest.raises(
            (ValueError, TypeError),
            match=f"^{setting.removesuffix(' of a region')} is .*; it takes ",
        ):
            WRONG[setting](runtime)
        assert runtime.tree().actors == () or setting == "a key"


async def test_a_supervisor_that_is_stopped_twice_leaves_its_name_to_the_next() -> None:
    async with Runtime() as runtime:
        first = runtime.spawn_supervisor("s", Supervision())
        await first.stop()
        ref = runtime.spawn_supervisor("s", Supervision()).spawn(Counter, name="counter")
        await first.stop()
        assert [state.name for state in runtime.tree().walk()] == ["s", "s/counter"]
        assert await ref.ask(Get()) == 0


class Color(str, enum.Enum):  # noqa: UP042 - it is written as "Color.RED"
    RED = "red"


async def test_an_actor_is_forgotten_under_the_name_that_it_was_given() -> None:
    stopped: list[str] = []

    class Stopping(Counter):
        async def on_stop(self) -> None:
            stopped.append(self.context.name)

    async with Runtime() as runtime:
        refs = [runtime.spawn(Stopping, name=name) for name in ("a", "/a")]
        region = runtime.region("keyed", lambda _: Counter())
        await refs[1].stop()
        await refs[0].ask(Get())
        for _ in range(2):
            await region[Color.RED].ask(Get())
            await region[Color.RED].stop()
        assert region.active == ()
    assert stopped == ["/a", "a"]


async def test_a_switch_that_is_neither_true_nor_false_is_refused() -> None:
    no: Any = "no"
    with pytest.raises(TypeError, match="freeze_objects is 'no'; it takes a bool"):
        Runtime(freeze_objects=no)
    with pytest.raises(TypeError, match="handle_signals is 'no'; it takes a bool"):
        Runtime(handle_signals=no)
    async with Runtime() as runtime:
        with pytest.raises(TypeError, match="resident is 'no'; it takes a bool"):
            runtime.spawn(Counter, name="counter", resident=no)
        with pytest.raises(TypeError, match="resident is 'no'; it takes a bool"):
            runtime.region("keyed", lambda _: Counter(), resident=no)
        ref = runtime.spawn(Counter, name="counter")
        for send in (ref.tell, ref.ask):
            with pytest.raises(TypeError, match="control is 'no'; it takes a bool"):
                await send(Get(), control=no)
        with pytest.raises(TypeError, match="control is 'no'; it takes a bool"):
            ref.tell_nowait(Get(), control=no)
        assert await ref.ask(Get()) == 0


async def test_a_delay_that_is_no_number_is_refused() -> None:
    async def arm(actor: Actor) -> None:
        with pytest.raises(ValueError, match="nan"):
            actor.context.timers.once(math.nan, "never")

    async with Runtime() as runtime:
        await runtime.spawn(Counter, name="counter").ask(Run(arm))


class Unreadable(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise ZeroDivisionError

    __repr__ = __str__


class Gone(OwnershipLost, Unreadable):
    pass


def too_deep() -> Exception:
    error: Exception = ValueError()
    for _ in range(3_000):
        error = ExceptionGroup("deeper", [error])
    return error


class RaisesAtOnce(Actor):
    """Its hooks and its handler are no coroutines, and raise when they are called."""

    batch_max = 2

    def receive_batch(self, deliveries: object) -> Any:  # noqa: ANN401 - it returns nothing
        raise LookupError

    def on_stop(self) -> Any:  # noqa: ANN401 - as above
        raise LookupError


class WrongHook(Counter):
    async def on_restart(self) -> None:  # type: ignore[override]
        """Lacks a parameter."""


class NoBatch(Actor):
    batch_max = 0

    async def receive_batch(self, deliveries: object) -> None:
        del deliveries


class NanBatch(NoBatch):
    batch_max = math.nan  # type: ignore[assignment]


@pytest.mark.parametrize("directive", [Directive.RESTART, Directive.STOP])
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Counter, Unreadable()),
        (Counter, Gone()),
        (Counter, too_deep()),
        (RaisesAtOnce, ValueError()),
        (WrongHook, ValueError()),
        (NoBatch, ValueError()),
        (NanBatch, ValueError()),
    ],
    ids=[
        "unreadable",
        "unreadable, of the five kinds",
        "deep",
        "at once",
        "hook",
        "no batch",
        "nan",
    ],
)
async def test_an_odd_failure_is_that_actors_alone(
    kind: type[Actor], error: Exception, directive: Directive
) -> None:
    async with Runtime(supervision=Supervision(otherwise=directive)) as runtime:
        odd, other = runtime.spawn(kind, name="odd"), runtime.spawn(Counter, name="other")
        with anyio.fail_after(5), pytest.raises((TurnkeeperError, ValueError)):
            await odd.ask(Fail(error))
        await odd.tell(Fail(error))
        await settle()
        await odd.stop()
        assert await other.ask(Get()) == 0


class Later:
    """An awaitable that is no coroutine."""

    def __await__(self) -> Generator[Any, Any, str]:
        yield from anyio.lowlevel.checkpoint().__await__()
        return "awaited"


class ReturnsAwaitable(Actor):
    def receive(self, _: object) -> object:
        return Later()


class ReturnsGenerator(Actor):
    @types.coroutine
    def receive(self, _: object) -> Generator[Any, Any, str]:
        return (yield from Later().__await__())


@pytest.mark.parametrize("kind", [ReturnsAwaitable, ReturnsGenerator])
async def test_an_awaitable_that_a_handler_returns_is_awaited(kind: type[Actor]) -> None:
    class AskIt(Message[object]):
        pass

    async with Runtime() as runtime:
        assert await runtime.spawn(kind, name="odd").ask(AskIt()) == "awaited"
        assert await runtime.spawn(kind, name="resident", resident=True).ask(AskIt()) == "awaited"


async def test_an_actor_may_have_an_incarnation_of_its_own() -> None:
    class Avatar(Actor):
        def __init__(self) -> None:
            self._incarnation = 1

        def receive(self, _: Get) -> int:
            self._incarnation += 1
            assert self.context.name == "avatar"
            return self._incarnation

    async with Runtime() as runtime:
        assert await runtime.spawn(Avatar, name="avatar").ask(Get()) == 2


class Slotted:
    __slots__ = ("total",)


async def test_an_actor_may_have_a_second_base_with_slots_and_slots_beside_its_dictionary() -> None:
    class Partly(Actor, Slotted):
        __slots__ = ("kept",)

        def __init__(self) -> None:
            self.total, self.kept = 1, 2
            self.other = 3

        def receive(self, _: Get) -> int:
            return self.total + self.kept + self.other

    class Raised(Actor, Exception):
        def receive(self, _: Get) -> int:
            return 1

    async with Runtime() as runtime:
        assert await runtime.spawn(Partly, name="partly").ask(Get()) == 6
        assert await runtime.spawn(Raised, name="raised").ask(Get()) == 1


class TestCyclesOfAsks:
    async def test_an_actor_that_an_effect_has_spawned_is_found_in_one(self) -> None:
        found: list[AskCycle] = []

        async def ask_itself(actor: Actor) -> None:
            with pytest.raises(AskCycle) as caught:
                await actor.context.ref.ask(Get())
            found.append(caught.value)

        async def spawn(actor: Actor) -> None:
            async def effect() -> None:
                await actor.context.spawn(Counter, name="child").ask(Run(ask_itself))

            actor.context.start_effect(effect, name="effect")

        async with Runtime() as runtime:
            await runtime.spawn(Counter, name="counter").tell(Run(spawn))
            await settle()
        assert [each.cycle for each in found] == [("counter/child", "counter/child")]

    @pytest.mark.parametrize("anyio_backend", ["asyncio"])
    @pytest.mark.parametrize("is_resident", [False, True])
    async def test_a_task_that_a_handler_does_not_wait_for_may_ask_its_busy_actor(
        self, is_resident: bool
    ) -> None:
        tasks: list[asyncio.Task[int]] = []
        let = anyio.Event()

        async def start(actor: Actor) -> None:
            async def ask_on() -> int:
                answers: list[int] = []
                async with anyio.create_task_group():  # one of its own changes nothing
                    answers.append(await actor.context.ref.ask(Get()))
                return answers[0]

            tasks.append(asyncio.create_task(ask_on()))
            await let.wait()

        async with Runtime() as runtime:
            ref = runtime.spawn(Counter, name="counter", resident=is_resident)
            await ref.tell(Run(start))
            await settle()
            let.set()
            assert await tasks[0] == 0

    @pytest.mark.parametrize("is_resident", [False, True])
    @pytest.mark.parametrize("depth", [0, 1, 3])
    async def test_a_task_that_a_handler_waits_for_is_found_in_one(
        self, depth: int, is_resident: bool
    ) -> None:
        found: list[AskCycle] = []

        async def ask_itself(actor: Actor, groups: int) -> None:
            if groups:
                async with anyio.create_task_group() as group:
                    group.start_soon(ask_itself, actor, groups - 1)
                return
            with pytest.raises(AskCycle) as caught:
                await actor.context.ref.ask(Get())
            found.append(caught.value)

        async with Runtime() as runtime:
            ref = runtime.spawn(Counter, name="counter", resident=is_resident)
            await ref.ask(Run(lambda actor: ask_itself(actor, depth)))
        assert [each.cycle for each in found] == [("counter", "counter")]

    @pytest.mark.parametrize("anyio_backend", ["asyncio"])
    async def test_a_task_that_outlives_its_handler_may_ask_its_actor(self) -> None:
        tasks: list[asyncio.Task[int]] = []

        async def start(actor: Actor) -> None:
            async def later() -> int:
                await settle()
                return await actor.context.ref.ask(Get())

            tasks.append(asyncio.create_task(later()))

        async with Runtime() as runtime:
            await runtime.spawn(Counter, name="counter").ask(Run(start))
            assert await tasks[0] == 0


async def test_a_cycle_through_two_runtimes_is_found() -> None:
    async with Runtime() as one, Runtime() as other:
        first, second = one.spawn(Counter, name="a"), other.spawn(Counter, name="b")

        async def ask_first(_: Actor) -> object:
            return await first.ask(Get())

        async def ask_second(_: Actor) -> object:
            return await second.ask(Run(ask_first))

        with anyio.fail_after(5), pytest.raises(AskCycle):
            await first.ask(Run(ask_second))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_senders_that_wait_for_room_leave_without_being_searched_for() -> None:
    async with Runtime(drain_s=0.0, stop_s=0.0) as runtime:
        ref = runtime.spawn(Counter, name="counter", mailbox=MailboxSettings(1))
        await block(ref)
        await ref.tell(Add())
        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(ref.tell, Add())
            await settle()
            waiting = ref._cell.waiting
            assert waiting is not None
            assert len(waiting) == 200
            assert isinstance(waiting, dict), "each is found by its hash"
            tasks.cancel_scope.cancel()
        assert ref._cell.waiting is None


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_clock_that_a_trio_test_moves_moves_the_runtimes_timers() -> None:
    """In a run of its own: the clock is given to `trio.run`."""
    log: list[str] = []

    class Passivated(SyncCounter):
        async def on_stop(self) -> None:
            log.append("passivated")

    async def main() -> None:
        async with Runtime() as runtime:
            region = runtime.region("keyed", lambda _: Passivated(), idle_s=60.0)
            await region["key"].ask(Get())
            await trio.sleep(3_600.0)
            assert log == ["passivated"]

    def run() -> None:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))

    await VirtualClock().ports().blocking(run)
