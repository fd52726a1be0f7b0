"""The steps of a log: each model call with the request, the response's facts, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from ..events import (
    LoggedEvent,
    StepFinishedEvent,
    StepRequest,
    StepUnfinishedEvent,
    TokenUsage,
)

__all__ = ["Step", "step_of"]


@dataclass(frozen=True, slots=True)
class Step:
    """One model call of a turn, as the log has it."""

    seq: int
    """The seq of the event that ended it."""
    turn_id: str | None
    outcome: Literal["finished", "interrupted", "failed"]
    ended_at: datetime
    usage: TokenUsage
    """Its tokens, cost and time; of a step that was not finished, its time alone."""
    request: StepRequest | None
    """None if its agent does not say which view the model saw."""
    response_id: str | None
    """The id that the provider gave the response."""

    @property
    def view_seq(self) -> int | None:
        """The seq at which `conversation.at` has the view that the model saw."""
        return None if self.request is None else self.request.view_seq

    @property
    def model(self) -> str | None:
        """The name of the model."""
        return self.usage.model or (None if self.request is None else self.request.model)


def step_of(logged: LoggedEvent) -> Step | None:
    """Return the step that this event ended; None if it ended none."""
    seq, event = logged
    match event:
        case StepFinishedEvent():
            outcome: Literal["finished", "interrupted", "failed"] = "finished"
            response_id = event.response_id
        case StepUnfinishedEvent():
            outcome, response_id = event.outcome, None
        case _:
            return None
    return Step(
        seq, event.turn_id, outcome, event.timestamp, event.usage, event.request, response_id
    )
