"""Running a coroutine inside a context that is not its task's own.

A worker's task serves one actor after the other, and each actor has a context of its own:
variables that one handler sets must not leak into the next. So a handler's coroutine is stepped
inside its actor's context, and its yields are passed on to the task. Neither backend notices.
"""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

from ._backend import OneShot

__all__ = ["go_on_inside", "run_inside"]

T = TypeVar("T")


# Any, here and below: the values that a coroutine yields and is sent belong to its backend.
@types.coroutine
def go_on_inside(
    context: Context,
    coroutine: Coroutine[Any, Any, T],
    yielded: Any,  # noqa: ANN401
) -> Generator[Any, Any, T]:
    """Run the rest of a coroutine that has yielded `yielded`, inside the context."""
    try:
        while True:
            try:
                if isinstance(yielded, OneShot):
                    yield from yielded.wait_until_done().__await__()
                    sent = None
                else:
                    sent = yield yielded
            except GeneratorExit:
                context.run(coroutine.close)
                raise
            except BaseException as error:  # noqa: BLE001 - passed on into the coroutine
                yielded = context.run(coroutine.throw, error)
            else:
                yielded = context.run(coroutine.send, sent)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        # An error's traceback holds this frame. On trio, so do a cancellation that was sent and a
        # value that was yielded. If the frame held them as well, these would be reference cycles.
        sent = yielded = None


async def run_inside(context: Context, coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine, with every step of it inside the context."""
    try:
        yielded = context.run(coroutine.send, None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    return await go_on_inside(context, coroutine, yielded)
