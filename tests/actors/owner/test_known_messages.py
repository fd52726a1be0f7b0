"""Message ids that memory has let go."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, HeldJournal, verified
from turnkeeper.actors import Appended, Duplicate, SQLiteJournal
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import MessageIdConflict
from turnkeeper.actors.events import TaskListUpdatedEvent, UserMessageEvent
from turnkeeper.actors.journals.memory import MemoryJournal
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


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


async def test_a_message_appended_twice_in_one_batch_is_known_though_memory_has_let_it_go() -> None:
    """The journal refused the whole batch, and the owner called that a bug of its own."""
    journal, limits = HeldJournal(), Limits(known_messages_max=2)
    async with verified(
        HeldAgent(), journal=journal, limits=limits, queued_messages_max=1
    ) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        answers: dict[int, Appended | Duplicate | str] = {}

        async def append(n: int, message_id: str) -> None:
            try:
                message = UserMessageEvent(content="by hand", message_id=message_id)
                answers[n] = await chat.append(message)
            except MessageIdConflict as conflict:
                answers[n] = f"at {conflict.seq}"

        journal.gate = anyio.Event()
        async with anyio.create_task_group() as group:
            for n, message_id in enumerate("12342", 2):  # all but the first are one batch
                group.start_soon(append, n, message_id)
                await settle()
            journal.gate.set()

        assert answers == {**{n: Appended(n) for n in range(2, 6)}, 6: "at 3"}


@pytest.mark.anyio
async def test_what_is_sent_twice_in_one_batch_is_known_though_memory_has_let_it_go() -> None:
    """Found by the owner world: the journal refused the whole batch, with all that it had."""
    held, journal = HeldAgent(), HeldJournal()
    limits = Limits(known_messages_max=3, recent_events_max=2)
    async with verified(
        held, journal=journal, limits=limits, queued_messages_max=2
    ) as conversations:
        chat = conversations["c"]
        note = TaskListUpdatedEvent(id="a note", tasks=())
        for n in ("0", "1", "2", "x"):  # the table is full, and ids below "x" may be forgotten
            await (await chat.send(n, message_id=n)).end()
        said: dict[str, list[int]] = {}

        async def send(message_id: str) -> None:
            turn = await chat.send(message_id, message_id=message_id, on_overlap="interrupt")
            said.setdefault(message_id, []).append(turn.seq)

        async def append() -> None:
            said.setdefault("note", []).append((await chat.append(note)).seq)

        async def change() -> None:
            changed = await chat.change(title="a title", change_id="a change")
            said.setdefault("change", []).append(changed.seq)

        journal.gate = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(send, "y")
            await settle()
            jobs: list[Callable[[], Coroutine[Any, Any, None]]] = [append, change]
            jobs += [partial(send, n) for n in "3456"]
            for job in (*jobs, append, change):
                group.start_soon(job)
                await settle()
            group.start_soon(send, "3")
            await settle()
            journal.gate.set()

        for of_one in (said["note"], said["change"], said["3"]):
            assert len(of_one) == 2
            assert len(set(of_one)) == 1


class CountingJournal(MemoryJournal):
    """Notes the message ids that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_up: list[str] = []

    async def find_messages(
        self, conversation_id: str, message_ids: Sequence[str]
    ) -> Mapping[str, int]:
        self.looked_up += message_ids
        return await super().find_messages(conversation_id, message_ids)


@pytest.mark.anyio
async def test_an_id_that_is_counted_up_or_made_here_is_known_to_be_new() -> None:
    """A log from another program may have ids that sort above all ids made here."""
    journal, limits = CountingJournal(), Limits(known_messages_max=2)
    async with verified(
        HeldAgent(), journal=journal, limits=limits, queued_messages_max=1
    ) as conversations:
        chat = conversations["c"]
        for n in range(8, 14):  # "m10" sorts below "m9" as a text
            await (await chat.send("counted up", message_id=f"m{n}")).end()
        for _ in range(3):
            await (await chat.send("made here")).end()

        assert journal.looked_up == []
        again = [await chat.send("counted up", message_id=f"m{n}") for n in (8, 10, 13)]

        assert [turn.is_duplicate for turn in again] == [True, True, True]
        assert journal.looked_up == ["m8", "m10", "m13"]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_an_event_id_is_known_in_its_own_spelling_and_no_other(
    kind: str, tmp_path: Path
) -> None:
    """Ids are texts: which one is the greatest says which are new, whatever program made them."""
    ids = ["0A19F0AB-CDEF-7ABC-8DEF-0123456789AB", "0a19f0ab-cdef-7abc-8def-0123456789ab"]
    ids += ["0A19F0ABCDEF7ABC8DEF0123456789AB", "7", "10", "Z" * 256, "\u00e9", "e\u0301"]
    journal = MemoryJournal() if kind == "memory" else SQLiteJournal(tmp_path / "chats.db")
    async with verified(
        HeldAgent(), journal=journal, limits=Limits(recent_events_max=2)
    ) as conversations:
        for order in (ids, ids[::-1]):
            chat = conversations[f"from {order[0]!a}"]
            events = [TaskListUpdatedEvent(id=each, tasks=()) for each in order]
            first = [await chat.append(event) for event in events]
            again = [await chat.append(event) for event in events]

            assert [type(one) for one in first] == [Appended] * len(ids)
            assert again == [Duplicate(one.seq) for one in first]
