"""The limits of the two loops: a deque and one waiter, with no actor around them.

Nothing here supervises, bounds, times out or cleans up. It is what the loop itself costs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import perf_counter

import trio
from trio import lowlevel

PER_S = 1e6


async def asyncio_tell(count: int) -> float:
    """Time an `asyncio.Queue(1024)` with a task that reads it; microseconds an item."""
    queue: asyncio.Queue[int] = asyncio.Queue(1024)

    async def read() -> None:
        while await queue.get():
            pass

    task = asyncio.create_task(read())
    began = perf_counter()
    for _ in range(count):
        await queue.put(1)
    await queue.put(0)
    await task
    return (perf_counter() - began) / count * PER_S


async def trio_tell(count: int) -> float:
    """Time a trio memory channel of 1024 with a task that reads it; microseconds an item."""
    send, receive = trio.open_memory_channel[int](1024)

    async def read() -> None:
        async for _ in receive:
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        began = perf_counter()
        async with send:
            for _ in range(count):
                await send.send(1)
    return (perf_counter() - began) / count * PER_S


async def asyncio_ask(callers: int, count: int) -> float:
    """Time a deque, one waiter, and a future for the reply; microseconds an ask."""
    loop = asyncio.get_running_loop()
    waiting: deque[asyncio.Future[int]] = deque()
    waiter: asyncio.Future[None] | None = None

    async def serve() -> None:
        nonlocal waiter
        while True:
            if not waiting:
                waiter = loop.create_future()
                await waiter
                waiter = None
            while waiting:
                reply = waiting.popleft()
                if not reply.done():
                    reply.set_result(1)

    async def ask() -> None:
        for _ in range(count // callers):
            reply: asyncio.Future[int] = loop.create_future()
            waiting.append(reply)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
            await reply

    server = asyncio.create_task(serve())
    await asyncio.sleep(0)
    began = perf_counter()
    if callers == 1:
        await ask()
    else:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(callers):
                tasks.create_task(ask())
    taken = perf_counter() - began
    server.cancel()
    return taken / count * PER_S


async def trio_ask(callers: int, count: int) -> float:
    """Time a deque, one waiter, and a task to reschedule for the reply; microseconds an ask."""
    waiting: deque[lowlevel.Task] = deque()
    waiter: lowlevel.Task | None = None

    def give_up(_: object) -> lowlevel.Abort:
        return lowlevel.Abort.SUCCEEDED

    async def serve() -> None:
        nonlocal waiter
        while True:
            if not waiting:
                waiter = lowlevel.current_task()
                await lowlevel.wait_task_rescheduled(give_up)
            while waiting:
                lowlevel.reschedule(waiting.popleft())

    async def ask() -> None:
        nonlocal waiter
        for _ in range(count // callers):
            waiting.append(lowlevel.current_task())
            if waiter is not None:
                lowlevel.reschedule(waiter)
                waiter = None
            await lowlevel.wait_task_rescheduled(give_up)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await lowlevel.checkpoint()
        began = perf_counter()
        if callers == 1:
            await ask()
        else:
            async with trio.open_nursery() as asking:
                for _ in range(callers):
                    asking.start_soon(ask)
        taken = perf_counter() - began
        nursery.cancel_scope.cancel()
    return taken / count * PER_S


async def asyncio_task(count: int) -> float:
    """Start a task that does nothing and wait for it; microseconds a task."""

    async def nothing() -> None:
        pass

    began = perf_counter()
    for _ in range(count):
        await asyncio.create_task(nothing())
    return (perf_counter() - began) / count * PER_S


async def trio_task(count: int) -> float:
    """Start a task that does nothing and wait for it; microseconds a task."""
    starter = lowlevel.current_task()

    async def nothing() -> None:
        lowlevel.reschedule(starter)

    def give_up(_: object) -> lowlevel.Abort:
        return lowlevel.Abort.SUCCEEDED

    async with trio.open_nursery() as nursery:
        began = perf_counter()
        for _ in range(count):
            nursery.start_soon(nothing)
            await lowlevel.wait_task_rescheduled(give_up)
        return (perf_counter() - began) / count * PER_S
