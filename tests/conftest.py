"""What every test shares: both backends, and properties that are the same in every run."""

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from . import drawn, sweeping

# Failures inside an inherited suite show their values, as those of a test's own module do. Here,
# because it must be said before any test imports the suite.
pytest.register_assert_rewrite("turnkeeper.actors.journals.contract")

# The same examples in every run: a red build is about the change, never about the draw.
settings.register_profile("ci", derandomize=True, deadline=None, database=None)
# For hunting: `--hypothesis-profile=search` draws anew and remembers what it found.
settings.register_profile("search", deadline=None, max_examples=2_000)
settings.load_profile("ci")


# Journals sync each commit, and on a disk that is most of what the tests wait for. In memory it is
# free, and no test lets the machine go down. Not if there is little memory, as in a container.
MEMORY = Path("/dev/shm")
MEMORY_FREE_BYTES_MIN = 2 << 30
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_FREE_BYTES_MIN:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

BACKENDS = ("asyncio", "trio")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("trio", {}), id="trio"),
    ],
)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run each async test twice: once on asyncio, once on trio."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Spare the garbage collector the libraries and the tests, which stay until the end.

    They are most of a million objects, and a full collection looks at each. Once for each module,
    since a runtime with `freeze_objects` unfreezes all when it ends.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def _interrupted_by_ctrl_c() -> Generator[None, None, None]:
    """As in a terminal; a job in the background of a shell inherits an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_sessionfinish() -> None:
    """Let pytest's own last collections see all objects."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without the garbage collector: nearly all that is made then stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("turnkeeper")
    group.addoption(
        "--whole", action="store_true", help="run sweeps whole; else a share, drawn from the commit"
    )
    group.addoption("--part", type=sweeping.part_of, help="run one part of the tests: 2/3")
    group.addoption("--done", type=Path, help="leave out the tests it lists; list those that pass")
    group.addoption("--backend", choices=BACKENDS, help="run async tests on this alone")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--whole"):
        drawn.make_whole()
    sweeping.configure(config, is_long=drawn.is_whole())


def pytest_report_header() -> str:
    return f"sweeps: {'whole' if drawn.is_whole() else f'drawn from {drawn.commit()}'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the backend that `--backend` does not name.

    Without it, leave out one of the two of each test that is marked `costly`. Of a module that is
    marked `in_parts(n)`, leave out all but one part of n.
    """
    named = config.getoption("--backend")
    ids = {item.nodeid for item in items}
    other_parts = _other_parts(items)
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        wanted = named or _drawn_backend(item, ids)
        is_wanted = wanted is None or _backend_of(item) in (None, wanted)
        (kept if is_wanted and item not in other_parts else others).append(item)
    items[:] = kept
    if others:
        config.hook.pytest_deselected(items=others)


def _drawn_backend(item: pytest.Item, ids: set[str]) -> str | None:
    """Return the backend on which a costly test runs this time; `make sweep` runs it on both."""
    if item.get_closest_marker("costly") is None:
        return None
    item.add_marker("sweep")
    both = [re.sub("asyncio|trio", backend, item.nodeid) for backend in BACKENDS]
    if drawn.is_whole() or not set(both) <= ids:
        return None
    (backend,) = drawn.drawn(BACKENDS, 1, of=both[0])
    return backend


def _other_parts(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that the commit draws for other runs, of modules in parts."""
    modules: dict[tuple[str, int], dict[str, list[pytest.Item]]] = {}
    for item in items:
        marker = item.get_closest_marker("in_parts")
        if marker is None or item.get_closest_marker("slow"):
            continue
        item.add_marker("sweep")
        module, _, test = item.nodeid.partition("::")
        # A test that runs on both backends is one test.
        tests = modules.setdefault((module, *marker.args), {})
        tests.setdefault(re.sub(r"\b(asyncio|trio)\b", "", test), []).append(item)
    left_out: set[pytest.Item] = set()
    for (module, parts), tests in modules.items():
        kept = drawn.drawn(sorted(tests), -(-len(tests) // parts), of=module)
        left_out.update(item for test in tests.keys() - set(kept) for item in tests[test])
    return left_out


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked `alone` in a process of its own, if this one has threads."""
    if pyfuncitem.get_closest_marker("alone") is None or threading.active_count() == 1:
        return None
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", pyfuncitem.nodeid]
    done = subprocess.run(
        command,
        cwd=pyfuncitem.config.rootpath,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return True


def _backend_of(item: pytest.Item) -> str | None:
    """Return the backend that a test runs on, or has a process of its own run on, if it has one."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return None
    backend = callspec.params.get("anyio_backend") or (callspec.params.get("backend"),)
    return backend[0] if backend[0] in BACKENDS else None
