"""Several events in one commit: all of them or none, once however often they are sent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from turnkeeper.actors import (
    Appended,
    Duplicate,
    Event,
    MemoryJournal,
)
from turnkeeper.actors.core.admission import AdmissionRefused
from turnkeeper.actors.errors import EventIdConflict, InvalidInput, NotAppendable
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    ObservationEvent,
    RetractionEvent,
    TurnStartedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.journal import Record

from ..conversations.worlds import HeldAgent, WatchedJournal, log_of, verified

CALL = ActionEvent(tool_call_id="c", tool_name="look", llm_response_id="r")
RESULT = ObservationEvent(tool_call_id="c", content="seen")
ASKED = UserMessageEvent(content="one")
ANSWER = AgentMessageEvent(content="two")


class CountingJournal(WatchedJournal):
    """Notes how many records each append has."""

    def __init__(self) -> None:
        super().__init__()
        self.appends: list[int] = []

    async def before_append(self, records: Sequence[Record]) -> None:
        self.appends.append(len(records))


async def test_several_events_are_one_commit() -> None:
    journal = CountingJournal()
    async with verified(HeldAgent(), journal=journal, system_prompt="Be kind.") as conversations:
        alice = conversations["alice"]

        assert await alice.append_all([ASKED, CALL, RESULT, ANSWER]) == Appended(5)
        assert await alice.append_all([]) == Appended(5)

        assert await log_of(alice) == ["system_prompt", "u:one", "call", "result", "a:two"]
        assert journal.appends == [5]


async def test_where_one_of_them_is_refused_none_is_written() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        alice = conversations["alice"]
        with pytest.raises(AdmissionRefused):
            await alice.append_all([ASKED, CALL, ANSWER])
        with pytest.raises(NotAppendable):
            await alice.append_all([ASKED, TurnStartedEvent(turn_id="t")])
        with pytest.raises(NotAppendable):
            await alice.append_all([UserMessageEvent(content="one", message_id="m")])
        with pytest.raises(InvalidInput):
            await alice.append_all([ASKED, ASKED])

        assert await alice.append_all([]) == Appended(0)


@pytest.mark.parametrize("later", [0, 300])
async def test_the_same_events_again_are_a_duplicate_also_after_a_restart(later: int) -> None:
    """After so many others, too, that the owner has forgotten them and looks into the log."""
    journal = MemoryJournal()
    events: list[Event] = [ASKED, CALL, RESULT, ANSWER]
    async with verified(HeldAgent(), journal=journal) as conversations:
        await conversations["alice"].append_all(events)
        others = [AgentMessageEvent(content=str(n)) for n in range(later)]
        await conversations["alice"].append_all(others)
        assert await conversations["alice"].append_all(events) == Duplicate(4)

    async with verified(HeldAgent(), journal=journal) as conversations:
        alice = conversations["alice"]
        assert await alice.append_all(events) == Duplicate(4)
        with pytest.raises(EventIdConflict):
            await alice.append_all([AgentMessageEvent(id=ASKED.id, content="other"), ANSWER])
        with pytest.raises(EventIdConflict):
            await alice.append_all([AgentMessageEvent(content="new"), ANSWER])
        assert await alice.append_all([]) == Appended(4 + later)


async def test_a_retraction_goes_with_what_stands_in_its_place() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        alice = conversations["alice"]
        await alice.append_all([ASKED, ANSWER])
        better = AgentMessageEvent(content="better")
        await alice.append_all([RetractionEvent(retracted_event_ids=(ANSWER.id,)), better])
        assert list(await alice.view()) == [ASKED, better]
        with pytest.raises(AdmissionRefused):
            await alice.append_all([RetractionEvent(retracted_event_ids=(ANSWER.id,))])
