"""The pieces of answers: any readers, any agent, and whatever comes between, at random.

Each history draws what an agent writes, begins anew, says and calls, and beside it messages that
wait or interrupt, events appended by hand, failures of the owner, and readers that come, go, fall
behind and catch up. Every reader's items are then held against what the agent wrote and the log.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

import anyio
import anyio.abc
import pytest

from tests.actors.conversations.worlds import WatchedJournal, brief
from tests.drawn import first_seed, is_whole
from turnkeeper.actors import (
    Conversation,
    Conversations,
    Event,
    LoggedEvent,
    MemoryJournal,
    ModelRequest,
    OnOverlap,
    ScriptedModel,
    TextDelta,
    ToolCall,
    TurnContext,
    agent,
)
from turnkeeper.actors.conversations.conversation import Follower
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import AnswerTooLong, InvalidInput, NotWhileTurnRuns
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    CondensationRequestEvent,
    StepFinishedEvent,
    TurnEndedEvent,
)
from turnkeeper.actors.journal import Listing, Record
from turnkeeper.actors.values.text import hold_back_half, storable
from turnkeeper.runtime import OutcomeUnknown, Runtime, Unavailable
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio

HISTORIES = 400 if is_whole() else 12
MOVES = 40
LIMITS = Limits(buffered_events_max=4, read_page=3)
PARTS = ("a", "bc ", "", "\U0001f600", "\ud83d", "\ude00", "\ud83d\ude00", "x\ud83d", "é" * 9)


class FailsOnce(WatchedJournal):
    fails = False

    async def before_append(self, records: Sequence[Record]) -> None:
        if self.fails:
            self.fails = False
            raise Unavailable("the journal cannot be reached; nothing was written")


class Puppet:
    """Does in its turn what it is told, and knows what it wrote."""

    is_resumable: ClassVar[bool] = True

    def __init__(self) -> None:
        self.orders, self._taken = anyio.create_memory_object_stream[tuple[str, str]](1_000)
        self.attempts = 0
        self.writing: str | None = None
        """The attempt that it writes; None if none is begun since the last answer."""
        self.finished: dict[str, str] = {}
        """By the id of the event that ended it: the last attempt."""

    async def run(self, turn: TurnContext) -> None:
        write = None
        self.writing = None
        await turn.run_calls(tuple(turn.open_calls.values()), self._look)
        while True:
            order, text = await self._taken.receive()
            match order:
                case "write" | "anew":
                    if write is None or order == "anew":
                        write = turn.writer()
                        self.attempts += 1
                        text, self.writing = f"{self.attempts}:{text}", ""
                    assert self.writing is not None
                    self.writing += text
                    await write(text)
                case "say" | "say other":
                    text = self.writing or "" if order == "say" else "something else"
                    logged = await turn.say(text)
                    self.finished[logged.event.id] = self.writing or ""
                    write = self.writing = None
                case "call":
                    (action,) = await turn.propose_calls(
                        [ToolCall("look")], text=self.writing or ""
                    )
                    self.finished[action.id] = self.writing or ""
                    write = self.writing = None
                    await turn.run_calls([action], self._look)
                case _:
                    self.writing = None
                    return

    async def _look(self, action: ActionEvent) -> str:
        return "seen"

    def close(self) -> None:
        self.orders.close()
        self._taken.close()


@dataclass
class Reader:
    """Reads as far as it may; `may` is None for one that reads all that comes."""

    after: int
    may: int | None
    items: list[LoggedEvent | TextDelta] = field(default_factory=list)
    short: set[int] = field(default_factory=set)
    """The seqs of the events that replaced pieces which did not all come."""
    was_slow: bool = False
    came_at: int = 0
    """The end of the log when it came."""
    is_of_turn: bool = False
    """It reads from an event that is known to be in the log, as the reader of a turn does."""
    wakes: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def read(self, chat: Conversation) -> None:
        with self.scope:
            items = chat.follow(after=self.after)
            if self.is_of_turn:
                reader = chat._turn_access().follow(self.after + 1, pieces=True)
                items = Follower(reader)
            while True:
                while self.may == 0:
                    self.wakes = anyio.Event()
                    await self.wakes.wait()
                self.items.append(item := await anext(items))
                if isinstance(item, LoggedEvent) and items.is_short_of(item):
                    self.short.add(item.seq)
                if self.may is not None:
                    self.may -= 1

    def allow(self, count: int | None) -> None:
        self.may = count
        self.wakes.set()

    @property
    def shown(self) -> str:
        """The answer as the newest pieces make it, if no event has replaced it."""
        text = ""
        for item in self.items:
            if isinstance(item, TextDelta):
                text = text[: item.offset] + item.text
            elif _ends_answer(item.event):
                text = ""
        return text


def _ends_answer(event: Event) -> bool:
    is_answer = isinstance(event, AgentMessageEvent | ActionEvent | TurnEndedEvent)
    return is_answer and event.turn_id is not None


class History:
    def __init__(self, seed: int, chat: Conversation, puppet: Puppet, journal: FailsOnce) -> None:
        self.random = Random(seed)
        self.chat = chat
        self.puppet = puppet
        self.journal = journal
        self.readers: list[Reader] = []
        self.sent = 0
        self.may_crash = seed % 4 == 0  # rarely: another owner is started only after a while

    async def play(self, group: anyio.abc.TaskGroup) -> None:
        await self.send("queue")
        self.join(group, after=0, may=None)
        for _ in range(MOVES):
            await self.move(group)
            await settle()
            self.check_now()
        for _ in range(self.sent + 1):
            await self.order("end")
        async for logged in self.chat.events():
            if isinstance(logged.event, TurnEndedEvent) and not await self.is_unfinished():
                break
        for reader in self.readers:
            reader.allow(None)
        await settle()
        for reader in self.readers:
            reader.scope.cancel()

    async def is_unfinished(self) -> bool:
        turns = (await self.chat.at()).turns
        return turns.has_open_turns

    async def move(self, group: anyio.abc.TaskGroup) -> None:
        draw = self.random
        moves = {
            "write": 12, "anew": 2, "say": 2, "say other": 1, "call": 2, "end": 1, "queue": 1,
            "interrupt": 1, "by hand": 1, "answer by hand": 1, "crash": 1, "join": 3,
            "join a turn": 3, "leave": 1, "allow": 4,
        }  # fmt: skip
        match draw.choices(list(moves), list(moves.values()))[0]:
            case "write" | "anew" | "say" | "say other" | "call" | "end" as name:
                await self.order(name)
            case "queue":
                await self.send("queue")
            case "interrupt":
                await self.send("interrupt")
            case "by hand":
                await self.chat.append(CondensationRequestEvent())
            case "answer by hand":
                running = (await self.chat.at()).turns.running
                if running is not None:
                    await self.chat.append(AgentMessageEvent(content="by hand"))
                    said = AgentMessageEvent(turn_id=running.turn_id, content="by hand")
                    with pytest.raises(NotWhileTurnRuns, match="append of its answer"):
                        await self.chat.append(said)
            case "crash" if self.may_crash:
                self.may_crash = False
                self.journal.fails = True
                with suppress(Unavailable):
                    await self.chat.append(CondensationRequestEvent())
                await self.chat.view()
            case "join":
                head = (await self.chat.at()).seq
                may = draw.choice((None, None, 0, 3))
                self.join(group, after=draw.choice((0, head)), may=may, came_at=head)
            case "join a turn":
                head = (await self.chat.at()).seq
                may, after = draw.choice((None, None, 0, 3)), draw.randrange(head)
                self.join(group, after=after, may=may, came_at=head, is_of_turn=True)
            case "leave":
                draw.choice(self.readers[1:] or [Reader(0, 0)]).scope.cancel()
            case "allow":
                slow = [reader for reader in self.readers if reader.was_slow]
                if slow:
                    draw.choice(slow).allow(draw.choice((1, 2, 5, None)))
            case _:
                pass

    async def order(self, name: str) -> None:
        text = "".join(self.random.choices(PARTS, k=self.random.randrange(3)))
        await self.puppet.orders.send((name, text))

    async def send(self, on_overlap: OnOverlap) -> None:
        if on_overlap == "queue" or self.sent:
            self.sent += 1
            await self.chat.send(f"m{self.sent}", on_overlap=on_overlap)

    def join(
        self,
        group: anyio.abc.TaskGroup,
        *,
        after: int,
        may: int | None,
        came_at: int = 0,
        is_of_turn: bool = False,
    ) -> None:
        was_slow = may is not None
        reader = Reader(after, may, was_slow=was_slow, came_at=came_at, is_of_turn=is_of_turn)
        self.readers.append(reader)
        group.start_soon(reader.read, self.chat)

    # --- what must hold --------------------------------------------------------------------------

    def check_now(self) -> None:
        """A reader that keeps up shows what is written so far, whenever it came."""
        if self.puppet.writing is not None:
            written, _ = hold_back_half(self.puppet.writing)
            for reader in self.readers:
                if reader.may is None and not reader.scope.cancel_called:
                    assert reader.shown == written

    def check_reader(self, reader: Reader, log: Sequence[Event]) -> None:
        answers: dict[str | None, int] = {}
        response = None
        cursor = 0
        newest: TextDelta | None = None
        shown = ""

        def go_to(seq: int) -> None:
            """Count the answers of each turn up to this place of the log."""
            nonlocal cursor, response
            for event in log[cursor:seq]:
                is_message = isinstance(event, AgentMessageEvent)
                if is_message or (
                    isinstance(event, ActionEvent) and event.llm_response_id != response
                ):
                    answers[event.turn_id] = answers.get(event.turn_id, 0) + 1
                if isinstance(event, ActionEvent):
                    response = event.llm_response_id
            cursor = seq

        go_to(reader.after)
        for item in reader.items:
            if isinstance(item, TextDelta):
                assert item.text, "an empty piece"
                assert item.answer == answers.get(item.turn_id, 0)
                if newest is not None and newest[:4] == item[:4]:
                    assert item.offset == len(shown)
                else:
                    assert item.offset == 0
                    if newest is not None and newest[1:3] == item[1:3]:
                        assert (item.epoch, item.attempt) > (newest.epoch, newest.attempt)
                shown, newest = shown[: item.offset] + item.text, item
                continue
            assert item.seq == cursor + 1
            assert item.event == log[item.seq - 1]
            go_to(item.seq)
            if not _ends_answer(item.event):
                continue
            said, shown = shown, ""
            finished = self.puppet.finished.get(item.event.id)
            if finished:
                assert said in {storable(finished), ""}
                assert not said or item.seq not in reader.short
                assert said or reader.was_slow or item.seq <= reader.came_at
            elif isinstance(item.event, AgentMessageEvent) and item.event.interrupted:
                assert said in {item.event.content, ""}
                assert not said or item.seq not in reader.short
                assert said or reader.was_slow or item.seq <= reader.came_at


async def _play(seed: int) -> None:
    puppet, journal = Puppet(), FailsOnce()
    async with Conversations(
        puppet, journal=journal, unfinished="resume", limits=LIMITS
    ) as conversations:
        history = History(seed, conversations["c"], puppet, journal)
        async with anyio.create_task_group() as group:
            await history.play(group)
        log = [logged.event async for logged in conversations["c"].events(live=False)]
        for reader in history.readers:
            history.check_reader(reader, log)
    puppet.close()


async def test_the_pieces_of_an_answer_make_what_was_written_for_every_reader() -> None:
    for seed in range(first_seed(), first_seed() + HISTORIES):
        try:
            await _play(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize(
    ("pieces", "shown", "said"),
    [
        (["\ud83d", "\ude00"], ["\U0001f600"], "\U0001f600"),
        (["a\ud83d", "b"], ["a", "�b"], "a�b"),
        (["\ude00a"], ["�a"], "�a"),
        (["a\ud83d"], ["a", "�"], "a�"),
        (["\ud83d", "\ud83d", "\ude00"], ["�", "\U0001f600"], "�\U0001f600"),
    ],
)
async def test_half_a_character_is_held_back_and_mended_if_it_stays_half(
    pieces: list[str], shown: list[str], said: str
) -> None:
    """Counted in code points, as the text is that the reader has."""

    @agent
    async def writes(turn: TurnContext) -> None:
        await go_on.wait()
        write = turn.writer()
        for piece in pieces:
            await write(piece)
            await settle()
        await turn.say("".join(pieces))

    go_on = anyio.Event()
    async with Conversations(writes, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("A")
        deltas: list[TextDelta] = []

        async def follow() -> None:
            async for item in turn:
                deltas.extend([item] if isinstance(item, TextDelta) else [])

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await settle()
            go_on.set()

        assert [delta.text for delta in deltas] == shown
        assert [delta.offset for delta in deltas] == [
            len("".join(shown[:n])) for n in range(len(shown))
        ]
        assert await turn.reply() == said


class HoldsAnswer(MemoryJournal):
    """Writes an answer, and tells its owner only later, or never."""

    def __init__(self, *, loses: bool) -> None:
        super().__init__()
        self.written, self.gate = anyio.Event(), anyio.Event()
        self._loses = loses

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
        seqs = await super().append(
            conversation_id,
            records,
            epoch=epoch,
            expected_seq=expected_seq,
            is_unfinished=is_unfinished,
            listing=listing,
        )
        if any(record.kind == "agent_message" for record in records):
            self.written.set()
            await self.gate.wait()
            if self._loses:
                raise OutcomeUnknown("the line was lost after the write")
        return seqs


@pytest.mark.parametrize("loses", [False, True])
async def test_who_reads_the_journal_gets_the_last_pieces_before_the_answer(*, loses: bool) -> None:
    """Also one that reads it when the answer is there and is not published yet."""

    @agent
    async def writes(turn: TurnContext) -> None:
        await turn.writer()("a\ud83d")
        await settle()
        await turn.say("a\ud83d")

    journal = HoldsAnswer(loses=loses)
    items: list[str] = []
    async with Conversations(writes, journal=journal) as conversations:
        chat = conversations["c"]

        async def follow() -> None:
            async for item in chat.follow():
                said = item.text if isinstance(item, TextDelta) else brief(item.event)
                items.append(said)

        turn = await chat.send("A")
        await journal.written.wait()
        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await settle()
            assert items == ["started", "u:A", "a"]
            journal.gate.set()
            await turn.end()
            await settle()
            group.cancel_scope.cancel()

    pieces, end = (["a"], "interrupted") if loses else (["a", "�"], "completed")
    assert items == ["started", "u:A", *pieces, "a:a�", end]


async def test_events_come_between_pieces_that_are_always_there() -> None:
    """A model is often faster than a client reads, and another user's message waits meanwhile."""
    writing: list[Callable[[str], Awaitable[None]]] = []
    has_begun = anyio.Event()

    @agent
    async def writes(turn: TurnContext) -> None:
        writing.append(turn.writer())
        has_begun.set()
        await anyio.sleep_forever()

    items: list[str] = []
    async with Conversations(writes, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await has_begun.wait()
        (write,) = writing
        reader = chat.follow()

        async def read() -> None:
            await write("w")  # so that a piece is there, whenever the reader asks
            item = await anext(reader)
            items.append(item.text if isinstance(item, TextDelta) else brief(item.event))

        for _ in range(4):
            await read()
        await chat.send("B")
        for _ in range(2):
            await read()

    assert items == ["started", "u:A", "www", "w", "queued:B", "ww"]


async def test_who_begins_after_an_answer_in_the_journal_gets_no_pieces_of_it() -> None:
    """Its owner has not heard yet that it is written, and is as if it were still writing."""

    @agent
    async def writes(turn: TurnContext) -> None:
        await turn.writer()(turn.message.content)
        await settle()
        await turn.say(turn.message.content)

    journal = HoldsAnswer(loses=False)
    items: list[str] = []
    async with Conversations(writes, journal=journal) as conversations:
        chat = conversations["c"]
        first = await chat.send("A")
        await journal.written.wait()
        head = (await journal.info("c")).head

        async def follow() -> None:
            async for item in chat.follow(after=head):
                said = item.text if isinstance(item, TextDelta) else brief(item.event)
                items.append(said)

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await settle()
            assert items == []
            journal.gate.set()
            await first.end()
            await (await chat.send("B")).end()
            await settle()
            group.cancel_scope.cancel()

    assert items == ["completed", "started", "u:B", "B", "a:B", "completed"]


class HoldsQueued(WatchedJournal):
    """Holds the commit of a message that waits for its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.is_holding, self.gate = anyio.Event(), anyio.Event()

    async def before_append(self, records: Sequence[Record]) -> None:
        if records[0].kind == "message_queued":
            self.is_holding.set()
            await self.gate.wait()


@pytest.mark.parametrize("is_busy", [False, True])
async def test_an_answer_that_ended_while_nobody_read_shows_no_pieces_later(
    *, is_busy: bool
) -> None:
    """Also if its only piece and its end, an interrupt, wait for the owner and make one batch."""
    goes_on = anyio.Event()

    @agent
    async def writes(turn: TurnContext) -> None:
        await goes_on.wait()
        if turn.message.content == "A":
            await turn.writer()("A")
        await turn.say(turn.message.content)

    journal = HoldsQueued()
    items: list[str] = []
    async with Conversations(writes, journal=journal) as conversations:
        chat = conversations["c"]

        async def follow() -> None:
            async for item in chat.follow(after=0):
                said = item.text if isinstance(item, TextDelta) else brief(item.event)
                items.append(said)

        first = await chat.send("A")
        async with anyio.create_task_group() as group:
            if is_busy:
                group.start_soon(chat.send, "B")
                await journal.is_holding.wait()
            goes_on.set()
            await settle()
            if is_busy:
                group.start_soon(first.cancel)
                await settle()
            journal.gate.set()
        await settle()

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await settle()
            group.cancel_scope.cancel()

    if is_busy:
        of_second = ["started", "u:B", "a:B", "completed"]
        assert items == ["started", "u:A", "queued:B", "a:A", "interrupted", *of_second]
    else:
        assert items == ["started", "u:A", "a:A", "completed"]


@pytest.mark.parametrize("way", ["streams", "says", "calls", "swallows"])
async def test_an_answer_that_gets_too_long_fails_its_turn(way: str) -> None:
    """What was streamed before is kept, as after any failure; the next turn is answered."""

    @agent
    async def writes(turn: TurnContext) -> None:
        if turn.message.content != "A":
            await turn.say("ten chars.")
            return
        write = turn.writer()
        await write("12345")
        if way == "says":
            await turn.say("eleven cha.")
        elif way == "calls":
            await turn.propose_calls([ToolCall("look")], text="eleven cha.")
        elif way == "streams":
            await write("678901")
            await turn.say("short")
        else:
            with suppress(Exception):
                await write("678901")
            with suppress(Exception):
                await turn.say("short")

    async with Conversations(
        writes, journal=MemoryJournal(), answer_length_max=10
    ) as conversations:
        chat = conversations["c"]
        first, second = await chat.send("A"), await chat.send("B")
        end = await first.end()

        assert (end.outcome, end.reply) == ("failed", "12345")
        assert end.detail.startswith(f"{AnswerTooLong.__name__}: ")
        assert "10 characters" in end.detail
        assert await second.reply() == "ten chars."


async def test_pieces_that_come_at_once_do_not_go_through_the_mailbox() -> None:
    """A provider's chunks come many to a packet: only the first finds the owner not at rest."""
    handled: list[int] = []

    @agent
    async def writes(turn: TurnContext) -> None:
        write = turn.writer()
        for number in range(20):
            await write(f"{number} ")
            handled.append(sum(actor.handled for actor in runtime.tree().walk()))
        await turn.say("so many")

    async with (
        Runtime() as runtime,
        Conversations(writes, journal=MemoryJournal(), runtime=runtime) as conversations,
    ):
        assert await (await conversations["c"].send("count")).reply() == "so many"

    assert handled[-1] - handled[0] <= 1, handled


async def test_a_step_sends_its_owner_at_rest_no_message_but_its_events() -> None:
    """Neither the note of what the model is asked nor a piece of its answer goes by the mailbox."""
    model = ScriptedModel(["hello", "one two three"])

    async def handled() -> int:
        await settle()
        return sum(actor.handled for actor in runtime.tree().walk())

    @agent
    async def asks(turn: TurnContext) -> None:
        before = await handled()
        response = await turn.ask(model, ModelRequest(turn.view))
        assert await handled() == before
        await turn.say(response.text, usage=response.usage)

    async with (
        Runtime() as runtime,
        Conversations(asks, journal=MemoryJournal(), runtime=runtime) as conversations,
    ):
        chat = conversations["c"]
        for said in ("hello", "one two three"):
            assert await (await chat.send("and now?")).reply() == said
        log = [logged.event async for logged in chat.events(live=False)]

    steps = [event for event in log if isinstance(event, StepFinishedEvent)]
    assert [step.request is not None for step in steps] == [True, True]


def test_a_limit_that_no_answer_fits_is_refused() -> None:
    @agent
    async def answers(turn: TurnContext) -> None:
        await turn.say("")

    with pytest.raises(InvalidInput, match="answer_length_max is 0"):
        Conversations(answers, journal=MemoryJournal(), answer_length_max=0)
