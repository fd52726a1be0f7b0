"""A process that holds a conversation is stopped past its lease, taken over, and woken up."""

# ruff: noqa: ASYNC220 - the loop of a test has nothing else to do

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from turnkeeper.actors import (
    Conversation,
    Conversations,
    PostgresJournal,
    Turn,
    TurnContext,
)
from turnkeeper.actors.agents.agent import agent
from turnkeeper.actors.errors import OwnedElsewhere
from turnkeeper.actors.events import ActionEvent, AgentErrorEvent, decode_event

from .. import postgres
from .stressing import database
from .test_following import LEASE_S, owner
from .test_sqlite_journal import wait_until_stopped

pytestmark = [pytest.mark.costly, pytest.mark.in_parts(2)]

OWNER = Path(__file__).parent / "tool_owner.py"
NTH = 3


@agent
async def other(turn: TurnContext) -> None:
    await turn.say("I have taken over.")


async def send_when_free(conversation: Conversation) -> Turn:
    """Send as soon as the lease of the owner before has run out."""
    while True:
        try:
            return await conversation.send("Hello?", message_id="hello")
        except OwnedElsewhere:
            pass  # each try asks the server, whose clock decides


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_owner_that_was_taken_over_while_stopped_starts_nothing_and_writes_nothing(
    backend: str,
) -> None:
    """It wakes with two calls in its hands that are in the log, and that it has not begun."""
    with (
        database() as url,
        subprocess.Popen(
            [sys.executable, "-P", str(OWNER), url, "chat", backend, str(NTH), str(LEASE_S)],
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            await wait_until_stopped(process)
            async with Conversations(other, journal=PostgresJournal(url)) as conversations:
                turn = await send_when_free(conversations["chat"])
                reply = await turn.reply()
                async with PostgresJournal(url, read_only=True) as journal:
                    before = await journal.read("chat")
                    process.send_signal(signal.SIGCONT)
                    assert process.stdout is not None
                    lines = (await anyio.to_thread.run_sync(process.stdout.read)).splitlines()
                    after = await journal.read("chat")
        finally:
            process.kill()

    assert reply == "I have taken over."
    assert after == before
    epochs = [record.epoch for record in after]
    assert epochs == sorted(epochs)
    events = [decode_event(record.payload) for record in after]
    calls = [event.tool_call_id for event in events if isinstance(event, ActionEvent)]
    not_run = [event.tool_call_id for event in events if isinstance(event, AgentErrorEvent)]
    assert not_run == calls[-2:]
    started = [line for line in lines if line.startswith("started")]
    assert sorted(started) == sorted(f"started {call}" for call in calls[:-2])
    assert "ended interrupted" in lines


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
async def test_a_reader_beside_an_owner_that_stood_still_hears_what_its_successor_wrote(
    backend: str,
) -> None:
    """It only waits, its owner is never passivated, and nothing is sent to it."""
    with postgres.schema() as schema, owner(f"postgres {schema} {LEASE_S}", backend) as first:
        await first.hears("ready")
        await first.do("send c A")
        await first.do("follow c")
        await first.hears(*(f"saw {seq}" for seq in range(1, 5)))
        first.process.send_signal(signal.SIGSTOP)
        await wait_until_stopped(first.process)
        journal = PostgresJournal(postgres.conninfo(), schema=schema)
        async with Conversations(other, journal=journal) as conversations:
            turn = await send_when_free(conversations["c"])
            assert (await turn.end()).outcome == "completed"
            first.process.send_signal(signal.SIGCONT)

            await first.hears(*(f"saw {seq}" for seq in range(5, 9)))
            first.say("view c")
            await first.hears("view OwnedElsewhere", "done")
