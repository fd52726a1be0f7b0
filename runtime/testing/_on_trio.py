"""The scheduler of trio: one step of one task at a time. Uses private parts of trio.

Trio has a flag that makes the order of each batch of runnable tasks deterministic, and a random
generator that shuffles the batch. For one run, `TrioScheduler` sets the flag and takes the
generator's place. It leaves one task in the batch, and after each step it puts the next task there.
So trio itself steps every task, and does not look for I/O between two steps. The scheduler is also
trio's clock, which jumps to the next deadline when no task can run. For that run trio's runner
belongs to a subclass, whose `reschedule` costs less.

The generator serves the whole process, so calls from other threads are passed on to trio's own.

The flag, the generator and the parts of trio's runner are private to trio. `find_trio_parts` checks
that they are there; if trio has changed, it raises an error that names the missing ones.
"""

from __future__ import annotations

import heapq
import math
import threading
import types
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Sized
from contextlib import AbstractAsyncContextManager
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import trio
import trio.abc
import trio.lowlevel

from .._backend import trap_message
from ._scheduler import Alarm, Scheduler, Scope, Tasks
from ._simulation import Node, Policy, SimulatorUnsupported, Strike, current_node
from ._tape import Tape

if TYPE_CHECKING:
    from ._simulation import Simulation

__all__ = ["TrioScheduler", "find_trio_parts"]

_REAL_WAIT_S = 3_600.0
"""How long trio may wait for I/O when something other than the clock will wake a task."""


class TrioParts(NamedTuple):
    """The private parts of trio that the scheduler uses."""

    module: types.ModuleType
    context: Any  # trio's own, thread-local: it has the runner


def find_trio_parts() -> TrioParts:
    """Return the private parts of trio; raise `SimulatorUnsupported` if one is missing."""
    module = getattr(getattr(trio, "_core", None), "_run", None)
    runner = getattr(module, "Runner", None)
    queue = getattr(getattr(trio, "_core", None), "_entry_queue", None)
    wanted = {
        "trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING": (
            module,
            "_ALLOW_DETERMINISTIC_SCHEDULING",
        ),
        "trio._core._run._r": (module, "_r"),
        "trio._core._run.GLOBAL_RUN_CONTEXT": (module, "GLOBAL_RUN_CONTEXT"),
        "Runner.reschedule": (runner, "reschedule"),
        "Runner.runq": (runner, "runq"),
        "Runner.deadlines": (runner, "deadlines"),
        "Runner.tasks": (runner, "tasks"),
        "Runner.waiting_for_idle": (runner, "waiting_for_idle"),
        "Runner.entry_queue": (runner, "entry_queue"),
        "Runner.instruments": (runner, "instruments"),
        "trio._core._run._NO_SEND": (module, "_NO_SEND"),
        "EntryQueue.queue": (getattr(queue, "EntryQueue", None), "queue"),
        "EntryQueue.idempotent_queue": (getattr(queue, "EntryQueue", None), "idempotent_queue"),
        "Deadlines._heap": (getattr(module, "Deadlines", None), "_heap"),
        "Deadlines.expire": (getattr(module, "Deadlines", None), "expire"),
        "Deadlines.next_deadline": (getattr(module, "Deadlines", None), "next_deadline"),
        "Task._counter": (trio.lowlevel.Task, "_counter"),
        "Task._abort_func": (trio.lowlevel.Task, "_abort_func"),
        "Task._next_send": (trio.lowlevel.Task, "_next_send"),
        "Task._next_send_fn": (trio.lowlevel.Task, "_next_send_fn"),
    }
    gone = [name for name, (owner, attribute) in wanted.items() if not hasattr(owner, attribute)]
    if module is None or gone:
        raise SimulatorUnsupported(
            f"trio {trio.__version__} lacks {', '.join(gone)}, which the simulator uses to choose "
            "the next task; use another version of trio, or adapt runtime/testing/_on_trio.py"
        )
    return TrioParts(module, module.GLOBAL_RUN_CONTEXT)


_age: Callable[[trio.lowlevel.Task], int] = attrgetter("_counter")  # see find_trio_parts


