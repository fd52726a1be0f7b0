"""Overlapping turns, idempotent sending, failures: what a user of `Conversations` can count on."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, WatchedJournal, brief, log_of, verified
from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    ToolCall,
    Turn,
    TurnContext,
    agent,
)
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import (
    ConversationNotFound,
    MessageIdConflict,
    QueueFull,
    StaleTurn,
    TurnInProgress,
    TurnNotCompleted,
)
from turnkeeper.actors.events import ActionEvent, AgentMessageEvent, UserMessageEvent
from turnkeeper.actors.journal import READ_BYTES, Record, StoredRecord
from turnkeeper.runtime import AskCycle, Unavailable
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


async def test_a_chat_message_is_answered_and_both_are_in_the_log() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("hello")

        assert await turn.reply() == "a(hello)"
        assert await log_of(conversations["c"], all_kinds=True) == [
            "started",
            "u:hello",
            "a:a(hello)",
            "completed",
        ]


async def test_queue_answers_one_after_the_other_and_the_second_sees_the_first_answer() -> None:
    held = HeldAgent()
    held.hold("A")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first = await chat.send("A")
        await held.reached["A"].wait()

        second = await chat.send("tool B")
        held.release("A")

        assert await first.reply() == "a(A)"
        assert await second.reply() == "a(tool B)"
        assert await log_of(chat) == ["u:A", "a:a(A)", "u:tool B", "call", "result", "a:a(tool B)"]
        assert held.views["tool B"] == ["u:A", "a:a(A)", "u:tool B"]


async def test_a_queued_message_is_durable_at_once_and_not_in_the_view() -> None:
    held = HeldAgent()
    held.hold("A")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await chat.send("B")

        assert await log_of(chat, all_kinds=True) == ["started", "u:A", "queued:B"]
        assert [brief(event) for event in await chat.view()] == ["u:A"]


async def test_queued_messages_keep_their_order() -> None:
    held = HeldAgent()
    held.hold("0")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turns = [await chat.send(str(n)) for n in range(50)]

        held.release("0")

        assert [await turn.reply() for turn in turns] == [f"a({n})" for n in range(50)]
        assert held.turns == [str(n) for n in range(50)]


async def test_interrupt_ends_the_running_turn_and_goes_ahead_of_what_is_queued() -> None:
    held = HeldAgent()
    held.hold("A")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first = await chat.send("A")
        await held.reached["A"].wait()
        waiting = await chat.send("later")

        second = await chat.send("B", on_overlap="interrupt")

        assert await second.reply() == "a(B)"
        assert (await first.end()).outcome == "interrupted"
        with pytest.raises(TurnNotCompleted, match="interrupted by chat message"):
            await first.reply()
        assert await waiting.reply() == "a(later)"
        assert await log_of(chat) == ["u:A", "u:B", "a:a(B)", "u:later", "a:a(later)"]


async def test_an_interrupted_answer_keeps_what_was_said_and_is_marked() -> None:
    held = HeldAgent()
    held.hold("stream A")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first = await chat.send("stream A")
        await held.reached["stream A"].wait()

        second = await chat.send("B", on_overlap="interrupt")
        await second.reply()

        assert (await first.end()).reply == "a("
        assert await log_of(chat) == ["u:stream A", "cut:a(", "u:B", "a:a(B)"]


async def test_a_streamed_answer_is_one_chat_message() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("stream A")

        assert await turn.reply() == "a(stream A)"
        assert await log_of(conversations["c"]) == ["u:stream A", "a:a(stream A)"]


async def test_interrupting_two_tools_answers_both_calls_at_once() -> None:
    held = HeldAgent()
    held.hold("two tools A")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("two tools A")
        await held.reached["two tools A"].wait()

        second = await chat.send("B", on_overlap="interrupt")
        await second.reply()

        assert await log_of(chat) == [
            "u:two tools A",
            "call",
            "call",
            "no result",
            "no result",
            "u:B",
            "a:a(B)",
        ]


async def test_what_an_interrupted_turn_still_sends_is_refused_as_stale() -> None:
    """The agent ignores its cancellation, as real libraries do, and answers late."""
    refused = anyio.Event()
    begun = anyio.Event()
    b_runs = anyio.Event()

    @agent
    async def stubborn(turn: TurnContext) -> None:
        if turn.message.content == "B":
            b_runs.set()
            await refused.wait()
            await turn.say("a(B)")
            return
        begun.set()
        with anyio.CancelScope(shield=True):
            await b_runs.wait()
            with pytest.raises(StaleTurn):
                await turn.say("late")
            refused.set()

    async with verified(stubborn, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await begun.wait()
        second = await chat.send("B", on_overlap="interrupt")

        assert await second.reply() == "a(B)"
        assert await log_of(chat) == ["u:A", "u:B", "a:a(B)"]


async def test_the_agent_of_an_interrupted_turn_is_cancelled() -> None:
    begun, cancelled = anyio.Event(), anyio.Event()

    @agent
    async def patient(turn: TurnContext) -> None:
        if turn.message.content == "A":
            begun.set()
            try:
                await anyio.sleep_forever()
            finally:
                cancelled.set()

    async with verified(patient, journal=MemoryJournal()) as conversations:
        await conversations["c"].send("A")
        await begun.wait()

        await (await conversations["c"].send("B", on_overlap="interrupt")).end()

        await cancelled.wait()


async def test_reject_writes_nothing_and_names_the_running_turn() -> None:
    held = HeldAgent()
    held.hold("A")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first = await chat.send("A")
        await held.reached["A"].wait()

        with pytest.raises(TurnInProgress) as refused:
            await chat.send("B", message_id="b", on_overlap="reject")

        assert refused.value.turn_id == first.turn_id
        held.release("A")
        await first.reply()
        assert await log_of(chat) == ["u:A", "a:a(A)"]
        # A refused message's id is not known: it can be sent with other content.
        assert await (await chat.send("C", message_id="b")).reply() == "a(C)"


async def test_the_same_message_id_gives_the_same_turn_whatever_on_overlap_says() -> None:
    held = HeldAgent()
    held.hold("A")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first = await chat.send("A", message_id="a")
        queued = await chat.send("B", message_id="b")

        again = [
            await chat.send("A", message_id="a", on_overlap="interrupt"),
            await chat.send("A", message_id="a", on_overlap="reject"),
            await chat.send("B", message_id="b", on_overlap="interrupt"),
        ]

        assert [(turn.seq, turn.turn_id) for turn in again] == [
            (first.seq, first.turn_id),
            (first.seq, first.turn_id),
            (queued.seq, queued.turn_id),
        ]
        assert all(turn.is_duplicate for turn in again)
        held.release("A")
        assert await again[2].reply() == "a(B)"
        # Also once it has left the queue, and its chat message has an event of its own.
        assert (await chat.send("B", message_id="b")).seq == queued.seq
        assert await log_of(chat) == ["u:A", "a:a(A)", "u:B", "a:a(B)"]


async def test_a_message_that_was_appended_has_no_turn_to_wait_for() -> None:
    """Its sender would wait for a turn that never comes, also once memory has let the id go."""
    for known_max in (1024, 2):
        async with Conversations(
            HeldAgent(),
            journal=MemoryJournal(),
            limits=Limits(known_messages_max=known_max),
            queued_messages_max=1,
        ) as conversations:
            chat = conversations["c"]
            await chat.append(UserMessageEvent(content="A", message_id="a"))
            for text in ("B", "C", "D"):
                await (await chat.send(text)).reply()
            with pytest.raises(MessageIdConflict, match=r"seq 1 .* no turn"):
                await chat.send("A", message_id="a")


async def test_the_same_message_id_with_other_content_is_refused() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A", message_id="a")
        await turn.reply()

        with pytest.raises(MessageIdConflict) as refused:
            await chat.send("B", message_id="a")

        assert refused.value.seq == turn.seq


async def test_a_repeated_message_is_answered_from_a_few_records() -> None:
    class CountingJournal(MemoryJournal):
        records = 0

        async def read(
            self,
            conversation_id: str,
            *,
            after: int = 0,
            limit: int = 512,
            bytes_max: int = READ_BYTES,
        ) -> Sequence[StoredRecord]:
            records = await super().read(
                conversation_id, after=after, limit=limit, bytes_max=bytes_max
            )
            self.records += len(records)
            return records

    async with Conversations(HeldAgent(), journal=(journal := CountingJournal())) as conversations:
        chat = conversations["c"]
        for n in range(20):
            await (await chat.send(str(n), message_id=str(n))).reply()
        journal.records = 0

        assert (await chat.send("3", message_id="3")).is_duplicate

        assert 0 < journal.records <= 4


@pytest.mark.costly
async def test_a_message_id_older_than_memory_is_found_in_the_journal() -> None:
    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first = await chat.send("0", message_id="0")
        for n in range(1, 1100):
            await (await chat.send(str(n), message_id=str(n))).reply()

        again = await chat.send("0", message_id="0")

        assert again.is_duplicate
        assert (again.seq, again.turn_id) == (first.seq, first.turn_id)


async def test_the_queue_is_bounded() -> None:
    held = HeldAgent()
    held.hold("A")
    async with verified(held, journal=MemoryJournal(), queued_messages_max=2) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await chat.send("B")
        await chat.send("C")

        with pytest.raises(QueueFull):
            await chat.send("D")


async def test_cancelling_a_running_turn_keeps_what_was_said_and_starts_the_next() -> None:
    held = HeldAgent()
    held.hold("stream A")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first = await chat.send("stream A")
        second = await chat.send("B")
        await held.reached["stream A"].wait()

        assert await first.cancel()

        assert await second.reply() == "a(B)"
        assert await log_of(chat) == ["u:stream A", "cut:a(", "u:B", "a:a(B)"]
        assert not await first.cancel()


async def test_cancelling_a_queued_turn_withdraws_its_message() -> None:
    held = HeldAgent()
    held.hold("A")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first = await chat.send("A")
        second = await chat.send("B")

        assert await second.cancel()
        held.release("A")
        await first.reply()

        assert (await second.end()).outcome == "withdrawn"
        assert await log_of(chat) == ["u:A", "a:a(A)"]


async def test_an_agent_that_raises_fails_its_turn_and_the_next_one_runs() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        failed = await chat.send("fail")

        end = await failed.end()

        assert (end.outcome, end.detail) == ("failed", "RuntimeError: no answer to fail")
        assert await (await chat.send("B")).reply() == "a(B)"
        assert "conversation_error" in await log_of(chat, all_kinds=True)


async def test_calls_that_an_agent_leaves_open_are_answered_when_its_turn_ends() -> None:
    @agent
    async def careless(turn: TurnContext) -> None:
        async def fails(action: ActionEvent) -> str:
            raise ConnectionError(action.tool_name)

        results = await turn.call_tools([ToolCall("x")], fails)
        await turn.say(str(getattr(results[0].event, "content", "")))

    async with verified(careless, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("go")

        assert await turn.reply() == "ConnectionError: x"
        assert await log_of(conversations["c"]) == [
            "u:go",
            "call",
            "result",
            "a:ConnectionError: x",
        ]


async def test_reading_a_conversation_that_does_not_exist_raises_and_creates_nothing() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        with pytest.raises(ConversationNotFound):
            await conversations["nobody"].view()
        with pytest.raises(ConversationNotFound):
            await log_of(conversations["nobody"])

        assert (await conversations.list()).rows == []


async def test_subscribers_see_every_event_once_in_order_from_any_cursor() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        seen: dict[int, list[int]] = {}

        async def follow(after: int) -> None:
            seen[after] = []
            async for logged in chat.events(after=after):
                seen[after].append(logged.seq)
                if logged.seq == 40:
                    return

        async with anyio.create_task_group() as group:
            for after in (0, 3, 7, 20):
                group.start_soon(follow, after)
            for n in range(10):
                await (await chat.send(str(n))).reply()

        assert seen == {after: list(range(after + 1, 41)) for after in (0, 3, 7, 20)}


async def test_a_subscriber_that_stands_still_slows_nobody_and_misses_nothing() -> None:
    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("0")).reply()
        slow = chat.events()
        first = await anext(slow)

        for n in range(1, 300):
            await (await chat.send(str(n))).end()

        # It held no more than its bound, and nothing needs to happen for it to catch up.
        assert slow.buffered_count <= Limits().buffered_events_max
        rest = [await anext(slow) for _ in range(299 * 4 + 3)]
        assert [first.seq, *(logged.seq for logged in rest)] == list(range(1, 1201))


async def test_a_subscriber_whose_buffer_overflowed_catches_up_though_nothing_more_happens() -> (
    None
):
    held = HeldAgent()
    held.hold("last")
    async with Conversations(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("0")).end()
        await chat.view()  # by now all of it has been published
        slow = chat.events()
        seqs = [(await anext(slow)).seq]

        for n in range(Limits().buffered_events_max // 4):
            await (await chat.send(str(n))).end()
        await chat.send("last")  # its two events are the ones too many

        assert not slow.buffered_count
        seqs += [(await anext(slow)).seq for _ in range(Limits().buffered_events_max + 5)]
        assert seqs == list(range(1, Limits().buffered_events_max + 7))


async def test_a_subscriber_that_is_dropped_is_forgotten() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        reader = chat.events()
        await (await chat.send("0")).reply()
        assert conversations._setup.subscriptions._readers

        del reader
        gc.collect()
        await (await chat.send("1")).end()

        # Dropped ones go as the next reader comes.
        left = conversations["other"].events()
        assert list(conversations._setup.subscriptions._readers) == ["other"]
        del left


async def test_a_turn_that_awaits_a_later_one_of_its_own_conversation_is_refused() -> None:
    async with verified(Delegating({"A": ("c", "B")}), journal=MemoryJournal()) as conversations:
        Delegating.conversations = conversations
        end = await (await conversations["c"].send("A")).end()

        assert end.reply == "AskCycle: c -> c"
        # What it sent has its turn all the same.
        assert await (await conversations["c"].send("B", message_id="B")).reply() == "a(B)"


async def test_turns_that_await_each_other_are_refused_and_not_waited_in() -> None:
    agents = Delegating({"A": ("d", "B"), "B": ("c", "C")})
    async with verified(agents, journal=MemoryJournal()) as conversations:
        Delegating.conversations = conversations

        reply = await (await conversations["c"].send("A")).reply()

        assert reply == "AskCycle: d -> c -> d"


async def test_a_turn_may_await_another_conversations_turn_and_one_that_has_ended() -> None:
    agents = Delegating({"A": ("d", "B"), "again": ("c", "A")})
    async with verified(agents, journal=MemoryJournal()) as conversations:
        Delegating.conversations = conversations

        assert await (await conversations["c"].send("A", message_id="A")).reply() == "a(B)"
        assert await (await conversations["c"].send("again")).reply() == "a(B)"


async def test_a_turn_may_await_one_whose_conversation_it_left_a_task_waiting_for() -> None:
    """The wait of that task, begun inside its turn, was taken for one of the whole conversation."""
    watched: list[str] = []
    asks = anyio.Event()
    async with anyio.create_task_group() as background:

        @agent
        async def asking_back(turn: TurnContext) -> str:
            if turn.conversation_id == "child":
                await asks.wait()
                return await (await conversations["parent"].send("what next?")).reply()
            if turn.message.content != "go":
                return "go on"
            child = await conversations["child"].send("work")

            async def watch() -> None:
                watched.append(await child.reply())

            background.start_soon(watch)
            await settle()
            return "begun"

        async with verified(asking_back, journal=MemoryJournal()) as conversations:
            assert await (await conversations["parent"].send("go")).reply() == "begun"
            await settle()
            asks.set()
            with anyio.fail_after(60):
                while not watched:
                    await settle()

    assert watched == ["go on"]


class Delegating:
    """Passes some messages on to another conversation, and says what that replied."""

    conversations: Conversations

    def __init__(self, passed_on: dict[str, tuple[str, str]]) -> None:
        self._passed_on = passed_on

    async def run(self, turn: TurnContext) -> None:
        text = turn.message.content
        if text not in self._passed_on:
            await turn.say(f"a({text})")
            return
        name, passed = self._passed_on[text]
        sent = await self.conversations[name].send(passed, message_id=passed)
        try:
            await turn.say(await sent.reply())
        except AskCycle as refused:
            await turn.say(f"AskCycle: {' -> '.join(refused.cycle)}")


class FailsOnce(WatchedJournal):
    """Refuses one append, as a journal does that cannot be reached for a moment."""

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self.fail_at = fail_at
        self.appends = 0

    async def before_append(self, records: Sequence[Record]) -> None:
        self.appends += 1
        if self.appends == self.fail_at:
            raise Unavailable("the journal cannot be reached; nothing was written")


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
async def test_a_failed_append_fails_loudly_and_nothing_after_it_is_committed_before_it(
    fail_at: int,
) -> None:
    async with verified(HeldAgent(), journal=FailsOnce(fail_at)) as conversations:
        chat = conversations["c"]

        async def send(text: str, message_id: str) -> Turn:
            try:
                return await chat.send(text, message_id=message_id)
            except Unavailable:
                return await chat.send(text, message_id=message_id)

        await (await send("A", "a")).end()

        assert await (await send("B", "b")).reply() == "a(B)"
        log = await log_of(chat)
        assert log.count("u:A") == 1
        assert log.count("u:B") == 1
        assert log[-2:] == ["u:B", "a:a(B)"]
        assert isinstance((await chat.view())[-1], AgentMessageEvent)
