"""What each provider refuses of a request, in its own words.

The words are those that the providers answered with, as people have reported them; the adapters
tell a malformed history from other faults by them. What no wording is known for is left to the
oracles of `tests.actors`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from tests.actors.core import oracles

Body = Mapping[str, Any]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PROPERTY_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_IMAGE_URL = re.compile(
    r"https?://\S+|data:(image/(?:png|jpeg|gif|webp));base64,([^,]*)", re.IGNORECASE
)
CHAT_LENGTH_MAX = 1_048_576
RESPONSES_LENGTH_MAX = 10_485_760
IMAGE_LENGTH_MAX = 5_242_880


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
    _check_array("messages", messages, 2048)
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
            _check_chat_content(n, message)
            continue
        if waiting:
            raise _no_response(open_at, waiting)
        open_at, waiting = n, [call["id"] for call in message.get("tool_calls", ())]
        _check_chat_content(n, message)
    if waiting:
        raise _no_response(open_at, waiting)
    tools = _tools(body)
    _check_array("tools", tools, 128)
    for n, tool in enumerate(tools):
        assert tool.keys() == {"type", "function"}
        assert tool["type"] == "function"
        _check_function(tool["function"], f"tools[{n}].function", "parameters")
    _check_names([tool["function"]["name"] for tool in tools])
    _leave_to(oracles.check_openai, messages, "messages")


def _no_response(at: int, waiting: Sequence[str]) -> BadRequest:
    return BadRequest(
        "An assistant message with 'tool_calls' must be followed by tool messages responding to "
        "each 'tool_call_id'. The following tool_call_ids did not have response messages: "
        + ", ".join(waiting),
        f"messages.[{at}].role",
    )


def _check_chat_content(n: int, message: Body) -> None:
    at = f"messages[{n}]"
    assert message.keys() <= {"role", "content", "tool_calls", "tool_call_id", "reasoning_content"}
    assert message["role"] in ("system", "user", "assistant", "tool")
    assert ("tool_call_id" in message) == (message["role"] == "tool")
    content = message.get("content")
    if "tool_calls" in message:
        assert message["role"] == "assistant"
        assert message["tool_calls"], f"[] is too short - '{at}.tool_calls'"
        _check_array(f"{at}.tool_calls", message["tool_calls"], 128)
        for call in message["tool_calls"]:
            _check_length(f"{at}.tool_calls.id", call["id"], 40)
            assert _NAME.fullmatch(call["function"]["name"])
            _check_length(f"{at}.arguments", call["function"]["arguments"], CHAT_LENGTH_MAX)
    elif content is None:
        raise BadRequest(
            "Invalid value for 'content': expected a string, got null.", f"messages.[{n}].content"
        )
    if isinstance(content, str):
        _check_length(f"{at}.content", content, CHAT_LENGTH_MAX)
        return
    assert content is None or content, "no parts"
    for part in content or ():
        if part["type"] == "text":
            _check_length(f"{at}.content", part["text"], CHAT_LENGTH_MAX)
        elif part["type"] == "file":
            assert message["role"] == "user"
            assert part["file"].keys() == {"filename", "file_data"}
            _check_pdf(part["file"]["filename"], part["file"]["file_data"])
        else:
            assert part["type"] == "image_url"
            assert message["role"] == "user"
            _check_image_url(part["image_url"]["url"])


def _check_image_url(url: str) -> None:
    """What OpenAI says of a URL, before it follows it."""
    found = _IMAGE_URL.fullmatch(url)
    if found is None:
        raise BadRequest(
            "Invalid 'image_url'. Expected a valid URL.", "messages", "invalid_image_url"
        )
    if found[1] is not None:
        _check_image(found[1], found[2])


def _check_pdf(name: str, url: str) -> None:
    """What a provider says of a document that it is sent; the only kind that all three take."""
    if not name:
        raise BadRequest("Missing required parameter: 'file.filename'.", "messages")
    found = re.fullmatch(r"data:application/pdf;base64,([^,]*)", url)
    if found is None:
        raise BadRequest(
            "Invalid file data: expected a base64-encoded data URL with an application/pdf MIME "
            "type.",
            "messages",
        )
    try:
        is_pdf = base64.b64decode(found[1], validate=True).startswith(b"%PDF-")
    except ValueError:
        is_pdf = False
    if not is_pdf:
        raise BadRequest("The PDF specified was not valid.", "messages")


def _check_image(media_type: str, data: str) -> None:
    """What a provider says of an image that it is sent."""
    if len(data) > IMAGE_LENGTH_MAX:
        raise BadRequest(
            f"messages: image exceeds 5 MB maximum: {len(data)} bytes > {IMAGE_LENGTH_MAX} bytes"
        )
    try:
        start = base64.b64decode(data, validate=True)[:12]
    except ValueError:
        raise BadRequest("messages: Invalid base64 image data", "messages") from None
    kinds = {
        b"\x89PNG": "image/png",
        b"\xff\xd8\xff": "image/jpeg",
        b"GIF8": "image/gif",
        b"RIFF": "image/webp",
    }
    if media_type not in [kind for begin, kind in kinds.items() if start.startswith(begin)]:
        raise BadRequest(
            f"messages: The image was specified using the {media_type} media type, but the image "
            "appears to be of another",
            "messages",
        )


def _check_array(param: str, array: Sequence[Any], length_max: int) -> None:
    if len(array) > length_max:
        raise BadRequest(
            f"Invalid '{param}': array too long. Expected an array with maximum length "
            f"{length_max}, but got an array with length {len(array)} instead.",
            param,
            "array_above_max_length",
        )


def _check_length(param: str, text: str, length_max: int) -> None:
    assert isinstance(text, str)
    text.encode()  # a lone surrogate is no Unicode text
    if len(text) > length_max:
        raise BadRequest(
            f"Invalid '{param}': string too long. Expected a string with maximum length "
            f"{length_max}, but got a string with length {len(text)} instead.",
            param,
            "string_above_max_length",
        )


def _check_names(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise BadRequest("tools: Tool names must be unique.", "tools")


def check_responses(body: Body) -> None:
    """Raise what the Responses API refuses."""
    _require(body, "model", str)
    assert body["stream"] is True
    assert body["store"] is False
    check_responses_items(body["input"])
    tools = _tools(body)
    _check_array("tools", tools, 128)
    _check_names([tool["name"] for tool in tools])
    for n, tool in enumerate(tools):
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
                _check_length(f"input[{n}].call_id", item["call_id"], 64)
                _check_length(f"input[{n}].arguments", item["arguments"], RESPONSES_LENGTH_MAX)
                calls.append(item["call_id"])
            case "function_call_output":
                assert item.keys() == {"type", "call_id", "output"}
                output = item["output"]
                for part in [output] if isinstance(output, str) else output:
                    text = part if isinstance(part, str) else part["text"]
                    _check_length(f"input[{n}].output", text, RESPONSES_LENGTH_MAX)
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
            case "reasoning":
                assert item.keys() == {"type", "id", "summary", "encrypted_content"}
                if not item["encrypted_content"]:
                    raise BadRequest(
                        f"Item with id '{item['id']}' not found. Items are not persisted when "
                        "`store` is set to false.",
                        "input",
                    )
                following = items[n + 1] if n + 1 < len(items) else {}
                if following.get("type") not in ("function_call", "reasoning") and (
                    following.get("role") != "assistant"
                ):
                    raise BadRequest(
                        f"Item '{item['id']}' of type 'reasoning' was provided without its "
                        "required following item.",
                        "input",
                    )
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
        if not content.strip():
            raise BadRequest("Invalid value: ''.", f"input[{n}].content", "invalid_value")
        _check_length(f"input[{n}].content", content, RESPONSES_LENGTH_MAX)
        return
    assert content
    assert item["role"] != "assistant"
    for part in content:
        match part["type"]:
            case "input_text":
                assert part["text"]
                _check_length(f"input[{n}].content", part["text"], RESPONSES_LENGTH_MAX)
            case "input_image":
                assert item["role"] == "user"
                _check_image_url(part["image_url"])
                assert part["detail"] in ("low", "high", "auto")
            case "input_file" if "file_url" in part:
                assert part.keys() == {"type", "file_url"}
                assert re.fullmatch(r"https?://\S+", part["file_url"], re.IGNORECASE)
            case "input_file":
                assert part.keys() == {"type", "filename", "file_data"}
                _check_pdf(part["filename"], part["file_data"])
            case other:
                raise BadRequest(f"Invalid value: '{other}'.", f"input[{n}].content")


def check_anthropic(body: Body) -> None:
    """Raise what the Messages API refuses."""
    _require(body, "model", str)
    _require(body, "max_tokens", int)
    assert body["stream"] is True
    if not body.get("system", "x").strip():
        raise BadRequest("system: text content blocks must contain non-whitespace text")
    messages = body["messages"]
    if not messages:
        raise BadRequest("messages: at least one message is required")
    if messages[-1]["role"] != "user":
        raise BadRequest(
            "This model does not support assistant message prefill. The conversation must end with "
            "a user message."
        )
    waiting: list[str] = []
    for n, message in enumerate(messages):
        blocks = message["content"]
        for at, block in enumerate(blocks):
            _check_block(f"messages.{n}.content.{at}", message["role"], block)
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
    _check_names([tool["name"] for tool in tools])
    for n, tool in enumerate(tools):
        _check_function(tool, f"tools.{n}.custom", "input_schema")


def _check_block(at: str, role: str, block: Body) -> None:
    """What Anthropic says of one block."""
    match block["type"]:
        case "text":
            if not block["text"]:
                raise BadRequest("messages: text content blocks must be non-empty")
            if not block["text"].strip():
                raise BadRequest("messages: text content blocks must contain non-whitespace text")
        case "image":
            assert role == "user"
            source = block["source"]
            if source["type"] == "base64":
                _check_image(source["media_type"], source["data"])
            elif not re.fullmatch(r"https?://\S+", source["url"], re.IGNORECASE):
                raise BadRequest(f"{at}.image.source.url: Only HTTP and HTTPS URLs are supported")
        case "document":
            assert role == "user"
            _check_document(at, block)
        case "tool_result":
            content = block.get("content", "")
            if block.get("is_error") and not content:
                raise BadRequest(f"{at}.tool_result: content cannot be empty if `is_error` is true")
            if content and not content.strip():
                raise BadRequest("messages: text content blocks must contain non-whitespace text")
        case "tool_use":
            assert role == "assistant"
            assert re.fullmatch(r"[a-zA-Z0-9_-]+", block["id"])
            assert isinstance(block["input"], dict)
        case "thinking":
            assert isinstance(block["thinking"], str)
            assert block["signature"], f"{at}.thinking.signature: Field required"
        case "redacted_thinking":
            assert block["data"]
        case other:
            raise BadRequest(f"{at}: Input tag '{other}' found using 'type' does not match")


def _check_document(at: str, block: Body) -> None:
    assert block.keys() == {"type", "source", "title"}
    assert 1 <= len(block["title"]) <= 500
    source = block["source"]
    if source["type"] == "base64":
        assert source["media_type"] == "application/pdf"
        _check_pdf(block["title"], f"data:application/pdf;base64,{source['data']}")
    elif source["type"] == "text":
        assert source["media_type"] == "text/plain"
        if not source["data"].strip():
            raise BadRequest(f"{at}.document.source: text must be non-empty")
    elif not re.fullmatch(r"https?://\S+", source["url"], re.IGNORECASE):
        raise BadRequest(f"{at}.document.source.url: Only HTTP and HTTPS URLs are supported")


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
    for key in ("oneOf", "anyOf", "allOf", "enum", "not"):
        if key in schema:
            raise BadRequest(
                f"{param}.{schema_key}: input_schema does not support oneOf, allOf, or anyOf at "
                "the top level",
                f"{param}.{schema_key}",
                "invalid_function_parameters",
            )
    if schema_key == "parameters" and "properties" not in schema:  # OpenAI's rule
        raise _bad_schema(param, schema_key, "(): object schema missing properties")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise _bad_schema(
            param,
            schema_key,
            f"JSON schema is invalid. It must match JSON Schema draft 2020-12 ({error.message})",
        ) from error
    _check_parts_of_schema(schema, param, schema_key)


def _check_parts_of_schema(schema: Any, param: str, schema_key: str) -> None:  # noqa: ANN401 - JSON
    if isinstance(schema, list):
        for part in schema:
            _check_parts_of_schema(part, param, schema_key)
    if not isinstance(schema, dict):
        return
    kinds = schema.get("type", [])
    if "array" in (kinds if isinstance(kinds, list) else [kinds]) and "items" not in schema:
        raise _bad_schema(param, schema_key, "array schema missing items")
    for name in schema.get("properties", {}):
        if not _PROPERTY_NAME.fullmatch(name):
            raise _bad_schema(
                param, schema_key, "Property keys should match pattern '^[a-zA-Z0-9_.-]{1,64}$'"
            )
    for key, part in schema.items():
        if key in ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas"):
            for one in part.values():
                _check_parts_of_schema(one, param, schema_key)
        elif key not in ("enum", "const", "default", "examples"):
            _check_parts_of_schema(part, param, schema_key)


def _bad_schema(param: str, schema_key: str, found: str) -> BadRequest:
    return BadRequest(
        f"Invalid schema for {param}.{schema_key}: {found}",
        f"{param}.{schema_key}",
        "invalid_function_parameters",
    )


def _leave_to(check: Any, messages: Sequence[Any], param: str) -> None:  # noqa: ANN401 - an oracle
    try:
        check(messages)
    except (AssertionError, KeyError) as fault:
        raise BadRequest(f"{param}: {fault}", param) from fault
