"""Writes to PostgreSQL: one statement for the waiting appends of all conversations.

The writer owns the writing connection and runs in one thread. A group of appends is one autocommit
statement that moves the tails and inserts the events. The statement itself checks the owner, epoch
and head of each conversation, so a suspended process holds no transaction. The statement skips a
conversation if its tail is not as expected; the writer then tries that conversation's appends one
by one. If a log already has one of the ids, it tries the whole group one by one. The claims of a
group are one statement too, and so are its releases.

The presence notifies other processes' readers after the commit, since a transaction that notifies
holds a lock of the whole server while it waits for the disk.

The tails kept in memory are hints, which the statement checks. If the server reports an error,
nothing was written. If the connection broke, the outcome is unknown; the next group makes a new
connection, or is refused at once while none can be made.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, product
from operator import attrgetter
from typing import Any, TypeVar, cast

import psycopg
from psycopg.rows import TupleRow
from psycopg.types.numeric import Int8

from turnkeeper.runtime import InvariantViolation, Ports, TurnkeeperError

from ...errors import (
    ConversationDeleted,
    ConversationExists,
    ConversationNotFound,
    CorruptLog,
    EventIdConflict,
    Fenced,
    JournalOutcomeUnknown,
    JournalUnavailable,
    OwnedElsewhere,
    RecordNotFound,
)
from ...journal import Claim, Listing, Record, Rejection, Snapshot
from ..shared.append_rules import (
    REJECTIONS_DROPPED_MAX,
    Append,
    check_append,
    check_deletion,
    check_epoch,
    check_ids,
    check_place,
    check_snapshot_epoch,
    telling_seq,
)
from ..shared.job_thread import Job
from ..shared.list_pages import bare_listing
from ..shared.record_chain import logs_of, next_mark, seal
from ..shared.searching import SEARCHED_KINDS
from .connections import BoundedConnection, Link, Numbers, Payloads
from .listings import (
    LISTED,
    LISTINGS_BETWEEN,
    RECENT,
    RECENT_RETURNED,
    RECENT_VALUE,
    erase_listing,
    fold_listings,
    listed_parameters,
    read_listing,
    store_listing,
    text_array,
)
from .log import (
    RECORDS_OF,
    TAIL,
    Tail,
    empty_tail,
    find_ids,
    find_mark,
    has_records,
    read_tail,
    refuse_if_lost,
    tail_of_row,
    with_prefix,
)
from .presence import Presence
from .schema import UNENCODABLE, schema_number, unencodable
from .search import ALL_QUEUED, QUEUED, erase_words, move_owner

T = TypeVar("T")
J = TypeVar("J", bound=Job[Any])

_RACES_MAX = 3
# While jobs wait, this many times more listings are written before the recent ones are counted.
_BUSY_FACTOR = 4


# How many other processes listen for commits.
_LISTENERS = """
    (
        SELECT count(*) FROM node
        WHERE is_listening AND id <> %(node)s AND lease_until > clock_timestamp()
    )
"""


_number_of, _epoch_of, _head_of, _tip_of = map(attrgetter, ("number", "epoch", "head", "tip"))
_is_unfinished = attrgetter("is_unfinished")
_kind_of = attrgetter("kind")
_SEARCHED = frozenset(SEARCHED_KINDS)


# True of every row. PostgreSQL takes it for selective, so it looks each conversation up by its id,
# whatever it knows of the table, and keeps that plan. Without it, a plan was made anew for each
# small group, which took as long as all the rest of the statement.
_PLAUSIBLE = "m.id > 0 AND m.epoch > 0 AND m.head > m.head_before"


# If one event waits alone. Without arrays, the server takes two thirds of the time for it.
_ONE = """
        WITH moved AS (
            UPDATE conversation c SET
                head = %(seq)b, tip = %(mark)b, is_unfinished = %(is_unfinished)b,
                updated_us = greatest(c.updated_us, %(now_us)s)
            WHERE c.id = %(id)b AND c.owner = %(node)s AND c.epoch = %(epoch)b
                AND c.head = %(seq)b - 1
            RETURNING c.id, c.log
        ), written AS (
            INSERT INTO event (log, seq, epoch, event_id, kind, message_id, mark, payload)
            SELECT log, %(seq)b, %(epoch)b, %(event_id)s::text, %(kind)s::text,
                %(message_id)s::text, %(mark)b, %(payload)b
            FROM moved
        )
"""
_UNFINISHED = "unnest(%(unfinished)b::bigint[]) AS is_unfinished"
_RETURNED = "RETURNING c.id, c.log"
# Arrays of one length are unnested side by side where columns are selected. In a FROM, PostgreSQL
# would first copy each of them into a table of its own.
_MANY = f"""
        WITH moving AS (
            SELECT unnest(%(ids)b::bigint[]) AS id, unnest(%(epochs)b::bigint[]) AS epoch,
                unnest(%(heads_before)b::bigint[]) AS head_before,
                unnest(%(heads)b::bigint[]) AS head, unnest(%(tips)b::bigint[]) AS tip,
                {_UNFINISHED}
        ), moved AS (
            UPDATE conversation c SET
                head = m.head, tip = m.tip, is_unfinished = (m.is_unfinished = 1),
                updated_us = greatest(c.updated_us, %(now_us)s)
            FROM moving m
            WHERE c.id = m.id AND c.owner = %(node)s AND c.epoch = m.epoch
                AND c.head = m.head_before AND {_PLAUSIBLE}
            RETURNING c.id, c.log
        ), written AS (
            INSERT INTO event (log, seq, epoch, event_id, kind, message_id, mark, payload)
            SELECT e.* FROM (
                SELECT unnest(%(logs)b::bigint[]) AS log, unnest(%(seqs)b::bigint[]),
                    unnest(%(event_epochs)b::bigint[]), unnest(%(event_ids)s::text[]),
                    unnest(%(kinds)s::text[]), unnest(%(message_ids)s::text[]),
                    unnest(%(marks)b::bigint[]), unnest(%(payloads)b::bytea[])
            ) AS e
            WHERE e.log IN (SELECT log FROM moved)
        )
