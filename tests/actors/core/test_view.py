"""The view: folding, snapshots, manipulation indices."""

from __future__ import annotations

import gc
import sys

import pytest

from tests.actors.core.laws import verify_view
from tests.actors.core.logs import Maker
from turnkeeper.actors.core.properties import runs
from turnkeeper.actors.core.view import View, ViewFold
from turnkeeper.actors.events import Event, LLMConvertibleEvent
from turnkeeper.actors.models.messages import to_llm_messages


def _fold(*events: Event) -> ViewFold:
    fold = ViewFold()
    for event in events:
        fold.fold(event)
    return fold


def _ids(view: View) -> list[str]:
    return [event.id for event in view]


def test_what_the_model_sees_is_appended_and_anything_else_changes_nothing() -> None:
    make = Maker()
    fold = _fold(make.system(), make.user(), make.unknown(), make.agent())

    assert _ids(fold.snapshot()) == ["e1", "e2", "e4"]


def test_a_request_is_unhandled_until_the_next_condensation() -> None:
    make = Maker()
    fold = _fold(make.user(), make.request())
    assert fold.snapshot().unhandled_condensation_request
    assert _ids(fold.snapshot()) == ["e1"]

    fold.fold(make.condense())
    assert not fold.snapshot().unhandled_condensation_request


def test_a_condensation_forgets_and_puts_its_summary_at_the_offset_of_what_is_left() -> None:
    make = Maker()
    events = [make.system(), *(make.user(f"u{n}") for n in range(4))]
    fold = _fold(*events, make.condense(*events[1:3], summary="so far", offset=1))

    view = fold.snapshot()
    assert _ids(view) == ["e1", "e6-summary", "e4", "e5"]
    assert view[1].kind == "condensation_summary"
    assert view[1].to_llm_message() == {"role": "user", "content": "so far"}


def test_an_offset_past_the_end_means_the_end() -> None:
    make = Maker()
    first = make.user()
    fold = _fold(first, make.user(), make.condense(first, summary="s", offset=99))
    assert _ids(fold.snapshot()) == ["e2", "e3-summary"]


@pytest.mark.parametrize(("summary", "offset"), [(None, 0), ("s", None), (None, None)])
def test_without_both_a_summary_and_an_offset_nothing_is_put_in(
    summary: str | None, offset: int | None
) -> None:
    make = Maker()
    first = make.user()
    fold = _fold(first, make.user(), make.condense(first, summary=summary, offset=offset))
    assert _ids(fold.snapshot()) == ["e2"]


def test_a_later_condensation_can_forget_the_summary_of_an_earlier_one() -> None:
    make = Maker()
    a, b, c = make.user(), make.user(), make.user()
    first = make.condense(a, summary="one", offset=0)
    second = make.condense("e4-summary", b, summary="two", offset=0)
    log = [a, b, c, first, second]

    assert _ids(_fold(*log).snapshot()) == ["e5-summary", "e3"]
    assert verify_view(log, _fold(*log).snapshot()) is None


def test_a_retraction_takes_events_out_and_leaves_the_request_open() -> None:
    make = Maker()
    kept, gone = make.user(), make.user()
    fold = _fold(kept, gone, make.request(), make.retract(gone))
    assert _ids(fold.snapshot()) == ["e1"]
    assert fold.snapshot().unhandled_condensation_request


def test_a_snapshot_never_changes_whatever_is_folded_after_it() -> None:
    make = Maker()
    fold = _fold(make.user(), make.action("c1"))
    taken = fold.snapshot()
    before = (list(taken), list(taken.manipulation_indices), taken.has_open_calls)

    late = [
        make.result("c1"),
        make.request(),
        make.user(),
        make.condense("e1", summary="s", offset=0),
    ]
    for event in late:
        fold.fold(event)

    assert (list(taken), list(taken.manipulation_indices), taken.has_open_calls) == before
    assert not taken.unhandled_condensation_request
    assert taken == _fold(*before[0]).snapshot()


