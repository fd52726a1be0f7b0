"""Several processes on one journal: commands go to the owner, events come from the journal.

Each node is a gateway with real listeners and a journal of its own over a shared store.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import anyio
import httpx
import pytest
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests import postgres
from tests.actors.conversations.worlds import HeldAgent, log_of, until_passivated
from tests.actors.gateway.worlds import BOUND_S, JSON, Sse, SseReader, reading, served
from tests.ports import free_port
from turnkeeper.actors import (
    Conversations,
    Journal,
    MemoryJournal,
    PostgresJournal,
    TurnContext,
    gateway,
)
from turnkeeper.actors.core.commands import Behalf, Change, Expected, FromOutside, Interrupt, Sent
from turnkeeper.actors.core.commands import Send as SendCommand
from turnkeeper.actors.errors import (
    ContentTooLong,
    ConversationNotFound,
    Fenced,
    Forbidden,
    InvalidInput,
    NotYours,
    OwnedElsewhere,
)
from turnkeeper.actors.events import TextDelta
from turnkeeper.actors.gateway import node_wire
from turnkeeper.actors.gateway.access import allows
from turnkeeper.actors.gateway.node import SIGNATURE
from turnkeeper.actors.gateway.node_client import NodeClient
from turnkeeper.actors.gateway.node_keys import SKEW_S, Signed, digest_of
from turnkeeper.actors.gateway.node_wire import decode_reply, encode_ask
from turnkeeper.actors.journal import Record
from turnkeeper.actors.journals.memory import MemoryStore
from turnkeeper.actors.owner import event_reader
from turnkeeper.actors.owner.nodes import NotReached, ThisNode
from turnkeeper.actors.owner.subscriptions import Subscriptions
from turnkeeper.runtime import OutcomeUnknown, TurnkeeperError

pytestmark = [pytest.mark.costly, pytest.mark.in_parts(3)]

KEYS = gateway.NodeKeys(["k" * 32])
QUICK = gateway.NodeLimits(answer_s=BOUND_S, heartbeat_s=0.1, silence_s=BOUND_S, retry_s=0.05)
FILES = 1_100
WITH_PIECES = "/v1/conversations/alice/events?pieces=true"
R = TypeVar("R")
Store = Literal["memory", "postgres"]


class Changes:
    """Lets a test wait for a state without looking again and again."""

    def __init__(self) -> None:
        self._next = anyio.Event()

    def note(self) -> None:
        """Say that the state may have come."""
        self._next.set()
        self._next = anyio.Event()

    async def until(self, is_there: Callable[[], bool]) -> None:
        """Wait for the state, for as long as the cluster lives at most."""
        while not is_there():
            await self._next.wait()


class Behind:
    """The application of a listener that is there before the application is."""

    def __init__(self) -> None:
        self.node: gateway.Node | None = None
        self.asked: list[str] = []
        self.answered = 0
        self.asking = Changes()
        """Noted when something is asked, and when it was answered."""
        self.clients: set[object] = set()
        """The other end of each connection."""
        self.is_mute = False
        """Take what is asked, and cut the connection in place of an answer."""
        self.still: anyio.Event | None = None
        """Take what is asked, and do nothing before this is set, as a process that stands still."""
        self.silent: anyio.Event | None = None
        """Say nothing before this is set, as on a way that is silent in one direction."""
        self.is_silenced = anyio.Event()
        """Set once something is held back so."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.node is not None
        self.asked.append(scope["path"].rpartition("/")[2])
        self.asking.note()
        self.clients.add(tuple(scope["client"]))
        if self.still is not None:
            await self.still.wait()

        async def answer(message: object) -> None:
            if self.is_mute:
                raise ConnectionAbortedError
            if self.silent is not None:
                self.is_silenced.set()
                await self.silent.wait()
            await send(message)  # type: ignore[arg-type]

        try:
            await self.node(scope, receive, answer)
        finally:
            self.answered += 1
            self.asking.note()


@dataclass
class Machine:
    """One node: its agent, its conversations, its clients' address and the others'."""

    agent: HeldAgent
    conversations: Conversations
    behind: Behind
    url: str
    """The listener for the other nodes."""
    address: str
    """This run, at that listener."""
    public: str
    http: httpx.AsyncClient
    heard: Changes
    """Noted when this process notes whether it hears the owner of a conversation."""

    async def send(self, text: str, name: str = "alice", **headers: str) -> httpx.Response:
        return await self.http.post(
            f"/v1/conversations/{name}/messages",
            json={"content": text},
            headers={key.replace("_", "-"): value for key, value in headers.items()},
        )

    async def answered(self, text: str, name: str = "alice", **headers: str) -> None:
        reply = await self.send(text, name, prefer="wait=60", **headers)
        assert reply.json()["end"]["outcome"] == "completed", reply.text

    async def until_heard(self, name: str = "alice", *, is_heard: bool) -> None:
        await self.heard.until(lambda: self.conversations[name].hears_pieces is is_heard)


class Cluster:
    """Makes machines of one store."""

    def __init__(self, stack: AsyncExitStack, schema: str | None) -> None:
        self._stack = stack
        self._schema = schema
        self.store = MemoryStore()

    def _journal(self, address: str) -> Journal:
        if self._schema is None:
            return MemoryJournal(self.store, address=address)
        return PostgresJournal(
            postgres.conninfo(), schema=self._schema, address=address, lease_s=BOUND_S
        )

    async def machine(
        self,
        *,
        keys: gateway.NodeKeys = KEYS,
        limits: gateway.NodeLimits = QUICK,
        has_node: bool = True,
        authenticate: gateway.Authenticate | None = None,
        authorize: gateway.Authorize = allows,
        share: gateway.Share | None = None,
    ) -> Machine:
        """Add one; `authorize` is for what other nodes forward to it alone."""
        enter = self._stack.enter_async_context
        agent, behind = HeldAgent(), Behind()
        url = await enter(served(behind))
        address = gateway.node_address(url)
        conversations = await enter(Conversations(agent, journal=self._journal(address)))
        behind.node = gateway.Node(
            conversations,
            address=address,
            keys=keys,
            authorize=authorize,
            share=share,
            limits=limits,
        )
        if has_node:
            await enter(behind.node)
        public = await enter(
            served(gateway.app(conversations, authenticate=authenticate, share=share))
        )
        http = await enter(httpx.AsyncClient(base_url=public, headers=JSON, timeout=BOUND_S))
        heard = _heard(conversations._setup.subscriptions)
        return Machine(agent, conversations, behind, url, address, public, http, heard)

    async def forger(self, machine: Machine) -> Forger:
        http = httpx.AsyncClient(base_url=machine.url, timeout=BOUND_S)
        return Forger(machine, await self._stack.enter_async_context(http))


def _heard(read: Subscriptions) -> Changes:
    changes, note_heard = Changes(), read.note_heard

    def noted(conversation_id: str, *, is_heard: bool) -> None:
        note_heard(conversation_id, is_heard=is_heard)
        changes.note()

    read.note_heard = noted  # type: ignore[method-assign]
    return changes


@asynccontextmanager
async def cluster(store: Store = "memory") -> AsyncIterator[Cluster]:
    with anyio.fail_after(BOUND_S):
        async with AsyncExitStack() as stack:
            schema = stack.enter_context(postgres.schema()) if store == "postgres" else None
            yield Cluster(stack, schema)


