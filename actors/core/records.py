"""Events as records: encoded for the journal, and decoded from what it stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from functools import cache
from typing import Final

from ..errors import CorruptLog, InvalidInput
from ..events import (
    FLAT_TYPES,
    Event,
    LoggedEvent,
    MessageQueuedEvent,
    UserMessageEvent,
    decode_event,
    encode_event,
    is_validated,
)
from ..journal import Record, StoredRecord
from ..values.text import EVENT_LENGTH_MAX, check_length, check_new_id, error_text
from ..values.type_names import a_type
from ..values.upcasters import UPCASTERS

__all__ = [
    "check_texts",
    "check_written",
    "decode_record",
    "encode_record",
    "events_of_kinds",
    "events_of_records",
    "write_event",
]

# Found by kind, here and in the folds: it costs a quarter of an `isinstance` that fails.
_CHAT_KINDS = ("user_message", "message_queued")


def write_event(event: Event) -> bytes:
    """Return the event as JSON. Raise `InvalidInput` if it would not be read back as it is.

    pydantic checks nothing in `model_construct` and `model_copy`, and a subclass may hold more than
    its kind allows. One such record would make the log unreadable. So an event that is not known to
    be checked is read back here. Whether pydantic warns of values of `FLAT_TYPES`, and reads them
    back, depends on the class and the types alone, so it is asked once for each.
    """
    is_flat = check_texts(event) and is_validated(event)
    shape = (type(event), *map(type, event.__dict__.values()))
    try:
        if is_flat and shape in _known_shapes:
            written = encode_event(event)
            check_written(event, written)
            return written
        written = _write_and_read_back(event)
    except InvalidInput:
        raise  # it says what is wrong already
    except ValueError as error:
        said = f"{a_type(event)} holds an invalid value: {error_text(error)}"
        raise InvalidInput(f"{said}; make it by its constructor, which checks it") from error
    if is_flat and not _has_choices(type(event)) and len(_known_shapes) < _KNOWN_SHAPES_MAX:
        _known_shapes.add(shape)
    return written


def _write_and_read_back(event: Event) -> bytes:
    check_new_id("kind", event.kind)
    # pydantic takes as long to read `warnings="error"` as to write the JSON: it raises an error
    # inside, and gives the interpreter lock to any thread that waits for it.
    written = event.__pydantic_serializer__.to_json(event, warnings="error")
    check_written(event, written)
    read = type(decode_event(written))  # pydantic never warns of None, which few fields take
    if read is not type(event):
        raise InvalidInput(f"{a_type(event)} would be read as {read.__name__}")
    return written


_known_shapes: Final[set[tuple[type, ...]]] = set()
_KNOWN_SHAPES_MAX: Final = 1_024


@cache
def _has_choices(event_class: type[Event]) -> bool:
    """Return True if a field takes only certain values of its type, of which pydantic never warns.

    The kind does, too, but is compared with the class anyway.
    """
    fields = event_class.model_fields.items()
    return any("Literal[" in repr(field.annotation) for name, field in fields if name != "kind")


def check_texts(event: Event) -> bool:
    """Raise `InvalidInput` if one text of an event alone makes its JSON too long.

    Looked at before the JSON is written, which takes a second for 100 MiB and stops the event loop.
    Return True if the event holds nothing but texts, booleans and times in UTC: one pass finds out
    both.
    """
    is_flat = True
    for part in filter(None, event.__dict__.values()):  # most fields are None
        kind = type(part)
        if kind is str:
            if len(part) > EVENT_LENGTH_MAX:
                check_length(a_type(event), len(part), EVENT_LENGTH_MAX)
        elif kind not in FLAT_TYPES or (kind is datetime and part.tzinfo is not UTC):
            is_flat = False
    return is_flat


def check_written(event: Event, written: bytes) -> None:
    """Raise `InvalidInput` if the JSON of a caller's or an agent's event is too long.

    A longer one would stop the event loop for seconds whenever it is written or read.
    """
    if len(written) > EVENT_LENGTH_MAX:
        check_length(a_type(event), len(written), EVENT_LENGTH_MAX, unit="bytes of JSON")


def encode_record(event: Event, written: bytes | None = None) -> Record:
    """Return the record of this event; `written` is its JSON, if that is at hand.

    A message id goes with the first event that carries it.
    """
    message_id, kind = None, event.kind  # pydantic makes reading a field slow
    if kind in _CHAT_KINDS and (
        (isinstance(event, UserMessageEvent) and event.queued_event_id is None)
        or (isinstance(event, MessageQueuedEvent) and not event.queued_again)
    ):
        message_id = event.message_id
    return Record(event.id, kind, written or encode_event(event), message_id)


def decode_record(conversation_id: str, record: StoredRecord) -> LoggedEvent:
    """Return the event of a record, with its place. Raises as `events_of_records` does."""
    # Not as a batch of one: readers call this for each event.
    seq, _, _, kind, payload, _ = record
    try:
        return LoggedEvent(seq, decode_event(payload, kind=kind))
    except ValueError as error:
        raise _no_event(conversation_id, seq, kind, error) from error


def events_of_records(
    conversation_id: str, records: Iterable[StoredRecord], *, first_seq: int
) -> Sequence[Event]:
    """Return the events of successive records, the first of which has the seq `first_seq`.

    Raise `CorruptLog` at the first record that is missing, or that holds no valid event.
    """
    events = []
    for seq, (found_seq, _, _, kind, payload, _) in enumerate(records, first_seq):
        if found_seq != seq:
            raise CorruptLog(conversation_id, seq, "the record is missing")
        try:
            events.append(decode_event(payload, kind=kind))
        except ValueError as error:
            raise _no_event(conversation_id, seq, kind, error) from error
    return events


def events_of_kinds(
    kinds: AbstractSet[str],
    conversation_id: str,
    records: Iterable[StoredRecord],
    *,
    first_seq: int,
) -> Sequence[LoggedEvent]:
    """Return the events of these kinds, with their places; otherwise as `events_of_records`.

    Records of other kinds are not decoded. Those of a kind that an upcaster lifts are decoded and
    returned, too: they may be of any kind in this version.
    """
    found = []
    for seq, record in enumerate(records, first_seq):
        if record.seq != seq:
            raise CorruptLog(conversation_id, seq, "the record is missing")
        if record.kind in kinds or record.kind in UPCASTERS.kinds:
            found.append(decode_record(conversation_id, record))
    return found


def _no_event(conversation_id: str, seq: int, kind: str, error: ValueError) -> CorruptLog:
    found = f"the record is no {kind} event ({type(error).__name__})"
    return CorruptLog(conversation_id, seq, found)
