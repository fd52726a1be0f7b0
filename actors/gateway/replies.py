"""Responses: JSON, problem documents, and streams of server-sent events."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .problems import Problem

__all__ = ["EventStream", "Feed", "LineStream", "json_reply", "problem_reply"]

Write = Callable[[bytes], Awaitable[None]]
Feed = Callable[[Write], Awaitable[None]]
"""Writes a stream to its end; cancelled if the client leaves."""


def json_reply(
    value: object,
    status: int = 200,
    *,
    headers: Mapping[str, str] | None = None,
    media_type: str = "application/json",
) -> Response:
    """Return a response with this value as JSON."""
    # Lone surrogates in an old log are escaped, since UTF-8 cannot encode them.
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(text, status, dict(headers or {}), media_type)


def problem_reply(
    problem: Problem,
    facts: Mapping[str, object] | None = None,
    *,
    retry_after_s: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a response with a problem document."""
    sent = {**problem.headers, **(headers or {})}
    retry_after_s = retry_after_s or problem.retry_after_s
    if retry_after_s:
        sent["Retry-After"] = str(retry_after_s)
    return json_reply(
        problem.document(facts),
        problem.status,
        headers=sent,
        media_type="application/problem+json",
    )


class EventStream(Response):
    """A stream of server-sent events, written by its feed; it ends early if the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(None, 200, {"X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._feed = feed

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        is_whole = False
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._feed(write)
            is_whole = True
            group.cancel_scope.cancel()
        # The watch has ended: during this send, hypercorn reports a disconnect before it has closed
        # the connection or made it ready for the next request.
        if is_whole:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class LineStream(EventStream):
    """A stream of JSON Lines, written like one of events."""

    media_type = "application/x-ndjson"
