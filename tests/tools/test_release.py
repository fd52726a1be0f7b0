"""What is uploaded for a release is whole, and what breaks a caller is found."""

from __future__ import annotations

import re
import runpy
import sys
import zipfile
from pathlib import Path
from shutil import copytree

import pytest

ROOT = Path(__file__).parent.parent.parent
RELEASE = runpy.run_path(str(ROOT / "tools" / "build_release.py"))
API = runpy.run_path(str(ROOT / "tools" / "check_api.py"))


def test_wheel_and_source_distribution_are_whole(tmp_path: Path) -> None:
    wheel, sdist = RELEASE["build"](tmp_path / "dist")

    assert list(RELEASE["faults"](wheel, sdist)) == []
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", metadata) == []
    assert "Project-URL: Repository" in metadata


def test_a_file_that_the_source_distribution_lacks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, sdist = RELEASE["build"](tmp_path / "dist")
    faults = RELEASE["faults"]
    monkeypatch.setitem(faults.__globals__, "tracked_files", lambda: ["README.md", "new.py"])

    assert list(faults(wheel, sdist)) == ["new.py: not in the source distribution"]


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
    old = tmp_path / "old"
    for folder in ("top", "runtime", "actors"):
        copytree(ROOT / folder, old / folder)
    turn = old / "actors" / "conversations" / "turn.py"
    text = turn.read_text()
    turn.write_text(text.replace("async def reply(self", "async def reply(self, why: str"))
    assert turn.read_text() != text

    found = API["breakages"](old, ROOT, tmp_path / "scratch")

    assert len(found) == 1, found
    assert "Turn.reply" in found[0]
    assert API["breakages"](ROOT, ROOT, tmp_path / "again") == []


def test_without_a_release_there_is_nothing_to_compare_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = API["main"]
    monkeypatch.setattr(sys, "argv", ["check_api.py"])
    monkeypatch.setitem(main.__globals__, "ROOT", tmp_path)

    assert main() == 0
    assert "no release" in capsys.readouterr().out
