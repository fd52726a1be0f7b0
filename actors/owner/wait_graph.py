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


@dataclass(slots=True, eq=False)
class Inside:
    """The turn that code runs in: its conversation, and the graph that its waits belong to."""

    wait_graph: WaitGraph
    conversation_id: str
    task_id: int = 0
    """The `id` of the task that runs the agent; the task itself would be held too long."""
    is_over: bool = False
    """True once the turn has ended: tasks that it left running wait on their own behalf."""


class WaitGraph:
    """The waits that are open now, each from a turn to a conversation, by the turn's conversation.

    A wait that outlives its turn, in a task that the turn left running, holds up no conversation.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[Inside, str]]] = {}

    @contextmanager
    def wait(self, waiter: Inside, awaited: str) -> Iterator[None]:
        """While inside, note that `waiter` waits for `awaited`. Raises `AskCycle` for a cycle."""
        name = waiter.conversation_id
        path = self._find(awaited, name)
        if path is not None:
            raise AskCycle(
                (name, *path),
                attempt="await of a turn",
                advice="send without awaiting the turn, or await it outside of this one",
            )
        self._waiting.setdefault(name, []).append((waiter, awaited))
        try:
            yield
        finally:
            self._waiting[name].remove((waiter, awaited))
            if not self._waiting[name]:
                del self._waiting[name]

    def _find(self, start: str, goal: str) -> tuple[str, ...] | None:
        """Return the path along which `start` waits for `goal`, or None."""
        ways: list[tuple[str, ...]] = [(start,)]
        seen = {start}
        for way in ways:
            if way[-1] == goal:
                return way
            for waiter, awaited in self._waiting.get(way[-1], ()):
                if awaited not in seen and not waiter.is_over:
                    seen.add(awaited)
                    ways.append((*way, awaited))
        return None


turn_of: ContextVar[Inside] = ContextVar("turnkeeper_turn_of")
"""Set while code runs in a turn."""
