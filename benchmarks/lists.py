"""Lists of conversations: a page beside raw SQL for the same rows, and what a row costs an append.

The page has 50 rows of an owner's conversations, by activity, among 20,000 conversations, and in
the full run among 1,000,000 too, in a file and in PostgreSQL. Raw SQL has to run in a thread beside
the loop, and returns the same columns, with the JSON of each row parsed. It has all rows in one
table; ours keeps the newest rows in a separate one, as many as a writer at rest leaves there.
Appends are measured as part of a whole turn; the baseline's journal drops the list row that comes
with each.

Each figure is measured by the clock and by processor time, of all threads and of the server. The
clock also counts the work of other programs.
"""

from __future__ import annotations

import gc
import json
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
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
from turnkeeper.actors.core.listing import decode_cursor
from turnkeeper.actors.journal import ListQuery
from turnkeeper.actors.journals.postgres import listings as postgres_listings
from turnkeeper.actors.journals.sqlite import listings as sqlite_listings

from ._harness import Measure, PeerMissing, Spent, Stopwatch, by_both, in_turn, mean, say, skipped
from ._many import connect, fill_file, fill_schema
from ._postgres import backends, schema, server
from .journal import remove, silent

ROWS = 50
PAGES = 100
SWITCHES = 10
BASELINE = "raw SQL, the same rows"
PAGE_GOAL = "≤ 1.5"
UNLISTED = "without rows for lists"
LISTED_GOAL = "≤ 1.1"
QUERY = ListQuery(ROWS, owner="user 1", order="activity")
RAW = """
    SELECT l.conversation, l.name, l.seq, l.owner, l.status, l.created_us, l.active_us, l.labels,
        l.payload, l.seal, c.head, c.updated_us, c.last
    FROM listing l JOIN conversation c ON c.id = l.conversation
    WHERE l.owner = ? AND (l.active_us, l.conversation) < (?, ?)
    ORDER BY l.active_us DESC, l.conversation DESC LIMIT ?
"""
# In PostgreSQL.
RAW_OWNED = (
    RAW.replace("c.last", "c.owner, node.address")
    .replace("?", "%s")
    .replace(
        "WHERE",
        "LEFT JOIN node ON node.id = c.owner AND node.lease_until > clock_timestamp() WHERE",
    )
)
SET_APART = "INSERT INTO listing_recent SELECT * FROM listing ORDER BY active_us DESC LIMIT"


def run(*, quick: bool) -> Iterator[Measure]:
    rounds = 3 if quick else 7
    sizes = (20_000,) if quick else (20_000, 1_000_000)
    with tempfile.TemporaryDirectory() as name:
        for many in sizes:
            path = Path(name) / "chats.db"
            say(f"lists: {many:,} conversations")
            anyio.run(fill_file, path, many)
            _set_apart(path)
            yield from anyio.run(_pages, path, many, rounds)
            remove(path)
        say("lists: what a row costs an append")
        yield from anyio.run(_appends, Path(name), 3 if quick else 15)
    try:
        with server() as conninfo:
            say("lists: what a row costs an append in PostgreSQL")
            yield from anyio.run(_appends_in_postgres, conninfo, 3 if quick else 15)
    except PeerMissing as missing:
        yield skipped("postgres_turns_listed", UNLISTED, LISTED_GOAL, str(missing))
    for many in sizes:
        say(f"lists: {many:,} conversations in PostgreSQL")
        try:
            with server() as conninfo, schema(conninfo) as name:
                anyio.run(fill_schema, conninfo, name, many)
                with connect(conninfo, name) as connection:
                    recent = (postgres_listings.RECENT_LISTINGS_MAX,)
                    connection.execute(f"{SET_APART} %s".encode(), recent)
                    connection.execute("ANALYZE listing_recent")
                yield from anyio.run(_pages_in_postgres, conninfo, name, many, rounds)
        except PeerMissing as missing:
            yield skipped(f"postgres_page_among_{many}", BASELINE, PAGE_GOAL, str(missing))


