"""Requests drawn from the gateway's own OpenAPI document, valid and not, and cuts at any byte."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.actors.conversations.worlds import HeldAgent
from turnkeeper.actors import Conversations, MemoryJournal, gateway
from turnkeeper.actors.gateway import GatewayLimits, guard

from .worlds import BOUND_S, JSON, World, gateway_world

pytestmark = pytest.mark.costly

_API = gateway.app(Conversations(HeldAgent(), journal=MemoryJournal())).api
REQUESTS = schemathesis.openapi.from_dict(_API.openapi()).as_strategy()


@pytest.fixture(scope="module")
async def client(anyio_backend: object) -> AsyncIterator[httpx.AsyncClient]:
    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        transport = httpx.ASGITransport(gateway.app(conversations))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=JSON
        ) as client:
            yield client


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=REQUESTS, is_known=st.booleans())
async def test_no_request_makes_the_server_fail(
    client: httpx.AsyncClient, case: schemathesis.Case[Any], *, is_known: bool
) -> None:
    if is_known and "conversation_id" in (case.path_parameters or {}):
        case.path_parameters["conversation_id"] = "known"
        await client.post(
            "/v1/conversations/known/messages",
            json={"content": "hello"},
            headers={**JSON, "Prefer": "wait=60", "Idempotency-Key": "m1"},
        )
    # Streams without an end have tests of their own.
    query = {**(case.query or {}), "live": "false"}
    has_body = isinstance(case.body, dict | list | str | int | float | bool)
    headers = {name: value for name, value in (case.headers or {}).items() if _is_sendable(value)}
    with anyio.fail_after(60):
        reply = await client.request(
            case.method,
            case.formatted_path,
            params=query,
            json=case.body if has_body else {},
            headers={**headers, **JSON},
        )

    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400:
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.json()["status"] == reply.status_code
    if reply.status_code == 422:
        for fault in reply.json()["errors"]:
            assert fault["detail"]
            assert fault.keys() - {"detail"} <= {"pointer", "parameter", "header"}
            assert len(fault) == 2, reply.text


def _is_sendable(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isprintable()


async def test_a_reader_that_is_cut_at_any_byte_has_everything_once_and_in_order() -> None:
    """As `EventSource` does: it keeps the id of the last whole event, and comes back with that."""
    random_of = random.Random(7)
    async with gateway_world() as world:
        for n in range(3):
            await world.answered("alice", f"tool {n}")
        wanted = [
            f"{logged.seq}.{logged.event.id}"
            async for logged in world.conversations["alice"].events(live=False)
        ]

        for _ in range(6):
            seen: list[str] = []
            while len(seen) < len(wanted):
                received = await _read_some(world, seen, random_of.randrange(1, 3_000))
                whole = received.split(b"\n\n")[:-1]
                seen += [_id_of(event) for event in whole if event.startswith(b"id: ")]
            assert seen == wanted


async def _read_some(world: World, seen: list[str], length: int) -> bytes:
    """Open the stream after the last id, and cut the connection after so many bytes."""
    host, _, port = world.address.removeprefix("http://").partition(":")
    last = f"Last-Event-ID: {seen[-1]}\r\n" if seen else ""
    received = b""
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(
            f"GET /v1/conversations/alice/events HTTP/1.0\r\nHost: {host}\r\n{last}\r\n".encode()
        )
        while len(received) < length + 400 and b'"turn_ended"' not in received[-2_000:]:
            received += await stream.receive()
    return received.partition(b"\r\n\r\n")[2][:length]


def _id_of(event: bytes) -> str:
    return event.partition(b"\n")[0].removeprefix(b"id: ").decode()


async def test_head_is_answered_as_get_without_the_body() -> None:
    """Also for a stream, which would go on; the connection can be used again."""
    async with (
        gateway_world() as world,
        httpx.AsyncClient(base_url=world.address, timeout=BOUND_S) as http,
    ):
        await world.answered("alice", "hello")
        with anyio.fail_after(BOUND_S):
            for path in ("/healthz", "/v1/conversations/alice/state", "/v1/nowhere"):
                head = await http.head(path)
                get = await http.get(path)
                assert head.content == b""
                assert head.status_code == get.status_code, path
                for name in ("content-type", "content-length", "cache-control"):
                    assert head.headers[name] == get.headers[name], path
            stream = await http.head("/v1/conversations/alice/events")
            assert stream.status_code == 200
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert (await http.head("/v1/conversations/alice/pause")).status_code == 405
            assert (await http.get("/healthz")).status_code == 200


async def test_a_body_with_two_lengths_is_refused_and_nothing_after_it_is_read() -> None:
    """A proxy that goes by the other one takes the end of the first for the next request."""
    async with gateway_world() as world:
        host, _, port = world.address.removeprefix("http://").partition(":")
        hidden = f"POST /v1/conversations/hidden/pause HTTP/1.1\r\nHost: {host}\r\n\r\n"
        body = f"0\r\n\r\n{hidden}"
        head = (
            f"POST /v1/conversations/alice/pause HTTP/1.1\r\nHost: {host}\r\n"
            "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        received = b""
        async with await anyio.connect_tcp(host, int(port)) as stream:
            # The body follows the answer: a connection that is closed with bytes unread is reset,
            # and a reset can take the answer from the client.
            await stream.send(head.encode())
            with anyio.fail_after(60):
                while b"urn:turnkeeper:malformed" not in received:
                    received += await stream.receive()
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await stream.send(body.encode())
                while True:
                    received += await stream.receive()
        assert received.startswith(b"HTTP/1.1 400")
        assert received.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
async def test_a_client_that_still_sends_its_body_gets_the_refusal_and_no_reset(kind: str) -> None:
    """The reset took the answer from half of the clients, which then sent the same body again."""
    size = GatewayLimits().body_bytes_max + 1
    async with gateway_world() as world:
        host, _, port = world.address.removeprefix("http://").partition(":")
        head = (
            f"POST /v1/conversations/alice/messages HTTP/1.1\r\nHost: {host}\r\n"
            f"Content-Type: {kind}\r\nContent-Length: {size}\r\n\r\n"
        )
        received = b""
        with anyio.fail_after(BOUND_S):
            async with await anyio.connect_tcp(host, int(port)) as stream:
                await stream.send(head.encode())
                while not received.endswith(b"}"):
                    received += await stream.receive()
                await stream.send(bytes(size))
                with pytest.raises(anyio.EndOfStream):
                    await stream.receive()
        assert received.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("bound", ["REST_S", "REST_BYTES_MAX"])
async def test_a_refused_body_that_does_not_end_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    for each in ("REST_S", "REST_BYTES_MAX"):
        monkeypatch.setattr(guard, each, 0 if each == bound else 1 << 40)
    async with gateway_world() as world:
        host, _, port = world.address.removeprefix("http://").partition(":")
        head = (
            f"POST /v1/conversations/alice/messages HTTP/1.1\r\nHost: {host}\r\n"
            "Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{"
        )
        received = b""
        with anyio.fail_after(BOUND_S):
            async with await anyio.connect_tcp(host, int(port)) as stream:
                await stream.send(head.encode())
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                    while True:
                        received += await stream.receive()
        assert received.startswith(b"HTTP/1.1 415")


async def test_an_address_that_is_not_utf_8_is_refused() -> None:
    """Its id was read with U+FFFD in the place of the bytes that are wrong, as another one's."""
    async with gateway_world() as world:
        await world.answered("a\ufffd", "hello")
        for wrong in ("a%FF", "a%ED%A0%80", "a%C3"):
            for place in (f"/{wrong}/state", f"?prefix={wrong}", f"?{wrong}=1"):
                refused = await world.http.get(f"/v1/conversations{place}")
                assert refused.status_code == 400, place
                assert refused.json()["errors"] == [{"detail": "the address must be UTF-8"}]
        assert (await world.http.get("/v1/conversations/a%EF%BF%BD/state")).status_code == 200
        found = (await world.http.get("/v1/conversations?prefix=a%EF%BF%BD")).json()
        assert [row["id"] for row in found["conversations"]] == ["a\ufffd"]
