"""The runtime under native cancellation, as libraries and the end of `asyncio.run` do it."""

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from turnkeeper.runtime import Actor, DaemonThreads, Effect, Runtime, Unavailable
from turnkeeper.runtime._backend import open_tasks
from turnkeeper.runtime.lowlevel import ThreadCalls
from turnkeeper.runtime.testing import settle

from .actors import Counter, Get, Run

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Stopping(Counter):
    """Notes that it was stopped, after a wait."""

    async def on_stop(self) -> None:
        await settle()
        self.log.append("stopped")


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def step_until(is_done: Callable[[], bool]) -> None:
    while not is_done():
        await anyio.lowlevel.checkpoint()


class TestTheTaskThatHoldsTheRuntime:
    @pytest.mark.parametrize("steps", range(12))
    async def test_cancelled_while_it_enters_leaves_no_task_behind(self, steps: int) -> None:
        before = asyncio.all_tasks()

        async def hold() -> None:
            async with Runtime():
                await anyio.sleep_forever()

        task = asyncio.create_task(hold())
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()
        assert asyncio.all_tasks() == before

    @pytest.mark.parametrize("again", range(0, 40, 3))
    async def test_cancelled_again_while_it_leaves_still_stops_its_actors(self, again: int) -> None:
        before = asyncio.all_tasks()
        log: list[object] = []
        begun = anyio.Event()

        async def pause(_: Actor) -> None:
            begun.set()
            for _step in range(10):
                await anyio.lowlevel.checkpoint()

        async def hold() -> None:
            async with Runtime() as runtime:
                await runtime.spawn(lambda: Stopping(log), name="stopping").tell(Run(pause))
                await anyio.sleep_forever()

        task = asyncio.create_task(hold())
        await begun.wait()
        task.cancel()
        for _ in range(again):
            await anyio.lowlevel.checkpoint()
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["stopped"]
        await settle()
        assert asyncio.all_tasks() == before

    async def test_cancelled_twice_leaves_the_group_around_it_usable(self) -> None:
        gone_on: list[str] = []

        async def inner() -> None:
            async with Runtime() as runtime:
                await runtime.spawn(Stopping, name="stopping").ask(Get())
                await anyio.sleep_forever()

        async def outer() -> None:
            async with anyio.create_task_group():
                task = asyncio.current_task()
                assert task is not None
                try:
                    await inner()
                except asyncio.CancelledError:
                    while task.uncancel():
                        pass
                await anyio.lowlevel.checkpoint()
                gone_on.append("in the group")

        task = asyncio.create_task(outer())
        await settle()
        task.cancel()
        await anyio.lowlevel.checkpoint()
        task.cancel()
        await task
        assert gone_on == ["in the group"]

    async def test_a_timeout_around_the_block_is_a_timeout(self) -> None:
        async def time_out() -> None:
            async with asyncio.timeout(None) as timeout, Runtime() as runtime:
                await runtime.spawn(Stopping, name="stopping").ask(Get())
                timeout.reschedule(asyncio.get_running_loop().time())
                await anyio.sleep_forever()

        with pytest.raises(TimeoutError):
            await time_out()


