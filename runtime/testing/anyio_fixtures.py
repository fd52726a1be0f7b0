"""Fixtures for tests that anyio's plugin runs: a runtime, and a clock that the test moves.

    pytest_plugins = ["turnkeeper.runtime.testing.anyio_fixtures"]

    @pytest.mark.anyio
    async def test_a_session_ends_after_an_hour(runtime, virtual_clock):
        session = runtime.spawn(Session, name="session")
        await virtual_clock.advance(3_600)

Their names are the contract. Each test gets fresh ones; the runtime is left when the test is over.
The clock then moves by itself, as real time does, so that an actor that is busy is not waited for
longer than the runtime's limits say.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from .._runtime import Runtime
from ._virtual import VirtualClock

__all__ = ["runtime", "virtual_clock"]

_STEP_S = 0.05


@pytest.fixture
def virtual_clock() -> VirtualClock:
    """Return the clock of the test's runtime; it moves when the test advances it."""
    return VirtualClock()


@pytest.fixture
async def runtime(
    anyio_backend: object,  # noqa: ARG001 - makes anyio's plugin run this
    virtual_clock: VirtualClock,
) -> AsyncIterator[Runtime]:
    """Open a runtime on the virtual clock."""
    async with open_runtime(virtual_clock) as opened:
        yield opened


@asynccontextmanager
async def open_runtime(clock: VirtualClock, *, wait_s: float = _STEP_S) -> AsyncIterator[Runtime]:
    """Open a runtime on a clock; as it is left, move the clock a step after each real wait.

    The limits on leaving go by the clock, and the test, which moved it, is over: it may have failed
    while an actor was busy.
    """

    async def move() -> None:
        while True:
            await anyio.sleep(wait_s)
            clock.jump(_STEP_S)

    failed: Exception | None = None
    async with anyio.create_task_group() as mover:
        try:
            async with Runtime(ports=clock.ports()) as opened:
                try:
                    yield opened
                finally:
                    mover.start_soon(move)
        except Exception as error:  # noqa: BLE001 - raised below, where no group wraps it
            failed = error
        mover.cancel_scope.cancel()
    if failed is not None:
        raise failed
