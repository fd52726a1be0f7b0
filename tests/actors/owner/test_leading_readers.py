"""While no owner is here, one of the readers that wait at one place asks the journal for all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, until_passivated
from turnkeeper.actors import Conversations, MemoryJournal
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.errors import ConversationDeleted, OwnedElsewhere
from turnkeeper.actors.events import (
    AgentMessageEvent,
    Event,
    LoggedEvent,
    TextDelta,
    UserMessageEvent,
)
from turnkeeper.actors.journal import READ_BYTES, StoredRecord
from turnkeeper.actors.owner.event_reader import EventReader
from turnkeeper.actors.owner.subscriptions import Subscriptions
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio

READERS = 20


class CountingJournal(MemoryJournal):
    """Counts the questions that readers ask; keeps the answers back while the gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.waits = 0
        self.gate = anyio.Event()
        self.gate.set()
        self.read_gate = anyio.Event()
        self.read_gate.set()
        self._written = 0

    async def wait_for_more(self, conversation_id: str, *, after: int) -> None:
        self.waits += 1
        await super().wait_for_more(conversation_id, after=after)
        await self.gate.wait()

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512, bytes_max: int = READ_BYTES
    ) -> Sequence[StoredRecord]:
        self.reads += 1
        try:
            return await super().read(
                conversation_id, after=after, limit=limit, bytes_max=bytes_max
            )
        finally:
            await self.read_gate.wait()

    def asked(self) -> tuple[int, int]:
        """Return how often it was waited for, and how often read, since this was last called."""
        found = (self.waits, self.reads)
        self.waits = self.reads = 0
        return found

    async def write(self, *events: Event) -> None:
        """Write as another process does, which no reader here is told of."""
        epoch = (await self.claim("c")).epoch
        await self.append(
            "c",
            [encode_record(event) for event in events],
            epoch=epoch,
            expected_seq=self._written + 1,
            is_unfinished=False,
        )
        self._written += len(events)

    async def begin_anew(self) -> None:
        """Delete the conversation, as another process does; what is written next begins it."""
        await self.delete("c", epoch=(await self.claim("c")).epoch)
        self._written = 0


class Owner:
    """An owner that keeps nothing in memory, and has lost its lease if it is asked."""

    def end_if_lapsed(self) -> bool:
        return True

    def recent_after(self, seq: int) -> Sequence[LoggedEvent]:
        return ()


class Follower:
    """A task that reads on; the seqs and the texts of pieces that it has found."""

    def __init__(self, reader: EventReader) -> None:
        self.reader = reader
        self.found: list[int | str] = []
        self.scope = anyio.CancelScope()

    async def run(self) -> None:
        with self.scope:
            try:
                while True:
                    item = await self.reader.next_item()
                    self.found.append(item.text if isinstance(item, TextDelta) else item.seq)
            except ConversationDeleted:
                self.found.append("deleted")


@asynccontextmanager
async def following(readers: Sequence[EventReader]) -> AsyncIterator[list[Follower]]:
    """Let each reader read on in a task of its own, until it waits."""
    followers = [Follower(reader) for reader in readers]
    async with anyio.create_task_group() as group:
        for follower in followers:
            group.start_soon(follower.run)
        await settle()
        yield followers
        group.cancel_scope.cancel()


def said(text: str = "hello") -> UserMessageEvent:
    return UserMessageEvent(content=text)


async def test_an_owner_that_goes_and_comes_again_costs_no_more_with_more_readers() -> None:
    asked: list[list[tuple[int, int]]] = []
    for readers in (1, READERS):
        journal = CountingJournal()
        async with Conversations(HeldAgent(), journal=journal) as opened:
            await opened["c"].append(said())
            async with following([opened["c"].events() for _ in range(readers)]) as followers:
                journal.asked()
                await until_passivated(opened, "c")
                await settle()
                gone = journal.asked()
                waiting = [follower.reader.is_waiting for follower in followers]
                assert waiting.count(False) == 1, "all but one were left in peace"
                await opened["c"].view()
                await settle()
                asked.append([gone, journal.asked()])

                await opened["c"].append(said())
                await settle()
                assert [each.found for each in followers] == [[1, 2]] * readers
    assert asked[0] == asked[1]


async def test_an_event_of_another_process_is_read_once_for_all_readers() -> None:
    async with CountingJournal() as journal:
        await journal.write(said())
        readers = Subscriptions(journal)
        async with following([readers.read("c", after=0, live=True) for _ in range(READERS)]) as (
            followers
        ):
            journal.asked()
            for seq in (2, 3, 4):
                await journal.write(said())
                await settle()
                assert journal.asked() == (1, 1)
                assert [each.found[-1] for each in followers] == [seq] * READERS


