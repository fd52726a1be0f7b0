"""The network between a journal and PostgreSQL fails at every message of the protocol, once.

One run of claims, appends, a fork, a snapshot, a deletion and reads goes through a proxy. Without
faults it counts the messages; then, for each of them and each kind of fault, it runs again. The run
sends whatever failed again, under the same ids, as an application does. After it, a connection
past the proxy looks at what is there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.actors.errors import ConversationNotFound
from turnkeeper.actors.journal import Claim, Snapshot
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.postgres.journal import PostgresJournal
from turnkeeper.actors.journals.postgres.schema import MIGRATION_S
from turnkeeper.runtime import OutcomeUnknown, Ports, Unavailable
from turnkeeper.runtime.testing import VirtualClock

from .. import postgres
from ..drawn import drawn, is_whole
from ..postgres_proxy import Action, Message, Proxy

T = TypeVar("T")
Place: TypeAlias = tuple[str, int]
"""A direction, and which of its messages, over all connections."""

pytestmark = pytest.mark.costly

LEASE_S = 15.0
HANG_S = 120.0
"""No promise: what is still at it then has hung."""
PARTS = 16 if is_whole() else 4
"""Each part of a whole sweep is over long before a test counts as hung."""
SNAPSHOT = Snapshot(2, "v", b"folds")
FAULTS: tuple[Action, ...] = ("cut", "pass and cut", "withhold", "delay", "half-close")


class Fault:
    """A plan that does one thing at one message, and counts all of them."""

    def __init__(self, action: Action = "pass", place: Place | None = None) -> None:
        self.seen: Counter[str] = Counter()
        self.is_struck = False
        self.action = action
        self._place = place
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> Action:
        with self._lock:
            self.seen[message.direction] += 1
            if (message.direction, self.seen[message.direction]) != self._place:
                return "pass"
            self.is_struck = True
            return self.action


class Run:
    """The run, as an application would do it, and what it was told."""

    def __init__(self, schema: str, proxy: Proxy, fault: Fault) -> None:
        self._schema = schema
        self._proxy = proxy
        self._fault = fault
        self._clock = VirtualClock()
        self.acknowledged: dict[str, list[str]] = {}
        self.errors: list[str] = []

    async def run(self) -> None:
        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as group:
                group.start_soon(self._go_on)
                while not await self._is_done():
                    self._clock.jump(0.1)
                group.cancel_scope.cancel()

    async def _is_done(self) -> bool:
        try:
            async with self._journal() as journal:
                await self._converse(journal)
        except (Unavailable, OutcomeUnknown) as error:
            self._note(error)  # it could not be opened
            return False
        return True

    async def _go_on(self) -> None:
        """Let a delay end soon; a silence when every bound has passed and it was given up.

        What was withheld then still arrives, from a client that has left.
        """
        while not self._proxy.holds:
            await anyio.lowlevel.checkpoint()
        if self._fault.action == "withhold":
            before = len(self.errors), self._proxy.connections
            while (len(self.errors), self._proxy.connections) == before:
                # Again and again: a wait may have begun just after the last jump.
                self._clock.jump(LEASE_S + MIGRATION_S)
                await anyio.lowlevel.checkpoint()
        self._proxy.release()

    def _journal(self) -> PostgresJournal:
        return PostgresJournal(
            self._proxy.conninfo,
            schema=self._schema,
            lease_s=LEASE_S,
            tcp_timeout_s=2.0,  # the least: psycopg counts it by its own clock
            ports=Ports(monotonic=self._clock.monotonic),
        )

    async def _converse(self, journal: PostgresJournal) -> None:
        for name in ("a", "b"):
            await self._append(journal, name, 1, "e1", "e2")
        await self._append(journal, "a", 3, "e3")
        epoch = (await self._again(journal, lambda: journal.info("a"))).epoch
        await self._again(journal, lambda: journal.write_snapshot("a", SNAPSHOT, epoch=epoch))
        records = [make_record("f3")]
        await self._again(
            journal, lambda: journal.fork("a", "f", at=2, records=records, is_unfinished=False)
        )
        self.acknowledged["f"] = ["e1", "e2", "f3"]
        await self._delete(journal, "b")
        assert await self._again(journal, lambda: read_all(journal, "f")) == ["e1", "e2", "f3"]

    async def _append(self, journal: PostgresJournal, name: str, at: int, *ids: str) -> None:
        """Claim, append, and after any failure claim and append the same again."""
        records = [make_record(event_id) for event_id in ids]

        async def append() -> None:
            claim: Claim = await journal.claim(name)
            seqs = await journal.append(
                name,
                records,
                epoch=claim.epoch,
                expected_seq=claim.head + 1,
                is_unfinished=False,
            )
            assert list(seqs) == list(range(at, at + len(ids)))

        await self._again(journal, append)
        self.acknowledged.setdefault(name, []).extend(ids)

    async def _delete(self, journal: PostgresJournal, name: str) -> None:
        async def delete() -> None:
            try:
                claim = await journal.claim(name)
                await journal.delete(name, epoch=claim.epoch)
            except ConversationNotFound:
                assert self.errors, "it was there, and no answer about it was lost"

        await self._again(journal, delete)
        self.acknowledged[name] = []

    async def _again(self, journal: PostgresJournal, do: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await do()
            except (Unavailable, OutcomeUnknown) as error:
                self._note(error)
            # The pauses between tries to connect pass, and the lease's thread takes its turn.
            self._clock.jump(0.1)
            if journal._presence is not None:
                journal._presence._call()
            await anyio.lowlevel.checkpoint()

    def _note(self, error: Exception) -> None:
        self.errors.append(f"{type(error).__name__}: {error}")


async def run(fault: Fault) -> Run:
    """Run it with this fault, and look at what it left, past the proxy."""
    with postgres.schema() as schema:
        with Proxy(postgres.conninfo()) as proxy:
            proxy.plan = fault
            one = Run(schema, proxy, fault)
            await one.run()
        async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
            for name, ids in one.acknowledged.items():
                if ids:
                    assert await read_all(journal, name) == ids
                else:
                    with pytest.raises(ConversationNotFound):
                        await read_all(journal, name)
            assert await journal.read_snapshot("a") == SNAPSHOT
    return one


_places: list[Place] = []


async def all_places() -> list[Place]:
    """Count the messages of a run without faults; done once."""
    if not _places:
        plain = Fault()
        assert not (await run(plain)).errors
        for direction, count in sorted(plain.seen.items()):
            _places.extend((direction, number) for number in range(1, count + 1))
    return _places


@pytest.mark.parametrize(
    ("action", "part"), drawn([(action, part) for action in FAULTS for part in range(PARTS)], 10)
)
async def test_a_fault_at_any_message_loses_nothing_and_heals(
    action: Action, part: int, anyio_backend_name: str
) -> None:
    """Every wait ends, every error is typed, and what was acknowledged is there, once."""
    # Half of them on each backend; below the loop they share everything.
    backend = 1 if anyio_backend_name == "trio" else 0
    mine = (await all_places())[2 * part + backend :: 2 * PARTS]
    struck = 0
    for place in drawn(mine, 1):
        fault = Fault(action, place)
        try:
            await run(fault)
        except BaseException as error:
            error.add_note(f"{action} at {place}")
            raise
        struck += fault.is_struck
    assert struck > 0
