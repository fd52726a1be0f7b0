"""A journal belongs to the event loop in which it was entered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import pytest

from turnkeeper.actors import MemoryJournal, PostgresJournal, SQLiteJournal
from turnkeeper.actors.journal import ListQuery
from turnkeeper.actors.journals.contract import make_record

from ... import postgres

pytestmark = pytest.mark.costly

HANG_S = 60.0
"""After so long, a call that is not refused counts as one that waits."""

AnyJournal = MemoryJournal | SQLiteJournal | PostgresJournal

CALLS: dict[str, Callable[[AnyJournal], Awaitable[object]]] = {
    "claim": lambda journal: journal.claim("a"),
    "append": lambda journal: journal.append(
        "a", [make_record("a2")], epoch=1, expected_seq=2, is_unfinished=False
    ),
    "read": lambda journal: journal.read("a"),
    "page": lambda journal: journal.page(ListQuery(10)),
    "wait": lambda journal: journal.wait_for_more("a", after=1),
    "index": lambda journal: journal.index(),
}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyJournal]:
    if request.param == "memory":
        yield MemoryJournal(search=True)
        return
    if request.param == "sqlite":
        yield SQLiteJournal(tmp_path / "chats.db", search=True, stop_wait_s=0)
        return
    with postgres.schema() as schema:
        yield PostgresJournal(postgres.conninfo(), schema=schema, search=True, stop_wait_s=0)


@pytest.mark.parametrize("first", ["asyncio", "trio"])
@pytest.mark.parametrize("second", ["asyncio", "trio"])
def test_a_journal_that_was_left_open_is_refused_in_the_next_loop_of_its_thread(
    journal: AnyJournal, first: str, second: str
) -> None:
    """The threads of the journal would wake their callers in a loop that has ended."""

    async def enter() -> None:
        await journal.__aenter__()
        claim = await journal.claim("a")
        await journal.append(
            "a", [make_record("a1")], epoch=claim.epoch, expected_seq=1, is_unfinished=False
        )

    async def call() -> None:
        for make in CALLS.values():
            with (
                anyio.fail_after(HANG_S),
                pytest.raises(RuntimeError, match="in another event loop than"),
            ):
                await make(journal)
        await journal.__aexit__(None, None, None)

    anyio.run(enter, backend=first)
    anyio.run(call, backend=second)


def test_a_journal_is_refused_in_a_run_of_trio_inside_its_loop(journal: AnyJournal) -> None:
    """As in a notebook whose cell calls `trio.run`: it hung, or trio told of a strange future."""
    trio = pytest.importorskip("trio")

    async def call() -> None:
        for make in CALLS.values():
            with (
                anyio.fail_after(HANG_S),
                pytest.raises(RuntimeError, match="in another event loop than"),
            ):
                await make(journal)

    async def enter() -> None:
        async with journal:
            claim = await journal.claim("a")
            await journal.append(
                "a", [make_record("a1")], epoch=claim.epoch, expected_seq=1, is_unfinished=False
            )
            trio.run(call)
            assert [record.event_id for record in await journal.read("a")] == ["a1"]

    anyio.run(enter, backend="asyncio")
