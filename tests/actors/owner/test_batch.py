"""What follows from a batch, as it is added up."""

from __future__ import annotations

import pytest

from turnkeeper.actors.core.commands import Append, Recover
from turnkeeper.actors.core.working_state import Decision
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import AgentMessageEvent, Event, TextDelta
from turnkeeper.actors.owner.batch import Decided, Taken


def said(text: str) -> Event:
    return AgentMessageEvent(content=text)


def taken(event: Event) -> Taken:
    return Taken(Append(event), 1.0, 0)


def test_a_piece_is_shown_before_the_events_of_its_own_command_and_after_earlier_ones() -> None:
    first, last = said("first"), said("last")
    piece = TextDelta(1, "turn", 0, 1, 0, "text")
    decided = Decided()

    decided.add(taken(first), Decision((first,)))
    decided.add(taken(last), Decision((last,), piece=piece))

    assert decided.shown == (first, piece, last)
    assert list(decided.events) == [first, last]
    assert [record.event_id for record in decided.records] == [first.id, last.id]


def test_a_refusal_of_a_command_of_the_owner_itself_is_raised() -> None:
    """No caller would hear of it, and the rest of the batch was decided as if it had happened."""
    decided = Decided()
    with pytest.raises(InvalidInput, match="refused"):
        decided.refuse(Taken(Recover(enforced_away=()), 1.0, 0), InvalidInput("refused"))
