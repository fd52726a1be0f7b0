"""The HTTP server of `--backend asyncio`: uvicorn, with a time limit for the head of a request.

uvicorn waits for a request's head as long as the client likes. So clients that never finish one
could use up the files that the process may open, and keep all other clients out.

What a client sends behind a request that is the connection's last is dropped, and a body that
cannot be read ends its request: once the response has begun, uvicorn fails at both, with a
traceback.

Only HTTP is spoken. uvicorn goes over to a WebSocket for any method, and then waits for the rest of
an opening that is invalid: without a bound, and the server could not be stopped in order.

While the process has no file left for a connection, asyncio tries again once a second, and logs
each failure without a traceback.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["serve_on_asyncio"]

CONNECTIONS_MAX = 20_000
HEAD_S = 10.0
"""Seconds that a client has for the head of a request."""
_OUT_OF_FILES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_OUT_OF_FILES_SAID = "socket.accept() out of system resource"
"""How asyncio begins to log one of these."""
_TRIED_AGAIN_SAID = "Exception in callback BaseSelectorEventLoop._start_serving("
"""How asyncio begins to log that it tried to accept again after the listener was closed."""
_NOT_COMPLETED = "ASGI callable returned without completing response."


async def serve_on_asyncio(
    app: ASGIApp,
    listener: socket.socket,
    is_over: anyio.Event,
    *,
    keep_alive_s: int,
    stop_s: int,
) -> None:
    """Serve at this listener until `is_over`, then close it.

    A connection is kept open for `keep_alive_s` seconds after a response. Connections that wait for
    a request when the server stops are closed at once; the others get `stop_s` seconds to end.
    """
    logging.getLogger("uvicorn.error").addFilter(_is_no_repetition)
    logging.getLogger("asyncio").addFilter(_without_traceback)
    server = _Server(
        uvicorn.Config(
            app,
            http=_Connection,
            lifespan="off",
            access_log=False,
            log_config=None,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=stop_s,
        )
    )
    with _Listener(listener) as taken:
        listeners: list[socket.socket] = [taken]
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, listeners)
            await is_over.wait()
            server.should_exit = True


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the program, because it drains before the server stops."""
        yield


class _Listener(socket.socket):
    """Has asyncio try once, and not 2,048 times, to accept while no file is left.

    Python 3.11 goes on until nothing waits, and for each failure logs a traceback and sets a timer,
    which does the same a second later: megabytes of log a second, for as long as anyone keeps
    enough connections open.
    """

    def __init__(self, listener: socket.socket) -> None:
        """Take the socket over."""
        super().__init__(listener.family, listener.type, listener.proto, listener.detach())
        self._is_out = False

    # Any: the type of an address depends on the family.
    def accept(self) -> tuple[socket.socket, Any]:
        if self._is_out:
            self._is_out = False
            raise BlockingIOError  # as if nothing waited: ends the attempts of this time
        try:
            return super().accept()
        except OSError as error:
            self._is_out = error.errno in _OUT_OF_FILES
            raise


class _Connection(H11Protocol):
    """Closes a connection if the client does not complete the head of a request in time.

    It goes over to no other protocol.
    """

    _forget: Callable[[], None] | None = None
    """Cancels the timer that closes the connection if no whole head comes."""

    # Any: transports are the event loop's, and another loop has other types.
    def connection_made(self, transport: Any) -> None:  # noqa: ANN401
        super().connection_made(transport)
        self._served, self.app = self.app, self._run
        self._bound_head()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.MUST_CLOSE:
            return
        super().data_received(data)
        self._bound_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            # A head has begun to come behind the last request, so this is no idle connection.
            self._unset_keepalive_if_required()
            self._bound_head()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read, unless an answer has begun; the application says no more."""
        if self.conn.our_state is not h11.IDLE:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_head()
        self.app = self._served  # else the connection would be a reference cycle for good

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - passed on
        """Run the application; close the connection if the server cuts it off.

        Else the client would get 500, as for a request that has failed, and would not send it again
        as it does if the answer is lost. uvicorn logs how many it has cut off, and would log a
        traceback for each.
        """
        try:
            await self._served(scope, receive, send)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None, "a coroutine of asyncio runs in a task"
            if not task.cancelling():
                raise  # by the application itself, such as by a task that it waits for: a failure
            # Not raised again: nothing of ours is behind this call, and its task ends here.
            self.cycle.disconnected = True
            self.transport.close()

    def _should_upgrade(self) -> bool:
        """Answer in HTTP, as a server may (RFC 9110, 7.8)."""
        return False

    def _bound_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif self._forget is None:
            self._forget = self.loop.call_later(HEAD_S, self.transport.close).cancel

    def _forget_head(self) -> None:
        if self._forget is not None:
            self._forget()
            self._forget = None


def _is_no_repetition(record: logging.LogRecord) -> bool:
    """Return False for the line that a response was not completed: the gateway has logged why."""
    return record.msg != _NOT_COMPLETED


def _without_traceback(record: logging.LogRecord) -> bool:
    """Drop the traceback of a lack of files, which comes every second and always says the same.

    Return False for the line that such an attempt came too late: the server has stopped.
    """
    said = record.getMessage()
    if said.startswith(_OUT_OF_FILES_SAID):
        record.exc_info = None
    return not said.startswith(_TRIED_AGAIN_SAID)
