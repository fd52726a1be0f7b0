"""The workers: a few tasks that run many actors, so that an idle actor needs none.

Owns the queue of ready jobs, and the workers that take them. A job is stepped synchronously. Only
a job that has to wait keeps its worker; then another worker takes over the queue. So there are as
many tasks as jobs that wait for something, plus one.

Invariants, each kept without an await:

1. While a job is ready, exactly one worker is the *dispatcher*: it works through the queue, or
   has been woken to do so.
2. A job is in the queue, in the hands of one worker, or at rest. Never two of these.
3. A native cancellation that the runtime did not ask for ends at most the worker it hit; if that
   was the dispatcher, another worker becomes it.
4. A kill ends with the job that it was meant for. One that comes in the very step in which the
   job ends is never delivered: the worker leaves the cancelled scope before it takes another job.
5. No cancel scope that a job has opened is open around the next job.

Workers are shielded: only `Worker.kill` and `Pool.close` cancel them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeAlias

import anyio

from ._backend import (
    Bell,
    OneShot,
    Tasks,
    cancel_scope,
    checkpointing,
    clear_stray_cancellation,
    make_lone_bell,
    open_scopes,
    running_task,
    uncancel,
)

__all__ = ["Host", "Job", "Pool", "Resident", "Step", "Worker"]

_PARKED_MAX: Final = 256

# Fairness: other tasks of the loop run after each round of steps. A round ends after two
# milliseconds, but has at least 16 steps and at most 256; the clock is read after every 16. If each
# round had 16 steps, a thousand callers would be answered 16 at a time, and a journal would commit
# their next appends in groups as small as that.
_STEPS_TIMED: Final = 16
_STEPS_MAX: Final = 256
_ROUND_S: Final = 0.002

Step: TypeAlias = bool | Coroutine[Any, Any, bool]
"""The result of one step of a job: True if it wants another step after its neighbours; or the
rest of the step, a coroutine that has to wait and returns the same. (Any: nothing is sent to the
coroutine here, and its yields belong to its backend.)"""


class Host(Protocol):
    """The task that runs a job, as the job sees it."""

    @property
    def is_killed(self) -> bool: ...

    def kill(self) -> None: ...

    def leave_scopes(self) -> None:
        """Leave the cancel scopes that the job has opened here and not left, and say so."""


class Job(Protocol):
    """Work that a worker runs a step at a time."""

    name: str
    worker: Host | None

    def step(self) -> Step: ...

    async def after_kill(self) -> bool:
        """Recover from a cancellation of the worker; True if the job wants another step."""
        ...


class Worker:
    """One task of the pool."""

    __slots__ = ("_leave_scopes", "_pool", "_scope", "bell", "is_killed", "job")

    bell: Bell
    """Rung when a parked worker is made the dispatcher, or has to end."""
    _leave_scopes: Callable[[str], None]
    """Leaves the scopes inside `_scope`; set each time that one is entered."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._scope = cancel_scope(shield=True)
        self.is_killed = False
        """True once `_scope` was cancelled; to ask the scope takes longer."""
        self.job: Job | None = None

    def kill(self) -> None:
        """Cancel the job that this worker runs."""
        self.is_killed = True
        self._scope.cancel()

    def leave_scopes(self) -> None:
        self._leave_scopes("an earlier job" if self.job is None else self.job.name)

    async def main(self) -> None:
        pool = self._pool
        task = running_task()
        pool.tasks.add(task)
        self.bell = make_lone_bell()
        try:
            while not pool.is_closed:
                # A scope is used once: each round of this loop but the first comes after a kill.
                with _swallowing(), cancel_scope(shield=True) as self._scope:
                    self.is_killed = False
                    self._leave_scopes = open_scopes()
                    try:
                        if (job := self.job) is not None:
                            # This worker was cancelled: by `kill`, or natively by a library.
                            again = await job.after_kill()
                            self._let_go(job, again=again)
                        if not self.is_killed:
                            await self._serve()
                    except BaseException as error:
                        self.leave_scopes()
                        if not clear_stray_cancellation(error):
                            raise
                    if self.job is None and not self.is_killed:
                        return
        except BaseException:
            # KeyboardInterrupt, SystemExit or a bug in the runtime: the task group is about to
            # cancel the other workers, which are shielded from that.
            pool.close()
            raise
        finally:
            pool.tasks.discard(task)
            pool.forget(self)

    async def _serve(self) -> None:
        """Run jobs; return if enough workers are parked already, or after a kill that came late."""
        pool = self._pool
        ready, parked, bell = pool.ready, pool.parked, self.bell
        checkpoint = checkpointing()
        steps, round_ends = 0, 0.0
        while True:
            # Only a step that suspends makes this worker stop being the dispatcher.
            while ready and pool.dispatcher is self:
                job = ready.popleft()
                step = job.step()
                if step is False:
                    if not ready:
                        break
                    steps += 1
                    if steps % _STEPS_TIMED == 0 and pool.now() >= round_ends:
                        steps = _STEPS_MAX
                elif step is True:
                    ready.append(job)
                    steps = _STEPS_MAX
                else:
                    self.job = job
                    job.worker = self
                    pool.resign(self)
                    again = await step
                    self._let_go(job, again=again)
                    if self.is_killed:
                        return  # a late kill: it was meant for that job, and for no other
                    steps = _STEPS_MAX
                if steps >= _STEPS_MAX and ready:
                    steps = 0
                    pool.told_at = None
                    await checkpoint()
                    round_ends = pool.now() + _ROUND_S
                    pool.tells = 0
                    if pool.is_closed:
                        return
            if pool.dispatcher is self:
                pool.dispatcher = pool.told_at = None
            if len(parked) >= _PARKED_MAX:
                return
            parked.append(self)
            try:
                await bell.wait()
            except BaseException:
                if self in parked:  # it was not elected meanwhile
                    parked.remove(self)
                raise
            if pool.dispatcher is not self:
                return  # it was not elected: the pool is closed
            pool.tells = 0

    def _let_go(self, job: Job, *, again: bool) -> None:
        self.leave_scopes()
        self.job = job.worker = None
        pool = self._pool
        if again:
            pool.ready.append(job)
        if pool.dispatcher is None:
            pool.dispatcher = self


