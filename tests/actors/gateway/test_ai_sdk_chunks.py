"""A turn as chunks: whatever pieces came before, the message in the end is what the log has."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkeeper.actors import LoggedEvent, TextDelta
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    Event,
    ObservationEvent,
    TurnEndedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.gateway.ai_sdk import TurnChunks, UiMessage, client_id_of, next_version

TURN = "turn"
Item = Event | TextDelta


def shown(items: list[Item]) -> UiMessage:
    """Return the message of a client that has read these."""
    turn, message, seqs = TurnChunks(TURN), UiMessage(), count(1)
    for item in (UserMessageEvent(content="hello", turn_id=TURN), *items):
        at = item if isinstance(item, TextDelta) else LoggedEvent(next(seqs), item)
        for chunk in turn.take(at):
            message.fold(chunk)
    return message


def piece(text: str, *, answer: int = 0, attempt: int = 1, offset: int = 0) -> TextDelta:
    return TextDelta(1, TURN, answer, attempt, offset, text)


def said(content: str) -> AgentMessageEvent:
    return AgentMessageEvent(content=content, turn_id=TURN)


def texts(message: UiMessage) -> list[object]:
    return [part["text"] for part in message.parts if part["type"] == "text"]


def test_pieces_and_then_the_event_are_shown_once() -> None:
    assert texts(shown([piece("ab"), piece("cd", offset=2), said("abcd")])) == ["abcd"]


def test_a_piece_that_reaches_back_adds_what_is_new() -> None:
    assert texts(shown([piece("ab"), piece("abcd"), piece("de", offset=3)])) == ["abcde"]


def test_an_answer_that_begins_anew_takes_its_step_back() -> None:
    items: list[Item] = [piece("wrong"), piece("right", attempt=2), piece("x", attempt=1, offset=5)]
    assert texts(shown(items)) == ["right"]


def test_an_answer_that_is_said_otherwise_replaces_what_was_written() -> None:
    assert texts(shown([piece("written"), said("said")])) == ["said"]
    assert texts(shown([piece("written"), said("")])) == []


def test_what_was_written_and_never_said_is_taken_back_at_the_end() -> None:
    ended = TurnEndedEvent(outcome="failed", turn_id=TURN)
    assert texts(shown([said("first"), piece("lost", answer=1), ended])) == ["first"]


@pytest.mark.parametrize("rest", [[piece("right", attempt=2)], [said("right")], []])
def test_a_message_that_steers_stays_when_the_text_before_it_is_taken_back(
    rest: list[Item],
) -> None:
    """The text was of an owner that was killed; the next one began its answer with the message."""
    steering = UserMessageEvent(content="also", message_id="m2", turn_id=TURN)
    ended = TurnEndedEvent(outcome="completed", turn_id=TURN)

    message = shown([piece("wrong"), steering, *rest, ended])

    assert [part["id"] for part in message.parts if part["type"] == "steering-message"] == ["m2"]
    assert "wrong" not in texts(message)


def test_the_calls_of_one_response_are_in_one_step_with_its_text() -> None:
    def call(n: int, response: str) -> ActionEvent:
        return ActionEvent(
            tool_call_id=f"c{n}",
            tool_name="look",
            llm_response_id=response,
            text="Let me see." if n == 1 else "",
            turn_id=TURN,
        )

    items: list[Item] = [piece("Let me"), call(1, "r1"), call(2, "r1")]
    items += [ObservationEvent(tool_call_id=f"c{n}", content="x", turn_id=TURN) for n in (1, 2)]
    message = shown([*items, call(3, "r2")])

    kinds = [part["type"] for part in message.parts]
    assert kinds == [
        *("step-start", "text", "dynamic-tool", "dynamic-tool"),
        *("step-start", "dynamic-tool"),
    ]


@st.composite
def written(draw: st.DrawFn) -> tuple[list[Item], list[str]]:
    """Answers, each written in pieces over some attempts, and the texts that the log has."""
    items: list[Item] = []
    wanted = []
    for answer in range(draw(st.integers(1, 3))):
        for attempt in range(1, draw(st.integers(1, 3)) + 1):
            offset = 0
            for text in draw(st.lists(st.text("ab", min_size=1, max_size=3), max_size=3)):
                items.append(piece(text, answer=answer, attempt=attempt, offset=offset))
                offset += len(text)
        content = draw(st.text("ab", max_size=8))
        items.append(said(content))
        wanted += [content] if content else []
    return items, wanted


@given(written())
def test_after_any_pieces_the_message_is_what_the_log_has(
    case: tuple[list[Item], list[str]],
) -> None:
    items, wanted = case
    without_pieces: list[Item] = [item for item in items if isinstance(item, Event)]

    assert texts(shown(items)) == wanted
    assert shown(items).parts == shown(without_pieces).parts


@given(st.text("abc-_:", min_size=1), st.integers(1, 30))
def test_each_version_of_a_message_is_known_to_its_client_under_one_id(name: str, n: int) -> None:
    versions = [name]
    for _ in range(n):
        versions.append(next_version(versions[-1]))

    assert len(set(versions)) == n + 1
    assert {client_id_of(version) for version in versions} == {name}
