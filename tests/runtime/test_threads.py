"""Threads: the portal into the loop, and the port out of it."""

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.runtime import (
    Actor,
    ActorFailed,
    DaemonThreads,
    MailboxFull,
    MailboxSettings,
    Ports,
    Ref,
    Runtime,
    TooManyThreads,
    Unavailable,
)
from turnkeeper.runtime._portal import Portal, ThreadOneShot
from turnkeeper.runtime.lowlevel import OneShot, thread_caller
from turnkeeper.runtime.testing import settle

from .actors import Add, Counter, Fail, Get, Run, block

pytestmark = pytest.mark.anyio

HANG_S = 30.0


async def in_thread(function: Callable[[], object]) -> Any:  # noqa: ANN401 - whatever it returns
    """Run a test's own thread, and wait for it in the loop."""
    done: OneShot[object] = OneShot()
    call_soon = thread_caller()

    def run() -> None:
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001 - carried to the test
            failed = error
            call_soon(lambda: done.fail(failed))
        else:
            call_soon(lambda: done.set(value))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return await done.wait()
    finally:
        thread.join()


async def test_a_portal_made_in_a_handler_does_not_speak_for_its_actor() -> None:
    async with Runtime() as runtime:
        mailbox = MailboxSettings(capacity=1, overflow="reject")
        ref = runtime.spawn(Counter, name="counter", mailbox=mailbox)

        async def make(_: Actor) -> object:
            return runtime.portal()

        await ref.ask(Run(make))
        portal = runtime.portal()
        gate = await block(ref)
        await runtime.ports.blocking(lambda: portal.tell(ref, Add()))
        with pytest.raises(MailboxFull):
            await runtime.ports.blocking(lambda: portal.tell(ref, Add()))
        gate.set()


async def test_a_thread_tells_and_asks_through_the_portal() -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        portal = runtime.portal()

        def work() -> int:
            for _ in range(10):
                portal.tell(ref, Add())
            return portal.ask(ref, Get(), timeout=60.0)

        assert await in_thread(work) == 10


async def test_a_thread_gets_the_error_that_an_asker_would_get() -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        portal = runtime.portal()
        with pytest.raises(ActorFailed):
            await in_thread(lambda: portal.ask(ref, Fail(ValueError())))


async def test_a_call_that_is_on_the_way_ends_when_the_runtime_is_left() -> None:
    failures: list[BaseException] = []
    entered = threading.Event()
    async with Runtime(drain_s=0.0, stop_s=0.0) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await block(ref)
        portal = runtime.portal()

        def work() -> None:
            entered.set()
            try:
                portal.ask(ref, Get())
            except BaseException as error:  # noqa: BLE001 - looked at below
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        while ref._cell.depth == 0:
            await anyio.lowlevel.checkpoint()
    thread.join()
    assert isinstance(failures[0], Unavailable)
    with pytest.raises(Unavailable):
        await in_thread(lambda: portal.tell(ref, Add()))


async def test_a_call_that_never_reached_the_loop_ends_when_the_portal_is_closed() -> None:
    failures: list[BaseException] = []
    on_the_way = threading.Event()
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        portal = runtime.portal()

        def lose(_: Callable[[], None]) -> bool:
            on_the_way.set()
            return True

        runtime._system.call_soon = lose

        def work() -> None:
            try:
                portal.ask(ref, Get())
            except BaseException as error:  # noqa: BLE001 - looked at below
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        while not on_the_way.is_set():
            await anyio.lowlevel.checkpoint()
    thread.join()
    assert isinstance(failures[0], Unavailable)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio's loop ends with its runtimes
async def test_a_call_into_a_loop_that_was_closed_around_its_runtime_ends() -> None:
    async def start() -> tuple[Portal, Ref[Any]]:
        runtime = await Runtime().start()
        return runtime.portal(), runtime.spawn(Counter, name="counter")

    def call_in_vain() -> None:
        loop = asyncio.new_event_loop()
        portal, ref = loop.run_until_complete(start())
        loop.close()
        answer = ThreadOneShot[object]()

        def call() -> None:
            try:
                answer.set(portal.ask(ref, Get()))
            except Unavailable as error:
                answer.fail(error)

        threading.Thread(target=call, daemon=True).start()
        answer.wait(HANG_S)

    with pytest.raises(Unavailable, match="through the portal failed"):
        await in_thread(call_in_vain)


