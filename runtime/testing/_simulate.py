"""`simulate` runs one world from a seed or a tape; `shrink` makes a failing tape smaller."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable

from ._simulation import (
    NOTES_MAX,
    POLICIES,
    Policy,
    Run,
    Simulation,
    SimulatorUnsupported,
    Strike,
)
from ._tape import Tape

__all__ = ["shrink", "simulate"]

World = Callable[[Simulation], Awaitable[None]]

STEPS_MAX = 100_000
SHRINK_RUNS_MAX = 400


def simulate(
    world: World,
    *,
    seed: int = 0,
    policy: Policy | None = None,
    tape: Tape | None = None,
    strike: Strike | None = None,
    steps_max: int = STEPS_MAX,
    notes_max: int = NOTES_MAX,
) -> Run:
    """Run `world(simulation)` once, one step of one task at a time, under virtual time.

    Everything is decided by the seed, or by the tape of an earlier run, which is then played. The
    seed chooses the policy where none is given. A broken invariant, an exception of the world's,
    a deadlock and a run that is not over after `steps_max` steps are the run's `broken`; nothing
    is raised for them. The last `notes_max` notes are kept. Raises
    `SimulatorUnsupported` without trio, or with one that has changed. Not for use inside a running
    event loop.
    """
    try:
        from ._scheduler import Scheduler  # noqa: PLC0415 - only this needs trio
    except ImportError as error:
        raise SimulatorUnsupported(
            "simulate runs on trio, which is not installed: pip install trio"
        ) from error
    played = Tape(seed) if tape is None else tape.replayed()
    if policy is None:
        policy = POLICIES[played.random.randrange(len(POLICIES))]
    scheduler = Scheduler(played, policy, steps_max, strike)
    simulation = Simulation(played, scheduler, notes_max=notes_max)
    # A collection would run finalizers at a moment that depends on what ran before.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        scheduler.run(simulation, world)
    except BaseException as error:
        # What is left of a run that could not be ended is trio's internal error, or an interrupt.
        if not isinstance(error, Exception) or simulation.first_broken is None:
            raise
    finally:
        if was_enabled:
            gc.enable()
    if not scheduler.has_been_called:
        raise SimulatorUnsupported("trio did not ask the simulator which task to run next")
    return Run(
        seed=seed,
        policy=policy,
        steps=scheduler.steps,
        seconds=scheduler.ended_at_s,
        tape=played,
        trace=scheduler.trace,
        marks=simulation.marks,
        notes=simulation.notes,
        broken=simulation.first_broken,
        node_steps=scheduler.node_steps,
    )


def shrink(
    world: World,
    run: Run,
    *,
    strike: Strike | None = None,
    steps_max: int = STEPS_MAX,
    runs_max: int = SHRINK_RUNS_MAX,
) -> Run:
    """A run that breaks the same invariant with fewer interesting decisions.

    Writes zeros over ever smaller parts of the tape and plays it again, `runs_max` times at most.
    Returns the smallest that was found, which may be the run itself.
    """
    if run.broken is None:
        raise ValueError("a run in which all invariants held cannot be made smaller")
    invariant = run.broken.invariant
    best = run
    runs = 0

    def is_smaller(streams: dict[str, list[int]]) -> bool:
        nonlocal best, runs
        runs += 1
        tape = Tape(run.seed, played=streams)
        tried = simulate(
            world, seed=run.seed, policy=run.policy, tape=tape, strike=strike, steps_max=steps_max
        )
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
    return best
