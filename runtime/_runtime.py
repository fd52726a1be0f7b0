"""The runtime: a program enters it to have actors, and leaves it when it is done.

1. It owns every actor spawned in it, the tasks that run them, and one clock.
2. It promises that all of them have ended when the `async with` is left, in reverse order of
   their start, children before parents; that every ask has been answered, failed or handed back;
   and that work left undone is named, in `left_undone` and in the log.
3. It does not promise an order among actors without an order of start (the keys of a region), nor
   anything for code that swallows its cancellation: such an actor is detached, and named.
4. One loop, asyncio or trio, runs all of it. Only `portal()` may be used from other threads.
5. Nothing here survives a crash. An actor keeps what must survive in a journal of its own.
"""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
from typing_extensions import TypeVar

from ._actor import Actor, bind, traits_of
from ._backend import (
    OneShot,
    Tasks,
    cancel_scope,
    clear_stray_cancellation,
    open_tasks,
    persist,
    spawn_host,
    task_end_watch,
    thread_caller,
)
from ._cell import Spec
from ._dead_letters import DeadLetters
from ._event_stream import EventStream
from ._freezing import Freezer
from ._logger import load_structlog, logger
from ._loop_watch import LoopWatch
from ._mailbox import DEFAULT_MAILBOX, MailboxSettings
from ._portal import Portal
from ._ref import Ref
from ._region import Region
from ._supervision import (
    DEFAULT_SUPERVISION,
    Supervision,
    check_kind,
    check_number,
    check_seconds,
    check_whole,
    leaves,
)
from ._supervisor import Supervisor
from ._system import Makers, System
from ._tree import Tree, cells_of, take_tree
from ._world import Limits, traceback_of
from .errors import Unavailable
from .ports import Ports

__all__ = ["LeftUndone", "Runtime", "cells_of"]

# Any: an actor that does not name its messages is not checked for them.
M = TypeVar("M", default=Any)

_LAST_STEPS = 100


@dataclass(frozen=True, slots=True)
class LeftUndone:
    """The work that an actor still had when the runtime's grace was over.

    `messages` is how many messages waited. `effects` are the names of the effects that ran.
    `was_handling` is True if a handler, a start or a clean-up of the actor was waiting in a task.
    """

    actor: str
    messages: int
    effects: tuple[str, ...]
    was_handling: bool


