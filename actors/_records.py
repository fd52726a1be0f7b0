"""Events as records: what the journal is given, and what is made of what it gives back."""

from __future__ import annotations

from .errors import CorruptLog
from .events import (
    Event,
    LoggedEvent,
    MessageQueuedEvent,
    UserMessageEvent,
    decode_event,
    encode_event,
)
from .journal import Record, StoredRecord

__all__ = ["logged_event", "record_of"]


def record_of(event: Event) -> Record:
    """The record that keeps this event. A message id goes with the first event that carries it."""
    message_id = None
    if (isinstance(event, MessageQueuedEvent) and not event.queued_again) or (
        isinstance(event, UserMessageEvent) and event.queued_event_id is None
    ):
        message_id = event.message_id
    return Record(event.id, event.kind, encode_event(event), message_id)


def logged_event(conversation_id: str, record: StoredRecord) -> LoggedEvent:
    """The event of a record; `CorruptLog` where it holds none that could have been written."""
    try:
        return LoggedEvent(record.seq, decode_event(record.payload, kind=record.kind))
    except ValueError as error:
        found = f"the record is no {record.kind} event ({type(error).__name__})"
        raise CorruptLog(conversation_id, record.seq, found) from error
