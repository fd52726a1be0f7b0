"""Every journal passes one suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from turnkeeper.actors import PostgresJournal
from turnkeeper.actors.journals.contract import JournalContract
from turnkeeper.actors.journals.memory import MemoryJournal, MemoryStore
from turnkeeper.actors.journals.sqlite.journal import SQLiteJournal

from .. import postgres


class TestMemoryJournal(JournalContract):
    @pytest.fixture(autouse=True)
    def _stores(self) -> None:
        self.stores: dict[Path, MemoryStore] = {}

    def make_journal(self, place: Path, *, takeover: bool = False) -> MemoryJournal:
        return MemoryJournal(self.stores.setdefault(place, MemoryStore()))

    def make_searching_journal(self, place: Path) -> MemoryJournal:
        return MemoryJournal(self.stores.setdefault(place, MemoryStore()), search=True)


class TestSQLiteJournal(JournalContract):
    def make_journal(self, place: Path, *, takeover: bool = False) -> SQLiteJournal:
        return SQLiteJournal(place / "chats.db", takeover=takeover, owner_wait_s=0)

    def make_searching_journal(self, place: Path) -> SQLiteJournal:
        return SQLiteJournal(place / "chats.db", search=True, owner_wait_s=0)


@pytest.mark.costly
class TestPostgresJournal(JournalContract):
    @pytest.fixture(autouse=True)
    def _schema(self) -> Iterator[None]:
        with postgres.schema() as self.schema:
            yield

    def make_journal(self, place: Path, *, takeover: bool = False) -> PostgresJournal:
        return PostgresJournal(postgres.conninfo(), schema=self.schema)

    def make_searching_journal(self, place: Path) -> PostgresJournal:
        return PostgresJournal(postgres.conninfo(), schema=self.schema, search=True)
