"""Calls in another event loop are refused: nothing there would ever wake them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from sniffio import current_async_library

from tests.actors.conversations.worlds import HeldAgent, verified
from turnkeeper.actors import Conversations, MemoryJournal, SQLiteJournal
from turnkeeper.runtime import NotDelivered, Unavailable

pytestmark = pytest.mark.anyio

HANG_S = 60.0
"""After so long, a call that is not refused counts as one that waits."""


async def _wait_for_an_event(conversations: Conversations) -> None:
    async for _ in conversations["a"].events(after=3):
        pass


READING: dict[str, Callable[[Conversations], Awaitable[object]]] = {
    "list": lambda cs: cs.list(),
    "exists": lambda cs: cs["a"].exists(),
    "view": lambda cs: cs["a"].view(),
    "at": lambda cs: cs["a"].at(),
    "running": lambda cs: cs["a"].running(),
    "fork": lambda cs: cs["a"].fork("b"),
    "delete": lambda cs: cs.delete("a"),
    "expire": lambda cs: cs.expire(before=0.0),
    "journal": lambda cs: cs.journal.claim("a"),
    "events": _wait_for_an_event,
}


async def _refused_elsewhere(call: Callable[[], Awaitable[object]]) -> None:
    """Make a call in an event loop of another thread; it has to be refused, and not to wait."""
    backend = current_async_library()

    async def make() -> None:
        with anyio.fail_after(HANG_S):
            await call()

    def run() -> None:
        with pytest.raises(RuntimeError, match=r"another thread than .* use runtime\.portal\(\)"):
            anyio.run(make, backend=backend)

    await anyio.to_thread.run_sync(run)


@pytest.mark.parametrize("call", READING)
async def test_a_journal_in_a_file_is_not_asked_in_another_threads_loop(
    tmp_path: Path, call: str
) -> None:
    async with verified(HeldAgent(), journal=SQLiteJournal(tmp_path / "chats.db")) as conversations:
        await (await conversations["a"].send("A")).reply()

        await _refused_elsewhere(partial(READING[call], conversations))

        # The journal's thread counts its jobs, and all that follow are answered.
        assert await (await conversations["a"].send("B")).reply()
        assert [row.conversation_id for row in (await conversations.list()).rows] == ["a"]


async def test_a_reader_does_not_wait_in_another_threads_loop() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        await (await conversations["a"].send("A")).reply()

        await _refused_elsewhere(partial(_wait_for_an_event, conversations))

        assert await (await conversations["a"].send("B")).reply()


USING: dict[str, Callable[[Conversations], Awaitable[object]]] = {
    "send": lambda cs: cs["a"].send("B"),
    "interrupt": lambda cs: cs["a"].interrupt(),
    "delete": lambda cs: cs.delete("a"),
    "drain": lambda cs: cs.drain(grace_s=0),
    "events": _wait_for_an_event,
    "aclose": lambda cs: cs.aclose(),
    "aclose of the runtime": lambda cs: cs.runtime.aclose(),
}


@pytest.mark.parametrize("call", USING)
def test_another_loop_of_the_same_thread_is_refused_and_changes_nothing(call: str) -> None:
    """As with fixtures of pytest that have another loop than the test. On trio there is no such."""

    async def refused(conversations: Conversations) -> None:
        with pytest.raises(RuntimeError, match=r"or (in another|outside of its) event loop"):
            await USING[call](conversations)

    async def open_and_send() -> Conversations:
        conversations = await Conversations(HeldAgent(), journal=MemoryJournal()).start()
        await (await conversations["a"].send("A")).reply()
        return conversations

    async def check(conversations: Conversations) -> None:
        turn = await conversations["a"].send("B")
        assert await turn.reply()
        assert turn.seq == 6
        await conversations.aclose()

    with asyncio.Runner() as home, closing(asyncio.new_event_loop()) as other:
        conversations = home.run(open_and_send())
        task = other.create_task(refused(conversations))
        # Not as a deadline for the task: a wait for the runtime's end is shielded against those.
        other.run_until_complete(asyncio.wait({task}, timeout=HANG_S))
        assert task.done(), "it waits"
        task.result()

        home.run(check(conversations))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_was_left_open_is_refused_and_can_be_closed_in_the_next_run(backend: str) -> None:
    async def leave_open() -> Conversations:
        conversations = await Conversations(HeldAgent(), journal=MemoryJournal()).start()
        await (await conversations["a"].send("A")).reply()
        return conversations

    async def use(conversations: Conversations) -> None:
        with anyio.fail_after(HANG_S):
            with pytest.raises((RuntimeError, NotDelivered)):
                await conversations["a"].send("B")
            with pytest.raises(Unavailable, match="the runtime ended"):
                await conversations.aclose()

    conversations = anyio.run(leave_open, backend=backend)
    anyio.run(use, conversations, backend=backend)
