"""What a user of `turnkeeper.runtime` may write; the type checker must find nothing here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_type

from turnkeeper.runtime import (
    Actor,
    Delivery,
    Message,
    Portal,
    Ref,
    Region,
    Runtime,
    Subscription,
    Terminated,
)


@dataclass(frozen=True, slots=True)
class Get(Message[int]):
    pass


@dataclass(frozen=True, slots=True)
class Rename(Message[None]):
    name: str


class Counter(Actor[Get | Rename]):
    def receive(self, message: Get | Rename) -> int | None:
        return 1 if isinstance(message, Get) else None


class AsyncCounter(Actor[Get]):
    async def receive(self, message: Get) -> int:
        del message
        return 1


class Batching(Actor[Get]):
    batch_max = 16

    async def receive_batch(self, deliveries: Sequence[Delivery[Get]]) -> None:
        for delivery in deliveries:
            assert_type(delivery.message, Get)
            delivery.reply(1)


class Watcher(Actor[Terminated]):
    def receive(self, message: Terminated) -> None:
        assert_type(message.error, BaseException | None)


class Untyped(Actor):
    def receive(self, message: str) -> str:
        return message


async def use(runtime: Runtime, portal: Portal) -> None:
    counter = runtime.spawn(Counter, name="counter")
    assert_type(counter, Ref[Get | Rename])
    assert_type(await counter.ask(Get()), int)
    await counter.ask(Rename("b"), timeout=1.0)
    await counter.tell(Get())

    region = runtime.region("counters", lambda _: AsyncCounter())
    assert_type(region, Region[Get])
    assert_type(await region["a"].ask(Get()), int)

    # A ref that takes more is a ref that takes less.
    narrow: Ref[Get] = counter
    await narrow.tell(Get())

    counter.watch(runtime.spawn(Watcher, name="watcher"))
    assert_type(portal.ask(counter, Get()), int)
    with runtime.events.subscribe(Terminated) as events:
        assert_type(events, Subscription[Terminated])
        async for event in events:
            assert_type(event, Terminated)
    await runtime.spawn(Untyped, name="untyped").tell("anything")
