"""Searches beside each other, each of which may take seconds."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from turnkeeper.actors import PostgresJournal, SQLiteJournal
from turnkeeper.actors.journal import SearchQuery
from turnkeeper.actors.journals.postgres.reader import PostgresReader
from turnkeeper.actors.journals.shared.job_thread import READS_AT_ONCE
from turnkeeper.actors.journals.sqlite.reader import SQLiteReader

from .... import postgres

pytestmark = pytest.mark.anyio

AnyJournal = SQLiteJournal | PostgresJournal


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.costly)])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyJournal]:
    if request.param == "sqlite":
        yield SQLiteJournal(tmp_path / "chats.db", search=True)
        return
    with postgres.schema() as schema:
        yield PostgresJournal(postgres.conninfo(), schema=schema, search=True)


async def test_each_search_has_the_bound_of_an_answer_for_itself(
    journal: AnyJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a few long searches at once were taken for a disk that hangs, and all reading ended."""
    reader: Any = SQLiteReader if isinstance(journal, SQLiteJournal) else PostgresReader
    may_go_on, work = threading.Event(), reader.work
    groups: list[int] = []

    def note(self: object, jobs: Sequence[Any]) -> None:
        groups.append(len(jobs))
        may_go_on.wait()
        work(self, jobs)

    monkeypatch.setattr(reader, "work", note)
    async with journal, anyio.create_task_group() as group:
        group.start_soon(journal.list)
        for _ in range(READS_AT_ONCE):
            group.start_soon(journal.search, SearchQuery(("word",), 1_000))
        await anyio.wait_all_tasks_blocked()
        may_go_on.set()

    # The first read may have been taken together with the first search.
    assert sum(groups) >= READS_AT_ONCE + 1
    assert max(groups) <= 2
