"""The three adapters, each against a server that speaks its API strictly."""

from __future__ import annotations

import gc
import json
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import anyio
import pytest
from openai import AsyncOpenAI

from tests.actors.core import logs
from tests.actors.core.logs import Maker
from tests.actors.models.asking import LOOK, Asking, asking, hello
from tests.actors.models.servers import (
    WAIT_MAX_S,
    Answer,
    Call,
    ChatApi,
    Raw,
    Server,
    Status,
    serving,
)
from turnkeeper.actors import (
    Event,
    FrozenObject,
    ImageContent,
    ModelRequest,
    Prices,
    ToolCall,
    ToolSpec,
    View,
)
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import decode_event, encode_event
from turnkeeper.actors.models.anthropic import AnthropicModel
from turnkeeper.actors.models.base import (
    ContextOverflow,
    MalformedHistory,
    ModelError,
    ModelRefusal,
    ModelUnavailable,
)
from turnkeeper.actors.models.messages import LLMMessages, OpenCalls
from turnkeeper.actors.models.openai import OpenAIChatModel
from turnkeeper.actors.values.api_names import api_tool_name
from turnkeeper.runtime import Ports, Refused, Unavailable

pytestmark = [pytest.mark.costly, pytest.mark.in_parts(2)]

every_api = pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])


# --- answers -------------------------------------------------------------------------------------


@every_api
async def test_a_text_is_written_piece_by_piece_and_is_the_response(api: str) -> None:
    async with asking(api) as one:
        response = await one.ask(Answer(["It is ", "on its way", "."]))
    assert one.written == ["It is ", "on its way", "."]
    assert response.text == "It is on its way."
    assert not response.calls
    assert response.provider_response_id is not None


@every_api
async def test_each_piece_is_written_before_the_next_is_sent(api: str) -> None:
    gates = [threading.Event() for _ in range(3)]
    gates[0].set()

    def before_text(n: int) -> None:
        assert gates[n].wait(WAIT_MAX_S)

    async with asking(api) as one:
        pieces: list[str] = []

        async def write(piece: str) -> None:
            pieces.append(piece)
            gates[min(len(pieces), 2)].set()

        one.server.replies.append(Answer(["a", "b", "c"], before_text=before_text))
        response = await one.model.respond(hello(), write)
    assert pieces == ["a", "b", "c"]
    assert response.text == "abc"


@every_api
async def test_several_calls_that_come_in_pieces_are_put_together_in_order(api: str) -> None:
    calls = [
        Call("look", ['{"at"', ': "he', 're"}'], "call_1"),
        Call("look", ["", '{"at": "there", "n": [1, {"deep": 1.5}]}'], "call_2"),
        Call("other", [""], "call_3"),
    ]
    async with asking(api) as one:
        response = await one.ask(Answer(["let me look"], calls))
    assert response.text == "let me look"
    assert response.calls == [
        ToolCall("look", FrozenObject({"at": "here"}), "call_1"),
        ToolCall("look", FrozenObject({"at": "there", "n": [1, {"deep": 1.5}]}), "call_2"),
        ToolCall("other", FrozenObject(), "call_3"),
    ]


@every_api
async def test_arguments_that_are_no_json_object_are_kept_as_they_were_written(api: str) -> None:
    async with asking(api) as one:
        for arguments in ('{"at": ', "[1]", "null", '{"at": NaN}', '{"a": "\\ud800"}', "[" * 5_000):
            (call,) = (await one.ask(Answer(calls=[Call("look", [arguments])]))).calls
            assert call == ToolCall("look", {}, "call_1", arguments)


@every_api
async def test_text_comes_through_whatever_separators_and_characters_it_has(api: str) -> None:
    """A reader of lines would part a line of the stream at U+2028, and at U+0085."""
    text = ["a\u2028b\x85c", "\n\r\nd\x0b", "👩‍👩‍👧 ü"]
    async with asking(api) as one:
        assert (await one.ask(Answer(text))).text == "".join(text)


