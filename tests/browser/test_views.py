"""Each view, as a person uses it: what it shows, and what becomes of what is done there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import anyio
import pytest
from playwright.async_api import Browser, Route, expect

from tests.actors.agents.test_tool_agent import until
from turnkeeper.actors import (
    MemoryJournal,
    ModelResponse,
    ScriptedModel,
    TokenUsage,
    ToolAgent,
    ToolCall,
)
from turnkeeper.actors.events import (
    ConversationChangedEvent,
    ObservationEvent,
    StepFinishedEvent,
    UserMessageEvent,
    decode_event,
)

from .site import BOUND_MS, Site, site
from .stories import BEGAN, Story, refund, refund_story, research_story, team_story

pytestmark = [pytest.mark.anyio, pytest.mark.in_parts(5)]

SCRIPT = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>&amp;</style>'


# --- the list ------------------------------------------------------------------------------------


async def test_an_empty_journal_says_how_to_begin(browser: Browser) -> None:
    async with site(browser) as world:
        await world.go()

        await world.shows("No conversation yet")
        await world.conversations["alice"].send("hello")
        await world.shows("alice", "tk-rows")  # without a reload


@pytest.mark.parametrize("width", [320, 1280])
async def test_an_empty_journal_shows_the_whole_command_on_any_screen(
    browser: Browser, width: int
) -> None:
    """What a centred block has beyond the left edge cannot even be scrolled to."""
    async with site(browser, width=width) as world:
        await world.go()
        command = world.page.locator(".empty pre")
        await expect(command).to_contain_text(f"curl -s {world.address}/v1/conversations/alice/")
        box = await command.bounding_box()

        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert await command.evaluate("(pre) => pre.textContent.startsWith('curl')")


async def test_an_empty_journal_that_is_only_read_asks_for_no_message(browser: Browser) -> None:
    """The server would refuse it."""
    async with site(browser, read_only=True) as world:
        await world.go()
        await world.shows("No conversation yet")
        await world.shows("once another process has written it")

        await expect(world.page.locator(".empty pre")).to_have_count(0)


async def test_a_title_that_turns_the_direction_of_writing_leaves_the_id_beside_it(
    browser: Browser,
) -> None:
    """U+202E turned the id too: `refund-12` was shown as `21-dnufer`."""
    lefts = """(id) => {
        const text = id.firstChild, range = document.createRange();
        return [0, text.length - 1].map((at) => {
            range.setStart(text, at);
            range.setEnd(text, at + 1);
            return range.getBoundingClientRect().left;
        });
    }"""
    async with site(browser) as world:
        await world.conversations["refund-12"].send("hello")
        await world.conversations["refund-12"].change(title="a \u202e title")
        await world.go()
        shown = world.page.locator("tk-list .name .id")
        await expect(shown).to_have_text("refund-12")

        first, last = await shown.evaluate(lefts)
        title = await world.page.locator("tk-list .name bdi").bounding_box()

        assert first < last
        assert title is not None
        assert title["x"] + title["width"] <= first


async def test_the_list_is_searched_filtered_and_opened_by_keys(browser: Browser) -> None:
    calls = [ToolCall("refund", {"order": 9})]
    asking = ToolAgent(
        ScriptedModel([ModelResponse("", calls=calls)]), [refund], confirm=["refund"]
    )
    async with site(browser, refund_story(), team_story(), agent=asking) as world:
        await (await world.conversations["waiting"].send("pay 9 back")).find_end()
        await world.go()

        await world.shows("1 waits for a person")
        await world.shows("waits: refund")
        await world.page.get_by_label("Status").select_option("waiting_for_confirmation")
        await expect(world.page.locator("tk-list .row")).to_have_count(1, timeout=BOUND_MS)
        await world.page.get_by_label("Status").select_option("")
        await expect(world.page.locator("tk-list .row")).not_to_have_count(1, timeout=BOUND_MS)
        await world.press("/")
        await world.page.keyboard.type("refund")
        await expect(world.page.locator("tk-list .row")).to_have_count(1, timeout=BOUND_MS)
        await world.page.keyboard.type("-nowhere")
        await world.shows("Nothing fits")
        for _ in range(8):
            await world.press("Backspace")
        await expect(world.page.locator("tk-list .row")).to_have_count(1, timeout=BOUND_MS)
        await world.page.get_by_role("listbox", name="Conversations").focus()
        await world.press("j", "Enter")
        await expect(world.page).to_have_url(f"{world.address}/inspector/#/c/refund-7/log")
        await world.shows("Refund of order 7", "tk-conversation h1")


async def test_the_list_lives(browser: Browser) -> None:
    async with site(browser, team_story()) as world:
        await world.go()
        await world.shows("Standup of the team")

        turn = await world.conversations["new"].send("hello from afar")
        await turn.reply()

        await world.shows("a(hello from afar)", "tk-list .row >> nth=0")


async def test_messages_are_found_by_their_words(browser: Browser) -> None:
    async with site(browser, journal=MemoryJournal(search=True)) as world:
        for name, text in (("one", "about penguins"), ("two", "about whales")):
            await (await world.conversations[name].send(text)).reply()
        await world.go()
        await expect(world.page.locator("tk-list .row")).to_have_count(2, timeout=BOUND_MS)
        hits: list[object] = []
        while not hits:  # a job of the journal's indexes them
            hits = list((await world.conversations.search("penguins")).hits)
        await world.page.get_by_role("searchbox").fill("penguins")
        await world.shows("penguins", "tk-list .row >> nth=0")
        await expect(world.page.locator(".list-facts")).to_have_text("2 messages")
        await world.page.get_by_role("searchbox").fill("one")
        await expect(world.page.locator(".list-facts")).to_have_text("1 conversation")
        await world.page.get_by_role("searchbox").fill("penguins")
        await expect(world.page.locator(".list-facts")).to_have_text("2 messages")
        await world.page.get_by_label("Status").select_option("error")
        await world.shows("Nothing fits")
        await world.page.get_by_label("Status").select_option("finished")
        await expect(world.page.locator(".list-facts")).to_have_text("2 messages")
        await world.page.locator("tk-list .row").first.click()
        await expect(world.page).to_have_url(re.compile(r"#/c/one/log\?seq=[23]$"))


async def test_a_search_goes_on_behind_the_messages_that_do_not_have_the_status(
    browser: Browser,
) -> None:
    """The server looks at about a thousand messages at once: the page said that nothing fits."""
    async with site(browser, journal=MemoryJournal(search=True)) as world:
        await (await world.conversations["one"].send("about penguins")).reply()
        for _ in range(1_100):
            await world.conversations["idle"].append(UserMessageEvent(content="penguins"))
        while (await world.conversations.search("penguins")).complete_to is not None:
            await anyio.lowlevel.checkpoint()  # a job of the journal's indexes them
        await world.go()
        await world.page.get_by_label("Status").select_option("finished")
        await world.page.get_by_role("searchbox").fill("penguins")
        await expect(world.page.locator(".list-facts")).to_have_text("2 messages")


async def test_a_message_that_is_found_hides_no_conversation_of_a_later_page(
    browser: Browser,
) -> None:
    async with site(browser, journal=MemoryJournal(search=True)) as world:
        for number in range(501):
            name, text = f"a{number:03}", "of a" if number == 500 else "of none"
            await world.conversations[name].append(UserMessageEvent(content=text))
        while (await world.conversations.search("a")).complete_to is not None:
            await anyio.lowlevel.checkpoint()  # as above
        await world.go()
        await world.page.get_by_role("searchbox").fill("a")
        await expect(world.page.locator(".list-facts")).to_have_text(
            "500+ conversations · 1 message"
        )
        await world.page.locator("tk-list tk-rows").evaluate("rows => rows.scrollTop = 1e6")
        await expect(world.page.locator(".list-facts")).to_have_text(
            "501 conversations · 1 message"
        )


# --- a conversation ------------------------------------------------------------------------------


async def test_the_log_stands_beside_the_transcript_and_tells_what_overlapped(
    browser: Browser,
) -> None:
    async with site(browser, refund_story(), research_story()) as world:
        await world.at("refund-7")

        await world.shows("interrupted turn 1", ".transcript-pane")
        await world.shows("waited 2.60 s", ".transcript-pane")
        log = world.page.get_by_role("listbox", name="Log by seq")
        await expect(log.locator(".row")).to_have_count(31)
        await log.locator("[data-seq='15']").click()
        await world.shows("seq 15", "tk-detail h2")
        await world.shows('"tool_name": "refund"', "tk-detail")
        selected = world.page.locator(".transcript-pane .is-active")
        await expect(selected).to_contain_text("refund")
        await world.press("Escape")
        await expect(world.page.locator("tk-detail")).to_have_count(0)
        await world.at("research")
        await world.shows("rolled back turn 2", ".transcript-pane")
        await world.shows("joined after 5.30 s", ".transcript-pane")
        await expect(world.page.locator(".log-row.has-left")).to_have_count(3)


async def test_a_result_names_the_call_that_it_answers(browser: Browser) -> None:
    """Four calls ran side by side, and their results came in another order."""
    async with site(browser, research_story()) as world:
        await world.at("research", query="?seq=9")

        said = world.page.locator(".transcript-pane .said")
        for result, call in (
            ("no notes yet", "of read_notes, seq 7"),
            ("12 papers", "of search, seq 4"),
            ("41 papers", "of search, seq 5"),
        ):
            await expect(said.filter(has_text=result)).to_contain_text(call)


async def test_a_result_that_is_an_error_is_shown_as_one(browser: Browser) -> None:
    story = Story("burning")
    story.says("a", "read it")
    (call,) = story.calls(("read", {}), took=0.1)
    story.results(call, "the disk is on fire", is_error=True)
    async with site(browser, story) as world:
        await world.at("burning")

        said = world.page.locator(".transcript-pane .said", has_text="the disk is on fire")
        await expect(said).to_have_class(re.compile("tone-bad"))
        await expect(said.locator("b")).to_have_text("error")
        row = world.page.locator(".log-pane .log-row", has_text="the disk is on fire")
        await expect(row).to_have_class(re.compile("tone-bad"))


async def test_the_long_name_of_a_call_stays_beside_its_result_on_a_phone(browser: Browser) -> None:
    """A model may call a tool that there is not, by a name of any length."""
    model = ScriptedModel([ModelResponse("", calls=[ToolCall("n" * 5_000)]), "Done."])
    async with site(browser, agent=ToolAgent(model, [refund]), width=375) as world:
        await (await world.conversations["alice"].send("pay it back")).reply()
        await world.at("alice")

        told = world.page.locator(".transcript-pane .who", has_text="seq 3")
        await expect(told).to_contain_text(f"of {'n' * 64}…, seq 3")
        row, name = [await each.bounding_box() for each in (told, told.locator("span").first)]
        assert row is not None
        assert name is not None
        assert name["x"] + name["width"] <= row["x"] + row["width"]


async def test_the_log_says_whose_a_conversation_is_and_how_long_a_turn_took(
    browser: Browser,
) -> None:
    story = Story("alice:first")
    story.add(ConversationChangedEvent, owner="alice", labels={"area": "billing"})
    story.says("a", "hello")
    story.at(119.6).answers("Hello.", took=1.0)
    async with site(browser, story) as world:
        await world.at("alice:first")
        await world.shows("of alice, area", ".log-pane")
        await world.shows("1 min 59 s", ".transcript-pane")  # not "1 min 60 s"


async def test_a_fork_names_its_parent_and_a_condensation_what_it_forgot(browser: Browser) -> None:
    async with site(browser, team_story()) as world:
        await world.conversations["team-standup"].fork("branch", at=20)
        await world.at("branch")

        await world.shows("fork of", ".conversation-head")
        await world.page.get_by_role("link", name="team-standup at 20").click()
        await world.shows("Standup of the team", "tk-conversation h1")
        await world.shows("condensed at", ".log-pane")


async def test_a_conversation_is_written_to_while_it_is_looked_at(browser: Browser) -> None:
    async with site(browser) as world:
        await (await world.conversations["live"].send("first")).reply()
        await world.at("live")
        await world.shows("a(first)", ".transcript-pane")
        world.agent.hold("stream slowly")
        turn = await world.conversations["live"].send("stream slowly")

        await world.shows("is writing", ".transcript-pane")
        await world.shows("running", ".conversation-head")
        world.agent.release("stream slowly")
        await turn.end()

        await world.shows("a(stream slowly)", ".transcript-pane")
        for tab, then in (("travel", "sees at seq 12"), ("timeline", "Turn 3")):
            await world.at("live", tab)
            await world.page.locator(f"tk-{tab}").wait_for(timeout=BOUND_MS)
            if tab == "travel":
                await (await world.conversations["live"].send("and again")).reply()
            await world.shows(then, f"tk-{tab}")
        await world.at("live")
        await expect(world.page.locator(".transcript-pane")).not_to_contain_text("is writing")
        await world.shows("finished", ".conversation-head")


async def test_nothing_shifts_while_live_events_come(browser: Browser) -> None:
    async with site(browser, team_story(20)) as world:
        await world.at("team-standup", query="?seq=40")
        await world.shows("Standup of the team", "tk-conversation h1")
        await world.shows("task 5", ".transcript-pane")
        await world.page.evaluate(
            """() => { window.shifts = 0; new PerformanceObserver((list) => {
            for (const entry of list.getEntries()) window.shifts += entry.value;
            }).observe({type: 'layout-shift', buffered: false}); }"""
        )
        place = "() => document.querySelector('.transcript-pane tk-rows').scrollTop"
        before = await world.page.evaluate(place)
        head = (await world.conversations["team-standup"].at()).seq

        for n in range(5):
            await (await world.conversations["team-standup"].send(f"live {n}")).reply()
        await world.shows(f"seq {head + 20}", ".conversation-head")

        assert await world.page.evaluate("() => window.shifts") == 0
        assert await world.page.evaluate(place) == before
        await expect(world.page.get_by_role("button", name="New below ↓")).to_be_visible()


TWO_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""A frame begins with the handlers of what was scrolled before it."""