async def until(reader: SseReader, event: str) -> Sse:
    async for item in reader:
        if item.event == event:
            return item
    raise AssertionError(f"the stream ended before {event}")


async def to_turn_end(reader: SseReader) -> AsyncIterator[object]:
    """Yield the text of each piece, the kind of each event, and all notes, to the end of a turn."""
    async for item in reader:
        match item.event:
            case "piece":
                yield item.json["text"]
            case "message":
                kind = item.json["event"]["kind"]  # type: ignore[index]
                yield kind
                if kind == "turn_ended":
                    return
            case "note":
                yield item.json
            case _:
                pass


def paced(agent: HeldAgent) -> Sequence[anyio.Event]:
    """Have an agent write three pieces, and wait for one of these after each."""
    gates = [anyio.Event() for _ in range(3)]

    async def run(turn: TurnContext) -> None:
        await turn.stream(pieces())

    async def pieces() -> AsyncIterator[str]:
        for count, gate in enumerate(gates):
            yield f"<{count}>"
            await gate.wait()

    agent.run = run  # type: ignore[method-assign]
    return gates


async def ended(owner: Machine, gates: Sequence[anyio.Event]) -> None:
    """Let an agent that is `paced` write the rest of its answer, and wait for the end."""
    for gate in gates:
        gate.set()
    await (await owner.conversations["alice"].turn("m2")).reply()


@pytest.mark.parametrize("store", ["memory", "postgres"])
async def test_a_message_to_the_wrong_node_is_answered_by_the_owner_once(store: Store) -> None:
    async with cluster(store) as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")

        sent = await other.send("two", prefer="wait=60", idempotency_key="m2")
        again = await owner.send("two", prefer="wait=60", idempotency_key="m2")

        assert sent.status_code == again.status_code == 200
        assert sent.json() == again.json()
        assert sent.json()["end"]["reply"] == "a(two)"
        assert (owner.agent.turns, other.agent.turns) == (["one", "two"], [])
        assert await log_of(other.conversations["alice"]) == [
            "u:one",
            "a:a(one)",
            "u:two",
            "a:a(two)",
        ]
        assert owner.behind.asked == ["ask"]
        assert other.behind.asked == []


@pytest.mark.parametrize("store", ["memory", "postgres"])
async def test_of_two_messages_under_one_run_id_at_two_nodes_one_is_taken(store: Store) -> None:
    async with cluster(store) as made:
        machines = [await made.machine() for _ in range(2)]
        statuses: list[int] = []

        async def run(machine: Machine, message_id: str) -> None:
            user = {"id": message_id, "role": "user", "content": "one"}
            body = {"threadId": "alice", "runId": "r1", "messages": [user]}
            statuses.append((await machine.http.post("/v1/ag-ui", json=body)).status_code)

        async with anyio.create_task_group() as both:
            for count, machine in enumerate(machines):
                both.start_soon(run, machine, f"m{count}")

        assert sorted(statuses) == [200, 409]
        log = await log_of(machines[0].conversations["alice"])
        assert log == ["u:one", "a:a(one)"]


async def test_each_command_of_the_api_works_on_any_node() -> None:
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        owner.agent.hold("two")
        await owner.answered("one")
        await other.send("two")
        await owner.agent.reached["two"].wait()
        queued = await other.send("three", idempotency_key="m3")
        at = "/v1/conversations/alice"

        async def post(path: str, body: object) -> httpx.Response:
            return await other.http.post(f"{at}/{path}", json=body)

        assert queued.json()["overlapped"] == "queue"
        turn = await other.conversations["alice"].turn("m3")
        assert await turn.cancel() is True
        assert (await post("pause", {})).json() == {"changed": True}
        assert (await post("resume", {})).json() == {"changed": True}
        refused = (await post("undo", {})).json()
        assert refused["type"] == "urn:turnkeeper:turn-in-progress"
        assert "on_overlap" not in refused["detail"]  # an undo has none
        assert (await post("interrupt", {})).json() == {"changed": True}
        undone = (await post("undo", {})).json()
        assert [message["content"] for message in undone["messages"]] == ["two"]
        changed = await other.http.patch(at, json={"title": "Shoes", "labels": {"a": "b"}})
        assert (changed.json()["title"], changed.json()["labels"]) == ("Shoes", {"a": "b"})
        refused = await post("answer", {"answers": {"call": True}})
        assert refused.json()["type"] == "urn:turnkeeper:not-confirmable"
        event_ids = [
            logged.event.id async for logged in owner.conversations["alice"].events(live=False)
        ]
        refused = await post("retract", {"event_ids": event_ids})
        assert refused.json()["type"] == "urn:turnkeeper:not-admitted"
        deleted = await other.http.request("DELETE", at, headers=JSON)
        assert deleted.json()["is_erased"] is True, deleted.text
        with pytest.raises(ConversationNotFound):
            await owner.conversations["alice"].at()
        assert other.agent.turns == []


async def test_an_error_of_the_owner_is_told_as_if_it_had_come_up_here() -> None:
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.send("one", idempotency_key="m1")

        by_owner = await owner.send("two", idempotency_key="m1")
        by_other = await other.send("two", idempotency_key="m1")

        assert by_owner.status_code == by_other.status_code == 409
        assert by_owner.json() == by_other.json()
        with pytest.raises(ContentTooLong, match="1,048,576 are allowed") as raised:
            await other.conversations["alice"].send("x" * 1_500_000)
        assert raised.value.length == 1_500_000


async def test_a_stream_at_the_wrong_node_has_each_piece_and_each_event_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_reader, "PIECE_WAIT_S", BOUND_S)
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        owner.agent.hold("stream")
        async with reading(other.public, WITH_PIECES) as early:
            await owner.send("stream")
            piece = await until(early, "piece")
            assert piece.json["text"] == "a("
            async with reading(other.public, WITH_PIECES) as late:
                assert (await until(late, "piece")).json == piece.json
                owner.agent.release("stream")
                for reader in (early, late):
                    seen: list[object] = []
                    async for item in reader:
                        if item.event == "piece":
                            seen.append(item.json["text"])
                            assert item.json["offset"] == 2
                        elif item.data:
                            seen.append(item.json["event"]["kind"])  # type: ignore[index]
                        if seen[-1:] == ["turn_ended"]:
                            break
                    # The journal may have the whole answer first; its last piece is waited for.
                    assert seen == ["stream)", "agent_message", "turn_ended"]
        # Both readers, one stream.
        assert owner.behind.asked == ["pieces"]


async def test_the_pieces_of_a_long_answer_come_as_they_are_written() -> None:
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        gates = paced(owner.agent)
        follower = other.conversations["alice"].follow(after=0)
        await owner.send("go")
        said = ""
        async for item in follower:
            if isinstance(item, TextDelta):
                assert item.offset == len(said)
                said += item.text
                gates[said.count("<") - 1].set()
            elif item.event.kind == "turn_ended" and said:
                break
        assert said == "<0><1><2>"


