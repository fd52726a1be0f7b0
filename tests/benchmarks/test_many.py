"""The journals that the benchmarks write in bulk are those that the library would have written."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _many
from tests import postgres
from turnkeeper.actors import PostgresJournal, SQLiteJournal
from turnkeeper.actors.journal import Journal
from turnkeeper.actors.journals.sqlite.verify import verify
from turnkeeper.runtime import Ports

pytestmark = pytest.mark.anyio

MANY = 12


PORTS = Ports(now=lambda: _many.NOW_US / 1_000_000)


async def fill_by_appends(journal: Journal) -> None:
    async with journal:
        for number in range(1, MANY + 1):
            name = _many.name_of(number)
            claim = await journal.claim(name)
            await journal.append(
                name,
                [_many.record_of(number)],
                epoch=claim.epoch,
                expected_seq=1,
                is_unfinished=False,
                listing=_many.listing_of(number),
            )


def rows_of_file(path: Path) -> dict[str, list[Any]]:
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
        return {
            name: [sql, *connection.execute(f"SELECT * FROM {name} ORDER BY 1")]
            if sql and sql.startswith("CREATE TABLE")
            else [sql]
            for name, sql in tables
            if name not in ("journal", "log_stamp")  # count the processes that opened the file
        }


async def test_a_file_in_bulk_is_the_file_that_appends_write(tmp_path: Path) -> None:
    ours, bulk = tmp_path / "ours.db", tmp_path / "bulk.db"
    await fill_by_appends(SQLiteJournal(ours, ports=PORTS))
    await _many.fill_file(bulk, MANY)

    assert rows_of_file(bulk) == rows_of_file(ours)
    assert len(rows_of_file(bulk)["listing"]) == 1 + MANY
    assert verify(bulk).problems == ()


async def test_a_schema_in_bulk_is_the_schema_that_appends_write() -> None:
    with postgres.schema() as ours, postgres.schema() as bulk:
        await fill_by_appends(PostgresJournal(postgres.conninfo(), schema=ours, ports=PORTS))
        await _many.fill_schema(postgres.conninfo(), bulk, MANY)

        assert rows_of_schema(bulk) == rows_of_schema(ours)
        assert len(rows_of_schema(bulk)["listing"]) == MANY
        # A further conversation gets a number of its own.
        async with PostgresJournal(postgres.conninfo(), schema=bulk) as journal:
            await journal.claim("another")


def rows_of_schema(schema: str) -> dict[str, list[Any]]:
    with _many.connect(postgres.conninfo(), schema) as connection:
        indexes = connection.execute(
            "SELECT indexname, replace(indexdef, %s, '') FROM pg_indexes WHERE schemaname = %s "
            "ORDER BY 1",
            (f"{schema}.", schema),
        ).fetchall()
        # Without the process that has claimed it, which draws its number.
        conversations = connection.execute(
            "SELECT (to_jsonb(c) - 'owner')::text FROM conversation c ORDER BY id"
        ).fetchall()
        return {
            "indexes": indexes,
            "conversation": conversations,
            **{
                table: connection.execute(f"SELECT * FROM {table} ORDER BY 1".encode()).fetchall()
                for table in ("event", "listing", "label", "fork", "rejection", "erasure")
            },
        }