@every_api
async def test_a_stream_may_come_in_any_portions(api: str) -> None:
    async with asking(api) as one:
        events = one.server.api.events(Answer(["grün", "e Äpfel"], [Call("look")]))
        stream = b"".join(_event(name, data) for name, data, _ in events)
        for size in (1, 7, len(stream)):
            chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
            response = await one.ask(Raw(chunks))
            assert response.text == "grüne Äpfel"
            assert len(response.calls) == 1


def _event(name: str, data: object) -> bytes:
    import json

    written = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    head = f"event: {name}\r\n" if name else ": a comment\r\n"
    return f"{head}data: {written}\r\n\r\n".encode()


@every_api
async def test_usage_cost_and_latency_are_told(api: str) -> None:
    clock = iter([10.0, 12.5])
    async with asking(
        api,
        prices=Prices(input=2.0, output=10.0, cached=0.5),
        ports=Ports(monotonic=lambda: next(clock)),
    ) as one:
        answer = Answer(["ok"], input_tokens=1_000, cached_tokens=400, output_tokens=50)
        usage = (await one.ask(answer)).usage
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (1_000, 400, 50)
    assert usage.cost == pytest.approx((600 * 2.0 + 400 * 0.5 + 50 * 10.0) / 1_000_000)
    assert usage.latency_s == 2.5


async def test_tokens_that_went_into_a_cache_are_input_at_a_price_of_their_own() -> None:
    answer = Answer(["ok"], input_tokens=1_000, cached_tokens=100, written_tokens=300)
    costs = []
    for prices in (Prices(2.0, 0.0, 0.5, cache_written=3.0), Prices(2.0, 0.0), None):
        async with asking("anthropic", prices=prices) as one:
            usage = (await one.ask(answer)).usage
        assert usage.input_tokens == 1_000
        costs.append(usage.cost * 1_000_000)
    assert costs == pytest.approx([600 * 2.0 + 100 * 0.5 + 300 * 3.0, 2_000, 0.0])


async def test_thinking_comes_back_signed_and_is_shown_to_the_model_again() -> None:
    thinking = [{"thinking": "let me see", "signature": "sig"}, {"data": "secret"}]
    async with asking("anthropic") as one:
        response = await one.ask(Answer(["ok"], [Call("look")], thinking=thinking))
        make = Maker()
        log: list[Event] = [
            make.user(),
            make.action("c1", thinking=False).model_copy(update={"thinking": response.thinking}),
            make.result("c1"),
        ]
        await one.ask(request=ModelRequest(View.from_events(log), [LOOK]))
    assert [block.thinking for block in response.thinking] == ["letmesee", ""]
    assert one.server.bodies[-1]["messages"][1]["content"][:2] == [
        {"type": "thinking", "thinking": "letmesee", "signature": "sig"},
        {"type": "redacted_thinking", "data": "secret"},
    ]


ENCRYPTED = {
    "id": "rs_1",
    "summary": [{"type": "summary_text", "text": "Look first."}],
    "encrypted_content": "gAAAA",
}
THOUGHTS: Mapping[str, Mapping[str, Any]] = {
    "responses": ENCRYPTED,
    "chat": {"reasoning_content": "Look first."},
}


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_reasoning_before_a_call_goes_back_to_the_model_that_reasoned(api: str) -> None:
    make = Maker()
    async with asking(api) as one:
        answer = Answer(["Let me see."], [Call("look")], thinking=[THOUGHTS[api]])
        response = await one.ask(answer)
        assert [block.thinking for block in response.thinking] == ["Look first."]
        action = make.action("c").model_copy(update={"thinking": response.thinking})
        kept = decode_event(encode_event(action))
        log = [make.user(), kept, make.result("c"), make.user("and now?")]
        request = ModelRequest(View.from_events(log), [LOOK])
        await one.ask(request=request)
        await one.ask(request=replace(request, is_plain=True))
        sent, plain = (json.dumps(body) for body in one.server.bodies[1:])
    if api == "chat":
        assert '"reasoning_content": "Look first."' in sent
    else:
        assert one.server.bodies[1]["input"][1] == {**ENCRYPTED, "type": "reasoning"}
    assert "Look first." not in plain

    # Only the model that made it can read it, and no other API has a place for it.
    async with asking(api, model="another") as another:
        await another.ask(request=request)
        assert "Look first." not in json.dumps(another.server.bodies)
    async with asking("anthropic") as anthropic:
        await anthropic.ask(request=request)
        assert "gAAAA" not in json.dumps(anthropic.server.bodies)


