"""`docs/scale.md` says what its figures come to, and rests on facts that are checked here."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import anyio
import psycopg
import pytest

from benchmarks import scale
from benchmarks._baselines import describe
from benchmarks.scale import Load, Machines, Turn, first_to_break, needs
from tests import postgres
from turnkeeper.actors import PostgresJournal

KEPT = json.loads(scale.FIGURES.read_text())
TURN = Turn(
    node_us=4_000.0,
    node_hop_us=8_000.0,
    server_us=500.0,
    events=8.0,
    commits_alone=4.0,
    stored_bytes=5_000.0,
    log_bytes=9_000.0,
    log_cold_bytes=30_000.0,
    dead_conversation=2.2,
    dead_listing=1.8,
    notice_bytes=50.0,
    notice_to_50_us=1_000.0,
    deleted_bytes=300.0,
)
DAY = Load(conversations_a_day=86_400, turns_each=10, peak=2.0, turn_s=5.0, kept_days=10)


def needed(load: Load = DAY, machines: Machines = Machines(), turn: Turn = TURN) -> dict[str, str]:
    return {need.what: need.needs for need in needs(load, machines, turn)}


def test_the_page_is_what_the_figures_of_the_last_run_come_to() -> None:
    page = scale.PAGE.read_text()
    assert scale.page_with(page, scale.part_of_page()) == page
    assert page.count(scale.BEGIN) == page.count(scale.END) == 1


def test_each_figure_is_described_where_it_is_told() -> None:
    for name in KEPT["figures"]:
        what, baseline = describe("nodes", name)
        assert what, name
        assert baseline is not None, name


def test_the_arithmetic_on_paper() -> None:
    """86,400 conversations a day are one a second, and 10 turns; 20 at the peak."""
    found = needed()
    assert found["turns at the peak"] == "20 a second"
    assert found["turns that run at once"] == "100"
    assert found["events at the peak"] == "160 a second"
    assert found["commits at the peak"] == "80 a second"
    assert found["the names of deleted conversations"] == "9 GB a year"
    # 20 turns of 4 ms, and of 8 ms, with cores that are half busy.
    assert found["nodes, no command hops"] == "1 processes of one core"
    assert found["nodes, every command hops"] == "1 processes of one core"
    ten = replace(DAY, conversations_a_day=864_000)
    assert needed(ten)["nodes, no command hops"] == "2 processes of one core"
    assert needed(ten)["nodes, every command hops"] == "4 processes of one core"
    assert found["the disk, for what is kept"] == "43 GB"
    assert found["the write-ahead log at the peak"] == "600 KB a second"
    assert needed(ten)["the database's cores"] == "0.2 cores"


def test_what_days_of_the_load_leave_behind_is_told_for_each_table() -> None:
    figures = {name: dict(figure) for name, figure in KEPT["figures"].items()}
    figures["days_listing_dead_rows"]["ratio"] = 0.37
    figures["days_listing_vacuums"]["value"] = 2.5
    figures["days_listing_size"]["ratio"] = 1.84
    page = scale.computed(figures, "here")
    assert "| `listing` | 37% | 2.5 | 1.8 times |" in page
    assert all(f"| `{table}` |" in page for table in (*scale.CHURNED, "node"))


def test_what_breaks_first_is_the_fullest_of_what_has_a_bound() -> None:
    load = Load()
    order = first_to_break(needs(load, Machines(), TURN))
    shares = [need.share or 0.0 for need in order]
    assert shares == sorted(shares, reverse=True)
    small_disk = replace(Machines(), disk_bytes=1e12)
    first = first_to_break(needs(load, small_disk, TURN))[0]
    assert first.what == "the disk, for what is kept"
    few = replace(Machines(), cores_of_database=1)
    assert first_to_break(needs(load, few, TURN))[0].what != first.what
    assert first.what in scale.computed(KEPT["figures"], "here")


def test_notifications_grow_with_the_nodes_and_not_with_their_square() -> None:
    """However many there are, each hears at most 1,000 a second."""

    def cores(times: int) -> float:
        load = replace(Load(), conversations_a_day=10_000_000 * times)
        (need,) = (n for n in needs(load, Machines(), TURN) if n.what == "notifications")
        return float(need.needs.split()[0])

    assert cores(10) <= 1.1 * 10 * cores(1)


@pytest.mark.anyio
async def test_a_node_has_as_many_connections_as_the_page_says() -> None:
    """However many conversations it owns and follows; one more for an index of words."""
    with (
        postgres.schema() as schema,
        psycopg.connect(postgres.conninfo(), autocommit=True) as other,
    ):

        def count() -> int:
            row = other.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", (schema,)
            ).fetchone()
            assert row is not None
            return int(row[0])

        async def until(wanted: int) -> None:
            with anyio.fail_after(30):
                while count() != wanted:  # noqa: ASYNC110 - of another program
                    await anyio.sleep(0.01)

        conninfo = psycopg.conninfo.make_conninfo(postgres.conninfo(), application_name=schema)
        for search, wanted in ((False, 0), (True, 1)):
            async with PostgresJournal(conninfo, schema=schema, search=search) as journal:
                async with anyio.create_task_group() as group:
                    for number in range(50):
                        group.start_soon(journal.claim, f"c{number}")
                async with anyio.create_task_group() as group:
                    for number in range(50):
                        group.start_soon(partial(journal.wait_for_more, f"c{number}", after=0))
                    await until(scale.CONNECTIONS_A_NODE + wanted)
                    group.cancel_scope.cancel()
            await until(0)
