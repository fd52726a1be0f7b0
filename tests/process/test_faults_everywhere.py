"""Any call that SQLite makes of disk and memory may fail, and no acknowledged data is lost.

A shim in C fails the n-th read, write, sync or truncate of the journal's file and log, or SQLite's
n-th allocation: once, and from then on. In each run an owner claims, appends, forks, deletes and
empties its log. After each, everything acknowledged is there, no log is damaged, and writing goes
on; on the way each error is one that a caller can act on, and a journal that is closed for writing
says so.

A run takes a tenth of a second, so the usual tests draw some points from the commit;
`pytest --whole` takes every one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .. import drawn

HERE = Path(__file__).parent
INPUT_OUTPUT, ALLOCATION = 1, 2
ONCE, LASTING = 0, 1

PARTS = 48 if drawn.is_whole() else 1
"""Each part of a whole sweep is over long before a test counts as hung."""

Point = tuple[int, int, int]


def without(what: str) -> None:
    """Skip; but the continuous build has everything, and fails."""
    if os.environ.get("TURNKEEPER_CI"):
        pytest.fail(f"the continuous build is without {what}")
    pytest.skip(f"without {what}")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not sys.platform.startswith("linux"):
        pytest.skip("the shim is for Linux: LD_PRELOAD and /proc")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        without("a C compiler")
        raise AssertionError("unreachable")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    source = HERE / "fault_shim.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


class Owner:
    """A process that runs an owner with a fault, again and again."""

    def __init__(self, shim: Path, folder: Path) -> None:
        self._shim = shim
        self._folder = folder

    def run(self, points: Sequence[Point]) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, HERE / "faulty_owner.py", self._folder],
            input="".join(f"{kind} {number} {lasts}\n" for kind, number, lasts in points),
            env={**os.environ, "LD_PRELOAD": str(self._shim)},
            text=True,
            capture_output=True,
            check=False,
        )
        if "cannot take SQLite's allocations" in done.stderr:
            without("a shared libsqlite3 that Python uses")
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert [answer["point"] for answer in answers] == [list(point) for point in points]
        return answers


@pytest.fixture
def owner(shim: Path, tmp_path: Path) -> Owner:
    return Owner(shim, tmp_path)


def test_without_a_fault_nothing_is_refused(owner: Owner) -> None:
    for kind in (INPUT_OUTPUT, ALLOCATION):
        (answer,) = owner.run([(kind, 0, ONCE)])
        assert answer["errors"] == {}
        assert answer["wrong"] == []
        assert answer["calls"] > 100


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(
    ("kind", "share"), [(INPUT_OUTPUT, 30), (ALLOCATION, 30)], ids=["disk", "memory"]
)
def test_after_any_failed_call_all_that_was_acknowledged_is_there(
    owner: Owner, kind: int, share: int, part: int
) -> None:
    (count,) = owner.run([(kind, 0, ONCE)])
    points = [
        (kind, number, lasts)
        for number in range(1, count["calls"] + 1)
        for lasts in (ONCE, LASTING)
    ]

    mine = drawn.drawn(points[part::PARTS], share)
    answers = owner.run(mine)

    assert [answer for answer in answers if answer["wrong"]] == []
    # The draw has not missed the point of it.
    assert sum(bool(answer["errors"]) for answer in answers) > len(mine) // 4
