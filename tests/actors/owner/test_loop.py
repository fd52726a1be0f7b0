"""The five moves: one commit for a batch, and no reader sees anything before it has returned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import is_

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, WatchedJournal, brief, log_of, verified
from turnkeeper.actors import (
    Conversation,
    Conversations,
    Duplicate,
    MemoryJournal,
    TurnContext,
    agent,
)
from turnkeeper.actors.agents.watcher import NoWatcher
from turnkeeper.actors.core.admission import AdmissionRefused
from turnkeeper.actors.core.commands import Append as AppendCommand
from turnkeeper.actors.core.commands import AppendAll
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import EventIdConflict, NotAppendable
from turnkeeper.actors.events import (
    ActionEvent,
    LoggedEvent,
    ObservationEvent,
    TurnStartedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.journal import Claim, Record
from turnkeeper.runtime import (
    ActorFailed,
    Failure,
    InvariantViolation,
    OwnershipLost,
    Runtime,
    Unavailable,
)

pytestmark = pytest.mark.anyio


class GatedJournal(WatchedJournal):
    """Holds appends at a gate, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = anyio.Event()
        self.gate.set()
        self.waiting = anyio.Event()
        self.sizes: list[int] = []

    def close(self) -> None:
        self.gate = anyio.Event()
        self.waiting = anyio.Event()

    async def before_append(self, records: Sequence[Record]) -> None:
        self.sizes.append(len(records))
        self.waiting.set()
        await self.gate.wait()


