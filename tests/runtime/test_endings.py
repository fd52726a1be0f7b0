"""Nothing that belongs to an actor outlives it, and nothing can be started while it ends."""

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.runtime import (
    Actor,
    ActorContext,
    ActorEnded,
    Backoff,
    Directive,
    Failure,
    NotDelivered,
    Ref,
    Region,
    Restart,
    Runtime,
    Stopped,
    Stuck,
    Supervision,
)
from turnkeeper.runtime._runtime import cells_of
from turnkeeper.runtime.testing import Probe, VirtualClock, settle

from .actors import Counter, Fail, Get, Run, block

pytestmark = pytest.mark.anyio

AT_ONCE = Supervision(backoff=Backoff(first_s=0.0))


async def nothing() -> None:
    pass


STARTS: dict[str, Callable[[ActorContext, Any], object]] = {
    "timer": lambda context, _: context.timers.once(0.05, "late"),
    "periodic timer": lambda context, _: context.timers.periodic(0.05, "late"),
    "effect": lambda context, _: context.start_effect(nothing, name="late"),
    "child": lambda context, _: context.spawn(Counter, name="late"),
    "supervisor": lambda context, _: context.spawn_supervisor("late", Supervision()),
    "watch": lambda context, other: context.watch(other),
}


@pytest.fixture(params=STARTS)
def start(request: pytest.FixtureRequest) -> Callable[[ActorContext, Any], object]:
    return STARTS[request.param]


class Ending(Actor):
    """Tries to start something wherever an ending actor still runs code."""

    def __init__(self, where: str, attempt: Callable[[ActorContext], object]) -> None:
        self.where = where
        self.attempt = attempt
        self.refusals: list[ActorEnded] = []

    def try_it(self, where: str) -> None:
        if where == self.where:
            try:
                self.attempt(self.context)
            except ActorEnded as refused:
                self.refusals.append(refused)

    async def receive(self, message: object) -> None:
        if isinstance(message, Fail):
            raise message.error
        await anyio.lowlevel.checkpoint()
        self.context.start_effect(self.effect, name="effect")

    async def effect(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self.try_it("an effect's clean-up")

    async def on_stop(self) -> None:
        self.try_it("on_stop")

    async def on_restart(self, error: BaseException) -> None:
        self.try_it("on_restart")


@pytest.mark.parametrize("where", ["on_stop", "an effect's clean-up", "on_restart", "afterwards"])
async def test_an_actor_that_ends_can_start_nothing(
    where: str, start: Callable[[ActorContext, Any], object]
) -> None:
    clock = VirtualClock()
    async with Runtime(ports=clock.ports(), supervision=AT_ONCE) as runtime:
        other = runtime.spawn(Counter, name="other")
        made: list[Ending] = []

        def make() -> Ending:
            made.append(Ending(where, lambda context: start(context, other)))
            return made[-1]

        ref = runtime.spawn(make, name="ending")
        await ref.tell("start the effect")
        await settle()

        if where == "on_restart":
            await ref.tell(Fail(ValueError("once")))
            await settle()
        else:
            await ref.stop()
        if where == "afterwards":
            made[0].try_it("afterwards")

        (refused,) = made[0].refusals
        assert refused.actor == "ending"
        assert "nothing happened" in str(refused)
        await clock.advance(60.0)
        assert await other.ask(Get(), timeout=1.0) == 0, "the clock is alive"
        names = {cell.name for cell in cells_of(runtime._root)}
        assert names == {"other"} | ({"ending"} if where == "on_restart" else set())


async def test_what_was_given_up_as_stuck_can_start_nothing(
    start: Callable[[ActorContext, Any], object],
) -> None:
    clock = VirtualClock()
    gate = anyio.Event()
    refused: list[ActorEnded] = []
    async with Runtime(ports=clock.ports()) as runtime:
        other = runtime.spawn(Counter, name="other")

        async def swallow(actor: Actor) -> None:
            with anyio.CancelScope(shield=True):
                await gate.wait()
            try:
                start(actor.context, other)
            except ActorEnded as error:
                refused.append(error)

        ref = runtime.spawn(Counter, name="stuck")
        with runtime.events.subscribe(Stuck) as stuck:
            await ref.tell(Run(swallow))
            await settle()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ref.stop)
                await clock.advance(10.0)
            assert (await anext(stuck)).actor == "stuck"
        gate.set()
        await settle()

        assert len(refused) == 1
        await clock.advance(60.0)
        assert await other.ask(Get(), timeout=1.0) == 0
        assert [cell.name for cell in cells_of(runtime._root)] == ["other"]


