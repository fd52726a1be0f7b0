"""The reader of a turn that has just begun: it begins with what its owner here has in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, WatchedJournal, brief
from turnkeeper.actors import (
    Conversation,
    Conversations,
    LoggedEvent,
    MemoryJournal,
    SQLiteJournal,
    TextDelta,
    Turn,
)
from turnkeeper.actors.core.admission import Duplicate
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import ConversationDeleted
from turnkeeper.actors.events import AgentMessageEvent
from turnkeeper.actors.journal import READ_BYTES, Claim, Record, StoredRecord
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


class CountingJournal(MemoryJournal):
    """Counts how often the log is read, and can claim later."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.claims = anyio.Event()
        self.claims.set()

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512, bytes_max: int = READ_BYTES
    ) -> Sequence[StoredRecord]:
        self.reads += 1
        return await super().read(conversation_id, after=after, limit=limit, bytes_max=bytes_max)

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        await self.claims.wait()
        return await super().claim(conversation_id, takeover=takeover, any_name=any_name)


async def _follow(turn: Turn, seen: list[str]) -> None:
    async for item in turn:
        seen += [item.text if isinstance(item, TextDelta) else brief(item.event)]


async def test_a_turn_that_has_just_begun_is_followed_without_reading_the_journal() -> None:
    journal, held = CountingJournal(), HeldAgent()
    async with Conversations(held, journal=journal, verify="off") as conversations:
        for _ in range(2):  # in a new conversation, and in one that has a log
            text = f"stream {journal.reads}"
            held.hold(text)
            turn = await conversations["c"].send(text)
            await held.reached[text].wait()
            journal.reads = 0
            seen: list[str] = []
            async with anyio.create_task_group() as group:
                group.start_soon(_follow, turn, seen)
                await settle()
                assert seen == [f"u:{text}", "a("]
                held.release(text)

            assert "".join(seen[1:-2]) == f"a({text})"
            assert seen[-2:] == [f"a:a({text})", "completed"]
            assert await turn.reply() == f"a({text})"
            assert journal.reads == 0


@pytest.mark.parametrize(
    "limits",
    [Limits(recent_events_max=3), Limits(buffered_events_max=3)],
    ids=["let go by the owner", "more than a reader holds"],
)
async def test_a_turn_that_memory_has_in_part_is_read_from_the_journal(limits: Limits) -> None:
    async with Conversations(
        HeldAgent(), journal=CountingJournal(), limits=limits, verify="off"
    ) as conversations:
        turn = await conversations["c"].send("tool")
        await turn.end()
        seen: list[str] = []

        await _follow(turn, seen)

        assert seen == ["u:tool", "call", "result", "a:a(tool)", "completed"]


async def said_and_retracted(chat: Conversation, text: str) -> None:
    event = AgentMessageEvent(content=text)
    await chat.append(event)
    await chat.retract([event.id])


@pytest.mark.parametrize("is_followed", [False, True], ids=["alone", "beside a slow reader"])
async def test_few_large_events_are_held_that_have_left_the_view(
    tmp_path: Path, *, is_followed: bool
) -> None:
    """A bound in number alone would let 256 events have hundreds of MiB."""
    limits = Limits(recent_bytes_max=1 << 20, buffered_bytes_max=1 << 20)
    async with Conversations(
        HeldAgent(), journal=SQLiteJournal(tmp_path / "chats.db"), limits=limits
    ) as conversations:
        chat = conversations["c"]
        first = AgentMessageEvent(content="small")
        await chat.append(first)
        reader = chat.events()
        seqs = [(await anext(reader)).seq]
        if is_followed:
            await chat.append(AgentMessageEvent(content="what it waits for"))
            seqs.append((await anext(reader)).seq)
        else:
            del reader
        tracemalloc.start()
        try:
            for _ in range(100):
                await said_and_retracted(chat, "x" * 200_000)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < 8 << 20  # the stuck detector has 20 of them
        assert await chat.append(first) == Duplicate(1)
        if is_followed:
            seqs += [(await anext(reader)).seq for _ in range(200)]
            assert seqs == list(range(1, 203))


class HoldsAnswers(WatchedJournal):
    """Writes an agent's message when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.comes, self.let = anyio.Event(), anyio.Event()

    async def before_append(self, records: Sequence[Record]) -> None:
        if any(record.kind == "agent_message" for record in records):
            self.comes.set()
            await self.let.wait()


async def test_an_event_that_is_decided_and_not_durable_is_not_begun_with() -> None:
    journal = HoldsAnswers()
    async with Conversations(HeldAgent(), journal=journal, verify="off") as conversations:
        turn = await conversations["c"].send("A")
        await journal.comes.wait()
        seen: list[str] = []
        async with anyio.create_task_group() as group:
            group.start_soon(_follow, turn, seen)
            await settle()
            assert seen == ["u:A"]
            journal.let.set()

        assert seen == ["u:A", "a:a(A)", "completed"]


async def test_a_conversation_that_was_deleted_is_not_in_memory_while_its_owner_begins_anew() -> (
    None
):
    journal = CountingJournal()
    async with Conversations(HeldAgent(), journal=journal, verify="off") as conversations:
        turn = await conversations["c"].send("A")
        await turn.end()
        journal.claims = anyio.Event()
        await conversations.delete("c")
        items: list[LoggedEvent | TextDelta] = []

        with pytest.raises(ConversationDeleted):
            items.extend([item async for item in turn])

        assert items == []
        journal.claims.set()


class LapsingJournal(MemoryJournal):
    """Its lease can run out for what was claimed before, as after a process had stood still."""

    has_lapsed = False

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        self.has_lapsed = False
        return await super().claim(conversation_id, takeover=takeover, any_name=any_name)

    def is_lease_valid(self, *, since: float | None = None) -> bool:
        return not (since is not None and self.has_lapsed) and super().is_lease_valid()


async def test_a_reader_does_not_wait_for_an_owner_whose_lease_has_run_out() -> None:
    """The journal may have more, from the process that took over; nothing is published here."""
    journal, held = LapsingJournal(), HeldAgent()
    held.hold("A")
    async with Conversations(held, journal=journal, verify="off") as conversations:
        turn = await conversations["c"].send("A")
        await held.reached["A"].wait()
        journal.has_lapsed = True
        seen: list[str] = []

        async with anyio.create_task_group() as group:
            group.start_soon(_follow, turn, seen)
            await settle()
            group.cancel_scope.cancel()

        assert seen == ["u:A", "interrupted"]
