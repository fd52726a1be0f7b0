"""How far a whole sweep has come, and what it has left.

A sweep takes hours. So it says every while how many of its tests have ended, and about how long the
others take, by what the tests of their modules have taken. With `--done FILE` it writes each test
that has passed into the file, and leaves out those that it finds there: after an interruption it
goes on, and repeats what has failed. With `--part 2/3` it takes every third test, from the second.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

__all__ = ["Progress", "configure", "in_part", "part_of"]

T = TypeVar("T")

TOLD_EVERY_S = 60.0
_KNOWN = "turnkeeper_known"
"""What the processes of xdist are told of the tests that `--done` lists."""


def configure(config: pytest.Config, *, is_long: bool) -> None:
    """Have a run take what `--part` and `--done` leave it, and tell how far it is if it is long."""
    done: Path | None = config.getoption("--done")
    workers_input: dict[str, Any] | None = getattr(config, "workerinput", None)
    if workers_input is not None:
        known = frozenset(workers_input[_KNOWN])
    else:
        known = frozenset(done.read_text().splitlines() if done and done.exists() else ())
        if is_long or done is not None:
            processes = max(1, len(getattr(config.option, "tx", None) or ()))
            progress = Progress(partial(_say, config), done=done, processes=processes)
            config.pluginmanager.register(progress)
    config.pluginmanager.register(_Chosen(config.getoption("--part"), known))


def _say(config: pytest.Config, line: str) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        terminal.write(f"\n{line}\n")


class _Chosen:
    """A plugin that leaves tests out, after all others have."""

    def __init__(self, part: tuple[int, int] | None, known: frozenset[str]) -> None:
        self._part = part
        self._known = known

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        mine = items if self._part is None else in_part(items, self._part)
        kept = [item for item in mine if item.nodeid not in self._known]
        left_out = set(items).difference(kept)
        if left_out:
            config.hook.pytest_deselected(items=[item for item in items if item in left_out])
            items[:] = kept

    @pytest.hookimpl(optionalhook=True)
    # Any: it is of xdist, which need not be there.
    def pytest_configure_node(self, node: Any) -> None:  # noqa: ANN401
        """Have all processes leave out the same tests, also one that starts later."""
        node.workerinput[_KNOWN] = sorted(self._known)


def part_of(text: str) -> tuple[int, int]:
    """Return the part and the number of parts that an option names, such as `2/3`."""
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"--part {text}: it takes a part of how many, such as 2/3")
    return int(part), int(parts)


def in_part(tests: Sequence[T], part: tuple[int, int]) -> Sequence[T]:
    """Return the tests of this part; parts share the tests of every module."""
    number, parts = part
    return tests[number - 1 :: parts]


class Progress:
    """A plugin that counts tests as they end."""

    def __init__(
        self, say: Callable[[str], None], *, done: Path | None = None, processes: int = 1
    ) -> None:
        self._say = say
        self._done = done
        self._processes = processes
        self._left: Counter[str] = Counter()
        """How many tests of each module have not ended."""
        self._total = 0
        self._took: defaultdict[str, list[float]] = defaultdict(list)
        self._test_s: defaultdict[str, float] = defaultdict(float)
        """How long each test that runs has taken so far: its set-up, itself, its end."""
        self._failed: set[str] = set()
        self._began = self._told = time.monotonic()

    def begin(self, ids: Sequence[str]) -> None:
        """Take in which tests there are; each process of xdist tells the same."""
        self._left = Counter(_module(one) for one in ids)
        self._total = len(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        if not self._total:
            self.begin(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._test_s[name] += report.duration
        if report.failed:
            self._failed.add(name)
        if report.when != "teardown":
            return
        module = _module(name)
        self._took[module].append(self._test_s.pop(name))
        self._left[module] -= 1
        if self._done is not None and name not in self._failed:
            self._done.parent.mkdir(parents=True, exist_ok=True)
            with self._done.open("a") as file:
                file.write(f"{name}\n")
        now = time.monotonic()
        if now - self._told >= TOLD_EVERY_S:
            self._told = now
            self._say(f"{self.told(now - self._began)}; the last is of {module}")

    def told(self, elapsed_s: float) -> str:
        """Return how far this is, and how long it takes."""
        left = self._left.total()
        return (
            f"sweep: {self._total - left:,} of {self._total:,} tests, {len(self._failed)} failed, "
            f"{elapsed_s / 60:.0f} min; about {self.left_s() / 60:.0f} min more"
        )

    def left_s(self) -> float:
        """Return about how long the others take: as those of their modules, or as all so far."""
        ended = [took for each in self._took.values() for took in each]
        usual_s = sum(ended) / max(1, len(ended))
        means = {module: sum(took) / len(took) for module, took in self._took.items()}
        whole = sum(left * means.get(module, usual_s) for module, left in self._left.items())
        return whole / self._processes


def _module(name: str) -> str:
    return name.partition("::")[0]
