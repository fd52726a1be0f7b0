"""The page on how it works: its table of places is what the packages say of themselves."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")


def first_paragraph(place: str) -> str:
    path = ROOT / place
    source = (path if path.is_file() else path / "__init__.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ")


def rows() -> dict[str, str]:
    return dict(re.findall(r"^\| `([\w/.]+)` \| (.+) \|$", PAGE, re.MULTILINE))


def test_each_place_of_the_table_says_what_its_docstring_says() -> None:
    assert {place: first_paragraph(place) for place in rows()} == rows()


def test_the_table_has_every_package_and_every_module_beside_them() -> None:
    packages = {
        path.parent.relative_to(ROOT).as_posix()
        for folder in ("actors", "runtime")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "actors").glob("[!_]*.py")}
    samples = {"actors/recordings/samples"}  # data
    assert set(rows()) == (packages | modules) - {"actors"} - samples


def test_a_package_says_it_in_one_sentence() -> None:
    for place, sentence in rows().items():
        assert sentence.count(".") <= sentence.count("...") + 1 or place == "runtime", place
