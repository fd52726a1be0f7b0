"""The listings in the databases: what a page costs, and files of before."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest

from tests import postgres
from tests.actors.conversations.stores import KINDS, store
from turnkeeper.actors import MemoryJournal, PostgresJournal, SQLiteJournal
from turnkeeper.actors.core.limits import LABEL_NAME_LENGTH_MAX
from turnkeeper.actors.journal import Journal, Listing, ListQuery, Record
from turnkeeper.actors.journals.postgres import listings as in_postgres
from turnkeeper.actors.journals.postgres import schema as postgres_schema
from turnkeeper.actors.journals.sqlite import listings as in_sqlite
from turnkeeper.actors.journals.sqlite.repair import repair
from turnkeeper.actors.journals.sqlite.verify import verify
from turnkeeper.actors.values.text import ID_LENGTH_MAX

pytestmark = pytest.mark.anyio

ORDERS = ("id", "created", "activity")
INDEXED: Sequence[dict[str, Any]] = (
    {},
    {"owner": "o1"},
    {"owner": "o1", "status": "running"},
    {"owner": "o1", "label": ("project", "x")},
)
"""The filters of which any page takes the same time among any number of conversations."""

QUERIES = [
    ListQuery(20, order=order, **filters)  # type: ignore[arg-type]  # one of the three
    for order in ORDERS
    for filters in INDEXED
] + [ListQuery(20, owner="o1", prefix="p"), ListQuery(20, prefix="p")]


def name_of(query: ListQuery) -> str:
    return f"{query.order}-{query.owner}-{query.status}-{query.label}-{query.prefix}"


def somewhere(query: ListQuery) -> ListQuery:
    """The same query in the middle of a walk."""
    return query._replace(after=["p5"] if query.order == "id" else [5_000, 5])


async def append(
    journal: Journal, name: str, listing: Listing | None, *, kind: str = "note"
) -> None:
    claim = await journal.claim(name)
    record = Record(f"{name} {claim.head}", kind, b"{}")
    await journal.append(
        name,
        [record],
        epoch=claim.epoch,
        expected_seq=claim.head + 1,
        is_unfinished=False,
        listing=listing,
    )


LABELS: Sequence[dict[str, str]] = ({}, {}, {"x": "1"}, {"x": "1"}, {"x": "2"}, {}, {}, {"x": "1"})


@pytest.mark.parametrize("kind", KINDS)
async def test_labels_that_come_change_and_go_in_one_ownership_are_found_as_they_are(
    kind: str, tmp_path: Path
) -> None:
    """Most conversations have no labels, and those of an owner are not looked at again then."""
    with store(kind, tmp_path) as opens:
        async with opens() as journal:
            claims = {name: await journal.claim(name) for name in ("a", "b")}
            for at, labels in enumerate(LABELS, 1):
                for name, claim in claims.items():
                    await journal.append(
                        name,
                        [Record(f"{name} {at}", "note", b"{}")],
                        epoch=claim.epoch,
                        expected_seq=at,
                        is_unfinished=False,
                        listing=Listing(at, "me", "idle", at, at, labels if name == "a" else {}),
                    )
                for value in ("1", "2"):
                    page = await journal.page(ListQuery(9, owner="me", label=("x", value)))
                    found = [row.conversation_id for row in page.rows]
                    assert found == (["a"] if labels.get("x") == value else []), (at, value)


async def test_labels_of_another_owner_in_between_are_not_left_behind() -> None:
    with store("postgres", Path()) as opens:
        async with opens() as first, opens() as second:
            for at, (journal, labels) in enumerate(
                [(first, {}), (second, {"x": "1"}), (first, {})], 1
            ):
                claim = await journal.claim("a", takeover=True)
                listing = Listing(at, "me", "idle", at, at, labels)
                await journal.append(
                    "a",
                    [Record(f"a {at}", "note", b"{}")],
                    epoch=claim.epoch,
                    expected_seq=at,
                    is_unfinished=False,
                    listing=listing,
                )
            page = await first.page(ListQuery(9, owner="me", label=("x", "1")))
            assert not page.rows


@pytest.mark.parametrize("kind", KINDS)
async def test_the_longest_texts_are_listed_and_found(kind: str, tmp_path: Path) -> None:
    """An index of PostgreSQL has 2,704 bytes for an entry, and these need four a character."""
    rng = Random(kind)

    def text(length: int) -> str:  # no compression makes it shorter
        return "".join(chr(rng.randrange(0x20000, 0x2A6D0)) for _ in range(length))

    name, owner, value = text(ID_LENGTH_MAX - 2), text(ID_LENGTH_MAX), text(100_000)
    label = text(LABEL_NAME_LENGTH_MAX)
    with store(kind, tmp_path) as opens:
        async with opens() as journal:
            await append(journal, name, Listing(1, owner, "running", 1, 1, {label: value}))
            for order in ORDERS:
                query = ListQuery(9, owner=owner, label=(label, value), order=order)  # type: ignore[arg-type]  # one of the three
                (row,) = (await journal.page(query)).rows
                assert (row.conversation_id, row.listing.labels) == (name, {label: value})
                other = query._replace(label=(label, f"{value}x"))
                assert not (await journal.page(other)).rows


async def test_tables_whose_indexes_have_the_labels_themselves_are_migrated() -> None:
    with postgres.schema() as schema:
        async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
            await append(journal, "c", Listing(1, "a", "idle", 1, 1, {"x": "y"}))
        with psycopg.connect(
            postgres.conninfo(), autocommit=True, options=f"-c search_path={schema}"
        ) as connection:
            connection.execute(
                "DROP INDEX label_id, label_created, label_active; "
                "CREATE INDEX label_id ON label (owner, label, value, name); "
                "CREATE INDEX label_created ON label (owner, label, value, created_us); "
                "CREATE INDEX label_active ON label (owner, label, value, active_us); "
                "UPDATE journal SET version = 6"
            )
        async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
            (row,) = (await journal.page(ListQuery(9, owner="a", label=("x", "y")))).rows
            assert row.conversation_id == "c"
            value = "".join(map(chr, range(0x20000, 0x21000)))
            await append(journal, "c", Listing(2, "a", "idle", 1, 1, {"x": value}))


# --- what a page costs ----------------------------------------------------------------------------


@pytest.mark.parametrize("query", QUERIES, ids=name_of)
async def test_a_page_in_sqlite_is_one_range_of_one_index(query: ListQuery, tmp_path: Path) -> None:
    """No sort, and no table or index that is read from its beginning to find some rows of it.

    But for the recent rows, which are few.
    """
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path):
        pass
    with closing(sqlite3.connect(path)) as connection:
        for one in (query, somewhere(query)):
            statement, values = in_sqlite.page_statement(one, one.after, 20)
            plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)]
            found = "\n".join(plan)
            assert found.count("SCAN l\n") == 1, found
            folded, recent = found.split("SCAN l\n")
            assert "TEMP B-TREE" not in folded, found
            first, *steps = [step for step in folded.splitlines() if "(subquery" not in step]
            assert "INDEX" in first, found
            assert ("owner=?" in first) is (query.owner is not None), found
            assert all(step.startswith(("SEARCH", "CORRELATED", "MAT")) for step in steps), found
            assert "INDEX" not in recent.replace("INTEGER PRIMARY KEY", ""), found


@pytest.fixture(scope="module")
def many() -> Iterator[psycopg.Connection[Any]]:
    """20,000 conversations of two users, half of them running, half of them with a label."""
    import anyio

    with postgres.schema() as schema:

        async def make() -> None:
            async with PostgresJournal(postgres.conninfo(), schema=schema):
                pass

        anyio.run(make)
        with psycopg.connect(
            postgres.conninfo(), autocommit=True, options=f"-c search_path={schema}"
        ) as connection:
            connection.execute(
                """
                INSERT INTO conversation (name, incarnation, log, owner, epoch, head, tip,
                                          forked_at, is_unfinished, updated_us)
                SELECT 'p' || n, 0, n, NULL, 1, 1, 0, 0, false, n FROM generate_series(1, 20000) n;
                INSERT INTO listing
                SELECT id, name, 1, 'o' || id % 2, CASE WHEN id / 2 % 2 = 0 THEN 'running'
                    ELSE 'finished' END, id, 40000 - id, '{}', '', 0 FROM conversation;
                INSERT INTO label SELECT conversation, 'project', 'x', owner, name, created_us,
                    active_us FROM listing WHERE conversation / 4 % 2 = 0;
                """
            )
            connection.execute("ANALYZE")
            yield connection


@pytest.mark.parametrize("query", QUERIES, ids=name_of)
async def test_a_page_in_postgres_looks_at_no_more_rows_than_it_has(
    query: ListQuery, many: psycopg.Connection[Any]
) -> None:
    for one in (query, somewhere(query)):
        statement, values = in_postgres.page_statement(one, one.after, 20)
        row = many.execute(
            f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}".encode(), values
        ).fetchone()
        assert row is not None
        (plan,) = row[0]
        looked_at = max(rows_of(plan["Plan"]))
        assert looked_at <= 60, json.dumps(plan, indent=1)


def rows_of(plan: dict[str, Any]) -> Iterator[float]:
    """How many rows each step of a plan has seen, with those that it left out again."""
    left_out = plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Join Filter", 0)
    yield (plan["Actual Rows"] + left_out) * plan["Actual Loops"]
    for inner in plan.get("Plans", ()):
        yield from rows_of(inner)


async def test_a_page_that_no_index_has_looks_at_so_many_rows_and_no_more() -> None:
    async with MemoryJournal() as journal:
        for number in range(30):
            await append(journal, f"c{number:02}", Listing(1, "a", "idle", number, number))
        page = await journal.page(
            ListQuery(5, owner="a", prefix="c29", order="created", scan_max=9)
        )
        assert (page.rows, page.next, page.is_complete) == ([], (8, "c08"), False)


# --- files and tables of before -------------------------------------------------------------------


async def test_tables_without_listings_get_them_and_show_what_is_known() -> None:
    with postgres.schema() as schema:
        async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
            await append(journal, "c", Listing(1, "a", "idle", 1, 1, {"x": "y"}))
            await journal.claim("never written")
        with psycopg.connect(
            postgres.conninfo(), autocommit=True, options=f"-c search_path={schema}"
        ) as connection:
            connection.execute(
                "DROP TABLE listing, listing_recent, label, search, search_queue, search_log, "
                "search_message; "
                "UPDATE journal SET version = 2"
            )
        async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
            (row,) = (await journal.page(ListQuery(9, order="activity"))).rows
            assert (row.conversation_id, row.listing.seq, row.is_stale) == ("c", 0, True)
            await append(journal, "c", listing := Listing(2, "b", "idle", 1, 1, {"x": "y"}))
            (row,) = (await journal.page(ListQuery(9, owner="b", label=("x", "y")))).rows
            assert (row.listing, row.is_stale) == (listing, False)


async def test_a_migration_of_many_conversations_may_take_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer than an answer may take, by the server's clock and by ours; and only then."""
    with postgres.schema() as schema:
        uri = postgres.conninfo()
        async with PostgresJournal(uri, schema=schema):
            pass
        allowed: list[float] = []
        with psycopg.connect(uri, options=f"-c search_path={schema}") as connection:
            postgres_schema.bring_up_to_date(connection, schema, allow=allowed.append)
            assert allowed == []
            script = "CREATE TABLE later AS SELECT current_setting('statement_timeout')"
            scripts = (*postgres_schema.MIGRATIONS, script)
            monkeypatch.setattr(postgres_schema, "MIGRATIONS", scripts)
            monkeypatch.setattr(postgres_schema, "SCHEMA_VERSION", len(scripts))
            postgres_schema.bring_up_to_date(connection, schema, allow=allowed.append)
            found = connection.execute("SELECT * FROM later").fetchone()
        assert allowed == [postgres_schema.MIGRATION_S]
        assert found == ("200s",)


