"""The conversation core: view, messages, a whole step, opening, memory and disk.

A figure that the machine limits is compared with that limit, and each cost of a long conversation
with that of a short one. The peer is the newest release of OpenHands SDK, with the same kinds of
events, in a separate environment (Python 3.12).
"""

from __future__ import annotations

import gc
import os
import random
import resource
import sqlite3
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Final

import anyio

from turnkeeper.actors import (
    Agent,
    Conversation,
    Conversations,
    Event,
    FrozenObject,
    SQLiteJournal,
    TokenUsage,
    TurnContext,
    View,
    agent,
)
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.core.view import ViewFold
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    CondensationEvent,
    ObservationEvent,
    StepFinishedEvent,
    SystemPromptEvent,
    ThinkingBlock,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    encode_event,
)
from turnkeeper.actors.models.messages import LLMShape, to_llm_messages
from turnkeeper.actors.owner.loading import load_state

from ._harness import (
    Measure,
    PeerMissing,
    Spent,
    Stopwatch,
    by_both,
    costlier,
    faster,
    find_python,
    in_turn,
    run_peer,
    say,
    skipped,
)
from ._raw_sqlite import connect

US: Final = 1e6
LENGTHS: Final = (100, 1_000, 10_000)
STEP_US: Final = 800.0
"""The most that a step may take beside its commits."""
SNAPSHOT_S_MAX: Final = 60.0

Pairs = list[tuple[float, float]]


def talk(length: int, *, thinking: bool = False) -> list[Event]:
    """Return a conversation of at most `length` events, in whole turns."""
    log: list[Event] = [SystemPromptEvent(content="be kind")]
    for turn in turns(thinking=thinking):
        if len(log) + len(turn) > length:
            return log
        log += turn
    return log


def turns(*, thinking: bool = False) -> Iterator[list[Event]]:
    """Yield turns without end: a question, two calls one after the other, an answer.

    An event has about 740 bytes of JSON, as the chat events of the journal's benchmark have.
    """
    blocks = (ThinkingBlock(thinking="hm " * 20, signature="s"),) if thinking else ()
    arguments = FrozenObject({"at": "place", "deep": {"a": [1, 2, 3]}})
    said = "please " + "x" * 900
    for n in count():
        turn = f"t{n}"
        events: list[Event] = [
            TurnStartedEvent(turn_id=turn),
            UserMessageEvent(turn_id=turn, content=said, message_id=f"m{n}"),
        ]
        for call in (f"c{n}.1", f"c{n}.2"):
            events += [
                ActionEvent(
                    turn_id=turn,
                    tool_call_id=call,
                    tool_name="look",
                    arguments=arguments,
                    llm_response_id=f"r{call}",
                    thinking=blocks,
                ),
                ObservationEvent(turn_id=turn, tool_call_id=call, content="seen " * 340),
                StepFinishedEvent(turn_id=turn, usage=TokenUsage(input_tokens=10)),
            ]
        events.append(AgentMessageEvent(turn_id=turn, content="answer " * 130))
        events.append(TurnEndedEvent(turn_id=turn, outcome="completed"))
        yield events


def run(*, quick: bool) -> Iterator[Measure]:
    rounds = 3 if quick else 7
    lengths = LENGTHS[:2] if quick else LENGTHS
    yield from _imports(rounds)
    yield from _views(lengths, rounds)
    yield from _memory(40_000 if quick else 100_000)
    yield from anyio.run(_stored, lengths, rounds)
    yield from _peer(lengths, rounds)


# --- importing ------------------------------------------------------------------------------------


FIRST_NAMES: Final = "from turnkeeper import Conversations, SQLiteJournal, agent"
FIRST_CONVERSATIONS: Final = f"""{FIRST_NAMES}
@agent
async def support(turn): return "hello"
Conversations(support, journal=SQLiteJournal("never-opened.db"))"""
# The least that a program must import if its events are pydantic models and it runs on a loop.
FLOOR: Final = """import anyio, asyncio
from pydantic import BaseModel
class Event(BaseModel): kind: str"""


