"""Confirming the calls that one was shown, and no others."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import pytest

from tests.actors.conversations.stores import KINDS, store
from tests.actors.conversations.turn_worlds import StepAgent, events_of, log_of
from turnkeeper.actors import (
    Conversation,
    MemoryJournal,
    ModelResponse,
    ScriptedModel,
    ToolAgent,
    ToolCall,
)
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import EventIdConflict, InvalidInput, NotConfirmable
from turnkeeper.actors.events import (
    ActionEvent,
    ConfirmationRequestedEvent,
    TaskListUpdatedEvent,
    UserRejectEvent,
)
from turnkeeper.actors.journal import READ_PAGE
from turnkeeper.runtime.testing import settle

from .worlds import HeldJournal, verified

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
        with anyio.fail_after(60):
            await chat.confirm(first)
            second = await shown(chat, 2)
            await chat.confirm(first)  # the same answer again: nothing is written
            with pytest.raises(NotConfirmable) as caught:
                await chat.reject(tool_call_ids=first)
            assert caught.value.awaiting == second
            assert ran == ["alice"]
            await chat.reject("not her", tool_call_ids=second)
            assert await turn.reply() == "done"
    assert ran == ["alice"]


async def test_answers_under_the_event_id_of_other_answers_are_refused() -> None:
    """They are in the log, and under another id than the caller takes them to have."""

    async def pay(to: str) -> str:
        return f"paid {to}"

    calls = [ModelResponse(calls=[ToolCall("pay", {"to": name})]) for name in ("alice", "bob")]
    agent = ToolAgent(ScriptedModel([*calls, "done"]), [pay], confirm="always")
    async with verified(agent, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("pay them")
        (first,) = await shown(chat, 1)
        await chat.answer({first: True}, event_id="r1")
        (second,) = await shown(chat, 2)
        with pytest.raises(EventIdConflict):
            await chat.answer({second: True}, event_id="r1")
        await chat.answer({second: True}, event_id="r2")
        assert await turn.reply() == "done"

        await chat.answer({first: True}, event_id="r1")
        await chat.answer({second: True}, event_id="r2")
        for answered, event_id in ((second, "r1"), (first, "r2")):
            with pytest.raises(EventIdConflict):
                await chat.answer({answered: True}, event_id=event_id)


async def test_answers_that_memory_has_let_go_are_the_same_under_their_event_id() -> None:
    """They were in the log, and refused as an `EventIdConflict`."""

    async def pay(to: str) -> str:
        return f"paid {to}"

    limits = Limits(known_messages_max=2, recent_events_max=2)
    pairs = [[ToolCall("pay", {"to": name}) for name in names] for names in ("ab", "cd", "e")]
    model = ScriptedModel([*(ModelResponse(calls=calls) for calls in pairs), "done"])
    agent = ToolAgent(model, [pay], confirm="always")
    async with verified(
        agent, journal=MemoryJournal(), limits=limits, queued_messages_max=1
    ) as conversations:
        chat = conversations["c"]
        turn = await chat.send("pay them")
        given: list[dict[str, bool | str]] = []
        for n in range(3):
            first, *others = await shown(chat, n + 1)
            given.append({first: True, **dict.fromkeys(others, "no")})
            await chat.answer(given[-1], event_id=f"r{n}")
        assert await turn.reply() == "done"

        head = (await chat.at()).seq
        for n in range(3):
            await chat.answer(given[n], event_id=f"r{n}")
        (first, other), (third, fourth), _ = given
        wrong: list[dict[str, bool | str]] = [
            {first: True},
            {first: True, other: True},
            {third: True, fourth: "no"},
            given[2],
        ]
        for answers in wrong:
            with pytest.raises(EventIdConflict):
                await chat.answer(answers, event_id="r0")
        assert (await chat.at()).seq == head


async def test_answers_that_their_batch_made_memory_let_go_are_the_same() -> None:
    """The owner had looked whether memory has them before the batch, and found it so."""

    async def pay(to: str) -> str:
        return f"paid {to}"

    journal = HeldJournal()
    pairs = [[ToolCall("pay", {"to": name}) for name in names] for names in ("ab", "cd")]
    model = ScriptedModel([*(ModelResponse(calls=calls) for calls in pairs), "done"])
    agent = ToolAgent(model, [pay], confirm="always")
    async with verified(
        agent, journal=journal, limits=Limits(known_messages_max=3), queued_messages_max=1
    ) as conversations:
        chat = conversations["c"]
        turn = await chat.send("pay them")
        first = dict.fromkeys(await shown(chat, 1), True)
        await chat.answer(first, event_id="r0")
        second = dict.fromkeys(await shown(chat, 2), True)
        await settle()

        journal.gate = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(partial(chat.change, title="held"))
            await settle()
            for answers, event_id in ((second, "r1"), (first, "r0")):  # taken together
                group.start_soon(partial(chat.answer, answers, event_id=event_id))
                await settle()
            journal.gate.set()

        assert await turn.reply() == "done"


async def test_answers_are_the_same_however_many_events_came_before_them() -> None:
    """The owner looked through one page of the log for the calls that they answer."""

    async def pay(to: str) -> str:
        return f"paid {to}"

    limits = Limits(known_messages_max=2, recent_events_max=2)
    calls = [[ToolCall("pay", {"to": name})] for name in "abc"]
    model = ScriptedModel([*(ModelResponse(calls=each) for each in calls), "done"])
    agent = ToolAgent(model, [pay], confirm="always")
    async with verified(
        agent, journal=MemoryJournal(), limits=limits, queued_messages_max=1
    ) as conversations:
        chat = conversations["c"]
        turn = await chat.send("pay them")
        first: dict[str, bool | str] = {}
        for n in range(3):
            (asked,) = await shown(chat, n + 1)
            if not first:
                first = {asked: True}
                await chat.append_all(
                    [TaskListUpdatedEvent(tasks=()) for _ in range(READ_PAGE + 1)]
                )
            await chat.answer({asked: True}, event_id=f"r{n}")
        assert await turn.reply() == "done"

        head = (await chat.at()).seq
        await chat.answer(first, event_id="r0")
        assert (await chat.at()).seq == head


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


ANSWERS: list[tuple[bool | str, bool | str, str]] = [
    (True, "not on a Sunday", "confirmed not-run result"),
    ("not on a Sunday", True, "confirmed not-run result"),
    (True, True, "confirmed result result"),
    (False, "not on a Sunday", "rejected not-run not-run"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("one", "other", "log"), ANSWERS)
async def test_each_call_that_waits_is_answered_on_its_own(
    kind: str, one: bool | str, other: bool | str, log: str, tmp_path: Path
) -> None:
    agent = StepAgent({"A": "asks-two"})
    with store(kind, tmp_path) as opens:
        async with verified(agent, journal=opens()) as conversations:
            chat = conversations["c"]
            turn = await chat.send("A")
            answers = dict(zip(await shown(chat, 1), (one, other), strict=True))

            await chat.answer(answers)

            assert await turn.reply() == "A"
            assert await log_of(chat) == f"started uA call call asked {log} aA completed"
            assert sorted(agent.ran) == sorted(c for c, a in answers.items() if a is True)
            told = {
                event.tool_call_id: event.content
                for event in await events_of(chat)
                if isinstance(event, UserRejectEvent)
            }
            assert told == {
                call: answer or "the user rejected this call"
                for call, answer in answers.items()
                if answer is not True
            }


async def test_mixed_answers_during_a_pause_run_only_what_was_confirmed_over_a_restart() -> None:
    journal, agent = MemoryJournal(), StepAgent({"A": "asks-two"})
    async with verified(agent, journal=journal) as conversations:
        chat = conversations["c"]
        await chat.send("A", message_id="A")
        one, other = await shown(chat, 1)
        await chat.pause()
        await chat.answer({one: "no", other: True})
    async with verified(agent, journal=journal) as conversations:
        chat = conversations["c"]
        await chat.answer({other: True, one: "no"})
        await chat.resume()
        assert await (await chat.turn("A")).reply() == "A"
        log = "started uA call call asked paused confirmed not-run resumed result aA completed"
        assert await log_of(chat) == log
    assert agent.ran == [other]


async def test_the_same_answers_again_write_nothing_and_others_are_refused() -> None:
    """At once, after the turn, over a restart, and while other calls wait."""
    journal = MemoryJournal()
    agent = StepAgent({"A": "asks-two", "B": "asks-two"})
    async with verified(agent, journal=journal) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        one, other = await shown(chat, 1)
        given: dict[str, bool | str] = {one: True, other: "no"}
        wrong: list[dict[str, bool | str]] = [
            {},
            {one: True},
            {one: True, other: "no", "another": True},
            {one: True, other: True},
            {one: False, other: "no"},
        ]
        for answers in wrong[:3]:
            with pytest.raises(
                NotConfirmable, match=f"read the log .* answer all .*: {one}, {other}$"
            ) as caught:
                await chat.answer(answers)
            assert caught.value.awaiting == (one, other)
        await chat.answer(given)
        await chat.answer(given)
        await turn.end()
        await chat.answer(given)
        await chat.send("B")
        await shown(chat, 2)
        length = len(await events_of(chat))
    async with verified(agent, journal=journal) as conversations:
        chat = conversations["c"]
        await chat.answer(given)
        wrong.append({one: True, other: "for another reason"})
        for answers in wrong:
            with pytest.raises(NotConfirmable):
                await chat.answer(answers)
        with pytest.raises(NotConfirmable):
            await chat.reject("no", tool_call_ids=[one, other])
        assert len(await events_of(chat)) == length
    assert agent.ran == [one]


@pytest.mark.parametrize("answers", [{"k": None}, {"k": 1}, {1: True}, {"k": "\ud800"}])
async def test_what_is_no_answer_is_refused(answers: dict[str, bool]) -> None:
    async with verified(StepAgent(), journal=MemoryJournal()) as conversations:
        with pytest.raises(InvalidInput):
            await conversations["c"].answer(answers)
