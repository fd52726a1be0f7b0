"""The README's program is run, and prints what the README says; its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page
    for page in (found.relative_to(ROOT) for found in ROOT.glob("**/*.md"))
    if not any(part.startswith(".") or part in ("node_modules", "build") for part in page.parts)
)
README = (ROOT / "README.md").read_text()


def test_the_first_program_prints_what_the_readme_says(tmp_path: Path) -> None:
    program, output = re.findall(r"```(?:python|text)\n(.*?)```", README, re.DOTALL)[:2]

    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert ran.stderr == ""
    assert ran.stdout == output
    assert len([line for line in program.splitlines() if line.strip()]) < 15


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    local = [link for link in links if "://" not in link]

    assert [link for link in local if not (ROOT / page.parent / link).exists()] == []
