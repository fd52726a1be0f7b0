"""What the type checker must reject: each line that it lets pass is an unused ignore, an error."""

from turnkeeper.actors import (
    Model,
    ToolAgent,
    ToolContext,
    Tools,
    tool,
)


@tool(idempotent=True)
def look(at: int) -> str:
    return str(at)


def check(context: ToolContext) -> bool:
    return bool(context.arguments)


def tools(model: Model) -> None:
    look("here")  # type: ignore[arg-type]
    look.timeout_s = "5"  # type: ignore[assignment]
    tool(timeout=5)  # type: ignore[call-overload]
    Tools(look, before_call=check)  # type: ignore[arg-type]
    Tools("look")  # type: ignore[arg-type]
    ToolAgent(model, [look], confirm=True)  # type: ignore[arg-type]
    ToolAgent(model, [look], confirm=lambda call: call.at)  # type: ignore[attr-defined]
    ToolAgent([look])  # type: ignore[arg-type]
