"""A client over HTTP sends, reads, leaves at any point, and comes back; it misses nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
import httpx
import pytest

from turnkeeper.actors import (
    Conversations,
    Deletion,
    FileContent,
    FrozenObject,
    LoggedEvent,
    TurnContext,
)
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import AgentMessageEvent, UserMessageEvent
from turnkeeper.actors.gateway import GatewayLimits
from turnkeeper.actors.gateway.names import Cursor
from turnkeeper.actors.gateway.service import ConversationCaller

from .worlds import BOUND_S, Sse, World, gateway_world, reading

pytestmark = pytest.mark.costly


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with gateway_world() as world:
        yield world


def kinds(events: list[Sse]) -> list[object]:
    return [event.json["event"]["kind"] for event in events]  # type: ignore[index]


async def read_all(world: World, path: str, **headers: str) -> list[Sse]:
    async with reading(world.address, path, **headers) as events:
        return [event async for event in events]


# --- chat messages -------------------------------------------------------------------------------


async def test_a_message_is_answered_when_it_is_durable(world: World) -> None:
    world.agent.hold("hello")

    reply = await world.send("alice", "hello", idempotency_key="m1")

    assert reply.status_code == 202
    assert reply.json()["message_id"] == "m1"
    state = await world.conversations["alice"].at()
    assert state.turns.find("m1") is not None
    world.agent.release("hello")


async def test_a_message_sent_again_under_its_key_is_200_and_written_once(world: World) -> None:
    first = await world.answered("alice", "hello")
    key = first.json()["message_id"]

    again = await world.send("alice", "hello", idempotency_key=key)
    other = await world.send("alice", "other", idempotency_key=key)

    assert again.status_code == 200
    known = ("conversation_id", "message_id", "seq", "turn_id")
    assert [again.json()[name] for name in known] == [first.json()[name] for name in known]
    assert other.status_code == 409
    assert other.json()["type"] == "urn:turnkeeper:message-id-conflict"
    events = await read_all(world, "/v1/conversations/alice/events?live=false")
    assert kinds(events[:-1]).count("user_message") == 1


async def test_the_reply_that_was_lost_has_the_same_body_when_it_is_asked_for_again(
    world: World,
) -> None:
    world.agent.hold("slow")
    await world.send("alice", "slow")
    await world.agent.reached["slow"].wait()

    first = await world.send("alice", "wait", idempotency_key="m2")
    again = await world.send("alice", "wait", idempotency_key="m2")

    assert (first.status_code, again.status_code) == (202, 200)
    assert again.json() == first.json()
    assert first.json()["overlapped"] == "queue"
    world.agent.release("slow")


async def test_a_message_takes_files_and_metadata(world: World) -> None:
    file = FileContent.with_bytes("n.txt", "text/plain", b"buy milk")
    body = {"content": "hello", "files": [file.model_dump()], "metadata": {"tab": [1]}}

    reply = await world.http.post("/v1/conversations/alice/messages", json=body)
    broken = {**body, "files": [{**file.model_dump(), "data": "no"}]}
    refused = await world.http.post("/v1/conversations/alice/messages", json=broken)
    too_large = {**body, "metadata": {"a": "x" * 20_000}}
    refused_too = await world.http.post("/v1/conversations/alice/messages", json=too_large)

    assert reply.status_code == 202
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:turnkeeper:invalid-input")
    assert refused_too.json()["type"] == "urn:turnkeeper:metadata-too-long"
    view = await world.conversations["alice"].view()
    assert isinstance(view[0], UserMessageEvent)
    assert (view[0].files, view[0].metadata) == ((file,), FrozenObject({"tab": [1]}))
    assert len([event for event in view if isinstance(event, UserMessageEvent)]) == 1


async def test_a_client_may_wait_for_the_end_of_the_turn(world: World) -> None:
    reply = await world.send("alice", "hello", prefer="respond-async, wait=60")

    assert reply.status_code == 200
    applied = reply.headers["Preference-Applied"]
    assert applied == "wait=45", "a usual proxy gives up after 50 s or 60 s"
    assert reply.json()["end"] == {"outcome": "completed", "reply": "a(hello)", "detail": ""}


async def test_a_wait_ends_before_a_turn_that_is_held(world: World) -> None:
    world.agent.hold("slow")

    reply = await world.send("alice", "slow", prefer="wait=0")

    assert reply.status_code == 202
    assert reply.json()["end"] is None
    world.agent.release("slow")


async def test_a_message_is_acknowledged_though_nobody_is_left_to_wait_for(world: World) -> None:
    """503 would say that nothing happened, and the client would send it a second time."""
    alice = world.conversations["alice"]
    replies: list[httpx.Response] = []
    world.agent.hold("one")
    await world.send("alice", "one")

    async def wait() -> None:
        replies.append(await world.send("alice", "two", prefer="wait=60"))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        while not await alice.queued():
            await anyio.lowlevel.checkpoint()
        await world.app.drain(0)

    assert [message.content for message in await alice.queued()] == ["two"]
    assert [(reply.status_code, reply.json()["end"]) for reply in replies] == [(202, None)]


async def test_without_create_a_message_begins_no_conversation(world: World) -> None:
    reply = await world.http.post(
        "/v1/conversations/none/messages?create=false", json={"content": "hello"}
    )

    assert reply.status_code == 404
    assert reply.json()["type"] == "urn:turnkeeper:conversation-not-found"
    assert (await world.http.get("/v1/conversations/none/state")).status_code == 404


async def test_a_message_with_a_cursor_goes_to_that_very_conversation(world: World) -> None:
    await world.answered("alice", "hello")
    cursor = (await read_all(world, "/v1/conversations/alice/events?live=false"))[0].id
    assert cursor is not None
    assert (await world.send("alice", "again", if_match=cursor)).status_code == 202

    await world.http.delete("/v1/conversations/alice")
    await world.answered("alice", "another conversation")
    refused = await world.send("alice", "again", if_match=cursor)

    assert refused.status_code == 412
    events = await read_all(world, "/v1/conversations/alice/events?live=false")
    assert kinds(events[:-1]).count("user_message") == 1


async def test_a_conversation_is_not_begun_under_an_odd_id(world: World) -> None:
    for name in ("~Lg", "~Li4", "~YS9i", "~AAE", "a%00b", "~", "~!", "~YQ==", "a" * 257):
        reply = await world.send(name, "hello")
        assert reply.status_code == 422, name
        assert reply.json()["type"] == "urn:turnkeeper:invalid-id"
    assert (await world.conversations.list()).rows == []


async def test_an_id_with_odd_characters_goes_as_base64url(world: World) -> None:
    await world.answered("~w6RvIPCfkYs", "hello")  # "äo 👋"

    (info,) = (await world.conversations.list()).rows
    assert info.conversation_id == "äo 👋"
    reply = await world.http.get("/v1/conversations/%C3%A4o%20%F0%9F%91%8B/state")
    assert reply.json()["status"] == "finished"


async def test_a_conversation_that_has_an_odd_id_already_goes_on(world: World) -> None:
    journal = world.conversations.journal
    claim = await journal.claim("a/b", any_name=True)
    record = encode_record(AgentMessageEvent(content="hello"))
    await journal.append("a/b", [record], epoch=claim.epoch, expected_seq=1, is_unfinished=False)

    await world.answered("~YS9i", "again")

    assert len((await world.conversations.list()).rows) == 1


# --- events --------------------------------------------------------------------------------------


async def test_a_stream_has_every_event_with_its_cursor_and_says_why_it_ends(world: World) -> None:
    await world.answered("alice", "hello")

    events = await read_all(world, "/v1/conversations/alice/events?live=false")

    assert kinds(events[:-1]) == ["turn_started", "user_message", "agent_message", "turn_ended"]
    assert [int((event.id or "").split(".")[0]) for event in events[:-1]] == [1, 2, 3, 4]
    assert (events[-1].event, events[-1].id) == ("end", None)
    assert events[-1].json == {"why": "caught-up"}


async def test_the_end_of_a_stream_is_the_end_of_a_connection_that_is_not_kept(
    world: World,
) -> None:
    """A proxy that speaks HTTP/1.0, as many do unless told otherwise, knows no other end."""
    await world.answered("alice", "hello")
    host, _, port = world.address.removeprefix("http://").partition(":")
    received = b""
    async with await anyio.connect_tcp(host, int(port)) as stream:
        path = "/v1/conversations/alice/events?live=false"
        await stream.send(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        with anyio.fail_after(BOUND_S / 2), suppress(anyio.EndOfStream):
            while True:
                received += await stream.receive()

    assert b'"caught-up"' in received


async def test_a_reader_that_comes_back_at_any_cursor_gets_the_rest_once(world: World) -> None:
    await world.answered("alice", "one")
    await world.answered("alice", "two")
    path = "/v1/conversations/alice/events?live=false"
    everything = await read_all(world, path)

    for n, event in enumerate(everything[:-1]):
        assert event.id is not None
        by_header = await read_all(world, f"{path}&after=0", last_event_id=event.id)
        by_address = await read_all(world, f"{path}&after={event.id}")
        by_seq = await read_all(world, f"{path}&after={n + 1}")
        assert by_header == by_address == by_seq == everything[n + 1 :]


async def test_a_live_stream_shows_an_answer_as_it_is_written(world: World) -> None:
    world.agent.hold("stream x")
    async with reading(world.address, "/v1/conversations/alice/events?pieces=true") as events:
        await world.send("alice", "stream x")
        seen: list[Sse] = []
        async for event in events:
            seen.append(event)
            if event.event == "piece" and len([e for e in seen if e.event == "piece"]) == 1:
                world.agent.release("stream x")
            if '"turn_ended"' in event.data:
                break

    pieces = [event for event in seen if event.event == "piece"]
    assert "".join(str(piece.json["text"]) for piece in pieces) == "a(stream x)"
    assert all(piece.id is None for piece in pieces)
    assert '"a(stream x)"' in next(event.data for event in seen if "agent_message" in event.data)


class Fast:
    """Says many pieces, one behind the other, without a pause."""

    def __init__(self) -> None:
        self.has_said_all = anyio.Event()

    async def run(self, turn: TurnContext) -> None:
        await turn.stream(self._pieces())

    async def _pieces(self) -> AsyncIterator[str]:
        for n in range(100):
            yield f"{n} "
        self.has_said_all.set()


@pytest.mark.parametrize("path", ["/v1/conversations/alice/events?pieces=true", "ai-sdk", "ag-ui"])
async def test_pieces_that_come_at_once_are_sent_as_one(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs its own write to each reader; a person sees no difference of 20 ms."""
    agent = Fast()
    async with gateway_world(agent) as world:
        monkeypatch.setattr(world.app._service.streams, "gather_pieces", agent.has_said_all.wait)
        if path == "ai-sdk":
            said = {"id": "m", "role": "user", "parts": [{"type": "text", "text": "go"}]}
            body = {"id": "alice", "messages": [said]}
            reply = await world.http.post("/v1/ai-sdk/chat", json=body)
            told = reply.text.split("\n\n")
            pieces = [line for line in told if '"text-delta"' in line]
        elif path == "ag-ui":
            user = {"id": "m", "role": "user", "content": "go"}
            run = {"threadId": "alice", "runId": "r", "messages": [user]}
            reply = await world.http.post("/v1/ag-ui", json=run)
            told = reply.text.split("\n\n")
            pieces = [frame for frame in told if '"TEXT_MESSAGE_CONTENT"' in frame]
        else:
            async with reading(world.address, path) as events:
                await world.send("alice", "go")
                pieces = []
                async for event in events:
                    if event.event == "piece":
                        pieces.append(event.data)
                    if '"turn_ended"' in event.data:
                        break

    assert 1 <= len(pieces) <= 3
    assert "99 " in pieces[-1]


