"""Runs a stress: starts the worker, exchanges orders and reports, kills it, takes samples.

The clients live here, in a process that is not killed; the worker process is `Worker` of `_replay`.
Two tasks change the clients' state machine, and neither awaits while it does: one reads the
reports; the other sends the orders that are due, kills, and takes a sample each second. Time is in
seconds since the first worker was ready.

A worker that reports nothing, or makes no progress, for `SILENCE_S_MAX` ends the run: a hang counts
as a broken promise too.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from random import Random

import anyio

from turnkeeper.runtime import Ports
from turnkeeper.runtime.lowlevel import Lateness

from ..recordings.audit import Receipts
from ._crowd import Crowd
from ._protocol import (
    Failed,
    GetViews,
    Held,
    Order,
    Ready,
    Report,
    StartStress,
    Views,
    Vitals,
)
from ._replay import Worker, WorkerLost, started

__all__ = ["SAMPLE_S", "STRESS_WORKER", "Outage", "Sample", "Stress", "plan_kills_at"]

STRESS_WORKER: Sequence[str] = (sys.executable, "-P", "-m", "turnkeeper.actors.cli.stress_worker")

SILENCE_S_MAX = 120.0
SAMPLE_S = 1.0
_TICK_S = 0.02
_VIEWS_AT_ONCE = 64


@dataclass(slots=True)
class Outage:
    """The time from a kill until another worker was ready."""

    at: float
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one moment: totals since the beginning, and three values of the worker."""

    at: float
    acknowledged: int
    answered: int
    """The number of latencies measured before this sample."""
    logged: int
    waiting: int
    waiting_max: int
    memory_max: int


