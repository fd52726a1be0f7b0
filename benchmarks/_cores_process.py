"""One of several processes, for the benchmarks: it appends to its own conversations when told to.

    python benchmarks/_cores_process.py NAME MANY file PATH
    python benchmarks/_cores_process.py NAME MANY postgres CONNINFO SCHEMA

Each line of standard input is a number of events: every conversation gets that many, one after the
other, all conversations at once. The answer is one line: the processor time of all threads so far,
in seconds.
"""

from __future__ import annotations

import sys
import time

import anyio
import anyio.to_thread

from turnkeeper.actors import (
    Conversation,
    Conversations,
    Journal,
    PostgresJournal,
    SQLiteJournal,
    TurnContext,
    agent,
)
from turnkeeper.actors.events import UserMessageEvent

TEXT = "x" * 590


@agent
async def silent(_: TurnContext) -> None:
    """Do nothing: the events are appended here."""


async def converse(conversation: Conversation, each: int) -> None:
    for _ in range(each):
        await conversation.append(UserMessageEvent(content=TEXT))


async def main(name: str, many: int, journal: Journal) -> None:
    async with Conversations(silent, journal=journal, idle_s=None) as conversations:
        handles = [conversations[f"{name}{number}"] for number in range(many)]
        each = 1
        while True:
            async with anyio.create_task_group() as group:
                for handle in handles if each else ():
                    group.start_soon(converse, handle, each)
            print(time.process_time(), flush=True)
            line = await anyio.to_thread.run_sync(sys.stdin.readline)
            if not line:
                return
            each = int(line)


if __name__ == "__main__":
    name, many, kind, where, *schema = sys.argv[1:]
    if kind == "file":
        anyio.run(main, name, int(many), SQLiteJournal(where))
    else:
        anyio.run(main, name, int(many), PostgresJournal(where, schema=schema[0]))
