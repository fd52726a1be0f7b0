"""What is published to a reader is a hint: whatever does not fit is read from the journal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, until_passivated
from tests.actors.core.logs import Maker
from turnkeeper.actors import Conversations, MemoryJournal
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.errors import CorruptLog
from turnkeeper.actors.events import (
    AgentMessageEvent,
    Event,
    LoggedEvent,
    TextDelta,
    TurnEndedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.journal import READ_BYTES, StoredRecord
from turnkeeper.actors.owner.event_reader import EventReader
from turnkeeper.actors.owner.subscriptions import Subscriptions
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


class DeafJournal(MemoryJournal):
    """Tells no reader of what was written; its reads wait while the gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = anyio.Event()
        self.gate.set()
        self.reads = 0
        self.damaged_seq = 0

    async def wait_for_more(self, conversation_id: str, *, after: int) -> None:
        await anyio.sleep_forever()

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512, bytes_max: int = READ_BYTES
    ) -> Sequence[StoredRecord]:
        await self.gate.wait()
        self.reads += 1
        if after + 1 == self.damaged_seq:
            raise CorruptLog(conversation_id, self.damaged_seq, "the record does not match")
        return await super().read(conversation_id, after=after, limit=limit, bytes_max=bytes_max)

    async def write(self, epoch: int, first: int, *events: Event) -> None:
        await self.append(
            "c",
            [encode_record(event) for event in events],
            epoch=epoch,
            expected_seq=first,
            is_unfinished=False,
        )


class Owner:
    """An owner that keeps nothing in memory and is never doubted."""

    def end_if_lapsed(self) -> bool:
        return False

    def recent_after(self, seq: int) -> Sequence[LoggedEvent]:
        return ()


async def test_an_event_behind_a_gap_is_not_given_before_those_in_the_gap() -> None:
    make = Maker()
    events = [make.user() for _ in range(4)]
    async with DeafJournal() as journal:
        epoch = (await journal.claim("c")).epoch
        subscriptions = Subscriptions(journal)
        subscriptions.owner_began("c", Owner())
        await journal.write(epoch, 1, *events[:2])
        reader = subscriptions.read("c", after=0, live=True)
        assert [(await anext(reader)).seq for _ in range(2)] == [1, 2]

        await journal.write(epoch, 3, *events[2:])
        subscriptions.publish("c", [LoggedEvent(4, events[3])])

        found: list[int] = []
        async with anyio.create_task_group() as group:
            group.start_soon(_read_on, reader, found)
            await settle()
            group.cancel_scope.cancel()
        assert found == [3, 4]


async def test_a_page_whose_reading_was_cancelled_is_read_again() -> None:
    async with DeafJournal() as journal:
        epoch = (await journal.claim("c")).epoch
        subscriptions = Subscriptions(journal)
        subscriptions.owner_began("c", Owner())
        await journal.write(epoch, 1, Maker().user())
        reader = subscriptions.read("c", after=0, live=True)
        found: list[int] = []
        journal.gate = anyio.Event()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(_read_on, reader, found)
                await settle()
                scope.cancel()
        journal.gate.set()

        async with anyio.create_task_group() as group:
            group.start_soon(_read_on, reader, found)
            await settle()
            group.cancel_scope.cancel()

        assert found == [1]


