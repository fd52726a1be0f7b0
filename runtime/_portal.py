"""The portal: blocking calls to actors, for code in other threads.

Every call ends: it is answered, or fails when the runtime is left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ._backend import OneShot, clear_stray_cancellation, persist
from ._messages import Message
from ._thread_calls import ThreadOneShot
from .errors import OutcomeUnknown, Unavailable

if TYPE_CHECKING:
    from ._ref import Ref
    from ._system import System

__all__ = ["Portal"]

M = TypeVar("M")
R = TypeVar("R")


class Portal:
    """Blocking calls into the runtime, for threads other than its own. Made by `portal()`."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._home = threading.get_ident()
        # Guards the two below: threads add, the loop closes.
        self._lock = threading.Lock()
        # Any: each call has its own kind of answer.
        self._pending: dict[ThreadOneShot[Any], None] = {}
        self._is_closed = False
        self._calls: deque[tuple[ThreadOneShot[Any], Callable[[], Awaitable[Any]]]] = deque()
        self._gate: OneShot[None] = OneShot()

    def tell(self, ref: Ref[M], message: M) -> None:
        """Send as `Ref.tell` does; return once the mailbox has the message."""

        async def tell() -> None:
            await ref.tell(message)

        self._call(tell)

    # Any: any actor may be asked.
    def ask(self, ref: Ref[Any], message: Message[R], *, timeout: float | None = None) -> R:
        """Ask as `Ref.ask` does, with its `timeout`; raise the same errors."""

        async def ask() -> R:
            return await ref.ask(message, timeout=timeout)

        return self._call(ask)

    def close(self) -> None:
        """Fail all calls that are still on the way: the runtime has been left."""
        with self._lock:
            self._is_closed = True
            pending = tuple(self._pending)
        for answer in pending:
            answer.fail(self._gone())

    def _call(self, run: Callable[[], Awaitable[R]]) -> R:
        if threading.get_ident() == self._home:
            raise RuntimeError(
                "portal called from the runtime's own thread: the call would wait for itself; "
                "await the ref's tell or ask instead"
            )
        answer: ThreadOneShot[R] = ThreadOneShot()
        with self._lock:
            if self._is_closed:
                raise self._gone()
            self._pending[answer] = None
        try:
            self._system.call_soon(lambda: self._take(answer, run))
            return answer.wait()
        finally:
            with self._lock:
                del self._pending[answer]

    def _take(self, answer: ThreadOneShot[Any], run: Callable[[], Awaitable[Any]]) -> None:
        """Queue a call. Runs in the loop but in no task, so `serve` starts the call."""
        self._calls.append((answer, run))
        self._gate.set(None)

    async def serve(self) -> None:
        """Start the calls of other threads; runs until the runtime ends."""
        while True:
            self._gate = OneShot()
            while self._calls:
                answer, run = self._calls.popleft()
                self._system.start_soon(self._answer, answer, run)
            await persist(self._gate.wait)

    async def _answer(self, answer: ThreadOneShot[R], run: Callable[[], Awaitable[R]]) -> None:
        try:
            value = await run()
        except Exception as error:  # noqa: BLE001 - carried to the thread, as it is
            answer.fail(error)
        except BaseException as error:
            if not clear_stray_cancellation(error):
                raise
            answer.fail(self._cancelled())
        else:
            answer.set(value)

    @staticmethod
    def _cancelled() -> OutcomeUnknown:
        return OutcomeUnknown(
            "call through the portal: its task was cancelled natively by a library; it may have "
            "happened; send again under the same id, or read back"
        )

    @staticmethod
    def _gone() -> Unavailable:
        return Unavailable(
            "call through the portal failed: the runtime has been left; try elsewhere"
        )
