"""One thread that takes all waiting jobs, runs them as one group, and wakes the event loop once.

This is group commit: while one group is being written, the next one gathers. There is no timer,
and no wake-up per job.

Invariants. Jobs run in the order in which they were submitted. The thread's queue is bounded in
items and in bytes; jobs that do not fit wait with their callers, in order. Only the event loop in
which it was started touches the counters and wakes the callers: a job from another loop or thread
is refused, since its caller would never be woken. The worker thread touches a job only between
taking it from the queue and handing its group back.

Waking the callers of a group lets the event loop take the interpreter lock for milliseconds, in
which a worker could not even send the next group to its database. So if the next group is large
already, a thread that `wakes_late` wakes them when its worker is about to wait for that group.

Cancelling a caller does not cancel its job, unless the job still waits for room.

No caller waits forever. The bound on one group, and on opening, is `answer_wait_s`, plus some time
for a large file or job. A thread that takes longer counts as hung: all callers get errors, and no
more jobs are accepted. A second thread checks this, because the first one hangs and the event loop
may be one in which we have no timer.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, cast

import anyio

from turnkeeper.runtime import Ports
from turnkeeper.runtime.lowlevel import (
    ClockHold,
    OneShot,
    Park,
    home_check,
    parking,
    thread_caller,
    to_its_end,
)

from ...errors import JournalOutcomeUnknown, JournalRefused, JournalUnavailable

T = TypeVar("T")

READS_AT_ONCE = 8
"""How many reads a reader's thread answers together; with more they would only wait longer."""

_WATCH_INTERVAL_S = 5.0

_items_of, _bytes_of, _more_s_of = map(attrgetter, ("items", "bytes", "more_s"))


class Job(OneShot[T]):
    """A piece of work for a worker, and the one-shot on which its caller awaits the outcome."""

    more_s: float = 0.0
    """The seconds by which this job extends the bound on its group."""

    park: Park
    """Parks the caller. Set by `submit`: to look up the loop for each wait takes too long."""

    __slots__ = ("bytes", "items", "park", "refusal", "settled")

    def __init__(self, items: int = 1, size: int = 0) -> None:
        # Written out instead of calling super(), for speed: this runs for each append.
        self.is_done = False
        self.value = self.error = self.waker = None
        self.items = items
        self.bytes = size
        # Belongs to the worker until the thread hands its group back: a caller that got the error
        # of a hung thread must not see what the thread still writes here.
        self.settled: T | None = None
        self.refusal: Exception | None = None

    def settle(self, value: T) -> None:
        """Set the outcome to this value. Called by the worker, which may still replace it."""
        self.settled = value
        self.refusal = None

    def refuse(self, error: Exception) -> None:
        """Set the outcome to this error. Called by the worker."""
        self.refusal = error

    def __await__(self) -> Generator[Any, Any, T]:
        """As for any one-shot, in the loop in which the job was submitted."""
        if not self.is_done:
            self.check_free()
            try:
                # Not `__await__()`: on trio this is a generator, which has none.
                yield from cast("Iterable[Any]", self.park(self))
            finally:
                self.waker = None
        return self.result()

    def result(self) -> T:
        """As for any one-shot; but the error is raised once, to the one caller."""
        error = self.error
        if error is None:
            value: Any = self.value  # not `super()`, for speed; Any: it has come, so it is a T
            outcome: T = value
            return outcome
        # The error's traceback refers to frames that have this job, here and in the thread. So the
        # job must not have the error, or only the garbage collector frees them.
        self.error = RuntimeError("the caller of this job has had its error already")
        try:
            raise error
        finally:
            del error


class Worker(Protocol):
    """The code that runs in the thread."""

    def work(self, jobs: Sequence[Job[object]]) -> None:
        """Settle or refuse each job. Raise only if the worker itself is broken."""

    def rest(self) -> float | None:
        """Do a little background work while no job waits.

        Return the seconds after which to call this again, unless a job comes before, or None to be
        called only after the next group. Raise only if the worker itself is broken.
        """

    def close(self) -> None:
        """Release resources. This is the last call, in the same thread."""


def _nowhere() -> bool:
    return False


