"""A process that has lost its lease shows and does nothing more from what it remembers.

The lease is lost in two ways here: told, as the journal tells when it has noticed; and untold, in
the moment before that, when only a look at the lease can find out.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

import anyio
import pytest

from turnkeeper.actors import Agent, ModelResponse, ScriptedModel, ToolAgent, ToolCall, tool
from turnkeeper.actors.conversations.conversation import Conversation
from turnkeeper.actors.conversations.conversations import Conversations
from turnkeeper.actors.core.condensation import Need, Proposal
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.view import View
from turnkeeper.actors.errors import (
    EventIdConflict,
    Fenced,
    LeaseExpired,
    OwnedElsewhere,
)
from turnkeeper.actors.events import (
    ActionEvent,
    LoggedEvent,
    ObservationEvent,
    TextDelta,
    UserMessageEvent,
)
from turnkeeper.actors.journal import READ_BYTES, Claim, Listing, Record, Snapshot, StoredRecord
from turnkeeper.actors.journals.memory import MemoryJournal, MemoryStore
from turnkeeper.runtime import Ports
from turnkeeper.runtime.testing import VirtualClock, settle

from ..conversations.worlds import HeldAgent, brief

pytestmark = pytest.mark.anyio

Item: TypeAlias = LoggedEvent | TextDelta

EVENT = UserMessageEvent(content="E")


class LeasedJournal(MemoryJournal):
    """Its lease can be lost; it is renewed at once, as after a process stood still."""

    def __init__(self, store: MemoryStore, clock: VirtualClock) -> None:
        super().__init__(store, address="the first")
        self._clock = clock
        self._lost_at = -1.0
        self._on_loss: Callable[[], None] = lambda: None
        self.claims = 0
        self.snapshots: list[Snapshot] = []
        self.loses_in_append = False
        self.replaced_by: MemoryJournal | None = None
        self.gate: anyio.Event | None = None

    def is_lease_valid(self, *, since: float | None = None) -> bool:
        return super().is_lease_valid() and (since is None or self._lost_at < since)

    def watch_lease(self, on_loss: Callable[[], None]) -> None:
        self._on_loss = on_loss

    def lose(self) -> None:
        self._clock.jump(1.0)
        self._lost_at = self._clock.monotonic()
        self._clock.jump(1.0)

    def tell(self) -> None:
        self._on_loss()

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        self.claims += 1
        return await super().claim(conversation_id, takeover=takeover, any_name=any_name)

    async def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
        listing: Listing | None = None,
    ) -> Sequence[int]:
        if self.gate is not None:
            await self.gate.wait()
        seqs = await super().append(
            conversation_id,
            records,
            epoch=epoch,
            expected_seq=expected_seq,
            is_unfinished=is_unfinished,
            listing=listing,
        )
        if self.loses_in_append:
            self.lose()
        return seqs

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512, bytes_max: int = READ_BYTES
    ) -> Sequence[StoredRecord]:
        if self.replaced_by is not None:
            return await self.replaced_by.read(
                conversation_id, after=after, limit=limit, bytes_max=bytes_max
            )
        return await super().read(conversation_id, after=after, limit=limit, bytes_max=bytes_max)

    async def write_snapshot(self, conversation_id: str, snapshot: Snapshot, *, epoch: int) -> None:
        self.snapshots.append(snapshot)
        await super().write_snapshot(conversation_id, snapshot, epoch=epoch)


class RivalJournal(MemoryJournal):
    """Takes over what the other one has lost."""

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        return await super().claim(conversation_id, takeover=True, any_name=any_name)


class World:
    """Two processes over one store."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.clock = VirtualClock()
        self.journal = LeasedJournal(self.store, self.clock)
        self.agent = HeldAgent()

    def first(self, **options: object) -> Conversations:
        ports = Ports(monotonic=self.clock.monotonic, sleep=self.clock.sleep)
        return Conversations(
            self.agent,
            journal=self.journal,
            idle_s=None,
            ports=ports,
            **options,  # type: ignore[arg-type]  # passed on
        )

    def rival(self, agent: Agent | None = None, **options: object) -> Conversations:
        return Conversations(
            agent if agent is not None else HeldAgent(),
            journal=RivalJournal(self.store, address="the rival"),
            **options,  # type: ignore[arg-type]  # passed on
        )

    async def rival_says(self, text: str) -> None:
        async with self.rival(recover="on_message") as rival:
            await (await rival["c"].send(text)).end()


