"""Fixtures for tests that anyio's plugin runs: a runtime, and a clock that the test moves.

    pytest_plugins = ["turnkeeper.runtime.testing.anyio_fixtures"]

    @pytest.mark.anyio
    async def test_a_session_ends_after_an_hour(runtime, virtual_clock):
        session = runtime.spawn(Session, name="session")
        await virtual_clock.advance(3_600)

Their names are the contract. Each test gets fresh ones; the runtime is left when the test is over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .._runtime import Runtime
from ._virtual import VirtualClock

__all__ = ["runtime", "virtual_clock"]


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
    async with Runtime(ports=virtual_clock.ports()) as opened:
        yield opened
