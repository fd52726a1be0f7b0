"""The ports to the outside world: time, ids, randomness, threads.

One `Ports` bundle is handed in at construction. No other code of either package reads a clock,
makes an id, draws a number or starts a thread. So a simulator can replace the world, and a
failing seed can be run again.
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
from operator import itemgetter
from typing import Protocol, TypeVar
from weakref import WeakSet

import anyio

from ._backend import ClockHold, OneShot, thread_caller
from ._supervision import check_number
from .errors import TooManyThreads, Unavailable

__all__ = ["Blocking", "DaemonThreads", "Ids", "Ports", "format_id"]

T = TypeVar("T")

_UUID_BLOCK = 1 << 16
_48_BITS, _45_BITS = (1 << 48) - 1, (1 << 45) - 1
_VERSION_AND_VARIANT = 0x7 << 76 | 0b10 << 62
_groups_of = itemgetter(slice(8), slice(8, 12), slice(12, 16), slice(16, 20), slice(20, 32))
"""Returns the groups of digits of a UUID."""

# A forked child must not continue its parent's sequences: two children that enter a journal made
# before the fork, as a server's preloaded workers do, would draw the same number for its node.
_generators: WeakSet[random.Random] = WeakSet()


def _seed_anew() -> None:
    for generator in _generators:
        generator.seed()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_seed_anew)


def _make_generator() -> random.Random:
    generator = random.Random()
    _generators.add(generator)
    return generator


# The system's generator costs ten times as much, for a quality that ids do not need.
_random_bits = _make_generator()


class Ids:
    """Time-ordered ids (UUIDv7, RFC 9562), handed out in blocks.

    A block is 65,536 consecutive ids, the first of which ends in sixteen zero bits. A pure
    function that is given one block can name all its events without drawing anything. The blocks
    of one `Ids` rise strictly, even if the wall clock stands still or steps back. Thread-safe.
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
        """Return the first of 65,536 new ids, as an integer."""
        # Layout: 48 bits of milliseconds, version 7, 12 random bits, variant, a zero bit (room
        # for the carry if the clock stands still), 45 random bits, 16 zero bits to count up.
        milliseconds = int(self._now() * 1000) & _48_BITS
        drawn = self._random_bits(57)
        first = (
            milliseconds << 80
            | (drawn >> 45) << 64
            | (drawn & _45_BITS) << 16
            | _VERSION_AND_VARIANT
        )
        with self._lock:
            if first <= self._last:
                first = self._last + _UUID_BLOCK
            self._last = first
        return first

    def new(self) -> str:
        """Return one new id, as text."""
        return format_id(self.block())


def format_id(number: int) -> str:
    """Return the canonical text of a UUID given as an integer."""
    return "-".join(_groups_of(number.to_bytes(16).hex()))


def _start_daemon_thread(name: str, target: Callable[[], None]) -> None:
    try:
        threading.Thread(target=target, name=name, daemon=True).start()
    except RuntimeError as error:
        raise Unavailable(
            f"the thread {name} could not be started: {error}; nothing was done; try again once "
            "this machine, or this user, has fewer threads and processes"
        ) from error


def _monotonic() -> Callable[[], float]:
    """Return a clock that never steps, and that also counts while the machine sleeps.

    `time.monotonic` stands still then, on Linux and macOS. A lease would seem to be valid after a
    sleep in which another machine took the conversations over.
    """
    if not hasattr(time, "clock_gettime"):
        return time.monotonic  # on Windows, which counts it
    # macOS has no CLOCK_BOOTTIME, and its CLOCK_MONOTONIC counts a sleep.
    return partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Blocking(Protocol):
    """A callable that runs a blocking function outside the loop."""

    async def __call__(self, function: Callable[[], T]) -> T: ...


class DaemonThreads:
    """Calls blocking functions, each in a daemon thread of its own.

    A caller that is cancelled abandons its thread, because a thread cannot be ended. Abandoned
    threads are counted. Past `abandoned_max` every further call raises `TooManyThreads`. Leaving
    the program waits for none of them.
    """

    def __init__(
        self,
        *,
        abandoned_max: int = 32,
        start_thread: Callable[[str, Callable[[], None]], None] = _start_daemon_thread,
    ) -> None:
        check_number("abandoned_max", abandoned_max, "1 or more", least=1)
        self.abandoned = 0
        """How many abandoned threads are still running. Read and written in the loop."""
        self._abandoned_max = abandoned_max
        self._start_thread = start_thread

    @property
    def is_exhausted(self) -> bool:
        """True if every further call raises `TooManyThreads`, until an abandoned one ends."""
        return self.abandoned >= self._abandoned_max

    async def __call__(self, function: Callable[[], T]) -> T:
        """Run the function in a thread, in a copy of the caller's context; return its result.

        Raises the function's own error, `TooManyThreads`, and `Unavailable` if no thread can be
        started.
        """
        if self.is_exhausted:
            raise TooManyThreads(self.abandoned)
        answer: OneShot[T] = OneShot()
        call_soon = thread_caller()
        context = copy_context()
        is_abandoned = False

        def finish(settle: Callable[[], None]) -> None:
            if is_abandoned:
                # The caller has left. Its answer gets no error, whose traceback would refer to it.
                self.abandoned -= 1
            else:
                settle()

        def run() -> None:
            try:
                value = context.run(function)
            except BaseException as error:  # noqa: BLE001 - carried to the caller, as it is
                call_soon(partial(finish, partial(answer.fail, error)))
            else:
                call_soon(partial(finish, partial(answer.set, value)))

        self._start_thread("turnkeeper-blocking", run)
        hold = ClockHold()
        hold.take()
        try:
            return await answer.wait()
        finally:
            hold.release()
            answer.error = None  # its traceback refers to this frame, which has the answer
            if not answer.is_done:
                is_abandoned = True
                self.abandoned += 1


@dataclass(frozen=True, slots=True)
class Ports:
    """The outside world, as the two packages see it. The defaults are the real world."""

    monotonic: Callable[[], float] = field(default_factory=_monotonic)
    """Seconds on the machine's clock that never steps, and that counts while the machine sleeps:
    leases, threads and I/O go by it. Any thread may read it. Virtual only if threads and I/O are,
    as in the simulator."""

    loop_time: Callable[[], float] = anyio.current_time
    """Seconds on the running loop's own clock: timers, idle times and the deadlines of asks, turns
    and tools go by it. So a test that moves its loop's clock moves them."""

    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    """Wait that many seconds of `loop_time`; a virtual clock brings both."""

    now: Callable[[], float] = time.time
    """Wall clock, in seconds since the epoch, UTC, for times that are recorded and for ages, such
    as that of a signed request. It may jump: no log is wrong because of it."""

    ids: Ids = field(default_factory=Ids)
    """The source of every id."""

    random: random.Random = field(default_factory=_make_generator)
    """The source of every random number (jitter, sampling). In a forked process the default begins
    a new sequence."""

    start_thread: Callable[[str, Callable[[], None]], None] = _start_daemon_thread
    """Run a function in a daemon thread of that name; leaving the program never waits for it.
    Raises `Unavailable` if no thread can be started."""

    blocking: Blocking = field(default_factory=DaemonThreads)
    """`await ports.blocking(function)`: the only way to call a blocking function."""


def keeps_loop_time(ports: Ports) -> bool:
    """Return True if timers and deadlines go by the running loop's own clock."""
    return ports.loop_time is anyio.current_time
