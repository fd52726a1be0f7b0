"""Runs an operator's work on a file, and stops waiting for a disk that does not answer.

The work runs in a separate thread, because a call in the caller's own thread could not be
abandoned. The work reports progress again and again. If it reports nothing for `answer_wait_s`,
plus a second for each 4 MiB of the file, or if its caller is interrupted, the caller leaves, and
the work ends at its next step. The time is counted in the caller's looks instead of read from a
clock: if the process, or the machine, is suspended, the work does not have the time that passes.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from turnkeeper.runtime import Ports

from ...errors import JournalUnavailable
from .schema import DISK_BYTES_S_MIN, log_bytes

__all__ = ["ANSWER_WAIT_S", "FileWork"]

T = TypeVar("T")

ANSWER_WAIT_S = 60.0

_LOOK_S = 0.5
_LEAVE_WAIT_S = 5.0
_STEPS_BETWEEN = 100_000  # instructions of SQLite's virtual machine: a few milliseconds


class FileWork(Generic[T]):
    """A piece of work under way; its thread calls all methods but `run`."""

    def __init__(self, name: str, answer_wait_s: float) -> None:
        self._name = name
        self._answer_wait_s = answer_wait_s
        self._ports = Ports()
        self._has_moved = False
        self._more_s = 0.0
        self._is_left = False
        self._has_ended = threading.Event()
        self._value: list[T] = []
        self._error: BaseException | None = None

    def run(self, work: Callable[[FileWork[T]], T]) -> T:
        """Do the work in a thread; return its value or raise its error.

        Raises `JournalUnavailable` if the disk does not answer.
        """
        self._ports.start_thread(self._name, lambda: self._work(work))
        look_s, silent_s = min(_LOOK_S, self._answer_wait_s), 0.0
        try:
            while not self._has_ended.wait(look_s):
                silent_s = 0.0 if self._has_moved else silent_s + look_s
                self._has_moved = False
                bound_s = self._answer_wait_s + self._more_s
                if silent_s >= bound_s:
                    raise JournalUnavailable(
                        f"{self._name} has been given up: the disk has not answered within "
                        f"{bound_s:g} s; check the disk, and run it again"
                    )
        except BaseException as error:
            self._is_left = True
            if not isinstance(error, JournalUnavailable):
                self._has_ended.wait(_LEAVE_WAIT_S)
            raise
        if self._error is not None:
            raise self._error
        return self._value[0]

    def allow_for(self, path: Path) -> None:
        """Allow for the size of a file and its log: one call of SQLite may read all of both."""
        with contextlib.suppress(OSError):
            self._more_s = (path.stat().st_size + log_bytes(path)) / DISK_BYTES_S_MIN

    def watch(self, connection: sqlite3.Connection) -> None:
        """Count this connection's activity as progress; interrupt it if the work is given up."""
        connection.set_progress_handler(self._go_on, _STEPS_BETWEEN)

    def note(self) -> None:
        """Report progress. Raises `JournalUnavailable` if the caller has left."""
        if self._go_on():
            raise JournalUnavailable(f"{self._name} has been given up; run it again")

    def _go_on(self) -> bool:
        self._has_moved = True
        return self._is_left

    def _work(self, work: Callable[[FileWork[T]], T]) -> None:
        try:
            self._value.append(work(self))
        except BaseException as error:  # noqa: BLE001 - carried to the caller, as it is
            self._error = error
        finally:
            self._has_ended.set()