async def test_a_page_that_is_full_is_not_taken_for_the_end_of_the_log() -> None:
    async with CountingJournal() as journal:
        await journal.write(said())
        readers = Subscriptions(journal, Limits(read_page=3))
        async with following([readers.read("c", after=0, live=True) for _ in range(3)]) as (
            followers
        ):
            await journal.write(*[said() for _ in range(7)])
            await settle()

            assert [each.found for each in followers] == [list(range(1, 9))] * 3


async def test_readers_at_other_places_are_given_what_comes_after_their_own() -> None:
    """One of them has begun beyond the end of the log."""
    async with CountingJournal() as journal:
        await journal.write(said(), said())
        readers = Subscriptions(journal)
        async with following([readers.read("c", after=n, live=True) for n in (2, 3, 0, 3)]) as (
            followers
        ):
            await journal.write(said(), said(), said())
            await settle()

            found = [each.found for each in followers]
            assert found == [[3, 4, 5], [4, 5], [1, 2, 3, 4, 5], [4, 5]]


def leader_of(followers: Sequence[Follower]) -> Follower:
    """Return the one that asks the journal: it does not wait for what others offer."""
    (leader,) = (each for each in followers if not each.reader.is_waiting)
    return leader


async def _leader_leaves(followers: Sequence[Follower], _: Subscriptions) -> Follower:
    leader = leader_of(followers)
    leader.scope.cancel()
    return leader


async def _owner_goes(followers: Sequence[Follower], readers: Subscriptions) -> Follower:
    readers.owner_began("c", Owner(), None)
    await settle()
    assert all(each.reader.is_waiting for each in followers)
    readers.owner_ended("c", is_wanted=False)
    woken = leader_of(followers)
    woken.scope.cancel()
    return woken


async def _lease_is_lost(followers: Sequence[Follower], readers: Subscriptions) -> Follower:
    readers.owner_began("c", Owner(), None)
    await settle()
    readers.lease_lost()
    woken = leader_of(followers)
    woken.scope.cancel()
    return woken


@pytest.mark.parametrize("leave", [_leader_leaves, _owner_goes, _lease_is_lost])
async def test_another_reader_leads_when_the_one_that_leads_or_is_to_lead_leaves(
    leave: Callable[[Sequence[Follower], Subscriptions], Awaitable[Follower]],
) -> None:
    async with CountingJournal() as journal:
        await journal.write(said())
        readers = Subscriptions(journal)
        async with following([readers.read("c", after=0, live=True) for _ in range(5)]) as (
            followers
        ):
            left = await leave(followers, readers)
            await settle()
            journal.asked()

            await journal.write(said())
            await settle()

            others = [each for each in followers if each is not left]
            assert [each.found for each in others] == [[1, 2]] * 4
            assert journal.asked() == (1, 1)


