"""`async for item in turn`: every event of a turn once, and live pieces of answers between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import anyio
import pytest

from tests.actors.conversations.turn_worlds import HALF, StepAgent, brief, events_of, until
from tests.actors.conversations.worlds import WatchedJournal, verified
from turnkeeper.actors import (
    Conversation,
    LoggedEvent,
    MemoryJournal,
    TextDelta,
    Turn,
    TurnContext,
    agent,
)
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import ConversationsClosed, InvalidInput
from turnkeeper.actors.events import AgentMessageEvent
from turnkeeper.actors.journal import Record
from turnkeeper.runtime import AskCycle, Unavailable

pytestmark = pytest.mark.anyio

Item = LoggedEvent | TextDelta


class Follower:
    """Goes over a turn beside the test, and keeps what came."""

    def __init__(self, turn: Turn) -> None:
        self.items: list[Item] = []
        self.turn = turn
        self.is_done = False

    async def follow(self) -> None:
        async for item in self.turn:
            self.items.append(item)
        self.is_done = True

    @property
    def events(self) -> list[LoggedEvent]:
        return [item for item in self.items if isinstance(item, LoggedEvent)]

    @property
    def pieces(self) -> str:
        return "".join(item.text for item in self.items if isinstance(item, TextDelta))

    @property
    def line(self) -> str:
        return brief(*(logged.event for logged in self.events))

    def check_once_in_order(self) -> None:
        seqs = [logged.seq for logged in self.events]
        assert seqs == sorted(set(seqs))


async def _pieces(count: int) -> AsyncIterator[str]:
    for n in range(count):
        yield f"{n} "


@agent
async def writes(turn: TurnContext) -> None:
    """As many pieces as the chat message says."""
    await turn.stream(_pieces(int(turn.message.content)))


async def _followed(turn: Turn) -> Follower:
    follower = Follower(turn)
    await follower.follow()
    return follower


async def test_a_turn_gives_all_its_events_once_and_its_pieces_between_them() -> None:
    async with verified(StepAgent({"A": "calls call"}), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        followed = await _followed(await chat.send("A"))

        assert followed.is_done
        assert followed.line == "uA call call result result call result aA completed"
        followed.check_once_in_order()
        events = await events_of(chat)
        assert [logged.event for logged in followed.events] == events[1:]
        # The piece comes before the answer that it is of, and after all else.
        pieces = [n for n, item in enumerate(followed.items) if isinstance(item, TextDelta)]
        answer = next(
            n
            for n, item in enumerate(followed.items)
            if isinstance(item, LoggedEvent) and isinstance(item.event, AgentMessageEvent)
        )
        assert pieces == [answer - 1]
        assert followed.pieces == HALF


async def test_pieces_come_in_order_and_make_the_answer() -> None:
    is_followed = anyio.Event()

    @agent
    async def waits_and_writes(turn: TurnContext) -> None:
        await is_followed.wait()
        await turn.stream(_pieces(100))

    async with verified(waits_and_writes, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("A")
        followed = Follower(turn)
        async with anyio.create_task_group() as group:
            group.start_soon(followed.follow)
            await anyio.wait_all_tasks_blocked()
            is_followed.set()

        assert followed.pieces == await turn.reply()
        deltas = [item for item in followed.items if isinstance(item, TextDelta)]
        assert 1 < len(deltas) <= 100  # those that came before it looked are one
        assert {delta[:4] for delta in deltas} == {(1, turn.turn_id, 0, 1)}
        assert [delta.offset for delta in deltas] == [
            sum(len(before.text) for before in deltas[:n]) for n in range(len(deltas))
        ]


async def test_the_pieces_come_also_where_all_was_said_before_the_follower_began_to_read() -> None:
    """Of an agent that never waits, as a scripted one is: its pieces wait for a reader."""
    async with verified(writes, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("100")
        items = aiter(turn)
        await turn.end()

        follower = Follower(turn)
        follower.items = [item async for item in items]

        assert follower.pieces == await turn.reply()
        assert isinstance(follower.items[0], LoggedEvent)
        assert follower.line.startswith("u100 a0 1 2")


async def test_a_follower_that_falls_behind_gets_what_it_missed_as_one_piece() -> None:
    """From where it was; of any number of pieces, also if events come between them."""
    go_on, wrote = anyio.Event(), anyio.Event()

    @agent
    async def writes_much(turn: TurnContext) -> None:
        write = turn.writer()
        await write("0 ")
        await go_on.wait()
        for n in range(1, Limits().buffered_events_max + 20):
            await write(f"{n} ")
        wrote.set()
        await turn.say("much")
        await turn.stream(_pieces(3))

    async with verified(writes_much, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("A")
        items = aiter(turn)
        follower = Follower(turn)
        follower.items = [await anext(items), await anext(items)]
        go_on.set()
        await turn.end()

        follower.items += [item async for item in items]

        assert follower.line == "uA amuch a0 1 2  completed"
        much = "".join(f"{n} " for n in range(Limits().buffered_events_max + 20))
        deltas = [item for item in follower.items if isinstance(item, TextDelta)]
        assert [delta[2:] for delta in deltas] == [
            (0, 1, 0, "0 "),
            (0, 1, 2, much.removeprefix("0 ")),
            (1, 1, 0, "0 1 2 "),
        ]


async def test_a_follower_that_comes_in_the_middle_gets_what_was_said_as_its_first_piece() -> None:
    wrote, go_on = anyio.Event(), anyio.Event()

    @agent
    async def writes_on(turn: TurnContext) -> None:
        write = turn.writer()
        await write("one ")
        await write("two ")
        wrote.set()
        await go_on.wait()
        await write("three")
        await turn.say("one two three")

    async with verified(writes_on, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("A")
        await wrote.wait()
        await conversations["c"].view()  # by now it has been published
        follower = Follower(turn)
        async with anyio.create_task_group() as group:
            group.start_soon(follower.follow)
            await anyio.wait_all_tasks_blocked()
            assert follower.pieces == "one two "
            go_on.set()

        pieces = [item[2:] for item in follower.items if isinstance(item, TextDelta)]
        assert pieces == [(0, 1, 0, "one two "), (0, 1, 8, "three")]
        assert follower.line == "uA aone two three completed"


async def test_an_attempt_that_begins_anew_says_so() -> None:
    @agent
    async def tries_twice(turn: TurnContext) -> None:
        for attempt in ("first ", "second "):
            write = turn.writer()
            await write(attempt)
            await write("try")
        await turn.say("second try")

    async with verified(tries_twice, journal=MemoryJournal()) as conversations:
        followed = await _followed(await conversations["c"].send("A"))

        text = ""
        for item in followed.items:
            if isinstance(item, TextDelta):
                text = text[: item.offset] + item.text
        assert text == "second try"


async def test_a_follower_that_comes_late_gets_all_events_and_no_pieces() -> None:
    async with verified(StepAgent({"A": "calls"}), journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("A")
        await turn.end()

        followed = await _followed(turn)

        assert followed.line == "uA call call result result aA completed"
        assert followed.pieces == ""


async def test_a_follower_that_comes_in_the_middle_gets_all_events() -> None:
    steps = StepAgent({"A": "calls"})
    steps.hold("A thinks 1")
    async with verified(steps, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("A")
        await steps.reached["A thinks 1"].wait()
        steps.release()

        followed = await _followed(turn)

        assert followed.line == "uA call call result result aA completed"


async def test_a_slow_follower_delays_no_other_and_misses_nothing() -> None:
    """The turn does not wait for it, and ends while it stands still."""
    pieces = Limits().buffered_events_max * 3
    async with verified(writes, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send(str(pieces))
        items = aiter(turn)
        first = await anext(items)
        await turn.end()

        rest = [item async for item in items]

        follower = Follower(turn)
        follower.items = [first, *rest]
        assert follower.line.startswith("u768 a0 1 2")
        assert follower.line.endswith("completed")
        follower.check_once_in_order()
        assert len(rest) < pieces
        assert follower.pieces == await turn.reply()


class FailsAt(WatchedJournal):
    """Cannot be reached when the append of a kind comes, once."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind: str | None = kind

    async def before_append(self, records: Sequence[Record]) -> None:
        if self.kind in {record.kind for record in records}:
            self.kind = None
            raise Unavailable("the journal cannot be reached; nothing was written")


