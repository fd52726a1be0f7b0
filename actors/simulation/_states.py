"""Checks of the state for synchronous code, and of the graph of waits, both without any task."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from turnkeeper.runtime import AskCycle
from turnkeeper.runtime.testing import Simulation

from ..events import Event
from ..journals.sqlite.state import ConversationState
from ..owner.wait_graph import Inside, WaitGraph
from ._oracles import INVARIANTS

__all__ = ["check_state", "play_waits"]

_WAITS = 12
_WAITERS = 4


def check_state(simulation: Simulation, events: Sequence[Event]) -> None:
    """Append a log to a `ConversationState`, and check what it tells its journal each time."""
    state = ConversationState(admission="observe")
    log = state._log  # noqa: SLF001 - what a journal is told can be seen only here
    keep = log.append
    told: list[bool] = []

    def append(event: Event, *, expected_seq: int, is_unfinished: bool) -> None:
        told.append(is_unfinished)
        keep(event, expected_seq=expected_seq, is_unfinished=is_unfinished)

    log.append = append  # type: ignore[method-assign]
    for event in events:
        state.append_event(event)
        if told[-1] != state.turns.has_open_turns:
            _broken(simulation, "P4", f"a state at {state.seq}, {event.kind}: {told[-1]}")


def play_waits(simulation: Simulation) -> None:
    """Let turns wait for other conversations, and check which waits are refused."""
    graph = WaitGraph()
    waits: list[tuple[str, str, AbstractContextManager[None]]] = []
    for _ in range(_WAITS):
        if waits and simulation.chance("a wait ends", 0.3):
            _, _, ended = waits.pop(simulation.draw("which wait", len(waits)))
            ended.__exit__(None, None, None)
            continue
        waiter = f"c{simulation.draw('waiter', _WAITERS)}"
        awaited = f"c{simulation.draw('awaited', _WAITERS)}"
        reached = {awaited}
        for _ in range(_WAITERS):
            reached |= {to for start, to, _ in waits if start in reached}
        is_refused = False
        wait = graph.wait(Inside(graph, waiter), awaited)
        try:
            wait.__enter__()  # it ends at a moment of its own
        except AskCycle:
            is_refused = True
        else:
            waits.append((waiter, awaited, wait))
        if is_refused != (waiter in reached):
            open_now = [f"{start} for {to}" for start, to, _ in waits]
            _broken(simulation, "M3", f"{waiter} for {awaited}; {open_now}")


def _broken(simulation: Simulation, invariant: str, detail: str) -> None:
    simulation.broken(invariant, f"{INVARIANTS[invariant]}: {detail}")
