"""Search: a page of hits beside the store's own full-text search, and what an append pays for it.

The page is of 20 hits of one owner, with one word, two words and the beginning of one, among 20,000
messages, or 500,000 in the full run. The baseline is a table of the same texts and owners, made
and asked as the store's manual says, snippets and the facts of the event included, in a thread
beside the loop: FTS5 in a file, and a `tsvector` under GIN with `ts_headline` in PostgreSQL. A turn
is one of a conversation that sends once its last message is answered; the baseline's journal does
not search.
"""

from __future__ import annotations

import json
import random
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from shutil import copyfile
from statistics import median
from time import perf_counter
from typing import Any

import anyio
import anyio.to_thread
import psycopg

from turnkeeper.actors import Conversation, Conversations, PostgresJournal, SQLiteJournal
from turnkeeper.actors.journal import Journal, Listing, Record

from ._harness import (
    Measure,
    PeerMissing,
    Spent,
    Stopwatch,
    by_both,
    costlier,
    in_turn,
    say,
    skipped,
)
from ._postgres import backends, schema, server
from .journal import US, remove, silent

OWNERS = 10
EACH = 100
HITS = 20
PAGES = 50
WORDS = 5_000
FTS5 = "FTS5 by hand, the same rows"
TSVECTOR = "tsvector by hand, the same rows"
GOAL = "≤ 1.5"
ASKED = ("w40", "w7 w12", "w20 w9*")


def run(*, quick: bool) -> Iterator[Measure]:
    rounds = 3 if quick else 7
    many = 20_000 if quick else 500_000
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "chats.db"
        say(f"search: {many:,} messages in a file")
        anyio.run(_fill, SQLiteJournal(path, search=True), many)
        yield from _beside_fts5(path, rounds)
        remove(path)
        say("search: what it costs an append")
        yield from anyio.run(_appends, Path(name), rounds)
    say(f"search: {many:,} messages in PostgreSQL")
    try:
        with server() as conninfo, schema(conninfo) as name:
            journal = PostgresJournal(conninfo, schema=name, search=True)
            anyio.run(_fill, journal, many)
            yield from _beside_tsvector(conninfo, name, rounds)
    except PeerMissing as missing:
        for at in range(1, len(ASKED) + 1):
            yield skipped(f"postgres_search_{at}", TSVECTOR, GOAL, str(missing))


