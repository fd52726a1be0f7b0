"""Searches beside each other, each of which may take seconds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from turnkeeper.actors import SQLiteJournal
from turnkeeper.actors.journal import SearchQuery
from turnkeeper.actors.journals.shared.job_thread import READS_AT_ONCE
from turnkeeper.actors.journals.sqlite.reader import SQLiteReader

pytestmark = pytest.mark.anyio


async def test_each_search_has_the_bound_of_an_answer_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a few long searches at once were taken for a disk that hangs, and all reading ended."""
    may_go_on, work = threading.Event(), SQLiteReader.work
    groups: list[int] = []

    def note(reader: SQLiteReader, jobs: Sequence[Any]) -> None:
        groups.append(len(jobs))
        may_go_on.wait()
        work(reader, jobs)

    monkeypatch.setattr(SQLiteReader, "work", note)
    async with (
        SQLiteJournal(tmp_path / "chats.db", search=True) as journal,
        anyio.create_task_group() as group,
    ):
        group.start_soon(journal.list)
        for _ in range(READS_AT_ONCE):
            group.start_soon(journal.search, SearchQuery(("word",), 1_000))
        await anyio.wait_all_tasks_blocked()
        may_go_on.set()

    # The first read may have been taken together with the first search.
    assert sum(groups) >= READS_AT_ONCE + 1
    assert max(groups) <= 2
