"""Damage to a journal file is told, whatever byte it hits, and never read as something else."""

# ruff: noqa: ASYNC240 - the files of a test are small, and its loop has nothing else to do

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from turnkeeper.actors.errors import (
    ConversationNotFound,
    CorruptLog,
    JournalRefused,
    JournalUnavailable,
)
from turnkeeper.actors.journal import READ_BYTES, Record, Rejection, Snapshot, StoredRecord
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.sqlite import reader as reader_module
from turnkeeper.actors.journals.sqlite.journal import SQLiteJournal
from turnkeeper.actors.journals.sqlite.log import Tail, read_records
from turnkeeper.actors.journals.sqlite.reader import SQLiteReader, reading
from turnkeeper.actors.journals.sqlite.verify import verify

IMAGE = b'{"url": "data:' + b"A" * 40_000 + b'"}'
SNAPSHOT = Snapshot(2, "v1", b"folds")
NAMES = ("alice", "bob", "fork", "again")


async def fill(path: Path, copy_to: Path | None = None) -> None:
    """A journal with everything in it; `copy_to` gets it as a process that is killed leaves it."""
    async with SQLiteJournal(path, owner_wait_s=0) as journal:

        async def append(name: str, epoch: int, at: int, *records: Record) -> None:
            await journal.append(
                name, records, epoch=epoch, expected_seq=at, is_unfinished=name == "alice"
            )

        await journal.claim("alice")
        await append("alice", 1, 1, make_record("a1", message_id="m1"), make_record("a2"))
        await append("alice", 1, 3, make_record("a3", b'{"text": "three"}', message_id="m3"))
        await journal.write_snapshot("alice", SNAPSHOT, epoch=2)
        rejection = Rejection(4e9, "unmatched_tool_result", "9", b'{"x": 1}')
        await journal.reject("alice", [rejection], epoch=1)
        await journal.claim("bob")
        await append("bob", 1, 1, make_record("b1"), make_record("b2", IMAGE))
        await journal.fork("alice", "fork", at=2, records=[make_record("f3")], is_unfinished=False)
        claim = await journal.claim("again")
        await append("again", claim.epoch, 1, make_record("old"))
        deletion = await journal.delete("again", epoch=claim.epoch)
        while not deletion.is_erased:
            # A reader was in the way, and old records are left in the log, behind the newest.
            claim = await journal.claim("again")
            await append("again", claim.epoch, 1, make_record("old"))
            deletion = await journal.delete("again", epoch=claim.epoch)
        claim = await journal.claim("again")
        await append("again", claim.epoch, 1, make_record("new"))
        if copy_to is not None:
            for end in ("", "-wal"):
                Path(f"{copy_to}{end}").write_bytes(Path(f"{path}{end}").read_bytes())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "chats.db"
    anyio.run(fill, path)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats.db"


def look(reader: SQLiteReader) -> list[object]:
    """Everything that a log says of itself."""
    return [
        reader.list(),
        *((reader.read(name, 0, 100, READ_BYTES), reader.info(name)) for name in NAMES),
        *(reader.rejections(name) for name in NAMES),
    ]


def find_snapshot(reader: SQLiteReader) -> Snapshot | None:
    """A cache: it may be lost, but not be another one."""
    return reader.read_snapshot("alice")


def look_up(reader: SQLiteReader) -> list[object]:
    """What only the indexes over ids know."""
    return [
        (
            reader.find_events(name, ["a1", "a2", "a3", "b1", "f3", "old", "new"]),
            reader.find_messages(name, ["m1", "m3"]),
        )
        for name in NAMES
    ]


def outcome_of(path: Path, expected: tuple[list[object], list[object]]) -> str:
    try:
        with reading(path, busy_wait_s=0) as reader:
            seen = reader.do(look)
            found = reader.do(look_up)
            snapshot = reader.do(find_snapshot)
    except (JournalRefused, CorruptLog, JournalUnavailable):
        return "told when it was read"
    assert seen == expected[0], "a read was silently wrong"
    assert snapshot in {None, SNAPSHOT}, "a snapshot was silently wrong"
    if verify(path).problems:
        return "told by verify"
    assert found == expected[1], "a look-up was silently wrong"
    return "harmless"


