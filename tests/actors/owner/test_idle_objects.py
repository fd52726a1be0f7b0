"""The objects of an idle conversation, each of which the garbage collector looks at.

With 50,000 active conversations a full collection takes about half a microsecond for each object,
while the event loop stands still. A change that adds some, for a good reason, records it here.
"""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path

import pytest

from turnkeeper.actors import Conversations, SQLiteJournal, TurnContext, agent
from turnkeeper.actors.events import UserMessageEvent

OBJECTS_MAX = 22
"""Of a conversation with one event: in the runtime, the owner, the folds and the journal."""
MANY = 100


@agent
async def silent(_: TurnContext) -> None:
    """Do nothing: the events are appended by the test."""


@pytest.mark.anyio
async def test_an_idle_conversation_adds_few_objects_for_the_collector(tmp_path: Path) -> None:
    journal = SQLiteJournal(tmp_path / "chats.db")
    async with Conversations(silent, journal=journal) as opened:

        async def begin(name: str) -> None:
            for number in range(MANY):
                await opened[f"{name}{number}"].append(UserMessageEvent(content="hello"))

        def count() -> int:
            gc.collect()
            return len(gc.get_objects())

        await begin("before")
        counts = [count()]
        for name in ("a", "b", "c"):
            await begin(name)
            counts.append(count())

        # What else runs in the process, an import for example, may add to one of them, not to all.
        added = min(after - before for before, after in pairwise(counts)) / MANY
        assert added <= OBJECTS_MAX, f"{added} objects of each conversation"
