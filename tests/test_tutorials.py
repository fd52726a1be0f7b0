"""The tutorials and how-tos do what they say: their files are written, their commands are run.

A block of code with a title is a file of the reader's folder; a later one with the same title
takes its place. In a console block, `$ ` begins a command, and the lines after it are its output,
in which `…` stands for any text. A command that ends in `&` goes on until the page has ended. A
server of the page listens on a free port, in place of 8000.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from .ports import free_port

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(
    page.relative_to(DOCS)
    for page in (DOCS / "index.md", *DOCS.glob("tutorials/*.md"), *DOCS.glob("how-to/*.md"))
)
BLOCK = re.compile(
    r'^```(?P<kind>\w+)(?: title="(?P<file>[^"]+)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL
)


@dataclass
class Command:
    line: str
    output: str


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of a console block, each with the output that the page shows."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        yield Command(line, output)


def is_as_shown(output: str, shown: str) -> bool:
    """Return whether a command printed what the page shows."""
    wanted = ".*".join(re.escape(part) for part in shown.strip().split("…"))
    return re.fullmatch(wanted, output.strip(), re.DOTALL) is not None


def environment_of(port: int) -> dict[str, str]:
    """Return the environment of the commands; their server listens on this port."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "80",
        "NO_COLOR": "1",
        "UVICORN_PORT": str(port),
        # A reader has the plugins of what the page installs. All of ours take a second to load.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "anyio.pytest_plugin",
    }
    environment.pop("PYTHONSAFEPATH", None)  # a reader's modules import each other
    return environment


def run_page(page: Path, folder: Path) -> int:
    """Write the files and run the commands of a page, in their order; return how many ran."""
    port = free_port()
    environment = environment_of(port)
    text = page.read_text().replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    ran = 0
    with ExitStack() as background:
        for block in BLOCK.finditer(text):
            if block["file"] is not None:
                place = folder / block["file"]
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(block["text"])
            if block["kind"] != "console":
                continue
            for command in commands(block["text"]):
                ran += 1
                if command.line.endswith("&"):
                    begin(background, command, folder, environment)
                    continue
                ended = subprocess.run(
                    ["bash", "-c", command.line],
                    cwd=folder,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    check=False,
                    timeout=300,
                )
                assert is_as_shown(ended.stdout, command.output), (command.line, ended.stdout)
    return ran


def begin(background: ExitStack, command: Command, folder: Path, env: dict[str, str]) -> None:
    """Start a command that goes on, and wait until it has printed what the page shows."""
    line = command.line.removesuffix("&").strip()
    process = background.enter_context(
        subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    )
    background.callback(process.terminate)
    assert process.stdout is not None
    printed = ""
    while not is_as_shown(printed, command.output):
        more = process.stdout.readline()
        assert more, (command.line, printed)
        printed += more


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    ran = run_page(DOCS / page, tmp_path)

    assert ran > 0 or ' title="' not in (DOCS / page).read_text()


def test_output_that_differs_from_the_page_fails_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('```python title="a.py"\nprint(1)\n```\n\n```console\n$ python a.py\n2\n```\n')

    with pytest.raises(AssertionError):
        run_page(page, tmp_path)