class RecordingJournal(WatchedJournal):
    """Keeps the payloads that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.payloads: list[bytes] = []

    async def before_append(self, records: Sequence[Record]) -> None:
        self.payloads += (record.payload for record in records)


async def settle() -> None:
    """Let every task go as far as it can without the gate."""
    for _ in range(50):
        await anyio.lowlevel.checkpoint()


async def test_nothing_is_seen_before_the_commit_has_returned() -> None:
    journal, held = GatedJournal(), HeldAgent()
    held.hold("A")
    async with verified(held, journal=journal) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        seen: list[int] = []
        replies: dict[str, str] = {}

        async def follow() -> None:
            async for seq, _ in chat.events():
                seen.append(seq)

        async def send() -> None:
            replies["first"] = (await chat.send("B", message_id="b")).turn_id

        async def send_again() -> None:
            replies["again"] = (await chat.send("B", message_id="b")).turn_id

        async def read() -> None:
            replies["view"] = str(len(await chat.view()))

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await settle()
            journal.close()
            group.start_soon(send)
            await journal.waiting.wait()
            group.start_soon(send_again)
            group.start_soon(read)
            await settle()

            assert (seen, replies) == ([1, 2], {})

            journal.gate.set()
            await settle()
            assert seen == [1, 2, 3]
            assert len(replies) == 3
            assert replies["first"] == replies["again"]
            group.cancel_scope.cancel()


async def test_an_agent_sees_the_committed_view_while_a_commit_waits() -> None:
    """It asks for the first time when the working state is ahead of the log already."""
    journal, may_look, has_looked = GatedJournal(), anyio.Event(), anyio.Event()
    seen: list[int] = []

    @agent
    async def looks(turn: TurnContext) -> None:
        await may_look.wait()
        seen.append(len(turn.view))
        has_looked.set()
        await journal.gate.wait()
        await settle()
        seen.append(len(turn.view))

    # `verify` would ask for each view at its commit.
    async with Conversations(looks, journal=journal, verify="off") as conversations:
        chat = conversations["c"]
        turn = await chat.send("look")
        await settle()
        journal.close()
        async with anyio.create_task_group() as group:
            group.start_soon(chat.append, UserMessageEvent(content="by hand"))
            await journal.waiting.wait()
            may_look.set()
            await has_looked.wait()
            journal.gate.set()
        await turn.end()

    assert seen == [1, 2]


async def test_an_agent_whose_turn_its_own_batch_has_ended_never_runs() -> None:
    journal, held = GatedJournal(), HeldAgent()
    runtime = Runtime()
    async with runtime, verified(held, journal=journal, runtime=runtime) as conversations:
        failures = runtime.events.subscribe(Failure)
        chat = conversations["c"]
        await (await chat.send("0")).end()
        journal.close()
        async with anyio.create_task_group() as group:
            group.start_soon(chat.append, UserMessageEvent(content="by hand"))
            await journal.waiting.wait()
            group.start_soon(partial(chat.send, "A"))
            await settle()
            group.start_soon(partial(chat.send, "B", on_overlap="interrupt"))
            await settle()
            journal.gate.set()
        await (await chat.send("C")).end()

        assert 5 in journal.sizes, "A begins, ends and is followed by B in one commit"
        assert held.turns == ["0", "B", "C"]
        assert (await log_of(chat))[-5:] == ["u:A", "u:B", "a:a(B)", "u:C", "a:a(C)"]
        failures.close()
        assert [failure async for failure in failures] == []


async def test_what_waits_together_is_committed_together_and_each_subscriber_hears_each() -> None:
    journal, held = GatedJournal(), HeldAgent()
    held.hold("0")
    async with verified(held, journal=journal) as conversations:
        chat = conversations["c"]
        await chat.send("0")
        await held.reached["0"].wait()
        seen: list[int] = []

        async def follow() -> None:
            async for seq, _ in chat.events(after=2):
                seen.append(seq)

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            journal.close()
            group.start_soon(chat.send, "1")
            await journal.waiting.wait()
            journal.sizes.clear()
            for n in range(2, 12):
                group.start_soon(chat.send, str(n))
            await settle()
            journal.gate.set()
            await settle()

            assert journal.sizes == [10]
            assert seen == list(range(3, 14))
            group.cancel_scope.cancel()


async def test_the_calls_of_one_response_are_durable_together_before_any_of_them_starts() -> None:
    journal, held = GatedJournal(), HeldAgent()
    held.hold("two tools")
    async with verified(held, journal=journal) as conversations:
        journal.close()
        async with anyio.create_task_group() as group:
            group.start_soon(conversations["c"].send, "two tools")
            await journal.waiting.wait()
            journal.waiting = anyio.Event()
            journal.gate.set()
            journal.gate = anyio.Event()
            await journal.waiting.wait()
            await settle()

            assert journal.sizes == [2, 2]
            assert not held.reached["two tools"].is_set()

            journal.gate.set()
            await held.reached["two tools"].wait()


async def test_a_refused_command_is_answered_alone_and_its_batch_goes_on() -> None:
    journal, held = GatedJournal(), HeldAgent()
    held.hold("0")
    async with verified(held, journal=journal) as conversations:
        chat = conversations["c"]
        await chat.send("0")
        await held.reached["0"].wait()
        outcomes: dict[str, str] = {}

        async def send(text: str, message_id: str) -> None:
            try:
                await chat.send(text, message_id=message_id)
            except Exception as error:  # noqa: BLE001 - the test looks at its type
                outcomes[text] = type(error).__name__
            else:
                outcomes[text] = "sent"

        async with anyio.create_task_group() as group:
            journal.close()
            group.start_soon(send, "1", "1")
            await journal.waiting.wait()
            for text, message_id in (("2", "2"), ("other", "2"), ("3", "3")):
                group.start_soon(send, text, message_id)
                await settle()
            journal.gate.set()

        assert outcomes == {"1": "sent", "2": "sent", "other": "MessageIdConflict", "3": "sent"}


class BrokenJournal(WatchedJournal):
    """Fails every append with the error it is given."""

    error: Exception | None = None
    claims = 0

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        self.claims += 1
        return await super().claim(conversation_id, takeover=takeover, any_name=any_name)

    async def before_append(self, records: Sequence[Record]) -> None:
        if self.error is not None:
            raise self.error


async def test_the_caller_gets_the_journals_own_error_and_may_send_again() -> None:
    journal = BrokenJournal()
    async with verified(HeldAgent(), journal=journal) as conversations:
        journal.error = Unavailable("no")

        with pytest.raises(Unavailable, match=r"^no$"):
            await conversations["c"].send("A", message_id="a")

        journal.error = None
        assert await (await conversations["c"].send("A", message_id="a")).reply() == "a(A)"


async def test_an_owner_that_lost_its_epoch_stops_and_the_next_message_claims_anew() -> None:
    journal, held = BrokenJournal(), HeldAgent()
    async with verified(held, journal=journal) as conversations:
        await (await conversations["c"].send("A")).reply()
        journal.error = OwnershipLost("fenced")

        with pytest.raises(OwnershipLost):
            await conversations["c"].send("B")
        claims = journal.claims
        journal.error = None
        await settle()

        assert journal.claims == claims
        assert await (await conversations["c"].send("C")).reply() == "a(C)"
        assert journal.claims == claims + 1


async def test_whoever_waits_for_a_turn_hears_that_its_owner_cannot_be_started_again() -> None:
    journal, held = BrokenJournal(), HeldAgent()
    held.hold("A")
    async with verified(held, journal=journal) as conversations:
        turn = await conversations["c"].send("A")
        await held.reached["A"].wait()

        journal.error = Unavailable("the disk is gone")
        held.release("A")

        with pytest.raises(Unavailable):
            await turn.reply()


async def call(chat: Conversation, call_id: str, response: str = "r") -> None:
    await chat.append(ActionEvent(tool_call_id=call_id, tool_name="look", llm_response_id=response))


async def test_a_refused_event_is_seen_by_nobody_and_kept_among_the_rejections() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        await call(chat, "1")

        with pytest.raises(AdmissionRefused) as refused:
            await chat.append(UserMessageEvent(content="too early"))

        assert refused.value.violation.name == "interleaved_message"
        assert await log_of(chat) == ["u:go", "call"]
        (kept,) = await chat.rejections()
        assert kept.violation == "interleaved_message"
        assert b"too early" in kept.payload
        await chat.append(ObservationEvent(tool_call_id="1", content="seen"))
        assert await log_of(chat) == ["u:go", "call", "result"]


async def test_the_same_event_twice_is_one_event_also_when_it_is_older_than_memory() -> None:
    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        event = UserMessageEvent(content="go")
        first = await chat.append(event)
        for n in range(300):
            await chat.append(UserMessageEvent(content=str(n)))

        assert await chat.append(event) == Duplicate(first.seq)
        with pytest.raises(EventIdConflict):
            await chat.append(event.model_copy(update={"content": "other"}))
        assert len(await log_of(chat)) == 301


async def test_an_event_older_than_memory_is_known_though_one_with_a_smaller_id_came_after_it() -> (
    None
):
    """An application chooses the ids of what it appends, and they need not ascend."""
    limits = Limits(recent_events_max=2)
    async with Conversations(HeldAgent(), journal=MemoryJournal(), limits=limits) as conversations:
        chat = conversations["c"]
        event = UserMessageEvent(id="z", content="go")
        first = await chat.append(event)
        for n in range(3):
            await chat.append(UserMessageEvent(id=f"a{n}", content=str(n)))

        assert await chat.append(event) == Duplicate(first.seq)
        assert len(await log_of(chat)) == 4


async def test_a_view_that_is_not_the_fold_of_its_log_fails_the_owner_and_is_made_anew() -> None:
    """An application reaches around the owner and changes what it holds."""
    async with (
        Runtime() as runtime,
        verified(HeldAgent(), journal=MemoryJournal(), runtime=runtime) as conversations,
    ):
        chat = conversations["c"]
        await (await chat.send("A")).end()
        with runtime.events.subscribe(Failure) as failures:
            (await chat.view())._shared.append(UserMessageEvent(content="slipped in"))

            await (await chat.send("B")).end()

            assert isinstance((await anext(failures)).error, InvariantViolation)
        view = await chat.view()
        assert view == (await chat.at()).view
        assert "u:slipped in" not in [brief(event) for event in view]


async def test_a_conversation_can_be_looked_at_as_it_was() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        for text in ("A", "B"):
            await (await chat.send(text)).end()

        states = [await chat.at(seq) for seq in range(9)]

        assert [len(state.view) for state in states] == [0, 0, 1, 2, 2, 2, 3, 4, 4]
        assert (await chat.at()).view == await chat.view()
        with pytest.raises(ValueError, match="seq 9"):
            await chat.at(9)


async def test_turns_are_the_owners_to_write() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        with pytest.raises(NotAppendable):
            await conversations["c"].append(TurnStartedEvent(turn_id="mine"))


async def test_an_event_goes_into_the_log_as_it_was_written_when_it_was_checked() -> None:
    """It is encoded once: what was checked and what is in the log are the same bytes."""
    journal = RecordingJournal()
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        one, *others = (AppendCommand(UserMessageEvent(content=f"A{n}")) for n in range(3))

        await chat._ask(one)
        await chat.append_all([other.event for other in others])
        together = AppendAll(tuple(UserMessageEvent(content=f"B{n}") for n in range(2)))
        await chat._ask(together)

    assert one.written is journal.payloads[0]
    assert [other.written for other in others] == journal.payloads[1:3]
    assert all(map(is_, together.written, journal.payloads[3:]))


class Raising(NoWatcher):
    def committed(self, conversation_id: str, events: Sequence[LoggedEvent]) -> None:
        raise ValueError(conversation_id)


async def test_an_error_of_a_watcher_after_a_commit_is_an_unknown_outcome_for_all_callers() -> None:
    call = ActionEvent(tool_call_id="1", tool_name="look", llm_response_id="r")
    result = ObservationEvent(tool_call_id="1", content="seen")
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="?"))

        async def park() -> None:
            with pytest.raises(ActorFailed):
                await chat.append(result, park=True)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(park)
            await settle()
            conversations.watch(Raising())
            with pytest.raises(ActorFailed) as caught:
                await chat.append(call)
        assert isinstance(caught.value.__cause__, ValueError)

        conversations.watch(NoWatcher())
        assert await chat.append(call) == Duplicate(2)
        assert await chat.append(result) == Duplicate(3)