async def test_reasoning_that_cannot_be_sent_back_is_not_kept() -> None:
    async with asking("responses") as one:
        bare = {**ENCRYPTED, "encrypted_content": None}
        response = await one.ask(Answer(calls=[Call("look")], thinking=[bare]))
    assert response.thinking == ()


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_reasoning_tokens_are_counted_apart(api: str) -> None:
    async with asking(api) as one:
        usage = (await one.ask(Answer(["ok"], output_tokens=9, reasoning_tokens=7))).usage
    assert (usage.output_tokens, usage.reasoning_tokens, usage.model) == (9, 7, "m")


async def test_a_server_that_numbers_every_call_zero_still_made_several() -> None:
    def delta(call_id: str, arguments: str) -> bytes:
        call = (
            f'{{"index": 0, "id": "{call_id}", '
            f'"function": {{"name": "look", "arguments": "{arguments}"}}}}'
        )
        return f'data: {{"choices": [{{"delta": {{"tool_calls": [{call}]}}}}]}}\n\n'.encode()

    end = b'data: {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}\n\n'
    async with asking("chat") as one:
        response = await one.ask(Raw([delta("c1", "{}"), delta("c2", "{}"), end]))
    assert [call.provider_call_id for call in response.calls] == ["c1", "c2"]


# --- requests ------------------------------------------------------------------------------------


@every_api
async def test_what_is_sent_for_any_admitted_log_is_accepted(api: str) -> None:
    draw = random.Random(6)
    async with asking(api) as one:
        asked = 0
        for _ in range(60):
            moves = [
                (draw.choice(logs.MOVES), draw.randrange(12), draw.randrange(12)) for _ in range(30)
            ]
            view = View.from_events(logs.Admissible().play(moves))
            if view.has_open_calls:
                with pytest.raises(OpenCalls):
                    await one.ask(request=ModelRequest(view))
            elif len(view):
                for tools in ((), [LOOK]):
                    assert (await one.ask(request=ModelRequest(view, tools))).text == "ok"
                    asked += 1
        assert asked > 50
        assert len(one.server.bodies) == asked
        assert one.server.connections == 1


@every_api
async def test_an_image_a_system_prompt_and_an_empty_message_are_accepted(api: str) -> None:
    make = Maker()
    image = ImageContent(url="data:image/png;base64,iVBORw0KGgo=")
    log = [
        make.system(),
        make.user("look", images=[image]),
        make.agent("  "),
        make.agent("a cat"),
        make.user(""),
        make.system("be brief"),
        make.user("", images=[image]),
    ]
    async with asking(api) as one:
        assert (await one.ask(request=ModelRequest(View.from_events(log)))).text == "ok"


@every_api
async def test_a_tool_is_told_under_a_name_that_the_api_takes_and_called_by_its_own(
    api: str,
) -> None:
    tool = ToolSpec("größe.von", "How large it is.", FrozenObject({"type": "object"}))
    async with asking(api) as one:
        request = ModelRequest(hello().view, [LOOK, tool])
        response = await one.ask(Answer(calls=[Call(api_tool_name("größe.von"))]), request=request)
    assert [call.name for call in response.calls] == ["größe.von"]
    tools = one.server.bodies[0]["tools"]
    assert [each.get("function", each)["name"] for each in tools] == [
        "look",
        api_tool_name("größe.von"),
    ]
    assert [each.get("function", each)["description"] for each in tools] == [
        "Looks somewhere.",
        "How large it is.",
    ]


@every_api
async def test_settings_are_further_fields_of_the_request_and_win(api: str) -> None:
    async with asking(api, settings={"temperature": 0.5, "model": "m2"}) as one:
        await one.ask()
    assert one.server.bodies[0]["temperature"] == 0.5
    assert one.server.bodies[0]["model"] == "m2"


