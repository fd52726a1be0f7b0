"""A server that goes away and comes back, in each view: what is shown stays, and then goes on."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from playwright.async_api import Browser, Page, Route, expect

from tests.actors.conversations.worlds import HeldAgent
from tests.actors.gateway.worlds import served_on
from tests.ports import free_port
from turnkeeper.actors import Conversations, MemoryJournal, gateway

from .site import BOUND_MS, LIMITS, opened, site
from .stories import refund_story, team_story

pytestmark = [pytest.mark.anyio, pytest.mark.in_parts(3)]

AWAY = "The server does not answer"


class Restarted:
    """A gateway at one port, which can be stopped, and served anew."""

    def __init__(self, conversations: Conversations) -> None:
        self.conversations = conversations
        self._port = free_port()
        self.address = f"http://127.0.0.1:{self._port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = gateway.app(self.conversations, limits=LIMITS)
        with socket.create_server(("127.0.0.1", self._port)) as listener:
            async with served_on(app, listener):
                yield


async def told(page: Page, text: str, within: str = "tk-inspector") -> None:
    await expect(page.locator(within)).to_contain_text(text, timeout=BOUND_MS)


async def test_each_view_keeps_what_it_shows_and_goes_on_with_what_came(browser: Browser) -> None:
    """Six pages, one for each view; the server is stopped, and served anew at the same port."""
    journal = MemoryJournal()
    async with journal:
        await refund_story().write(journal)
        await team_story().write(journal)
    views = {
        "list": ("", "Refund of order 7", "are you back"),
        "log": ("c/refund-7/log", "Refund of order 7", "a(are you back)"),
        "travel": ("c/refund-7/travel", "What the model sees at seq 31", "sees at seq 35"),
        "timeline": ("c/refund-7/timeline", "Turn 3", "Turn 4"),
        "act": ("c/refund-7/act", "No turn runs", "seq 35"),
        "runtime": ("runtime", "Dead letters", "conversations/refund-7"),
    }
    with anyio.fail_after(1_800):
        async with Conversations(HeldAgent(), journal=journal) as conversations:
            server = Restarted(conversations)
            async with AsyncExitStack() as stack:
                # Each in a profile of its own: one profile has six connections to a server.
                pages = {view: await stack.enter_async_context(opened(browser)) for view in views}
                async with server.running():
                    for view, (place, shows, _) in views.items():
                        await pages[view].goto(f"{server.address}/inspector/#/{place}")
                        await told(pages[view], shows)

                for view, (_, shows, _) in views.items():
                    await told(pages[view], AWAY)
                    await told(pages[view], shows)
                # Places that are asked for now cannot be read.
                await pages["travel"].keyboard.press("[")
                await expect(pages["travel"].locator("tk-travel")).to_have_attribute(
                    "data-shown", "problem 30"
                )
                await told(pages["travel"], "What the model sees at seq 31")
                await (await conversations["refund-7"].send("are you back")).reply()

                async with server.running():
                    await told(pages["travel"], "What the model sees at seq 30")
                    await pages["travel"].evaluate("() => { location.hash += '?seq=35'; }")
                    for view, (_, _, then) in views.items():
                        await told(pages[view], then)
                        await expect(pages[view].locator(".notice")).to_have_count(0)


async def test_the_notice_moves_nothing_under_the_mouse_and_takes_no_click(
    browser: Browser,
) -> None:
    async with site(browser) as world:
        await (await world.conversations["alice"].send("hello")).reply()
        await world.at("alice", "act")
        await world.shows("No turn runs", "tk-act")
        button = world.page.get_by_role("button", name="Send")
        before = await button.bounding_box()

        await world.page.route("**/v1/**", lambda route: route.abort())
        await button.click()  # an empty message is not sent; the next look at the server fails
        await world.page.evaluate("() => dispatchEvent(new HashChangeEvent('hashchange'))")
        await world.page.get_by_role("button", name="Verify").click()
        await world.shows(AWAY, ".away")

        assert await button.bounding_box() == before
        notice = await world.page.locator(".notice").bounding_box()
        assert notice is not None
        under = "([x, y]) => document.elementFromPoint(x, y).closest('.away')"
        assert await world.page.evaluate(under, [notice["x"] + 9, notice["y"] + 9]) is None


async def test_a_hidden_page_keeps_no_connection_and_goes_on_when_it_is_shown(
    browser: Browser,
) -> None:
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("hello")).reply()
        await world.at("alice")
        await world.shows("a(hello)", ".transcript-pane")
        streams = world.app._service.streams
        hide = """(hidden) => {
          Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
          document.dispatchEvent(new Event('visibilitychange'));
        }"""
        while streams.count < 2:  # of the list, and of the log
            await anyio.lowlevel.checkpoint()

        await world.page.evaluate(hide, True)
        while streams.count:
            await anyio.lowlevel.checkpoint()
        await (await chat.send("meanwhile")).reply()
        await world.page.evaluate(hide, False)

        await world.shows("a(meanwhile)", ".transcript-pane")
        await expect(world.page.locator(".notice")).to_have_count(0)


async def test_a_message_whose_reply_was_lost_is_sent_again_once(browser: Browser) -> None:
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("hello")).reply()
        await world.at("alice", "act")
        lost: list[int] = []

        async def lose(route: Route) -> None:
            """Let the request through, and lose its reply."""
            if lost:
                await route.continue_()
            else:
                lost.append((await route.fetch()).status)
                await route.abort()

        await world.page.route("**/messages?*", lose)
        form = world.page.get_by_role("region", name="Send a message")
        await form.get_by_label("Message").fill("only once")
        await form.get_by_role("button", name="Send").click()
        await world.shows("the server does not answer", "tk-act")
        await expect(form.get_by_label("Message")).to_have_value("only once")
        await form.get_by_role("button", name="Send").click()
        await world.shows("Durable at seq 6", "tk-act")

        assert lost == [202]
        texts = [getattr(event, "content", "") for event in (await chat.at()).view]
        assert texts.count("only once") == 1
