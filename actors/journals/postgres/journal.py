"""The journal in PostgreSQL: durable, fenced, and written by many processes at once.

Needs psycopg 3 (`turnkeeper[postgres]`). While it is entered, the journal holds a lease: a row that
says until when this process counts as alive, by the database's clock. A heartbeat renews it.
Claiming a conversation whose owner holds a valid lease raises `OwnedElsewhere`. Leaving gives the
lease back; a process that was killed or stopped loses it when it runs out. One thread writes the
waiting appends of all conversations in one statement that checks each epoch, a second one reads,
and a third keeps the lease and listens for other processes' commits. The event loop never waits for
the database.

Beyond the port's promises: a process that stops holds no transaction, so another can take over when
its lease has run out, and no row of its epoch is written afterwards. A connection that breaks is
made again with backoff; a job that was under way on it is `OutcomeUnknown`.

The journal is as durable as the server: it does not turn `synchronous_commit` down, and with
replicas that setting must include them if epochs are to survive a failover. If a new connection
finds that the server has lost commits of this process, the lease ends, and owners begin again with
what is left. Deleting puts text out of reach; autovacuum removes it from the server's files.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

import anyio

from turnkeeper.runtime import Ports
from turnkeeper.runtime.lowlevel import OneShot, thread_caller, to_its_end

from ...errors import (
    InvalidInput,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
    SearchIsOff,
)
from ...journal import (
    Claim,
    ConversationInfo,
    Deletion,
    Listing,
    Record,
    SearchPage,
    SearchQuery,
)
from ...values.text import check_bool, check_text
from ..shared.database_journal import DatabaseJournal, process_name, sorted_by_id
from ..shared.job_thread import READS_AT_ONCE, Job, JobThread, Worker
from ..shared.limits import check_asked, check_new_name, check_records, check_settings
from ..shared.log_watch import LogWatch, mark_of
from ..shared.searching import LogWords

if TYPE_CHECKING:
    from .connections import BoundedConnection
    from .presence import Presence
    from .reader import PostgresReader
    from .writer import PostgresWriter

T = TypeVar("T")

_DAY_S = 86_400.0
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,50}")
_SCHEMES = ("postgresql://", "postgres://")
_TWO_AT_SIGNS = re.compile(r"postgres(ql)?://[^/@]*@[^/?]*@")


def _no_failpoint(_: str) -> None:
    return


def _erase_slice(log: int, writer: PostgresWriter) -> int | None:
    return writer.erase_slice(log)


_ANSWERS_MAX = 10
"""More than the number of waits for the server that one group can cause, one after the other."""


def _ignore() -> None:
    return


class PostgresJournal(DatabaseJournal):
    """The journal in a PostgreSQL database, which any number of processes may write.

    Give it to `Conversations`, which enters it; or enter it yourself, to read logs or to use
    `turnkeeper.actors.journals.transfer`:

        async with PostgresJournal("postgresql://…", read_only=True) as journal: ...
    """

    def __init__(
        self,
        conninfo: str,
        *,
        schema: str = "turnkeeper",
        read_only: bool = False,
        search: bool = False,
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
        """Set up a journal; it connects only when it is entered.

        `conninfo`: as libpq takes it. `read_only`: own nothing and change nothing. `lease_s`: how
        long this process owns its conversations if it does not renew its lease. `tcp_timeout_s`:
        how long the server's host may be silent. `poll_s`: how often readers check if another
        process has written, if no notification comes.
        `stop_wait_s`: how long leaving waits for calls under way. `queued_events_max`,
        `queued_bytes_max`: the bounds of the writing thread's queue; further appends wait outside.
        `group_events_max`, `group_bytes_max`: the bounds of one commit.
        `active_conversations_max`: for how many conversations the writer keeps the end of the log
        in memory. `rejection_age_s_max`: how long refused messages are kept.

        `search` keeps an index of the words of chat messages. If the schema has none yet, it is
        built bit by bit, while the journal is used. `address`: the name of this process in
        the errors that other processes get while this one owns a conversation.
        `failpoint` is for tests: the writing thread calls it with "begin" before and "committed"
        after each statement. `ports`: the clocks, threads and random numbers that it uses. Raises
        `InvalidInput`.
        """
        check_settings(locals())
        check_text("conninfo", conninfo)
        # It may hold a password, so it is not quoted.
        if conninfo and "=" not in conninfo and not conninfo.startswith(_SCHEMES):
            raise InvalidInput(
                "conninfo is no address of a database; it takes one as "
                "postgresql://USER@HOST/DATABASE, or libpq's settings, as host=HOST "
                "dbname=DATABASE; SQLiteJournal takes the path of a file"
            )
        if _TWO_AT_SIGNS.match(conninfo):  # libpq would take a part of the password for the host
            raise InvalidInput(
                "conninfo has two @ before its path; write one that belongs to a name or password "
                "as %40"
            )
        check_text("schema", schema)
        if not _SCHEMA.fullmatch(schema):
            raise InvalidInput(
                f"schema is {schema!r}; it takes a lower-case name of up to 51 characters"
            )
        self._conninfo = conninfo
        self._schema = schema
        self._is_read_only = read_only
        self._is_searching = search
        self._address = address
        self._lease_s = lease_s
        self._tcp_timeout_s = tcp_timeout_s
        self._stop_wait_s = stop_wait_s
        self._active_conversations_max = active_conversations_max
        self._rejection_age_s_max = rejection_age_s_max
        self._ports = ports or Ports()
        self._failpoint = failpoint
        self._is_entered = False
        self._presence: Presence | None = None
        self._reading: PostgresReader | None = None
        self._on_lease_loss: Callable[[], None] = _ignore
        self._watch = LogWatch(self._heads, poll_s=poll_s)
        thread = partial(
            JobThread,
            ports=self._ports,
            queued_items_max=queued_events_max,
            queued_bytes_max=queued_bytes_max,
            stop_wait_s=stop_wait_s,
            # The connection's own bounds end every wait long before a thread counts as hung.
            answer_wait_s=_ANSWERS_MAX * (lease_s + tcp_timeout_s),
        )
        self._make_writer = partial(
            thread,
            f"writer of {schema}",
            self._open_writer,
            group_items_max=group_events_max,
            group_bytes_max=group_bytes_max,
            wakes_late=True,
        )
        self._make_reader = partial(
            thread,
            f"reader of {schema}",
            self._open_reader,
            group_items_max=READS_AT_ONCE,
            group_bytes_max=group_bytes_max,
        )
        self._make_indexer = partial(
            thread,
            f"indexer of {schema}",
            self._open_indexer,
            group_items_max=1,
            group_bytes_max=group_bytes_max,
        )
        self._writer = self._make_writer()
        self._reader = self._make_reader()
        self._indexer = self._make_indexer()

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise JournalRefused("this journal is already entered; nothing was done")
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
            if self._is_searching and not self._is_read_only:
                await self._indexer.start()
        except BaseException:
            await to_its_end(self._leave)
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await to_its_end(self._leave)

    async def _leave(self) -> None:
        await self._indexer.stop()
        await self._reader.stop()
        await self._writer.stop()
        presence, self._presence = self._presence, None
        if presence is not None:
            presence.stop()
            await to_its_end(self._wait_for_presence)
        self._writer = self._make_writer()
        self._reader = self._make_reader()
        self._indexer = self._make_indexer()
        self._on_lease_loss = _ignore
        self._is_entered = False

    async def _wait_for_presence(self) -> None:
        # Bounded: a lease that cannot be given back simply runs out.
        with anyio.move_on_after(self._stop_wait_s):
            await self._presence_ended.wait()

    # --- the port ---------------------------------------------------------------------------------

    def is_lease_valid(self, *, since: float | None = None) -> bool:
        """True while no other process may have taken over this one's conversations."""
        return (
            not self._is_read_only
            and self._presence is not None
            and self._presence.is_lease_valid(since=since)
        )

    def watch_lease(self, on_loss: Callable[[], None]) -> None:
        self._on_lease_loss = on_loss

    @property
    def lease_failure(self) -> BaseException | None:
        """Why the lease is not being renewed: the last error; None while renewals succeed.

        Use it as a health value. It stays set if the thread that renews the lease has ended; to
        recover from that, leave the journal and enter it again. Until then all writes are refused
        with `JournalUnavailable`.
        """
        return None if self._presence is None else self._presence.failure

    async def find_abandoned(self) -> Sequence[ConversationInfo]:
        node = -1 if self._presence is None else self._presence.node
        return await self._read(lambda reader: reader.find_abandoned(node))

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        from .writer import Claiming  # noqa: PLC0415 - needs psycopg

        check_bool("takeover", takeover)
        await check_new_name(self, conversation_id, any_name=any_name)
        return await self._submit(Claiming(conversation_id, takeover=takeover))

    async def fork(
        self,
        conversation_id: str,
        fork_id: str,
        *,
        at: int,
        records: Sequence[Record],
        is_unfinished: bool,
        at_event_id: str | None = None,
        listing: Listing | None = None,
    ) -> Claim:
        if not records:
            raise ValueError("a fork without records of its own")
        check_asked(conversation_id)
        check_records(records)
        await check_new_name(self, fork_id)
        return await self._change(
            lambda writer: writer.fork(
                conversation_id,
                fork_id,
                at,
                records,
                is_unfinished=is_unfinished,
                at_event_id=at_event_id,
                listing=listing,
            ),
            changed=fork_id,
        )

    async def delete(self, conversation_id: str, *, epoch: int) -> Deletion:
        """Delete a conversation; its text leaves the server's files with the next vacuum.

        The conversation is gone after the first of several transactions. If the call is cancelled
        or the process ends after that, any process that may write removes the remaining records,
        about ten seconds later.
        """
        check_asked(conversation_id)
        kept, forks, log = await self._change(
            lambda writer: writer.delete(conversation_id, epoch), changed=conversation_id
        )
        left: int | None = log
        with contextlib.suppress(JournalUnavailable, JournalOutcomeUnknown):
            while left is not None:
                left = await self._change(partial(_erase_slice, left))
        return Deletion(kept, forks, is_erased=False)

    async def release(self, conversation_id: str, *, epoch: int) -> None:
        from .writer import Releasing  # noqa: PLC0415 - needs psycopg

        check_asked(conversation_id)
        await self._submit(Releasing(conversation_id, epoch=epoch))

    async def index(self) -> None:
        from .search import Indexing  # noqa: PLC0415 - needs psycopg

        self._refuse_if_search_is_off()
        if self._is_read_only:
            raise JournalRefused(f"schema {self._schema} is open read-only; nothing was written")
        while await self._indexer.do(Indexing()):
            pass

    async def list(self) -> Sequence[ConversationInfo]:
        from .reader import PostgresReader  # noqa: PLC0415 - needs psycopg

        # Each slice is a separate read, so that none exceeds the bound on an answer.
        found: list[ConversationInfo] = []
        after: int | None = -1
        while after is not None:
            infos, after = await self._read(partial(PostgresReader.list_slice, after=after))
            found += infos
        return await sorted_by_id(found)

    async def search(self, query: SearchQuery) -> SearchPage:
        from .reader import Read  # noqa: PLC0415 - needs psycopg

        self._refuse_if_search_is_off()
        return await self._reader.do(Read(lambda reader: reader.search(query), READS_AT_ONCE))

    async def words_of(self, conversation_id: str) -> LogWords | None:
        """Return the search index's entries for a log, for `verify_logs` to compare.

        None if the schema has no index.
        """
        return await self._read(lambda reader: reader.words_of(conversation_id))

    async def words_of_none(self) -> Sequence[int]:
        """Return the numbers of logs with words in the index that belong to no conversation."""
        return await self._read(lambda reader: reader.logs_of_none())

    async def records_of_none(self) -> Sequence[int]:
        """Return the numbers of logs with records that belong to no conversation.

        Each was its conversation's log until the conversation's row was lost.
        """
        from .reader import PostgresReader  # noqa: PLC0415 - needs psycopg

        # In slices, as in `list`.
        unowned: set[int] = set()
        after: int | None = -1
        while after is not None:
            some, after = await self._read(partial(PostgresReader.unowned_slice, after=after))
            unowned.update(some)
        # A log that was deleted may still have records: forks need them, or they are removed later.
        # The names are read afterwards, so they tell of those that were deleted meanwhile, too.
        after = -1 if unowned else None
        while after is not None:
            some, after = await self._read(partial(PostgresReader.deleted_slice, after=after))
            unowned.difference_update(some)
        return sorted(unowned)

    async def wait_for_more(self, conversation_id: str, *, after: int) -> None:
        """Return when a log does not end at `after`; woken by each commit, else by polling."""
        check_asked(conversation_id)
        if not self._is_entered:
            raise JournalRefused(f"schema {self._schema} is not open; use `async with`")
        if self._presence is None:
            presence = self._make_presence()
            presence.start()
            self._presence = presence
        self._presence.listen()
        await self._watch.wait(conversation_id, after)

    # --- the threads ------------------------------------------------------------------------------

    def _submit(self, job: Job[T]) -> OneShot[T]:
        if self._is_read_only:
            raise JournalRefused(f"schema {self._schema} is open read-only; nothing was written")
        if self._presence is not None:
            # Refused at once, instead of waiting behind a statement that gets no answer.
            self._presence.check()
        return self._writer.submit(job)

    async def _change(
        self,
        apply: Callable[[PostgresWriter], T],
        size: int = 0,
        *,
        changed: str | None = None,
    ) -> T:
        from .writer import Change  # noqa: PLC0415 - needs psycopg

        return await self._submit(Change(apply, size, changed=changed))

    async def _read(self, apply: Callable[[PostgresReader], T]) -> T:
        from .reader import Read  # noqa: PLC0415 - needs psycopg

        return await self._reader.do(Read(apply))

    def _refuse_if_search_is_off(self) -> None:
        if not self._is_searching:
            raise SearchIsOff(f"schema {self._schema}")

    def _connect(
        self, *, answer_s: float | None = None, before_wait: Callable[[], None] = _ignore
    ) -> BoundedConnection:
        from .connections import connect  # noqa: PLC0415 - needs psycopg

        return connect(
            self._conninfo,
            self._schema,
            is_read_only=self._is_read_only,
            tcp_timeout_s=min(self._tcp_timeout_s, answer_s or self._tcp_timeout_s),
            answer_s=answer_s or self._lease_s,
            ports=self._ports,
            before_wait=before_wait,
        )

    def _open_writer(self) -> Worker:
        from .connections import Link  # noqa: PLC0415 - needs psycopg
        from .schema import bring_up_to_date, refusal  # noqa: PLC0415 - needs psycopg
        from .writer import PostgresWriter  # noqa: PLC0415 - needs psycopg

        thread = self._writer
        presence = self._make_presence()
        connect = partial(self._connect, before_wait=thread.wake_callers)

        def connect_again() -> BoundedConnection:
            with ExitStack() as opened:
                connection = opened.enter_context(closing(connect()))
                presence.check_commits(connection)
                opened.pop_all()
            return connection

        with refusal(self._schema), ExitStack() as opened:
            connection = opened.enter_context(closing(connect()))
            bring_up_to_date(connection, self._schema, allow=connection.allow)
            connection.begin_job()
            presence.register(connection)
            presence.start()
            opened.pop_all()
        if not thread.is_hung:  # else it is late, and the journal may have been entered again
            self._presence = presence
        # Checked after that: it may have been given up just now, and left without this presence.
        if thread.is_hung:
            presence.stop()
        return PostgresWriter(
            Link(connect_again, connection, self._ports.monotonic),
            presence,
            schema=self._schema,
            ports=self._ports,
            failpoint=self._failpoint,
            on_demoted=self._leave_demoted_server,
            on_commit=self._show_own,
            tails_max=self._active_conversations_max,
            rejection_age_s_max=self._rejection_age_s_max,
        )

    def _open_indexer(self) -> Worker:
        from .schema import refusal  # noqa: PLC0415 - needs psycopg
        from .search import PostgresIndexer, start_search  # noqa: PLC0415 - needs psycopg

        with refusal(self._schema):
            with self._connect() as connection:
                start_search(connection, self._schema)
            return PostgresIndexer(
                self._connect,
                schema=self._schema,
                ports=self._ports,
                failpoint=self._failpoint,
            )

    def _make_presence(self) -> Presence:
        from .presence import RENEWALS_PER_LEASE, Presence  # noqa: PLC0415 - needs psycopg

        return Presence(
            # A renewal that is not answered is sent again on another connection in time.
            partial(self._connect, answer_s=self._lease_s / RENEWALS_PER_LEASE),
            node=self._ports.random.getrandbits(62),
            address=self._address or process_name(),
            lease_s=self._lease_s,
            ports=self._ports,
            on_notify=self._hear,
            on_lease_loss=partial(self._call_in_loop, self._tell_lease_loss),
            on_demoted=self._leave_demoted_server,
            on_ended=partial(self._call_in_loop, partial(self._presence_ended.set, None)),
        )

    def _show_own(self, names: Collection[str]) -> None:
        """Wake readers here that wait for one of these logs. Called in the writing thread."""
        if self._watch.is_awaited:
            self._hear({mark_of(name) for name in names})

    def _hear(self, marks: Collection[int] | None) -> None:
        """Wake readers here that wait for a log with one of these marks; None: for any log.

        Called in the threads. No reader here waits for most commits, so these wake no event loop.
        """
        if marks is None or self._watch.awaits(marks):
            self._call_in_loop(partial(self._watch.call, marks))

    def _tell_lease_loss(self) -> None:
        self._on_lease_loss()

    def _leave_demoted_server(self) -> None:
        """Make the reader connect again; called by the writing threads, which notice a failover."""
        if self._reading is not None and not self._is_read_only:
            self._reading.leave_server()

    def _open_reader(self) -> Worker:
        from .reader import PostgresReader  # noqa: PLC0415 - needs psycopg
        from .schema import check_version, refusal  # noqa: PLC0415 - needs psycopg

        with refusal(self._schema):
            if self._is_read_only:
                with self._connect() as connection:
                    check_version(connection, self._schema)
            node = -1 if self._presence is None else self._presence.node
            self._reading = PostgresReader(self._connect, self._ports.monotonic, node, self._schema)
            return self._reading
