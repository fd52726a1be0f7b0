"""One streamed request to a provider: opened, read to its end, and closed in every case.

The official packages make the requests, authenticate them and raise the provider's refusals. The
stream itself is read here. The packages' own readers leave async generators to the garbage
collector when they stop before the connection ends, and always at OpenAI's closing mark; trio
warns about each of them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import anyio

from turnkeeper.runtime import Ports

from ..values.frozen import FrozenObject
from ..values.text import error_text
from ._parsing import (
    Counts,
    JsonObject,
    ModelFailure,
    SentEvents,
    explained,
    retry_after_s,
    value_at,
)
from .base import (
    MalformedHistory,
    ModelError,
    ModelRequest,
    ModelResponse,
    ModelUnavailable,
    Prices,
    ToolSpec,
)
from .messages import LLMMessages, LLMShape, to_llm_messages

__all__ = ["ByteResponse", "ProviderModel", "Reading"]

_DRAIN_TIMEOUT_S = 0.1
_CLOSE_TIMEOUT_S = 5.0
_DONE = "[DONE]"


class ByteResponse(Protocol):
    """The response of a streamed request, as the official packages return it."""

    def iter_bytes(self) -> AsyncIterator[bytes]: ...

    async def close(self) -> None: ...


class Client(Protocol):
    """The client of an official package."""

    async def close(self) -> None: ...


ClientT = TypeVar("ClientT", bound=Client)


class Reading(ABC):
    """Builds a response from the events of one stream; pure."""

    def __init__(self) -> None:
        self.is_whole = False
        """The response is complete; a stream that ends before this was cut off."""
        self.is_finished = False
        """The response is complete, and the rest of the stream can be ignored."""
        self.counts = Counts()

    @abstractmethod
    def take(self, event: JsonObject) -> str:
        """Process the next event; return the text that it adds. Raises the provider's errors."""

    @abstractmethod
    def response(self) -> ModelResponse:
        """Return the whole response without its usage; raise if it is not an answer."""


class ProviderModel(ABC, Generic[ClientT]):
    """Base of the adapters. `async with` closes the client, unless the caller gave it."""

    _shape: ClassVar[LLMShape]
    _tools_max: ClassVar[int | None] = None
    """How many tools one request may have."""

    def __init__(
        self,
        model: str,
        *,
        client: ClientT | None,
        timeout_s: float | None,
        prices: Prices | None,
        settings: Mapping[str, object],
        ports: Ports,
    ) -> None:
        self.model = model
        self._timeout_s = timeout_s
        self._client = client
        self._is_given = client is not None
        self._prices = prices
        self._settings = FrozenObject(settings)
        self._ports = ports

    @property
    def parameters(self) -> Mapping[str, object]:
        """The settings of its requests: all their fields except the view and the tools."""
        return {"api": self._shape, "model": self.model, "settings": self._settings}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close this model's own connections; a later request opens new ones."""
        if self._client is not None and not self._is_given:
            client, self._client = self._client, None
            with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                await client.close()

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        """Ask the provider once and return the model's answer."""
        began = self._ports.monotonic()
        reading = self._reading(request)
        async with self._opened(request) as stream:
            while not reading.is_finished:
                event = await stream.next()
                if event is None:
                    break
                text = reading.take(event)
                if text:
                    await write(text)
            latency_s = self._ports.monotonic() - began
        if not reading.is_whole:
            raise ModelUnavailable(self.model, "its stream was cut off")
        return replace(
            reading.response(), usage=reading.counts.usage(self.model, self._prices, latency_s)
        )

    @abstractmethod
    def _make_client(self) -> ClientT:
        """Make a client that finds its key in the environment."""

    @abstractmethod
    def _open(
        self, client: ClientT, messages: LLMMessages, tools: Sequence[ToolSpec]
    ) -> AbstractAsyncContextManager[ByteResponse]:
        """Return the streamed request, without retries; entering it sends it."""

    @abstractmethod
    def _reading(self, request: ModelRequest) -> Reading: ...

    @abstractmethod
    def _explained(self, error: Exception) -> ModelFailure:
        """Translate an exception of the package, by `_refused`, `_unreached` or `_unmade`."""

    def _and_settings(self, **parts: object) -> Mapping[str, object]:
        """Return the parts that are not empty, overridden by the settings."""
        return {**{name: part for name, part in parts.items() if part}, **self._settings}

    def _refused(self, status: int, body: object, headers: Mapping[str, str]) -> ModelFailure:
        return explained(
            self.model,
            value_at(body, "error") or body,
            status=status,
            retry_after_s=retry_after_s(headers, self._ports.now()),
        )

    def _unreached(self, error: Exception) -> ModelFailure:
        why = error.__cause__ or error
        return ModelUnavailable(self.model, f"{error_text(error)} ({type(why).__name__})")

    def _unmade(self, error: Exception) -> ModelFailure:
        return ModelError(self.model, f"{type(error).__name__}: {error_text(error)}")

    @asynccontextmanager
    async def _opened(self, request: ModelRequest) -> AsyncGenerator[_Stream, None]:
        messages = to_llm_messages(
            request.view,
            self._shape,
            model=self.model,
            is_plain=request.is_plain,
            show_author=request.show_author,
        )
        if not messages:
            raise MalformedHistory(self.model, "the view has no message")
        if self._tools_max is not None and len(request.tools) > self._tools_max:
            found = f"it has {len(request.tools)} tools, and the API takes {self._tools_max}"
            raise ModelError(self.model, found)
        try:
            if self._client is None:
                self._client = self._make_client()
            response = await self._open(self._client, messages, request.tools).__aenter__()
        except Exception as error:
            # The packages raise their own errors, and others for a missing key or an unknown
            # setting.
            raise self._explained(error) from error
        stream = _Stream(self.model, response, timeout_s=self._timeout_s, ports=self._ports)
        try:
            yield stream
        finally:
            await stream.close()


