"""The status of a conversation's agent: a fold of the log over one table of transitions.

The fold takes no step that is not in `TRANSITIONS`, and the diagram in `docs/conversation-core.md`
is drawn from that table. An event that asks for any other step changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ..events import Event, StatusChangedEvent, TurnEndedEvent

__all__ = ["MOVING_KINDS", "TRANSITIONS", "AgentExecutionStatus", "StatusFold"]


class AgentExecutionStatus(StrEnum):
    """The state that the agent of a conversation is in."""

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
"""From each status, the statuses that may follow it, each with its cause."""

MOVING_KINDS = frozenset(
    (
        "user_message",
        "turn_started",
        "turn_ended",
        "confirmation_requested",
        "confirmation_given",
        "paused",
        "resumed",
        "status_changed",
    )
)
"""The kinds that may change the status."""
_AT_REST = (_FINISHED, _ERROR, _STUCK)
_AFTER_TURN = {
    "completed": _FINISHED,
    "interrupted": _IDLE,
    "rolled_back": _IDLE,
    "failed": _ERROR,
}


@dataclass(frozen=True, slots=True)
class StatusFold:
    """The status, and the one that a pause ends in; a value, replaced as the status moves."""

    status: AgentExecutionStatus = _IDLE
    resumes_as: AgentExecutionStatus = _IDLE

    def fold(self, event: Event) -> StatusFold:
        """Return the status after this event of the log."""
        # Matched by kind: a pydantic class that does not match costs ten times as much.
        match event.kind:
            case "user_message":
                return _readied(self)
            case "turn_started":
                return _moved(_readied(self), _RUNNING)
            case "turn_ended":
                assert isinstance(event, TurnEndedEvent), event.kind
                # A stuck turn ends as well; its end does not overwrite that it was stuck.
                return self if self.status is _STUCK else _moved(self, _AFTER_TURN[event.outcome])
            case "confirmation_requested":
                return _beneath_pause(self, _WAITING)
            case "confirmation_given":
                return _beneath_pause(self, _RUNNING)
            case "paused" if self.status is not _PAUSED:
                ready = _readied(self)
                return _FOLDS[_moved(ready, _PAUSED).status, ready.status]
            case "resumed":
                return _moved(self, self.resumes_as) if self.status is _PAUSED else self
            case "status_changed":
                assert isinstance(event, StatusChangedEvent), event.kind
                known = event.status in AgentExecutionStatus.__members__
                return _moved(self, AgentExecutionStatus(event.status)) if known else self
            case _:
                return self


def _moved(fold: StatusFold, status: AgentExecutionStatus) -> StatusFold:
    return _FOLDS[status, fold.resumes_as] if status in TRANSITIONS[fold.status] else fold


def _readied(fold: StatusFold) -> StatusFold:
    """Leave behind how the last turn ended."""
    return _moved(fold, _IDLE) if fold.status in _AT_REST else fold


def _beneath_pause(fold: StatusFold, status: AgentExecutionStatus) -> StatusFold:
    """Move to this status; under a pause, note it as the status in which the pause ends."""
    return _FOLDS[fold.status, status] if fold.status is _PAUSED else _moved(fold, status)


_FOLDS: Final = {
    (status, resumes_as): StatusFold(status, resumes_as)
    for status in AgentExecutionStatus
    for resumes_as in AgentExecutionStatus
}
"""All values, which all conversations share."""
