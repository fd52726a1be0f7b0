"""Forks of a conversation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import pytest

from tests.actors.conversations.stores import SHARED, store
from tests.actors.conversations.worlds import HeldAgent, brief, log_of, verified
from turnkeeper.actors import (
    Conversation,
    Conversations,
    Event,
    MemoryJournal,
    TurnContext,
    View,
    agent,
)
from turnkeeper.actors.core.commands import Append, Expected, GetView
from turnkeeper.actors.errors import (
    ConversationDeleted,
    ConversationExists,
    ConversationNotFound,
    Fenced,
    InvalidInput,
    JournalUnavailable,
    NotConfirmable,
    OwnedElsewhere,
    ResultNotKept,
)
from turnkeeper.actors.events import LoggedEvent, ObservationEvent
from turnkeeper.actors.journal import Claim, ConversationInfo, Listing, Record
from turnkeeper.runtime import NotDelivered
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


async def test_a_fork_goes_on_from_its_seq_and_leaves_the_other_as_it_was() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first = await chat.send("A")
        await first.end()
        await (await chat.send("B")).end()

        fork = await chat.fork("d", at=4)
        await (await fork.send("C")).end()

        assert await log_of(fork) == ["u:A", "a:a(A)", "u:C", "a:a(C)"]
        assert await log_of(chat) == ["u:A", "a:a(A)", "u:B", "a:a(B)"]
        assert [brief(event) for event in await fork.view()] == await log_of(fork)
        # A message of the shared part is known in both.
        assert (await fork.send("A", message_id=first.message_id)).is_duplicate


async def test_a_fork_under_a_name_that_is_taken_leaves_the_turn_that_runs_there_alone() -> None:
    held = HeldAgent()
    held.hold("B")
    async with verified(held, journal=MemoryJournal()) as conversations:
        await (await conversations["c"].send("A")).end()
        running = await conversations["d"].send("B")
        await held.reached["B"].wait()

        with pytest.raises(ConversationExists):
            await conversations["c"].fork("d")

        held.release("B")
        assert await running.reply() == "a(B)"


async def test_what_ran_and_what_waited_at_the_fork_stays_with_the_other() -> None:
    held = HeldAgent()
    held.hold("two tools A")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        running = await chat.send("two tools A")
        await held.reached["two tools A"].wait()
        waiting = await chat.send("B", message_id="b")

        fork = await chat.fork("d")

        assert await log_of(fork, all_kinds=True) == [
            "started",
            "u:two tools A",
            "call",
            "call",
            "queued:B",
            "forked_from",
            "no result",
            "no result",
            "interrupted",
        ]
        assert (await (await fork.send("B", message_id="b")).end()).outcome == "withdrawn"
        held.release("two tools A")
        assert await running.reply() == "a(two tools A)"
        assert await waiting.reply() == "a(B)"


async def test_a_fork_does_not_take_a_name_that_is_taken() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        for name in ("c", "d"):
            await (await conversations[name].send(name)).end()

        with pytest.raises(ConversationExists):
            await conversations["c"].fork("d")
        with pytest.raises(ValueError, match="seq 9"):
            await conversations["c"].fork("e", at=9)

        assert await log_of(conversations["d"]) == ["u:d", "a:a(d)"]


async def test_a_fork_that_is_made_again_is_the_one_that_is_there() -> None:
    """A caller that did not get the answer makes it again, perhaps late."""
    journal = MemoryJournal()
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        for text in ("A", "B"):
            await (await chat.send(text)).end()
        fork = await chat.fork("d", at=4, owner="alice")
        await (await fork.send("C")).end()
        log = await whole_log(fork)

        await (await chat.send("D")).end()
        again = await chat.fork("d", at=4, owner="alice")

        assert again.conversation_id == "d"
        assert await whole_log(again) == log
        for at, owner in ((4, None), (4, "bob"), (3, "alice"), (8, "alice"), (None, "alice")):
            with pytest.raises(ConversationExists):
                await chat.fork("d", at=at, owner=owner)
        with pytest.raises(ConversationExists):
            await conversations["d"].fork("c", at=4)

        # Another conversation under the name of the one that was forked.
        await conversations.delete("c")
        for text in ("A", "B"):
            await (await chat.send(text)).end()
        with pytest.raises(ConversationExists):
            await chat.fork("d", at=4, owner="alice")
        assert await whole_log(fork) == log


async def test_a_fork_that_is_made_twice_at_once_is_one_fork() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        async with anyio.create_task_group() as both:
            for _ in range(2):
                both.start_soon(partial(chat.fork, "d", at=4))
        assert await log_of(conversations["d"]) == ["u:A", "a:a(A)"]


async def whole_log(chat: Conversation) -> list[Event]:
    return [logged.event async for logged in chat.events(live=False)]


class WatchedForks(MemoryJournal):
    """Lets a test act before each fork, or fail it."""

    async def before_fork(self, conversation_id: str, fork_id: str) -> None:
        raise NotImplementedError

    async def fork(
        self,
        conversation_id: str,
        fork_id: str,
        *,
        at: int,
        records: Sequence[Record],
        is_unfinished: bool,
        at_event_id: str | None = None,
        listing: Listing | None = None,
    ) -> Claim:
        await self.before_fork(conversation_id, fork_id)
        return await super().fork(
            conversation_id,
            fork_id,
            at=at,
            records=records,
            is_unfinished=is_unfinished,
            at_event_id=at_event_id,
            listing=listing,
        )


class ForkedLate(WatchedForks):
    """Deletes the conversation, and begins it anew, before a fork of it lands."""

    conversations: Conversations

    async def before_fork(self, conversation_id: str, fork_id: str) -> None:
        await self.conversations.delete(conversation_id)
        for text in ("X", "Y"):
            await (await self.conversations[conversation_id].send(text)).end()


async def test_a_fork_of_a_conversation_that_is_deleted_and_begun_anew_meanwhile_is_refused() -> (
    None
):
    journal = ForkedLate()
    async with verified(HeldAgent(), journal=journal) as conversations:
        journal.conversations = conversations
        chat = conversations["c"]
        await (await chat.send("A")).end()

        with pytest.raises(ConversationDeleted):
            await chat.fork("d")

        assert await log_of(chat) == ["u:X", "a:a(X)", "u:Y", "a:a(Y)"]
        assert [info.conversation_id for info in (await conversations.list()).rows] == ["c"]


class NoForks(WatchedForks):
    async def before_fork(self, conversation_id: str, fork_id: str) -> None:
        raise JournalUnavailable("the disk is full; nothing was written")


async def test_a_fork_that_fails_leaves_nothing_behind_and_switches_nothing_off() -> None:
    journal = NoForks()
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()

        with pytest.raises(JournalUnavailable):
            await chat.fork("d")

        assert [info.conversation_id for info in (await conversations.list()).rows] == ["c"]
        await (await chat.send("B")).end()
        assert await chat.view() == View.from_events(await whole_log(chat))


class HeldCalls(WatchedForks):
    """Holds the first call of one kind for conversation "d" until it is let go on."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self.reached, self.gate = anyio.Event(), anyio.Event()

    async def _hold(self, what: str, conversation_id: str) -> None:
        if (what, conversation_id) == (self._what, "d") and not self.reached.is_set():
            self.reached.set()
            await self.gate.wait()

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        await self._hold("claim", conversation_id)
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
        await self._hold("append", conversation_id)
        return await super().append(
            conversation_id,
            records,
            epoch=epoch,
            expected_seq=expected_seq,
            is_unfinished=is_unfinished,
            listing=listing,
        )

    async def before_fork(self, conversation_id: str, fork_id: str) -> None:
        await self._hold("fork", fork_id)


