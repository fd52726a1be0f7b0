"""Deleting a conversation through its owner: all of it goes, nothing else does, no caller waits."""

# ruff: noqa: ASYNC240 - the files of a test are small, and its loop has nothing else to do

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from weakref import ref

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tests.actors.conversations.worlds import HeldAgent, WatchedJournal, log_of, verified
from turnkeeper.actors import (
    Conversations,
    Deletion,
    Event,
    MemoryJournal,
    MemoryStore,
    SQLiteJournal,
    Turn,
    TurnContext,
    agent,
)
from turnkeeper.actors.core.admission import AdmissionRefused
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.listing import time_us
from turnkeeper.actors.errors import (
    ConversationDeleted,
    ConversationNotFound,
    CorruptLog,
    InvalidInput,
    JournalUnavailable,
    NotThisLog,
    OwnedElsewhere,
)
from turnkeeper.actors.events import LoggedEvent, ObservationEvent, UserMessageEvent
from turnkeeper.actors.journal import (
    READ_BYTES,
    Claim,
    ConversationInfo,
    Record,
    Snapshot,
    StoredRecord,
)
from turnkeeper.actors.owner.event_reader import EventReader
from turnkeeper.runtime import OutcomeUnknown, Ports, Unavailable
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


async def test_a_deleted_conversation_is_gone_and_a_new_one_begins_above_its_epoch() -> None:
    journal = MemoryJournal()
    async with verified(HeldAgent(), journal=journal) as conversations:
        await (await conversations["c"].send("A", message_id="a")).end()
        await (await conversations["d"].send("B")).end()
        epoch = (await journal.info("c")).epoch

        assert await conversations.delete("c") == Deletion(0, (), is_erased=True)

        assert [info.conversation_id for info in (await conversations.list()).rows] == ["d"]
        with pytest.raises(ConversationNotFound):
            await conversations["c"].view()
        again = await conversations["c"].send("other", message_id="a")  # the id is free again
        assert not again.is_duplicate
        assert await again.reply() == "a(other)"
        assert await log_of(conversations["c"]) == ["u:other", "a:a(other)"]
        assert (await journal.info("c")).epoch > epoch


async def test_the_owner_keeps_no_event_of_a_conversation_that_was_deleted() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        await (await conversations["c"].send("A")).end()
        event = ref((await conversations["c"].view())[-1])
        assert event() is not None

        await conversations.delete("c")

        await wait_all_tasks_blocked()  # until its owner has opened the next log
        gc.collect()
        assert event() is None


async def test_deleting_what_is_not_there_is_refused_and_makes_nothing() -> None:
    journal = MemoryJournal()
    async with verified(HeldAgent(), journal=journal) as conversations:
        with pytest.raises(ConversationNotFound):
            await conversations.delete("nobody")
        assert not conversations._open_region().active
        await (await conversations["c"].send("A")).end()
        await conversations.delete("c")
        with pytest.raises(ConversationNotFound):
            await conversations.delete("c")


async def test_a_deletion_that_names_an_event_without_its_seq_is_refused() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        await conversations["c"].append(UserMessageEvent(content="hello"))
        with pytest.raises(InvalidInput, match="event_id is given without seq"):
            await conversations.delete("c", event_id="of another conversation")
        assert await conversations["c"].exists()


async def test_what_another_process_owns_is_not_deleted() -> None:
    store = MemoryStore()
    async with (
        verified(HeldAgent(), journal=MemoryJournal(store)) as first,
        verified(HeldAgent(), journal=MemoryJournal(store)) as second,
    ):
        await (await first["c"].send("A")).end()

        with pytest.raises(OwnedElsewhere):
            await second.delete("c")

        assert await log_of(first["c"]) == ["u:A", "a:a(A)"]


