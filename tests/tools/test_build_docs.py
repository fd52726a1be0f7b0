"""The documentation site: it builds without a warning, and its reference is complete."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import turnkeeper
import turnkeeper.actors
from turnkeeper import runtime
from turnkeeper.runtime import lowlevel, testing

ROOT = Path(__file__).parent.parent.parent
BUILD = runpy.run_path(str(ROOT / "tools" / "build_docs.py"))
PICTURES = runpy.run_path(str(ROOT / "tools" / "draw_pictures.py"))["PICTURES"]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, ROOT / "tools" / "build_docs.py", tmp_path / "docs"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "docs" / "site" / "index.html").exists()
    page = (tmp_path / "docs" / "site" / "reference" / "conversations.html").read_text()
    assert 'id="turnkeeper.actors.Conversation.send"' in page


def test_each_public_name_is_on_one_page_of_the_reference() -> None:
    pages = "\n".join(text for _, text in BUILD["reference_pages"]())
    places = Counter(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))

    wanted = {
        f"{module.__name__}.{name}"
        for module in (turnkeeper.actors, runtime, lowlevel, testing)
        for name in module.__all__
    }
    assert wanted - set(places) == set()
    assert [name for name, count in places.items() if count > 1] == []
    face = {name for name in turnkeeper.__all__ if name != "__version__"}
    assert face <= {place.rpartition(".")[2] for place in places}


def test_each_page_is_in_the_navigation() -> None:
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    listed = set(re.findall(r"[\w/-]+\.md", str(config["project"]["nav"])))

    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages | {f"reference/{name}.md" for name in BUILD["REFERENCE"]} == listed


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_as_it_is_drawn(name: str) -> None:
    assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == PICTURES[name]().svg()
