"""Search over journals: all of them find the same, as a look at every message does.

Beside the contract: the job that fills the index, on its own, with others, and cut off at any step;
what a deletion, a repair and a verification do to the index.
"""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import psycopg
import pytest

from tests import postgres
from tests.drawn import drawn
from turnkeeper.actors import MemoryJournal, PostgresJournal, SQLiteJournal
from turnkeeper.actors.errors import JournalOutcomeUnknown, JournalUnavailable
from turnkeeper.actors.journal import (
    Claim,
    FoundMessage,
    Journal,
    Listing,
    Record,
    SearchQuery,
)
from turnkeeper.actors.journals.files import verify_logs
from turnkeeper.actors.journals.postgres import search as postgres_search
from turnkeeper.actors.journals.shared import searching
from turnkeeper.actors.journals.sqlite import search as sqlite_search
from turnkeeper.actors.journals.sqlite.reader import SQLiteReader
from turnkeeper.actors.journals.sqlite.repair import repair
from turnkeeper.actors.journals.sqlite.verify import verify
from turnkeeper.actors.values.words import TEXT_BYTES_MAX, find_words, words_of

pytestmark = [pytest.mark.costly, pytest.mark.in_parts(2)]

WORDS = [
    *(
        "order",
        "Order",
        "café",
        "CAFE",
        "naïve",
        "x_y",
        "don't",
        "Straße",
        "STRASSE",
        "東京",
        "タワー",
    ),
    *(
        "हिन्दी",
        "soft\u00adhyphen",
        "ﬁne",
        "É",
        "e\u0301",
        "a\0b",
        "2²",
        "Ⅷ",
        "😀ok",
        "'; DROP",
        '"*"',
        "OR",
    ),
    *("\ue000", "AND NOT", "w:*", "\\", "İ", "ﷺ", "한국어", "z" * 100),
]


def message(name: str, seq: int, text: str, at_us: int) -> Record:
    moment = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(microseconds=at_us)
    kind = ("user_message", "agent_message")[seq % 2]
    event = {"content": text, "timestamp": moment.isoformat(), "author": "ann"}
    return Record(f"{name} {seq}", kind, json.dumps(event).encode())


async def say(
    journal: Journal, name: str, *texts: str, listing: Listing | None = None, at_us: int = 0
) -> Claim:
    claim = await journal.claim(name, any_name=True)
    first = claim.head + 1
    records = [message(name, seq, text, at_us + seq) for seq, text in enumerate(texts, first)]
    await journal.append(
        name,
        records,
        epoch=claim.epoch,
        expected_seq=first,
        is_unfinished=False,
        listing=listing,
    )
    return claim


async def hits(journal: Journal, *words: str, **asked: Any) -> Sequence[FoundMessage]:  # noqa: ANN401 - of a query
    return (await journal.search(SearchQuery(words, 10_000, **asked))).rows


async def complete(journal: Journal, query: SearchQuery) -> Sequence[FoundMessage]:
    """Search until the job has come to the end of what is written, by itself."""
    with anyio.fail_after(60):
        while True:
            page = await journal.search(query)
            if page.complete_to_us is None:
                return page.rows


# --- one result -----------------------------------------------------------------------------------


class Told(NamedTuple):
    """A message as a look at everything that was written knows it."""

    name: str
    seq: int
    text: str
    at_us: int
    left: str = ""


class Naive:
    """What was told to the journals, by conversation."""

    def __init__(self) -> None:
        self.told: dict[str, dict[int, Told]] = {}
        self.heads: dict[str, int] = {}
        self.owners: dict[str, str] = {}
        self.labels: dict[str, dict[str, str]] = {}

    def find(self, query: SearchQuery) -> list[tuple[str, int, str]]:
        found = [
            one
            for name, told in self.told.items()
            for one in told.values()
            if set(query.words) <= (words := set(words_of(one.text)))
            and (not query.begins or any(word.startswith(query.begins) for word in words))
            and query.owner in {None, self.owners[name]}
            and name.startswith(query.prefix)
            and (query.label is None or self.labels[name].get(query.label[0]) == query.label[1])
        ]
        found.sort(key=lambda one: one.at_us, reverse=True)
        return [(one.name, one.seq, one.left) for one in found]


