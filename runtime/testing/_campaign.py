"""Campaigns: many seeds of one world, over several processes, up to the first that fails.

1. Owns the search: which seeds are run, when it stops, and the tape of the failure.
2. A campaign that `seeds` bounds finds the same failure with any number of processes: the one with
   the lowest seed. One passing seed in twenty is played again from its tape, and must leave the
   same trace.
3. A campaign that `seconds` bounds runs as many seeds as the machine can.
4. The processes are forked, so the world may be any function. They do nothing but simulate. The
   failing seed is run again in the calling process, and made smaller there.
5. The tape is on the disk before the campaign returns.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

from .._supervision import check_kind, check_number, check_seconds, check_whole
from ..ports import Ports
from ._simulate import SHRINK_RUNS_MAX, STEPS_MAX, World, shrink, simulate
from ._simulation import POLICIES, Backend, Broken, Policy, Run
from ._tape import Tape

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

__all__ = ["Campaign", "TapeFile", "run_campaign"]

_CHUNK = 4
"""How many seeds a process runs before it reports."""
_CHECKED_EVERY = 20
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class TapeFile:
    """A tape, and the settings that it takes to play it again."""

    seed: int
    backend: Backend
    policy: Policy
    native_cancels: bool
    tape: Tape

    @staticmethod
    def of(run: Run) -> TapeFile:
        """Return the tape of a run."""
        return TapeFile(run.seed, run.backend, run.policy, run.native_cancels, run.tape)

    def write(self, path: Path) -> None:
        """Write it as JSON, over a file that may be there; make its folder if need be."""
        record = {
            "seed": self.seed,
            "backend": self.backend,
            "policy": self.policy,
            "native_cancels": self.native_cancels,
            "tape": json.loads(self.tape.to_json()),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        # Two runs of the tests may write the same tape at once: each writes a file of its own.
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            new.write_text(json.dumps(record) + "\n", encoding="utf-8")
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    @staticmethod
    def read(path: Path) -> TapeFile:
        """Return the tape in a file; raise `ValueError` if there is none in it."""
        try:
            return TapeFile._of_record(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} holds no tape of a run: {error}") from error

    @staticmethod
    def _of_record(record: object) -> TapeFile:
        if not (
            isinstance(record, dict)
            and isinstance(record.get("seed"), int)
            and record.get("backend") in get_args(Backend)
            and record.get("policy") in POLICIES
            and isinstance(record.get("native_cancels"), bool)
        ):
            raise ValueError("its seed, backend, policy or native_cancels is missing or wrong")
        return TapeFile(
            record["seed"],
            record["backend"],
            record["policy"],
            record["native_cancels"],
            Tape.from_json(json.dumps(record.get("tape"))),
        )

    def play(self, world: World, *, steps_max: int = STEPS_MAX) -> Run:
        """Run the world with the decisions of this tape."""
        return simulate(
            world,
            seed=self.seed,
            backend=self.backend,
            policy=self.policy,
            tape=self.tape,
            native_cancels=self.native_cancels,
            steps_max=steps_max,
        )


@dataclass(frozen=True, slots=True)
class Campaign:
    """The result of a campaign."""

    runs: int
    steps: int
    seconds: float
    """Real seconds, without those of making the failure smaller."""
    processes: int
    marks: Counter[str] = field(default_factory=Counter)
    failure: Run | None = None
    """The first failure, made smaller, with its story."""
    tape: Path | None = None
    """The file with its tape, if one was asked for."""
    unreached: Sequence[str] = ()
    """The marks that had to be reached and were not."""

    @property
    def ok(self) -> bool:
        """True if no run failed, and every mark was reached that had to be."""
        return self.failure is None and not self.unreached

    def check(self) -> None:
        """Raise `AssertionError`, with everything that is known, unless the campaign is `ok`."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        head = f"{runs}, {self.steps} steps, {self.seconds:.1f} s"
        if self.failure is not None:
            played = "" if self.tape is None else f"\ntape: {self.tape}"
            return f"{head}: a run failed{played}\n{self.failure}"
        if self.unreached:
            return f"{head}: never reached: {', '.join(self.unreached)}"
        return f"{head}: all invariants held"


class _Settings(NamedTuple):
    backend: Backend
    native_cancels: bool
    steps_max: int


