"""An MCP server, on the official package: over stdio, or over HTTP on a port that it prints."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Annotated, Any, Literal

import anyio
import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

server = MCPServer("shop", log_level="CRITICAL")


class Size(BaseModel):
    width: Annotated[int, Field(ge=1, description="in millimetres")]
    unit: Literal["mm", "inch"] = "mm"


class Parcel(BaseModel):
    label: str
    size: Size
    tags: list[str] = []


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def weigh(parcel: Annotated[Parcel, Field(description="the parcel to weigh")]) -> str:
    """Weigh a parcel."""
    return f"{parcel.label}: {parcel.size.width} {parcel.size.unit}"


@server.tool(name="shop.count items", annotations=ToolAnnotations(destructive_hint=False))
def count_items() -> dict[str, int]:
    """Count the items."""
    return {"items": 3}


@server.tool(structured_output=False)
def nothing() -> None:
    """Return nothing."""


@server.tool()
def silent_failure() -> CallToolResult:
    """Fail without a word."""
    return CallToolResult(content=[], is_error=True)


@server.tool()
def structure() -> CallToolResult:
    """Return a structure without a text."""
    return CallToolResult(content=[], structured_content={"a": [1]})


@server.tool()
def picture() -> list[Image | str]:
    """Show a picture."""
    return [Image(data=b"\x89PNG", format="png"), "a cat"]


@server.tool()
def fail() -> CallToolResult:
    """Fail."""
    return CallToolResult(content=[TextContent(text="no such parcel")], is_error=True)


@server.tool()
async def wait(port: int) -> str:
    """Wait until it is cancelled, and tell the listener at the port."""
    with socket.create_connection(("127.0.0.1", port)) as told:
        told.sendall(b"begun.")
        try:
            await anyio.sleep_forever()
        finally:
            told.sendall(b"cancelled.")
    return "never"


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(3)


@server.tool(structured_output=False)
def answer(status: int, headers: dict[str, str], body: str) -> None:
    """Have the call answered with this, over HTTP."""


class Answers:
    """Stands before the server, and answers the calls of `answer` in its place."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        asked: Any = json.loads(body)
        if asked["method"] == "tools/call" and asked["params"]["name"] == "answer":
            wanted = asked["params"]["arguments"]
            said = wanted["body"].encode("latin-1")
            await Response(said, wanted["status"], wanted["headers"])(scope, receive, send)
            return
        is_given = False

        async def again() -> Any:  # noqa: ANN401 - a message
            nonlocal is_given
            if is_given:
                return await receive()
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            sys.stdout.write(f"{listening.getsockname()[1]}\n")
            sys.stdout.flush()
            app = Answers(server.streamable_http_app())
            uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listening])
    else:
        server.run()
