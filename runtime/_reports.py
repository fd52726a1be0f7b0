"""The reports that the runtime publishes about its actors on the event stream."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeadLetter", "Failure", "RegionOverflow", "Restart", "Stopped", "Stuck"]


@dataclass(frozen=True, slots=True)
class Failure:
    """An actor failed; `decision` is its supervisor's."""

    actor: str
    error: BaseException
    decision: str


@dataclass(frozen=True, slots=True)
class Restart:
    """An actor has started again; `restarts` counts how often."""

    actor: str
    restarts: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """An actor has stopped for good; `error` is the cause, if there was one."""

    actor: str
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Stuck:
    """An actor swallowed its cancellation. It was detached; its task may still be running."""

    actor: str
    doing: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that reached no actor, with the reason."""

    message: object
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class RegionOverflow:
    """All active actors of a region are busy, and there are more of them than `active_max`."""

    region: str
    active: int
    active_max: int
