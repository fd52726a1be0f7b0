"""What only `_backend.py` knows: one waiter, one answer, on either loop and from any thread."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from turnkeeper.runtime._backend import clear_stray_cancellation
from turnkeeper.runtime.lowlevel import OneShot, thread_caller

pytestmark = pytest.mark.anyio


async def parked() -> None:
    await anyio.wait_all_tasks_blocked()


async def test_a_value_set_before_anyone_waits_is_kept() -> None:
    cell: OneShot[int] = OneShot()
    cell.set(1)
    assert await cell.wait() == 1


async def test_a_waiter_is_woken_by_the_value() -> None:
    cell: OneShot[int] = OneShot()
    got: list[int] = []

    async def wait() -> None:
        got.append(await cell.wait())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await parked()
        assert not cell.is_done

        cell.set(2)

    assert got == [2]


async def test_a_waiter_gets_exactly_the_error_it_was_failed_with() -> None:
    cell: OneShot[int] = OneShot()
    error = ValueError("as it is")
    cell.fail(error)
    with pytest.raises(ValueError, match="as it is") as caught:
        await cell.wait()
    assert caught.value is error


async def test_the_first_answer_stands() -> None:
    cell: OneShot[int] = OneShot()
    cell.set(1)
    cell.set(2)
    cell.fail(ValueError())
    assert await cell.wait() == 1


async def test_answering_a_waiter_that_was_cancelled_does_nothing() -> None:
    cell: OneShot[int] = OneShot()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cell.wait)
        await parked()
        tasks.cancel_scope.cancel()

    cell.set(1)

    assert cell.is_done


async def test_answering_a_waiter_in_the_moment_of_its_cancellation_does_nothing() -> None:
    cell: OneShot[int] = OneShot()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cell.wait)
        await parked()
        tasks.cancel_scope.cancel()
        cell.set(1)  # before the waiter has run its way out
    await checkpoint()
    assert cell.is_done


async def test_a_second_waiter_is_refused() -> None:
    cell: OneShot[int] = OneShot()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cell.wait)
        await parked()
        with pytest.raises(RuntimeError, match="one waiter"):
            await cell.wait()
        cell.set(1)


async def test_a_thread_can_wake_a_waiter() -> None:
    cell: OneShot[str] = OneShot()
    call_soon = thread_caller()
    thread = threading.Thread(target=lambda: call_soon(lambda: cell.set("from a thread")))

    thread.start()

    assert await cell.wait() == "from a thread"
    thread.join()


def test_a_thread_that_calls_after_the_loop_is_gone_is_not_disturbed(
    anyio_backend: tuple[str, dict[str, Any]],
) -> None:
    async def make() -> Callable[[Callable[[], None]], None]:
        return thread_caller()

    call_soon = anyio.run(make, backend=anyio_backend[0], backend_options=anyio_backend[1])

    call_soon(lambda: pytest.fail("nobody may run this"))


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