async def test_a_relay_that_breaks_begins_again_where_its_readers_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster() as made:
        owner = await made.machine()
        other = await made.machine()
        await owner.answered("one")
        owner.agent.hold("stream")
        follower = other.conversations["alice"].follow(after=4)
        await owner.send("stream")
        while not isinstance(item := await anext(follower), TextDelta):
            pass
        here = other.behind.node
        assert here is not None
        assert here._here is not None
        # The same answer comes again, from its beginning, and nothing of it is shown twice.
        here._here.take_piece("alice", item, 6)
        here._here.take_piece("alice", item._replace(text="a(str"), 6)
        again = await anext(follower)
        assert isinstance(again, TextDelta)
        assert (again.offset, again.text) == (2, "str")
        # The way broke, and nothing is known here of what was shown: the reader knows.
        here._here.drop_pieces("alice")
        for text in ("a(", "a(str", "a(stre"):
            here._here.take_piece("alice", item._replace(text=text), 6)
        again = await anext(follower)
        assert isinstance(again, TextDelta)
        assert (again.offset, again.text) == (5, "e")
        # It begins anew with less than was shown, and goes on with more.
        here._here.take_piece("alice", item._replace(text="a("), 6)
        # A piece of an older owner is none.
        here._here.take_piece("alice", item._replace(epoch=item.epoch - 1, text="old"), 6)
        monkeypatch.setattr(event_reader, "PIECE_WAIT_S", BOUND_S)
        owner.agent.release("stream")
        rest = [item async for item in _to_turn_end(follower)]
        assert [item.text for item in rest if isinstance(item, TextDelta)] == ["am)"]


async def test_a_client_is_told_while_the_pieces_cannot_be_had() -> None:
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        async with reading(other.public, WITH_PIECES) as reader:
            for is_heard in (False, True):
                owner.behind.is_mute = not is_heard
                await other.until_heard(is_heard=is_heard)
                await owner.answered("two")
                assert (await until(reader, "note")).json == {"pieces": is_heard}


async def test_an_answer_whose_pieces_end_early_is_told_of_and_comes_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The journal has the answer, and its last pieces are on a way that is silent."""
    monkeypatch.setattr(event_reader, "PIECE_WAIT_S", 0)
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        owner.agent.hold("stream")
        async with reading(other.public, WITH_PIECES) as reader:
            await owner.send("stream")
            assert (await until(reader, "piece")).json["text"] == "a("
            owner.behind.silent = anyio.Event()
            owner.agent.release("stream")

            note, answer = await anext(reader), await anext(reader)

            assert (note.event, note.json) == ("note", {"pieces": False})
            assert answer.json["event"]["content"] == "a(stream)"  # type: ignore[index]
            is_heard = other.conversations["alice"].hears_pieces
            assert not is_heard
            # It is heard again, and says so when there is something to show.
            owner.behind.silent.set()
            await other.until_heard(is_heard=True)
            await owner.answered("two")
            assert (await until(reader, "note")).json == {"pieces": True}


async def test_an_answer_whose_pieces_were_cut_is_told_of_though_its_owner_is_heard_again() -> None:
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        gates = paced(owner.agent)
        async with reading(other.public, f"{WITH_PIECES}&after=6") as reader:
            await owner.send("two", idempotency_key="m2")
            assert (await until(reader, "piece")).json["text"] == "<0>"
            node = other.behind.node
            assert node is not None
            assert node._here is not None
            node._here.drop_pieces("alice")

            await ended(owner, gates)

            assert [item async for item in to_turn_end(reader)] == [
                *({"pieces": False}, "agent_message", {"pieces": True}, "turn_ended")
            ]


@dataclass
class Lagging:
    """Two machines: one has answered, and the other one has only the first piece of that yet."""

    owner: Machine
    other: Machine
    run: Sequence[str]
    """The frames of the run, as a client of the owner got it."""

    async def cursor_at(self, kind: str) -> str:
        """Return the cursor of a client that has the answer's turn up to this event."""
        path = "/v1/conversations/alice/events?after=4&live=false"
        async with reading(self.owner.public, path) as reader:
            async for item in reader:
                if item.json["event"]["kind"] == kind:  # type: ignore[index]
                    assert item.id is not None
                    return item.id
        raise AssertionError(kind)

    async def texts_and_kinds_after(self, cursor: str) -> Sequence[object]:
        """Return what the other machine shows after this cursor, to the end of the turn."""
        async with reading(self.other.public, WITH_PIECES, last_event_id=cursor) as reader:
            return [item async for item in to_turn_end(reader) if isinstance(item, str)]


@asynccontextmanager
async def lagging(
    monkeypatch: pytest.MonkeyPatch, *, is_overlapped: bool = False
) -> AsyncIterator[Lagging]:
    """Make the machines; `is_overlapped`: another message came after the first piece."""
    # A reader of the other machine waits for no further piece.
    monkeypatch.setattr(event_reader, "PIECE_WAIT_S", 0)
    frames: list[str] = []
    silent = anyio.Event()
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        gates = paced(owner.agent)

        async def run() -> None:
            message = {"id": "m2", "role": "user", "content": "two"}
            body = {"threadId": "alice", "runId": "r2", "messages": [message]}
            reply = await owner.http.post("/v1/ag-ui", json=body)
            frames.extend(reply.text.split("\n\n"))

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            async with reading(other.public, f"{WITH_PIECES}&after=4") as reader:
                assert (await until(reader, "piece")).json["text"] == "<0>"
                owner.behind.silent = silent
            if is_overlapped:
                await owner.send("three")
            await ended(owner, gates)
        yield Lagging(owner, other, frames)
        silent.set()


async def test_a_client_gets_no_piece_of_an_answer_that_it_has_from_a_machine_that_lags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It got the answer at another machine, or before it was cut off."""
    async with lagging(monkeypatch) as machines:
        cursor = await machines.cursor_at("agent_message")
        assert await machines.texts_and_kinds_after(cursor) == ["turn_ended"]


async def test_a_client_gets_the_pieces_that_came_before_an_event_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event has not ended the answer, so they are of an answer that the client has not."""
    async with lagging(monkeypatch, is_overlapped=True) as machines:
        cursor = await machines.cursor_at("message_queued")
        shown = await machines.texts_and_kinds_after(cursor)
        assert shown == ["<0>", "agent_message", "turn_ended"]


async def test_a_run_goes_on_at_a_machine_that_lags_without_an_answer_that_was_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with lagging(monkeypatch) as machines:
        end = next(frame for frame in machines.run if '"TEXT_MESSAGE_END"' in frame)
        cursor = end.partition("\n")[0].removeprefix("id: ")
        path = "/v1/ag-ui/alice/connect"
        async with reading(machines.other.public, path, last_event_id=cursor) as reader:
            kinds = [item.json["type"] async for item in reader if item.data]
        assert kinds == ["RUN_STARTED", "RUN_FINISHED"]


async def test_who_comes_after_the_last_reader_has_left_gets_no_piece_of_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nothing is looked for but what a reader calls for.
    monkeypatch.setattr(event_reader, "PIECE_WAIT_S", BOUND_S)
    async with cluster() as made:
        limits = replace(QUICK, heartbeat_s=BOUND_S)
        owner, other = await made.machine(), await made.machine(limits=limits)
        await owner.answered("one")
        gates = paced(owner.agent)
        await owner.send("two", idempotency_key="m2")
        last = other.conversations["alice"].follow(after=6)
        assert (await anext(last)).text == "<0>"  # type: ignore[union-attr]
        del last
        # No reader there wants the next piece, and the stream between the two ends with it.
        gates[0].set()
        node = owner.behind.node
        assert node is not None
        await owner.behind.asking.until(lambda: not node._streams_count)
        await ended(owner, gates)

        async with reading(other.public, f"{WITH_PIECES}&after=4") as reader:
            items = [item async for item in to_turn_end(reader)]
        assert items == ["turn_started", "user_message", "agent_message", "turn_ended"]