@pytest.mark.parametrize("kind", ["action", "observation", "agent_message", "turn_ended"])
async def test_a_follower_goes_on_over_an_owners_restart(kind: str) -> None:
    journal = FailsAt(kind)
    steps = StepAgent({"A": "call"})
    async with verified(steps, journal=journal, unfinished="resume") as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")

        with anyio.fail_after(60):
            followed = await _followed(turn)

        assert journal.kind is None
        assert [logged.event for logged in followed.events] == (await events_of(chat))[1:]
        assert followed.line.endswith("aA completed")
        followed.check_once_in_order()


async def _steer_into(steps: StepAgent, chat: Conversation) -> tuple[Turn, Turn]:
    """A's turn, and B, which has joined it; A thinks about its second step."""
    steps.hold("A calls", "A thinks 1")
    first = await chat.send("A")
    await steps.reached["A calls"].wait()
    second = await chat.send("B", message_id="B", on_overlap="steer")
    return first, second


async def test_a_message_that_joins_a_turn_shows_that_turn_from_there_on() -> None:
    steps = StepAgent({"A": "call"})
    async with verified(steps, journal=MemoryJournal()) as conversations:
        turns = await _steer_into(steps, conversations["c"])
        followers = [Follower(turn) for turn in turns]
        async with anyio.create_task_group() as group:
            for follower in followers:
                group.start_soon(follower.follow)
            await anyio.wait_all_tasks_blocked()
            steps.release()

        assert followers[0].line == "uA call result uB aA+B completed"
        assert followers[1].line == "qB uB aA+B completed"
        assert [follower.pieces for follower in followers] == [HALF, HALF]


