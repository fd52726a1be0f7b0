"""Tools of an MCP server: a process over stdio, and one over HTTP on loopback."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import pytest
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp import Client, StdioServerParameters, types
from mcp.server.lowlevel import Server

from tests.actors.agents.test_tool_agent import calling, scripted, serving, until
from tests.actors.agents.test_tools import call
from tests.actors.agents.test_tools import calling as making
from turnkeeper.actors import Tool, ToolAgent, Tools
from turnkeeper.actors.agents.tool_agent import ConfirmRisky
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import AgentErrorEvent, ObservationEvent
from turnkeeper.actors.integrations import mcp
from turnkeeper.actors.integrations.mcp import McpServer, McpUnavailable, mcp_tools
from turnkeeper.actors.tool_calls import ToolCall
from turnkeeper.runtime.testing import VirtualClock

pytestmark = [pytest.mark.costly, pytest.mark.in_parts(4)]

SERVER = Path(__file__).with_name("mcp_server.py")
PAGE = Path(__file__).parents[3] / "docs" / "mcp.md"
STDIO = StdioServerParameters(command=sys.executable, args=[str(SERVER)])
WAIT_MAX_S = 240.0


@asynccontextmanager
async def over_http() -> AsyncIterator[str]:
    """The URL of a server process of its own."""
    command = [sys.executable, str(SERVER), "http"]
    async with await anyio.open_process(command, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            with anyio.fail_after(WAIT_MAX_S):
                port = int(await process.stdout.receive())
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            with suppress(ProcessLookupError):
                process.kill()


@asynccontextmanager
async def served(way: str) -> AsyncIterator[McpServer]:
    if way == "stdio":
        yield STDIO
    else:
        async with over_http() as url:
            yield url


async def one(tools: Sequence[Tool], name: str, **arguments: object) -> Any:  # noqa: ANN401 - a result
    (result,) = await call(Tools(*tools), ToolCall(name, arguments))
    return result


@pytest.mark.parametrize("way", ["stdio", "http"])
async def test_an_agent_calls_the_tools_of_a_server(way: str) -> None:
    async with served(way) as server, mcp_tools(server) as tools:
        by_name = {tool.name: tool for tool in tools}
        spec = by_name["weigh"].spec
        assert spec.description == "Weigh a parcel."
        schema: Any = spec.parameters
        assert schema["properties"]["parcel"]["description"] == "the parcel to weigh"
        size = schema["$defs"]["Size"]["properties"]
        assert size["width"]["description"] == "in millimetres"
        assert size["unit"]["enum"] == ("mm", "inch")

        parcel = {"label": "p", "size": {"width": 3, "unit": "inch"}}
        model = scripted(calling("weigh", parcel=parcel), "Done.")
        async with serving(ToolAgent(model, tools)) as chat:
            assert await (await chat.send("go")).reply() == "Done."
            events = [logged.event async for logged in chat.events(live=False)]
        results = [event for event in events if isinstance(event, ObservationEvent)]
        assert [(result.content, result.is_error) for result in results] == [("p: 3 inch", False)]

        assert (await one(tools, "fail")).content == "no such parcel"
        wrong = await one(tools, "weigh", parcel={"label": "p", "size": {"width": 0}})
        assert "parcel.size.width: it takes at least 1" in wrong.content


async def test_results_of_all_kinds_become_texts() -> None:
    async with mcp_tools(STDIO) as tools:
        count = next(tool.name for tool in tools if tool.name.startswith("shop_count_items_"))
        assert (await one(tools, count)).content.replace(" ", "").replace("\n", "") == '{"items":3}'
        assert (await one(tools, "nothing")).content == ""
        assert (await one(tools, "structure")).content == '{"a":[1]}'
        assert (await one(tools, "picture")).content == (
            "[an image that is not shown: image/png]\na cat"
        )
        silent = await one(tools, "silent_failure")
        assert (silent.content, silent.is_error) == ("", True)


async def test_hints_of_a_server_are_believed_only_if_it_is_trusted() -> None:
    for is_trusted, expected in ((False, [None] * 3), (True, ["low", "medium", "high"])):
        async with mcp_tools(STDIO, prefix="shop_", is_trusted=is_trusted) as tools:
            risks = {tool.name[:10]: tool.find_risk({}) for tool in tools}
            names = ("shop_weigh", "shop_shop_", "shop_die")
            assert [risks[name] for name in names] == expected
            weigh = next(tool for tool in tools if tool.name == "shop_weigh")
            assert weigh.is_idempotent == is_trusted


async def test_a_call_is_confirmed_like_any_other() -> None:
    async with mcp_tools(STDIO, is_trusted=True) as tools:
        model = scripted(calling("nothing"), "Done.")
        async with serving(ToolAgent(model, tools, confirm=ConfirmRisky())) as chat:
            turn = await chat.send("go")
            await until(chat, "confirmation_requested")
            await chat.reject("no")
            assert await turn.reply() == "Done."


@asynccontextmanager
async def told() -> AsyncIterator[tuple[int, Callable[[], Awaitable[bytes]]]]:
    """A port, and what waits for the next that a tool says there, up to a full stop."""
    send, receive = anyio.create_memory_object_stream[bytes](10)

    async def take(stream: SocketStream) -> None:
        async with stream:
            said = BufferedByteReceiveStream(stream)
            with suppress(anyio.IncompleteRead):
                while True:
                    await send.send(await said.receive_until(b".", 100))

    async def next_said() -> bytes:
        with anyio.fail_after(WAIT_MAX_S):
            return await receive.receive()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, take)
        yield listener.extra(SocketAttribute.local_port), next_said
        group.cancel_scope.cancel()
    send.close()
    receive.close()


@pytest.mark.parametrize("way", ["stdio", "http"])
async def test_an_interrupt_cancels_the_call_on_the_server(way: str) -> None:
    async with told() as (port, said), served(way) as server, mcp_tools(server) as tools:
        model = scripted(calling("wait", port=port), "Done.")
        async with serving(ToolAgent(model, tools)) as chat:
            turn = await chat.send("go")
            assert await said() == b"begun"
            await turn.cancel()
            assert (await turn.end()).outcome == "interrupted"
            assert await said() == b"cancelled"


async def test_a_call_that_takes_too_long_may_have_happened() -> None:
    clock = VirtualClock()
    async with told() as (port, said), mcp_tools(STDIO, timeout_s=WAIT_MAX_S) as tools:
        waiting = ToolCall("wait", {"port": port})
        async with making(Tools(*tools), waiting, ports=clock.ports()) as results:
            assert await said() == b"begun"
            await clock.advance(WAIT_MAX_S)
            assert await said() == b"cancelled"
            (result,) = await results()
    assert isinstance(result, AgentErrorEvent)
    assert result.may_have_happened
    assert "no result" in result.content


async def test_a_server_that_dies_in_a_call_leaves_a_result_that_says_so() -> None:
    async with mcp_tools(STDIO) as tools:
        for name in ("die", "nothing"):
            result = await one(tools, name)
            assert isinstance(result, AgentErrorEvent)
            assert result.content == (
                "no result: MCPError: Connection closed; the call may have happened"
            )


async def test_a_server_that_dies_over_http_fails_its_calls_alone() -> None:
    """The package's client ended with it, and cancelled the block with the application in it."""
    async with over_http() as url, mcp_tools(url) as tools:
        died, refused = [await one(tools, name) for name in ("die", "nothing")]
    assert isinstance(died, AgentErrorEvent)
    assert died.may_have_happened
    assert died.content.startswith("no result: MCPError: RemoteProtocolError: ")
    assert died.content.endswith("; the call may have happened")
    assert isinstance(refused, ObservationEvent)
    assert refused.is_error
    assert refused.content.startswith("MCPError: ConnectError: ")
    assert refused.content.endswith("; nothing happened")


