"""`turnkeeper torture` with servers that it starts and kills."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests import postgres
from tests.drawn import drawn
from tests.ports import free_port
from turnkeeper.actors.cli._app import app

from .command import COMMAND, first_line

pytestmark = pytest.mark.in_parts(4)

EXAMPLE = Path(__file__).parents[2] / "examples" / "torture_me.py"
FORGETFUL = Path(__file__).parent / "forgetful_server.py"
SMALL = ("--users", "6", "--messages", "8", "--seed", "3", "--json")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["torture", *map(str, arguments)])


def report_of(result: Result) -> dict[str, Any]:
    assert result.stdout, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.fixture
def port() -> int:
    return free_port()


def serve(port: int, folder: Path, *arguments: str) -> str:
    """Return the command that serves the example."""
    command = (*COMMAND, "serve", f"{EXAMPLE}:echo", "--port", str(port))
    return shlex.join((*command, "--db", str(folder / "chats.db"), *arguments))


def test_a_server_that_is_killed_loses_nothing(tmp_path: Path, port: int) -> None:
    history = tmp_path / "history.jsonl"
    server = ("--server", serve(port, tmp_path), "--kills", "2")

    result = run(f"http://127.0.0.1:{port}", *SMALL, *server, "--history", history)

    report = report_of(result)
    assert report["findings"] == []
    assert result.exit_code == 0
    assert report["totals"]["kills"] == 2
    assert report["totals"]["known"] > 20
    checked = run("--check", history, "--json")
    assert checked.exit_code == 0
    assert report_of(checked) == report


@pytest.mark.slow
def test_three_machines_that_are_killed_and_stopped_in_turn_lose_nothing(tmp_path: Path) -> None:
    key_file = tmp_path / "node.keys"
    key_file.write_text("k" * 64)
    ports = [free_port() for _ in range(3)]
    servers: list[str] = []
    with postgres.schema() as schema:
        for each in ports:
            arguments = (
                *("--postgres", postgres.conninfo(), "--schema", schema, "--lease", "2"),
                *("--node-address", "http://127.0.0.1:0", "--node-key-file", str(key_file)),
            )
            servers += ["--server", serve(each, tmp_path, *arguments)]
        urls = [f"http://127.0.0.1:{each}" for each in ports]

        disturbed = ("--kills", "4", "--seed", "6")  # two are killed, and two told to stop
        result = run(*urls, *SMALL, *servers, *disturbed, "--protocol", "all")

    report = report_of(result)
    assert report["findings"] == []
    assert result.exit_code == 0
    assert report["totals"]["kills"] == report["totals"]["stops"] == 2
    assert report["totals"]["known"] > 20


def test_each_of_several_servers_has_a_command_or_none_has() -> None:
    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    refused = run(*urls, "--server", "x")
    assert refused.exit_code == 2
    assert "one --server for each URL" in refused.stderr
    refused = run("http://127.0.0.1:1/a", "http://127.0.0.1:2/b")
    assert refused.exit_code == 2
    assert "the same path" in refused.stderr


@pytest.mark.parametrize("pid", ["0", "-1", str(2**31)])
def test_what_is_no_number_of_a_process_is_refused(pid: str) -> None:
    """0 and -1 stand for many processes, and all would be killed. The URL is refused too."""
    refused = run("nowhere", "--kill", pid, *SMALL)
    assert refused.exit_code == 2
    assert "Invalid value for '--kill'" in refused.stderr


def test_a_process_that_is_not_there_is_refused_before_the_run() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    refused = run("http://127.0.0.1:1", "--kill", str(ended.pid), *SMALL)
    assert refused.exit_code == 2
    assert refused.stderr == (
        f"turnkeeper: --kill {ended.pid}: No such process; give the process of the server\n"
    )


@pytest.mark.sweep
@pytest.mark.parametrize("fault", drawn(["early", "last"], 1))
def test_a_server_that_forgets_at_a_kill_is_found_out(
    tmp_path: Path, port: int, fault: str
) -> None:
    command = [sys.executable, "-P", str(FORGETFUL), fault, str(port), str(tmp_path)]
    server = ("--server", shlex.join(command), "--kills", "2")

    result = run(f"http://127.0.0.1:{port}", *SMALL, *server)

    assert result.exit_code == 1
    assert report_of(result)["counts"]["lost"]


def test_a_server_that_another_one_starts_again_is_killed_once(tmp_path: Path, port: int) -> None:
    server = shlex.split(serve(port, tmp_path))
    first = subprocess.Popen(server, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    first_line(first)
    processes: list[subprocess.Popen[str]] = [first]

    def start_again() -> None:
        first.wait()
        processes.append(subprocess.Popen(server, stderr=subprocess.DEVNULL, text=True))

    keeper = threading.Thread(target=start_again)
    keeper.start()
    try:
        result = run(f"http://127.0.0.1:{port}", *SMALL, "--kill", str(first.pid))
    finally:
        first.kill()
        keeper.join()
        processes[-1].kill()
        processes[-1].wait()
        first.stderr.close()

    assert result.exit_code == 0, result.output
    assert report_of(result)["totals"]["kills"] == 1


def test_a_server_that_does_not_start_is_told_in_one_line(tmp_path: Path, port: int) -> None:
    command = shlex.join((sys.executable, "-c", "raise SystemExit('no such thing')"))

    result = run(f"http://127.0.0.1:{port}", *SMALL, "--server", command)

    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        f"turnkeeper: nothing was served at http://127.0.0.1:{port} before the server ended, "
        "with 1: no such thing"
    )


def test_a_server_that_cannot_be_killed_is_not_tortured_by_kills() -> None:
    """They were left out, and the run went well."""
    refused = run("http://127.0.0.1:1", *SMALL, "--kills", "2")
    assert refused.exit_code == 2
    assert "give its command as --server" in refused.stderr


def test_an_address_where_nothing_is_served_cannot_be_used(port: int) -> None:
    result = run(f"http://127.0.0.1:{port}", *SMALL)

    assert result.exit_code == 2
    assert "cannot be connected to" in result.stderr


def test_the_servers_file_of_hashes_is_not_taken_for_tokens(tmp_path: Path) -> None:
    """Both options are called --token-file; each request was answered with 401."""
    (tmp_path / "tokens.txt").write_text(f"{'a' * 64} alice read,write\n")

    result = run("http://127.0.0.1:1", *SMALL, "--token-file", tmp_path / "tokens.txt")

    assert result.exit_code == 2
    assert "does not have one token on each line" in result.stderr


def test_a_history_that_is_none_cannot_be_checked(tmp_path: Path) -> None:
    (tmp_path / "none").write_text('{"record": "nothing"}\n')

    result = run("--check", tmp_path / "none")

    assert result.exit_code == 2
    assert "line 1" in result.stderr


def is_served(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(
    ("how", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)],
)
def test_stopping_it_ends_its_server_too(
    tmp_path: Path, port: int, how: signal.Signals, status: int
) -> None:
    history = tmp_path / "history.jsonl"
    arguments = [f"http://127.0.0.1:{port}", "--server", serve(port, tmp_path), "--kills", "0"]
    arguments += ["--seconds", "60", "--history", str(history)]
    with subprocess.Popen(
        [*COMMAND, "torture", *arguments], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while not is_served(port):
            assert process.poll() is None
        process.send_signal(how)
        assert process.wait(120) == status
        assert "stopped: the history is not whole" in process.stderr.read()
    assert not is_served(port)
    assert '"record":"began"' in history.read_text()


def test_a_second_signal_does_not_cut_short_what_the_first_one_ends() -> None:
    """A terminal that is closed, and some service managers, send SIGTERM and SIGHUP together."""
    program = """
import signal
from turnkeeper.actors.cli._exits import interrupted_by_signals

with interrupted_by_signals():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGHUP)
        print("whole", flush=True)
"""
    command = [sys.executable, "-P", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGTERM
    assert ended.stdout == "whole\n"
