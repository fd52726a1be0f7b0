"""What a stranger may not do; the tests of every route are made from the table of routes."""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel
from starlette.requests import HTTPConnection, Request
from starlette.types import Message, Receive, Scope, Send

from tests.actors.conversations.worlds import HeldAgent
from turnkeeper.actors import Conversations, MemoryJournal, gateway
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.gateway.access import Rates
from turnkeeper.actors.gateway.ag_ui_routes import RunInput
from turnkeeper.actors.gateway.ai_sdk_routes import ChatBody
from turnkeeper.actors.gateway.application import ROUTERS
from turnkeeper.actors.gateway.guard import PART_BYTES, is_deeper
from turnkeeper.actors.gateway.names import (
    Cursor,
    from_path,
    parse_cursor,
    stored_id,
    to_path,
    wire_id,
)
from turnkeeper.actors.gateway.routes import AnswerBody
from turnkeeper.actors.gateway.service import May

from .worlds import BOUND_S, JSON, gateway_world, reading, served

pytestmark = pytest.mark.costly

OPEN = {"/healthz", "/readyz"}
TOKENS = {name: f"{name}-{'t' * 40}" for name in ("alice", "bob", "reader", "admin", "operator")}
SCOPES = {"reader": "read", "admin": "admin", "operator": "inspector"}


def token_file(folder: Path) -> Path:
    path = folder / "tokens"
    lines = [
        f"{hashlib.sha256(token.encode()).hexdigest()} {name} {SCOPES.get(name, 'read,write')}"
        for name, token in TOKENS.items()
    ]
    path.write_text("# comment\n\n" + "\n".join(lines))
    return path


class Place(NamedTuple):
    """One method of one route."""

    method: str
    path: str
    route: APIRoute

    @property
    def address(self) -> str:
        return self.path.format(conversation_id="chat", message_id="m1", principal="unknown")

    @property
    def body(self) -> dict[str, object] | None:
        """A valid body, if the route takes one: its texts are planted."""
        if self.route.body_field is None:
            return None
        schema = self.route.body_field.field_info.annotation
        assert isinstance(schema, type), schema
        assert issubclass(schema, BaseModel), schema
        if schema is ChatBody:
            said = {"id": "m1", "role": "user", "parts": [{"type": "text", "text": "planted"}]}
            return {"id": "chat", "messages": [said]}
        if schema is AnswerBody:
            return {"answers": {"planted": True}}
        if schema is RunInput:
            user = {"id": "m1", "role": "user", "content": "planted"}
            return {"threadId": "chat", "runId": "r1", "messages": [user]}
        fields = schema.model_fields.items()
        return {name: "planted" for name, field in fields if field.is_required()}

    @property
    def is_open(self) -> bool:
        return self.path in OPEN

    @property
    def action(self) -> str | None:
        called = (each.call for each in self.route.dependant.dependencies)
        return next((each.action for each in called if isinstance(each, May)), None)


def places() -> Sequence[Place]:
    """Every route of the gateway, but for the OpenAPI document."""
    return [
        Place(method, route.path, route)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    ]


EVERYWHERE = places()
GUARDED = [place for place in EVERYWHERE if not place.is_open]
WRITING = [place for place in EVERYWHERE if place.method != "GET"]


class Guarded(NamedTuple):
    conversations: Conversations
    app: gateway.Gateway
    http: httpx.AsyncClient

    async def ask(
        self, method: str, address: str, token: str | None = None, **headers: str
    ) -> httpx.Response:
        """Send a request; a message says "planted"."""
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        body = {"content": "planted"} if address.endswith("/messages") else None
        return await self.http.request(method, address, json=body, headers=headers)

    async def call(
        self, place: Place, token: str | None = None, query: str = "", **headers: str
    ) -> httpx.Response:
        """Send a request as the route takes it."""
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        return await self.http.request(
            place.method, place.address + query, json=place.body, headers=headers
        )


@pytest.fixture(scope="module")
async def guarded(
    anyio_backend: object, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Guarded]:
    """A gateway with tokens, for tests that change nothing or name conversations of their own."""
    tokens = gateway.BearerTokens.from_file(token_file(tmp_path_factory.mktemp("tokens")))
    async with opened(gateway.GatewayLimits(requests_at_once=10_000), tokens) as world:
        yield world


