"""A request that is wrong is told where, and what is allowed there; never what it held."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import anyio
import pytest
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from httpx import Response
from opentelemetry import _logs, trace
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.requests import HTTPConnection

from turnkeeper.actors import gateway
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.gateway import application, faults

from .worlds import World, gateway_world

pytestmark = pytest.mark.anyio

HERE = "/v1/conversations/alice"
OVERLAPS = "must be 'queue', 'interrupt', 'steer', 'rollback' or 'reject'"
CURSOR = "must be a seq, or `<seq>.<event id>` as received"
ID = "must have 1 to 256 characters, without control characters and slashes"
STATUSES = "idle, running, paused, waiting_for_confirmation, finished, error, stuck"
MEMBERS = "content, images, on_overlap, replaces, metadata, files"
FILE = {"name": "planted", "media_type": "text/plain", "data": "eA=="}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with gateway_world() as opened:
        yield opened


def body(pointer: str, detail: str) -> dict[str, str]:
    return {"pointer": pointer, "detail": detail}


def parameter(name: str, detail: str) -> dict[str, str]:
    return {"parameter": name, "detail": detail}


MESSAGES: list[tuple[object, list[dict[str, str]]]] = [
    ({}, [body("#/content", "is required")]),
    (["planted"], [body("#", "must be an object")]),
    ({"content": 3}, [body("#/content", "must be a text")]),
    (
        {"content": "x", "planted": 1},
        [body("#", f"may have these members only: {MEMBERS}")],
    ),
    (
        {"content": 3, "on_overlap": "planted"},
        [body("#/content", "must be a text"), body("#/on_overlap", OVERLAPS)],
    ),
    ({"content": "x", "images": [{"url": 5}]}, [body("#/images/0/url", "must be a text")]),
    (
        {"content": "x", "files": [FILE, {**FILE, "planted": "x"}]},
        [body("#/files/1", "may have these members only: name, media_type, data, url")],
    ),
    (
        {"content": "x", "files": [{**FILE, "media_type": "planted"}]},
        [
            body(
                "#/files",
                "the media type of a file must be a type and a subtype, as text/plain",
            )
        ],
    ),
    (
        {"content": "x", "files": [{**FILE, "name": "planted\n"}]},
        [body("#/files", "the name of a file must not have control characters")],
    ),
    (
        {"content": "x", "metadata": {"planted": "\ud83d"}},
        [body("#/metadata", "metadata must be JSON, in valid Unicode, with finite numbers")],
    ),
    (
        {"content": "x", "metadata": {"planted": 10**3000}},
        [
            body(
                "#/metadata",
                "must have no integer of more than 2466 digits; write it as a string",
            )
        ],
    ),
    (
        {"content": "x", "replaces": ""},
        [body("#/replaces", "replaces must have 1 to 256 characters")],
    ),
]


async def test_a_wrong_message_is_told_where_and_what_is_allowed_there(world: World) -> None:
    for sent, wanted in MESSAGES:
        reply = await world.http.post(f"{HERE}/messages", content=json.dumps(sent))

        assert reply.status_code == 422, sent
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.json()["errors"] == wanted
        assert "planted" not in reply.text
    reply = await world.http.post(f"{HERE}/messages", content="{planted")
    assert reply.json()["errors"] == [body("#", "must be JSON")]
    assert not (await world.conversations.list()).rows


@pytest.mark.parametrize(("sent", "status"), [(b"[planted", 422), (b'{"content": "\xff"}', 400)])
async def test_a_body_that_cannot_be_read_is_freed_with_its_request(
    world: World, sent: bytes, status: int
) -> None:
    """The bodies of sixty such requests stayed until the garbage collector ran: 450 MB."""

    def unread() -> int:
        failures = (json.JSONDecodeError, UnicodeDecodeError)
        return sum(isinstance(each, failures) for each in gc.get_objects())

    await world.http.get(HERE)  # the connection is made
    gc.collect()
    began = unread()

    gc.disable()
    try:
        reply = await world.http.post(f"{HERE}/messages", content=sent)
        await anyio.wait_all_tasks_blocked()
        assert unread() == began
    finally:
        gc.enable()

    assert reply.status_code == status


async def test_a_wrong_header_is_told_by_its_name(world: World) -> None:
    faults: list[tuple[str, str, str]] = [
        ("idempotency-key", "planted" * 40, "must have at most 256 characters"),
        ("idempotency-key", "planted\x01", "message_id must not have control characters"),
        ("if-match", "planted", CURSOR),
    ]
    for header, value, detail in faults:
        reply = await world.http.post(
            f"{HERE}/messages", json={"content": "x"}, headers={header: value}
        )
        assert reply.status_code == 422
        assert reply.json()["errors"] == [{"header": header, "detail": detail}]
        assert "planted" not in reply.text


async def test_a_wrong_parameter_is_told_by_its_name_and_values(world: World) -> None:
    await world.answered("alice", "hello")
    page = "cursor must be that of the previous page, with the same filters and order"
    faults: Mapping[str, tuple[str, str]] = {
        "/v1/conversations?status=planted": ("status", f"status must be one of {STATUSES}"),
        "/v1/conversations?order=planted": ("order", "must be 'id', 'created' or 'activity'"),
        "/v1/conversations?limit=planted": ("limit", "must be a whole number"),
        "/v1/conversations?limit=0": ("limit", "must be 1 or more"),
        "/v1/conversations?cursor=planted": ("cursor", page),
        "/v1/conversations?label=planted": ("label", "must be name=value"),
        "/v1/search?words=x&label=planted": ("label", "must be name=value"),
        f"{HERE}/events?live=planted": ("live", "must be true or false"),
        f"{HERE}/events?after=planted": ("after", CURSOR),
        f"{HERE}/state?at=99": ("at", "at must be 0 to 4"),
        f"{HERE}/difference?first=1&last=99": ("last", "last must be 0 to 4"),
        f"{HERE}/messages/~planted/turn": ("message_id", ID),
    }
    for url, (name, detail) in faults.items():
        reply = await world.http.get(url)
        assert reply.status_code == 422, url
        assert reply.json()["errors"] == [parameter(name, detail)]
        assert "planted" not in reply.text


async def test_a_wrong_change_answer_or_fork_is_told_where(world: World) -> None:
    await world.answered("alice", "hello")
    faults: list[tuple[str, str, object, dict[str, str]]] = [
        (
            "PATCH",
            "",
            {"title": "x" * 257},
            body("#/title", "title must have at most 256 characters"),
        ),
        (
            "PATCH",
            "",
            {"owner": "planted\n"},
            body("#/owner", "owner must not have control characters"),
        ),
        (
            "PATCH",
            "",
            {"labels": {"": "planted"}},
            body("#/labels", "the name of a label must have 1 character or more"),
        ),
        (
            "POST",
            "/answer",
            {"answers": {"planted": 5}},
            body("#/answers", "must be an object of true, false or reasons"),
        ),
        (
            "POST",
            "/retract",
            {"event_ids": ["planted\ud83d"]},
            body("#/event_ids", "an event id must be valid Unicode, without lone surrogates"),
        ),
        ("POST", "/fork", {"id": "planted/b"}, body("#/id", ID)),
        ("POST", "/fork", {"id": "b", "at": 99}, body("#/at", "at must be 1 to 4")),
        ("POST", "/fork", None, body("#", "is required")),
    ]
    for method, path, sent, wanted in faults:
        written = "" if sent is None else json.dumps(sent)
        reply = await world.http.request(method, f"{HERE}{path}", content=written)
        assert reply.status_code == 422, (path, sent)
        assert reply.json()["errors"] == [wanted]
        assert "planted" not in reply.text


USER = {"id": "m1", "role": "user"}
RUN = {"threadId": "a", "runId": "r1", "messages": []}
WRONG = [1] * 1_000
UNKNOWN = dict.fromkeys(map(str, range(1_000)), 1)
ONLY = "may have these members only: {}"
IMAGE = {"url": "https://example.org/x.png"}


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/v1/ag-ui", {**RUN, "messages": WRONG}),
        ("/v1/ag-ui", {**RUN, "messages": [{**USER, "content": WRONG}]}),
        ("/v1/ag-ui", {**RUN, "resume": WRONG}),
        ("/v1/ai-sdk/chat", {"id": "a", "messages": WRONG}),
        ("/v1/ai-sdk/chat", {"id": "a", "messages": [{**USER, "parts": WRONG}]}),
        (f"{HERE}/messages", {"content": "x", "images": WRONG}),
        (f"{HERE}/messages", {"content": "x", "files": WRONG}),
    ],
)
async def test_a_list_of_nothing_but_faults_is_not_checked_to_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str, sent: object
) -> None:
    """Two million faults fit into a body, and took gigabytes, and the event loop for minutes."""
    reply, faults_found = await _faults_found(world, monkeypatch, path, sent)

    assert reply.status_code == 422, reply.text
    assert faults_found < 10


@pytest.mark.parametrize(
    ("path", "sent", "wanted"),
    [
        ("/messages", {"content": "x", **UNKNOWN}, body("#", ONLY.format(MEMBERS))),
        ("/messages", {**UNKNOWN, "content": "x"}, body("#", ONLY.format(MEMBERS))),
        (
            "/messages",
            {"content": "x", "images": [{**IMAGE, **UNKNOWN}]},
            body("#/images/0", ONLY.format("url")),
        ),
        (
            "/messages",
            {"content": "x", "files": [{**FILE, **UNKNOWN}]},
            body("#/files/0", ONLY.format("name, media_type, data, url")),
        ),
        ("/fork", {"id": "b", **UNKNOWN}, body("#", ONLY.format("id, at"))),
    ],
)
async def test_an_object_of_unknown_members_is_one_fault(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str, sent: object, wanted: object
) -> None:
    """An error for each of the 300,000 that fit into a body took the event loop 4 s."""
    reply, faults_found = await _faults_found(world, monkeypatch, f"{HERE}{path}", sent)

    assert reply.status_code == 422, reply.text
    assert faults_found == 1
    assert reply.json()["errors"] == [wanted]


async def test_an_unknown_member_hides_no_other_fault(world: World) -> None:
    sent = {**UNKNOWN, "content": 3, "on_overlap": "planted"}
    reply = await world.http.post(f"{HERE}/messages", content=json.dumps(sent))

    assert reply.json()["errors"] == [
        body("#/content", "must be a text"),
        body("#/on_overlap", OVERLAPS),
        body("#", ONLY.format(MEMBERS)),
    ]


@pytest.mark.parametrize(
    ("method", "address", "allowed"),
    [
        ("GET", f"{HERE}/events?since=5", "these parameters only: after, pieces, live, limit"),
        ("POST", f"{HERE}/messages?creates=false", "these parameters only: create"),
        ("GET", f"{HERE}/view?at=1&start=1", "these parameters only: at, offset, limit, brief"),
        ("GET", f"{HERE}/log?form=1", "these parameters only: after, limit, brief, kinds"),
        ("DELETE", f"{HERE}?planted=1", "no parameters"),
        (
            "GET",
            "/v1/conversations?labels=a%3Db",
            "these parameters only: limit, cursor, order, prefix, owner, status, label",
        ),
    ],
)
async def test_an_unknown_parameter_is_refused_with_those_that_exist(
    world: World, method: str, address: str, allowed: str
) -> None:
    """It was ignored: `?since=5` streamed the log from its beginning."""
    await world.http.post(f"{HERE}/messages", json={"content": "x"})

    reply = await world.http.request(method, address, headers={"Accept": "application/json"})

    assert reply.status_code == 422, reply.text
    assert reply.json()["errors"] == [
        {"parameter": "", "detail": f"the address may have {allowed}"}
    ]
    assert (await world.http.get(f"{HERE}")).status_code == 200


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("/v1/conversations?label=a%3Db&limit=1&label=c%3Dd", "label"),
        (f"{HERE}/events?after=0&after=2", "after"),
    ],
)
async def test_a_parameter_that_comes_twice_is_refused(
    world: World, address: str, name: str
) -> None:
    """Only the last one counted, so a list had rows that the first filter leaves out."""
    await world.http.post(f"{HERE}/messages", json={"content": "x"})

    reply = await world.http.get(address, headers={"Accept": "application/json"})

    assert reply.status_code == 422, reply.text
    assert reply.json()["errors"] == [{"parameter": name, "detail": "must come once"}]


async def test_an_unknown_parameter_is_told_to_nobody_without_a_token(tmp_path: Path) -> None:
    token, file = "t" * 40, tmp_path / "tokens"
    file.write_text(f"{hashlib.sha256(token.encode()).hexdigest()} alice read\n")
    known = {"Authorization": f"Bearer {token}"}

    async with gateway_world(authenticate=gateway.BearerTokens.from_file(file)) as world:
        for headers, status in (({}, 401), (known, 422)):
            reply = await world.http.get("/v1/conversations?since=5", headers=headers)
            assert reply.status_code == status
        written = await world.http.post(f"{HERE}/pause?now=1", json={}, headers=known)
        assert written.status_code == 403


async def test_a_program_that_set_up_opentelemetry_is_told_nothing_of_requests_by_fastapi(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FastAPI's own telemetry records queries, and the texts and frames of unhandled errors."""
    spans = InMemorySpanExporter()
    logs = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]  # as it comes
    tracers, loggers = TracerProvider(), LoggerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    loggers.add_log_record_processor(SimpleLogRecordProcessor(logs))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: tracers)
    monkeypatch.setattr(_logs, "get_logger_provider", lambda: loggers)

    async def breaks(request: HTTPConnection) -> gateway.Principal | None:
        raise RuntimeError(f"no ticket in {request.url.query}")

    async with gateway_world(authenticate=breaks) as world:
        reply = await world.http.get(f"{HERE}?ticket=planted")

    assert reply.status_code == 500
    assert not spans.get_finished_spans()
    assert not logs.get_finished_logs()


