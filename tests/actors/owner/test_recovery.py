"""Conversations that another process left unfinished are taken up without a message."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from inspect import signature
from itertools import pairwise
from typing import Literal

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, log_of
from turnkeeper.actors import Conversations, MemoryJournal, PostgresJournal, TurnContext, agent
from turnkeeper.actors.errors import InvalidInput, JournalUnavailable, OwnedElsewhere
from turnkeeper.actors.journal import Claim, ConversationInfo
from turnkeeper.actors.journals.memory import MemoryStore
from turnkeeper.runtime.testing import VirtualClock, settle

pytestmark = pytest.mark.anyio

TWO_LOOKS_S = 40.0


class Refusing(MemoryJournal):
    """A journal that counts its claims, and refuses those of conversation `bad`."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.claims: list[str] = []
        self.is_refusing = True

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        self.claims.append(conversation_id)
        if conversation_id == "bad" and self.is_refusing:
            raise JournalUnavailable("not now")
        return await super().claim(conversation_id, takeover=takeover, any_name=any_name)


async def leave_unfinished(store: MemoryStore, *names: str) -> None:
    """Stop another process, everything at once, while it answers these conversations."""
    held = HeldAgent()
    held.hold("A")
    with anyio.CancelScope() as process:
        async with Conversations(held, journal=MemoryJournal(store)) as elsewhere:
            for name in names:
                await elsewhere[name].send("A")
                await settle()
            process.cancel()


async def test_a_turn_that_another_process_left_is_ended_within_a_look_or_two() -> None:
    store, clock, held = MemoryStore(), VirtualClock(), HeldAgent()
    held.hold("A")
    here = Conversations(HeldAgent(), journal=MemoryJournal(store), ports=clock.ports())
    with anyio.CancelScope() as process:
        async with Conversations(held, journal=MemoryJournal(store)) as elsewhere:
            async with here as conversations:
                await elsewhere["c"].send("A")
                await elsewhere["c"].send("B")
                await held.reached["A"].wait()
                await clock.advance(TWO_LOOKS_S)
                # Its owner lives.
                assert await log_of(conversations["c"], all_kinds=True) == [
                    "started",
                    "u:A",
                    "queued:B",
                ]
                await anyio.lowlevel.checkpoint()
                elsewhere_region = elsewhere._open_region()
                assert elsewhere_region.active == ("c",)
                await elsewhere._journal.__aexit__()
                await clock.advance(TWO_LOOKS_S)
                assert "a:a(B)" in await log_of(conversations["c"])
            process.cancel()


@pytest.mark.parametrize("recover", ["on_enter", "on_message"])
async def test_a_turn_awaited_where_it_was_lost_ends_though_its_new_owner_failed_to_open(
    recover: Literal["on_enter", "on_message"],
) -> None:
    """The new owner's process lives, so no other process can claim the conversation."""
    store, clock, held = MemoryStore(), VirtualClock(), HeldAgent()
    held.hold("A")
    lost, theirs = MemoryJournal(store), MemoryJournal(store)
    here = Conversations(held, journal=lost)
    there = Conversations(HeldAgent(), journal=theirs, recover=recover, ports=clock.ports())
    ended: list[str] = []
    async with here, there, anyio.create_task_group() as group:
        turn = await here["c"].send("A")
        await held.reached["A"].wait()

        async def wait() -> None:
            ended.append((await turn.end()).outcome)

        group.start_soon(wait)
        await theirs.claim("c", takeover=True)  # all that was done before opening failed
        held.release("A")
        await settle()
        assert ended == []

        await clock.advance(TWO_LOOKS_S)
        if recover == "on_message":
            assert ended == []
            await there["c"].send("B")
        await settle()
        assert ended == ["interrupted"]


async def test_with_recover_on_message_there_is_no_look() -> None:
    store, clock = MemoryStore(), VirtualClock()
    journal = Refusing(store)
    async with Conversations(
        HeldAgent(), journal=journal, recover="on_message", ports=clock.ports()
    ):
        await leave_unfinished(store, "c")
        await clock.advance(10 * TWO_LOOKS_S)
        assert journal.claims == []


