"""Entering and leaving a journal that is interrupted, or that gets no thread: nothing stays behind.

What stayed behind would be a writer with an open file and without the owner's lock, or a lock or a
lease that no one can give back before the process ends.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeAlias

import anyio
import pytest

from tests import postgres
from tests.stepping import places_of, run_cancelling
from turnkeeper.actors.errors import JournalOutcomeUnknown, JournalUnavailable, OwnedElsewhere
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.postgres.journal import PostgresJournal
from turnkeeper.actors.journals.sqlite.journal import SQLiteJournal
from turnkeeper.runtime import Ports, Unavailable

pytestmark = pytest.mark.costly

ENDED_S = 60.0
HOURS_S = 7_200.0
STACK_BYTES = 1 << 47  # more than the address space of a process: no thread can have it

AnyJournal: TypeAlias = SQLiteJournal | PostgresJournal
Make: TypeAlias = Callable[[Ports], AnyJournal]


@pytest.fixture(params=["sqlite", "postgres"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Make journals over one file, or one schema, that another process would find."""
    if request.param == "sqlite":
        path = tmp_path / "chats.db"
        yield lambda ports: SQLiteJournal(path, owner_wait_s=0, ports=ports)
        return
    with postgres.schema() as schema:
        yield lambda ports: PostgresJournal(postgres.conninfo(), schema=schema, ports=ports)


class Threads:
    """Starts the threads of a journal; for one of them the machine has no room."""

    def __init__(self) -> None:
        self.started: list[threading.Thread] = []
        self.refuse_from: int | None = None
        self.refused = 0
        self.ports = Ports(start_thread=self.start)

    def start(self, name: str, target: Callable[[], None]) -> None:
        def run() -> None:
            self.started.append(threading.current_thread())
            target()

        with self._no_room() if self._is_refused() else nullcontext():
            Ports().start_thread(name, run)

    def _is_refused(self) -> bool:
        if self.refuse_from is None:
            return False
        self.refuse_from -= 1
        return self.refuse_from < 0

    @contextmanager
    def _no_room(self) -> Iterator[None]:
        self.refused += 1
        usual = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(usual)

    def left(self) -> list[str]:
        """Return the names of the threads that do not end."""
        for thread in self.started:
            thread.join(ENDED_S)
        return [thread.name for thread in self.started if thread.is_alive()]


async def use(journal: AnyJournal, event_id: str) -> None:
    """Enter the journal, append an event, and leave."""
    async with journal:
        claim = await journal.claim("c")
        at = claim.head + 1
        await journal.append(
            "c", [make_record(event_id)], epoch=claim.epoch, expected_seq=at, is_unfinished=False
        )


async def found(journal: AnyJournal) -> list[str]:
    async with journal:
        return list(await read_all(journal, "c"))


# --- cancelled by no scope ------------------------------------------------------------------------


def test_wherever_its_task_is_cancelled_natively_nothing_of_a_journal_stays_behind(
    make: Make,
) -> None:
    """As `asyncio.timeout` and Ctrl-C do. Such a cancellation passes anyio's shields."""
    usual = Threads()
    steps = run_cancelling(lambda: use(make(usual.ports), "e0"), None)
    assert usual.left() == []
    assert steps[0] > 5, "it waits for each of its threads, and for two calls"
    for n, place in enumerate(places_of(steps), start=1):
        threads = Threads()
        journal = make(threads.ports)
        run_cancelling(partial(use, journal, f"e{n}"), place)
        assert threads.left() == [], place

        anyio.run(use, make(Ports()), f"other-{n}")
        anyio.run(use, journal, f"again-{n}")
        assert anyio.run(found, make(Ports()))[-2:] == [f"other-{n}", f"again-{n}"]


