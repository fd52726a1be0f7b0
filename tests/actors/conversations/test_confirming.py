"""Confirming the calls that one was shown, and no others."""

from __future__ import annotations

import anyio
import pytest

from turnkeeper.actors import (
    Conversation,
    MemoryJournal,
    ModelResponse,
    ScriptedModel,
    ToolAgent,
    ToolCall,
)
from turnkeeper.actors.errors import NotConfirmable
from turnkeeper.actors.events import ActionEvent, ConfirmationRequestedEvent

from .worlds import verified

pytestmark = pytest.mark.anyio


async def shown(conversation: Conversation, times: int) -> tuple[str, ...]:
    """The calls of the last of so many requests for a confirmation."""
    async for logged in conversation.events():
        if isinstance(logged.event, ConfirmationRequestedEvent):
            times -= 1
            if not times:
                return logged.event.tool_call_ids
    raise AssertionError


async def test_a_second_click_never_confirms_calls_that_were_not_shown() -> None:
    ran: list[str] = []

    async def pay(to: str) -> str:
        ran.append(to)
        return "paid"

    calls = [ModelResponse(calls=[ToolCall("pay", {"to": name})]) for name in ("alice", "mallory")]
    agent = ToolAgent(ScriptedModel([*calls, "done"]), [pay], confirm="always")
    async with verified(agent, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("pay them")
        first = await shown(chat, 1)
        with anyio.fail_after(10):
            await chat.confirm(first)
            second = await shown(chat, 2)
            for late in (chat.confirm(first), chat.reject(tool_call_ids=first)):
                with pytest.raises(NotConfirmable) as caught:
                    await late
                assert caught.value.awaiting == second
            assert ran == ["alice"]
            await chat.reject("not her", tool_call_ids=second)
            assert await turn.reply() == "done"
    assert ran == ["alice"]


@pytest.mark.parametrize("value", [float("nan"), "\ud800", object()])
async def test_arguments_that_no_log_can_hold_are_answered_to_the_model(value: object) -> None:
    async def look(at: str) -> str:
        raise AssertionError(at)

    model = ScriptedModel([ModelResponse(calls=[ToolCall("look", {"at": value})]), "sorry"])
    async with verified(ToolAgent(model, [look]), journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("look")
        assert await turn.reply() == "sorry"
        view = await conversations["c"].view()
    action = next(event for event in view if isinstance(event, ActionEvent))
    assert action.arguments == {}
    assert action.malformed_arguments
