"""Every example runs as it is, to its end, and says nothing on standard error."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert ran.stderr == ""
    assert ran.returncode == 0
    assert ran.stdout.strip()


def test_an_application_that_is_told_to_stop_ends_its_streams_first(tmp_path: Path) -> None:
    """Otherwise uvicorn waits for them, cuts them off, and reports each as an error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "--app-dir", EXAMPLES[0].parent, "--fd",
             str(listener.fileno()), "--timeout-graceful-shutdown", "20",
             "mount_gateway:application"],
            cwd=tmp_path,
            pass_fds=[listener.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
    with server:
        try:
            here = f"http://127.0.0.1:{port}/chat/v1/conversations/first/events"
            session = {"X-Session": "session-of-alice"}
            with httpx.stream("GET", here, headers=session, timeout=60) as stream:
                lines = stream.iter_lines()
                next(lines)
                server.terminate()
                rest = list(lines)
            _, said = server.communicate(timeout=60)
        finally:
            server.kill()

    assert 'data: {"why":"draining"}' in rest
    assert "Finished server process" in said
    assert "ERROR" not in said
