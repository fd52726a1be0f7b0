"""The growth of cost: each operation at a small and at a large value of each quantity.

The result is one table with a row for each operation and quantity, `OPERATION_by_QUANTITY`. The
quantities are: the stored conversations; for one conversation, the events of its log, the message
ids that it knows, its readers, the events in its view, and the forks that it is behind; and the
active conversations. For each quantity, a small journal and a large one are open in one process,
and rounds take turns between them.

The figures are processor time of the process, all threads, in µs: other programs lengthen it less
than the time by the clock, and it does not include the disk. Each cell is cut off after 60 seconds;
one with less than one whole round is skipped. Filling a large journal is cut off too: after 60
seconds, or after 600 with `--full`, which goes on to a million conversations, events and message
ids. A row whose journal did not become as large as was asked says so. A run takes some three
minutes on an idle machine; with `--full`, each filling may take ten.

Whatever the quantity, each journal has 300 other conversations, so that each page of a list has its
50 rows and reads as many recent changes; and the two chains of forks show as many events.

Some costs have to grow, and have no goal here. Each reader is woken for each event, and when its
conversation's owner ends and begins, so appends, sends and activations grow with the readers;
`pauses` bounds the cost of one more. A conversation is opened, and a fork is made, from its
snapshot, which holds the events of the view and the newest 1,024 message ids: so both grow with the
view, and with the known ids up to that bound.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, process_time
from typing import TypeAlias

import anyio
import anyio.abc

from turnkeeper.actors import Conversation, Conversations, Event, SQLiteJournal, TurnContext, agent
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.events import (
    AgentMessageEvent,
    CondensationEvent,
    SystemPromptEvent,
    UserMessageEvent,
)

from ._harness import Measure, costlier, say, skipped

CELL_S_MIN, CELL_S_MAX = 2.0, 60.0
FILL_S_MAX, FILL_S_MAX_FULL = 60.0, 600.0
AT_ONCE = 200
PAGE = 500
SHOWN = 20
LISTED = 50
"""The rows of a page of a list."""
OTHERS = 300
"""Other conversations: as many as have rows of their own among the lists' recent changes."""
CHAIN_EVENTS = 200
"""The events that are shown by the last of a chain of forks."""
TEXT = "x" * 400

# The small end and the large one, and the large one with `--full`.
SIZES = {
    "stored": (100, 100_000, 1_000_000),
    "events": (500, 100_000, 1_000_000),
    "known_ids": (500, 100_000, 1_000_000),
    "active": (100, 100_000, 100_000),
    "readers": (1, 10_000, 10_000),
    "view": (50, 5_000, 5_000),
    "depth": (1, 150, 150),
}


# See above.
NOT_FLAT = {
    "readers": ("append", "send", "activation"),
    "view": ("activation", "forking"),
    "known_ids": ("activation", "forking"),
}


@agent
async def silent(_: TurnContext) -> None:
    """Say nothing, so that a turn costs only what `send` itself costs."""


