"""Entering and leaving `Conversations` while something waits, fails or is streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Self

import anyio
import anyio.lowlevel
import pytest

from tests.actors.conversations.worlds import HeldAgent, brief, log_of, verified
from turnkeeper.actors import (
    Agent,
    Conversations,
    MemoryJournal,
    SQLiteJournal,
    Turn,
    TurnContext,
    agent,
)
from turnkeeper.actors.errors import (
    ConversationsClosed,
)
from turnkeeper.actors.journal import ConversationInfo, Listing, Record
from turnkeeper.runtime import (
    OutcomeUnknown,
    Runtime,
    TurnkeeperError,
    Unavailable,
)
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


def journal_readers(conversations: Conversations) -> Sequence[object]:
    return conversations._setup.subscriptions._live("c")


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
        listing: Listing | None = None,
    ) -> Sequence[int]:
        if conversation_id == self.name:
            raise OutcomeUnknown("no answer")
        return await super().append(
            conversation_id,
            records,
            epoch=epoch,
            expected_seq=expected_seq,
            is_unfinished=is_unfinished,
            listing=listing,
        )


async def test_a_conversation_that_cannot_be_recovered_does_not_keep_others_from_entering() -> None:
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


@asynccontextmanager
async def conversations(agent: Agent) -> AsyncIterator[Conversations]:
    async with Conversations(agent, journal=MemoryJournal(), verify="always") as opened:
        yield opened


async def test_looking_for_an_owner_while_the_conversations_are_left_says_so() -> None:
    @agent
    async def thinking(turn: TurnContext) -> None:
        await anyio.sleep_forever()

    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(conversations(thinking))
        turn = await opened["it"].send("?")
        await settle()
        await stack.aclose()
        with anyio.fail_after(60), pytest.raises(ConversationsClosed):
            await turn.end()

    heard: list[str] = []

    async def wait(turn: Turn) -> None:
        with anyio.fail_after(60):
            try:
                await turn.end()
            except ConversationsClosed as error:
                heard.append(type(error).__name__)

    async with anyio.create_task_group() as tasks:
        for moment in range(12):
            async with conversations(thinking) as opened:
                turn = await opened["it"].send("?")
                for _ in range(4):
                    tasks.start_soon(wait, turn)
                for _ in range(moment):
                    await anyio.lowlevel.checkpoint()
    assert len(heard) == 48


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_conversations_may_be_opened_and_closed_by_different_tasks(
    kind: str, tmp_path: Path
) -> None:
    journal = MemoryJournal() if kind == "memory" else SQLiteJournal(tmp_path / "chats.db")
    conversations = verified(HeldAgent(), journal=journal)
    async with anyio.create_task_group() as group:
        group.start_soon(conversations.start)
    with pytest.raises(RuntimeError, match="entered once"):
        await conversations.start()
    assert await (await conversations["c"].send("A")).reply() == "a(A)"
    async with anyio.create_task_group() as group:
        group.start_soon(conversations.aclose)
        group.start_soon(conversations.aclose)
    await conversations.aclose()  # again: nothing

    async with verified(HeldAgent(), journal=journal) as again:
        assert await log_of(again["c"]) == ["u:A", "a:a(A)"]


@pytest.mark.parametrize("where", ["a scope in the block", "another task", "an agent"])
async def test_a_block_that_is_open_is_closed_by_nothing_else(where: str) -> None:
    """Closing leaves the scopes of the task that entered it: the backends cannot mend that."""
    refused: list[str] = []

    async def close() -> None:
        with pytest.raises(RuntimeError, match="nothing was closed"):
            await opened.aclose()
        refused.append(where)

    @agent
    async def closing(_: TurnContext) -> str:
        if where == "an agent":
            await close()
        return "it goes on"

    async with verified(closing, journal=MemoryJournal()) as opened:
        assert await (await opened["c"].send("A")).reply() == "it goes on"
        if where == "another task":
            async with anyio.create_task_group() as group:
                group.start_soon(close)
        elif where == "a scope in the block":
            with anyio.CancelScope():
                await close()
        assert await (await opened["d"].send("B")).reply() == "it goes on"
    assert set(refused) == {where}
    await opened.aclose()  # it is closed: nothing


async def test_a_journal_in_memory_is_open_until_all_have_left() -> None:
    journal = MemoryJournal()
    async with verified(HeldAgent(), journal=journal) as first:
        await (await first["c"].send("A")).end()
        async with verified(HeldAgent(), journal=journal) as second:
            assert await log_of(second["c"]) == ["u:A", "a:a(A)"]
        assert await (await first["c"].send("B")).reply() == "a(B)"


async def test_a_start_that_is_closed_meanwhile_leaves_nothing_open() -> None:
    class Slow(MemoryJournal):
        async def __aenter__(self) -> Self:
            await super().__aenter__()
            entering.set()
            await let_go.wait()
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            await super().__aexit__(*exc_info)
            done.append("journal")

    entering, let_go = anyio.Event(), anyio.Event()
    conversations = Conversations(HeldAgent(), journal=Slow())
    done: list[str] = []

    async def start() -> None:
        with pytest.raises(ConversationsClosed):
            await conversations.start()

    async def close() -> None:
        await conversations.aclose()
        done.append("closed")

    async with anyio.create_task_group() as group:
        group.start_soon(start)
        await entering.wait()
        group.start_soon(close)
        await settle()
        assert done == []
        let_go.set()
    assert done == ["journal", "closed"]
    assert (conversations.is_entered, conversations.is_open) == (False, False)


async def test_a_turn_that_closes_its_own_conversations_is_told_and_they_stay_open() -> None:
    """The close waited for the turn, and the turn for the close, until it counted as stuck."""

    @agent
    async def closing(_: TurnContext) -> str:
        with pytest.raises(RuntimeError, match="a turn cannot close its own conversations"):
            await conversations.aclose()
        await others.aclose()
        return "still open"

    others = await Conversations(HeldAgent(), journal=MemoryJournal()).start()
    conversations = await Conversations(closing, journal=MemoryJournal()).start()
    assert await (await conversations["c"].send("A")).reply() == "still open"
    await conversations.aclose()


async def test_a_task_that_a_turn_has_started_may_close_its_conversations() -> None:
    @agent
    async def closing(_: TurnContext) -> None:
        group.start_soon(opened.aclose)
        await anyio.sleep_forever()

    opened = await Conversations(closing, journal=MemoryJournal()).start()
    async with anyio.create_task_group() as group:
        turn = await opened["c"].send("A")
        with pytest.raises(ConversationsClosed):
            await turn.end()


@pytest.mark.parametrize("fails", [True, False])
async def test_conversations_that_could_not_be_opened_are_closed(fails: bool) -> None:
    class Torn(MemoryJournal):
        async def find_abandoned(self) -> Sequence[ConversationInfo]:
            if fails:
                raise Unavailable("away")
            scope.cancel()
            await anyio.sleep_forever()
            raise AssertionError

    conversations = Conversations(HeldAgent(), journal=Torn())
    with anyio.CancelScope() as scope, suppress(Unavailable):
        await conversations.start()
    assert not conversations.is_entered
    assert repr(conversations).endswith("closed>")
    with pytest.raises(ConversationsClosed):
        conversations["c"]


async def test_a_block_that_was_cancelled_leaves_its_names_free_in_the_runtime() -> None:
    async with Runtime() as runtime:
        for _ in range(2):
            held = HeldAgent()
            held.hold("A")
            with anyio.CancelScope() as scope:
                async with verified(held, journal=MemoryJournal(), runtime=runtime) as opened:
                    await opened["c"].send("A")
                    await held.reached["A"].wait()
                    scope.cancel()
                    await anyio.sleep_forever()
            assert scope.cancelled_caught
            assert not runtime.tree().actors


def test_a_native_cancellation_of_a_close_leaves_no_owner_without_its_journal() -> None:
    """As by `asyncio.wait_for`: no shield keeps it out, and it comes once for each."""
    actors: list[object] = []

    class Closing(MemoryJournal):
        async def __aexit__(self, *exc_info: object) -> None:
            actors.extend(runtime.tree().actors)
            await super().__aexit__(*exc_info)

    @agent
    async def ends_slowly(turn: TurnContext) -> None:
        try:
            reached.set()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await let_go.wait()

    runtime, reached, let_go = Runtime(), anyio.Event(), anyio.Event()

    async def main() -> None:
        async with runtime:
            closing = Conversations(ends_slowly, journal=Closing(), runtime=runtime)
            await closing.start()
            await closing["c"].send("A")
            await reached.wait()
            close = asyncio.create_task(closing.aclose())
            for _ in range(2):
                await settle()
                close.cancel()
            await settle()
            assert not close.done()
            let_go.set()
            with pytest.raises(asyncio.CancelledError):
                await close
            assert not runtime.tree().actors

    asyncio.run(main())
    assert actors == []


async def test_closing_again_waits_until_the_first_close_is_done() -> None:
    class Slow(MemoryJournal):
        async def __aexit__(self, *exc_info: object) -> None:
            leaving.set()
            await let_go.wait()
            await super().__aexit__(*exc_info)

    leaving, let_go = anyio.Event(), anyio.Event()
    conversations = await Conversations(HeldAgent(), journal=Slow()).start()
    done: list[str] = []

    async def close(name: str) -> None:
        await conversations.aclose()
        done.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(close, "first")
        await leaving.wait()
        group.start_soon(close, "second")
        await settle()
        assert done == []
        let_go.set()
    assert done == ["first", "second"]
