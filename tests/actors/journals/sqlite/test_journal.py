"""What the SQLite journal promises beyond the port: one owner, one commit, clear refusals."""

# ruff: noqa: ASYNC240 - the files of a test are small, and its loop has nothing else to do

from __future__ import annotations

import ast
import os
import re
import resource
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.actors.errors import (
    ConversationNotFound,
    CorruptLog,
    Fenced,
    InvalidInput,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
    OwnedElsewhere,
)
from turnkeeper.actors.journal import Claim, Record, Rejection
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.shared import job_thread
from turnkeeper.actors.journals.shared.append_rules import Append
from turnkeeper.actors.journals.shared.job_thread import Job, JobThread
from turnkeeper.actors.journals.shared.record_chain import first_mark
from turnkeeper.actors.journals.sqlite import schema
from turnkeeper.actors.journals.sqlite.journal import SQLiteJournal
from turnkeeper.actors.journals.sqlite.log import read_tail
from turnkeeper.actors.journals.sqlite.owner_lock import OwnerLock
from turnkeeper.actors.journals.sqlite.schema import (
    APPLICATION_ID,
    MIGRATIONS,
    SCHEMA_VERSION,
    refusal,
)
from turnkeeper.actors.journals.sqlite.verify import verify
from turnkeeper.actors.journals.sqlite.writer import SQLiteWriter
from turnkeeper.runtime import InvariantViolation, Ports


class Gate:
    """A failpoint that holds the writing thread at one boundary until it is opened."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.passed: list[str] = []
        self._is_open = threading.Event()
        self._is_open.set()
        self._reached = threading.Event()

    def __call__(self, boundary: str) -> None:
        self.passed.append(boundary)
        if boundary == self.where:
            self._reached.set()
            assert self._is_open.wait(60)

    def close(self) -> None:
        self._reached.clear()
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    async def reached(self) -> None:
        while not self._reached.is_set():
            await anyio.lowlevel.checkpoint()


class Fault:
    """A failpoint that raises once at one boundary."""

    def __init__(self, where: str, error: Exception) -> None:
        self.where = where
        self.error: Exception | None = error
        self.is_armed = False

    def __call__(self, boundary: str) -> None:
        if self.is_armed and boundary == self.where:
            self.is_armed = False
            assert self.error is not None
            raise self.error


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats.db"


async def append(journal: SQLiteJournal, name: str, claim: Claim, at: int, *ids: str) -> list[int]:
    return list(
        await journal.append(
            name,
            [make_record(event_id) for event_id in ids],
            epoch=claim.epoch,
            expected_seq=at,
            is_unfinished=False,
        )
    )


# --- durability and group commit ------------------------------------------------------------------


async def test_commits_are_synced_and_go_through_the_write_ahead_log(path: Path) -> None:
    async with SQLiteJournal(path) as journal:

        def pragma(name: str) -> Callable[[SQLiteWriter], object]:
            return lambda writer: writer._execute(f"PRAGMA {name}").fetchone()[0]

        assert await journal._change(pragma("synchronous")) == 2  # FULL
        assert await journal._change(pragma("journal_mode")) == "wal"
        assert await journal._change(pragma("fullfsync")) == 1
        assert await journal._change(pragma("secure_delete")) == 1


async def test_what_gathers_during_a_commit_goes_into_the_next_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many append: one more commit, and one more wake-up of the loop."""
    gate = Gate("begin")
    wakes: list[int] = []
    finish = JobThread._finish

    def count(self: JobThread, group: Sequence[Job[object]]) -> None:
        wakes.append(len(group))
        finish(self, group)

    monkeypatch.setattr(JobThread, "_finish", count)
    names = [f"c{number}" for number in range(50)]
    async with SQLiteJournal(path, failpoint=gate) as journal:
        claims = {name: await journal.claim(name) for name in names}
        gate.close()
        gate.passed.clear()
        wakes.clear()

        async with anyio.create_task_group() as group:
            group.start_soon(append, journal, "c0", claims["c0"], 1, "first")
            await gate.reached()
            for name in names[1:]:
                group.start_soon(append, journal, name, claims[name], 1, "e1", "e2")
            while journal._writer._queued_items < 1 + 2 * len(names[1:]):
                await anyio.lowlevel.checkpoint()
            gate.open()

        assert gate.passed.count("committed") == 2
        assert wakes == [1, len(names) - 1]