@pytest.fixture
def world() -> World:
    return World()


async def say(conversation: Conversation, text: str) -> None:
    """Have a message answered, and the owner at rest: the log has the turn's end before it does."""
    assert (await (await conversation.send(text, message_id=text)).end()).outcome == "completed"
    await settle()


async def test_readers_that_only_wait_hear_of_the_successor_once_the_lease_is_lost(
    world: World,
) -> None:
    seen: list[list[str]] = [[], []]
    async with world.first() as conversations:
        await say(conversations["c"], "A")

        async def read(
            heard: list[str], items: AsyncIterator[LoggedEvent] | AsyncIterator[Item]
        ) -> None:
            async for item in items:
                heard.extend([brief(item.event)] if isinstance(item, LoggedEvent) else [])

        async with anyio.create_task_group() as group:
            group.start_soon(read, seen[0], conversations["c"].events())
            group.start_soon(read, seen[1], conversations["c"].follow())
            await settle()
            world.journal.lose()
            await world.rival_says("B")
            await settle()
            assert [heard[-1] for heard in seen] == ["completed", "completed"]
            assert "u:B" not in seen[0] + seen[1]  # it trusted its owner, and was not told

            world.journal.tell()
            await settle()
            assert ["u:B" in heard for heard in seen] == [True, True]
            await world.rival_says("C")
            await settle()
            assert ["u:C" in heard for heard in seen] == [True, True]
            group.cancel_scope.cancel()


async def test_a_reader_does_not_wait_for_an_owner_that_lost_the_lease_in_its_first_commit(
    world: World,
) -> None:
    """The loss was told before readers were given the owner, so nothing would tell them again."""
    seen: list[str] = []
    async with world.first() as conversations:

        async def read() -> None:
            async for logged in conversations["c"].events():
                seen.append(brief(logged.event))  # noqa: PERF401 - looked at meanwhile

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await settle()
            world.journal.loses_in_append = True
            await conversations["c"].append(EVENT)
            world.journal.loses_in_append = False
            await settle()

            await world.rival_says("B")
            await settle()
            assert "u:B" in seen
            group.cancel_scope.cancel()


async def test_readers_do_not_wait_for_an_owner_that_waits_for_the_database(world: World) -> None:
    seen: list[str] = []
    async with world.first() as conversations:
        await say(conversations["c"], "A")

        async def read() -> None:
            async for logged in conversations["c"].events():
                seen.append(brief(logged.event))  # noqa: PERF401 - looked at meanwhile

        async def append() -> None:
            with pytest.raises(Fenced):
                await conversations["c"].append(EVENT)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            world.journal.gate = anyio.Event()
            async with anyio.create_task_group() as appending:
                appending.start_soon(append)
                await settle()
                world.journal.lose()
                world.journal.tell()
                await world.rival_says("B")
                await settle()
                assert seen[-1] == "completed"
                assert "u:B" in seen
                world.journal.gate.set()
            group.cancel_scope.cancel()


NO_WRITES: dict[str, Callable[[Conversation], Awaitable[object]]] = {
    "view": lambda chat: chat.view(),
    "a chat message that is known": lambda chat: chat.send("A", message_id="A"),
    "an event that is known": lambda chat: chat.append(EVENT),
    "no events": lambda chat: chat.append_all([]),
    "an interrupt of nothing": lambda chat: chat.interrupt(),
    "a resumption of nothing": lambda chat: chat.resume(),
}


