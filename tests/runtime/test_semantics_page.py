"""The page of guarantees names a test in each line, and each of them exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "runtime-semantics.md"


def known_tests() -> set[str]:
    return {
        name
        for file in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", file.read_text())
    }


def guarantees() -> list[str]:
    """The rows of its tables of guarantees; the others are played by `test_endings_page.py`."""
    tables = PAGE.read_text().split("| guaranteed | test |\n|---|---|\n")[1:]
    return [row for table in tables for row in table.partition("\n\n")[0].splitlines()]


@pytest.mark.parametrize("row", guarantees())
def test_each_guarantee_names_a_test_that_exists(row: str) -> None:
    named = re.findall(r"`(test_\w+)`", row)
    assert named, "a guarantee without a test is a hope"
    assert set(named) <= known_tests()


def test_the_page_has_guarantees() -> None:
    assert len(guarantees()) > 50
