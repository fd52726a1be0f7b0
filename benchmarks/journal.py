"""Durable appends to SQLite at FULL and to PostgreSQL, beside the databases' raw rates and peers.

Events are chat events of about 740 bytes of JSON. The raw rate is measured with the same rows in
the cheapest table that refuses a known id, with a journal's settings, and with one row in each
commit for each conversation that writes at once: one statement of many rows on SQLite, one array
insert on PostgreSQL, and nothing around them.

The plot, `results/journal_by_length.svg`, shows appends a second, one at a time, against the length
of the log, for this journal and for the peers at their newest releases.
"""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import psycopg
from psycopg.types.numeric import Int8

from turnkeeper.actors import (
    Conversation,
    Conversations,
    Journal,
    PostgresJournal,
    SQLiteJournal,
    TurnContext,
    agent,
)
from turnkeeper.actors.events import AgentMessageEvent, UserMessageEvent, encode_event
from turnkeeper.actors.journal import Claim, Record
from turnkeeper.runtime import Ports

from ._harness import (
    FOLDER,
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
from ._plot import rates
from ._postgres import server
from ._raw_sqlite import SCHEMA, connect, flat, insert_statement
from ._smallest import Owner, Program

US = 1e6
IDS = Ports().ids
PAYLOAD = encode_event(UserMessageEvent(content="x" * 590))
MANY = 1_000
PLOT = FOLDER / "results" / "journal_by_length.svg"
PLOTS = (("Appends a second by the length of the log", "results/journal_by_length.svg"),)
LENGTHS = (0, 1_000, 3_000, 10_000, 30_000, 100_000)

Pairs = list[tuple[float, float]]


def record() -> Record:
    return Record(IDS.new(), "user_message", PAYLOAD)


def run(*, quick: bool) -> Iterator[Measure]:
    rounds = 3 if quick else 7
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for backend in ("asyncio", "trio"):
            say(f"journal: SQLite on {backend}")
            yield from anyio.run(_alone, folder, rounds, backend, backend=backend)
        yield from anyio.run(_long, folder, rounds)
        say("journal: the whole path")
        yield from anyio.run(_whole_path, folder, rounds)
        for backend, goal in (("asyncio", "≥ 0.5"), ("trio", "≥ 0.4")):
            say(f"journal: the whole path beside the smallest honest program, on {backend}")
            yield anyio.run(_beside_smallest, folder, rounds, backend, goal, backend=backend)
        yield from _postgres(rounds)
        yield from _peers(folder, rounds, quick=quick)


# --- raw ------------------------------------------------------------------------------------------


@contextmanager
def raw_file(folder: Path, writers: int) -> Iterator[sqlite3.Connection]:
    """Yield a file for the same rows, with a journal's settings, and no journal around it."""
    path = folder / f"raw-{IDS.new()}.db"
    with closing(connect(path, writers)) as connection:
        connection.executescript(SCHEMA)
        yield connection
    remove(path)


def remove(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def raw_rows(many: int, each: int) -> list[list[tuple[Any, ...]]]:
    return [
        [
            (log, seq, 1, IDS.new(), "user_message", None, 123_456_789, PAYLOAD)
            for log in range(many)
        ]
        for seq in range(1, each + 1)
    ]


async def raw_sqlite(folder: Path, many: int, each: int) -> float:
    """Time raw commits of `many` rows each, in one statement; microseconds an event."""
    with raw_file(folder, many) as connection:
        groups = [flat(group) for group in raw_rows(many, each)]
        statement = insert_statement(many)
        began = perf_counter()
        for group in groups:
            connection.execute(statement, group)
        return (perf_counter() - began) / (many * each) * US


# --- the journal alone ----------------------------------------------------------------------------


async def claim_all(journal: Journal, names: Sequence[str]) -> dict[str, Claim]:
    claims: dict[str, Claim] = {}

    async def claim(name: str) -> None:
        claims[name] = await journal.claim(name)

    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(claim, name)
    return claims


async def append_all(journal: Journal, many: int, each: int) -> float:
    """Time conversations that each send once their last was acknowledged; microseconds an event.

    Each has had an event before, as on the whole path: with its first one, a journal also writes
    its row for lists.
    """
    claims = await claim_all(journal, [f"c{number}" for number in range(many)])
    # Ids rise with time in every program, as in the raw rows: one round of all conversations after
    # the other. Otherwise each commit would write all over the index of ids.
    first, *rounds = [{name: record() for name in claims} for _ in range(1 + each)]

    async def converse(name: str, begin: int, rounds: Sequence[Mapping[str, Record]]) -> None:
        epoch = claims[name].epoch
        for seq, records in enumerate(rounds, begin):
            await journal.append(
                name, [records[name]], epoch=epoch, expected_seq=seq, is_unfinished=False
            )

    async with anyio.create_task_group() as group:
        for name, claim in claims.items():
            group.start_soon(converse, name, claim.head + 1, [first])
    began = perf_counter()
    async with anyio.create_task_group() as group:
        for name, claim in claims.items():
            group.start_soon(converse, name, claim.head + 2, rounds)
    return (perf_counter() - began) / (many * each) * US


@asynccontextmanager
async def fresh_journal(folder: Path) -> AsyncIterator[SQLiteJournal]:
    path = folder / f"ours-{IDS.new()}.db"
    async with SQLiteJournal(path) as journal:
        yield journal
    remove(path)


async def ours_sqlite(folder: Path, many: int, each: int) -> float:
    async with fresh_journal(folder) as journal:
        return await append_all(journal, many, each)


async def _alone(folder: Path, rounds: int, backend: str) -> list[Measure]:
    found = []
    for many, each, goal in ((1, 400, "≥ 0.5"), (10, 150, ""), (100, 60, ""), (MANY, 20, "≥ 0.4")):
        pairs = await in_turn(
            partial(ours_sqlite, folder, many, each),
            partial(raw_sqlite, folder, many, each),
            rounds,
        )
        # A loop's own hop from thread to thread is what one at a time measures on trio.
        is_goal = backend == "asyncio" or many == MANY
        found.append(
            faster(
                f"sqlite_{backend}_{many}",
                pairs,
                baseline=f"raw SQLite, {many} a commit",
                goal=goal if is_goal else "",
            )
        )
    return found


async def _long(folder: Path, rounds: int) -> list[Measure]:
    """Compare a conversation of 100,000 events with a fresh one; also a hundred of them."""
    say("journal: at length")
    found = []
    async with fresh_journal(folder) as long, fresh_journal(folder) as fresh:
        for many, length, each in ((1, 100_000, 300), (100, 1_000, 30)):
            for journal, head in ((long, length), (fresh, 0)):
                await _lengthen(journal, many, head)
            pairs = await in_turn(
                partial(append_all, long, many, each),
                partial(append_all, fresh, many, each),
                rounds,
            )
            found.append(
                faster(
                    f"sqlite_at_{many * length}_in_{many}",
                    pairs,
                    baseline="an empty journal",
                    goal="≥ 0.85",
                )
            )
    return found


async def _lengthen(journal: Journal, many: int, length: int) -> None:
    for name, claim in (await claim_all(journal, [f"c{n}" for n in range(many)])).items():
        for at in range(claim.head, length, 500):
            await journal.append(
                name,
                [record() for _ in range(min(500, length - at))],
                epoch=claim.epoch,
                expected_seq=at + 1,
                is_unfinished=False,
            )


# --- the whole path -------------------------------------------------------------------------------


@agent
async def silent(_: TurnContext) -> None:
    """Do nothing: events are appended by their callers, and this agent is never asked."""


async def _appended(folder: Path, many: int, each: int, *, follow: bool) -> float:
    """Time an event from its creation to the answer, with all work for it, in microseconds."""
    path = folder / f"whole-{IDS.new()}.db"
    async with (
        Conversations(silent, journal=SQLiteJournal(path)) as conversations,
        anyio.create_task_group() as followers,
    ):
        handles = [conversations[f"c{number}"] for number in range(many)]
        seen = [0]
        async with anyio.create_task_group() as group:
            for handle in handles:
                group.start_soon(handle.append, UserMessageEvent(content="begin"))
        if follow:
            for handle in handles:
                followers.start_soon(_follow, handle, seen)

        began = perf_counter()
        async with anyio.create_task_group() as group:
            for handle in handles:
                group.start_soon(_converse, handle, each)
        if follow:
            while seen[0] < many * (each + 1):
                await anyio.lowlevel.checkpoint()
        taken = (perf_counter() - began) / (many * each) * US
        followers.cancel_scope.cancel()
    remove(path)
    return taken


async def _converse(handle: Conversation | Owner, each: int) -> None:
    for number in range(each):
        text = "x" * 590
        await handle.append(
            UserMessageEvent(content=text) if number % 2 else AgentMessageEvent(content=text)
        )


async def _follow(handle: Conversation, seen: list[int]) -> None:
    async for _ in handle.events(after=0):
        seen[0] += 1


async def _whole_path(folder: Path, rounds: int) -> list[Measure]:
    many = await in_turn(
        partial(_appended, folder, MANY, 10, follow=False),
        partial(raw_sqlite, folder, MANY, 10),
        rounds,
    )
    followed = await in_turn(
        partial(_appended, folder, 100, 40, follow=True),
        partial(_appended, folder, 100, 40, follow=False),
        rounds,
    )
    return [
        faster(f"whole_path_{MANY}", many, baseline=f"raw SQLite, {MANY} a commit", goal="≥ 0.25"),
        costlier("subscriber_each", followed, baseline="without subscribers", goal="≤ 1.15"),
    ]


async def _smallest(folder: Path, many: int, each: int) -> float:
    """Time an event as `_appended` does, in the smallest honest program."""
    path = folder / f"smallest-{IDS.new()}.db"
    async with Program(path, many) as program:
        async with anyio.create_task_group() as group:
            for owner in program.owners:
                group.start_soon(_converse, owner, 1)

        began = perf_counter()
        async with anyio.create_task_group() as group:
            for owner in program.owners:
                group.start_soon(_converse, owner, each)
        taken = (perf_counter() - began) / (many * each) * US
    remove(path)
    return taken


async def _beside_smallest(folder: Path, rounds: int, backend: str, goal: str) -> Measure:
    pairs = await in_turn(
        partial(_appended, folder, MANY, 10, follow=False),
        partial(_smallest, folder, MANY, 10),
        rounds,
    )
    name = f"whole_path_{MANY}_vs_smallest_{backend}"
    return faster(name, pairs, baseline="the smallest honest program", goal=goal)


# --- PostgreSQL -----------------------------------------------------------------------------------


def _postgres(rounds: int) -> Iterator[Measure]:
    say("journal: PostgreSQL")
    cases = ((1, 300, "≥ 0.6"), (100, 40, ""), (MANY, 10, "≥ 0.4"))
    try:
        with server() as conninfo:
            yield from anyio.run(_beside_raw_postgres, conninfo, cases, rounds)
    except PeerMissing as missing:
        for many, _, goal in cases:
            yield skipped(f"postgres_{many}", "raw array insert", goal, str(missing))


async def _beside_raw_postgres(
    conninfo: str, cases: Sequence[tuple[int, int, str]], rounds: int
) -> list[Measure]:
    connection = psycopg.connect(conninfo, autocommit=True)
    connection.execute(
        "CREATE TABLE IF NOT EXISTS raw_event (log bigint, seq bigint, epoch bigint, "
        "event_id text, kind text, message_id text, mark bigint, payload bytea, "
        "PRIMARY KEY (log, seq))"
    )
    connection.execute("CREATE UNIQUE INDEX IF NOT EXISTS raw_id ON raw_event (event_id, log)")
    types = ["bigint"] * 3 + ["text"] * 3 + ["bigint", "bytea"]
    columns_of = ", ".join(f"unnest(%b::{one}[])" for one in types)
    statement = f"INSERT INTO raw_event SELECT {columns_of}".encode()

    async def raw(many: int, each: int) -> float:
        connection.execute("TRUNCATE raw_event")
        columns = [
            [_as_array(column) for column in zip(*group, strict=True)]
            for group in raw_rows(many, each)
        ]
        began = perf_counter()
        for group in columns:
            connection.execute(statement, group)
        return (perf_counter() - began) / (many * each) * US

    async def ours(many: int, each: int) -> float:
        schema = f"bench_{IDS.block() % (1 << 40)}"
        async with PostgresJournal(conninfo, schema=schema) as journal:
            taken = await append_all(journal, many, each)
        connection.execute(f"DROP SCHEMA {schema} CASCADE".encode())
        return taken

    found = []
    with closing(connection):
        for many, each, goal in cases:
            pairs = await in_turn(partial(ours, many, each), partial(raw, many, each), rounds)
            baseline = f"raw array insert, {many} a commit"
            found.append(faster(f"postgres_{many}", pairs, baseline=baseline, goal=goal))
    return found


def _as_array(column: Sequence[Any]) -> list[Any]:
    """Return a column as a parameter: numbers go in binary, as in a journal, and not as text."""
    return [Int8(one) if isinstance(one, int) else one for one in column]


# --- peers ----------------------------------------------------------------------------------------

_MANY_AT_PEERS = 100
_SQLITE_PEERS = {
    "OpenAI Agents SDK SQLiteSession": (["openai-agents", "aiosqlite"], "_peer_agents_sdk.py"),
    "eventsourcing": (["eventsourcing"], "_peer_eventsourcing.py"),
}
"""The peers that are measured with one conversation and with many."""


def _ask_peer(
    name: str, seconds: str, lengths: Sequence[int], *, many: int = _MANY_AT_PEERS
) -> dict[str, float]:
    """Run a peer's program: one conversation at these lengths, and then this many at once."""
    requirements, program = _SQLITE_PEERS[name]
    slug = program.removeprefix("_peer_").removesuffix(".py").replace("_", "-")
    facts = (str(len(PAYLOAD)), seconds, str(many))
    return run_peer(slug, requirements, program, *facts, *map(str, lengths))


def _ask_langgraph(seconds: str, lengths: Sequence[int]) -> dict[str, float]:
    requirements = ["langgraph", "langgraph-checkpoint-sqlite"]
    facts = (str(len(PAYLOAD)), seconds)
    within = [str(length) for length in lengths if length <= 30_000]
    return run_peer("langgraph", requirements, "_peer_langgraph.py", *facts, *within)


def _peers(folder: Path, rounds: int, *, quick: bool) -> Iterator[Measure]:
    say("journal: OpenAI Agents SDK, eventsourcing, LangGraph")
    lengths = LENGTHS[:3] if quick else LENGTHS
    seconds = "0.3" if quick else "1"
    series: dict[str, dict[str, float]] = {}
    asks: dict[str, Callable[[], dict[str, float]]] = {
        name: partial(_ask_peer, name, seconds, lengths) for name in _SQLITE_PEERS
    }
    asks["LangGraph SqliteSaver"] = partial(_ask_langgraph, seconds, lengths)
    at = min(10_000, max(lengths))
    for name, ask in asks.items():
        slug = name.split()[0].lower()
        ours = anyio.run(_by_length, folder, lengths, float(seconds))
        series["turnkeeper SQLiteJournal"] = {f"at_{n}": rate for n, rate in ours.items()}
        try:
            found = series[name] = ask()
        except PeerMissing as missing:
            yield skipped(f"one_at_{at}_vs_{slug}", name, "", str(missing))
            continue
        pair = (US / ours[at], US / found[f"at_{at}"])
        yield faster(f"one_at_{at}_vs_{slug}", [pair], baseline=name, goal="")
    yield from _beside_session(folder, max(5, rounds))
    yield from _beside_best_peer(folder, max(5, rounds))
    if not quick:
        _plot(series)


def _beside_session(folder: Path, rounds: int) -> list[Measure]:
    """Take turns with the session, round by round: one conversation, one event at a time."""
    say("journal: one at a time, in turn with the session")
    peer, at = "OpenAI Agents SDK SQLiteSession", 3_000
    names = ("one_vs_openai", "one_whole_path_vs_openai")
    goals = {names[0]: "≥ 1.0", names[1]: ""}
    pairs: dict[str, list[tuple[Spent, Spent]]] = {name: [] for name in names}
    for _ in range(rounds):
        try:
            found = _ask_peer(peer, "0.3", (at,), many=0)
        except PeerMissing as missing:
            return [skipped(name, peer, goals[name], str(missing)) for name in names]
        theirs = Spent(US / found[f"at_{at}"], found[f"at_{at}_cpu"])
        for name, ours in zip(names, (_one_at, _one_whole_path), strict=True):
            pairs[name].append((anyio.run(ours, folder, at, 0.3), theirs))
    return [
        measure
        for name in names
        for measure in by_both(name, pairs[name], kind=faster, baseline=peer, goal=goals[name])
    ]


async def _one_at(folder: Path, length: int, seconds: float) -> Spent:
    """Time appends of one event, one after the other, by the journal alone."""
    async with fresh_journal(folder) as journal:
        await _lengthen(journal, 1, length)
        claim = await journal.claim("c0")
        seq = claim.head
        watch, began = Stopwatch(), perf_counter()
        while perf_counter() - began < seconds:
            seq += 1
            await journal.append(
                "c0", [record()], epoch=claim.epoch, expected_seq=seq, is_unfinished=False
            )
        return watch.spent_on_each(seq - claim.head)


async def _one_whole_path(folder: Path, length: int, seconds: float) -> Spent:
    """Time appends of one event, one after the other, by a conversation."""
    path = folder / f"whole-{IDS.new()}.db"
    async with SQLiteJournal(path) as journal:
        await _lengthen(journal, 1, length)
    async with Conversations(silent, journal=SQLiteJournal(path)) as conversations:
        conversation = conversations["c0"]
        await _converse(conversation, 1)
        count = 0
        watch, began = Stopwatch(), perf_counter()
        while perf_counter() - began < seconds:
            await _converse(conversation, 2)
            count += 2
        spent = watch.spent_on_each(count)
    remove(path)
    return spent


def _beside_best_peer(folder: Path, rounds: int) -> list[Measure]:
    """Take turns with the peers, round by round; the fastest of a round is the baseline."""
    say("journal: many at once, in turn with the peers")
    cases = {
        f"whole_path_{MANY}_vs_best_peer": ("many", "≥ 6"),
        f"four_together_{MANY}_vs_best_peer": ("four", "≥ 8"),
    }
    baselines = {"many": "the best peer, many at once", "four": "the same, four in one call"}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        ours = {
            "many": anyio.run(partial(_appended, folder, MANY, 10, follow=False)),
            "four": anyio.run(_appended_together, folder, MANY, 3),
        }
        found = []
        for peer in _SQLITE_PEERS:
            try:
                found.append(_ask_peer(peer, "0.3", ()))
            except PeerMissing:
                continue  # told above
        if not found:
            reason = "no peer could be measured"
            return [
                skipped(name, baselines[case], goal, reason) for name, (case, goal) in cases.items()
            ]
        for name, (case, _) in cases.items():
            best = max(max(one[case], one.get(f"{case}_async", 0.0)) for one in found)
            pairs[name].append((ours[case], US / best))
    return [
        faster(name, pairs[name], baseline=baselines[case], goal=goal)
        for name, (case, goal) in cases.items()
    ]


async def _appended_together(folder: Path, many: int, each: int) -> float:
    """Time an event of four that are appended in one call, by many conversations at once."""
    path = folder / f"four-{IDS.new()}.db"
    async with Conversations(silent, journal=SQLiteJournal(path)) as conversations:
        handles = [conversations[f"c{number}"] for number in range(many)]

        async def converse(handle: Conversation, times: int) -> None:
            for _ in range(times):
                text = "x" * 590
                await handle.append_all(
                    [
                        AgentMessageEvent(content=text),
                        UserMessageEvent(content=text),
                        AgentMessageEvent(content=text),
                        UserMessageEvent(content=text),
                    ]
                )

        async with anyio.create_task_group() as group:
            for handle in handles:
                group.start_soon(converse, handle, 1)
        began = perf_counter()
        async with anyio.create_task_group() as group:
            for handle in handles:
                group.start_soon(converse, handle, each)
        taken = (perf_counter() - began) / (many * each * 4) * US
    remove(path)
    return taken


async def _by_length(folder: Path, lengths: Sequence[int], seconds: float) -> dict[int, float]:
    """Return the appends a second, one at a time, into a conversation of each length."""
    found = {}
    async with fresh_journal(folder) as journal:
        for length in lengths:
            await _lengthen(journal, 1, length)
            claim = await journal.claim("c0")
            seq = claim.head
            began = perf_counter()
            while perf_counter() - began < seconds:
                seq += 1
                await journal.append(
                    "c0", [record()], epoch=claim.epoch, expected_seq=seq, is_unfinished=False
                )
            found[length] = (seq - claim.head) / (perf_counter() - began)
    return found


def by_length(found: Mapping[str, float]) -> dict[int, float]:
    """Return a peer's rates by the length of the log, out of all its figures."""
    places = {key: re.fullmatch(r"at_(\d+)", key) for key in found}
    return {int(place[1]): found[key] for key, place in places.items() if place}


def _plot(series: dict[str, dict[str, float]]) -> None:
    points = {name: by_length(found) for name, found in series.items()}
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(rates("Durable appends a second, one at a time, by the log's length", points))
    say(f"journal: {PLOT.relative_to(PLOT.parent.parent)} written")