async def test_a_refusal_is_not_given_by_an_owner_that_a_rival_has_taken_over_by_force(
    world: World,
) -> None:
    """Nothing tells it. The result was kept as rejected beside a log that has its call."""
    async with world.first() as conversations:
        chat = conversations["c"]
        await say(chat, "A")
        async with world.rival() as rival:
            call = ActionEvent(tool_call_id="1", tool_name="look", llm_response_id="r")
            await rival["c"].append(call)

            with pytest.raises(Fenced):
                await chat.append(ObservationEvent(tool_call_id="1", content="seen"))

            assert not await rival["c"].rejections()


@pytest.mark.parametrize("ask", NO_WRITES.values(), ids=NO_WRITES.keys())
@pytest.mark.parametrize("is_told", [True, False])
async def test_an_answer_without_a_write_is_not_given_by_an_owner_that_may_have_lost(
    world: World,
    ask: Callable[[Conversation], Awaitable[object]],
    *,
    is_told: bool,
) -> None:
    async with world.first() as conversations:
        chat = conversations["c"]
        await say(chat, "A")
        await chat.append(EVENT)
        await ask(chat)
        world.journal.lose()
        async with world.rival() as rival:
            await say(rival["c"], "B")
            if is_told:
                world.journal.tell()
                await settle()
            else:
                with pytest.raises(LeaseExpired, match="has run out"):
                    await ask(chat)
            with pytest.raises(OwnedElsewhere, match="the rival"):
                await ask(chat)
        await ask(chat)  # the rival has left


async def test_an_owner_that_claimed_after_the_loss_goes_on(world: World) -> None:
    async with world.first() as conversations:
        await say(conversations["c"], "A")
        world.journal.lose()
        world.journal.tell()
        await settle()
        await say(conversations["c"], "B")
        claims = world.journal.claims

        world.journal.tell()
        await settle()

        await say(conversations["c"], "C")
        assert world.journal.claims == claims


async def test_a_lease_that_is_lost_while_an_owner_starts_ends_it(world: World) -> None:
    class Losing(LeasedJournal):
        async def claim(
            self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
        ) -> Claim:
            claim = await super().claim(conversation_id, takeover=takeover, any_name=any_name)
            if self.claims == 1:
                self.lose()
                self.tell()
            return claim

    world.journal = Losing(world.store, world.clock)
    async with world.first() as conversations:
        with pytest.raises(LeaseExpired):
            await conversations["c"].send("A")
        await say(conversations["c"], "A")


async def test_an_owner_whose_log_a_rival_has_deleted_has_lost_it(world: World) -> None:
    """Found by the owner world: its caller was told that there is no such conversation."""
    async with world.first(limits=Limits(recent_events_max=2)) as conversations:
        chat = conversations["c"]
        await chat.append(EVENT)
        await say(chat, "A")
        world.journal.lose()
        async with world.rival() as rival:
            await say(rival["c"], "B")
            await rival.delete("c")

            with pytest.raises(LeaseExpired, match="has run out"):
                await chat.append(EVENT)


async def test_an_event_that_a_rival_has_written_too_is_no_violation(world: World) -> None:
    """Found by the owner world: a journal knows it, and answers with its seq in the newer log."""
    async with world.first() as conversations:
        chat = conversations["c"]
        await say(chat, "A")
        world.journal.lose()
        async with world.rival() as rival:
            await say(rival["c"], "B")
            event = UserMessageEvent(content="E")
            await rival["c"].append(event)

            with pytest.raises(LeaseExpired, match="has run out"):
                await chat.append(event)


APPENDS: dict[str, Callable[[Conversation, UserMessageEvent], Awaitable[object]]] = {
    "append": lambda chat, event: chat.append(event),
    "append_all": lambda chat, event: chat.append_all([event]),
}


