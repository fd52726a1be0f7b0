"""The tables of `docs/runtime-semantics.md` on what is started while something ends, cell by cell.

Each cell is played on both backends, and all ends with the runtime. Each column is then played once
more, all of it at once, with each task cancelled natively at each of its awaits.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup

from turnkeeper.runtime import (
    Actor,
    ActorContext,
    Backoff,
    Message,
    Ref,
    Region,
    Runtime,
    Supervision,
    TurnkeeperError,
)
from turnkeeper.runtime._portal import Portal
from turnkeeper.runtime._runtime import cells_of
from turnkeeper.runtime._supervisor import Supervisor
from turnkeeper.runtime.testing import settle

from ..drawn import drawn
from ..stepping import HUNG_S, Place, places_of, run_cancelling

pytestmark = pytest.mark.costly

PAGE = Path(__file__).parents[2] / "docs/runtime-semantics.md"
AT_ONCE = Supervision(backoff=Backoff(first_s=0.0))
WAIT_STEPS_MAX = 200
SHARE = 12
"""Of the places at which a column's tasks can be cancelled."""


class Go(Message[str]):
    """Answered with a word."""


class Account:
    """What has begun, and what has ended: the same, once the runtime has been left."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}
        self.handled: list[str] = []

    def begin(self, what: str) -> None:
        self.open[what] = self.open.get(what, 0) + 1

    def end(self, what: str) -> None:
        self.open[what] -= 1

    @property
    def left(self) -> list[str]:
        return [what for what, count in self.open.items() if count]


class Late(Actor):
    """Whatever is started late."""

    def __init__(self, account: Account) -> None:
        self.account = account

    async def on_start(self) -> None:
        self.account.begin("late")

    async def receive(self, message: object) -> str:
        self.account.handled.append(str(message))
        return "answered"

    async def on_stop(self) -> None:
        self.account.end("late")


class Ending(Actor):
    """Is held in a handler or in a hook for as long as the test wants, and tries things there."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    async def on_start(self) -> None:
        self.scene.account.begin("it")

    async def receive(self, message: object) -> str:
        match message:
            case "effect":
                self.context.start_effect(self._effect, name="effect")
            case "fail":
                raise ValueError(message)
            case "handle":
                await self.scene.moment("handler", self.context)
            case _:
                self.scene.account.handled.append(str(message))
        return "answered"

    async def _effect(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await self.scene.moment("clean-up", self.context)

    async def on_stop(self) -> None:
        await self.scene.moment("on_stop", self.context)
        self.scene.account.end("it")

    async def on_restart(self, error: BaseException) -> None:
        del error
        await self.scene.moment("on_restart", self.context)
        self.scene.account.end("it")


class Scene:
    """A runtime with an actor that ends, and the moment at which something is tried."""

    def __init__(self) -> None:
        self.account = Account()
        self.runtime = Runtime(supervision=AT_ONCE)
        self.held_at = ""
        self.reached = anyio.Event()
        self.gate = anyio.Event()
        self.inside: Callable[[ActorContext], Awaitable[None]] | None = None
        self.context: ActorContext | None = None
        self.portal: Portal | None = None
        self.is_cancelled = False
        """Some task of it may be cancelled natively."""
        self.calls = 0
        """Through the portal, from other threads; each counts until it is in the loop."""
        self.tasks: TaskGroup | None = None
        self.home: Supervisor | Runtime | Region[Any] = self.runtime

    async def until(self, event: anyio.Event) -> None:
        """Wait for it; not for ever, where a cancellation may have hit what was to set it."""
        for _ in range(WAIT_STEPS_MAX):
            if event.is_set():
                return
            await anyio.lowlevel.checkpoint()
        if not self.is_cancelled:
            await event.wait()

    async def closing(self) -> None:
        """Wait until the runtime is being left."""
        for _ in range(WAIT_STEPS_MAX):
            if self.runtime._system.is_closing:
                return
            await anyio.lowlevel.checkpoint()

    async def moment(self, where: str, context: ActorContext) -> None:
        """Be at a place of the actor that ends."""
        self.context = context
        if where != self.held_at:
            return
        self.held_at = ""
        self.reached.set()
        if self.inside is not None:
            await self.inside(context)
        else:
            await self.until(self.gate)

    def ending(self, _: str = "") -> Actor:
        return Ending(self)

    def late(self, _: str = "") -> Actor:
        return Late(self.account)

    async def begin(self) -> None:
        self.portal = self.runtime.portal()
        take = self.portal._take

        def count(*call: Any) -> None:  # noqa: ANN401 - passed on
            self.calls -= 1
            take(*call)

        setattr(self.portal, "_take", count)  # noqa: B010 - mypy lets no method be assigned
        self.other = self.runtime.spawn(self.late, name="other")
        self.ref: Ref[Any] = self.runtime.spawn(self.ending, name="it")
        await settle()

    @property
    def portal_is_closed(self) -> bool:
        return self.portal is None or self.portal._is_closed

    async def finished(self) -> list[str]:
        """Return what is still there after the runtime has been left."""
        await settle()
        return [*self.account.left, *(cell.name for cell in cells_of(self.runtime._root))]


# --- what is tried -------------------------------------------------------------------------------


async def forever() -> None:
    await anyio.sleep_forever()


def beside(scene: Scene) -> object:
    if isinstance(scene.home, Region):
        return scene.home["late"].ask(Go())
    return scene.home.spawn(scene.late, name="late")


def supervisor_beside(scene: Scene) -> object:
    home = scene.runtime if isinstance(scene.home, Region) else scene.home
    return home.spawn_supervisor("late group", AT_ONCE)


async def subscription(scene: Scene) -> None:
    with scene.runtime.events.subscribe(object) as events:
        async for _ in events:
            pass


async def through_the_portal(scene: Scene, call: Callable[..., object]) -> object:
    assert scene.portal is not None
    scene.calls += 1
    return await anyio.to_thread.run_sync(partial(call, scene.portal, scene.ref, Go()))


INSIDE: dict[str, Callable[[Scene, ActorContext], object]] = {
    "a timer": lambda _, context: context.timers.once(3_600.0, "a timer"),
    "an effect": lambda _, context: context.start_effect(forever, name="late"),
    "a child": lambda scene, context: context.spawn(scene.late, name="late child"),
    "a supervisor": lambda _, context: context.spawn_supervisor("late group", AT_ONCE),
    "a watch": lambda scene, context: context.watch(scene.other),
    "a tell to another": lambda scene, _: scene.other.tell("a tell"),
    "an ask of another": lambda scene, _: scene.other.ask(Go()),
    "a tell to itself": lambda _, context: context.ref.tell("a tell to itself"),
    "an ask of itself": lambda _, context: context.ref.ask(Go()),
}

OUTSIDE: dict[str, Callable[[Scene], object]] = {
    "a tell to it": lambda scene: scene.ref.tell("a tell"),
    "an ask of it": lambda scene: scene.ref.ask(Go()),
    "a watch on it": lambda scene: scene.ref.watch(scene.other),
    "an actor beside it": beside,
    "a supervisor beside it": supervisor_beside,
    "a region": lambda scene: scene.runtime.region("late region", scene.late),
    "a subscription": subscription,
    "an ask through the portal": lambda scene: through_the_portal(scene, Portal.ask),
    "a tell through the portal": lambda scene: through_the_portal(scene, Portal.tell),
}


async def outcome(scene: Scene, attempt: Callable[[], object]) -> str:
    """Try it, and return the error's name, or what is known now."""
    scene.account.begin("attempt")
    try:
        result = attempt()
        if inspect.isawaitable(result):
            result = await result
    except TurnkeeperError as error:
        is_told = re.search("nothing happened|try elsewhere", str(error))
        return f"`{type(error).__name__}`" if is_told else repr(error)
    except RuntimeError as error:
        return "`RuntimeError`" if "has been left" in str(error) else repr(error)
    finally:
        scene.account.end("attempt")
    return "answered" if result == "answered" else "started"


def in_the_end(scene: Scene, row: str, known: str) -> str:
    """Return what came of it once all has ended, in the words of the page."""
    if known != "started":
        return known
    if row == "a watch on it":
        is_told = any("Terminated" in each for each in scene.account.handled)
        return "told of the end" if is_told else "ends with it"
    if "tell" not in row:
        return "ends with it"
    is_handled = any("tell" in each or "Go" in each for each in scene.account.handled)
    is_dead = scene.runtime.dead_letters.count > 0
    assert is_handled != is_dead, "a tell is handled or a dead letter"
    return "handled" if is_handled else "a dead letter"


# --- what ends -----------------------------------------------------------------------------------

Attempts = list[Callable[[], Coroutine[Any, Any, None]]]
Column = Callable[[Scene, Attempts], Awaitable[None]]
"""Ends something, makes the attempts at the right moment, and has all ended when it returns."""


async def make(attempts: Attempts, scene: Scene) -> None:
    """Begin the attempts, let them get as far as they can, and let go of what is held."""
    assert scene.tasks is not None
    for attempt in attempts:
        scene.tasks.start_soon(attempt)
    await settle()
    while scene.calls > 0 and not scene.portal_is_closed:
        await anyio.lowlevel.checkpoint()
    await settle()
    scene.gate.set()


def inside(where: str, end: Callable[[Scene], Awaitable[None]]) -> Column:
    """Make the attempts in the code of an actor while it ends."""

    async def play(scene: Scene, attempts: Attempts) -> None:
        async def at_the_moment(_: ActorContext) -> None:
            for attempt in attempts:
                await attempt()

        scene.held_at, scene.inside = where, at_the_moment
        async with scene.runtime:
            await scene.begin()
            await end(scene)
        assert scene.reached.is_set()

    return play


async def stop(scene: Scene) -> None:
    await scene.ref.stop()


async def stop_with_an_effect(scene: Scene) -> None:
    await scene.ref.tell("effect")
    await settle()
    await scene.ref.stop()


async def fail(scene: Scene) -> None:
    await scene.ref.tell("fail")
    await scene.until(scene.reached)


async def leave(_: Scene) -> None:
    """Have the runtime stop it."""


async def handle_and_leave(scene: Scene) -> None:
    await scene.ref.tell("handle")


async def in_a_handler_told_to_stop(scene: Scene, attempts: Attempts) -> None:
    async with scene.runtime:
        await scene.begin()
        told = anyio.Event()

        async def at_the_moment(_: ActorContext) -> None:
            await scene.until(told)
            for attempt in attempts:
                await attempt()

        scene.held_at, scene.inside = "handler", at_the_moment
        await scene.ref.tell("handle")
        await scene.until(scene.reached)
        async with anyio.create_task_group() as group:
            group.start_soon(scene.ref.stop)
            await settle()
            told.set()


async def in_a_handler_while_draining(scene: Scene, attempts: Attempts) -> None:
    async def at_the_moment(_: ActorContext) -> None:
        await scene.closing()
        for attempt in attempts:
            await attempt()

    scene.held_at, scene.inside = "handler", at_the_moment
    async with scene.runtime:
        await scene.begin()
        await scene.ref.tell("handle")
        await scene.until(scene.reached)


async def kept(scene: Scene, attempts: Attempts) -> None:
    """Make the attempts with a context that was kept."""
    scene.held_at = "on_stop"
    scene.gate.set()
    async with scene.runtime:
        await scene.begin()
        await scene.ref.stop()
        await make(attempts, scene)


async def its_actor_stops(scene: Scene, attempts: Attempts) -> None:
    scene.held_at = "on_stop"
    async with scene.runtime:
        await scene.begin()
        async with anyio.create_task_group() as group:
            group.start_soon(scene.ref.stop)
            await scene.until(scene.reached)
            await make(attempts, scene)


async def its_supervisor_stops(scene: Scene, attempts: Attempts) -> None:
    async with scene.runtime:
        await scene.begin()
        group = scene.home = scene.runtime.spawn_supervisor("group", AT_ONCE)
        scene.ref = group.spawn(scene.ending, name="it")
        await settle()
        scene.held_at = "on_stop"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.stop)
            await scene.until(scene.reached)
            await make(attempts, scene)


