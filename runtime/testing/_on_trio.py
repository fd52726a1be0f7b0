"""The scheduler of trio: one step of one task at a time. Uses private parts of trio.

Trio lets a test suite make each batch of runnable tasks deterministic, by a flag and a generator
that shuffles the batch. This module takes the place of that generator for one run, and leaves one
task in the batch. After that task's step it steps one task after the other itself, as trio's loop
does, until I/O, a deadline or a call from another thread must be looked at, which it leaves to
trio. Its clock jumps to the next deadline when no task can run. The generator is one for the whole
process, so the loops of other threads are given trio's own.

These names are private to trio. Only `find_trio_parts` looks them up; it raises an error that names
the missing ones if trio has changed.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sized
from contextlib import AbstractAsyncContextManager
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import trio
import trio.abc
import trio.lowlevel
from outcome import Error, Outcome, Value

from .._backend import Park, Waker, parking
from ._scheduler import Alarm, Scheduler, Scope, Tasks
from ._simulation import Node, Policy, SimulatorUnsupported, Strike, current_node
from ._tape import Tape

if TYPE_CHECKING:
    from ._simulation import Simulation

__all__ = ["TrioScheduler", "find_trio_parts"]

_REAL_WAIT_S = 3_600.0
"""How long trio may wait for I/O when something other than the clock will wake a task."""
_STEPS_AT_ONCE_MAX = 256
"""The most steps until trio looks for I/O and for deadlines once more."""


_PARTS_OF_A_TASK = (
    "_abort_func",
    "_attempt_delivery_of_any_pending_cancel",
    "_attempt_delivery_of_pending_ki",
    "_cancel_points",
    "_cancel_status",
    "_counter",
    "_next_send",
    "_next_send_fn",
    "_schedule_points",
)


class TrioParts(NamedTuple):
    """The private parts of trio that the scheduler uses."""

    module: ModuleType
    context: Any  # trio's own, thread-local: it has the runner
    waits: type[Any]  # the message of a task that waits
    yields: object  # the message of a task at a checkpoint that is not cancelled there


def find_trio_parts() -> TrioParts:
    """Return the private parts of trio; raise `SimulatorUnsupported` if one is missing."""
    module = getattr(getattr(trio, "_core", None), "_run", None)
    runner = getattr(module, "Runner", None)
    queue = getattr(getattr(trio, "_core", None), "_entry_queue", None)
    traps = getattr(getattr(trio, "_core", None), "_traps", None)
    task = trio.lowlevel.Task
    wanted = {
        "trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING": (
            module,
            "_ALLOW_DETERMINISTIC_SCHEDULING",
        ),
        "trio._core._run._r": (module, "_r"),
        "trio._core._run.GLOBAL_RUN_CONTEXT": (module, "GLOBAL_RUN_CONTEXT"),
        "Runner.runq": (runner, "runq"),
        "Runner.deadlines": (runner, "deadlines"),
        "Runner.tasks": (runner, "tasks"),
        "Runner.waiting_for_idle": (runner, "waiting_for_idle"),
        "Runner.entry_queue": (runner, "entry_queue"),
        "Runner.instruments": (runner, "instruments"),
        "EntryQueue.queue": (getattr(queue, "EntryQueue", None), "queue"),
        "EntryQueue.idempotent_queue": (getattr(queue, "EntryQueue", None), "idempotent_queue"),
        "Deadlines._heap": (getattr(module, "Deadlines", None), "_heap"),
        "Deadlines.next_deadline": (getattr(module, "Deadlines", None), "next_deadline"),
        "Runner.ki_pending": (runner, "ki_pending"),
        "Runner.main_task": (runner, "main_task"),
        "Runner.task_exited": (runner, "task_exited"),
        "Runner.reschedule": (runner, "reschedule"),
        "WaitTaskRescheduled": (traps, "WaitTaskRescheduled"),
        "CancelShieldedCheckpoint": (traps, "CancelShieldedCheckpoint"),
        "CancelStatus.effectively_cancelled": (
            getattr(module, "CancelStatus", None),
            "effectively_cancelled",
        ),
        **{f"Task.{name}": (task, name) for name in _PARTS_OF_A_TASK},
    }
    gone = [name for name, (owner, attribute) in wanted.items() if not hasattr(owner, attribute)]
    if module is None or gone:
        raise SimulatorUnsupported(
            f"trio {trio.__version__} lacks {', '.join(gone)}, which the simulator uses to choose "
            "the next task; use another version of trio, or adapt runtime/testing/_on_trio.py"
        )
    assert traps is not None, "its messages were found"
    return TrioParts(
        module,
        module.GLOBAL_RUN_CONTEXT,
        traps.WaitTaskRescheduled,
        traps.CancelShieldedCheckpoint,
    )


_age: Callable[[trio.lowlevel.Task], int] = attrgetter("_counter")  # see find_trio_parts


def _same(message: object, _: object) -> object:
    """Return the message, whatever trio sends."""
    return message


class _Instruments(dict[str, None]):
    """Takes the place of trio's table of instruments, which it looks into four times a step.

    It knows one hook, which it calls directly; trio's looks for the instruments of each.
    """

    def __init__(self, call: Callable[[str, trio.lowlevel.Task], None]) -> None:
        super().__init__(after_task_step=None)
        self.call = call

    def add_instrument(self, _: trio.abc.Instrument) -> None:
        raise SimulatorUnsupported(
            "trio's instruments do not work in a simulation, which is the only instrument of its "
            "loop; use them in a plain trio.run"
        )


class _Sleeper:
    """A task that waits for a time; once it has left its wait, it has no waker."""

    __slots__ = ("waker",)

    def __init__(self) -> None:
        self.waker: Waker | None = None


class _Alarm:
    """A call that is due later. Its waker is itself until it is due or cancelled."""

    __slots__ = ("run", "waker")

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.waker: Waker | None = self

    def set_result(self, _: None = None) -> None:
        self.waker = None
        self.run()

    def cancel(self) -> None:
        self.waker = None


class TrioScheduler(Scheduler[trio.lowlevel.Task], trio.abc.Clock):
    """Trio uses it as its clock, as its instrument, and as its generator of random numbers."""

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
        self._sleepers: list[tuple[float, int, _Sleeper | _Alarm]] = []
        self._slept = 0
        self._park: Park
        self._runner: Any = None  # trio's own, as these:
        self._runq: deque[trio.lowlevel.Task] = deque()
        self._calls: Sized = ()
        self._idempotent_calls: Sized = ()
        self._deadlines: Any = None
        self._places: list[trio.lowlevel.Task] = []
        """Trio's batch: it steps whatever is put here."""
        self._error: Exception | None = None
        self._thread = 0
        self._others: Any = None
        """Trio's generator, for the loops of other threads."""

    def run(self, simulation: Simulation, world: Callable[[Simulation], Awaitable[None]]) -> None:
        self.simulation = simulation
        module: Any = self._parts.module  # its names are set here, which its types forbid
        before = module._ALLOW_DETERMINISTIC_SCHEDULING, module._r
        self._thread, self._others = threading.get_ident(), module._r
        try:
            module._ALLOW_DETERMINISTIC_SCHEDULING = True
            module._r = self
            trio.run(simulation.run, world, clock=self)
        finally:
            module._ALLOW_DETERMINISTIC_SCHEDULING, module._r = before
        if self._runner is None:
            raise SimulatorUnsupported("trio did not ask the simulator which task to run next")

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait as `trio.sleep` does, for a tenth of its cost: without a cancel scope."""
        if seconds <= 0.0:
            await trio.lowlevel.checkpoint()
            return
        sleeper = _Sleeper()
        self._slept += 1
        heapq.heappush(self._sleepers, (self._now + seconds, self._slept, sleeper))
        await self._park(sleeper)

    def call_later(self, seconds: float, run: Callable[[], None]) -> Alarm:
        alarm = _Alarm(run)
        self._slept += 1
        heapq.heappush(self._sleepers, (self._now + seconds, self._slept, alarm))
        return alarm

    def begin(self, scope: anyio.CancelScope) -> None:
        super().begin(scope)
        self._park = parking()

    def scope(self, seconds: float = math.inf) -> Scope:
        """Return one of trio's own, which costs less than one of anyio's around it."""
        return trio.CancelScope(deadline=self._now + seconds)

    def open_tasks(self) -> AbstractAsyncContextManager[Tasks]:
        """Open one of trio's own, in which a task costs less than in one of anyio's."""
        return trio.open_nursery()

    def _next_wake_up(self) -> float:
        """Return when the next sleeper is due, or infinity."""
        # A sleeper that was cancelled waits no more, and time must not jump for it.
        sleepers = self._sleepers
        while sleepers and sleepers[0][2].waker is None:
            heapq.heappop(sleepers)
        return sleepers[0][0] if sleepers else math.inf

    def _jump(self, until: float) -> None:
        """Let the time jump, and wake the sleepers that are due then."""
        self._now = now = max(self._now, until)
        sleepers = self._sleepers
        while sleepers and sleepers[0][0] <= now:
            waker = heapq.heappop(sleepers)[2].waker
            if waker is not None:
                waker.set_result(None)

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
        """Leave one task in the batch. Trio calls this when it has looked for I/O."""
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
        """Keep the parts of trio's runner that are looked at in every step."""
        self._runner = runner
        runner.instruments = _Instruments(self._after_task_step)
        self._runq = runner.runq
        self._calls = runner.entry_queue.queue
        self._idempotent_calls = runner.entry_queue.idempotent_queue
        self._deadlines = runner.deadlines

    def random(self) -> float:
        """Return a number that trio does not use when the flag is set."""
        return 0.0 if threading.get_ident() == self._thread else float(self._others.random())

    def uniform(self, low: float, high: float) -> float:
        if threading.get_ident() == self._thread:
            return low  # not used either
        return float(self._others.uniform(low, high))

    # --- trio's instrument -----------------------------------------------------------------------

    def _after_task_step(  # noqa: C901 - all of one step, which is as trio writes it
        self, hook: str, task: trio.lowlevel.Task
    ) -> None:
        """Step one task after the other, as trio does, until it must look at something itself."""
        # This runs every step: it avoids calls and look-ups at the price of some length. Trio does
        # more between two steps, for I/O, which a simulation has not, and for instruments.
        del hook, task  # or a task that has ended would stay
        runner, context, waits = self._runner, self._parts.context, self._parts.waits
        ready, new, deadlines = self._ready, self._runq, self._deadlines
        calls, idempotent_calls, take = self._calls, self._idempotent_calls, self._take
        message: Any  # trio's own, as the task
        chosen: Any
        end: Outcome[object] | None
        # Time jumps if nothing can run, and to the first deadline at most. So a deadline that has
        # passed was set since; trio, too, looks for such a one only now and then.
        for _ in range(_STEPS_AT_ONCE_MAX):
            if self._is_over or calls or idempotent_calls:
                break
            if new:
                if len(new) == 1:
                    ready.append(new.popleft())
                else:
                    self._collect()
            elif not ready:
                # If only sleepers of ours are due next, trio need not look for I/O before the jump.
                due = self._next_wake_up()
                if runner.waiting_for_idle or due >= deadlines.next_deadline():
                    break
                self._jump(due)
                self._collect()
            try:
                chosen = take()
            except Exception as error:  # noqa: BLE001 - trio drops it here; `shuffle` raises it
                self._failed(error)
                self._error = error
                break
            if chosen is None:
                break
            context.task = chosen
            send, sent = chosen._next_send_fn, chosen._next_send
            chosen._next_send_fn = chosen._next_send = None
            try:
                message = chosen.context.run(send, sent)
            except StopIteration as stop:
                end = Value(stop.value)
            except BaseException as error:  # noqa: BLE001 - carried to the task's parent
                traceback = error.__traceback__
                end = Error(error.with_traceback(traceback and traceback.tb_next))
                del traceback  # or the frames that it holds would stay
            else:
                if type(message) is waits:
                    chosen._schedule_points += 1
                    chosen._cancel_points += 1
                    chosen._abort_func = message.abort_func
                    if runner.ki_pending and chosen is runner.main_task:
                        chosen._attempt_delivery_of_pending_ki()
                    if chosen._cancel_status.effectively_cancelled:
                        chosen._attempt_delivery_of_any_pending_cancel()
                elif message is self._parts.yields:
                    chosen._schedule_points += 1
                    runner.reschedule(chosen)
                else:  # rare: trio receives the message once more, from a step of its own
                    chosen._next_send_fn = partial(_same, message)
                    self._places.append(chosen)
                    return
                continue
            runner.task_exited(chosen, end)
            chosen = message = end = sent = None  # or the newest error would stay
        if self._is_over:
            self._ready = []
        else:
            self._collect()
        self._runq.extend(ready)  # without these trio would find the loop idle

    def _collect(self) -> None:
        """Take in the tasks that have become ready."""
        self._ready += sorted(self._runq, key=_age)
        self._runq.clear()

    def _place_next(self) -> None:
        try:
            task = self._take()
        except Exception as error:
            self._runq.extend(self._ready)
            self._failed(error)
            raise
        if task is not None:
            self._places.append(task)

    # --- trio's clock ----------------------------------------------------------------------------

    def start_clock(self) -> None:
        """Do nothing: this clock needs no start."""

    def current_time(self) -> float:
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Let the time jump to the next deadline: trio asks when no task can run."""
        runner = self._runner
        if runner is None or self._calls or self._idempotent_calls:
            return 0.0
        if self._error is not None:
            return 0.0  # `shuffle` raises it as soon as trio has looked for I/O
        if runner.waiting_for_idle:
            return _REAL_WAIT_S  # tasks wait for the loop to be idle, as it is before the jump
        deadline = min(deadline, self._next_wake_up())
        if deadline < math.inf:
            self._jump(deadline)
            return 0.0
        if self._scope is None or self._is_over:
            return _REAL_WAIT_S
        assert self.simulation is not None, "a scope is set inside a run"
        self.simulation.broken("deadlock", "every task waits, and nothing is due")
        return 0.0
