"""Several events in one commit: all of them or none, once however often they are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import pytest

from turnkeeper.actors import (
    Appended,
    Duplicate,
    Event,
    MemoryJournal,
)
from turnkeeper.actors.core.admission import AdmissionRefused
from turnkeeper.actors.core.commands import Append, AppendAll
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.errors import EventIdConflict, InvalidInput, NotAppendable
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    ObservationEvent,
    RetractionEvent,
    SystemPromptEvent,
    TurnStartedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.journal import Record
from turnkeeper.actors.owner.look_ups import may_be_known
from turnkeeper.runtime.testing import settle

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


class HeldJournal(WatchedJournal):
    """Holds the appends from the second on, until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.appends = 0
        self.reached, self.released = anyio.Event(), anyio.Event()

    async def before_append(self, records: Sequence[Record]) -> None:
        self.appends += 1
        if self.appends > 1:
            self.reached.set()
            await self.released.wait()


async def test_several_events_are_one_commit() -> None:
    journal = CountingJournal()
    async with verified(HeldAgent(), journal=journal, system_prompt="Be kind.") as conversations:
        alice = conversations["alice"]

        assert await alice.append_all([ASKED, CALL, RESULT, ANSWER]) == Appended(5)
        assert await alice.append_all([]) == Appended(5)

        assert await log_of(alice) == ["system_prompt", "u:one", "call", "result", "a:two"]
        assert journal.appends == [5]


async def test_a_log_that_begins_with_a_prompt_of_the_caller_has_no_other() -> None:
    async with verified(
        HeldAgent(), journal=MemoryJournal(), system_prompt="Be kind.", prompt_policy="pinned"
    ) as conversations:
        prompt = SystemPromptEvent(content="Be brief.")
        await conversations["alone"].append(prompt)
        await conversations["with others"].append_all([prompt, ASKED, ANSWER])
        assert list(await conversations["alone"].view()) == [prompt]
        assert list(await conversations["with others"].view()) == [prompt, ASKED, ANSWER]


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


@pytest.mark.parametrize("forgets", [False, True])
async def test_events_of_which_the_log_has_only_some_are_refused(forgets: bool) -> None:
    """A duplicate acknowledges all of them: those that are not there would be lost unheard."""
    limits = Limits(recent_events_max=2) if forgets else Limits()
    async with verified(HeldAgent(), journal=MemoryJournal(), limits=limits) as conversations:
        alice = conversations["alice"]
        await alice.append(ASKED)
        await alice.append_all([first := AgentMessageEvent(content="three"), ANSWER])
        if forgets:
            await alice.append_all([AgentMessageEvent(content=str(n)) for n in range(3)])
        before = await log_of(alice)

        new = AgentMessageEvent(content="new")
        for some in ([ASKED, new], [new, ASKED], [ASKED, first, ANSWER, new], [ANSWER, first]):
            with pytest.raises(EventIdConflict) as refused:
                await alice.append_all(some)
            assert refused.value.seqs.keys() == {event.id for event in some} - {new.id}

        assert await log_of(alice) == before
        assert await alice.append_all([ASKED, first, ANSWER]) == Duplicate(3)
        assert await alice.append_all([ASKED, ANSWER]) == Duplicate(3)


async def test_events_that_memory_lets_go_in_their_own_batch_are_known_again() -> None:
    journal = HeldJournal()
    limits = Limits(recent_events_max=2)
    async with verified(HeldAgent(), journal=journal, limits=limits) as conversations:
        alice = conversations["alice"]
        await alice.append(AgentMessageEvent(content="zero"))
        events = [ASKED, CALL, RESULT, ANSWER]
        answers: dict[int, object] = {}

        async def append(number: int, *given: Event) -> None:
            try:
                answers[number] = await alice.append_all(given)
            except EventIdConflict as error:
                answers[number] = sorted(error.seqs.values())

        async with anyio.create_task_group() as group:
            group.start_soon(append, 0, AgentMessageEvent(content="one"))
            await journal.reached.wait()
            one_more = [*events, AgentMessageEvent(content="new")]
            for number, given in enumerate((events, events, one_more), 1):
                group.start_soon(append, number, *given)
                await settle()
            journal.released.set()

        assert answers == {0: Appended(2), 1: Appended(6), 2: Duplicate(6), 3: [3, 4, 5, 6]}


async def test_a_retraction_goes_with_what_stands_in_its_place() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        alice = conversations["alice"]
        await alice.append_all([ASKED, ANSWER])
        better = AgentMessageEvent(content="better")
        await alice.append_all([RetractionEvent(retracted_event_ids=(ANSWER.id,)), better])
        assert list(await alice.view()) == [ASKED, better]
        with pytest.raises(AdmissionRefused):
            await alice.append_all([RetractionEvent(retracted_event_ids=(ANSWER.id,))])


@pytest.mark.parametrize("make", [Append, lambda event: AppendAll((event,))])
def test_only_an_event_that_the_log_may_have_is_looked_up(
    make: Callable[[Event], Append | AppendAll],
) -> None:
    """Ids rise: a new event's is above all in the log."""
    old, known, new = (AgentMessageEvent(content=text) for text in ("old", "known", "new"))
    state = Folded()
    state.fold(known)

    assert may_be_known(make(old), state)
    assert may_be_known(make(known), state)
    assert not may_be_known(make(new), state)
