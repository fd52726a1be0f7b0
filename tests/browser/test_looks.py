"""How the pages look and read: no violation by axe-core, keys for all, the pictures of the docs.

With `TURNKEEPER_PICTURES=docs/pictures` the pictures are written there.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.async_api import Browser, Page, Route, expect

from tests.actors.gateway.node import install
from tests.drawn import drawn
from turnkeeper.actors import ModelResponse, ScriptedModel, ToolAgent, ToolCall

from .site import BOUND_MS, Site, opened, site
from .stories import refund, refund_story, research_story, team_story

pytestmark = [pytest.mark.anyio, pytest.mark.in_parts(3)]

HERE = Path(__file__).parent
# What stands beyond the right edge, and is neither drawn nor cut off by something that scrolls.
BEYOND = """() => [...document.querySelectorAll('tk-inspector *:not(svg *)')].filter((element) => {
  const isBeyond = (each) => each.getBoundingClientRect().right > innerWidth + 1;
  if (!isBeyond(element) || !element.checkVisibility()) return false;
  for (let at = element.parentElement; at; at = at.parentElement) {
    if (getComputedStyle(at).overflowX !== 'visible' && !isBeyond(at)) return false;
  }
  return true;
}).map((element) => element.outerHTML.slice(0, 120))"""
# As far as a reader may set texts apart (WCAG 1.4.12): fonts differ as well.
SPACED = "tk-inspector { letter-spacing: 0.12em !important; word-spacing: 0.16em !important }"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


class State(NamedTuple):
    """A page as the docs show it."""

    name: str
    place: str
    shows: str
    width: int = 1280
    height: int = 720
    scheme: Literal["light", "dark"] = "light"
    click: str = ""


STATES = (
    State("list", "", "3 wait"),
    State("log", "c/refund-7/log?seq=15", "waited 2.60 s"),
    State(
        "event",
        "c/research/log?seq=14",
        '"steers"',
        scheme="dark",
        click=".log-pane [data-seq='11']",
    ),
    State("travel", "c/refund-7/travel?seq=17", "at seq 17: 9 events"),
    State(
        "difference",
        "c/research/travel?seq=30&from=18",
        "came",
        scheme="dark",
        click="text=Difference",
    ),
    State("asked", "c/refund-7/travel?seq=17", "view at seq 14", click="text=Asked"),
    State("timeline", "c/refund-7/timeline", "waits for a person: refund 5.50 s"),
    State("timeline-dark", "c/research/timeline", "joins after 5.30 s: Only", scheme="dark"),
    State("act", "c/asking/act", "1 call waits"),
    State("runtime", "runtime", "conversations/asking", scheme="dark"),
    State("narrow-list", "", "3 wait", 400, 720),
    State("narrow-log", "c/refund-7/log", "waited", 400, 720, "dark"),
    State("narrow-travel", "c/refund-7/travel?seq=17", "at seq 17", 400, 720),
    State("narrow-timeline", "c/research/timeline", "rolls back", 400, 720, "dark"),
    State("narrow-act", "c/asking/act", "1 call waits", 400, 720),
    State("narrow-runtime", "runtime", "conversations/asking", 400, 720),
    State("wide", "c/research/log", "rolled back turn 2", 2000, 1000, "dark"),
    State("empty", "c/never/log", "no conversation of this id"),
)
DRAWN = STATES if "TURNKEEPER_PICTURES" in os.environ else drawn(STATES, 4)
PICTURES = STATES[:10]


@pytest.fixture(scope="module")
async def world(browser: Browser) -> AsyncIterator[Site]:
    calls = [ToolCall("refund", {"order": 9})]
    model = ScriptedModel([ModelResponse("I need your consent.", calls=calls)] * 3)
    asking = ToolAgent(model, [refund], confirm=["refund"])
    stories = (refund_story(), research_story(), team_story())
    async with site(browser, *stories, agent=asking) as world:
        for name in ("asking", "asking-too", "third"):
            await (await world.conversations[name].send("Pay order 9 back")).find_end()
        while (await world.conversations["third"].at()).turns.waits_for is None:
            await world.conversations["third"].view()
        yield world


async def reach(page: Page, world: Site, state: State) -> None:
    await page.goto(f"{world.address}/inspector/#/{state.place}")
    if state.click:
        await page.locator("tk-conversation .tab > *").wait_for(timeout=BOUND_MS)
        await page.locator(state.click).click(timeout=BOUND_MS)
    await expect(page.locator("tk-inspector")).to_contain_text(state.shows, timeout=BOUND_MS)


@pytest.mark.sweep
@pytest.mark.parametrize("state", DRAWN, ids=lambda state: state.name)
async def test_axe_finds_no_violation_and_the_picture_is_taken(
    browser: Browser, world: Site, state: State, tmp_path: Path
) -> None:
    install(HERE / "npm")
    axe = (HERE / "npm/node_modules/axe-core/axe.min.js").read_text()
    width, height = state.width, state.height
    async with opened(
        browser, width=width, height=height, scheme=state.scheme, bypass_csp=True
    ) as page:
        await reach(page, world, state)
        await page.evaluate(axe)
        found: dict[str, Any] = await page.evaluate(
            "(tags) => axe.run(document, {runOnly: {type: 'tag', values: tags}})", RULES
        )
        assert [
            (each["id"], [node["html"][:200] for node in each["nodes"]])
            for each in found["violations"]
        ] == []
        folder = Path(os.environ.get("TURNKEEPER_PICTURES", tmp_path))
        picture = folder / f"inspector-{state.name}.png"
        if state in PICTURES:
            await page.mouse.move(0, 0)
            await page.screenshot(path=picture)
            assert 10_000 < picture.stat().st_size < 200_000
        await page.add_style_tag(content=SPACED)
        assert await page.evaluate(BEYOND) == []


async def test_no_name_is_cut_off_on_the_pages_of_a_small_window(
    browser: Browser, world: Site
) -> None:
    """The names of two tools lost their beginnings at the plot's left edge; titles lost ends."""
    async with opened(browser, width=400) as page:
        await page.goto(f"{world.address}/inspector/#/c/research/timeline")
        await expect(page.locator(".tl-plot rect.tl-tool").first).to_be_attached(timeout=BOUND_MS)
        cut_off = await page.evaluate(
            """() => {
              const plot = Number(document.querySelector('#tl-plot rect').getAttribute('x'));
              return [...document.querySelectorAll('.tl-plot text')]
                .filter((text) => text.getBBox().x < plot).map((text) => text.textContent);
            }"""
        )
        assert cut_off == []
    async with opened(browser, width=800) as page:
        await page.goto(f"{world.address}/inspector/")
        await expect(page.locator(".list-row")).to_have_count(6, timeout=BOUND_MS)
        cut_off = await page.evaluate(
            """() => [...document.querySelectorAll('.list-row .name')]
              .filter((name) => name.scrollWidth > name.clientWidth)
              .map((name) => name.textContent)"""
        )
        assert cut_off == []


