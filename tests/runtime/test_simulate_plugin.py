"""The pytest plugin: it runs worlds, and keeps the tapes of those that fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from turnkeeper.runtime.testing import Tape, TapeFile
from turnkeeper.runtime.testing.pytest_plugin import Simulated

WITHOUT_TAPE = '{"seed": 1, "backend": "trio", "policy": "random", "native_cancels": false}'

PROGRAM = """
from pathlib import Path
from turnkeeper.runtime.testing import Simulation

async def world(simulation: Simulation) -> None:
    with Path("runs").open("a") as runs:
        runs.write(f"{simulation.tape.seed}\\n")
    await simulation.delay("waits", 0.5)
    simulation.require(simulation.now() < LIMIT, "soon", f"it took {simulation.now():.3f} s")

def test_it_is_soon(simulated):
    simulated(world, seeds=60)
"""


def _run(folder: Path, limit: float, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(
        'pytest_plugins = ["turnkeeper.runtime.testing.pytest_plugin"]\n'
    )
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_soon.py").write_text(PROGRAM.replace("LIMIT", str(limit)))
    (folder / "runs").write_text("")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def _seeds(folder: Path) -> list[str]:
    return (folder / "runs").read_text().split()


def test_a_failing_test_keeps_its_tape_and_plays_it_first_from_then_on(tmp_path: Path) -> None:
    failed = _run(tmp_path, 0.01)

    assert failed.returncode == 1
    assert "broken: soon" in failed.stdout
    assert "the tape decides: waits waits: yes" in failed.stdout
    tape = tmp_path / "simulated-tapes" / "test_soon.py-test_it_is_soon.json"
    assert str(tape) in failed.stdout
    assert TapeFile.read(tape).tape.interesting == 2

    again = _run(tmp_path, 0.01)
    assert again.returncode == 1
    assert f"the tape {tape} still fails" in again.stdout
    assert set(_seeds(tmp_path)) == {str(TapeFile.read(tape).seed)}

    mended = _run(tmp_path, 10.0)
    assert mended.returncode == 0, mended.stdout
    assert tape.exists()


def test_the_number_of_seeds_and_the_folder_of_tapes_can_be_chosen(tmp_path: Path) -> None:
    passed = _run(tmp_path, 10.0, "--simulate-seeds", "7")

    assert passed.returncode == 0, passed.stdout
    assert set(_seeds(tmp_path)) == {str(seed) for seed in range(7)}

    failed = _run(tmp_path, 0.01, "--simulate-tapes", str(tmp_path / "elsewhere"))
    assert failed.returncode == 1
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1
    assert not (tmp_path / "simulated-tapes").exists()


def test_tests_whose_names_differ_in_any_character_have_tapes_of_their_own() -> None:
    tests = ["t.py::t", "t.py::t[a b]", "t.py::t[a/b]", "t.py::t[a-b]", "t.py::t[a]", "t.py::t[a-]"]
    tests += ["t.py::t[a-2]", "t.py::t[-a]", "t.py::t[]", "t.py::t[\ud800]", "t.py::t[é]"]
    tests += [f"t.py::t[{'x' * 400}]", f"t.py::t[{'x' * 401}]", f"t.py::t[{'é' * 200}]"]
    made = [Simulated(test, None, Path()) for test in tests]
    names = []
    for simulated in made:
        for _ in range(2):
            simulated._calls += 1
            names.append(simulated._path().name)

    assert len(set(names)) == len(names)
    assert all(len(name.encode()) < 200 for name in names)
    assert names[:2] == ["t.py-t.json", "t.py-t+2.json"]
    assert "t.py-t-a-b.json" in names


def test_a_tape_that_cannot_be_written_leaves_the_failure_told(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("a file, and no folder")

    failed = _run(tmp_path, 0.01, "--simulate-tapes", str(tmp_path / "elsewhere"))

    assert failed.returncode == 1
    assert "broken: soon" in failed.stdout
    assert "could not be written, of this run:" in failed.stdout


def test_a_tape_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    tape = tmp_path / "simulated-tapes" / "test_soon.py-test_it_is_soon.json"
    tape.mkdir(parents=True)

    failed = _run(tmp_path, 0.01)

    assert f"the tape {tape} cannot be read: " in failed.stdout
    assert "Traceback" not in failed.stdout


def test_two_runs_may_write_one_tape_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a file of its own until it is whole."""
    path = tmp_path / "tape.json"
    tape = TapeFile(1, "trio", "random", native_cancels=False, tape=Tape(1))
    write_text = Path.write_text

    def write_beside_another(self: Path, text: str, encoding: str) -> int:
        monkeypatch.undo()
        written = write_text(self, text, encoding=encoding)
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: 1)
            replace(tape, seed=2).write(path)
        return written

    monkeypatch.setattr(Path, "write_text", write_beside_another)
    tape.write(path)

    assert TapeFile.read(path).seed == 1
    assert list(tmp_path.iterdir()) == [path]


DEEP = "[" * 100_000


@pytest.mark.parametrize("held", ["", "[]", '{"seed": 1}', "\xff", WITHOUT_TAPE, DEEP])
def test_a_file_that_holds_no_tape_is_named(tmp_path: Path, held: str) -> None:
    file = tmp_path / "tape.json"
    file.write_bytes(held.encode("latin-1"))
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))} holds no tape of a run: "):
        TapeFile.read(file)
