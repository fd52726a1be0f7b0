"""The server's process: started, suspended for a while, killed, and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from random import Random
from typing import IO

import anyio
from anyio.abc import Process, TaskGroup

from turnkeeper.runtime import Ports

from .exchanges import Site, Sites
from .history import How

__all__ = ["GivenServer", "OwnServer", "OwnServers", "Server", "ServerLost", "answers"]

START_S = 60.0
_POLL_S = 0.05
_GONE_POLLS = 400
"""How often to look whether a killed process is gone: its id stays if its parent does not wait for
it, as in a container whose first process does not, and may be another process's by then."""
_CONNECT_S = 1.0
_TOLD_BYTES_MAX = 2_000
_HALF = 0.5
_STOPPED = (0, -signal.SIGTERM, 128 + signal.SIGTERM)
"""The exit statuses of a process that stopped when told to; the last is a shell's."""


class ServerLost(Exception):
    """The server cannot be started, or does not come back."""


class Server:
    """A process that can be disturbed; the base of the classes below."""

    pid: int

    def __init__(self, site: Site, ports: Ports) -> None:
        self._site = site
        self._ports = ports

    @property
    def is_ours(self) -> bool:
        """True if the process is known, and may be killed."""
        raise NotImplementedError

    async def listen(self, group: TaskGroup) -> None:
        """Start the relays between the servers, if there are any; they end with this group."""

    async def kill(self) -> None:
        """Kill it with SIGKILL. Raises `ServerLost`."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start it again, or wait until another program has. Raises `ServerLost`."""
        raise NotImplementedError

    @property
    def has_others(self) -> bool:
        """True if other servers go on, so that this one may be told to stop and take its time."""
        return False

    async def stop(self) -> None:
        """Tell it to stop, with SIGTERM, and wait until it has. Raises `ServerLost`."""
        raise NotImplementedError

    async def leave(self) -> None:
        """End it if the torture has started it."""

    async def disturb(self, random: Random, note: Callable[[How], None]) -> None:
        """Kill it or tell it to stop, perhaps after a SIGSTOP, and get it started again.

        Raises `ServerLost`.
        """
        if random.random() < _HALF:
            note("frozen")
            await self.freeze(random.uniform(0.05, 1.5))
        if self.has_others and random.random() < _HALF:
            note("stopped")
            await self.stop()
        else:
            note("killed")
            await self.kill()
        await self._ports.sleep(random.uniform(0, 0.3))
        await self.start()
        note("started")

    async def freeze(self, seconds: float) -> None:
        """Suspend it for a while with SIGSTOP."""
        try:
            os.kill(self.pid, signal.SIGSTOP)
        except ProcessLookupError:
            return
        try:
            await self._ports.sleep(seconds)
        finally:
            os.kill(self.pid, signal.SIGCONT)


async def answers(site: Site) -> bool:
    """True if something accepts connections at this address."""
    try:
        with anyio.fail_after(_CONNECT_S):
            stream = await anyio.connect_tcp(site.host, site.port)
    except (OSError, TimeoutError):
        return False
    await anyio.aclose_forcefully(stream)
    return True


class OwnServer(Server):
    """A server that the torture starts itself, by a command."""

    def __init__(self, site: Site, ports: Ports, command: Sequence[str]) -> None:
        super().__init__(site, ports)
        self._command = command
        self._process: Process | None = None
        self._told: IO[bytes] | None = None
        """The file with the output of the process."""

    @property
    def is_ours(self) -> bool:
        return self._process is not None

    async def kill(self) -> None:
        if self._process is not None:
            self._check_runs(self._process)
        await self._end()

    async def stop(self) -> None:
        process = self._process
        if process is None:
            return
        self._check_runs(process)
        process.terminate()
        with anyio.move_on_after(START_S):
            status = await process.wait()
            if status not in _STOPPED:
                last = self._last_line()
                raise ServerLost(f"{self._site.url} ended with {status} when told to stop: {last}")
            self._process = None
            return
        raise ServerLost(f"{self._site.url} did not stop within {START_S:g} s")

    async def leave(self) -> None:
        await self._end()
        if self._told is not None:
            self._told.close()

    async def start(self) -> None:
        if await answers(self._site):
            raise ServerLost(f"another program already serves at {self._site.url}")
        if self._told is not None:
            self._told.close()
        # Open for as long as the process runs.
        told = self._told = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = await anyio.open_process(
                self._command, stdin=subprocess.DEVNULL, stdout=told, stderr=told
            )
        except OSError as error:
            raise ServerLost(f"the server cannot be started: {error.strerror}") from error
        self.pid = self._process.pid
        with anyio.move_on_after(START_S):
            while self._process.returncode is None:
                if await answers(self._site):
                    return
                await self._ports.sleep(_POLL_S)
        status = self._process.returncode
        how = f"in {START_S:g} s" if status is None else f"before the server ended, with {status}"
        raise ServerLost(f"nothing was served at {self._site.url} {how}: {self._last_line()}")

    def _check_runs(self, process: Process) -> None:
        if (status := process.returncode) is not None:
            last = self._last_line()
            raise ServerLost(f"{self._site.url} had ended by itself, with {status}: {last}")

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.wait()

    def _last_line(self) -> str:
        """Return the last line of the process's output."""
        assert self._told is not None, "a process that was not started"
        size = self._told.seek(0, os.SEEK_END)
        self._told.seek(max(0, size - _TOLD_BYTES_MAX))
        lines = self._told.read().decode("utf-8", "replace").split("\n")
        return next(
            (line.strip() for line in reversed(lines) if line.strip()), "it printed nothing"
        )


class OwnServers(Server):
    """Several servers of the same conversations, which are disturbed in turn."""

    def __init__(self, site: Sites, ports: Ports, commands: Sequence[Sequence[str]]) -> None:
        super().__init__(site, ports)
        self._each = [
            OwnServer(one, ports, command) for one, command in zip(site.each, commands, strict=True)
        ]
        self._victim = 0

    @property
    def is_ours(self) -> bool:
        return self._each[self._victim].is_ours

    @property
    def has_others(self) -> bool:
        return True

    async def kill(self) -> None:
        await self._each[self._victim].kill()

    async def stop(self) -> None:
        await self._each[self._victim].stop()

    async def freeze(self, seconds: float) -> None:
        await self._each[self._victim].freeze(seconds)

    async def start(self) -> None:
        for server in self._each:
            if not server.is_ours:
                await server.start()
        self._victim = (self._victim + 1) % len(self._each)

    async def leave(self) -> None:
        for server in self._each:
            await server.leave()


class GivenServer(Server):
    """A server that runs already. It is killed once, and another program starts it again."""

    def __init__(self, site: Site, ports: Ports, pid: int) -> None:
        super().__init__(site, ports)
        self.pid = pid
        self._is_killed = False

    @property
    def is_ours(self) -> bool:
        return not self._is_killed

    async def kill(self) -> None:
        self._is_killed = True
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError as error:
            raise ServerLost(f"there is no process {self.pid}") from error

    async def start(self) -> None:
        with anyio.move_on_after(START_S):
            # Until a killed process is gone, the system accepts connections for it.
            for _ in range(_GONE_POLLS if self._is_killed else 0):
                if not _is_there(self.pid):
                    break
                await self._ports.sleep(_POLL_S)
            while not await answers(self._site):
                await self._ports.sleep(_POLL_S)
            return
        raise ServerLost(f"{self._site.url} is not served again within {START_S:g} s")


def _is_there(pid: int) -> bool:
    """Return False once its parent, which is to start another, knows that a process has ended."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # or it is another user's process
        return False
    return True
