"""The code that knows whether asyncio or trio is running.

Owns the primitives that anyio lacks or makes expensive, in this order: one-shots and bells, for
which one task waits; calls into the loop from a thread; checkpoints; scopes and groups of tasks; a
task that belongs to no group; the loop's clock; and telling a stray native cancellation from a real
one. Only `runtime.testing` and the command line's trio server import a backend, too.

Everything here belongs to the loop that runs it, except the function that `thread_caller` returns.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import sys
import time
import types
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from functools import cache, partial
from threading import get_ident
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeAlias,
    TypeVar,
    TypeVarTuple,
    cast,
)
from weakref import ReferenceType, WeakKeyDictionary

import anyio

from ._logger import logger
from ._supervision import leaves

if TYPE_CHECKING:
    import trio
    from anyio._backends._asyncio import TaskState

__all__ = [
    "Bell",
    "ClockHold",
    "OneShot",
    "Park",
    "TaskGroup",
    "Tasks",
    "Unattended",
    "adopt_context",
    "cancel_scope",
    "checkpointing",
    "clear_stray_cancellation",
    "closing_scopes",
    "is_closing",
    "is_interruption",
    "loop_clock",
    "loop_marker",
    "make_bell",
    "make_lone_bell",
    "membership",
    "open_scopes",
    "open_tasks",
    "parking",
    "parking_behind",
    "pausing",
    "persist",
    "running_task",
    "spawn_host",
    "task_end_watch",
    "task_group",
    "thread_caller",
    "to_its_end",
    "trap_message",
    "uncancel",
]

T = TypeVar("T")
Args = TypeVarTuple("Args")


def _trio() -> Any:  # noqa: ANN401 - the module trio, which only those who use it have
    """Return the module trio if the running task is one of its tasks, else None."""
    trio_module = sys.modules.get("trio")
    # Another thread may be about to import it.
    lowlevel = getattr(trio_module, "lowlevel", None)
    return trio_module if lowlevel is not None and lowlevel.in_trio_task() else None


class Waker(Protocol):
    """Wakes the task or the handler that waits for a one-shot. A future of asyncio's is one."""

    def set_result(self, result: None, /) -> object: ...


class OneShot(Generic[T]):
    """A value or an error that comes once, for at most one task that waits for it.

    `set` and `fail` never raise and never wait. After the first of them, or once the waiter was
    cancelled, they have no effect. Call them in the loop that waits.
    """

    __slots__ = ("error", "is_done", "value", "waker")

    def __init__(self) -> None:
        self.is_done = False
        self.value: T | None = None
        self.error: BaseException | None = None
        # Set by the task that parks, cleared by the call that wakes it: one wake-up at most.
        self.waker: Waker | None = None

    def set(self, value: T) -> None:
        """Store the value and wake the waiter."""
        if self.is_done:
            return
        self.is_done = True
        self.value = value
        if (waker := self.waker) is not None:
            self.waker = None
            try:
                waker.set_result(None)
            except asyncio.InvalidStateError:
                return  # the waiter was cancelled natively, and is about to leave

    def fail(self, error: BaseException) -> None:
        """Store the error, which the waiter raises, and wake the waiter."""
        if not self.is_done:
            self.error = error
            self.set(cast("T", None))

    async def wait(self) -> T:
        """Return the value once it has come; raise the error that `fail` was given.

        No checkpoint if it has come already.
        """
        # As in `wait_until_done`: to await that would cost every ask a coroutine more.
        if not self.is_done:
            self.check_free()
            try:
                await park(self)
            finally:
                self.waker = None
        return self.result()

    async def wait_until_done(self) -> None:
        """Wait as `wait` does, but neither return the value nor raise the error."""
        if not self.is_done:
            self.check_free()
            try:
                await park(self)
            finally:
                self.waker = None

    def check_free(self) -> None:
        """Raise `RuntimeError` if another task waits for this."""
        if self.waker is not None:
            raise RuntimeError("another task waits for this OneShot; it takes one waiter")

    def __await__(self) -> Generator[Any, Any, T]:
        if not self.is_done:
            yield from self.wait_until_done().__await__()
        return self.result()

    def __next__(self) -> OneShot[T]:
        """Return itself until its value has come: the steps of an `Unattended` wait."""
        if not self.is_done:
            return self
        try:
            result = self.result()
        except StopIteration as error:  # it would end the wait like a value
            raise RuntimeError("the error of a OneShot is a StopIteration") from error
        raise StopIteration(result)

    def result(self) -> T:
        """Return the value that has come; raise the error that `fail` was given."""
        if self.error is not None:
            raise self.error
        value: Any = self.value  # Any: it has come, so it is a T
        result: T = value
        return result


