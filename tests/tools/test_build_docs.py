"""The documentation site: it builds without a warning, and its reference is complete."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import runpy
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path

import pytest

import turnkeeper
import turnkeeper.actors
from turnkeeper import runtime
from turnkeeper.actors import Journal
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


ON_PAGES_OF_THEIR_OWN = ("turnkeeper.actors.torture.",)
"""Modules that a page explains whole, such as torture.md."""


def imported_names(text: str) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import from turnkeeper in a page's Python blocks."""
    for block in re.findall(r"^```python[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("turnkeeper"):
                yield from ((node.module or "", name.name) for name in node.names)


def test_each_name_that_a_page_imports_is_in_the_reference() -> None:
    pages = "\n".join(text for _, text in BUILD["reference_pages"]())
    places = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    known = {place.rpartition(".")[2] for place in places}

    shown = [
        (module, name)
        for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        for module, name in imported_names(page.read_text())
    ]
    assert len(shown) > 50
    assert {
        f"{module}.{name}"
        for module, name in shown
        if name not in known and module not in places
        if not inspect.ismodule(getattr(import_module(module), name))
        if not module.startswith(ON_PAGES_OF_THEIR_OWN)
    } == set()


PLAIN_NAMES = re.compile(
    "action|actor|after|args|arguments|child|content|context|conversation_ids?|cursor|deliveries"
    "|detail|error|epoch|event|event_ids?|events|expected_seq|fork_id|function|is_unfinished|items"
    "|journal|json_data|key|known|kwargs|limit|listing|log|media_type|message|message_ids?|name"
    "|need|number|options|owner|path|ports|query|random|recorded|records|ref|rejections|reason|request"
    "|seconds|seq|signature|snapshot|start_thread|subscription|supervision|target|text|thinking"
    "|tool_call_id|tool_call_ids|tool_name|turn|turn_id|url|usage|view|watcher|world|write|_.*"
)
"""They say themselves what they are, or are explained where the type of their value is."""

MADE_FOR_USERS = re.compile(
    "ActorContext|Blocking|Conversation|DeadLetters|Delivery|Effect|Follower|Gateway|Ids|LLMMessages|Node"
    "|Portal|Ref|Region|Simulation|Subscription|Supervisor|Tape|Timer|ToolContext|Turn|TurnContext|View"
)
"""Users get their objects from the library, and never make them."""

OTHER_PAGES = (
    "turnkeeper.runtime.testing",  # explained on the page of the simulator
    "turnkeeper.runtime.lowlevel",
    "turnkeeper.actors.integrations",  # modules
)


def parameters_without_a_word(place: str) -> Iterator[str]:
    """Yield each parameter of a public callable that neither its name nor a docstring explains."""
    module, _, name = place.rpartition(".")
    value = getattr(import_module(module), name)
    if inspect.isfunction(value):
        yield from _unexplained(place, value, (value.__doc__,))
    if not inspect.isclass(value) or issubclass(value, BaseException | Enum):
        return
    made = vars(value).get("__init__")
    is_written = not dataclasses.is_dataclass(value) and not hasattr(value, "model_fields")
    if inspect.isfunction(made) and is_written and not MADE_FOR_USERS.fullmatch(name):
        yield from _unexplained(place, made, (value.__doc__, made.__doc__))
    # A journal keeps the promises of the port, and so do its parameters.
    ports = (Journal,) if name.endswith("Journal") else ()
    for method_name, found in vars(value).items():
        method = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        if method_name.startswith(("_", "test_")) or not inspect.isfunction(method):
            continue
        docs = [getattr(vars(each).get(method_name), "__doc__", "") for each in value.__mro__]
        docs += [getattr(getattr(port, method_name, None), "__doc__", "") for port in ports]
        yield from _unexplained(f"{place}.{method_name}", method, docs)


def _unexplained(
    place: str, function: Callable[..., object], docs: Iterable[str | None]
) -> Iterator[str]:
    text = " ".join(doc or "" for doc in docs)
    for parameter in inspect.signature(function).parameters:
        is_plain = parameter in {"self", "cls"} or PLAIN_NAMES.fullmatch(parameter)
        if not is_plain and not re.search(rf"\b{parameter}\b", text):
            yield f"{place}: {parameter}"


def test_each_parameter_is_described_where_its_name_does_not_say_it() -> None:
    pages = "\n".join(text for _, text in BUILD["reference_pages"]())
    places = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    wanted = [place for place in places if not place.startswith(OTHER_PAGES)]

    assert len(wanted) > 100
    assert [line for place in wanted for line in parameters_without_a_word(place)] == []


def test_each_page_is_in_the_navigation() -> None:
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    listed = set(re.findall(r"[\w/-]+\.md", str(config["project"]["nav"])))

    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages | {f"reference/{name}.md" for name in BUILD["REFERENCE"]} == listed


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_as_it_is_drawn(name: str) -> None:
    assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == PICTURES[name]().svg()
