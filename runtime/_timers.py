"""An actor's timers: messages that it sends itself later.

They end with the incarnation that armed them. A timer's message never waits for room. If a timer
is cancelled or replaced after it fired, but before its message was handled, the message is not
handled. A periodic timer whose last message still waits does not add another.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from ._messages import Firing
from ._world import World

if TYPE_CHECKING:
    from ._clock import Alarm

__all__ = ["Timer", "TimerOwner", "Timers"]


class TimerOwner(Protocol):
    """The incarnation that a timer belongs to, as the timer sees it."""

    timers: dict[object, Timer] | None

    @property
    def name(self) -> str: ...

    @property
    def system(self) -> World: ...

    def check_open(self, attempt: str) -> None: ...

    def remove_timer(self, timer: Timer) -> None: ...

    def receive_firing(self, firing: Firing) -> None: ...


class Timer:
    """One timer. `cancel` ends it, and so does arming another one under its key."""

    __slots__ = ("_alarm", "_firing", "_interval_s", "_message", "_owner", "key")

    def __init__(
        self,
        owner: TimerOwner,
        message: object,
        delay_s: float,
        interval_s: float | None,
        key: object,
    ) -> None:
        self._owner = owner
        self._message = message
        self._interval_s = interval_s
        # Not the timer itself: only the garbage collector frees a circle of references.
        self.key = object() if key is None else key
        self._firing: Firing | None = None
        self._alarm: Alarm = owner.system.clock.call_later(delay_s, self._fire)

    def cancel(self) -> None:
        """Keep the timer from firing, and its message from being handled if it has fired."""
        self._alarm.cancel()
        if self._firing is not None:
            self._firing.is_due = False
            self._firing = None  # it refers to this
        self._forget()

    def _fire(self) -> None:
        owner = self._owner
        once = self._interval_s is None
        if self._firing is None or not self._firing.is_due:
            forget = self._forget if once else None
            self._firing = Firing(self._message, owner.system.now(), forget)
            owner.receive_firing(self._firing)
        if self._interval_s is not None:
            self._alarm = owner.system.clock.call_later(self._interval_s, self._fire)

    def _forget(self) -> None:
        self._owner.remove_timer(self)


class Timers:
    """The timers of one actor, each under a key; arming a key again replaces its timer."""

    __slots__ = ("_owner",)

    def __init__(self, owner: TimerOwner) -> None:
        self._owner = owner

    def once(self, delay_s: float, message: object, *, key: object = None) -> Timer:
        """Send the message to the actor itself in `delay_s` seconds.

        Raises `ActorEnded` once the actor has begun to end.
        """
        return self._arm(delay_s, message, None, key)

    def periodic(self, interval_s: float, message: object, *, key: object = None) -> Timer:
        """Send the message every `interval_s` seconds, the first time after one interval.

        Raises `ActorEnded` once the actor has begun to end.
        """
        if interval_s <= 0:
            raise ValueError(f"interval_s must be more than 0, got {interval_s}")
        return self._arm(interval_s, message, interval_s, key)

    def cancel(self, key: object) -> None:
        """Cancel the timer under this key, if there is one."""
        timer = (self._owner.timers or {}).get(key)
        if timer is not None:
            timer.cancel()

    def _arm(self, delay_s: float, message: object, interval_s: float | None, key: object) -> Timer:
        if math.isnan(delay_s + 0.0):  # the sum raises `TypeError` for anything but a number
            raise ValueError("the delay of a timer must be a number of seconds, got nan")
        owner = self._owner
        owner.check_open("arm a timer")
        # A key that cannot be hashed raises here, before an alarm that nothing could cancel.
        replaced = (owner.timers or {}).get(key)
        timer = Timer(owner, message, delay_s, interval_s, key)
        if replaced is not None:
            replaced.cancel()
        if owner.timers is None:
            owner.timers = {}
        owner.timers[timer.key] = timer
        return timer
