"""The HTTP server of `serve` on asyncio: heads that do not end, and requests that outlive it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from weakref import WeakSet

import anyio
import pytest
from anyio.abc import SocketStream
from starlette.types import ASGIApp, Receive, Scope, Send

from turnkeeper.actors.cli import _asyncio_server
from turnkeeper.actors.cli._asyncio_server import _Connection, serve_on_asyncio
from turnkeeper.actors.cli._serve import KEEP_ALIVE_S, _listen

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

BOUND_S = 60
PROXY_S = 60
"""How long usual proxies keep an idle connection to a server."""
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"


class Held:
    """An application whose answer waits."""

    def __init__(self) -> None:
        self.has_begun = anyio.Event()
        self.is_told = anyio.Event()

    async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
        self.has_begun.set()
        await self.is_told.wait()
        headers = [(b"content-length", b"4")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"done"})


@asynccontextmanager
async def serving(
    app: ASGIApp, *, keep_alive_s: int = BOUND_S, stop_s: int = BOUND_S
) -> AsyncIterator[int]:
    """Serve while the block runs; yield the port."""
    is_over = anyio.Event()
    serve = partial(serve_on_asyncio, keep_alive_s=keep_alive_s, stop_s=stop_s)
    with _listen("127.0.0.1", 0) as listener, anyio.fail_after(BOUND_S):
        async with anyio.create_task_group() as group:
            group.start_soon(serve, app, listener, is_over)
            yield listener.getsockname()[1]
            is_over.set()


async def everything(client: SocketStream) -> bytes:
    """Read until the server has closed this connection."""
    read = b""
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        while True:
            read += await client.receive()
    return read


async def is_closed(client: SocketStream) -> bool:
    """Read until the server has closed this connection."""
    await everything(client)
    return True


async def test_a_head_that_does_not_end_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_asyncio_server, "HEAD_S", 0)
    async with serving(Held()) as port:
        for sent in (b"", b"GET / HT", HEAD):
            async with await anyio.connect_tcp("127.0.0.1", port) as client:
                if sent:
                    await client.send(sent)
                assert await is_closed(client)


async def test_the_head_of_a_second_request_has_as_long_and_an_answer_has_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, made = Held(), list[_Connection]()
    remember = _Connection.connection_made

    def connection_made(self: _Connection, transport: object) -> None:
        made.append(self)
        remember(self, transport)

    monkeypatch.setattr(_Connection, "connection_made", connection_made)
    async with (
        serving(app) as port,
        await anyio.connect_tcp("127.0.0.1", port) as client,
    ):
        await client.send(HEAD)
        await client.send(b"\r\n")
        await app.has_begun.wait()
        assert made[0]._forget is None, "no end is set while it is answered"
        app.is_told.set()
        answer = b""
        while not answer.endswith(b"done"):
            answer += await client.receive()

        monkeypatch.setattr(_asyncio_server, "HEAD_S", 0)
        await client.send(HEAD)
        assert await is_closed(client)


async def test_a_head_that_begins_behind_a_request_has_as_long_once_that_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had the time that an idle connection is kept."""
    app = Held()
    async with (
        serving(app, keep_alive_s=2 * BOUND_S) as port,
        await anyio.connect_tcp("127.0.0.1", port) as client,
    ):
        await client.send(HEAD + b"\r\n" + HEAD)
        await app.has_begun.wait()
        monkeypatch.setattr(_asyncio_server, "HEAD_S", 0)
        app.is_told.set()
        assert (await everything(client)).endswith(b"done")


async def test_a_connection_waits_for_the_next_request_as_long_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was 5 s. A proxy keeps a connection longer, and lost what it sent as that ended."""
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    waits: list[float] = []

    def noted(
        delay_s: float, call: Callable[..., object], *arguments: object
    ) -> asyncio.TimerHandle:
        waits.append(delay_s)
        return call_later(delay_s, call, *arguments)

    monkeypatch.setattr(loop, "call_later", noted)
    app = Held()
    app.is_told.set()
    async with (
        serving(app, keep_alive_s=12_345) as port,
        await anyio.connect_tcp("127.0.0.1", port) as client,
    ):
        await client.send(HEAD + b"\r\n")
        while 12_345 not in waits:
            await anyio.lowlevel.checkpoint()
    assert KEEP_ALIVE_S > PROXY_S


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"POST"])
async def test_a_request_for_a_web_socket_is_answered_in_http_and_the_server_can_be_stopped(
    caplog: pytest.LogCaptureFixture, method: bytes
) -> None:
    """If its opening was invalid, uvicorn waited for more of it, and failed when it was stopped."""
    app = Held()
    app.is_told.set()
    sent = method + b" / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with serving(app) as port, await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(sent)
        assert (await client.receive()).startswith(b"HTTP/1.1 200")
        assert app.has_begun.is_set()
    assert not caplog.records


async def test_a_request_that_outlives_the_server_is_told_in_one_line_and_not_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was answered with 500, as if it had failed, so that its client did not send it again."""
    app = Held()
    async with serving(app, stop_s=0) as port:
        client = await anyio.connect_tcp("127.0.0.1", port)
        await client.send(HEAD + b"\r\n")
        await app.has_begun.wait()
    async with client:
        assert await everything(client) == b""

    said = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in said] == [
        "Cancel 1 running task(s), timeout graceful shutdown exceeded"
    ]


