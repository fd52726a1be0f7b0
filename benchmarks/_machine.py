"""Describes the machine, the versions and the load under which figures were measured.

The description has only facts that influence figures: the processor, the memory, the disk's fsync,
the kernel, the versions. It leaves out the machine's name, its paths and its user.
"""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter

ROOT = Path(__file__).parent.parent
PACKAGES = ("anyio", "trio", "pydantic", "structlog", "psycopg", "fastapi", "uvicorn")
_WRITES = 100


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the versions that the figures of one run were taken with."""

    cpu: str
    cores: int
    memory_gib: int
    system: str
    python: str
    fsync_us: float
    packages: Mapping[str, str] = field(default_factory=dict)


def look() -> Machine:
    """Describe this machine; the fsync is measured in the system's temporary folder."""
    return Machine(
        cpu=cpu_model(_text("/proc/cpuinfo")) or platform.machine(),
        cores=os.cpu_count() or 1,
        memory_gib=memory_gib(_text("/proc/meminfo")),
        system=f"{platform.system()} {kernel(platform.release())}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        fsync_us=_fsync_us(),
        packages={"sqlite": sqlite3.sqlite_version, **_installed()},
    )


def load() -> float:
    """Return how many programs ran or waited for a core, averaged over the last minute."""
    return os.getloadavg()[0]


def commit() -> str:
    """Return the commit, and if there are uncommitted changes; empty outside a clone."""
    if not (ROOT / ".git").exists():
        return ""
    found = _git("rev-parse", "--short=10", "HEAD")
    # Files that this run itself writes do not count as changes.
    changed = _git("status", "--porcelain", "--", ":!benchmarks/RESULTS.md", ":!*.svg")
    return f"{found}, with changes" if changed else found


def cpu_model(cpuinfo: str) -> str:
    """Return the processor's name from the text of `/proc/cpuinfo`, or nothing."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def memory_gib(meminfo: str) -> int:
    """Return the whole memory from the text of `/proc/meminfo`, or 0."""
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return round(int(line.split()[1]) / 2**20)
    return 0


def kernel(release: str) -> str:
    """Return the kernel's version, without the suffix that names who built it."""
    return release.partition("-")[0]


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # not Linux
        return ""


def _installed() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _fsync_us() -> float:
    """Return the median time to append 4 KiB to a file and sync it to the disk."""
    times = []
    with TemporaryFile() as file:
        for _ in range(_WRITES):
            began = perf_counter()
            file.write(b"x" * 4_096)
            file.flush()
            os.fsync(file.fileno())
            times.append((perf_counter() - began) * 1e6)
    return statistics.median(times)
