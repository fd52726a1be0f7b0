"""`turnkeeper serve`: what it prints, whom it serves, and how it ends."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from typer.testing import CliRunner

from turnkeeper.actors.cli._app import app
from turnkeeper.actors.cli._serve import COLLECT_AFTER, FILES_MAX

from ..actors.gateway.node import client, install
from ..ports import free_port
from .command import COMMAND, first_line
from .gate import GATE, open_gate

pytestmark = pytest.mark.in_parts(3)

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_me.py"
BOUND_S = 120.0
HELLO = {"content": "hello"}


def command(*arguments: str) -> list[str]:
    return [*COMMAND, *arguments]


@contextmanager
def started(
    folder: Path, subcommand: str, *arguments: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a command that serves, at a port that is free; yields the address."""
    process = subprocess.Popen(
        command(subcommand, "--port", "0", *arguments),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = first_line(process)
        found = re.search(r"http://[^\s/]+", line)
        assert found is not None, line + process.stderr.read()
        yield found.group(), process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def served(
    folder: Path, agent: str, *arguments: str
) -> AbstractContextManager[tuple[str, subprocess.Popen[str]]]:
    return started(folder, "serve", agent, *arguments)


def send(address: str, body: object = HELLO, **headers: str) -> httpx.Response:
    return httpx.post(
        f"{address}/v1/conversations/alice/messages",
        json=body,
        headers={"Prefer": "wait=60", **headers},
        timeout=BOUND_S,
    )


def test_the_example_is_served_and_its_conversations_outlive_a_kill(tmp_path: Path) -> None:
    with served(tmp_path, f"{EXAMPLE}:support") as (address, _):
        sent = send(address, {"content": "Where is order 7?"}, **{"Idempotency-Key": "m1"})
        assert "left the warehouse" in sent.json()["end"]["reply"]

    assert (tmp_path / "chats.db").exists()
    with served(tmp_path, f"{EXAMPLE}:support") as (address, _):
        again = send(address, {"content": "Where is order 7?"}, **{"Idempotency-Key": "m1"})
        assert again.status_code == 200
        assert again.json()["end"] == sent.json()["end"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process that runs")
def test_a_file_that_is_closed_for_writing_is_told_and_a_restart_loses_nothing(
    tmp_path: Path,
) -> None:
    """As the runbook says: `/readyz` tells it and `/healthz` does not, and reads go on."""
    large = {"content": "Where is order 7? " + "x" * 60_000}
    with served(tmp_path, f"{EXAMPLE}:support") as (address, process):
        kept = send(address, **{"Idempotency-Key": "kept"})
        assert kept.status_code == 200
        limit = (tmp_path / "chats.db-wal").stat().st_size + 8_192
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        assert send(address, large, **{"Idempotency-Key": "lost"}).status_code == 504
        later = send(address, **{"Idempotency-Key": "later"})
        assert later.status_code == 503
        assert later.json()["type"] == "urn:turnkeeper:journal-unavailable"
        unready = httpx.get(f"{address}/readyz", timeout=BOUND_S)
        assert unready.status_code == 503
        assert unready.json()["type"] == "urn:turnkeeper:not-writing"
        assert httpx.get(f"{address}/healthz", timeout=BOUND_S).status_code == 200
        read = httpx.get(f"{address}/v1/conversations/alice/state", timeout=BOUND_S)
        assert read.json()["status"] == "finished"

        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=BOUND_S)
        assert process.returncode == 0
        assert re.search(r"journal cannot be used .* is closed for writing in this process", told)

    with served(tmp_path, f"{EXAMPLE}:support") as (address, _):
        assert send(address, **{"Idempotency-Key": "kept"}).json()["end"] == kept.json()["end"]
        again = send(address, large, **{"Idempotency-Key": "lost"})
        assert "left the warehouse" in again.json()["end"]["reply"]


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells the limits of another process"
)
def test_a_server_raises_its_soft_limit_of_files(tmp_path: Path) -> None:
    """It is 1,024 on many systems, and clients keep their connections for 75 seconds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        _, process = stack.enter_context(served(tmp_path, f"{EXAMPLE}:support"))
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)

    # Not to a hard limit of a billion, or none, as in containers.
    assert limits == (hard if 0 <= hard < FILES_MAX else FILES_MAX, hard)


COLLECTING = """
import gc
from turnkeeper import agent

@agent
async def told(turn):
    return str(gc.get_threshold()[0])
