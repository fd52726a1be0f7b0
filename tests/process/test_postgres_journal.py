"""An owner that is stopped past its lease, taken over, and woken up; one that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from turnkeeper.actors import Journal, PostgresJournal
from turnkeeper.actors.errors import OwnedElsewhere
from turnkeeper.actors.journal import Claim
from turnkeeper.actors.journals.contract import make_record, read_all

from .. import postgres
from .test_following import LEASE_S
from .test_sqlite_journal import OWNER, wait_until_stopped

pytestmark = pytest.mark.costly


@pytest.fixture
def schema() -> Iterator[str]:
    with postgres.schema() as name:
        yield name


@contextmanager
def owner(schema: str, where: str, nth: int, how: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(OWNER), f"postgres {schema} {LEASE_S}", "trio", where, str(nth), how],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TURNKEEPER_TEST_POSTGRES": postgres.conninfo()},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def claim_when_free(journal: Journal, name: str) -> Claim:
    """Claim as soon as the lease of the owner before has run out."""
    while True:
        try:
            return await journal.claim(name)
        except OwnedElsewhere:
            pass  # each try asks the server, whose clock decides


async def test_a_stopped_owner_is_taken_over_when_its_lease_is_out_and_writes_nothing_after(
    schema: str,
) -> None:
    """It is stopped before a statement, so the first thing it does awake is send an old epoch."""
    with owner(schema, "begin", 8, "stop") as process:
        await wait_until_stopped(process)

        async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
            claims: dict[str, Claim] = {}
            for name in ("a", "b", "c"):
                claims[name] = await claim_when_free(journal, name)
            before = {name: await read_all(journal, name) for name in claims}
            process.send_signal(signal.SIGCONT)
            assert process.stdout is not None
            lines = (await anyio.to_thread.run_sync(process.stdout.read)).splitlines()
            for name, claim in claims.items():
                await journal.append(
                    name,
                    [make_record("new")],
                    epoch=claim.epoch,
                    expected_seq=claim.head + 1,
                    is_unfinished=False,
                )

            assert sorted(line for line in lines if line.startswith("lost")) == [
                "lost a",
                "lost b",
                "lost c",
            ]
            for name, ids in before.items():
                assert await read_all(journal, name) == [*ids, "new"]
                epochs = [record.epoch for record in await journal.read(name)]
                assert epochs == sorted(epochs)


async def test_acknowledged_appends_of_a_killed_owner_are_there_and_the_rest_is_whole(
    schema: str,
) -> None:
    kept: dict[str, list[str]] = {}
    for where, nth in (("begin", 7), ("committed", 9)):
        with owner(schema, where, nth, "kill") as process:
            assert process.stdout is not None
            for line in (await anyio.to_thread.run_sync(process.stdout.read)).splitlines():
                word, name, *rest = line.split()
                if word == "kept":
                    kept.setdefault(name, []).append(rest[1])
        async with PostgresJournal(postgres.conninfo(), schema=schema) as journal:
            for name in ("a", "b", "c"):
                await claim_when_free(journal, name)  # the next one does not have to wait
            for name, ids in kept.items():
                found = await read_all(journal, name)
                assert [event_id for event_id in found if event_id in ids] == ids
                assert len(found) == len(set(found)) <= len(ids) + 2
    assert kept
