"""Journals that fail, lose records, stand still, or are written past their owner."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, WatchedJournal, brief, log_of, verified
from turnkeeper.actors import (
    Conversation,
    Event,
    MemoryJournal,
)
from turnkeeper.actors.errors import (
    CorruptLog,
    Fenced,
)
from turnkeeper.actors.events import (
    AgentMessageEvent,
    ConversationErrorEvent,
    ObservationEvent,
    TurnEndedEvent,
    UserMessageEvent,
    encode_event,
)
from turnkeeper.actors.journal import READ_BYTES, Record, StoredRecord
from turnkeeper.runtime import (
    Failure,
    Runtime,
    Unavailable,
)
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


class Breakable(WatchedJournal):
    error: Exception | None = None

    async def before_append(self, records: Sequence[Record]) -> None:
        if self.error is not None:
            raise self.error


async def test_one_failed_commit_is_one_failure() -> None:
    journal, held = Breakable(), HeldAgent()
    held.hold("A")
    async with Runtime() as runtime, verified(held, journal=journal, runtime=runtime) as cs:
        turn = await cs["c"].send("A")
        await held.reached["A"].wait()
        with runtime.events.subscribe(Failure) as failures:
            journal.error = Unavailable("for a moment")
            held.release("A")
            await anext(failures)
            journal.error = None

            assert (await turn.end()).outcome == "interrupted"
            assert not failures._buffer


class Waiting(Breakable):
    """Holds the commits of one record that says "first" until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.may_go_on = anyio.Event(), anyio.Event()

    async def before_append(self, records: Sequence[Record]) -> None:
        if b"first" in records[0].payload:
            self.reached.set()
            await self.may_go_on.wait()
        else:
            await super().before_append(records)


async def test_a_failed_commit_answers_also_the_result_that_its_batch_parked() -> None:
    """The result is in no decision of the batch; its sender has to hear that the owner ended."""
    journal = Waiting()
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="go"))
        journal.error = Unavailable("for a moment")
        errors: list[Exception] = []

        async def append(event: Event, park: bool) -> None:
            with pytest.raises(Unavailable) as raised:
                await chat.append(event, park=park)
            errors.append(raised.value)

        async with anyio.create_task_group() as group:
            group.start_soon(chat.append, UserMessageEvent(content="first"))
            await journal.reached.wait()
            group.start_soon(append, ObservationEvent(tool_call_id="1", content="seen"), True)
            group.start_soon(append, UserMessageEvent(content="again"), False)
            await settle()  # both wait for the same batch, in any order
            journal.may_go_on.set()

        assert errors == [journal.error, journal.error]
        journal.error = None


class Unreadable(MemoryJournal):
    is_unreadable = False

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512, bytes_max: int = READ_BYTES
    ) -> Sequence[StoredRecord]:
        if self.is_unreadable:
            raise Unavailable("no reading now")
        return await super().read(conversation_id, after=after, limit=limit, bytes_max=bytes_max)


async def test_a_view_that_cannot_be_verified_now_disturbs_no_turn() -> None:
    journal = Unreadable()
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        reader = chat.events(after=4)
        journal.is_unreadable = True
        turn = await chat.send("B")
        journal.is_unreadable = False

        assert await turn.reply() == "a(B)"
        assert (await anext(reader)).seq == 5


async def test_a_record_that_cannot_be_read_is_not_passed_over() -> None:
    journal = MemoryJournal()
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await chat.append(AgentMessageEvent(content="A"))
        claim = await journal.claim("c", takeover=True)
        await journal.append(
            "c",
            [Record("bad", "user_message", b'{"kind":"user_message"}')],
            epoch=claim.epoch,
            expected_seq=2,
            is_unfinished=False,
        )
        reader = chat.events(live=False)
        await anext(reader)
        for _ in range(2):
            with pytest.raises(CorruptLog) as found:
                await anext(reader)
            assert found.value.seq == 2


def record(event: Event) -> Record:
    return Record(event.id, event.kind, encode_event(event))


async def write_past_the_owner(journal: MemoryJournal, event: Event, *, epoch: int) -> None:
    head = (await journal.info("c")).head
    await journal.append(
        "c", [record(event)], epoch=epoch, expected_seq=head + 1, is_unfinished=False
    )


