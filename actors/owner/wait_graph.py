"""The graph of turns that await conversations, so that a wait that would never end is refused.

A turn that awaits a later turn of its own conversation would wait for itself, and so would two
turns whose agents await each other. As with asks between actors, the wait that would close the
circle gets `AskCycle`. Used from one event loop, without locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from turnkeeper.runtime import AskCycle

__all__ = ["Inside", "WaitGraph", "turn_of"]


class WaitGraph:
    """The waits that are open now, from conversation id to conversation id."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[str]] = {}

    @contextmanager
    def wait(self, waiter: str, awaited: str) -> Iterator[None]:
        """While inside, note that `waiter` waits for `awaited`. Raises `AskCycle` for a cycle."""
        path = self._find(awaited, waiter)
        if path is not None:
            raise AskCycle(
                (waiter, *path),
                attempt="await of a turn",
                advice="send without awaiting the turn, or await it outside of this one",
            )
        self._waiting.setdefault(waiter, []).append(awaited)
        try:
            yield
        finally:
            self._waiting[waiter].remove(awaited)
            if not self._waiting[waiter]:
                del self._waiting[waiter]

    def _find(self, start: str, goal: str) -> tuple[str, ...] | None:
        """Return the path along which `start` waits for `goal`, or None."""
        ways: list[tuple[str, ...]] = [(start,)]
        seen = {start}
        for way in ways:
            if way[-1] == goal:
                return way
            for awaited in self._waiting.get(way[-1], ()):
                if awaited not in seen:
                    seen.add(awaited)
                    ways.append((*way, awaited))
        return None


@dataclass(slots=True)
class Inside:
    """The turn that code runs in: its conversation, and the graph that its waits belong to."""

    wait_graph: WaitGraph
    conversation_id: str
    is_over: bool = False
    """True once the turn has ended: tasks that it left running wait on their own behalf."""


turn_of: ContextVar[Inside] = ContextVar("turnkeeper_turn_of")
"""Set while code runs in a turn."""