async def test_an_authenticate_of_the_applications_own_may_read_a_parameter() -> None:
    """An `EventSource` sends no headers: with a ticket in its address, each stream was refused."""

    async def by_ticket(connection: HTTPConnection) -> gateway.Principal | None:
        known = {"one": gateway.Principal("alice")}
        return known.get(connection.query_params.get("ticket", ""))

    async with gateway_world(authenticate=by_ticket) as world:
        for asked, status in (
            ("ticket=one", 200),
            ("ticket=one&ticket=one", 200),
            ("ticket=other", 401),
            ("ticket=one&label=a%3Db&label=c%3Dd", 422),
        ):
            reply = await world.http.get(f"/v1/conversations?{asked}")
            assert reply.status_code == status, reply.text


async def test_objects_that_a_client_may_fill_have_no_bound_on_their_members(world: World) -> None:
    sent = {"content": "x", "metadata": UNKNOWN}
    reply = await world.http.post(f"{HERE}/messages", content=json.dumps(sent))

    assert reply.status_code == 202, reply.text
    [message] = (await world.conversations["alice"].at()).view[:1]
    assert isinstance(message, UserMessageEvent)
    assert message.metadata == UNKNOWN


async def _faults_found(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str, sent: object
) -> tuple[Response, int]:
    """Send a wrong body; return the reply, and how many errors pydantic made."""
    found: list[int] = []

    def counted(error: RequestValidationError, request: Request) -> dict[str, object]:
        found.append(len(error.errors()))
        return faults.validation_faults(error, request)

    monkeypatch.setattr(application, "validation_faults", counted)
    reply = await world.http.post(path, content=json.dumps(sent))
    return reply, found[0]


