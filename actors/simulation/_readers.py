"""The reader world: the readers of one conversation in one process, and nothing else.

An owner in this process commits events and then publishes them, and begins and ends at any time;
while there is none, another process writes. The readers follow everything from their cursors: some
are slow, and some give up waiting and wait again. There are no turns, agents or clients, so a run
takes a few hundred steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import anyio

from turnkeeper.runtime.testing import Simulation

from ..core.limits import Limits
from ..core.records import encode_record
from ..errors import ConversationsClosed, JournalUnavailable, OwnedElsewhere
from ..events import AgentMessageEvent, Event, LoggedEvent, TextDelta, UserMessageEvent
from ..journal import READ_BYTES, StoredRecord
from ..journals.memory import MemoryJournal, MemoryStore
from ..owner.event_reader import EventReader
from ..owner.subscriptions import Subscriptions
from ._disk import linger
from ._oracles import INVARIANTS, ShownAnswer

__all__ = ["ReaderWorld"]

_NAME = "c1"
_ACTIONS = 16
_READERS_MAX = 3
_SIZES = (1, 1, 2, 5)
_PIECES_MAX = 3
_CAUGHT_UP_S = 60.0
_LOOKS_S = (0.5, 0.5, 600.0)
"""How often a journal polls. Readers of an owner here must not depend on it."""
_LIMITS = Limits(buffered_events_max=4, read_page=3)
_AT = datetime(2025, 1, 1, tzinfo=UTC)


class _Journal(MemoryJournal):
    """A journal whose reads take a while, and fail now and then."""

    def __init__(
        self, simulation: Simulation, store: MemoryStore, *, fails: bool, look_s: float
    ) -> None:
        super().__init__(store)
        self.fails = fails
        self.look_s = look_s
        self._simulation = simulation

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512, bytes_max: int = READ_BYTES
    ) -> Sequence[StoredRecord]:
        await linger(self._simulation, "read", 0.4)
        if self.fails and self._simulation.chance("read fails", 0.1):
            raise JournalUnavailable("read: the disk does not answer")
        page = await super().read(conversation_id, after=after, limit=limit, bytes_max=bytes_max)
        await linger(self._simulation, "page", 0.3)
        return page

    async def wait_for_more(self, conversation_id: str, *, after: int) -> None:
        """Poll, as a journal does that is not notified of every write."""
        while len(self._store.log(conversation_id).records) == after:
            await self._simulation.sleep(self.look_s)


class _Owner:
    """The owner here, as its readers see it."""

    def __init__(self, world: ReaderWorld) -> None:
        self._world = world

    def end_if_lapsed(self) -> bool:
        return False

    def recent_after(self, seq: int) -> Sequence[LoggedEvent]:
        return self._world.published[seq:]


class ReaderWorld:
    """One run of it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._dies = simulation.chance("owners die", 0.5)
        """Owners may end between a commit and its publication."""
        self._patience_s = simulation.pick("patience", (None, None, 0.1, 0.05))
        """How long readers wait for an item before they give up waiting, and wait again."""
        self._rests_s = simulation.pick("readers rest", (0.0, 0.1, 1.0))
        self._takes_pieces = simulation.chance("has pieces", 0.6)
        store = MemoryStore()
        self._here = _Journal(
            simulation,
            store,
            fails=simulation.chance("reads fail", 0.3),
            look_s=simulation.pick("looks", _LOOKS_S),
        )
        self._elsewhere = MemoryJournal(store)
        self._subscriptions = Subscriptions(self._here, _LIMITS)
        self._log: list[Event] = []
        self._epoch = 0
        self._is_owned = False
        self._answers = 0
        self._cursors: list[int] = []
        """How far each reader has got."""
        self._readers: list[EventReader] = []
        self._is_over = False
        self.published: list[LoggedEvent] = []
        """The part of the log that an owner here knows to be committed."""

    async def play(self) -> None:
        """Write, and let the readers follow to the end."""
        simulation = self._simulation
        async with self._here, self._elsewhere, anyio.create_task_group() as group:
            self._epoch = (await self._elsewhere.claim(_NAME)).epoch
            await self._commit(self._elsewhere, 1)
            for number in range(1 + simulation.draw("readers", _READERS_MAX)):
                self._cursors.append(0)
                group.start_soon(self._follow, number)
            for _ in range(_ACTIONS):
                await self._act()
                await linger(simulation, "writer rests", 0.4, 1.0)
                if simulation.chance("writer waits for all", 0.3):
                    await self._catch_up()
            await self._catch_up()
            self._is_over = True
            self._subscriptions.close()
            await simulation.sleep(self._rests_s)
            group.cancel_scope.cancel()

    async def _catch_up(self) -> None:
        """Wait until every reader is at the end of the log, without any further write."""
        left_s = _CAUGHT_UP_S + (0.0 if self._is_owned else self._here.look_s)
        wait_s = 1.0
        while any(cursor < len(self._log) for cursor in self._cursors):
            if left_s <= 0.0:
                self._broken("P1", f"readers at {self._cursors}, the log at {len(self._log)}")
                return
            await self._simulation.sleep(wait_s)
            left_s -= wait_s
            wait_s *= 1.5

    def _broken(self, invariant: str, detail: str) -> None:
        self._simulation.broken(invariant, f"{INVARIANTS[invariant]}: {detail}")

    # --- the writers -----------------------------------------------------------------------------

    async def _act(self) -> None:
        simulation = self._simulation
        if not self._is_owned:
            if simulation.chance("written elsewhere", 0.5):
                await self._commit(self._elsewhere, simulation.pick("events", _SIZES))
            else:
                await self._begin()
            return
        match simulation.pick("act", ("write", "write", "answer", "end", "restart")):
            case "end":
                await self._end()
            case "restart":
                await self._restart()
            case "answer" if self._takes_pieces:
                await self._answer()
            case _:
                logged = await self._commit(self._here, simulation.pick("events", _SIZES))
                await self._publish(logged)

    async def _begin(self) -> None:
        """Begin an owner here. The events with which it takes over are published first."""
        self._epoch = (await self._here.claim(_NAME, takeover=True)).epoch
        self._is_owned = True
        self.published = [LoggedEvent(seq, e) for seq, e in enumerate(self._log, 1)]
        if self._simulation.chance("takes it up", 0.5):
            logged = await self._commit(self._here, 1)
            self._publish_now(logged)
        newest = (len(self._log), self._log[-1].id) if self._log else None
        self._subscriptions.owner_began(_NAME, _Owner(self), newest)

    async def _end(self) -> None:
        """End the owner here; perhaps with events that it has not published."""
        if self._dies and self._simulation.chance("dies", 0.6):
            await self._commit(self._here, 1)
        self._is_owned = False
        self._subscriptions.owner_ended(_NAME, is_wanted=self._simulation.chance("wanted", 0.3))
        self._epoch = (await self._elsewhere.claim(_NAME, takeover=True)).epoch

    async def _restart(self) -> None:
        """End the owner here, and begin the next one at once."""
        if self._dies:
            await self._commit(self._here, 1)
        self._subscriptions.owner_ended(_NAME, is_wanted=self._simulation.chance("wanted", 0.3))
        await self._begin()

    async def _commit(
        self, journal: MemoryJournal, size: int, answer: AgentMessageEvent | None = None
    ) -> Sequence[LoggedEvent]:
        """Write `size` events, and then perhaps an answer, in one commit."""
        first = len(self._log) + 1
        events: list[Event] = [
            UserMessageEvent(id=f"e{first + n:03}", timestamp=_AT, content="hello")
            for n in range(size)
        ]
        if answer is not None:
            events.append(answer)
        self._log += events
        await journal.append(
            _NAME,
            [encode_record(event) for event in events],
            epoch=self._epoch,
            expected_seq=first,
            is_unfinished=False,
        )
        return [LoggedEvent(first + n, event) for n, event in enumerate(events)]

    async def _publish(self, logged: Sequence[LoggedEvent]) -> None:
        await linger(self._simulation, "published", 0.3)
        self._publish_now(logged)

    def _publish_now(self, logged: Sequence[LoggedEvent]) -> None:
        self.published += logged
        self._subscriptions.publish(_NAME, logged)
        for reader in self._readers:
            # What it has in hand is looked at from outside: it keeps its limits to itself.
            if reader.buffered_count > _LIMITS.buffered_events_max:
                self._broken("B1", f"a reader has {reader.buffered_count} events")

    async def _answer(self) -> None:
        """Write an answer in pieces; the last of them comes with the event that carries it."""
        simulation = self._simulation
        if simulation.chance("readers fall behind", 0.5):
            self._publish_now(await self._commit(self._here, _SIZES[-1]))
        self._answers += 1
        number, text, head = self._answers, f"{self._answers}:", len(self._log)
        turn_id = f"t{number}"

        def publish_piece(piece: str, offset: int) -> None:
            delta = TextDelta(self._epoch, turn_id, 0, 1, offset, piece)
            self._subscriptions.publish_piece(_NAME, delta, head)

        publish_piece(text, 0)
        for n in range(simulation.draw("pieces", _PIECES_MAX)):
            await linger(simulation, "piece", 0.6, 0.5)
            publish_piece(f"p{n}.", len(text))
            text += f"p{n}."
        last = "" if simulation.chance("has no last piece", 0.5) else "last."
        answer = AgentMessageEvent(
            id=f"e{head + 1:03}", timestamp=_AT, turn_id=turn_id, content=text + last
        )
        logged = await self._commit(self._here, 0, answer)
        await linger(simulation, "published", 0.7, 0.5)
        if last:
            publish_piece(last, len(text))
        self._publish_now(logged)

    # --- the readers -----------------------------------------------------------------------------

    async def _follow(self, number: int) -> None:
        """Follow the conversation, and begin again at the cursor now and then."""
        simulation = self._simulation
        while not self._is_over:
            await linger(simulation, "reader comes", 0.5, 5.0)
            await self._read(number)

    async def _read(self, number: int) -> None:
        simulation = self._simulation
        cursor = self._cursors[number]
        reader = self._subscriptions.read(
            _NAME,
            after=cursor,
            live=True,
            on_owner_ended=self._find_owner if simulation.chance("wants an owner", 0.3) else None,
            known_seq=cursor + 1 if cursor < len(self._log) else 0,
            pieces=self._takes_pieces,
        )
        self._readers.append(reader)
        shown = ShownAnswer(is_calm=not self._dies)
        is_late = True  # it may have come in the middle of an answer
        while not self._is_over:
            try:
                item = await self._next(reader)
            except JournalUnavailable:
                item = None
            except (StopAsyncIteration, ConversationsClosed):
                if not self._is_over:
                    self._broken("S1", f"a reader at {self._cursors[number]} was ended")
                return
            if isinstance(item, TextDelta):
                if (found := shown.add(item)) is not None:
                    self._broken("C2", found)
                continue
            if item is not None:
                if (found := shown.see(item.event)) is not None and not is_late:
                    self._broken("C3", found)
                self._take(number, item)
            if cursor < self._cursors[number]:
                is_late = False
                await linger(simulation, "reader rests", 0.5, self._rests_s)
            if simulation.chance("reader leaves", 0.02):
                break
        self._readers.remove(reader)

    async def _next(self, reader: EventReader) -> LoggedEvent | TextDelta | None:
        """Return the next item; None if the patience ends before it comes."""
        if self._patience_s is None:
            return await reader.next_item()
        with self._simulation.move_on_after(self._patience_s):
            return await reader.next_item()
        return None

    def _take(self, number: int, logged: LoggedEvent) -> None:
        cursor = self._cursors[number]
        if logged.seq != cursor + 1:
            self._broken("S1", f"a reader at {cursor} was given {logged.seq}")
        elif self._log[cursor].id != logged.event.id:
            self._broken("C1", f"a reader at {cursor} was given {logged.event.id}")
        self._cursors[number] = logged.seq

    async def _find_owner(self) -> None:
        await self._simulation.sleep(0.0)
        if not self._is_owned:
            raise OwnedElsewhere(f"conversation {_NAME}", "elsewhere")
