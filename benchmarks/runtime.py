"""The actor runtime: tell, ask, spawn and memory, against the loops' limits and against peers.

Ours is measured as shipped: supervised, bounded, counted, timed, traced where asked for.
`tell` and `spawn` are to a pooled actor with a `def` handler, and `ask` to one with an
`async def` handler, so that it goes through the mailbox. `ask_begun_in_place` shows the other path:
a `def` handler begins in its asker's stack, and returns a coroutine if it has to wait.

Each figure is taken by the clock and by the time of the processor (`…_cpu`). Each peer runs in a
process of its own, once in each round, between two runs of ours.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

import anyio

from turnkeeper.runtime import Actor, Message, Ref, Runtime

from . import _raw
from ._harness import (
    Measure,
    PeerMissing,
    Spent,
    Stopwatch,
    by_both,
    costlier,
    faster,
    in_turn,
    run_peer,
    say,
    skipped,
)

BACKENDS: Final = ("asyncio", "trio")
DEADLINE_S: Final = 5.0


class Get(Message[int]):
    __slots__ = ()


GET: Final = Get()


class Plain(Actor):
    """An actor whose handler is a `def`."""

    def receive(self, message: object) -> int:
        del message
        return 1


class Async(Actor):
    """An actor whose handler is an `async def`, so that asks always go through the mailbox."""

    async def receive(self, message: object) -> int:
        del message
        return 1


class Begun(Actor):
    """An actor whose `def` handler answers at once if it can, and else goes on as a coroutine."""

    def receive(self, message: object) -> object:
        return 1 if message is GET else self._look()

    async def _look(self) -> int:
        await anyio.lowlevel.checkpoint()
        return 2


Timed = Callable[[], Awaitable[Spent]]


def run(*, quick: bool) -> Iterator[Measure]:
    scale = 4 if quick else 1
    rounds = 5 if quick else 9
    for backend in BACKENDS:
        say(f"runtime on {backend}")
        found: list[Measure] = anyio.run(_on_backend, backend, scale, rounds, backend=backend)
        yield from found
        yield anyio.run(_memory, 10_000 if quick else 100_000, backend, backend=backend)
    yield from _peers(scale, rounds)


async def _on_backend(backend: str, scale: int, rounds: int) -> list[Measure]:
    is_trio = backend == "trio"
    tells, asks, spawns = 100_000 // scale, 20_000 // scale, 4_000 // scale
    found: list[Measure] = []
    async with Runtime() as runtime:
        plain = runtime.spawn(Plain, name="plain")
        handler = runtime.spawn(Async, name="async")

        def add(kind: Callable[..., Measure], name: str, pairs: Any, **how: Any) -> None:  # noqa: ANN401 - passed on
            found.extend(by_both(f"{name}_{backend}", pairs, kind=kind, **how))
            say(f"  {name}")

        async def told(ref: Ref) -> Spent:
            return await _tell(ref, tells)

        async def queue() -> Spent:
            return await (_raw.trio_tell if is_trio else _raw.asyncio_tell)(tells)

        channel = "trio memory channel" if is_trio else "asyncio.Queue(1024)"
        goal = "≥ 8" if is_trio else "≥ 0.9"
        pairs = await in_turn(lambda: told(plain), queue, rounds)
        add(faster, "tell", pairs, baseline=channel, goal=goal)
        pairs = await in_turn(lambda: told(handler), queue, rounds)
        add(faster, "tell_async_handler", pairs, baseline=channel, goal="")
        pairs = await in_turn(lambda: told(plain), lambda: _anyio_tell(tells // 4), rounds)
        add(faster, "tell_vs_anyio", pairs, baseline="anyio memory stream", goal="≥ 1.0")

        raw_ask = _raw.trio_ask if is_trio else _raw.asyncio_ask
        for callers in (1, 100):
            pairs = await in_turn(
                partial(_ask, handler, callers, asks), partial(raw_ask, callers, asks), rounds
            )
            # The goal is for asks one after another; a hundred at once are shown beside it.
            goal = "" if callers > 1 else "≥ 0.65" if is_trio else "≥ 0.6"
            name = "ask" if callers == 1 else f"ask_{callers}_callers"
            add(faster, name, pairs, baseline="deque and one-shot, no actor", goal=goal)
        begun = runtime.spawn(Begun, name="begun")
        pairs = await in_turn(lambda: _ask(begun, 1, asks), lambda: raw_ask(1, asks), rounds)
        baseline = "deque and one-shot, no actor"
        add(faster, "ask_begun_in_place", pairs, baseline=baseline, goal="≥ 1.5")
        pairs = await in_turn(
            lambda: _ask(handler, 1, asks, DEADLINE_S), lambda: _ask(handler, 1, asks), rounds
        )
        add(costlier, "ask_deadline", pairs, baseline="ask without a deadline", goal="≤ 1.1")

        number = 0

        async def spawn() -> Spent:
            nonlocal number
            number += 1
            return await _spawn(runtime, Plain, f"plain{number}", spawns)

        async def spawn_async() -> Spent:
            nonlocal number
            number += 1
            return await _spawn(runtime, Async, f"async{number}", spawns)

        raw_task = _raw.trio_task if is_trio else _raw.asyncio_task
        goal = "≤ 1.8" if is_trio else "≤ 2.5"
        pairs = await in_turn(spawn, lambda: raw_task(spawns), rounds)
        add(costlier, "spawn_and_ask", pairs, baseline="a bare task", goal=goal)
        pairs = await in_turn(spawn_async, lambda: raw_task(spawns), rounds)
        add(costlier, "spawn_and_ask_async_handler", pairs, baseline="a bare task", goal="")
    return found


async def _tell(ref: Ref, count: int) -> Spent:
    watch = Stopwatch()
    for _ in range(count):
        await ref.tell(1)
    await ref.ask(GET)
    return watch.spent_on_each(count)


async def _anyio_tell(count: int) -> Spent:
    send, receive = anyio.create_memory_object_stream[int](1024)

    async def read() -> None:
        async with receive:
            async for _ in receive:
                pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        watch = Stopwatch()
        async with send:
            for _ in range(count):
                await send.send(1)
    return watch.spent_on_each(count)


async def _ask(ref: Ref, callers: int, count: int, timeout: float | None = None) -> Spent:
    async def ask() -> None:
        for _ in range(count // callers):
            await ref.ask(GET, timeout=timeout)

    watch = Stopwatch()
    await _raw.at_once(callers, ask)
    return watch.spent_on_each(count)


async def _spawn(runtime: Runtime, kind: type[Actor], prefix: str, count: int) -> Spent:
    """Spawn an actor and ask it once; the time to stop it is not measured."""
    names = [f"{prefix}-{number}" for number in range(count)]
    refs = []
    watch = Stopwatch()
    for name in names:
        ref = runtime.spawn(kind, name=name)
        await ref.ask(GET)
        refs.append(ref)
    taken = watch.spent_on_each(count)
    for ref in refs:
        await ref.stop()
    return taken


async def _memory(count: int, backend: str) -> Measure:
    """Return the bytes of a pooled actor, idle after an ask: with its ref, name and instance."""
    async with Runtime() as runtime:
        await runtime.spawn(Plain, name="warm").ask(GET)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        refs = [runtime.spawn(Plain, name=f"idle-{number}") for number in range(count)]
        for ref in refs:
            await ref.ask(GET)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        size = (after - before) / count
    kilobytes = size / 1_200
    return Measure(f"idle_actor_{backend}", size, "bytes", "1.2 KB", 1_200.0, kilobytes, "≤ 1.0")


_PEERS: Final = {
    "pykka": ("Pykka", "pykka"),
    "autogen": ("AutoGen core", "autogen-core"),
    "thespian": ("Thespian", "thespian"),
    "xoscar": ("xoscar", "xoscar"),
}
# Ours and the peer's: the name of the figure, the goal, the peer, our case, its case.
_LINES: Final = (
    ("tell_vs_pykka", "≥ 3", "pykka", "tell", "tell"),
    ("ask_vs_pykka", "≥ 1.8", "pykka", "ask", "ask"),
    ("ask_vs_autogen", "≥ 20", "autogen", "ask", "ask"),
    ("ask_begun_in_place_vs_autogen", "≥ 20", "autogen", "begun", "ask"),
    ("tell_vs_thespian", "", "thespian", "tell", "tell"),
    ("ask_vs_thespian", "", "thespian", "ask", "ask"),
    ("ask_begun_in_place_vs_thespian", "", "thespian", "begun", "ask"),
    ("tell_vs_xoscar", "", "xoscar", "tell_async", "tell"),
    ("ask_vs_xoscar", "", "xoscar", "ask", "ask"),
)


def _peers(scale: int, rounds: int) -> Iterator[Measure]:
    asks, tells = 8_000 // scale, 40_000 // scale
    pairs: dict[str, list[tuple[Spent, Spent]]] = {}
    reasons: dict[str, str] = {}
    for _ in range(rounds):
        for peer, (_, package) in _PEERS.items():
            if peer in reasons:
                continue
            ours = anyio.run(_ours_for_peers, tells, asks)
            try:
                found = run_peer(peer, [package], f"_peer_{peer}.py", str(tells), str(asks))
            except PeerMissing as missing:
                reasons[peer] = str(missing)
                continue
            for name, _, its, our_case, its_case in _LINES:
                if its == peer:
                    theirs = Spent(found[its_case], found[f"{its_case}_cpu"])
                    pairs.setdefault(name, []).append((ours[our_case], theirs))
    for name, goal, peer, _, case in _LINES:
        baseline = f"{_PEERS[peer][0]}, {case}"
        if peer in reasons:
            yield skipped(name, baseline, goal, reasons[peer])
        else:
            yield from by_both(name, pairs[name], kind=faster, baseline=baseline, goal=goal)


async def _ours_for_peers(tells: int, asks: int) -> dict[str, Spent]:
    async with Runtime() as runtime:
        # Handlers of Pykka and Thespian are a `def`, those of AutoGen and xoscar an `async def`.
        # `ask` is through our mailbox.
        plain = runtime.spawn(Plain, name="plain")
        handler = runtime.spawn(Async, name="async")
        await _tell(plain, tells // 10)
        await _ask(handler, 1, asks // 10)
        return {
            "tell": await _tell(plain, tells),
            "tell_async": await _tell(handler, tells),
            "ask": await _ask(handler, 1, asks),
            "begun": await _ask(plain, 1, asks),
        }
