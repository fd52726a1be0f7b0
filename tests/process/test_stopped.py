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
    ActionEvent,
    AgentErrorEvent,
    Conversation,
    Conversations,
    OwnedElsewhere,
    PostgresJournal,
    Turn,
    TurnContext,
    decode_event,
)
from turnkeeper.actors.agents import agent

from .stressing import database
from .test_sqlite_journal import wait_until_stopped

OWNER = Path(__file__).parent / "tool_owner.py"
NTH = 3


@agent
async def other(turn: TurnContext) -> None:
    await turn.say("I have taken over.")


async def send_when_free(conversation: Conversation) -> tuple[Turn, int]:
    """The turn, and how often the message was refused before the lease had run out."""
    refused = 0
    while True:
        try:
            return await conversation.send("Hello?", message_id="hello"), refused
        except OwnedElsewhere:
            refused += 1  # each try asks the server, whose clock decides


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_owner_that_was_taken_over_while_stopped_starts_nothing_and_writes_nothing(
    backend: str,
) -> None:
    """It wakes with two calls in its hands that are in the log, and that it has not begun."""
    with (
        database() as url,
        subprocess.Popen(
            [sys.executable, "-P", str(OWNER), url, "chat", backend, str(NTH)],
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            await wait_until_stopped(process)
            async with Conversations(other, journal=PostgresJournal(url)) as conversations:
                turn, refused = await send_when_free(conversations["chat"])
                reply = await turn.reply()
                async with PostgresJournal(url, read_only=True) as journal:
                    before = await journal.read("chat")
                    process.send_signal(signal.SIGCONT)
                    assert process.stdout is not None
                    lines = (await anyio.to_thread.run_sync(process.stdout.read)).splitlines()
                    after = await journal.read("chat")
        finally:
            process.kill()

    assert (reply, refused > 0) == ("I have taken over.", True)
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
