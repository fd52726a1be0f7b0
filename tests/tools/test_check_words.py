"""The check of how docstrings are written: that it bites, and where it lets pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_words.py"


def check(root: Path, source: str, place: str = "actors/some.py") -> str:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    done = subprocess.run(
        [sys.executable, str(TOOL), str(root)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.returncode == (1 if done.stdout else 0)
    return done.stdout


@pytest.mark.parametrize(
    "word", ["What", "Whether", "Who", "Which", "How", "Where", "A", "An", "The"]
)
def test_a_function_whose_docstring_is_a_noun_clause_is_told(tmp_path: Path, word: str) -> None:
    source = f'async def find():\n    """{word} it finds."""\n'

    told = check(tmp_path, source)

    assert told == f"actors/some.py:1: find: begins with {word.lower()!r}; begin with a verb\n"


def test_so_is_a_method_and_a_function_inside_another(tmp_path: Path) -> None:
    source = (
        'class C:\n    def find(self):\n        """What it is."""\n'
        '        def inner():\n            """Whether it is."""\n'
    )

    assert check(tmp_path, source).count("begin with a verb") == 2


@pytest.mark.parametrize(
    "source",
    [
        'def find():\n    """Return what it finds."""\n',
        'def find():\n    """True if it is there."""\n',
        'class C:\n    @property\n    def size(self):\n        """The size in bytes."""\n',
        'def test_find():\n    """A case that was missed once."""\n',
        'class C:\n    """What it is."""\n    size: int\n    """The size in bytes."""\n',
        'FOUND = "somebody"\n',
    ],
)
def test_a_verb_a_property_a_test_and_a_class_pass(tmp_path: Path, source: str) -> None:
    assert check(tmp_path, source) == ""


@pytest.mark.parametrize("place", ["top/some.py", "tests/actors/test_some.py", "tools/some.py"])
@pytest.mark.parametrize(
    "text",
    ["Somebody waits.", "Tell whoever\n    asks.", "Do what it\n    comes to.", "All of one mind."],
)
def test_a_banned_phrase_is_told_in_any_docstring(tmp_path: Path, place: str, text: str) -> None:
    assert "name the actor of the sentence" in check(tmp_path, f'X = 1\n"""{text}"""\n', place)