async def test_a_timer_of_an_earlier_incarnation_never_reaches_the_next() -> None:
    clock = VirtualClock()
    log: list[object] = []
    async with Runtime(ports=clock.ports(), supervision=AT_ONCE) as runtime:
        contexts: list[ActorContext] = []

        async def arm(actor: Actor) -> None:
            contexts.append(actor.context)
            actor.context.timers.once(1.0, "from the first")

        ref = runtime.spawn(lambda: Counter(log), name="counter")
        await ref.tell(Run(arm))
        await ref.tell(Fail(ValueError("once")))
        await settle()
        with pytest.raises(ActorEnded):
            contexts[0].timers.once(1.0, "from outside")
        contexts[0].stop()
        await clock.advance(2.0)

        assert log == []
        assert await ref.ask(Get()) == 0, "its successor was not stopped"


async def test_an_alarm_that_raises_does_not_end_the_clock() -> None:
    clock = VirtualClock()

    def fail() -> None:
        raise ValueError("a bug")

    async with Runtime(ports=clock.ports()) as runtime:
        probe = runtime.spawn(Counter, name="counter")
        with runtime.events.subscribe(Failure) as failures:
            runtime._system.clock.call_later(1.0, fail)
            await clock.advance(2.0)
            assert isinstance((await anext(failures)).error, ValueError)
        await probe.tell(Run(lambda _: anyio.sleep_forever()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(probe.stop)
            await clock.advance(10.0)


async def test_nothing_is_spawned_in_a_supervisor_that_has_stopped() -> None:
    async with Runtime() as runtime:
        supervisor = runtime.spawn_supervisor("pair", Supervision())
        supervisor.spawn(Counter, name="first")
        await supervisor.stop()

        with pytest.raises(ActorEnded, match="pair cannot start 'second'"):
            supervisor.spawn(Counter, name="second")
        with pytest.raises(ActorEnded, match="pair cannot start 'inner'"):
            supervisor.spawn_supervisor("inner", Supervision())
        assert list(cells_of(runtime._root)) == []


class Untidy(Actor):
    """Its effects fail when they are cancelled."""

    async def receive(self, message: object) -> None:
        if isinstance(message, Fail):
            raise message.error
        self.context.start_effect(self.effect, name="effect")

    async def effect(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("in its clean-up")


async def test_an_error_in_an_effects_clean_up_is_reported_while_its_actor_stops() -> None:
    async with Runtime() as runtime:
        with runtime.events.subscribe(object) as reports:
            ref = runtime.spawn(Untidy, name="untidy")
            await ref.tell("start")
            await settle()
            await ref.stop()

            failure = await anext(reports)
            assert isinstance(failure, Failure)
            assert str(failure.error) == "in its clean-up"
            assert "effect" in failure.decision
            assert isinstance(await anext(reports), Stopped)


@pytest.mark.parametrize("is_grouped", [False, True])
async def test_an_effect_that_is_refused_as_its_actor_ends_is_no_failure(
    start: Callable[[ActorContext, Any], object], is_grouped: bool
) -> None:
    """An effect that ends by arming a timer cannot know that its actor was told to stop."""
    gate = anyio.Event()
    async with Runtime() as runtime:
        other = runtime.spawn(Counter, name="other")

        async def run(context: ActorContext) -> None:
            with anyio.CancelScope(shield=True):
                await gate.wait()
            if is_grouped:
                async with anyio.create_task_group():
                    start(context, other)
            start(context, other)

        async def begin(actor: Actor) -> None:
            actor.context.start_effect(partial(run, actor.context), name="late")

        ref = runtime.spawn(Counter, name="ending")
        with runtime.events.subscribe(object) as reports:
            await ref.tell(Run(begin))
            await settle()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ref.stop)
                await settle()
                gate.set()
            assert isinstance(await anext(reports), Stopped)


async def test_an_error_in_an_effects_clean_up_is_no_second_failure() -> None:
    async with Runtime(supervision=AT_ONCE) as runtime:
        with runtime.events.subscribe(object) as reports:
            ref = runtime.spawn(Untidy, name="untidy")
            await ref.tell("start")
            await ref.tell("start")
            await settle()
            await ref.tell(Fail(KeyError("the failure")))
            await settle()
        seen = [
            type(each.error).__name__ if isinstance(each, Failure) else type(each).__name__
            async for each in reports
        ]
        assert seen == ["KeyError", "ValueError", "ValueError", "Restart"]
        assert next(runtime.tree().walk()).failed == 1
        assert len(runtime._root._log._times) == 1


async def test_effects_that_fail_together_are_one_failure() -> None:
    go = anyio.Event()

    async def fail() -> None:
        await go.wait()
        raise ValueError("together")

    async def start(actor: Actor) -> None:
        for name in ("first", "second", "third"):
            actor.context.start_effect(fail, name=name)

    async with Runtime(supervision=AT_ONCE) as runtime:
        with runtime.events.subscribe(Restart) as restarts:
            ref = runtime.spawn(Counter, name="counter")
            await ref.tell(Run(start))
            await settle()
            go.set()
            await settle()
        assert [each.restarts async for each in restarts] == [1]
        assert len(runtime._root._log._times) == 1


async def test_a_failure_that_is_resumed_leaves_no_bound_behind() -> None:
    """The order that a failed effect gives arms a bound, which must go with the decision."""
    clock = VirtualClock()
    resume = Supervision(otherwise=Directive.RESUME)

    async def fail() -> None:
        raise ValueError("resumed")

    async def start(actor: Actor) -> None:
        actor.context.start_effect(fail, name="failing")

    async with Runtime(ports=clock.ports(), supervision=resume) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await ref.tell(Run(start))
        await settle()
        gate = await block(ref)
        answers: list[object] = []

        async def ask() -> None:
            count = await ref.ask(Get())
            answers.append(count)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await clock.advance(60.0)
            gate.set()
        assert answers == [0]
        assert next(runtime.tree().walk()).failed == 1


async def test_a_watch_ends_with_the_incarnation_that_placed_it() -> None:
    class Watching(Actor):
        async def receive(self, message: object) -> None:
            assert isinstance(message, Ref)
            self.context.watch(message)
            self.context.stop()

    async with Runtime() as runtime:
        target = runtime.spawn(Counter, name="target")
        region = runtime.region("keyed", lambda _: Counter())
        for number in range(100):
            watching = runtime.spawn(Watching, name=f"watching-{number}")
            await watching.tell(target if number % 2 else region["key"])
            await settle()
        assert not target._cell.watchers
        assert not region._watchers


async def test_watchers_that_have_stopped_are_forgotten() -> None:
    async with Runtime() as runtime:
        target = runtime.spawn(Counter, name="target")
        region = runtime.region("keyed", lambda _: Counter())
        lasting: Probe[Any] = Probe()
        target.watch(runtime.spawn(lambda: lasting, name="lasting"))
        for number in range(1_000):
            watcher = runtime.spawn(Probe, name=f"watcher-{number}")
            target.watch(watcher)
            region["key"].watch(watcher)
            await watcher.stop()
        assert len(target._cell.watchers or ()) <= 32
        assert len(region._watchers["key"]) <= 32

        await target.stop()
        (notice,) = await lasting.wait_for(1)
        assert notice.ref == target


async def test_a_region_that_has_stopped_activates_nothing() -> None:
    async with Runtime() as runtime:
        made: list[str] = []

        def make(key: str) -> Counter:
            made.append(key)
            return Counter()

        region = runtime.region("keyed", make)
        with pytest.raises(NotDelivered):
            await stop_and_ask(region)
        refusing = runtime.region("refusing", make)
        with pytest.raises(LookupError, match="a"):
            await stop_and_ask(refusing, refusal=LookupError)
        await refusing["a"].tell("lost")

        assert made == []
        assert runtime.dead_letters.count == 1
        assert list(cells_of(runtime._root)) == []


async def stop_and_ask(
    region: Region[Any], refusal: Callable[[str], BaseException] | None = None
) -> None:
    await region.stop(refusal=refusal)
    await region["a"].ask(Get())
