"""Whose conversation it is: written with its first message, and compared by every command."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import anyio
import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from tests.actors.conversations.worlds import HeldAgent
from tests.drawn import drawn
from turnkeeper.actors import Conversations, Journal, MemoryJournal, gateway
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.gateway import Place, Principal
from turnkeeper.actors.gateway.access import Action, allows
from turnkeeper.actors.journal import SearchPage, SearchQuery
from turnkeeper.actors.journals.transfer import import_lines
from turnkeeper.runtime import Ports
from turnkeeper.runtime.testing import Node, Simulation, simulate

from .test_safety import EVERYWHERE
from .worlds import BOUND_S, JSON

pytestmark = pytest.mark.anyio

CHAT = "/v1/conversations/chat"
MESSAGE = {"content": "hello"}
NOTES_AND_LOCKED = ("notes-of-alice", "locked")


async def by_header(request: HTTPConnection) -> Principal | None:
    """Take the principal from a header, as an application's own login may."""
    name = request.headers.get("x-user", "")
    scopes = frozenset(("read", "write", "inspector", *(("admin",) if name == "admin" else ())))
    return Principal(name, scopes) if name else None


async def all_in_one(principal: Principal, local_id: str) -> Place:
    """Map the same id of all principals to one stored id: the first to begin it has it."""
    return Place(f"room-{local_id}", principal.name)


async def alices_notes(principal: Principal, local_id: str) -> Place | None:
    """Share one conversation of alice with bob, under a name of bob's own."""
    if principal.name == "bob" and local_id == "notes-of-alice":
        return Place("alice:notes", "alice")
    return None


def notes_are_read_only(principal: Principal, action: Action, local_id: str | None) -> bool:
    """Let alice alone write her notes, and anything under the name `locked`."""
    return action == "read" or principal.name == "alice" or local_id not in NOTES_AND_LOCKED


class Wire(NamedTuple):
    agent: HeldAgent
    conversations: Conversations
    http: httpx.AsyncClient

    async def ask(
        self, user: str, method: str, address: str, body: object = None, **headers: str
    ) -> httpx.Response:
        return await self.http.request(
            method, address, json=body, headers={"X-User": user, **headers}
        )

    async def say(self, user: str, name: str, text: str = "hello") -> httpx.Response:
        address = f"/v1/conversations/{name}/messages"
        return await self.ask(user, "POST", address, {"content": text}, Prefer="wait=60")


@asynccontextmanager
async def wired(
    share: gateway.Share | None = None,
    authorize: gateway.Authorize = allows,
    authenticate: gateway.Authenticate = by_header,
    journal: Journal | None = None,
    ports: Ports | None = None,
) -> AsyncIterator[Wire]:
    with anyio.fail_after(BOUND_S):
        agent = HeldAgent()
        async with Conversations(agent, journal=journal or MemoryJournal()) as conversations:
            app = gateway.app(
                conversations,
                authenticate=authenticate,
                authorize=authorize,
                share=share,
                ports=ports,
            )
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://localhost", headers=JSON
            ) as client:
                yield Wire(agent, conversations, client)


# --- two at once ---------------------------------------------------------------------------------


async def _race(won: set[str], simulation: Simulation) -> None:
    """Two principals begin one name at the same time, and each then does what it can with it."""
    found: dict[str, int] = {}

    async def serve(node: Node) -> None:
        ports = node.ports
        agent = HeldAgent()
        async with Conversations(
            agent, journal=MemoryJournal(ports=ports), ports=ports
        ) as conversations:
            app = gateway.app(conversations, authenticate=by_header, share=all_in_one, ports=ports)
            wire = Wire(
                agent,
                conversations,
                httpx.AsyncClient(
                    transport=httpx.ASGITransport(app), base_url="http://localhost", headers=JSON
                ),
            )

            async def begin(user: str) -> None:
                reply = await wire.ask(user, "POST", f"{CHAT}/messages", {"content": user})
                found[user] = reply.status_code

            async with anyio.create_task_group() as group:
                for user in ("alice", "bob"):
                    group.start_soon(begin, user)
            simulation.require(sorted(found.values()) == [202, 404], "one wins", str(found))
            winner, loser = sorted(found, key=lambda user: found[user])
            won.add(winner)
            state = await conversations["room-chat"].at()
            simulation.require(state.details.owner == winner, "owner", state.details.owner)
            said = [event.content for event in state.view if isinstance(event, UserMessageEvent)]
            simulation.require(said == [winner], "said", str(said))
            reply = await wire.ask(loser, "GET", f"{CHAT}/state")
            simulation.require(reply.status_code == 404, "read", str(reply.status_code))

    await simulation.start("server", serve).wait_until_ended()


