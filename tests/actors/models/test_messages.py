"""Messages for models: what the providers' APIs accept, in the shapes of their own packages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

import pytest
from anthropic.types import MessageParam
from hypothesis import given
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import ResponseInputItemParam
from typing_extensions import get_type_hints, is_typeddict

from tests.actors.core import logs, oracles
from tests.actors.core.logs import Maker
from tests.actors.models.strict import check_responses_items
from turnkeeper.actors.core.view import View, ViewFold
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    Event,
    ImageContent,
    ThinkingBlock,
)
from turnkeeper.actors.models.messages import LLMMessages, LLMShape, OpenCalls, to_llm_messages
from turnkeeper.actors.values.frozen import FrozenObject
from turnkeeper.runtime import Refused

SHAPES: Sequence[LLMShape] = ("openai", "openai_responses", "anthropic")


def _messages(*log: Event, shape: LLMShape = "openai") -> LLMMessages:
    return to_llm_messages(View.from_events(log), shape)


def fits(value: object, hint: Any) -> bool:  # noqa: ANN401 - a type hint is anything
    """Whether a JSON value is of one of the packages' request types, with no key beyond them."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin is Literal:
        return value in arguments
    if is_typeddict(hint):
        if not isinstance(value, dict):
            return False
        hints = get_type_hints(hint)
        extras = get_type_hints(hint, include_extras=True)
        required = {key for key, extra in extras.items() if "Required[" in str(extra)}
        return required <= value.keys() <= hints.keys() and all(
            fits(each, hints[key]) for key, each in value.items()
        )
    if origin is dict:
        return isinstance(value, dict)
    if origin in (list, Iterable, Sequence):
        return isinstance(value, tuple | list) and all(fits(each, arguments[0]) for each in value)
    if arguments:  # a union, or an annotated type
        return any(fits(value, each) for each in arguments)
    return isinstance(hint, type) and isinstance(value, hint)


def _everything() -> list[Event]:
    make = Maker()
    thinking = (
        ThinkingBlock(thinking="first", signature="sig1"),
        ThinkingBlock(thinking="", redacted_data="secret"),
        ThinkingBlock(thinking="unsigned"),
    )
    calls = [
        ActionEvent(
            **make.stamp(),
            tool_call_id="call-1",
            tool_name="look",
            arguments=FrozenObject({"at": ["here", {"deep": 1.5}]}),
            llm_response_id="r1",
            thinking=thinking,
            text="let me look",
        ),
        make.action("call-2", "r1", tool_name="look.closely at it"),
    ]
    images = (
        ImageContent(url="https://example.org/cat.png"),
        ImageContent(url="data:image/png;base64,iVBORw0KGgo="),
    )
    return [
        make.system(),
        make.user("what is this?", images=images),
        *calls,
        make.error("call-2", "not run"),
        make.result("call-1", "a cat"),
        make.agent("a cat", thinking=(ThinkingBlock(thinking="ok", signature="sig2"),)),
        make.user("", images=images[:1]),
        make.action("call 3", "r2"),
        make.reject("call 3"),
        make.agent("   ", interrupted=True),
        make.user("thanks"),
        make.user("bye"),
    ]


def test_the_openai_shape_is_what_the_openai_package_takes() -> None:
    messages = _messages(*_everything())

    oracles.check_openai(messages)
    for message in messages:
        assert fits(message, ChatCompletionMessageParam), message
    assert json.loads(json.dumps(list(messages))) == [
        {"role": "system", "content": "be kind"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is this?"},
                {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}},
                {
                    "type": "image_url",
                    "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="},
                },
            ],
        },
        {
            "role": "assistant",
            "content": "let me look",
            "tool_calls": [
                {
                    "id": "call-1",
                    "type": "function",
                    "function": {
                        "name": "look",
                        "arguments": '{"at": ["here", {"deep": 1.5}]}',
                    },
                },
                {
                    "id": "call-2",
                    "type": "function",
                    "function": {"name": "look_closely_at_it_e4e569c5", "arguments": "{}"},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "call-2", "content": "not run"},
        {"role": "tool", "tool_call_id": "call-1", "content": "a cat"},
        {"role": "assistant", "content": "a cat"},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}],
        },
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": messages[7]["tool_calls"][0]["id"],  # type: ignore[call-overload, index]
                    "type": "function",
                    "function": {"name": "look", "arguments": "{}"},
                }
            ],
        },
        {
            "role": "tool",
            "tool_call_id": messages[7]["tool_calls"][0]["id"],  # type: ignore[call-overload, index]
            "content": "no",
        },
        {"role": "user", "content": "thanks"},
        {"role": "user", "content": "bye"},
    ]


