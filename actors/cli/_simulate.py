"""The command `simulate`: conversations under faults in a simulated world, seed after seed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from turnkeeper.runtime import Ports

from ._exits import (
    BROKEN,
    INTERRUPTED,
    UNUSABLE,
    AsJson,
    fail,
    how_stopped,
    interrupted_by_signals,
    is_given,
    print_json,
)

if TYPE_CHECKING:  # loading the simulator takes longer than loading all other commands
    from turnkeeper.runtime.testing import Policy, Run

    from ..simulation import Campaign

__all__ = ["simulate"]

_SEEDS = 200
_FIRST_SEEDS = 1 << 31
_PROGRESS_S = 0.5
_OF_SEEDS = ("seeds", "minutes", "seed", "policy", "jobs", "tapes")
"""The options that cannot be used with a tape."""


class PolicyName(StrEnum):
    """The ways in which the simulator chooses the next task."""

    RANDOM = "random"
    PCT = "pct"
    BATCH = "batch"


_POLICIES: Mapping[PolicyName, Policy] = {
    PolicyName.RANDOM: "random",
    PolicyName.PCT: "pct",
    PolicyName.BATCH: "batch",
}


def _above_zero(minutes: float | None) -> float | None:
    """Return the value of an option; refuse a time in which no seed could be played."""
    if minutes is not None and not 0 < minutes < math.inf:
        raise typer.BadParameter("must be a number above 0")
    return minutes


@interrupted_by_signals()
def simulate(
    context: typer.Context,
    *,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="The number of runs; each run has a seed of its own.",
            show_default=f"{_SEEDS}, or no limit with --minutes",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            callback=_above_zero,
            help="Stop after this many minutes.",
            show_default="no limit",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="The first seed; the others count up from it.",
            show_default="drawn, and printed",
        ),
    ] = None,
    policy: Annotated[
        PolicyName | None,
        typer.Option(
            help="How the simulator chooses the next task.", show_default="each seed chooses"
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="How many processes share the runs."),
    ] = 1,
    replay: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="TAPE",
            help="Repeat the run that this tape has recorded, and no other.",
        ),
    ] = None,
    tapes: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", file_okay=False, help="The folder for the tapes of failing runs."
        ),
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Run conversations in a simulated world with faults, and check every invariant.

    Nodes crash, freeze and are cancelled; the journal refuses, fails or does not answer; clients
    send at the same time, give up, and send again. The same seed gives the same run. Needs trio.

    Exit status: 0, every invariant held; 1, one was broken; 2, the arguments are invalid; 130,
    stopped by Ctrl-C.
    """
    if find_spec("trio") is None:
        fail(UNUSABLE, "simulate needs its extra: pip install 'turnkeeper[simulation]'")
    from ..simulation import Campaign, run_campaign  # noqa: PLC0415 - loaded by this command alone

    given = [name for name in _OF_SEEDS if is_given(context, name)]
    if replay is not None and given:
        fail(UNUSABLE, f"--replay repeats one run; leave out --{given[0]}")
    if replay is not None:
        _replay(replay, as_json=as_json)
        return
    ports = Ports()
    first = ports.random.randrange(_FIRST_SEEDS) if seed is None else seed
    if seeds is None and minutes is None:
        seeds = _SEEDS
    errors = Console(stderr=True, highlight=False)
    errors.print(Text(f"seeds from {first} on"))
    progress = _Progress(errors, seeds)
    so_far = Campaign(first)

    def on_progress(campaign: Campaign) -> None:
        nonlocal so_far
        so_far = campaign
        progress.show(campaign)
        raise_swallowed()

    status = None
    try:
        with _swallowed_interrupts() as raise_swallowed:
            so_far = run_campaign(
                first,
                seeds=seeds,
                seconds=None if minutes is None else 60.0 * minutes,
                policy=None if policy is None else _POLICIES[policy],
                on_progress=on_progress,
                ports=ports,
                jobs=jobs,
            )
    except KeyboardInterrupt:
        status = INTERRUPTED
        errors.print(Text(f"turnkeeper: {how_stopped()}"))
    finally:
        progress.end()
    try:
        files = [_write_tape(tapes, run) for run in so_far.failures]
    except OSError as error:
        failed = ", ".join(str(run.seed) for run in so_far.failures)
        fail(
            BROKEN,
            f"an invariant was broken, and no tape can be written in {tapes}: {error.strerror}; "
            f"run each seed again, with --seeds 1 and another folder: {failed}",
        )
    for run, file in zip(so_far.failures, files, strict=True):
        _tell_failure(errors, run, file)
    if as_json:
        print_json(_as_json(so_far, files))
    else:
        _print_campaign(Console(highlight=False), so_far)
    if not so_far.ok:
        raise typer.Exit(BROKEN)
    if status is not None:
        raise typer.Exit(status)


