"""Servers on loopback that speak the providers' APIs: strict, slow, cut off, or out of order.

A server answers its requests from a list of replies, one each, in a thread of its own for each
connection. It refuses what its API would refuse before it looks at the list. Nothing here sleeps:
a reply that is to wait waits for the test, or for the client to go away.
"""

from __future__ import annotations

import json
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from tests.actors.models import strict

WAIT_MAX_S = 60.0
"""How long a server waits for a test that has gone wrong."""


@dataclass(frozen=True)
class Call:
    """A call, its arguments in the pieces in which they are sent."""

    name: str
    arguments: Sequence[str] = ("{}",)
    id: str = "call_1"


@dataclass(frozen=True)
class Answer:
    """A streamed answer."""

    text: Sequence[str] = ()
    calls: Sequence[Call] = ()
    ending: Literal["whole", "length", "filter", "refusal", "window"] = "whole"
    refusal: str = ""
    thinking: Sequence[Mapping[str, Any]] = ()
    input_tokens: int = 100
    """All of them, also the cached ones."""
    cached_tokens: int = 0
    written_tokens: int = 0
    output_tokens: int = 10
    reasoning_tokens: int = 0
    error: Mapping[str, Any] | None = None
    """Sent as an event in place of the end."""
    events_max: int | None = None
    """How many events are sent, where the stream does not come to its end."""
    after: Literal["end", "drop", "hang"] = "end"
    """What then becomes of the connection; `hang` waits until the client breaks it off."""
    before_text: Callable[[int], None] = lambda _: None
    """Called before the nth piece of text is sent; may wait."""


@dataclass(frozen=True)
class Status:
    """A refusal by status; an error of the API's shape, or a body as it is."""

    status: int
    error: Mapping[str, Any] | str = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Raw:
    """Bytes of a stream, as they are."""

    chunks: Sequence[bytes]


Reply = Answer | Status | Raw
Sse = tuple[str, Mapping[str, Any] | str, bool]
"""An event: its name where it has one, its data, and whether it is a piece of text."""


class Api(ABC):
    """How one API is spoken."""

    path: str

    @abstractmethod
    def check(self, body: Mapping[str, Any]) -> None:
        """Raise `BadRequest` for what the API refuses."""

    @abstractmethod
    def error_body(self, error: Mapping[str, Any]) -> Mapping[str, Any]: ...

    @abstractmethod
    def events(self, answer: Answer) -> Iterator[Sse]: ...


class ChatApi(Api):
    """Chat Completions."""

    path = "/v1/chat/completions"

    def check(self, body: Mapping[str, Any]) -> None:
        strict.check_chat(body)

    def error_body(self, error: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"error": {"message": "", "type": None, "param": None, "code": None, **error}}

    def events(self, answer: Answer) -> Iterator[Sse]:
        yield self._delta(role="assistant", content="")
        for thought in answer.thinking:
            yield self._delta(reasoning_content=thought.get("reasoning_content"))
        for piece in answer.text:
            yield (*self._delta(content=piece)[:2], True)
        if answer.refusal:
            yield self._delta(refusal=answer.refusal)
        for index, call in enumerate(answer.calls):
            begun = {"name": call.name, "arguments": ""}
            yield self._delta(
                tool_calls=[{"index": index, "id": call.id, "type": "function", "function": begun}]
            )
        # Side by side: the pieces of several calls may come in any order.
        for n in range(max((len(call.arguments) for call in answer.calls), default=0)):
            for index, call in enumerate(answer.calls):
                for piece in call.arguments[n : n + 1]:
                    yield self._delta(
                        tool_calls=[{"index": index, "function": {"arguments": piece}}]
                    )
        if answer.error is not None:
            yield "", self.error_body(answer.error), False
            return
        whole = "tool_calls" if answer.calls else "stop"
        reason = {"length": "length", "filter": "content_filter"}.get(answer.ending, whole)
        yield self._chunk([{"index": 0, "delta": {}, "finish_reason": reason}])
        usage = {
            "prompt_tokens": answer.input_tokens,
            "completion_tokens": answer.output_tokens,
            "total_tokens": answer.input_tokens + answer.output_tokens,
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        }
        yield self._chunk([], usage)
        yield "", "[DONE]", False

    def _delta(self, **delta: object) -> Sse:
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": None}])

    def _chunk(
        self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None = None
    ) -> Sse:
        chunk = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": choices,
            "usage": usage,
        }
        return "", chunk, False


