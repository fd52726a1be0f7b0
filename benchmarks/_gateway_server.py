"""Serves the gateway for the benchmarks, beside a plain route that streams the same text.

    python benchmarks/_gateway_server.py FILE

Prints its port.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncIterator

import anyio
import uvicorn
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from turnkeeper.actors import Conversations, SQLiteJournal, TurnContext, agent, gateway

PIECES = ["the quick brown fox jumps "] * 2_000


async def text() -> AsyncIterator[str]:
    for piece in PIECES:
        # As a model's client does: without this, one piece would come behind the other in one step.
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


async def serve(path: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4_096)
    async with Conversations(writer, journal=SQLiteJournal(path)) as conversations:
        plain.mount("/", gateway.app(conversations))
        config = uvicorn.Config(
            plain, lifespan="off", log_config=None, access_log=False, timeout_keep_alive=600
        )
        print(listener.getsockname()[1], flush=True)
        await uvicorn.Server(config).serve([listener])


if __name__ == "__main__":
    anyio.run(serve, sys.argv[1])
