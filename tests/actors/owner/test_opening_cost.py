"""The cost of opening a conversation in Python opcodes and calls: counts repeat, times do not.

A change that makes opening cheaper, or dearer for a good reason, records the new figures here.
"""

from __future__ import annotations

import platform
import sys

import pytest

from tests.actors.owner.test_append_cost import ALLOWED, Cost, Counter
from turnkeeper.actors import FrozenObject, MemoryJournal, TokenUsage
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    Event,
    ObservationEvent,
    StepFinishedEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.owner.loading import load_state

TURNS = 100

RECORDED = {"3.11": Cost(421, 14.4)}
"""For each event of a log of usual turns, in the event loop's thread."""


def turn(number: int) -> list[Event]:
    """Return a turn of a question, a call of a tool and an answer."""
    turn_id, call_id, response_id = f"t{number}", f"c{number}", f"r{number}"
    arguments = FrozenObject({"at": "place", "deep": {"a": [1, 2, 3]}})
    return [
        TurnStartedEvent(turn_id=turn_id),
        UserMessageEvent(turn_id=turn_id, content="please", message_id=f"m{number}"),
        ActionEvent(
            turn_id=turn_id,
            tool_call_id=call_id,
            tool_name="look",
            arguments=arguments,
            llm_response_id=response_id,
        ),
        ObservationEvent(turn_id=turn_id, tool_call_id=call_id, content="seen"),
        StepFinishedEvent(turn_id=turn_id, usage=TokenUsage(input_tokens=10)),
        AgentMessageEvent(turn_id=turn_id, content="answer"),
        StepFinishedEvent(turn_id=turn_id, usage=TokenUsage(input_tokens=12)),
        TurnEndedEvent(turn_id=turn_id, outcome="completed"),
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the same but for the waits between slices
async def test_opening_takes_no_more_opcodes_and_calls_than_were_recorded() -> None:
    recorded = RECORDED.get(".".join(platform.python_version_tuple()[:2]))
    if recorded is None or platform.python_implementation() != "CPython":
        pytest.skip("no cost was recorded for this Python")
    if sys.gettrace() is not None:
        pytest.skip("a debugger or the measuring of coverage traces already")
    records = [encode_record(event) for number in range(TURNS) for event in turn(number)]
    async with MemoryJournal() as journal:
        claim = await journal.claim("c")
        await journal.append("c", records, epoch=claim.epoch, expected_seq=1, is_unfinished=False)
        await load_state(journal, "c", len(records))
        counter = Counter()

        with counter.counting():
            state, _ = await load_state(journal, "c", len(records))

    assert state.seq == len(records)
    cost = Cost(counter.opcodes / len(records), counter.calls / len(records))
    assert cost.opcodes <= recorded.opcodes * ALLOWED, f"{cost} are counted, {recorded} recorded"
    assert cost.calls <= recorded.calls * ALLOWED, f"{cost} are counted, {recorded} recorded"
