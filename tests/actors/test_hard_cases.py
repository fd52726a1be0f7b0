"""What a hostile reader tried: lost acknowledgements, dead owners, odd text and errors, leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import anyio
import pytest

from tests.actors.worlds import HeldAgent, WatchedJournal, brief, log_of, verified
from turnkeeper.actors import (
    ActionEvent,
    AgentMessageEvent,
    CondensationEvent,
    Conversations,
    ConversationsClosed,
    CorruptLog,
    InvalidInput,
    MemoryJournal,
    NotAppendable,
    ObservationEvent,
    Proposal,
    Record,
    RollingCondenser,
    SummarizingCondenser,
    ToolCall,
    TurnContext,
    UserMessageEvent,
    View,
    agent,
)
from turnkeeper.actors.condensers import Need
from turnkeeper.runtime import (
    Failure,
    OutcomeUnknown,
    OwnershipLost,
    Runtime,
    TurnkeeperError,
    Unavailable,
)

pytestmark = pytest.mark.anyio


class LosesAcknowledgement(MemoryJournal):
    """Writes, and then loses the line: once, when the last record is of this kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind: str | None = kind

    async def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
    ) -> Sequence[int]:
        seqs = await super().append(
            conversation_id,
            records,
            epoch=epoch,
            expected_seq=expected_seq,
            is_unfinished=is_unfinished,
        )
        if records[-1].kind == self.kind:
            self.kind = None
            raise OutcomeUnknown("the line was lost after the write")
        return seqs


@pytest.mark.parametrize("kind", ["user_message", "agent_message", "turn_ended"])
async def test_what_was_written_behind_a_lost_acknowledgement_reaches_whoever_waits(
    kind: str,
) -> None:
    async with verified(HeldAgent(), journal=LosesAcknowledgement(kind)) as conversations:
        chat = conversations["c"]
        reader = chat.events()
        try:
            turn = await chat.send("A", message_id="a")
        except OutcomeUnknown:
            turn = await chat.send("A", message_id="a")

        end = await turn.end()

        length = len(await log_of(chat, all_kinds=True))
        assert [(await anext(reader)).seq for _ in range(length)] == list(range(1, length + 1))
        assert end.outcome == ("completed" if kind == "turn_ended" else "interrupted")


class Breakable(WatchedJournal):
    error: Exception | None = None

    async def before_append(self, records: Sequence[Record]) -> None:
        if self.error is not None:
            raise self.error


async def test_whoever_begins_to_wait_when_the_owner_has_gone_brings_the_next_one() -> None:
    journal, held = Breakable(), HeldAgent()
    held.hold("A")
    async with verified(held, journal=journal) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        await held.reached["A"].wait()
        journal.error = OwnershipLost("fenced")
        with pytest.raises(OwnershipLost):
            await chat.send("B")
        journal.error = None

        assert (await turn.end()).outcome == "interrupted"


# --- leaving -----------------------------------------------------------------------------------


async def test_leaving_ends_all_waiting_and_wakes_no_owner() -> None:
    journal, held = MemoryJournal(), HeldAgent()
    held.hold("A")
    ended: list[str] = []
    seen: list[str] = []

    async with anyio.create_task_group() as group, Runtime() as runtime:
        async with verified(held, journal=journal, runtime=runtime) as conversations:
            chat = conversations["c"]
            turn = await chat.send("A")
            await held.reached["A"].wait()
            queued = await chat.send("B")

            async def wait() -> None:
                try:
                    await turn.end()
                except ConversationsClosed:
                    ended.append("closed")

            async def follow() -> None:
                seen.extend([brief(event) async for _, event in chat.events()])
                ended.append("events")

            group.start_soon(wait)
            group.start_soon(follow)
            while not seen and len(journal_readers(conversations)) < 2:
                await anyio.lowlevel.checkpoint()

        with pytest.raises(ConversationsClosed):
            await chat.send("C")
        with pytest.raises(ConversationsClosed):
            await queued.end()

    assert sorted(ended) == ["closed", "events"]
    assert seen == ["started", "u:A", "queued:B"]
    async with journal:
        assert (await journal.info("c")).head == 3


def journal_readers(conversations: Conversations) -> Sequence[object]:
    return conversations._setup.subscriptions._live("c")


async def test_a_conversation_that_cannot_be_recovered_keeps_nobody_from_entering() -> None:
    journal, held = MemoryJournal(), HeldAgent()
    with anyio.CancelScope() as process:
        async with Conversations(held, journal=journal) as conversations:
            for name in ("bad", "good"):
                held.hold(name)
                await conversations[name].send(name)
            process.cancel()

    broken = FailsFor(journal._store, "bad")
    async with verified(HeldAgent(), journal=broken) as conversations:
        assert await log_of(conversations["good"], all_kinds=True) == [
            "started",
            "u:good",
            "interrupted",
        ]
        with pytest.raises(TurnkeeperError):
            await conversations["bad"].send("again")


