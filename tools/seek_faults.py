"""How strong the search is: the CPU time to the first detection of each planted fault.

    make seek                                    all of them, as a table
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
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.simulation.mutants import MUTANTS, PROMISES, Mutant, planted
from turnkeeper.actors.simulation import MARKS, run_campaign
from turnkeeper.runtime import Ports

FIRST_SEEDS = (1_000_000, 2_000_000, 3_000_000)
SPEED_RUNS = 300
MARKS_RUNS = 1_000
_CPU = Ports(monotonic=time.process_time)


class Hunt(NamedTuple):
    """One search for one fault."""

    cpu_s: float
    runs: int
    found_as: str | None


def hunt(first_seed: int, budget_s: float, *, aims: bool) -> Hunt:
    """Seek a fault that is planted here and now."""
    campaign = run_campaign(
        first_seed, seconds=budget_s, failures_max=1, shrinks=False, aims=aims, ports=_CPU
    )
    if not campaign.failures:
        return Hunt(budget_s, campaign.seeds, None)
    broken = campaign.failures[0].broken
    return Hunt(campaign.elapsed_s, campaign.seeds, broken.invariant if broken else "trace")


def hunts(mutant: Mutant, budget_s: float, *, aims: bool) -> list[Hunt]:
    """Seek a fault from each first seed, in a process of its own; no more once it is not found."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        done: list[Hunt] = []
        with planted(mutant):
            for first_seed in FIRST_SEEDS:
                done.append(hunt(first_seed, budget_s, aims=aims))
                if done[-1].found_as is None:
                    break
        os.write(writing, json.dumps(done).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    os.waitpid(child, 0)
    return [Hunt(*each) for each in json.loads(text or "[]")]


def detection_s(found: list[Hunt], budget_s: float) -> float:
    """Return the mean over the first seeds; one that did not find it makes it the budget."""
    if not found or any(each.found_as is None for each in found):
        return budget_s
    return statistics.fmean(each.cpu_s for each in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=15.0, help="CPU seconds for each fault")
    parser.add_argument("--only", default="", help="faults whose names match this")
    parser.add_argument("--no-aim", action="store_true", help="fresh seeds alone")
    parser.add_argument("--no-marks", action="store_true", help="no campaign for speed and marks")
    parser.add_argument("--json", type=Path, help="where the figures go, too")
    options = parser.parse_args()
    run_campaign(0, seeds=10)
    if not options.no_marks:
        speed = run_campaign(100, seeds=SPEED_RUNS, ports=_CPU, aims=not options.no_aim)
        print(
            f"{speed.seeds / speed.elapsed_s:.1f} runs and "
            f"{speed.steps / speed.elapsed_s:,.0f} steps a CPU second"
        )
        reached = run_campaign(100, seeds=MARKS_RUNS, aims=not options.no_aim)
        print(f"{len(MARKS) - len(reached.missing_marks)} of {len(MARKS)} marks in {MARKS_RUNS}")
    figures: dict[str, list[Hunt]] = {}
    print("| planted fault | CPU s | runs | found as |\n|---|---|---|---|")
    for mutant in (*MUTANTS, *PROMISES):
        if re.search(options.only, mutant.name):
            found = hunts(mutant, options.budget, aims=not options.no_aim)
            figures[mutant.name] = found
            s = detection_s(found, options.budget)
            runs = ", ".join(str(each.runs) for each in found)
            names = ", ".join(f"`{n}`" for n in sorted({str(each.found_as) for each in found}))
            print(f"| {mutant.name} | {s:.2f} | {runs} | {names} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(figures))
    median = statistics.median(detection_s(each, options.budget) for each in figures.values())
    print(f"median: {median:.2f} CPU s of {options.budget:.0f}")


if __name__ == "__main__":
    main()
