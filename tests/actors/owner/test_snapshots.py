"""Activation from a snapshot."""

from __future__ import annotations

import json
from collections.abc import Sequence

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent
from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    RollingCondenser,
)
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.journal import READ_BYTES, Snapshot, StoredRecord

pytestmark = pytest.mark.anyio


class CountingJournal(MemoryJournal):
    """Counts the records that are read."""

    records_read = 0

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512, bytes_max: int = READ_BYTES
    ) -> Sequence[StoredRecord]:
        records = await super().read(conversation_id, after=after, limit=limit, bytes_max=bytes_max)
        self.records_read += len(records)
        return records


async def converse(journal: MemoryJournal, count: int) -> int:
    """Have a long, condensed conversation; gives the length of its log."""
    condenser = RollingCondenser(max_size=20)
    async with Conversations(HeldAgent(), journal=journal, condenser=condenser) as conversations:
        chat = conversations["c"]
        for n in range(count):
            await (await chat.send(f"tool {n}")).end()
        return (await journal.info("c")).head


async def test_activation_reads_the_snapshot_and_the_tail_after_it() -> None:
    journal = CountingJournal()
    length = await converse(journal, 150)
    assert length > 800
    journal.records_read = 0

    async with Conversations(HeldAgent(), journal=journal) as conversations:
        view = await conversations["c"].view()
        read = journal.records_read

        assert read < 250
        await (await conversations["c"].send("B")).end()
        # The same as from the whole log.
        assert list(view) == list((await conversations["c"].at(length)).view)


async def test_an_owner_that_had_to_read_a_long_log_writes_a_snapshot_with_its_first_commit() -> (
    None
):
    """Else each activation of a log that was imported would read all of it again."""
    journal = CountingJournal()
    async with journal:
        epoch = (await journal.claim("c")).epoch
        records = [encode_record(UserMessageEvent(content=f"{n}")) for n in range(300)]
        await journal.append("c", records, epoch=epoch, expected_seq=1, is_unfinished=False)

    async with Conversations(HeldAgent(), journal=journal) as conversations:
        await conversations["c"].append(UserMessageEvent(content="one more"))
        with anyio.fail_after(60):
            while await journal.read_snapshot("c") is None:
                await anyio.lowlevel.checkpoint()
    journal.records_read = 0
    async with Conversations(HeldAgent(), journal=journal) as conversations:
        await conversations["c"].view()

    assert journal.records_read == 0


@pytest.mark.parametrize("damage", ["older version", "not json", "another shape"])
async def test_a_snapshot_that_does_not_fit_is_passed_over(damage: str) -> None:
    journal = CountingJournal()
    length = await converse(journal, 60)
    async with journal:
        snapshot = await journal.read_snapshot("c")
    assert snapshot is not None
    version, payload = {
        "older version": ("0;", snapshot.payload),
        "not json": (snapshot.version, b"\x00"),
        "another shape": (snapshot.version, json.dumps({"seq": snapshot.seq}).encode()),
    }[damage]
    async with journal:
        newer = Snapshot(snapshot.seq, version, payload)
        await journal.write_snapshot("c", newer, epoch=(await journal.info("c")).epoch)
    journal.records_read = 0

    async with Conversations(HeldAgent(), journal=journal) as conversations:
        await conversations["c"].view()

    assert journal.records_read >= length