async def test_the_portal_refuses_the_loops_own_thread_which_would_wait_for_itself() -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        with pytest.raises(RuntimeError, match="own thread"):
            runtime.portal().ask(ref, Get())


variable: ContextVar[str] = ContextVar("variable", default="unset")


async def test_a_blocking_call_returns_raises_and_sees_its_callers_context() -> None:
    ports = Ports()
    variable.set("as called")
    home = threading.get_ident()

    def look() -> tuple[str, bool, bool]:
        thread = threading.current_thread()
        return variable.get(), thread.ident == home, thread.daemon

    def fail() -> None:
        raise KeyError("inside")

    assert await ports.blocking(look) == ("as called", False, True)
    with pytest.raises(KeyError, match="inside"):
        await ports.blocking(fail)


async def test_abandoned_threads_are_counted_and_past_their_bound_nothing_is_started() -> None:
    threads = DaemonThreads(abandoned_max=2)
    release = threading.Event()

    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(threads, release.wait)
        await settle()
        tasks.cancel_scope.cancel()
    assert threads.abandoned == 2
    with pytest.raises(TooManyThreads) as refused:
        await threads(lambda: pytest.fail("it must not be started"))
    assert refused.value.abandoned == 2

    release.set()
    while threads.abandoned:
        await anyio.lowlevel.checkpoint()
    assert await threads(lambda: "started again") == "started again"


async def test_an_outcome_may_come_from_a_thread_while_all_workers_wait() -> None:
    """Found by `turnkeeper stress`: the actor was never heard of again."""
    cell: OneShot[int] = OneShot()
    busy, may_end = anyio.Event(), anyio.Event()

    class Waiter(Actor[Get]):
        async def receive(self, message: Get) -> object:
            return await self.context.wait_for(cell)

    async def keep_busy(_: object) -> None:
        busy.set()
        await may_end.wait()

    async with Runtime() as runtime, anyio.create_task_group() as tasks:
        waiter = runtime.spawn(Waiter, name="waiter")
        answers: list[object] = []

        async def ask() -> None:
            answer: int = await waiter.ask(Get())
            answers.append(answer)
            may_end.set()

        tasks.start_soon(ask)
        await settle()
        other = runtime.spawn(Counter, name="other")
        tasks.start_soon(other.ask, Run(keep_busy))
        await busy.wait()
        assert not runtime._system.pool.parked

        call = thread_caller()
        threading.Thread(target=lambda: call(lambda: cell.set(7))).start()
        with anyio.fail_after(60):
            await may_end.wait()
    assert answers == [7]


def test_the_clock_of_leases_counts_while_the_machine_sleeps() -> None:
    """A namespace of its own gives a process the clocks of a machine that has slept."""
    asleep = "print(Ports().monotonic() - time.monotonic())"
    program = f"import time; from turnkeeper.runtime import Ports; {asleep}"
    slept = ["unshare", "--time", "--boottime", "1000000"]
    if shutil.which("unshare") is None or subprocess.run([*slept, "true"], check=False).returncode:
        pytest.skip("this user may not make a namespace of clocks")
    command = [*slept, sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert float(found) > 900_000


async def test_a_blocking_call_that_gets_no_thread_is_unavailable() -> None:
    """A machine or a user has a limit of threads; to try again later helps."""
    ports = Ports()
    usual = threading.stack_size(1 << 47)  # more than the address space of a process
    try:
        with pytest.raises(Unavailable, match="can't start new thread; nothing was done"):
            await ports.blocking(lambda: None)
    finally:
        threading.stack_size(usual)
    assert await ports.blocking(lambda: "done") == "done"
