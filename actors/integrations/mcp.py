"""Tools of an MCP server, for `ToolAgent`. Needs `turnkeeper[mcp]`.

    async with mcp_tools("http://127.0.0.1:8000/mcp") as tools:
        agent = ToolAgent(model, [look_up, *tools], confirm=ConfirmRisky())

A server is a URL (streamable HTTP), or `StdioServerParameters` of the official package `mcp`, which
start it as a process and speak with it over its standard input and output. It promises:

1. A tool comes with its whole schema, and is confirmed, timed, cancelled and logged like any other.
   A tool that no model could call, or whose name another tool has already, is left out, and a
   warning is logged.
2. Every call gets a result. If the server fails, ends or falls silent while a call runs, the result
   says that the call may have happened. With a URL, calls work again once the server is back,
   unless it has forgotten the session. A failed connection ends a `Client` over HTTP that you pass:
   a warning is logged, and later calls say that nothing happened.
3. Leaving the block ends the connection, and the server's process if it was started here.

The block has the tools that the server offers when it is entered. An image, a sound or a file in a
result is only mentioned, since a result is a text. A server's claims about its own tools (that one
is harmless, say) count only with `is_trusted=True`.

It runs on asyncio and on trio. The connection has a task of its own, a child of the one that enters
the block, and calls run in their turns; so enter it around `Conversations`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from math import inf
from sys import float_info
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus
from pydantic import ValidationError
from pydantic_core import to_json

from turnkeeper.runtime import Unavailable

from ..agents.tools import Tool, ToolContext
from ..errors import InvalidInput
from ..log_lines import log_failure, log_unavailable
from ..tool_calls import Risk, ToolResult
from ..values.api_names import api_tool_name
from ..values.text import check_bool, check_number, error_text, storable
from ..values.type_names import a_type

try:
    import httpx2
    from mcp import (
        Client,
        InputRequiredRoundsExceededError,
        MCPError,
        StdioServerParameters,
    )
    from mcp import types as mcp_types
    from mcp.client.streamable_http import streamable_http_client
except ImportError as error:
    raise ImportError(
        "tools of MCP servers need the package mcp, which is not installed; install turnkeeper[mcp]"
    ) from error

__all__ = ["McpServer", "McpUnavailable", "mcp_tools"]

McpServer: TypeAlias = str | StdioServerParameters | Client
"""A URL, a process to start, or a client of the package that is not open yet."""

_PAGES_MAX = 100
_GONE = "the connection to the tool's server was closed before the call; nothing happened"
_HTTP_S = httpx2.Timeout(30.0, read=300.0)
"""This and the following of redirects are as the package has them; a call has its own limit."""
ANSWER_BYTES_MAX = 32 << 20
"""The largest answer that is read, decoded, as JSON or as an event of a stream: no result could be
larger in a log."""
_OUTCOME_UNKNOWN_CODES = (
    mcp_types.CONNECTION_CLOSED,
    mcp_types.REQUEST_TIMEOUT,
    mcp_types.PARSE_ERROR,  # of the answer: the package's client never sends what is not JSON
)


class McpUnavailable(Unavailable):
    """The MCP server cannot be started or reached, or does not list its tools."""

    def __init__(self, found: str, server: str = "") -> None:
        name = f" {server}" if server else ""
        super().__init__(
            f"no tools from the MCP server{name}: {found}; nothing happened; try again"
        )
        self.found = found
        self.server = server


class AnswerTooLarge(httpx2.RequestError):
    """An answer of a server is larger than `ANSWER_BYTES_MAX`; the rest of it was not read."""


@asynccontextmanager
async def mcp_tools(
    server: McpServer,
    *,
    prefix: str = "",
    timeout_s: float = 60.0,
    is_trusted: bool = False,
) -> AsyncIterator[Sequence[Tool]]:
    """Connect to a server and yield its tools, until the end of the block.

    `prefix` goes before the tools' names, to tell the tools of several servers apart. `timeout_s`
    bounds each call, each request of a client that is made here, and the opening of a `Client` that
    is given. `is_trusted` means that the server's hints count: a call may run twice if its tool is
    idempotent or only reads, and the risk of a tool is low if it only reads, high if it may
    destroy, else medium. Raises `McpUnavailable`, also past `timeout_s`, and `InvalidInput` for an
    argument that cannot be used.
    """
    _check_server(server, timeout_s)
    check_bool("is_trusted", is_trusted)
    failure: Exception | None = None
    is_connected = False
    try:
        async with _connected(server, timeout_s) as connected:
            listed = await _listed(connected.client, timeout_s)
            is_connected = True
            tools: dict[str, Tool] = {}
            for one in listed:
                tool = _tool(connected, one, prefix, timeout_s, is_trusted=is_trusted)
                if tool is not None and tools.setdefault(tool.name, tool) is not tool:
                    _leave_out(one, InvalidInput("the server lists two tools of this name"))
            try:
                yield list(tools.values())
            except Exception as error:  # noqa: BLE001 - raised below: the task group would wrap it
                failure = error
    except Exception as error:
        if is_connected:
            raise
        first = _first(error)
        if isinstance(first, McpUnavailable):
            raise McpUnavailable(first.found, _name(server)) from error
        found = f"{type(first).__name__}: {error_text(first)}"
        raise McpUnavailable(found, _name(server)) from error
    if failure is not None:
        raise failure


def _check_server(server: object, timeout_s: float) -> None:
    is_url = isinstance(server, str) and server.startswith(("http://", "https://"))
    if not is_url and not isinstance(server, StdioServerParameters | Client):
        said = "a text that is not a URL" if isinstance(server, str) else a_type(server)
        raise InvalidInput(
            f"server is {said}; it takes a URL, StdioServerParameters(command=…, args=[…]) or a "
            "Client"
        )
    check_number("timeout_s", timeout_s, "seconds above 0", above=0, most=float_info.max)


def _name(server: McpServer) -> str:
    """Return a server's host or command; the rest of a URL or command line may hold keys."""
    if isinstance(server, StdioServerParameters):
        return server.command
    return urlsplit(server).netloc.rpartition("@")[2] if isinstance(server, str) else ""


