"""Condensers: when there is a need, what they propose, and when a proposal still holds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.actors.logs import Maker
from turnkeeper.actors.condensers import (
    CondensationPlan,
    Need,
    NoCondenser,
    PipelineCondenser,
    Proposal,
    RollingCondenser,
    SummarizingCondenser,
    check_proposal,
    estimate_tokens,
)
from turnkeeper.actors.events import Event, LLMConvertibleEvent
from turnkeeper.actors.state import ConversationState
from turnkeeper.actors.view import View

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


async def test_a_reset_stops_short_of_a_call_that_is_open() -> None:
    make = Maker()
    view = _view(make.system(), make.user(), make.action("c1"), make.request())
    proposal = await SummarizingCondenser(Summariser()).propose(view, "hard")
    assert proposal == Proposal(("e2",), "summary")
    only_open = _view(make.system(), make.action("c2"), make.request())
    assert await SummarizingCondenser(Summariser()).propose(only_open, "hard") is None


# --- none, and several ----------------------------------------------------------------------------


async def test_no_condenser_keeps_all() -> None:
    view = _talk(10_000, request=True)
    assert NoCondenser().need(view) is None
    assert await NoCondenser().propose(view, "hard") is None


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
        (log[:2], "cut at 2"),
        (log[2:4], "cut at 2"),
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


def test_a_proposal_that_would_split_a_call_that_has_begun_meanwhile_is_refused() -> None:
    make = Maker()
    log: list[Event] = [make.user(), make.user()]
    shown = _view(*log)
    assert isinstance(check_proposal(_proposal(log), shown, shown), CondensationPlan)
    open_call = make.action("c1")
    late = _proposal([log[1], open_call])
    assert "cut at" in str(check_proposal(late, shown, _view(*log, open_call)))


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
    assert ConversationState.from_events(state.events) == (state, ())