def _imports(rounds: int) -> Iterator[Measure]:
    """Compare the CPU time of a first program's imports with that of `import pydantic`.

    Also compare that of opening conversations, which loads the rest, with the least possible.
    """
    say("core: importing")
    codes = ("pass", FIRST_NAMES, "import pydantic", FIRST_CONVERSATIONS, FLOOR)
    for code in codes:
        _cpu_ms(code)  # writes the bytecode of all that it loads
    names, conversations = [], []
    for _ in range(rounds):
        # One after the other, and the least of five, so that other load on the machine hardly
        # counts.
        times = [[_cpu_ms(code) for code in codes] for _ in range(5)]
        nothing, first, pydantic, first_conversations, floor = map(min, zip(*times, strict=True))
        names.append((first - nothing, pydantic - nothing))
        conversations.append((first_conversations - nothing, floor - nothing))
    yield costlier("import", names, baseline="import pydantic", goal="≤ 3.0", unit="ms")
    baseline = "anyio, asyncio and one pydantic model"
    yield costlier("import_and_make", conversations, baseline=baseline, goal="", unit="ms")


def _cpu_ms(code: str) -> float:
    """Return the CPU milliseconds of a fresh interpreter, which keeps its bytecode."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return (user + system) * 1_000


# --- the view -------------------------------------------------------------------------------------


def _views(lengths: Sequence[int], rounds: int) -> Iterator[Measure]:
    say("core: the view")
    states = {length: _folded(talk(length)) for length in lengths}
    for length, state in states.items():
        yield _bounded(f"view_{length}", _each(partial(getattr, state, "view"), 10_000), 3.0)
    length, state = lengths[-1], states[lengths[-1]]
    value = _each(lambda: state.view.manipulation_indices.find_next(length // 2), 10_000)
    yield _bounded(f"indices_{length}", value, 10.0)
    shapes: tuple[LLMShape, ...] = ("openai", "anthropic")
    for shape in shapes:
        yield _bounded(f"messages_{shape}_{length}", _two_new(state, shape, rounds * 3), 50.0)
    for thinking in (False, True):
        log = talk(length, thinking=thinking)
        pairs = _in_turn(partial(View.from_events, log), partial(_fold, log), rounds)
        name = f"rebuild{'_thinking' if thinking else ''}_{length}"
        yield costlier(name, pairs, baseline="a bare fold of the view", goal="≤ 1.5")


def _folded(log: Sequence[Event]) -> Folded:
    state = Folded()
    for event in log:
        state.fold(event)
    return state


def _fold(log: Sequence[Event]) -> None:
    fold = ViewFold()
    for event in log:
        fold.fold(event)


def _two_new(state: Folded, shape: LLMShape, rounds: int) -> float:
    """Time the messages of a view that has grown by two events since its messages were made."""
    times = []
    kept = to_llm_messages(state.view, shape)
    for _ in range(rounds):
        state.fold(UserMessageEvent(content="and now?"))
        state.fold(AgentMessageEvent(content="now"))
        view = state.view
        began = perf_counter()
        made = to_llm_messages(view, shape)
        times.append((perf_counter() - began) * US)
        kept = made  # dropped outside the time that is taken
    assert len(kept) > rounds
    return sorted(times)[len(times) // 2]


def _each(act: Callable[[], object], times: int) -> float:
    act()
    began = perf_counter()
    for _ in range(times):
        act()
    return (perf_counter() - began) / times * US


def _in_turn(ours: Callable[[], object], base: Callable[[], object], rounds: int) -> Pairs:
    async def timed(act: Callable[[], object]) -> float:
        began = perf_counter()
        act()
        return (perf_counter() - began) * US

    return anyio.run(in_turn, lambda: timed(ours), lambda: timed(base), rounds)


def _bounded(name: str, value: float, bound: float) -> Measure:
    return costlier(name, [(value, bound)], baseline="the bound", goal="≤ 1.0")


# --- memory ---------------------------------------------------------------------------------------


def _memory(length: int) -> Iterator[Measure]:
    say("core: memory")
    long, view = _bytes_held(length)
    short, _ = _bytes_held(length // 3)
    fresh, _ = _bytes_held(None)
    name = f"memory_condensed_{length}"
    baseline = f"one of {length // 3}, view {view} as well"
    yield costlier(name, [(long, short)], baseline=baseline, goal="≤ 1.05", unit="bytes")
    # The rest is the bounded tail: the newest message ids, and calls that left the view.
    baseline = f"one that shows all its {view} events"
    yield costlier(f"{name}_tail", [(long, fresh)], baseline=baseline, goal="", unit="bytes")


def _bytes_held(length: int | None) -> tuple[float, int]:
    """Return the bytes of a state that has folded `length` events, always condensed to 240.

    Without a length: of a state that has folded only the events that it shows.
    """
    gc.collect()
    tracemalloc.start()
    try:
        state = Folded()
        for turn in turns():
            for event in turn:
                state.fold(event)
            is_full = len(state.view) >= 240
            if is_full and (length is None or state.seq >= length):
                break
            if is_full:
                forgotten = tuple(kept.id for kept in state.view[: state.view.find_next(6)])
                state.fold(CondensationEvent(forgotten_event_ids=forgotten))
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        return float(held), len(state.view)
    finally:
        tracemalloc.stop()


# --- over a journal -------------------------------------------------------------------------------


@agent
async def answering(turn: TurnContext) -> None:
    """Answer at once, as a model that is given the messages and says one thing."""
    messages = to_llm_messages(turn.view)
    await turn.say(f"done, after {len(messages)}")


async def _stored(lengths: Sequence[int], rounds: int) -> list[Measure]:
    found = []
    say("core: a whole step, over SQLite at FULL")
    with tempfile.TemporaryDirectory() as folder:
        steps: dict[int, float] = {}
        beside: Sequence[Spent] = ()
        commits = 0
        for length in lengths:
            times, beside, commits = await time_turns(
                answering, Path(folder) / f"step{length}.db", length, rounds * 3
            )
            steps[length] = sorted(times)[len(times) // 2]
        short, long = lengths[0], lengths[-1]
        flat = [(steps[length], steps[short]) for length in lengths[1:]]
        worst = max(flat, key=lambda pair: pair[0] / pair[1])
        baseline = f"a step at {short} events"
        found.append(costlier(f"step_{long}", [worst], baseline=baseline, goal="≤ 1.2"))
        name = f"step_beside_{commits}_commits_{long}"
        pairs = [(spent, Spent(STEP_US, STEP_US)) for spent in beside]
        found += by_both(name, pairs, baseline="0.8 ms", goal="≤ 1.0")

        say("core: opening a conversation")
        found += await _open(Path(folder), long, rounds)
    return found


class RawFile:
    """A file of SQLite alone, with a journal's settings.

    It stays open, as a journal's does: the first commit after an opening begins the write-ahead
    log, which takes two syncs more.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._payload = encode_event(UserMessageEvent(content="x" * 600))
        connection.execute("CREATE TABLE event (seq INTEGER PRIMARY KEY, data BLOB)")
        self.commit(10)

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[RawFile]:
        with closing(connect(path, writers=1)) as connection:
            yield cls(connection)

    def commit(self, times: int) -> Spent:
        """Return the mean time of a commit of one row."""
        watch = Stopwatch()
        for _ in range(times):
            self._connection.execute("INSERT INTO event (data) VALUES (?)", (self._payload,))
        return watch.spent_on_each(times)


