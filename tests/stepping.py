"""Cancels one task in one step of it: natively on asyncio, by its scope on either backend.

Sweeps run a scenario once to count the steps, and then once for each task and step.
"""

from __future__ import annotations

import asyncio
import gc
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import anyio

__all__ = ["HUNG_S", "Place", "Steps", "places_of", "run_cancelling", "stepping"]

HUNG_S = 120.0  # a bound for a run that hangs; none that ends waits for it

Place: TypeAlias = tuple[int, int]
"""The number of a task, in the order in which they are started, and of a step of it; step 0 is
before its first."""

T = TypeVar("T")


def places_of(steps: Sequence[int]) -> list[Place]:
    """Return all places of a run, given how many steps each task took."""
    return [(task, step) for task, count in enumerate(steps) for step in range(count + 1)]


# --- natively, any task of the loop --------------------------------------------------------------


class Stepped(Coroutine[Any, Any, Any]):
    """The coroutine of a task; cancels the task in its n-th step."""

    def __init__(self, inner: Any, at: int | None) -> None:  # noqa: ANN401 - of whatever kind
        self._inner = inner
        self._at = at
        self.steps = 0
        self.task: asyncio.Task[Any] | None = None

    def send(self, value: Any) -> Any:  # noqa: ANN401 - between the coroutine and its task
        self.steps += 1
        if self.steps == self._at and self.task is not None:
            self.task.cancel()
        return self._inner.send(value)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401 - as above
        self.steps += 1
        return self._inner.throw(*error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._inner.__await__())

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - anyio looks at its state
        return getattr(self._inner, name)


def run_cancelling(
    scenario: Callable[[], Coroutine[Any, Any, None]], at: Place | None
) -> list[int]:
    """Run a scenario in a loop of its own, cancel a task natively, and return each task's steps.

    Fails if it does not end, leaves a task behind, or has the loop complain.
    """
    made: list[Stepped] = []
    complaints: list[object] = []

    def factory(
        loop: asyncio.AbstractEventLoop,
        coroutine: Any,  # noqa: ANN401 - passed on
        **options: Any,  # noqa: ANN401 - passed on
    ) -> asyncio.Task[Any]:
        is_target = at is not None and at[0] == len(made)
        stepped = Stepped(coroutine, at[1] if is_target and at is not None else None)
        made.append(stepped)
        task = stepped.task = asyncio.Task(stepped, loop=loop, **options)
        if is_target and at is not None and at[1] == 0:
            loop.call_soon(task.cancel)
            task.cancel()
        return task

    async def main() -> None:
        before = {asyncio.current_task()}
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        loop.set_task_factory(factory)
        holder = asyncio.create_task(scenario())
        done, _ = await asyncio.wait({holder}, timeout=HUNG_S)
        assert done, "it hangs"
        if not holder.cancelled() and (error := holder.exception()) is not None:
            raise error
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() - before == set(), "tasks are left"
        later.append(len(made))

    later: list[int] = []
    # A coroutine that never ran is warned about where it is collected; in a frame without builtins,
    # such as a named tuple's, that fails. So none is collected on the way.
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
        gc.collect(0)
    assert complaints == []
    return [each.steps for each in made[: later[0]]]  # the rest are of `asyncio.run`


# --- by scopes, the tasks of a test --------------------------------------------------------------


class Steps:
    """Counts the steps of the tasks that a test starts, and cancels one of them in one step."""

    def __init__(self, at: Place | None) -> None:
        self.at = at
        self.counts: list[int] = []

    async def run(self, inner: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine in the running task; a cancellation of it ends here."""
        number = len(self.counts)
        self.counts.append(0)
        with anyio.CancelScope() as scope:
            if self.at == (number, 0):
                scope.cancel()
            await stepping(inner, lambda: self._step(number, scope))

    def _step(self, number: int, scope: anyio.CancelScope) -> None:
        self.counts[number] += 1
        if self.at == (number, self.counts[number]):
            scope.cancel()


@types.coroutine
def stepping(
    coroutine: Coroutine[Any, Any, T], note_step: Callable[[], None]
) -> Generator[Any, Any, T]:
    """Run a coroutine, and call `note_step` before each of its steps."""
    value: Any = None
    error: BaseException | None = None
    while True:
        note_step()
        try:
            yielded = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            result: T = stop.value
            return result
        try:
            value, error = (yield yielded), None
        except BaseException as thrown:  # noqa: BLE001 - passed on into the coroutine
            error = thrown
