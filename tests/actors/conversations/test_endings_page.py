"""The table of `docs/operations.md` on what is asked of conversations that end, cell by cell.

Each cell is played on both backends; then all ends, and nothing is left.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from tests.actors.conversations.worlds import HeldAgent, verified
from turnkeeper.actors import MemoryJournal, MemoryStore
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.journal import Deletion
from turnkeeper.actors.owner.draining import Drained
from turnkeeper.runtime import Runtime, TurnkeeperError
from turnkeeper.runtime._runtime import cells_of
from turnkeeper.runtime.testing import VirtualClock, settle

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[3] / "docs/operations.md"
HUNG_S = 60.0
GRACE_S = 30.0


class HeldJournal(MemoryJournal):
    """Lets a test hold deletions."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.gate = anyio.Event()
        self.gate.set()
        self.reached = anyio.Event()

    async def delete(self, conversation_id: str, *, epoch: int) -> Deletion:
        self.reached.set()
        await self.gate.wait()
        return await super().delete(conversation_id, epoch=epoch)


class Stubborn(HeldAgent):
    """Ends late when it is cancelled: the conversations that hold it are closing for so long."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = anyio.Event()
        self.is_stubborn = False

    async def _stop(self, text: str) -> None:
        try:
            await super()._stop(text)
        finally:
            if self.is_stubborn and text == "busy":
                with anyio.CancelScope(shield=True):
                    await self.gate.wait()


class Scene:
    """Conversations with one that a test looks at, `c`, and one that is `busy`."""

    def __init__(self, tasks: TaskGroup) -> None:
        self.tasks = tasks
        self.store = MemoryStore()
        self.journal = HeldJournal(self.store)
        self.agent = Stubborn()
        self.clock = VirtualClock()
        self.runtime = Runtime(ports=self.clock.ports())
        self.conversations = verified(
            self.agent, journal=self.journal, runtime=self.runtime, recover="on_message"
        )
        self.outcome = "waits"

    async def begin(self) -> None:
        self.chat = self.conversations["c"]
        await (await self.chat.send("A", message_id="A")).end()
        self.agent.hold("busy")
        self.busy = await self.conversations["busy"].send("busy")
        await self.agent.reached["busy"].wait()


Attempt = Callable[[Scene], object]


async def read(events: Any) -> None:  # noqa: ANN401 - any reader
    async for _ in events:
        pass


async def send_and_wait(scene: Scene) -> None:
    await (await scene.chat.send("B", message_id="B")).end()


async def look(scene: Scene) -> None:
    await scene.chat.at()
    await scene.chat.running()
    await scene.chat.queued()


ROWS: dict[str, Attempt] = {
    "`send`": lambda scene: scene.chat.send("B", message_id="B"),
    "`send`, and its turn's `end`": send_and_wait,
    "`end` of a turn that runs": lambda scene: scene.busy.end(),
    "`append`": lambda scene: scene.chat.append(UserMessageEvent(content="by hand")),
    "`change`": lambda scene: scene.chat.change(title="T"),
    "`pause`": lambda scene: scene.chat.pause(),
    "`undo`": lambda scene: scene.chat.undo(),
    "`view`": lambda scene: scene.chat.view(),
    "`fork`": lambda scene: scene.chat.fork("fork"),
    "`delete`": lambda scene: scene.conversations.delete("c"),
    "`at`, `running`, `queued`": look,
    "`list`": lambda scene: scene.conversations.list(),
    "`events(live=False)`": lambda scene: read(scene.chat.events(live=False)),
    "`events`, `follow`": lambda scene: read(scene.chat.follow()),
}


async def attempt(scene: Scene, row: str) -> None:
    try:
        result = ROWS[row](scene)
        if inspect.isawaitable(result):
            await result
    except (TurnkeeperError, RuntimeError) as error:
        is_told = re.search("nothing|not open|not served|are closed|only read", str(error))
        scene.outcome = f"`{type(error).__name__}`" if is_told else repr(error)
    else:
        scene.outcome = "done"


async def tried(scene: Scene, row: str) -> None:
    scene.tasks.start_soon(attempt, scene, row)
    await settle()


async def draining(scene: Scene, row: str) -> None:
    drained: list[Drained] = []

    async def drain() -> None:
        drained.append(await scene.conversations.drain(GRACE_S))

    scene.tasks.start_soon(drain)
    await settle()
    await tried(scene, row)
    scene.agent.release("busy")
    await scene.clock.advance(GRACE_S + 1)
    assert drained


async def drained(scene: Scene, row: str) -> None:
    scene.agent.release("busy")
    await scene.busy.end()
    scene.tasks.start_soon(scene.conversations.drain, 0.0)
    await scene.clock.advance(2.0)
    await tried(scene, row)


async def closing(scene: Scene, row: str) -> None:
    scene.agent.is_stubborn = True
    scene.tasks.start_soon(scene.conversations.aclose)
    await settle()
    await tried(scene, row)
    scene.agent.gate.set()


async def closed(scene: Scene, row: str) -> None:
    await scene.conversations.aclose()
    await tried(scene, row)


async def being_deleted(scene: Scene, row: str) -> None:
    scene.journal.gate = anyio.Event()
    scene.tasks.start_soon(scene.conversations.delete, "c")
    await scene.journal.reached.wait()
    await tried(scene, row)
    scene.journal.gate.set()
    await settle()


async def deleted(scene: Scene, row: str) -> None:
    await scene.conversations.delete("c")
    await tried(scene, row)


async def passivated(scene: Scene, row: str) -> None:
    scene.tasks.start_soon(scene.conversations._open_region().passivate, "c")
    await tried(scene, row)


async def taken_over(scene: Scene, row: str) -> None:
    async with MemoryJournal(scene.store) as other:
        await other.claim("c", takeover=True)
        await tried(scene, row)


COLUMNS: dict[str, Callable[[Scene, str], Awaitable[None]]] = {
    "the process drains": draining,
    "it has been drained": drained,
    "its `Conversations` close": closing,
    "they have been closed": closed,
    "it is being deleted": being_deleted,
    "it was deleted": deleted,
    "it is passivated": passivated,
    "another process took it over": taken_over,
}


async def play(name: str, row: str) -> str:
    """Play one cell; return what came of it, in the words of the page."""
    with anyio.fail_after(HUNG_S):
        async with anyio.create_task_group() as tasks:
            scene = Scene(tasks)
            async with scene.runtime:
                await scene.conversations.start()
                await scene.begin()
                await COLUMNS[name](scene, row)
                scene.agent.release("busy")
                await settle()
                is_waiting = scene.outcome == "waits"
                await scene.conversations.aclose()
        assert scene.outcome != "waits", "it has ended, and its task, too"
        assert list(cells_of(scene.runtime._root)) == []
        assert not scene.conversations._setup.subscriptions._live("c")
    if scene.outcome == "done" and (is_waiting or row == "`events`, `follow`"):
        return "ends with them"
    return f"waits, then {scene.outcome}" if is_waiting else scene.outcome


def table() -> dict[tuple[str, str], str]:
    """Return the cells of the page's table, by row and column."""
    lines = PAGE.read_text().partition("| call |")[2].partition("\n\n")[0].splitlines()
    columns = [cell.strip() for cell in lines[0].strip(" |").split("|")]
    cells: dict[tuple[str, str], str] = {}
    for line in lines[2:]:
        row, *found = (cell.strip() for cell in line.strip("|").split("|"))
        cells |= {(row, column): cell for column, cell in zip(columns, found, strict=True)}
    return cells


def test_the_table_has_what_is_played() -> None:
    assert list(table()) == [(row, column) for row in ROWS for column in COLUMNS]


async def test_each_cell_is_as_the_page_says() -> None:
    wrong = {}
    for (row, name), cell in table().items():
        if (found := await play(name, row)) != cell:
            wrong[row, name] = f"{found}, not {cell}"
    assert wrong == {}
