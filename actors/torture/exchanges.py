"""HTTP exchanges that can be cut at any byte, and the server-sent events in them.

Each exchange has its own connection. A cut is a number of bytes, sent or received, after which the
client closes the connection, even in the middle of a header, a chunk or a character.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

import anyio
import h11
from anyio.abc import ByteStream, SocketAttribute

__all__ = ["Broken", "Cut", "CutOff", "Reply", "ServerSent", "Site", "Sites"]

CONNECT_S = 10.0
SILENCE_S = 60.0
"""How long a server may be silent; its heartbeats come more often."""
BODY_BYTES_MAX = 64 << 20
_RECEIVED_AT_ONCE = 65_536
# Makes a close reset the connection.
_NO_LINGER = struct.pack("ii", 1, 0)


class CutOff(Exception):
    """The client cut the connection, as planned."""


class Broken(Exception):
    """The connection ended otherwise: refused, reset, closed early, silent, or no HTTP."""


class NotThere(Broken):
    """Nothing accepts connections at this address; nothing was sent."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The place where an exchange is cut: after this many bytes sent, or received."""

    sent: int | None = None
    received: int | None = None
    is_reset: bool = False


NO_CUT = Cut()


@dataclass(frozen=True, slots=True)
class ServerSent:
    """One server-sent event."""

    data: str
    event: str = "message"
    id: str | None = None

    @property
    def json(self) -> Mapping[str, object]:
        """Its data, if that is a JSON object; else an empty one."""
        return _object(self.data)


class Reply:
    """A response whose head has arrived."""

    def __init__(self, connection: _Connection, response: h11.Response) -> None:
        self._connection = connection
        self.status = response.status_code
        self.headers = {name.decode(): value.decode("latin-1") for name, value in response.headers}

    @property
    def is_refusal(self) -> bool:
        """True if repeating the same request would not help."""
        return HTTPStatus.BAD_REQUEST <= self.status < HTTPStatus.INTERNAL_SERVER_ERROR

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises `Broken` or `CutOff` if it ends early."""
        while True:
            event = await self._connection.next_event()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return

    async def body(self) -> bytes:
        """Return the whole body."""
        received = bytearray()
        async for chunk in self.chunks():
            received += chunk
            if len(received) > BODY_BYTES_MAX:
                raise Broken("the body is too long")
        return bytes(received)

    async def json(self) -> Mapping[str, object]:
        """Return the body, if it is a JSON object; else an empty one."""
        return _object((await self.body()).decode("utf-8", "replace"))

    async def events(self) -> AsyncIterator[ServerSent]:
        """Yield the server-sent events, without the comments."""
        received = bytearray()
        lines: list[str] = []
        async for chunk in self.chunks():
            first, *others = chunk.split(b"\n")
            received += first  # in place: a long line may come in thousands of chunks
            for other in others:
                line = received.decode("utf-8", "replace").removesuffix("\r")
                received = bytearray(other)
                if line:
                    lines.append(line)
                    continue
                if (found := _parse(lines)) is not None:
                    yield found
                lines = []
        if lines or received.strip():
            raise Broken("the stream ends within an event")


class Site:
    """The address of a server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http or https address")
        self.url = url
        self.host = parts.hostname
        self.is_secure = parts.scheme == "https"
        self.port = parts.port or (443 if self.is_secure else 80)
        self.path = parts.path.rstrip("/")
        self._named = parts.netloc.rpartition("@")[2]

    @asynccontextmanager
    async def exchange(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: object = None,
        cut: Cut = NO_CUT,
        silence_s: float = SILENCE_S,
    ) -> AsyncIterator[Reply]:
        """Send a request; yield the response once its head is here. Leaving ends the connection."""
        content = b"" if body is None else json.dumps(body, ensure_ascii=False).encode()
        sent = {"Host": self._named, "Connection": "close", **(headers or {})}
        if body is not None or method != "GET":
            sent |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
        request = h11.Request(method=method, target=path, headers=list(sent.items()))
        stream = await self._connect()
        connection = _Connection(stream, cut, silence_s)
        try:
            await connection.send(request, content)
            yield Reply(connection, await connection.response())
        finally:
            if cut.is_reset:
                _reset(stream)
            with anyio.CancelScope(shield=True), anyio.move_on_after(CONNECT_S):
                await anyio.aclose_forcefully(stream)

    async def _connect(self) -> ByteStream:
        try:
            with anyio.fail_after(CONNECT_S):
                if self.is_secure:
                    return await anyio.connect_tcp(self.host, self.port, tls=True)
                return await anyio.connect_tcp(self.host, self.port)
        except (OSError, TimeoutError) as error:
            raise NotThere("it cannot be connected to") from error