@asynccontextmanager
async def opened(
    limits: gateway.GatewayLimits, authenticate: gateway.Authenticate | None
) -> AsyncIterator[Guarded]:
    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        app = gateway.app(conversations, authenticate=authenticate, limits=limits)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=JSON, timeout=BOUND_S
        ) as client:
            yield Guarded(conversations, app, client)


def test_the_table_has_every_route_that_the_gateway_documents() -> None:
    app = gateway.app(Conversations(HeldAgent(), journal=MemoryJournal()))
    documented = {
        (method.upper(), path)
        for path, methods in app.api.openapi()["paths"].items()
        for method in methods
    }
    assert {(place.method, place.path) for place in places()} == documented


# --- every route: one test for all of them, since each request takes a millisecond ---------------


def test_a_route_says_what_it_does() -> None:
    for place in GUARDED:
        assert place.action is not None, place
        assert (place.action == "write") <= (place.method != "GET"), place


async def test_without_a_known_token_no_route_answers(guarded: Guarded) -> None:
    alice = TOKENS["alice"]
    for place in GUARDED:
        for token in (None, "", "x" * 40, "short", alice.upper(), alice[:-1], "t" * 5_000):
            reply = await guarded.call(place, token)
            assert reply.status_code == 401, place
            assert reply.headers["WWW-Authenticate"] == "Bearer"
        for query in (f"?access_token={alice}", f"?token={alice}"):
            assert (await guarded.call(place, query=query)).status_code == 401, place
        basic = await guarded.call(place, Authorization=f"Basic {alice}")
        assert basic.status_code == 401, place


async def test_a_scope_is_for_its_routes_alone(guarded: Guarded) -> None:
    allowed = {"reader": {"read"}, "operator": {"inspector"}, "alice": {"read", "write"}}
    for place in GUARDED:
        for name, actions in allowed.items():
            if place.action not in actions:
                reply = await guarded.call(place, TOKENS[name])
                assert reply.status_code == 403, place


async def test_a_page_of_another_site_cannot_write(guarded: Guarded) -> None:
    for place in WRITING:
        token = TOKENS["admin" if place.action == "admin" else "alice"]
        foreign = ("https://evil.example", "null", "http://localhost.evil.example", "http://[")
        for origin in foreign:
            refused = await guarded.call(place, token, Origin=origin)
            assert refused.json()["type"] == "urn:turnkeeper:foreign-origin", place
            assert "`Host`" in refused.json()["detail"], "a proxy that changes it is told of"
        for form in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            refused = await guarded.call(place, token, **{"Content-Type": form})
            assert refused.status_code == 415, place
        own = await guarded.call(place, token, Origin="http://localhost")
        assert own.status_code not in (403, 415), place


async def test_without_a_body_a_request_need_not_say_that_it_is_json(guarded: Guarded) -> None:
    async def refusal(place: Place, headers: dict[str, str], content: bytes = b"") -> str | None:
        token = TOKENS["admin" if place.action == "admin" else "alice"]
        request = guarded.http.build_request(
            place.method, place.address, content=content, headers=headers
        )
        del request.headers["Content-Type"]
        request.headers["Authorization"] = f"Bearer {token}"
        reply = await guarded.http.send(request)
        return None if reply.is_success else str(reply.json()["type"])

    own = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}
    for place in WRITING:
        for headers in ({}, own):
            found = await refusal(place, headers)
            assert found not in ("urn:turnkeeper:not-json", "urn:turnkeeper:foreign-origin"), place
        assert await refusal(place, {}, b"{}") == "urn:turnkeeper:not-json", place
        for site in ("cross-site", "same-site"):
            assert await refusal(place, {"Sec-Fetch-Site": site}) == "urn:turnkeeper:not-json"
        foreign = await refusal(place, {"Origin": "https://evil.example"})
        assert foreign == "urn:turnkeeper:foreign-origin", place


