"""Conversations in a process of their own: `conversation_owner.py PLACE BACKEND`.

PLACE is the path of a file, or `postgres SCHEMA LEASE_S` for the database that the environment
variable `TURNKEEPER_TEST_POSTGRES` names. It does what the lines of its standard input say: `send
NAME TEXT`, `delete NAME`, `follow NAME`, `view NAME`; and says `done` after each, when the turn has
ended. While it follows, it says `saw SEQ` for each event; of a view, its length or its error.
"""

import os
import sys

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
from turnkeeper.runtime import TurnkeeperError


@agent
async def answer(turn: TurnContext) -> None:
    await turn.say(f"a({turn.message.content})")


def say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


def open_journal(place: str) -> Journal:
    if not place.startswith("postgres "):
        return SQLiteJournal(place)
    _, schema, lease_s = place.split()
    url = os.environ["TURNKEEPER_TEST_POSTGRES"]
    return PostgresJournal(url, schema=schema, lease_s=float(lease_s))


async def follow(conversation: Conversation) -> None:
    async for seq, _ in conversation.events():
        say(f"saw {seq}")


async def view(conversation: Conversation) -> None:
    try:
        say(f"view {len(await conversation.view())}")
    except TurnkeeperError as error:
        say(f"view {type(error).__name__}")


async def main(place: str) -> None:
    journal = open_journal(place)
    async with (
        Conversations(answer, journal=journal, idle_s=None) as conversations,
        anyio.create_task_group() as group,
    ):
        say("ready")
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            word, name, *rest = line.split()
            if word == "send":
                await (await conversations[name].send(" ".join(rest))).end()
            elif word == "follow":
                group.start_soon(follow, conversations[name])
            elif word == "view":
                await view(conversations[name])
            else:
                await conversations.delete(name)
            say("done")
        group.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], backend=sys.argv[2])