def sweep(path: Path, copies: Iterable[bytes], whole: bytes) -> Counter[str]:
    path.write_bytes(whole)
    with reading(path, busy_wait_s=0) as reader:
        expected = reader.do(look), reader.do(look_up)
    outcomes: Counter[str] = Counter()
    for copy in copies:
        path.write_bytes(copy)
        outcomes[outcome_of(path, expected)] += 1
    return outcomes


def flipped(whole: bytes, offsets: Iterable[int]) -> Iterable[bytes]:
    for offset in offsets:
        copy = bytearray(whole)
        copy[offset] ^= 1 << (offset * 7 % 8)
        yield bytes(copy)


def test_no_flipped_bit_is_silent(path: Path, whole: bytes) -> None:
    """A sample of the bytes that are in use; all bytes are swept by the slow test below."""
    used = [offset for offset, byte in enumerate(whole) if byte not in b"\0A"]
    offsets = [*range(100), *used[::19]]

    outcomes = sweep(path, flipped(whole, offsets), whole)

    # Were most of it harmless, the sweep would look at the wrong bytes.
    assert outcomes["told when it was read"] > len(offsets) * 0.6
    assert outcomes["harmless"] < len(offsets) * 0.2


def test_no_truncation_is_silent(path: Path, whole: bytes) -> None:
    lengths = [*range(0, len(whole), 8192), *range(1, len(whole), 4099)]

    outcomes = sweep(path, (whole[:length] for length in lengths), whole)

    assert set(outcomes) == {"told when it was read"}


@pytest.mark.slow
def test_no_byte_of_the_file_can_be_damaged_silently(path: Path, whole: bytes) -> None:
    """Every byte flipped, every length cut: about half an hour."""
    flips = sweep(path, flipped(whole, range(len(whole))), whole)
    cuts = sweep(path, (whole[:length] for length in range(len(whole))), whole)

    print(f"{len(whole)} bytes; flipped: {dict(flips)}; cut: {dict(cuts)}")  # noqa: T201 - the result of it


# --- the write-ahead log --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """The file and its write-ahead log, as a process leaves them that is killed."""
    folder = tmp_path_factory.mktemp("killed")
    anyio.run(fill, folder / "chats.db", folder / "copy.db")
    return (folder / "copy.db").read_bytes(), Path(f"{folder}/copy.db-wal").read_bytes()


def put(path: Path, database: bytes, wal: bytes) -> None:
    Path(f"{path}-shm").unlink(missing_ok=True)
    path.write_bytes(database)
    Path(f"{path}-wal").write_bytes(wal)


def test_damage_in_the_write_ahead_log_is_told_while_commits_lie_behind_it(
    path: Path, killed: tuple[bytes, bytes]
) -> None:
    """SQLite alone takes the rest of the log for a write that never finished."""
    database, wal = killed
    frame = 24 + 8192
    # Before the last two transactions: what is in the last one may never have been finished.
    commits = [at for at in range(32, len(wal), frame) if wal[at + 4 : at + 8] != bytes(4)]
    offsets = [*range(32), *range(32, commits[-2], 1999)]
    for copy, offset in zip(flipped(wal, offsets), offsets, strict=True):
        put(path, database, copy)
        before = copy
        for read_only in (True, False):
            with pytest.raises(JournalRefused, match="write-ahead log"):
                anyio.run(enter, path, read_only)
        assert Path(f"{path}-wal").read_bytes() == before, offset


async def enter(path: Path, read_only: bool) -> list[str]:
    async with SQLiteJournal(path, read_only=read_only, owner_wait_s=0) as journal:
        return [info.conversation_id for info in await journal.list()]