async def test_a_history_with_calls_declares_their_tools_where_the_agent_has_none() -> None:
    make = Maker()
    view = View.from_events([make.user(), make.action("c1"), make.result("c1")])
    async with asking("anthropic", max_tokens=77) as one:
        assert (await one.ask(request=ModelRequest(view))).text == "ok"
    body = one.server.bodies[0]
    assert body["tools"] == [{"name": "look", "input_schema": {"type": "object"}}]
    assert body["tool_choice"] == {"type": "none"}
    assert body["max_tokens"] == 77


# --- histories that the providers refuse ---------------------------------------------------------

MALFORMED = {
    "a01": "S U A1 U",
    "a02": "S U A R9",
    "a03": "S U A1 U R1",
    "a04": "S U A1 A R1",
    "a05": "S U A1 R1 U A U R1",
    "a06": "S U A1 R1 A2 R1",
    "a07": "S U A123 R1 R2 U",
    "a08": "S U R1 R2 A12",
    "nothing": "",
}


class GivenView(View):
    """A view whose messages were made without a look at the rules."""

    def __init__(self, messages: LLMMessages) -> None:
        self._messages = messages

    def derive(self, key: object, make: object) -> LLMMessages:  # type: ignore[override]  # one key
        return self._messages


def careless(api: str, pattern: str) -> LLMMessages:
    """Each sign of the pattern as a message of its own."""
    messages: list[FrozenObject] = []
    system = ""
    for sign in pattern.split():
        calls = [f"call_{n}" for n in sign[1:]]
        match api, sign[0]:
            case "anthropic", "S":
                system = "be kind"
            case "anthropic", "R":
                blocks = [{"type": "tool_result", "tool_use_id": calls[0], "content": "seen"}]
                messages.append(FrozenObject({"role": "user", "content": blocks}))
            case "anthropic", "A" if calls:
                use = {"type": "tool_use", "name": "look", "input": {}}
                uses = [{**use, "id": call} for call in calls]
                messages.append(FrozenObject({"role": "assistant", "content": uses}))
            case "chat", "R":
                result = {"role": "tool", "tool_call_id": calls[0], "content": "seen"}
                messages.append(FrozenObject(result))
            case "chat", "A" if calls:
                call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
                made = [{**call, "id": each} for each in calls]
                messages.append(FrozenObject({"role": "assistant", "tool_calls": made}))
            case "responses", "R":
                output = {"type": "function_call_output", "call_id": calls[0], "output": "seen"}
                messages.append(FrozenObject(output))
            case "responses", "A" if calls:
                call = {"type": "function_call", "name": "look", "arguments": "{}"}
                messages.extend(FrozenObject({**call, "call_id": each}) for each in calls)
            case _, role:
                content: object = "said"
                if api == "anthropic":
                    content = [{"type": "text", "text": "said"}]
                roles = {"S": "system", "U": "user", "A": "assistant"}
                messages.append(FrozenObject({"role": roles[role], "content": content}))
    return LLMMessages(messages, system=system)


@every_api
async def test_a_malformed_history_is_refused_and_told_as_one(api: str) -> None:
    async with asking(api) as one:
        for name, pattern in MALFORMED.items():
            view = GivenView(careless(api, pattern))
            with pytest.raises(MalformedHistory) as caught:
                await one.ask(request=ModelRequest(view, [LOOK]))
            assert isinstance(caught.value, Refused)
            said = "400 invalid_request_error: " if pattern else "the view has no message"
            assert caught.value.found.startswith(said), name
        assert len(one.server.bodies) == len(MALFORMED) - 1
        good = GivenView(careless(api, "S U A1 R1 A U"))
        assert (await one.ask(request=ModelRequest(good, [LOOK]))).text == "ok"


@every_api
async def test_the_same_logs_are_accepted_after_enforcement(api: str) -> None:
    async with asking(api) as one:
        for pattern in MALFORMED.values():
            view = View.from_events([*_log(pattern), Maker("more").user("and?")])
            assert (await one.ask(request=ModelRequest(view, [LOOK]))).text == "ok"


