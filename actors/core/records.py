"""Events as records: encoded for the journal, and decoded from what it stored."""

from __future__ import annotations

from ..errors import CorruptLog
from ..events import (
    Event,
    LoggedEvent,
    MessageQueuedEvent,
    UserMessageEvent,
    decode_event,
    encode_event,
)
from ..journal import Record, StoredRecord

__all__ = ["decode_record", "encode_record", "event_of_record"]

# A look at the kind costs a quarter of an `isinstance` that fails; so in the folds, too.
_CHAT_KINDS = ("user_message", "message_queued")


def encode_record(event: Event, written: bytes | None = None) -> Record:
    """Return the record of this event; `written` is its JSON, if that is at hand.

    A message id goes with the first event that carries it.
    """
    message_id = None
    if event.kind in _CHAT_KINDS and (
        (isinstance(event, UserMessageEvent) and event.queued_event_id is None)
        or (isinstance(event, MessageQueuedEvent) and not event.queued_again)
    ):
        message_id = event.message_id
    return Record(event.id, event.kind, written or encode_event(event), message_id)


def decode_record(conversation_id: str, record: StoredRecord) -> LoggedEvent:
    """Return the event of a record, with its place. Raises as `event_of_record` does."""
    return LoggedEvent(record.seq, event_of_record(conversation_id, record))


def event_of_record(conversation_id: str, record: StoredRecord) -> Event:
    """Return the event of a record. Raise `CorruptLog` if the record holds no valid event."""
    try:
        return decode_event(record.payload, kind=record.kind)
    except ValueError as error:
        found = f"the record is no {record.kind} event ({type(error).__name__})"
        raise CorruptLog(conversation_id, record.seq, found) from error