async def test_a_body_that_is_compressed_is_told_so(guarded: Guarded) -> None:
    for place in WRITING:
        token = TOKENS["admin" if place.action == "admin" else "alice"]
        for coding in ("gzip", "br", "identity, gzip"):
            refused = await guarded.call(place, token, **{"Content-Encoding": coding})
            assert refused.status_code == 415, place
            assert refused.json()["type"] == "urn:turnkeeper:encoded", place
            assert "Content-Encoding" in refused.json()["detail"]
            assert refused.headers["Accept-Encoding"] == "identity"
        plain = await guarded.call(place, token, **{"Content-Encoding": "Identity"})
        assert plain.status_code != 415, place


async def test_a_server_answers_to_its_own_names_alone(guarded: Guarded) -> None:
    for place in EVERYWHERE:
        others = ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io:80", "", "[::2]")
        for host in (*others, "[::1].evil.example", "localhost:80@evil.example"):
            refused = await guarded.call(place, TOKENS["alice"], Host=host)
            assert refused.status_code == 421, place
            assert "`hosts`" in refused.json()["detail"]


async def test_an_address_of_ipv6_is_known_by_the_name_that_clients_write() -> None:
    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        app = gateway.app(
            conversations, hosts=("FD00:0:0::1", "[::1]", "Chat.Example", "127.0.0.1")
        )
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            for host in ("[fd00::1]:8000", "[::1]", "chat.example:80", "127.0.0.1"):
                reply = await client.get("/healthz", headers={"Host": host})
                assert reply.status_code == 200, host
            assert (await client.get("/healthz", headers={"Host": "fd00::1"})).status_code == 421


async def test_no_other_origin_is_let_in_by_a_header(guarded: Guarded) -> None:
    for place in EVERYWHERE:
        reply = await guarded.call(
            place, TOKENS["reader"], "?live=false", Origin="http://localhost"
        )
        assert not [name for name in reply.headers if name.startswith("access-control")], place
        assert reply.headers["X-Content-Type-Options"] == "nosniff", place
        assert "default-src 'none'" in reply.headers["Content-Security-Policy"], place