class _Report(NamedTuple):
    """The report of a process on one chunk."""

    runs: int
    steps: int
    marks: Counter[str]
    failed: int | None
    """The seed that failed, if one did."""


def run_campaign(
    world: World,
    *,
    seeds: int | None = None,
    seconds: float | None = None,
    first_seed: int = 0,
    processes: int = 1,
    backend: Backend = "trio",
    native_cancels: bool = False,
    steps_max: int = STEPS_MAX,
    shrink_runs_max: int = SHRINK_RUNS_MAX,
    tape: Path | None = None,
    must_reach: Collection[str] = (),
    ports: Ports | None = None,
) -> Campaign:
    """Run seeds from `first_seed` on until one fails, or the budget is used up.

    The budget is a number of `seeds`, of real `seconds`, or both, whichever ends first; raises
    `ValueError` without either, and for a number that makes no sense. The first failure is made
    smaller, in `shrink_runs_max` runs at most, and its tape is written to the file `tape`; if it
    cannot be written, the `OSError` has the failure as a note. `must_reach` names the marks that
    some run has to reach. With more than one of `processes`, the runs happen in forked ones; if a
    process cannot be forked here, or other threads are running, this one does it all. `backend`,
    `native_cancels` and `steps_max` are as for `simulate`.
    """
    if seeds is None and seconds is None:
        raise ValueError("a campaign needs a budget: seeds, seconds or both")
    # Without a run, a campaign would be a test that always passes.
    if seeds is not None:
        check_whole("seeds", seeds)
    if seconds is not None:
        check_seconds("seconds", seconds)
    check_number("first_seed", first_seed, "a whole number", least=-math.inf, is_whole=True)
    check_whole("processes", processes)
    check_kind("native_cancels", native_cancels, bool)
    check_whole("steps_max", steps_max)
    check_whole("shrink_runs_max", shrink_runs_max, least=0)
    settings = _Settings(backend, native_cancels, steps_max)
    if processes > 1 and not _can_fork():
        processes = 1
    now = (ports or Ports()).monotonic
    began = now()
    runs = steps = 0
    marks: Counter[str] = Counter()
    failed: int | None = None
    chunks = _chunks(first_seed, seeds)
    workers = _Workers(world, settings, processes) if processes > 1 else _Here(world, settings)
    with closing(workers):
        while True:
            while (
                failed is None
                and workers.has_idle
                and (seconds is None or now() - began < seconds)
                and (chunk := next(chunks, None)) is not None
            ):
                workers.give(chunk)
            if not workers.is_busy:
                break
            for report in workers.wait():
                runs += report.runs
                steps += report.steps
                marks += report.marks
                if report.failed is not None:
                    failed = report.failed if failed is None else min(failed, report.failed)
    elapsed_s = now() - began
    failure = None
    if failed is not None:
        failure = _smallest(world, settings, failed, shrink_runs_max)
        if tape is not None:
            try:
                TapeFile.of(failure).write(tape)
            except OSError as error:
                error.add_note(f"the tape {tape} could not be written, of this run:\n{failure}")
                raise
    return Campaign(
        runs=runs,
        steps=steps,
        seconds=elapsed_s,
        processes=processes,
        marks=marks,
        failure=failure,
        tape=tape if failure is not None else None,
        unreached=() if failure is not None else sorted(set(must_reach) - marks.keys()),
    )


def _chunks(first_seed: int, seeds: int | None) -> Iterator[range]:
    """Yield the seeds in their order, a few at a time; without end if there is none."""
    if seeds is None:
        for start in itertools.count(first_seed, _CHUNK):
            yield range(start, start + _CHUNK)
    else:
        end = first_seed + seeds
        for start in range(first_seed, end, _CHUNK):
            yield range(start, min(start + _CHUNK, end))


def _run_chunk(world: World, settings: _Settings, chunk: range) -> _Report:
    runs = steps = 0
    marks: Counter[str] = Counter()
    failed = None
    for seed in chunk:
        run = _run(world, settings, seed)
        runs += 1
        steps += run.steps
        marks.update(run.marks)
        if not run.ok or (seed % _CHECKED_EVERY == 0 and not _repeats(world, settings, run)):
            failed = seed
            break
    return _Report(runs, steps, marks, failed)


