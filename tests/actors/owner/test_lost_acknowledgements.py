"""Readers and waiting callers, when an acknowledgement is lost or an owner has gone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.actors.conversations.worlds import HeldAgent, WatchedJournal, log_of, verified
from turnkeeper.actors import (
    MemoryJournal,
)
from turnkeeper.actors.journal import Listing, Record
from turnkeeper.runtime import (
    OutcomeUnknown,
    OwnershipLost,
)

pytestmark = pytest.mark.anyio


class LosesAcknowledgement(MemoryJournal):
    """Writes, and then loses the line: once, when the last record is of this kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind: str | None = kind

    async def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
        listing: Listing | None = None,
    ) -> Sequence[int]:
        seqs = await super().append(
            conversation_id,
            records,
            epoch=epoch,
            expected_seq=expected_seq,
            is_unfinished=is_unfinished,
            listing=listing,
        )
        if records[-1].kind == self.kind:
            self.kind = None
            raise OutcomeUnknown("the line was lost after the write")
        return seqs


@pytest.mark.parametrize("kind", ["user_message", "agent_message", "turn_ended"])
async def test_events_written_behind_a_lost_acknowledgement_reach_those_who_wait(
    kind: str,
) -> None:
    async with verified(HeldAgent(), journal=LosesAcknowledgement(kind)) as conversations:
        chat = conversations["c"]
        reader = chat.events()
        try:
            turn = await chat.send("A", message_id="a")
        except OutcomeUnknown:
            turn = await chat.send("A", message_id="a")

        end = await turn.end()

        length = len(await log_of(chat, all_kinds=True))
        assert [(await anext(reader)).seq for _ in range(length)] == list(range(1, length + 1))
        assert end.outcome == ("completed" if kind == "turn_ended" else "interrupted")


class Breakable(WatchedJournal):
    error: Exception | None = None

    async def before_append(self, records: Sequence[Record]) -> None:
        if self.error is not None:
            raise self.error


async def test_a_caller_that_begins_to_wait_when_the_owner_has_gone_starts_the_next_one() -> None:
    journal, held = Breakable(), HeldAgent()
    held.hold("A")
    async with verified(held, journal=journal) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        await held.reached["A"].wait()
        journal.error = OwnershipLost("fenced")
        with pytest.raises(OwnershipLost):
            await chat.send("B")
        journal.error = None

        assert (await turn.end()).outcome == "interrupted"
