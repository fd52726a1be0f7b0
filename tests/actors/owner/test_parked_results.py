"""Results that come before their calls, parked by the owner."""

from __future__ import annotations

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, log_of, verified
from turnkeeper.actors import (
    Appended,
    Conversation,
    Conversations,
    Duplicate,
    MemoryJournal,
)
from turnkeeper.actors.core.admission import AdmissionRefused
from turnkeeper.actors.errors import ResultNotKept
from turnkeeper.actors.events import ActionEvent, ObservationEvent, UserMessageEvent
from turnkeeper.runtime import Ports, Runtime
from turnkeeper.runtime.testing import VirtualClock

pytestmark = pytest.mark.anyio

PARK_S = 30.0  # unless a test says otherwise


def call(call_id: str) -> ActionEvent:
    return ActionEvent(tool_call_id=call_id, tool_name="look", llm_response_id="r")


def result(call_id: str) -> ObservationEvent:
    return ObservationEvent(tool_call_id=call_id, content=f"seen {call_id}")


async def until_parked(conversations: Conversations, count: int) -> None:
    """Wait until so many results are parked, in the owner of the one active conversation."""
    while True:
        (cell,) = conversations._region._cells.values()  # type: ignore[union-attr] # it is open
        if len(cell.actor._parking or ()) == count:  # type: ignore[union-attr] # it is active
            return
        await anyio.lowlevel.checkpoint()


async def test_a_parked_result_follows_its_call_in_the_same_commit() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        answers: dict[str, object] = {}

        async def park(call_id: str) -> None:
            answers[call_id] = await chat.append(result(call_id), park=True)

        async with anyio.create_task_group() as group:
            group.start_soon(park, "1")
            await until_parked(conversations, 1)
            assert await log_of(chat) == ["u:go"]
            assert answers == {}

            await chat.append(call("1"))

            assert await log_of(chat) == ["u:go", "call", "result"]
        assert answers == {"1": Appended(3)}


async def test_parked_results_follow_the_last_call_of_a_response_that_comes_call_by_call() -> None:
    """A result closes its response: the next call of it would be refused."""
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        async with anyio.create_task_group() as group:
            for n, call_id in enumerate("12", start=1):
                group.start_soon(append_parked, chat, call_id)
                await until_parked(conversations, n)
            await chat.append(call("1"))
            await chat.view()
            assert await log_of(chat) == ["u:go", "call"]
            await chat.append(call("2"))

        assert await log_of(chat) == ["u:go", "call", "call", "result", "result"]


