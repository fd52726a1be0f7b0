"""The search itself: fresh seeds, all invariants, every interesting place reached."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.context import ForkProcess

import pytest

from turnkeeper.actors.simulation import (
    INVARIANTS,
    MARKS,
    Campaign,
    ConversationWorld,
    Options,
    TapeFile,
    replay,
    run_campaign,
    silent_logs,
)
from turnkeeper.actors.simulation._jobs import Block, _serve, blocks, run_blocks
from turnkeeper.actors.simulation._search import Search
from turnkeeper.actors.simulation._world import opening
from turnkeeper.runtime.testing import Tape, simulate

from ..drawn import first_seed, is_whole
from .corpus import CORPUS, Kept
from .mutants import MUTANTS, planted

FRESH_SEEDS_MIN = 300 if is_whole() else 100
FRESH_S = 60.0
"""So much longer in a whole sweep."""
MARKED_SEEDS_MAX = 1_000
"""Every interesting place is reached within so many fresh seeds; most within a third of them."""


@pytest.mark.sweep
def test_fresh_seeds_break_no_invariant_and_reach_every_interesting_place() -> None:
    """The usual run leaves the interesting places to the whole one, which plays more seeds."""
    first = first_seed()
    campaign = run_campaign(first, seeds=FRESH_SEEDS_MIN)

    assert not campaign.failures, "\n".join(map(str, campaign.failures))
    assert campaign.seeds == FRESH_SEEDS_MIN
    assert campaign.checked >= FRESH_SEEDS_MIN // 25
    if not is_whole():
        return
    missing, seeds = set(campaign.missing_marks), FRESH_SEEDS_MIN
    while missing and seeds < MARKED_SEEDS_MAX:
        further = run_campaign(first + seeds, seeds=100)
        assert not further.failures, "\n".join(map(str, further.failures))
        missing &= set(further.missing_marks)
        seeds += 100
    assert not missing, f"not reached within {seeds} seeds"

    more = run_campaign(first + seeds, seconds=FRESH_S)
    assert not more.failures, "\n".join(map(str, more.failures))


@pytest.mark.sweep
def test_fresh_seeds_break_no_invariant_on_asyncio() -> None:
    """A run in seven had a task listed as left behind that had ended."""
    first = first_seed()

    with silent_logs():
        for seed in range(first, first + FRESH_SEEDS_MIN):
            simulate(ConversationWorld(), seed=seed, backend="asyncio").check()


@pytest.mark.parametrize("kept", CORPUS, ids=lambda kept: kept.name)
def test_what_was_found_once_is_not_found_again(kept: Kept) -> None:
    tape = TapeFile.from_json(kept.path.read_text())

    replay(tape).check()

    with planted(kept.mutant):
        again = replay(tape)
    found = None if again.broken is None else again.broken.invariant
    assert found == kept.invariant, (
        f"with {kept.fault!r} planted, its tape must break {kept.invariant}, and breaks {found}: "
        "it proves nothing any more; record it anew with python -m tests.simulation.corpus"
    )


def test_a_reader_is_not_late_while_the_only_node_is_drained_and_replaced() -> None:
    """Fresh seed 995815799 of an earlier commit, policy "batch", broke P1 this way."""
    options = Options(clients=1, messages=1, overlaps=("queue",), drains=True, subscribers=3)
    slow = {
        "grace": [1],
        "stands drained": [2],
        "operator waits": [1],
        "operator waits for": [99],
        "end not asked for": [1],
    }

    with silent_logs():
        for seed in range(12, 16):
            tape = Tape(f"x{seed}", branches_from={"next drain": [seed % 4, 49], **slow})
            simulate(ConversationWorld(options), policy="random", tape=tape).check()


def test_every_tape_of_the_corpus_is_played() -> None:
    folder = CORPUS[0].path.parent

    assert {kept.path for kept in CORPUS} == set(folder.iterdir())


@pytest.mark.parametrize("first", [0, 7, 1_000_003])
def test_a_campaign_begins_with_small_worlds_and_leaves_out_no_seed(first: int) -> None:
    search = Search(first, opening=opening, seeds=60)

    seeds = [search.next_plan().seed for _ in range(60)]

    small = opening(range(first, first + 48))
    assert len(small) == 20
    assert seeds[:20] == list(small)
    assert sorted(seeds) == list(range(first, first + 60))
    worlds = {seed: ConversationWorld() for seed in small}
    with silent_logs():
        for seed, world in worlds.items():
            simulate(world, seed=seed).check()
    assert not any(world.journal_calls for world in worlds.values()), "it is a run between nodes"


def test_the_same_seed_gives_the_same_run_in_another_process_with_other_hashes() -> None:
    code = (
        "from turnkeeper.actors.simulation import run_campaign\n"
        "campaign = run_campaign(7_000, seeds=8)\n"
        "print(campaign.steps, campaign.trace)"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(traces) == 1
    here = run_campaign(7_000, seeds=8)
    assert traces == {f"{here.steps} {here.trace}\n"}


def test_a_run_and_its_tape_leave_the_same_trace() -> None:
    with silent_logs():
        for seed in range(8_000, 8_010):
            run = simulate(ConversationWorld(), seed=seed)
            again = simulate(ConversationWorld(), tape=TapeFile.of(run).tape)

            assert again.trace == run.trace
            assert again.marks == run.marks


def test_a_long_campaign_that_misses_an_interesting_place_is_not_ok() -> None:
    campaign = Campaign(0, seeds=10_000)
    campaign.marks.update(MARKS)
    assert campaign.ok

    del campaign.marks["takeover"]

    assert campaign.missing_marks == ["takeover"]
    assert not campaign.ok


def test_each_invariant_has_a_sentence_of_its_own() -> None:
    assert len(set(INVARIANTS.values())) == len(INVARIANTS)


@pytest.mark.alone
def test_the_seeds_of_several_jobs_are_the_campaigns_of_their_blocks() -> None:
    together = run_campaign(9_000, seeds=9, jobs=2)

    apart = [run_campaign(9_000, seeds=4), run_campaign(9_004, seeds=5)]
    assert together.seeds == 9
    assert together.steps == sum(each.steps for each in apart)
    assert together.marks == apart[0].marks + apart[1].marks
    assert together.trace == run_campaign(9_000, seeds=9, jobs=2).trace
    assert together.ok


@pytest.mark.alone
def test_the_first_failure_of_any_job_ends_them_all() -> None:
    (fault,) = (each for each in MUTANTS if each.name == "an answer goes out before the commit")
    with planted(fault):
        campaign = run_campaign(0, seeds=1_000_000, jobs=2, failures_max=1, shrinks=False)

    (failure,) = campaign.failures
    assert failure.broken is not None
    assert failure.broken.invariant in ("C1", "L7")
    assert campaign.seeds < 1_000
    with planted(fault):
        assert str(replay(TapeFile.of(failure)).broken) == str(failure.broken)


@pytest.mark.alone
def test_a_second_ctrl_c_leaves_no_process_of_a_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wrote a traceback into the terminal, once it had found the pipe to its parent broken."""
    kill = ForkProcess.kill
    killed: list[ForkProcess] = []

    def note(process: ForkProcess) -> None:
        killed.append(process)
        kill(process)

    def interrupt(process: ForkProcess, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    def run(_: Block, report: Callable[[str], None]) -> None:
        report("begun")
        threading.Event().wait()

    running = run_blocks([(0, 1), (1, 1)], run, is_over=lambda _: False)
    next(running)
    with monkeypatch.context() as patched:
        patched.setattr(ForkProcess, "kill", note)
        patched.setattr(ForkProcess, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            running.close()

    for child in multiprocessing.active_children():
        child.kill()  # so that this ends if it fails
        child.join()
    assert len(killed) == 2


@pytest.mark.alone
def test_a_job_whose_parent_was_killed_ends_without_a_traceback() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run(_: Block, report: Callable[[str], None]) -> None:
        report("no one waits for this")

    job = context.Process(target=_serve, args=(there, [here], run, (0, 1)))
    here.close()
    job.start()
    job.join()
    assert job.exitcode == 0


@pytest.mark.alone
def test_a_broken_pipe_of_a_world_is_not_the_end_of_its_block() -> None:
    """It was taken for the loss of the parent: the seeds were left out, and the campaign passed."""

    def run(_: Block, report: Callable[[str], None]) -> None:
        report("begun")
        raise BrokenPipeError

    with pytest.raises(RuntimeError, match="died, with its seeds"):
        list(run_blocks([(0, 1), (1, 1)], run, is_over=lambda _: False))


@pytest.mark.parametrize(("seeds", "jobs"), [(10, 3), (2, 5), (1, 1), (None, 3)])
def test_each_seed_is_dealt_to_one_job(seeds: int | None, jobs: int) -> None:
    dealt = blocks(7, seeds, jobs)

    assert len(dealt) == (jobs if seeds is None else min(jobs, seeds))
    starts = [first for first, _ in dealt]
    assert starts == sorted(set(starts))
    assert starts[0] == 7
    if seeds is not None:
        assert [seed for first, count in dealt for seed in range(first, first + (count or 0))] == [
            *range(7, 7 + seeds)
        ]
