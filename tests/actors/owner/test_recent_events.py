"""The reader of a turn that has just begun: it begins with what its owner here has in memory."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, WatchedJournal, brief
from turnkeeper.actors import Conversations, LoggedEvent, MemoryJournal, TextDelta, Turn
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import ConversationDeleted
from turnkeeper.actors.journal import Claim, Record, StoredRecord
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
        self, conversation_id: str, *, after: int = 0, limit: int = 512
    ) -> Sequence[StoredRecord]:
        self.reads += 1
        return await super().read(conversation_id, after=after, limit=limit)

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
