"""Answers that come late or in another order than they were asked for; changes without a pause."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta

import anyio
import pytest
from playwright.async_api import Browser, Page, Route, expect

from turnkeeper.actors import ModelResponse, ScriptedModel, ToolAgent, ToolCall, TurnContext
from turnkeeper.actors.events import ActionEvent

from .site import BOUND_MS, site
from .stories import refund, refund_story, team_story

pytestmark = pytest.mark.anyio


class Late:
    """A route whose first answer is taken from the server at once, and given to the page later."""

    def __init__(self) -> None:
        self.is_taken = anyio.Event()
        self._is_wanted = anyio.Event()
        self._is_given = anyio.Event()
        self._is_first = True

    async def __call__(self, route: Route) -> None:
        if not self._is_first:
            await route.continue_()
            return
        self._is_first = False
        answer = await route.fetch()
        self.is_taken.set()
        await self._is_wanted.wait()
        await route.fulfill(response=answer)  # nothing happens if the page wants it no longer
        self._is_given.set()

    async def give(self, page: Page) -> None:
        """Give the answer, and let the page do what it does with it."""
        await _another_answer(page)
        self._is_wanted.set()
        await self._is_given.wait()
        await _another_answer(page)


class Refusing:
    """A route whose requests get a problem in place of an answer, or nothing without a status."""

    def __init__(self, status: int | None = None, *, times: float = math.inf) -> None:
        self.count = 0
        self._status = status
        self._times = times

    async def __call__(self, route: Route) -> None:
        if self.count >= self._times:
            await route.continue_()
            return
        self.count += 1
        if self._status is None:
            await route.abort()
            return
        problem = {"title": "refused", "status": self._status, "detail": "try again later"}
        headers = {"Retry-After": "1"}
        await route.fulfill(status=self._status, headers=headers, json=problem)


async def _another_answer(page: Page) -> None:
    for _ in range(3):
        await page.evaluate("() => fetch('../v1/self').then((answer) => answer.json())")


class Twice:
    """Calls two tools, one after the other, and stops in the first until it is released."""

    def __init__(self) -> None:
        self.released = anyio.Event()

    async def run(self, turn: TurnContext) -> None:
        for name in ("first", "second"):
            await turn.call_tools([ToolCall(name)], self._tool)
        await turn.say("done")

    async def _tool(self, action: ActionEvent) -> str:
        if action.tool_name == "first":
            await self.released.wait()
        return "seen"


async def test_what_is_read_soon_is_read_while_changes_do_not_stop_and_never_twice_at_once(
    browser: Browser,
) -> None:
    """A page that waited until no change came showed none of a busy gateway's."""
    steadily = """async () => {
      const { together } = await import("./api.js");
      let [atOnce, most, begun, called, seen] = [0, 0, 0, 0, 0];
      const soon = together(20, async () => {
        begun += 1;
        seen = called;
        most = Math.max(most, atOnce += 1);
        await new Promise((resolve) => setTimeout(resolve, 30));
        atOnce -= 1;
      });
      while (begun < 3) {
        called += 1;
        soon();
        await new Promise((resolve) => setTimeout(resolve));
      }
      while (atOnce || seen < called) await new Promise((resolve) => setTimeout(resolve));
      return [most, begun < called];
    }"""
    async with site(browser) as world:
        await world.go()
        assert await world.page.evaluate(steadily) == [1, True]


async def test_newer_rows_of_another_status_do_not_take_the_place_of_those_that_are_wanted_now(
    browser: Browser,
) -> None:
    calls = [ToolCall("refund", {"order": 9})]
    asking = ToolAgent(
        ScriptedModel([ModelResponse("", calls=calls)]), [refund], confirm=["refund"]
    )
    late = Late()
    async with site(browser, refund_story(), team_story(), agent=asking) as world:
        chat = world.conversations["waiting"]
        await (await chat.send("pay 9 back")).find_end()
        await world.page.clock.install()
        await world.go()
        rows = world.page.locator("tk-list .row")
        await world.page.get_by_label("Status").select_option("waiting_for_confirmation")
        await expect(rows).to_have_count(1, timeout=BOUND_MS)
        await world.page.route("**/v1/conversations?*limit=100", late)
        await chat.change(title="Refund of order 9")
        await late.is_taken.wait()

        await world.page.get_by_label("Status").select_option("")
        await expect(rows).to_have_count(3, timeout=BOUND_MS)
        await world.page.clock.pause_at(datetime.now(UTC) + timedelta(hours=1))
        await late.give(world.page)
        await expect(rows).to_have_count(3)
        await world.shows("Refund of order 9", "tk-list")


