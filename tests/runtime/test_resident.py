"""Resident actors: one task for life, for what is opened in one step and closed in another."""

from contextlib import AsyncExitStack

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.runtime import (
    Actor,
    Backoff,
    Failure,
    NotDelivered,
    Runtime,
    Supervision,
)
from turnkeeper.runtime.testing import VirtualClock, settle

from .actors import Add, Counter, Fail, Get, Run, block

pytestmark = pytest.mark.anyio

AT_ONCE = Supervision(backoff=Backoff(first_s=0.0))


class Holder(Counter):
    """Holds a task group open for its whole life."""

    def __init__(self, log: list[object]) -> None:
        super().__init__(log)
        self.stack = AsyncExitStack()
        self.tasks: anyio.abc.TaskGroup

    async def on_start(self) -> None:
        self.tasks = await self.stack.enter_async_context(anyio.create_task_group())
        self.tasks.start_soon(anyio.sleep_forever)
        self.log.append("opened")

    async def on_stop(self) -> None:
        self.tasks.cancel_scope.cancel()
        await self.stack.aclose()
        self.log.append("closed")


async def test_what_on_start_opens_on_stop_can_close() -> None:
    log: list[object] = []
    async with Runtime() as runtime:
        ref = runtime.spawn(lambda: Holder(log), name="holder", resident=True)
        assert await ref.ask(Get()) == 0
        await ref.stop()
        assert log == ["opened", "closed"]
        with pytest.raises(NotDelivered):
            await ref.ask(Get())


async def test_it_is_restarted_with_its_mail_as_any_other() -> None:
    log: list[object] = []
    async with Runtime(supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(lambda: Holder(log), name="holder", resident=True)
        await ref.tell(Fail(ValueError()))
        await ref.tell(Add(3))
        assert await ref.ask(Get()) == 3
    assert log == ["opened", "closed", "opened", Add(3), "closed"]


async def test_a_task_that_it_holds_may_fail_it() -> None:
    log: list[object] = []
    async with Runtime(supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(lambda: Holder(log), name="holder", resident=True)
        with runtime.events.subscribe(Failure) as failures:

            async def start(actor: Actor) -> None:
                assert isinstance(actor, Holder)
                actor.tasks.start_soon(fail)

            await ref.tell(Run(start))
            await anext(failures)
        await ref.tell(Add(2))
        assert await ref.ask(Get()) == 2
    assert log.count("opened") == 2


async def test_one_that_a_task_of_its_own_fails_still_waits_for_its_effects() -> None:
    log: list[object] = []

    async def effect() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
                log.append("effect ended")

    async def start(actor: Actor) -> None:
        assert isinstance(actor, Holder)
        actor.context.start_effect(effect, name="forever")
        await anyio.lowlevel.checkpoint()
        actor.tasks.start_soon(fail)

    async with Runtime(supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(lambda: Holder(log), name="holder", resident=True)
        with runtime.events.subscribe(Failure) as failures:
            await ref.tell(Run(start))
            await anext(failures)
        assert await ref.ask(Get()) == 0
        assert log == ["opened", "effect ended", "opened"]


async def fail() -> None:
    raise OSError("the connection is gone")


async def test_a_handler_that_takes_too_long_is_cancelled_and_its_actor_still_closes() -> None:
    log: list[object] = []
    clock = VirtualClock()
    async with Runtime(ports=clock.ports(), stop_s=1.0) as runtime:
        ref = runtime.spawn(lambda: Holder(log), name="holder", resident=True)
        await block(ref)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.stop)
            await clock.advance(1.5)
    assert log == ["opened", "closed"]


async def test_two_residents_wait_side_by_side() -> None:
    async with Runtime() as runtime:
        first = runtime.spawn(Counter, name="first", resident=True)
        second = runtime.spawn(Counter, name="second", resident=True)
        gate = await block(first)
        assert await second.ask(Get()) == 0
        gate.set()
        assert await first.ask(Get()) == 0


async def test_a_failed_start_is_heard_by_those_who_wait() -> None:
    class Unstartable(Counter):
        async def on_start(self) -> None:
            raise OSError("no such file")

    async with Runtime() as runtime:
        ref = runtime.spawn(Unstartable, name="unstartable", resident=True)
        with pytest.raises(NotDelivered, match="could not start: OSError; nothing") as caught:
            await ref.ask(Get())
        assert isinstance(caught.value.__cause__, OSError)
        await settle()