def _log(pattern: str) -> Iterator[Event]:
    make = Maker()
    for n, sign in enumerate(pattern.split()):
        match sign[0]:
            case "S":
                yield make.system()
            case "U":
                yield make.user()
            case "R":
                yield make.result(f"c{sign[1]}")
            case _:
                yield from (make.action(f"c{each}", f"r{n}") for each in sign[1:])
                if not sign[1:]:
                    yield make.agent()


# --- failures ------------------------------------------------------------------------------------


@every_api
async def test_a_transient_failure_is_told_after_one_attempt(api: str) -> None:
    async with asking(api) as one:
        for n, status in enumerate((408, 409, 429, 500, 502, 503, 504, 529), 1):
            with pytest.raises(ModelUnavailable) as caught:
                await one.ask(Status(status, {"type": "overloaded_error", "message": "busy"}))
            assert isinstance(caught.value, Unavailable)
            assert caught.value.found == f"{status} overloaded_error: busy"
            assert caught.value.retry_after_s is None
            assert len(one.server.bodies) == n
        assert (await one.ask()).text == "ok"


@every_api
async def test_a_rate_limit_says_how_long_to_wait(api: str) -> None:
    began_2026 = 1_767_225_600.0
    waits: list[tuple[dict[str, str], float | None]] = [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after": "Thu, 01 Jan 2026 00:01:30 GMT"}, 90.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "inf"}, None),
    ]
    async with asking(api, ports=Ports(now=lambda: began_2026)) as one:
        for headers, seconds in waits:
            with pytest.raises(ModelUnavailable) as caught:
                await one.ask(Status(429, {"type": "rate_limit_error"}, headers))
            assert caught.value.retry_after_s == seconds, headers


@every_api
async def test_a_page_in_place_of_json_is_not_quoted(api: str) -> None:
    async with asking(api) as one:
        with pytest.raises(ModelUnavailable) as caught:
            await one.ask(Status(502, "<html>a gateway's page</html>"))
    assert caught.value.found == "502"


@pytest.mark.parametrize(
    ("api", "reply"),
    [
        ("chat", Status(400, {"code": "context_length_exceeded", "param": "messages"})),
        ("chat", Status(400, {"message": "This model's maximum context length is 9 tokens."})),
        ("chat", Status(429, {"message": "Request too large for m on tokens per min (TPM)"})),
        ("responses", Status(400, {"code": "context_length_exceeded", "param": "input"})),
        ("responses", Answer(["a"], error={"code": "context_length_exceeded"})),
        ("responses", Status(400, {"message": "Your input exceeds the context window of m."})),
        ("anthropic", Status(400, {"message": "prompt is too long: 9 tokens > 8 maximum"})),
        (
            "anthropic",
            Status(400, {"message": "input length and `max_tokens` exceed context limit: 9 + 8"}),
        ),
        ("anthropic", Status(413, {"type": "request_too_large", "message": "too many bytes"})),
        ("anthropic", Answer(["a"], ending="window")),
    ],
)
async def test_a_view_that_is_too_long_is_told_as_an_overflow(
    api: str, reply: Status | Answer
) -> None:
    async with asking(api) as one:
        with pytest.raises(ContextOverflow):
            await one.ask(reply)