async def test_a_search_that_the_server_missed_is_made_again_and_not_without_a_pause(
    browser: Browser,
) -> None:
    """The page asked as often as it could, and kept the rows of the search before."""
    away = Refusing()
    async with site(browser, refund_story(), team_story()) as world:
        await world.page.clock.install()
        await world.go()
        rows = world.page.locator("tk-list .row")
        await expect(rows).to_have_count(2, timeout=BOUND_MS)
        await world.page.clock.pause_at(datetime.now(UTC) + timedelta(hours=1))
        await world.page.route("**/v1/conversations?*", away)
        await world.page.get_by_label("Status").select_option("running")
        await world.shows("the server does not answer", "tk-list")
        await _another_answer(world.page)
        assert away.count == 1
        await expect(rows).to_have_count(2)

        await world.page.unroute("**/v1/conversations?*")
        await world.page.clock.resume()
        await world.shows("Nothing fits", "tk-list")


async def test_searches_that_the_server_missed_are_not_each_made_again(browser: Browser) -> None:
    """After six letters the page asked five times a second, until the server was back."""
    away = Refusing()
    async with site(browser, refund_story(), team_story()) as world:
        clock = world.page.clock
        await clock.install()
        await world.go()
        await expect(world.page.locator("tk-list .row")).to_have_count(2)
        await clock.pause_at(datetime.now(UTC) + timedelta(hours=1))
        await world.page.route("**/v1/conversations?*", away)
        await world.page.locator("#search").focus()
        for count, letter in enumerate("refund", 1):
            await world.press(letter)
            await clock.run_for(300)
            await _another_answer(world.page)
            assert away.count >= count
        before = away.count
        for _ in range(50):
            await clock.run_for(200)
            await _another_answer(world.page)
        assert away.count <= before + 6
        while away.count < before + 3:
            await clock.run_for(200)
            await _another_answer(world.page)


async def test_rows_of_a_log_that_grows_are_read_one_time_after_the_other(
    browser: Browser,
) -> None:
    """Each growth asked for the newest rows anew, whose answers were then too old to be shown."""
    late = Late()
    asked: list[str] = []
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("one")).reply()
        await world.page.route("**/alice/log?*", late)
        world.page.on("request", lambda each: asked.extend(re.findall("/alice/log", each.url)))
        await world.at("alice")
        await late.is_taken.wait()
        await (await chat.send("two")).reply()
        await world.shows("finished", ".conversation-head")
        await world.shows(f"seq {(await chat.at()).seq}", ".conversation-head")
        await _another_answer(world.page)
        assert len(asked) == 1

        await late.give(world.page)
        await world.shows("a(one)", ".transcript-pane")
        await world.shows("a(two)", ".transcript-pane")


async def test_a_log_does_not_wait_for_facts_that_take_long(browser: Browser) -> None:
    late = Late()
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("one")).reply()
        await world.at("alice")
        await world.shows("finished", ".conversation-head")
        await world.page.route("**/conversations/alice", late)
        await chat.change(title="Changed")
        await late.is_taken.wait()
        await (await chat.send("two")).reply()
        await world.shows("a(two)", ".transcript-pane")

        await late.give(world.page)
        await world.shows("Changed", "tk-conversation h1")


async def test_bars_that_were_asked_for_before_the_turn_went_on_are_read_again(
    browser: Browser,
) -> None:
    agent, late = Twice(), Late()
    async with site(browser, agent=agent) as world:
        chat = world.conversations["alice"]
        turn = await chat.send("look twice")
        await world.page.route("**/alice/bars?*", late)
        await world.at("alice", "timeline")
        await late.is_taken.wait()
        agent.released.set()
        await turn.reply()
        await world.shows("finished", ".conversation-head")

        await late.give(world.page)
        await expect(world.page.locator("tk-timeline .tl-plot .tl-tool")).to_have_count(2)


async def test_a_log_that_grows_ends_no_read_of_its_newest_state(browser: Browser) -> None:
    late = Late()
    failed: list[str] = []
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("one")).reply()
        head = (await chat.at()).seq
        world.page.on("requestfailed", lambda request: failed.append(request.url))
        await world.page.route("**/alice/state?*", late)
        await world.at("alice", "travel")
        await late.is_taken.wait()
        await chat.change(title="Changed")
        strip = world.page.locator(".slider svg")
        await expect(strip).to_have_attribute("viewBox", f"0 0 {head + 1} 24")
        await _another_answer(world.page)
        assert failed == []

        await late.give(world.page)
        shown = world.page.locator(f'tk-travel[data-shown="view {head + 1}"]')
        await shown.wait_for(state="attached", timeout=BOUND_MS)