@dataclass(slots=True)
class _Connected:
    """The client of one block, until it has ended; its tools may still be called later."""

    client: Client
    has_ended: bool = False


@asynccontextmanager
async def _connected(server: McpServer, timeout_s: float) -> AsyncIterator[_Connected]:
    """Connect in a task of its own, until the end of the block.

    The package's client cancels the task that has entered it if the connection fails.
    """
    leaving = anyio.Event()

    async def host(*, task_status: TaskStatus[_Connected]) -> None:
        connected: _Connected | None = None
        # Around the whole block, because what the client opens must end inside the scope.
        opening = anyio.CancelScope()
        if isinstance(server, Client):  # its requests may have no bound of their own
            opening.deadline = anyio.current_time() + timeout_s
        try:
            with opening:
                async with _client(server, timeout_s) as client:
                    opening.deadline = inf
                    await anyio.lowlevel.checkpoint()  # raises if the time was up before
                    connected = _Connected(client)
                    task_status.started(connected)
                    try:
                        await leaving.wait()
                    finally:
                        connected.has_ended = True
            if connected is None:
                raise McpUnavailable(f"it was not open within {timeout_s:g} s")
        except Exception as error:
            if connected is None:
                raise
            first = _first(error)
            log_unavailable("connection to an MCP server failed", first, server=_name(server))

    async with anyio.create_task_group() as group:
        connected = await group.start(host)
        try:
            yield connected
        finally:
            connected.has_ended = True
            leaving.set()


@asynccontextmanager
async def _client(server: McpServer, timeout_s: float) -> AsyncIterator[Client]:
    if isinstance(server, str):
        async with (
            _Http(timeout=_HTTP_S, follow_redirects=True) as http,
            Client(
                streamable_http_client(
                    server, http_client=http, max_sse_event_size=ANSWER_BYTES_MAX
                ),
                read_timeout_seconds=timeout_s,
            ) as client,
        ):
            yield client
    elif isinstance(server, Client):
        async with server:
            yield server
    else:
        async with Client(server, read_timeout_seconds=timeout_s) as client:
            yield client


