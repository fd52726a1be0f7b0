"""Whether a write-ahead log has lost commits, while its writer goes on."""

from __future__ import annotations

import io
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from turnkeeper.actors.errors import JournalUnavailable
from turnkeeper.actors.journals.sqlite import wal
from turnkeeper.actors.journals.sqlite.wal import has_lost_commits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def writer(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("CREATE TABLE t (x)")
        for n in range(50):
            connection.execute("INSERT INTO t VALUES (?)", (f"{n} " * 500,))
        yield connection


def test_a_writer_that_begins_its_next_round_meanwhile_is_no_damage(
    path: Path, writer: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy has frames of both rounds, in an order in which no one wrote them."""
    copies: list[int] = []
    recovered = wal._frames_recovered

    def overtaken(scratch: Path, log: io.FileIO) -> int:
        frames = recovered(scratch, log)
        if not copies:
            writer.execute("PRAGMA wal_checkpoint(FULL)")
            for n in range(9):  # from the beginning of the file, under new salts
                writer.execute("INSERT INTO t VALUES (?)", (n,))
            frames = 0  # as if the frames of the old header were all gone
        copies.append(frames)
        return frames

    monkeypatch.setattr(wal, "_frames_recovered", overtaken)

    assert not has_lost_commits(path)
    assert len(copies) == 2


def test_commits_that_a_writer_makes_while_its_log_is_examined_are_not_lost(
    path: Path, writer: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A takeover of a file whose owner was busy was refused: "it is damaged"."""
    recovered = wal._frames_recovered

    def overtaken(scratch: Path, log: io.FileIO) -> int:
        frames = recovered(scratch, log)
        for n in range(3):
            writer.execute("INSERT INTO t VALUES (?)", (n,))
        return frames

    monkeypatch.setattr(wal, "_frames_recovered", overtaken)

    assert not has_lost_commits(path)


def test_a_commit_behind_a_bad_frame_is_damage(path: Path, writer: sqlite3.Connection) -> None:
    assert not has_lost_commits(path)
    log = Path(f"{path}-wal")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)

    assert has_lost_commits(path)
    assert writer.total_changes == 50


def test_a_log_that_sqlite_failed_to_recover_is_not_taken_for_damage(
    path: Path, writer: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    class Unable(sqlite3.Connection):
        def execute(self, *_: object) -> sqlite3.Cursor:
            raise sqlite3.OperationalError("disk I/O error")

    def connect_unable(
        place: str, *, uri: bool = False, isolation_level: None = None
    ) -> sqlite3.Connection:
        factory = Unable if uri else sqlite3.Connection  # it is only read by its URI
        return connect(place, isolation_level=isolation_level, uri=uri, factory=factory)

    monkeypatch.setattr(sqlite3, "connect", connect_unable)

    with pytest.raises(JournalUnavailable, match="cannot be checked: disk I/O error; nothing was"):
        has_lost_commits(path)
    assert writer.total_changes == 50


def test_a_log_of_which_no_copy_can_be_made_is_not_taken_for_whole(
    path: Path, writer: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Path(f"{path}-wal")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    monkeypatch.setattr(tempfile, "tempdir", str(path.parent / "gone"))

    with pytest.raises(JournalUnavailable, match="cannot be checked"):
        has_lost_commits(path)
    assert writer.total_changes == 50


def test_a_log_whose_pages_make_no_sense_alone_is_recovered_all_the_same(
    path: Path, writer: sqlite3.Connection
) -> None:
    """Its pages of the schema refer to pages in the file, which the check never reads."""
    writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for n in range(200):
        writer.execute(f"CREATE TABLE t{n} (x)")
    writer.execute("PRAGMA wal_checkpoint(RESTART)")
    writer.execute("CREATE TABLE last (x)")

    assert not has_lost_commits(path)


def test_a_log_is_checked_by_as_many_calls_whatever_its_length(
    path: Path, writer: sqlite3.Connection
) -> None:
    """In Python, each of its bytes would cost a hundred times what SQLite's own recovery does."""

    def calls() -> int:
        counted = 0

        def count(*_: object) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count)
        try:
            assert not has_lost_commits(path)
        finally:
            sys.setprofile(None)
        return counted

    calls()  # what is only done the first time
    short = calls()
    for n in range(500):
        writer.execute("INSERT INTO t VALUES (?)", (f"{n} " * 500,))

    assert calls() == pytest.approx(short, rel=0.2)
