"""One of several nodes, for the benchmarks: it carries out what it is told, line by line.

    python benchmarks/_node.py CONNINFO SCHEMA KEY

It owns conversations, and the other nodes reach it as they reach `turnkeeper serve`. It reads JSON
lines from standard input, and answers each with one line: the processor time of all its threads so
far, and its counts. The benchmark talks to it without HTTP, so that the figures are those of the
node, without a client.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import count
from typing import Any

import anyio
import anyio.to_thread
import uvicorn

from turnkeeper.actors import (
    Conversations,
    ModelRequest,
    ModelResponse,
    PostgresJournal,
    ScriptedModel,
    ToolAgent,
    ToolCall,
    gateway,
)
from turnkeeper.actors.events import UserMessageEvent

SAID = "x" * 200
TITLES = count()


async def look(at: str) -> str:
    """Look up an order."""
    return f"seen {at}"


def looks_once(request: ModelRequest) -> ModelResponse:
    """Calls the tool when a chat message is the newest, and answers its result."""
    if isinstance(request.view[-1], UserMessageEvent):
        return ModelResponse(calls=[ToolCall("look", {"at": "order 7"})])
    return ModelResponse(SAID)


class Counted(PostgresJournal):
    """Counts the rows that it has read to wake its readers, and its commits."""

    def __init__(self, conninfo: str, **options: Any) -> None:  # noqa: ANN401 - passed on
        self.rows_looked_at = self.commits = 0
        super().__init__(conninfo, failpoint=self._pass, **options)

    def _pass(self, point: str) -> None:
        self.commits += point == "committed"

    async def _heads(self, names: Sequence[str]) -> Mapping[str, int]:
        self.rows_looked_at += len(names)
        return await super()._heads(names)


class Worker:
    """Carries out the benchmark's orders."""

    def __init__(self, conversations: Conversations, journal: Counted) -> None:
        self._conversations = conversations
        self._journal = journal

    async def turns(self, names: Sequence[str], each: int) -> None:
        """Run this many turns in each conversation, one after the other."""

        async def converse(name: str) -> None:
            for _ in range(each):
                await (await self._conversations[name].send(SAID)).end()

        await _all(converse, names)

    async def commands(self, names: Sequence[str], each: int) -> None:
        """Set the title of each conversation this many times: a command that is one commit."""

        async def change(name: str) -> None:
            for _ in range(each):
                await self._conversations[name].change(title=f"title {next(TITLES)}")

        await _all(change, names)

    async def delete(self, names: Sequence[str]) -> None:
        """Delete these conversations."""
        for name in names:
            await self._conversations.delete(name)

    async def hand_over(self, names: Sequence[str]) -> None:
        """Claim each of these, which have no owner, and release it, as a restart does."""
        for name in names:
            claim = await self._journal.claim(name)
            await self._journal.release(name, epoch=claim.epoch)

    async def follow(self, names: Sequence[str]) -> None:
        """Begin to follow these conversations, which other nodes write, without an end."""

        async def wait(name: str) -> None:
            head = (await self._journal.info(name)).head
            while True:
                await self._journal.wait_for_more(name, after=head)
                head = (await self._journal.info(name)).head

        for name in names:
            self.following.start_soon(wait, name)
        while self._journal.rows_looked_at < len(names):  # noqa: ASYNC110 - a journal has no such event
            await anyio.sleep(0.01)
        await self._journal.info(names[-1])  # behind the first look of each

    async def rest(self) -> None:
        """Do nothing."""

    async def run(self) -> None:
        """Do what each line of standard input says."""
        async with anyio.create_task_group() as self.following:
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                told = json.loads(line)
                journal = self._journal
                await getattr(self, told.pop("do"))(**told)
                answer = {
                    "cpu_s": time.process_time(),
                    "rows": journal.rows_looked_at,
                    "commits": journal.commits,
                }
                print(json.dumps(answer), flush=True)
            self.following.cancel_scope.cancel()


async def _all(work: Callable[[str], Coroutine[Any, Any, None]], names: Sequence[str]) -> None:
    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(work, name)


async def main(conninfo: str, schema: str, key: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4_096)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    address = gateway.node_address(f"http://127.0.0.1:{listener.getsockname()[1]}")
    journal = Counted(conninfo, schema=schema, address=address)
    agent = ToolAgent(ScriptedModel(looks_once), [look])
    async with (
        Conversations(agent, journal=journal, recover="on_message") as conversations,
        gateway.Node(conversations, address=address, keys=gateway.NodeKeys([key])) as node,
        anyio.create_task_group() as group,
    ):
        config = uvicorn.Config(node, lifespan="off", log_config=None, access_log=False)
        server = uvicorn.Server(config)
        group.start_soon(server.serve, [listener])
        print("{}", flush=True)
        await Worker(conversations, journal).run()
        server.should_exit = True


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], sys.argv[3])
