"""Draw appends a second against the length of the log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "turnkeeper"  # the same figures give the same file
from matplotlib import pyplot as plt  # noqa: E402 - what it draws with has been said by now


def draw(out: Path, series: Mapping[str, Mapping[int, float]]) -> None:
    """Draw a line for each name: its rate at each length."""
    figure: Any
    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    for name, points in series.items():
        lengths = sorted(points)
        axes.plot(lengths, [points[length] for length in lengths], "o-", label=name)
    axes.set_xscale("symlog", linthresh=1000)
    axes.set_yscale("log")
    axes.set_xlabel("events in the conversation before")
    axes.set_ylabel("durable appends a second, one at a time")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