class Unattended(Generic[T]):
    """Waits as `awaited.wait()` does, in a coroutine that the runtime steps; needs no task.

    The coroutine yields the one-shot itself. Its caller may leave it suspended until that is set.
    """

    __slots__ = ("_awaited",)

    def __init__(self, awaited: OneShot[T]) -> None:
        self._awaited = awaited

    def __await__(self) -> Generator[OneShot[T], None, T]:
        # A generator would be one object more for each of a thousand handlers that wait.
        return cast("Generator[OneShot[T], None, T]", self._awaited)


class Woken(Protocol):
    """An object that wakes one parked task."""

    is_done: bool
    waker: Waker | None


Park: TypeAlias = Callable[[Woken], Awaitable[None]]


def park(awaited: Woken) -> Awaitable[None]:
    """Park the running task until it is woken. A one-shot that is passed here must not be done."""
    # Nearly every wait comes here, and `_trio` takes longer to ask trio. Trio may run inside a loop
    # of asyncio's: as its guest, or because a task has called `trio.run`. Then it has to be asked.
    loop = asyncio._get_running_loop()  # noqa: SLF001 - in its `__all__`
    trio_module = sys.modules.get("trio") if loop is None else _trio()
    if trio_module is not None:
        return _park_trio(trio_module.lowlevel, awaited)
    future: asyncio.Future[None] = asyncio.Future(loop=loop)
    awaited.waker = future
    return future


def parking() -> Park:
    """Return the function that parks a task of the running loop until it is woken.

    With this function, a task that waits often looks up the loop only once. A one-shot that is
    passed to it must not be done.
    """
    trio_module = _trio()
    if trio_module is not None:
        return partial(_park_trio, trio_module.lowlevel)
    # `loop.create_future` ends in this call; parking is half the cost of an ask.
    create_future = partial(asyncio.Future, loop=asyncio.get_running_loop())

    def park(awaited: Woken) -> Awaitable[None]:
        future: asyncio.Future[None] = create_future()
        awaited.waker = future
        return future

    return park


def parking_behind() -> Park:
    """Return a function like that of `parking`, for a task that has just woken another to wait for.

    On asyncio, the woken task comes first in the loop's next pass. If it answers at once, the wait
    ends in that pass, and needs no future. On trio, tasks that are ready run in no order.
    """
    park = parking()
    if _trio() is not None:
        return park

    @types.coroutine
    def park_behind(awaited: Woken) -> Generator[Any, None, None]:
        yield
        if not awaited.is_done:
            yield from park(awaited).__await__()

    return park_behind


_spare_bells: deque[_TrioBell] = deque(maxlen=1024)
"""Bells at which no task waits, of all loops: making a bell takes longer than a wait."""


def _park_trio(lowlevel: Any, awaited: Woken) -> Awaitable[None]:  # noqa: ANN401 - see _trio
    try:
        bell = _spare_bells.pop()
    except IndexError:
        bell = _TrioBell(lowlevel)
    awaited.waker = bell
    return bell.wait(awaited)


class Bell(Protocol):
    """Wakes the one task that waits for it, as often as it is rung.

    A ring while no task waits has no effect. So the task has to check for work before each wait. A
    bell is for tasks that wait often: a thousand bells that are rung together wake a thousand tasks
    for little more than their first steps cost.
    """

    @property
    def is_waiting(self) -> bool:
        """True while a task waits that was neither woken nor cancelled."""

    def ring(self) -> None:
        """Wake the waiter, if there is one. Never raises. Call it in the loop that waits."""

    def wait(self) -> Awaitable[None]:
        """Return an awaitable that ends at the next ring; await it at once."""
        ...


def make_bell() -> Bell:
    """Return a bell for the tasks of the running loop."""
    trio_module = _trio()
    return _AsyncioBell() if trio_module is None else _TrioBell(trio_module.lowlevel)


def make_lone_bell() -> Bell:
    """Return a bell that is cheaper if hardly any other is rung in the same pass of the loop."""
    trio_module = _trio()
    return _LoneAsyncioBell() if trio_module is None else _TrioBell(trio_module.lowlevel)


_TAKEN = "another task waits here already, and only one may; give each task an iterator of its own"


