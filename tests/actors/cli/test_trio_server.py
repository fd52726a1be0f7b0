"""The HTTP server on trio: what one connection does is its own."""

from __future__ import annotations

import math
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
import trio
from hypercorn.events import Event
from starlette.types import ASGIApp, Receive, Scope, Send
from trio.testing import MockClock, wait_all_tasks_blocked

from turnkeeper.actors.cli import _trio_server
from turnkeeper.actors.cli._trio_server import _Http1, serve_on_trio
from turnkeeper.actors.gateway.replies import EventStream, Write

BOUND_S = 60.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
UPGRADE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: bKdPyn3u98cTfZJSh4TNeQ==\r\n\r\n"
)


class Held:
    """Answers `/` in two parts, the second when it is told to; all else with more than fits."""

    def __init__(self) -> None:
        self.is_told = trio.Event()
        self.has_begun = trio.Event()

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.has_begun.set()
        if scope["path"] == "/":
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
            await self.is_told.wait()
            await send({"type": "http.response.body", "body": b"two"})
        else:
            await send({"type": "http.response.body", "body": bytes(64 << 20)})


@asynccontextmanager
async def serving(
    app: ASGIApp, *, stop_s: float, keep_alive_s: int = int(BOUND_S)
) -> AsyncIterator[int]:
    """Serve, and stop; yields the port."""
    with trio.fail_after(BOUND_S):
        listener = socket.create_server(("127.0.0.1", 0))
        if sys.platform == "linux":  # a write that is left behind fails the test, and has an end
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2_000 * BOUND_S))
        port: int = listener.getsockname()[1]
        is_over = anyio.Event()

        async def serve() -> None:
            await serve_on_trio(app, listener, is_over, keep_alive_s=keep_alive_s, stop_s=stop_s)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            yield port
            is_over.set()


async def read_until(stream: trio.SocketStream, end: bytes) -> bytes:
    read = b""
    while end not in read:
        part = await stream.receive_some()
        assert part, read
        read += part
    return read


@pytest.mark.parametrize("rest", [UPGRADE + b"x", b"Content-Length: 1\r\n\r\nxyz"])
def test_a_connection_that_fails_ends_no_other(rest: bytes) -> None:
    """The first of these ends the whole of `hypercorn.trio.serve`."""

    async def main() -> None:
        app = Held()
        async with serving(app, stop_s=BOUND_S) as port:
            held = await trio.open_tcp_stream("127.0.0.1", port)
            await held.send_all(GET + b"\r\n")
            await read_until(held, b"one")

            async with await trio.open_tcp_stream("127.0.0.1", port) as breaking:
                await breaking.send_all(GET + rest)
                await breaking.send_eof()
                app.is_told.set()
                while await breaking.receive_some():
                    pass

            await read_until(held, b"0\r\n\r\n")
            await held.send_all(GET + b"\r\n")
            await read_until(held, b"0\r\n\r\n")
            await held.aclose()

    trio.run(main)


@pytest.mark.parametrize(
    "request_head",
    [
        b"PRI * HTTP/2.0\r\n\r\n",
        GET
        + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n\r\n",
    ],
)
def test_a_client_that_would_speak_http_2_is_answered_in_http_1(request_head: bytes) -> None:
    """In HTTP/2, hypercorn keeps a connection without a request for as long as the client does."""

    async def main() -> None:
        app = Held()
        app.is_told.set()
        async with (
            serving(app, stop_s=0.05) as port,
            await trio.open_tcp_stream("127.0.0.1", port) as stream,
        ):
            await stream.send_all(request_head)
            read = await stream.receive_some()
            assert read.startswith(b"HTTP/1.1 200"), read

    trio.run(main)


def test_a_client_that_takes_nothing_does_not_keep_the_server_from_stopping() -> None:
    async def main() -> None:
        app = Held()
        async with serving(app, stop_s=0.05) as port:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n")
            await app.has_begun.wait()
        await stream.aclose()

    trio.run(main)


