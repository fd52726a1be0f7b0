"""Commands that are meant for one conversation: compared when they are decided."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, verified
from turnkeeper.actors import (
    Conversation,
    Conversations,
    Deletion,
    Journal,
    MemoryJournal,
    MemoryStore,
    SQLiteJournal,
)
from turnkeeper.actors.core.listing import time_us
from turnkeeper.actors.errors import (
    ConversationNotFound,
    InvalidInput,
    NotThisLog,
    NotYours,
)
from turnkeeper.actors.events import UserMessageEvent

pytestmark = pytest.mark.anyio

COMMANDS: dict[str, Callable[[Conversation], Awaitable[Any]]] = {
    "send": lambda chat: chat.send("B"),
    "append": lambda chat: chat.append(UserMessageEvent(content="B")),
    "append_all": lambda chat: chat.append_all([UserMessageEvent(content="B")]),
    "interrupt": lambda chat: chat.interrupt(),
    "undo": lambda chat: chat.undo(),
    "pause": lambda chat: chat.pause(),
    "resume": lambda chat: chat.resume(),
    "answer": lambda chat: chat.answer({"c": True}),
    "confirm": lambda chat: chat.confirm(),
    "reject": lambda chat: chat.reject(),
    "retract": lambda chat: chat.retract(["e"]),
    "retract_turn": lambda chat: chat.retract_turn("t"),
    "change": lambda chat: chat.change(title="B"),
    "fork": lambda chat: chat.fork("copy"),
    "view": lambda chat: chat.view(),
    "check_user": lambda chat: chat.check_user(),
}


async def begun(conversations: Conversations, owner: str = "alice") -> Conversation:
    chat = conversations["c"].expecting(owner=owner)
    await (await chat.send("A", message_id="m1")).end()
    return chat


async def test_the_first_commit_says_whose_conversation_it_is() -> None:
    """Were it a commit of its own, a crash between the two would leave it to the next who comes."""
    commits: list[list[str]] = []

    class Watched(MemoryJournal):
        def append(self, conversation_id: str, records: Any, **rest: Any) -> Any:  # noqa: ANN401
            commits.append([record.kind for record in records])
            return super().append(conversation_id, records, **rest)

    async with Conversations(
        HeldAgent(), journal=Watched(), system_prompt="be kind"
    ) as conversations:
        chat = await begun(conversations)
        assert (await chat.at()).details.owner == "alice"
        assert [row.owner for row in (await conversations.list(owner="alice")).rows] == ["alice"]

    assert commits[0] == ["system_prompt", "conversation_changed", "turn_started", "user_message"]
    assert sum(kinds.count("conversation_changed") for kinds in commits) == 1


@pytest.mark.parametrize("name", COMMANDS)
async def test_every_command_is_refused_in_another_users_conversation(name: str) -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = await begun(conversations)
        before = (await chat.at()).seq

        with pytest.raises(NotYours) as caught:
            await COMMANDS[name](conversations["c"].expecting(owner="bob"))

        assert isinstance(caught.value, ConversationNotFound)
        assert "alice" not in str(caught.value)
        assert (await chat.at()).seq == before
        assert len((await conversations.list()).rows) == 1


async def test_a_turn_of_another_users_handle_is_not_cancelled() -> None:
    agent = HeldAgent()
    agent.hold("A")
    async with verified(agent, journal=MemoryJournal()) as conversations:
        mine = await conversations["c"].expecting(owner="alice").send("A", message_id="m1")
        theirs = await conversations["c"].expecting(owner="bob").turn("m1")

        with pytest.raises(NotYours):
            await theirs.cancel()

        assert await mine.cancel()


async def test_deleting_names_the_user_and_hits_no_other() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = await begun(conversations)

        with pytest.raises(NotYours):
            await conversations.delete("c", owner="bob")
        assert await chat.exists()
        await conversations.delete("c", owner="alice")
        assert not await chat.exists()


async def test_a_conversation_without_a_user_is_nobodys_until_it_is_given_to_one() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        plain = conversations["c"]
        await (await plain.send("A")).end()
        for_alice = plain.expecting(owner="alice")

        with pytest.raises(NotYours):
            await for_alice.send("B")
        await plain.change(owner="alice")
        await (await for_alice.send("B")).end()


async def test_a_deleted_conversation_begins_again_as_its_next_users() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        alices = await begun(conversations)
        await conversations.delete("c")

        bobs = await begun(conversations, "bob")

        assert (await bobs.at()).details.owner == "bob"
        with pytest.raises(NotYours):
            await alices.send("B")


async def test_nothing_is_begun_by_a_command_that_expects_the_conversation() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        for handle in (
            conversations["c"].expecting(exists=True),
            conversations["c"].expecting(seq=1),
            conversations["c"].expecting(seq=1, event_id="e"),
        ):
            with pytest.raises(ConversationNotFound):
                await handle.send("A")
        assert (await conversations.list()).rows == []
        chat = await begun(conversations)
        await (await chat.expecting(exists=True).send("B")).end()


@pytest.mark.parametrize("recent", [True, False])
async def test_an_expected_event_is_found_in_memory_and_in_the_log(recent: bool) -> None:
    journal = MemoryJournal()
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = await begun(conversations)
        events = [logged async for logged in chat.events(live=False)]
        if recent:
            await _expects(chat, [(one.seq, one.event.id) for one in events])
            return
    async with verified(HeldAgent(), journal=journal) as conversations:
        await _expects(conversations["c"], [(one.seq, one.event.id) for one in events])


async def _expects(chat: Conversation, places: list[tuple[int, str]]) -> None:
    for n, (seq, event_id) in enumerate(places):
        await (await chat.expecting(seq=seq, event_id=event_id).send(f"B{n}")).end()
    head = (await chat.at()).seq
    faults = [(1, places[1][1]), (2, "no such event"), (head + 1, None), (head, places[0][1])]
    for seq, other in faults:
        with pytest.raises(NotThisLog) as caught:
            await chat.expecting(seq=seq, event_id=other).send("C")
        assert caught.value.seq == seq
    assert (await chat.at()).seq == head


async def test_a_condition_that_held_when_the_command_was_sent_is_compared_again() -> None:
    """The conversation is deleted between the look before the command and its decision."""
    reached, gate = anyio.Event(), anyio.Event()

    class HeldDeletion(MemoryJournal):
        async def delete(self, conversation_id: str, *, epoch: int) -> Deletion:
            reached.set()
            await gate.wait()
            return await super().delete(conversation_id, epoch=epoch)

    async with verified(HeldAgent(), journal=HeldDeletion()) as conversations:
        chat = await begun(conversations)
        first = await anext(chat.events(live=False))
        refused: list[type[Exception]] = []

        async def send(handle: Conversation) -> None:
            try:
                await handle.send("late")
            except ConversationNotFound as error:
                refused.append(type(error))

        async with anyio.create_task_group() as group:
            group.start_soon(conversations.delete, "c")
            await reached.wait()
            group.start_soon(send, chat.expecting(exists=True))
            group.start_soon(send, chat.expecting(seq=first.seq, event_id=first.event.id))
            while not _waiting(conversations, 2):
                await anyio.lowlevel.checkpoint()
            gate.set()

        assert refused == [ConversationNotFound] * 2
        assert (await conversations.list()).rows == []


def _waiting(conversations: Conversations, count: int) -> bool:
    """Return True if so many commands wait in the mailbox of the one conversation."""
    return any(actor.mailbox_depth >= count for actor in conversations.runtime.tree().walk())


async def test_an_event_whose_id_was_given_is_another_one_in_a_log_begun_anew() -> None:
    """A copy of the request that began the first log has its event at the same seq again."""
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat, found = conversations["c"], []
        for is_again in (False, True):
            if is_again:
                await conversations.delete("c")
            await (await chat.send("A", event_id="given")).end()
            found += [one async for one in chat.events(live=False) if one.event.id == "given"]
        old, new = (time_us(one.event) for one in found)
        meant: dict[str, Any] = {"seq": found[0].seq, "event_id": "given"}
        assert found[1].seq == found[0].seq

        with pytest.raises(NotThisLog):
            await chat.expecting(**meant, at_us=old).send("B")
        with pytest.raises(NotThisLog):
            await conversations.delete("c", **meant, at_us=old)
        await (await chat.expecting(**meant, at_us=new).send("B")).end()
        await conversations.delete("c", **meant, at_us=new)


async def test_all_of_the_log_is_read_by_calls_whose_handle_expects_an_event() -> None:
    """An undo that was sent again was refused, as if its caller had asked to read from 0 on."""
    agent = HeldAgent()
    async with verified(agent, journal=MemoryJournal()) as conversations:
        chat = await begun(conversations)
        last = [logged async for logged in chat.events(live=False)][-1]
        turn = await chat.send("B")
        await turn.end()
        expecting = chat.expecting(seq=last.seq, event_id=last.event.id)

        assert await expecting.steps() == await chat.steps()
        taken = await expecting.undo(turn.turn_id)
        assert [message.content for message in taken] == ["B"]
        assert await expecting.undo(turn.turn_id) == taken


async def test_what_cannot_be_expected_is_refused() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        faulty: tuple[dict[str, Any], ...] = (
            {"owner": ""},
            {"owner": "a\x07"},
            {"seq": 0},
            {"event_id": "\0", "seq": 1},
            {"seq": 1, "at_us": 1},
            {"seq": 1, "event_id": "e", "at_us": 0.5},
        )
        for faults in faulty:
            with pytest.raises(InvalidInput):
                conversations["c"].expecting(**faults)


# --- erasing a user ------------------------------------------------------------------------------


async def test_a_user_is_erased_with_one_call_that_returns_all_receipts(tmp_path: Any) -> None:  # noqa: ANN401
    journal: Journal = SQLiteJournal(tmp_path / "chats.db")
    async with verified(HeldAgent(), journal=journal) as conversations:
        for name in ("one", "two"):
            await (await conversations[name].expecting(owner="alice").send("A")).end()
        await conversations["one"].fork("copy", owner="alice")
        await conversations["one"].fork("bobs", owner="bob")
        await (await conversations["other"].expecting(owner="bob").send("A")).end()

        erasure = await conversations.erase("alice")

        assert set(erasure.receipts) == {"one", "two", "copy"}
        assert erasure.left == {}
        # Alice's own fork went first, so only Bob's keeps records.
        assert erasure.receipts["one"].forks == ["bobs"]
        assert (erasure.receipts["copy"].kept, erasure.receipts["two"].kept) == (0, 0)
        names = [row.conversation_id for row in (await conversations.list()).rows]
        assert names == ["bobs", "other"]
        assert (await conversations.erase("alice")).receipts == {}


async def test_one_that_cannot_be_deleted_stops_no_other() -> None:
    store = MemoryStore()
    async with (
        Conversations(HeldAgent(), journal=MemoryJournal(store)) as elsewhere,
        Conversations(HeldAgent(), journal=MemoryJournal(store)) as here,
    ):
        for conversations, name in ((elsewhere, "theirs"), (here, "ours")):
            turn = await conversations[name].expecting(owner="alice").send("A")
            await turn.end()

        erasure = await here.erase("alice")

        assert set(erasure.receipts) == {"ours"}
        assert [type(error).__name__ for error in erasure.left.values()] == ["OwnedElsewhere"]
