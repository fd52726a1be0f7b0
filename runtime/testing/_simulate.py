"""`simulate` runs one world from a seed or a tape; `shrink` makes a failing tape smaller."""

from __future__ import annotations

import contextlib
import gc
import math
import textwrap
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from .._supervision import check_kind, check_number, check_whole
from ._scheduler import Scheduler
from ._simulation import (
    NOTES_MAX,
    POLICIES,
    Backend,
    Policy,
    Run,
    Simulation,
    SimulatorUnsupported,
    Strike,
)
from ._tape import Tape

if TYPE_CHECKING:
    from ._story import Story

__all__ = ["World", "shrink", "simulate"]

World = Callable[[Simulation], Awaitable[None]]
"""A world: it starts nodes and clients, and says what must hold. It can be run again and again."""

STEPS_MAX = 100_000
SHRINK_RUNS_MAX = 400


def simulate(
    world: World,
    *,
    seed: int = 0,
    backend: Backend = "trio",
    policy: Policy | None = None,
    tape: Tape | None = None,
    strike: Strike | None = None,
    native_cancels: bool = False,
    steps_max: int = STEPS_MAX,
    notes_max: int = NOTES_MAX,
    is_told: bool = True,
) -> Run:
    """Run `world(simulation)`, one step of one task at a time, under virtual time.

    Everything is decided by the seed, or by the tape of an earlier run, which is then played. The
    seed chooses the policy unless it is given. With `native_cancels`, on asyncio alone, tasks of
    nodes are cancelled by `task.cancel()` before steps that the tape chooses.

    A broken invariant, an exception of the world's, a deadlock and a run that is not over after
    `steps_max` steps are the run's `broken`; nothing is raised for them. The last `notes_max` notes
    are kept.

    A run that fails is played once more, for its story; so the world must be one that can be run
    again. Pass `is_told=False` to leave that out.

    Runs of several threads take turns. Other threads may run loops of their own meanwhile.

    Raises `SimulatorUnsupported` if the backend is not installed, or has changed too much, or if
    another thread does not end its run, and `ValueError` or `TypeError` for an option that makes no
    sense. Not for use inside a running event loop.
    """
    settings = Settings(seed, backend, strike, native_cancels, steps_max, notes_max)
    check_kind("is_told", is_told, bool)
    played = Tape(seed) if tape is None else tape.to_replay()
    if policy is not None and policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; it takes one of {', '.join(POLICIES)}")
    if policy is None:
        policy = POLICIES[played.random.randrange(len(POLICIES))]
    run = run_once(world, settings, policy, played)
    return tell(world, settings, run) if is_told and not run.ok else run


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that a run depends on besides its tape."""

    seed: int
    backend: Backend
    strike: Strike | None
    native_cancels: bool
    steps_max: int
    notes_max: int

    def __post_init__(self) -> None:
        check_number("seed", self.seed, "a whole number", least=-math.inf, is_whole=True)
        if self.backend not in get_args(Backend):
            raise ValueError(f"backend is {self.backend!r}; it takes trio or asyncio")
        check_kind("native_cancels", self.native_cancels, bool)
        check_whole("steps_max", self.steps_max)
        check_whole("notes_max", self.notes_max, least=0)


def tell(world: World, settings: Settings, run: Run) -> Run:
    """Play a run once more, and return it with its story."""
    from ._story import ToldTape  # noqa: PLC0415 - only a failure needs it

    tape = ToldTape(run.seed, played=run.tape.streams)
    again = run_once(world, settings, run.policy, tape)
    if again.trace == run.trace:
        return replace(run, story=again.story)
    note = (
        "(played once more it took another course: something in this world is not decided by the "
        "tape, such as a real clock, a thread, or state that outlives the run)"
    )
    return replace(run, story="\n".join([textwrap.fill(note, 79), again.story]))


_TURN_S_MAX = 600.0
"""How long a run waits for those of other threads."""
_turn = threading.RLock()
"""Held by the thread whose run it is."""


@contextlib.contextmanager
def _in_turn() -> Iterator[None]:
    """Wait for the runs of other threads: each replaces parts of the backend for the process."""
    if not _turn.acquire(timeout=_TURN_S_MAX):
        raise SimulatorUnsupported(
            f"another thread has simulated for {_TURN_S_MAX:.0f} s; only one can at a time"
        )
    try:
        yield
    finally:
        _turn.release()


@_in_turn()
def run_once(world: World, settings: Settings, policy: Policy, tape: Tape) -> Run:
    """Run a world on this tape; with its story, if the tape is one that tells."""
    # A collection would run finalizers at a moment that depends on what ran before.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _run_uncollected(world, settings, policy, tape)
    finally:
        if was_enabled:
            gc.enable()


def _run_uncollected(world: World, settings: Settings, policy: Policy, tape: Tape) -> Run:
    """Run a world; when this returns, most of it is gone, and the collector need not look at it."""
    scheduler = _scheduler_of(settings.backend)(
        tape,
        policy,
        settings.steps_max,
        settings.strike,
        native_cancels=settings.native_cancels,
    )
    simulation = Simulation(tape, scheduler, notes_max=settings.notes_max)
    story = _story_of(simulation, tape)
    try:
        with contextlib.nullcontext() if story is None else story.told():
            scheduler.run(simulation, world)
    except BaseException as error:
        # A run that could not be ended leaves the backend's error; an interrupt goes on, out of
        # the groups that trio packs it in.
        if (interrupt := _interrupt_in(error)) is not None:
            raise interrupt from None
        if not isinstance(error, Exception) or simulation.first_broken is None:
            raise
    finally:
        scheduler.forget()
    return Run(
        seed=settings.seed,
        policy=policy,
        steps=scheduler.steps,
        seconds=scheduler.ended_at_s,
        tape=tape,
        trace=scheduler.trace,
        marks=simulation.marks,
        noted=simulation.noted,
        broken=simulation.first_broken,
        node_steps=scheduler.node_steps,
        backend=settings.backend,
        native_cancels=settings.native_cancels,
        story="" if story is None else str(story),
    )


def _interrupt_in(error: BaseException) -> KeyboardInterrupt | SystemExit | None:
    if isinstance(error, BaseExceptionGroup):
        found = (_interrupt_in(inner) for inner in error.exceptions)
        return next((interrupt for interrupt in found if interrupt is not None), None)
    return error if isinstance(error, KeyboardInterrupt | SystemExit) else None


def _story_of(simulation: Simulation, tape: Tape) -> Story | None:
    """Return the story that this tape is to tell, if any."""
    if type(tape) is Tape:
        return None
    from ._story import Story, ToldTape  # noqa: PLC0415 - only a failure needs it

    assert isinstance(tape, ToldTape), "a tape either tells or does not"
    tape.story = simulation.scheduler.story = Story(simulation)
    return tape.story


def _scheduler_of(backend: Backend) -> type[Scheduler[Any]]:
    if backend == "asyncio":
        from ._on_asyncio import AsyncioScheduler  # noqa: PLC0415 - only this needs asyncio

        return AsyncioScheduler
    try:
        from ._on_trio import TrioScheduler  # noqa: PLC0415 - only this needs trio
    except ImportError as error:
        raise SimulatorUnsupported(
            "simulate runs on trio, which is not installed: pip install 'turnkeeper[simulation]'"
        ) from error
    return TrioScheduler


def shrink(
    world: World,
    run: Run,
    *,
    strike: Strike | None = None,
    steps_max: int = STEPS_MAX,
    runs_max: int = SHRINK_RUNS_MAX,
) -> Run:
    """Return a run that breaks the same invariant with fewer interesting decisions.

    Writes zeros over ever smaller parts of the tape and plays it again, `runs_max` times at most,
    with the `strike` and the `steps_max` of the run.
    Returns the smallest that was found, which may be the run itself. Raises `ValueError` if no
    invariant was broken.
    """
    if run.broken is None:
        raise ValueError("a run in which all invariants held cannot be made smaller")
    check_whole("runs_max", runs_max, least=0)
    settings = Settings(
        run.seed, run.backend, strike, run.native_cancels, steps_max, len(run.notes) or NOTES_MAX
    )
    invariant = run.broken.invariant
    best = run
    runs = 0

    def is_smaller(streams: dict[str, list[int]]) -> bool:
        nonlocal best, runs
        runs += 1
        tried = run_once(world, settings, run.policy, Tape(run.seed, played=streams))
        if tried.broken is None or tried.broken.invariant != invariant:
            return False
        if tried.tape.interesting >= best.tape.interesting:
            return False
        best = tried
        return True

    parts = 1
    while runs < runs_max:
        has_shrunk = False
        is_fine = True
        for label in sorted(best.tape.streams, key=lambda label: -len(best.tape.streams[label])):
            at = 0
            while runs < runs_max:
                stream = best.tape.streams.get(label, [])
                size = max(1, -(-len(stream) // parts))
                is_fine = is_fine and size == 1
                if at >= len(stream):
                    break
                if any(stream[at : at + size]):
                    streams = {name: list(values) for name, values in best.tape.streams.items()}
                    length = len(streams[label][at : at + size])
                    streams[label][at : at + size] = [0] * length
                    has_shrunk = is_smaller(streams) or has_shrunk
                at += size
        if is_fine and not has_shrunk:
            break
        parts *= 2
    return tell(world, settings, best)