async def refusal(guarded: Guarded, place: Place, content: bytes, token: str | None) -> str:
    """Send a body, and return the type of the problem that answers it."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    reply = await guarded.http.request(
        place.method, place.address, content=content, headers=headers
    )
    kind: str = reply.json()["type"]
    return kind


async def test_what_is_too_large_or_too_deep_is_refused_by_every_route(guarded: Guarded) -> None:
    deep, large, alice = b"[" * 10_000, b" " * ((4 << 20) + 1), TOKENS["alice"]
    for place in WRITING:
        assert await refusal(guarded, place, deep, alice) == "urn:turnkeeper:too-deep", place
        assert await refusal(guarded, place, large, alice) == "urn:turnkeeper:too-large", place
    for place in EVERYWHERE:
        reply = await guarded.call(place, **{"X-Filler": "x" * 20_000})
        assert reply.status_code == 431, place


async def test_a_request_that_only_reads_has_no_body(guarded: Guarded) -> None:
    for place in (place for place in EVERYWHERE if place not in WRITING):
        for token in (None, TOKENS["alice"]):
            assert await refusal(guarded, place, b"1", token) == "urn:turnkeeper:too-large", place


async def test_a_body_in_another_encoding_is_refused_before_its_depth_is_counted(
    guarded: Guarded,
) -> None:
    """In UTF-16 the zero byte would hide the end of a text, and so the brackets behind it."""
    hidden = '{"a": "\\\\", "b": ' + "[" * 100 + "]" * 100 + "}"
    for place in WRITING:
        body = hidden.encode("utf-16-le")
        kind = await refusal(guarded, place, body, TOKENS["alice"])
        assert kind == "urn:turnkeeper:malformed", place


async def test_a_header_that_decides_something_comes_once(guarded: Guarded) -> None:
    for place in EVERYWHERE:
        for name in ("authorization", "host", "idempotency-key", "content-length"):
            headers = [("Host", "localhost"), *JSON.items(), (name, "1"), (name, "2")]
            reply = await guarded.http.request(place.method, place.address, headers=headers)
            assert reply.json()["type"] == "urn:turnkeeper:malformed", place


# --- principals ----------------------------------------------------------------------------------


async def test_what_another_has_looks_as_if_it_did_not_exist(guarded: Guarded) -> None:
    await guarded.ask("POST", "/v1/conversations/secret/messages", TOKENS["alice"])
    await guarded.ask("POST", "/v1/conversations/mine/messages", TOKENS["bob"])

    for address in ("state", "view", "rejections", "export", "events?live=false"):
        headers = {"Accept": "application/json"}
        foreign, absent = [
            await guarded.ask(
                "GET", f"/v1/conversations/{name}/{address}", TOKENS["bob"], **headers
            )
            for name in ("secret", "never")
        ]
        assert foreign.status_code == 404
        assert foreign.content == absent.content
        assert foreign.headers == absent.headers
    # Neither a name taken nor a fork's name tells of it.
    for name in ("secret", "fresh"):
        made = await guarded.http.post(
            "/v1/conversations/mine/fork",
            json={"id": name},
            headers={"Authorization": f"Bearer {TOKENS['bob']}"},
        )
        assert made.status_code == 201
    fork = await guarded.ask("GET", "/v1/conversations/fresh", TOKENS["bob"])
    assert fork.json()["owner"] == "bob"
    listed = await guarded.ask("GET", "/v1/conversations", TOKENS["bob"])
    assert {row["id"] for row in listed.json()["conversations"]} == {"mine", "secret", "fresh"}
    for address in ("alice%3Asecret", "..%2Falice:secret", to_path("alice:secret")):
        reply = await guarded.ask("GET", f"/v1/conversations/{address}/state", TOKENS["bob"])
        assert reply.status_code == 404


async def test_an_administrator_sees_the_ids_as_they_are_stored(guarded: Guarded) -> None:
    await guarded.ask("POST", "/v1/conversations/known/messages", TOKENS["alice"])

    place = f"/v1/conversations/{to_path('alice:known')}"
    reply = await guarded.ask("GET", f"{place}/state", TOKENS["admin"])

    assert reply.status_code == 200


async def test_a_fork_of_another_principal_is_counted_and_not_named(guarded: Guarded) -> None:
    await guarded.ask("POST", "/v1/conversations/parent/messages", TOKENS["alice"])
    await guarded.conversations["alice:parent"].fork("bob:planted-name", owner="bob")

    receipt = await guarded.ask("DELETE", "/v1/conversations/parent", TOKENS["alice"])

    assert (receipt.json()["forks"], receipt.json()["forks_of_others"]) == ([], 1)
    page = await guarded.ask(
        "GET",
        "/v1/conversations/planted-name/events",
        TOKENS["bob"],
        Accept="application/json",
    )
    # The messages that it shares tell who wrote them; their conversation's name is not told.
    assert '"conversation_id":null' in page.text
    assert "alice:" not in page.text


async def test_one_principal_cannot_use_up_what_another_may_send(tmp_path: Path) -> None:
    tokens = gateway.BearerTokens.from_file(token_file(tmp_path))
    limits = gateway.GatewayLimits(requests_per_s=0.001, requests_at_once=2)
    async with opened(limits, tokens) as world:
        found = [
            await world.ask("GET", "/v1/self", TOKENS[name])
            for name in ("alice", "alice", "alice", "bob")
        ]

    assert [reply.status_code for reply in found] == [200, 200, 429, 200]
    assert int(found[2].headers["Retry-After"]) > 0


class Panic(BaseException):
    """What an extension module raises, and no `except Exception` catches."""


@pytest.mark.parametrize(
    "raised",
    [
        Panic("hidden"),
        BaseExceptionGroup("hidden", [Panic("hidden")]),
        GeneratorExit("hidden"),
    ],
    ids=repr,
)
async def test_what_is_no_exception_ends_one_request_and_not_the_server(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """A server on trio ended with it."""

    async def log_in(request: HTTPConnection) -> gateway.Principal:
        if request.headers["authorization"] != "Bearer alice":
            raise raised
        return gateway.Principal("alice")

    async with opened(gateway.GatewayLimits(), log_in) as world:
        wrong = await world.ask("GET", "/v1/self", "odd")
        assert (wrong.status_code, wrong.json()["type"]) == (500, "urn:turnkeeper:internal")
        assert (await world.ask("GET", "/v1/self", "alice")).status_code == 200
    assert "Panic" in caplog.text or "GeneratorExit" in caplog.text
    assert "hidden" not in caplog.text


@pytest.mark.parametrize("function", ["authenticate", "share"])
async def test_a_cancelled_scope_that_a_function_leaves_open_ends_with_it(
    function: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On trio the server ended with it; on asyncio the request failed without a line of ours."""

    async def leave_open() -> None:
        scope = anyio.CancelScope()
        scope.__enter__()
        scope.cancel()

    async def log_in(_: HTTPConnection) -> gateway.Principal:
        if function == "authenticate":
            await leave_open()
        return gateway.Principal("alice")

    async def share(*_: object) -> gateway.Place | None:
        if function == "share":
            await leave_open()
        return None

    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        app = gateway.app(conversations, authenticate=log_in, share=share)
        async with (
            served(app) as address,
            httpx.AsyncClient(base_url=address, timeout=BOUND_S) as http,
        ):
            said = await http.post("/v1/conversations/a/messages", json={"content": "hello"})
            read = await http.get("/v1/conversations/a")
    assert (said.status_code, read.status_code) == (202, 200)
    assert function in caplog.text


