"""The model that answers from a script."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import anyio
import pytest

from tests.actors.core.logs import Maker
from turnkeeper.actors import (
    FrozenObject,
    ModelRequest,
    ModelResponse,
    ScriptedModel,
    ToolCall,
    View,
)
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.models.base import ModelError, ModelUnavailable
from turnkeeper.actors.recordings.replies import recorded_replies
from turnkeeper.actors.recordings.transcripts import parse_recorded

pytestmark = pytest.mark.anyio


def _request(text: str = "hello") -> ModelRequest:
    return ModelRequest(View.from_events([Maker().user(text)]))


def _writer(pieces: list[str]) -> Callable[[str], Awaitable[None]]:
    async def write(piece: str) -> None:
        pieces.append(piece)

    return write


async def _nothing(_: str) -> None:
    pass


async def test_each_request_gets_the_next_reply_of_the_list() -> None:
    calls = ModelResponse(calls=[ToolCall("look")])
    model = ScriptedModel([calls, ModelUnavailable("m", "503"), "done"])
    requests = [_request(text) for text in ("a", "b", "c", "d")]

    assert await model.respond(requests[0], _nothing) is calls
    with pytest.raises(ModelUnavailable):
        await model.respond(requests[1], _nothing)
    assert (await model.respond(requests[2], _nothing)).text == "done"
    with pytest.raises(ModelError, match="no reply to request 4; add one, or use a function"):
        await model.respond(requests[3], _nothing)
    assert model.requests == requests


async def test_a_text_is_written_word_by_word_and_whole() -> None:
    for text in ("It is  on\nits way. ", " ", "", "one"):
        pieces: list[str] = []
        response = await ScriptedModel([text]).respond(_request(), _writer(pieces))
        assert response.text == "".join(pieces) == text
    pieces = []
    await ScriptedModel(["two words"]).respond(_request(), _writer(pieces))
    assert pieces == ["two ", "words"]


async def test_a_reply_may_be_made_of_the_request_and_may_wait() -> None:
    released = anyio.Event()

    async def wait(request: ModelRequest) -> str:
        await released.wait()
        return f"{len(request.view)} events"

    model = ScriptedModel([lambda request: f"{len(request.tools)} tools", wait])
    assert (await model.respond(_request(), _nothing)).text == "0 tools"
    async with anyio.create_task_group() as group:
        texts: list[str] = []

        async def respond() -> None:
            texts.append((await model.respond(_request(), _nothing)).text)

        group.start_soon(respond)
        await anyio.wait_all_tasks_blocked()
        assert texts == []
        released.set()
    assert texts == ["1 events"]


async def test_a_function_answers_every_request() -> None:
    def last_words(request: ModelRequest) -> str | Exception:
        text = str(request.view[-1].to_llm_message()["content"])
        return ModelUnavailable("m", "503") if text == "fail" else f"a({text})"

    model = ScriptedModel(last_words)
    for text in ("a", "b"):
        assert (await model.respond(_request(text), _nothing)).text == f"a({text})"
    with pytest.raises(ModelUnavailable):
        await model.respond(_request("fail"), _nothing)


def test_a_recording_gives_the_replies_of_its_model() -> None:
    call = {"id": "c1", "function": {"name": "look", "arguments": '{"at": "7"}'}}
    messages = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": "let me look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "there"},
        {"role": "assistant", "content": "there"},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": "welcome"},
    ]
    parsed = parse_recorded(json.dumps([messages]).encode(), "some.json")
    assert recorded_replies(parsed.conversations[0]) == [
        ModelResponse("let me look", [ToolCall("look", FrozenObject({"at": "7"}), "c1")]),
        ModelResponse("there", []),
        ModelResponse("welcome", []),
    ]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: ToolCall("look", cast("Any", "x")),
            "arguments of a call are a dict, and a str is not",
        ),
        (lambda: ToolCall(cast("Any", 5)), "a call's name is a str, and an int is not"),
        (
            lambda: ModelResponse(cast("Any", ["x"])),
            "a response's text is a str, and a list is not",
        ),
        (
            lambda: ModelResponse(calls=cast("Any", ToolCall("look"))),
            "calls are a list, and a ToolCall is not",
        ),
        (
            lambda: ModelResponse(calls=cast("Any", [("look", {})])),
            "calls hold a tuple; they hold ToolCalls",
        ),
    ],
)
def test_a_response_of_the_wrong_types_is_refused_where_it_is_made(
    make: Callable[[], object], said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        make()


@pytest.mark.parametrize("reply", [5, None, lambda _: None])
async def test_a_reply_that_is_none_is_told_with_its_number(reply: object) -> None:
    model = ScriptedModel(["one", cast("Any", reply)])
    await model.respond(_request(), _nothing)
    with pytest.raises(InvalidInput, match="reply 2 of the script is"):
        await model.respond(_request(), _nothing)