@pytest.mark.parametrize(
    ("api", "reply", "text"),
    [
        ("chat", Answer(["some"], ending="filter"), "some"),
        ("chat", Answer(refusal="I will not."), "I will not."),
        ("chat", Status(400, {"code": "content_filter", "param": "prompt"}), ""),
        ("chat", Status(400, {"code": "content_policy_violation"}), ""),
        ("responses", Answer(["some"], ending="filter"), "some"),
        ("responses", Answer(refusal="I will not."), "I will not."),
        ("responses", Answer(error={"code": "invalid_prompt", "message": "flagged"}), ""),
        ("responses", Answer(error={"code": "misalignment_policy_violation"}), ""),
        ("responses", Answer(error={"code": "bio_policy"}), ""),
        ("anthropic", Answer(["some"], ending="refusal"), "some"),
        (
            "anthropic",
            Status(400, {"message": "Output blocked by content filtering policy"}),
            "",
        ),
    ],
)
async def test_a_refusal_is_told_with_what_was_said_but_not_in_its_message(
    api: str, reply: Status | Answer, text: str
) -> None:
    async with asking(api) as one:
        with pytest.raises(ModelRefusal) as caught:
            await one.ask(reply)
    assert caught.value.text == text
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize(
    ("api", "status", "error"),
    [
        ("chat", 401, {"message": "Incorrect API key provided: sk-ab**yz", "code": "bad_key"}),
        ("chat", 404, {"message": "no such model", "code": "model_not_found"}),
        ("chat", 429, {"message": "pay first", "code": "insufficient_quota"}),
        ("chat", 400, {"message": "Unsupported parameter", "param": "temperature"}),
        ("responses", 403, {"message": "not you"}),
        ("responses", 400, {"message": "too hot", "param": "temperature"}),
        ("anthropic", 401, {"type": "authentication_error", "message": "invalid x-api-key"}),
        ("anthropic", 402, {"type": "billing_error", "message": "pay first"}),
        ("anthropic", 404, {"type": "not_found_error", "message": "model: m9"}),
        ("anthropic", 400, {"message": "max_tokens: 9 > 8, which is the maximum allowed"}),
    ],
)
async def test_what_no_other_attempt_will_mend_is_a_model_error(
    api: str, status: int, error: dict[str, str]
) -> None:
    async with asking(api) as one:
        with pytest.raises(ModelError) as caught:
            await one.ask(Status(status, error))
    assert str(status) in caught.value.found
    # A message that quotes a key, if partly, stays out of ours.
    assert (error["message"] in caught.value.found) == (status not in (401, 403))


@every_api
async def test_a_schema_that_the_api_refuses_is_a_model_error_and_no_malformed_history(
    api: str,
) -> None:
    bad = {"name": "look", "parameters": {"type": "array"}, "strict": False}
    tool = {**bad, "type": "function", "function": bad, "input_schema": {"type": "array"}}
    keys = {
        "chat": ("type", "function"),
        "responses": ("type", *bad),
        "anthropic": ("name", "input_schema"),
    }
    kept = {key: tool[key] for key in keys[api]}
    if api == "chat":
        kept["function"] = {"name": "look", "parameters": {"type": "array"}}
    async with asking(api, settings={"tools": [kept]}) as one:
        with pytest.raises(ModelError):
            await one.ask()


def test_a_tool_without_an_object_of_arguments_is_refused_before_any_model_is_asked() -> None:
    with pytest.raises(InvalidInput, match="type: the arguments are an object"):
        ToolSpec("look", "", FrozenObject({"type": "array"}))


def test_two_tools_of_one_name_are_refused_before_any_model_is_asked() -> None:
    with pytest.raises(InvalidInput, match="two tools are called look"):
        ModelRequest(hello().view, [LOOK, LOOK])


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_more_tools_than_the_api_takes_are_refused_before_it_is_asked(api: str) -> None:
    tools = [ToolSpec(f"t{n}", "", FrozenObject({})) for n in range(129)]
    async with asking(api) as one:
        with pytest.raises(ModelError, match="129 tools"):
            await one.ask(request=ModelRequest(hello().view, tools))
        assert not one.server.bodies


@every_api
async def test_an_error_in_the_middle_of_a_stream_is_told_like_one_before_it(api: str) -> None:
    errors: list[tuple[dict[str, str], type[Exception]]] = [
        ({"type": "overloaded_error", "message": "busy"}, ModelUnavailable),
        ({"type": "api_error", "message": "broken"}, ModelUnavailable),
        ({"code": "server_error", "type": "x", "message": "broken"}, ModelUnavailable),
        ({"code": "rate_limit_exceeded", "type": "x", "message": "slow"}, ModelUnavailable),
        ({"type": "authentication_error", "message": "who"}, ModelError),
        ({"type": "invalid_request_error", "message": "no `tool_result`"}, MalformedHistory),
    ]
    async with asking(api) as one:
        for error, kind in errors:
            with pytest.raises(kind):
                await one.ask(Answer(["some"], error=error))
            assert one.written == ["some"]
        assert (await one.ask()).text == "ok"


