"""The wall clock is set back, between two runs or in one: only what is shown of times is wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    MemoryStore,
    PostgresJournal,
    SQLiteJournal,
    TurnContext,
    agent,
)
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.journal import Journal
from turnkeeper.actors.owner.event_reader import EventReader
from turnkeeper.runtime import Ids, Ports

from ... import postgres

pytestmark = [pytest.mark.anyio, pytest.mark.costly]

DAY_S = 86_400.0
YEAR_S = 365 * DAY_S
NOW = 1_800_000_000.0


class WallClock:
    """A clock that goes on with each reading, until it is set."""

    def __init__(self) -> None:
        self.at = NOW

    def __call__(self) -> float:
        self.at += 0.001
        return self.at


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def open_journal(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[Ports], Journal]]:
    if request.param == "memory":
        store = MemoryStore()
        yield lambda ports: MemoryJournal(store, ports=ports)
    elif request.param == "sqlite":
        yield lambda ports: SQLiteJournal(tmp_path / "chats.db", ports=ports)
    else:
        with postgres.schema() as schema:
            yield lambda ports: PostgresJournal(postgres.conninfo(), schema=schema, ports=ports)


@agent
async def support(turn: TurnContext) -> str:
    return f"You said: {turn.message.content}"


@pytest.mark.parametrize("step_s", [3_600.0, YEAR_S])
@pytest.mark.parametrize("is_within_a_run", [False, True])
async def test_a_conversation_written_on_a_clock_that_was_set_back_is_not_deleted_as_old(
    open_journal: Callable[[Ports], Journal], step_s: float, is_within_a_run: bool
) -> None:
    """Its time fell with the clock, and the next expiry deleted a conversation of that day."""
    clock = WallClock()

    @asynccontextmanager
    async def process() -> AsyncIterator[Conversations]:
        ports = Ports(now=clock, ids=Ids(clock))
        journal = open_journal(ports)
        async with Conversations(support, journal=journal, ports=ports) as conversations:
            yield conversations

    async def say(conversations: Conversations, content: str) -> None:
        reply = await (await conversations["alice"].send(content)).reply()
        assert reply == f"You said: {content}"

    async with process() as conversations:
        await say(conversations, "one")
        info = await conversations.journal.info("alice")
        if is_within_a_run:
            clock.at -= step_s
            await say(conversations, "two")
            new = [event.id async for _, event in read(conversations, after=info.head)]
            old = [event.id async for _, event in read(conversations) if event.id not in new]
            assert new == sorted(new)
            assert max(old) < min(new)
    if not is_within_a_run:
        clock.at -= step_s
        async with process() as conversations:
            await say(conversations, "two")

    clock.at = NOW + DAY_S
    async with process() as conversations:
        said = [
            event.content
            async for _, event in read(conversations, after=info.head)
            if isinstance(event, UserMessageEvent)
        ]
        assert said == ["two"]
        assert (await conversations.journal.info("alice")).updated_at >= info.updated_at
        assert [
            row.conversation_id for row in (await conversations.list(order="activity")).rows
        ] == ["alice"]
        assert await conversations.expire(before=NOW) == []
        assert await conversations.expire(before=clock.at) == ["alice"]


def read(conversations: Conversations, after: int = 0) -> EventReader:
    return conversations["alice"].events(after=after, live=False)