def _less(whole: Spent, part: Spent, times: int) -> Spent:
    """Return the time of the whole, less the part's time this many times."""
    assert whole.processor is not None, "this process is measured"
    assert part.processor is not None, "this process is measured"
    return Spent(whole.clock - times * part.clock, whole.processor - times * part.processor)


async def time_turns(
    by: Agent, path: Path, length: int, rounds: int
) -> tuple[Sequence[float], Sequence[Spent], int]:
    """Time a chat message sent, answered by this agent, and its turn ended, in a log this long.

    Return the times by the clock, the times without those of as many raw commits, which are made
    right after each turn, and the number of commits.
    """
    passed: list[str] = []
    await fill(path, talk(length))
    journal = SQLiteJournal(path, failpoint=passed.append)
    async with Conversations(by, journal=journal) as conversations:
        conversation = conversations["c"]
        await converse(conversation)
        await _snapshot_written(journal, length)
        passed.clear()
        await converse(conversation)
        commits = passed.count("committed")
        times, beside = [], []
        with RawFile.open(path.with_suffix(".raw")) as raw:
            for _ in range(rounds):
                watch = Stopwatch()
                await converse(conversation)
                spent = watch.spent_on_each(1)
                times.append(spent.clock)
                beside.append(_less(spent, raw.commit(commits), commits))
    return times, beside, commits


