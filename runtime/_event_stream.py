"""The event stream: typed publish and subscribe, inside one process.

Publishing never waits and never fails. Each subscription has a bounded buffer. If its reader is
too slow, the oldest events are dropped, and `missed` counts them. Nothing is kept for later
subscribers. All of it belongs to the runtime's loop.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from ._backend import OneShot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["EventStream", "Subscription"]

E = TypeVar("E")


class Subscription(Generic[E]):
    """The events of one subscriber: enter it with `with`, then iterate. One reader only."""

    def __init__(self, stream: EventStream, kind: type[E], buffer_max: int) -> None:
        self.missed = 0
        """How many events were dropped: the buffer was full, or the kind's own code raised."""
        self._stream = stream
        self._kind = kind
        self._buffer: deque[E] = deque(maxlen=buffer_max)
        self._gate: OneShot[None] | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        self._stream.add(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more events; the iteration ends after those that are buffered."""
        self._is_closed = True
        self._stream.remove(self)
        self._wake()

    def offer(self, event: object) -> None:
        """Buffer an event if it is of the kind subscribed to."""
        try:
            if not isinstance(event, self._kind):
                return
        except Exception:  # noqa: BLE001 - a protocol reads the event's properties, which may raise
            self.missed += 1
            return
        if len(self._buffer) == self._buffer.maxlen:
            self.missed += 1
        self._buffer.append(event)
        self._wake()

    def __aiter__(self) -> AsyncIterator[E]:
        return self

    async def __anext__(self) -> E:
        if self._gate is not None:
            raise RuntimeError(
                "another task waits for this subscription's next event; only one may"
            )
        while not self._buffer:
            if self._is_closed:
                raise StopAsyncIteration
            self._gate = OneShot()
            try:
                await self._gate.wait()
            finally:
                self._gate = None
        return self._buffer.popleft()

    def _wake(self) -> None:
        if self._gate is not None:
            self._gate.set(None)


class EventStream:
    """The stream on which the runtime publishes its reports; applications may publish, too."""

    def __init__(self) -> None:
        # A tuple, replaced as a whole: publishing iterates while subscribers come and go.
        self._subscriptions: tuple[Subscription[Any], ...] = ()  # each its own kind
        self._is_closed = False

    def subscribe(self, kind: type[E], *, buffer_max: int = 1024) -> Subscription[E]:
        """Subscribe to events of `kind` and its subtypes, from when the `with` is entered.

        `buffer_max`: how many may wait for the reader; beyond it the oldest are dropped. Raises
        `TypeError` if `kind` is no type.
        """
        try:
            isinstance(None, kind)
        except TypeError:  # raised here, and not to the next publisher
            raise TypeError(f"kind is {kind!r}; it takes a type, or a union of types") from None
        return Subscription(self, kind, buffer_max)

    def publish(self, event: object) -> None:
        for subscription in self._subscriptions:
            subscription.offer(event)

    def add(self, subscription: Subscription[E]) -> None:
        if self._is_closed:
            subscription.close()  # nothing comes any more: its reader ends at once
        else:
            self._subscriptions = (*self._subscriptions, subscription)

    def remove(self, subscription: Subscription[E]) -> None:
        self._subscriptions = tuple(
            each for each in self._subscriptions if each is not subscription
        )

    def close(self) -> None:
        """Close all subscriptions; each reader ends after the events that it has buffered."""
        self._is_closed = True
        for subscription in self._subscriptions:
            subscription.close()
