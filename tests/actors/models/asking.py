"""What the tests of the adapters share: each API with its server, its client and its adapter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anthropic
import anyio
import openai
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.actors.core.logs import Maker
from tests.actors.models.servers import (
    AnthropicApi,
    Api,
    ChatApi,
    Reply,
    ResponsesApi,
    Server,
    serving,
)
from turnkeeper.actors import (
    FrozenObject,
    Model,
    ModelRequest,
    ModelResponse,
    ToolSpec,
    View,
)
from turnkeeper.actors.models.anthropic import AnthropicModel
from turnkeeper.actors.models.openai import OpenAIChatModel, OpenAIResponsesModel

APIS: Mapping[str, type[Api]] = {
    "chat": ChatApi,
    "responses": ResponsesApi,
    "anthropic": AnthropicApi,
}

LOOK = ToolSpec(
    "look",
    "Looks somewhere.",
    FrozenObject({"type": "object", "properties": {"at": {"type": "string"}}}),
)


@dataclass
class Asking:
    """An adapter, and the server that it asks."""

    server: Server
    model: Model
    written: list[str] = field(default_factory=list)

    async def ask(self, *replies: Reply, request: ModelRequest | None = None) -> ModelResponse:
        """Ask once; the pieces of text are in `written` then."""
        self.server.replies.extend(replies)
        self.written = []
        return await self.model.respond(request or hello(), self.write)

    async def write(self, piece: str) -> None:
        await anyio.lowlevel.checkpoint()
        self.written.append(piece)


def hello() -> ModelRequest:
    """A user says hello, and there is a tool."""
    return ModelRequest(View.from_events([Maker().user()]), [LOOK])


@asynccontextmanager
async def asking(
    api: str,
    *,
    model: str = "m",
    **options: Any,  # noqa: ANN401 - the adapter's own
) -> AsyncIterator[Asking]:
    """An adapter of this API, with a client that tries again unless it is told not to."""
    with serving(APIS[api]()) as server:
        if api == "anthropic":
            # Certificates take longer to load than all the rest of a test, and none is looked at.
            http = anthropic.DefaultAsyncHttpxClient(verify=False)
            url = server.url
            async with AsyncAnthropic(api_key="key", base_url=url, http_client=http) as client:
                yield Asking(server, AnthropicModel(model, client=client, **options))
        else:
            adapter = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
            http = openai.DefaultAsyncHttpxClient(verify=False)
            url = f"{server.url}/v1"
            async with AsyncOpenAI(api_key="key", base_url=url, http_client=http) as client:
                yield Asking(server, adapter(model, client=client, **options))