@pytest.mark.parametrize("held", ["claim", "append"])
async def test_a_fork_to_a_name_whose_first_message_is_on_its_way_finds_the_name_taken(
    held: str,
) -> None:
    """The message got `NotDelivered`, and the fork was made."""
    journal = HeldCalls(held)
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        async with anyio.create_task_group() as both:

            async def send() -> None:
                turn = await conversations["d"].send("B")
                assert await turn.reply() == "a(B)"

            async def fork() -> None:
                with pytest.raises(ConversationExists):
                    await chat.fork("d")

            both.start_soon(send)
            await journal.reached.wait()
            both.start_soon(fork)
            await anyio.wait_all_tasks_blocked()
            journal.gate.set()

        assert await log_of(conversations["d"]) == ["u:B", "a:a(B)"]


async def test_a_message_that_comes_while_a_fork_is_made_goes_into_the_fork() -> None:
    """An owner that began with it was shut out by the fork, and the message got `Fenced`."""
    journal = HeldCalls("fork")
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        async with anyio.create_task_group() as both:
            both.start_soon(chat.fork, "d")
            await journal.reached.wait()

            async def send() -> None:
                await (await conversations["d"].send("B")).end()

            both.start_soon(send)
            await anyio.wait_all_tasks_blocked()
            journal.gate.set()

        assert await log_of(conversations["d"]) == ["u:A", "a:a(A)", "u:B", "a:a(B)"]


