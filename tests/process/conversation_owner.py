"""Conversations in a process of their own: `conversation_owner.py PLACE BACKEND`.

PLACE is the path of a file, or `postgres SCHEMA LEASE_S` for the database that the environment
variable `TURNKEEPER_TEST_POSTGRES` names. It does what the lines of its standard input say: `send
NAME TEXT`, `delete NAME`; and says `done` after each, when the turn has ended.
"""

import os
import sys

import anyio
import anyio.to_thread

from turnkeeper.actors import (
    Conversations,
    Journal,
    PostgresJournal,
    SQLiteJournal,
    TurnContext,
    agent,
)


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


async def main(place: str) -> None:
    async with Conversations(answer, journal=open_journal(place)) as conversations:
        say("ready")
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            word, name, *rest = line.split()
            if word == "send":
                await (await conversations[name].send(" ".join(rest))).end()
            else:
                await conversations.delete(name)
            say("done")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], backend=sys.argv[2])