@pytest.mark.parametrize("leave", [_leader_leaves, _owner_goes, _lease_is_lost])
async def test_a_reader_that_is_chosen_to_lead_wakes_no_other(
    leave: Callable[[Sequence[Follower], Subscriptions], Awaitable[Follower]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[EventReader] = []
    wait = EventReader._wait

    def note_wait(reader: EventReader) -> Awaitable[None]:
        waits.append(reader)
        return wait(reader)

    async with CountingJournal() as journal:
        await journal.write(said())
        readers = Subscriptions(journal)
        async with following([readers.read("c", after=0, live=True) for _ in range(5)]) as (
            followers
        ):
            left = await leave(followers, readers)
            monkeypatch.setattr(EventReader, "_wait", note_wait)
            await settle()

            others = [each for each in followers if each is not left]
            assert [one for one in waits if one is not left.reader] == [leader_of(others).reader]


async def test_a_process_that_hears_of_an_event_asks_for_it_once() -> None:
    async with CountingJournal() as journal:
        await journal.write(said())
        readers = Subscriptions(journal)
        async with following([readers.read("c", after=0, live=True) for _ in range(READERS)]) as (
            followers
        ):
            journal.gate = anyio.Event()  # the journal tells of nothing
            journal.asked()
            await journal.write(said())

            readers.relay_passed("c", 2, None)
            await settle()

            assert [each.found for each in followers] == [[1, 2]] * READERS
            assert journal.asked() == (1, 1)


async def test_a_reader_that_waits_for_the_last_pieces_is_not_given_the_answer_twice() -> None:
    answer = AgentMessageEvent(turn_id="t", content="one two")
    async with CountingJournal() as journal:
        await journal.write(said())
        readers = Subscriptions(journal)
        plain = readers.read("c", after=0, live=True)
        shows_pieces = readers.read("c", after=0, live=True, pieces=True)
        async with following([plain]) as (first,), following([shows_pieces]) as (second,):
            assert not plain.is_waiting, "it leads"
            journal.gate = anyio.Event()
            readers.relay_piece("c", TextDelta(2, "t", 0, 1, 0, "one "), 1)
            await journal.write(answer)
            shows_pieces.look()
            await settle()
            assert second.found == [1, "one "], "the journal has the answer before its last piece"
            journal.gate.set()
            await settle()
            assert first.found == [1, 2]

            readers.relay_piece("c", TextDelta(2, "t", 0, 1, 4, "two"), 1)
            readers.relay_passed("c", 2, "t")
            await settle()

            assert second.found == [1, "one ", "two", 2]


@pytest.mark.parametrize("answers", [False, True])
async def test_no_reader_follows_the_journal_beside_an_owner_here(answers: bool) -> None:
    async with CountingJournal() as journal:
        await journal.write(said())
        readers = Subscriptions(journal)
        reader = readers.read("c", after=0, live=True, pieces=True)
        async with following([reader]) as (follower,):
            if answers:  # then the leader waits for the next piece before it asks the journal
                readers.relay_piece("c", TextDelta(2, "t", 0, 1, 0, "one "), 1)
                await settle()
            assert readers.leaders.at(reader.place) is reader

            place, newest = reader.place, (1, reader.place[2] or "")
            readers.owner_began("c", Owner(), newest)
            await settle()

            assert readers.leaders.at(place) is None
            assert reader.place == place
            assert follower.found == ([1, "one "] if answers else [1])


async def test_one_reader_looks_for_an_owner_for_all_that_want_one() -> None:
    """Each look is a claim, which the journal refuses as long as another process is the owner."""
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        raise OwnedElsewhere("conversation c", "elsewhere")

    async with CountingJournal() as journal:
        await journal.write(said())
        readers = Subscriptions(journal)
        wanting = [readers.read("c", after=0, live=True, on_owner_ended=ask) for _ in range(3)]
        async with following(wanting[:2]) as first, following(wanting[2:]) as later:
            followers = [*first, *later]
            assert asked == 1
            readers.owner_ended("c", is_wanted=True)
            await settle()
            assert asked == 2

            journal.asked()
            await journal.write(said())
            await settle()
            assert [each.found for each in followers] == [[1, 2]] * 3
            assert journal.asked() == (1, 1)


async def test_all_readers_find_the_deletion_that_one_has_found_for_them() -> None:
    """Though the log, begun anew meanwhile, is as long as theirs was."""
    async with CountingJournal() as journal:
        await journal.write(said())
        readers = Subscriptions(journal)
        async with following([readers.read("c", after=0, live=True) for _ in range(3)]) as found:
            journal.read_gate = anyio.Event()
            await journal.begin_anew()
            await settle()
            await journal.write(said("anew"))
            journal.read_gate.set()
            await settle()
            assert [each.found for each in found] == [[1, "deleted"]] * 3


@pytest.mark.parametrize("owner", ["here", "elsewhere"])
async def test_a_reader_gets_no_piece_of_the_log_that_was_begun_anew(owner: str) -> None:
    """Though that log is as long as the reader's was, and no event comes while it is answered."""
    async with CountingJournal() as journal:
        await journal.write(said())
        readers = Subscriptions(journal)
        reader = readers.read("c", after=0, live=True, pieces=True)
        async with following([reader]) as (follower,):
            journal.gate = anyio.Event()
            await journal.begin_anew()
            await journal.write(event := said("anew"))
            piece = TextDelta(4, "turn", 0, 1, 0, "anew, too")
            if owner == "here":
                readers.owner_began("c", Owner(), (1, event.id))
                readers.publish_piece("c", piece, 1)
            else:
                readers.drop_relayed("c")
                readers.relay_piece("c", piece, 1)
            await settle()
            assert follower.found == [1, "deleted"]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_reader_that_missed_an_event_looks_for_it_though_pieces_keep_coming(
    is_cancelled: bool,
) -> None:
    """Its leader did not find the event for it: it had read before, or its client has left."""
    async with CountingJournal() as journal:
        await journal.write(said())
        readers = Subscriptions(journal)
        both = [readers.read("c", after=0, live=True, pieces=True) for _ in range(2)]
        async with following(both) as followers:
            readers.relay_piece("c", TextDelta(2, "t", 0, 1, 0, "one "), 1)
            await settle()
            journal.read_gate = anyio.Event()
            await journal.write(said())
            readers.relay_passed("c", 2, None)
            await settle()
            (leader,) = (each for each in followers if not each.reader.is_waiting)
            (other,) = (each for each in followers if each is not leader)
            if is_cancelled:
                leader.scope.cancel()
            else:
                await journal.write(said())
                readers.relay_passed("c", 3, None)
            journal.read_gate.set()
            await settle()
            readers.relay_piece("c", TextDelta(2, "t", 0, 1, 4, "two"), 1)
            await settle()

            events = [2] if is_cancelled else [2, 3]
            assert other.found == [1, "one ", *events, "two"]