class FailsFor(MemoryJournal):
    def __init__(self, store: object, name: str) -> None:
        super().__init__(store)  # type: ignore[arg-type] # another memory journal's store
        self.name = name

    async def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
    ) -> Sequence[int]:
        if conversation_id == self.name:
            raise OutcomeUnknown("no answer")
        return await super().append(
            conversation_id,
            records,
            epoch=epoch,
            expected_seq=expected_seq,
            is_unfinished=is_unfinished,
        )


# --- condensers --------------------------------------------------------------------------------


async def test_a_summary_that_is_too_long_itself_is_not_summarised_without_end() -> None:
    calls = 0

    async def summarize(history: str) -> str:
        nonlocal calls
        calls += 1
        return "s" * 4_000

    condenser = SummarizingCondenser(summarize, RollingCondenser(max_tokens=500, keep_first=0))
    async with verified(HeldAgent(), journal=MemoryJournal(), condenser=condenser) as conversations:
        chat = conversations["c"]
        for n in range(4):
            await (await chat.send(f"{n}" * 1_000)).end()
        log = [event async for _, event in chat.events(live=False)]

    # A few for each of the eight events that the model sees, and none that begets the next.
    assert calls < 30
    assert sum(isinstance(event, CondensationEvent) for event in log) == calls


class NeedRaises:
    def need(self, view: View) -> Need | None:
        raise ConnectionError("no tokenizer")

    async def propose(self, view: View, need: Need) -> Proposal | None:
        raise AssertionError("never asked")


async def test_a_condenser_whose_need_raises_is_written_down_and_stops_nobody() -> None:
    async with verified(
        HeldAgent(), journal=MemoryJournal(), condenser=NeedRaises()
    ) as conversations:
        chat = conversations["c"]
        for text in ("A", "B"):
            assert await (await chat.send(text)).reply() == f"a({text})"

        assert "conversation_error" in await log_of(chat, all_kinds=True)


# --- input -------------------------------------------------------------------------------------

BAD_INPUT: dict[str, Callable[[Conversations], Awaitable[object]]] = {
    "empty message id": lambda cs: cs["c"].send("A", message_id=""),
    "message id that is no text": lambda cs: cs["c"].send("A", message_id=7),  # type: ignore[arg-type]
    "content that is no text": lambda cs: cs["c"].send(None),  # type: ignore[arg-type]
    "half an emoji": lambda cs: cs["c"].send("\ud83d"),
    "unknown on_overlap": lambda cs: cs["c"].send("A", on_overlap="sometimes"),  # type: ignore[arg-type]
    "no event": lambda cs: cs["c"].append("A"),  # type: ignore[arg-type]
    "negative seq": lambda cs: cs["c"].at(-1),
}


@pytest.mark.parametrize("what", BAD_INPUT)
async def test_bad_input_is_refused_at_the_boundary_and_hurts_no_neighbour(what: str) -> None:
    held = HeldAgent()
    held.hold("good")
    async with verified(held, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("good")

        with pytest.raises(InvalidInput):
            await BAD_INPUT[what](conversations)

        held.release("good")
        assert await turn.reply() == "a(good)"
        assert await log_of(conversations["c"]) == ["u:good", "a:a(good)"]


async def test_what_cannot_be_meant_is_refused_before_anything_is_opened() -> None:
    for conversation_id in ("", "x" * 257, "\ud83d"):
        async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
            with pytest.raises(InvalidInput):
                conversations[conversation_id]
            with pytest.raises(InvalidInput):
                conversations["c"].events(after=-1)
    with pytest.raises(InvalidInput, match="on_overlap"):
        verified(HeldAgent(), journal=MemoryJournal(), on_overlap="never")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="use @agent"):
        verified(lambda turn: None, journal=MemoryJournal())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="async def"):
        agent(lambda turn: None)  # type: ignore[arg-type,return-value]


async def test_a_caller_cannot_pretend_that_a_message_was_queued() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        with pytest.raises(NotAppendable):
            await conversations["c"].append(
                UserMessageEvent(content="A", message_id="a", queued_event_id="q")
            )


async def test_a_conversation_begins_with_its_system_prompt_also_by_append() -> None:
    async with verified(
        HeldAgent(), journal=MemoryJournal(), system_prompt="Be kind."
    ) as conversations:
        chat = conversations["c"]
        assert (await chat.append(UserMessageEvent(content="A"))).seq == 2
        assert await log_of(chat) == ["system_prompt", "u:A"]


