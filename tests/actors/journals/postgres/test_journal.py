"""The PostgreSQL journal's promises beyond the port: leases, one statement, reconnecting."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import anyio
import anyio.lowlevel
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from turnkeeper.actors import PostgresJournal
from turnkeeper.actors.cli._error_lines import error_line
from turnkeeper.actors.errors import (
    ConversationExists,
    ConversationNotFound,
    CorruptLog,
    Fenced,
    InvalidInput,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
    OwnedElsewhere,
)
from turnkeeper.actors.journal import (
    Claim,
    Listing,
    ListQuery,
    Record,
    Rejection,
    Snapshot,
    StoredRecord,
)
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.files import verify_logs
from turnkeeper.actors.journals.postgres import reader as reader_module
from turnkeeper.actors.journals.postgres import schema as schema_module
from turnkeeper.actors.journals.postgres.connections import BoundedConnection, Numbers, connect
from turnkeeper.actors.journals.postgres.log import empty_tail, read_records
from turnkeeper.actors.journals.postgres.presence import CHANNEL, payload_of
from turnkeeper.actors.journals.postgres.schema import SCHEMA_VERSION
from turnkeeper.actors.journals.postgres.writer import _RELEASE, PostgresWriter, _Statement
from turnkeeper.actors.journals.shared.append_rules import Append
from turnkeeper.actors.journals.shared.log_watch import mark_of
from turnkeeper.runtime import Ports

from .... import postgres
from ..sqlite.test_journal import Fault, Gate

pytestmark = pytest.mark.costly


@pytest.fixture
def schema() -> Iterator[str]:
    with postgres.schema() as name:
        yield name


def make_journal(schema: str, **options: Any) -> PostgresJournal:  # noqa: ANN401 - passed on
    return PostgresJournal(postgres.conninfo(), schema=schema, **options)


def change(schema: str, statement: str) -> None:
    """Change the database as another program would."""
    with psycopg.connect(
        postgres.conninfo(), autocommit=True, options=f"-c search_path={schema}"
    ) as connection:
        connection.execute(statement.encode())


async def append(
    journal: PostgresJournal, name: str, claim: Claim, at: int, *ids: str
) -> list[int]:
    return list(
        await journal.append(
            name,
            [make_record(event_id) for event_id in ids],
            epoch=claim.epoch,
            expected_seq=at,
            is_unfinished=False,
        )
    )


# --- one statement --------------------------------------------------------------------------------


async def test_payloads_are_stored_as_they_are_in_one_statement(schema: str) -> None:
    """Their array has its own encoding, in which each payload has its length before it."""
    payloads = [b"", b"{}", b'"\\,{}"', bytes(range(256)) * 5, "ä€".encode() * 40_000]
    records = [Record(f"e{n}", "note", payload) for n, payload in enumerate(payloads)]
    async with make_journal(schema) as journal:
        claim = await journal.claim("c")
        await journal.append("c", records, epoch=claim.epoch, expected_seq=1, is_unfinished=False)

        assert [stored.payload for stored in await journal.read("c")] == payloads


async def test_the_tail_that_is_dropped_is_the_least_recently_used(schema: str) -> None:
    async with make_journal(schema, active_conversations_max=2) as journal:
        claims = {name: await journal.claim(name) for name in ("busy", "quiet")}
        await append(journal, "busy", claims["busy"], 1, "e1")

        await journal.claim("another")

        assert await journal._change(lambda writer: list(writer._tails)) == ["busy", "another"]


@pytest.mark.parametrize(
    "ids",
    [
        ("plain", "NULL", "{}", "a,b"),
        ("plain", '","', "more"),
        ("back\\slash",),
        ('"', "\\"),
    ],
)
async def test_ids_are_stored_as_they_are_whatever_an_array_means_by_their_letters(
    schema: str, ids: Sequence[str]
) -> None:
    async with make_journal(schema) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, *ids)

        assert await read_all(journal, "c") == list(ids)


async def test_appends_that_wait_together_are_written_in_one_statement(schema: str) -> None:
    gate = Gate("begin")
    names = [f"c{number}" for number in range(50)]
    async with make_journal(schema, failpoint=gate) as journal:
        claims = {name: await journal.claim(name) for name in names}
        gate.close()
        gate.passed.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(append, journal, "c0", claims["c0"], 1, "first")
            await gate.reached()
            for name in names[1:]:
                group.start_soon(append, journal, name, claims[name], 1, "e1", "e2")
            while journal._writer._queued_items < 1 + 2 * len(names[1:]):
                await anyio.lowlevel.checkpoint()
            gate.open()

        assert gate.passed.count("committed") == 2
        for name in names[1:]:
            assert await read_all(journal, name) == ["e1", "e2"]


async def test_releases_that_wait_together_are_one_statement_and_each_counts_alone(
    schema: str,
) -> None:
    """A process that left took two milliseconds for each conversation, past its grace."""
    gate = Gate("begin")
    names = [f"c{number}" for number in range(50)]
    kept, moved, text = "of a lower epoch", "claimed since", "no such\0text"
    huge = "of an epoch of 5,000 digits"
    async with (
        make_journal(schema, failpoint=gate) as journal,
        make_journal(schema) as other,
    ):
        claims = {name: await journal.claim(name) for name in (*names, kept, huge, moved)}
        await journal.release(moved, epoch=claims[moved].epoch)
        await other.claim(moved)
        epochs = {name: claim.epoch for name, claim in claims.items()}
        epochs |= {kept: 1 << 70, huge: 10**5_000, text: 1}
        gate.close()
        gate.passed.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(partial(journal.release, names[0], epoch=epochs.pop(names[0])))
            await gate.reached()
            for name, epoch in epochs.items():
                group.start_soon(partial(journal.release, name, epoch=epoch))
            while journal._writer._queued_items < 1 + len(epochs):
                await anyio.lowlevel.checkpoint()
            gate.open()

        assert gate.passed.count("committed") == 2
        for name in names:
            assert (await other.claim(name)).epoch == claims[name].epoch + 1
        for name in (kept, huge):
            with pytest.raises(OwnedElsewhere):
                await other.claim(name)
        with pytest.raises(OwnedElsewhere):
            await journal.claim(moved)


async def test_releases_lock_in_the_order_of_claims_whatever_language_the_database_has(
    schema: str,
) -> None:
    """Under `en_US`, "a" sorts before "B": releases and takeovers ended in deadlocks."""
    async with make_journal(schema):
        pass
    with psycopg.connect(postgres.conninfo(), options=f"-c search_path={schema}") as connection:
        values = {"names": ["B", "a"], "epochs": [1, 1], "node": 1}
        plan = connection.execute(b"EXPLAIN " + _RELEASE, values).fetchall()

    (order,) = [line.strip() for (line,) in plan if "Sort Key" in line]
    assert order.endswith('COLLATE "C"')


async def test_a_log_that_is_deleted_between_the_statements_of_a_read_is_not_taken_for_damaged(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most reads have no transaction: it costs two more round trips."""
    deletions = 0

    def deleted(*arguments: Any) -> list[StoredRecord]:  # noqa: ANN401 - passed on
        nonlocal deletions
        deletions += 1
        change(schema, "UPDATE conversation SET incarnation = 1, head = 0, forked_at = 0")
        change(schema, "DELETE FROM event")
        return read_records(*arguments)

    async with make_journal(schema) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1", "e2")
        monkeypatch.setattr(reader_module, "read_records", deleted)
        with pytest.raises(ConversationNotFound):
            await journal.read("c")
    assert deletions == 1


async def test_the_writer_wakes_the_callers_of_a_group_once_the_next_one_was_sent(
    schema: str,
) -> None:
    """Between the two groups the loop would keep the writer's thread from sending, by its lock."""
    gate = Gate("begin")
    unwoken: list[tuple[str, int]] = []
    names = [f"c{number}" for number in range(9)]

    def note(boundary: str) -> None:
        unwoken.append((boundary, len(journal._writer._unwoken)))
        gate(boundary)

    journal = make_journal(schema, failpoint=note, group_events_max=8)
    async with journal:
        claims = {name: await journal.claim(name) for name in names}
        gate.close()
        unwoken.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(append, journal, "c0", claims["c0"], 1, "e1")
            await gate.reached()
            for name in names[1:]:
                group.start_soon(append, journal, name, claims[name], 1, "e1")
            while journal._writer._queued_items < len(names):
                await anyio.lowlevel.checkpoint()
            gate.open()

    assert unwoken == [("begin", 0), ("committed", 0), ("begin", 1), ("committed", 0)]