@contextmanager
def _swallowing() -> Iterator[None]:
    """Swallow a native cancellation that its scope let through because of a kill beside it."""
    try:
        yield
    except BaseException as error:
        if not clear_stray_cancellation(error):
            raise


class Resident:
    """A task for one job alone, for as long as the job lives.

    A job may open something with `async with` in one step and close it in another: it is always
    the same task.
    """

    __slots__ = ("_gate", "_is_over", "_pool", "_scope", "job")

    def __init__(self, pool: Pool, job: Job) -> None:
        self._pool = pool
        self._gate: OneShot[None] = OneShot()
        self._scope = cancel_scope(shield=True)
        self._is_over = False
        self.job = job

    def wake(self) -> None:
        self._gate.set(None)

    def end(self) -> None:
        """End the task after its current step: the job is over."""
        self._is_over = True
        self._gate.set(None)

    def kill(self) -> None:
        self._scope.cancel()

    def leave_scopes(self) -> None:
        """Leave none: they are the job's own, for as long as it lives."""

    @property
    def is_killed(self) -> bool:
        return self._scope.cancel_called

    async def main(self) -> None:
        pool = self._pool
        task = running_task()
        pool.tasks.add(task)
        try:
            is_killed = False
            while not self._done():
                with cancel_scope(shield=True) as self._scope:
                    while not self._done():
                        await self._serve_uncancelled(is_killed=is_killed)
                        is_killed = True
                is_killed = True
        except BaseException:
            pool.close()
            raise
        finally:
            pool.tasks.discard(task)
            pool.workers.pop(self, None)

    def _done(self) -> bool:
        return self._is_over or self._pool.is_closed

    async def _serve_uncancelled(self, *, is_killed: bool) -> None:
        try:
            if is_killed:
                await self.job.after_kill()
            await self._serve()
        except anyio.get_cancelled_exc_class():
            if self._scope.cancel_called:
                raise
            # Native, or by a scope that the job itself holds open around its steps, which the
            # job then has to close here, inside this one.
            uncancel()

    async def _serve(self) -> None:
        checkpoint = checkpointing()
        while not self._is_over:
            self._gate = OneShot()
            again: Step = True
            while again is not False and not self._is_over:
                again = self.job.step()
                if again is True:
                    await checkpoint()
                elif again is not False:
                    again = await again
            if not self._is_over:
                await self._gate.wait()


