"""The command line as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self

__all__ = ["COMMAND", "WarmCommand", "first_line"]

FIRST_LINE_BOUND_S = 120.0

# A shell without job control starts background jobs with SIGINT ignored, and children inherit it.
_PROGRAM = """
import signal

signal.signal(signal.SIGINT, signal.default_int_handler)

from turnkeeper.actors.cli import main

main()
"""

COMMAND = (sys.executable, "-P", "-c", _PROGRAM)

# Each line of standard input is a command. It runs in a fork, which has everything imported and
# nothing started, with its own arguments, environment, output and limit on the size of files. An
# output that is null is a pipe whose reader has left.
_WARM = """
import json, os, resource, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)

from turnkeeper.actors.cli import main
import turnkeeper.actors.cli._app

for line in sys.stdin:
    order = json.loads(line)
    process = os.fork()
    if process:
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, order["out"], os.O_WRONLY | os.O_APPEND),
        (2, order["err"], os.O_WRONLY | os.O_APPEND),
    ):
        if path is None:
            reading, opened = os.pipe()
            os.close(reading)
        else:
            opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = open(0, closefd=False)
    sys.argv = ["turnkeeper", *order["arguments"]]
    os.environ.update(order["env"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if order["file_bytes_max"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes_max"], before[1]))
    try:
        main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)  # coverage writes its file at the exit
    sys.exit()
"""


def first_line(process: subprocess.Popen[str]) -> str:
    """Return the first line of a process's standard error, with which it says that it has begun.

    One that says nothing within a minute is killed.
    """
    assert process.stderr is not None
    killer = threading.Timer(FIRST_LINE_BOUND_S, process.kill)
    killer.start()
    try:
        line = process.stderr.readline()
    finally:
        killer.cancel()
    assert line, f"no line of {process.args!r}, which ended or was killed as it said nothing"
    return line


class WarmCommand:
    """Runs commands in forks of one process, which has loaded them: a tenth of a start each.

    `env` is added to the environment of that process.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = {**os.environ, **(env or {})}

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="turnkeeper-commands-")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _WARM],
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()
        self._folder.cleanup()

    def run(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        file_bytes_max: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        out = Path(self._folder.name, "out")
        out.write_bytes(b"")
        ended = self.run_into(out, *arguments, env=env, file_bytes_max=file_bytes_max)
        return subprocess.CompletedProcess(
            arguments, ended.returncode, out.read_text(), ended.stderr
        )

    def run_into(
        self,
        out: Path | None,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        file_bytes_max: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; its output goes into a file, or a pipe that has no reader."""
        err = Path(self._folder.name, "err")
        err.write_bytes(b"")
        order = {
            "arguments": arguments,
            "env": dict(env or {}),
            "file_bytes_max": file_bytes_max,
            "out": None if out is None else os.fspath(out),
            "err": os.fspath(err),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, stderr=err.read_text())