def _set_apart(path: Path) -> None:
    """Put the newest rows where a writer leaves them, and into the one table for raw SQL."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"{SET_APART} ?", (sqlite_listings.RECENT_LISTINGS_MAX,))


async def _pages(path: Path, many: int, rounds: int) -> list[Measure]:
    with closing(sqlite3.connect(path, check_same_thread=False)) as connection:

        def raw(after: Sequence[str | int]) -> Sequence[Any]:
            return connection.execute(RAW, (QUERY.owner, *after, ROWS)).fetchall()

        return await _beside_raw(f"page_among_{many}", SQLiteJournal(path), raw, rounds)


async def _pages_in_postgres(conninfo: str, schema: str, many: int, rounds: int) -> list[Measure]:
    with connect(conninfo, schema) as connection:

        def raw(after: Sequence[str | int]) -> Sequence[Any]:
            values = (QUERY.owner, *after, ROWS)
            return connection.execute(RAW_OWNED.encode(), values, binary=True).fetchall()

        journal = PostgresJournal(conninfo, schema=schema)
        name = f"postgres_page_among_{many}"
        others = partial(backends, connection)
        return await _beside_raw(name, journal, raw, rounds, find_others=others)


async def _beside_raw(
    name: str,
    journal: Journal,
    raw: Callable[[Sequence[str | int]], Sequence[Any]],
    rounds: int,
    *,
    find_others: Callable[[], Sequence[int]] = lambda: (),
) -> list[Measure]:
    # Recovery looks at every conversation of the journal, again and again.
    async with Conversations(silent, journal=journal, recover="on_message") as conversations:
        first = await conversations.list(owner="user 1", order="activity", limit=ROWS)
        assert first.cursor is not None
        after = decode_cursor(first.cursor, QUERY)
        others = find_others()
        pairs = await in_turn(
            partial(_ours, conversations, first.cursor, others),
            partial(_raw, partial(raw, after), others),
            rounds,
        )
    return by_both(name, pairs, baseline=BASELINE, goal=PAGE_GOAL)


async def _ours(conversations: Conversations, cursor: str, others: Sequence[int]) -> Spent:
    watch = Stopwatch(others)
    for _ in range(PAGES):
        page = await conversations.list(owner="user 1", order="activity", limit=ROWS, cursor=cursor)
        assert len(page.rows) == ROWS
    return watch.spent_on_each(PAGES)


async def _raw(fetch: Callable[[], Sequence[Any]], others: Sequence[int]) -> Spent:
    def read() -> list[tuple[Any, ...]]:
        return [(*row, json.loads(row[7]), json.loads(row[8])) for row in fetch()]

    watch = Stopwatch(others)
    for _ in range(PAGES):
        assert len(await anyio.to_thread.run_sync(read)) == ROWS
    return watch.spent_on_each(PAGES)


class Switch:
    """Makes a journal drop the rows for lists while it is switched on."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.is_listing = True
        self._append = journal.append
        journal.append = self._switched  # type: ignore[method-assign]  # the measured one only

    def _switched(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
        listing = options["listing"] if self.is_listing else None
        return self._append(*arguments, **{**options, "listing": listing})


LOADS = ((1, 20), (100, 1))
"""Conversations at once, and turns of each."""


async def _appends(folder: Path, rounds: int) -> list[Measure]:
    found: list[Measure] = []
    for many, each in LOADS:
        journal = SQLiteJournal(folder / f"{many}.db")
        pairs = await _turns(journal, many, each, rounds)
        found += by_both(f"turns_{many}_listed", pairs, baseline=UNLISTED, goal=LISTED_GOAL)
    return found


async def _appends_in_postgres(conninfo: str, rounds: int) -> list[Measure]:
    found: list[Measure] = []
    for many, each in LOADS:
        with schema(conninfo) as name, psycopg.connect(conninfo, autocommit=True) as connection:
            journal = PostgresJournal(conninfo, schema=name)
            others = partial(backends, connection)
            pairs = await _turns(journal, many, each, rounds, find_others=others)
        name = f"postgres_turns_{many}_listed"
        found += by_both(name, pairs, baseline=UNLISTED, goal=LISTED_GOAL)
    return found


async def _turns(
    journal: Journal,
    many: int,
    each: int,
    rounds: int,
    *,
    find_others: Callable[[], Sequence[int]] = lambda: (),
) -> list[tuple[Spent, Spent]]:
    """Time turns of conversations that send once their last message is answered.

    Runs with and without rows take turns, a few turns at a time, because rows cost less than the
    machine's speed varies from one second to the next.
    """
    switch = Switch(journal)

    async def converse(chat: Conversation) -> None:
        for _ in range(each):
            await (await chat.send("x" * 200)).end()

    async def some(*, is_listing: bool) -> Spent:
        switch.is_listing = is_listing
        gc.collect()  # a full collection comes every tenth time: it might hit one side only
        watch = Stopwatch(find_others())
        async with anyio.create_task_group() as group:
            for number in range(many):
                group.start_soon(converse, conversations[f"c{number}"])
        return watch.spent_on_each(many * each)

    pairs = []
    async with Conversations(silent, journal=journal) as conversations:
        for _ in range(rounds + 1):
            listed: list[Spent] = []
            unlisted: list[Spent] = []
            for at in range(SWITCHES):
                first, second = (listed, unlisted) if at % 2 else (unlisted, listed)
                first.append(await some(is_listing=first is listed))
                second.append(await some(is_listing=second is listed))
            pairs.append((mean(listed), mean(unlisted)))
    return pairs[1:]
