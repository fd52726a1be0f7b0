"""What a chat message has beside its text: its author, files, and the application's metadata."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.actors.conversations.stores import KINDS, store
from tests.actors.conversations.worlds import HeldAgent, verified
from tests.actors.models.asking import asking
from tests.actors.models.servers import Answer, Status
from turnkeeper.actors import (
    Conversation,
    FileContent,
    FrozenObject,
    MemoryJournal,
    MemoryStore,
    SQLiteJournal,
    ToolAgent,
    TurnContext,
)
from turnkeeper.actors.core.commands import Send
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.turn_table import message_digest
from turnkeeper.actors.errors import (
    ContentTooLong,
    EventIdConflict,
    FileTooLarge,
    InvalidInput,
    JsonNumberTooLong,
    JsonTooDeep,
    MessageIdConflict,
    MetadataTooLong,
    TooManyFiles,
)
from turnkeeper.actors.events import ImageContent, MessageQueuedEvent, UserMessageEvent
from turnkeeper.actors.journals.transfer import export_lines, import_lines
from turnkeeper.actors.values.frozen import JSON_DEPTH_MAX, JSON_DIGITS_MAX
from turnkeeper.runtime import Backoff

pytestmark = pytest.mark.anyio

METADATA = FrozenObject({"client": {"app": "web", "tabs": [1, 2]}, "at": 0.5})


PDF = FileContent.with_bytes("a.pdf", "application/pdf", b"%PDF-1.7 " + b"a" * 100_000)
AWAY = FileContent(name="b.pdf", media_type="application/pdf", url="https://example.org/b.pdf")
NOTES = FileContent.with_bytes("n.txt", "text/plain", b"buy milk")
ICON = FileContent.with_bytes("i.png", "image/png", b"\x89PNG\r\n\x1a\n")
SOUND = FileContent.with_bytes("s.mp3", "audio/mpeg", b"ID3")


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


def test_the_digest_of_a_message_does_not_depend_on_fields_that_it_does_not_have() -> None:
    image = ImageContent(url="https://example.org/a.png")

    assert message_digest(Send("m", "hello")) == "8ca9574c8076d5017a5542bbda686775"
    assert message_digest(Send("m", "hello", (image,))) == "d8b877c39b212b8eebece03e12e9f1a0"
    files = [PDF, AWAY, NOTES, NOTES.model_copy(update={"name": "b.txt"})]
    others = [
        Send("m", "hello"),
        Send("m", "hello", (image,)),
        Send("m", json.dumps(["hello", [image.url]])),
        Send("m", "hello", author="Ann"),
        Send("m", "hello", replaces="Ann"),
        *(Send("m", "hello", files=(file,)) for file in files),
    ]
    assert len({message_digest(one) for one in others}) == len(others)


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
                "B",
                message_id="b",
                on_overlap="steer",
                author="Bob",
                metadata=METADATA,
                files=[PDF, AWAY],
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
        assert message.files == ((PDF, AWAY) if message.message_id == "b" else ())


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


async def test_a_large_file_is_stored_once_however_often_it_is_sent(tmp_path: Path) -> None:
    held = HeldAgent()
    held.hold("A")
    path = tmp_path / "chats.db"
    async with verified(held, journal=SQLiteJournal(path)) as conversations:
        await conversations["c"].send("A", files=[PDF])
        waits = await conversations["c"].send("B", files=[PDF.model_copy(update={"name": "x"})])
        held.release("A")
        await waits.end()
        await (await conversations["d"].send("C", files=[PDF])).end()
        told = await messages(conversations["c"])

    assert [message.files[0].content for message in told] == [PDF.content] * 3
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM part").fetchone() == (1,)


async def test_the_same_message_has_the_same_files() -> None:
    memory = MemoryStore()
    for _ in range(2):
        async with verified(HeldAgent(), journal=MemoryJournal(memory)) as conversations:
            chat = conversations["c"]
            await (await chat.send("A", message_id="a", files=[PDF, NOTES])).end()
            for files in (
                [NOTES, PDF],
                [PDF],
                [],
                [PDF, NOTES.model_copy(update={"data": "aGk="})],
            ):
                with pytest.raises(MessageIdConflict):
                    await chat.send("A", message_id="a", files=files)
            assert len(await messages(chat)) == 1


PDF_URL = f"data:application/pdf;base64,{PDF.data}"
ICON_URL = f"data:image/png;base64,{ICON.data}"
NOT_SHOWN = "(file s.mp3 (audio/mpeg), which cannot be shown)"
IN_BASE64 = {"type": "base64", "media_type": "application/pdf", "data": PDF.data}
AS_TEXT = {"type": "text", "media_type": "text/plain", "data": "buy milk"}
ICON_SOURCE = {"type": "base64", "media_type": "image/png", "data": ICON.data}
SHOWN: Mapping[str, object] = {
    "chat": [
        {"type": "text", "text": "look"},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": PDF_URL}},
        {"type": "text", "text": "(file b.pdf (application/pdf) at https://example.org/b.pdf)"},
        {"type": "text", "text": "file n.txt (text/plain):\nbuy milk"},
        {"type": "image_url", "image_url": {"url": ICON_URL}},
        {"type": "text", "text": NOT_SHOWN},
    ],
    "responses": [
        {"type": "input_text", "text": "look"},
        {"type": "input_file", "filename": "a.pdf", "file_data": PDF_URL},
        {"type": "input_file", "file_url": "https://example.org/b.pdf"},
        {"type": "input_text", "text": "file n.txt (text/plain):\nbuy milk"},
        {"type": "input_image", "image_url": ICON_URL, "detail": "auto"},
        {"type": "input_text", "text": NOT_SHOWN},
    ],
    "anthropic": [
        {"type": "text", "text": "look"},
        {"type": "document", "title": "a.pdf", "source": IN_BASE64},
        {"type": "document", "title": "b.pdf", "source": {"type": "url", "url": AWAY.url}},
        {"type": "document", "title": "n.txt", "source": AS_TEXT},
        {"type": "image", "source": ICON_SOURCE},
        {"type": "text", "text": NOT_SHOWN},
    ],
}


@pytest.mark.parametrize("api", SHOWN)
async def test_the_model_gets_files_as_its_api_takes_them(api: str) -> None:
    async with asking(api) as one:
        one.server.replies.append(Answer(["ok"]))
        async with verified(ToolAgent(one.model), journal=MemoryJournal()) as conversations:
            files = [PDF, AWAY, NOTES, ICON, SOUND]
            await (await conversations["c"].send("look", files=files)).reply()

        body = one.server.bodies[-1]
        assert not one.server.refusals
    assert body["input" if api == "responses" else "messages"][-1]["content"] == SHOWN[api]


@pytest.mark.parametrize("api", SHOWN)
async def test_files_that_a_provider_refuses_are_named_the_next_time(api: str) -> None:
    async with asking(api) as one:
        refusal = Status(400, {"type": "invalid_request_error", "message": "no `tool_result`"})
        one.server.replies.extend((refusal, refusal, Answer(["ok"])))
        tool_agent = ToolAgent(one.model, backoff=Backoff(first_s=0.001, max_s=0.001))
        async with verified(tool_agent, journal=MemoryJournal()) as conversations:
            turn = await conversations["c"].send("look", files=[PDF, ICON])
            assert await turn.reply() == "ok"

        sent = str(one.server.bodies[-1])
    assert "(file a.pdf (application/pdf), which cannot be shown)" in sent
    assert str(PDF.data) not in sent


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "a\nb"},
        {"name": "a" * 257},
        {"media_type": "pdf"},
        {"media_type": "text/plain; charset=utf-8"},
        {"data": "not base64"},
        {"data": "aGk"},
        {"data": None},
        {"url": "https://example.org/a"},
        {"data": None, "url": ""},
        {"data": None, "url": "data:text/plain,hi"},
        {"data": None, "url": "https://example.org/" + "a" * 8_192},
    ],
)
async def test_a_file_that_is_none_is_refused(wrong: dict[str, str | None]) -> None:
    file = FileContent.model_validate(
        {"name": "n", "media_type": "text/plain", "data": "aGk=", **wrong}
    )
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        with pytest.raises(InvalidInput):
            await chat.send("A", files=[file])
        with pytest.raises(InvalidInput):
            await chat.append(UserMessageEvent(content="A", files=(file,)))
        assert not await chat.exists()


async def test_a_text_has_a_limit_that_a_message_which_is_known_is_not_held_to() -> None:
    memory = MemoryStore()
    async with verified(HeldAgent(), journal=MemoryJournal(memory)) as conversations:
        chat = conversations["c"]
        await (await chat.send("A" * 9, message_id="a")).end()
        with pytest.raises(ContentTooLong):
            await chat.send("A" * (1 << 20) + "A")

    limits = Limits(content_length_max=8)
    async with verified(HeldAgent(), journal=MemoryJournal(memory), limits=limits) as conversations:
        chat = conversations["c"]
        assert (await chat.send("A" * 9, message_id="a")).is_duplicate
        await (await chat.send("B" * 8)).end()
        with pytest.raises(ContentTooLong) as refused:
            await chat.send("C" * 9)
        assert (refused.value.length, refused.value.content_length_max) == (9, 8)
        assert len(await messages(chat)) == 2


async def test_metadata_has_a_depth_and_its_numbers_have_digits() -> None:
    assert Limits().metadata_depth_max == JSON_DEPTH_MAX
    assert Limits().metadata_digits_max == JSON_DIGITS_MAX
    limits = Limits(metadata_depth_max=3, metadata_digits_max=4)
    settings: dict[str, Any] = {"journal": MemoryJournal(), "limits": limits}
    deeper: dict[str, object] = {}
    for _ in range(200):
        deeper = {"a": deeper}
    async with verified(HeldAgent(), **settings) as conversations:
        chat = conversations["c"]
        await (await chat.send("A", metadata={"a": [{"b": -1234}, True]})).end()
        deep: dict[str, object] = {"a": [{"b": []}]}
        for too_deep in (deep, deeper):
            with pytest.raises(JsonTooDeep):
                await chat.send("B", metadata=too_deep)
        for too_long in (12_345, -12_345, 10**2_500):
            with pytest.raises(JsonNumberTooLong):
                await chat.send("B", metadata={"a": too_long})
        assert len(await messages(chat)) == 1


async def test_files_have_limits() -> None:
    limits = Limits(files_max=2, file_bytes_max=8)
    async with verified(HeldAgent(), journal=MemoryJournal(), limits=limits) as conversations:
        chat = conversations["c"]
        await (await chat.send("A", files=[NOTES, NOTES])).end()
        with pytest.raises(TooManyFiles, match="it has 3 files, and 2 are allowed"):
            await chat.send("B", files=[NOTES] * 3)
        with pytest.raises(FileTooLarge) as refused:
            await chat.send("B", files=[FileContent.with_bytes("n", "a/b", b"123456789")])
        assert (refused.value.size, refused.value.file_bytes_max) == (9, 8)
        assert len(await messages(chat)) == 1


# --- the id of its event -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("waits", [False, True])
async def test_of_two_messages_with_one_event_id_the_second_is_refused(
    kind: str, tmp_path: Path, *, waits: bool
) -> None:
    """Memory has let go of the event, and the owner has changed; a fork has the event, too."""
    with store(kind, tmp_path) as opens:
        limits = Limits(recent_events_max=2)
        async with verified(HeldAgent(), journal=opens(), limits=limits) as conversations:
            chat = conversations["c"]
            await (await chat.send("zero")).reply()
            if waits:
                await chat.pause()
            sent = await chat.send("one", message_id="m1", event_id="0-e")
            if waits:
                await chat.resume()
            await sent.reply()
            for text in ("two", "three"):
                await (await chat.send(text, message_id=text)).reply()
        async with verified(HeldAgent(), journal=opens()) as conversations:
            chat = conversations["c"]
            fork = await chat.fork("f")
            for each in (chat, fork):
                head = (await each.at()).seq

                again = await each.send("one", message_id="m1", event_id="0-e")
                for text in ("two", "four"):
                    with pytest.raises(EventIdConflict) as refused:
                        await each.send(text, message_id=text, event_id="0-e")
                    assert refused.value.seqs == {"0-e": sent.seq}

                assert again.is_duplicate
                assert (await each.at()).seq == head