async def test_a_reader_looks_at_the_journal_when_an_owner_begins() -> None:
    """The owner before it may have committed what it could not publish."""
    make = Maker()
    async with DeafJournal() as journal:
        epoch = (await journal.claim("c")).epoch
        subscriptions = Subscriptions(journal)
        await journal.write(epoch, 1, make.user())
        reader = subscriptions.read("c", after=0, live=True)
        found: list[int] = []
        async with anyio.create_task_group() as group:
            group.start_soon(_read_on, reader, found)
            await settle()
            await journal.write(epoch, 2, make.user())
            await settle()
            assert found == [1]

            subscriptions.owner_began("c", Owner())
            await settle()

            assert found == [1, 2]
            group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("newest", "reads"),
    [
        pytest.param((1, "e1"), 0, id="it has seen all"),
        pytest.param((2, "e1"), 1, id="it is behind"),
        pytest.param((1, "e2"), 1, id="another log"),
        pytest.param(None, 1, id="not known"),
    ],
)
async def test_a_reader_that_has_yielded_the_newest_event_reads_nothing_when_an_owner_begins(
    newest: tuple[int, str] | None, reads: int
) -> None:
    event = UserMessageEvent(id="e1", timestamp=datetime.now(UTC), content="hello")
    async with DeafJournal() as journal:
        epoch = (await journal.claim("c")).epoch
        subscriptions = Subscriptions(journal)
        await journal.write(epoch, 1, event)
        reader = subscriptions.read("c", after=0, live=True)
        found: list[int] = []
        async with anyio.create_task_group() as group:
            group.start_soon(_read_on, reader, found)
            await settle()
            before = journal.reads

            subscriptions.owner_began("c", Owner(), newest)
            await settle()

            assert (found, journal.reads - before) == ([1], reads)
            subscriptions.publish("c", [LoggedEvent(2, Maker().user())])
            await settle()
            assert found == [1, 2], "it waits for the owner from then on"
            group.cancel_scope.cancel()


async def test_an_owner_that_begins_reads_once_for_all_readers_that_have_seen_all() -> None:
    reads: list[int] = []
    for readers in (1, 20):
        journal = DeafJournal()
        async with Conversations(HeldAgent(), journal=journal) as conversations:
            conversation = conversations["c"]
            await conversation.append(UserMessageEvent(content="hello"))
            found: list[list[int]] = [[] for _ in range(readers)]
            async with anyio.create_task_group() as group:
                for each in found:
                    group.start_soon(_read_on, conversation.events(), each)
                await settle()
                await until_passivated(conversations, "c")
                await settle()
                before = journal.reads

                await conversation.append(UserMessageEvent(content="again"))
                await settle()

                reads.append(journal.reads - before)
                assert found == [[1, 2]] * readers
                group.cancel_scope.cancel()
    assert reads[0] == reads[1]


async def test_an_owner_begins_from_its_snapshot_though_the_newest_record_is_damaged() -> None:
    """The owner looks at that record for its readers; they are told of the damage, it goes on."""
    journal = DeafJournal()
    limits = Limits(snapshot_events=3)
    async with Conversations(HeldAgent(), journal=journal, limits=limits) as conversations:
        conversation = conversations["c"]
        for text in ("one", "two", "three"):
            await conversation.append(UserMessageEvent(content=text))
        await settle()
        found: list[int] = []

        async def read() -> None:
            with pytest.raises(CorruptLog):
                await _read_on(conversation.events(), found)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await settle()
            assert found == [1, 2, 3]
            await until_passivated(conversations, "c")
            journal.damaged_seq = 3
            snapshot = await journal.read_snapshot("c")
            assert snapshot is not None
            assert snapshot.seq == 3, "nothing of the log is read beside it"

            assert (await conversation.append(UserMessageEvent(content="four"))).seq == 4


def _piece(answer: int, attempt: int, offset: int, text: str) -> TextDelta:
    return TextDelta(1, "t", answer, attempt, offset, text)


async def _items(reader: EventReader) -> list[int | str]:
    """All that it can give now: the seqs of events, the texts of pieces."""
    found: list[int | str] = []

    async def read() -> None:
        while True:
            item = await reader.next_item()
            found.append(item.text if isinstance(item, TextDelta) else item.seq)

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await settle()
        group.cancel_scope.cancel()
    return found