@asynccontextmanager
async def all_journals(folder: Path) -> AsyncIterator[list[Journal]]:
    with postgres.schema() as schema:
        async with AsyncExitStack() as opened:
            yield [
                await opened.enter_async_context(MemoryJournal(search=True)),
                await opened.enter_async_context(SQLiteJournal(folder / "c.db", search=True)),
                await opened.enter_async_context(
                    PostgresJournal(postgres.conninfo(), schema=schema, search=True)
                ),
            ]


async def act(draw: random.Random, naive: Naive, journals: Sequence[Journal], at_us: int) -> None:
    """Do one thing to all journals, and to the naive one."""
    names = sorted(naive.heads)
    what = draw.choice(["say"] * 8 + ["fork", "delete", "retract", "condense", "move", "index"])
    name = draw.choice(names) if names and draw.random() < 0.7 else f"{draw.choice('ab/')}/{at_us}"
    if what == "say" or name not in naive.heads:
        texts = [
            " ".join(draw.choices(WORDS, k=draw.randint(1, 6))) for _ in range(draw.randint(1, 5))
        ]
        head = naive.heads.get(name, 0)
        naive.owners.setdefault(name, draw.choice(["", "ann", "bob"]))
        naive.labels.setdefault(name, {"k": draw.choice("vw")})
        listing = listing_of(naive, name, head + len(texts))
        for journal in journals:
            await say(journal, name, *texts, listing=listing, at_us=at_us)
        for seq, text in enumerate(texts, head + 1):
            naive.told.setdefault(name, {})[seq] = Told(name, seq, text, at_us + seq)
        naive.heads[name] = head + len(texts)
    elif what == "fork":
        at, fork = draw.randint(1, naive.heads[name]), f"f{at_us}"
        naive.owners[fork], naive.labels[fork] = "bob", {}
        for journal in journals:
            await journal.fork(
                name,
                fork,
                at=at,
                records=[message(fork, at + 1, "order of a fork", at_us)],
                is_unfinished=False,
                listing=listing_of(naive, fork, at + 1),
            )
        naive.told[fork] = {at + 1: Told(fork, at + 1, "order of a fork", at_us)}
        naive.heads[fork] = at + 1
    elif what == "delete":
        for journal in journals:
            claim = await journal.claim(name, any_name=True)
            await journal.delete(name, epoch=claim.epoch)
        del naive.told[name], naive.heads[name], naive.owners[name], naive.labels[name]
    elif what == "index":
        await draw.choice(journals).index()
    else:
        seq = naive.heads[name] + 1
        seqs = draw.sample(range(1, seq), k=min(3, seq - 1))
        ids = [f"{name} {one}" for one in seqs]
        record = {
            "retract": Record(
                f"x {at_us}", "retraction", json.dumps({"retracted_event_ids": ids}).encode()
            ),
            "condense": Record(
                f"x {at_us}", "condensation", json.dumps({"forgotten_event_ids": ids}).encode()
            ),
            "move": Record(f"x {at_us}", "conversation_changed", b'{"owner": "eve"}'),
        }[what]
        if what == "move":
            naive.owners[name] = "eve"
        for one in seqs:
            told = naive.told[name].get(one)
            if told is not None and what != "move":
                left = "retracted" if what == "retract" else told.left or "condensed"
                naive.told[name][one] = told._replace(left=left)
        for journal in journals:
            claim = await journal.claim(name, any_name=True)
            await journal.append(
                name,
                [record],
                epoch=claim.epoch,
                expected_seq=seq,
                is_unfinished=False,
                listing=listing_of(naive, name, seq) if what == "move" else None,
            )
        naive.heads[name] = seq


