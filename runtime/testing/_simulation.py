"""The world inside a simulation: nodes, faults, decisions, and what was found.

A *node* is one incarnation of a process: its tasks carry it in a context variable. A node that
crashes is never run again, not even its `finally` blocks, until the world is over; then it is
cleaned up with dead ports, where nobody looks. What a node leaves behind on a disk is the world's.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, TypeVarTuple, get_args

import anyio

from .._backend import OneShot
from ..errors import Unavailable
from ..ports import Ids, Ports
from ._tape import Tape

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from ._scheduler import Scheduler

__all__ = [
    "Broken",
    "Node",
    "NodeCrashed",
    "Policy",
    "Run",
    "Simulation",
    "SimulatorUnsupported",
    "Strike",
    "current_node",
]

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

Policy = Literal["random", "pct", "batch"]
"""How the next task is chosen. `random`: any that can run. `pct`: the one of the highest priority,
with a few changes of priority at random steps, so that one task may get far ahead of another.
`batch`: each that can run once, in any order, and then those that can run then."""

POLICIES: Sequence[Policy] = get_args(Policy)

NOTES_MAX = 40
WALL_CLOCK_START = 1_700_000_000.0

current_node: ContextVar[Node | None] = ContextVar("turnkeeper_simulated_node", default=None)


class SimulatorUnsupported(RuntimeError):
    """Trio is missing here, or is not as the simulator knows it."""


class NodeCrashed(Unavailable):
    """The node that this was asked of, or was about to touch the world, has crashed."""

    def __init__(self, node: str) -> None:
        super().__init__(f"node {node} has crashed; what it was at may have happened")
        self.node = node


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault at one step: for sweeps."""

    kind: Literal["crash", "freeze", "cancel"]
    node: str
    step: int
    """Before which step of that node's first incarnation, counted from 1."""
    seconds: float = 60.0
    """How long it is frozen."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The first invariant that did not hold."""

    invariant: str
    detail: str
    step: int
    at_s: float

    def __str__(self) -> str:
        return f"{self.invariant} at step {self.step} ({self.at_s:.3f} s): {self.detail}"