async def _until(world: Site, asked: str, arg: object = None) -> None:
    """Ask the page frame by frame until it says yes.

    Beside other browsers, playwright's `wait_for_function` sometimes never saw that it did.
    """
    with anyio.fail_after(BOUND_MS / 1_000):
        while not await world.page.evaluate(asked, arg):
            await world.page.evaluate(TWO_FRAMES)


async def test_both_panes_begin_at_the_end_and_stand_where_they_were_left(browser: Browser) -> None:
    place = """([pane, height]) => {
      const rows = document.querySelector(`${pane} tk-rows`);
      if (height) rows.scrollTop = rows.scrollHeight * height;
      return [rows.scrollTop, rows.scrollHeight - rows.scrollTop - rows.clientHeight];
    }"""
    story = team_story(40)
    story.says("last", "Tell me all.")
    story.at(4_000).answers("All is said. " * 200, took=1)
    async with site(browser, story) as world:
        for width in (1_280, 390):
            await world.page.set_viewport_size({"width": width, "height": 800})
            await world.go()
            await world.at("team-standup")
            await world.shows("All is said.", ".transcript-pane")
            if width == 390:
                await world.button("Log")
            for pane in (".transcript-pane", ".log-pane")[width == 390 :]:
                await world.page.wait_for_selector(f"{pane} tk-rows", timeout=BOUND_MS)
                at_end = f"(pane) => ({place})([pane])[1] < 1"
                await _until(world, at_end, pane)

            await world.page.evaluate(place, [".log-pane", 0.5])
            await world.page.evaluate(TWO_FRAMES)
            before, _ = await world.page.evaluate(place, [".log-pane"])
            await world.page.locator(".log-pane tk-rows").focus()
            await world.press("2")
            await world.shows("What the model sees")
            await world.press("1")
            stands = f"(top) => ({place})(['.log-pane'])[0] === top"
            await _until(world, stands, before)


