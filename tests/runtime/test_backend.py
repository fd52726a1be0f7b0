"""What only `_backend.py` knows: one waiter, one answer, on either loop and from any thread."""

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import ReferenceType

import anyio
import anyio.to_thread
import pytest
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from turnkeeper.runtime._backend import clear_stray_cancellation, make_lone_bell, parking
from turnkeeper.runtime.lowlevel import (
    Bell,
    OneShot,
    closing_scopes,
    home_check,
    make_bell,
    pausing,
    task_group,
    thread_caller,
)

pytestmark = pytest.mark.anyio

HUNG_S = 60.0


async def parked() -> None:
    await anyio.wait_all_tasks_blocked()


@asynccontextmanager
async def bounded_tasks() -> AsyncIterator[TaskGroup]:
    """Open a task group that fails if a task of it is not woken."""
    with anyio.fail_after(HUNG_S):
        async with anyio.create_task_group() as tasks:
            yield tasks


async def test_a_pause_lets_others_run_and_delivers_a_cancellation() -> None:
    pause = pausing()
    ran: list[str] = []

    async def run() -> None:
        ran.append("other")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        for _ in range(2):  # trio goes through those that can run in any order
            await pause()
        ran.append("pauser")
    with anyio.CancelScope() as scope:
        await pause()
        scope.cancel()
        await pause()
        ran.append("not cancelled")

    assert scope.cancelled_caught
    assert ran == ["other", "pauser"]


async def test_a_value_set_before_anyone_waits_is_kept() -> None:
    one_shot: OneShot[int] = OneShot()
    one_shot.set(1)
    assert await one_shot.wait() == 1


async def test_a_waiter_is_woken_by_the_value() -> None:
    one_shot: OneShot[int] = OneShot()
    got: list[int] = []

    async def wait() -> None:
        got.append(await one_shot.wait())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await parked()
        assert not one_shot.is_done

        one_shot.set(2)

    assert got == [2]


async def test_a_waiter_gets_exactly_the_error_it_was_failed_with() -> None:
    one_shot: OneShot[int] = OneShot()
    error = ValueError("as it is")
    one_shot.fail(error)
    with pytest.raises(ValueError, match="as it is") as caught:
        await one_shot.wait()
    assert caught.value is error


async def test_the_first_answer_stands() -> None:
    one_shot: OneShot[int] = OneShot()
    one_shot.set(1)
    one_shot.set(2)
    one_shot.fail(ValueError())
    assert await one_shot.wait() == 1


async def test_answering_a_waiter_that_was_cancelled_does_nothing() -> None:
    one_shot: OneShot[int] = OneShot()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one_shot.wait)
        await parked()
        tasks.cancel_scope.cancel()

    one_shot.set(1)

    assert one_shot.is_done


async def test_answering_a_waiter_in_the_moment_of_its_cancellation_does_nothing() -> None:
    one_shot: OneShot[int] = OneShot()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one_shot.wait)
        await parked()
        tasks.cancel_scope.cancel()
        one_shot.set(1)  # before the waiter has run its way out
    await checkpoint()
    assert one_shot.is_done


async def test_a_second_waiter_is_refused() -> None:
    one_shot: OneShot[int] = OneShot()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one_shot.wait)
        await parked()
        with pytest.raises(RuntimeError, match="one waiter"):
            await one_shot.wait()
        one_shot.set(1)


async def test_a_thread_can_wake_a_waiter() -> None:
    one_shot: OneShot[str] = OneShot()
    call_soon = thread_caller()
    thread = threading.Thread(target=lambda: call_soon(lambda: one_shot.set("from a thread")))

    thread.start()

    assert await one_shot.wait() == "from a thread"
    thread.join()


def test_a_thread_that_calls_after_the_loop_is_gone_is_not_disturbed(
    anyio_backend: tuple[str, dict[str, Any]],
) -> None:
    async def make() -> Callable[[Callable[[], None]], bool]:
        return thread_caller()

    call_soon = anyio.run(make, backend=anyio_backend[0], backend_options=anyio_backend[1])

    assert not call_soon(lambda: pytest.fail("nobody may run this"))


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


