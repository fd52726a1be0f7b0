"""Whatever a journal is given, all three answer alike, with errors that a caller can act on."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.actors import MemoryJournal, PostgresJournal, SQLiteJournal
from turnkeeper.actors.errors import InvalidConversationId, InvalidInput, JournalRefused
from turnkeeper.actors.journal import Journal, Record, Rejection, Snapshot
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.memory import MemoryStore
from turnkeeper.runtime import InvariantViolation, OwnershipLost, Refused

from ... import postgres

pytestmark = pytest.mark.anyio

TEXTS = (
    "",
    " ",
    "a\0b",
    "a\tb",
    "c\n",
    "\ud800",
    "\u202ec",
    "x" * 257,
    "x" * 100_000,
    "\N{SLIGHTLY SMILING FACE}" * 256,
    "'; DROP TABLE event; --",
    "../../etc/passwd",
)
NUMBERS = (-(2**70), -(2**63) - 1, -(2**63), -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**70)
TIMES = (math.nan, math.inf, -math.inf, -1.0, 0, 1e300)

Call = Callable[[Journal], Awaitable[object]]


def new_record() -> Record:
    return make_record("new")


def calls() -> Iterator[tuple[str, Call]]:
    """Every method of the port, with everything that comes from outside odd in turn."""
    for text in TEXTS:
        for name, call in {
            "info": lambda j, t=text: j.info(t),
            "read": lambda j, t=text: j.read(t),
            "rejections": lambda j, t=text: j.rejections(t),
            "read snapshot": lambda j, t=text: j.read_snapshot(t),
            "find in": lambda j, t=text: j.find_events(t, ["e1"]),
            "find event": lambda j, t=text: j.find_events("c", [t]),
            "find message": lambda j, t=text: j.find_messages("c", [t]),
            "claim": lambda j, t=text: _refused_alone(j.claim(t)),
            "delete": lambda j, t=text: j.delete(t, epoch=1),
            "fork of": lambda j, t=text: _fork(j, t, "f", 1),
            "reject": lambda j, t=text: j.reject(t, [Rejection(4e9, "v", "r", b"{}")], epoch=1),
            "reason": lambda j, t=text: j.reject("c", [Rejection(4e9, "v", t, b"{}")], epoch=1),
            "violation": lambda j, t=text: j.reject("c", [Rejection(4e9, t, "r", b"{}")], epoch=1),
            "snapshot of": lambda j, t=text: j.write_snapshot(t, Snapshot(1, "v", b""), epoch=1),
            "version": lambda j, t=text: j.write_snapshot("c", Snapshot(1, t, b""), epoch=1),
            "append to": lambda j, t=text: _append(j, t, 99, 1, new_record()),
            "append id": lambda j, t=text: _append(j, "c", 99, 1, make_record(t)),
            "append kind": lambda j, t=text: _append(j, "c", 99, 1, Record("k", t, b"{}")),
            "release": lambda j, t=text: j.release(t, epoch=1),
        }.items():
            yield f"{name} {text[:9]!r}", call
    for number in NUMBERS:
        for name, call in {
            "read after": lambda j, n=number: j.read("c", after=n),
            "read limit": lambda j, n=number: j.read("c", limit=n),
            "read bytes": lambda j, n=number: j.read("c", bytes_max=n),
            "append epoch": lambda j, n=number: _append(j, "c", n + 7, 3, new_record()),
            "append at": lambda j, n=number: _append(j, "c", 1, n, new_record()),
            "fork at": lambda j, n=number: _fork(j, "c", "f", min(n, 0) or n + 2),
            "delete epoch": lambda j, n=number: j.delete("c", epoch=n + 7),
            "release epoch": lambda j, n=number: j.release("c", epoch=n + 7),
            "snapshot epoch": lambda j, n=number: j.write_snapshot(
                "c", Snapshot(1, "v", b""), epoch=n
            ),
        }.items():
            yield f"{name} {number}", call
    for time in TIMES:
        yield f"at {time}", _reject_at(time)
        yield f"rejections after {time}", lambda j: j.rejections("r")


def _reject_at(time: float) -> Call:
    return lambda journal: journal.reject("r", [Rejection(time, "v", "r", b"{}")], epoch=1)


async def _refused_alone(claiming: Awaitable[object]) -> object:
    await claiming
    return None


async def _append(journal: Journal, name: str, epoch: int, at: int, record: Record) -> object:
    return await journal.append(name, [record], epoch=epoch, expected_seq=at, is_unfinished=False)


async def _fork(journal: Journal, name: str, fork_id: str, at: int) -> object:
    return await journal.fork(name, fork_id, at=at, records=[new_record()], is_unfinished=False)


@pytest.fixture
async def journals(tmp_path: Path) -> AsyncIterator[list[Journal]]:
    async with AsyncExitStack() as stack:
        schema = stack.enter_context(postgres.schema())
        yield [
            await stack.enter_async_context(MemoryJournal()),
            await stack.enter_async_context(SQLiteJournal(tmp_path / "chats.db")),
            await stack.enter_async_context(PostgresJournal(postgres.conninfo(), schema=schema)),
        ]


async def outcome(journal: Journal, call: Call) -> str:
    try:
        value = await call(journal)
    except (Refused, OwnershipLost) as error:
        return type(error).__name__
    except InvariantViolation as error:
        return f"NOT TYPED: {error}"
    return repr(list(value) if isinstance(value, Sequence) else value)


@pytest.mark.parametrize(
    "make", [MemoryJournal, partial(SQLiteJournal, "a.db"), partial(PostgresJournal, "")]
)
def test_a_setting_that_makes_no_sense_is_refused_before_anything_is_opened(
    make: Callable[..., Journal],
) -> None:
    arguments = inspect.signature(make).parameters
    for name in [name for name in arguments if name.endswith(("_s", "_max"))]:
        for odd in (math.nan, -1, "5", None):
            allowed = "it takes (seconds from 0 on|1 or more)$"
            with pytest.raises(InvalidInput, match=f"^{name} is {odd!r}; {allowed}"):
                make(**{name: odd})


async def test_all_journals_answer_alike_whatever_they_are_given(journals: list[Journal]) -> None:
    for journal in journals:
        await journal.claim("r")
        claim = await journal.claim("c")
        await _append(journal, "c", claim.epoch, 1, make_record("e1"))
        await _append(journal, "c", claim.epoch, 2, make_record("e2"))
    differing = {}
    for name, call in calls():
        answers = [await outcome(journal, call) for journal in journals]
        if len(set(answers)) > 1 or answers[0].startswith("NOT TYPED"):
            differing[name] = answers

    assert differing == {}
    for journal in journals:
        assert await read_all(journal, "c") == ["e1", "e2"]


@pytest.mark.parametrize("switch", ["takeover", "any_name"])
async def test_a_switch_of_a_claim_takes_nothing_but_true_and_false(
    journals: list[Journal], switch: str
) -> None:
    no: Any = {switch: "no"}
    for journal in journals:
        with pytest.raises(InvalidInput, match=f"^{switch} is a str; it takes True or False"):
            await journal.claim("c", **no)
        assert (await journal.claim("c")).epoch == 1


async def test_who_waits_for_more_is_told_when_the_journal_is_left_and_leaves_nothing() -> None:
    store = MemoryStore()
    told: list[str] = []

    async def wait() -> None:
        try:
            await journal.wait_for_more("c", after=0)
        except JournalRefused as error:
            told.append(str(error))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group, MemoryJournal(store) as journal:
            group.start_soon(wait)
            while not store._waiting:
                await anyio.lowlevel.checkpoint()
    assert len(told) == 1
    async with MemoryJournal(store) as journal:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await journal.wait_for_more("c", after=0)
        assert not any(store._waiting.values())


async def test_nobody_waits_for_more_of_a_database_that_is_not_open() -> None:
    with pytest.raises(JournalRefused, match="not open"):
        await PostgresJournal("postgresql://127.0.0.1:1/none").wait_for_more("c", after=0)


async def test_no_new_conversation_is_called_as_a_folder(journals: list[Journal]) -> None:
    for journal in journals:
        claim = await journal.claim("c")
        await _append(journal, "c", claim.epoch, 1, make_record("e1"))
        for name, why in ((".", "folder"), ("..", "folder"), ("a/b", "slash at position 1")):
            with pytest.raises(InvalidConversationId, match=why):
                await journal.claim(name)
            with pytest.raises(InvalidConversationId, match=why):
                await _fork(journal, "c", name, 1)
        assert [info.conversation_id for info in await journal.list()] == ["c"]