async def test_a_write_past_the_cache_shuts_the_owner_out_and_the_next_one_sees_it() -> None:
    journal = MemoryJournal()
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        slipped = UserMessageEvent(content="slipped in")
        await write_past_the_owner(journal, slipped, epoch=(await journal.info("c")).epoch)

        with pytest.raises(Fenced):
            await chat.send("B", message_id="b")
        await (await chat.send("B", message_id="b")).end()

        log = ["u:A", "a:a(A)", "u:slipped in", "u:B", "a:a(B)"]
        assert await log_of(chat) == log
        assert [brief(event) for event in await chat.view()] == log


async def test_a_second_owner_shuts_the_first_out_by_its_epoch() -> None:
    journal, held = MemoryJournal(), HeldAgent()
    held.hold("A")
    async with verified(held, journal=journal) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        await held.reached["A"].wait()
        rival = await journal.claim("c", takeover=True)
        await write_past_the_owner(journal, UserMessageEvent(content="rival"), epoch=rival.epoch)

        held.release("A")  # the first owner's agent answers, and is shut out
        end = await turn.end()

        assert end.outcome == "interrupted"
        assert await log_of(chat) == ["u:A", "u:rival"]
        assert (await journal.info("c")).epoch > rival.epoch


class HoleyJournal(MemoryJournal):
    """Has lost one record, as a folder of files does that lacks one."""

    lost: int | None = None

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512, bytes_max: int = READ_BYTES
    ) -> Sequence[StoredRecord]:
        records = await super().read(conversation_id, after=after, limit=limit, bytes_max=bytes_max)
        return [r for r in records if (conversation_id, r.seq) != ("c", self.lost)]


@pytest.mark.parametrize("lost", [1, 3, 8])
async def test_a_log_with_a_gap_is_never_opened_shorter_or_empty(lost: int) -> None:
    journal = HoleyJournal()
    async with verified(HeldAgent(), journal=journal) as conversations:
        for text in ("A", "B"):
            await (await conversations["c"].send(text)).end()
    journal.lost = lost

    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        for read in (chat.view, chat.at, lambda: chat.send("C")):
            with pytest.raises(CorruptLog) as found:
                await read()
            assert found.value.seq == lost
        # Nothing was added to it, and the others are served.
        assert (await journal.info("c")).head == 8
        assert await (await conversations["d"].send("D")).reply() == "a(D)"


async def whole_log(chat: Conversation) -> list[Event]:
    return [logged.event async for logged in chat.events(live=False)]


async def test_errors_and_the_ends_of_turns_are_events_like_all_others() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("fail")).end()

        error, ended = (await whole_log(chat))[-2:]
        assert isinstance(error, ConversationErrorEvent)
        assert isinstance(ended, TurnEndedEvent)


async def test_what_enforcement_takes_from_a_log_from_elsewhere_is_forgotten_by_an_event() -> None:
    """There is one path: the owner writes down what left the view, before anything else."""
    journal = MemoryJournal()
    orphan = ObservationEvent(tool_call_id="nobody", content="orphan")
    async with journal:
        claim = await journal.claim("c")
        events = [UserMessageEvent(content="A"), orphan, UserMessageEvent(content="B")]
        await journal.append(
            "c",
            [record(event) for event in events],
            epoch=claim.epoch,
            expected_seq=1,
            is_unfinished=False,
        )

    for _ in range(2):  # and once only
        async with verified(HeldAgent(), journal=journal) as conversations:
            chat = conversations["c"]
            assert [brief(event) for event in await chat.view()] == ["u:A", "u:B"]
            log = await whole_log(chat)
            assert [event.kind for event in log[3:]] == ["condensation"]
            assert log[3].forgotten_event_ids == (orphan.id,)  # type: ignore[attr-defined] # it is one


class SlowJournal(WatchedJournal):
    """Answers appends only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = anyio.Event()
        self.gate.set()
        self.waiting = anyio.Event()

    async def before_append(self, records: Sequence[Record]) -> None:
        self.waiting.set()
        await self.gate.wait()


async def test_a_slow_journal_holds_up_its_senders_and_no_reader() -> None:
    journal = SlowJournal()
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        journal.gate, journal.waiting = anyio.Event(), anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(chat.send, "B")
            await journal.waiting.wait()

            assert await log_of(chat) == ["u:A", "a:a(A)"]
            assert len((await chat.at()).view) == 2

            journal.gate.set()
        assert (await log_of(chat))[:3] == ["u:A", "a:a(A)", "u:B"]
