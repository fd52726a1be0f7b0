"""What simulation has found in the production code, each once more by hand, as small as it gets."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from tests.actors.worlds import HeldAgent, WatchedJournal, log_of, verified
from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    Record,
    ToolAgent,
    ToolCall,
    Tools,
    TurnContext,
    agent,
    turns,
)
from turnkeeper.actors._postgres_presence import Presence
from turnkeeper.actors.models import ModelRequest, ModelResponse
from turnkeeper.runtime import Ports
from turnkeeper.runtime.testing import VirtualClock, settle


class HeldJournal(WatchedJournal):
    """Holds every append until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = anyio.Event()
        self.gate.set()

    async def before_append(self, records: Sequence[Record]) -> None:
        await self.gate.wait()


class LapsingJournal(MemoryJournal):
    """Its lease can run out, and is then renewed at once: the process had stood still."""

    def __init__(self) -> None:
        super().__init__()
        self.has_lapsed = False

    def is_lease_valid(self, *, since: float | None = None) -> bool:
        if since is not None and self.has_lapsed:
            return False
        return super().is_lease_valid()


@pytest.mark.anyio
async def test_a_resent_message_is_known_though_its_batch_made_the_table_forget_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 55: it was taken for a new one, and the journal refused the whole batch."""
    monkeypatch.setattr(turns, "KNOWN_MESSAGES_MAX", 3)
    held, journal = HeldAgent(), HeldJournal()
    held.hold("3")
    async with verified(held, journal=journal) as conversations:
        chat = conversations["c"]
        for n in ("1", "2"):
            await (await chat.send(n, message_id=n)).end()
        again: list[Any] = []

        async def send(message_id: str) -> None:
            again.append(await chat.send(message_id, message_id=message_id, on_overlap="interrupt"))

        journal.gate = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(send, "3")
            await settle()
            for message_id in ("4", "1"):  # taken together: the first makes "1" leave the table
                group.start_soon(send, message_id)
                await settle()
            journal.gate.set()

        assert {turn.message_id: turn.is_duplicate for turn in again} == {
            "1": True,
            "3": False,
            "4": False,
        }


@pytest.mark.anyio
async def test_no_tool_starts_where_the_lease_ran_out_after_its_call_was_written() -> None:
    """Sweep, freeze at the step after the commit: it ran on, beside the one who had taken over."""
    journal = LapsingJournal()
    started: list[str] = []

    @agent
    async def act(turn: TurnContext) -> None:
        actions = await turn.propose_calls([ToolCall("act")])
        journal.has_lapsed = True
        await turn.run_calls(actions, lambda action: _start(started, action.tool_name))

    async with Conversations(act, journal=journal) as conversations:
        turn = await conversations["c"].send("go")
        await settle()
        journal.has_lapsed = False
        end = await turn.end()

        assert started == []
        assert end.outcome == "interrupted"
        assert await log_of(conversations["c"]) == ["u:go", "call", "no result"]


async def _start(started: list[str], name: str) -> str:
    started.append(name)
    return "done"


@pytest.mark.anyio
async def test_no_call_that_waited_for_its_place_starts_where_the_lease_ran_out_meanwhile() -> None:
    """Seed 100989."""
    journal = LapsingJournal()
    started: list[int] = []

    class Model:
        async def respond(self, request: ModelRequest, write: object) -> ModelResponse:
            return ModelResponse(calls=[ToolCall("act", {"n": 1}), ToolCall("act", {"n": 2})])

    async def act(n: int) -> str:
        """Act."""
        started.append(n)
        journal.has_lapsed = True
        await settle()
        return "done"

    tools = Tools(act, calls_at_once_max=1)
    async with Conversations(ToolAgent(Model(), tools), journal=journal) as conversations:
        turn = await conversations["c"].send("go")
        while not started:
            await settle()
        await settle()
        journal.has_lapsed = False
        end = await turn.end()

        assert len(started) == 1
        assert end.outcome == "interrupted"


def test_a_lease_that_ran_out_does_not_bring_back_what_was_claimed_under_it() -> None:
    """Sweep, freeze: the heartbeat renewed the lease before anybody had looked at it."""
    clock = VirtualClock()
    ports = Ports(monotonic=clock.monotonic)
    presence = Presence(
        lambda: pytest.fail("not connected to anything"),
        node=1,
        address="here",
        lease_s=10.0,
        ports=ports,
        on_notify=lambda: None,
        on_ended=lambda: None,
    )
    connection: Any = SimpleNamespace(execute=lambda *_: None)
    presence.register(connection)
    claimed_at = clock.monotonic()
    assert presence.is_lease_valid(since=claimed_at)

    clock.jump(5.0)
    presence._renew(connection)
    clock.jump(5.0)
    assert presence.is_lease_valid(since=claimed_at)

    clock.jump(60.0)
    presence._renew(connection)
    assert presence.is_lease_valid()
    assert not presence.is_lease_valid(since=claimed_at)
    assert presence.is_lease_valid(since=clock.monotonic())
