"""All conversations and the unfinished ones are found a slice at a time, however many there are."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.actors.conversations.worlds import HeldAgent
from turnkeeper.actors import Conversations, SQLiteJournal
from turnkeeper.actors.errors import CorruptLog, JournalRefused
from turnkeeper.actors.journals.sqlite import reader
from turnkeeper.actors.journals.sqlite.log import empty_tail
from turnkeeper.actors.journals.sqlite.reader import SQLiteReader
from turnkeeper.actors.journals.sqlite.schema import make_file

T = TypeVar("T")

# The gap in the row numbers before a conversation, its head, and if it is unfinished.
Row = tuple[int, int, bool]
rows = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 1), st.booleans()), max_size=12)


def make(path: Path, rows: Sequence[Row]) -> None:
    """Make a file of these conversations, without listings; of each, only its row."""
    make_file(path)
    number = 0
    with closing(sqlite3.connect(path)) as connection, connection:
        for gap, head, is_unfinished in rows:
            number += gap
            # Not in the order of the numbers.
            tail = empty_tail(f"{number % 7}-{number}", 0, 1, number)
            tail.head, tail.is_unfinished = head, is_unfinished
            facts = (tail.epoch, head, 0, tail.tip, 0, is_unfinished, number, tail.seal())
            connection.execute(
                "INSERT INTO conversation VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (number, tail.name, 0, tail.log, *facts),
            )


def _names(rows: Sequence[Row]) -> list[str]:
    """Return the names of those that have records."""
    number, names = 0, []
    for gap, head, _ in rows:
        number += gap
        if head:
            names.append(f"{number % 7}-{number}")
    return names


@settings(max_examples=40)
@given(rows, st.integers(1, 4), st.booleans())
def test_what_is_found_is_what_a_list_of_all_shows_as_unfinished(
    rows: Sequence[Row], size: int, read_only: bool
) -> None:
    async def look(path: Path) -> None:
        async with SQLiteJournal(path, read_only=read_only) as journal:
            infos = await journal.list()
            names = [info.conversation_id for info in infos]
            assert names == sorted(_names(rows))
            unfinished = [info for info in infos if info.is_unfinished]
            assert list(await journal.find_abandoned()) == unfinished

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_SLICE", size)
        patch.setattr(reader, "_LIST_PAGE", size)
        path = Path(folder) / "chats.db"
        make(path, rows)
        anyio.run(look, path)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the steps of SQLite's machine in each read."""
    done: list[int] = []
    do = SQLiteReader.do

    def counted(self: SQLiteReader, apply: Callable[[SQLiteReader], T]) -> T:
        done.append(0)

        def step() -> int:
            done[-1] += 1
            return 0

        self.connection.set_progress_handler(step, 1)
        return do(self, apply)

    monkeypatch.setattr(SQLiteReader, "do", counted)
    return done


def test_no_read_on_entering_grows_with_the_finished_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[int]
) -> None:
    size, many = 100, 2_500
    path = tmp_path / "chats.db"
    make(path, [(1, 1, False)] * many)
    monkeypatch.setattr(reader, "_SLICE", size)

    async def enter() -> None:
        async with Conversations(HeldAgent(), journal=SQLiteJournal(path)):
            pass

    anyio.run(enter)
    assert len(steps) > many // size
    assert 0 < max(steps) < 60 * size


def test_no_read_of_a_list_reads_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[int]
) -> None:
    """Only the index is counted in one read, which takes a few steps for each conversation."""
    size, many = 100, 2_500
    path = tmp_path / "chats.db"
    make(path, [(1, 1, False)] * many)
    monkeypatch.setattr(reader, "_LIST_PAGE", size)

    async def look() -> None:
        async with SQLiteJournal(path) as journal:
            assert len(await journal.list()) == many

    anyio.run(look)
    *slices, index = steps
    assert len(slices) == many // size + 1
    assert 0 < max(slices) < 60 * size
    assert 0 < index < 10 * many


def test_what_is_begun_during_a_list_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chats.db"
    make(path, [(1, 1, False)] * 5)
    monkeypatch.setattr(reader, "_LIST_PAGE", 2)

    async def look() -> None:
        async with SQLiteJournal(path) as journal:
            check = SQLiteReader.check_index

            def late(self: SQLiteReader, rows: int, last: int) -> None:
                with closing(sqlite3.connect(path)) as connection, connection:
                    tail = empty_tail("new", 0, 1, 9)
                    tail.head = 1
                    facts = (tail.epoch, 1, 0, tail.tip, 0, False, 9, tail.seal())
                    connection.execute(
                        "INSERT INTO conversation VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        (9, "new", 0, tail.log, *facts),
                    )
                check(self, rows=rows, last=last)

            monkeypatch.setattr(SQLiteReader, "check_index", late)
            assert len(await journal.list()) == 5

    anyio.run(look)


def test_a_list_says_that_an_index_hides_conversations(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    make(path, [(1, 1, False)] * 5)
    with closing(sqlite3.connect(path)) as connection, connection:
        # The index over names becomes one that has none of them.
        connection.execute("CREATE INDEX empty ON conversation (name) WHERE false")
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_master SET rootpage = "
            "(SELECT rootpage FROM sqlite_master WHERE name = 'empty') "
            "WHERE name = 'sqlite_autoindex_conversation_1'"
        )
        connection.execute("DELETE FROM sqlite_master WHERE name = 'empty'")

    async def look() -> None:
        async with SQLiteJournal(path, read_only=True) as journal:
            with pytest.raises(JournalRefused, match="5 conversations, and 0 in an index"):
                await journal.list()

    anyio.run(look)


def test_an_unfinished_row_that_is_damaged_is_said(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    make(path, [(1, 1, True)])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE conversation SET epoch = 9")

    async def look() -> None:
        async with SQLiteJournal(path) as journal:
            with pytest.raises(CorruptLog):
                await journal.find_abandoned()

    anyio.run(look)
