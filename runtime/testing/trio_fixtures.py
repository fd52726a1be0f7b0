"""Fixtures for tests that pytest-trio runs: a runtime on the loop's own clock.

    pytest_plugins = ["turnkeeper.runtime.testing.trio_fixtures"]

    async def test_a_session_ends_after_an_hour(runtime, autojump_clock):
        session = runtime.spawn(Session, name="session")
        await trio.sleep(3_600)

pytest-trio's `mock_clock` and `autojump_clock` move the runtime's timers. Each test gets a fresh
runtime, which is left when the test is over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .._runtime import Runtime

__all__ = ["runtime"]


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    """Open a runtime; its timers go by the loop's clock."""
    opened = await Runtime().start()
    try:
        yield opened
    finally:
        await opened.aclose()
