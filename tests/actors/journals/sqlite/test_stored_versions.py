"""Files that earlier versions of the schema wrote are read, written and verified as ever.

`stored/version_1` and `version_2` were closed in order; `version_1_killed` is what a kill leaves,
with the newest commits in its write-ahead log; `version_3`, `version_4` and
`version_5` are the first as of those versions. All have
everything in them: parts, a fork, a deletion, a snapshot, a rejection, and a name with a control
character, which no new conversation may have.
"""

# ruff: noqa: ASYNC240 - the files of a test are small, and its loop has nothing else to do

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import get_args

import anyio
import pytest

from turnkeeper.actors.errors import (
    ConversationNotFound,
    JournalRefused,
    JournalUnavailable,
    OwnedElsewhere,
)
from turnkeeper.actors.journal import Listing, ListOrder, ListQuery, Snapshot
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.sqlite import schema
from turnkeeper.actors.journals.sqlite.journal import SQLiteJournal
from turnkeeper.actors.journals.sqlite.reader import SQLiteReader
from turnkeeper.actors.journals.sqlite.repair import repair
from turnkeeper.actors.journals.sqlite.schema import SCHEMA_VERSION
from turnkeeper.actors.journals.sqlite.verify import verify
from turnkeeper.runtime import Ports, Unavailable

STORED = Path(__file__).parent / "stored"
HEADS = {"alice": 131, "bob": 3, "fork": 101, "tab\there": 1}


@pytest.fixture(
    params=[
        "version_1",
        "version_1_killed",
        "version_2",
        "version_3",
        "version_4",
        "version_5",
    ]
)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "chats.db"
    for end in ("", "-wal"):
        stored = STORED / f"{request.param}{end}.gz"
        if stored.exists():
            Path(f"{path}{end}").write_bytes(gzip.decompress(stored.read_bytes()))
    return path


async def check(journal: SQLiteJournal) -> None:
    heads = {info.conversation_id: info.head for info in await journal.list()}
    assert heads.items() >= HEADS.items()
    assert (await read_all(journal, "alice"))[:131] == [f"a{n}" for n in range(1, 132)]
    assert await read_all(journal, "fork") == [*(f"a{n}" for n in range(1, 101)), "f101"]
    assert len((await journal.read("alice", after=130))[0].payload) > 40_000
    assert await journal.find_messages("alice", ["m7", "m130"]) == {"m7": 7, "m130": 130}
    assert await journal.read_snapshot("alice") == Snapshot(130, "v1", b"folds")
    assert [one.reason for one in await journal.rejections("alice")] == ["9"]
    with pytest.raises(ConversationNotFound):
        await journal.read("gone")
    # Of the listings, which came later, no more is known than that these exist.
    for order in get_args(ListOrder):
        rows = (await journal.page(ListQuery(9, order=order))).rows
        assert {row.conversation_id for row in rows} == HEADS.keys()
        assert all(row.is_stale and row.listing.active_us == row.updated_us for row in rows)
    assert (await journal.page(ListQuery(9, owner="a", label=("x", "y")))).rows == []


async def test_an_earlier_file_is_read_as_it_is(path: Path) -> None:
    before = path.read_bytes()
    async with SQLiteJournal(path, read_only=True) as journal:
        await check(journal)
    assert verify(path).problems == ()
    assert path.read_bytes() == before


async def test_an_earlier_file_is_brought_up_to_date_and_goes_on(path: Path) -> None:
    async with SQLiteJournal(path) as journal:
        await check(journal)
        for name, head in HEADS.items():
            claim = await journal.claim(name)
            assert claim.head == head
            listing = Listing(head + 1, "a", "idle", 1, 1, {"x": name})
            records = [make_record("new", message_id="new")]
            await journal.append(
                name,
                records,
                epoch=claim.epoch,
                expected_seq=head + 1,
                is_unfinished=False,
                listing=listing,
            )
            (row,) = (await journal.page(ListQuery(9, owner="a", label=("x", name)))).rows
            assert (row.listing, row.is_stale) == (listing, False)
    assert verify(path).problems == ()
    async with SQLiteJournal(path, read_only=True) as journal:
        assert [info.head for info in await journal.list()] == [head + 1 for head in HEADS.values()]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


