"""A server of the torture's own: how it ended is looked at, since a fault may hide in its end."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from tests.ports import free_port
from turnkeeper.actors.torture.exchanges import Site
from turnkeeper.actors.torture.machines import _free_ports
from turnkeeper.actors.torture.server import START_S, GivenServer, OwnServer, ServerLost
from turnkeeper.runtime import Ports
from turnkeeper.runtime.testing import VirtualClock

pytestmark = pytest.mark.anyio

BOUND_S = 60.0

# It takes connections, and ends with a status when it is told to or, if it begins with one, itself.
SERVER = """
import signal, socket, sys
def end(*_):
    print("it broke", flush=True)
    sys.exit(int(sys.argv[2]))
signal.signal(signal.SIGTERM, end)
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
    listener.settimeout(0.1)  # a signal that comes just before a wait is looked at after it
    while True:
        try:
            stream, _ = listener.accept()
        except TimeoutError:
            continue
        with stream:
            if stream.recv(1):
                end()
"""


def a_server(status: int) -> tuple[OwnServer, int]:
    port = free_port()
    command = (sys.executable, "-c", SERVER, str(port), str(status))
    return OwnServer(Site(f"http://127.0.0.1:{port}"), Ports(), command), port


@pytest.mark.parametrize("status", [0, 143])
async def test_a_server_that_stops_when_it_is_told_to_can_be_started_again(status: int) -> None:
    server, _ = a_server(status)
    try:
        for _ in range(2):
            await server.start()
            await server.stop()
            assert not server.is_ours
    finally:
        await server.leave()


async def test_a_server_that_breaks_as_it_stops_is_lost_with_its_last_word() -> None:
    server, _ = a_server(3)
    try:
        await server.start()
        with pytest.raises(ServerLost, match=r"ended with 3 when told to stop: it broke$"):
            await server.stop()
    finally:
        await server.leave()


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_server_that_has_ended_by_itself_is_lost_with_its_last_word(end: str) -> None:
    server, port = a_server(0)
    try:
        await server.start()
        with socket.create_connection(("127.0.0.1", port), timeout=BOUND_S) as stream:
            stream.sendall(b"x")
            assert stream.recv(1) == b""
        process = server._process
        assert process is not None
        with anyio.fail_after(BOUND_S):
            await process.wait()
        with pytest.raises(ServerLost, match=r"had ended by itself, with 0: it broke$"):
            await getattr(server, end)()
    finally:
        await server.leave()


def a_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", ""])


@asynccontextmanager
async def killed_server(
    clock: VirtualClock,
) -> AsyncIterator[tuple[GivenServer, subprocess.Popen[bytes]]]:
    """Kill a server whose process nothing waits for, and at whose address something listens."""
    with a_process() as killed, socket.create_server(("127.0.0.1", 0)) as listener:
        site = Site(f"http://127.0.0.1:{listener.getsockname()[1]}")
        server = GivenServer(site, clock.ports(), killed.pid)
        await server.kill()
        yield server, killed


async def start(server: GivenServer, has_started: anyio.Event) -> None:
    await server.start()
    has_started.set()


async def test_a_killed_server_that_is_not_gone_yet_has_not_been_started_again() -> None:
    """Connections are still accepted for it. All that were refused later counted as torn."""
    clock, has_started = VirtualClock(), anyio.Event()
    async with killed_server(clock) as (server, killed), anyio.create_task_group() as group:
        group.start_soon(start, server, has_started)
        for _ in range(10):
            await clock.advance(1.0)
        assert not has_started.is_set(), "its parent has yet to note its end"
        killed.wait()
        while not has_started.is_set():
            await clock.advance(1.0)


@pytest.mark.parametrize("is_anothers", [False, True])
async def test_a_killed_server_that_nobody_waits_for_can_be_started_again(
    monkeypatch: pytest.MonkeyPatch, *, is_anothers: bool
) -> None:
    """Its id stays, as in a container whose first process collects none; or another user has it."""

    def kill(_pid: int, _signal: int) -> None:
        raise PermissionError

    clock, has_started = VirtualClock(), anyio.Event()
    async with killed_server(clock) as (server, _), anyio.create_task_group() as group:
        if is_anothers:
            monkeypatch.setattr("os.kill", kill)
        group.start_soon(start, server, has_started)
        for _ in range(int(START_S)):
            await clock.advance(1.0)
            await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
        assert has_started.is_set()


def test_the_ports_of_machines_are_none_that_a_system_chooses_while_one_is_down() -> None:
    found = _free_ports(10)
    assert len(set(found)) == 10
    assert max(found) < 32_768
