"""A turn as a run: whatever pieces came, wherever it was cut, the screen is the transcript."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import count
from typing import Any

import pytest
from ag_ui.core import BaseEvent
from hypothesis import given
from hypothesis import strategies as st

from turnkeeper.actors import LoggedEvent, TextDelta
from turnkeeper.actors.core.snapshots import run_whole
from turnkeeper.actors.core.transcript import Transcript
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    Event,
    MessageQueuedEvent,
    ObservationEvent,
    RetractionEvent,
    TurnEndedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.gateway.ag_ui import (
    Out,
    Progress,
    RunCursor,
    RunEvents,
    Show,
    parse_run_cursor,
)
from turnkeeper.actors.gateway.ag_ui_messages import ag_ui_messages
from turnkeeper.actors.gateway.names import Cursor

TURN = "turn"
Item = LoggedEvent | TextDelta
Written = Sequence[Event | TextDelta]


class Screen:
    """The messages of a client, made of events as the stock client makes them, order checked."""

    def __init__(self, messages: Sequence[dict[str, Any]] = ()) -> None:
        self.messages = deepcopy(list(messages))
        self.open: set[str] = set()
        self.is_over = False

    def fold(self, event: BaseEvent) -> None:
        data = event.model_dump(mode="json", by_alias=True)
        kind = data["type"]
        key = data.get("toolCallId") or data.get("messageId") or ""
        assert not self.is_over, kind
        if kind.endswith("_START"):
            assert key not in self.open, data
            self.open.add(key)
        elif kind.endswith(("_CONTENT", "_ARGS", "_END")):
            assert key in self.open, data
        match kind:
            case "TEXT_MESSAGE_START":
                if not any(message["id"] == key for message in self.messages):
                    self.messages.append({"id": key, "role": "assistant", "content": ""})
            case "TEXT_MESSAGE_CONTENT":
                message = next(message for message in self.messages if message["id"] == key)
                message["content"] += data["delta"]
            case "TOOL_CALL_START":
                self._start_call(key, data)
            case "TOOL_CALL_ARGS":
                self._call(key)["function"]["arguments"] += data["delta"]
            case "TOOL_CALL_RESULT":
                result = {name: data[name] for name in ("toolCallId", "role", "content")}
                self.messages.append({"id": data["messageId"], **result})
            case "MESSAGES_SNAPSHOT":
                self._replace(data["messages"])
            case "RUN_FINISHED":
                assert not self.open, self.open
                self.is_over = True
            case _ if kind.endswith("_END"):
                self.open.discard(key)
            case _:
                assert kind == "RUN_STARTED", kind

    def _replace(self, messages: list[dict[str, Any]]) -> None:
        by_id = {message["id"]: message for message in messages}
        kept = [by_id.pop(old["id"]) for old in self.messages if old["id"] in by_id]
        self.messages = [*kept, *by_id.values()]

    def _start_call(self, call_id: str, data: dict[str, Any]) -> None:
        if self._call(call_id):
            return
        parent = data["parentMessageId"]
        if not any(message["id"] == parent for message in self.messages):
            self.messages.append({"id": parent, "role": "assistant"})
        message = next(message for message in self.messages if message["id"] == parent)
        function = {"name": data["toolCallName"], "arguments": ""}
        call = {"id": call_id, "type": "function", "function": function}
        message.setdefault("toolCalls", []).append(call)

    def _call(self, call_id: str) -> dict[str, Any]:
        calls = [call for message in self.messages for call in message.get("toolCalls", ())]
        return next((call for call in calls if call["id"] == call_id), {})


def logged(written: Written) -> list[Item]:
    """Return these with their places in the log."""
    seqs = count(1)
    return [at if isinstance(at, TextDelta) else LoggedEvent(next(seqs), at) for at in written]


def log_of(items: Sequence[Item]) -> list[LoggedEvent]:
    return [item for item in items if isinstance(item, LoggedEvent)]


def stream(
    items: Sequence[Item], log: Sequence[LoggedEvent], *, after: Progress | None = None
) -> Iterator[Out]:
    """Yield what a server writes that has this log.

    Pieces may come before events that the client has: another process that writes them lags behind.
    """
    transcript = Transcript.of(log)
    run = RunEvents("chat", "r1", "m1", head=len(log), awaiting=(), after=after)
    for item in items:
        if run.has_ended:
            return
        for out in run.take(item):
            if isinstance(out, Show):
                yield from filter(None, run.show(out, transcript))
            else:
                yield out


def shown(messages: Sequence[Any]) -> list[dict[str, Any]]:
    return [message.model_dump(mode="json", by_alias=True) for message in messages]


def begun() -> Event:
    return UserMessageEvent(content="hello", message_id="m1", turn_id=TURN, id="begun")


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """The events of a turn: answers in words, and responses with calls and their results."""
    events: list[Event] = [begun()]
    ids = count()
    for n in range(draw(st.integers(1, 3))):
        content = draw(st.text("ab", max_size=6))
        if draw(st.booleans()):
            events.append(AgentMessageEvent(content=content, turn_id=TURN, id=f"e{next(ids)}"))
            continue
        calls = [f"c{n}-{k}" for k in range(draw(st.integers(1, 2)))]
        events += [
            ActionEvent(
                tool_call_id=call,
                tool_name="look",
                llm_response_id=f"r{n}",
                text="" if k else content,
                turn_id=TURN,
                id=f"e{next(ids)}",
            )
            for k, call in enumerate(calls)
        ]
        events += [
            ObservationEvent(tool_call_id=call, content="x", turn_id=TURN, id=f"e{next(ids)}")
            for call in calls
        ]
    return [*events, TurnEndedEvent(outcome="completed", turn_id=TURN, id="ended")]


def with_pieces(draw: st.DrawFn, events: Sequence[Event], epoch: int) -> list[Event | TextDelta]:
    """Put pieces before each answer: of the answer itself, or of attempts that said otherwise."""
    written: list[Event | TextDelta] = []
    answer, response = 0, None
    for event in events:
        if isinstance(event, TurnEndedEvent) and draw(st.booleans()):
            written.append(TextDelta(epoch, TURN, answer, 1, 0, "lost"))  # it was never said
        begins = isinstance(event, AgentMessageEvent) or (
            isinstance(event, ActionEvent) and event.llm_response_id != response
        )
        if begins:
            text = event.content if isinstance(event, AgentMessageEvent) else event.text  # type: ignore[attr-defined]  # the other kind
            for attempt in range(1, draw(st.integers(1, 3))):
                said = draw(st.sampled_from([text, text[:2], "ba", "abab"]))
                offset = 0
                while offset < len(said):
                    length = draw(st.integers(1, 3))
                    part = said[offset : offset + length]
                    written.append(TextDelta(epoch, TURN, answer, attempt, offset, part))
                    offset += len(part)
            answer += 1
        response = getattr(event, "llm_response_id", None) if begins else response
        written.append(event)
    return written


@st.composite
def two_streams(draw: st.DrawFn) -> tuple[list[Item], list[Item]]:
    """One turn as two servers stream it: the second one took over, and asked the model again."""
    events = draw(answers())
    first = logged(with_pieces(draw, events, 1))
    return first, logged(with_pieces(draw, events, 2))


@given(two_streams())
def test_after_any_pieces_the_screen_is_the_transcript(
    case: tuple[list[Item], list[Item]],
) -> None:
    for items in case:
        log = log_of(items)
        screen = Screen([{"id": "m1", "role": "user", "content": "hello"}])
        for out in stream(items, log):
            screen.fold(out.event)

        assert screen.is_over
        assert screen.messages == shown(run_whole(ag_ui_messages(Transcript.of(log))))


@pytest.mark.parametrize("undone", [None, TURN, "another"])
@given(case=two_streams(), data=st.data())
def test_a_client_that_comes_back_from_any_event_shows_the_transcript(
    case: tuple[list[Item], list[Item]], data: st.DataObject, undone: str | None
) -> None:
    first, second = case
    length = len(list(stream(first, log_of(first))))
    check_cut(first, second, data.draw(st.integers(1, length - 1)), undone=undone)


def test_the_text_of_a_call_stays_shown_if_another_turn_is_taken_back_meanwhile() -> None:
    """The client was cut between the text and the call, and the snapshot for it had neither."""
    action = ActionEvent(
        tool_call_id="c", tool_name="look", llm_response_id="r", text="I look", turn_id=TURN
    )
    result = ObservationEvent(tool_call_id="c", content="x", turn_id=TURN)
    ended = TurnEndedEvent(outcome="completed", turn_id=TURN)
    items = logged([begun(), action, result, ended])

    for cut in range(1, len(list(stream(items, log_of(items))))):
        check_cut(items, items, cut, undone="another")


def test_another_turn_that_is_taken_back_leaves_the_screen_of_a_run_that_goes_on() -> None:
    """A turn has its own events alone, so the run was not told of it."""
    earlier = UserMessageEvent(content="earlier", message_id="m0", turn_id="other", id="earlier")
    said = [AgentMessageEvent(content=text, turn_id=TURN) for text in ("one", "two")]
    retraction = RetractionEvent(retracted_event_ids=(earlier.id,))
    ended = TurnEndedEvent(outcome="completed", turn_id=TURN)
    events = (*said, ended)
    for n in range(len(events)):
        log = log_of(logged([earlier, begun(), *events[:n], retraction, *events[n:]]))
        run = RunEvents("chat", "r1", "m1", head=2, awaiting=(), after=None)
        screen = Screen()
        for item in log:
            if item.event.turn_id == TURN:
                for out in run.take(item):
                    written = Transcript.of(log[: item.seq])
                    shown_now = run.show(out, written) if isinstance(out, Show) else (out,)
                    for each in filter(None, shown_now):
                        screen.fold(each.event)

        assert screen.is_over
        assert screen.messages == shown(run_whole(ag_ui_messages(Transcript.of(log))))


def test_a_client_that_is_cut_at_any_event_gets_back_what_was_taken_back() -> None:
    """The answer is written twice, said otherwise, and another one is begun and never said."""
    said = AgentMessageEvent(content="right", turn_id=TURN, id="said")
    ended = TurnEndedEvent(outcome="completed", turn_id=TURN, id="ended")
    texts = [TextDelta(1, TURN, 0, n, 0, text) for n, text in ((1, "wrong"), (2, "wronger"))]
    lost = TextDelta(1, TURN, 1, 1, 0, "lost")
    first = logged([begun(), *texts, said, lost, ended])
    length = len(list(stream(first, log_of(first))))

    assert length > 15
    for second in (logged([begun(), said, ended]), first):
        for cut in range(1, length):
            check_cut(first, second, cut)


def check_cut(
    first: Sequence[Item], second: Sequence[Item], cut: int, *, undone: str | None = None
) -> None:
    """Check what a client shows that is cut off from the first stream, and gets the second one.

    `undone`: the turn that is taken back meanwhile.
    """
    log = log_of(first)
    outs = list(stream(first, log))
    screen = Screen()
    for out in outs[:cut]:
        screen.fold(out.event)
    after = outs[cut - 1].progress
    assert after is not None
    if undone is not None:
        ids = tuple(event.id for _, event in log if not isinstance(event, TurnEndedEvent))
        ids = ids if undone == TURN else (undone,)
        log = [*log, LoggedEvent(len(log) + 1, RetractionEvent(retracted_event_ids=ids))]

    rest = list(stream(second, log, after=after))
    reloaded = Screen(screen.messages)
    for out in rest:
        reloaded.fold(out.event)
    is_new = False
    for out in rest:
        # What opens again comes first, and is left out where it is open.
        assert is_new <= (out.progress is not None)
        is_new = is_new or out.progress is not None
        if is_new:
            screen.fold(out.event)

    wanted = shown(run_whole(ag_ui_messages(Transcript.of(log))))
    assert reloaded.messages == screen.messages == wanted
    assert reloaded.is_over
    assert screen.is_over


def test_a_text_that_is_written_again_goes_on_behind_what_the_client_has() -> None:
    said = AgentMessageEvent(content="so far, so good", turn_id=TURN)
    ended = TurnEndedEvent(outcome="completed", turn_id=TURN)
    first = logged([begun(), TextDelta(1, TURN, 0, 1, 0, "so far, "), said, ended])
    log = log_of(first)
    progress = next(
        out.progress for out in stream(first, log) if out.event.type == "TEXT_MESSAGE_CONTENT"
    )

    pieces = [
        TextDelta(2, TURN, 0, 1, 0, "so"),
        TextDelta(2, TURN, 0, 1, 2, " far, so"),
        TextDelta(2, TURN, 0, 1, 10, " good"),
    ]
    rest = list(stream(logged([begun(), *pieces, said, ended]), log, after=progress))

    assert [out.event.type for out in rest] == [
        "RUN_STARTED",
        "TEXT_MESSAGE_START",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_END",
        "RUN_FINISHED",
    ]
    deltas = [getattr(out.event, "delta", "") for out in rest]
    assert [delta for delta in deltas if delta] == ["so", " good"]


def test_pieces_before_an_event_that_the_client_has_are_the_beginning_of_those_after_it() -> None:
    """They come from a process that lags; the event has not ended the answer."""
    queued = MessageQueuedEvent(content="later", message_id="m2", turn_id="next")
    said = AgentMessageEvent(content="so far, so very good", turn_id=TURN)
    ended = TurnEndedEvent(outcome="completed", turn_id=TURN)
    pieces = [TextDelta(1, TURN, 0, 1, 0, "so far, "), TextDelta(1, TURN, 0, 1, 8, "so very good")]
    first = logged([begun(), queued, pieces[0], said, ended])
    log = log_of(first)
    progress = next(
        out.progress for out in stream(first, log) if out.event.type == "TEXT_MESSAGE_CONTENT"
    )

    late = logged([begun(), pieces[0], queued, pieces[1], said, ended])
    rest = list(stream(late, log, after=progress))

    assert [out.event.type for out in rest] == [
        "RUN_STARTED",
        "TEXT_MESSAGE_START",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_END",
        "RUN_FINISHED",
    ]
    assert getattr(rest[2].event, "delta", None) == "so very good"


@pytest.mark.parametrize("seq", [3, 4])
def test_pieces_of_a_turn_that_was_rolled_back_are_of_no_later_turn(seq: int) -> None:
    """They come from a process that lags, before the event with which the message waits again."""
    queued = MessageQueuedEvent(content="hello", message_id="m1", turn_id="own", steers=TURN)
    again = MessageQueuedEvent(content="hello", message_id="m1", turn_id="next", queued_again=True)
    joined = UserMessageEvent(content="hello", message_id="m1", turn_id="next")
    said = AgentMessageEvent(content="said", turn_id="next")
    ended = TurnEndedEvent(outcome="completed", turn_id="next")
    lost = TextDelta(1, TURN, 0, 1, 0, "lost")
    items = logged([queued, begun(), lost, again, joined, said, ended])

    rest = list(stream(items, log_of(items), after=Progress(seq)))

    deltas = [getattr(out.event, "delta", "") for out in rest]
    assert [delta for delta in deltas if delta] == ["said"]


@given(
    st.integers(1, 1 << 53),
    st.integers(-(1 << 55), 1 << 57),
    st.text(min_size=1).filter(lambda text: text.strip() == text and text.isprintable()),
    st.builds(
        Progress,
        st.integers(0, 1 << 53),
        st.integers(0, 3),
        st.none() | st.tuples(st.integers(0, 1 << 53), st.just("0123456789abcdef")),
        st.booleans(),
    ),
)
def test_a_cursor_comes_back_as_it_was(seq: int, time: int, text: str, progress: Progress) -> None:
    cursor = RunCursor(Cursor(seq, text), time, text, progress)

    assert parse_run_cursor(str(cursor)) == cursor
    assert str(cursor).isascii()


@given(st.text())
def test_no_text_of_a_client_breaks_the_reading_of_cursors(text: str) -> None:
    assert parse_run_cursor(text) is None