async def test_an_earlier_file_is_repaired(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE event SET payload = x'00' WHERE event_id = 'a120'")
    done = repair(path)
    assert done is not None
    assert [loss.conversation_id for loss in done.losses] == ["alice"]
    async with SQLiteJournal(path) as journal:
        assert len(await read_all(journal, "alice")) == 119
        assert len(await read_all(journal, "fork")) == HEADS["fork"]


async def test_a_reader_of_an_earlier_file_follows_its_migration(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer of then is followed by one of now, and nothing but the version tells of it."""
    monkeypatch.setattr(SQLiteReader, "_look", lambda _reader: (1,))
    async with SQLiteJournal(path, read_only=True) as reader:
        assert len((await reader.page(ListQuery(9))).rows) == len(HEADS)
        async with SQLiteJournal(path) as journal:
            claim = await journal.claim("bob")
            listings = [Listing(claim.head + n, "a", "idle", 1, n) for n in (1, 2)]
            for listing in listings:
                await journal.append(
                    "bob",
                    [make_record(f"new {listing.seq}")],
                    epoch=claim.epoch,
                    expected_seq=listing.seq,
                    is_unfinished=False,
                    listing=listing,
                )
            (row,) = (await reader.page(ListQuery(9, owner="a", order="activity"))).rows
            assert (row.listing, row.is_stale) == (listings[-1], False)


def migrate_as_a_newer_version(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as newer:
        newer.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


async def test_a_reader_refuses_a_file_that_a_newer_version_migrates_while_it_is_open(
    tmp_path: Path,
) -> None:
    """Only opening had looked: an inspector of before went on to show what it did not know."""
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path) as journal:
        claim = await journal.claim("c")
        await journal.append(
            "c", [make_record("e1")], epoch=claim.epoch, expected_seq=1, is_unfinished=False
        )
        async with SQLiteJournal(path, read_only=True) as reader:
            assert await read_all(reader, "c") == ["e1"]
            migrate_as_a_newer_version(path)
            for _ in range(2):
                with pytest.raises(JournalRefused, match="use a newer turnkeeper"):
                    await read_all(reader, "c")


async def test_an_owner_does_not_write_to_a_file_that_a_newer_version_has_just_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows would lack what the new version adds; it was shut out only after the migration."""
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path) as journal:
        await journal.claim("c")
        with monkeypatch.context() as newer:
            newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, "CREATE TABLE newer (id);"))
            newer.setattr(schema, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
            schema.open_for_writing(path, synchronous="FULL", busy_wait_s=1).close()
        with pytest.raises(OwnedElsewhere):
            await journal.claim("c")


@pytest.mark.parametrize("is_owner", [True, False])
async def test_a_file_that_is_migrated_as_a_read_begins_is_refused(
    tmp_path: Path, *, is_owner: bool
) -> None:
    path = tmp_path / "chats.db"

    def migrate_before(statement: str) -> None:
        if statement == "BEGIN":
            migrate_as_a_newer_version(path)

    async with SQLiteJournal(path) as journal:
        await journal.claim("c")
        reader = SQLiteReader(
            path,
            busy_wait_s=1,
            is_owner=is_owner,
            on_open=lambda connection: connection.set_trace_callback(migrate_before),
        )
        with closing(reader), pytest.raises(JournalRefused, match="use a newer turnkeeper"):
            reader.do(SQLiteReader.size)


@pytest.mark.parametrize("takeover", [False, True])
async def test_an_opening_that_fails_after_the_migration_says_that_the_file_is_migrated(
    path: Path, takeover: bool
) -> None:
    """It said that nothing was changed, and older versions refused the file from then on."""

    def start(name: str, target: Callable[[], None]) -> None:
        if name.startswith("reader"):
            raise Unavailable("no thread; nothing was done; try again")
        Ports().start_thread(name, target)

    failing = SQLiteJournal(path, takeover=takeover, ports=Ports(start_thread=start))
    with pytest.raises(JournalUnavailable) as caught:
        async with failing:
            raise AssertionError("entered")
    assert str(caught.value) == (
        "no thread; no conversation was changed, but the file was migrated to schema version "
        f"{SCHEMA_VERSION}, which older versions of turnkeeper refuse; try again"
    )
    with pytest.raises(Unavailable, match="nothing was done"):
        async with failing:
            raise AssertionError("entered")


async def test_a_file_that_a_takeover_migrates_meanwhile_is_not_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second migration failed, and the file "is damaged: run `turnkeeper repair`"."""
    migrate = schema._migrate
    migrated: list[int] = []
    async with anyio.from_thread.BlockingPortal() as portal, AsyncExitStack() as stack:
        taker = SQLiteJournal(path, takeover=True, address="the taker")

        def migrate_after_taker(connection: sqlite3.Connection, version: int) -> None:
            migrated.append(version)
            if len(migrated) == 1:
                portal.start_task_soon(stack.enter_async_context, taker).result()
            migrate(connection, version)

        monkeypatch.setattr(schema, "_migrate", migrate_after_taker)
        with pytest.raises(OwnedElsewhere, match="the taker"):
            async with SQLiteJournal(path):
                raise AssertionError("entered")
        await taker.claim("alice")
    assert len(migrated) == 2
    assert verify(path).problems == ()


async def test_an_owner_refuses_to_read_a_file_that_a_newer_version_took_over(
    tmp_path: Path,
) -> None:
    """It no longer wrote, but read on as if the file were what it knew."""
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path) as journal:
        claim = await journal.claim("c")
        await journal.append(
            "c", [make_record("e1")], epoch=claim.epoch, expected_seq=1, is_unfinished=False
        )
        async with SQLiteJournal(path, takeover=True):
            assert await read_all(journal, "c") == ["e1"]
            migrate_as_a_newer_version(path)
            for _ in range(2):
                with pytest.raises(JournalRefused, match="use a newer turnkeeper"):
                    await read_all(journal, "c")