async def test_one_that_cannot_be_opened_is_tried_less_and_less_often_and_holds_up_no_other() -> (
    None
):
    store, clock = MemoryStore(), VirtualClock()
    journal = Refusing(store)
    async with Conversations(HeldAgent(), journal=journal, ports=clock.ports()) as here:
        await leave_unfinished(store, "bad", "good")
        await clock.advance(TWO_LOOKS_S)
        assert "good" in journal.claims
        looks = 200
        await clock.advance(looks * 15.0)
        # Each try is made by a few owners, one after the other, before the region gives up.
        tries = [n for n, name in enumerate(journal.claims) if name == "bad"]
        assert len(tries) < looks
        journal.is_refusing = False
        await clock.advance(150 * 15.0)
        assert await log_of(here["bad"], all_kinds=True) == ["started", "u:A", "interrupted"]


async def test_opening_that_takes_long_does_not_put_off_the_next_look() -> None:
    class Slow(MemoryJournal):
        async def claim(
            self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
        ) -> Claim:
            await clock.ports().sleep(TWO_LOOKS_S)
            return await super().claim(conversation_id, takeover=takeover, any_name=any_name)

    store, clock = MemoryStore(), VirtualClock()
    async with Conversations(HeldAgent(), journal=Slow(store), ports=clock.ports()) as here:
        await leave_unfinished(store, "first")
        await clock.advance(2 * TWO_LOOKS_S)
        assert "interrupted" in await log_of(here["first"], all_kinds=True)
        await leave_unfinished(store, "second")
        await clock.advance(3 * TWO_LOOKS_S)
        assert "interrupted" in await log_of(here["second"], all_kinds=True)


async def test_a_look_that_failed_late_does_not_put_off_the_next_one() -> None:
    """A database that was away for a minute put off the next look by twenty."""

    class Away(MemoryJournal):
        is_away = False

        async def find_abandoned(self) -> Sequence[ConversationInfo]:
            if self.is_away:
                await clock.ports().sleep(60.0)
                self.is_away = False
                raise JournalUnavailable("not now")
            return await super().find_abandoned()

    store, clock = MemoryStore(), VirtualClock()
    journal = Away(store)
    async with Conversations(HeldAgent(), journal=journal, ports=clock.ports()) as here:
        journal.is_away = True
        await leave_unfinished(store, "c")
        await clock.advance(60.0 + 2 * TWO_LOOKS_S)
        assert not journal.is_away
        assert "interrupted" in await log_of(here["c"], all_kinds=True)


async def test_a_turn_that_waits_for_a_person_is_not_taken_up() -> None:
    @agent
    async def asking(turn: TurnContext) -> None:
        await turn.say("?")

    store, clock = MemoryStore(), VirtualClock()
    async with Conversations(asking, journal=MemoryJournal(store)) as first:
        await (await first["c"].send("before")).end()
        await first["c"].pause()
        await first["c"].send("A")
    journal = Refusing(store)
    async with Conversations(asking, journal=journal, ports=clock.ports()) as second:
        await clock.advance(TWO_LOOKS_S)
        assert journal.claims == []
        await second["c"].resume()
        await settle()
        assert (await log_of(second["c"]))[-2:] == ["u:A", "a:?"]


async def test_no_more_are_claimed_at_a_time_than_the_application_says() -> None:
    """On entering, and of those that are found later."""

    class Counting(MemoryJournal):
        now = most = 0

        async def claim(
            self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
        ) -> Claim:
            self.now += 1
            self.most = max(self.most, self.now)
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
            self.now -= 1
            return await super().claim(conversation_id, takeover=takeover, any_name=any_name)

    store, clock = MemoryStore(), VirtualClock()
    journal = Counting(store)
    first, later = ([f"{one}{number}" for number in range(7)] for one in "cd")
    await leave_unfinished(store, *first)
    async with Conversations(
        HeldAgent(), journal=journal, ports=clock.ports(), recover_max=3
    ) as here:
        for name in first:
            assert (await log_of(here[name], all_kinds=True))[-1] == "interrupted"
        assert journal.most == 3
        journal.most = 0
        await leave_unfinished(store, *later)
        await clock.advance(TWO_LOOKS_S)
        for name in later:
            assert (await log_of(here[name], all_kinds=True))[-1] == "interrupted"
        assert journal.most == 3