async def test_a_stream_that_waits_sends_comments() -> None:
    limits = GatewayLimits(heartbeat_s=0.01)
    async with (
        gateway_world(limits=limits) as world,
        reading(world.address, "/v1/conversations/alice/events") as events,
    ):
        assert (await anext(events)).is_comment
        await world.answered("alice", "hello")
        async for event in events:
            if not event.is_comment:
                break
        assert kinds([event]) == ["turn_started"]


@pytest.mark.parametrize("path", ["/v1/conversations/alice/events", "/v1/changes"])
async def test_no_proxy_may_hold_a_stream_back_or_compress_it(world: World, path: str) -> None:
    """A proxy of Node.js compressed the stream, and passed nothing on until it had enough."""
    reply = await world.http.get(path, params={"live": "false"})

    assert reply.headers.get_list("Cache-Control") == ["no-store, no-transform"]
    assert reply.headers["X-Accel-Buffering"] == "no"


async def test_a_cursor_of_a_deleted_conversation_is_gone(world: World) -> None:
    await world.answered("alice", "hello")
    path = "/v1/conversations/alice/events"
    cursor = (await read_all(world, f"{path}?live=false"))[2].id
    assert cursor is not None
    await world.http.delete("/v1/conversations/alice")

    async def seen() -> list[tuple[str, object]]:
        events = await read_all(world, path, last_event_id=cursor)
        return [(event.event, event.json.get("why")) for event in events]

    assert await seen() == [("gone", None), ("end", "gone")]
    await world.answered("alice", "another conversation")
    assert await seen() == [("gone", None), ("end", "gone")]
    page = await world.http.get(
        path, params={"after": cursor}, headers={"Accept": "application/json"}
    )
    assert page.status_code == 410


