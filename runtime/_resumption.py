"""Suspended handlers: coroutines that wait, and the two ways to resume them.

A handler that waits for a `OneShot` needs no task: when the one-shot is set, the cell is stepped
again. A handler that waits for anything else keeps the worker that stepped it.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextvars import Context
from typing import Any, Final

from ._backend import OneShot, Waker
from ._inside import go_on_inside, run_inside

__all__ = ["UNSTARTED", "SuspendedHandler"]

UNSTARTED: Final = object()
"""Marks a handler that has not been stepped yet."""


class SuspendedHandler:
    """The coroutine of a handler that waits, or that has not been stepped yet."""

    __slots__ = ("_coroutine", "_yielded", "began", "count")

    # Any: the values that a coroutine yields and is sent belong to its backend.
    def __init__(
        self, coroutine: Coroutine[Any, Any, object], yielded: object, began: float, count: int
    ) -> None:
        self._coroutine = coroutine
        self._yielded = yielded
        self.began = began
        self.count = count
        """How many messages the handler was given."""

    def leave_to(self, cell: Waker) -> bool:
        """Have the cell woken when the handler can go on; False if it needs a task to wait in."""
        awaited = self._yielded
        if not isinstance(awaited, OneShot) or awaited.waker is not None:
            return False  # a one-shot has one waiter: a second one raises, in the task that waits
        awaited.waker = cell
        return True

    @property
    def is_due(self) -> bool:
        """True if the one-shot that the handler waits for is set."""
        return isinstance(self._yielded, OneShot) and self._yielded.is_done

    def attend(self) -> bool:
        """Undo `leave_to`, so that a task can wait instead; False if there is nothing to undo."""
        if isinstance(self._yielded, OneShot) and not self._yielded.is_done:
            self._yielded.waker = None
            return True
        return False

    def step(self, context: Context) -> None:
        """Run the handler to its next wait; raise `StopIteration` with its result at its end."""
        self._yielded = context.run(self._coroutine.send, None)

    async def finish(self, context: Context) -> object:
        """Run the rest of the handler, waiting in the running task."""
        if self._yielded is UNSTARTED:
            return await run_inside(context, self._coroutine)
        return await go_on_inside(context, self._coroutine, self._yielded)
