"""Effects: work that an actor starts and does not wait for.

An effect runs on a worker of its own, in a copy of its actor's context. It keeps its actor from
being idle, ends with it, and can reach it only through its mailbox. One that raises fails the
actor; one that swallows its cancellation is given up as stuck.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import TYPE_CHECKING

import anyio

from ._cell import Phase, in_effect
from ._drive import drive
from ._messages import Order
from ._reports import Failure

if TYPE_CHECKING:
    from ._cell import Cell
    from ._clock import Alarm
    from ._pool import Host, Step

__all__ = ["Effect"]


class Effect:
    """Work that an actor has started; what `start_effect` returns."""

    __slots__ = ("_alarm", "_cell", "_context", "_ended", "_run", "is_done", "name", "worker")

    def __init__(self, cell: Cell, run: Callable[[], Awaitable[None]], name: str) -> None:
        assert cell.context is not None, f"{cell.name} starts an effect before it is made"
        self.name = name
        self.is_done = False
        self.worker: Host | None = None
        self._cell = cell
        self._run = run
        self._context: Context = cell.context.copy()
        self._context.run(in_effect.set, True)
        self._ended: anyio.Event | None = None
        self._alarm: Alarm | None = None
        if cell.effects is None:
            cell.effects = {}
        cell.effects[self] = None
        cell.system.pool.submit(self)

    @property
    def is_cancelled(self) -> bool:
        return self._alarm is not None

    def cancel(self) -> None:
        """Ask it to end; does not wait. Whoever it talks to last hears nothing of this."""
        if self.is_done or self.is_cancelled:
            return
        system = self._cell.system
        self._alarm = system.clock.call_later(system.limits.kill_s, self._is_stuck)
        if self.worker is not None:
            self.worker.kill()

    async def ended(self) -> None:
        if not self.is_done:
            if self._ended is None:
                self._ended = anyio.Event()
            await self._ended.wait()

    # --- as a job of the pool --------------------------------------------------------------------

    def step(self) -> Step:
        if self.is_done or self.is_cancelled:
            self._end()
            return False
        return self._live()

    async def _live(self) -> bool:
        try:
            await drive(self._context, self._awaited())
        except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
            cell = self._cell
            failure = cell.as_failure(error, self.worker)
            if self.is_done:
                cell.system.report(Failure(cell.name, failure, "its effect had been given up"))
            else:
                self._end()
                cell.give_order(Order("fail", failure))
        else:
            self._end()
        return False

    async def after_kill(self) -> bool:
        self._end()
        return False

    # --- its end ---------------------------------------------------------------------------------

    async def _awaited(self) -> None:
        await self._run()

    def _end(self) -> None:
        if self.is_done:
            return
        self.is_done = True
        if self._alarm is not None:
            self._alarm.cancel()
        if self._ended is not None:
            self._ended.set()
        cell = self._cell
        if cell.effects is not None:
            cell.effects.pop(self, None)
        if cell.phase is not Phase.ENDED:
            cell.maybe_idle()

    def _is_stuck(self) -> None:
        """It has swallowed its cancellation."""
        if self.is_done:
            return
        self._cell.system.say_stuck(self._cell.name, f"in its effect {self.name}")
        self._end()
