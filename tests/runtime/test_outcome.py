"""Handlers that wait for one outcome in the middle, and hold no worker while they do."""

from collections.abc import Callable
from contextlib import suppress

import anyio
import pytest

from turnkeeper.runtime import Actor, ActorFailed, Message, Refused, Runtime, TurnkeeperError
from turnkeeper.runtime.lowlevel import OneShot
from turnkeeper.runtime.testing import VirtualClock, settle

pytestmark = pytest.mark.anyio


class Wait(Message[object]):
    """Wait for the cell."""


class Other(Message[object]):
    """Something that waits for nothing."""


class Waiter(Actor):
    """Answers with what comes into its cell; then, if told to, waits as any handler does."""

    def __init__(self, cell: OneShot[int], *, goes_on: anyio.Event | None = None) -> None:
        self.cell = cell
        self.goes_on = goes_on
        self.ended: list[str] = []

    async def receive(self, message: object) -> object:
        if isinstance(message, Other):
            return "another message"
        try:
            value = await self.context.wait_for(self.cell)
            if self.goes_on is not None:
                await self.goes_on.wait()
        finally:
            self.ended.append("ended")
        return value


async def test_actors_that_wait_for_an_outcome_hold_no_worker() -> None:
    cells: list[OneShot[int]] = [OneShot() for _ in range(100)]
    answers: list[object] = []

    async with Runtime() as runtime, anyio.create_task_group() as tasks:

        async def ask(number: int) -> None:
            ref = runtime.spawn(lambda: Waiter(cells[number]), name=f"waiter {number}")
            answers.append(await ref.ask(Wait()))

        for number in range(100):
            tasks.start_soon(ask, number)
        await settle()
        assert len(runtime._system.pool.workers) == 1
        for number, cell in enumerate(cells):
            cell.set(number)
    assert sorted(answers, key=str) == sorted(range(100), key=str)


async def test_mail_that_comes_meanwhile_waits_its_turn() -> None:
    cell: OneShot[int] = OneShot()
    answers: list[object] = []

    async with Runtime() as runtime, anyio.create_task_group() as tasks:
        ref = runtime.spawn(lambda: Waiter(cell), name="waiter")

        async def ask(message: Wait | Other) -> None:
            answers.append(await ref.ask(message))

        tasks.start_soon(ask, Wait())
        await settle()
        tasks.start_soon(ask, Other())
        await settle()
        assert answers == []
        cell.set(1)
    assert answers == [1, "another message"]


@pytest.mark.parametrize("kind", ["unattended", "ordinary"])
async def test_a_handler_that_begins_in_the_askers_stack_may_wait_for_it(kind: str) -> None:
    cell: OneShot[int] = OneShot()

    class Inline(Actor):
        def receive(self, message: object) -> object:
            if isinstance(message, Other):
                return "another message"
            return self._answer()

        async def _answer(self) -> int:
            return await (self.context.wait_for(cell) if kind == "unattended" else cell)

    answers: list[object] = []
    async with Runtime() as runtime, anyio.create_task_group() as tasks:
        ref = runtime.spawn(Inline, name="inline")
        assert await ref.ask(Other()) == "another message"

        async def ask() -> None:
            answers.append(await ref.ask(Wait()))

        tasks.start_soon(ask)
        await settle()
        cell.set(4)
    assert answers == [4]


async def test_an_outcome_that_is_there_already_is_not_waited_for() -> None:
    cell: OneShot[int] = OneShot()
    cell.set(7)
    async with Runtime() as runtime:
        ref = runtime.spawn(lambda: Waiter(cell), name="waiter")
        assert await ref.ask(Wait()) == 7


async def test_a_handler_may_wait_in_the_ordinary_way_after_it() -> None:
    cell: OneShot[int] = OneShot()
    goes_on = anyio.Event()
    answers: list[object] = []

    async with Runtime() as runtime, anyio.create_task_group() as tasks:
        ref = runtime.spawn(lambda: Waiter(cell, goes_on=goes_on), name="waiter")

        async def ask() -> None:
            answers.append(await ref.ask(Wait()))

        tasks.start_soon(ask)
        await settle()
        cell.set(3)
        await settle()
        assert answers == []
        goes_on.set()
    assert answers == [3]