class _Instruments(list[str]):
    """Takes the place of trio's table of instruments, which trio looks into four times a step.

    It has a single hook, and calls that directly. Trio's table looks up the instruments of a hook.
    To look into a subclass of `dict` would take five times as long as into a list.
    """

    __slots__ = ("call",)

    def __init__(self, call: Callable[[str, trio.lowlevel.Task], None]) -> None:
        super().__init__(["after_task_step"])
        self.call = call

    def add_instrument(self, _: trio.abc.Instrument) -> None:
        raise SimulatorUnsupported(
            "trio's instruments do not work in a simulation, which is the only instrument of its "
            "loop; use them in a plain trio.run"
        )


class _Nothing:
    """The outcome of a wait that returns nothing."""

    __slots__ = ()

    def unwrap(self) -> None:
        """Return what the wait returns."""


_NOTHING = _Nothing()


@cache
def _lean(kind: Any, absent: object) -> Any:  # noqa: ANN401 - trio's own class of runners
    """Return the class to which a runner of this kind belongs while it is simulated.

    Its `reschedule` runs once a step. It leaves out what is for guest runs and for instruments, and
    where trio would make an outcome (for `absent`), it passes one that serves all.
    """

    class LeanRunner(kind):  # type: ignore[misc]  # as above
        __slots__ = ()

        def reschedule(self, task: Any, next_send: Any = _NOTHING) -> None:  # noqa: ANN401 - trio's
            assert task._next_send_fn is None, "a task that waits is woken once"  # noqa: SLF001
            task._next_send_fn = task.coro.send  # noqa: SLF001 - found above, as the others
            task._next_send = _NOTHING if next_send is absent else next_send  # noqa: SLF001
            task._abort_func = task.custom_sleep_data = None  # noqa: SLF001
            self.runq.append(task)

    return LeanRunner


_Due: TypeAlias = list[Any]
"""When it is due, a number, and what is due then: a task that sleeps, a function to call, or None
if that is over. A list, because it changes, and heaps compare lists as fast as tuples."""


class _Alarm:
    """A call that is due later."""

    __slots__ = ("_due",)

    def __init__(self, due: _Due) -> None:
        self._due = due

    def cancel(self) -> None:
        self._due[2] = None


def _let_abort(_: object) -> trio.lowlevel.Abort:
    """Let trio cancel a sleep; the sleeper finds that out by itself."""
    return trio.lowlevel.Abort.SUCCEEDED


@types.coroutine
def _trap(message: object) -> Generator[object, Any, Any]:  # Any: what trio sends to a task
    """Pass trio's loop a message; return the outcome that it sends when it wakes the task."""
    return (yield message)


