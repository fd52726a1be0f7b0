"""Message ids that memory has let go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, WatchedJournal, verified
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.journal import Record
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


class HeldJournal(WatchedJournal):
    """Holds every append until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = anyio.Event()
        self.gate.set()

    async def before_append(self, records: Sequence[Record]) -> None:
        await self.gate.wait()


@pytest.mark.anyio
async def test_a_resent_message_is_known_though_its_batch_made_the_table_forget_it() -> None:
    """Seed 55: it was taken for a new one, and the journal refused the whole batch."""
    held, journal = HeldAgent(), HeldJournal()
    held.hold("3")
    limits = Limits(known_messages_max=3)
    async with verified(
        held, journal=journal, limits=limits, queued_messages_max=2
    ) as conversations:
        chat = conversations["c"]
        for n in ("1", "2"):
            await (await chat.send(n, message_id=n)).end()
        again: list[Any] = []

        async def send(message_id: str) -> None:
            again.append(await chat.send(message_id, message_id=message_id, on_overlap="interrupt"))

        journal.gate = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(send, "3")
            await settle()
            for message_id in ("4", "1"):  # taken together: the first makes "1" leave the table
                group.start_soon(send, message_id)
                await settle()
            journal.gate.set()

        assert {turn.message_id: turn.is_duplicate for turn in again} == {
            "1": True,
            "3": False,
            "4": False,
        }
