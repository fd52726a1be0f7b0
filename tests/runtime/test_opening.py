"""A runtime that is started and closed without a block, by different tasks."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from turnkeeper.runtime import Runtime, Supervision, TooManyRestarts
from turnkeeper.runtime.testing import VirtualClock, settle
from turnkeeper.runtime.testing.anyio_fixtures import open_runtime, runtime, virtual_clock

from .actors import Add, Counter, Fail, Get, SyncCounter, block

__all__ = ["runtime", "virtual_clock"]  # fixtures

pytestmark = pytest.mark.anyio


async def test_it_serves_between_start_and_aclose_whichever_tasks_call_them() -> None:
    opened = Runtime()
    async with anyio.create_task_group() as group:
        group.start_soon(opened.start)
    ref = opened.spawn(Counter, name="counter")
    await ref.tell(Add())
    assert await ref.ask(Get()) == 1
    async with anyio.create_task_group() as group:
        group.start_soon(opened.aclose)
    await opened.aclose()  # again: nothing
    assert ref.has_ended


@pytest.mark.parametrize("options", [{}, {"freeze_objects": True}, {"report_blocked_s": 60.0}])
def test_it_is_made_where_no_loop_runs_and_entered_once_in_one(options: dict[str, Any]) -> None:
    """A program may make it beside its imports, as it may make `Conversations`."""
    made = Runtime(**options)

    async def enter() -> object:
        async with made:
            with pytest.raises(RuntimeError):
                await made.__aenter__()  # refused, and the block goes on
            return await made.spawn(Counter, name="counter").ask(Get())

    for backend in ("asyncio", "trio"):
        assert anyio.run(enter, backend=backend) == 0
        made = Runtime(**options)


async def test_a_failure_closes_it_and_aclose_raises_it() -> None:
    opened = await Runtime(supervision=Supervision(restarts_max=0)).start()
    ref = opened.spawn(SyncCounter, name="counter")
    other = opened.spawn(Counter, name="other")
    await ref.tell(Fail(ValueError("broken")))
    await settle()
    assert other.has_ended
    with pytest.raises(TooManyRestarts):
        await opened.aclose()
    await opened.aclose()


async def test_a_cancelled_aclose_closes_it_all_the_same() -> None:
    opened = await Runtime().start()
    ref = opened.spawn(Counter, name="counter")
    with anyio.CancelScope() as scope:
        scope.cancel()
        await opened.aclose()
    assert ref.has_ended


async def test_it_is_started_once_and_not_used_after_it_was_left() -> None:
    opened = await Runtime().start()
    with pytest.raises(RuntimeError, match="entered once"):
        await opened.start()
    await opened.aclose()
    with pytest.raises(RuntimeError, match="has been left: enter a new one"):
        opened.spawn(Counter, name="late")
    async with Runtime() as block:
        with pytest.raises(RuntimeError, match="`async with`, which leaves it"):
            await block.aclose()


async def test_the_fixtures_give_a_runtime_on_a_clock_that_the_test_moves(
    runtime: Runtime, virtual_clock: VirtualClock
) -> None:
    region = runtime.region("keyed", lambda _: SyncCounter(), idle_s=60.0)
    await region["key"].ask(Get())
    await virtual_clock.advance(59.0)
    assert len(region.active) == 1
    await virtual_clock.advance(2.0)
    assert not region.active


async def test_the_fixtures_runtime_is_left_though_an_actor_is_busy_for_ever() -> None:
    """A test that fails has such actors. Its clock stood still, so pytest hung."""
    async with open_runtime(VirtualClock(), wait_s=0) as opened:
        await block(opened.spawn(Counter, name="counter"))

    (left,) = opened.left_undone
    assert left.actor == "counter"


async def test_the_fixtures_runtime_is_left_though_its_test_fails_while_an_actor_is_busy() -> None:
    runtimes: list[Runtime] = []

    async def fail() -> None:
        async with open_runtime(VirtualClock(), wait_s=0) as opened:
            runtimes.append(opened)
            await block(opened.spawn(Counter, name="counter"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    (left,) = runtimes[0].left_undone
    assert left.actor == "counter"


async def test_the_fixtures_runtime_raises_its_failure_as_it_is() -> None:
    clock = VirtualClock()

    async def fail_often() -> None:
        async with open_runtime(clock) as opened:
            ref = opened.spawn(Counter, name="counter")
            for _ in range(Supervision().restarts_max + 1):
                await ref.tell(Fail(ValueError()))
                await clock.advance(3)

    with pytest.raises(TooManyRestarts):
        await fail_often()