async def test_a_repair_clears_the_rows_and_the_file_shows_all_that_it_has(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path) as journal:
        for name in ("c", "d"):
            await append(journal, name, Listing(1, "a", "idle", 1, 1, {"x": "y"}))
        await append(journal, "d", Listing(2, "a", "idle", 1, 1))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE event SET payload = x'00' WHERE event_id = 'd 1'")
    assert repair(path) is not None
    async with SQLiteJournal(path) as journal:
        rows = (await journal.page(ListQuery(9))).rows
        assert [(row.conversation_id, row.listing.seq, row.is_stale) for row in rows] == [
            ("c", 0, True),
            ("d", 0, True),
        ]
        assert (await journal.page(ListQuery(9, owner="a"))).rows == []
    assert verify(path).stale == ("c", "d")


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE listing SET owner = 'b'",
        "UPDATE listing SET payload = 'x'",
        "UPDATE listing SET active_us = 7",
        "UPDATE label SET value = 'z'",
        "DELETE FROM label",
        "DELETE FROM listing",
    ],
)
async def test_damage_to_a_row_is_found_and_does_no_more_harm(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path) as journal:
        await append(journal, "c", Listing(1, "a", "idle", 1, 1, {"x": "y"}))
        assert verify(path).problems == ()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(damage)
    (problem,) = verify(path).problems
    assert problem.conversation_id == "c"
    async with SQLiteJournal(path) as journal:
        for row in (await journal.page(ListQuery(9))).rows:
            assert row.listing == Listing(1, "a", "idle", 1, 1, {"x": "y"}) or row.is_stale
        assert len(await journal.read("c")) == 1
        await append(journal, "c", good := Listing(2, "a", "idle", 1, 1, {"x": "y"}))
        (row,) = (await journal.page(ListQuery(9, owner="a", label=("x", "y")))).rows
        assert row.listing == good
    assert verify(path).problems == ()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE listing_recent SET payload = 'x'",
        "UPDATE listing_recent SET owner = 'b'",
        "UPDATE listing_recent SET name = 'd'",
        "UPDATE listing SET owner = 'b'",
        "UPDATE listing SET created_us = 2",
        "UPDATE label SET value = 'z'",
        "DELETE FROM label",
        "DELETE FROM listing",
    ],
)
async def test_damage_to_a_row_that_stands_apart_is_found(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    second = Listing(2, "a", "idle", 1, 2, {"x": "y"})
    async with SQLiteJournal(path) as journal:
        await append(journal, "c", Listing(1, "a", "idle", 1, 1, {"x": "y"}))
        await append(journal, "c", second)
        assert verify(path).problems == ()
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(damage).rowcount == 1
    (problem,) = verify(path).problems
    assert problem.conversation_id == "c"
    async with SQLiteJournal(path) as journal:
        for row in (await journal.page(ListQuery(9))).rows:
            assert row.listing == second or row.is_stale
        await append(journal, "c", good := second._replace(seq=3))
        (row,) = (await journal.page(ListQuery(9, owner="a", label=("x", "y")))).rows
        assert row.listing == good
    assert verify(path).problems == ()


async def test_a_file_that_is_only_read_says_who_owns_it(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path, address="the writer") as journal:
        await append(journal, "c", None)
        async with SQLiteJournal(path, read_only=True) as reader:
            (row,) = (await reader.page(ListQuery(9))).rows
            assert (row.owned, row.address) == ("elsewhere", "the writer")
    async with SQLiteJournal(path, read_only=True) as reader:
        (row,) = (await reader.page(ListQuery(9))).rows
        assert (row.owned, row.address) == ("none", "")


async def test_a_database_says_which_process_owns_a_conversation() -> None:
    with postgres.schema() as schema:
        uri = postgres.conninfo()
        async with PostgresJournal(uri, schema=schema, address="the first") as first:
            async with PostgresJournal(uri, schema=schema, address="the second") as second:
                await append(first, "a", None)
                await append(second, "b", None)
                rows = (await first.page(ListQuery(9))).rows
                assert [(row.owned, row.address) for row in rows] == [
                    ("here", ""),
                    ("elsewhere", "the second"),
                ]
            rows = (await first.page(ListQuery(9))).rows
            assert [row.owned for row in rows] == ["here", "none"]
