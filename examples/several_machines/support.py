"""An agent to be served by several machines; put your own in its place.

What it teaches: nothing of the agent has to know that there are several machines.

    turnkeeper serve support.py:support

    python support.py      asks it once, without a server
"""

from __future__ import annotations

import anyio

from turnkeeper.actors import Conversations, MemoryJournal, TurnContext, agent


@agent
async def support(turn: TurnContext) -> None:
    """Answer with what was asked."""
    await turn.say(f"You asked: {turn.message.content}")


async def main() -> None:
    async with Conversations(support, journal=MemoryJournal()) as conversations:
        turn = await conversations["alice"].send("Where is my order?")
        print(await turn.reply())


if __name__ == "__main__":
    anyio.run(main)
