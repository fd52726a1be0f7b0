"""The runtime's clock: one task that runs everything that is due later.

Owns the alarms and the deadlines of asks. A deadline costs almost nothing: asks with the same
timeout expire in the order in which they were sent, so each distinct timeout is a FIFO, and only
its head is on the heap. No other code of the package sleeps, so a virtual clock has one task to
move.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from ._backend import OneShot, cancel_scope
from ._messages import Ask
from .ports import Ports

__all__ = ["Alarm", "Clock"]

_COMPACT_MIN: Final = 1024


class Alarm:
    """A function that runs at a given time, unless it is cancelled before."""

    __slots__ = ("_clock", "run", "when")

    def __init__(self, clock: Clock, when: float, run: Callable[[], None] | None) -> None:
        self._clock = clock
        self.when = when
        self.run = run

    def cancel(self) -> None:
        """Keep the function from running; no effect once it has run."""
        if self.run is not None:
            self.run = None
            self._clock.note_cancelled()


class _Deadlines:
    """Asks that share one timeout, in the order of their deadlines."""

    __slots__ = ("asks", "compact_at", "is_listed")

    def __init__(self) -> None:
        self.asks: deque[Ask] = deque()
        self.is_listed = False
        self.compact_at = _COMPACT_MIN

    def append(self, ask: Ask) -> None:
        asks = self.asks
        # Most asks are answered long before their deadline. Answered ones are dropped from the
        # head; if one slow ask at the head hides many, the whole queue is filtered.
        while asks and asks[0].is_done:
            del asks[0]
        if len(asks) >= self.compact_at:
            self.asks = asks = deque(ask for ask in asks if not ask.is_done)
            self.compact_at = max(_COMPACT_MIN, 2 * len(asks))
        asks.append(ask)

    @property
    def is_needed(self) -> bool:
        """True if an ask still waits for its answer."""
        return any(not ask.is_done for ask in self.asks)

    def expire(self, now: float) -> None:
        asks = self.asks
        while asks and (asks[0].is_done or asks[0].deadline <= now):
            ask = asks.popleft()
            if not ask.is_done:
                ask.expire()


class Clock:
    """Runs alarms and deadlines in the order in which they are due, and then of arming."""

    def __init__(self, ports: Ports, note_broken: Callable[[Exception], None]) -> None:
        """`note_broken` is called with the error of an alarm that raises; the clock goes on."""
        self.now = ports.loop_time
        self._note_broken = note_broken
        self._sleep: Callable[[float], Awaitable[None]] = ports.sleep
        self._heap: list[tuple[float, int, Alarm | float]] = []
        self._count = 0
        self._cancelled = 0
        self._deadlines: dict[float, _Deadlines] = {}
        self._compact_at = _COMPACT_MIN
        self._asleep: anyio.CancelScope | None = None
        self._idle: OneShot[None] = OneShot()
        """Set by the first entry that comes while none will be due."""
        self._wakes_at = -math.inf

    def call_later(self, delay_s: float, run: Callable[[], None]) -> Alarm:
        """Run a function in `delay_s` seconds, in the clock's task."""
        alarm = Alarm(self, self.now() + delay_s, run)
        self._list(alarm.when, alarm)
        return alarm

    def arm(self, ask: Ask, timeout_s: float) -> None:
        """Expire the ask `timeout_s` seconds after it was sent."""
        ask.timeout_s = timeout_s
        ask.deadline = ask.sent_at + timeout_s
        deadlines = self._deadlines.get(timeout_s)
        if deadlines is None:
            if len(self._deadlines) >= self._compact_at:
                self._forget_answered()
            deadlines = self._deadlines[timeout_s] = _Deadlines()
        deadlines.append(ask)
        if not deadlines.is_listed:
            deadlines.is_listed = True
            self._list(ask.deadline, timeout_s)

    @contextmanager
    def at_most(self, seconds: float) -> Iterator[anyio.CancelScope]:
        """Open a cancel scope that this clock cancels after `seconds`, unless it is left before."""
        with cancel_scope() as scope:
            alarm = self.call_later(seconds, scope.cancel)
            try:
                yield scope
            finally:
                alarm.cancel()

    def note_cancelled(self) -> None:
        """Count a cancelled alarm; they leave the heap once they are more than half of it."""
        self._cancelled += 1
        if self._cancelled >= _COMPACT_MIN and 2 * self._cancelled > len(self._heap):
            self._heap = [
                entry
                for entry in self._heap
                if not (isinstance(entry[2], Alarm) and entry[2].run is None)
            ]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def _forget_answered(self) -> None:
        """Forget the timeouts whose asks were all answered: callers may use new ones each time."""
        self._deadlines = {
            timeout_s: each for timeout_s, each in self._deadlines.items() if each.is_needed
        }
        self._compact_at = max(_COMPACT_MIN, 2 * len(self._deadlines))
        self._heap = [
            entry
            for entry in self._heap
            if isinstance(entry[2], Alarm) or entry[2] in self._deadlines
        ]
        heapq.heapify(self._heap)

    async def run(self) -> None:
        """Run everything when it is due, until cancelled."""
        while True:
            # One scope for many waits: an entry that comes before the one awaited cancels it.
            with cancel_scope() as self._asleep:
                while True:
                    self._wakes_at = -math.inf
                    self._run_due()
                    due = self._heap[0][0] if self._heap else math.inf
                    if due < math.inf:
                        self._wakes_at = due
                        await self._sleep(max(0.0, due - self.now()))
                    else:
                        self._wakes_at = due
                        self._idle = OneShot()
                        await self._idle.wait()

    def _list(self, when: float, entry: Alarm | float) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, entry))
        if when < self._wakes_at:
            if self._wakes_at == math.inf:
                self._idle.set(None)
            elif self._asleep is not None:
                self._asleep.cancel()

    def _run_due(self) -> None:
        now = self.now()
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)[2]
            if isinstance(entry, Alarm):
                if (run := entry.run) is not None:
                    entry.run = None
                    try:
                        run()
                    except Exception as error:  # noqa: BLE001 - no alarm may end the clock
                        self._note_broken(error)
                else:
                    self._cancelled -= 1
            else:
                self._expire(entry, now)

    def _expire(self, timeout_s: float, now: float) -> None:
        deadlines = self._deadlines[timeout_s]
        # If the clock is late, another entry may be due between two of these asks: stop there.
        deadlines.expire(min(now, self._heap[0][0]) if self._heap else now)
        if deadlines.asks:
            self._list(deadlines.asks[0].deadline, timeout_s)
        else:
            # Callers may compute their timeouts, so a value that is out of use is forgotten.
            del self._deadlines[timeout_s]