JSON = {"content-type": "application/json"}
REFUSED = '{"jsonrpc": "2.0", "id": 1, "error": {"code": -32603, "message": "sold out"}}'
FORGOTTEN, TIMED_OUT, MISREAD = (
    f'{{"jsonrpc": "2.0", "id": null, "error": {{"code": {code}, "message": "no such session"}}}}'
    for code in (types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT, types.PARSE_ERROR)
)


# At an error, the HTTP package leaves its generators to the garbage collector, and trio tells so.
@pytest.mark.filterwarnings("ignore:Async generator 'http:ResourceWarning")
@pytest.mark.parametrize(
    ("status", "headers", "body", "said", "may_have_happened"),
    [
        (502, {"content-type": "text/html"}, "<html>", "status 502", True),
        (504, JSON, '{"message": "timed out"}', "status 504", True),
        (500, JSON, REFUSED, "sold out", False),
        (429, {"content-type": "text/plain"}, "later", "an error response", False),
        (400, JSON, FORGOTTEN, "no such session", False),
        (404, JSON, TIMED_OUT, "no such session", False),
        (400, JSON, MISREAD, "no such session", False),
        (408, JSON, TIMED_OUT, "no such session", True),
        (502, JSON, FORGOTTEN, "no such session", True),
        (200, JSON, '{"jsonrpc": "2.0", "id": 1, "res', "Failed to parse JSON", True),
        (200, {"content-type": "text/event-stream"}, "data: {\n\n", "Failed to parse SSE", True),
        (200, {**JSON, "content-encoding": "gzip"}, "plain", "DecodingError", True),
        (200, {"content-type": "Application/JSON", "content-length": "9"}, "{", "Remote", True),
        (307, {"location": "/mcp", "content-length": "9"}, "cut", "Remote", True),
        (200, {"content-type": "text/html"}, "<html>", "status 200 and no message", True),
        (202, {}, "", "status 202 and no message", True),
    ],
)
async def test_a_bad_answer_over_http_fails_its_call_alone_and_the_call_may_have_happened(
    status: int, headers: dict[str, str], body: str, said: str, *, may_have_happened: bool
) -> None:
    """A proxy says 502 or 504 if the server has ended, or is still busy, with the call begun."""
    async with over_http() as url, mcp_tools(url) as tools:
        result = await one(tools, "answer", status=status, headers=headers, body=body)
        later = await one(tools, "nothing")
    assert said in result.content
    assert isinstance(result, AgentErrorEvent) == may_have_happened
    assert ("the call may have happened" in result.content) == may_have_happened
    assert (later.content, later.is_error) == ("", False)