@pytest.mark.sweep
def test_of_two_who_begin_one_name_at_once_exactly_one_has_it() -> None:
    won: set[str] = set()
    for seed in drawn(range(1_000), 25):
        run = simulate(partial(_race, won), seed=seed)
        assert run.ok, run
    assert won == {"alice", "bob"}


# --- what is another user's ----------------------------------------------------------------------


async def test_what_is_another_users_is_byte_for_byte_what_does_not_exist() -> None:
    async with wired(all_in_one) as wire:
        await wire.say("alice", "chat")
        before = (await wire.conversations["room-chat"].at()).seq

        for place in EVERYWHERE:
            if "{conversation_id}" not in place.path:
                continue
            taken = {each.alias: each for each in place.route.dependant.query_params}
            query = {name: "0" for name, each in taken.items() if each.field_info.is_required()}
            query |= {name: "false" for name in ("create", "live") if name in taken}
            foreign, absent = [
                await wire.http.request(
                    place.method,
                    place.path.format(conversation_id=name, message_id="m"),
                    params=query,
                    json=place.body,
                    headers={"X-User": "bob", "Accept": "application/json"},
                )
                for name in ("chat", "none")
            ]
            status = 204 if place.path.endswith("/stream") else 404  # nothing runs there to resume
            assert foreign.status_code == absent.status_code == status, place
            assert absent.content == foreign.content, place
            assert absent.headers == foreign.headers, place

        for name in ("chat", "none"):  # what is invalid is told alike
            there = f"/v1/conversations/{name}"
            reply = await wire.ask("bob", "GET", f"{there}/state?at=x")
            assert reply.status_code == 422
            reply = await wire.ask("bob", "PATCH", there, {"title": "x" * 1_000})
            assert reply.status_code == 404
            reply = await wire.ask("bob", "GET", f"{there}/events?after=1.x")
            assert reply.text.endswith('data: {"why":"gone"}\n\n')
        assert (await wire.conversations["room-chat"].at()).seq == before


async def test_an_id_in_a_body_that_means_another_users_conversation_is_refused() -> None:
    async with wired(all_in_one) as wire:
        await wire.say("alice", "chat")
        await wire.say("bob", "own")
        said = {"id": "m1", "role": "user", "parts": [{"type": "text", "text": "hello"}]}

        forked = await wire.ask("bob", "POST", "/v1/conversations/own/fork", {"id": "chat"})
        chatted = await wire.ask(
            "bob", "POST", "/v1/ai-sdk/chat", {"id": "chat", "messages": [said]}
        )

        assert (forked.status_code, chatted.status_code) == (404, 404)


async def test_a_stream_ends_when_the_conversation_is_given_to_another_user() -> None:
    async with wired() as wire:
        await wire.say("alice", "chat")
        seen: list[str] = []

        async def read() -> None:
            reply = await wire.ask("alice", "GET", f"{CHAT}/events")
            seen.extend(reply.text.split("\n"))

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            while not wire.http._transport.app._service.streams.count:  # type: ignore[attr-defined]
                await anyio.lowlevel.checkpoint()
            await wire.conversations["alice:chat"].change(owner="bob")
            await wire.conversations["alice:chat"].send("secret")

        assert 'data: {"why":"conversation-not-found"}' in seen
        assert "secret" not in str(seen)


@pytest.mark.parametrize("after", ["", "?after=1", "?after=1&pieces=true"])
async def test_a_stream_that_waits_for_a_conversation_shows_none_of_another_user(
    after: str,
) -> None:
    """The application's own code begins it, as an import does, for no user."""
    async with wired() as wire:
        seen: list[str] = []

        async def read() -> None:
            seen.append((await wire.ask("alice", "GET", f"{CHAT}/events{after}")).text)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            while not wire.http._transport.app._service.streams.count:  # type: ignore[attr-defined]
                await anyio.lowlevel.checkpoint()
            await wire.conversations["alice:chat"].send("secret")

        assert 'data: {"why":"conversation-not-found"}' in seen[0]
        assert "secret" not in seen[0]


