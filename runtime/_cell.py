"""The cell: one actor's place in the runtime, which outlives each of its incarnations.

Owns an actor's mail, its current incarnation, and everything that incarnation has started:
effects, timers, children, unanswered asks. The per-message path is `_turn.py`; here is how a life
begins, fails, rests and ends.

Invariants:

1. At most one owner. A cell is at rest (no owner, no mail), or in the pool's queue, or in one
   worker's hands, or waiting to start again (backing off or held). Only the owner touches the
   actor.
2. There is no await between "there is no mail" and "at rest" or "gone from the directory", so
   mail either finds an owner or makes one.
3. Every ask ends: it is answered, or failed when its handler fails, or handed back when the cell
   stops, or failed when whoever deferred it is gone.
4. An ended cell is never touched again, not even by a handler that would not stop.

User code is bounded from outside, by alarms: past its patience it is cancelled, and when it
swallows that, the cell is given up as stuck, and its worker left to it until it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio

from ._backend import OneShot, uncancel
from ._drive import drive, drive_on
from ._mailbox import NO_MAIL, Mailbox, MailQueue
from ._messages import Ask, Firing, Item, Order
from ._pool import Resident
from ._reports import Failure, Restart
from ._supervision import RestartLog, Supervision, leaves
from ._turn import Outcome, leave_trace
from .errors import ActorFailed, TooManyRestarts, TurnkeeperError

if TYPE_CHECKING:
    from ._actor import Actor
    from ._clock import Alarm
    from ._effects import Effect
    from ._pool import Host, Step
    from ._ref import Ref
    from ._region import Region
    from ._supervisor import Supervisor
    from ._system import System, Traits
    from ._timers import Timer

__all__ = ["After", "Cell", "Phase", "Spec", "current_cell", "in_effect"]

current_cell: ContextVar[Cell] = ContextVar("turnkeeper_current_cell")
"""The actor on whose behalf this code runs: its handlers, its effects, tasks they started."""

in_effect: ContextVar[bool] = ContextVar("turnkeeper_in_effect", default=False)
"""Whether this code is an effect's: its actor does not wait for it."""


class Phase(Enum):
    LIVE = "live"
    BACKOFF = "backing off"
    """It failed, and starts again in a while. Mail waits, under the mailbox's own policy."""
    HELD = "held"
    """Its supervisor holds it until its siblings are ready. Mail waits."""
    REFUSING = "refusing"
    """It failed too often. Mail is refused for a while."""
    STOPPING = "stopping"
    """It takes no mail any more, and cleans up."""
    ENDED = "ended"


class After(Enum):
    """What follows when an incarnation has been cleaned up."""

    START = "start the next one"
    BACK_OFF = "start the next one in a while"
    HOLD = "wait until the supervisor releases it"
    PASSIVATE = "leave the directory, unless there is mail"
    REFUSE = "refuse all mail for a while"
    END = "stop for good"


@dataclass(frozen=True, slots=True)
class Spec:
    """How to keep one actor; shared by all of a region."""

    mailbox: Mailbox
    supervision: Supervision | None = None
    """Its own, in place of its supervisor's; None for most."""
    is_resident: bool = False


UNSTARTED: Final = object()
"""What a coroutine has yielded that has not begun."""

# A coroutine, what it yielded, when it began, and how many messages it handles. (Any: see _drive.)
Suspended: TypeAlias = tuple[Coroutine[Any, Any, object], object, float, int]