def listing_of(naive: Naive, name: str, seq: int) -> Listing:
    return Listing(seq, naive.owners[name], "idle", 1, 1, naive.labels[name])


def draw_query(draw: random.Random, limit: int) -> SearchQuery:
    words = find_words(" ".join(draw.choices(WORDS, k=draw.randint(0, 2))))
    begins = (
        draw.choice(["", "", "o", "str", "東", "x", "cafe"]) if words else draw.choice("oscaxz")
    )
    return SearchQuery(
        tuple(dict.fromkeys(words)),
        limit,
        begins,
        prefix=draw.choice(["", "", "a/", "f", "a/1", "//", "b"]),
        owner=draw.choice([None, None, "", "ann", "bob", "eve"]),
        label=draw.choice([None, None, None, ("k", "v")]),
        scan_max=draw.choice([3, 1_000]),
    )


async def walk(journal: Journal, query: SearchQuery) -> list[FoundMessage]:
    found: list[FoundMessage] = []
    while True:
        page = await journal.search(query)
        assert page.complete_to_us is None
        found += page.rows
        if page.next is None:
            return found
        query = query._replace(after=page.next)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", drawn(range(40), 3))
async def test_all_journals_find_what_a_look_at_every_message_finds(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, naive = random.Random(seed), Naive()
    # PostgreSQL looks at so many messages before it asks its index of words.
    monkeypatch.setattr(postgres_search, "_NEAR_MAX", draw.choice([1, 3, 256]))
    async with all_journals(tmp_path) as journals:
        for step in range(60):
            await act(draw, naive, journals, at_us=1_000 * step)
        for journal in journals:
            await journal.index()
        for _ in range(40):
            query = draw_query(draw, draw.choice([1, 2, 1_000]))
            memory, *others = [await walk(journal, query) for journal in journals]
            shown = [(one.conversation_id, one.seq, one.left_view) for one in memory]
            assert shown == naive.find(query), query
            for found in others:
                assert found == memory, query
    assert verify(tmp_path / "c.db").problems == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Where's my ORDER?", ["where", "s", "my", "order"]),
        ("Grüße, CAFÉ, naïve", ["grusse", "cafe", "naive"]),
        ("東京タワー", ["東", "京", "タ", "ワ", "ー"]),
        ("हिन्दी x_y soft\u00adhyphen ﬁx ½", ["हिनदी", "x", "y", "softhyphen", "fix", "1", "2"]),
        ("a\0b \ue000c \ud800d", ["a", "b", "c", "d"]),
        ("x" * 70, ["x" * 64]),
        ("—!? \u200b", []),
    ],
)
def test_words_are_runs_of_letters_and_digits(text: str, words: list[str]) -> None:
    assert find_words(text) == words


