"""Measure each figure side by side with its baseline, in one run, by medians.

An absolute figure is valid only for the machine it was measured on, so every goal is a ratio. Our
code and the baseline take turns, round by round, and the ratio is the median of the rounds' ratios:
anything that slows the machine for a while slows both. The garbage collector stays on, as it is for
users.

Some figures are measured twice: by the clock, and by processor time (`…_cpu`), which other programs
lengthen less.
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")

FOLDER = Path(__file__).parent
CACHE = FOLDER.parent / ".bench"


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the table."""

    name: str
    value: float | None
    unit: str
    baseline: str
    baseline_value: float | None
    ratio: float | None
    goal: str
    skipped: str = ""
    reads: Literal["as fast", "as much"] = "as much"
    """How to read the ratio: "times as fast" as the baseline, or "times as much"."""
    ratios: tuple[float, ...] = ()
    """The ratio of each round; `ratio` is their median."""

    @property
    def met(self) -> bool | None:
        """True if the goal is reached; False if not, or without a figure; None without a goal."""
        if not self.goal:
            return None
        if self.ratio is None:
            return False
        sign, bound = self.goal.split()
        return self.ratio >= float(bound) if sign == "≥" else self.ratio <= float(bound)

    def as_json(self) -> dict[str, object]:
        found: dict[str, object] = {
            "value": self.value,
            "unit": self.unit,
            "baseline": self.baseline,
            "baseline_value": self.baseline_value,
            "ratio": self.ratio,
            "goal": self.goal,
            "met": self.met,
        }
        if self.skipped:
            found["skipped"] = self.skipped
        return found


_BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print progress on standard error, with the time so far: standard output is for figures."""
    print(f"{time.monotonic() - _BEGAN:5.0f} s  {text}", file=sys.stderr, flush=True)


def faster(
    name: str, pairs: list[tuple[float, float]], *, baseline: str, goal: str, unit: str = "µs"
) -> Measure:
    """Return a measure "times as fast", from the times (ours, baseline) of each round."""
    ours, base = _medians(pairs)
    ratios = tuple(theirs / mine for mine, theirs in pairs)
    ratio = statistics.median(ratios)
    return Measure(name, ours, unit, baseline, base, ratio, goal, "", "as fast", ratios)


def costlier(
    name: str, pairs: list[tuple[float, float]], *, baseline: str, goal: str, unit: str = "µs"
) -> Measure:
    """Return a measure "times as much"."""
    ours, base = _medians(pairs)
    ratios = tuple(mine / theirs for mine, theirs in pairs)
    ratio = statistics.median(ratios)
    return Measure(name, ours, unit, baseline, base, ratio, goal, "", "as much", ratios)


class Spent(NamedTuple):
    """The time per item, in µs."""

    clock: float
    processor: float | None
    """Processor time of all threads and of the other counted processes; None if it is unknown."""


def mean(several: Sequence[Spent]) -> Spent:
    """Return the mean time of these."""
    processor = [one.processor for one in several if one.processor is not None]
    is_known = len(processor) == len(several)
    return Spent(
        statistics.mean(one.clock for one in several),
        statistics.mean(processor) if is_known else None,
    )


class Stopwatch:
    """Measures time since it was made; the processor time of the processes `others` counts too."""

    def __init__(self, others: Sequence[int] = ()) -> None:
        self._others = others
        self._processor_began = self._processor_s()
        self._began = time.perf_counter()

    def spent_on_each(self, many: int) -> Spent:
        """Return the time so far, divided by the number of items done in it."""
        clock = (time.perf_counter() - self._began) / many * 1e6
        now = self._processor_s()
        if now is None or self._processor_began is None:
            return Spent(clock, None)
        return Spent(clock, (now - self._processor_began) / many * 1e6)

    def _processor_s(self) -> float | None:
        try:
            told = [Path(f"/proc/{one}/schedstat").read_text() for one in self._others]
        except OSError:
            return None
        return time.process_time() + sum(int(line.split()[0]) for line in told) / 1e9


def by_both(
    name: str,
    pairs: Sequence[tuple[Spent, Spent]],
    *,
    baseline: str,
    goal: str,
    kind: Callable[..., Measure] = costlier,
) -> list[Measure]:
    """Return two measures of this kind: by the clock, and by processor time."""
    clock = [(mine.clock, base.clock) for mine, base in pairs]
    processor = [
        (mine.processor, base.processor)
        for mine, base in pairs
        if mine.processor is not None and base.processor is not None
    ]
    measures = [kind(name, clock, baseline=baseline, goal=goal)]
    if processor:
        measures.append(kind(f"{name}_cpu", processor, baseline=baseline, goal=goal))
    return measures


def skipped(name: str, baseline: str, goal: str, reason: str) -> Measure:
    return Measure(name, None, "µs", baseline, None, None, goal, reason)


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return (
        statistics.median(mine for mine, _ in pairs),
        statistics.median(theirs for _, theirs in pairs),
    )


async def in_turn(
    ours: Callable[[], Awaitable[T]], base: Callable[[], Awaitable[T]], rounds: int
) -> list[tuple[T, T]]:
    """Time both, round by round, after a warm-up round; a garbage collection precedes each."""
    pairs = []
    for _ in range(rounds + 1):
        gc.collect()
        mine = await ours()
        gc.collect()
        pairs.append((mine, await base()))
    return pairs[1:]


INSTALL_S_MAX = 900
PEER_S_MAX = 1_800
"""How long a peer's installation, and its run, may take before it is skipped."""


class PeerMissing(Exception):
    """A peer could not be installed, with the reason."""


peer_versions: dict[str, str] = {}
"""The versions of the peers that ran since a group began."""


def find_python(version: str) -> str:
    """Return a working interpreter of this version; raise `PeerMissing` if there is none."""
    pyenv = Path.home() / ".pyenv" / "versions"
    found = (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python")))
    for python in (sys.executable, *found):
        if python is not None:
            command = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.stdout.strip() == version:
                return str(python)
    raise PeerMissing(f"needs Python {version}, which is not found")


def run_peer(
    name: str,
    requirements: list[str],
    program: str,
    *arguments: str,
    interpreter: str = sys.executable,
) -> dict[str, float]:
    """Run a peer's program in a separate environment with new releases; return its output."""
    home = CACHE / name
    python = home / "bin" / "python"
    ready = home / "ready"
    if not ready.exists():
        say(f"installing {', '.join(requirements)} into {home.relative_to(FOLDER.parent)}")
        subprocess.run([interpreter, "-m", "venv", "--clear", str(home)], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", *requirements]
        done = _run_bounded(command, INSTALL_S_MAX, "not installed")
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise PeerMissing(f"not installable: {lines[-1] if lines else 'no reason given'}")
        ready.touch()
    for package in requirements:
        if package not in peer_versions:
            code = f"from importlib.metadata import version; print(version({package!r}))"
            told = subprocess.run(
                [str(python), "-c", code], capture_output=True, text=True, check=False
            )
            peer_versions[package] = told.stdout.strip() or "unknown"
    command = [str(python), str(FOLDER / program), *arguments]
    done = _run_bounded(command, PEER_S_MAX, "not done")
    if done.returncode:
        raise PeerMissing(f"does not run: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _run_bounded(
    command: list[str], seconds_max: int, told: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of a peer; raise `PeerMissing` if it takes longer."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds_max
        )
    except subprocess.TimeoutExpired as error:
        raise PeerMissing(f"{told} within {seconds_max / 60:.0f} min") from error
