"""Responses: JSON, problem documents, and streams of server-sent events."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..core.snapshots import Slices
from ..owner.loading import in_slices
from .problems import Problem

__all__ = [
    "EventStream",
    "Feed",
    "LineStream",
    "json_reply",
    "json_slices",
    "long_reply",
    "problem_reply",
]

SLICE_BYTES = 16 << 10
"""The bytes of a slice: most JSON of as many bytes is made and written in a millisecond."""
PART_BYTES_MIN = 1 << 10
"""The bytes that a shorter part of a slice counts as, since it takes its time all the same."""

_UNBUFFERED = {"X-Accel-Buffering": "no", "Cache-Control": "no-store, no-transform"}
"""Proxies pass on each part of a stream at once: the first is nginx's own word; without the second
those of Node.js compress the stream, and hold it back until they have enough to compress."""

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
    return Response(_encode(value), status, dict(headers or {}), media_type)


def _encode(value: object) -> str:
    # Lone surrogates in an old log are escaped, since UTF-8 cannot encode them.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


async def long_reply(value: Mapping[str, object]) -> Response:
    """Return a response with this object as JSON, as `json_slices` makes it.

    Other tasks run after each slice, so an iterator among its values makes its items meanwhile.
    """
    return Response(await in_slices(json_slices(value)), media_type="application/json")


def json_slices(value: Mapping[str, object]) -> Slices[bytes]:
    """Return an object as JSON, in slices; an iterator in it is a list there.

    The items of such a list are made and encoded one by one, and so are the members of objects. All
    other values are encoded at once.
    """
    parts: list[str] = []
    unpaused = 0
    for part in _parts_of(value):
        parts.append(part)
        unpaused += max(len(part), PART_BYTES_MIN)
        if unpaused >= SLICE_BYTES:
            unpaused = 0
            yield
    return "".join(parts).encode()


def _parts_of(value: object) -> Iterator[str]:
    match value:
        case dict():
            before = "{"
            for name, member in value.items():
                yield f"{before}{_encode(name)}:"
                yield from _parts_of(member)
                before = ","
            yield "}" if value else "{}"
        case Iterator():
            before = "["
            for item in value:
                yield before + _encode(item)
                before = ","
            yield "[]" if before == "[" else "]"
        case _:
            yield _encode(value)


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
        super().__init__(None, 200, {**_UNBUFFERED, **(headers or {})})
        del self.headers["content-length"]
        self._feed = feed

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        unpaused = 0

        async def write(data: bytes) -> None:
            nonlocal unpaused
            await send({"type": "http.response.body", "body": data, "more_body": True})
            # A server that has room for the data lets no other task run meanwhile.
            unpaused += max(len(data), PART_BYTES_MIN)
            if unpaused >= SLICE_BYTES:
                unpaused = 0
                await anyio.lowlevel.checkpoint()

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
