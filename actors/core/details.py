"""The title, the labels and the user of a conversation, as a fold of its log.

The field with the user is called `owner`. It is not the owner, the actor that writes the log.
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
    """The title, labels and user of a conversation; a value, replaced as it changes.

    The model sees none of it.
    """

    title: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    """The user to whom it belongs, by a name that the application chooses; empty: none."""

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