async def test_a_seq_that_is_being_typed_is_not_replaced_when_the_log_grows(
    browser: Browser,
) -> None:
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("one")).reply()
        await world.at("alice", "travel")
        await world.page.locator("tk-travel[data-shown]").wait_for(timeout=BOUND_MS)
        number = world.page.get_by_label("Seq", exact=True).last
        await number.press("Control+a")
        await world.page.keyboard.type("2")
        await chat.change(title="Changed")
        await world.shows("Changed", "tk-conversation h1")
        await _another_answer(world.page)

        await expect(number).to_have_value("2")
        await world.press("Enter")
        await world.page.locator('tk-travel[data-shown="view 2"]').wait_for(timeout=BOUND_MS)


async def test_a_seq_to_compare_with_that_is_being_typed_is_not_replaced_when_the_log_grows(
    browser: Browser,
) -> None:
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("one")).reply()
        head = (await chat.at()).seq
        await world.at("alice", "travel")
        await world.page.get_by_label("compare with", exact=True).check()
        await world.page.locator(f'tk-travel[data-shown="difference {head}"]').wait_for()
        number = world.page.get_by_label("Compare with seq")
        await number.press("Control+a")
        await world.page.keyboard.type("2")
        await chat.change(title="Changed")
        await world.shows("Changed", "tk-conversation h1")
        await _another_answer(world.page)

        await expect(number).to_have_value("2")


async def test_what_came_while_the_seq_had_the_focus_is_shown_once_it_has_not(
    browser: Browser,
) -> None:
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("one")).reply()
        head = (await chat.at()).seq
        await world.at("alice", "travel")
        await world.page.locator(f'tk-travel[data-shown="view {head}"]').wait_for()
        number = world.page.get_by_label("Seq", exact=True).last
        await number.focus()
        await chat.change(title="Changed")
        await world.shows("Changed", "tk-conversation h1")
        await expect(number).to_have_value(str(head))

        await world.press("Tab")
        await expect(number).to_have_value(str(head + 1))
        await world.page.locator(f'tk-travel[data-shown="view {head + 1}"]').wait_for()


async def test_a_state_that_comes_late_does_not_bring_an_ended_turn_back(browser: Browser) -> None:
    late = Late()
    async with site(browser) as world:
        chat = world.conversations["alice"]
        world.agent.hold("one")
        turn = await chat.send("one")
        await world.agent.reached["one"].wait()
        await world.page.route("**/alice/state", late)
        await world.at("alice", "act")
        await late.is_taken.wait()
        world.agent.release("one")
        await turn.reply()
        await world.shows("finished", ".conversation-head")

        await late.give(world.page)
        await expect(world.page.get_by_label("The turn that runs")).to_contain_text("No turn runs")
        await expect(world.page.get_by_role("button", name="Interrupt")).to_be_disabled()


@pytest.mark.parametrize("what", ["**/alice/outline*", "**/alice/events?*", "**/alice/state?*"])
async def test_a_read_that_the_server_refuses_for_now_is_made_again(
    browser: Browser, what: str
) -> None:
    """The page stayed behind its log, or was live no longer."""
    refuse = Refusing(429, times=1)
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("one")).reply()
        await world.page.route(what, refuse)
        await world.at("alice", "travel")
        await world.shows("a(one)", "tk-travel")
        await (await chat.send("two")).reply()
        await world.shows("a(two)", "tk-travel")

        assert refuse.count == 1
        await expect(world.page.locator(".notice")).to_have_count(0)


async def test_a_page_stays_live_however_long_its_stream_is_refused_for_now(
    browser: Browser,
) -> None:
    refuse = Refusing(429)
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("one")).reply()
        await world.page.clock.install()
        await world.page.route("**/alice/events?*", refuse)
        await world.at("alice")
        await world.shows("a(one)", ".transcript-pane")
        while refuse.count < 10:  # a read is not made more often
            await world.page.clock.run_for(1_000)
            await _another_answer(world.page)
        await world.page.unroute("**/alice/events?*")
        await (await chat.send("two")).reply()
        await world.page.clock.run_for(10_000)
        await world.shows("a(two)", ".transcript-pane")
        await expect(world.page.locator(".notice")).to_have_count(0)


async def test_a_read_that_was_not_answered_in_time_is_told_of_at_once(browser: Browser) -> None:
    """The server has waited for it already, and ten such waits take minutes."""
    too_late = Refusing(504)
    async with site(browser) as world:
        await (await world.conversations["alice"].send("one")).reply()
        await world.page.route("**/alice/state?*", too_late)
        await world.at("alice", "travel")
        await world.shows("try again later", "tk-travel")
        assert too_late.count == 1
