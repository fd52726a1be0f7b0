"""The base of both schedulers: the tape decides which task takes the next step.

A scheduler keeps the entries that can run (trio's tasks, asyncio's handles), in the order in which
they became ready. Before each step it runs the checks of the world, takes one entry out, and holds
back the entries of a node that is crashed or frozen. Everything it does is deterministic: the same
tape leads to the same `trace`.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import anyio

from ._tape import Tape

if TYPE_CHECKING:
    from ._simulation import Node, Policy, Simulation, Strike
    from ._story import Story

__all__ = ["Alarm", "Scheduler", "Scope", "Tasks"]

Entry = TypeVar("Entry")

_PCT_CHANGES = 3
_PCT_RUN_MAX = 64
"""How often in a row the task of the highest priority may overtake others. Without this bound, a
task that waits by yielding would starve the task that it waits for."""
_CLEAN_UP_STEPS_MAX = 200_000


class Tasks(Protocol):
    """A group of tasks: anyio's, or trio's own."""

    @property
    def cancel_scope(self) -> Any:  # noqa: ANN401 - of anyio or of trio
        ...

    # Any: nothing is sent to these coroutines but by their backend.
    def start_soon(
        self, run: Callable[..., Coroutine[Any, Any, None]], *arguments: object, name: object = None
    ) -> object: ...


class Alarm(Protocol):
    """A call that is due later: asyncio's, or one of trio's scheduler."""

    def cancel(self) -> object: ...


class Scope(Protocol):
    """A cancel scope: anyio's, or trio's own."""

    @property
    def cancelled_caught(self) -> bool: ...

    @property
    def cancel_called(self) -> bool: ...

    # Any: the backends name their parameters differently, and take different types of reasons.
    @property
    def cancel(self) -> Callable[[], Any]: ...

    def __enter__(self) -> Any:  # noqa: ANN401 - the scope itself
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> bool: ...


class _Priorities(dict[Entry, float]):
    """The priority of each entry; it is drawn when it is first looked up."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self._draw = draw

    def __missing__(self, entry: Entry) -> float:
        drawn = self[entry] = self._draw()
        return drawn