def test_a_view_reads_as_any_sequence() -> None:
    make = Maker()
    events = [make.user(), make.agent(), make.user()]
    fold = _fold(*events)
    view = fold.snapshot()
    fold.fold(make.agent())

    assert len(view) == 3
    assert view[0] is events[0]
    assert view[-1] is events[2]
    assert list(view[1:]) == events[1:]
    assert list(view[::-1]) == events[::-1]
    assert list(reversed(view)) == events[::-1]
    assert events[1] in view
    for beyond in (3, -4):
        with pytest.raises(IndexError):
            view[beyond]
    assert view != fold.snapshot()
    assert view != events


def test_a_snapshot_of_a_large_view_costs_what_one_of_a_small_view_does() -> None:
    """Counted in bytes: a copy of the list would show, a clock would not be needed."""
    make = Maker()
    fold = _fold(make.user())
    small = fold.snapshot()
    for _ in range(10_000):
        fold.fold(make.user())
    large = fold.snapshot()

    assert sys.getsizeof(large) == sys.getsizeof(small)
    assert large._shared is fold.snapshot()._shared
    assert large.manipulation_indices._settled is fold.snapshot().manipulation_indices._settled


def test_folding_costs_the_same_at_any_length() -> None:
    """Counted in calls that Python makes: the ten-thousandth append makes as many as the tenth."""
    make = Maker()
    fold = ViewFold()

    def calls_of_one_exchange() -> int:
        count = 0

        def trace(frame: object, kind: str, argument: object) -> None:
            nonlocal count
            count += 1

        exchange = [
            make.user(),
            make.action(f"c{len(fold.events)}", f"r{len(fold.events)}", thinking=True),
            make.result(f"c{len(fold.events)}"),
            make.agent(),
        ]
        gc.disable()  # a finalizer of anything else would be counted
        sys.setprofile(trace)
        try:
            for event in exchange:
                fold.fold(event)
            view = fold.snapshot()
            view.find_next(len(view))
            to_llm_messages(view)
            to_llm_messages(view, "anthropic")
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    calls_of_one_exchange()
    early = calls_of_one_exchange()
    for _ in range(2_000):
        calls_of_one_exchange()

    assert calls_of_one_exchange() == early


def test_the_hot_path_runs_no_enforcement() -> None:
    make = Maker()
    before = runs.total
    fold = ViewFold()
    events: list[Event] = []
    for n in range(50):
        for event in (make.user(), make.action(f"c{n}", f"r{n}"), make.result(f"c{n}")):
            events.append(event)
            fold.fold(event)
        fold.snapshot()
    condensation = make.condense(*events[3:9], summary="s", offset=3)
    fold.fold(condensation)
    assert verify_view([*events, condensation], fold.snapshot()) is None

    assert runs.total == before
    View.from_events(events)
    assert runs.total == before + 1


# --- manipulation indices -------------------------------------------------------------------------


def _indices(*events: LLMConvertibleEvent) -> list[int]:
    return list(_fold(*events).snapshot().manipulation_indices)


def test_between_messages_history_may_be_cut_anywhere() -> None:
    make = Maker()
    assert _indices() == [0]
    assert _indices(make.user(), make.agent(), make.user()) == [0, 1, 2, 3]


def test_no_cut_between_a_call_and_its_result_nor_after_a_call_that_waits() -> None:
    make = Maker()
    assert _indices(make.user(), make.action("c1"), make.result("c1")) == [0, 1, 3]
    assert _indices(make.user(), make.action("c1")) == [0, 1]


def test_no_cut_between_the_calls_of_one_response() -> None:
    make = Maker()
    calls = [make.action("c1"), make.action("c2")]
    assert _indices(*calls, make.result("c2"), make.result("c1"), make.user()) == [0, 4, 5]


def test_a_cut_between_the_responses_of_one_turn_is_fine_without_thinking() -> None:
    make = Maker()
    first = [make.action("c1", "r1"), make.result("c1")]
    second = [make.action("c2", "r2"), make.result("c2")]
    assert _indices(*first, *second) == [0, 2, 4]


