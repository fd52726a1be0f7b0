"""The example in React, built and opened in a browser: the stock `useChat` against the gateway."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
from fastapi import FastAPI
from playwright.async_api import Browser, Page, Route, expect

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


class Talk(NamedTuple):
    """The example, served, and a page that has yet to open it."""

    desk: Desk
    conversations: Conversations
    address: str
    page: Page

    async def say(self, text: str) -> None:
        await self.page.get_by_label("Message").fill(text)
        await self.press("Send")

    async def press(self, name: str) -> None:
        await self.page.get_by_role("button", name=name).click(timeout=BOUND_MS)

    async def shows(self, *messages: str) -> None:
        """Wait until these are the messages on the screen."""
        articles = self.page.locator("article")
        await expect(articles).to_have_text(list(messages), timeout=BOUND_MS)

    async def begin(self, text: str) -> None:
        """Have an answer begun that can be held."""
        self.desk.held.hold(text)
        await self.conversations["chat"].send(text)
        await self.desk.held.reached[text].wait()

    async def said(self) -> list[str]:
        view = (await self.conversations["chat"].at()).view
        return [getattr(event, "content", "") for event in view]


@asynccontextmanager
async def talking(browser: Browser, example: dict[str, object]) -> AsyncIterator[Talk]:
    desk, application = Desk(example["support"]), FastAPI()
    with anyio.fail_after(1_800):
        async with Conversations(desk, journal=MemoryJournal()) as conversations:
            example["mount"](application, conversations)  # type: ignore[operator]
            async with served(application) as address, opened(browser) as page:
                yield Talk(desk, conversations, address, page)


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


async def test_a_page_that_is_opened_without_a_name_is_found_again_after_a_reload(
    browser: Browser, example: dict[str, object]
) -> None:
    async with talking(browser, example) as talk:
        await talk.page.goto(talk.address)
        await talk.say("stream one")
        await talk.shows("stream one", "a(stream one)")
        await talk.page.reload()
        await talk.shows("stream one", "a(stream one)")


async def test_a_page_whose_address_names_another_conversation_shows_that_alone(
    browser: Browser, example: dict[str, object]
) -> None:
    async with talking(browser, example) as talk:
        await (await talk.conversations["other"].send("stream other")).reply()
        await talk.begin("stream one")
        await talk.page.goto(f"{talk.address}/#chat")
        await talk.shows("stream one", "a(")
        await talk.page.evaluate("() => { location.hash = 'other'; }")
        await talk.shows("stream other", "a(stream other)")
        talk.desk.held.release("stream one")


async def test_an_answer_that_ends_while_the_page_is_loaded_is_shown(
    browser: Browser, example: dict[str, object]
) -> None:
    """It is still being written when the first request comes, and has ended at the second."""
    async with talking(browser, example) as talk:
        await talk.begin("stream one")
        requests: list[Route] = []

        async def late(route: Route) -> None:
            requests.append(route)
            if len(requests) == 2:
                talk.desk.held.release("stream one")
                turn = await talk.conversations["chat"].running()
                if turn is not None:
                    await turn.end()
            await route.continue_()

        await talk.page.route("**/chat/v1/**", late)
        await talk.page.goto(f"{talk.address}/#chat")
        await talk.shows("stream one", "a(stream one)")


async def test_a_page_that_cannot_read_what_was_said_says_so(
    browser: Browser, example: dict[str, object]
) -> None:
    """An empty page would mean that nothing has been said."""
    async with talking(browser, example) as talk:
        await (await talk.conversations["chat"].send("stream one")).reply()
        away = "**/messages?*"
        await talk.page.route(away, lambda route: route.fulfill(status=503, body="unavailable"))
        await talk.page.goto(f"{talk.address}/#chat")
        await expect(talk.page.get_by_role("alert")).to_contain_text("unavailable")
        await talk.page.get_by_label("Message").fill("stream two")
        await expect(talk.page.get_by_role("button", name="Send")).to_be_disabled()
        await talk.page.unroute(away)
        await talk.press("Go on")
        await talk.shows("stream one", "a(stream one)")


@pytest.mark.parametrize("is_taken", [True, False])
async def test_a_message_that_failed_is_sent_again_and_is_in_the_log_once(
    browser: Browser, example: dict[str, object], is_taken: bool
) -> None:
    async with talking(browser, example) as talk:
        await talk.page.goto(f"{talk.address}/#chat")
        chat = "**/v1/ai-sdk/chat"

        async def lose(route: Route) -> None:
            """Lose the request, or its reply."""
            if is_taken:
                await route.fetch()
            await route.abort()

        await talk.page.route(chat, lose)
        await talk.say("stream one")
        await talk.page.get_by_role("alert").wait_for()
        await talk.page.unroute(chat)
        await talk.press("Go on")
        await talk.shows("stream one", "a(stream one)")
        assert await talk.said() == ["stream one", "a(stream one)"]


async def test_a_message_in_place_of_one_that_failed_is_the_only_one(
    browser: Browser, example: dict[str, object]
) -> None:
    async with talking(browser, example) as talk:
        await talk.page.goto(f"{talk.address}/#chat")
        chat = "**/v1/ai-sdk/chat"
        await talk.page.route(chat, lambda route: route.abort())
        await talk.say("stream one")
        await talk.page.get_by_role("alert").wait_for()
        await talk.page.unroute(chat)
        await talk.say("stream two")
        await talk.shows("stream two", "a(stream two)")
        assert await talk.said() == ["stream two", "a(stream two)"]


CUTS = """() => {
  const { fetch } = window;
  window.fetch = async (...request) => {
    const response = await fetch(...request);
    if (!response.headers.get('content-type')?.startsWith('text/event-stream')) return response;
    const body = new TransformStream({
      start(controller) { window.cut = () => controller.error(new TypeError('network error')); },
    });
    return new Response(response.body.pipeThrough(body), response);
  };
}"""
"""Lets a test cut the newest stream by `cut()`, as a lost connection does."""


async def test_an_answer_that_was_cut_off_and_has_ended_is_shown_whole(
    browser: Browser, example: dict[str, object]
) -> None:
    async with talking(browser, example) as talk:
        await talk.page.add_init_script(f"({CUTS})()")
        await talk.page.goto(f"{talk.address}/#chat")
        talk.desk.held.hold("stream one")
        await talk.say("stream one")
        await talk.shows("stream one", "a(")
        await talk.page.get_by_label("Message").fill("stream two")
        await expect(talk.page.get_by_role("button", name="Send")).to_be_disabled()
        await talk.page.evaluate("() => cut()")
        await talk.page.get_by_role("alert").wait_for()
        turn = await talk.conversations["chat"].running()
        assert turn is not None
        talk.desk.held.release("stream one")
        await turn.end()
        await talk.press("Go on")
        await talk.shows("stream one", "a(stream one)")
        await talk.press("Send")
        await talk.shows("stream one", "a(stream one)", "stream two", "a(stream two)")


async def test_a_late_press_on_stop_does_not_end_the_next_turn(
    browser: Browser, example: dict[str, object]
) -> None:
    async with talking(browser, example) as talk:
        await talk.page.goto(f"{talk.address}/#chat")
        talk.desk.held.hold("stream one")
        await talk.say("stream one")
        await talk.shows("stream one", "a(")
        turn = await talk.conversations["chat"].running()
        assert turn is not None
        stopped = anyio.Event()

        async def late(route: Route) -> None:
            talk.desk.held.release("stream one")
            await turn.end()
            await talk.begin("stream two")
            await route.fulfill(response=await route.fetch())
            stopped.set()

        await talk.page.route("**/stop", late)
        await talk.press("Stop")
        await stopped.wait()
        assert await talk.conversations["chat"].running() is not None
        talk.desk.held.release("stream two")