@contextmanager
def _swallowed_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises `KeyboardInterrupt` if a finalizer has swallowed one.

    Python only reports an error of a finalizer, such as that of a nursery of trio's.
    """
    report, is_swallowed = sys.unraisablehook, False

    def note(unraisable: sys.UnraisableHookArgs) -> None:
        nonlocal is_swallowed
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            is_swallowed = True
        else:
            report(unraisable)

    def raise_swallowed() -> None:
        if is_swallowed:
            raise KeyboardInterrupt

    sys.unraisablehook = note
    try:
        yield raise_swallowed
    finally:
        sys.unraisablehook = report


def _replay(path: Path, *, as_json: bool) -> None:
    from ..simulation import TapeFile  # noqa: PLC0415 - loaded by this command alone
    from ..simulation import replay as play_tape  # noqa: PLC0415 - as above

    try:
        file = TapeFile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(UNUSABLE, f"{path} is not a tape: {error}")
    run = play_tape(file)
    if as_json:
        print_json(
            {
                "ok": run.ok,
                "seeds": 1,
                "steps": run.steps,
                "failures": [] if run.ok else [_failure_json(run, path)],
                "marks": dict(run.marks),
                "trace": run.trace,
            }
        )
    else:
        console = Console(highlight=False)
        if run.ok:  # a run without a failure has no story
            for note in run.notes:
                console.print(Text(note), soft_wrap=True)
        console.print(Text(str(run)), soft_wrap=True)
    if not run.ok:
        raise typer.Exit(BROKEN)


class _Progress:
    """A line that shows the progress of the runs, on a terminal only."""

    def __init__(self, console: Console, seeds: int | None) -> None:
        self._console = console
        self._seeds = seeds
        self._next = 0.0

    def show(self, campaign: Campaign) -> None:
        if not self._console.is_terminal or campaign.elapsed_s < self._next:
            return
        self._next = campaign.elapsed_s + _PROGRESS_S
        of = "" if self._seeds is None else f" of {self._seeds:,}"
        line = (
            f"{campaign.seeds:,}{of} seeds, {campaign.steps:,} steps, "
            f"{_per_hour(campaign):,.0f} seeds an hour, {campaign.failed} failed"
        )
        self._console.print(Text(f"\r{line}"), end="")

    def end(self) -> None:
        if self._console.is_terminal:
            self._console.print()


def _per_hour(campaign: Campaign) -> float:
    return campaign.seeds / campaign.elapsed_s * 3600 if campaign.elapsed_s else 0.0


def _write_tape(folder: Path, run: Run) -> Path:
    from ..simulation import TapeFile  # noqa: PLC0415 - loaded by this command alone

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"turnkeeper-{run.seed}.tape.json"
    path.write_text(TapeFile.of(run).to_json(), encoding="utf-8")
    return path


def _tell_failure(console: Console, run: Run, tape: Path) -> None:
    console.print(Text(str(run)), soft_wrap=True)
    console.print(Text(f"play it again: turnkeeper simulate --replay {tape}"), soft_wrap=True)


def _failure_json(run: Run, tape: Path) -> Mapping[str, object]:
    from ..simulation import INVARIANTS  # noqa: PLC0415 - loaded by this command alone

    broken = run.broken
    assert broken is not None, "a run that failed names the invariant"
    return {
        "seed": run.seed,
        "policy": run.policy,
        "invariant": broken.invariant,
        "sentence": INVARIANTS.get(broken.invariant, ""),
        "detail": broken.detail,
        "step": broken.step,
        "story": run.story.splitlines(),
        "last": list(run.notes),
        "replay": f"turnkeeper simulate --replay {tape}",
    }


def _as_json(campaign: Campaign, tapes: list[Path]) -> Mapping[str, object]:
    return {
        "ok": campaign.ok,
        "first_seed": campaign.first_seed,
        "seeds": campaign.seeds,
        "steps": campaign.steps,
        "virtual_s": round(campaign.virtual_s, 3),
        "seeds_per_hour": round(_per_hour(campaign)),
        "failed": campaign.failed,
        "failures": [
            _failure_json(run, tape) for run, tape in zip(campaign.failures, tapes, strict=True)
        ],
        "marks": dict(sorted(campaign.marks.items())),
        "marks_missing": list(campaign.missing_marks),
        "checked": campaign.checked,
        "trace": campaign.trace,
    }


def _print_campaign(console: Console, campaign: Campaign) -> None:
    rows = (
        (campaign.seeds, "seeds"),
        (campaign.steps, "steps"),
        (campaign.virtual_s, "virtual seconds"),
        (_per_hour(campaign), "seeds an hour, here"),
        (campaign.checked, "seeds run again from their tapes, with the same trace"),
        (len(campaign.marks), "kinds of rare situations reached"),
        (campaign.failed, "seeds in which an invariant was broken"),
    )
    width = max(len(f"{number:,.0f}") for number, _ in rows)
    for number, label in rows:
        console.print(Text(f"{number:>{width},.0f}  {label}"))
    if campaign.misses_marks:
        console.print(Text(f"not reached: {'; '.join(campaign.missing_marks)}"))
    if campaign.failed:
        console.print(Text("an invariant was broken"), style="red")
    elif campaign.misses_marks:
        console.print(Text("all invariants held; not every situation was reached"), style="yellow")
    else:
        console.print(Text("all invariants held"), style="green")