@dataclass(frozen=True, slots=True)
class Run:
    """What one simulated run came to."""

    seed: int
    policy: Policy
    steps: int
    seconds: float
    """Virtual ones."""
    tape: Tape
    trace: str
    """The same for the same run, in whichever process; and for hardly any other."""
    marks: Counter[str]
    notes: tuple[str, ...]
    """The last things that the world wrote down."""
    broken: Broken | None = None
    node_steps: dict[str, int] = field(default_factory=dict)
    """Of the first incarnation of each node, up to its end."""

    @property
    def ok(self) -> bool:
        return self.broken is None

    def check(self) -> None:
        """Raise `AssertionError`, with all there is to know, where an invariant was broken."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        head = f"seed {self.seed}, policy {self.policy}, {self.steps} steps, {self.seconds:.3f} s"
        if self.broken is None:
            return f"{head}: all invariants held"
        return "\n".join([head, f"broken: {self.broken}", "last notes:", *self.notes])


class Node:
    """One incarnation of a process. Made by `Simulation.start`."""

    def __init__(
        self, simulation: Simulation, name: str, incarnation: int, *, clock_rate: float
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.is_crashed = False
        self.is_frozen = False
        self.has_ended = False
        self.steps = 0
        self.wall_clock_off_s = 0.0
        """How far this node's wall clock is off. It may be changed at any time."""
        self.error: BaseException | None = None
        """What its main function raised."""
        self._simulation = simulation
        self._clock_rate = clock_rate
        self.held: deque[Any] = deque()  # Any: the backend's own tasks
        self._tasks: TaskGroup | None = None
        self._scope = anyio.CancelScope()
        self._calls: dict[OneShot[Any], None] = {}  # Any: each call has its own kind of answer
        self._over: list[OneShot[None]] = []
        drawn = simulation.tape.draw("node.random", 1 << 16)
        self.random = random.Random(f"{name} {incarnation} {drawn}")
        ids = random.Random(f"ids {name} {incarnation} {drawn}")
        self.ports = Ports(
            monotonic=self.monotonic,
            sleep=self.sleep,
            now=self.wall_clock,
            ids=Ids(self.wall_clock, ids.getrandbits),
            random=self.random,
            start_thread=self._start_thread,
            blocking=self._block,
        )
        """The whole world, for the code that runs here."""

    def __repr__(self) -> str:
        return f"{self.name}.{self.incarnation}"

    @property
    def is_alive(self) -> bool:
        """It has neither crashed nor ended. It may be frozen."""
        return not self.is_crashed and not self.has_ended

    # --- faults ----------------------------------------------------------------------------------

    def crash(self) -> None:
        """Never run anything here again. In this node's own tasks use `die`."""
        if not self.is_alive:
            return
        self.is_crashed = True
        self._simulation.note(f"{self} crashed")
        self._simulation.scheduler.node_ended(self)
        for call in list(self._calls):
            call.fail(NodeCrashed(self.name))
        self._is_over()

    async def die(self) -> None:
        """`crash`, from inside; does not return."""
        self.crash()
        await anyio.sleep_forever()

    def freeze(self, seconds: float) -> None:
        """Run nothing here for so long, while time passes for everybody else."""
        if self.is_alive and not self.is_frozen:
            self.is_frozen = True
            self._simulation.note(f"{self} frozen for {seconds:.3f} s")
            self._simulation.start_soon(self._thaw_after, seconds)

    async def _thaw_after(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        self.thaw()

    def thaw(self) -> None:
        """End a freeze now."""
        if self.is_frozen:
            self.is_frozen = False
            if not self.is_crashed:
                self._simulation.note(f"{self} goes on")
                self._simulation.scheduler.release(self)

    def cancel(self) -> None:
        """Cancel its main function: its orderly way out, at an awkward moment."""
        if self.is_alive:
            self._simulation.note(f"{self} cancelled")
            self._scope.cancel()

    async def ended(self) -> None:
        """Wait until it has crashed or ended."""
        if self.is_alive:
            gate: OneShot[None] = OneShot()
            self._over.append(gate)
            await gate.wait()

    # --- work ------------------------------------------------------------------------------------

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a function inside this node, as a request that reaches its process.

        Raises what it raises, and `NodeCrashed` at once when the node is gone or goes. Cancelling
        the caller cancels the function.
        """
        tasks = self._tasks
        if tasks is None or not self.is_alive:
            raise NodeCrashed(self.name)
        answer: OneShot[T] = OneShot()
        self._calls[answer] = None
        scope = anyio.CancelScope()

        async def serve() -> None:
            try:
                with scope:
                    answer.set(await function())
            except Exception as error:  # noqa: BLE001 - carried to the caller
                answer.fail(error)
            finally:
                answer.fail(NodeCrashed(self.name))

        self._spawn(tasks, serve)
        try:
            return await answer.wait()
        finally:
            self._calls.pop(answer, None)
            if not answer.is_done:
                scope.cancel()

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a function beside the main one; it is cancelled when that ends."""
        if self._tasks is not None and self.is_alive:
            self._spawn(self._tasks, function)

    # Any, here and above: nothing is sent to these coroutines but by their backend.
    def _spawn(self, tasks: TaskGroup, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        token = current_node.set(self)
        try:
            tasks.start_soon(function)
        finally:
            current_node.reset(token)

    async def run(self, main: Callable[[Node], Awaitable[None]]) -> None:
        """The life of the node."""
        try:
            with self._scope:
                async with anyio.create_task_group() as self._tasks:
                    try:
                        await main(self)
                    finally:
                        self._tasks.cancel_scope.cancel()
        except* Exception as errors:  # noqa: BLE001 - carried to the world
            # A process that ends with a traceback; a cancellation beside it goes on.
            self.error = errors
            if not self.is_crashed:
                self._simulation.note(f"{self} failed: {errors!r}")
        finally:
            self._tasks = None
            if not self.is_crashed:
                self.has_ended = True
                self._simulation.note(f"{self} ended")
                self._simulation.scheduler.node_ended(self)
                self._is_over()

    def _is_over(self) -> None:
        over, self._over = self._over, []
        for gate in over:
            gate.set(None)

    # --- its ports -------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise `NodeCrashed` where this node has crashed: for the ports that a world makes."""
        if self.is_crashed:
            raise NodeCrashed(self.name)

    def monotonic(self) -> float:
        return self._simulation.now() * self._clock_rate

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds / self._clock_rate)

    def wall_clock(self) -> float:
        return WALL_CLOCK_START + self.monotonic() + self.wall_clock_off_s

    async def _block(self, function: Callable[[], T]) -> T:
        await self._simulation.delay("blocking")
        self.check_alive()
        return function()

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        """A thread is a task that takes a while and then runs in one go: it must not wait."""
        self.check_alive()

        async def run() -> None:
            await self._simulation.delay(f"thread {name}")
            self.check_alive()
            target()

        self.start_soon(run)


class Simulation:
    """What the world function is given: nodes to start, decisions to draw, findings to report."""

    def __init__(self, tape: Tape, scheduler: Scheduler, *, notes_max: int = NOTES_MAX) -> None:
        self.tape = tape
        self.scheduler = scheduler
        self.marks: Counter[str] = Counter()
        self.nodes: dict[str, Node] = {}
        """The newest incarnation of each node, by name."""
        self.checks: list[Callable[[], None]] = []
        """Called before every step. They may call `broken`; cheap ones only."""
        self.first_broken: Broken | None = None
        self.is_over = False
        self._notes: deque[str] = deque(maxlen=notes_max)
        self._tasks: TaskGroup | None = None
        self._incarnations: Counter[str] = Counter()

    # --- decisions -------------------------------------------------------------------------------

    def draw(self, label: str, options: int) -> int:
        """A number from 0 to `options - 1`; 0 is the boring one."""
        return self.tape.draw(label, options)

    def chance(self, label: str, probability: float) -> bool:
        """Whether something out of the ordinary happens."""
        return self.tape.chance(label, probability)

    def pick(self, label: str, options: Sequence[T]) -> T:
        """One of these; the first is the boring one."""
        return options[self.tape.draw(label, len(options))]

    async def delay(self, label: str, probability: float = 0.3, seconds_max: float = 0.1) -> None:
        """Wait for a while, now and then; let others run in any case."""
        if self.tape.chance(f"{label} waits", probability):
            await anyio.sleep(seconds_max * (1 + self.tape.draw(f"{label} waits for", 100)) / 100)
        else:
            await anyio.lowlevel.checkpoint()

    # --- nodes -----------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        main: Callable[[Node], Awaitable[None]],
        *,
        clock_rate: float = 1.0,
    ) -> Node:
        """Start a node, or its next incarnation: `main(node)` is what the process runs.

        `clock_rate`: how many of its seconds a second has, where its clock drifts.
        """
        assert self._tasks is not None, "a simulation starts its nodes itself"
        self._incarnations[name] += 1
        node = Node(self, name, self._incarnations[name], clock_rate=clock_rate)
        self.nodes[name] = node
        self.note(f"{node} started")
        node._spawn(self._tasks, partial(node.run, main))  # noqa: SLF001 - of this module
        return node

    def start_soon(
        self, function: Callable[[*Arguments], Coroutine[Any, Any, None]], *arguments: *Arguments
    ) -> None:
        """Run a task of the world's own: nobody's process."""
        assert self._tasks is not None, "a simulation starts its tasks itself"
        token = current_node.set(None)
        try:
            self._tasks.start_soon(partial(function, *arguments))
        finally:
            current_node.reset(token)

    # --- findings --------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        return self.scheduler.steps

    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self.scheduler.now()

    def mark(self, name: str) -> None:
        """An interesting place was reached. A campaign can demand that it was, in some run."""
        self.marks[name] += 1

    def note(self, text: str) -> None:
        """Something for the reader of a failure; the last `NOTES_MAX` are kept."""
        self._notes.append(f"{self.now():9.3f} step {self.steps:5} {text}")
        self.scheduler.traced(text)

    def broken(self, invariant: str, detail: str) -> None:
        """An invariant does not hold: the run ends here, as soon as it can. Never raises."""
        if self.first_broken is None and not self.is_over:
            self.first_broken = Broken(invariant, detail, self.steps, self.now())
            self.scheduler.stop()

    def require(self, condition: bool, invariant: str, detail: str) -> None:  # noqa: FBT001
        """`broken`, unless the condition holds."""
        if not condition:
            self.broken(invariant, detail)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    async def run(self, world: Callable[[Simulation], Awaitable[None]]) -> None:
        """The main task: the world, and then the end of all that it left behind."""
        async with anyio.create_task_group() as self._tasks:
            with anyio.CancelScope() as scope:
                self.scheduler.begin(scope)
                try:
                    await world(self)
                except Exception as error:  # noqa: BLE001 - the finding of this run
                    self.broken("world", _told(error))
            self.scheduler.end()
            self.is_over = True
            self._tasks.cancel_scope.cancel()


def _told(error: BaseException) -> str:
    """An error with the place that it comes from."""
    return "".join(traceback.format_exception(error)).strip()
