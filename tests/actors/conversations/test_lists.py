"""Lists of conversations: what a row shows while its conversation lives, and what a page takes."""

# ruff: noqa: ASYNC240 - the files of a test are small, and its loop has nothing else to do

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from typing import Any

import pytest

from tests.actors.conversations.worlds import HeldAgent, verified
from turnkeeper.actors import (
    Conversations,
    LoggedEvent,
    MemoryJournal,
    MemoryStore,
    ModelResponse,
    ScriptedModel,
    SQLiteJournal,
    ToolAgent,
    ToolCall,
)
from turnkeeper.actors.core.listing import ListedConversation
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import AgentMessageEvent, CondensationRequestEvent
from turnkeeper.actors.journal import Journal, Listing, ListOrder, ListQuery, Record
from turnkeeper.actors.journals.files import check_listing, reindex, verify_logs
from turnkeeper.actors.journals.transfer import export_lines, import_lines

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["memory", "sqlite"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    return MemoryJournal() if request.param == "memory" else SQLiteJournal(tmp_path / "chats.db")


async def row(conversations: Conversations, name: str = "c") -> ListedConversation:
    """The row of a conversation, which has to be up to date."""
    (found,) = (await conversations.list(prefix=name, limit=1)).rows
    assert not found.is_stale
    state = await conversations[name].at()
    assert found.title == state.details.title
    assert found.status == state.agent_execution_status.lower()
    return found


async def test_a_row_follows_its_conversation_through_a_turn(journal: Journal) -> None:
    held = HeldAgent()
    held.hold("A")
    async with verified(held, journal=journal) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        began = await row(conversations)
        await chat.send("B" * 300)
        waiting = await row(conversations)
        held.release("A")
        await turn.end()
        last = await (await chat.send("C")).end()
        assert last.outcome == "completed"
        ended = await row(conversations)

    assert (began.status, began.queued, began.last_by, began.last_message) == (
        "running", 0, "user", "A"
    )  # fmt: skip
    assert (waiting.status, waiting.queued) == ("running", 1)
    assert (ended.status, ended.queued, ended.last_by, ended.last_message) == (
        "finished", 0, "agent", "a(C)"
    )  # fmt: skip
    assert began.created_at == ended.created_at
    assert began.active_at < waiting.active_at < ended.active_at <= ended.updated_at
    assert ended.owned == "here"


async def test_a_row_shows_the_beginning_of_the_last_message(journal: Journal) -> None:
    async with verified(HeldAgent(), journal=journal) as conversations:
        await (await conversations["c"].send("x" * 300)).end()
        said = (await row(conversations)).last_message
        assert said == "a(" + "x" * 198


async def test_a_row_shows_what_a_person_has_to_decide(journal: Journal) -> None:
    calls = [ToolCall("refund", {}), ToolCall("mail", {})]
    agent = ToolAgent(
        ScriptedModel([ModelResponse(calls=calls), "done"]),
        [refund, mail],
        confirm=["refund", "mail"],
    )
    async with Conversations(agent, journal=journal) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        async for item in turn:
            if isinstance(item, LoggedEvent) and item.event.kind == "confirmation_requested":
                break
        waiting = await row(conversations)
        (found,) = (await conversations.list(status="waiting_for_confirmation")).rows
        await chat.confirm()
        await turn.end()
        after = await row(conversations)

    assert found == waiting
    assert (waiting.waits_for, list(waiting.waiting_calls)) == ("confirmation", ["refund", "mail"])
    assert (after.waits_for, list(after.waiting_calls)) == (None, [])


async def refund() -> str:
    return "done"


async def mail() -> str:
    return "done"


async def test_a_change_is_listed_and_is_no_activity(journal: Journal) -> None:
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        before = await row(conversations)

        await chat.change(title="a title", labels={"project": "x"}, owner="alice")

        after = await row(conversations)
        assert (after.title, after.owner, after.labels) == ("a title", "alice", {"project": "x"})
        assert after.active_at == before.active_at
        assert after.updated_at > before.updated_at
        page = await conversations.list(owner="alice", label=("project", "x"))
        assert page.rows == [after]
        assert (await conversations.list(owner="bob")).rows == []


async def test_a_fork_is_listed_with_its_parent_title_and_owner(journal: Journal) -> None:
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        await chat.change(title="a title", labels={"project": "x"}, owner="alice")

        await chat.fork("d", at=3, owner="bob")
        await chat.fork("e", owner="bob")

        early, late = await row(conversations, "d"), await row(conversations, "e")
        assert (early.title, early.owner, early.forked_from) == ("", "bob", ("c", 3))
        assert (late.title, late.owner, late.labels) == ("a title", "bob", {"project": "x"})
        parent = await row(conversations)
        assert late.created_at is not None
        assert parent.created_at is not None
        assert late.created_at > parent.created_at


async def test_what_is_taken_back_is_shown_no_more(journal: Journal) -> None:
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        second = await chat.send("B")
        await second.end()
        await chat.retract_turn(second.turn_id)
        assert (await row(conversations)).last_message == "a(A)"
        await chat.append(AgentMessageEvent(content="by hand"))
        assert (await row(conversations)).last_message == "by hand"


@pytest.mark.parametrize(("appends", "status"), [("resumed", "idle"), ("a request", "paused")])
async def test_a_row_that_old_code_left_behind_is_mended_by_the_next_owner(
    appends: str, status: str
) -> None:
    """Also if what it appends first changes no row by itself."""
    store = MemoryStore()
    async with verified(HeldAgent(), journal=MemoryJournal(store)) as conversations:
        await (await conversations["c"].send("A")).end()
    async with MemoryJournal(store) as old:
        claim = await old.claim("c")
        event = AgentMessageEvent(content="x")
        record = Record(event.id, "paused", b'{"kind": "paused", "id": "p", "timestamp": 0}')
        await old.append(
            "c", [record], epoch=claim.epoch, expected_seq=claim.head + 1, is_unfinished=False
        )
        assert (await old.page(ListQuery(1))).rows[0].is_stale
    async with verified(HeldAgent(), journal=MemoryJournal(store)) as conversations:
        assert (await conversations.list()).rows[0].is_stale
        if appends == "resumed":
            await conversations["c"].resume()
        else:
            await conversations["c"].append(CondensationRequestEvent())
        assert (await row(conversations)).status == status


async def test_an_import_is_listed_and_a_row_without_owner_is_indexed_again(
    journal: Journal,
) -> None:
    async with verified(HeldAgent(), journal=MemoryJournal(store := MemoryStore())) as others:
        for name in ("c", "d"):
            await (await others[name].send(name)).end()
        await others["c"].change(title="a title", owner="alice")
    async with MemoryJournal(store) as other:
        lines = [line async for line in export_lines(other)]
        wanted = (await other.page(ListQuery(9))).rows

    async with journal:
        await import_lines(journal, lines, keep_users=True)
        found = (await journal.page(ListQuery(9))).rows
        assert [(one.listing, one.is_stale) for one in found] == [
            (one.listing, False) for one in wanted
        ]

        claim = await journal.claim("e")
        records = [Record(one.event_id, one.kind, one.payload) for one in await journal.read("c")]
        await journal.append("e", records, epoch=claim.epoch, expected_seq=1, is_unfinished=False)
        report = await verify_logs(journal, check_listing=check_listing)
        assert (report.stale, report.problems) == (("e",), ())
        assert await reindex(journal) == (1, [])
        rows = (await journal.page(ListQuery(9))).rows
        assert rows[2].listing == rows[0].listing
        assert not rows[2].is_stale
        # A listing that is not the fold of its log is a problem, and is told.
        listing = rows[2].listing._replace(status="running")
        await journal.write_listing("e", listing, epoch=claim.epoch)
        report = await verify_logs(journal, check_listing=check_listing)
        assert [problem.conversation_id for problem in report.problems] == ["e"]


@pytest.mark.parametrize("is_begun_anew", [False, True])
async def test_a_conversation_that_is_deleted_while_it_is_indexed_stops_no_other(
    is_begun_anew: bool,
) -> None:
    class Deleting(MemoryJournal):
        async def write_listing(
            self, conversation_id: str, listing: Listing, *, epoch: int
        ) -> None:
            if conversation_id == "c":
                await self.delete("c", epoch=epoch)
                if is_begun_anew:
                    await begin("c", 1)
            await super().write_listing(conversation_id, listing, epoch=epoch)

    async def begin(name: str, count: int) -> None:
        records = [
            encode_record(AgentMessageEvent(content=f"{name} {number}")) for number in range(count)
        ]
        claim = await journal.claim(name)
        await journal.append(name, records, epoch=claim.epoch, expected_seq=1, is_unfinished=False)

    async with Deleting() as journal:
        await begin("c", 2)
        await begin("d", 2)
        assert await reindex(journal) == (1, [])
        rows = (await journal.page(ListQuery(9, prefix="d"))).rows
        assert [(one.conversation_id, one.is_stale) for one in rows] == [("d", False)]


async def test_pages_are_walked_with_a_cursor_that_fits_no_other_list(journal: Journal) -> None:
    async with journal:
        for number in range(7):
            listing = Listing(1, "alice", "idle", 1, number)
            claim = await journal.claim(f"c{number}")
            await journal.append(
                f"c{number}",
                [Record("e", "note", b"{}")],
                epoch=claim.epoch,
                expected_seq=1,
                is_unfinished=False,
                listing=listing,
            )
    async with Conversations(HeldAgent(), journal=journal) as conversations:
        first = await conversations.list(owner="alice", order="activity", limit=4)
        rest = await conversations.list(
            owner="alice", order="activity", limit=4, cursor=first.cursor
        )
        names = [one.conversation_id for page in (first, rest) for one in page.rows]
        assert names == [f"c{number}" for number in reversed(range(7))]
        assert (rest.cursor, rest.is_complete) == (None, True)
        for other in (
            {"order": "activity"},
            {"owner": "bob", "order": "activity"},
            {"owner": "alice", "order": "created"},
            {"owner": "alice", "order": "activity", "prefix": "c"},
        ):
            with pytest.raises(InvalidInput, match="other filters"):
                await conversations.list(cursor=first.cursor, **other)  # type: ignore[arg-type]


DEEP = urlsafe_b64encode(b"[" * 100_000).decode()


@pytest.mark.parametrize("order", ["id", "created", "activity"])
async def test_a_cursor_that_a_client_has_made_up_is_refused(
    journal: Journal, order: ListOrder
) -> None:
    async with Conversations(HeldAgent(), journal=journal) as conversations:
        for name in ("a", "b"):
            await conversations[name].send("A")
        given = (await conversations.list(limit=1, order=order)).cursor
        assert given is not None
        filters = json.loads(urlsafe_b64decode(given + "=="))[0]
        for key in (
            [1],
            ["\ud800"],
            ["a\0"],
            [""],
            [1 << 63, 1],
            [1, -1 << 80],
            [True, 1],
            [1.5, 1],
        ):
            text = json.dumps([filters, *key])
            with pytest.raises(InvalidInput) as refused:
                await conversations.list(
                    limit=1, order=order, cursor=urlsafe_b64encode(text.encode()).decode()
                )
            assert refused.value.argument == "cursor"


WRONG: tuple[dict[str, Any], ...] = (
    {"limit": 0},
    {"limit": 1_000_000},
    {"scan_max": 0},
    {"status": "dancing"},
    {"order": "size"},
    {"label": ("only a name",)},
    {"label": "project"},
    {"owner": 7},
    {"prefix": "\ud800"},
    {"owner": "a\0"},
    {"prefix": "a\0"},
    {"label": ("a\0", "b")},
    {"label": ("a", "b\0")},
    {"cursor": "no cursor"},
    {"cursor": "W10"},
    {"cursor": "é"},
    {"cursor": DEEP},
)


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
async def test_a_query_that_is_invalid_is_refused(wrong: dict[str, Any]) -> None:
    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        with pytest.raises(InvalidInput):
            await conversations.list(**wrong)


async def test_a_page_without_an_index_says_that_it_is_not_complete() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        for name in ("a1", "a2", "b1"):
            await (await conversations[name].send("A")).end()
        page = await conversations.list(prefix="b", order="created", scan_max=2)
        assert (page.rows, page.is_complete) == ([], False)
        page = await conversations.list(prefix="b", order="created", scan_max=2, cursor=page.cursor)
        assert [one.conversation_id for one in page.rows] == ["b1"]
        assert page.is_complete


async def test_a_deletion_leaves_no_text_of_the_row_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    async with verified(HeldAgent(), journal=SQLiteJournal(path)) as conversations:
        for name in ("c", "other"):
            await (await conversations[name].send(f"message of {name}")).end()
            await conversations[name].change(
                title=f"title of {name}", labels={"label": f"label of {name}"}, owner=f"user {name}"
            )
            await conversations[name].change(title=f"second title of {name}")

        deletion = await conversations.delete("c")

        assert deletion.is_erased
        there = b"".join(file.read_bytes() for file in tmp_path.iterdir())
        for kept in (b"message of other", b"second title of other", b"label of other"):
            assert kept in there
        for gone in (b"message of c", b"title of c", b"label of c", b"user c"):
            assert gone not in there
