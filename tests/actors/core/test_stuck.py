"""Telling when an agent goes round in circles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.actors.core.logs import Maker
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.core.stuck import Circle, SeenEvent, StuckDetector
from turnkeeper.actors.core.view import View
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import CondensationSummaryEvent, LLMConvertibleEvent


class Steps:
    """A view that is made step by step."""

    def __init__(self) -> None:
        self.make = Maker()
        self.events: list[LLMConvertibleEvent] = [self.make.user()]
        self._count = 0

    def call(self, at: str, result: str = "seen", *, fails: bool = False) -> Steps:
        self._count += 1
        name = f"c{self._count}"
        arguments = {"at": at}
        self.events.append(self.make.action(name, f"r{self._count}", arguments=arguments))
        self.events.append(self.make.result(name, result, is_error=fails))
        return self

    def say(self, text: str) -> Steps:
        self.events.append(self.make.agent(text))
        return self

    def circle(self, detector: StuckDetector = StuckDetector()) -> Circle | None:
        return detector.find_circle(View.from_events(self.events))

    def name(self, detector: StuckDetector = StuckDetector()) -> str | None:
        circle = self.circle(detector)
        return None if circle is None else f"{circle.name}{'!' if circle.is_stuck else '?'}"


def test_the_same_call_with_the_same_result_four_times_is_stuck() -> None:
    steps = Steps()
    found = [steps.call("here").name() for _ in range(5)]
    assert found == [None, None, None, "same_action_same_result!", "same_action_same_result!"]


def test_another_result_or_another_call_is_no_circle() -> None:
    steps = Steps()
    for n in range(8):
        assert steps.call("here", f"seen {n}").name() is None
    steps = Steps()
    for n in range(8):
        assert steps.call(f"here {n}").name() is None


def test_three_failures_of_one_call_are_told_once_and_a_fourth_is_stuck() -> None:
    steps = Steps()
    found = [steps.call("here", f"error {n}", fails=True).name() for n in range(4)]
    assert found == [None, None, "failing_action?", "failing_action!"]


def test_after_the_agent_was_told_another_call_tells_it_nothing() -> None:
    steps = Steps()
    for n in range(3):
        steps.call("here", f"error {n}", fails=True)
    assert steps.call("there", "error", fails=True).name() is None


def test_a_success_in_between_ends_the_failures() -> None:
    steps = Steps()
    for n in range(2):
        steps.call("here", f"error {n}", fails=True)
    steps.call("here", "fine at last")
    for n in range(2):
        assert steps.call("here", f"error {n}", fails=True).name() is None


def test_errors_of_ours_are_failures_and_a_users_rejections_are_not() -> None:
    make = Maker()
    for answer, name in ((make.error, "failing_action"), (make.reject, None)):
        events: list[LLMConvertibleEvent] = [make.user()]
        for n in range(3):
            events += [make.action(f"{name}{n}", f"{name}{n}"), answer(f"{name}{n}")]
        circle = StuckDetector().find_circle(View.from_events(events))
        assert (None if circle is None else circle.name) == name


def test_three_agent_messages_in_a_row_are_stuck_and_a_summary_between_them_changes_nothing() -> (
    None
):
    steps = Steps()
    assert [steps.say(f"hm {n}").name() for n in range(3)] == [None, None, "agent_monologue!"]
    make = Maker()
    said = [make.agent("one"), make.agent("two"), make.agent("three")]
    summary = CondensationSummaryEvent(content="so far")
    circle = StuckDetector().find_circle([*said[:2], summary, said[2]])
    assert circle is not None
    assert circle.name == "agent_monologue"


def test_a_call_between_agent_messages_is_no_monologue() -> None:
    steps = Steps().say("one").say("two").call("here").say("three")
    assert steps.name() is None


def test_six_calls_that_alternate_between_two_are_stuck() -> None:
    steps = Steps()
    found = [steps.call("here" if n % 2 else "there", f"{n % 2}").name() for n in range(6)]
    assert found == [*[None] * 5, "alternating_actions!"]
    varied = Steps()
    for n in range(6):
        varied.call("here" if n % 2 else "there", f"{n}")
    assert varied.name() is None


def test_only_what_came_since_the_last_user_message_counts() -> None:
    steps = Steps().call("here").call("here").call("here")
    steps.events.append(steps.make.user("go on"))
    assert steps.call("here").name() is None


def test_only_the_newest_events_are_looked_at() -> None:
    few = StuckDetector(window=6)
    steps = Steps()
    for _ in range(10):
        steps.call("here")
    assert steps.circle(few) is None
    assert steps.circle(StuckDetector(window=8)) is not None


def test_thresholds_can_be_set() -> None:
    steps = Steps().call("here").call("here")
    circle = steps.circle(StuckDetector(same_results_max=2))
    assert circle == Circle(
        "same_action_same_result",
        is_stuck=True,
        detail="the same call with the same result, 2 times",
    )


def test_calls_that_are_open_do_not_count() -> None:
    steps = Steps().call("here").call("here").call("here")
    steps.events.append(steps.make.action("open", "open", arguments={"at": "here"}))
    assert steps.name() is None


def test_each_event_is_digested_once_and_only_the_newest_are_kept() -> None:
    detector, digested = StuckDetector(window=6), dict[str, SeenEvent]()
    steps = Steps()
    earlier: dict[str, SeenEvent] = {}
    for at in ("here", "there", "here", "there", "here", "here", "here", "here"):
        events = steps.call(at).events

        found = detector.find_circle(events, digested)

        assert found == detector.find_circle(events)
        if digested:
            assert list(digested) == [event.id for event in events[1:][-6:]]
        assert all(digested[known] is earlier[known] for known in digested if known in earlier)
        earlier = dict(digested)
    assert len(digested) == 6


def test_the_smallest_monologue_is_found() -> None:
    at_once = StuckDetector(messages_max=1)
    assert at_once.find_circle([]) is None
    said = at_once.find_circle(Steps().say("hello").events)
    assert said is not None
    assert said.name == "agent_monologue"


@pytest.mark.parametrize(
    ("bound", "name"),
    [
        ("same_results_max", "same_action_same_result!"),
        ("failures_max", "failing_action?"),
        ("alternations", "alternating_actions!"),
    ],
)
def test_the_smallest_circle_of_calls_is_found(bound: str, name: str) -> None:
    at_once = replace(StuckDetector(messages_max=9), **{bound: 1})
    assert Steps().call("here", fails=True).name(at_once) == name


# --- over a condensation, and over a restart -----------------------------------------------------


def test_a_condensation_in_the_middle_of_a_circle_does_not_hide_it() -> None:
    make = Maker()
    folded = Folded()
    detector = StuckDetector()
    folded.fold(make.user())
    found = []
    for n in range(4):
        folded.fold(make.action(f"c{n}", f"r{n}", arguments={"at": "here"}))
        folded.fold(make.result(f"c{n}", "seen"))
        if n == 2:
            folded.fold(make.condense(*list(folded.view)[1:], summary="s", offset=1))
            restored = Folded.from_snapshot(folded.to_snapshot())
            assert restored == folded
            assert restored is not None
            folded = restored
        circle = detector.find_circle(folded.recently_seen)
        found.append(circle is not None and circle.is_stuck)
    assert found == [False, False, False, True]
    assert detector.find_circle(folded.view) is None, "the view alone does not show it"


def test_what_was_recently_seen_is_bounded_and_ends_with_a_user_message() -> None:
    make = Maker()
    folded = Folded()
    for n in range(40):
        folded.fold(make.agent(f"{n}"))
    assert len(folded.recently_seen) == 20
    folded.fold(make.user("a reminder", is_reminder=True))
    assert len(folded.recently_seen) == 20
    folded.fold(make.user())
    assert folded.recently_seen == ()
    with pytest.raises(InvalidInput):
        StuckDetector(window=21)
