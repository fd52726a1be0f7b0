"""Searches: what a conversation's life makes of the messages that are found."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any

import pytest

from tests.actors.conversations.worlds import HeldAgent, verified
from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    SearchHit,
    SQLiteJournal,
)
from turnkeeper.actors.errors import InvalidInput, SearchIsOff
from turnkeeper.actors.journal import Journal
from turnkeeper.actors.journals.sqlite.verify import verify
from turnkeeper.actors.journals.transfer import export_lines, import_lines

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["memory", "sqlite"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    if request.param == "memory":
        return MemoryJournal(search=True)
    return SQLiteJournal(tmp_path / "chats.db", search=True)


async def hits(
    conversations: Conversations, words: str, owner: str | None = None
) -> list[SearchHit]:
    await conversations._journal.index()
    results = await conversations.search(words, limit=1_000, owner=owner)
    assert results.complete_to is None
    return list(results.hits)


async def said(
    conversations: Conversations, words: str, owner: str | None = None
) -> list[tuple[str, str]]:
    """The text of each hit, and how it has left the view; the oldest first."""
    return [(hit.snippet, hit.left_view) for hit in (await hits(conversations, words, owner))[::-1]]


async def test_messages_are_marked_as_they_leave_the_view(journal: Journal) -> None:
    agent = HeldAgent()
    async with verified(agent, journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("first", message_id="m1")).end()
        await (await chat.send("second", message_id="m2")).end()
        await chat.undo()
        assert await said(conversations, "second") == [
            ("second", "retracted"),
            ("a(second)", "retracted"),
        ]
        # An edit takes the message, and all that came after it.
        await (await chat.send("edited", replaces="m1")).end()
        assert await said(conversations, "first") == [
            ("first", "retracted"),
            ("a(first)", "retracted"),
        ]
        # A turn that is rolled back.
        agent.hold("rolled")
        turn = await chat.send("rolled")
        await agent.reached["rolled"].wait()
        await (await chat.send("over", on_overlap="rollback")).end()
        agent.release("rolled")
        await turn.end()
        assert await said(conversations, "rolled") == [("rolled", "retracted")]
        assert await said(conversations, "edited") == [("edited", ""), ("a(edited)", "")]
        assert await said(conversations, "over") == [("over", ""), ("a(over)", "")]


async def test_a_message_that_waits_is_found_once_its_turn_has_come(journal: Journal) -> None:
    agent = HeldAgent()
    agent.hold("now")
    async with verified(agent, journal=journal) as conversations:
        chat = conversations["c"]
        first = await chat.send("now")
        await agent.reached["now"].wait()
        later = await chat.send("later")
        assert await said(conversations, "later") == []
        agent.release("now")
        await first.end()
        await later.end()
        assert await said(conversations, "later") == [("later", ""), ("a(later)", "")]


async def test_a_fork_an_import_and_a_deletion(journal: Journal) -> None:
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("hello")).end()
        await chat.change(owner="ann")
        await chat.fork("f", owner="bob")
        await (await conversations["f"].send("hello again")).end()
        assert await said(conversations, "hello", owner="bob") == [
            ("hello again", ""),
            ("a(hello again)", ""),
        ]
        assert {hit.conversation_id for hit in await hits(conversations, "hello")} == {"c", "f"}
        assert len(await hits(conversations, "hello")) == 4

        lines = [line async for line in export_lines(journal, ["f"])]
        async with MemoryJournal(search=True) as other:
            await import_lines(other, lines)
            async with Conversations(HeldAgent(), journal=other) as copies:
                # It is no fork there: all of it is its own.
                assert len(await hits(copies, "hello")) == 4
                assert await hits(copies, "hello", owner="bob") == []

        await conversations.delete("c")
        assert len(await hits(conversations, "hello")) == 2
        await conversations.expire(before=4e9)
        assert await hits(conversations, "hello") == []
    if isinstance(journal, SQLiteJournal):
        assert verify(journal._path).problems == ()


async def test_a_page_follows_the_one_before(journal: Journal) -> None:
    async with Conversations(HeldAgent(), journal=journal) as conversations:
        for number in range(5):
            await (await conversations[f"c{number}"].send(f"number {number}")).end()
        wanted = await hits(conversations, "number")
        found: list[SearchHit] = []
        cursor = None
        while True:
            page = await conversations.search("Number", limit=3, cursor=cursor)
            found += page.hits
            cursor = page.cursor
            if cursor is None:
                break
        assert found == wanted
        assert [hit.said_at for hit in found] == sorted(
            (hit.said_at for hit in found), reverse=True
        )

        first = await conversations.search("number", limit=3)
        for other in ("numb*", "five"):
            with pytest.raises(InvalidInput, match="other words"):
                await conversations.search(other, cursor=first.cursor)
        with pytest.raises(InvalidInput, match="other filters"):
            await conversations.search("number", owner="ann", cursor=first.cursor)
        with pytest.raises(InvalidInput, match="other filters"):
            await conversations.search("number", status="finished", cursor=first.cursor)
        deep = urlsafe_b64encode(b"[" * 100_000).decode()
        for cursor in ("planted", "", "AAAA", "WyJ4IiwgMV0", "🐢", deep):
            with pytest.raises(InvalidInput):
                await conversations.search("number", cursor=cursor)


@pytest.mark.parametrize(
    "words", ["", "*", "—!", "\ud800", "x" * 1_001, " ".join(map(str, range(33)))]
)
async def test_a_search_without_words_or_with_too_many_is_refused(words: str) -> None:
    async with Conversations(HeldAgent(), journal=MemoryJournal(search=True)) as conversations:
        with pytest.raises(InvalidInput):
            await conversations.search(words)


@pytest.mark.parametrize("wrong", [{"owner": "a\0"}, {"prefix": "a\0"}, {"label": ("a", "b\0")}])
async def test_a_search_with_a_filter_that_no_journal_can_store_is_refused(
    wrong: dict[str, Any],
) -> None:
    """PostgreSQL refused it without a reason, and the other journals found nothing."""
    async with Conversations(HeldAgent(), journal=MemoryJournal(search=True)) as conversations:
        with pytest.raises(InvalidInput, match="has a NUL"):
            await conversations.search("word", **wrong)


async def test_a_journal_that_does_not_search_says_so(tmp_path: Path) -> None:
    for journal in (MemoryJournal(), SQLiteJournal(tmp_path / "chats.db")):
        async with Conversations(HeldAgent(), journal=journal) as conversations:
            with pytest.raises(SearchIsOff, match="search=True"):
                await conversations.search("word")


@pytest.mark.parametrize(
    "words",
    [
        *('z" OR "b', "z' | 'b", "NEAR(z b)", "owner : b", "b AND NOT z", "z:* OR b", "^z b"),
        *("b - z", "z + b", "{owner} : b", "b\0z", "b; DROP TABLE event"),
    ],
)
async def test_no_words_are_obeyed_by_the_database(words: str, journal: Journal) -> None:
    async with Conversations(HeldAgent(), journal=journal) as conversations:
        await (await conversations["c"].send("b alone")).end()
        assert await said(conversations, words) == []
