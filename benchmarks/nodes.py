"""One, two and three nodes over one PostgreSQL, and the load on that database.

A node is a separate process with the conversations, the journal and the hop of `turnkeeper serve`,
but without HTTP in front of it: `_node.py`. A turn has two model calls and a tool, with a model
that answers at once.

All nodes, their database and this program share one machine. By the clock, two nodes can be faster
than one only if a core was idle, so on two cores a second node gains little and a third nothing:
the clock shows how much of the cores one node and its database leave idle. The processor time, of
all nodes and the server together, shows the cost of a further node: with one machine for each node,
the throughput is the number of nodes divided by this ratio, until the database is saturated.

Counts (rows, bytes, commits) do not depend on the machine. `docs/scale.md` computes with the
figures of this group.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import anyio
import psycopg

from turnkeeper.actors import PostgresJournal
from turnkeeper.actors.journals.postgres.presence import (
    CHANNEL,
    RENEW,
    RENEWALS_PER_LEASE,
    payload_of,
)
from turnkeeper.actors.journals.shared.log_watch import mark_of

from ._harness import FOLDER, Measure, PeerMissing, Spent, by_both, costlier, faster, say, skipped
from ._many import connect, fill_schema, name_of
from ._postgres import schema, server
from .journal import US, append_all, raw_rows
from .scale import CHURNED, DAY_S, LEASE_S, Load

CONVERSATIONS = 48
EACH = 6
"""The turns of each conversation in a round; with two, a round lasted a fifth of a second."""
READERS = 1_000
IDLE = 100_000
COLD = 500
READ_EACH = 8
"""Enough readers that the difference they make exceeds the difference between two rounds."""
WRITERS = 8

Json = dict[str, Any]
Connection = psycopg.Connection[Any]


def run(*, quick: bool) -> Iterator[Measure]:
    rounds = 3 if quick else 7
    try:
        with server() as conninfo:
            yield from _nodes(conninfo, rounds)
            yield from _churn(conninfo, 100 if quick else 1_000)
            kept, days, renewals = (1_500, 4, RENEWALS // 10) if quick else (6_000, 10, RENEWALS)
            yield from _days(conninfo, kept=kept, days=days, renewals=renewals)
            yield from _writes(conninfo, rounds)
            yield from _notices(conninfo, rounds)
            yield from _readers(conninfo, IDLE, rounds)
    except PeerMissing as missing:
        yield skipped("nodes", "one node", "", str(missing))


# --- processes ------------------------------------------------------------------------------------


class Node:
    """A node that runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer()

    def begin(self, do: str, **told: object) -> None:
        """Send it an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **told}) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> Json:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a node has ended")
        found: Json = json.loads(line)
        return found

    def end(self) -> Json:
        """Wait until the order is carried out; return the node's counts at that time."""
        return self._answer()

    def do(self, do: str, **told: object) -> Json:
        self.begin(do, **told)
        return self.end()

    def leave(self) -> None:
        """Make it give its lease back and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextmanager
def _running(conninfo: str, name: str, count: int) -> Iterator[list[Node]]:
    key = secrets.token_hex(32)
    command = [sys.executable, str(FOLDER / "_node.py"), conninfo, name, key]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(count)
        ]
        for process in processes:
            stack.callback(process.kill)
        yield [Node(process) for process in processes]


class Server:
    """The server's processes, if they run on this machine."""

    def __init__(self, connection: Connection) -> None:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        parent = _parent(Path(f"/proc/{row[0]}/stat"))
        if parent is None:
            raise PeerMissing("the server's processes are not on this machine")
        self._parent = parent
        self._ended_s = 0.0
        self._last: dict[str, float] = {}

    @property
    def cpu_s(self) -> float:
        """The processor time of all its processes, including those that have ended since."""
        now: dict[str, float] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            if _parent(stat) == self._parent:
                try:
                    told = stat.with_name("schedstat").read_text()
                except OSError:
                    continue
                now[stat.parent.name] = int(told.split()[0]) / 1e9
        self._ended_s += sum(each for pid, each in self._last.items() if pid not in now)
        self._last = now
        return self._ended_s + sum(now.values())


