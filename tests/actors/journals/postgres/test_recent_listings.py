"""The rows for lists that have changed last stand apart in the database, and no list shows that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import anyio
import psycopg
import pytest

from tests import postgres
from tests.actors.journals.wanted_lists import QUERIES, wanted
from turnkeeper.actors import PostgresJournal
from turnkeeper.actors.journal import Claim, Listing, ListQuery, Record
from turnkeeper.actors.journals.postgres import listings, writer
from turnkeeper.actors.journals.shared.list_pages import listing_columns

pytestmark = pytest.mark.anyio

MAX = 4
FOLDED = 3

# What a process of version 5 of the schema writes, which has no recent rows.
OLDER_WRITE = """
    INSERT INTO listing VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
    ON CONFLICT (conversation) DO UPDATE SET seq = excluded.seq, owner = excluded.owner,
        status = excluded.status, created_us = excluded.created_us,
        active_us = excluded.active_us, labels = excluded.labels, payload = excluded.payload,
        seal = excluded.seal
"""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "RECENT_LISTINGS_MAX", MAX)
    monkeypatch.setattr(listings, "LISTINGS_FOLDED_MAX", FOLDED)


@pytest.fixture
def schema() -> Iterator[str]:
    with postgres.schema() as name:
        yield name


class Lists:
    """A journal, and beside it a connection; it remembers what lists have to show."""

    def __init__(self, journal: PostgresJournal, connection: psycopg.Connection[Any]) -> None:
        self.journal = journal
        self.connection = connection
        self.listed: dict[str, Listing] = {}
        self.claims: dict[str, Claim] = {}
        self._written = 0

    async def claim(self, name: str) -> Claim:
        self.claims[name] = await self.journal.claim(name)
        return self.claims[name]

    async def append(self, name: str, listing: Listing | None) -> None:
        claim = self.claims.get(name) or await self.claim(name)
        self._written += 1
        await self.journal.append(
            name,
            [Record(f"event {self._written}", "note", b"{}")],
            epoch=claim.epoch,
            expected_seq=claim.head + 1,
            is_unfinished=False,
            listing=listing,
        )
        self.claims[name] = claim._replace(head=claim.head + 1)
        if listing is not None:
            self.listed[name] = listing

    async def append_as_older(self, name: str, listing: Listing) -> None:
        """Append as a process does that does not know of recent rows, in an epoch of its own."""
        await self.claim(name)
        await self.append(name, None)
        columns = listing_columns(name, listing)
        number = self.number(name)
        self.connection.execute(OLDER_WRITE, (number, name, *columns))
        moved = "UPDATE label SET active_us = %s WHERE conversation = %s"
        self.connection.execute(moved, (listing.active_us, number))
        self.listed[name] = listing
        await self.claim(name)

    async def delete(self, name: str) -> None:
        await self.journal.delete(name, epoch=self.claims.pop(name).epoch)
        del self.listed[name]

    def number(self, name: str) -> int:
        return int(self._one("SELECT id FROM conversation WHERE name = %s", (name,))[0])

    def recent(self) -> int:
        return int(self._one("SELECT count(*) FROM listing_recent")[0])

    def fold(self) -> None:
        """Fold as any process does that writes here."""
        with self.connection.transaction():
            listings.fold_listings(self.connection)

    async def names(self, query: ListQuery) -> list[str]:
        """Return the names on the pages of a query; each row is compared."""
        found: list[str] = []
        for _ in range(100):
            page = await self.journal.page(query)
            for row in page.rows:
                assert row.listing == self.listed[row.conversation_id]
                found.append(row.conversation_id)
            if page.next is None:
                return found
            query = query._replace(after=page.next)
        raise AssertionError("the list does not end")

    def _one(self, statement: str, values: Sequence[object] = ()) -> tuple[Any, ...]:
        row: tuple[Any, ...] | None = self.connection.execute(statement.encode(), values).fetchone()
        assert row is not None
        return row

    def place_of(self, name: str) -> tuple[Any, ...]:
        """Return where the row of `listing` is: another version of it has another place."""
        number = self.number(name)
        return self._one("SELECT ctid, xmin, seq FROM listing WHERE conversation = %s", (number,))


def connect(schema: str) -> psycopg.Connection[Any]:
    options = f"-c search_path={schema}"
    return psycopg.connect(postgres.conninfo(), autocommit=True, options=options)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("seed", range(2))
async def test_lists_are_exact_whichever_rows_stand_apart(seed: int, schema: str) -> None:
    """Turns, changes, deletions, folds and an older process in a drawn order."""
    random = Random(seed)
    heads: dict[str, int] = {}
    both = 0
    async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
        with connect(schema) as connection:
            lists = Lists(journal, connection)
            for step in range(80):
                name = f"c{random.randrange(9)}"
                old = lists.listed.get(name)
                heads[name] = heads.get(name, 0) + 1
                at = 1_000 * random.randrange(1_000) + step
                if old is None:
                    labels = {"project": random.choice("xxy")}
                    owner = random.choice("ab")
                    await lists.append(name, Listing(heads[name], owner, "running", at, at, labels))
                    continue
                if random.random() < 0.05:
                    await lists.delete(name)
                    heads[name] = 0
                    continue
                status = random.choice(("running", "finished", "idle", "error"))
                new = old._replace(seq=heads[name], status=status, active_us=at)
                what = random.random()
                if what < 0.1:
                    labels = {one: random.choice("xy") for one in ("project", "area")}
                    labels = random.choice((labels, {}, dict(old.labels)))
                    new = new._replace(owner=random.choice("ab"), labels=labels)
                elif what < 0.2:
                    await lists.append_as_older(name, new)
                    continue
                elif what < 0.3:
                    await lists.claim(name)
                await lists.append(name, new)
                if random.random() < 0.1:
                    lists.listed[name] = new._replace(owner=random.choice("ab"), payload="{}")
                    epoch = lists.claims[name].epoch
                    await journal.write_listing(name, lists.listed[name], epoch=epoch)
                if random.random() < 0.2:
                    lists.fold()
                if step % 8 == 0:
                    both += 0 < lists.recent() < len(lists.listed)
                    for query in random.sample(QUERIES, 6):
                        assert await lists.names(query) == wanted(lists.listed, query), (
                            step,
                            query,
                        )
            assert both > 2
            for query in QUERIES:
                assert await lists.names(query) == wanted(lists.listed, query), query


async def test_a_turn_leaves_the_indexes_of_lists_as_they_are(schema: str) -> None:
    async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
        with connect(schema) as connection:
            lists = Lists(journal, connection)
            begun = Listing(1, "a", "running", 1, 1, {"project": "x"})
            await lists.append("c", begun)
            assert lists.recent() == 0
            place = lists.place_of("c")

            for seq, status in enumerate(("finished", "running", "finished"), 2):
                await lists.append("c", begun._replace(seq=seq, status=status, active_us=seq))

            assert (lists.place_of("c"), lists.recent()) == (place, 1)
            query = ListQuery(9, owner="a", label=("project", "x"))
            assert await lists.names(query) == ["c"]


@pytest.mark.usefixtures("few")
async def test_the_rows_at_rest_are_folded_first_and_none_that_is_being_written(
    schema: str,
) -> None:
    async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
        with connect(schema) as connection, connect(schema) as other:
            lists = Lists(journal, connection)
            for number in range(MAX + 3):
                begun = Listing(1, "a", "running", number, number, {"project": "x"})
                status = "finished" if number < 5 else "running"
                await lists.append(f"c{number}", begun)
                end = begun._replace(seq=2, status=status, active_us=10 - number)
                await lists.append(f"c{number}", end)
            with other.transaction():
                other.execute("SELECT FROM conversation WHERE name = 'c3' FOR NO KEY UPDATE")
                lists.fold()

            left = connection.execute("SELECT name FROM listing_recent ORDER BY name").fetchall()
            assert left == [("c0",), ("c3",), ("c5",), ("c6",)]
            for label in (None, ("project", "x")):
                query = ListQuery(2, owner="a", label=label, order="activity")
                assert await lists.names(query) == wanted(lists.listed, query)


async def test_a_row_that_an_older_process_has_overtaken_is_not_folded(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listings, "RECENT_LISTINGS_MAX", 0)
    async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
        with connect(schema) as connection:
            lists = Lists(journal, connection)
            begun = Listing(1, "a", "running", 1, 1)
            await lists.append("c", begun)
            await lists.append("c", begun._replace(seq=2, active_us=2))
            await lists.append_as_older("c", begun._replace(seq=3, active_us=3))
            for count in (1, 0):
                assert lists.recent() == count
                assert await lists.names(ListQuery(9, owner="a")) == ["c"]
                lists.fold()


async def test_a_listing_that_is_written_without_an_append_is_looked_at_again(schema: str) -> None:
    async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
        with connect(schema) as connection:
            lists = Lists(journal, connection)
            begun = Listing(1, "a", "running", 1, 1)
            await lists.append("c", begun)
            epoch = lists.claims["c"].epoch
            await journal.write_listing("c", begun._replace(owner="b"), epoch=epoch)
            await lists.append("c", begun._replace(seq=2))
            assert await lists.names(ListQuery(9, owner="a")) == ["c"]
            assert await lists.names(ListQuery(9, owner="b")) == []


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("has_rest", [True, False])
async def test_a_process_folds_what_it_writes(
    has_rest: bool, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it rests, or else before it has written four times as many."""
    monkeypatch.setattr(writer, "LISTINGS_BETWEEN", FOLDED)
    if has_rest:
        monkeypatch.setattr(writer, "_BUSY_FACTOR", 1_000)
    else:
        monkeypatch.setattr(writer.PostgresWriter, "rest", lambda _: None)
    async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
        with connect(schema) as connection:
            lists = Lists(journal, connection)
            for number in range(30):
                begun = Listing(1, "a", "running", number, number)
                await lists.append(f"c{number:02}", begun)
                await lists.append(f"c{number:02}", begun._replace(seq=2, status="finished"))
            with anyio.fail_after(60):
                while has_rest and lists.recent() == 30:  # its thread has not rested yet
                    await anyio.lowlevel.checkpoint()
            assert 0 < lists.recent() < 30
            query = ListQuery(7, owner="a", order="activity")
            assert await lists.names(query) == wanted(lists.listed, query)


@pytest.mark.parametrize("statement", ["DELETE FROM listing", "DELETE FROM listing WHERE seq = 1"])
async def test_an_older_process_that_deletes_leaves_no_text_of_a_message(
    statement: str, schema: str
) -> None:
    async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
        with connect(schema) as connection:
            lists = Lists(journal, connection)
            begun = Listing(1, "a", "running", 1, 1)
            await lists.append("c", begun)
            await lists.append("c", begun._replace(seq=2, payload='{"said":"secret"}'))
            assert lists.recent() == 1
            connection.execute(statement.encode())
            assert lists.recent() == 0
