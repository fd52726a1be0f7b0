"""A stress run is a table that is kept up to date on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import re
from io import StringIO
from random import Random

import pytest
from rich.console import Console

from turnkeeper.actors.cli._crowd import Crowd
from turnkeeper.actors.cli._protocol import StartStress
from turnkeeper.actors.cli._report import empty_report
from turnkeeper.actors.cli._stress_display import StressDisplay, print_stress_report
from turnkeeper.actors.cli._stress_report import StressReport, quantiles_ms
from turnkeeper.actors.cli._stress_run import Outage, Sample, Stress, plan_kills_at
from turnkeeper.runtime import Ports
from turnkeeper.runtime.lowlevel import Lateness


def play(display: StressDisplay, changes_per_s: int = 1) -> None:
    """Ten seconds with a kill in the middle, and then the check."""
    crowd = Crowd(["c"], senders=1, overlap=0.0, rate=1.0, duration_s=10.0, random=Random(1))
    stress = Stress(
        start=StartStress(db="x.db", is_own_journal=True, seed=1, pace_s=0.0, view_events_max=40),
        crowd=crowd,
        planned_kills=[5.0],
        ports=Ports(),
        changed=display.changed,
        worker=(),
    )
    with display:
        for second in range(11):
            stress.seconds = float(second)
            crowd.acknowledged, crowd.logged = 1_000 * second, 5_000 * second
            crowd.latencies.extend([0.002] * 1_000)
            stress.memory_max = 70_000_000
            stress.samples.append(
                Sample(
                    at=float(second),
                    acknowledged=crowd.acknowledged,
                    answered=len(crowd.latencies),
                    logged=crowd.logged,
                    waiting=12_345,
                    waiting_max=678,
                    memory_max=70_000_000,
                )
            )
            if second == 5:
                stress.outages.append(Outage(5.0))
            if second == 6:
                stress.outages[0].until = 6.0
            for change in range(changes_per_s):
                stress.seconds = second + change / changes_per_s
                display.changed(stress)
        for _ in range(100):
            display.checked()


def show(*, is_terminal: bool, duration_s: float = 10.0, changes_per_s: int = 1) -> str:
    out = StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=80, legacy_windows=False)
    play(StressDisplay(console, duration_s), changes_per_s)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


def test_elsewhere_than_on_a_terminal_what_happens_is_told_in_plain_lines() -> None:
    lines = show(is_terminal=False).splitlines()

    assert lines[1] == "2 s: 2,000 chat messages, 1,000/s, p50 2.0 ms, p99 2.0 ms"
    assert "5 s: worker killed (SIGKILL, 1 of 1), 0 turns open" in lines
    assert "6 s: ready again" in lines
    assert len(lines) == 12
    assert max(map(len, lines)) <= 80


def test_a_short_run_that_takes_longer_is_told_of_once_a_second() -> None:
    """A run of one second printed a line each 0.1 s, for as long as its queue lasted."""
    lines = show(is_terminal=False, duration_s=1.0, changes_per_s=10).splitlines()

    assert [line.partition(" ")[0] for line in lines if "messages" in line] == [
        str(second) for second in range(1, 11)
    ]


def test_on_a_terminal_a_table_is_kept_up_to_date() -> None:
    lines = show(is_terminal=True).splitlines()

    shown = "\n".join(lines)
    assert re.search(r"time +10 of 10 s", shown)
    assert "10,000 acknowledged, 1,000/s" in shown
    assert "p50 2.0, p90 2.0, p99 2.0, max 2.0" in shown
    assert "12,345 waiting, at most 678 in one" in shown
    assert re.search(r"memory +70 MB", shown)
    assert re.search(r"kills +1 of 1", shown)
    assert "checking: 100 conversations" in shown
    assert max(len(line.rstrip()) for line in lines) <= 80


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, {"p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}),
        (1, {"p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}),
        (101, {"p50": 51.0, "p90": 91.0, "p99": 100.0, "max": 101.0}),
    ],
)
def test_quantiles_are_values_that_were_measured(count: int, expected: dict[str, float]) -> None:
    seconds = [n / 1e3 for n in range(count, 0, -1)]

    assert dict(quantiles_ms(seconds)) == pytest.approx(expected)


def test_kills_are_spread_over_the_time() -> None:
    kills = plan_kills_at(5, 100.0, Random(1))

    assert [int(at // 20) for at in kills] == [0, 1, 2, 3, 4]
    assert plan_kills_at(0, 100.0, Random(1)) == []


def test_the_errors_after_which_messages_were_sent_again_are_told_with_their_numbers() -> None:
    out = StringIO()
    lateness = Lateness()
    for _ in range(98):
        lateness.record(0.002)
    lateness.add([0] * 6 + [1, 1] + [0] * 6, 0.2)
    report = StressReport(
        account=empty_report([]),
        options={},
        latencies=[0.001],
        samples=[],
        outages=[Outage(1.0, 2.5)],
        unserved={"OwnedElsewhere": 1_234, "JournalUnavailable": 1},
        memory_max=70_000_000,
        lateness=lateness,
    )

    print_stress_report(Console(file=out, width=80), report)

    told = out.getvalue()
    assert "sent again after: OwnedElsewhere 1,234, JournalUnavailable 1\n" in told
    assert "event loop late, in ms: p50 2.5, p90 2.5, p99 100.0, max 200.0\n" in told
    assert report.late_histogram["≤ 2.5 ms"] == 98
    assert "seconds from a kill until ready: 1.50\n" in told
    assert "memory of the worker: 70 MB at most\n" in told
