"""The import check finds each kind of import that it is there to find."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def check(root: Path, place: str, source: str) -> str:
    """Return what the check prints about a project with this file in it."""
    tree = {
        "runtime/__init__.py": '__all__ = ["Actor", "Message"]',
        "runtime/testing.py": '__all__: list[str] = ["Probe"]',
        "actors/__init__.py": "",
        "actors/core/__init__.py": "",
        "actors/core/decide.py": "",
        "actors/core/turn_rules.py": "from . import view",
        "actors/models/_parsing.py": "",
        "actors/owner/actor.py": "from ..core.decide import decide",
        "runtime/lowlevel.py": '__all__ = ["OneShot"]',
        place: source,
    }
    for name, content in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    done = subprocess.run(
        [sys.executable, ROOT / "tools/check_imports.py", root],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == (1 if done.stdout else 0)
    return done.stdout


@pytest.mark.parametrize(
    ("place", "source", "rule"),
    [
        ("tests/test_x.py", "import runtime", "second copy"),
        ("tests/test_x.py", "from runtime.mailbox import Mailbox", "second copy"),
        ("examples/first.py", "import actors.view as view", "second copy"),
        ("benchmarks/asks.py", "def f():\n    from actors import View", "second copy"),
        ("tools/tool.py", "import actors", "second copy"),
        ("runtime/ref.py", "import runtime.errors", "second copy"),
        ("runtime/ref.py", "import turnkeeper.actors", "knows nothing of conversations"),
        ("runtime/ref.py", "from turnkeeper.actors.core.view import View", "knows nothing"),
        ("runtime/ref.py", "from turnkeeper.runtime import Actor", "imports are relative"),
        ("runtime/ref.py", "from ..actors import View", "must stay inside"),
        ("actors/view.py", "from ..runtime import Actor", "must stay inside"),
        ("actors/view.py", "from .. import runtime", "must stay inside"),
        ("actors/core/view.py", "from turnkeeper.runtime import Secret", "in `__all__`"),
        ("actors/core/view.py", "from turnkeeper.runtime import *", "in `__all__`"),
        ("actors/core/view.py", "from turnkeeper.runtime import _cell", "in `__all__`"),
        ("actors/core/view.py", "from turnkeeper.runtime._cell import Actor", "in `__all__`"),
        ("actors/core/view.py", "from turnkeeper.runtime.testing import Secret", "in `__all__`"),
        ("actors/core/view.py", "from turnkeeper.runtime import OneShot", "in `__all__`"),
        ("actors/core/view.py", "from turnkeeper.runtime.lowlevel import Park", "in `__all__`"),
        ("actors/core/view.py", "import turnkeeper.runtime", "in `__all__`"),
        ("actors/conversation.py", "import asyncio", "may know a backend"),
        ("runtime/mailbox.py", "from trio.lowlevel import checkpoint", "may know a backend"),
        ("runtime/mailbox.py", "import time", "through the ports"),
        ("actors/conversation.py", "from uuid import uuid4", "through the ports"),
        ("actors/core/view.py", "import anyio", "a pure module"),
        ("actors/core/view.py", "from anyio.abc import TaskGroup", "a pure module"),
        ("actors/core/decide.py", "import random", "a pure module"),
        ("actors/core/plan.py", "import anyio", "a pure module"),
        ("actors/cli/demo.py", "from ...runtime import Actor", "must stay inside"),
        ("actors/cli/demo.py", "from random import random", "through the ports"),
        ("actors/torture/own.py", "from ..core.decide import decide", "of the outside"),
        ("actors/agents/turn_context.py", "from random import Random", "through the ports"),
    ],
)
def test_an_import_that_breaks_a_rule_is_found(
    tmp_path: Path, place: str, source: str, rule: str
) -> None:
    lines = check(tmp_path, place, source).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"{place}:{len(source.splitlines())}: ")
    assert rule in lines[0]


def test_files_that_import_each_other_are_found_also_for_typing_only(tmp_path: Path) -> None:
    source = "if TYPE_CHECKING:\n    from .turn_rules import Rules"

    line = check(tmp_path, "actors/core/view.py", source)

    assert line == "these import each other: actors/core/turn_rules, actors/core/view\n"


def test_no_more_than_three_files_of_the_runtime_import_each_other(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime/_slice.py").write_text("if TYPE_CHECKING:\n    from ._cell import Cell")
    (tmp_path / "runtime/_pool.py").write_text("def step():\n    from ._cell import Cell")
    (tmp_path / "runtime/_ref.py").write_text("from . import _cell")
    three = "from ._slice import run\nfrom ._pool import Pool"

    assert check(tmp_path, "runtime/_cell.py", three) == ""
    line = check(tmp_path, "runtime/_cell.py", f"{three}\nfrom ._ref import Ref")

    group = "runtime/_cell, runtime/_pool, runtime/_ref, runtime/_slice"
    assert line == f"these import each other: {group}\n"


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("tests/test_x.py", "from turnkeeper.runtime._cell import Cell\nimport time, trio"),
        ("runtime/mailbox.py", "import anyio\nfrom .errors import Refused\nfrom . import errors"),
        ("runtime/_backend.py", "import asyncio\nimport trio\nimport time"),
        ("runtime/testing.py", "import trio\n__all__ = []"),
        ("runtime/ports.py", "import random, time"),
        ("actors/core/view.py", "from turnkeeper.runtime import Message"),
        ("actors/owner/loop.py", "from turnkeeper.runtime import Actor"),
        ("actors/owner/loop.py", "from turnkeeper.runtime.testing import Probe"),
        ("actors/owner/loop.py", "from ..core.decide import decide\nfrom . import actor"),
        ("actors/cli/demo.py", "from .. import Conversations"),
        ("actors/owner/loop.py", "from turnkeeper.runtime.lowlevel import OneShot"),
        ("actors/conversation.py", "import anyio\nfrom .view import View"),
        ("actors/cli/demo.py", "from ..view import View\nfrom . import app"),
        ("actors/core/view.py", "if TYPE_CHECKING:\n    from random import Random"),
        ("actors/cli/demo.py", "from random import Random"),
    ],
)
def test_an_import_that_keeps_the_rules_is_not_reported(
    tmp_path: Path, place: str, source: str
) -> None:
    assert check(tmp_path, place, source) == ""
