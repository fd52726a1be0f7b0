"""The blocking interface, for code without an event loop: Flask, Django, Celery and scripts.

`Blocking` keeps an event loop in a thread of its own, and opens the conversations there. Any thread
may call it, many at once:

    conversations = Conversations(support, journal=SQLiteJournal("chats.db"))
    with Blocking(conversations) as call:
        turn = call(conversations["alice"].send, "Where is my order?")
        print(call.within(30, turn.reply))

The methods are those of `Conversations` and its handles, and keep all that they promise.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Literal, ParamSpec, Self, TypeAlias, TypeVar, get_args

import anyio

from turnkeeper.runtime import Ports
from turnkeeper.runtime.lowlevel import ThreadCalls, ThreadOneShot, thread_caller

from .conversations.conversations import Conversations
from .errors import InvalidInput
from .values.type_names import a_type

__all__ = ["Blocking"]

_NOT_OPEN = "not open; use `with Blocking(conversations) as call`"

P = ParamSpec("P")
T = TypeVar("T")
_Backend: TypeAlias = Literal["asyncio", "trio"]


class Blocking:
    """Opens conversations in an event loop of its own, and calls their methods from threads.

    Enter it once, and share it between threads. Leaving it closes the conversations. Make it after
    a server has forked its workers: a thread does not live on in a forked process.
    """

    def __init__(self, conversations: Conversations, *, backend: _Backend = "asyncio") -> None:
        """Open nothing yet. The conversations must not be entered elsewhere.

        `backend`: the event loop, "asyncio" or "trio". Raises `InvalidInput`.
        """
        if not isinstance(conversations, Conversations):
            raise InvalidInput(f"conversations is {a_type(conversations)}; it takes Conversations")
        if backend not in get_args(_Backend):
            raise InvalidInput(f'backend is {backend!r}; it takes "asyncio" or "trio"')
        self._conversations = conversations
        self._backend = backend
        self._loop: _Loop | None = None
        self._process = 0

    def __enter__(self) -> Self:
        """Start the thread and open the conversations. Raises as entering them does."""
        if self._loop is not None:
            raise RuntimeError("entered already; it is entered once, and shared between threads")
        loop = _Loop(self._conversations, self._backend)
        try:
            loop.open()
            self._loop, self._process = loop, os.getpid()
            return self
        except BaseException:  # an interrupt may come as late as now
            self._loop = None
            loop.abandon()
            raise

    def __exit__(self, *exc_info: object) -> None:
        loop, self._loop = self._loop, None
        # A forked process has this object without the thread: there, leaving would wait forever.
        if loop is not None and os.getpid() == self._process:
            loop.leave()

    def __call__(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call an async function in the loop; return its result, or raise its error.

        It waits as long as the function does. If this thread is interrupted meanwhile, as by
        Ctrl-C, the function is cancelled. Raises `RuntimeError` in the loop's own thread, which
        would wait for itself, in a forked process, and while this is not entered.
        """
        _check_function(function)

        async def run() -> T:
            return await _awaitable(function(*args, **kwargs))

        return self._run(run)

    def within(
        self,
        seconds: float,
        function: Callable[P, Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call an async function; past this time, cancel it and raise `TimeoutError`.

        `seconds`: 0 or more, else `InvalidInput`. Cancelling loses nothing: a message that was sent
        is in the log, and its turn goes on. Raises as a call without a limit does.
        """
        if not isinstance(seconds, int | float):
            raise TypeError(f"within takes seconds first, not {a_type(seconds)}")
        if not seconds >= 0:
            raise InvalidInput(f"within is given {seconds} seconds; it takes 0 or more")
        _check_function(function)

        async def run() -> T:
            with anyio.fail_after(seconds):
                return await _awaitable(function(*args, **kwargs))

        return self._run(run)

    def iterate(
        self, function: Callable[P, AsyncIterator[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[T]:
        """Iterate over the items of an async iterator, such as that of `conversation.events`.

        `function`: a method that returns one, else `TypeError`. Each item is waited for as long as
        it takes. Drop the iterator to end it. Raises as a call does.
        """
        _check_function(function)

        async def begin() -> AsyncIterator[T]:
            begun: object = function(*args, **kwargs)
            if isinstance(begun, AsyncIterator):
                return begun
            _drop(begun)
            raise TypeError("iterate takes a method that returns an async iterator")

        async def take() -> tuple[T, ...]:
            try:
                return (await items.__anext__(),)
            except StopAsyncIteration:
                return ()

        items = self._run(begin)
        while taken := self._run(take):
            yield from taken

    def _run(self, run: Callable[[], Awaitable[T]]) -> T:
        loop = self._loop
        if loop is None:
            raise RuntimeError(_NOT_OPEN)
        if os.getpid() != self._process:
            raise RuntimeError(
                f"opened in process {self._process}, and this is process {os.getpid()}: a thread "
                "does not live on in a forked process; open it after the fork"
            )
        if threading.get_ident() == loop.ident:
            raise RuntimeError(
                "called in its own event loop, which would wait for itself; use `await` there"
            )
        return loop.calls.call(run)


class _Loop:
    """An event loop in a thread of its own, with the conversations opened in it."""

    def __init__(self, conversations: Conversations, backend: _Backend) -> None:
        self.ident = 0
        """Of its thread."""
        self._conversations = conversations
        self._backend = backend
        self._opened: ThreadOneShot[None] = ThreadOneShot()
        self._ended: ThreadOneShot[None] = ThreadOneShot()
        self._is_started = self._is_given_up = False
        self._error: BaseException | None = None
        """Raised by the conversations as they were opened or left."""
        self._call_soon: Callable[[Callable[[], None]], bool] = lambda _: False

    def open(self) -> None:
        """Start the thread; return once the conversations are open, or raise their error."""
        Ports().start_thread("turnkeeper-calls", self._run)
        self._is_started = True
        self._opened.wait()

    def abandon(self) -> None:
        """Cancel all, and return once the thread has ended; one that is about to start ends too."""
        self._is_given_up = True
        self._call_soon(lambda: self.calls.cancel())  # noqa: PLW0108 - there may be none yet
        if self._is_started:
            self._ended.wait()

    def leave(self) -> None:
        """Close the conversations, then wait for the calls that run; an interrupt cancels all."""
        try:
            self._call_soon(self._stop.set)
            self._ended.wait()
        except BaseException:
            self.abandon()  # a second interrupt ends this wait
            raise
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            anyio.run(self._serve, backend=self._backend)
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits
            self._error = error
        self._opened.fail(self._error or RuntimeError(_NOT_OPEN))
        self._ended.set(None)

    async def _serve(self) -> None:
        self.ident = threading.get_ident()
        self._stop = anyio.Event()
        async with ThreadCalls() as self.calls:
            self._call_soon = thread_caller()
            if self._is_given_up:  # before there was a loop to tell
                return
            try:
                async with self._conversations:
                    self._opened.set(None)
                    await self._stop.wait()
            except BaseException as error:
                if isinstance(error, anyio.get_cancelled_exc_class()):
                    raise
                self._error = error


def _check_function(function: object) -> None:
    if not callable(function):
        _drop(function)
        raise TypeError(
            f"called with {a_type(function)}; give the method and its arguments apart, as "
            "in call(chat.send, text)"
        )


def _awaitable(result: Awaitable[T]) -> Awaitable[T]:
    if not isinstance(result, Awaitable):
        raise TypeError("the function is not async; call it without `call`")
    return result


def _drop(given: object) -> None:
    """Close a coroutine, so that Python does not warn that it was never awaited."""
    if isinstance(given, Coroutine):
        given.close()
