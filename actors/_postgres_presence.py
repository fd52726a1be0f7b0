"""A process's say that it is alive, and its ear for what others write.

Owns the node's row, one connection, and one thread. The row's lease is renewed three times within
its length; rivals judge it by the database's clock, and this process judges itself by its own
monotonic clock, counted from before the renewal was sent and with a margin, so that it gives up
before anybody else may take over. The lease is politeness: what makes two writers impossible is
the epoch in every append.

On the same connection it listens, once somebody here waits for what other processes write.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable
from typing import Any

import psycopg

from turnkeeper.runtime import Ports

_RENEWALS_PER_LEASE = 3
_MARGIN = 0.2
_RETRY_PAUSE_S_MIN = 0.1
_KEPT_NODES_S = 86_400
CHANNEL = "turnkeeper"

_RENEW = """
    INSERT INTO node VALUES
        (%(node)s, %(address)s, clock_timestamp() + %(lease_s)s * interval '1 second', %(listens)s)
    ON CONFLICT (id) DO UPDATE SET
        lease_until = excluded.lease_until, is_listening = excluded.is_listening
"""


class Presence:
    """`start` it in a thread; everything else may be called from any thread."""

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        *,
        node: int,
        address: str,
        lease_s: float,
        ports: Ports,
        on_notify: Callable[[], None],
        on_ended: Callable[[], None],
    ) -> None:
        self._connect = connect
        self.node = node
        self._address = address
        self._lease_s = lease_s
        self._ports = ports
        self._on_notify = on_notify
        self._on_ended = on_ended
        # Written by the thread, read by everybody: a float is replaced as a whole.
        self._valid_until = 0.0
        self._unbroken_since = 0.0
        self._is_listening = False
        self._is_stopping = False

    def is_lease_valid(self, *, since: float | None = None) -> bool:
        is_valid = self._ports.monotonic() < self._valid_until
        return is_valid and (since is None or self._unbroken_since <= since)

    def register(self, connection: psycopg.Connection[Any]) -> None:
        """The first renewal, made by whoever opens the journal, on a connection of its own."""
        connection.execute(
            "DELETE FROM node WHERE lease_until < clock_timestamp() - %s * interval '1 second'",
            (_KEPT_NODES_S,),
        )
        self._renew(connection)

    def start(self) -> None:
        self._wake, self._woken = socket.socketpair()
        self._ports.start_thread(f"presence of {self._address}", self._run)

    def listen(self) -> None:
        """From soon on, `on_notify` is called after other processes have written."""
        if not self._is_listening:
            self._is_listening = True
            self._call()

    def stop(self) -> None:
        """Give the lease back, so that nobody has to wait for its end; `on_ended` comes then."""
        self._is_stopping = True
        self._call()

    def _call(self) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            self._wake.send(b"!")

    def _renew(self, connection: psycopg.Connection[Any]) -> None:
        asked_at = self._ports.monotonic()
        connection.execute(
            _RENEW,
            {
                "node": self.node,
                "address": self._address,
                "lease_s": self._lease_s,
                "listens": self._is_listening,
            },
        )
        answered_at = self._ports.monotonic()
        if answered_at >= self._valid_until:
            # It may have run out before: somebody else may own what was claimed under it.
            self._unbroken_since = answered_at
        self._valid_until = asked_at + self._lease_s * (1 - _MARGIN)

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = _RETRY_PAUSE_S_MIN
        try:
            while not self._is_stopping:
                try:
                    with self._connect() as connection:
                        pause_s = _RETRY_PAUSE_S_MIN
                        self._serve(connection)
                except psycopg.Error:
                    # The server is away. The lease runs out by itself where it stays away.
                    self._pause(pause_s)
                    pause_s = min(pause_s * 2, self._lease_s / _RENEWALS_PER_LEASE)
        finally:
            self._valid_until = 0.0
            self._wake.close()
            self._woken.close()
            self._on_ended()

    def _serve(self, connection: psycopg.Connection[Any]) -> None:
        is_listening = False
        while not self._is_stopping:
            begins = self._is_listening and not is_listening
            if begins:
                connection.execute(f"LISTEN {CHANNEL}")
                is_listening = True
            self._renew(connection)
            if begins:
                self._on_notify()  # what was written before others knew that we listen
            self._wait(connection)
            if begins:
                self._on_notify()  # and what was being written just then
        connection.execute("DELETE FROM node WHERE id = %s", (self.node,))

    def _wait(self, connection: psycopg.Connection[Any]) -> None:
        """Until it is time to renew, or somebody here calls; notifications are handed on."""
        until = self._ports.monotonic() + self._lease_s / _RENEWALS_PER_LEASE
        while (left := until - self._ports.monotonic()) > 0 and not self._is_stopping:
            for _ in connection.notifies(timeout=0):  # those that came with an answer, too
                self._on_notify()
            called, database = self._woken.fileno(), connection.fileno()
            ready, _, _ = select.select([database, called], [], [], left)
            if called in ready:
                self._woken.recv(64)
                return

    def _pause(self, seconds: float) -> None:
        ready, _, _ = select.select([self._woken], [], [], seconds)
        if ready:
            self._woken.recv(64)
