"""A whole sweep says how far it is, goes on after an interruption, and runs in parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import sweeping

ROOT = Path(__file__).parents[1]


def ended(test: str, *, took_s: float = 1.0, fails: bool = False) -> list[pytest.TestReport]:
    """Return the reports of a test that has run."""
    return [
        pytest.TestReport(
            nodeid=test,
            location=(test, 1, test),
            keywords={},
            outcome="failed" if fails and when == "call" else "passed",
            longrepr=None,
            when=when,
            duration=took_s if when == "call" else 0.0,
        )
        for when in ("setup", "call", "teardown")
    ]


def tell(progress: sweeping.Progress, reports: list[pytest.TestReport]) -> None:
    for report in reports:
        progress.pytest_runtest_logreport(report)


def test_a_sweep_says_how_far_it_is_and_about_how_long_the_rest_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sweeping, "TOLD_EVERY_S", 0.0)
    progress = sweeping.Progress(said.append, processes=2)
    progress.begin(["a::1", "a::2", "a::3", "b::1"])

    tell(progress, ended("a::1", took_s=120.0))
    tell(progress, ended("b::1", took_s=600.0, fails=True))

    # Of the module that is left, a test takes two minutes, and two processes share them.
    assert said[-1] == "sweep: 2 of 4 tests, 1 failed, 0 min; about 2 min more; the last is of b"


def test_tests_of_a_module_that_has_not_begun_are_taken_to_last_as_long_as_others() -> None:
    progress = sweeping.Progress(lambda _: None)
    progress.begin(["a::1", "b::1", "b::2"])

    tell(progress, ended("a::1", took_s=30.0))

    assert progress.left_s() == 60.0


def test_what_has_passed_is_kept_and_what_has_failed_is_not(tmp_path: Path) -> None:
    done = tmp_path / "of a folder that is not there" / "done"
    progress = sweeping.Progress(lambda _: None, done=done)
    progress.begin(["a::1", "a::2"])

    tell(progress, ended("a::1"))
    tell(progress, ended("a::2", fails=True))

    assert done.read_text() == "a::1\n"


def test_parts_share_out_all_tests_and_the_tests_of_each_module() -> None:
    tests = [f"{module}{n}" for module in "abc" for n in range(6)]

    parts = [sweeping.in_part(tests, (part, 3)) for part in (1, 2, 3)]

    assert sorted(test for part in parts for test in part) == sorted(tests)
    for part in parts:
        assert "".join(test[0] for test in part) == "aabbcc"


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "a/b", "-1/3", "2/"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"it takes a part of how many, such as 2/3"):
        sweeping.part_of(text)


def test_a_run_leaves_out_what_an_earlier_one_has_done(tmp_path: Path) -> None:
    done = tmp_path / "done"
    wanted = "test_a_part_that_is_none_is_refused"
    names = [f"tests/test_sweeping.py::{wanted}[{text}]" for text in ("0/3", "4/3", "2", "a/b")]
    done.write_text("".join(f"{name}\n" for name in names))

    options = ["-p", "no:cacheprovider", "-k", wanted, "--done", str(done), "--part", "2/2"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, "tests/test_sweeping.py"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if "PYTEST" not in name},
        capture_output=True,
        text=True,
        check=False,
    )

    # Of the part, "4/3", "a/b" and "2/", one is left.
    assert "1 passed, " in run.stdout, run.stdout + run.stderr
    assert done.read_text().splitlines()[len(names) :] == [f"tests/test_sweeping.py::{wanted}[2/]"]
