"""The portal: how code that is not async, in any other thread, reaches actors.

Every call ends: it is answered, or it fails when the runtime is left, whatever was on the way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from ._backend import OneShot
from ._messages import Message
from .errors import Unavailable

if TYPE_CHECKING:
    from ._ref import Ref
    from ._system import System

__all__ = ["Portal"]

M = TypeVar("M")
R = TypeVar("R")


class Portal:
    """Blocking calls into the runtime, for threads other than its own."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._home = threading.get_ident()
        # Guards the two below: threads add, the loop closes.
        self._lock = threading.Lock()
        self._pending: dict[Future[Any], None] = {}  # Any: each call has its own kind of answer
        self._is_closed = False
        self._calls: deque[tuple[Future[Any], Callable[[], Awaitable[Any]]]] = deque()
        self._gate: OneShot[None] = OneShot()

    def tell(self, ref: Ref[M], message: M) -> None:
        """As `Ref.tell`; returns when the mailbox has the message."""

        async def tell() -> None:
            await ref.tell(message)

        self._call(tell)

    # Any: any actor may be asked.
    def ask(self, ref: Ref[Any], message: Message[R], *, timeout: float | None = None) -> R:
        """As `Ref.ask`, and raises the same."""

        async def ask() -> R:
            return await ref.ask(message, timeout=timeout)

        return self._call(ask)

    def close(self) -> None:
        """The runtime has been left: nobody will answer what is still on the way."""
        with self._lock:
            self._is_closed = True
            pending = tuple(self._pending)
        for future in pending:
            if not future.done():
                future.set_exception(self._gone())

    def _call(self, run: Callable[[], Awaitable[R]]) -> R:
        if threading.get_ident() == self._home:
            raise RuntimeError("a portal called from the runtime's own thread waits for itself")
        future: Future[R] = Future()
        with self._lock:
            if self._is_closed:
                raise self._gone()
            self._pending[future] = None
        try:
            self._system.call_soon(lambda: self._take(future, run))
            return future.result()
        finally:
            with self._lock:
                del self._pending[future]

    def _take(self, future: Future[Any], run: Callable[[], Awaitable[Any]]) -> None:
        """Runs in the loop, in no task: hence one that starts the calls."""
        self._calls.append((future, run))
        self._gate.set(None)

    async def serve(self) -> None:
        """The task that starts what threads call; it ends with the runtime."""
        while True:
            self._gate = OneShot()
            while self._calls:
                future, run = self._calls.popleft()
                self._system.start_soon(self._answer, future, run)
            await self._gate.wait()

    async def _answer(self, future: Future[R], run: Callable[[], Awaitable[R]]) -> None:
        try:
            value = await run()
        except Exception as error:  # noqa: BLE001 - carried to the thread, as it is
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(value)

    @staticmethod
    def _gone() -> Unavailable:
        return Unavailable("call through the portal: the runtime has been left; try elsewhere")