async def test_a_commit_is_one_statement_however_many_append(path: Path) -> None:
    """Each statement lets go of the interpreter lock, and waits for a busy event loop after it."""
    statements: list[str] = []
    gate = Gate("begin")
    async with SQLiteJournal(path, failpoint=gate) as journal:
        names = [f"c{number}" for number in range(200)]
        claims: dict[str, Claim] = {}
        async with anyio.create_task_group() as group:

            async def claim(name: str) -> None:
                claims[name] = await journal.claim(name)

            for name in names:
                group.start_soon(claim, name)

        def count(writer: SQLiteWriter) -> None:
            execute = writer._execute

            def counted(text: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
                statements.append(text)
                return execute(text, values)

            writer._execute = counted  # type: ignore[assignment]  # narrower than sqlite3's own

        await journal._change(count)
        gate.close()
        async with anyio.create_task_group() as group:
            group.start_soon(append, journal, "c0", claims["c0"], 1, "first")
            await gate.reached()
            statements.clear()
            for name in names[1:]:
                group.start_soon(append, journal, name, claims[name], 1, "e1", "e2")
            while journal._writer._queued_items < 399:
                await anyio.lowlevel.checkpoint()
            gate.open()
        for name in names[1:3]:
            await append(journal, name, claims[name], 3, "e3")

    # One for the first append, one for all the others, and one for each of the last two, which are
    # not the first of their conversations and so write no listing. Now and then the writer looks if
    # the file is still its own; that is not part of a commit.
    look = ("PRAGMA", "SELECT generation FROM journal")
    written = [text for text in statements if not text.startswith(look)]
    views = [text.split()[2] for text in written]
    assert views == ["incoming_listed", "incoming_listed", "incoming", "incoming"]


async def test_leaving_waits_for_what_was_appended(path: Path) -> None:
    gate = Gate("begin")
    async with SQLiteJournal(path, failpoint=gate) as journal:
        claim = await journal.claim("c")
        gate.close()
        async with anyio.create_task_group() as group:
            for seq in range(1, 6):
                group.start_soon(append, journal, "c", claim, seq, f"e{seq}")
                while journal._writer._queued_items < seq:
                    await anyio.lowlevel.checkpoint()
            await gate.reached()
            group.cancel_scope.cancel()
        gate.open()

    async with SQLiteJournal(path) as journal:
        assert await read_all(journal, "c") == ["e1", "e2", "e3", "e4", "e5"]


async def test_an_append_that_cannot_be_encoded_fails_alone(path: Path) -> None:
    gate = Gate("begin")
    outcomes: dict[str, object] = {}
    async with SQLiteJournal(path, failpoint=gate) as journal:
        claims = {name: await journal.claim(name) for name in ("a", "c", "first")}
        claims["\ud800"] = Claim(1, head=0)

        async def send(name: str, event_id: str) -> None:
            job = Append(
                name,
                [make_record(event_id)],
                epoch=claims[name].epoch,
                expected_seq=1,
                is_unfinished=False,
            )
            try:
                # Behind the checks of the port, which let no such name through.
                seqs: Sequence[int] = await journal._submit(job)
                outcomes[name] = list(seqs)
            except InvariantViolation as error:
                outcomes[name] = type(error)

        gate.close()
        async with anyio.create_task_group() as group:
            group.start_soon(send, "first", "e")
            await gate.reached()
            for name in ("a", "\ud800", "c"):
                group.start_soon(send, name, "e")
            while journal._writer._queued_items < 4:
                await anyio.lowlevel.checkpoint()
            gate.open()

        assert outcomes == {"first": [1], "a": [1], "\ud800": InvariantViolation, "c": [1]}
        assert await append(journal, "c", claims["c"], 2, "e2") == [2]


# --- backpressure ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [{"queued_events_max": 4}, {"queued_bytes_max": 4 * len(make_record("e").payload)}],
    ids=["events", "bytes"],
)
async def test_senders_wait_when_the_queue_is_full_and_keep_their_order(
    path: Path, limits: dict[str, Any]
) -> None:
    gate = Gate("begin")
    landed: list[int] = []
    async with SQLiteJournal(path, failpoint=gate, **limits) as journal:
        claim = await journal.claim("c")
        gate.close()

        async def send(seq: int, sending: anyio.Event) -> None:
            sending.set()
            landed.extend(await append(journal, "c", claim, seq, f"e{seq}"))

        async with anyio.create_task_group() as group:
            for seq in range(1, 21):
                sending = anyio.Event()
                group.start_soon(send, seq, sending)
                await sending.wait()
            await gate.reached()
            assert journal._writer._queued_items == 4
            assert len(journal._writer._waiting) == 16
            gate.open()

        assert sorted(landed) == list(range(1, 21))
        assert await read_all(journal, "c") == [f"e{seq}" for seq in range(1, 21)]
        assert journal._writer._queued_items == journal._writer._queued_bytes == 0


async def test_a_sender_cancelled_while_it_waits_for_room_has_sent_nothing(path: Path) -> None:
    gate = Gate("begin")
    async with SQLiteJournal(path, failpoint=gate, queued_events_max=1) as journal:
        claim = await journal.claim("c")
        gate.close()
        async with anyio.create_task_group() as group:
            group.start_soon(append, journal, "c", claim, 1, "e1")
            await gate.reached()
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(append, journal, "c", claim, 2, "e2")
                while not journal._writer._waiting:
                    await anyio.lowlevel.checkpoint()
                waiting.cancel_scope.cancel()
            gate.open()

        assert await append(journal, "c", claim, 2, "e3") == [2]
        assert await read_all(journal, "c") == ["e1", "e3"]


async def test_a_small_append_does_not_overtake_a_large_one_that_waits(path: Path) -> None:
    gate = Gate("begin")
    landed: list[int] = []
    async with SQLiteJournal(path, failpoint=gate, queued_bytes_max=100) as journal:
        claim = await journal.claim("c")
        gate.close()

        async def send(seq: int, size: int, sending: anyio.Event) -> None:
            sending.set()
            landed.extend(
                await journal.append(
                    "c",
                    [Record(f"e{seq}", "note", b"x" * size)],
                    epoch=claim.epoch,
                    expected_seq=seq,
                    is_unfinished=False,
                )
            )

        async with anyio.create_task_group() as group:
            for seq, size in enumerate((60, 80, 10), 1):
                sending = anyio.Event()
                group.start_soon(send, seq, size, sending)
                await sending.wait()
            await gate.reached()
            gate.open()

        assert sorted(landed) == [1, 2, 3]


async def test_an_append_larger_than_the_whole_queue_is_let_in_alone(path: Path) -> None:
    async with SQLiteJournal(path, queued_events_max=2, queued_bytes_max=10) as journal:
        claim = await journal.claim("c")

        seqs = await journal.append(
            "c",
            [Record(f"e{number}", "note", b"x" * 50) for number in range(5)],
            epoch=claim.epoch,
            expected_seq=1,
            is_unfinished=False,
        )

        assert list(seqs) == [1, 2, 3, 4, 5]


