"""Results that come before their calls, parked by the owner."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
from anyio.abc import TaskGroup

from tests.actors.conversations.worlds import HeldAgent, log_of, verified
from turnkeeper.actors import (
    Appended,
    Conversation,
    Conversations,
    Duplicate,
    MemoryJournal,
    Proposal,
    View,
)
from turnkeeper.actors.core.admission import AdmissionRefused
from turnkeeper.actors.core.condensation import Need
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import EventIdConflict, ResultNotKept
from turnkeeper.actors.events import ActionEvent, Event, ObservationEvent, UserMessageEvent
from turnkeeper.runtime import OutcomeUnknown, Ports, Runtime
from turnkeeper.runtime.testing import VirtualClock

pytestmark = pytest.mark.anyio

PARK_S = 30.0  # unless a test says otherwise
SENDERS_MAX = 64  # of one parked result


def call(call_id: str) -> ActionEvent:
    return ActionEvent(tool_call_id=call_id, tool_name="look", llm_response_id="r")


def result(call_id: str) -> ObservationEvent:
    return ObservationEvent(tool_call_id=call_id, content=f"seen {call_id}")


async def until_parked(conversations: Conversations, count: int) -> None:
    """Wait until so many results are parked, in the owner of the one active conversation."""
    for _ in range(10_000):
        (cell,) = conversations._region._cells.values()  # type: ignore[union-attr] # it is open
        if len(cell.actor._parking or ()) == count:  # type: ignore[union-attr] # it is active
            return
        await anyio.lowlevel.checkpoint()
    pytest.fail(f"{count} results are never parked")


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
            await park_both(group, conversations, chat)
            await chat.append(call("1"))
            await chat.view()
            assert await log_of(chat) == ["u:go", "call"]
            await chat.append(call("2"))

        assert await log_of(chat) == ["u:go", "call", "call", "result", "result"]


class NeverProposes:
    def need(self, view: View) -> Need | None:
        return "soft" if view else None

    async def propose(self, view: View, need: Need) -> Proposal | None:
        await anyio.sleep_forever()
        return None


async def test_a_condenser_that_is_late_between_two_calls_does_not_close_their_response() -> None:
    clock = VirtualClock()
    async with verified(
        HeldAgent(),
        journal=MemoryJournal(),
        ports=clock.ports(),
        condenser=NeverProposes(),
        condense_s=PARK_S / 2,
    ) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        async with anyio.create_task_group() as group:
            await park_both(group, conversations, chat)
            await chat.append(call("1"))

            await clock.advance(PARK_S / 2)

            assert "conversation_error" in await log_of(chat, all_kinds=True)
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


async def refused_parked(chat: Conversation, call_id: str, event: Event | None = None) -> None:
    with pytest.raises(AdmissionRefused):
        await chat.append(event or result(call_id), park=True)


async def append_parked(chat: Conversation, call_id: str) -> None:
    await append_event_parked(chat, result(call_id))


async def append_event_parked(chat: Conversation, event: Event) -> None:
    await chat.append(event, park=True)


async def park_both(group: TaskGroup, conversations: Conversations, chat: Conversation) -> None:
    """Park the results of the calls 1 and 2, in this order."""
    for count, call_id in enumerate("12", start=1):
        group.start_soon(append_parked, chat, call_id)
        await until_parked(conversations, count)


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


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "another"])
async def test_a_parked_result_whose_call_comes_with_a_result_is_answered_at_once(
    is_same: bool,
) -> None:
    """It waited until it was overdue, and was refused although the log had it."""
    parked, other = result("1"), result("1")
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        answers: list[object] = []

        async def park() -> None:
            try:
                answers.append(await chat.append(parked, park=True))
            except AdmissionRefused as refused:
                answers.append(refused.violation.name)

        async with anyio.create_task_group() as group:
            group.start_soon(park)
            await until_parked(conversations, 1)

            await chat.append_all([call("1"), parked if is_same else other])

        assert answers == [Duplicate(3) if is_same else "duplicate_tool_result"]
        assert await log_of(chat) == ["u:go", "call", "result"]
        assert len(await chat.rejections()) == (not is_same)


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


async def test_a_parked_result_in_append_all_waits_with_the_first() -> None:
    """It was refused and recorded as rejected, and got into the log when its call came."""
    again = result("1")
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        answers: list[object] = []

        async def append_all() -> None:
            answers.append(await chat.append_all([again]))

        async with anyio.create_task_group() as group:
            group.start_soon(append_event_parked, chat, again)
            await until_parked(conversations, 1)
            group.start_soon(append_all)
            await until_parked(conversations, 2)
            await chat.append(call("1"))

        assert answers == [Duplicate(3)]
        assert await log_of(chat) == ["u:go", "call", "result"]
        assert not await chat.rejections()


async def test_append_all_with_a_parked_result_and_others_is_refused_once_its_fate_is_known() -> (
    None
):
    """Told "unmatched" before, its caller would find a part of the events in the log later."""
    parked, other = result("1"), result("2")
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))

        async def append_all() -> None:
            with pytest.raises(EventIdConflict) as conflict:
                await chat.append_all([other, parked])
            assert conflict.value.seqs == {parked.id: 3}

        async with anyio.create_task_group() as group:
            group.start_soon(append_event_parked, chat, parked)
            await until_parked(conversations, 1)
            group.start_soon(append_all)
            await until_parked(conversations, 2)
            await chat.append(call("1"))

        assert await log_of(chat) == ["u:go", "call", "result"]
        assert not await chat.rejections()


async def test_append_all_knows_of_its_events_that_came_while_it_waited_and_left_memory() -> None:
    """It was an `EventIdConflict`, though the log had both of its events, in its order."""
    one, two = result("1"), result("2")
    limits = Limits(recent_events_max=4)
    journal = MemoryJournal()
    async with verified(HeldAgent(), journal=journal, limits=limits) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        answers: dict[str, Appended | Duplicate] = {}

        async def append_both() -> None:
            answers["both"] = await chat.append_all([two, one])

        async with anyio.create_task_group() as group:
            group.start_soon(partial(chat.append, one, park=True))
            await until_parked(conversations, 1)
            group.start_soon(partial(chat.append, two, park=True))
            await until_parked(conversations, 2)
            group.start_soon(append_both)
            await until_parked(conversations, 3)
            await chat.append(call("2").model_copy(update={"llm_response_id": "other"}))
            await chat.append(UserMessageEvent(content="the second result is before this"))
            await until_parked(conversations, 2)
            for n in range(6):
                await chat.append(UserMessageEvent(content=f"more than memory keeps {n}"))
            await chat.append(call("1"))
            await chat.append(UserMessageEvent(content="the first result is before this"))

        log = [logged.event async for logged in chat.events(live=False)]
        assert answers["both"] == Duplicate(log.index(one) + 1)


async def test_append_all_with_a_parked_result_is_refused_with_it_when_it_is_overdue() -> None:
    clock = VirtualClock()
    parked, other = result("1"), result("2")
    async with verified(HeldAgent(), journal=MemoryJournal(), ports=clock.ports()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))

        async def append_all() -> None:
            with pytest.raises(AdmissionRefused) as refused:
                await chat.append_all([other, parked])
            assert refused.value.violation.event == other

        async with anyio.create_task_group() as group:
            group.start_soon(refused_parked, chat, "1", parked)
            await until_parked(conversations, 1)
            group.start_soon(append_all)
            await until_parked(conversations, 2)
            await clock.advance(PARK_S)

        assert await log_of(chat) == ["u:go"]
        assert len(await chat.rejections()) == 2


@pytest.mark.parametrize("is_same", [True, False])
async def test_a_parked_result_hears_at_once_of_a_call_that_comes_with_its_result(
    is_same: bool,
) -> None:
    """It waited until it was overdue, and was refused although the log had it."""
    parked = result("1")
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        answers: list[object] = []

        async def append() -> None:
            try:
                answers.append(await chat.append(parked, park=True))
            except AdmissionRefused as refused:
                answers.append(refused.violation.name)

        async with anyio.create_task_group() as group:
            group.start_soon(append)
            await until_parked(conversations, 1)
            await chat.append_all([call("1"), parked if is_same else result("1")])

        assert answers == [Duplicate(3) if is_same else "duplicate_tool_result"]
        assert await log_of(chat) == ["u:go", "call", "result"]


async def test_a_parked_result_whose_id_another_event_takes_is_refused_at_once() -> None:
    """When its call came, memory had forgotten the id, and the journal refused the owner."""
    parked = result("1")
    few = Limits(recent_events_max=2)
    async with verified(HeldAgent(), journal=MemoryJournal(), limits=few) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))

        async def append() -> None:
            with pytest.raises(EventIdConflict):
                await chat.append(parked, park=True)

        async with anyio.create_task_group() as group:
            group.start_soon(append)
            await until_parked(conversations, 1)
            await chat.append(UserMessageEvent(id=parked.id, content="other"))
            await chat.append(UserMessageEvent(content="more"))
            await chat.append(UserMessageEvent(content="and more"))
            await chat.append(call("1"))

        assert await log_of(chat) == ["u:go", "u:other", "u:more", "u:and more", "call"]


async def test_one_sender_too_many_of_a_parked_result_is_told_that_it_may_yet_land() -> None:
    """It was told that the result is refused, and the result got into the log for the others."""
    again = result("1")
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        async with anyio.create_task_group() as group:
            for _ in range(SENDERS_MAX):
                group.start_soon(append_event_parked, chat, again)
            await until_parked(conversations, SENDERS_MAX)
            for append in (
                partial(chat.append, again, park=True),
                partial(chat.append, again),
                partial(chat.append_all, [again]),
            ):
                with pytest.raises(OutcomeUnknown, match="append it again, or read back"):
                    await append()
            await chat.append(call("1"))

        assert await log_of(chat) == ["u:go", "call", "result"]
        assert not await chat.rejections()
        assert await chat.append(again) == Duplicate(3)


async def test_a_parked_result_whose_call_does_not_come_is_refused_and_recorded() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal(), park_s=0.0) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))

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
            await park_both(group, conversations, chat)
            await chat.append(call("1"))
            group.start_soon(append_parked, chat, "9")
            with anyio.fail_after(60):
                while await log_of(chat) != ["u:go", "call", "result"]:
                    await anyio.lowlevel.checkpoint()

            await chat.append(UserMessageEvent(content="more"))

            assert await log_of(chat) == ["u:go", "call", "result", "u:more"]
            group.cancel_scope.cancel()
