"""What the inspector needs of a long log, and a server that only reads."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import anyio
import httpx
import pytest

from tests.actors.conversations.worlds import HeldAgent
from tests.browser.stories import BEGAN, Story, refund_story, research_story, team_story
from turnkeeper.actors import Conversations, MemoryJournal, SQLiteJournal, gateway
from turnkeeper.actors.core import snapshots
from turnkeeper.actors.core.snapshots import SLICE_EVENTS
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.errors import CorruptLog
from turnkeeper.actors.events import LoggedEvent
from turnkeeper.actors.gateway import history
from turnkeeper.actors.gateway.changes import feed_changes
from turnkeeper.actors.gateway.outline import Outline
from turnkeeper.actors.gateway.pages import _pages
from turnkeeper.actors.gateway.service import WARN_EVERY_S, WARNINGS_MAX
from turnkeeper.actors.journal import READ_BYTES, Journal, StoredRecord
from turnkeeper.runtime import Ports

from .test_safety import WRITING
from .worlds import JSON

pytestmark = pytest.mark.anyio

PAGES_BYTES_MAX = 150_000
ACCEPT = {"accept": "application/json"}


@asynccontextmanager
async def reading(
    journal: Journal, *stories: Story, read_only: bool = False, ports: Ports | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, gateway.Gateway]]:
    async with journal:
        for story in stories:
            await story.write(journal)
    async with Conversations(HeldAgent(), journal=journal, recover="on_message") as conversations:
        app = gateway.app(conversations, read_only=read_only, ports=ports)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost/v1/conversations/", headers=JSON
        ) as client:
            yield client, app


def folded_at(story: Story, seq: int) -> Folded:
    folded = Folded()
    for event in story.events[:seq]:
        folded.fold(event)
    return folded


async def test_a_state_from_a_snapshot_that_is_kept_is_that_of_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story = team_story(90)
    async with reading(MemoryJournal(), story) as (_, app):
        histories = app._service.histories
        for seq in [len(story.events), 700, 3, 511, 512, 513, 256, 0, 600]:
            assert await histories.at(story.name, seq) == folded_at(story, seq)
        kept = histories._kept[story.name]
        assert list(kept.snapshots) == [256, 512]

        one = kept.bytes // 2
        monkeypatch.setattr(history, "SNAPSHOT_BYTES_MAX", one)
        kept.keep(folded_at(story, 640).to_snapshot(), story.events[639].id)
        assert list(kept.snapshots) == [512]
        assert kept.every == 512
        assert kept.bytes == len(kept.snapshots[512][0].payload)


async def test_a_long_log_is_read_in_slices_between_which_other_tasks_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Folded, and written as snapshots, in one go, it held up every conversation of the process."""
    story = team_story(90)
    folded: list[int] = [0]

    def counting(place: object, name: str) -> None:
        real = getattr(place, name)

        def counted(*args: object, **options: object) -> object:
            folded[-1] += 1
            return real(*args, **options)

        monkeypatch.setattr(place, name, counted)

    async def note_turns() -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            folded.append(0)

    async with reading(MemoryJournal(), story) as (_, app), anyio.create_task_group() as group:
        counting(history, "decode_record")
        counting(Outline, "fold")
        counting(snapshots, "encode_event")
        group.start_soon(note_turns)
        await app._service.histories.at(story.name, 512)
        await app._service.histories.outline(story.name)
        group.cancel_scope.cancel()
    assert sum(folded) > 512 + len(story.events)
    # Each event of a slice is decoded and folded, and trio may run two slices between two turns.
    assert max(folded) <= 4 * SLICE_EVENTS


async def test_a_log_that_was_begun_again_under_its_name_is_another_one() -> None:
    story, other = team_story(60), research_story()
    other.name = story.name
    async with reading(MemoryJournal(), story) as (client, app):
        service = app._service
        await service.histories.at(story.name, 300)
        await client.get(f"{story.name}/outline")
        await service.conversations.delete(story.name)
        longer = team_story(70, "longer")
        longer.name = story.name
        await longer.write(service.conversations.journal)

        async with anyio.create_task_group() as group:
            for seq in range(301, 309):  # all find at once that it is another one
                group.start_soon(service.histories.at, story.name, seq)
        assert await service.histories.at(story.name, 300) == folded_at(longer, 300)
        outline = (await client.get(f"{story.name}/outline")).json()
        assert outline["turns"][0]["turn_id"] == "longer-turn-1"


