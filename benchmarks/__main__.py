"""Benchmarks, side by side with peers and with the machine's limits.

    python -m benchmarks [GROUP…] [--quick] [--json]

Each group is a module of this folder with `run(quick) -> Iterator[Measure]`. Exit status 1 when a
goal is not met; a peer that cannot be installed is skipped, with the reason, never met.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
if not __package__:  # run as a folder, as `make bench` does
    sys.path.insert(0, str(FOLDER.parent))
    __package__ = "benchmarks"

GROUPS = ("runtime", "core", "journal", "turns", "lists", "search", "gateway")


def main() -> int:
    known = [name for name in GROUPS if (FOLDER / f"{name}.py").exists()]
    parser = argparse.ArgumentParser(prog="benchmarks", description="Figures, side by side.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; noisier")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    options = parser.parse_args()
    for name in options.groups:
        if name not in known:
            parser.error(f"no such group: {name}")
    measures = {}
    for group in options.groups or known:
        module = importlib.import_module(f".{group}", __package__)
        for measure in module.run(quick=options.quick):
            measures[f"{group}.{measure.name}"] = measure
            print(line(f"{group}.{measure.name}", measure), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({name: each.as_json() for name, each in measures.items()}, indent=1))
    else:
        for name, measure in measures.items():
            print(line(name, measure))
    return 1 if any(each.met is False and not each.skipped for each in measures.values()) else 0


def line(name: str, measure: object) -> str:
    from ._harness import Measure  # noqa: PLC0415 - after the path is set

    assert isinstance(measure, Measure)
    if measure.skipped:
        return f"{name:<44} skipped: {measure.skipped}"
    said = "" if not measure.goal else ("met" if measure.met else "NOT MET")
    return (
        f"{name:<44}{measure.value:>10.3f} {measure.unit:<6}"
        f"{measure.baseline:<38}{measure.baseline_value:>10.3f}"
        f"{measure.ratio:>8.2f}x  {measure.goal:<8}{said}"
    )


if __name__ == "__main__":
    sys.exit(main())