async def test_a_list_at_its_end_that_becomes_lower_stays_at_its_end(browser: Browser) -> None:
    """The head of a conversation may take one more line on a phone once its facts are read.

    If the list had been scrolled in the same frame, it counted as scrolled up by that line.
    """
    async with site(browser, team_story(40), width=390) as world:
        await world.at("team-standup")
        await world.shows("task 39", ".transcript-pane")
        below = """() => {
          const rows = document.querySelector(".transcript-pane tk-rows");
          return rows.scrollHeight - rows.scrollTop - rows.clientHeight;
        }"""
        await _until(world, f"() => ({below})() < 1")
        await world.page.evaluate(TWO_FRAMES)

        await world.page.evaluate(
            """() => {
              document.querySelector(".conversation-head").style.paddingBottom = "40px";
              document.querySelector(".transcript-pane tk-rows").dispatchEvent(new Event("scroll"));
            }"""
        )
        await world.page.evaluate(TWO_FRAMES)

        assert await world.page.evaluate(below) < 1


async def _choose_the_third_in_the_log(world: Site) -> None:
    await world.at("team-standup")
    await world.button("Log")
    await world.page.locator(".log-pane tk-rows").focus()
    await world.press("Home", "j", "j")


async def test_a_row_that_is_chosen_in_one_pane_is_in_sight_in_the_other_on_a_phone(
    browser: Browser,
) -> None:
    async with site(browser, team_story(40), width=390) as world:
        await _choose_the_third_in_the_log(world)
        await world.button("Transcript")
        await expect(world.page.locator(".transcript-pane .is-active")).to_be_in_viewport()