"""  # noqa: S608 - our own text
# If all conversations have moved, as nearly always, the writer knows which they are.
_NOT_ALL = "CASE WHEN count(*) < cardinality(%(ids)b::bigint[]) THEN array_agg(id) END"


def _append_text(*, is_one: bool, is_recent: bool, is_listed: bool, is_said: bool) -> bytes:
    """Return the statement of an append: with listings of the two kinds, with searched messages."""
    begun, queued, not_all = (_ONE, ALL_QUEUED, "NULL") if is_one else (_MANY, QUEUED, _NOT_ALL)
    if is_recent and is_one:
        begun = begun.replace(_RETURNED, f"{_RETURNED}, c.name, 1 AS r_place")
    elif is_recent:
        begun = begun.replace(_UNFINISHED, _UNFINISHED + RECENT_VALUE)
        begun = begun.replace(_RETURNED, _RETURNED + RECENT_RETURNED)
    return f"""
        {begun}
        {RECENT if is_recent else ""}
        {LISTED if is_listed else ""}
        {queued if is_said else ""}
        SELECT count(*), {not_all}, {_LISTENERS} FROM moved
    """.encode()  # noqa: S608 - our own text


_APPENDS = {
    (is_one, is_recent, is_listed, is_said): _append_text(
        is_one=is_one, is_recent=is_recent, is_listed=is_listed, is_said=is_said
    )
    for is_one, is_recent, is_listed, is_said in product((False, True), repeat=4)
}

# A conversation that another process owns is found by reading first: locking its row would be a
# write and a flush. The insert decides, as the owner may have changed meanwhile. Rows are never
# removed. So if there are records without a row, it is lost: a new one would be of an empty log.
_CLAIM = f"""
    WITH ENDED asked AS (
        SELECT * FROM unnest(
            %(names)b::text[], %(logs)b::bigint[], %(tips)b::bigint[], %(all_logs)b::text[]
        ) AS n(name, log, tip, all_logs)
    ), elsewhere AS (
        SELECT c.name, node.address FROM asked JOIN conversation c USING (name)
        JOIN node ON node.id = c.owner
        WHERE NOT %(takeover)s AND c.owner <> %(node)s AND node.lease_until > clock_timestamp()
    ), claimed AS (
        INSERT INTO conversation AS c (name, incarnation, log, owner, epoch, head, tip, forked_at,
                                       is_unfinished, updated_us)
        SELECT n.name, 0, n.log, %(node)s, 1, 0, n.tip, 0, false, %(now_us)s
        FROM asked n WHERE n.name NOT IN (SELECT name FROM elsewhere) AND (
            EXISTS (SELECT FROM conversation f WHERE f.name = n.name)
            OR NOT EXISTS (SELECT {RECORDS_OF.format("n.all_logs::bigint[]")})
        )
        ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, epoch = c.epoch + 1
        WHERE %(takeover)s OR c.owner IS NULL OR c.owner = excluded.owner OR NOT EXISTS (
            SELECT FROM node WHERE node.id = c.owner AND node.lease_until > clock_timestamp()
        )
        RETURNING {TAIL}
    )
    SELECT {TAIL}, e.name, e.address FROM claimed c FULL JOIN elsewhere e ON e.name = c.name
"""  # noqa: S608 - our own text
# The lease ends for all conversations of their owners, which find out with their next renewal.
_ENDED = """ended AS (
        DELETE FROM node WHERE id <> %(node)s AND id IN (
            SELECT owner FROM conversation WHERE name = ANY(%(names)b::text[])
        )
    ),"""
_CLAIMS = {
    takeover: _CLAIM.replace("ENDED", _ENDED if takeover else "").encode()
    for takeover in (False, True)
}


# Locked in the order of the names, as claims are: two processes never wait for each other. Claims
# are sorted here, by code points, and the database may have the rules of a language.
_RELEASE = b"""
    WITH released AS (
        SELECT c.id FROM unnest(%(names)s::text[], %(epochs)s::bigint[]) AS r(name, epoch)
        JOIN conversation c USING (name)
        WHERE c.epoch = r.epoch AND c.owner = %(node)s
        ORDER BY name COLLATE "C" FOR UPDATE OF c
    )
    UPDATE conversation c SET owner = NULL FROM released WHERE c.id = released.id
"""


# A deletion by another process waits for this transaction, or this one sees it. Else what it writes
# beside the log could come after the deletion, and would stay.
_AGAINST_DELETION = "FOR KEY SHARE"
# So does a claim, which a lock on the key alone would let pass.
_AGAINST_CLAIMS = "FOR SHARE"

_ERASED_MAX = 1_000
_ERASED_BYTES = 8 << 20
_ERASURES_LOOK_S = 10.0

_NEXT_ERASURE = """
    SELECT log, pg_try_advisory_xact_lock(%s) FROM (SELECT log FROM erasure LIMIT 1) AS next
