"""The pure rules of turns, under any sequence of commands: the laws of `turn_laws` hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.actors.core import turn_laws
from tests.actors.core.logs import Maker
from tests.actors.core.turn_laws import Move, Turns
from tests.drawn import examples
from turnkeeper.actors.core import turn_rules
from turnkeeper.actors.core.commands import (
    Append,
    BeginStep,
    OnOverlap,
    Propose,
    Retract,
    Send,
    Stream,
    TurnAppend,
)
from turnkeeper.actors.core.condensation import Proposal
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.core.turn_table import TurnTable
from turnkeeper.actors.core.working_state import ConversationSettings
from turnkeeper.actors.events import (
    RESULT_CLASSES,
    ActionEvent,
    AgentMessageEvent,
    Event,
    MessageQueuedEvent,
    ObservationEvent,
    RetractionEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    UserRejectEvent,
)


@pytest.mark.sweep
@settings(max_examples=examples(400))
@given(chosen=turn_laws.conversation_settings, moves=turn_laws.moves)
def test_whatever_is_sent_said_and_held_the_laws_of_turns_hold(
    chosen: ConversationSettings, moves: list[Move]
) -> None:
    Turns(chosen).play(moves)


@pytest.mark.sweep
@settings(max_examples=examples(200))
@given(chosen=turn_laws.conversation_settings, moves=turn_laws.moves)
def test_the_laws_hold_while_somebody_appends_calls_and_results_by_hand(
    chosen: ConversationSettings, moves: list[Move]
) -> None:
    Turns(chosen, by_hand=True).play(moves)


def test_each_part_that_the_events_of_a_chat_message_share_is_passed_on() -> None:
    """A part that `_parts` leaves out is lost once the message has waited."""
    shared = UserMessageEvent.model_fields.keys() & MessageQueuedEvent.model_fields.keys()
    of_the_event = {*Event.model_fields, "kind", "message_id"}

    assert turn_rules._Parts.__annotations__.keys() == shared - of_the_event


def _after(moves: list[Move], **chosen: Any) -> Turns:  # noqa: ANN401 - the settings' own fields
    turns = Turns(ConversationSettings(**chosen))
    turns.play(moves)
    return turns


ASKS: Move = ("agent", 3)
REJECT: Move = ("confirm", 1)
CONFIRM: Move = ("confirm", 0)
CRASH: Move = ("crash", 1)
CRASH_INTO_ANOTHER_AGENT: Move = ("crash", 0)
SEND: Move = ("send", 1)


@pytest.mark.parametrize("answer", [CONFIRM, REJECT])
def test_a_confirmation_for_a_turn_whose_agent_cannot_go_on_answers_each_call_once(
    answer: Move,
) -> None:
    turns = _after([SEND, ASKS, CRASH_INTO_ANOTHER_AGENT, answer], is_resumable=True)

    rejected = [event for event in turns.events if isinstance(event, UserRejectEvent)]
    assert len(rejected) == 1
    assert isinstance(turns.events[-1], TurnEndedEvent)
    assert turns.events[-1].outcome == "interrupted"


@pytest.mark.parametrize("answer", [CONFIRM, REJECT])
def test_a_call_that_was_answered_by_hand_while_it_waited_is_not_answered_again(
    answer: Move,
) -> None:
    turns = Turns(ConversationSettings(is_resumable=True), by_hand=True)

    turns.play([SEND, ASKS, ("by hand", 0), answer])

    assert sum(isinstance(event, RESULT_CLASSES) for event in turns.events) == 1
    assert turns.runs[-1].unstarted == set()


@pytest.mark.parametrize("said", range(5), ids=["event", "piece", "step", "end", "repair"])
def test_an_agent_of_an_earlier_owner_says_nothing_in_the_turn_that_another_goes_on_with(
    said: int,
) -> None:
    """Its owner was started again, and it swallows its cancellation: the turn is the same one."""
    turns = _after([SEND, CRASH, ("late", said)], is_resumable=True, unfinished="resume")

    running = turns.working.state.turns.running
    assert running is not None
    assert [(run.turn_id, run.epoch) for run in turns.runs] == [
        (running.turn_id, 1),
        (running.turn_id, 2),
    ]
    assert not any(isinstance(event, AgentMessageEvent) for event in turns.events)


def test_an_owner_keeps_no_more_of_the_newest_events_in_memory_than_its_limit() -> None:
    kept_max = 3
    turns = Turns(ConversationSettings())
    turns.working.state = Folded(limits=Limits(recent_events_max=kept_max))

    for n in range(kept_max + 2):
        turns.do(Append(UserMessageEvent(**turns.stamp(None), content=str(n))))

    assert list(turns.working.recent.values()) == turns.events[-kept_max:]


def test_a_message_that_joins_a_turn_of_very_many_keeps_the_seq_of_its_first_event() -> None:
    """Also past the bound of what the table knows: it may have to wait again."""
    make = Maker()
    known_max = 20
    table = TurnTable()
    table.fold(TurnStartedEvent(**make.stamp(), turn_id="t"), 1, known_max=known_max)
    joined = known_max + 3
    for n in range(joined):
        queued = MessageQueuedEvent(
            **make.stamp(), turn_id=f"t{n}", message_id=f"m{n}", content="x", steers="t"
        )
        table.fold(queued, 2 * n + 2, known_max=known_max)
        message = make.user("x", turn_id="t", message_id=f"m{n}", queued_event_id=queued.id)
        table.fold(message, 2 * n + 3, known_max=known_max)

    found = [table.find(f"m{n}") for n in range(joined)]

    assert [known and known.seq for known in found] == [2 * n + 2 for n in range(joined)]


def test_no_chat_message_joins_a_turn_between_a_call_and_its_result() -> None:
    """An agent may begin a step while a tool runs; the message joins at the step after that."""
    turns = Turns(ConversationSettings())
    turns.do(Send("A", "A"))
    run = turns.runs[-1]
    step = BeginStep(run.turn_id, run.epoch)
    call = ActionEvent(
        **turns.stamp(run.turn_id), tool_call_id="call", tool_name="look", llm_response_id="r"
    )
    turns.do(TurnAppend(run.turn_id, run.epoch, (call,)), run)
    turns.do(Send("B", "B", on_overlap="steer"))

    assert turns.do(step, run) is True
    assert list(turns.working.state.turns.queued) == ["B"]

    result = ObservationEvent(**turns.stamp(run.turn_id), tool_call_id="call", content="seen")
    turns.do(TurnAppend(run.turn_id, run.epoch, (result,)), run)
    assert turns.do(step, run) is True
    assert [type(event) for event in turns.working.state.view] == [
        UserMessageEvent,
        ActionEvent,
        ObservationEvent,
        UserMessageEvent,
    ]


@pytest.mark.parametrize("on_overlap", ["interrupt", "rollback"])
def test_the_pieces_of_an_interrupted_answer_are_not_kept_with_the_next_turn(
    on_overlap: OnOverlap,
) -> None:
    turns = Turns(ConversationSettings())
    turns.do(Send("A", "A"))
    run = turns.runs[-1]
    turns.do(Stream(run.turn_id, run.epoch, "of A", is_first=True), run)
    turns.do(Send("B", "B", on_overlap=on_overlap))
    run = turns.runs[-1]
    turns.do(Stream(run.turn_id, run.epoch, "of B"), run)
    turns.do(Send("C", "C", on_overlap="interrupt"))

    kept = [event.content for event in turns.events if isinstance(event, AgentMessageEvent)]
    assert kept == ["of A", "of B"]


def test_a_proposal_is_judged_by_the_view_that_there_is_when_it_comes() -> None:
    """Its condenser is slow: the user has taken back meanwhile what its summary may speak of."""
    turns = Turns(ConversationSettings())
    for text in ("A", "B", "C"):
        turns.do(Append(UserMessageEvent(**turns.stamp(None), content=text)))
    shown = turns.working.state.view
    turns.do(Retract((shown[2].id,)))

    proposal = Proposal((shown[0].id, shown[1].id), "of A, B and C")

    assert turns.do(Propose(1, proposal, shown)) is False
    assert [type(event) for event in turns.events[3:]] == [RetractionEvent]
    assert turns.do(Propose(1, proposal, turns.working.state.view)) is True
