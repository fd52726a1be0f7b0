"""A supervisor: the parent of some actors, which answers for their failures.

Owns its children, in the order they were started, and the count of their restarts. A child that
fails alone is restarted alone by its own cell; what concerns several children is carried out
here, by one task at a time: held in reverse order of their start, released in order.

The runtime is the uppermost supervisor; a region is one that counts per key; an actor that spawns
has one; `spawn_supervisor` makes others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from ._cell import After, Cell, Spec
from ._mailbox import Mailbox
from ._messages import Order
from ._ref import Ref
from ._reports import Failure
from ._supervision import Directive, RestartLog, Supervision
from .errors import TooManyRestarts

if TYPE_CHECKING:
    from ._actor import Actor
    from ._system import System

__all__ = ["Child", "Supervisor", "Verdict"]

M = TypeVar("M")

Verdict: TypeAlias = tuple[After | None, float]
"""What becomes of a failed child (None: it goes on as it is), and after how long."""

_DEFAULT_SPEC = Spec(Mailbox())


class Child(Protocol):
    """What a supervisor can do with a child, be it an actor or another supervisor."""

    name: str
    own_log: RestartLog | None
    backoff_log: RestartLog | None

    async def stop(self, reason: str) -> None: ...

    def request_stop(self, reason: str) -> None: ...

    async def hold(self) -> None: ...

    async def release(self) -> None: ...


class Supervisor:
    """The parent of some actors. Spawn them here to have them supervised together."""

    def __init__(
        self,
        system: System,
        name: str,
        supervision: Supervision,
        *,
        parent: Supervisor | None = None,
        owner: Cell | None = None,
    ) -> None:
        """Failing upward is `parent`'s to judge, or `owner`'s failure, or else the runtime's."""
        self.name = name
        self.supervision = supervision
        self.children: dict[str, Child] = {}
        self.own_log: RestartLog | None = None
        self.backoff_log: RestartLog | None = None
        self._system = system
        self._parent = parent
        self._owner = owner
        self._log = RestartLog(supervision)
        self._is_stopping = False
        self._is_failing = False
        self._is_regrouping = False
        self._regroup_from: str | None = None
        self._regroup_after_s = 0.0

    # --- what users do ---------------------------------------------------------------------------

    def spawn(
        self,
        factory: Callable[[], Actor[M]],
        *,
        name: str,
        mailbox: Mailbox | None = None,
        supervision: Supervision | None = None,
        resident: bool = False,
    ) -> Ref[M]:
        """Start an actor and return its ref; its `on_start` runs soon, before any message.

        `supervision` is for this one child, in place of its supervisor's, and with a count of its
        own: past it, the failure is its supervisor's to judge.
        """
        if mailbox is None and supervision is None and not resident:
            spec = _DEFAULT_SPEC
        else:
            spec = Spec(mailbox or _DEFAULT_SPEC.mailbox, supervision, resident)
        system = self._system
        if self._is_stopping or system.is_closing:
            raise RuntimeError(f"nothing can be spawned in {self.name}: it is stopping")
        path = self._new_name(name)
        cell = Cell(system, path, factory, spec, self, base_context=copy_context())
        if supervision is not None:
            cell.own_log = RestartLog(supervision)
        self.children[name] = cell
        cell.begin()
        return Ref(cell)

    def spawn_supervisor(self, name: str, supervision: Supervision) -> Supervisor:
        """Start a supervisor of this one, for actors that stand or fall together."""
        child = Supervisor(self._system, self._new_name(name), supervision, parent=self)
        self.children[name] = child
        return child

    def adopt(self, child: Child) -> None:
        """Take in a child that was made elsewhere."""
        self._new_name(child.name)
        self.children[child.name] = child

    def _new_name(self, name: str) -> str:
        if name in self.children:
            raise ValueError(f"{self.name or 'the runtime'} has a child {name!r} already")
        return f"{self.name}/{name}" if self.name else name

    async def stop(self, reason: str = "it was told to") -> None:
        """Stop the children in reverse order of their start, then this supervisor itself."""
        self._is_stopping = True
        await self.stop_children(reason)
        if self._parent is not None:
            self._parent.ended(self)

    # --- what children and parents do ------------------------------------------------------------

    def ended(self, child: Child) -> None:
        self.children.pop(child.name.removeprefix(f"{self.name}/"), None)
        if self._owner is not None:
            self._owner.maybe_idle()

    def judge(self, child: Child, error: BaseException) -> Verdict:
        """What becomes of a child that has failed. Counts the restart, if it is one."""
        if child.own_log is not None:
            directive, error = self._decide(child, child.own_log, error)
            if directive is not Directive.ESCALATE:
                return self._carry_out(child, directive, child.own_log.supervision)
            child.own_log.forget()
        directive, error = self._decide(child, self._log, error)
        if directive is Directive.ESCALATE:
            self._log.forget()
            self._fail(error)
            return After.HOLD, 0.0
        return self._carry_out(child, directive, self.supervision)

    def _decide(
        self, child: Child, log: RestartLog, error: BaseException
    ) -> tuple[Directive, BaseException]:
        supervision = log.supervision
        directive = supervision.directive(error)
        if directive is Directive.RESTART and log.is_too_many(self._system.now()):
            given_up = TooManyRestarts(child.name, supervision.restarts_max, supervision.window_s)
            given_up.__cause__ = error
            return Directive.ESCALATE, given_up
        return directive, error

    def _carry_out(self, child: Child, directive: Directive, supervision: Supervision) -> Verdict:
        if directive is Directive.RESUME:
            return None, 0.0
        if directive is Directive.STOP:
            return After.END, 0.0
        delay_s = self.delay_s(child, supervision)
        if self._is_regrouping or supervision.strategy != "one_for_one":
            self._regroup(child, delay_s, supervision)
            return After.HOLD, 0.0
        return (After.BACK_OFF if delay_s > 0 else After.START), delay_s

    def delay_s(self, child: Child, supervision: Supervision) -> float:
        if child.backoff_log is None:
            child.backoff_log = RestartLog(supervision)
        return child.backoff_log.delay_s(self._system.now(), self._system.ports.random)

    # --- several children at once ----------------------------------------------------------------

    def _regroup(self, child: Child, delay_s: float, supervision: Supervision) -> None:
        names = [each.name for each in self.children.values()]
        first = child.name if supervision.strategy == "rest_for_one" else names[0]
        if self._regroup_from is None or names.index(first) < names.index(self._regroup_from):
            self._regroup_from = first
        self._regroup_after_s = max(self._regroup_after_s, delay_s)
        if not self._is_regrouping:
            self._is_regrouping = True
            self._system.start_soon(self._restart_together)

    async def _restart_together(self) -> None:
        """Restart the children concerned; and again, when one fails while they come back."""
        try:
            while self._regroup_from is not None and not self._is_disturbed:
                concerned = self._from(self._regroup_from)
                delay_s = self._regroup_after_s
                self._regroup_from, self._regroup_after_s = None, 0.0
                for child in reversed(concerned):
                    await child.hold()
                await self._system.sleep(delay_s)
                for child in concerned:
                    if not (self._has_failed_again() or self._is_disturbed):
                        await child.release()
        finally:
            self._is_regrouping = False

    def _from(self, name: str) -> list[Child]:
        """The children from this one on, in the order of their start."""
        children = list(self.children.values())
        names = [each.name for each in children]
        return children[names.index(name) :] if name in names else []

    def _has_failed_again(self) -> bool:
        return self._regroup_from is not None

    @property
    def _is_disturbed(self) -> bool:
        return self._is_stopping or self._is_failing

    async def stop_children(self, reason: str) -> None:
        self._is_stopping = True
        for child in reversed(tuple(self.children.values())):
            await child.stop(reason)
        self._is_stopping = False

    def request_stop(self, reason: str) -> None:
        self._system.start_soon(self.stop, reason)

    async def hold(self) -> None:
        for child in reversed(tuple(self.children.values())):
            await child.hold()

    async def release(self) -> None:
        self._is_failing = False
        for child in tuple(self.children.values()):
            await child.release()

    # --- failing upward --------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        self._is_failing = True
        if self._owner is not None:
            self._owner.give_order(Order("fail", error))
        elif self._parent is not None:
            self._system.start_soon(self._fail_upward, self._parent, error)
        else:
            self._system.fail(error)

    async def _fail_upward(self, parent: Supervisor, error: BaseException) -> None:
        await self.hold()
        after, delay_s = parent.judge(self, error)
        said = "it goes on as it is" if after is None else after.value
        self._system.report(Failure(self.name, error, said))
        if after is After.END:
            await self.stop("its supervisor gave it up")
        elif after is not After.HOLD:
            await self._system.sleep(delay_s)
            await self.release()
