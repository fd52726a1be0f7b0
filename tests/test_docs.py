"""The programs in the documentation run, and print what their pages say.

The Python blocks of a page are one program; its output is the text blocks, one after the other.
Which seed fails first, and at which step, changes with the inner workings of the runtime, so these
numbers are left out of the comparison.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [
    "simulation.md",
    "finding.md",
    "blocking.md",
    "steps.md",
    "gateway.md",
    "messages.md",
    "watching.md",
    "torture.md",
    "conversation-core.md",
    "journal.md",
]


def _without_steps(text: str) -> str:
    text = re.sub(r"^ +\d+ ", "step ", text, flags=re.MULTILINE)
    text = re.sub(r"\bseed \d+, (\w+), policy \w+", r"\1", text)
    return re.sub(r"\b\d+ steps|\bstep \d+", "steps", text)


@pytest.mark.parametrize("page", PAGES)
def test_the_program_of_the_page_prints_what_the_page_says(page: str, tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```(python|text)\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL
    )
    program = tmp_path / "program.py"
    program.write_text("\n".join(block for kind, block in blocks if kind == "python"))
    wanted = "".join(block for kind, block in blocks if kind == "text")

    ran = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert ran.stderr == ""
    assert _without_steps(ran.stdout) == _without_steps(wanted)


def test_the_page_on_resuming_shows_the_client_that_the_tests_run() -> None:
    client = Path(__file__).parent / "actors" / "gateway" / "npm" / "resumable.mjs"
    (shown,) = re.findall(
        r"^```js\n(.*?)^```$", (DOCS / "ag-ui-resumable.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert shown == client.read_text()
