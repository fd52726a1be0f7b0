"""Admission: what may follow the log as it stands, and what becomes of what may not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.actors.core.logs import Maker
from turnkeeper.actors.core.admission import (
    AdmissionRefused,
    Appended,
    Duplicate,
    Rejected,
    Violation,
)
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.errors import EventIdConflict, MessageIdConflict
from turnkeeper.actors.events import (
    ActionEvent,
    CondensationSummaryEvent,
    Event,
    MessageQueuedEvent,
    UserMessageEvent,
    decode_event,
    encode_event,
)
from turnkeeper.actors.journals.sqlite.state import ConversationState
from turnkeeper.runtime import Refused

Reopen = Callable[[ConversationState], ConversationState]


def _as_it_is(state: ConversationState) -> ConversationState:
    return state


def _from_its_log(state: ConversationState) -> ConversationState:
    """A restart: the state is made again from what was written."""
    reopened = ConversationState()
    for event in state.events:
        reopened.append_event(decode_event(encode_event(event)))
    assert reopened == state
    return reopened


_PATTERNS: dict[str, tuple[Callable[[Maker], Sequence[Event]], Sequence[str | None]]] = {
    "a01": (
        lambda m: [m.system(), m.user(), m.action("1"), m.user()],
        [None, None, None, "interleaved_message"],
    ),
    "a02": (
        lambda m: [m.system(), m.user(), m.agent(), m.result("9")],
        [None, None, None, "unmatched_tool_result"],
    ),
    "a03": (
        lambda m: [m.system(), m.user(), m.action("1"), m.user(), m.result("1")],
        [None, None, None, "interleaved_message", None],
    ),
    "a04": (
        lambda m: [m.system(), m.user(), m.action("1"), m.agent(), m.result("1")],
        [None, None, None, "interleaved_message", None],
    ),
    "a05": (
        lambda m: [
            *(m.system(), m.user(), m.action("1"), m.result("1")),
            *(m.user(), m.agent(), m.user(), m.result("1")),
        ],
        [*[None] * 7, "duplicate_tool_result"],
    ),
    "a06": (
        lambda m: [
            *(m.system(), m.user(), m.action("1", "r1"), m.result("1")),
            *(m.action("2", "r2"), m.result("1")),
        ],
        [*[None] * 5, "duplicate_tool_result"],
    ),
    "a07": (
        lambda m: [
            *(m.system(), m.user(), m.action("1"), m.action("2"), m.action("3")),
            *(m.result("1"), m.result("2"), m.user()),
        ],
        [*[None] * 7, "interleaved_message"],
    ),
    "a08": (
        lambda m: [
            *(m.system(), m.user(), m.result("1"), m.result("2")),
            *(m.action("1"), m.action("2")),
        ],
        [None, None, "unmatched_tool_result", "unmatched_tool_result", None, None],
    ),
}


@pytest.mark.parametrize("reopen", [_as_it_is, _from_its_log])
@pytest.mark.parametrize("pattern", _PATTERNS)
def test_each_malformed_pattern_is_refused_at_the_event_that_breaks_it(
    pattern: str, reopen: Reopen
) -> None:
    make_events, expected = _PATTERNS[pattern]
    state = ConversationState()

    for event, violation in zip(make_events(Maker()), expected, strict=True):
        state = reopen(state)
        before = state._folded.to_snapshot()
        outcome = state.append_event(event, raises=False)
        if violation is None:
            assert outcome == Appended(state.seq)
        else:
            assert isinstance(outcome, Rejected)
            assert outcome.violation.name == violation
            assert outcome.violation.event is event
            assert state._folded.to_snapshot() == before, "a rejection moved a fold"


def _state(*events: Event) -> ConversationState:
    state = ConversationState()
    for event in events:
        state.append_event(event)
    return state


def _violation(state: ConversationState, *events: Event) -> str | None:
    return _violation_of(state._folded, *events)


def _violation_of(folded: Folded, *events: Event) -> str | None:
    violation = folded.admission.check(events)
    return None if violation is None else violation.name


def test_a_response_may_not_come_while_calls_of_another_are_open() -> None:
    make = Maker()
    state = _state(make.user(), make.action("1", "r1"))
    assert _violation(state, make.action("2", "r2")) == "interleaved_response"
    assert _violation(state, make.action("2", "r1")) is None


def test_a_response_is_complete_once_anything_else_has_come() -> None:
    make = Maker()
    state = _state(make.user(), make.action("1", "r1"), make.action("2", "r1"), make.result("1"))
    assert _violation(state, make.action("3", "r1")) == "interleaved_response"
    state.append_event(make.result("2"))
    assert _violation(state, make.action("3", "r1")) == "interleaved_response"
    state.append_event(make.user())
    assert _violation(state, make.action("3", "r1")) == "interleaved_response"


def test_what_the_model_does_not_see_may_come_between_the_calls_of_a_response() -> None:
    make = Maker()
    state = _state(make.action("1", "r1"), make.unknown(), make.request())
    assert _violation(state, make.action("2", "r1")) is None


def test_a_call_id_is_used_once() -> None:
    make = Maker()
    state = _state(make.action("1", "r1"))
    assert _violation(state, make.action("1", "r1")) == "duplicate_tool_call"
    state.append_event(make.result("1"))
    assert _violation(state, make.action("1", "r2")) == "duplicate_tool_call"
    state.append_event(make.condense("e1", "e3"))
    assert _violation(state, make.action("1", "r2")) == "duplicate_tool_call"
    assert _violation(state, make.result("1")) == "duplicate_tool_result"


def test_a_response_that_has_left_the_view_gets_no_further_calls() -> None:
    """Its calls would stand in the view without those that were forgotten or taken back."""
    make = Maker()
    state = _state(make.user(), make.action("1", "r1"), make.result("1"))
    state.append_event(make.condense("e2", "e3"))
    state.append_event(make.action("2", "r2"))
    state.append_event(make.result("2"))
    state.append_event(make.retract("e5", "e6"))
    reopened = Folded.from_snapshot(state._folded.to_snapshot())
    assert reopened is not None

    for folded in (state._folded, reopened, _from_its_log(state)._folded):
        assert _violation_of(folded, make.action("3", "r1")) == "interleaved_response"
        assert _violation_of(folded, make.action("3", "r2")) == "interleaved_response"
        assert _violation_of(folded, make.action("3", "r3")) is None


def test_the_events_of_one_command_see_each_other() -> None:
    make = Maker()
    state = _state(make.user())
    response = [make.action("1", "r1"), make.action("2", "r1")]

    assert _violation(state, *response, make.result("2"), make.result("1"), make.user()) is None
    assert _violation(state, *response, make.result("2"), make.user()) == "interleaved_message"
    assert _violation(state, *response, make.action("1", "r1")) == "duplicate_tool_call"
    assert _violation(state, make.action("1"), make.result("1"), make.result("1")) == (
        "duplicate_tool_result"
    )
    late = [make.action("1", "r1"), make.result("1"), make.action("2", "r1")]
    assert _violation(state, *late) == "interleaved_response"
    user = make.user()
    assert _violation(state, user, make.retract(user)) is None
    assert _violation(state, make.action("9"), make.condense("e1", summary="s", offset=1)) == (
        "illegal_condensation"
    )
    assert state.seq == 1


def test_a_summary_is_never_in_a_log() -> None:
    assert _violation(_state(), CondensationSummaryEvent(content="s")) == "summary_in_log"


def test_a_condensation_that_would_split_a_call_from_its_result_is_refused() -> None:
    make = Maker()
    state = _state(make.user(), make.action("1"), make.result("1"), make.agent())
    for forgotten in (["e2"], ["e3"], ["e1", "e2"], ["e3", "e4"]):
        assert _violation(state, make.condense(*forgotten)) == "illegal_condensation"
    assert _violation(state, make.condense("e2", "e3", summary="s", offset=1)) is None
    assert _violation(state, make.condense("e2", "e3", summary="s", offset=0)) is None
    assert _violation(state, make.condense("e1", summary="s", offset=1)) == "illegal_condensation"


def test_an_open_call_is_not_forgotten_and_no_summary_comes_behind_it() -> None:
    make = Maker()
    state = _state(make.user(), make.user(), make.action("1"))
    assert _violation(state, make.condense("e3")) == "illegal_condensation"
    assert _violation(state, make.condense("e1", summary="s", offset=9)) == "illegal_condensation"
    assert _violation(state, make.condense("e1", summary="s", offset=0)) is None


def test_an_open_tool_loop_may_be_forgotten_whole_but_not_be_cut_off_by_a_summary() -> None:
    make = Maker()
    loop = [make.action("1", thinking=True), make.result("1")]
    state = _state(make.user(), *loop)
    assert _violation(state, make.condense("e1", summary="s", offset=9)) == "illegal_condensation"
    assert _violation(state, make.condense(*loop, summary="s", offset=1)) is None


def test_a_condensation_may_name_what_has_left_the_view_already() -> None:
    """So does the repair of a log from elsewhere, whose view was enforced before it."""
    state = _state(Maker().user())
    assert _violation(state, Maker("x").condense("nowhere", "e1")) is None


def test_a_retraction_takes_whole_things_that_are_in_the_view_with_no_call_open() -> None:
    make = Maker()
    state = _state(
        make.user(), make.action("1"), make.result("1"), make.user(), make.agent(), make.user()
    )
    state.append_event(make.condense("e4", "e5", summary="s", offset=3))
    assert _violation(state, make.retract("e2", "e3")) is None
    assert _violation(state, make.retract("e2")) == "illegal_retraction"
    assert _violation(state, make.retract("e4")) == "illegal_retraction"
    assert _violation(state, make.retract("e7-summary")) == "illegal_retraction"
    state.append_event(make.action("2", "r2"))
    assert _violation(state, make.retract("e1")) == "illegal_retraction"


def test_a_rejection_raises_unless_it_is_asked_for_as_a_value() -> None:
    make = Maker()
    state = _state(make.user())
    result = make.result("9")

    with pytest.raises(AdmissionRefused) as caught:
        state.append_event(result)

    assert isinstance(caught.value, Refused)
    assert caught.value.violation.name == "unmatched_tool_result"
    assert caught.value.violation.event_id == result.id
    assert "nothing was written" in str(caught.value)
    assert isinstance(state.append_event(result, raises=False), Rejected)
    assert list(state.events) == [state.events[0]]


def test_an_event_that_is_in_the_log_is_a_duplicate_and_with_other_content_an_error() -> None:
    make = Maker()
    state = _state(make.user("once"), make.agent())
    again = Maker().user("once")

    assert state.append_event(again) == Duplicate(1)
    with pytest.raises(EventIdConflict) as caught:
        state.append_event(Maker().user("otherwise"))
    assert caught.value.seqs == {"e1": 1}
    assert state.seq == 2


def test_a_result_that_is_sent_again_under_its_id_is_a_duplicate_and_no_violation() -> None:
    make = Maker()
    result = make.result("1")
    state = _state(make.action("1"), result)
    assert state.append_event(result) == Duplicate(2)


def test_a_message_id_is_used_once() -> None:
    make = Maker()
    queued = MessageQueuedEvent(**make.stamp(), message_id="m1", content="x")
    state = _state(queued, make.user("x", message_id="m1", queued_event_id=queued.id))
    with pytest.raises(MessageIdConflict):
        state.append_event(make.user("y", message_id="m1"))
    assert state.seq == 2


def test_a_check_that_raises_refuses_and_says_that_it_was_the_check() -> None:
    """Made past validation: an action without a call id, which the check trips over."""
    event = ActionEvent.model_construct(kind="action", id="e1", llm_response_id="r1")
    violation = _state()._folded.admission.check((event,))

    assert violation is not None
    assert violation.name == "check_failed"
    assert violation.reason == "the check itself raised AttributeError"


def test_a_violation_names_ids_and_never_what_was_said() -> None:
    make = Maker()
    state = _state(make.action("1"))
    violation = state._folded.admission.check((make.user("my password"),))
    assert violation is not None
    assert "password" not in violation.reason
    assert "1" in violation.reason


def test_observing_lets_everything_in_and_keeps_what_it_would_have_refused() -> None:
    make = Maker()
    state = ConversationState(admission="observe")
    log: list[Event] = [make.user(), make.result("9"), make.action("1"), make.user()]
    for event in log:
        state.append_event(event)

    assert state.seq == 4
    assert [(v.name, v.event_id) for v in state.violations] == [
        ("unmatched_tool_result", "e2"),
        ("interleaved_message", "e4"),
    ]


def test_the_memory_of_finished_calls_is_bounded_and_a_forgotten_call_does_no_harm() -> None:
    make = Maker()
    state = Folded(limits=Limits(finished_calls_max=2))
    log: list[Event] = []

    def append(event: Event) -> None:
        log.append(event)
        assert state.admission.check((event,)) is None
        state.fold(event)

    for n in range(5):
        append(make.action(f"c{n}", f"r{n}"))
        append(make.result(f"c{n}"))
        append(make.condense(*state.view))

    assert state.admission.calls_left == ("c3", "c4")
    assert _violation_of(state, make.result("c4")) == "duplicate_tool_result"
    assert _violation_of(state, make.result("c0")) == "unmatched_tool_result"
    assert _violation_of(state, make.action("c4", "r9")) == "duplicate_tool_call"
    append(make.action("c0", "r0"))
    append(make.result("c0"))
    replayed, removed = Folded.from_events(log, limits=state.limits)
    assert removed == ()
    assert replayed == state


def test_a_violation_is_a_value() -> None:
    event = UserMessageEvent(content="x")
    one = Violation("interleaved_message", event, "open calls: 1")
    assert one == Violation("interleaved_message", event, "open calls: 1")
    assert Rejected(one) == Rejected(one)