def run(*, quick: bool) -> Iterator[Measure]:
    for name, (small, usual, _) in SIZES.items():
        large = max(small * 2, usual // 20) if quick else usual
        yield from anyio.run(_grown, name, small, large, 5 if quick else 7, FILL_S_MAX)


def run_full() -> Iterator[Measure]:
    for name, (small, _, large) in SIZES.items():
        yield from anyio.run(_grown, name, small, large, 7, FILL_S_MAX_FULL)


@dataclass
class Place:
    """An open journal of one size, with a conversation "c" of that size."""

    conversations: Conversations
    fill_s_max: float
    size: int = 0
    """The size that was reached."""
    made: int = 0
    """The forks and other conversations that the operations have begun."""
    name: str = "c"
    """The conversation on which the operations run."""
    begun: float = field(default_factory=monotonic)
    began_s: float = 0.0
    """The processor time at which the current operation began."""

    @property
    def is_late(self) -> bool:
        return monotonic() - self.begun > self.fill_s_max

    def new_name(self) -> str:
        self.made += 1
        return f"made{self.made}"


Operation: TypeAlias = Callable[[Place], Awaitable[int]]
"""Does something; returns how many times."""


# --- operations -----------------------------------------------------------------------------------


async def _append(place: Place) -> int:
    for _ in range(10):
        await place.conversations[place.name].append(UserMessageEvent(content=TEXT))
    return 10


async def _send(place: Place) -> int:
    for _ in range(5):
        await (await place.conversations[place.name].send(TEXT)).end()
    return 5


async def _activate(place: Place) -> int:
    await _passivate(place)
    await place.conversations[place.name].view()
    return 1


async def _passivate(place: Place) -> None:
    region = place.conversations._region  # noqa: SLF001 - nothing else passivates at once
    assert region is not None
    while not await region.passivate(place.name):
        await anyio.lowlevel.checkpoint()


async def _list(place: Place) -> int:
    rows = 0
    for _ in range(4):
        rows += len((await place.conversations.list(limit=LISTED)).rows)
    return max(1, rows)


async def _fork(place: Place) -> int:
    await place.conversations[place.name].fork(place.new_name())
    return 1


async def _delete(place: Place) -> int:
    """Delete a conversation of 40 events, beside all that is there; an event removed."""
    name = place.new_name()
    await _store(place.conversations, name, _talk(40))
    place.began_s = process_time()  # the rest was to make it
    await place.conversations.delete(name)
    return 40


# The last two lengthen the conversation, so they come after those that read it.
OPERATIONS: dict[str, Operation] = {
    "activation": _activate,
    "forking": _fork,
    "listing": _list,
    "deleting": _delete,
    "append": _append,
    "send": _send,
}


# --- the two ends ---------------------------------------------------------------------------------


async def _grown(
    quantity: str, small: int, large: int, rounds: int, fill_s_max: float
) -> list[Measure]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        async with (
            _place(Path(folder) / "small.db", quantity, small, fill_s_max) as first,
            _place(Path(folder) / "large.db", quantity, large, fill_s_max) as second,
        ):
            reached = f"{second.size:,}"
            if second.size < large:
                reached += f", in {fill_s_max:.0f} s and not {large:,},"
            say(f"growth: by {quantity}, {reached} and {first.size:,}")
            for name, operation in OPERATIONS.items():
                pairs: list[tuple[float, float]] = []
                gc.collect()
                began = monotonic()
                with anyio.move_on_after(CELL_S_MAX):
                    while len(pairs) <= rounds or monotonic() - began < CELL_S_MIN:
                        base = await _spent(operation, first)
                        pairs.append((await _spent(operation, second), base))
                say(f"growth: {name} by {quantity}, in {monotonic() - began:.1f} s")
                measure = f"{name}_by_{quantity}"
                baseline = f"{reached} against {first.size:,}"
                goal = "" if name in NOT_FLAT.get(quantity, ()) else "≤ 1.2"
                if pairs[1:]:
                    found.append(costlier(measure, pairs[1:], baseline=baseline, goal=goal))
                else:
                    reason = f"less than a round after the first in {CELL_S_MAX:.0f} s"
                    found.append(skipped(measure, baseline, goal, reason))
    return found


async def _spent(operation: Operation, place: Place) -> float:
    place.began_s = process_time()
    times = await operation(place)
    return (process_time() - place.began_s) / times * 1e6


@asynccontextmanager
async def _place(path: Path, quantity: str, size: int, fill_s_max: float) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        conversations = await stack.enter_async_context(
            Conversations(silent, journal=SQLiteJournal(path), idle_s=None)
        )
        place = Place(conversations, fill_s_max)
        async with anyio.create_task_group() as several:
            for number in range(OTHERS):
                several.start_soon(_converse, conversations[f"another{number}"])
        group = await stack.enter_async_context(anyio.create_task_group())
        await _FILLED[quantity](place, size, group)
        yield place
        group.cancel_scope.cancel()


async def _converse(conversation: Conversation) -> None:
    for _ in range(2):
        await conversation.append(UserMessageEvent(content=TEXT))


async def _stored(place: Place, size: int, _: anyio.abc.TaskGroup) -> None:
    await _many(place, size, is_active=False)


async def _active(place: Place, size: int, _: anyio.abc.TaskGroup) -> None:
    await _many(place, size, is_active=True)


async def _many(place: Place, size: int, *, is_active: bool) -> None:
    async def one(name: str) -> None:
        if is_active:
            await place.conversations[name].append(UserMessageEvent(content="hello"))
        else:
            await _store(place.conversations, name, _talk(2))

    await _store(place.conversations, "c", _talk(20))
    while place.size < size and not place.is_late:
        async with anyio.create_task_group() as several:
            for number in range(place.size, min(size, place.size + AT_ONCE)):
                several.start_soon(one, f"other{number}")
        place.size = min(size, place.size + AT_ONCE)


async def _events(place: Place, size: int, _: anyio.abc.TaskGroup) -> None:
    """Make a long log of which the view shows little, as that of a condensed conversation."""
    await _condensed(place, size, has_ids=False)


async def _known_ids(place: Place, size: int, _: anyio.abc.TaskGroup) -> None:
    await _condensed(place, size, has_ids=True)


async def _view(place: Place, size: int, _: anyio.abc.TaskGroup) -> None:
    while place.size < size and not place.is_late:
        talk = _messages(place, min(PAGE, size - place.size), has_ids=False)
        await _store(place.conversations, "c", talk, after=place.size)
        place.size += len(talk)


async def _condensed(place: Place, size: int, *, has_ids: bool) -> None:
    """Write whole pages of chat messages, of which the newest few are shown."""
    shown: list[str] = []
    while place.size < size and not place.is_late:
        talk = _messages(place, PAGE, has_ids=has_ids)
        shown += [event.id for event in talk]
        condensation = CondensationEvent(forgotten_event_ids=tuple(shown[:-SHOWN]))
        await _store(place.conversations, "c", [*talk, condensation], after=place.size)
        # An owner reads what was written past the last one, and leaves a snapshot.
        last = UserMessageEvent(content=TEXT)
        await place.conversations["c"].append(last)
        place.size += len(talk) + 2
        with anyio.fail_after(CELL_S_MAX):
            while not await _has_snapshot(place):
                await anyio.lowlevel.checkpoint()
        await _passivate(place)
        shown = [*shown[-SHOWN:], last.id]


async def _has_snapshot(place: Place) -> bool:
    """Return True if the newest event is in the conversation's snapshot."""
    journal = place.conversations._setup.journal  # noqa: SLF001 - the same that is measured
    snapshot = await journal.read_snapshot("c")
    return snapshot is not None and snapshot.seq >= place.size


def _messages(place: Place, some: int, *, has_ids: bool) -> list[Event]:
    return [
        UserMessageEvent(content=TEXT, message_id=f"m{place.size + n}" if has_ids else None)
        for n in range(some)
    ]


async def _readers(place: Place, size: int, group: anyio.abc.TaskGroup) -> None:
    await _store(place.conversations, "c", _talk(20))
    await place.conversations["c"].view()

    async def read() -> None:
        async for _ in place.conversations["c"].events(after=20):
            pass

    for _ in range(size):
        group.start_soon(read)
    await anyio.wait_all_tasks_blocked()
    place.size = size


async def _depth(place: Place, size: int, _: anyio.abc.TaskGroup) -> None:
    await _store(place.conversations, "c", _talk(CHAIN_EVENTS - size))
    while place.size < size and not place.is_late:
        name = f"fork{place.size}"
        fork = await place.conversations[place.name].fork(name)
        await fork.append(AgentMessageEvent(content=TEXT))
        place.name = name
        place.size += 1


_FILLED: dict[str, Callable[[Place, int, anyio.abc.TaskGroup], Awaitable[None]]] = {
    "stored": _stored,
    "events": _events,
    "known_ids": _known_ids,
    "active": _active,
    "readers": _readers,
    "view": _view,
    "depth": _depth,
}


def _talk(length: int) -> list[Event]:
    return [
        SystemPromptEvent(content="be kind"),
        *(UserMessageEvent(content=TEXT) for _ in range(length - 1)),
    ]


async def _store(
    conversations: Conversations, name: str, talk: list[Event], *, after: int = 0
) -> None:
    """Write events past the owner, which is what fills a journal soonest."""
    journal = conversations._setup.journal  # noqa: SLF001 - the same that is measured
    claim = await journal.claim(name)
    await journal.append(
        name,
        [encode_record(event) for event in talk],
        epoch=claim.epoch,
        expected_seq=after + 1,
        is_unfinished=False,
    )
