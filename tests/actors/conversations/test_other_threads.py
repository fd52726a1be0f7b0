"""Calls in another thread's event loop are refused: nothing there would ever wake them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from sniffio import current_async_library

from tests.actors.conversations.worlds import HeldAgent, verified
from turnkeeper.actors import Conversations, MemoryJournal, SQLiteJournal

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
