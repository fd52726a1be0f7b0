"""The wheel check finds what is missing, what is too much, and what does not type-check."""

import re
import subprocess
import sys
from pathlib import Path
from shutil import copy

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project with all its settings, but with nothing in its packages."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, tmp_path)
    settings = (tmp_path / "pyproject.toml").read_text()
    for folder in re.findall(r'"turnkeeper[\w.]*" = "([\w/]+)"', settings):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text('"""Nothing."""\n')
    (tmp_path / "top" / "py.typed").touch()
    return tmp_path


def check(root: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/check_wheel.py", root],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_what_is_not_in_the_wheel_is_found(project: Path) -> None:
    (project / "runtime" / "forgotten").mkdir()
    (project / "runtime" / "forgotten" / "__init__.py").touch()
    (project / "actors" / "notes.txt").touch()

    code, output = check(project)

    assert code == 1
    assert "turnkeeper/runtime/forgotten/__init__.py: not in the wheel" in output
    assert "turnkeeper/actors/notes.txt: not in the wheel" in output


def test_what_is_in_the_wheel_and_not_in_the_tree_is_found(project: Path) -> None:
    (project / "runtime" / "ref.py").touch()
    (project / "runtime" / "__init__.py").write_text('"""Something else."""\n')
    settings = project / "pyproject.toml"
    settings.write_text(settings.read_text().replace('= "actors"', '= "runtime"'))

    code, output = check(project)

    assert code == 1
    assert "turnkeeper/actors/ref.py: in the wheel, not in the tree" in output
    assert "turnkeeper/actors/__init__.py: the wheel's is not the tree's" in output


def test_a_type_error_is_found_in_the_packages_and_in_the_tests(project: Path) -> None:
    (project / "tests").mkdir()
    test = project / "tests" / "test_x.py"
    test.write_text("from turnkeeper.runtime import depth\n\nhalf: float = depth\n")
    module = project / "runtime" / "__init__.py"

    module.write_text("depth: int = 2\n")
    code, output = check(project)
    assert (code, output.count("Success")) == (0, 2), output

    # Right in itself, wrong for the test that reads it.
    module.write_text("depth: str = '2'\n")
    code, output = check(project)
    assert (code, output.count("Success")) == (1, 1), output
    assert "\ntests/test_x.py:3: error:" in "\n" + output

    module.write_text("depth: int = '2'\n")
    code, output = check(project)
    assert (code, output.count("Success")) == (1, 1), output
    assert "\nruntime/__init__.py:1: error:" in "\n" + output

    module.write_text("depth: int = 2\n")
    (project / "top" / "py.typed").unlink()
    code, output = check(project)
    assert code == 1, output
    assert "missing py.typed" in output
