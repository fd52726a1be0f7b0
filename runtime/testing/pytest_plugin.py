"""A pytest plugin for simulated worlds: it runs seeds, and keeps the tapes of those that fail.

Load it in a `conftest.py`:

    pytest_plugins = ["turnkeeper.runtime.testing.pytest_plugin"]

and run a world in a test:

    def test_no_deposit_is_paid_in_twice(simulated):
        simulated(world, seeds=200)

The test fails at the first seed that breaks an invariant. Its tape, made smaller, is written to the
folder `simulated-tapes` beside pytest's configuration, or to that of `--simulate-tapes`. As long as
the file is there, the test plays it before any seed. `--simulate-seeds` overrides the number of
seeds of all tests.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest

from ._campaign import Campaign, TapeFile, run_campaign
from ._simulate import STEPS_MAX, World
from ._simulation import Backend

__all__ = ["Simulated", "simulated"]

SEEDS = 100
_FOLDER = "simulated-tapes"
_PLAIN = re.compile(r"[\w./-]+(::\w+)+(\[[\w.-]*[\w.]\])?")
_NAME_BYTES_MAX = 150
"""Of the name of a file, which has 255 at most: room for the number of the call, and for ends."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; called by pytest."""
    group = parser.getgroup("simulation", "simulated worlds")
    group.addoption(
        "--simulate-seeds",
        type=int,
        default=None,
        metavar="N",
        help="run N seeds of each simulated world, whatever its test says",
    )
    group.addoption(
        "--simulate-tapes",
        type=Path,
        default=None,
        metavar="FOLDER",
        help=f"keep the tapes of failing runs there (default: {_FOLDER}, beside the configuration)",
    )


class Simulated:
    """Runs the worlds of one test. The fixture `simulated` makes it."""

    def __init__(self, test: str, seeds: int | None, tapes: Path) -> None:
        self._test = test
        self._seeds = seeds
        self._tapes = tapes
        self._calls = 0

    def __call__(
        self,
        world: World,
        *,
        seeds: int = SEEDS,
        first_seed: int = 0,
        processes: int = 1,
        backend: Backend = "trio",
        native_cancels: bool = False,
        steps_max: int = STEPS_MAX,
    ) -> Campaign:
        """Play the kept tape, if there is one, then run the seeds; fail the test if a run fails.

        The arguments and the result are those of `run_campaign`.
        """
        __tracebackhide__ = True
        self._calls += 1
        path = self._path()
        if path.exists():
            try:
                kept = TapeFile.read(path)
            except ValueError as error:
                pytest.fail(f"{error}; delete it to run seeds", pytrace=False)
            except OSError as error:
                pytest.fail(f"the tape {path} cannot be read: {error.strerror}", pytrace=False)
            run = kept.play(world, steps_max=steps_max)
            if not run.ok:
                pytest.fail(f"the tape {path} still fails\n{run}", pytrace=False)
        campaign = run_campaign(
            world,
            seeds=seeds if self._seeds is None else self._seeds,
            first_seed=first_seed,
            processes=processes,
            backend=backend,
            native_cancels=native_cancels,
            steps_max=steps_max,
            tape=path,
        )
        if not campaign.ok:
            pytest.fail(str(campaign), pytrace=False)
        return campaign

    def _path(self) -> Path:
        name = _file_name(self._test)
        # No name has a plus, so the second call of one test is not the first call of another.
        return self._tapes / (f"{name}.json" if self._calls == 1 else f"{name}+{self._calls}.json")


def _file_name(test: str) -> str:
    """Return a name for the files of a test that no other test has.

    A name that is odd or long, as parameters can make it, is cut and ends in a checksum.
    """
    name = re.sub(r"[^\w.-]+", "-", test).strip("-")
    if _PLAIN.fullmatch(test) and len(name.encode()) <= _NAME_BYTES_MAX:
        return name
    begin = name.encode()[:_NAME_BYTES_MAX].decode(errors="ignore")
    return f"{begin}-{zlib.crc32(test.encode(errors='surrogatepass')):08x}"


@pytest.fixture
def simulated(request: pytest.FixtureRequest) -> Simulated:
    """Return a function that runs a simulated world in this test."""
    config = request.config
    tapes: Path | None = config.getoption("--simulate-tapes")
    return Simulated(
        request.node.nodeid,
        config.getoption("--simulate-seeds"),
        config.rootpath / _FOLDER if tapes is None else tapes,
    )
