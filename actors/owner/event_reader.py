"""One reader of a conversation: its events, and the pieces of answers between them.

Owns what a reader has yielded, and promises that it yields each event above its seq in order,
without a gap or a repeat. A reader has three parts. Its `LogCursor` (`log_cursor.py`) is its place
in the log, and keeps that promise. Its `PieceCursor` (`live_answer.py`) is its place in the answers
that are being written. The `EventReader` itself yields from both, and waits when both have nothing:
for an owner here, for another process, or for the reader that leads (`leaders.py`).

One task iterates a reader, and only that task awaits here. The other methods are called between its
steps, by `Subscriptions` and by the reader that leads; they never wait. A wait that is cancelled
loses nothing, and lets another reader lead. A reader keeps nothing that has to survive a crash.

If the journal has the event that ends an answer before all pieces of another process have come, a
reader waits for the next piece for `PIECE_WAIT_S` at most, and then skips the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Sequence
from typing import Any, Protocol

import anyio

from turnkeeper.runtime.lowlevel import Bell, make_bell

from ..core.commands import Expected
from ..core.limits import Limits
from ..core.records import decode_record
from ..core.snapshots import SLICE_EVENTS
from ..errors import ConversationDeleted, ConversationsClosed, OwnedElsewhere
from ..events import LoggedEvent, TextDelta
from ..journal import Journal, StoredRecord
from .leaders import Leaders, Place
from .live_answer import LiveAnswer, PieceCursor
from .log_cursor import BEHIND, CURRENT, DELETED, ENDING, LogCursor, Signal

__all__ = ["EventReader", "OtherReaders"]

PIECE_WAIT_S = 0.5
"""The seconds that a reader waits for the next piece from another process."""


class OtherReaders(Protocol):
    """The state that all readers of this process share; `Subscriptions` implements it."""

    leaders: Leaders
    want_pieces: Callable[[str], None] | None
    """Asks another process for the pieces of a conversation; None if none can be asked."""

    def check_home(self) -> None:
        """Raise `RuntimeError` in another event loop than that of the readers."""

    def claim_at(self, conversation_id: str) -> float:
        """Return the time, by the loop's clock, from which on readers may try to claim it."""

    def claim_refused(self, conversation_id: str) -> None:
        """Note that another process owns this conversation."""

    def note_heard(self, conversation_id: str, *, is_heard: bool) -> None:
        """Note whether the process that owns the conversation can be heard."""


def _wake_none() -> None:
    """Do nothing: the reader does not wait."""


