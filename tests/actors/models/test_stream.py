"""A stream that is left early is closed, whatever its transport makes of that by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from turnkeeper.actors.models._streaming import _Stream
from turnkeeper.actors.models.base import ModelUnavailable
from turnkeeper.runtime import Ports

pytestmark = pytest.mark.anyio


class Response:
    """One event, and then silence, or an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_closed = False
        self.is_unwound = False
        self._error = error

    async def iter_bytes(self) -> AsyncIterator[bytes]:
        try:
            yield b"data: {}\n\n"
            if self._error is not None:
                raise self._error
            await anyio.sleep_forever()
        finally:
            self.is_unwound = True

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.is_closed = True


async def test_a_stream_that_is_left_while_more_may_come_is_unwound_and_closed() -> None:
    response = Response()
    stream = _Stream("m", response, timeout_s=None, ports=Ports())
    assert await stream.next() == {}

    await stream.close()

    assert response.is_unwound
    assert response.is_closed


async def test_a_stream_that_was_never_read_is_closed() -> None:
    response = Response()
    await _Stream("m", response, timeout_s=None, ports=Ports()).close()
    assert response.is_closed


async def test_a_cancellation_between_two_events_does_not_keep_it_open() -> None:
    response = Response()
    stream = _Stream("m", response, timeout_s=None, ports=Ports())
    with anyio.CancelScope() as scope:
        try:
            await stream.next()
            scope.cancel()
            await anyio.lowlevel.checkpoint()
        finally:
            await stream.close()
    assert scope.cancelled_caught
    assert response.is_unwound
    assert response.is_closed


async def test_whatever_the_transport_raises_is_a_transient_failure_and_closes_it() -> None:
    response = Response(OSError("gone"))
    stream = _Stream("m", response, timeout_s=None, ports=Ports())
    await stream.next()
    with pytest.raises(ModelUnavailable, match="OSError: gone"):
        await stream.next()
    await stream.close()
    assert response.is_closed


class Pinging(Response):
    """An event a day, and pings each second in between."""

    def __init__(self, ping: bytes, clock: list[float], pings: int) -> None:
        super().__init__()
        self._ping, self._clock, self._pings = ping, clock, pings

    async def iter_bytes(self) -> AsyncIterator[bytes]:
        for _ in range(2):
            yield b'data: {"type": "text"}\n\n'
            for _ in range(self._pings):
                self._clock[0] += 1.0
                yield self._ping


@pytest.mark.parametrize("ping", [b": ping\n\n", b'event: ping\ndata: {"type": "ping"}\n\n'])
async def test_a_provider_that_only_pings_is_unavailable_after_the_timeout(ping: bytes) -> None:
    clock = [0.0]
    ports = Ports(monotonic=lambda: clock[0])
    stream = _Stream("m", Pinging(ping, clock, 100), timeout_s=10.0, ports=ports)
    assert await stream.next() == {"type": "text"}
    with pytest.raises(ModelUnavailable, match="no event but pings for 10 s"):
        await stream.next()
    assert clock[0] == 11.0
    await stream.close()

    for pings, timeout_s in ((9, 10.0), (100, None)):
        response = Pinging(ping, clock, pings)
        stream = _Stream("m", response, timeout_s=timeout_s, ports=ports)
        events = [await stream.next() for _ in range(3)]
        assert events == [{"type": "text"}, {"type": "text"}, None]
        await stream.close()


class Slow(Response):
    """One event, in chunks that come a second apart."""

    def __init__(self, clock: list[float], event: bytes) -> None:
        super().__init__()
        self._clock, self._event = clock, event

    async def iter_bytes(self) -> AsyncIterator[bytes]:
        for place in range(len(self._event)):
            self._clock[0] += 1.0
            yield self._event[place : place + 1]


@pytest.mark.parametrize(
    "event", [b'data: {"type": "text"}\n\n', b'data: {\ndata: "type": "text"}\n\n']
)
async def test_an_event_that_takes_longer_than_the_timeout_to_come_is_no_silence(
    event: bytes,
) -> None:
    clock = [0.0]
    ports = Ports(monotonic=lambda: clock[0])
    stream = _Stream("m", Slow(clock, event), timeout_s=10.0, ports=ports)
    assert await stream.next() == {"type": "text"}
    assert clock[0] > 20.0
    await stream.close()
