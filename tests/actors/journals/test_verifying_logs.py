"""`verify_logs` reads a journal through its port, in several reads, beside those that write it."""

from __future__ import annotations

import pytest

from tests.browser.stories import Story, refund_story, team_story
from turnkeeper.actors import MemoryJournal
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
