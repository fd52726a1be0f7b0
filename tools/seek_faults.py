"""Measures the search: the CPU time to the first detection of each planted fault.

    make seek                                    all of them; writes the table of docs/simulation.md
    .venv/bin/python tools/seek_faults.py --budget 5 --only lease

Each fault is planted alone, in a process of its own, and sought from a few first seeds. A fault
that is not found within the budget counts as the budget. CPU time and not time: other programs
make the machine slow, and the table should say something of the search.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.simulation.mutants import MUTANTS, PROMISES, planted
from turnkeeper.actors.simulation import MARKS, ConversationWorld, Options, run_campaign
from turnkeeper.runtime import Ports

PAGE = Path(__file__).parents[1] / "docs/simulation.md"
ALL = (*MUTANTS, *PROMISES)
HEAD = "| planted fault | breaks | CPU s | test |\n|---|---|---|---|\n"
FIRST_SEED = 1_000_003
"""Its multiples begin at different places of the round of profiles."""
SPEED_RUNS = 300
WARM_UP_RUNS = 12
MARKS_RUNS = 1_000
_CPU = Ports(monotonic=process_time)


class Hunt(NamedTuple):
    """One search for one fault."""

    cpu_s: float
    runs: int
    found_as: str | None


def hunt(first_seed: int, budget_s: float, options: Options | None) -> Hunt:
    """Seek a fault that is planted here and now, in runs with these options or in drawn ones."""
    campaign = run_campaign(
        first_seed,
        seconds=budget_s,
        failures_max=1,
        shrinks=False,
        world=partial(ConversationWorld, options),
        ports=_CPU,
    )
    if not campaign.failures:
        return Hunt(budget_s, campaign.seeds, None)
    broken = campaign.failures[0].broken
    return Hunt(campaign.elapsed_s, campaign.seeds, broken.invariant if broken else "trace")


def hunts(place: int, budget_s: float, starts: int) -> list[Hunt]:
    """Seek a fault from each first seed; no more once it is not found. Runs in a process of it."""
    # A fork copies each page of memory at its first use, which takes as long as several runs.
    run_campaign(0, seeds=WARM_UP_RUNS)
    done: list[Hunt] = []
    with planted(ALL[place]):
        for start in range(starts):
            done.append(hunt(FIRST_SEED * (1 + start), budget_s, ALL[place].options))
            if done[-1].found_as is None:
                break
    return done


def detection_s(found: Sequence[Hunt], budget_s: float) -> float:
    """Return the mean over the first seeds; one that did not find it makes it the budget."""
    if not found or any(each.found_as is None for each in found):
        return budget_s
    return statistics.fmean(each.cpu_s for each in found)


def table(figures: Mapping[str, Sequence[Hunt]]) -> str:
    """Return the planted faults, with what finds each."""
    return HEAD + "".join(f"{row}\n" for row in _rows(figures))


def _rows(figures: Mapping[str, Sequence[Hunt]]) -> Iterator[str]:
    for mutant in ALL:
        found = [each for each in figures[mutant.name] if each.found_as is not None]
        broken = ", ".join(f"`{name}`" for name in sorted({str(h.found_as) for h in found}))
        cpu_s = f"{statistics.fmean(each.cpu_s for each in found):.2f}" if found else ""
        file, _, name = mutant.test.partition("::")
        test = f"[{name}](../{file})" if name else ""
        yield f"| {mutant.name} | {broken} | {cpu_s} | {test} |"


def write(text: str) -> None:
    """Put the table into the page, in the place of the one that is there."""
    before, head, rest = PAGE.read_text().partition(HEAD)
    after = rest[re.match(r"(\|.*\n)*", rest).end() :] if head else rest  # type: ignore[union-attr]
    PAGE.write_text(before + text + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=5.0, help="CPU seconds for each fault")
    parser.add_argument("--starts", type=int, default=3, help="first seeds for each fault")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="faults at a time")
    parser.add_argument("--only", default="", help="faults whose names match this; writes nothing")
    parser.add_argument("--figures", type=Path, help="keep the figures here, or take them from it")
    options = parser.parse_args()
    figures: dict[str, list[Hunt]] = {}
    if options.figures is not None and options.figures.exists():
        kept = json.loads(options.figures.read_text())
        figures = {name: [Hunt(*each) for each in found] for name, found in kept.items()}
    run_campaign(0, seeds=10)
    if not figures and not options.only:
        speed = run_campaign(100, seeds=SPEED_RUNS, ports=_CPU)
        print(
            f"{speed.seeds / speed.elapsed_s:.1f} runs and "
            f"{speed.steps / speed.elapsed_s:,.0f} steps a CPU second"
        )
        reached = run_campaign(100, seeds=MARKS_RUNS)
        print(f"{len(MARKS) - len(reached.missing_marks)} of {len(MARKS)} marks in {MARKS_RUNS}")
    wanted = [
        place
        for place, mutant in enumerate(ALL)
        if mutant.name not in figures and re.search(options.only, mutant.name)
    ]
    seek = partial(hunts, budget_s=options.budget, starts=options.starts)
    with get_context("fork").Pool(options.processes, maxtasksperchild=1) as pool:
        for place, found in zip(wanted, pool.imap(seek, wanted, chunksize=1), strict=True):
            figures[ALL[place].name] = found
            runs = ", ".join(str(each.runs) for each in found)
            print(f"{detection_s(found, options.budget):6.2f} s, runs {runs}: {ALL[place].name}")
    if options.figures is not None:
        options.figures.write_text(json.dumps(figures))
    all_s = [detection_s(each, options.budget) for each in figures.values()]
    print(f"median: {statistics.median(all_s):.2f} CPU s of {options.budget:.0f}")
    if not options.only:
        write(table(figures))


if __name__ == "__main__":
    main()
