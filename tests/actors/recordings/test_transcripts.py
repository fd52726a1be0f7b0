"""Recorded conversations are read exactly, and what cannot be is told by its place."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkeeper.actors.recordings.samples import read_samples
from turnkeeper.actors.recordings.transcripts import (
    InputProblem,
    RecordedConversation,
    RecordedStep,
    parse_recorded,
)

AIRLINE = Path(__file__).parents[4] / "shared" / "data" / "airline_transcripts.json"

SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Hello"}
AGENT = {"role": "assistant", "content": "Hi!"}


def call(*ids: str, content: str | None = None, arguments: str = '{"a": 1}') -> dict[str, object]:
    calls = [
        {"id": i, "type": "function", "function": {"name": f"tool_{i}", "arguments": arguments}}
        for i in ids
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(call_id: str, content: str = "42") -> dict[str, object]:
    return {"role": "tool", "tool_call_id": call_id, "name": "any", "content": content}


def read(*messages: object) -> RecordedConversation:
    parsed = parse_recorded(json.dumps([list(messages)]).encode(), "chats.json")
    assert parsed.problems == ()
    return parsed.conversations[0]


def problems(content: object, file: str = "chats.json") -> Sequence[str]:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return [str(problem) for problem in parse_recorded(text, file).problems]


# --- what is read --------------------------------------------------------------------------------


def test_an_exchange_is_a_user_message_with_all_that_the_agent_did_until_the_next() -> None:
    recorded = read(SYSTEM, USER, call("1", content="Let me see."), result("1"), AGENT, USER, AGENT)

    assert recorded.system_prompt == "Be kind."
    first, second = recorded.exchanges
    assert [step.text for step in first.steps] == ["Let me see.", "Hi!"]
    assert first.steps[0].calls[0].tool_name == "tool_1"
    assert first.steps[0].calls[0].arguments == {"a": 1}
    assert first.steps[0].calls[0].result == "42"
    assert second.steps == (RecordedStep(text="Hi!"),)


def test_parallel_calls_are_one_step_and_get_their_results_in_any_order() -> None:
    recorded = read(USER, call("1", "2"), result("2", "two"), result("1", "one"))

    (step,) = recorded.exchanges[0].steps
    assert [(c.tool_name, c.result) for c in step.calls] == [("tool_1", "one"), ("tool_2", "two")]


def test_a_call_id_that_is_used_again_is_another_call() -> None:
    recorded = read(USER, call("1"), result("1", "first"), call("1"), result("1", "second"))

    calls = [call for step in recorded.exchanges[0].steps for call in step.calls]
    assert [one.result for one in calls] == ["first", "second"]
    assert {one.provider_call_id for one in calls} == {"1"}


def test_users_may_write_twice_in_a_row_and_have_the_last_word() -> None:
    recorded = read(USER, USER, AGENT, USER)

    assert [len(exchange.steps) for exchange in recorded.exchanges] == [0, 1, 0]


def test_a_greeting_before_the_first_user_message_is_kept() -> None:
    assert read(SYSTEM, AGENT, USER).opening == ("Hi!",)


def test_content_may_be_parts_with_images_of_the_user() -> None:
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "text", "text": "It moves."},
    ]
    exchange = read({"role": "user", "content": parts}).exchanges[0]

    assert exchange.content == "What is this?\nIt moves."
    assert exchange.images == ("data:image/png;base64,AA",)


def test_no_arguments_at_all_are_an_empty_object() -> None:
    recorded = read(USER, call("1", arguments=""), result("1"))

    assert recorded.exchanges[0].steps[0].calls[0].arguments == {}


@pytest.mark.parametrize("file", ["chats.json", "chats.jsonl"])
@pytest.mark.parametrize("key", [None, "messages", "traj"])
def test_items_are_lists_or_objects_in_one_list_or_one_to_a_line(
    file: str, key: str | None
) -> None:
    items = [messages if key is None else {key: messages} for messages in ([USER], [USER, AGENT])]
    lines = "\n\n".join(json.dumps(item) for item in items)
    content = lines if file.endswith("l") else json.dumps(items, indent=2)

    parsed = parse_recorded(content.encode(), file)

    assert parsed.problems == ()
    assert [len(c.exchanges[0].steps) for c in parsed.conversations] == [0, 1]
    assert [c.item for c in parsed.conversations] == ([1, 3] if file.endswith("l") else [1, 2])


def test_json_lines_are_recognised_whatever_the_file_is_called() -> None:
    content = "\n".join(json.dumps({"messages": [USER]}) for _ in range(3))

    assert len(parse_recorded(content.encode(), "chats.txt").conversations) == 3


def test_a_byte_order_mark_is_no_trouble() -> None:
    assert parse_recorded(b"\xef\xbb\xbf" + json.dumps([[USER]]).encode(), "a.json").problems == ()


def test_a_recording_survives_its_trip_to_another_process() -> None:
    recorded = read(SYSTEM, AGENT, USER, call("1", "2"), result("1"), result("2"), AGENT)

    assert RecordedConversation.model_validate_json(recorded.model_dump_json()) == recorded


# --- what cannot be used -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "file", "found"),
    [
        (b"", "a.json", "a.json: it is empty"),
        (b"[]", "a.json", "a.json: there is no conversation in it"),
        (
            b'{"turnkeeper_export":1}\n{"conversation":"alice"}\n',  # each line was reported
            "a.jsonl",
            "a.jsonl: it is an export of turnkeeper; `turnkeeper export --to openai` writes chats",
        ),
        (b"\n \n", "a.jsonl", "a.jsonl: there is no conversation in it"),
        (b"hello", "a.json", "a.json: not JSON at line 1 column 1: expecting value"),
        (b'[\n [{"role": "user",]', "a.json", "a.json: not JSON at line 2 column 19:"),
        (b"3", "a.json", "a.json: a list of conversations is needed, found a number"),
        (b"\xff\xfe[", "a.json", "a.json: not UTF-8 text: byte 1 cannot be read"),
        (b"[" * 100_000, "a.json", "a.json: not JSON that can be read: nested too deeply"),
        (b"[[NaN]]", "a.json", "a.json: not JSON: NaN is not a JSON number"),
        (b"9" * 5_000, "a.json", "a.json: not JSON: Exceeds the limit"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_as_a_whole(
    content: bytes, file: str, found: str
) -> None:
    (problem,) = problems(content, file)

    assert problem.startswith(found)


@pytest.mark.parametrize(
    ("item", "found"),
    [
        (7, "item 1: a conversation is needed, found a number"),
        ({}, "item 1: an object with neither `messages` nor `traj`"),
        ({"traj": None}, "item 1, traj: a list of messages is needed, found null"),
        ({"messages": {}}, "item 1, messages: a list of messages is needed, found an object"),
        ([], "item 1: there is no user message in it"),
        ([SYSTEM, AGENT], "item 1: there is no user message in it"),
        ([USER, "hi"], "item 1, message 2: a message is an object, found a string"),
        ([USER, {"content": "hi"}], "item 1, message 2, role: a message without a role"),
        ([USER, {"role": None}], "item 1, message 2, role: a string is needed, found null"),
        ([USER, {"role": "oracle"}], "item 1, message 2, role: unknown role 'oracle'"),
        ([{"role": "user"}], "item 1, message 1, content: a string is needed, found nothing"),
        (
            [USER, {"role": "assistant", "content": None}],
            "item 1, message 2, content: a string is needed, found null",
        ),
        (
            [USER, {"role": "user", "content": [{"type": "audio"}]}],
            "item 1, message 2, content: part 1 is neither a text nor an image_url",
        ),
        (
            [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "image_url", "image_url": {"url": "x"}}],
                },
            ],
            "item 1, message 2, content: an image is only understood in a user message",
        ),
        ([USER, SYSTEM], "item 1, message 2: a system message is only understood as the first"),
        (
            [{"role": "user", "content": "\ud800"}],
            "item 1, message 1: text that is not valid Unicode (half of a surrogate pair)",
        ),
        (
            [USER, result("9")],
            "item 1, message 2: a result without its call: no open call has the id '9'",
        ),
        (
            [USER, call("1"), result("1"), AGENT, result("1")],
            "item 1, message 5: a result without its call: no open call has the id '1'",
        ),
        ([USER, call("1"), result("1"), result("1")], "item 1, message 4: a second result for"),
        (
            [USER, call("1"), {"role": "tool", "content": "x"}],
            "item 1, message 3, tool_call_id: a string is needed, found nothing",
        ),
        (
            [USER, call("1", "2"), result("1"), USER],
            "item 1, message 2, tool_calls: the call '2' has no result before message 4",
        ),
        (
            [USER, call("1")],
            "item 1, message 2, tool_calls: the call '1' has no result at the end",
        ),
        ([call("1"), result("1"), USER], "item 1, message 1, tool_calls: a call before the first"),
        (
            [USER, call("1", "1")],
            "item 1, message 2, tool_calls[2]: two calls of one message have the id '1'",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": {}}],
            "item 1, message 2, tool_calls: a list is needed, found an object",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}],
            "item 1, message 2, tool_calls[1]: a call needs an `id` and a `function`",
        ),
        (
            [USER, call("1", arguments="{oops")],
            "item 1, message 2, tool_calls[1].function.arguments: the arguments are not JSON at",
        ),
        (
            [USER, call("1", arguments="[1]")],
            "item 1, message 2, tool_calls[1].function.arguments: the arguments are a list, not",
        ),
        (
            [USER, call("1", arguments='{"a":' * 150 + "1" + "}" * 150)],
            "item 1, message 2, tool_calls[1].function.arguments: arguments that cannot be stored:",
        ),
    ],
)
def test_an_item_that_cannot_be_used_is_told_by_item_message_and_field(
    item: object, found: str
) -> None:
    (problem,) = problems([item])

    assert problem.startswith(f"chats.json, {found}")


def test_the_other_items_are_read_all_the_same() -> None:
    parsed = parse_recorded(json.dumps([[USER], [{"content": "?"}], [USER]]).encode(), "a.json")

    assert [c.item for c in parsed.conversations] == [1, 3]
    told = InputProblem(
        file="a.json", item=2, message=1, field="role", found="a message without a role"
    )
    assert parsed.problems == (told,)


def test_a_line_that_is_not_json_does_not_spoil_the_others() -> None:
    content = b'{"messages": [{"role": "user", "content": "a"}]}\n{broken\n'

    parsed = parse_recorded(content, "a.json")

    assert len(parsed.conversations) == 1
    assert str(parsed.problems[0]).startswith("a.json, item 2: not JSON at line 1 column 2:")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "messages", "tool_calls", "id", "function"])
            | st.text(max_size=3),
            inner | st.sampled_from(["user", "assistant", "tool", "system", "text"]),
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(json_values | st.lists(st.lists(json_values)))
def test_whatever_json_there_is_every_item_is_either_read_or_told(value: object) -> None:
    parsed = parse_recorded(json.dumps(value).encode(), "any.json")

    told = len(parsed.conversations) + len(parsed.problems)
    assert told == max(1, len(value) if isinstance(value, list) else 1)


@given(st.binary(max_size=60))
def test_whatever_bytes_there_are_nothing_is_raised(content: bytes) -> None:
    parsed = parse_recorded(content, "any.json")

    assert parsed.problems or parsed.conversations


# --- what ships, and what is real ----------------------------------------------------------------


def test_all_samples_can_be_used_and_are_varied() -> None:
    samples = [parse_recorded(content, name) for name, content in read_samples().items()]
    assert [problem for parsed in samples for problem in parsed.problems] == []

    conversations = [one for parsed in samples for one in parsed.conversations]
    steps = [s for one in conversations for exchange in one.exchanges for s in exchange.steps]
    lengths = [len(one.exchanges) for one in conversations]

    assert 45 <= len(conversations) <= 60
    assert min(lengths) >= 3
    assert sum(length >= 14 for length in lengths) >= 4
    assert any(len(step.calls) > 1 for step in steps)
    assert len({one.exchanges[0].content for one in conversations}) == len(conversations)


@pytest.mark.skipif(not AIRLINE.exists(), reason="the recorded data is not part of the project")
def test_two_hundred_recorded_conversations_are_read_to_the_last_call() -> None:
    parsed = parse_recorded(AIRLINE.read_bytes(), AIRLINE.name)

    assert parsed.problems == ()
    assert len(parsed.conversations) == 200
    exchanges = [each for one in parsed.conversations for each in one.exchanges]
    assert len(exchanges) == 1_490
    assert sum(len(step.calls) for each in exchanges for step in each.steps) == 1_164


def test_messages_beside_conversations_are_told_and_alone_are_one_conversation() -> None:
    assert problems([[USER, AGENT], USER]) == [
        "chats.json, item 2: a message where a conversation is needed: put its messages in a list"
    ]
    (alone,) = parse_recorded(json.dumps([USER, AGENT]).encode(), "chats.json").conversations
    assert alone == read(USER, AGENT)


def test_functions_of_the_time_before_tools_are_calls() -> None:
    asked = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": ""}}
    answered = {"role": "function", "name": "f", "content": "42"}
    (exchange,) = read(USER, asked, answered, AGENT).exchanges
    ((recorded,), _) = (step.calls or (None,) for step in exchange.steps)
    assert recorded is not None
    assert (recorded.tool_name, recorded.result) == ("f", "42")
    assert problems([[USER, asked, {**answered, "name": "g"}]]) == [
        "chats.json, item 1, message 3: a result without its call: no function 'g' was called"
    ]
    assert problems([[USER, {**asked, "function_call": {"name": "f"}}]]) == [
        (
            "chats.json, item 1, message 2, function_call: a call needs a `name` and `arguments`, "
            "both strings"
        )
    ]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"id": "a"}, "a"),
        ({"id": 7}, "7"),
        ({"id": "a", "session_id": "b"}, "b"),
        ({"id": "a", "conversation_id": "c"}, "c"),
        ({"id": ""}, None),
        ({"id": True}, None),
        ({"id": ["a"]}, None),
        ({}, None),
    ],
)
def test_an_item_may_have_a_name_of_its_own(fields: dict[str, object], name: str | None) -> None:
    content = json.dumps([{**fields, "messages": [USER]}]).encode()
    (found,) = parse_recorded(content, "chats.json").conversations
    assert found.name == name
