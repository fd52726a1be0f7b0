"""The gateway inside an application of your own, with the users that it has already.

What it teaches: `Conversations` live as long as the application; `gateway.app` is mounted in it;
`authenticate` turns a request into one of your users, and from then on no user can name, see or
guess the conversations of another; `share` lets several of them into one; a signal drains, so that
open streams end and the server stops.

    python examples/mount_gateway.py                       asks itself as two users
    uvicorn --app-dir examples mount_gateway:application   serves it
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType

import anyio
import httpx
from fastapi import FastAPI
from starlette.requests import HTTPConnection

from turnkeeper.actors import Conversations, MemoryJournal, TurnContext, agent, gateway

SESSIONS = {"session-of-alice": "alice", "session-of-bob": "bob"}
"""What your own login keeps; here it is written down."""


@agent
async def support(turn: TurnContext) -> str:
    return f"You said: {turn.message.content}"


async def authenticate(request: HTTPConnection) -> gateway.Principal | None:
    """Return the user of a request, as the application knows its users."""
    user = SESSIONS.get(request.headers.get("x-session", ""))
    return None if user is None else gateway.Principal(user)


async def share(_: gateway.Principal, name: str) -> gateway.Place | None:
    """Return the team's room, which all users have; every other id is the user's own."""
    return gateway.Place("team-room", user="team") if name == "room" else None


conversations = Conversations(support, journal=MemoryJournal())
chats = gateway.app(conversations, authenticate=authenticate, share=share)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with conversations:
        drain_on_sigterm()
        yield


def drain_on_sigterm(grace_s: float = 5.0) -> None:
    """Drain when the server is told to stop: it waits for streams, which drain ends."""
    stop = signal.getsignal(signal.SIGTERM)  # the server's own
    if not callable(stop):
        return  # no server: `main` asks by itself
    loop = asyncio.get_running_loop()

    def drain(number: int, frame: FrameType | None) -> None:
        stop(number, frame)
        asyncio.run_coroutine_threadsafe(chats.drain(grace_s), loop)

    signal.signal(signal.SIGTERM, drain)


application = FastAPI(lifespan=lifespan)
application.mount("/chat", chats)


@application.get("/")
async def home() -> str:
    return "the application's own page"


async def main() -> None:
    transport = httpx.ASGITransport(application)
    async with (
        lifespan(application),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        for session in ("session-of-alice", "session-of-bob", "no session"):
            reply = await client.post(
                "/chat/v1/conversations/first/messages",
                json={"content": f"hello from {session}"},
                headers={"X-Session": session, "Prefer": "wait=30"},
            )
            print(reply.status_code, reply.json().get("end", reply.json()).get("reply", "-"))
        for session in ("session-of-alice", "session-of-bob"):
            await client.post(
                "/chat/v1/conversations/room/messages",
                json={"content": "hello, team"},
                headers={"X-Session": session, "Prefer": "wait=30"},
            )
        room = await client.get(
            "/chat/v1/conversations/room/messages", headers={"X-Session": "session-of-bob"}
        )
        said = [one["event"] for one in room.json()["messages"]]
        print(
            "in the room:", [event["author"] for event in said if event["kind"] == "user_message"]
        )
        mine = await client.get(
            "/chat/v1/conversations/first/events?live=false",
            headers={"X-Session": "session-of-bob"},
        )
        print("bob reads a word of alice:", "session-of-alice" in mine.text)


if __name__ == "__main__":
    anyio.run(main)
