"""A deletion is long only as a whole: each of its transactions removes a slice.

The owner of a journal is stopped after several numbers of slices. From the first transaction on,
what was deleted is gone for every reader; what forks need stays; the next owner removes the rest.
"""

# ruff: noqa: ASYNC240 - the files of a test are small, and its loop has nothing else to do

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio.to_thread
import pytest

from turnkeeper.actors import PostgresJournal, SQLiteJournal
from turnkeeper.actors.errors import ConversationNotFound
from turnkeeper.actors.journal import Record, Rejection
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.postgres import writer as postgres_writer
from turnkeeper.actors.journals.postgres.writer import PostgresWriter
from turnkeeper.actors.journals.sqlite import erasure
from turnkeeper.actors.journals.sqlite import writer as sqlite_writer
from turnkeeper.actors.journals.sqlite.repair import repair
from turnkeeper.actors.journals.sqlite.verify import verify
from turnkeeper.runtime import OutcomeUnknown, Unavailable

from ... import postgres

pytestmark = pytest.mark.costly

AnyJournal = SQLiteJournal | PostgresJournal

SECRET = b"the-secret-word"
SLICE = 5
RECORDS = 23
FORKED_AT = 4
REST = PostgresWriter.rest


class Owners:
    """Opens a journal again and again; `stop_after` ends the next owner after so many commits."""

    def __init__(self, kind: str, place: str) -> None:
        self.kind = kind
        self._place = place
        self.commits = 0
        self._left: int | None = None

    def stop_after(self, commits: int) -> None:
        self._left = commits

    def _pass(self, boundary: str) -> None:
        if boundary == "committed":
            self.commits += 1
        if boundary == "begin" and self._left is not None:
            if not self._left:
                raise OSError("the owner has ended")
            self._left -= 1

    @asynccontextmanager
    async def owner(self) -> AsyncIterator[AnyJournal]:
        self._left, self.commits = None, 0
        journal: AnyJournal
        if self.kind == "sqlite":
            journal = SQLiteJournal(self._place, failpoint=self._pass)
        else:
            journal = PostgresJournal(postgres.conninfo(), schema=self._place, failpoint=self._pass)
        async with journal:
            yield journal

    async def count(self, journal: AnyJournal, table: str) -> int:
        def count(writer: object) -> int:
            connection = writer.connection  # type: ignore[attr-defined]  # of either kind
            row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
            return int(row[0])

        return await journal._change(count)


@pytest.fixture(params=["sqlite", "postgres"])
def owners(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Owners]:
    monkeypatch.setattr(erasure, "_RECORDS_MAX", SLICE)
    monkeypatch.setattr(sqlite_writer, "CHECK_INTERVAL_S", 0.0)
    # The groups of writes have to go on with a deletion, and not an owner at rest.
    monkeypatch.setattr(sqlite_writer, "_REST_PAUSE_S", 3_600.0)
    monkeypatch.setattr(PostgresWriter, "rest", lambda _writer: None)
    monkeypatch.setattr(postgres_writer, "_ERASED_MAX", SLICE)
    if request.param == "sqlite":
        yield Owners("sqlite", str(tmp_path / "chats.db"))
    else:
        with postgres.schema() as schema:
            yield Owners("postgres", schema)


async def write(journal: AnyJournal, name: str, *records: Record) -> int:
    claim = await journal.claim(name)
    await journal.append(
        name, records, epoch=claim.epoch, expected_seq=claim.head + 1, is_unfinished=False
    )
    return claim.epoch


async def fill(journal: AnyJournal) -> int:
    """Write a long conversation with a fork and rejected events, and another one."""
    try:
        await journal.info("b")
    except ConversationNotFound:
        await write(journal, "b", make_record("b1"))
    records = [Record(f"a{seq}", "note", SECRET * 20) for seq in range(1, RECORDS + 1)]
    epoch = await write(journal, "a", *records)
    await journal.reject(
        "a", [Rejection(4e9, "v", "r", SECRET) for _ in range(SLICE + 1)], epoch=epoch
    )
    await journal.fork("a", "f", at=FORKED_AT, records=[make_record("f")], is_unfinished=False)
    return epoch


async def test_others_write_between_the_slices_of_a_deletion(owners: Owners) -> None:
    async with owners.owner() as journal:
        epoch = await fill(journal)
        owners.commits = 0

        deletion = await journal.delete("a", epoch=epoch)

        assert (deletion.kept, list(deletion.forks)) == (FORKED_AT, ["f"])
        # The one that takes the log away, and one for each slice of rejections and of records.
        assert owners.commits > 1 + 1 + (RECORDS - FORKED_AT) // SLICE
        assert await owners.count(journal, "event") == FORKED_AT + 2
        assert await owners.count(journal, "rejection") == 0
        assert await owners.count(journal, "erasure") == 0


