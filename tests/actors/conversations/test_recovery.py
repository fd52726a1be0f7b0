"""What a crash leaves, and what entering again makes of it.

The crash here is the cancellation of everything that one `Conversations` runs, which writes no
more than a killed process does; `tests/process` kills real ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, log_of, verified
from turnkeeper.actors import Conversations, MemoryJournal
from turnkeeper.actors.events import AgentErrorEvent

pytestmark = pytest.mark.anyio


async def crash_when(
    journal: MemoryJournal, agent: HeldAgent, do: Callable[[Conversations], Awaitable[None]]
) -> None:
    """Run `do`, then stop everything at once."""
    with anyio.CancelScope() as process:
        async with verified(agent, journal=journal) as conversations:
            await do(conversations)
            process.cancel()


async def test_an_unfinished_turn_is_ended_on_entering_and_the_next_message_goes_on() -> None:
    journal, held = MemoryJournal(), HeldAgent()
    held.hold("A")

    async def until_it_runs(conversations: Conversations) -> None:
        await conversations["c"].send("A")
        await held.reached["A"].wait()

    await crash_when(journal, held, until_it_runs)

    async with verified(HeldAgent(), journal=journal) as conversations:
        assert await log_of(conversations["c"], all_kinds=True) == ["started", "u:A", "interrupted"]
        assert await (await conversations["c"].send("B")).reply() == "a(B)"


async def test_open_calls_get_their_one_observation_which_says_that_they_may_have_happened() -> (
    None
):
    journal, held = MemoryJournal(), HeldAgent()
    held.hold("two tools A")

    async def until_tools_run(conversations: Conversations) -> None:
        await conversations["c"].send("two tools A")
        await held.reached["two tools A"].wait()

    await crash_when(journal, held, until_tools_run)

    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        answers = [
            logged.event
            async for logged in chat.events(live=False)
            if isinstance(logged.event, AgentErrorEvent)
        ]
        assert [answer.may_have_happened for answer in answers] == [True, True]
        assert len({answer.tool_call_id for answer in answers}) == 2
        assert await log_of(chat) == ["u:two tools A", "call", "call", "no result", "no result"]


async def test_queued_messages_get_their_turns_though_nobody_sends() -> None:
    journal, held = MemoryJournal(), HeldAgent()
    held.hold("A")

    async def until_two_wait(conversations: Conversations) -> None:
        await conversations["c"].send("A")
        await held.reached["A"].wait()
        await conversations["c"].send("B", message_id="b")
        await conversations["c"].send("C")

    await crash_when(journal, held, until_two_wait)

    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        assert await (await chat.send("B", message_id="b")).reply() == "a(B)"
        assert await (await chat.send("D")).reply() == "a(D)"
        assert await log_of(chat) == ["u:A", "u:B", "a:a(B)", "u:C", "a:a(C)", "u:D", "a:a(D)"]


async def test_a_message_sent_again_after_the_crash_is_known() -> None:
    journal, held = MemoryJournal(), HeldAgent()

    async def until_answered(conversations: Conversations) -> None:
        await (await conversations["c"].send("A", message_id="a")).reply()

    await crash_when(journal, held, until_answered)

    async with verified(HeldAgent(), journal=journal) as conversations:
        again = await conversations["c"].send("A", message_id="a")
        assert again.is_duplicate
        assert await again.reply() == "a(A)"


async def test_recovering_twice_changes_nothing() -> None:
    journal, held = MemoryJournal(), HeldAgent()
    held.hold("tool A")

    async def until_tool_runs(conversations: Conversations) -> None:
        await conversations["c"].send("tool A")
        await held.reached["tool A"].wait()

    await crash_when(journal, held, until_tool_runs)
    logs = []
    for _ in range(3):
        async with verified(HeldAgent(), journal=journal) as conversations:
            logs.append(await log_of(conversations["c"], all_kinds=True))

    assert logs[0] == logs[1] == logs[2]
    assert logs[0] == ["started", "u:tool A", "call", "no result", "interrupted"]


async def test_with_recover_on_message_nothing_happens_until_somebody_sends() -> None:
    journal, held = MemoryJournal(), HeldAgent()
    held.hold("A")

    async def until_it_runs(conversations: Conversations) -> None:
        await conversations["c"].send("A")
        await held.reached["A"].wait()

    await crash_when(journal, held, until_it_runs)

    async with verified(HeldAgent(), journal=journal, recover="on_message") as conversations:
        chat = conversations["c"]
        assert await log_of(chat, all_kinds=True) == ["started", "u:A"]
        await (await chat.send("B")).reply()
        assert (await log_of(chat, all_kinds=True))[:3] == ["started", "u:A", "interrupted"]


async def test_the_system_prompt_comes_first_and_once() -> None:
    journal = MemoryJournal()
    for text in ("A", "B"):
        async with verified(
            HeldAgent(), journal=journal, system_prompt="Be kind."
        ) as conversations:
            await (await conversations["c"].send(text)).reply()

    async with verified(HeldAgent(), journal=journal) as conversations:
        log = await log_of(conversations["c"])
    assert log == ["system_prompt", "u:A", "a:a(A)", "u:B", "a:a(B)"]


async def test_a_conversation_that_was_idle_is_passivated_and_comes_back_as_it_was() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal(), active_max=1) as conversations:
        for n in range(3):
            for name in ("c", "d"):
                await (await conversations[name].send(str(n))).reply()

        expected = ["u:0", "a:a(0)", "u:1", "a:a(1)", "u:2", "a:a(2)"]
        assert await log_of(conversations["c"]) == expected
        assert await log_of(conversations["d"]) == expected
