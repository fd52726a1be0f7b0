"""The ends of commands: exit statuses, JSON, and the options that several commands share."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from turnkeeper.runtime import Ports

__all__ = [
    "BROKEN",
    "CUT_SHORT",
    "INTERRUPTED",
    "SEEDS",
    "UNUSABLE",
    "AsJson",
    "Seed",
    "fail",
    "finite",
    "for_programs",
    "forget_output",
    "handling_signals",
    "how_stopped",
    "interrupted_by_signals",
    "is_given",
    "no_folder",
    "print_json",
    "temporary_folder",
    "told_output",
]

BROKEN, UNUSABLE, INTERRUPTED = 1, 2, 130
CUT_SHORT = 141
"""The reader of the output has left, as `head` does; a shell says 128 + SIGPIPE of others, too."""
SEEDS = 1 << 16

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Seed of the random choices: what is sent when, and when processes are killed.",
        show_default="drawn, and printed",
    ),
]


def for_programs() -> None:
    """Write standard output as UTF-8 with plain line ends, whatever the locale says.

    For what a program reads: an export in another encoding could not be imported again.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")


def print_json(value: Mapping[str, object]) -> None:
    for_programs()
    print(json.dumps(value, ensure_ascii=False))


def fail(status: int, what: str) -> NoReturn:
    """Print the reason in one line, and exit; if it cannot be printed, the status says it alone."""
    Console(stderr=True, highlight=False).print(Text(f"turnkeeper: {what}"), soft_wrap=True)
    raise typer.Exit(status)


def finite(value: float | None) -> float | None:
    """Return the value of an option; refuse infinity and NaN."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("must be a finite number")
    return value


def is_given(context: typer.Context, name: str) -> bool:
    """True if the user gave this option, even with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


_came: list[int] = []
"""The signals that interrupt this process, in order. Each process has one, as it has handlers."""


def how_stopped() -> str:
    """Return how a `KeyboardInterrupt` came about, for a message."""
    return f"stopped by {signal.Signals(_came[0]).name if _came else 'Ctrl-C'}"


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt the block as Ctrl-C does, and then end this process.

    So the processes that the block has started end, too. Later ones change nothing: the end of a
    terminal or of a service often comes with several.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        _came.append(number)
        if len(_came) > 1:
            return
        by_ctrl_c = signal.getsignal(signal.SIGINT)  # asyncio's own while a loop runs
        if not callable(by_ctrl_c):  # ignored, as in the background of a shell
            raise KeyboardInterrupt
        by_ctrl_c(signal.SIGINT, frame)

    try:
        with handling_signals(interrupt):
            yield
    finally:
        if _came:
            # Nothing else writes what is buffered: a signal ends the process without Python's exit.
            with suppress(OSError, ValueError):
                print(end="", flush=True)
            signal.raise_signal(_came[0])


@contextmanager
def handling_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have SIGTERM and SIGHUP call `handle` while the block runs.

    A signal that is ignored, as under nohup, stays so. In another thread than the main one, where
    Python sets no handlers, nothing changes.
    """
    can_handle = os.name == "posix" and threading.current_thread() is threading.main_thread()
    ending = [signal.SIGTERM, signal.SIGHUP] if can_handle else []
    handled = [number for number in ending if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


_OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


@contextmanager
def told_output() -> Iterator[None]:
    """Flush standard output at the end; tell in one line if it cannot be written.

    Without the flush, Python itself would write what is buffered, after the command has chosen its
    exit status.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        forget_output()
        raise typer.Exit(CUT_SHORT) from None
    except SystemExit as left:
        # A console of rich's exits with 1 when its pipe breaks.
        if isinstance(left.__context__, BrokenPipeError):
            raise typer.Exit(CUT_SHORT) from None
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        forget_output()
        fail(UNUSABLE, f"output: {error.strerror}; the rest was not written")


def forget_output() -> None:
    """Discard buffered output, so that Python does not try to write it again at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder among the temporary files, and remove it at the end of the block."""
    with ExitStack() as stack:
        try:
            with _signals_held():  # it writes a file there, to see if it can, and removes it
                place = tempfile.gettempdir()
            # Named before it is made, so that a signal that comes meanwhile leaves nothing behind.
            folder = Path(place, f"turnkeeper-{Ports().ids.new()}")
            for _ in range(2):  # the second removes what is left if a signal cuts off the first
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
        except OSError as error:
            no_folder(error)
        yield folder


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold the signals that end a command until the end of the block, where there are such."""
    if os.name != "posix":
        yield
        return
    ending = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def no_folder(error: OSError) -> NoReturn:
    """Say why no folder can be made among the temporary files, and exit."""
    fail(
        UNUSABLE,
        f"no temporary folder can be made: {error.strerror}; nothing was done; make room, "
        "or name another place in TMPDIR",
    )