async def test_the_last_words_of_an_owner_are_told_before_its_stream_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends while the other machine takes nothing, and the answer is whole there all the same."""
    monkeypatch.setattr(event_reader, "PIECE_WAIT_S", BOUND_S)
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        gates = paced(owner.agent)
        async with reading(other.public, WITH_PIECES) as reader:
            await owner.send("two", idempotency_key="m2")
            assert (await until(reader, "piece")).json["text"] == "<0>"
            owner.behind.silent = anyio.Event()
            gates[0].set()
            await owner.behind.is_silenced.wait()
            await ended(owner, gates)
            await owner.conversations.drain(BOUND_S)
            owner.behind.silent.set()

            *said, answer, end = [item async for item in to_turn_end(reader)]

            assert "".join(map(str, said)) == "<1><2>"
            assert (answer, end) == ("agent_message", "turn_ended")


async def test_pieces_are_asked_for_at_the_next_owner_though_the_last_one_lives() -> None:
    """Its process lost the conversation, as one does that the database did not hear for a while."""
    async with cluster() as made:
        owner, other, third = [await made.machine() for _ in range(3)]
        await owner.answered("one")
        async with reading(other.public, WITH_PIECES) as reader:
            await owner.behind.asking.until(lambda: owner.behind.asked == ["pieces"])
            third.agent.hold("stream")
            await third.conversations.journal.claim("alice", takeover=True)
            await owner.answered("two")  # finds out, and forwards it

            await third.send("stream")

            assert (await until(reader, "piece")).json["text"] == "a("
        assert third.agent.turns == ["two", "stream"]


async def test_a_client_is_told_if_there_are_too_many_streams_for_its_pieces() -> None:
    async with cluster() as made:
        owner = await made.machine()
        other = await made.machine(limits=replace(QUICK, streams_max=1))
        for name in ("alice", "bob"):
            await owner.answered("one", name)
        path = "/v1/conversations/{}/events?pieces=true"
        async with reading(other.public, path.format("alice")) as first:
            await until(first, "message")
            async with reading(other.public, path.format("bob")) as second:
                await until(second, "message")
                await other.until_heard("bob", is_heard=False)
                await owner.answered("two", "bob")
                assert (await until(second, "note")).json == {"pieces": False}
            assert other.conversations["alice"].hears_pieces
        # The set of those that are not heard is no larger than that of the readers.
        while other.conversations._setup.subscriptions._unheard:
            other.conversations["carol"].follow()  # the dropped ones are forgotten as it begins
            await anyio.lowlevel.checkpoint()


async def test_a_client_of_a_process_without_a_node_is_told_that_it_gets_no_pieces() -> None:
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine(has_node=False)
        await owner.answered("one")
        async with reading(other.public, WITH_PIECES) as reader:
            await until(reader, "message")
            is_heard_at_rest = other.conversations["alice"].hears_pieces
            assert is_heard_at_rest
            owner.agent.hold("stream")
            await owner.send("stream")
            await other.until_heard(is_heard=False)
            owner.agent.release("stream")
            assert (await until(reader, "note")).json == {"pieces": False}
            await owner.conversations.drain(BOUND_S)
            await other.answered("two")
            assert (await until(reader, "note")).json == {"pieces": True}


@pytest.mark.parametrize("is_owned", [False, True])
async def test_a_conversation_at_rest_is_looked_for_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, is_owned: bool
) -> None:
    """Though its process may still own it, and ends each stream of pieces since none are there."""
    pauses: list[float] = []
    paused = Changes()
    wait_for_call = gateway.Node._wait_for_call

    async def counted(node: gateway.Node, called: anyio.Event, pause_s: float) -> None:
        pauses.append(pause_s)
        paused.note()
        await wait_for_call(node, called, pause_s)

    monkeypatch.setattr(gateway.Node, "_wait_for_call", counted)
    async with cluster() as made:
        owner = await made.machine()
        resting = replace(QUICK, heartbeat_s=0.001, idle_look_s=0.004)
        other = await made.machine(limits=resting)
        await owner.answered("one")
        if is_owned:
            await until_passivated(owner.conversations, "alice")
        else:
            await owner.conversations.drain(0)
        async with reading(other.public, WITH_PIECES):
            # A reader that comes may look once more.
            await paused.until(lambda: pauses[-3:] == [0.004] * 3)
            assert set(pauses) == {0.001, 0.002, 0.004}


async def _to_turn_end(follower: AsyncIterator[object]) -> AsyncIterator[object]:
    async for item in follower:
        yield item
        if not isinstance(item, TextDelta) and item.event.kind == "turn_ended":  # type: ignore[attr-defined]
            return


async def test_a_dead_address_is_unavailable_and_nothing_happened() -> None:
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        owner_address = gateway.node_address(f"http://127.0.0.1:{free_port()}")
        owner.conversations.journal._address = owner_address  # type: ignore[attr-defined]

        refused = await other.send("two", idempotency_key="m2")

        assert refused.status_code == 503
        assert refused.json()["type"] == "urn:turnkeeper:owned-elsewhere"
        assert refused.headers["retry-after"] == "1"
        assert await log_of(owner.conversations["alice"]) == ["u:one", "a:a(one)"]


async def test_an_answer_that_does_not_come_is_unknown_and_the_same_key_finds_out() -> None:
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        owner.behind.is_mute = True

        unknown = await other.send("two", idempotency_key="m2")

        assert unknown.status_code == 504
        assert unknown.json()["type"] == "urn:turnkeeper:outcome-unknown"
        owner.behind.is_mute = False
        known = await other.send("two", idempotency_key="m2")
        assert known.status_code == 200  # it had happened
        assert owner.agent.turns.count("two") == 1


class Looks:
    """Counts how often a node looks if the owner that it has asked is still the owner."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._counted = Changes()
        look = ThisNode.has_moved

        async def counted(node: ThisNode, conversation_id: str, address: str) -> bool:
            found = await look(node, conversation_id, address)
            self.count += 1
            self._counted.note()
            return found

        monkeypatch.setattr(ThisNode, "has_moved", counted)

    async def some(self) -> None:
        """Wait for three of them."""
        until = self.count + 3
        await self._counted.until(lambda: self.count >= until)


LOOKING = replace(QUICK, look_s=0.02)


async def test_an_owner_that_stands_still_is_waited_for_while_its_lease_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Looks(monkeypatch)
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine(limits=LOOKING)
        await owner.answered("one")
        owner.behind.still = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(partial(other.answered, "two", idempotency_key="m2"))
            await looks.some()

            owner.behind.still.set()

        assert owner.agent.turns == ["one", "two"]


