"""Unfinished conversations are found a slice at a time, however many finished ones there are."""

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
from turnkeeper.actors.errors import CorruptLog
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


@settings(max_examples=40)
@given(rows, st.integers(1, 4), st.booleans())
def test_what_is_found_is_what_a_list_of_all_shows_as_unfinished(
    rows: Sequence[Row], size: int, read_only: bool
) -> None:
    async def look(path: Path) -> None:
        async with SQLiteJournal(path, read_only=read_only) as journal:
            unfinished = [info for info in await journal.list() if info.is_unfinished]
            assert list(await journal.find_abandoned()) == unfinished

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_SLICE", size)
        path = Path(folder) / "chats.db"
        make(path, rows)
        anyio.run(look, path)


def test_no_read_on_entering_grows_with_the_finished_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, many = 100, 2_500
    path = tmp_path / "chats.db"
    make(path, [(1, 1, False)] * many)
    monkeypatch.setattr(reader, "_SLICE", size)
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

    async def enter() -> None:
        async with Conversations(HeldAgent(), journal=SQLiteJournal(path)):
            pass

    anyio.run(enter)
    assert len(done) > many // size
    assert 0 < max(done) < 60 * size


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
