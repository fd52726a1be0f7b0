"""The scheduler of asyncio: an event loop in virtual time, whose ready queue the tape reorders.

The loop runs one call at a time: a step of a task, or a callback. The tape chooses among all that
are ready; zeros give asyncio's own order, first come first served. When nothing is ready the clock
jumps to the next timer. A task can be cancelled natively before any of its steps.

Three things keep runs repeatable. Tasks hash by their number, because asyncio keeps them in sets.
Anyio's cancel scopes keep their tasks and children in sets, too, so anyio is given an ordered set
for the time of a run. Callbacks that are not steps of tasks keep their order among themselves, as
asyncio promises.

A task is only ever stepped by a call of its own: so the tape orders all steps, and a node that has
crashed or is frozen takes none. The runtime's bells, which share a callback, give that up in a run.

Anyio delivers a cancellation again and again until the task has ended, and asks the loop for the
next try at once. Such a try waits here until something else has run: otherwise the loop would
never be idle, and the clock could not jump.

The loop has no sockets, signals, subprocesses or threads.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import logging
import math
import sys
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    MutableSet,
)
from contextlib import contextmanager
from contextvars import Context, copy_context
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio

from .. import _backend
from ._scheduler import Alarm, Scheduler
from ._simulation import Node, Policy, Strike, current_node
from ._tape import Tape

if TYPE_CHECKING:
    from ._simulation import Simulation

__all__ = ["AsyncioScheduler"]

T = TypeVar("T")

_NATIVE_CANCEL = "native cancel"
_NATIVE_CANCEL_MAX = 512
_ANYIO = "anyio._backends._asyncio"
_RETRY = "_deliver_cancellation"


class _Handle(asyncio.TimerHandle):
    """One call that the loop is asked to make; asyncio's own handle hides which call that is."""

    __slots__ = ("arguments", "context", "function")

    def __init__(
        self,
        when: float,
        function: Callable[..., object],
        arguments: tuple[object, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context,
    ) -> None:
        super().__init__(when, function, arguments, loop, context)
        self.function = function
        self.arguments = arguments
        self.context = context

    @property
    def is_retry(self) -> bool:
        """True if anyio tries once more to deliver a cancellation."""
        function = self.function
        return (
            isinstance(getattr(function, "__self__", None), anyio.CancelScope)
            and getattr(function, "__name__", "") == _RETRY
        )


class _Lane:
    """The calls of one task, or the callbacks of one node: they run in their order.

    The lane is in the ready queue once for each of its calls.
    """

    __slots__ = ("calls", "node", "task")

    def __init__(self, node: Node | None, task: asyncio.Task[Any] | None) -> None:
        self.calls: deque[_Handle] = deque()
        self.node = node
        self.task = task


class _Task(asyncio.Task[T]):
    """A task that hashes by its number, so that a set of tasks has the same order in each run."""

    def __init__(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        number: int,
        loop: asyncio.AbstractEventLoop,
        name: str | None,
        context: Context | None,
    ) -> None:
        self.number = number  # first: the rest of asyncio hashes it
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


class _OrderedSet(MutableSet[T]):
    """A set that is iterated in the order in which its elements came."""

    def __init__(self, elements: Iterable[T] = ()) -> None:
        self._elements = dict.fromkeys(elements)

    def __contains__(self, element: object) -> bool:
        return element in self._elements

    def __iter__(self) -> Iterator[T]:
        return iter(self._elements)

    def __len__(self) -> int:
        return len(self._elements)

    def add(self, value: T) -> None:
        self._elements[value] = None

    def discard(self, value: T) -> None:
        self._elements.pop(value, None)


@contextmanager
def _ordered_scopes() -> Iterator[None]:
    """Have anyio keep the tasks and children of its cancel scopes in their order."""
    backend: Any = sys.modules[_ANYIO]
    backend.set = _OrderedSet
    try:
        yield
    finally:
        del backend.set


@contextmanager
def _bells_apart() -> Iterator[None]:
    """Have each bell wake its task by a call of its own."""
    backend: Any = _backend
    together, backend._AsyncioBell = backend._AsyncioBell, backend._LoneAsyncioBell  # noqa: SLF001
    try:
        yield
    finally:
        backend._AsyncioBell = together  # noqa: SLF001


class AsyncioScheduler(Scheduler[_Lane]):
    """Runs a world on an event loop that it makes for it."""

    def __init__(
        self,
        tape: Tape,
        policy: Policy,
        steps_max: int,
        strike: Strike | None,
        *,
        native_cancels: bool = False,
    ) -> None:
        super().__init__(tape, policy, steps_max, strike, native_cancels=native_cancels)
        self.loop = _Loop(self)  # type: ignore[abstract] # the rest raises NotImplementedError
        self._until_cancel = 0

    def run(self, simulation: Simulation, world: Callable[[Simulation], Awaitable[None]]) -> None:
        self.simulation = simulation
        if self._native_cancels:
            self._draw_cancel()
        # Anyio imports its backend when it is first used.
        anyio.run(_nothing, backend="asyncio")
        with _ordered_scopes(), _bells_apart():
            anyio.run(
                simulation.run,
                world,
                backend="asyncio",
                backend_options={"loop_factory": lambda: self.loop},
            )

    def now(self) -> float:
        return self.loop.time()

    def _node_of(self, entry: _Lane) -> Node | None:
        return entry.node

    def _strike_entry(self, entry: _Lane) -> None:
        # A task that has not begun has nothing open that a cancellation could hit.
        if entry.task is not None and _has_begun(entry.task):
            assert self.simulation is not None, "a strike is inside a run"
            self.simulation.note(f"{self._seen(entry)[1]} cancelled natively")
            entry.task.cancel()

    def _make_ready(self, entries: Iterable[_Lane]) -> None:
        self._ready += entries

    def _entries(self) -> list[_Lane]:
        return [lane for lane in self.loop.lanes.values() if lane.task is not None]

    def _seen(self, entry: _Lane) -> tuple[object, str, object]:
        if entry.task is None:
            return entry, "a callback", None
        coroutine = entry.task.get_coro()
        name = entry.task.get_name()
        if name.startswith("Task-"):
            name = getattr(coroutine, "__qualname__", name)
        return entry.task, name, coroutine

    def call_later(self, seconds: float, run: Callable[[], None]) -> Alarm:
        return asyncio.get_running_loop().call_later(seconds, run)

    def _draw_cancel(self) -> None:
        """Draw the number of steps of nodes until one of them is cancelled; 0 for never."""
        random = self._tape.random
        steps = int(2 ** (random.random() * 9.0)) if random.random() < 0.8 else 0  # noqa: PLR2004
        self._until_cancel = self._tape.draw(_NATIVE_CANCEL, _NATIVE_CANCEL_MAX, steps)

    def next_lane(self) -> _Lane | None:
        """Return the lane whose next call is to run; None if nothing is ready."""
        if self._is_over or self.simulation is None:
            self._clean_up()
            return self._ready.popleft() if self._ready else None
        if not self._ready:
            return None
        try:
            lane = next(self._takes)
        except Exception as error:
            self._failed(error)
            raise
        if lane is not None and self._until_cancel and lane.node is not None and lane.task:
            self._until_cancel -= 1
            if not self._until_cancel:
                self._strike_entry(lane)
                self._draw_cancel()
        return lane

    def add(self, lane: _Lane) -> None:
        """Queue a lane behind all that are ready."""
        self._ready.append(lane)

    @property
    def is_over(self) -> bool:
        """True once the world is over: what still runs is only being ended."""
        return self._is_over

    def idle(self) -> None:
        """Report a deadlock: nothing is ready, and no timer is armed."""
        simulation = self.simulation
        if self._scope is None or self._is_over or simulation is None or simulation.first_broken:
            raise RuntimeError("the tasks that a world left behind do not end when cancelled")
        simulation.broken("deadlock", "every task waits, and nothing is due")


async def _nothing() -> None:
    pass


def _has_begun(task: asyncio.Task[Any]) -> bool:
    coroutine = task.get_coro()
    return not (
        isinstance(coroutine, CoroutineType)
        and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED
    )


class _Loop(asyncio.AbstractEventLoop):
    """The part of an event loop that tasks, futures and timers need."""

    def __init__(self, scheduler: AsyncioScheduler) -> None:
        self._scheduler = scheduler
        self._now = 0.0
        self._timers: list[tuple[float, int, _Handle]] = []
        self._armed = 0
        self._tasks = 0
        self.lanes: dict[asyncio.Task[Any] | Node | None, _Lane] = {}
        self._retries: list[_Handle] = []
        self._is_stopping = self._is_running = self._is_closed = False

    # --- one call after the other ----------------------------------------------------------------

    def run_forever(self) -> None:
        before = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._finalize)
        asyncio._set_running_loop(self)  # noqa: SLF001 - its docs: for those who write loops
        self._is_running = True
        try:
            while not self._is_stopping:
                self._run_once()
        finally:
            self._is_running = self._is_stopping = False
            asyncio._set_running_loop(None)  # noqa: SLF001
            sys.set_asyncgen_hooks(*before)

    def _run_once(self) -> None:
        self._list_due()
        lane = self._scheduler.next_lane()
        if lane is None:
            self._wait()
            return
        handle = lane.calls.popleft()
        if not handle.cancelled():
            self._call(handle)
            if self._retries and (self._scheduler.is_over or not handle.is_retry):
                self._list_retries()
        if lane.task is not None and lane.task.done():
            self.lanes.pop(lane.task, None)

    def _call(self, handle: _Handle) -> None:
        try:
            handle.context.run(handle.function, *handle.arguments)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - as every loop does with a callback's error
            self.call_exception_handler(
                {"message": f"the callback {handle.function!r} failed", "exception": error}
            )

    def _wait(self) -> None:
        """Let the time jump to the next timer: nothing is ready."""
        if self._timers:
            self._now = self._timers[0][0]
        elif self._retries and self._scheduler.is_over:
            self._list_retries()
        else:
            self._scheduler.idle()

    # --- the calls that it is asked for ----------------------------------------------------------

    def _list(self, handle: _Handle) -> None:
        if handle.is_retry:
            self._retries.append(handle)
            return
        owner = getattr(handle.function, "__self__", None)
        task = owner if isinstance(owner, asyncio.Task) else None
        node = handle.context.get(current_node)
        key = node if task is None else task
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = _Lane(node, task)
        lane.calls.append(handle)
        self._scheduler.add(lane)

    def _list_due(self) -> None:
        timers = self._timers
        while timers and (timers[0][0] <= self._now or timers[0][2].cancelled()):
            handle = heapq.heappop(timers)[2]
            if not handle.cancelled():
                self._list(handle)

    def _list_retries(self) -> None:
        retries, self._retries = self._retries, []
        for handle in retries:
            lane = _Lane(handle.context.get(current_node), None)
            lane.calls.append(handle)
            self._scheduler.add(lane)

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        context = copy_context() if context is None else context
        handle = _Handle(self._now, callback, args, self, context)
        self._list(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        handle = _Handle(when, callback, args, self, context)
        if when < math.inf:  # anyio sleeps forever by a timer that is never due
            self._armed += 1
            heapq.heappush(self._timers, (when, self._armed, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Ignore it: a cancelled timer is dropped when its time has come."""

    def time(self) -> float:
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        self._tasks += 1
        return _Task(coro, number=self._tasks, loop=self, name=name, context=context)

    def get_task_factory(self) -> None:
        """Return None: tasks are made by `create_task` alone."""

    # --- the rest of a loop's life ---------------------------------------------------------------

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        # Asyncio takes a generator for a coroutine, as it once was one.
        waited = asyncio.ensure_future(cast("Awaitable[T]", future), loop=self)
        waited.add_done_callback(self._stop)
        self.run_forever()
        return waited.result()

    def _stop(self, _: asyncio.Future[Any]) -> None:
        self.stop()

    def stop(self) -> None:
        self._is_stopping = True

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True

    async def shutdown_asyncgens(self) -> None:
        """Return: generators are closed when they are no longer referenced."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Return: there are no threads."""

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._is_closed:
            _ = self.create_task(generator.aclose())

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:  # noqa: FBT001 - asyncio's interface
        """Ignore it: the simulation is the debugging."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        message, error = context.get("message"), context.get("exception")
        logging.getLogger("asyncio").error(message, exc_info=error)
