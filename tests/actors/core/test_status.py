"""The status of a conversation, and the one table of what may follow what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.actors.core.logs import Maker
from turnkeeper.actors.core.status import TRANSITIONS, AgentExecutionStatus, StatusFold
from turnkeeper.actors.events import (
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    Event,
    PausedEvent,
    ResumedEvent,
    StatusChangedEvent,
    TurnEndedEvent,
    TurnStartedEvent,
)

S = AgentExecutionStatus
_MAKE = Maker()


def _event(name: str) -> Event:
    make = _MAKE.stamp
    events: dict[str, Any] = {
        "user": _MAKE.user,
        "agent": _MAKE.agent,
        "started": lambda: TurnStartedEvent(**make()),
        "completed": lambda: TurnEndedEvent(**make(), outcome="completed"),
        "interrupted": lambda: TurnEndedEvent(**make(), outcome="interrupted"),
        "rolled back": lambda: TurnEndedEvent(**make(), outcome="rolled_back"),
        "failed": lambda: TurnEndedEvent(**make(), outcome="failed"),
        "paused": lambda: PausedEvent(**make()),
        "resumed": lambda: ResumedEvent(**make()),
        "asked": lambda: ConfirmationRequestedEvent(**make(), tool_call_ids=("c1",)),
        "confirmed": lambda: ConfirmationGivenEvent(**make(), confirmed=True),
        "rejected": lambda: ConfirmationGivenEvent(**make(), confirmed=False),
        "stuck": lambda: StatusChangedEvent(**make(), status="STUCK"),
        "nonsense": lambda: StatusChangedEvent(**make(), status="DANCING"),
    }
    event: Event = events[name]()
    return event


_NAMES = (
    *("user", "agent", "started", "completed", "interrupted", "rolled back", "failed"),
    *("paused", "resumed", "asked", "confirmed", "rejected", "stuck", "nonsense"),
)


def _after(*names: str) -> AgentExecutionStatus:
    fold = StatusFold()
    for name in names:
        fold = fold.fold(_event(name))
    return fold.status


@pytest.mark.parametrize(
    ("names", "status"),
    [
        ([], S.IDLE),
        (["user"], S.IDLE),
        (["user", "started"], S.RUNNING),
        (["started", "user"], S.RUNNING),
        (["started", "completed"], S.FINISHED),
        (["started", "interrupted"], S.IDLE),
        (["started", "rolled back"], S.IDLE),
        (["started", "failed"], S.ERROR),
        (["started", "stuck"], S.STUCK),
        (["started", "stuck", "failed"], S.STUCK),
        (["started", "stuck", "completed", "user"], S.IDLE),
        (["started", "paused"], S.PAUSED),
        (["started", "paused", "paused", "resumed"], S.RUNNING),
        (["started", "paused", "user", "agent"], S.PAUSED),
        (["started", "paused", "interrupted"], S.IDLE),
        (["started", "paused", "interrupted", "started"], S.RUNNING),
        (["started", "asked"], S.WAITING_FOR_CONFIRMATION),
        (["started", "asked", "confirmed"], S.RUNNING),
        (["started", "asked", "rejected"], S.RUNNING),
        (["started", "asked", "paused", "resumed"], S.WAITING_FOR_CONFIRMATION),
        (["started", "asked", "paused", "confirmed"], S.PAUSED),
        (["started", "asked", "paused", "confirmed", "resumed"], S.RUNNING),
        (["started", "asked", "interrupted"], S.IDLE),
        (["paused", "resumed"], S.IDLE),
        (["started", "completed", "paused", "resumed"], S.IDLE),
        (["resumed"], S.IDLE),
        (["started", "nonsense"], S.RUNNING),
        (["stuck"], S.IDLE),
    ],
)
def test_the_status_follows_the_log(names: list[str], status: AgentExecutionStatus) -> None:
    assert _after(*names) == status


@pytest.mark.parametrize("end", ["completed", "failed", "stuck"])
def test_a_user_message_leads_from_every_rest_through_idle_to_running(end: str) -> None:
    assert _after("started", end) in (S.FINISHED, S.ERROR, S.STUCK)
    assert _after("started", end, "user") == S.IDLE
    assert _after("started", end, "user", "started") == S.RUNNING
    assert _after("started", end, "started") == S.RUNNING


@given(st.lists(st.sampled_from(_NAMES), max_size=30))
def test_no_event_leads_to_a_status_that_the_table_does_not_lead_to(names: list[str]) -> None:
    fold = StatusFold()
    for name in names:
        before, fold = fold, fold.fold(_event(name))
        direct = {before.status, *TRANSITIONS[before.status]}
        through_idle = set(TRANSITIONS[S.IDLE]) if S.IDLE in direct else set()
        assert fold.status in direct | through_idle, (before, name, fold)
        assert fold.resumes_as is not S.PAUSED


def test_every_status_is_in_the_table_and_can_be_left_and_reached() -> None:
    assert set(TRANSITIONS) == set(AgentExecutionStatus)
    assert all(TRANSITIONS.values())
    assert {to for row in TRANSITIONS.values() for to in row} == set(AgentExecutionStatus)


def _diagram() -> str:
    """The table as the docs draw it."""
    lines = ["stateDiagram-v2", "    [*] --> IDLE"]
    for status, row in TRANSITIONS.items():
        lines += [f"    {status} --> {to}: {why}" for to, why in row.items()]
    return "\n".join(lines)


def test_the_diagram_in_the_docs_is_the_table() -> None:
    page = Path(__file__).parents[3] / "docs" / "conversation-core.md"
    text = page.read_text(encoding="utf-8")
    drawn = text.split("```mermaid\n")[1].split("\n```")[0]
    assert drawn == _diagram(), f"write this into {page.name}:\n{_diagram()}"
