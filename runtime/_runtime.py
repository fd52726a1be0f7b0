"""The runtime: what a program enters to have actors, and leaves when it is done.

1. It owns every actor spawned in it, the tasks that run them, and one clock.
2. It promises that all of them have ended when the `async with` is left, in reverse order of
   their start, children before parents; that every ask has been answered, failed or handed back;
   and that what it left undone is said, in `left_undone` and in the log.
3. It does not promise an order among actors without an order of start (the keys of a region), nor
   anything for code that swallows its cancellation: such an actor is detached, and named.
4. One loop, asyncio or trio, runs all of it. Only `portal()` may be used from other threads.
5. Nothing survives a crash here. What must, an actor keeps in a journal of its own.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup, TaskStatus
from typing_extensions import TypeVar

from ._actor import Actor
from ._backend import OneShot, spawn_host, thread_caller
from ._cell import Cell, Phase, Spec
from ._dead_letters import DeadLetters
from ._event_stream import EventStream
from ._log import logger
from ._mailbox import Mailbox
from ._portal import Portal
from ._ref import Ref
from ._region import Region
from ._supervision import Supervision, leaves
from ._supervisor import Supervisor
from ._system import Limits, System
from ._tree import Tree, take_tree
from .ports import Ports

__all__ = ["LeftUndone", "Runtime"]

# Any: whoever does not say which messages an actor takes is not checked for it.
M = TypeVar("M", default=Any)

_LAST_STEPS = 100


@dataclass(frozen=True, slots=True)
class LeftUndone:
    """What an actor still had when the runtime's grace was over."""

    actor: str
    messages: int
    effects: tuple[str, ...]
    was_handling: bool


