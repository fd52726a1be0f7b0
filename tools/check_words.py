"""Checks how docstrings are written. Usage: python tools/check_words.py [ROOT].

A function's docstring begins with a verb or a condition ("Return …", "True if …"), not with a noun
clause or an article; properties and tests are left out. No docstring has one of the banned phrases.
Prints one line for each that breaks a rule, and then exits with 1.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("runtime", "actors", "top")
PROGRAMS = ("examples", "benchmarks", "tools", "tests")

FIRST_WORDS = {"what", "whether", "who", "which", "how", "where", "a", "an", "the"}
BANNED = (
    r"somebody",
    r"nobody",
    r"whoever",
    r"anybody",
    r"of one mind",
    r"see there",
    r"what [^.;:]{0,60}comes to",
)
_BANNED = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)

PROPERTIES = {"property", "cached_property", "setter", "getter", "fixture"}


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether callers see a value, whose docstring may say which one it is."""
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for decorator in function.decorator_list
        for node in ast.walk(decorator)
        if isinstance(node, ast.Attribute | ast.Name)
    }
    return bool(names & PROPERTIES)


def first_word(text: str) -> str:
    """Return the first word of a docstring, in lower case."""
    found = re.search(r"[A-Za-z']+", text)
    return found.group().lower() if found else ""


def faults(source: bytes, *, is_tests: bool) -> Iterator[tuple[int, str]]:
    """Yield the line and the fault of each docstring that breaks a rule."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                text = ast.get_docstring(node)
                is_test = is_tests or node.name.startswith("test_")
                if text is None or is_test or is_property(node):
                    continue
                if (word := first_word(text)) in FIRST_WORDS:
                    yield node.lineno, f"{node.name}: begins with {word!r}; begin with a verb"
            case ast.Expr(value=ast.Constant(value=str(text))):
                for found in _BANNED.finditer(text):
                    phrase = " ".join(found.group().split())
                    yield node.lineno, f"has {phrase!r}; name the actor of the sentence"
            case _:
                pass


def violations(root: Path) -> Iterator[str]:
    """Yield a line for each fault below a root."""
    for folder in (*PACKAGES, *PROGRAMS):
        for path in sorted((root / folder).rglob("*.py")):
            place = path.relative_to(root).as_posix()
            for line, fault in faults(path.read_bytes(), is_tests=folder == "tests"):
                yield f"{place}:{line}: {fault}"


def main() -> int:
    """Print the violations; return the exit status."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    lines = list(violations(root))
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