class _RungBells:
    """The bells that were rung in an asyncio loop: one callback steps the tasks of all of them.

    For a future of asyncio's own, the loop makes and schedules a callback for each task, and that
    costs as much again as the task's step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.bells: deque[_AsyncioBell] = deque()
        self.is_scheduled = False
        self._loop = loop

    def schedule(self) -> None:
        if not self._loop.is_closed():
            self.is_scheduled = True
            self._loop.call_soon(self._step_tasks)

    def _step_tasks(self) -> None:
        bells = self.bells
        self.is_scheduled = False
        # Bells that are rung meanwhile have their turn in the next pass. It is scheduled first,
        # because a step may raise, which ends the program, or may run the loop itself.
        count = len(bells)
        if count > 1:
            self.schedule()
        for _ in range(count):
            if not bells:
                break
            bell = bells.popleft()
            bell.context.run(bell.callback, bell)


# Both are weak: a loop that is closed while bells are rung is not held by their tasks.
_rung_bells_of: WeakKeyDictionary[asyncio.AbstractEventLoop, ReferenceType[_RungBells]] = (
    WeakKeyDictionary()
)


def _rung_bells() -> _RungBells:
    """Return the rung bells of the running loop."""
    loop = asyncio.get_running_loop()
    found = _rung_bells_of.get(loop)
    rung = None if found is None else found()
    if rung is None:
        rung = _RungBells(loop)
        _rung_bells_of[loop] = ReferenceType(rung)
    return rung


def _step_none(_: object) -> None:
    """Step no task: none waits at the bell."""


class _AsyncioBell:
    """Stands in for a future that an asyncio task awaits again and again.

    It has those parts of a future that a task uses: see `asyncio.isfuture`.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_cancelled",
        "_loop",
        "_rung",
        "callback",
        "context",
        "is_waiting",
    )

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = _rung_bells()
        self._asyncio_future_blocking = False
        self.is_waiting = False
        """True while a task waits that was neither woken nor cancelled."""
        self._cancelled: asyncio.CancelledError | None = None
        self.callback: Callable[[_AsyncioBell], object] = _step_none
        """Steps the task that waits, in its context."""
        self.context = contextvars.Context()

    def ring(self) -> None:
        if self.is_waiting:
            self.is_waiting = False
            rung = self._rung
            rung.bells.append(self)
            if not rung.is_scheduled:
                rung.schedule()

    @types.coroutine
    def wait(self) -> Generator[_AsyncioBell, None, None]:
        if self.is_waiting:
            raise RuntimeError(_TAKEN)
        self.is_waiting = self._asyncio_future_blocking = True
        try:
            yield self
        finally:
            self.is_waiting = False  # a coroutine may be closed, too

    # The task calls these.

    def add_done_callback(
        self, callback: Callable[[_AsyncioBell], object], *, context: contextvars.Context
    ) -> None:
        self.callback, self.context = callback, context

    def cancel(self, msg: object = None) -> bool:
        if not self.is_waiting:
            return False  # it is about to be stepped, and then raises the cancellation itself
        self._cancelled = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        self.ring()
        return True

    def result(self) -> None:
        self.callback = _step_none
        if (cancelled := self._cancelled) is not None:
            self._cancelled = None
            try:
                raise cancelled
            finally:
                del cancelled  # its traceback refers to this frame

    def done(self) -> bool:
        """True if the task is about to be stepped."""
        return not self.is_waiting


