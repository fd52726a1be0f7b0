"""A long list is sorted a part at a time."""

from __future__ import annotations

import random

import anyio
import pytest

from turnkeeper.actors.journal import ConversationInfo
from turnkeeper.actors.journals.shared import database_journal
from turnkeeper.actors.journals.shared.database_journal import sorted_by_id

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("count", [0, 1, 10, 11, 99, 1_234])
async def test_a_list_is_sorted_in_parts_as_it_would_be_at_once(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_journal, "_SORTED_AT_ONCE", 10)
    draw = random.Random(count)
    infos = [
        ConversationInfo(f"c{draw.randrange(2 * count)}", 1, 1, False, float(at))
        for at in range(count)
    ]

    assert await sorted_by_id(infos) == sorted(infos, key=lambda info: info.conversation_id)


async def test_other_tasks_run_while_a_long_list_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_journal, "_SORTED_AT_ONCE", 10)
    infos = [ConversationInfo(f"c{at}", 1, 1, False, 0.0) for at in range(1_000)]
    steps, is_over = 0, False

    async def count() -> None:
        nonlocal steps
        while not is_over:
            steps += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        await sorted_by_id(infos)
        is_over = True

    assert steps >= len(infos) / 10
