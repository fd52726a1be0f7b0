"""Blocking calls from threads into a loop. The portal calls actors this way.

Owns that hand-over. Every call ends: it is answered, or fails once the loop takes no more calls.

A thread that waits may be interrupted (Ctrl-C) at any step. So neither side takes a lock in Python
code, as `concurrent.futures.Future` and `threading.Condition` do: an interrupt that comes after
such a lock was taken, and before that was noted, leaves it taken, and then the loop hangs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

import anyio

from ._backend import (
    OneShot,
    Tasks,
    adopt_context,
    clear_stray_cancellation,
    open_tasks,
    persist,
    thread_caller,
)
from ._messages import Message
from .errors import OutcomeUnknown, Unavailable

if TYPE_CHECKING:
    from ._ref import Ref
    from ._system import System

__all__ = ["NoAnswer", "Portal", "ThreadCalls", "ThreadOneShot"]

M = TypeVar("M")
R = TypeVar("R")
T = TypeVar("T")


class NoAnswer(TimeoutError):
    """A thread has waited its full time for an answer; no function that it calls raises this."""


class ThreadOneShot(Generic[T]):
    """A value or an error that comes once, for one thread that waits for it.

    The counterpart of `OneShot`, for a thread. `set` and `fail` never raise and never wait, and
    have no effect after the first of them. Call them in one thread.
    """

    __slots__ = ("_come", "_error", "_value", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._come = threading.Lock()
        self._come.acquire()  # until the answer comes

    def set(self, value: T) -> None:
        """Store the value and wake the waiter."""
        if not self.is_done:
            self._value = value
            self.is_done = True
            self._come.release()

    def fail(self, error: BaseException) -> None:
        """Store the error, which the waiter raises, and wake the waiter."""
        if not self.is_done:
            self._error = error
            self.set(cast("T", None))

    def wait(self, timeout_s: float = threading.TIMEOUT_MAX) -> T:
        """Return the value, or raise the error, once; raise `NoAnswer` past that time.

        A wait that was interrupted may be begun again.
        """
        # A wait with an end, however far, can be interrupted on every platform. The interrupt may
        # come after the lock was taken: so `is_done`, which is set before, is what counts.
        if not self.is_done and not self._come.acquire(timeout=timeout_s) and not self.is_done:
            raise NoAnswer
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        return cast("T", self._value)


class _Call(Generic[T]):
    """A call that is on its way, or runs."""

    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        self.function = function
        self.context = copy_context()
        self.answer: ThreadOneShot[T] = ThreadOneShot()
        self.is_given_up = False
        """True once the thread waits no more. Written by the thread."""
        self.scope: anyio.CancelScope | None = None

    def cancel(self) -> None:
        if self.scope is not None:
            self.scope.cancel()


class ThreadCalls:
    """Takes calls from threads into the loop, from when a task enters it until the task leaves it.

    Made in the loop. Leaving waits for the calls that run. Only `call` is for other threads.
    """

    def __init__(self) -> None:
        self._group = open_tasks()
        self._tasks: Tasks
        self._body = anyio.CancelScope()
        # Any: each call has its own kind of answer. Threads add and remove, the loop reads.
        self._pending: dict[_Call[Any], None] = {}
        self._is_over = False
        self._call_soon = thread_caller()

    async def __aenter__(self) -> Self:
        self._tasks = await self._group.__aenter__()
        self._body.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        try:
            is_swallowed = self._body.__exit__(kind, error, traceback)
            outcome = (None, None, None) if is_swallowed else (kind, error, traceback)
            return await self._group.__aexit__(*outcome) or is_swallowed
        finally:
            # A thread that adds a call after this sees that it is over.
            self._is_over = True
            for call in list(self._pending):
                call.answer.fail(self._gone())

    def call(
        self, function: Callable[[], Awaitable[T]], timeout_s: float = threading.TIMEOUT_MAX
    ) -> T:
        """Call an async function in the loop; return its result, or raise its error.

        It sees the context variables of this thread. If the thread is interrupted, or past the
        time, which raises `NoAnswer`, it is cancelled. Raises `RuntimeError` if the loop takes no
        calls.
        """
        call = _Call(function)
        try:
            self._pending[call] = None
            if self._is_over or not self._call_soon(lambda: self._begin(call)):
                raise self._gone()
            return call.answer.wait(timeout_s)
        except BaseException:
            if not call.answer.is_done:
                call.is_given_up = True
                self._call_soon(call.cancel)
            raise
        finally:
            self._pending.pop(call, None)

    def cancel(self) -> None:
        """Cancel all calls that run, and what the task does that entered."""
        self._tasks.cancel()
        self._body.cancel()

    def _begin(self, call: _Call[T]) -> None:
        try:
            self._tasks.start_soon(self._run, call)
        except RuntimeError:  # the group has just ended
            call.answer.fail(self._gone())

    async def _run(self, call: _Call[T]) -> None:
        adopt_context(call.context)
        try:
            with anyio.CancelScope() as call.scope:
                if call.is_given_up:
                    call.scope.cancel()
                call.answer.set(await call.function())
        # An exit or an interrupt that the function raises is the caller's, and not the loop's.
        except BaseException as error:
            is_cancelled = isinstance(error, anyio.get_cancelled_exc_class())
            call.answer.fail(self._cancelled() if is_cancelled else error)
            if is_cancelled and not clear_stray_cancellation(error):
                raise
        else:
            call.answer.fail(self._cancelled())  # unless it has its value
        finally:
            del call  # its answer may hold an error whose traceback refers to this frame

    @staticmethod
    def _cancelled() -> OutcomeUnknown:
        return OutcomeUnknown(
            "call from a thread: its task was cancelled; it may have happened; send again under "
            "the same id, or read back"
        )

    @staticmethod
    def _gone() -> RuntimeError:
        return RuntimeError("call from a thread: the loop takes no more calls; nothing was done")


class Portal:
    """Blocking calls into the runtime, for threads other than its own. Made by `portal()`."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._home = threading.get_ident()
        # Any: each call has its own kind of answer. Threads add and remove, the loop closes.
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
        # A thread that adds a call after this sees that it is closed.
        self._is_closed = True
        for answer in list(self._pending):
            answer.fail(self._gone())

    def _call(self, run: Callable[[], Awaitable[R]]) -> R:
        if threading.get_ident() == self._home:
            raise RuntimeError(
                "portal called from the runtime's own thread: the call would wait for itself; "
                "await the ref's tell or ask instead"
            )
        answer: ThreadOneShot[R] = ThreadOneShot()
        try:
            self._pending[answer] = None
            take = partial(self._take, answer, run)
            if self._is_closed or not self._system.call_soon(take):
                raise self._gone()
            return answer.wait()
        finally:
            self._pending.pop(answer, None)

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
            "call through the portal failed: the runtime has been left, or runs in the process "
            "from which this one was forked; try elsewhere"
        )
