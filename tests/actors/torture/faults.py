"""Gateways with planted faults: each is sound but for one thing, which a torture has to find."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnkeeper.actors import Agent, ModelRequest, ModelResponse, ToolAgent, TurnContext
from turnkeeper.actors.core.turn_rules import _join
from turnkeeper.actors.core.working_state import Decision, Draft, StartTurn, TurnEffect
from turnkeeper.actors.events import MessageQueuedEvent, TurnStartedEvent, UserMessageEvent

__all__ = ["AGENTS", "ENGINES", "WIRES", "Wire", "echo"]

EXAMPLE = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "torture_me.py"))
MARKER: re.Pattern[str] = EXAMPLE["MARKER"]
Write = Callable[[str], Awaitable[None]]


def echo() -> Agent:
    """Return the agent without a fault."""
    return ToolAgent(EXAMPLE["Echo"](), [EXAMPLE["look"]])


# --- agents --------------------------------------------------------------------------------------


class Faulty:
    """A model whose answers to what it saw are changed."""

    def __init__(self, change: Callable[[list[str]], list[str]]) -> None:
        self._change = change

    async def respond(self, request: ModelRequest, write: Write) -> ModelResponse:
        said = [event.content for event in request.view if isinstance(event, UserMessageEvent)]
        text = " ".join(["I saw", *self._change(MARKER.findall(" ".join(said)))])
        for word in re.findall(r"\s*\S+", text):
            await write(word)
        return ModelResponse(text)


def without_one(seen: list[str]) -> list[str]:
    return seen[:-2] + seen[-1:]


def swapped(seen: list[str]) -> list[str]:
    return [*seen[:-3], *reversed(seen[-3:])]


def ever_seen() -> Callable[[list[str]], list[str]]:
    """Remember all that was ever in a conversation's view, as a stale cache does."""
    cache: dict[str, dict[str, None]] = {}

    def change(seen: list[str]) -> list[str]:
        if not seen:
            return []
        known = cache.setdefault(seen[0].partition("-")[0], {})
        known |= dict.fromkeys(seen)
        return list(known)

    return change


class Silent:
    """Ends each fourth turn without a word."""

    def __init__(self) -> None:
        self._turns = count(1)
        self._echo = echo()

    async def run(self, turn: TurnContext) -> None:
        if next(self._turns) % 4:
            await self._echo.run(turn)


AGENTS: Mapping[str, tuple[Callable[[], Agent], str]] = {
    "the model does not see the message before the newest": (
        lambda: ToolAgent(Faulty(without_one), []),
        "blind",
    ),
    "the model sees what was taken back": (
        lambda: ToolAgent(Faulty(ever_seen()), []),
        "blind",
    ),
    "the model sees messages in another order": (
        lambda: ToolAgent(Faulty(swapped), []),
        "reordered",
    ),
    "the model sees each message twice": (
        lambda: ToolAgent(Faulty(lambda seen: seen * 2), []),
        "doubled",
    ),
    "some turns end without an answer": (Silent, "unanswered"),
}
"""By what is wrong: the agent, and the fault that has to be found."""


# --- the wire ------------------------------------------------------------------------------------


