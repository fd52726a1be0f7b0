"""Which turns wait for which conversations, so that a circle is refused and not waited in.

A turn that awaits a turn of its own conversation would wait for itself: the other comes after it.
So would two whose agents await each other. Like an ask between actors, the one that would close
the circle gets `AskCycle`. Used from one event loop, without locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from turnkeeper.runtime import AskCycle

__all__ = ["Inside", "Waits", "turn_of"]


class Waits:
    """Who waits for whom, by conversation id."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[str]] = {}

    @contextmanager
    def wait(self, waiter: str, awaited: str) -> Iterator[None]:
        """While inside, `waiter` waits for `awaited`. Raises `AskCycle` where that never ends."""
        path = self._find(awaited, waiter)
        if path is not None:
            raise AskCycle((waiter, *path))
        self._waiting.setdefault(waiter, []).append(awaited)
        try:
            yield
        finally:
            self._waiting[waiter].remove(awaited)
            if not self._waiting[waiter]:
                del self._waiting[waiter]

    def _find(self, start: str, goal: str) -> tuple[str, ...] | None:
        """The way along which `start` waits for `goal`, if there is one."""
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
    """The turn that some code runs in: of which conversation, and among which waits."""

    waits: Waits
    conversation_id: str
    is_over: bool = False
    """The turn has ended, and what it has started and left running waits for itself alone."""


turn_of: ContextVar[Inside] = ContextVar("turnkeeper_turn_of")
"""The turn that this code runs in, if it runs in one."""
