"""Each kind of journal in turn: a store that outlives the journals which are opened over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from tests import postgres
from turnkeeper.actors import (
    Journal,
    MemoryJournal,
    MemoryStore,
    PostgresJournal,
    SQLiteJournal,
)

KINDS = ("memory", "sqlite", "postgres")
SHARED = ("memory", "postgres")
"""Those that two open journals can write to at once, as two processes do."""

Opens: TypeAlias = Callable[[], Journal]


@contextmanager
def store(kind: str, folder: Path) -> Iterator[Opens]:
    """Yield a function that makes a journal over one new store of this kind."""
    if kind == "memory":
        memory = MemoryStore()
        yield lambda: MemoryJournal(memory)
    elif kind == "sqlite":
        yield lambda: SQLiteJournal(folder / "chats.db")
    else:
        with postgres.schema() as schema:
            yield lambda: PostgresJournal(postgres.conninfo(), schema=schema)