async def test_a_message_whose_turn_is_rolled_back_shows_its_next_one() -> None:
    steps = StepAgent({"A": "call"})
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turns = await _steer_into(steps, chat)
        followers = [Follower(turn) for turn in turns]
        async with anyio.create_task_group() as group:
            for follower in followers:
                group.start_soon(follower.follow)
            await anyio.wait_all_tasks_blocked()
            steps.held["A calls"].set()
            await steps.reached["A thinks 1"].wait()
            await chat.send("C", on_overlap="rollback")

        assert followers[0].line == "uA call result uB retracted rolled-back"
        assert followers[1].line == "qB uB qB-again started uB aB completed"
        assert (await turns[1].end()).reply == "B"
        late = await _followed(turns[1])
        assert late.line == followers[1].line


async def test_a_message_that_waits_shows_nothing_of_the_turn_before_its_own() -> None:
    steps = StepAgent()
    steps.hold("A thinks")
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        followers = [Follower(await chat.send(name)) for name in ("A", "B")]
        async with anyio.create_task_group() as group:
            for follower in followers:
                group.start_soon(follower.follow)
            await anyio.wait_all_tasks_blocked()
            steps.release()

        assert [f.line for f in followers] == ["uA aA completed", "qB started uB aB completed"]
        assert [f.pieces for f in followers] == [HALF, HALF]


async def test_a_piece_keeps_its_place_among_the_events_of_its_batch() -> None:
    start, go_on, gate = anyio.Event(), anyio.Event(), anyio.Event()
    gate.set()

    class Held(WatchedJournal):
        async def before_append(self, records: Sequence[Record]) -> None:
            await gate.wait()

    @agent
    async def writes_on(turn: TurnContext) -> None:
        if turn.message.content == "A":
            write = turn.writer()
            await start.wait()
            await write("one ")
            await go_on.wait()
            await write("two")
            await turn.say("one two")

    async with verified(writes_on, journal=Held()) as conversations:
        chat = conversations["c"]
        followed = Follower(await chat.send("A"))
        async with anyio.create_task_group() as group:
            group.start_soon(followed.follow)
            await anyio.wait_all_tasks_blocked()
            start.set()
            await anyio.wait_all_tasks_blocked()
            gate = anyio.Event()
            group.start_soon(chat.send, "B")  # its commit is held; what comes now is one batch
            await anyio.wait_all_tasks_blocked()
            group.start_soon(chat.send, "C")
            await anyio.wait_all_tasks_blocked()
            go_on.set()
            await anyio.wait_all_tasks_blocked()
            gate.set()

        assert followed.pieces == "one two"
        assert followed.line == "uA aone two completed"


async def test_a_piece_written_while_a_commit_is_under_way_comes_after_its_events() -> None:
    """The agent says one thing and writes the next beside it: the owner decides in that order."""
    go_on, gate = anyio.Event(), anyio.Event()

    class Held(WatchedJournal):
        async def before_append(self, records: Sequence[Record]) -> None:
            if any(record.kind == "agent_message" for record in records):
                await gate.wait()

    @agent
    async def says_and_writes(turn: TurnContext) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(turn.say, "one")
            await go_on.wait()
            await turn.writer()("two")
        await turn.say("two")

    async with verified(says_and_writes, journal=Held()) as conversations:
        followed = Follower(await conversations["c"].send("A"))
        async with anyio.create_task_group() as group:
            group.start_soon(followed.follow)
            await anyio.wait_all_tasks_blocked()
            go_on.set()
            await anyio.wait_all_tasks_blocked()
            assert followed.pieces == ""
            gate.set()

        said = [
            item.text if isinstance(item, TextDelta) else getattr(item.event, "content", "")
            for item in followed.items
        ]
        assert said == ["A", "one", "two", "two", ""]