async def test_a_stream_that_waits_for_a_conversation_hears_no_piece_of_another_user() -> None:
    """The reader begins after the last event before the pieces, so these come first."""
    async with wired() as wire:
        seen: list[str] = []

        async def read() -> None:
            path = f"{CHAT}/events?after=2&pieces=true"
            seen.append((await wire.ask("alice", "GET", path)).text)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            while not wire.http._transport.app._service.streams.count:  # type: ignore[attr-defined]
                await anyio.lowlevel.checkpoint()
            wire.agent.hold("stream secret")
            turn = await wire.conversations["alice:chat"].send("stream secret")
            await wire.agent.reached["stream secret"].wait()
            await anyio.wait_all_tasks_blocked()
            wire.agent.release("stream secret")
            await turn.end()

        assert 'data: {"why":"conversation-not-found"}' in seen[0]
        assert "a(" not in seen[0]


async def test_a_turn_is_not_told_on_when_its_conversation_is_given_away() -> None:
    said = {"id": "m1", "role": "user", "content": "one"}
    parts = {"id": "m2", "role": "user", "parts": [{"type": "text", "text": "two"}]}
    runs: dict[str, tuple[str, object]] = {
        "ag-ui": ("/v1/ag-ui", {"threadId": "chat", "runId": "r1", "messages": [said]}),
        "ai-sdk": ("/v1/ai-sdk/chat", {"id": "chat", "messages": [parts]}),
    }
    async with wired() as wire:
        agent, chat = wire.agent, wire.conversations["alice:chat"]
        streams = wire.http._transport.app._service.streams  # type: ignore[attr-defined]
        seen: dict[str, str] = {}
        ends: list[object] = []
        agent.hold("zero")

        async def read(name: str) -> None:
            seen[name] = (await wire.ask("alice", "POST", *runs[name])).text

        async def wait() -> None:
            ends.append((await wire.say("alice", "chat", "zero")).json()["end"])

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await agent.reached["zero"].wait()
            for count, name in enumerate(runs, 1):
                group.start_soon(read, name)
                while streams.count < count:
                    await anyio.lowlevel.checkpoint()
            await chat.change(owner="bob")
            await chat.send("secret", on_overlap="steer")
            agent.release("zero")

        assert ends == [None]
        assert all("conversation-not-found" in text for text in seen.values())
        assert "secret" not in str(seen)
        assert "a(one)" not in str(seen)


async def test_a_conversation_is_shared_by_the_applications_own_choice() -> None:
    async with wired(alices_notes) as wire:
        await wire.say("alice", "notes", "buy milk")

        said = await wire.say("bob", "notes-of-alice", "and bread")
        read = await wire.ask("alice", "GET", "/v1/conversations/notes/view")
        own = await wire.ask("bob", "GET", "/v1/conversations/notes/view")

        assert said.json()["conversation_id"] == "notes-of-alice"
        told = [
            (event["author"], event["content"])
            for event in read.json()["events"]
            if event["kind"] == "user_message"
        ]
        assert told == [("alice", "buy milk"), ("bob", "and bread")]
        assert own.status_code == 404
        assert (await wire.conversations["alice:notes"].at()).details.owner == "alice"


class Lagging(MemoryJournal):
    """A journal whose index is behind since a moment."""

    since_us: int | None = None

    async def search(self, query: SearchQuery) -> SearchPage:
        return (await super().search(query))._replace(complete_to_us=self.since_us)


async def test_a_search_does_not_tell_when_others_write() -> None:
    """It was complete up to the time of the first message that was not indexed yet, of any user."""
    ports = Ports(now=lambda: 1_000_017.0)
    journal = Lagging(search=True)
    async with wired(journal=journal, ports=ports) as wire:
        await wire.say("alice", "a", "where is my order")
        await wire.say("bob", "b", "another order")

        async def complete_to(user: str) -> object:
            found = (await wire.ask(user, "GET", "/v1/search?words=order")).json()
            assert len(found["hits"]) == (4 if user == "admin" else 2)
            return found["complete_to"]

        told = {}
        for behind_s in (None, 0.0, 0.4, 9.0, 60.0):
            journal.since_us = None if behind_s is None else int((ports.now() - behind_s) * 1e6)
            told[behind_s] = await complete_to("alice")
            assert (await complete_to("admin") is None) is (behind_s is None)

    assert told.pop(60.0) == "1970-01-12T13:45:50+00:00"
    assert set(told.values()) == {"1970-01-12T13:46:40+00:00"}


