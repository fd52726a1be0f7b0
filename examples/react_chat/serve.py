"""A page in React that talks to the gateway by the AI SDK's stock client, npm's `@ai-sdk/react`.

What it teaches: the page needs no code of turnkeeper's. `useChat` sends and streams, goes on with
an answer after a reload, answers the calls that wait for the user, and has a message answered anew.
The page and the gateway have one origin, since the gateway lets no other site's page in.

    cd examples/react_chat
    npm ci && npm run build           writes the page to `dist`
    uvicorn serve:application         serves it on http://127.0.0.1:8000
"""

from __future__ import annotations

import runpy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from turnkeeper.actors import Conversations, MemoryJournal, gateway

HERE = Path(__file__).parent


def mount(application: FastAPI, conversations: Conversations) -> None:
    """Serve the gateway and, for all else, the page."""
    application.mount("/chat", gateway.app(conversations))
    application.mount("/", StaticFiles(directory=HERE / "dist", html=True, check_dir=False))


support = runpy.run_path(str(HERE.parent / "serve_me.py"))["support"]
conversations = Conversations(support, journal=MemoryJournal())


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with conversations:
        yield


application = FastAPI(lifespan=lifespan)
mount(application, conversations)
