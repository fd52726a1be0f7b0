"""Large and broken journals: what is slow or lost with many rows, and a log with a damaged record.

The usual run has a part of the rows; `-m slow` has all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from tests.actors.gateway.test_inspection import damage
from turnkeeper.actors import SQLiteJournal
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.journal import Journal

from .site import BOUND_MS, site
from .stories import Story, team_story

pytestmark = [pytest.mark.anyio, pytest.mark.in_parts(3)]

TASK_MS_MAX = 100
SCROLL = """async ([selector, steps]) => {
  const rows = document.querySelector(selector);
  for (let n = 0; n < steps; n += 1) {
    rows.scrollTop = rows.scrollHeight * (n % 2 ? Math.random() : n / steps);
    await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
  }
  rows.scrollTop = rows.scrollHeight;
}"""


async def many_conversations(journal: Journal, count: int) -> None:
    """Write short conversations straight into the journal."""
    story = Story("c")
    story.says("m1", "Where is my order?")
    story.at(1).answers("On its way.", took=1)
    records = [encode_record(event) for event in story.events]
    for n in range(count):
        name = f"c{n:06d}"
        claim = await journal.claim(name)
        await journal.append(
            name,
            records,
            epoch=claim.epoch,
            expected_seq=1,
            is_unfinished=False,
            listing=story.state.listing,
        )


def long_story(events: int, turns: int) -> Story:
    """Return a log of many events, condensed after each turn."""
    story = Story("long", title="A long day")
    at = 0.0
    for n in range(turns):
        story.at(at).says(f"m{n}", f"Do task {n}, please.")
        while story.seq < (n + 1) * events // turns - 6:
            at += 0.5
            (call,) = story.at(at).calls(("work", {"on": n}), took=0.4)
            at += 0.25
            story.at(at).results(call, f"a result of {story.seq} " + "word " * 12)
        at += 0.5
        story.at(at).answers(f"Task {n} is done.", took=0.4)
        story.condenses(f"Tasks up to {n} are done.", keep=2)
        at += 30
    return story


class Tasks:
    """The tasks of a page's main thread, from Chromium's own trace."""

    def __init__(self, trace: Mapping[str, Any]) -> None:
        main = {
            (event["pid"], event["tid"])
            for event in trace["traceEvents"]
            if event.get("name") == "thread_name" and event["args"]["name"] == "CrRendererMain"
        }
        self.ms = sorted(
            event["tdur"] / 1_000  # of the thread: other processes do not count
            for event in trace["traceEvents"]
            if (event.get("pid"), event.get("tid")) in main
            and event.get("name") in ("RunTask", "ThreadControllerImpl::RunTask")
            and "tdur" in event
        )


@pytest.mark.parametrize(
    "count", [1_500, pytest.param(100_000, marks=pytest.mark.slow)], ids=["some", "all"]
)
async def test_a_list_of_any_length_is_scrolled_to_its_end(
    browser: Browser, count: int, tmp_path: Path
) -> None:
    async with SQLiteJournal(tmp_path / "chats.db", synchronous="NORMAL") as journal:
        await many_conversations(journal, count)
    async with site(browser, journal=SQLiteJournal(tmp_path / "chats.db")) as world:
        await world.go()
        end = world.page.locator(f"tk-list [aria-setsize='{count}']").first
        while await end.count() == 0:
            await world.page.evaluate(SCROLL, ["tk-list tk-rows", 2])
            await world.page.wait_for_timeout(20)
        assert await world.page.locator("tk-list .row").count() < 60
        await world.shows(f"{count:,} conversations", ".list-facts")


@pytest.mark.parametrize(
    ("events", "turns"),
    [(4_000, 30), pytest.param(100_000, 300, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
async def test_a_log_of_any_length_is_scrolled_travelled_and_drawn(
    browser: Browser, events: int, turns: int
) -> None:
    story = long_story(events, turns)
    async with site(browser, story) as world:
        await world.at("long")
        await world.shows(f"seq {len(story.events):,}", ".conversation-head")
        for pane in (".log-pane", ".transcript-pane"):
            await expect(world.page.locator(f"{pane} .row").first).to_be_visible(timeout=BOUND_MS)
        await browser.start_tracing(page=world.page, categories=["toplevel", "devtools.timeline"])
        await world.page.evaluate(SCROLL, [".log-pane tk-rows", 40])
        await world.page.evaluate(SCROLL, [".transcript-pane tk-rows", 20])
        tasks = Tasks(json.loads(await browser.stop_tracing()))
        assert len(tasks.ms) > 100
        if events > 50_000:  # measured where all of it is asked for
            assert tasks.ms[-1] < TASK_MS_MAX

        assert await world.page.locator(".row").count() < 300
        for seq in (events // 2, events // 3, events // 2 + 1):
            await world.travelled("long", seq)
            await world.shows(f"at seq {seq:,}", "tk-travel")
        await world.at("long", "timeline")
        await world.shows(f"Turn {turns}", ".timeline-scroll")
        await world.page.locator(".timeline-scroll").focus()
        await world.press("Home")
        await world.shows("Do task 0, please.", ".timeline-scroll")
        assert await world.page.locator(".timeline-scroll rect").count() < 6_000


async def test_a_damaged_log_names_the_seq_and_shows_the_rest(
    browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "chats.db"
    story = team_story()
    async with SQLiteJournal(path) as journal:
        await story.write(journal)
    damage(path, 7)
    async with site(browser, journal=SQLiteJournal(path, read_only=True), read_only=True) as world:
        await world.at("team-standup", query="?seq=7")
        await world.shows("The log is damaged at seq 7.")
        await expect(world.page.locator(".log-row.is-damaged")).to_have_count(1)
        await world.shows("What is the state of task 1?", ".transcript-pane")
        await world.page.locator(".log-pane [data-seq='7']").click()
        await world.shows("This record cannot be read", "tk-detail")
        await world.page.evaluate("() => { location.hash = '#/c/team-standup/travel?seq=20'; }")
        await world.shows("States up to seq 6 can be computed")
        await world.button("Go to seq 6")
        await world.shows("What the model sees at seq 6")
        await world.at("team-standup", "timeline")
        await world.shows("Turn 6", ".timeline-scroll")
        await world.at("team-standup", "act")
        await world.button("Verify")
        await world.shows("seq 7", "tk-act")
        await world.go()
        await world.shows("Standup of the team", "tk-list .row")


async def test_a_journal_is_read_beside_the_process_that_writes_it(
    browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "chats.db"
    async with SQLiteJournal(path) as writer:
        await team_story(2).write(writer)
        async with site(
            browser, journal=SQLiteJournal(path, read_only=True), read_only=True
        ) as world:
            await world.at("team-standup")
            await world.shows("Task 1 is", ".transcript-pane")

            other = team_story(3)
            claim = await writer.claim("team-standup")
            known = len(team_story(2).events)
            await writer.append(
                "team-standup",
                [encode_record(event) for event in other.events[known:]],
                epoch=claim.epoch,
                expected_seq=known + 1,
                is_unfinished=False,
                listing=other.state.listing,
            )

            await world.shows("Task 2 is done.", ".transcript-pane")
