"""Benchmarks, side by side with peers and with the machine's limits.

    python -m benchmarks [GROUP…] [--quick] [--json] [--no-page]

Each group is a module of this folder with `run(quick) -> Iterator[Measure]`. What a group found
replaces its section of `RESULTS.md`, with its plot, as soon as it is done; the other sections stay.
Exit status 1 when a goal is not met; a peer that cannot be installed is skipped, with the reason,
never met.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a folder, as `make bench` does
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks._command import main

if __name__ == "__main__":
    sys.exit(main())
