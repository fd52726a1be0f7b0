"""Events: immutable all the way down, exact over JSON, and readable in every version."""

from __future__ import annotations

import json
from copy import copy, deepcopy
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tests.actors.core.logs import Maker
from turnkeeper.actors import events
from turnkeeper.actors.core import records
from turnkeeper.actors.core.records import check_texts, write_event
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import (
    EVENT_CLASSES,
    ActionEvent,
    AgentMessageEvent,
    CondensationSummaryEvent,
    ConfirmationGivenEvent,
    Event,
    FileContent,
    ForkedFromEvent,
    ImageContent,
    LLMConvertibleEvent,
    ObservationEvent,
    StepRequest,
    Task,
    TaskListUpdatedEvent,
    ThinkingBlock,
    TokenUsage,
    TurnEndedEvent,
    UnknownEvent,
    UserMessageEvent,
    decode_event,
    encode_event,
    is_validated,
    share_fields,
)
from turnkeeper.actors.values.frozen import FrozenObject
from turnkeeper.actors.values.upcasters import Upcasters

_FIELDS: dict[str, Any] = {
    "content": "héllo \u2028 \U0001f600",
    "tool_call_id": "c1",
    "tool_name": "look",
    "llm_response_id": "r1",
    "arguments": {"at": [1, {"deep": None}], "much": 1e22, "few": -0.0},
    "thinking": (ThinkingBlock(thinking="hm", signature="s"), ThinkingBlock(thinking="")),
    "images": (ImageContent(url="data:image/png;base64,AAAA"),),
    "forgotten_event_ids": ("e1", "e2"),
    "summary": "so",
    "summary_offset": 3,
    "message_id": "m1",
    "usage": TokenUsage(input_tokens=1, cost=0.1 + 0.2, latency_s=1e-9),
    "outcome": "interrupted",
    "request": StepRequest(view_seq=3, model="m", tools_digest="d", is_plain=True),
    "response_id": "r1",
    "tool_call_ids": ("c1", "c2"),
    "confirmed": True,
    "status": "STUCK",
    "tasks": (Task(description="do", done=True),),
    "error": "SomeError",
    "retracted_event_ids": ("e1",),
    "conversation_id": "parent",
    "seq": 7,
    "turn_id": "t1",
    "author": "Ann",
    "metadata": {"from": ["app", 7]},
    "files": (FileContent.with_bytes("a.txt", "text/plain", b"hello"),),
}


def _full(event_class: type[Event]) -> Event:
    """An event of this class with every field set that has a value above."""
    fields = {name: _FIELDS[name] for name in event_class.model_fields if name in _FIELDS}
    return event_class.model_validate(Maker().stamp() | fields)


@pytest.mark.parametrize("event_class", EVENT_CLASSES.values())
def test_each_kind_comes_back_from_json_exactly(event_class: type[Event]) -> None:
    event = _full(event_class)
    payload = encode_event(event)

    for again in (
        decode_event(payload),
        decode_event(payload.decode()),
        decode_event(payload, kind=event.kind),
        Event.model_validate_json(payload),
        event_class.model_validate_json(payload),
    ):
        assert type(again) is event_class
        assert again == event
        assert encode_event(again) == payload
    assert json.loads(payload)["kind"] == event.kind


@pytest.mark.parametrize("event_class", EVENT_CLASSES.values())
def test_nothing_in_an_event_can_be_changed(event_class: type[Event]) -> None:
    event = _full(event_class)

    def check(value: object) -> None:
        hash(value)
        if isinstance(value, BaseModel):
            for name in type(value).model_fields:
                with pytest.raises(ValidationError):
                    setattr(value, name, None)
                check(getattr(value, name))
        elif isinstance(value, tuple):
            for each in value:
                check(each)
        else:
            assert value is None or isinstance(value, str | int | float | datetime | FrozenObject)

    check(event)