async def its_region_stops(scene: Scene, attempts: Attempts) -> None:
    async with scene.runtime:
        await scene.begin()
        region = scene.home = scene.runtime.region("region", scene.ending)
        scene.ref = region["it"]
        await scene.ref.tell("begin")
        await settle()
        scene.account.handled.clear()
        scene.held_at = "on_stop"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(region.stop)
            await scene.until(scene.reached)
            await make(attempts, scene)


async def leaving(scene: Scene, hold: Callable[[], Awaitable[None]], attempts: Attempts) -> None:
    async def try_them() -> None:
        await scene.until(scene.reached)
        await scene.closing()
        await make(attempts, scene)

    async with anyio.create_task_group() as group, scene.runtime:
        await scene.begin()
        await hold()
        group.start_soon(try_them)


async def runtime_drains(scene: Scene, attempts: Attempts) -> None:
    async def hold() -> None:
        scene.held_at = "handler"
        await scene.ref.tell("handle")
        await scene.until(scene.reached)

    await leaving(scene, hold, attempts)


async def runtime_stops(scene: Scene, attempts: Attempts) -> None:
    async def hold() -> None:
        scene.held_at = "on_stop"

    await leaving(scene, hold, attempts)


async def runtime_left(scene: Scene, attempts: Attempts) -> None:
    async with scene.runtime:
        await scene.begin()
    await make(attempts, scene)