async def test_a_turn_of_a_deleted_conversation_that_is_cancelled_while_a_fork_takes_its_name() -> (
    None
):
    """It started an owner beside the fork, for which the conversation did not exist."""
    journal = HeldCalls("fork")
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat, deleted = conversations["c"], await conversations["d"].send("gone")
        await deleted.end()
        await conversations.delete("d")
        await (await chat.send("A")).end()
        async with anyio.create_task_group() as both:
            both.start_soon(chat.fork, "d")
            await journal.reached.wait()

            async def cancel() -> None:
                assert await deleted.cancel() is False

            both.start_soon(cancel)
            await anyio.wait_all_tasks_blocked()
            journal.gate.set()

        fork = conversations["d"]
        assert len(await fork.view()) == 2
        await (await fork.send("B")).end()
        assert await log_of(fork) == ["u:A", "a:a(A)", "u:B", "a:a(B)"]


async def test_a_fork_takes_a_name_under_which_a_command_found_no_conversation() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        await (await conversations["c"].send("A")).end()
        with pytest.raises(ConversationNotFound):
            await conversations["d"].expecting(exists=True).retract(["e"])

        fork = await conversations["c"].fork("d")

        await (await fork.send("B")).end()
        assert await log_of(fork) == ["u:A", "a:a(A)", "u:B", "a:a(B)"]


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("how", ["refused", "deleted"])
async def test_a_fork_takes_a_name_from_another_process_whose_log_of_it_is_empty(
    kind: str, how: str, tmp_path: Path
) -> None:
    """There, it did not exist, and its readers waited, until that owner was passivated."""
    with store(kind, tmp_path) as opens:
        async with (
            Conversations(HeldAgent(), journal=opens()) as here,
            Conversations(HeldAgent(), journal=opens()) as there,
        ):
            await (await here["c"].send("A")).end()
            taken = there["d"]
            if how == "deleted":
                await (await taken.send("gone")).end()
                await there.delete("d")
            else:
                with pytest.raises(NotConfirmable):
                    await taken.answer({"call": True})
            read: list[LoggedEvent] = []

            async with anyio.create_task_group() as group:
                reader = taken.events()

                async def follow() -> None:
                    with anyio.fail_after(120):
                        read.append(await anext(reader))

                group.start_soon(follow)
                await settle()
                await here["c"].fork("d")

            assert [logged.seq for logged in read] == [1]
            # The owner there is fenced. It has ended already if it has renewed its lease since.
            with pytest.raises((Fenced, OwnedElsewhere)):
                await taken.view()
            with pytest.raises(OwnedElsewhere):
                await taken.interrupt()


@pytest.mark.parametrize("at", [-1, 0, 5])
async def test_a_fork_at_a_seq_that_the_log_does_not_have_is_invalid(at: int) -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        await (await conversations["c"].send("A")).end()

        with pytest.raises(InvalidInput) as refused:
            await conversations["c"].fork("d", at=at)

        assert (refused.value.argument, refused.value.rule) == ("at", "at must be 1 to 4")