@dataclass(slots=True)
class Stress:
    """One run, during and after. Only `run` changes it."""

    start: StartStress
    crowd: Crowd
    planned_kills: Sequence[float]
    """When to kill, in seconds."""
    ports: Ports
    changed: Callable[[Stress], None]
    """Called many times a second."""
    worker: Sequence[str]
    outages: list[Outage] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    """The seconds from the beginning until the last turn ended."""
    is_ending: bool = False
    """True once all turns have ended, and the worker reports its views."""
    memory_max: int = 0
    """The memory of the largest worker, in bytes."""
    lateness: Lateness = field(default_factory=Lateness)
    """How late the event loops of all workers were."""
    _vitals: Vitals | None = None
    _began: float | None = None
    _is_ready: bool = False
    _heard_at: float = 0.0
    _moved_at: float = 0.0
    _moved: int = 0
    _unseen: deque[Receipts] = field(default_factory=deque)
    """The conversations whose view the worker has not reported yet."""

    @property
    def kills(self) -> int:
        return len(self.outages)

    async def run(self) -> None:
        """Run to the end, over all kills. Raises `WorkerLost`."""
        kills = deque(self.planned_kills)
        while True:
            self._is_ready = False
            self._heard_at = self._moved_at = self.ports.monotonic()
            try:
                async with started(self.worker) as worker:
                    await worker.order(self.start, *self.crowd.orders_for_new_worker())
                    async with anyio.create_task_group() as group:
                        group.start_soon(self._keep_ordering, worker, kills)
                        has_told_all = await self._follow(worker)
                        group.cancel_scope.cancel()
            except ExceptionGroup as lost:
                # Each of the two tasks can fail in one way, and the first to fail ends the other.
                raise lost.exceptions[0] from None
            if not self._will_restart(worker):
                if not has_told_all or worker.status != 0:
                    raise WorkerLost(worker.describe_end())
                return

    def _will_restart(self, worker: Worker) -> bool:
        """True if another worker takes the place of one that has ended."""
        return worker.is_killed

    # --- reading ---------------------------------------------------------------------------------

    async def _follow(self, worker: Worker) -> bool:
        """Serve one worker until it has reported all views (True), or its reports end."""
        async with aclosing(worker.reports()) as heard:
            async for report in heard:
                self._heard_at = self.ports.monotonic()
                orders = self._note(report)
                if worker.is_killed:
                    continue
                if self.is_ending and not self._unseen:
                    return True
                await worker.order(*orders, *self._ending())
        return False

    def _note(self, report: Report) -> Sequence[Order]:
        match report:
            case Ready():
                self._is_ready = True
                self._began = self._heard_at if self._began is None else self._began
                for outage in self.outages:
                    outage.until = outage.until or self._now()
                return ()
            case Failed():
                raise WorkerLost(f"the worker failed: {report.error}: {report.why}")
            case Vitals():
                self._vitals = report
                self.memory_max = max(self.memory_max, report.memory_max)
                self.lateness.add(report.late, report.late_s_max)
                return ()
            case Views():
                for _ in report.event_ids:
                    receipts = self._unseen.popleft()
                    receipts.view_ids = report.event_ids[receipts.conversation_id]
                return self._get_views()
            case Held():
                raise WorkerLost("the worker reports held, which no stress asks for")
            case _:
                return self.crowd.note(report, self._now())

    def _ending(self) -> Sequence[Order]:
        """Return the orders that begin the end of the run, once, when all turns have ended."""
        if self.is_ending or not self._is_ready or not self.crowd.is_done:
            return ()
        self.is_ending = True
        self.seconds = self._now()
        self._unseen.extend(self.crowd.used)
        return self._get_views()

    def _get_views(self) -> Sequence[Order]:
        names = [receipts.conversation_id for receipts in islice(self._unseen, _VIEWS_AT_ONCE)]
        return [GetViews(conversations=tuple(names))] if names else []

    # --- ordering --------------------------------------------------------------------------------

    async def _keep_ordering(self, worker: Worker, kills: deque[float]) -> None:
        while True:
            now = self._now()
            if kills and self._is_kill_due(kills[0], now):
                kills.popleft()
                worker.kill()
                self._vitals = None
                self.outages.append(Outage(now))
                self.changed(self)
                return
            self._check_it_moves()
            if not self.is_ending:
                self.seconds = now
            self._sample(now)
            if self._is_ready:
                await worker.order(*self.crowd.take_due(now), *self._ending())
            self.changed(self)
            next_due = self.crowd.next_due
            delay_s = _TICK_S if next_due is None else min(_TICK_S, next_due - self._now())
            await self.ports.sleep(max(0.0, delay_s) if self._is_ready else _TICK_S)

    def _is_kill_due(self, at: float, now: float) -> bool:
        """Return whether the next kill, planned for `at`, is to happen now."""
        return self._began is not None and now >= at

    def _sample(self, now: float) -> None:
        if self.is_ending or now < len(self.samples) * SAMPLE_S:
            return
        crowd, vitals = self.crowd, self._vitals
        self.samples.append(
            Sample(
                at=now,
                acknowledged=crowd.acknowledged,
                answered=len(crowd.latencies),
                logged=crowd.logged,
                waiting=vitals.waiting if vitals else 0,
                waiting_max=vitals.waiting_max if vitals else 0,
                memory_max=vitals.memory_max if vitals else 0,
            )
        )

    def _check_it_moves(self) -> None:
        now = self.ports.monotonic()
        moved = self.crowd.acknowledged + self.crowd.ended + len(self._unseen)
        if moved != self._moved or (not self.crowd.open and not self.is_ending):
            self._moved, self._moved_at = moved, now
        if now - self._heard_at > SILENCE_S_MAX:
            raise WorkerLost(f"the worker has said nothing for {SILENCE_S_MAX:g} s")
        # A worker that has stopped is called silent, although it makes no progress either. It is
        # stuck only if it still reported long after its last progress.
        still_reports = self._heard_at - self._moved_at > SILENCE_S_MAX / 2
        if still_reports and now - self._moved_at > SILENCE_S_MAX:
            raise WorkerLost(
                f"nothing has happened for {SILENCE_S_MAX:g} s; {self.crowd.open:,} chat messages "
                "are not answered"
            )

    def _now(self) -> float:
        return 0.0 if self._began is None else self.ports.monotonic() - self._began


def plan_kills_at(kills: int, duration_s: float, random: Random) -> Sequence[float]:
    """Plan the kills: one at a drawn moment of each of `count` equal parts of the time."""
    part_s = duration_s / max(1, kills)
    return [(n + random.uniform(0.1, 0.9)) * part_s for n in range(kills)]