class Runtime:
    """`async with Runtime() as runtime:` and spawn actors in it.

    `drain_s`: how long, on leaving, queued messages may still be handled. `stop_s`: how long an
    actor that is told to stop may go on with its message. `cleanup_s`: how long its hooks may
    take. `kill_s`: how long something cancelled may take to end before it counts as stuck.
    `handle_signals`: SIGINT and SIGTERM leave the runtime, as if its block had ended there; a
    second one cuts the draining short. For programs that own their process; main thread only.
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
        handle_signals: bool = False,
    ) -> None:
        self._is_open = False  # first: `__del__` looks at it
        limits = Limits(drain_s, stop_s, cleanup_s, kill_s)
        self.left_undone: tuple[LeftUndone, ...] = ()
        """What was not done when the runtime had been left."""
        self._system = System(ports or Ports(), limits, self._fail)
        self._root = Supervisor(self._system, "", supervision or Supervision())
        self._tasks: TaskGroup | None = None
        self._body = anyio.CancelScope()
        self._failure: BaseException | None = None
        self._host_ended = anyio.Event()
        self._handles_signals = handle_signals
        self.stopped_by: signal.Signals | None = None
        """The signal that ended the block, if one did."""
        self._portal: Portal | None = None
        self._draining: anyio.CancelScope | None = None
        self._orderly: anyio.CancelScope | None = None

    # --- what users do ---------------------------------------------------------------------------

    @property
    def ports(self) -> Ports:
        return self._system.ports

    @property
    def events(self) -> EventStream:
        """Reports of failures, restarts, stops and dead letters; and what anyone publishes."""
        return self._system.events

    @property
    def dead_letters(self) -> DeadLetters:
        return self._system.dead_letters

    def spawn(
        self,
        factory: Callable[[], Actor[M]],
        *,
        name: str,
        mailbox: Mailbox | None = None,
        supervision: Supervision | None = None,
        resident: bool = False,
    ) -> Ref[M]:
        """Start an actor and return its ref; its `on_start` runs soon, before any message.

        A resident actor keeps one task for life, for what it opens with `async with`. With
        `supervision`, this actor is judged by it, with a count of its own, before the runtime's.
        """
        return self._root.spawn(
            factory, name=name, mailbox=mailbox, supervision=supervision, resident=resident
        )

    def spawn_supervisor(self, name: str, supervision: Supervision) -> Supervisor:
        """Start a supervisor, for actors that stand or fall together."""
        return self._root.spawn_supervisor(name, supervision)

    def region(
        self,
        name: str,
        factory: Callable[[str], Actor[M]],
        *,
        mailbox: Mailbox | None = None,
        supervision: Supervision | None = None,
        resident: bool = False,
        idle_s: float | None = None,
        active_max: int | None = None,
        refuse_s: float = 10.0,
    ) -> Region[M]:
        """Start a region: `factory(key)` makes the actor of a key when its first message comes.

        An actor that was idle for `idle_s` is passivated; so is, once more than `active_max` are
        active, the one that is idle longest. A key that fails too often is refused for
        `refuse_s`.
        """
        region: Region[M] = Region(
            self._system,
            name,
            factory,
            parent=self._root,
            spec=Spec(mailbox or Mailbox(), None, resident),
            supervision=supervision or Supervision(),
            context=self._system.context,
            idle_s=idle_s,
            active_max=active_max,
            refuse_s=refuse_s,
        )
        self._root.adopt(region)
        return region

    def tree(self) -> Tree:
        """What every actor is doing just now. Print it, or let rich do so."""
        return take_tree(self._system, self._root)

    def portal(self) -> Portal:
        """For threads: blocking `tell` and `ask`. Make it in the loop, use it elsewhere."""
        if self._portal is None:
            self._portal = Portal(self._system)
            self._system.start_soon(self._portal.serve)
        return self._portal

    # --- opening ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._is_open or self._host_ended.is_set():
            raise RuntimeError("a runtime is entered once")
        system = self._system
        system.context = copy_context()
        system.call_soon = thread_caller()
        ready: OneShot[None] = OneShot()

        async def host() -> None:
            await self._run_host(ready)

        spawn_host(host)
        with anyio.CancelScope(shield=True):
            await ready.wait()
        if self._failure is not None:
            raise self._failure
        self._is_open = True
        self._body.__enter__()
        return self

    async def _run_host(self, ready: OneShot[None]) -> None:
        """The one task that may be left behind, with those who would not end."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._system.open(tasks)
                if self._handles_signals:
                    await tasks.start(self._listen)
                ready.set(None)
                try:
                    await self._system.clock.run()
                finally:
                    self._system.pool.close()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:  # noqa: BLE001 - carried to the task that entered us
            found = tuple(leaves(error))
            self._fail(found[0] if len(found) == 1 else error)
        finally:
            self._host_ended.set()
            ready.set(None)
            if self._orderly is not None:
                self._orderly.cancel()

    async def _listen(self, *, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                logger.warning("leaving the runtime", signal=number.name)
                if self.stopped_by is None:
                    self.stopped_by = number
                    self._body.cancel()
                elif self._draining is not None:
                    self._draining.cancel()

    def _fail(self, error: BaseException) -> None:
        """Nobody below could answer for this: the runtime ends, and its block raises it."""
        if self._failure is None:
            self._failure = error
        self._body.cancel()

    # --- closing ---------------------------------------------------------------------------------

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        # Shielded and bounded: by the grace, and by the watchdog of each cell.
        with anyio.CancelScope(shield=True):
            await self._close(is_drained=self._failure is None)
        is_swallowed = bool(self._body.__exit__(kind, error, trace))
        if self._failure is None:
            return is_swallowed
        if error is None or is_swallowed:
            raise self._failure
        raise BaseExceptionGroup("the runtime failed, and so did its block", [self._failure, error])

    async def _close(self, *, is_drained: bool) -> None:
        system = self._system
        self._close_intake()
        # Cancelled when the workers are gone already: an interrupt of the program, or a bug.
        with anyio.CancelScope() as self._orderly:
            if system.pool.is_closed:
                self._orderly.cancel()
            elif is_drained:
                with system.clock.at_most(system.limits.drain_s) as self._draining:
                    await system.drained()
            self._say_what_is_left()
            await self._root.stop_children("the runtime is shutting down")
        self._is_open = False
        assert self._tasks is not None, "a runtime that is left has been entered"
        self._tasks.cancel_scope.cancel()
        if system.stuck:
            # Some task will not end; everything else gets the chance to.
            for _ in range(_LAST_STEPS):
                if not self._host_ended.is_set():
                    await system.checkpoint()
        else:
            await self._host_ended.wait()
        for cell in cells_of(self._root):
            cell.end(None)
        if self._portal is not None:
            self._portal.close()
        system.events.close()

    def _close_intake(self) -> None:
        system = self._system
        system.is_closing = True
        for cell in cells_of(self._root):
            cell.close_intake()
            if not cell.at_rest and (cell.phase is Phase.LIVE or cell.depth):
                system.is_busy(cell)

    def _say_what_is_left(self) -> None:
        left = []
        for cell in cells_of(self._root):
            effects = tuple(effect.name for effect in cell.effects or ())
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


def cells_of(supervisor: Supervisor) -> Iterator[Cell]:
    """Every actor below, children before parents, the youngest first."""
    for child in reversed(tuple(supervisor.children.values())):
        if isinstance(child, Cell):
            if child.children is not None:
                yield from cells_of(child.children)
            yield child
        elif isinstance(child, Supervisor):
            yield from cells_of(child)
