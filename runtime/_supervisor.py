"""A supervisor: the parent of some actors, which decides about their failures.

Owns its children, in the order in which they were started, and the count of their restarts. A
child that fails alone is restarted alone by its own cell. Restarts of several children are carried
out here, by one task at a time: they are held in reverse order of their start, and released in
order.

The runtime is the uppermost supervisor. A region supervises its actors and counts their restarts
per key. An actor that spawns has a supervisor of its own. `spawn_supervisor` makes others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterator
from contextvars import copy_context
from functools import partial
from itertools import dropwhile
from typing import TYPE_CHECKING, TypeVar

import anyio

from ._backend import persist
from ._cell import Cell, Spec
from ._incarnation import Incarnation
from ._lifecycle import After
from ._mailbox import DEFAULT_MAILBOX, MailboxSettings
from ._messages import Ask
from ._parent import Child, Verdict
from ._ref import Ref
from ._reports import Failure
from ._supervision import Directive, RestartLog, Supervision, check_kind
from .errors import ActorEnded, TooManyRestarts

if TYPE_CHECKING:
    from ._actor import Actor
    from ._system import System

__all__ = ["Supervisor", "check_factory", "check_kind"]

M = TypeVar("M")

_DEFAULT_SPEC = Spec(DEFAULT_MAILBOX)


def check_factory(factory: object, name: str) -> None:
    """Raise `TypeError` unless this can be called; the usual mistake is to give an actor."""
    if not callable(factory):
        kind = type(factory).__name__
        raise TypeError(
            f"actor {name!r} is given as a {kind}; give its factory, which is called for each "
            f"restart: the class, or `lambda: {kind}(...)`"
        )


class Supervisor:
    """The parent of some actors. Spawn them here to have them supervised together."""

    def __init__(
        self,
        system: System,
        name: str,
        supervision: Supervision,
        *,
        parent: Supervisor | None = None,
        above: Incarnation | None = None,
    ) -> None:
        """Escalate failures to `parent` or to the actor `above`; without them, to the runtime."""
        check_kind("supervision", supervision, Supervision)
        self.name = name
        self.supervision = supervision
        self.children: dict[str, Child] = {}
        self.own_log: RestartLog | None = None
        self.backoff_log: RestartLog | None = None
        self._system = system
        self._parent = parent
        self._above = above
        self.within: Incarnation | None = above if parent is None else parent.within
        self._log = RestartLog(supervision)
        self._is_closed = False
        self._is_failing = False
        self._escalated: list[Child] = []
        """The children whose failures this supervisor has escalated; they are held."""
        self._is_regrouping = False
        self._to_regroup: dict[Child, None] = {}
        """The children to restart together next; those started after them restart as well."""
        self._regroup_after_s = 0.0

    # --- what users do ---------------------------------------------------------------------------

    def spawn(
        self,
        factory: Callable[[], Actor[M]],
        *,
        name: str,
        mailbox: MailboxSettings | None = None,
        supervision: Supervision | None = None,
        resident: bool = False,
    ) -> Ref[M]:
        """Start an actor and return its ref; its `on_start` runs soon, before any message.

        `factory`, `mailbox` and `resident` are as for `Runtime.spawn`. `supervision` is for this
        one child, in place of this supervisor's, and with a count of its own. If the child restarts
        too often by that count, this supervisor judges the failure.

        Raises `ValueError` if a child of this name is there already, `TypeError` for an actor in
        place of its factory and a setting of another type, and `ActorEnded` once this supervisor or
        the runtime is stopping.
        """
        check_factory(factory, name)
        if mailbox is not None:
            check_kind("mailbox", mailbox, MailboxSettings)
        if mailbox is None and supervision is None and resident is False:
            spec = _DEFAULT_SPEC
        else:
            check_kind("resident", resident, bool)
            spec = Spec(mailbox or DEFAULT_MAILBOX, supervision, resident)
        system = self._system
        path = self._new_name(name)
        cell = Cell(system, path, factory, spec, self, base_context=copy_context())
        if supervision is not None:
            check_kind("supervision", supervision, Supervision)
            cell.own_log = RestartLog(supervision)
        self.children[name] = cell
        try:
            cell.begin()
        except BaseException:  # the program was interrupted, and may go on
            cell.end(None)
            raise
        if system.is_closing:
            cell.close_short_way()
        return Ref(cell)

    def spawn_supervisor(self, name: str, supervision: Supervision) -> Supervisor:
        """Start a supervisor below this one; `supervision` says what restarts or stops together."""
        child = Supervisor(self._system, self._new_name(name), supervision, parent=self)
        self.children[name] = child
        return child

    def adopt(self, child: Child) -> None:
        """Take in a child that was made elsewhere."""
        self._new_name(child.name)
        self.children[child.name] = child

    def _new_name(self, name: str) -> str:
        check_kind("name", name, str)
        if self.within is not None:
            self.within.check_open(f"start {name!r} below it")
        if self._is_closed or (self.within is None and self._system.is_closing):
            raise ActorEnded(self.name or "the runtime", f"start {name!r} below it")
        if name in self.children:
            raise ValueError(f"{self.name or 'the runtime'} has a child {name!r} already")
        return self.name + "/" + name if self.name else name

    async def stop(
        self, reason: str = "it was told to", *, patient_until: float | None = None
    ) -> None:
        """Stop the children in reverse order of their start, then this supervisor itself.

        `patient_until`, by the loop's clock: when handlers that still run are cancelled. Nothing
        can be spawned here afterwards: that raises `ActorEnded`. If this call is cancelled, all
        stop all the same, and nothing waits for it.
        """
        try:
            await self._stop(reason, patient_until)
        except anyio.get_cancelled_exc_class():
            # Not all children have been told to stop, and the parent still knows this supervisor.
            self._system.start_soon(self._stop_persistently, reason, patient_until)
            raise

    async def _stop(self, reason: str, patient_until: float | None) -> None:
        await self.stop_children(reason, patient_until=patient_until)
        if self._parent is not None:
            self._parent.remove(self)

    # --- what children and parents do ------------------------------------------------------------

    def remove(self, child: Child) -> None:
        """Forget a child that has ended, unless another child has its name by now."""
        name = child.name.removeprefix(self.name + "/" if self.name else "")  # as in `_new_name`
        if self.children.get(name) is child:
            del self.children[name]
        if self._above is not None:
            self._above.note_if_idle()

    @property
    def names(self) -> Collection[str]:
        """The names of the children."""
        return self.children.keys()

    def asks_of(self, target: object) -> Iterator[Ask]:
        """Yield the asks of `target` that handlers of the actors below wait for."""
        for child in tuple(self.children.values()):
            yield from child.asks_of(target)

    def close(self) -> None:
        """Spawn nothing more."""
        self._is_closed = True

    def judge(self, child: Child, error: BaseException, *, has_started: bool = True) -> Verdict:
        """Decide about a child that has failed. Counts the restart, if it is one.

        A child that has not started (`has_started` is False) cannot go on as it is: RESUME restarts
        it.
        """
        if child.own_log is not None:
            directive, error = self._decide(child, child.own_log, error, has_started=has_started)
            if directive is not Directive.ESCALATE:
                return self._carry_out(child, directive, child.own_log.supervision)
            child.own_log.forget()
        directive, error = self._decide(child, self._log, error, has_started=has_started)
        if directive is Directive.ESCALATE:
            self._log.forget()
            self._escalated.append(child)
            if not self._is_failing:  # children that escalate together are one failure
                self._fail(error)
            return After.HOLD, 0.0
        return self._carry_out(child, directive, self.supervision)

    def _decide(
        self, child: Child, log: RestartLog, error: BaseException, *, has_started: bool
    ) -> tuple[Directive, BaseException]:
        supervision = log.supervision
        directive = supervision.directive(error)
        if directive is Directive.RESUME and not has_started:
            directive = Directive.RESTART
        if directive is Directive.RESTART and log.count_restart(self._system.now()):
            given_up = TooManyRestarts(child.name, supervision.restarts_max, supervision.window_s)
            given_up.__cause__ = error
            return Directive.ESCALATE, given_up
        return directive, error

    def _carry_out(self, child: Child, directive: Directive, supervision: Supervision) -> Verdict:
        if directive is Directive.RESUME:
            return None, 0.0
        if directive is Directive.STOP:
            return After.END, 0.0
        delay_s = self._next_delay_s(child, supervision)
        if self._is_regrouping or supervision.strategy != "one_for_one":
            self._regroup(child, delay_s, supervision)
            return After.HOLD, 0.0
        return (After.BACK_OFF if delay_s > 0 else After.START), delay_s

    def _next_delay_s(self, child: Child, supervision: Supervision) -> float:
        if child.backoff_log is None:
            child.backoff_log = RestartLog(supervision)
        return child.backoff_log.next_delay_s(self._system.now(), self._system.ports.random)

    # --- several children at once ----------------------------------------------------------------

    def _regroup(self, child: Child, delay_s: float, supervision: Supervision) -> None:
        begins_here = supervision.strategy == "rest_for_one"
        concerned = (child,) if begins_here else (*self.children.values(), child)
        self._to_regroup.update(dict.fromkeys(concerned))
        self._regroup_after_s = max(self._regroup_after_s, delay_s)
        if not self._is_regrouping:
            self._is_regrouping = True
            self._system.start_soon(self._restart_together)

    async def _restart_together(self) -> None:
        """Restart the children concerned; start over if one fails while they come back."""
        try:
            while self._to_regroup and not self._is_disturbed:
                concerned = self._from_first_of(self._to_regroup)
                delay_s = self._regroup_after_s
                self._to_regroup, self._regroup_after_s = {}, 0.0
                for child in reversed(concerned):
                    await persist(child.hold)
                await persist(partial(self._system.sleep, delay_s))
                held = deque(concerned)
                while held and not (self._to_regroup or self._is_disturbed):
                    await persist(held.popleft().release)
                self._to_regroup.update(dict.fromkeys(held))  # the next round releases them
        finally:
            self._is_regrouping = False
            self._to_regroup.clear()  # if it was disturbed, all are stopped or escalated together

    def _from_first_of(self, wanted: Container[Child]) -> list[Child]:
        """Return the children from the first of these on, in the order of their start.

        Some of them may have been stopped meanwhile.
        """
        return list(dropwhile(lambda child: child not in wanted, self.children.values()))

    @property
    def _is_disturbed(self) -> bool:
        return self._is_closed or self._is_failing

    async def stop_children(self, reason: str, *, patient_until: float | None = None) -> None:
        """Stop the children, in reverse order of their start, for good.

        They share one patience: all of them, and those below them, may go on with their messages
        until `patient_until`, by default for `stop_s` from now.
        """
        self.close()
        if patient_until is None:
            patient_until = self._system.now() + self._system.limits.stop_s
        for child in reversed(tuple(self.children.values())):
            await child.stop(reason, patient_until=patient_until)

    def request_stop(self, reason: str) -> None:
        """Stop the children and this supervisor; does not wait for that."""
        self.close()
        self._system.start_soon(self._stop_persistently, reason, None)

    async def _stop_persistently(self, reason: str, patient_until: float | None) -> None:
        await persist(partial(self._stop, reason, patient_until))

    async def hold(self) -> None:
        """Hold the children, in reverse order of their start."""
        for child in reversed(tuple(self.children.values())):
            await child.hold()

    async def release(self) -> None:
        """Release the children, in the order of their start."""
        self._is_failing = False
        self._escalated.clear()
        for child in tuple(self.children.values()):
            await child.release()

    def resume(self) -> None:
        """Bring back the children whose failures were escalated: the actor above goes on.

        They come back together, after the longest of their backoffs.
        """
        if self._is_failing:
            self._system.start_soon(self._bring_back)

    async def _bring_back(self) -> None:
        escalated, self._escalated = self._escalated, []
        self._is_failing = False
        for child in escalated:
            await persist(child.hold)
        delays = [self._next_delay_s(child, self.supervision) for child in escalated]
        delay_s = max(delays, default=0.0)
        await persist(partial(self._system.sleep, delay_s))
        for child in escalated:
            await persist(child.release)

    # --- failing upward --------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        self._is_failing = True
        if self._above is not None:
            self._above.fail(error, "its children's failure was escalated")
        elif self._parent is not None:
            self._system.start_soon(self._fail_upward, self._parent, error)
        else:
            self._system.fail(error)

    async def _fail_upward(self, parent: Supervisor, error: BaseException) -> None:
        await persist(self.hold)
        after, delay_s = parent.judge(self, error)
        said = "it goes on as it is" if after is None else after.value
        self._system.report(Failure(self.name, error, said))
        if after is After.END:
            await persist(partial(self.stop, "its supervisor gave it up"))
        elif after is not After.HOLD:
            await persist(partial(self._system.sleep, delay_s))
            await persist(self.release)
