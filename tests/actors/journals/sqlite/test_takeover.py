"""The owner of a file that is taken over by force finds out by itself, also when it is idle."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, brief
from turnkeeper.actors.conversations.conversations import Conversations
from turnkeeper.actors.errors import OwnedElsewhere
from turnkeeper.actors.journals.sqlite.journal import SQLiteJournal

pytestmark = pytest.mark.anyio


async def test_an_idle_owner_that_was_taken_over_is_told_and_its_lease_has_ended(
    tmp_path: Path,
) -> None:
    path = tmp_path / "chats.db"
    told = anyio.Event()
    async with SQLiteJournal(path, poll_s=0.001) as first:
        first.watch_lease(told.set)
        await first.claim("c")
        assert first.is_lease_valid()
        async with SQLiteJournal(path, takeover=True, address="the rival") as second:
            await told.wait()
            assert not first.is_lease_valid()
            assert second.is_lease_valid()
            with pytest.raises(OwnedElsewhere, match="the rival"):
                await first.claim("c")


async def test_readers_beside_an_owner_that_was_taken_over_hear_of_the_successor(
    tmp_path: Path,
) -> None:
    path = tmp_path / "chats.db"
    heard = anyio.Event()
    async with Conversations(
        HeldAgent(), journal=SQLiteJournal(path, poll_s=0.001), idle_s=None
    ) as conversations:
        await (await conversations["c"].send("A")).end()

        async def read() -> None:
            async for logged in conversations["c"].events():
                if brief(logged.event) == "u:B":
                    heard.set()

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            async with Conversations(
                HeldAgent(), journal=SQLiteJournal(path, takeover=True)
            ) as successors:
                await (await successors["c"].send("B")).end()
                await heard.wait()
                with pytest.raises(OwnedElsewhere):
                    await conversations["c"].view()
            group.cancel_scope.cancel()


async def test_a_sidecar_that_was_removed_takes_nothing_away(tmp_path: Path) -> None:
    async with SQLiteJournal(tmp_path / "chats.db", poll_s=3600) as journal:
        journal._lock._sidecar.unlink()
        journal._lock.check()
        assert journal.is_lease_valid()