async def _fill(journal: Journal, many: int) -> None:
    """Write conversations of 100 messages, and index them."""
    draw = random.Random(1)
    async with journal:
        for number in range(many // EACH):
            name = f"c{number:06}"
            claim = await journal.claim(name)
            await journal.append(
                name,
                [_message(draw, name, at) for at in range(EACH)],
                epoch=claim.epoch,
                expected_seq=1,
                is_unfinished=False,
                listing=Listing(EACH, f"user {number % OWNERS}", "finished", 1, 1),
            )
        began = perf_counter()
        await journal.index()
        say(f"indexed in {perf_counter() - began:.1f} s")


def _message(draw: random.Random, name: str, at: int) -> Record:
    # As in a language: the few first words are in most messages, the others in few.
    words = [f"w{min(int(draw.paretovariate(0.7)), WORDS)}" for _ in range(60)]
    moment = f"2024-01-01T00:{at // 60:02}:{at % 60:02}.{draw.randrange(10**6):06}Z"
    event = {"content": " ".join(words), "timestamp": moment}
    return Record(f"{name} {at}", "user_message", json.dumps(event).encode())


def _make_plain(path: Path) -> Path:
    """Return a copy of the file with an FTS5 table as its manual makes it."""
    plain = path.with_name("plain.db")
    copyfile(path, plain)
    with closing(sqlite3.connect(plain)) as connection, connection:
        connection.execute("CREATE VIRTUAL TABLE plain USING fts5 (owner, content)")
        connection.execute(
            "INSERT INTO plain (rowid, owner, content) "
            "SELECT m.id, m.owner, json_extract(CAST(e.payload AS TEXT), '$.content') "
            "FROM search_message m JOIN event e ON e.id = m.event ORDER BY m.id"
        )
    return plain


def _beside_fts5(path: Path, rounds: int) -> Iterator[Measure]:
    plain = _make_plain(path)
    with closing(sqlite3.connect(plain, check_same_thread=False)) as connection:
        read = partial(_read_plain, connection)
        yield from anyio.run(_pages, SQLiteJournal(path, search=True), "search", read, FTS5, rounds)


def _beside_tsvector(conninfo: str, schema: str, rounds: int) -> Iterator[Measure]:
    options = f"-c search_path={schema}"
    with psycopg.connect(conninfo, autocommit=True, options=options) as connection:
        connection.execute(_MAKE_TSVECTOR)
        read = partial(_read_tsvector, connection)
        journal = PostgresJournal(conninfo, schema=schema, search=True)
        pages = partial(_pages, find_others=partial(backends, connection))
        yield from anyio.run(pages, journal, "postgres_search", read, TSVECTOR, rounds)


async def _pages(
    journal: Journal,
    name: str,
    read: Callable[[str], Sequence[object]],
    baseline: str,
    rounds: int,
    *,
    find_others: Callable[[], Sequence[int]] = lambda: (),
) -> list[Measure]:
    found: list[Measure] = []
    async with Conversations(silent, journal=journal, recover="on_message") as conversations:
        others = find_others()
        for at, asked in enumerate(ASKED, 1):
            ours = partial(_ours, conversations, asked, others)
            base = partial(_base, partial(read, asked), others)
            pairs = await in_turn(ours, base, rounds)
            found += by_both(f"{name}_{at}", pairs, baseline=baseline, goal=GOAL)
    return found


async def _ours(conversations: Conversations, asked: str, others: Sequence[int]) -> Spent:
    watch = Stopwatch(others)
    for _ in range(PAGES):
        results = await conversations.search(asked, owner="user 1", limit=HITS)
        assert len(results.hits) == HITS, (asked, len(results.hits))
    return watch.spent_on_each(PAGES)


async def _base(read: Callable[[], Sequence[object]], others: Sequence[int]) -> Spent:
    watch = Stopwatch(others)
    for _ in range(PAGES):
        assert len(await anyio.to_thread.run_sync(read)) == HITS
    return watch.spent_on_each(PAGES)


def _read_plain(connection: sqlite3.Connection, asked: str) -> Sequence[object]:
    words = " AND ".join(asked.split())
    return connection.execute(
        """
        SELECT p.rowid, c.name, e.seq, e.event_id, e.kind, snippet(plain, 1, '', '', '…', 30)
        FROM plain p JOIN search_message m ON m.id = p.rowid
        JOIN conversation c ON c.log = m.log JOIN event e ON e.id = m.event
        WHERE plain MATCH ? ORDER BY p.rowid DESC LIMIT ?
        """,
        (f'owner : "user 1" AND content : ({words})', HITS),
    ).fetchall()


_MAKE_TSVECTOR = """
    CREATE TABLE plain (
        id bigint PRIMARY KEY, log bigint, seq bigint, owner text, content text,
        words tsvector GENERATED ALWAYS AS (to_tsvector('simple', content)) STORED
    );
    INSERT INTO plain (id, log, seq, owner, content)
        SELECT m.id, m.log, m.seq, m.owner, convert_from(e.payload, 'UTF8')::json ->> 'content'
        FROM search_message m JOIN event e ON e.log = m.log AND e.seq = m.seq;
    CREATE INDEX plain_words ON plain USING gin (words);
    CREATE INDEX plain_owner ON plain (owner, id);
    ANALYZE;
"""


def _read_tsvector(connection: psycopg.Connection[Any], asked: str) -> Sequence[object]:
    words = " & ".join(asked.replace("*", ":*").split())
    return connection.execute(
        """
        SELECT p.id, c.name, p.seq, e.event_id, e.kind,
            ts_headline('simple', p.content, to_tsquery('simple', %(words)s),
                'StartSel="", StopSel=""')
        FROM (
            SELECT * FROM plain
            WHERE words @@ to_tsquery('simple', %(words)s) AND owner = 'user 1'
            ORDER BY id DESC LIMIT %(hits)s
        ) p
        JOIN conversation c ON c.log = p.log
        JOIN event e ON e.log = p.log AND e.seq = p.seq
        ORDER BY p.id DESC
        """,
        {"words": words, "hits": HITS},
    ).fetchall()


async def _appends(folder: Path, rounds: int) -> list[Measure]:
    pairs: list[tuple[float, float]] = []
    for _ in range(rounds):
        ours = await _latency(SQLiteJournal(folder / "ours.db", search=True))
        pairs.append((ours, await _latency(SQLiteJournal(folder / "base.db"))))
        for name in ("ours.db", "base.db"):
            remove(folder / name)
    return [costlier("turn_searched", pairs, baseline="without search", goal="≤ 1.1")]


async def _latency(journal: SQLiteJournal) -> float:
    """Return the median time of a turn, in µs: a slice of the index is between some of them."""
    times: list[float] = []

    async def converse(chat: Conversation) -> None:
        for _ in range(300):
            began = perf_counter()
            await (await chat.send("Where is my order? " * 10)).end()
            times.append(perf_counter() - began)

    async with Conversations(silent, journal=journal) as conversations:
        await converse(conversations["c"])
    return median(times) * US
