"""Holds the agent of another process until a test opens its gate, a file in the folder of both."""

from __future__ import annotations

from pathlib import Path

__all__ = ["GATE", "open_gate"]

GATE = """
from pathlib import Path

import anyio


async def gate():
    with anyio.fail_after(600):  # this process may have outlived its test
        while not Path("gate").exists():  # no event of the test reaches it
            await anyio.sleep(0.02)
"""
"""The begin of an agent's module, which then has `gate` to wait at."""


def open_gate(folder: Path) -> None:
    """Let the agents of this folder go on, and all that come."""
    (folder / "gate").touch()