class ResponsesApi(Api):
    """OpenAI's Responses."""

    path = "/v1/responses"

    def check(self, body: Mapping[str, Any]) -> None:
        strict.check_responses(body)

    def error_body(self, error: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"error": {"message": "", "type": None, "param": None, "code": None, **error}}

    def events(self, answer: Answer) -> Iterator[Sse]:
        for number, (kind, fields, is_text) in enumerate(self._events(answer)):
            yield kind, {"type": kind, "sequence_number": number, **fields}, is_text

    def _events(self, answer: Answer) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
        yield "response.created", {"response": self._response("in_progress")}, False
        at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "content": []}
        for thought in answer.thinking:
            item = {**thought, "type": "reasoning"}
            begun = {**item, "encrypted_content": "unfinished"}
            yield "response.output_item.added", {"output_index": 0, "item": begun}, False
            yield "response.output_item.done", {"output_index": 0, "item": item}, False
        if answer.text or answer.refusal:
            yield "response.output_item.added", {"output_index": 0, "item": message}, False
            for piece in answer.text:
                yield "response.output_text.delta", {**at, "delta": piece, "logprobs": []}, True
            if answer.refusal:
                yield "response.refusal.delta", {**at, "delta": answer.refusal}, False
            yield "response.output_item.done", {"output_index": 0, "item": message}, False
        for index, call in enumerate(answer.calls, 1):
            yield from self._call(index, call, is_cut=answer.ending == "length")
        if answer.error is not None:
            failed = {**self._response("failed"), "error": answer.error}
            yield "response.failed", {"response": failed}, False
            return
        reasons = {"length": "max_output_tokens", "filter": "content_filter"}
        reason = reasons.get(answer.ending)
        status = "incomplete" if reason else "completed"
        response = {
            **self._response(status),
            "incomplete_details": {"reason": reason} if reason else None,
            "usage": {
                "input_tokens": answer.input_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens},
                "output_tokens": answer.output_tokens,
                "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
                "total_tokens": answer.input_tokens + answer.output_tokens,
            },
        }
        yield f"response.{status}", {"response": response}, False

    def _call(
        self, index: int, call: Call, *, is_cut: bool
    ) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
        item = {"id": f"fc_{index}", "type": "function_call", "call_id": call.id, "name": call.name}
        at = {"item_id": item["id"], "output_index": index}
        yield "response.output_item.added", {**at, "item": {**item, "arguments": ""}}, False
        for piece in call.arguments:
            yield "response.function_call_arguments.delta", {**at, "delta": piece}, False
        if not is_cut:
            arguments = "".join(call.arguments)
            yield "response.function_call_arguments.done", {**at, "arguments": arguments}, False
            yield (
                "response.output_item.done",
                {**at, "item": {**item, "arguments": arguments, "status": "completed"}},
                False,
            )

    def _response(self, status: str) -> Mapping[str, Any]:
        return {"id": "resp_1", "object": "response", "status": status, "output": []}


