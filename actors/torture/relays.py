"""TCP relays on loopback that disturb connections: between nodes, and in front of PostgreSQL.

A `Relay` passes bytes on, refuses connections, or cuts each connection when an answer comes: then
the request has arrived, but its sender does not know. It can also hold the bytes of either
direction and pass them on later, like TCP over a network that loses all packets for a while. A
`DatabaseRelay` understands enough of PostgreSQL's protocol to lose each NOTIFY, and to make a
server look read-only, like a standby.

Each belongs to one event loop. `cut` ends the current connections; settings hold for later ones.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeAlias
from urllib.parse import parse_qs, quote, unquote, urlsplit

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream, SocketAttribute, TaskStatus

__all__ = ["DatabaseRelay", "Relay", "Way"]

Way: TypeAlias = Literal["there", "back"]
"""From the client to the server, or from the server to the client."""

_GONE = (
    anyio.EndOfStream,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    OSError,
)
_NOTIFICATION = b"A"
_HEAD = 5
"""The type and the length of a message from the server."""
_VERSION_3 = 3
_READ_ONLY = b"default_transaction_read_only\0on\0"
_POSTGRES_PORT = 5432


class _LocalStream(ByteStream):
    """A connection over a socket in the file system; its waits may be cancelled at any time."""

    def __init__(self, path: str) -> None:
        """Connect, which takes no time. Raises `OSError`."""
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.setblocking(False)
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        while True:
            await anyio.wait_readable(self._socket)
            with suppress(BlockingIOError):
                if data := self._socket.recv(max_bytes):
                    return data
                raise anyio.EndOfStream

    async def send(self, item: bytes) -> None:
        left = memoryview(item)
        while left:
            await anyio.wait_writable(self._socket)
            with suppress(BlockingIOError):
                left = left[self._socket.send(left) :]

    async def send_eof(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        self._socket.close()
        await anyio.lowlevel.checkpoint()


class Relay:
    """Accepts connections, and passes their bytes on."""

    def __init__(self, target: tuple[str, int] | str) -> None:
        """`target`: a host and a port, or the path of a socket."""
        self.port = 0
        """The port that it listens on, once `serve` has begun."""
        self.is_closed = False
        """If True, accept no connections."""
        self.loses_answers = False
        """If True, cut each connection instead of passing an answer on."""
        self._held: frozenset[Way] = frozenset()
        self._let_go = anyio.Event()
        self._target = target
        self._open: set[anyio.CancelScope] = set()

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        """Listen, and pass on, until cancelled."""
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            self.port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - no query
            task_status.started()
            await listener.serve(self._pass_on)

    def cut(self) -> None:
        """End all current connections."""
        for scope in list(self._open):
            scope.cancel()

    def hold(self, *ways: Way) -> None:
        """Hold the bytes of these directions; without any, pass on all held bytes."""
        self._held = frozenset(ways)
        self._let_go.set()
        self._let_go = anyio.Event()

    async def _connect(self) -> ByteStream:
        if isinstance(self._target, str):
            return _LocalStream(self._target)
        return await anyio.connect_tcp(*self._target)

    async def _pass_on(self, client: ByteStream) -> None:
        server: ByteStream | None = None
        try:
            if not self.is_closed:
                with suppress(OSError):
                    server = await self._connect()
            if server is not None:
                async with anyio.create_task_group() as group:
                    self._open.add(group.cancel_scope)
                    ends = group.cancel_scope
                    group.start_soon(self._go, "there", client, server, self._there(), ends)
                    group.start_soon(self._go, "back", server, client, self._back(), ends)
                self._open.discard(group.cancel_scope)
        finally:
            for end in (client, server):
                if end is not None:
                    with anyio.CancelScope(shield=True):
                        await anyio.aclose_forcefully(end)

    async def _go(
        self,
        way: Way,
        source: ByteStream,
        target: ByteStream,
        bend: Callable[[bytes], bytes | None],
        scope: anyio.CancelScope,
    ) -> None:
        """Pass on in one direction; end both if it ends."""
        with suppress(*_GONE):
            while (data := bend(await source.receive())) is not None:
                while way in self._held:
                    await self._let_go.wait()
                if data:
                    await target.send(data)
        scope.cancel()

    def _there(self) -> Callable[[bytes], bytes | None]:
        """Return the function that each piece of the client's bytes goes through; None ends it."""
        return lambda data: data

    def _back(self) -> Callable[[bytes], bytes | None]:
        """Return the same for the server's bytes."""
        return lambda data: None if self.loses_answers else data


class DatabaseRelay(Relay):
    """A relay in front of a PostgreSQL server, without encryption."""

    def __init__(self, conninfo: str) -> None:
        """`conninfo`: a URL. Raises `ValueError` if it is not one."""
        parts = urlsplit(conninfo)
        if parts.scheme not in ("postgresql", "postgres"):
            raise ValueError("a database is named by a postgresql:// URL here")
        folder = parse_qs(parts.query).get("host")
        port = parts.port or _POSTGRES_PORT
        host = unquote(folder[0]) if folder else parts.hostname or "localhost"
        super().__init__(f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port))
        self.is_deaf = False
        """If True, lose each NOTIFY."""
        self.is_read_only = False
        """If True, make new sessions read-only."""
        user, password = unquote(parts.username or "postgres"), unquote(parts.password or "")
        self._account = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
        self._path = parts.path

    @property
    def conninfo(self) -> str:
        """The database through this relay."""
        return (
            f"postgresql://{self._account}@127.0.0.1:{self.port}{self._path}"
            "?sslmode=disable&gssencmode=disable"
        )

    def _there(self) -> Callable[[bytes], bytes | None]:
        has_begun = False

        def bend(data: bytes) -> bytes:
            nonlocal has_begun
            if has_begun or not self.is_read_only:
                has_begun = True
                return data
            has_begun = True
            return _read_only(data)

        return bend

    def _back(self) -> Callable[[bytes], bytes | None]:
        received = b""

        def bend(data: bytes) -> bytes:
            nonlocal received
            received += data
            passed = []
            while len(received) >= _HEAD:
                end = 1 + int.from_bytes(received[1:_HEAD])
                if len(received) < end:
                    break
                message, received = received[:end], received[end:]
                if not (self.is_deaf and message[:1] == _NOTIFICATION):
                    passed.append(message)
            return b"".join(passed)

        return bend


def _read_only(start: bytes) -> bytes:
    """Return a session's first message with the read-only setting; another message unchanged."""
    if len(start) <= struct.calcsize("!ii"):
        return start
    length, version = struct.unpack_from("!ii", start)
    if version >> 16 != _VERSION_3 or length != len(start):
        return start
    body = start[4:-1] + _READ_ONLY + b"\0"
    return struct.pack("!i", 4 + len(body)) + body