@pytest.mark.parametrize(
    ("status", "problem"),
    [(401, "unauthenticated"), (403, "forbidden"), (429, "too-many-requests"), (503, "internal")],
)
async def test_an_error_of_the_framework_that_a_login_raises_keeps_its_meaning(
    status: int, problem: str
) -> None:
    async def log_in(_: HTTPConnection) -> Principal | None:
        raise HTTPException(status)

    async with wired(authenticate=log_in) as wire:
        reply = await wire.ask("alice", "GET", "/v1/conversations")
    assert reply.json()["type"] == f"urn:turnkeeper:{problem}"


def test_access_that_lets_everybody_in_or_fails_every_request_is_refused_at_the_start() -> None:
    conversations = Conversations(HeldAgent(), journal=MemoryJournal())

    async def team(_: Principal, name: str) -> gateway.Place | None:
        return None

    def plain(*_: object) -> None:
        return None

    refused: tuple[tuple[str, dict[str, Any]], ...] = (
        ("authorize is given without authenticate", {"authorize": lambda *_: False}),
        ("share is given without authenticate", {"share": team}),
        ("authenticate is .* async function", {"authenticate": plain}),
        ("authenticate is 'by_header'; .* async function", {"authenticate": "by_header"}),
        ("share is .* async function", {"authenticate": by_header, "share": plain}),
    )
    for match, settings in refused:
        with pytest.raises(InvalidInput, match=match):
            gateway.app(conversations, **settings)
    with pytest.raises(InvalidInput, match="takes Conversations"):
        gateway.app(MemoryJournal())  # type: ignore[arg-type]

    gateway.app(conversations, authenticate=partial(by_header), share=team)
    gateway.app(conversations, authenticate=gateway.BearerTokens({}), authorize=lambda *_: False)


async def test_only_a_plain_yes_of_the_application_lets_a_request_in() -> None:
    """What an async function returns is true, and so is the text "no"."""

    async def asks_a_service(principal: Principal, action: Action, local_id: str | None) -> bool:
        raise AssertionError("awaited by nobody")

    conversations = Conversations(HeldAgent(), journal=MemoryJournal())
    with pytest.raises(InvalidInput, match="async function"):
        gateway.app(conversations, authenticate=by_header, authorize=asks_a_service)  # type: ignore[arg-type]
    address = gateway.node_address("http://127.0.0.1:1")
    with pytest.raises(InvalidInput, match="async function"):
        gateway.Node(
            conversations,
            address=address,
            keys=gateway.NodeKeys(["k" * 32]),
            authorize=asks_a_service,  # type: ignore[arg-type]
        )

    for said, status in ((True, 200), (False, 403), (None, 403), ("no", 500), (1, 500)):
        async with wired(authorize=lambda *_, said=said: said) as wire:
            reply = await wire.ask("alice", "GET", "/v1/conversations")
            assert reply.status_code == status, said


async def test_an_authentication_that_returns_no_principal_lets_nobody_in() -> None:
    """The class has the names of a principal, and its `is_admin` is true."""

    async def log_in(_: object) -> Principal:
        return Principal  # type: ignore[return-value]

    async with wired(authenticate=log_in, authorize=lambda *_: True) as wire:
        for path in ("/v1/self", "/v1/conversations/a/events?live=false"):
            assert (await wire.ask("alice", "GET", path)).status_code == 500


async def test_an_export_does_not_name_the_parent_of_a_fork_to_others() -> None:
    async with wired(alices_notes) as wire:
        await wire.say("alice", "private", '"kind":"forked_from"')
        await wire.ask("alice", "POST", "/v1/conversations/private/fork", {"id": "notes"})
        hers = await wire.ask("alice", "GET", "/v1/conversations/notes/export")
        shared = await wire.ask("bob", "GET", "/v1/conversations/notes-of-alice/export")

        assert '"conversation_id":"alice:private"' in hers.text
        assert shared.text == hers.text.replace("alice:private", "")
        journal = MemoryJournal()
        async with journal:
            await import_lines(journal, shared.text.splitlines())
            assert await journal.read("alice:notes", after=0, limit=10)


async def test_a_message_that_waits_in_the_parent_of_a_fork_does_not_name_it() -> None:
    async with wired(alices_notes) as wire:
        wire.agent.hold("one")
        messages = "/v1/conversations/notes/messages"
        await wire.ask("alice", "POST", messages, {"content": "one"})
        queued = {"content": "two"}
        await wire.ask("alice", "POST", messages, queued, **{"Idempotency-Key": "m2"})
        notes = "/v1/conversations/notes-of-alice"
        await wire.ask("bob", "POST", f"{notes}/fork", {"id": "mine"})

        turn = await wire.ask("bob", "GET", "/v1/conversations/mine/messages/m2/turn")
        wire.agent.release("one")

        assert turn.json()["end"]["outcome"] == "withdrawn"
        assert "alice" not in turn.text