class JobThread:
    """A daemon thread that runs one worker: `start`, any number of `do`, then `stop`."""

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
        answer_wait_s: float,
        wakes_late: bool = False,
    ) -> None:
        """`wakes_late`: the worker calls `wake_callers` before each of its waits."""
        self._name = name
        self._wakes_late = wakes_late
        self._answer_wait_s = answer_wait_s
        self._open_worker = open_worker
        self._ports = ports
        self._queued_items_max = queued_items_max
        self._queued_bytes_max = queued_bytes_max
        self._group_items_max = group_items_max
        self._group_bytes_max = group_bytes_max
        self._stop_wait_s = stop_wait_s
        # None ends the thread after all jobs that were put before it.
        self._queue: SimpleQueue[Job[object] | None] = SimpleQueue()
        self._queued_items = 0
        self._queued_bytes = 0
        self._waiting: deque[Job[object]] = deque()
        # The group that the thread gathers or works on. Only the thread changes it.
        self._in_hand: Sequence[Job[object]] = ()
        # The group before it, until its callers are woken. Only the thread changes it.
        self._unwoken: Sequence[Job[object]] = ()
        # When the thread counts as hung, by the monotonic clock; None while it waits for jobs.
        self._until: float | None = None
        self.more_s = 0.0
        """Set by the worker: the seconds by which opening and each group may exceed the bound."""
        self._rest: Callable[[], float | None]
        self._call_in_loop: Callable[[Callable[[], None]], object]
        self._is_over = threading.Event()
        self._is_home: Callable[[], bool] = _nowhere
        self._park: Park
        self.is_hung = False
        self._is_open = False
        self._is_ending = False
        self._opened: OneShot[None] = OneShot()
        self._ended: OneShot[None] = OneShot()

    async def start(self) -> None:
        """Start the thread and open its worker.

        Raises the worker's error if it cannot open, `JournalUnavailable` if it takes too long, and
        `Unavailable` if no thread can be started. A caller that is cancelled gets the thread open,
        and so has to stop it.
        """
        call_in_loop = thread_caller()
        self._is_home = home_check()
        self._park = parking()
        self._hold = ClockHold()
        # First, so that nothing is open yet if the machine has no second thread for it.
        self._ports.start_thread(f"watch of the {self._name}", partial(self._watch, call_in_loop))
        is_begun = True
        try:
            try:
                self._ports.start_thread(self._name, partial(self._run, call_in_loop))
            except Exception:
                is_begun = False
                raise
            self._hold.take()
            # Opening cannot be interrupted once the thread has begun.
            await to_its_end(self._wait_until_open)
        finally:
            self._hold.release()
            if not self._is_open:
                # Hung, if it took too long, or if an interrupt came, which ends any wait.
                self.is_hung = is_begun and self._opened.error is None
                self._is_over.set()
                self._queue.put(None)  # if the thread comes back, it ends

    async def _wait_until_open(self) -> None:
        waited_s = 0.0
        while not self._opened.is_done and waited_s < (
            bound_s := self._answer_wait_s + self.more_s
        ):
            with anyio.move_on_after(bound_s - waited_s):
                await self._opened.wait_until_done()
            waited_s = bound_s
        if not self._opened.is_done:
            raise self._hung()
        self._opened.result()
        self._is_open = True

    async def do(self, job: Job[T]) -> T:
        """Run a job and return its outcome; wait for room, then for the job's group.

        Raises the error with which the worker refused the job, and the errors of `submit`. Raises
        `JournalUnavailable` if the thread hangs or has died before it took the job, and
        `JournalOutcomeUnknown` if it hangs or fails while it works on the job's group.
        """
        return await self.submit(job)

    def submit(self, job: Job[T]) -> Job[T]:
        """Submit a job and return it; one caller may await its outcome.

        Raises `JournalRefused` unless the thread is open, `JournalUnavailable` if it hangs, and
        `RuntimeError` outside the event loop in which the thread was started.
        """
        if not self._is_open:
            if self.is_hung:
                raise self._hung()
            raise JournalRefused(f"{self._name} is not open; nothing was done; use `async with`")
        if not self._is_home():
            raise RuntimeError(
                f"the {self._name} was called from another thread than its event loop's, or in "
                "another event loop than the one it was entered in; nothing was done; in other "
                "threads, and in loops that run there, use runtime.portal()"
            )
        job.park = self._park
        erased: Job[Any] = job  # Any: the queue has jobs of every type
        if self._waiting or not self._try_enqueue(erased):
            self._waiting.append(erased)
        return job

    async def stop(self) -> None:
        """Refuse further jobs, finish those submitted, and end the thread.

        Shielded, so that submitted jobs finish; bounded, because a disk may hang for good.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._hold.take()
        self._end_when_idle()
        await to_its_end(self._wait_until_ended)

    async def _wait_until_ended(self) -> None:
        with anyio.move_on_after(self._stop_wait_s) as scope:
            await self._ended.wait()
        if scope.cancelled_caught:
            self._note_hung()
            self._is_over.set()

    def _give_up(self) -> None:
        """Refuse the jobs of all callers that wait for a thread that hangs."""
        self._hold.release()
        waiting = [*self._drain(), *self._waiting]
        self._waiting.clear()
        self._queue.put(None)  # if the thread comes back, it ends
        for job in waiting:
            job.fail(self._hung())
        for job in (*self._unwoken, *self._in_hand):
            job.fail(
                JournalOutcomeUnknown(
                    f"{self._name} hangs or has died; it may have happened; start the process "
                    "again and send the same ids"
                )
            )

    def _hung(self) -> JournalUnavailable:
        return JournalUnavailable(
            f"{self._name} hangs or has died; nothing was done; check the disk or the database, "
            "then start the process again"
        )

    def _note_hung(self) -> None:
        """Refuse all waiting jobs of a thread that hangs, and accept no more jobs."""
        self.is_hung = True
        self._is_open = False
        self._give_up()

    def _watch(self, call_in_loop: Callable[[Callable[[], None]], object]) -> None:
        """Notice if the thread hangs. Runs in another thread, until the first one ends."""
        late: float | None = None
        while not self._is_over.wait(_WATCH_INTERVAL_S):
            until = self._until
            if until is None or self._ports.monotonic() < until:
                late = None
            elif until != late:
                # Look twice: if the process, or the machine, was suspended, the thread has not had
                # the time that has passed.
                late = until
            else:
                call_in_loop(self._note_hung)
                return

    def _end(self) -> None:
        """Note that the thread has ended; if it died, refuse all jobs that wait for it."""
        self._is_open = False
        self._give_up()
        self._ended.set(None)

    def _drain(self) -> Iterator[Job[object]]:
        with contextlib.suppress(Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None:
                    yield job

    def _try_enqueue(self, job: Job[object]) -> bool:
        """Queue the job; return False if there is no room for it."""
        items, size = self._queued_items + job.items, self._queued_bytes + job.bytes
        if not self._queued_items:
            # A job larger than the whole queue enters an empty queue; otherwise it would never run.
            self._hold.take()
        elif items > self._queued_items_max or size > self._queued_bytes_max:
            return False
        self._queued_items, self._queued_bytes = items, size
        self._queue.put(job)
        return True

    def _finish(self, group: Sequence[Job[object]]) -> None:
        self._queued_items -= sum(map(_items_of, group))
        self._queued_bytes -= sum(map(_bytes_of, group))
        for job in group:
            if job.refusal is None:
                job.set(job.settled)
            else:
                job.fail(job.refusal)
                job.refusal = None  # its traceback refers to frames that have the job
        while self._waiting:
            job = self._waiting[0]
            if job.waker is None:
                left = f"{self._name} had no room, and its caller has left; nothing was done"
                job.fail(JournalUnavailable(left))
            elif not self._try_enqueue(job):
                break
            del self._waiting[0]
        if not self._queued_items and self._is_open:
            self._hold.release()
        self._end_when_idle()

    def _end_when_idle(self) -> None:
        if not (self._is_open or self._is_ending or self._waiting):
            self._is_ending = True
            self._queue.put(None)

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self, call_in_loop: Callable[[Callable[[], None]], object]) -> None:
        try:
            worker = self._open_worker()
        except Exception as error:  # noqa: BLE001 - handed to the caller of `start`
            self._is_over.set()
            call_in_loop(partial(self._opened.fail, error))
            return
        call_in_loop(partial(self._opened.set, None))
        self._rest = worker.rest
        self._call_in_loop = call_in_loop
        try:
            group: Sequence[Job[object]]
            while group := self._take():
                bound_s = self._answer_wait_s + max(self.more_s, *map(_more_s_of, group))
                self._until = self._ports.monotonic() + bound_s
                try:
                    worker.work(group)
                except Exception as error:  # noqa: BLE001 - handed to the callers
                    for job in group:
                        outcome = JournalOutcomeUnknown(f"{self._name} failed: {error!r}")
                        outcome.__cause__ = error
                        job.refuse(outcome)
                self._until = None
                self.wake_callers()  # of the group before, if the worker did not wait
                self._unwoken = group
                # If few jobs wait, those that these callers send next belong in their group.
                if not (self._wakes_late and self._queue.qsize() > self._group_items_max // 2):
                    self.wake_callers()
                self._in_hand = group = ()  # drop the finished group before the thread waits
        finally:
            self._is_over.set()
            self.wake_callers()
            try:
                worker.close()
            finally:
                call_in_loop(self._end)

    def wake_callers(self) -> None:
        """Wake the callers of the group before, unless they are woken already.

        Called in the thread, also by the worker.
        """
        group, self._unwoken = self._unwoken, ()
        if group:
            self._call_in_loop(partial(self._finish, group))

    def _wait(self) -> Job[object] | None:
        """Return the next job; let the worker rest until it comes."""
        while self._queue.empty():
            self._until = self._ports.monotonic() + self._answer_wait_s + self.more_s
            pause_s = self._rest()
            self._until = None
            if pause_s is None:
                break
            with contextlib.suppress(Empty):
                return self._queue.get(timeout=pause_s)
        return self._queue.get()

    def _take(self) -> list[Job[object]]:
        """Return the waiting jobs, up to the limits of a group; none if the thread must end."""
        job = self._wait()
        if job is None:
            return []
        group = self._in_hand = [job]
        items, size = job.items, job.bytes
        if self._queue.empty():
            return group  # often; to find out by an exception takes longer than all the rest here
        try:
            while items < self._group_items_max and size < self._group_bytes_max:
                job = self._queue.get_nowait()
                if job is None:
                    self._queue.put(None)  # no job comes after it
                    break
                group.append(job)
                items += job.items
                size += job.bytes
        except Empty:
            pass
        return group
