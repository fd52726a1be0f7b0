"""Turns, as a user feels them: a step with tools, sending while everything is busy, many at once.

The agent is `ToolAgent` with a model that answers at once, so the figures leave the
model out. The cost of a whole turn beside its commits is compared with raw commits of SQLite; the
peer is OpenHands SDK's newest release.
"""

from __future__ import annotations

import gc
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

import anyio

from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    ModelRequest,
    ModelResponse,
    Need,
    Proposal,
    ScriptedModel,
    SQLiteJournal,
    TextDelta,
    ToolAgent,
    ToolCall,
    TurnContext,
    View,
    agent,
)
from turnkeeper.actors.events import UserMessageEvent

from ._harness import (
    Measure,
    PeerMissing,
    Spent,
    by_both,
    costlier,
    faster,
    find_python,
    run_peer,
    say,
    skipped,
)
from .core import LENGTHS, US, RawFile, converse, fill, talk, time_turns

MANY = 1_000


async def look(at: str) -> str:
    """Look at an order."""
    return f"seen {at}"


def looks_once(request: ModelRequest) -> ModelResponse:
    """Calls the tool when a chat message is the newest, and answers its result."""
    if isinstance(request.view[-1], UserMessageEvent):
        return ModelResponse(calls=[ToolCall("look", {"at": "order 7"})])
    return ModelResponse("it is on its way")


def run(*, quick: bool) -> Iterator[Measure]:
    rounds = 5 if quick else 15
    yield from anyio.run(_steps, LENGTHS[:2] if quick else LENGTHS, rounds)
    yield from anyio.run(_sending, 100 if quick else 400)
    yield from anyio.run(_many, 3 if quick else 7)
    yield anyio.run(_pieces, 100 if quick else 300)
    yield from anyio.run(_memory)
    yield from _peer(LENGTHS[:2] if quick else LENGTHS, rounds)


# --- an answer while it is written ----------------------------------------------------------------


async def _pieces(pieces: int) -> Measure:
    """Time an answer that many read while it is written, by reader and piece."""
    say(f"turns: {MANY:,} readers of one answer of {pieces} pieces")
    has_begun, may_write = anyio.Event(), anyio.Event()
    wrote_alone = 0.0

    async def write(turn: TurnContext, count: int) -> float:
        write = turn.writer()
        began = perf_counter()
        for n in range(count):
            await write(f"word {n} ")
        return perf_counter() - began

    @agent
    async def writes(turn: TurnContext) -> str:
        nonlocal wrote_alone
        if turn.message.content == "alone":
            wrote_alone = await write(turn, pieces)
        else:
            has_begun.set()
            await may_write.wait()
            await write(turn, pieces)
        return "done"

    got = 0
    async with Conversations(writes, journal=MemoryJournal()) as conversations:
        conversation = conversations["c"]
        await (await conversation.send("alone")).end()
        turn = await conversation.send("read by many")
        await has_begun.wait()

        async def read() -> None:
            nonlocal got
            async for item in turn:
                got += isinstance(item, TextDelta)

        async with anyio.create_task_group() as readers:
            for _ in range(MANY):
                readers.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            gc.collect()
            began = perf_counter()
            may_write.set()
        took = perf_counter() - began - wrote_alone
    say(f"turns: {got / MANY:.0f} pieces a reader, {took * US / got:.1f} µs each")
    return costlier(
        f"piece_to_each_of_{MANY}_readers",
        [(took * US / (pieces * MANY), 5.0)],
        baseline="5 µs",
        goal="≤ 1.0",
    )


# --- a turn ---------------------------------------------------------------------------------------


async def _steps(lengths: Sequence[int], rounds: int) -> list[Measure]:
    say("turns: a turn of two model calls and a tool, over SQLite at FULL")
    with tempfile.TemporaryDirectory() as folder:
        times: dict[int, float] = {}
        beside: Sequence[Spent] = ()
        commits = 0
        for length in lengths:
            times[length], beside, commits = await _turn(Path(folder), length, rounds * 4)
    short, long = lengths[0], lengths[-1]
    worst = max(times[length] / times[short] for length in lengths[1:]) * times[short]
    return [
        costlier(
            f"turn_{long}",
            [(worst, times[short])],
            baseline=f"a turn at {short} events",
            goal="≤ 1.2",
        ),
        *by_both(
            f"turn_beside_{commits}_commits_{long}",
            [(spent, Spent(1_000.0, 1_000.0)) for spent in beside],
            baseline="a millisecond",
            goal="≤ 1.0",
        ),
    ]


