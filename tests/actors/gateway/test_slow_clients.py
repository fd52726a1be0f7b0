"""What the server holds for a client that reads nothing, until it is cut off."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import anyio
import pytest
from starlette.types import Message, Scope

from tests.actors.conversations.worlds import HeldAgent, write_log
from turnkeeper.actors import Conversations, MemoryJournal, SQLiteJournal, gateway
from turnkeeper.actors.events import UserMessageEvent

from .worlds import BOUND_S

pytestmark = pytest.mark.anyio

EVENT = 1 << 20
CLIENTS = 8


def scope_of(path: str, host: str = "localhost") -> Scope:
    """Return the scope of a GET request, as a server gives it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", host.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    """A file with a log of large events."""
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path, synchronous="NORMAL") as journal:
        events = [UserMessageEvent(content=f"{number:02d}" * (EVENT // 2)) for number in range(12)]
        await write_log(journal, "c", events)
    return path


@pytest.mark.parametrize("seq", [1, 5])
async def test_a_client_that_reads_nothing_costs_little_more_than_one_event(
    path: Path, seq: int
) -> None:
    """The rest of a page, the event and its frame came to 6 MB for each client."""
    scope = scope_of("/v1/conversations/c/events")
    stalled = 0
    asked = 0
    all_stalled = anyio.Event()

    async def receive() -> Message:
        nonlocal asked
        asked += 1
        if asked <= CLIENTS:
            return {"type": "http.request", "body": b"", "more_body": False}
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal stalled
        if message.get("body", b"").startswith(b"id: %d." % seq):
            stalled += 1
            if stalled == CLIENTS:
                all_stalled.set()
            await anyio.sleep_forever()

    async with Conversations(HeldAgent(), journal=SQLiteJournal(path)) as conversations:
        app = gateway.app(conversations)
        tracemalloc.start()
        try:
            async with anyio.create_task_group() as group:
                for _ in range(CLIENTS):
                    group.start_soon(app, dict(scope), receive, send)
                with anyio.fail_after(BOUND_S):
                    await all_stalled.wait()
                held, _ = tracemalloc.get_traced_memory()
                group.cancel_scope.cancel()
        finally:
            tracemalloc.stop()

    assert stalled == CLIENTS
    assert held / CLIENTS < 2.5 * EVENT


async def test_a_client_that_does_not_read_its_refusal_is_cut_off_like_any_other() -> None:
    """The server behind logged a traceback for each of them."""
    scope = scope_of("/healthz", host="elsewhere.example")
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)
        await anyio.sleep_forever()

    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        app = gateway.app(conversations, limits=gateway.GatewayLimits(write_stall_s=1e-9))
        with anyio.fail_after(BOUND_S):
            await app(scope, receive, send)

    assert [message["status"] for message in sent] == [421]
