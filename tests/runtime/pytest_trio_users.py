"""Actors under pytest-trio, as its users test: its clocks, its nursery, and our fixture."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import trio
import trio.testing

from turnkeeper.actors import (
    Conversations,
    ModelResponse,
    ScriptedModel,
    SQLiteJournal,
    ToolAgent,
    ToolCall,
    tool,
)
from turnkeeper.runtime import Actor, DaemonThreads, NotAnsweredInTime, Runtime
from turnkeeper.runtime.lowlevel import thread_caller
from turnkeeper.runtime.testing.trio_fixtures import runtime

from .actors import Add, Block, Counter, Get, SyncCounter

__all__ = ["runtime"]  # a fixture

pytestmark = pytest.mark.trio


async def test_an_idle_actor_is_passivated_when_the_tests_clock_says_so(
    runtime: Runtime, autojump_clock: trio.testing.MockClock
) -> None:
    ended: list[float] = []

    class Passivated(SyncCounter):
        async def on_stop(self) -> None:
            ended.append(trio.current_time() - began)

    began = trio.current_time()
    region = runtime.region("keyed", lambda _: Passivated(), idle_s=60.0)
    await region["key"].ask(Get())
    await trio.sleep(3_600.0)
    assert ended == [60.0]


async def test_a_deadline_passes_when_the_test_jumps_over_it(
    runtime: Runtime, mock_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    ref = runtime.spawn(Counter, name="counter")
    gate, begun = trio.Event(), trio.Event()
    told: list[type] = []

    async def ask() -> None:
        try:
            await ref.ask(Block(gate, begun), timeout=30.0)  # type: ignore[arg-type]
        except NotAnsweredInTime as error:
            told.append(type(error))

    nursery.start_soon(ask)
    await begun.wait()
    mock_clock.jump(29.0)
    await trio.testing.wait_all_tasks_blocked()
    assert told == []

    mock_clock.jump(2.0)
    await trio.testing.wait_all_tasks_blocked()
    assert told == [NotAnsweredInTime]
    gate.set()


async def test_a_timer_fires_at_each_interval(
    runtime: Runtime, autojump_clock: trio.testing.MockClock
) -> None:
    class Ticking(Counter):
        async def on_start(self) -> None:
            self.context.timers.periodic(10.0, Add())

    ref = runtime.spawn(Ticking, name="ticking")
    await trio.sleep(95.0)
    assert await ref.ask(Get()) == 9


async def test_asks_of_a_nursery_are_all_answered(runtime: Runtime) -> None:
    ref = runtime.spawn(Counter, name="counter")
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(ref.tell, Add())
    assert await ref.ask(Get()) == 100


async def test_the_clock_does_not_jump_while_a_thread_works(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    nursery.start_soon(trio.sleep, 3_600.0)
    call_soon = thread_caller()
    began = trio.current_time()
    read: queue.SimpleQueue[float] = queue.SimpleQueue()

    def look() -> set[float]:
        seen = set()
        for _ in range(200):
            call_soon(lambda: read.put(trio.current_time()))
            seen.add(read.get(timeout=60.0))
        return seen

    assert await DaemonThreads()(look) == {began}

    await trio.sleep(60.0)  # and then it jumps again
    assert trio.current_time() == began + 60.0


async def test_a_tool_runs_out_of_time_and_the_disk_does_not(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async def look() -> str:
        await trio.sleep_forever()
        raise AssertionError

    model = ScriptedModel([ModelResponse(calls=(ToolCall("look"),)), "Too late."])
    agent = ToolAgent(model, [tool(timeout_s=300.0)(look)])
    began = trio.current_time()
    async with Conversations(agent, journal=SQLiteJournal(tmp_path / "chats.db")) as conversations:
        assert await (await conversations["c"].send("Look")).reply() == "Too late."
        assert trio.current_time() - began == 300.0


async def test_a_runtime_may_be_left_by_another_task_than_the_one_that_entered_it() -> None:
    log: list[str] = []

    class Stopping(Actor):
        async def on_stop(self) -> None:
            log.append("stopped")

    opened = Runtime()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(opened.start)
    opened.spawn(Stopping, name="stopping")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(opened.aclose)
        nursery.start_soon(opened.aclose)
    assert log == ["stopped"]
