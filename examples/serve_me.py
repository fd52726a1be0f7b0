r"""An agent to serve over HTTP: a support desk that looks orders up and asks before it pays back.

What it teaches: `turnkeeper serve` needs no more of you than an agent. The model is scripted, so
nothing needs a network or a key; put `OpenAIChatModel` or `AnthropicModel` in its place.

    turnkeeper serve examples/serve_me.py:support      serves it on http://127.0.0.1:8000
    python examples/serve_me.py                        asks it once, without a server

Then, from another terminal:

    curl -s localhost:8000/v1/conversations/alice/messages -d '{"content": "Where is order 7?"}' \
         -H 'Content-Type: application/json' -H 'Prefer: wait=30'
    curl -N 'localhost:8000/v1/conversations/alice/events?pieces=true'
"""

from __future__ import annotations

import re

import anyio

from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    ModelRequest,
    ModelResponse,
    ScriptedModel,
    ToolAgent,
    ToolCall,
)
from turnkeeper.actors.events import UserMessageEvent


async def look_up(order: int) -> str:
    """Look up where an order is."""
    return f"order {order} left the warehouse on Monday"


async def refund(order: int) -> str:
    """Pay an order back. The user is asked before."""
    return f"order {order} is paid back"


def answer(request: ModelRequest) -> str | ModelResponse:
    """Answer by the view alone, so that a restart changes nothing."""
    newest = request.view[-1]
    if not isinstance(newest, UserMessageEvent):
        return f"Here is what I found: {getattr(newest, 'content', '')}."
    order = re.search(r"\d+", newest.content)
    if order is None:
        return f"You said: {newest.content}. Which order is it about?"
    tool = "refund" if "back" in newest.content.lower() else "look_up"
    return ModelResponse("Let me see.", calls=[ToolCall(tool, {"order": int(order.group())})])


support = ToolAgent(ScriptedModel(answer), [look_up, refund], confirm=["refund"])


async def main() -> None:
    async with Conversations(support, journal=MemoryJournal()) as conversations:
        turn = await conversations["alice"].send("Where is order 7?")
        print(await turn.reply())
    print("serve it with: turnkeeper serve examples/serve_me.py:support")


if __name__ == "__main__":
    anyio.run(main)