class Counted(MemoryJournal):
    """Fails if a fork looks at its name again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    async def info(self, conversation_id: str) -> ConversationInfo:
        if conversation_id == "d":
            self.looks += 1
            assert self.looks < 20, "the fork spins"
        return await super().info(conversation_id)


async def test_a_fork_takes_a_name_under_which_a_result_waits_for_its_call() -> None:
    """The fork looked at the name without a pause, until the result was dropped."""
    early = ObservationEvent(tool_call_id="call", content="early")
    async with verified(HeldAgent(), journal=Counted()) as conversations:
        await (await conversations["c"].send("A")).end()
        async with anyio.create_task_group() as both:

            async def park() -> None:
                with pytest.raises(ResultNotKept):
                    await conversations["d"].append(early, park=True)

            both.start_soon(park)
            await anyio.wait_all_tasks_blocked()

            fork = await conversations["c"].fork("d")

        assert await log_of(fork) == ["u:A", "a:a(A)"]


class Contested(MemoryJournal):
    """Lets an owner that does not stop by itself begin before each look of a fork for its name."""

    begin: Callable[[], Awaitable[None]]
    is_beginning = False

    async def info(self, conversation_id: str) -> ConversationInfo:
        if conversation_id == "d" and not self.is_beginning:
            self.is_beginning = True
            await self.begin()
            self.is_beginning = False
        return await super().info(conversation_id)


async def test_a_fork_gives_up_if_owners_of_its_name_begin_without_an_end() -> None:
    journal, looks = Contested(), 0
    async with verified(HeldAgent(), journal=journal) as conversations:
        await (await conversations["c"].send("A")).end()
        region = conversations._open_region()
        async with anyio.create_task_group() as group:

            async def park() -> None:
                """As a caller in another process does: no handle here makes it wait."""
                early = ObservationEvent(tool_call_id=f"call {looks}", content="early")
                with suppress(ResultNotKept, NotDelivered):
                    await region["d"].ask(Append(early, park=True))

            async def begin() -> None:
                nonlocal looks
                looks += 1
                assert looks < 100, "the fork spins"
                group.start_soon(park)
                await anyio.wait_all_tasks_blocked()

            journal.begin = begin
            with pytest.raises(JournalUnavailable, match="fork again"):
                await conversations["c"].fork("d")


class Slow(WatchedForks):
    """Forks only after an owner may have opened its log, and looks for a name after that."""

    async def info(self, conversation_id: str) -> ConversationInfo:
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        return await super().info(conversation_id)

    async def before_fork(self, conversation_id: str, fork_id: str) -> None:
        for _ in range(20):
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("_", range(8))  # trio draws which of two tasks goes first
async def test_a_fork_finds_out_that_an_owner_has_begun_where_it_has_just_stopped_one(
    _: int,
) -> None:
    """That owner began before the fork, and its callers got `Fenced`."""
    early = ObservationEvent(tool_call_id="call", content="early")
    async with verified(HeldAgent(), journal=Slow()) as conversations:
        await (await conversations["c"].send("A")).end()
        region = conversations._open_region()
        forks: list[Conversation] = []
        async with anyio.create_task_group() as group:

            async def park() -> None:
                with pytest.raises(ResultNotKept):
                    await conversations["d"].append(early, park=True)

            group.start_soon(park)
            await anyio.wait_all_tasks_blocked()

            async def look_once_it_has_stopped() -> None:
                """As a caller in another process does: no handle here makes it wait."""
                while "d" in region.active and not forks:
                    await anyio.lowlevel.checkpoint()
                with suppress(ConversationNotFound):
                    await region["d"].ask(GetView(expected=Expected(exists=True)))

            for _ in range(8):
                group.start_soon(look_once_it_has_stopped)
            forks.append(await conversations["c"].fork("d"))

        assert await log_of(forks[0]) == ["u:A", "a:a(A)"]


async def test_a_fork_takes_the_name_of_a_deleted_conversation_whose_agent_still_cleans_up() -> (
    None
):
    is_running, is_cleaning, may_end = anyio.Event(), anyio.Event(), anyio.Event()

    @agent
    async def tidy(turn: TurnContext) -> None:
        if turn.conversation_id == "c":
            await turn.say("a")
            return
        is_running.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                is_cleaning.set()
                await may_end.wait()

    async with verified(tidy, journal=Counted()) as conversations:
        await (await conversations["c"].send("A")).end()
        await conversations["d"].send("gone")
        await is_running.wait()
        await conversations.delete("d")
        await is_cleaning.wait()
        forks: list[Conversation] = []

        async def fork() -> None:
            try:
                forks.append(await conversations["c"].fork("d"))
            finally:
                may_end.set()  # so that a failure ends the test

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(fork)
                await settle()
                may_end.set()

        assert await log_of(forks[0]) == ["u:A", "a:a"]