def _parent(stat: Path) -> int | None:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


# --- one, two and three nodes ---------------------------------------------------------------------


def _nodes(conninfo: str, rounds: int) -> Iterator[Measure]:
    with (
        schema(conninfo) as name,
        _running(conninfo, name, 3) as nodes,
        psycopg.connect(conninfo, autocommit=True) as connection,
    ):
        counted = Server(connection)
        names = [[f"node {n}:{k}" for k in range(CONVERSATIONS)] for n in range(3)]

        def spent(parts: Mapping[int, Sequence[str]], what: str = "turns") -> tuple[Spent, float]:
            """Let nodes do this side by side; return the cost of each, and the server's part."""
            count = EACH * sum(map(len, parts.values()))
            before = sum(node.do("rest")["cpu_s"] for node in nodes)
            server_before, began = counted.cpu_s, perf_counter()
            for n, some in parts.items():
                nodes[n].begin(what, names=some, each=EACH)
            for n in parts:
                nodes[n].end()
            clock, of_server = perf_counter() - began, counted.cpu_s - server_before
            of_nodes = sum(node.do("rest")["cpu_s"] for node in nodes) - before
            each = Spent(clock / count * US, (of_nodes + of_server) / count * US)
            return each, of_server / count * US

        def own(many: int) -> Mapping[int, Sequence[str]]:
            return {n: names[n] for n in range(many)}

        def asked(elsewhere: float) -> Mapping[int, Sequence[str]]:
            """Let the first node ask for a share of the conversations that the second one owns."""
            away = round(CONVERSATIONS * elsewhere)
            return {0: [*names[1][:away], *names[0][away:]]}

        say("nodes: conversations that each node owns")
        for n in range(3):
            nodes[n].do("turns", names=names[n], each=1)
        say("nodes: one, two and three")
        found: dict[str, list[Any]] = {}
        for _ in range(rounds):
            for key, value in (
                ("1", spent(own(1))),
                ("2", spent(own(2))),
                ("3", spent(own(3))),
                ("two thirds", spent(asked(2 / 3))),
                ("all", spent(asked(1))),
                ("command", spent(asked(0), "commands")),
                ("command elsewhere", spent(asked(1), "commands")),
            ):
                found.setdefault(key, []).append(value)

    def beside(name: str, key: str, base: str, baseline: str, goal: str) -> list[Measure]:
        pairs = [(mine[0], its[0]) for mine, its in zip(found[key], found[base], strict=True)]
        return by_both(name, pairs, baseline=baseline, goal=goal)

    yield from _only_cpu(beside("turns_2_nodes", "2", "1", "one node", "≤ 1.1"))
    yield from _only_cpu(beside("turns_3_nodes", "3", "1", "one node", "≤ 1.1"))
    yield from _only_cpu(beside("turns_hop_two_thirds", "two thirds", "1", "none hops", ""))
    yield from _only_cpu(beside("turns_hop_all", "all", "1", "none hops", ""))
    yield from _only_cpu(
        beside("commands_hop_all", "command elsewhere", "command", "none hops", "")
    )
    parts = [(of_server, mine.processor or 0.0) for mine, of_server in found["1"]]
    yield costlier("turn_server_cpu", parts, baseline="nodes and server", goal="")


def _only_cpu(measures: list[Measure]) -> Iterator[Measure]:
    """Set the goal for processor time only, since all nodes share this machine's cores."""
    for measure in measures:
        if not measure.name.endswith("_cpu"):
            yield replace(measure, goal="")
        else:
            yield measure


# --- what a turn leaves behind --------------------------------------------------------------------

TABLES = ("conversation", "event", "listing", "listing_recent", "node")


