"""The objects of an idle conversation, each of which the garbage collector looks at.

With 50,000 active conversations a full collection takes about half a microsecond for each object,
while the event loop stands still. A change that adds some, for a good reason, records it here.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import anyio
import pytest

from turnkeeper.actors import Conversations, MemoryJournal, SQLiteJournal, TurnContext, agent
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.owner.actor import ConversationActor

OBJECTS_MAX = {"memory": 15, "sqlite": 11}
"""Of a conversation with one event: in the runtime, the owner, the folds and the journal."""
ANSWERED_OBJECTS_MAX = 16.5
"""Of a conversation whose only turn has ended: it has four events."""
MANY = 100


@agent
async def silent(_: TurnContext) -> None:
    """Do nothing: the events are appended by the test."""


@agent
async def polite(turn: TurnContext) -> None:
    """Answer the only message."""
    await turn.say("hello")


async def added_objects(begin: Callable[[str], Awaitable[None]]) -> float:
    """Return how many objects stay after `begin(name)` for one conversation more."""

    async def begin_many(name: str) -> None:
        for number in range(MANY):
            await begin(f"{name}{number}")
        await anyio.wait_all_tasks_blocked()

    def count() -> int:
        gc.collect()
        return len(gc.get_objects())

    await begin_many("before")
    counts = [count()]
    for name in ("a", "b", "c"):
        await begin_many(name)
        counts.append(count())
    # What else runs in the process, an import for example, may add to one of them, not to all.
    return min(after - before for before, after in pairwise(counts)) / MANY


@pytest.mark.anyio
@pytest.mark.parametrize("kind", OBJECTS_MAX)
async def test_an_idle_conversation_adds_few_objects_for_the_collector(
    tmp_path: Path, kind: str
) -> None:
    journal = MemoryJournal() if kind == "memory" else SQLiteJournal(tmp_path / "chats.db")
    async with Conversations(silent, journal=journal) as opened:

        async def begin(name: str) -> None:
            await opened[name].append(UserMessageEvent(content="hello"))

        added = await added_objects(begin)

    assert added <= OBJECTS_MAX[kind], f"{added} objects of each conversation"


@pytest.mark.anyio
async def test_an_owner_keeps_nothing_in_a_dictionary_however_many_begin_at_once() -> None:
    """Without slots, each owner of a process that has begun a hundred at once has one."""
    async with Conversations(polite, journal=MemoryJournal()) as opened:
        turn = await opened["c"].send("hello")
        await turn.end()
        owner = opened._setup.subscriptions._owned["c"]

        assert isinstance(owner, ConversationActor)
        assert vars(owner) == {}


@pytest.mark.anyio
async def test_a_conversation_keeps_few_objects_of_a_turn_that_has_ended(tmp_path: Path) -> None:
    journal = SQLiteJournal(tmp_path / "chats.db")
    async with Conversations(polite, journal=journal) as opened:

        async def begin(name: str) -> None:
            turn = await opened[name].send("hello")
            await turn.end()

        added = await added_objects(begin)

    assert added <= ANSWERED_OBJECTS_MAX, f"{added} objects of each conversation"
