"""What the tests of the gateway share: a served gateway, its clients, and streams read by hand."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import h11
import httpx
import hypercorn.trio
import sniffio
import trio
import uvicorn
from anyio.abc import SocketStream
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework
from starlette.types import ASGIApp

from tests.actors.conversations.worlds import HeldAgent
from turnkeeper.actors import (
    Agent,
    Condenser,
    Conversations,
    Journal,
    MemoryJournal,
    gateway,
)

BOUND_S = 60.0
"""How long a test waits for something that comes, or does not come at all."""
JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def served(app: ASGIApp, *, stall_s: float = 30.0) -> AsyncIterator[str]:
    """Serve over HTTP on loopback, by uvicorn on asyncio and by hypercorn on trio.

    `stall_s`: after that, the connection of a client that takes nothing ends.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if sys.platform == "linux":
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1_000 * stall_s))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with served_on(app, listener):  # hypercorn takes the socket out of the listener
            yield address


@asynccontextmanager
async def served_on(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serve at a listener of the test's own."""
    by_server = _by_hypercorn if sniffio.current_async_library() == "trio" else _by_uvicorn
    async with by_server(app, listener):
        yield


@asynccontextmanager
async def _by_uvicorn(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
        # A connection that is closed for being idle may be just about to be used again.
        timeout_keep_alive=int(BOUND_S),
        loop="none",
    )
    server = uvicorn.Server(config)

    ended = anyio.Event()

    async def serve() -> None:
        # Signals are the test runner's.
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server._serve([listener])
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(serve)
        try:
            yield
        finally:
            server.should_exit = True
            # After a failure too: a loop that still knows a closed listener serves no other one.
            with anyio.move_on_after(10, shield=True):
                await ended.wait()


@asynccontextmanager
async def _by_hypercorn(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.accesslog = config.errorlog = None
    config.graceful_timeout = 1
    config.keep_alive_timeout = BOUND_S  # as above
    stopped = trio.Event()

    async with trio.open_nursery() as nursery:

        async def serve(task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
            framework: ASGIFramework = app  # type: ignore[assignment]  # its own protocol types
            await hypercorn.trio.serve(
                framework,
                config,
                shutdown_trigger=stopped.wait,
                task_status=task_status,
                mode="asgi",
            )

        await nursery.start(serve)
        try:
            yield
        finally:
            stopped.set()


@dataclass
class World:
    """A gateway that is served, with a client, and the agent behind it."""

    agent: HeldAgent
    conversations: Conversations
    app: gateway.Gateway
    address: str
    http: httpx.AsyncClient

    async def send(self, name: str, text: str, **headers: str) -> httpx.Response:
        return await self.http.post(
            f"/v1/conversations/{name}/messages",
            json={"content": text},
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )

    async def answered(self, name: str, text: str) -> httpx.Response:
        """Send a message and wait for the end of its turn."""
        reply = await self.send(name, text, prefer="wait=60")
        assert reply.json()["end"]["outcome"] == "completed", reply.text
        return reply


@asynccontextmanager
async def gateway_world(
    other: Agent | None = None,
    *,
    condenser: Condenser | None = None,
    journal: Journal | None = None,
    limits: gateway.GatewayLimits = gateway.GatewayLimits(),
    authenticate: gateway.Authenticate | None = None,
) -> AsyncIterator[World]:
    agent = HeldAgent()
    with anyio.fail_after(BOUND_S):
        async with Conversations(
            other or agent, journal=journal or MemoryJournal(), condenser=condenser
        ) as conversations:
            app = gateway.app(conversations, authenticate=authenticate, limits=limits)
            async with (
                served(app, stall_s=limits.write_stall_s) as address,
                httpx.AsyncClient(base_url=address, headers=JSON, timeout=BOUND_S) as client,
            ):
                yield World(agent, conversations, app, address, client)


@dataclass
class Sse:
    """One server-sent event, or a comment."""

    event: str = "message"
    id: str | None = None
    data: str = ""
    is_comment: bool = False

    @property
    def json(self) -> dict[str, object]:
        value: dict[str, object] = json.loads(self.data)
        return value


class SseReader:
    """Reads the events of a stream, as the standard says."""

    def __init__(self, stream: SocketStream, connection: h11.Connection) -> None:
        self._stream = stream
        self._connection = connection
        self._received = b""

    def __aiter__(self) -> SseReader:
        return self

    async def __anext__(self) -> Sse:
        while True:
            block, end, rest = self._received.partition(b"\n\n")
            if end:
                self._received = rest
                if (found := _parse(block.decode())) is not None:
                    return found
            else:
                await self._receive()

    async def _receive(self) -> None:
        match await next_of(self._stream, self._connection):
            case h11.Data(data=data):
                self._received += data
            case h11.EndOfMessage():
                assert not self._received, "an event that was cut off"
                raise StopAsyncIteration
            case other:
                raise AssertionError(other)


async def next_of(stream: SocketStream, connection: h11.Connection) -> h11.Event:
    """Return the next part of a response."""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive())
        elif isinstance(event, h11.Event):
            return event
        else:
            raise AssertionError(event)


def _parse(block: str) -> Sse | None:
    found = Sse()
    for line in block.split("\n"):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "":
                found.is_comment = True
            case "event":
                found.event = value
            case "id":
                found.id = value
            case "data":
                found.data += value
            case "retry":
                return None
            case _:
                raise AssertionError(line)
    return found


@asynccontextmanager
async def reading(address: str, path: str, **headers: str) -> AsyncIterator[SseReader]:
    """Open a stream of events; `last_event_id` is a header. Leaving cuts the connection."""
    host, _, port = address.removeprefix("http://").partition(":")
    sent = {"Host": f"{host}:{port}", "Accept": "text/event-stream"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = h11.Connection(h11.CLIENT)
    request = h11.Request(method="GET", target=path, headers=list(sent.items()))
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(
            (connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b"")
        )
        response = await next_of(stream, connection)
        assert isinstance(response, h11.Response)
        assert response.status_code == 200, response.status_code
        assert dict(response.headers)[b"content-type"].startswith(b"text/event-stream")
        yield SseReader(stream, connection)
