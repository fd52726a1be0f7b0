"""A watch on the event loop from a thread: finds code that blocks it, and shows where.

A handler that calls something blocking, or computes for long, stops every actor of its loop. From
inside the loop this cannot be noticed until it is over. The thread asks the loop for a sign of
life twice in `blocked_s`; if none comes in time, it looks at what the loop's thread is running.

A process that is suspended gives no sign of life either, but then the thread itself waits for much
longer than it meant to, and waits once more. Only once: a call that keeps the interpreter's lock,
as of a regular expression, holds up the thread as well, and several in a row would do so each time.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from threading import get_ident
from traceback import format_stack
from typing import Final

from ._logger import logger
from ._reports import LoopBlocked
from ._world import World

__all__ = ["LoopWatch"]

_FRAMES_MAX: Final = 30


class LoopWatch:
    """Watches one loop, from `start` to `stop`. Both are called in the loop."""

    def __init__(self, world: World, blocked_s: float) -> None:
        self._world = world
        self._blocked_s = blocked_s
        self._is_over = threading.Event()

    def start(self) -> None:
        """Begin to watch."""
        self._thread = get_ident()
        self._world.ports.start_thread("turnkeeper-loop-watch", self._run)

    def stop(self) -> None:
        """Have the thread end soon; it is not waited for."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(self._blocked_s / 2):
            sign = threading.Event()
            self._world.call_soon(sign.set)
            if self._is_missed(sign):
                self._report(sign)

    def _is_missed(self, sign: threading.Event) -> bool:
        monotonic = self._world.ports.monotonic
        for _ in range(2):
            asked = monotonic()
            if sign.wait(self._blocked_s) or self._is_over.is_set():
                return False
            if monotonic() - asked < 2 * self._blocked_s:
                break
        return True

    def _report(self, sign: threading.Event) -> None:
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - documented
        # Lines of code and names of functions, without the values of local variables.
        stack = "".join(format_stack(frame)[-_FRAMES_MAX:]) if frame is not None else ""
        del frame
        logger.warning("event loop blocked", wait_s=self._blocked_s, exception=stack)
        publish = partial(self._world.events.publish, LoopBlocked(self._blocked_s, stack))
        self._world.call_soon(publish)
        while not sign.wait(self._blocked_s) and not self._is_over.is_set():
            pass  # reported once, however long it lasts
