"""The world of the actors of one runtime: the clock, the workers, the limits, the reports.

Owns nothing about any single actor. `Runtime` opens and closes it. All of it belongs to the
runtime's loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from logging import WARNING
from threading import get_ident
from traceback import format_exception
from typing import Any, Protocol, TypeVarTuple

from ._backend import (
    OneShot,
    Park,
    Tasks,
    checkpointing,
    loop_clock,
    loop_marker,
    membership,
    parking,
    parking_behind,
    pausing,
)
from ._clock import Clock
from ._dead_letters import DeadLetters
from ._event_stream import EventStream
from ._hooks import Hooks
from ._logger import logger
from ._pool import Job, Pool
from ._reports import Failure, RegionOverflow, Stuck
from ._supervision import check_seconds
from .errors import OwnershipLost, Refused
from .ports import Ports, keeps_loop_time

__all__ = ["Limits", "Tracing", "World", "traceback_of"]

Args = TypeVarTuple("Args")


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in seconds."""

    drain_s: float
    stop_s: float
    cleanup_s: float
    kill_s: float

    def __post_init__(self) -> None:
        for name in ("drain_s", "stop_s", "cleanup_s", "kill_s"):
            check_seconds(name, getattr(self, name))


class Tracing(Protocol):
    """Follows a message from its sender into its handler; `otel.py` implements it."""

    def sent(self) -> object:
        """Return the trace to put into the envelope of a message that the running code sends."""
        ...

    def enter(self, actor: Hooks, message: object, trace: object, *, is_ask: bool) -> None:
        """Note that a handler begins. Runs inside its actor's context, as `leave` does."""
        ...

    def leave(self, actor: Hooks, error: BaseException | None) -> None:
        """Note that the actor's handler has ended."""
        ...


