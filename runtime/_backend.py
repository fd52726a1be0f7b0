"""The few lines that know whether asyncio or trio is running.

Owns what anyio has no cheap or no equal word for: parking one task until somebody answers it,
calling into the loop from a thread, holding a task that may outlive its owner, and telling a
stray native cancellation from a real one. Nothing else in either package imports a backend.

Everything here belongs to the loop that runs it, except what `thread_caller` returns.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import sys
import types
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

import anyio

if TYPE_CHECKING:
    import trio

__all__ = [
    "OneShot",
    "Park",
    "checkpointing",
    "clear_stray_cancellation",
    "parking",
    "spawn_host",
    "thread_caller",
    "unattended",
    "uncancel",
]

T = TypeVar("T")


def _trio() -> Any:  # noqa: ANN401 - the module trio, which only those who use it have
    """Trio, when the running task is one of its own, and None otherwise."""
    trio_module = sys.modules.get("trio")
    if trio_module is not None and trio_module.lowlevel.in_trio_task():
        return trio_module
    return None


class OneShot(Generic[T]):
    """A value or an error that will come once, and at most one task that waits for it.

    `set` and `fail` never raise and never wait: on a cell that is done, or whose waiter was
    cancelled, they change nothing that anybody sees. Call them in the loop that waits.
    """

    __slots__ = ("error", "is_done", "value", "wake")

    def __init__(self) -> None:
        self.is_done = False
        self.value: T | None = None
        self.error: BaseException | None = None
        # Set by whoever parks, cleared by whoever wakes it, so a waiter is woken at most once.
        self.wake: Callable[[None], object] | None = None

    def set(self, value: T) -> None:
        if self.is_done:
            return
        self.is_done = True
        self.value = value
        if (wake := self.wake) is not None:
            self.wake = None
            try:
                wake(None)
            except asyncio.InvalidStateError:
                return  # it was cancelled natively, and is on its way out

    def fail(self, error: BaseException) -> None:
        if not self.is_done:
            self.error = error
            self.set(cast("T", None))

    async def wait(self) -> T:
        """The value, as soon as there is one; raises what `fail` was given.

        Not a checkpoint when the cell is done already.
        """
        await self.wait_until_done()
        return self.result()

    async def wait_until_done(self) -> None:
        """As `wait`, and leaves what has come where it is."""
        if not self.is_done:
            if self.wake is not None:
                raise RuntimeError("a one-shot cell has one waiter, and it is waiting already")
            try:
                await parking()(self)
            finally:
                self.wake = None

    def __await__(self) -> Generator[Any, Any, T]:
        return self.wait().__await__()

    def result(self) -> T:
        """What a cell that is done holds; raises what `fail` was given."""
        if self.error is not None:
            raise self.error
        return cast("T", self.value)


@types.coroutine
def unattended(cell: OneShot[T]) -> Generator[OneShot[T], None, T]:
    """As `cell.wait()`, for code that `_drive.py` or a turn steps: no task has to wait with it.

    What drives the coroutine finds the cell itself, and may leave it alone until that is set.
    """
    if not cell.is_done:
        yield cell
    return cell.result()


Park: TypeAlias = Callable[[OneShot[Any]], Awaitable[None]]  # Any: whatever it will hold


def parking() -> Park:
    """How a task of the running loop waits until a cell is set: await what this returns.

    For those who wait often and have looked up the loop before. The cell must not be done.
    """
    trio_module = _trio()
    if trio_module is not None:
        return partial(_park_trio, trio_module.lowlevel)
    # What `loop.create_future` calls in the end; a park is half of what an ask costs.
    create_future = partial(asyncio.Future, loop=asyncio.get_running_loop())

    def park(cell: OneShot[Any]) -> Awaitable[None]:
        future: asyncio.Future[None] = create_future()
        cell.wake = future.set_result
        return future

    return park


# Any: trio.lowlevel, see _trio; what it returns is awaited and nothing else.
def _park_trio(lowlevel: Any, cell: OneShot[Any]) -> Awaitable[None]:  # noqa: ANN401
    task = lowlevel.current_task()

    def wake(_: None) -> None:
        lowlevel.reschedule(task)

    def abort(_: object) -> trio.lowlevel.Abort:
        cell.wake = None
        return cast("trio.lowlevel.Abort", lowlevel.Abort.SUCCEEDED)

    cell.wake = wake
    return cast("Awaitable[None]", lowlevel.wait_task_rescheduled(abort))


def thread_caller() -> Callable[[Callable[[], None]], None]:
    """A function that any thread may call to have another one run soon in this loop.

    It also serves signal handlers and finalizers. Once the loop is gone it does nothing.
    """
    trio_module = _trio()
    if trio_module is not None:
        token = trio_module.lowlevel.current_trio_token()
        gone: type[Exception] = trio_module.RunFinishedError
        call: Callable[[Callable[[], None]], object] = token.run_sync_soon
    else:
        gone = RuntimeError  # what a closed asyncio loop raises
        # A callback runs in no task, and by itself in the context of the thread that asked for it:
        # anyio could not tell there that it is in a loop, and a waiter could not be gone on with.
        context = contextvars.copy_context()
        if (sniffio := sys.modules.get("sniffio")) is not None:
            context.run(sniffio.current_async_library_cvar.set, "asyncio")
        call = partial(asyncio.get_running_loop().call_soon_threadsafe, context=context)

    def call_soon(function: Callable[[], None]) -> None:
        try:
            call(function)
        except gone:
            return  # by contract: nobody is left to run it

    return call_soon


def checkpointing() -> Callable[[], Awaitable[object]]:
    """How a task of the running loop lets all others that are ready run once.

    On trio it does not look whether the task was cancelled; the next wait does.
    """
    trio_module = _trio()
    if trio_module is not None:
        shielded = trio_module.lowlevel.cancel_shielded_checkpoint
        return cast("Callable[[], Awaitable[object]]", shielded)
    return _asyncio_checkpoint


@types.coroutine
def _asyncio_checkpoint() -> Generator[None, None, None]:
    yield


# asyncio keeps only weak references to its tasks.
_hosts: set[asyncio.Task[None]] = set()


def spawn_host(run: Callable[[], Awaitable[None]]) -> None:
    """Run a function in a task that nobody waits for; it must not raise.

    Everything else lives in a task group. This one task holds a group that its owner may have to
    leave behind: a task that refuses to be cancelled cannot be ended, only deserted.
    """
    context = contextvars.copy_context()
    trio_module = _trio()
    if trio_module is not None:
        trio_module.lowlevel.spawn_system_task(run, context=context)
        return

    async def host() -> None:
        await run()

    task = asyncio.get_running_loop().create_task(host(), context=context)
    _hosts.add(task)
    task.add_done_callback(_hosts.discard)


def clear_stray_cancellation(error: BaseException) -> bool:
    """Whether `error` is a cancellation that no enclosing scope asked for; if so, undo it.

    Libraries cancel asyncio tasks natively (`task.cancel()`), or let a cancelled future's error
    escape. Inside a task group such an error ends all siblings without a word.
    """
    if not isinstance(error, anyio.get_cancelled_exc_class()):
        return False
    if anyio.current_effective_deadline() == -math.inf:
        return False
    uncancel()
    return True


def uncancel() -> None:
    """Forget that the running task was cancelled natively, however often."""
    if _trio() is None and (task := asyncio.current_task()) is not None:
        while task.cancelling():
            task.uncancel()
