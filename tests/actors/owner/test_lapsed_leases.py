"""Effects and claims under a lease that ran out or was lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.actors.conversations.worlds import HeldAgent, brief, log_of, verified
from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    MemoryStore,
    ToolAgent,
    ToolCall,
    Tools,
    TurnContext,
    agent,
)
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.errors import LeaseExpired
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.journal import Claim
from turnkeeper.actors.models.base import ModelRequest, ModelResponse
from turnkeeper.runtime import Ports
from turnkeeper.runtime.testing import VirtualClock, settle

pytestmark = pytest.mark.anyio


class LapsingJournal(MemoryJournal):
    """Its lease can run out, and is then renewed at once: the process had stood still."""

    def __init__(self) -> None:
        super().__init__()
        self.has_lapsed = False

    def is_lease_valid(self, *, since: float | None = None) -> bool:
        if since is not None and self.has_lapsed:
            return False
        return super().is_lease_valid()


async def _start(started: list[str], name: str) -> str:
    started.append(name)
    return "done"


@pytest.mark.anyio
async def test_no_tool_starts_if_the_lease_ran_out_after_its_call_was_written() -> None:
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


@pytest.mark.anyio
async def test_no_call_that_waited_for_its_place_starts_if_the_lease_ran_out_meanwhile() -> None:
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


@pytest.mark.anyio
async def test_a_lease_that_was_lost_during_the_claim_is_no_lease_for_what_was_claimed() -> None:
    """The process may have stood still before the answer to its claim had come."""
    clock = VirtualClock()

    class LosingJournal(MemoryJournal):
        lost_at: float | None = None

        async def claim(
            self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
        ) -> Claim:
            claim = await super().claim(conversation_id, takeover=takeover, any_name=any_name)
            if self.lost_at is None:
                clock.jump(1.0)
                self.lost_at = clock.monotonic()
                clock.jump(1.0)
            return claim

        def is_lease_valid(self, *, since: float | None = None) -> bool:
            if since is not None and self.lost_at is not None and since < self.lost_at:
                return False
            return super().is_lease_valid()

    held = HeldAgent()
    ports = Ports(monotonic=clock.monotonic)
    async with verified(held, journal=LosingJournal(), ports=ports) as conversations:
        with pytest.raises(LeaseExpired):
            await conversations["c"].send("go")

        assert held.turns == []


@pytest.mark.anyio
async def test_what_the_last_owner_wrote_until_the_claim_is_read_by_the_next_one() -> None:
    class ClaimingJournal(MemoryJournal):
        """Takes over; the last append of the owner before lands when it is asked to claim."""

        def __init__(self, store: MemoryStore, append: Callable[[], Awaitable[object]]) -> None:
            super().__init__(store)
            self._append = append

        async def claim(
            self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
        ) -> Claim:
            await self._append()
            return await super().claim(conversation_id, takeover=True, any_name=any_name)

    store = MemoryStore()
    async with MemoryJournal(store) as last:
        epoch = (await last.claim("c")).epoch

        async def append(seq: int) -> None:
            record = encode_record(UserMessageEvent(content=str(seq)))
            await last.append("c", [record], epoch=epoch, expected_seq=seq, is_unfinished=False)

        await append(1)
        journal = ClaimingJournal(store, lambda: append(2))
        async with verified(HeldAgent(), journal=journal) as conversations:
            view = await conversations["c"].view()

    assert [brief(event) for event in view] == ["u:1", "u:2"]
