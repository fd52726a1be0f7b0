"""A process's lease, and its LISTEN connection.

It owns the node's row, one connection, and one thread. The thread renews the row's lease three
times in each lease period. Rivals judge the lease by the database's clock. This process judges it
by its own monotonic clock, counted from before the renewal was sent and less a margin, so it stops
writing before a rival may take over. The lease is politeness: the epoch in every append makes two
writers impossible.

The thread is also the first to notice that the lease has run out, or had run out before it was
renewed, by either clock, and reports that. The lease also ends if a new connection finds that the
server lacks the newest commit of this process, as a standby does that was promoted without it. No
error ends the thread: it logs the error and connects again. If it does end, the lease ends with it,
and `check` says why.

The same connection listens for other processes' commits, once a reader here waits for one, and
notifies them of this process's commits. A notification names the conversations by marks of 32 bits,
so that a process wakes only their readers; an empty notification stands for all conversations.
Notifications are sent after the commits, at most one in `told_every_s`, whatever the number of
commits, because PostgreSQL wakes each listening process for each notification. That interval grows
with the number of listening processes, so that each hears at most 1,000 a second from all others
together. If a notification is lost, with this process or its connection, readers elsewhere find the
commits when they next poll.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from math import inf, nextafter
from typing import Any

import psycopg

from turnkeeper.runtime import Ports
from turnkeeper.runtime.lowlevel import Logger

from ...errors import JournalUnavailable
from ..shared.log_watch import mark_of
from .connections import BoundedConnection
from .log import Tail

_log = Logger("turnkeeper.actors.journals")

RENEWALS_PER_LEASE = 3
_MARGIN = 0.2
_RETRY_PAUSE_S_MIN = 0.1
_KEPT_NODES_S = 86_400
CHANNEL = "turnkeeper"
_UNDER_WAY_S = 1.0
"""A statement that began before this process was known to listen does not notify it. So all logs
are checked once more after this time."""
_TOLD_EVERY_S_MIN = 0.005
_TOLD_EVERY_S_A_LISTENER = 0.001
MARKS_MAX = 900
"""The most marks in a notification: PostgreSQL takes less than 8,000 bytes."""
_MARK_DIGITS = 8

# poll() has no limit on the number of a file, as select() has, and needs no file of its own.
_Selector: type[selectors.BaseSelector] = getattr(
    selectors, "PollSelector", selectors.DefaultSelector
)

RENEW = """
    WITH held AS (SELECT FROM node WHERE id = %(node)s AND lease_until > clock_timestamp())
    INSERT INTO node VALUES
        (%(node)s, %(address)s, clock_timestamp() + %(lease_s)s * interval '1 second', %(listens)s)
    ON CONFLICT (id) DO UPDATE SET
        lease_until = excluded.lease_until, is_listening = excluded.is_listening
    -- True if no rival could take over until now: the row was there, and is not a new one.
    RETURNING xmax <> 0 AND EXISTS (SELECT FROM held)
"""
# A row with another log is of a conversation that was deleted since, and its records are gone.
_HAS_COMMIT = """
    SELECT FROM conversation c WHERE c.id = %(number)s
        AND (c.epoch > %(epoch)s
            OR c.epoch = %(epoch)s AND coalesce(c.owner, %(node)s) = %(node)s)
        AND (c.log <> %(log)s OR %(head)s = 0
            OR EXISTS (SELECT FROM event WHERE log = c.log AND seq = %(head)s AND mark = %(tip)s))
