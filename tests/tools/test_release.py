"""What is uploaded for a release is whole, and what breaks a caller is found."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RELEASE = runpy.run_path(str(ROOT / "tools" / "build_release.py"))
TRY = runpy.run_path(str(ROOT / "tools" / "try_install.py"))
API = runpy.run_path(str(ROOT / "tools" / "check_api.py"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and a source distribution of this tree."""
    wheel, sdist = RELEASE["build"](tmp_path_factory.mktemp("dist"))
    return wheel, sdist


def test_wheel_and_source_distribution_are_whole(built: tuple[Path, Path]) -> None:
    wheel, sdist = built

    assert list(RELEASE["faults"](wheel, sdist)) == []
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", metadata) == []
    assert "Project-URL: Repository" in metadata


def test_a_file_that_the_source_distribution_lacks_is_found(
    built: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = RELEASE["faults"]
    monkeypatch.setitem(faults.__globals__, "tracked_files", lambda: ["README.md", "new.py"])

    assert list(faults(*built)) == ["new.py: not in the source distribution"]


def test_an_unpacked_source_distribution_inside_a_clone_lists_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git answers there, and knows none of them."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    root = tmp_path / "dist" / "turnkeeper-1.0"
    (root / "turnkeeper.egg-info").mkdir(parents=True)
    (root / "turnkeeper.egg-info" / "SOURCES.txt").write_text("README.md\nturnkeeper.egg-info/x\n")
    listed = RELEASE["tracked_files"]
    monkeypatch.setitem(listed.__globals__, "ROOT", root)

    assert listed() == ["README.md"]


@pytest.mark.parametrize(
    ("link", "wanted"),
    [
        ("[a](docs/a.md)", "[a](https://host/blob/v1/docs/a.md)"),
        ("[a](https://b.c)", "[a](https://b.c)"),
        ("[a](#part)", "[a](#part)"),
        ("![a](docs/a.png)", "![a](https://host/raw/v1/docs/a.png)"),
    ],
)
def test_links_of_the_readme_become_absolute(link: str, wanted: str) -> None:
    assert RELEASE["with_absolute_links"](link, "https://host", "v1") == wanted


def test_a_removed_argument_is_found_and_nothing_else(tmp_path: Path) -> None:
    """Of a small project, as loading all of this one twice takes ten seconds."""
    old, new = tmp_path / "old", tmp_path / "new"
    for root in (old, new):
        for folder in ("top", "runtime", "actors"):
            (root / folder).mkdir(parents=True)
            (root / folder / "__init__.py").touch()
        (root / "actors" / "turn.py").write_text(
            "class Turn:\n    async def reply(self, why: str) -> str: ...\n"
            "    def _hidden(self, why: str) -> str: ...\n"
        )
    assert API["breakages"](old, new, tmp_path / "scratch") == []
    turn = new / "actors" / "turn.py"
    turn.write_text(turn.read_text().replace("self, why: str", "self"))

    (found,) = API["breakages"](old, new, tmp_path / "again")

    assert "Turn.reply" in found


def test_without_a_release_there_is_nothing_to_compare_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = API["main"]
    monkeypatch.setattr(sys, "argv", ["check_api.py"])
    monkeypatch.setitem(main.__globals__, "ROOT", tmp_path)

    assert main() == 0
    assert "no release" in capsys.readouterr().out


def test_a_commit_with_a_tag_is_compared_with_the_tag_before_it(tmp_path: Path) -> None:
    """The release workflow runs there; a release compared with itself breaks nothing."""

    def git(*arguments: str) -> None:
        name = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(*tags: str) -> str | None:
        git("commit", "--allow-empty", "-m", "some")
        for tag in tags:
            git("tag", "-m", tag, tag)
        newest: str | None = API["newest_tag"](tmp_path)
        return newest

    git("init", "--quiet")

    assert commit("v0.1.0") is None
    assert commit() == "v0.1.0"
    assert commit("v0.2.0", "nightly") == "v0.1.0"
    assert commit() == "v0.2.0"


def test_each_extra_is_tried_in_an_environment_of_its_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert TRY["PROGRAMS"].keys() == project["optional-dependencies"].keys()
    assert TRY["COMMANDS"].keys() | TRY["SILENT"] <= TRY["PROGRAMS"].keys()