"""
_DROP_REJECTIONS = """
    DELETE FROM rejection WHERE id IN (SELECT id FROM rejection WHERE log = %s LIMIT %s)
"""
# The newest records first, and at least one, however large it is.
_DROP_EVENTS = """
    DELETE FROM event WHERE log = %(log)s AND seq IN (
        SELECT seq FROM (
            SELECT seq, sum(size) OVER (ORDER BY seq DESC) - size AS before FROM (
                SELECT seq, pg_column_size(payload) AS size FROM event
                WHERE log = %(log)s AND seq > %(kept)s ORDER BY seq DESC LIMIT %(records)s
            ) AS newest
        ) AS summed WHERE before < %(bytes)s
    )
"""


class Claiming(Job[Claim]):
    """A claim of one conversation."""

    __slots__ = ("conversation_id", "takeover")

    def __init__(self, conversation_id: str, *, takeover: bool) -> None:
        super().__init__()
        self.conversation_id = conversation_id
        self.takeover = takeover


class Releasing(Job[None]):
    """A release of one conversation."""

    __slots__ = ("conversation_id", "epoch")

    def __init__(self, conversation_id: str, *, epoch: int) -> None:
        super().__init__()
        self.conversation_id = conversation_id
        self.epoch = epoch


class Change(Job[T]):
    """Any other write, in a separate transaction."""

    __slots__ = ("apply", "changed")

    def __init__(
        self, apply: Callable[[PostgresWriter], T], size: int = 0, *, changed: str | None = None
    ) -> None:
        """`changed` is the name of the conversation whose log the write changes, if it does."""
        super().__init__(1, size)
        self.apply = apply
        self.changed = changed


class PostgresWriter:
    """A `Worker`: does `Append`, `Claiming`, `Releasing` and `Change` jobs on one connection."""

    def __init__(
        self,
        link: Link,
        presence: Presence,
        *,
        schema: str,
        ports: Ports,
        failpoint: Callable[[str], None],
        on_demoted: Callable[[], None],
        on_commit: Callable[[Collection[str]], None],
        tails_max: int,
        rejection_age_s_max: float,
    ) -> None:
        """Take over the connection.

        `on_demoted` is called when the server turns out to accept no writes any more; `on_commit`
        is called after a commit, with the names of the conversations whose logs have changed.
        """
        self._link = link
        self._presence = presence
        self._on_demoted = on_demoted
        self._on_commit = on_commit
        self._schema = schema
        self._node = presence.node
        self._ports = ports
        self._failpoint = failpoint
        self._tails_max = tails_max
        self._rejection_age_s_max = rejection_age_s_max
        self._tails: OrderedDict[str, Tail] = OrderedDict()
        # The conversations whose listings it has written since it last counted the recent ones.
        self._listed: set[int] = set()
        self.now_us = 0
        self._erases_at = -math.inf
        self._is_connected = False
        """True once there was a connection for the current group."""

    @property
    def connection(self) -> BoundedConnection:
        """The connection of the current job."""
        return self._link.connection

    def close(self) -> None:
        self.connection.close()

    def rest(self) -> float | None:
        """Fold recent listings, and look for deletions that were not completed."""
        self._is_connected = False
        if len(self._listed) >= LISTINGS_BETWEEN:
            self._fold_listings()
        self._erase_more()
        return max(0.0, self._erases_at - self._ports.monotonic())

    def work(self, jobs: Sequence[Job[object]]) -> None:
        self._is_connected = False
        self.now_us = int(self._ports.now() * 1_000_000)
        self._erase_more()
        if len(self._listed) >= _BUSY_FACTOR * LISTINGS_BETWEEN:
            self._fold_listings()  # there is no time to rest
        for kind, some in groupby(jobs, type):
            group = list(some)
            if kind is Append:
                self._append_together(cast("list[Append]", group))
            elif kind is Claiming:
                self._claim_together(cast("list[Claiming]", group))
            elif kind is Releasing:
                released = cast("list[Releasing]", group)
                self._answer(released, partial(self._in_one, released, self._release_many))
            else:
                for job in group:
                    self._answer([job], partial(self._change, job))
        while len(self._tails) > self._tails_max:
            self._tails.popitem(last=False)

    def _answer(self, jobs: Sequence[Job[Any]], act: Callable[[], None]) -> None:
        """Call `act`; if it raises, refuse these jobs with the error for their callers."""
        try:
            # The lease may have run out while they waited for their turn.
            self._presence.check()
            self._connect_once()
            act()
        except UNENCODABLE as error:
            for job in jobs:
                job.refuse(unencodable(error))
        except psycopg.Error as error:
            self._tails.clear()
            # A server that answers with an error has undone the statement. If the connection
            # broke instead, the outcome is unknown.
            is_known = not self.connection.closed
            for job in jobs:
                job.refuse(_outcome(error, is_known=is_known))
            if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
                self.connection.close()  # the next job connects to the new primary
                self._on_demoted()
        except TurnkeeperError as error:
            for job in jobs:
                job.refuse(error)
        except OSError as error:
            # Raised by a failpoint instead of the connection.
            self.connection.close()
            self._tails.clear()
            for job in jobs:
                job.refuse(_outcome(error, is_known=False))
        except Exception as error:  # noqa: BLE001 - handed to the callers
            for job in jobs:
                job.refuse(_bug(error))

    def _connect_once(self) -> None:
        """Ensure a connection for the whole group, with the bound of one job.

        Raises `JournalUnavailable` if the connection was lost earlier in this group, so that no
        caller waits for more than two unanswered statements: one of the group before, one of its
        own.
        """
        if not self._is_connected:
            self._link.begin_job()
            self._is_connected = True
        elif self.connection.closed:
            raise JournalUnavailable(
                "the connection was lost in the statement before; nothing was written; try again"
            )

    # --- appends ----------------------------------------------------------------------------------

    def _append_together(self, jobs: Sequence[Append]) -> None:
        alone: list[Append] = []
        self._answer(jobs, lambda: alone.extend(self._append_many(jobs)))
        for job in alone:
            self._answer([job], partial(self._append_alone, job))

    def _append_many(self, jobs: Sequence[Append]) -> list[Append]:
        """Append in one statement; return the appends that must be tried one by one."""
        # Not as a difference of sets: that would pass over all tails, one for each conversation.
        self._load({one for job in jobs if (one := job.conversation_id) not in self._tails})
        statement = self._statement()
        alone: list[Append] = []
        names_alone: set[str] = set()
        for job in jobs:
            name = job.conversation_id
            tail = self._tails.get(name)
            if (
                tail is not None
                and job.epoch == tail.epoch
                and job.expected_seq == tail.head + 1
                and name not in names_alone
                and not (tail.prefix and any(self._known(tail, job.records)))
            ):
                try:
                    statement.add(tail, job)
                    self._tails.move_to_end(name)  # the least recently used one is dropped first
                    continue
                except (TypeError, ValueError):
                    self._tails.pop(name)  # raised again when it is tried alone
            alone.append(job)
            names_alone.add(name)  # those behind it stay behind it
        # If it fails, trying one by one finds the append at fault.
        with suppress(psycopg.IntegrityError, *UNENCODABLE):
            statement.run(self.connection.kept_cursor, self._failpoint)
        self._tell(statement)
        left = statement.left
        for job in left:
            self._tails.pop(job.conversation_id, None)
        return [*left, *alone]

    def _append_alone(self, job: Append) -> None:
        """Do one append; raise the exact reason if it is refused."""
        name = job.conversation_id
        self._tails.pop(name, None)
        for _ in range(_RACES_MAX):
            tail = read_tail(self.connection, name)
            events, messages = self._known(tail, job.records) if tail else ({}, {})
            if tail and has_records(self.connection, tail, job.records, events):
                job.settle([events[record.event_id] for record in job.records])
                self._tell_of([name])  # the first time its connection may have been lost
                return
            if tail:
                self._check_owner(tail, job.epoch, job.expected_seq)
            check_append(
                name,
                job.records,
                epoch=job.epoch,
                expected_seq=job.expected_seq,
                found_epoch=tail.epoch if tail else 0,
                head=tail.head if tail else 0,
                known_events=events,
                known_messages=messages,
            )
            assert tail is not None, "an epoch that was never claimed was not fenced"
            statement = self._statement()
            statement.add(tail, job)
            try:
                if statement.run(self.connection.kept_cursor, self._failpoint):
                    self._tell(statement)
                    self._tails[name] = tail
                    return
            except psycopg.errors.UniqueViolation:
                continue  # another process wrote it just now
        raise JournalUnavailable(
            f"append to conversation {name} lost {_RACES_MAX} races; nothing was written; try again"
        )

    def _statement(self) -> _Statement:
        return _Statement(self._node, self.now_us)

    def _tell(self, statement: _Statement) -> None:
        """Wake the readers of the logs that this statement changed, here and in other processes."""
        self._listed.update(statement.listed)
        if statement.newest is not None:
            self._presence.note_commit(statement.newest)
            self._tell_of(statement.moved, statement.listeners)

    def _tell_of(self, names: Collection[str], listeners: int = 1) -> None:
        self._on_commit(names)
        if listeners:
            self._presence.tell(names, listeners)

    def _known(
        self, tail: Tail, records: Sequence[Record]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return the seqs of those event ids and message ids of the records that the log has."""
        events = [record.event_id for record in records]
        messages = [record.message_id for record in records if record.message_id is not None]
        return (
            find_ids(self.connection, "event_id", tail, events),
            find_ids(self.connection, "message_id", tail, messages),
        )

    def _load(self, names: set[str]) -> None:
        if not names:
            return
        try:
            rows = self.connection.execute(
                f"SELECT {TAIL} FROM conversation c WHERE name = ANY(%s)".encode(),  # noqa: S608 - as above
                (sorted(names),),
            ).fetchall()
        except UNENCODABLE:
            return  # PostgreSQL has no text for one of the names; each append is tried alone
        for row in rows:
            tail = tail_of_row(row)
            with suppress(CorruptLog):  # its appends are tried alone, which raises it again
                self._tails[tail.name] = with_prefix(self.connection, tail)

    def _in_one(self, jobs: Sequence[J], act: Callable[[Sequence[J]], None]) -> None:
        """Do these jobs together, or one by one if PostgreSQL has no text for a name among them."""
        try:
            act(jobs)
        except UNENCODABLE:
            if len(jobs) == 1:
                raise
            for job in jobs:
                self._answer([job], partial(act, [job]))

    # --- claims -----------------------------------------------------------------------------------

    def _claim_together(self, jobs: Sequence[Claiming]) -> None:
        for some in _rounds(jobs):
            self._answer(some, partial(self._in_one, some, self._claim_many))

    def _claim_many(self, jobs: Sequence[Claiming]) -> None:
        # Sorted by name, so that two processes never wait for each other.
        empty = [empty_tail(name, 0) for name in sorted(job.conversation_id for job in jobs)]
        takeover = jobs[0].takeover
        values = {
            "node": self._node,
            "now_us": self.now_us,
            "takeover": takeover,
            "names": [tail.name for tail in empty],
            "logs": Numbers(tail.log for tail in empty),
            "tips": Numbers(tail.tip for tail in empty),
            "all_logs": [f"{{{','.join(map(str, logs_of(tail.name)))}}}" for tail in empty],
        }
        self._failpoint("begin")
        rows = self._claim_rows(_CLAIMS[takeover], values)
        self._failpoint("committed")
        tails = {row[1]: tail_of_row(row) for *row, _, address in rows if address is None}
        if tails:
            self._presence.note_commit(next(iter(tails.values())))
        addresses = {name: address for *_, name, address in rows}
        for job in jobs:
            name = job.conversation_id
            tail = tails.get(name)
            try:
                if tail is None:
                    owner = addresses.get(name) or self._owner_of(name)
                    job.refuse(OwnedElsewhere(f"conversation {name}", owner))
                else:
                    self._tails[name] = with_prefix(self.connection, tail)
                    job.settle(Claim(tail.epoch, tail.head))
            except CorruptLog as error:
                job.refuse(error)  # the other conversations of the group are whole

    def _claim_rows(self, statement: bytes, values: Mapping[str, object]) -> list[TupleRow]:
        """Run the statement of a claim, again if another process began one of its conversations."""
        for _ in range(_RACES_MAX - 1):
            with suppress(psycopg.errors.UniqueViolation):
                return self.connection.execute(statement, values).fetchall()
            # The other process began it after this one had looked for its name, so its log
            # collides. The next look finds the name.
        return self.connection.execute(statement, values).fetchall()

    def _owner_of(self, name: str) -> str:
        """Return the address of the process that claimed a conversation just before this one.

        Raises `CorruptLog` if there is none, since the conversation's row is lost.
        """
        row = self.connection.execute(
            "SELECT node.address FROM conversation c JOIN node ON node.id = c.owner "
            "WHERE c.name = %s AND node.lease_until > clock_timestamp()",
            (name,),
        ).fetchone()
        if row is None:
            read_tail(self.connection, name)
        return str(row[0]) if row else "another process"

    # --- releases ---------------------------------------------------------------------------------

    def _release_many(self, jobs: Sequence[Releasing]) -> None:
        """Let other processes claim these conversations at once.

        Together, since a process that leaves releases thousands, and must not outlast its grace.
        """
        # PostgreSQL has no others, and would refuse the statement of all because of one.
        some = [job for job in jobs if "\0" not in job.conversation_id and 0 < job.epoch < 1 << 63]
        self._failpoint("begin")
        self.connection.execute(
            _RELEASE,
            {
                "names": [job.conversation_id for job in some],
                "epochs": [job.epoch for job in some],
                "node": self._node,
            },
        )
        self._failpoint("committed")
        for job in jobs:
            job.settle(None)

    # --- everything else --------------------------------------------------------------------------

    def _change(self, job: Job[object]) -> None:
        change = cast("Change[object]", job)
        self._failpoint("begin")
        with self.connection.transaction():
            value = change.apply(self)
            self._failpoint("commit")
        if self.connection.closed:
            # psycopg does not raise when it leaves a transaction whose connection is gone.
            raise psycopg.OperationalError("the connection was closed before the commit")
        self._failpoint("committed")
        job.settle(value)
        if change.changed is not None:
            self._tell_of([change.changed])

    def reject(self, name: str, rejections: Sequence[Rejection], epoch: int) -> None:
        tail = read_tail(self.connection, name, and_lock=_AGAINST_CLAIMS)
        if tail is None:
            raise Fenced(name, epoch=epoch, expected_seq=1, found_epoch=0, head=0)
        self._check_owner(tail, epoch, tail.head + 1)
        check_epoch(name, epoch=epoch, found_epoch=tail.epoch, head=tail.head)
        oldest = self.now_us / 1_000_000 - self._rejection_age_s_max
        self.connection.execute(
            "DELETE FROM rejection WHERE id IN "
            "(SELECT id FROM rejection WHERE at < %s ORDER BY at LIMIT %s)",
            (oldest, REJECTIONS_DROPPED_MAX + len(rejections)),
        )
        for rejection in rejections:
            self.connection.execute(
                "INSERT INTO rejection (log, at, violation, reason, payload) "
                "VALUES (%s, %s, %s, %s, %b)",
                (tail.log, rejection.at, rejection.violation, rejection.reason, rejection.payload),
            )

    def write_snapshot(self, name: str, snapshot: Snapshot, epoch: int) -> None:
        """Store a snapshot with the mark of the record at its seq, which ties it to this log."""
        tail = read_tail(self.connection, name, and_lock=_AGAINST_DELETION)
        if tail is None or not tail.head:
            raise ConversationNotFound(name)
        self._check_owner(tail, epoch, snapshot.seq)
        check_place(
            "snapshot", name, snapshot.seq, epoch=epoch, found_epoch=tail.epoch, head=tail.head
        )
        mark = find_mark(self.connection, tail, snapshot.seq)
        if mark is None:
            raise CorruptLog(name, snapshot.seq, "the record is missing")
        self._check_log(tail, snapshot.seq, epoch)
        facts = (tail.log, snapshot.seq, snapshot.version, mark)
        self.connection.execute(
            "INSERT INTO snapshot VALUES (%s, %s, %s, %s, %b, %s) ON CONFLICT (log) DO UPDATE SET "
            "seq = excluded.seq, version = excluded.version, tip = excluded.tip, "
            "payload = excluded.payload, seal = excluded.seal",
            (*facts, snapshot.payload, seal(*facts, content=snapshot.payload)),
        )

    def write_listing(self, name: str, listing: Listing, epoch: int) -> None:
        """Write a listing, unless the one in the database is newer."""
        tail = read_tail(self.connection, name, and_lock="FOR UPDATE")
        if tail is None or not tail.head:
            raise ConversationNotFound(name)
        check_place(
            "listing", name, listing.seq, epoch=epoch, found_epoch=tail.epoch, head=tail.head
        )
        self._check_log(tail, listing.seq, epoch)
        found = read_listing(self.connection, tail.number)
        if found is None or found.seq <= listing.seq:
            store_listing(self.connection, tail.number, name, listing)
            if (known := self._tails.get(name)) is not None:
                known.listed = None
            move_owner(self.connection, tail.log)

    def _check_owner(self, tail: Tail, epoch: int, seq: int) -> None:
        """Raise `Fenced` if this epoch was released, or another process has it.

        A standby that is promoted without the newest claims gives their epochs out again.
        """
        if tail.epoch == epoch and tail.owner != self._node:
            row = self.connection.execute(
                "SELECT address FROM node WHERE id = %s", (tail.owner,)
            ).fetchone()
            gone = "" if tail.owner is None else "another process"
            raise Fenced(
                tail.name,
                epoch=epoch,
                expected_seq=seq,
                found_epoch=epoch,
                head=tail.head,
                holder=row[0] if row else gone,
            )

    def _check_log(self, tail: Tail, seq: int, epoch: int) -> None:
        """Raise `Fenced` if what was folded up to `seq` was folded from an earlier log."""
        place = telling_seq(seq, forked_at=tail.forked_at, head=tail.head)
        row = self.connection.execute(
            "SELECT epoch FROM event WHERE log = %s AND seq = %s", (tail.log_of(place), place)
        ).fetchone()
        if row is None:
            raise CorruptLog(tail.name, place, "the record is missing")
        check_snapshot_epoch(tail.name, seq, epoch=epoch, found_epoch=row[0], head=tail.head)

    def fork(
        self,
        name: str,
        fork_name: str,
        at: int,
        records: Sequence[Record],
        *,
        is_unfinished: bool,
        at_event_id: str | None,
        listing: Listing | None,
    ) -> Claim:
        """Begin a conversation with the records of another up to `at`."""
        self._lock()
        parent = read_tail(self.connection, name)
        if parent is None or not parent.head:
            raise ConversationNotFound(name)
        mark = find_mark(self.connection, parent, at)
        if mark is None:
            raise RecordNotFound(name, at, parent.head)
        if at_event_id is not None:
            ids = find_ids(self.connection, "event_id", parent, [at_event_id])
            if ids.get(at_event_id) != at:
                raise ConversationDeleted(name)
        prefix = tuple((log, below) for log, _, below in parent.parts(0, at))
        child = self._lock_row(fork_name)
        if child.head:
            events, _ = self._known(child, records)
            places = {record.event_id: seq for seq, record in enumerate(records, at + 1)}
            if (child.prefix, events) == (prefix, places) and has_records(
                self.connection, child, records, events
            ):
                return Claim(child.epoch, child.head)  # sent again
            raise ConversationExists(fork_name, child.head)
        # Above its parent's epoch too, so that epochs never fall within a log.
        child.epoch = max(child.epoch, parent.epoch) + 1
        child.head = child.forked_at = at
        child.tip = mark
        child.prefix = prefix
        self._store(child)
        self.connection.execute(
            "INSERT INTO fork VALUES (%s, %s, %s)", (child.log, parent.log_of(at), at)
        )
        events, messages = self._known(child, records)
        if events:
            raise EventIdConflict(fork_name, events)
        check_ids(fork_name, records, at + 1, messages)
        statement = self._statement()
        statement.add(
            child,
            Append(
                fork_name,
                records,
                epoch=child.epoch,
                expected_seq=at + 1,
                is_unfinished=is_unfinished,
                listing=listing,
            ),
        )
        statement.run(self.connection.kept_cursor, lambda _: None)
        self._tails.pop(fork_name, None)
        return Claim(child.epoch, child.head)

    def delete(self, name: str, epoch: int) -> tuple[int, Sequence[str], int]:
        """Delete a conversation; return how many records stay, for which forks, and its log.

        From now on the log's records cannot be reached; `erase_slice` has to remove them.
        """
        self._lock()
        tail = read_tail(self.connection, name, and_lock="FOR UPDATE")
        if tail is None:
            raise ConversationNotFound(name)
        self._check_owner(tail, epoch, tail.head + 1)
        check_deletion(name, epoch=epoch, found_epoch=tail.epoch, head=tail.head)
        self._tails.pop(name, None)
        forks = [
            row[0]
            for row in self.connection.execute(
                """
                WITH RECURSIVE descendant AS (
                    SELECT log FROM fork WHERE parent = %s
                    UNION SELECT f.log FROM fork f JOIN descendant d ON f.parent = d.log
                )
                SELECT name FROM conversation JOIN descendant USING (log)
                """,
                (tail.log,),
            )
        ]
        kept = self._needed(tail.log)
        self.connection.execute("DELETE FROM snapshot WHERE log = %s", (tail.log,))
        erase_listing(self.connection, tail.number)
        # A new conversation of this name begins above the epoch, with another log.
        rest = empty_tail(name, tail.incarnation + 1)
        rest.number, rest.epoch = tail.number, tail.epoch + 1
        self._store(rest)
        self._begin_erasure(tail.log)
        return kept, sorted(forks), tail.log

    def erase_slice(self, log: int) -> int | None:
        """Remove some records of a deleted log; return the log to go on with, or None at the end.

        The log to go on with is the same log, or its parent, if that was kept only for this fork.
        """
        self._lock()
        done = self.connection.execute(_DROP_REJECTIONS, (log, _ERASED_MAX)).rowcount
        done += erase_words(self.connection, log)
        kept = self._needed(log)
        done += self.connection.execute(
            _DROP_EVENTS, {"log": log, "kept": kept, "records": _ERASED_MAX, "bytes": _ERASED_BYTES}
        ).rowcount
        if done:
            return log
        self.connection.execute("DELETE FROM erasure WHERE log = %s", (log,))
        row = self.connection.execute("SELECT parent FROM fork WHERE log = %s", (log,)).fetchone()
        if kept or row is None:
            return None
        self.connection.execute("DELETE FROM fork WHERE log = %s", (log,))
        parent = int(row[0])
        lives = self.connection.execute("SELECT 1 FROM conversation WHERE log = %s", (parent,))
        if lives.fetchone() is not None:
            return None
        # The parent was deleted before, and was kept for this fork among others.
        self._begin_erasure(parent)
        return parent

    def _begin_erasure(self, log: int) -> None:
        self.connection.execute("INSERT INTO erasure VALUES (%s) ON CONFLICT DO NOTHING", (log,))

    def _erase_more(self) -> None:
        """Remove a slice of a deletion that was not completed, here or elsewhere.

        This runs before the jobs of a group: if it gets no answer, none of them has been sent. If
        another process forks or deletes just now, this one does not queue behind it.
        """
        if self._ports.monotonic() < self._erases_at:
            return
        job: Job[bool] = Job()

        def erase() -> None:
            with self.connection.transaction():
                row = self.connection.execute(
                    _NEXT_ERASURE, (schema_number(self._schema),)
                ).fetchone()
                if row is not None and row[1]:
                    self.erase_slice(row[0])
                    job.settle(True)

        # No caller waits for this job: after an error it is tried again later.
        self._answer([job], erase)
        if not job.settled:
            self._erases_at = self._ports.monotonic() + _ERASURES_LOOK_S

    def _fold_listings(self) -> None:
        def fold() -> None:
            with self.connection.transaction():
                fold_listings(self.connection)

        self._listed.clear()  # after an error, it is tried again when as many others are there
        self._answer([Job[None]()], fold)

    def _needed(self, log: int) -> int:
        """Return the highest seq of a log that a fork needs; 0 if none does."""
        row = self.connection.execute(
            "SELECT coalesce(max(seq), 0) FROM fork WHERE parent = %s", (log,)
        ).fetchone()
        return int(row[0]) if row else 0

    def _lock(self) -> None:
        """Serialize forks and deletions: they are rare, and read many logs."""
        self.connection.execute("SELECT pg_advisory_xact_lock(%s)", (schema_number(self._schema),))

    def _lock_row(self, name: str) -> Tail:
        """Read a conversation's row and lock it; make it first if there is none.

        A row that does not exist cannot be locked: another process might make it, and commit
        records, before this transaction writes it.
        """
        empty = empty_tail(name, 0)
        made = self.connection.execute(
            "INSERT INTO conversation (name, incarnation, log, epoch, head, tip, forked_at, "
            "is_unfinished, updated_us) VALUES (%s, 0, %s, 0, 0, %s, 0, false, %s) "
            "ON CONFLICT DO NOTHING",  # of name or log: a rival's row may collide by either
            (name, empty.log, empty.tip, self.now_us),
        )
        if made.rowcount:
            refuse_if_lost(self.connection, name)
        tail = read_tail(self.connection, name, and_lock="FOR UPDATE")
        assert tail is not None, "rows are never removed"
        return tail

    def _store(self, tail: Tail) -> None:
        """Write a conversation's row as given, owned by this process."""
        row = self.connection.execute(
            """
            INSERT INTO conversation (name, incarnation, log, owner, epoch, head, tip, forked_at,
                                      is_unfinished, updated_us)
            VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
            ON CONFLICT (name) DO UPDATE SET
                incarnation = excluded.incarnation, log = excluded.log, owner = excluded.owner,
                epoch = excluded.epoch, head = excluded.head, tip = excluded.tip,
                forked_at = excluded.forked_at, is_unfinished = excluded.is_unfinished,
                updated_us = excluded.updated_us
            RETURNING id
            """,
            (
                tail.name,
                tail.incarnation,
                tail.log,
                self._node,
                tail.epoch,
                tail.head,
                tail.tip,
                tail.forked_at,
                tail.is_unfinished,
                self.now_us,
            ),
        ).fetchone()
        assert row is not None
        tail.number = row[0]


