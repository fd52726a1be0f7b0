"""The transcript of a conversation: what people said and were told, and the calls. Pure.

It leaves out what was retracted or rolled back, and keeps what was condensed: a person still reads
that, though the model does not. Messages that still wait are its last events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    LoggedEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    ObservationEvent,
    RetractionEvent,
    UserMessageEvent,
    UserRejectEvent,
)
from .snapshots import SLICE_EVENTS, Slices, run_whole

__all__ = ["Transcript"]

_SHOWN = (
    UserMessageEvent,
    AgentMessageEvent,
    ActionEvent,
    ObservationEvent,
    AgentErrorEvent,
    UserRejectEvent,
)


class Transcript:
    """A fold of the log, one event at a time."""

    def __init__(self) -> None:
        self._log: list[LoggedEvent] = []
        """Every event that is kept, those about turns too, in order."""
        self._retracted: set[str] = set()
        self.retracted_at = 0
        """The seq of the newest retraction; 0 if there is none."""
        self._waiting: dict[str, LoggedEvent] = {}

    @classmethod
    def of(cls, log: Iterable[LoggedEvent]) -> Transcript:
        transcript = cls()
        for logged in log:
            transcript.fold(logged)
        return transcript

    def fold(self, logged: LoggedEvent) -> None:
        """Take in the next event of the log."""
        match logged.event:
            case RetractionEvent(retracted_event_ids=ids):
                self._retracted.update(ids)
                self.retracted_at = logged.seq
            case MessageQueuedEvent(message_id=message_id):
                self._waiting[message_id] = logged
            case MessageWithdrawnEvent(message_id=message_id):
                self._waiting.pop(message_id, None)
            case UserMessageEvent(message_id=str(message_id)):
                self._waiting.pop(message_id, None)
                self._log.append(logged)
            case UserMessageEvent(is_reminder=True):
                pass
            case _:
                self._log.append(logged)

    @property
    def log(self) -> Sequence[LoggedEvent]:
        """The events of the log, those retracted too; without reminders and waiting messages."""
        return tuple(self._log)

    def is_retracted(self, event_id: str) -> bool:
        return event_id in self._retracted

    @property
    def waiting(self) -> Sequence[LoggedEvent]:
        """The chat messages that wait for their turn."""
        return tuple(self._waiting.values())

    @property
    def kept(self) -> Sequence[LoggedEvent]:
        """The events of the log without those retracted; those about turns and steps too."""
        return [logged for logged in self._log if logged.event.id not in self._retracted]

    @property
    def said(self) -> Sequence[LoggedEvent]:
        """The messages of people and agents, and the calls."""
        return run_whole(self.finding_said())

    def finding_said(self) -> Slices[Sequence[LoggedEvent]]:
        """Return `said`, found in slices."""
        said: list[LoggedEvent] = []
        for at in range(0, len(self._log), SLICE_EVENTS):
            if at:
                yield
            said += filter(self._is_said, self._log[at : at + SLICE_EVENTS])
        return said

    def _is_said(self, logged: LoggedEvent) -> bool:
        return isinstance(logged.event, _SHOWN) and not self.is_retracted(logged.event.id)
