"""The title, the labels and the owner of a conversation, as a fold of its log.

The *owner* here is the user whose conversation it is, by a name that the application chooses; the
owner of a log is another thing, the actor that writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..events import ConversationChangedEvent, Event

__all__ = [
    "TITLE_LENGTH_MAX",
    "Details",
]

TITLE_LENGTH_MAX = 256


@dataclass(frozen=True, slots=True)
class Details:
    """The title, labels and owner of a conversation; a value, replaced as it changes.

    The model sees none of it.
    """

    title: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    """The user whose conversation it is; empty if it has none."""

    def fold(self, event: Event) -> Details:
        """Return the details after this event of the log."""
        if not isinstance(event, ConversationChangedEvent):
            return self
        labels = dict(self.labels)
        for name, value in event.labels.items():
            if isinstance(value, str):
                labels[name] = value
            else:
                labels.pop(name, None)
        return Details(
            self.title if event.title is None else event.title,
            labels,
            self.owner if event.owner is None else event.owner,
        )
