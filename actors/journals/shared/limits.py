"""The limits that every journal sets to what it is given, at one place.

They hold for new data alone: what a journal has is read whatever it is, and a conversation that
has an odd name already goes on under it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConversationNotFound, InvalidInput
from ...journal import Journal, Record
from ...values.text import check_id, check_text

__all__ = ["PAYLOAD_BYTES_MAX", "check_new_name", "check_records"]

PAYLOAD_BYTES_MAX = 256 << 20
"""The bytes of one event's JSON: more than any event that passes `check_length` can have."""

_PLAIN_ID_LENGTH_MAX = 128


def check_records(records: Sequence[Record]) -> None:
    """Raise `InvalidInput` if a record's ids or its size are beyond the limits."""
    for record in records:
        if len(record.payload) > PAYLOAD_BYTES_MAX:
            raise InvalidInput(
                f"event {record.event_id[:_PLAIN_ID_LENGTH_MAX]!r} has {len(record.payload):,} "
                f"bytes, and a journal takes {PAYLOAD_BYTES_MAX:,}; nothing was written; keep what "
                "is large elsewhere, and its address in the event"
            )
        _check_id("event id", record.event_id)
        _check_id("kind", record.kind)
        if record.message_id is not None:
            _check_id("message id", record.message_id)


async def check_new_name(journal: Journal, conversation_id: str) -> None:
    """Raise `InvalidInput` for a name that no conversation should be given, unless one has it."""
    try:
        _check_id("conversation id", conversation_id)
    except InvalidInput:
        check_text("conversation id", conversation_id)
        if "\0" in conversation_id:
            raise
        try:
            await journal.info(conversation_id)
        except ConversationNotFound:
            pass
        else:
            return
        raise


def _check_id(what: str, text: str) -> None:
    if len(text) <= _PLAIN_ID_LENGTH_MAX and text.isascii() and text.isprintable() and text:
        return  # the usual one, in a tenth of the time
    check_id(what, text)
    for at, letter in enumerate(text):
        if letter < " " or "\x7f" <= letter < "\xa0":
            raise InvalidInput(
                f"{what} has the control character {letter!r} at position {at}; nothing was "
                "written; use letters that can be seen"
            )
