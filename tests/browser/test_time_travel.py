"""Time travel is exact: the page, the API and the exported log tell the same, at any seq."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import httpx
import pytest
from playwright.async_api import Browser, expect

from tests.actors.models.asking import asking
from tests.actors.models.servers import Answer, Call
from tests.drawn import drawn
from tests.process.stressing import small_stress
from turnkeeper.actors import Event, SQLiteJournal, ToolAgent
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.events import decode_event
from turnkeeper.actors.gateway.names import to_path
from turnkeeper.actors.journal import Journal
from turnkeeper.actors.journals.transfer import export_lines

from .site import BOUND_MS, site
from .stories import refund_story, research_story, team_story

pytestmark = pytest.mark.anyio

PAIRS = 1_000
PARTS = range(200)
SHAPES = {"chat": "OpenAI chat", "responses": "OpenAI responses", "anthropic": "Anthropic"}
SHOWN = """() => ({
  events: [...document.querySelectorAll('tk-travel .row')].map((row) => row.dataset.eventId),
  texts: [...document.querySelectorAll('tk-travel .seen .text')].map((text) => text.textContent),
  facts: Object.fromEntries([...document.querySelectorAll('.travel-facts dt')].map(
    (name) => [name.textContent, name.nextElementSibling.textContent])),
  calls: document.querySelectorAll('.travel-facts section:nth-of-type(2) li').length,
  queued: document.querySelectorAll('.travel-facts section:nth-of-type(3) li').length,
})"""


async def logs_of(journal: Journal) -> Mapping[str, Sequence[Event]]:
    """Return each log as its export has it."""
    found: dict[str, list[Event]] = {}
    name = ""
    async for line in export_lines(journal):
        record = json.loads(line)
        if "conversation" in record:
            name = record["conversation"]
            found[name] = []
        elif "event" in record:
            found[name].append(decode_event(json.dumps(record["event"])))
    return found


@pytest.fixture(scope="module")
async def stressed(
    anyio_backend: object, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Mapping[str, Sequence[Event]]]:
    """Return a journal of users who talk over their agents, with kills; and its logs."""
    path = tmp_path_factory.mktemp("stressed") / "chats.db"
    stress = small_stress(str(path), conversations=12, rate=60, duration_s=2)
    await stress.run()
    async with SQLiteJournal(path) as journal:
        for story in (refund_story(), research_story(), team_story()):
            await story.write(journal)
        logs = await logs_of(journal)
    assert sum(map(len, logs.values())) > 300
    return path, logs


@pytest.mark.sweep
@pytest.mark.parametrize("part", drawn(PARTS, 1))
async def test_the_page_the_api_and_the_export_tell_the_same_at_any_seq(
    browser: Browser, stressed: tuple[Path, Mapping[str, Sequence[Event]]], part: int
) -> None:
    """The page is so high that it shows a whole view."""
    path, logs = stressed
    random = Random(7)
    names = sorted(logs)
    pairs = [(name, random.randint(0, len(logs[name]))) for name in random.choices(names, k=PAIRS)]

    async with (
        site(browser, journal=SQLiteJournal(path), height=16_000) as world,
        httpx.AsyncClient(base_url=world.address, timeout=BOUND_MS / 1_000) as client,
    ):
        for name, seq in pairs[part :: len(PARTS)]:
            folded = Folded()
            for event in logs[name][:seq]:
                folded.fold(event)
            await world.travelled(name, seq)
            await expect(world.page.locator("tk-travel .row")).to_have_count(
                len(folded.view), timeout=BOUND_MS
            )
            page = await world.page.evaluate(SHOWN)
            place = f"/v1/conversations/{to_path(name)}"
            view = (await client.get(f"{place}/view", params={"at": seq})).json()["events"]
            state = (await client.get(f"{place}/state", params={"at": seq})).json()

            assert view == [json.loads(event.model_dump_json()) for event in folded.view]
            assert page["events"] == [event.id for event in folded.view]
            for event, text in zip(view, page["texts"], strict=True):
                assert event.get("content", "")[:1_000] in text, (name, seq)
            status = folded.agent_execution_status.value.lower()
            assert state["status"] == status
            assert page["facts"]["status"] == status.replace("_", " ")
            assert page["facts"]["in"] == f"{folded.metrics.input_tokens:,}"
            assert page["calls"] == len(state["open_calls"]) == len(folded.pending_actions)
            assert page["queued"] == len(state["queued"]) == len(folded.turns.queued)


def canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


async def look(at: str) -> str:
    """Look somewhere."""
    return f"seen {at}"


@pytest.mark.sweep
@pytest.mark.parametrize("api", drawn(sorted(SHAPES), 1))
async def test_what_the_model_was_asked_is_what_it_received(browser: Browser, api: str) -> None:
    """The server of the model has the requests; the page shows them, in the shape of that API."""
    async with asking(api) as one:
        one.server.replies.extend(
            (
                Answer(["first"]),
                Answer(["let me look"], [Call("look", ['{"at": "<here>"}'])]),
                Answer(["second"]),
            )
        )
        async with site(browser, agent=ToolAgent(one.model, [look])) as world:
            chat = world.conversations["c"]
            await (await chat.send("A")).reply()
            await (await chat.send("B")).reply()
            await world.at("c", "travel")
            await world.button("Asked")
            await world.button(SHAPES[api])
            await world.button("JSON")
            # As long as the messages are shown by kind, each call and each result is one.
            await expect(world.page.locator(".asked pre")).to_have_count(1, timeout=BOUND_MS)
            for step, body in enumerate(one.server.bodies, 1):
                await world.page.get_by_label("step", exact=True).fill(str(step))
                await world.press("Enter")
                bar = world.page.locator(".asked .bar")
                view_seq = (await chat.steps())[step - 1].view_seq
                await expect(bar).to_contain_text(f"view at seq {view_seq}")
                shown = json.loads(await world.page.locator(".asked pre").inner_text())
                sent = body["input"] if api == "responses" else body["messages"]
                if isinstance(shown, dict):
                    assert shown["system"] == body.get("system", "")
                    shown = shown["messages"]
                assert canonical(shown) == canonical(sent)
        assert len(one.server.bodies) == 3
