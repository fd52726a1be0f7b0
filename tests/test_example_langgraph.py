"""`examples/langgraph_chat.py`: a graph behind a conversation, killed, interrupted, and followed.

LangGraph runs on asyncio alone, and so do these tests.
"""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from langchain_core.messages import AIMessage, BaseMessage

from tests.actors.agents.test_tool_agent import events_of, serving, until
from tests.actors.agents.test_tool_agent_crashes import Death, World, check, send_and_die
from tests.actors.conversations.worlds import log_of
from tests.drawn import drawn
from turnkeeper.actors import (
    Agent,
    MemoryJournal,
    MemoryStore,
    SQLiteJournal,
    TextDelta,
    ToolContext,
    Tools,
    tool,
)
from turnkeeper.actors.events import AgentMessageEvent, StepFinishedEvent

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize(
        "anyio_backend", [pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio")]
    ),
]

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "langgraph_chat.py"))
shop: Any = EXAMPLE["shop"]


def agent_of(reply: Any, *functions: Any, confirm: Sequence[str] = ()) -> Agent:  # noqa: ANN401
    graph = EXAMPLE["make_graph"](EXAMPLE["Scripted"](reply=reply), Tools(*functions), confirm)
    agent: Agent = EXAMPLE["GraphAgent"](graph)
    return agent


def next_reply(messages: Sequence[BaseMessage]) -> AIMessage:
    """What the model says; it goes by nothing but the messages that it is shown."""
    at = max(n for n, message in enumerate(messages) if message.type == "human")
    results = Counter(message.type for message in messages[at:])["tool"]
    if results == 0 and messages[at].text == "go":
        calls = [("charge", {"amount": 5}), ("look", {})]
    elif results == 2:
        calls = [("look", {})]
    else:
        return AIMessage(f"a({messages[at].text})")
    made = [{"name": name, "args": args, "id": f"c{n}"} for n, (name, args) in enumerate(calls)]
    return AIMessage("Let me see.", tool_calls=made)


class GraphWorld(World):
    """The world of the crash tests, with a graph in it."""

    def agent(self) -> Agent:
        async def charge(amount: int, context: ToolContext) -> str:
            await self._happen(context)
            return f"charged {amount}"

        @tool(idempotent=True)
        async def look(context: ToolContext) -> str:
            await self._happen(context)
            return "seen"

        return agent_of(next_reply, charge, look)

    async def _happen(self, context: ToolContext) -> None:
        await self.death.step()
        self.effects[context.tool_call_id] += 1
        await self.death.step()


@pytest.mark.sweep
async def test_a_turn_of_the_graph_that_is_killed_is_resumed_to_its_end(tmp_path: Path) -> None:
    whole = GraphWorld(Death())
    assert not await send_and_die(MemoryJournal(), whole, "resume")
    for at in drawn(range(1, whole.death.steps), 4):
        store, world = MemoryStore(), GraphWorld(Death(at))
        assert await send_and_die(MemoryJournal(store), world, "resume")
        ended, _ = await check(MemoryJournal(store), world, "resume")
        assert (ended.outcome, ended.reply) == ("completed", "a(go)")


async def test_the_graph_asks_its_user_and_shows_its_pieces(tmp_path: Path) -> None:
    done: list[int] = []

    def refund(order: int) -> str:
        done.append(order)
        return "refunded"

    agent = agent_of(shop, refund, confirm=["refund"])
    async with serving(agent, SQLiteJournal(tmp_path / "chats.db")) as chat:
        turn = await chat.send("refund 7")
        await until(chat, "confirmation_requested")
        assert done == []
        await chat.confirm()
        pieces = [one.text async for one in turn if isinstance(one, TextDelta)]
        assert await turn.reply() == "Done: refunded."
        events = await events_of(chat)
    assert done == [7]
    assert "".join(pieces).endswith("Done: refunded.")
    assert sum(isinstance(event, StepFinishedEvent) for event in events) == 2


async def test_an_interrupt_ends_the_graph_and_the_next_turn_has_the_whole_history() -> None:
    reached = anyio.Event()
    shown: list[Sequence[BaseMessage]] = []

    async def refund(order: int) -> str:
        reached.set()
        await anyio.sleep_forever()
        raise AssertionError

    def reply(messages: Sequence[BaseMessage]) -> AIMessage:
        shown.append(messages)
        answer: AIMessage = shop(messages)
        return answer

    async with serving(agent_of(reply, refund)) as chat:
        await chat.send("refund 7")
        await reached.wait()

        other = await chat.send("stop", on_overlap="interrupt")

        assert await other.reply() == "Your messages so far: 2."
        assert await log_of(chat) == [
            "u:refund 7", "call", "no result", "u:stop", "a:Your messages so far: 2.",
        ]  # fmt: skip
        (said,) = [e for e in await events_of(chat) if isinstance(e, AgentMessageEvent)]
    assert not said.interrupted
    assert [message.type for message in shown[-1]] == ["human", "ai", "tool", "human"]
