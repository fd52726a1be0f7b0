"""A model that answers from a script: for tests, for examples, for work without a network.

    model = ScriptedModel(
        [
            ModelResponse(calls=[ToolCall("look", {"at": "order 7"})]),
            ModelUnavailable("scripted", "503"),
            "It is on its way.",
        ]
    )

It keeps the requests that it was given, so that a test can look at what the model was shown.
"""

from __future__ import annotations

import inspect
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

import anyio.lowlevel

from .agents import ToolCall
from .models import ModelError, ModelRequest, ModelResponse
from .recorded import RecordedConversation

__all__ = ["Reply", "ScriptedModel", "recorded_replies"]

Reply: TypeAlias = str | ModelResponse | Exception
"""An answer in words, a whole response, or an error to raise."""

Scripted: TypeAlias = Callable[[ModelRequest], Reply | Awaitable[Reply]]
"""Makes a reply of the request; an async one may wait."""

_WORD = re.compile(r"\s*\S+\s*|\s+")


class ScriptedModel:
    """Gives the replies of a list, one for each request, or those that a function makes.

    A text is written word by word. When the list is at its end, every further request is a
    `ModelError`.
    """

    def __init__(self, script: Iterable[Reply | Scripted] | Scripted) -> None:
        self.requests: list[ModelRequest] = []
        """What it was asked, in order; also the requests that it answered with an error."""
        self._always = script if callable(script) else None
        self._replies = deque(() if callable(script) else script)

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        self.requests.append(request)
        await anyio.lowlevel.checkpoint()
        if self._always is None and not self._replies:
            raise ModelError("the script", f"it has no reply to request {len(self.requests)}")
        scripted = self._always or self._replies.popleft()
        reply = scripted(request) if callable(scripted) else scripted
        if inspect.isawaitable(reply):
            reply = await reply
        if isinstance(reply, Exception):
            raise reply
        response = ModelResponse(reply) if isinstance(reply, str) else reply
        for piece in _WORD.findall(response.text):
            await write(piece)
        return response


def recorded_replies(recorded: RecordedConversation) -> Sequence[ModelResponse]:
    """What the model answered in a recording, from the first exchange to the last: a script."""
    return [
        ModelResponse(
            step.text,
            [ToolCall(c.tool_name, c.arguments, c.provider_call_id) for c in step.calls],
        )
        for exchange in recorded.exchanges
        for step in exchange.steps
    ]