async def _snapshot_written(journal: SQLiteJournal, length: int) -> None:
    """Wait for the snapshot to which the first step in a long log leads.

    It is written beside the next steps. It would count among their commits, and fall into up to all
    rounds, where it comes once in hundreds of events.
    """
    if length >= Limits().snapshot_events:
        with anyio.fail_after(SNAPSHOT_S_MAX):
            while not await journal.read_snapshot("c"):  # noqa: ASYNC110 - no event says so
                await anyio.sleep(0.01)


async def converse(conversation: Conversation) -> None:
    turn = await conversation.send("and now?")
    await turn.reply()


async def fill(path: Path, log: Sequence[Event]) -> int:
    """Write a log into a fresh journal; return the bytes of its payloads."""
    records = [encode_record(event) for event in log]
    async with SQLiteJournal(path) as journal:
        claim = await journal.claim("c")
        for at in range(0, len(records), 500):
            await journal.append(
                "c",
                records[at : at + 500],
                epoch=claim.epoch,
                expected_seq=at + 1,
                is_unfinished=False,
            )
    return sum(len(record.payload) for record in records)


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*"))


async def _open(folder: Path, length: int, rounds: int) -> list[Measure]:
    log = talk(length)
    path = folder / "open.db"
    payload_bytes = await fill(path, log)
    disk = _size(path)
    rows = _rows(log)

    async def cold() -> Spent:
        watch = Stopwatch()
        state, removed = await load_state(journal, "c", len(log))
        taken = watch.spent_on_each(len(log))
        assert not removed
        assert state.seq == len(log)
        return taken

    async def validating() -> Spent:
        watch = Stopwatch()
        kept = _validated(rows)
        taken = watch.spent_on_each(len(log))
        assert len(kept) == len(log)
        return taken

    async with SQLiteJournal(path) as journal:
        pairs = await in_turn(cold, validating, rounds)
        state, _ = await load_state(journal, "c", len(log))
        forgotten = tuple(
            event.id for event in state.view[: state.view.find_next(len(state.view) - 240)]
        )
        condensed = [*log, CondensationEvent(forgotten_event_ids=forgotten)]
        state.fold(condensed[-1])
        claim = await journal.claim("c")
        await journal.append(
            "c",
            [encode_record(condensed[-1])],
            epoch=claim.epoch,
            expected_seq=len(condensed),
            is_unfinished=False,
        )
        await journal.write_snapshot("c", state.to_snapshot(), epoch=claim.epoch)

        async def from_snapshot() -> float:
            began = perf_counter()
            state, _ = await load_state(journal, "c", len(condensed))
            taken = (perf_counter() - began) * US
            assert len(state.view) <= 240
            return taken

        shown = _rows(state.view)

        async def validating_view() -> float:
            began = perf_counter()
            kept = _validated(shown)
            taken = (perf_counter() - began) * US
            assert len(kept) == len(shown)
            return taken

        with RawFile.open(folder / "raw.db") as raw:

            async def raw_commit() -> float:
                return raw.commit(20).clock

            warm = await in_turn(from_snapshot, raw_commit, rounds)
        warm_validated = await in_turn(from_snapshot, validating_view, rounds)
    return [
        *by_both(
            f"open_{length}",
            pairs,
            kind=faster,
            baseline="pydantic validating the rows",
            goal="≥ 0.4",
        ),
        costlier(f"open_snapshot_{length}", warm, baseline="one raw commit", goal="≤ 25"),
        faster(
            f"open_snapshot_{length}_validated",
            warm_validated,
            baseline="pydantic validating its view",
            goal="",
        ),
        costlier(
            f"disk_{length}",
            [(disk / len(log), payload_bytes / len(log))],
            baseline="the payload",
            goal="≤ 1.6",
            unit="bytes",
        ),
    ]