async def test_the_tails_kept_in_memory_are_bounded(path: Path) -> None:
    async with SQLiteJournal(path, active_conversations_max=3) as journal:
        claims = {f"c{number}": await journal.claim(f"c{number}") for number in range(9)}
        for name, claim in claims.items():
            await append(journal, name, claim, 1, "e1")

        assert await journal._change(lambda writer: len(writer._tails)) <= 3
        for name, claim in claims.items():
            assert await append(journal, name, claim, 2, "e2") == [2]


async def test_the_tail_that_is_dropped_is_the_least_recently_used(path: Path) -> None:
    async with SQLiteJournal(path, active_conversations_max=2) as journal:
        claims = {name: await journal.claim(name) for name in ("busy", "quiet")}
        await append(journal, "busy", claims["busy"], 1, "e1")

        await journal.claim("another")

        assert await journal._change(lambda writer: list(writer._tails)) == ["busy", "another"]


# --- the three outcomes ---------------------------------------------------------------------------


async def test_a_busy_file_is_unavailable_and_the_same_append_may_be_tried_again(
    path: Path,
) -> None:
    async with SQLiteJournal(path, busy_wait_s=0) as journal:
        claim = await journal.claim("c")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(JournalUnavailable, match="nothing was written"):
                await append(journal, "c", claim, 1, "e1")
            with pytest.raises(JournalUnavailable, match="nothing was written"):
                await journal.claim("c")
            other.execute("ROLLBACK")

        assert journal.is_lease_valid()
        assert await append(journal, "c", claim, 1, "e1") == [1]


@pytest.mark.parametrize("where", ["begin", "written"])
async def test_an_io_error_before_the_commit_writes_nothing_and_closes_for_writing(
    path: Path, where: str
) -> None:
    fault = Fault(where, OSError(5, "Input/output error"))
    async with SQLiteJournal(path, failpoint=fault) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, "e1")
        fault.is_armed = True

        # An append alone passes "begin", anything else the boundaries after it too.
        with pytest.raises(JournalUnavailable):
            await (append(journal, "c", claim, 2, "e2") if where == "begin" else journal.claim("c"))
        with pytest.raises(JournalUnavailable):
            await append(journal, "c", claim, 2, "e2")

        assert not journal.is_lease_valid()
        assert await read_all(journal, "c") == ["e1"]
    async with SQLiteJournal(path) as journal:
        assert await journal.claim("c") == Claim(claim.epoch + 1, 1)


@pytest.mark.parametrize(("where", "landed"), [("commit", False), ("committed", True)])
async def test_an_io_error_around_a_commit_is_unknown_and_is_not_tried_again(
    path: Path, where: str, *, landed: bool
) -> None:
    fault = Fault(where, OSError(5, "Input/output error"))
    async with SQLiteJournal(path, failpoint=fault) as journal:
        claim = await journal.claim("c")
        fault.is_armed = True

        with pytest.raises(JournalOutcomeUnknown):
            await journal.claim("c")
        with pytest.raises(JournalUnavailable):
            await append(journal, "c", claim, 1, "e1")
        assert not journal.is_lease_valid()

    async with SQLiteJournal(path) as journal:
        assert (await journal.claim("c")).epoch == claim.epoch + landed + 1


async def test_an_io_error_after_an_append_is_unknown_and_sending_again_settles_it(
    path: Path,
) -> None:
    fault = Fault("committed", OSError(5, "Input/output error"))
    async with SQLiteJournal(path, failpoint=fault) as journal:
        claim = await journal.claim("c")
        fault.is_armed = True
        with pytest.raises(JournalOutcomeUnknown):
            await append(journal, "c", claim, 1, "e1")
        with pytest.raises(JournalUnavailable):
            await append(journal, "c", claim, 1, "e1")
        assert not journal.is_lease_valid()

    async with SQLiteJournal(path) as journal:
        claim = await journal.claim("c")
        assert await append(journal, "c", claim, claim.head + 1, "e1") == [1]
        assert await read_all(journal, "c") == ["e1"]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a bug")], ids=["memory", "bug"])