async def test_the_running_turn_is_cut_off_and_whoever_waits_is_told() -> None:
    held = HeldAgent()
    held.hold("A")
    told: list[str] = []

    async def wait(turn: Turn) -> None:
        with pytest.raises(ConversationDeleted):
            await turn.end()
        told.append("turn")

    async def stream(turn: Turn) -> None:
        with pytest.raises(ConversationDeleted):
            _ = [item async for item in turn]
        told.append("stream")

    async def follow(reader: EventReader) -> None:
        with pytest.raises(ConversationDeleted):
            _ = [logged async for logged in reader]
        told.append("reader")

    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first, second = await chat.send("A"), await chat.send("B")
        async with anyio.create_task_group() as group:
            for turn in (first, second):
                group.start_soon(wait, turn)
                group.start_soon(stream, turn)
            group.start_soon(follow, chat.events())
            group.start_soon(follow, chat.events(after=50))
            await held.reached["A"].wait()
            await wait_all_tasks_blocked()

            await conversations.delete("c")

        assert sorted(told) == ["reader"] * 2 + ["stream"] * 2 + ["turn"] * 2
        assert held.turns == ["A"]
        # A handle that was kept says the same, also when there is another log by now.
        with pytest.raises(ConversationDeleted):
            await first.end()
        for _ in range(3):
            await (await chat.send("C")).end()
        with pytest.raises(ConversationDeleted):
            await first.end()
        with pytest.raises(ConversationDeleted):
            await second.reply()
        assert not await first.cancel()


@pytest.mark.parametrize("is_queued", [False, True])
async def test_a_handle_does_not_take_a_message_of_its_id_in_the_next_log_for_its_own(
    *, is_queued: bool
) -> None:
    """Clients choose message ids: a second beginning may have the same, at the same seq."""
    held = HeldAgent()
    held.hold("A")

    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]

        async def begin() -> tuple[Turn, ...]:
            turn = await chat.send("A", message_id="m1")
            if is_queued:
                turn = await chat.send("B", message_id="m2")
                return turn, await chat.turn("m2")
            running = await chat.running()
            assert running is not None
            return turn, await chat.turn("m1"), running

        stale = await begin()
        await conversations.delete("c")
        turns = await begin()
        assert [turn.seq for turn in stale[:2]] == [turn.seq for turn in turns[:2]]

        for turn in stale:
            assert not await turn.cancel()
            with pytest.raises(ConversationDeleted):
                await turn.end()
            with pytest.raises(ConversationDeleted):
                await anext(aiter(turn))

        assert await turns[0].find_end() is None
        for turn, is_first in zip(turns, (True, False, False), strict=False):
            assert await turn.cancel() == is_first


async def test_a_cancellation_is_refused_unless_the_conversation_is_the_expected_one() -> None:
    """To read a turn checks nothing, so it may be another log's than the one that is expected."""
    held = HeldAgent()
    held.hold("A")

    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first = await chat.send("A", message_id="m1")
        event = await anext(chat.events(live=False))
        meant, existing = (
            chat.expecting(seq=event.seq, event_id=event.event.id),
            chat.expecting(exists=True),
        )
        in_existing = await existing.turn("m1")
        await conversations.delete("c")
        with pytest.raises(ConversationNotFound):
            await in_existing.cancel()
        assert not await first.cancel()

        second = await chat.send("A", message_id="m1")
        with pytest.raises(NotThisLog):
            await (await meant.turn("m1")).cancel()
        assert not await in_existing.cancel()  # it exists, but that turn was deleted
        assert await second.find_end() is None
        assert await (await existing.turn("m1")).cancel()


async def test_a_message_that_waits_again_is_cancelled_by_each_of_its_handles() -> None:
    """Its turn id is another one by then."""
    held = HeldAgent()
    held.hold("A")
    held.hold("C")

    for look_up in (False, True):
        async with verified(held, journal=MemoryJournal()) as conversations:
            chat = conversations["c"]
            await chat.send("A")
            steered = await chat.send("B", on_overlap="steer")
            await chat.send("C", on_overlap="rollback")

            turn = await chat.turn(steered.message_id) if look_up else steered
            assert await turn.cancel()

            assert (await turn.end()).outcome == "withdrawn"