def test_words_of_a_text_end_with_its_first_64_kib() -> None:
    assert words_of("é" * (TEXT_BYTES_MAX // 2 - 1) + " z later") == ["e" * 64, "z"]
    assert "later" in words_of(f"{'a ' * 1_000}later")


# --- the job --------------------------------------------------------------------------------------


def make_journal(kind: str, place: Path, **settings: Any) -> Journal:  # noqa: ANN401 - of both
    if kind == "sqlite":
        return SQLiteJournal(place / "c.db", owner_wait_s=0, **settings)
    return PostgresJournal(postgres.conninfo(), schema=place.name[-40:], **settings)


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(kind: str, tmp_path: Path) -> Any:  # noqa: ANN401 - a fixture
    if kind == "sqlite":
        yield tmp_path
        return
    with postgres.schema() as schema:
        yield Path(schema)


async def test_the_index_is_filled_without_being_asked(kind: str, place: Path) -> None:
    async with make_journal(kind, place, search=True) as journal:
        for number in range(5):
            await say(journal, f"c{number}", "word")
            assert len(await complete(journal, SearchQuery(["word"], 99))) == number + 1


@pytest.mark.parametrize("at", range(1, 12))
async def test_an_index_that_was_cut_off_goes_on_where_it_was(
    kind: str, place: Path, at: int
) -> None:
    """At each step of a slice, with some slices before it."""
    async with make_journal(kind, place) as journal:
        for number in range(9):
            await say(journal, f"c{number}", *[f"word w{number}"] * 30)
    count, is_failing = 0, threading.Event()

    def fail(step: str) -> None:
        nonlocal count
        if is_failing.is_set() and (kind == "sqlite" or step.startswith("index")):
            count += 1
            if count == at:
                raise OSError(f"cut off at {step}")

    async with make_journal(kind, place, search=True, failpoint=fail) as journal:
        is_failing.set()
        with anyio.fail_after(60), suppress(JournalUnavailable, JournalOutcomeUnknown):
            await journal.index()
    is_failing.clear()
    async with make_journal(kind, place, search=True) as journal:
        await journal.index()
        rows = await hits(journal, "word")
        assert len(rows) == len({(one.conversation_id, one.seq) for one in rows}) == 270
        assert len(await hits(journal, "w3")) == 30
    if kind == "sqlite":
        assert verify(place / "c.db").problems == ()


async def test_two_processes_may_make_the_index_at_the_same_moment() -> None:
    """Both look and find none before either makes it; then one must not fail for the other."""
    uri = postgres.conninfo()
    # Those who wait for this connection, or for someone who does.
    waiting = """
        WITH RECURSIVE waiting AS (
            SELECT pg_backend_pid() AS pid
            UNION SELECT l.pid FROM pg_locks l, waiting w
            WHERE NOT l.granted AND w.pid = ANY(pg_blocking_pids(l.pid))
        )
        SELECT count(*) - 1 FROM waiting
    """
    with postgres.schema() as schema:
        async with PostgresJournal(uri, schema=schema):
            pass  # the tables are there, without an index
        with (
            psycopg.connect(uri, options=f"-c search_path={schema}") as appending,
            anyio.fail_after(60),
        ):

            async def search() -> None:
                async with PostgresJournal(uri, schema=schema, search=True) as journal:
                    await hits(journal, "word")

            appending.execute("LOCK TABLE conversation IN ROW EXCLUSIVE MODE")
            async with anyio.create_task_group() as group:
                group.start_soon(search)
                group.start_soon(search)
                while appending.execute(waiting.encode()).fetchone() != (2,):
                    await anyio.lowlevel.checkpoint()
                appending.commit()
            rows = appending.execute("SELECT count(*) FROM search").fetchone()
        assert rows == (1,)


async def test_two_processes_index_each_message_once() -> None:
    with postgres.schema() as schema:
        uri = postgres.conninfo()
        async with (
            PostgresJournal(uri, schema=schema, search=True) as first,
            PostgresJournal(uri, schema=schema, search=True) as second,
            PostgresJournal(uri, schema=schema) as third,
        ):

            async def converse(journal: Journal, name: str) -> None:
                for _ in range(10):
                    await say(journal, name, "word", "word")

            async with anyio.create_task_group() as group:
                for number in range(15):
                    journal = (first, second, third)[number % 3]
                    group.start_soon(converse, journal, f"c{number}")
                for journal in (first, second):
                    group.start_soon(journal.index)
            for journal in (first, second):
                await journal.index()
                rows = await hits(journal, "word")
                assert len(rows) == len({(one.conversation_id, one.seq) for one in rows}) == 300
        with psycopg.connect(uri, options=f"-c search_path={schema}") as connection:
            assert connection.execute("SELECT count(*) FROM search_queue").fetchone() == (0,)


async def test_a_journal_that_was_not_asked_to_search_keeps_nothing_for_it(
    kind: str, place: Path
) -> None:
    async with make_journal(kind, place) as journal:
        claim = await say(journal, "c", "word")
        await journal.write_listing("c", Listing(1, "a", "idle", 1, 1), epoch=claim.epoch)
    tables = ["search", "search_message"]
    if kind == "sqlite":
        with closing(sqlite3.connect(place / "c.db")) as file:
            for table in (*tables, "search_again"):
                assert file.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
            found = file.execute("SELECT 1 FROM sqlite_schema WHERE name LIKE 'search_word%'")
            assert found.fetchone() is None
        return
    with psycopg.connect(postgres.conninfo(), options=f"-c search_path={place}") as connection:
        for table in (*tables, "search_queue", "search_log"):
            statement = f"SELECT count(*) FROM {table}"
            assert connection.execute(statement.encode()).fetchone() == (0,)


# --- the file -------------------------------------------------------------------------------------


def bytes_of(path: Path) -> bytes:
    log = Path(f"{path}-wal")
    return path.read_bytes() + (log.read_bytes() if log.exists() else b"")


@pytest.mark.parametrize("searches", [True, False])
async def test_a_deletion_leaves_no_word_in_the_file(searches: bool, tmp_path: Path) -> None:
    """Also if the process that deletes does not search itself."""
    path = tmp_path / "c.db"
    draw = random.Random(7)
    async with SQLiteJournal(path, search=True) as journal:
        for number in range(300):
            rare = "".join(draw.choices("abcdefgh", k=24))
            await say(journal, f"c{number}", f"order {rare}", f"secret{number:03}nobodysays{rare}")
            if number % 50 == 0:
                await journal.index()
        await journal.index()
        assert len(await hits(journal, begins="secret")) == 300
        assert b"nobodysays" in bytes_of(path)
    async with SQLiteJournal(path, search=searches) as journal:
        for number in range(300):
            claim = await journal.claim(f"c{number}")
            if number % 100 == 99:
                continue
            deletion = await journal.delete(f"c{number}", epoch=claim.epoch)
            assert deletion.is_erased
        content = bytes_of(path)
        for number in range(300):
            # FTS5 leaves out what a word shares with the word before it.
            word = f"{number:03}nobodysays".encode()
            assert (word in content) == (number % 100 == 99), number
        assert content.count(b"nobodysays") <= 3 * 4
    assert verify(path).problems == ()


async def test_a_large_index_is_not_rewritten_by_a_deletion_but_by_a_vacuum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SQLite below 3.42 has it: it only marks the words of a message that is deleted."""
    monkeypatch.setattr(sqlite_search, "_SECURE_DELETE_MIN", (99,))
    monkeypatch.setattr(sqlite_search, "_MERGED_MESSAGES_MAX", 1)
    path = tmp_path / "c.db"
    async with SQLiteJournal(path, search=True) as journal:
        for name in ("a", "b", "c"):
            await say(journal, name, f"hidden{name}nobodysays")
            await journal.index()
        claim = await say(journal, "d", "hiddendnobodysays")
        await journal.index()
        deletion = await journal.delete("d", epoch=claim.epoch)
        assert not deletion.is_erased
        assert b"ddnobodysays" not in bytes_of(path)
        assert await hits(journal, begins="hiddend") == []
        await journal.vacuum()
        assert b"dnobodysays" not in bytes_of(path)
        assert len(await hits(journal, begins="hidden")) == 3


async def test_ids_that_are_used_again_are_indexed(tmp_path: Path) -> None:
    """The newest rows of the file are deleted, and a new owner counts on from the rest."""
    path = tmp_path / "c.db"
    async with SQLiteJournal(path, search=True) as journal:
        await say(journal, "a", "word")
        claim = await say(journal, "b", *["word"] * 50)
        await journal.index()
        await journal.delete("b", epoch=claim.epoch)
    async with SQLiteJournal(path) as journal:
        await say(journal, "c", "word")
    async with SQLiteJournal(path, search=True) as journal:
        await journal.index()
        found = {one.conversation_id for one in await hits(journal, "word")}
        assert found == {"a", "c"}


async def test_a_reader_searches_beside_the_writer_and_without_one(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    async with SQLiteJournal(path, search=True) as writer:
        await say(writer, "c", "word")
        await writer.index()
        async with SQLiteJournal(path, read_only=True, search=True) as reader:
            assert len(await hits(reader, "word")) == 1
    async with SQLiteJournal(path, read_only=True, search=True) as reader:
        assert len(await hits(reader, "word")) == 1


DAMAGES = {
    "DELETE FROM search_message WHERE seq = 2": "lacks it",
    "UPDATE search_message SET words = replace(words, 'order', 'odder')": "differs from it",
    "UPDATE search_message SET left_view = 2": "left the view",
    "UPDATE search_message SET seq = 9 WHERE seq = 2": "lacks it",
    "UPDATE search_message SET log = log + 1": "no conversation",
    "INSERT INTO search_word (search_word, rowid, words) SELECT 'delete', id, words "
    "FROM search_message": "does not find it",
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_verification_compares_the_index_with_the_logs(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    async with SQLiteJournal(path, search=True) as journal:
        await say(journal, "c", "one order", "two orders")
        await journal.fork(
            "c", "f", at=1, records=[message("f", 2, "order", 5)], is_unfinished=False
        )
        await journal.index()
        await say(journal, "c", "not indexed yet")
    assert verify(path).problems == ()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(damage)
    found = [problem.found for problem in verify(path).problems]
    assert any(DAMAGES[damage] in one for one in found), found

    assert repair(path) is not None
    assert verify(path).problems == ()
    async with SQLiteJournal(path, search=True) as journal:
        await journal.index()
        assert len(await hits(journal, begins="order")) == 3


async def test_an_index_by_other_rules_is_made_again(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_journal(kind, place, search=True) as journal:
        await say(journal, "c", "word")
        await journal.index()
    module = f"turnkeeper.actors.journals.{kind}.search"
    monkeypatch.setattr(f"{module}.WORD_RULES", 2)
    async with make_journal(kind, place, search=True) as journal:
        await journal.index()
        assert len(await hits(journal, "word")) == 1


async def test_no_append_waits_for_the_index(kind: str, place: Path) -> None:
    """A slice that does not end holds up appends on a file, by one slice, and on no database."""
    if kind == "sqlite":
        pytest.skip("the writer's thread does the slices: they are small")
    gate, reached = threading.Event(), threading.Event()

    def stop(step: str) -> None:
        if step == "index commit":
            reached.set()
            gate.wait(60)

    async with make_journal(kind, place, search=True, failpoint=stop) as journal:
        try:
            claim = await say(journal, "c", "word")
            await anyio.to_thread.run_sync(reached.wait, 60)
            await say(journal, "c", "word")
            with psycopg.connect(
                postgres.conninfo(), options=f"-c search_path={place}"
            ) as connection:
                found = connection.execute("SELECT head FROM conversation").fetchone()
            assert found == (2,)
            assert claim.head == 0
        finally:
            gate.set()


KILLED = """
import os, signal, sys
import anyio
import anyio.lowlevel
from turnkeeper.actors import PostgresJournal, SQLiteJournal
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.events import UserMessageEvent

kind, where, schema, at = sys.argv[1:]
count = 0

def kill(step):
    global count
    if is_indexing and (kind == "sqlite" or step.startswith("index")):
        count += 1
        if count == int(at):
            os.kill(os.getpid(), signal.SIGKILL)

is_indexing = False

async def say_more(journal, epoch):
    for seq in range(2, 1_000):
        record = encode_record(UserMessageEvent(content="word meanwhile"))
        await journal.append("more", [record], epoch=epoch, expected_seq=seq, is_unfinished=False)
        os.write(1, f"{record.event_id}\\n".encode())

async def main():
    global is_indexing
    if kind == "sqlite":
        journal = SQLiteJournal(where, search=True, failpoint=kill)
    else:
        journal = PostgresJournal(where, schema=schema, search=True, failpoint=kill, lease_s=3.0)
    async with journal, anyio.create_task_group() as group:
        epoch = (await journal.claim("more")).epoch
        is_indexing = True
        group.start_soon(say_more, journal, epoch)
        await journal.index()

anyio.run(main)
"""


async def test_a_log_that_has_lost_records_does_not_hold_up_the_others() -> None:
    with postgres.schema() as schema:
        async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
            await say(journal, "damaged", "first", "second", "third")
            await say(journal, "whole", "second")
        with psycopg.connect(postgres.conninfo()) as connection:
            connection.execute(
                f"DELETE FROM {schema}.event WHERE event_id LIKE 'damaged %%' AND seq > 1"
            )
        opened = PostgresJournal(postgres.conninfo(), schema=schema, search=True)
        async with opened as journal:
            with anyio.fail_after(60):
                await journal.index()
            assert [one.conversation_id for one in await hits(journal, "first")] == ["damaged"]
            assert [one.conversation_id for one in await hits(journal, "second")] == ["whole"]


@pytest.mark.parametrize("prefix", ["", "c"])
async def test_a_page_reads_no_more_of_large_records_than_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """None of a message's texts may be long enough to be stored beside the log, as small images."""
    monkeypatch.setattr(searching, "SHOWN_BYTES_MAX", 100_000)

    def shrink(reader: SQLiteReader) -> None:
        reader.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 200_000)

    async with SQLiteJournal(tmp_path / "chats.db", search=True) as journal:
        epoch = (await journal.claim("c")).epoch
        for seq in range(1, 11):
            images = [{"url": "A" * 20_000}] * 3
            event = {"content": "word", "timestamp": "2026-01-01T00:00:00Z", "images": images}
            record = Record(f"e{seq}", "user_message", json.dumps(event).encode())
            await journal.append("c", [record], epoch=epoch, expected_seq=seq, is_unfinished=False)
        await journal.index()
        await journal._read(shrink)

        page = await journal.search(SearchQuery(["word"], 1_000, prefix=prefix))

    assert [row.seq for row in page.rows] == [10, 9]
    assert not page.is_complete


async def test_a_search_has_no_list_of_pending_words_to_read() -> None:
    with postgres.schema() as schema:
        async with make_journal("postgres", Path(schema), search=True) as journal:
            await say(journal, "a", *["one two"] * 20)
            await journal.index()
        with psycopg.connect(
            postgres.conninfo(), autocommit=True, options=f"-c search_path={schema}"
        ) as connection:
            cleaned = connection.execute("SELECT gin_clean_pending_list('search_message_words')")
            assert cleaned.fetchone() == (0,)


DAMAGES_IN_POSTGRES = {
    "DELETE FROM search_message WHERE seq = 2": "lacks it",
    "DELETE FROM search_message; DELETE FROM search_log": "lacks it",
    "UPDATE search_message SET words = ts_delete(words, 'order')": "differs from it",
    "UPDATE search_message SET words = words || array_to_tsvector('{odd}')": "differs from it",
    "UPDATE search_message SET left_view = 2 WHERE seq = 2": "left the view",
    "UPDATE search_message SET left_view = 0": "left the view",
    "INSERT INTO search_message SELECT id + 1, log, 9, 0, owner, words FROM search_message "
    "WHERE seq = 2": "a message that the log has not",
    "UPDATE search_message SET log = log + 1": "no conversation",
}


async def test_a_verification_compares_the_index_in_postgres_with_the_logs() -> None:
    tables = ("search_message", "search_log")
    with postgres.schema() as schema:
        async with make_journal("postgres", Path(schema), search=True) as journal:
            await say(journal, "c", "one order", "two orders")
            await journal.fork(
                "c", "f", at=1, records=[message("f", 2, "order", 5)], is_unfinished=False
            )
            claim = await journal.claim("c")
            taken_back = json.dumps({"retracted_event_ids": ["c 1"]}).encode()
            await journal.append(
                "c",
                [Record("r", "retraction", taken_back)],
                epoch=claim.epoch,
                expected_seq=3,
                is_unfinished=False,
            )
            await say(journal, "deleted", "an order")
            claim = await journal.claim("deleted")
            await journal.index()
            await journal.delete("deleted", epoch=claim.epoch)
        async with make_journal("postgres", Path(schema)) as journal:
            await say(journal, "c", "not indexed yet")
            assert (await verify_logs(journal)).problems == ()
            with psycopg.connect(
                postgres.conninfo(), autocommit=True, options=f"-c search_path={schema}"
            ) as connection:
                for table in tables:
                    connection.execute(f"CREATE TABLE kept_{table} AS SELECT * FROM {table}")
                for damage, expected in DAMAGES_IN_POSTGRES.items():
                    connection.execute(damage)
                    problems = (await verify_logs(journal)).problems
                    assert any(expected in one.found for one in problems), (damage, problems)
                    for table in tables:
                        connection.execute(f"DELETE FROM {table}")
                        connection.execute(f"INSERT INTO {table} SELECT * FROM kept_{table}")
            assert (await verify_logs(journal)).problems == ()


@pytest.mark.parametrize("near_max", [1, 256])
async def test_a_page_passes_over_messages_whose_owner_is_another_one_by_now(
    near_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than a page has, and the index has not followed yet."""
    monkeypatch.setattr(postgres_search, "_NEAR_MAX", near_max)
    with postgres.schema() as schema:
        async with make_journal("postgres", Path(schema), search=True) as journal:
            for at, name in enumerate(("old", "given", "new")):
                count = 9 if name == "given" else 2
                listing = Listing(count, "ann", "idle", 1, 1)
                await say(journal, name, *["word"] * count, listing=listing, at_us=1_000 * at)
            await journal.index()
            with psycopg.connect(
                postgres.conninfo(), autocommit=True, options=f"-c search_path={schema}"
            ) as connection:
                connection.execute("UPDATE listing SET owner = 'bob' WHERE name = 'given'")

            found = await walk(journal, SearchQuery(["word"], 1, owner="ann"))
            page = await journal.search(SearchQuery(["word"], 3, owner="ann"))

            assert [one.conversation_id for one in found] == ["new", "new", "old", "old"]
            assert list(page.rows) == found[:3]
            assert page.next is not None
            assert not await hits(journal, "word", owner="bob")


@pytest.mark.parametrize("at", drawn(range(1, 13), 4, of="kills in the index"))
async def test_a_killed_process_leaves_the_index_to_the_next(
    kind: str, place: Path, at: int
) -> None:
    """Killed at each step of a slice, while it appends."""
    async with make_journal(kind, place) as journal:
        for number in range(9):
            await say(journal, f"c{number}", *[f"word w{number}"] * 30)
        await say(journal, "more", "word")
    where = str(place / "c.db") if kind == "sqlite" else postgres.conninfo()
    ended = await anyio.run_process(
        [sys.executable, "-c", KILLED, kind, where, str(place), str(at)], check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    acknowledged = ended.stdout.decode().split()
    async with make_journal(kind, place, search=True) as journal:
        there = [record.event_id for record in await journal.read("more")][1:]
        # The last one may have been written before its sender heard of it.
        assert there[: len(acknowledged)] == acknowledged
        assert len(there) <= len(acknowledged) + 1
        await journal.index()
        rows = await hits(journal, "word")
        found = {(one.conversation_id, one.seq) for one in rows}
        assert len(rows) == len(found) == 270 + 1 + len(there)
        assert [one.event_id for one in reversed(await hits(journal, "meanwhile"))] == there
        if kind == "postgres":
            assert (await verify_logs(journal)).problems == ()
    if kind == "sqlite":
        assert verify(place / "c.db").problems == ()
