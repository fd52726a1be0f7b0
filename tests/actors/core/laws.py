"""What must hold for every log. Each law raises where it does not; the mutants need that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.actors.core import logs, oracles
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.core.view import View, ViewCheck, ViewFold
from turnkeeper.actors.events import (
    AgentMessageEvent,
    CondensationSummaryEvent,
    Event,
    LLMConvertibleEvent,
    SystemPromptEvent,
    UserMessageEvent,
    decode_event,
    encode_event,
)
from turnkeeper.actors.models.messages import LLMShape, OpenCalls, to_llm_messages

_CHECKS = {"openai": oracles.check_openai, "anthropic": oracles.check_anthropic}
_SHAPES: tuple[LLMShape, ...] = ("openai", "anthropic")


def verify_view(events: Iterable[Event], view: View) -> str | None:
    """Return the first difference between a view and the rebuild of its log; None if equal."""
    check = ViewCheck()
    for event in events:
        check.fold(event)
    return check.find_divergence(view)


def check_admissible(log: Sequence[Event], reopened_at: int = 0) -> None:
    """A log that admission lets through: at every prefix, every fold is its rebuild.

    At `reopened_at` the state is thrown away and made again from its snapshot.
    """
    state = Folded()
    for n, event in enumerate(log, 1):
        before = state.view
        listed = list(before)
        messages = None if before.has_open_calls else to_llm_messages(before)
        assert oracles.admit(log[: n - 1], event) is None, event
        assert state.admission.check((event,)) is None, event
        state.fold(event)

        assert list(before) == listed, "a snapshot changed"
        check_view(log[:n], state.view)
        if messages is not None:
            assert to_llm_messages(before) == messages, "an older view, asked again"
        if n == reopened_at:
            reopened = Folded.from_snapshot(state.to_snapshot())
            assert reopened is not None
            assert reopened == state
            assert reopened.view.manipulation_indices == state.view.manipulation_indices
            state = reopened
    replayed, removed = Folded.from_events(log)
    assert removed == ()
    assert replayed == state
    assert replayed.to_snapshot() == state.to_snapshot()


def check_view(log: Sequence[Event], view: View) -> None:
    """This is the view of this log, and all that is kept with it is right."""
    folded, request = oracles.fold(log)
    assert list(view) == folded
    assert view.unhandled_condensation_request == request
    assert oracles.enforce(log) == folded
    assert View.from_events(log) == view
    assert verify_view(log, view) is None

    expected = oracles.contract_indices(folded)
    assert list(view.manipulation_indices) == expected
    assert expected == oracles.indices(folded)
    for index in range(len(folded) + 2):
        later = [each for each in expected if each >= index]
        assert view.find_next(index) == (later[0] if later else None)

    assert view.has_open_calls == bool(oracles.open_calls(log))
    for shape in _SHAPES:
        try:
            messages = to_llm_messages(view, shape)
        except OpenCalls:
            assert view.has_open_calls
        else:
            assert not view.has_open_calls
            assert messages == to_llm_messages(View.from_events(log), shape)
            _CHECKS[shape](messages)


def check_wild(log: Sequence[Event], moves: Sequence[logs.Move]) -> None:
    """A log from elsewhere: enforced, it is what a model accepts; repaired, it is a log of ours."""
    once = list({event.id: event for event in log}.values())
    view = View.from_events(log)
    assert list(view) == oracles.enforce(once)
    assert list(view.manipulation_indices) == oracles.indices(list(view))
    assert _said(view) == _said(oracles.fold(once)[0])

    unforced = ViewFold()
    for event in once:
        unforced.fold(event)
        snapshot = unforced.snapshot()
        assert list(snapshot.manipulation_indices) == oracles.indices(list(snapshot))

    state, removed = Folded.from_events(once)
    assert state.view == view
    make = logs.Maker("z")
    repaired = list(once)
    if removed:
        repaired.append(make.condense(*removed))
        assert state.admission.check(repaired[-1:]) is None
        state.fold(repaired[-1])
        assert list(state.view) == list(view)
    assert ViewFold.from_events(repaired)[1] == (), "the repair is not one"
    _check_accepted(repaired, state, make)

    continued = logs.Admissible(repaired, "y").play(moves)
    for n in range(len(repaired), len(continued)):
        assert state.admission.check(continued[n : n + 1]) is None, continued[n]
        state.fold(continued[n])
        assert verify_view(continued[: n + 1], state.view) is None


def _check_accepted(log: Sequence[Event], state: Folded, make: logs.Maker) -> None:
    fold, _ = ViewFold.from_events(log)
    for call_id in list(state.admission.open_calls):
        fold.fold(make.error(call_id))
    for shape in _SHAPES:
        _CHECKS[shape](to_llm_messages(fold.snapshot(), shape))


def _said(view: Iterable[LLMConvertibleEvent]) -> list[LLMConvertibleEvent]:
    kept = (UserMessageEvent, AgentMessageEvent, SystemPromptEvent, CondensationSummaryEvent)
    return [event for event in view if isinstance(event, kept)]


def check_filtered(proposed: Sequence[Event], *, limits: Limits = Limits()) -> int:
    """Whatever is sent, in any order: what admission lets through is a log like any other.

    Gives how many it let through.
    """
    state = Folded(limits=limits)
    log: list[Event] = []
    for event in {event.id: event for event in proposed}.values():
        if state.admission.check((event,)) is None:
            log.append(event)
            state.fold(event)
            assert verify_view(log, state.view) is None
    for call_id in list(state.admission.open_calls):
        state.fold(logs.Maker("z").error(call_id))
    for shape in _SHAPES:
        _CHECKS[shape](to_llm_messages(state.view, shape))
    return len(log)


def check_crafted() -> None:
    """Logs that are hardly ever drawn, and that a rule turns on."""
    make = logs.Maker("k")
    first, second, late = make.action("c1"), make.action("c2"), make.action("c3")
    results = [make.result(call_id) for call_id in ("c1", "c2", "c3")]
    thinking = make.action("c4", "r2", thinking=True)
    for log in (
        # An answered call whose result was forgotten is not pending.
        [first, results[0], make.condense(results[0])],
        # A response that goes on while it has results, and one that is interrupted.
        [first, second, results[0], late, results[1], results[2]],
        [first, second, make.user(), results[0], late, results[1], results[2]],
        # One thing wrong and nothing else: a result without a call, a result or an action too
        # many, a call that is left open by a message, by a response, by a response that is over.
        [results[0]],
        [first, results[0], make.error("c1")],
        [first, results[0], make.user(), make.action("c1", "r2")],
        [first, make.user()],
        [first, user := make.user(), make.condense(user)],
        [first, make.action("c4", "r2"), make.result("c4")],
        [first, results[0], make.user(), second],
        # Part of a response, of a pair, of a loop was forgotten, or cut off by a summary.
        [first, second, *results[:2], make.condense(first, results[0])],
        [first, results[0], make.condense(results[0]), make.user()],
        [thinking, make.result("c4"), first, results[0], make.retract(first, results[0])],
        [
            *(thinking, make.result("c4"), make.condense(summary="s", offset=2)),
            *(first, results[0], make.condense(first, results[0])),
        ],
        # A loop with a result in it that answers no call, or one that is forgotten.
        [thinking, make.result("c4"), results[2], first, results[0]],
        [first, make.condense(first), thinking, make.result("c4"), results[0]],
        # A loop of which a part was forgotten while it was open.
        [thinking, make.condense(thinking), make.result("c4"), first, results[0]],
    ):
        check_wild(log, [])


def check_admission(log: Sequence[Event], candidates: list[Event]) -> None:
    """After this log, each candidate is admitted or refused as the oracle says, and for why."""
    state, removed = Folded.from_events(log)
    assert removed == ()
    for first, second in zip(candidates, candidates[1:] + candidates[:1], strict=True):
        violation = state.admission.check((first, second))
        expected = oracles.admit(log, first) or oracles.admit([*log, first], second)
        assert (None if violation is None else violation.name) == expected, (first, second)
    for candidate in candidates:
        before = state.to_snapshot()
        violation = state.admission.check((candidate,))
        found = None if violation is None else violation.name
        assert found == oracles.admit(log, candidate), candidate
        assert state.to_snapshot() == before, "a check changed a fold"


def check_round_trip(log: Sequence[Event]) -> None:
    """What is written is what is read."""
    for event in log:
        payload = encode_event(event)
        for again in (
            decode_event(payload),
            decode_event(payload, kind=event.kind),
            Event.model_validate_json(payload),
        ):
            assert again == event
            assert type(again) is type(event)
            assert encode_event(again) == payload