class HeldDeletion(MemoryJournal):
    """Deletes when the test lets it, or fails to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.let = anyio.Event(), anyio.Event()
        self.error: Exception | None = None

    async def delete(self, conversation_id: str, *, epoch: int) -> Deletion:
        self.asked.set()
        await self.let.wait()
        if self.error is not None:
            raise self.error
        return await super().delete(conversation_id, epoch=epoch)


@pytest.mark.parametrize("fails", [False, True])
async def test_no_caller_is_told_of_a_deletion_before_it_is_durable(fails: bool) -> None:
    journal = HeldDeletion()
    told: list[object] = []

    async def follow(reader: EventReader) -> None:
        try:
            while True:
                told.append((await anext(reader)).seq)
        except ConversationDeleted:
            told.append("reader")

    async def delete() -> None:
        try:
            await conversations.delete("c")
        except Unavailable:
            told.append("failed")
        else:
            told.append("deleted")

    async with verified(HeldAgent(), journal=journal) as conversations:
        await (await conversations["c"].send("A")).end()
        head = (await journal.info("c")).head
        async with anyio.create_task_group() as group:
            group.start_soon(follow, conversations["c"].events(after=head))
            group.start_soon(delete)
            await journal.asked.wait()
            await settle()
            assert told == []

            journal.error = Unavailable("the disk is full") if fails else None
            journal.let.set()
            await settle()
            if fails:
                assert told == ["failed"]
                await (await conversations["c"].send("B")).end()
                await settle()
                assert told == ["failed", *range(head + 1, (await journal.info("c")).head + 1)]
            else:
                assert sorted(map(str, told)) == ["deleted", "reader"]
            group.cancel_scope.cancel()


async def test_an_agent_that_goes_on_after_its_conversation_was_deleted_writes_nothing() -> None:
    """It ignores its cancellation, and speaks when another of its name has a turn."""
    begun, goes_on, refused = anyio.Event(), anyio.Event(), anyio.Event()

    @agent
    async def stubborn(turn: TurnContext) -> None:
        if turn.message.content == "B":
            goes_on.set()
            await refused.wait()
            await turn.say("a(B)")
            return
        begun.set()
        with anyio.CancelScope(shield=True):
            await goes_on.wait()
            try:
                await turn.say("late")
            finally:
                refused.set()

    async with verified(stubborn, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await begun.wait()
        await conversations.delete("c")

        assert await (await chat.send("B")).reply() == "a(B)"
        assert await log_of(chat) == ["u:B", "a:a(B)"]


async def test_a_parked_result_is_told_that_its_conversation_was_deleted() -> None:
    told: list[type[Exception]] = []
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()

        async def append() -> None:
            try:
                await chat.append(ObservationEvent(tool_call_id="1", content="r"), park=True)
            except ConversationDeleted as error:
                told.append(type(error))

        async with anyio.create_task_group() as group:
            group.start_soon(append)
            await wait_all_tasks_blocked()
            await conversations.delete("c")

        assert told == [ConversationDeleted]


class LateSnapshots(MemoryJournal):
    """The first snapshot is on its way to the disk while its conversation is deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.comes, self.goes_on, self.came = anyio.Event(), anyio.Event(), anyio.Event()

    async def write_snapshot(self, conversation_id: str, snapshot: Snapshot, *, epoch: int) -> None:
        if self.comes.is_set():
            await super().write_snapshot(conversation_id, snapshot, epoch=epoch)
            return
        self.comes.set()
        with anyio.CancelScope(shield=True):
            await self.goes_on.wait()
            try:
                await super().write_snapshot(conversation_id, snapshot, epoch=epoch)
            finally:
                self.came.set()


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_a_refused_event_is_kept_under_no_name_without_a_conversation(
    kind: str, tmp_path: Path
) -> None:
    """No deletion could remove it, and a conversation begun there later showed it to its user."""
    journal = MemoryJournal() if kind == "memory" else SQLiteJournal(tmp_path / "chats.db")
    late = ObservationEvent(tool_call_id="1", content="of a deleted conversation")
    async with verified(HeldAgent(), journal=journal) as conversations:
        await conversations["c"].append(UserMessageEvent(content="A"))
        await conversations.delete("c")
        for name in ("c", "never begun"):
            chat = conversations[name]
            with pytest.raises(AdmissionRefused):
                await chat.append(late)

            assert not await chat.rejections()
            await chat.append(UserMessageEvent(content="B"))
            assert not await chat.rejections()
            with pytest.raises(AdmissionRefused):
                await chat.append(late)
            assert len(await chat.rejections()) == 1


class FailingJournal(WatchedJournal):
    """Fails while a test says so, before anything is written."""

    is_failing = False

    async def before_append(self, _: Sequence[Record]) -> None:
        if self.is_failing:
            raise JournalUnavailable("the disk is full; nothing was written")


@pytest.mark.parametrize("is_failing", [False, True])
async def test_an_event_that_is_refused_beside_the_first_of_a_conversation_is_not_kept(
    *, is_failing: bool
) -> None:
    """It was kept before their commit. If that failed, there was no conversation to delete."""
    journal = FailingJournal()
    journal.is_failing = is_failing
    refused: list[type[Exception]] = []
    async with Conversations(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]

        async def append(event: Event) -> None:
            try:
                await chat.append(event)
            except (AdmissionRefused, JournalUnavailable) as error:
                refused.append(type(error))

        async with anyio.create_task_group() as tasks:  # one batch, when the owner has begun
            tasks.start_soon(append, ObservationEvent(tool_call_id="1", content="late"))
            tasks.start_soon(append, UserMessageEvent(content="A"))

        assert refused == ([JournalUnavailable] * 2 if is_failing else [AdmissionRefused])
        assert not await chat.rejections()


