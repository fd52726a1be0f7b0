"""What is published to a reader is a hint: whatever does not fit is read from the journal."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from tests.actors.core.logs import Maker
from turnkeeper.actors import MemoryJournal
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.events import Event, LoggedEvent
from turnkeeper.actors.journal import StoredRecord
from turnkeeper.actors.owner.subscriptions import EventReader, Subscriptions
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


class DeafJournal(MemoryJournal):
    """Tells no reader of what was written; its reads wait while the gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = anyio.Event()
        self.gate.set()

    async def wait_for_more(self, conversation_id: str, *, after: int) -> None:
        await anyio.sleep_forever()

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512
    ) -> Sequence[StoredRecord]:
        await self.gate.wait()
        return await super().read(conversation_id, after=after, limit=limit)

    async def write(self, epoch: int, first: int, *events: Event) -> None:
        await self.append(
            "c",
            [encode_record(event) for event in events],
            epoch=epoch,
            expected_seq=first,
            is_unfinished=False,
        )


async def test_an_event_behind_a_gap_is_not_given_before_those_in_the_gap() -> None:
    make = Maker()
    events = [make.user() for _ in range(4)]
    async with DeafJournal() as journal:
        epoch = (await journal.claim("c")).epoch
        subscriptions = Subscriptions(journal)
        subscriptions.owner_began("c", lambda: False)
        await journal.write(epoch, 1, *events[:2])
        reader = subscriptions.read("c", after=0, live=True)
        assert [(await anext(reader)).seq for _ in range(2)] == [1, 2]

        await journal.write(epoch, 3, *events[2:])
        subscriptions.publish("c", [LoggedEvent(4, events[3])])

        assert [(await anext(reader)).seq for _ in range(2)] == [3, 4]


async def test_a_page_whose_reading_was_cancelled_is_read_again() -> None:
    async with DeafJournal() as journal:
        epoch = (await journal.claim("c")).epoch
        subscriptions = Subscriptions(journal)
        subscriptions.owner_began("c", lambda: False)
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

            subscriptions.owner_began("c", lambda: False)
            await settle()

            assert found == [1, 2]
            group.cancel_scope.cancel()


async def _read_on(reader: EventReader, found: list[int]) -> None:
    while True:
        found.append((await anext(reader)).seq)