# --- what models and tools say -------------------------------------------------------------------


async def test_half_an_emoji_in_a_stream_does_not_keep_the_turn_from_being_interrupted() -> None:
    begun = anyio.Event()

    @agent
    async def halves(turn: TurnContext) -> None:
        if turn.message.content == "B":
            return

        async def pieces() -> AsyncIterator[str]:
            yield "so far \ud83d"
            begun.set()
            await anyio.sleep_forever()

        await turn.stream(pieces())

    async with verified(halves, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await begun.wait()

        await (await chat.send("B", on_overlap="interrupt")).end()

        assert await log_of(chat) == ["u:A", "cut:so far \ufffd", "u:B"]


async def test_halves_of_an_emoji_in_two_pieces_are_joined() -> None:
    @agent
    async def halves(turn: TurnContext) -> None:
        async def pieces() -> AsyncIterator[str]:
            yield "\ud83d"
            yield "\ude00"

        await turn.stream(pieces())

    async with verified(halves, journal=MemoryJournal()) as conversations:
        assert await (await conversations["c"].send("A")).reply() == "\U0001f600"


async def test_a_stream_that_is_begun_again_does_not_keep_what_the_first_had_brought() -> None:
    begun = anyio.Event()

    @agent
    async def retrying(turn: TurnContext) -> None:
        async def broken() -> AsyncIterator[str]:
            yield "Hello wo"
            raise ConnectionError

        async def again() -> AsyncIterator[str]:
            yield "Hello world"
            begun.set()
            await anyio.sleep_forever()

        with pytest.raises(ConnectionError):
            await turn.stream(broken())
        await turn.stream(again())

    async with verified(retrying, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("A")
        await begun.wait()
        await turn.cancel()

        assert (await turn.end()).reply == "Hello world"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("f\udcff"), "FileNotFoundError: f\ufffd"),
        (Unprintable(), "Unprintable: its text cannot be had (RuntimeError)"),
    ],
)
async def test_an_error_without_a_decent_text_is_a_result_or_an_outcome_all_the_same(
    error: Exception, said: str
) -> None:
    @agent
    async def failing(turn: TurnContext) -> None:
        async def fails(action: ActionEvent) -> str:
            if action.tool_name == "fails":
                raise error
            return "seen \udcff"

        calls = [ToolCall("fails"), ToolCall("looks")]
        results = [logged.event for logged in await turn.call_tools(calls, fails)]
        assert [e.content for e in results if isinstance(e, ObservationEvent)] == [
            said,
            "seen \ufffd",
        ]
        raise error

    async with verified(failing, journal=MemoryJournal()) as conversations:
        end = await (await conversations["c"].send("A")).end()

        assert (end.outcome, end.detail) == ("failed", said)


async def test_an_agent_cannot_use_its_turn_after_its_end() -> None:
    kept: list[TurnContext] = []

    @agent
    async def keeping(turn: TurnContext) -> None:
        kept.append(turn)

    async with verified(keeping, journal=MemoryJournal()) as conversations:
        await (await conversations["c"].send("A")).end()
        await (await conversations["c"].send("B")).end()

        with pytest.raises(TurnkeeperError):
            _ = kept[0].view
        with pytest.raises(TurnkeeperError):
            await kept[0].say("late")


# --- journals ------------------------------------------------------------------------------------


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


class Unreadable(MemoryJournal):
    is_unreadable = False

    async def read(self, conversation_id: str, *, after: int = 0, limit: int = 512):  # type: ignore[no-untyped-def] # noqa: ANN201
        if self.is_unreadable:
            raise Unavailable("no reading now")
        return await super().read(conversation_id, after=after, limit=limit)


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


# --- asyncio -------------------------------------------------------------------------------------


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancellation_that_nobody_asked_for_is_a_failure_of_its_tool_or_turn(
    anyio_backend: str,
) -> None:
    @agent
    async def cancelling(turn: TurnContext) -> None:
        async def run(action: ActionEvent) -> str:
            if action.tool_name == "cancelled":
                raise asyncio.CancelledError
            return "seen"

        calls = [ToolCall("cancelled"), ToolCall("looks")]
        results = [logged.event for logged in await turn.call_tools(calls, run)]
        await turn.say(" ".join(getattr(result, "content", "") for result in results))
        if turn.message.content == "agent":
            raise asyncio.CancelledError

    async with verified(cancelling, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        assert await (await chat.send("tool")).reply() == "CancelledError:  seen"
        for _ in range(7):  # more often than an actor may fail
            end = await (await chat.send("agent")).end()
            assert (end.outcome, end.detail) == ("failed", "CancelledError: ")
