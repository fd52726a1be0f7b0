"""Lists of conversations: a page beside raw SQL for the same rows, and what a row costs an append.

The page is one of 50 rows in the middle of an owner's conversations, by activity, among 20,000
conversations, or 1,000,000 in the full run. Raw SQL runs in a thread beside the loop, as it has to,
and gives the same columns, with the JSON of each row read. An append is one of a whole turn; the
baseline's journal drops the row that comes with it.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import anyio.to_thread

from turnkeeper.actors import Conversation, Conversations, SQLiteJournal
from turnkeeper.actors.journal import Listing, ListQuery
from turnkeeper.actors.journals.shared.list_pages import listing_seal
from turnkeeper.actors.journals.sqlite.listings import page_statement
from turnkeeper.actors.journals.sqlite.log import empty_tail

from ._harness import Measure, costlier, in_turn, say
from .journal import US, remove, silent

OWNERS = 10
ROWS = 50
PAGES = 100
SHOWN = json.dumps({"by": "agent", "said": "x" * 200, "title": "An order that did not come"})


def run(*, quick: bool) -> Iterator[Measure]:
    rounds = 3 if quick else 7
    many = 20_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "chats.db"
        say(f"lists: {many:,} conversations")
        anyio.run(fill, path, many)
        yield from anyio.run(_pages, path, many, rounds)
        remove(path)
        say("lists: what a row costs an append")
        yield from anyio.run(_appends, Path(name), rounds)


async def fill(path: Path, many: int) -> None:
    """Make a file with so many conversations; of each, only its rows."""
    async with SQLiteJournal(path):
        pass
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(
            "INSERT INTO conversation VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (_conversation(number) for number in range(1, many + 1)),
        )
        connection.executemany(
            "INSERT INTO listing VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (_listing(number) for number in range(1, many + 1)),
        )


def _conversation(number: int) -> Sequence[Any]:
    tail = empty_tail(_name(number), 0, 1, number)
    tail.head = 1
    facts = (tail.epoch, tail.head, tail.last, tail.tip, tail.forked_at, 0, tail.updated_us)
    return number, tail.name, tail.incarnation, tail.log, *facts, tail.seal()


def _listing(number: int) -> Sequence[Any]:
    name = _name(number)
    active_us = number * 7_919 % 1_000_003
    listing = Listing(1, f"user {number % OWNERS}", "finished", number, active_us, {}, SHOWN)
    facts = (listing.seq, listing.owner, listing.status, number, active_us, "{}", SHOWN)
    return number, name, *facts, listing_seal(name, listing, "{}")


def _name(number: int) -> str:
    return f"user {number % OWNERS}:{number:07}"


async def _pages(path: Path, many: int, rounds: int) -> list[Measure]:
    # Recovery looks at every conversation of the file, again and again.
    journal = SQLiteJournal(path)
    async with Conversations(silent, journal=journal, recover="on_message") as conversations:
        first = await conversations.list(owner="user 1", order="activity", limit=ROWS)
        with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
            pairs = await in_turn(
                partial(_ours, conversations, first.cursor), partial(_raw, connection), rounds
            )
    return [costlier(f"page_among_{many}", pairs, baseline="raw SQL, the same rows", goal="≤ 1.5")]


async def _ours(conversations: Conversations, cursor: str | None) -> float:
    began = perf_counter()
    for _ in range(PAGES):
        page = await conversations.list(owner="user 1", order="activity", limit=ROWS, cursor=cursor)
        assert len(page.rows) == ROWS
    return (perf_counter() - began) / PAGES * US


async def _raw(connection: sqlite3.Connection) -> float:
    query = ListQuery(ROWS, owner="user 1", order="activity")
    statement, values = page_statement(query, [900_000, 0], ROWS)
    inner = statement[statement.index("FROM (") + len("FROM (") : statement.rindex(")")]

    def read() -> list[tuple[Any, ...]]:
        rows = connection.execute(inner, values).fetchall()
        return [(*row, json.loads(row[7]), json.loads(row[8])) for row in rows]

    began = perf_counter()
    for _ in range(PAGES):
        assert len(await anyio.to_thread.run_sync(read)) == ROWS
    return (perf_counter() - began) / PAGES * US


class Unlisted(SQLiteJournal):
    """Drops the rows for lists."""

    def append(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
        return super().append(*arguments, **{**options, "listing": None})


async def _appends(folder: Path, rounds: int) -> list[Measure]:
    found = []
    for many, each in ((1, 200), (100, 20)):
        pairs = await in_turn(
            partial(_turns, folder, SQLiteJournal, many, each),
            partial(_turns, folder, Unlisted, many, each),
            rounds,
        )
        name = f"turns_{many}_listed"
        found.append(costlier(name, pairs, baseline="without rows for lists", goal="≤ 1.1"))
    return found


async def _turns(folder: Path, kind: type[SQLiteJournal], many: int, each: int) -> float:
    """Time turns of conversations that send once their last message is answered; µs a turn."""
    path = folder / "turns.db"

    async def converse(chat: Conversation) -> None:
        for _ in range(each):
            await (await chat.send("x" * 200)).end()

    async with Conversations(silent, journal=kind(path)) as conversations:
        began = perf_counter()
        async with anyio.create_task_group() as group:
            for number in range(many):
                group.start_soon(converse, conversations[f"c{number}"])
        took = perf_counter() - began
    remove(path)
    return took / (many * each) * US