class _Http(httpx2.AsyncClient):
    """Answers a request that fails with an error of the protocol, for one call alone.

    An exception would end the package's client, which would cancel the block around it. A status
    from 500 on may come from a proxy that waited in vain for a server that has done the call.
    """

    # Any: the options of the one that is replaced.
    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:  # noqa: ANN401
        try:
            response = await super().send(request, **options)
            try:
                return await _checked(response)
            except BaseException:
                await response.aclose()
                raise
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            said = f"{type(error).__name__}: {error_text(error)}; nothing happened"
            return _failed(request, mcp_types.INTERNAL_ERROR, said)
        except (httpx2.RequestError, RuntimeError) as error:
            # The latter if no thread can be started, in which to look the server's name up.
            said = f"{type(error).__name__}: {error_text(error)}"
            return _failed(request, mcp_types.CONNECTION_CLOSED, said)


async def _checked(response: httpx2.Response) -> httpx2.Response:
    """Read what the package's client would read, and return the response or its failure.

    The client takes a success without a message, such as a page or a 202, for a refusal. To a
    notification a server answers so, and the client looks at no answer to it.
    """
    content_type = response.headers.get("content-type", "").lower()
    is_json = content_type.startswith("application/json")
    is_message = is_json or content_type.startswith("text/event-stream")
    if is_json or response.has_redirect_location:
        response = await _read(response)
    error = _protocol_error(response.content) if is_json and response.is_error else None
    if response.is_server_error:
        is_message = error is not None
    elif error is not None and _is_refusal(response.status_code, error.code):
        return _failed(response.request, mcp_types.INVALID_REQUEST, error.message)
    elif not response.is_success or response.request.method != "POST":
        return response
    if is_message:
        return response
    await response.aclose()
    said = f"the server answered with status {response.status_code} and no message of the protocol"
    return _failed(response.request, mcp_types.CONNECTION_CLOSED, said)


async def _read(response: httpx2.Response) -> httpx2.Response:
    """Return the response with its body, read and decoded. Raise `AnswerTooLarge`."""
    body = bytearray()
    async with aclosing(response.aiter_bytes()) as parts:
        async for part in parts:
            body += part
            if len(body) > ANSWER_BYTES_MAX:
                raise AnswerTooLarge(f"the answer has more than {ANSWER_BYTES_MAX:,} bytes")
    headers = response.headers.copy()
    for name in ("content-encoding", "content-length", "transfer-encoding"):
        headers.pop(name, None)
    read = httpx2.Response(
        response.status_code, headers=headers, content=bytes(body), request=response.request
    )
    read.next_request = response.next_request
    return read


def _protocol_error(body: bytes) -> mcp_types.ErrorData | None:
    """Return the error of the server's own, or None for one of what stands before it."""
    try:
        return mcp_types.JSONRPCError.model_validate_json(body).error
    except ValidationError:
        return None


def _is_refusal(status: int, code: int) -> bool:
    """True if a server refused a request with a code that also means a lost answer.

    A status from 400 to 499 says that it did not take the request, such as after it has forgotten
    the session. A timeout (408) may be that of a call.
    """
    return status != HTTPStatus.REQUEST_TIMEOUT and code in _OUTCOME_UNKNOWN_CODES


def _failed(request: httpx2.Request, code: int, said: str) -> httpx2.Response:
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": storable(said)}}
    return httpx2.Response(HTTPStatus.BAD_GATEWAY, json=body, request=request)


