"""What a chat message has beside its text: its author, and the application's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.actors.conversations.stores import KINDS, store
from tests.actors.conversations.worlds import HeldAgent, verified
from tests.actors.models.asking import asking
from tests.actors.models.servers import Answer
from turnkeeper.actors import (
    Conversation,
    FrozenObject,
    MemoryJournal,
    MemoryStore,
    ToolAgent,
    TurnContext,
)
from turnkeeper.actors.core.commands import Send
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.turn_table import message_digest
from turnkeeper.actors.errors import InvalidInput, MessageIdConflict, MetadataTooLong
from turnkeeper.actors.events import ImageContent, MessageQueuedEvent, UserMessageEvent
from turnkeeper.actors.journals.transfer import export_lines, import_lines

pytestmark = pytest.mark.anyio

METADATA = FrozenObject({"client": {"app": "web", "tabs": [1, 2]}, "at": 0.5})


class Joining(HeldAgent):
    """Takes in what steers it once it may, when it answers "A", and then never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.may_step, self.has_joined = anyio.Event(), anyio.Event()

    async def run(self, turn: TurnContext) -> None:
        if turn.message.content == "A":
            await self.may_step.wait()
            await turn.begin_step()
            self.has_joined.set()
            await anyio.sleep_forever()
        await super().run(turn)


async def messages(chat: Conversation) -> Sequence[UserMessageEvent | MessageQueuedEvent]:
    """The chat messages in the log, each time that they are in it."""
    logged = [one.event async for one in chat.events(live=False)]
    return [event for event in logged if isinstance(event, UserMessageEvent | MessageQueuedEvent)]


def test_the_digest_of_a_message_without_such_fields_is_that_of_older_versions() -> None:
    image = ImageContent(url="https://example.org/a.png")

    assert message_digest(Send("m", "hello")) == "3c623f274da9b55dc1f2ce866b32effc"
    assert message_digest(Send("m", "hello", (image,))) == "d8b877c39b212b8eebece03e12e9f1a0"
    others = [Send("m", "hello", author="Ann"), Send("m", "hello", replaces="Ann")]
    assert len({message_digest(one) for one in (*others, Send("m", "hello"))}) == 3


@pytest.mark.parametrize("kind", KINDS)
async def test_author_and_metadata_stay_with_a_message_wherever_it_goes(
    kind: str, tmp_path: Path
) -> None:
    """It waits, joins a turn that is rolled back, waits again, and gets a turn of its own."""
    joining = Joining()
    with store(kind, tmp_path) as opens:
        async with verified(joining, journal=opens()) as conversations:
            chat = conversations["c"]
            await chat.send("A", message_id="a", author="Ann", metadata=METADATA)
            steered = await chat.send(
                "B", message_id="b", on_overlap="steer", author="Bob", metadata=METADATA
            )
            joining.may_step.set()
            await joining.has_joined.wait()
            rolling = await chat.send("C", message_id="c", on_overlap="rollback", author="Cy")
            await rolling.end()
            await steered.end()
            fork = await chat.fork("d")

            lines = [line async for line in export_lines(conversations.journal)]
            told = await messages(chat)
            assert await messages(fork) == told

        async with verified(HeldAgent(), journal=opens()) as conversations:
            assert await messages(conversations["c"]) == told
        with store("memory", tmp_path) as others:
            async with verified(HeldAgent(), journal=others()) as conversations:
                await import_lines(conversations.journal, lines)
                assert await messages(conversations["c"]) == told

    authors = {"a": "Ann", "b": "Bob", "c": "Cy"}
    assert [message.message_id for message in told] == ["a", "b", "b", "b", "c", "b"]
    for message in told:
        assert message.author == authors[str(message.message_id)]
        assert message.metadata == ({} if message.message_id == "c" else METADATA)


