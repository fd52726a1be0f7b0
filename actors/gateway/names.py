"""Ids and cursors on the wire, and as the journal stores them.

An id on the wire is local to a principal: the journal has `<principal>:<id>`, with the principal
encoded so that it holds no colon. The first colon therefore splits a stored id in one way only, and
no two pairs share one. Administrators, and clients of a gateway without principals, use stored ids.

In a path, an id with special characters is `~` and its base64url. A cursor is `<seq>.<event id>`,
with `@` and the time of the event if the id is not one that turnkeeper draws.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote, unquote

from ..core.listing import time_us
from ..errors import InvalidConversationId
from ..events import LoggedEvent
from ..values.text import check_conversation_id, check_new_conversation_id

__all__ = [
    "Cursor",
    "from_path",
    "is_known_id",
    "is_new_id",
    "parse_cursor",
    "principal_of",
    "stored_id",
    "to_path",
    "wire_id",
]

ID_LENGTH_MAX = 256
SEQ_MAX = 1 << 53
_DRAWN = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
"""The ids that turnkeeper draws. One that was given, such as that of a request, may come again."""
_TIMED = re.compile(r"(?P<id>[^@]+)@(?P<us>-?[0-9]{1,18})")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.@:")


def stored_id(user: str | None, local_id: str) -> str:
    """Return the stored id for a principal's id; without a principal, they are the same."""
    return local_id if user is None else f"{quote(user, safe='')}:{local_id}"


def wire_id(user: str | None, conversation_id: str) -> str | None:
    """Return the id on the wire for a stored id; None if it is not this principal's."""
    if user is None:
        return conversation_id
    prefix = stored_id(user, "")
    return conversation_id.removeprefix(prefix) if conversation_id.startswith(prefix) else None


def principal_of(conversation_id: str) -> str | None:
    """Return the principal whose stored id this is; None if it is no principal's."""
    encoded, colon, _ = conversation_id.partition(":")
    user = unquote(encoded, errors="replace")
    return user if colon and encoded and quote(user, safe="") == encoded else None


def is_known_id(conversation_id: str) -> bool:
    """Return True if a journal may have a conversation of this id."""
    return _passes(check_conversation_id, conversation_id)


def is_new_id(local_id: str) -> bool:
    """Return True if a conversation may begin under this id; old ones may have other ids."""
    return _passes(check_new_conversation_id, local_id)


def _passes(check: Callable[[str], None], conversation_id: str) -> bool:
    try:
        check(conversation_id)
    except InvalidConversationId:
        return False
    return True


def to_path(local_id: str) -> str:
    """Return an id as a path segment."""
    if local_id and _PLAIN.issuperset(local_id) and local_id not in (".", ".."):
        return local_id
    return _encoded(local_id)


def from_path(part: str) -> str | None:
    """Return the id that a path segment names; None if it names none."""
    if not part.startswith("~"):
        return part or None
    encoded = part[1:]
    try:
        raw = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        text = raw.decode()
    except (binascii.Error, ValueError):
        return None
    # Each id has one spelling: others that decode to the same bytes are refused.
    return text if text and _encoded(text) == part else None


def _encoded(local_id: str) -> str:
    return "~" + base64.urlsafe_b64encode(local_id.encode()).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a log. Without an event id, it fits any log that is long enough."""

    seq: int
    event_id: str | None = None
    at_us: int | None = None
    """The time of an event whose id was given, in microseconds: a log that was begun anew may have
    the same id at the same seq."""

    @classmethod
    def of(cls, logged: LoggedEvent) -> Cursor:
        """Return the place of this event."""
        event = logged.event
        return cls(logged.seq, event.id, None if _DRAWN.fullmatch(event.id) else time_us(event))

    def fits(self, logged: LoggedEvent) -> bool:
        """Return True if this is the event at the cursor."""
        return (
            self.seq == logged.seq
            and self.event_id in (None, logged.event.id)
            and self.at_us in (None, time_us(logged.event))
        )

    def __str__(self) -> str:
        if self.event_id is None:
            return str(self.seq)
        time = "" if self.at_us is None else f"@{self.at_us}"
        return f"{self.seq}.{quote(self.event_id, safe='')}{time}"


def parse_cursor(text: str) -> Cursor | None:
    """Return the cursor that a client sent; None if it is not one."""
    seq, dot, event_id = text.strip().partition(".")
    if not (seq.isascii() and seq.isdigit() and len(seq) <= len(str(SEQ_MAX))):
        return None
    if int(seq) > SEQ_MAX or (dot and not event_id):
        return None
    if not dot or int(seq) == 0:
        return Cursor(int(seq))
    timed = _TIMED.fullmatch(event_id)
    at_us = None if timed is None else int(timed["us"])
    event_id = event_id if timed is None else timed["id"]
    return Cursor(int(seq), unquote(event_id, errors="replace"), at_us)