class Runtime:
    """The actors of a program: `async with Runtime() as runtime:`, and spawn actors in it.

    `supervision`: what happens to an actor that fails, unless it was spawned with its own. `ports`:
    the clocks, ids, threads and random numbers that it uses; by default the real ones.

    Limits, in seconds. `drain_s`: how long queued messages are handled on leaving. `stop_s`: how
    long an actor that is told to stop, and those below it, may go on with their messages.
    `cleanup_s`: how long an `on_stop` or `on_restart` may take. `kill_s`: how long cancelled code
    may take to end before it counts as stuck.

    `report_blocked_s`: warn, and publish a `LoopBlocked`, if code in the loop does not yield for so
    many seconds; it takes a thread. `freeze_objects`: keep the garbage collector's pauses short
    with many actors in memory; it calls `gc.freeze`, which affects the whole process (see the page
    on operations).

    `handle_signals`: SIGINT and SIGTERM leave the runtime, as if its block had ended there; a
    second signal cuts `drain_s` and `stop_s` short. For programs that own their process, and in the
    main thread only.

    Raises `TypeError` for a switch or a `supervision` of another type, and `ValueError` for a
    number that cannot be used.
    """

    def __init__(
        self,
        *,
        ports: Ports | None = None,
        supervision: Supervision | None = None,
        drain_s: float = 5.0,
        stop_s: float = 5.0,
        cleanup_s: float = 5.0,
        kill_s: float = 1.0,
        report_blocked_s: float | None = None,
        freeze_objects: bool = False,
        handle_signals: bool = False,
    ) -> None:
        self._is_open = False  # first: `__del__` looks at it
        check_kind("freeze_objects", freeze_objects, bool)
        check_kind("handle_signals", handle_signals, bool)
        if report_blocked_s is not None:
            check_number("report_blocked_s", report_blocked_s, "seconds above 0")
            if not 0 < report_blocked_s < threading.TIMEOUT_MAX:
                raise ValueError(
                    f"report_blocked_s is {report_blocked_s}; it takes seconds above 0"
                )
        self._is_entered = self._has_block = False
        limits = Limits(drain_s, stop_s, cleanup_s, kill_s)
        self.left_undone: tuple[LeftUndone, ...] = ()
        """The work that was not done when the runtime had been left."""
        self._system = System(ports or Ports(), limits, self._fail, Makers(bind, traits_of))
        self._root = Supervisor(self._system, "", supervision or DEFAULT_SUPERVISION)
        self._tasks: Tasks | None = None
        self._body: anyio.CancelScope | None = None  # a scope needs a running loop
        self._failure: BaseException | None = None
        self._host_ended = anyio.Event()
        self._handles_signals = handle_signals
        self._loop_watch = (
            None if report_blocked_s is None else LoopWatch(self._system, report_blocked_s)
        )
        self._freezer = Freezer(self._system) if freeze_objects else None
        self.stopped_by: signal.Signals | None = None
        """The signal that ended the block, if one did."""
        self._portal: Portal | None = None
        self._leaving: OneShot[None] = OneShot()
        self._when_holder_ends: Callable[[Callable[[], None]], None] | None = None
        self._is_closed = anyio.Event()
        self._draining: anyio.CancelScope | None = None
        self._drain_until = 0.0
        self._is_left_reported = False

    # --- for applications ------------------------------------------------------------------------

    @property
    def ports(self) -> Ports:
        return self._system.ports

    @property
    def events(self) -> EventStream:
        """The reports of failures, restarts, stops and dead letters; applications may publish."""
        return self._system.events

    @property
    def dead_letters(self) -> DeadLetters:
        return self._system.dead_letters

    def spawn(
        self,
        factory: Callable[[], Actor[M]],
        *,
        name: str,
        mailbox: MailboxSettings | None = None,
        supervision: Supervision | None = None,
        resident: bool = False,
    ) -> Ref[M]:
        """Start an actor and return its ref; its `on_start` runs soon, before any message.

        `factory` makes the actor, and makes it again for each restart. `mailbox`: how many messages
        may wait, and what happens to further ones. A `resident` actor keeps one task for life, in
        which it may hold open what it enters with `async with`. `supervision`, if given, decides
        about this actor's failures before the runtime's does, and counts its restarts separately.

        Raises `ValueError` if an actor of this name is there already, `TypeError` for an actor in
        place of its factory and a setting of another type, and `ActorEnded` if the runtime is
        closing. Raises `RuntimeError` if the runtime is not entered, or has been left, and in
        another event loop than its own.
        """
        self._check_entered()
        return self._root.spawn(
            factory, name=name, mailbox=mailbox, supervision=supervision, resident=resident
        )

    def spawn_supervisor(self, name: str, supervision: Supervision) -> Supervisor:
        """Start a supervisor; `supervision` says which of its actors restart or stop together.

        Raises as `spawn` does.
        """
        self._check_entered()
        return self._root.spawn_supervisor(name, supervision)

    def region(
        self,
        name: str,
        factory: Callable[[str], Actor[M]],
        *,
        mailbox: MailboxSettings | None = None,
        supervision: Supervision | None = None,
        resident: bool = False,
        idle_s: float | None = None,
        active_max: int | None = None,
        refuse_s: float = 10.0,
    ) -> Region[M]:
        """Start a region: `factory(key)` makes the actor of a key when its first message comes.

        `mailbox`, `supervision` and `resident` are as for `spawn`, for each of the actors.

        An actor that was idle for `idle_s` seconds is passivated. While more than `active_max` are
        active, the one that is idle longest is passivated. If the actor of a key fails too often,
        messages to the key are refused for `refuse_s` seconds. Raises as `spawn` does, and
        `ValueError` for a number out of its range.
        """
        self._check_entered()
        if idle_s is not None:
            check_seconds("idle_s", idle_s)
        if mailbox is not None:
            check_kind("mailbox", mailbox, MailboxSettings)
        if active_max is not None:
            check_number("active_max", active_max, "0 or more")
        check_seconds("refuse_s", refuse_s)
        check_kind("resident", resident, bool)
        region: Region[M] = Region(
            self._system,
            name,
            factory,
            parent=self._root,
            spec=Spec(mailbox or DEFAULT_MAILBOX, None, resident),
            supervision=supervision or DEFAULT_SUPERVISION,
            context=self._system.context,
            idle_s=idle_s,
            active_max=active_max,
            refuse_s=refuse_s,
        )
        self._root.adopt(region)
        return region

    def tree(self, *, limit: int | None = None) -> Tree:
        """Return the state of every actor at this moment. Print it, with `print` or rich.

        It takes about 5 µs an actor, and the event loop waits meanwhile. `limit`: at most so many
        children of each actor, the idle ones last; the others are only counted, in `left_out`.
        """
        if limit is not None:
            check_whole("limit", limit)
        return take_tree(self._system, self._root, sys.maxsize if limit is None else limit)

    def portal(self) -> Portal:
        """Return blocking `tell` and `ask` for threads. Make it in the loop, use it elsewhere."""
        self._check_entered()
        if self._portal is None:
            self._portal = Portal(self._system)
            # Not in the context of the actor that calls this: the portal's asks are not its own.
            self._system.context.run(self._system.start_soon, self._portal.serve)
        return self._portal

    def check_home(self) -> None:
        """Raise `RuntimeError` in another event loop than the runtime's, unless it has ended."""
        if self._is_open and not self._host_ended.is_set():
            self._system.check_home("the runtime")

    def _check_entered(self) -> None:
        if not self._is_entered:
            raise RuntimeError("the runtime has not been entered: use `async with` first")
        self._system.check_home("the runtime")
        if self._host_ended.is_set():
            raise RuntimeError("the runtime has been left: enter a new one")

    # --- opening ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._body is None:
            self._body = cancel_scope()
        await self._open()
        self._has_block = True
        self._body.__enter__()
        return self

    async def start(self) -> Self:
        """Enter the runtime without a block; any task may leave it, with `aclose`.

        For hooks, fixtures and notebooks. A failure that would have ended the block ends the
        runtime, and `aclose` raises it. Prefer `async with`, which cannot be forgotten.
        """
        await self._open()
        return self

    async def aclose(self) -> None:
        """Leave a runtime that was entered with `start`; a second call does nothing.

        Raises the failure that ended it, if one did, and `RuntimeError` in another event loop than
        its own. A cancellation does not cut it short.
        """
        if self._has_block:
            raise RuntimeError("the runtime was entered with `async with`, which leaves it")
        if not self._is_open:
            return
        self.check_home()
        with cancel_scope(shield=True):
            cancelled = await self._wait_for_host()
        self._is_open = False
        if cancelled is not None:
            raise cancelled
        if self._failure is not None:
            raise self._failure

    async def _open(self) -> None:
        if self._is_entered:
            raise RuntimeError("a runtime is entered once; make a new one")
        self._is_entered = True
        load_structlog()
        system = self._system
        system.context = copy_context()
        system.call_soon = thread_caller()
        self._when_holder_ends = task_end_watch()
        ready: OneShot[None] = OneShot()

        async def host() -> None:
            await self._run_host(ready)

        spawn_host(host)
        with cancel_scope(shield=True):
            try:
                await ready.wait_until_done()
            except BaseException:  # cancelled natively, or interrupted: no host may stay behind
                await self._wait_for_host()
                raise
        if self._failure is not None:
            with cancel_scope(shield=True):
                await self._wait_for_host()
            raise self._failure
        self._is_open = True

    async def _run_host(self, ready: OneShot[None]) -> None:
        """Hold all tasks until the runtime is left, then close it.

        This has a task of its own, because the task that leaves the runtime may be cancelled
        natively at any time. A library, or the end of the loop, may cancel this one natively too:
        `_stay` and `persist` deal with that. If an actor's code never ends, neither does this task,
        and the runtime leaves it behind.
        """
        try:
            async with open_tasks() as tasks:
                try:
                    await self._run(tasks, ready)
                except anyio.get_cancelled_exc_class():
                    # The workers are shielded from a cancellation, and the group waits for them.
                    self._close_intake()
                    self._system.pool.close()
                    raise
        except BaseException as error:
            cancelled = anyio.get_cancelled_exc_class()
            found = [each for each in leaves(error) if not isinstance(each, cancelled)]
            if not found:
                # trio cancels this task if its main task has ended without leaving the runtime. If
                # the group had cancelled it for the error of a task, it would raise that error.
                self._fail(self._host_cancelled())
                raise
            self._fail(found[0] if len(found) == 1 else error)
        finally:
            self._end_host(ready)

    async def _run(self, tasks: Tasks, ready: OneShot[None]) -> None:
        system = self._system
        self._tasks = tasks
        system.open(tasks)
        tasks.start_soon(self._run_clock)
        if self._loop_watch is not None:
            self._loop_watch.start()
        if self._freezer is not None:
            self._freezer.start()
        if self._handles_signals:
            listening: OneShot[None] = OneShot()
            tasks.start_soon(self._listen, listening)
            await persist(listening.wait)
        ready.set(None)
        await self._stay()
        await persist(self._close)
        system.pool.close()
        tasks.cancel()
        self._is_closed.set()

    async def _stay(self) -> None:
        """Wait until the runtime is left.

        A native cancellation of this task is ignored as long as the task that entered the runtime
        can still leave it. At the end of `asyncio.run` both are cancelled.
        """
        while not self._leaving.is_done:
            try:
                await self._leaving.wait_until_done()
            except BaseException as error:
                if not clear_stray_cancellation(error):
                    raise
                assert self._when_holder_ends is not None, "the runtime has been entered"
                self._when_holder_ends(self._abandon)

    def _abandon(self) -> None:
        """Close the runtime: the task that entered it has ended without leaving it."""
        if not self._leaving.is_done:
            self._fail(self._host_cancelled())
            self._leaving.set(None)

    @staticmethod
    def _host_cancelled() -> Unavailable:
        return Unavailable(
            "the runtime ended: its own task was cancelled natively, at the end of its loop or by "
            "a library; its actors were stopped; enter a new runtime"
        )

    def _end_host(self, ready: OneShot[None]) -> None:
        if self._loop_watch is not None:
            self._loop_watch.stop()
        if self._freezer is not None:
            self._freezer.stop()
        self._system.pool.close()
        self._host_ended.set()
        self._is_closed.set()
        ready.set(None)
        self._finish()

    async def _run_clock(self) -> None:
        await persist(self._system.clock.run)

    async def _listen(self, listening: OneShot[None]) -> None:
        """Leave the runtime at the first signal; cut its patience short at the second."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            listening.set(None)
            while (number := await persist(partial(anext, signals, None))) is not None:
                logger.warning("leaving the runtime", signal=number.name)
                if self.stopped_by is None:
                    self.stopped_by = number
                    self._leave()
                else:
                    self._hurry()

    def _hurry(self) -> None:
        """Stop draining, and cancel handlers at once when their actor is told to stop."""
        if self._draining is not None:
            self._draining.cancel()
        self._system.be_impatient()
        for cell in cells_of(self._root):
            cell.hurry()

    def _fail(self, error: BaseException) -> None:
        """End the runtime with a failure that was escalated to it; its block raises the failure."""
        if self._failure is None:
            self._failure = error
        self._leave()

    def _leave(self) -> None:
        """End the block; without one, close at once."""
        if self._body is not None:
            self._body.cancel()
        if self._is_open and not self._has_block:
            self._leaving.set(None)

    # --- closing ---------------------------------------------------------------------------------

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        # Shielded and bounded: by the grace, and by the watchdog of each cell.
        with cancel_scope(shield=True):
            cancelled = await self._wait_for_host()
        self._is_open = False
        assert self._body is not None  # `__aenter__` made it
        is_swallowed = bool(self._body.__exit__(kind, error, trace))
        failure = self._failure
        if cancelled is None and isinstance(error, anyio.get_cancelled_exc_class()):
            cancelled = None if is_swallowed else error
        if cancelled is not None:  # a cancellation from outside goes on, whatever else there is
            if failure is not None:
                logger.error(
                    "the runtime failed while it was cancelled",
                    error=type(failure).__name__,
                    exception=traceback_of(failure),
                )
            if cancelled is error:
                return False
            raise cancelled
        if failure is None:
            return is_swallowed
        if error is None or is_swallowed:
            raise failure
        raise BaseExceptionGroup("the runtime failed, and so did its block", [failure, error])

    async def _wait_for_host(self) -> BaseException | None:
        """Have the host close the runtime and wait until it has.

        Native cancellations that come meanwhile do not cut that short; the last one is returned.
        """
        self._leaving.set(None)
        cancelled: BaseException | None = None
        steps_left = _LAST_STEPS
        while not self._host_ended.is_set() and steps_left:
            try:
                if not self._is_closed.is_set():
                    await self._is_closed.wait()
                elif self._system.is_stuck:
                    # Some task will not end: give all others a few more steps to end.
                    steps_left -= 1
                    await self._system.checkpoint()
                else:
                    await self._host_ended.wait()
            except anyio.get_cancelled_exc_class() as error:
                cancelled = error
            except BaseException:  # an interrupt of the program: nothing is waited for
                self._system.pool.close()
                if self._tasks is not None:
                    self._tasks.cancel()
                raise
        self._finish()
        return cancelled

    async def _close(self) -> None:
        """Drain, then stop all actors. After a native cancellation it is called again."""
        system = self._system
        if not system.is_closing:
            self._close_intake()
            self._drain_until = system.now() + system.limits.drain_s
        if self._failure is None:
            with system.clock.at_most(self._drain_until - system.now()) as self._draining:
                await system.wait_until_drained()
        if not self._is_left_reported:
            self._is_left_reported = True
            self._report_left_undone()
        await self._root.stop_children("the runtime is shutting down")

    def _finish(self) -> None:
        """End all that is still there, so that nothing waits for it any more."""
        for cell in cells_of(self._root):
            cell.end(None)
        if self._portal is not None:
            self._portal.close()
        self._system.events.close()

    def _close_intake(self) -> None:
        system = self._system
        system.is_closing = True
        for cell in cells_of(self._root):
            cell.close_short_way()
            if cell.is_busy:
                system.note_busy(cell)

    def _report_left_undone(self) -> None:
        left = []
        for cell in cells_of(self._root):
            effects = cell.effect_names
            if cell.depth or effects or cell.doing:
                left.append(LeftUndone(cell.name, cell.depth, effects, bool(cell.doing)))
        self.left_undone = tuple(left)
        for each in left:
            logger.warning(
                "left undone",
                actor=each.actor,
                messages=each.messages,
                effects=each.effects,
                was_handling=each.was_handling,
            )

    def __del__(self) -> None:
        if self._is_open:
            warnings.warn(f"{self!r} was never left", ResourceWarning, stacklevel=2)
