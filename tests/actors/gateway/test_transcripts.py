"""The transcript: what people said and were told, in the shapes of providers and of clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from turnkeeper.actors import RollingCondenser, ScriptedModel, ToolAgent
from turnkeeper.actors.gateway import shapes
from turnkeeper.actors.models.messages import to_llm_messages
from turnkeeper.actors.values.frozen import FrozenObject

from .worlds import World, gateway_world

pytestmark = pytest.mark.costly

HERE = "/v1/conversations/alice"
SHAPES = {"openai-chat": "openai", "openai-responses": "openai_responses", "anthropic": "anthropic"}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with gateway_world() as world:
        yield world


async def messages(world: World, **query: object) -> dict[str, Any]:
    reply = await world.http.get(f"{HERE}/messages", params={k: str(v) for k, v in query.items()})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def contents(page: dict[str, Any]) -> list[str]:
    events = [logged["event"] for logged in page["messages"]]
    return [event.get("content", event["kind"]) for event in events]


async def test_the_view_has_the_shape_that_the_library_sends_to_a_provider(world: World) -> None:
    await world.answered("alice", "two tools")
    view = await world.conversations["alice"].view()

    for shape, library_shape in SHAPES.items():
        of_view = await messages(world, of="view", shape=shape)
        wanted = to_llm_messages(view, library_shape)  # type: ignore[arg-type]
        assert of_view["system"] == wanted.system
        assert [FrozenObject(message) for message in of_view["messages"]] == list(wanted)
        # Nothing was condensed or taken back: the transcript is the view.
        assert (await messages(world, shape=shape))["messages"] == of_view["messages"]


async def test_what_was_taken_back_is_not_in_the_transcript(world: World) -> None:
    await world.answered("alice", "one")
    await world.answered("alice", "two")
    await world.http.post(f"{HERE}/undo")

    assert contents(await messages(world)) == ["one", "a(one)"]
    assert [m["id"] for m in (await messages(world, shape="ai-sdk"))["messages"]][2:] == []


async def test_what_was_condensed_stays_in_the_transcript() -> None:
    agent = ToolAgent(ScriptedModel(lambda _: "answer"), [])
    condenser = RollingCondenser(max_size=6, keep_first=0)
    async with gateway_world(agent, condenser=condenser) as world:
        texts = [f"message {n}" for n in range(8)]
        for text in texts:
            await world.answered("alice", text)

        assert len(await world.conversations["alice"].view()) < 16
        assert contents(await messages(world))[::2] == texts


async def test_a_message_that_waits_is_the_last_of_the_transcript(world: World) -> None:
    world.agent.hold("slow")
    await world.send("alice", "slow")
    await world.send("alice", "later", idempotency_key="m2")

    assert contents(await messages(world)) == ["slow", "later"]
    last = (await messages(world, shape="ai-sdk"))["messages"][-1]
    assert (last["id"], last["role"]) == ("m2", "user")
    world.agent.release("slow")


async def pages_of(world: World, **query: object) -> list[list[str]]:
    pages: list[list[str]] = []
    before: dict[str, object] = {}
    while True:
        page = await messages(world, **query, **before)
        pages.append(contents(page))
        if not page["has_more"]:
            return pages
        before = {"before": page["messages"][0]["seq"]}


async def test_a_transcript_is_read_backwards_by_pages_and_at_any_seq(world: World) -> None:
    for text in ("one", "two", "three"):
        await world.answered("alice", text)

    pages = await pages_of(world, limit=4)

    assert pages == [["two", "a(two)", "three", "a(three)"], ["one", "a(one)"]]
    assert contents(await messages(world, at=4)) == ["one", "a(one)"]
    assert (await messages(world, at=4))["cursor"].startswith("4.")


async def test_pages_have_all_events_though_an_older_message_still_waits(world: World) -> None:
    for text in ("slow", "next"):
        world.agent.hold(text)
    for text in ("slow", "next", "last"):
        await world.send("alice", text, idempotency_key=text)
    world.agent.release("slow")
    await world.agent.reached["next"].wait()

    pages = await pages_of(world, limit=1)

    said = [text for page in reversed(pages) for text in page]
    assert said == ["slow", "last", "a(slow)", "next"]
    world.agent.release("next")


async def test_a_page_of_large_messages_is_short(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "READ_BYTES", 4_000)
    for text in ("one", "two"):
        await world.answered("alice", text * 1_000)

    pages = await pages_of(world)

    assert [len(page) for page in pages] == [2, 2]
    said = [text for page in reversed(pages) for text in page]
    assert [text[:5] for text in said] == ["oneon", "a(one", "twotw", "a(two"]


async def test_an_open_call_has_no_shape_for_a_provider_yet(world: World) -> None:
    world.agent.hold("tool")
    await world.send("alice", "tool")
    await world.agent.reached["tool"].wait()

    reply = await world.http.get(f"{HERE}/messages?shape=anthropic")

    assert (reply.status_code, reply.json()["type"]) == (409, "urn:turnkeeper:open-calls")
    world.agent.release("tool")
