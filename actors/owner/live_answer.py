"""An answer while it is being written, and the pieces of it that one reader has yielded.

The pieces of one attempt are kept once for all readers, in a `LiveAnswer`. A reader has a
`PieceCursor`, which only counts those that it has yielded: so its memory does not grow with the
answer, and a reader that falls behind, or comes in the middle, gets all that it has missed as one
piece.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final

from ..events import LoggedEvent, TextDelta

__all__ = ["LiveAnswer", "PieceCursor", "ends_answer"]

# By kind: each reader asks it of each event, and pydantic makes `isinstance` slow.
_ENDS_ANSWER: Final = frozenset({"agent_message", "action", "turn_ended"})


def ends_answer(logged: LoggedEvent) -> bool:
    """Return True if this event carries an answer of its turn, or ends the turn."""
    return logged.event.kind in _ENDS_ANSWER


class LiveAnswer:
    """One attempt at an answer. Used from one event loop only."""

    __slots__ = ("_merged", "after", "head", "is_over", "is_void", "last", "pieces", "turn_id")

    def __init__(self, first: TextDelta, after: int) -> None:
        self.after = after
        """The end of the log when it began: its pieces come after the event at this seq."""
        self.head = after
        """The seq of the newest event that its owner has published. A reader that is before it gets
        that event first: else pieces that come fast would keep it from the events until the answer
        is over. One that is beyond it gets no piece: the journal may have the event that ends the
        answer already."""
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
        event = logged.event
        return (
            event.turn_id == self.turn_id and logged.seq > self.after and event.kind in _ENDS_ANSWER
        )


class PieceCursor:
    """The place of one reader in the answers being written: what it has yielded of which one."""

    __slots__ = (
        "_cut_turn_id",
        "_given",
        "_newest",
        "_newest_end",
        "_taken",
        "answers",
        "short_seq",
    )

    def __init__(self) -> None:
        self.answers: deque[LiveAnswer] = deque()
        """The answers whose end the reader has not reached; only the last may still be written."""
        self._taken = 0
        """How many pieces of the first of these answers the reader has yielded."""
        self._given: TextDelta | None = None
        """The last piece that it has yielded of the previous answer; None once a later one has
        passed it."""
        self._cut_turn_id: str | None = None
        """The turn of the previous answer, if it has yielded pieces of it, and no more came."""
        self.short_seq = 0
        """The seq of the newest event that replaces pieces, if not all were yielded; 0: none."""
        self._newest: LoggedEvent | None = None
        """The newest event it has yielded."""
        self._newest_end: LoggedEvent | None = None
        """The newest event it has yielded that carries an answer, or ends a turn."""

    def add(self, answer: LiveAnswer) -> bool:
        """Take an answer that is being written; return False if its end was yielded already.

        That happens if the answer comes from another process, and the journal was faster.
        """
        if self._newest_end is not None and answer.is_ended_by(self._newest_end):
            return False
        # Only the last of the answers can have begun anew.
        if len(self.answers) == 1 and self.answers[0].is_void:
            self._drop_first()
        elif self.answers and self.answers[-1].is_void:
            self.answers.pop()
        self.answers.append(answer)
        return True

    def drop_between(self) -> None:
        """Drop all answers but the one that the reader has begun to yield, and the newest."""
        while len(self.answers) > 2:  # noqa: PLR2004 - these two
            del self.answers[1]

    def take_due(self, seq: int, turn_id: str | None) -> TextDelta | None:
        """Return the pieces of the answer after the event at `seq` that came since the last call.

        `turn_id`: the turn whose pieces are wanted; None: those of all turns. There must be an
        answer.
        """
        while True:
            answer = self.answers[0]
            taken = self._taken
            written = len(answer.pieces)
            if answer.is_over:
                if answer.is_void or answer.last < seq:
                    self._drop_first()
                    if not self.answers:
                        return None
                    continue
            elif taken == written or seq != answer.head:
                return None  # most often: it has yielded all that is written so far
            if answer.after > seq:
                return None
            if turn_id is not None and turn_id != answer.turn_id:
                return None
            if taken < written:
                self._taken = written
                piece = answer.pieces[taken] if taken + 1 == written else answer.piece_after(taken)
                if self._given is None:
                    return piece
                if (left := self._left_of(piece, self._given)) is not None:
                    return left
            if not answer.is_over:
                return None
            self._drop_first()
            if not self.answers:
                return None

    def _left_of(self, piece: TextDelta, given: TextDelta) -> TextDelta | None:
        """Return the part of a piece that was not yielded yet; None if all of it was.

        If the connection to another process broke, its pieces begin anew, for all readers.
        """
        if piece.offset < given.end and given.is_of_same_attempt(piece):
            if piece.end <= given.end:
                return None
            piece = piece.from_offset(given.end)
        self._given = None
        return piece

    def has_more_to_come(self, logged: LoggedEvent, epoch: int) -> bool:
        """Return True if this event ends the newest answer, and its last pieces may still come.

        The owner publishes the last pieces just before this event, which the journal may have
        earlier. If the event has another epoch, another owner wrote it, and no pieces come.
        """
        if not self.answers:
            return False
        newest = self.answers[-1]
        return not newest.is_over and newest.pieces[0].epoch == epoch and newest.is_ended_by(logged)

    def pass_event(self, logged: LoggedEvent) -> None:
        """Note that the reader yields this event, which may replace an answer."""
        self._newest = logged
        if logged.event.kind in _ENDS_ANSWER:
            self._newest_end = logged
            while self.answers and self.answers[0].is_ended_by(logged):
                self._drop_first()
            if self._cut_turn_id is not None:
                self._note_cut(self._cut_turn_id, logged)

    def _note_cut(self, turn_id: str, logged: LoggedEvent) -> None:
        """Note that this event replaces an answer whose pieces were cut off.

        The end of its turn carries no answer: it only voids the pieces.
        """
        if logged.event.turn_id == turn_id and logged.event.kind != "turn_ended":
            self.short_seq = logged.seq
        self._cut_turn_id = None

    def _drop_first(self) -> None:
        answer = self.answers.popleft()
        if self._taken:
            if self._given is None:
                self._given = answer.pieces[self._taken - 1]
            is_whole = answer.is_over and not answer.is_void
            self._cut_turn_id = None if is_whole else answer.turn_id
        self._taken = 0

    def expects_piece(self, seq: int) -> bool:
        """True if the newest answer is still being written, and no event comes before its pieces.

        `seq`: the event that the reader has yielded last. If it is before the newest one, the
        pieces wait for events that only the journal has.
        """
        if not self.answers or self.answers[-1].is_over:
            return False
        return seq >= self.answers[-1].head

    @property
    def is_in_turn(self) -> bool:
        """True if the newest event that the reader has yielded is of a turn, and not its end."""
        newest = None if self._newest is None else self._newest.event
        return newest is not None and newest.turn_id is not None and newest.kind != "turn_ended"