def _run(world: World, settings: _Settings, seed: int) -> Run:
    return simulate(
        world,
        seed=seed,
        backend=settings.backend,
        native_cancels=settings.native_cancels,
        steps_max=settings.steps_max,
        is_told=False,
    )


def _repeats(world: World, settings: _Settings, run: Run) -> bool:
    """Return True if the run leaves the same trace when its tape is played."""
    again = simulate(
        world,
        seed=run.seed,
        backend=settings.backend,
        policy=run.policy,
        tape=run.tape,
        native_cancels=settings.native_cancels,
        steps_max=settings.steps_max,
        is_told=False,
    )
    return again.trace == run.trace


def _smallest(world: World, settings: _Settings, seed: int, runs_max: int) -> Run:
    """Run a failing seed again, here, and make it smaller."""
    run = _run(world, settings, seed)
    if not run.ok:
        return shrink(world, run, steps_max=settings.steps_max, runs_max=runs_max)
    detail = (
        f"seed {seed} does not repeat: something in this world is not decided by the tape, such as "
        "a real clock, a thread, or state that outlives the run"
    )
    return replace(run, broken=Broken("trace", detail, run.steps, run.seconds))


# --- processes -----------------------------------------------------------------------------------


def _can_fork() -> bool:
    """Return True if processes can be forked here, with no thread that could hold a lock."""
    return "fork" in multiprocessing.get_all_start_methods() and threading.active_count() == 1


class _Here:
    """This process, as the only one that runs chunks."""

    def __init__(self, world: World, settings: _Settings) -> None:
        self._world = world
        self._settings = settings
        self._chunk: range | None = None

    @property
    def has_idle(self) -> bool:
        return self._chunk is None

    @property
    def is_busy(self) -> bool:
        return self._chunk is not None

    def give(self, chunk: range) -> None:
        self._chunk = chunk

    def wait(self) -> Iterator[_Report]:
        chunk, self._chunk = self._chunk, None
        assert chunk is not None, "a chunk is given before it is waited for"
        yield _run_chunk(self._world, self._settings, chunk)

    def close(self) -> None:
        """Return: there is nothing to end."""


class _Workers:
    """Forked processes, each of which runs one chunk at a time."""

    def __init__(self, world: World, settings: _Settings, count: int) -> None:
        context = multiprocessing.get_context("fork")
        self._idle: list[Connection] = []
        self._busy: list[Connection] = []
        self._processes: list[ForkProcess] = []
        for _ in range(count):
            here, there = context.Pipe()
            not_its_own = [*self._idle, here]
            process = context.Process(
                target=_serve, args=(there, not_its_own, world, settings), daemon=True
            )
            process.start()
            there.close()
            self._idle.append(here)
            self._processes.append(process)

    @property
    def has_idle(self) -> bool:
        """True if a process waits for a chunk."""
        return bool(self._idle)

    @property
    def is_busy(self) -> bool:
        """True if a process runs a chunk."""
        return bool(self._busy)

    def give(self, chunk: range) -> None:
        """Have an idle process run a chunk."""
        connection = self._idle.pop()
        connection.send(chunk)
        self._busy.append(connection)

    def wait(self) -> Iterator[_Report]:
        """Wait until a chunk is done; yield the reports that have come."""
        for connection in wait(self._busy):
            assert isinstance(connection, Connection), f"{connection} is no pipe"
            try:
                report: _Report = connection.recv()
            except EOFError as error:
                raise RuntimeError("a process of the campaign died, with its seeds") from error
            self._busy.remove(connection)
            self._idle.append(connection)
            yield report

    def close(self) -> None:
        """End the processes: at once, if the campaign was interrupted."""
        is_interrupted = self.is_busy
        for connection in (*self._idle, *self._busy):
            connection.close()
        for process in self._processes:
            if is_interrupted:
                process.kill()
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _serve(
    connection: Connection, others: Sequence[Connection], world: World, settings: _Settings
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the campaign
    for other in others:  # a fork has the parent's ends, too, and would keep them open
        other.close()
    while True:
        try:
            chunk: range = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        report = _run_chunk(world, settings, chunk)
        try:
            connection.send(report)
        except BrokenPipeError:
            return  # the parent was killed