class _LoneAsyncioBell:
    """Wakes an asyncio task through a future of its own each time.

    A coroutine that is closed while it waits leaves the bell taken: its loop has ended by then.
    """

    __slots__ = ("_future", "_make_future")

    def __init__(self) -> None:
        # As in `parking`: `loop.create_future` ends in this call.
        self._make_future: Callable[[], asyncio.Future[None]] = partial(
            asyncio.Future, loop=asyncio.get_running_loop()
        )
        self._future: asyncio.Future[None] = self._make_future()
        self._future.set_result(None)

    @property
    def is_waiting(self) -> bool:
        return not self._future.done()

    def ring(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def wait(self) -> Awaitable[None]:
        if not self._future.done():
            raise RuntimeError(_TAKEN)
        self._future = future = self._make_future()
        return future


class _TrioBell:
    """Wakes a trio task, again and again.

    `wait_task_rescheduled` passes trio's loop a message that says how to abort the wait, and the
    loop sends back an outcome. Both are the same each time. Making them takes a third of the time
    of a wake-up, so they are made once.
    """

    __slots__ = ("_current_task", "_lowlevel", "_message", "_place")

    def __init__(self, lowlevel: Any) -> None:  # noqa: ANN401 - trio's
        self._lowlevel = lowlevel
        self._current_task: Callable[[], object] = lowlevel.current_task
        self._take_place()

    def _take_place(self) -> None:
        self._place = _TrioPlace(self._lowlevel)
        self._message = trap_message(self._lowlevel.wait_task_rescheduled, self._place.abort)

    @property
    def is_waiting(self) -> bool:
        return self._place.is_waiting

    def ring(self, _: None = None) -> None:
        place = self._place
        if place.is_waiting:
            place.is_waiting = False
            place.reschedule(place.task, place.woken)

    set_result = ring  # so it is a `Waker`, too

    # Any: the outcome that trio sends.
    @types.coroutine
    def wait(self, parked: Woken | None = None) -> Generator[object, Any, None]:
        """Wait for the next ring.

        `parked`: the object whose waker this bell is, if `_park_trio` lent it the bell. When the
        wait ends, the bell becomes a spare one again.
        """
        if self._place.is_waiting:
            raise RuntimeError(_TAKEN)
        if self._place.task is not None:  # it was woken or cancelled, and has not left yet
            self._take_place()
        place = self._place
        place.task = self._current_task()
        place.is_waiting = True
        try:
            outcome = yield self._message
        finally:
            place.is_waiting = False
            place.task = None
            if parked is not None:
                parked.waker = None  # before another task waits at this bell
                _spare_bells.append(self)
        if outcome is not place.woken:  # it has no value, and an outcome is unwrapped only once
            try:
                raise outcome.error  # `unwrap` costs more: each frame that an error passes does
            finally:
                del outcome  # the error's traceback refers to this frame


def trap_message(trap: Callable[[*Args], Coroutine[object, Any, Any]], *args: *Args) -> object:
    """Return the message that a trap of trio's passes to trio's loop: the same each time."""
    waiting = trap(*args)
    message = waiting.send(None)
    waiting.close()
    return message


@cache
def _woken() -> object:
    """Return the outcome that trio sends to a task that was woken; one serves all."""
    from outcome import Value  # noqa: PLC0415 - comes with trio, which not all have

    return Value(None)


class _TrioPlace:
    """A trio task that waits at a bell. The bell's message refers to it, and not the reverse."""

    __slots__ = ("_lowlevel", "is_waiting", "reschedule", "task", "woken")

    def __init__(self, lowlevel: Any) -> None:  # noqa: ANN401 - trio's
        self._lowlevel = lowlevel
        self.reschedule: Callable[[object, object], object] = lowlevel.reschedule
        self.woken = _woken()
        self.is_waiting = False
        self.task: object = None

    def abort(self, _: object) -> trio.lowlevel.Abort:
        self.is_waiting = False
        return cast("trio.lowlevel.Abort", self._lowlevel.Abort.SUCCEEDED)


def thread_caller() -> Callable[[Callable[[], None]], bool]:
    """Return a function that runs its argument soon in this loop, from whichever thread.

    Signal handlers and finalizers may call it, too. Once the loop is gone, and in a forked process,
    it only returns False.
    """
    process = os.getpid()
    trio_module = _trio()
    if trio_module is not None:
        token = trio_module.lowlevel.current_trio_token()
        gone: type[Exception] = trio_module.RunFinishedError
        call: Callable[[Callable[[], None]], object] = token.run_sync_soon
    else:
        gone = RuntimeError  # what a closed asyncio loop raises
        # A callback runs in no task, and would run in the context of the thread that asked for
        # it. There anyio could not tell which loop is running, and could wake no waiter.
        context = contextvars.copy_context()
        if (sniffio := sys.modules.get("sniffio")) is not None:
            context.run(sniffio.current_async_library_cvar.set, "asyncio")
        call = partial(asyncio.get_running_loop().call_soon_threadsafe, context=context)

    def call_soon(function: Callable[[], None]) -> bool:
        if os.getpid() != process:  # no thread runs this copy of the loop
            return False
        try:
            call(function)
        except gone:
            return False
        return True

    return call_soon


def loop_marker() -> Callable[[], object]:
    """Return a function that returns the mark of the loop in which it is called.

    On asyncio it is the loop, or None outside of any. On trio it is the number of the thread, since
    a run of trio ends before its thread begins another. The host of a guest run has the same one.
    """
    return asyncio._get_running_loop if _trio() is None else get_ident  # noqa: SLF001 - in its `__all__`


def home_check() -> Callable[[], bool]:
    """Return a function that returns True if it is called in this loop, and False elsewhere.

    A run of trio inside a loop of asyncio's is elsewhere, since trio cannot wait as asyncio does.
    """
    trio_module = _trio()
    current: Callable[[], object] = (
        asyncio.get_running_loop if trio_module is None else trio_module.lowlevel.current_trio_token
    )
    home = current()

    def is_here() -> bool:
        try:
            if current() is not home:
                return False
        except RuntimeError:  # no such loop runs in this thread
            return False
        return trio_module is not None or "trio" not in sys.modules or _trio() is None

    return is_here


def adopt_context(context: contextvars.Context) -> None:
    """Set the context variables of another thread in the running task."""
    sniffio = sys.modules.get("sniffio")
    of_the_loop = None if sniffio is None else sniffio.current_async_library_cvar
    for variable, value in context.items():
        if variable is not of_the_loop:  # the other thread may belong to another kind of loop
            variable.set(value)


def checkpointing() -> Callable[[], Awaitable[object]]:
    """Return the function by which a task lets all others that are ready run once.

    On trio it does not deliver a cancellation; the next wait does.
    """
    trio_module = _trio()
    if trio_module is not None:
        shielded = trio_module.lowlevel.cancel_shielded_checkpoint
        return cast("Callable[[], Awaitable[object]]", shielded)
    return _asyncio_checkpoint


def pausing() -> Callable[[], Awaitable[object]]:
    """Return a function like that of `checkpointing` that also delivers a cancellation."""
    trio_module = _trio()
    if trio_module is not None:
        return cast("Callable[[], Awaitable[object]]", trio_module.lowlevel.checkpoint)
    return _asyncio_checkpoint


@types.coroutine
def _asyncio_checkpoint() -> Generator[None, None, None]:
    yield


def cancel_scope(*, shield: bool = False) -> anyio.CancelScope:
    """Return a new scope, as `anyio.CancelScope` does; on trio it is trio's own, which costs less.

    All members that are used here are the same.
    """
    trio_module = _trio()
    if trio_module is None:
        return anyio.CancelScope(shield=shield)
    return cast("anyio.CancelScope", trio_module.CancelScope(shield=shield))


class TaskGroup(Protocol):
    """The tasks of a group: one of anyio's, or a nursery of trio's."""

    # Any: nothing is sent to these coroutines but by their backend.
    def start_soon(
        self, run: Callable[[*Args], Coroutine[Any, Any, None]], *args: *Args
    ) -> object: ...


def task_group() -> AbstractAsyncContextManager[TaskGroup]:
    """Open a group of tasks, as `anyio.create_task_group` does.

    On trio it takes half as long: there each task of a group of anyio's has a scope and an event of
    its own.
    """
    trio_module = _trio()
    return anyio.create_task_group() if trio_module is None else _TrioGroup(trio_module)


class _TrioGroup:
    __slots__ = ("_cancelled", "_nursery")

    def __init__(self, trio_module: Any) -> None:  # noqa: ANN401 - trio, which not all have
        self._cancelled: type[BaseException] = trio_module.Cancelled
        self._nursery: AbstractAsyncContextManager[TaskGroup] = trio_module.open_nursery(
            strict_exception_groups=True
        )

    async def __aenter__(self) -> TaskGroup:
        return await self._nursery.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> bool | None:
        try:
            return await self._nursery.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as errors:
            if errors.split(self._cancelled)[1] is not None:
                raise
            cancelled = next(leaves(errors))
        finally:
            del error, traceback  # the error that is raised refers to this frame
        # As anyio does: code that expects a cancellation need not look into groups. Not raised
        # above: its context would be the group, which refers to it.
        try:
            raise cancelled from None
        finally:
            del cancelled


class Tasks(Protocol):
    """The tasks of one runtime."""

    def start_soon(
        self, run: Callable[[*Args], Coroutine[Any, Any, None]], *args: *Args
    ) -> None: ...

    def cancel(self) -> None:
        """Cancel all tasks but those that are shielded, and start no more."""
        ...


@asynccontextmanager
async def open_tasks() -> AsyncIterator[Tasks]:
    """Open a group of tasks, as `anyio.create_task_group` does; waits for them on leaving.

    In a group of anyio's, a task that a library cancels natively, perhaps before its first step,
    takes all others with it. Here it is started again if it had not begun, and else ends alone.
    An error of a task does end the others.
    """
    trio_module = _trio()
    if trio_module is not None:
        async with trio_module.open_nursery() as nursery:  # its tasks cost less than anyio's
            yield _TrioTasks(nursery)
        return
    tasks = _AsyncioTasks()
    try:
        with anyio.CancelScope() as tasks.body:
            yield tasks
        await persist(tasks.wait_until_ended)
    except BaseException:
        tasks.cancel()
        with anyio.CancelScope(shield=True):
            await persist(tasks.wait_until_ended)
        raise
    if tasks.errors:
        raise BaseExceptionGroup("tasks of the runtime failed", tasks.errors)


class _TrioTasks:
    def __init__(self, nursery: Any) -> None:  # noqa: ANN401 - trio's, which not all have
        self._nursery = nursery

    def start_soon(self, run: Callable[[*Args], Coroutine[Any, Any, None]], *args: *Args) -> None:
        if not self._nursery.cancel_scope.cancel_called:
            self._nursery.start_soon(run, *args)

    def cancel(self) -> None:
        self._nursery.cancel_scope.cancel()


class _AsyncioTasks:
    def __init__(self) -> None:
        self.body = anyio.CancelScope()
        self.errors: list[BaseException] = []
        self._is_closed = False
        self._scopes: dict[asyncio.Task[None], anyio.CancelScope | None] = {}
        self._last_ended: OneShot[None] | None = None

    def start_soon(self, run: Callable[[*Args], Coroutine[Any, Any, None]], *args: *Args) -> None:
        if self._is_closed:
            return
        is_begun = False

        async def main() -> None:
            nonlocal is_begun
            is_begun = True
            if not self._is_closed:
                # Made here: a task may be started by a callback, and anyio makes no scope there.
                with anyio.CancelScope() as self._scopes[task]:
                    await run(*args)

        def note_end(task: asyncio.Task[None]) -> None:
            del self._scopes[task]
            if not is_begun:
                self.start_soon(run, *args)
            elif not task.cancelled() and (error := task.exception()) is not None:
                self.errors.append(error)
                self.cancel()
                self.body.cancel()
            if not self._scopes and self._last_ended is not None:
                self._last_ended.set(None)

        # Any: methods and functions have these two, which their type does not say.
        named: Any = run
        name = f"{named.__module__}.{named.__qualname__}"
        task = _task_for(main(), name=name)
        self._scopes[task] = None
        task.add_done_callback(note_end)

    def cancel(self) -> None:
        self._is_closed = True
        for scope in self._scopes.values():
            if scope is not None:
                scope.cancel()

    async def wait_until_ended(self) -> None:
        """Wait until all tasks have ended; from then on, start no more."""
        while self._scopes:
            self._last_ended = OneShot()
            await self._last_ended.wait()
        self._is_closed = True


def _task_for(
    coroutine: Coroutine[Any, Any, None],
    *,
    name: str | None = None,
    context: contextvars.Context | None = None,
) -> asyncio.Task[None]:
    """Return a task that starts soon, even if the loop has a factory that starts tasks at once."""
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        return loop.create_task(coroutine, name=name, context=context)
    return asyncio.Task(coroutine, loop=loop, name=name, context=context)


async def persist(wait: Callable[[], Awaitable[T]]) -> T:
    """Await `wait()`, and once more after each native cancellation that no scope asked for.

    A library that cancels the task must not leave the work undone. `wait` may be called again.
    """
    while True:
        try:
            return await wait()
        except BaseException as error:
            if not clear_stray_cancellation(error):
                raise


async def to_its_end(wait: Callable[[], Awaitable[T]]) -> T:
    """Await `wait()` until it ends, even if the task is cancelled; then raise the cancellation.

    A shield alone does not do this, since a native cancellation of asyncio's passes it, as those of
    `asyncio.timeout` and Ctrl-C do. `wait` is called again after each of them: it goes on where it
    was. If it raises an error, that is raised.
    """
    cancelled: BaseException | None = None
    values: list[T] = []
    with cancel_scope(shield=True):
        while not values:
            try:
                values.append(await wait())
            except anyio.get_cancelled_exc_class() as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
    return values[0]


# asyncio keeps only weak references to its tasks.
_hosts: set[asyncio.Task[None]] = set()


def spawn_host(run: Callable[[], Awaitable[None]]) -> None:
    """Run a function in a task of its own, outside all task groups; it must not raise.

    All other tasks live in a task group. This one holds the runtime's group, which the runtime
    may have to leave behind: a task that swallows its cancellation cannot be ended. If it is
    cancelled natively before its first step, it is started again.
    """
    context = contextvars.copy_context()
    trio_module = _trio()
    if trio_module is not None:
        trio_module.lowlevel.spawn_system_task(run, context=context)
        return

    is_begun = False

    async def host() -> None:
        nonlocal is_begun
        is_begun = True
        await run()

    def note_end(task: asyncio.Task[None]) -> None:
        _hosts.discard(task)
        if not is_begun:
            spawn_host(run)

    task = _task_for(host(), context=context)
    _hosts.add(task)
    task.add_done_callback(note_end)


def task_end_watch() -> Callable[[Callable[[], None]], None]:
    """Return a function that has its argument called once the now running task has ended.

    On trio the argument is never called: no task is cancelled natively there, so none ends early.
    """
    task = asyncio.current_task() if _trio() is None else None

    def watch(note_end: Callable[[], None]) -> None:
        if task is not None:
            task.add_done_callback(lambda _: note_end())

    return watch


def membership(tasks: AbstractSet[object]) -> Callable[[], bool]:
    """Return a function that tells if the running task, or one that waits for it, is in `tasks`.

    A task waits for those in the task groups that it has open (trio's, anyio's; asyncio has no
    record of whose tasks its own groups hold).
    """
    trio_module = _trio()
    if trio_module is not None:
        current_trio_task = trio_module.lowlevel.current_task

        def is_within_trio() -> bool:
            task = current_trio_task()
            while task not in tasks:
                if task.parent_nursery is None:
                    return False
                task = task.parent_nursery.parent_task
            return True

        return is_within_trio

    def is_within() -> bool:
        if asyncio.current_task() in tasks:
            return True
        parent = anyio.get_current_task().parent_id
        members = {id(task) for task in tasks}
        if parent is None or parent in members:
            return parent is not None
        parents = {task.id: task.parent_id for task in anyio.get_running_tasks()}
        while parent is not None and parent not in members:
            parent = parents.get(parent)
        return parent is not None

    return is_within


def open_scopes() -> Callable[[str], None]:
    """Return a function that leaves all cancel scopes opened in this task since now.

    A scope that code opens and does not leave would cancel whatever the task does next: code that
    breaks out of an async generator leaves the generator's timeout open, for example. The tasks of
    a task group that it left open are cancelled, too. The function takes the name of that code, for
    the log. Neither backend shows the scopes that a task is in, so this looks inside.
    """
    trio_module = _trio()
    if trio_module is None:
        return _open_asyncio_scopes()
    task = trio_module.lowlevel.current_task()
    status, nurseries = task._cancel_status, len(task._child_nurseries)  # noqa: SLF001 - see above

    def leave(by: str) -> None:
        if task._cancel_status is status:  # noqa: SLF001 - see above
            return
        # Its tasks belong to no other nursery, and trio would wait for them at the very end.
        for nursery in task.child_nurseries[nurseries:]:
            nursery.cancel_scope.cancel()
        del task._child_nurseries[nurseries:]  # noqa: SLF001 - see above
        while (newest := task._cancel_status) is not status:  # noqa: SLF001 - see above
            newest._scope.__exit__(None, None, None)  # noqa: SLF001 - see above
        _log_scopes_left(by)

    return leave


def _open_asyncio_scopes() -> Callable[[str], None]:
    task = asyncio.current_task()
    assert task is not None, "scopes are opened in tasks"
    states = _asyncio_task_states()
    state = states.get(task)

    def newest() -> anyio.CancelScope | None:
        nonlocal state
        if state is None:  # anyio gives a task its state with its first scope, for good
            state = states.get(task)
        return None if state is None else state.cancel_scope

    own = newest()

    def leave(by: str) -> None:
        if newest() is own:
            return
        while (scope := newest()) is not None and scope is not own:
            scope.cancel()  # if it is a task group's, for the tasks in it; this one is leaving
            scope.__exit__(None, None, None)
        _log_scopes_left(by)

    return leave


@cache
def _asyncio_task_states() -> WeakKeyDictionary[asyncio.Task[Any], TaskState]:
    """Return the states of tasks that anyio keeps."""
    from anyio._backends._asyncio import _task_states  # noqa: PLC0415 - see `open_scopes`

    return _task_states


def _log_scopes_left(by: str) -> None:
    logger.warning("cancel scope left open, closed now", doing=by)


class _ClosingScopes:
    """Not made of a generator: that sets the traceback of each error, which a frozen one refuses.

    It would also take as long again as the rest, at each call of a model, a tool or an agent.
    """

    __slots__ = ("_by", "_leave")

    def __init__(self, by: str) -> None:
        self._by = by

    def __enter__(self) -> None:
        self._leave = open_scopes()

    def __exit__(self, *_: object) -> None:
        self._leave(self._by)


def closing_scopes(by: str) -> AbstractContextManager[None]:
    """Leave the cancel scopes that the code inside opens in this task and does not leave.

    `by` names that code, for the log. See `open_scopes`.
    """
    return _ClosingScopes(by)


def running_task() -> object:
    """Return the running task, which hashes by identity."""
    trio_module = _trio()
    task: object = asyncio.current_task() if trio_module is None else None
    return task if trio_module is None else trio_module.lowlevel.current_task()


def loop_clock() -> Callable[[], float]:
    """Return the reading of the running loop's clock; cheaper than `anyio.current_time`."""
    trio_module = _trio()
    if trio_module is None:
        loop = asyncio.get_running_loop()
        is_real = type(loop).time is asyncio.BaseEventLoop.time
        return time.monotonic if is_real else loop.time
    clock = trio_module.lowlevel.current_clock()
    if type(clock).__name__ == "SystemClock":
        return time.monotonic
    return cast("Callable[[], float]", clock.current_time)


class ClockHold:
    """Keeps the clock of a trio test from jumping while a thread works for the loop.

    A `MockClock` with an `autojump_threshold` jumps ahead when all tasks wait, and so would skip
    the time that a thread takes. With any other clock it does nothing. Made in the loop.
    """

    _held: ClassVar[WeakKeyDictionary[Any, tuple[int, float]]] = WeakKeyDictionary()
    """For each clock: how many hold it, and its threshold without them. (Any: trio's.)"""

    def __init__(self) -> None:
        trio_module = _trio()
        clock = None if trio_module is None else trio_module.lowlevel.current_clock()
        self._clock: Any = clock if hasattr(clock, "autojump_threshold") else None
        self._is_taken = False

    def take(self) -> None:
        if self._clock is None or self._is_taken:
            return
        self._is_taken = True
        count, threshold = self._held.get(self._clock, (0, self._clock.autojump_threshold))
        self._held[self._clock] = count + 1, threshold
        self._clock.autojump_threshold = math.inf

    def release(self) -> None:
        if self._clock is None or not self._is_taken:
            return
        self._is_taken = False
        count, threshold = self._held.pop(self._clock)
        if count > 1:
            self._held[self._clock] = count - 1, threshold
        else:
            self._clock.autojump_threshold = threshold


def is_interruption(error: BaseException) -> bool:
    """Return True if code that catches this error must raise it again.

    These are cancellations, interrupts and ends of the program, groups that hold one of them, and
    the closing of a coroutine. Any other error is a failure, even if it is no `Exception`: a panic
    of an extension module, for example. Call it as `is_closing`: in the coroutine that waits.
    """
    kinds = (anyio.get_cancelled_exc_class(), KeyboardInterrupt, SystemExit)
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(kinds) is not None
    return isinstance(error, kinds) or is_closing(error)


def is_closing(error: BaseException) -> bool:
    """Return True if the coroutine that has caught this error is being closed.

    Python then raises `GeneratorExit` anew in each coroutine that waits for another. One that came
    out of a call has the frames of that call in its traceback: it is a failure of what was called.
    So call this in the coroutine that waits, and not in a context manager made of a generator.
    """
    trace = error.__traceback__
    return isinstance(error, GeneratorExit) and (trace is None or trace.tb_next is None)


def clear_stray_cancellation(error: BaseException) -> bool:
    """Undo a cancellation that no enclosing scope asked for; True if `error` is one.

    Libraries cancel asyncio tasks natively (`task.cancel()`), or let a cancelled future's error
    escape. Inside a task group such an error ends all siblings silently. A group of nothing but
    cancellations counts as one.
    """
    cancelled = anyio.get_cancelled_exc_class()
    if isinstance(error, BaseExceptionGroup):
        if error.split(cancelled)[1] is not None:
            return False
    elif not isinstance(error, cancelled):
        return False
    if anyio.current_effective_deadline() == -math.inf:
        return False
    uncancel()
    return True


def uncancel() -> None:
    """Forget all native cancellations of the running task."""
    if _trio() is None and (task := asyncio.current_task()) is not None:
        while task.cancelling():
            task.uncancel()
