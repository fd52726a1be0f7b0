"""The programs on the page about models do what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.actors.models.servers import Answer, Call, ChatApi, serving

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
ASKING, SCRIPTED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(OUTPUT,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


def _run(program: str, folder: Path, **environment: str) -> tuple[str, str]:
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return ran.stderr, ran.stdout


def test_the_program_that_asks_openai_does_so(tmp_path: Path) -> None:
    with serving(ChatApi()) as server:
        server.replies.append(Answer(calls=[Call("look_up", ['{"order": 7}'])]))
        server.replies.append(Answer(["It is ", "on its way."]))
        url = f"{server.url}/v1"
        ran = _run(ASKING, tmp_path, OPENAI_API_KEY="key", OPENAI_BASE_URL=url)
    assert ran == ("", "It is on its way.\n")
    assert server.bodies[1]["messages"][-1]["content"] == "order 7 is on its way"


def test_the_program_without_a_network_prints_what_the_page_says(tmp_path: Path) -> None:
    assert _run(SCRIPTED, tmp_path) == ("", OUTPUT)