@dataclass
class Wire:
    """An application around a gateway, which changes some requests and responses."""

    app: ASGIApp
    fault: str
    turns: dict[str, count[int]] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await WIRES[self.fault][0](self, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def is_time(self, what: str, every: int) -> bool:
        """True each so many times."""
        return next(self.turns.setdefault(what, count(1))) % every == 0


def is_send(scope: Scope) -> bool:
    is_send: bool = scope["method"] == "POST" and scope["path"].endswith("/messages")
    return is_send


def is_stream(scope: Scope) -> bool:
    return scope["path"].endswith("/events") and "json" not in header(scope, "accept")


def header(scope: Scope, name: str) -> str:
    value: bytes = dict(scope["headers"]).get(name.encode(), b"")
    return value.decode()


def with_header(scope: Scope, name: str, value: str | None) -> Scope:
    """Return the request with another header, or without it."""
    key = name.encode()
    headers = [pair for pair in scope["headers"] if pair[0] != key]
    if value is not None:
        headers.append((key, value.encode()))
    return {**scope, "headers": headers}


def cursor_of(scope: Scope) -> int:
    found = re.search(rb"after=(\d+)", scope["query_string"])
    by_header = header(scope, "last-event-id").partition(".")[0]
    return int(by_header or (found.group(1) if found else 0))


def moved(scope: Scope, by: int) -> Scope:
    """Return the request for events with another cursor."""
    seq = cursor_of(scope)
    if not seq:
        return scope
    query = re.sub(rb"after=[^&]*", b"", scope["query_string"]) + b"&after=%d" % (seq + by)
    return {**with_header(scope, "last-event-id", None), "query_string": query}


def changed_blocks(send: Send, change: Callable[[bytes], bytes]) -> Send:
    """Return a `send` that changes each event of a stream, or each body."""

    async def changed(message: Message) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            message = {**message, "body": change(message["body"])}
        await send(message)

    return changed


async def collected(app: ASGIApp, scope: Scope, receive: Receive) -> tuple[int, bytes]:
    """Return the status and the body of a response, and send nothing of it."""
    status, body = 0, b""

    async def send(message: Message) -> None:
        nonlocal status, body
        status = message.get("status", status)
        body += message.get("body", b"")

    await app(scope, receive, send)
    return status, body


async def respond(send: Send, status: int, value: object) -> None:
    body = json.dumps(value).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def drops_an_event(wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
    left = iter((True,))

    def change(block: bytes) -> bytes:
        return b"" if block.startswith(b"id:") and next(left, False) else block

    is_reconnected = is_stream(scope) and cursor_of(scope) > 0
    await wire.app(scope, receive, changed_blocks(send, change) if is_reconnected else send)


async def repeats_the_cursor(wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
    await wire.app(moved(scope, -1) if is_stream(scope) else scope, receive, send)


async def skips_after_the_cursor(wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
    await wire.app(moved(scope, 1) if is_stream(scope) else scope, receive, send)


async def ignores_keys(wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
    """Give each request a key of its own, and the answer the key that was sent."""
    if not is_send(scope):
        await wire.app(scope, receive, send)
        return
    key = header(scope, "idempotency-key")
    number = next(wire.turns.setdefault(key, count(0)))
    if number:
        scope = with_header(scope, "idempotency-key", f"{key}.{number}")
    status, body = await collected(wire.app, scope, receive)
    await respond(send, status, {**json.loads(body), "message_id": key})


async def swaps_events(wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
    held: list[bytes] = []

    def change(block: bytes) -> bytes:
        if not block.startswith(b"id:"):
            return block
        if not held and wire.is_time("swap", 5):
            held.append(block)
            return b""
        return block + (held.pop() if held else b"")

    await wire.app(scope, receive, changed_blocks(send, change) if is_stream(scope) else send)


async def repeats_pieces(wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
    def change(block: bytes) -> bytes:
        is_again = block.startswith(b"event: piece") and wire.is_time("piece", 5)
        return block + block if is_again else block

    await wire.app(scope, receive, changed_blocks(send, change) if is_stream(scope) else send)


async def ends_without_a_word(wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
    def change(block: bytes) -> bytes:
        return b"" if block.startswith(b"event: end") else block

    await wire.app(scope, receive, changed_blocks(send, change) if is_stream(scope) else send)


async def answers_anothers(wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
    """Read the first conversation that was written to, now and then, whatever was asked for."""
    found = re.search(r"/conversations/([^/]+)/", scope["path"])
    if found:
        wire.turns.setdefault(f"={found.group(1)}", count())
    if found and scope["method"] == "GET" and wire.is_time("other", 3):
        first = next(name[1:] for name in wire.turns if name.startswith("="))
        scope = {**scope, "path": scope["path"].replace(found.group(1), first)}
        scope["raw_path"] = scope["path"].encode()
    await wire.app(scope, receive, send)


async def acknowledges_what_it_drops(
    wire: Wire, scope: Scope, receive: Receive, send: Send
) -> None:
    """Acknowledge some messages at the end of the log, and write nothing."""
    name = scope["path"].split("/")[3] if is_send(scope) else ""
    key = header(scope, "idempotency-key")
    known = wire.turns
    if is_send(scope) and (f"dropped {key}" in known or wire.is_time("drop", 6)):
        known.setdefault(f"dropped {key}", count())
        seq = next(known.setdefault(f"seq {name}", count(1_000)))
        told = {"conversation_id": name, "message_id": key, "seq": seq, "turn_id": "t"}
        await respond(send, 202, told)
        return
    await wire.app(scope, receive, send)


async def refuses_what_it_writes(wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
    """Tell that a message was refused, after it was written."""
    if not is_send(scope):
        await wire.app(scope, receive, send)
        return
    status, body = await collected(wire.app, scope, receive)
    value = json.loads(body)
    if status == 202 and wire.is_time("refuse", 5):
        status, value = 409, {"type": "urn:problem:turn-in-progress"}
    await respond(send, status, value)


async def reads_stale(wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
    """Leave the last events out of a page, as a replica that lags does."""
    is_page = scope["path"].endswith("/events") and not is_stream(scope)
    if not is_page:
        await wire.app(scope, receive, send)
        return
    status, body = await collected(wire.app, scope, receive)
    value = json.loads(body)
    if status == 200 and wire.is_time("stale", 2):
        value["events"] = value["events"][:1]
    await respond(send, status, value)


async def leaves_out_of_the_transcript(
    wire: Wire, scope: Scope, receive: Receive, send: Send
) -> None:
    if scope["method"] != "GET" or not scope["path"].endswith("/messages"):
        await wire.app(scope, receive, send)
        return
    status, body = await collected(wire.app, scope, receive)
    value = json.loads(body)
    if status == 200:
        del value["messages"][1:2]
    await respond(send, status, value)


async def breaks_off(wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
    """Break streams off in the midst of an event, and the connection with them."""

    async def broken(message: Message) -> None:
        is_event = message.get("body", b"").startswith(b"id:")
        if is_event and wire.is_time("break", 10):
            half = message["body"][: len(message["body"]) // 2]
            await send({**message, "body": half, "more_body": False})
            raise ConnectionAbortedError
        await send(message)

    try:
        await wire.app(scope, receive, broken if is_stream(scope) else send)
    except ConnectionAbortedError:
        return


async def leaves_the_chat_unfinished(
    wire: Wire, scope: Scope, receive: Receive, send: Send
) -> None:
    def change(block: bytes) -> bytes:
        return b"" if b'"finish"' in block or b'"RUN_FINISHED"' in block else block

    await wire.app(scope, receive, changed_blocks(send, change))


async def writes_again_what_is_there(
    wire: Wire, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send the words of a run twice to a client that has come back to it."""

    def change(block: bytes) -> bytes:
        return block * 2 if b'"TEXT_MESSAGE_CONTENT"' in block else block

    is_back = scope["path"].endswith("/connect")
    await wire.app(scope, receive, changed_blocks(send, change) if is_back else send)


async def forgets_ids_in_the_chat(wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
    """Take a message that is sent again for a new one."""
    if scope["method"] != "POST":
        await wire.app(scope, receive, send)
        return
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    chat = json.loads(body)
    key = chat["messages"][-1]["id"]
    number = next(wire.turns.setdefault(key, count(0)))
    if number:
        chat["messages"][-1]["id"] = f"{key}.{number}"
    sent = json.dumps(chat).encode()
    first = iter(({"type": "http.request", "body": sent, "more_body": False},))

    async def again() -> Message:
        return next(first, None) or await receive()

    await wire.app(with_header(scope, "content-length", str(len(sent))), again, send)


Plant = Callable[[Wire, Scope, Receive, Send], Awaitable[None]]
WIRES: Mapping[str, tuple[Plant, str, str]] = {
    "an event is dropped at a reconnection": (drops_an_event, "lost", "own"),
    "the event of the cursor comes again": (repeats_the_cursor, "doubled", "own"),
    "the event after the cursor is skipped": (skips_after_the_cursor, "lost", "own"),
    "keys are ignored": (ignores_keys, "doubled", "own"),
    "two events are swapped": (swaps_events, "reordered", "own"),
    "pieces come twice": (repeats_pieces, "doubled", "own"),
    "streams end without a word": (ends_without_a_word, "torn", "own"),
    "streams break off": (breaks_off, "torn", "own"),
    "another conversation is shown": (answers_anothers, "foreign", "own"),
    "messages are acknowledged and dropped": (acknowledges_what_it_drops, "lost", "own"),
    "messages are refused and written": (refuses_what_it_writes, "foreign", "own"),
    "pages are stale": (reads_stale, "lost", "own"),
    "the transcript leaves a message out": (leaves_out_of_the_transcript, "lost", "own"),
    "the chat's stream does not finish": (leaves_the_chat_unfinished, "torn", "ai-sdk"),
    "the chat forgets ids": (forgets_ids_in_the_chat, "doubled", "ai-sdk"),
    "a run does not finish": (leaves_the_chat_unfinished, "torn", "ag-ui"),
    "a run that goes on repeats itself": (writes_again_what_is_there, "doubled", "ag-ui"),
}
"""By what is wrong: the plant, the fault that has to be found, and the protocol that finds it."""


# --- the engine ----------------------------------------------------------------------------------


def newest_first(draft: Draft, *effects: TurnEffect, reply: object = None) -> Decision:
    """Begin the turn of the message that waits shortest."""
    return _begin(draft, effects, reply, list(draft.working.state.turns.queued.values())[-1:])


def forgets_who_waits(draft: Draft, *effects: TurnEffect, reply: object = None) -> Decision:
    """Begin no turn for a message that steered, and came too late for that."""
    waiting = [one for one in draft.working.state.turns.queued.values() if one.steers is None]
    return _begin(draft, effects, reply, waiting[:1])


def _begin(
    draft: Draft,
    effects: tuple[TurnEffect, ...],
    reply: object,
    chosen: list[MessageQueuedEvent],
) -> Decision:
    if not chosen:
        return draft.decision(reply, effects=effects, is_answer_over=True)
    turn_id = str(chosen[0].turn_id)
    draft.add(TurnStartedEvent, turn_id=turn_id)
    _join(draft, chosen[0], turn_id)
    return draft.decision(reply, effects=(*effects, StartTurn(turn_id)), is_answer_over=True)


ENGINES: Mapping[str, tuple[Callable[..., Decision], str]] = {
    "the newest message in the queue is the next": (newest_first, "reordered"),
    "some messages in the queue get no turn": (forgets_who_waits, "unanswered"),
}
"""By what is wrong: the rule that begins the next turn, and the fault that has to be found."""
