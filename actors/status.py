"""Whether the agent runs, waits or is done: a fold of the log over one table of transitions.

`TRANSITIONS` is all that there is: the fold takes no other step, and the diagram in
`docs/conversation-core.md` is drawn from it. An event that asks for a status that the table does
not lead to changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from .events import (
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    Event,
    PausedEvent,
    ResumedEvent,
    StatusChangedEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
)

__all__ = ["TRANSITIONS", "AgentExecutionStatus", "StatusFold"]


class AgentExecutionStatus(StrEnum):
    """What the agent of a conversation is doing."""

    IDLE = "IDLE"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    WAITING_FOR_CONFIRMATION = "WAITING_FOR_CONFIRMATION"
    FINISHED = "FINISHED"
    ERROR = "ERROR"
    STUCK = "STUCK"


_IDLE = AgentExecutionStatus.IDLE
_RUNNING = AgentExecutionStatus.RUNNING
_PAUSED = AgentExecutionStatus.PAUSED
_WAITING = AgentExecutionStatus.WAITING_FOR_CONFIRMATION
_FINISHED = AgentExecutionStatus.FINISHED
_ERROR = AgentExecutionStatus.ERROR
_STUCK = AgentExecutionStatus.STUCK

TRANSITIONS: Mapping[AgentExecutionStatus, Mapping[AgentExecutionStatus, str]] = {
    _IDLE: {_RUNNING: "turn started", _PAUSED: "paused"},
    _RUNNING: {
        _IDLE: "turn interrupted or rolled back",
        _PAUSED: "paused",
        _WAITING: "confirmation asked",
        _FINISHED: "turn completed",
        _ERROR: "turn failed",
        _STUCK: "stuck",
    },
    _PAUSED: {
        _IDLE: "turn interrupted or rolled back, or resumed without a turn",
        _RUNNING: "resumed",
        _WAITING: "resumed while a confirmation is asked",
        _FINISHED: "turn completed",
        _ERROR: "turn failed",
    },
    _WAITING: {
        _IDLE: "turn interrupted or rolled back",
        _RUNNING: "confirmed or rejected",
        _PAUSED: "paused",
        _FINISHED: "turn completed",
        _ERROR: "turn failed",
    },
    _FINISHED: {_IDLE: "user message"},
    _ERROR: {_IDLE: "user message"},
    _STUCK: {_IDLE: "user message"},
}
"""From each status, those that may follow it, with what leads there."""

_MOVING_KINDS = frozenset(
    event_class.model_fields["kind"].default
    for event_class in (
        UserMessageEvent,
        TurnStartedEvent,
        TurnEndedEvent,
        ConfirmationRequestedEvent,
        ConfirmationGivenEvent,
        PausedEvent,
        ResumedEvent,
        StatusChangedEvent,
    )
)
_AT_REST = (_FINISHED, _ERROR, _STUCK)
_AFTER_TURN = {
    "completed": _FINISHED,
    "interrupted": _IDLE,
    "rolled_back": _IDLE,
    "failed": _ERROR,
}


@dataclass(frozen=True, slots=True)
class StatusFold:
    """The status, and while it is paused, what it goes back to; a value, replaced at each event."""

    status: AgentExecutionStatus = _IDLE
    resumes_as: AgentExecutionStatus = _IDLE

    def fold(self, event: Event) -> StatusFold:
        """The status after this event of the log."""
        if event.kind not in _MOVING_KINDS:
            return self
        match event:
            case UserMessageEvent():
                return _moved(self, _IDLE) if self.status in _AT_REST else self
            case TurnStartedEvent():
                rested = _moved(self, _IDLE) if self.status in _AT_REST else self
                return _moved(rested, _RUNNING)
            case TurnEndedEvent(outcome=outcome):
                # A stuck turn ends as well; what it was is not overwritten by how it ended.
                return self if self.status is _STUCK else _moved(self, _AFTER_TURN[outcome])
            case ConfirmationRequestedEvent():
                return _beneath_pause(self, _WAITING)
            case ConfirmationGivenEvent():
                return _beneath_pause(self, _RUNNING)
            case PausedEvent() if self.status is not _PAUSED:
                rested = _moved(self, _IDLE) if self.status in _AT_REST else self
                return StatusFold(_moved(rested, _PAUSED).status, rested.status)
            case ResumedEvent():
                return _moved(self, self.resumes_as) if self.status is _PAUSED else self
            case StatusChangedEvent(status=wanted):
                known = wanted in AgentExecutionStatus.__members__
                return _moved(self, AgentExecutionStatus(wanted)) if known else self
            case _:
                return self


def _moved(fold: StatusFold, status: AgentExecutionStatus) -> StatusFold:
    return StatusFold(status, fold.resumes_as) if status in TRANSITIONS[fold.status] else fold


def _beneath_pause(fold: StatusFold, status: AgentExecutionStatus) -> StatusFold:
    """A pause holds until it is resumed; what happens meanwhile is what it resumes as."""
    return StatusFold(fold.status, status) if fold.status is _PAUSED else _moved(fold, status)