class Sites(Site):
    """Several servers of the same conversations; each exchange goes to the next of them.

    Like a load balancer, it skips servers that accept no connections.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises `ValueError` if one is not an address, or if their paths differ."""
        super().__init__(urls[0])
        self.each = [Site(url) for url in urls]
        if any(site.path != self.path for site in self.each):
            raise ValueError("the addresses of several servers must have the same path")
        self.url = " ".join(urls)
        self._next = 0

    @asynccontextmanager
    async def exchange(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: object = None,
        cut: Cut = NO_CUT,
        silence_s: float = SILENCE_S,
    ) -> AsyncIterator[Reply]:
        # Chosen before the first wait, during which other exchanges choose theirs.
        sites = [*self.each[self._next :], *self.each[: self._next]]
        self._next = (self._next + 1) % len(self.each)
        async with AsyncExitStack() as stack:
            for site in sites:
                opened = site.exchange(
                    method, path, headers=headers, body=body, cut=cut, silence_s=silence_s
                )
                try:
                    reply = await stack.enter_async_context(opened)
                except NotThere:
                    if site is sites[-1]:
                        raise
                else:
                    yield reply
                    return


class _Connection:
    """One request and its response, byte by byte."""

    def __init__(self, stream: ByteStream, cut: Cut, silence_s: float) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT)
        self._cut = cut
        self._silence_s = silence_s
        self._received = 0

    async def send(self, request: h11.Request, content: bytes) -> None:
        data = self._http.send(request) or b""
        data += self._http.send(h11.Data(data=content)) or b"" if content else b""
        data += self._http.send(h11.EndOfMessage()) or b""
        is_cut = self._cut.sent is not None and self._cut.sent < len(data)
        try:
            with anyio.fail_after(self._silence_s):
                await self._stream.send(data[: self._cut.sent] if is_cut else data)
        except (anyio.BrokenResourceError, TimeoutError) as error:
            raise Broken("the request was not taken") from error
        if is_cut:
            raise CutOff

    async def response(self) -> h11.Response:
        while True:
            event = await self.next_event()
            if isinstance(event, h11.Response):
                return event

    async def next_event(self) -> h11.Event:
        """Return the next part of the response."""
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise Broken(f"it is not whole: {error}") from error
            if isinstance(event, h11.Event) and not isinstance(event, h11.ConnectionClosed):
                return event
            if event is not h11.NEED_DATA:
                raise Broken("nothing more comes")
            await self._receive()

    async def _receive(self) -> None:
        left = _RECEIVED_AT_ONCE
        if self._cut.received is not None:
            left = min(left, self._cut.received - self._received)
        if left <= 0:
            raise CutOff
        try:
            with anyio.fail_after(self._silence_s):
                data = await self._stream.receive(left)
        except anyio.EndOfStream:
            data = b""
        except TimeoutError as error:
            raise Broken(f"it said nothing for {self._silence_s:g} s") from error
        except anyio.BrokenResourceError as error:
            raise Broken("the connection was reset") from error
        self._received += len(data)
        self._http.receive_data(data)


def _reset(stream: ByteStream) -> None:
    raw = stream.extra(SocketAttribute.raw_socket, None)  # noqa: S610 - this is no query of Django
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def _parse(lines: Sequence[str]) -> ServerSent | None:
    event, identity, data = "message", None, []
    for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "event":
                event = value
            case "id":
                identity = value
            case "data":
                data.append(value)
            case _:
                pass
    return ServerSent("\n".join(data), event, identity) if data else None


def _object(text: str) -> Mapping[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