async def test_what_a_principal_may_read_it_may_fork_to_where_it_may_write() -> None:
    async with wired(alices_notes, notes_are_read_only) as wire:
        await wire.say("alice", "notes", "buy milk")
        notes = "/v1/conversations/notes-of-alice"

        said = await wire.ask("bob", "POST", f"{notes}/messages", MESSAGE)
        locked = await wire.ask("bob", "POST", f"{notes}/fork", {"id": "locked"})
        forked = await wire.ask("bob", "POST", f"{notes}/fork", {"id": "mine"})
        mine = await wire.ask("bob", "GET", "/v1/conversations/mine")

        assert [reply.status_code for reply in (said, locked, forked, mine)] == [403, 403, 201, 200]
        assert mine.json()["owner"] == "bob"
        listed = await wire.conversations.list()
        assert {row.conversation_id for row in listed.rows} == {"alice:notes", "bob:mine"}


async def test_the_gateway_says_who_wrote_a_message_and_no_client_does() -> None:
    async with wired() as wire:
        said = {"id": "m1", "role": "user", "parts": [{"type": "text", "text": "hello"}]}
        await wire.say("alice", "chat")
        forged = await wire.ask(
            "alice", "POST", f"{CHAT}/messages", {"content": "hello", "author": "bob"}
        )
        await wire.ask("alice", "POST", "/v1/ai-sdk/chat", {"id": "chat", "messages": [said]})

        assert forged.status_code == 422
        view = await wire.conversations["alice:chat"].view()
        users = [event for event in view if isinstance(event, UserMessageEvent)]
        assert [event.author for event in users] == ["alice", "alice"]


async def test_an_administrator_gives_a_conversation_to_a_principal() -> None:
    """One that was imported, or that the application began, has no owner."""
    async with wired() as wire:
        await (await wire.conversations["alice:chat"].send("imported")).end()
        owner = {"owner": "alice"}

        assert (await wire.ask("alice", "GET", f"{CHAT}/state")).status_code == 404
        given = await wire.ask("admin", "PATCH", "/v1/conversations/alice:chat", owner)
        assert given.json()["owner"] == "alice"
        assert (await wire.ask("alice", "GET", f"{CHAT}/state")).status_code == 200
        refused = await wire.ask("alice", "PATCH", CHAT, {"owner": "bob"})
        assert refused.json()["type"] == "urn:turnkeeper:forbidden"


async def test_a_conversation_that_an_administrator_begins_is_the_principals_whose_id_it_has() -> (
    None
):
    async with wired() as wire:
        await wire.say("admin", "alice:chat")
        await wire.say("admin", "support")

        begun = await wire.ask("alice", "GET", f"{CHAT}/state")
        listed = await wire.conversations.list()
        again = await wire.say("admin", "alice:chat")  # by now it exists

        assert (begun.status_code, again.status_code) == (200, 200)
        owners = {row.conversation_id: row.owner for row in listed.rows}
        assert owners == {"alice:chat": "alice", "support": ""}


# --- erasing a principal -------------------------------------------------------------------------


async def test_a_principal_is_erased_with_one_call_by_an_administrator_alone() -> None:
    async with wired() as wire:
        for name in ("one", "two"):
            await wire.say("alice", name)
        await wire.say("bob", "one")
        await wire.conversations["alice:one"].fork("bob:copy", owner="bob")

        refused = await wire.ask("alice", "DELETE", "/v1/principals/alice")
        erased = await wire.ask("admin", "DELETE", "/v1/principals/alice")

        assert refused.status_code == 403
        receipts: Mapping[str, Any] = erased.json()["receipts"]
        assert set(receipts) == {"alice:one", "alice:two"}
        assert receipts["alice:one"]["forks"] == ["bob:copy"]
        assert receipts["alice:two"] == {
            "kept": 0,
            "forks": [],
            "forks_of_others": 0,
            "is_erased": True,
        }
        assert erased.json()["left"] == {}
        left = await wire.ask("alice", "GET", "/v1/conversations")
        assert left.json()["conversations"] == []
        assert (await wire.ask("bob", "GET", "/v1/conversations/one/state")).status_code == 200