class World:
    """The parts that all actors of a runtime share."""

    def __init__(self, ports: Ports, limits: Limits, fail: Callable[[BaseException], None]) -> None:
        self.ports = ports
        self.now = ports.loop_time
        self.limits = limits
        self.events = EventStream()
        self.clock = Clock(ports, self._note_broken_alarm)
        self.pool = Pool(self.now)
        self.dead_letters = DeadLetters(self.events, self.now)
        self.tracing: Tracing | None = None
        self.when_open: list[Callable[[], None]] = []
        """Called in the loop as soon as it runs."""
        self.fail = fail
        """Ends the runtime with a failure that was escalated past the last supervisor."""
        self.context: Context = copy_context()
        self.park: Park = _not_open
        self.park_behind: Park = _not_open
        self.checkpoint: Callable[[], Awaitable[object]] = partial(_not_open, None)
        self.pause: Callable[[], Awaitable[object]] = self.checkpoint
        self.is_in_worker: Callable[[], bool] = bool
        """True in the task of a worker, and in the tasks that such a task waits for."""
        self.call_soon: Callable[[Callable[[], None]], bool] = _drop
        """Runs a function in the loop, from any thread; False once the loop is gone."""
        self.mark: Callable[[], object] = object
        """Returns the mark of the loop that it is called in; see `loop_marker`."""
        self.home: object = None
        """The mark of the runtime's loop."""
        self.home_thread = 0
        """The number of that loop's thread."""
        self.is_closing = False
        self._given_up: list[Job] = []
        """Jobs that swallowed their cancellation; some may have ended since."""
        self._tasks: Tasks | None = None

    def open(self, tasks: Tasks) -> None:
        """Begin: the loop runs, and tasks can be started in this group."""
        self._tasks = tasks
        if keeps_loop_time(self.ports):
            self.now = self.clock.now = self.pool.now = self.dead_letters.now = loop_clock()
        self.mark = loop_marker()
        self.home = self.mark()
        self.home_thread = get_ident()
        self.park = parking()
        self.park_behind = parking_behind()
        self.checkpoint = checkpointing()
        self.pause = pausing()
        self.is_in_worker = membership(self.pool.tasks)
        self.pool.open(tasks)
        for call in self.when_open:
            call()

    @property
    def is_open(self) -> bool:
        return self._tasks is not None

    @property
    def is_at_home(self) -> bool:
        """True in the runtime's loop."""
        return self.mark() == self.home

    def check_home(self, actor: str) -> None:
        """Raise `RuntimeError` if the caller is not in the runtime's loop."""
        if not self.is_at_home:
            raise RuntimeError(
                f"{actor} was called from another thread than its runtime's, or outside of its "
                "event loop; nothing happened; in other threads, and in loops that run there, use "
                "runtime.portal()"
            )

    def start_soon(self, run: Callable[[*Args], Coroutine[Any, Any, None]], *args: *Args) -> None:
        """Run a task of the runtime's own; it is cancelled when the runtime closes."""
        assert self._tasks is not None, "the runtime has not been entered"
        self._tasks.start_soon(run, *args)

    async def sleep(self, seconds: float) -> None:
        """Wait until `seconds` have passed on the runtime's clock."""
        gate: OneShot[None] = OneShot()
        alarm = self.clock.call_later(seconds, lambda: gate.set(None))
        try:
            await gate.wait()
        finally:
            alarm.cancel()

    def be_impatient(self) -> None:
        """From now on, cancel a handler at once when its actor is told to stop."""
        self.limits = replace(self.limits, stop_s=0.0)

    def report(self, report: Failure | RegionOverflow, *, is_refusing: bool = False) -> None:
        """Publish a report and log it.

        `is_refusing`: an actor of a region has refused to start, and its senders get the error.
        """
        self.events.publish(report)
        if isinstance(report, RegionOverflow):
            logger.warning(
                "region holds more active actors than it wants",
                region=report.region,
                active=report.active,
                active_max=report.active_max,
            )
        elif isinstance(report.error, OwnershipLost):
            # This is no fault of the actor: another process owns what the actor would own.
            logger.info(
                "actor gave way to another owner",
                actor=report.actor,
                error=type(report.error).__name__,
                decision=report.decision,
                reason=_text_of(report.error),
            )
        elif is_refusing and _is_invalid(report.error):
            # Nor is this: a caller asked for an actor under an invalid name.
            logger.info(
                "actor refused to start",
                actor=report.actor,
                error=type(report.error).__name__,
                reason=_text_of(report.error),
            )
        elif logger.is_enabled_for(WARNING):  # a traceback costs more than a restart
            logger.warning(
                "actor failed",
                actor=report.actor,
                error=type(report.error).__name__,
                decision=report.decision,
                exception=traceback_of(report.error),
            )

    @property
    def is_stuck(self) -> bool:
        """True if code that swallows its cancellation is still running."""
        self._given_up = [job for job in self._given_up if self.pool.is_running(job)]
        return bool(self._given_up)

    def report_stuck(self, actor: str, doing: str, job: Job) -> None:
        """Publish and log that the code of an actor, run by `job`, swallows its cancellation."""
        self._given_up.append(job)
        self.events.publish(Stuck(actor, doing))
        logger.error(
            "actor stuck: it swallows its cancellation, is detached and may still be running",
            actor=actor,
            doing=doing,
        )

    def _note_broken_alarm(self, error: Exception) -> None:
        self.report(Failure("", error, "an alarm failed, which is a bug; the clock goes on"))


def _text_of(error: BaseException) -> str:
    """Return an error's text. The error's own code makes the text, and may raise."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - a report must not become a failure of its own
        return f"(its text could not be made: {type(broken).__name__})"


def traceback_of(error: BaseException) -> str:
    """Return an error's traceback, without the values of locals, which may be chat text."""
    try:
        return "".join(format_exception(error))
    except Exception as broken:  # noqa: BLE001 - as above; groups may be too deep, too
        return f"(its traceback could not be made: {type(broken).__name__})"


def _is_invalid(error: BaseException) -> bool:
    """True if a request was refused for an invalid argument, which its sender must correct."""
    return isinstance(error, Refused) and isinstance(error, ValueError)


async def _not_open(_: object) -> None:
    raise RuntimeError("the runtime has not been entered: use `async with` first")


def _drop(_: Callable[[], None]) -> bool:
    """Do nothing: the loop does not run yet, so nothing can need a call in it."""
    return False
