"""Condensers: when there is a need, what they propose, and when a proposal still holds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.actors.core.laws import verify_view
from tests.actors.core.logs import Maker
from turnkeeper.actors.core.condensation import (
    SHORTENED_LENGTH,
    CondensationPlan,
    Need,
    PipelineCondenser,
    Proposal,
    RollingCondenser,
    SummarizingCondenser,
    check_proposal,
    estimate_tokens,
    make_room,
)
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.core.view import SHORTENED_MARKER, View
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import (
    RESULT_CLASSES,
    Event,
    LLMConvertibleEvent,
    ObservationEvent,
    TurnStartedEvent,
)
from turnkeeper.actors.journals.sqlite.state import ConversationState
from turnkeeper.actors.models.scripted import ScriptedModel
from turnkeeper.actors.models.summaries import summarizing_condenser

pytestmark = pytest.mark.anyio


def _view(*log: Event) -> View:
    return View.from_events(log)


def _talk(length: int, *, request: bool = False) -> View:
    make = Maker()
    log: list[Event] = [make.user(f"message {n}") for n in range(length)]
    return _view(*log, *([make.request()] if request else []))


def _places(view: View, proposal: Proposal | None) -> tuple[int, int] | None:
    """The run that a proposal forgets, as positions."""
    if proposal is None:
        return None
    ids = [event.id for event in view]
    run = [ids.index(forgotten) for forgotten in proposal.forgotten_event_ids]
    assert run == list(range(run[0], run[-1] + 1))
    return run[0], run[-1] + 1


# --- the rolling condenser ------------------------------------------------------------------------


def test_there_is_no_need_up_to_the_size_and_a_soft_one_beyond_it() -> None:
    condenser = RollingCondenser(max_size=20)
    assert condenser.need(_talk(20)) is None
    assert condenser.need(_talk(21)) == "soft"


def test_a_request_is_a_hard_need_and_so_are_too_many_tokens() -> None:
    assert RollingCondenser().need(_talk(5, request=True)) == "hard"
    counting = RollingCondenser(max_tokens=10, count_tokens=lambda event: 1)
    assert counting.need(_talk(10)) is None
    assert counting.need(_talk(11)) == "hard"


async def test_too_many_events_leave_the_first_and_half_the_size_behind() -> None:
    condenser = RollingCondenser(max_size=20, keep_first=3)
    view = _talk(31)
    # 20 // 2 - 3 - 1 = 6 are kept at the end.
    assert _places(view, await condenser.propose(view, "soft")) == (3, 25)


async def test_a_request_leaves_half_the_view_behind() -> None:
    condenser = RollingCondenser(keep_first=2)
    view = _talk(30, request=True)
    # 30 // 2 - 2 - 1 = 12 are kept at the end.
    assert _places(view, await condenser.propose(view, "hard")) == (2, 18)


async def test_too_many_tokens_leave_the_longest_tail_that_brings_them_under_half() -> None:
    condenser = RollingCondenser(
        keep_first=2, max_tokens=100, count_tokens=lambda event: len(event.id) * 5
    )
    view = _talk(12)  # e1 to e9 are 10 tokens each, e10 to e12 are 15
    # 50 tokens, less 20 for the first two: 15 + 15 fit.
    assert _places(view, await condenser.propose(view, "hard")) == (2, 10)


async def test_of_several_reasons_the_one_that_keeps_least_decides() -> None:
    tokens = RollingCondenser(max_size=20, max_tokens=100, count_tokens=lambda event: 10)
    view = _talk(30, request=True)
    # The request would keep 12, the size 7, the tokens 3.
    assert _places(view, await tokens.propose(view, "hard")) == (2, 27)
    size = RollingCondenser(max_size=20)
    assert _places(view, await size.propose(view, "hard")) == (2, 23)


async def test_a_cut_moves_on_to_the_next_place_where_nothing_is_torn() -> None:
    make = Maker()
    loop = [make.action("c1", "r1", thinking=True), make.result("c1")]
    more = [make.action("c2", "r2"), make.result("c2")]
    view = _view(make.user(), *loop, *more, *(make.user() for _ in range(20)), make.request())
    condenser = RollingCondenser(max_size=200, keep_first=2)
    # 2 lies inside the loop, which ends at 5; 25 // 2 - 2 - 1 = 9 are kept at the end.
    assert _places(view, await condenser.propose(view, "hard")) == (5, 16)


async def test_too_little_progress_is_left_alone_where_soft_and_taken_where_hard() -> None:
    make = Maker()
    calls = [make.action(f"c{n}") for n in range(12)]
    results = [make.result(f"c{n}") for n in range(12)]
    view = _view(make.user(), make.user(), make.user(), *calls, *results)
    condenser = RollingCondenser(max_size=20, keep_first=2, minimum_progress=0.1)
    assert condenser.need(view) == "soft"
    assert _places(view, await condenser.propose(view, "hard")) == (2, 27)
    short = _view(make.user(), make.user(), make.user(), *calls, *results[:-1])
    assert await condenser.propose(short, "soft") is None


async def test_soft_progress_below_the_minimum_is_none_and_hard_takes_what_there_is() -> None:
    condenser = RollingCondenser(max_size=20, minimum_progress=0.9)
    view = _talk(30)
    assert await condenser.propose(view, "soft") is None
    assert _places(view, await condenser.propose(view, "hard")) == (2, 23)


@pytest.mark.parametrize("limit", ["max_size", "max_tokens", "minimum_progress"])
def test_a_limit_of_a_condenser_that_limits_nothing_is_refused(limit: str) -> None:
    wrong: Any = {limit: math.nan}
    with pytest.raises(ValueError, match=limit):
        RollingCondenser(**wrong)


@pytest.mark.parametrize(("max_size", "keep_first"), [(20, 9), (20, -1), (4, 1)])
def test_a_condenser_that_could_keep_no_tail_is_refused(max_size: int, keep_first: int) -> None:
    with pytest.raises(ValueError, match="keep_first"):
        RollingCondenser(max_size=max_size, keep_first=keep_first)
    RollingCondenser(max_size=20, keep_first=8)


def test_tokens_are_counted_once_for_each_event_of_a_growing_view() -> None:
    counted: list[str] = []

    def count(event: LLMConvertibleEvent) -> int:
        counted.append(event.id)
        return 1

    condenser = RollingCondenser(max_tokens=1_000, count_tokens=count)
    make = Maker()
    state = ConversationState()
    for _ in range(20):
        state.append_event(make.user())
        assert condenser.need(state.view) is None

    assert counted == [f"e{n}" for n in range(1, 21)]


def test_the_estimate_of_tokens_grows_with_the_text() -> None:
    make = Maker()
    assert estimate_tokens(make.user("x" * 400)) > 100
    assert estimate_tokens(make.action("c1", arguments={"a": "x" * 400})) > 100
    assert estimate_tokens(make.user("")) > 0


# --- the summarising condenser --------------------------------------------------------------------


class Summariser:
    """Summarises, or fails as often as it is told; keeps what it was given."""

    def __init__(self, *, failures: int = 0, answer: str = "summary") -> None:
        self.given: list[str] = []
        self._failures = failures
        self._answer = answer

    async def __call__(self, history: str) -> str:
        self.given.append(history)
        if len(self.given) <= self._failures:
            raise RuntimeError("too long")
        return self._answer


async def test_the_middle_is_summarised_in_words_that_say_who_spoke() -> None:
    make = Maker()
    log = [
        make.system("be kind"),
        make.user("where is it?"),
        make.action("c1", arguments={"order": 7}, text="let me see"),
        make.result("c1", "on its way"),
        make.agent("on its way"),
        *(make.user() for _ in range(5)),
    ]
    view = _view(*log, make.request())
    summariser = Summariser()
    condenser = SummarizingCondenser(summariser, RollingCondenser(keep_first=1))

    proposal = await condenser.propose(view, "hard")

    assert proposal == Proposal(("e2", "e3", "e4", "e5", "e6", "e7"), "summary")
    (history,) = summariser.given
    assert history.splitlines() == [
        "user: where is it?",
        "assistant: let me see",
        'assistant called look({"order": 7})',
        "result: on its way",
        "assistant: on its way",
        "user: hello",
        "user: hello",
    ]


async def test_without_progress_a_soft_need_waits_and_a_hard_one_resets_all_but_the_prompt() -> (
    None
):
    make = Maker()
    view = _view(make.system(), make.user(), make.agent(), make.request())
    summariser = Summariser()
    condenser = SummarizingCondenser(summariser)

    assert await condenser.propose(view, "soft") is None
    assert summariser.given == []
    proposal = await condenser.propose(view, "hard")

    assert proposal == Proposal(("e2", "e3"), "summary")
    plan = check_proposal(proposal, view, view)
    assert isinstance(plan, CondensationPlan)
    assert plan.summary_offset == 1


async def test_a_reset_cuts_each_text_shorter_after_each_try_that_fails() -> None:
    view = _view(Maker().user("x" * 94), *[])
    summariser = Summariser(failures=4)

    proposal = await SummarizingCondenser(summariser).propose(view, "hard")

    assert proposal is not None
    assert proposal.summary == "summary"
    assert [len(text) for text in summariser.given] == [100, 80, 64, 51, 40]


async def test_a_reset_that_fails_five_times_fails() -> None:
    summariser = Summariser(failures=5)
    with pytest.raises(RuntimeError, match="too long"):
        await SummarizingCondenser(summariser).propose(_talk(3), "hard")
    assert len(summariser.given) == 5


async def test_an_empty_summary_is_a_failed_try() -> None:
    with pytest.raises(ValueError, match="empty"):
        await SummarizingCondenser(Summariser(answer=" \n")).propose(_talk(3), "hard")


def test_a_summary_that_is_no_function_is_refused_with_a_call_that_makes_one() -> None:
    """The advice once left out the window, without which that call fails."""
    with pytest.raises(InvalidInput, match="takes an async function") as refused:
        SummarizingCondenser("a summary")  # type: ignore[arg-type]  # as in untyped code

    call = re.search(r"`(summarizing_condenser\(.*\))`", str(refused.value))
    assert call is not None
    made = eval(
        call[1], {"summarizing_condenser": summarizing_condenser, "model": ScriptedModel([])}
    )
    assert isinstance(made, SummarizingCondenser)


async def test_a_reset_stops_short_of_a_call_that_is_open() -> None:
    make = Maker()
    view = _view(make.system(), make.user(), make.action("c1"), make.request())
    proposal = await SummarizingCondenser(Summariser()).propose(view, "hard")
    assert proposal == Proposal(("e2",), "summary")
    only_open = _view(make.system(), make.action("c2"), make.request())
    assert await SummarizingCondenser(Summariser()).propose(only_open, "hard") is None


# --- none, and several ----------------------------------------------------------------------------


async def test_a_pipeline_follows_the_first_that_has_a_need_and_a_proposal() -> None:
    class Picky:
        def need(self, view: View) -> Need | None:
            return "soft"

        async def propose(self, view: View, need: Need) -> Proposal | None:
            assert need == "soft"
            return None

    class Never:
        def need(self, view: View) -> Need | None:
            return None

        async def propose(self, view: View, need: Need) -> Proposal | None:
            raise AssertionError("asked without a need")

    view = _talk(30, request=True)
    pipeline = PipelineCondenser(Never(), Picky(), RollingCondenser())
    assert pipeline.need(view) == "hard"
    assert PipelineCondenser(Never(), Picky()).need(view) == "soft"
    assert PipelineCondenser(Never()).need(view) is None
    assert _places(view, await pipeline.propose(view, "hard")) == (2, 18)
    assert await PipelineCondenser(Picky(), Never()).propose(view, "soft") is None


# --- proposals ------------------------------------------------------------------------------------


def _proposal(events: Sequence[Event], summary: str | None = "s") -> Proposal:
    return Proposal(tuple(event.id for event in events), summary)


def test_a_proposal_holds_when_the_view_has_only_grown() -> None:
    make = Maker()
    log = [make.user() for _ in range(6)]
    shown, now = _view(*log[:4]), _view(*log)
    plan = check_proposal(_proposal(log[3:0:-1]), shown, now)
    assert plan == CondensationPlan(("e2", "e3", "e4"), "s", 1)
    assert check_proposal(_proposal(log[1:4], None), shown, now) == CondensationPlan(
        ("e2", "e3", "e4"), None, None
    )


def test_the_summary_goes_to_where_the_forgotten_events_are_now() -> None:
    make = Maker()
    early = make.user()
    log = [make.user() for _ in range(4)]
    shown = _view(*log)
    plan = check_proposal(_proposal(log[:2]), shown, _view(early, *log))
    assert isinstance(plan, CondensationPlan)
    assert plan.summary_offset == 1


def test_a_proposal_is_refused_where_it_does_not_hold() -> None:
    make = Maker()
    log: list[Event] = [
        make.user(),
        make.action("c1"),
        make.result("c1"),
        make.user(),
        make.agent(),
    ]
    view = _view(*log)
    for forgotten, why in (
        ([], "nothing"),
        ([log[0], log[3]], "gaps"),
        (log[:2], "cut after the last"),
        (log[2:4], "cut before the first"),
        ([*log[:1], make.user()], "not in the view"),
    ):
        assert why in str(check_proposal(_proposal(forgotten), view, view)), forgotten


def test_a_proposal_is_refused_when_anything_that_was_shown_has_left_the_view() -> None:
    """Though the forgotten events are still there: the summary may speak of what is gone."""
    make = Maker()
    log: list[Event] = [make.user() for _ in range(5)]
    shown = _view(*log)
    now = _view(*log, make.retract(log[4]))
    assert "left the view" in str(check_proposal(_proposal(log[:2]), shown, now))


def test_a_summary_replaces_a_lone_summary_only_if_it_is_a_tenth_shorter() -> None:
    """Otherwise the need stays as it was, and the condenser is asked without end."""
    make = Maker()
    first = make.user()
    condensed = make.condense(first, summary="They talked.", offset=0)
    view = _view(first, condensed)
    for summary in ("They talked.", "They talked on.", "They talked"):
        assert "not a tenth shorter" in str(check_proposal(_proposal(view, summary), view, view))
    for shorter in ("They spoke", None):  # by two of twelve characters
        assert isinstance(check_proposal(_proposal(view, shorter), view, view), CondensationPlan)
    asked = _view(first, condensed, make.request())
    assert isinstance(
        check_proposal(_proposal(asked, "They met again."), asked, asked), CondensationPlan
    )
    other = make.user()  # which is forgotten as well
    view = _view(first, condensed, other)
    assert isinstance(
        check_proposal(_proposal(view, "They met again."), view, view), CondensationPlan
    )


def test_a_proposal_that_would_split_a_call_that_has_begun_meanwhile_is_refused() -> None:
    make = Maker()
    log: list[Event] = [make.user(), make.user()]
    shown = _view(*log)
    assert isinstance(check_proposal(_proposal(log), shown, shown), CondensationPlan)
    open_call = make.action("c1")
    late = _proposal([log[1], open_call])
    assert "cut after" in str(check_proposal(late, shown, _view(*log, open_call)))


async def test_messages_that_come_while_a_summary_is_written_are_kept_and_nothing_is_enforced() -> (
    None
):
    make = Maker()
    state = ConversationState()
    for _ in range(30):
        state.append_event(make.user())
    state.append_event(make.request())
    shown = state.view

    async def summarize(history: str) -> str:
        state.append_event(make.user("meanwhile"))
        state.append_event(make.action("c1"))
        return "what came before"

    proposal = await SummarizingCondenser(summarize).propose(shown, "hard")
    assert proposal is not None
    plan = check_proposal(proposal, shown, state.view)
    assert isinstance(plan, CondensationPlan)
    state.append_event(
        make.condense(*plan.forgotten_event_ids, summary=plan.summary, offset=plan.summary_offset)
    )

    texts = [getattr(event, "content", event.kind) for event in state.view]
    assert texts[:4] == ["hello", "hello", "what came before", "hello"]
    assert texts[-2:] == ["meanwhile", "action"]
    assert Folded.from_events(state.events) == (state._folded, ())


# --- while a turn runs ----------------------------------------------------------------------------


def _running(*events: Event, turn_id: str = "t") -> View:
    """The view while this turn runs."""
    folded = Folded()
    folded.fold(TurnStartedEvent(**Maker("s").stamp(), turn_id=turn_id))
    for event in events:
        folded.fold(event)
    return folded.view


def _long_turn(steps: int, calls: int = 3) -> list[Event]:
    make = Maker()
    log: list[Event] = [make.system("S")]
    for n in range(3):
        log += [make.user(f"earlier {n}"), make.agent("answer")]
    log.append(make.user("the question", turn_id="t", message_id="m"))
    for step in range(steps):
        ids = [f"c{step}.{n}" for n in range(calls)]
        log += [make.action(call_id, f"r{step}", turn_id="t") for call_id in ids]
        log += [make.result(call_id) for call_id in ids]
    return log


def test_the_running_turns_messages_its_newest_response_and_the_prompt_are_protected() -> None:
    make = Maker()
    log = [
        make.system(),
        make.user("earlier"),
        make.user("the question", turn_id="t"),
        make.action("c1", "r1", turn_id="t"),
        make.result("c1"),
        make.user("steered", turn_id="t"),
        make.user("a reminder", turn_id="t", is_reminder=True),
        make.action("c2", "r2", turn_id="t"),
        make.result("c2"),
        make.user("by hand"),
    ]
    assert _running(*log).protected == {"e1", "e3", "e6", "e8", "e9", "e10"}
    assert _running(*log, turn_id="another").protected == {"e1"}
    assert _view(*log).protected == {"e1"}


@pytest.mark.parametrize("keep_first", [0, 2])
async def test_a_long_turn_never_loses_its_own_question(keep_first: int) -> None:
    condenser = RollingCondenser(max_size=24, keep_first=keep_first)
    make = Maker("z")
    log = _long_turn(2)
    for step in range(2, 30):
        log += _long_turn(30)[7 + 6 * step + 1 : 7 + 6 * step + 7]
        for _ in range(9):
            view = _running(*log)
            need = condenser.need(view)
            proposal = None if need is None else await condenser.propose(view, need)
            if proposal is None:
                break
            plan = check_proposal(proposal, view, view)
            assert isinstance(plan, CondensationPlan)
            log.append(make.condense(*plan.forgotten_event_ids))
        view = _running(*log)
        assert condenser.need(view) is None
        contents = [getattr(event, "content", "") for event in view]
        assert contents[0] == "S"
        assert "the question" in contents
        assert view[-1].id == log[-1].id if log[-1].kind == "observation" else True


async def test_of_the_runs_beside_what_is_protected_the_oldest_that_is_enough_is_forgotten() -> (
    None
):
    make = Maker()
    old = [make.user() for _ in range(12)]
    question = make.user("the question", turn_id="t")
    more = [make.agent(turn_id="t") for _ in range(16)]
    # 24 // 2 - 0 - 1 = 11 are kept at the end: of 29, what may go are the 12 old and 5 newer ones.
    view = _running(*old, question, *more)
    assert _places(view, await RollingCondenser(24, 0).propose(view, "soft")) == (0, 12)
    # Neither run is enough for 10: the longest.
    view = _running(*old[:3], question, *more)
    assert _places(view, await RollingCondenser(10, 0).propose(view, "soft")) == (4, 16)


async def test_a_run_that_makes_too_little_progress_is_left_alone_where_soft() -> None:
    make = Maker()
    old = make.user()
    calls = [make.action(f"c{n}", "r", turn_id="t") for n in range(12)]
    results = [make.result(f"c{n}") for n in range(12)]
    view = _running(old, make.user("the question", turn_id="t"), *calls, *results)
    condenser = RollingCondenser(max_size=20, keep_first=0)
    assert await condenser.propose(view, "soft") is None
    assert _places(view, await condenser.propose(view, "hard")) == (0, 1)


async def test_a_reset_summarises_all_but_what_is_protected() -> None:
    view = _running(*_long_turn(1))
    proposal = await SummarizingCondenser(Summariser()).propose(view, "hard")
    assert _places(view, proposal) == (1, 7)


def test_a_proposal_is_judged_by_what_is_protected_now() -> None:
    log = _long_turn(2)
    shown = _running(*log, turn_id="none")
    question = next(event for event in log if getattr(event, "content", "") == "the question")
    proposal = _proposal([question])
    assert isinstance(check_proposal(proposal, shown, shown), CondensationPlan)
    assert "protected" in str(check_proposal(proposal, shown, _running(*log)))


# --- shortening -----------------------------------------------------------------------------------


def _loop(lengths: Sequence[int]) -> list[Event]:
    """A turn that is one tool loop, so that no part of it can be forgotten."""
    make = Maker()
    log: list[Event] = [make.user("the question", turn_id="t")]
    for n, length in enumerate(lengths):
        log.append(make.action(f"c{n}", f"r{n}", thinking=n == 0, turn_id="t"))
        log.append(make.result(f"c{n}", "x" * length))
    return log


def test_the_owner_forgets_the_longest_run_before_it_shortens_anything() -> None:
    view = _running(*_long_turn(1))
    assert make_room(view) == CondensationPlan(tuple(f"e{n}" for n in range(2, 8)))


def test_results_are_shortened_oldest_first_and_only_as_far_as_half_the_text_is_left() -> None:
    view = _running(*_loop([10_000, 10_000, 10_000, 10_000]))
    plan = make_room(view)
    assert plan is not None
    assert plan.forgotten_event_ids == ()
    assert list(plan.shortened) == ["e3", "e5", "e7"]
    assert plan.shortened["e3"] == plan.shortened["e5"] == SHORTENED_LENGTH
    assert SHORTENED_LENGTH < plan.shortened["e7"] < 10_000


def test_the_newest_responses_results_are_shortened_last() -> None:
    view = _running(*_loop([300, 100_000]))
    plan = make_room(view)
    assert plan is not None
    assert list(plan.shortened) == ["e3", "e5"]
    assert 40_000 < plan.shortened["e5"] < 60_000


@given(
    lengths=st.lists(st.integers(0, 5_000), min_size=1, max_size=6),
    turns=st.lists(st.sampled_from(["t", "other"]), min_size=1, max_size=8),
    thinks=st.booleans(),
)
def test_making_room_ends_and_leaves_a_sound_view_with_all_that_is_protected(
    lengths: list[int], turns: list[str], *, thinks: bool
) -> None:
    make = Maker()
    folded = Folded()
    log: list[Event] = []

    def append(event: Event) -> None:
        assert folded.admission.check((event,)) is None, event
        log.append(event)
        folded.fold(event)

    append(make.system())
    append(TurnStartedEvent(**make.stamp(), turn_id="t"))
    for turn_id in turns:
        append(make.user("u", turn_id=turn_id))
    for n, length in enumerate(lengths):
        append(make.action(f"c{n}", f"r{n}", thinking=thinks and n % 2 == 0, turn_id="t"))
        append(make.result(f"c{n}", "x" * length))

    protected = folded.view.protected
    for _ in range(60):
        view = folded.view
        before = [*view.manipulation_indices]
        plan = make_room(view)
        if plan is None:
            break
        assert plan.shrinks
        append(make.condense(*plan.forgotten_event_ids, shortened=plan.shortened))
        now = folded.view
        assert protected <= {event.id for event in now}
        assert verify_view(log, now) is None
        if plan.shortened:
            assert [*now.manipulation_indices] == before
            assert [event.id for event in now] == [event.id for event in view]
            assert sum(map(estimate_tokens, now)) < sum(map(estimate_tokens, view))
        restored = Folded.from_snapshot(folded.to_snapshot())
        assert restored == folded
    else:
        raise AssertionError("it goes on for ever")
    longest = SHORTENED_LENGTH + len(SHORTENED_MARKER)
    assert all(len(e.content) <= longest for e in folded.view if isinstance(e, RESULT_CLASSES))
    assert [e.content for e in log if isinstance(e, RESULT_CLASSES)] == ["x" * n for n in lengths]


def test_a_shortened_result_keeps_its_beginning_and_says_so() -> None:
    make = Maker()
    log: list[Event] = [make.action("c1"), make.result("c1", "abc" * 100)]
    view = _view(*log, make.condense(shortened={"e2": 4}))
    (_, result) = view
    assert isinstance(result, ObservationEvent)
    assert (result.id, result.content) == ("e2", "abca" + SHORTENED_MARKER)
    again = _view(*log, make.condense(shortened={"e2": 50}), make.condense(shortened={"e2": 4}))
    assert list(again) == list(view)


def test_only_a_result_that_becomes_shorter_may_be_shortened() -> None:
    make = Maker()
    folded = Folded()
    for event in (make.user("x" * 300), make.action("c1"), make.result("c1", "x" * 300)):
        folded.fold(event)
    for shortened in ({"e1": 3}, {"e9": 3}, {"e3": 300}, {"e3": 299}):
        violation = folded.admission.check((make.condense(shortened=shortened),))
        assert violation is not None
        assert violation.name == "illegal_condensation"
    assert folded.admission.check((make.condense(shortened={"e3": 3}),)) is None
    torn = make.condense("e2", "e3", shortened={"e3": 3})
    assert folded.admission.check((torn,)) is not None
    for length in (-1, True, "3"):
        with pytest.raises(ValidationError):
            make.condense(shortened={"e3": length})  # type: ignore[dict-item]