async def test_a_second_handler_that_waits_for_the_same_one_shot_is_told_so() -> None:
    shot: OneShot[int] = OneShot()

    class Waiting(Actor):
        async def receive(self, message: object) -> object:
            del message
            return await self.context.wait_for(shot)

    async with Runtime() as runtime:
        first, second = (runtime.spawn(Waiting, name=name) for name in ("first", "second"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.ask, Message[int]())
            await settle()
            with anyio.fail_after(5), pytest.raises(ActorFailed) as failed:
                await second.ask(Message[int]())
            assert "one waiter" in str(failed.value.__cause__)
            shot.set(1)


@pytest.mark.parametrize(
    ("error", "heard"), [(ValueError("bad"), ActorFailed), (Refused("no"), Refused)]
)
async def test_an_outcome_that_is_an_error_is_raised_in_the_handler(
    error: Exception, heard: type[TurnkeeperError]
) -> None:
    cell: OneShot[int] = OneShot()
    async with Runtime() as runtime, anyio.create_task_group() as tasks:
        ref = runtime.spawn(lambda: Waiter(cell), name="waiter")

        async def ask() -> None:
            with pytest.raises(heard):
                await ref.ask(Wait())

        tasks.start_soon(ask)
        await settle()
        cell.fail(error)


@pytest.mark.parametrize("is_early", [True, False])
async def test_a_stop_iteration_is_raised_as_an_error_and_is_not_taken_for_the_value(
    *, is_early: bool
) -> None:
    """A thread whose `next` found nothing has failed: to take it for done would lose its work."""
    cell: OneShot[int] = OneShot()
    error = StopIteration(3)
    async with Runtime() as runtime, anyio.create_task_group() as tasks:
        ref = runtime.spawn(lambda: Waiter(cell), name="waiter")
        if is_early:
            cell.fail(error)

        async def ask() -> None:
            with pytest.raises(ActorFailed) as failed:
                await ref.ask(Wait())
            assert isinstance(failed.value.__cause__, RuntimeError)
            assert failed.value.__cause__.__cause__ is error

        tasks.start_soon(ask)
        await settle()
        cell.fail(error)


@pytest.mark.parametrize("value", [(1, 2), (), StopIteration(3), ValueError("a value"), None])
async def test_any_value_that_comes_is_returned_as_it_is(value: object) -> None:
    cell: OneShot[object] = OneShot()

    class Waiting(Actor):
        async def receive(self, message: object) -> object:
            del message
            return await self.context.wait_for(cell)

    async with Runtime() as runtime, anyio.create_task_group() as tasks:
        ref = runtime.spawn(Waiting, name="waiting")

        async def ask() -> None:
            assert await ref.ask(Wait()) is value

        tasks.start_soon(ask)
        await settle()
        cell.set(value)


async def test_a_resident_actor_and_one_that_starts_wait_for_it_too() -> None:
    class Starts(Waiter):
        async def on_start(self) -> None:
            self.first = await self.context.wait_for(self.cell)

    for is_resident in (False, True):
        cell: OneShot[int] = OneShot()
        answers: list[object] = []
        async with Runtime() as runtime, anyio.create_task_group() as tasks:
            make: Callable[[], Actor] = lambda: Starts(cell)  # noqa: B023, E731
            ref = runtime.spawn(make, name="starts", resident=is_resident)

            async def ask() -> None:
                answers.append(await ref.ask(Wait()))  # noqa: B023

            tasks.start_soon(ask)
            await settle()
            cell.set(5)
        assert answers == [5]


async def test_one_that_waits_too_long_to_stop_is_cancelled() -> None:
    clock = VirtualClock()
    cell: OneShot[int] = OneShot()
    actor = Waiter(cell)
    heard: list[BaseException] = []

    async with anyio.create_task_group() as tasks, Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(lambda: actor, name="waiter")

        async def ask() -> None:
            try:
                await ref.ask(Wait())
            except TurnkeeperError as error:
                heard.append(error)

        async def stop() -> None:
            with suppress(TurnkeeperError):
                await ref.stop()

        tasks.start_soon(ask)
        await settle()
        tasks.start_soon(stop)
        await settle()
        assert actor.ended == []
        for _ in range(10):
            await clock.advance(60.0)
        assert actor.ended == ["ended"]
        assert len(heard) == 1
        cell.set(1)  # too late; nobody minds


async def test_an_order_to_stop_is_obeyed_once_the_outcome_has_come() -> None:
    cell: OneShot[int] = OneShot()
    answers: list[object] = []
    async with anyio.create_task_group() as tasks, Runtime() as runtime:
        ref = runtime.spawn(lambda: Waiter(cell), name="waiter")

        async def ask() -> None:
            answers.append(await ref.ask(Wait()))

        tasks.start_soon(ask)
        await settle()
        tasks.start_soon(ref.stop)
        await settle()
        cell.set(9)
    assert answers == [9]
