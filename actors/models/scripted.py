"""A model that answers from a script: for tests, examples, and work without a network.

    model = ScriptedModel(
        [
            ModelResponse(calls=[ToolCall("look", {"at": "order 7"})]),
            ModelUnavailable("scripted", "503"),
            "It is on its way.",
        ]
    )

It keeps its requests, so that a test can check what the model was shown.
"""

from __future__ import annotations

import inspect
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeAlias

from turnkeeper.runtime.lowlevel import pausing

from ..errors import InvalidInput
from ..values.type_names import a_type
from .base import ModelError, ModelRequest, ModelResponse

__all__ = ["Reply", "ScriptedModel"]

Reply: TypeAlias = str | ModelResponse | Exception
"""A text, a whole response, or an error to raise."""

Scripted: TypeAlias = Callable[[ModelRequest], Reply | Awaitable[Reply]]
"""Returns the reply to a request; an async one may wait."""

_WORD = re.compile(r"\s*\S+\s*|\s+")


class ScriptedModel:
    """Answers each request with the next reply of `script`, or calls it, if it is a function.

    A text is written word by word. After the end of a list, each request raises `ModelError`.
    """

    def __init__(self, script: Iterable[Reply | Scripted] | Scripted) -> None:
        is_list = isinstance(script, Iterable) and not isinstance(script, str | bytes | Mapping)
        if isinstance(script, type) or not (callable(script) or is_list):
            raise InvalidInput(
                f"script is {a_type(script)}; it takes a list of replies, such as "
                '["Hello."], or a function of a request'
            )
        self.requests: list[ModelRequest] = []
        """The requests, in order, including those answered with an error."""
        self._always = script if callable(script) else None
        self._replies = deque(() if callable(script) else script)

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        self.requests.append(request)
        await pausing()()
        if self._always is None and not self._replies:
            unanswered = f"its list has no reply to request {len(self.requests)}"
            raise ModelError("the script", f"{unanswered}; add one, or use a function")
        scripted = self._always or self._replies.popleft()
        reply = scripted(request) if callable(scripted) else scripted
        if inspect.isawaitable(reply):
            reply = await reply
        if isinstance(reply, Exception):
            raise reply
        response = ModelResponse(reply) if isinstance(reply, str) else reply
        if not isinstance(response, ModelResponse):
            raise InvalidInput(
                f"reply {len(self.requests)} of the script is {a_type(reply)}; it is a str, a "
                "ModelResponse or an error, or a function of a request that returns one of them"
            )
        for piece in _WORD.findall(response.text):
            await write(piece)
        return response
