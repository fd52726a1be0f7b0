"""Several gateways on one PostgreSQL, with relays between them and before it, and their failures.

Each disturbance is one of `KINDS`, ends by itself, and restores the state before it. Whatever was
acknowledged meanwhile must still be there.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from turnkeeper.runtime import Ports

from .exchanges import Sites
from .history import How
from .relays import DatabaseRelay, Relay, Way
from .server import OwnServer, Server, ServerLost

__all__ = ["KINDS", "Beside", "Machines"]

GRACE_S = 5.0
KINDS: Sequence[How] = (
    "killed",
    "stood still",
    "cut off",
    "answers lost",
    "apart",
    "deaf",
    "database away",
    "read-only",
    "rolled",
    "silent one way",
    "silent both ways",
)
"""In order: kill a process; suspend one past its lease; let no other process reach one; lose one's
answers; let no process reach another; lose each NOTIFY; cut off the database; make it read-only;
restart the processes one by one; hold the bytes to one process, or its answers, past the lease;
hold both."""
_PORTS = range(20_000, 32_000)
"""Below those that systems choose themselves."""
RESTART_S = 60.0
"""Within how many seconds the command that restarts the database must end."""


class Beside(NamedTuple):
    """Another version of the library, and the file of the agent for it."""

    python: Path
    agent: str


class Machines(Server):
    """Processes that the torture starts and disturbs, in one way after the other."""

    def __init__(
        self,
        nodes: int,
        ports: Ports,
        *,
        agent: str,
        conninfo: str,
        schema: str,
        lease_s: float,
        key_file: Path,
        backend: str,
        random: Random,
        kinds: Sequence[How] = KINDS,
        restart: Sequence[str] | None = None,
        beside: Beside | None = None,
    ) -> None:
        """Set up without starting. Raises `ValueError` unless the database is given by a URL.

        `agent`: for `turnkeeper serve`. `restart`: the command that restarts the database, for the
        kind "database restarted". `beside`: another version, as the last process.
        """
        found = _free_ports(2 * nodes)
        self._public, self._inner = found[:nodes], found[nodes:]
        self.site = Sites([f"http://127.0.0.1:{port}" for port in self._public])
        super().__init__(self.site, ports)
        self._database = DatabaseRelay(conninfo)
        self._relays = [Relay(("127.0.0.1", port)) for port in self._inner]
        self._agent = agent
        self._schema = schema
        self._lease_s = lease_s
        self._key_file = key_file
        self._backend = backend
        self._restart = restart
        self._beside = beside
        self._left = random.sample(list(kinds), len(kinds))
        self._each: list[OwnServer] = []

    async def listen(self, group: TaskGroup) -> None:
        """Start the relays, which end with the group."""
        for relay in (self._database, *self._relays):
            await group.start(relay.serve)
        self._each = [
            OwnServer(site, self._ports, self._command(n)) for n, site in enumerate(self.site.each)
        ]

    def _command(self, n: int) -> Sequence[str]:
        options = {
            "port": self._public[n],
            "postgres": self._database.conninfo,
            "schema": self._schema,
            "lease": self._lease_s,
            "node-address": f"http://127.0.0.1:{self._relays[n].port}",
            "node-listen": f"127.0.0.1:{self._inner[n]}",
            "node-key-file": self._key_file,
            "grace": GRACE_S,
            "backend": self._backend,
        }
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        python, agent = sys.executable, self._agent
        if self._beside is not None and n == len(self._public) - 1:
            python, agent = str(self._beside.python), self._beside.agent
        return (python, "-P", "-m", "turnkeeper", "serve", agent, *given)

    @property
    def count(self) -> int:
        """How many disturbances are left."""
        return len(self._left)

    @property
    def is_ours(self) -> bool:
        return True

    @property
    def has_others(self) -> bool:
        return True

    async def start(self) -> None:
        for server in self._each:
            if not server.is_ours:
                await server.start()

    async def leave(self) -> None:
        for server in self._each:
            await server.leave()

    async def disturb(self, random: Random, note: Callable[[How], None]) -> None:
        kind = self._left.pop() if self._left else "killed"
        n = random.randrange(len(self._each))
        server, relay = self._each[n], self._relays[n]
        note(kind)
        match kind:
            case "killed":
                await server.kill()
                await self._wait(random, 0, 0.5)
                await server.start()
            case "stood still":
                await server.freeze(self._lease_s * random.uniform(1.5, 2.5))
            case "cut off":
                await self._close([relay], random)
            case "answers lost":
                relay.loses_answers = True
                await self._wait(random, 0.5, 3.0)
                relay.loses_answers = False
            case "apart":
                await self._close(self._relays, random)
            case "deaf":
                self._database.is_deaf = True
                await self._wait(random, 1.0, 4.0)
                self._database.is_deaf = False
            case "database away":
                await self._close([self._database], random)
            case "read-only":
                # Like a failover: the sessions end, and new ones are on a standby.
                self._database.is_read_only = True
                self._database.cut()
                await self._wait(random, 0.5, 3.0)
                self._database.is_read_only = False
                self._database.cut()
            case "silent one way" | "silent both ways":
                way: Way = random.choice(("there", "back"))
                relay.hold(*(("there", "back") if kind == "silent both ways" else (way,)))
                await self._wait(random, 1.0, 2 * self._lease_s)
                relay.hold()
            case "database restarted":
                await self._restart_database()
            case "rolled":
                for each in self._each:
                    await each.stop()
                    await each.start()
            case _:
                raise AssertionError(f"{kind} is not a disturbance of machines")
        note("started")

    async def _restart_database(self) -> None:
        assert self._restart is not None, "a database that nothing restarts"
        # A file, since the database may keep the command's standard output open.
        with tempfile.TemporaryFile() as told:
            try:
                with anyio.fail_after(RESTART_S):
                    done = await anyio.run_process(
                        self._restart, stdout=told, stderr=told, check=False
                    )
            except (OSError, TimeoutError) as error:
                raise ServerLost(f"the database was not restarted: {error!r}") from error
            told.seek(0)
            said = told.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        if done.returncode:
            raise ServerLost(f"the database was not restarted, status {done.returncode}: {said}")

    async def _close(self, relays: Sequence[Relay], random: Random) -> None:
        """Refuse connections at these relays for a while, and cut the current ones."""
        for relay in relays:
            relay.is_closed = True
            relay.cut()
        await self._wait(random, 0.5, 3.0)
        for relay in relays:
            relay.is_closed = False

    async def _wait(self, random: Random, least_s: float, most_s: float) -> None:
        await self._ports.sleep(random.uniform(least_s, most_s))


def _free_ports(count: int) -> Sequence[int]:
    """Return ports of this machine that stay free while a process is down.

    A port that the system chooses could be chosen again, for another program, meanwhile.
    """
    found: list[int] = []
    for at in range(len(_PORTS)):
        # Two runs that begin at once try other ones.
        port = _PORTS[(os.getpid() * 101 + at) % len(_PORTS)]
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise ValueError(f"no {count} ports from {_PORTS[0]} to {_PORTS[-1]} are free")