def test_ids_are_time_ordered_and_timestamps_are_utc_whatever_zone_they_came_in() -> None:
    events = [UserMessageEvent(content="x") for _ in range(100)]
    assert sorted(event.id for event in events) == [event.id for event in events]
    assert all(event.timestamp.tzinfo is UTC for event in events)

    noon = datetime(2025, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    moved = UserMessageEvent(content="x", timestamp=noon)
    assert moved.timestamp == noon
    assert moved.timestamp.hour == 10
    with pytest.raises(ValidationError):
        UserMessageEvent(content="x", timestamp=datetime(2025, 1, 1))  # noqa: DTZ001 - is refused


@pytest.mark.parametrize("written", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_a_time_that_utc_does_not_have_makes_no_event(written: str) -> None:
    event = UserMessageEvent(content="x", timestamp=datetime(2025, 1, 1, tzinfo=UTC))
    with pytest.raises(ValueError, match="year"):
        decode_event(encode_event(event).replace(b"2025-01-01T00:00:00Z", written.encode()))


def test_a_kind_from_a_newer_version_is_kept_and_passed_on_as_it_came() -> None:
    raw = (
        b'{"id":"e1","kind":"hologram","timestamp":"2031-01-01T00:00:00Z","turn_id":"t1",'
        b'"points":[1,2.5,{"deep":null}],"version":3}'
    )
    event = decode_event(raw)

    assert isinstance(event, UnknownEvent)
    assert (event.kind, event.id, event.turn_id) == ("hologram", "e1", "t1")
    assert encode_event(event) == raw
    assert decode_event(encode_event(event), kind="hologram") == event
    assert Event.model_validate_json(raw) == event
    assert hash(event) == hash(decode_event(raw))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"kind":"user_message"}',
        b'{"kind":"user_message","id":"e1","timestamp":"2025-01-01T00:00:00Z"}',
        b'{"kind":"user_message","id":"","timestamp":"2025-01-01T00:00:00Z","content":"x"}',
        b'{"kind":"user_message","id":"e1","timestamp":"2025-01-01T00:00:00","content":"x"}',
        b'{"kind":"user_message","id":"e1","timestamp":"2025-01-01T00:00:00Z","content":"x","y":1}',
        b'{"kind":"hologram","id":"e1"}',
        b'{"kind":["user_message"],"id":"e1","timestamp":"2025-01-01T00:00:00Z"}',
        b'{"kind":"paused","id":"e1","timestamp":"2025-01-01T00:00:00Z","turn_id":"\xff"}',
    ],
)
def test_what_no_version_wrote_is_an_error_that_keeps_its_content_to_itself(payload: bytes) -> None:
    for kind in (None, "user_message"):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the kind is the contract
            decode_event(payload, kind=kind)
        assert "2025" not in str(caught.value)


def test_a_record_of_another_kind_than_the_journal_says_is_an_error() -> None:
    payload = encode_event(Maker().user())
    with pytest.raises(ValueError):  # noqa: PT011 - the kind is the contract
        decode_event(payload, kind="agent_message")


def test_asked_of_another_class_than_it_is_the_json_is_refused() -> None:
    payload = encode_event(ConfirmationGivenEvent(confirmed=True))

    with pytest.raises(ValueError, match="not a LLMConvertibleEvent"):
        LLMConvertibleEvent.model_validate_json(payload)
    assert LLMConvertibleEvent.model_validate_json(encode_event(Maker().user())) == Maker().user()


@pytest.mark.parametrize("text", ["\ud83d", "a\udfff"])
def test_a_lone_surrogate_is_refused_where_the_event_is_made_and_not_at_the_commit(
    text: str,
) -> None:
    for make in (
        lambda: UserMessageEvent(content=text),
        lambda: AgentMessageEvent(content="x", turn_id=text),
        lambda: TaskListUpdatedEvent(tasks=(Task(description=text),)),
        lambda: Maker().action("c1", arguments={"a": text}),
    ):
        with pytest.raises(ValidationError):
            make()
    with pytest.raises(ValidationError):
        TokenUsage(cost=float("nan"))


def test_an_event_from_before_its_shape_changed_is_brought_up_to_date_as_it_is_read() -> None:
    """The worked example. Once upon a time, `observation` had `text`, and before that was `tool`.

    Version 2 renamed the field; version 3 renamed the kind. Both steps are pure functions.
    """

    def tool_to_observation(record: dict[str, object]) -> dict[str, object]:
        return record | {"kind": "observation", "version": 2}

    def text_to_content(record: dict[str, object]) -> dict[str, object]:
        record["content"] = record.pop("text")
        del record["version"]
        return record | {"is_error": False}

    steps = Upcasters({("tool", 1): tool_to_observation, ("observation", 2): text_to_content})
    old = (
        b'{"kind":"tool","id":"e1","timestamp":"2020-01-01T00:00:00Z",'
        b'"tool_call_id":"c1","text":"seen"}'
    )

    event = decode_event(old, kind="tool", upcasters=steps)

    assert isinstance(event, ObservationEvent)
    assert event.content == "seen"
    assert decode_event(encode_event(event), upcasters=steps) == event
    assert steps.fingerprint == "observation.2,tool.1"
    assert isinstance(decode_event(old), UnknownEvent), "without the steps it is kept as it came"


