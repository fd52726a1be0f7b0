"""The bounds on what a log takes, and on the memory of an owner and its readers, as one value.

Each conversation is correct under any of these limits: the log has everything, and what memory has
let go is read again from the journal. Only the calls and responses beyond `finished_calls_max` are
forgotten: their ids are taken for new ones. Tests and simulations use small limits. A bound on
messages, calls and labels is for new ones: those that are in the log stay, and sending one again is
a duplicate as always.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import InvalidInput
from ..values.text import check_number

__all__ = ["ANSWER_LENGTH_MAX", "Limits"]

ANSWER_LENGTH_MAX = 4 << 20
"""The most characters of one answer, unless the application says otherwise."""


LABEL_NAME_LENGTH_MAX = 256
"""The most that `label_name_length_max` can be, so that every journal can index a name."""

_FROM_NONE = ("finished_calls_max", "files_max", "file_bytes_max", "labels_max")


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that the log takes at once, and that memory keeps of a conversation.

    All are whole numbers; raises `InvalidInput` for any other value.
    """

    known_messages_max: int = 1024
    """The message ids that the turn table holds; older ones are looked up in the journal."""
    recent_events_max: int = 256
    """The events that the owner holds by id; older ones are looked up in the journal."""
    recent_bytes_max: int = 16 << 20
    """The bytes of those of them that have more than 64 KiB each."""
    finished_calls_max: int = 256
    """The calls, and the responses, that admission remembers once they have left the view.

    It refuses a call that has the id of one of them. Older ones are not looked up: a call that has
    such an id again is admitted. That does no harm: no later event belongs to one that has left."""
    snapshot_events: int = 200
    """The events after which a snapshot may be written."""
    buffered_events_max: int = 256
    """The events that wait for a slow reader before it goes back to reading the journal."""
    buffered_bytes_max: int = 16 << 20
    """The bytes of those of them that have more than 64 KiB each."""
    read_page: int = 256
    """The events that a reader takes from the journal at once."""
    read_bytes: int = 512 << 10
    """The bytes with which such a page ends. Its first event may be larger."""
    content_length_max: int = 1 << 20
    """The characters of a chat message's text."""
    metadata_length_max: int = 16 << 10
    """The characters of a chat message's metadata, as JSON."""
    metadata_depth_max: int = 100
    """How deep its objects and arrays may be nested; no JSON goes deeper than 100."""
    metadata_digits_max: int = 2_466
    """The digits of an integer in it; no JSON has more than 2,466."""
    files_max: int = 16
    """The files of a chat message."""
    file_bytes_max: int = 8 << 20
    """The bytes of one of them; all parts of a message together may have 33,554,432 characters."""
    arguments_depth_max: int = 100
    """How deep the arguments of a tool call may be nested; no JSON goes deeper than 100."""
    arguments_digits_max: int = 2_466
    """The digits of an integer in them; no JSON has more than 2,466."""
    labels_max: int = 32
    """The labels of a conversation."""
    label_name_length_max: int = 64
    """The characters of the name of a label; 256 at most, so that every journal can index it."""
    label_value_length_max: int = 256
    """The characters of its value."""

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in _FROM_NONE else 2
            found, allowed = getattr(self, field.name), f"a whole number from {least} on"
            check_number(field.name, found, allowed, least=least, is_whole=True)
        if self.label_name_length_max > LABEL_NAME_LENGTH_MAX:
            found = self.label_name_length_max
            raise InvalidInput(
                f"label_name_length_max is {found}; it takes {LABEL_NAME_LENGTH_MAX} or less"
            )