async def test_a_conversation_that_a_rival_was_faster_to_claim_is_looked_for_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is no error: nothing is told, and it is not put off, should the rival leave it again."""

    class Rival(Refusing):
        looks = 0

        async def find_abandoned(self) -> Sequence[ConversationInfo]:
            self.looks += 1
            return await super().find_abandoned()

        async def claim(
            self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
        ) -> Claim:
            self.claims.append(conversation_id)
            if self.is_refusing:
                raise OwnedElsewhere(f"conversation {conversation_id}", "the rival")
            return await MemoryJournal.claim(
                self, conversation_id, takeover=takeover, any_name=any_name
            )

    store, clock = MemoryStore(), VirtualClock()
    journal = Rival(store)
    async with Conversations(HeldAgent(), journal=journal, ports=clock.ports()) as here:
        await leave_unfinished(store, "c")
        looks = journal.looks
        await clock.advance(10 * TWO_LOOKS_S)
        assert len(journal.claims) >= journal.looks - looks > 10
        assert not [told for told in caplog.records if told.levelno >= logging.WARNING]
        journal.is_refusing = False
        await clock.advance(TWO_LOOKS_S)
        assert await log_of(here["c"], all_kinds=True) == ["started", "u:A", "interrupted"]


async def test_the_looks_of_two_processes_drift_apart() -> None:
    """As long as a lease by default, give or take a quarter, and not the same each time."""

    class Looking(MemoryJournal):
        def __init__(self) -> None:
            super().__init__()
            self.looked_at: list[float] = []

        async def find_abandoned(self) -> Sequence[ConversationInfo]:
            self.looked_at.append(clock.ports().loop_time())
            return await super().find_abandoned()

    lease_s = signature(PostgresJournal).parameters["lease_s"].default
    clock, journal = VirtualClock(), Looking()
    async with Conversations(HeldAgent(), journal=journal, ports=clock.ports()):
        await clock.advance(20 * lease_s)
    pauses = [later - one for one, later in pairwise(journal.looked_at[1:])]
    assert len(pauses) > 10
    assert all(0.75 * lease_s <= pause <= 1.25 * lease_s for pause in pauses)
    assert len(set(pauses)) == len(pauses)


async def test_a_look_that_waited_for_the_database_puts_the_next_one_off_by_a_minute() -> None:
    """It was put off by twenty times the wait, and crashed conversations stayed as they were."""

    class Waiting(MemoryJournal):
        def __init__(self) -> None:
            super().__init__()
            self.looked_at: list[float] = []

        async def find_abandoned(self) -> Sequence[ConversationInfo]:
            self.looked_at.append(clock.ports().loop_time())
            if len(self.looked_at) == 2:  # the first is that of entering
                await clock.sleep(60.0)
            return await super().find_abandoned()

    clock, journal = VirtualClock(), Waiting()
    async with Conversations(HeldAgent(), journal=journal, ports=clock.ports()):
        await clock.advance(300.0)
    _, waiting, after, *_ = journal.looked_at
    assert after - waiting == pytest.approx(60.0 + 60.0)


async def test_a_look_that_ends_as_the_conversations_close_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It arms the timer of the next look, which the ending actor refuses."""

    class Slow(MemoryJournal):
        looks = 0

        async def find_abandoned(self) -> Sequence[ConversationInfo]:
            self.looks += 1
            if self.looks > 1:  # the first is that of entering
                with anyio.CancelScope(shield=True):
                    await gate.wait()
                raise JournalUnavailable("not now")
            return await super().find_abandoned()

    gate, clock, journal = anyio.Event(), VirtualClock(), Slow()
    here = Conversations(HeldAgent(), journal=journal, ports=clock.ports())
    await here.start()
    await clock.advance(TWO_LOOKS_S)
    assert journal.looks == 2

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(here.aclose)
        await settle()
        gate.set()
    (told,) = (each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING)
    assert "search for unfinished conversations failed" in told


@pytest.mark.parametrize("every_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_pause_between_looks_that_makes_no_sense_is_refused(every_s: float) -> None:
    with pytest.raises(InvalidInput, match="recover_every_s"):
        Conversations(HeldAgent(), journal=MemoryJournal(), recover_every_s=every_s)
