"""Exchanges are cut at exactly the byte that was meant, and what breaks otherwise is told apart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import SocketStream

from turnkeeper.actors.torture.exchanges import Broken, Cut, CutOff, ServerSent, Site, Sites

pytestmark = pytest.mark.anyio

BOUND_S = 60.0
BODY = 'id: 1.a\ndata: {"said": "naïve"}\n\n: beat\n\nevent: end\r\ndata: {}\r\n\r\n'.encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
WHOLE = HEAD % len(BODY) + BODY
EVENTS = [ServerSent('{"said": "naïve"}', "message", "1.a"), ServerSent("{}", "end")]


class RawServer:
    """Sends the same bytes to all who connect, and keeps what they sent."""

    def __init__(self, sends: bytes) -> None:
        self.sends = sends
        self.received: list[bytes] = []

    async def __call__(self, stream: SocketStream) -> None:
        async with stream:
            received = b""
            try:
                while not received.endswith(b'"hello"'):
                    received += await stream.receive()
                await stream.send(self.sends)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass
            self.received.append(received)


@asynccontextmanager
async def serving(sends: bytes) -> AsyncIterator[tuple[RawServer, Site]]:
    server = RawServer(sends)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    with anyio.fail_after(BOUND_S):
        async with listener, anyio.create_task_group() as group:
            group.start_soon(listener.serve, server)
            yield server, Site(f"http://127.0.0.1:{port}")
            group.cancel_scope.cancel()


async def read(site: Site, cut: Cut = Cut()) -> list[ServerSent]:
    """Exchange; return the events that came before the end."""
    found: list[ServerSent] = []
    async with site.exchange("POST", "/", body="hello", cut=cut) as reply:
        assert reply.status == 200
        async for event in reply.events():
            found.append(event)  # noqa: PERF401 - the first ones count if it ends early
    return found


async def test_without_a_cut_all_events_come() -> None:
    async with serving(WHOLE) as (_, site):
        assert await read(site) == EVENTS


async def test_a_response_is_cut_at_each_byte() -> None:
    async with serving(WHOLE) as (_, site):
        for received in range(len(WHOLE)):
            with pytest.raises(CutOff):
                await read(site, Cut(received=received))
        assert await read(site, Cut(received=len(WHOLE))) == EVENTS


async def test_a_request_is_cut_at_each_byte() -> None:
    async with serving(WHOLE) as (server, site):
        await read(site)
        request = server.received.pop()
        for sent in range(len(request)):
            with pytest.raises(CutOff):
                await read(site, Cut(sent=sent))
        while len(server.received) < len(request):
            await anyio.lowlevel.checkpoint()

    # They are noted when the server has seen their ends, in any order.
    assert sorted(server.received, key=len) == [request[:sent] for sent in range(len(request))]


@pytest.mark.parametrize("left_out", [1, len(BODY), len(WHOLE) - 5, len(WHOLE)])
async def test_a_response_that_the_server_does_not_finish_is_broken(left_out: int) -> None:
    async with serving(WHOLE[:-left_out]) as (_, site):
        with pytest.raises(Broken):
            await read(site)


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"{", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_says_nothing(body: bytes) -> None:
    async with (
        serving(HEAD % len(body) + body) as (_, site),
        site.exchange("POST", "/", body="hello") as reply,
    ):
        assert await reply.json() == {}


async def test_a_stream_that_ends_within_an_event_is_broken() -> None:
    half = b"data: {}\n"
    async with serving(HEAD % len(half) + half) as (_, site):
        with pytest.raises(Broken, match="within an event"):
            await read(site)


@pytest.mark.parametrize("noise", [b"\0\1\2\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"SSH-2.0-x\r\n"])
async def test_what_is_no_http_is_broken(noise: bytes) -> None:
    async with serving(noise) as (_, site):
        with pytest.raises(Broken):
            await read(site)


async def test_an_exchange_goes_to_the_next_server_if_one_takes_no_connections() -> None:
    """Also while another exchange looks for one: each asks all of them."""
    async with serving(WHOLE) as (_, site):
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
        sites = Sites([f"http://127.0.0.1:{port}", site.url])  # nothing listens at the first now

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(read, sites)

        with pytest.raises(Broken, match="cannot be connected to"):
            await read(Sites([f"http://127.0.0.1:{port}"] * 2))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        Site(url)