@pytest.mark.parametrize("append", APPENDS.values(), ids=APPENDS.keys())
async def test_an_event_whose_id_a_rival_has_given_to_another_is_not_taken_for_written(
    world: World, append: Callable[[Conversation, UserMessageEvent], Awaitable[object]]
) -> None:
    """Its caller was told the seq of the rival's event, and the log has only that one."""
    async with world.first() as conversations:
        chat = conversations["c"]
        await say(chat, "A")
        world.journal.lose()
        async with world.rival() as rival:
            theirs = UserMessageEvent(id="e", content="theirs")  # above all ids in the log
            await rival["c"].append(theirs)

            with pytest.raises(Fenced):
                await append(chat, theirs.model_copy(update={"content": "ours"}))

            assert brief((await rival["c"].view())[-1]) == "u:theirs"


async def test_a_message_whose_event_id_a_rival_has_given_to_another_is_not_taken_for_written(
    world: World,
) -> None:
    """The rival's message has the same event id at the same seq, so the journal calls it known."""
    async with world.first() as conversations:
        chat = conversations["c"]
        await say(chat, "A")
        await chat.pause()
        world.journal.lose()
        async with world.rival() as rival:
            await rival["c"].send("B", message_id="m2", event_id="e")

            with pytest.raises(Fenced):
                await chat.send("C", message_id="m1", event_id="e")

            with pytest.raises(EventIdConflict):
                await rival["c"].send("C", message_id="m1", event_id="e")
            assert [message.message_id for message in await rival["c"].queued()] == ["m2"]


async def test_answers_whose_event_id_a_rival_has_given_to_a_message_are_not_taken_for_written(
    world: World,
) -> None:
    @tool
    def pay() -> str:
        """Pay."""
        return "paid"

    def asking() -> ToolAgent:
        model = ScriptedModel([ModelResponse("May I?", calls=[ToolCall("pay", {})])])
        return ToolAgent(model, [pay], confirm=["pay"])

    async with Conversations(asking(), journal=world.journal, idle_s=None) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await settle()
        (call,) = (await chat.at()).turns.awaiting
        world.journal.lose()
        async with world.rival(asking()) as rival:
            await rival["c"].send("B", message_id="m2", event_id="e")

            with pytest.raises(Fenced):
                await chat.answer({call: True}, event_id="e")

            with pytest.raises(EventIdConflict):
                await rival["c"].answer({call: True}, event_id="e")
            assert (await rival["c"].at()).turns.awaiting == (call,)


async def test_such_a_message_beside_an_append_that_both_have_is_not_taken_for_written(
    world: World,
) -> None:
    taken: list[object] = []
    refused: list[str] = []
    async with world.first() as conversations:
        chat = conversations["c"]
        await say(chat, "A")
        await chat.pause()
        event = UserMessageEvent(content="E")  # its id is above all in the log
        world.journal.lose()
        async with world.rival() as rival:
            await rival["c"].append(event)
            await rival["c"].send("B", message_id="m2", event_id="e")
            async with anyio.create_task_group() as both:

                async def append() -> None:
                    with suppress(Fenced):  # in the same batch, or in one before
                        await chat.append(event)

                async def send() -> None:
                    try:
                        taken.append(await chat.send("C", message_id="m1", event_id="e"))
                    except Fenced:
                        refused.append("m1")

                both.start_soon(append)
                both.start_soon(send)

            assert (taken, refused) == ([], ["m1"])
            assert [message.message_id for message in await rival["c"].queued()] == ["m2"]


async def test_a_change_whose_id_a_rival_has_given_to_another_is_not_taken_for_written(
    world: World,
) -> None:
    async with world.first() as conversations:
        chat = conversations["c"]
        await say(chat, "A")
        world.journal.lose()
        async with world.rival() as rival:
            await rival["c"].change(title="theirs", change_id="e")

            with pytest.raises(Fenced):
                await chat.change(title="ours", change_id="e")

            assert [row.title for row in (await rival.list()).rows] == ["theirs"]