def test_a_write_that_never_finished_is_no_damage(path: Path, killed: tuple[bytes, bytes]) -> None:
    """The last transaction torn anywhere: it was never acknowledged, and it is not there."""
    database, wal = killed
    frame = 24 + 8192
    commits = [at for at in range(32, len(wal), frame) if wal[at + 4 : at + 8] != bytes(4)]
    # In the log, a last byte that is 0 would be as it was written.
    last = len(wal.rstrip(b"\0")) - 1
    for end in (last, len(wal) - frame + 30, commits[-2] + frame + 1):
        for torn in (wal[:end], wal[:end] + bytes(len(wal) - end)):
            put(path, database, torn)
            assert anyio.run(enter, path, True) == ["alice", "bob", "fork"]
    put(path, database, wal)
    assert anyio.run(enter, path, False) == ["again", "alice", "bob", "fork"]


# --- one thing at a time --------------------------------------------------------------------------


def change(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(statement, values).rowcount == 1


DAMAGES: dict[str, tuple[str, str, int]] = {
    "payload": ("UPDATE event SET payload = '{}' WHERE event_id = 'a3'", "alice", 3),
    "kind": ("UPDATE event SET kind = 'other' WHERE event_id = 'a2'", "alice", 2),
    "epoch": ("UPDATE event SET epoch = 9 WHERE event_id = 'a2'", "alice", 2),
    "message id": ("UPDATE event SET message_id = 'm9' WHERE event_id = 'a1'", "alice", 1),
    "mark": ("UPDATE event SET mark = 1 WHERE event_id = 'a1'", "alice", 1),
    "missing record": ("DELETE FROM event WHERE event_id = 'a2'", "alice", 2),
    "missing last record": ("DELETE FROM event WHERE event_id = 'a3'", "alice", 3),
    "missing shared record": ("DELETE FROM event WHERE event_id = 'a1'", "fork", 1),
    "head": ("UPDATE conversation SET head = 2 WHERE name = 'alice'", "alice", 0),
    "fencing": ("UPDATE conversation SET epoch = 0 WHERE name = 'alice'", "alice", 0),
    "missing row": ("DELETE FROM conversation WHERE name = 'bob'", "bob", 1),
    "missing row of a fork": ("DELETE FROM conversation WHERE name = 'fork'", "fork", 1),
    "renamed": ("UPDATE conversation SET name = 'rob' WHERE name = 'bob'", "bob", 0),
    "fork": ("UPDATE fork SET seq = 1", "fork", 2),
    "missing fork": ("DELETE FROM fork", "fork", 2),
    "fork of another type": ("UPDATE fork SET seal = x'ff'", "fork", 2),
    "part": ("UPDATE part SET data = 'A'", "bob", 2),
    "missing part": ("DELETE FROM part", "bob", 2),
}
UNCLAIMABLE = {
    *("missing last record", "head", "fencing", "missing row", "renamed"),
    *("missing row of a fork", "fork", "missing fork", "fork of another type"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_is_a_corrupt_log_that_names_the_place(
    path: Path, whole: bytes, damage: str
) -> None:
    statement, name, seq = DAMAGES[damage]
    path.write_bytes(whole)
    change(path, statement)

    async with SQLiteJournal(path) as journal:
        with pytest.raises(CorruptLog) as caught:
            await read_all(journal, name)
        assert (caught.value.conversation_id, caught.value.seq) == (name, seq)
        # It is not opened as if it were empty, or shorter.
        if damage in UNCLAIMABLE:
            with pytest.raises(CorruptLog):
                await journal.claim(name)
        # The others are as they were.
        await journal.claim("again")
        assert await read_all(journal, "again") == ["new"]
    assert verify(path).problems


async def test_a_damaged_snapshot_is_ignored(path: Path, whole: bytes) -> None:
    for statement in (
        "UPDATE snapshot SET payload = 'fold!'",
        "UPDATE snapshot SET seq = 3",
        "UPDATE snapshot SET version = 'v2'",
        "UPDATE snapshot SET tip = 1",
    ):
        path.write_bytes(whole)
        change(path, statement)
        async with SQLiteJournal(path) as journal:
            assert await journal.read_snapshot("alice") is None
            assert await read_all(journal, "alice") == ["a1", "a2", "a3"]
        assert [problem.found for problem in verify(path).problems] == [
            "its snapshot is damaged, and is ignored"
        ]


async def test_a_damaged_rejection_is_told(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)
    change(path, "UPDATE rejection SET reason = 'none'")
    async with SQLiteJournal(path) as journal:
        with pytest.raises(CorruptLog, match="rejected event"):
            await journal.rejections("alice")


async def test_damage_in_one_conversation_does_not_stop_the_writer(
    path: Path, whole: bytes
) -> None:
    """Text that is no text, which Python finds and not SQLite."""
    path.write_bytes(whole)
    change(path, "UPDATE conversation SET tip = CAST(x'ff' AS TEXT) WHERE name = 'alice'")
    async with SQLiteJournal(path) as journal:
        with pytest.raises(CorruptLog):
            await journal.claim("alice")
        claim = await journal.claim("bob")
        await journal.append(
            "bob", [make_record("b3")], epoch=claim.epoch, expected_seq=3, is_unfinished=False
        )


# --- verify ---------------------------------------------------------------------------------------


def test_verify_counts_and_finds_nothing_in_a_whole_file(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)
    progress: list[tuple[int, int]] = []

    report = verify(path, on_progress=lambda done, of: progress.append((done, of)))

    assert (report.conversations, report.records, report.problems) == (4, 9, ())
    assert progress[-1] == (4, 4)


def test_verify_finds_what_belongs_to_nobody(path: Path, whole: bytes) -> None:
    stray = (
        "INSERT INTO event SELECT 99, previous, log + 1, seq, epoch, 'x', kind, NULL, mark, "
        "payload, NULL FROM event WHERE event_id = 'a1'"
    )
    for statement in (stray, "INSERT INTO part VALUES (x'00', 'A')"):
        path.write_bytes(whole)
        change(path, statement)
        assert verify(path).problems


def test_verify_asks_whether_a_snapshot_fits_its_log(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)
    seen: list[object] = []

    class Check:
        def __init__(self, name: str, snapshot: Snapshot) -> None:
            seen.append((name, snapshot.seq))

        def add(self, record: StoredRecord) -> None:
            seen.append(record.seq)

        def end(self) -> str | None:
            return "its snapshot is not its fold"

    report = verify(path, check_snapshot=Check)

    assert seen == [("alice", 2), 1, 2]
    assert [problem.found for problem in report.problems] == ["its snapshot is not its fold"]


async def test_reading_what_is_not_there_is_no_damage(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)
    async with SQLiteJournal(path) as journal:
        with pytest.raises(ConversationNotFound):
            await journal.read("carol")


@pytest.mark.parametrize(
    "error",
    [
        CorruptLog("alice", 1, "fails its checksum"),
        sqlite3.OperationalError("no such table: event"),
        TypeError("cannot unpack non-iterable NoneType object"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_damage_that_a_second_connection_does_not_find_is_not_reported(
    path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Memory was short for a moment, and the first connection has kept a page that is not whole."""
    path.write_bytes(whole)
    connections: list[object] = []

    def read(
        connection: sqlite3.Connection, tail: Tail, after: int, upto: int, bytes_max: int
    ) -> Sequence[StoredRecord]:
        connections.append(connection)
        if connection is connections[0]:
            raise error
        return read_records(connection, tail, after, upto, bytes_max)

    monkeypatch.setattr(reader_module, "read_records", read)
    async with SQLiteJournal(path) as journal:
        records = await journal.read("alice")
        again = await journal.read("alice")

    assert [record.event_id for record in records] == ["a1", "a2", "a3"]
    assert again == records
    assert connections == [connections[0], connections[1], connections[1]]
