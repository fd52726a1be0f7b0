"""`turnkeeper simulate`: what it prints, what it leaves, and how it exits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from turnkeeper.actors.cli import _simulate
from turnkeeper.actors.cli._app import app
from turnkeeper.actors.simulation import Campaign, silent_logs

from .mutants import MUTANTS, planted

BEFORE_COMMIT = next(m for m in MUTANTS if m.name == "an answer goes out before the commit")


def test_a_clean_campaign_says_so_and_exits_with_zero() -> None:
    done = CliRunner().invoke(app, ["simulate", "--seeds", "3", "--seed", "5", "--json"])

    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["ok"] is True
    assert (told["seeds"], told["first_seed"], told["failures"]) == (3, 5, [])
    assert told["steps"] > 100
    assert told["marks"]
    assert "seeds from 5 on" in done.stderr


def test_the_same_seeds_are_told_the_same() -> None:
    traces = {
        json.loads(CliRunner().invoke(app, ["simulate", "--seeds", "3", *more]).stdout)["trace"]
        for more in (["--seed", "5", "--json"], ["--seed", "5", "--json", "--minutes", "9"])
    }

    assert len(traces) == 1


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
def test_a_time_in_which_no_seed_can_be_played_is_refused(minutes: str) -> None:
    """With 0 it played none, and said that all invariants held."""
    done = CliRunner().invoke(app, ["simulate", "--minutes", minutes])

    assert done.exit_code == 2
    assert "must be a number above 0" in done.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--seeds", "3"),
        ("--minutes", "1"),
        ("--seed", "0"),
        ("--policy", "pct"),
        ("--jobs", "1"),
        ("--tapes", "."),
    ],
)
def test_an_option_for_many_runs_is_refused_with_a_tape(
    tmp_path: Path, option: str, value: str
) -> None:
    """It was ignored."""
    tape = tmp_path / "a.tape.json"
    tape.touch()

    done = CliRunner().invoke(app, ["simulate", "--replay", str(tape), option, value])

    assert done.exit_code == 2
    assert done.stderr == f"turnkeeper: --replay repeats one run; leave out {option}\n"


@pytest.mark.alone
def test_several_jobs_run_all_the_seeds() -> None:
    options = ["simulate", "--seeds", "4", "--seed", "5", "--jobs", "2", "--json"]
    done = CliRunner().invoke(app, options)

    assert done.exit_code == 0
    assert json.loads(done.stdout)["seeds"] == 4


class Interrupted:
    def __del__(self) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_stops_it_though_a_finalizer_swallowed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on to the last seed, and exited with zero."""
    shown: list[int] = []

    def show(_: object, campaign: Campaign) -> None:
        shown.append(campaign.seeds)
        Interrupted()  # nothing holds it

    monkeypatch.setattr(_simulate._Progress, "show", show)
    done = CliRunner().invoke(app, ["simulate", "--seeds", "9", "--seed", "5", "--json"])

    assert done.exit_code == 130
    assert "stopped by Ctrl-C" in done.stderr
    assert shown == [1]
    assert json.loads(done.stdout)["seeds"] == 1


_TERMINATED = """
import signal
from turnkeeper.actors.cli import _simulate, main

_simulate._Progress.show = lambda *_: signal.raise_signal(signal.SIGTERM)
main()
"""


def test_sigterm_ends_it_and_its_processes_as_ctrl_c_does() -> None:
    """Its processes went on, and ended with tracebacks later."""
    options = ["simulate", "--seeds", "40", "--seed", "5", "--jobs", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _TERMINATED, *options],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == -signal.SIGTERM
    assert done.stderr.splitlines()[1:] == ["turnkeeper: stopped by SIGTERM"]
    assert 0 < json.loads(done.stdout)["seeds"] < 40


def test_a_failure_is_told_with_its_invariant_and_a_tape_that_plays_it_again(
    tmp_path: Path,
) -> None:
    options = ["simulate", "--seeds", "1", "--seed", "22", "--json", "--tapes", str(tmp_path)]
    with planted(BEFORE_COMMIT):
        done = CliRunner().invoke(app, options)

        assert done.exit_code == 1
        told = json.loads(done.stdout)
        assert told["ok"] is False
        (failure,) = told["failures"]
        assert failure["invariant"] == "C1"
        assert failure["sentence"]
        assert failure["last"]
        tape = tmp_path / "turnkeeper-22.tape.json"
        assert failure["replay"] == f"turnkeeper simulate --replay {tape}"
        assert "C1" in done.stderr
        assert failure["replay"] in done.stderr

        again = CliRunner().invoke(app, ["simulate", "--replay", str(tape)])
        assert again.exit_code == 1
        assert "broken: C1" in again.stdout
        assert any("BROKEN: C1" in line for line in failure["story"])
        told_again = again.stdout.splitlines()
        assert told_again[-len(failure["story"]) :] == failure["story"]
        assert any("begins Send(" in line for line in told_again), "messages are told"

    mended = CliRunner().invoke(app, ["simulate", "--replay", str(tape), "--json"])
    assert mended.exit_code == 0
    assert json.loads(mended.stdout)["ok"] is True
    told = CliRunner().invoke(app, ["simulate", "--replay", str(tape)])
    assert told.stdout.rstrip().endswith("all invariants held")


def test_a_folder_for_tapes_that_is_not_there_is_made(tmp_path: Path) -> None:
    """It ended in a traceback, and the tape of the failure was lost."""
    folder = tmp_path / "failed" / "tapes"
    options = ["simulate", "--seeds", "1", "--seed", "22", "--tapes", str(folder)]
    with planted(BEFORE_COMMIT):
        done = CliRunner().invoke(app, options)

    assert done.exit_code == 1
    assert [tape.name for tape in folder.iterdir()] == ["turnkeeper-22.tape.json"]
    assert done.stdout.endswith("an invariant was broken\n")


def test_a_failure_whose_tape_cannot_be_written_is_told_with_its_seed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    options = ["simulate", "--seeds", "1", "--seed", "22", "--tapes", str(tmp_path / "file/tapes")]
    with planted(BEFORE_COMMIT):
        done = CliRunner().invoke(app, options)

    assert done.exit_code == 1
    assert "Not a directory" in done.stderr
    assert done.stderr.endswith("another folder: 22\n")


def test_a_long_campaign_without_a_failure_says_which_situations_it_missed() -> None:
    """It said that an invariant was broken; a short one listed dozens that need more seeds."""
    told: dict[int, list[str]] = {}
    for seeds in (999, 1_000):
        out = StringIO()
        _simulate._print_campaign(Console(file=out, width=80), Campaign(1, seeds=seeds))
        told[seeds] = out.getvalue().splitlines()

    assert told[999][-2:] == ["  0  seeds in which an invariant was broken", "all invariants held"]
    assert told[1_000][-1] == "all invariants held; not every situation was reached"
    assert "drained, messages queue; " in " ".join(told[1_000])
    assert max(map(len, told[1_000])) <= 80


@pytest.mark.parametrize("text", ["", "[]", '{"seed": 1}', '{"seed": 1, "tape": {"a": "b"}}'])
def test_what_is_no_tape_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    tape = tmp_path / "a.tape.json"
    tape.write_text(text)

    done = CliRunner().invoke(app, ["simulate", "--replay", str(tape)])

    assert done.exit_code == 2
    assert "is not a tape" in done.stderr


def test_the_logs_of_a_simulated_world_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    import structlog

    with silent_logs():
        structlog.get_logger().warning("planned")
    structlog.get_logger().warning("not planned")

    assert "not planned" in (printed := capsys.readouterr().out)
    assert printed.count("planned") == 1
