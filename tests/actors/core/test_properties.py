"""Enforcement: what has to leave the view of a log from elsewhere, and what must stay."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest

from tests.actors.core import oracles
from tests.actors.core.logs import Maker
from turnkeeper.actors.core.properties import runs
from turnkeeper.actors.core.state import ColdLoad, Folded
from turnkeeper.actors.core.view import View, ViewFold
from turnkeeper.actors.events import CondensationEvent, Event, LLMConvertibleEvent


def _kept(*log: Event) -> list[str]:
    view = View.from_events(log)
    assert list(view) == oracles.enforce(log)
    return [event.id for event in view]


# --- each property alone --------------------------------------------------------------------------


def test_of_several_results_of_one_call_only_the_first_stays() -> None:
    make = Maker()
    log = [make.user(), make.action("c1"), make.result("c1"), make.error("c1"), make.reject("c1")]
    assert _kept(*log) == ["e1", "e2", "e3"]


def test_of_several_actions_with_one_call_id_the_one_that_the_result_answers_stays() -> None:
    """Recorded conversations use ids again; a request with one id twice is refused as a whole."""
    make = Maker()
    log = [make.action("c1", "r1"), make.user(), make.action("c1", "r2"), make.result("c1")]
    assert _kept(*log) == ["e2", "e3", "e4"]
    make = Maker()
    log = [make.action("c1", "r1"), make.result("c1"), make.user(), make.action("c1", "r2")]
    assert _kept(*log) == ["e1", "e2", "e3"]


def test_when_a_call_of_a_response_is_missing_the_rest_of_the_response_goes() -> None:
    make = Maker()
    calls = [make.action("c1"), make.action("c2")]
    results = [make.result("c1"), make.result("c2")]
    log = [*calls, *results, make.user(), make.condense(calls[0], results[0])]
    assert _kept(*log) == ["e5"]


def test_a_response_is_whole_though_its_results_stand_between_its_calls() -> None:
    make = Maker()
    log = [make.action("c1"), make.result("c1"), make.action("c2"), make.result("c2")]
    assert _kept(*log) == ["e1", "e2", "e3", "e4"]
    assert _kept(*log, make.condense("e1", "e2")) == []


def test_a_call_without_a_result_and_a_result_without_a_call_go() -> None:
    make = Maker()
    log = [make.action("c1"), make.user(), make.result("c9"), make.agent()]
    assert _kept(*log) == ["e2", "e4"]


def test_a_tool_loop_that_is_only_partly_in_the_view_goes() -> None:
    make = Maker()
    user = make.user()
    loop = [
        make.action("c1", "r1", thinking=True),
        make.result("c1"),
        make.action("c2", "r2"),
        make.result("c2"),
    ]
    log = [user, *loop, make.agent()]
    assert _kept(*log) == ["e1", "e2", "e3", "e4", "e5", "e6"]
    assert _kept(*log, make.condense(*loop[:2])) == ["e1", "e6"]


def test_a_new_thinking_action_begins_a_loop_of_its_own() -> None:
    make = Maker()
    first = [make.action("c1", "r1", thinking=True), make.result("c1")]
    second = [make.action("c2", "r2", thinking=True), make.result("c2")]
    assert _kept(*first, *second, make.condense(*first)) == ["e3", "e4"]


def test_what_the_model_does_not_see_neither_ends_nor_continues_a_loop() -> None:
    make = Maker()
    begun = [make.action("c1", "r1", thinking=True), make.result("c1")]
    between = [make.unknown(), make.request(), make.condense()]
    continued = [make.action("c2", "r2"), make.result("c2")]
    assert _kept(*begun, *between, *continued, make.condense(*continued)) == []


def test_a_message_ends_a_loop() -> None:
    make = Maker()
    loop = [make.action("c1", "r1", thinking=True), make.result("c1")]
    after = [make.agent(), make.action("c2", "r2"), make.result("c2")]
    assert _kept(*loop, *after, make.condense(*loop)) == ["e3", "e4", "e5"]


# --- pending is not unmatched ---------------------------------------------------------------------


def test_calls_that_are_open_at_the_end_of_the_log_stay_and_their_results_join_them() -> None:
    """The systems before this one dropped the calls, kept the results, and models refused that."""
    make = Maker()
    log: list[Event] = [make.user(), make.action("c1", thinking=True), make.action("c2")]
    assert _kept(*log) == ["e1", "e2", "e3"]
    log.append(make.result("c2"))
    assert _kept(*log) == ["e1", "e2", "e3", "e4"]
    log.append(make.result("c1"))
    assert _kept(*log) == ["e1", "e2", "e3", "e4", "e5"]


@pytest.mark.parametrize(
    "ends_the_wait",
    [
        lambda make: make.user(),
        lambda make: make.agent(),
        lambda make: make.system(),
        lambda make: make.result("c9"),
    ],
)
def test_a_call_is_not_pending_once_anything_else_has_come(
    ends_the_wait: Callable[[Maker], LLMConvertibleEvent],
) -> None:
    make = Maker()
    assert "e1" not in _kept(make.action("c1"), ends_the_wait(make))


def test_what_the_model_does_not_see_leaves_a_call_pending() -> None:
    make = Maker()
    assert _kept(make.action("c1"), make.unknown(), make.request()) == ["e1"]


def test_a_call_of_another_response_ends_the_wait() -> None:
    make = Maker()
    assert _kept(make.action("c1", "r1"), make.action("c2", "r2")) == ["e2"]


# --- what has left the view is settled ------------------------------------------------------------


def test_an_open_loop_that_was_condensed_away_does_not_pull_out_what_comes_later() -> None:
    make = Maker()
    begun = [make.action("c1", "r1", thinking=True), make.result("c1")]
    reset = make.condense(*begun, summary="so far", offset=0)
    later = [make.action("c2", "r2"), make.result("c2")]
    assert _kept(*begun, reset, *later) == ["e3-summary", "e4", "e5"]


def test_a_response_id_used_again_after_it_was_forgotten_is_another_response() -> None:
    make = Maker()
    first = [make.action("c1", "r1"), make.result("c1")]
    for takes in (make.condense(*first), make.retract(*first)):
        again = [make.action("c2", "r1"), make.result("c2")]
        assert _kept(*first, takes, *again) == [event.id for event in again]


def test_a_call_id_used_again_after_it_was_forgotten_is_another_call() -> None:
    make = Maker()
    first = [make.action("c1", "r1"), make.result("c1")]
    assert _kept(*first, make.condense(*first), make.action("c1", "r2")) == ["e4"]


# --- each pair of properties ----------------------------------------------------------------------

Part = Callable[[Maker, str], Sequence[Event]]


def _breaks_uniqueness(make: Maker, name: str) -> Sequence[Event]:
    return (make.action(name, name), make.result(name), make.result(name))


def _breaks_a_batch(make: Maker, name: str) -> Sequence[Event]:
    calls = (make.action(f"{name}1", name), make.action(f"{name}2", name))
    results = (make.result(f"{name}1"), make.result(f"{name}2"))
    return (*calls, *results, make.condense(calls[0], results[0]))


def _breaks_matching(make: Maker, name: str) -> Sequence[Event]:
    return (make.action(name, name), make.user(), make.result(f"{name} unheard of"))


def _breaks_a_loop(make: Maker, name: str) -> Sequence[Event]:
    begun = (make.action(f"{name}1", f"{name}1", thinking=True), make.result(f"{name}1"))
    continued = (make.action(f"{name}2", f"{name}2"), make.result(f"{name}2"))
    return (*begun, *continued, make.condense(*continued))


_PARTS = (_breaks_uniqueness, _breaks_a_batch, _breaks_matching, _breaks_a_loop)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("parts", [*combinations(_PARTS, 2), *((part, part) for part in _PARTS)])
def test_each_pair_of_broken_properties_is_mended_in_one_go(
    parts: tuple[Part, Part], order: int
) -> None:
    make = Maker()
    first, second = parts[::order]
    log = [make.user(), *first(make, "x"), make.agent(), *second(make, "y"), make.user()]
    alone = [make.user(), *first(Maker("x"), "x"), make.agent()]

    view = View.from_events(log)

    assert list(view) == oracles.enforce(log)
    assert ViewFold.from_events(list(view))[1] == ()
    assert len(View.from_events(alone)) >= 2


def test_one_property_can_bring_down_the_next_and_the_next() -> None:
    """A second result goes; that leaves a call without one; its response and their loop follow."""
    make = Maker()
    user = make.user()
    loop = [
        make.action("c1", "r1", thinking=True),
        make.result("c1"),
        make.action("c2", "r2"),
        make.action("c1", "r2"),
        make.result("c2"),
        make.result("c1"),
    ]
    assert _kept(user, *loop, make.agent()) == ["e1", "e8"]


# --- what it costs --------------------------------------------------------------------------------


def _chain(length: int) -> list[Event]:
    """Loops of which each shares a call with the next: the last to go has waited for all others."""
    make = Maker()
    log: list[Event] = []
    for n in range(length):
        log += [
            make.action(f"c{n}", f"r{n}", thinking=True),
            make.result(f"c{n}"),
            make.action(f"d{n}", f"r{n + 1}"),
            make.result(f"d{n}"),
            make.user(),
        ]
    log.append(make.condense(log[0]))
    return log


def _lines_run(act: Callable[[], object]) -> int:
    count = 0

    def trace(frame: object, kind: str, argument: object) -> object:
        nonlocal count
        count += kind == "line"
        return trace

    before = sys.gettrace()  # set while the tests' coverage is measured
    sys.settrace(trace)  # type: ignore[arg-type]  # a trace function may return itself
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def test_a_chain_of_five_thousand_tool_loops_falls_without_recursion() -> None:
    view = View.from_events(_chain(5_000))
    assert len(view) == 5_000
    assert {event.kind for event in view} == {"user_message"}


def test_a_log_of_five_thousand_tool_loops_stays_whole() -> None:
    log = _chain(5_000)[:-1]
    assert len(View.from_events(log)) == len(log)


@pytest.mark.parametrize("is_broken", [True, False])
def test_enforcement_is_linear_in_the_log(is_broken: bool) -> None:
    """Counted in lines that Python runs, not in seconds."""
    short, long = _chain(50), _chain(400)
    if not is_broken:
        short, long = short[:-1], long[:-1]
    few = _lines_run(lambda: View.from_events(short))
    many = _lines_run(lambda: View.from_events(long))
    assert many < few * 8 * 1.1


def test_many_condensations_of_a_long_open_loop_stay_linear() -> None:
    def log(length: int) -> list[Event]:
        make = Maker()
        begin = [make.user() for _ in range(length)]
        steps: list[Event] = [make.action("c", "r", thinking=True), make.result("c")]
        for n in range(length):
            steps += [make.action(f"c{n}", f"r{n}"), make.result(f"c{n}")]
            steps.append(CondensationEvent(**make.stamp(), forgotten_event_ids=()))
        return [*begin, *steps]

    short, long = log(50), log(400)
    few = _lines_run(lambda: View.from_events(short))
    many = _lines_run(lambda: View.from_events(long))
    assert many < few * 8 * 1.1


# --- where it runs --------------------------------------------------------------------------------


def test_a_cold_load_enforces_once_and_says_what_had_to_leave() -> None:
    make = Maker()
    log = [make.user(), make.action("c1"), make.user(), make.result("c9")]
    before = runs.total

    load = ColdLoad()
    for event in log:
        load.fold(event)
    state, removed = load.finish()

    assert runs.total == before + 1
    assert removed == ("e2", "e4")
    assert [event.id for event in state.view] == ["e1", "e3"]
    assert state.seq == 4


def test_a_repair_makes_the_view_a_fold_of_the_log_again() -> None:
    make = Maker()
    log: list[Event] = [make.user(), make.action("c1"), make.user(), make.result("c9")]
    state, removed = Folded.from_events(log)
    log.append(make.condense(*removed))

    assert state.admission.check(log[-1:]) is None
    state.fold(log[-1])

    replayed, nothing = Folded.from_events(log)
    assert nothing == ()
    assert replayed == state


def test_a_second_result_or_one_without_a_call_takes_no_tool_loop_with_it() -> None:
    make = Maker()
    loop = [make.action("c1", "r1", thinking=True), make.result("c1")]
    more = [make.action("c2", "r2"), make.result("c2")]
    assert _kept(*loop, make.error("c1"), *more, make.agent()) == ["e1", "e2", "e3", "e4", "e6"]
    make = Maker()
    loop = [make.action("c1", "r1", thinking=True), make.result("c1")]
    orphan = make.result("nowhere")
    repair = make.condense(orphan)
    assert _kept(*loop, orphan, repair, make.action("c2", "r2"), make.result("c2")) == [
        *("e1", "e2", "e5", "e6")
    ]
