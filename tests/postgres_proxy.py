"""A proxy in front of the tests' PostgreSQL that reads the protocol and harms single messages.

It listens on the loopback and passes whole messages on. For each one it asks a plan what to do
with it, so a test can place one fault at one message. It starts two threads for each connection,
which end with it; `close` ends them all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

Direction: TypeAlias = Literal["there", "back"]
Action: TypeAlias = Literal["pass", "cut", "pass and cut", "withhold", "delay", "half-close"]

_LENGTH = 4


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the protocol on its way: `kind` is its type byte, empty for the first."""

    connection: int
    direction: Direction
    kind: str


Plan: TypeAlias = Callable[[Message], Action]


class Proxy:
    """Enter it; connect to `conninfo`; set `plan` at any time. Thread-safe.

    - "cut": close both ends instead of passing the message on; "pass and cut": right after it.
    - "withhold": pass on neither this message nor any after it in this direction, until `release`.
    - "delay": the same, for `wait_until_held` and `release` around a wait of the test.
    - "half-close": end this direction instead of passing the message on; the other one goes on.
    """

    def __init__(self, conninfo: str) -> None:
        self._target = conninfo
        self.plan: Plan = lambda _: "pass"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._state = threading.Condition()
        self._held = 0
        self._released = 0
        self._is_closed = False
        self.connections = 0
        """How many have been made; each has its number from 1."""
        self._numbers: dict[int, int] = {}
        """By the port of its client."""

    @property
    def conninfo(self) -> str:
        """How to reach the server through this proxy."""
        parts = urlsplit(self._target)
        user = parts.username or "postgres"
        return (
            f"postgresql://{user}:{parts.password or ''}@127.0.0.1:"
            f"{self._listener.getsockname()[1]}{parts.path}?sslmode=disable&gssencmode=disable"
        )

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._state:
            self._is_closed = True
            self._state.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def wait_until_held(self) -> None:
        """Wait until a message is held back, or was once since the last `release`."""
        with self._state:
            assert self._state.wait_for(lambda: self._held or self._is_closed, timeout=60)

    @property
    def holds(self) -> bool:
        """True if a message is held back now."""
        return self._held > 0

    def number_of(self, descriptor: int) -> int:
        """Return the number of the connection whose client's socket this is."""
        with socket.socket(fileno=os.dup(descriptor)) as client:
            return self._numbers[client.getsockname()[1]]

    def release(self) -> None:
        """Pass on what is held back."""
        with self._state:
            self._released += 1
            self._state.notify_all()

    def cut(self) -> None:
        """Close every connection there is now."""
        with self._state:
            ends, self._ends = self._ends, []
        for end in ends:
            _shut(end)

    # --- the threads ------------------------------------------------------------------------------

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, address = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                server = self._connect()
            except OSError:
                client.close()
                continue
            with self._state:
                self.connections += 1
                self._numbers[address[1]] = number = self.connections
                self._ends += (client, server)
                is_late = self._is_closed
            if is_late:
                self.cut()
            self._start(partial(self._pump, number, "there", client, server))
            self._start(partial(self._pump, number, "back", server, client))

    def _connect(self) -> socket.socket:
        parts = urlsplit(self._target)
        folder = parse_qs(parts.query).get("host")
        if folder:
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{unquote(folder[0])}/.s.PGSQL.{parts.port or 5432}")
            return server
        return socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 5432))

    def _pump(
        self, number: int, direction: Direction, source: socket.socket, target: socket.socket
    ) -> None:
        try:
            for kind, message in _messages(source, has_first=direction == "there"):
                action = self.plan(Message(number, direction, kind))
                if action in {"cut", "half-close"}:
                    break
                if action in {"withhold", "delay"}:
                    self._hold()
                target.sendall(message)
                if action == "pass and cut":
                    break
            else:
                action = "cut"  # the source has ended
        except OSError:
            action = "cut"
        if action == "half-close":
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                while source.recv(1 << 16):
                    pass  # the other direction goes on until its own end closes
        _shut(source)
        _shut(target)
        if direction == "there":
            source.close()
            target.close()

    def _hold(self) -> None:
        with self._state:
            self._held += 1
            before = self._released
            self._state.notify_all()
            self._state.wait_for(lambda: self._released > before or self._is_closed)
            self._held -= 1


def _messages(source: socket.socket, *, has_first: bool) -> Iterator[tuple[str, bytes]]:
    """Read whole messages; the first one of a client has no type byte."""
    buffer = bytearray()
    while True:
        head = 0 if has_first else 1
        while len(buffer) < head + _LENGTH or len(buffer) < head + int.from_bytes(
            buffer[head : head + _LENGTH]
        ):
            data = source.recv(1 << 16)
            if not data:
                return
            buffer += data
        size = head + int.from_bytes(buffer[head : head + _LENGTH])
        message, kind = bytes(buffer[:size]), chr(buffer[0]) if head else ""
        del buffer[:size]
        has_first = False
        yield kind, message


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