async def test_two_hosts_are_refused_beside_a_target_that_is_a_whole_address_too() -> None:
    """Servers that refuse them themselves are not the only ones that the application runs on."""
    statuses: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        app = gateway.app(conversations)
        for hosts in (1, 2):
            scope: Scope = {
                "type": "http",
                "http_version": "1.1",
                "method": "GET",
                "scheme": "http",
                "path": "http://localhost/healthz",
                "root_path": "",
                "query_string": b"",
                "headers": [(b"host", b"localhost")] * hosts,
                "client": ("127.0.0.1", 1),
            }
            await app(scope, receive, send)
    assert statuses == [200, 400]


def test_a_rate_fills_again_with_time() -> None:
    now = 0.0
    rates = Rates(lambda: now, per_s=2, burst=2)
    assert [rates.take("alice") for _ in range(3)] == [0, 0, 1]
    now = 0.5
    assert [rates.take("alice") for _ in range(2)] == [0, 1]


@pytest.mark.parametrize(
    "host", ["", "*", "https://chat.example.org", "chat.example.org:443", "a/b", "a@b", "bücher.de"]
)
def test_a_host_that_no_request_can_name_is_refused(host: str) -> None:
    conversations = Conversations(HeldAgent(), journal=MemoryJournal())
    with pytest.raises(InvalidInput, match="without a scheme or a port"):
        gateway.app(conversations, hosts=["localhost", host])


ORIGINS = (
    *("", "*", "null", "chat.example.org", "https://chat.example.org/"),
    *("https://Chat.example.org", "https://bücher.de"),
)


@pytest.mark.parametrize("origin", ORIGINS)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    conversations = Conversations(HeldAgent(), journal=MemoryJournal())
    with pytest.raises(InvalidInput, match=r"such as 'https://chat\.example\.org', without a path"):
        gateway.app(conversations, origins=[origin])


def test_hosts_and_origins_as_requests_name_them_are_taken() -> None:
    gateway.app(
        Conversations(HeldAgent(), journal=MemoryJournal()),
        hosts=["Chat.example.org", "10.0.0.3", "::1", "[::1]", "0.0.0.0", "fe80::1"],
        origins=["https://chat.example.org", "http://[::1]:8000", "capacitor://localhost"],
    )


@pytest.mark.parametrize("name", ["hosts", "origins"])
def test_one_text_in_place_of_a_list_of_names_is_refused(name: str) -> None:
    """Each of its letters would be a name, and no request would be let in."""
    conversations = Conversations(HeldAgent(), journal=MemoryJournal())
    with pytest.raises(InvalidInput, match=rf"{name} must be a list of texts"):
        gateway.app(conversations, **{name: "chat.example"})  # type: ignore[arg-type]


def test_a_principal_whose_scopes_are_one_text_is_refused() -> None:
    """An administrator would be each whose text has that word in it."""
    with pytest.raises(InvalidInput, match="scopes must be a set"):
        gateway.Principal("alice", "read no-admin")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    ["", "# none", "abc alice read", f"{'a' * 64} alice", f"{'a' * 64} alice read,all", "a b c d"],
)
def test_a_token_file_that_cannot_be_used_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(line)
    with pytest.raises(InvalidInput):
        gateway.BearerTokens.from_file(path)


