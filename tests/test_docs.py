"""The programs in the documentation run, and print what their pages say.

The Python blocks of a page are one program; its output is the text blocks, one after the other.
Which seed fails first, and at which step, changes with the inner workings of the runtime, so these
numbers are left out of the comparison.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from turnkeeper import Conversations, PostgresJournal, SQLiteJournal, ToolAgent

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


UNITS = {"": 1, "s": 1, "characters": 1, "days": 86_400}
NAMED = re.compile(r"`(\w+)` \((\d[\d,.]*\d|\d)(?: (\w+))?[^)]*\)")
"""A parameter with its default, as `lease_s` (15 s)."""


def _defaults() -> dict[str, set[object]]:
    """Return the defaults of each parameter of the classes whose parameters the pages name."""
    found: defaultdict[str, set[object]] = defaultdict(set)
    for made in (Conversations, PostgresJournal, SQLiteJournal, ToolAgent):
        for parameter in inspect.signature(made).parameters.values():
            if isinstance(parameter.default, int | float):
                found[parameter.name].add(parameter.default)
    return found


def test_a_default_that_a_page_names_is_the_default() -> None:
    defaults = _defaults()
    named = [
        (page.name, name, float(number.replace(",", "")) * UNITS[unit or ""])
        for page in sorted(DOCS.rglob("*.md"))
        for name, number, unit in NAMED.findall(page.read_text())
        if name in defaults
    ]
    assert [each for each in named if each[2] not in defaults[each[1]]] == []
    assert {"lease_s", "owner_wait_s", "rejection_age_s_max"} <= {name for _, name, _ in named}
