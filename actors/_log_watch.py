"""Who waits for which log to move, in one process: one look at the store serves all of them.

Owned by a journal. There is no task for it: one of those who wait leads, which is to look for all
of them whenever somebody calls or the time of a poll has passed. When it leaves, it wakes the next
one, which leads on. So what waiting costs the store does not grow with those who wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio

from turnkeeper.runtime import OneShot


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
    """`wait` from any task of one event loop; `call` when something was written."""

    def __init__(
        self,
        read_heads: Callable[[Sequence[str]], Awaitable[Mapping[str, int]]],
        *,
        poll_s: float,
    ) -> None:
        """`read_heads` gives where these logs end; one that is not there is left out."""
        self._read_heads = read_heads
        self._poll_s = poll_s
        self._waiters: dict[_Waiter, None] = {}
        self._is_led = False
        self._is_called = False
        self._calling: OneShot[None] | None = None

    def call(self) -> None:
        """Something may have been written: look."""
        self._is_called = True
        if self._calling is not None:
            self._calling.set(None)
            self._calling = None

    async def wait(self, name: str, after: int) -> None:
        """Return when this log does not end at `after`."""
        waiter = _Waiter(name, after)
        # Listed before it looks for itself: what is written from here on, others look for.
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
            # Cleared before it looks: a call from here on makes it look again.
            self._is_called = False
            waiters = list(self._waiters)
            names = list(dict.fromkeys(waiter.name for waiter in waiters))
            try:
                self._see(waiters, await self._read_heads(names))
            except BaseException:
                self._is_called = True  # nobody has looked: whoever leads next does
                raise

    @staticmethod
    def _see(waiters: Sequence[_Waiter], heads: Mapping[str, int]) -> None:
        for waiter in waiters:
            if heads.get(waiter.name, 0) != waiter.after:
                waiter.has_moved = True
                waiter.wake()