async def test_a_call_for_which_no_thread_can_be_started_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name is looked up in a thread. Without one, the connection ended for all later calls."""

    async def send(*_: object, **__: object) -> httpx2.Response:
        raise RuntimeError("can't start new thread")

    async with over_http() as url, mcp_tools(url) as tools:
        with monkeypatch.context() as without:
            without.setattr(httpx2.AsyncClient, "send", send)
            result = await one(tools, "nothing")
        later = await one(tools, "nothing")
    assert result.may_have_happened
    assert "RuntimeError: can't start new thread" in result.content
    assert (later.content, later.is_error) == ("", False)


@pytest.mark.filterwarnings("ignore:Async generator 'http:ResourceWarning")  # as above
async def test_an_answer_that_is_too_large_is_not_read_to_its_end() -> None:
    """A gigabyte of zeros is a megabyte on the wire."""
    zeros = gzip.compress(bytes(mcp.ANSWER_BYTES_MAX + 1)).decode("latin-1")
    headers = {**JSON, "content-encoding": "gzip"}
    async with over_http() as url, mcp_tools(url) as tools:
        result = await one(tools, "answer", status=200, headers=headers, body=zeros)
        later = await one(tools, "nothing")
    assert result.may_have_happened
    assert "AnswerTooLarge: the answer has more than 33,554,432 bytes" in result.content
    assert (later.content, later.is_error) == ("", False)


@pytest.mark.filterwarnings("ignore:Async generator 'http:ResourceWarning")  # as above
async def test_a_large_picture_in_a_stream_is_read() -> None:
    """Servers answer with a stream by default, and the package's client reads a MiB of an event."""
    picture = {"type": "image", "data": "A" * (3 << 20), "mimeType": "image/png"}
    result = {"resultType": "complete", "content": [picture]}
    message = {"jsonrpc": "2.0", "id": 1, "result": result}
    headers = {"content-type": "text/event-stream"}
    async with over_http() as url, mcp_tools(url) as tools:
        body = f"data: {json.dumps(message)}\n\n"
        answered = await one(tools, "answer", status=200, headers=headers, body=body)
    assert "image/png" in answered.content


