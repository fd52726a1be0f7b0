"""The gateway over HTTP: beside the library in process, and beside plain routes of FastAPI.

The server is a separate process, uvicorn over an SQLite file. The clients are plain sockets in this
process, kept alive, so that the figures are the server's. `stream_speed` is characters a second of
an answer of 52,000 characters in 2,000 pieces, on the AI SDK's route; the plain route sends the
same pieces from memory, as events of the same form. `stream_speed` and `messages` measure the
processor time of the server: at full load this gives the throughput, and other programs hardly
affect it. The garbage collector runs as seldom as in `turnkeeper serve`, and for `messages` also in
this process.

The `stream_first…` figures are times from a request to the first text of its answer, in
milliseconds as its client sees them:

- `stream_first`: ours against the plain route from memory. By then, we have the message on the disk
  and the plain route has stored nothing, so this ratio has no goal.
- `stream_first_allowed`: the same, but less the 20 ms in which pieces may be merged; our time is
  reduced to the plain route's time at most, so the ratio cannot exceed 1. The gateway merges only
  later pieces and sends the first at once; its commit uses part of that time instead.
- `stream_first_durable`: our full time against a plain route that first commits one row.
- `stream_first_new`: our full time for a message that begins its conversation, with one more commit
  for the owner's claim. `stream_first_ag_ui`: the same on the route of AG-UI, whose streams begin
  with the whole transcript. Both are compared with the route that commits first.

An acknowledgement is the time from a message to its 202.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from turnkeeper.actors import Conversations, SQLiteJournal, TurnContext, agent

from ._harness import FOLDER, Measure, costlier, faster, say

CLIENTS = 32
MESSAGES = 20
"""How many messages each client sends in one round."""
ANSWERS = 10
"""How many answers are streamed in one round, one after the other."""
MERGED_MS = 20
"""How long the pieces of an answer may wait to be sent as one."""
OPEN_STREAMS = 500
IDLE_STREAMS = 2_000
ACTIVE_STREAMS = 200
KB = 1_024
RECEIVED_MAX = 1 << 24


def run(*, quick: bool) -> Iterator[Measure]:
    rounds = 3 if quick else 7
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as name:
        with _served(Path(name) / "messages.db") as server:
            say("gateway: messages")
            yield asyncio.run(_messages(server, Path(name) / "library.db", rounds))
        with _served(Path(name) / "streams.db") as server:
            say("gateway: a streamed answer")
            yield from asyncio.run(_answers(server, rounds))
        with _served(Path(name) / "idle.db") as server:
            idle = IDLE_STREAMS // 4 if quick else IDLE_STREAMS
            say(f"gateway: {OPEN_STREAMS:,} open streams, then {idle:,}")
            yield from asyncio.run(_idle(server, rounds, idle))


class Server:
    """A server that runs."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.port = port
        self._process = process

    @property
    def cpu_s(self) -> float:
        """The processor time that it has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory_kb(self) -> float:
        """The memory that it has, in KB."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return float(line.split()[1])
        raise AssertionError("no memory is told")


