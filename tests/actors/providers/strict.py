"""What each provider refuses of a request, in its own words.

The words are those that the providers answered with, as people have reported them; the adapters
tell a malformed history from other faults by them. What no wording is known for is left to the
oracles of `tests.actors`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.actors import oracles

Body = Mapping[str, Any]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class BadRequest(Exception):
    """The provider answers 400."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def check_chat(body: Body) -> None:
    """Raise what Chat Completions refuses."""
    _require(body, "model", str)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    messages = body["messages"]
    if not messages:
        raise BadRequest("[] is too short - 'messages'", "messages")
    open_at = 0
    waiting: list[str] = []
    for n, message in enumerate(messages):
        param = f"messages.[{n}].role"
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                raise BadRequest(
                    "Invalid parameter: messages with role 'tool' must be a response to a "
                    "preceeding message with 'tool_calls'.",
                    param,
                )
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            raise _no_response(open_at, waiting)
        open_at, waiting = n, [call["id"] for call in message.get("tool_calls", ())]
        _check_chat_content(n, message)
    if waiting:
        raise _no_response(open_at, waiting)
    for n, tool in enumerate(_tools(body)):
        assert tool.keys() == {"type", "function"}
        assert tool["type"] == "function"
        _check_function(tool["function"], f"tools[{n}].function", "parameters")
    _leave_to(oracles.check_openai, messages, "messages")


def _no_response(at: int, waiting: Sequence[str]) -> BadRequest:
    return BadRequest(
        "An assistant message with 'tool_calls' must be followed by tool messages responding to "
        "each 'tool_call_id'. The following tool_call_ids did not have response messages: "
        + ", ".join(waiting),
        f"messages.[{at}].role",
    )


def _check_chat_content(n: int, message: Body) -> None:
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise BadRequest(
            "Invalid value for 'content': expected a string, got null.", f"messages.[{n}].content"
        )
    for part in content if isinstance(content, list) else ():
        assert message["role"] == "user"
        assert part["type"] in ("text", "image_url")
        if part["type"] == "image_url" and not part["image_url"]["url"]:
            raise BadRequest("Invalid image.", "messages", "invalid_image_url")


def check_responses(body: Body) -> None:
    """Raise what the Responses API refuses."""
    _require(body, "model", str)
    assert body["stream"] is True
    assert body["store"] is False
    check_responses_items(body["input"])
    for n, tool in enumerate(_tools(body)):
        assert tool["type"] == "function"
        assert tool["strict"] is False
        function = {key: tool[key] for key in tool if key not in ("type", "strict")}
        _check_function(function, f"tools[{n}]", "parameters")


def check_responses_items(items: Sequence[Any]) -> None:
    """The history's part of it."""
    if not items:
        raise BadRequest("Missing required parameter: 'input'.", "input")
    calls: list[str] = []
    answered: list[str] = []
    for n, item in enumerate(items):
        match item.get("type", "message"):
            case "function_call":
                assert item.keys() == {"type", "call_id", "name", "arguments"}
                assert _NAME.fullmatch(item["name"])
                assert isinstance(json.loads(item["arguments"]), dict)
                calls.append(item["call_id"])
            case "function_call_output":
                assert item.keys() == {"type", "call_id", "output"}
                assert isinstance(item["output"], str)
                if item["call_id"] not in calls:
                    raise BadRequest(
                        "No tool call found for function call output with call_id "
                        f"{item['call_id']}.",
                        "input",
                    )
                answered.append(item["call_id"])
            case "message":
                # Stricter than the API, which looks for an output anywhere: a model that reads
                # what was said before the result of its call takes it for the answer to it.
                _all_answered(calls, answered)
                _check_responses_message(n, item)
            case other:
                raise BadRequest(f"Invalid value: '{other}'.", f"input[{n}].type", "invalid_value")
    _all_answered(calls, answered)
    if len(set(calls)) < len(calls) or len(set(answered)) < len(answered):
        raise BadRequest("Duplicate item found in input.", "input")


def _all_answered(calls: Sequence[str], answered: Sequence[str]) -> None:
    for call in calls:
        if call not in answered:
            raise BadRequest(f"No tool output found for function call {call}.", "input")