def test_who_waits_is_told_before_a_connection_is_made(tmp_path: Path) -> None:
    """The callers of the group before would else wait for it, too."""
    waits: list[str] = []
    with pytest.raises(psycopg.OperationalError):
        connect(
            f"host={tmp_path}",
            "turnkeeper",
            is_read_only=False,
            tcp_timeout_s=2.0,
            answer_s=2.0,
            ports=Ports(),
            before_wait=lambda: waits.append("before"),
        )
    assert waits == ["before"]


async def test_a_socket_of_this_machine_takes_more_than_the_usual_at_once(schema: str) -> None:
    def size(one: socket.socket) -> int:
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    async with make_journal(schema) as journal:
        connection = await journal._change(lambda writer: writer.connection)
        if not connection.info.host.startswith("/"):
            pytest.skip("the server is reached over TCP, whose buffers grow by themselves")
        usual, other = socket.socketpair(socket.AF_UNIX)
        with (
            usual,
            other,
            socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as its,
        ):
            assert size(its) > size(usual)


async def test_an_append_does_not_pass_over_the_tails_of_all_conversations(schema: str) -> None:
    """With fifty thousand active conversations that took longer than the statement."""

    class Unlisted(OrderedDict[str, Any]):
        def keys(self) -> NoReturn:
            raise AssertionError("all tails are passed over")

        __iter__ = items = values = keys

    def replace(writer: PostgresWriter) -> None:
        writer._tails = Unlisted()

    async with make_journal(schema) as journal:
        claim = await journal.claim("c")
        await journal._change(replace)

        found = [await append(journal, "c", claim, seq, f"e{seq}") for seq in (1, 2)]

    assert found == [[1], [2]]


@pytest.mark.parametrize(("events", "text"), [(1, "WITH moved"), (2, "WITH moving")])
async def test_appends_one_at_a_time_are_not_planned_anew_each_time(
    events: int, text: str, schema: str
) -> None:
    """Planning took the server as long as the rest of the statement."""
    async with make_journal(schema) as journal:
        others = (
            "INSERT INTO conversation (name, incarnation, log, epoch, head, tip, forked_at, "
            "is_unfinished, updated_us) SELECT 'other' || n, 0, n, 1, 1, 0, 0, false, 0 "
            "FROM generate_series(1, 5000) n"
        )
        change(schema, others)
        change(schema, "ANALYZE conversation")
        claim = await journal.claim("c")
        for at in range(20):
            ids = [f"e{at}.{event}" for event in range(events)]
            await append(journal, "c", claim, 1 + at * events, *ids)
        plans = await journal._change(
            lambda writer: writer.connection.execute(
                "SELECT custom_plans, generic_plans FROM pg_prepared_statements "
                "WHERE statement LIKE %s AND statement NOT LIKE '%%listed%%'",
                (f"%{text}%",),
            ).fetchall()
        )

    assert sum(custom for custom, _ in plans) <= 5, "PostgreSQL makes five before it compares"
    assert sum(generic for _, generic in plans) > 10


@pytest.fixture
def latin() -> Iterator[str]:
    """A database that cannot hold every letter."""
    name = f"latin_{os.getpid()}"
    with psycopg.connect(postgres.conninfo(), autocommit=True) as admin:
        admin.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING LATIN1 "
            "LC_COLLATE 'C' LC_CTYPE 'C'".encode()
        )
        yield psycopg.conninfo.make_conninfo(postgres.conninfo(), dbname=name)
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


