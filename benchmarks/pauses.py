"""Pauses: what one more reader costs, and how late the loop is with many active conversations.

A reader's cost is the processor's time of the loop's thread for an event or a piece that a thousand
read, less that of one that none reads. It is held against a bare wake of a task in the same
minutes, by the means of the backend's own: a future, a trap. Each reader is a task of its own.

Each count of active conversations has a process of its own, `_pauses_process.py`: 100 clients
append to all of them, over SQLite at FULL. `late_…` is the longest that the loop was late under
that load, less that of an idle one, and `collection_…` the longest collection of garbage.

`late_snapshot_…` is the longest that other tasks wait for the loop while the snapshot of a long
view is written, or read to open its conversation, in the processor's time of the loop's thread.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

import anyio
import sniffio
import trio

from turnkeeper.actors import Conversations, MemoryJournal, SQLiteJournal, TurnContext, agent
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.owner.loading import in_slices, load_state

from ._harness import FOLDER, Measure, costlier, say
from .core import fill, talk

READERS = 1_000
ITEMS = 30
SHOWN = 3_000
SNAPSHOT_MS = 2.0
PART_S_MAX = 60.0
PROCESS_S_MAX = 900


def run(*, quick: bool) -> Iterator[Measure]:
    rounds = 5 if quick else 9
    for backend in ("asyncio", "trio"):
        say(f"pauses: {READERS:,} readers on {backend}")
        yield from anyio.run(_readers, rounds, backend, backend=backend)
    say(f"pauses: a snapshot of a view of about {SHOWN:,} events")
    yield from anyio.run(_snapshots, rounds)
    yield from _active(5_000 if quick else 50_000, 3.0 if quick else 10.0, 5_000)
    if not quick:
        yield from _memory(100_000)


# --- readers --------------------------------------------------------------------------------------


async def _readers(rounds: int, backend: str) -> list[Measure]:
    spent: dict[str, list[float]] = {"event": [], "piece": [], "wake": []}
    for _ in range(rounds + 1):
        for name, count in (("event", _events), ("piece", _pieces)):
            gc.collect()
            read = await count(READERS)
            gc.collect()
            spent[name].append((read - await count(0)) / (READERS * ITEMS))
        gc.collect()
        spent["wake"].append(await _wakes() / (READERS * ITEMS))
    found = []
    for name in ("event", "piece"):
        pairs = [(ours, 5.0) for ours in spent[name][1:]]
        found.append(costlier(f"reader_{name}_{backend}", pairs, baseline="5 µs", goal="≤ 1.0"))
        pairs = list(zip(spent[name][1:], spent["wake"][1:], strict=True))
        baseline = "a bare wake of a task"
        found.append(
            costlier(f"reader_{name}_{backend}_beside_wake", pairs, baseline=baseline, goal="")
        )
    return found


async def _settle() -> None:
    """Let every task that was woken run until it waits again."""
    for _ in range(4):
        await anyio.lowlevel.checkpoint()


async def _wakes() -> float:
    """Time tasks that are woken again and again by the backend's own means, and do nothing else."""
    sniffed = sniffio.current_async_library()
    waiters = [_FutureWait() if sniffed == "asyncio" else _TrapWait() for _ in range(READERS)]

    async def wait(waiter: _FutureWait | _TrapWait) -> None:
        for _ in range(ITEMS):
            await waiter.wait()

    async with anyio.create_task_group() as group:
        for waiter in waiters:
            group.start_soon(wait, waiter)
        await anyio.wait_all_tasks_blocked()
        began = thread_time()
        for _ in range(ITEMS):
            for waiter in waiters:
                waiter.wake()
            await _settle()
        took = thread_time() - began
    return took * 1e6


class _FutureWait:
    """A wait on asyncio: for a separate future."""

    def wait(self) -> Awaitable[None]:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return self._future

    def wake(self) -> None:
        self._future.set_result(None)


class _TrapWait:
    """A wait on trio."""

    def wait(self) -> Awaitable[object]:
        self._task = trio.lowlevel.current_task()
        wait: Callable[[Any], Awaitable[object]] = trio.lowlevel.wait_task_rescheduled
        return wait(lambda _: trio.lowlevel.Abort.SUCCEEDED)

    def wake(self) -> None:
        trio.lowlevel.reschedule(self._task)


async def _events(readers: int) -> float:
    """Time appends to a conversation with this many readers."""

    @agent
    async def silent(_: TurnContext) -> None:
        """Do nothing."""

    async with Conversations(silent, journal=MemoryJournal()) as conversations:
        conversation = conversations["c"]
        await conversation.append(UserMessageEvent(content="first"))

        async def write() -> None:
            for _ in range(ITEMS):
                await conversation.append(UserMessageEvent(content="x" * 590))
                await _settle()

        return await _timed(partial(conversation.events, after=1), readers, write)