async def test_an_owner_that_stands_still_past_its_lease_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Looks(monkeypatch)
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine(limits=LOOKING)
        await owner.answered("one")
        owner.behind.still = anyio.Event()
        told: list[httpx.Response] = []

        async def send() -> None:
            told.append(await other.send("two", idempotency_key="m2"))

        async with anyio.create_task_group() as group:
            group.start_soon(send)
            await looks.some()
            assert not told
            await owner.conversations.journal.__aexit__(None, None, None)  # as its lease runs out

        assert told[0].status_code == 504
        assert told[0].json()["type"] == "urn:turnkeeper:outcome-unknown"
        await other.answered("two", idempotency_key="m2")
        owner.behind.still.set()
        assert (owner.agent.turns, other.agent.turns) == (["one"], ["two"])


@pytest.mark.parametrize("store", ["memory", "postgres"])
async def test_a_command_that_its_node_has_given_up_does_not_begin_a_deleted_conversation(
    store: Store,
) -> None:
    """The caller sent it again, as it was told to, and deleted the conversation then."""
    gate: anyio.Event | None = None
    is_held = anyio.Event()

    async def slow(_principal: gateway.Principal, _name: str) -> None:
        if gate is not None:
            is_held.set()
            await gate.wait()

    async with cluster(store) as made:
        owner = await made.machine(authenticate=by_header, share=slow)
        limits = replace(QUICK, answer_s=0.05)
        other = await made.machine(authenticate=by_header, limits=limits)
        alice = {"authorization": "alice read,write"}
        await owner.answered("one", **alice)
        gate = anyio.Event()
        while not is_held.is_set():  # on a busy machine, it may be given up before it is sent
            given_up = await other.send("two", idempotency_key="m2", **alice)
            assert given_up.status_code == 504
        await owner.conversations["alice:alice"].send("two", message_id="m2")
        await owner.conversations.delete("alice:alice")

        gate.set()

        asked = len(owner.behind.asked)
        await owner.behind.asking.until(lambda: owner.behind.answered == asked)
        assert not await owner.conversations["alice:alice"].exists()


async def test_an_answer_is_not_waited_for_once_its_node_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Looks(monkeypatch)
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine(limits=LOOKING, has_node=False)
        await owner.answered("one")
        owner.behind.still = anyio.Event()
        node = other.behind.node
        assert node is not None

        async def send() -> None:
            with pytest.raises(OutcomeUnknown, match="it may have happened"):
                await other.conversations["alice"].send("two", message_id="m2")

        async with anyio.create_task_group() as group, node:
            group.start_soon(send)
            await looks.some()
        # Entered again, it looks again if those that it asks are still the owners.
        async with node, anyio.create_task_group() as group:
            group.start_soon(send)
            await looks.some()
            await owner.conversations.journal.__aexit__(None, None, None)  # as its lease runs out
        owner.behind.still.set()


async def node_that_was_left(made: Cluster) -> tuple[Machine, Forger]:
    """Return a machine whose node was entered and left, and one that writes to it as a node."""
    machine = await made.machine(has_node=False)
    node, forger = machine.behind.node, await made.forger(machine)
    assert node is not None
    async with node:
        pass
    return machine, forger


async def test_a_node_that_was_left_takes_no_command_of_another() -> None:
    async with cluster() as made:
        _, forger = await node_that_was_left(made)
        body = encode_ask("alice", Interrupt(None))
        assert await forger.ask(body, forger.signed(body, f"{forger.path}/ask")) == 404


async def test_a_long_command_to_a_node_that_was_left_gets_the_refusal_and_no_reset() -> None:
    """The reset took the answer, and the outcome of what had not been taken was unknown."""
    async with cluster() as made:
        machine, forger = await node_that_was_left(made)
        body = bytes(16 << 20)  # more than the sockets hold
        signed = [(SIGNATURE, forger.signed(body, f"{forger.path}/ask"))]
        client = NodeClient(monotonic=anyio.current_time, answer_s=BOUND_S)
        status, _ = await client.post(machine.url, f"{forger.path}/ask", signed, body)
        assert status == 404


async def test_a_conversation_whose_owner_has_gone_is_taken_over_by_the_node_that_is_asked() -> (
    None
):
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        await owner.conversations.journal.__aexit__(None, None, None)  # as its lease runs out

        await other.answered("two")

        assert other.agent.turns == ["two"]


async def test_a_conversation_that_was_drained_moves_and_its_readers_see_no_gap() -> None:
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        async with reading(other.public, WITH_PIECES) as reader:
            await until(reader, "message")
            await owner.conversations.drain(0)

            await other.answered("two")

            seqs = [1]
            async for item in reader:
                if item.id:
                    seqs.append(int(item.id.partition(".")[0]))
                if item.data and "a(two)" in item.data and item.id:
                    break
        assert seqs == list(range(1, len(seqs) + 1))
        assert (owner.agent.turns, other.agent.turns) == (["one"], ["two"])


async def test_an_owner_that_gave_it_up_just_now_is_not_the_last_word() -> None:
    """The owner has drained, and its lease row still names it until it is asked."""
    async with cluster() as made:
        owner, other, third = [await made.machine() for _ in range(3)]
        await owner.answered("one")
        assert owner.behind.node is not None

        class Moved:
            """By the time that the command is there, a third node owns the conversation."""

            asked = 0

            async def ask(self, address: str, name: str, command: FromOutside[R]) -> R:
                self.asked += 1
                if self.asked == 1:
                    await owner.conversations.drain(0)
                    await third.answered("two")
                assert other.behind.node is not None
                return await other.behind.node.ask(address, name, command)

            def want_pieces(self, _: str) -> None: ...

        moved = Moved()
        other.conversations.join(moved)

        await other.answered("three")

        assert moved.asked == 2
        assert third.agent.turns == ["two", "three"]


async def test_a_command_that_two_owners_gave_up_is_refused_for_now() -> None:
    """Nothing happened, and the client is told when to come again; no third one is asked."""
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")

        class GivenUp:
            asked = 0

            async def ask(self, _: str, name: str, __: FromOutside[R]) -> R:
                self.asked += 1
                raise Fenced(name, epoch=1, expected_seq=1, found_epoch=2, head=0)

            def want_pieces(self, _: str) -> None: ...

        given_up = GivenUp()
        other.conversations.join(given_up)

        refused = await other.send("two", idempotency_key="m2")

        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert given_up.asked == 2
        assert await log_of(owner.conversations["alice"]) == ["u:one", "a:a(one)"]


async def test_an_event_that_only_a_newer_version_knows_stops_no_machine_of_an_older_one() -> None:
    said = {"kind": "note_of_tomorrow", "id": "e9", "timestamp": "2030-01-01T00:00:00Z", "note": 7}
    record = Record("e9", "note_of_tomorrow", json.dumps(said).encode())
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        async with reading(other.public, WITH_PIECES) as reader:
            newer = MemoryJournal(made.store, address="a newer version")
            async with newer:
                claim = await newer.claim("alice", takeover=True)
                epoch, at = claim.epoch, claim.head + 1
                await newer.append(
                    "alice", [record], epoch=epoch, expected_seq=at, is_unfinished=False
                )

            await other.answered("two")
            await owner.answered("three")

            async for item in reader:
                if item.id and item.id.startswith(f"{at}."):
                    assert item.json["event"] == said
                if item.data and "a(three)" in item.data:
                    break
        assert await log_of(other.conversations["alice"]) == await log_of(
            owner.conversations["alice"]
        )
        assert [*owner.agent.turns, *other.agent.turns] == ["one", "two", "three"]


