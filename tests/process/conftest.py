"""What holds for all tests with real processes."""

from __future__ import annotations

import pytest

from turnkeeper.actors.cli import _replay


@pytest.fixture(autouse=True)
def _workers_stop_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stops takes more than ten seconds beside a heavy load."""
    monkeypatch.setattr(_replay, "STOP_GRACE_S", 120.0)
