"""Everything the outside world gives us: time, ids, randomness, threads.

One `Ports` bundle is handed in at construction, and nothing else in either package reads a
clock, makes an id, draws a number or starts a thread. That is what lets a simulator replace
the world, and a failing seed be run again.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import anyio

from ._backend import OneShot, thread_caller
from .errors import TooManyThreads

__all__ = ["Blocking", "DaemonThreads", "Ids", "Ports", "format_id"]

T = TypeVar("T")

_UUID_BLOCK = 1 << 16

# The system's own generator costs ten times this one, for bits that no id needs. A forked child
# must not go on with its parent's sequence.
_random_bits = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_random_bits.seed)


class Ids:
    """Time-ordered ids (UUIDv7, RFC 9562), handed out in blocks.

    A block is 65,536 consecutive ids whose first ends in sixteen zero bits, so a pure function
    that is given one block can name all its events without drawing anything. Blocks made by one
    `Ids` rise strictly, also when the wall clock stands still or steps back. Thread-safe.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.time,
        random_bits: Callable[[int], int] = _random_bits.getrandbits,
    ) -> None:
        self._now = now
        self._random_bits = random_bits
        self._last = 0
        self._lock = threading.Lock()

    def block(self) -> int:
        """The first of 65,536 new ids, as an integer."""
        # Layout: 48 bits of milliseconds, version 7, 12 random bits, variant, a zero bit (room
        # for the carry when the clock stands still), 45 random bits, 16 zero bits to count up.
        milliseconds = int(self._now() * 1000) & ((1 << 48) - 1)
        drawn = self._random_bits(57)
        high = (milliseconds << 16) | (0x7 << 12) | (drawn >> 45)
        low = (0b10 << 62) | ((drawn & ((1 << 45) - 1)) << 16)
        first = (high << 64) | low
        with self._lock:
            self._last = first = max(first, self._last + _UUID_BLOCK)
        return first

    def new(self) -> str:
        """One new id, as text."""
        return format_id(self.block())


def format_id(number: int) -> str:
    """The canonical text of a UUID given as an integer."""
    digits = f"{number:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _start_daemon_thread(name: str, target: Callable[[], None]) -> None:
    threading.Thread(target=target, name=name, daemon=True).start()


class Blocking(Protocol):
    """The way to call what blocks."""

    async def __call__(self, function: Callable[[], T]) -> T: ...


class DaemonThreads:
    """Calls blocking functions, each in a daemon thread of its own.

    A caller that is cancelled abandons its thread, for a thread cannot be ended. Abandoned ones
    are counted, and past `abandoned_max` nothing more is started: `TooManyThreads`. Leaving the
    program waits for none of them.
    """

    def __init__(
        self,
        *,
        abandoned_max: int = 32,
        start_thread: Callable[[str, Callable[[], None]], None] = _start_daemon_thread,
    ) -> None:
        self.abandoned = 0
        """How many threads are still running for nobody. Read and written in the loop."""
        self._abandoned_max = abandoned_max
        self._start_thread = start_thread

    async def __call__(self, function: Callable[[], T]) -> T:
        """What the function returns or raises; it sees the caller's context variables."""
        if self.abandoned >= self._abandoned_max:
            raise TooManyThreads(self.abandoned)
        answer: OneShot[T] = OneShot()
        call_soon = thread_caller()
        context = copy_context()
        is_abandoned = False

        def finish(settle: Callable[[], None]) -> None:
            if is_abandoned:
                self.abandoned -= 1
            settle()

        def run() -> None:
            try:
                value = context.run(function)
            except BaseException as error:  # noqa: BLE001 - carried to the caller, as it is
                call_soon(partial(finish, partial(answer.fail, error)))
            else:
                call_soon(partial(finish, partial(answer.set, value)))

        self._start_thread("turnkeeper-blocking", run)
        try:
            return await answer.wait()
        finally:
            if not answer.is_done:
                is_abandoned = True
                self.abandoned += 1


@dataclass(frozen=True, slots=True)
class Ports:
    """The world, as the two packages see it. The defaults are the real one."""

    monotonic: Callable[[], float] = time.monotonic
    """Seconds on a clock that never steps; the only one that decides about deadlines and leases."""

    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    """Wait that many seconds of `monotonic`; a virtual clock brings both."""

    now: Callable[[], float] = time.time
    """Wall clock, in seconds since the epoch, UTC; only ever written down, never decided by."""

    ids: Ids = field(default_factory=Ids)
    """Where every id comes from."""

    random: random.Random = field(default_factory=random.Random)
    """Where every drawn number comes from (jitter, sampling)."""

    start_thread: Callable[[str, Callable[[], None]], None] = _start_daemon_thread
    """Run a function in a daemon thread of that name; leaving the program never waits for it."""

    blocking: Blocking = field(default_factory=DaemonThreads)
    """`await ports.blocking(function)`: the only way to call what blocks."""
