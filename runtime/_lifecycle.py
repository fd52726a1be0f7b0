"""The phases of a cell, and the one table of what may follow each. Pure.

A cell makes the transitions of `TRANSITIONS` and no other: `transition` refuses the rest. How mail
and orders are treated in each phase stands beside the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

__all__ = [
    "AFTER",
    "ENDED",
    "LIVE",
    "MAIL",
    "TRANSITIONS",
    "After",
    "Mail",
    "Phase",
    "is_over",
    "is_waiting",
    "phase_after",
    "transition",
]


class Phase(Enum):
    STARTING = "starting"
    """A new incarnation is due, or runs its `on_start`. Mail waits."""
    LIVE = "live"
    """It handles mail."""
    CLEANING = "cleaning up"
    """The incarnation ends, and the cell stays. Mail waits."""
    BACKOFF = "backing off"
    """It failed, and starts again after a delay. Mail waits."""
    HELD = "held"
    """Its supervisor holds it until its siblings are ready. Mail waits."""
    REFUSING = "refusing"
    """It failed too often. Mail is refused for a while."""
    STOPPING = "stopping"
    """The incarnation ends, and the cell with it. Mail is handed back."""
    ENDED = "ended"
    """It is gone. Mail is handed back."""

    __hash__ = object.__hash__  # that of an Enum is a call of Python's, at each look into a table


# Named here for speed: each message needs them, and `Phase.X` is a slow lookup.
LIVE: Final = Phase.LIVE
ENDED: Final = Phase.ENDED


class After(Enum):
    """The decision about what follows once an incarnation has been cleaned up."""

    START = "start the next one"
    BACK_OFF = "start the next one after a delay"
    HOLD = "wait until the supervisor releases it"
    PASSIVATE = "leave the directory, unless there is mail"
    REFUSE = "refuse all mail for a while"
    END = "stop for good"


class Mail(Enum):
    """How a cell treats a message."""

    TAKEN = "it is queued, under the mailbox's settings"
    REFUSED = "its sender gets the error that made the cell refuse"
    RETURNED = "it is handed back to its sender, or becomes a dead letter"


TRANSITIONS: Final[Mapping[Phase, Mapping[Phase, str]]] = {
    Phase.STARTING: {
        Phase.LIVE: "started",
        Phase.CLEANING: "failed to start, or ordered to hold or to leave",
        Phase.STOPPING: "ordered to stop, or failed to start for good",
        Phase.ENDED: "stuck, or the runtime is gone",
    },
    Phase.LIVE: {
        Phase.CLEANING: "failed, or ordered to hold or to leave",
        Phase.STOPPING: "ordered to stop, or failed for good",
        Phase.ENDED: "stuck, or the runtime is gone, or stopped while it had nothing to clean up",
    },
    Phase.CLEANING: {
        Phase.STARTING: "cleaned up, and restarted at once; or mail came while it passivated",
        Phase.BACKOFF: "cleaned up, and restarted after a delay",
        Phase.HELD: "cleaned up, and held",
        Phase.REFUSING: "cleaned up, and failed too often",
        Phase.ENDED: "passivated, or stuck, or the runtime is gone",
    },
    Phase.BACKOFF: {
        Phase.STARTING: "waited long enough",
        Phase.CLEANING: "ordered to hold or to leave",
        Phase.STOPPING: "ordered to stop",
        Phase.ENDED: "the runtime is gone",
    },
    Phase.HELD: {
        Phase.STARTING: "released",
        Phase.CLEANING: "ordered to leave",
        Phase.STOPPING: "ordered to stop",
        Phase.ENDED: "the runtime is gone",
    },
    Phase.REFUSING: {
        Phase.CLEANING: "ordered to hold or to leave",
        Phase.STOPPING: "ordered to stop",
        Phase.ENDED: "refused long enough, or the runtime is gone",
    },
    Phase.STOPPING: {Phase.ENDED: "cleaned up, or stuck, or the runtime is gone"},
    Phase.ENDED: {},
}
"""From each phase, those that may follow it, with what leads there."""

AFTER: Final[Mapping[After, Phase]] = {
    After.START: Phase.STARTING,
    After.BACK_OFF: Phase.BACKOFF,
    After.HOLD: Phase.HELD,
    After.PASSIVATE: Phase.ENDED,
    After.REFUSE: Phase.REFUSING,
    After.END: Phase.ENDED,
}

MAIL: Final[Mapping[Phase, Mail]] = {
    Phase.STARTING: Mail.TAKEN,
    Phase.LIVE: Mail.TAKEN,
    Phase.CLEANING: Mail.TAKEN,
    Phase.BACKOFF: Mail.TAKEN,
    Phase.HELD: Mail.TAKEN,
    Phase.REFUSING: Mail.REFUSED,
    Phase.STOPPING: Mail.RETURNED,
    Phase.ENDED: Mail.RETURNED,
}


def transition(phase: Phase, to: Phase) -> Phase:
    """Return `to`; fail if the table does not lead there."""
    assert to in TRANSITIONS[phase], f"no transition from {phase.value} to {to.value}"
    return to


def is_over(phase: Phase) -> bool:
    """True if the cell takes no orders any more: it ends, or has ended."""
    return phase is Phase.STOPPING or phase is Phase.ENDED


def is_waiting(phase: Phase) -> bool:
    """True if no runner steps the cell until an alarm, its supervisor or an order wakes it."""
    return phase is Phase.BACKOFF or phase is Phase.HELD or phase is Phase.REFUSING


def phase_after(after: After, *, has_mail: bool) -> Phase:
    """Return the phase that follows the clean-up of an incarnation."""
    if after is After.PASSIVATE and has_mail:
        return Phase.STARTING
    return AFTER[after]