async def test_a_cursor_at_an_event_whose_id_was_given_is_gone_in_a_log_begun_anew(
    world: World,
) -> None:
    """A late copy of the request had its event at the same seq again, under the same id."""
    chat, here = world.conversations["alice"], "/v1/conversations/alice"
    cursors = []
    for is_again in (False, True):
        if is_again:
            await world.conversations.delete("alice")
        await (await chat.send("hello", message_id="m1", event_id="request-7")).end()
        events = await read_all(world, f"{here}/events?live=false")
        (cursor,) = [each.id for each in events if "request-7" in (each.id or "")]
        assert cursor is not None
        cursors.append(cursor)
    old, new = cursors
    assert old.partition("@")[0] == new.partition("@")[0] == "2.request-7"

    seen = await read_all(world, f"{here}/events?live=false", last_event_id=old)
    assert [event.event for event in seen] == ["gone", "end"]
    for cursor, status in ((old, 412), (new, 200)):
        reply = await world.http.delete(here, headers={"If-Match": cursor})
        assert reply.status_code == status, reply.text


async def test_a_log_that_is_exchanged_before_its_deletion_is_decided_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the event was compared as the request came, and not by the owner."""
    chat, here = world.conversations["alice"], "/v1/conversations/alice"
    await (await chat.send("hello", event_id="request-7")).end()
    old = Cursor.of([logged async for logged in chat.events(live=False)][1])
    assert old.at_us is not None
    delete = Conversations.delete

    async def late(conversations: Conversations, name: str, **asked: Any) -> Deletion:  # noqa: ANN401 - as it is
        await delete(conversations, name)
        await (await chat.send("anew", event_id="request-7")).end()
        return await delete(conversations, name, **asked)

    monkeypatch.setattr(Conversations, "delete", late)
    reply = await world.http.delete(here, headers={"If-Match": str(old)})

    assert reply.status_code == 412, reply.text
    assert (await chat.at()).view[0].content == "anew"  # type: ignore[attr-defined]


async def test_a_log_that_is_exchanged_after_the_first_look_is_gone_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.answered("alice", "hello")
    path = "/v1/conversations/alice/events"
    cursor = (await read_all(world, f"{path}?live=false"))[2].id
    assert cursor is not None
    found = ConversationCaller.find

    async def find(caller: ConversationCaller, at: Cursor) -> LoggedEvent | None:
        logged = await found(caller, at)
        await world.conversations.delete("alice")
        await (await world.conversations["alice"].send("another conversation")).end()
        return logged

    monkeypatch.setattr(ConversationCaller, "find", find)
    events = await read_all(world, path, last_event_id=cursor)

    assert [(event.event, event.json.get("why")) for event in events] == [
        ("gone", None),
        ("end", "gone"),
    ]


async def test_a_stream_of_a_conversation_that_is_deleted_ends_as_gone(world: World) -> None:
    await world.answered("alice", "hello")
    async with reading(world.address, "/v1/conversations/alice/events?after=4") as events:
        await world.http.delete("/v1/conversations/alice")
        seen = [(event.event, event.json.get("why")) async for event in events]

    assert seen == [("gone", None), ("end", "conversation-deleted")]


async def test_draining_ends_every_stream_with_a_word_and_refuses_messages(world: World) -> None:
    await world.answered("alice", "hello")
    async with reading(world.address, "/v1/conversations/alice/events?after=4") as events:
        await world.app.drain(0)
        assert [event.json async for event in events] == [{"why": "draining"}]

    later = await read_all(world, "/v1/conversations/alice/events")
    assert [event.json for event in later] == [{"why": "draining"}]
    refused = await world.send("alice", "hello")
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert refused.json()["type"] == "urn:turnkeeper:draining"
    assert (await world.http.get("/readyz")).status_code == 503
    assert (await world.http.get("/healthz")).status_code == 200


async def test_a_drain_that_is_refused_leaves_the_gateway_as_it_is(world: World) -> None:
    for grace_s, messages in ((float("inf"), "queue"), (-1.0, "queue"), (1.0, "never")):
        with pytest.raises(InvalidInput):
            await world.app.drain(grace_s, messages=messages)  # type: ignore[arg-type]  # on purpose
    assert (await world.http.get("/readyz")).status_code == 200
    await world.answered("alice", "hello")


async def test_while_draining_a_stream_goes_on_until_the_turn_has_ended(world: World) -> None:
    world.agent.hold("slow")
    async with (
        reading(world.address, "/v1/conversations/alice/events") as events,
        anyio.create_task_group() as group,
    ):
        await world.send("alice", "slow")
        await world.agent.reached["slow"].wait()
        group.start_soon(world.app.drain, 60.0)
        while (await world.http.get("/readyz")).status_code == 200:
            pass
        world.agent.release("slow")
        seen = [event.json async for event in events]

    assert '"completed"' in json.dumps(seen[-2])
    assert seen[-1] == {"why": "draining"}


async def test_events_come_in_pages_as_json(world: World) -> None:
    await world.answered("alice", "one")
    await world.answered("alice", "two")
    path = "/v1/conversations/alice/events"

    found: list[object] = []
    after, has_more = "0", True
    while has_more:
        page = await world.http.get(
            path, params={"after": after, "limit": 3}, headers={"Accept": "application/json"}
        )
        found += page.json()["events"]
        after, has_more = page.json()["cursor"], page.json()["has_more"]

    streamed = await read_all(world, f"{path}?live=false")
    assert found == [event.json for event in streamed[:-1]]


async def test_more_streams_than_there_may_be_end_at_once() -> None:
    async with (
        gateway_world(limits=GatewayLimits(streams_max=1)) as world,
        reading(world.address, "/v1/conversations/alice/events"),
    ):
        # The first is counted once it waits; a later one is turned away.
        while not world.app._service.streams.is_full:
            await world.http.get("/healthz")
        events = await read_all(world, "/v1/conversations/alice/events")

    assert [event.json for event in events] == [{"why": "overloaded"}]