async def test_an_error_that_is_frozen_leaves_code_with_its_scopes_as_it_is() -> None:
    with pytest.raises(Frozen), closing_scopes("a tool"):
        raise Frozen(404)


async def test_a_home_check_tells_its_loop_from_others(
    anyio_backend: tuple[str, dict[str, Any]],
) -> None:
    is_home = home_check()

    async def look() -> bool:
        return is_home()

    def look_in_another_loop() -> bool:
        return anyio.run(look, backend=anyio_backend[0], backend_options=anyio_backend[1])

    assert is_home()
    assert not await anyio.to_thread.run_sync(is_home)
    assert not await anyio.to_thread.run_sync(look_in_another_loop)


async def test_a_late_value_wakes_no_task_but_the_one_that_waited_for_it() -> None:
    """On trio, the means to wake a task are used again for the next one that waits."""
    left, awaited = OneShot[int](), OneShot[int]()
    got: list[int] = []

    async def leave() -> None:
        await parking()(left)

    async def wait() -> None:
        got.append(await awaited.wait())

    async with bounded_tasks() as tasks:
        tasks.start_soon(leave)
        await parked()
        tasks.cancel_scope.cancel()
    async with bounded_tasks() as tasks:
        tasks.start_soon(wait)
        await parked()

        left.set(1)
        await parked()
        assert not got

        awaited.set(2)
    assert got == [2]