def _churn(conninfo: str, many: int) -> Iterator[Measure]:
    """Count rows and bytes of turns, in a separate schema, after the node has left."""
    say(f"nodes: rows and bytes of {many * 5:,} turns")
    with schema(conninfo) as name, psycopg.connect(conninfo, autocommit=True) as connection:
        with _running(conninfo, name, 1) as (node,):
            for table in TABLES:
                off = f"ALTER TABLE {name}.{table} SET (autovacuum_enabled = off)"
                connection.execute(off.encode())
            connection.execute("CHECKPOINT")
            names = [f"churn {n}" for n in range(many)]
            first = node.do("turns", names=names, each=1)["commits"]
            began_at, sizes = _wal(connection), _sizes(connection, name)
            alone = node.do("turns", names=["alone"], each=50)["commits"]
            grown = node.do("turns", names=names, each=4)["commits"]
            wal, grew = _wal(connection) - began_at, _sizes(connection, name) - sizes
            node.leave()
        turns = 50 + 4 * many
        rows = connection.execute(
            f"SELECT count(*), sum(length(payload)) FROM {name}.event".encode()  # noqa: S608
        ).fetchone()
        assert rows is not None
        stats = _table_stats(connection, name)
    whole = turns + many
    events, payload = rows[0] / whole, float(rows[1]) / whole

    def one(name: str, value: float, unit: str, baseline: str, base: float) -> Measure:
        return costlier(name, [(value, base)], baseline=baseline, goal="", unit=unit)

    yield one("turn_events", events, "rows", "a turn", 1.0)
    yield one("turn_commits_alone", (alone - first) / 50, "commits", "a turn", 1.0)
    yield one("turn_commits_many", (grown - alone) / (4 * many), "commits", "a turn", 1.0)
    yield one("turn_stored", grew / turns, "bytes", "the events' JSON", payload)
    yield one("turn_wal", wal / turns, "bytes", "the events' JSON", payload)
    for table in TABLES[:4]:
        _, updated, hot, dead = stats[table]
        if updated:
            hot_share = f"{table}_hot_updates"
            yield one(hot_share, hot / whole, "rows", "all of its updates", updated / whole)
        yield one(f"{table}_dead_rows", dead / whole, "rows", "a turn", 1.0)


def _wal(connection: Connection) -> int:
    row = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone()
    assert row is not None
    return int(row[0])


def _sizes(connection: Connection, name: str) -> int:
    row = connection.execute(
        "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c "
        "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relkind = 'r'",
        (name,),
    ).fetchone()
    assert row is not None
    return int(row[0])


def _table_stats(connection: Connection, name: str) -> Mapping[str, tuple[int, int, int, int]]:
    connection.execute("SELECT pg_stat_clear_snapshot()")
    rows = connection.execute(
        "SELECT relname, n_tup_ins, n_tup_upd, n_tup_hot_upd, n_dead_tup "
        "FROM pg_stat_user_tables WHERE schemaname = %s",
        (name,),
    )
    return {row[0]: row[1:] for row in rows}


# --- days under vacuum ----------------------------------------------------------------------------

RENEWALS = round(DAY_S / LEASE_S) * RENEWALS_PER_LEASE
"""Of one node in one day."""