class EventReader(AsyncIterator[LoggedEvent]):
    """The events of one conversation above a seq, in order, without a gap or a repeat.

    A live reader waits for a conversation that does not exist yet, and ends only when its
    `Conversations` close (with `ConversationsClosed` if it has not caught up). Any other reader
    stops at the end of the log, and raises `ConversationNotFound` if there is none. A reader raises
    `ConversationDeleted` if the conversation is deleted, at once if this process deletes it. It
    does so, too, if the log is shorter than `known_seq`, a seq that the log once had.
    It raises `NotThisLog` if the log does not have the event that is `expected` at its seq.

    If `on_owner_ended` is given, the reader awaits it before its first wait, and again after the
    end of an owner in this process. A reader that began with events from the memory of an owner
    here awaits it only then.
    If `on_owner_ended` raises `OwnedElsewhere`, the reader follows the other owner, and awaits
    `on_owner_ended` again every `OWNER_ASKED_EVERY_S` seconds, at the same time as all readers of
    the conversation. It raises any other error of `on_owner_ended`.

    Iterate it from one task. Cancelling its wait loses nothing: it continues from its cursor.
    """

    def __init__(
        self,
        others: OtherReaders,
        owned: Container[str],
        journal: Journal,
        conversation_id: str,
        *,
        limits: Limits,
        after: int,
        live: bool,
        known_seq: int,
        on_owner_ended: Callable[[], Awaitable[object]] | None,
        pieces: bool,
        wants_relay: bool,
        expected: Expected | None = None,
    ) -> None:
        self.wants_relay = wants_relay
        """True if pieces are asked for in the process that owns the conversation."""
        self._others = others
        self._owned = owned
        """The conversations with an owner here, as the subscriptions keep them."""
        self._limits = limits
        self._journal = journal
        self._conversation_id = conversation_id
        self._is_live = live
        self._log = LogCursor(
            journal,
            conversation_id,
            after=after,
            is_live=live,
            known_seq=known_seq,
            page_size=limits.read_page,
            page_bytes=limits.read_bytes,
            expected=expected,
        )
        self._on_owner_ended = on_owner_ended
        self._pieces = PieceCursor() if pieces else None
        # True at first: a reader does not know whether there is an owner.
        self._has_owner_ended = True
        self._offered_bytes = 0
        """The bytes of the large events that were offered since none was left to yield."""
        self._is_chosen = False
        """True once it is woken to lead, until it has left its wait."""
        self._unheard_at = -1
        """The seq at which its relay ended; -1 if it has looked at the journal since."""
        self._unpaused = 0
        """The events of pages that it has yielded since it last let other tasks run."""
        self._bell: Bell | None = None
        """The bell at which it waits; made in its loop."""
        self._wake: Callable[[], object] = _wake_none
        """Wakes the reader, if it waits; called when an item or the end may have come."""

    def offer(self, events: Sequence[LoggedEvent], large_bytes: int = 0) -> None:
        """Take events that were just committed, in order.

        `large_bytes`: the bytes of the large ones; it may be too many.
        """
        offered = self._log.offered
        if large_bytes:
            self._offered_bytes = large_bytes + (self._offered_bytes if offered else 0)
        offered.extend(events)
        if len(offered) > self._limits.buffered_events_max or (
            large_bytes and self._offered_bytes > self._limits.buffered_bytes_max
        ):
            offered.clear()
            if self._pieces is not None:
                self._pieces.drop_between()
            self._log.note(Signal.LOOK)
        self._wake()

    def begin_with(self, recent: Sequence[LoggedEvent]) -> None:
        """Take all events above the cursor from their owner, before anything else is offered.

        So a reader of what was just written neither reads the journal nor looks for an owner.
        """
        if 0 < len(recent) <= self._limits.buffered_events_max:
            self._log.offered.extend(recent)
            self._has_owner_ended = False
            self._log.note(Signal.READ)

    def offer_answer(self, answer: LiveAnswer) -> None:
        """Take an answer that is being written."""
        if self._pieces is not None and self._pieces.add(answer):
            if self._log.seq == self._unheard_at:
                self._log.note(Signal.LOOK)
            self._wake()

    def piece_came(self) -> None:
        """Note that the answer that is being written has another piece."""
        if self._pieces is not None:
            self._wake()

    @property
    def short_seq(self) -> int:
        """The seq of the newest event that replaces pieces, if not all were yielded; 0: none."""
        return 0 if self._pieces is None else self._pieces.short_seq

    @property
    def buffered_count(self) -> int:
        """How many offered events it holds that were not yielded yet."""
        return len(self._log.offered)

    @property
    def is_behind(self) -> bool:
        """True while it reads from the journal."""
        return self._log.state is BEHIND

    @property
    def is_waiting(self) -> bool:
        """True while a task waits for an event that an owner here or a leader offers."""
        return self._bell is not None and self._bell.is_waiting

    @property
    def _is_at_rest(self) -> bool:
        """True while it waits for an event only, and not for pieces or for an owner."""
        if self._bell is None or not self._bell.is_waiting or self._has_answers:
            return False
        return not self._seeks_owner

    @property
    def _leads_next(self) -> bool:
        """True if it has nothing to do but wait: once chosen, it leads at once."""
        log = self._log
        if log.state is not CURRENT or log.page or log.offered or self._has_answers:
            return False
        return not self._seeks_owner

    @property
    def _has_answers(self) -> bool:
        """True if it takes pieces, and has not reached the end of each answer."""
        return self._pieces is not None and bool(self._pieces.answers)

    @property
    def _seeks_owner(self) -> bool:
        """True if it awaits `on_owner_ended` before it waits for an event."""
        return self._has_owner_ended and self._on_owner_ended is not None

    @property
    def place(self) -> Place:
        """The place in the log that it has reached."""
        return self._conversation_id, self._log.seq, self._log.event_id

    def waits_at(self, place: Place) -> bool:
        """True if it waits there, and has nothing left to yield."""
        return self.is_waiting and not self._log.page and self.place == place

    def try_choose(self, place: Place) -> bool:
        """Wake it to lead if it waits there; return True if so."""
        if not self.waits_at(place):
            return False
        self._is_chosen = True
        self._wake()
        return True

    def take_page(
        self, place: Place, cursor_id: str | None, page: Collection[StoredRecord]
    ) -> None:
        """Take a page that the leader has read, if this reader waits there.

        If the log has more, the reader finds that out when it waits again.
        """
        if self.waits_at(place):
            self._log.event_id = cursor_id
            self._log.page.extend(page)
            self._wake()

    def look(self) -> None:
        """Look at the journal: it may have events that were not offered."""
        self._log.note(Signal.LOOK)
        self._wake()

    def look_for(self, seq: int) -> None:
        """Look at the journal if the event at `seq` was not yielded yet, or let the leader look."""
        leader = self._others.leaders.at(self.place) if self.is_waiting else None
        if self._log.seq < seq and (leader is None or leader is self):
            self.look()

    def relay_ended(self) -> None:
        """Note that the other process is not heard any more, and may delete the log meanwhile.

        The reader looks at the journal once another answer is offered, unless an event comes first.
        If it looked now, it would then ask for pieces again, and a relay that ends at once, since
        no owner is active there, would begin again without a pause.
        """
        self._unheard_at = self._log.seq

    def owner_began(self, newest: tuple[int, str | None] | None) -> None:
        """Note that an owner has begun in this process; look at the journal if this is behind it.

        A reader that has yielded the newest event has missed nothing. The id tells the log from one
        that was deleted and begun anew meanwhile.
        """
        if newest != (self._log.seq, self._log.event_id):
            self.look()
        elif not self._is_at_rest:
            self._wake()

    def owner_ended(self, *, is_wanted: bool) -> bool:
        """Note that an owner of the conversation has ended in this process.

        `is_wanted`: a caller may wait for the owner's work, so the reader awaits `on_owner_ended`
        before it waits again. Return True if the reader goes on waiting, for a leader to wake it.
        """
        self._has_owner_ended = self._has_owner_ended or is_wanted
        is_at_rest = self._is_at_rest
        if not is_at_rest:
            self._wake()
        elif self.wants_relay:
            self._ask_for_pieces()
        return is_at_rest

    def note_deleted(self) -> None:
        """Note that the conversation was deleted."""
        self._log.note(Signal.DELETE)
        self._wake()

    def close(self) -> None:
        """Note that nothing more will be offered or can be read."""
        self._log.note(Signal.CLOSE)
        self._wake()

    def __anext__(self) -> Awaitable[LoggedEvent]:
        if self._pieces is not None:
            return self._next_event()
        # Without pieces each item is an event, so `_next_event` would be a needless coroutine.
        item: Awaitable[Any] = self.next_item()  # Any: a LoggedEvent
        return item

    async def _next_event(self) -> LoggedEvent:
        while True:
            item = await self.next_item()
            if isinstance(item, LoggedEvent):
                return item

    async def next_item(self, pieces_of: str | None = None) -> LoggedEvent | TextDelta:
        """Return the next event or piece. Raises `StopAsyncIteration` at the end.

        `pieces_of`: the turn whose pieces are wanted; None: those of all turns.
        """
        log = self._log
        pieces = self._pieces
        while True:
            state = log.state
            if state is DELETED:
                raise ConversationDeleted(self._conversation_id)
            # A reader that is behind looks first: the pieces may be of a log that was begun anew.
            if (
                pieces is not None
                and pieces.answers
                and (state is not BEHIND or log.page)
                and (piece := pieces.take_due(log.seq, pieces_of)) is not None
            ):
                return piece
            if log.page:
                # Decoded first: a record that cannot be read is not skipped.
                logged = decode_record(self._conversation_id, log.page[0])
                if (wait := self._wait_before(logged)) is not None:
                    await wait
                    continue
                log.page.popleft()
            elif state is CURRENT or state is ENDING:
                if log.offered:
                    logged = log.offered.popleft()
                    if logged.seq != log.seq + 1:
                        log.pass_over(logged)
                        continue
                elif state is ENDING or not self._is_live:
                    raise StopAsyncIteration
                else:
                    try:
                        if self._has_owner_ended and self._on_owner_ended is not None:
                            await self._find_owner(self._on_owner_ended)
                        else:
                            await self._wait()
                    except BaseException:
                        self._leave_wait(will_lead=False)
                        raise
                    if self._is_chosen:
                        self._leave_wait(will_lead=self._leads_next)
                    continue
            elif state is BEHIND:
                self._unheard_at = -1
                await log.read_page()
                continue
            else:
                raise ConversationsClosed(self._conversation_id)
            log.seq, log.event_id = logged.seq, logged.event.id
            if pieces is not None:
                pieces.pass_event(logged)
            return logged

    def _wait_before(self, logged: LoggedEvent) -> Awaitable[None] | None:
        """Return the wait that is due before the next event of the page; None if none is."""
        if self._unpaused == SLICE_EVENTS:
            # The events of a page come without a wait: let other tasks run after each slice.
            self._unpaused = 0
            return anyio.lowlevel.checkpoint()
        pieces = self._pieces
        if pieces is not None and self._must_wait_for_pieces(pieces, logged):
            return self._wait_for_pieces(pieces.answers[-1])
        self._unpaused += 1
        return None

    def _must_wait_for_pieces(self, pieces: PieceCursor, logged: LoggedEvent) -> bool:
        """Return True if the page has the event `logged` before its answer's last pieces came."""
        if self._log.state is not BEHIND and self._log.state is not CURRENT:
            return False
        return pieces.has_more_to_come(logged, self._log.page[0].epoch)

    async def _wait_for_pieces(self, answer: LiveAnswer) -> None:
        """Wait for the last pieces of an answer that the journal has already."""
        if self._conversation_id in self._owned:
            await self._wait()
            return
        if await self._wait_for_piece():
            # The other process cannot be heard; the event replaces the pieces.
            answer.void()
            self._others.note_heard(self._conversation_id, is_heard=False)

    async def _wait_for_piece(self) -> bool:
        """Wait for another process to be heard; return True if that took too long."""
        with anyio.move_on_after(PIECE_WAIT_S) as scope:
            await self._wait_for_bell()
        return scope.cancelled_caught

    async def _find_owner(self, on_owner_ended: Callable[[], Awaitable[object]]) -> None:
        name, others = self._conversation_id, self._others
        if name in self._owned or anyio.current_time() >= others.claim_at(name):
            try:
                await on_owner_ended()
            except OwnedElsewhere:
                others.claim_refused(name)
            else:
                self._has_owner_ended = False
                # The previous owner may have written events without publishing them.
                self._log.note(Signal.LOOK)
                return
        # Each try is a claim, which the journal refuses: so readers do not try at each event of the
        # other owner, but now and then, all at once.
        with anyio.CancelScope(deadline=others.claim_at(name)):
            await self._wait()

    def _leave_wait(self, *, will_lead: bool) -> None:
        """If it was chosen to lead, and was cancelled or has an item to yield, choose another."""
        if self._is_chosen:
            self._is_chosen = False
            if not will_lead:
                self._others.leaders.choose(self.place)

    def _wait(self) -> Awaitable[None]:
        # There was no await since the reader found nothing, so no offer is missed.
        if self._conversation_id not in self._owned:
            if self._others.leaders.at(self.place) is None:
                return self._lead()
            if self.wants_relay:
                self._ask_for_pieces()
        return self._wait_for_bell() if self._bell is None else self._bell.wait()

    def _wait_for_bell(self) -> Awaitable[None]:
        if self._bell is None:
            self._others.check_home()
            self._bell = make_bell()
            self._wake = self._bell.ring
        return self._bell.wait()

    async def _lead(self) -> None:
        """Follow the journal until it has more, for all readers that wait at this place."""
        place, leaders = self.place, self._others.leaders
        leaders.begin(place, self)
        try:
            pieces = self._pieces
            # While another process writes an answer, its next piece comes soon: do not query.
            is_next_a_piece = pieces is not None and pieces.expects_piece(self._log.seq)
            if not is_next_a_piece or await self._wait_for_piece():
                await self._follow()
            if self._log.state is BEHIND and self._conversation_id not in self._owned:
                try:
                    await self._log.read_page()
                except Exception:
                    leaders.send_to_journal(place)
                    raise
                leaders.share(place, self._log.event_id, self._log.page)
        finally:
            leaders.end(place)

    async def _follow(self) -> None:
        """Wait for another process to write, or for an owner here."""
        if self.wants_relay:
            self._ask_for_pieces()
        with anyio.CancelScope() as following:
            wake, self._wake = self._wake, following.cancel
            try:
                await self._journal.wait_for_more(self._conversation_id, after=self._log.end)
                self._log.note(Signal.LOOK)
            finally:
                self._wake = wake

    def _ask_for_pieces(self) -> None:
        """Ask for the pieces that another process writes."""
        if self._others.want_pieces is not None:
            self._others.want_pieces(self._conversation_id)
        elif self._pieces is not None and self._pieces.is_in_turn:
            # The turn runs in another process, and none can be asked.
            self._others.note_heard(self._conversation_id, is_heard=False)
