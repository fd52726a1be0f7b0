"""Lists of conversations: a page beside raw SQL for the same rows, and what a row costs an append.

The page is one of 50 rows in the middle of an owner's conversations, by activity, among 20,000
conversations, or 1,000,000 in the full run, in a file and in PostgreSQL. Raw SQL runs in a thread
beside the loop, as it has to, and gives the same columns, with the JSON of each row read. An append
is one of a whole turn; the baseline's journal drops the row that comes with it.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import anyio.to_thread
import psycopg

from turnkeeper.actors import (
    Conversation,
    Conversations,
    Journal,
    PostgresJournal,
    SQLiteJournal,
)
from turnkeeper.actors.journal import Listing, ListQuery
from turnkeeper.actors.journals.postgres.listings import page_statement as postgres_statement
from turnkeeper.actors.journals.shared.list_pages import listing_seal
from turnkeeper.actors.journals.sqlite.listings import page_statement
from turnkeeper.actors.journals.sqlite.log import empty_tail

from ._harness import Measure, PeerMissing, costlier, in_turn, say, skipped
from ._postgres import schema, server
from .journal import US, remove, silent

OWNERS = 10
ROWS = 50
PAGES = 100
BASELINE = "raw SQL, the same rows"
PAGE_GOAL = "≤ 1.5"
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
    say(f"lists: {many:,} conversations in PostgreSQL")
    try:
        with server() as conninfo, schema(conninfo) as name:
            anyio.run(_fill_postgres, conninfo, name, many)
            yield from anyio.run(_pages_in_postgres, conninfo, name, many, rounds)
    except PeerMissing as missing:
        yield skipped(f"postgres_page_among_{many}", BASELINE, PAGE_GOAL, str(missing))


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


async def _fill_postgres(conninfo: str, schema: str, many: int) -> None:
    async with PostgresJournal(conninfo, schema=schema):
        pass
    with _connect(conninfo, schema) as connection, connection.cursor() as cursor:
        with cursor.copy("COPY listing FROM STDIN") as copy:
            for number in range(1, many + 1):
                copy.write_row(_listing(number))
        cursor.execute(
            "INSERT INTO conversation (id, name, incarnation, log, epoch, head, tip, forked_at, "
            "is_unfinished, updated_us) OVERRIDING SYSTEM VALUE "
            "SELECT conversation, name, 0, conversation, 1, 1, 0, 0, false, conversation "
            "FROM listing"
        )
        cursor.execute("ANALYZE")


def _connect(conninfo: str, schema: str) -> psycopg.Connection[Any]:
    return psycopg.connect(conninfo, autocommit=True, options=f"-c search_path={schema}")


def _name(number: int) -> str:
    return f"user {number % OWNERS}:{number:07}"


async def _pages(path: Path, many: int, rounds: int) -> list[Measure]:
    query = ListQuery(ROWS, owner="user 1", order="activity")
    statement, values = page_statement(query, [900_000, 0], ROWS)
    inner = statement[statement.index("FROM (") + len("FROM (") : statement.rindex(")")]
    with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        raw = partial(_raw, lambda: connection.execute(inner, values).fetchall())
        return [await _beside_raw(f"page_among_{many}", SQLiteJournal(path), raw, rounds)]


async def _pages_in_postgres(conninfo: str, schema: str, many: int, rounds: int) -> list[Measure]:
    query = ListQuery(ROWS, owner="user 1", order="activity")
    statement, values = postgres_statement(query, [900_000, 0], ROWS)
    with _connect(conninfo, schema) as connection:
        raw = partial(
            _raw,
            lambda: connection.execute(statement.encode(), values, binary=True).fetchall(),
        )
        journal = PostgresJournal(conninfo, schema=schema)
        return [await _beside_raw(f"postgres_page_among_{many}", journal, raw, rounds)]


async def _beside_raw(
    name: str, journal: Journal, raw: Callable[[], Awaitable[float]], rounds: int
) -> Measure:
    # Recovery looks at every conversation of the journal, again and again.
    async with Conversations(silent, journal=journal, recover="on_message") as conversations:
        first = await conversations.list(owner="user 1", order="activity", limit=ROWS)
        pairs = await in_turn(partial(_ours, conversations, first.cursor), raw, rounds)
    return costlier(name, pairs, baseline=BASELINE, goal=PAGE_GOAL)


async def _ours(conversations: Conversations, cursor: str | None) -> float:
    began = perf_counter()
    for _ in range(PAGES):
        page = await conversations.list(owner="user 1", order="activity", limit=ROWS, cursor=cursor)
        assert len(page.rows) == ROWS
    return (perf_counter() - began) / PAGES * US


async def _raw(fetch: Callable[[], Sequence[Any]]) -> float:
    def read() -> list[tuple[Any, ...]]:
        return [(*row, json.loads(row[7]), json.loads(row[8])) for row in fetch()]

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
