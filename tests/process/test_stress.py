"""`turnkeeper stress` with real processes: that it holds, and that it can fail."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.drawn import drawn
from turnkeeper.actors.cli import _app, _replay, _stress, _stress_report, _stress_run
from turnkeeper.actors.cli._stress_run import Stress

from .command import COMMAND
from .stressing import database

pytestmark = [pytest.mark.costly, pytest.mark.in_parts(4)]

BROKEN_WORKER = Path(__file__).parent / "broken_worker.py"
BREACHES = ("lost", "duplicated", "out_of_order", "views_diverged")
TURNS_BEFORE_A_KILL = 20
SMALL = ("--conversations", "20", "--duration", "1", "--rate", "60", "--seed", "1")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(_app.app, ["stress", *map(str, arguments)])


def report_of(result: Result) -> dict[str, Any]:
    """The one object on the standard output."""
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Workers of the kind that the test is parametrized with."""
    kind: str = request.param
    worker = (sys.executable, "-P", str(BROKEN_WORKER), kind)
    monkeypatch.setattr(_stress, "STRESS_WORKER", worker)
    return kind


# --- that it holds -------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux has it")
def test_a_workers_memory_is_not_that_of_its_parent() -> None:
    child = "from turnkeeper.actors.cli.stress_worker import memory_max; print(memory_max())"
    parent = (
        "import subprocess, sys\n"
        "large = b'x' * (400 << 20)\n"
        f"subprocess.run([sys.executable, '-P', '-c', {child!r}], check=True)"
    )

    done = subprocess.run(
        [sys.executable, "-P", "-c", parent], capture_output=True, text=True, check=True
    )

    assert 10_000_000 < int(done.stdout) < 400 << 20


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_everything_acknowledged_is_found_once_and_in_order_after_kills(
    tmp_path: Path, backend: str
) -> None:
    page = tmp_path / "page.html"
    options = ["--overlap", "0.5", "--kills", "2", "--backend", backend, "--report", str(page)]

    result = run(*SMALL, *options, "--db", tmp_path / "chats.db", "--json")

    report = report_of(result)
    assert report["broken"] == []
    assert (result.exit_code, report["ok"], report["kills"]) == (0, True, 2)
    assert [report[breach] for breach in BREACHES] == [0, 0, 0, 0]
    assert report["conversations"] == 20
    assert report["acknowledged"] == report["found"] > report["sent"] > 0
    assert report["calls"] == report["calls_answered_once"] > 0
    assert report["overlapped"] > 0
    assert report["rejected"] > 0
    assert report["interrupted"] > 0
    assert report["views_checked"] > report["conversations"]
    assert list(report["latency_ms"]) == ["p50", "p90", "p99", "max"]
    assert list(report["latency_ms"].values()) == sorted(report["latency_ms"].values())
    assert report["events_per_second"] > 0
    assert len(report["recovery_s"]) == 2
    assert report["worker_memory_max"] > 10_000_000
    assert list(report["loop_late_ms"].values()) == sorted(report["loop_late_ms"].values())
    assert sum(report["loop_late_histogram"].values()) > 0
    html = page.read_text()
    assert "Everything acknowledged is there, once and in order." in html
    assert html.count("<svg") == 1
    assert "worker killed" in html


def test_the_same_on_postgresql_in_eighty_columns() -> None:
    with database() as url:
        result = run(*SMALL, "--kills", "1", "--db", url)
        again = run(*SMALL, "--kills", "0", "--db", url)

    assert (result.exit_code, again.exit_code) == (0, 0), result.output
    assert "Everything acknowledged is there, once and in order." in result.stdout
    assert "worker killed (SIGKILL, 1 of 1)" in result.stderr
    assert "ready again" in result.stderr
    assert re.search(r"\d+ s: \d+ chat messages, \d+/s, p50 ", result.stderr)
    assert max(map(len, result.output.splitlines())) <= 80


