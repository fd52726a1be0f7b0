"""The world inside a simulation: nodes, faults, decisions and findings.

A *node* is one incarnation of a process: its tasks carry it in a context variable. A node that
crashes is never run again, not even its `finally` blocks, until the world is over. Then it is
cleaned up with dead ports, and no check runs any more. Disks outlive nodes: they belong to the
world.
"""

from __future__ import annotations

import math
import random
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from sys import float_info
from typing import TYPE_CHECKING, Any, Literal, TypeVar, TypeVarTuple, get_args

import anyio

from .._backend import OneShot, is_interruption
from .._supervision import check_number, check_seconds, check_whole
from ..errors import Unavailable
from ..ports import Ids, Ports
from ._tape import Tape

if TYPE_CHECKING:
    from ._scheduler import Scheduler, Scope, Tasks

__all__ = [
    "Backend",
    "Broken",
    "Node",
    "NodeCrashed",
    "NotAnswered",
    "Policy",
    "Run",
    "Simulation",
    "SimulatorUnsupported",
    "Strike",
    "current_node",
]

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

Backend = Literal["trio", "asyncio"]
"""The event loop that a world runs on."""

Policy = Literal["random", "pct", "batch"]
"""How the next task is chosen. `random`: any that can run. `pct`: the one of the highest priority,
with a few changes of priority at random steps, so that one task may get far ahead of another.
`batch`: each that can run once, in any order, and then those that can run then."""

POLICIES: Sequence[Policy] = get_args(Policy)

NOTES_MAX = 40
WALL_CLOCK_START = 1_700_000_000.0

current_node: ContextVar[Node | None] = ContextVar("turnkeeper_simulated_node", default=None)


class SimulatorUnsupported(RuntimeError):
    """The backend is missing or taken by another thread, or has changed in a way not known here."""


class NodeCrashed(Unavailable):
    """The node has crashed. The request that it was working on may have taken effect."""

    def __init__(self, node: str) -> None:
        super().__init__(f"node {node} has crashed; its last request may have taken effect")
        self.node = node