async def test_a_message_that_is_withdrawn_ends_with_that() -> None:
    steps = StepAgent()
    steps.hold("A thinks")
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        turn = await chat.send("B", message_id="B")
        await turn.cancel()

        assert (await _followed(turn)).line == "qB wB"


async def test_a_follower_hears_that_the_conversations_are_left() -> None:
    steps = StepAgent()
    steps.hold("A thinks")
    heard: list[str] = []
    async with (
        anyio.create_task_group() as group,
        verified(steps, journal=MemoryJournal()) as conversations,
    ):
        turn = await conversations["c"].send("A")
        follower = Follower(turn)

        async def follow() -> None:
            try:
                await follower.follow()
            except ConversationsClosed:
                heard.append("closed")

        group.start_soon(follow)
        await anyio.wait_all_tasks_blocked()

    assert heard == ["closed"]
    assert follower.line == "uA"


async def test_a_cancelled_follower_loses_nothing() -> None:
    """Its wait was cancelled, as by a timeout; it goes on where it was."""
    steps = StepAgent({"A": "call"})
    steps.hold("A calls")
    async with verified(steps, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("A")
        follower = Follower(turn)
        items = aiter(turn)
        await steps.reached["A calls"].wait()
        follower.items += [await anext(items), await anext(items), await anext(items)]
        for _ in range(3):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await anext(items)
        steps.release()

        follower.items += [item async for item in items]

        assert follower.line == "uA call result aA completed"
        follower.check_once_in_order()


async def test_following_a_turn_that_would_have_to_wait_for_this_one_is_refused() -> None:
    heard: list[type[BaseException]] = []

    @agent
    async def delegates(turn: TurnContext) -> None:
        if turn.message.content == "A":
            queued = await chat.send("B")
            try:
                async for _ in queued:
                    pass
            except AskCycle as cycle:
                heard.append(type(cycle))
        await turn.say("done")

    async with verified(delegates, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        assert heard == [AskCycle]


async def test_a_turn_may_follow_an_earlier_one_of_its_own_conversation() -> None:
    followed: list[str] = []

    @agent
    async def looks_back(turn: TurnContext) -> str:
        if turn.message.content == "B":
            earlier = await chat.turn("A")
            followed.extend(
                [item.event.kind async for item in earlier if isinstance(item, LoggedEvent)]
            )
        return "done"

    async with verified(looks_back, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A", message_id="A")).reply()
        assert await (await chat.send("B")).reply() == "done"
    assert followed == ["user_message", "agent_message", "turn_ended"]


async def test_many_followers_of_one_turn_see_the_same() -> None:
    steps = StepAgent({"A": "calls"})
    steps.hold("A thinks 0")
    async with verified(steps, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("A")
        followers = [Follower(turn) for _ in range(20)]
        async with anyio.create_task_group() as group:
            for follower in followers:
                group.start_soon(follower.follow)
            await until(conversations["c"], "user_message")
            steps.release()

        assert {follower.line for follower in followers} == {
            "uA call call result result aA completed"
        }
        assert {follower.pieces for follower in followers} == {HALF}


async def test_a_whole_conversation_is_followed_with_the_pieces_of_its_answers() -> None:
    """Also one that does not exist yet; it ends where the conversations are left."""
    items: list[Item] = []
    async with (
        anyio.create_task_group() as group,
        verified(StepAgent(), journal=MemoryJournal()) as conversations,
    ):
        chat = conversations["c"]
        with pytest.raises(InvalidInput):
            chat.follow(after=-1)

        async def follow() -> None:
            items.extend([item async for item in chat.follow()])

        group.start_soon(follow)
        await anyio.wait_all_tasks_blocked()
        for name in ("A", "B"):
            await (await chat.send(name)).end()
        events = await events_of(chat)
        later = aiter(chat.follow(after=4))
        seqs = [getattr(await anext(later), "seq", None) for _ in range(len(events) - 4)]

    assert [item.event for item in items if isinstance(item, LoggedEvent)] == events
    assert [item.text for item in items if isinstance(item, TextDelta)] == [HALF, HALF]
    assert seqs == list(range(5, len(events) + 1))
