"""A region: a directory of keyed actors, activated by their first message, passivated when idle.

Owns the directory and the order in which its actors came to rest. A million known keys cost
nothing: a key that is not active is not in the directory, and a ref to it is just a name.

Invariants, each kept without an await:

1. At most one cell per key. A cell enters the directory before its first message, and leaves it
   after its clean-up, in the step that finds its mailbox empty. So mail lands in the cell or in its
   successor, and never between the two.
2. The list of idle cells has all of them and no others, in the order in which they came to rest.
3. Restarts are counted per key. One that fails too often is refused for a while, and the others
   never notice.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, Generic, cast

import anyio.lowlevel
from typing_extensions import TypeVar

from ._cell import Cell, Spec, Watcher
from ._lifecycle import ENDED, After
from ._messages import Order, OrderKind
from ._parent import Child, Verdict
from ._ref import Ref, Terminated, add_watcher
from ._reports import RegionOverflow
from ._supervision import Directive, RestartLog, Supervision
from ._supervisor import Supervisor, check_factory

if TYPE_CHECKING:
    from ._actor import Actor
    from ._clock import Alarm
    from ._system import System

__all__ = ["ORDERED_AT_ONCE", "Region"]

ORDERED_AT_ONCE: Final = 256
"""How many actors are ordered to go before other tasks run: many become idle together, and all are
stopped together."""
_SPARE_CONTEXTS_MAX: Final = 1024
"""As many as are dropped at once when a thousand actors have waited for one commit."""

# Any: an actor that does not name its messages is not checked for them.
M = TypeVar("M", default=Any)


class Region(Supervisor, Generic[M]):
    """Keyed actors. `region[key]` is a ref; its first message activates the actor."""

    def __init__(
        self,
        system: System,
        name: str,
        factory: Callable[[str], Actor[M]],
        *,
        parent: Supervisor,
        spec: Spec,
        supervision: Supervision,
        context: Context,
        idle_s: float | None,
        active_max: int | None,
        refuse_s: float,
    ) -> None:
        check_factory(factory, name)
        super().__init__(system, name, supervision, parent=parent)
        self._factory = factory
        self._spec = spec
        self._context = context
        self.spare_contexts: deque[Context] = deque(maxlen=_SPARE_CONTEXTS_MAX)
        self._idle_s = idle_s
        self._active_max = active_max
        self._refuse_s = refuse_s
        self._cells = cast("dict[str, Cell]", self.children)  # a region has actors only
        # Not a dict: to find its first key, Python passes over all that were deleted before that.
        # Here they leave at the front, as many at once as became idle at once.
        self._idle: OrderedDict[str, float] = OrderedDict()
        self._sweep_alarm: Alarm | None = None
        self._next_report = 1
        self._refusal: Callable[[str], BaseException] | None = None
        self._watchers: dict[str, dict[Watcher, object]] = {}
        # Refs to keys that are not active point here: to a cell that has ended.
        self._nowhere = Cell(system, name, self._no_actor, spec, self, base_context=context)
        self._nowhere.phase = ENDED
        self._nowhere.is_parked = self._nowhere.at_rest = False
        self._nowhere.capacity = 0

    def __getitem__(self, key: str) -> Ref[M]:
        if not isinstance(key, str):
            raise TypeError(f"a key is {key!r}; it takes a str")
        return Ref(self._cells.get(key, self._nowhere), self, key)

    @property
    def active(self) -> tuple[str, ...]:
        """The keys that are active, in the order of their activation."""
        return tuple(self._cells)

    async def passivate(self, key: str) -> bool:
        """Passivate the actor of `key` if it is idle; True if none is active there afterwards.

        If this call is cancelled, the actor is passivated all the same, unless mail comes first.
        """
        cell = self._cells.get(key)
        if cell is None:
            return True
        if key not in self._idle:
            return False
        settled = cell.when_settled()
        self._passivate(cell)
        await settled.wait()
        return key not in self._cells

    async def stop_actor(self, key: str) -> None:
        """Stop an active actor, hand back its mail, and wait for its end.

        The next message to the key activates it anew. If this call is cancelled, the actor stops
        all the same.
        """
        if (cell := self._cells.get(key)) is not None:
            await cell.stop("it was told to")

    async def stop(
        self,
        reason: str = "it was told to",
        *,
        patient_until: float | None = None,
        refusal: Callable[[str], BaseException] | None = None,
    ) -> None:
        """Stop all actors and the region itself: no message activates an actor any more.

        `patient_until`, by the loop's clock: when handlers that still run are cancelled. Askers get
        the error that `refusal` makes of the key, by default `NotDelivered`.
        """
        if refusal is not None:
            self._refusal = refusal
        await super().stop(reason, patient_until=patient_until)

    def refusal(self, key: str) -> BaseException | None:
        """Return the error for an asker if the region was stopped with one, else None."""
        return None if self._refusal is None else self._refusal(key)

    # --- the directory ---------------------------------------------------------------------------

    def activate(self, key: str) -> Cell:
        """Return the cell of this key, making one if there is none and the region is open."""
        if self._is_closed:
            return self._cells.get(key, self._nowhere)
        cell = self._cells.get(key)
        if cell is None:
            cell = Cell(
                self._system,
                self.name + "/" + key,
                self._factory,
                self._spec,
                self,
                base_context=self._context,
                directory=self,
                key=key,
            )
            self._cells[key] = cell
            if self._system.is_closing:
                cell.close_short_way()
            self._make_room()
        return cell

    def remove(self, child: Child) -> None:
        assert isinstance(child, Cell), f"{child} is no actor"
        self._idle.pop(child.key, None)
        self._cells.pop(child.key, None)

    def note_woken(self, cell: Cell) -> None:
        """Take a cell off the list of idle ones."""
        self._idle.pop(cell.key, None)

    def note_resting(self, cell: Cell) -> None:
        """List a cell as idle; if too many are active, passivate the one that is idle longest."""
        self._idle[cell.key] = self._system.now()
        if self._idle_s is not None and self._sweep_alarm is None:
            self._sweep_alarm = self._system.clock.call_later(self._idle_s, self._sweep)
        if self._active_max is not None and len(self._cells) > self._active_max:
            self._passivate(self._cells[next(iter(self._idle))])

    # --- passivation -----------------------------------------------------------------------------

    def _passivate(self, cell: Cell) -> None:
        """Order an idle actor to go. If mail comes before it has gone, it is activated again."""
        cell.give_order(Order(OrderKind.PASSIVATE))

    def _make_room(self) -> None:
        """Passivate the actor that is idle longest if too many are active; never waits."""
        if self._active_max is None or len(self._cells) <= self._active_max:
            self._next_report = 1
            return
        if self._idle:
            self._passivate(self._cells[next(iter(self._idle))])
        elif (excess := len(self._cells) - self._active_max) >= self._next_report:
            # Reported when it begins and each time it doubles, not for each of a thousand keys.
            self._next_report = 2 * excess
            self._system.report(RegionOverflow(self.name, len(self._cells), self._active_max))

    def _sweep(self) -> None:
        self._sweep_alarm = None
        assert self._idle_s is not None, "a region that sweeps has an idle time"
        now, swept = self._system.now(), 0
        while self._idle:
            key, since = next(iter(self._idle.items()))
            wait_s = since + self._idle_s - now
            if wait_s > 0 or swept == ORDERED_AT_ONCE:
                self._sweep_alarm = self._system.clock.call_later(max(0.0, wait_s), self._sweep)
                return
            self._passivate(self._cells[key])
            swept += 1

    # --- failures --------------------------------------------------------------------------------

    def judge(self, child: Child, error: BaseException, *, has_started: bool = True) -> Verdict:
        if child.own_log is None:
            child.own_log = RestartLog(self.supervision)
        directive, found = self._decide(child, child.own_log, error, has_started=has_started)
        if directive is Directive.ESCALATE and found is not error:
            return After.REFUSE, self._refuse_s
        if directive is Directive.ESCALATE:
            if not self._is_failing:
                self._fail(error)
            return After.HOLD, 0.0
        return self._carry_out(child, directive, self.supervision)

    async def stop_children(self, reason: str, *, patient_until: float | None = None) -> None:
        """Stop all actors together: those of a region have no order."""
        self.close()
        if patient_until is None:
            patient_until = self._system.now() + self._system.limits.stop_s
        cells = tuple(self._cells.values())
        for count, cell in enumerate(cells, 1):
            cell.request_stop(reason, patient_until=patient_until)
            if count % ORDERED_AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()
        for cell in cells:
            await cell.stop(reason, patient_until=patient_until)
        if not self._system.is_closing:
            self._tell_watchers()

    # --- watching --------------------------------------------------------------------------------

    def watch(self, key: str, watcher: Ref[Terminated], target: Ref[Any]) -> None:
        """Add a watcher of this key, active or not; if it cannot become active, tell it at once."""
        if self._is_closed and key not in self._cells:
            watcher.notify_end(target, None)
        else:
            target.check_home()
            add_watcher(self._watchers.setdefault(key, {}), watcher, target)

    def unwatch(self, key: str, watcher: Ref[Terminated]) -> None:
        """Undo `watch`."""
        if (watchers := self._watchers.get(key)) is not None:
            watchers.pop(watcher, None)
            if not watchers:
                del self._watchers[key]

    def take_watchers(self, key: str) -> dict[Watcher, object]:
        """Remove and return the watchers of a key whose actor has stopped; each is told once."""
        return self._watchers.pop(key, {})

    def _tell_watchers(self) -> None:
        """Tell the watchers of keys that are not active: none of these keys comes back."""
        watched, self._watchers = self._watchers, {}
        for watchers in watched.values():
            for watcher, target in watchers.items():
                watcher.notify_end(target, None)

    @staticmethod
    def _no_actor() -> Actor[Any]:
        raise AssertionError("a key that is not active has no actor")
