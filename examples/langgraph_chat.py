"""A LangGraph graph behind a conversation: history, calls, approvals and pieces in the log.

What it teaches: the nodes of a graph get the turn as their context and write through it, and where
the graph begins depends on the log alone. So a turn is taken up at its step after a restart or a
confirmation, without a checkpointer, and a call that has its result is not made again.

    python examples/langgraph_chat.py

The model is scripted: no key, no network. Any chat model of LangChain fits in its place. LangGraph
runs on asyncio alone.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import anyio
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime

from turnkeeper.actors import (
    Conversations,
    SQLiteJournal,
    TokenUsage,
    ToolCall,
    ToolResult,
    Tools,
    TurnContext,
    View,
)
from turnkeeper.actors.events import ActionEvent, StepRequest
from turnkeeper.actors.models.messages import to_llm_messages


class State(TypedDict, total=False):
    """The state that nodes hand on within one run. All that must last longer is in the log."""

    requests: int


@dataclass(frozen=True)
class Behind:
    """The context of a run: the turn that it answers."""

    turn: TurnContext


Graph = CompiledStateGraph[State, Behind, State, State]


def to_messages(view: View) -> list[BaseMessage]:
    """Return the view as messages of LangChain, which reads those of OpenAI's chat API."""
    messages: list[BaseMessage] = convert_to_messages(
        json.loads(json.dumps(list(to_llm_messages(view))))
    )
    return messages


def make_graph(model: BaseChatModel, tools: Tools, confirm: Sequence[str] = ()) -> Graph:
    """Make the usual graph of two nodes: the model thinks, its calls are run, it thinks again."""

    async def think(state: State, runtime: Runtime[Behind]) -> State:
        turn = runtime.context.turn
        view = await turn.begin_step()
        await turn.note_request(StepRequest(view_seq=view.seq, model=type(model).__name__))
        write = turn.writer()
        response: AIMessageChunk | None = None
        # Here, and not from the graph's own stream: the pieces come before what is logged next.
        async for chunk in model.astream(to_messages(view)):
            assert isinstance(chunk, AIMessageChunk)
            await write(chunk.text)
            response = chunk if response is None else response + chunk
        assert response is not None
        used = response.usage_metadata or {"input_tokens": 0, "output_tokens": 0}
        usage = TokenUsage(input_tokens=used["input_tokens"], output_tokens=used["output_tokens"])
        calls = [
            ToolCall(call["name"], call["args"], provider_call_id=call["id"])
            for call in response.tool_calls
        ]
        if calls:
            asks = any(call.name in confirm for call in calls)
            await turn.propose_calls(
                calls, text=response.text, usage=usage, needs_confirmation=asks
            )
        else:
            await turn.say(response.text, usage=usage)
        return {"requests": state.get("requests", 0) + 1}

    async def act(state: State, runtime: Runtime[Behind]) -> State:
        turn, is_first = runtime.context.turn, not state.get("requests")
        run_call = tools.runner(turn)

        async def run(action: ActionEvent) -> ToolResult:
            # A call that is open as the run begins may have begun in an earlier one.
            if is_first and not (
                turn.is_unstarted(action.tool_call_id) or tools.is_idempotent(action.tool_name)
            ):
                return ToolResult("no result: it may have happened", may_have_happened=True)
            return await run_call(action)

        await turn.run_calls(tuple(turn.open_calls.values()), run)
        return {}

    def where_to_begin(_: State, runtime: Runtime[Behind]) -> str:
        return "act" if runtime.context.turn.open_calls else "think"

    def what_next(_: State, runtime: Runtime[Behind]) -> str:
        return "act" if runtime.context.turn.open_calls else END

    graph = StateGraph(State, context_schema=Behind)
    graph.add_node("think", think)
    graph.add_node("act", act)
    graph.add_conditional_edges(START, where_to_begin, ["act", "think"])
    graph.add_conditional_edges("think", what_next, ["act", END])
    graph.add_edge("act", "think")
    return graph.compile()


class GraphAgent:
    """A graph as an agent of conversations. It is a function of its turn's log."""

    is_resumable = True

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    async def run(self, turn: TurnContext) -> None:
        if not turn.has_answered:
            await self._graph.ainvoke({}, context=Behind(turn))


# --- a model without a key, and what is shown ---------------------------------------------------


class Scripted(BaseChatModel):
    """Answers by the messages it is shown."""

    reply: Callable[[Sequence[BaseMessage]], AIMessage]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    async def _astream(
        self, messages: list[BaseMessage], *_: object, **__: object
    ) -> AsyncIterator[ChatGenerationChunk]:
        answer = self.reply(messages)
        for piece in re.findall(r"\S+\s*", answer.text):
            yield ChatGenerationChunk(message=AIMessageChunk(content=piece))
        calls = [
            tool_call_chunk(
                name=call["name"], args=json.dumps(call["args"]), id=call["id"], index=n
            )
            for n, call in enumerate(answer.tool_calls)
        ]
        yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=calls))

    def _generate(self, *_: object, **__: object) -> ChatResult:
        raise NotImplementedError


def shop(messages: Sequence[BaseMessage]) -> AIMessage:
    newest = messages[-1]
    if isinstance(newest, ToolMessage):
        return AIMessage(f"Done: {newest.text}.")
    if "refund" in newest.text:
        call = {"name": "refund", "args": {"order": 7}, "id": "call_0"}
        return AIMessage("I can do that.", tool_calls=[call])
    return AIMessage(f"Your messages so far: {sum(m.type == 'human' for m in messages)}.")


def refund(order: int) -> str:
    """Give the money back."""
    return f"order {order} is refunded"


async def lines(conversations: Conversations) -> AsyncIterator[str]:
    async for _, event in conversations["alice"].events(live=False):
        if event.kind in ("user_message", "action", "observation", "agent_message"):
            yield f"{event.kind}: {getattr(event, 'content', None) or getattr(event, 'text', '')}"


async def main() -> None:
    agent = GraphAgent(make_graph(Scripted(reply=shop), Tools(refund), confirm=["refund"]))
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "chats.db"
        async with Conversations(agent, journal=SQLiteJournal(journal)) as conversations:
            alice = conversations["alice"]
            print(await (await alice.send("Hello")).reply())
            await alice.send("Please refund order 7", message_id="m2")
            async for _, event in alice.events():
                if event.kind == "confirmation_requested":
                    break

        # The process may end here: the turn waits for its user in the log.
        async with Conversations(agent, journal=SQLiteJournal(journal)) as conversations:
            alice = conversations["alice"]
            turn = await alice.send("Please refund order 7", message_id="m2")
            await alice.confirm()
            print(await turn.reply())
            async for line in lines(conversations):
                print("   ", line)


if __name__ == "__main__":
    anyio.run(main)