async def test_the_end_that_is_asked_for_in_one_pane_is_in_sight_in_the_other_on_a_phone(
    browser: Browser,
) -> None:
    """The other went to the row that was chosen before."""
    async with site(browser, team_story(40), width=390) as world:
        await _choose_the_third_in_the_log(world)
        await world.button("End ↓")
        await world.button("Transcript")
        at_end = """() => {
          const rows = document.querySelector(".transcript-pane tk-rows");
          return rows.scrollTop && rows.scrollHeight - rows.scrollTop - rows.clientHeight < 1;
        }"""
        await _until(world, at_end)


async def test_a_log_is_shown_before_the_server_has_computed_its_state(browser: Browser) -> None:
    async with site(browser, team_story(3)) as world:
        held: list[Route] = []

        async def hold(route: Route) -> None:
            held.append(route)

        await world.page.route("**/v1/conversations/team-standup/outline*", hold)
        await world.page.route("**/v1/conversations/team-standup", hold)
        await world.at("team-standup")
        await world.shows("Reading…", "tk-conversation")
        await held.pop().continue_()
        await world.shows("Task 2 is", ".transcript-pane")
        await held.pop().continue_()
        await world.shows("Standup of the team", "tk-conversation h1")


async def test_script_and_markup_are_shown_as_text(browser: Browser) -> None:
    story = Story(f"odd {SCRIPT[:20]}", title=SCRIPT)
    story.says("m1", SCRIPT, author=SCRIPT, metadata={SCRIPT: SCRIPT})
    (call,) = story.at(1).calls((SCRIPT, {SCRIPT: SCRIPT}), text=SCRIPT, took=1)
    story.at(2).results(call, SCRIPT)
    story.at(3).queues("m2", SCRIPT)
    story.at(4).answers(SCRIPT, took=1)
    story.says("m2", SCRIPT)
    story.at(5).ends("failed", SCRIPT)
    async with site(browser, story) as world:
        await world.go()
        await world.shows(SCRIPT, "tk-list .row")
        await world.at(story.name)
        await world.shows(SCRIPT, ".transcript-pane .is-user >> nth=0")
        await world.page.locator(".log-pane [data-seq='3']").click()
        await world.shows("onerror", "tk-detail")
        await world.travelled(story.name, 8)
        await world.shows(SCRIPT, "tk-travel .seen >> nth=0")
        await world.at(story.name, "timeline")
        await world.shows(SCRIPT[:8], ".timeline-scroll")
        await world.page.locator(".timeline-scroll").focus()
        await world.press("End")
        await world.shows(SCRIPT, ".timeline-bar")
        await world.at(story.name, "act", "?edit=m1&from=3")
        await expect(world.page.get_by_role("textbox", name="Message")).to_have_value(SCRIPT)
        await world.button("Send")
        await world.shows("Durable at seq", "tk-act")
        await world.go("runtime")
        await world.page.locator("tk-runtime .row", has_text=story.name).click()
        await world.shows(story.name, "tk-runtime aside")

        assert await world.page.evaluate("() => window.hacked") is None
        assert await world.page.locator("tk-inspector script").count() == 0


