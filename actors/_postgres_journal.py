"""The journal in PostgreSQL: durable, fenced, and written by many processes at once.

Needs psycopg 3 (`turnkeeper[postgres]`). While it is entered, it holds a lease: a row that says
until when this process is alive, by the database's clock, renewed by a heartbeat. A conversation
whose owner's lease is alive is `OwnedElsewhere`; leaving gives the lease back, and a process that
was killed or stopped loses it when it runs out. One thread writes what all conversations have
waiting in one statement that checks each epoch; another one reads; a third keeps the lease and
listens for what other processes write. The event loop never waits for the database.

Beside what the port promises: a process that stops holds no transaction, so it is taken over when
its lease has run out, and not one row of its epoch is written afterwards. A connection that breaks
is made again with backoff; what was on its way then is `OutcomeUnknown`.

It is as durable as the server is told to be: `synchronous_commit` is not turned down here, and
with replicas it must include them if an epoch is to survive a failover. Deleting puts text out of
reach; it is gone from the server's files when autovacuum has been there.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio

from turnkeeper.runtime import OneShot, Ports, thread_caller

from ._append_rules import Append
from ._job_thread import Job, JobThread, Worker
from ._log_watch import LogWatch
from .errors import JournalRefused
from .journal import (
    Claim,
    ConversationInfo,
    Deletion,
    Record,
    Rejection,
    Snapshot,
    StoredRecord,
)

if TYPE_CHECKING:
    import psycopg

    from ._postgres_presence import Presence
    from ._postgres_reader import PostgresReader
    from ._postgres_writer import PostgresWriter

T = TypeVar("T")

_DAY_S = 86_400.0
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,50}")


def _no_failpoint(_: str) -> None:
    return


class PostgresJournal:
    """`async with PostgresJournal("postgresql://…") as journal`, on asyncio or on trio."""

    def __init__(
        self,
        conninfo: str,
        *,
        schema: str = "turnkeeper",
        read_only: bool = False,
        address: str | None = None,
        lease_s: float = 15.0,
        tcp_timeout_s: float = 10.0,
        stop_wait_s: float = 30.0,
        poll_s: float = 5.0,
        queued_events_max: int = 8_192,
        queued_bytes_max: int = 64 << 20,
        group_events_max: int = 512,  # more would leave the loop idle while it is written
        group_bytes_max: int = 8 << 20,
        active_conversations_max: int = 16_384,
        rejection_age_s_max: float = 30 * _DAY_S,
        ports: Ports | None = None,
        failpoint: Callable[[str], None] = _no_failpoint,
    ) -> None:
        """Nothing is opened before it is entered.

        `address` says who owns a conversation, to those that it is refused to. `failpoint` is
        called in the writing thread as "begin" and "committed" are passed around a statement.
        """
        if not _SCHEMA.fullmatch(schema):
            raise ValueError(f"schema {schema!r}: a lower-case name of up to 51 characters")
        self._conninfo = conninfo
        self._schema = schema
        self._is_read_only = read_only
        self._address = address or f"process {os.getpid()} on {socket.gethostname()}"
        self._lease_s = lease_s
        self._tcp_timeout_s = tcp_timeout_s
        self._stop_wait_s = stop_wait_s
        self._active_conversations_max = active_conversations_max
        self._rejection_age_s_max = rejection_age_s_max
        self._ports = ports or Ports()
        self._failpoint = failpoint
        self._is_entered = False
        self._presence: Presence | None = None
        self._watch = LogWatch(self._heads, poll_s=poll_s)
        thread = partial(
            JobThread,
            ports=self._ports,
            queued_items_max=queued_events_max,
            queued_bytes_max=queued_bytes_max,
            stop_wait_s=stop_wait_s,
        )
        self._make_writer = partial(
            thread,
            f"writer of {schema}",
            self._open_writer,
            group_items_max=group_events_max,
            group_bytes_max=group_bytes_max,
        )
        self._make_reader = partial(
            thread,
            f"reader of {schema}",
            self._open_reader,
            group_items_max=8,  # a group of reads is answered together; more would only wait
            group_bytes_max=group_bytes_max,
        )
        self._writer = self._make_writer()
        self._reader = self._make_reader()

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise JournalRefused("this journal is entered already; nothing was done")
        try:
            import psycopg  # noqa: F401, PLC0415 - an extra
        except ImportError as error:
            raise JournalRefused(
                "PostgreSQL needs psycopg 3, which is not installed; nothing was done; "
                "install turnkeeper[postgres]"
            ) from error
        self._is_entered = True
        try:
            self._call_in_loop = thread_caller()
            self._presence_ended: OneShot[None] = OneShot()
            if not self._is_read_only:
                await self._writer.start()
            await self._reader.start()
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._leave()

    async def _leave(self) -> None:
        await self._reader.stop()
        await self._writer.stop()
        presence, self._presence = self._presence, None
        if presence is not None:
            presence.stop()
            # Shielded and bounded: a lease that cannot be given back runs out.
            with anyio.move_on_after(self._stop_wait_s, shield=True):
                await self._presence_ended.wait()
        self._writer = self._make_writer()
        self._reader = self._make_reader()
        self._is_entered = False

    # --- the port ---------------------------------------------------------------------------------

    def is_lease_valid(self, *, since: float | None = None) -> bool:
        """True while no other process may have taken over what this one owns."""
        return (
            not self._is_read_only
            and self._presence is not None
            and self._presence.is_lease_valid(since=since)
        )

    async def claim(self, conversation_id: str, *, takeover: bool = False) -> Claim:
        from ._postgres_writer import Claiming  # noqa: PLC0415 - needs psycopg

        return await self._write(Claiming(conversation_id, takeover=takeover))

    def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
    ) -> Awaitable[Sequence[int]]:
        if not records:
            raise ValueError("an append of zero records")
        return self._write(
            Append(
                conversation_id,
                records,
                epoch=epoch,
                expected_seq=expected_seq,
                is_unfinished=is_unfinished,
            )
        )

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512
    ) -> Sequence[StoredRecord]:
        return await self._read(lambda reader: reader.read(conversation_id, after, limit))

    async def info(self, conversation_id: str) -> ConversationInfo:
        return await self._read(lambda reader: reader.info(conversation_id))

    async def list(self, *, only_unfinished: bool = False) -> Sequence[ConversationInfo]:
        return await self._read(lambda reader: reader.list(only_unfinished=only_unfinished))

    async def find_events(
        self, conversation_id: str, event_ids: Sequence[str]
    ) -> Mapping[str, int]:
        return await self._read(lambda reader: reader.find_events(conversation_id, event_ids))

    async def find_messages(
        self, conversation_id: str, message_ids: Sequence[str]
    ) -> Mapping[str, int]:
        return await self._read(lambda reader: reader.find_messages(conversation_id, message_ids))

    async def reject(self, conversation_id: str, rejections: Sequence[Rejection]) -> None:
        await self._change(
            lambda writer: writer.reject(conversation_id, rejections),
            sum(len(rejection.payload) for rejection in rejections),
        )

    async def rejections(self, conversation_id: str) -> Sequence[Rejection]:
        return await self._read(lambda reader: reader.rejections(conversation_id))

    async def write_snapshot(self, conversation_id: str, snapshot: Snapshot, *, epoch: int) -> None:
        await self._change(
            lambda writer: writer.write_snapshot(conversation_id, snapshot, epoch),
            len(snapshot.payload),
        )

    async def read_snapshot(self, conversation_id: str) -> Snapshot | None:
        return await self._read(lambda reader: reader.read_snapshot(conversation_id))

    async def fork(
        self,
        conversation_id: str,
        fork_id: str,
        *,
        at: int,
        records: Sequence[Record],
        is_unfinished: bool,
    ) -> Claim:
        if not records:
            raise ValueError("a fork without records of its own")
        return await self._change(
            lambda writer: writer.fork(
                conversation_id, fork_id, at, records, is_unfinished=is_unfinished
            )
        )

    async def delete(self, conversation_id: str, *, epoch: int) -> Deletion:
        """Delete a conversation; its text leaves the server's files with the next vacuum."""
        kept, forks = await self._change(lambda writer: writer.delete(conversation_id, epoch))
        return Deletion(kept, forks, is_erased=False)

    async def wait_for_more(self, conversation_id: str, *, after: int) -> None:
        """Return when a log does not end at `after`; woken by whoever writes, else by polls."""
        if self._presence is None:
            self._presence = self._make_presence()
            self._presence.start()
        self._presence.listen()
        await self._watch.wait(conversation_id, after)

    async def _heads(self, names: Sequence[str]) -> Mapping[str, int]:
        return await self._read(lambda reader: reader.heads(names))

    # --- the threads ------------------------------------------------------------------------------

    def _write(self, job: Job[T]) -> OneShot[T]:
        if self._is_read_only:
            raise JournalRefused(f"schema {self._schema} is open read-only; nothing was written")
        return self._writer.submit(job)

    async def _change(self, apply: Callable[[PostgresWriter], T], size: int = 0) -> T:
        from ._postgres_writer import Change  # noqa: PLC0415 - needs psycopg

        return await self._write(Change(apply, size))

    async def _read(self, apply: Callable[[PostgresReader], T]) -> T:
        from ._postgres_reader import Read  # noqa: PLC0415 - needs psycopg

        return await self._reader.do(Read(apply))

    def _connect(self) -> psycopg.Connection[Any]:
        from ._postgres_schema import connect  # noqa: PLC0415 - needs psycopg

        return connect(self._conninfo, self._schema, tcp_timeout_s=self._tcp_timeout_s)

    def _open_writer(self) -> Worker:
        from ._postgres_schema import bring_up_to_date, refusal  # noqa: PLC0415 - needs psycopg
        from ._postgres_writer import PostgresWriter  # noqa: PLC0415 - needs psycopg

        presence = self._make_presence()
        with refusal(self._schema), ExitStack() as opened:
            connection = opened.enter_context(closing(self._connect()))
            bring_up_to_date(connection, self._schema)
            presence.register(connection)
            opened.pop_all()
        presence.start()
        self._presence = presence
        return PostgresWriter(
            self._connect,
            connection,
            schema=self._schema,
            node=presence.node,
            ports=self._ports,
            failpoint=self._failpoint,
            tails_max=self._active_conversations_max,
            rejection_age_s_max=self._rejection_age_s_max,
        )

    def _make_presence(self) -> Presence:
        from ._postgres_presence import Presence  # noqa: PLC0415 - needs psycopg

        return Presence(
            self._connect,
            node=self._ports.random.getrandbits(62),
            address=self._address,
            lease_s=self._lease_s,
            ports=self._ports,
            on_notify=partial(self._call_in_loop, self._watch.call),
            on_ended=partial(self._call_in_loop, partial(self._presence_ended.set, None)),
        )

    def _open_reader(self) -> Worker:
        from ._postgres_reader import PostgresReader  # noqa: PLC0415 - needs psycopg
        from ._postgres_schema import check_version, refusal  # noqa: PLC0415 - needs psycopg

        with refusal(self._schema):
            if self._is_read_only:
                with self._connect() as connection:
                    check_version(connection, self._schema)
            return PostgresReader(self._connect)
