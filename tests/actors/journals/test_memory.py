"""What the journal in memory keeps of names that have no log."""

from __future__ import annotations

import gc

import pytest

from turnkeeper.actors.errors import Fenced
from turnkeeper.actors.journal import Rejection
from turnkeeper.actors.journals.contract import make_record
from turnkeeper.actors.journals.memory import MemoryJournal, MemoryStore
from turnkeeper.actors.values.tables import NO_TABLE

pytestmark = pytest.mark.anyio


async def test_a_name_that_is_only_asked_about_is_not_kept() -> None:
    """A client that asks for rejections of many names would fill the memory."""
    store = MemoryStore()
    async with MemoryJournal(store) as journal:
        assert await journal.rejections("c") == ()
        await journal.release("c", epoch=1)
        with pytest.raises(Fenced):
            await journal.reject("c", [Rejection(0.0, "v", "r", b"{}")], epoch=0)
        with pytest.raises(Fenced):
            await journal.append(
                "c", [make_record("e")], epoch=0, expected_seq=1, is_unfinished=False
            )
        assert not store.logs()


async def test_nothing_is_written_under_an_epoch_that_was_released() -> None:
    """As in a journal that processes share, where the next one may write under a later epoch."""
    async with MemoryJournal() as journal:
        claim = await journal.claim("c")
        await journal.release("c", epoch=claim.epoch)
        with pytest.raises(Fenced, match=f"its epoch {claim.epoch} was released") as caught:
            await journal.append(
                "c", [make_record("e")], epoch=claim.epoch, expected_seq=1, is_unfinished=False
            )
        assert caught.value.holder == ""


async def test_a_deleted_conversation_keeps_no_table_of_its_own() -> None:
    """Only its epoch: no older owner may write under its name."""
    store = MemoryStore()
    async with MemoryJournal(store) as journal:
        claim = await journal.claim("c")
        await journal.append(
            "c", [make_record("e")], epoch=claim.epoch, expected_seq=1, is_unfinished=False
        )
        await journal.delete("c", epoch=claim.epoch)
        again = await journal.claim("c")
        (log,) = store.logs().values()
        held = [one for one in gc.get_referents(log) if isinstance(one, dict | list)]
        assert all(one is NO_TABLE for one in held)
        assert again.epoch > claim.epoch
        await journal.append(
            "c", [make_record("e")], epoch=again.epoch, expected_seq=1, is_unfinished=False
        )
        assert [one.event_id for one in await journal.read("c")] == ["e"]