class NotAnswered(Exception):
    """The node has not answered a call in time. The call is cancelled; it may have taken effect."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault at one step: for sweeps."""

    kind: Literal["crash", "freeze", "cancel", "cancel_task"]
    """`cancel` cancels the node's main function; `cancel_task`, on asyncio alone, cancels the task
    whose step it is, as a library does that calls `task.cancel()`."""
    node: str
    step: int
    """The step of that node's first incarnation, counted from 1, before which it strikes."""
    seconds: float = 60.0
    """The length of a freeze."""

    def __post_init__(self) -> None:
        check_whole("step", self.step)
        check_seconds("seconds", self.seconds)


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
    """The result of one simulated run."""

    seed: int
    policy: Policy
    steps: int
    seconds: float
    """Virtual seconds, up to the end of the world."""
    tape: Tape
    trace: str
    """Equal for equal runs, in every process; different runs very rarely share one."""
    marks: Counter[str]
    noted: tuple[tuple[float, int, str], ...]
    """The last notes that the world took, each with its time and its step."""
    broken: Broken | None = None
    node_steps: dict[str, int] = field(default_factory=dict)
    """The steps of the first incarnation of each node, up to its end."""
    backend: Backend = "trio"
    native_cancels: bool = False
    """True if the tape cancelled tasks natively, or could have."""
    story: str = ""
    """The steps, messages and handlers that led to the failure, 80 columns wide."""

    @property
    def ok(self) -> bool:
        return self.broken is None

    @property
    def notes(self) -> tuple[str, ...]:
        """The last notes that the world took, as lines."""
        return tuple(f"{at_s:9.3f} step {step:5} {text}" for at_s, step, text in self.noted)

    def check(self) -> None:
        """Raise `AssertionError`, with everything that is known, if an invariant was broken."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        head = (
            f"seed {self.seed}, {self.backend}, policy {self.policy}, "
            f"{self.steps} steps, {self.seconds:.3f} s"
        )
        if self.broken is None:
            return f"{head}: all invariants held"
        told = [self.story] if self.story else ["last notes:", *self.notes]
        return "\n".join([head, f"broken: {self.broken}", *told])


class _Worker:
    """A task of a node that makes the calls of one function in one context."""

    __slots__ = ("answer", "context", "is_cancelled", "name", "next", "scope")

    def __init__(self, name: str, context: Context, scope: Scope, answer: OneShot[Any]) -> None:
        self.name = name
        self.context = context
        """That of the callers. A call that changed its own leaves none behind for others."""
        self.scope = scope
        self.is_cancelled = False
        """True once the scope was cancelled, which takes longer to say so itself."""
        self.answer = answer  # Any: each call has its own kind
        """The answer of the call that it makes, or has made."""
        self.next: OneShot[Callable[[], Awaitable[object]] | None] = OneShot()
        """The next call; None if there will be none."""

    def cancel(self) -> None:
        """Cancel the call that it makes, and make no other."""
        self.is_cancelled = True
        self.scope.cancel()


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
        """The error of this node's wall clock, in seconds. Change it at any time."""
        self.error: BaseException | None = None
        """The error that its main function raised, if it did."""
        self._simulation = simulation
        self._now = simulation.scheduler.now
        self._clock_rate = clock_rate
        self.held: list[Any] = []  # Any: entries of the backend's scheduler
        self._tasks: Tasks | None = None
        self._is_cancelled = False
        self._calls: dict[OneShot[Any], None] = {}  # Any: each call has its own kind of answer
        self._over: list[OneShot[None]] = []
        self._idle: list[_Worker] = []
        """The workers that wait for a call."""
        drawn = simulation.tape.draw("node.random", 1 << 16)
        self.random = random.Random(f"{name} {incarnation} {drawn}")
        # Most clocks are right, and take no step of their own.
        scheduler = simulation.scheduler
        is_right = clock_rate == 1.0
        self.monotonic: Callable[[], float] = scheduler.now if is_right else self._read_clock
        self.sleep = scheduler.sleep if is_right else self._sleep
        self.ports = Ports(
            monotonic=self.monotonic,
            loop_time=self.monotonic,
            sleep=self.sleep,
            now=self.wall_clock,
            ids=Ids(self.wall_clock, self.random.getrandbits),
            random=self.random,
            start_thread=self._start_thread,
            blocking=self._block,
        )
        """The ports for the code that runs in this node."""

    def __repr__(self) -> str:
        return f"{self.name}.{self.incarnation}"

    @property
    def is_alive(self) -> bool:
        """True if it has neither crashed nor ended. It may be frozen."""
        return not self.is_crashed and not self.has_ended

    @property
    def is_held(self) -> bool:
        """True if its tasks may not run."""
        return self.is_crashed or self.is_frozen

    @property
    def task_name(self) -> str:
        """The name of the task that runs its main function."""
        return f"node {self}"

    # --- faults ----------------------------------------------------------------------------------

    def crash(self) -> None:
        """Run nothing here ever again. In this node's own tasks use `die`."""
        if not self.is_alive:
            return
        self.is_crashed = True
        self._simulation.note(f"{self} crashed")
        self._simulation.scheduler.node_ended(self)
        for call in list(self._calls):
            call.fail(NodeCrashed(self.name))
        self._is_over()

    async def die(self) -> None:
        """Crash this node from one of its own tasks; does not return."""
        self.crash()
        await anyio.sleep_forever()

    def freeze(self, seconds: float) -> None:
        """Run nothing here for `seconds` of virtual time, which passes for all other nodes."""
        if self.is_alive and not self.is_frozen:
            self.is_frozen = True
            self._simulation.note(f"{self} frozen for {seconds:.3f} s")
            self._simulation.start_soon(self._thaw_after, seconds)

    async def _thaw_after(self, seconds: float) -> None:
        await self._simulation.sleep(seconds)
        self.thaw()

    def thaw(self) -> None:
        """End a freeze."""
        if self.is_frozen:
            self.is_frozen = False
            if not self.is_crashed:
                self._simulation.note(f"{self} goes on")
                self._simulation.scheduler.release(self)

    def cancel(self) -> None:
        """Cancel its main function: an orderly end at an awkward moment."""
        if self.is_alive:
            self._simulation.note(f"{self} cancelled")
            self._is_cancelled = True
            if self._tasks is not None:
                self._tasks.cancel_scope.cancel()

    async def wait_until_ended(self) -> None:
        """Wait until it has crashed or ended."""
        if self.is_alive:
            gate: OneShot[None] = OneShot()
            self._over.append(gate)
            await gate.wait()

    # --- work ------------------------------------------------------------------------------------

    async def call(self, function: Callable[[], Awaitable[T]], limit_s: float = math.inf) -> T:
        """Run a function inside this node, as a request that reaches its process.

        Raises the function's own errors, `NodeCrashed` at once if the node has crashed or ended,
        or does so meanwhile, and `NotAnswered` after `limit_s` seconds. The function is cancelled
        then, and if the caller is cancelled. `limit_s` costs less than a cancel scope around the
        call. Calls that come one after the other may run in one task; its context is fresh in each.
        """
        tasks = self._tasks
        if tasks is None or not self.is_alive:
            raise NodeCrashed(self.name)
        answer: OneShot[T] = OneShot()
        self._calls[answer] = None
        scheduler = self._simulation.scheduler
        worker = self._begin_call(tasks, function, answer)

        def give_up() -> None:
            answer.fail(NotAnswered(f"{self.name} has not answered in {limit_s} s"))

        alarm = None if limit_s == math.inf else scheduler.call_later(limit_s, give_up)
        try:
            return await answer.wait()
        finally:
            self._calls.pop(answer, None)
            if alarm is not None:
                alarm.cancel()
            is_left = not answer.is_done or isinstance(answer.error, NotAnswered)
            if is_left and worker.answer is answer:
                worker.cancel()
            answer.error = None  # its traceback refers to the worker, which refers to the answer

    def _begin_call(
        self, tasks: Tasks, function: Callable[[], Awaitable[T]], answer: OneShot[T]
    ) -> _Worker:
        """Have a worker make this call: one that has done another like it, or a new one."""
        # A task with its scope costs as much as most calls do.
        name, context = _name_of(function), copy_context()
        for worker in self._idle:
            is_like = worker.name == name and worker.context == context
            if is_like and not worker.is_cancelled:
                self._idle.remove(worker)
                worker.answer = answer
                worker.next.set(function)
                return worker
        worker = _Worker(name, context, self._simulation.scheduler.scope(), answer)
        self._spawn(tasks, partial(self._work, worker, function), f"call {name}")
        return worker

    async def _work(self, worker: _Worker, function: Callable[[], Awaitable[object]]) -> None:
        """Make calls, one after the other, until one of them is cancelled."""
        context = copy_context()
        try:
            with worker.scope:
                while True:
                    try:
                        worker.answer.set(await function())
                    except Exception as error:  # noqa: BLE001 - carried to the caller
                        worker.answer.fail(error)
                    if worker.is_cancelled or copy_context() != context:
                        return
                    self._simulation.scheduler.renew()
                    worker.next = OneShot()
                    self._idle.append(worker)
                    more = await worker.next.wait()
                    if more is None:
                        return
                    function = more
        finally:
            if worker in self._idle:
                self._idle.remove(worker)
            worker.answer.fail(NodeCrashed(self.name))  # no effect once it has answered

    def end_idle(self) -> None:
        """End the tasks that wait for a call."""
        idle, self._idle = self._idle, []
        for worker in idle:  # to cancel them costs more
            worker.next.set(None)

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a function beside the main one; it is cancelled when that ends."""
        if self._tasks is not None and self.is_alive:
            self._spawn(self._tasks, function)

    # Any, here and above: nothing is sent to these coroutines but by their backend.
    def _spawn(
        self,
        tasks: Tasks,
        function: Callable[[], Coroutine[Any, Any, None]],
        name: str | None = None,
    ) -> None:
        token = current_node.set(self)
        try:
            tasks.start_soon(function, name=name)
        finally:
            current_node.reset(token)

    async def run(self, main: Callable[[Node], Awaitable[None]]) -> None:
        """Run the main function, and whatever it started, to their end."""
        try:
            async with self._simulation.scheduler.open_tasks() as self._tasks:
                try:
                    if self._is_cancelled:  # before its first step
                        self._tasks.cancel_scope.cancel()
                    await main(self)
                finally:
                    self.end_idle()
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
        """Raise `NodeCrashed` if this node has crashed: for the ports that a world makes."""
        if self.is_crashed:
            raise NodeCrashed(self.name)

    def _read_clock(self) -> float:
        return self._now() * self._clock_rate

    async def _sleep(self, seconds: float) -> None:
        await self._simulation.scheduler.sleep(seconds / self._clock_rate)

    def wall_clock(self) -> float:
        return WALL_CLOCK_START + self.monotonic() + self.wall_clock_off_s

    async def _block(self, function: Callable[[], T]) -> T:
        await self._simulation.delay("blocking")
        self.check_alive()
        return function()

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        """Run a thread as a task: it takes a while, then runs in one go, and must not wait."""
        self.check_alive()

        async def run() -> None:
            await self._simulation.delay(f"thread {name}")
            self.check_alive()
            target()

        self.start_soon(run)


class Simulation:
    """The world function's handle: start nodes, draw decisions, report findings."""

    def __init__(
        self, tape: Tape, scheduler: Scheduler[Any], *, notes_max: int = NOTES_MAX
    ) -> None:
        self.tape = tape
        self.scheduler = scheduler
        self.now: Callable[[], float] = scheduler.now
        """Returns the virtual seconds since the beginning."""
        self.marks: Counter[str] = Counter()
        self.nodes: dict[str, Node] = {}
        """The newest incarnation of each node, by name."""
        self.checks: list[Callable[[], None]] = []
        """Functions to call before every step. They may call `broken`, and must be cheap."""
        self.at_end: list[Callable[[], None]] = []
        """Functions to call when all is over. They must not raise. What a world has kept, and drops
        there, is freed at once: the garbage collector would take several times as long.
        """
        self.first_broken: Broken | None = None
        self.is_over = False
        self._notes: deque[tuple[float, int, str]] = deque(maxlen=notes_max)
        self._tasks: Tasks | None = None
        self.incarnations: list[Node] = []
        """All nodes that were started, oldest first."""

    # --- decisions -------------------------------------------------------------------------------

    def draw(self, label: str, options: int) -> int:
        """Return a number from 0 to `options - 1`; 0 is the boring choice."""
        return self.tape.draw(label, options)

    def chance(self, label: str, probability: float) -> bool:
        """Return True with this probability; False is the boring choice."""
        return self.tape.chance(label, probability)

    def pick(self, label: str, options: Sequence[T]) -> T:
        """Return one of the options; the first is the boring choice."""
        return options[self.tape.draw(label, len(options))]

    async def delay(self, label: str, probability: float = 0.3, seconds_max: float = 0.1) -> None:
        """With this probability wait, for at most `seconds_max`; else only let others run."""
        if self.tape.chance(f"{label} waits", probability):
            share = (1 + self.tape.draw(f"{label} waits for", 100)) / 100
            await self.scheduler.sleep(seconds_max * share)
        else:
            await anyio.lowlevel.checkpoint()

    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        """Wait as `anyio.sleep` does, at a lower cost: for code of a world that sleeps often."""
        return self.scheduler.sleep(seconds)

    def move_on_after(self, seconds: float) -> Scope:
        """Return a cancel scope that ends after `seconds`, as `anyio.move_on_after` does.

        It costs less: for code of a world that opens many.
        """
        return self.scheduler.scope(seconds)

    # --- nodes -----------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        main: Callable[[Node], Awaitable[None]],
        *,
        clock_rate: float = 1.0,
    ) -> Node:
        """Start a node, or its next incarnation: the process runs `main(node)`.

        `clock_rate` is the number of seconds that its clock counts in one second; raises
        `ValueError` unless it is finite and above 0, since time would stand still or jump.
        """
        allowed = "a finite number above 0"
        check_number("clock_rate", clock_rate, allowed, least=float_info.min, most=float_info.max)
        assert self._tasks is not None, "a simulation starts its nodes itself"
        before = self.nodes.get(name)
        incarnation = 1 if before is None else before.incarnation + 1
        node = Node(self, name, incarnation, clock_rate=clock_rate)
        self.nodes[name] = node
        self.incarnations.append(node)
        self.note(f"{node} started")
        run = partial(node.run, main)
        node._spawn(self._tasks, run, node.task_name)  # noqa: SLF001 - of this module
        return node

    def start_soon(
        self, function: Callable[[*Arguments], Coroutine[Any, Any, None]], *arguments: *Arguments
    ) -> None:
        """Run a task of the world's own, outside of all nodes. An error of it is a finding."""
        name = _name_of(function)
        assert self._tasks is not None, "a simulation starts its tasks itself"
        token = current_node.set(None)
        try:
            self._tasks.start_soon(self._run_task, function, *arguments, name=name)
        finally:
            current_node.reset(token)

    async def _run_task(
        self, function: Callable[[*Arguments], Coroutine[Any, Any, None]], *arguments: *Arguments
    ) -> None:
        try:
            await function(*arguments)
        except BaseException as error:
            if is_interruption(error):
                raise
            self.broken("world", _told(error))

    # --- findings --------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        return self.scheduler.steps

    def mark(self, name: str) -> None:
        """Count that this place was reached. A campaign can require that some run reaches it."""
        self.marks[name] += 1

    def note(self, text: str) -> None:
        """Write a line for the reader of a failure; the last `notes_max` are kept."""
        self._notes.append((self.now(), self.steps, text))
        self.scheduler.traced(text)
        if self.scheduler.story is not None:
            self.scheduler.story.say(text)

    def broken(self, invariant: str, detail: str) -> None:
        """Report an invariant that does not hold, and end the run soon. Never raises.

        Only the first report counts.
        """
        if self.first_broken is None and not self.is_over:
            self.first_broken = Broken(invariant, detail, self.steps, self.now())
            if self.scheduler.story is not None:
                self.scheduler.story.broken(self.first_broken, self.scheduler.tasks())
            self.scheduler.stop()

    def require(self, condition: bool, invariant: str, detail: str) -> None:  # noqa: FBT001
        """Call `broken` unless the condition holds."""
        if not condition:
            self.broken(invariant, detail)

    @property
    def noted(self) -> tuple[tuple[float, int, str], ...]:
        """The last notes, each with its time and its step."""
        return tuple(self._notes)

    async def run(self, world: Callable[[Simulation], Awaitable[None]]) -> None:
        """Run the world, and then end everything that it left behind."""
        try:
            async with self.scheduler.open_tasks() as self._tasks:
                try:
                    with anyio.CancelScope() as scope:
                        self.scheduler.begin(scope)
                        try:
                            await world(self)
                        except BaseException as error:
                            if is_interruption(error):
                                raise
                            self.broken("world", _told(error))
                finally:
                    # After an interrupt, too: the tasks of a crashed node wait for this.
                    self.scheduler.end()
                    self.is_over = True
                    for node in self.incarnations:
                        node.end_idle()
                    self._tasks.cancel_scope.cancel()
        except BaseException as error:
            if is_interruption(error):
                raise
            self.is_over = False
            self.broken("world", _told(error))
            self.is_over = True


def _name_of(function: Callable[..., object]) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _told(error: BaseException) -> str:
    """Return an error with the place that it comes from."""
    return "".join(traceback.format_exception(error)).strip()
