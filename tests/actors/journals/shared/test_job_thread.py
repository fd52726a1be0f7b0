"""When a thread wakes the callers of a group: before its worker waits for the next one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import anyio
import pytest

from turnkeeper.actors.errors import JournalOutcomeUnknown
from turnkeeper.actors.journals.shared.job_thread import Job, JobThread
from turnkeeper.runtime import Ports
from turnkeeper.runtime.lowlevel import OneShot, thread_caller

pytestmark = pytest.mark.anyio

GROUP = 4


class Steps:
    """A worker that stops at each of its steps until the test lets it go on."""

    def __init__(self, *, waits: bool = True, group: int = GROUP) -> None:
        self._waits = waits
        self.reached: OneShot[str] = OneShot()
        self._go = threading.Semaphore(0)
        self._call_in_loop = thread_caller()
        self.thread = JobThread(
            "steps",
            lambda: self,
            ports=Ports(),
            queued_items_max=100,
            queued_bytes_max=100,
            group_items_max=group,
            group_bytes_max=100,
            stop_wait_s=60.0,
            answer_wait_s=60.0,
            wakes_late=True,
        )

    def work(self, jobs: Sequence[Job[object]]) -> None:
        self._stop_at(f"{len(jobs)} prepared")
        if self._waits:
            self.thread.wake_callers()
        self._stop_at(f"{len(jobs)} sent")
        for job in jobs:
            job.settle("done")

    def rest(self) -> float | None:
        return None

    def close(self) -> None:
        return

    def _stop_at(self, step: str) -> None:
        # In the loop this comes after all that the thread has asked for before.
        self._call_in_loop(lambda: self.reached.set(step))
        assert self._go.acquire(timeout=60)

    async def next(self) -> str:
        step = await self.reached.wait()
        self.reached = OneShot()
        return step

    def go_on(self, steps: int = 1) -> None:
        self._go.release(steps)


async def submitted(worker: Steps, then: int) -> tuple[Job[object], list[Job[object]]]:
    """Submit a job, and while it is worked on, this many others."""
    await worker.thread.start()
    first = worker.thread.submit(Job[object]())
    assert await worker.next() == "1 prepared"
    others = [worker.thread.submit(Job[object]()) for _ in range(then)]
    worker.go_on()
    assert await worker.next() == "1 sent"
    worker.go_on()
    return first, others


def is_done(job: Job[object]) -> bool:
    """The same as the attribute, which the type checker takes for a constant."""
    return job.is_done


async def test_callers_wake_when_the_next_large_group_is_under_way() -> None:
    """Their loop would keep the worker from sending it, and leave the database idle."""
    worker = Steps()
    first, others = await submitted(worker, GROUP)

    assert await worker.next() == f"{GROUP} prepared"
    assert not is_done(first)
    worker.go_on()
    assert await worker.next() == f"{GROUP} sent"
    assert is_done(first)

    worker.go_on()
    assert [await job for job in others] == ["done"] * GROUP
    await worker.thread.stop()


async def test_callers_wake_at_once_if_few_jobs_wait() -> None:
    """What they send next then goes into the same group."""
    worker = Steps()
    first, others = await submitted(worker, GROUP // 2 - 1)

    assert await worker.next() == f"{len(others)} prepared"
    assert is_done(first)

    worker.go_on(2)
    assert [await job for job in others] == ["done"] * len(others)
    await worker.thread.stop()


async def test_callers_wake_if_no_job_waits_even_if_a_group_is_one_job() -> None:
    """The thread waited for the next job, and the caller of the last one for the thread."""
    worker = Steps(group=1)
    first, _ = await submitted(worker, 0)
    with anyio.fail_after(60):
        assert await first == "done"
    await worker.thread.stop()


async def test_callers_wake_behind_a_group_that_did_not_wait() -> None:
    worker = Steps(waits=False)
    first, others = await submitted(worker, GROUP)
    assert await worker.next() == f"{GROUP} prepared"
    worker.go_on()
    assert await worker.next() == f"{GROUP} sent"
    assert not is_done(first)

    worker.go_on()
    assert [await job for job in others] == ["done"] * GROUP
    assert is_done(first)
    await worker.thread.stop()


async def test_callers_who_are_not_woken_yet_learn_that_the_thread_hangs() -> None:
    worker = Steps()
    first, others = await submitted(worker, GROUP)
    assert await worker.next() == f"{GROUP} prepared"

    worker.thread._note_hung()

    assert is_done(first)
    for job in (first, *others):
        with pytest.raises(JournalOutcomeUnknown, match="hangs"):
            await job
    worker.go_on(2)
    with anyio.fail_after(60):
        await worker.thread._ended.wait()