async def test_commands_one_after_the_other_go_over_one_connection() -> None:
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")

        for text in ("two", "three", "four"):
            await other.answered(text)

        assert owner.behind.asked == ["ask"] * 3
        assert len(owner.behind.clients) == 1


async def test_a_connection_is_used_again_however_many_files_are_open() -> None:
    """select() knows no file above 1,023, and each stream of a client is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * FILES:
        pytest.skip(f"a process may have {hard} files")
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        with many_files():
            for text in ("two", "three"):
                await other.answered(text)

        assert len(owner.behind.clients) == 1


@contextmanager
def many_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * FILES, limits[1]))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(FILES):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


async def test_a_process_without_a_node_is_told_as_before() -> None:
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine(has_node=False)
        await owner.answered("one")

        with pytest.raises(OwnedElsewhere) as raised:
            await other.conversations["alice"].send("two")

        assert raised.value.owner == owner.address
        assert (await other.send("two")).status_code == 503


async def test_nodes_with_other_keys_do_not_take_each_others_commands() -> None:
    async with cluster() as made:
        owner = await made.machine()
        other = await made.machine(keys=gateway.NodeKeys(["x" * 32]))
        await owner.answered("one")

        refused = await other.send("two")

        assert refused.status_code == 503
        assert owner.agent.turns == ["one"]


async def test_keys_are_changed_without_a_pause() -> None:
    old, new = "o" * 32, "n" * 32
    async with cluster() as made:
        owner = await made.machine(keys=gateway.NodeKeys([old, new]))
        other = await made.machine(keys=gateway.NodeKeys([new, old]))
        await owner.answered("one")
        await other.answered("two")
        assert owner.agent.turns == ["one", "two"]


# --- a hostile network ----------------------------------------------------------------------------


class Forger:
    """Asks a node by hand."""

    def __init__(self, machine: Machine, http: httpx.AsyncClient) -> None:
        self._machine = machine
        self._http = http
        self.path = machine.address.removeprefix(machine.url)
        self.count = 0

    def signed(self, body: bytes, target: str, *, hops: int = 1, ago_s: float = 0) -> str:
        self.count += 1
        assert self._machine.behind.node is not None
        at = int(self._machine.behind.node._ports.now() - ago_s)
        return Signed(target, digest_of(body), hops, at, f"{self.count:032x}").header(KEYS)

    async def ask(
        self, body: bytes, signature: str | None, *, target: str | None = None, method: str = "POST"
    ) -> int:
        reply = await self.reply(body, signature, target=target, method=method)
        assert reply.content == b"" or reply.status_code == 200
        return reply.status_code

    async def reply(
        self, body: bytes, signature: str | None, *, target: str | None = None, method: str = "POST"
    ) -> httpx.Response:
        headers = {} if signature is None else {SIGNATURE: signature}
        return await self._http.request(
            method, target or f"{self.path}/ask", content=body, headers=headers
        )


async def test_a_request_that_no_node_signed_now_for_this_one_does_nothing() -> None:
    async with cluster() as made:
        machine = await made.machine()
        forger = await made.forger(machine)
        await machine.answered("one")
        body = encode_ask("alice", SendCommand("m2", "two"))
        target = f"{forger.path}/ask"
        good = forger.signed(body, target)

        assert await forger.ask(body, None) == 401
        assert await forger.ask(body, "") == 401
        assert await forger.ask(body, good[:-1] + ("0" if good[-1] != "0" else "1")) == 401
        assert await forger.ask(body.replace(b"two", b"six"), good) == 401
        for changed in (
            forger.signed(body, target, hops=0),
            forger.signed(body, target, hops=2),  # a command goes one hop
            forger.signed(body, target, ago_s=SKEW_S + 5),
            forger.signed(body, target, ago_s=-SKEW_S - 5),
            forger.signed(body, f"{forger.path}/pieces"),
            forger.signed(body, f"{forger.path[:-1]}/ask"),
            good.replace("hops=1", "hops=3"),
            f"{good} more",
        ):
            assert await forger.ask(body, changed) == 401, changed
        assert await log_of(machine.conversations["alice"]) == ["u:one", "a:a(one)"]

        # The digest of the body was refused after the nonce was taken; another one is good, once.
        good = forger.signed(body, target)
        assert await forger.ask(body, good) == 200
        assert await forger.ask(body, good) == 409
        assert machine.agent.turns.count("two") <= 1


async def test_the_listener_of_the_nodes_has_no_other_route() -> None:
    async with cluster() as made:
        machine = await made.machine()
        forger = await made.forger(machine)
        body = encode_ask("alice", Interrupt())
        for target in (
            "/",
            "/healthz",
            "/v1/conversations",
            "/v1/conversations/alice/events",
            forger.path,
            f"{forger.path}/ask/",
            f"{forger.path}/../ask",
            f"{forger.path}/ask?x=1",
            f"{forger.path}//ask",
        ):
            assert await forger.ask(body, forger.signed(body, target), target=target) == 404
        assert await forger.ask(body, forger.signed(body, "/"), method="GET") == 404
        # Nor has the public one any of the nodes'.
        reply = await machine.http.post(f"{forger.path}/ask", content=body)
        assert reply.status_code == 404


async def test_what_was_signed_for_the_process_before_is_nothing_to_this_one() -> None:
    async with cluster() as made:
        machine = await made.machine()
        forger = await made.forger(machine)
        body = encode_ask("alice", SendCommand("m1", "one"))
        run_before = gateway.node_address(machine.url).removeprefix(machine.url)
        target = f"{run_before}/ask"

        assert await forger.ask(body, forger.signed(body, target), target=target) == 404


async def test_a_body_that_is_too_long_is_not_read_to_its_end() -> None:
    async with cluster() as made:
        machine = await made.machine(limits=gateway.NodeLimits(body_bytes_max=100))
        forger = await made.forger(machine)
        body = b"x" * 101
        assert await forger.ask(body, forger.signed(body, f"{forger.path}/ask")) == 413


async def test_a_command_that_cannot_be_read_is_refused() -> None:
    def said(**facts: object) -> bytes:
        return json.dumps(facts).encode()

    async with cluster() as made:
        machine = await made.machine()
        forger = await made.forger(machine)
        for body in (
            b"",
            b"[]",
            b"{",
            b"[" * 100_000,
            b"\xff",
            said(conversation_id="a", command="Stream"),
            said(conversation_id="a", command="Send"),
            said(conversation_id=1, command="Send"),
            said(conversation_id="a", command="Undo", newer=1),
            said(conversation_id="a", command="Undo", expected=[1]),
        ):
            assert await forger.ask(body, forger.signed(body, f"{forger.path}/ask")) == 400, body


async def test_a_command_that_an_older_process_cannot_read_names_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.send("one", idempotency_key="m1")
        monkeypatch.delitem(node_wire._COMMANDS, "Pause")  # as if only the newer one had it

        with pytest.raises(OwnedElsewhere, match="since it runs an older version") as refused:
            await other.conversations["alice"].pause()

        assert refused.value.is_older
        assert refused.value.owned == "conversation alice"


async def test_a_principal_reaches_its_own_conversation_alone_over_any_node() -> None:
    async def by_name(request: object) -> gateway.Principal | None:
        return gateway.Principal(request.headers["authorization"])  # type: ignore[attr-defined]

    async with cluster() as made:
        owner = await made.machine(authenticate=by_name)
        other = await made.machine(authenticate=by_name)
        await owner.send("one", authorization="alice", idempotency_key="m1")

        sent = await other.send("two", authorization="alice")
        assert sent.status_code == 202
        # bob's conversation of the same name is another one.
        assert (await other.send("mine", authorization="bob")).status_code == 202
        log = [row.conversation_id for row in (await owner.conversations.list()).rows]
        assert log == ["alice:alice", "bob:alice"]
        assert (await owner.conversations["alice:alice"].at()).details.owner == "alice"
        # The owner compares it again, when the command is decided.
        with pytest.raises(ConversationNotFound):
            await other.conversations["alice:alice"].expecting(owner="bob").interrupt()


async def test_an_address_that_is_none_of_a_node_is_not_called() -> None:
    async with cluster() as made:
        machine = await made.machine()
        node = machine.behind.node
        assert node is not None
        for address in (
            "process 7 on host",
            "file:///etc/passwd",
            "http://127.0.0.1:1/",
            f"{machine.url}/path",
            f"http://user@127.0.0.1:1{machine.address.removeprefix(machine.url)}",
            f"{machine.address}?x=1",
        ):
            with pytest.raises(NotReached):
                await node.ask(address, "alice", Interrupt())
        for url in ("127.0.0.1:8000", "https://a:1", "http://a", "http://a:1/path", "http://a:1?b"):
            with pytest.raises(InvalidInput):
                gateway.node_address(url)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "[0:0:0:0:0:0:0:0]"])
def test_an_address_at_which_each_machine_reaches_itself_is_refused(host: str) -> None:
    """Each command that was forwarded to it came back to its sender, which could not take it."""
    with pytest.raises(InvalidInput, match="would reach itself"):
        gateway.node_address(f"http://{host}:8101")


async def test_a_node_that_has_left_the_others_forwards_nothing() -> None:
    """As from a command that was looking for its owner when the node was left."""
    async with cluster() as made:
        owner = await made.machine()
        await owner.answered("hello")
        other = await made.machine(has_node=False)
        node = other.behind.node
        assert node is not None
        async with node:
            await other.conversations["alice"].interrupt()
        asked = len(owner.behind.asked)
        with pytest.raises(NotReached):
            await node.ask(owner.address, "alice", Interrupt())
        assert asked == len(owner.behind.asked) == 1


async def test_a_fault_of_the_owners_node_does_not_say_that_nothing_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carry_out = ThisNode.ask

    async def fails(node: ThisNode, conversation_id: str, command: FromOutside[R]) -> R:
        await carry_out(node, conversation_id, command)
        raise RuntimeError("a fault of the library")

    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")
        with monkeypatch.context() as patched:
            patched.setattr(ThisNode, "ask", fails)
            assert (await other.send("two", idempotency_key="m2")).status_code == 504

        assert (await other.send("two", idempotency_key="m2")).status_code == 200  # it had happened


async def test_redirects_are_not_followed() -> None:
    async with cluster() as made:
        machine = await made.machine()
        node = machine.behind.node
        assert node is not None
        asked: list[str] = []

        async def elsewhere(scope: Scope, _: Receive, send: Send) -> None:
            asked.append(scope["path"])
            headers = [(b"location", b"/other"), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 307, "headers": headers})
            await send({"type": "http.response.body", "body": b""})

        async with served(elsewhere) as url:
            with pytest.raises(OutcomeUnknown):
                await node.ask(gateway.node_address(url), "alice", Interrupt())
        assert len(asked) == 1


async def lost(_: Message) -> None:
    """Take a part of an answer, and pass nothing on."""


@asynccontextmanager
async def behind_a_proxy(owner: Machine, proxy: ASGIApp) -> AsyncIterator[None]:
    """Let the owner's lease have the address of a proxy before it."""
    journal: Any = owner.conversations.journal
    run = owner.address.rpartition("/")[2]
    async with served(proxy) as url:
        journal._address = f"{url}/{run}"
        yield
    journal._address = owner.address