class Scheduler(ABC, Generic[Entry]):
    """Decides which entry runs next. Each backend has a subclass, which supplies the entries."""

    __slots__ = (
        "_batch",
        "_changes",
        "_clean_up_steps",
        "_in_a_row",
        "_is_over",
        "_known",
        "_last",
        "_lowest",
        "_native_cancels",
        "_policy",
        "_priorities",
        "_ready",
        "_running",
        "_scope",
        "_steps_max",
        "_strike",
        "_takes",
        "_tape",
        "_trace",
        "ended_at_s",
        "look",
        "looks_at",
        "node_steps",
        "simulation",
        "steps",
        "story",
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
        self._tape = tape
        self._policy = policy
        self._steps_max = steps_max
        self._strike = strike
        self._native_cancels = native_cancels
        self.simulation: Simulation | None = None
        self.story: Story | None = None
        """If set, each step is reported to it."""
        self.steps = 0
        self.look: Callable[[], None] = lambda: None
        """Called before the step `looks_at` and each later one, until `looks_at` is set anew."""
        self.looks_at: float = math.inf
        self.ended_at_s = 0.0
        self.node_steps: dict[str, int] = {}
        self._trace: list[int] = []
        """The number of the entry of each step, and the checksum of each text in between."""
        self._ready: deque[Entry] = deque()
        self._known: dict[Entry, tuple[int, Node | None]] = {}
        """Each entry's number, in the order in which they were first chosen, and the node whose
        code it runs. The number stands for the entry in the trace.
        """
        self._takes = self._taken()
        """`next` takes the next entry to run out of `_ready`; None if none of them may run."""
        self._running: Entry | None = None
        """The entry that was chosen last."""
        self._scope: anyio.CancelScope | None = None
        self._is_over = False
        self._clean_up_steps = 0
        # The state of the policies.
        self._priorities: _Priorities[Entry] = _Priorities(tape.random.random)
        self._lowest = 0.0
        self._in_a_row = 0
        self._last: Entry | None = None
        self._batch: list[Entry] = []
        random = tape.random
        horizon = 1 << (4 + int(random.random() * 10))
        self._changes = {int(random.random() * horizon) for _ in range(_PCT_CHANGES)}

    # --- what each backend does its own way ------------------------------------------------------

    @abstractmethod
    def run(self, simulation: Simulation, world: Callable[[Simulation], Awaitable[None]]) -> None:
        """Run a world to its end."""

    @abstractmethod
    def now(self) -> float:
        """Return the virtual seconds since the beginning."""

    async def sleep(self, seconds: float) -> None:
        """Wait until `seconds` of virtual time have passed."""
        await anyio.sleep(seconds)

    @abstractmethod
    def call_later(self, seconds: float, run: Callable[[], None]) -> Alarm:
        """Call a function in `seconds` of virtual time, outside all tasks; it must not raise."""

    def scope(self, seconds: float = math.inf) -> Scope:
        """Return a cancel scope that ends after `seconds` of virtual time."""
        return anyio.move_on_after(seconds)

    def open_tasks(self) -> AbstractAsyncContextManager[Tasks]:
        """Open a group of tasks, as `anyio.create_task_group` does."""
        return anyio.create_task_group()

    @abstractmethod
    def _node_of(self, entry: Entry) -> Node | None:
        """Return the node whose code this entry runs, if any."""

    @abstractmethod
    def _strike_entry(self, entry: Entry) -> None:
        """Cancel the task of this entry natively."""

    @abstractmethod
    def _make_ready(self, entries: Iterable[Entry]) -> None:
        """Let entries run that were held."""

    @abstractmethod
    def _entries(self) -> Iterable[Entry]:
        """Yield an entry for each task that there is, oldest first."""

    @abstractmethod
    def _seen(self, entry: Entry) -> tuple[object, str, object]:
        """Return the task of an entry, its name, and its coroutine."""

    # --- the run, from its beginning to its end --------------------------------------------------

    @property
    def trace(self) -> str:
        return hashlib.blake2b(array("Q", self._trace).tobytes(), digest_size=8).hexdigest()

    def tasks(self) -> list[tuple[object, str, object]]:
        """Return the tasks of the world and its living nodes, with their names and coroutines."""
        return [
            self._seen(entry)
            for entry in self._entries()
            if (node := self._node_of(entry)) is None or node.is_alive
        ]

    def traced(self, text: str) -> None:
        """Add a text to the trace."""
        if not self._is_over:
            self._trace.append(zlib.crc32(text.encode()))

    def begin(self, scope: anyio.CancelScope) -> None:
        """Begin the world; cancelling this scope ends it."""
        self._scope = scope

    def stop(self) -> None:
        """End the world at once."""
        if self._scope is not None:
            self._scope.cancel()

    def end(self) -> None:
        """Let everything that the world left behind run in turn, so that it can end."""
        simulation = self.simulation
        assert simulation is not None, "a scheduler ends what it has begun"
        self.ended_at_s = self.now()
        for node in simulation.nodes.values():
            self.node_ended(node)
        for entry in self._entries():
            owner, name = self._node_of(entry), self._seen(entry)[1]
            if owner is not None and owner.has_ended and name != owner.task_name:
                simulation.broken("orphan", f"{owner} has ended, and left task {name} behind")
        for node in simulation.incarnations:
            self.release(node)
        self._is_over = True

    def forget(self) -> None:
        """Drop the world and its tasks; most are then freed without the garbage collector."""
        if self.simulation is not None:
            for end in self.simulation.at_end:
                end()
        self.simulation = self._scope = self._running = self._last = None
        self.look = lambda: None
        self._takes.close()
        self._known.clear()
        self._priorities.clear()
        self._ready.clear()
        self._batch.clear()

    def release(self, node: Node) -> None:
        """Let a node go on that was frozen."""
        held, node.held = node.held, []
        self._make_ready(held)

    def node_ended(self, node: Node) -> None:
        """Note that a node will take no further step that counts."""
        if node.incarnation == 1:
            self.node_steps.setdefault(node.name, node.steps)

    # --- one step --------------------------------------------------------------------------------

    def _taken(self) -> Generator[Entry | None]:
        """Yield the entry that runs next, before each step; see `_takes`."""
        # This runs before every step. So it keeps what stays the same in a run, and avoids calls.
        simulation = self.simulation
        assert simulation is not None, "a scheduler takes steps inside a run"
        story, strike, checks = self.story, self._strike, simulation.checks
        ready, known, traced = self._ready, self._known.get, self._trace.append
        place_of, steps_max, steps = self._chooser(), self._steps_max, 0
        while True:
            if story is not None:
                story.step_ends()
            if steps >= self.looks_at:
                self.look()
            if checks:
                for check in checks:
                    check()
            taken = None
            while ready:
                if len(ready) == 1:
                    place = 0
                    entry = ready.popleft()
                else:
                    place = place_of(ready)
                    entry = ready[place]
                    del ready[place]
                number, node = known(entry) or self._know(entry)
                if node is not None:
                    if node.is_crashed or node.is_frozen:
                        node.held.append(entry)
                        continue
                    node.steps += 1
                    if strike is not None and self._is_struck(node, entry):
                        node.held.append(entry)
                        continue
                self._running = taken = entry
                self.steps = steps = steps + 1
                traced(number)
                if story is not None:
                    story.step_begins(*self._seen(entry), place)
                if steps >= steps_max:
                    self._over_budget()
                break
            yield taken

    def _know(self, entry: Entry) -> tuple[int, Node | None]:
        """Give an entry its number."""
        found = self._known[entry] = len(self._known), self._node_of(entry)
        return found

    def renew(self) -> None:
        """Let the running task have another priority from now on, as a new task would.

        For a task that has done its work, and waits for another piece of it.
        """
        if self._running is not None:
            self._priorities.pop(self._running, None)

    def _is_struck(self, node: Node, entry: Entry) -> bool:
        """Strike if this is the step; True if the entry may not run now."""
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
            case "cancel_task":
                self._strike_entry(entry)
        return node.is_held

    def _over_budget(self) -> None:
        assert self.simulation is not None, "a scheduler takes steps inside a run"
        if self.steps == self._steps_max:
            self.simulation.broken("budget", f"the world was not over after {self.steps} steps")
        elif self.steps == 2 * self._steps_max:
            raise RuntimeError("the world does not end when it is cancelled")

    def _failed(self, error: Exception) -> None:
        """Report an error that came while a step was chosen, such as that of a check."""
        self._is_over = True
        assert self.simulation is not None, "a scheduler takes steps inside a run"
        self.simulation.is_over = False
        self.simulation.broken("harness", f"the scheduler failed: {error!r}")

    def _clean_up(self) -> None:
        self._clean_up_steps += 1
        if self._clean_up_steps > _CLEAN_UP_STEPS_MAX:
            raise RuntimeError("the tasks that a world left behind do not end when cancelled")

    # --- policies --------------------------------------------------------------------------------

    def _chooser(self) -> Callable[[Sequence[Entry]], int]:
        """Return the function that draws which of two or more entries runs next, by its place.

        The entry that became ready first is at 0.
        """
        tape, policy = self._tape, self._policy
        if tape.is_played or policy == "random":
            return tape.choosing("task")
        preferred = self._by_priority if policy == "pct" else self._by_batch
        return tape.choosing("task", preferred)

    def _by_priority(self, ready: Sequence[Entry]) -> int:
        priorities = self._priorities
        chosen = max(ready, key=priorities.__getitem__)
        self._in_a_row = self._in_a_row + 1 if chosen is self._last else 0
        self._last = chosen
        if self.steps in self._changes or self._in_a_row >= _PCT_RUN_MAX:
            self._in_a_row = 0
            self._lowest -= 1.0
            priorities[chosen] = self._lowest
            chosen = max(ready, key=priorities.__getitem__)
        return ready.index(chosen)

    def _by_batch(self, ready: Sequence[Entry]) -> int:
        while True:
            if not self._batch:
                self._batch = list(ready)
                self._tape.random.shuffle(self._batch)
            chosen = self._batch.pop()
            if chosen in ready:
                return ready.index(chosen)
