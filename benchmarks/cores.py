"""Two processes on two cores, with files of their own and on one PostgreSQL, beside one process.

Each process has 500 conversations, which append at once: the whole path. Runs with one process and
with both take turns, round by round; the second process is idle while the first one runs alone.

`cores_…_cpu` is the processor time of an event, of the processes and the server together. One
process, with its loop and its writing thread, can use more than one core, which limits the gain
from a second one. So the baseline of `cores_…` is the time of one process, divided by 2, and
multiplied by the number of cores that it and the server use, if that is more than one. The clock
shows this only on a quiet machine; under other load, look at the processor time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import psycopg

from ._harness import FOLDER, Measure, PeerMissing, costlier, faster, say, skipped
from ._postgres import schema, server
from .nodes import Server

CONVERSATIONS = 500
# A round of 6 took 150 ms, and had one full collection of garbage, which took 50 ms, or none.
EACH = 24
US = 1e6
ROUND_S_MAX = 60.0


class Worked(NamedTuple):
    """The time that an event took, in µs, and the cores that were used."""

    clock: float
    processor: float
    cores: float


class Process:
    """A process that appends to its conversations when it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.end()  # it has begun

    def begin(self, each: int) -> None:
        assert self._process.stdin is not None
        print(each, file=self._process.stdin, flush=True)

    def end(self) -> float:
        """Wait for what was begun; return the processor's time of the process so far."""
        assert self._process.stdout is not None
        # A process that hangs is killed, and reading its answer ends.
        watchdog = threading.Timer(ROUND_S_MAX, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise RuntimeError("a process of the benchmark has ended, or took too long")
        return float(line)

    def rest(self) -> float:
        self.begin(0)
        return self.end()


@contextmanager
def running(arguments: Sequence[Sequence[str]]) -> Iterator[list[Process]]:
    """Start a process for each of these, with its conversations open; stop them at the end."""
    with ExitStack() as stack:
        processes = []
        for number, where in enumerate(arguments):
            program = str(FOLDER / "_cores_process.py")
            command = [sys.executable, program, f"process {number}:", str(CONVERSATIONS), *where]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            processes.append(process)
        yield [Process(process) for process in processes]


def run(*, quick: bool) -> Iterator[Measure]:
    rounds = 5 if quick else 9
    with tempfile.TemporaryDirectory() as folder:
        say("cores: files of their own")
        files = [("file", str(Path(folder) / f"{number}.db")) for number in range(2)]
        with running(files) as processes:
            yield from _measures("files", processes, rounds, lambda: 0.0)
    say("cores: one PostgreSQL")
    try:
        with (
            server() as conninfo,
            schema(conninfo) as name,
            psycopg.connect(conninfo, autocommit=True) as connection,
            running([("postgres", conninfo, name)] * 2) as processes,
        ):
            counted = Server(connection)
            yield from _measures("postgres", processes, rounds, lambda: counted.cpu_s)
    except PeerMissing as missing:
        yield skipped("cores_postgres", "one process", "", str(missing))


def _measures(
    name: str, processes: list[Process], rounds: int, server_s: Callable[[], float]
) -> list[Measure]:
    one, two = [], []
    for _ in range(rounds + 1):
        one.append(_work(processes[:1], processes, server_s))
        two.append(_work(processes, processes, server_s))
    pairs = list(zip(two[1:], one[1:], strict=True))
    say(f"cores: one process uses {pairs[0][1].cores:.2f} cores, two use {pairs[0][0].cores:.2f}")
    return [
        costlier(
            f"cores_{name}_cpu",
            [(both.processor, alone.processor) for both, alone in pairs],
            baseline="one process",
            goal="≤ 1.1",
        ),
        faster(
            f"cores_{name}",
            [(both.clock, alone.clock / allowed(alone.cores)) for both, alone in pairs],
            baseline="one process, by what the cores allow",
            goal="≥ 0.9",
        ),
    ]


def allowed(cores: float) -> float:
    """Return how many times as much two processes can do as one that uses this many cores."""
    return min(2.0, (os.cpu_count() or 1) / max(1.0, cores))


def _work(working: list[Process], everyone: list[Process], server_s: Callable[[], float]) -> Worked:
    """Let these processes work while the others are idle; return the time of an event."""
    events = CONVERSATIONS * EACH * len(working)
    before = sum(process.rest() for process in everyone) + server_s()
    began = perf_counter()
    for process in working:
        process.begin(EACH)
    for process in working:
        process.end()
    clock = perf_counter() - began
    spent = sum(process.rest() for process in everyone) + server_s() - before
    return Worked(clock / events * US, spent / events * US, spent / clock)