async def _pieces(readers: int) -> float:
    """Time pieces of an answer with this many readers while it is written."""
    may_write, took = anyio.Event(), 0.0

    @agent
    async def writes(turn: TurnContext) -> None:
        nonlocal took
        await may_write.wait()
        write = turn.writer()
        began = thread_time()
        for number in range(ITEMS):
            await write(f"word {number} ")
            await _settle()
        took = (thread_time() - began) * 1e6

    async with Conversations(writes, journal=MemoryJournal()) as conversations:
        conversation = conversations["c"]
        turn = await conversation.send("write")

        async def go() -> None:
            may_write.set()
            await turn.end()

        await _timed(partial(conversation.follow, after=turn.seq), readers, go)
    return took


# Any: an iterator of events, or of events and pieces.
async def _timed(
    read_on: Callable[[], Any], readers: int, write: Callable[[], Awaitable[None]]
) -> float:
    async def read() -> None:
        async for _ in read_on():
            pass

    async with anyio.create_task_group() as group:
        for _ in range(readers):
            group.start_soon(read)
        for _ in range(3):
            await anyio.wait_all_tasks_blocked()
        began = thread_time()
        await write()
        took = thread_time() - began
        group.cancel_scope.cancel()
    return took * 1e6


# --- snapshots ------------------------------------------------------------------------------------


async def _snapshots(rounds: int) -> list[Measure]:
    """Time the longest pass of the loop while a snapshot is written and read."""
    log = talk(SHOWN * 5 // 3)  # three of five of its events are seen by the model
    written, read = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.db"
        await fill(path, log)
        async with SQLiteJournal(path) as journal:
            state, _ = await load_state(journal, "c", len(log))
            claim = await journal.claim("c")

            async def write() -> None:
                snapshot = await in_slices(state.writing_snapshot())
                await journal.write_snapshot("c", snapshot, epoch=claim.epoch)

            async def load() -> None:
                loaded, _ = await load_state(journal, "c", len(log))
                assert loaded.restored_seq == len(log)

            # One more: the models of a snapshot are built at the first one of a process.
            for _ in range(rounds + 1):
                written.append((await _longest_pass_ms(write), SNAPSHOT_MS))
                read.append((await _longest_pass_ms(load), SNAPSHOT_MS))
    shown = len(state.view)
    return [
        costlier(
            f"late_snapshot_{name}_{shown}", pairs[1:], baseline="2 ms", goal="≤ 1.0", unit="ms"
        )
        for name, pairs in (("written", written), ("read", read))
    ]


async def _longest_pass_ms(act: Callable[[], Awaitable[None]]) -> float:
    """Return the longest that a task which is always ready waits for its turn beside `act`."""
    passes: list[float] = []
    gc.collect()
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            last = thread_time()
            while True:
                await anyio.lowlevel.checkpoint()
                now = thread_time()
                passes.append(now - last)
                last = now

        group.start_soon(watch)
        await anyio.lowlevel.checkpoint()
        await act()
        group.cancel_scope.cancel()
    return max(passes) * 1e3


# --- many active conversations --------------------------------------------------------------------


def _run_process(count: int, seconds: float, mode: str, churned: int = 0) -> dict[str, float]:
    say(f"pauses: {count:,} active conversations, {mode}")
    program = FOLDER / "_pauses_process.py"
    arguments = (count, seconds, mode, churned, PART_S_MAX)
    command = [sys.executable, str(program), *map(str, arguments)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=PROCESS_S_MAX
    )
    found: dict[str, float] = json.loads(done.stdout)
    say(", ".join(f"{name} {value:,.2f}" for name, value in found.items()))
    if found["active"] < count:
        say(f"pauses: cut off after {PART_S_MAX:.0f} s, with {found['active']:,.0f} active")
    return found


def _active(count: int, seconds: float, churned: int) -> Iterator[Measure]:
    for mode, bound_ms in (("plain", 500.0), ("frozen", 50.0)):
        found = _run_process(count, seconds, mode, churned if mode == "frozen" else 0)
        reached = round(found["active"])
        late = max(0.001, max(found["late_ms"], found["opening_late_ms"]) - found["idle_ms"])
        baseline = f"{bound_ms:g} ms"
        yield _bounded(f"late_{mode}_{reached}", late, bound_ms, baseline, "ms")
        longest = found["collection_ms"]
        yield _bounded(f"collection_{mode}_{reached}", longest, bound_ms, baseline, "ms")
        yield costlier(
            f"append_p99_{mode}_{reached}",
            [(found["p99_ms"], found["p99_at_1000_ms"])],
            baseline="1,000 active",
            goal="≤ 1.5",
            unit="ms",
        )
        if mode == "frozen":
            # Cancelled alarms and the like come and go by hundreds; an object that stays of each
            # conversation would be 1.
            grown = max(0.0, found["grown_each"])
            yield _bounded("grown_by_a_passivation", grown, 0.1, "a tenth of an object", "objects")


def _memory(count: int) -> Iterator[Measure]:
    found = _run_process(count, 5.0, "frozen")
    count = round(found["active"])
    yield _bounded(f"memory_active_{count}", found["bytes_each"], 5_120.0, "5 KiB", "bytes")
    yield _bounded(f"objects_active_{count}", found["objects_each"], 35.0, "35", "objects")


def _bounded(name: str, value: float, bound: float, baseline: str, unit: str) -> Measure:
    return costlier(name, [(value, bound)], baseline=baseline, goal="≤ 1.0", unit=unit)
