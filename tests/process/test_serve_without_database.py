"""`turnkeeper serve` started while its database is away: it waits, says so, and has an end."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
import pytest
from typer.testing import CliRunner

from tests import postgres
from tests.ports import free_port
from turnkeeper.actors.cli._app import app
from turnkeeper.actors.torture.relays import DatabaseRelay

from .command import COMMAND, first_line

BOUND_S = 60.0
AGENT = Path(__file__).parents[2] / "examples" / "serve_me.py"
NOWHERE = "postgresql://127.0.0.1:1/none"


@contextmanager
def serving(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, "serve", f"{AGENT}:support", *arguments], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.costly
@pytest.mark.anyio
async def test_a_server_waits_for_a_database_that_is_away_and_says_so(
    anyio_backend_name: str,
) -> None:
    port, relay = free_port(), DatabaseRelay(postgres.conninfo())
    relay.is_closed = True
    address = f"http://127.0.0.1:{port}"
    with postgres.schema() as schema, anyio.fail_after(BOUND_S):
        async with anyio.create_task_group() as group, httpx.AsyncClient(timeout=BOUND_S) as client:
            await group.start(relay.serve)
            journal = (f"--postgres={relay.conninfo}", f"--schema={schema}")
            with serving(*journal, f"--port={port}", f"--backend={anyio_backend_name}") as process:
                line = partial(anyio.to_thread.run_sync, first_line, process)
                assert "waiting 60 s at most: the database cannot be reached" in await line()
                assert (await client.get(f"{address}/healthz")).status_code == 200
                assert (await client.get(f"{address}/readyz")).status_code == 503
                url = f"{address}/v1/conversations/alice"
                refused = await client.post(f"{url}/messages", json={"content": "hello"})
                assert refused.status_code == 503
                assert refused.headers["Retry-After"]
                stream = await client.get(f"{url}/events")
                assert stream.status_code == 200
                assert "not-open" in stream.text

                relay.is_closed = False
                while "listening on" not in await line():
                    pass
                sent = await client.post(f"{url}/messages", json={"content": "hello"})
                assert sent.status_code == 202
                process.send_signal(signal.SIGTERM)
                assert await anyio.to_thread.run_sync(process.wait) == 0
            group.cancel_scope.cancel()


def test_a_server_that_waits_for_its_database_ends_with_a_signal() -> None:
    with serving(f"--postgres={NOWHERE}", "--port=0", "--backend=trio") as process:
        assert "waiting 60 s at most" in first_line(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 0


def test_a_database_that_stays_away_ends_a_server_with_a_status_of_its_own() -> None:
    given = ("--postgres", NOWHERE, "--port", "0", "--database-wait", "0.1")
    result = CliRunner().invoke(app, ["serve", f"{AGENT}:support", *given])

    assert result.exit_code == 1
    assert "turnkeeper: the database cannot be reached" in result.stderr.splitlines()[-1]
