"""A standby that was promoted without the newest commits: what it lost is never mixed with more.

The server gives the same answers if the rows are put back as they were, which the tests do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import anyio
import psycopg
import pytest

from turnkeeper.actors import Conversations, PostgresJournal, TurnContext, agent
from turnkeeper.actors.errors import (
    ConversationDeleted,
    Fenced,
    JournalOutcomeUnknown,
    JournalUnavailable,
    LeaseExpired,
)
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.journal import Rejection, Snapshot
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.postgres.presence import Presence
from turnkeeper.runtime import OutcomeUnknown, Ports, Unavailable

from .... import postgres
from ....postgres_proxy import Proxy
from .test_no_answer import append

pytestmark = pytest.mark.costly


@pytest.fixture
def schema() -> Iterator[str]:
    with postgres.schema() as name:
        yield name


@contextmanager
def commits_lost(schema: str) -> Iterator[None]:
    """Undo what is committed meanwhile, for all conversations and their events."""
    with psycopg.connect(
        postgres.conninfo(), autocommit=True, options=f"-c search_path={schema}"
    ) as admin:
        tables = ("event", "conversation")
        for table in tables:
            admin.execute(f"CREATE TEMPORARY TABLE kept_{table} AS TABLE {table}".encode())
        yield
        with admin.transaction():
            for table in tables:
                admin.execute(f"DELETE FROM {table}".encode())
            for table in reversed(tables):
                columns = [
                    row[0]
                    for row in admin.execute(
                        "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass "
                        "AND attnum > 0 AND attgenerated = '' AND NOT attisdropped",
                        (table,),
                    )
                ]
                named = ", ".join(columns)
                admin.execute(
                    f"INSERT INTO {table} ({named}) OVERRIDING SYSTEM VALUE "
                    f"SELECT {named} FROM kept_{table}".encode()
                )


async def test_of_two_owners_with_one_epoch_only_the_one_that_the_database_names_writes(
    schema: str,
) -> None:
    """The log went on with the events of both, and a snapshot of what was lost was believed."""
    async with (
        PostgresJournal(postgres.conninfo(), schema=schema) as first,
        PostgresJournal(postgres.conninfo(), schema=schema) as second,
    ):
        before = await second.claim("c")
        await append(second, before, 1, "e1")
        await second.release("c", epoch=before.epoch)
        with commits_lost(schema):
            lost = await first.claim("c")
            await append(first, lost, 2, "lost")
        found = await second.claim("c")
        assert found == lost
        await append(second, found, 2, "e2")
        snapshot = Snapshot(2, "v", b"of what was lost")

        for refused in (
            append(first, lost, 3, "more"),
            first.reject("c", [Rejection(0.0, "v", "r", b"")], epoch=lost.epoch),
            first.write_snapshot("c", snapshot, epoch=lost.epoch),
            first.delete("c", epoch=lost.epoch),
        ):
            with pytest.raises(Fenced):
                await refused

        assert await append(second, found, 3, "e3") == [3]
        assert await read_all(second, "c") == ["e1", "e2", "e3"]
        assert await second.read_snapshot("c") is None
        assert list(await second.rejections("c")) == []


async def test_a_fork_made_again_does_not_take_over_the_epoch_of_a_rival(schema: str) -> None:
    """A process that forks again after an unknown outcome gets the epoch that the row has."""
    async with (
        PostgresJournal(postgres.conninfo(), schema=schema) as first,
        PostgresJournal(postgres.conninfo(), schema=schema) as second,
    ):
        await append(first, await first.claim("c"), 1, "e1")
        records = [make_record("f1")]
        await first.fork("c", "f", at=1, records=records, is_unfinished=False)
        rival = await second.claim("f", takeover=True)
        again = await first.fork("c", "f", at=1, records=records, is_unfinished=False)

        for journal, event_id in ((first, "of the first"), (second, "of the rival")):
            sent = journal.append(
                "f",
                [make_record(event_id)],
                epoch=again.epoch,
                expected_seq=again.head + 1,
                is_unfinished=False,
            )
            if journal is second:
                assert list(await sent) == [3]
            else:
                with pytest.raises(Fenced):
                    await sent
        assert again.epoch == rival.epoch


@agent
async def echo(turn: TurnContext) -> str:
    return f"You said: {turn.message.content}"


async def test_who_has_seen_what_was_lost_is_told_and_the_owner_goes_on_from_what_is_left(
    schema: str,
) -> None:
    async with (
        Conversations(echo, journal=PostgresJournal(postgres.conninfo(), schema=schema)) as there,
        Conversations(echo, journal=PostgresJournal(postgres.conninfo(), schema=schema)) as here,
    ):
        chat = here["c"]
        await (await chat.send("one")).reply()
        with commits_lost(schema):
            await (await chat.send("lost")).reply()
            head = (await there["c"].at()).view.seq
            seen = there["c"].events(live=True)
            while (await anext(seen)).seq < head:
                pass

        with pytest.raises(ConversationDeleted), anyio.fail_after(60):
            await anext(seen)
        with pytest.raises(Fenced):
            await chat.send("two", message_id="m")
        turn = await chat.send("two", message_id="m")
        assert await turn.reply() == "You said: two"
        log = str([logged.event async for logged in there["c"].events(live=False)])
        assert "You said: one" in log
        assert "You said: two" in log
        assert "lost" not in log


class Told(PostgresJournal):
    """Sets an event when the journal has told of a lost lease."""

    def watch_lease(self, on_loss: Callable[[], None]) -> None:
        self.lost = anyio.Event()

        def tell() -> None:
            on_loss()
            self.lost.set()

        super().watch_lease(tell)


async def test_an_owner_answers_nothing_from_memory_that_its_new_server_does_not_have(
    schema: str,
) -> None:
    """A message that was sent again got the place of one that is in no log any more."""
    with Proxy(postgres.conninfo()) as proxy:
        journal = Told(proxy.conninfo, schema=schema)
        async with Conversations(echo, journal=journal) as conversations:
            chat = conversations["c"]
            await (await chat.send("one")).reply()
            other = await conversations["d"].send("not lost", message_id="d")
            await other.reply()
            with commits_lost(schema):
                lost = await chat.send("two", message_id="m")
                await lost.reply()
                head = (await chat.at()).view.seq

            proxy.cut()
            with anyio.fail_after(60):
                await journal.lost.wait()

            while True:
                with suppress(Unavailable, OutcomeUnknown, LeaseExpired):
                    again = await chat.send("two", message_id="m")
                    break
            assert await again.reply() == "You said: two"
            assert (await chat.at()).view.seq == head
            log = [logged.event async for logged in chat.events(live=False)]
            assert [one.message_id for one in log if isinstance(one, UserMessageEvent)][1:] == ["m"]
            # What it still has is known.
            assert (await conversations["d"].send("not lost", message_id="d")).seq == other.seq


@pytest.mark.parametrize(
    ("newest", "is_lost"),
    [
        ("append", True),
        ("claim", True),
        ("append", False),
        ("release", False),
        ("rival", False),
        ("deletion", False),
    ],
)
async def test_a_writer_that_connects_again_looks_for_the_newest_commit_of_its_process(
    schema: str, monkeypatch: pytest.MonkeyPatch, newest: str, is_lost: bool
) -> None:
    """Before it writes more: that would be there, and would hide the loss."""
    monkeypatch.setattr(Presence, "_serve", lambda presence, _: presence._wait_for_call(60.0))
    with Proxy(postgres.conninfo()) as proxy:
        journal = Told(proxy.conninfo, schema=schema, lease_s=600.0)
        async with journal, PostgresJournal(postgres.conninfo(), schema=schema) as rival:
            journal.watch_lease(lambda: None)
            since = Ports().monotonic()
            other = await journal.claim("d")
            claim = await journal.claim("c")
            await append(journal, claim, 1, "e1")
            with commits_lost(schema) if is_lost else nullcontext():
                if newest == "claim":
                    await journal.claim("c")
                else:
                    await append(journal, claim, 2, "e2")
            if newest == "deletion":
                await journal.delete("c", epoch=claim.epoch)
            elif newest in {"release", "rival"}:
                await journal.release("c", epoch=claim.epoch)
            if newest == "rival":
                await append(rival, await rival.claim("c"), 3, "e3")

            proxy.cut()
            while True:
                with suppress(JournalOutcomeUnknown, JournalUnavailable):
                    sent = journal.append(
                        "d",
                        [make_record("of d")],
                        epoch=other.epoch,
                        expected_seq=1,
                        is_unfinished=False,
                    )
                    assert list(await sent) == [1]
                    break

            assert journal.is_lease_valid(since=since) is not is_lost
            assert journal.is_lease_valid(since=Ports().monotonic())
            if is_lost:
                await journal.lost.wait()
