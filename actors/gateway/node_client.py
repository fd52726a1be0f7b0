"""A small HTTP client for requests between nodes: POST only, over connections that are kept.

An idle connection is used again only for a short time, less than any server keeps it open, and only
if it has nothing to read, which would mean that the server closes it. So a request on a kept
connection is lost only if its server dies. Each request is sent once. Redirects are not followed,
and answers are bounded.
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from urllib.parse import urlsplit

import anyio
import h11
from anyio.abc import ByteStream, SocketAttribute

__all__ = ["Broken", "NodeClient", "Unreachable"]

CONNECT_S = 2.0
IDLE_S = 2.0
IDLE_MAX = 64
"""How many idle connections are kept to one address."""
ADDRESSES_MAX = 256
ANSWER_BYTES_MAX = 64 << 20
LINE_BYTES_MAX = 64 << 20
_RECEIVED_AT_ONCE = 65_536

# Each stream of a client is a file. select() fails for large file numbers; poll() does not.
_Selector: type[selectors.BaseSelector] = getattr(
    selectors, "PollSelector", selectors.DefaultSelector
)


class Unreachable(Exception):
    """Nothing was sent: nothing at this address accepts a connection."""


class Broken(Exception):
    """The connection ended before the answer was complete; the request may have arrived."""


class NodeClient:
    """Used from one event loop."""

    def __init__(self, *, monotonic: Callable[[], float], answer_s: float) -> None:
        self._monotonic = monotonic
        self._answer_s = answer_s
        self._idle: dict[str, deque[tuple[float, _Connection]]] = {}
        self._is_closed = False

    async def post(
        self, address: str, target: str, headers: list[tuple[str, str]], body: bytes
    ) -> tuple[int, bytes]:
        """Return the status and the body of the answer. Raises `Unreachable` and `Broken`."""
        connection = await self._connect(address)
        is_whole = False
        try:
            with anyio.fail_after(self._answer_s):
                await connection.send(target, headers, body)
                status = await connection.status()
                answer = bytearray()
                async with aclosing(connection.body()) as parts:
                    async for data in parts:
                        answer += data
                        if len(answer) > ANSWER_BYTES_MAX:
                            raise Broken("the answer is too long")
            is_whole = connection.reuse()
        except TimeoutError as error:
            raise Broken("no answer came in time") from error
        finally:
            if not is_whole:
                await connection.cut()
        await self._keep(address, connection)
        return status, bytes(answer)

    @asynccontextmanager
    async def lines(
        self,
        address: str,
        target: str,
        headers: list[tuple[str, str]],
        body: bytes,
        *,
        silence_s: float,
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Return the status, and the lines of the answer as they come.

        Raises `Unreachable` and `Broken`, even if nothing comes for `silence_s`.
        """
        connection = await self._connect(address)
        try:
            try:
                with anyio.fail_after(silence_s):
                    await connection.send(target, headers, body)
                    status = await connection.status()
            except TimeoutError as error:
                raise Broken("no answer came in time") from error
            async with aclosing(connection.lines(silence_s)) as lines:
                yield status, lines
        finally:
            await connection.cut()

    async def aclose(self) -> None:
        """Close the idle connections, and keep none from now on."""
        self._is_closed = True
        idle, self._idle = self._idle, {}
        for kept in idle.values():
            for _, connection in kept:
                await connection.cut()

    async def _connect(self, address: str) -> _Connection:
        now = self._monotonic()
        kept = self._idle.get(address, deque())
        while kept:
            until, connection = kept.pop()
            if now < until and not connection.can_be_read:
                return connection
            await connection.cut()
        parts = urlsplit(address)
        assert parts.hostname is not None and parts.port is not None, address  # noqa: PT018 - one fact
        try:
            with anyio.fail_after(CONNECT_S):
                stream = await anyio.connect_tcp(parts.hostname, parts.port)
        except (OSError, TimeoutError, RuntimeError) as error:
            # The last of these if no thread can be started, in which to look the name up.
            raise Unreachable from error
        return _Connection(stream, parts.netloc)

    async def _keep(self, address: str, connection: _Connection) -> None:
        if self._is_closed:
            await connection.cut()
            return
        kept = self._idle.pop(address, deque())
        self._idle[address] = kept  # after the addresses that were used longer ago
        kept.append((self._monotonic() + IDLE_S, connection))
        surplus = [kept.popleft()] if len(kept) > IDLE_MAX else []
        if len(self._idle) > ADDRESSES_MAX:
            surplus += self._idle.pop(next(iter(self._idle)))  # perhaps of a node that has gone
        for _, unused in surplus:
            await unused.cut()


class _Connection:
    """One connection, with one request at a time."""

    def __init__(self, stream: ByteStream, host: str) -> None:
        self._stream = stream
        self._host = host
        self._http = h11.Connection(h11.CLIENT)
        # Read once: each time, anyio collects all attributes of a stream, even its peer's address.
        self._socket = stream.extra(SocketAttribute.raw_socket, None)  # noqa: S610 - no query

    @property
    def can_be_read(self) -> bool:
        """True if something can be read before a request was sent: the connection has ended."""
        if self._socket is None or self._socket.fileno() < 0:
            return True
        with _Selector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(0))

    async def send(self, target: str, headers: list[tuple[str, str]], body: bytes) -> None:
        sent = [("Host", self._host), ("Content-Length", str(len(body))), *headers]
        data = self._http.send(h11.Request(method="POST", target=target, headers=sent)) or b""
        data += self._http.send(h11.Data(data=body)) or b""
        data += self._http.send(h11.EndOfMessage()) or b""
        try:
            await self._stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
            raise Broken("the request was not taken") from error

    async def status(self) -> int:
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                return event.status_code

    async def body(self) -> AsyncGenerator[bytes]:
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return

    async def lines(self, silence_s: float) -> AsyncGenerator[bytes]:
        received = bytearray()
        async with aclosing(self.body()) as body:
            while True:
                try:
                    with anyio.fail_after(silence_s):
                        part = await anext(body)
                except StopAsyncIteration:
                    # An answer in HTTP/1.0, as of a proxy, ends where its connection is closed.
                    if received:
                        raise Broken("the last line is not whole") from None
                    return
                except TimeoutError as error:
                    raise Broken(f"nothing came for {silence_s:g} s") from error
                first, *others = part.split(b"\n")
                received += first  # in place: a long line may come in thousands of parts
                for other in others:
                    yield bytes(received)
                    received = bytearray(other)
                if len(received) > LINE_BYTES_MAX:
                    raise Broken("a line is too long")

    async def _next_event(self) -> h11.Event:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise Broken("the answer is not whole") from error
            if isinstance(event, h11.Event) and not isinstance(event, h11.ConnectionClosed):
                return event
            if event is not h11.NEED_DATA:
                raise Broken("nothing more comes")
            try:
                data = await self._stream.receive(_RECEIVED_AT_ONCE)
            except anyio.EndOfStream:
                data = b""
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
                raise Broken("the connection was reset") from error
            self._http.receive_data(data)

    def reuse(self) -> bool:
        """Make ready for the next request. Return False if the server closes the connection."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        return False

    async def cut(self) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(CONNECT_S):
            await anyio.aclose_forcefully(self._stream)
