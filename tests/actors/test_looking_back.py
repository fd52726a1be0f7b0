"""Fork, retract, parked results, snapshots: what reaches back into a log, or ahead of it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import anyio
import pytest

from tests.actors.worlds import HeldAgent, brief, log_of, verified
from turnkeeper.actors import (
    ActionEvent,
    AdmissionRefused,
    Appended,
    Conversation,
    ConversationExists,
    Conversations,
    MemoryJournal,
    NothingToRetract,
    ObservationEvent,
    ResultNotKept,
    RollingCondenser,
    Snapshot,
    StoredRecord,
    UserMessageEvent,
)

pytestmark = pytest.mark.anyio


# --- fork --------------------------------------------------------------------------------------


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


# --- retract -----------------------------------------------------------------------------------


async def test_a_retracted_turn_leaves_the_view_and_stays_in_the_log() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        second = await chat.send("tool B")
        await second.end()

        await chat.retract_turn(second.turn_id)

        assert [brief(event) for event in await chat.view()] == ["u:A", "a:a(A)"]
        assert (await log_of(chat, all_kinds=True))[-1] == "retraction"
        with pytest.raises(NothingToRetract):
            await chat.retract_turn(second.turn_id)


async def test_half_a_call_cannot_be_retracted() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("tool A")).end()
        action = next(e for e in await chat.view() if isinstance(e, ActionEvent))

        with pytest.raises(AdmissionRefused) as refused:
            await chat.retract([action.id])

        assert refused.value.violation.name == "illegal_retraction"
        assert len(await chat.view()) == 4


# --- parking -----------------------------------------------------------------------------------


def call(call_id: str) -> ActionEvent:
    return ActionEvent(tool_call_id=call_id, tool_name="look", llm_response_id="r")


def result(call_id: str) -> ObservationEvent:
    return ObservationEvent(tool_call_id=call_id, content=f"seen {call_id}")


async def until_parked(conversations: Conversations, count: int) -> None:
    """Wait until so many results are parked, in the owner of the one active conversation."""
    while True:
        (cell,) = conversations._region._cells.values()  # type: ignore[union-attr] # it is open
        if len(cell.actor._parking) == count:  # type: ignore[union-attr] # it is active
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
            for n, call_id in enumerate("12", start=1):
                group.start_soon(park, call_id)
                await until_parked(conversations, n)
            assert await log_of(chat) == ["u:go"]
            assert answers == {}

            await chat.append(call("1"))

            # Its call is still to come, so the other waits on.
            assert await log_of(chat) == ["u:go", "call", "result"]
            await anyio.lowlevel.checkpoint()
            assert answers == {"1": Appended(3)}
            group.cancel_scope.cancel()


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


async def append_parked(chat: Conversation, call_id: str) -> None:
    await chat.append(result(call_id), park=True)


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


# --- snapshots ---------------------------------------------------------------------------------


class CountingJournal(MemoryJournal):
    """Counts the records that are read."""

    records_read = 0

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512
    ) -> Sequence[StoredRecord]:
        records = await super().read(conversation_id, after=after, limit=limit)
        self.records_read += len(records)
        return records


async def converse(journal: MemoryJournal, count: int) -> int:
    """Have a long, condensed conversation; gives the length of its log."""
    condenser = RollingCondenser(max_size=20)
    async with Conversations(HeldAgent(), journal=journal, condenser=condenser) as conversations:
        chat = conversations["c"]
        for n in range(count):
            await (await chat.send(f"tool {n}")).end()
        return (await journal.info("c")).head


async def test_activation_reads_the_snapshot_and_the_tail_after_it() -> None:
    journal = CountingJournal()
    length = await converse(journal, 150)
    assert length > 800
    journal.records_read = 0

    async with Conversations(HeldAgent(), journal=journal) as conversations:
        view = await conversations["c"].view()
        read = journal.records_read

        assert read < 250
        await (await conversations["c"].send("B")).end()
        # The same as from the whole log.
        assert list(view) == list((await conversations["c"].at(length)).view)


@pytest.mark.parametrize("damage", ["older version", "not json", "another shape"])
async def test_a_snapshot_that_does_not_fit_is_passed_over(damage: str) -> None:
    journal = CountingJournal()
    length = await converse(journal, 60)
    async with journal:
        snapshot = await journal.read_snapshot("c")
    assert snapshot is not None
    version, payload = {
        "older version": ("0;", snapshot.payload),
        "not json": (snapshot.version, b"\x00"),
        "another shape": (snapshot.version, json.dumps({"seq": snapshot.seq}).encode()),
    }[damage]
    async with journal:
        newer = Snapshot(snapshot.seq, version, payload)
        await journal.write_snapshot("c", newer, epoch=(await journal.info("c")).epoch)
    journal.records_read = 0

    async with Conversations(HeldAgent(), journal=journal) as conversations:
        await conversations["c"].view()

    assert journal.records_read >= length
