"""An actor's timers: messages that it sends itself later.

They are gone with the incarnation that armed them. A timer's message never waits for room; what
was cancelled or replaced after it fired, but before it was handled, is not handled; and a periodic
timer whose last message still waits does not add another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._messages import Firing

if TYPE_CHECKING:
    from ._cell import Cell
    from ._clock import Alarm

__all__ = ["Timer", "Timers"]


class Timer:
    """One timer; `cancel` it, or arm another under its key."""

    __slots__ = ("_alarm", "_cell", "_firing", "_interval_s", "_message", "key")

    def __init__(
        self, cell: Cell, message: object, delay_s: float, interval_s: float | None, key: object
    ) -> None:
        self._cell = cell
        self._message = message
        self._interval_s = interval_s
        self.key = key
        self._firing: Firing | None = None
        self._alarm: Alarm = cell.system.clock.call_later(delay_s, self._fire)

    def cancel(self) -> None:
        """It fires no more, and what it has fired is not handled any more."""
        self._alarm.cancel()
        if self._firing is not None:
            self._firing.is_due = False
        self._forget()

    def _fire(self) -> None:
        cell = self._cell
        once = self._interval_s is None
        if self._firing is None or not self._firing.is_due:
            self._firing = Firing(self._message, cell.system.now(), self._forget if once else None)
            cell.put(self._firing)
        if self._interval_s is not None:
            self._alarm = cell.system.clock.call_later(self._interval_s, self._fire)

    def _forget(self) -> None:
        timers = self._cell.timers
        if timers is not None and timers.get(self.key) is self:
            del timers[self.key]
            self._cell.maybe_idle()


class Timers:
    """The timers of one actor, each under a key; arming a key again replaces what it held."""

    __slots__ = ("_cell",)

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def once(self, delay_s: float, message: object, *, key: object = None) -> Timer:
        """Send the message to the actor itself after a while."""
        return self._arm(delay_s, message, None, key)

    def periodic(self, interval_s: float, message: object, *, key: object = None) -> Timer:
        """Send the message every so often, the first time after one interval."""
        if interval_s <= 0:
            raise ValueError(f"a period is longer than {interval_s} s")
        return self._arm(interval_s, message, interval_s, key)

    def cancel(self, key: object) -> None:
        """Cancel the timer under this key, if there is one."""
        timer = (self._cell.timers or {}).get(key)
        if timer is not None:
            timer.cancel()

    def _arm(self, delay_s: float, message: object, interval_s: float | None, key: object) -> Timer:
        cell = self._cell
        if cell.timers is None:
            cell.timers = {}
        timer = Timer(cell, message, delay_s, interval_s, key)
        if key is None:
            key = timer.key = timer
        self.cancel(key)
        cell.timers[key] = timer
        return timer
