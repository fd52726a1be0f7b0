"""A page of large records is short, and no reader takes its end for the end of the log."""

from __future__ import annotations

import json
import sqlite3
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, closing, contextmanager
from pathlib import Path

import pytest

from tests.actors.conversations.worlds import HeldAgent, write_log
from turnkeeper.actors import Conversations, MemoryJournal, SQLiteJournal
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.working_state import ConversationSettings, WorkingState
from turnkeeper.actors.events import (
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    Event,
    LoggedEvent,
    Task,
    TaskListUpdatedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.journal import READ_BYTES, Record, StoredRecord
from turnkeeper.actors.journals.files import repair, verify_logs
from turnkeeper.actors.journals.transfer import export_lines, import_lines
from turnkeeper.actors.owner import look_ups

pytestmark = pytest.mark.anyio


def large(size: int = READ_BYTES + 1) -> Event:
    return UserMessageEvent(content="x" * size)


async def test_a_reader_of_large_events_ends_at_the_end_of_the_log() -> None:
    """The last one fills a page alone, and the event before it is read with it."""
    events = [large(), large(), large(), UserMessageEvent(content="small"), large()]
    async with MemoryJournal() as journal:
        await write_log(journal, "c", events)
        async with Conversations(HeldAgent(), journal=journal) as conversations:
            seen = [logged async for logged in conversations["c"].events(live=False)]

    assert [logged.event.id for logged in seen] == [event.id for event in events]


async def test_a_reader_holds_little_more_than_one_large_event(tmp_path: Path) -> None:
    """It may wait long for its client: hundreds of such readers held a page of 4 MiB each."""
    size = 1 << 20
    rows = TaskListUpdatedEvent(
        tasks=tuple(Task(description="y" * 16_000) for _ in range(size // 16_000))
    )
    events = [
        large(size),
        large(size),
        rows,
        rows.model_copy(update={"id": "~"}),
        *(large(size) for _ in range(8)),
    ]
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path) as journal:
        await write_log(journal, "c", events)
    async with Conversations(HeldAgent(), journal=SQLiteJournal(path)) as opened:
        reader = opened["c"].events(live=False)
        held = [sum(len(record.payload) for record in reader._log.page) async for _ in reader]

    assert len(held) == len(events)
    assert max(held) < 2 * size


async def test_a_page_of_usual_events_is_read_at_once(tmp_path: Path) -> None:
    reads = 0

    class Counting(SQLiteJournal):
        async def read(self, conversation_id: str, **bounds: int) -> Sequence[StoredRecord]:
            nonlocal reads
            reads += 1
            return await super().read(conversation_id, **bounds)

    path = tmp_path / "chats.db"
    async with SQLiteJournal(path) as journal:
        await write_log(journal, "c", [large(1_500) for _ in range(600)])
    async with Conversations(HeldAgent(), journal=Counting(path)) as opened:
        async for _ in opened["c"].events(live=False):
            pass

    assert reads == -(-600 // (Limits().read_page - 1))


async def test_the_answers_of_calls_are_found_behind_large_events() -> None:
    asked = ConfirmationRequestedEvent(tool_call_ids=("call",))
    given = ConfirmationGivenEvent(confirmed=True)
    async with MemoryJournal() as journal:
        await write_log(journal, "c", [large(), large(), large(), asked, given])
        working = WorkingState("c", 1, ConversationSettings())

        found = await look_ups._find_given(LoggedEvent(5, given), working, journal)

    assert found == {"call": True}


def text_of(shape: str) -> bytes:
    """A megabyte of JSON: one text, which is stored beside the log, or many, which are in it."""
    texts = ["x" * (1 << 20)] if shape == "one" else ["x" * 16_000] * 64
    return json.dumps({"kind": "note", "texts": texts}).encode()


@pytest.fixture(params=["one", "many"])
async def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A file with a log of 32 MiB."""
    payload = text_of(request.param)
    async with SQLiteJournal(tmp_path / "chats.db", synchronous="NORMAL") as journal:
        epoch = (await journal.claim("c")).epoch
        for seq in range(1, 33):
            # No two alike: a text that is stored beside the log is stored once.
            record = Record(f"e{seq}", "note", payload.replace(b"xx", b"%02d" % seq, 1))
            await journal.append("c", [record], epoch=epoch, expected_seq=seq, is_unfinished=False)
    return tmp_path / "chats.db"


@contextmanager
def held_at_most(size: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size


@contextmanager
def held_at_the_end_at_most(size: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < size


async def test_an_operators_tools_hold_a_page_of_a_log_and_not_all_of_it(path: Path) -> None:
    async with SQLiteJournal(path, read_only=True) as journal:
        with held_at_most(6 * READ_BYTES):
            report = await verify_logs(journal)
        assert (report.records, report.problems) == (32, ())
        with held_at_most(6 * READ_BYTES):
            async for _ in export_lines(journal):
                pass


async def test_an_export_that_waits_for_its_reader_holds_a_small_page(path: Path) -> None:
    count = 8
    async with SQLiteJournal(path, read_only=True) as journal, AsyncExitStack() as stack:
        with held_at_the_end_at_most(count * 4 << 20):
            for _ in range(count):
                lines = await stack.enter_async_context(aclosing(export_lines(journal)))
                for _ in range(3):  # the head of the file, that of the conversation, an event
                    await anext(lines)


async def test_a_repair_holds_a_row_of_a_file_and_not_hundreds(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE conversation SET tip = 1")
    with held_at_most(6 * READ_BYTES):
        done = repair(path)
    assert done is not None
    assert done.records == 32


async def test_an_import_of_large_events_can_be_repeated() -> None:
    async with MemoryJournal() as first, MemoryJournal() as second:
        await write_log(first, "c", [large(READ_BYTES * 3 // 4) for _ in range(3)])
        lines = [line async for line in export_lines(first)]

        await import_lines(second, lines)
        again = await import_lines(second, lines)

    assert again.records == 0
