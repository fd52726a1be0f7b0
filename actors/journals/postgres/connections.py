"""Connections to PostgreSQL on which every wait is bounded.

This module owns how the library connects, and the bound of every wait: for the server to accept a
connection, for a lock, for an answer, and for a peer that has gone silent. If a job gets no answer
in time, its connection is closed, so its outcome is unknown; a server that still works on the job
stops a little earlier. A lost connection is made again, with a pause after each failure.

psycopg is made faster for appends in three places: they share a cursor, `Payloads` and `Numbers`
have dumpers, and a socket of this machine takes a large group at once.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import psycopg
from psycopg import sql
from psycopg.abc import PQGen
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Format

from turnkeeper.runtime import Ports

from ...errors import JournalRefused, JournalUnavailable

T = TypeVar("T")

_LOCK_WAIT_S = 5.0
_SERVER_SHARE = 0.8
"""The server stops a statement after this share of its job's bound, so that it can still report
it."""
_RETRY_PAUSE_S_MIN = 0.05
_RETRY_PAUSE_S_MAX = 5.0
_PROBES_LOST_MAX = 3
_POOLER_REFUSES = "unsupported startup parameter"
"""PgBouncer's words. No later try succeeds, so it must not be taken for a server that is away."""
_NO_TIMEOUTS = (
    # The first version that has it. Else the first job after a rest finds its connection closed.
    (140_000, "idle_session_timeout"),
    # Else a migration that takes longer ends with the connection, each time that it is tried.
    (170_000, "transaction_timeout"),
)
"""Further limits that an administrator can set; the server ends the connection at these."""
_SEND_BUFFER_BYTES = 1 << 20
"""A group of 512 messages fits, and did not with the usual 208 KiB: the thread then waited for the
interpreter lock, behind a busy event loop, before it sent the rest, and the server waited too."""


class Payloads(list[bytes]):
    """A parameter of type `bytea[]`."""


class _PayloadsDumper(Dumper):
    """Encodes `Payloads`, in a third of the time that psycopg takes for any list."""

    format = Format.BINARY
    oid = psycopg.postgres.types["bytea"].array_oid

    def dump(self, obj: Payloads) -> bytes:
        # One dimension, no nulls, the type of the items, their number, and the first one's place.
        parts = [struct.pack("!5i", 1, 0, psycopg.postgres.types["bytea"].oid, len(obj), 1)]
        for payload in obj:
            parts += (len(payload).to_bytes(4), payload)
        return b"".join(parts)


class Numbers(list[int]):
    """A parameter of type `bigint[]`."""


class _NumbersDumper(Dumper):
    """Encodes `Numbers`, in a third of the time of a text, and the server reads them sooner too."""

    format = Format.BINARY
    oid = psycopg.postgres.types["int8"].array_oid

    def dump(self, obj: Numbers) -> bytes:
        # As above; then the size of each number, and the number.
        sized = [8] * (2 * len(obj))
        sized[1::2] = obj
        oid = psycopg.postgres.types["int8"].oid
        try:
            return struct.pack(f"!5i{'iq' * len(obj)}", 1, 0, oid, len(obj), 1, *sized)
        except struct.error as error:
            # As the server says it of a text: then the appends are tried one by one.
            raise psycopg.DataError(f"a number is not in the range of bigint: {error}") from error