@pytest.mark.usefixtures("_interrupted_by_ctrl_c")
@pytest.mark.parametrize("when", ["as the thread starts", "as it is waited for"])
def test_an_interrupt_while_a_file_is_opened_keeps_its_lock(tmp_path: Path, when: str) -> None:
    """An interrupt ends every wait at once, as Ctrl-C does on trio; the thread still opens."""
    may_open = threading.Event()
    threads = Threads()

    def start(name: str, target: Callable[[], None]) -> None:
        def run() -> None:
            while when == "as it is waited for" and journal._writer._opened.waker is None:
                pass
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert may_open.wait(ENDED_S)
            target()

        threads.start(name, run if name.startswith("writer") else target)

    journal = SQLiteJournal(tmp_path / "chats.db", ports=Ports(start_thread=start))
    with pytest.raises(KeyboardInterrupt):
        anyio.run(use, journal, "e1", backend="trio")
    with pytest.raises(OwnedElsewhere):
        anyio.run(use, SQLiteJournal(tmp_path / "chats.db", owner_wait_s=0), "e2")

    may_open.set()
    assert threads.left() == []


@pytest.mark.usefixtures("_interrupted_by_ctrl_c")
def test_an_interrupt_as_a_file_is_locked_leaves_no_lock(tmp_path: Path) -> None:
    locks = Late("lock of", 1)

    def start(name: str, target: Callable[[], None]) -> None:
        was_hanging = locks.is_hanging
        locks.start(name, target)
        if locks.is_hanging and not was_hanging:
            signal.raise_signal(signal.SIGINT)

    journal = SQLiteJournal(tmp_path / "chats.db", ports=Ports(start_thread=start))
    with pytest.raises(KeyboardInterrupt):
        anyio.run(use, journal, "e1", backend="trio")
    locks.let_go()

    anyio.run(use, SQLiteJournal(tmp_path / "chats.db", owner_wait_s=0), "e2")


# --- a thread that comes back late, when its journal may have been entered again ------------------


class Late:
    """Starts the threads of a journal; the first of a kind, after some, hangs before it begins."""

    def __init__(self, kind: str, others: int = 0) -> None:
        self.is_hanging = False
        self._kind = kind
        self._others = others
        self._may_go_on = threading.Event()
        self._has_ended = threading.Event()
        self.ports = Ports(start_thread=self.start)

    def start(self, name: str, target: Callable[[], None]) -> None:
        def late() -> None:
            assert self._may_go_on.wait(ENDED_S)
            target()
            self._has_ended.set()

        is_of_kind = name.startswith(self._kind)
        is_late = is_of_kind and self._others == 0
        self._others -= is_of_kind
        self.is_hanging |= is_late
        Ports().start_thread(name, late if is_late else target)

    def let_go(self) -> None:
        self._may_go_on.set()
        assert self._has_ended.wait(ENDED_S)


@pytest.mark.anyio
async def test_a_lock_call_that_comes_back_late_leaves_the_next_lock_alone(tmp_path: Path) -> None:
    calls = Late("lock of")
    journal = SQLiteJournal(tmp_path / "chats.db", ports=calls.ports)
    journal._answer_wait_s = 0.05
    with pytest.raises(JournalUnavailable, match="cannot be locked"):
        await use(journal, "e1")

    journal._answer_wait_s = ENDED_S
    async with journal:
        calls.let_go()
        with pytest.raises(OwnedElsewhere):
            await use(SQLiteJournal(tmp_path / "chats.db", owner_wait_s=0), "e2")


@pytest.mark.anyio
async def test_a_journal_whose_writer_hangs_is_not_entered_again(tmp_path: Path) -> None:
    """The writer would take the file from the next one of its own process, when it comes back."""
    writers = Late("writer of")
    journal = SQLiteJournal(tmp_path / "chats.db", owner_wait_s=0, ports=writers.ports)
    journal._writer._answer_wait_s = 0.05
    with pytest.raises(JournalUnavailable, match="hangs"):
        await use(journal, "e1")

    with pytest.raises(OwnedElsewhere):
        await use(journal, "e2")
    writers.let_go()


