"""Ports for servers that are told theirs by number, and for those that come back at one."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom

__all__ = ["free_port"]

NUMBERS = range(20_000, 32_000)
"""Below those that Linux and macOS choose if none is asked for. One of these could become another
test's before the server is there, or while it is away."""


def free_port() -> int:
    """Return a port of 127.0.0.1 at which nothing listens."""
    for port in SystemRandom().sample(NUMBERS, len(NUMBERS)):
        with suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