async def test_all_is_reached_by_keys(browser: Browser, world: Site) -> None:
    async with opened(browser) as page:
        await page.goto(f"{world.address}/inspector/")
        await expect(page.locator("tk-list .row").first).to_be_visible(timeout=BOUND_MS)
        reached = set()
        for _ in range(8):
            await page.keyboard.press("Tab")
            reached.add(
                await page.evaluate("() => document.activeElement.textContent.slice(0, 14)")
            )
            ring = await page.evaluate(
                "() => getComputedStyle(document.activeElement).outlineStyle"
            )
            assert ring in ("solid", "auto")
        assert {"Skip to the co", "Conversations", "Runtime"} <= reached
        await page.keyboard.press("?")
        await expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
        await page.keyboard.press("Escape")
        await page.keyboard.press("g")
        await page.keyboard.press("r")
        await expect(page.locator("tk-runtime")).to_be_visible()
        await page.goto(f"{world.address}/inspector/#/c/refund-7/log?seq=15")
        await expect(page.locator("tk-log")).to_be_visible(timeout=BOUND_MS)
        for key, place in (
            ("2", "tk-travel"),
            ("3", "tk-timeline"),
            ("4", "tk-act"),
            ("1", "tk-log"),
        ):
            await page.keyboard.press(key)
            await expect(page.locator(place)).to_be_visible()
        await page.get_by_role("listbox", name="Log by seq").focus()
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Enter")
        await expect(page.locator("tk-detail")).to_be_visible()
        await page.keyboard.press("Escape")
        await page.keyboard.press("t")
        await expect(page.locator("tk-travel")).to_be_visible()
        asked = page.get_by_role("button", name="Asked", exact=True)
        await asked.press("Enter")
        await expect(page.locator("tk-travel")).to_contain_text("step", timeout=BOUND_MS)
        await expect(asked).to_be_focused()  # though what stands there was made anew