def test_the_line_of_a_token_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{'a' * 64} alice read\n{'b' * 64} {'b' * 65} read\n")
    with pytest.raises(InvalidInput, match="line 2"):
        gateway.BearerTokens.from_file(path)


@pytest.mark.parametrize("read", [gateway.BearerTokens.from_file, gateway.NodeKeys.from_file])
def test_a_file_of_secrets_that_is_no_text_or_cannot_be_read_is_refused(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "secrets"
    with pytest.raises(InvalidInput, match="cannot be read"):
        read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="not UTF-8"):
        read(path)


# --- ids and cursors -----------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@given(texts, texts, texts, texts)
@example("a", "b:c", "a:b", "c")
@example("a%3Ab", "c", "a:b", "c")
@example("a", "b/c", "a/b", "c")
def test_no_two_ids_of_principals_share_a_stored_one(
    owner: str, name: str, other: str, other_name: str
) -> None:
    stored = stored_id(owner, name)
    assert wire_id(owner, stored) == name
    assert (stored == stored_id(other, other_name)) == ((owner, name) == (other, other_name))
    if other != owner:
        assert wire_id(other, stored) is None


@given(texts)
def test_an_id_goes_through_a_path_in_one_spelling(name: str) -> None:
    part = to_path(name)
    assert part.isascii()
    assert "/" not in part
    assert from_path(part) == name


@given(st.integers(1, 1 << 40), texts)
def test_a_cursor_comes_back_as_it_was_sent(seq: int, event_id: str) -> None:
    sent = str(Cursor(seq, event_id))
    assert sent.isascii()
    assert sent.isprintable()
    assert parse_cursor(sent) == Cursor(seq, event_id)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.", "1e3", "٣", "9" * 400, ".a"])
def test_what_is_no_cursor_is_refused(text: str) -> None:
    assert parse_cursor(text) is None


@given(
    st.recursive(
        st.lists(st.text(max_size=4), max_size=2),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=8,
    )
)
def test_the_nesting_of_a_body_is_counted_without_its_texts(value: object) -> None:
    def depth(of: object) -> int:
        if isinstance(of, dict):
            return 1 + max(map(depth, of.values()), default=0)
        return 1 + max(map(depth, of), default=0) if isinstance(of, list) else 0

    body = httpx.Request("POST", "http://x", json=value).content
    assert not is_deeper(body, depth(value))
    assert is_deeper(body, depth(value) - 1)


def test_a_text_that_does_not_end_is_passed_over_once() -> None:
    """Were each of its quotes tried as the first one, the work would be the square of them."""
    for count in (10, 1_000_000):
        assert not is_deeper(b'"' + b'[\\"' * count, 1)


@pytest.mark.parametrize("limits", [gateway.GatewayLimits, gateway.NodeLimits])
@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_limit_that_is_none_is_refused(
    limits: type[gateway.GatewayLimits | gateway.NodeLimits], limit: float
) -> None:
    with pytest.raises(InvalidInput, match=f"heartbeat_s is {limit}; it takes more than 0"):
        limits(heartbeat_s=limit)


@pytest.mark.parametrize("limits", [gateway.GatewayLimits, gateway.NodeLimits])
@pytest.mark.parametrize("limit", [0, 2.5, True, "3", math.inf])
def test_a_count_that_is_not_whole_is_refused(
    limits: type[gateway.GatewayLimits | gateway.NodeLimits],
    limit: Any,  # noqa: ANN401 - a wrong one
) -> None:
    """With `page_max=2.5`, clients that gave no limit were told that theirs was not whole."""
    counts = [field.name for field in fields(limits) if field.type == "int"]
    assert len(counts) >= 3
    for name in counts:
        with pytest.raises(InvalidInput, match=f"^{name} is {limit!r}; it takes a whole number"):
            limits(**{name: limit})


# --- slow and broken clients ---------------------------------------------------------------------