class _Stream:
    """The events of one response.

    Invariant: when `close` returns, no generator of the package or of its transport is suspended.
    Closing a generator from outside leaves the generators it reads from to the garbage collector.
    So `close` reads on instead, until the innermost ends, fails or is cancelled, which ends all.
    """

    def __init__(
        self,
        model: str,
        response: ByteResponse,
        *,
        timeout_s: float | None,
        ports: Ports,
    ) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._ports = ports
        self._response = response
        self._chunks = response.iter_bytes()
        self._sent = SentEvents()
        self._data: deque[str] = deque()

    async def next(self) -> JsonObject | None:
        """Return the next event, None at the end; `ModelUnavailable` if the connection fails.

        Pings are passed over. The package's timeout ends a silence without them; a silence with
        them ends at the first ping after the same time.
        """
        until = None if self._timeout_s is None else self._ports.monotonic() + self._timeout_s
        while (event := await self._next_of_any_kind(until)) is not None:
            if event.get("type") != "ping":
                return event
        return None

    async def _next_of_any_kind(self, until: float | None) -> JsonObject | None:
        while not self._data:
            # An event may take longer than that to come; it is no silence.
            is_between = not self._sent.is_within_event
            if until is not None and is_between and self._ports.monotonic() > until:
                found = f"its stream had no event but pings for {self._timeout_s:g} s (Timeout)"
                raise ModelUnavailable(self._model, found)
            try:
                chunk = await anext(self._chunks)
            except StopAsyncIteration:
                return None
            except Exception as error:
                # Any error of the transport; which transport depends on the package's version.
                found = f"its stream broke off: {type(error).__name__}: {error_text(error)}"
                raise ModelUnavailable(self._model, found) from error
            self._data.extend(self._sent.feed(chunk))
        data = self._data.popleft()
        if data == _DONE:
            return None
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ModelUnavailable(self._model, "its stream cannot be read") from error
        return event if isinstance(event, dict) else {}

    async def close(self) -> None:
        """Return the connection to its pool; close it if the response is not read to its end."""
        # Shielded: a cancelled request must not leave its connection open. Bounded: the other side
        # may be silent. Suppressed: the answer is complete or given up, so an error of a connection
        # that is being left changes nothing.
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(_DRAIN_TIMEOUT_S), suppress(Exception):
                async for _ in self._chunks:
                    pass
            with anyio.move_on_after(_CLOSE_TIMEOUT_S), suppress(Exception):
                await self._response.close()