def test_upcasters_that_lead_in_a_circle_are_an_error_and_no_endless_loop() -> None:
    steps = Upcasters({("user_message", 1): lambda record: record})
    with pytest.raises(ValueError, match="back to itself"):
        decode_event(encode_event(Maker().user()), upcasters=steps)


def test_what_the_model_sees_is_what_can_be_made_a_message() -> None:
    seen = {kind for kind, each in EVENT_CLASSES.items() if issubclass(each, LLMConvertibleEvent)}
    assert seen == {
        "system_prompt",
        "user_message",
        "agent_message",
        "action",
        "observation",
        "agent_error",
        "user_reject",
        "condensation_summary",
    }
    for kind in seen:
        message = _full(EVENT_CLASSES[kind])
        assert isinstance(message, LLMConvertibleEvent)
        assert message.to_llm_message()["role"] in {"system", "user", "assistant", "tool"}


def test_a_summary_is_given_to_the_model_as_a_user_message() -> None:
    summary = CondensationSummaryEvent(content="they talked")
    assert summary.to_llm_message() == {"role": "user", "content": "they talked"}


def test_malformed_arguments_are_kept_and_not_sent_back_to_a_server_that_parses_them() -> None:
    action = Maker().action("c1", malformed_arguments='{"at": ')
    assert isinstance(action, ActionEvent)

    sent = json.loads(json.dumps(action.to_llm_message()))
    assert sent["tool_calls"][0]["function"]["arguments"] == "{}"
    assert decode_event(encode_event(action)) == action


# --- events that pydantic has not checked ---------------------------------------------------------

SAID = AgentMessageEvent(content="fine")


def _is_checked(event: Event) -> bool:
    """As `write_event` decides whether it has to read the event back."""
    return check_texts(event) and is_validated(event)


def test_an_event_that_pydantic_made_is_known_to_be_checked() -> None:
    """Its bytes go into the log as they are; the cost of an append rests on it."""
    made = (SAID, UserMessageEvent(content="fine", message_id="m", author="u"))
    for event in made:
        for same in (event, decode_event(encode_event(event)), copy(event), event.model_copy()):
            assert _is_checked(same)


@pytest.mark.parametrize(
    "event",
    [
        AgentMessageEvent.model_construct(content="fine"),
        SAID.model_copy(update={"content": "other"}),
        copy(SAID.model_copy(update={"content": "other"})),
        deepcopy(AgentMessageEvent.model_construct(content="fine")),
        SAID.model_copy(update={"content": "other"}).model_copy(),
        UserMessageEvent(content="fine", images=(ImageContent(url="u"),)),
        UserMessageEvent(content="fine", metadata=FrozenObject({"a": 1})),
        type("Particular", (AgentMessageEvent,), {})(content="fine"),
    ],
)
def test_an_event_that_came_past_pydantic_or_holds_more_is_not(event: Event) -> None:
    assert not _is_checked(event)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_copy_of_older_programs_is_not_known_to_be_checked() -> None:
    copied = SAID.copy(update={"content": "other"})

    assert copied == AgentMessageEvent(id=SAID.id, timestamp=SAID.timestamp, content="other")
    assert not _is_checked(copied)


def test_events_that_are_read_share_the_set_of_their_fields_and_copies_do_not() -> None:
    payloads = [encode_event(Maker().user(content)) for content in ("one", "two")]

    one, two = (decode_event(payload, kind="user_message") for payload in payloads)

    assert one.__pydantic_fields_set__ is two.__pydantic_fields_set__
    assert one.model_fields_set == set(UserMessageEvent.model_fields)
    for copied in (copy(one), deepcopy(one), one.model_copy(update={"content": "other"})):
        assert copied.__pydantic_fields_set__ is not one.__pydantic_fields_set__


def test_an_event_of_an_older_version_keeps_which_fields_it_had() -> None:
    written = json.loads(encode_event(Maker().user()))
    del written["files"]

    event = decode_event(json.dumps(written), kind="user_message")

    assert event.model_fields_set == written.keys()
    assert decode_event(encode_event(Maker().user()), kind="user_message").model_fields_set > (
        event.model_fields_set
    )