"""


@pytest.mark.parametrize(("own", "at"), [("", COLLECT_AFTER), ("gc.set_threshold(50_000)", 50_000)])
def test_a_server_looks_for_garbage_less_often_than_other_programs(
    tmp_path: Path, own: str, at: int
) -> None:
    """The requests and streams that wait hold many objects, and none of them is garbage.

    What the agent's module has set stays.
    """
    (tmp_path / "collecting.py").write_text(f"{COLLECTING}\n{own}\n")
    with served(tmp_path, "collecting.py:told") as (address, _):
        assert send(address).json()["end"]["reply"] == str(at)


DEADLY = """
import os

class Deadly:
    is_resumable = True

    async def run(self, turn):
        if turn.message.content == "poison":
            os._exit(3)
        await turn.say("alive")

deadly = Deadly()
"""


@pytest.mark.costly
def test_a_turn_that_ends_each_process_that_takes_it_up_can_be_ended(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(DEADLY)
    with served(tmp_path, "deadly.py:deadly") as (address, process):
        with contextlib.suppress(httpx.TransportError):
            send(address, {"content": "poison"}, **{"Idempotency-Key": "m1"})
        assert process.wait(BOUND_S) == 3

    with served(tmp_path, "deadly.py:deadly", "--end-unfinished") as (address, _):
        again = send(address, {"content": "poison"}, **{"Idempotency-Key": "m1"})
        assert again.json()["end"]["outcome"] == "interrupted"
        assert send(address).json()["end"]["reply"] == "alive"


@pytest.mark.costly
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_signal_drains_and_ends_each_stream_with_a_word(tmp_path: Path, backend: str) -> None:
    with served(tmp_path, f"{EXAMPLE}:support", "--backend", backend) as (address, process):
        assert send(address).json()["end"]["outcome"] == "completed"
        url = f"{address}/v1/conversations/alice/events"
        with httpx.stream("GET", url, timeout=BOUND_S) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if '"turn_ended"' in line)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data:")]
        assert process.wait(BOUND_S) == 0

    assert [json.loads(line.removeprefix("data:")) for line in rest] == [{"why": "draining"}]


@contextmanager
def draining_in_a_turn(address: str, process: subprocess.Popen[str]) -> Iterator[Iterator[str]]:
    """Begin a turn, tell the server to stop, and yield what follows of the turn's events."""
    httpx.post(f"{address}/v1/conversations/alice/messages", json=HELLO, timeout=BOUND_S)
    url = f"{address}/v1/conversations/alice/events"
    with httpx.stream("GET", url, timeout=BOUND_S) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if '"observation"' in line)
        process.send_signal(signal.SIGTERM)
        while httpx.get(f"{address}/readyz", timeout=BOUND_S).status_code == 200:
            pass
        yield lines


@pytest.mark.costly
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("is_hurried", [False, True])
def test_a_turn_may_end_within_the_grace_and_a_second_signal_ends_the_grace(
    tmp_path: Path, backend: str, *, is_hurried: bool
) -> None:
    (tmp_path / "slow.py").write_text(AGENT)
    arguments = ("--backend", backend, "--grace", "600")
    with served(tmp_path, "slow.py:slow", *arguments) as (address, process):
        with draining_in_a_turn(address, process) as lines:
            if is_hurried:
                process.send_signal(signal.SIGTERM)
            else:
                open_gate(tmp_path)
            rest = [line for line in lines if line.startswith("data:")]
        assert process.wait(BOUND_S) == 0

    assert json.loads(rest[-1].removeprefix("data:")) == {"why": "draining"}
    assert any("All is well." in line for line in rest) is not is_hurried


@pytest.mark.costly
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_server_drains_also_if_its_standard_error_is_closed(tmp_path: Path, backend: str) -> None:
    (tmp_path / "slow.py").write_text(AGENT)
    arguments = ("--backend", backend, "--grace", "600")
    with served(tmp_path, "slow.py:slow", *arguments) as (address, process):
        assert process.stderr is not None
        assert process.stderr.readline() == "turnkeeper: conversations in chats.db\n"
        assert "inspector at" in process.stderr.readline()
        process.stderr.close()
        with draining_in_a_turn(address, process) as lines:
            open_gate(tmp_path)
            rest = [line for line in lines if line.startswith("data:")]
        assert process.wait(BOUND_S) == 0

    assert any("All is well." in line for line in rest)


def test_a_grace_without_an_end_is_refused_at_the_start(tmp_path: Path) -> None:
    arguments = ["serve", f"{EXAMPLE}:support", "--grace", "inf"]

    refused = CliRunner().invoke(app, [*arguments, "--db", str(tmp_path / "chats.db")])

    assert refused.exit_code == 2
    assert "'--grace': must be a finite number" in refused.stderr