class TestBells:
    """A bell wakes its task again and again; asyncio steps those that are rung together at once."""

    @pytest.fixture(params=[make_bell, make_lone_bell])
    def make(self, request: pytest.FixtureRequest) -> Callable[[], Bell]:
        make: Callable[[], Bell] = request.param
        return make

    async def test_each_ring_wakes_the_task_once(self, make: Callable[[], Bell]) -> None:
        bell, woken = make(), 0

        async def wait() -> None:
            nonlocal woken
            while woken < 3:
                await bell.wait()
                woken += 1

        async with bounded_tasks() as tasks:
            tasks.start_soon(wait)
            for count in range(3):
                await parked()
                assert woken == count
                bell.ring()
                bell.ring()  # no task waits yet, and no ring is kept
        assert woken == 3

    async def test_a_wait_that_was_cancelled_takes_no_ring_and_the_next_one_does(
        self, make: Callable[[], Bell]
    ) -> None:
        bell, woken = make(), []

        async def wait(name: str) -> None:
            await bell.wait()
            woken.append(name)

        async with bounded_tasks() as tasks:
            tasks.start_soon(wait, "first")
            await parked()
            tasks.cancel_scope.cancel()
        bell.ring()
        async with bounded_tasks() as tasks:
            tasks.start_soon(wait, "second")
            await parked()
            bell.ring()

        assert woken == ["second"]

    async def test_a_ring_in_the_moment_of_a_cancellation_harms_no_one(
        self, make: Callable[[], Bell]
    ) -> None:
        bells, ended = [make() for _ in range(4)], []

        async def wait(bell: Bell) -> None:
            try:
                await bell.wait()
            finally:
                ended.append(bell)

        async with bounded_tasks() as tasks:
            for bell in bells:
                tasks.start_soon(wait, bell)
            await parked()
            bells[0].ring()
            tasks.cancel_scope.cancel()
            bells[1].ring()
        for bell in bells:
            bell.ring()
        await checkpoint()
        assert len(ended) == 4

    async def test_a_time_limit_ends_a_wait_and_the_task_waits_again(
        self, make: Callable[[], Bell]
    ) -> None:
        bell, is_cut_off, woken = make(), anyio.Event(), 0

        async def wait() -> None:
            nonlocal woken
            with anyio.CancelScope() as scope:
                scope.cancel()
                await bell.wait()
            assert scope.cancelled_caught
            is_cut_off.set()
            await bell.wait()
            woken += 1

        async with bounded_tasks() as tasks:
            tasks.start_soon(wait)
            await is_cut_off.wait()
            await parked()
            bell.ring()
        assert woken == 1

    async def test_a_task_that_is_woken_may_ring_others_and_its_own(
        self, make: Callable[[], Bell]
    ) -> None:
        """Each has its turn after those that were woken before."""
        bells, order = [make() for _ in range(3)], []

        async def wait(number: int) -> None:
            for _ in range(2):
                await bells[number].wait()
                order.append(number)
                for bell in bells:
                    bell.ring()

        async with bounded_tasks() as tasks:
            for number in range(3):
                tasks.start_soon(wait, number)
            await parked()
            bells[0].ring()
            await parked()
            for bell in bells:
                bell.ring()
            await parked()
            tasks.cancel_scope.cancel()
        assert order[0] == 0
        assert sorted(order) == [0, 0, 1, 1, 2, 2]

    async def test_tasks_that_follow_each_other_may_wait_for_one_bell(
        self, make: Callable[[], Bell]
    ) -> None:
        bell, woken = make(), []

        async def wait(number: int) -> None:
            await bell.wait()
            woken.append(number)

        for number in range(3):
            async with bounded_tasks() as tasks:
                tasks.start_soon(wait, number)
                await parked()
                bell.ring()
        assert woken == [0, 1, 2]

    async def test_a_second_task_is_refused_and_the_first_one_still_woken(
        self, make: Callable[[], Bell]
    ) -> None:
        bell, woken = make(), 0

        async def wait() -> None:
            nonlocal woken
            await bell.wait()
            woken += 1

        async with bounded_tasks() as tasks:
            tasks.start_soon(wait)
            await parked()
            with pytest.raises(RuntimeError, match="another task waits"):
                await bell.wait()
            bell.ring()
        assert woken == 1

    async def test_a_task_may_wait_before_one_that_was_cancelled_has_left(self) -> None:
        bell, scope = make_lone_bell(), anyio.CancelScope()

        async def leave() -> None:
            with scope:
                await bell.wait()

        async def ring() -> None:
            await parked()
            bell.ring()

        async with bounded_tasks() as tasks:
            tasks.start_soon(leave)
            await parked()
            tasks.start_soon(ring)
            scope.cancel()
            await bell.wait()

    async def test_a_bell_is_free_again_once_its_waiter_was_closed(self) -> None:
        bell = make_bell()

        async def wait() -> None:
            await bell.wait()

        left = wait()
        left.send(None)  # to no loop
        left.close()
        bell.ring()
        left = wait()
        left.send(None)
        left.close()
        async with bounded_tasks() as tasks:
            tasks.start_soon(wait)
            await parked()
            bell.ring()

    async def test_a_bell_leaves_no_circle_for_the_garbage_collector(
        self, make: Callable[[], Bell]
    ) -> None:
        async def wait(bell: Bell) -> None:
            await bell.wait()

        bell = make()
        async with bounded_tasks() as tasks:
            tasks.start_soon(wait, bell)
            await parked()
            bell.ring()
        kind = type(bell)

        def count_bells() -> int:
            return sum(type(one) is kind for one in gc.get_objects())

        gc.collect()
        gc.disable()
        try:
            before = count_bells()
            del bell
            assert count_bells() == before - 1
        finally:
            gc.enable()