async def test_what_comes_behind_the_last_request_is_dropped_and_the_answer_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It made uvicorn fail in the midst of the answer, with a traceback."""
    app = Held()
    async with serving(app) as port, await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(HEAD + b"Connection: close\r\n\r\n")
        await app.has_begun.wait()
        await client.send(b"GET / HTTP/1.1\r\n")
        await client.send(b"x\r\n\r\n")
        await anyio.wait_all_tasks_blocked()
        app.is_told.set()
        answer = await everything(client)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"done")
    assert not caplog.records


async def test_a_body_that_cannot_be_read_ends_an_answer_that_has_begun(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It made uvicorn begin a second answer in the midst of the first, and fail at that."""
    has_left = anyio.Event()

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left.set()

    async with serving(app) as port, await anyio.connect_tcp("127.0.0.1", port) as client:
        answer = b""
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        while b"one" not in answer:
            answer += await client.receive()
        await client.send(b"no number\r\n")
        answer += await everything(client)
        await has_left.wait()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_application_that_answers_a_body_that_cannot_be_read_does_not_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It answers before the body has come, as to a stranger, but uvicorn has answered already."""

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"two"})

    async with serving(app) as port, await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n")
        answer = await everything(client)
    assert answer.startswith(b"HTTP/1.1 400")
    assert caplog.messages == ["Invalid HTTP request received."]


async def test_a_response_that_was_cut_off_is_told_by_the_gateway_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For each client that does not read, uvicorn logged an error."""

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async with serving(app) as port, await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(HEAD + b"\r\n")
        assert (await everything(client)).startswith(b"HTTP/1.1 200")
    assert not caplog.messages


async def test_a_cancellation_that_the_application_raises_itself_is_a_failure_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is raised by waiting for a task that another request has ended, and nothing said so."""

    async def app(_: Scope, __: Receive, ___: Send) -> None:
        shared = asyncio.ensure_future(anyio.sleep_forever())
        shared.cancel()
        await shared

    async with serving(app) as port, await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(HEAD + b"\r\n")
        assert (await everything(client)).startswith(b"HTTP/1.1 500")
    assert [record.getMessage() for record in caplog.records] == ["Exception in ASGI application\n"]


async def test_a_closed_connection_goes_without_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = WeakSet[_Connection]()
    begin = _Connection.connection_made

    def connection_made(self: _Connection, transport: object) -> None:
        made.add(self)
        begin(self, transport)

    monkeypatch.setattr(_Connection, "connection_made", connection_made)
    app = Held()
    app.is_told.set()
    gc.disable()
    try:
        async with serving(app) as port:
            async with await anyio.connect_tcp("127.0.0.1", port) as client:
                await client.send(HEAD + b"Connection: close\r\n\r\n")
                assert (await everything(client)).endswith(b"done")
            assert len(made) == 0
    finally:
        gc.enable()


async def test_connections_without_a_file_wait_and_are_told_of_in_one_line_each_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tried 2,048 times in a row, and each logged a traceback and set a timer to try again."""
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0)
    app = Held()
    app.is_told.set()
    async with serving(app) as port:
        await run_out_of_files(port, caplog)

        async with await anyio.connect_tcp("127.0.0.1", port) as client:
            await client.send(HEAD + b"\r\n")
            assert (await client.receive()).startswith(b"HTTP/1.1 200"), "it goes on"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) < 10, "no more than one each time that it tried"
    assert all("out of system resource" in line for line in told), told
    assert not any(record.exc_info for record in caplog.records)


async def test_a_server_that_stops_while_no_file_is_left_logs_no_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next attempt to accept came after the listener was closed."""
    delay_s = 54_321
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", delay_s)
    loop = asyncio.get_running_loop()
    call_later, attempts = loop.call_later, []

    def note(delay: float, callback: Callable[..., object], *arguments: object) -> object:
        handle = call_later(delay, callback, *arguments)
        if delay == delay_s:
            attempts.append(handle)
        return handle

    monkeypatch.setattr(loop, "call_later", note)
    app = Held()
    app.is_told.set()
    async with serving(app) as port:
        await run_out_of_files(port, caplog)

    (attempt,) = attempts
    with as_a_program_logs():
        attempt._run()  # as the loop does once its time has come
    attempt.cancel()
    assert not any(record.exc_info for record in caplog.records)


async def run_out_of_files(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """Connect while the process has no file left, until the server has logged that."""
    async with await anyio.connect_tcp("127.0.0.1", port) as first:  # all is imported then
        await first.send(HEAD + b"\r\n")
        assert (await first.receive()).startswith(b"HTTP/1.1 200")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(("127.0.0.1", port)) as waiting, as_a_program_logs():
        free = os.dup(waiting.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            while not caplog.records:
                await anyio.lowlevel.checkpoint()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextmanager
def as_a_program_logs() -> Iterator[None]:
    """Have the loop log what it cannot raise, which the loop of the tests collects."""
    loop = asyncio.get_running_loop()
    collects = loop.get_exception_handler()
    loop.set_exception_handler(None)
    try:
        yield
    finally:
        loop.set_exception_handler(collects)
