"""Installs a release into empty environments, once for each extra, and tries what each promises.

Usage: python tools/try_install.py ARCHIVE [EXTRA …]. The archive is a wheel or a source
distribution. The environments are of the Python that runs this, and pip fetches what they need.
The first one has no extra ('' names it). In it, and in that of `cli`, each import or command that
needs another extra must fail and name that extra. Prints a line for each environment, and all that
is wrong there; exits with 1 if anything is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

CORE = """
import turnkeeper, turnkeeper.actors, turnkeeper.runtime, turnkeeper.runtime.testing
for face in (turnkeeper, turnkeeper.actors, turnkeeper.runtime, turnkeeper.runtime.testing):
    for name in face.__all__:
        getattr(face, name)
"""
POSTGRES = """
import anyio
from turnkeeper import PostgresJournal, TurnkeeperError, Unavailable

async def main():
    async with PostgresJournal("postgresql://127.0.0.1:1/none"):
        pass

try:
    anyio.run(main)
except Unavailable:
    pass
"""
SIMULATION = """
from turnkeeper.actors.simulation import run_campaign

assert run_campaign(0, seeds=1).failed == 0
"""

PROGRAMS: Mapping[str, str] = {
    "openai": "import turnkeeper.actors.models.openai",
    "anthropic": "import turnkeeper.actors.models.anthropic",
    "postgres": POSTGRES,
    "otel": "import turnkeeper.runtime.otel, turnkeeper.actors.integrations.otel",
    "openai-agents": "import turnkeeper.actors.integrations.openai_agents",
    "gateway": "import turnkeeper.actors.gateway, hypercorn, uvicorn",
    "mcp": "import turnkeeper.actors.integrations.mcp",
    "pydantic-ai": "import turnkeeper.actors.integrations.pydantic_ai",
    "simulation": SIMULATION,
    "torture": "import turnkeeper.actors.torture.torture",
    "report": "import turnkeeper.actors.cli._stress_report as r; assert r.can_draw()",
    "cli": "import turnkeeper.actors.cli._app",
}
"""A program for each extra, which runs if the extra is there."""

SILENT = {"torture", "report", "cli"}
"""Extras that only commands need: without them the command says so, and not an import."""

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "gateway": ("inspect", "none.db"),
    "postgres": ("show", "postgresql://127.0.0.1:1/none"),
    "report": ("stress", "--report", "page.html"),
    "simulation": ("simulate", "--seeds", "1"),
    "torture": ("torture",),
}
"""A command for each extra that some command needs beside `cli`."""


class Environment:
    """An environment that holds a release with one extra or none, and nothing else."""

    def __init__(self, folder: Path, archive: Path, extra: str) -> None:
        venv.create(folder, with_pip=True)
        self._folder = folder
        asked = f"{archive.resolve()}[{extra}]" if extra else str(archive.resolve())
        status, output = self.run("python", "-m", "pip", "install", "--quiet", asked)
        if status:
            sys.exit(f"it could not be installed with {extra or 'no extra'}:\n{output}")

    def run(self, program: str, *arguments: str) -> tuple[int, str]:
        """Run one of its programs; return its exit status, and all that it printed."""
        done = subprocess.run(
            [self._folder / "bin" / program, *arguments],
            cwd=self._folder,
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "COLUMNS": "300"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout.strip()

    def faults(self, program: str) -> Iterator[str]:
        """Yield a line for each program that should run here, and does not."""
        for code in (CORE, program):
            status, output = self.run("python", "-W", "error", "-c", code)
            if status:
                yield output
        status, output = self.run("python", "-m", "pip", "check")
        if status:
            yield output

    def silence(self, extra: str, *command: str) -> Iterator[str]:
        """Yield a line unless a command that lacks an extra names it."""
        status, output = self.run(*command)
        if status == 0 or f"turnkeeper[{extra}]" not in output:
            yield f"without the extra {extra}: {output or 'nothing is said'}"


def faults(archive: Path, extra: str, folder: Path) -> Iterator[str]:
    """Yield a line for each thing that is wrong with a release and one extra, or with none."""
    environment = Environment(folder, archive, extra)
    yield from environment.faults(PROGRAMS.get(extra, ""))
    if not extra:
        for other in PROGRAMS.keys() - SILENT:
            yield from environment.silence(other, "python", "-c", PROGRAMS[other])
        yield from environment.silence("cli", "turnkeeper", "--version")
    if extra == "cli":
        for other, command in COMMANDS.items():
            yield from environment.silence(other, "turnkeeper", *command)


def main() -> int:
    archive, extras = Path(sys.argv[1]), sys.argv[2:] or ["", *PROGRAMS]
    is_wrong = False
    for extra in extras:
        with TemporaryDirectory() as scratch:
            found = list(faults(archive, extra, Path(scratch)))
        print(f"{extra or 'no extra'}: {'wrong' if found else 'as promised'}", flush=True)
        for line in found:
            print(line, flush=True)
        is_wrong |= bool(found)
    return 1 if is_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
