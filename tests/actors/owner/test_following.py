"""Readers of a conversation that another process owns, or did, or will."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tests.actors.conversations.worlds import HeldAgent, brief, verified
from turnkeeper.actors import (
    ConversationInfo,
    Conversations,
    MemoryJournal,
    MemoryStore,
)
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.errors import ConversationDeleted, OwnedElsewhere
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.journal import READ_BYTES, Claim, Record, StoredRecord
from turnkeeper.actors.owner.event_reader import EventReader
from turnkeeper.runtime import OwnershipLost

pytestmark = pytest.mark.costly

ONE_TURN = ["started", "u:A", "a:a(A)", "completed"]


class CountingJournal(MemoryJournal):
    """Counts what following costs."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.reads = 0
        self.waits = 0
        self.claims = 0

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        self.claims += 1
        return await super().claim(conversation_id, takeover=takeover, any_name=any_name)

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512, bytes_max: int = READ_BYTES
    ) -> Sequence[StoredRecord]:
        self.reads += 1
        return await super().read(conversation_id, after=after, limit=limit, bytes_max=bytes_max)

    async def wait_for_more(self, conversation_id: str, *, after: int) -> None:
        self.waits += 1
        await super().wait_for_more(conversation_id, after=after)


@asynccontextmanager
async def two_processes() -> AsyncIterator[tuple[Conversations, Conversations, CountingJournal]]:
    """Two owners over one store, as two processes are; and the second one's journal."""
    store = MemoryStore()
    journal = CountingJournal(store)
    async with (
        verified(HeldAgent(), journal=MemoryJournal(store)) as first,
        verified(HeldAgent(), journal=journal) as second,
    ):
        yield first, second, journal


async def take(reader: EventReader, count: int) -> list[tuple[int, str]]:
    return [
        (logged.seq, brief(logged.event)) for logged in [await anext(reader) for _ in range(count)]
    ]


async def test_a_reader_hears_though_the_one_before_it_is_dropped_as_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that drops a reader, and the collector of cycles, come between any two steps."""
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        before = [chat.events()]

        def ref(*args: Any) -> object:  # noqa: ANN401 - those of `weakref.ref`
            before.clear()
            return weakref.ref(*args)

        monkeypatch.setattr(
            "turnkeeper.actors.owner.subscriptions.weakref", SimpleNamespace(ref=ref)
        )
        reader = chat.events()
        monkeypatch.undo()
        assert not before
        await (await chat.send("A")).end()
        await take(reader, len(ONE_TURN))
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(take, reader, len(ONE_TURN))
                await wait_all_tasks_blocked()
                await (await chat.send("B")).end()


async def test_what_another_process_writes_is_followed_from_before_it_begins() -> None:
    async with two_processes() as (first, second, _):
        reader = second["c"].events()
        seen: list[tuple[int, str]] = []

        async def follow() -> None:
            seen.extend(await take(reader, 8))

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await wait_all_tasks_blocked()
            for _ in range(2):
                await (await first["c"].send("A")).end()

        assert seen == list(enumerate([*ONE_TURN, *ONE_TURN], 1))


async def test_following_passes_over_to_live_when_this_process_becomes_the_owner() -> None:
    store = MemoryStore()
    journal = CountingJournal(store)
    async with verified(HeldAgent(), journal=journal) as second:
        reader = second["c"].events()
        async with verified(HeldAgent(), journal=MemoryJournal(store)) as first:
            await (await first["c"].send("A")).end()
            assert await take(reader, 4) == list(enumerate(ONE_TURN, 1))
            with pytest.raises(OwnedElsewhere):
                await second["c"].send("B")

        seen: list[tuple[int, str]] = []

        async def follow() -> None:
            seen.extend(await take(reader, 4 * 20))

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await wait_all_tasks_blocked()
            await second["c"].view()  # the owner is here now
            await wait_all_tasks_blocked()
            waits = journal.waits
            for _ in range(20):
                await (await second["c"].send("A")).end()

        assert [seq for seq, _ in seen] == list(range(5, 85))
        assert journal.waits == waits  # nothing was asked of the journal for that


async def test_a_turn_that_another_process_ends_has_ended_here_too() -> None:
    """This process's owner is taken over while its agent still thinks."""
    store = MemoryStore()
    held = HeldAgent()
    held.hold("A")
    journal = MemoryJournal(store)
    async with Conversations(held, journal=journal) as first:
        turn = await first["c"].send("A")
        ended: list[str] = []

        async def wait() -> None:
            ended.append((await turn.end()).outcome)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await held.reached["A"].wait()
            rival = MemoryJournal(store)
            async with rival:
                await rival.claim("c", takeover=True)
                held.release("A")
                await wait_all_tasks_blocked()  # its answer was refused, and its owner has stopped
                assert ended == []
                async with verified(HeldAgent(), journal=rival):
                    await wait_all_tasks_blocked()

        assert ended == ["interrupted"]