async def test_a_503_of_a_proxy_between_two_nodes_says_nothing_of_the_command() -> None:
    async with cluster() as made:
        owner, other = await made.machine(), await made.machine()
        await owner.answered("one")

        async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
            assert scope["type"] == "http"
            assert owner.behind.node is not None
            await owner.behind.node(scope, receive, lost)
            headers = [(b"content-length", b"5"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": b"error"})

        async with behind_a_proxy(owner, proxy):
            unknown = await other.send("two", idempotency_key="m2")
        assert unknown.status_code == 504
        assert (await other.send("two", idempotency_key="m2")).status_code == 200  # it had happened


@pytest.mark.parametrize("is_left", [False, True])
async def test_a_proxy_that_sends_a_request_again_does_not_say_that_nothing_happened(
    *, is_left: bool
) -> None:
    """As meshes do when an answer was lost: the second one is refused, after the first was not.

    `is_left`: the owner's node is left in between.
    """
    async with cluster() as made:
        owner, other = await made.machine(has_node=False), await made.machine()
        entered, leaving, left = anyio.Event(), anyio.Event(), anyio.Event()
        assert owner.behind.node is not None
        node = owner.behind.node

        async def enter() -> None:
            async with node:
                entered.set()
                await leaving.wait()
            left.set()

        async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
            body, has_more = b"", True
            while has_more:
                part = await receive()
                body, has_more = body + part["body"], part["more_body"]

            async def again() -> Message:
                return {"type": "http.request", "body": body, "more_body": False}

            await node(scope, again, lost)
            if is_left:
                leaving.set()
                await left.wait()
            await node(scope, again, send)

        async with anyio.create_task_group() as group:
            group.start_soon(enter)
            await entered.wait()
            await owner.answered("one")
            async with behind_a_proxy(owner, proxy):
                unknown = await other.send("two", idempotency_key="m2")
            leaving.set()
        assert unknown.status_code == 504
        assert (await owner.send("two", idempotency_key="m2")).status_code == 200  # it had happened
        assert owner.agent.turns == ["one", "two"]


# --- the owner authorizes again -------------------------------------------------------------------


async def by_header(request: HTTPConnection) -> gateway.Principal | None:
    """The principal and the scopes, as the test writes them."""
    name, _, scopes = request.headers.get("authorization", "").partition(" ")
    return gateway.Principal(name, frozenset(scopes.split(","))) if name else None  # type: ignore[arg-type]


async def test_the_owner_refuses_a_principal_whose_right_was_taken_away_meanwhile() -> None:
    taken_away: set[str] = set()

    def by_the_owner(principal: gateway.Principal, action: str, name: str | None) -> bool:
        asked.append((principal.name, action, name))
        return action in principal.scopes and principal.name not in taken_away

    asked: list[tuple[str, str, str | None]] = []
    async with cluster() as made:
        owner = await made.machine(authenticate=by_header, authorize=by_the_owner)
        other = await made.machine(authenticate=by_header)
        alice = {"authorization": "alice read,write"}
        await owner.answered("one", **alice)
        await other.answered("two", **alice)
        assert asked == [("alice", "write", "alice")]

        taken_away.add("alice")
        at = "/v1/conversations/alice"
        for method, path, body in (
            ("POST", "/messages", {"content": "three"}),
            ("POST", "/interrupt", {}),
            ("POST", "/undo", {}),
            ("POST", "/pause", {}),
            ("PATCH", "", {"title": "Mine"}),
            ("DELETE", "", None),
        ):
            refused = await other.http.request(method, f"{at}{path}", json=body, headers=alice)
            assert refused.status_code == 403, (path, refused.text)
            assert refused.json()["type"] == "urn:turnkeeper:forbidden"
            assert set(refused.json()) == {"type", "title", "status", "detail"}
        assert await log_of(owner.conversations["alice:alice"]) == [
            *("u:one", "a:a(one)", "u:two", "a:a(two)")
        ]


async def test_a_share_that_was_withdrawn_is_none_at_the_owner() -> None:
    """The node that is asked has not heard of it; the owner answers as if there were none."""
    shared = gateway.Place("alice:alice", "alice")
    withdrawn: set[str] = set()

    async def share(principal: gateway.Principal, name: str) -> gateway.Place | None:
        return shared if principal.name == "bob" and name == "hers" else None

    async def share_at_owner(principal: gateway.Principal, name: str) -> gateway.Place | None:
        return None if principal.name in withdrawn else await share(principal, name)

    async with cluster() as made:
        owner = await made.machine(authenticate=by_header, share=share_at_owner)
        other = await made.machine(authenticate=by_header, share=share)
        bob = {"authorization": "bob read,write"}
        await owner.answered("one", authorization="alice read,write")
        await other.answered("two", "hers", **bob)

        withdrawn.add("bob")
        refused = await other.send("three", "hers", **bob)

        assert refused.status_code == 404
        assert refused.json()["type"] == "urn:turnkeeper:conversation-not-found"
        assert owner.agent.turns == ["one", "two"]


async def test_a_command_for_a_principal_is_held_to_its_scopes_its_names_and_its_digest() -> None:
    def behalf(principal: str, scopes: str, name: str | None) -> Behalf:
        return Behalf(principal, tuple(filter(None, scopes.split(","))), name)

    async with cluster() as made:
        machine = await made.machine(authenticate=by_header)
        forger = await made.forger(machine)
        await machine.answered("one", authorization="alice read,write")

        async def told(command: FromOutside[Any], name: str = "alice:alice") -> object:
            body = encode_ask(name, command)
            target = f"{forger.path}/ask"
            reply = await forger.reply(body, forger.signed(body, target))
            assert reply.status_code == 200
            try:
                return decode_reply(reply.content)
            except TurnkeeperError as error:
                return type(error)

        def sent(by: Behalf, owner: str | None = "alice") -> SendCommand:
            return SendCommand("m2", "two", expected=Expected(owner, behalf=by))

        for by in (
            behalf("alice", "", "alice"),
            behalf("alice", "read", "alice"),
            behalf("alice", "read,inspector", "alice"),
            behalf("alice", "Write", "alice"),
            behalf("alice", "write,read", None),  # for all principals: only with admin
        ):
            assert await told(sent(by)) is Forbidden, by
        for by in (
            behalf("bob", "write", "alice"),  # its own conversation of that name is another one
            behalf("bob", "write", "alice:alice"),
            behalf("alice", "write", "other"),
            behalf("alice:", "write", "alice"),
        ):
            assert await told(sent(by)) is NotYours, by
        own = behalf("alice", "write", "alice")
        assert await told(sent(own, owner=None)) is NotYours
        assert await told(sent(own, owner="bob")) is NotYours
        for by in (own, behalf("alice", "write,read,inspector", "alice")):
            give = Change(owner="bob", expected=Expected("alice", behalf=by))
            assert await told(give) is Forbidden
        assert await told(sent(behalf("x" * 65, "write", "alice"))) is InvalidInput
        assert await told(sent(behalf("root", "admin", "bob:alice"))) is NotYours
        assert await told(sent(behalf("root", "admin", "bob:alice"), owner=None)) is NotYours
        assert await log_of(machine.conversations["alice:alice"]) == ["u:one", "a:a(one)"]

        # Scopes that were written in after the signature was made.
        body = encode_ask("alice:alice", sent(behalf("alice", "read", "alice")))
        good = forger.signed(body, f"{forger.path}/ask")
        assert await forger.ask(body.replace(b'["read"]', b'["write"]'), good) == 401
        for wrong in (5, "write", [5], {"write": 1}, None):
            said = json.loads(body)
            said["expected"]["behalf"]["scopes"] = wrong
            bent = json.dumps(said).encode()
            status = await forger.ask(bent, forger.signed(bent, f"{forger.path}/ask"))
            assert status in (200, 400), wrong
        assert await log_of(machine.conversations["alice:alice"]) == ["u:one", "a:a(one)"]
        assert isinstance(await told(sent(behalf("root", "admin", "alice:alice"), None)), Sent)


class Panic(BaseException):
    """What an extension module raises, and no `except Exception` catches."""


@pytest.mark.parametrize(
    "failure", [None, LookupError("the list of rights cannot be read"), Panic()], ids=repr
)
async def test_an_authorization_that_fails_lets_nothing_through(
    failure: BaseException | None,
) -> None:
    def fails(principal: gateway.Principal, action: str, name: str | None) -> bool:
        if failure is None:
            return "no"  # type: ignore[return-value]
        raise failure

    async with cluster() as made:
        owner = await made.machine(authenticate=by_header, authorize=fails)
        other = await made.machine(authenticate=by_header)
        alice = {"authorization": "alice read,write"}
        await owner.answered("one", **alice)

        refused = await other.send("two", **alice)

        assert refused.status_code == 503
        assert refused.json()["type"] == "urn:turnkeeper:owned-elsewhere"
        assert owner.agent.turns == ["one"]


async def test_an_erasure_at_another_node_is_authorized_by_the_owner_as_an_administrators() -> None:
    asked: list[tuple[str, str, str | None]] = []

    def by_the_owner(principal: gateway.Principal, action: str, name: str | None) -> bool:
        asked.append((principal.name, action, name))
        return principal.name != "former"

    async with cluster() as made:
        owner = await made.machine(authenticate=by_header, authorize=by_the_owner)
        other = await made.machine(authenticate=by_header)
        await owner.answered("one", authorization="alice read,write")

        async def erase(who: str) -> dict[str, dict[str, object]]:
            headers = {**JSON, "authorization": f"{who} admin"}
            reply = await other.http.request("DELETE", "/v1/principals/alice", headers=headers)
            assert reply.status_code == 200, reply.text
            told: dict[str, dict[str, object]] = reply.json()
            return told

        left = await erase("former")
        assert left["receipts"] == {}, left
        assert asked == [("former", "admin", None)]
        assert list((await erase("root"))["receipts"]) == ["alice:alice"]


async def test_a_public_request_cannot_pass_as_another_nodes() -> None:
    async with cluster() as made:
        machine = await made.machine(authenticate=by_header)
        forger = await made.forger(machine)
        await machine.answered("one", authorization="alice read,write")
        signature = forger.signed(b"{}", "/v1/conversations/alice/undo")

        for headers in (
            {SIGNATURE: signature},
            {SIGNATURE: signature, "authorization": "bob read"},
        ):
            reply = await machine.http.post(
                "/v1/conversations/alice/undo", content=b"{}", headers={**JSON, **headers}
            )
            assert reply.status_code in (401, 403)
        assert await log_of(machine.conversations["alice:alice"]) == ["u:one", "a:a(one)"]
