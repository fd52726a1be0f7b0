"""Ids are checked in one place, for every journal."""

from __future__ import annotations

import pytest

from tests import postgres
from turnkeeper.actors.conversations.conversations import Conversations
from turnkeeper.actors.core.commands import Send
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import AgentMessageEvent, ImageContent, UserMessageEvent
from turnkeeper.actors.journal import Journal
from turnkeeper.actors.journals.memory import MemoryJournal
from turnkeeper.actors.journals.postgres.journal import PostgresJournal
from turnkeeper.actors.journals.sqlite.journal import SQLiteJournal
from turnkeeper.actors.values.text import EVENT_LENGTH_MAX, TEXT_LENGTH_MAX, check_id, check_text

from ..conversations.worlds import HeldAgent


@pytest.mark.parametrize("text", ["", "x" * 257, "a\0b", "\ud800", 7, None])
def test_an_id_that_some_journal_cannot_hold_is_invalid_input(text: object) -> None:
    with pytest.raises(InvalidInput, match="an id"):
        check_id("an id", text)


def test_a_text_or_a_message_beyond_the_limits_is_invalid_input() -> None:
    """One of 47 MB stopped the event loop for two seconds."""
    with pytest.raises(InvalidInput, match="characters"):
        check_text("a text", "x" * (TEXT_LENGTH_MAX + 1))
    check_text("a text", "x" * TEXT_LENGTH_MAX)
    image = ImageContent(url="x" * (EVENT_LENGTH_MAX // 4))
    with pytest.raises(InvalidInput, match="with its images"):
        Send("m1", "five of them", images=(image,) * 5)
    Send("m1", "three of them", images=(image,) * 3)


def test_an_id_of_256_characters_of_any_language_is_valid() -> None:
    check_id("an id", "ü🙂" * 128)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_an_id_with_a_nul_is_the_same_error_over_every_journal(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with postgres.schema() as schema:
        journal: Journal = MemoryJournal()
        if kind == "sqlite":
            journal = SQLiteJournal(tmp_path_factory.mktemp("journal") / "chats.db")
        elif kind == "postgres":
            journal = PostgresJournal(postgres.conninfo(), schema=schema)
        async with Conversations(HeldAgent(), journal=journal) as conversations:
            with pytest.raises(InvalidInput, match="NUL at position 1"):
                conversations["a\0b"]
            chat = conversations["c"]
            with pytest.raises(InvalidInput, match="NUL"):
                await chat.send("hello", message_id="a\0b")
            with pytest.raises(InvalidInput, match="NUL"):
                await chat.append(UserMessageEvent(id="a\0b", content="hello"))
            with pytest.raises(InvalidInput, match="NUL"):
                await chat.append_all([AgentMessageEvent(id="a\0b", content="hello")])
            with pytest.raises(InvalidInput, match="NUL"):
                await chat.append(UserMessageEvent(message_id="a\0b", content="hello"))
            assert (await (await chat.send("hello")).end()).outcome == "completed"