async def test_a_parked_result_gives_way_to_a_message_though_another_waits_for_its_call() -> None:
    clock = VirtualClock()
    async with verified(HeldAgent(), journal=MemoryJournal(), ports=clock.ports()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        async with anyio.create_task_group() as group:
            group.start_soon(append_parked, chat, "1")
            await until_parked(conversations, 1)
            group.start_soon(refused_parked, chat, "2")
            await until_parked(conversations, 2)
            await chat.append(call("1"))
            await chat.append(UserMessageEvent(content="next"))
            assert await log_of(chat) == ["u:go", "call", "result", "u:next"]
            await clock.advance(PARK_S)


async def test_a_held_result_is_appended_when_the_one_that_it_waits_with_is_overdue() -> None:
    clock = VirtualClock()
    async with verified(HeldAgent(), journal=MemoryJournal(), ports=clock.ports()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        async with anyio.create_task_group() as group:
            group.start_soon(append_parked, chat, "1")
            await until_parked(conversations, 1)
            group.start_soon(refused_parked, chat, "2")
            await until_parked(conversations, 2)
            await chat.append(call("1"))
            assert await log_of(chat) == ["u:go", "call"]
            await clock.advance(PARK_S)
        assert await log_of(chat) == ["u:go", "call", "result"]


async def refused_parked(chat: Conversation, call_id: str) -> None:
    with pytest.raises(AdmissionRefused):
        await chat.append(result(call_id), park=True)


async def append_parked(chat: Conversation, call_id: str) -> None:
    await chat.append(result(call_id), park=True)


async def test_a_second_parked_result_for_one_call_is_refused_at_once() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        async with anyio.create_task_group() as group:
            group.start_soon(append_parked, chat, "1")
            await chat.append(UserMessageEvent(content="go"))
            await until_parked(conversations, 1)

            with pytest.raises(AdmissionRefused) as refused:
                await chat.append(result("1"), park=True)

            assert refused.value.violation.name == "duplicate_tool_result"
            group.cancel_scope.cancel()


async def test_a_parked_result_that_is_sent_again_is_told_that_the_log_has_it() -> None:
    """As after a cancellation: the first one is still parked, and its answer goes to no one."""
    again = result("1")
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        answers: list[object] = []

        async def park() -> None:
            answers.append(await chat.append(again, park=True))

        async with anyio.create_task_group() as group:
            group.start_soon(park)
            await until_parked(conversations, 1)
            group.cancel_scope.cancel()
        async with anyio.create_task_group() as group:
            group.start_soon(park)
            await until_parked(conversations, 2)

            await chat.append(call("1"))

        assert answers == [Duplicate(3)]
        assert await log_of(chat) == ["u:go", "call", "result"]
        assert not await chat.rejections()


async def test_a_parked_result_that_is_sent_again_without_park_waits_with_the_first() -> None:
    """It was refused and recorded as rejected, and got into the log when its call came."""
    again = result("1")
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        answers: dict[bool, object] = {}

        async def append(park: bool) -> None:
            answers[park] = await chat.append(again, park=park)

        async with anyio.create_task_group() as group:
            for count, park in enumerate((True, False), start=1):
                group.start_soon(append, park)
                await until_parked(conversations, count)
            with pytest.raises(AdmissionRefused):
                await chat.append(result("1"))  # another one
            await chat.append(call("1"))

        assert answers == {True: Appended(3), False: Duplicate(3)}
        assert await log_of(chat) == ["u:go", "call", "result"]
        assert len(await chat.rejections()) == 1


async def test_a_parked_result_whose_call_does_not_come_is_refused_and_recorded() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal(), park_s=0.0) as conversations:
        chat = conversations["c"]

        with pytest.raises(AdmissionRefused) as refused:
            await chat.append(result("1"), park=True)

        assert refused.value.violation.name == "unmatched_tool_result"
        assert [kept.violation for kept in await chat.rejections()] == ["unmatched_tool_result"]


async def test_a_parked_result_is_not_acknowledged_when_its_owner_stops() -> None:
    errors = []

    async def park(chat: Conversation) -> None:
        try:
            await chat.append(result("1"), park=True)
        except ResultNotKept as error:
            errors.append(error.tool_call_id)

    async with (
        anyio.create_task_group() as group,
        verified(HeldAgent(), journal=MemoryJournal()) as conversations,
    ):
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        group.start_soon(park, chat)
        await until_parked(conversations, 1)
        await conversations._region.stop_actor("c")  # type: ignore[union-attr] # it is open

    assert errors == ["1"]


async def test_a_result_that_is_parked_in_the_batch_that_releases_another_is_not_taken_for_it() -> (
    None
):
    """Found by the simulator, seed 510005863: at one time, with no ids drawn, the two are equal."""
    ports = Ports(now=lambda: 1_700_000_000.0)
    async with (
        Runtime(ports=ports) as runtime,
        Conversations(HeldAgent(), journal=MemoryJournal(), runtime=runtime) as conversations,
    ):
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        async with anyio.create_task_group() as group:
            for n, call_id in enumerate("12", start=1):
                group.start_soon(append_parked, chat, call_id)
                await until_parked(conversations, n)
            await chat.append(call("1"))
            group.start_soon(append_parked, chat, "9")
            with anyio.fail_after(60):
                while await log_of(chat) != ["u:go", "call", "result"]:
                    await anyio.lowlevel.checkpoint()

            await chat.append(UserMessageEvent(content="more"))

            assert await log_of(chat) == ["u:go", "call", "result", "u:more"]
            group.cancel_scope.cancel()
