"""Actors that several tests need."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from turnkeeper.runtime import Actor, Message


@dataclass(frozen=True)
class Get(Message[int]):
    pass


@dataclass(frozen=True)
class Add:
    amount: int = 1


@dataclass(frozen=True)
class Fail(Message[None]):
    error: BaseException


@dataclass(frozen=True)
class Block(Message[str]):
    """Occupies its actor until the gate opens; says that it has begun."""

    gate: anyio.Event
    begun: anyio.Event


@dataclass(frozen=True)
class Run(Message[object]):
    """Runs a function inside the actor."""

    function: Callable[[Actor], Awaitable[object]]


class Counter(Actor):
    """Counts, fails and blocks on command. `log` outlives its incarnations."""

    def __init__(self, log: list[object] | None = None) -> None:
        self.count = 0
        self.log = log if log is not None else []

    async def receive(self, message: object) -> object:
        match message:
            case Get():
                return self.count
            case Add(amount):
                self.count += amount
                self.log.append(message)
            case Fail(error):
                raise error
            case Block(gate, begun):
                begun.set()
                await gate.wait()
                return "unblocked"
            case Run(function):
                return await function(self)
            case _:
                self.log.append(message)
        return None


class SyncCounter(Actor):
    """As `Counter`, with a handler that is a `def`."""

    def __init__(self) -> None:
        self.count = 0

    def receive(self, message: object) -> object:
        match message:
            case Get():
                return self.count
            case Add(amount):
                self.count += amount
            case Fail(error):
                raise error
            case _:
                pass
        return None


async def block(ref: object) -> anyio.Event:
    """Occupy an actor; it goes on when the event that this returns is set."""
    gate, begun = anyio.Event(), anyio.Event()
    await ref.tell(Block(gate, begun))  # type: ignore[attr-defined]
    await begun.wait()
    return gate