def _first(error: Exception) -> Exception:
    """Return the first error inside exception groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def _listed(client: Client, timeout_s: float) -> Sequence[mcp_types.Tool]:
    tools: list[mcp_types.Tool] = []
    cursor: str | None = None
    for _ in range(_PAGES_MAX):
        try:
            with anyio.fail_after(timeout_s):
                page = await client.list_tools(cursor=cursor)
        except TimeoutError:
            said = f"it has not listed its tools within {timeout_s:g} s"
            raise McpUnavailable(said) from None
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools
    raise McpUnavailable(f"its list of tools has more than {_PAGES_MAX} pages")


def _tool(
    server: _Connected, listed: mcp_types.Tool, prefix: str, timeout_s: float, *, is_trusted: bool
) -> Tool | None:
    """Make a tool from a server's tool; None if no model could call it."""

    async def run(arguments: Mapping[str, object], context: ToolContext) -> ToolResult:  # noqa: ARG001 - all tools are given both
        if server.has_ended:
            return ToolResult(_GONE, is_error=True)
        return await _called(server.client, listed.name, arguments, read_timeout_s=2 * timeout_s)

    hints = listed.annotations if is_trusted else None
    try:
        return Tool(
            api_tool_name(prefix + listed.name),
            listed.description or listed.title or "",
            listed.input_schema,
            run,
            timeout_s=timeout_s,
            idempotent=hints is not None and bool(hints.idempotent_hint or hints.read_only_hint),
            risk=_risk(hints) if is_trusted else None,
        )
    except InvalidInput as error:
        _leave_out(listed, error)
        return None


def _leave_out(listed: mcp_types.Tool, error: InvalidInput) -> None:
    log_failure("tool of an MCP server left out", error, tool=storable(listed.name))


def _risk(hints: mcp_types.ToolAnnotations | None) -> Risk:
    if hints is not None and hints.read_only_hint:
        return "low"
    # By the protocol, a tool that writes may destroy unless it says otherwise.
    return "medium" if hints is not None and hints.destructive_hint is False else "high"


async def _called(
    client: Client, name: str, arguments: Mapping[str, object], *, read_timeout_s: float
) -> ToolResult:
    """Call a tool on the server. If the call is cancelled, tell the server, then raise.

    The tool's own time limit ends before `read_timeout_s`. If both ended at once, the cancellation
    could interrupt the client while it tells the server, and the server would run on.
    """
    try:
        result = await client.call_tool(name, dict(arguments), read_timeout_seconds=read_timeout_s)
    except (MCPError, InputRequiredRoundsExceededError) as error:
        said = f"{type(error).__name__}: {error_text(error)}"
        if not isinstance(error, MCPError) or error.code in _OUTCOME_UNKNOWN_CODES:
            said = f"no result: {said}; the call may have happened"
            return ToolResult(said, is_error=True, may_have_happened=True)
        return ToolResult(said, is_error=True)
    except (ValidationError, RuntimeError) as error:  # the latter if it does not fit its schema
        said = f"the call ran, but its result cannot be read: {error_text(error)}"
        return ToolResult(said, is_error=True)
    return ToolResult(_text(result), is_error=result.is_error)


def _text(result: mcp_types.CallToolResult) -> str:
    """Return a result as a text; if it has no text, its structured content as JSON."""
    if not result.content and result.structured_content is not None:
        return to_json(result.structured_content, inf_nan_mode="strings").decode()
    return storable("\n".join(map(_part, result.content)))


def _part(block: mcp_types.ContentBlock) -> str:
    match block:
        case mcp_types.TextContent(text=text):
            return text
        case mcp_types.EmbeddedResource(resource=mcp_types.TextResourceContents(text=text)):
            return text
        case mcp_types.EmbeddedResource(resource=resource):
            return f"[a file that is not shown: {resource.uri}, {resource.mime_type or 'unknown'}]"
        case mcp_types.ResourceLink(uri=uri):
            return f"[a file: {uri}; {block.description or block.title or block.name}]"
        case mcp_types.ImageContent(mime_type=mime_type):
            return f"[an image that is not shown: {mime_type}]"
        case mcp_types.AudioContent(mime_type=mime_type):
            return f"[a sound that is not shown: {mime_type}]"