def _rounds(jobs: Sequence[Claiming]) -> list[list[Claiming]]:
    """Split claims into rounds: each name at most once, all with the same `takeover`."""
    rounds: list[tuple[bool, dict[str, Claiming]]] = []
    for job in jobs:
        name = job.conversation_id
        if not rounds or rounds[-1][0] != job.takeover or name in rounds[-1][1]:
            rounds.append((job.takeover, {}))
        rounds[-1][1][name] = job
    return [list(some.values()) for _, some in rounds]


class _Statement:
    """The parameters of one append statement, gathered append by append."""

    def __init__(self, node: int, now_us: int) -> None:
        self._node = node
        self._now_us = now_us
        self.moved: Collection[str] = ()
        """After it was run: the names of the conversations that it has appended to."""
        self.newest: Tail | None = None
        """After it was run: the tail of one of these; None if there are none."""
        self.listeners = 0
        """After it was run: how many other processes listened."""
        # By conversation: the tail as the statement leaves it, and the head that it had before.
        self._tails: dict[str, Tail] = {}
        self._heads_before: dict[str, int] = {}
        self._appends: list[Append] = []
        # Of each new row of `event`: the log, the seq, the epoch and the mark; and the rest.
        self._places: list[tuple[int, int, int, int]] = []
        self._records: list[Record] = []
        self._listings: dict[int, Listing] = {}

    @property
    def listed(self) -> Iterable[int]:
        """The numbers of the conversations whose listings it writes."""
        return self._listings.keys()

    @property
    def left(self) -> Sequence[Append]:
        """After it was run, or has failed: the appends to the conversations it has not moved."""
        if len(self.moved) == len(self._tails):
            return ()
        return [job for job in self._appends if job.conversation_id not in self.moved]

    def add(self, tail: Tail, job: Append) -> None:
        """Add one append and move its tail on; raise if a record cannot be encoded."""
        log, seq, epoch, mark = tail.log, tail.head, tail.epoch, tail.tip
        before = seq
        places = []
        for event_id, kind, payload, message_id in job.records:
            seq += 1
            mark = next_mark(mark, seq, epoch, event_id, kind, message_id, payload)
            places.append((log, seq, epoch, mark))
        self._tails[tail.name] = tail
        self._heads_before.setdefault(tail.name, before)
        self._appends.append(job)
        self._records += job.records
        self._places += places
        job.settle(range(before + 1, seq + 1))
        tail.head, tail.tip = seq, mark
        tail.is_unfinished = job.is_unfinished
        if job.listing is not None:
            self._listings[tail.number] = job.listing
        elif job.expected_seq == tail.forked_at + 1:
            self._listings[tail.number] = bare_listing(self._now_us)

    def run(self, cursor: psycopg.Cursor[Any], failpoint: Callable[[str], None]) -> int:
        """Execute the statement; return how many conversations it has moved."""
        if not self._tails:
            return 0
        tails = list(self._tails.values())
        failpoint("begin")
        listed: dict[str, object] = {}
        is_recent = is_listed = False
        if self._listings:
            listings = [(tail, self._listings.get(tail.number)) for tail in tails]
            listed, is_recent, is_listed = listed_parameters(listings)
        is_one = len(self._records) == 1
        is_said = not _SEARCHED.isdisjoint(map(_kind_of, self._records))
        row = cursor.execute(
            _APPENDS[is_one, is_recent, is_listed, is_said],
            {
                **listed,
                "node": self._node,
                "now_us": self._now_us,
                **(self._one(tails[0]) if is_one else self._many(tails)),
            },
        ).fetchone()
        failpoint("committed")
        assert row is not None, "an aggregate has one row"
        count: int
        count, numbers, self.listeners = row
        if count == len(tails):
            self.moved = self._tails.keys()
            self.newest = tails[-1]
        elif count:
            some = set(numbers)
            appended = [tail for tail in tails if tail.number in some]
            self.moved = {tail.name for tail in appended}
            self.newest = appended[-1]
        return count

    def _one(self, tail: Tail) -> Mapping[str, object]:
        """Return the parameters of one event, always of the same types: it is prepared for them."""
        ((event_id, kind, payload, message_id),) = self._records
        return {
            "id": Int8(tail.number),
            "seq": Int8(tail.head),
            "epoch": Int8(tail.epoch),
            "event_id": event_id,
            "kind": kind,
            "message_id": message_id,
            "mark": Int8(tail.tip),
            "payload": payload,
            "is_unfinished": tail.is_unfinished,
        }

    def _many(self, tails: Sequence[Tail]) -> Mapping[str, object]:
        logs, seqs, epochs, marks = zip(*self._places, strict=True)
        event_ids, kinds, payloads, message_ids = zip(*self._records, strict=True)
        return {
            "ids": Numbers(map(_number_of, tails)),
            "epochs": Numbers(map(_epoch_of, tails)),
            "heads_before": Numbers(self._heads_before.values()),
            "heads": Numbers(map(_head_of, tails)),
            "tips": Numbers(map(_tip_of, tails)),
            "unfinished": Numbers(map(_is_unfinished, tails)),
            "logs": Numbers(logs),
            "seqs": Numbers(seqs),
            "event_epochs": Numbers(epochs),
            "event_ids": text_array(event_ids),
            "kinds": text_array(kinds),
            "message_ids": text_array(message_ids),
            "marks": Numbers(marks),
            "payloads": Payloads(payloads),
        }


def _bug(error: Exception) -> InvariantViolation:
    outcome = InvariantViolation(f"the journal cannot write for this call: {error!r}")
    outcome.__cause__ = error
    return outcome


def _outcome(error: Exception, *, is_known: bool) -> JournalUnavailable | JournalOutcomeUnknown:
    outcome: JournalUnavailable | JournalOutcomeUnknown
    if is_known:
        outcome = JournalUnavailable(
            f"write to the database failed: {error}; nothing was written; try again"
        )
    else:
        outcome = JournalOutcomeUnknown(
            f"the connection to the database broke: {error}; the write may have happened; "
            "send again under the same ids"
        )
    outcome.__cause__ = error
    return outcome