def _ignore() -> None:
    return


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that closes itself when a job has waited `answer_s` seconds for the server.

    Used by one thread. The wait then raises `psycopg.OperationalError`, and `closed` is true.
    """

    _monotonic: Callable[[], float]
    _before_wait: Callable[[], None]
    _answer_s = math.inf
    _until = math.inf

    def bound_jobs(
        self, answer_s: float, monotonic: Callable[[], float], before_wait: Callable[[], None]
    ) -> None:
        """Set how long each job may wait, by this clock; the first one begins now.

        `before_wait` is called once what a statement needs was sent, as far as the socket takes it.
        """
        self._answer_s = answer_s
        self._monotonic = monotonic
        self._before_wait = before_wait
        self.begin_job()

    def begin_job(self) -> None:
        """Begin to count the bound, which is on all waits together, up to the next call."""
        self._until = self._monotonic() + self._answer_s

    def allow(self, answer_s: float) -> None:
        """Let only this job wait for up to this many seconds from now."""
        self._until = self._monotonic() + answer_s

    @cached_property
    def kept_cursor(self) -> psycopg.Cursor[Any]:
        """A cursor for one statement after another, each of whose rows are fetched before the next.

        To make a cursor takes a third of the time that `execute` takes for an append.
        """
        return self.cursor()

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:  # noqa: ANN401 - psycopg's own
        """Wait for the server as psycopg does, within the bound of the job."""
        return super().wait(self._bounded(gen), *args, **kwargs)

    def _bounded(self, gen: PQGen[T]) -> PQGen[T]:
        # psycopg sends 0 whenever its interval (0.1 s) has passed without an answer.
        try:
            waits_for = next(gen)
            self._before_wait()
            while True:
                ready = yield waits_for
                if not ready and self._monotonic() >= self._until:
                    self.close()
                    raise psycopg.OperationalError(
                        f"the server has not answered within {self._answer_s:g} s"
                    )
                waits_for = gen.send(ready)
        except StopIteration as done:
            value: T = done.value
            return value


def connect(
    conninfo: str,
    schema: str,
    *,
    is_read_only: bool,
    tcp_timeout_s: float,
    answer_s: float,
    ports: Ports,
    before_wait: Callable[[], None] = _ignore,
) -> BoundedConnection:
    """Connect in autocommit mode, with a bound on every wait, before which `before_wait` is called.

    Raises `JournalRefused` if something between here and the server drops these settings. A process
    that is suspended must hold nothing, so no statement waits long for a lock, no transaction
    idles, and a connection to a server that is gone is closed. Unless `is_read_only`, only a server
    that accepts writes is used: after a failover, the new primary among several hosts.
    """
    given = conninfo_to_dict(conninfo)
    probe_s = answer_s / _PROBES_LOST_MAX
    idle_s, interval_s = max(1, int(probe_s)), max(1, int(probe_s / _PROBES_LOST_MAX))
    defaults = {
        "target_session_attrs": "any",
        "keepalives": 1,
        "keepalives_idle": idle_s,
        "keepalives_interval": interval_s,
        "keepalives_count": _PROBES_LOST_MAX,
    }
    bounds = {
        "connect_timeout": max(2, int(tcp_timeout_s)),
        "tcp_user_timeout": int(tcp_timeout_s * 1000),
        "client_encoding": "UTF8",
        "options": " ".join(
            (
                str(given.get("options") or ""),
                f"-c search_path={_quoted(schema)}",
                f"-c lock_timeout={_milliseconds(_LOCK_WAIT_S)}",
                f"-c statement_timeout={_milliseconds(answer_s * _SERVER_SHARE)}",
                f"-c idle_in_transaction_session_timeout={_milliseconds(_LOCK_WAIT_S)}",
                # Our statements rely on these, which a database, a role or the user's environment
                # can set, too. Without nulls in arrays, a missing message id becomes "NULL"; with
                # fewer digits, the time of a rejection is read as another one.
                "-c array_nulls=on -c default_transaction_isolation=read\\ committed",
                "-c extra_float_digits=1",
                # A statement whose last message was lost holds its locks until the server finds
                # out that its client has gone.
                f"-c tcp_keepalives_idle={idle_s} -c tcp_keepalives_interval={interval_s}",
                f"-c tcp_keepalives_count={_PROBES_LOST_MAX}",
                f"-c tcp_user_timeout={_milliseconds(tcp_timeout_s)}",
            )
        ),
    }
    parameters: dict[str, Any] = {**defaults, **given, **bounds}
    if not is_read_only:
        # Whatever is given, for readers: a standby would refuse each write, and may lack commits.
        parameters["target_session_attrs"] = "read-write"
    before_wait()
    try:
        connection = BoundedConnection.connect(autocommit=True, prepare_threshold=1, **parameters)
    except psycopg.OperationalError as error:
        if _POOLER_REFUSES in str(error):
            raise _refused_pooler(
                f"a pooler refuses the `options` of its clients: {error}"
            ) from error
        raise
    connection.adapters.register_dumper(Payloads, _PayloadsDumper)
    connection.adapters.register_dumper(Numbers, _NumbersDumper)
    connection.bound_jobs(answer_s, ports.monotonic, before_wait)
    try:
        _enlarge_send_buffer(connection)
        _check_session(connection, schema)
        for version_min, timeout in _NO_TIMEOUTS:
            if connection.info.server_version >= version_min:
                connection.execute(f"SET {timeout} = 0".encode())
    except BaseException:
        connection.close()
        raise
    return connection


def _enlarge_send_buffer(connection: BoundedConnection) -> None:
    if connection.info.host.startswith("/"):  # the system enlarges the buffers of TCP as needed
        with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)


def _check_session(connection: BoundedConnection, schema: str) -> None:
    """Raise `JournalRefused` if the settings of this session are not ours.

    A pooler may drop them, or run each transaction in another session. Then tables would be
    searched in another schema, and waits would be unbounded. A pooler may also keep the path alone,
    which it can follow, so a second setting is compared.
    """
    wanted = {
        "search_path": sql.Identifier(schema).as_string(),
        "lock_timeout": str(_milliseconds(_LOCK_WAIT_S)),
    }
    rows = connection.execute(
        "SELECT name, setting FROM pg_settings WHERE name = ANY(%s)", (list(wanted),)
    )
    found = dict(rows.fetchall())
    for setting, value in wanted.items():
        if found.get(setting) != value:
            raise _refused_pooler(
                f"the connection to schema {schema} has the {setting} {found.get(setting)}: "
                "a pooler drops the `options` of its clients"
            )


def _refused_pooler(found: str) -> JournalRefused:
    return JournalRefused(f"{found}; nothing was done; connect to the server itself")


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))  # 0 would be no bound


def _quoted(schema: str) -> str:
    # The value of a startup option: spaces and backslashes are escaped once more.
    identifier = sql.Identifier(schema).as_string()
    return identifier.replace("\\", "\\\\").replace(" ", "\\ ")


class Link:
    """A thread's connection, which is made again when it is lost. Only that thread uses it."""

    def __init__(
        self,
        connect: Callable[[], BoundedConnection],
        connection: BoundedConnection,
        monotonic: Callable[[], float],
    ) -> None:
        self._connect = connect
        self.connection = connection
        self._monotonic = monotonic
        self._retry_at = -math.inf
        self._retry_pause_s = _RETRY_PAUSE_S_MIN
        self._failure: Exception | None = None

    def begin_job(self) -> None:
        """Ensure that there is a connection for the next job.

        Raises `JournalUnavailable` if none can be made, and at once during the pause after a
        failure. Each pause is twice as long as the previous one, up to 5 s.
        """
        if not self.connection.closed:
            self.connection.begin_job()
            return
        if self._monotonic() >= self._retry_at:
            try:
                self.connection = self._connect()
            except (psycopg.Error, OSError) as error:
                self._failure = error
                self._retry_at = self._monotonic() + self._retry_pause_s
                self._retry_pause_s = min(self._retry_pause_s * 2, _RETRY_PAUSE_S_MAX)
            else:
                self._failure = None
                self._retry_pause_s = _RETRY_PAUSE_S_MIN
                return
        raise JournalUnavailable(
            f"no connection to the database: {self._failure}; nothing was written; try again"
        ) from self._failure
