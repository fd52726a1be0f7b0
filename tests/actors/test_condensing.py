"""Condensation beside the loop: messages keep coming while a condenser works."""

from __future__ import annotations

import anyio
import pytest

from tests.actors.worlds import HeldAgent, log_of, verified
from turnkeeper.actors import (
    CondensationEvent,
    CondensationRequestEvent,
    Event,
    MemoryJournal,
    Proposal,
    RollingCondenser,
    View,
    decode_event,
)
from turnkeeper.actors.condensers import Need

pytestmark = pytest.mark.anyio


async def events_of(journal: MemoryJournal, conversation_id: str) -> list[Event]:
    records = await journal.read(conversation_id, limit=100_000)
    return [decode_event(record.payload) for record in records]


async def test_a_long_conversation_is_condensed_and_its_view_is_that_of_its_log() -> None:
    journal = MemoryJournal()
    condenser = RollingCondenser(max_size=12, keep_first=2)
    async with verified(
        HeldAgent(), journal=journal, condenser=condenser, system_prompt="Be kind."
    ) as conversations:
        chat = conversations["c"]
        for n in range(40):
            await (await chat.send(f"tool {n}")).reply()

        view = await chat.view()
        events = await events_of(journal, "c")
        assert sum(isinstance(event, CondensationEvent) for event in events) > 5
        assert len(view) < 20
        assert view == View.from_events(events)
        assert view[0].kind == "system_prompt"


async def test_a_request_is_answered_by_a_condensation() -> None:
    journal = MemoryJournal()
    async with verified(
        HeldAgent(), journal=journal, condenser=RollingCondenser()
    ) as conversations:
        chat = conversations["c"]
        for n in range(10):
            await (await chat.send(str(n))).end()
        before = len(await chat.view())

        await chat.append(CondensationRequestEvent())
        async for logged in chat.events():
            if isinstance(logged.event, CondensationEvent):
                break

        assert len(await chat.view()) < before


class SlowCondenser:
    """Proposes to forget what it was shown first, when the test lets it."""

    def __init__(self) -> None:
        self.shown: list[int] = []
        self.asked = anyio.Event()
        self.go_on = anyio.Event()

    def need(self, view: View) -> Need | None:
        return "soft" if len(view) >= 8 else None

    async def propose(self, view: View, need: Need) -> Proposal | None:
        self.shown.append(len(view))
        self.asked.set()
        await self.go_on.wait()
        return Proposal(tuple(event.id for event in view[2:6]), f"{need} summary")


async def test_messages_are_answered_while_a_condenser_works_and_its_proposal_still_holds() -> None:
    journal, condenser = MemoryJournal(), SlowCondenser()
    async with verified(HeldAgent(), journal=journal, condenser=condenser) as conversations:
        chat = conversations["c"]
        for n in range(4):
            await (await chat.send(str(n))).end()
        await condenser.asked.wait()

        assert await (await chat.send("meanwhile")).reply() == "a(meanwhile)"
        condenser.go_on.set()
        async for logged in chat.events():
            if isinstance(logged.event, CondensationEvent):
                break

        events = await events_of(journal, "c")
        view = await chat.view()
        assert view == View.from_events(events)
        assert [event.kind for event in view][:3] == [
            "user_message",
            "agent_message",
            "condensation_summary",
        ]
        assert "u:meanwhile" in await log_of(chat)


class BrokenCondenser(SlowCondenser):
    async def propose(self, view: View, need: Need) -> Proposal | None:
        self.shown.append(len(view))
        raise ConnectionError("no model")


async def test_a_condenser_that_raises_is_written_down_and_tried_again_later() -> None:
    journal, condenser = MemoryJournal(), BrokenCondenser()
    async with verified(HeldAgent(), journal=journal, condenser=condenser) as conversations:
        chat = conversations["c"]
        for n in range(6):
            await (await chat.send(str(n))).end()

        kinds = [event.kind for event in await events_of(journal, "c")]
        assert kinds.count("conversation_error") == len(condenser.shown)
        assert len(set(condenser.shown)) == len(condenser.shown)
        assert len(condenser.shown) >= 2


class GreedyCondenser(SlowCondenser):
    """Would tear a call from its result."""

    async def propose(self, view: View, need: Need) -> Proposal | None:
        self.shown.append(len(view))
        at = next(n for n, event in enumerate(view) if event.kind == "action")
        return Proposal((view[at].id,))


async def test_a_proposal_that_would_tear_a_call_from_its_result_is_refused() -> None:
    journal, condenser = MemoryJournal(), GreedyCondenser()
    async with verified(HeldAgent(), journal=journal, condenser=condenser) as conversations:
        chat = conversations["c"]
        for n in range(4):
            await (await chat.send(f"tool {n}")).end()

        assert condenser.shown
        events = await events_of(journal, "c")
        assert not any(isinstance(event, CondensationEvent) for event in events)
        assert await chat.view() == View.from_events(events)
