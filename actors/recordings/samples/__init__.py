"""Recorded conversations that the demo, the examples and the tests share.

About fifty of them, written for this project, in the OpenAI chat format, one file for each walk of
life. `turnkeeper replay` takes these files like any others.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

__all__ = ["read_samples"]


def read_samples() -> Mapping[str, bytes]:
    """Return the content of each sample file by name."""
    found = {
        resource.name: resource.read_bytes()
        for resource in files(__name__).iterdir()
        if resource.name.endswith(".json")
    }
    return dict(sorted(found.items()))
