"""Following a conversation that another process owns, and one that it has owned until it died."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tests.actors.conversations.worlds import HeldAgent, brief
from turnkeeper.actors import (
    Conversations,
    PostgresJournal,
    SQLiteJournal,
    Turn,
)
from turnkeeper.actors.errors import ConversationDeleted, OwnedElsewhere
from turnkeeper.actors.owner.event_reader import EventReader

from .. import postgres

pytestmark = pytest.mark.costly

OWNER = Path(__file__).parent / "conversation_owner.py"
LEASE_S = 3.0
"""The shortest that an owner keeps beside a heavy load; a killed owner's is waited out."""
ONE_TURN = ["started", "u:A", "a:a(A)", "completed"]


class Owner:
    """The other process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    async def hears(self, *words: str) -> None:
        assert self.process.stdout is not None
        for word in words:
            line = await anyio.to_thread.run_sync(self.process.stdout.readline)
            assert line == f"{word}\n"

    async def do(self, line: str) -> None:
        self.say(line)
        await self.hears("done")

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()


@contextmanager
def owner(place: str, backend: str = "trio") -> Iterator[Owner]:
    environment = dict(os.environ)
    if place.startswith("postgres "):
        environment["TURNKEEPER_TEST_POSTGRES"] = postgres.conninfo()
    with subprocess.Popen(
        [sys.executable, str(OWNER), place, backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield Owner(process)
        finally:
            process.kill()


async def take(reader: EventReader, count: int) -> list[tuple[int, str]]:
    events = [await anext(reader) for _ in range(count)]
    return [(logged.seq, brief(logged.event)) for logged in events]


async def send_when_free(conversations: Conversations, text: str) -> Turn:
    """When the dead owner's lease has run out, by the server's clock."""
    while True:
        try:
            return await conversations["c"].send(text)
        except OwnedElsewhere:
            pass  # each try asks the server


async def test_over_a_database_a_reader_follows_the_owner_and_then_becomes_it() -> None:
    with postgres.schema() as schema, owner(f"postgres {schema} {LEASE_S}") as other:
        await other.hears("ready")
        # No poll comes in time: it is woken.
        journal = PostgresJournal(postgres.conninfo(), schema=schema, poll_s=3600)
        async with Conversations(HeldAgent(), journal=journal) as conversations:
            reader = conversations["c"].events()
            seen: list[tuple[int, str]] = []

            async def follow() -> None:
                seen.extend(await take(reader, 5 * 4 + 2 * 4))

            async with anyio.create_task_group() as group:
                group.start_soon(follow)
                for _ in range(5):
                    await other.do("send c A")
                other.process.kill()
                for _ in range(2):
                    await (await send_when_free(conversations, "A")).end()

            assert seen == list(enumerate(ONE_TURN * 7, 1))


async def test_over_a_database_a_deletion_ends_readers_in_other_processes() -> None:
    with postgres.schema() as schema, owner(f"postgres {schema} 60") as other:
        await other.hears("ready")
        journal = PostgresJournal(postgres.conninfo(), schema=schema, poll_s=3600)
        async with Conversations(HeldAgent(), journal=journal) as conversations:
            await other.do("send c A")
            reader = conversations["c"].events()
            await take(reader, 4)
            with pytest.raises(OwnedElsewhere):
                await conversations.delete("c")

            async with anyio.create_task_group() as group:
                group.start_soon(other.do, "delete c")
                with pytest.raises(ConversationDeleted):
                    await anext(reader)


async def test_beside_the_process_that_writes_a_file_another_one_follows(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with owner(str(path)) as other:
        await other.hears("ready")
        journal = SQLiteJournal(path, read_only=True, poll_s=0.01)
        async with Conversations(
            HeldAgent(), journal=journal, recover="on_message"
        ) as conversations:
            reader = conversations["c"].events()
            seen: list[tuple[int, str]] = []

            async def follow() -> None:
                seen.extend(await take(reader, 20))
                with pytest.raises(ConversationDeleted):
                    await anext(reader)

            async with anyio.create_task_group() as group:
                group.start_soon(follow)
                for _ in range(5):
                    await other.do("send c A")
                while len(seen) < 20:
                    await anyio.lowlevel.checkpoint()
                await other.do("delete c")
                await other.do("send c B")

            assert seen == list(enumerate(ONE_TURN * 5, 1))