class TestBellsOfAsyncio:
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    async def test_a_native_cancellation_reaches_the_task_with_its_message(self) -> None:
        bell = make_bell()

        async def wait() -> None:
            await bell.wait()

        task = asyncio.get_running_loop().create_task(wait())
        await parked()
        task.cancel("enough")
        with anyio.fail_after(HUNG_S), pytest.raises(asyncio.CancelledError, match="enough"):
            await task
        bell.ring()

    async def test_a_native_cancellation_right_after_a_ring_reaches_the_task(self) -> None:
        bell = make_bell()

        async def wait() -> None:
            await bell.wait()
            await anyio.sleep_forever()

        task = asyncio.get_running_loop().create_task(wait())
        await parked()
        bell.ring()
        task.cancel()
        with anyio.fail_after(HUNG_S), pytest.raises(asyncio.CancelledError):
            await task

    async def test_a_task_that_was_woken_and_has_ended_is_not_held(self) -> None:
        bell = make_bell()

        async def wait() -> None:
            await bell.wait()

        task = asyncio.get_running_loop().create_task(wait())
        await parked()
        bell.ring()
        with anyio.fail_after(HUNG_S):
            await task
        ended = ReferenceType(task)
        del task
        await checkpoint()  # the loop's callback of its end is held as long as that runs
        gc.collect()
        assert ended() is None

    async def test_all_that_are_rung_together_take_one_callback_of_the_loop(self) -> None:
        bells, woken = [make_bell() for _ in range(50)], 0

        async def wait(bell: Bell) -> None:
            nonlocal woken
            await bell.wait()
            woken += 1

        async with bounded_tasks() as tasks:
            for bell in bells:
                tasks.start_soon(wait, bell)
            await parked()
            scheduled: list[object] = []
            loop = asyncio.get_running_loop()
            with pytest.MonkeyPatch.context() as patch:
                call_soon = loop.call_soon

                def count(callback: Callable[..., object], *args: object) -> asyncio.Handle:
                    scheduled.append(callback)
                    return call_soon(callback, *args)

                patch.setattr(loop, "call_soon", count)
                for bell in bells:
                    bell.ring()
            assert len(scheduled) == 1
        assert woken == 50

    async def test_a_task_that_runs_the_loop_itself_has_the_others_woken(self) -> None:
        """Notebooks do that, where a cell runs the loop that runs the notebook."""
        bells, woken = [make_bell() for _ in range(3)], []
        loop: Any = asyncio.get_running_loop()  # Any: one pass of it is no public method
        if not hasattr(loop, "_run_once"):
            pytest.skip("this loop cannot be run by its own tasks")

        async def wait(number: int) -> None:
            await bells[number].wait()
            woken.append(number)
            if number == 0:
                this: Any = asyncio.current_task()  # Any: it is not None here
                asyncio.tasks._leave_task(loop, this)
                try:
                    for _ in range(3):
                        loop.call_soon(int)
                        loop._run_once()
                finally:
                    asyncio.tasks._enter_task(loop, this)
                woken.append(10)

        async with bounded_tasks() as tasks:
            for number in range(3):
                tasks.start_soon(wait, number)
            await parked()
            for bell in bells:
                bell.ring()
        assert woken == [0, 1, 2, 10]

    async def test_the_other_tasks_are_stepped_though_one_ends_the_program(self) -> None:
        """The loop passes `SystemExit` on through the callback in which a task raises it."""
        woken: list[int] = []

        async def wait(number: int, bell: Bell) -> None:
            await bell.wait()
            woken.append(number)
            if number == 1:
                raise SystemExit

        async def main() -> None:
            bells = [make_bell() for _ in range(3)]
            tasks = [
                asyncio.get_running_loop().create_task(wait(number, bell))
                for number, bell in enumerate(bells)
            ]
            await asyncio.sleep(0)
            for bell in bells:
                bell.ring()
            await asyncio.wait(tasks, timeout=HUNG_S)

        def run() -> None:
            loop = asyncio.new_event_loop()
            try:
                running = loop.create_task(main())
                with pytest.raises(SystemExit):
                    loop.run_until_complete(running)
                loop.run_until_complete(running)
            finally:
                loop.close()

        await anyio.to_thread.run_sync(run)
        assert woken == [0, 1, 2]


class TestStrayCancellation:
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    async def test_a_native_cancellation_that_no_scope_asked_for_is_cleared(self) -> None:
        seen: list[bool] = []

        async def victim() -> None:
            try:
                await anyio.sleep_forever()
            except asyncio.CancelledError as error:
                seen.append(clear_stray_cancellation(error))
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await checkpoint()  # would raise if the task were still being cancelled

        task = asyncio.get_running_loop().create_task(victim())
        await parked()
        task.cancel()
        task.cancel()
        await task
        assert seen == [True]


async def test_a_cancellation_by_an_enclosing_scope_is_not_stray() -> None:
    seen: list[bool] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class() as error:
            seen.append(clear_stray_cancellation(error))
            raise
    assert seen == [False]


