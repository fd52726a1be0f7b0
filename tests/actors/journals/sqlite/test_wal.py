"""Whether a write-ahead log has lost commits, while its writer goes on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

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
    rounds: list[int] = []

    read = wal._frames_read

    def overtaken(database: Path, header: bytes) -> int:
        if not rounds:
            writer.execute("PRAGMA wal_checkpoint(FULL)")
            for n in range(9):  # from the beginning of the file, under new salts
                writer.execute("INSERT INTO t VALUES (?)", (n,))
            rounds.append(1)
            return 0  # as if the frames of the old header were all gone
        return read(database, header)

    monkeypatch.setattr(wal, "_frames_read", overtaken)

    assert not has_lost_commits(path)
    assert rounds


def test_a_commit_behind_a_bad_frame_is_damage(path: Path, writer: sqlite3.Connection) -> None:
    assert not has_lost_commits(path)
    log = Path(f"{path}-wal")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)

    assert has_lost_commits(path)
    assert writer.total_changes == 50