async def test_a_turn_that_runs_elsewhere_is_not_claimed_at_each_of_its_events() -> None:
    """A claim that is refused costs the database a statement, and this process an actor."""
    store = MemoryStore()
    held = HeldAgent()
    held.hold("A")
    journal = CountingJournal(store)
    ended: list[str] = []
    async with (
        verified(held, journal=MemoryJournal(store)) as first,
        verified(HeldAgent(), journal=journal) as second,
    ):
        await first["c"].send("A", message_id="a")
        await held.reached["A"].wait()
        turn = await second["c"].turn("a")

        async def wait() -> None:
            ended.append((await turn.end()).outcome)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            for number in range(5):
                await first["c"].send(f"B{number}")
                await wait_all_tasks_blocked()
            assert journal.claims == 1
            held.release("A")

    assert ended == ["completed"]


async def test_a_reader_that_waits_for_an_owner_here_follows_the_next_one_elsewhere() -> None:
    store = MemoryStore()
    seen: list[tuple[int, str]] = []
    async with verified(HeldAgent(), journal=MemoryJournal(store)) as first:
        await (await first["c"].send("A")).end()
        reader = first["c"].events()

        async def follow() -> None:
            while True:
                seen.extend(await take(reader, 1))

        async with anyio.create_task_group() as group, MemoryJournal(store) as rival:
            group.start_soon(follow)
            await wait_all_tasks_blocked()
            await rival.claim("c", takeover=True)
            with pytest.raises(OwnershipLost):
                await first["c"].send("A")
            async with verified(HeldAgent(), journal=rival) as second:
                await (await second["c"].send("A")).end()
                await wait_all_tasks_blocked()
            group.cancel_scope.cancel()

    assert seen == list(enumerate([*ONE_TURN, *ONE_TURN], 1))


@pytest.mark.parametrize("reaches", [1, 4, 9])
async def test_a_log_that_was_deleted_elsewhere_is_not_taken_for_the_one_that_was_read(
    reaches: int,
) -> None:
    """Whether what is there now is shorter, as long, or longer."""
    async with two_processes() as (first, second, _):
        await (await first["c"].send("A")).end()
        reader = second["c"].events()
        await take(reader, 4)
        journal = first._journal
        claim = await journal.claim("c")
        await journal.delete("c", epoch=claim.epoch)
        records = records_of(reaches)
        claim = await journal.claim("c")
        await journal.append("c", records, epoch=claim.epoch, expected_seq=1, is_unfinished=False)
        if reaches == 4:
            await journal.append(
                "c",
                records_of(1),
                epoch=claim.epoch,
                expected_seq=5,
                is_unfinished=False,
            )

        with pytest.raises(ConversationDeleted):
            await anext(reader)


def records_of(count: int) -> Sequence[Record]:
    return [encode_record(UserMessageEvent(content=f"{n}")) for n in range(count)]


async def test_a_reader_that_begins_behind_the_end_waits_until_the_log_gets_there() -> None:
    async with two_processes() as (first, second, journal):
        await (await first["c"].send("A")).end()
        reader = second["c"].events(after=6)
        seen: list[tuple[int, str]] = []

        async def follow() -> None:
            seen.extend(await take(reader, 2))

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await wait_all_tasks_blocked()
            waits = journal.waits
            await wait_all_tasks_blocked()
            assert journal.waits == waits == 1
            await (await first["c"].send("A")).end()

        assert seen == [(7, "a:a(A)"), (8, "completed")]


async def test_a_thousand_subscribers_cost_the_journal_nothing_for_each_event() -> None:
    """Each sees everything once; what is read is read by each when it begins."""
    journal = CountingJournal(MemoryStore())
    async with Conversations(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("0")).end()
        await chat.view()
        seen: list[list[int]] = [[] for _ in range(1_000)]

        async def follow(number: int) -> None:
            async for logged in chat.events(after=number % 4):
                seen[number].append(logged.seq)
                if logged.seq == 80:
                    return

        async with anyio.create_task_group() as group:
            for number in range(1_000):
                group.start_soon(follow, number)
            await wait_all_tasks_blocked()
            reads = journal.reads
            for n in range(1, 20):
                await (await chat.send(str(n))).end()

        assert all(seqs == list(range(number % 4 + 1, 81)) for number, seqs in enumerate(seen))
        # Those that wait for the end of a turn read its beginning; the thousand read nothing.
        assert journal.reads - reads <= 2 * 19
        assert journal.waits == 0


async def test_a_reader_that_follows_ends_when_its_conversations_are_left() -> None:
    seen: list[int] = []

    async def follow(reader: EventReader) -> None:
        seen.extend([logged.seq async for logged in reader])

    async with anyio.create_task_group() as group:
        async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
            group.start_soon(follow, conversations["c"].events())
            await wait_all_tasks_blocked()
        await wait_all_tasks_blocked()

    assert seen == []


async def test_what_is_written_between_two_looks_at_where_a_log_ends_is_not_passed_over() -> None:
    class Growing(MemoryJournal):
        async def info(self, conversation_id: str) -> ConversationInfo:
            claim = await self.claim(conversation_id)
            await self.append(
                conversation_id,
                records_of(3),
                epoch=claim.epoch,
                expected_seq=claim.head + 1,
                is_unfinished=False,
            )
            return await super().info(conversation_id)

    async with verified(HeldAgent(), journal=Growing()) as conversations:
        assert await take(conversations["c"].events(after=1), 2) == [(2, "u:1"), (3, "u:2")]