class TrioScheduler(Scheduler[trio.lowlevel.Task], trio.abc.Clock):
    """Is trio's clock and its generator of random numbers, and is called after each step."""

    __slots__ = (
        "_calls",
        "_error",
        "_idempotent_calls",
        "_now",
        "_others",
        "_parts",
        "_places",
        "_reschedule",
        "_runner",
        "_runq",
        "_sleepers",
        "_slept",
        "_thread",
        "_waits",
    )

    def __init__(
        self,
        tape: Tape,
        policy: Policy,
        steps_max: int,
        strike: Strike | None,
        *,
        native_cancels: bool = False,
    ) -> None:
        super().__init__(tape, policy, steps_max, strike, native_cancels=native_cancels)
        if native_cancels or (strike is not None and strike.kind == "cancel_task"):
            raise ValueError("trio knows no native cancellation of a task: use asyncio")
        self._parts = find_trio_parts()
        self._now = 0.0
        self._sleepers: list[_Due] = []
        self._slept = 0
        self._waits = trap_message(trio.lowlevel.wait_task_rescheduled, _let_abort)
        self._runner: Any = None  # trio's own, as these:
        self._reschedule: Callable[[trio.lowlevel.Task], object]
        self._runq: deque[trio.lowlevel.Task] = deque()
        self._calls: Sized = ()
        self._idempotent_calls: Sized = ()
        self._places: list[trio.lowlevel.Task] = []
        """The batch that trio goes through: trio steps each task that is put here."""
        self._error: Exception | None = None
        self._thread = 0
        self._others: Any = None
        """Trio's generator, for the loops of other threads."""

    def run(self, simulation: Simulation, world: Callable[[Simulation], Awaitable[None]]) -> None:
        self.simulation = simulation
        module: Any = self._parts.module  # its names are set here, which its types forbid
        before = module._ALLOW_DETERMINISTIC_SCHEDULING, module._r  # noqa: SLF001 - found above
        self._thread, self._others = threading.get_ident(), module._r  # noqa: SLF001
        try:
            module._ALLOW_DETERMINISTIC_SCHEDULING = True  # noqa: SLF001
            module._r = self  # noqa: SLF001
            trio.run(simulation.run, world, clock=self)
        finally:
            module._ALLOW_DETERMINISTIC_SCHEDULING, module._r = before  # noqa: SLF001
        if self._runner is None:
            raise SimulatorUnsupported("trio did not ask the simulator which task to run next")

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait as `trio.sleep` does; costs a tenth of it, because it opens no cancel scope."""
        if seconds <= 0.0:
            await trio.lowlevel.checkpoint()
            return
        # Trio knows the running task, too, but takes longer to say so than to wake it.
        running = None if self._is_over else self._running
        self._slept = slept = self._slept + 1
        due: _Due = [self._now + seconds, slept, running or trio.lowlevel.current_task()]
        heapq.heappush(self._sleepers, due)
        try:
            outcome = await _trap(self._waits)
        finally:
            due[2] = None  # it may be listed for much longer
        if outcome is not _NOTHING:
            try:
                raise outcome.error
            finally:
                del outcome  # the error's traceback refers to this frame

    def call_later(self, seconds: float, run: Callable[[], None]) -> Alarm:
        self._slept += 1
        due: _Due = [self._now + seconds, self._slept, run]
        heapq.heappush(self._sleepers, due)
        return _Alarm(due)

    def forget(self) -> None:
        super().forget()
        self._sleepers.clear()
        if self._runner is not None:
            self._runner.instruments = ()  # the hook there refers to the runner
            self._runner = None
            del self._reschedule

    def scope(self, seconds: float = math.inf) -> Scope:
        """Return a scope of trio's; one of anyio's wraps it, and costs more."""
        return trio.CancelScope(deadline=self._now + seconds)

    def open_tasks(self) -> AbstractAsyncContextManager[Tasks]:
        """Open a nursery of trio's, in which a task costs less than in a group of anyio's."""
        return trio.open_nursery()

    def _next_wake_up(self) -> float:
        """Return when the next sleeper is due, or infinity."""
        # A sleeper that was cancelled waits no more, and time must not jump for it.
        sleepers = self._sleepers
        while sleepers and sleepers[0][2] is None:
            heapq.heappop(sleepers)
        when: float = sleepers[0][0] if sleepers else math.inf
        return when

    def _jump(self, until: float) -> None:
        """Let the time jump, and wake the sleepers that are due then."""
        if until > self._now:  # noqa: PLR1730 - `max` takes three times as long
            self._now = until
        now = self._now
        sleepers = self._sleepers
        while sleepers and sleepers[0][0] <= now:
            what = heapq.heappop(sleepers)[2]
            if type(what) is trio.lowlevel.Task:
                if what._abort_func is not None:  # noqa: SLF001 - found above; else cancelled
                    self._reschedule(what)
            elif what is not None:
                what()

    def _node_of(self, entry: trio.lowlevel.Task) -> Node | None:
        return entry.context.get(current_node)

    def _strike_entry(self, entry: trio.lowlevel.Task) -> None:
        raise NotImplementedError(f"{entry} cannot be cancelled natively")

    def _make_ready(self, entries: Iterable[trio.lowlevel.Task]) -> None:
        self._runq.extend(entries)

    def _entries(self) -> list[trio.lowlevel.Task]:
        return sorted(self._runner.tasks, key=_age)

    def _seen(self, entry: trio.lowlevel.Task) -> tuple[object, str, object]:
        return entry, entry.name, entry.coro

    # --- trio's generator of random numbers ------------------------------------------------------

    def shuffle(self, batch: list[trio.lowlevel.Task]) -> None:
        """Leave one task in the batch. Trio calls this after it has looked for I/O."""
        if threading.get_ident() != self._thread:
            self._others.shuffle(batch)
            return
        if self._runner is None:
            self._meet(self._parts.context.runner)
        if self._error is not None:
            batch.clear()
            raise self._error
        if self._is_over:
            self._clean_up()
            return
        known = set(self._ready)
        self._ready += [task for task in batch if task not in known]
        batch.clear()
        self._places = batch
        self._place_next()

    def _meet(self, runner: Any) -> None:  # noqa: ANN401 - trio's own
        """Keep the parts of trio's runner that each step needs, and set the hook after steps."""
        module: Any = self._parts.module
        kind: Any = type(runner)
        runner.__class__ = _lean(kind, module._NO_SEND)  # noqa: SLF001 - found above
        self._runner = runner
        self._reschedule = runner.reschedule
        self._runq = runner.runq
        self._calls = runner.entry_queue.queue
        self._idempotent_calls = runner.entry_queue.idempotent_queue
        runner.instruments = _Instruments(self._after_step())

    def random(self) -> float:
        """Return any number: trio does not use it while the flag is set."""
        return 0.0 if threading.get_ident() == self._thread else float(self._others.random())

    def uniform(self, low: float, high: float) -> float:
        if threading.get_ident() == self._thread:
            return low  # trio does not use this one either
        return float(self._others.uniform(low, high))

    # --- trio's instrument -----------------------------------------------------------------------

    def _after_step(self) -> Callable[[str, trio.lowlevel.Task], None]:
        """Return the hook that puts the next task into the batch.

        It leaves the batch empty if trio has to do something else first.
        """
        # The hook runs after every step. So it avoids calls, and keeps what stays the same in a
        # run, at the price of some length.
        runner, takes = self._runner, self._takes
        ready, new, deadlines = self._ready, self._runq, runner.deadlines
        next_deadline, expire = deadlines.next_deadline, deadlines.expire
        calls, idempotent_calls = self._calls, self._idempotent_calls

        def place_next(_hook: str, _task: trio.lowlevel.Task) -> None:
            if self._is_over:
                new.extend(ready)
                ready.clear()
                return
            if calls or idempotent_calls:
                ready.extend(sorted(new, key=_age))
                new.clear()
                self._give_back()
                return
            if not new and not ready and not runner.waiting_for_idle:
                # Trio need not look for I/O before the jump, nor before a deadline passes.
                due, deadline = self._next_wake_up(), next_deadline()
                if deadline < due:  # noqa: PLR1730 - `min` takes three times as long
                    due = deadline
                if due < math.inf:
                    self._jump(due)
            scopes = deadlines._heap  # noqa: SLF001 - found above; trio replaces the list
            if scopes and scopes[0][0] <= self._now:
                expire(self._now)
            if new:
                if len(new) == 1:
                    ready.append(new.popleft())
                else:
                    ready.extend(sorted(new, key=_age))
                    new.clear()
            if ready:
                try:
                    chosen = next(takes)
                except Exception as error:  # noqa: BLE001 - trio drops it; `shuffle` raises it
                    self._failed(error)
                    self._error = error
                else:
                    if chosen is not None:
                        self._places.append(chosen)
                        return
            self._give_back()

        return place_next

    def _place_next(self) -> None:
        try:
            task = next(self._takes)
        except Exception as error:
            self._give_back()
            self._failed(error)
            raise
        if task is not None:
            self._places.append(task)

    def _give_back(self) -> None:
        """Give trio the tasks that can run; without them it would take the loop for idle."""
        self._runq.extend(self._ready)

    # --- trio's clock ----------------------------------------------------------------------------

    def start_clock(self) -> None:
        """Do nothing: this clock needs no start."""

    def current_time(self) -> float:
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Jump to the next deadline; return how long trio may wait. Called when no task can run."""
        runner = self._runner
        if runner is None or self._calls or self._idempotent_calls:
            return 0.0
        if self._error is not None:
            return 0.0  # `shuffle` raises it as soon as trio has looked for I/O
        if runner.waiting_for_idle:
            return _REAL_WAIT_S  # trio first wakes the tasks that wait for an idle loop
        deadline = min(deadline, self._next_wake_up())
        if deadline < math.inf:
            self._jump(deadline)
            return 0.0
        if self._scope is None or self._is_over:
            return _REAL_WAIT_S
        assert self.simulation is not None, "a scope is set inside a run"
        self.simulation.broken("deadlock", "every task waits, and nothing is due")
        return 0.0