"""
_RENEW_AT_ONCE = b"!"
_TELL = b"t"


def told_every_s(listeners: int) -> float:
    """Return the interval between notifications of a process if this many others listen."""
    return max(_TOLD_EVERY_S_MIN, _TOLD_EVERY_S_A_LISTENER * listeners)


def payload_of(marks: Collection[int]) -> str:
    """Return the text of a notification; it is empty if there are more marks than one can name."""
    return "" if len(marks) > MARKS_MAX else "".join(f"{mark:08x}" for mark in sorted(marks))


def marks_of(payload: str) -> Collection[int] | None:
    """Return the marks that a notification names; None stands for all conversations."""
    try:
        found = {
            int(payload[at : at + _MARK_DIGITS], 16) for at in range(0, len(payload), _MARK_DIGITS)
        }
    except ValueError:
        return None  # sent by a newer version
    return found or None


class Presence:
    """`start` starts its thread; every other method may be called from any thread."""

    def __init__(
        self,
        connect: Callable[[], BoundedConnection],
        *,
        node: int,
        address: str,
        lease_s: float,
        ports: Ports,
        on_notify: Callable[[Collection[int] | None], None],
        on_lease_loss: Callable[[], object],
        on_demoted: Callable[[], None],
        on_ended: Callable[[], object],
    ) -> None:
        """Set up without starting the thread, in which the callbacks are called.

        `check_commits` calls `on_lease_loss` and `on_demoted` in the thread of its caller, too.
        `on_notify`: another process may have written. `on_lease_loss`: the lease has run out, or
        had run out before it was renewed. `on_demoted`: the server no longer accepts writes.
        `on_ended`: the last call of the thread.
        """
        self._connect = connect
        self.node = node
        self._address = address
        self._lease_s = lease_s
        self._ports = ports
        self._on_notify = on_notify
        self._on_lease_loss = on_lease_loss
        self._on_demoted = on_demoted
        self._on_ended = on_ended
        # Written only by the presence thread, read by all threads: assigning a float is atomic.
        self._valid_until = 0.0
        self._unbroken_since = 0.0
        # Written by the writing and the presence thread, after a new connection was made.
        self._lost_at = 0.0
        self._newest: Mapping[str, int] | None = None
        self._asked_at = 0.0
        self._failure: BaseException | None = None
        self._is_loss_told = False
        self._retry_pause_s = _RETRY_PAUSE_S_MIN
        self._is_listening = False
        self._is_stopping = False
        self._has_ended = False
        # Added to by the writing thread, taken by this one; both hold the lock.
        self._untold: set[int] = set()
        self._untold_lock = threading.Lock()
        self._tell_at = 0.0
        self._listeners = 1
        self._look_again_at = inf

    def is_lease_valid(self, *, since: float | None = None) -> bool:
        """True if no rival may have taken over by now; with `since`, at any time since then."""
        is_valid = self._ports.monotonic() < self._valid_until
        return is_valid and (since is None or max(self._unbroken_since, self._lost_at) <= since)

    @property
    def failure(self) -> BaseException | None:
        """The last renewal's error, or the error that ended the thread; None while all is well."""
        return self._failure

    def check(self) -> None:
        """Raise `JournalUnavailable` if the lease has run out, and say why it was not renewed."""
        if self.is_lease_valid():
            return
        reason = "this process was suspended" if self._failure is None else repr(self._failure)
        what_to_do = (
            "its thread has ended: leave the journal and enter it again"
            if self._has_ended
            else "try again; it is renewed as soon as the database answers"
        )
        raise JournalUnavailable(
            f"the lease of {self._address} has run out: {reason}; nothing was written; {what_to_do}"
        ) from self._failure

    def register(self, connection: psycopg.Connection[Any]) -> None:
        """Make the first renewal, on the connection of the thread that opens the journal."""
        connection.execute(
            "DELETE FROM node WHERE lease_until < clock_timestamp() - %s * interval '1 second'",
            (_KEPT_NODES_S,),
        )
        self._renew(connection)

    def start(self) -> None:
        """Start the thread. Raises `Unavailable` if no thread, or no file, is left for it."""
        try:
            self._wake, self._woken = socket.socketpair()
        except OSError as error:
            raise JournalUnavailable(
                f"the lease of {self._address} cannot be kept: {error}; nothing was done; try again"
            ) from error
        # A send must not wait: if the buffer is full, the thread is being woken anyway.
        self._wake.setblocking(False)
        try:
            self._ports.start_thread(f"presence of {self._address}", self._run)
        except BaseException:
            self._wake.close()
            self._woken.close()
            raise

    def note_commit(self, tail: Tail) -> None:
        """Remember the newest commit of this process: the row of one conversation that it wrote."""
        # Its values: the writer changes the tail before the next commit.
        self._newest = {
            "node": self.node,
            "number": tail.number,
            "log": tail.log,
            "epoch": tail.epoch,
            "head": tail.head,
            "tip": tail.tip,
        }

    def check_commits(self, connection: psycopg.Connection[Any]) -> None:
        """End the lease for all claims up to now if a new connection's server has lost commits.

        A server loses the newest ones, so it has all of this process's if it has the newest one.
        Until then owners here would answer from memory with events that are in no log any more.
        """
        newest = self._newest
        if newest is None or connection.execute(_HAS_COMMIT, newest).fetchone() is not None:
            return
        self._newest = None
        self._lost_at = nextafter(self._ports.monotonic(), inf)
        _log.error("the database has lost commits", node=self._address)
        self._on_demoted()  # the reader may still be connected to the server that has them
        self._on_lease_loss()

    def listen(self) -> None:
        """Begin soon to call `on_notify` after each commit of another process."""
        if not self._is_listening:
            self._is_listening = True
            self._call()

    def tell(self, names: Collection[str], listeners: int) -> None:
        """Notify other processes soon that these logs have changed; `listeners` of them listen."""
        self._listeners = listeners
        marks = {mark_of(name) for name in names}
        with self._untold_lock:
            is_first = not self._untold
            self._untold |= marks
        if is_first:
            self._call(_TELL)

    def stop(self) -> None:
        """Give the lease back, so that rivals need not wait for its end; then call `on_ended`."""
        self._is_stopping = True
        self._call()

    def _call(self, what: bytes = _RENEW_AT_ONCE) -> None:
        with contextlib.suppress(OSError):  # it has ended already, or is being woken
            self._wake.send(what)

    def _renew(self, connection: psycopg.Connection[Any]) -> bool:
        """Renew the lease; return False if it had run out by then, or a rival had ended it.

        It has run out if either clock says so: the database's may have been set ahead.
        """
        asked_at = self._ports.monotonic()
        row = connection.execute(
            RENEW,
            {
                "node": self.node,
                "address": self._address,
                "lease_s": self._lease_s,
                "listens": self._is_listening,
            },
        ).fetchone()
        answered_at = self._ports.monotonic()
        was_held = row is not None and row[0]
        is_unbroken = answered_at < self._valid_until and was_held
        if not is_unbroken:
            # It ended some time before this: a rival may own conversations claimed under it. A
            # claim that began at this very reading of the clock began before the renewal.
            is_first = not self._asked_at
            self._unbroken_since = answered_at if is_first else nextafter(answered_at, inf)
        self._asked_at = asked_at
        self._valid_until = asked_at + self._lease_s * (1 - _MARGIN)
        return is_unbroken

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                try:
                    with contextlib.closing(self._connect()) as connection:
                        self._serve(connection)
                except (psycopg.Error, OSError) as error:
                    # The server is away. If it stays away, the lease runs out by itself.
                    self._fail(error)
                    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
                        self._on_demoted()
                except Exception as error:  # noqa: BLE001 - it must not end the lease
                    _log.error("lease not renewed", error=type(error).__name__, node=self._address)
                    self._fail(error)
        except BaseException as error:  # noqa: BLE001 - the thread ends; `check` tells of it
            self._failure = error
            _log.error("lease thread ended", error=type(error).__name__, node=self._address)
        finally:
            self._has_ended = True
            self._valid_until = 0.0
            self._wake.close()
            self._woken.close()
            if not self._is_stopping:
                self._on_lease_loss()
            self._on_ended()

    def _fail(self, error: Exception) -> None:
        """Pause before the next try, and report it if the lease runs out meanwhile."""
        self._failure = error
        pause_s, longest_s = self._retry_pause_s, self._lease_s / RENEWALS_PER_LEASE
        self._retry_pause_s = min(pause_s * 2, longest_s)
        self._tell_if_lost()
        if not self._is_stopping:
            self._wait_for_call(pause_s)
        self._tell_if_lost()

    def _tell_if_lost(self) -> None:
        if not self._is_loss_told and not self.is_lease_valid():
            self._is_loss_told = True
            self._on_lease_loss()

    def _serve(self, connection: BoundedConnection) -> None:
        is_listening = False
        self.check_commits(connection)
        while not self._is_stopping:
            connection.begin_job()
            begins = self._is_listening and not is_listening
            if begins:
                connection.execute(f"LISTEN {CHANNEL}")
                is_listening = True
            if not self._renew(connection):
                self._on_lease_loss()
            self._failure = None
            self._is_loss_told = False
            self._retry_pause_s = _RETRY_PAUSE_S_MIN
            if begins:
                self._on_notify(None)  # for commits made before other processes knew we listen
                self._look_again_at = self._ports.monotonic() + _UNDER_WAY_S
            self._wait(connection)
        connection.begin_job()
        self._tell(connection)
        connection.execute("DELETE FROM node WHERE id = %s", (self.node,))

    def _wait(self, connection: BoundedConnection) -> None:
        """Wait until it is time to renew or this process calls; pass notifications on."""
        # Counted from when the wait began: a process that was suspended meanwhile renews at once.
        until = self._asked_at + self._lease_s / RENEWALS_PER_LEASE
        while (now := self._ports.monotonic()) < until and not self._is_stopping:
            if self._untold and now >= self._tell_at:
                connection.begin_job()
                self._tell(connection)
                self._tell_at = now + told_every_s(self._listeners)
            self._hear(connection)
            if now >= self._look_again_at:
                self._look_again_at = inf
                self._on_notify(None)
            next_at = min(until, self._look_again_at, self._tell_at if self._untold else inf)
            if _RENEW_AT_ONCE in self._wait_for_call(next_at - now, connection):
                return

    def _tell(self, connection: BoundedConnection) -> None:
        """Send pending notifications; if the connection breaks, they are sent on the next one."""
        with self._untold_lock:
            untold, self._untold = self._untold, set()
        try:
            if untold:
                connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, payload_of(untold)))
        except BaseException:
            with self._untold_lock:
                self._untold |= untold
            raise

    def _hear(self, connection: BoundedConnection) -> None:
        """Pass notifications on, including those that came with an answer."""
        own = connection.info.backend_pid
        for notice in connection.notifies(timeout=0):
            if notice.pid != own:
                self._on_notify(marks_of(notice.payload))

    def _wait_for_call(self, seconds: float, *others: BoundedConnection) -> bytes:
        """Wait that long, or until this process calls or a connection has something to read.

        Return the calls of this process.
        """
        watched: list[socket.socket | BoundedConnection] = [self._woken, *others]
        with _Selector() as selector:
            for one in watched:
                selector.register(one, selectors.EVENT_READ)
            is_called = any(key.fileobj is self._woken for key, _ in selector.select(seconds))
        return self._woken.recv(64) if is_called else b""