INSIDE_COLUMNS: dict[str, list[Column]] = {
    "in `on_stop`": [inside("on_stop", stop), inside("on_stop", leave)],
    "in `on_restart`": [inside("on_restart", fail)],
    "in an effect's clean-up": [inside("clean-up", stop_with_an_effect)],
    "once it has ended": [kept],
    "in a handler, when it has been told to stop": [in_a_handler_told_to_stop],
    "in a handler, while the runtime drains": [in_a_handler_while_draining],
}
OUTSIDE_COLUMNS: dict[str, list[Column]] = {
    "it stops": [its_actor_stops],
    "it has stopped": [kept],
    "its supervisor stops": [its_supervisor_stops],
    "its region stops": [its_region_stops],
    "the runtime drains": [runtime_drains],
    "the runtime stops it": [runtime_stops],
    "the runtime has been left": [runtime_left],
}


async def play(column: Column, row: str) -> str:
    scene, known = Scene(), [""]

    async def attempt() -> None:
        known[0] = await outcome(scene, partial(trying(row), scene))

    with anyio.fail_after(HUNG_S):
        async with anyio.create_task_group() as scene.tasks:
            await column(scene, [attempt])
        assert await scene.finished() == []
    return in_the_end(scene, row, known[0])


def trying(row: str) -> Callable[[Scene], object]:
    """Return the attempt of a row."""
    if row in OUTSIDE:
        return OUTSIDE[row]

    def run(scene: Scene) -> object:
        assert scene.context is not None
        return INSIDE[row](scene, scene.context)

    return run


