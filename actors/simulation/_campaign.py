"""Campaigns: many seeds of the conversation world, one after the other, and their results."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from turnkeeper.runtime import Ports
from turnkeeper.runtime.testing import Policy, Run, Tape, shrink, simulate

from ._jobs import Block, blocks, run_blocks, trace_of, usable_jobs
from ._search import Search
from ._world import MARKS, ConversationWorld, opening

__all__ = [
    "MARKS_SEEDS_MIN",
    "Campaign",
    "TapeFile",
    "replay",
    "run_campaign",
    "silent_logs",
]

MARKS_SEEDS_MIN = 1_000
"""A campaign of this many seeds must have reached every mark; a shorter one need not."""
SHRINK_RUNS_MAX = 200
_CHECKED_EVERY = 20
"""One in this many seeds is run again from its tape, and must leave the same trace."""
_COLLECTED_EVERY = 2
"""Garbage is collected once in this many runs."""
_REPORTED_EVERY_S = 0.25
_STEPS_MAX = 8_000
_NOTES_OF_A_REPLAY = 100_000


@dataclass(slots=True)
class Campaign:
    """The result of a campaign so far."""

    first_seed: int
    seeds: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    checked: int = 0
    """How many seeds were run a second time, from their tapes."""
    marks: Counter[str] = field(default_factory=Counter)
    failures: list[Run] = field(default_factory=list)
    """The first few runs in which an invariant was broken, shrunk."""
    failed: int = 0
    """How many seeds failed in all."""
    trace: str = ""
    """A digest of the runs: the same for the same seeds, in any process."""
    elapsed_s: float = 0.0
    places: int = 0
    """How many different places the runs of one process have reached; see `_search.py`."""

    @property
    def missing_marks(self) -> Sequence[str]:
        """The places that no run has reached."""
        return sorted(MARKS - self.marks.keys())

    @property
    def misses_marks(self) -> bool:
        """True if the campaign is long enough to have reached every mark, and has not."""
        return self.seeds >= MARKS_SEEDS_MIN and bool(self.missing_marks)

    @property
    def ok(self) -> bool:
        """True if no invariant was broken, and every mark reached if the campaign is long."""
        return not self.failed and not self.misses_marks


@dataclass(frozen=True, slots=True)
class TapeFile:
    """A tape with everything needed to replay it."""

    seed: int
    policy: Policy
    tape: Tape

    @staticmethod
    def of(run: Run) -> TapeFile:
        return TapeFile(run.seed, run.policy, run.tape)

    def to_json(self) -> str:
        record = {"seed": self.seed, "policy": self.policy, "tape": json.loads(self.tape.to_json())}
        return json.dumps(record)

    @staticmethod
    def from_json(text: str) -> TapeFile:
        """Return the tape file of this text; raise `ValueError` if it is not one."""
        record = json.loads(text)
        if not isinstance(record, dict) or not isinstance(record.get("seed"), int):
            raise ValueError(  # noqa: TRY004 - the text is at fault
                "a tape file is a JSON object with a seed, a policy and a tape"
            )
        tape = Tape.from_json(json.dumps(record.get("tape")))
        return TapeFile(record["seed"], record.get("policy", "random"), tape)


def run_campaign(
    first_seed: int,
    *,
    seeds: int | None = None,
    seconds: float | None = None,
    policy: Policy | None = None,
    failures_max: int = 3,
    shrinks: bool = True,
    aims: bool = True,
    world: Callable[[], ConversationWorld] = ConversationWorld,
    on_progress: Callable[[Campaign], None] = lambda _: None,
    ports: Ports | None = None,
    jobs: int = 1,
) -> Campaign:
    """Run `seeds` seeds from `first_seed` on, or until the time is up.

    It goes on after a failure, and stops after `failures_max` failures. If `jobs` is above 1,
    forked processes share the seeds, with a block for each; without a number of seeds, the blocks
    begin a million apart. If this process cannot be forked, or has other threads, it runs all seeds
    itself.
    """

    def run(block: Block, report: Callable[[Campaign], None]) -> Campaign:
        return _run_block(
            *block,
            seconds=seconds,
            policy=policy,
            failures_max=failures_max,
            shrinks=shrinks,
            aims=aims,
            world=world,
            on_progress=report,
            now=(ports or Ports()).monotonic,
        )

    dealt = blocks(first_seed, seeds, usable_jobs(jobs))
    if len(dealt) <= 1:
        return run((first_seed, seeds), on_progress)

    def run_apart(block: Block, send: Callable[[Campaign], None]) -> None:
        told = 0.0

        def report(campaign: Campaign) -> None:
            nonlocal told
            if campaign.elapsed_s >= told:
                told = campaign.elapsed_s + _REPORTED_EVERY_S
                send(campaign)

        send(run(block, report))

    campaign = Campaign(first_seed)
    for parts in run_blocks(
        dealt, run_apart, is_over=lambda parts: _failures_of(parts) >= failures_max
    ):
        campaign = _merged(first_seed, parts, failures_max)
        on_progress(campaign)
    return campaign


def _failures_of(parts: Sequence[Campaign]) -> int:
    return sum(len(part.failures) for part in parts)


def _merged(first_seed: int, parts: Sequence[Campaign], failures_max: int) -> Campaign:
    """Return the results of several campaigns as one."""
    failures = sorted((run for part in parts for run in part.failures), key=lambda run: run.seed)
    return Campaign(
        first_seed,
        seeds=sum(part.seeds for part in parts),
        steps=sum(part.steps for part in parts),
        virtual_s=sum(part.virtual_s for part in parts),
        checked=sum(part.checked for part in parts),
        marks=sum((part.marks for part in parts), Counter()),
        failures=failures[:failures_max],
        failed=sum(part.failed for part in parts),
        trace=trace_of([part.trace for part in parts]),
        elapsed_s=max((part.elapsed_s for part in parts), default=0.0),
        places=max((part.places for part in parts), default=0),
    )


def _run_block(
    first_seed: int,
    seeds: int | None,
    *,
    seconds: float | None,
    policy: Policy | None,
    failures_max: int,
    shrinks: bool,
    aims: bool,
    world: Callable[[], ConversationWorld],
    on_progress: Callable[[Campaign], None],
    now: Callable[[], float],
) -> Campaign:
    began = now()
    campaign = Campaign(first_seed)
    search = Search(first_seed, policy, aims, opening, seeds)
    trace = hashlib.blake2b(digest_size=8)
    with silent_logs(), _garbage_kept():
        while (seeds is None or campaign.seeds < seeds) and (
            seconds is None or campaign.elapsed_s < seconds
        ):
            plan = search.next_plan()
            made = world()
            run = simulate(
                made,
                seed=plan.seed,
                policy=plan.policy,
                tape=plan.tape,
                steps_max=_STEPS_MAX,
                is_told=False,
            )
            search.learn(run, made.places)
            campaign.seeds += 1
            if campaign.seeds % _COLLECTED_EVERY == 0:
                gc.collect()
                gc.freeze()  # the collector need not examine what the search keeps
            campaign.steps += run.steps
            campaign.virtual_s += run.seconds
            campaign.marks.update(run.marks)
            trace.update(run.trace.encode())
            campaign.trace = trace.hexdigest()
            if run.broken is not None:
                campaign.failed += 1
                if len(campaign.failures) < failures_max:
                    campaign.failures.append(_shrunk(world, run) if shrinks else run)
            elif campaign.seeds % _CHECKED_EVERY == 0:
                campaign.checked += 1
                again = simulate(
                    world(), seed=run.seed, policy=run.policy, tape=run.tape, steps_max=_STEPS_MAX
                )
                if again.trace != run.trace:
                    campaign.failed += 1
                    campaign.failures.append(again)
            campaign.places = len(search.places)
            campaign.elapsed_s = now() - began
            on_progress(campaign)
            if len(campaign.failures) >= failures_max:
                break
    return campaign


def _shrunk(world: Callable[[], ConversationWorld], run: Run) -> Run:
    return shrink(world(), run, steps_max=_STEPS_MAX, runs_max=SHRINK_RUNS_MAX)


def replay(file: TapeFile) -> Run:
    """Replay a tape, and keep every note of the run."""
    with silent_logs():
        return simulate(
            ConversationWorld(),
            seed=file.seed,
            policy=file.policy,
            tape=file.tape,
            steps_max=_STEPS_MAX,
            notes_max=_NOTES_OF_A_REPLAY,
        )


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Collect garbage only on request, and never examine the objects that existed before.

    A collection would examine every object of the program, which takes as long as a run or two: so
    there is none before the first run, either.
    """
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def silent_logs() -> Iterator[None]:
    """Emit no log lines: in a simulated world, warnings are the plan."""
    before = structlog.get_config()
    library = logging.getLogger("turnkeeper")
    level = library.level
    library.setLevel(logging.CRITICAL + 1)  # before a traceback is put together
    structlog.configure(
        processors=[_drop], cache_logger_on_first_use=False,
    )  # fmt: skip
    try:
        yield
    finally:
        structlog.configure(**before)
        library.setLevel(level)


def _drop(_: object, __: str, ___: structlog.types.EventDict) -> structlog.types.EventDict:
    raise structlog.DropEvent
