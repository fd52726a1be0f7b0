"""Actors that take their messages in batches: what a batch holds, and in which order."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

import anyio
import pytest

from turnkeeper.runtime import (
    Actor,
    ActorFailed,
    Delivery,
    Failure,
    Message,
    NotAnsweredInTime,
    NotStartedInTime,
    Ref,
    Runtime,
    Terminated,
    TurnkeeperError,
)
from turnkeeper.runtime.testing import VirtualClock, settle

pytestmark = pytest.mark.anyio


class Note(Message[str]):
    """Is answered by its text, in the batch that it comes with."""

    def __init__(self, text: str) -> None:
        self.text = text


class Clerk(Actor[object]):
    """Keeps what each batch held; waits in its first batch until the gate opens."""

    batch_max = 8

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = anyio.Event()

    async def receive_batch(self, deliveries: Sequence[Delivery[object]]) -> None:
        found = [each.message for each in deliveries]
        self.batches.append([m.text if isinstance(m, Note) else type(m).__name__ for m in found])
        if len(self.batches) == 1:
            await self.gate.wait()
        for each in deliveries:
            if isinstance(each.message, Note):
                each.reply(each.message.text)


async def test_a_batch_holds_no_ask_whose_asker_has_left() -> None:
    clerk = Clerk()
    async with Runtime() as runtime, anyio.create_task_group() as group:
        ref = runtime.spawn(lambda: clerk, name="clerk")
        group.start_soon(ref.ask, Note("first"))
        await settle()
        leaving = anyio.CancelScope()

        async def ask_and_leave() -> None:
            with leaving:
                await ref.ask(Note("abandoned"))

        group.start_soon(ask_and_leave)
        await settle()
        group.start_soon(ref.ask, Note("last"))
        await settle()
        leaving.cancel()
        await settle()

        clerk.gate.set()
        await settle()

        assert clerk.batches == [["first"], ["last"]]


async def test_a_late_ask_of_a_batch_may_have_been_handled_and_one_in_the_mailbox_was_not() -> None:
    """Told that nothing happened, its asker could send again what an owner has written."""
    clock, clerk = VirtualClock(), Clerk()
    told: dict[str, type[Exception]] = {}
    async with Runtime(ports=clock.ports()) as runtime, anyio.create_task_group() as group:
        ref = runtime.spawn(lambda: clerk, name="clerk")

        async def ask(text: str) -> None:
            try:
                await ref.ask(Note(text), timeout=1.0)
            except TurnkeeperError as late:
                told[text] = type(late)

        group.start_soon(ask, "in the batch")
        await settle()
        group.start_soon(ask, "in the mailbox")
        await clock.advance(2.0)

        clerk.gate.set()
        await settle()

    assert told == {"in the batch": NotAnsweredInTime, "in the mailbox": NotStartedInTime}
    assert clerk.batches == [["in the batch"]]


async def test_a_batch_begins_with_its_control_messages() -> None:
    clerk = Clerk()

    class Mortal(Actor[object]):
        """Does nothing, until it is stopped."""

        def receive(self, message: object) -> None:
            """Take anything."""

    async with Runtime() as runtime, anyio.create_task_group() as group:
        ref: Ref[object] = runtime.spawn(lambda: clerk, name="clerk")
        mortal = runtime.spawn(Mortal, name="mortal")
        mortal.watch(ref)
        group.start_soon(ref.ask, Note("first"))
        await settle()

        await ref.tell(Note("mail"))
        await mortal.stop()
        await settle()
        clerk.gate.set()
        await settle()

        assert clerk.batches == [["first"], [Terminated.__name__, "mail"]]


class Careless(Actor[object]):
    """Its handler is a `def`, which fails before it has made its coroutine."""

    def receive_batch(self, deliveries: Sequence[Delivery[object]]) -> Coroutine[Any, Any, None]:
        return next(self._answer(each) for each in deliveries if isinstance(each.message, str))

    async def _answer(self, delivery: Delivery[object]) -> None:
        delivery.reply("answer")


async def test_a_stop_iteration_of_the_handler_is_a_failure() -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(Careless, name="careless")
        with runtime.events.subscribe(Failure) as failures:
            with pytest.raises(ActorFailed) as failed:
                await ref.ask(Note("first"))
            assert isinstance(failed.value.__cause__, StopIteration)
            assert (await anext(failures)).error is failed.value.__cause__


async def test_the_bound_of_a_batch_is_that_of_the_class() -> None:
    clerk = Clerk()
    clerk.gate.set()
    vars(clerk)["batch_max"] = 0
    async with Runtime() as runtime:
        ref = runtime.spawn(lambda: clerk, name="clerk")
        assert await ref.ask(Note("first")) == "first"
