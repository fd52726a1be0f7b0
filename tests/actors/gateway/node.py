"""The npm packages that the tests talk with, and a program in node that is told what to do."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import anyio
import pytest
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

HERE = Path(__file__).parent / "npm"
LINE_BYTES_MAX = 64 << 20
INSTALL_BOUND_S = 140.0
"""How long npm may take; two processes that try one after the other stay below a test's bound."""
ANSWER_BOUND_S = 120.0
"""How long a command may take; `done` waits for the end of a turn."""


def without(what: str) -> NoReturn:
    """Skip; but the continuous build has everything, and fails."""
    if os.environ.get("TURNKEEPER_CI"):
        pytest.fail(f"the continuous build is without {what}")
    pytest.skip(f"without {what}")


def install(folder: Path = HERE) -> str:
    """Install the packages of the lock, once for all processes; return the program `node`."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        without("node and npm")
    with (folder / "package-lock.json").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "node_modules" / ".lock-installed"
        if not done.exists() or done.read_bytes() != lock.read():
            command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            try:
                ran = subprocess.run(
                    command,
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=INSTALL_BOUND_S,
                )
            except subprocess.TimeoutExpired as error:
                without(f"the packages from npm: {error}")
            if ran.returncode:
                without(f"the packages from npm: {ran.stderr[-500:]}")
            shutil.copy(folder / "package-lock.json", done)
    return node


class Client:
    """The program, with one command at a time."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin = process.stdin
        self._lines = BufferedByteReceiveStream(process.stdout)

    async def do(self, op: str, chat: str = "a", **options: object) -> dict[str, Any]:
        """Carry out a command; return what the client shows then."""
        line = json.dumps({"op": op, "chat": chat, **options}) + "\n"
        try:
            with anyio.fail_after(ANSWER_BOUND_S):
                await self._stdin.send(line.encode())
                reply = await self._lines.receive_until(b"\n", LINE_BYTES_MAX)
        except (TimeoutError, anyio.IncompleteRead, anyio.BrokenResourceError) as error:
            raise AssertionError(f"node has not carried out {op!r} of {chat!r}") from error
        shown: dict[str, Any] = json.loads(reply)
        return shown


@asynccontextmanager
async def client(node: str, program: str) -> AsyncIterator[Client]:
    """Run a program of the folder `npm`."""
    async with await anyio.open_process([node, program], cwd=HERE, stderr=None) as process:
        try:
            yield Client(process)
        finally:
            process.kill()