@contextmanager
def _served(path: Path) -> Iterator[Server]:
    command = [sys.executable, str(FOLDER / "_gateway_server.py"), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Server(process, int(process.stdout.readline()))
        finally:
            process.kill()


class Client:
    """One connection, kept alive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def connected(cls, server: Server) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", server.port, limit=RECEIVED_MAX))

    async def begin(self, method: str, path: str, body: object = None) -> None:
        """Send a request, and read the head of its response."""
        content = json.dumps(body).encode() if body is not None else b""
        self._writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert b" 20" in head.partition(b"\r\n")[0], head
        self.length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                self.length = int(line.partition(b":")[2])

    async def ask(self, method: str, path: str, body: object = None) -> None:
        await self.begin(method, path, body)
        await self.reader.readexactly(self.length)

    async def send(self, name: str) -> None:
        await self.ask("POST", f"/v1/conversations/{name}/messages", {"content": "hello"})

    async def stream(self, path: str, body: object, first_of: bytes = b"text-delta") -> float:
        """Read a streamed answer to its end; return the time to its first piece."""
        began = perf_counter()
        await self.begin("POST", path, body)
        await self.reader.readuntil(first_of)
        first = perf_counter()
        await self.reader.readuntil(b"0\r\n\r\n")
        return first - began

    def close(self) -> None:
        self._writer.close()


@agent
async def silent(_: TurnContext) -> str:
    return "ok"


async def _spent(work: Callable[[int], Awaitable[None]], clock: Callable[[], float]) -> float:
    """Return the processor time for the requests of all clients, which run side by side."""
    began = clock()
    async with asyncio.TaskGroup() as group:
        for n in range(CLIENTS):
            group.create_task(_run(work, n))
    return clock() - began


async def _run(work: Callable[[int], Awaitable[None]], n: int) -> None:
    for _ in range(MESSAGES):
        await work(n)


async def _messages(server: Server, path: Path, rounds: int) -> Measure:
    clients = [await Client.connected(server) for _ in range(CLIENTS)]
    async with Conversations(silent, journal=SQLiteJournal(path)) as conversations:

        async def by_http(n: int) -> None:
            await clients[n].send(f"c{n}")

        async def by_call(n: int) -> None:
            await conversations[f"c{n}"].send("hello")

        usual = gc.get_threshold()
        gc.set_threshold(10_000)  # as in the server
        pairs = [
            (await _spent(by_http, lambda: server.cpu_s), await _spent(by_call, process_time))
            for _ in range(rounds + 1)
        ]
        gc.set_threshold(*usual)
    count = CLIENTS * MESSAGES
    each = [(1_000 * mine / count, 1_000 * base / count) for mine, base in pairs[1:]]
    return faster("messages", each, baseline="the library in process", goal="≥ 0.3", unit="ms")


async def _answers(server: Server, rounds: int) -> Iterator[Measure]:
    client = await Client.connected(server)
    sent = 0

    async def by_gateway(name: str) -> float:
        nonlocal sent
        sent += 1
        return await client.stream("/v1/ai-sdk/chat", {"id": name, "messages": [_said(sent)]})

    async def in_one() -> float:
        return await by_gateway("c")

    async def in_new() -> float:
        return await by_gateway(f"new{sent}")

    async def by_ag_ui() -> float:
        nonlocal sent
        sent += 1
        said = {"id": f"m{sent}", "role": "user", "content": "stream"}
        body = {"threadId": f"ag-ui{sent}", "runId": f"r{sent}", "messages": [said]}
        return await client.stream("/v1/ag-ui", body, b"TEXT_MESSAGE_CONTENT")

    async def by_plain() -> float:
        return await client.stream("/plain", {})

    async def by_durable() -> float:
        return await client.stream("/plain-durable", {})

    firsts: list[tuple[float, ...]] = []
    spent: list[tuple[float, ...]] = []
    for _ in range(rounds + 1):
        ways = (in_one, by_plain, in_new, by_durable, by_ag_ui)
        each = [await _streams(server, ask) for ask in ways]
        firsts.append(tuple(first for first, _ in each))
        spent.append(tuple(cpu for _, cpu in each))
    del firsts[0], spent[0]  # which warmed up
    plain, durable = "plain FastAPI, from memory", "plain FastAPI, a commit first"
    pairs = [(ours, base) for ours, base, *_ in spent]
    at_once = [(one, base) for one, base, *_ in firsts]
    allowed = [(max(one - MERGED_MS, base), base) for one, base in at_once]
    after_one = [(one, base) for one, _, _, base, _ in firsts]
    after_two = [(new, base) for _, _, new, base, _ in firsts]
    ag_ui = [(run, base) for *_, base, run in firsts]
    return iter(
        (
            faster("stream_speed", pairs, baseline=plain, goal="≥ 0.5", unit="ms"),
            faster("stream_first", at_once, baseline=plain, goal="", unit="ms"),
            faster("stream_first_allowed", allowed, baseline=plain, goal="≥ 0.5", unit="ms"),
            faster("stream_first_durable", after_one, baseline=durable, goal="≥ 0.5", unit="ms"),
            faster("stream_first_new", after_two, baseline=durable, goal="", unit="ms"),
            faster("stream_first_ag_ui", ag_ui, baseline=durable, goal="", unit="ms"),
        )
    )


async def _streams(server: Server, ask: Callable[[], Awaitable[float]]) -> tuple[float, float]:
    """Stream some answers; return the time to the first piece, and the processor's for each."""
    before = server.cpu_s
    firsts = [await ask() for _ in range(ANSWERS)]
    return 1_000 * median(firsts), 1_000 * (server.cpu_s - before) / ANSWERS


def _said(n: int) -> dict[str, object]:
    return {"id": f"m{n}", "role": "user", "parts": [{"type": "text", "text": "stream"}]}


async def _p99(client: Client, messages: int = 200) -> float:
    """Return the 99th percentile of a message's acknowledgement, in milliseconds."""
    taken = []
    for _ in range(messages):
        began = perf_counter()
        await client.send("acknowledged")
        taken.append(1_000 * (perf_counter() - began))
    return sorted(taken)[-max(1, messages // 100)]


async def _open(server: Server, count: int, begin_at: int = 0) -> list[Client]:
    opened = []
    for n in range(begin_at, begin_at + count):
        client = await Client.connected(server)
        await client.begin("GET", f"/v1/conversations/idle{n}/events?pieces=true")
        opened.append(client)
    return opened


async def _idle(server: Server, rounds: int, idle: int) -> Iterator[Measure]:
    sender = await Client.connected(server)
    await _p99(sender)
    pairs = []
    for n in range(rounds):
        alone = await _p99(sender)
        opened = await _open(server, OPEN_STREAMS, n * OPEN_STREAMS)
        pairs.append((await _p99(sender), alone))
        for client in opened:
            client.close()
        await asyncio.sleep(0.5)
    before = server.memory_kb
    opened = await _open(server, idle, rounds * OPEN_STREAMS)
    each = (server.memory_kb - before) / idle
    say(f"gateway: {ACTIVE_STREAMS} answers at once, beside them")
    active = await _active(server, rounds)
    for client in opened:
        client.close()
    return iter(
        (
            costlier("ack_p99_500_streams", pairs, baseline="none open", goal="≤ 2", unit="ms"),
            costlier("idle_stream", [(each, 50)], baseline="50 KB", goal="≤ 1", unit="KB"),
            active,
        )
    )


async def _active(server: Server, rounds: int) -> Measure:
    """Return the memory after the last round of answers at once, beside that after the first."""
    seen = []

    async def one(name: str) -> None:
        client = await Client.connected(server)
        await client.stream("/v1/ai-sdk/chat", {"id": name, "messages": [_said(0)]})
        client.close()

    for n in range(max(3, rounds // 2)):
        async with asyncio.TaskGroup() as group:
            for k in range(ACTIVE_STREAMS):
                group.create_task(one(f"active{n}-{k}"))
        seen.append(server.memory_kb / KB)
    return costlier(
        "memory_200_answers",
        [(seen[-1], seen[0])],
        baseline="after the first 200",
        goal="≤ 1.5",
        unit="MB",
    )
