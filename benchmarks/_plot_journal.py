"""Draw appends a second against the length of the log. Run by `journal.py`, where matplotlib is.

Usage: python _plot_journal.py OUT.svg '{"NAME": {"LENGTH": RATE, …}, …}'.
"""

import json
import sys
from typing import Any

# Ignored: installed in an environment of its own, not in the checker's.
import matplotlib as mpl  # type: ignore[import-not-found]

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "turnkeeper"  # the same figures give the same file
from matplotlib import pyplot as plt  # noqa: E402


def main(out: str, series: dict[str, dict[str, float]]) -> None:
    figure: Any
    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    for name, points in series.items():
        found = sorted((int(length), rate) for length, rate in points.items())
        axes.plot([length for length, _ in found], [rate for _, rate in found], "o-", label=name)
    axes.set_xscale("symlog", linthresh=1000)
    axes.set_yscale("log")
    axes.set_xlabel("events in the conversation before")
    axes.set_ylabel("durable appends a second, one at a time")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    print(json.dumps({"series": len(series)}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
