"""Suspended handlers: coroutines that wait, and the two ways to resume them.

A handler that waits for a `OneShot` needs no task: when the one-shot is set, the cell is stepped
again. A handler that waits for anything else keeps the worker that stepped it.

The cell itself holds the coroutine and what it has yielded. A thousand handlers may wait at once,
and an object for each would be one more for the garbage collector to look at.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from contextvars import Context
from typing import Any, Final

from ._backend import OneShot, Waker
from ._inside import go_on_inside, run_inside

__all__ = ["UNSTARTED", "attend", "finish", "is_due", "leave_to"]

UNSTARTED: Final = object()
"""Stands for what a handler has yielded that has not been stepped yet."""


def leave_to(cell: Waker, yielded: object) -> bool:
    """Have the cell woken when its handler can go on; False if it needs a task to wait in."""
    if not isinstance(yielded, OneShot) or yielded.waker is not None:
        return False  # a one-shot has one waiter: a second one raises, in the task that waits
    yielded.waker = cell
    return True


def is_due(yielded: object) -> bool:
    """Return True if the one-shot that a handler waits for is set."""
    return isinstance(yielded, OneShot) and yielded.is_done


def attend(cell: Waker, yielded: object) -> bool:
    """Undo `leave_to`, so that a task can wait instead; False if there is nothing to undo."""
    if isinstance(yielded, OneShot) and yielded.waker is cell:
        yielded.waker = None
        return True
    return False


# Any: the values that a coroutine yields and is sent belong to its backend.
def finish(
    coroutine: Coroutine[Any, Any, object], yielded: object, context: Context
) -> Awaitable[object]:
    """Return an awaitable that runs the rest of a handler, waiting in the task that awaits it."""
    if yielded is UNSTARTED:
        return run_inside(context, coroutine)
    return go_on_inside(context, coroutine, yielded)