async def test_a_message_of_a_megabyte_is_shown_in_parts(browser: Browser) -> None:
    story = Story("large")
    story.says("m1", "word " * 200_000)
    story.at(1).answers("ok", took=1)
    async with site(browser, story) as world:
        await world.go()
        await world.shows("ok", "tk-list .row")
        await world.at("large")
        await world.shows("1,000,000 characters; open it to read on", ".transcript-pane")
        await world.page.locator(".log-pane [data-seq='2']").click()

        await world.shows("Show more (20,000 of", "tk-detail")
        await world.page.get_by_role("button", name="Show more").click()
        await world.shows("Show more (40,000 of", "tk-detail")
        await world.travelled("large", 2)
        await world.shows("1,000,000 characters", "tk-travel")
        await world.at("large", "timeline")
        await world.shows("word word", ".timeline-scroll")
        await world.at("large", "act", "?edit=m1&from=2")
        await expect(world.page.get_by_role("textbox", name="Message")).to_have_value(
            "word " * 200_000
        )


async def test_a_page_goes_on_when_the_server_comes_back(browser: Browser) -> None:
    async with site(browser, refund_story()) as world:
        await world.at("refund-7")
        await world.shows("Refund of order 7", "tk-conversation h1")
        context = world.page.context

        await context.set_offline(True)
        await world.page.evaluate(
            "() => import('./api.js').then(({ask}) => ask('self').catch(() => {}))"
        )
        await world.shows("The server does not answer")
        await world.shows("look_up", ".log-pane")  # what was read stays
        await context.set_offline(False)
        await (await world.conversations["refund-7"].send("are you back")).reply()

        await world.shows("a(are you back)", ".transcript-pane")
        await expect(world.page.locator(".notice")).to_have_count(0)


async def test_what_is_not_there_says_so(browser: Browser) -> None:
    async with site(browser) as world:
        await world.at("never")
        await world.shows("there is no conversation of this id")


async def test_a_kind_or_an_address_of_any_spelling_stops_no_page(browser: Browser) -> None:
    story = Story("odd")
    story.says("m1", "hello")
    story.at(1).answers("hi", took=1)
    story.at(2).ends("completed")
    async with site(browser, story) as world:
        for kind in ("constructor", "valueOf", "__proto__"):
            fields = {"kind": kind, "id": kind, "timestamp": BEGAN.isoformat(), "onclick": "x"}
            await world.conversations["odd"].append(decode_event(json.dumps(fields)))
        await world.at("odd")
        await world.shows("constructor", ".log-pane")
        await world.shows("valueOf", ".log-pane")

        await world.go("c/~!/log")
        await world.shows("there is no conversation of this id")
        await world.page.goto(f"{world.address}/inspector/#token=%")
        await world.shows("1 conversation", "tk-list")


async def test_a_deleted_conversation_says_so_and_stays_on_the_page(browser: Browser) -> None:
    async with site(browser, refund_story()) as world:
        await world.at("refund-7")
        await world.shows("look_up", ".log-pane")

        await world.conversations.delete("refund-7")

        await world.shows("This conversation was deleted")
        await world.shows("look_up", ".log-pane")


async def test_a_message_to_a_deleted_conversation_does_not_begin_it_anew(
    browser: Browser,
) -> None:
    async with site(browser, refund_story()) as world:
        await world.at("refund-7", "act")
        await world.page.get_by_role("textbox", name="Message").fill("are you there")
        await world.conversations.delete("refund-7")
        await world.shows("This conversation was deleted")
        await world.button("Send")

        await world.shows("conversation not found", "tk-act")
        assert not (await world.conversations.list()).rows


# --- time travel ---------------------------------------------------------------------------------


async def test_the_slider_moves_by_keys_and_shows_state_and_difference(browser: Browser) -> None:
    async with site(browser, refund_story()) as world:
        await world.travelled("refund-7", 17)
        await world.shows("waiting for confirmation", ".travel-facts")
        await world.shows("call-3 confirm", ".travel-facts")

        await world.press("]")
        await world.shows("What the model sees at seq 18: 9 events")
        await world.press("{")
        await world.shows("What the model sees at seq 12: 7 events")
        await world.page.get_by_role("slider").focus()
        await world.press("ArrowRight", "ArrowRight")
        await world.shows("What the model sees at seq 14: 8 events")
        await world.page.get_by_label("compare with", exact=True).check()
        await world.page.get_by_label("Compare with seq").fill("4")
        await world.press("Enter")
        await world.shows("Seq 4 → 14: 6 came, 0 left")
        await world.shows("1 → 2", ".travel-facts")
        await world.travelled("refund-7", 0, mode="difference")
        await world.shows("before the first event")


async def test_the_state_has_what_the_model_calls_have_cost(browser: Browser) -> None:
    story = Story("dear")
    story.says("a", "hello")
    for _ in range(2):
        story.add(StepFinishedEvent, usage=TokenUsage(input_tokens=1_000, cost=0.0125))
    async with site(browser, story) as world:
        await world.travelled("dear", 3)
        await world.shows("cost0.0125", ".travel-facts")
        await world.travelled("dear", 4)
        await world.shows("cost0.0250", ".travel-facts")