@pytest.mark.anyio
async def test_a_writer_that_comes_back_late_does_not_close_its_journal_entered_again(
    tmp_path: Path,
) -> None:
    """It finds that the file was taken over; that is none of the next one's business."""
    is_hanging = False
    hanging: list[threading.Thread] = []
    hangs, may_go_on = threading.Event(), threading.Event()

    def failpoint(boundary: str) -> None:
        nonlocal is_hanging
        if is_hanging and boundary == "begin":
            is_hanging = False
            hanging.append(threading.current_thread())
            hangs.set()
            assert may_go_on.wait(ENDED_S)

    journal = SQLiteJournal(
        tmp_path / "chats.db", takeover=True, stop_wait_s=0.01, failpoint=failpoint
    )

    async def claim() -> None:
        with pytest.raises(JournalOutcomeUnknown):
            await journal.claim("c")

    async with anyio.create_task_group() as group, journal:
        is_hanging = True
        group.start_soon(claim)
        assert await anyio.to_thread.run_sync(hangs.wait, ENDED_S)

    async with journal:
        may_go_on.set()
        await anyio.to_thread.run_sync(hanging[0].join, ENDED_S)
        await journal.claim("c")
        assert journal.is_lease_valid()


@pytest.mark.usefixtures("_interrupted_by_ctrl_c")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_writer_that_opens_late_keeps_no_lease(backend: str) -> None:
    """An interrupt gives its opening up after it has written its lease, before it renews it."""
    threads = Threads()
    may_go_on = threading.Event()
    late: list[threading.Thread] = []

    def start(name: str, target: Callable[[], None]) -> None:
        if name.startswith("presence of") and not late:
            late.append(threading.current_thread())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert may_go_on.wait(ENDED_S)
        threads.start(name, target)

    async def use_again() -> None:
        async with journal:
            presence = journal._presence
            may_go_on.set()
            await anyio.to_thread.run_sync(late[0].join, ENDED_S)
            assert journal._presence is presence
            await journal.claim("c")

    with postgres.schema() as schema:
        ports = Ports(start_thread=start)
        journal = PostgresJournal(postgres.conninfo(), schema=schema, ports=ports)
        with pytest.raises(KeyboardInterrupt):
            anyio.run(use, journal, "e1", backend="trio")
        anyio.run(use_again, backend=backend)
        assert threads.left() == []


# --- without room for a thread, or a file ---------------------------------------------------------


@pytest.mark.anyio
async def test_whichever_thread_a_journal_does_not_get_nothing_of_it_stays_behind(
    make: Make,
) -> None:
    """The error says that it may be tried again, and it is."""
    for n in count():
        threads = Threads()
        threads.refuse_from = n
        journal = make(threads.ports)
        with suppress(Unavailable):
            async with journal:
                break
        assert threads.left() == []
        await use(make(Ports()), f"other-{n}")

        threads.refuse_from = None
        await use(journal, f"again-{n}")
        assert (await found(make(Ports())))[-2:] == [f"other-{n}", f"again-{n}"]
    assert n > 3, "it has threads to write and to read, and one that watches each"


@pytest.mark.anyio
async def test_a_journal_can_be_left_without_another_thread(make: Make) -> None:
    threads = Threads()
    async with make(threads.ports):
        threads.refuse_from = 0
    assert threads.left() == []

    await use(make(Ports()), "e1")


@pytest.mark.anyio
@pytest.mark.parametrize("lacks", ["a thread", "a file"])
async def test_a_reader_that_cannot_listen_does_so_at_its_next_wait(lacks: str) -> None:
    with postgres.schema() as schema:
        make = partial(PostgresJournal, postgres.conninfo(), schema=schema)
        await use(make(), "e1")
        threads = Threads()
        async with make(read_only=True, ports=threads.ports, poll_s=HOURS_S) as reader:
            with no_room_for(lacks, threads), pytest.raises(Unavailable):
                await reader.wait_for_more("c", after=1)

            async with anyio.create_task_group() as group:
                group.start_soon(partial(reader.wait_for_more, "c", after=1))
                await use(make(), "e2")
        assert threads.left() == []


@contextmanager
def no_room_for(what: str, threads: Threads) -> Iterator[None]:
    """Have the process get no more threads, or no more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if what == "a file":
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    else:
        threads.refuse_from = 0
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        threads.refuse_from = None