def test_the_anthropic_shape_is_what_the_anthropic_package_takes() -> None:
    messages = _messages(*_everything(), shape="anthropic")

    oracles.check_anthropic(messages)
    for message in messages:
        assert fits(message, MessageParam), message
    assert messages.system == "be kind"
    call_id = messages[6]["content"][0]["tool_use_id"]  # type: ignore[call-overload, index]
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}}
    data = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    assert json.loads(json.dumps(list(messages))) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is this?"},
                image,
                {"type": "image", "source": data},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "first", "signature": "sig1"},
                {"type": "redacted_thinking", "data": "secret"},
                {"type": "text", "text": "let me look"},
                {
                    "type": "tool_use",
                    "id": "call-1",
                    "name": "look",
                    "input": {"at": ["here", {"deep": 1.5}]},
                },
                {
                    "type": "tool_use",
                    "id": "call-2",
                    "name": "look_closely_at_it_e4e569c5",
                    "input": {},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call-2",
                    "content": "not run",
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "call-1", "content": "a cat"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "ok", "signature": "sig2"},
                {"type": "text", "text": "a cat"},
            ],
        },
        {"role": "user", "content": [image]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": call_id, "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": call_id,
                    "content": "no",
                    "is_error": True,
                },
                {"type": "text", "text": "thanks"},
                {"type": "text", "text": "bye"},
            ],
        },
    ]


def test_the_shape_of_the_responses_api_is_what_the_openai_package_takes() -> None:
    items = _messages(*_everything(), shape="openai_responses")

    check_responses_items(items)
    for item in items:
        assert fits(item, ResponseInputItemParam), item
    call_id = items[10]["call_id"]
    image = {
        "type": "input_image",
        "image_url": "https://example.org/cat.png",
        "detail": "auto",
    }
    data = {**image, "image_url": "data:image/png;base64,iVBORw0KGgo="}
    assert json.loads(json.dumps(list(items))) == [
        {"role": "system", "content": "be kind"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "what is this?"}, image, data],
        },
        {"role": "assistant", "content": "let me look"},
        {
            "type": "function_call",
            "call_id": "call-1",
            "name": "look",
            "arguments": '{"at": ["here", {"deep": 1.5}]}',
        },
        {
            "type": "function_call",
            "call_id": "call-2",
            "name": "look_closely_at_it_e4e569c5",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "call-2", "output": "not run"},
        {"type": "function_call_output", "call_id": "call-1", "output": "a cat"},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": [image]},
        {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": call_id, "output": "no"},
        {"role": "user", "content": "thanks"},
        {"role": "user", "content": "bye"},
    ]


@given(log=logs.wild_logs())
def test_any_log_is_accepted_by_the_responses_api_after_enforcement(log: list[Event]) -> None:
    view = View.from_events(log)
    if len(view) and not view.has_open_calls:
        check_responses_items(to_llm_messages(view, "openai_responses"))


def test_the_check_of_the_shapes_would_notice() -> None:
    good: dict[str, object] = {"role": "assistant", "content": "hi"}
    assert fits(good, ChatCompletionMessageParam)
    assert fits(good, MessageParam)
    bad_for_openai: list[dict[str, object]] = [
        {"role": "assistant", "content": 1},
        {"role": "assistant", "content": "hi", "thoughts": "hm"},
        {"role": "tool", "content": "seen"},
        {"role": "nobody", "content": "hi"},
    ]
    bad_for_anthropic: list[dict[str, object]] = [
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]},
        {"role": "user"},
    ]
    assert not [bad for bad in bad_for_openai if fits(bad, ChatCompletionMessageParam)]
    assert not [bad for bad in bad_for_anthropic if fits(bad, MessageParam)]


def test_a_view_with_an_open_call_has_no_messages() -> None:
    make = Maker()
    view = View.from_events([make.user(), make.action("c1"), make.action("c2"), make.result("c1")])
    for shape in SHAPES:
        with pytest.raises(OpenCalls) as caught:
            to_llm_messages(view, shape)
        assert isinstance(caught.value, Refused)
        assert caught.value.tool_call_ids == ("c2",)


def test_an_empty_view_has_no_messages_and_that_is_no_error() -> None:
    assert len(_messages()) == 0
    assert list(_messages(shape="anthropic")) == []