@pytest.mark.parametrize("shape", ['{"error": {"code": "server_error"}}', '{"code": "x"}'])
async def test_an_error_event_of_the_responses_api_is_transient_unless_it_says_more(
    shape: str,
) -> None:
    event = f'data: {{"type": "error", {shape[1:]}\n\n'.encode()
    async with asking("responses") as one:
        with pytest.raises(ModelUnavailable):
            await one.ask(Raw([event]))


@every_api
@pytest.mark.parametrize("after", ["drop", "end"])
async def test_a_stream_that_is_cut_off_anywhere_before_its_end_is_no_answer(
    api: str, after: Literal["drop", "end"]
) -> None:
    answer = Answer(["a", "b"], [Call("look", ['{"at": ', '"x"}'])])
    async with asking(api) as one:
        events = list(one.server.api.events(answer))
        ends = {"chat": 3, "responses": 1, "anthropic": 1}[api]
        for n in range(len(events) - ends + 1):
            with pytest.raises(ModelUnavailable):
                await one.ask(replace(answer, events_max=n, after=after))
        assert len(one.server.bodies) == len(events) - ends + 1
        assert (await one.ask(answer)).text == "ab"


async def test_a_chat_that_has_finished_needs_neither_its_usage_nor_its_closing_mark() -> None:
    """Servers that imitate the API leave them out."""
    answer = Answer(["a"])
    async with asking("chat") as one:
        count = len(list(one.server.api.events(answer)))
        response = await one.ask(replace(answer, events_max=count - 2))
    assert response.text == "a"
    assert response.usage.input_tokens == 0


@every_api
async def test_a_stream_that_cannot_be_read_is_a_transient_failure(api: str) -> None:
    async with asking(api) as one:
        with pytest.raises(ModelUnavailable):
            await one.ask(Raw([b"data: {half an\n\n"]))


@every_api
async def test_a_call_that_was_cut_off_for_its_length_is_no_call(api: str) -> None:
    answer = Answer(["let me"], [Call("look", ['{"at": '])], ending="length")
    async with asking(api) as one:
        with pytest.raises(ModelError) as caught:
            await one.ask(answer)
        assert "ran out of tokens" in str(caught.value)

        whole = replace(answer, calls=[Call("look", ['{"at": "x"}'])])
        with pytest.raises(ModelError):
            await one.ask(whole)


@every_api
async def test_a_text_that_was_cut_off_for_its_length_is_an_answer_as_far_as_it_goes(
    api: str,
) -> None:
    async with asking(api) as one:
        assert (await one.ask(Answer(["so"], ending="length"))).text == "so"
        with pytest.raises(ModelError):
            await one.ask(Answer(ending="length"))


@every_api
async def test_an_answer_without_a_word_is_one(api: str) -> None:
    async with asking(api) as one:
        assert (await one.ask(Answer())).text == ""


@every_api
async def test_a_provider_that_cannot_be_reached_is_unavailable(api: str) -> None:
    async with asking(api) as one:
        one.server.socket.close()
        with pytest.raises(ModelUnavailable) as caught:
            await one.ask()
    assert "Connect" in caught.value.found


@every_api
async def test_a_provider_that_falls_silent_is_unavailable_after_the_timeout(api: str) -> None:
    async with asking(api) as one:
        await one.ask()  # the next request goes over the same connection, and need not open one
        adapter: Any = one.model
        one.model = type(adapter)("m", client=adapter._client, timeout_s=0.05)
        with pytest.raises(ModelUnavailable) as caught:
            await one.ask(Answer(["a", "b"], events_max=5, after="hang"))
        assert "Timeout" in caught.value.found


# --- breaking off, opening and closing -----------------------------------------------------------


