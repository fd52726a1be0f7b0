"""Whatever is done to them, in whatever order, all journals answer as the one in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from turnkeeper.actors import (
    Journal,
    MemoryJournal,
    PostgresJournal,
    SQLiteJournal,
)
from turnkeeper.actors.journal import Record
from turnkeeper.actors.journals.sqlite.verify import verify
from turnkeeper.runtime import OwnershipLost, Refused

from ... import postgres

NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class Claiming:
    name: str


@dataclass(frozen=True)
class Appending:
    name: str
    epoch_off: int
    seq_off: int
    records: tuple[tuple[int, int | None], ...]
    is_unfinished: bool


@dataclass(frozen=True)
class Forking:
    name: str
    fork: str
    at: int
    event: int


@dataclass(frozen=True)
class Deleting:
    name: str
    epoch_off: int


names = st.sampled_from(NAMES)
ids = st.integers(0, 30)
# Mostly right, sometimes off.
offs = st.sampled_from([0, 0, 0, 0, 0, 0, -1, 1])
records = st.lists(st.tuples(ids, st.none() | st.integers(0, 5)), min_size=1, max_size=3)
steps = st.lists(
    st.builds(Claiming, names)
    | st.builds(Appending, names, offs, offs, records.map(tuple), st.booleans())
    | st.builds(Appending, names, offs, offs, records.map(tuple), st.booleans())
    | st.builds(Forking, names, names, st.integers(0, 6), ids)
    | st.builds(Deleting, names, offs),
    max_size=25,
)
Step = Claiming | Appending | Forking | Deleting


async def do(journal: Journal, step: Step, epochs: dict[str, int], heads: dict[str, int]) -> object:
    """What the step is answered with."""
    try:
        match step:
            case Claiming(name):
                claim = await journal.claim(name)
                epochs[name], heads[name] = claim.epoch, claim.head
                return claim
            case Appending(name, epoch_off, seq_off, records, is_unfinished):
                seqs = await journal.append(
                    name,
                    [
                        Record(
                            f"e{event}", "note", b"%d" % event, f"m{message}" if message else None
                        )
                        for event, message in records
                    ],
                    epoch=epochs.get(name, 0) + epoch_off,
                    expected_seq=heads.get(name, 0) + 1 + seq_off,
                    is_unfinished=is_unfinished,
                )
                heads[name] = max(heads.get(name, 0), *seqs)
                return list(seqs)
            case Forking(name, fork, at, event):
                record = Record(f"e{event}", "note", b"fork")
                claim = await journal.fork(name, fork, at=at, records=[record], is_unfinished=False)
                epochs[fork], heads[fork] = claim.epoch, claim.head
                return claim
            case Deleting(name, epoch_off):
                deletion = await journal.delete(name, epoch=epochs.get(name, 0) + epoch_off)
                heads[name] = 0
                return deletion.kept, list(deletion.forks)
    except (Refused, OwnershipLost) as error:
        return type(error), str(error)


async def everything(journal: Journal) -> list[object]:
    found: list[object] = []
    for info in await journal.list():
        name = info.conversation_id
        log = await journal.read(name)
        events = await journal.find_events(name, [f"e{number}" for number in range(31)])
        messages = await journal.find_messages(name, [f"m{number}" for number in range(6)])
        found.append((name, info.head, info.epoch, info.is_unfinished, log, events, messages))
    return found


async def compare(steps: Sequence[Step], make_journal: Callable[[], Journal]) -> None:
    memory_epochs: dict[str, int] = {}
    memory_heads: dict[str, int] = {}
    epochs: dict[str, int] = {}
    heads: dict[str, int] = {}
    async with MemoryJournal() as memory:
        for part in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
            async with make_journal() as journal:
                # It may be another process, and an epoch is of the one that claimed it.
                for step in (*map(Claiming, epochs), *part):
                    assert await do(journal, step, epochs, heads) == await do(
                        memory, step, memory_epochs, memory_heads
                    )
                assert await everything(journal) == await everything(memory)


@settings(max_examples=50)
@given(steps)
def test_sqlite_answers_as_memory_does(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.db"

        def make_journal() -> Journal:
            # Two tails fit into memory, so that they come and go.
            return SQLiteJournal(path, active_conversations_max=2, synchronous="NORMAL")

        anyio.run(compare, steps, make_journal)
        assert verify(path).problems == ()


@settings(max_examples=25)
@given(steps)
def test_postgres_answers_as_memory_does(steps: list[Step]) -> None:
    with postgres.schema() as schema:

        def make_journal() -> Journal:
            return PostgresJournal(postgres.conninfo(), schema=schema, active_conversations_max=2)

        anyio.run(compare, steps, make_journal)
