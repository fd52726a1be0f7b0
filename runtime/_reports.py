"""What the runtime reports about its actors; published on the event stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._ref import Ref

__all__ = ["DeadLetter", "Failure", "RegionOverflow", "Restart", "Stopped", "Stuck", "Terminated"]


@dataclass(frozen=True, slots=True)
class Failure:
    """An actor failed, and what its supervisor decided."""

    actor: str
    error: BaseException
    decision: str


@dataclass(frozen=True, slots=True)
class Restart:
    """An actor has started again, for the so manieth time."""

    actor: str
    restarts: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """An actor has stopped for good, or has been passivated; the error is why, if one was."""

    actor: str
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Stuck:
    """An actor swallows its cancellation. It was detached; its task may spin on."""

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
    """All active actors of a region are busy, and there are more of them than it wants."""

    region: str
    active: int
    active_max: int


@dataclass(frozen=True, slots=True)
class Terminated:
    """The notice that a watcher gets: the actor has stopped for good."""

    ref: Ref[Any]
    error: BaseException | None
