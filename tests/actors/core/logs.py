"""Logs for the tests of the conversation core: made by hand, admissible ones, and wild ones.

Ids and times are counted, so the same moves make the same log in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st

from tests.actors.core import oracles
from turnkeeper.actors.events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationEvent,
    CondensationRequestEvent,
    CondensationSummaryEvent,
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    ConversationChangedEvent,
    ConversationErrorEvent,
    Event,
    ForkedFromEvent,
    ImageContent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    ObservationEvent,
    PausedEvent,
    ResumedEvent,
    RetractionEvent,
    StatusChangedEvent,
    StepFinishedEvent,
    StepRequest,
    StepUnfinishedEvent,
    SystemPromptEvent,
    Task,
    TaskListUpdatedEvent,
    ThinkingBlock,
    TokenUsage,
    TurnEndedEvent,
    TurnStartedEvent,
    UnknownEvent,
    UserMessageEvent,
    UserRejectEvent,
    decode_event,
)
from turnkeeper.actors.values.frozen import FrozenObject

_BEGIN = datetime(2025, 1, 1, tzinfo=UTC)
_THINKING = (ThinkingBlock(thinking="hm", signature="signed"),)


class Maker:
    """Makes events with counted ids: `e1`, `e2` and so on."""

    def __init__(self, prefix: str = "e") -> None:
        self._prefix = prefix
        self._count = 0

    def stamp(self) -> dict[str, Any]:
        self._count += 1
        return {
            "id": f"{self._prefix}{self._count}",
            "timestamp": _BEGIN + timedelta(seconds=self._count),
        }

    def system(self, text: str = "be kind", *, goes_first: bool = False) -> SystemPromptEvent:
        return SystemPromptEvent(**self.stamp(), content=text, goes_first=goes_first)

    def user(self, text: str = "hello", **fields: Any) -> UserMessageEvent:  # noqa: ANN401 - each event has its own
        return UserMessageEvent(**self.stamp(), content=text, **fields)

    def agent(self, text: str = "hi", **fields: Any) -> AgentMessageEvent:  # noqa: ANN401 - each event has its own
        return AgentMessageEvent(**self.stamp(), content=text, **fields)

    def action(
        self,
        call_id: str,
        response_id: str = "r1",
        *,
        thinking: bool = False,
        **fields: Any,  # noqa: ANN401 - each event has its own
    ) -> ActionEvent:
        return ActionEvent(
            **self.stamp(),
            tool_call_id=call_id,
            tool_name=fields.pop("tool_name", "look"),
            llm_response_id=response_id,
            thinking=_THINKING if thinking else (),
            **fields,
        )

    def result(self, call_id: str, text: str = "seen", **fields: Any) -> ObservationEvent:  # noqa: ANN401 - each event has its own
        return ObservationEvent(**self.stamp(), tool_call_id=call_id, content=text, **fields)

    def error(self, call_id: str, text: str = "no result") -> AgentErrorEvent:
        return AgentErrorEvent(**self.stamp(), tool_call_id=call_id, content=text)

    def reject(self, call_id: str) -> UserRejectEvent:
        return UserRejectEvent(**self.stamp(), tool_call_id=call_id, content="no")

    def condense(
        self,
        *forgotten: Event | str,
        summary: str | None = None,
        offset: int | None = None,
        shortened: Mapping[str, int] | None = None,
    ) -> CondensationEvent:
        ids = tuple(each if isinstance(each, str) else each.id for each in forgotten)
        return CondensationEvent(
            **self.stamp(),
            forgotten_event_ids=ids,
            summary=summary,
            summary_offset=offset,
            shortened=FrozenObject(shortened or {}),
        )

    def request(self) -> CondensationRequestEvent:
        return CondensationRequestEvent(**self.stamp())

    def retract(self, *retracted: Event | str) -> RetractionEvent:
        ids = tuple(each if isinstance(each, str) else each.id for each in retracted)
        return RetractionEvent(**self.stamp(), retracted_event_ids=ids)

    def unknown(self) -> UnknownEvent:
        stamp = self.stamp()
        event = decode_event(
            f'{{"kind":"from_the_future","id":"{stamp["id"]}",'
            f'"timestamp":"2030-01-01T00:00:00Z","left":[1,{{"so":2.5}}]}}'
        )
        assert isinstance(event, UnknownEvent)
        return event


Move = tuple[str, int, int]

# What changes the view is drawn more often than what does not.
MOVES = (
    *("user", "agent", "response") * 4,
    *("answer",) * 9,
    *("condense", "other") * 4,
    *("more", "retract", "request", "system", "fork"),
)


def moves(max_size: int = 40) -> st.SearchStrategy[list[Move]]:
    """What to do next, again and again; a log is made of it by `Admissible`."""
    one = st.tuples(st.sampled_from(MOVES), st.integers(0, 11), st.integers(0, 11))
    return st.lists(one, min_size=max_size // 4, max_size=max_size)


class Admissible:
    """Plays moves, and leaves out those that would not be admitted.

    It knows what is admissible from the oracles alone, never from the code under test.
    """

    def __init__(self, log: Sequence[Event] = (), prefix: str = "e") -> None:
        self.log: list[Event] = list(log)
        self._make = Maker(prefix)
        self._prefix = prefix
        self._count = 0

    def play(self, moves: Sequence[Move]) -> list[Event]:
        for name, a, b in moves:
            move: Callable[[int, int], Sequence[Event]] = getattr(self, f"_{name}")
            self.log.extend(move(a, b))
        return self.log

    def _fresh(self, what: str) -> str:
        self._count += 1
        return f"{self._prefix}{what}{self._count}"

    def _user(self, a: int, b: int) -> Sequence[Event]:
        if oracles.open_calls(self.log):
            return ()
        images = (ImageContent(url="https://example.org/a.png"),) if a == 0 else ()
        return (self._make.user(f"u{a}" if b else "", images=images),)

    def _agent(self, a: int, b: int) -> Sequence[Event]:
        if oracles.open_calls(self.log):
            return ()
        thinking = _THINKING if b == 0 else ()
        return (self._make.agent(f"a{a}", thinking=thinking, interrupted=b == 1),)

    def _system(self, a: int, b: int) -> Sequence[Event]:
        if oracles.open_calls(self.log):
            return ()
        return (self._make.system(f"be kind {b}", goes_first=a % 2 == 0),)

    def _response(self, a: int, b: int) -> Sequence[Event]:
        if oracles.open_calls(self.log):
            return ()
        response_id = self._fresh("r")
        return tuple(
            self._make.action(
                self._fresh("c"),
                response_id,
                thinking=n == 0 and b % 3 == 0,
                text="let me look" if n == 0 and b % 2 else "",
                arguments={"at": [a, {"deep": b}]},
            )
            for n in range(1 + a % 3)
        )

    def _more(self, a: int, b: int) -> Sequence[Event]:
        response_id = oracles.running_response(self.log)
        if response_id is None:
            return ()
        return (self._make.action(self._fresh("c"), response_id, thinking=b == 0),)

    def _answer(self, a: int, b: int) -> Sequence[Event]:
        calls = oracles.open_calls(self.log)
        if not calls:
            return ()
        call_id = calls[a % len(calls)]
        match b % 3:
            case 0:
                return (self._make.error(call_id),)
            case 1:
                return (self._make.reject(call_id),)
            case _:
                text = "seen" if b % 2 else "seen " * 20
                return (self._make.result(call_id, text, is_error=b > 6),)

    def _request(self, a: int, b: int) -> Sequence[Event]:
        return (self._make.request(),)

    def _condense(self, a: int, b: int) -> Sequence[Event]:
        view, _ = oracles.fold(self.log)
        cuts = oracles.indices(view)
        at = a % len(cuts)
        if b == 11:
            only_a_summary = self._make.condense(summary="s", offset=cuts[at])
            return () if oracles.admit(self.log, only_a_summary) else (only_a_summary,)
        results = [event for event in view if isinstance(event, oracles.RESULTS)]
        if b == 10 and results:
            result = results[a % len(results)]
            shorter = self._make.condense(shortened={result.id: a % 3})
            return () if oracles.admit(self.log, shorter) else (shorter,)
        later = cuts[at + 1 :]
        if not later:
            return ()
        start, end = cuts[at], later[b % len(later)]
        if (a + b) % 3:
            return (self._make.condense(*view[start:end], summary=f"s{a}", offset=start),)
        return (self._make.condense(*view[start:end]),)

    def _retract(self, a: int, b: int) -> Sequence[Event]:
        view, _ = oracles.fold(self.log)
        if not view or oracles.open_calls(self.log):
            return ()
        ids = oracles.closure(view, {view[a % len(view)].id, view[b % len(view)].id})
        taken = [event for event in view if event.id in ids]
        if any(isinstance(event, CondensationSummaryEvent) for event in taken):
            return ()
        return (self._make.retract(*taken),)

    def _fork(self, a: int, b: int) -> Sequence[Event]:
        begun = ForkedFromEvent(**self._make.stamp(), conversation_id="parent", seq=len(self.log))
        calls = oracles.open_calls(self.log)
        return (begun, *(self._make.error(call_id, "not run here") for call_id in calls))

    def _other(self, a: int, b: int) -> Sequence[Event]:
        stamp = self._make.stamp
        turn: dict[str, Any] = {"turn_id": f"t{b % 2}"}
        message = f"m{b}"
        match a:
            case 0:
                return (TurnStartedEvent(**stamp(), **turn),)
            case 1:
                return (TurnEndedEvent(**stamp(), **turn, outcome="completed"),)
            case 2:
                usage = TokenUsage(input_tokens=b, output_tokens=1, cost=0.5)
                if b % 2:
                    asked = StepRequest(view_seq=b, model="m")
                    cut = StepUnfinishedEvent(**stamp(), **turn, outcome="failed", request=asked)
                    return (cut,)
                return (StepFinishedEvent(**stamp(), **turn, usage=usage),)
            case 3:
                tasks = (Task(description=f"task {b}", done=b > 5),)
                return (TaskListUpdatedEvent(**stamp(), tasks=tasks),)
            case 4:
                return (MessageQueuedEvent(**stamp(), **turn, message_id=message, content="q"),)
            case 5:
                return (MessageWithdrawnEvent(**stamp(), **turn, message_id=message),)
            case 6:
                return (PausedEvent(**stamp()), ResumedEvent(**stamp()))
            case 7:
                waits = ConfirmationRequestedEvent(**stamp(), tool_call_ids=("c1",))
                return (waits, ConfirmationGivenEvent(**stamp(), confirmed=b > 5))
            case 8:
                return (StatusChangedEvent(**stamp(), status="STUCK"),)
            case 9:
                return (ConversationErrorEvent(**stamp(), error="SomeError", detail="so"),)
            case 10:
                labels = FrozenObject({f"label {b}": None if a % 2 else "x"})
                change = ConversationChangedEvent(**stamp(), title=f"title {a}", labels=labels)
                return (self._make.unknown(), change)
            case _:
                return (TurnEndedEvent(**stamp(), **turn, outcome="failed", detail="x"),)


admissible_logs: st.SearchStrategy[list[Event]] = moves().map(
    lambda drawn: Admissible().play(drawn)
)


@st.composite
def wild_logs(draw: st.DrawFn, max_size: int = 24, ids_max: int = 4) -> list[Event]:
    """Logs from elsewhere: few ids, used again and again, in any order."""
    make = Maker("w")
    log: list[Event] = []
    call_ids = st.integers(1, ids_max).map("c{}".format)
    response_ids = st.integers(1, ids_max).map("r{}".format)
    for _ in range(draw(st.integers(max_size // 4, max_size))):
        ids = [event.id for event in log] or ["nowhere"]
        match draw(st.integers(0, 15)):
            case 0 | 1:
                event: Event = make.user("what a user said")
            case 2:
                event = make.agent("what an agent said")
            case 3 | 4 | 5 | 6:
                event = make.action(
                    draw(call_ids), draw(response_ids), thinking=draw(st.booleans())
                )
            case 7 | 8 | 9:
                event = make.result(draw(call_ids))
            case 10:
                event = make.error(draw(call_ids))
            case 11:
                event = make.reject(draw(call_ids))
            case 12:
                forgotten = draw(st.lists(st.sampled_from(ids), max_size=4))
                offset = draw(st.none() | st.integers(0, 30))
                shortened = draw(
                    st.dictionaries(st.sampled_from(ids), st.integers(0, 90), max_size=2)
                )
                event = make.condense(
                    *forgotten,
                    summary=draw(st.none() | st.just("sum")),
                    offset=offset,
                    shortened=shortened,
                )
            case 13:
                event = make.retract(*draw(st.lists(st.sampled_from(ids), max_size=3)))
            case 14:
                event = make.system() if draw(st.booleans()) else make.unknown()
            case _:
                # Once more, as a bulk copy that was begun twice leaves it.
                event = draw(st.sampled_from(log)) if log else make.request()
        log.append(event)
    return log


@st.composite
def candidates(draw: st.DrawFn, log: Sequence[Event]) -> list[Event]:
    """Events that might be sent after this log, right and wrong ones."""
    make = Maker("x")
    actions = [event for event in log if isinstance(event, ActionEvent)]
    call_ids = st.sampled_from([*(event.tool_call_id for event in actions), "nowhere"])
    response_ids = st.sampled_from([*(event.llm_response_id for event in actions), "new"])
    ids = st.lists(st.sampled_from([*(event.id for event in log), "nowhere"]), max_size=4)
    view, _ = oracles.fold(log)
    places = st.integers(0, len(view))
    start, end = sorted((draw(places), draw(places)))
    run = view[start:end]
    return [
        make.user(),
        make.agent(),
        make.system(),
        make.action(draw(call_ids), draw(response_ids)),
        make.action("fresh", draw(response_ids), thinking=True),
        make.result(draw(call_ids)),
        make.action("later", oracles.running_response(log) or "later"),
        make.error(draw(call_ids)),
        make.condense(*draw(ids)),
        make.condense(*draw(ids), summary="s", offset=draw(places)),
        make.condense(*run, summary="s", offset=start),
        make.condense(*run, summary="s", offset=end),
        make.condense(*run, summary="s", offset=99),
        make.condense(*run),
        make.condense(shortened=dict.fromkeys(draw(ids), draw(st.integers(0, 90)))),
        make.retract(*draw(ids)),
        make.retract(*run),
        make.unknown(),
        CondensationSummaryEvent(**make.stamp(), content="s"),
    ]
