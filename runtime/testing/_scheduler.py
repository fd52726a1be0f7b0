"""The scheduler: one step of one task at a time, chosen from the tape. Knows trio's inside.

Trio lets a test suite make each batch of runnable tasks deterministic, by a flag and a generator
that shuffles the batch. This module takes the place of that generator for one run, and leaves one
task in the batch each time. These names are private to trio; `find_trio_parts` says so clearly
when one of them is gone, and is the only place that looks them up.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import trio
import trio.lowlevel
import trio.testing

from ._simulation import Node, Policy, SimulatorUnsupported, current_node
from ._tape import Tape

if TYPE_CHECKING:
    from ._simulation import Simulation, Strike

__all__ = ["Scheduler", "find_trio_parts"]

_PCT_CHANGES = 3
_PCT_RUN_MAX = 64
"""How often in a row the highest priority may run past others: who waits by yielding would starve
the one it waits for."""
_MASK = (1 << 64) - 1
_CLEAN_UP_STEPS_MAX = 200_000


class TrioParts(NamedTuple):
    """What is used of trio's private parts."""

    module: ModuleType
    context: Any  # trio's own, thread-local: it has the runner


def find_trio_parts() -> TrioParts:
    """The private names of trio that this relies on; `SimulatorUnsupported` if one is gone."""
    module = getattr(getattr(trio, "_core", None), "_run", None)
    wanted = {
        "trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING": (
            module,
            "_ALLOW_DETERMINISTIC_SCHEDULING",
        ),
        "trio._core._run._r": (module, "_r"),
        "trio._core._run.GLOBAL_RUN_CONTEXT": (module, "GLOBAL_RUN_CONTEXT"),
        "Runner.runq": (getattr(module, "Runner", None), "runq"),
        "Runner.deadlines": (getattr(module, "Runner", None), "deadlines"),
        "Runner.tasks": (getattr(module, "Runner", None), "tasks"),
        "Runner.waiting_for_idle": (getattr(module, "Runner", None), "waiting_for_idle"),
        "Deadlines.next_deadline": (getattr(module, "Deadlines", None), "next_deadline"),
        "Task._counter": (trio.lowlevel.Task, "_counter"),
    }
    gone = [name for name, (owner, attribute) in wanted.items() if not hasattr(owner, attribute)]
    if module is None or gone:
        raise SimulatorUnsupported(
            f"trio {trio.__version__} has no {', '.join(gone)} any more, which the simulator uses "
            "to choose the next task; use a trio that has, or adapt runtime/testing/_scheduler.py"
        )
    return TrioParts(module, module.GLOBAL_RUN_CONTEXT)