@pytest.mark.parametrize("asked", ["outline", "state?at=300"])
async def test_a_log_that_is_exchanged_while_it_is_read_is_not_mixed_with_the_next(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    story, longer = team_story(60), team_story(70, "longer")
    longer.name = story.name
    monkeypatch.setattr(history, "READ_PAGE", 100)
    async with reading(MemoryJournal(), story) as (client, app):
        conversations = app._service.conversations
        read = conversations.journal.read

        async def exchanged(name: str, *, after: int, limit: int) -> Sequence[StoredRecord]:
            if limit > 1 and after > 90:  # the second page
                monkeypatch.setattr(conversations.journal, "read", read)
                await conversations.delete(name)
                await longer.write(conversations.journal)
            return await read(name, after=after, limit=limit)

        monkeypatch.setattr(conversations.journal, "read", exchanged)
        meanwhile = await client.get(f"{story.name}/{asked}")
        outline = (await client.get(f"{story.name}/outline")).json()

        assert meanwhile.json()["type"] == "urn:turnkeeper:conversation-deleted"
        assert outline["turns"][0]["turn_id"] == "longer-turn-1"
        assert await app._service.histories.at(story.name, 300) == folded_at(longer, 300)


async def test_the_outline_grows_with_its_log() -> None:
    story = refund_story()
    async with reading(MemoryJournal(), story) as (client, app):
        before = (await client.get("refund-7/outline")).json()
        turn = await app._service.conversations["refund-7"].send("one more")
        await turn.reply()
        after = (await client.get("refund-7/outline", params={"after": before["head"]})).json()

    kinds = [before["kinds"]["abcdefghijklmnop".index(letter)] for letter in before["log"]]
    assert kinds == [event.kind for event in story.events]
    assert [each["outcome"] for each in before["turns"]] == [
        "interrupted",
        "completed",
        "completed",
    ]
    assert [each["cut_by"] for each in before["turns"]] == ["m2", None, None]
    assert after["head"] == before["head"] + len(after["log"])
    assert [each["messages"][0]["text"] for each in after["turns"]] == ["one more"]


async def test_the_outline_names_the_edit_that_ended_a_turn() -> None:
    agent, outline = HeldAgent(), Outline()
    agent.hold("A")
    async with Conversations(agent, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A", message_id="a")
        await (await chat.send("A, really", message_id="b", replaces="a")).end()
        async for logged in chat.events(live=False):
            outline.fold(logged)

    assert [turn.cut_by for turn in outline.turns.values()] == ["b", None]


async def test_bars_say_what_ran_when() -> None:
    async with reading(MemoryJournal(), refund_story(), research_story()) as (client, _):
        found = (await client.get("refund-7/bars")).json()["turns"]
        other = (await client.get("research/outline")).json()

    first, second, _ = found.values()
    begin = BEGAN.timestamp() * 1_000
    told = [
        (bar["kind"], bar["name"], round(bar["from_ms"] - begin), round(bar["to_ms"] - begin))
        for bar in (*first["bars"], *second["bars"])
    ]
    assert sorted(told) == [
        ("confirmation", "refund", 8_000, 13_500),
        ("model", "model-large", 100, 1_400),
        ("model", "model-large", 4_900, 6_200),
        ("model", "model-large", 6_300, 8_000),
        ("model", "model-large", 16_000, 17_200),
        ("tool", "look_up", 1_400, 2_100),
        ("tool", "look_up", 1_400, 4_800),
        ("tool", "refund", 13_500, 15_900),
    ]
    assert other["left"] == [[19, 20, 23, "retracted"], [22, 22, 23, "retracted"]]
    steered = other["turns"][0]["messages"][1]
    assert steered["steers"] == other["turns"][0]["turn_id"]
    assert (steered["seq"], steered["joined_seq"]) == (11, 14)


@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_a_call_has_no_bar_while_the_user_is_asked_about_it(is_confirmed: bool) -> None:
    """It does not run. One that is never confirmed never has a bar."""
    story = Story("asked")
    story.says("a", "Pay order 7 back.")
    (call,) = story.at(1.0).calls(("refund", {"order": 7}), took=1.0)
    story.asks(call)
    asked = story.seq
    if is_confirmed:
        story.at(60.0).confirmed()
        story.at(61.0).results(call, "paid back")
    else:
        story.at(60.0).gives_up(call)
        story.ends("interrupted")
    outline = Outline()
    for seq, event in enumerate(story.events[:asked], 1):
        outline.fold(LoggedEvent(seq, event))
    (turn,) = outline.turns.values()

    assert [bar.kind for bar in turn.bars] == ["model", "confirmation"]
    for seq, event in enumerate(story.events[asked:], asked + 1):
        outline.fold(LoggedEvent(seq, event))
    ran = [(bar.to_ms or 0) - bar.from_ms for bar in turn.bars if bar.kind == "tool"]
    assert ran == ([1_000] if is_confirmed else [])


async def test_a_page_and_a_window_of_large_events_end_at_a_number_of_bytes() -> None:
    """An answer is held in memory at once, so its limit in events does not bound it."""
    story = Story("large")
    for number in range(5):
        story.says(f"m{number}", "x" * (READ_BYTES * 3 // 4))
    head = len(story.events)
    pages: list[int] = []
    windows: list[int] = []
    seqs: list[int] = []
    async with reading(MemoryJournal(), story) as (client, _):
        cursor, has_more = "0", True
        while has_more:
            asked = client.get("large/events", params={"after": cursor}, headers=ACCEPT)
            page = (await asked).json()
            cursor, has_more = page["cursor"], page["has_more"]
            pages.append(sum(len(row["event"].get("content", "")) for row in page["events"]))
            seqs += [row["seq"] for row in page["events"]]
        after: int | None = 0
        while after is not None:
            window = (await client.get("large/log", params={"after": after})).json()
            after = window["next"]
            windows.append(sum(len(row["event"].get("content", "")) for row in window["rows"]))
            seqs += [row["seq"] for row in window["rows"]]
        brief = (await client.get("large/log", params={"brief": 10})).json()

    assert seqs == [*range(1, head + 1)] * 2
    assert max(pages) < 2 * READ_BYTES
    assert max(windows) < 2 * READ_BYTES
    assert len(brief["rows"]) == head


async def test_long_texts_are_cut_and_their_lengths_told() -> None:
    story = Story("long")
    story.says("m", "x" * 5_000)
    async with reading(MemoryJournal(), story) as (client, _):
        window = (await client.get("long/log", params={"brief": 100})).json()
        whole = (await client.get("long/log", params={"after": 1, "limit": 1})).json()
        view = (await client.get("long/view", params={"brief": 10, "offset": 0, "limit": 1})).json()
        kinds = (await client.get("long/log", params={"kinds": "user_message"})).json()

    event = window["rows"][1]["event"]
    assert (len(event["content"]), event["cut"]) == (100, {"content": 5_000})
    assert len(whole["rows"][0]["event"]["content"]) == 5_000
    assert whole["next"] is None
    assert (view["count"], view["events"][0]["content"]) == (1, "x" * 10)
    assert [row["seq"] for row in kinds["rows"]] == [2]


async def test_a_damaged_record_is_in_its_place_and_the_rest_is_there(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    story = team_story()
    async with SQLiteJournal(path) as journal:
        await story.write(journal)
    damage(path, 7)
    async with reading(SQLiteJournal(path, read_only=True)) as (client, _):
        window = (await client.get("team-standup/log", params={"after": 4, "limit": 5})).json()
        outline = (await client.get("team-standup/outline")).json()
        before = await client.get("team-standup/state", params={"at": 6})
        behind = await client.get("team-standup/state", params={"at": 9})

    assert [row["seq"] for row in window["rows"]] == [5, 6, 7, 8, 9]
    assert ["damaged" in row for row in window["rows"]] == [False, False, True, False, False]
    assert [seq for seq, _ in outline["damaged"]] == [7]
    assert outline["head"] == len(story.events) == len(outline["log"])
    assert before.status_code == 200
    assert behind.json()["type"] == "urn:turnkeeper:corrupt-log"
    assert behind.json()["seq"] == 7


def damage(path: Path, seq: int) -> None:
    """Change a byte of a stored payload."""
    with sqlite3.connect(path) as connection:
        (table,) = (
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
            if name in ("record", "records", "event", "events")
        )
        done = connection.execute(
            f"UPDATE {table} SET payload = substr(payload, 1, 20) || x'21' || substr(payload, 22)"
            " WHERE seq = ?",
            (seq,),
        )
        assert done.rowcount == 1
    connection.close()


async def test_a_file_that_is_away_is_told_to_clients_as_such_and_once_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients are told in general words only, so the operator needs the error's own text."""
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path) as journal:
        await team_story().write(journal)
    v1 = "http://localhost/v1"
    asked = (f"{v1}/conversations", f"{v1}/changes", "team-standup", "team-standup/log")

    async def warnings(client: httpx.AsyncClient) -> list[str]:
        caplog.clear()
        for place in asked:
            reply = await client.get(place)
            assert reply.status_code == 503
            assert reply.json()["type"] == "urn:turnkeeper:journal-unavailable"
            assert reply.headers["Retry-After"]
        return [line for line in caplog.messages if "journal cannot be used" in line]

    clock = Clock()
    async with reading(
        SQLiteJournal(path, read_only=True), read_only=True, ports=Ports(monotonic=clock)
    ) as (client, _):
        assert (await client.get("team-standup")).status_code == 200
        away = path.rename(path.with_name("away.db"))
        stream = await client.get("team-standup/events")
        assert '"why":"journal-unavailable"' in stream.text
        assert len([line for line in caplog.messages if "journal cannot be used" in line]) == 1
        clock.now += WARN_EVERY_S
        (told,) = await warnings(client)
        assert "deleted or moved while it was open" in told
        assert str(path) in told
        assert await warnings(client) == []
        clock.now += WARN_EVERY_S
        assert len(await warnings(client)) == 1

        away.rename(path)

        assert (await client.get("team-standup")).status_code == 200


async def test_errors_of_the_journal_that_take_turns_are_logged_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    written: list[bytes] = []

    async def write(piece: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        written.append(piece)

    async with reading(MemoryJournal(), ports=Ports(monotonic=clock)) as (_, app):
        service = app._service

        async def fails(number: int) -> None:
            async def look() -> NoReturn:
                await anyio.lowlevel.checkpoint()
                raise CorruptLog(f"c{number}", 1, "the record is missing")

            await feed_changes(service, look, live=True)(write)

        for _ in range(3):
            for number in range(2):
                await fails(number)
        assert b"corrupt-log" in written[-1]
        assert sum("journal cannot be used" in line for line in caplog.messages) == 2
        for number in range(2 * WARNINGS_MAX):
            await fails(number)
        assert sum("journal cannot be used" in line for line in caplog.messages) == WARNINGS_MAX
        clock.now += WARN_EVERY_S
        await fails(0)
        assert sum("journal cannot be used" in line for line in caplog.messages) == WARNINGS_MAX + 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# --- a server that only reads --------------------------------------------------------------------


async def test_a_server_that_only_reads_takes_no_write_whatever_else_is_wrong_with_it() -> None:
    async with reading(MemoryJournal(), refund_story(), read_only=True) as (client, app):
        for place in WRITING:
            if place.path.endswith("/verify"):
                continue
            for headers in ({}, {"Content-Type": "text/plain"}, {"Host": "evil.example"}):
                reply = await client.request(
                    place.method, f"http://localhost{place.address}", headers=headers
                )
                assert reply.status_code == 405, place
                allowed = reply.headers["Allow"].split(", ")
                assert "GET" in allowed
                for method in allowed:
                    read = await client.request(method, "http://localhost/v1/self")
                    assert read.status_code == 200, method
        sound = await client.post("refund-7/verify")
        assert sound.json() == {"events": 31, "is_sound": True}
        assert (await client.get("http://localhost/v1/self")).json()["is_read_only"]
        assert (await app._service.conversations["refund-7"].at()).seq == 31


async def test_the_pages_are_public_static_and_strict() -> None:
    async with reading(MemoryJournal()) as (client, _):
        index = await client.get("http://localhost/inspector/")
        moved = await client.get("http://localhost/inspector", follow_redirects=False)
        missing = await client.get("http://localhost/inspector/../application.py")
        script = await client.get("http://localhost/inspector/main.js")

    assert index.status_code == 200
    policy = index.headers["Content-Security-Policy"]
    assert index.headers.get_list("Content-Security-Policy") == [policy]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert moved.headers["Location"] == "inspector/"
    assert missing.status_code == 404
    assert script.headers["Content-Type"].startswith("text/javascript")


def test_the_pages_are_small_and_name_no_other_place() -> None:
    pages = {name: content for name, (content, _) in _pages().items()}
    assert sum(map(len, pages.values())) < PAGES_BYTES_MAX
    for name, content in pages.items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text.replace("${location.origin}", ""), name
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "localStorage"):
            assert forbidden not in text, name