async def test_a_body_that_does_not_arrive_is_not_waited_for() -> None:
    limits = gateway.GatewayLimits(body_s=0.05)
    async with gateway_world(limits=limits) as world:
        host, _, port = world.address.removeprefix("http://").partition(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(
                f"POST /v1/conversations/a/messages HTTP/1.1\r\nHost: {host}\r\n"
                "Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{".encode()
            )
            assert b" 408 " in await stream.receive()


async def test_the_body_of_a_stranger_is_not_waited_for() -> None:
    asked: list[HTTPConnection] = []

    async def authenticate(request: HTTPConnection) -> gateway.Principal | None:
        asked.append(request)
        return gateway.Principal("alice") if "authorization" in request.headers else None

    async with gateway_world(authenticate=authenticate) as world:
        host, _, port = world.address.removeprefix("http://").partition(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(
                f"POST /v1/conversations/a/messages HTTP/1.1\r\nHost: {host}\r\n"
                "Content-Type: application/json\r\nContent-Length: 4000000\r\n\r\n{".encode()
            )
            assert b" 401 " in await stream.receive()

        asked.clear()
        said = await world.http.post(
            "/v1/conversations/a/messages", json={"content": "Hi"}, headers={"Authorization": "A"}
        )
        assert (said.status_code, len(asked)) == (202, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="the bound on trio is an option of Linux")
async def test_a_client_that_takes_nothing_is_cut_off_and_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = gateway.GatewayLimits(write_stall_s=0.5)
    async with gateway_world(limits=limits) as world:
        streams = world.app._service.streams
        for _ in range(16):  # more than the buffers on the way hold
            await (await world.conversations["alice"].send("x" * 1_000_000)).end()
        async with reading(world.address, "/v1/conversations/alice/events"):
            while not streams.count:
                await anyio.lowlevel.checkpoint()
            while streams.count:
                await anyio.lowlevel.checkpoint()
    assert not [line for line in caplog.messages if "request failed" in line]


async def test_a_large_body_goes_out_in_parts_that_a_slow_client_reads_one_by_one() -> None:
    """A client that took too long for a whole event was cut off there each time it came back."""
    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        app = gateway.app(conversations)
        sent: list[Message] = []

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            async def note(message: Message) -> None:
                sent.append(dict(message))
                await send(message)

            await app(scope, receive, note)

        transport = httpx.ASGITransport(serve)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            await (await conversations["alice"].send("x" * 1_000_000)).end()
            for place in ("events?live=false", "messages?shape=ag-ui", "export"):
                sent.clear()
                reply = await http.get(f"/v1/conversations/alice/{place}")

                _, *parts, last = sent
                assert "x" * 1_000_000 in reply.text, place
                assert len(reply.content) == sum(len(part["body"]) for part in (*parts, last))
                assert max(len(part["body"]) for part in parts) == PART_BYTES
                assert all(part["more_body"] for part in parts)
                assert not last.get("more_body")


# --- logs ----------------------------------------------------------------------------------------


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG):
        yield caplog


async def test_no_log_line_has_a_word_of_a_message_or_a_token(
    log_lines: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = gateway.BearerTokens.from_file(token_file(tmp_path))
    async with opened(gateway.GatewayLimits(), tokens) as world:
        for place in places():
            await world.call(place, TOKENS["alice"], "?live=false")

        async def fails(*_: object, **__: object) -> None:
            raise RuntimeError("planted")

        monkeypatch.setattr("turnkeeper.actors.conversations.conversation.Conversation.send", fails)
        reply = await world.ask("POST", "/v1/conversations/chat/messages", TOKENS["alice"])

    assert reply.json()["type"] == "urn:turnkeeper:internal"
    failed = [line for line in log_lines.messages if "request failed" in line]
    assert len(failed) == 1
    assert "RuntimeError" in failed[0]
    assert not [line for line in log_lines.messages if "planted" in line or TOKENS["alice"] in line]


async def test_a_body_for_which_there_is_no_memory_is_no_fault_of_the_client(
    log_lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got 400, and so would not have sent its message again."""

    async def has_no_memory(_: Request) -> object:
        raise MemoryError

    async with gateway_world() as world:
        monkeypatch.setattr(Request, "json", has_no_memory)
        reply = await world.send("chat", "hello")

    assert (reply.status_code, reply.json()["type"]) == (500, "urn:turnkeeper:internal")
    assert [line for line in log_lines.messages if "MemoryError" in line]
