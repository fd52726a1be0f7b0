"""One thread that takes all jobs that wait, has them done together, and wakes the loop once.

This is what makes a group commit: while one group is being written, the next one gathers. There
is no timer, and no wake-up per job.

Invariants. Jobs are done in the order in which they were given. What waits in the thread's queue
is bounded in jobs' items and in bytes; what does not fit stays with its caller, in order. Only
the loop's own thread touches the counters and calls the cells; the thread touches a job only
between taking it from the queue and giving its group back.

A caller that is cancelled leaves its job to be done, unless it was still waiting for room.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar, cast

import anyio

from turnkeeper.runtime import OneShot, Ports, thread_caller

from .errors import JournalOutcomeUnknown, JournalRefused, JournalUnavailable

T = TypeVar("T")


class Job(Generic[T]):
    """Something for a worker to do, and its outcome."""

    __slots__ = ("bytes", "cell", "error", "items", "value")

    def __init__(self, items: int = 1, size: int = 0) -> None:
        self.items = items
        self.bytes = size
        self.value: T | None = None
        self.error: Exception | None = None
        self.cell: OneShot[T] = OneShot()

    def settle(self, value: T) -> None:
        """Called by the worker: the outcome is this value, unless the group fails after all."""
        self.value = value
        self.error = None

    def refuse(self, error: Exception) -> None:
        """Called by the worker: the outcome is this error."""
        self.error = error


class Worker(Protocol):
    """What runs in the thread."""

    def work(self, jobs: Sequence[Job[object]]) -> None:
        """Settle or refuse each job; raises only when it is broken itself."""

    def close(self) -> None:
        """The last call, in the same thread."""


class JobThread:
    """A daemon thread with a worker of its own. `start`, then any number of `do`, then `stop`."""

    def __init__(
        self,
        name: str,
        open_worker: Callable[[], Worker],
        *,
        ports: Ports,
        queued_items_max: int,
        queued_bytes_max: int,
        group_items_max: int,
        group_bytes_max: int,
        stop_wait_s: float,
    ) -> None:
        self._name = name
        self._open_worker = open_worker
        self._ports = ports
        self._queued_items_max = queued_items_max
        self._queued_bytes_max = queued_bytes_max
        self._group_items_max = group_items_max
        self._group_bytes_max = group_bytes_max
        self._stop_wait_s = stop_wait_s
        # None ends the thread, after everything that was put before it.
        self._queue: SimpleQueue[Job[object] | None] = SimpleQueue()
        self._queued_items = 0
        self._queued_bytes = 0
        self._waiting: deque[Job[object]] = deque()
        # What the thread is at; replaced as a whole, by the thread alone.
        self._in_hand: Sequence[Job[object]] = ()
        self._is_open = False
        self._is_ending = False
        self._opened: OneShot[None] = OneShot()
        self._ended: OneShot[None] = OneShot()

    async def start(self) -> None:
        """Start the thread; raises what opening its worker raised."""
        call_in_loop = thread_caller()
        self._ports.start_thread(self._name, partial(self._run, call_in_loop))
        # Shielded: a thread that has begun to open cannot be called back.
        with anyio.CancelScope(shield=True):
            await self._opened.wait()
        self._is_open = True

    async def do(self, job: Job[T]) -> T:
        """Have a job done; waits for room, then for its group."""
        return await self.submit(job)

    def submit(self, job: Job[T]) -> OneShot[T]:
        """Have a job done; its outcome comes into the cell, to be awaited by one caller."""
        if not self._is_open:
            raise JournalRefused(f"{self._name} is not open; nothing was done; use `async with`")
        erased = cast("Job[object]", job)
        if self._waiting or not self._has_room(erased):
            self._waiting.append(erased)
        else:
            self._enqueue(erased)
        return job.cell

    async def stop(self) -> None:
        """Take nothing more, finish what waits, end the thread.

        Shielded, so that what was given is finished; bounded, since a disk may hang for good.
        """
        if not self._is_open:
            return
        self._is_open = False
        with anyio.move_on_after(self._stop_wait_s, shield=True) as scope:
            self._end_when_idle()
            await self._ended.wait()
        if scope.cancelled_caught:
            self._give_up()

    def _give_up(self) -> None:
        """Answer everybody who waits for a thread that hangs."""
        waiting = [*self._drain(), *self._waiting]
        self._waiting.clear()
        self._queue.put(None)  # it ends when it comes back after all
        for job in waiting:
            job.cell.fail(JournalUnavailable(f"{self._name} hangs; nothing was done"))
        for job in self._in_hand:
            job.cell.fail(
                JournalOutcomeUnknown(f"{self._name} hangs; it may have happened; send again")
            )

    def _drain(self) -> Iterator[Job[object]]:
        with contextlib.suppress(Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None:
                    yield job

    def _has_room(self, job: Job[object]) -> bool:
        # A job larger than the whole queue is let in alone; it would wait for ever otherwise.
        if not self._queued_items:
            return True
        return (
            self._queued_items + job.items <= self._queued_items_max
            and self._queued_bytes + job.bytes <= self._queued_bytes_max
        )

    def _enqueue(self, job: Job[object]) -> None:
        self._queued_items += job.items
        self._queued_bytes += job.bytes
        self._queue.put(job)

    def _finish(self, group: Sequence[Job[object]]) -> None:
        for job in group:
            self._queued_items -= job.items
            self._queued_bytes -= job.bytes
            if job.error is None:
                job.cell.set(job.value)
            else:
                job.cell.fail(job.error)
        while self._waiting and self._has_room(self._waiting[0]):
            job = self._waiting.popleft()
            if job.cell.wake is not None:
                self._enqueue(job)
            else:
                left = f"{self._name} had no room, and its caller has left; nothing was done"
                job.cell.fail(JournalUnavailable(left))
        self._end_when_idle()

    def _end_when_idle(self) -> None:
        if not (self._is_open or self._is_ending or self._waiting):
            self._is_ending = True
            self._queue.put(None)

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self, call_in_loop: Callable[[Callable[[], None]], None]) -> None:
        try:
            worker = self._open_worker()
        except Exception as error:  # noqa: BLE001 - handed to whoever starts the thread
            call_in_loop(partial(self._opened.fail, error))
            return
        call_in_loop(partial(self._opened.set, None))
        try:
            while group := self._take():
                self._in_hand = group
                try:
                    worker.work(group)
                except Exception as error:  # noqa: BLE001 - handed to the callers
                    for job in group:
                        outcome = JournalOutcomeUnknown(f"{self._name} failed: {error!r}")
                        outcome.__cause__ = error
                        job.refuse(outcome)
                call_in_loop(partial(self._finish, group))
        finally:
            try:
                worker.close()
            finally:
                call_in_loop(partial(self._ended.set, None))

    def _take(self) -> list[Job[object]]:
        """Everything that waits, up to the limits of a group; empty when it is time to end."""
        job = self._queue.get()
        if job is None:
            return []
        group = [job]
        items, size = job.items, job.bytes
        try:
            while items < self._group_items_max and size < self._group_bytes_max:
                job = self._queue.get_nowait()
                if job is None:
                    self._queue.put(None)  # nothing can come after it
                    break
                group.append(job)
                items += job.items
                size += job.bytes
        except Empty:
            pass
        return group
