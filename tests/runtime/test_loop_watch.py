"""Code that blocks the event loop is found from outside of it, and shown."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from dataclasses import dataclass

import anyio
import pytest

from turnkeeper.runtime import Actor, LoopBlocked, Message, Ports, Runtime
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


class Told(logging.Handler):
    """Keeps the warnings that a loop is blocked, and notes when the expected one has come."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.has_come = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        # A machine that stands still is a loop that does, so others may come too.
        if "event loop blocked" in line and "block_the_loop" in line:
            self.lines.append(line)
            self.has_come.set()


@dataclass(frozen=True)
class Block(Message[None]):
    text: str


class Blocking(Actor[Block]):
    def __init__(self, told: Told, seconds_max: float = 1) -> None:
        self._told = told
        self._seconds_max = seconds_max

    async def receive(self, message: Block) -> None:
        self.block_the_loop()

    def block_the_loop(self) -> None:
        self._told.has_come.wait(self._seconds_max)


async def test_a_handler_that_blocks_the_loop_is_reported_with_its_stack() -> None:
    told = Told()
    log = logging.getLogger("turnkeeper.runtime")
    log.addHandler(told)
    try:
        async with Runtime(report_blocked_s=0.05) as runtime:
            with runtime.events.subscribe(LoopBlocked) as reports:
                blocking = runtime.spawn(lambda: Blocking(told), name="blocking")
                with anyio.fail_after(60):
                    # A block is told once: if the machine stood still just before, without this.
                    while not told.has_come.is_set():
                        await blocking.ask(Block("a secret"))
                    while True:
                        report = await anext(reports)
                        if "block_the_loop" in report.stack:
                            break
    finally:
        log.removeHandler(told)
    assert report.seconds == 0.05
    assert "a secret" not in told.lines[0]


async def test_no_thread_is_left_behind() -> None:
    async with Runtime(report_blocked_s=0.01):
        watches = [one for one in threading.enumerate() if one.name == "turnkeeper-loop-watch"]
        assert watches
    for watch in watches:
        watch.join(60)
        assert not watch.is_alive()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_time_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="report_blocked_s"):
        Runtime(report_blocked_s=seconds)


STOOD_STILL_S = 3_600.0


async def test_a_process_that_stood_still_as_a_whole_is_no_blocked_loop() -> None:
    """Suspended, the loop gives no sign of life, and runs nothing that is worth showing."""
    told = Told()
    looks = itertools.count()
    last = math.inf
    goes_on, has_gone_on = threading.Event(), threading.Event()

    def monotonic() -> float:
        if threading.current_thread().name != "turnkeeper-loop-watch":
            return time.monotonic()
        nth = next(looks)
        if nth == last:  # the process goes on before the watch waits once more
            goes_on.set()
            has_gone_on.wait(60)
        return time.monotonic() + nth * STOOD_STILL_S

    class Suspended(Actor[Block]):
        async def receive(self, message: Block) -> None:
            self.block_the_loop()

        def block_the_loop(self) -> None:
            nonlocal last
            last = next(looks) + 3  # after the two of the first wait
            while not goes_on.wait(0.05) and not told.lines:
                pass

    log = logging.getLogger("turnkeeper.runtime")
    log.addHandler(told)
    try:
        async with Runtime(report_blocked_s=0.05, ports=Ports(monotonic=monotonic)) as runtime:
            with anyio.fail_after(60):
                await runtime.spawn(Suspended, name="suspended").ask(Block("hello"))
                await settle()
                has_gone_on.set()
    finally:
        has_gone_on.set()
        log.removeHandler(told)
    assert not told.lines


async def test_calls_that_hold_up_the_watch_too_are_reported_once_they_are_several() -> None:
    """A regular expression keeps the interpreter's lock, and so the thread waits for it too."""
    told = Told()
    looks = itertools.count()

    def monotonic() -> float:
        if threading.current_thread().name != "turnkeeper-loop-watch":
            return time.monotonic()
        return time.monotonic() + next(looks) * STOOD_STILL_S

    log = logging.getLogger("turnkeeper.runtime")
    log.addHandler(told)
    try:
        async with Runtime(report_blocked_s=0.05, ports=Ports(monotonic=monotonic)) as runtime:
            with anyio.fail_after(60):
                await runtime.spawn(lambda: Blocking(told, 20), name="blocking").ask(Block("hello"))
    finally:
        log.removeHandler(told)
    assert told.lines
