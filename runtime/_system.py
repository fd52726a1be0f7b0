"""What all cells of one runtime share: the world, the clock, the workers, the reports.

Owns nothing about any single actor. `Runtime` opens and closes it; everything in it belongs to
the runtime's loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from traceback import format_exception
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVarTuple

from anyio.abc import TaskGroup

from ._backend import OneShot, Park, checkpointing, parking
from ._clock import Clock
from ._dead_letters import DeadLetters
from ._event_stream import EventStream
from ._log import logger
from ._pool import Pool
from ._reports import Failure, RegionOverflow, Stopped, Stuck, Terminated
from ._stats import Stats
from ._turn import Outcome, run_batch, run_turn
from .errors import OwnershipLost
from .ports import Ports

if TYPE_CHECKING:
    from ._actor import Actor, ActorContext
    from ._cell import Cell

__all__ = ["Limits", "System", "Tracing", "Traits"]

Args = TypeVarTuple("Args")

_INLINE_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in seconds."""

    drain_s: float
    stop_s: float
    cleanup_s: float
    kill_s: float


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known of an actor class without asking each actor."""

    turn: Callable[[Cell], Outcome]
    is_inline: bool
    """Its handler is a `def`: an ask can be answered in the asker's own stack."""
    has_on_start: bool
    has_on_stop: bool
    has_on_restart: bool
    stats: Stats


class Tracing(Protocol):
    """What follows a message from its sender into its handler; see `otel.py`."""

    def sent(self) -> object:
        """What to put into the envelope of a message that the running code sends."""
        ...

    def enter(self, actor: Actor[Any], message: object, trace: object, *, is_ask: bool) -> None:
        """A handler begins. Runs inside its actor's context, as `leave` does."""
        ...

    def leave(self, actor: Actor[Any], error: BaseException | None) -> None:
        """The handler that this actor was in has ended."""
        ...


class System:
    """The parts that all actors of a runtime share."""

    def __init__(self, ports: Ports, limits: Limits, fail: Callable[[BaseException], None]) -> None:
        self.ports = ports
        self.now = ports.monotonic
        self.limits = limits
        self.clock = Clock(ports)
        self.pool = Pool()
        self.events = EventStream()
        self.dead_letters = DeadLetters(self.events, self.now)
        self.tracing: Tracing | None = None
        self.fail = fail
        """A failure that nobody below the runtime could answer for."""
        self.context: Context = copy_context()
        self.park: Park = _not_open
        self.checkpoint: Callable[[], Awaitable[object]] = partial(_not_open, None)
        self.call_soon: Callable[[Callable[[], None]], None] = _drop
        self.is_closing = False
        self.stuck: list[str] = []
        self.traits: dict[type, Traits] = {}
        self.no_traits = Traits(
            turn=run_turn,
            is_inline=False,
            has_on_start=False,
            has_on_stop=False,
            has_on_restart=False,
            stats=Stats(),
        )
        self._busy: dict[Cell, None] = {}
        self._drained: OneShot[None] | None = None
        self._inline = 0
        self._tasks: TaskGroup | None = None

    def open(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self.park = parking()
        self.checkpoint = checkpointing()
        self.pool.open(tasks)

    def start_soon(self, run: Callable[[*Args], Coroutine[Any, Any, None]], *args: *Args) -> None:
        """Run a task of the runtime's own; it is cancelled when the runtime closes."""
        assert self._tasks is not None, "the runtime has not been entered"
        self._tasks.start_soon(run, *args)

    async def sleep(self, seconds: float) -> None:
        gate: OneShot[None] = OneShot()
        alarm = self.clock.call_later(seconds, lambda: gate.set(None))
        try:
            await gate.wait()
        finally:
            alarm.cancel()

    # --- what is known of actors -----------------------------------------------------------------

    def traits_of(self, kind: type[Actor[Any]]) -> Traits:
        traits = self.traits.get(kind)
        if traits is None:
            traits = self.traits[kind] = _traits_of(kind)
        return traits

    def context_for(self, cell: Cell) -> ActorContext:
        from ._actor import ActorContext  # noqa: PLC0415 - it knows refs, which know cells

        return ActorContext(cell)

    def is_inline_due(self) -> bool:
        """Whether so many asks were answered inline that it is the neighbours' turn."""
        self._inline += 1
        if self._inline < _INLINE_MAX:
            return False
        self._inline = 0
        return True

    # --- reports ---------------------------------------------------------------------------------

    def report(self, report: Failure | RegionOverflow) -> None:
        self.events.publish(report)
        if isinstance(report, Failure):
            error = report.error
            if isinstance(error, OwnershipLost):
                # Nothing is wrong with this actor: what it would own, another process owns.
                logger.info(
                    "actor gave way to another owner",
                    actor=report.actor,
                    error=type(error).__name__,
                    decision=report.decision,
                    reason=str(error),
                )
                return
            logger.warning(
                "actor failed",
                actor=report.actor,
                error=type(error).__name__,
                decision=report.decision,
                exception="".join(format_exception(error)),  # without the locals: chat text
            )
        else:
            logger.warning(
                "region holds more active actors than it wants",
                region=report.region,
                active=report.active,
                active_max=report.active_max,
            )

    def said_stopped(self, cell: Cell, error: BaseException | None) -> None:
        """Tell the event stream and the watchers."""
        from ._ref import Ref  # noqa: PLC0415 - refs know cells, which know this

        self.events.publish(Stopped(cell.name, error))
        watchers = tuple(cell.watchers or ())
        cell.watchers = None
        if cell.region is not None:
            watchers += cell.region.watchers_of(cell.key)
        if watchers:
            notice = Terminated(Ref(cell, cell.region, cell.key), error)
            for watcher in watchers:
                watcher.notify(notice)

    def say_stuck(self, actor: str, doing: str) -> None:
        self.stuck.append(actor)
        self.events.publish(Stuck(actor, doing))
        logger.error(
            "actor stuck: it swallows its cancellation, is detached and may spin on",
            actor=actor,
            doing=doing,
        )

    # --- shutting down ---------------------------------------------------------------------------

    def is_busy(self, cell: Cell) -> None:
        self._busy[cell] = None

    def is_done(self, cell: Cell) -> None:
        self._busy.pop(cell, None)
        if not self._busy and self._drained is not None:
            self._drained.set(None)

    async def drained(self) -> None:
        """Wait until no actor has mail, or is at one."""
        if self._busy:
            self._drained = OneShot()
            await self._drained.wait()


async def _not_open(_: object) -> None:
    raise RuntimeError("a runtime is entered before it is used")


def _drop(_: Callable[[], None]) -> None:
    """Before the loop runs, and nobody holds anything that could call it."""


def _traits_of(kind: type[Actor[Any]]) -> Traits:
    from ._actor import Actor  # noqa: PLC0415 - it knows refs, which know cells

    is_batching = kind.receive_batch is not Actor.receive_batch
    return Traits(
        turn=run_batch if is_batching else run_turn,
        is_inline=not is_batching and not inspect.iscoroutinefunction(kind.receive),
        has_on_start=kind.on_start is not Actor.on_start,
        has_on_stop=kind.on_stop is not Actor.on_stop or kind.on_restart is not Actor.on_restart,
        has_on_restart=kind.on_restart is not Actor.on_restart or kind.on_stop is not Actor.on_stop,
        stats=Stats(),
    )
