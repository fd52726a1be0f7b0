"""A database that does not answer, or answers as a standby: every wait ends, typed, and heals.

The clock of the journal is virtual, so a lease's length passes when a test says so.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import psycopg
import pytest

from turnkeeper.actors.errors import JournalOutcomeUnknown, JournalUnavailable
from turnkeeper.actors.journal import Claim
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.postgres.journal import PostgresJournal
from turnkeeper.actors.journals.postgres.schema import bring_up_to_date
from turnkeeper.runtime import Ports
from turnkeeper.runtime.testing import VirtualClock

from .... import postgres
from ....postgres_proxy import Action, Message, Proxy

pytestmark = pytest.mark.costly
LEASE_S = 15.0


class World:
    """A journal behind a proxy, with a clock of its own."""

    def __init__(self, proxy: Proxy, schema: str) -> None:
        self.proxy = proxy
        self.schema = schema
        self.clock = VirtualClock()

    def journal(self, *, conninfo: str | None = None, **options: Any) -> PostgresJournal:  # noqa: ANN401 - passed on
        return PostgresJournal(
            conninfo or self.proxy.conninfo,
            schema=self.schema,
            lease_s=LEASE_S,
            ports=Ports(monotonic=self.clock.monotonic),
            **options,
        )

    def hold_next(self, matches: Callable[[Message], bool]) -> None:
        """Withhold the next message that matches, and all behind it on its connection."""
        lock = threading.Lock()
        left = 1

        def plan(message: Message) -> Action:
            nonlocal left
            with lock:
                if left and matches(message):
                    left -= 1
                    return "withhold"
            return "pass"

        self.proxy.plan = plan

    async def until_held(self) -> None:
        await anyio.to_thread.run_sync(self.proxy.wait_until_held)


@pytest.fixture
def world() -> Iterator[World]:
    with postgres.schema() as schema, Proxy(postgres.conninfo()) as proxy:
        yield World(proxy, schema)


async def append(journal: PostgresJournal, claim: Claim, at: int, event_id: str) -> list[int]:
    return list(
        await journal.append(
            "c",
            [make_record(event_id)],
            epoch=claim.epoch,
            expected_seq=at,
            is_unfinished=False,
        )
    )


async def renewed(journal: PostgresJournal) -> None:
    """Wait until the lease is valid again."""
    presence = journal._presence
    assert presence is not None
    while not presence.is_lease_valid():
        presence._call()
        await anyio.lowlevel.checkpoint()


async def outcome(call: Awaitable[object]) -> object:
    try:
        return await call
    except Exception as error:  # noqa: BLE001 - it is what is asked for
        return error


@pytest.mark.parametrize("direction", ["there", "back"])
async def test_an_append_without_an_answer_is_unknown_after_a_lease_and_can_be_sent_again(
    world: World, direction: str
) -> None:
    found: list[object] = []
    async with world.journal() as journal:
        claim = await journal.claim("c")
        world.hold_next(lambda message: (message.connection, message.direction) == (1, direction))

        async def send() -> None:
            found.append(await outcome(append(journal, claim, 1, "e1")))

        async with anyio.create_task_group() as group:
            group.start_soon(send)
            await world.until_held()
            world.clock.jump(LEASE_S)

        assert isinstance(found[0], JournalOutcomeUnknown)
        await renewed(journal)
        world.proxy.release()
        claim = await journal.claim("c")
        assert await append(journal, claim, claim.head + 1, "e1") == [1]
        assert await read_all(journal, "c") == ["e1"]


async def test_sends_are_refused_at_once_while_the_lease_is_out(world: World) -> None:
    """Also behind a statement that the database does not answer."""
    found: list[object] = []
    async with world.journal() as journal:
        claim = await journal.claim("c")
        world.hold_next(lambda message: (message.connection, message.direction) == (1, "there"))
        presence = journal._presence
        assert presence is not None

        async def send() -> None:
            found.append(await outcome(append(journal, claim, 1, "e1")))

        async with anyio.create_task_group() as group:
            presence._connect = lambda: _raise(psycopg.OperationalError("no route"))
            group.start_soon(send)
            await world.until_held()
            world.clock.jump(LEASE_S * 0.9)  # the lease is out, and the job not yet as old

            with pytest.raises(JournalUnavailable, match="nothing was written"):
                await append(journal, claim, 1, "e2")
            with pytest.raises(JournalUnavailable, match="nothing was written"):
                await journal.claim("d")
            assert not found
            world.clock.jump(LEASE_S)

        assert isinstance(found[0], JournalOutcomeUnknown)
        world.proxy.release()


def _raise(error: Exception) -> Any:  # noqa: ANN401 - it returns nothing
    raise error


async def test_what_waited_behind_a_silent_statement_is_refused_and_was_not_sent(
    world: World,
) -> None:
    found: dict[str, object] = {}
    async with world.journal() as journal:
        claim = await journal.claim("c")
        world.hold_next(lambda message: (message.connection, message.direction) == (1, "there"))

        async def send(event_id: str, at: int) -> None:
            found[event_id] = await outcome(append(journal, claim, at, event_id))

        async with anyio.create_task_group() as group:
            group.start_soon(send, "e1", 1)
            await world.until_held()
            group.start_soon(send, "e2", 2)
            while journal._writer._queued_items < 2:
                await anyio.lowlevel.checkpoint()
            presence = journal._presence
            assert presence is not None
            presence._connect = lambda: _raise(psycopg.OperationalError("no route"))
            world.proxy.cut()
            world.clock.jump(LEASE_S)

        assert isinstance(found["e1"], JournalOutcomeUnknown)
        assert isinstance(found["e2"], JournalUnavailable)


async def test_a_read_without_an_answer_is_unavailable_after_a_lease(world: World) -> None:
    async with world.journal() as journal:
        claim = await journal.claim("c")
        await append(journal, claim, 1, "e1")
        await read_all(journal, "c")
        reading = world.proxy.connections  # the last that was made
        world.hold_next(
            lambda message: (message.connection, message.direction) == (reading, "back")
        )

        async with anyio.create_task_group() as group:

            async def jump() -> None:
                await world.until_held()
                world.clock.jump(LEASE_S)

            group.start_soon(jump)
            with pytest.raises(JournalUnavailable, match="not answered"):
                await read_all(journal, "c")

        world.proxy.release()
        assert await read_all(journal, "c") == ["e1"]


async def test_a_renewal_without_an_answer_is_sent_again_before_the_lease_is_out(
    world: World,
) -> None:
    async with world.journal() as journal:
        claim = await journal.claim("c")
        claimed_at = world.clock.monotonic()
        presence, reading = journal._presence, journal._reading
        assert presence is not None
        assert reading is not None
        world.clock.jump(1.0)
        while presence._asked_at <= claimed_at:  # it is connected
            presence._call()
            await anyio.lowlevel.checkpoint()
        asked_at = presence._asked_at
        others = {1, world.proxy.number_of(reading._connection.fileno())}
        world.hold_next(lambda message: message.connection not in others)
        presence._call()
        await world.until_held()

        # Its third of the lease passes, and the next one is another connection's.
        world.clock.jump(LEASE_S / 3)
        while presence._asked_at <= asked_at:
            await anyio.lowlevel.checkpoint()

        assert world.proxy.connections > 3
        assert journal.is_lease_valid(since=claimed_at)
        world.proxy.release()
        assert await append(journal, claim, 1, "e1") == [1]


async def test_every_connection_has_bounds_in_the_kernel_and_in_the_server(world: World) -> None:
    given = f"{postgres.conninfo()}&options=-csynchronous_commit%3Dlocal&keepalives_idle=7"
    given += "&target_session_attrs=any"
    shown: dict[str, object] = {}

    async with world.journal(conninfo=given, tcp_timeout_s=4.0) as journal:

        def show(connection: psycopg.Connection[Any]) -> None:
            shown.update(connection.info.get_parameters())
            for name in ("statement_timeout", "lock_timeout", "synchronous_commit"):
                row = connection.execute(f"SHOW {name}".encode()).fetchone()
                assert row is not None
                shown[name] = row[0]

        await journal._change(lambda writer: show(writer.connection))

    wanted = {
        "keepalives": "1",
        "keepalives_idle": "7",  # as given
        "keepalives_interval": "1",
        "keepalives_count": "3",
        "tcp_user_timeout": "4000",
        "connect_timeout": "4",
        # Not as given: a standby that lags would be taken for a server that has lost commits.
        "target_session_attrs": "read-write",
        "statement_timeout": "12s",  # before the client gives up, so that it can say so
        "lock_timeout": "5s",
        "synchronous_commit": "local",  # as given
    }
    assert {name: shown.get(name) for name in wanted} == wanted
    # Over a socket of the file system the server shows none of these.
    for option in ("keepalives_idle=5", "keepalives_interval=1", "keepalives_count=3"):
        assert f"-c tcp_{option}" in str(shown["options"])
    assert "-c tcp_user_timeout=4000" in str(shown["options"])


async def test_a_statement_that_the_server_works_on_too_long_is_given_up_and_writes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnkeeper.actors.journals.postgres.connections._SERVER_SHARE", 0.01)
    async with world.journal() as journal:
        with pytest.raises(JournalUnavailable, match="statement timeout"):
            await journal._change(lambda writer: writer.connection.execute("SELECT pg_sleep(60)"))
        assert (await journal.claim("c")).epoch == 1


# --- standbys -------------------------------------------------------------------------------------


async def test_a_primary_that_was_demoted_is_unavailable_and_left_for_another_connection(
    world: World,
) -> None:
    """A pooler or a service can keep the connection of a primary that has become a standby."""
    async with world.journal() as journal:
        claim = await journal.claim("c")
        reading = journal._reading
        assert reading is not None
        was_read_from = reading._connection
        await journal._change(
            lambda writer: writer.connection.execute("SET default_transaction_read_only = on")
        )

        with pytest.raises(JournalUnavailable, match="nothing was written"):
            await append(journal, claim, 1, "e1")
        assert await append(journal, claim, 1, "e1") == [1]
        # The reader too: its reads would have gone on to succeed, on the old server.
        assert await read_all(journal, "c") == ["e1"]
        assert was_read_from.closed


async def test_a_database_that_takes_no_writes_is_unavailable_when_it_is_opened(
    world: World,
) -> None:
    with psycopg.connect(postgres.conninfo(), autocommit=True) as admin:
        admin.execute("DROP ROLE IF EXISTS standby_reader")
        admin.execute("CREATE ROLE standby_reader SUPERUSER LOGIN")
        admin.execute("ALTER ROLE standby_reader SET default_transaction_read_only = on")
    conninfo = psycopg.conninfo.make_conninfo(postgres.conninfo(), user="standby_reader")
    try:
        with pytest.raises(JournalUnavailable, match="nothing was changed"):
            async with world.journal(conninfo=conninfo):
                raise AssertionError("entered")
        async with world.journal() as owner:
            await append(owner, await owner.claim("c"), 1, "e1")
        async with world.journal(conninfo=conninfo, read_only=True) as reader:
            assert await read_all(reader, "c") == ["e1"]
    finally:
        with psycopg.connect(postgres.conninfo(), autocommit=True) as admin:
            admin.execute("DROP ROLE standby_reader")


def test_a_migration_whose_commit_is_not_answered_is_not_said_to_have_changed_nothing(
    world: World,
) -> None:
    sent: list[str] = []

    def plan(message: Message) -> Action:
        if message.direction == "there":
            sent.append(message.kind)
            # The version goes in with parameters, after scripts that have none; then comes COMMIT.
            if is_migrating and message.kind == "Q" and "P" in sent:
                return "pass and cut"
        return "pass"

    is_migrating = False

    def allow(_: float) -> None:
        nonlocal is_migrating
        is_migrating = True
        sent.clear()

    world.proxy.plan = plan
    with psycopg.connect(world.proxy.conninfo, autocommit=True) as connection:
        connection.execute(f"SET search_path = {world.schema}".encode())
        with pytest.raises(JournalUnavailable, match="may be migrated to version"):
            bring_up_to_date(connection, world.schema, allow=allow)
