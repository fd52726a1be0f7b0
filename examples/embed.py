"""Conversations inside an async web application: opened in its lifespan, closed with it.

What it teaches: one `Conversations` for the whole application, entered when the server starts;
a request handler that sends and awaits a reply; a stream of events that a browser can resume.

    python examples/embed.py            runs the application against itself, and prints what came
    uvicorn --app-dir examples embed:app   serves it, with any ASGI server

`app` is plain ASGI, so it fits under Starlette, FastAPI or any other framework unchanged: put the
`async with Conversations(...)` into the framework's lifespan function.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import anyio

from turnkeeper.actors import (
    Conversations,
    SQLiteJournal,
    TurnContext,
    agent,
)
from turnkeeper.actors.errors import NotThisLog

# What ASGI itself calls these; its messages are plain dictionaries.
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@agent
async def support(turn: TurnContext) -> None:
    await anyio.sleep(0.1)  # a model would think here
    await turn.say(f"You said: {turn.message.content}")


class App:
    """POST /chats/NAME with a text gives the reply; GET /chats/NAME gives its events as SSE."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._conversations: Conversations | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["method"] == "POST":
            await self._chat(scope, receive, send)
        else:
            await self._events(scope, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with Conversations(support, journal=SQLiteJournal(self._path)) as conversations:
            self._conversations = conversations
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _chat(self, scope: Message, receive: Receive, send: Send) -> None:
        assert self._conversations is not None
        headers = dict(scope["headers"])
        turn = await self._conversations[_name(scope)].send(
            (await receive())["body"].decode(),
            # A client that tries again after a lost answer sends the same id: the same turn.
            message_id=headers.get(b"idempotency-key", b"").decode() or None,
            on_overlap="interrupt",
        )
        end = await turn.end()
        answer = json.dumps({"outcome": end.outcome, "reply": end.reply}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    async def _events(self, scope: Message, send: Send) -> None:
        assert self._conversations is not None
        # The SSE id is the cursor, so a browser that reconnects says where it left off. A seq alone
        # would not tell this log from one that was deleted and begun anew.
        chat = self._conversations[_name(scope)]
        after, _, event_id = (
            dict(scope["headers"]).get(b"last-event-id", b"").decode().partition(".")
        )
        if after:
            chat = chat.expecting(seq=int(after), event_id=event_id)
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def write(line: str) -> None:
            await send({"type": "http.response.body", "body": line.encode(), "more_body": True})

        try:
            async for seq, event in chat.events(after=int(after or 0), live=False):
                named = f"id: {seq}.{event.id}\nevent: {event.kind}"
                await write(f"{named}\ndata: {event.model_dump_json()}\n\n")
        except NotThisLog:  # the empty id has a browser come back without one
            await write("id:\nevent: gone\ndata: empty the screen\n\n")
        await send({"type": "http.response.body", "body": b""})


def _name(scope: Message) -> str:
    return str(scope["path"]).removeprefix("/chats/")


app = App(Path(os.environ.get("CHATS_DB", "chats.db")))


async def request(
    application: App, method: str, name: str, body: str = "", headers: dict[str, str] | None = None
) -> str:
    """Ask the application, as a server would for its client."""
    answer: list[bytes] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body.encode()}

    async def send(message: Message) -> None:
        answer.append(message.get("body", b""))

    scope = {
        "type": "http",
        "method": method,
        "path": f"/chats/{name}",
        "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
    }
    await application(scope, receive, send)
    return b"".join(answer).decode()


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        application = App(Path(folder) / "chats.db")
        started, stop = anyio.Event(), anyio.Event()

        async def receive() -> Message:
            if started.is_set():
                await stop.wait()
            return {"type": "lifespan"}

        async def send(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                started.set()

        async def ask(name: str, body: str) -> None:
            print(f"{name}: {body} -> {await request(application, 'POST', name, body)}")

        async with anyio.create_task_group() as server:
            server.start_soon(application, {"type": "lifespan"}, receive, send)
            await started.wait()
            async with anyio.create_task_group() as users:
                users.start_soon(ask, "alice", "Where is my order?")
                users.start_soon(ask, "bob", "Hello")
                await anyio.sleep(0.05)
                users.start_soon(ask, "alice", "Sorry: order 7")
            events = (await request(application, "GET", "alice")).split("\n\n")
            cursor = events[1].partition("\n")[0].removeprefix("id: ")
            after = await request(application, "GET", "alice", headers={"last-event-id": cursor})
            print("alice's events after the second:")
            print(
                "\n".join(line for line in after.splitlines() if line.startswith(("id", "event")))
            )
            stop.set()


if __name__ == "__main__":
    anyio.run(main)