async def test_a_late_snapshot_of_a_deleted_log_is_not_taken_for_one_of_the_new_log() -> None:
    journal = LateSnapshots()
    async with Conversations(HeldAgent(), journal=journal, verify="off") as conversations:
        chat = conversations["c"]
        for n in range(Limits().snapshot_events // 4):
            await (await chat.send(f"old {n}")).end()
        await journal.comes.wait()
        await conversations.delete("c")
        for n in range(Limits().snapshot_events // 4 + 1):
            await (await chat.send(f"new {n}")).end()

        journal.goes_on.set()
        await journal.came.wait()

        snapshot = await journal.read_snapshot("c")
        assert snapshot is not None
        assert b"old" not in snapshot.payload


class HeldReads(MemoryJournal):
    """Reads slowly when told to, and counts its claims."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = 0
        self.held: anyio.Event | None = None
        self.reading = anyio.Event()

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        self.claims += 1
        return await super().claim(conversation_id, takeover=takeover, any_name=any_name)

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512, bytes_max: int = READ_BYTES
    ) -> Sequence[StoredRecord]:
        if self.held is not None:
            self.reading.set()
            await self.held.wait()
        return await super().read(conversation_id, after=after, limit=limit, bytes_max=bytes_max)


@pytest.mark.parametrize("begins_anew", [False, True])
async def test_a_verification_that_deletion_overtakes_finds_nothing_wrong(
    begins_anew: bool,
) -> None:
    journal = HeldReads()
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        journal.held = anyio.Event()
        await chat.append(UserMessageEvent(content="B"))
        await journal.reading.wait()
        await conversations.delete("c")
        if begins_anew:
            for _ in range(5):
                await chat.append(UserMessageEvent(content="C"))

        journal.held.set()
        journal.held = None
        await wait_all_tasks_blocked()

        assert await (await chat.send("D")).reply() == "a(D)"
        assert journal.claims == 2  # when it was opened, and anew after the deletion


class RecordingJournal(MemoryJournal):
    """Remembers what it deleted, and can lose its connection."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[list[str]] = []
        self.error: Exception | None = None

    async def message_ids(self, conversation_id: str) -> list[str]:
        try:
            records = await self.read(conversation_id, limit=100_000)
        except ConversationNotFound:
            return []
        return [record.message_id for record in records if record.message_id is not None]

    async def delete(self, conversation_id: str, *, epoch: int) -> Deletion:
        if isinstance(self.error, Unavailable):
            raise self.error
        ids = await self.message_ids(conversation_id)
        deletion = await super().delete(conversation_id, epoch=epoch)
        self.deleted.append(ids)
        if self.error is not None:
            raise self.error
        return deletion


async def test_each_send_is_before_a_deletion_or_begins_anew_and_none_is_lost() -> None:
    journal = RecordingJournal()
    acknowledged: list[Turn] = []
    async with Conversations(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await chat.send("first")

        async def send(sender: int) -> None:
            for n in range(20):
                turn = await chat.send(
                    f"{sender}-{n}", on_overlap="interrupt" if n % 3 else "queue"
                )
                acknowledged.append(turn)

        async def delete() -> None:
            for _ in range(15):
                for _ in range(7):
                    await anyio.lowlevel.checkpoint()
                with suppress(ConversationNotFound):
                    await conversations.delete("c")

        async with anyio.create_task_group() as group:
            for sender in range(6):
                group.start_soon(send, sender)
            group.start_soon(delete)

        left = await journal.message_ids("c")
        found = [message_id for ids in (*journal.deleted, left) for message_id in ids]
        assert len(journal.deleted) > 5
        assert {turn.message_id for turn in acknowledged} <= set(found)
        assert len(found) == len(set(found))
        for turn in acknowledged:
            if turn.message_id in left:
                await turn.end()
            else:
                with pytest.raises(ConversationDeleted):
                    await turn.end()


async def test_a_deletion_that_could_not_be_made_is_told_and_everything_is_there() -> None:
    journal = RecordingJournal()
    async with verified(HeldAgent(), journal=journal) as conversations:
        await (await conversations["c"].send("A")).end()
        journal.error = Unavailable("the journal cannot be reached; nothing was written")
        with pytest.raises(Unavailable):
            await conversations.delete("c")
        journal.error = None

        assert await log_of(conversations["c"]) == ["u:A", "a:a(A)"]
        assert await (await conversations["c"].send("B")).reply() == "a(B)"


async def test_a_deletion_that_the_journal_refuses_is_told_and_its_owner_goes_on() -> None:
    journal = HeldDeletion()
    journal.let.set()
    async with verified(HeldAgent(), journal=journal) as conversations:
        await (await conversations["c"].send("A")).end()
        before = await journal.info("c")
        journal.error = CorruptLog("c", 2, "it is damaged")

        with pytest.raises(CorruptLog):
            await conversations.delete("c")
        with pytest.raises(CorruptLog):
            await conversations.expire(before=before.updated_at + 1.0)

        assert await journal.info("c") == before
        assert await (await conversations["c"].send("B")).reply() == "a(B)"


async def test_a_deletion_of_unknown_outcome_is_found_out_by_deleting_again() -> None:
    journal = RecordingJournal()
    async with verified(HeldAgent(), journal=journal) as conversations:
        turn = await conversations["c"].send("A")
        await turn.end()
        reader = conversations["c"].events(after=3)
        await anext(reader)
        journal.error = OutcomeUnknown("the connection broke")
        with pytest.raises(OutcomeUnknown):
            await conversations.delete("c")
        journal.error = None

        with pytest.raises(ConversationNotFound):
            await conversations.delete("c")
        for waits in (anext(reader), turn.end()):
            with pytest.raises(ConversationDeleted):
                await waits


async def test_a_reader_that_continues_after_a_restart_is_told_of_a_log_that_was_begun_anew() -> (
    None
):
    """A seq alone fits the new log, too: the reader would pass over what it never yielded."""
    store = MemoryStore()
    async with verified(HeldAgent(), journal=MemoryJournal(store)) as conversations:
        chat = conversations["c"]
        for content in ("A1", "A2"):
            await (await chat.send(content)).end()
        last = [logged async for logged in chat.events(live=False)][-1]
        at_us = time_us(last.event)

    async with verified(HeldAgent(), journal=MemoryJournal(store)) as conversations:
        chat = conversations["c"].expecting(seq=last.seq, event_id=last.event.id, at_us=at_us)
        await (await chat.send("B")).end()
        for reader in (chat.events(after=last.seq), chat.follow(after=last.seq)):
            item = await anext(reader)
            assert isinstance(item, LoggedEvent)
            assert item.seq == last.seq + 1

        await conversations.delete("c")
        for number in range(3):  # the new log is shorter than the cursor, as long, and longer
            await (await conversations["c"].send(f"C{number}")).end()
            for live in (False, True):
                reader = chat.events(after=last.seq, live=live)
                for _ in range(2):
                    with pytest.raises(NotThisLog):
                        await anext(reader)
        await conversations.delete("c")
        for live in (False, True):
            with pytest.raises(NotThisLog if live else ConversationNotFound):
                await anext(chat.events(after=last.seq, live=live))

        await (await conversations["c"].send("D")).end()
        first = await anext(conversations["c"].events())
        other_time = conversations["c"].expecting(seq=1, event_id=first.event.id, at_us=1)
        with pytest.raises(NotThisLog):
            await anext(other_time.events(after=1))
        with pytest.raises(InvalidInput, match="after is 2, and the expected event is at seq 1"):
            other_time.events(after=2)


async def test_what_forks_need_stays_and_the_answer_says_so() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        await (await conversations["c"].send("A")).end()
        await (await conversations["c"].send("B")).end()
        await conversations["c"].fork("f", at=4)

        deletion = await conversations.delete("c")

        assert (deletion.kept, list(deletion.forks)) == (4, ["f"])
        assert await log_of(conversations["f"]) == ["u:A", "a:a(A)"]


async def test_old_conversations_expire_and_those_that_went_on_stay() -> None:
    class Aging(MemoryJournal):
        """A day goes by with each thing that is written."""

        def __init__(self) -> None:
            self.day = 0.0
            super().__init__(ports=replace(Ports(), now=lambda: self.day))

    journal = Aging()
    async with verified(HeldAgent(), journal=journal) as conversations:
        for day, name in ((1, "old"), (2, "also old"), (9, "new")):
            journal.day = day
            await (await conversations[name].send("A")).end()
        await conversations["old"].view()
        info = await journal.info("also old")
        journal.day = 9
        await (await conversations["also old"].send("B")).end()

        # As of the list, it was old; its owner knows better.
        assert await conversations._delete("also old", listed=info) is None
        assert await conversations.expire(before=5) == ["old"]

        assert [info.conversation_id for info in (await conversations.list()).rows] == [
            "also old",
            "new",
        ]


async def test_a_damaged_conversation_keeps_no_other_from_expiring(tmp_path: Path) -> None:
    """Each call stopped at it, so nothing behind it ever expired; and it named the first alone."""
    path = tmp_path / "chats.db"
    damaged = [f"b{number:02}" for number in range(13)]
    async with verified(HeldAgent(), journal=SQLiteJournal(path)) as conversations:
        for name in ("a", *damaged, "c"):
            await conversations[name].append(UserMessageEvent(id=f"of {name}", content="old"))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE event SET payload = '{}' WHERE event_id LIKE 'of b%'")

    async with verified(HeldAgent(), journal=SQLiteJournal(path)) as conversations:
        with pytest.raises(CorruptLog) as damage:
            await conversations.expire(before=4e9)

        assert [damage.value.conversation_id, *damage.value.others] == damaged
        assert "b01, " in str(damage.value)
        assert "b10 and 2 more" in str(damage.value)
        assert "nothing was changed" not in str(damage.value), "the others were deleted"
        assert [info.conversation_id for info in await conversations.journal.list()] == damaged


async def test_a_conversation_that_is_begun_anew_beside_expire_stays() -> None:
    """Its new log may be as long as the one that was listed."""

    class Deleted(MemoryJournal):
        """The conversation is deleted and begun anew once the list was read."""

        async def list(self) -> Sequence[ConversationInfo]:
            infos = await super().list()
            await conversations.delete("c")
            await (await conversations["c"].send("new")).end()
            return infos

    async with verified(HeldAgent(), journal=Deleted()) as conversations:
        await (await conversations["c"].send("old")).end()

        assert await conversations.expire(before=Ports().now()) == []

        assert await log_of(conversations["c"]) == ["u:new", "a:a(new)"]


async def test_deleting_in_a_file_leaves_nothing_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    async with verified(HeldAgent(), journal=SQLiteJournal(path)) as conversations:
        turn = await conversations["c"].send("my secret word")
        await (await conversations["d"].send("hello")).end()
        await turn.end()

        deletion = await conversations.delete("c")

        assert deletion.is_erased
        assert not [file for file in tmp_path.iterdir() if b"secret word" in file.read_bytes()]


class Swapped(MemoryJournal):
    """While the snapshot of "d" is read, deletes "d" and forks "c" to its name."""

    conversations: Conversations | None = None

    async def read_snapshot(self, conversation_id: str) -> Snapshot | None:
        snapshot = await super().read_snapshot(conversation_id)
        if conversation_id == "d" and self.conversations is not None:
            assert snapshot is not None
            conversations, self.conversations = self.conversations, None
            await conversations.delete("d")
            await conversations["c"].fork("d")
        return snapshot


@pytest.mark.parametrize("at", [None, 8])
async def test_a_state_is_of_one_log_though_its_conversation_is_deleted_and_begun_anew_meanwhile(
    at: int | None,
) -> None:
    """It had the messages of the deleted conversation, and then those of the other one."""
    journal = Swapped()
    limits = Limits(snapshot_events=4)
    async with verified(HeldAgent(), journal=journal, limits=limits) as conversations:
        for text in ("A", "B", "C", "D"):
            await (await conversations["c"].send(text)).end()
        for text in ("x", "y", "z"):
            await (await conversations["d"].send(text)).end()
        await settle()
        journal.conversations = conversations

        state = await conversations["d"].at(at)

        said = [getattr(event, "content", "") for event in state.view]
        assert said == ["A", "a(A)", "B", "a(B)", "C", "a(C)", "D", "a(D)"][: at and at // 2]


class Restless(MemoryJournal):
    """Says at each look that another owner has begun."""

    looks = 0

    async def info(self, conversation_id: str) -> ConversationInfo:
        self.looks += 1
        return (await super().info(conversation_id))._replace(epoch=self.looks)


async def test_a_state_of_a_log_whose_owners_begin_without_end_is_refused() -> None:
    journal = Restless()
    async with Conversations(HeldAgent(), journal=journal) as conversations:
        await conversations["c"].append(UserMessageEvent(content="hello"))

        with pytest.raises(JournalUnavailable, match="c got another owner during each"):
            await conversations["c"].at()
