"""The `turnkeeper` command."""

from __future__ import annotations

import io
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDERR = 2


def main() -> None:
    """Run the command line, or say which extra it needs."""
    _fill_standard_streams()
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


def _fill_standard_streams() -> None:
    """Open the null device in place of each standard stream that was closed when this began.

    Otherwise the next file that is opened would get the number of the stream, and what libraries
    and children write to the stream would go into that file. And rich prints on standard output
    what is meant for a `sys.stderr` of None.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the exit
    elif sys.platform != "win32" or not sys.stderr.isatty():  # a console there takes no bytes
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_Messages(_STDERR, "w", closefd=False)),
            encoding=sys.stderr.encoding,
            errors="backslashreplace",
            line_buffering=True,
        )


class _Messages(io.FileIO):
    """Standard error: if it cannot be written, all that is said there is dropped.

    The reader of the messages may leave, or their disk be full: the work goes on, and the exit
    status tells of it as always.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            # None if it is set not to wait, and is full: then this piece is dropped.
            return super().write(data) or memoryview(data).nbytes
        except OSError:  # whatever it is: a connection that was reset, or a disk that is gone
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)
