"""The HTTP client between nodes, against servers that are no nodes, such as a proxy."""

from __future__ import annotations

import threading

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from turnkeeper.actors.gateway.node_client import Broken, NodeClient, Unreachable

BOUND_S = 60.0


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "lines", "is_whole"),
    [(b"one\ntwo\n", [b"one", b"two"], True), (b"one\ntw", [b"one"], False)],
)
async def test_a_line_that_a_closed_connection_cut_off_is_not_a_clean_end(
    body: bytes, lines: list[bytes], *, is_whole: bool
) -> None:
    """A proxy that answers in HTTP/1.0 closes the connection at the end, and if it fails."""

    async def answer(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.0 200 OK\r\n\r\n" + body)

    client = NodeClient(monotonic=anyio.current_time, answer_s=BOUND_S)
    received: list[bytes] = []
    is_broken = False
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(SocketAttribute.local_port)
        async with anyio.create_task_group() as group:
            group.start_soon(listener.serve, answer)
            try:
                async with client.lines(
                    f"http://127.0.0.1:{port}", "/pieces", [], b"{}", silence_s=BOUND_S
                ) as (_, found):
                    async for line in found:
                        received.append(line)  # noqa: PERF401 - kept if it breaks
            except Broken:
                is_broken = True
            group.cancel_scope.cancel()

    assert received == lines
    assert is_broken is not is_whole


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_name_that_no_thread_can_look_up_is_unreachable(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The caller got an error of no type, and its client 500, although nothing had been sent."""

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        client = NodeClient(monotonic=anyio.current_time, answer_s=BOUND_S)
        with monkeypatch.context() as without:
            without.setattr(threading.Thread, "start", no_thread)
            without.setattr("trio._core._thread_cache.THREAD_CACHE._idle_workers", {})
            with pytest.raises(Unreachable):
                await client.post("http://localhost:1", "/ask", [], b"{}")

    anyio.run(main, backend=backend)
