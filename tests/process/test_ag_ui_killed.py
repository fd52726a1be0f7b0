"""AG-UI clients through cuts and kills: they show the same as one whose run had neither."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

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


class Server:
    """The server's process, and the number of its kills."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.kills = 0
        self.url = f"http://127.0.0.1:{self._line()}/v1/ag-ui"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        """Kill the process that serves, and start another."""
        assert self._process.stdin is not None
        self._process.stdin.write("kill\n")
        self._process.stdin.flush()
        assert self._line() == "killed"
        self.kills += 1


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "tests.process.ag_ui_server", str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2], **pipes) as process:  # type: ignore[call-overload]  # the pipes are named once
        yield Server(process)
        process.stdin.close()


KILLS_MAX = 8
"""Of a batch: on a busy machine each restart may be killed before a client has come back."""


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
    kill_at = draw.randrange(KILL_AFTER_EVENTS_MAX)
    running = set(texts)
    killed = 0
    while running:
        events = 0
        for text in texts:
            shown = await program.do("show", text)
            events += len(shown["types"])
            if not shown["isRunning"]:
                running.discard(text)
        if running and events >= kill_at and killed < KILLS_MAX:
            killed += 1
            server.kill()
            kill_at = events + draw.randrange(KILL_AFTER_EVENTS_MAX)
    wanted = await uncut(texts)
    returns = 0
    for text in texts:
        shown = await program.do("done", text)
        assert "error" not in shown, (text, shown)
        assert not shown["warnings"], text
        assert shown["outcome"] == "success", text
        assert essence(shown["messages"]) == wanted[text], text
        returns += len(shown["statuses"]) - 1
    return returns


def run_all(folder: Path, runs: int) -> None:
    node = install()

    async def talk() -> None:
        returns = 0
        with serving(folder) as server:
            async with client(node, "ag_ui.mjs") as program:
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