def test_a_client_that_takes_nothing_does_not_outlive_a_cancelled_server() -> None:
    async def main() -> None:
        app = Held()
        with trio.fail_after(BOUND_S), trio.CancelScope() as scope:
            async with serving(app, stop_s=BOUND_S) as port:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
                await stream.send_all(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n")
                await app.has_begun.wait()
                scope.cancel()
        await stream.aclose()

    trio.run(main)


def test_those_that_take_their_time_have_it_when_the_server_stops() -> None:
    async def main() -> None:
        app = Held()
        async with trio.open_nursery() as clients:

            async def rest_of(stream: trio.SocketStream, idle: trio.SocketStream) -> None:
                async with stream, idle:
                    assert await idle.receive_some() == b""  # closed as the server stops
                    app.is_told.set()
                    await read_until(stream, b"two")

            async with serving(app, stop_s=BOUND_S) as port:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
                await stream.send_all(GET + b"\r\n")
                await read_until(stream, b"one")
                idle = await trio.open_tcp_stream("127.0.0.1", port)
                clients.start_soon(rest_of, stream, idle)

    trio.run(main)


def test_a_client_that_left_with_a_request_behind_a_stream_leaves_no_connection() -> None:
    """Without a bound, hypercorn waits for the end of the stream to read the next request."""

    async def main() -> None:
        has_left = trio.Event()

        async def feed(write: Write) -> None:
            await write(b"one")
            await has_left.wait()
            while True:
                await write(b"more")
                await trio.lowlevel.checkpoint()

        async with serving(EventStream(feed), stop_s=2 * BOUND_S) as port:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(2 * (GET + b"\r\n"))
            await read_until(stream, b"one")
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await stream.aclose()  # resets the connection
            has_left.set()

    trio.run(main)


@pytest.mark.parametrize("body", [b"", b"0123456789"])
def test_what_comes_behind_the_last_request_does_not_take_the_answer(body: bytes) -> None:
    """It made hypercorn close the connection at once, with all or half of the answer unsent."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"4"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 415, "headers": headers})
        await send({"type": "http.response.body", "body": b"done"})

    async def main() -> None:
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        async with serving(app, stop_s=BOUND_S) as port:
            for close in (b"", b"Connection: close\r\n"):
                async with await trio.open_tcp_stream("127.0.0.1", port) as client:
                    await client.send_all(GET + close + length + body + GET + b"\r\n")
                    answer = await read_until(client, b"done")
                    assert answer.startswith(b"HTTP/1.1 415")
                    assert await client.receive_some() == b""

    trio.run(main)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_connection_that_its_client_closes_between_requests_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, *, is_fresh: bool
) -> None:
    """It was kept for as long as the next request might have taken to come."""
    monkeypatch.setattr(_trio_server, "HEAD_S", math.inf)

    async def main() -> None:
        app = Held()
        app.is_told.set()
        async with (
            serving(app, stop_s=BOUND_S) as port,
            await trio.open_tcp_stream("127.0.0.1", port) as client,
        ):
            if not is_fresh:
                await client.send_all(GET + b"\r\n")
                await read_until(client, b"0\r\n\r\n")
            await client.send_eof()
            assert await client.receive_some() == b"", "the server has closed it, too"

    trio.run(main)


@asynccontextmanager
async def answered(*, keep_alive_s: int = 10 * int(BOUND_S)) -> AsyncIterator[trio.SocketStream]:
    """Serve, and yield a connection whose first request has been answered."""
    app = Held()
    app.is_told.set()
    async with (
        serving(app, stop_s=BOUND_S, keep_alive_s=keep_alive_s) as port,
        await trio.open_tcp_stream("127.0.0.1", port) as client,
    ):
        await client.send_all(GET + b"\r\n")
        await read_until(client, b"0\r\n\r\n")
        yield client


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET])
def test_a_head_that_does_not_end_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(_trio_server, "HEAD_S", 0)

    async def main() -> None:
        async with (
            serving(Held(), stop_s=BOUND_S) as port,
            await trio.open_tcp_stream("127.0.0.1", port) as client,
        ):
            with suppress(trio.BrokenResourceError):  # reset, if it came behind the close
                await client.send_all(sent)
                assert await client.receive_some() == b""

    trio.run(main)


def test_the_head_of_a_second_request_has_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that the connection may wait for it to begin is no time for the rest of it."""

    async def main() -> None:
        async with answered() as client:
            await wait_all_tasks_blocked()  # until it waits for the next request to begin
            monkeypatch.setattr(_trio_server, "HEAD_S", 0)
            await client.send_all(GET)
            assert await client.receive_some() == b""

    trio.run(main)


@pytest.mark.parametrize(("after_s", "is_open"), [(25, True), (31, False)])
def test_a_connection_waits_for_the_next_request_as_long_as_it_is_told(
    after_s: int, *, is_open: bool
) -> None:
    """It was 5 s. A proxy keeps a connection longer, and lost what it sent as that ended."""
    clock = MockClock()

    async def main() -> None:
        async with answered(keep_alive_s=30) as client:
            await wait_all_tasks_blocked()
            clock.jump(after_s)
            await wait_all_tasks_blocked()
            answer = b""
            with suppress(trio.BrokenResourceError):  # reset, if it came behind the close
                await client.send_all(GET + b"\r\n")
                answer = await client.receive_some()
            assert bool(answer) is is_open

    trio.run(main, clock=clock)


@pytest.mark.parametrize("is_late", [False, True])
def test_the_head_of_a_second_request_has_its_time_from_its_beginning(
    monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """One that began late was cut off at the end of the time in which it had to begin."""
    clock = MockClock()
    was_read = trio.Event()
    handle_as_before = _Http1.handle

    async def handle(self: _Http1, event: Event) -> None:
        await handle_as_before(self, event)
        was_read.set()

    async def main() -> None:
        nonlocal was_read
        async with answered(keep_alive_s=30) as client:
            monkeypatch.setattr(_Http1, "handle", handle)
            await wait_all_tasks_blocked()
            if is_late:
                clock.jump(25)
            await client.send_all(b"GET / HTTP/1.1\r\n")
            await was_read.wait()
            clock.jump(6)
            if not is_late:
                was_read = trio.Event()
                await client.send_all(b"X: y\r\n")
                await was_read.wait()
                clock.jump(6)
            await wait_all_tasks_blocked()  # what is late is closed by then
            answer = b""
            with suppress(trio.BrokenResourceError):  # reset, if it came behind the close
                await client.send_all(b"Host: x\r\n\r\n")
                answer = await client.receive_some()
            assert bool(answer) is is_late, "a further part does not prolong it"

    trio.run(main, clock=clock)
