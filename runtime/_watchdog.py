"""The bounds on user code: it is cancelled after a while, and given up if that has no effect.

Owns the one alarm that a cell has armed. It bounds how long the current message may go on once the
cell is told to stop, how long a clean-up may take, and how long cancelled code may take to end.
Alarms run in the clock's task, so user code is bounded from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from ._world import World

if TYPE_CHECKING:
    import anyio

    from ._pool import Host

__all__ = ["UserCode", "Watchdog"]

_SOON_S: Final = 0.01


class UserCode:
    """One call of user code that a worker waits for: a handler, a start or a clean-up."""

    __slots__ = ("doing", "is_killed", "scope")

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self.is_killed = False
        self.scope: anyio.CancelScope | None = None
        """Cancels this call alone; a resident's handlers have one."""

    def kill(self, host: Host | None) -> None:
        """Cancel the call, which runs in the task of `host`."""
        self.is_killed = True
        if self.scope is not None:
            self.scope.cancel()
        elif host is not None:
            host.kill()


class Watched(Protocol):
    """The cell that a watchdog watches, as the watchdog sees it."""

    user_code: UserCode | None
    worker: Host | None
    watchdog: Watchdog | None

    @property
    def system(self) -> World: ...

    def attend(self) -> bool: ...

    def give_up(self, doing: str) -> None: ...


class Watchdog:
    """An armed bound on the user code of one cell."""

    __slots__ = ("_alarm", "_cell")

    def __init__(self, cell: Watched, patience_s: float) -> None:
        self._cell = cell
        self._arm(patience_s)

    def hurry(self, patience_s: float) -> None:
        """Run out in `patience_s` seconds, if that is sooner than before."""
        if self._alarm.when > self._cell.system.now() + patience_s:
            self._alarm.cancel()
            self._arm(patience_s)

    def disarm(self) -> None:
        """Stop bounding the cell's user code."""
        self._alarm.cancel()

    def _arm(self, patience_s: float) -> None:
        self._alarm = self._cell.system.clock.call_later(patience_s, self._run_out)

    def _run_out(self) -> None:
        cell = self._cell
        limits = cell.system.limits
        code = cell.user_code
        if cell.attend():
            self._arm(_SOON_S)
        elif code is None:
            # The cell waits for its effects or children, which have bounds of their own, or for the
            # end of its slice.
            self._arm(max(limits.stop_s, _SOON_S))
        elif code.is_killed:
            cell.watchdog = None
            cell.give_up(code.doing)
        else:
            code.kill(cell.worker)
            self._arm(limits.kill_s)