Rows = Sequence[tuple[Callable[[bytes], Event], bytes]]


def _rows(events: Iterable[Event]) -> Rows:
    """Return the JSON of these events, each with the validator of its kind, which we use, too."""
    return [(event.__pydantic_validator__.validate_json, encode_event(event)) for event in events]


def _validated(rows: Rows) -> Sequence[Event]:
    """Validate each row, and keep the events, as a conversation that is opened keeps them."""
    return [validate_json(payload) for validate_json, payload in rows]


# --- the peer -------------------------------------------------------------------------------------


def _peer(lengths: Sequence[int], rounds: int) -> Iterator[Measure]:
    say("core: OpenHands SDK")
    long = lengths[-1]
    names = ("rebuild", "rebuild_thinking", "indices", "messages", "step", "open")
    try:
        python = find_python("3.12")
        found = run_peer(
            "openhands",
            ["openhands-sdk"],
            "_peer_openhands.py",
            str(min(rounds, 3)),
            *map(str, lengths),
            interpreter=python,
        )
    except PeerMissing as missing:
        for name in (*names, "reopened_differently"):
            yield skipped(f"{name}_vs_openhands_{long}", "OpenHands SDK", "≥ 1.0", str(missing))
        return
    ours = anyio.run(_as_the_peer, long, rounds)
    for name in names:
        pair = (ours[name], found[f"{name}_{long}"])
        yield faster(f"{name}_vs_openhands_{long}", [pair], baseline="OpenHands SDK", goal="≥ 1.0")
    share = found["reopened_differently"]
    baseline = "OpenHands SDK, share of logs"
    pair = (_reopened_differently(200), share)
    yield costlier("reopened_differently", [pair], baseline=baseline, goal="≤ 0.0", unit="share")


async def _as_the_peer(length: int, rounds: int) -> dict[str, float]:
    """Measure ours as the peer's program measures."""
    plain, thinking = talk(length), talk(length, thinking=True)
    state = _folded(plain)

    def rebuilt(log: Sequence[Event]) -> float:
        return sorted(_each(lambda: View.from_events(log), 1) for _ in range(rounds))[rounds // 2]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"step{length}.db"
        times, _, _ = await time_turns(answering, path, length, rounds)
        step = sorted(times)[len(times) // 2]
        path = Path(folder) / "open.db"
        await fill(path, plain)
        began = perf_counter()
        async with SQLiteJournal(path) as journal:
            await load_state(journal, "c", len(plain))
        opened = (perf_counter() - began) * US
    return {
        "rebuild": rebuilt(plain),
        "rebuild_thinking": rebuilt(thinking),
        "indices": _each(lambda: state.view.manipulation_indices.find_next(0), 1_000),
        "messages": _two_new(state, "openai", 9),
        "step": step,
        "open": opened,
    }


def _reopened_differently(tries: int) -> float:
    """Return the share of logs whose view, reopened at a random event, is not the whole log's."""
    draw = random.Random(1)
    differing = 0
    for _ in range(tries):
        log = talk(60)
        at = draw.randrange(1, len(log))
        state, _ = Folded.from_events(log[:at])
        for event in log[at:]:
            state.fold(event)
        differing += state.view != View.from_events(log)
    return differing / tries