def _days(conninfo: str, *, kept: int, days: int, renewals: int) -> Iterator[Measure]:
    """Run a table of conversations through several days, with PostgreSQL's own autovacuum.

    A day is that of `docs/scale.md`, scaled to the number of conversations here. A share of them is
    new, each with some turns, and as many are handed over and deleted; another node follows them,
    and the lease of a node is renewed. The days are short, so autovacuum checks once a second. That
    is a few times a day instead of 1,440 times, so each vacuum comes later than it would.
    """
    say(f"nodes: {days} days of {kept:,} conversations")
    each = kept // Load().kept_days
    with (
        schema(conninfo) as name,
        connect(conninfo, name) as connection,
        _vacuuming_often(connection),
    ):
        anyio.run(fill_schema, conninfo, name, kept)
        connection.execute("VACUUM (ANALYZE)")
        counted = Server(connection)
        dead: dict[str, list[float]] = {table: [0.0] for table in CHURNED}
        spent: list[float] = []
        renewal = {"node": -1, "address": "renewed", "lease_s": LEASE_S, "listens": False}
        with _running(conninfo, name, 2) as (node, reader):
            node.do("turns", names=["first"], each=1)
            for day in range(days):
                old = [name_of(number) for number in range(1 + day * each, 1 + (day + 1) * each)]
                new = [f"day {day}:{number}" for number in range(each)]
                node.do("turns", names=new, each=1)
                reader.do("follow", names=new)
                before, more = counted.cpu_s, Load().turns_each - 1
                node.do("turns", names=new, each=more)
                spent.append((counted.cpu_s - before) / (each * more) * US)
                reader.do("hand_over", names=old)
                node.do("delete", names=old)
                for _ in range(renewals // days):
                    connection.execute(RENEW, renewal)
                for table, (_, _, _, many) in _table_stats(connection, name).items():
                    if table in dead:
                        dead[table].append(float(many))
            reader.leave()
            node.leave()
        vacuums = _vacuums(connection, name)
        stats = _table_stats(connection, name)
        grown = {table: _size(connection, table) for table in (*CHURNED, "node")}
        living = {table: _count(connection, table) for table in CHURNED}
        connection.execute("VACUUM FULL")
        packed = {table: _size(connection, table) for table in grown}
    for table, most in dead.items():
        pair = (max(most), living[table])
        left = f"days_{table}_dead_rows"
        yield costlier(left, [pair], baseline="rows that live", goal="≤ 0.5", unit="rows")
        often = f"days_{table}_vacuums"
        count = vacuums[table] / days
        yield costlier(often, [(count, 1.0)], baseline="a day", goal="", unit="vacuums")
    for table, size in grown.items():
        pair = (size, packed[table])
        yield costlier(
            f"days_{table}_size", [pair], baseline="packed anew", goal="≤ 2.5", unit="bytes"
        )
    _, renewed, hot, _ = stats["node"]
    yield costlier(
        "days_renewals_hot", [(hot, renewed)], baseline="all renewals", goal="", unit="rows"
    )
    # The name of a deleted conversation stays, with its epoch.
    pair = (packed["conversation"] / living["conversation"], packed["listing"] / living["listing"])
    yield costlier("days_deleted", [pair], baseline="its row of lists", goal="", unit="bytes")
    yield costlier("days_turn_server_cpu", [(spent[-1], spent[0])], baseline="first day", goal="")


@contextmanager
def _vacuuming_often(connection: Connection) -> Iterator[None]:
    """Make autovacuum check each second; leave its other settings."""
    try:
        connection.execute("ALTER SYSTEM SET autovacuum_naptime = '1s'")
    except psycopg.errors.InsufficientPrivilege as error:
        raise PeerMissing("autovacuum of this server cannot be set") from error
    try:
        connection.execute("SELECT pg_reload_conf()")
        yield
    finally:
        connection.execute("ALTER SYSTEM RESET autovacuum_naptime")
        connection.execute("SELECT pg_reload_conf()")


def _vacuums(connection: Connection, name: str) -> Mapping[str, int]:
    rows = connection.execute(
        "SELECT relname, autovacuum_count FROM pg_stat_user_tables WHERE schemaname = %s", (name,)
    )
    return dict(rows.fetchall())


def _count(connection: Connection, table: str) -> float:
    row = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()  # noqa: S608
    assert row is not None
    return float(row[0])


def _size(connection: Connection, table: str) -> float:
    row = connection.execute("SELECT pg_total_relation_size(%s::regclass)", (table,)).fetchone()
    assert row is not None
    return float(row[0])


# --- writes ---------------------------------------------------------------------------------------


def _writes(conninfo: str, rounds: int) -> Iterator[Measure]:
    """Compare the server's time for an event with that for the same rows in a bare table."""
    say("nodes: what the server does for an event")
    with psycopg.connect(conninfo, autocommit=True) as connection:
        counted = Server(connection)
        connection.execute(
            "CREATE TABLE IF NOT EXISTS raw_event (log bigint, seq bigint, epoch bigint, "
            "event_id text, kind text, message_id text, mark bigint, payload bytea, "
            "PRIMARY KEY (log, seq))"
        )
        connection.execute("CREATE UNIQUE INDEX IF NOT EXISTS raw_id ON raw_event (event_id, log)")
        statement = (
            b"INSERT INTO raw_event SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], "
            b"%b::text[], %b::text[], %b::text[], %s::bigint[], %b::bytea[])"
        )

        def raw(many: int, each: int) -> tuple[float, float]:
            connection.execute("TRUNCATE raw_event")
            columns = [
                [list(column) for column in zip(*group, strict=True)]
                for group in raw_rows(many, each)
            ]
            before, began = counted.cpu_s, perf_counter()
            for group in columns:
                connection.execute(statement, group)
            took = perf_counter() - began
            return (counted.cpu_s - before) / (many * each) * US, took / (many * each) * US

        async def append(name: str, many: int, each: int) -> tuple[float, float]:
            async with PostgresJournal(conninfo, schema=name) as journal:
                await append_all(journal, many, 1)
                before = counted.cpu_s
                took = await append_all(journal, many, each)
                # `took` leaves out the first round, which the server counts.
                return (counted.cpu_s - before) / (many * (1 + each)) * US, took

        def ours(many: int, each: int) -> tuple[float, float]:
            with schema(conninfo) as name:
                return anyio.run(append, name, many, each)

        for many, each in ((1, 200), (100, 20)):
            pairs = [(ours(many, each), raw(many, each)) for _ in range(rounds + 1)][1:]
            baseline = f"raw array insert, {many} a commit"
            cpu = [(mine[0], base[0]) for mine, base in pairs]
            yield costlier(f"event_server_cpu_{many}", cpu, baseline=baseline, goal="")
            clock = [(mine[1], base[1]) for mine, base in pairs]
            yield faster(f"event_{many}", clock, baseline=baseline, goal="")
        connection.execute("DROP TABLE raw_event")


# --- notifications --------------------------------------------------------------------------------


def _notices(conninfo: str, rounds: int) -> Iterator[Measure]:
    say("nodes: notifications, and who listens")
    payload = payload_of({mark_of("c")})
    with ExitStack() as stack:

        def link() -> Connection:
            return stack.enter_context(closing(psycopg.connect(conninfo, autocommit=True)))

        writers = [link() for _ in range(WRITERS)]
        counted = Server(writers[0])
        writers[0].execute("CREATE TABLE IF NOT EXISTS noticed (said text)")
        stack.callback(writers[0].execute, "DROP TABLE noticed")
        plain = "INSERT INTO noticed VALUES (repeat('x', 740))"
        within = f"WITH new AS ({plain}) SELECT pg_notify('{CHANNEL}', '{payload}')"
        notify = f"SELECT pg_notify('{CHANNEL}', '{payload}')"

        def commits(statement: str, each: int = 100) -> float:
            """Commit by all writers at once; return the time for each commit, in microseconds."""

            def write(connection: Connection) -> None:
                for _ in range(each):
                    connection.execute(statement.encode())

            began = perf_counter()
            with ThreadPoolExecutor(WRITERS) as pool:
                list(pool.map(write, writers))
            return (perf_counter() - began) / (each * WRITERS) * US

        stop = threading.Event()
        listening: list[Connection] = []

        def drain() -> None:
            while not stop.is_set():
                for connection in listening:
                    for _ in connection.notifies(timeout=0):
                        pass
                sleep(0.02)

        first = link()
        first.execute(f"LISTEN {CHANNEL}".encode())
        listening.append(first)
        drainer = threading.Thread(target=drain)
        drainer.start()
        try:
            pairs = []
            for _ in range(rounds + 1):
                behind, bare, inside = commits(plain), commits(plain), commits(within)
                pairs.append(((behind + bare) / 2, inside))
            baseline = f"each of {WRITERS} writers' commits notifies"
            yield faster(f"commits_of_{WRITERS}_writers", pairs[1:], baseline=baseline, goal="")

            def notices() -> float:
                before = counted.cpu_s
                for _ in range(200):
                    writers[0].execute(notify.encode())
                return (counted.cpu_s - before) / 200 * US

            costs: dict[int, list[float]] = {}
            for many in (1, 10, 50):
                for _ in range(many - len(listening)):
                    connection = link()
                    connection.execute(f"LISTEN {CHANNEL}".encode())
                    listening.append(connection)
                costs[many] = [notices() for _ in range(rounds)]
            for many in (10, 50):
                pairs = list(zip(costs[many], costs[1], strict=True))
                yield costlier(f"notice_to_{many}", pairs, baseline="to one", goal="")
        finally:
            stop.set()
            drainer.join()


# --- readers --------------------------------------------------------------------------------------


def _readers(conninfo: str, idle: int, rounds: int) -> Iterator[Measure]:
    """Let one node follow 1,000 of 100,000 idle conversations while another one writes."""
    say(f"nodes: {READERS:,} readers among {idle:,} idle conversations")
    with schema(conninfo) as name, connect(conninfo, name) as connection:
        anyio.run(fill_schema, conninfo, name, idle)
        counted = Server(connection)
        busy = [f"busy {n}" for n in range(CONVERSATIONS)]
        with _running(conninfo, name, 2) as (writer, reader):
            writer.do("turns", names=busy, each=1)

            def whole_cpu_s() -> float:
                of_nodes = sum(float(node.do("rest")["cpu_s"]) for node in (writer, reader))
                return of_nodes + counted.cpu_s

            def spent() -> float:
                """Return the cost of a turn on both nodes and the server together."""
                before = whole_cpu_s()
                writer.do("turns", names=busy, each=READ_EACH)
                return (whole_cpu_s() - before) / (len(busy) * READ_EACH) * US

            def wal_of(names: Sequence[str]) -> float:
                before = _wal(connection)
                writer.do("turns", names=names, each=1)
                return (_wal(connection) - before) / len(names)

            warm = wal_of(busy)
            # Each of these is the first to change its pages since the checkpoint.
            connection.execute("CHECKPOINT")
            cold = wal_of([name_of(number) for number in range(1, idle, idle // COLD)])

            without = [spent() for _ in range(rounds)]
            reader.do("follow", names=[name_of(number) for number in range(1, READERS + 1)])
            writer.do("turns", names=busy, each=EACH)
            connection.execute(f"LISTEN {CHANNEL}".encode())
            commits, rows = writer.do("rest")["commits"], reader.do("rest")["rows"]
            during = [spent() for _ in range(rounds)]
            commits = writer.do("rest")["commits"] - commits
            rows = reader.do("rest")["rows"] - rows
            heard = [notice.payload for notice in connection.notifies(timeout=0)]
    # The readers cannot leave again, so the rounds do not alternate: the cheapest is beside the
    # cheapest of the others, and so on.
    pairs = list(zip(sorted(during), sorted(without), strict=True))
    yield costlier(
        f"turn_beside_{READERS}_readers_cpu", pairs, baseline="none reads", goal="≤ 1.25"
    )
    facts = (
        ("notices", len(heard), "notices", "commits", commits, "≤ 1"),
        ("notice_payload", sum(map(len, heard)) / len(heard), "bytes", "the most", 8_000, "≤ 1"),
        ("rows_looked_at", rows, "rows", "all, each commit", READERS * commits, "≤ 0.1"),
        ("turn_wal_cold", cold, "bytes", "in pages changed before", warm, ""),
    )
    for each, value, unit, baseline, base, goal in facts:
        yield costlier(each, [(value, base)], baseline=baseline, goal=goal, unit=unit)
