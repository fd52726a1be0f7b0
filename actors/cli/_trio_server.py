"""The HTTP server of `--backend trio`: hypercorn's connections, isolated from each other.

`hypercorn.trio.serve` runs all connections in one nursery, so one that fails ends the server: a
request with one byte too many after its upgrade is enough. It also shields its writes, so a client
that reads nothing keeps the server from stopping. Here a connection that fails ends alone, and
connections that have not ended in time are closed.

What a client sends behind a request that is the connection's last is dropped.

Only HTTP/1 is spoken. Where hypercorn goes over to HTTP/2, it forgets to close a connection without
a request: so clients that send no more than the first line of HTTP/2 could use up the files that
the process may open. So could clients that come and go: hypercorn keeps a connection that its
client has closed until the next request would be late.

While the process has no file left for a connection, trio tries again ten times a second, and says
so in one line.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.types import ASGIApp

from turnkeeper.runtime.lowlevel import Logger, leaves

__all__ = ["serve_on_trio"]

HEAD_S = 10.0
"""Seconds that a client has for the head of a request."""

_logger = Logger("turnkeeper.gateway")


async def serve_on_trio(
    app: ASGIApp,
    listener: socket.socket,
    is_over: anyio.Event,
    *,
    keep_alive_s: int,
    stop_s: float,
) -> None:
    """Serve at this listener until `is_over`, then close it.

    A connection is kept open for `keep_alive_s` seconds after a response. Connections that wait for
    a request when the server stops are closed at once; the others get `stop_s` seconds to end. A
    cancellation closes all connections at once.
    """
    logging.getLogger("trio.serve_listeners").addFilter(_without_traceback)
    wrapped = ASGIWrapper(app)  # type: ignore[arg-type]  # it has protocol types of its own
    config = Config()
    config.accesslog = config.errorlog = None
    config.keep_alive_timeout = keep_alive_s
    context = WorkerContext(None)
    streams: set[trio.SocketStream] = set()

    async def serve_one(stream: trio.SocketStream) -> None:
        streams.add(stream)
        try:
            await _Connection(
                wrapped,
                config,
                context,
                ConnectionState({}),
                stream,  # type: ignore[arg-type]  # one without TLS is taken too
            )
        except* Exception as errors:  # noqa: BLE001 - a failure is this connection's alone
            kinds = ", ".join(sorted({type(error).__name__ for error in leaves(errors)}))
            _logger.info("connection failed", error=kinds)
        finally:
            streams.discard(stream)

    async def close_late(connections: trio.CancelScope) -> None:
        try:
            await is_over.wait()
            await trio.sleep(stop_s)
            connections.cancel()
        finally:
            for stream in streams:
                stream.socket.close()  # also ends a write, although it is shielded

    async with trio.open_nursery() as closing:
        async with trio.open_nursery() as connections:
            closing.start_soon(close_late, connections.cancel_scope)
            accept = partial(
                trio.serve_listeners,
                serve_one,
                [trio.SocketListener(trio.socket.from_stdlib_socket(listener))],
                handler_nursery=connections,
            )
            async with trio.open_nursery() as accepting:
                accepting.start_soon(accept)
                await is_over.wait()
                accepting.cancel_scope.cancel()
            await context.terminated.set()
        closing.cancel_scope.cancel()


def _without_traceback(record: logging.LogRecord) -> bool:
    """Drop the traceback of a lack of files, which always says the same."""
    record.exc_info = None
    return True


class _Connection(TCPServer):
    """Closes a connection if the client does not complete the head of a request in time.

    It goes over to no other protocol than the one that it begins with.
    """

    _has_ended = False
    """True once nothing more is read: no request follows."""
    _has_answered = False
    _http1: _Http1
    _waiting: trio.CancelScope
    """Around the last wait for a request; the connection is closed at its deadline."""

    async def _read_data(self) -> None:
        begun = self.protocol
        protocol = _Http1(
            begun.app,
            begun.config,
            begun.context,
            begun.task_group,
            begun.state,
            begun.ssl,
            begun.client,
            begun.server,
            begun.send,
        )
        self._http1 = protocol
        self.protocol = protocol  # type: ignore[assignment]  # has all that is called of it
        protocol.bound_head = self._bound_head
        with trio.CancelScope() as protocol.reading:
            await super()._read_data()
        self._has_ended = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated) and event.idle:
            if self._has_ended:
                return  # else it would wait for a request
            self._has_answered = True
        await super().protocol_send(event)

    async def _idle_timeout(self) -> None:
        waits_long = self._has_answered and not self._http1.has_begun
        wait_s = self.config.keep_alive_timeout if waits_long else HEAD_S
        with trio.move_on_after(wait_s) as self._waiting:
            await self.context.terminated.wait()
        with trio.CancelScope(shield=True):
            await self._initiate_server_close()

    def _bound_head(self) -> None:
        """Bound the head that begins behind an answer; the first is bound from the beginning."""
        if self._has_answered:
            self._waiting.deadline = trio.current_time() + HEAD_S


class _LastIsLast(h11.Connection):
    """Reads nothing behind a request that is the connection's last.

    hypercorn closes the connection at once if there is something, and the answer is lost.
    """

    def next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        if self.their_state is h11.MUST_CLOSE:
            return h11.NEED_DATA
        return super().next_event()


class _Http1(H11Protocol):
    reading: trio.CancelScope
    """Around the reading of the connection; cancelled once that is closed. With a request behind
    the one that is answered, hypercorn would wait for the end of an answer that has failed."""
    bound_head: Callable[[], None]
    """Called when a head begins; of no effect while a request is answered, since nothing waits."""

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(*arguments, **named)
        size_max = self.config.h11_max_incomplete_size
        self.connection = _LastIsLast(h11.SERVER, max_incomplete_event_size=size_max)

    @property
    def has_begun(self) -> bool:
        """True if part of the next request has come."""
        return bool(self.connection.trailing_data[0])

    async def handle(self, event: Event) -> None:
        is_data = isinstance(event, RawData) and event.data
        if is_data and self.connection.their_state is h11.MUST_CLOSE:
            return  # else it would be kept for as long as the answer goes on
        if is_data and not self.has_begun:
            self.bound_head()
        await super().handle(event)
        if isinstance(event, Closed):
            self.reading.cancel()

    async def _check_protocol(self, _event: h11.Request) -> None:
        """Answer in HTTP/1, as a server may that was offered HTTP/2 (RFC 9110, 7.8)."""
