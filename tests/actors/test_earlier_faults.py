"""What earlier systems with a cached view got wrong, each made to happen here.

They kept the view in step with the log by callbacks, locks and cursors. Each test names the fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import anyio
import pytest

from tests.actors.worlds import HeldAgent, WatchedJournal, brief, log_of, verified
from turnkeeper.actors import (
    Claim,
    Conversation,
    ConversationErrorEvent,
    CorruptLog,
    Event,
    Fenced,
    JournalUnavailable,
    MemoryJournal,
    ObservationEvent,
    Record,
    RollingCondenser,
    StoredRecord,
    TurnContext,
    TurnEndedEvent,
    UserMessageEvent,
    View,
    agent,
    encode_event,
)

pytestmark = pytest.mark.anyio


def record(event: Event) -> Record:
    return Record(event.id, event.kind, encode_event(event))


async def whole_log(chat: Conversation) -> list[Event]:
    return [logged.event async for logged in chat.events(live=False)]


async def write_past_the_owner(journal: MemoryJournal, event: Event, *, epoch: int) -> None:
    head = (await journal.info("c")).head
    await journal.append(
        "c", [record(event)], epoch=epoch, expected_seq=head + 1, is_unfinished=False
    )


async def test_1_a_write_past_the_cache_shuts_the_owner_out_and_the_next_one_sees_it() -> None:
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


async def test_2_a_second_owner_shuts_the_first_out_by_its_epoch() -> None:
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
        self, conversation_id: str, *, after: int = 0, limit: int = 512
    ) -> Sequence[StoredRecord]:
        records = await super().read(conversation_id, after=after, limit=limit)
        return [r for r in records if (conversation_id, r.seq) != ("c", self.lost)]


@pytest.mark.parametrize("lost", [1, 3, 8])
async def test_3_and_7_a_log_with_a_gap_is_never_opened_shorter_or_empty(lost: int) -> None:
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


async def test_4_condensing_while_a_step_is_in_flight_comes_after_it_or_before_never_inside() -> (
    None
):
    journal, held = MemoryJournal(), HeldAgent()
    async with verified(
        held, journal=journal, condenser=RollingCondenser(max_size=12)
    ) as conversations:
        chat = conversations["c"]
        for n in range(10):
            held.hold(f"two tools {n}")
            turn = await chat.send(f"two tools {n}")
            await held.reached[f"two tools {n}"].wait()
            queued = await chat.send(f"B{n}")
            held.release(f"two tools {n}")
            await turn.end()
            await queued.end()

        view = await chat.view()
        assert view == View.from_events(await whole_log(chat))
        calls = [e.tool_call_id for e in view if e.kind == "action"]  # type: ignore[attr-defined] # an action
        results = [e.tool_call_id for e in view if isinstance(e, ObservationEvent)]
        assert sorted(calls) == sorted(results)


async def test_5_errors_and_the_ends_of_turns_are_events_like_all_others() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("fail")).end()

        error, ended = (await whole_log(chat))[-2:]
        assert isinstance(error, ConversationErrorEvent)
        assert isinstance(ended, TurnEndedEvent)


class NoForks(MemoryJournal):
    async def fork(
        self,
        conversation_id: str,
        fork_id: str,
        *,
        at: int,
        records: Sequence[Record],
        is_unfinished: bool,
    ) -> Claim:
        raise JournalUnavailable("the disk is full; nothing was written")


async def test_6_a_fork_that_fails_leaves_nothing_behind_and_switches_nothing_off() -> None:
    journal = NoForks()
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()

        with pytest.raises(JournalUnavailable):
            await chat.fork("d")

        assert [info.conversation_id for info in await conversations.list()] == ["c"]
        await (await chat.send("B")).end()
        assert await chat.view() == View.from_events(await whole_log(chat))


async def test_8_what_enforcement_takes_from_a_log_from_elsewhere_is_forgotten_by_an_event() -> (
    None
):
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


async def test_who_steers_a_turn_does_not_overtake_who_steered_the_one_before() -> None:
    """Found by `turnkeeper stress`: messages of one sender were answered the wrong way round."""
    reached: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)
    may_go: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)

    @agent
    async def steered(turn: TurnContext) -> None:
        text = turn.message.content
        reached[text].set()
        await may_go[text].wait()
        if text == "B":
            await turn.begin_step()

    async with verified(steered, journal=MemoryJournal(), on_overlap="steer") as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await reached["A"].wait()
        await chat.send("B")
        await chat.send("C")
        may_go["A"].set()
        await reached["B"].wait()  # A ended without a further step, and B has its own turn

        last = await chat.send("D")
        for text in "BCD":
            may_go[text].set()
        await last.end()

        assert [event for event in await log_of(chat) if event.startswith("u:")] == [
            "u:A",
            "u:B",
            "u:C",
            "u:D",
        ]