def test_another_thread_may_be_importing_trio(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = ModuleType("trio")  # it has no names yet
    monkeypatch.setitem(sys.modules, "trio", begun)

    async def main() -> None:
        bell = make_bell()
        asyncio.get_running_loop().call_later(0, bell.ring)
        async with asyncio.timeout(HUNG_S):
            await bell.wait()

    asyncio.run(main())


def test_a_bell_of_a_loop_that_was_closed_wakes_no_one() -> None:
    loop = asyncio.new_event_loop()

    async def wait(bell: Bell) -> None:
        await bell.wait()

    async def main() -> Bell:
        bell = make_bell()
        task = loop.create_task(wait(bell))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return bell

    bell = loop.run_until_complete(main())
    loop.close()
    bell.ring()


def test_a_loop_that_was_closed_is_not_held_by_the_tasks_that_were_rung() -> None:
    async def wait(bell: Bell) -> None:
        await bell.wait()

    def run() -> tuple[Bell, ReferenceType[object]]:
        loop = asyncio.new_event_loop()

        async def main() -> Bell:
            bell = make_bell()
            task = loop.create_task(wait(bell))
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            await asyncio.sleep(0)
            loop.call_soon(bell.ring)  # in the last pass of the loop
            return bell

        bell = loop.run_until_complete(main())
        loop.close()
        return bell, ReferenceType(loop)

    bell, closed = run()
    del bell
    gc.collect()
    assert closed() is None


async def test_a_group_waits_for_its_tasks_and_raises_their_errors_in_a_group() -> None:
    done: list[int] = []

    async def work(number: int) -> None:
        await checkpoint()
        done.append(number)
        if number:
            raise ValueError(number)

    async with task_group() as group:
        group.start_soon(work, 0)
    assert done == [0]

    async def fail() -> None:
        async with task_group() as group:
            group.start_soon(work, 1)
            group.start_soon(anyio.sleep_forever)
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as failed:
        await fail()
    assert [str(error) for error in failed.value.exceptions] == ["1"]


async def test_a_cancellation_leaves_a_group_of_tasks_as_it_is() -> None:
    """In no group of errors, so that code may catch it."""
    caught: list[BaseException] = []

    with anyio.CancelScope() as scope:
        try:
            async with task_group() as group:
                for _ in range(2):
                    group.start_soon(anyio.sleep_forever)
                await parked()
                scope.cancel()
                await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class() as error:
            caught.append(error)
            raise

    assert scope.cancelled_caught
    assert len(caught) == 1


def test_a_wait_in_a_guest_run_of_trio_is_one_of_trio() -> None:
    """Its host is a loop of asyncio's, which runs in the same thread."""
    trio = pytest.importorskip("trio")
    heard: list[str] = []

    async def guest() -> None:
        one_shot: OneShot[str] = OneShot()
        trio.lowlevel.current_trio_token().run_sync_soon(one_shot.set, "told")
        heard.append(await one_shot.wait())

    async def host() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def done(outcome: object) -> None:
            heard.append(str(outcome))
            ended.set()

        trio.lowlevel.start_guest_run(
            guest,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=done,
        )
        await asyncio.wait_for(ended.wait(), HUNG_S)

    asyncio.run(host())

    assert heard == ["told", "Value(None)"]


def test_a_wait_in_a_run_of_trio_inside_a_task_of_asyncio_is_one_of_trio() -> None:
    """As in a notebook: its cell is a task of asyncio's, and may call `trio.run`."""
    trio = pytest.importorskip("trio")

    async def inner() -> str:
        one_shot: OneShot[str] = OneShot()
        trio.lowlevel.current_trio_token().run_sync_soon(one_shot.set, "told")
        return await one_shot.wait()

    async def outer() -> object:
        return trio.run(inner)

    assert asyncio.run(outer()) == "told"


def test_a_run_of_trio_inside_a_task_of_asyncio_is_another_loop() -> None:
    """A call that is let in there could not wait: trio refuses a future of asyncio's."""
    trio = pytest.importorskip("trio")

    async def outer() -> list[object]:
        is_home = home_check()

        async def inner() -> tuple[bool, bool]:
            return is_home(), home_check()()

        return [is_home(), trio.run(inner), is_home()]

    assert asyncio.run(outer()) == [True, (False, True), True]