def test_events_that_were_made_with_the_same_fields_share_their_set_unless_unchecked() -> None:
    one, two = AgentMessageEvent(content="one"), AgentMessageEvent(content="two")
    marked = AgentMessageEvent.model_construct({"content"}, content="three")

    for event in (one, two, marked):
        share_fields(event)

    assert one.__pydantic_fields_set__ is two.__pydantic_fields_set__
    assert one.model_fields_set == {"content"}
    assert marked.__pydantic_fields_set__ is not one.__pydantic_fields_set__
    assert not _is_checked(marked)


def test_the_table_of_shared_sets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[frozenset[str], set[str]] = {}
    monkeypatch.setattr(events, "_SHARED_FIELDS", table)
    monkeypatch.setattr(events, "_SHARED_FIELDS_MAX", 1)

    share_fields(AgentMessageEvent(content="one"))
    share_fields(AgentMessageEvent(content="two", interrupted=True))

    assert table.keys() == {frozenset({"content"})}


def test_an_event_whose_json_is_too_long_is_told_so_whatever_was_written_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its constructor would take it, so the error must not send its caller there."""
    monkeypatch.setattr(records, "_known_shapes", set())
    monkeypatch.setattr(records, "EVENT_LENGTH_MAX", 300)
    long = [AgentMessageEvent(content="é" * 200), AgentMessageEvent(content="é" * 200)]

    with pytest.raises(InvalidInput, match=r"^an AgentMessageEvent has") as first:
        write_event(long[0])
    write_event(AgentMessageEvent(content="short"))
    with pytest.raises(InvalidInput) as second:
        write_event(long[1])

    assert str(second.value) == str(first.value)


class AskedFor:
    """A serializer of pydantic's that notes what it is asked to say of warnings."""

    def __init__(self, serializer: Any) -> None:  # noqa: ANN401 - pydantic's
        self._serializer = serializer
        self.warnings: list[object] = []

    def to_json(self, event: Event, **asked: Any) -> bytes:  # noqa: ANN401 - as pydantic's
        self.warnings.append(asked.get("warnings"))
        written: bytes = self._serializer.to_json(event, **asked)
        return written


def test_pydantic_is_asked_for_warnings_once_for_each_class_and_types_of_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To ask costs as much as the JSON, and lets every thread that waits take the interpreter."""
    monkeypatch.setattr(records, "_known_shapes", set())
    asked = AskedFor(AgentMessageEvent.__pydantic_serializer__)
    monkeypatch.setattr(AgentMessageEvent, "__pydantic_serializer__", asked)

    written = [
        write_event(AgentMessageEvent(content=content, turn_id=turn))
        for content, turn in (("one", None), ("two", None), ("three", "t"), ("four", "t"))
    ]

    assert [json.loads(each)["content"] for each in written] == ["one", "two", "three", "four"]
    assert asked.warnings == ["error", None, "error", None]


@pytest.mark.parametrize(
    ("event", "name", "value"),
    [
        (AgentMessageEvent(content="fine"), "content", 5),
        (AgentMessageEvent(content="fine"), "timestamp", "today"),
        (AgentMessageEvent(content="fine"), "turn_id", True),
        (AgentMessageEvent(content="fine"), "content", "half of a character: \ud800"),
        (UserMessageEvent(content="fine"), "is_reminder", "no"),
        # pydantic does not warn of these, so they are read back.
        (AgentMessageEvent(content="fine"), "content", None),
        (AgentMessageEvent(content="fine"), "timestamp", datetime(2026, 1, 1)),  # noqa: DTZ001
        (ForkedFromEvent(conversation_id="c", seq=1), "seq", 1 << 63),
        (TurnEndedEvent(turn_id="t", outcome="completed"), "outcome", "forgotten"),
        (
            ActionEvent(tool_call_id="c", tool_name="look", llm_response_id="r", risk="low"),
            "risk",
            "none",
        ),
    ],
)
def test_an_event_changed_by_force_is_refused_after_one_that_was_not(
    event: Event, name: str, value: object
) -> None:
    write_event(event)
    write_event(event)
    object.__setattr__(event, name, value)

    with pytest.raises(InvalidInput):
        write_event(event)
