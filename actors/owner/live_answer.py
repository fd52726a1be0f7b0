"""An answer while it is being written, shared by the readers of its conversation.

The pieces of one attempt are kept once, here. A reader only counts the pieces that it has yielded:
so its memory does not grow with the answer, and a reader that falls behind, or comes in the middle,
gets all that it has missed as one piece.
"""

from __future__ import annotations

from math import inf
from typing import Final

from ..events import LoggedEvent, TextDelta

__all__ = ["LiveAnswer", "ends_answer"]

# By kind: each reader asks it of each event, and pydantic makes `isinstance` slow.
_ENDS_ANSWER: Final = frozenset({"agent_message", "action", "turn_ended"})


def ends_answer(logged: LoggedEvent) -> bool:
    """Return True if this event carries an answer of its turn, or ends the turn."""
    return logged.event.kind in _ENDS_ANSWER


class LiveAnswer:
    """One attempt at an answer. Used from one event loop only."""

    __slots__ = ("_merged", "after", "is_over", "is_void", "last", "pieces", "turn_id")

    def __init__(self, first: TextDelta, after: int) -> None:
        self.after = after
        """The end of the log when it began: its pieces come after the event at this seq."""
        self.is_over = False
        """True if no more pieces of it come."""
        self.last: float = inf
        """The seq of the event before the one that ended it: no piece is shown after a later event.
        Infinite until the answer is over."""
        self.is_void = False
        """True if the answer began anew, or its owner ended: no more of it is shown."""
        self.turn_id = first.turn_id
        self.pieces = [first]
        self._merged: tuple[int, TextDelta] | None = None

    def end_before(self, seq: int) -> None:
        """Note that the event at this seq ends it."""
        self.is_over, self.last = True, seq - 1

    def void(self) -> None:
        """Note that it began anew, or that its owner ended."""
        self.is_over = self.is_void = True

    @property
    def length(self) -> int:
        """How many code points of the answer have arrived."""
        return self.pieces[-1].end

    def add(self, piece: TextDelta) -> None:
        """Add the next piece."""
        self.pieces.append(piece)
        self._merged = None

    def piece_after(self, count: int) -> TextDelta:
        """Return the pieces after the first `count` as one; there must be some."""
        first = self.pieces[count]
        if len(self.pieces) == count + 1:
            return first
        # Kept, since many readers that come together ask for the same.
        if self._merged is None or self._merged[0] != count:
            text = "".join([piece.text for piece in self.pieces[count:]])
            self._merged = count, first._replace(text=text)
        return self._merged[1]

    def is_ended_by(self, logged: LoggedEvent) -> bool:
        """True if this event carries the answer, or ends its turn: it replaces the pieces."""
        return (
            logged.event.turn_id == self.turn_id and logged.seq > self.after and ends_answer(logged)
        )
