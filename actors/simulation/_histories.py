"""The world of histories: logs of any origin, event by event, and their folds.

Nothing runs concurrently here. This world checks the promises of the core, which owners rely on,
with logs that our owners would never write: calls without results, results without calls, and cuts
through the middle of related events. It also checks the graph of the turns that wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TypedDict

from turnkeeper.runtime.testing import Simulation

from ..core.properties import LogFacts
from ..core.state import Folded
from ..core.view import View
from ..events import (
    ActionEvent,
    CondensationEvent,
    Event,
    ObservationEvent,
    RetractionEvent,
    SystemPromptEvent,
    ThinkingBlock,
    UserMessageEvent,
)
from ._oracles import INVARIANTS, PlainView
from ._states import play_waits

__all__ = ["HistoryWorld"]

_EVENTS = 48
_LENGTH = 12
_TRIES = 3
_CALLS = 4
_RESPONSES = 3
_CUT_MAX = 3
_BEGIN = datetime(2025, 1, 1, tzinfo=UTC)
_THINKING = (ThinkingBlock(thinking="hm", signature="signed"),)


class _Stamp(TypedDict):
    """The fields that every event has."""

    id: str
    timestamp: datetime


class HistoryWorld:
    """One run of it: a few short logs."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    async def play(self) -> None:
        """Draw logs, and check the folds of each of their prefixes."""
        play_waits(self._simulation)
        left = _EVENTS
        while left > 0:
            left -= self._play_one()
            await self._simulation.sleep(0.0)

    def _play_one(self) -> int:
        """Play one log, up to the first event that breaks a property; return its length."""
        log: list[Event] = []
        state, plain, facts = Folded(), PlainView(), LogFacts()
        view, shown, ids = state.view, tuple(state.view), plain.ids
        for n in range(1, _LENGTH + 1):
            event = self._next(n, state)
            log.append(event)
            state.fold(event)
            plain.fold(event)
            facts.fold(event)
            if tuple(view) != shown:
                self._broken("V6", f"{_brief(log)}: the view of {ids} has changed")
            view = state.view
            shown = tuple(view)
            ids = tuple([each.id for each in shown])
            if ids != plain.ids:
                self._broken("V6", f"{_brief(log)}: {ids}, not {plain.ids}")
            gone = facts.find_violations(view)
            kept = [each for each in shown if each.id not in gone] if gone else shown
            unanswered = _unanswered(kept)
            if not unanswered <= _pending(log):
                self._broken("V7", f"{_brief(log)}: {sorted(unanswered)} have no result")
            loaded = [each.id for each in View.from_events(log)]
            if loaded != [each.id for each in kept]:
                self._broken("V7", f"{_brief(log)}: {loaded}, not {[each.id for each in kept]}")
            if gone:
                break  # from here on, every load reads the whole log
        return len(log)

    def _next(self, n: int, state: Folded) -> Event:
        """Draw the next event, mostly one that admission would allow."""
        event = self._event(n, state)
        if self._simulation.chance("is of elsewhere", 0.3):
            return event
        for _ in range(_TRIES):
            if state.admission.check((event,)) is None:
                break
            event = self._event(n, state)
        return event

    def _broken(self, invariant: str, detail: str) -> None:
        self._simulation.broken(invariant, f"{INVARIANTS[invariant]}: {detail}")

    def _event(self, n: int, state: Folded) -> Event:
        """Draw the next event."""
        simulation, view = self._simulation, state.view
        stamp = _Stamp(id=f"e{n:02}", timestamp=_BEGIN + timedelta(seconds=n))
        match simulation.pick(
            "event",
            (
                "call",
                "result",
                "result",
                "result",
                "call",
                "call",
                "cut",
                "cut",
                "taken back",
                "taken back",
                "taken back",
                "message",
                "prompt",
            ),
        ):
            case "call":
                return ActionEvent(
                    **stamp,
                    tool_call_id=f"c{simulation.draw('call', _CALLS)}",
                    tool_name="act",
                    llm_response_id=f"r{simulation.draw('response', _RESPONSES)}",
                    thinking=_THINKING if simulation.chance("thinks", 0.5) else (),
                )
            case "result":
                calls = (*state.admission.open_calls, f"c{simulation.draw('call', _CALLS)}")
                call = simulation.pick("result of", calls)
                return ObservationEvent(**stamp, tool_call_id=call, content="done")
            case "prompt":
                first = simulation.chance("goes first", 0.7)
                return SystemPromptEvent(**stamp, content="be kind", goes_first=first)
            case "cut" if view:
                start = simulation.draw("from", len(view))
                size = simulation.draw("so many", _CUT_MAX)
                cut = tuple(each.id for each in view[start : start + size])
                has_summary = simulation.chance("with a summary", 0.6)
                left = len(view) - len(cut)
                return CondensationEvent(
                    **stamp,
                    forgotten_event_ids=cut,
                    summary="a summary" if has_summary else None,
                    summary_offset=simulation.draw("offset", left + 1) if has_summary else None,
                )
            case "taken back" if view:
                start = simulation.draw("from", len(view))
                size = 1 + simulation.draw("so many", _CUT_MAX)
                return RetractionEvent(
                    **stamp,
                    retracted_event_ids=tuple(each.id for each in view[start : start + size]),
                )
            case _:
                return UserMessageEvent(**stamp, content="hello")


def _unanswered(view: Sequence[Event]) -> set[str]:
    """Return the calls in a view that have no result there, by their event ids."""
    answered = {each.tool_call_id for each in view if type(each) is ObservationEvent}
    calls = [each for each in view if type(each) is ActionEvent]
    return {call.id for call in calls if call.tool_call_id not in answered}


def _pending(log: Sequence[Event]) -> set[str]:
    """Return the calls after which only results and calls of their response have come.

    They may wait for their results, unless the log took up an old response.
    """
    pending: set[str] = set()
    newest = None
    for event in reversed(log):
        if type(event) is ActionEvent and newest in (None, event.llm_response_id):
            newest = event.llm_response_id
            pending.add(event.id)
        elif event.kind not in {"observation", "condensation", "retraction"}:
            break
    return pending


def _brief(log: list[Event]) -> str:
    return ", ".join(f"{event.kind} {event.id}" for event in log)