def test_no_more_faults_are_looked_at_than_are_told() -> None:
    """Each is compared with those before it: with all of them, in the square of their number."""
    looked_at: list[int] = []

    class Many(RequestValidationError):
        def errors(self) -> Iterator[dict[str, object]]:  # type: ignore[override]  # lazy
            for n in range(1_000):
                looked_at.append(n)
                yield {"loc": ("query", str(n)), "type": "missing"}

    told = faults.validation_faults(Many([]), Request({"type": "http"}))

    assert len(told["errors"]) == len(looked_at) == faults.FAULTS_MAX  # type: ignore[arg-type]


async def test_a_body_that_is_nested_too_deeply_is_told_how_deep_it_may_be() -> None:
    limits = gateway.GatewayLimits(depth_max=3)
    async with gateway_world(limits=limits) as world:
        sent = {"content": "x", "metadata": {"a": [[["planted"]]]}}
        reply = await world.http.post(f"{HERE}/messages", content=json.dumps(sent))

    assert reply.json()["type"] == "urn:turnkeeper:too-deep"
    assert reply.json()["errors"] == [body("#", "must be nested 3 levels at most")]


async def test_the_api_document_says_that_errors_are_problem_documents(world: World) -> None:
    document = (await world.http.get("/openapi.json")).json()

    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            responses = operation["responses"]
            assert "application/problem+json" in responses["default"]["content"], (path, method)
            assert "HTTPValidationError" not in str(responses), (path, method)