def test_no_cut_inside_a_tool_loop_and_one_before_each_new_loop() -> None:
    make = Maker()
    loop = [make.action("c1", "r1", thinking=True), make.result("c1")]
    continued = [make.action("c2", "r2"), make.result("c2")]
    next_loop = [make.action("c3", "r3", thinking=True), make.result("c3")]
    assert _indices(*loop, *continued, *next_loop, make.agent()) == [0, 4, 6, 7]


def test_a_summary_ends_a_tool_loop_in_the_view() -> None:
    make = Maker()
    loop = [make.action("c1", "r1", thinking=True), make.result("c1")]
    user = make.user()
    fold = _fold(*loop, user, make.condense(user, summary="s", offset=2), make.action("c2", "r2"))
    assert list(fold.snapshot().manipulation_indices) == [0, 2, 3]


def test_a_malformed_view_yields_indices_and_no_error() -> None:
    make = Maker()
    assert _indices(make.result("c1"), make.user(), make.action("c1")) == [0, 3]
    assert _indices(make.result("c9"), make.result("c9")) == [0, 1, 2]
    assert _indices(make.action("c1"), make.user(), make.result("c1")) == [0, 3]
    assert _indices(make.action("c1", "r1"), make.action("c2", "r2"), make.result("c1")) == [0]


def test_the_next_index_is_found_or_there_is_none() -> None:
    make = Maker()
    view = _fold(
        make.user(), make.action("c1"), make.result("c1"), make.action("c2", "r2")
    ).snapshot()
    assert [view.find_next(n) for n in range(6)] == [0, 1, 3, 3, None, None]
    assert 1 in view.manipulation_indices
    assert 2 not in view.manipulation_indices
    assert view.manipulation_indices[-1] == 3
    assert list(view.manipulation_indices[1:]) == [1, 3]
    with pytest.raises(IndexError):
        view.manipulation_indices[3]


# --- verification ---------------------------------------------------------------------------------


def test_verification_says_how_a_view_differs_from_its_rebuild() -> None:
    make = Maker()
    a, b = make.user(), make.user()

    assert verify_view([a, b], _fold(a, b).snapshot()) is None
    assert "event e2" in str(verify_view([a], _fold(b).snapshot()))
    assert "1 events" in str(verify_view([a, b], _fold(a).snapshot()))
    assert "request is False" in str(verify_view([a, make.request()], _fold(a).snapshot()))
    orphan = make.result("c1")
    assert f"remove {orphan.id}" in str(verify_view([orphan], _fold(orphan).snapshot()))


def test_a_load_does_not_keep_a_call_whose_result_was_retracted() -> None:
    """It has had its result, so no other will come, and no request could be made with it."""
    make = Maker()
    user, call = make.user(), make.action("c1", response_id="r1")
    result = make.result("c1")

    assert _ids(View.from_events([user, call, result, make.retract(result)])) == [user.id]


def test_a_load_does_not_keep_a_call_that_a_new_system_prompt_has_followed() -> None:
    """As after any other event. Found in a simulated log of another origin."""
    make = Maker()
    log = [make.user(), make.action("c1", response_id="r1"), make.system(goes_first=True)]

    view = View.from_events(log)

    assert _ids(view) == ["e3", "e1"]
    assert not view.has_open_calls


def test_no_call_is_pending_once_another_response_has_followed() -> None:
    make = Maker()
    first = make.action("c1", response_id="r1")
    other = make.action("c2", response_id="r2")
    late = make.action("c3", response_id="r1")

    assert _ids(View.from_events([first, other, late])) == []


def test_a_summary_in_the_middle_of_a_tool_loop_does_not_make_two_of_it() -> None:
    """Only a log from elsewhere has one there. Of the loop the view has all, or nothing."""
    make = Maker()
    user = make.user()
    begun = [make.action("c1", "r1", thinking=True), make.result("c1")]
    goes_on = [make.action("c2", "r2"), make.result("c2")]
    answer = make.agent()
    summary = make.condense(user, summary="s", offset=2)
    log = [user, *begun, *goes_on, answer, summary]

    assert _ids(View.from_events(log)) == ["e2", "e3", "e7-summary", "e4", "e5", answer.id]
    assert _ids(View.from_events([*log, make.condense(*begun)])) == ["e7-summary", answer.id]
