"""A page of large records is short, and no reader takes its end for the end of the log."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.actors.conversations.worlds import HeldAgent
from turnkeeper.actors import Conversations, MemoryJournal
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.core.working_state import ConversationSettings, WorkingState
from turnkeeper.actors.events import (
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    Event,
    LoggedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.journal import READ_BYTES
from turnkeeper.actors.journals.transfer import export_lines, import_lines
from turnkeeper.actors.owner import look_ups

pytestmark = pytest.mark.anyio


def large(size: int = READ_BYTES + 1) -> Event:
    return UserMessageEvent(content="x" * size)


async def write(journal: MemoryJournal, events: Sequence[Event]) -> None:
    await journal.append(
        "c",
        [encode_record(event) for event in events],
        epoch=(await journal.claim("c")).epoch,
        expected_seq=1,
        is_unfinished=False,
    )


async def test_a_reader_of_large_events_ends_at_the_end_of_the_log() -> None:
    """The last one fills a page alone, and the event before it is read with it."""
    events = [large(), large(), large(), UserMessageEvent(content="small"), large()]
    async with MemoryJournal() as journal:
        await write(journal, events)
        async with Conversations(HeldAgent(), journal=journal) as conversations:
            seen = [logged async for logged in conversations["c"].events(live=False)]

    assert [logged.event.id for logged in seen] == [event.id for event in events]


async def test_the_answers_of_calls_are_found_behind_large_events() -> None:
    asked = ConfirmationRequestedEvent(tool_call_ids=("call",))
    given = ConfirmationGivenEvent(confirmed=True)
    async with MemoryJournal() as journal:
        await write(journal, [large(), large(), large(), asked, given])
        working = WorkingState("c", 1, ConversationSettings())

        found = await look_ups._find_given(LoggedEvent(5, given), working, journal)

    assert found == {"call": True}


async def test_an_import_of_large_events_can_be_repeated() -> None:
    async with MemoryJournal() as first, MemoryJournal() as second:
        await write(first, [large(READ_BYTES * 3 // 4) for _ in range(3)])
        lines = [line async for line in export_lines(first)]

        await import_lines(second, lines)
        again = await import_lines(second, lines)

    assert again.records == 0