async def test_the_difference_has_what_a_condensation_took(browser: Browser) -> None:
    async with site(browser, team_story()) as world:
        await world.at("team-standup", "travel", "?seq=26&from=25")
        await world.button("Difference")

        await world.shows("Seq 25 → 26: 1 came, 9 left")
        await expect(world.page.locator(".seen.left")).not_to_have_count(0)
        await world.shows("Up to task 2 all was told.", ".seen.entered >> nth=0")


async def test_the_view_says_what_it_leaves_out(browser: Browser) -> None:
    story = Story("long", title="Long")
    story.says("m1", "Begin.")
    for n in range(205):
        (call,) = story.at(n).calls(("work", {"text": f"{n} " + "x" * 5_000}), took=0.5)
        story.results(call, "ok")
    story.at(300).answers("Done.", took=1)
    async with site(browser, story) as world:
        await world.travelled("long", story.seq)
        await world.shows("xxx…)", "tk-travel .row >> nth=1")
        await world.button("Asked")
        await world.shows("11 more messages; “JSON” shows all of them.", "tk-travel")
        await world.shows("0 " + "x" * 5_000, "tk-travel .asked .seen >> nth=1")


# --- the timeline --------------------------------------------------------------------------------


async def test_the_timeline_tells_in_words_what_it_draws(browser: Browser) -> None:
    async with site(browser, refund_story()) as world:
        await world.at("refund-7", "timeline")
        await world.shows("look_up 3.40 s", ".timeline-scroll")
        await world.page.locator(".timeline-scroll").focus()
        await world.press("ArrowDown")

        await world.shows(
            "Turn 1, interrupted, 6.20 s; cut off by “Never mind 9. Just pay order 7 back.”; "
            "model 2.60 s; tools 4.10 s"
        )
        assert await world.page.locator(".tl-cut").count() > 1  # one in the legend
        await world.press("ArrowDown")
        await world.shows("waits for a person 5.50 s", ".timeline-bar")
        await world.press("Enter")
        await expect(world.page.get_by_role("button", name="All turns")).to_be_visible()
        await world.press("Escape")
        await world.page.locator("svg rect.tl-tool >> nth=0").click()
        await expect(world.page).to_have_url(f"{world.address}/inspector/#/c/refund-7/log?seq=5")


async def test_the_timeline_labels_waits_late_messages_and_failures(browser: Browser) -> None:
    story = Story("deploy")
    story.says("a", "Deploy version 12.")
    (deploy,) = story.at(1.5).calls(("deploy", {}), took=1.2)
    story.asks(deploy)
    story.at(21.7).confirmed()
    story.at(22.0).queues("b", "Then check the error rate.", steers=True)
    story.at(23.0).results(deploy, "deployed")
    story.joins("b")
    story.at(24.0).queues("c", "Thanks.")
    story.at(26.5).answers("Done.", took=1.4)
    story.says("c", "Thanks.")
    story.at(27.0).ends("failed", "ModelError: the model was away")
    async with site(browser, story) as world:
        await world.at("deploy", "timeline")
        await world.shows("waits for a person: deploy 20.2 s", ".timeline-scroll")
        await world.shows("joins after 1.00 s", ".timeline-scroll")
        await world.shows("Then check the error rate.", ".timeline-scroll")
        await world.shows("waits 2.50 s", ".timeline-scroll")
        await world.shows("! ModelError", ".timeline-scroll")
        await world.shows("✓completed", ".legend")
        edge = await world.page.locator(".timeline-scroll").bounding_box()
        assert edge is not None
        for label in await world.page.locator(".timeline-scroll text").all():
            box = await label.bounding_box()
            assert box is not None
            assert box["x"] + box["width"] <= edge["x"] + edge["width"]


async def test_a_conversation_without_turns_has_an_empty_timeline(browser: Browser) -> None:
    story = Story("quiet", title="Nothing yet")
    async with site(browser, story) as world:
        await world.at("quiet", "timeline")
        await world.shows("No turn yet")
        await world.travelled("quiet", 1)
        await world.shows("The model sees nothing yet")


# --- doing ---------------------------------------------------------------------------------------


async def send(world: Site, text: str, policy: str = "") -> None:
    form = world.page.get_by_role("region", name="Send a message")
    await form.get_by_label("Message").fill(text)
    await form.get_by_label("If a turn runs").select_option(policy)
    await form.get_by_role("button", name="Send").click()


async def test_messages_are_sent_with_each_policy(browser: Browser) -> None:
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("hello")).reply()
        await world.at("alice", "act")
        world.agent.hold("slow")
        await send(world, "slow")
        await world.shows("Turn 2 runs", "tk-act")

        await send(world, "rejected", "reject")
        await world.shows("turn in progress", "tk-act")
        await send(world, "later", "queue")
        await world.shows("1 queued", ".conversation-head")
        await send(world, "joins", "steer")
        await world.shows("2 queued", ".conversation-head")
        world.agent.hold("now")
        await send(world, "now", "interrupt")
        await world.shows("the turn that ran is interrupted", "tk-act")
        world.agent.hold("instead")
        await send(world, "instead", "rollback")
        await world.shows("the turn that ran is rolled back", "tk-act")
        world.agent.release("instead")
        await world.shows("No turn runs", "tk-act")

        texts = [getattr(event, "content", "") for event in (await chat.at()).view]
        assert "instead" in texts
        assert "now" not in texts


