"""The readers of conversations: live events, with the journal behind them.

Owned by `Conversations`, so that readers outlive the passivation and the restart of the actor that
they follow, and keep no actor active. The actor publishes the events that it has committed; that
never waits and never fails, whatever the readers do. A reader that is dropped is forgotten.

An `EventReader` (`event_reader.py`) is one of them. Published events go into its bounded buffer. A
slow reader falls back to the journal, without delaying any other. The reader of a turn that has
just begun takes its first events from the memory of the owner here.

Without an owner in this process, another process may own the conversation. Then one of the readers
that wait at the same place of the log asks the journal for all of them (`leaders.py`).

Pieces of an answer that is being written are kept once for all readers, as a `LiveAnswer`. The
pieces of another process come from that process, if it can be asked (`nodes.py`), and are kept in
the same way.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Protocol

import anyio

from turnkeeper.runtime.lowlevel import home_check

from ..core.commands import Expected
from ..core.limits import Limits
from ..events import LoggedEvent, TextDelta
from ..journal import Journal
from .event_reader import EventReader
from .leaders import Leaders, Place
from .live_answer import LiveAnswer

__all__ = ["LiveOwner", "Subscriptions"]

OWNER_ASKED_EVERY_S = 5.0
"""The seconds between two tries to claim a conversation that another process owns."""


class LiveOwner(Protocol):
    """The owner of a conversation in this process, as its readers see it."""

    def end_if_lapsed(self) -> bool:
        """End this owner if another process may own the conversation by now; return True if so.

        Called when this process has lost its lease.
        """

    def recent_after(self, seq: int) -> Sequence[LoggedEvent]:
        """Return all committed events above `seq`; none if memory does not have all of them."""


class Subscriptions:
    """All live readers of all conversations in this process. Used from one event loop only."""

    def __init__(self, journal: Journal, limits: Limits = Limits()) -> None:
        self._journal = journal
        self._limits = limits
        # Weak, so that a reader ends by being dropped; dicts, so that they are served in order.
        self._readers: dict[str, dict[int, weakref.ref[EventReader]]] = {}
        self._readers_begun = 0
        # A reader may be dropped in any thread, and between any two steps here.
        self._dropped: deque[tuple[str, int]] = deque()
        self._live_answers: dict[str, LiveAnswer] = {}
        """The answers that owners here are writing."""
        self._owned: dict[str, LiveOwner] = {}
        """The conversations with an owner here."""
        self.leaders = Leaders(self._owned, self._live)
        self._claim_at: dict[str, float] = {}
        """The time at which the readers of a conversation that another process owns next try to
        claim it: all together, so that one claim answers them all."""
        self._unheard: set[str] = set()
        """The conversations with readers here whose owner, in another process, cannot be heard."""
        self._is_home: Callable[[], bool] | None = None
        """Tells the event loop of the `Conversations` from others, once they open."""
        self._is_closing = False
        self._is_live_over = False
        self._is_closed = False
        self.want_pieces: Callable[[str], None] | None = None
        """Asks another process for the pieces of a conversation; None if none can be asked."""

    def open(self) -> None:
        """Note that the `Conversations` open in the running event loop."""
        self._is_home = home_check()

    def check_home(self) -> None:
        """Raise `RuntimeError` in another event loop: a reader that waits there is never woken."""
        if self._is_home is not None and not self._is_home():
            raise RuntimeError(
                "a reader of events waits in another thread than its conversations', or in another "
                "event loop; in other threads, and in loops that run there, use runtime.portal()"
            )

    def is_followed(self, conversation_id: str) -> bool:
        """True if `publish` has to be called: it has readers, or an answer is being written."""
        return conversation_id in self._readers or conversation_id in self._live_answers

    def publish(
        self, conversation_id: str, events: Sequence[LoggedEvent], large_bytes: int = 0
    ) -> None:
        """Offer committed events, in order, to the readers of this conversation.

        `large_bytes`: the bytes of those that have more than `LARGE_BYTES`; it may be too many.
        """
        answer = self._live_answers.get(conversation_id)
        if answer is not None:
            answer.head = events[-1].seq
            ending = next((logged for logged in events if answer.is_ended_by(logged)), None)
            if ending is not None:
                answer.end_before(ending.seq)
                del self._live_answers[conversation_id]
        for reader in self._live(conversation_id):
            reader.offer(events, large_bytes)

    def publish_piece(self, conversation_id: str, piece: TextDelta, head: int) -> None:
        """Offer a piece of the answer being written; `head` is the end of the log."""
        answer = self._live_answers.get(conversation_id)
        if answer is not None and piece.offset:
            answer.add(piece)
            for reader in self._live(conversation_id):
                reader.piece_came()
            return
        self._void_answer(conversation_id)
        answer = self._live_answers[conversation_id] = LiveAnswer(piece, head)
        for reader in self._live(conversation_id):
            reader.offer_answer(answer)

    # --- pieces from another process --------------------------------------------------------------

    def wants_pieces(self, conversation_id: str) -> bool:
        """True if readers here wait for pieces of a conversation that is not owned here."""
        return conversation_id not in self._owned and any(
            reader.wants_relay for reader in self._live(conversation_id)
        )

    def relay_piece(self, conversation_id: str, piece: TextDelta, after: int) -> None:
        """Offer a piece that another process wrote, after the event at seq `after`.

        A relay that was cut off begins anew, with all that was said so far as its first piece; each
        reader leaves out the part that it has yielded.
        """
        if conversation_id in self._owned:
            return  # it comes from an owner that has lost the conversation
        answer = self._live_answers.get(conversation_id)
        if piece.offset:
            is_next = (
                answer is not None
                and answer.length == piece.offset
                and answer.pieces[0].is_of_same_attempt(piece)
            )
        else:
            is_next = answer is None or answer.pieces[0].epoch <= piece.epoch
        if is_next:
            self.publish_piece(conversation_id, piece, after)

    def relay_passed(self, conversation_id: str, seq: int, ended_turn_id: str | None) -> None:
        """Note that another process has written the event at `seq`.

        `ended_turn_id`: the turn whose answer that event ends.
        """
        if conversation_id in self._owned:
            return
        answer = self._live_answers.get(conversation_id)
        if answer is not None:
            answer.head = seq
            if answer.turn_id == ended_turn_id:
                answer.end_before(seq)
                del self._live_answers[conversation_id]
        for reader in self._live(conversation_id):
            reader.look_for(seq)

    def drop_relayed(self, conversation_id: str) -> None:
        """Void the answer that another process was writing: it cannot be heard any more.

        It may delete the log meanwhile, so readers show no piece of the next process before they
        have looked at the journal.
        """
        if conversation_id not in self._owned:
            self._void_answer(conversation_id)
            for reader in self._live(conversation_id):
                reader.relay_ended()

    def note_heard(self, conversation_id: str, *, is_heard: bool) -> None:
        """Note whether the process that owns the conversation can be heard."""
        if is_heard:
            self._unheard.discard(conversation_id)
        else:
            self._unheard.add(conversation_id)

    def hears_pieces(self, conversation_id: str) -> bool:
        """True unless another process writes the answers, and was not heard when last tried."""
        return conversation_id not in self._unheard or conversation_id in self._owned

    def _void_answer(self, conversation_id: str) -> None:
        answer = self._live_answers.pop(conversation_id, None)
        if answer is not None:
            answer.void()

    def is_owned(self, conversation_id: str) -> bool:
        """True if an owner is active here, so that every event is published when it is written."""
        return conversation_id in self._owned

    @property
    def owned_count(self) -> int:
        """How many conversations have an owner here."""
        return len(self._owned)

    @property
    def readers_count(self) -> int:
        """How many live readers there are, and dropped ones that are not cleaned up yet.

        Any thread may read it.
        """
        return sum(map(len, list(self._readers.values())))

    def has_readers(self, conversation_id: str) -> bool:
        """True if a live reader of the conversation is here, or one that was just dropped."""
        return conversation_id in self._readers

    def owner_began(
        self, conversation_id: str, owner: LiveOwner, newest: tuple[int, str | None] | None = None
    ) -> None:
        """Send readers to the journal for events that an earlier owner could not publish.

        `newest`: the seq and the id of the log's newest event, if the owner knows them; 0 and None
        for an empty log. Readers that have yielded it are not sent.
        """
        self._owned[conversation_id] = owner
        self._unheard.discard(conversation_id)
        self._void_answer(conversation_id)
        for reader in self._live(conversation_id):
            reader.owner_began(newest)

    def lease_lost(self) -> None:
        """End each owner here that may have been replaced, and send its readers to the journal."""
        for conversation_id, owner in list(self._owned.items()):
            if owner.end_if_lapsed():
                self._owned.pop(conversation_id, None)
                self._leave_to_journal(conversation_id, is_wanted=False)

    def owner_ended(self, conversation_id: str, *, is_wanted: bool) -> None:
        """Note that the owner here has ended; `is_wanted`: a caller may wait for its work."""
        self._owned.pop(conversation_id, None)
        self._void_answer(conversation_id)
        if not self._is_closing:
            self._leave_to_journal(conversation_id, is_wanted=is_wanted)

    def _leave_to_journal(self, conversation_id: str, *, is_wanted: bool) -> None:
        """Let readers follow the journal from now on; one leads all that wait at one place."""
        self._claim_at.pop(conversation_id, None)
        places: dict[Place, None] = {}
        for reader in self._live(conversation_id):
            if reader.owner_ended(is_wanted=is_wanted):
                places[reader.place] = None
        for place in places:
            self.leaders.choose(place)

    def claim_at(self, conversation_id: str) -> float:
        """Return the time, by the loop's clock, from which on readers may claim it; -inf: now."""
        return self._claim_at.get(conversation_id, -inf)

    def claim_refused(self, conversation_id: str) -> None:
        """Note that another process owns this conversation; no reader claims it for a while."""
        self._claim_at[conversation_id] = anyio.current_time() + OWNER_ASKED_EVERY_S

    def deleted(self, conversation_id: str) -> None:
        """End the readers of a conversation that was deleted."""
        self._void_answer(conversation_id)
        for reader in self._live(conversation_id):
            reader.note_deleted()

    @property
    def is_closing(self) -> bool:
        """True once the `Conversations` begin to close: no further owner starts here."""
        return self._is_closing

    @property
    def is_closed(self) -> bool:
        """True once the `Conversations` are closed: the journal is closed, or about to be."""
        return self._is_closed

    def begin_closing(self) -> None:
        """Note that owners are being stopped: from now on readers do not start them again."""
        self._is_closing = True

    def end_live(self) -> None:
        """End every live reader, and each that begins from now on: no owner is active here."""
        self._is_live_over = True
        for conversation_id in list(self._readers):
            for reader in self._live(conversation_id):
                reader.close()

    def close(self) -> None:
        """End every reader, and each that begins from now on."""
        self._is_closed = True
        self.end_live()

    def read(
        self,
        conversation_id: str,
        *,
        after: int,
        live: bool,
        known_seq: int = 0,
        on_owner_ended: Callable[[], Awaitable[object]] | None = None,
        pieces: bool = False,
        is_for_other_node: bool = False,
        expected: Expected | None = None,
    ) -> EventReader:
        """Make an `EventReader` of the events after `after`.

        `expected`: the event that the log must have at `after`.
        `is_for_other_node`: another process has asked for the pieces, so this one asks no third
        process for them.
        """
        reader = EventReader(
            self,
            self._owned,
            self._journal,
            conversation_id,
            limits=self._limits,
            after=after,
            live=live,
            known_seq=known_seq,
            on_owner_ended=on_owner_ended,
            pieces=pieces,
            wants_relay=pieces and live and not is_for_other_node,
            expected=expected,
        )
        if self._is_closed or (live and self._is_live_over):
            reader.close()
        elif live:
            # Registered before it reads the journal: an event committed meanwhile is in one of the
            # two, and the cursor keeps it from being yielded twice.
            self._forget_dropped()
            self._readers_begun += 1
            dropped = (conversation_id, self._readers_begun)
            readers = self._readers.setdefault(conversation_id, {})
            readers[self._readers_begun] = weakref.ref(
                reader, lambda _: self._dropped.append(dropped)
            )
            owner = self._owned.get(conversation_id)
            # A reader that begins with these does not check the record at its cursor, and would not
            # notice that the log was deleted. A caller that gives this `known_seq` checks the first
            # event itself.
            if owner is not None and known_seq == after + 1:
                reader.begin_with(owner.recent_after(after))
            if (answer := self._live_answers.get(conversation_id)) is not None:
                reader.offer_answer(answer)
        return reader

    def _forget_dropped(self) -> None:
        while self._dropped:
            conversation_id, key = self._dropped.popleft()
            readers = self._readers[conversation_id]
            del readers[key]
            if not readers:
                del self._readers[conversation_id]
                self._claim_at.pop(conversation_id, None)
                self._unheard.discard(conversation_id)

    def _live(self, conversation_id: str) -> list[EventReader]:
        if self._dropped:
            self._forget_dropped()
        readers = self._readers.get(conversation_id)
        if readers is None:
            return []
        # A reader that is dropped meanwhile is noted, and stays in the table until the next call.
        return [reader for each in readers.values() if (reader := each()) is not None]
