"""The page of the tutorial on gateways does in a browser what the tutorial says."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import anyio
import httpx
import pytest
from playwright.async_api import Browser, Page, Route

from tests.ports import free_port
from tests.test_tutorials import (
    BLOCK,
    DOCS,
    Command,
    begin,
    commands,
    environment_of,
)

from .site import BOUND_MS

pytestmark = pytest.mark.anyio
ANSWER = "Order {} left the warehouse on Monday, two books."


async def logged(page: Page, answer: str) -> None:
    """Wait until the answer is in the log, where it goes when it has been written to its end."""
    await page.locator("#log").get_by_text(answer).wait_for()


def written(folder: Path) -> Command:
    """Write the tutorial's files; return the command that serves them."""
    text = (DOCS / "tutorials" / "gateway.md").read_text()
    for block in BLOCK.finditer(text):
        if block["file"] is not None:
            (folder / block["file"]).write_text(block["text"])
    (serve,) = (
        command
        for block in BLOCK.finditer(text)
        if block["kind"] == "console"
        for command in commands(block["text"])
        if command.line.startswith("uvicorn shop:application")
    )
    return serve


async def test_a_reload_a_second_tab_an_interrupt_and_a_restart(
    browser: Browser, tmp_path: Path
) -> None:
    port = free_port()
    serve = written(tmp_path)
    # A reload, and a second message, come in the middle of an answer: it goes on when it may.
    agent = tmp_path / "support.py"
    waits = "while word == 'the ' and not Path(f'go-{order[0]}').exists():\n            await anyio"
    told = agent.read_text().replace("await anyio", waits)
    agent.write_text(f"from pathlib import Path\n{told}")
    for order in (10, 11):
        (tmp_path / f"go-{order}").touch()

    def start(server: ExitStack) -> None:
        begin(server, serve, tmp_path, environment_of(port))

    context = await browser.new_context()
    context.set_default_timeout(BOUND_MS)
    with ExitStack() as first:
        start(first)
        page = await context.new_page()
        await page.goto(f"http://127.0.0.1:{port}/")
        await page.fill("input", "Where is order 8?")
        await page.keyboard.press("Enter")
        await page.wait_for_function("document.querySelector('#writing').textContent.length > 5")
        await page.reload()
        await page.wait_for_function("document.querySelector('#writing').textContent.length > 5")
        (tmp_path / "go-8").touch()
        await logged(page, ANSWER.format(8))

        other = await context.new_page()
        await other.goto(f"http://127.0.0.1:{port}/")
        await other.fill("input", "And order 9?")
        await other.keyboard.press("Enter")
        await page.wait_for_function("document.querySelector('#writing').textContent.length > 5")
        await page.fill("input", "Sorry: order 10")
        await page.keyboard.press("Enter")
        for tab in (page, other):
            await logged(tab, ANSWER.format(10))
        shown = await page.locator("#log p").all_inner_texts()
        assert shown == await other.locator("#log p").all_inner_texts()
        assert shown[:3] == ["Where is order 8?", ANSWER.format(8), "And order 9?"]
        assert re.fullmatch(r"Order .*…", shown[3])
        assert shown[4:] == ["interrupted", "Sorry: order 10", ANSWER.format(10)]
    with ExitStack() as second:
        start(second)
        await page.fill("input", "And order 11?")
        await page.keyboard.press("Enter")
        for tab in (page, other):
            await logged(tab, ANSWER.format(11))
        assert await page.locator("#log p").all_inner_texts() == [
            *shown,
            "And order 11?",
            ANSWER.format(11),
        ]
    await context.close()


async def test_a_deletion_a_refusal_and_messages_while_the_server_is_away(
    browser: Browser, tmp_path: Path
) -> None:
    port = free_port()
    serve = written(tmp_path)
    address = f"http://127.0.0.1:{port}"
    context = await browser.new_context()
    context.set_default_timeout(BOUND_MS)
    page = await context.new_page()
    await page.clock.install()
    answers: list[int | None] = []

    async def answer(route: Route) -> None:
        """Refuse a request with this status, lose it, or let it through."""
        status = answers.pop(0) if answers else 200
        if status is None:
            await route.abort()
        elif status == 200:
            await route.continue_()
        else:
            await route.fulfill(status=status)

    async def say(text: str) -> None:
        await page.fill("input", text)
        await page.keyboard.press("Enter")

    async def said(*texts: str) -> None:
        """Wait, on the page's clock, until these are the messages of the user."""
        while await page.locator("#log .user").all_inner_texts() != list(texts):
            await page.clock.run_for(1_000)

    with ExitStack() as server, anyio.fail_after(BOUND_MS / 1_000):
        begin(server, serve, tmp_path, environment_of(port))
        await page.goto(address)
        await say("Which one?")
        await said("Which one?")

        async with httpx.AsyncClient(base_url=address) as client:
            deleted = await client.delete("/chat/v1/conversations/alice")
        assert deleted.status_code == 200
        await said()
        await say("Anew")
        await said("Anew")

        await page.route("**/messages", answer)
        answers += [422]
        await say("Refused")
        await page.get_by_text("not sent: Refused").wait_for()

        answers += [429, 503, None]
        await say("First")
        await say("Second")
        await said("Anew", "First", "Second")
    await context.close()