async def test_the_agent_has_the_author_and_the_metadata_of_its_messages() -> None:
    seen: list[tuple[str | None, Mapping[str, object]]] = []

    class Listening(HeldAgent):
        async def run(self, turn: TurnContext) -> None:
            seen.extend((message.author, message.metadata) for message in turn.messages)
            await super().run(turn)

    async with verified(Listening(), journal=MemoryJournal()) as conversations:
        await (await conversations["c"].send("A", author="Ann", metadata=METADATA)).end()

    assert seen == [("Ann", METADATA)]


@pytest.mark.parametrize("known_messages_max", [2, 100])
async def test_another_author_is_another_message_and_other_metadata_is_not(
    known_messages_max: int,
) -> None:
    """Also if memory has let the message go, and over a restart."""
    memory, limits = MemoryStore(), Limits(known_messages_max=known_messages_max)
    settings: dict[str, Any] = {"limits": limits, "queued_messages_max": 1}
    for is_first in (True, False):
        async with verified(
            HeldAgent(), journal=MemoryJournal(memory), **settings
        ) as conversations:
            chat = conversations["c"]
            for n in range(4 if is_first else 0):
                await (await chat.send(f"A{n}", message_id=f"m{n}", author="Ann")).end()

            again = await chat.send("A0", message_id="m0", author="Ann", metadata=METADATA)

            assert again.is_duplicate
            for author in ("Bob", None):
                with pytest.raises(MessageIdConflict):
                    await chat.send("A0", message_id="m0", author=author)
            assert all(not message.metadata for message in await messages(chat))


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
@pytest.mark.parametrize("show_author", [False, True])
async def test_the_model_sees_the_author_only_if_its_agent_says_so(
    api: str, show_author: bool
) -> None:
    async with asking(api) as one:
        one.server.replies.extend((Answer(["ok"]), Answer(["ok"]), Answer(["ok"])))
        tool_agent = ToolAgent(one.model, show_author=show_author)
        async with verified(tool_agent, journal=MemoryJournal()) as conversations:
            chat = conversations["c"]
            for text, author in (("Hello", "Ann"), ("Hi", None), ("", "Bob")):
                await (await chat.send(text, author=author, metadata={"secret": 1})).reply()
            steps = await chat.steps()

        sent = str(one.server.bodies[-1])
    assert ("Ann: Hello" in sent, "Bob:" in sent) == (show_author, show_author)
    assert ("Ann" in sent, "secret" in sent) == (show_author, False)
    assert [step.request is not None and step.request.show_author for step in steps] == [
        show_author
    ] * 3


@pytest.mark.parametrize("author", ["", "a" * 257, "a\nb", "\ud800"])
async def test_an_author_is_a_name(author: str) -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        with pytest.raises(InvalidInput, match="author"):
            await chat.send("A", author=author)
        with pytest.raises(InvalidInput, match="author"):
            await chat.append(UserMessageEvent.model_construct(content="A", author=author))
        assert not await chat.exists()


@pytest.mark.parametrize("metadata", [[1], {"a": float("nan")}, {1: 2}, {"a": object()}, "x"])
async def test_metadata_is_a_json_object(metadata: dict[str, object]) -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        with pytest.raises(InvalidInput, match="metadata"):
            await chat.send("A", metadata=metadata)
        assert not await chat.exists()


async def test_metadata_has_a_limit_that_a_message_which_is_known_is_not_held_to() -> None:
    memory = MemoryStore()
    async with verified(HeldAgent(), journal=MemoryJournal(memory)) as conversations:
        await (await conversations["c"].send("A", message_id="a", metadata=METADATA)).end()

    limits = Limits(metadata_length_max=20)
    async with verified(HeldAgent(), journal=MemoryJournal(memory), limits=limits) as conversations:
        chat = conversations["c"]
        assert (await chat.send("A", message_id="a", metadata=METADATA)).is_duplicate
        await (await chat.send("B", metadata={"a": "x" * 11})).end()
        with pytest.raises(MetadataTooLong, match="21 characters") as refused:
            await chat.send("C", metadata={"a": "x" * 12})
        assert (refused.value.length, refused.value.metadata_length_max) == (21, 20)
        assert [message.content for message in await messages(chat)] == ["A", "B"]
