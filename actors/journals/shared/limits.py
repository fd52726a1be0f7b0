"""The limits that every journal puts on its input, in one place.

They hold for new data only: a journal reads whatever it has stored, and an existing conversation
with an unusual name continues. An id in a query need only be a storable text, and a number must
make sense; an id that no journal can have is simply not found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...errors import ConversationNotFound, InvalidConversationId, InvalidInput
from ...journal import Journal, Record, Rejection, Snapshot
from ...values.text import (
    are_plain_ids,
    check_bool,
    check_conversation_id,
    check_new_conversation_id,
    check_new_id,
    check_number,
    check_text,
)

__all__ = [
    "PAYLOAD_BYTES_MAX",
    "check_asked",
    "check_new_name",
    "check_page",
    "check_records",
    "check_settings",
    "check_size",
    "check_snapshot",
    "checked_rejections",
]

_SWITCHES = ("read_only", "takeover", "search")

PAYLOAD_BYTES_MAX = 256 << 20
"""The most bytes that one event's JSON may have: more than any event that passes `check_length`."""


def check_settings(arguments: Mapping[str, object]) -> None:
    """Raise `InvalidInput` if seconds (`_s`), a bound (`_max`) or a switch make no sense."""
    for name, found in arguments.items():
        if name.endswith(("_s", "_s_max")):
            check_number(name, found, "seconds from 0 on", least=0)
        elif name.endswith("_max"):
            check_number(name, found, "1 or more", least=1)
        elif name in _SWITCHES:
            check_bool(name, found)


def check_records(records: Sequence[Record]) -> int:
    """Return the size of the records in bytes; raise `InvalidInput` if one is beyond the limits."""
    size = 0
    for event_id, kind, payload, message_id in records:
        size += len(payload)
        if len(payload) > PAYLOAD_BYTES_MAX:
            check_size(f"event {event_id[:128]!r}", payload)
        if are_plain_ids(event_id, kind, message_id):
            continue
        check_new_id("event id", event_id)
        check_new_id("kind", kind)
        if message_id is not None:
            check_new_id("message id", message_id)
    return size


def check_asked(conversation_id: str, ids: Sequence[str] = ()) -> None:
    """Raise `InvalidInput` if a name or an id in a query is not a text that could be stored."""
    check_text("conversation id", conversation_id)
    for one in ids:
        check_text("id", one)


def check_page(after: int, limit: int, bytes_max: int) -> None:
    """Raise `InvalidInput` if the bounds of a read make no sense."""
    if after < 0 or limit < 0 or bytes_max < 0:
        raise InvalidInput(
            f"a read of {limit} records and {bytes_max} bytes after seq {after}; nothing was read; "
            "all three are 0 or more"
        )


def checked_rejections(rejections: Sequence[Rejection]) -> Sequence[Rejection]:
    """Return rejections as they can be stored; raise `InvalidInput` if one of them cannot be."""
    for one in rejections:
        if not math.isfinite(one.at):
            raise InvalidInput(f"a rejection at {one.at}; nothing was written; give it a time")
        _check_plain("violation", one.violation)
        _check_plain("reason", one.reason)
        check_size("rejected event", one.payload)
    return [Rejection(float(one.at), one.violation, one.reason, one.payload) for one in rejections]


def check_snapshot(snapshot: Snapshot) -> None:
    """Raise `InvalidInput` if a snapshot cannot be stored."""
    _check_plain("version of a snapshot", snapshot.version)


def _check_plain(what: str, text: str) -> None:
    check_text(what, text)
    if "\0" in text:
        raise InvalidInput(f"{what} has a NUL, which a database cannot store; nothing was written")


def check_size(what: str, payload: bytes) -> None:
    """Raise `InvalidInput` if an event's JSON is larger than a journal takes."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise InvalidInput(
            f"{what} has {len(payload):,} bytes, and a journal takes {PAYLOAD_BYTES_MAX:,}; "
            "nothing was written; keep what is large elsewhere, and its address in the event"
        )


async def check_new_name(journal: Journal, conversation_id: str, *, any_name: bool = False) -> None:
    """Raise `InvalidConversationId` for a name that no new conversation can have.

    If the journal already has a conversation of this name, that continues. With `any_name`, every
    name is accepted that each journal can store.
    """
    check_conversation_id(conversation_id)
    check_bool("any_name", any_name)
    if any_name:
        return
    try:
        check_new_conversation_id(conversation_id)
    except InvalidConversationId:
        try:
            await journal.info(conversation_id)
        except ConversationNotFound:
            pass
        else:
            return
        raise
