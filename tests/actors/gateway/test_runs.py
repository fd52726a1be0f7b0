"""The runs of AG-UI: which chat message each came with, read from the log once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.actors.conversations.worlds import HeldAgent
from turnkeeper.actors import Conversation, Conversations, MemoryJournal
from turnkeeper.actors.gateway.runs import RUN_ID, Runs
from turnkeeper.actors.journal import StoredRecord

pytestmark = pytest.mark.anyio


class CountingJournal(MemoryJournal):
    """Counts the records that were read."""

    records = 0

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512
    ) -> Sequence[StoredRecord]:
        found = await super().read(conversation_id, after=after, limit=limit)
        self.records += len(found)
        return found


async def _send(chat: Conversation, n: int, run_id: str) -> None:
    turn = await chat.send(f"hello {n}", message_id=f"m{n}", metadata={RUN_ID: run_id})
    await turn.end()


async def test_each_request_reads_on_where_the_one_before_it_ended() -> None:
    journal, runs = CountingJournal(), Runs()
    async with Conversations(HeldAgent(), journal=journal, verify="off") as conversations:
        chat = conversations["c"]
        assert await runs.message_of(chat, "r0") is None
        for n in range(20):
            await _send(chat, n, f"r{n}")
        assert await runs.message_of(chat, "r7") == "m7"

        journal.records = 0
        assert await runs.message_of(chat, "r19") == "m19"
        assert journal.records <= 2

        await _send(chat, 20, "r20")
        journal.records = 0
        assert await runs.message_of(chat, "r20") == "m20"
        assert journal.records <= 6
        assert await runs.message_of(chat, "r0") == "m0"


@pytest.mark.parametrize("messages", [0, 1, 3, 4])
async def test_a_conversation_that_was_begun_again_has_none_of_the_old_runs(messages: int) -> None:
    """Its log is shorter than the old one, as long, or longer."""
    runs = Runs()
    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        for n in range(3):
            await _send(chat, n, f"old{n}")
        assert await runs.message_of(chat, "old2") == "m2"
        await conversations.delete("c")
        for n in range(messages):
            await _send(chat, n, f"new{n}")

        assert await runs.message_of(chat, "old2") is None
        for n in range(messages):
            assert await runs.message_of(chat, f"new{n}") == f"m{n}"


async def test_a_run_stays_with_the_message_that_came_first() -> None:
    runs = Runs()
    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await _send(chat, 1, "r")
        await _send(chat, 2, "r")

        assert await runs.message_of(chat, "r") == "m1"
