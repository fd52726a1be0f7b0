"""Calls from threads into a loop, each of which waits in its thread for its answer.

Owns that hand-over. Every call ends: it is answered, or fails once the loop takes no more calls.

A thread that waits may be interrupted (Ctrl-C) at any step. So neither side takes a lock in Python
code, as `concurrent.futures.Future` and `threading.Condition` do: an interrupt that comes after
such a lock was taken, and before that was noted, leaves it taken, and then the loop hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import anyio

from ._backend import adopt_context, clear_stray_cancellation, thread_caller
from .errors import OutcomeUnknown

__all__ = ["ThreadCalls", "ThreadOneShot"]

T = TypeVar("T")


class ThreadOneShot(Generic[T]):
    """A value or an error that comes once, for one thread that waits for it.

    As a `OneShot` is for a task. `set` and `fail` never raise and never wait, and have no effect
    after the first of them. Call them in one thread.
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
        """Return the value, or raise the error, once; raise `TimeoutError` past that time.

        A wait that was interrupted may be begun again.
        """
        # A wait with an end, however far, can be interrupted on every platform. The interrupt may
        # come after the lock was taken: so `is_done`, which is set before, is what counts.
        if not self.is_done and not self._come.acquire(timeout=timeout_s):
            raise TimeoutError
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
        self._tasks = anyio.create_task_group()
        # Any: each call has its own kind of answer. Threads add and remove, the loop reads.
        self._pending: dict[_Call[Any], None] = {}
        self._is_over = False
        self._call_soon = thread_caller()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        try:
            return await self._tasks.__aexit__(kind, error, traceback)
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
        time, which raises `TimeoutError`, it is cancelled. Raises `RuntimeError` if the loop takes
        no calls.
        """
        call = _Call(function)
        try:
            self._pending[call] = None
            if self._is_over:
                raise self._gone()
            self._call_soon(lambda: self._begin(call))
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
        self._tasks.cancel_scope.cancel()

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

    @staticmethod
    def _cancelled() -> OutcomeUnknown:
        return OutcomeUnknown(
            "call from a thread: its task was cancelled; it may have happened; send again under "
            "the same id, or read back"
        )

    @staticmethod
    def _gone() -> RuntimeError:
        return RuntimeError("call from a thread: the loop takes no more calls; nothing was done")
