"""Which turns wait for which conversations, so that a circle is refused and not waited in.

A turn that awaits a turn of its own conversation would wait for itself: the other comes after it.
So would two whose agents await each other. Like an ask between actors, the one that would close
the circle gets `AskCycle`. Used from one event loop, without locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from turnkeeper.runtime import AskCycle

__all__ = ["Waits", "turn_of"]

turn_of: ContextVar[str] = ContextVar("turnkeeper_turn_of")
"""The conversation whose turn this code runs in, if it runs in one."""


class Waits:
    """Who waits for whom, by conversation id."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[str]] = {}

    @contextmanager
    def wait(self, waiter: str, awaited: str) -> Iterator[None]:
        """While inside, `waiter` waits for `awaited`. Raises `AskCycle` where that never ends."""
        path = self._find(awaited, waiter, ())
        if path is not None:
            raise AskCycle((waiter, *path))
        self._waiting.setdefault(waiter, []).append(awaited)
        try:
            yield
        finally:
            self._waiting[waiter].remove(awaited)
            if not self._waiting[waiter]:
                del self._waiting[waiter]

    def _find(self, start: str, goal: str, behind: tuple[str, ...]) -> tuple[str, ...] | None:
        """The way along which `start` waits for `goal`; none waits in a circle, so it ends."""
        behind = (*behind, start)
        if start == goal:
            return behind
        ways = (self._find(next_one, goal, behind) for next_one in self._waiting.get(start, ()))
        return next((way for way in ways if way is not None), None)
