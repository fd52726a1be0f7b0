"""The project's own promises: one import name, a lock without hosts, commands that are true."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import trio
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
CORE = {"anyio", "pydantic", "structlog"}


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def lock() -> str:
    return (ROOT / "requirements.lock").read_text()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("folder", ["runtime", "actors"])
def test_a_plain_import_from_the_root_is_refused(folder: str) -> None:
    # Empty means unset: the interpreter puts the root on the path, as a careless user would.
    done = run_python(f"import {folder}", PYTHONSAFEPATH="")
    assert done.returncode == 1
    assert f"ImportError: import turnkeeper.{folder}, not {folder}" in done.stderr


@pytest.mark.parametrize("source", ["import runtime\n", "from actors.view import View\n"])
def test_the_linter_refuses_a_plain_import(source: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--stdin-filename", "examples/x.py", "-"],
        cwd=ROOT,
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "TID251" in done.stdout


def test_the_library_loads_without_anything_but_its_core_dependencies(
    settings: dict[str, Any],
) -> None:
    project = settings["project"]
    assert {Requirement(text).name for text in project["dependencies"]} == CORE

    others = "openai anthropic psycopg opentelemetry typer rich trio pytest hypothesis"
    done = run_python(
        f"import sys; sys.modules.update(dict.fromkeys('{others}'.split()))\n"  # None: not there
        "import turnkeeper.runtime, turnkeeper.actors; print('loaded')"
    )
    assert (done.stdout, done.stderr) == ("loaded\n", "")


def test_a_module_that_lacks_its_extra_names_it() -> None:
    modules = {
        "turnkeeper.runtime.otel": "otel",
        "turnkeeper.actors.gateway": "gateway",
        "turnkeeper.actors.integrations.mcp": "mcp",
        "turnkeeper.actors.integrations.openai_agents": "openai-agents",
        "turnkeeper.actors.integrations.otel": "otel",
        "turnkeeper.actors.integrations.pydantic_ai": "pydantic-ai",
        "turnkeeper.actors.models.anthropic": "anthropic",
        "turnkeeper.actors.models.openai": "openai",
    }
    others = "agents anthropic fastapi mcp openai opentelemetry pydantic_ai"
    done = run_python(
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys('{others}'.split()))\n"  # None: not there
        f"for module in {list(modules)}:\n"
        "    try: importlib.import_module(module)\n"
        "    except ImportError as error: print(str(error).partition('install ')[2])"
    )
    assert done.stdout.split() == [f"turnkeeper[{extra}]" for extra in modules.values()]


def test_the_lock_names_no_host(lock: str) -> None:
    assert "://" not in lock
    options = re.findall(r"^\s*(-[\w-]*)", lock, re.MULTILINE)
    assert set(options) == {"--hash"}


def test_each_pin_of_the_lock_has_hashes(lock: str) -> None:
    pins = lock.count("==") - lock.count("== '")
    assert pins > len(CORE)
    assert len(re.findall(r"==\S+( ;[^\n\\]+)? \\\n    --hash=sha256:", lock)) == pins


def test_the_lock_satisfies_what_the_project_asks_for(settings: dict[str, Any], lock: str) -> None:
    pinned = dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)", lock, flags=re.MULTILINE))
    project = settings["project"]
    asked = [*project["dependencies"], *settings["dependency-groups"]["dev"]]
    for extra in project["optional-dependencies"].values():
        asked += extra
    for requirement in map(Requirement, asked):
        version = pinned.get(requirement.name)
        assert version is not None, f"{requirement} is not in the lock: run `make lock`"
        assert requirement.specifier.contains(version), f"{requirement}: {version} is locked"


def test_the_build_needs_what_the_lock_has(settings: dict[str, Any]) -> None:
    """It runs without isolation, so that it downloads nothing."""
    assert set(settings["build-system"]["requires"]) <= set(settings["dependency-groups"]["dev"])


def test_the_continuous_build_runs_the_commands_that_the_readme_states() -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = "".join(re.findall(r"^```\w*\n(.*?)^```", readme, re.DOTALL | re.MULTILINE))
    stated = re.findall(r"^make \w+", blocks, re.MULTILINE)
    run = re.findall(r"^make \w+$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert run == ["make check", "make test"]
    assert "make test" in stated
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.split()[1] for command in stated} <= set(targets)


def test_the_workflow_runs_the_continuous_build_on_each_supported_python(
    settings: dict[str, Any],
) -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)
    supported = [
        found.group(1)
        for text in settings["project"]["classifiers"]
        if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", text))
    ]

    assert set(re.findall(r"3\.\d+", matrix)) >= set(supported)
    assert re.search(r"^      - run: \.ci/run$", workflow, re.MULTILINE)


def test_each_target_of_make_is_told_by_its_help() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (targets,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    told = set(re.findall(r"^\t@echo 'make ([\w-]+) ", makefile, re.MULTILINE))

    assert told == set(targets.split()) - {"help", "venv"}


def test_the_hook_refuses_a_commit_with_a_slip_of_style_or_spelling(tmp_path: Path) -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        name = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        return subprocess.run(
            ["git", *name, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    git("init", "--quiet")
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    (tmp_path / "tools").mkdir()
    copy(ROOT / "tools/check_words.py", tmp_path / "tools")
    (tmp_path / ".git/hooks").mkdir(exist_ok=True)
    (tmp_path / ".git/hooks/pre-commit").symlink_to(ROOT / "tools/pre-commit")

    for text in ("import os\n", "x  =  1\n", "# rec" + "ieve\n"):
        (tmp_path / "some.py").write_text(text)
        git("add", "some.py")
        assert git("commit", "-m", "some").returncode != 0, text
    (tmp_path / "some.py").write_text("x = 1\n")
    git("add", "some.py")
    done = git("commit", "-m", "some")

    assert done.returncode == 0, done.stdout + done.stderr


async def test_an_async_test_runs_on_the_backend_that_it_names(
    request: pytest.FixtureRequest, anyio_backend_name: str
) -> None:
    assert request.node.name.endswith(f"[{anyio_backend_name}]")
    assert trio.lowlevel.in_trio_run() == (anyio_backend_name == "trio")


def test_an_async_test_runs_on_both_backends() -> None:
    name = "test_an_async_test_runs_on_the_backend_that_it_names"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", f"{Path(__file__)}::{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(re.findall(rf"::{name}(\S*)", done.stdout)) == {"[asyncio]", "[trio]"}


def test_the_command_line_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="turnkeeper")
    assert callable(command.load())