class TestTheRuntimesOwnTasks:
    async def test_cancelled_all_at_once_they_go_on(self) -> None:
        log: list[object] = []
        async with Runtime() as runtime:
            runtime.portal()
            ref = runtime.spawn(lambda: Stopping(log), name="stopping")
            assert await ref.ask(Get()) == 0
            for _ in range(3):
                for task in others():
                    if not task.get_name().startswith("Task"):
                        task.cancel()
                for task in [each for each in others() if "host" in repr(each.get_coro())]:
                    task.cancel()
                await settle()
                assert await ref.ask(Get(), timeout=60.0) == 0
        assert log == ["stopped"]

    @pytest.mark.parametrize("is_kill_first", [False, True])
    @pytest.mark.parametrize("steps", range(3))
    async def test_cancelled_and_killed_at_once_one_takes_no_other_with_it(
        self, is_kill_first: bool, steps: int
    ) -> None:
        tasks: list[asyncio.Task[Any]] = []
        effects: list[Effect] = []

        async def start(actor: Actor) -> None:
            async def effect() -> None:
                task = asyncio.current_task()
                assert task is not None
                tasks.append(task)
                await anyio.sleep_forever()

            effects.append(actor.context.start_effect(effect, name="effect"))

        async with Runtime() as runtime:
            ref = runtime.spawn(Counter, name="counter")
            await ref.ask(Run(start))
            await step_until(lambda: bool(tasks))
            ends: list[Callable[[], object]] = [effects[0].cancel, tasks[0].cancel]
            first, second = ends if is_kill_first else reversed(ends)
            first()
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            second()
            with anyio.fail_after(60):
                await effects[0].wait_until_ended()
                assert await ref.ask(Get()) == 0

    async def test_cancelled_before_its_first_step_a_worker_is_replaced(self) -> None:
        async with Runtime() as runtime:
            ref = runtime.spawn(Counter, name="counter")
            resident = runtime.spawn(Counter, name="resident", resident=True)
            before = others()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ref.ask, Get())
                tasks.start_soon(resident.ask, Get())
                await anyio.lowlevel.checkpoint()
                for task in others() - before:
                    if "_pool" in task.get_name():
                        task.cancel()
            assert await ref.ask(Get()) == 0
            assert await resident.ask(Get()) == 0

    async def test_cancelled_before_its_first_step_a_call_from_a_thread_is_made_all_the_same(
        self,
    ) -> None:
        answers: list[int] = []

        async def five() -> int:
            return 5

        def call() -> None:
            answers.append(calls.call(five))

        async with ThreadCalls() as calls, anyio.create_task_group() as threads:
            threads.start_soon(DaemonThreads(), call)
            await step_until(lambda: bool(tasks_of(calls)))
            for task in tasks_of(calls):
                task.cancel()
            await step_until(lambda: bool(answers))
            await DaemonThreads()(call)
        assert answers == [5, 5]

    @pytest.mark.parametrize("is_body_over", [False, True])
    async def test_those_that_clean_up_are_waited_for_if_the_block_is_cancelled(
        self, is_body_over: bool
    ) -> None:
        log: list[str] = []

        async def clean_up() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await settle()
                log.append("cleaned up")

        async def hold() -> None:
            async with open_tasks() as tasks:
                tasks.start_soon(clean_up)
                if not is_body_over:
                    await anyio.sleep_forever()

        async with anyio.create_task_group() as group:
            group.start_soon(hold)
            await settle()
            group.cancel_scope.cancel()
        assert log == ["cleaned up"]


def tasks_of(calls: ThreadCalls) -> list[asyncio.Task[Any]]:
    name = f"{calls.call.__module__}.{type(calls).__qualname__}._run"
    return [task for task in others() if task.get_name() == name]


def run_and_forget(
    hold: Callable[[anyio.Event], Any], *, steps: int = 0
) -> tuple[list[str], list[object]]:
    """Run a background task that holds a runtime; the main task ends without waiting for it."""
    complaints: list[object] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        ready = anyio.Event()
        kept.append(asyncio.create_task(hold(ready)))
        await ready.wait()
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()

    kept: list[asyncio.Task[None]] = []
    asyncio.run(main())
    return [
        "cancelled" if task.cancelled() else repr(task.exception()) for task in kept
    ], complaints


@pytest.mark.parametrize("steps", range(6))
def test_the_end_of_the_loop_stops_the_actors_of_a_background_task(steps: int) -> None:
    log: list[object] = []

    async def hold(ready: anyio.Event) -> None:
        async with Runtime() as runtime:
            ref = runtime.spawn(lambda: Stopping(log), name="stopping")
            ready.set()
            while True:
                await ref.ask(Get())
                await anyio.lowlevel.checkpoint()

    assert run_and_forget(hold, steps=steps) == (["cancelled"], [])
    assert log == ["stopped"]


def test_the_end_of_the_loop_closes_a_runtime_that_its_task_never_left() -> None:
    log: list[object] = []
    runtimes: list[Runtime] = []

    async def hold(ready: anyio.Event) -> None:
        runtime = Runtime()
        runtimes.append(runtime)
        await runtime.__aenter__()
        await runtime.spawn(lambda: Stopping(log), name="stopping").ask(Get())
        ready.set()

    _, complaints = run_and_forget(hold)
    assert log == ["stopped"]
    assert complaints == []
    (runtime,) = runtimes
    assert isinstance(runtime._failure, Unavailable)
    with pytest.warns(ResourceWarning, match="never left"):
        runtime.__del__()
    runtime._is_open = False  # said once