@pytest.mark.parametrize("where", ["begin", "written", "commit", "committed"])
async def test_an_error_of_any_other_kind_rolls_back_and_closes_for_writing(
    path: Path, where: str, error: Exception
) -> None:
    """SQLite's own lack of memory comes as a MemoryError, which is no error of the database."""
    fault = Fault(where, error)
    async with SQLiteJournal(path, failpoint=fault) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, "e1")
        fault.is_armed = True

        # An append alone passes "begin" and "committed" only.
        first = where in {"begin", "committed"}
        failing = append(journal, "c", claim, 2, "e2") if first else journal.claim("c")
        with pytest.raises((JournalUnavailable, JournalOutcomeUnknown)):
            await failing
        for attempt in (append(journal, "c", claim, 2, "e3"), journal.claim("c")):
            with pytest.raises(JournalUnavailable, match="closed for writing"):
                await attempt

        assert not journal.is_lease_valid()
        ids = await read_all(journal, "c")
        assert ids == (["e1", "e2"] if where == "committed" else ["e1"])
    assert verify(path).problems == ()
    async with SQLiteJournal(path) as journal:
        claim = await journal.claim("c")
        assert await append(journal, "c", claim, len(ids) + 1, "e4") == [len(ids) + 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_callers_are_answered_if_the_thread_they_wait_for_dies(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = JobThread._take
    taken: list[int] = []

    def take_and_die(self: JobThread) -> list[Job[object]]:
        group = take(self)
        if "writer" in self._name and group:
            taken.append(len(group))
            if len(taken) > 1:
                raise RuntimeError("the thread dies")
        return group

    monkeypatch.setattr(JobThread, "_take", take_and_die)
    async with SQLiteJournal(path) as journal:
        await journal.claim("c")
        with pytest.raises(JournalOutcomeUnknown, match="has died"):
            await journal.claim("c")
        with pytest.raises(JournalRefused, match="not open"):
            await journal.claim("c")


async def test_a_full_disk_is_said_and_writing_goes_on_when_there_is_room_again(
    path: Path,
) -> None:
    async with SQLiteJournal(path) as journal:
        claim = await journal.claim("c")
        big = Record("e1", "note", b"x" * 1_000_000)

        def limit(pages: int) -> Callable[[SQLiteWriter], object]:
            return lambda writer: writer._execute(f"PRAGMA max_page_count = {pages}").fetchone()

        await journal._change(limit(40))
        with pytest.raises(JournalUnavailable, match="make room"):
            await journal.append("c", [big], epoch=claim.epoch, expected_seq=1, is_unfinished=False)
        assert journal.is_lease_valid()

        await journal._change(limit(1_000_000))
        assert await append(journal, "c", claim, 1, "e1") == [1]


# --- one owner ------------------------------------------------------------------------------------


async def test_a_second_writer_is_told_who_owns_the_file(path: Path) -> None:
    async with SQLiteJournal(path, address="host-1:9000"):
        with pytest.raises(OwnedElsewhere, match="host-1:9000") as caught:
            async with SQLiteJournal(path, owner_wait_s=0):
                raise AssertionError("entered")
        assert caught.value.owner == "host-1:9000"
        assert "takeover=True" in str(caught.value)
        assert "PostgresJournal" in str(caught.value), "as for a server with several workers"


async def test_a_second_writer_takes_its_turn_when_the_first_one_has_left(path: Path) -> None:
    async with anyio.create_task_group() as group:
        entered = anyio.Event()

        async def second() -> None:
            async with SQLiteJournal(path, owner_wait_s=60) as journal:
                assert (await journal.claim("c")).head == 1
                entered.set()

        async with SQLiteJournal(path) as first:
            await append(first, "c", await first.claim("c"), 1, "e1")
            group.start_soon(second)
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            assert not entered.is_set()


async def test_an_owner_taken_over_writes_nothing_more_anywhere(path: Path) -> None:
    """Not only in the conversations that the new owner has claimed already."""
    async with SQLiteJournal(path) as first:
        claims = {name: await first.claim(name) for name in ("a", "b")}
        await append(first, "a", claims["a"], 1, "e1")

        async with SQLiteJournal(path, takeover=True, address="the new one") as second:
            for name, claim in claims.items():
                with pytest.raises(OwnedElsewhere, match="the new one"):
                    await append(first, name, claim, 2, "zombie")
            with pytest.raises(OwnedElsewhere):
                await first.claim("a")
            with pytest.raises(OwnedElsewhere):
                await first.reject("a", [Rejection(4e9, "v", "r", b"{}")], epoch=1)
            assert not first.is_lease_valid()
            assert await read_all(second, "a") == ["e1"]

        # It has left; the one it was taken from cannot come back either.
        with pytest.raises(OwnedElsewhere):
            await first.claim("a")


async def test_the_lock_is_the_new_owners_after_a_takeover(path: Path) -> None:
    async with AsyncExitStack() as old, AsyncExitStack() as new:
        await old.enter_async_context(SQLiteJournal(path, address="host-1"))
        await new.enter_async_context(SQLiteJournal(path, takeover=True, address="host-2"))
        await old.aclose()

        with pytest.raises(OwnedElsewhere, match="host-2"):
            async with SQLiteJournal(path, owner_wait_s=0):
                raise AssertionError("entered")

        await new.aclose()
        async with SQLiteJournal(path, owner_wait_s=0):
            pass


def test_a_lock_on_a_sidecar_that_was_replaced_meanwhile_is_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rival takes over between our opening the sidecar and our locking it."""
    holder = OwnerLock(path, "holder")
    holder.try_acquire()
    rival = OwnerLock(path, "rival")
    opened: list[int] = []
    open_sidecar = OwnerLock._open

    def open_then_lose(self: OwnerLock, sidecar: Path, flags: int = 0) -> int:
        descriptor = open_sidecar(self, sidecar, flags)
        opened.append(descriptor)
        if len(opened) == 1:
            rival.prepare_takeover()
            rival.draft()
            rival.take_over()
        return descriptor

    monkeypatch.setattr(OwnerLock, "_open", open_then_lose)
    with pytest.raises(OwnedElsewhere, match="rival"):
        OwnerLock(path, "late").try_acquire()
    rival.release()


async def test_a_writer_that_another_program_holds_up_is_told_so(path: Path) -> None:
    """A process that stopped inside a transaction holds SQLite's own lock; nothing hangs."""
    async with SQLiteJournal(path):
        pass
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalRefused, match="in the middle of writing"):
            async with SQLiteJournal(path, busy_wait_s=0):
                raise AssertionError("entered")
        other.execute("ROLLBACK")
    async with SQLiteJournal(path, busy_wait_s=0):
        pass


async def test_opening_a_file_with_a_log_waits_for_a_lock_at_each_of_its_steps(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that closes the file locks it all for a moment. The owner was refused at once."""
    connect = schema._connect
    waits: list[float] = []

    def noting(
        path: Path, mode: Literal["rw", "ro"], busy_wait_s: float, *, is_immutable: bool = False
    ) -> sqlite3.Connection:
        if not is_immutable:  # which takes no lock
            waits.append(busy_wait_s)
        return connect(path, mode, busy_wait_s, is_immutable=is_immutable)

    killed = tmp_path / "killed.db"
    async with SQLiteJournal(path) as journal:
        await journal.claim("c")
        for end in ("", "-wal"):
            shutil.copyfile(f"{path}{end}", f"{killed}{end}")
    monkeypatch.setattr(schema, "_connect", noting)

    async with SQLiteJournal(killed, busy_wait_s=7):
        assert len(waits) > 2
        assert set(waits) == {7}


async def test_a_journal_is_entered_once_at_a_time(path: Path) -> None:
    journal = SQLiteJournal(path)
    async with journal:
        with pytest.raises(JournalRefused):
            async with journal:
                raise AssertionError("entered")
        await journal.claim("c")
    async with journal:
        await journal.claim("c")


async def test_nothing_is_done_outside(path: Path) -> None:
    journal = SQLiteJournal(path)
    for _ in range(2):
        with pytest.raises(JournalRefused, match="async with"):
            await journal.claim("c")
        with pytest.raises(JournalRefused, match="async with"):
            await journal.read("c")
        assert not journal.is_lease_valid()
        async with journal:
            pass


# --- reading without owning -----------------------------------------------------------------------


@asynccontextmanager
async def reading(path: Path) -> AsyncIterator[SQLiteJournal]:
    async with SQLiteJournal(path, read_only=True) as journal:
        yield journal


async def test_a_reader_follows_what_an_owner_writes(path: Path) -> None:
    async with SQLiteJournal(path) as owner:
        claim = await owner.claim("c")
        async with reading(path) as reader:
            for seq in range(1, 4):
                await append(owner, "c", claim, seq, f"e{seq}")
                assert len(await read_all(reader, "c")) == seq


async def test_a_reader_sees_owners_come_and_go(path: Path) -> None:
    async with SQLiteJournal(path) as owner:
        await append(owner, "c", await owner.claim("c"), 1, "e1")
    async with reading(path) as reader:
        assert await read_all(reader, "c") == ["e1"]
        for seq in (2, 3):
            async with SQLiteJournal(path) as owner:
                await append(owner, "c", await owner.claim("c"), seq, f"e{seq}")
                assert len(await read_all(reader, "c")) == seq
            assert len(await read_all(reader, "c")) == seq


async def test_a_reader_goes_on_once_a_file_that_was_moved_away_is_back(path: Path) -> None:
    async with SQLiteJournal(path) as owner:
        await append(owner, "c", await owner.claim("c"), 1, "e1")
    async with reading(path) as reader:
        assert await read_all(reader, "c") == ["e1"]
        away = path.rename(path.with_name("away.db"))
        for _ in range(2):
            with pytest.raises(JournalUnavailable, match="deleted or moved while it was open"):
                await read_all(reader, "c")

        away.rename(path)

        assert await read_all(reader, "c") == ["e1"]


async def test_a_reader_changes_and_leaves_nothing(path: Path) -> None:
    async with SQLiteJournal(path) as owner:
        await append(owner, "c", await owner.claim("c"), 1, "e1")
    before = {file: file.read_bytes() for file in path.parent.iterdir()}

    async with reading(path) as reader:
        assert await read_all(reader, "c") == ["e1"]
        assert not reader.is_lease_valid()
        with pytest.raises(ConversationNotFound):
            await reader.read("d")
        for attempt in (reader.claim("c"), append(reader, "c", Claim(1, 1), 2, "e2")):
            with pytest.raises(JournalRefused, match="read-only"):
                await attempt

    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before


async def test_reading_goes_on_beside_an_open_transaction(path: Path) -> None:
    gate = Gate("commit")
    async with SQLiteJournal(path, failpoint=gate) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, "e1")
        gate.close()
        async with anyio.create_task_group() as group:
            rejections = [Rejection(4e9, "v", "r", b"{}")]
            group.start_soon(partial(journal.reject, "c", rejections, epoch=claim.epoch))
            await gate.reached()

            assert await read_all(journal, "c") == ["e1"]
            assert list(await journal.rejections("c")) == []

            gate.open()
        assert len(await journal.rejections("c")) == 1


# --- what is not a journal ------------------------------------------------------------------------


def make_other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE event (anything)")


def make_newer_journal(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        other.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


STRANGERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (Path.touch, "empty file"),
    "text": (lambda path: path.write_text("hello, " * 1_000), "not a turnkeeper journal"),
    "database": (make_other_database, "not a turnkeeper journal"),
    "newer": (make_newer_journal, f"schema version {SCHEMA_VERSION + 1}.*newer turnkeeper"),
    "folder": (Path.mkdir, "not a regular file"),
    "pipe": (os.mkfifo, "not a regular file"),
    "log alone": (lambda path: Path(f"{path}-wal").write_text("frames"), "chats.db-wal"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_what_is_no_journal_is_refused_and_left_alone(path: Path, stranger: str) -> None:
    make, text = STRANGERS[stranger]
    make(path)
    before = {file: file.is_file() and file.read_bytes() for file in path.parent.iterdir()}

    with pytest.raises(JournalRefused, match=text):
        async with SQLiteJournal(path):
            raise AssertionError("entered")

    after = {file: file.is_file() and file.read_bytes() for file in path.parent.iterdir()}
    if stranger in {"newer", "log alone"}:  # it is a journal, or may become one
        after.pop(Path(f"{path}-owner"))
    assert after == before


async def test_another_programs_file_that_is_in_use_gets_no_lock_file(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("CREATE TABLE event (anything)")
        before = set(path.parent.iterdir())
        assert Path(f"{path}-wal") in before

        with pytest.raises(JournalRefused, match="not a turnkeeper journal"):
            async with SQLiteJournal(path):
                raise AssertionError("entered")

        assert set(path.parent.iterdir()) == before
        other.execute("INSERT INTO event VALUES (1)")


@pytest.mark.parametrize("stranger", ["empty", "text", "database", "newer", "folder", "pipe"])
async def test_a_reader_refuses_what_is_no_journal(path: Path, stranger: str) -> None:
    make, text = STRANGERS[stranger]
    make(path)
    with pytest.raises(JournalRefused, match=text):
        async with reading(path):
            raise AssertionError("entered")


@pytest.mark.parametrize(
    "program",
    [
        """
        CREATE TABLE _litestream_seq (id INTEGER PRIMARY KEY, seq INTEGER);
        CREATE TABLE _litestream_lock (id INTEGER);
        INSERT INTO _litestream_seq VALUES (1, 1);
        """,
        """
        CREATE TABLE notes (id INTEGER UNIQUE);
        CREATE INDEX noted ON notes (id);
        CREATE TRIGGER noting AFTER INSERT ON notes BEGIN DELETE FROM notes WHERE id = 0; END;
        CREATE VIEW shown AS SELECT name FROM conversation;
        """,
        "ANALYZE",
    ],
    ids=["replication", "notes", "statistics"],
)
async def test_tables_of_other_programs_keep_nobody_out(path: Path, program: str) -> None:
    """Programs that replicate a file keep their place in it, and it was then no journal."""
    async with SQLiteJournal(path) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1")
        with closing(sqlite3.connect(path)) as other:
            other.executescript(program)

    async with reading(path) as reader:
        assert await read_all(reader, "c") == ["e1"]
    async with SQLiteJournal(path) as journal:
        assert await append(journal, "c", await journal.claim("c"), 2, "e2") == [2]
    assert verify(path).problems == ()


@pytest.mark.parametrize(
    "change",
    [
        "DROP INDEX IF EXISTS message_id",
        "CREATE TRIGGER losing AFTER INSERT ON event BEGIN DELETE FROM event; END",
        "CREATE TRIGGER losing AFTER INSERT ON EVENT BEGIN DELETE FROM event; END",
        "CREATE TRIGGER losing AFTER INSERT ON Search_Word_Data BEGIN DELETE FROM event; END",
        "ALTER TABLE fork RENAME TO forked",
    ],
)
async def test_a_change_to_the_tables_of_the_journal_is_refused(path: Path, change: str) -> None:
    async with SQLiteJournal(path, search=True) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1")
    with closing(sqlite3.connect(path)) as other:
        other.executescript(change)

    for opened in (SQLiteJournal(path), reading(path)):
        with pytest.raises(JournalRefused, match="its schema is not that of version"):
            async with opened:
                raise AssertionError("entered")


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"chats.db"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "path is a NoneType; it takes the path of a file"),
        (b"chats.db", "path is a bytes; it takes the path of a file"),
        ("", "path is empty; it takes the path of a file"),
        (BytesPath(), "path is a BytesPath; it takes the path of a file, as text or Path"),
        (":memory:", r"path is ':memory:'; .* use MemoryJournal\(\)"),
        (Path(":memory:"), r"path is ':memory:'; .* use MemoryJournal\(\)"),
        ("sqlite:///chats.db", "path is a URL; it takes the path of a file, with ./ before it"),
        ("pgsql://me:secret@host/db", "which begins with postgresql://"),
        ('"postgresql://me:secret@host/db"', "which begins with postgresql://"),
        (" postgresql://me:secret@host/db", "which begins with postgresql://"),
        ("DATABASE_URL=postgresql://me:secret@host/db", "which begins with postgresql://"),
        ("postgresql://me:secret@host/db", "PostgresJournal takes the URL of a database"),
    ],
)
def test_what_is_no_path_is_refused_before_a_file_of_that_name_is_made(
    given: object, said: str
) -> None:
    with pytest.raises(InvalidInput, match=said) as refused:
        SQLiteJournal(given)  # type: ignore[arg-type]
    assert "secret" not in str(refused.value)


def test_a_setting_that_sqlite_has_and_that_is_not_durable_is_refused() -> None:
    with pytest.raises(InvalidInput, match="synchronous is 'OFF'; it takes one of FULL, "):
        SQLiteJournal("chats.db", synchronous="OFF")  # type: ignore[arg-type]


async def test_a_path_that_does_not_exist_is_made_by_an_owner_only(tmp_path: Path) -> None:
    with pytest.raises(JournalRefused, match="no such file"):
        async with reading(tmp_path / "missing.db"):
            raise AssertionError("entered")
    assert list(tmp_path.iterdir()) == []

    said = f"there is no folder {tmp_path / 'no'}; nothing was changed; make the folder"
    with pytest.raises(JournalRefused, match=said):
        async with SQLiteJournal(tmp_path / "no" / "folder.db"):
            raise AssertionError("entered")
    assert list(tmp_path.iterdir()) == []


async def test_only_what_begins_with_a_scheme_is_a_url(tmp_path: Path) -> None:
    """Every path with :// in it was refused, so a file in such a folder could not be opened."""
    folder = tmp_path / "a:"
    folder.mkdir()
    async with SQLiteJournal(f"{tmp_path}/a://b.db") as journal:
        await journal.claim("c")
    assert (folder / "b.db").exists()


async def test_a_journal_half_made_by_a_killed_process_is_made_anew(path: Path) -> None:
    Path(f"{path}-new").write_bytes(b"half")
    async with SQLiteJournal(path) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1")

    assert not Path(f"{path}-new").exists()


@pytest.fixture
def next_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Make this code one version newer, by these statements."""

    def make(script: str) -> None:
        monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, script))
        monkeypatch.setattr(schema, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
        monkeypatch.setattr(schema, "READABLE_VERSION_MIN", SCHEMA_VERSION + 1)
        schema._schema_of.cache_clear()

    yield make
    schema._schema_of.cache_clear()


async def test_an_older_file_is_brought_up_to_date_by_its_next_owner(
    path: Path, next_version: Callable[[str], None]
) -> None:
    async with SQLiteJournal(path) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1")
    next_version("CREATE TABLE later (number INTEGER); INSERT INTO later VALUES (7);")

    with pytest.raises(JournalRefused, match="open it once for writing"):
        async with reading(path):
            raise AssertionError("entered")
    async with SQLiteJournal(path) as journal:
        await append(journal, "c", await journal.claim("c"), 2, "e2")
    async with reading(path) as journal:
        assert await read_all(journal, "c") == ["e1", "e2"]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT number FROM later").fetchall() == [(7,)]


async def test_a_migration_that_fails_half_way_leaves_the_file_as_it_was(
    path: Path, next_version: Callable[[str], None]
) -> None:
    async with SQLiteJournal(path) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1")
    before = dump(path)
    next_version("DROP TABLE snapshot; DELETE FROM event; INSERT INTO nowhere VALUES (1);")

    with pytest.raises(JournalRefused):
        async with SQLiteJournal(path):
            raise AssertionError("entered")

    assert dump(path) == before


def dump(path: Path) -> list[str]:
    """Return all that a file holds but its stamp, as SQL."""
    with closing(sqlite3.connect(path)) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()
        lines = [line for line in connection.iterdump() if '"log_stamp"' not in line]
        return [*lines, str(version)]


async def test_a_migration_that_is_killed_half_way_is_made_by_the_next_owner(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    next_version: Callable[[str], None],
) -> None:
    """The log that it leaves is a new one, which the file's stamp does not know."""
    async with SQLiteJournal(path) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1")
    next_version("CREATE TABLE later (number INTEGER); INSERT INTO later VALUES (7);")
    killed = tmp_path / "killed.db"
    migrate = schema._migrate

    def migrate_and_die(connection: sqlite3.Connection, version: int) -> None:
        migrate(connection, version)
        for end in ("", "-wal"):
            shutil.copy(f"{path}{end}", f"{killed}{end}")

    monkeypatch.setattr(schema, "_migrate", migrate_and_die)
    async with SQLiteJournal(path):
        pass
    monkeypatch.setattr(schema, "_migrate", migrate)

    async with SQLiteJournal(killed) as journal:
        await append(journal, "c", await journal.claim("c"), 2, "e2")
        assert await read_all(journal, "c") == ["e1", "e2"]


REFUSALS = {
    sqlite3.SQLITE_READONLY: "check the permissions",
    sqlite3.SQLITE_CANTOPEN: "check the permissions",
    sqlite3.SQLITE_BUSY: "end that program",
    sqlite3.SQLITE_CORRUPT: "turnkeeper repair",
    sqlite3.SQLITE_NOTADB: "give another path",
    sqlite3.SQLITE_IOERR: "check the disk",
    sqlite3.SQLITE_FULL: "make room",
    sqlite3.SQLITE_MISUSE: "check it",
}


@pytest.mark.parametrize("code", REFUSALS)
def test_each_reason_not_to_open_a_file_comes_with_what_to_do(path: Path, code: int) -> None:
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorcode = code
    assert REFUSALS[code] in str(refusal(path, error))


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """Leave this process room for so many more open files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)


@pytest.mark.parametrize("mode", ["made", "written", "read", "left by a crash"])
async def test_a_file_that_cannot_be_opened_for_want_of_open_files_may_be_opened_later(
    path: Path, mode: str
) -> None:
    """SQLite says of it what it says of a folder that may not be read."""
    if mode != "made":
        other = path.with_name("other.db") if mode == "left by a crash" else path
        async with SQLiteJournal(other) as journal:
            await journal.claim("c")
            if other != path:
                for end in ("", "-wal"):
                    shutil.copy(f"{other}{end}", f"{path}{end}")
    told: set[str] = set()
    is_open = False
    for count in range(12):
        try:
            with files_left(count):
                async with SQLiteJournal(path, read_only=mode == "read"):
                    is_open = True
        except JournalUnavailable as error:
            told.add(str(error))
        if is_open:
            break
    assert is_open
    assert told
    assert all("ulimit -n" in each for each in told), told


async def test_a_folder_whose_locks_do_not_work_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(_: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("turnkeeper.actors.journals.sqlite.owner_lock._lock", no_locks)
    with pytest.raises(JournalRefused, match="cannot be locked"):
        async with SQLiteJournal(path):
            raise AssertionError("entered")


async def test_leaving_gives_up_on_a_disk_that_hangs_and_answers_everybody(path: Path) -> None:
    gate = Gate("begin")
    answers: dict[str, type[Exception]] = {}
    journal = SQLiteJournal(path, failpoint=gate, stop_wait_s=0.01, group_events_max=1)

    async def send(name: str, claim: Claim) -> None:
        try:
            await append(journal, name, claim, 1, "e1")
        except (JournalOutcomeUnknown, JournalUnavailable) as error:
            answers[name] = type(error)

    async with anyio.create_task_group() as group, journal:
        claims = {name: await journal.claim(name) for name in ("in hand", "queued")}
        gate.close()
        for name, claim in claims.items():
            group.start_soon(send, name, claim)
            await gate.reached()
        while journal._writer._queued_items < len(claims):
            await anyio.lowlevel.checkpoint()
    gate.open()

    assert answers == {"in hand": JournalOutcomeUnknown, "queued": JournalUnavailable}


async def test_a_disk_that_hangs_answers_everybody_while_the_journal_is_entered(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(job_thread, "_WATCH_INTERVAL_S", 0.01)
    gate = Gate("begin")
    journal = SQLiteJournal(
        path, failpoint=gate, group_events_max=1, ports=Ports(monotonic=lambda: now)
    )
    answers: dict[str, type[Exception]] = {}

    async def send(name: str, claim: Claim) -> None:
        try:
            await append(journal, name, claim, 1, "e1")
        except (JournalOutcomeUnknown, JournalUnavailable) as error:
            answers[name] = type(error)

    async with journal:
        claims = {name: await journal.claim(name) for name in ("in hand", "queued")}
        gate.close()
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for name, claim in claims.items():
                    group.start_soon(send, name, claim)
                    await gate.reached()
                while journal._writer._queued_items < len(claims):
                    await anyio.lowlevel.checkpoint()
                now += 60

        assert answers == {"in hand": JournalOutcomeUnknown, "queued": JournalUnavailable}
        assert not journal.is_lease_valid()
        with pytest.raises(JournalUnavailable, match="hangs"):
            await journal.claim("c")
    gate.open()


async def test_a_process_that_was_suspended_in_a_commit_does_not_take_its_disk_for_hung(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_thread, "_WATCH_INTERVAL_S", 0.01)
    gate = Gate("begin")
    is_suspended = False
    looks = 0

    def monotonic() -> float:
        nonlocal looks
        if is_suspended and threading.current_thread().name.startswith("watch of the writer"):
            looks += 1
            if looks == 1:  # the watch is the first to run again, and finds the commit late
                monkeypatch.setattr(job_thread, "_WATCH_INTERVAL_S", 60)
                gate.open()
        return 1_000.0 if is_suspended else 0.0

    journal = SQLiteJournal(path, failpoint=gate, ports=Ports(monotonic=monotonic))
    async with journal:
        claim = await journal.claim("c")
        gate.close()
        async with anyio.create_task_group() as group:
            group.start_soon(append, journal, "c", claim, 1, "e1")
            await gate.reached()
            is_suspended = True
        assert looks
        await append(journal, "c", claim, 2, "e2")


async def test_an_opening_that_hangs_is_given_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    make = SQLiteJournal._make_sqlite_writer

    def late(self: SQLiteJournal) -> SQLiteWriter:
        assert may_go_on.wait(60)
        return make(self)

    monkeypatch.setattr(SQLiteJournal, "_make_sqlite_writer", late)
    hanging = SQLiteJournal(path)
    hanging._writer._answer_wait_s = 0.05
    with pytest.raises(JournalUnavailable, match="hangs"):
        async with hanging:
            raise AssertionError("entered")
    # It may still come back and write, so no other process may begin.
    with pytest.raises(OwnedElsewhere):
        async with SQLiteJournal(path, owner_wait_s=0):
            raise AssertionError("entered")
    may_go_on.set()


async def test_a_lock_that_the_disk_does_not_answer_for_is_given_up_and_let_go_of_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, has_ended = threading.Event(), threading.Event()
    acquire = OwnerLock.try_acquire

    def late(self: OwnerLock) -> None:
        assert may_go_on.wait(60)
        acquire(self)

    def release(self: OwnerLock) -> None:
        let_go(self)
        if may_go_on.is_set():
            has_ended.set()

    let_go = OwnerLock.release
    with monkeypatch.context() as patched:
        patched.setattr(OwnerLock, "try_acquire", late)
        patched.setattr(OwnerLock, "release", release)
        with pytest.raises(JournalUnavailable, match="cannot be locked: the disk has not answered"):
            async with SQLiteJournal(path, answer_wait_s=0.05):
                raise AssertionError("entered")
        may_go_on.set()
        assert has_ended.wait(60)
    async with SQLiteJournal(path, owner_wait_s=60) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1")


# --- rejections -----------------------------------------------------------------------------------


async def test_rejections_are_dropped_when_they_are_old(path: Path) -> None:
    now = 1_000.0
    async with SQLiteJournal(
        path, ports=Ports(now=lambda: now), rejection_age_s_max=100
    ) as journal:
        epoch = (await journal.claim("c")).epoch
        for at in (1_000.0, 1_050.0, 1_200.0):
            now = at
            await journal.reject("c", [Rejection(at, "v", "r", b"{}")], epoch=epoch)

        assert [rejection.at for rejection in await journal.rejections("c")] == [1_200.0]


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(("writer of", "reader of")):
            thread.join(60)
            assert not thread.is_alive()


# --- the checks inside the statement --------------------------------------------------------------


@pytest.mark.parametrize("field", ["epoch", "head"])
async def test_a_tail_that_another_program_moved_is_found_by_the_statement_itself(
    path: Path, field: str
) -> None:
    """Behind this journal's back and under its generation: its memory is not what decides."""
    async with SQLiteJournal(path) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, "e1")
        with closing(sqlite3.connect(path)) as other, other:
            tail = read_tail(other, "c")
            assert tail is not None
            if field == "epoch":
                tail.epoch += 1
            else:
                tail.head, tail.last, tail.tip = 0, 0, first_mark(tail.log)
            other.execute(
                "UPDATE conversation SET epoch = ?, head = ?, last = ?, tip = ?, seal = ?",
                (tail.epoch, tail.head, tail.last, tail.tip, tail.seal()),
            )

        with pytest.raises(Fenced):
            await append(journal, "c", claim, 2, "e2", "e3")

        assert await journal._change(
            lambda writer: writer.connection.execute("SELECT count(*) FROM event").fetchone()
        ) == (1,)


async def test_a_row_that_is_damaged_under_the_writer_takes_no_record(path: Path) -> None:
    """The writer names the log itself, so the statement compares it with the row's."""
    async with SQLiteJournal(path) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, "e1")
        with closing(sqlite3.connect(path)) as other, other:
            other.execute("UPDATE conversation SET log = log + 1")

        with pytest.raises(CorruptLog, match="its own row is damaged"):
            await append(journal, "c", claim, 2, "e2")

        assert await journal._change(
            lambda writer: writer.connection.execute("SELECT count(*) FROM event").fetchone()
        ) == (1,)


def test_no_statement_numbers_its_parameters() -> None:
    """Python 3.12.0 to 3.12.3 take `?1` for a name, and warn when a sequence is bound to it."""
    for path in Path(schema.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Constant(value=str(text)):
                    assert not re.search(r"\?\d", text), f"{path.name}:{node.lineno}"
                case _:
                    pass
