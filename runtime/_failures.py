"""Tells an actor's own failures from cancellations and interrupts. Owns no state."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from ._backend import is_closing, uncancel
from ._pool import Host
from ._reports import Failure
from ._supervision import leaves
from .errors import ActorFailed, TurnkeeperError

__all__ = ["as_failure", "error_for_asker"]


def as_failure(
    actor: str, error: BaseException, host: Host | None, report: Callable[[Failure], None]
) -> BaseException:
    """Return the actor's own failure in `error`, which was raised in the task of `host`.

    Raises an error that is not the actor's own: an interrupt of the program, the closing of a
    coroutine, and a cancellation that the runtime asked for. If a group holds other errors besides
    such a cancellation, they are reported.
    """
    if host is not None:
        host.leave_scopes()  # the actor's recovery and its last hook run in the same task
    cancelled = anyio.get_cancelled_exc_class()
    found = tuple(leaves(error))
    if is_closing(error) or any(isinstance(leaf, KeyboardInterrupt | SystemExit) for leaf in found):
        raise error
    if not any(isinstance(leaf, cancelled) for leaf in found):
        return error
    rest = error.split(cancelled)[1] if isinstance(error, BaseExceptionGroup) else None
    if host is not None and host.is_killed:
        if rest is not None:
            report(Failure(actor, rest, "its cancellation goes on"))
        goes_on = next(leaf for leaf in found if isinstance(leaf, cancelled))
        try:
            raise goes_on
        finally:
            # The error's traceback holds this frame; the frame must not hold the error as well.
            del error, found, rest, goes_on
    # The runtime did not cancel it: a library did so natively, or a scope that the actor itself
    # holds open was cancelled. Either way it is this actor's failure alone.
    uncancel()
    if rest is not None:
        return rest
    failure = ActorFailed(actor, "its task was cancelled by neither it nor the runtime")
    failure.__cause__ = error
    return failure


def error_for_asker(actor: str, error: BaseException) -> BaseException:
    """Return one of the five kinds as it is, and any other error inside `ActorFailed`."""
    if isinstance(error, TurnkeeperError):
        return error
    wrapped = ActorFailed(actor, f"it raised {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped
