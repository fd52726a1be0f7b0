"""The inspector as a person has it: a served gateway, a page, and short ways to use them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import anyio
from playwright.async_api import Browser, Page, expect

from tests.actors.conversations.worlds import HeldAgent
from tests.actors.gateway.worlds import served
from turnkeeper.actors import Agent, Conversations, MemoryJournal, gateway
from turnkeeper.actors.gateway.names import to_path
from turnkeeper.actors.journal import Journal

from .stories import Story

__all__ = ["BOUND_MS", "Site", "opened", "site"]

BOUND_MS = 120_000
"""How long a test waits for a page: only a failure takes that long, and a busy machine is slow."""
expect.set_options(timeout=BOUND_MS)
LIMITS = gateway.GatewayLimits(requests_per_s=10_000, requests_at_once=10_000)


@dataclass
class Site:
    """A gateway, its address, and a page that shows the inspector."""

    conversations: Conversations
    agent: HeldAgent
    address: str
    page: Page
    app: gateway.Gateway

    async def go(self, place: str = "") -> None:
        """Open a place: `c/<id>/log`, `runtime`, or the list."""
        await self.page.goto(f"{self.address}/inspector/#/{place}")

    async def at(self, name: str, tab: str = "log", query: str = "") -> None:
        await self.go(f"c/{to_path(name)}/{tab}{query}")

    async def shows(self, text: str, within: str = "tk-inspector") -> None:
        await expect(self.page.locator(within)).to_contain_text(text, timeout=BOUND_MS)

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.page.keyboard.press(key)

    async def button(self, name: str) -> None:
        await self.page.get_by_role("button", name=name, exact=True).click()

    async def travelled(self, name: str, seq: int, *, mode: str = "view") -> None:
        """Go to a seq, and wait until it is shown."""
        if not self.page.url.startswith(self.address):
            await self.go("runtime")
        await self.page.evaluate(
            "(place) => { location.hash = place; }", f"#/c/{to_path(name)}/travel?seq={seq}"
        )
        shown = self.page.locator(f'tk-travel[data-shown="{mode} {seq}"]')
        await shown.wait_for(state="attached", timeout=BOUND_MS)


@asynccontextmanager
async def opened(
    browser: Browser,
    *,
    width: int = 1280,
    height: int = 800,
    scheme: Literal["light", "dark"] = "light",
    bypass_csp: bool = False,
) -> AsyncIterator[Page]:
    """Open a page. Each error of it, and each line that it writes to the console, is a failure."""
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        bypass_csp=bypass_csp,
        locale="en-GB",
        timezone_id="UTC",
        reduced_motion="reduce",
    )
    context.set_default_timeout(BOUND_MS)
    page = await context.new_page()
    told: list[str] = []
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("console", lambda line: told.append(f"{line.type}: {line.text}"))
    try:
        yield page
    finally:
        await context.close()
    # A server that is away, and a page that is refused, are told of by the browser itself.
    assert [line for line in told if "Failed to load resource" not in line] == []


@asynccontextmanager
async def site(
    browser: Browser,
    *stories: Story,
    agent: Agent | None = None,
    journal: Journal | None = None,
    prepare: Callable[[Journal], Awaitable[None]] | None = None,
    authenticate: gateway.Authenticate | None = None,
    read_only: bool = False,
    **options: object,
) -> AsyncIterator[Site]:
    """Serve the inspector over these stories, and open a page."""
    held = HeldAgent()
    journal = journal or MemoryJournal()
    if stories or prepare:
        async with journal:
            for story in stories:
                await story.write(journal)
            if prepare is not None:
                await prepare(journal)
    with anyio.fail_after(1_800):
        async with Conversations(
            agent or held,
            journal=journal,
            recover="on_message" if read_only else "on_enter",
            idle_s=None,  # however long the pages take, the runtime's page shows all actors
        ) as conversations:
            app = gateway.app(
                conversations, limits=LIMITS, read_only=read_only, authenticate=authenticate
            )
            async with (
                served(app) as address,
                opened(browser, **options) as page,  # type: ignore[arg-type]  # passed through
            ):
                yield Site(conversations, held, address, page, app)
