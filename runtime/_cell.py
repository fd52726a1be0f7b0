"""The cell: one actor's place in the runtime, which outlives each of its incarnations.

Owns an actor's mail, its phase and its current incarnation. `_incarnation.py` holds everything
that the actor has started, `_slice.py` is the path of each message, `_lifecycle.py` is the table
of phases. This module makes an incarnation begin, rest, fail and end; `Cell.step` is its heart.

Invariants:

1. At most one runner, the task that steps the cell. A cell is at rest (no runner, no mail), or in
   the pool's queue, or in one worker's hands, or waiting to start again. Only the runner touches
   the actor.
2. There is no await between "there is no mail" and "at rest" or "gone from the directory", so
   mail either finds a runner or makes one.
3. Every ask ends: it is answered, or failed when its handler fails, or handed back when the cell
   stops, or failed when the incarnation that deferred it ends.
4. An ended cell is never touched again, not even by a handler that was given up as stuck.

A watchdog bounds user code from outside: it cancels code that takes too long. If the code swallows
that, the watchdog gives the cell up as stuck, and the code keeps its worker until it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, assert_never

import anyio

from ._asking import current_actor, in_effect
from ._backend import OneShot
from ._failures import as_failure, error_for_asker
from ._hooks import NO_TRAITS
from ._incarnation import UNANSWERED, Incarnation
from ._inside import run_inside
from ._lifecycle import ENDED, LIVE, After, Phase, is_over, is_waiting, phase_after, transition
from ._mailbox import NO_MAIL, Mailbox, MailboxSettings
from ._messages import Ask, Delivery, Firing, Item, Order, OrderKind
from ._pool import Resident
from ._reports import Failure, Restart, Stopped
from ._resumption import UNSTARTED, attend, finish, is_due, leave_to
from ._slice import (
    EMPTY,
    FAILED,
    ORDERED,
    SPENT,
    SUSPENDED,
    UNATTENDED,
    Outcome,
    leave_trace,
    run_batch,
    run_slice,
)
from ._supervision import RestartLog, Supervision
from ._watchdog import UserCode, Watchdog
from .errors import ActorFailed, Refused, TooManyRestarts, TurnkeeperError

if TYPE_CHECKING:
    from ._asking import Party
    from ._clock import Alarm
    from ._hooks import Factory, Hooks, Traits
    from ._parent import Parent
    from ._pool import Host, Step
    from ._system import System

__all__ = ["WAITS_FOR_ASKER", "Cell", "Directory", "Spec", "Watcher"]

WAITS_FOR_ASKER: Final = "it is ending, and waits for its asker to end first"
_KILLED: Final = "it was cancelled because it did not end in time"


@dataclass(frozen=True, slots=True)
class Spec:
    """The settings of one actor; all actors of a region share one."""

    mailbox: MailboxSettings
    supervision: Supervision | None = None
    """The actor's own; None: its supervisor's."""
    is_resident: bool = False


@dataclass(slots=True)
class Ending:
    """A clean-up of an incarnation that has begun and not ended."""

    after: After
    """Tells what the cell does next."""
    delay_s: float
    error: BaseException | None
    """The failure that ends the incarnation; None if an order does."""
    patient_until: float
    """When, by the loop's clock, handlers of the actors below it are cancelled."""
    is_hook_begun: bool = False


class Watcher(Protocol):
    """The ref of an actor that watches; `target` is the ref under which it watches."""

    def notify_end(self, target: object, error: BaseException | None) -> None: ...


class Directory(Protocol):
    """The region of a cell, as the cell sees it."""

    spare_contexts: deque[Context]
    """Contexts that idle actors have dropped, for the actors that get mail next."""

    def note_woken(self, cell: Cell) -> None: ...

    def note_resting(self, cell: Cell) -> None: ...

    def take_watchers(self, key: str) -> Mapping[Watcher, object]: ...