class Pool:
    """Runs the jobs that are submitted, with one worker more than there are waiting jobs."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        """The loop's clock."""
        self.ready: deque[Job] = deque()
        self.parked: deque[Worker] = deque()
        self.dispatcher: Worker | None = None
        self.workers: dict[Worker | Resident, None] = {}
        self.tasks: set[object] = set()
        """The tasks of all workers; only looked into, never iterated over."""
        self.is_closed = False
        self.tells = 0
        """How many tells were sent without a wait since a worker last ran."""
        self.told_at: float | None = None
        """The time of sending that tells are given; None: the next one reads the clock.

        It is kept only while there is a dispatcher, and forgotten whenever that one lets other
        tasks run. So it was read in the loop's current pass, or in the one before.
        """
        self._tasks: Tasks | None = None
        self._shields: dict[anyio.CancelScope, None] = {}

    def open(self, tasks: Tasks) -> None:
        self._tasks = tasks
        if self.ready:
            self.elect()

    def submit(self, job: Job) -> None:
        """Step the job soon. Never waits."""
        self.ready.append(job)
        if self.dispatcher is None:
            self.elect()

    def resign(self, worker: Worker) -> None:
        """Hand the queue to another worker: the dispatcher has to wait for its job."""
        assert self.dispatcher is worker, f"{worker} resigned without being the dispatcher"
        self.dispatcher = self.told_at = None
        if self.ready:
            self.elect()

    def forget(self, worker: Worker) -> None:
        """Remove a worker whose task ends."""
        self.workers.pop(worker, None)
        if worker in self.parked:
            self.parked.remove(worker)
        if self.dispatcher is worker:
            self.dispatcher = self.told_at = None
            if self.ready:
                self.elect()

    def close(self) -> None:
        """Cancel all workers, with the jobs that they run; those that are parked just end."""
        self.is_closed = True
        parked = tuple(self.parked)
        self.parked.clear()
        for worker in parked:
            worker.bell.ring()
        for each in tuple(self.workers):
            if each not in parked:
                each.kill()
        for shield in tuple(self._shields):
            shield.cancel()

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Shield a wait of a job for other jobs from `Worker.kill`, but not from `close`.

        After `close` no worker runs the other jobs, so the wait would never end.
        """
        with cancel_scope(shield=not self.is_closed) as shield:
            self._shields[shield] = None
            try:
                yield
            finally:
                del self._shields[shield]

    def is_running(self, job: Job) -> bool:
        """Return True if a task of the pool is in the middle of a step of this job."""
        return any(worker.job is job for worker in self.workers)

    def start_resident(self, job: Job) -> Resident:
        """Start a task for this job alone."""
        assert self._tasks is not None, "the runtime has not been entered"
        resident = Resident(self, job)
        self.workers[resident] = None
        self._tasks.start_soon(resident.main)
        return resident

    def elect(self) -> None:
        """Make a worker the dispatcher: a job is ready, and there is none."""
        if self.is_closed:
            return
        if self.parked:
            self.dispatcher = worker = self.parked.pop()
            worker.bell.ring()
        elif self._tasks is not None:
            self.dispatcher = worker = Worker(self)
            self.workers[worker] = None
            self._tasks.start_soon(worker.main)
