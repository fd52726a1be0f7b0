"""Tasks that wait for logs to change, served by one query of the store for all of them.

Each journal has one watch, which runs no task. One of the waiting tasks leads: it queries the store
for all of them whenever `call` was called or the poll interval has passed. When the leader leaves,
it wakes another waiter, which leads from then on. So the number of queries does not grow with the
number of waiting tasks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio

from turnkeeper.runtime.lowlevel import OneShot


class _Waiter:
    __slots__ = ("after", "cell", "has_moved", "name")

    def __init__(self, name: str, after: int) -> None:
        self.name = name
        self.after = after
        self.has_moved = False
        self.cell: OneShot[None] | None = None

    def wake(self) -> None:
        if self.cell is not None:
            self.cell.set(None)
            self.cell = None


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
        self._is_led = False
        self._is_called = False
        self._calling: OneShot[None] | None = None

    def call(self) -> None:
        """Make the leader query the store now, because a log may have changed."""
        self._is_called = True
        if self._calling is not None:
            self._calling.set(None)
            self._calling = None

    async def wait(self, name: str, after: int) -> None:
        """Return once this log does not end at `after`."""
        waiter = _Waiter(name, after)
        # Listed before its own query: the leader finds all writes from here on.
        self._waiters[waiter] = None
        try:
            self._see([waiter], await self._read_heads([name]))
            while not waiter.has_moved:
                if self._is_led:
                    waiter.cell = OneShot()
                    await waiter.cell.wait()
                else:
                    self._is_led = True
                    try:
                        await self._lead(waiter)
                    finally:
                        self._is_led = False
        finally:
            del self._waiters[waiter]
            if not self._is_led:
                for other in self._waiters:
                    other.wake()
                    break

    async def _lead(self, leader: _Waiter) -> None:
        while not leader.has_moved:
            if not self._is_called:
                with anyio.move_on_after(self._poll_s):
                    self._calling = OneShot()
                    await self._calling.wait()
            # Cleared before the query: a call from here on causes another one.
            self._is_called = False
            waiters = list(self._waiters)
            names = list(dict.fromkeys(waiter.name for waiter in waiters))
            try:
                self._see(waiters, await self._read_heads(names))
            except BaseException:
                self._is_called = True  # the query failed: the next leader makes it
                raise

    @staticmethod
    def _see(waiters: Sequence[_Waiter], heads: Mapping[str, int]) -> None:
        for waiter in waiters:
            if heads.get(waiter.name, 0) != waiter.after:
                waiter.has_moved = True
                waiter.wake()
