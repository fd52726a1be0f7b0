"""The command line as a process of its own."""

from __future__ import annotations

import sys

__all__ = ["COMMAND"]

# A shell without job control starts background jobs with SIGINT ignored, and children inherit it.
_PROGRAM = """
import signal

signal.signal(signal.SIGINT, signal.default_int_handler)

from turnkeeper.actors.cli import main

main()
"""

COMMAND = (sys.executable, "-P", "-c", _PROGRAM)
