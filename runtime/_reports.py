"""The reports that the runtime publishes about its actors on the event stream."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "DeadLetter",
    "Failure",
    "LoopBlocked",
    "RegionOverflow",
    "Restart",
    "Stopped",
    "Stuck",
]


class Failure(NamedTuple):
    """An actor failed; `decision` is its supervisor's."""

    actor: str
    error: BaseException
    decision: str


class Restart(NamedTuple):
    """An actor has started again; `restarts` counts how often."""

    actor: str
    restarts: int


class Stopped(NamedTuple):
    """An actor has stopped for good; `error` is the cause, if there was one."""

    actor: str
    error: BaseException | None


class Stuck(NamedTuple):
    """An actor swallowed its cancellation. It was detached; its task may still be running."""

    actor: str
    doing: str


class DeadLetter(NamedTuple):
    """A message that reached no actor, with the reason."""

    message: object
    actor: str
    reason: str


class LoopBlocked(NamedTuple):
    """Code in the event loop did not yield for `seconds` or longer; `stack` is what it was doing.

    Published once the loop goes on; the log line comes while it is blocked.
    """

    seconds: float
    stack: str


class RegionOverflow(NamedTuple):
    """All active actors of a region are busy, and there are more of them than `active_max`."""

    region: str
    active: int
    active_max: int