async def _is_broken_off(server: Server) -> bool:
    return await anyio.to_thread.run_sync(server.was_broken_off.wait, WAIT_MAX_S)


@every_api
async def test_a_cancelled_request_breaks_its_connection_off(api: str) -> None:
    async with asking(api) as one:
        written = anyio.Event()
        ended: list[str] = []

        async def write(piece: str) -> None:
            written.set()

        async def respond() -> None:
            try:
                await one.model.respond(hello(), write)
            finally:
                ended.append("ended")

        async with anyio.create_task_group() as group:
            one.server.replies.append(Answer(["a", "b"], events_max=5, after="hang"))
            group.start_soon(respond)
            await written.wait()

            group.cancel_scope.cancel()
        gc.collect()
        await anyio.lowlevel.checkpoint()

        assert ended == ["ended"]
        assert await _is_broken_off(one.server)
        assert (await one.ask()).text == "ok"


@every_api
async def test_what_write_raises_passes_and_breaks_the_connection_off(api: str) -> None:
    """So does a turn that has ended refuse the next piece."""

    class NotYours(Exception):
        pass

    async def write(piece: str) -> None:
        raise NotYours

    async with asking(api) as one:
        one.server.replies.append(Answer(["a", "b", "c"], events_max=5, after="hang"))
        with pytest.raises(NotYours):
            await one.model.respond(hello(), write)
        # On trio a generator that nobody has closed is a warning here, and so a failure.
        gc.collect()
        await anyio.lowlevel.checkpoint()

        assert await _is_broken_off(one.server)
        assert (await one.ask()).text == "ok"


@every_api
async def test_a_finished_answer_leaves_nothing_behind_and_its_connection_to_the_next(
    api: str,
) -> None:
    async with asking(api) as one:
        for _ in range(3):
            await one.ask()
            gc.collect()
            await anyio.lowlevel.checkpoint()
        assert one.server.connections == 1


@every_api
async def test_a_connection_that_is_held_open_after_the_end_does_not_hold_up_the_answer(
    api: str,
) -> None:
    async with asking(api) as one:
        assert (await one.ask(Answer(["a"], after="hang"))).text == "a"
        assert await _is_broken_off(one.server)


async def test_several_requests_of_one_model_run_side_by_side() -> None:
    async with asking("chat") as one:
        gate = threading.Event()
        waiting = threading.Semaphore(0)

        def before_text(_: int) -> None:
            waiting.release()
            assert gate.wait(WAIT_MAX_S)

        one.server.replies.extend([Answer([text], before_text=before_text) for text in "abc"])
        texts: set[str] = set()

        async def ask() -> None:
            texts.add((await one.model.respond(hello(), one.write)).text)

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(ask)
            for _ in range(3):
                await anyio.to_thread.run_sync(partial(waiting.acquire, timeout=WAIT_MAX_S))
            gate.set()
    assert texts == {"a", "b", "c"}


async def test_a_client_of_its_own_is_made_when_asked_and_closed_with_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(ChatApi()) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "key")
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        async with OpenAIChatModel("m") as model:
            clients = [model._client]
            one = Asking(server, model)
            assert (await one.ask()).text == "ok"
            clients.append(model._client)
        none_yet, client = clients
        assert none_yet is None
        assert isinstance(client, AsyncOpenAI)
        assert client.max_retries == 0
        assert client.is_closed()
        # It can be asked again, and then has new connections.
        assert (await one.ask()).text == "ok"
        await model.aclose()


async def test_a_client_that_was_given_stays_open_and_keeps_its_retries() -> None:
    async with AsyncOpenAI(api_key="key", max_retries=5) as client:
        async with OpenAIChatModel("m", client=client):
            pass
        assert not client.is_closed()
        assert client.max_retries == 5


async def test_a_key_that_is_nowhere_is_a_model_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANTHROPIC_CONFIG_DIR", str(tmp_path))
    for model in (OpenAIChatModel("m"), AnthropicModel("m")):
        async with model:
            with pytest.raises(ModelError, match=r"(?i)api_key|credentials"):
                await model.respond(hello(), Asking.write)  # type: ignore[arg-type]  # never written