@pytest.mark.costly
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_ipv6_address_is_served_under_its_own_name(tmp_path: Path, backend: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("without IPv6")
    arguments = ("--host", "::1", "--backend", backend)
    with served(tmp_path, f"{EXAMPLE}:support", *arguments) as (address, _):
        assert address.startswith("http://[::1]:")
        assert send(address).status_code == 200
        foreign = httpx.get(f"{address}/healthz", headers={"Host": "[::2]"}, timeout=BOUND_S)
        assert foreign.status_code == 421


@pytest.mark.costly
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_target_that_is_a_whole_address_is_served_as_its_path(
    tmp_path: Path, backend: str
) -> None:
    """RFC 9112, 3.2.2: and its host counts in place of the header's."""
    with served(tmp_path, f"{EXAMPLE}:support", "--backend", backend) as (address, _):
        port = int(address.rpartition(":")[2])

        def status(target: str, host: str) -> int:
            with socket.create_connection(("127.0.0.1", port), BOUND_S) as client:
                head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
                client.sendall(head.encode())
                with client.makefile("rb") as reply:
                    return int(reply.readline().split()[1])

        assert send(address).status_code == 200
        for path in ("/healthz", "/v1/conversations/alice/events?live=false"):
            assert status(f"{address}{path}", "localhost") == 200
            assert status(f"HTTP://LOCALHOST:{port}{path}", "evil.example") == 200
            assert status(f"http://evil.example{path}", "localhost") == 421
        assert status(address, "localhost") == status("/", "localhost")


def test_a_token_that_was_made_lets_its_principal_in_and_no_other(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["token", "alice", "--file", str(tmp_path / "tokens.txt")])
    assert made.exit_code == 0
    token = made.stdout.strip()
    assert token not in (tmp_path / "tokens.txt").read_text()

    with served(tmp_path, f"{EXAMPLE}:support", "--token-file", "tokens.txt") as (address, _):
        assert send(address).status_code == 401
        assert send(address, Authorization=f"Bearer {token}").status_code == 200


def test_without_tokens_only_loopback_is_served(tmp_path: Path) -> None:
    arguments = ["serve", f"{EXAMPLE}:support", "--host", "0.0.0.0"]

    refused = CliRunner().invoke(app, [*arguments, "--db", str(tmp_path / "chats.db")])

    assert refused.exit_code == 2
    assert "only loopback is served" in refused.stderr
    assert not (tmp_path / "chats.db").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--postgres", ""], "--postgres takes the URL of a database"),  # of a variable not set
        (["--postgres", "chats"], "--postgres takes the URL of a database"),
        (["--postgres", "host=db password=secret"], "--postgres takes the URL of a database"),
        (["--db", "postgresql://db/chats"], "give the URL of a database as --postgres"),
        (["--db", "'postgresql://a:b@db/chats'"], "give the URL of a database as --postgres"),
        (["--db", "host=db password=secret"], "a database is named by its URL"),
        (["--db", "chats.db", "--postgres", "postgresql://db/chats"], "name two journals"),
        (["--lease", "15"], "--lease is for a database, and chats.db is a file"),
        (["--database-wait", "1"], "--database-wait is for a database, and chats.db is a file"),
    ],
)
def test_conversations_are_not_kept_in_a_file_if_a_database_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    """It served from a file of that name, and said that they are in PostgreSQL."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:  # if it is not refused, it ends here
        port = str(taken.getsockname()[1])
        refused = CliRunner().invoke(
            app, ["serve", f"{EXAMPLE}:support", "--port", port, *arguments]
        )

    assert refused.exit_code == 2
    assert said in refused.stderr
    assert "secret" not in refused.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "place", ["nowhere.py:agent", "no_such_module:agent", f"{EXAMPLE}:nothing", "serve_me"]
)
def test_an_agent_that_is_not_there_is_told_in_one_line(tmp_path: Path, place: str) -> None:
    refused = CliRunner().invoke(app, ["serve", place, "--db", str(tmp_path / "chats.db")])

    assert refused.exit_code == 2
    assert len(refused.stderr.splitlines()) == 1


AGENT = (
    GATE
    + '''
from turnkeeper.actors import ModelResponse, ScriptedModel, ToolAgent, ToolCall
from turnkeeper.actors.events import UserMessageEvent


async def answer(request):
    if isinstance(request.view[-1], UserMessageEvent):
        return ModelResponse("Let me see.", calls=[ToolCall("look")])
    await gate()
    return "All is well."


async def look() -> str:
    """Look."""
    return "seen"


slow = ToolAgent(ScriptedModel(answer), [look])
'''
)


LOADED = """
import sys
from turnkeeper.actors.cli import _app, _serve

