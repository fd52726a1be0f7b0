"""Mail for an actor that failed too often, and actors found after their runtime was left."""

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.runtime import Actor, Message, NotDelivered, Runtime, Supervision
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


class Explode(Message[None]):
    """Makes its actor fail once the gate is open."""


class Exploding(Actor[Explode]):
    def __init__(self, gate: anyio.Event) -> None:
        self._gate = gate

    async def receive(self, message: Explode) -> None:
        await self._gate.wait()
        raise ValueError("mine alone")


async def test_mail_that_waits_for_an_actor_that_fails_too_often_is_refused_with_that() -> None:
    gate = anyio.Event()
    async with Runtime() as runtime:
        region = runtime.region(
            "exploding", lambda _: Exploding(gate), supervision=Supervision(restarts_max=0)
        )
        heard: list[BaseException] = []

        async def ask() -> None:
            try:
                await region["key"].ask(Explode())
            except Exception as error:  # noqa: BLE001 - whatever comes is looked at
                heard.append(error)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
            await settle()
            gate.set()
    told = sorted(type(error).__name__ for error in heard)
    assert told == ["ActorFailed", "TooManyRestarts", "TooManyRestarts"]
    assert all(isinstance(error.__cause__, ValueError) for error in heard)


async def test_an_actor_that_is_found_after_its_runtime_was_left_is_stopped_at_once() -> None:
    async with Runtime() as runtime:
        region = runtime.region("late", lambda _: Exploding(anyio.Event()))
    with pytest.raises(NotDelivered):
        await region["key"].ask(Explode())
    with anyio.fail_after(60):
        await region.stop_actor("key")