# --- the page ------------------------------------------------------------------------------------


def table(head: str) -> dict[tuple[str, str], str]:
    """Return the cells of the table that begins so, by row and column."""
    lines = PAGE.read_text().partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()
    columns = [cell.strip() for cell in lines[0].strip(" |").split("|")]
    cells: dict[tuple[str, str], str] = {}
    for line in lines[2:]:
        row, *found = (cell.strip() for cell in line.strip("|").split("|"))
        cells |= {(row, column): cell for column, cell in zip(columns, found, strict=True)}
    return cells


TABLES: dict[str, tuple[Iterable[str], dict[str, list[Column]]]] = {
    "an actor starts": (INSIDE, INSIDE_COLUMNS),
    "from outside": (OUTSIDE, OUTSIDE_COLUMNS),
}
COLUMNS = {name: column for _, columns in TABLES.values() for name, column in columns.items()}


@pytest.mark.parametrize("head", TABLES)
def test_the_tables_have_what_is_played(head: str) -> None:
    rows, columns = TABLES[head]

    assert list(table(head)) == [(row, column) for row in rows for column in columns]


@pytest.mark.anyio
@pytest.mark.parametrize("head", TABLES)
async def test_each_cell_is_as_the_page_says(head: str) -> None:
    _, columns = TABLES[head]
    wrong = {}
    for (row, name), cell in table(head).items():
        for column in columns[name]:
            if (found := await play(column, row)) not in cell.split(" or "):
                wrong[row, name] = f"{found}, not {cell}"
    assert wrong == {}


# --- natively cancelled --------------------------------------------------------------------------


def run(column: Column, rows: list[str], at: Place | None) -> list[int]:
    """Make the attempts of all rows at once, with one task cancelled natively at one place."""
    scenes: list[Scene] = []

    async def attempt(row: str) -> None:
        await outcome(scenes[0], partial(trying(row), scenes[0]))

    async def scenario() -> None:
        scenes.append(scene := Scene())
        scene.is_cancelled = at is not None
        async with anyio.create_task_group() as scene.tasks:
            await column(scene, [partial(attempt, row) for row in rows])

    steps = run_cancelling(scenario, at)
    for scene in scenes:  # none, if it was cancelled before its first step
        check(scene)
    return steps


def check(scene: Scene) -> None:
    """Look at what is left."""
    assert scene.account.open.get("attempt", 0) == 0, "an attempt did not end"
    assert list(cells_of(scene.runtime._root)) == []
    # One native cancellation may fail one start after it has begun, or one clean-up.
    assert sum(scene.account.open.values()) <= 1, scene.account.open


# anyio's own: a task of its groups that is cancelled natively before its first step.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.sweep
@pytest.mark.parametrize("head", TABLES)
def test_whatever_is_cancelled_natively_meanwhile_everything_ends(head: str) -> None:
    rows, columns = TABLES[head]
    broken: dict[tuple[str, Place], str] = {}
    for name, column in ((name, column) for name, each in columns.items() for column in each):
        # A thread waits for its loop, which a cancelled test may have left.
        wanted = [row for row in rows if "portal" not in row]
        for at in drawn(places_of(run(column, wanted, None)), SHARE):
            try:
                run(column, wanted, at)
            except Exception as error:  # noqa: BLE001 - all are told together
                broken[name, at] = repr(error)[:300]
    assert broken == {}