def watched(**_):
    print(*(name for name in sys.argv.pop().split() if name in sys.modules))
    sys.exit()

_serve.Runtime = watched
_app.app(sys.argv[1:-1])
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_serves_is_loaded_before_the_event_loop_is_watched(
    tmp_path: Path, backend: str
) -> None:
    """From a cold disk this takes seconds, and would be reported as code that blocks the loop."""
    server = {"asyncio": "uvicorn", "trio": "hypercorn"}[backend]
    loaded = f"fastapi {server} turnkeeper.actors.conversations.conversations"
    arguments = ("serve", f"{EXAMPLE}:support", "--port", "0", "--backend", backend, loaded)
    ran = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert ran.stdout.splitlines()[-1:] == [loaded], ran.stderr


BLOCKING = """
import logging
import threading
from turnkeeper import agent

is_told = threading.Event()

class Told(logging.StreamHandler):
    def emit(self, record):
        super().emit(record)
        is_told.set()

logging.getLogger("turnkeeper.runtime").addHandler(Told())

@agent
async def support(turn):
    is_told.wait(20)
"""


def test_the_operator_is_told_of_an_agent_that_blocks_every_conversation(tmp_path: Path) -> None:
    (tmp_path / "blocking.py").write_text(BLOCKING)
    with served(tmp_path, "blocking.py:support") as (address, process):
        send(address)
        process.terminate()
        assert process.stderr is not None
        said = process.stderr.read()
    assert "event loop blocked" in said
    assert "blocking.py" in said


def test_a_client_whose_server_was_killed_comes_back_to_the_same_turn(tmp_path: Path) -> None:
    """Npm's stock client; the turn goes on in the next process, and is shown once."""
    node, port = install(), str(free_port())
    (tmp_path / "slow.py").write_text(AGENT)

    async def talk() -> None:
        async with client(node, "client.mjs") as program:
            with served(tmp_path, "slow.py:slow", "--port", port) as (address, process):
                await program.do("open", id="chat", api=f"{address}/v1/ai-sdk/chat")
                await program.do("send", text="hello", id="m1")
                with anyio.fail_after(BOUND_S):
                    while "seen" not in json.dumps(shown := await program.do("show")):
                        pass
                process.kill()
                shown = await program.do("done")
                assert shown["status"] == "error"
            with served(tmp_path, "slow.py:slow", "--port", port) as (address, _):
                await program.do("resume")
                while len((shown := await program.do("show"))["statuses"]) < 2:
                    assert shown["status"] != "ready", shown
                open_gate(tmp_path)
                shown = await program.do("done")
                async with httpx.AsyncClient(base_url=address, timeout=BOUND_S) as http:
                    path = "/v1/conversations/chat/messages?shape=ai-sdk"
                    transcript = await http.get(path)

        assert shown["statuses"] == [200, 200]
        assert shown["messages"] == transcript.json()["messages"]
        texts = [part["text"] for part in shown["messages"][1]["parts"] if part["type"] == "text"]
        assert texts == ["Let me see.", "All is well."]

    anyio.run(talk)


def test_a_client_that_resumes_outlives_its_server_in_the_middle_of_an_answer(
    tmp_path: Path,
) -> None:
    """A stock AG-UI client with the subclass of the docs; it is told of nothing."""
    node, port = install(), str(free_port())
    (tmp_path / "slow.py").write_text(AGENT)

    async def talk() -> None:
        async with client(node, "ag_ui.mjs") as program:
            with served(tmp_path, "slow.py:slow", "--port", port) as (address, process):
                url = f"{address}/v1/ag-ui"
                await program.do("open", threadId="chat", url=url, resumes=True)
                await program.do("send", text="hello", id="m1", runId="r1")
                with anyio.fail_after(BOUND_S):
                    while "seen" not in json.dumps(shown := await program.do("show")):
                        pass
                process.kill()
                process.wait()
            with served(tmp_path, "slow.py:slow", "--port", port) as (address, _):
                with anyio.fail_after(BOUND_S):
                    while len((await program.do("show"))["statuses"]) < 2:
                        pass
                open_gate(tmp_path)
                shown = await program.do("done")
                async with httpx.AsyncClient(base_url=address, timeout=BOUND_S) as http:
                    path = "/v1/conversations/chat/messages?shape=ag-ui"
                    transcript = await http.get(path)

        assert shown["statuses"] == [200, 200]
        assert shown["messages"] == transcript.json()["messages"]
        assert shown["types"].count("RUN_STARTED") == shown["types"].count("TOOL_CALL_START") == 1
        assert shown["messages"][-1]["content"] == "All is well."

    anyio.run(talk)
