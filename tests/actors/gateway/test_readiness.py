"""Readiness is false only for what another node may do better."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest

from tests.actors.conversations.worlds import HeldAgent
from turnkeeper.actors import Conversations, MemoryJournal, gateway
from turnkeeper.actors.errors import JournalUnavailable
from turnkeeper.actors.gateway import readiness
from turnkeeper.actors.journal import ConversationInfo, ListPage, ListQuery
from turnkeeper.runtime import DaemonThreads, Ports

from .worlds import JSON

pytestmark = pytest.mark.anyio


class Faulty(MemoryJournal):
    """A journal whose lease may be lost, and whose database may be away."""

    has_lease = True
    answers = True
    hangs = False

    def is_lease_valid(self, *, since: float | None = None) -> bool:
        return self.has_lease and super().is_lease_valid(since=since)

    async def page(self, query: ListQuery) -> ListPage:
        if self.hangs:
            await anyio.sleep_forever()
        self._check()
        return await super().page(query)

    async def info(self, conversation_id: str) -> ConversationInfo:
        self._check()
        return await super().info(conversation_id)

    def _check(self) -> None:
        if not self.answers:
            raise JournalUnavailable("planted: the database is away")


@asynccontextmanager
async def asking(
    conversations: Conversations, *, read_only: bool = False
) -> AsyncIterator[httpx.AsyncClient]:
    app = gateway.app(conversations, read_only=read_only)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=JSON
    ) as client:
        yield client


async def readiness_of(client: httpx.AsyncClient) -> str:
    """Return "ready", or the name of the problem; `healthz` is true in any case."""
    assert (await client.get("/healthz")).status_code == 200
    reply = await client.get("/readyz")
    if reply.status_code == 200:
        return "ready"
    assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1")
    kind: str = reply.json()["type"]
    return kind.removeprefix("urn:turnkeeper:")


async def test_it_is_not_ready_before_it_is_open_and_after_it_is_left() -> None:
    conversations = Conversations(HeldAgent(), journal=MemoryJournal())
    async with asking(conversations) as client:
        assert await readiness_of(client) == "not-open"
        async with conversations:
            assert await readiness_of(client) == "ready"
        assert await readiness_of(client) == "not-open"


async def test_it_is_not_ready_while_recovery_on_entering_goes_on() -> None:
    reached, gate = anyio.Event(), anyio.Event()

    class Slow(MemoryJournal):
        async def find_abandoned(self) -> Sequence[ConversationInfo]:
            reached.set()
            await gate.wait()
            return await super().find_abandoned()

    conversations = Conversations(HeldAgent(), journal=Slow())
    left = anyio.Event()

    async def run() -> None:
        async with conversations:
            await left.wait()

    async with asking(conversations) as client, anyio.create_task_group() as group:
        group.start_soon(run)
        await reached.wait()
        assert await readiness_of(client) == "not-open"
        gate.set()
        while await readiness_of(client) != "ready":
            await anyio.lowlevel.checkpoint()  # nothing else here lets the loop run
        left.set()


async def test_it_is_not_ready_while_the_application_drains() -> None:
    async with (
        Conversations(HeldAgent(), journal=MemoryJournal()) as conversations,
        asking(conversations) as client,
    ):
        await conversations.drain(0)
        assert await readiness_of(client) == "draining"


async def test_it_is_not_ready_if_it_may_not_write_while_the_database_answers() -> None:
    """Its lease is lost, or its file is closed for writing: another node can do better."""
    journal = Faulty()
    async with Conversations(HeldAgent(), journal=journal) as conversations:
        async with asking(conversations) as client:
            journal.has_lease = False
            assert await readiness_of(client) == "not-writing"
            journal.has_lease = True
            assert await readiness_of(client) == "ready"
        async with asking(conversations, read_only=True) as client:
            journal.has_lease = False
            assert await readiness_of(client) == "ready"
            journal.has_lease = True


@pytest.mark.parametrize("hangs", [False, True])
async def test_it_stays_ready_while_the_database_is_away_and_refuses_each_request(
    monkeypatch: pytest.MonkeyPatch,
    hangs: bool,
) -> None:
    monkeypatch.setattr(readiness, "ANSWER_S", 0.01)
    journal = Faulty()
    async with (
        Conversations(HeldAgent(), journal=journal) as conversations,
        asking(conversations) as client,
    ):
        journal.answers, journal.has_lease, journal.hangs = False, False, hangs
        assert await readiness_of(client) == "ready"
        journal.hangs = False
        for method, address in (
            ("GET", "/v1/conversations"),
            ("GET", "/v1/conversations/a/state"),
            ("POST", "/v1/conversations/a/interrupt"),
        ):
            reply = await client.request(method, address, json=None if method == "GET" else {})
            assert reply.status_code == 503, address
            assert reply.json()["type"] == "urn:turnkeeper:journal-unavailable"
            assert int(reply.headers["Retry-After"]) > 0
        journal.answers = journal.has_lease = True


async def test_it_is_not_ready_while_it_is_out_of_threads() -> None:
    threads = DaemonThreads(abandoned_max=1)
    ports = Ports(blocking=threads)
    async with (
        Conversations(HeldAgent(), journal=MemoryJournal(), ports=ports) as conversations,
        asking(conversations) as client,
    ):
        hanging = threading.Event()
        started = threading.Event()

        def hang() -> None:
            started.set()
            hanging.wait()

        async with anyio.create_task_group() as group:
            group.start_soon(threads, hang)
            while not started.is_set():
                await anyio.lowlevel.checkpoint()
            assert await readiness_of(client) == "ready"
            group.cancel_scope.cancel()
        assert await readiness_of(client) == "out-of-threads"
        hanging.set()
        while await readiness_of(client) != "ready":
            await anyio.lowlevel.checkpoint()  # nothing else here lets the loop run


@pytest.mark.parametrize("was_left", [False, True], ids=["before it is open", "after it was left"])
async def test_a_node_that_is_not_open_ends_streams_and_refuses_requests(was_left: bool) -> None:
    """A browser comes back to a stream after a 200 alone, and other clients after a 503."""
    conversations = Conversations(HeldAgent(), journal=MemoryJournal())
    if was_left:
        async with conversations:
            pass
    async with asking(conversations) as client:
        here = "/v1/conversations/c"
        for path in (f"{here}/events", "/v1/changes"):
            stream = await client.get(path, headers={"Accept": "text/event-stream"})
            assert stream.status_code == 200
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert stream.text.endswith('event: end\ndata: {"why":"not-open"}\n\n')

        refused = [
            await client.post(f"{here}/messages", json={"content": "hello"}),
            await client.get(f"{here}/events", headers={"Accept": "application/json"}),
            await client.get(f"{here}/state"),
            await client.get("/v1/runtime/tree"),
        ]
        for reply in refused:
            assert reply.status_code == 503
            assert reply.json()["type"] == "urn:turnkeeper:not-open"
            assert int(reply.headers["retry-after"]) > 0
        assert (await client.get("/healthz")).status_code == 200
