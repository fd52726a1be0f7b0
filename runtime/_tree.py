"""The tree: the state of all actors of a runtime at one moment.

A tree is a copy: taking it changes nothing and costs one walk. Print it, with `print` or rich.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from ._cell import Cell
from ._lifecycle import Phase
from ._messages import Order
from ._parent import Child
from ._supervisor import Supervisor

if TYPE_CHECKING:
    import rich.console

    from ._system import System

__all__ = ["ActorState", "HandlingTimes", "Tree", "cells_of", "take_tree"]


@dataclass(frozen=True, slots=True)
class ActorState:
    """The state of one actor, or one supervisor (which has no mail), and of those below it."""

    name: str
    kind: str
    state: str
    mailbox_depth: int
    oldest_s: float
    """How long the oldest message has been waiting, in seconds.

    It may be too long by as much as the event loop took for two passes.
    """
    handled: int
    failed: int
    restarts: int
    effects: tuple[str, ...]
    children: tuple[ActorState, ...]
    left_out: int = 0
    """How many more children it has, if the tree was taken with a limit."""

    @property
    def line(self) -> str:
        parts = [f"{self.name} {self.kind}: {self.state}"]
        if self.mailbox_depth:
            parts.append(f"{self.mailbox_depth} waiting, the oldest for {self.oldest_s:.3f} s")
        if self.handled:
            parts.append(f"{self.handled} handled")
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.restarts:
            parts.append(f"{self.restarts} restart{'' if self.restarts == 1 else 's'}")
        if self.effects:
            parts.append(f"effects: {', '.join(self.effects)}")
        if self.left_out:
            parts.append(f"{self.left_out} of its children left out")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class HandlingTimes:
    """How long the handlers of one actor class take, in seconds."""

    kind: str
    count: int
    p50_s: float
    p90_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Tree:
    """The state of all actors of a runtime, and how long their handlers take."""

    actors: tuple[ActorState, ...]
    handling_times: tuple[HandlingTimes, ...]
    left_out: int = 0
    """How many more actors there are at the top, if the tree was taken with a limit."""

    def walk(self) -> Iterator[ActorState]:
        """Yield every actor, parents before children."""
        waiting = list(reversed(self.actors))
        while waiting:
            state = waiting.pop()
            yield state
            waiting.extend(reversed(state.children))

    def __str__(self) -> str:
        lines: list[str] = []

        def add(states: tuple[ActorState, ...], indent: str) -> None:
            for state in states:
                lines.append(indent + state.line)
                add(state.children, indent + "  ")

        add(self.actors, "")
        lines += [
            f"{each.kind}: {each.count} handled, p50 {each.p50_s * 1e3:.3f} ms, "
            f"p90 {each.p90_s * 1e3:.3f} ms, p99 {each.p99_s * 1e3:.3f} ms"
            for each in self.handling_times
        ]
        return "\n".join(lines)

    def __rich__(self) -> rich.console.RenderableType:
        from rich.console import Group  # noqa: PLC0415 - rich is an extra; only it calls this
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415
        from rich.tree import Tree as RichTree  # noqa: PLC0415

        root = RichTree("actors")

        def add(parent: RichTree, states: tuple[ActorState, ...]) -> None:
            for state in states:
                style = _STYLES.get(state.state, "")
                add(parent.add(Text(state.line, style=style)), state.children)

        add(root, self.actors)
        table = Table("class", "handled", "p50 ms", "p90 ms", "p99 ms")
        for each in self.handling_times:
            times = (each.p50_s, each.p90_s, each.p99_s)
            table.add_row(each.kind, str(each.count), *(f"{time * 1e3:.3f}" for time in times))
        return Group(root, table)


_STYLES = {
    "idle": "dim",
    "backing off": "yellow",
    "held": "yellow",
    "refusing": "red",
    "stopping": "magenta",
}


def take_tree(system: System, root: Supervisor, limit: int) -> Tree:
    now = system.now()
    times = tuple(
        HandlingTimes(
            kind.__name__,
            traits.stats.count,
            traits.stats.quantile(0.5),
            traits.stats.quantile(0.9),
            traits.stats.quantile(0.99),
        )
        for kind, traits in system.traits.items()
    )
    actors, left_out = _states(root, now, limit)
    return Tree(actors, times, left_out)


def _states(
    supervisor: Supervisor | None, now: float, limit: int
) -> tuple[tuple[ActorState, ...], int]:
    """Return the states of at most `limit` children, and how many are left out."""
    children = () if supervisor is None else supervisor.children.values()
    left_out = max(0, len(children) - limit)
    found: list[ActorState] = []
    for child in islice(_busy_first(children), limit) if left_out else children:
        if isinstance(child, Cell):
            found.append(_state(child, now, limit))
        elif isinstance(child, Supervisor):
            kind = type(child).__name__.lower()
            below = _states(child, now, limit)
            found.append(ActorState(child.name, kind, "open", 0, 0.0, 0, 0, 0, (), *below))
    return tuple(found), left_out


def _busy_first(children: Collection[Child]) -> Iterator[Child]:
    """Yield the children that are no idle actors, then the others."""
    idle = []
    for child in children:
        if (  # `is_idle`, at half its time: this passes over all actors in one go
            isinstance(child, Cell)
            and child.at_rest
            and (child.life is None or child.life.is_quiet)
        ):
            idle.append(child)
        else:
            yield child
    yield from idle


def _state(cell: Cell, now: float, limit: int) -> ActorState:
    children, left_out = _states(children_of(cell), now, limit)
    return ActorState(
        name=cell.name,
        kind="(not started)" if cell.actor is None else type(cell.actor).__name__,
        state=_state_word(cell),
        mailbox_depth=cell.depth,
        oldest_s=max((now - sent_at for sent_at in _heads(cell)), default=0.0),
        handled=cell.handled,
        failed=cell.failed,
        restarts=cell.restarts,
        effects=cell.effect_names,
        children=children,
        left_out=left_out,
    )


def _heads(cell: Cell) -> Iterator[float]:
    """Yield the time at which the first message of each lane was sent."""
    for lane in (cell.control, cell.mail):
        for item in lane:
            if isinstance(item, Order):
                continue
            yield item[1] if isinstance(item, tuple) else item.sent_at
            break


def _state_word(cell: Cell) -> str:
    if cell.at_rest:
        return "idle"
    if cell.phase in (Phase.LIVE, Phase.STARTING):
        return cell.doing or "ready"
    return str(cell.phase.value)


def children_of(cell: Cell) -> Supervisor | None:
    """Return the supervisor of an actor's children, if it has any."""
    below = None if cell.life is None else cell.life.children
    assert below is None or isinstance(below, Supervisor)
    return below


def cells_of(supervisor: Supervisor) -> Iterator[Cell]:
    """Yield every actor below, children before parents, the youngest first."""
    for child in reversed(tuple(supervisor.children.values())):
        if isinstance(child, Cell):
            if (below := children_of(child)) is not None:
                yield from cells_of(below)
            yield child
        elif isinstance(child, Supervisor):
            yield from cells_of(child)
