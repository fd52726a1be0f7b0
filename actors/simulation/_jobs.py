"""One campaign in several processes: each runs a block of the seeds, as a separate campaign.

The search derives its branches from earlier runs, so each block has its own search: the results for
given seeds are the same each time with the same number of jobs, but differ with another number. The
processes are forked, and only simulate.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

__all__ = ["Block", "blocks", "run_blocks", "trace_of", "usable_jobs"]

C = TypeVar("C")

Block: TypeAlias = tuple[int, int | None]
"""A first seed, and how many; None if time alone ends it."""

_ENDLESS = 1_000_000
"""The distance between the blocks' first seeds in a campaign that only time ends."""
_JOIN_S = 10.0


def usable_jobs(jobs: int) -> int:
    """Return `jobs`, or 1 if this process cannot be forked: not allowed, or other threads run."""
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    return jobs if can_fork and threading.active_count() == 1 else 1


def blocks(first_seed: int, seeds: int | None, jobs: int) -> Sequence[Block]:
    """Deal the seeds out: to each job one block, one after the other, none of them empty."""
    if seeds is None:
        return [(first_seed + job * _ENDLESS, None) for job in range(jobs)]
    ends = [seeds * (job + 1) // jobs for job in range(jobs)]
    starts = [0, *ends[:-1]]
    return [
        (first_seed + start, end - start)
        for start, end in zip(starts, ends, strict=True)
        if end > start
    ]


def run_blocks(
    found: Sequence[Block],
    run: Callable[[Block, Callable[[C], None]], None],
    *,
    is_over: Callable[[Sequence[C]], bool],
) -> Generator[Sequence[C], None, None]:
    """Run each block in a process; yield the newest report of each that has made one.

    `run` reports its results so far again and again, and at its end. All processes end when
    `is_over` returns True for the reports.
    """
    context = multiprocessing.get_context("fork")
    processes: list[ForkProcess] = []
    open_ends: list[Connection] = []
    newest: dict[int, C] = {}
    try:
        for block in found:
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve, args=(there, [*open_ends, here], run, block), daemon=True
            )
            process.start()
            there.close()
            processes.append(process)
            open_ends.append(here)
        places = {id(end): place for place, end in enumerate(open_ends)}
        running = list(open_ends)
        while running and not is_over(_in_order(newest)):
            for end in wait(running):
                assert isinstance(end, Connection), f"{end} is no pipe"
                try:
                    newest[places[id(end)]] = end.recv()
                except EOFError:
                    running.remove(end)
                    _check_ended(processes[places[id(end)]])
            yield _in_order(newest)
    finally:
        for process in processes:  # all, before a second Ctrl-C can end the waiting below
            process.kill()
        for process in processes:
            process.join(_JOIN_S)
            process.close()
        for end in open_ends:
            end.close()


def _in_order(newest: dict[int, C]) -> Sequence[C]:
    return [newest[place] for place in sorted(newest)]


def _check_ended(process: ForkProcess) -> None:
    process.join(_JOIN_S)
    if process.exitcode != 0:
        raise RuntimeError("a process of the campaign died, with its seeds")


def _serve(
    there: Connection,
    others: Sequence[Connection],
    run: Callable[[Block, Callable[[C], None]], None],
    block: Block,
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent ends the campaign
    for other in others:  # a fork has the parent's ends, too, and would keep them open
        other.close()

    def report(results: C) -> None:
        try:
            there.send(results)
        except BrokenPipeError:  # the parent was killed, and no one waits for the reports
            raise SystemExit from None

    run(block, report)


def trace_of(traces: Sequence[str]) -> str:
    """Return one trace for several."""
    return hashlib.blake2b("".join(traces).encode(), digest_size=8).hexdigest()
