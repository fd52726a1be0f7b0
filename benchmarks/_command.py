"""The command line: runs groups, prints their figures, and writes them to `RESULTS.md`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from datetime import UTC, datetime
from importlib.metadata import version

from . import scale
from ._harness import FOLDER, Measure, peer_versions, say
from ._machine import commit as find_commit
from ._machine import load, look
from ._plot import ratios
from ._results import Run, conditions, with_sections

GROUPS = (
    "runtime", "core", "journal", "turns", "cores", "pauses", "growth", "lists", "search",
    "gateway", "nodes",
)  # fmt: skip
PAGE = FOLDER / "RESULTS.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description="Figures, side by side.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; noisier")
    parser.add_argument("--full", action="store_true", help="growth to its largest sizes")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    parser.add_argument("--no-page", action="store_true", help="leave RESULTS.md as it is")
    options = parser.parse_args()
    for name in options.groups:
        if name not in GROUPS:
            parser.error(f"no such group: {name}")
    measures: dict[str, Measure] = {}
    failed: list[str] = []
    groups = options.groups or GROUPS
    for number, group in enumerate(groups, 1):
        say(f"{group}: group {number} of {len(groups)}")
        began = time.monotonic()
        try:
            found = measure_group(
                group, quick=options.quick, is_full=options.full, is_written=not options.no_page
            )
        except Exception:  # noqa: BLE001 - reported; the other groups are measured all the same
            traceback.print_exc()
            failed.append(group)
        else:
            measures |= {f"{group}.{name}": measure for name, measure in found.items()}
        say(f"{group}: {'failed after' if group in failed else 'took'} {_minutes(began)}")
    if options.json:
        print(json.dumps({name: each.as_json() for name, each in measures.items()}, indent=1))
    else:
        for name, measure in measures.items():
            print(line(name, measure))
    missed = [name for name, each in measures.items() if each.met is False and not each.skipped]
    if missed:
        say(f"{len(missed)} of {len(measures)} figures miss their goal: {', '.join(missed)}")
    if failed:
        say(f"these groups failed, and their sections stay as they were: {', '.join(failed)}")
    return 1 if missed or failed else 0


def _minutes(began: float) -> str:
    return f"{(time.monotonic() - began) / 60:.1f} min"


def measure_group(
    group: str, *, quick: bool, is_written: bool, is_full: bool = False
) -> dict[str, Measure]:
    """Run a group, and write its section of the page."""
    module = importlib.import_module(f".{group}", __package__)
    machine, load_before, commit = look(), load(), find_commit()
    began = time.monotonic()
    peer_versions.clear()
    found: dict[str, Measure] = {}
    is_full = is_full and hasattr(module, "run_full")
    for measure in module.run_full() if is_full else module.run(quick=quick):
        found[measure.name] = measure
        print(line(f"{group}.{measure.name}", measure), file=sys.stderr, flush=True)
    if is_written:
        run = Run(
            group,
            tuple(found.values()),
            machine,
            is_quick=quick and not is_full,
            is_full=is_full,
            day=datetime.now(UTC).date().isoformat(),
            version=version("turnkeeper"),
            commit=commit,
            load_before=load_before,
            load_after=load(),
            minutes=(time.monotonic() - began) / 60,
            peers=dict(peer_versions),
            plots=(
                (f"Ratios of the group {group}", f"results/{group}.svg"),
                # Drawn by whole runs only, whose logs are long enough.
                *(() if quick else getattr(module, "PLOTS", ())),
            ),
        )
        write(run)
    return found


def write(run: Run) -> None:
    """Write the plot and the section of a run; leave the rest of the page as it is."""
    plot = FOLDER / "results" / f"{run.group}.svg"
    plot.parent.mkdir(exist_ok=True)
    plot.write_text(ratios(f"Ratios of the group {run.group}", run.measures))
    page = PAGE.read_text() if PAGE.exists() else ""
    PAGE.write_text(with_sections(page, GROUPS, [run]))
    if run.group == "nodes" and not any(measure.skipped for measure in run.measures):
        scale.write_figures(
            {measure.name: measure.as_json() for measure in run.measures}, conditions(run)
        )


def line(name: str, measure: Measure) -> str:
    """Return a line for a terminal."""
    if measure.skipped:
        return f"{name:<44} skipped: {measure.skipped}"
    said = "" if not measure.goal else ("met" if measure.met else "NOT MET")
    return (
        f"{name:<44}{measure.value:>10.3f} {measure.unit:<6}"
        f"{measure.baseline:<38}{measure.baseline_value:>10.3f}"
        f"{measure.ratio:>8.2f}x  {measure.goal:<8}{said}"
    )