async def test_the_api_document_names_the_type_of_each_answer(world: World) -> None:
    """A client that was generated from it read no problem, no stream and no repeat."""
    paths = (await world.http.get("/openapi.json")).json()["paths"]
    here = "/v1/conversations/{conversation_id}"
    parts = [{"type": "text", "text": "hello"}]
    chat = {"id": "chat", "messages": [{"id": "s1", "role": "user", "parts": parts}]}
    message = {"id": "a1", "role": "user", "content": "hello"}
    run = {"threadId": "chat", "runId": "r1", "messages": [message]}
    gone = {"Last-Event-ID": "1.other@1/r/1.0/"}

    async def check(
        status: int,
        method: str,
        path: str,
        *,
        json: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        at = path.replace("{conversation_id}", "chat")
        async with world.http.stream(method, at, json=json, headers=headers) as reply:
            assert reply.status_code == status, (method, path)
            given = reply.headers.get("content-type", "").partition(";")[0]
        responses = paths[path][method.lower()]["responses"]
        named = responses.get(str(status), responses["default"]).get("content", {})
        assert given in named if given else not named, (method, path, status)
        if path != f"{here}/events":
            assert len(named) <= 1, (method, path, status)

    for status, text in ((202, "hello"), (200, "hello"), (409, "other")):
        headers = {"Idempotency-Key": "m1"}
        await check(status, "POST", f"{here}/messages", json={"content": text}, headers=headers)
    no_match = {"If-Match": "1.other"}
    await check(412, "POST", f"{here}/messages", json={"content": "hello"}, headers=no_match)
    await check(412, "DELETE", here, headers=no_match)
    for kind in ("text/event-stream", "application/json"):
        await check(200, "GET", f"{here}/events", headers={"Accept": kind})
    await check(200, "GET", "/v1/changes")
    await check(200, "GET", f"{here}/export")
    await check(200, "POST", "/v1/ag-ui", json=run)
    await check(409, "POST", "/v1/ag-ui", json={**run, "messages": [{**message, "id": "a2"}]})
    await check(200, "GET", "/v1/ag-ui/{conversation_id}/connect")
    await check(410, "GET", "/v1/ag-ui/{conversation_id}/connect", headers=gone)
    world.agent.hold("hello")
    await check(200, "POST", "/v1/ai-sdk/chat", json=chat)
    await check(200, "GET", "/v1/ai-sdk/chat/{conversation_id}/stream")
    world.agent.release("hello")
    await world.answered("chat", "the last")
    await check(204, "GET", "/v1/ai-sdk/chat/{conversation_id}/stream")
