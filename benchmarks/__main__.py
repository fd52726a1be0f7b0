"""Benchmarks, side by side with peers and with the machine's limits.

    python -m benchmarks [GROUP…] [--quick] [--json] [--no-page]

Each group is a module of this folder with `run(quick) -> Iterator[Measure]`. As soon as a group is
done, its figures and its plot replace its section of `RESULTS.md`; the other sections stay. The
exit status is 1 if a goal is not met. A peer that cannot be installed is skipped, with the reason,
and never counts as a goal that is met.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a folder, as `make bench` does
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks._command import main

if __name__ == "__main__":
    sys.exit(main())
