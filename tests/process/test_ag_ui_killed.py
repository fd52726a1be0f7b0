"""AG-UI clients through cuts and kills: they show the same as one whose run had neither."""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from turnkeeper.actors import Conversations, MemoryJournal, ScriptedModel, ToolAgent, gateway

from ..actors.gateway.node import Client, client, install
from .ag_ui_server import look, scripted

AT_ONCE = 10
"""The conversations that one kill hits."""
CUTS_MAX = 4
CUT_AFTER_BYTES_MAX = 4_000
KILL_AFTER_EVENTS_MAX = 120
Messages = list[dict[str, Any]]
Essence = list[tuple[object, ...]]


KILLS_MAX = 8
"""Of a batch: on a busy machine each restart may be killed before a client has come back."""
BOUND_S = 120.0
"""How long the server may take to start and to be killed."""
BATCH_BOUND_S = 600.0


class Server:
    """The server's process, and the number of its kills."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin = process.stdin
        self._lines = BufferedByteReceiveStream(process.stdout)
        self.kills = 0
        self.url = ""

    async def _line(self, awaited: str) -> str:
        try:
            with anyio.fail_after(BOUND_S):
                line = await self._lines.receive_until(b"\n", 1_000)
        except (TimeoutError, anyio.IncompleteRead) as error:
            raise AssertionError(f"the server has not said {awaited}; see its stderr") from error
        return line.decode()

    async def wait_until_started(self) -> None:
        port = int(await self._line("its port"))
        self.url = f"http://127.0.0.1:{port}/v1/ag-ui"

    async def kill(self) -> None:
        """Kill the process that serves, and start another."""
        await self._stdin.send(b"kill\n")
        assert await self._line("that it was killed") == "killed", "it had ended by itself"
        self.kills += 1


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Server]:
    # By its path: the tests run with the root off sys.path.
    program = Path(__file__).with_name("ag_ui_server.py")
    command = [sys.executable, str(program), str(folder)]
    async with await anyio.open_process(command, stderr=None) as process:
        server = Server(process)
        await server.wait_until_started()
        yield server
        assert process.stdin is not None
        await process.stdin.aclose()
        with anyio.fail_after(BOUND_S):
            await process.wait()


def essence(messages: Messages) -> Essence:
    """Return role, text and calls of messages: ids differ from run to run."""
    found: Essence = []
    for message in messages:
        functions = [call["function"] for call in message.get("toolCalls", [])]
        calls = [(function["name"], function["arguments"]) for function in functions]
        found.append((message["role"], message.get("content"), calls))
    return found


async def uncut(texts: list[str]) -> dict[str, Essence]:
    """Return what each of these messages leads to where nothing is cut or killed."""
    agent = ToolAgent(ScriptedModel(scripted), [look])
    found = {}
    async with Conversations(agent, journal=MemoryJournal()) as conversations:
        transport = httpx.ASGITransport(gateway.app(conversations))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for text in texts:
                await (await conversations[text].send(text)).reply()
                path = f"/v1/conversations/{text}/messages?shape=ag-ui"
                found[text] = essence((await http.get(path)).json()["messages"])
    return found


async def run_batch(program: Client, server: Server, texts: list[str]) -> int:
    """Run these messages at once, with cuts and kills; return how often clients came back."""
    draw = random.Random(texts[0])
    for text in texts:
        await program.do("open", text, threadId=text, url=server.url, resumes=True)
        for _ in range(draw.randrange(CUTS_MAX + 1)):
            await program.do("cut", text, bytes=draw.randrange(CUT_AFTER_BYTES_MAX))
    for text in texts:
        await program.do("send", text, text=text, id=f"m-{text}", runId=f"r-{text}")
    shown = await run_to_the_end(program, server, texts, draw)
    wanted = await uncut(texts)
    for text in texts:
        assert "error" not in shown[text], (text, shown[text])
        assert not shown[text]["warnings"], text
        assert shown[text]["outcome"] == "success", text
        assert essence(shown[text]["messages"]) == wanted[text], text
    return sum(len(each["statuses"]) - 1 for each in shown.values())


async def run_to_the_end(
    program: Client, server: Server, texts: list[str], draw: random.Random
) -> dict[str, dict[str, Any]]:
    """Kill the server now and then until each run has ended; return what its client shows then."""
    kill_at = draw.randrange(KILL_AFTER_EVENTS_MAX)
    kills_before = server.kills
    shown: dict[str, dict[str, Any]] = {}
    try:
        with anyio.fail_after(BATCH_BOUND_S):
            while True:
                shown = {text: await program.do("show", text) for text in texts}
                events = sum(len(each["types"]) for each in shown.values())
                if not any(each["isRunning"] for each in shown.values()):
                    return {text: await program.do("done", text) for text in texts}
                if events >= kill_at and server.kills < kills_before + KILLS_MAX:
                    await server.kill()
                    kill_at = events + draw.randrange(KILL_AFTER_EVENTS_MAX)
    except TimeoutError as error:
        running = {
            text: (each["statuses"], each["types"][-3:])
            for text, each in shown.items()
            if each["isRunning"]
        }
        kills = server.kills - kills_before
        raise AssertionError(f"after {kills} kills these runs go on: {running}") from error


def run_all(folder: Path, runs: int) -> None:
    node = install()

    async def talk() -> None:
        returns = 0
        async with serving(folder) as server, client(node, "ag_ui.mjs") as program:
            for first in range(0, runs, AT_ONCE):
                texts = [f"run-{n}" for n in range(first, first + AT_ONCE)]
                returns += await run_batch(program, server, texts)
        assert server.kills >= runs // AT_ONCE
        assert returns > runs, "hardly a run was cut"

    anyio.run(talk)


def test_after_random_cuts_and_kills_clients_show_the_same_as_without(tmp_path: Path) -> None:
    run_all(tmp_path, 20)


@pytest.mark.slow
def test_a_thousand_runs_with_random_cuts_and_kills_show_the_same_as_without(
    tmp_path: Path,
) -> None:
    run_all(tmp_path, 1_000)
