"""The limits of the two loops: a queue and a task that reads it, with no actor around them.

Messages are carried, handled by a function and answered, and no more: nothing here supervises,
bounds, times out or cleans up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import sniffio
import trio
from outcome import Value
from trio import lowlevel

from ._harness import Spent, Stopwatch


def handle(message: object) -> int:
    """Do what our actors' handlers do."""
    del message
    return 1


async def asyncio_tell(count: int) -> Spent:
    """Return the time of an item of an `asyncio.Queue(1024)` that a task reads."""
    queue: asyncio.Queue[int] = asyncio.Queue(1024)

    async def read() -> None:
        while message := await queue.get():
            handle(message)

    task = asyncio.create_task(read())
    watch = Stopwatch()
    for _ in range(count):
        await queue.put(1)
    await queue.put(0)
    await task
    return watch.spent_on_each(count)


async def trio_tell(count: int) -> Spent:
    """Return the time of an item of a trio memory channel of 1024 that a task reads."""
    send, receive = trio.open_memory_channel[int](1024)

    async def read() -> None:
        async for message in receive:
            handle(message)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        watch = Stopwatch()
        async with send:
            for _ in range(count):
                await send.send(1)
    return watch.spent_on_each(count)


async def at_once(callers: int, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Let this many callers run at once, in tasks of the loop's own; one runs here."""
    if callers == 1:
        await call()
    elif sniffio.current_async_library() == "trio":
        async with trio.open_nursery() as nursery:
            for _ in range(callers):
                nursery.start_soon(call)
    else:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(callers):
                tasks.create_task(call())


async def asyncio_ask(callers: int, count: int) -> Spent:
    """Return the time of an ask: a deque, one waiter, and a future for the reply."""
    loop = asyncio.get_running_loop()
    waiting: deque[tuple[int, asyncio.Future[int]]] = deque()
    waiter: asyncio.Future[None] | None = None

    async def serve() -> None:
        nonlocal waiter
        while True:
            if not waiting:
                waiter = loop.create_future()
                await waiter
                waiter = None
            while waiting:
                message, reply = waiting.popleft()
                if not reply.done():
                    reply.set_result(handle(message))

    async def ask() -> None:
        for _ in range(count // callers):
            reply: asyncio.Future[int] = loop.create_future()
            waiting.append((1, reply))
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
            await reply

    server = asyncio.create_task(serve())
    await asyncio.sleep(0)
    watch = Stopwatch()
    await at_once(callers, ask)
    taken = watch.spent_on_each(count)
    server.cancel()
    return taken


async def trio_ask(callers: int, count: int) -> Spent:
    """Return the time of an ask: a deque, one waiter, and a task to reschedule for the reply."""
    waiting: deque[tuple[int, lowlevel.Task]] = deque()
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
                message, asker = waiting.popleft()
                lowlevel.reschedule(asker, Value(handle(message)))

    async def ask() -> None:
        nonlocal waiter
        for _ in range(count // callers):
            waiting.append((1, lowlevel.current_task()))
            if waiter is not None:
                lowlevel.reschedule(waiter)
                waiter = None
            await lowlevel.wait_task_rescheduled(give_up)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await lowlevel.checkpoint()
        watch = Stopwatch()
        await at_once(callers, ask)
        taken = watch.spent_on_each(count)
        nursery.cancel_scope.cancel()
    return taken


async def asyncio_task(count: int) -> Spent:
    """Return the time of a task that does nothing, started and waited for."""

    async def nothing() -> None:
        pass

    watch = Stopwatch()
    for _ in range(count):
        await asyncio.create_task(nothing())
    return watch.spent_on_each(count)


async def trio_task(count: int) -> Spent:
    """Return the time of a task that does nothing, started and waited for."""
    starter = lowlevel.current_task()

    async def nothing() -> None:
        lowlevel.reschedule(starter)

    def give_up(_: object) -> lowlevel.Abort:
        return lowlevel.Abort.SUCCEEDED

    async with trio.open_nursery() as nursery:
        watch = Stopwatch()
        for _ in range(count):
            nursery.start_soon(nothing)
            await lowlevel.wait_task_rescheduled(give_up)
        return watch.spent_on_each(count)
