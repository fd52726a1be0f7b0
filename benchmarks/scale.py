# ruff: noqa: RUF001 - the sign of multiplication is meant
"""The needs of 10 million conversations a day, computed from the figures of the group `nodes`.

    python benchmarks/scale.py

Reads `benchmarks/results/nodes.json`, which a run of the group writes, and writes the computed part
of `docs/scale.md`. A run of the group does so too. A test compares the page with the computation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnkeeper.actors.journals.postgres.presence import RENEWALS_PER_LEASE, told_every_s

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "benchmarks" / "results" / "nodes.json"
PAGE = ROOT / "docs" / "scale.md"
BEGIN = "<!-- computed by benchmarks/scale.py: begin -->"
END = "<!-- computed by benchmarks/scale.py: end -->"

DAY_S = 86_400
CHURNED = ("conversation", "listing", "event")
"""The tables that a turn changes."""
CONNECTIONS_A_NODE = 3
"""The connections of the writer, the reader, and the lease; a search index has one more."""
LEASE_S = 15
LISTENERS_MAX = 50
"""The number of listeners with which the cost of a notification was measured."""
XIDS_BEFORE_FREEZE = 200_000_000
"""PostgreSQL's `autovacuum_freeze_max_age`."""
VACUUM_SHARE = 0.2
"""PostgreSQL's `autovacuum_vacuum_scale_factor`."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load to carry."""

    conversations_a_day: int = 10_000_000
    turns_each: int = 5
    peak: float = 3.0
    """How many times the mean the busiest hour is."""
    turn_s: float = 10.0
    """How long a turn runs, which is the time of its model calls."""
    kept_days: int = 30


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines that carry the load."""

    cores_of_database: int = 32
    disk_bytes: float = 16e12
    log_bytes_a_s: float = 500e6
    """How fast the disk writes the write-ahead log."""
    flush_s: float = 0.001
    """How long a commit waits for the disk."""
    busy_share: float = 0.5
    """The planned share of a core, which leaves room for peaks within the busiest hour."""
    connections: int = 500


@dataclass(frozen=True, slots=True)
class Turn:
    """The measured costs of a turn of two model calls and a tool."""

    node_us: float
    node_hop_us: float
    """The same with all commands forwarded, by both nodes."""
    server_us: float
    events: float
    commits_alone: float
    """The commits of a turn that runs alone, so that it shares none with other turns."""
    stored_bytes: float
    log_bytes: float
    log_cold_bytes: float
    """The same in pages unchanged since the last checkpoint: each is logged as a whole."""
    dead_conversation: float
    dead_listing: float
    notice_bytes: float
    notice_to_50_us: float
    deleted_bytes: float
    """The bytes that a deleted conversation leaves: its name and its epoch."""


def turn_of(figures: Mapping[str, Mapping[str, float]]) -> Turn:
    """Return the costs of a turn, from the figures of a run of the group `nodes`."""

    def value(name: str) -> float:
        return figures[name]["value"]

    server, whole = value("turn_server_cpu"), figures["turn_server_cpu"]["baseline_value"]
    node = whole - server
    return Turn(
        node_us=node,
        node_hop_us=node * figures["turns_hop_all_cpu"]["ratio"],
        server_us=server,
        events=value("turn_events"),
        commits_alone=value("turn_commits_alone"),
        stored_bytes=value("turn_stored"),
        log_bytes=value("turn_wal"),
        log_cold_bytes=value("turn_wal_cold"),
        dead_conversation=value("conversation_dead_rows"),
        dead_listing=value("listing_dead_rows"),
        notice_bytes=value("notice_payload"),
        notice_to_50_us=value("notice_to_50"),
        deleted_bytes=value("days_deleted"),
    )


@dataclass(frozen=True, slots=True)
class Need:
    """One resource that the load needs: the formula, the amount, and the amount there is."""

    what: str
    how: str
    needs: str
    has: str = ""
    share: float | None = None


def needs(load: Load, machines: Machines, turn: Turn) -> list[Need]:
    """Return the needs of the load, in the order of the page."""
    turns_a_day = load.conversations_a_day * load.turns_each
    peak = turns_a_day / DAY_S * load.peak
    running = peak * load.turn_s
    busy = machines.busy_share
    nodes_alone = _nodes(peak * turn.node_us / 1e6, machines)
    nodes = _nodes(peak * turn.node_hop_us / 1e6, machines)
    server_cores = peak * turn.server_us / 1e6 / busy
    disk_a_day = turns_a_day * turn.stored_bytes
    log_peak = peak * turn.log_cold_bytes
    flushes = nodes / machines.flush_s
    commits = min(peak * turn.commits_alone, flushes)
    xids_a_day = min(turns_a_day * turn.commits_alone, flushes * DAY_S)
    kept = load.conversations_a_day * load.kept_days
    dead_a_day = turns_a_day * max(turn.dead_conversation, turn.dead_listing)
    notices = nodes / told_every_s(nodes)
    notice_us = turn.notice_to_50_us * nodes / LISTENERS_MAX
    notice_cores = notices * notice_us / 1e6 / busy
    connections = nodes * (CONNECTIONS_A_NODE + 1)
    renewals = nodes * RENEWALS_PER_LEASE / LEASE_S
    return [
        Need(
            "turns at the peak",
            f"{load.conversations_a_day:,} × {load.turns_each} turns ÷ {DAY_S:,} s × {load.peak:g}",
            f"{peak:,.0f} a second",
        ),
        Need(
            "turns that run at once",
            f"{peak:,.0f} a second × {load.turn_s:g} s",
            f"{running:,.0f}",
        ),
        Need(
            "nodes, no command hops",
            f"{peak:,.0f} × {turn.node_us:,.0f} µs ÷ {busy:.0%} of a core",
            f"{nodes_alone:,} processes of one core",
        ),
        Need(
            "nodes, every command hops",
            f"{peak:,.0f} × {turn.node_hop_us:,.0f} µs ÷ {busy:.0%} of a core",
            f"{nodes:,} processes of one core",
        ),
        Need(
            "the database's cores",
            f"{peak:,.0f} × {turn.server_us:,.0f} µs ÷ {busy:.0%} of a core",
            f"{server_cores:,.1f} cores",
            f"{machines.cores_of_database} cores",
            server_cores / machines.cores_of_database,
        ),
        Need(
            "events at the peak",
            f"{peak:,.0f} × {turn.events:.1f} events",
            f"{peak * turn.events:,.0f} a second",
        ),
        Need(
            "commits at the peak",
            f"{peak:,.0f} × {turn.commits_alone:.1f}, none shared; at most one at a time a node",
            f"{commits:,.0f} a second",
            f"{flushes:,.0f} a second: {nodes} nodes, {machines.flush_s * 1e3:g} ms each",
        ),
        Need(
            "the disk, for what is kept",
            f"{turns_a_day:,.0f} turns a day × {turn.stored_bytes:,.0f} bytes × "
            f"{load.kept_days} days",
            _bytes(disk_a_day * load.kept_days),
            _bytes(machines.disk_bytes),
            disk_a_day * load.kept_days / machines.disk_bytes,
        ),
        Need(
            "the names of deleted conversations",
            f"{load.conversations_a_day:,} a day × {turn.deleted_bytes:,.0f} bytes × 365 days",
            f"{_bytes(load.conversations_a_day * turn.deleted_bytes * 365)} a year",
        ),
        Need(
            "the write-ahead log at the peak",
            f"{peak:,.0f} × {turn.log_cold_bytes:,.0f} bytes, all pages cold "
            f"({turn.log_bytes:,.0f} if none is)",
            f"{_bytes(log_peak)} a second",
            f"{_bytes(machines.log_bytes_a_s)} a second",
            log_peak / machines.log_bytes_a_s,
        ),
        Need(
            "dead rows of one table",
            f"{turns_a_day:,.0f} turns × {max(turn.dead_conversation, turn.dead_listing):.1f} rows",
            f"{dead_a_day / 1e6:,.0f} million a day",
        ),
        Need(
            "vacuums of that table",
            f"{dead_a_day / 1e6:,.0f} million ÷ {VACUUM_SHARE:.0%} of {kept / 1e6:,.0f} million",
            f"{dead_a_day / (VACUUM_SHARE * kept):,.1f} a day",
        ),
        Need(
            "transaction ids",
            f"{turns_a_day:,.0f} turns × {turn.commits_alone:.1f} commits, none shared",
            f"{xids_a_day / 1e6:,.0f} million a day: a freeze every "
            f"{XIDS_BEFORE_FREEZE / xids_a_day * 24:,.0f} hours",
        ),
        Need(
            "notifications",
            f"{notices:,.0f} a second at most × {notice_us:,.0f} µs to {nodes} nodes ÷ {busy:.0%}",
            f"{notice_cores:,.1f} cores of the database",
            f"{machines.cores_of_database} cores",
            notice_cores / machines.cores_of_database,
        ),
        Need(
            "renewals of leases",
            f"{nodes} nodes × {RENEWALS_PER_LEASE} ÷ {LEASE_S} s",
            f"{renewals:,.1f} a second",
        ),
        Need(
            "connections",
            f"{nodes} nodes × {CONNECTIONS_A_NODE + 1}, with search",
            f"{connections:,}",
            f"{machines.connections}",
            connections / machines.connections,
        ),
    ]


def _nodes(core_s_a_s: float, machines: Machines) -> int:
    """Return the number of processes; each has one event loop, which is one core."""
    return max(1, -int(-core_s_a_s / machines.busy_share // 1))


def _bytes(many: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if many < 1_000:
            return f"{many:,.0f} {unit}"
        many /= 1_000
    return f"{many:,.1f} TB"


def first_to_break(found: Iterable[Need]) -> Sequence[Need]:
    """Return the needs that have a bound, the fullest first."""
    bounded = [need for need in found if need.share is not None]
    return sorted(bounded, key=lambda need: -(need.share or 0.0))


def computed(figures: Mapping[str, Mapping[str, float]], conditions: str) -> str:
    """Return the computed part of the page."""
    load, machines, turn = Load(), Machines(), turn_of(figures)
    found = needs(load, machines, turn)
    order = first_to_break(found)
    first = order[0]
    assert first.share is not None
    lines = [
        BEGIN,
        f"Measured: {conditions}",
        "",
        "| a turn costs | |",
        "|---|---:|",
        f"| a core of its node | {turn.node_us:,.0f} µs |",
        f"| the same, every command forwarded | {turn.node_hop_us:,.0f} µs |",
        f"| a core of the database | {turn.server_us:,.0f} µs |",
        f"| events | {turn.events:.1f} |",
        f"| commits, if it shares none | {turn.commits_alone:.1f} |",
        f"| bytes on the disk, with all indexes | {turn.stored_bytes:,.0f} |",
        f"| bytes of the write-ahead log, its pages cold | {turn.log_cold_bytes:,.0f} |",
        f"| the same, its pages changed before | {turn.log_bytes:,.0f} |",
        f"| dead rows of `conversation` | {turn.dead_conversation:.1f} |",
        f"| dead rows of `listing` | {turn.dead_listing:.1f} |",
        "",
        "| for the load | computed as | needs | of | share |",
        "|---|---|---:|---:|---:|",
        *(
            f"| {need.what} | {need.how} | {need.needs} | {need.has} | "
            f"{'' if need.share is None else f'{need.share:.0%}'} |"
            for need in found
        ),
        "",
        f"**What breaks first: {first.what}**, at {1 / first.share:,.1f} times this load. "
        "Then, in this order: "
        + "; ".join(f"{need.what} ({1 / (need.share or 1):,.0f} times)" for need in order[1:])
        + ".",
        "",
        *_vacuumed(figures),
        END,
    ]
    return "\n".join(lines)


def _vacuumed(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the table of what days of this load leave behind, with PostgreSQL's own autovacuum."""
    head = "dead rows at a day's end, as a share of live rows"
    lines = [
        f"| after days of this load | {head} | vacuums a day | size, compared with new tables |",
        "|---|---:|---:|---:|",
    ]
    for table in CHURNED:
        dead, often, size = (
            figures[f"days_{table}_{what}"] for what in ("dead_rows", "vacuums", "size")
        )
        shares = f"{dead['ratio']:.0%} | {often['value']:.1f} | {size['ratio']:.1f} times"
        lines.append(f"| `{table}` | {shares} |")
    node, renewals = figures["days_node_size"], figures["days_renewals_hot"]
    in_place = f"{renewals['ratio']:.0%} of {renewals['baseline_value']:,.0f} renewals in place"
    lines.append(f"| `node` | {in_place} | | {_bytes(node['value'])} |")
    return lines


def page_with(page: str, part: str) -> str:
    """Return the page with its computed part replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + part + after


def write_figures(figures: Mapping[str, Mapping[str, object]], conditions: str) -> None:
    """Keep the figures of a run, and compute the page anew."""
    FIGURES.write_text(
        json.dumps({"conditions": conditions, "figures": figures}, indent=1, ensure_ascii=False)
        + "\n"
    )
    write_page()


def write_page() -> None:
    PAGE.write_text(page_with(PAGE.read_text(), part_of_page()))


def part_of_page() -> str:
    """Return the computed part, from the figures that are kept."""
    kept = json.loads(FIGURES.read_text())
    return computed(kept["figures"], kept["conditions"])


if __name__ == "__main__":
    write_page()
    sys.exit(0)
