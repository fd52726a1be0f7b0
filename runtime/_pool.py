"""The workers: a few tasks that run many actors, so that an idle actor needs none.

Owns the queue of jobs that are ready, and the workers that take them. A job is stepped
synchronously; only when it has to wait does it take its worker with it, and then another worker
looks after the queue. So there are as many tasks as jobs that wait for something, plus one.

Invariants, each kept without an await:

1. While a job is ready, exactly one worker is the *runner*: it is looking at the queue, or has
   been woken to do so.
2. A job is in the queue, in the hands of one worker, or at rest. Never two of these.
3. A native cancellation that nobody here asked for ends at most the worker it hit; the runner's
   office passes on.

Workers are shielded: only `Worker.kill` and `Pool.close` cancel them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from typing import Any, Final, Protocol, TypeAlias

import anyio
from anyio.abc import TaskGroup

from ._backend import OneShot, checkpointing, clear_stray_cancellation, parking, uncancel

__all__ = ["Host", "Job", "Pool", "Resident", "Step", "Worker"]

_PARKED_MAX: Final = 256
_STEPS_MAX: Final = 16

Step: TypeAlias = bool | Coroutine[Any, Any, bool]
"""What one step of a job came to: whether the job is to be stepped again, when others had their
turn; or the rest of the step, which has to wait, with the same result. (Any: nothing is sent to a
coroutine here, and what it yields is its backend's.)"""


class Host(Protocol):
    """The task that has a job in its hands, as the job sees it."""

    @property
    def is_killed(self) -> bool: ...

    def kill(self) -> None: ...


class Job(Protocol):
    """Something that workers run a step at a time."""

    worker: Host | None

    def step(self) -> Step: ...

    async def after_kill(self) -> bool:
        """Its worker was cancelled under it; whether it is to be stepped again."""
        ...


class Worker:
    """One task of the pool."""

    __slots__ = ("_pool", "_scope", "gate", "job")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.gate: OneShot[None] = OneShot()
        self._scope = anyio.CancelScope(shield=True)
        self.job: Job | None = None

    def kill(self) -> None:
        """Cancel whatever this worker waits for."""
        self._scope.cancel()

    @property
    def is_killed(self) -> bool:
        return self._scope.cancel_called

    async def main(self) -> None:
        pool = self._pool
        try:
            while not pool.is_closed:
                # A scope is used once: each turn of this loop but the first comes after a kill.
                with anyio.CancelScope(shield=True) as self._scope:
                    try:
                        if (job := self.job) is not None:
                            # It was cancelled under us: by `kill`, or natively by some library.
                            again = await job.after_kill()
                            self._let_go(job, again=again)
                        await self._serve()
                    except BaseException as error:
                        if not clear_stray_cancellation(error):
                            raise
                    if self.job is None:
                        return
        except BaseException:
            # KeyboardInterrupt, SystemExit or a bug of ours: the group is about to cancel our
            # siblings, who are shielded from it.
            pool.close()
            raise
        finally:
            pool.forget(self)

    async def _serve(self) -> None:
        """Run jobs until there is one worker too many."""
        pool = self._pool
        ready, parked, gate = pool.ready, pool.parked, self.gate
        park, checkpoint = parking(), checkpointing()
        steps = 0
        while True:
            # Of the two, only a step that waits can cost us the office.
            while ready and pool.runner is self:
                job = ready.popleft()
                step = job.step()
                if step is False:
                    if not ready:
                        break
                    steps += 1
                elif step is True:
                    ready.append(job)
                    steps = _STEPS_MAX
                else:
                    self.job = job
                    job.worker = self
                    pool.resign(self)
                    again = await step
                    self._let_go(job, again=again)
                    steps = _STEPS_MAX
                if steps >= _STEPS_MAX and ready:
                    steps = 0
                    await checkpoint()
                    if pool.is_closed:
                        return
            if pool.runner is self:
                pool.runner = None
            if len(parked) >= _PARKED_MAX:
                return
            gate.is_done = False
            parked.append(self)
            try:
                await park(gate)
            except BaseException:
                if self in parked:  # it was not elected meanwhile
                    parked.remove(self)
                raise

    def _let_go(self, job: Job, *, again: bool) -> None:
        self.job = job.worker = None
        pool = self._pool
        if again:
            pool.ready.append(job)
        if pool.runner is None:
            pool.runner = self


class Resident:
    """A task for one job alone, for as long as the job lives.

    What the job opens with `async with` in one step it may close in another: it is the same task.
    """

    __slots__ = ("_gate", "_is_over", "_pool", "_scope", "job")

    def __init__(self, pool: Pool, job: Job) -> None:
        self._pool = pool
        self._gate: OneShot[None] = OneShot()
        self._scope = anyio.CancelScope(shield=True)
        self._is_over = False
        self.job = job

    def wake(self) -> None:
        self._gate.set(None)

    def end(self) -> None:
        """The job is over; the task ends after the step it is at."""
        self._is_over = True
        self._gate.set(None)

    def kill(self) -> None:
        self._scope.cancel()

    @property
    def is_killed(self) -> bool:
        return self._scope.cancel_called

    async def main(self) -> None:
        pool = self._pool
        try:
            is_killed = False
            while not self._done():
                with anyio.CancelScope(shield=True) as self._scope:
                    while not self._done():
                        await self._serve_uncancelled(is_killed=is_killed)
                        is_killed = True
                is_killed = True
        except BaseException:
            pool.close()
            raise
        finally:
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
            # Native, or by a scope that the job itself holds open around its steps: the job has
            # to close that one here, inside ours.
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
    """Runs what is submitted, with as many workers as have something to wait for."""

    def __init__(self) -> None:
        self.ready: deque[Job] = deque()
        self.parked: list[Worker] = []
        self.runner: Worker | None = None
        self.workers: dict[Worker | Resident, None] = {}
        self.is_closed = False
        self._tasks: TaskGroup | None = None

    def open(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        if self.ready:
            self.elect()

    def submit(self, job: Job) -> None:
        """Step the job soon. Never waits."""
        self.ready.append(job)
        if self.runner is None:
            self.elect()

    def resign(self, worker: Worker) -> None:
        """The runner has to wait for its job; another one looks after the queue."""
        assert self.runner is worker, f"{worker} resigned an office it does not hold"
        self.runner = None
        if self.ready:
            self.elect()

    def forget(self, worker: Worker) -> None:
        """A worker's task ends."""
        self.workers.pop(worker, None)
        if worker in self.parked:
            self.parked.remove(worker)
        if self.runner is worker:
            self.runner = None
            if self.ready:
                self.elect()

    def close(self) -> None:
        """Cancel all workers, with whatever they have in hand."""
        self.is_closed = True
        for worker in tuple(self.workers):
            worker.kill()

    def settle(self, job: Job) -> Resident:
        """Give the job a task of its own."""
        assert self._tasks is not None, "the runtime has not been entered"
        resident = Resident(self, job)
        self.workers[resident] = None
        self._tasks.start_soon(resident.main)
        return resident

    def elect(self) -> None:
        """There is no runner, and something is ready: make one."""
        if self.is_closed:
            return
        if self.parked:
            self.runner = worker = self.parked.pop()
            worker.gate.set(None)
        elif self._tasks is not None:
            self.runner = worker = Worker(self)
            self.workers[worker] = None
            self._tasks.start_soon(worker.main)
