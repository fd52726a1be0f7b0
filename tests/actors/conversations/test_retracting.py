"""Retracting events and turns."""

from __future__ import annotations

import pytest

from tests.actors.conversations.worlds import HeldAgent, brief, log_of, verified
from turnkeeper.actors import (
    MemoryJournal,
)
from turnkeeper.actors.core.admission import AdmissionRefused
from turnkeeper.actors.errors import InvalidInput, NothingToRetract
from turnkeeper.actors.events import ActionEvent

pytestmark = pytest.mark.anyio


async def test_a_retracted_turn_leaves_the_view_and_stays_in_the_log() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        second = await chat.send("tool B")
        await second.end()

        await chat.retract_turn(second.turn_id)

        assert [brief(event) for event in await chat.view()] == ["u:A", "a:a(A)"]
        assert (await log_of(chat, all_kinds=True))[-1] == "retraction"
        with pytest.raises(NothingToRetract):
            await chat.retract_turn(second.turn_id)


async def test_one_id_in_place_of_a_list_is_refused_as_such() -> None:
    """Each of its letters was taken for an id."""
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        said = next(iter(await chat.view()))

        with pytest.raises(InvalidInput, match="event_ids is a str"):
            await chat.retract(said.id)


async def test_half_a_call_cannot_be_retracted() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("tool A")).end()
        action = next(e for e in await chat.view() if isinstance(e, ActionEvent))

        with pytest.raises(AdmissionRefused) as refused:
            await chat.retract([action.id])

        assert refused.value.violation.name == "illegal_retraction"
        assert len(await chat.view()) == 4
