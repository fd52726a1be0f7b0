"""The smallest honest program keeps the promises at its head: a baseline that cheats is none."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from benchmarks._smallest import Program
from turnkeeper.actors.events import UserMessageEvent

pytestmark = pytest.mark.anyio


async def test_each_event_is_in_the_file_once_at_the_place_that_was_answered(
    tmp_path: Path,
) -> None:
    path = tmp_path / "smallest.db"
    events = [UserMessageEvent(content=f"message {n}") for n in range(5)]
    places: dict[int, list[int]] = {0: [], 1: []}
    async with Program(path, 2) as program, anyio.create_task_group() as group:

        async def converse(log: int) -> None:
            answers = [program.owners[log].append(event) for event in (*events, events[2])]
            places[log] = [await answer for answer in answers]

        for log in places:
            group.start_soon(converse, log)

    assert places == {log: [1, 2, 3, 4, 5, 3] for log in (0, 1)}
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT log, seq, event_id FROM event ORDER BY log, seq")
        expected = [(log, seq, event.id) for log in (0, 1) for seq, event in enumerate(events, 1)]
        assert found.fetchall() == expected
        marks = connection.execute("SELECT count(DISTINCT mark) FROM event WHERE log = 0")
        assert marks.fetchone() == (len(events),)


async def test_an_owner_that_another_one_has_followed_writes_nothing_and_says_so(
    tmp_path: Path,
) -> None:
    path = tmp_path / "smallest.db"
    async with Program(path, 2) as program:
        await program.owners[0].append(UserMessageEvent(content="before"))
        with closing(sqlite3.connect(path, isolation_level=None)) as rival:
            rival.execute("UPDATE conversation SET epoch = 2 WHERE id = 0")
            with pytest.raises(RuntimeError, match="nothing was written"):
                await program.owners[0].append(UserMessageEvent(content="after"))
            (written,) = rival.execute("SELECT count(*) FROM event").fetchone()
    assert written == 1
