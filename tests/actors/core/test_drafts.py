"""The JSON that a command brings with its events stays with them until it is stored."""

from __future__ import annotations

import pytest

from turnkeeper.actors.core.commands import Append
from turnkeeper.actors.core.working_state import (
    ConversationSettings,
    Decision,
    Draft,
    Stamp,
    WorkingState,
)
from turnkeeper.actors.events import AgentMessageEvent, Event, PausedEvent, decode_event
from turnkeeper.actors.events import encode_event as encode
from turnkeeper.actors.owner.batch import Decided, Taken


def new_draft() -> Draft:
    working = WorkingState("c", 1, ConversationSettings())
    return Draft(working, Stamp(now=1.0, next_id=1 << 64))


def said(number: int) -> Event:
    return AgentMessageEvent(content=f"{number}")


def test_each_event_is_stored_with_its_own_json_wherever_it_was_made() -> None:
    """In one draft: made here, and made elsewhere with and without JSON."""
    events = [said(number) for number in range(6)]
    draft = new_draft()
    draft.extend(events[:2])
    draft.add(PausedEvent)
    draft.extend(events[2:4], [encode(event) for event in events[2:4]])
    draft.add(PausedEvent)
    draft.extend(events[4:])
    whole = draft.decision()
    single = Decision((said(7),))

    decided = Decided()
    for decision in (whole, single, Decision(), whole):
        decided.add(Taken(Append(said(0)), 1.0, 0), decision)

    expected = [*whole.events, *single.events, *whole.events]
    assert [decode_event(one.payload, kind=one.kind) for one in decided.records] == expected
    assert whole.written[3] == encode(events[2])


def test_a_draft_with_the_json_of_fewer_events_than_it_has_is_no_decision() -> None:
    draft = new_draft()
    draft.extend([said(1), said(2)], [encode(said(1))])
    with pytest.raises(AssertionError, match="1 places for the JSON of 2 events"):
        draft.decision()
