"""The thread that renews the lease: what breaks a lease, what the thread survives and tells."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import psycopg
import pytest

from turnkeeper.actors.errors import JournalUnavailable
from turnkeeper.actors.journals.postgres.connections import BoundedConnection, connect
from turnkeeper.actors.journals.postgres.presence import (
    CHANNEL,
    MARKS_MAX,
    Presence,
    marks_of,
    payload_of,
    told_every_s,
)
from turnkeeper.actors.journals.postgres.schema import bring_up_to_date
from turnkeeper.actors.journals.shared.log_watch import mark_of
from turnkeeper.runtime import Ports
from turnkeeper.runtime.testing import VirtualClock

from .... import postgres

LEASE_S = 10.0
Connect: TypeAlias = Callable[[], BoundedConnection]


def answering() -> Any:  # noqa: ANN401 - it stands for a connection
    """Return a connection on which every renewal finds its row."""
    return SimpleNamespace(execute=lambda *_: SimpleNamespace(fetchone=lambda: (True,)))


class World:
    """A presence, the clock that it looks at, and what it has told."""

    def __init__(self, connect: Connect) -> None:
        self.clock = VirtualClock()
        self.ended = threading.Event()
        self.told: list[str] = []
        self.told_more = threading.Condition()
        self.presence = Presence(
            connect,
            node=1,
            address="here",
            lease_s=LEASE_S,
            ports=Ports(monotonic=self.clock.monotonic),
            on_notify=lambda _: None,
            on_lease_loss=lambda: self._tell("lost"),
            on_demoted=lambda: self._tell("demoted"),
            on_ended=self.ended.set,
        )

    def _tell(self, what: str) -> None:
        with self.told_more:
            self.told.append(what)
            self.told_more.notify_all()

    def wait_until_lost(self, times: int) -> None:
        """A jump of the clock in the middle of a renewal makes one more of it."""
        with self.told_more:
            assert self.told_more.wait_for(lambda: self.told.count("lost") >= times, timeout=60)

    def is_valid_again(self) -> None:
        """Wait for a renewal."""
        while not self.presence.is_lease_valid():
            self.presence._call()

    def stop(self) -> None:
        self.presence.stop()
        assert self.ended.wait(60)


@pytest.fixture
def schema() -> Iterator[str]:
    with postgres.schema() as name:
        yield name


@pytest.fixture
def really(schema: str) -> Connect:
    """Connect to a database that has the tables."""

    def make() -> BoundedConnection:
        return connect(
            postgres.conninfo(),
            schema,
            is_read_only=False,
            tcp_timeout_s=10.0,
            answer_s=60.0,
            ports=Ports(),
        )

    with make() as connection:
        bring_up_to_date(connection, schema, allow=lambda _: None)
    return make


def test_a_lease_that_ran_out_by_the_databases_clock_is_broken(really: Connect) -> None:
    """A rival may have taken over, as soon as that clock was set ahead: owners here kept on."""
    world = World(really)
    with really() as connection:
        world.presence.register(connection)
        claimed_at = world.clock.monotonic()
        assert world.presence._renew(connection)
        connection.execute("UPDATE node SET lease_until = clock_timestamp() - interval '1 hour'")

        assert not world.presence._renew(connection)
        assert not world.presence.is_lease_valid(since=claimed_at)
        assert world.presence.is_lease_valid()
        assert world.presence._renew(connection)


def test_a_lease_that_ran_out_does_not_bring_back_what_was_claimed_under_it() -> None:
    """The heartbeat renewed the lease before any owner had looked at it."""
    world = World(lambda: pytest.fail("not connected to anything"))
    presence, clock = world.presence, world.clock
    connection = answering()
    presence.register(connection)
    claimed_at = clock.monotonic()
    assert presence.is_lease_valid(since=claimed_at)

    clock.jump(5.0)
    presence._renew(connection)
    clock.jump(5.0)
    assert presence.is_lease_valid(since=claimed_at)

    clock.jump(60.0)
    presence._renew(connection)
    assert presence.is_lease_valid()
    assert not presence.is_lease_valid(since=claimed_at)
    # A claim that began at this reading of the clock may have been granted before the renewal, and
    # to a rival after it: seed 1770885221.
    assert not presence.is_lease_valid(since=clock.monotonic())
    clock.jump(0.001)
    assert presence.is_lease_valid(since=clock.monotonic())


def test_a_lease_that_ran_out_while_the_process_stood_still_is_told_of_and_renewed(
    really: Connect,
) -> None:
    world = World(really)
    world.presence.start()
    world.is_valid_again()
    world.wait_until_lost(1)  # there was none before the first renewal
    claimed_at = world.clock.monotonic()

    world.clock.jump(LEASE_S)
    assert not world.presence.is_lease_valid()
    world.is_valid_again()

    world.wait_until_lost(2)
    assert not world.presence.is_lease_valid(since=claimed_at)
    world.stop()


@pytest.mark.parametrize(
    "error",
    [
        psycopg.OperationalError("no route"),
        OSError(24, "Too many open files"),
        ValueError("filedescriptor out of range in select()"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_error_ends_the_lease_for_good(really: Connect, error: Exception) -> None:
    is_broken = threading.Event()
    tried = threading.Semaphore(0)

    def make() -> BoundedConnection:
        if is_broken.is_set():
            tried.release()
            raise error
        connection = really()
        made.append(connection)
        return connection

    made: list[BoundedConnection] = []
    world = World(make)
    world.presence.start()
    world.is_valid_again()
    is_broken.set()
    made[0].pgconn.finish()
    world.presence._call()
    for _ in range(3):
        assert tried.acquire(timeout=60)
        world.presence._call()
    assert repr(world.presence.failure) == repr(error)

    world.clock.jump(LEASE_S)
    with pytest.raises(JournalUnavailable, match=r"has run out.*try again") as caught:
        world.presence.check()
    assert caught.value.__cause__ is error
    is_broken.clear()
    world.is_valid_again()

    world.presence.check()
    assert world.presence.failure is None
    world.stop()


def test_a_thread_that_ends_all_the_same_ends_the_lease_and_every_caller_hears_why() -> None:
    class Killed(BaseException):
        pass

    def make() -> BoundedConnection:
        raise Killed("by something")

    world = World(make)
    connection = answering()
    world.presence.register(connection)
    world.presence.start()
    assert world.ended.wait(60)

    assert world.told == ["lost"]
    assert isinstance(world.presence.failure, Killed)
    with pytest.raises(JournalUnavailable, match=r"Killed.*enter it again"):
        world.presence.check()


def test_a_server_that_takes_no_writes_any_more_is_left_and_told_of(really: Connect) -> None:
    made: list[BoundedConnection] = []

    def make() -> BoundedConnection:
        connection = really()
        if not made:
            connection.execute("SET default_transaction_read_only = on")
        made.append(connection)
        return connection

    world = World(make)
    world.presence.start()
    world.is_valid_again()

    assert len(made) == 2
    assert made[0].closed
    assert "demoted" in world.told
    world.stop()


def test_the_lease_is_renewed_in_a_process_with_more_than_1023_open_files(really: Connect) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2_048
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    try:
        with ExitStack() as opened:
            while opened.enter_context(Path(os.devnull).open("rb")).fileno() <= 1_023:
                pass
            world = World(really)
            world.presence.start()
            for _ in range(3):
                world.is_valid_again()
                world.clock.jump(LEASE_S)
            world.is_valid_again()
            assert world.presence.failure is None
            world.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- notifications --------------------------------------------------------------------------------


def test_a_notification_names_marks_and_one_without_stands_for_all() -> None:
    marks = {0, 7, (1 << 32) - 1}
    assert marks_of(payload_of(marks)) == marks
    most = payload_of(range(MARKS_MAX))
    assert len(most) < 8_000  # PostgreSQL's limit
    assert marks_of(most) == set(range(MARKS_MAX))
    assert payload_of(range(MARKS_MAX + 1)) == ""
    # Of an older version, and of one to come.
    assert marks_of("") is None
    assert marks_of("v2:abc") is None


def heard_by(connection: psycopg.Connection[Any], *, until: str) -> list[set[int]]:
    """Return the marks of each notification, up to the one that names this conversation."""
    found: list[set[int]] = []
    for notice in connection.notifies(timeout=60):
        found.append(set(marks_of(notice.payload) or ()))
        if mark_of(until) in found[-1]:
            return found
    raise AssertionError(f"no notification of {until}: {found}")


def test_what_is_committed_between_two_notifications_is_told_in_one(really: Connect) -> None:
    world = World(really)
    presence = world.presence
    with psycopg.connect(postgres.conninfo(), autocommit=True) as other:
        other.execute(f"LISTEN {CHANNEL}")
        presence.start()
        presence.tell(["a"], 1)
        assert heard_by(other, until="a")[-1] == {mark_of("a")}

        presence.tell(["b", "c"], 1)  # the clock stands: it is too early for a second one
        presence.tell(["c", "d"], 1)
        world.clock.jump(told_every_s(1))
        assert heard_by(other, until="b") == [{mark_of(name) for name in ("b", "c", "d")}]
    world.stop()


def test_what_could_not_be_told_is_told_on_the_next_connection(really: Connect) -> None:
    made: list[BoundedConnection] = []

    def make() -> BoundedConnection:
        made.append(really())
        return made[-1]

    world = World(make)
    with psycopg.connect(postgres.conninfo(), autocommit=True) as other:
        other.execute(f"LISTEN {CHANNEL}")
        world.presence.start()
        world.is_valid_again()
        made[0].pgconn.finish()
        world.presence.tell(["a"], 1)
        assert {mark_of("a")} in heard_by(other, until="a")
        assert len(made) > 1
    world.stop()


def test_what_is_told_last_is_sent_before_the_lease_is_given_back(really: Connect) -> None:
    world = World(really)
    with psycopg.connect(postgres.conninfo(), autocommit=True) as other:
        other.execute(f"LISTEN {CHANNEL}")
        world.presence.start()
        world.presence.tell(["a"], 1)
        heard_by(other, until="a")
        world.presence.tell(["b"], 1)  # too early, and then there is no later
        world.stop()
        assert heard_by(other, until="b") == [{mark_of("b")}]


def test_however_many_processes_there_are_each_hears_a_thousand_notifications_a_second() -> None:
    for processes in (2, 3, 10, 100, 1_000):
        others = processes - 1
        assert others / told_every_s(others) <= 1_000
    assert told_every_s(1) == told_every_s(3)  # few are not slowed down
