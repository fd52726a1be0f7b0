"""The readers that ask the journal, each for all readers that wait at its place of a log.

Without an owner in this process, another process may own the conversation. Then one reader leads
all that wait at the same place of the log: it waits for the journal to have more, or for an owner
here, and gives the others the page that it reads.

Invariant: if no owner is here, one of the readers that wait at a place leads, or was woken to lead.
A reader that begins to wait leads if no other does; one that leaves its wait, even if it is
cancelled, chooses the next. Nothing here awaits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from typing import Protocol, TypeAlias

from ..journal import StoredRecord

__all__ = ["Leaders", "Place", "WaitingReader"]

Place: TypeAlias = tuple[str, int, str | None]
"""A place in a log: the conversation, and the seq and the id of the event that was yielded last."""


class WaitingReader(Protocol):
    """A reader that may wait for a leader, as `Leaders` sees it."""

    def waits_at(self, place: Place) -> bool: ...

    def try_choose(self, place: Place) -> bool: ...

    def take_page(
        self, place: Place, cursor_id: str | None, page: Collection[StoredRecord]
    ) -> None: ...

    def look(self) -> None: ...


class Leaders:
    """The readers that lead, by their places. Used from one event loop only."""

    def __init__(
        self, owned: Container[str], readers_of: Callable[[str], Sequence[WaitingReader]]
    ) -> None:
        self._owned = owned
        """The conversations with an owner here."""
        self._readers_of = readers_of
        """Returns the live readers of a conversation, in the order in which they began."""
        self._leading: dict[Place, WaitingReader] = {}

    def at(self, place: Place) -> WaitingReader | None:
        """Return the reader that leads at this place, if one does."""
        return self._leading.get(place)

    def begin(self, place: Place, reader: WaitingReader) -> None:
        """Let a reader lead at this place, until `end`."""
        self._leading[place] = reader

    def end(self, place: Place) -> None:
        """End the lead of the reader that leads at this place, and choose another one."""
        del self._leading[place]
        self.choose(place)

    def choose(self, place: Place) -> None:
        """Wake one reader that waits at this place, to lead.

        None is woken if an owner is here, or if a reader leads there already.
        """
        if place[0] in self._owned or place in self._leading:
            return
        for reader in self._readers_of(place[0]):
            if reader.try_choose(place):
                return

    def share(self, place: Place, cursor_id: str | None, page: Collection[StoredRecord]) -> None:
        """Give a page that was read at this place to the readers that wait there.

        `cursor_id`: the id of the event at the place, as it was read.
        """
        for reader in self._readers_of(place[0]):
            reader.take_page(place, cursor_id, page)

    def send_to_journal(self, place: Place) -> None:
        """Send the readers that wait at this place to the journal: their leader's read failed."""
        for reader in self._readers_of(place[0]):
            if reader.waits_at(place):
                reader.look()