async def _turn(folder: Path, length: int, rounds: int) -> tuple[float, Sequence[Spent], int]:
    """Return the median time of a whole turn, the times without its commits, and their number."""
    agent = ToolAgent(ScriptedModel(looks_once), [look])
    times, beside, commits = await time_turns(agent, folder / f"turn{length}.db", length, rounds)
    return sorted(times)[rounds // 2], beside, commits


# --- sending --------------------------------------------------------------------------------------


class _EndlessCondenser:
    """Always at work, and never done."""

    def need(self, _: View) -> Need | None:
        return "soft"

    async def propose(self, _view: View, _need: Need) -> Proposal | None:
        await anyio.sleep_forever()
        return None


async def _hang(at: str) -> str:
    await anyio.sleep_forever()
    return at


_hang.__name__ = "look"


async def _sending(messages: int) -> list[Measure]:
    """Compare `send` while a turn runs, its tool hangs and a condenser works, with lone commits."""
    say("turns: sending while a tool hangs and a condenser works")
    with tempfile.TemporaryDirectory() as folder:
        agent = ToolAgent(ScriptedModel(looks_once), [_hang])
        journal = SQLiteJournal(Path(folder) / "send.db")
        busy, lone = [], []
        with RawFile.open(Path(folder) / "raw.db") as raw:
            async with Conversations(
                agent, journal=journal, condenser=_EndlessCondenser(), queued_messages_max=1_000
            ) as conversations:
                conversation = conversations["c"]
                await conversation.send("look")
                for _ in range(messages):
                    began = perf_counter()
                    await conversation.send("and this?")
                    busy.append((perf_counter() - began) * US)
                    lone.append(raw.commit(1).clock)
    pair = (_p99(busy), _p99(lone))
    baseline = "p99 of a lone raw commit"
    return [costlier("send_while_busy_p99", [pair], baseline=baseline, goal="≤ 3.0")]


def _p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


# --- many at once ---------------------------------------------------------------------------------


async def _many(rounds: int) -> list[Measure]:
    say(f"turns: {MANY} conversations with a turn each at once")
    with tempfile.TemporaryDirectory() as folder:
        agent = ToolAgent(ScriptedModel(looks_once), [look])
        journal = SQLiteJournal(Path(folder) / "many.db")
        pairs = []
        async with Conversations(agent, journal=journal) as conversations:
            handles = [conversations[f"c{number}"] for number in range(MANY)]
            for _ in range(rounds + 1):
                began = perf_counter()
                async with anyio.create_task_group() as group:
                    for handle in handles:
                        group.start_soon(converse, handle)
                at_once = (perf_counter() - began) / MANY * US
                began = perf_counter()
                for handle in handles[:100]:
                    await converse(handle)
                pairs.append((at_once, (perf_counter() - began) / 100 * US))
    baseline = "a turn, one after the other"
    return [faster(f"turns_at_once_{MANY}", pairs[1:], baseline=baseline, goal="")]


async def _memory() -> list[Measure]:
    """Compare the bytes of a conversation whose turn waits for a tool with one that is at rest."""
    say("turns: memory")
    began = 0

    async def wait(at: str) -> str:
        nonlocal began
        began += 1
        await anyio.sleep_forever()
        return at

    wait.__name__ = "look"
    agent = ToolAgent(ScriptedModel(looks_once), [wait])
    async with Conversations(agent, journal=MemoryJournal()) as conversations:
        handles = [conversations[f"c{number}"] for number in range(MANY)]
        gc.collect()
        tracemalloc.start()
        for handle in handles:
            await handle.append(UserMessageEvent(content="begin"))
        gc.collect()
        idle, _ = tracemalloc.get_traced_memory()
        for handle in handles:
            await handle.send("and now?")
        while began < MANY:
            await anyio.lowlevel.checkpoint()
        gc.collect()
        busy, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    pair = ((busy - idle) / MANY, idle / MANY)
    baseline = "one at rest, its log included"
    return [costlier("memory_in_a_turn", [pair], baseline=baseline, goal="", unit="bytes")]


# --- peer -----------------------------------------------------------------------------------------


def _peer(lengths: Sequence[int], rounds: int) -> Iterator[Measure]:
    say("turns: OpenHands SDK")
    names = [f"step_vs_openhands_{length}" for length in lengths]
    try:
        found = run_peer(
            "openhands",
            ["openhands-sdk"],
            "_peer_openhands.py",
            str(min(rounds, 3)),
            *map(str, lengths),
            interpreter=find_python("3.12"),
        )
    except PeerMissing as missing:
        for name in names:
            yield skipped(name, "OpenHands SDK", "≥ 1.0", str(missing))
        return
    for name, length in zip(names, lengths, strict=True):
        ours = anyio.run(_answer, length, rounds)
        pair = (ours, found[f"step_{length}"])
        yield faster(name, [pair], baseline="OpenHands SDK", goal="≥ 1.0")


async def _answer(length: int, rounds: int) -> float:
    """Time a turn of one model call, as the peer's program measures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.db"
        await fill(path, talk(length))
        agent = ToolAgent(ScriptedModel(lambda _: "done"))
        async with Conversations(agent, journal=SQLiteJournal(path)) as conversations:
            conversation = conversations["c"]
            await converse(conversation)
            times = []
            for _ in range(rounds):
                began = perf_counter()
                await converse(conversation)
                times.append((perf_counter() - began) * US)
    return sorted(times)[len(times) // 2]
