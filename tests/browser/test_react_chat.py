"""The example in React, built and opened in a browser: the stock `useChat` against the gateway."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import anyio
import pytest
from fastapi import FastAPI
from playwright.async_api import Browser, expect

from tests.actors.conversations.worlds import HeldAgent
from tests.actors.gateway.node import install
from tests.actors.gateway.worlds import served
from turnkeeper.actors import Conversations, MemoryJournal, TurnContext

from .site import BOUND_MS, opened

pytestmark = pytest.mark.anyio

EXAMPLE = Path(__file__).parents[2] / "examples" / "react_chat"


@pytest.fixture(scope="module")
def example() -> dict[str, object]:
    """Build the page; return what its program has."""
    install(EXAMPLE)
    npm = shutil.which("npm")
    assert npm is not None
    subprocess.run([npm, "run", "build"], cwd=EXAMPLE, capture_output=True, check=True)
    return runpy.run_path(str(EXAMPLE / "serve.py"))


class Desk:
    """The agent of the example; what begins with `stream` is answered by one that can be held."""

    is_resumable = True

    def __init__(self, support: object) -> None:
        self._support = support
        self.held = HeldAgent()

    async def run(self, turn: TurnContext) -> None:
        is_held = turn.message.content.startswith("stream")
        await (self.held if is_held else self._support).run(turn)  # type: ignore[attr-defined]


async def test_the_page_talks_approves_goes_on_after_a_reload_regenerates_and_stops(
    browser: Browser, example: dict[str, object]
) -> None:
    desk, application = Desk(example["support"]), FastAPI()
    with anyio.fail_after(1_800):
        async with Conversations(desk, journal=MemoryJournal()) as conversations:
            example["mount"](application, conversations)  # type: ignore[operator]
            async with served(application) as address, opened(browser) as page:
                messages, answers = page.locator("article"), page.locator("article.assistant")

                async def say(text: str) -> None:
                    await page.get_by_label("Message").fill(text)
                    await page.get_by_role("button", name="Send").click()

                async def press(name: str) -> None:
                    await page.get_by_role("button", name=name).click(timeout=BOUND_MS)

                async def shows(text: str) -> None:
                    await expect(answers.last).to_contain_text(text, timeout=BOUND_MS)

                await page.goto(f"{address}/#chat")
                await say("Where is order 7?")
                await shows("Here is what I found: order 7 left the warehouse on Monday.")

                await say("I want 8 back")
                await press("Approve")
                await shows("Here is what I found: order 8 is paid back.")
                await say("I want 9 back")
                await press("Reject")
                await shows("Here is what I found: ")
                await expect(answers.last).not_to_contain_text("is paid back")

                desk.held.hold("stream one")
                await say("stream one")
                await shows("a(")
                await page.reload()
                await shows("a(")
                await expect(messages).to_have_count(8)
                desk.held.release("stream one")
                await shows("a(stream one)")

                desk.held.reached.clear()
                desk.held.hold("stream one")
                await press("Regenerate")
                await desk.held.reached["stream one"].wait()
                desk.held.release("stream one")
                await shows("a(stream one)")
                await expect(messages).to_have_count(8)
                assert desk.held.turns == ["stream one"] * 2

                desk.held.hold("stream two")
                await say("stream two")
                await shows("a(")
                await press("Stop")
                await expect(page.get_by_role("button", name="Regenerate")).to_be_enabled()
                assert await conversations["chat"].running() is None
