"""`turnkeeper serve` as several machines on one PostgreSQL: a kill, a hand-over, and options."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tests import postgres
from tests.ports import free_port
from turnkeeper.actors.cli._app import app

from .command import COMMAND, first_line
from .gate import GATE, open_gate

pytestmark = [pytest.mark.costly, pytest.mark.in_parts(2)]

BOUND_S = 120.0
LEASE_S = "3"

AGENT = (
    GATE
    + """
import os

class Support:
    is_resumable = True

    async def run(self, turn):
        text = turn.message.content
        if text.startswith("wait"):
            Path(f"reached-{os.getpid()}").touch()
            await gate()
        if text.startswith("piece"):
            await turn.stream(self.pieces(text))
        else:
            await turn.say(f"a({text})")

    async def pieces(self, text):
        yield "a("
        await gate()
        yield f"{text})"

support = Support()
"""
)


@dataclass
class Machine:
    process: subprocess.Popen[str]
    address: str

    def send(self, text: str, key: str, **headers: str) -> httpx.Response:
        return httpx.post(
            f"{self.address}/v1/conversations/alice/messages",
            json={"content": text},
            headers={"Idempotency-Key": key, **headers},
            timeout=BOUND_S,
        )

    def answered(self, text: str, key: str) -> None:
        """Send until it is answered, as a client does."""
        while True:
            reply = self.send(text, key, Prefer="wait=30")
            if reply.status_code == 200 and reply.json()["end"] is not None:
                assert reply.json()["end"]["reply"] == f"a({text})", reply.text
                return
            assert reply.status_code in (200, 202, 503, 504), reply.text

    def log(self) -> list[dict[str, object]]:
        url = f"{self.address}/v1/conversations/alice/events"
        reply = httpx.get(url, headers={"Accept": "application/json"}, timeout=BOUND_S)
        found: list[dict[str, object]] = reply.json()["events"]
        return found


@contextmanager
def machine(folder: Path, schema: str, backend: str) -> Iterator[Machine]:
    arguments = (
        f"--postgres={postgres.conninfo()}",
        f"--schema={schema}",
        "--port=0",
        "--node-address=http://127.0.0.1:0",
        "--node-key-file=node.keys",
        f"--lease={LEASE_S}",
        f"--backend={backend}",
        "--grace=60",
    )
    process = subprocess.Popen(
        [*COMMAND, "serve", "support.py:support", *arguments],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = first_line(process)
        found = re.search(r"http://\S+", line)
        assert found is not None, line + process.stderr.read()
        yield Machine(process, found.group())
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@contextmanager
def machines(folder: Path, backend: str) -> Iterator[tuple[Machine, Machine, str]]:
    (folder / "support.py").write_text(AGENT)
    (folder / "node.keys").write_text("# the keys of the machines\n" + "k" * 64 + "\n")
    with ExitStack() as stack:
        schema = stack.enter_context(postgres.schema())
        first = stack.enter_context(machine(folder, schema, backend))
        second = stack.enter_context(machine(folder, schema, backend))
        yield first, second, schema


def said(log: list[dict[str, object]]) -> list[str]:
    """What was said, oldest first, and how each turn ended."""
    found = []
    for each in log:
        event = each["event"]
        assert isinstance(event, dict)
        if event["kind"] in ("user_message", "agent_message"):
            found.append(event["content"])
        elif event["kind"] == "turn_ended":
            found.append(event["outcome"])
    return found


PAGE = Path(__file__).parents[2] / "docs" / "machines.md"
PROGRAM = re.compile(r'^```python title="machine.py"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@contextmanager
def application(folder: Path) -> Iterator[Machine]:
    """Run the program of the page in the folder, until it has both listeners."""
    port, url = free_port(), f"http://127.0.0.1:{free_port()}"
    environment = {**os.environ, "DATABASE_URL": postgres.conninfo(), "NODE_ADDRESS": url}
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "machine:application", f"--port={port}", "--ws=none"],
        cwd=folder,
        env={**environment, "PYTHONSAFEPATH": ""},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        listening: set[str] = set()
        lines: list[str] = []
        while len(listening) < 2:
            lines.append(first_line(process))
            listening.update(re.findall(r"running on (http://\S+)", lines[-1]))
        assert listening == {f"http://127.0.0.1:{port}", url}, lines
        yield Machine(process, f"http://127.0.0.1:{port}/chat")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_the_application_of_the_page_forwards_and_hands_over_when_it_is_told_to_stop(
    tmp_path: Path,
) -> None:
    found = PROGRAM.search(PAGE.read_text())
    assert found is not None
    (tmp_path / "support.py").write_text(AGENT)
    (tmp_path / "node.keys").write_text("k" * 64 + "\n")
    with postgres.schema() as schema, ExitStack() as stack:
        program = found[1].replace(
            "address=address)\nconv", f"address=address, schema={schema!r})\nconv"
        )
        (tmp_path / "machine.py").write_text(program)
        first, second = (stack.enter_context(application(tmp_path)) for _ in range(2))
        assert first.send("one", "m1", Prefer="wait=30").json()["end"]["reply"] == "a(one)"
        assert second.send("two", "m2", Prefer="wait=30").json()["end"]["reply"] == "a(two)"

        # The second machine passes on what the first one writes, and so has a stream open there.
        url = f"{second.address}/v1/conversations/alice/events?pieces=true"
        with httpx.stream("GET", url, timeout=BOUND_S) as stream:
            second.send("piece by piece", "m3")
            lines = stream.iter_lines()
            next(line for line in lines if '"offset"' in line)
            open_gate(tmp_path)
            next(line for line in lines if "a(piece by piece)" in line)
            first.process.terminate()
            first.process.wait(BOUND_S)

        reply = second.send("three", "m4", Prefer="wait=30")
        assert reply.json()["end"]["reply"] == "a(three)", "it waited for the first one's lease"
        assert said(second.log()) == [
            *("one", "a(one)", "completed"),
            *("two", "a(two)", "completed"),
            *("piece by piece", "a(piece by piece)", "completed"),
            *("three", "a(three)", "completed"),
        ]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_killed_machines_turn_goes_on_at_another_and_its_reader_sees_no_gap(
    tmp_path: Path, backend: str
) -> None:
    with machines(tmp_path, backend) as (first, second, _):
        first.answered("one", "m1")
        second.send("wait", "m2")  # carried out by the first
        reached = tmp_path / f"reached-{first.process.pid}"
        while not reached.exists():
            assert first.process.poll() is None

        url = f"{second.address}/v1/conversations/alice/events?pieces=true"
        with httpx.stream("GET", url, timeout=BOUND_S) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if '"wait"' in line)
            first.process.kill()
            open_gate(tmp_path)
            # No client asks: the second one looks, and takes it up when the lease has run out.
            next(line for line in lines if "a(wait)" in line)
            next(line for line in lines if '"turn_ended"' in line)

        second.answered("three", "m3")
        log = second.log()
        assert [each["seq"] for each in log] == list(range(1, len(log) + 1))
        assert said(log) == [
            *("one", "a(one)", "completed"),
            *("wait", "a(wait)", "completed"),
            *("three", "a(three)", "completed"),
        ]


def test_a_machine_that_is_told_to_stop_hands_over_while_its_clients_go_on(tmp_path: Path) -> None:
    with machines(tmp_path, "asyncio") as (first, second, schema):
        first.answered("one", "m1")
        url = f"{second.address}/v1/conversations/alice/events"
        with httpx.stream("GET", url, timeout=BOUND_S) as stream:
            lines = stream.iter_lines()
            first.process.send_signal(signal.SIGTERM)
            second.answered("two", "m2")
            assert first.process.wait(BOUND_S) == 0
            with machine(tmp_path, schema, "asyncio") as third:
                third.answered("three", "m3")
                seqs = []
                for line in lines:
                    if line.startswith("id:"):
                        seqs.append(int(line.removeprefix("id:").partition(".")[0]))
                    if "a(three)" in line:
                        break
                assert seqs == list(range(1, len(seqs) + 1))
                assert said(third.log())[:-1] == [
                    *("one", "a(one)", "completed", "two", "a(two)", "completed"),
                    *("three", "a(three)"),
                ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--node-address", "http://10.0.0.3:1"], "go together"),
        (["--node-key-file", "node.keys"], "go together"),
        (["--node-address", "http://10.0.0.3:1", "--node-key-file", "node.keys"], "--postgres"),
        (["--node-listen", "0.0.0.0:1"], "needs --node-address"),
    ],
)
def test_options_of_a_machine_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "node.keys").write_text("k" * 64)
    refused = CliRunner().invoke(app, ["serve", "support.py:support", *arguments])
    assert refused.exit_code == 2
    assert told in refused.stderr


def test_a_key_that_is_short_or_an_address_with_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "support.py").write_text(AGENT)
    for key, url in (("short", "http://127.0.0.1:0"), ("k" * 64, "http://127.0.0.1:0/path")):
        (tmp_path / "node.keys").write_text(key)
        refused = CliRunner().invoke(
            app,
            [
                *("serve", "support.py:support", "--postgres", "postgresql:///none"),
                *("--node-address", url, "--node-key-file", "node.keys"),
            ],
        )
        assert refused.exit_code == 2
        assert "a node" in refused.stderr
        gc.collect()  # a listener that was left open would warn, and fail this test