async def test_a_deletion_that_was_cut_off_is_finished_by_the_next_owner(owners: Owners) -> None:
    stopped = 0
    for slices in (0, 1, 3, 4, 5):
        async with owners.owner() as journal:
            epoch = await fill(journal)
            owners.stop_after(1 + slices)
            with contextlib.suppress(Unavailable, OutcomeUnknown):
                await journal.delete("a", epoch=epoch)
        async with owners.owner() as journal:
            left = await owners.count(journal, "erasure")
            stopped += left
            with pytest.raises(ConversationNotFound):
                await journal.read("a")
            assert len(await read_all(journal, "f")) == FORKED_AT + 1
            if owners.kind == "sqlite":
                assert verify(owners._place).problems == ()
            # Its groups of writes remove the rest; then the fork goes, with what was kept for it.
            for number in range(20):
                await write(journal, "b", make_record(f"b{slices}-{number}"))
            assert await owners.count(journal, "erasure") == 0
            await journal.delete("f", epoch=(await journal.claim("f")).epoch)
            assert await owners.count(journal, "fork") == 0
            assert await owners.count(journal, "rejection") == 0
            heads = {info.conversation_id: info.head for info in await journal.list()}
            assert heads.keys() == {"b"}
            assert await owners.count(journal, "event") == heads["b"]
    assert stopped >= 3


@pytest.mark.parametrize("owners", ["postgres"], indirect=True)
async def test_a_process_with_nothing_to_do_finishes_the_deletion_of_one_that_was_killed(
    owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_rested = threading.Event()
    pauses: list[float | None] = []

    def note(writer: PostgresWriter) -> float | None:
        pauses.append(REST(writer))
        if pauses[-1] != 0:
            has_rested.set()
        return pauses[-1]

    async with owners.owner() as journal:
        epoch = await fill(journal)
        owners.stop_after(2)
        await journal.delete("a", epoch=epoch)
    monkeypatch.setattr(PostgresWriter, "rest", note)
    async with owners.owner() as journal:
        await anyio.to_thread.run_sync(has_rested.wait)

        assert len(pauses) > (RECORDS - FORKED_AT) // SLICE
        assert pauses[-1] == pytest.approx(postgres_writer._ERASURES_LOOK_S, abs=5)
        assert await owners.count(journal, "erasure") == 0
        assert await owners.count(journal, "event") == FORKED_AT + 2


@pytest.mark.parametrize("owners", ["sqlite"], indirect=True)
async def test_a_fork_is_erased_once_what_was_kept_for_it_is_gone_too(owners: Owners) -> None:
    """Upkeep between the slices may remove the fork, and then no slice leads to its parent."""
    path = Path(owners._place)
    async with owners.owner() as journal:
        records = [Record(f"a{seq}", "note", SECRET * 20) for seq in range(1, RECORDS + 1)]
        epoch = await write(journal, "a", *records)
        await journal.fork("a", "f", at=RECORDS, records=[make_record("f")], is_unfinished=False)
        assert (await journal.delete("a", epoch=epoch)).kept == RECORDS

        deletion = await journal.delete("f", epoch=(await journal.claim("f")).epoch)

        assert deletion.is_erased
        for end in ("", "-wal"):
            assert SECRET not in Path(f"{path}{end}").read_bytes()


@pytest.mark.parametrize("owners", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE event SET payload = x'00' WHERE event_id = 'b1'",
        "UPDATE erasure SET seal = seal + 1",
        "DELETE FROM erasure",
    ],
)
async def test_a_repair_removes_what_a_deletion_had_left(owners: Owners, damage: str) -> None:
    """It brings back no record of a deleted conversation, not even into the rows set aside."""
    path = Path(owners._place)
    async with owners.owner() as journal:
        epoch = await fill(journal)
        owners.stop_after(3)
        assert not (await journal.delete("a", epoch=epoch)).is_erased
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(damage)

    done = repair(path)

    assert done is not None
    assert SECRET not in done.aside.read_bytes()
    assert path.read_bytes().count(SECRET) == FORKED_AT * 20
    async with owners.owner() as journal:
        names = [info.conversation_id for info in await journal.list()]
        assert [name for name in names if name != "b"] == ["f"]
        assert len(await read_all(journal, "f")) == FORKED_AT + 1
        assert await owners.count(journal, "rejection") == 0


async def test_old_rejections_are_dropped_a_slice_at_a_time(
    owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first write after a long pause could take longer than it may, again and again."""
    for module in (sqlite_writer, postgres_writer):
        monkeypatch.setattr(module, "REJECTIONS_DROPPED_MAX", 3)
    async with owners.owner() as journal:
        epoch = await write(journal, "c", make_record("c1"))
        old = [Rejection(float(at), "v", "r", b"{}") for at in range(20)]
        await journal.reject("c", old, epoch=epoch)
        left: list[int] = []
        while not left or left[-1] > 2:
            await journal.reject("c", [Rejection(4e9, "v", "r", b"{}")], epoch=epoch)
            left.append(sum(one.at < 4e9 for one in await journal.rejections("c")))
        assert left == [16, 12, 8, 4, 0]
