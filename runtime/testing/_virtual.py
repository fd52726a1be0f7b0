"""A virtual clock, a probe, and a check for leaks: for tests of one actor, on either backend."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from .._actor import Actor
from .._backend import OneShot
from .._runtime import Runtime, cells_of
from .._supervision import check_seconds
from ..ports import Ports

__all__ = ["Probe", "VirtualClock", "no_leaks", "settle"]

M = TypeVar("M")

_SETTLE_STEPS = 20


async def settle() -> None:
    """Return when every other task is waiting for something."""
    # anyio looks again after a tenth of a second of real time; these steps make the first look
    # find nothing running.
    for _ in range(_SETTLE_STEPS):
        await checkpoint()
    await anyio.wait_all_tasks_blocked()


class VirtualClock:
    """A clock that moves when `advance` says so. Hand its `ports()` to the runtime."""

    def __init__(self, start: float = 1_000.0) -> None:
        check_seconds("start", start)
        self._now = start
        self._sleepers: list[tuple[float, int, OneShot[None]]] = []
        self._count = 0

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        gate: OneShot[None] = OneShot()
        self._count += 1
        heapq.heappush(self._sleepers, (self._now + seconds, self._count, gate))
        await gate.wait()

    async def advance(self, seconds: float) -> None:
        """Let time pass; return when everything due has run, and all tasks wait again."""
        check_seconds("seconds", seconds)
        until = self._now + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= until:
            when, _, gate = heapq.heappop(self._sleepers)
            self._now = max(self._now, when)
            gate.set(None)
            await settle()
        self._now = until

    def jump(self, seconds: float) -> None:
        """Let time pass at once, and wait for nothing: for tests with tasks that never rest."""
        check_seconds("seconds", seconds)
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            heapq.heappop(self._sleepers)[2].set(None)

    def ports(self) -> Ports:
        """Return the real world's ports, with this clock; leases and threads keep the machine's."""
        return Ports(loop_time=self.monotonic, sleep=self.sleep, now=self.monotonic)


class Probe(Actor[M], Generic[M]):
    """An actor that keeps the messages it is sent, and replies with `answer(message)`."""

    def __init__(self, answer: Callable[[M], object] | None = None) -> None:
        self.received: list[M] = []
        self._answer = answer
        self._gate: OneShot[None] | None = None

    def receive(self, message: M) -> object:
        self.received.append(message)
        if self._gate is not None:
            self._gate.set(None)
        return None if self._answer is None else self._answer(message)

    async def wait_for(self, count: int) -> list[M]:
        """Wait for `count` messages, and return the first `count`. For one task at a time."""
        while len(self.received) < count:
            self._gate = OneShot()
            await self._gate.wait()
        return self.received[:count]


@contextmanager
def no_leaks(runtime: Runtime) -> Iterator[None]:
    """Raise `AssertionError` if an actor that was started inside is still there afterwards.

    If the block raises, its own error goes on, and nothing is checked.
    """
    root = runtime._root  # noqa: SLF001 - same package
    before = {cell.name for cell in cells_of(root)}
    yield
    leaked = [cell.name for cell in cells_of(root) if cell.name not in before]
    if leaked:
        raise AssertionError(f"{len(leaked)} actors were not stopped: {', '.join(leaked)}")