async def test_a_turn_is_interrupted_paused_resumed_and_undone(browser: Browser) -> None:
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("hello")).reply()
        await world.at("alice", "act")
        await world.button("Pause")
        await world.shows("paused", ".conversation-head")
        await world.button("Resume")
        await world.shows("Goes on.", "tk-act")
        world.agent.hold("slow")
        await chat.send("slow")
        await world.shows("Turn 2 runs", "tk-act")
        await world.button("Interrupt")
        await world.shows("Interrupted.", "tk-act")
        await world.shows("No turn runs", "tk-act")
        await world.button("Undo the last turn")
        await world.shows("Took 1 message back.", "tk-act")

        assert [getattr(event, "content", "") for event in (await chat.at()).view] == [
            "hello",
            "a(hello)",
        ]


async def test_calls_are_answered_one_by_one(browser: Browser) -> None:
    calls = [ToolCall("refund", {"order": 1}), ToolCall("refund", {"order": 2})]
    model = ScriptedModel([ModelResponse("May I?", calls=calls), "Done."])
    asking = ToolAgent(model, [refund], confirm=["refund"])
    async with site(browser, agent=asking) as world:
        turn = await world.conversations["alice"].send("pay both back")
        await world.at("alice", "act")
        await world.shows("2 calls wait for an answer", "tk-act")
        submit = world.page.get_by_role("button", name="Send the answers")
        await expect(submit).to_be_disabled()
        rows = world.page.locator("tk-act li.card")
        await rows.nth(0).get_by_label("allow").check()
        await rows.nth(1).get_by_label("Reason to reject refund").fill("too much")
        await submit.click()

        assert await turn.reply() == "Done."
        texts = [
            getattr(event, "content", "")
            for event in (await world.conversations["alice"].at()).view
        ]
        assert "order 1 is paid back" in texts
        assert any("too much" in text for text in texts)
        await expect(world.page.locator("tk-act li.card")).to_have_count(0)


async def test_a_call_is_shown_whole_and_in_order_to_the_person_who_allows_it(
    browser: Browser,
) -> None:
    """What follows many blanks, or is written from right to left, must not be allowed unseen."""

    async def run(command: str) -> str:
        """Run a command."""
        return command

    command = f"echo hello{' ' * 3_000}; rm -r \u202edlrow\u202c /"
    model = ScriptedModel([ModelResponse("", calls=[ToolCall("run", {"command": command})])])
    async with site(browser, agent=ToolAgent(model, [run], confirm=["run"])) as world:
        await world.conversations["alice"].send("say hello")
        await world.at("alice", "act")

        await world.shows("; rm -r \\u202edlrow\\u202c /", "tk-act li.card")
        await world.at("alice")
        await world.page.locator(".log-pane [data-seq='3']").click()
        await world.shows("; rm -r \\u202edlrow\\u202c /", "tk-detail")


async def test_a_long_call_stays_inside_its_card_on_a_phone(browser: Browser) -> None:
    async def note(text: str) -> str:
        """Write a note."""
        return text

    model = ScriptedModel([ModelResponse("", calls=[ToolCall("note", {"text": "9" * 1_000_000})])])
    asking = ToolAgent(model, [note], confirm=["note"])
    async with site(browser, agent=asking, width=375) as world:
        await world.conversations["alice"].send("note this")
        await world.at("alice", "act")
        await world.shows("Show more (20,000 of 1,000,", "tk-act li.card")

        beyond = await world.page.locator("tk-act li.card *").evaluate_all(
            """(all) => all.filter((one) => {
                const right = (each) => each.getBoundingClientRect().right;
                return right(one) > right(one.closest('tk-act > *'));
            }).map((one) => one.outerHTML.slice(0, 80))"""
        )
        assert beyond == []


async def test_calls_that_could_not_be_read_are_read_at_the_next_event(browser: Browser) -> None:
    asked = ModelResponse("", calls=[ToolCall("refund", {"order": 1})])
    agent = ToolAgent(ScriptedModel([asked, "Done."]), [refund], confirm=["refund"])
    async with site(browser, agent=agent) as world:
        # Not the first read alone: while the page opens, it may read them a second time.
        await world.page.route("**/view?brief=*", lambda route: route.abort())
        chat = world.conversations["alice"]
        await chat.send("pay it back")
        await until(chat, "confirmation_requested")  # a later event would have them read again
        await world.at("alice", "act")
        await world.shows("The calls cannot be read", "tk-act")

        await world.page.unroute("**/view?brief=*")
        await chat.change(title="Refunds")
        await world.shows('refund({"order":1})', "tk-act li.card")


async def test_calls_that_arrive_late_do_not_hide_those_that_wait_now(browser: Browser) -> None:
    """The first view is held back until the page shows the call that came after it."""
    held: list[Route] = []

    async def hold(route: Route) -> None:
        if held:
            await route.continue_()
        else:
            held.append(route)

    asked = [ModelResponse("", calls=[ToolCall("refund", {"order": n})]) for n in (1, 2)]
    agent = ToolAgent(ScriptedModel([*asked, "Done."]), [refund], confirm=["refund"])
    async with site(browser, agent=agent) as world:
        await world.page.route("**/view?brief=*", hold)
        chat = world.conversations["alice"]
        await chat.send("pay both back")
        await world.at("alice", "act")
        while not held:
            await anyio.lowlevel.checkpoint()
        await chat.answer(dict.fromkeys((await chat.at()).turns.awaiting, True))
        await world.shows('refund({"order":2})', "tk-act li.card")

        async with world.page.expect_response("**/view?brief=*"):
            await held[0].continue_()
        await world.page.evaluate("() => new Promise(requestAnimationFrame)")
        await expect(world.page.locator("tk-act li.card")).to_contain_text('refund({"order":2})')