def _check_responses_message(n: int, item: Body) -> None:
    assert item["role"] in ("system", "user", "assistant")
    content = item["content"]
    if isinstance(content, str):
        if not content and item["role"] != "system":
            raise BadRequest("Invalid value: ''.", f"input[{n}].content", "invalid_value")
        return
    assert content
    assert item["role"] == "user"
    for part in content:
        match part["type"]:
            case "input_text":
                assert part["text"]
            case "input_image":
                assert part["image_url"]
                assert part["detail"] in ("low", "high", "auto")
            case other:
                raise BadRequest(f"Invalid value: '{other}'.", f"input[{n}].content")


def check_anthropic(body: Body) -> None:
    """Raise what the Messages API refuses."""
    _require(body, "model", str)
    _require(body, "max_tokens", int)
    assert body["stream"] is True
    assert body.get("system", "x"), "an empty system prompt"
    messages = body["messages"]
    if not messages:
        raise BadRequest("messages: at least one message is required")
    waiting: list[str] = []
    for n, message in enumerate(messages):
        blocks = message["content"]
        for at, block in enumerate(blocks):
            if block["type"] == "text" and not block["text"]:
                raise BadRequest("messages: text content blocks must be non-empty")
            if block["type"] == "tool_result" and block["tool_use_id"] not in waiting:
                raise BadRequest(
                    f"messages.{n}.content.{at}: unexpected `tool_use_id` found in `tool_result` "
                    f"blocks: {block['tool_use_id']}. Each `tool_result` block must have a "
                    "corresponding `tool_use` block in the previous message."
                )
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if missing := [call for call in waiting if call not in results]:
            raise _no_result(n - 1, missing)
        if len(set(results)) < len(results):
            raise BadRequest(
                f"messages.{n}.content: each tool_use must have a single result. Found multiple "
                f"`tool_result` blocks with id: {results[0]}"
            )
        waiting = [block["id"] for block in blocks if block["type"] == "tool_use"]
    if waiting:
        raise _no_result(len(messages) - 1, waiting)
    _leave_to(oracles.check_anthropic, messages, "messages")
    tools = _tools(body)
    uses_tools = any(b["type"] == "tool_use" for message in messages for b in message["content"])
    if uses_tools and not tools:
        raise BadRequest("Requests which include `tool_use` blocks must define tools.")
    for n, tool in enumerate(tools):
        _check_function(tool, f"tools.{n}.custom", "input_schema")


def _no_result(at: int, missing: Sequence[str]) -> BadRequest:
    return BadRequest(
        f"messages.{at}: `tool_use` ids were found without `tool_result` blocks immediately "
        f"after: {', '.join(missing)}. Each `tool_use` block must have a corresponding "
        "`tool_result` block in the next message."
    )


def _require(body: Body, field: str, kind: type) -> None:
    if not isinstance(body.get(field), kind):
        raise BadRequest(f"{field}: Field required", field)


def _tools(body: Body) -> Sequence[Any]:
    if "tools" not in body:
        return ()
    tools: Sequence[Any] = body["tools"]
    if not tools:
        raise BadRequest("[] is too short - 'tools'", "tools")
    return tools


def _check_function(function: Body, param: str, schema_key: str) -> None:
    assert function.keys() <= {"name", "description", schema_key}
    if not _NAME.fullmatch(function["name"]):
        raise BadRequest(f"Invalid '{param}.name': string does not match pattern.", f"{param}.name")
    schema = function[schema_key]
    if schema.get("type") != "object":
        raise BadRequest(
            f"{param}.{schema_key}: schema must be a JSON Schema of 'type: \"object\"', got "
            f"'type: \"{schema.get('type')}\"'.",
            f"{param}.{schema_key}",
            "invalid_function_parameters",
        )


def _leave_to(check: Any, messages: Sequence[Any], param: str) -> None:  # noqa: ANN401 - an oracle
    try:
        check(messages)
    except (AssertionError, KeyError) as fault:
        raise BadRequest(f"{param}: {fault}", param) from fault
