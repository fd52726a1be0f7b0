"""Effects: work that an actor starts and does not wait for.

An effect runs on a worker of its own, in a copy of its actor's context. It keeps its actor from
being idle, ends with the incarnation that started it, and can reach the actor only through its
mailbox. If it raises, the actor fails. If it swallows its cancellation, it is given up as stuck.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import TYPE_CHECKING, Protocol

import anyio

from ._asking import in_effect
from ._failures import as_failure
from ._inside import run_inside
from ._reports import Failure
from ._world import World

if TYPE_CHECKING:
    from ._clock import Alarm
    from ._pool import Host, Step

__all__ = ["Effect", "EffectOwner"]


class EffectOwner(Protocol):
    """The incarnation that an effect belongs to, as the effect sees it."""

    @property
    def context(self) -> Context: ...

    @property
    def name(self) -> str: ...

    @property
    def system(self) -> World: ...

    def remove_effect(self, effect: Effect) -> None: ...

    def fail(self, error: BaseException, found: str) -> None: ...


async def _nothing() -> None:
    raise AssertionError("an effect that has ended was run again")


class Effect:
    """Work that an actor has started; returned by `start_effect`."""

    __slots__ = ("_alarm", "_context", "_ended", "_owner", "_run", "is_done", "name", "worker")

    def __init__(self, owner: EffectOwner, run: Callable[[], Awaitable[None]], name: str) -> None:
        self.name = name
        self.is_done = False
        self.worker: Host | None = None
        self._owner = owner
        self._run = run
        self._context: Context = owner.context.copy()
        self._context.run(in_effect.set, True)
        self._ended: anyio.Event | None = None
        self._alarm: Alarm | None = None
        owner.system.pool.submit(self)

    def __repr__(self) -> str:
        return f"Effect({self.name!r} of {self._owner.name!r})"

    @property
    def is_cancelled(self) -> bool:
        return self._alarm is not None

    def cancel(self) -> None:
        """Cancel the effect; return at once. The actor is not told."""
        if self.is_done or self.is_cancelled:
            return
        system = self._owner.system
        self._alarm = system.clock.call_later(system.limits.kill_s, self._give_up)
        if self.worker is not None:
            self.worker.kill()

    async def wait_until_ended(self) -> None:
        """Wait until the effect has ended or was given up as stuck."""
        if not self.is_done:
            if self._ended is None:
                self._ended = anyio.Event()
            await self._ended.wait()

    # --- as a job of the pool --------------------------------------------------------------------

    def step(self) -> Step:
        """Run the effect, unless it was cancelled before it began."""
        if self.is_done or self.is_cancelled:
            self._end()
            return False
        return self._run_to_its_end()

    async def _run_to_its_end(self) -> bool:
        try:
            await run_inside(self._context, self._awaited())
        except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
            owner = self._owner
            failure = as_failure(owner.name, error, self.worker, owner.system.report)
            if self.is_done:
                said = "its effect had been given up as stuck"
                owner.system.report(Failure(owner.name, failure, said))
            else:
                self._end()
                owner.fail(failure, f"its effect {self.name} failed in its clean-up")
        else:
            self._end()
        return False

    async def after_kill(self) -> bool:
        """End: the cancellation has gone through the effect."""
        self._end()
        return False

    async def _awaited(self) -> None:
        await self._run()

    def _end(self) -> None:
        if self.is_done:
            return
        self.is_done = True
        # `_run` most often refers to the actor, which refers to this effect: a reference cycle. An
        # actor may keep the effect for long; its context need not stay as long.
        self._run = _nothing
        del self._context
        if self._alarm is not None:
            self._alarm.cancel()
        if self._ended is not None:
            self._ended.set()
        self._owner.remove_effect(self)

    def _give_up(self) -> None:
        """Go on without the effect: it has swallowed its cancellation."""
        if not self.is_done:
            owner = self._owner
            owner.system.report_stuck(owner.name, f"in its effect {self.name}", self)
            self._end()