class AnthropicApi(Api):
    """Anthropic's Messages."""

    path = "/v1/messages"

    def check(self, body: Mapping[str, Any]) -> None:
        strict.check_anthropic(body)

    def error_body(self, error: Mapping[str, Any]) -> Mapping[str, Any]:
        said = {key: error[key] for key in ("type", "message") if key in error}
        return {"type": "error", "error": {"type": "invalid_request_error", **said}}

    def events(self, answer: Answer) -> Iterator[Sse]:
        for kind, fields, is_text in self._events(answer):
            yield kind, {"type": kind, **fields}, is_text

    def _events(self, answer: Answer) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
        usage = {
            "input_tokens": answer.input_tokens - answer.cached_tokens - answer.written_tokens,
            "cache_read_input_tokens": answer.cached_tokens,
            "cache_creation_input_tokens": answer.written_tokens,
            "output_tokens": 1,
        }
        message = {"id": "msg_1", "type": "message", "role": "assistant", "content": []}
        yield "message_start", {"message": {**message, "usage": usage}}, False
        index = 0
        for thought in answer.thinking:
            yield from self._thinking(index, thought)
            index += 1
        if answer.text:
            block: Mapping[str, Any] = {"type": "text", "text": ""}
            yield "content_block_start", {"index": index, "content_block": block}, False
            yield "ping", {}, False
            for piece in answer.text:
                delta = {"type": "text_delta", "text": piece}
                yield "content_block_delta", {"index": index, "delta": delta}, True
            yield "content_block_stop", {"index": index}, False
            index += 1
        for call in answer.calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield "content_block_start", {"index": index, "content_block": block}, False
            for piece in call.arguments:
                delta = {"type": "input_json_delta", "partial_json": piece}
                yield "content_block_delta", {"index": index, "delta": delta}, False
            yield "content_block_stop", {"index": index}, False
            index += 1
        if answer.error is not None:
            yield "error", self.error_body(answer.error), False
            return
        reason = {
            "whole": "tool_use" if answer.calls else "end_turn",
            "length": "max_tokens",
            "refusal": "refusal",
            "window": "model_context_window_exceeded",
        }[answer.ending]
        ending = {"stop_reason": reason, "stop_sequence": None}
        output = {"output_tokens": answer.output_tokens}
        yield "message_delta", {"delta": ending, "usage": output}, False
        yield "message_stop", {}, False

    def _thinking(
        self, index: int, thought: Mapping[str, Any]
    ) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
        if "data" in thought:
            block: Mapping[str, Any] = {"type": "redacted_thinking", **thought}
            yield "content_block_start", {"index": index, "content_block": block}, False
        else:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            yield "content_block_start", {"index": index, "content_block": block}, False
            for word in thought["thinking"].split(" "):
                delta = {"type": "thinking_delta", "thinking": word}
                yield "content_block_delta", {"index": index, "delta": delta}, False
            delta = {"type": "signature_delta", "signature": thought["signature"]}
            yield "content_block_delta", {"index": index, "delta": delta}, False
        yield "content_block_stop", {"index": index}, False


class Server(ThreadingHTTPServer):
    """One provider."""

    daemon_threads = True

    def __init__(self, api: Api) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.api = api
        self.replies: deque[Reply] = deque()
        """Answered in order; past their end every answer is `ok`."""
        self.bodies: list[Mapping[str, Any]] = []
        """What was asked, also what was refused."""
        self.refusals: list[str] = []
        """What it said where its API would refuse a request for good."""
        self.connections = 0
        self.was_broken_off = threading.Event()
        """A client has gone away from an unfinished reply."""
        self.faults: list[BaseException] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may go away at any time; what else goes wrong fails the test."""
        error = sys.exception()
        if isinstance(error, ConnectionError):
            self.was_broken_off.set()
        elif error is not None:
            self.faults.append(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        server.bodies.append(body)
        assert self.path == server.api.path, self.path
        try:
            server.api.check(body)
        except strict.BadRequest as bad:
            server.refusals.append(bad.message)
            error: Mapping[str, str | None] = {
                "message": bad.message,
                "type": "invalid_request_error",
                "param": bad.param,
                "code": bad.code,
            }
            self._refuse(Status(400, error))
            return
        match server.replies.popleft() if server.replies else Answer(["ok"]):
            case Status() as status:
                self._refuse(status)
            case Raw(chunks):
                self._begin()
                for chunk in chunks:
                    self._send(chunk)
                self._send(b"")
            case Answer() as answer:
                self._answer(answer)

    def _refuse(self, status: Status) -> None:
        if isinstance(status.error, str):
            kind, content = "text/html", status.error.encode()
        else:
            kind = "application/json"
            content = json.dumps(self.server.api.error_body(status.error)).encode()
        self.send_response(status.status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        for name, value in status.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _answer(self, answer: Answer) -> None:
        self._begin()
        texts = 0
        for n, (name, data, is_text) in enumerate(self.server.api.events(answer)):
            if n == answer.events_max:
                break
            if is_text:
                answer.before_text(texts)
                texts += 1
            written = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
            head = f"event: {name}\n" if name else ""
            self._send(f"{head}data: {written}\n\n".encode())
        match answer.after:
            case "end":
                self._send(b"")
            case "drop":
                self.close_connection = True
            case "hang":
                self.connection.settimeout(WAIT_MAX_S)
                assert not self.connection.recv(1)
                self.server.was_broken_off.set()
                self.close_connection = True

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def _send(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()


@contextmanager
def serving(api: Api) -> Iterator[Server]:
    """A server of this API, until the end of the block."""
    with Server(api) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
    assert not server.faults, server.faults