@pytest.mark.parametrize("begins_anew", [True, False])
async def test_a_log_that_a_rival_deletes_while_it_is_loaded_is_neither_gone_nor_damaged(
    world: World, *, begins_anew: bool
) -> None:
    class Standing(LeasedJournal):
        """Stands still after its second claim, while a rival deletes the log."""

        async def claim(
            self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
        ) -> Claim:
            claim = await super().claim(conversation_id, takeover=takeover, any_name=any_name)
            if self.claims == 2:
                self.lose()
                async with world.rival() as rival:
                    await rival.delete("c")
                    if begins_anew:
                        await rival["c"].append(EVENT)
            return claim

    world.journal = Standing(world.store, world.clock)
    async with world.first() as conversations:
        await say(conversations["c"], "A")
        world.journal.lose()
        world.journal.tell()
        await settle()

        with pytest.raises(LeaseExpired, match="has run out"):
            await conversations["c"].append(EVENT)

        await say(conversations["c"], "B")


async def test_no_piece_of_an_answer_is_shown_after_the_lease_is_lost(world: World) -> None:
    world.agent.hold("stream")
    pieces: list[str] = []
    async with world.first() as conversations:

        async def follow() -> None:
            async for item in conversations["c"].follow():
                pieces.extend([item.text] if isinstance(item, TextDelta) else [])

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            turn = await conversations["c"].send("stream")
            await world.agent.reached["stream"].wait()
            await settle()
            world.journal.lose()
            await world.rival_says("B")
            world.agent.release("stream")
            await settle()
            assert pieces == ["a("]
            assert (await turn.end()).outcome == "interrupted"
            group.cancel_scope.cancel()


async def test_a_running_turn_ends_as_soon_as_the_loss_is_told(world: World) -> None:
    """Its agent waits for a model, and would look at the lease only after that."""
    world.agent.hold("A")
    was_cancelled = anyio.Event()
    stop = world.agent._stop

    async def stop_and_note(text: str) -> None:
        try:
            await stop(text)
        except BaseException:
            was_cancelled.set()
            raise

    world.agent._stop = stop_and_note  # type: ignore[method-assign]  # only watched
    async with world.first() as conversations:
        await conversations["c"].send("A")
        await world.agent.reached["A"].wait()
        world.journal.lose()
        world.journal.tell()
        await was_cancelled.wait()


async def test_no_snapshot_is_written_after_the_lease_is_lost(
    world: World,
) -> None:
    async with world.first(limits=Limits(snapshot_events=2)) as conversations:
        await conversations["kept"].send("A")
        await settle()
        assert world.journal.snapshots
        world.journal.snapshots.clear()
        world.journal.loses_in_append = True

        await conversations["c"].send("A")
        await settle()

        assert not world.journal.snapshots


async def test_no_condenser_is_asked_after_the_lease_is_lost(world: World) -> None:
    asked: list[int] = []

    class Condenser:
        def need(self, view: View) -> Need | None:
            return "soft" if world.journal.loses_in_append else None

        async def propose(self, view: View, need: Need) -> Proposal | None:
            asked.append(len(view))
            return None

    async with world.first(condenser=Condenser()) as conversations:
        await say(conversations["c"], "A")
        world.journal.loses_in_append = True
        await conversations["c"].append(UserMessageEvent(content="E"))
        await settle()
        assert not asked


async def test_a_view_that_differs_from_a_rivals_log_is_no_violation_by_one_that_has_lost(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It rebuilds its view from a log that is not its own any more."""
    rival = MemoryJournal()
    async with (
        world.first(verify="always") as conversations,
        Conversations(HeldAgent(), journal=rival) as others,
    ):
        await say(conversations["c"], "A")
        await say(others["c"], "another")
        await others["c"].append(EVENT)
        world.journal.loses_in_append, world.journal.replaced_by = True, rival
        with caplog.at_level(logging.WARNING):
            await conversations["c"].append(EVENT)
            await settle()
        world.journal.loses_in_append, world.journal.replaced_by = False, None
        await say(conversations["c"], "B")
        assert world.journal.claims == 2  # it had ended
    assert "InvariantViolation" not in caplog.text
