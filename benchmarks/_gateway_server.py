"""Serves the gateway for the benchmarks, beside plain routes that stream the same text.

    python benchmarks/_gateway_server.py FILE

It prints its port. One plain route streams at once; the other first commits a row to a separate
file, as durably as a journal. The garbage collector runs as seldom as in `turnkeeper serve`.
"""

from __future__ import annotations

import gc
import json
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator
from functools import partial

import anyio
import uvicorn
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from turnkeeper.actors import Conversations, SQLiteJournal, TurnContext, agent, gateway

PIECES = ["the quick brown fox jumps "] * 2_000


async def text() -> AsyncIterator[str]:
    for piece in PIECES:
        # Yield to the loop between pieces, as a model's client does.
        await anyio.lowlevel.checkpoint()
        yield piece


@agent
async def writer(turn: TurnContext) -> str | None:
    if turn.message.content == "stream":
        await turn.stream(text())
        return None
    return "ok"


plain = FastAPI()


@plain.post("/plain")
async def stream_plain() -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        async for piece in text():
            yield f"data: {json.dumps({'type': 'text-delta', 'id': '1', 'delta': piece})}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


@plain.post("/plain-durable")
async def stream_durable() -> StreamingResponse:
    await anyio.to_thread.run_sync(
        partial(messages.execute, "INSERT INTO message VALUES ('hello')")
    )
    return await stream_plain()


async def serve(path: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4_096)
    # The same option that a server sets when it binds the socket; connections inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    async with Conversations(writer, journal=SQLiteJournal(path)) as conversations:
        ours = gateway.app(conversations)

        async def served(scope: Scope, receive: Receive, send: Send) -> None:
            await (plain if scope["path"].startswith("/plain") else ours)(scope, receive, send)

        config = uvicorn.Config(
            served, lifespan="off", log_config=None, access_log=False, timeout_keep_alive=600
        )
        print(listener.getsockname()[1], flush=True)
        await uvicorn.Server(config).serve([listener])


if __name__ == "__main__":
    gc.set_threshold(10_000)
    messages = sqlite3.connect(
        f"{sys.argv[1]}.plain", isolation_level=None, check_same_thread=False
    )
    messages.executescript(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; CREATE TABLE message (content TEXT)"
    )
    anyio.run(serve, sys.argv[1])