async def test_nothing_is_asked_but_the_documented_api_of_its_server(
    browser: Browser, world: Site
) -> None:
    """Every request to another place fails here, and is counted."""
    asked: list[str] = []
    paths = set()

    async def decide(route: Route) -> None:
        if route.request.url.startswith(world.address):
            paths.add(urlsplit(route.request.url).path)
            await route.continue_()
        else:
            asked.append(route.request.url)
            await route.abort()

    async with opened(browser) as page:
        await page.route("**/*", decide)
        for state in PICTURES:
            await reach(page, world, state)
    assert asked == []
    async with httpx.AsyncClient(timeout=BOUND_MS / 1_000) as client:
        document = (await client.get(f"{world.address}/openapi.json")).json()
    documented = [re.sub(r"\{\w+\}", "[^/]+", path) for path in document["paths"]]
    of_the_api = {path for path in paths if path.startswith("/v1/")}
    assert len(of_the_api) > 10
    assert [p for p in of_the_api if not any(re.fullmatch(each, p) for each in documented)] == []
    rest = [path for path in paths - of_the_api if not path.startswith("/inspector/")]
    assert rest == ["/openapi.json"]


async def test_a_token_is_typed_in_kept_in_memory_and_sent_in_a_header(browser: Browser) -> None:
    from turnkeeper.actors.gateway import BearerTokens, Principal
    from turnkeeper.actors.gateway.access import token_hash

    token = "t" * 40
    tokens = BearerTokens({token_hash(token): Principal("root", frozenset(("admin",)))})
    async with site(browser, refund_story(), authenticate=tokens) as world:
        urls: list[str] = []
        world.page.on("request", lambda request: urls.append(request.url))
        await world.go("c/refund-7/log")
        await world.page.get_by_role("textbox", name="Token").fill(token)
        await world.button("Open")
        await world.shows("Refund of order 7", "tk-conversation h1")
        await world.shows("root", ".top")

        assert not [url for url in urls if token in url]
        kept = "() => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        assert token not in await world.page.evaluate(kept)
        await world.page.reload()
        await expect(world.page.get_by_role("textbox", name="Token")).to_be_visible()
        await world.page.goto("about:blank")
        await world.page.goto(f"{world.address}/inspector/#token={token}&/c/refund-7/timeline")
        await world.shows("interrupts", "tk-timeline")
        assert token not in world.page.url
        async with httpx.AsyncClient(timeout=BOUND_MS / 1_000) as client:
            reply = await client.get(f"{world.address}/v1/conversations")
        assert reply.status_code == 401


async def test_a_token_that_is_not_accepted_can_be_given_again(browser: Browser) -> None:
    from turnkeeper.actors.gateway import BearerTokens, Principal
    from turnkeeper.actors.gateway.access import token_hash

    token = "t" * 40
    tokens = BearerTokens({token_hash(token): Principal("root", frozenset(("admin",)))})
    async with site(browser, refund_story(), authenticate=tokens) as world:
        await world.go()
        dialog = world.page.locator("dialog")
        await expect(dialog).to_contain_text("This server asks for a token")
        await world.page.get_by_role("textbox", name="Token").fill("x" * 40)
        await world.button("Open")
        await expect(dialog).to_contain_text("This token is not accepted")

        await world.press("Escape")
        await expect(dialog).to_have_count(0)
        await world.button("Enter a token")
        await expect(world.page.get_by_role("textbox", name="Token")).to_be_visible()
        await world.page.goto(f"{world.address}/inspector/#token={token}")  # no reload
        await world.shows("Refund of order 7", "tk-list")
        await expect(dialog).to_have_count(0)
        await expect(world.page.locator(".notice")).to_have_count(0)