async def test_a_client_over_http_that_loses_its_server_fails_its_calls_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It cancels the task that has entered it: that was the one of the block."""
    async with over_http() as url, mcp_tools(Client(url)) as tools:
        died, later = [await one(tools, name) for name in ("die", "nothing")]
        await anyio.lowlevel.checkpoint()
    assert isinstance(died, AgentErrorEvent)
    assert died.may_have_happened
    assert died.content == "no result: MCPError: Connection closed; the call may have happened"
    assert isinstance(later, ObservationEvent)
    assert later.is_error
    assert later.content == (
        "the connection to the tool's server was closed before the call; nothing happened"
    )
    (line,) = (
        record.getMessage()
        for record in caplog.records
        # asyncio warns, too, if the end of the server's process was noticed elsewhere.
        if record.levelname == "WARNING" and record.name.startswith("turnkeeper")
    )
    assert "connection to an MCP server failed" in line


@pytest.mark.parametrize("way", ["stdio", "http"])
async def test_a_call_ends_as_its_block_is_left_and_a_later_one_does_nothing(way: str) -> None:
    results: list[Any] = []

    async def wait(tools: Sequence[Tool], port: int) -> None:
        results.append(await one(tools, "wait", port=port))

    async with told() as (port, said), served(way) as server:
        with anyio.fail_after(WAIT_MAX_S):
            async with anyio.create_task_group() as group, mcp_tools(server) as tools:
                group.start_soon(wait, tools, port)
                assert await said() == b"begun"
            assert await said() == b"cancelled"
            await wait(tools, port)

    assert [result.content for result in results] == [
        "no result: MCPError: Connection closed; the call may have happened",
        "the connection to the tool's server was closed before the call; nothing happened",
    ]
    assert isinstance(results[0], AgentErrorEvent)
    assert results[0].may_have_happened


@pytest.mark.parametrize(
    ("server", "name"),
    [
        (StdioServerParameters(command="/nowhere/server"), "/nowhere/server"),
        (
            StdioServerParameters(command=sys.executable, args=["-c", "raise SystemExit"]),
            sys.executable,
        ),
        ("http://user:key@127.0.0.1:9/mcp?key=secret", "127.0.0.1:9"),
    ],
)
async def test_a_server_that_cannot_be_had_is_unavailable(server: McpServer, name: str) -> None:
    said = re.escape(f"no tools from the MCP server {name}: ")
    with pytest.raises(McpUnavailable, match=said):
        async with mcp_tools(server, timeout_s=WAIT_MAX_S):
            raise AssertionError


async def test_a_client_whose_server_never_answers_is_unavailable_as_it_is_opened() -> None:
    said = "no tools from the MCP server: it was not open within 0.01 s; nothing happened"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system takes the connections
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"
        with pytest.raises(McpUnavailable, match=said):
            async with mcp_tools(Client(url), timeout_s=0.01):
                raise AssertionError


async def test_a_client_whose_server_never_lists_its_tools_is_unavailable() -> None:
    async def page(*_: object) -> types.ListToolsResult:
        await anyio.sleep_forever()
        raise AssertionError

    # As it is opened, or more often as it lists its tools.
    with pytest.raises(McpUnavailable, match=r"MCP server: it .* within 1 s"):
        async with mcp_tools(Client(Server("lists", on_list_tools=page)), timeout_s=1.0):
            raise AssertionError


@pytest.mark.parametrize(
    ("server", "timeout_s", "said"),
    [
        (
            "python server.py",
            1.0,
            "a text that is not a URL; it takes a URL, StdioServerParameters",
        ),
        (["python", "server.py"], 1.0, "server is a list"),
        (StdioServerParameters(command="python"), 0.0, "0.0; it takes seconds above 0"),
        (StdioServerParameters(command="python"), "3", "'3'; it takes seconds above 0"),
    ],
)
async def test_what_is_no_server_is_refused_with_what_to_give(
    server: McpServer, timeout_s: float, said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        async with mcp_tools(server, timeout_s=timeout_s):
            pytest.fail("there is no server")


async def test_a_server_is_trusted_by_nothing_but_true() -> None:
    no: Any = "no"
    with pytest.raises(InvalidInput, match="is_trusted is a str; it takes True or False"):
        async with mcp_tools("https://a.example", is_trusted=no):
            pytest.fail("it would have been trusted")


def listing(tools: Sequence[types.Tool], cursor: str | None = None) -> Client:
    """Return a client of a server that gives each page of its list like this."""

    async def page(*_: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=list(tools), next_cursor=cursor)

    return Client(Server("lists", on_list_tools=page))


async def test_of_two_tools_of_one_name_the_second_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema = {"type": "object"}
    first, second, other = (
        types.Tool(name=name, description=text, input_schema=schema)
        for name, text in (("look up", "the first"), ("look up", "the second"), ("other", ""))
    )
    async with mcp_tools(listing([first, second, other])) as tools:
        Tools(*tools)  # takes no two of one name
        assert [tool.spec.description for tool in tools] == ["the first", ""]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "tool of an MCP server left out" in line


async def test_a_result_that_does_not_fit_its_schema_tells_that_the_call_ran(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema = {"type": "object", "properties": {"left": {"type": "integer"}}}
    stock = types.Tool(name="stock", input_schema={"type": "object"}, output_schema=schema)

    async def page(*_: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[stock])

    async def answer(*_: object) -> types.CallToolResult:
        return types.CallToolResult(content=[], structured_content={"left": "a secret"})

    server = Server("stock", on_list_tools=page, on_call_tool=answer)
    async with mcp_tools(Client(server)) as tools:
        result = await one(tools, "stock")
    assert result.is_error
    assert result.content.startswith("the call ran, but its result cannot be read: Invalid")
    assert "secret" not in caplog.text


async def test_a_server_that_asks_for_input_without_an_end_is_not_said_to_have_run_the_call() -> (
    None
):
    async def page(*_: object) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[types.Tool(name="ask", input_schema={"type": "object"})]
        )

    async def answer(*_: object) -> types.InputRequiredResult:
        return types.InputRequiredResult(request_state="more")

    server = Server("asking", on_list_tools=page, on_call_tool=answer)
    async with mcp_tools(Client(server, input_required_max_rounds=1)) as tools:
        result = await one(tools, "ask")
    assert isinstance(result, AgentErrorEvent)
    assert result.content.startswith("no result: InputRequiredRoundsExceededError")


async def test_a_list_without_an_end_is_cut_off_and_said_once() -> None:
    said = "^no tools from the MCP server: its list of tools has more than 100 pages; nothing"
    with pytest.raises(McpUnavailable, match=said) as caught:
        async with mcp_tools(listing([], "again")):
            raise AssertionError
    assert str(caught.value).count("nothing happened") == 1


async def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with mcp_tools(STDIO):
            raise KeyError("mine")


def test_without_the_package_the_import_names_the_extra() -> None:
    code = "import sys; sys.modules['mcp'] = None; import turnkeeper.actors.integrations.mcp"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "install turnkeeper[mcp]" in ran.stderr


def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    server, program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (output,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "shop.py").write_text(server)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_MAX_S,
    )
    assert (ran.returncode, ran.stdout) == (0, output), ran.stderr
