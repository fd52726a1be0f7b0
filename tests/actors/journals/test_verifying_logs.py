"""`verify_logs` reads a journal through its port, in several reads, beside those that write it."""

from __future__ import annotations

import pytest

from tests.browser.stories import Story, refund_story, team_story
from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    MemoryStore,
    RollingCondenser,
    ToolCall,
    ToolResult,
    TurnContext,
    agent,
)
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.records import decode_record
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.events import ActionEvent
from turnkeeper.actors.journal import ListPage, ListQuery, Snapshot
from turnkeeper.actors.journals.files import check_event, check_folds, check_listing, verify_logs

pytestmark = pytest.mark.anyio

NAME = "team"


def named(story: Story) -> Story:
    story.name = NAME
    return story


async def write(journal: MemoryJournal, written: Story) -> None:
    await written.write(journal)
    claim = await journal.claim(NAME)
    await journal.write_snapshot(NAME, written.state.to_snapshot(), epoch=claim.epoch)


class Exchanging(MemoryJournal):
    """Deletes the log behind one of the reads, and begins another one under its name."""

    behind: str | None = None

    def exchange_behind(self, read: str) -> None:
        self.behind = read

    async def page(self, query: ListQuery) -> ListPage:
        page = await super().page(query)
        await self._exchange("page")
        return page

    async def read_snapshot(self, conversation_id: str) -> Snapshot | None:
        snapshot = await super().read_snapshot(conversation_id)
        await self._exchange("read_snapshot")
        return snapshot

    async def _exchange(self, read: str) -> None:
        if self.behind == read:
            self.behind = None
            claim = await self.claim(NAME)
            await self.delete(NAME, epoch=claim.epoch)
            await write(self, named(refund_story()))


@pytest.mark.parametrize("behind", ["page", "read_snapshot"])
async def test_a_log_that_is_begun_anew_between_two_reads_is_no_problem(behind: str) -> None:
    async with Exchanging() as journal:
        await write(journal, named(team_story(3)))
        journal.exchange_behind(behind)
        report = await verify_logs(
            journal,
            check_listing=check_listing,
            check_snapshot=check_folds,
            check_record=check_event,
        )
    assert journal.behind is None
    assert report.problems == ()
    assert (report.conversations, report.records) == (1, len(named(refund_story()).events))


async def test_a_snapshot_that_is_not_the_folds_of_its_log_is_told_once() -> None:
    async with MemoryJournal() as journal:
        await write(journal, named(team_story(3)))
        claim = await journal.claim(NAME)
        other = team_story(3, "other").state.to_snapshot()
        await journal.write_snapshot(NAME, other, epoch=claim.epoch)
        report = await verify_logs(journal, check_snapshot=check_folds)
    assert [one.found for one in report.problems] == ["its snapshot is not the folds of its log"]


@agent
async def calling(turn: TurnContext) -> str:
    async def run(_: ActionEvent) -> ToolResult:
        return ToolResult("done")

    await turn.call_tools([ToolCall("work"), ToolCall("work")], run)
    return "done"


SMALL = Limits(known_messages_max=2, finished_calls_max=1, snapshot_events=2)
SOME = Limits(known_messages_max=5, finished_calls_max=3, snapshot_events=2)


@pytest.mark.parametrize(
    "limits", [(SMALL,), (SMALL, SOME), (SOME, SMALL)], ids=["small", "raised", "lowered"]
)
async def test_a_snapshot_is_of_its_log_under_all_limits_that_its_owners_had(
    limits: tuple[Limits, ...],
) -> None:
    store = MemoryStore()
    for each in limits:
        async with Conversations(
            calling,
            journal=MemoryJournal(store),
            limits=each,
            queued_messages_max=1,
            condenser=RollingCondenser(max_size=8, keep_first=1, minimum_progress=0),
        ) as conversations:
            for _ in range(12):
                await (await conversations[NAME].send("go")).reply()
    async with MemoryJournal(store) as journal:
        snapshot = await journal.read_snapshot(NAME)
        assert snapshot is not None
        log = Folded()
        for record in await journal.read(NAME, after=0, limit=snapshot.seq):
            log.fold(decode_record(NAME, record).event)
        kept = Folded.from_snapshot(snapshot)
        assert kept is not None
        assert kept != log, "the limits make no difference"

        report = await verify_logs(journal, check_snapshot=check_folds)
        assert report.problems == ()


@pytest.mark.parametrize("planted", ["message", "call"])
async def test_an_id_that_the_log_has_not_like_that_is_told_under_any_limits(planted: str) -> None:
    async with MemoryJournal() as journal:
        written = named(team_story(3))
        await written.write(journal)
        kept = written.state
        if planted == "message":
            [newest, *_] = reversed(kept.turns._known)
            seq, turn_id, digest, place = kept.turns._known[newest]
            kept.turns._known[newest] = (seq - 1, turn_id, digest, place)
        else:
            kept.admission._calls_left = {"never called": None}
        claim = await journal.claim(NAME)
        await journal.write_snapshot(NAME, kept.to_snapshot(), epoch=claim.epoch)
        report = await verify_logs(journal, check_snapshot=check_folds)
    assert [one.found for one in report.problems] == ["its snapshot is not the folds of its log"]