def test_what_was_said_of_a_malformed_log_stays_in_order_with_results_behind_their_calls() -> None:
    make = Maker()
    log = [
        make.result("c0", "early"),
        make.action("c0", "r0"),
        make.action("c1", "r1"),
        make.user("and?"),
        make.action("c2", "r2"),
        make.agent("wait"),
        make.result("c2", "two"),
        make.result("c1", "one"),
        make.user("ok"),
    ]
    messages = _messages(*log)

    oracles.check_openai(messages)
    oracles.check_anthropic(_messages(*log, shape="anthropic"))
    assert [message.get("content") for message in messages] == [
        *(None, "early", None, "one", "and?", None, "two", "wait", "ok")
    ]


def test_a_conversation_that_the_agent_begins_and_an_empty_message_are_made_acceptable() -> None:
    make = Maker()
    messages = _messages(make.agent("hello?"), make.user(" "), shape="anthropic")
    oracles.check_anthropic(messages)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    "url",
    [
        "data:image/tiff;base64,AAAA",
        "data:image/png;base64,not base64!",
        "data:nonsense",
        "data:,",
    ],
)
def test_an_image_that_the_api_would_refuse_is_named_instead(url: str) -> None:
    (message,) = _messages(Maker().user("look", images=[ImageContent(url=url)]), shape="anthropic")
    assert fits(message, MessageParam)
    assert [block["type"] for block in message["content"]] == ["text", "text"]  # type: ignore[index, union-attr, call-overload]


def test_an_image_that_is_percent_encoded_is_sent_as_base64() -> None:
    image = ImageContent(url="data:image/gif,GIF89a%00")
    (message,) = _messages(Maker().user("", images=[image]), shape="anthropic")
    assert message["content"][0]["source"] == {  # type: ignore[index, call-overload]
        "type": "base64",
        "media_type": "image/gif",
        "data": "R0lGODlhAA==",
    }


def test_arguments_as_deep_as_an_event_takes_make_a_message() -> None:
    deep: object = 0
    for _ in range(98):
        deep = [deep]
    make = Maker()
    log = [make.user(), make.action("c1", arguments={"a": deep}), make.result("c1")]
    assert len(_messages(*log, shape="anthropic")) == 3


def test_thinking_that_follows_plain_text_still_begins_its_message() -> None:
    make = Maker()
    log = [make.user(), make.agent("let me see"), make.action("c1", thinking=True)]
    messages = _messages(*log, make.result("c1"), shape="anthropic")
    oracles.check_anthropic(messages)
    assert [block["type"] for block in messages[1]["content"]] == ["thinking", "text", "tool_use"]  # type: ignore[index, union-attr, call-overload]


def test_two_strange_call_ids_never_become_one() -> None:
    make = Maker()
    log = [make.user(), make.action("c 1"), make.action("c:1"), make.action("c" * 200)]
    results = [make.result(call_id) for call_id in ("c 1", "c:1", "c" * 200)]
    oracles.check_openai(_messages(*log, *results))


def test_messages_that_were_given_never_change_and_the_next_view_shares_them() -> None:
    make = Maker()
    fold = ViewFold()
    for event in (make.user(), make.action("c1"), make.result("c1")):
        fold.fold(event)
    views = [fold.snapshot()]
    for shape in SHAPES:
        taken = to_llm_messages(views[0], shape)
        listed = list(taken)
        fold.fold(make.user("more"))
        fold.fold(AgentMessageEvent(content="and more"))
        views.append(fold.snapshot())
        later = to_llm_messages(views[-1], shape)

        assert list(taken) == listed
        assert later[0] is taken[0]
        assert to_llm_messages(views[0], shape) == taken, "an older view, asked again"
        with pytest.raises(TypeError):
            taken[0]["role"] = "system"  # type: ignore[index]
        with pytest.raises(TypeError):
            taken[0].update(role="system")  # type: ignore[attr-defined]


def test_messages_read_as_any_sequence() -> None:
    make = Maker()
    messages = _messages(make.user("a"), make.agent("b"), make.user("c"), shape="anthropic")
    assert len(messages) == 3
    assert messages[-1]["role"] == "user"
    assert [message["role"] for message in messages[:2]] == ["user", "assistant"]
    assert [message["role"] for message in reversed(messages)] == ["user", "assistant", "user"]
    for beyond in (3, -4):
        with pytest.raises(IndexError):
            messages[beyond]