async def test_a_message_is_edited_a_fork_made_and_a_log_exported_and_verified(
    browser: Browser, tmp_path: Path
) -> None:
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("one")).reply()
        await (await chat.send("two")).reply()
        await world.at("alice")
        await world.page.locator(".log-pane [data-seq='2']").click()
        await world.page.get_by_role("link", name="Edit and resend").click()
        form = world.page.get_by_role("region", name="Send a message")
        await expect(form.get_by_label("Message")).to_have_value("one")
        await form.get_by_label("Message").fill("uno")
        await form.get_by_role("button", name="Send").click()
        await world.shows("Durable at seq", "tk-act")
        await world.shows("finished", ".conversation-head")
        assert [getattr(event, "content", "") for event in (await chat.at()).view] == [
            "uno",
            "a(uno)",
        ]

        await world.button("Verify")
        await world.shows("Sound:", "tk-act")
        async with world.page.expect_download() as found:
            await world.button("Export")
        path = tmp_path / "export.jsonl"
        await (await found.value).save_as(path)
        lines = [json.loads(line) for line in (await anyio.Path(path).read_text()).splitlines()]
        assert lines[1]["conversation"] == "alice"
        await world.at("alice", "act", "?at=4")
        await world.button("Fork here")
        await world.shows("alice-fork", "tk-conversation h1")
        assert (await world.conversations["alice-fork"].at(4)).seq == 4


async def test_a_server_that_only_reads_offers_nothing_else(browser: Browser) -> None:
    async with site(browser, refund_story(), read_only=True) as world:
        await world.at("refund-7", "act")
        await world.shows("This server only reads", "tk-act")
        await world.shows("read-only", ".top")
        await expect(world.page.get_by_role("button", name="Send")).to_have_count(0)
        await world.button("Verify")
        await world.shows("Sound: 31 events.", "tk-act")


# --- the runtime ---------------------------------------------------------------------------------


async def test_the_actors_are_shown_with_what_waits_for_them(browser: Browser) -> None:
    async with site(browser) as world:
        await (await world.conversations["alice"].send("hello")).reply()
        await world.go("runtime")

        await world.shows("conversations/alice", "tk-runtime")
        await world.shows("None: every message reached its actor.", "tk-runtime")
        await world.page.locator("tk-runtime .row", has_text="conversations/alice").click()
        await world.shows("Rejections of alice", "tk-runtime")
        await (await world.conversations["bob"].send("hello")).reply()
        await world.shows("conversations/bob", "tk-runtime")


async def test_what_waits_fails_or_is_refused_is_shown_of_many_actors(browser: Browser) -> None:
    """What the server tells is changed on its way: 3,000 actors, one of which falls behind.

    It has 47,000 more, which it has left out.
    """
    many = 3_000

    async def crowd(route: Route) -> None:
        tree = await (await route.fetch()).json()
        actors = tree["actors"][0]["children"]
        (one,) = actors
        one |= {"mailbox_depth": 12, "oldest_s": 2.5, "restarts": 3}
        one["handled"] += 100 * len(looks)
        others = ({**one, "name": f"other-{n}", "mailbox_depth": 0} for n in range(many))
        actors.extend(others)
        tree["actors"][0]["left_out"] = 47_000
        looks.append(1)
        await route.fulfill(json=tree)

    async def letters(route: Route) -> None:
        await route.fulfill(json={"count": 4, "by_reason": {"mailbox_full": 4}})

    looks: list[int] = []
    async with site(browser) as world:
        chat = world.conversations["alice"]
        await (await chat.send("hello")).reply()
        with pytest.raises(Exception, match="unmatched_tool_result"):
            await chat.append(ObservationEvent(tool_call_id="never-made", content="lost"))
        await world.page.route("**/v1/runtime/tree", crowd)
        await world.page.route("**/v1/dead-letters", letters)
        await world.go("runtime")

        row = world.page.locator("tk-runtime .row", has_text="conversations/alice")
        await expect(world.page.locator("tk-runtime")).to_contain_text(
            re.compile(r"3,00\d actors of 50,00\d, the busy ones first, 12 messages waiting"),
            timeout=BOUND_MS,
        )
        await expect(row.locator(".is-busy .depth")).to_have_text("12")
        await expect(row).to_contain_text("2.50 s")
        await world.shows("mailbox_full4", "tk-runtime table >> nth=0")
        await row.click()
        await world.shows("unmatched_tool_result", "[aria-label=Rejections]")
        rate = row.locator(".tree-row > span >> nth=5")
        await expect(rate).not_to_have_text("0.0", timeout=BOUND_MS)
        await expect(row.locator(".tree-row > span >> nth=6")).to_have_text("3")
        await expect(row).to_have_class(re.compile("is-active"))
        assert await world.page.locator("tk-runtime .row").count() < 80
