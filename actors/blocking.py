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
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Literal, ParamSpec, Self, TypeAlias, TypeVar, get_args

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from .conversations.conversations import Conversations
from .errors import InvalidInput
from .values.type_names import a_type

__all__ = ["Blocking"]

_BEGINS_S_MAX = 10.0
"""How long leaving waits for calls that are about to begin; a running loop takes them at once."""
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
        """Open nothing yet. The conversations must not be entered elsewhere."""
        if not isinstance(conversations, Conversations):
            raise InvalidInput(f"conversations is {a_type(conversations)}; it takes Conversations")
        if backend not in get_args(_Backend):
            raise InvalidInput(f'backend is {backend!r}; it takes "asyncio" or "trio"')
        self._conversations = conversations
        self._backend = backend
        self._exit_stack = ExitStack()
        self._portal: BlockingPortal | None = None
        self._process = 0
        self._loop_thread = 0
        self._begins = threading.Condition()
        self._beginning = 0
        """How many calls are on their way into the loop."""
        self._is_left = False

    def __enter__(self) -> Self:
        """Start the thread and open the conversations. Raises as entering them does."""
        if self._portal is not None:
            raise RuntimeError("entered already; it is entered once, and shared between threads")
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal(self._backend))
            self._loop_thread = portal.call(threading.get_ident)
            self._is_left = False
            stack.callback(self._take_no_more)
            stack.enter_context(portal.wrap_async_context_manager(self._conversations))
            self._portal, self._process = portal, os.getpid()
            self._exit_stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._portal = None
        # A forked process has this object without the thread: there, leaving would wait for ever.
        if os.getpid() == self._process:
            self._exit_stack.__exit__(None, None, None)

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

        Cancelling loses nothing: a message that was sent is in the log, and its turn goes on.
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

        Each item is waited for as long as it takes. Drop the iterator to end it.
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
        portal = self._open_portal()
        scope: anyio.CancelScope | None = None
        is_left = False

        async def run_in_scope() -> T:
            nonlocal scope
            with anyio.CancelScope() as scope:
                if is_left:
                    scope.cancel()
                return await run()
            raise RuntimeError("cancelled, because the calling thread was interrupted")

        async def cancel() -> None:
            assert scope is not None, "there is one to cancel"
            scope.cancel()

        try:
            # A wait with an end, however far, can be interrupted on every platform.
            return self._begin(portal, run_in_scope).result(threading.TIMEOUT_MAX)
        except BaseException:
            # An interrupt may come before there is a future to cancel.
            is_left = True
            if scope is not None:
                with suppress(RuntimeError):  # the loop was left meanwhile: nothing runs there
                    self._begin(portal, cancel)
            raise

    def _begin(self, portal: BlockingPortal, function: Callable[[], Awaitable[T]]) -> Future[T]:
        """Start a function in the loop; leaving waits until the loop has taken it.

        Otherwise the loop might end first, and never answer the call.
        """
        with self._begins:
            if self._is_left:
                raise RuntimeError(_NOT_OPEN)
            self._beginning += 1
        try:
            return portal.start_task_soon(function)
        finally:
            with self._begins:
                self._beginning -= 1
                self._begins.notify_all()

    def _take_no_more(self) -> None:
        with self._begins:
            self._is_left = True
            self._begins.wait_for(lambda: not self._beginning, _BEGINS_S_MAX)

    def _open_portal(self) -> BlockingPortal:
        if self._portal is None:
            raise RuntimeError(_NOT_OPEN)
        if os.getpid() != self._process:
            raise RuntimeError(
                f"opened in process {self._process}, and this is process {os.getpid()}: a thread "
                "does not live on in a forked process; open it after the fork"
            )
        if threading.get_ident() == self._loop_thread:
            raise RuntimeError(
                "called in its own event loop, which would wait for itself; use `await` there"
            )
        return self._portal


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