def test_ctrl_c_accounts_for_what_was_acknowledged_until_then(tmp_path: Path) -> None:
    options = ["--conversations", "20", "--duration", "20", "--rate", "50", "--kills", "0"]
    command = [*COMMAND, "stress", *options, "--json", "--db", str(tmp_path / "chats.db")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "chat messages" not in process.stderr.readline():
            pass

        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()

    report = json.loads(stdout)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert (report["ok"], report["stopped"]) == (False, "stopped by Ctrl-C")
    assert report["broken"] == []
    assert report["acknowledged"] == report["found"] > 0


# --- that it can fail ----------------------------------------------------------------------------


class KillsAfterTurns(Stress):
    """Kills the worker once so many turns have ended, however long that takes."""

    def _is_kill_due(self, at: float, now: float) -> bool:
        return self.crowd.ended >= TURNS_BEFORE_A_KILL * (self.kills + 1)


class PatientAtFirst(Stress):
    """Counts the silence of a worker from when it is ready: a busy machine starts it slowly."""

    def _check_it_moves(self) -> None:
        if not self._is_ready:
            self._heard_at = self.ports.monotonic()
        Stress._check_it_moves(self)


@pytest.mark.parametrize("broken", ["stress-eager"], indirect=True)
def test_a_journal_that_acknowledges_what_is_not_durable_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Each kill falls where something acknowledged is still in memory: turns that have ended."""
    monkeypatch.setattr(_stress, "Stress", KillsAfterTurns)
    page = tmp_path / "page.html"

    result = run(*SMALL, "--kills", "2", "--json", "--report", page)

    report = report_of(result)
    assert (result.exit_code, report["ok"], report["kills"]) == (1, False, 2)
    assert report["lost"] >= TURNS_BEFORE_A_KILL
    assert report["acknowledged"] == report["found"] + report["lost"]
    assert "NOT as promised" in page.read_text()


@pytest.mark.parametrize("broken", ["stress-repeating"], indirect=True)
def test_a_journal_that_writes_twice_is_found_out(broken: str) -> None:
    result = run(*SMALL, "--kills", "0")

    assert result.exit_code == 1
    assert "NOT as promised" in result.stdout
    assert re.search(r"message \d+ is at seq \d+ and at seq", result.stdout)


@pytest.mark.parametrize("broken", ["stress-mortal"], indirect=True)
def test_a_worker_that_dies_by_itself_fails_the_run(broken: str) -> None:
    result = run(*SMALL, "--kills", "0", "--json")

    report = report_of(result)
    assert result.exit_code == 1
    assert report["stopped"].startswith("the worker ended by itself with status -9")
    assert (report["ok"], report["broken"]) == (False, [])
    assert report["acknowledged"] == report["found"] > 0


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("broken", "told"),
    drawn(
        [
            ("stress-stuck", "nothing has happened for 4 s; "),
            ("stress-mute", "the worker has said nothing for 4 s"),
        ],
        1,
    ),
    indirect=["broken"],
)
def test_a_worker_in_which_nothing_goes_on_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, broken: str, told: str
) -> None:
    monkeypatch.setattr(_stress_run, "SILENCE_S_MAX", 4.0)
    monkeypatch.setattr(_replay, "STOP_GRACE_S", 1.0)
    monkeypatch.setattr(_stress, "Stress", PatientAtFirst)

    result = run(*SMALL, "--kills", "0", "--json")

    report = report_of(result)
    assert result.exit_code == 1
    assert report["stopped"].startswith(told)
    assert (report["ok"], report["broken"]) == (False, [])


# --- what cannot be meant ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--db", "no/such/x.db"], "no/such/x.db cannot be written: there is no folder no/such"),
        (["--db", "."], ". cannot be written: it is not a regular file"),
        (["--db", "dbname=chats password=x"], "a database is named by its URL"),
        (["--db", "pgsql://me:secret@h/d"], "a URL takes the form postgresql://"),
        (["--report", "no/such/x.html"], "no/such/x.html cannot be written: there is no folder"),
        (["--overlap", "1.5"], "--overlap"),
        (["--backend", "twisted"], "--backend"),
        (["--rate", "0"], "--rate"),
    ],
)
def test_an_option_that_cannot_be_meant_is_told_before_anything_runs(
    options: Sequence[str], told: str
) -> None:
    result = run(*options)

    assert result.exit_code == 2
    assert told in result.stderr
    assert "secret" not in result.stderr
    assert result.stdout == ""


def test_a_file_that_is_no_journal_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """The worker had to fail first, with the status of a broken promise."""
    other = tmp_path / "notes.txt"
    other.write_text("not a journal")

    result = run("--db", other)

    assert result.exit_code == 2
    assert result.stderr.startswith(f"turnkeeper: {other} cannot be opened: it is not a turnkeeper")


@pytest.mark.parametrize(
    ("missing", "where", "options", "told"),
    [
        ("matplotlib", _stress_report, ["--report", "x.html"], "'turnkeeper[report]'"),
        ("trio", _stress, ["--backend", "trio"], "pip install trio"),
        ("psycopg", _stress, ["--db", "postgresql://h/d"], "'turnkeeper[postgres]'"),
    ],
)
def test_what_is_not_installed_is_told_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    where: object,
    options: Sequence[str],
    told: str,
) -> None:
    monkeypatch.setattr(
        where, "find_spec", lambda name: None if name == missing else find_spec(name)
    )

    result = run(*options)

    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stdout == ""


@pytest.fixture(scope="module", autouse=True)
def _no_threads_of_pyplot() -> Iterator[None]:
    """The page is drawn without pyplot, which would open windows."""
    yield
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.slow
def test_ten_thousand_conversations_survive_kills(tmp_path: Path) -> None:
    options = ["--conversations", "10000", "--duration", "60", "--rate", "250", "--kills", "3"]

    report = report_of(run(*options, "--db", tmp_path / "chats.db", "--json"))

    assert report["broken"] == []
    assert (report["ok"], report["conversations"], report["kills"]) == (True, 10_000, 3)
