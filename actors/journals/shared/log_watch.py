"""Tasks that wait for logs to change, served by one query of the journal for all of them.

Each journal has one watch, which runs no task of its own. One of the waiting tasks leads: it
queries the journal for the logs that `call` named. If `call` named none, or when the poll interval
has passed, it queries for all logs that are waited for. When the leader leaves, it wakes another
waiter, which leads from then on. So the number of queries does not grow with the number of waiting
tasks, and a query that follows a commit reads the rows of the logs that it changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from zlib import crc32

import anyio

from turnkeeper.runtime.lowlevel import OneShot


def mark_of(name: str) -> int:
    """Return the 32 bits that name a conversation to waiting readers; two may share them."""
    return crc32(name.encode(errors="surrogatepass"))


class _Waiter:
    __slots__ = ("after", "has_moved", "mark", "name", "woken")

    def __init__(self, name: str, after: int) -> None:
        self.name = name
        self.mark = mark_of(name)
        self.after = after
        self.has_moved = False
        self.woken: OneShot[None] | None = None

    def wake(self) -> None:
        if self.woken is not None:
            self.woken.set(None)
            self.woken = None


class LogWatch:
    """`wait` from any task of one event loop; `call` after a write."""

    def __init__(
        self,
        read_heads: Callable[[Sequence[str]], Awaitable[Mapping[str, int]]],
        *,
        poll_s: float,
    ) -> None:
        """`read_heads` returns the heads of the given logs that exist."""
        self._read_heads = read_heads
        self._poll_s = poll_s
        self._waiters: dict[_Waiter, None] = {}
        # Written in the event loop alone, read by `awaits` in any thread.
        self._awaited: dict[int, int] = {}
        self._is_led = False
        self._is_called = False
        self._called_for: set[int] = set()
        self._poll_at = 0.0
        self._calling: OneShot[None] | None = None

    @property
    def is_awaited(self) -> bool:
        """True if a task waits. Thread-safe."""
        return bool(self._awaited)

    def awaits(self, marks: Collection[int]) -> bool:
        """Return True if a task waits for a log with one of these marks. Thread-safe.

        A task that begins to wait later on reads the journal first, and finds what was committed.
        """
        return any(mark in self._awaited for mark in marks)

    def call(self, marks: Collection[int] | None = None) -> None:
        """Make the leader query the journal now: these logs may have changed; None: any log may."""
        if marks is None:
            self._is_called = True
        else:
            self._called_for.update(mark for mark in marks if mark in self._awaited)
        if self._calling is not None and (self._is_called or self._called_for):
            self._calling.set(None)
            self._calling = None

    async def wait(self, name: str, after: int) -> None:
        """Return once this log does not end at `after`."""
        waiter = _Waiter(name, after)
        if not self._waiters:
            self._poll_at = anyio.current_time() + self._poll_s
        # Listed before its own query: the leader finds all writes from here on.
        self._waiters[waiter] = None
        self._awaited[waiter.mark] = self._awaited.get(waiter.mark, 0) + 1
        try:
            self._see([waiter], await self._read_heads([name]))
            while not waiter.has_moved:
                if self._is_led:
                    waiter.woken = OneShot()
                    await waiter.woken.wait()
                else:
                    self._is_led = True
                    try:
                        await self._lead(waiter)
                    finally:
                        self._is_led = False
        finally:
            del self._waiters[waiter]
            self._awaited[waiter.mark] -= 1
            if not self._awaited[waiter.mark]:
                del self._awaited[waiter.mark]
            if not self._is_led:
                for other in self._waiters:
                    other.wake()
                    break

    async def _lead(self, leader: _Waiter) -> None:
        while not leader.has_moved:
            if not (self._is_called or self._called_for):
                # Calls for some logs do not delay the query for all of them.
                with anyio.CancelScope(deadline=self._poll_at):
                    self._calling = OneShot()
                    await self._calling.wait()
            # Cleared before the query: a call from here on causes another one.
            is_for_all = self._is_called or anyio.current_time() >= self._poll_at
            marks, self._called_for = self._called_for, set()
            waiters = [each for each in self._waiters if is_for_all or each.mark in marks]
            if is_for_all:
                self._is_called = False
                self._poll_at = anyio.current_time() + self._poll_s
            names = list(dict.fromkeys(waiter.name for waiter in waiters))
            try:
                if names:
                    self._see(waiters, await self._read_heads(names))
            except BaseException:
                self._is_called = True  # the query failed: the next leader repeats it
                raise

    @staticmethod
    def _see(waiters: Sequence[_Waiter], heads: Mapping[str, int]) -> None:
        for waiter in waiters:
            if heads.get(waiter.name, 0) != waiter.after:
                waiter.has_moved = True
                waiter.wake()
