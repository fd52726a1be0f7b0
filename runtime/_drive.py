"""Running a coroutine inside a context that is not its task's own.

A worker's task serves one actor after the other, and each actor has a context of its own: what
one handler binds must not leak into the next. So a handler's coroutine is stepped inside its
actor's context, and what it yields is passed on to the task, which neither backend can tell.
"""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

from ._backend import OneShot

__all__ = ["drive", "drive_on"]

T = TypeVar("T")


# Any, here and below: what a coroutine yields and is sent is between it and its backend.
@types.coroutine
def drive_on(
    context: Context,
    coroutine: Coroutine[Any, Any, T],
    yielded: Any,  # noqa: ANN401
) -> Generator[Any, Any, T]:
    """The rest of a coroutine that has yielded once already."""
    try:
        while True:
            try:
                if type(yielded) is OneShot:
                    yield from yielded.wait_until_done().__await__()
                    sent = None
                else:
                    sent = yield yielded
            except GeneratorExit:
                context.run(coroutine.close)
                raise
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's to handle
                yielded = context.run(coroutine.throw, error)
            else:
                yielded = context.run(coroutine.send, sent)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def drive(context: Context, coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine, with every step of it inside the context."""
    try:
        yielded = context.run(coroutine.send, None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    return await drive_on(context, coroutine, yielded)