async def test_no_piece_comes_after_the_end_of_its_turn_that_was_written_elsewhere() -> None:
    """This process has not heard yet that its owner was shut out."""
    make = Maker()
    end = TurnEndedEvent(turn_id="t", outcome="interrupted")
    async with DeafJournal() as journal:
        epoch = (await journal.claim("c")).epoch
        subscriptions = Subscriptions(journal)
        subscriptions.owner_began("c", Owner())
        await journal.write(epoch, 1, make.user())
        reader = subscriptions.read("c", after=0, live=True, pieces=True)
        subscriptions.publish_piece("c", _piece(0, 1, 0, "one "), 1)
        assert await _items(reader) == [1, "one "]

        rival_epoch = (await journal.claim("c")).epoch
        await journal.write(rival_epoch, 2, end)
        reader.look()
        assert await _items(reader) == [2]
        subscriptions.publish_piece("c", _piece(0, 1, 4, "two"), 1)

        assert await _items(reader) == []


async def test_a_reader_that_begins_behind_the_end_of_the_log_is_not_held_up_by_an_answer() -> None:
    make = Maker()
    said = AgentMessageEvent(turn_id="t", content="one")
    async with DeafJournal() as journal:
        epoch = (await journal.claim("c")).epoch
        subscriptions = Subscriptions(journal)
        subscriptions.owner_began("c", Owner())
        await journal.write(epoch, 1, make.user())
        reader = subscriptions.read("c", after=2, live=True, pieces=True)
        subscriptions.publish_piece("c", _piece(0, 1, 0, "one"), 1)
        await journal.write(epoch, 2, said)
        subscriptions.publish("c", [LoggedEvent(2, said)])

        subscriptions.publish_piece("c", _piece(1, 1, 0, "two"), 2)

        assert await _items(reader) == ["two"]


async def test_a_reader_whose_buffer_was_full_gets_the_answer_that_is_being_written() -> None:
    """It gets the rest of the one that it had begun, too; those between come as events alone."""
    make = Maker()
    said = [AgentMessageEvent(turn_id="t", content=f"{n}") for n in range(5)]
    async with DeafJournal() as journal:
        epoch = (await journal.claim("c")).epoch
        subscriptions = Subscriptions(journal, Limits(buffered_events_max=3))
        subscriptions.owner_began("c", Owner())
        await journal.write(epoch, 1, make.user())
        reader = subscriptions.read("c", after=0, live=True, pieces=True)
        subscriptions.publish_piece("c", _piece(0, 1, 0, "0"), 1)
        assert await _items(reader) == [1, "0"]
        for n, event in enumerate(said):
            for offset in (1, 2) if not n else range(3):
                subscriptions.publish_piece("c", _piece(n, 1, offset, f"{n}"), 1 + n)
            await journal.write(epoch, 2 + n, event)
            subscriptions.publish("c", [LoggedEvent(2 + n, event)])
        subscriptions.publish_piece("c", _piece(5, 1, 0, "5"), 6)
        assert reader._pieces is not None
        assert len(reader._pieces.answers) <= 4

        assert await _items(reader) == ["00", 2, 3, 4, "333", 5, "444", 6, "5"]


async def test_attempts_that_are_void_do_not_pile_up_in_a_reader_that_stands_still() -> None:
    async with DeafJournal() as journal:
        epoch = (await journal.claim("c")).epoch
        subscriptions = Subscriptions(journal)
        subscriptions.owner_began("c", Owner())
        await journal.write(epoch, 1, Maker().user())
        reader = subscriptions.read("c", after=0, live=True, pieces=True)
        for attempt in range(1, 100):
            subscriptions.publish_piece("c", _piece(0, attempt, 0, f"{attempt}"), 1)

        assert reader._pieces is not None
        assert len(reader._pieces.answers) == 1
        assert await _items(reader) == [1, "99"]


async def _read_on(reader: EventReader, found: list[int]) -> None:
    while True:
        found.append((await anext(reader)).seq)


async def test_a_second_task_at_one_iterator_is_refused_and_the_first_one_goes_on() -> None:
    got: list[int] = []
    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        conversation = conversations["c"]
        await conversation.append(UserMessageEvent(content="first"))
        events = conversation.events(after=1)

        async def read() -> None:
            got.append((await anext(events)).seq)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RuntimeError, match="an iterator of its own"):
                await anext(events)
            await conversation.append(UserMessageEvent(content="second"))
    assert got == [2]
