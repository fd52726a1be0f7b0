"""A process that holds many active conversations under load, and reports how late its loop was.

`python _pauses_process.py COUNT SECONDS MODE CHURNED PART_S_MAX`: MODE is `plain` or `frozen`, and
CHURNED conversations are opened and passivated at the end. It prints one JSON object. Times that
end in `_ms` are by the clock, except for the longest collection: that is the processor time of the
loop's thread, which other programs lengthen less.

Opening all and the churn are each cut off after `PART_S_MAX` seconds; `active` and `churned` are
the numbers that were reached. To see what many passivations leave behind, with all time they take:
`python benchmarks/_pauses_process.py 1000 1 frozen 100000 inf`.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time

import anyio

from turnkeeper.actors import Conversations, SQLiteJournal, TurnContext, agent
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.runtime import Runtime
from turnkeeper.runtime.lowlevel import Lateness

CLIENTS = 100
EVERY_S = 0.005
EVENT = "x" * 100


@agent
async def silent(_: TurnContext) -> None:
    """Do nothing: the events are appended by the clients."""


class Collections:
    """The longest collection of garbage so far."""

    def __init__(self) -> None:
        self.longest_s = self._began = 0.0
        gc.callbacks.append(self)

    def __call__(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began = thread_time()
        else:
            self.longest_s = max(self.longest_s, thread_time() - self._began)


class Load:
    """Clients that append to the conversations, and how long each append took."""

    def __init__(self, conversations: Conversations, names: list[str]) -> None:
        self._conversations = conversations
        self._names = names
        self.took: list[float] = []
        self._opened: list[str] = []

    async def open(self, seconds_max: float) -> int:
        """Append one event to each conversation; return how many got theirs within this time."""
        with anyio.move_on_after(seconds_max):
            await self.once()
        self._names, self._opened = self._opened, []
        return len(self._names)

    async def once(self) -> None:
        """Append one event to each conversation."""
        async with anyio.create_task_group() as group:
            for client in range(CLIENTS):
                group.start_soon(self._go_round, self._names[client::CLIENTS])

    async def keep_on(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            while True:
                await self.once()

    async def _go_round(self, names: list[str]) -> None:
        for name in names:
            began = perf_counter()
            await self._conversations[name].append(UserMessageEvent(content=EVENT))
            self.took.append(perf_counter() - began)
            self._opened.append(name)

    def p99_ms(self) -> float:
        took, self.took = sorted(self.took), []
        return took[int(len(took) * 0.99)] * 1_000


async def main(
    count: int, seconds: float, *, is_frozen: bool, churned: int, part_s_max: float
) -> None:
    found: dict[str, float] = {}
    lateness, collections = Lateness(), Collections()
    names = [f"c{number}" for number in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        # As many ends of logs are kept as are active, so that the churn finds the table full.
        path, kept = Path(folder) / "pauses.db", max(1_000, count)
        journal = SQLiteJournal(path, active_conversations_max=kept)
        async with (
            Runtime(freeze_objects=is_frozen) as runtime,
            Conversations(silent, journal=journal, runtime=runtime) as conversations,
            anyio.create_task_group() as group,
        ):
            group.start_soon(lateness.watch, EVERY_S)
            await anyio.sleep(2.0)
            found["idle_ms"] = lateness.longest_s * 1_000

            few = Load(conversations, names[:1_000])
            await few.open(part_s_max)
            few.took.clear()
            await few.keep_on(seconds)
            found["p99_at_1000_ms"] = few.p99_ms()

            gc.collect()
            before = _memory()
            collections.longest_s = 0.0
            lateness.reset()
            every = Load(conversations, names)
            count = await every.open(part_s_max)
            found["active"] = count
            found["bytes_each"] = (_memory() - before) / max(1, count - 1_000)
            found["opening_late_ms"] = lateness.longest_s * 1_000
            every.took.clear()
            lateness.reset()
            await every.keep_on(seconds)
            found["late_ms"] = lateness.longest_s * 1_000
            found["late_p99_ms"] = lateness.quantile_s(0.99) * 1_000
            found["p99_ms"] = every.p99_ms()
            found["collection_ms"] = collections.longest_s * 1_000
            found["objects_each"] = (len(gc.get_objects()) + gc.get_freeze_count()) / count

            if churned:
                found |= await _churn(conversations, churned, part_s_max)
            group.cancel_scope.cancel()
    print(json.dumps(found))


async def _churn(
    conversations: Conversations, churned: int, seconds_max: float
) -> dict[str, float]:
    """Open and passivate conversations; return how many, and the growth by each in objects."""
    region = conversations._region  # noqa: SLF001 - nothing else passivates at once
    assert region is not None
    before, done, end = 0, 0, perf_counter() + seconds_max
    # Tables that are bounded fill up first.
    for number in range(-min(1_500, churned), churned):
        if number == 0:
            gc.collect()
            before = len(gc.get_objects()) + gc.get_freeze_count()
        name = f"churned{number}"
        await conversations[name].append(UserMessageEvent(content=EVENT))
        while not await region.passivate(name):
            await anyio.lowlevel.checkpoint()
        if number >= 0:
            done += 1
            if perf_counter() > end:
                break
            if not done % 5_000:
                print(f"{done:,} opened and passivated", file=sys.stderr, flush=True)
    gc.collect()
    grown = len(gc.get_objects()) + gc.get_freeze_count() - before
    return {"churned": done, "grown": grown, "grown_each": grown / done}


def _memory() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * resource.getpagesize())


if __name__ == "__main__":
    count, seconds, mode, churned, part_s_max = sys.argv[1:]
    run = partial(main, is_frozen=mode == "frozen", churned=int(churned))
    anyio.run(partial(run, int(count), float(seconds), part_s_max=float(part_s_max)))
