"""Title, labels and owner of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.actors.conversations.worlds import HeldAgent, log_of, verified
from turnkeeper.actors import Conversation, Duplicate, MemoryJournal
from turnkeeper.actors.core.admission import AdmissionRefused
from turnkeeper.actors.core.details import Details
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import (
    ConversationNotFound,
    EventIdConflict,
    InvalidInput,
    JournalOutcomeUnknown,
    LabelTooLong,
    NotAppendable,
    TooManyLabels,
)
from turnkeeper.actors.events import CondensationRequestEvent, ConversationChangedEvent
from turnkeeper.actors.journal import Record
from turnkeeper.actors.journals.memory import MemoryStore
from turnkeeper.runtime import Ports

pytestmark = pytest.mark.anyio


async def details(chat: Conversation) -> Details:
    return (await chat.at()).details


async def test_a_change_sets_what_it_names_and_leaves_the_rest() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()

        await chat.change(title="Order 7", labels={"project": "x", "urgent": ""}, owner="alice")
        await chat.change(labels={"urgent": None, "area": "billing"})

        labels = {"project": "x", "area": "billing"}
        assert await details(chat) == Details("Order 7", labels, "alice")
        await chat.change(title="", owner="")
        assert await details(chat) == Details("", labels, "")


async def test_the_model_sees_nothing_of_a_change_and_a_turn_runs_on_through_it() -> None:
    held = HeldAgent()
    held.hold("tool A")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("tool A")
        await held.reached["tool A"].wait()  # its call is open

        await chat.change(title="a title")
        held.release("tool A")

        assert await turn.reply() == "a(tool A)"
        assert await log_of(chat) == ["u:tool A", "call", "result", "a:a(tool A)"]
        assert (await details(chat)).title == "a title"


async def test_a_change_of_what_does_not_exist_creates_nothing() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        with pytest.raises(ConversationNotFound):
            await conversations["c"].change(title="a title")
        assert (await conversations.list()).rows == []


async def test_the_same_change_id_is_the_same_change_over_a_restart_too() -> None:
    journal = MemoryJournal()
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        first = await chat.change(title="one", change_id="change-1")
        await chat.change(title="two")

        assert await chat.change(title="one", change_id="change-1") == Duplicate(first.seq)
        assert (await details(chat)).title == "two"
        with pytest.raises(EventIdConflict):
            await chat.change(title="three", change_id="change-1")
    async with verified(HeldAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        assert await chat.change(title="one", change_id="change-1") == Duplicate(first.seq)
        assert (await details(chat)).title == "two"


class LosesAnswer(MemoryJournal):
    """Writes a change, and then says that it does not know."""

    async def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        **rest: Any,  # noqa: ANN401 - passed on as it is
    ) -> Sequence[int]:
        seqs = await super().append(conversation_id, records, **rest)
        if records[0].event_id == "lost":
            raise JournalOutcomeUnknown("the answer was lost")
        return seqs


async def test_a_change_whose_answer_was_lost_is_sent_again_without_doubling_it() -> None:
    async with verified(HeldAgent(), journal=LosesAnswer()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        with pytest.raises(JournalOutcomeUnknown):
            await chat.change(title="one", change_id="lost")
        assert isinstance(await chat.change(title="one", change_id="lost"), Duplicate)
        kinds = await log_of(chat, all_kinds=True)
        assert kinds.count("conversation_changed") == 1


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"title": "x" * 257},
        {"title": "two\nlines"},
        {"title": "\ud800"},
        {"owner": "x" * 257},
        {"labels": {"x" * 65: ""}},
        {"labels": {"": "x"}},
        {"labels": {"x": "y" * 257}},
        {"labels": {"x": 7}},
        {"labels": ["x"]},
        {"title": "x", "change_id": ""},
        {"title": "x", "change_id": "a\tb"},
    ],
    ids=repr,
)
async def test_a_change_beyond_the_limits_is_refused_and_writes_nothing(
    change: dict[str, object],
) -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        head = (await conversations.list()).rows[0].head
        with pytest.raises(InvalidInput):
            await chat.change(**change)  # type: ignore[arg-type]  # wrong on purpose
        assert (await conversations.list()).rows[0].head == head


async def test_a_conversation_has_32_labels_at_most() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        await chat.change(labels={f"label {n}": "x" for n in range(32)})

        with pytest.raises(TooManyLabels):
            await chat.change(labels={"one more": "x"})
        await chat.change(labels={"one more": "x", "label 0": None})

        assert len((await details(chat)).labels) == 32


async def test_labels_have_limits_that_the_application_sets() -> None:
    store = MemoryStore()
    async with verified(HeldAgent(), journal=MemoryJournal(store)) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        await chat.change(labels={"x" * 64: "y" * 256}, change_id="known")
        for label in ({"x" * 65: None}, {"x": "y" * 257}):
            with pytest.raises(LabelTooLong):
                await chat.change(labels=label)

    limits = Limits(labels_max=2, label_name_length_max=3, label_value_length_max=4)
    async with verified(HeldAgent(), journal=MemoryJournal(store), limits=limits) as conversations:
        chat = conversations["c"]
        again = await chat.change(labels={"x" * 64: "y" * 256}, change_id="known")
        assert isinstance(again, Duplicate)
        with pytest.raises(LabelTooLong) as refused:
            await chat.change(labels={"abcd": "1"})
        assert (refused.value.length, refused.value.length_max) == (4, 3)
        with pytest.raises(LabelTooLong) as refused:
            await chat.change(labels={"abc": "12345"})
        assert (refused.value.length, refused.value.length_max) == (5, 4)
        await chat.change(labels={"abc": "1234"})
        with pytest.raises(TooManyLabels) as too_many:
            await chat.change(labels={"two": "1234"})
        assert too_many.value.labels_max == 2
        assert len((await details(chat)).labels) == 2

    with pytest.raises(InvalidInput, match="256 or less"):
        Limits(label_name_length_max=257)


async def test_only_the_owner_of_a_log_writes_a_change() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        with pytest.raises(NotAppendable):
            await chat.append(ConversationChangedEvent(title="x"))
        with pytest.raises(NotAppendable):
            await chat.append_all([ConversationChangedEvent(title="x")])


async def test_a_fork_keeps_title_and_labels_of_its_place_and_belongs_to_its_maker() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        await chat.change(title="first", labels={"x": "1"}, owner="alice")
        place = (await conversations.list()).rows[0].head
        await chat.change(title="second", labels={"x": "2"})

        theirs = await chat.fork("d", at=place, owner="bob")
        nobodys = await chat.fork("e", at=place)
        own = await chat.fork("f", owner="alice")

        assert await details(theirs) == Details("first", {"x": "1"}, "bob")
        assert await details(nobodys) == Details("first", {"x": "1"}, "")
        assert await details(own) == Details("second", {"x": "2"}, "alice")
        assert await details(chat) == Details("second", {"x": "2"}, "alice")
        # The owner is in the first commit of the fork, so there is no moment without it.
        assert (await theirs.at(place + 2)).details.owner == "bob"


async def test_a_change_is_not_taken_back() -> None:
    """Neither alone nor with the turn that it came in."""
    held = HeldAgent()
    held.hold("B")
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        turn = await chat.send("B")
        await chat.change(title="a title", change_id="change-1")
        held.release("B")
        await turn.end()
        with pytest.raises(AdmissionRefused) as refused:
            await chat.retract(["change-1"])
        assert refused.value.violation.name == "illegal_retraction"

        await chat.undo()

        assert await log_of(chat) == ["u:A", "a:a(A)", "u:B", "a:a(B)"]
        assert (await details(chat)).title == "a title"


async def test_a_change_keeps_a_conversation_from_expiring() -> None:
    """It is no activity in lists, and it is something that was written."""
    day = 1.0
    journal = MemoryJournal(ports=replace(Ports(), now=lambda: day))
    async with verified(HeldAgent(), journal=journal) as conversations:
        for name in ("changed", "old"):
            await (await conversations[name].send("A")).end()
        day = 9.0
        await conversations["changed"].change(title="a title")

        assert await conversations.expire(before=5.0) == ["old"]


class Listed(MemoryJournal):
    """Notes the kinds of each append, and if it had a row for lists."""

    def __init__(self) -> None:
        super().__init__()
        self.appends: list[tuple[str, bool]] = []

    async def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        **rest: Any,  # noqa: ANN401 - passed on as it is
    ) -> Sequence[int]:
        kinds = " ".join(record.kind for record in records)
        self.appends.append((kinds, rest["listing"] is not None))
        return await super().append(conversation_id, records, **rest)


async def test_a_row_for_lists_goes_with_the_appends_that_change_it_and_with_no_other() -> None:
    held = HeldAgent()
    held.hold("tool A")
    journal = Listed()
    async with verified(held, journal=journal) as conversations:
        chat = conversations["c"]
        turn = await chat.send("tool A")
        await held.reached["tool A"].wait()
        waits = await chat.send("B")
        await chat.append(CondensationRequestEvent())
        await chat.change(title="a title")
        held.release("tool A")
        await turn.end()
        await waits.end()
        await chat.pause()
        await chat.resume()

    with_row = {kind for kinds, has_row in journal.appends if has_row for kind in kinds.split()}
    without = {kind for kinds, has_row in journal.appends if not has_row for kind in kinds.split()}
    assert with_row >= {
        *("turn_started", "turn_ended", "message_queued", "conversation_changed"),
        *("paused", "resumed"),
    }
    assert without >= {"action", "observation", "condensation_request"}
    assert not with_row & {"action", "observation", "condensation_request"}
