"""An owner whose agent calls tools without an end: `tool_owner.py URL NAME BACKEND NTH LEASE_S`.

It stops itself (SIGSTOP) when the NTH group of calls is durable and none of them has begun. It says
`started CALL` as the effect of a call begins, and at the end how its turn ended.
"""

import os
import signal
import sys

import anyio

from turnkeeper.actors import (
    Conversations,
    PostgresJournal,
    ToolCall,
    TurnContext,
)
from turnkeeper.actors.agents.agent import agent
from turnkeeper.actors.events import ActionEvent


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def main(url: str, name: str, nth: int, lease_s: float) -> None:
    @agent
    async def busy(turn: TurnContext) -> None:
        async def effect(action: ActionEvent) -> str:
            say("started", action.tool_call_id)
            return "done"

        for count in range(1, 1_000_000):
            actions = await turn.propose_calls([ToolCall("effect"), ToolCall("effect")])
            if count == nth:
                os.kill(os.getpid(), signal.SIGSTOP)
            await turn.run_calls(actions, effect)

    async with Conversations(busy, journal=PostgresJournal(url, lease_s=lease_s)) as conversations:
        turn = await conversations[name].send("Go", message_id="go")
        say("ended", (await turn.end()).outcome)


if __name__ == "__main__":
    url, name, backend, nth, lease_s = sys.argv[1:]
    anyio.run(main, url, name, int(nth), float(lease_s), backend=backend)
