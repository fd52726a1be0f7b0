"""The tapes of runs that failed once. Each belongs to a fault that was mended."""

from __future__ import annotations

from pathlib import Path

__all__ = ["tapes"]


def tapes() -> list[Path]:
    """All of them, by name: the fault, and the seed that found it."""
    return sorted((Path(__file__).parent / "corpus").glob("*.tape.json"))