async def test_an_append_with_text_that_the_database_cannot_hold_fails_alone(
    latin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LATIN1 stands for any text that the server refuses; such a database is refused otherwise."""
    monkeypatch.setattr(schema_module, "_ENCODINGS", ("LATIN1",))
    bad = "\N{SLIGHTLY SMILING FACE}"
    gate = Gate("begin")
    outcomes: dict[str, object] = {}
    async with PostgresJournal(latin, failpoint=gate) as journal:
        claims = {name: await journal.claim(name) for name in ("a", "b", "c", "first")}
        claims[bad] = Claim(1, 0)

        async def send(name: str, event_id: str) -> None:
            try:
                outcomes[name] = await append(journal, name, claims[name], 1, event_id)
            except InvalidInput as error:
                outcomes[name] = type(error)

        gate.close()
        async with anyio.create_task_group() as group:
            group.start_soon(send, "first", "e")
            await gate.reached()
            for name, event_id in (("a", "e"), ("b", bad), (bad, "e"), ("c", "e")):
                group.start_soon(send, name, event_id)
            while journal._writer._queued_items < 5:
                await anyio.lowlevel.checkpoint()
            gate.open()

        refused = InvalidInput
        assert outcomes == {"first": [1], "a": [1], "b": refused, bad: refused, "c": [1]}
        with pytest.raises(InvalidInput):
            await journal.claim(bad)
        with pytest.raises(InvalidInput):
            await journal.info(bad)
        assert await append(journal, "b", claims["b"], 1, "e") == [1]


async def test_claims_made_at_once_each_get_an_epoch_of_their_own(schema: str) -> None:
    epochs: list[int] = []
    async with make_journal(schema) as journal:

        async def claim(name: str) -> None:
            epochs.append((await journal.claim(name)).epoch)

        async with anyio.create_task_group() as group:
            for _ in range(5):
                for name in ("a", "b"):
                    group.start_soon(claim, name)

    assert sorted(epochs) == sorted([1, 2, 3, 4, 5] * 2)


# --- many processes -------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [1, 2])
@pytest.mark.parametrize(
    "moved", ["epoch = epoch + 1", "owner = owner + 1", "owner = NULL", "head = head + 1"]
)
async def test_the_statement_of_an_append_itself_finds_that_a_conversation_has_moved(
    events: int, moved: str, schema: str
) -> None:
    """It has two forms, for one event and for several. What is in memory is known to fit."""
    async with make_journal(schema) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, "e1")
        change(schema, f"UPDATE conversation SET {moved}")

        with pytest.raises(Fenced):
            await append(journal, "c", claim, 2, *[f"more {at}" for at in range(events)])

        written = await journal._change(
            lambda writer: writer.connection.execute("SELECT event_id FROM event").fetchall()
        )
    assert written == [("e1",)]


async def test_of_a_group_only_a_conversation_that_has_moved_is_refused(schema: str) -> None:
    """The statement skips it, and says which ones it has not skipped."""
    names = ("a", "b", "c")
    found: dict[str, object] = {}

    async def note(name: str, claim: Claim) -> None:
        try:
            found[name] = await append(journal, name, claim, 2, "e2", "e3")
        except Fenced as error:
            found[name] = error.conversation_id

    gate = Gate("begin")
    async with make_journal(schema, failpoint=gate) as journal:
        claims = {name: await journal.claim(name) for name in names}
        for name in names:
            await append(journal, name, claims[name], 1, "e1")
        change(schema, "UPDATE conversation SET epoch = epoch + 1 WHERE name = 'b'")
        gate.close()
        async with anyio.create_task_group() as group:
            group.start_soon(journal.claim, "first")
            await gate.reached()
            for name in names:
                group.start_soon(note, name, claims[name])
            while journal._writer._queued_items < 1 + 2 * len(names):
                await anyio.lowlevel.checkpoint()
            gate.open()

        assert found == {"a": [2, 3], "b": "b", "c": [2, 3]}
        assert await read_all(journal, "a") == await read_all(journal, "c") == ["e1", "e2", "e3"]
        assert await read_all(journal, "b") == ["e1"]


async def test_a_statement_queues_each_log_with_new_messages_once_for_the_index(
    schema: str,
) -> None:
    said, other = "user_message", "note"
    kinds = {"a": [said, other, said], "b": [other, other], "c": [other, said]}

    def append_together(writer: PostgresWriter) -> Sequence[tuple[int]]:
        jobs = [
            Append(name, records, claims[name].epoch, expected_seq=1, is_unfinished=False)
            for name, records in all_records.items()
        ]
        assert not writer._append_many(jobs)
        return writer.connection.execute("SELECT log FROM search_queue").fetchall()

    all_records = {
        name: [Record(f"e{at}", kind, b"{}") for at, kind in enumerate(some)]
        for name, some in kinds.items()
    }
    async with make_journal(schema, search=True):
        pass
    async with make_journal(schema) as journal:  # and no thread takes from the queue
        claims = {name: await journal.claim(name) for name in kinds}
        rows = await journal._change(append_together)

    assert sorted(rows) == sorted((empty_tail(name, 0).log,) for name in ("a", "c"))


async def test_several_processes_own_different_conversations_of_one_database(schema: str) -> None:
    async with (
        make_journal(schema, address="one") as first,
        make_journal(schema, address="two") as second,
    ):
        mine, yours = await first.claim("mine"), await second.claim("yours")
        await append(first, "mine", mine, 1, "e1")
        await append(second, "yours", yours, 1, "e1")

        with pytest.raises(OwnedElsewhere, match="one") as caught:
            await second.claim("mine")
        assert caught.value.owner == "one"
        # It may have been killed a moment ago, and a takeover of files does not help.
        for said in (str(caught.value), error_line(caught.value)):
            assert "whose lease has not run out" in said
            assert "alive" not in said
            assert "SQLite" not in said
        assert await read_all(second, "mine") == ["e1"]


async def test_a_claim_that_is_refused_writes_nothing(schema: str) -> None:
    """It would wait for the disk, and each command that is forwarded begins with one."""
    async with make_journal(schema) as owner, make_journal(schema) as other:
        await owner.claim("c")
        with psycopg.connect(
            postgres.conninfo(), autocommit=True, options=f"-c search_path={schema}"
        ) as connection:
            before = connection.execute("SELECT xmin, xmax, epoch FROM conversation").fetchall()
            with pytest.raises(OwnedElsewhere):
                await other.claim("c")
            after = connection.execute("SELECT xmin, xmax, epoch FROM conversation").fetchall()
        assert after == before


async def refused_by(owner: str, journal: PostgresJournal) -> None:
    with pytest.raises(OwnedElsewhere) as caught:
        await journal.claim("c")
    assert caught.value.owner == owner


async def test_a_rival_that_is_faster_by_a_moment_is_named(schema: str) -> None:
    """Two processes are asked at once for a conversation that is not there yet."""
    async with make_journal(schema, address="one") as first, make_journal(schema) as second:
        with (
            psycopg.connect(postgres.conninfo(), options=f"-c search_path={schema}") as connection,
            anyio.fail_after(60),
        ):
            connection.execute(
                "INSERT INTO conversation (name, incarnation, log, owner, epoch, head, tip, "
                "forked_at, is_unfinished, updated_us) "
                "SELECT 'c', 0, 7, id, 1, 0, 0, 0, false, 0 FROM node WHERE address = 'one'"
            )
            async with anyio.create_task_group() as group:
                group.start_soon(refused_by, "one", second)
                waits = "SELECT 1 FROM pg_locks WHERE pg_backend_pid() = ANY(pg_blocking_pids(pid))"
                while connection.execute(waits.encode()).fetchone() is None:
                    await anyio.lowlevel.checkpoint()
                connection.commit()
        assert (await first.claim("c")).epoch == 2


# Between its look for a name and the write of its row, an insert waits here for the test.
_HOLD = """
    CREATE FUNCTION hold(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN
        PERFORM pg_advisory_xact_lock_shared(hashtext(current_schema()));
        RETURN $1;
    END $$;
    CREATE INDEX hold ON conversation (hold(name));
    ALTER TABLE conversation DROP CONSTRAINT conversation_name_key, ADD UNIQUE (name);
    ALTER TABLE conversation DROP CONSTRAINT conversation_log_key, ADD UNIQUE (log);
    SELECT pg_advisory_lock(hashtext(current_schema()));
"""


async def test_a_rival_that_begins_after_the_look_for_its_name_is_named(schema: str) -> None:
    """PostgreSQL then finds the rival's row by its log, which the claim does not look for."""
    async with make_journal(schema, address="one") as first, make_journal(schema) as second:
        with (
            psycopg.connect(postgres.conninfo(), options=f"-c search_path={schema}") as rival,
            anyio.fail_after(60),
        ):
            waits = "SELECT 1 FROM pg_locks WHERE pg_backend_pid() = ANY(pg_blocking_pids(pid))"

            async def until_it_waits() -> None:
                while rival.execute(waits.encode()).fetchone() is None:
                    await anyio.lowlevel.checkpoint()

            rival.execute(_HOLD)
            rival.commit()
            async with anyio.create_task_group() as group:
                group.start_soon(refused_by, "one", second)
                await until_it_waits()
                rival.execute(
                    "INSERT INTO conversation (name, incarnation, log, owner, epoch, head, tip, "
                    "forked_at, is_unfinished, updated_us) "
                    "SELECT 'c', 0, %s, id, 1, 0, 0, 0, false, 0 FROM node WHERE address = 'one'",
                    (empty_tail("c", 0).log,),
                )
                rival.execute("SELECT pg_advisory_unlock(hashtext(current_schema()))")
                await until_it_waits()
                rival.commit()
        assert (await first.claim("c")).epoch == 2


async def test_a_fork_takes_no_name_that_a_rival_begins_in_the_same_moment(schema: str) -> None:
    """The rival's records are acknowledged, so they stay, and the fork is refused."""

    async def refused() -> None:
        with pytest.raises(ConversationExists):
            await journal.fork("c", "f", at=2, records=[make_record("forked")], is_unfinished=False)

    async with make_journal(schema) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1", "e2")
        with (
            psycopg.connect(postgres.conninfo(), options=f"-c search_path={schema}") as rival,
            anyio.fail_after(60),
        ):
            tail = empty_tail("f", 0)
            tail.epoch = 1
            row = rival.execute(
                "INSERT INTO conversation (name, incarnation, log, owner, epoch, head, tip, "
                "forked_at, is_unfinished, updated_us) "
                "VALUES ('f', 0, %s, 0, 1, 0, %s, 0, false, 0) "
                "RETURNING id",
                (tail.log, tail.tip),
            ).fetchone()
            assert row is not None
            tail.number = row[0]
            async with anyio.create_task_group() as group:
                group.start_soon(refused)
                waits = "SELECT 1 FROM pg_locks WHERE pg_backend_pid() = ANY(pg_blocking_pids(pid))"
                while rival.execute(waits.encode()).fetchone() is None:
                    await anyio.lowlevel.checkpoint()
                said = Append(
                    "f", [make_record("said")], epoch=1, expected_seq=1, is_unfinished=False
                )
                statement = _Statement(0, 0)
                statement.add(tail, said)
                assert statement.run(rival.cursor(), lambda _: None)
                rival.commit()

        assert await read_all(journal, "f") == ["said"]


@pytest.mark.parametrize("numbers", [[], [0], [-1, 7, -(1 << 63), (1 << 63) - 1]])
def test_numbers_arrive_as_they_were_sent(schema: str, numbers: list[int]) -> None:
    """They are encoded here, and not by psycopg."""
    with connect(
        postgres.conninfo(),
        schema,
        is_read_only=False,
        tcp_timeout_s=10,
        answer_s=60,
        ports=Ports(),
    ) as connection:
        row = connection.execute("SELECT %b::bigint[]", [Numbers(numbers)]).fetchone()
    assert row == (numbers,)


async def test_a_number_that_is_too_large_is_refused_to_its_caller_alone(schema: str) -> None:
    async with make_journal(schema) as journal:

        async def append_listed(name: str, created_us: int) -> Sequence[int]:
            claim = await journal.claim(name)
            begun.append(name)
            while len(begun) < len(times):
                await anyio.lowlevel.checkpoint()
            return await journal.append(
                name,
                [make_record(f"e of {name}")],
                epoch=claim.epoch,
                expected_seq=1,
                is_unfinished=False,
                listing=Listing(1, created_us=created_us),
            )

        async def append_refused(name: str, created_us: int) -> None:
            with pytest.raises(InvalidInput, match="bigint"):
                await append_listed(name, created_us)

        begun: list[str] = []
        times = {"a": 1, "b": 1 << 63, "c": -1}
        async with anyio.create_task_group() as group:
            for name, created_us in times.items():
                act = append_refused if created_us > 1 else append_listed
                group.start_soon(act, name, created_us)

        assert [await read_all(journal, name) for name in ("a", "c")] == [["e of a"], ["e of c"]]


async def test_no_snapshot_is_written_of_a_log_that_a_rival_deletes_in_the_same_moment(
    schema: str,
) -> None:
    """A former owner does not know yet that it was taken over; what was said must not stay."""
    gate = Gate("commit")
    is_answered = anyio.Event()

    async def write_snapshot() -> None:
        snapshot = Snapshot(1, "1", b"what was said")
        with contextlib.suppress(ConversationNotFound):
            await former.write_snapshot("c", snapshot, epoch=1)
        is_answered.set()

    async with (
        make_journal(schema, lease_s=3600) as former,
        make_journal(schema, failpoint=gate) as rival,
    ):
        await append(former, "c", await former.claim("c"), 1, "e1")
        claim = await rival.claim("c", takeover=True)
        gate.close()
        with psycopg.connect(postgres.conninfo(), autocommit=True) as watching:
            async with anyio.create_task_group() as group:
                group.start_soon(partial(rival.delete, "c", epoch=claim.epoch))
                await gate.reached()
                group.start_soon(write_snapshot)
                waits = (
                    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() "
                    "AND cardinality(pg_blocking_pids(pid)) > 0"
                )
                while not (is_answered.is_set() or watching.execute(waits).fetchone()):
                    await anyio.lowlevel.checkpoint()
                gate.open()
    with psycopg.connect(postgres.conninfo(), options=f"-c search_path={schema}") as connection:
        assert connection.execute("SELECT payload FROM snapshot").fetchall() == []


async def test_a_rejection_is_committed_before_a_rival_claims_its_conversation(
    schema: str,
) -> None:
    """Committed later, it would stay for good beside a log that the rival has deleted."""
    gate = Gate("commit")
    done: list[str] = []

    async def delete() -> None:
        claim = await rival.claim("c", takeover=True)
        done.append("claimed")
        await rival.delete("c", epoch=claim.epoch)
        done.append("deleted")

    async with (
        make_journal(schema, lease_s=3600, failpoint=gate) as former,
        make_journal(schema) as rival,
    ):
        claim = await former.claim("c")
        await append(former, "c", claim, 1, "e1")
        gate.close()
        rejections = [Rejection(4e9, "v", "r", b"what was said")]
        with psycopg.connect(postgres.conninfo(), autocommit=True) as watching:
            async with anyio.create_task_group() as group:
                group.start_soon(partial(former.reject, "c", rejections, epoch=claim.epoch))
                await gate.reached()
                group.start_soon(delete)
                waits = (
                    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() "
                    "AND cardinality(pg_blocking_pids(pid)) > 0"
                )
                with anyio.fail_after(60):
                    while not ("deleted" in done or watching.execute(waits).fetchone()):
                        await anyio.lowlevel.checkpoint()
                before = [*done]
                gate.open()
    assert (before, done) == ([], ["claimed", "deleted"])
    with psycopg.connect(postgres.conninfo(), options=f"-c search_path={schema}") as connection:
        assert connection.execute("SELECT payload FROM rejection").fetchall() == []


async def test_leaving_gives_the_lease_back_at_once(schema: str) -> None:
    async with make_journal(schema, lease_s=3600) as first:
        await first.claim("c")
    async with make_journal(schema) as second:
        assert (await second.claim("c")).epoch == 2


async def test_a_lease_that_ran_out_by_the_databases_clock_keeps_no_rival_out(schema: str) -> None:
    """The owner's own clock still says that the lease is valid."""
    async with make_journal(schema, lease_s=3600) as first, make_journal(schema) as second:
        old = await first.claim("c")
        await append(first, "c", old, 1, "e1")
        with pytest.raises(OwnedElsewhere):
            await second.claim("c")
        change(schema, "UPDATE node SET lease_until = clock_timestamp() - interval '1 second'")

        new = await second.claim("c")

        assert new == Claim(old.epoch + 1, 1)
        with pytest.raises(Fenced):
            await append(first, "c", old, 2, "zombie")
        assert await append(second, "c", new, 2, "e2") == [2]


async def test_the_lease_ends_by_this_processs_own_clock_before_it_does_for_rivals(
    schema: str,
) -> None:
    now = 1_000.0
    async with make_journal(schema, lease_s=100, ports=Ports(monotonic=lambda: now)) as journal:
        assert journal.is_lease_valid()
        now += 79
        assert journal.is_lease_valid()
        now += 2  # a fifth of the lease is kept back
        assert not journal.is_lease_valid()


async def test_a_forced_takeover_ends_the_lease_of_the_owner_and_it_is_told(schema: str) -> None:
    """Its lease goes on, anew: what it had claimed under the old one is doubted."""
    now = 1_000.0
    told = anyio.Event()
    async with (
        make_journal(schema, ports=Ports(monotonic=lambda: now)) as first,
        make_journal(schema) as second,
    ):
        first.watch_lease(told.set)
        claimed_at = now
        old = await first.claim("c")
        await first.claim("d")
        now += 1
        assert first.is_lease_valid(since=claimed_at)

        assert (await second.claim("c", takeover=True)).epoch == old.epoch + 1
        presence = first._presence
        assert presence is not None
        presence._call()  # its next renewal
        await told.wait()

        assert first.is_lease_valid()
        assert not first.is_lease_valid(since=claimed_at)
        with pytest.raises(Fenced):
            await append(first, "c", old, 1, "zombie")
        with pytest.raises(OwnedElsewhere):
            await first.claim("c")
        assert (await first.claim("d")).epoch == 2


async def test_a_claim_that_is_refused_ends_no_lease(schema: str) -> None:
    async with make_journal(schema) as first, make_journal(schema) as second:
        await first.claim("c")
        for _ in range(2):
            with pytest.raises(OwnedElsewhere):
                await second.claim("c")


async def test_a_waiting_reader_in_another_process_is_woken_and_does_not_poll(
    schema: str,
) -> None:
    heads: list[int] = []
    async with (
        make_journal(schema) as owner,
        make_journal(schema, read_only=True, poll_s=3600) as reader,
    ):
        claim = await owner.claim("c")

        async def follow() -> None:
            for after in range(3):
                await reader.wait_for_more("c", after=after)
                heads.append((await reader.info("c")).head)

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            for seq in (1, 2, 3):
                await append(owner, "c", claim, seq, f"e{seq}")
                while not heads or heads[-1] < seq:
                    await anyio.lowlevel.checkpoint()
    assert heads == [1, 2, 3]


async def test_a_commit_makes_other_processes_look_at_the_logs_that_it_changed_and_no_other(
    schema: str,
) -> None:
    asked: list[list[str]] = []
    looks_at_all: list[None] = []
    async with (
        make_journal(schema) as owner,
        make_journal(schema, read_only=True, poll_s=3600) as reader,
    ):
        claims = {name: await owner.claim(name) for name in ("a", "b", "c", "read by none")}
        has_moved = {name: anyio.Event() for name in claims}
        read_heads, hear = reader._watch._read_heads, reader._hear

        async def count(names: Sequence[str]) -> Mapping[str, int]:
            asked.append(sorted(names))
            return await read_heads(names)

        def hear_of(marks: Collection[int] | None) -> None:
            hear(marks)
            if marks is None:
                looks_at_all.append(marks)

        async def follow(name: str) -> None:
            await reader.wait_for_more(name, after=0)
            has_moved[name].set()

        reader._watch._read_heads, reader._hear = count, hear_of  # type: ignore[method-assign]
        async with anyio.create_task_group() as group:
            for name in ("a", "b", "c"):
                group.start_soon(follow, name)
            await listens(schema)
            # It looks at all of them as it begins to listen, and once more a second later.
            with anyio.fail_after(120):
                while len(looks_at_all) < 2:
                    await anyio.lowlevel.checkpoint()
            await append(owner, "b", claims["b"], 1, "e1")
            await has_moved["b"].wait()
            asked.clear()

            await append(owner, "read by none", claims["read by none"], 1, "e1")
            await append(owner, "a", claims["a"], 1, "e1")
            await has_moved["a"].wait()
            assert asked == [["a"]]
            await append(owner, "c", claims["c"], 1, "e1")


async def listens(schema: str) -> None:
    """Wait until a process listens."""
    with psycopg.connect(
        postgres.conninfo(), autocommit=True, options=f"-c search_path={schema}"
    ) as connection:
        with anyio.fail_after(120):
            while not connection.execute("SELECT FROM node WHERE is_listening").fetchall():
                await anyio.lowlevel.checkpoint()


async def test_a_process_that_is_alone_sends_no_notification_and_wakes_its_own_readers(
    schema: str,
) -> None:
    with psycopg.connect(postgres.conninfo(), autocommit=True) as other:
        other.execute(f"LISTEN {CHANNEL}")
        async with make_journal(schema, poll_s=3600) as journal:
            claim = await journal.claim("c")
            async with anyio.create_task_group() as group:
                group.start_soon(partial(journal.wait_for_more, "c", after=0))
                await listens(schema)
                await append(journal, "c", claim, 1, "e1")
        other.execute("SELECT pg_notify(%s, 'the end')", (CHANNEL,))
        heard = [notice.payload for notice in other.notifies(timeout=0)]
    assert heard[-1] == "the end"
    assert payload_of({mark_of("c")}) not in heard


async def test_a_renewal_writes_one_row_of_the_process_and_none_of_its_conversations(
    schema: str,
) -> None:
    def rows(table: str) -> list[Any]:
        with psycopg.connect(
            postgres.conninfo(), autocommit=True, options=f"-c search_path={schema}"
        ) as connection:
            return connection.execute(f"SELECT xmin, ctid FROM {table}".encode()).fetchall()

    async with make_journal(schema) as journal:
        async with anyio.create_task_group() as group:
            for number in range(200):
                group.start_soon(journal.claim, f"c{number}")
        owned, (leased,) = rows("conversation"), rows("node")
        assert journal._presence is not None
        for _ in range(3):
            journal._presence._call()
            with anyio.fail_after(120):
                while rows("node") == [leased]:
                    await anyio.lowlevel.checkpoint()
            (leased,) = rows("node")

        assert len(owned) == 200
        assert rows("conversation") == owned


# --- the three outcomes ---------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "landed"), [("begin", False), ("committed", True)])
async def test_a_connection_that_breaks_around_an_append_leaves_it_unknown(
    schema: str, where: str, *, landed: bool
) -> None:
    fault = Fault(where, OSError("connection reset"))
    async with make_journal(schema, failpoint=fault) as journal:
        claim = await journal.claim("c")
        fault.is_armed = True

        with pytest.raises(JournalOutcomeUnknown):
            await append(journal, "c", claim, 1, "e1")

        # Sent again under the same id, it is in the log once, whether it had landed or not.
        assert (await journal.claim("c")).head == int(landed)
        claim = await journal.claim("c")
        assert await append(journal, "c", claim, claim.head + 1, "e1") == [1]
        assert await read_all(journal, "c") == ["e1"]


async def test_what_follows_a_lost_connection_in_its_group_is_refused_and_was_not_sent(
    schema: str,
) -> None:
    """So no caller waits for one silent statement after the other."""
    gate = Gate("begin")
    found: dict[str, object] = {}

    async def note(name: str, call: Callable[[], Awaitable[object]]) -> None:
        try:
            found[name] = await call()
        except (JournalOutcomeUnknown, JournalUnavailable) as error:
            found[name] = type(error)

    async with make_journal(schema, failpoint=gate) as journal:
        claim = await journal.claim("c")
        gate.close()
        async with anyio.create_task_group() as group:
            group.start_soon(note, "before", lambda: append(journal, "c", claim, 1, "e1"))
            await gate.reached()
            cut = partial(journal._change, lambda writer: writer.connection.close())
            group.start_soon(note, "cut", cut)
            while journal._writer._queued_items < 2:
                await anyio.lowlevel.checkpoint()
            group.start_soon(note, "behind", lambda: append(journal, "c", claim, 2, "e2"))
            while journal._writer._queued_items < 3:
                await anyio.lowlevel.checkpoint()
            gate.open()

        lost, refused = JournalOutcomeUnknown, JournalUnavailable
        assert found == {"before": [1], "cut": lost, "behind": refused}
        assert await append(journal, "c", claim, 2, "e2") == [2]


async def test_a_connection_that_the_server_ends_is_made_again(schema: str) -> None:
    async with make_journal(schema) as journal:
        claim = await journal.claim("c")
        await append(journal, "c", claim, 1, "e1")
        change(
            schema,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND query LIKE '%conversation%'",
        )

        with pytest.raises(JournalOutcomeUnknown):
            await append(journal, "c", claim, 2, "e2")
        assert await append(journal, "c", claim, 2, "e2") == [2]
        with contextlib.suppress(JournalUnavailable):  # the first read may find it broken
            await read_all(journal, "c")
        assert await read_all(journal, "c") == ["e1", "e2"]


async def test_while_there_is_no_connection_appends_are_refused_at_once(schema: str) -> None:
    now = 0.0
    tries: list[float] = []
    async with make_journal(schema, ports=Ports(monotonic=lambda: now)) as journal:
        claim = await journal.claim("c")

        def no_connection() -> BoundedConnection:
            tries.append(now)
            raise psycopg.OperationalError("no route")

        def cut(writer: PostgresWriter) -> None:
            writer._link._connect = no_connection
            writer.connection.close()

        with pytest.raises(JournalOutcomeUnknown):
            await journal._change(cut)
        for at in (0.0, 0.01, 0.06, 0.07, 0.17, 0.5):
            now = at
            with pytest.raises(JournalUnavailable, match="nothing was written"):
                await append(journal, "c", claim, 1, "e1")
        # Each pause is twice the one before.
        assert tries == [0.0, 0.06, 0.17, 0.5]


async def test_a_statement_that_waits_for_a_lock_is_given_up_and_writes_nothing(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnkeeper.actors.journals.postgres.connections._LOCK_WAIT_S", 0.1)
    async with make_journal(schema) as journal:
        claim = await journal.claim("c")
        with psycopg.connect(postgres.conninfo(), options=f"-c search_path={schema}") as stopped:
            stopped.execute("SELECT * FROM conversation FOR UPDATE")
            with pytest.raises(JournalUnavailable):
                await append(journal, "c", claim, 1, "e1")
        assert await append(journal, "c", claim, 1, "e1") == [1]


# --- refused when entered -------------------------------------------------------------------------


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(JournalUnavailable, match="cannot be reached"):
        async with PostgresJournal("host=127.0.0.1 port=1 dbname=none"):
            raise AssertionError("entered")


async def test_a_database_or_a_user_that_does_not_exist_is_refused(schema: str) -> None:
    """No later try helps; it was told as a server that is away, with "try again"."""
    async with make_journal(schema):
        pass
    for wrong in ({"dbname": "no_such_database"}, {"user": "no_such_user"}):
        address = make_conninfo(postgres.conninfo(), **wrong)
        for read_only in (False, True):
            with pytest.raises(JournalRefused, match=r"does not exist; .*check the names"):
                async with PostgresJournal(address, schema=schema, read_only=read_only):
                    raise AssertionError("entered")
    # Of two servers one may be the right one, once it can be reached.
    found = conninfo_to_dict(postgres.conninfo())
    both = make_conninfo(
        postgres.conninfo(),
        host=f"127.0.0.1,{found['host']}",
        port=f"1,{found.get('port', 5432)}",
        user="no_such_user",
    )
    with pytest.raises(JournalUnavailable, match="does not exist"):
        async with PostgresJournal(both):
            raise AssertionError("entered")


def test_a_host_of_several_addresses_is_refused_if_one_says_that_the_password_is_wrong() -> None:
    """A server that listens on 127.0.0.1 alone refuses localhost's other address first."""
    away = 'connection to server at "localhost" (::1), port 5432 failed: Connection refused'
    wrong = (
        'connection to server at "localhost" (127.0.0.1), port 5432 failed: '
        'FATAL:  password authentication failed for user "me"'
    )
    hint = "\tIs the server running on that host and accepting TCP/IP connections?"
    for first, then, error in (
        (away, wrong, JournalRefused),
        (wrong, away, JournalRefused),
        (away, away, JournalUnavailable),
    ):
        with pytest.raises(error), schema_module.refusal("s"):
            raise psycopg.OperationalError(f"connection failed: {first}\n{hint}\n{then}")


async def test_a_user_that_is_refused_for_a_while_ends_no_journal(schema: str) -> None:
    """Only opening is refused for good: while a password is changed, a new connection may fail."""
    user = f"{schema}_user"
    with psycopg.connect(postgres.conninfo(), autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {user} SUPERUSER LOGIN".encode())
        try:
            address = make_conninfo(postgres.conninfo(), user=user)
            async with PostgresJournal(address, schema=schema, lease_s=600.0) as journal:
                claim = await journal.claim("c")
                admin.execute(f"ALTER ROLE {user} RENAME TO {user}_2".encode())
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s",
                    (f"{user}_2",),
                )
                with suppress(JournalOutcomeUnknown):  # by the connection that was there
                    await append(journal, "c", claim, 1, "e1")
                with pytest.raises(JournalUnavailable, match="does not exist"):
                    await append(journal, "c", claim, 1, "e1")
                with pytest.raises(JournalUnavailable):
                    await read_all(journal, "c")

                admin.execute(f"ALTER ROLE {user}_2 RENAME TO {user}".encode())
                with anyio.fail_after(60):
                    while True:
                        with suppress(JournalUnavailable):
                            assert await append(journal, "c", claim, 1, "e1") == [1]
                            assert await read_all(journal, "c") == ["e1"]
                            break
        finally:
            admin.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE".encode())
            admin.execute(f"DROP ROLE IF EXISTS {user}, {user}_2".encode())


@pytest.mark.parametrize(("encoding", "is_usable"), [("LATIN1", False), ("SQL_ASCII", True)])
async def test_a_database_whose_encoding_lacks_characters_is_refused(
    schema: str, encoding: str, is_usable: bool
) -> None:
    """An answer with another character ended its owner, and each one after it, for good."""
    with psycopg.connect(postgres.conninfo(), autocommit=True) as admin:
        made = f"{schema}_encoded"
        admin.execute(
            f"CREATE DATABASE {made} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' "
            "TEMPLATE template0".encode()
        )
        try:
            address = make_conninfo(postgres.conninfo(), dbname=made)
            with (
                nullcontext()
                if is_usable
                else pytest.raises(JournalRefused, match=f"encoding {encoding}")
            ):
                async with PostgresJournal(address) as journal:
                    claim = await journal.claim("größe")
                    listing = Listing(1, "", "idle", 1, 1, {}, '{"last_message":"🐢"}')
                    await journal.append(
                        "größe",
                        [make_record("e1")],
                        epoch=claim.epoch,
                        expected_seq=1,
                        is_unfinished=False,
                        listing=listing,
                    )
                    (row,) = (await journal.page(ListQuery(9, prefix="grö"))).rows
                    assert (row.conversation_id, row.listing) == ("größe", listing)
        finally:
            admin.execute(f"DROP DATABASE {made} WITH (FORCE)".encode())


async def test_tables_that_are_newer_are_refused_with_both_versions(schema: str) -> None:
    async with make_journal(schema):
        pass
    change(schema, f"UPDATE journal SET version = {SCHEMA_VERSION + 1}")
    for read_only in (False, True):
        with pytest.raises(JournalRefused, match=f"{SCHEMA_VERSION + 1}.*1 to {SCHEMA_VERSION}"):
            async with make_journal(schema, read_only=read_only):
                raise AssertionError("entered")


async def test_a_reader_waits_for_a_writer_to_migrate_older_tables(schema: str) -> None:
    async with make_journal(schema):
        pass
    change(schema, f"UPDATE journal SET version = {SCHEMA_VERSION - 1}")
    with pytest.raises(JournalRefused, match="open it once for writing"):
        async with make_journal(schema, read_only=True):
            raise AssertionError("entered")


async def test_a_process_goes_on_while_a_newer_version_adds_to_every_table(schema: str) -> None:
    """Its statements are prepared by then, and the server keeps their plans."""
    async with make_journal(schema) as journal:
        for number in range(3):
            await use(journal, f"before {number}")
        with psycopg.connect(postgres.conninfo()) as connection:
            found = connection.execute(
                "SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)
            ).fetchall()
        for (table,) in found:
            change(schema, f"ALTER TABLE {table} ADD COLUMN of_later text")
        change(schema, f"UPDATE journal SET version = {SCHEMA_VERSION + 1}")

        await use(journal, "after")

        assert await read_all(journal, "after") == ["after 1", "after 2"]


async def use(journal: PostgresJournal, name: str) -> None:
    """Do each thing that a process does with a conversation."""
    claim = await journal.claim(name)
    await append(journal, name, claim, 1, f"{name} 1", f"{name} 2")
    await journal.write_snapshot(name, Snapshot(1, "v1", b"folds"), epoch=claim.epoch)
    await journal.reject(name, [Rejection(0.0, "v", "reason", b"event")], epoch=claim.epoch)
    fork = f"{name} forked"
    records = [make_record(f"{fork} 1")]
    await journal.fork(name, fork, at=1, records=records, is_unfinished=False)
    page = await journal.page(ListQuery(10, prefix=name))
    assert [row.conversation_id for row in page.rows] == [name, fork]
    await journal.delete(fork, epoch=(await journal.claim(fork)).epoch)
    assert (await journal.info(name)).head == 2
    assert await journal.read_snapshot(name) is not None
    await journal.release(name, epoch=claim.epoch)


@pytest.mark.parametrize(
    ("kept", "found"), [("", "search_path"), (r"-c search_path=\S+", "lock_timeout")]
)
async def test_a_pooler_that_drops_the_settings_of_a_session_is_refused_and_nothing_made(
    schema: str, monkeypatch: pytest.MonkeyPatch, kept: str, found: str
) -> None:
    """The tables would be made in another schema, and shared with other journals.

    PgBouncer can be told to follow the path, which newer servers report; it drops the rest.
    """
    real = BoundedConnection.connect

    def connect_by_pooler(**parameters: Any) -> BoundedConnection:  # noqa: ANN401 - passed on
        parameters["options"] = " ".join(re.findall(kept, parameters["options"])).strip()
        return real(**parameters)

    monkeypatch.setattr(BoundedConnection, "connect", connect_by_pooler)
    with pytest.raises(JournalRefused, match=f"schema {schema} has the {found}"):
        async with make_journal(schema):
            pass

    monkeypatch.undo()
    with pytest.raises(JournalRefused, match="no journal in schema"):
        async with make_journal(schema, read_only=True):
            pass


async def test_a_pooler_that_refuses_the_settings_of_a_session_is_told_from_a_server_that_is_away(
    schema: str,
) -> None:
    """PgBouncer does so unless it is told otherwise; to try again, as was said, never helped."""
    said = b"SFATAL\0C08P01\0Munsupported startup parameter: options\0\0"

    def refuse(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            (size,) = struct.unpack("!i", client.recv(4, socket.MSG_WAITALL))
            client.recv(size - 4, socket.MSG_WAITALL)
            client.sendall(b"E" + struct.pack("!i", len(said) + 4) + said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refuse, args=[listener])
        thread.start()
        port = listener.getsockname()[1]
        journal = PostgresJournal(
            f"postgresql://nobody@127.0.0.1:{port}/d?sslmode=disable&gssencmode=disable",
            schema=schema,
        )
        with pytest.raises(JournalRefused, match="a pooler refuses the `options`") as refused:
            async with journal:
                pass
        thread.join()
    assert str(refused.value).endswith("nothing was done; connect to the server itself")


SETTINGS = {
    "array_nulls": "off",
    "client_encoding": "LATIN1",
    "default_transaction_isolation": "serializable",
    "extra_float_digits": "-15",
    "idle_session_timeout": "1min",
}


NEWER_SETTINGS = {"transaction_timeout": "2min"}
"""Those that only some servers have."""


@pytest.fixture
def set_up() -> Iterator[str]:
    """A database for which its administrator has made settings of their own."""
    name = f"set_up_{os.getpid()}"
    with psycopg.connect(postgres.conninfo(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
        for setting, value in known_settings(admin).items():
            admin.execute(f"ALTER DATABASE {name} SET {setting} = '{value}'".encode())
        yield psycopg.conninfo.make_conninfo(postgres.conninfo(), dbname=name)
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


async def test_the_settings_of_a_database_change_nothing(set_up: str) -> None:
    """A missing message id was stored as a text, and the log counted as damaged."""
    with psycopg.connect(set_up) as other:
        for setting, value in known_settings(other).items():
            assert other.execute(f"SHOW {setting}".encode()).fetchone() == (value,)
    smile = "\N{SLIGHTLY SMILING FACE}"
    async with PostgresJournal(set_up) as journal:
        claim = await journal.claim(smile)
        await append(journal, smile, claim, 1, "plain", smile)

        assert await read_all(journal, smile) == ["plain", smile]
        for found in (
            await journal._change(lambda writer: settings_of(writer.connection)),
            await journal._read(lambda reader: settings_of(reader._connection)),
        ):
            assert found == ["on", "UTF8", "read committed", "1", *["0"] * (len(found) - 4)]


async def test_a_database_that_publishes_all_tables_takes_all_writes(set_up: str) -> None:
    """A row without a key could be neither changed nor deleted, and no journal was made."""
    with psycopg.connect(set_up) as admin:
        admin.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    async with PostgresJournal(set_up, search=True) as journal:
        await use(journal, "c")
        await journal.index()


def known_settings(connection: psycopg.Connection[Any]) -> Mapping[str, str]:
    names = connection.execute(
        "SELECT name FROM pg_settings WHERE name = ANY(%s)", (list(NEWER_SETTINGS),)
    )
    return SETTINGS | {name: NEWER_SETTINGS[name] for (name,) in names}


def settings_of(connection: BoundedConnection) -> list[str]:
    known = known_settings(connection)
    shown = (connection.execute(f"SHOW {setting}".encode()) for setting in known)
    return [value for rows in shown for (value,) in rows]


async def test_a_reader_creates_nothing(schema: str) -> None:
    with pytest.raises(JournalRefused, match="nothing was created"):
        async with make_journal(schema, read_only=True):
            raise AssertionError("entered")
    async with make_journal(schema) as owner:
        await append(owner, "c", await owner.claim("c"), 1, "e1")
        async with make_journal(schema, read_only=True) as reader:
            assert await read_all(reader, "c") == ["e1"]
            assert not reader.is_lease_valid()
            with pytest.raises(JournalRefused, match="read-only"):
                await reader.claim("c")


@pytest.fixture
def role() -> Iterator[str]:
    """A role without any rights."""
    name = f"role_{os.getpid()}"
    with psycopg.connect(postgres.conninfo(), autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {name} LOGIN".encode())
        yield name
        admin.execute(f"DROP OWNED BY {name} CASCADE".encode())
        admin.execute(f"DROP ROLE {name}".encode())


async def test_a_role_needs_no_right_to_make_what_an_administrator_has_made(
    schema: str, role: str
) -> None:
    as_role = psycopg.conninfo.make_conninfo(postgres.conninfo(), user=role)
    with pytest.raises(JournalRefused, match="permission denied"):
        async with PostgresJournal(as_role, schema=schema):
            pass

    change(schema, f"CREATE SCHEMA {schema} AUTHORIZATION {role}")
    async with PostgresJournal(as_role, schema=schema) as owner:
        await append(owner, "c", await owner.claim("c"), 1, "e1")


async def test_a_role_that_may_only_change_rows_can_own_and_one_that_may_only_read_can_read(
    schema: str, role: str
) -> None:
    async with make_journal(schema, search=True):
        pass
    tables = f"ALL TABLES IN SCHEMA {schema} TO {role}"
    change(schema, f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON {tables}")
    as_role = psycopg.conninfo.make_conninfo(postgres.conninfo(), user=role)
    async with PostgresJournal(as_role, schema=schema, search=True, read_only=True) as reader:
        assert not await reader.list()

    change(schema, f"GRANT INSERT, UPDATE, DELETE ON {tables}")
    async with PostgresJournal(as_role, schema=schema, search=True) as journal:
        await use(journal, "c")


async def test_several_processes_can_make_the_tables_at_once(schema: str) -> None:
    async def enter() -> None:
        async with make_journal(schema) as journal:
            await journal.list()

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(enter)


@pytest.mark.parametrize("name", ["", "Upper", 'a"b', "a b", "x" * 60, "1a"])
def test_a_schema_that_is_not_a_plain_name_is_an_error(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"schema is .*; it takes a lower-case name"):
        PostgresJournal("", schema=name)


@pytest.mark.parametrize("given", ["chats.db", "./chats.db", "mysql://me:secret@host/db"])
def test_an_address_of_another_kind_is_refused_before_it_is_used(given: str) -> None:
    """It was refused with libpq's own words, once the journal was entered."""
    with pytest.raises(InvalidInput, match=r"postgresql://USER@HOST/DATABASE.*SQLiteJournal") as no:
        PostgresJournal(given)
    assert "secret" not in str(no.value)
    for address in ("", "host=nowhere", "dbname=x user=me", "postgres://host/db"):
        PostgresJournal(address)


@pytest.mark.parametrize(
    "given",
    [
        "postgresql://me:secr%et@host/db",
        "postgresql://me:p@secret@host/db",
        "postgresql://me:a?p@secret@host/db",
        "postgresql://me:secret@host/db?ssl=on",
        "host=x password=p secret",
        "postgresql://me:secret@[::1/db",
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
async def test_no_part_of_a_password_is_quoted_from_an_address_that_is_none(
    given: str,
    read_only: bool,
) -> None:
    """Libpq quotes what it cannot read, and takes the end of a password with an @ for the host."""
    with pytest.raises((InvalidInput, JournalRefused), match=r"conninfo .*(settings|two @)") as no:
        async with PostgresJournal(given, read_only=read_only):
            raise AssertionError("entered")
    told = "".join(traceback.format_exception(no.value))
    assert "secr" not in told
    for good in ("me:p%40p@host/db", "me:p@host", "host/db", "/db", "me@[::1]:1,[::2]:2/d@b"):
        PostgresJournal(f"postgresql://{good}?application_name=a@b@c")


def test_an_address_that_is_no_text_is_refused_before_it_is_used() -> None:
    with pytest.raises(InvalidInput, match="conninfo is a NoneType; it takes a str"):
        PostgresJournal(None)  # type: ignore[arg-type]


async def test_entering_without_psycopg_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(JournalRefused, match=r"turnkeeper\[postgres\]"):
        async with PostgresJournal(""):
            raise AssertionError("entered")


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "seq"),
    [
        ("UPDATE event SET payload = 'x' WHERE seq = 2", 2),
        ("DELETE FROM event WHERE seq = 2", 2),
        ("DELETE FROM event WHERE seq = 3", 3),
        ("UPDATE conversation SET tip = 0", 3),
    ],
)
async def test_damage_is_a_corrupt_log_that_names_the_place(
    schema: str, statement: str, seq: int
) -> None:
    async with make_journal(schema) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1", "e2", "e3")
        change(schema, statement)
        with pytest.raises(CorruptLog) as caught:
            await read_all(journal, "c")
        assert caught.value.seq == seq


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The statements of reads, each a round trip, in the order of their execution."""
    executed: list[object] = []
    execute = BoundedConnection.execute

    def note(connection: BoundedConnection, query: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - psycopg's own
        if connection.read_only:  # the reader's, and not that of another thread
            executed.append(query)
        return execute(connection, query, *args, **kwargs)

    monkeypatch.setattr(BoundedConnection, "execute", note)
    return executed


async def test_a_page_is_read_in_two_statements_and_not_behind_a_record_that_is_missing(
    schema: str, executed: list[object]
) -> None:
    """One is for the conversation's row, and one for the records."""
    async with make_journal(schema) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1", "e2", "e3")
        executed.clear()
        (found,) = await journal.read("c", after=2)
        assert found.event_id == "e3"
        assert len(executed) == 2

        change(schema, "DELETE FROM event WHERE seq = 2")
        with pytest.raises(CorruptLog) as caught:
            await journal.read("c", after=2)
        assert caught.value.seq == 2


@pytest.mark.parametrize("begun", [1, 2])
async def test_a_conversation_whose_row_is_lost_is_never_opened_as_empty(
    schema: str, begun: int
) -> None:
    """It was claimed as a new one, and each append of it collided with the old records for good."""
    async with make_journal(schema) as journal:
        for _ in range(begun):
            claim = await journal.claim("lost")
            await append(journal, "lost", claim, 1, "e1", "e2")
            if begun > 1 and claim.epoch == 1:
                await journal.delete("lost", epoch=claim.epoch)
        await journal.fork("lost", "kept", at=2, records=[make_record("k")], is_unfinished=False)
    change(schema, "DELETE FROM conversation WHERE name = 'lost'")

    async with make_journal(schema) as journal:
        fork = partial(journal.fork, at=1, records=[make_record("f")], is_unfinished=False)
        for call in (
            partial(journal.claim, "lost"),
            partial(journal.info, "lost"),
            partial(read_all, journal, "lost"),
            partial(fork, "lost", "another"),
            partial(fork, "kept", "lost"),
        ):
            for _ in range(2):
                with pytest.raises(CorruptLog, match="its own row is missing"):
                    await call()
        assert await read_all(journal, "kept") == ["e1", "e2", "k"]
        assert [info.conversation_id for info in await journal.list()] == ["kept"]


async def test_a_verification_finds_the_records_of_a_conversation_whose_row_is_lost(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All was said to be as it was written, though a conversation was gone."""
    monkeypatch.setattr(reader_module, "_LIST_PAGE", 2)
    async with make_journal(schema) as journal:
        for name in ("begun again", "deleted", "kept", "lost", "whole"):
            await append(journal, name, await journal.claim(name), 1, "e1", "e2")
        for name in ("begun again", "deleted"):
            records = [make_record(name)]
            await journal.fork(name, f"{name}: fork", at=1, records=records, is_unfinished=False)
            for _ in range(2):
                claim = await journal.claim(name)
                await append(journal, name, claim, claim.head + 1, f"e{claim.epoch}")
                await journal.delete(name, epoch=claim.epoch)
        await append(journal, "begun again", await journal.claim("begun again"), 1, "e1")
        assert (await verify_logs(journal)).problems == ()

        change(schema, "DELETE FROM conversation WHERE name = 'lost'")
        (problem,) = (await verify_logs(journal)).problems
        assert problem.conversation_id is None
        assert str(empty_tail("lost", 0).log) in problem.found


async def test_damage_of_one_conversation_does_not_touch_its_neighbours_in_a_group(
    schema: str,
) -> None:
    names = ("bad", "fork", "good")
    gate = Gate("begin")
    found: dict[str, object] = {}

    async def note(name: str, call: Callable[[], Awaitable[object]]) -> None:
        try:
            found[name] = await call()
        except CorruptLog as error:
            found[name] = error.conversation_id

    async def together(*calls: Callable[[], Awaitable[object]]) -> Mapping[str, object]:
        """Make these calls in one group."""
        found.clear()
        gate.close()
        async with anyio.create_task_group() as group:
            group.start_soon(journal.claim, "first")
            await gate.reached()
            for name, call in zip(names, calls, strict=True):
                group.start_soon(note, name, call)
            while journal._writer._queued_items < 1 + len(calls):
                await anyio.lowlevel.checkpoint()
            gate.open()
        return found

    async with make_journal(schema, failpoint=gate) as journal:
        await append(journal, "good", await journal.claim("good"), 1, "e1")
        for name in ("bad", "fork"):
            records = [make_record(f"{name} 2")]
            await journal.fork("good", name, at=1, records=records, is_unfinished=False)
        claims = {name: await journal.claim(name) for name in names}
        change(
            schema, "DELETE FROM fork WHERE log = (SELECT log FROM conversation WHERE name = 'bad')"
        )

        await journal._change(lambda writer: writer._tails.clear())
        appends = [
            partial(append, journal, name, claims[name], claims[name].head + 1, f"{name} next")
            for name in names
        ]
        assert await together(*appends) == {"bad": "bad", "fork": [3], "good": [2]}

        again = [partial(journal.claim, name) for name in names]
        assert await together(*again) == {
            "bad": "bad",
            "fork": Claim(claims["fork"].epoch + 1, 3),
            "good": Claim(claims["good"].epoch + 1, 2),
        }


async def test_a_damaged_snapshot_is_ignored(schema: str) -> None:
    async with make_journal(schema) as journal:
        await append(journal, "c", await journal.claim("c"), 1, "e1", "e2")
        await journal.write_snapshot("c", Snapshot(1, "v1", b"folds"), epoch=1)
        change(schema, "UPDATE snapshot SET payload = 'other'")
        assert await journal.read_snapshot("c") is None


async def test_rejections_are_dropped_when_they_are_old(schema: str) -> None:
    now = 1_000.0
    async with make_journal(
        schema, ports=Ports(now=lambda: now), rejection_age_s_max=100
    ) as journal:
        epoch = (await journal.claim("c")).epoch
        for at in (1_000.0, 1_050.0, 1_200.0):
            now = at
            await journal.reject("c", [Rejection(at, "v", "r", b"{}")], epoch=epoch)
        assert [rejection.at for rejection in await journal.rejections("c")] == [1_200.0]


async def test_large_payloads_come_back_whole(schema: str) -> None:
    async with make_journal(schema) as journal:
        claim = await journal.claim("c")
        payload = bytes(range(256)) * 4_000
        await journal.append(
            "c",
            [Record("e1", "note", payload)],
            epoch=claim.epoch,
            expected_seq=1,
            is_unfinished=False,
        )
        assert (await journal.read("c"))[0].payload == payload


async def test_conversations_are_listed_page_by_page(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, no statement takes longer for it."""
    monkeypatch.setattr(reader_module, "_LIST_PAGE", 2)
    begun: list[None] = []
    monkeypatch.setattr(BoundedConnection, "begin_job", lambda _: begun.append(None))
    async with make_journal(schema) as journal:
        names = [f"c{number}" for number in (3, 1, 4, 0, 2)]
        for name in names:
            await append(journal, name, await journal.claim(name), 1, "e1")
        await journal.claim("empty")
        before = len(begun)

        infos = await journal.list()

        assert [info.conversation_id for info in infos] == sorted(names)
        assert len(begun) - before >= 1 + len(names) // 2


async def test_a_read_takes_no_more_round_trips_at_any_depth_of_forks(
    schema: str, executed: list[object]
) -> None:
    """As edits in a row make them: each fork begins shortly behind the one before."""
    counts: list[int] = []
    async with make_journal(schema) as journal:
        for depth in (2, 20):
            first = f"{depth} 0"
            await append(journal, first, await journal.claim(first), 1, "e1")
            for at in range(1, depth + 1):
                records = [make_record(f"e{at + 1}")]
                await journal.fork(
                    f"{depth} {at - 1}",
                    f"{depth} {at}",
                    at=at,
                    records=records,
                    is_unfinished=False,
                )
            executed.clear()
            found = await journal.read(f"{depth} {depth}")
            counts.append(len(executed))
            assert [one.event_id for one in found] == [f"e{seq}" for seq in range(1, depth + 2)]
            for after, limit in ((0, 1), (1, 2), (depth - 1, 9)):
                page = await journal.read(f"{depth} {depth}", after=after, limit=limit)
                assert list(page) == list(found[after : after + limit])

        change(schema, "DELETE FROM event WHERE event_id = 'e7' AND seq = 7")
        with pytest.raises(CorruptLog):
            await journal.read("20 20")

    assert counts[0] == counts[1]
