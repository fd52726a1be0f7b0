"""What a user of tools may write; the type checker must find nothing here."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import assert_type

from turnkeeper.actors import (
    Agent,
    Model,
    ToolAgent,
    ToolCall,
    ToolContext,
    ToolResult,
    Tools,
    TurnContext,
    agent,
    tool,
)


@agent
async def pieces(turn: TurnContext) -> AsyncIterator[str]:
    yield turn.message.content


@agent
async def generated(turn: TurnContext) -> AsyncGenerator[str, None]:
    yield turn.message.content


@agent
async def returned(turn: TurnContext) -> str | None:
    return turn.message.content


def plain(at: int) -> str:
    return str(at)


@tool
def marked(at: int, *, of: str = "") -> list[str]:
    return [of] * at


@tool(timeout_s=5, idempotent=True)
async def later(at: int, context: ToolContext) -> bytes:
    return context.tool_call_id.encode() * at


class Shop:
    async def buy(self, item: str) -> None: ...


def tools() -> None:
    assert_type(marked(1, of="x"), list[str])
    assert_type(tool(plain)(1), str)
    assert_type(marked.is_idempotent, bool)


async def check(context: ToolContext) -> str | None:
    return None if context.arguments else "nothing to do"


def look_over(context: ToolContext, result: ToolResult) -> ToolResult | None:
    return None if result.is_error else ToolResult(context.tool_name)


async def ask(call: ToolCall) -> bool:
    return call.name == "buy"


def agents(model: Model) -> list[Agent]:
    several = Tools(plain, marked, later, Shop().buy, before_call=check, after_call=look_over)
    return [
        ToolAgent(model),
        ToolAgent(model, [plain, marked, later, Shop().buy], confirm="always"),
        ToolAgent(model, several, confirm=["buy"]),
        ToolAgent(model, several, confirm=ask),
        ToolAgent(model, several, confirm=lambda call: call.name == "buy"),
    ]


async def own_agent(turn: TurnContext) -> None:
    run: Callable[..., Awaitable[ToolResult]] = Tools(plain).runner(turn)
    await turn.call_tools([ToolCall("plain", {"at": 1})], run)