class Scheduler(trio.abc.Instrument):
    """Decides which task runs next. Trio takes it for its generator of random numbers."""

    def __init__(self, tape: Tape, policy: Policy, steps_max: int, strike: Strike | None) -> None:
        self._tape = tape
        self._policy = policy
        self._steps_max = steps_max
        self._strike = strike
        self._parts = find_trio_parts()
        self._clock = trio.testing.MockClock(autojump_threshold=0)
        self.simulation: Simulation | None = None
        self.steps = 0
        self.ended_at_s = 0.0
        self.node_steps: dict[str, int] = {}
        self.has_been_called = False
        self._trace = 0
        self._runner: Any = None  # trio's own
        self._ready: dict[trio.lowlevel.Task, None] = {}
        self._numbers: dict[trio.lowlevel.Task, int] = {}
        self._scope: anyio.CancelScope | None = None
        self._is_over = False
        self._clean_up_steps = 0
        self._is_choosing = False
        # The policies' own.
        self._priorities: dict[trio.lowlevel.Task, float] = {}
        self._lowest = 0.0
        self._in_a_row = 0
        self._last: trio.lowlevel.Task | None = None
        self._batch: list[trio.lowlevel.Task] = []
        random = tape.random
        horizon = 1 << (4 + int(random.random() * 10))
        self._changes = {int(random.random() * horizon) for _ in range(_PCT_CHANGES)}

    def run(self, simulation: Simulation, world: Callable[..., Any]) -> None:
        """Run a world to its end, as trio's generator meanwhile."""
        self.simulation = simulation
        module: Any = self._parts.module  # its names are set here, which its types forbid
        before = module._ALLOW_DETERMINISTIC_SCHEDULING, module._r  # noqa: SLF001 - found above
        module._ALLOW_DETERMINISTIC_SCHEDULING = True  # noqa: SLF001
        module._r = self  # noqa: SLF001
        try:
            trio.run(simulation.run, world, clock=self._clock, instruments=[self])
        finally:
            module._ALLOW_DETERMINISTIC_SCHEDULING, module._r = before  # noqa: SLF001

    @property
    def trace(self) -> str:
        return f"{self._trace:016x}"

    def now(self) -> float:
        return self._clock.current_time()

    def traced(self, text: str) -> None:
        """Make something part of what tells one run from another."""
        if not self._is_over:
            self._trace = (self._trace * 1_000_003 ^ zlib.crc32(text.encode())) & _MASK

    # --- the run, from its beginning to its end --------------------------------------------------

    def begin(self, scope: anyio.CancelScope) -> None:
        """The world begins; cancelling this scope ends it."""
        self._scope = scope

    def stop(self) -> None:
        """End the world at once."""
        if self._scope is not None:
            self._scope.cancel()

    def end(self) -> None:
        """The world is over: what was held runs on, in turn, only to end."""
        simulation = self.simulation
        assert simulation is not None, "a scheduler ends what it has begun"
        self.ended_at_s = self.now()
        for node in simulation.nodes.values():
            self.node_ended(node)
        for task in sorted(self._runner.tasks, key=lambda task: int(task._counter)):  # noqa: SLF001
            node = task.context.get(current_node)
            if node is None:
                continue
            if node.has_ended and not task.name.endswith("Node.run"):
                simulation.broken("orphan", f"{node} has ended, and left task {task.name} behind")
            if task in node.held:
                node.held.remove(task)
                self._runner.runq.append(task)
        self._is_over = True

    def release(self, node: Node) -> None:
        """A node is no longer frozen."""
        while node.held:
            self._runner.runq.append(node.held.popleft())

    def node_ended(self, node: Node) -> None:
        """A node will take no further step that counts."""
        if node.incarnation == 1:
            self.node_steps.setdefault(node.name, node.steps)

    # --- trio's generator ------------------------------------------------------------------------

    def shuffle(self, batch: list[trio.lowlevel.Task]) -> None:
        """Leave one task in the batch. Trio calls this before each step, and it must not raise."""
        if self.simulation is None or self._runner is not self._parts.context.runner:
            self._runner = self._parts.context.runner
        self.has_been_called = True
        try:
            if self._is_over:
                self._clean_up()
            else:
                self._choose(batch)
        except Exception as error:
            batch.clear()
            self._is_over = True
            if self.simulation is not None:
                self.simulation.is_over = False
                self.simulation.broken("harness", f"the scheduler failed: {error!r}")
            raise

    def random(self) -> float:
        """Trio's, for what is never used when the flag is set."""
        return 0.0

    def uniform(self, low: float, high: float) -> float:  # noqa: ARG002 - as `random`
        return low

    def _clean_up(self) -> None:
        self._clean_up_steps += 1
        if self._clean_up_steps > _CLEAN_UP_STEPS_MAX:
            raise RuntimeError("what a world left behind does not end when it is cancelled")

    def _choose(self, batch: list[trio.lowlevel.Task]) -> None:
        simulation = self.simulation
        assert simulation is not None, "trio shuffles inside a run"
        ready = self._ready
        for task in batch:
            if task not in ready:
                ready[task] = None
        batch.clear()
        for check in simulation.checks:
            check()
        while ready:
            task = self._next(ready)
            del ready[task]
            node = task.context.get(current_node)
            if node is not None and self._is_held(node):
                node.held.append(task)
                continue
            batch.append(task)
            break
        # Trio must see them, or it would take the loop to be idle.
        self._runner.runq.extend(ready)
        if batch:
            self._step(batch[0])

    def _is_held(self, node: Node) -> bool:
        if node.is_crashed or node.is_frozen:
            return True
        node.steps += 1
        strike = self._strike
        if (
            strike is None
            or node.incarnation != 1
            or node.name != strike.node
            or node.steps != strike.step
        ):
            return False
        match strike.kind:
            case "crash":
                node.crash()
            case "freeze":
                node.freeze(strike.seconds)
            case "cancel":
                node.cancel()
        return strike.kind != "cancel"

    def _step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1
        number = self._numbers.get(task)
        if number is None:
            number = self._numbers[task] = len(self._numbers)
        self._trace = (self._trace * 1_000_003 ^ number) & _MASK
        if self.steps == self._steps_max:
            assert self.simulation is not None, "trio shuffles inside a run"
            self.simulation.broken("budget", f"the world was not over after {self.steps} steps")
        elif self.steps == 2 * self._steps_max:
            raise RuntimeError("the world does not end when it is cancelled")

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - trio's interface
        """Nothing can run. If nothing is due either, nothing ever will."""
        runner = self._runner
        if (
            runner is None
            or runner.runq
            or runner.waiting_for_idle
            or runner.deadlines.next_deadline() < math.inf
            or self._scope is None
            or self._is_over
        ):
            return
        assert self.simulation is not None, "a scope is set inside a run"
        self.simulation.broken("deadlock", "every task waits, and nothing is due")

    # --- policies --------------------------------------------------------------------------------

    def _next(self, ready: dict[trio.lowlevel.Task, None]) -> trio.lowlevel.Task:
        """One of these. The tape keeps its place among those that wait; the oldest is 0."""
        if len(ready) == 1:
            return next(iter(ready))
        tape = self._tape
        if tape.is_played:
            place = tape.draw("task", len(ready))
            return next(iter(ready)) if not place else list(ready)[place]
        tasks = list(ready)
        if self._policy == "random":
            return tasks[tape.draw("task", len(tasks))]
        chosen = self._by_priority(tasks) if self._policy == "pct" else self._by_batch(tasks)
        tape.draw("task", len(tasks), lambda: tasks.index(chosen))
        return chosen

    def _by_priority(self, tasks: list[trio.lowlevel.Task]) -> trio.lowlevel.Task:
        priorities = self._priorities
        for task in tasks:
            if task not in priorities:
                priorities[task] = self._tape.random.random()
        chosen = max(tasks, key=priorities.__getitem__)
        self._in_a_row = self._in_a_row + 1 if chosen is self._last else 0
        self._last = chosen
        if self.steps in self._changes or self._in_a_row >= _PCT_RUN_MAX:
            self._in_a_row = 0
            self._lowest -= 1.0
            priorities[chosen] = self._lowest
            chosen = max(tasks, key=priorities.__getitem__)
        return chosen

    def _by_batch(self, tasks: list[trio.lowlevel.Task]) -> trio.lowlevel.Task:
        while True:
            if not self._batch:
                self._batch = tasks.copy()
                self._tape.random.shuffle(self._batch)
            chosen = self._batch.pop()
            if chosen in self._ready:
                return chosen
