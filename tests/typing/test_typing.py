"""The public API as the type checker sees it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two packages under their installed name; mypy cannot follow the editable install."""
    path = tmp_path_factory.mktemp("typing")
    (path / "turnkeeper").mkdir()
    for package in ("runtime", "actors"):
        (path / "turnkeeper" / package).symlink_to(ROOT / package)
    return path


def check(environment: Path, *files: Path) -> str:
    """What mypy finds in these files; it follows their imports, but reports on them alone."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")),
            *("--namespace-packages", "--explicit-package-bases", "--follow-imports=silent"),
            *("--cache-dir", str(ROOT / ".mypy_cache" / "typing")),
            *map(str, files),
        ],
        cwd=environment,
        env={"MYPYPATH": str(environment)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def test_what_must_type_check_does_and_what_must_not_does_not(environment: Path) -> None:
    files = [*FOLDER.glob("*_accepted.py"), *FOLDER.glob("*_rejected.py")]
    assert len(files) >= 2
    copies = [environment / file.name for file in sorted(files)]
    for copy in copies:
        copy.write_text((FOLDER / copy.name).read_text())
    found = check(environment, *copies)
    assert found.startswith("Success"), found


def test_a_line_that_no_longer_fails_is_noticed(environment: Path) -> None:
    copy = environment / "no_longer_rejected.py"
    copy.write_text("number: int = 1  # type: ignore[assignment]\n")
    assert "unused" in check(environment, copy).lower()