class Cell(Mailbox):
    """One actor's place in the runtime; the actor's refs point to it."""

    __slots__ = (
        "_alarm",
        "_settlers",
        "asking",
        "at_rest",
        "backoff_log",
        "base_context",
        "batch",
        "began",
        "current",
        "directory",
        "ending",
        "error",
        "factory",
        "failed",
        "handled",
        "is_inline",
        "is_parked",
        "key",
        "life",
        "name",
        "order",
        "outcome",
        "own_log",
        "parent",
        "phase",
        "restarts",
        "spec",
        "suspended",
        "system",
        "traits",
        "user_code",
        "watchdog",
        "watchers",
        "worker",
        "yielded",
    )

    def __init__(
        self,
        system: System,
        name: str,
        factory: Factory,
        spec: Spec,
        parent: Parent,
        *,
        base_context: Context,
        directory: Directory | None = None,
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
        self.parent = parent
        self.base_context = base_context
        self.directory = directory
        self.key = key
        # The cell
        self.phase = Phase.STARTING
        self.at_rest = self.is_parked = True
        """Parked: at rest, and mail may come the short way; see `close_short_way`."""
        self.worker: Host | None = None
        self.watchers: dict[Watcher, object] | None = None
        self.backoff_log: RestartLog | None = None
        self.own_log: RestartLog | None = None
        self.handled = self.failed = self.restarts = 0
        self._settlers: list[OneShot[None]] | None = None
        self._alarm: Alarm | None = None
        # Its current incarnation, and the facts about the actor's class
        self.life: Incarnation | None = None
        self.traits: Traits = NO_TRAITS
        self.is_inline = False
        self.ending: Ending | None = None
        # The current slice, and how it ended
        self.outcome: Outcome | None = None
        self.current: Ask | None = None
        self.batch: Sequence[Delivery[Any]] | None = None
        self.suspended: Coroutine[Any, Any, object] | None = None
        """The handler that waits, or that has not been stepped yet."""
        self.yielded: object = None
        """The object that it waits for, as its coroutine yielded it."""
        self.began = 0.0
        """When the handler that was suspended last began, by the loop's clock."""
        self.error: BaseException | None = None
        """The failure of the slice; while the cell refuses mail, the failure that led to that."""
        self.order: Order | None = None
        self.asking: dict[Ask, Party] | None = None
        # The call of user code that a worker waits for, and its bound
        self.user_code: UserCode | None = None
        self.watchdog: Watchdog | None = None

    # --- for others: mail and orders -------------------------------------------------------------

    def put(self, item: Item, *, control: bool = False) -> None:
        """Queue an item whether there is room or not; make sure that a runner comes."""
        if self.at_rest:
            self.unpark()
            self.submit()
        if control:
            self.push_control(item)
        else:
            self.mail.append(item)

    def wake_for(self, item: Item) -> None:
        """Do as `put`, the short way: for a cell that `is_parked`."""
        self.at_rest = self.is_parked = False
        system = self.system
        spare = system.spare_lanes
        self.mail = mail = spare.pop() if spare else deque()
        mail.append(item)
        if self.directory is not None:
            self.directory.note_woken(self)
        pool = system.pool
        if self.spec.is_resident:
            self.submit()
        else:
            pool.ready.append(self)
            if pool.dispatcher is None:
                pool.elect()

    def unpark(self) -> None:
        """End the cell's rest; the caller has to become the runner, or submit the cell."""
        self.at_rest = self.is_parked = False
        spare = self.system.spare_lanes
        self.mail = spare.pop() if spare else deque()
        if self.directory is not None:
            self.directory.note_woken(self)
        if self.system.is_closing:
            self.capacity = self.spec.mailbox.capacity
            self.system.note_busy(self)

    def submit(self) -> None:
        """Make a runner step the cell soon."""
        if not self.spec.is_resident:
            self.system.pool.submit(self)
        elif isinstance(self.worker, Resident):
            self.worker.wake()
        else:
            self.worker = self.system.pool.start_resident(self)

    def set_result(self, _: None, /) -> None:
        """Have a worker step the cell: the one-shot that its handler waits for is set.

        This method makes the cell the `Waker` of that one-shot. The handler of a resident waits in
        its own task, so a resident's cell is never a `Waker`.
        """
        self.system.pool.submit(self)

    def give_order(self, order: Order) -> None:
        """Have the runner obey before it handles another message, within a bounded time."""
        if is_over(self.phase):
            return
        if self.at_rest:
            self.unpark()
            self.submit()
        elif is_waiting(self.phase):
            self._cancel_alarm()
            self.submit()
        self.push_control(order, first=True)
        now = self.system.now()
        if order.patient_until is None:
            order.patient_until = now + self.system.limits.stop_s
        self._watch(max(0.0, order.patient_until - now))

    def request_stop(self, reason: str, *, patient_until: float | None = None) -> None:
        """Stop the actor after its current message; return at once."""
        self.system.check_home(self.name)
        if self.at_rest and self._has_nothing_to_clean_up:
            self.phase = transition(self.phase, Phase.STOPPING)
            self.end(None)
            return
        self.give_order(Order(OrderKind.STOP, None, reason, patient_until=patient_until))

    async def stop(self, reason: str, *, patient_until: float | None = None) -> None:
        """Stop the actor and wait until it has ended; its watchdog bounds that."""
        self.request_stop(reason, patient_until=patient_until)
        if self.system.pool.is_closed and self.phase is not ENDED:
            self.end(None)  # it was activated after the runtime was left: it has no runner
        while self.phase is not ENDED:
            await self.when_settled().wait()

    async def hold(self) -> None:
        """Bring the cell to HELD (no incarnation, mail kept) and wait until it is."""
        # A cell that is starting settles once when it has started, and again when it is held.
        while self.phase is not Phase.HELD and self.phase is not ENDED:
            settled = self.when_settled()
            if not self._is_going_to_hold:
                self.give_order(Order(OrderKind.HOLD))
            await settled.wait()

    @property
    def _is_going_to_hold(self) -> bool:
        if self.ending is not None and self.ending.after is After.HOLD:
            return True
        return any(isinstance(each, Order) and each.kind is OrderKind.HOLD for each in self.control)

    def when_settled(self) -> OneShot[None]:
        """Return a one-shot that is set when the cell next starts, fails to start, is held or ends.

        It is also set if the cell does not passivate after all. If the cell is then not in the
        phase that the caller waits for, ask for another one-shot.
        """
        settled: OneShot[None] = OneShot()
        if self._settlers is None:
            self._settlers = []
        self._settlers.append(settled)
        return settled

    async def release(self) -> None:
        """End HELD, and wait until the cell has started or failed to start.

        If the cell has yet to reach HELD, wait for that first.
        """
        if self._is_going_to_hold:
            await self.hold()
        if self.phase is Phase.HELD:
            settled = self.when_settled()
            self._begin_again()
            await settled.wait()

    def hurry(self) -> None:
        """Cancel the current message now: the runtime was told to stop at once."""
        if self.watchdog is not None and self.ending is None:
            self.watchdog.hurry(0.0)

    def close_short_way(self) -> None:
        """Have all mail go the long way, which checks its sender: the runtime is closing."""
        if self.at_rest:
            # The short way looks at these two.
            self.is_parked = False
            self.capacity = 0

    # --- for the runner: one step after the other ------------------------------------------------

    def step(self) -> Step:
        """Take the next step: a slice, an order, a start, or the rest of something suspended."""
        if self.outcome is not None:
            # A slice that ran in an asker's stack, or that was killed late, left its outcome.
            outcome, self.outcome = self.outcome, None
        elif self.suspended is not None:
            return self._resume()
        elif self.phase is LIVE:
            life = self.life
            assert life is not None, f"{self.name} is live without an incarnation"
            run = run_batch if self.traits.is_batching else run_slice
            outcome = life.context.run(run, self, life)
        elif self.ending is not None:
            return self._continue_clean_up(self.ending)
        elif self.control and isinstance(order := self.control[0], Order):
            self.control.popleft()
            self.order = order
            outcome = ORDERED
        elif self.phase is Phase.STARTING:
            return self.start()
        else:
            return False
        if outcome is EMPTY:
            return self.rest()
        if outcome is SPENT:
            return True
        if outcome is UNATTENDED:
            return False
        return self._follow_up(outcome)

    def _resume(self) -> Step:
        """Step a handler whose one-shot is set; if it is not set, have a worker wait for it."""
        if not is_due(self.yielded):
            return self._follow_up(SUSPENDED)
        handler, _, life = self._take_suspended()
        try:
            # The context has no name here: an actor at rest drops it only if no frame refers to it.
            yielded = life.context.run(handler.send, None)
        except StopIteration as stop:
            self._note_handled(stop.value)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
            if not self._is_answer(error):
                self.error = error
                return self._follow_up(FAILED)
            self._note_refused(error)
        else:
            if self._leave_handler(handler, yielded):
                return False
            return self._follow_up(SUSPENDED)
        if self.mail or self.control or self.waiting is not None:
            return True
        return self.rest()

    def rest(self) -> bool:
        """Do nothing until mail comes. No await may come between an empty mailbox and this call."""
        mail, system = self.mail, self.system
        assert not mail, f"{self.name} rests with {len(mail)} messages"
        assert not self.control, f"{self.name} rests with {len(self.control)} control messages"
        assert self.waiting is None, f"{self.name} rests while senders wait for room"
        if mail is not NO_MAIL:
            system.spare_lanes.append(mail)
        self.mail = self.control = NO_MAIL
        self.at_rest = self.is_parked = True
        if self.directory is not None and self.is_quiet:
            self._become_idle(self.directory)
        if system.is_closing:
            self.close_short_way()
            system.note_done(self)
        return False

    async def _follow_up(self, outcome: Outcome) -> bool:
        """Do the part of a step that may wait: finish a handler, recover, or obey."""
        if outcome is SUSPENDED:
            outcome = await self._finish_handler()
            if outcome is FAILED and self.worker is not None and self.worker.is_killed:
                # It failed by itself in the step in which it was cancelled. Its clean-up may not
                # await inside the cancelled scope: leave that first.
                self.outcome = outcome
                return True
        if self.phase is ENDED:
            return False
        if outcome is FAILED:
            error, self.error = self.error, None
            assert error is not None, f"{self.name} failed without an error"
            return await self._recover(self._as_failure(error))
        if outcome is ORDERED:
            return await self._obey()
        return True

    def suspend(
        self,
        coroutine: Coroutine[Any, Any, object],
        yielded: object = UNSTARTED,
        *,
        began: float,
    ) -> Outcome:
        """Leave a handler until its one-shot is set, if it waits for one; else a worker waits."""
        self.began = began
        return UNATTENDED if self._leave_handler(coroutine, yielded) else SUSPENDED

    def _leave_handler(self, handler: Coroutine[Any, Any, object], yielded: object) -> bool:
        """Suspend a handler; False if it needs a task to wait in."""
        self.suspended, self.yielded = handler, yielded
        return leave_to(self, yielded)

    def _take_suspended(self) -> tuple[Coroutine[Any, Any, object], object, Incarnation]:
        """Return the suspended handler, what it has yielded, and its incarnation."""
        handler, yielded, life = self.suspended, self.yielded, self.life
        assert handler is not None, f"{self.name} resumes what was not suspended"
        assert life is not None, f"{self.name} resumes a handler without an incarnation"
        self.suspended = self.yielded = None
        return handler, yielded, life

    async def _finish_handler(self) -> Outcome:
        handler, yielded, life = self._take_suspended()
        rest = finish(handler, yielded, life.context)
        del yielded  # an error's traceback holds this frame, as in `go_on_inside`
        code = self.user_code = UserCode("handling a message")
        try:
            if self.spec.is_resident:
                # A scope of its own, so that it can be cancelled alone: `on_stop` has to close, in
                # this very task, what the actor has opened for its whole life.
                result = await self._finish_in_scope(rest, code)
            else:
                result = await rest
        except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
            if self._note_late_end(error):
                return EMPTY
            if not self._is_answer(error):
                self.error = self._as_failure(error)
                return FAILED
            self._note_refused(error)
            return SPENT
        finally:
            self._leave_user_code(code)
        if self.phase is not ENDED:
            self._note_handled(result)
        return SPENT

    async def _finish_in_scope(self, rest: Awaitable[object], code: UserCode) -> object:
        try:
            with anyio.CancelScope() as code.scope:
                return await rest
        finally:
            code.scope = None
        raise ActorFailed(self.name, _KILLED)

    def _note_handled(self, result: object) -> None:
        self._count_handled()
        if (batch := self.batch) is not None:
            self.settle_batch(batch)
        elif self.current is not None:
            self.current.set(result)
            self.current = None

    def _is_answer(self, error: BaseException) -> bool:
        """True if `receive` has refused its message, which is no failure."""
        return isinstance(error, Refused) and self.batch is None

    def _note_refused(self, refusal: BaseException) -> None:
        self._count_handled()
        if self.current is not None:
            self.current.fail(refusal)
            self.current = None

    def _count_handled(self) -> None:
        count = 1 if self.batch is None else len(self.batch)
        self.handled += count
        self.traits.stats.record(self.system.now() - self.began, count)
        if self.system.tracing is not None:
            self._leave_trace(None)

    def settle_batch(self, batch: Sequence[Delivery[Any]]) -> None:
        """Defer the asks that a batch handler has left unanswered."""
        self.batch = None
        for delivery in batch:
            delivery.defer()

    # --- beginning -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the actor now, in its parent's stack; leave all that may wait to its runner."""
        if not self.spec.is_resident:
            self.error = self._make_actor()
            if self.error is None and not self.traits.has_on_start:
                self._become_live()
                return
        self.unpark()
        self.submit()

    def start(self) -> Step:
        """Start the actor; if that need not wait, handle its mail in the same step."""
        if self.life is None and self.error is None:
            self.error = self._make_actor()
        if self.error is not None:
            error, self.error = self.error, None
            return self._start_failed(error)
        life = self.life
        assert life is not None, f"{self.name} is started before it is made"
        if self.traits.has_on_start:
            return self._run_on_start(life)
        self._become_live()
        return self.step()

    def _make_actor(self) -> BaseException | None:
        life = Incarnation(self)
        try:
            actor = life.context.run(_make, self, life)
            traits = self.system.traits_of(type(actor))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
            life.end()
            return error
        self.life = life
        self.traits = traits
        return None

    def new_context(self) -> Context:
        """Return a copy of `base_context` in which this actor is the running one.

        A thousand actors may wait at once, each with its context. To take one that another actor
        has dropped saves three new objects, and so collections of garbage.
        """
        spare = None if self.directory is None else self.directory.spare_contexts
        context = spare.pop() if spare else self.base_context.copy()
        context.run(current_actor.set, self)
        if context.get(in_effect):
            context.run(in_effect.set, False)
        return context

    async def _run_on_start(self, life: Incarnation) -> bool:
        assert life.actor is not None, f"{self.name} is started before it is made"
        code = self.user_code = UserCode("starting")
        try:
            await run_inside(life.context, life.actor.on_start())
        except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
            if self._note_late_end(error):
                return False
            return await self._start_failed(error)
        finally:
            self._leave_user_code(code)
        if self.phase is ENDED:
            return False
        self._become_live()
        return True

    def _become_live(self) -> None:
        self.phase = transition(self.phase, LIVE)
        self.is_inline = self.traits.is_inline and not self.spec.is_resident
        if self.restarts:
            self.system.events.publish(Restart(self.name, self.restarts))
        self._wake_settlers()

    async def _start_failed(self, error: BaseException) -> bool:
        """Tell those who wait; then have the supervisor decide about the next start."""
        failure = self._as_failure(error)
        reason = f"it could not start: {type(failure).__name__}"
        self.return_mail(reason, failure)
        self._wake_settlers()
        return await self._recover(failure)

    # --- failing ---------------------------------------------------------------------------------

    def _as_failure(self, error: BaseException) -> BaseException:
        return as_failure(self.name, error, self.worker, self.system.report)

    def _note_late_end(self, error: BaseException) -> bool:
        """If this call was given up as stuck meanwhile, report its end and return True."""
        if self.phase is not ENDED:
            return False
        failure = self._as_failure(error)
        self.system.report(Failure(self.name, failure, "it had been given up as stuck"))
        return True

    async def _recover(self, error: BaseException) -> bool:
        self.failed += 1
        self._leave_trace(error)
        self._fail_current(error_for_asker(self.name, error))
        if (order := self._pop_order()) is not None:
            # The order ends this incarnation, so the supervisor need not decide.
            said = f"an order came first: {order.kind.value}"
            self.system.report(Failure(self.name, error, said))
            self.order = order
            return await self._obey()
        is_starting = self.phase is Phase.STARTING
        after, delay_s = self.parent.judge(self, error, has_started=not is_starting)
        said = "it goes on as it is" if after is None else after.value
        self.system.report(
            Failure(self.name, error, said),
            is_refusing=is_starting and after is After.END and self.directory is not None,
        )
        if after is None:
            self._unwatch()  # armed by `give_order`, if it was an effect that failed
            if self.life is not None:
                self.life.go_on()
            return True
        return await self._clean_up(after, error, delay_s=delay_s)

    def _pop_order(self) -> Order | None:
        """Take the next order; only report further failures of this incarnation's effects."""
        while self.control and isinstance(order := self.control[0], Order):
            self.control.popleft()
            if order.kind is not OrderKind.FAIL:
                return order
            self._report_late(order)
        return None

    def _report_late(self, order: Order) -> None:
        assert order.error is not None, "an order to fail brings its error"
        said = "it counts as no further failure: the actor was ending already"
        self.system.report(Failure(self.name, order.error, said))

    def _leave_trace(self, error: BaseException | None) -> None:
        if self.system.tracing is not None and self.life is not None:
            self.life.context.run(leave_trace, self, error)

    def _fail_current(self, error: BaseException) -> None:
        if self.current is not None:
            self.current.fail(error)
            self.current = None
        for delivery in self.batch or ():
            delivery.fail(error)
        self.batch = None

    # --- obeying ---------------------------------------------------------------------------------

    async def _obey(self) -> bool:
        order, self.order = self.order, None
        assert order is not None, f"{self.name} obeys no order"
        until = order.patient_until
        match order.kind:
            case OrderKind.FAIL:
                assert order.error is not None, "an order to fail brings its error"
                if order.given_by is not self.life:
                    self._unwatch()
                    self._report_late(order)
                    return True
                return await self._recover(order.error)
            case OrderKind.HOLD:
                return await self._clean_up(After.HOLD, patient_until=until)
            case OrderKind.PASSIVATE:
                if self.mail or self.control or not self.is_quiet:
                    self._unwatch()
                    self._wake_settlers()
                    return True
                return await self._clean_up(After.PASSIVATE, patient_until=until)
            case OrderKind.STOP:
                return await self._clean_up(
                    After.END, order.error, order.reason, patient_until=until
                )
            case _:
                assert_never(order.kind)

    # --- ending an incarnation -------------------------------------------------------------------

    async def _clean_up(
        self,
        after: After,
        error: BaseException | None = None,
        reason: str = "",
        *,
        delay_s: float = 0.0,
        patient_until: float | None = None,
    ) -> bool:
        """End this incarnation: first everything that it has started, then the actor itself."""
        if patient_until is None:
            patient_until = self.system.now() + self.system.limits.stop_s
        is_started = self.phase is LIVE
        if self.phase is Phase.REFUSING:  # this takes `_begin_refusal` back
            self.capacity, self.error = self.spec.mailbox.capacity, None
        ending = self.ending = Ending(after, delay_s, error, patient_until)
        ending.is_hook_begun = not is_started  # an actor that has not started has nothing to stop
        to = Phase.STOPPING if after is After.END else Phase.CLEANING
        self.phase = transition(self.phase, to)
        self.is_inline = False
        if after is After.END:
            self.return_mail(reason or f"it has stopped: {type(error).__name__}")
        if self.life is not None:
            self.life.close()
            self._refuse_from_below(self.life)
        return await self._continue_clean_up(ending)

    def _refuse_from_below(self, life: Incarnation) -> None:
        """End the asks of actors below to this one, which waits for the end of their handlers.

        `Ref.ask` refuses later ones.
        """
        for ask in tuple(life.asks_from_below()):
            if ask.is_started:
                ask.fail(ActorFailed(self.name, UNANSWERED))
            elif not ask.is_done:
                ask.return_to_sender(WAITS_FOR_ASKER)

    async def _continue_clean_up(self, ending: Ending) -> bool:
        """Do the rest of a clean-up. If it is cancelled at a wait, it can be called again."""
        life = self.life
        if life is not None:
            if life.has_offspring:
                with self.system.pool.shielded():
                    await life.end_offspring(ending.patient_until)
            if not ending.is_hook_begun:
                if self.worker is not None and self.worker.is_killed and not self.spec.is_resident:
                    return True  # the hook may await only outside the cancelled scope
                ending.is_hook_begun = True
                await self._run_last_hook(life, ending)
        return self._proceed(ending)

    async def _run_last_hook(self, life: Incarnation, ending: Ending) -> None:
        actor = life.actor
        assert actor is not None, f"{self.name} was started before it was made"
        if not self.traits.has_last_hook:
            return
        is_restart = ending.after in (After.START, After.BACK_OFF, After.HOLD)
        hook: Callable[[], Coroutine[Any, Any, None]] = actor.on_stop
        if is_restart and ending.error is not None:
            hook = partial(actor.on_restart, ending.error)
        self._unwatch()
        self._watch(self.system.limits.cleanup_s)
        code = self.user_code = UserCode("cleaning up")
        try:
            await run_inside(life.context, hook())
        except BaseException as error:  # noqa: BLE001 - the supervisor's boundary: as_failure
            if not self._note_late_end(error):
                self.failed += 1
                failure = self._as_failure(error)
                self.system.report(Failure(self.name, failure, "it ends regardless"))
        finally:
            self._leave_user_code(code)

    async def after_kill(self) -> bool:
        """Recover after a cancellation of the worker, which ended a handler, start or clean-up."""
        if self.phase is ENDED:
            return False
        self.user_code = None
        if self.ending is not None:
            return await self._continue_clean_up(self.ending)
        error = ActorFailed(self.name, _KILLED)
        self._fail_current(error)
        if (order := self._pop_order()) is not None:
            self.order = order
            return await self._obey()
        return await self._recover(error)

    def _proceed(self, ending: Ending) -> bool:
        """Enter the phase after an incarnation.

        There is no await between the look for mail and the new phase, so no mail is lost.
        """
        if self.phase is ENDED:
            return False
        self._end_incarnation()
        self.ending = None
        self._unwatch()
        after, error = ending.after, ending.error
        has_mail = bool(self.mail or self.control) or self.waiting is not None
        to = phase_after(after, has_mail=has_mail)
        if to is ENDED:
            self.end(error, is_passivated=after is After.PASSIVATE)
            return False
        self.phase = transition(self.phase, to)
        if to is Phase.STARTING:
            if after is After.START:
                self.restarts += 1
            return True
        if to is Phase.BACKOFF:
            self._alarm = self.system.clock.call_later(ending.delay_s, self._begin_again)
        elif to is Phase.HELD:
            self._wake_settlers()
        elif to is Phase.REFUSING:
            self._begin_refusal(error, ending.delay_s)
        if self.control and isinstance(self.control[0], Order):
            self._cancel_alarm()
            return True
        return False

    def _begin_refusal(self, error: BaseException | None, seconds: float) -> None:
        self.capacity = 0
        self.error = error
        self.return_mail("it failed too often", self.refusal())
        self._alarm = self.system.clock.call_later(seconds, self._end_refusal)

    def refusal(self) -> TooManyRestarts:
        """Return a new error for a sender whose mail is refused.

        Senders do not share one, because an error's traceback grows whenever it is raised.
        """
        supervision = self.parent.supervision
        refusal = TooManyRestarts(self.name, supervision.restarts_max, supervision.window_s)
        refusal.__cause__ = self.error
        return refusal

    def _begin_again(self) -> None:
        self._alarm = None
        self.restarts += 1
        self.phase = transition(self.phase, Phase.STARTING)
        self.submit()

    def _end_refusal(self) -> None:
        self._alarm = None
        self.end(self.refusal())

    def _end_incarnation(self) -> None:
        if self.life is not None:
            self.life.end()
            self.life = None
        if self.current is not None or self.batch is not None:
            self._fail_current(ActorFailed(self.name, _KILLED))

    def end(self, error: BaseException | None, *, is_passivated: bool = False) -> None:
        """Remove the cell: from the directory, from its supervisor, from memory."""
        if self.phase is ENDED:
            return
        self.phase = transition(self.phase, ENDED)
        self.at_rest = self.is_parked = self.is_inline = False
        self.return_mail("it has stopped")
        self._unwatch()
        self._cancel_alarm()
        self._end_incarnation()
        self.ending = self.error = None
        self.parent.remove(self)
        if not is_passivated:
            self._announce_end(error)
        self._wake_settlers()
        if isinstance(self.worker, Resident):
            self.worker.end()
        if self.system.is_closing:
            self.system.note_done(self)

    def _announce_end(self, error: BaseException | None) -> None:
        self.system.events.publish(Stopped(self.name, error))
        watchers: dict[Watcher, object] = dict(self.watchers or {})
        self.watchers = None
        if self.directory is not None:
            watchers.update(self.directory.take_watchers(self.key))
        for watcher, target in watchers.items():
            watcher.notify_end(target, error)

    def give_up(self, doing: str) -> None:
        """End the cell without its code, which swallows its cancellation and keeps its worker."""
        error = ActorFailed(self.name, f"it is stuck {doing}: it swallows its cancellation")
        self._fail_current(error)
        if self.life is not None:
            self.life.abandon_offspring()
            self.life.end(error)
        self.system.report_stuck(self.name, doing, self)
        self.end(error)

    # --- mail that is not handled ----------------------------------------------------------------

    def return_mail(self, reason: str, error: BaseException | None = None) -> None:
        """Hand back all mail: asks to their askers, the rest to the dead letters.

        None of it was handled, so askers get `NotDelivered`, or `error` if it is one of the five
        kinds.
        """
        if is_over(self.phase):
            self.capacity = 0  # nothing more gets in by the short way
        orders: list[Order] = []
        for item in self.drain():
            if isinstance(item, Order):
                orders.append(item)
            elif not isinstance(item, Ask):
                if not isinstance(item, Firing):
                    self.system.dead_letters.add(item[0], self.name, reason)
            elif isinstance(error, TurnkeeperError):
                item.fail(error)
            elif not item.is_done:
                item.return_to_sender(reason, error)
        if self.phase is ENDED:
            self.mail = self.control = NO_MAIL
            for order in orders:
                if order.kind is OrderKind.FAIL:
                    self._report_late(order)
        else:
            self.control.extend(orders)

    # --- the tree --------------------------------------------------------------------------------

    @property
    def within(self) -> Incarnation | None:
        """The incarnation of the actor that it is a child of; None if that is the runtime."""
        return self.parent.within

    def is_below(self, other: object) -> bool:
        """True if `other` is its parent, its parent's parent, and so on."""
        life = self.within
        while life is not None and life.place is not other:
            life = life.place.within
        return life is not None

    def asks_of(self, target: object) -> Iterator[Ask]:
        """Yield the asks of `target` that its handlers and those below it wait for."""
        for ask, asked in (self.asking or {}).items():
            if asked is target:
                yield ask
        if self.life is not None and self.life.children is not None:
            yield from self.life.children.asks_of(target)

    # --- its present state -----------------------------------------------------------------------

    @property
    def actor(self) -> Hooks | None:
        """The actor of the current incarnation, if there is one."""
        return None if self.life is None else self.life.actor

    @property
    def is_quiet(self) -> bool:
        """True if nothing that the actor has started is going on."""
        return self.life is None or self.life.is_quiet

    @property
    def is_idle(self) -> bool:
        """True if it is at rest and nothing that the actor has started is going on."""
        return self.at_rest and self.is_quiet

    @property
    def _has_nothing_to_clean_up(self) -> bool:
        if self.life is None or self.spec.is_resident:
            return False
        has_hook = self.traits.has_last_hook
        return not has_hook and self.phase is LIVE and not self.life.has_offspring

    @property
    def is_busy(self) -> bool:
        """True if it has mail to handle, or is doing something that ends by itself."""
        if self.at_rest or self.phase is ENDED:
            return False
        return bool(self.mail or self.control) or not (
            is_waiting(self.phase) or self.phase is Phase.STOPPING
        )

    @property
    def effect_names(self) -> tuple[str, ...]:
        """The names of the effects that are going on."""
        effects = None if self.life is None else self.life.effects
        return tuple(effect.name for effect in effects or ())

    @property
    def doing(self) -> str:
        """The call of user code that a worker waits for, in words; empty if there is none."""
        return "" if self.user_code is None else self.user_code.doing

    def note_if_idle(self) -> None:
        """Tell the region if the actor has become idle."""
        if self.directory is not None and self.is_idle:
            self._become_idle(self.directory)

    def _become_idle(self, directory: Directory) -> None:
        if self.life is not None:
            dropped = self.life.drop_context(self.base_context)
            if dropped is not None:
                directory.spare_contexts.append(dropped)
        directory.note_resting(self)

    # --- bounds on user code ---------------------------------------------------------------------

    def _leave_user_code(self, code: UserCode) -> None:
        if self.user_code is code:
            self.user_code = None

    def _watch(self, patience_s: float) -> None:
        if self.watchdog is None:
            self.watchdog = Watchdog(self, patience_s)
        else:
            self.watchdog.hurry(patience_s)

    def _unwatch(self) -> None:
        if self.watchdog is not None:
            self.watchdog.disarm()
            self.watchdog = None

    def attend(self) -> bool:
        """Have a worker wait for a handler that waits without one, so that it can be cancelled.

        False if no handler waits without one.
        """
        if self.suspended is None:
            return False
        # If there is nothing to undo, the cell is in the queue already. If it were there twice, two
        # workers would run the actor at once.
        if attend(self, self.yielded):
            self.submit()
        return True

    def _cancel_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _wake_settlers(self) -> None:
        settlers, self._settlers = self._settlers, None
        for each in settlers or ():
            each.set(None)


def _make(cell: Cell, life: Incarnation) -> Hooks:
    """Make the actor, inside its own context."""
    actor = life.actor = cell.factory() if cell.directory is None else cell.factory(cell.key)
    cell.system.makers.bind(actor, life)
    return actor
