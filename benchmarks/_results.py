"""Writes `benchmarks/RESULTS.md`: a section for each group, with its figures and its conditions.

The newest run of a group replaces its whole section; the other sections stay. So each section has
its own date, commit, machine and load, and says if the run was a quick one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ._baselines import Baseline, describe
from ._harness import Measure
from ._machine import Machine

HEAD = """\
# What the benchmarks found

`make bench` writes this page and its plots; nothing here is written by hand. Ours and the baseline
take turns within one run, and each figure is compared with its baseline of the same rounds: a
time alone says more about the machine than about the code. The garbage collector is on.

*Ours* and *baseline* are medians of the rounds. The *ratio* is the median of the rounds' ratios,
then the least and the greatest of them: if a goal lies between these two, the run does not decide
it. If it reads *times as fast*, more is better; if it reads *times as much*, less is.

In the plots a dot is the median ratio, the line through it the spread, and the short upright line
the goal: green if it is met, brown if it is not, and blue if there is none. A peer that could not
be installed is listed as skipped, with the reason.
"""
QUICK = """\
**From a quick run**: fewer rounds and shorter logs, so noisier figures; only a whole run
decides whether a goal is met."""
BESIDE_OTHERS = """\
**Beside other work**: the machine was busy with other programs when the run began. Times are too
long, and ratios of work that waits for several threads or processes suffer more than those of
plain computation, so a goal that is met or missed here proves little."""
_BEGIN = "<!-- group {} -->"
_END = "<!-- end of {} -->"
_BUSY_SHARE = 0.25
"""Above this load from other programs, as a share of the cores, a section says so."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a group: what was measured, and how."""

    group: str
    measures: Sequence[Measure]
    machine: Machine
    is_quick: bool
    day: str
    version: str
    commit: str
    load_before: float
    load_after: float
    is_full: bool = False
    """True if it was asked to go on to the largest sizes."""
    minutes: float = 0.0
    """How long the run took."""
    peers: dict[str, str] = field(default_factory=dict)
    plots: Sequence[tuple[str, str]] = ()
    """The text and the path of each plot, from the page's folder."""

    @property
    def is_beside_others(self) -> bool:
        """True if other programs used a good part of the machine when the run began."""
        return self.load_before > _BUSY_SHARE * self.machine.cores


def with_sections(page: str, groups: Sequence[str], runs: Iterable[Run]) -> str:
    """Return the page with the sections of these runs, in the order of the groups."""
    sections = {
        group: found.group()
        for group in groups
        if (found := re.search(_span(group), page, re.DOTALL)) is not None
    }
    sections |= {run.group: section(run) for run in runs}
    parts = [f"{sections[group]}\n" for group in groups if group in sections]
    missing = ", ".join(f"`{group}`" for group in groups if group not in sections)
    return "\n".join([HEAD, *parts, *([f"Not measured yet: {missing}.\n"] if missing else [])])


def _span(group: str) -> str:
    return re.escape(_BEGIN.format(group)) + ".*?" + re.escape(_END.format(group))


def section(run: Run) -> str:
    """Return the section of one run."""
    lines = [_BEGIN.format(run.group), f"## {run.group}", "", *_conditions(run), ""]
    for text, path in run.plots:
        lines += [f"![{text}]({path})", ""]
    lines += [*_table(run.measures, run.group), ""]
    baselines = _baselines(run)
    if baselines:
        lines += ["The baselines, and how each could be unfair:", ""]
        lines += [*baselines, ""]
    return "\n".join([*lines, _END.format(run.group)])


def _conditions(run: Run) -> list[str]:
    lines = [conditions(run)]
    if run.is_quick:
        lines += ["", QUICK]
    if run.is_beside_others:
        lines += ["", BESIDE_OTHERS]
    return lines


def conditions(run: Run) -> str:
    """Return the command, date, commit, machine and load of a run."""
    machine = run.machine
    option = " --quick" if run.is_quick else " --full" if run.is_full else ""
    commit = f", commit {run.commit}" if run.commit else ""
    packages = {**machine.packages, **run.peers}
    versions = ", ".join(f"{name} {number}" for name, number in packages.items())
    return (
        f"`python benchmarks {run.group}{option}`, {run.day}, turnkeeper {run.version}{commit}. "
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB; "
        f"4 KiB written and on the disk in {machine.fsync_us:.0f} µs; "
        f"{machine.system}, {machine.python}, {versions}. "
        f"Load {run.load_before:.1f} before, {run.load_after:.1f} after; "
        f"the run took {run.minutes:.0f} min."
    )


def _table(measures: Sequence[Measure], group: str) -> list[str]:
    lines = [
        "| | ours | baseline | ratio | goal | |",
        "|---|---:|---:|---|---|---|",
    ]
    for measure in measures:
        what, _ = describe(group, measure.name)
        name = f"`{measure.name}`<br>{what}" if what else f"`{measure.name}`"
        if measure.skipped:
            row = [name, "", measure.baseline, f"skipped: {measure.skipped}", measure.goal, ""]
        else:
            met = "" if measure.met is None else ("met" if measure.met else "**not met**")
            row = [
                name,
                _figure(measure.value, measure.unit),
                f"{measure.baseline}: {_figure(measure.baseline_value, measure.unit)}",
                _ratio(measure),
                measure.goal,
                met,
            ]
        lines.append("| " + " | ".join(_cell(text) for text in row) + " |")
    return lines


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def _ratio(measure: Measure) -> str:
    if measure.ratio is None:
        return ""
    said = f"{_short(measure.ratio)} times {measure.reads}"
    if len(measure.ratios) < 2:
        return f"{said}, one round"
    least, most = min(measure.ratios), max(measure.ratios)
    return f"{said} ({_short(least)} to {_short(most)}, {len(measure.ratios)} rounds)"


def _short(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.3g}"


def _baselines(run: Run) -> list[str]:
    """Return a line for each baseline of the run, in the order in which they come."""
    found: dict[str, Baseline] = {}
    for measure in run.measures:
        _, baseline = describe(run.group, measure.name)
        if baseline is not None:
            found.setdefault(baseline.name, baseline)
    return [
        f"- **{each.name}**: {each.is_}"
        + (f" Unfair to us: {each.unfair_to_us}" if each.unfair_to_us else "")
        + (f" Unfair to it: {each.unfair_to_it}" if each.unfair_to_it else "")
        for each in found.values()
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
