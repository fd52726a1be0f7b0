"""Editing a chat message and sending it again; the tables are in `test_turns_page.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.actors.conversations.stores import KINDS, store
from tests.actors.conversations.turn_worlds import StepAgent, brief, events_of, log_of
from tests.actors.conversations.worlds import verified
from turnkeeper.actors import ImageContent, MemoryJournal, View
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import (
    InvalidInput,
    MessageIdConflict,
    MessageNotFound,
    NotAppendable,
    NotReplaceable,
)
from turnkeeper.actors.events import (
    AgentMessageEvent,
    MessageQueuedEvent,
    UserMessageEvent,
    decode_event,
)

pytestmark = pytest.mark.anyio


async def test_what_a_message_replaces_is_a_part_of_its_content() -> None:
    async with verified(StepAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A", message_id="A")).end()
        await (await chat.send("C", message_id="C")).end()
        turn = await chat.send("B", message_id="B", replaces="C")
        await turn.end()
        before = await log_of(chat)

        again = await chat.send("B", message_id="B", replaces="C", on_overlap="reject")
        assert again.is_duplicate
        assert (again.turn_id, again.seq) == (turn.turn_id, turn.seq)
        for target in ("A", None, "never sent", "B"):
            with pytest.raises(MessageIdConflict):
                await chat.send("B", message_id="B", replaces=target)
        with pytest.raises(MessageIdConflict):
            await chat.send("C", message_id="C", replaces="A")
        with pytest.raises(InvalidInput):
            await chat.send("D", replaces="")
        with pytest.raises(MessageNotFound, match="as `replaces`, give the message_id of"):
            await chat.send("D", replaces="never sent")
        assert await log_of(chat) == before


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_is_replaced_again_and_again_on_any_journal(
    kind: str, tmp_path: Path
) -> None:
    """Each time in another process, which has to look old ids up in the journal."""
    limits = Limits(known_messages_max=2)
    image = ImageContent(url="https://example.org/a.png")
    with store(kind, tmp_path) as opens:
        async with verified(StepAgent(), journal=opens()) as conversations:
            for name in ("A", "C", "D", "E"):
                await (await conversations["c"].send(name, message_id=name)).end()
        for target, name in (("E", "F"), ("D", "G"), ("A", "B1"), ("B1", "B2")):
            async with verified(
                StepAgent(), journal=opens(), limits=limits, queued_messages_max=1
            ) as conversations:
                chat = conversations["c"]
                sent = await chat.send(name, message_id=name, replaces=target, images=[image])
                assert await sent.reply() == name
                assert (await chat.send(name, message_id=name, replaces=target, images=[image])).seq
                with pytest.raises(NotReplaceable) as refused:
                    await chat.send("again", replaces=target)
                assert refused.value.reason == "not_in_view"
        async with verified(StepAgent(), journal=opens()) as conversations:
            chat = conversations["c"]
            assert brief(*await chat.view()) == "uB2 aB2"
            events = await events_of(chat)
            assert await chat.view() == View.from_events(events)
            replaced = [e.replaces for e in events if isinstance(e, UserMessageEvent)]
            assert replaced == [None, None, None, None, "E", "D", "A", "B1"]


async def test_a_replacement_in_a_fork_leaves_the_other_conversation_as_it_is() -> None:
    journal = MemoryJournal()
    async with verified(StepAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        for name in ("A", "C"):
            await (await chat.send(name, message_id=name)).end()
        before = await log_of(chat)
        fork = await chat.fork("fork")
        assert await (await fork.send("B", message_id="B", replaces="A")).reply() == "B"

        assert brief(*await fork.view()) == "uB aB"
        assert brief(*await chat.view()) == "uA aA uC aC"
        assert await log_of(chat) == before
        assert (await log_of(fork)).startswith(before)
        # Here it is another message: the ids of a fork are its own.
        assert await (await chat.send("B", message_id="B", replaces="C")).reply() == "B"
        assert brief(*await chat.view()) == "uA aA uB aB"
    async with verified(StepAgent(), journal=journal) as conversations:
        assert brief(*await conversations["fork"].view()) == "uB aB"


async def test_a_message_that_waits_in_the_other_conversation_is_not_replaced_in_its_fork() -> None:
    agent = StepAgent()
    async with verified(agent, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        agent.hold("C thinks")
        await chat.send("C")
        await agent.reached["C thinks"].wait()
        await chat.send("A", message_id="A")
        fork = await chat.fork("fork")
        with pytest.raises(NotReplaceable):
            await fork.send("B", replaces="A")
        agent.release()


async def test_a_message_in_the_place_of_another_keeps_that_place_when_it_waits_again() -> None:
    """B replaces A, which steers; B joins, and the turn that it has joined is rolled back."""
    journal, agent = MemoryJournal(), StepAgent({"C": "calls"})
    async with verified(agent, journal=journal) as conversations:
        chat = conversations["c"]
        agent.hold("C calls", "C thinks 1", "E thinks")
        await chat.send("C")
        await agent.reached["C calls"].wait()
        await chat.send("A", message_id="A", on_overlap="steer")
        await chat.send("D")
        withdrawn = await chat.turn("A")
        last = await chat.send("B", message_id="B", replaces="A")
        end = await withdrawn.end()
        assert (end.outcome, end.detail) == ("withdrawn", "replaced by chat message B")

        agent.held.pop("C calls").set()
        await agent.reached["C thinks 1"].wait()
        await chat.send("E", on_overlap="rollback")
        assert [message.content for message in await chat.queued()] == ["B", "D"]
        agent.release()
        assert await last.reply() == "B"
    queued = [e for e in await _events(journal) if isinstance(e, MessageQueuedEvent)]
    assert [(e.content, e.place is not None, e.replaces) for e in queued] == [
        ("A", False, None),
        ("D", False, None),
        ("B", True, "A"),
        ("B", False, "A"),
    ]


async def _events(journal: MemoryJournal) -> list[object]:
    async with journal:
        return [decode_event(record.payload) for record in await journal.read("c")]


async def test_a_replacement_leaves_alone_what_stands_beside_the_turns() -> None:
    async with verified(
        StepAgent(), journal=MemoryJournal(), system_prompt="be kind"
    ) as conversations:
        chat = conversations["c"]
        await (await chat.send("A", message_id="A")).end()
        await chat.append(AgentMessageEvent(content="by hand"))
        await (await chat.send("B", message_id="B", replaces="A")).end()
        assert brief(*await chat.view()) == "system_prompt aby hand uB aB"


async def test_only_send_makes_a_message_that_replaces_another() -> None:
    async with verified(StepAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A", message_id="A")).end()
        made = UserMessageEvent(content="B", replaces="A")
        with pytest.raises(NotAppendable):
            await chat.append(made)
        with pytest.raises(NotAppendable):
            await chat.append_all([made])
