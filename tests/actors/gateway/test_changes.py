"""The rows of a list as they change, whichever process writes them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import anyio.lowlevel
import httpx
import pytest

from tests.actors.conversations.worlds import HeldAgent
from turnkeeper.actors import Conversations, MemoryJournal, MemoryStore, gateway
from turnkeeper.actors.gateway import GatewayLimits

from .test_owners import by_header
from .worlds import BOUND_S, JSON, SseReader, World, reading, served

pytestmark = pytest.mark.costly

QUICK = GatewayLimits(changes_every_s=0.01)


@asynccontextmanager
async def world_of(
    store: MemoryStore,
    limits: GatewayLimits = QUICK,
    authenticate: gateway.Authenticate | None = None,
) -> AsyncIterator[World]:
    agent = HeldAgent()
    with anyio.fail_after(BOUND_S):
        async with Conversations(agent, journal=MemoryJournal(store)) as conversations:
            app = gateway.app(conversations, limits=limits, authenticate=authenticate)
            async with (
                served(app) as address,
                httpx.AsyncClient(base_url=address, headers=JSON, timeout=BOUND_S) as client,
            ):
                yield World(agent, conversations, app, address, client)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with world_of(MemoryStore()) as world:
        yield world


async def until(
    events: SseReader, wanted: str, seen: list[object] | None = None, **facts: object
) -> dict[str, object]:
    """Read on until an event of this kind has these facts; note the rows that are seen."""
    async for event in events:
        if seen is not None and event.event == "row":
            seen.append(event.json["id"])
        if event.event == wanted and facts.items() <= event.json.items():
            return event.json
    raise AssertionError("the stream has ended")


async def test_a_stream_begins_with_the_rows_that_the_list_has(world: World) -> None:
    for name in ("a", "b", "c"):
        await world.answered(name, "hello")

    async with reading(world.address, "/v1/changes?limit=2") as events:
        seen = [await anext(events) for _ in range(3)]

    listed = await world.http.get("/v1/conversations?order=activity&limit=2")
    assert [event.event for event in seen] == ["row", "row", "caught-up"]
    assert [event.json for event in seen[:2]] == listed.json()["conversations"]
    assert seen[2].json == {"count": 2}


async def test_each_change_of_a_row_comes_and_nothing_else(world: World) -> None:
    seen: list[object] = []
    await world.answered("still", "hello")
    async with reading(world.address, "/v1/changes") as events:
        await until(events, "caught-up")

        world.agent.hold("slow")
        await world.send("alice", "slow")
        await until(events, "row", seen, id="alice", status="running")
        world.agent.release("slow")
        await until(events, "row", seen, id="alice", status="finished", last_message="a(slow)")
        await world.http.patch("/v1/conversations/alice", json={"title": "Books"})
        await until(events, "row", seen, title="Books")
        await world.http.delete("/v1/conversations/alice")
        assert await until(events, "gone", seen) == {"id": "alice"}
    assert "still" not in seen


async def test_what_another_process_writes_is_seen() -> None:
    store = MemoryStore()
    async with (
        world_of(store) as here,
        Conversations(HeldAgent(), journal=MemoryJournal(store)) as elsewhere,
        reading(here.address, "/v1/changes") as events,
    ):
        await until(events, "caught-up")
        await (await elsewhere["theirs"].send("hello")).end()
        row = await until(events, "row", id="theirs", last_message="a(hello)")

    assert row["owned"] == "elsewhere"


async def test_a_filter_holds_for_what_changes_too(world: World) -> None:
    await world.answered("a", "hello")
    await world.answered("b", "hello")
    async with reading(world.address, "/v1/changes?label=team%3Dbooks") as events:
        assert (await until(events, "caught-up")) == {"count": 0}
        for label, wanted in (("books", "row"), ("other", "gone")):
            await world.http.patch("/v1/conversations/b", json={"labels": {"team": label}})
            assert (await until(events, wanted))["id"] == "b"
    refused = await world.http.get("/v1/changes?status=planted")
    assert (refused.status_code, "planted" in refused.text) == (422, False)


async def test_a_principal_sees_the_changes_of_its_own_alone() -> None:
    async with (
        world_of(MemoryStore(), authenticate=by_header) as world,
        reading(world.address, "/v1/changes", x_user="alice") as events,
    ):
        await until(events, "caught-up")
        for user in ("bob", "alice"):
            await world.send("mine", f"planted by {user}", x_user=user, prefer="wait=60")
        row = await until(events, "row")

    assert (row["id"], row["owner"]) == ("mine", "alice")
    assert "bob" not in str(row)


@pytest.mark.parametrize("changes_every_s", [0.01, 2 * BOUND_S])
async def test_a_stream_without_changes_sends_comments_and_ends_with_the_drain(
    changes_every_s: float,
) -> None:
    limits = GatewayLimits(changes_every_s=changes_every_s, heartbeat_s=0.02)
    async with (
        world_of(MemoryStore(), limits) as world,
        reading(world.address, "/v1/changes") as events,
    ):
        await until(events, "caught-up")
        assert (await anext(events)).is_comment
        await world.app.drain(0)
        assert await until(events, "end") == {"why": "draining"}
        assert world.app._service.streams.changes.count == 0
        again = await world.http.get("/v1/changes")
        assert 'data: {"why":"draining"}' in again.text


async def test_many_streams_together_look_no_more_often_than_a_few(world: World) -> None:
    """Were each to look every while, thousands of open pages would be thousands of looks."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await anyio.lowlevel.checkpoint()

    service = world.app._service
    service.ports = replace(service.ports, sleep=sleep)
    service.streams.changes.count += 1_000
    async with reading(world.address, "/v1/changes") as events:
        await until(events, "caught-up")
        while not slept:
            await anyio.lowlevel.checkpoint()

    assert slept[0] == pytest.approx(10.01)
