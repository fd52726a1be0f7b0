"""The `turnkeeper` command."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line, or say which extra it needs."""
    if find_spec("typer") is None or find_spec("rich") is None:
        raise SystemExit("the turnkeeper command needs its extra: pip install 'turnkeeper[cli]'")
    try:  # the import takes most of a second, and the commands are made before one runs
        from ._app import app  # noqa: PLC0415 - needs the extra

        # A character that the terminal cannot show is printed as its code, and raises no error.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        app(prog_name="turnkeeper")
    except KeyboardInterrupt:
        print("turnkeeper: stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