class Cell(MailQueue):
    """One actor's place: what a ref points to."""

    __slots__ = (
        "_alarm",
        "_call",
        "_call_scope",
        "_ended",
        "_killed_call",
        "_settlers",
        "_user_code",
        "_watchdog",
        "actor",
        "after",
        "asking",
        "at_rest",
        "backoff_log",
        "base_context",
        "batch",
        "children",
        "context",
        "current",
        "deferred",
        "delay_s",
        "effects",
        "error",
        "factory",
        "failed",
        "handled",
        "is_cleaning",
        "is_inline",
        "is_parked",
        "is_started",
        "key",
        "name",
        "order",
        "outcome",
        "own_log",
        "phase",
        "region",
        "restarts",
        "spec",
        "supervisor",
        "suspended",
        "system",
        "timers",
        "traits",
        "watchers",
        "worker",
    )

    def __init__(
        self,
        system: System,
        name: str,
        factory: Callable[[], Actor[Any]],
        spec: Spec,
        supervisor: Supervisor,
        *,
        base_context: Context,
        region: Region[Any] | None = None,
        key: str = "",
    ) -> None:
        # Written out, and not through super(): this runs once per actor.
        self.capacity = spec.mailbox.capacity
        self.control = self.mail = NO_MAIL
        self.waiting = None
        self.system = system
        self.name = name
        self.factory = factory
        self.spec = spec
        self.supervisor = supervisor
        self.base_context = base_context
        self.region = region
        self.key = key
        # The life of the cell
        self.phase = Phase.LIVE
        self.at_rest = self.is_parked = True
        self.worker: Host | None = None
        self.watchers: dict[Ref[Any], None] | None = None
        self.backoff_log: RestartLog | None = None
        self.own_log: RestartLog | None = None
        self.handled = self.failed = self.restarts = 0
        self.after = After.START
        self.delay_s = 0.0
        self._settlers: list[OneShot[None]] | None = None
        self._ended: anyio.Event | None = None
        self._alarm: Alarm | None = None
        self._watchdog: Alarm | None = None
        # The life of one incarnation
        self.actor: Actor[Any] | None = None
        self.context: Context | None = None
        self.traits: Traits = system.no_traits
        self.is_started = self.is_inline = self.is_cleaning = False
        self.children: Supervisor | None = None
        self.effects: dict[Effect, None] | None = None
        self.timers: dict[object, Timer] | None = None
        self.deferred: dict[Ask, None] | None = None
        self.asking: dict[Ask, Cell] | None = None
        # The turn that is going on, and how it ended
        self.outcome: Outcome | None = None
        self.current: Ask | None = None
        self.batch: list[Ask] | None = None
        self.suspended: Suspended | None = None
        self.error: BaseException | None = None
        self.order: Order | None = None
        # The call of user code that is going on
        self._user_code = ""
        self._call = 0
        self._killed_call = -1
        self._call_scope: anyio.CancelScope | None = None

    # --- what others do to a cell: put mail into it, give it orders ------------------------------

    def put(self, item: Item, *, control: bool = False) -> None:
        """Take an item, room or not, and see to it that somebody handles it."""
        if self.at_rest:
            self.unpark()
            self.submit()
        if control:
            self.push_control(item)
        else:
            self.mail.append(item)

    def wake_for(self, item: Item) -> None:
        """The short way from rest, for a cell that `is_parked`: take an item, find an owner."""
        self.at_rest = self.is_parked = False
        mail: deque[Item] = deque()
        mail.append(item)
        self.mail = mail
        if self.region is not None:
            self.region.woke(self)
        pool = self.system.pool
        if self.spec.is_resident:
            self.submit()
        else:
            pool.ready.append(self)
            if pool.runner is None:
                pool.elect()

    def unpark(self) -> None:
        """End the rest; the caller makes itself the owner, or submits."""
        self.at_rest = self.is_parked = False
        self.mail = deque()
        if self.region is not None:
            self.region.woke(self)
        if self.system.is_closing:
            self.capacity = self.spec.mailbox.capacity
            self.system.is_busy(self)

    def submit(self) -> None:
        """See to it that the owner steps it."""
        if not self.spec.is_resident:
            self.system.pool.submit(self)
        elif isinstance(self.worker, Resident):
            self.worker.wake()
        else:
            self.worker = self.system.pool.settle(self)

    def give_order(self, order: Order) -> None:
        """Have the owner obey before it handles another message; bounded by the watchdog."""
        if self.phase is Phase.ENDED or self.phase is Phase.STOPPING:
            return
        if self.at_rest:
            self.unpark()
            self.submit()
        elif self.phase is not Phase.LIVE and not self.is_cleaning:
            self._cancel_alarm()
            self.submit()
        self.push_control(order, first=True)
        self._watch(self.system.limits.stop_s)

    def request_stop(self, reason: str, error: BaseException | None = None) -> None:
        self.give_order(Order("stop", error, reason))

    async def stop(self, reason: str) -> None:
        """Stop it, and wait until it has ended; the watchdog sees to it that it does."""
        self.request_stop(reason)
        if self.system.pool.is_closed and self.phase is not Phase.ENDED:
            self.end(None)  # it was activated after the runtime was left: nobody would step it
        if self.phase is not Phase.ENDED:
            if self._ended is None:
                self._ended = anyio.Event()
            await self._ended.wait()

    async def hold(self) -> None:
        """Bring it to HELD: no incarnation, mail kept."""
        if self.phase is not Phase.HELD and self.phase is not Phase.ENDED:
            settled = self.when_settled()
            if not (self.is_cleaning and self.after is After.HOLD):  # else it is on its way
                self.give_order(Order("hold"))
            await settled.wait()

    def when_settled(self) -> OneShot[None]:
        """Done once it is held, or has started, or failed to, or ended, or decided to stay."""
        settled: OneShot[None] = OneShot()
        if self._settlers is None:
            self._settlers = []
        self._settlers.append(settled)
        return settled

    async def release(self) -> None:
        """End HELD, and wait until it has started, or failed to."""
        if self.phase is Phase.HELD:
            settled = self.when_settled()
            self._begin_again()
            await settled.wait()

    # --- the owner: one step after the other -----------------------------------------------------

    def step(self) -> Step:
        if self.suspended is not None and self.outcome is None:
            return self._resume(self.suspended)
        if self.is_started and not self.control and self.outcome is None:
            assert self.context is not None, f"{self.name} was started without a context"
            outcome = self.context.run(self.traits.turn, self)
        elif self.outcome is not None:  # a turn that was taken in an asker's stack
            outcome, self.outcome = self.outcome, None
        elif self.control and isinstance(order := self.control[0], Order):
            self.control.popleft()
            self.order = order
            outcome = Outcome.ORDERED
        elif self.phase is not Phase.LIVE:
            return False
        elif not self.is_started:
            return self.start()
        else:
            assert self.context is not None, f"{self.name} was started without a context"
            outcome = self.context.run(self.traits.turn, self)
        if outcome is Outcome.EMPTY:
            return self.rest()
        if outcome is Outcome.SPENT:
            return True
        if outcome is Outcome.UNATTENDED:
            return False
        return self._follow_slowly(outcome)

    def _resume(self, suspended: Suspended) -> Step:
        """Go on with a handler whose cell has been set; where it has not, a worker waits for it."""
        coroutine, awaited, began, count = suspended
        assert isinstance(awaited, OneShot), f"{self.name} was left alone with {awaited!r}"
        if not awaited.is_done:
            return self._follow_slowly(Outcome.SUSPENDED)
        assert self.context is not None, f"{self.name} was started without a context"
        self.suspended = None
        try:
            yielded = self.context.run(coroutine.send, None)
        except StopIteration as stop:
            self._handled(stop.value, began, count)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
            self.error = error
            return self._follow_slowly(Outcome.FAILED)
        else:
            if self.suspend(coroutine, yielded, began=began, count=count) is Outcome.SUSPENDED:
                return self._follow_slowly(Outcome.SUSPENDED)
            return False
        if self.mail or self.control or self.waiting is not None:
            return True
        return self.rest()

    def _go_on(self, _: None) -> None:
        """The one-shot cell that the handler waits for is set."""
        self.submit()

    def rest(self) -> bool:
        """Nothing to do. No await has happened since the mailbox was seen empty."""
        assert not self.mail, f"{self.name} rests with {len(self.mail)} messages"
        assert not self.control, f"{self.name} rests with {len(self.control)} control messages"
        assert self.waiting is None, f"{self.name} rests while senders wait for room"
        self.mail = self.control = NO_MAIL
        self.at_rest = self.is_parked = True
        if self.region is not None and self.is_idle:
            self.region.rests(self)
        if self.system.is_closing:
            self.close_intake()
            self.system.is_done(self)
        return False

    def close_intake(self) -> None:
        """From now on mail comes the long way, which asks who sends it."""
        if self.at_rest:
            # An idle cell has no lane to append to: no capacity keeps the short way off it.
            self.is_parked = False
            self.capacity = 0

    async def _follow_slowly(self, outcome: Outcome) -> bool:
        if outcome is Outcome.SUSPENDED:
            outcome = await self._finish_handler()
        if self.phase is Phase.ENDED:
            return False
        if outcome is Outcome.FAILED:
            error, self.error = self.error, None
            assert error is not None, f"{self.name} failed without an error"
            return await self._recover(self.as_failure(error, self.worker))
        if outcome is Outcome.ORDERED:
            return await self._obey()
        return True

    def suspend(
        self,
        coroutine: Coroutine[Any, Any, object],
        yielded: object = UNSTARTED,
        *,
        began: float,
        count: int = 1,
    ) -> Outcome:
        self.suspended = (coroutine, yielded, began, count)
        if type(yielded) is OneShot:
            yielded.wake = self._go_on
            return Outcome.UNATTENDED
        return Outcome.SUSPENDED

    async def _finish_handler(self) -> Outcome:
        assert self.suspended is not None, f"{self.name} resumes what was not suspended"
        coroutine, yielded, began, count = self.suspended
        context, self.suspended = self.context, None
        assert context is not None, f"{self.name} was started without a context"
        call = self._enter_user_code("handling a message")
        try:
            if not self.spec.is_resident:
                if yielded is UNSTARTED:
                    result = await drive(context, coroutine)
                else:
                    result = await drive_on(context, coroutine, yielded)
            else:
                # Its own scope, so that it can be cancelled alone: what the actor has opened
                # around its whole life must be closed in this very task, by `on_stop`.
                result = await self._in_scope(drive(context, coroutine))
        except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
            if self._is_too_late(error):
                return Outcome.EMPTY
            self.error = self.as_failure(error, self.worker)
            return Outcome.FAILED
        finally:
            self._leave_user_code(call)
        if self.phase is not Phase.ENDED:
            self._handled(result, began, count)
        return Outcome.SPENT

    def _handled(self, result: object, began: float, count: int) -> None:
        self.handled += count
        self.traits.stats.record((self.system.now() - began) / count, count)
        self._leave_trace(None)
        self.answered(result)

    async def _in_scope(self, call: Coroutine[Any, Any, object]) -> object:
        try:
            with anyio.CancelScope() as self._call_scope:
                return await call
        finally:
            self._call_scope = None
        raise self._was_killed()

    # --- beginning -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the actor now, in its parent's stack; whatever may wait is left to its owner."""
        if not self.spec.is_resident:
            self.error = self._make_actor()
            if self.error is None and not self.traits.has_on_start:
                self._has_started()
                return
        self.unpark()
        self.submit()

    def start(self) -> Step:
        """Start the actor; if nothing has to wait for that, go on with its mail."""
        if self.actor is None and self.error is None:
            self.error = self._make_actor()
        if self.error is not None:
            error, self.error = self.error, None
            return self._start_failed(error)
        if self.traits.has_on_start:
            return self._run_on_start()
        self._has_started()
        return self.step()

    def _make_actor(self) -> BaseException | None:
        context = self.context = self.base_context.copy()
        try:
            self.actor = context.run(_make, self)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
            return error
        self.traits = self.system.traits_of(type(self.actor))
        return None

    async def _run_on_start(self) -> bool:
        assert self.actor is not None, f"{self.name} is started before it is made"
        assert self.context is not None, f"{self.name} was started without a context"
        call = self._enter_user_code("starting")
        try:
            await drive(self.context, self.actor.on_start())
        except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
            if self._is_too_late(error):
                return False
            return await self._start_failed(error)
        finally:
            self._leave_user_code(call)
        if self.phase is not Phase.ENDED:
            self._has_started()
        return self.phase is Phase.LIVE

    def _has_started(self) -> None:
        self.is_started = True
        self.is_inline = self.traits.is_inline and not self.spec.is_resident
        if self.restarts:
            self.system.events.publish(Restart(self.name, self.restarts))
        self._settle()

    async def _start_failed(self, error: BaseException) -> bool:
        """Who waits hears it at once; the next start is the supervisor's to decide."""
        failure = self.as_failure(error, self.worker)
        self.actor = None
        self.return_mail(f"it could not start: {failure!r}", self.shown(failure))
        self._settle()
        return await self._recover(failure)

    # --- failing ---------------------------------------------------------------------------------

    def as_failure(self, error: BaseException, host: Host | None) -> BaseException:
        """The failure to supervise, found in the task of `host`.

        Raises what is not the actor's own: a cancellation from outside, an interrupt.
        """
        cancelled = anyio.get_cancelled_exc_class()
        found = tuple(leaves(error))
        if any(isinstance(leaf, KeyboardInterrupt | SystemExit | GeneratorExit) for leaf in found):
            raise error
        if not any(isinstance(leaf, cancelled) for leaf in found):
            return error
        rest = error.split(cancelled)[1] if isinstance(error, BaseExceptionGroup) else None
        if host is not None and host.is_killed:
            if rest is not None:
                self.system.report(Failure(self.name, rest, "its cancellation goes on"))
            raise next(leaf for leaf in found if isinstance(leaf, cancelled))
        # Nobody here cancelled it: some library did so natively, or a scope that the actor itself
        # holds open was cancelled. Either way it is this actor's failure, and nobody else's.
        uncancel()
        if rest is not None:
            return rest
        failure = ActorFailed(self.name, "its task was cancelled by neither it nor the runtime")
        failure.__cause__ = error
        return failure

    def _is_too_late(self, error: BaseException) -> bool:
        """Whether this is the end of a call that was given up as stuck; it is said, no more."""
        if self.phase is not Phase.ENDED:
            return False
        failure = self.as_failure(error, self.worker)
        self.system.report(Failure(self.name, failure, "it had been given up as stuck"))
        return True

    def shown(self, error: BaseException) -> BaseException:
        """What askers get: the five kinds as they are, everything else inside `ActorFailed`."""
        if isinstance(error, TurnkeeperError):
            return error
        wrapped = ActorFailed(self.name, f"it raised {type(error).__name__}")
        wrapped.__cause__ = error
        return wrapped

    async def _recover(self, error: BaseException) -> bool:
        self.failed += 1
        self._leave_trace(error)
        self._fail_current(self.shown(error))
        if self.control and isinstance(order := self.control[0], Order):
            # Whoever gave the order wants it gone, or held, however it fares.
            self.control.popleft()
            self.order = order
            self.system.report(Failure(self.name, error, "its supervisor had other plans"))
            return await self._obey()
        after, self.delay_s = self.supervisor.judge(self, error)
        said = "it goes on as it is" if after is None else after.value
        self.system.report(Failure(self.name, error, said))
        if after is None:
            return True
        return await self._clean_up(after, error)

    def _leave_trace(self, error: BaseException | None) -> None:
        if self.system.tracing is not None and self.context is not None:
            self.context.run(leave_trace, self, error)

    def _fail_current(self, error: BaseException) -> None:
        if self.current is not None:
            self.current.fail(error)
            self.current = None
        for ask in self.batch or ():
            ask.fail(error)
        self.batch = None

    # --- obeying ---------------------------------------------------------------------------------

    async def _obey(self) -> bool:
        order, self.order = self.order, None
        assert order is not None, f"{self.name} obeys no order"
        if order.kind == "fail":
            assert order.error is not None, "an order to fail says why"
            return await self._recover(order.error)
        if order.kind == "hold":
            return await self._clean_up(After.HOLD)
        if order.kind == "passivate":
            if self.mail or self.control or not self.is_quiet:
                self._unwatch()
                self._settle()
                return True
            return await self._clean_up(After.PASSIVATE)
        return await self._clean_up(After.END, order.error, order.reason)

    # --- ending an incarnation -------------------------------------------------------------------

    async def _clean_up(
        self, after: After, error: BaseException | None = None, reason: str = ""
    ) -> bool:
        """End this incarnation: what it started first, then itself."""
        self.after = after
        self.error = error
        self.is_cleaning = True
        self.is_inline = False
        if after is After.END:
            self.phase = Phase.STOPPING
            self.return_mail(reason or f"it has stopped: {error!r}")
        for timer in tuple((self.timers or {}).values()):
            timer.cancel()
        await self._end_offspring()
        if self.is_started and self.actor is not None:
            await self._run_last_hook(self.actor)
        return self._proceed()

    async def _end_offspring(self) -> None:
        """End its effects and children. Shielded; each of them is bounded by itself."""
        for effect in tuple(self.effects or ()):
            effect.cancel()
        if self.effects or self.children is not None:
            with anyio.CancelScope(shield=True):
                for effect in tuple(self.effects or ()):
                    await effect.ended()
                if self.children is not None:
                    await self.children.stop_children("its parent has stopped")
                    self.children = None

    async def _run_last_hook(self, actor: Actor[Any]) -> None:
        is_restart = self.after in (After.START, After.BACK_OFF, After.HOLD)
        failed_with = self.error if is_restart else None
        if failed_with is not None and self.traits.has_on_restart:
            hook = actor.on_restart(failed_with)
        elif self.traits.has_on_stop:
            hook = actor.on_stop()
        else:
            return
        assert self.context is not None, f"{self.name} was started without a context"
        self._unwatch()
        self._watch(self.system.limits.cleanup_s)
        call = self._enter_user_code("cleaning up")
        try:
            await drive(self.context, hook)
        except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
            if not self._is_too_late(error):
                self.failed += 1
                failure = self.as_failure(error, self.worker)
                self.system.report(Failure(self.name, failure, "it ends regardless"))
        finally:
            self._leave_user_code(call)

    async def after_kill(self) -> bool:
        """Our worker was cancelled: the handler, the start or the clean-up took too long."""
        if self.phase is Phase.ENDED:
            return False
        self._leave_user_code(self._call)
        if self.is_cleaning:
            await self._end_offspring()
            return self._proceed()
        error = self._was_killed()
        self._fail_current(error)
        if not self.is_started:
            self.actor = None
        if self.control and isinstance(order := self.control[0], Order):
            self.control.popleft()
            self.order = order
            return await self._obey()
        return await self._recover(error)

    def _was_killed(self) -> ActorFailed:
        return ActorFailed(self.name, "it was cancelled, for it did not end in time")

    def _proceed(self) -> bool:
        """The incarnation is over. No await here: mail stays in the cell, or the cell is gone."""
        if self.phase is Phase.ENDED:
            return False
        for ask in tuple(self.deferred or ()):
            ask.fail(ActorFailed(self.name, "it ended before it answered"))
        self.deferred = None
        self._fail_current(self._was_killed())
        self.actor = self.context = None
        self.is_started = self.is_cleaning = False
        self._unwatch()
        after, error, self.error = self.after, self.error, None
        if after is After.START:
            self.restarts += 1
            self.phase = Phase.LIVE
            return True
        if after is After.BACK_OFF:
            self.phase = Phase.BACKOFF
            self._alarm = self.system.clock.call_later(self.delay_s, self._backed_off)
        elif after is After.HOLD:
            self.phase = Phase.HELD
            self._settle()
        elif after is After.REFUSE:
            self.phase = Phase.REFUSING
            self.capacity = 0
            supervision = self.supervisor.supervision
            given_up = TooManyRestarts(self.name, supervision.restarts_max, supervision.window_s)
            given_up.__cause__ = error
            self.return_mail("it failed too often", given_up)
            self.error = given_up
            self._alarm = self.system.clock.call_later(self.delay_s, self._end_refusal)
        elif after is After.PASSIVATE and (self.mail or self.control or self.waiting is not None):
            self.phase = Phase.LIVE
            return True
        else:
            self.end(error, is_passivated=after is After.PASSIVATE)
            return False
        if self.control and isinstance(self.control[0], Order):
            self._cancel_alarm()
            return True
        return False

    def _backed_off(self) -> None:
        self._alarm = None
        self._begin_again()

    def _begin_again(self) -> None:
        self.restarts += 1
        self.phase = Phase.LIVE
        self.submit()

    def _end_refusal(self) -> None:
        self._alarm = None
        self.end(self.error)

    def end(self, error: BaseException | None, *, is_passivated: bool = False) -> None:
        """Gone: from the directory, from its supervisor, from memory."""
        self.phase = Phase.ENDED
        self.at_rest = self.is_parked = self.is_inline = False
        self.return_mail("it has stopped")
        self._unwatch()
        self._cancel_alarm()
        self.actor = self.context = self.error = None
        self.supervisor.ended(self)
        if not is_passivated:
            self.system.said_stopped(self, error)
        self._settle()
        if self._ended is not None:
            self._ended.set()
        if isinstance(self.worker, Resident):
            self.worker.end()
        if self.system.is_closing:
            self.system.is_done(self)

    def give_up(self) -> None:
        """It swallows its cancellation: it is detached, and its worker left to it."""
        doing = self._user_code
        error = ActorFailed(self.name, f"it is stuck {doing}: it swallows its cancellation")
        self._fail_current(error)
        for ask in tuple(self.deferred or ()):
            ask.fail(error)
        for effect in tuple(self.effects or ()):
            effect.cancel()
        if self.children is not None:
            self.children.request_stop("its parent is stuck")
        self.system.say_stuck(self.name, doing)
        self.end(error)

    # --- what mail comes to ----------------------------------------------------------------------

    def answered(self, result: object) -> None:
        """A handler has returned. What it left unanswered in a batch is now deferred."""
        if self.batch is not None:
            for ask in self.batch:
                if not ask.is_done:
                    self.defer(ask)
            self.batch = None
        elif self.current is not None:
            self.current.set(result)
            self.current = None

    def defer(self, ask: Ask) -> None:
        if self.deferred is None:
            self.deferred = {}
        self.deferred[ask] = None

    def is_answered(self, ask: Ask) -> None:
        """A deferred ask has its answer."""
        if self.deferred is not None and ask in self.deferred:
            del self.deferred[ask]
            self.maybe_idle()

    def return_mail(self, reason: str, error: BaseException | None = None) -> None:
        """Hand back all that waits: asks to their askers, the rest to the dead letters."""
        if self.phase is Phase.STOPPING or self.phase is Phase.ENDED:
            self.capacity = 0  # nothing more gets in by the short way
        orders: list[Order] = []
        for item in self.drain():
            if isinstance(item, Order):
                orders.append(item)
            elif not isinstance(item, Ask):
                if not isinstance(item, Firing):
                    self.system.dead_letters.add(item[0], self.name, reason)
            elif error is not None:
                item.fail(error)
            elif not item.is_done:
                item.return_to_sender(reason)
        if self.phase is Phase.ENDED:
            self.mail = self.control = NO_MAIL
        else:
            self.control.extend(orders)

    # --- rest ------------------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """Nothing that it has started is going on."""
        has_children = self.children is not None and self.children.children
        return not (self.effects or self.deferred or self.timers or has_children)

    @property
    def is_idle(self) -> bool:
        return self.at_rest and self.is_quiet

    @property
    def doing(self) -> str:
        """Which code of its user's it waits for; empty when for none."""
        return self._user_code

    def maybe_idle(self) -> None:
        if self.region is not None and self.is_idle:
            self.region.rests(self)

    # --- bounds on user code ---------------------------------------------------------------------

    def _enter_user_code(self, doing: str) -> int:
        self._call += 1
        self._user_code = doing
        return self._call

    def _leave_user_code(self, call: int) -> None:
        if call == self._call:
            self._user_code = ""

    def _watch(self, patience_s: float) -> None:
        if self._watchdog is None:
            self._watchdog = self.system.clock.call_later(patience_s, self._overdue)

    def _unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _overdue(self) -> None:
        self._watchdog = None
        if self.suspended is not None and isinstance(awaited := self.suspended[1], OneShot):
            # It waits unattended. A worker waits in its place, for the cancellation to end that.
            awaited.wake = None
            self.submit()
        if not self._user_code:
            # It waits for its effects or children, which have bounds of their own, or its turn.
            self._watch(self.system.limits.stop_s)
        elif self._killed_call == self._call:
            self.give_up()
        else:
            self._killed_call = self._call
            if self._call_scope is not None:
                self._call_scope.cancel()
            elif self.worker is not None:
                self.worker.kill()
            self._watch(self.system.limits.kill_s)

    def _cancel_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _settle(self) -> None:
        settlers, self._settlers = self._settlers, None
        for each in settlers or ():
            each.set(None)


def _make(cell: Cell) -> Actor[Any]:
    """Runs inside the actor's context, which every handler and effect of it shares."""
    current_cell.set(cell)
    actor = cell.factory()
    actor.context = cell.system.context_for(cell)
    return actor
